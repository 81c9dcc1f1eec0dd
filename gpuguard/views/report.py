"""The report on GPU time as text, JSON or CSV.

docs/report.md says what each column means, docs/json.md describes the JSON.  Does not read the store: see report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gpuguard.history.queries import DeviceTotal
from gpuguard.history.report import Report, UsageRow, device_label
from gpuguard.sanitize import display_width, neutralise
from gpuguard.units import format_bytes, format_duration
from gpuguard.views.charts import stacked
from gpuguard.views.claims import ClaimRow
from gpuguard.views.history import csv_lines, period_json, remarks, zone
from gpuguard.views.text import Paint, shorten, table

HOUR, KWH = 3600.0, 3.6e6
LEAST_BAR = 12  # columns: in a narrower terminal numbers tell more
LONGEST_NAME = 24
# The parts of a bar: what, character, in ASCII, colour.
PARTS = (
    ("used", "█", "#", "green"),
    ("idle", "▒", "-", "yellow"),
    ("unknown", "░", "?", "dim"),
    ("unclaimed", "▚", "!", "red"),
)
_TIMES = ("claimed", "used", "idle", "unknown", "unclaimed")

Claims = tuple[Sequence[ClaimRow], int]  # those that have ended, and how many have not


def to_text(
    report: Report, claims: Claims | None, *, width: int | None, paint: Paint, ascii_only: bool = False
) -> list[str]:
    """The report for people.

    Args:
        report: what is told.
        claims: of a report by claim.
        width: columns of the terminal; None: it goes elsewhere, so bars are left out and nothing is shortened.
        paint: puts colour on text.
        ascii_only: draw with ASCII alone.
    """
    watch = report.watch
    begin, end = (time.strftime("%Y-%m-%d %H:%M", time.localtime(each)) for each in (watch.begin, watch.end))
    title = f"GPU time by {report.by}, {begin} to {end} {zone(watch.end)}"
    lines = [paint(title if width is None else shorten(title, width), "bold")]
    if claims is not None:
        return [*lines, "", *_claim_lines(*claims, width)]
    lines += remarks(watch, width)
    if not report.users and not report.devices:
        return [*lines, "", "Nothing was seen in this time."]
    if width is not None and (bars := _bars(report.rows, width, paint, ascii_only=ascii_only)):
        lines += ["", *bars]
    lines += ["", *_row_table(report, width)]
    if report.by != "device":
        lines += ["", *_device_table(report.devices, width)]
    return [*lines, *_waster_lines(report, width, paint), *_line_remark(report)]


def _bars(rows: Sequence[UsageRow], width: int, paint: Paint, *, ascii_only: bool) -> list[str]:
    shown = [row for row in rows if row.claimed + row.unclaimed > 0]
    if not shown:
        return []
    names = [shorten(neutralise(row.name), LONGEST_NAME) for row in shown]
    margin = max(map(display_width, names))
    numbers = [f"{hours(row.claimed + row.unclaimed)} h" for row in shown]
    room = width - margin - max(map(len, numbers)) - 4
    if room < LEAST_BAR:
        return []
    most = max(row.claimed + row.unclaimed for row in shown)
    lines = []
    for row, name, number in zip(shown, names, numbers, strict=True):
        parts = [(getattr(row, what), plain if ascii_only else mark, colour) for what, mark, plain, colour in PARTS]
        bar = stacked(parts, most, room, paint)
        lines.append(f"{name}{' ' * (margin - display_width(name))}  {bar} {number}")
    legend = [f"{plain if ascii_only else mark} {LEGEND[what]}" for what, mark, plain, _ in PARTS if _has(shown, what)]
    below = "   ".join(legend)
    indent = margin + 2 if margin + 2 + display_width(below) <= width else 0
    return [*lines, shorten(" " * indent + below, width)]


LEGEND = {
    "used": "used",
    "idle": "claimed but idle",
    "unknown": "claimed, use unknown",
    "unclaimed": "used without a claim",
}


def _has(rows: Sequence[UsageRow], what: str) -> bool:
    return any(getattr(row, what) for row in rows)


def _row_table(report: Report, width: int | None) -> list[str]:
    """GPU-hours; columns that hold nothing at all are left out."""
    rows = report.rows
    if not rows:
        return [f"No {report.by} had a GPU in this time."]
    columns: list[tuple[str, Callable[[UsageRow], str]]] = [(report.by.upper(), lambda row: _short(row.name, width))]
    columns += [(what.upper(), _hours_of(what)) for what in _TIMES if what != "unknown" or _has(rows, what)]
    columns.append(("kWh", lambda row: kilowatt_hours(row.energy)))
    if any(row.wanted is None or row.wanted > 0 for row in rows) and report.by != "device":
        whole = sum(row.wanted or 0.0 for row in report.users)
        columns.append(("WAITED", lambda row: hours(row.waiting)))
        columns.append(("WANTED", lambda row: f"{hours(row.wanted)}{_share(row.wanted, whole)}"))
    cells = [[read(row) for _, read in columns] for row in rows]
    lines = _tables(cells, [name for name, _ in columns], "<" + ">" * 9, width)
    return ["GPU-hours" + (" (WAITED: hours)" if columns[-1][0] == "WANTED" else ""), *lines]


def _tables(cells: Sequence[Sequence[str]], headers: Sequence[str], align: str, width: int | None) -> list[str]:
    """A table, or where that is too wide several, each with the first column: half a number is a wrong one."""
    widths = [max(map(display_width, column)) for column in zip(headers, *cells, strict=True)]
    blocks, taken = [[0]], widths[0]
    for place in range(1, len(widths)):
        if width is not None and taken + 2 + widths[place] > width and len(blocks[-1]) > 1:
            blocks.append([0])
            taken = widths[0]
        blocks[-1].append(place)
        taken += 2 + widths[place]
    lines: list[str] = []
    for block in blocks:
        picked = [[row[place] for place in block] for row in (headers, *cells)]
        lines += ["", *table(picked[1:], picked[0], align="".join(align[place] for place in block), width=width)]
    return lines[1:]


def _hours_of(what: str) -> Callable[[UsageRow], str]:
    return lambda row: hours(getattr(row, what))


def _short(name: str, width: int | None) -> str:
    neutral = neutralise(name)
    return neutral if width is None else shorten(neutral, max(8, min(LONGEST_NAME, width - 60)))


def _share(value: float | None, whole: float) -> str:
    return "" if value is None or whole <= 0 else f" ({100 * value / whole:.0f} %)"


def _device_table(devices: Sequence[DeviceTotal], width: int | None) -> list[str]:
    """What the devices did, in hours that they were watched."""
    headers = ["DEVICE", "WATCHED", "CLAIMED", "FREE", "UTILIZATION", "kWh", "MODEL"]
    cells = []
    for each in devices:
        free = max(0.0, each.seen - each.claimed - each.claimed_unknown)
        utilization = "n/a" if each.utilization is None else f"{each.utilization:.0f} %"
        known = each.claimed_unknown < each.seen
        times = hours(each.seen), hours(each.claimed if known else None), hours(free if known else None)
        facts = utilization, kilowatt_hours(each.energy), neutralise(each.name or "")
        cells.append([neutralise(device_label(each)), *times, *facts])
    return _tables(cells, headers, "<>>>>><", width)


def _waster_lines(report: Report, width: int | None, paint: Paint) -> list[str]:
    lines = []
    for number, row in enumerate(report.wasters, 1):
        said = []
        if row.idle:
            said.append(f"{hours(row.idle)} of {hours(row.claimed)} claimed GPU-hours idle")
        if row.unclaimed:
            said.append(f"{hours(row.unclaimed)} GPU-hours used without a claim")
        line = f"{number}. {neutralise(row.name)}: {', '.join(said)}"
        lines.append(line if width is None else shorten(line, width))
    return ["", paint("Least used for most time", "bold"), *lines] if lines else []


def _line_remark(report: Report) -> list[str]:
    if report.line_unknown < 60:
        return []
    return ["", f"For {format_duration(report.line_unknown)} of this time nobody could tell who waited in line."]


def _claim_lines(rows: Sequence[ClaimRow], unfinished: int, width: int | None) -> list[str]:
    headers = ["CLAIM", "USER", "ENDED", "GPUS", "GPU-HOURS", "UTILIZATION", "kWh", "PEAK", "EXIT", "COMMAND"]
    cells = [
        [
            neutralise(row.id),
            neutralise(row.user or "n/a"),
            time.strftime("%m-%d %H:%M", time.localtime(row.ended)),
            str(len(row.devices)),
            hours(row.gpu_seconds),
            "n/a" if row.utilization is None else f"{row.utilization:.0f} %",
            kilowatt_hours(row.energy),
            format_bytes(row.peak_memory),
            "n/a" if row.exit_status is None else str(row.exit_status),
            neutralise(row.command or "n/a"),
        ]
        for row in rows
    ]
    lines = table(cells, headers, align="<<<>>>>>>", width=width) if cells else ["No claim ended in this time."]
    lines += ["", "Out of the audit logs that you may read: your own, and the machine's."]
    if unfinished:
        lines.append(f"{unfinished} more began in this time and have no end in the log: they run, or were killed.")
    return lines


def hours(seconds: float | None) -> str:
    """``"120"``, ``"12.5"``, ``"0.25"``, ``"<0.01"`` of so many (GPU-)seconds; ``"n/a"`` when unknown."""
    return "n/a" if seconds is None else _number(seconds / HOUR)


def kilowatt_hours(joules: float | None) -> str:
    """``"1.25"`` of so many joules; ``"n/a"`` when unknown."""
    return "n/a" if joules is None else _number(joules / KWH)


def _number(value: float) -> str:
    if value <= 0:
        return "0"
    if value < 0.005:
        return "<0.01"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 999.95 else f"{value:.0f}"


def to_json(report: Report, claims: Claims | None, host: str) -> dict[str, Any]:
    """The object that docs/json.md describes."""
    return {
        "schema": 1,
        "host": host,
        "by": report.by,
        **period_json(report.watch),
        "rows": None if claims is not None else [_row_json(row) for row in report.rows],
        "claims": None if claims is None else [_claim_json(row) for row in claims[0]],
        "claims_without_end": None if claims is None else claims[1],
        "devices": [_device_json(each) for each in report.devices],
        "wasters": [_row_json(row) for row in report.wasters],
        "line_unknown_seconds": report.line_unknown,
    }


def _row_json(row: UsageRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "uid": row.uid,
        "uuid": row.device,
        **{f"{what}_gpu_seconds": getattr(row, what) for what in _TIMES},
        "energy_joules": row.energy,
        "waiting_seconds": row.waiting,
        "wanted_gpu_seconds": row.wanted,
    }


def _device_json(each: DeviceTotal) -> dict[str, Any]:
    return {
        "uuid": each.device,
        "index": each.index,
        "name": each.name,
        "parent_uuid": each.parent,
        "watched_seconds": each.seen,
        "claimed_seconds": each.claimed if each.claimed_unknown < each.seen else None,
        "claimed_unknown_seconds": each.claimed_unknown,
        "utilization_percent": each.utilization,
        "energy_joules": each.energy,
        "energy_unknown_seconds": each.energy_unknown,
    }


def _claim_json(row: ClaimRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "user": row.user,
        "devices": list(row.devices),
        "ended": row.ended,
        "wall_time_seconds": row.seconds,
        "gpu_seconds": row.gpu_seconds,
        "utilization_percent": row.utilization,
        "energy_joules": row.energy,
        "peak_memory_bytes": row.peak_memory,
        "exit_status": row.exit_status,
        "command": row.command,
    }


def to_csv(report: Report, claims: Claims | None) -> list[str]:
    """A line of names, and one for each user, group, device or claim; what is unknown is empty."""
    if claims is not None:
        facts = [{**_claim_json(row), "devices": " ".join(row.devices)} for row in claims[0]]
        names = list(facts[0]) if facts else list(_claim_json(_NO_CLAIM))
    else:
        facts = [_row_json(row) for row in report.rows]
        names = list(_row_json(UsageRow("")))
    return csv_lines(names, [[each[name] for name in names] for each in facts])


_NO_CLAIM = ClaimRow("", None, (), 0.0, None, None, None, None, None, None)
