"""The upper half of `gpuguard top`: each device with bars, limits, alarm colours, history, state and claims.

Each device has a row of a table (compact) or three lines (full).  A number that is not known is shown as n/a, without a
bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuguard.device_state import FREE, DeviceUse, model_name, vendor_of
from gpuguard.locale import _, translated
from gpuguard.model import CLOCKS, ECC, WHO_FIELDS, Device
from gpuguard.sanitize import display_width, neutralise
from gpuguard.tables import padded, shorten
from gpuguard.top.scene import SLOWDOWN_MARGIN, History, Scene, ScreenLine, ScreenView, Thresholds
from gpuguard.units import NOT_AVAILABLE, format_duration, format_ranges, format_rounded
from gpuguard.views.charts import Part, alarm, bar, fitted, sparkline
from gpuguard.views.columns import WIDE, WIDEST, DeviceColumn, top_columns
from gpuguard.views.who import LABELS

FULL_LINES = 3
_INDENT = 5
_WIDEST_CELL = 60  # columns of a meter: more of them tell no more
_ROOMY = 100  # a screen with so many columns has room for bandwidth, fans and limits in the table
_WITH_PAST = 150  # a screen with so many columns has room for the past as well
_STATE = 32  # columns that the state should have
_LEAST_BARS = 10  # columns that both bars should have: numbers that would leave fewer are left out


def fields_shown(width: int) -> frozenset[str]:
    """Return the field groups beside model.WHO_FIELDS for which a screen of so many columns has room."""
    groups = {column.group for column in top_columns(width) if column.group}
    return frozenset(groups | {CLOCKS, ECC} if width >= WIDE else groups) - WHO_FIELDS


@dataclass(frozen=True)
class BarMeter:
    """One number of a device: its label, how full its bar is, its value in words, and its colour."""

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
    """Return the lines of the devices *uses*, in *mode* "full" or "compact"."""
    columns = TableColumns.of([use.device for use in uses], view, width)
    lines = [columns.header(width)] if uses and mode != "full" else []
    for use in uses:
        if mode == "full" and not use.device.parent_uuid:
            lines += _full(scene, history, view, use, width)
        else:
            lines.append(ScreenLine(tuple(fitted(_row(scene, history, view, use, columns), width))))
    return lines


def folded(uses: Sequence[DeviceUse]) -> tuple[list[DeviceUse], str]:
    """Return *uses* without the whole devices that are free, and a text that names those: ``"9 free: 5-12,40"``."""
    kept = [use for use in uses if use.state not in FREE or use.device.parent_uuid]
    free = [use.device.index for use in uses if use.state in FREE and not use.device.parent_uuid]
    return kept, _("{free} free: {ranges}").format(free=len(free), ranges=format_ranges(free)) if free else ""


def _full(scene: Scene, history: History, view: ScreenView, use: DeviceUse, width: int) -> list[ScreenLine]:
    device, meters = use.device, _meters(use.device, scene.thresholds)
    label = (f"{device.label:>4} ", f"bold {LABELS[use.state][1]}".strip())
    numbers = "".join(f"  {words}" for words in further_numbers(device, width))
    name: list[Part] = [label, (f"{neutralise(model_name(device))}  ", "bold"), *_state(scene, use), (numbers, "dim")]
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


def further_numbers(device: Device, width: int) -> list[str]:
    """Return the known numbers of a device that have no meter, with their names, the most important ones first."""
    percent = {"MBW": device.memory_utilization, _("fan"): device.fan_speed}
    words = [f"{name} {format_rounded(value, '%')}" for name, value in percent.items() if value is not None]
    for column in top_columns(width):
        value = column.known(device)
        if value is not None:
            words.append(value if column.head == "PERF" else f"{_(column.head)} {value}")
    if width >= WIDEST:
        words += [neutralise(device.pci_bus_id)] if device.pci_bus_id else []
        if device.persistence_mode is not None:
            words.append(_("persistence on") if device.persistence_mode else _("persistence off"))
    return words


@dataclass(frozen=True)
class TableColumns:
    """The widths of the columns of the table in which each device has a row."""

    names: int  # of the model; 0 if the title names one for all
    memory: int  # of the bars
    utilization: int
    is_roomy: bool  # units are written out; bandwidth and fan have a column
    past: int  # of the sparkline
    numbers: tuple[DeviceColumn, ...]

    @classmethod
    def of(cls, devices: Sequence[Device], view: ScreenView, width: int) -> TableColumns:
        """Return the columns for a screen of *width* columns; the bars get the room that numbers and states leave."""
        is_roomy = width >= _ROOMY
        names = 23 if width >= WIDE and len({model_name(device) for device in devices}) > 1 else 0
        past = max(10, min(40, (width - 110) // 2)) if width >= _WITH_PAST and view.past else 0
        # A daemon need not read these fields, so they may be unknown for all devices.
        numbers = [
            column for column in top_columns(width) if any(column.known(device) is not None for device in devices)
        ]
        left = width - names - past - (52 if is_roomy else 34) - _STATE
        while numbers and left - sum(column.width + 1 for column in numbers) < _LEAST_BARS:
            numbers.pop()
        left -= sum(column.width + 1 for column in numbers)
        memory, busy = max(8, min(30, left * 3 // 5)), max(6, min(20, left * 2 // 5))
        return cls(names, memory, busy, is_roomy, past, tuple(numbers))

    def header(self, width: int) -> ScreenLine:
        """Return the headings of the columns."""
        memory, busy = self.memory + (15 if self.is_roomy else 11), self.utilization + 7
        words = " GPU " + padded(_("MODEL") if self.names else "", self.names)
        words += padded(_("MEMORY"), memory) + padded(_("UTILIZATION"), busy)
        words += (" MBW " if self.is_roomy else "") + (padded(_("PAST"), self.past + 1) if self.past else "")
        words += padded(_("TEMP"), 4, ">") + " " + (f"{padded(_('FAN'), 4, '>')} " if self.is_roomy else "")
        words += padded(_("POWER"), 9 if self.is_roomy else 5) + " "
        words += "".join(f"{padded(_(column.head), column.width, '>')} " for column in self.numbers) + _("STATE")
        return ScreenLine(tuple(fitted([(words, "dim")], width)))


def _row(scene: Scene, history: History, view: ScreenView, use: DeviceUse, columns: TableColumns) -> list[Part]:
    device = use.device
    memory, busy, heat, power = _meters(device, scene.thresholds)
    parts: list[Part] = [(f"{device.label:>4} ", f"bold {LABELS[use.state][1]}".strip())]
    if columns.names:
        name = neutralise(model_name(device))
        if device.mig_profile and display_width(name) > 22:  # the profile says more than the GPU's name, which is above
            name = neutralise(device.mig_profile)
            name = name if vendor_of(device).partitions else f"MIG {name}"
        parts += fitted([(shorten(name, 22), "")], columns.names)
    for meter, size, room in (
        (memory, columns.memory, 13 if columns.is_roomy else 9),
        (busy, columns.utilization, 5),
    ):
        parts += bar(meter.share, size, meter.colour, ascii_only=view.ascii_only)
        parts.append((f" {meter.words if columns.is_roomy else meter.short:<{room}} ", meter.colour))
    if columns.is_roomy:
        parts.append(_number(device.memory_utilization))
    if columns.past:
        past = history.devices.get(device.uuid, {}).get("utilization", ())
        parts.append((f"{sparkline(past, columns.past, 1.0, ascii_only=view.ascii_only)} ", "faint"))
    parts.append((f"{heat.short:>4} ", heat.colour))
    if columns.is_roomy:
        parts.append(_number(device.fan_speed))
    draw = f"{power.words:<9} " if columns.is_roomy else f"{power.short:<5} "
    parts.append((draw, power.colour))
    for column in columns.numbers:
        known = column.known(device)
        parts.append((f"{known or NOT_AVAILABLE:>{column.width}} ", "dim" if known is None else ""))
    return [*parts, *_state(scene, use)]


def _number(percent: float | None) -> Part:
    return f"{format_rounded(percent, '%'):>4} ", "dim" if percent is None else ""


def _meters(device: Device, limits: Thresholds) -> tuple[BarMeter, BarMeter, BarMeter, BarMeter]:
    """Return the meters of memory, utilization, temperature and power."""
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
    # A busy device runs at its limit, which is no reason for an alarm.  Only beyond it something is wrong.
    over = None if limit is None else limit * 1.05
    colour = alarm(draw, bad if bad is not None else limit, bad if bad is not None else over)
    words = format_rounded(draw, "W") if draw is None or limit is None else f"{draw:.0f}/{limit:.0f}W"
    share = draw / limit if draw is not None and limit else None
    return BarMeter("PWR", share, words, format_rounded(draw, "W"), colour, "power", limit or 1)


def _state(scene: Scene, use: DeviceUse) -> list[Part]:
    """Return the state in words: ``in use: alice 2h "ablation 3"``."""
    words, colour = LABELS[use.state]
    parts: list[Part] = [(_(words), colour)]
    if use.reason:
        parts.append((f" ({neutralise(translated(use.reason))})", colour))
    for number, held in enumerate(use.claims):
        record = held.record
        since = "" if record.since is None else f" {format_duration(max(0.0, scene.snapshot.taken_at - record.since))}"
        note = f' "{neutralise(record.note)}"' if record.note else ""
        remarks = (_(", orphaned") if held.orphaned else "") + (_(", stopped") if held.stopped else "")
        parts.append((f"{', ' if number else ': '}{neutralise(held.user or _('unknown'))}{since}{note}{remarks}", ""))
    return [*parts, *((f"  {words}", "yellow") for words in _unusual(use.device))]


def _unusual(device: Device) -> list[str]:
    """Return remarks that a user should know before they start a job on the device."""
    words = [_("exclusive")] if device.compute_mode == "exclusive_process" else []
    words += [_("memory shared with the host")] if device.memory_shared_with_host else []
    if device.ecc_uncorrected_volatile:
        words.append(_("ECC errors: {count}").format(count=device.ecc_uncorrected_volatile))
    return words


def _of(used: int | None, total: int | None, unit: str) -> str:
    if used is None or not total:
        return NOT_AVAILABLE
    return f"{used / 2**30:.1f}/{total / 2**30:.0f}{unit}"
