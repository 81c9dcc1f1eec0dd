"""The upper half of `gpuguard top`: each device with bars, limits, alarm colours, history, state and claims.

One line per device (compact) or three (full).  A number that is not known is shown as n/a, without a bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuguard.device_state import FREE, DeviceUse, model_name
from gpuguard.model import Device
from gpuguard.sanitize import neutralise
from gpuguard.top.scene import SLOWDOWN_MARGIN, History, Scene, ScreenLine, ScreenView, Thresholds
from gpuguard.units import format_duration, format_rounded
from gpuguard.views.charts import Part, alarm, bar, fitted, sparkline
from gpuguard.views.text import shorten
from gpuguard.views.who import LABELS

FULL_LINES = 3
_INDENT = 5
_WIDEST_CELL = 60  # columns of a meter: more of them tell no more
_WIDE = 150  # columns from which on a compact line has wide bars and its history, and still says who has it


@dataclass(frozen=True)
class BarMeter:
    """One number of a device: what it is called, how full it is, in words, its colour."""

    label: str
    share: float | None
    words: str
    short: str
    colour: str
    metric: str
    top: float  # of its history


def device_lines(
    scene: Scene, history: History, view: ScreenView, uses: Sequence[DeviceUse], mode: str, width: int
) -> list[ScreenLine]:
    """The lines of the devices *uses*, in *mode* "full" or "compact"."""
    lines: list[ScreenLine] = []
    for use in uses:
        if mode == "full" and not use.device.parent_uuid:
            lines += _full(scene, history, view, use, width)
        else:
            lines.append(_compact(scene, history, view, use, width))
    return lines


def folded(uses: Sequence[DeviceUse]) -> tuple[list[DeviceUse], str]:
    """*uses* without the whole devices that are free, and which those are: ``"free: 5-12, 40"``."""
    kept = [use for use in uses if use.state != FREE or use.device.parent_uuid]
    free = [use.device.index for use in uses if use.state == FREE and not use.device.parent_uuid]
    return kept, f"{len(free)} free: {ranges(free)}" if free else ""


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 8] -> "0-2,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _full(scene: Scene, history: History, view: ScreenView, use: DeviceUse, width: int) -> list[ScreenLine]:
    device, meters = use.device, _meters(use.device, scene.thresholds)
    heading = f"{device.label:>4} {neutralise(model_name(device))}  "
    name: list[Part] = [(heading, "bold"), *_state(scene, use)]
    cell = min(_WIDEST_CELL, max(12, (width - _INDENT - 2 * (len(meters) - 1)) // len(meters)))
    values: list[Part] = [(" " * _INDENT, "")]
    rings = history.devices.get(device.uuid, {})
    past: list[Part] = [(" " * _INDENT, "")]
    for number, meter in enumerate(meters):
        gap: list[Part] = [("  ", "")] if number else []
        words = meter.words if cell >= 30 else meter.short
        room = cell - 4 - len(words) - 1
        drawn = bar(meter.share, room, meter.colour, ascii_only=view.ascii_only) if room > 0 else []
        parts: list[Part] = [(f"{meter.label} ", "dim"), *drawn, (" ", ""), (words, meter.colour)]
        values += [*gap, *fitted(parts, cell)]
        line = sparkline(rings.get(meter.metric, ()), cell - 4, meter.top, ascii_only=view.ascii_only)
        past += [*gap, ("    ", ""), (line, "faint")]
    shown = (name, values, past) if view.past else (name, values)
    return [ScreenLine(tuple(fitted(parts, width))) for parts in shown]


def _compact(scene: Scene, history: History, view: ScreenView, use: DeviceUse, width: int) -> ScreenLine:
    device = use.device
    memory, busy, heat, power = _meters(device, scene.thresholds)
    wide, roomy = width >= _WIDE, width >= 100
    parts: list[Part] = [(f"{device.label:>4} ", "bold")]
    if roomy:
        parts += fitted([(shorten(neutralise(model_name(device)), 22), "")], 23)
    for meter, size, room in ((memory, 20 if wide else 8, 13 if roomy else 9), (busy, 12 if wide else 6, 5)):
        parts += bar(meter.share, size, meter.colour, ascii_only=view.ascii_only)
        parts.append((f" {meter.words if roomy else meter.short:<{room}}", meter.colour))
    if wide and view.past:
        past = history.devices.get(device.uuid, {}).get("utilization", ())
        line = sparkline(past, max(10, min(40, (width - 110) // 2)), 1.0, ascii_only=view.ascii_only)
        parts += [(f"{line} ", "faint")]
    parts += [(f"{heat.short:>4} ", heat.colour), (f"{power.words if roomy else power.short:<9} ", power.colour)]
    parts += _state(scene, use)
    return ScreenLine(tuple(fitted(parts, width)))


def _meters(device: Device, limits: Thresholds) -> tuple[BarMeter, BarMeter, BarMeter, BarMeter]:
    """Of memory, utilization, temperature and power."""
    used, total = device.memory_used, device.memory_total
    share = used / total if used is not None and total else None
    bad = limits.memory_share
    if limits.memory is not None and total:
        bad = min(limits.memory / total, bad or 1.0)
    colour = alarm(share, None if bad is None else bad * 0.9, bad, "cyan")
    memory = BarMeter("MEM", share, _of(used, total, "GiB"), _of(used, total, "G"), colour, "memory", 1.0)

    busy, words = device.utilization, format_rounded(device.utilization, "%")
    share, colour = (None, "dim") if busy is None else (busy / 100, "green")
    utilization = BarMeter("UTL", share, words, words, colour, "utilization", 1.0)
    return memory, utilization, _temperature(device, limits), _power(device, limits)


def _temperature(device: Device, limits: Thresholds) -> BarMeter:
    value, slowdown = device.temperature, device.temperature_slowdown
    bad = limits.temperature if limits.temperature is not None else slowdown
    colour = alarm(value, None if bad is None else bad - SLOWDOWN_MARGIN, bad)
    top = slowdown or 100.0
    short = format_rounded(value, "C")
    words = short if value is None or slowdown is None else f"{value:.0f}/{slowdown:.0f}C"
    return BarMeter("TMP", None if value is None else value / top, words, short, colour, "temperature", top)


def _power(device: Device, limits: Thresholds) -> BarMeter:
    draw, limit = device.power_draw, device.power_limit
    bad = limits.power
    if limits.power_share is not None and limit:
        bad = min(limits.power_share * limit, bad or limit * limits.power_share)
    # A busy device runs at its limit: that is no alarm, only beyond it something is wrong.
    over = None if limit is None else limit * 1.05
    colour = alarm(draw, bad if bad is not None else limit, bad if bad is not None else over)
    words = format_rounded(draw, "W") if draw is None or limit is None else f"{draw:.0f}/{limit:.0f}W"
    share = draw / limit if draw is not None and limit else None
    return BarMeter("PWR", share, words, words, colour, "power", limit or 1)


def _state(scene: Scene, use: DeviceUse) -> list[Part]:
    """``"in use: alice (ablation 3) 2h"``."""
    words, colour = LABELS[use.state]
    parts: list[Part] = [(words, colour)]
    if use.reason:
        parts.append((f" ({neutralise(use.reason)})", colour))
    for number, held in enumerate(use.claims):
        record = held.record
        since = "" if record.since is None else f" {format_duration(max(0.0, scene.snapshot.taken_at - record.since))}"
        note = f' "{neutralise(record.note)}"' if record.note else ""
        remarks = f"{', orphaned' if held.orphaned else ''}{', stopped' if held.stopped else ''}"
        parts.append((f"{', ' if number else ': '}{neutralise(held.user or 'unknown')}{since}{note}{remarks}", ""))
    return parts


def _of(used: int | None, total: int | None, unit: str) -> str:
    if used is None or not total:
        return "n/a"
    return f"{used / 2**30:.1f}/{total / 2**30:.0f}{unit}"
