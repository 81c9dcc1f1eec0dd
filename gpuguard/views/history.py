"""What devices did over a period, as charts in a terminal, as JSON or as CSV.

A gap in the record is a gap in the chart, an empty field in CSV and null in JSON; it is never 0.  docs/json.md
describes the JSON.  Does not read the store: see the command `history`.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuguard.history.queries import Point, SeenDevice, Watch
from gpuguard.locale import N_, _
from gpuguard.sanitize import neutralise
from gpuguard.tables import shorten
from gpuguard.units import format_duration, local_time
from gpuguard.views.charts import bucketed, known_period, plot, scale_of
from gpuguard.views.text import Paint, picked

PLAIN_COLUMNS = 80  # of a chart that goes into a file


@dataclass(frozen=True)
class Metric:
    """Something that can be drawn."""

    stored: str  # its name in the store
    factor: float  # from the store's unit to that of the JSON field
    field: str  # of JSON and CSV
    title: str
    unit: str  # of the chart
    shown: float = 1.0  # from the field's unit to that of the chart
    lowest: float = 0.0
    highest: float | None = None  # of the axis; None: by the values


METRICS = {
    "utilization": Metric("utilization_percent", 1.0, "utilization_percent", "utilization", "%", highest=100.0),
    "memory": Metric("memory_used_mib", 2.0**20, "memory_used_bytes", N_("memory used"), "GiB", shown=2.0**-30),
    "temperature": Metric("temperature_celsius", 1.0, "temperature_celsius", "temperature", "°C", lowest=20.0),
    "power": Metric("power_draw_watts", 1.0, "power_draw_watts", N_("power draw"), "W"),
    "claimed": Metric("claimed_percent", 1.0, "claimed_percent", "claimed", "%", highest=100.0),
}


DeviceHistory = tuple[SeenDevice, Sequence[Point]]  # what one device did


def to_text(
    metric: Metric,
    courses: Sequence[DeviceHistory],
    watch: Watch,
    *,
    width: int | None,
    rows: int,
    paint: Paint,
    ascii_only: bool,
) -> list[str]:
    """Draw a chart for each device, one below the other.

    Args:
        watch: the period, of which only the part is drawn in which something is known, and how much of it was seen.
        width: columns of the terminal, or None if the text goes elsewhere.
        rows: lines of each drawing.
    """
    columns = max(30, width or PLAIN_COLUMNS)
    begin, end = known_period((points for _device, points in courses), watch)
    lines = [
        paint(shorten(f"{_(metric.title)}, {format_span(begin, end)} {zone(end)}", columns), "bold"),
        *remarks(watch, columns),
    ]
    unit = "C" if ascii_only and metric.unit == "°C" else metric.unit
    for device, points in courses:
        name = "  ".join(map(neutralise, filter(None, (device.label, device.name, _summary(points, metric, unit)))))
        lines += ["", shorten(name, columns)]
        known = [point.mean * metric.factor * metric.shown for point in points if point.mean is not None]
        if not known:
            continue
        lowest = min(metric.lowest, 10.0 * math.floor(min(known) / 10.0))
        scale = scale_of(known, unit, lowest=lowest, highest=metric.highest)
        room = columns - 3 - max(len(f"{scale.highest:.3g} {unit}"), len(f"{scale.lowest:.3g}"))
        drawn = bucketed(points, begin, end, room if ascii_only else room * 2)
        values = [None if value is None else value * metric.factor * metric.shown for value in drawn]
        lines += plot(values, scale, begin, end, rows, ascii_only=ascii_only)
    return lines


def remarks(watch: Watch, width: int | None) -> list[str]:
    """Say in sentences what is not known of the period; there are none if everything is known."""
    span = max(watch.end - watch.begin, 1e-9)
    if watch.store_begins is None:
        return [_("The daemon has written nothing down yet.")]
    if watch.end <= watch.begin:
        return [
            _("No slot of the record begins in so short a time: they are {width} s wide.").format(width=watch.width)
        ]
    sentences = []
    if watch.store_begins >= watch.begin + watch.width:
        sentences.append(
            _("The record begins {store_begins}: nothing is known of the time before.").format(
                store_begins=local_time(watch.store_begins)
            )
        )
    if watch.seen < span * 0.995 - 2 * watch.width:
        share = min(99, math.floor(100 * watch.seen / span))
        part = f"{share} %" if share or not watch.seen else _("less than 1 %")
        seen = format_duration(watch.seen)
        sentences.append(
            _("The daemon saw {part} of this time ({seen}); of the rest nothing is known.").format(part=part, seen=seen)
        )
    if width is None:
        return sentences
    return [line for sentence in sentences for line in textwrap.wrap(sentence, max(20, width))]


def zone(moment: float) -> str:
    """Return the time zone of this machine (or $TZ) at a unix time: ``"CET (+01:00)"``."""
    offset, name = local_time(moment, "%z"), neutralise(local_time(moment, "%Z"))
    return "UTC" if name in ("UTC", "GMT") else f"{name} ({offset[:3]}:{offset[3:5]})"


def format_span(begin: float, end: float) -> str:
    """Return ``"2026-11-20 08:00 to 2026-11-21 08:00"`` for two unix times."""
    return _("{begin} to {end}").format(begin=local_time(begin), end=local_time(end))


def _summary(points: Sequence[Point], metric: Metric, unit: str) -> str:
    known = sum(point.known for point in points if point.mean is not None)
    if not known:
        return _("nothing is known of it in this time")
    factor = metric.factor * metric.shown
    mean = sum((point.mean or 0.0) * point.known for point in points if point.mean is not None) / known * factor
    peaks = [point.highest for point in points if point.highest is not None]
    return _("mean {mean:.3g} {unit}").format(mean=mean, unit=unit) + (
        _(", highest {highest:.3g} {unit}").format(highest=max(peaks) * factor, unit=unit) if peaks else ""
    )


def to_json(metric: Metric, courses: Sequence[DeviceHistory], watch: Watch) -> dict[str, Any]:
    """Return the object that docs/json.md describes."""
    return {
        "schema": 1,
        "metric": next(name for name, known in METRICS.items() if known is metric),
        **period_json(watch),
        "devices": [
            {
                **picked(device, "uuid", "index", "name"),
                "parent_uuid": device.parent,
                "points": [_point(metric, point) for point in points],
            }
            for device, points in courses
        ],
    }


def period_json(watch: Watch) -> dict[str, Any]:
    """Return the fields about the period, which both reports and histories have."""
    return {
        **picked(watch, "begin", "end"),
        "slot_seconds": watch.width,
        "watched_seconds": watch.seen,
        "record_begins": watch.store_begins,
    }


def _point(metric: Metric, point: Point) -> dict[str, Any]:
    def known(value: float | None) -> float | None:
        return None if value is None else value * metric.factor

    return {
        "time": point.time,
        "known_seconds": point.known,
        metric.field: known(point.mean),
        f"{metric.field}_highest": known(point.highest),
    }


def to_csv(metric: Metric, courses: Sequence[DeviceHistory]) -> list[str]:
    """Return a line of names, and one for each slot of each device; unknown values are empty."""
    names = ("time_unix_seconds", "time", "uuid", "index", "known_seconds", metric.field, f"{metric.field}_highest")
    rows = []
    for device, points in courses:
        for point in points:
            facts, local = _point(metric, point), local_time(point.time, "%Y-%m-%dT%H:%M:%S%z")
            rows.append((int(point.time), local, device.uuid, device.index, *(facts[name] for name in names[4:])))
    return csv_lines(names, rows)


def csv_lines(names: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return lines of CSV in neutral text; unknown cells are empty, and no spreadsheet takes a name for a formula."""
    return [",".join("" if cell is None else csv_cell(str(cell)) for cell in row) for row in (names, *rows)]


_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # with the wide signs, which a Japanese spreadsheet takes as well


def csv_cell(text: str) -> str:
    """Return neutral text as a cell that is a formula to no spreadsheet, not even one that splits at semicolons."""
    parts = re.split(r"([,;] *)", neutralise(text))
    text = "".join(f"'{part}" if part.startswith(_FORMULA) else part for part in parts)
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',;"') else text
