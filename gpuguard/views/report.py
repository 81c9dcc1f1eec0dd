"""The report on GPU time as text, JSON, CSV, or one HTML page: tables with the same columns.

The page has no script, nothing from elsewhere, and charts as inline SVG, so that it can be mailed and opened from a
file.  docs/report.md says what each column means, docs/json.md describes the JSON.  This module does not read the
usage store: see history.usage_report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from html import escape
from itertools import groupby
from typing import Any

from gpuguard.fleet.answers import HostReply
from gpuguard.history.queries import TIMES, DeviceTotal, Point, Watch
from gpuguard.history.usage_report import FROM_LOG, ClaimRow, PolicyRow, Report, UsageRow
from gpuguard.locale import N_, _
from gpuguard.sanitize import display_width, neutralise
from gpuguard.tables import escaped, shorten, table
from gpuguard.units import NOT_AVAILABLE, format_bytes, format_count, format_duration, format_rounded, local_time
from gpuguard.views.charts import bucketed, known_period, round_marks, stacked
from gpuguard.views.fleet import end_lines
from gpuguard.views.history import csv_lines, format_span, period_json, remarks, zone
from gpuguard.views.text import Paint, picked

HOUR, KWH = 3600.0, 3.6e6
_SHARED = "*"
SHARED_TEXT = N_("Claims shared this GPU, and each counts whole: together they are more than the time of the GPU.")
MIN_BAR = 12  # columns: in a narrower terminal numbers tell more
MAX_NAME = 24
# The parts of a bar: field, words, character, character in ASCII, colour.
PARTS = (
    ("used", N_("used"), "█", "#", "green"),
    ("idle", N_("claimed but idle"), "▒", "-", "yellow"),
    ("unknown", N_("claimed, use unknown"), "░", "?", "dim"),
    ("unclaimed", N_("used without a claim"), "▚", "!", "red"),
)


@dataclass(frozen=True)
class Column:
    """One column of a table for people; its text is not neutralised yet."""

    header: str
    cell: Callable[[Any], str]
    is_text: bool = False  # of any length, aligned to the left


HEADS = {
    "user": N_("User"), "group": N_("Group"), "device": N_("GPU"), "used": N_("Used"), "idle": N_("Idle"),
    "unclaimed": N_("Unclaimed"), "unknown": N_("Unknown"),
}  # fmt: skip
BY = {"user": N_("user"), "group": N_("group"), "device": N_("GPU"), "claim": N_("claim"), "policy": N_("policy")}


def _with_hosts(columns: Sequence[Column], report: Report) -> Sequence[Column]:
    """Return *columns*, behind a column of hosts if there are several."""
    return [Column(N_("Host"), lambda row: row.host, is_text=True), *columns] if report.watches else columns


def usage_columns(report: Report) -> list[Column]:
    """Return the columns of users, groups or devices, in GPU-hours, without those of which nothing can be said."""
    columns = [*_with_hosts([Column(HEADS[report.by], lambda row: row.name, is_text=True)], report)]
    for part in TIMES:
        if part == "claimed":
            columns.append(
                Column(N_("Claimed"), lambda row: hours(row.claimed) + (_SHARED if is_shared(row, report) else ""))
            )
        elif part != "unknown" or _has(report.rows, part):
            columns.append(Column(HEADS[part], partial(_hours_of, part)))
    columns.append(Column(N_("kWh"), lambda row: kilowatt_hours(row.energy)))
    if report.by != "device" and any(row.wanted is None or row.wanted > 0 for row in report.rows):
        whole = sum(row.wanted or 0.0 for row in report.users)

        def wanted(row: UsageRow) -> str:
            share = "" if row.wanted is None or whole <= 0 else f" ({100 * row.wanted / whole:.0f} %)"
            return hours(row.wanted) + share

        columns += [Column(N_("Waited"), lambda row: hours(row.waiting)), Column(N_("Wanted"), wanted)]
    return columns


DEVICE_COLUMNS = (  # of DeviceTotal, in hours that they were watched
    Column(N_("GPU"), lambda total: total.device.label, is_text=True),
    Column(N_("Watched"), lambda total: hours(total.seen)),
    Column(N_("Claimed"), lambda total: hours(_claimed(total))),
    Column(N_("Not claimed"), lambda total: hours(_not_claimed(total))),
    Column(N_("Utilization"), lambda total: format_rounded(total.utilization, " %")),
    Column(N_("kWh"), lambda total: kilowatt_hours(total.energy)),
    Column(N_("Model"), lambda total: total.device.name or "", is_text=True),
)
CLAIM_COLUMNS = (  # of ClaimRow
    Column(N_("Claim"), lambda claim: claim.id, is_text=True),
    Column(N_("User"), lambda claim: claim.user or NOT_AVAILABLE, is_text=True),
    Column(
        N_("Ended"),
        lambda claim: _("runs") if claim.ended is None else local_time(claim.ended, "%m-%d %H:%M"),
        is_text=True,
    ),
    Column(N_("Took"), lambda claim: format_duration(claim.wall_time_seconds)),
    Column(N_("GPUs"), lambda claim: str(len(claim.devices))),
    Column(N_("GPU-hours"), lambda claim: hours(claim.gpu_seconds)),
    Column(N_("Utilization"), lambda claim: format_rounded(claim.utilization_percent, " %")),
    Column(N_("kWh"), lambda claim: kilowatt_hours(claim.energy_joules)),
    Column(N_("Peak"), lambda claim: format_bytes(claim.peak_memory_bytes)),
    Column(N_("Exit"), lambda claim: NOT_AVAILABLE if claim.exit_status is None else str(claim.exit_status)),
    Column(N_("Command"), lambda claim: claim.command or NOT_AVAILABLE, is_text=True),
)
POLICY_COLUMNS = (  # of PolicyRow
    Column(N_("User"), lambda row: row.user or NOT_AVAILABLE, is_text=True),
    Column(N_("Policy"), lambda row: row.policy, is_text=True),
    Column(N_("Action"), lambda row: _(row.action), is_text=True),
    Column(N_("Done"), lambda row: str(row.done)),
    Column(N_("Undelivered"), lambda row: str(row.undelivered)),
    Column(N_("Dry run"), lambda row: str(row.dry_run)),
    Column(N_("Not done"), lambda row: str(row.not_done)),
    Column(N_("Last"), lambda row: local_time(row.last, "%m-%d %H:%M")),
)
WASTER_COLUMNS = (  # of UsageRow
    Column(N_("User"), lambda row: row.name, is_text=True),
    Column(N_("Claimed but idle"), lambda row: hours(row.idle)),
    Column(N_("of claimed"), lambda row: hours(row.claimed)),
    Column(N_("Used without a claim"), lambda row: hours(row.unclaimed)),
)


def hours(seconds: float | None) -> str:
    """Return (GPU-)seconds as hours: ``"120"``, ``"12.5"``, ``"0.25"``, ``"<0.01"``, or ``"n/a"`` if unknown."""
    return NOT_AVAILABLE if seconds is None else _number(seconds / HOUR)


def kilowatt_hours(joules: float | None) -> str:
    """Return joules as kWh: ``"1.25"``, or ``"n/a"`` if unknown."""
    return NOT_AVAILABLE if joules is None else _number(joules / KWH)


def _number(value: float) -> str:
    if value <= 0:
        return "0"
    if value < 0.005:
        return "<0.01"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 999.95 else f"{value:.0f}"


def is_shared(row: UsageRow, report: Report) -> bool:
    """Return whether the claims of a device took more than the time that it was watched, because they shared it."""
    seen = {(total.host, total.device.uuid): total.seen for total in report.devices}
    return row.claimed > seen.get((row.host, row.device or ""), row.claimed) + 60


def _hours_of(part: str, row: UsageRow) -> str:
    return hours(getattr(row, part))


def _claimed(total: DeviceTotal) -> float | None:
    return total.claimed if total.claimed_unknown < total.seen else None


def _not_claimed(total: DeviceTotal) -> float | None:
    claimed = _claimed(total)
    return None if claimed is None else max(0.0, total.seen - claimed - total.claimed_unknown)


def _has(rows: Sequence[UsageRow], part: str) -> bool:
    return any(getattr(row, part) for row in rows)


def to_text(
    report: Report,
    *,
    width: int | None,
    paint: Paint,
    ascii_only: bool = False,
    replies: Sequence[HostReply] = (),
) -> list[str]:
    """Return the report for people.

    Args:
        width: columns of the terminal, or None if it goes elsewhere: then bars are left out and nothing is shortened.
        replies: of the hosts that were asked for their reports.
    """
    watch = report.watch
    title = _("What policies did, {span} {zone}") if report.by == "policy" else _("GPU time by {by}, {span} {zone}")
    span = format_span(watch.begin, watch.end)
    lines = [paint(shorten(title.format(by=_(BY[report.by]), span=span, zone=zone(watch.end)), width), "bold")]
    if report.by in FROM_LOG:
        lines += ["", *_log_lines(report, width)]
    else:
        lines += [*_remarks(report, width), *_usage_page(report, width, paint, ascii_only=ascii_only)]
    return lines + (["", *end_lines(replies, width, paint)] if replies else [])


def _remarks(report: Report, width: int | None) -> list[str]:
    """Return what is not known of the time, with the name of the host if there are several."""
    if not report.watches:
        return remarks(report.watch, width)
    return [f"{host}: {line}" for host, watch in report.watches.items() for line in remarks(watch, None)]


def _parts(report: Report) -> list[Report]:
    """Return the reports that have tables of their own: the sums over several hosts, and then each of the hosts."""
    return [*([replace(report, rows=report.sums, watches={})] if report.sums else []), report]


def _usage_page(report: Report, width: int | None, paint: Paint, *, ascii_only: bool) -> list[str]:
    if not report.users and not report.devices:
        return ["", _("Nothing was seen in this time.")]
    lines = []
    parts = _parts(report)
    if width is not None and (bars := _bars(parts[0].rows, width, paint, ascii_only=ascii_only)):
        lines += ["", *bars]
    for part in parts:
        lines += ["", *_usage_lines(part, width)]
    if any(is_shared(row, report) for row in report.rows):
        lines += [f"{_SHARED} {_(SHARED_TEXT)}"]
    if report.by != "device":
        lines += ["", *_table_lines(_with_hosts(DEVICE_COLUMNS, report), report.devices, width, keys=_keys(report))]
    lines += _waster_lines(report, width, paint)
    if report.queue_unknown >= 60:
        unknown = format_duration(report.queue_unknown)
        lines += ["", _("For {unknown} of this time it is not known who waited in the queue.").format(unknown=unknown)]
    return lines


def _bars(rows: Sequence[UsageRow], width: int, paint: Paint, *, ascii_only: bool) -> list[str]:
    shown = [row for row in rows if row.claimed + row.unclaimed > 0]
    if not shown:
        return []
    names = [shorten(neutralise(" ".join(filter(None, (row.host, row.name)))), MAX_NAME) for row in shown]
    margin = max(map(display_width, names))
    numbers = [f"{hours(row.claimed + row.unclaimed)} h" for row in shown]
    room = width - margin - max(map(len, numbers)) - 4
    if room < MIN_BAR:
        return []
    most = max(row.claimed + row.unclaimed for row in shown)
    lines = []
    for row, name, number in zip(shown, names, numbers, strict=True):
        parts = [
            (getattr(row, part), plain if ascii_only else mark, colour) for part, _words, mark, plain, colour in PARTS
        ]
        bar = stacked(parts, most, room, paint)
        lines.append(f"{name}{' ' * (margin - display_width(name))}  {bar} {number}")
    legend = [
        f"{plain if ascii_only else mark} {_(words)}"
        for part, words, mark, plain, _colour in PARTS
        if _has(shown, part)
    ]
    below = "   ".join(legend)
    indent = margin + 2 if margin + 2 + display_width(below) <= width else 0
    return [*lines, shorten(" " * indent + below, width)]


def _usage_lines(report: Report, width: int | None) -> list[str]:
    if not report.rows:
        return [_("No {by} had a GPU in this time.").format(by=_(BY[report.by]))]
    columns = usage_columns(report)
    title = _("GPU-hours by host") if report.watches else _("GPU-hours")
    title += _(" (WAITED: hours)") if columns[-1].header == "Wanted" else ""
    longest = None if width is None else max(8, min(MAX_NAME, width - 60))
    return [title, *_table_lines(columns, report.rows, width, longest, _keys(report))]


def _keys(report: Report) -> int:
    """Return how many columns say what a row is about: one more with hosts, and two more for policies."""
    return 1 + (1 if report.watches else 0) + (2 if report.by == "policy" else 0)


def _table_lines(
    columns: Sequence[Column], rows: Sequence[object], width: int | None, longest: int | None = None, keys: int = 1
) -> list[str]:
    """Return a table, or several that each have the first *keys* columns if one is too wide: half a number is wrong.

    Text in the last column is shortened instead, and text in the first columns if it is wider than *longest*.
    """
    headers = [_(column.header) if column.header == "kWh" else _(column.header).upper() for column in columns]
    cells = [[neutralise(column.cell(row)) for column in columns] for row in rows]
    if longest is not None:
        cells = [[*(shorten(cell, longest) for cell in row[:keys]), *row[keys:]] for row in cells]
    widths = [max(map(display_width, column)) for column in zip(headers, *cells, strict=True)]
    if columns[-1].is_text:
        widths[-1] = len(headers[-1])
    begin = sum(widths[:keys]) + 2 * (keys - 1)
    blocks, taken = [[*range(keys)]], begin
    for number in range(keys, len(widths)):
        if width is not None and taken + 2 + widths[number] > width and len(blocks[-1]) > keys:
            blocks.append([*range(keys)])
            taken = begin
        blocks[-1].append(number)
        taken += 2 + widths[number]
    lines: list[str] = []
    for block in blocks:
        align = "".join("<" if columns[number].is_text else ">" for number in block)
        heads, *body = ([row[number] for number in block] for row in (headers, *cells))
        lines += ["", *table(body, heads, align=align, width=width)]
    return lines[1:]


def _waster_lines(report: Report, width: int | None, paint: Paint) -> list[str]:
    lines = []
    for number, row in enumerate(report.wasters, 1):
        parts = (
            [_("{idle} of {claimed} claimed GPU-hours idle").format(idle=hours(row.idle), claimed=hours(row.claimed))]
            if row.idle
            else []
        )
        parts += (
            [_("{unclaimed} GPU-hours used without a claim").format(unclaimed=hours(row.unclaimed))]
            if row.unclaimed
            else []
        )
        lines.append(shorten(f"{number}. {neutralise(row.name)}: {', '.join(parts)}", width))
    return ["", paint(_("Least used for most time"), "bold"), *lines] if lines else []


def _logged_table(report: Report) -> tuple[Sequence[Column], Sequence[object], str]:
    """Return the columns and rows of what comes from the audit log, and the text to show if there are no rows."""
    if report.by == "policy":
        none = _("No policy did anything in this time, nor would have.")
        return _with_hosts(POLICY_COLUMNS, report), report.policies or (), none
    none = _("No claim ended in this time, and none runs.")
    return _with_hosts(CLAIM_COLUMNS, report), report.claims or (), none


def _log_lines(report: Report, width: int | None) -> list[str]:
    columns, rows, none = _logged_table(report)
    keys = _keys(report)
    longest = None if width is None else max(4, min(MAX_NAME, (width - 13) // keys - 2))  # beside the widest number
    lines = _table_lines(columns, rows, width, longest, keys) if rows else [none]
    lines += ["", _("From the audit logs that you may read: your own, and the machine's.")]
    if report.claims_without_end:
        lines.append(
            _(
                "{unfinished} more began in this time and have no end in the log: they were killed, or run elsewhere."
            ).format(unfinished=report.claims_without_end)
        )
    return lines


def to_json(report: Report, host: str, replies: Sequence[HostReply] = ()) -> dict[str, Any]:
    """Return the object that docs/json.md describes; rows that name no host are of *host*, this one."""
    return {
        "schema": 1,
        "host": None if replies else host,
        "by": report.by,
        **period_json(report.watch),
        "rows": None if report.by in FROM_LOG else [_usage_json(row, host) for row in report.rows],
        "claims": None if report.claims is None else [_claim_json(row, host) for row in report.claims],
        "claims_without_end": report.claims_without_end,
        "policies": None if report.policies is None else [_policy_json(row, host) for row in report.policies],
        "devices": [_device_json(device, host) for device in report.devices],
        "wasters": [_usage_json(row, None if replies else host) for row in report.wasters],
        "line_unknown_seconds": report.queue_unknown,
        "hosts": [_host_json(reply, report.watches.get(reply.host)) for reply in replies],
    }


def _host_json(reply: HostReply, watch: Watch | None) -> dict[str, Any]:
    watched = period_json(watch) if watch else {}
    return {
        **picked(reply, "host", "error"),
        **{name: watched.get(name) for name in ("slot_seconds", "watched_seconds", "record_begins")},
    }


def _policy_json(row: PolicyRow, host: str) -> dict[str, Any]:
    return {**asdict(row), "host": row.host or host}


def _usage_json(row: UsageRow, host: str | None) -> dict[str, Any]:
    return {
        **picked(row, "name", "uid"),
        "uuid": row.device,
        **{f"{part}_gpu_seconds": getattr(row, part) for part in TIMES},
        **picked(row, "energy_joules", "waiting_seconds"),
        "wanted_gpu_seconds": row.wanted,
        "host": row.host or host,
    }


def _device_json(total: DeviceTotal, host: str) -> dict[str, Any]:
    return {
        **picked(total.device, "uuid", "index", "name"),
        "parent_uuid": total.device.parent,
        "watched_seconds": total.seen,
        "claimed_seconds": _claimed(total),
        **picked(total, "claimed_unknown_seconds", "utilization_percent", "energy_joules", "energy_unknown_seconds"),
        "host": total.host or host,
    }


def _claim_json(claim: ClaimRow, host: str) -> dict[str, Any]:
    return {
        **picked(claim, "id", "user", "devices", "ended", "wall_time_seconds", "gpu_seconds", "utilization_percent"),
        **picked(claim, "energy_joules", "peak_memory_bytes", "exit_status", "command"),
        "host": claim.host or host,
    }


def to_csv(report: Report, host: str) -> list[str]:
    """Return a line of names, and one for each user, group, device, claim or step of a policy; unknown is empty."""
    if report.claims is not None:
        names, rows = list(_claim_json(ClaimRow(""), host)), [_claim_json(row, host) for row in report.claims]
        rows = [{**row, "devices": " ".join(row["devices"])} for row in rows]
    elif report.policies is not None:
        names = [field.name for field in fields(PolicyRow)]
        rows = [_policy_json(row, host) for row in report.policies]
    else:
        names, rows = list(_usage_json(UsageRow(""), host)), [_usage_json(row, host) for row in report.rows]
    return csv_lines(names, [[row[name] for name in names] for row in rows])


BAR_HEIGHT = 18
BUCKETS, MARKS = 400, 7  # of a course, which is as wide as the page; on a phone every second mark is left out

# Parts of bars also differ in lightness, for readers who cannot tell their colours apart.
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2430; --faint: #667; --line: #d5dae2;
  --used: #1f7a4d; --idle: #f0b429; --unknown: #b9c0cc; --unclaimed: #c62f3b; --claimed: #cfe0f5; --course: #1c5fb8; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --text: #e6e9ee; --faint: #9aa4b2; --line: #313a46;
  --used: #35b374; --idle: #e3b341; --unknown: #4a5361; --unclaimed: #f0616b; --claimed: #1e3350; --course: #6cb0ff; } }
body { background: var(--page); color: var(--text); font: 15px/1.45 system-ui, "Noto Sans", "Noto Sans CJK SC",
  sans-serif; margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .1rem; font-weight: 600; overflow-wrap: anywhere; }
p { margin: .2rem 0; } .faint { color: var(--faint); } .remark { border-left: 4px solid var(--idle);
  padding-left: .6rem; }
div.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; } td.text { min-width: 9em; white-space: normal;
  overflow-wrap: anywhere; }
th { color: var(--faint); font-weight: 600; } svg { display: block; width: 100%; height: auto; }
svg.bar { min-width: 8rem; }
.key span { display: inline-block; margin-right: 1.2rem; }
.key i { border-radius: 2px; display: inline-block; height: .8em; margin-right: .35em; width: .8em; }
td.bar { width: 40%; } .axis { stroke: var(--line); stroke-width: 1; } .course { fill: none; stroke: var(--course);
  stroke-width: 1.5; } .claimed { fill: var(--claimed); } .axis, .course { vector-effect: non-scaling-stroke; }
.facts { display: grid; gap: .5rem 1.5rem; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr));
  margin: .8rem 0; }
.facts b { display: block; font-size: 1.5rem; line-height: 1.2; }
.over { margin: 0 3rem 0 0; position: relative; } .over svg { height: 4rem; }
.over span { color: var(--faint); font-size: .8rem; line-height: 1; position: absolute; white-space: nowrap; }
.over .scale { left: calc(100% + .3rem); } .marks { height: 1.1rem; margin-right: 3rem; position: relative; }
.marks span { color: var(--faint); font-size: .8rem; position: absolute; transform: translateX(-50%);
  white-space: nowrap; }
@media (max-width: 40rem) {
  .marks span:nth-child(even) { display: none; }
  table, tbody { display: block; } tr { border-bottom: 1px solid var(--line); display: flex;
    flex-wrap: wrap; gap: 0 1rem; padding: .3rem 0; } th { display: none; } td { border: 0; padding: 0; }
  td:first-child, td.bar { flex: 1 0 100%; } td:first-child { font-weight: 600; }
  td[data-head]::before { color: var(--faint); content: attr(data-head) " "; }
}
"""


def to_html(report: Report, host: str, now: float, replies: Sequence[HostReply] = ()) -> str:
    """Return the whole page, written at the unix time *now*; it is light or dark as the reader's system is."""
    watch = report.watch
    title = _("What policies did on {host}, {span}") if report.by == "policy" else _("GPU time on {host}, {span}")
    title = title.format(host=escaped(host), span=format_span(watch.begin, watch.end))
    body = [f"<h1>{title}</h1>", _('<p class="faint">Times are {zone}.</p>').format(zone=escaped(zone(watch.end)))]
    answered = end_lines(replies, None, lambda text, _colour: text) if replies else []
    body += [f'<p class="remark">{escaped(line)}</p>' for line in answered]
    if report.by in FROM_LOG:
        columns, rows, none = _logged_table(report)
        body.append(_("<h2>By {by}</h2>").format(by=escaped(_(BY[report.by]))))
        body.append(_("<p>From the audit logs that the author of this page may read.</p>"))
        if unfinished := report.claims_without_end:
            text = _("<p>{unfinished} more began in this time and have no end in the log.</p>")
            body.append(text.format(unfinished=unfinished))
        body.append(_table_html(columns, rows) if rows else f"<p>{none}</p>")
    else:
        body += [f'<p class="remark">{escaped(line)}</p>' for line in _remarks(report, None)]
        body += _facts_html(report)
    for shown in _parts(report) if report.rows else ():
        most = max(row.claimed + row.unclaimed for row in shown.rows)
        bars = [_bar_svg(row, most) for row in shown.rows]
        legend = [_legend(f"--{part}", _(words)) for part, words, *_drawn in PARTS]
        body += [_("<h2>By {by}</h2>").format(by=escaped(_(BY[report.by]))), f'<p class="key">{"".join(legend)}</p>']
        body.append(_table_html(usage_columns(shown), shown.rows, bars))
    if report.wasters:
        body += [_("<h2>Least used for most time</h2>"), _table_html(WASTER_COLUMNS, report.wasters)]
    if report.devices:
        columns = _with_hosts(DEVICE_COLUMNS, report)
        body += [_("<h2>GPUs</h2>"), _table_html(columns, report.devices), *_courses(report)]
    elif report.by not in FROM_LOG:
        body.append(_("<p>Nothing was seen in this time.</p>"))
    written = local_time(now)
    body.append(
        _('<p class="faint">Written by gpuguard on {written}.  GPU-hours count each user of a shared GPU.</p>').format(
            written=written
        )
    )
    language = _("en")
    return (
        f'<!DOCTYPE html>\n<html lang="{language}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _facts_html(report: Report) -> list[str]:
    """Return the few numbers for a reader who reads nothing else."""
    divided = {total.device.parent for total in report.devices}
    devices = [total for total in report.devices if total.device.uuid not in divided]
    seen = sum(total.seen - total.claimed_unknown for total in devices)
    if seen <= 0:
        return []
    used, idle, unclaimed = (sum(getattr(row, part) for row in report.users) for part in ("used", "idle", "unclaimed"))
    joules = [total.energy for total in devices if total.energy is not None]
    waiting = [row.waiting for row in report.users if row.waiting]
    facts = [
        (format_count(len(devices), "GPU"), _("{hours} GPU-hours watched").format(hours=hours(seen))),
        (f"{100 * sum(total.claimed for total in devices) / seen:.0f} %", _("of them claimed")),
        (f"{100 * used / (used + idle):.0f} %", _("of the claimed time used, where it is known"))
        if used + idle
        else None,
        (hours(idle), _("GPU-hours claimed but idle")),
        (hours(unclaimed), _("GPU-hours used without a claim")) if unclaimed else None,
        (format_count(sum(row.claimed + row.unclaimed > 0 for row in report.users), "user"), _("had a GPU")),
        (hours(sum(waiting)), _("hours waited, by {count}").format(count=format_count(len(waiting), "user")))
        if waiting
        else None,
        (f"{kilowatt_hours(sum(joules))} kWh", _("taken by the GPUs")) if joules else None,
    ]
    return [f'<div class="facts">{"".join(f"<p><b>{fact[0]}</b> {fact[1]}</p>" for fact in facts if fact)}</div>']


def _table_html(columns: Sequence[Column], rows: Sequence[object], bars: Sequence[str] = ()) -> str:
    """Return a table; *bars* stand behind the first column."""
    kinds = [' class="text"' if column.is_text else "" for column in columns]
    heads = [f"<th{kind}>{escape(_(column.header))}</th>" for kind, column in zip(kinds, columns, strict=True)]
    named = [f' data-head="{escape(_(column.header))}"' if number else "" for number, column in enumerate(columns)]
    lines = [
        [
            f"<td{kind}{name}>{escaped(column.cell(row))}</td>"
            for kind, name, column in zip(kinds, named, columns, strict=True)
        ]
        for row in rows
    ]
    if bars:
        heads.insert(1, f"<th>{escape(_('GPU-hours'))}</th>")
        for line, bar in zip(lines, bars, strict=True):
            line.insert(1, f'<td class="bar">{bar}</td>')
    body = "\n".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<tr>{"".join(heads)}</tr>\n{body}\n</table></div>'


def _legend(colour: str, text: str) -> str:
    return f'<span><i style="background:var({colour})"></i>{text}</span>'


def _bar_svg(row: UsageRow, most: float) -> str:
    drawn, told, left = [], [], 0.0
    for part, words, *_drawn in PARTS:
        value = getattr(row, part)
        if value > 0:
            size = max(1.0, value / most * 200)
            place = f'x="{left:.1f}" width="{size:.1f}" height="{BAR_HEIGHT}" fill="var(--{part})"'
            told.append(_("{words}: {hours} GPU-hours").format(words=_(words), hours=hours(value)))
            drawn.append(f"<rect {place}><title>{told[-1]}</title></rect>")
            left += size
    label = ", ".join(told) or "nothing"
    return f'<svg class="bar" viewBox="0 0 204 {BAR_HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def _courses(report: Report) -> list[str]:
    courses = [(total.device, course) for total in report.devices if (course := report.courses.get(total.device.uuid))]
    if not courses:
        return []
    points = [series for _device, course in courses for series in course.values()]
    begin, end = known_period(points, report.watch)
    legend = _legend("--course", _("utilization")) + _legend("--claimed", _("claimed"))
    drawn = [f"<h3>{escaped(device.label)}</h3>" + _course(course, begin, end) for device, course in courses]
    period = _("<p>{span}.  Nothing is drawn for times without samples.</p>").format(span=format_span(begin, end))
    return [_("<h2>Over the time</h2>"), period, f'<p class="key">{legend}</p>', *drawn]


def _course(course: Mapping[str, Sequence[Point]], begin: float, end: float) -> str:
    """Draw utilization over what was claimed, with the times below; the drawing is stretched, so it has no text."""
    names = ("claimed_percent", "utilization_percent")
    claimed, busy = (bucketed(course.get(name, ()), begin, end, BUCKETS) for name in names)
    drawn = [
        f'<rect class="claimed" x="{number}" y="{100 - value:.1f}" width="1.1" height="{value:.1f}"/>'
        for number, value in enumerate(claimed)
        if value
    ]
    drawn += [f'<line class="axis" x1="0" x2="{BUCKETS}" y1="{y}" y2="{y}"/>' for y in (0, 50, 100)]
    for is_known, stretch in groupby(enumerate(busy), lambda item: item[1] is not None):
        if not is_known:
            continue
        corners = [(number + 0.5, 100 - min(100.0, value or 0.0)) for number, value in stretch]
        if len(corners) == 1:
            (x, height), *_more = corners
            corners = [(x - 0.5, height), (x + 0.5, height)]
        points = " ".join(f"{x:.1f},{height:.1f}" for x, height in corners)
        drawn.append(f'<polyline class="course" points="{points}"/>')
    known = [value for value in busy if value is not None]
    label = (
        _("utilization: mean {mean:.0f} %, highest {highest:.0f} %").format(
            mean=sum(known) / len(known), highest=max(known)
        )
        if known
        else _("not known")
    )
    marks = [
        f'<span style="left:{100 * (moment - begin) / (end - begin):.1f}%">{escape(text)}</span>'
        for moment, text in round_marks(begin, end, MARKS)
        if 0.03 < (moment - begin) / (end - begin) < 0.97
    ]
    return (
        f'<div class="over"><svg viewBox="0 0 {BUCKETS} 100" preserveAspectRatio="none" role="img"'
        f' aria-label="{label}">{"".join(drawn)}</svg><span class="scale" style="top:0">100 %</span>'
        f'<span class="scale" style="bottom:0">0 %</span></div><div class="marks">{"".join(marks)}</div>'
    )
