"""The report on GPU time as one HTML page: no script, nothing from elsewhere, charts as inline SVG.

It can be mailed and opened from a file.  Light or dark as the reader's system is; every text is escaped.  Does not read
the store: see report.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from gpuguard.history.queries import DeviceTotal, Point, Watch
from gpuguard.history.report import Report, UsageRow, device_label
from gpuguard.sanitize import neutralise
from gpuguard.units import format_bytes, format_duration
from gpuguard.views.charts import bucketed, round_marks
from gpuguard.views.history import remarks, zone
from gpuguard.views.report import LEGEND, PARTS, Claims, hours, kilowatt_hours

WIDTH, BAR_HEIGHT, CHART_HEIGHT = 800, 18, 72  # of drawings, in their own units; they shrink with the page
BUCKETS = 400

# Parts of bars differ in lightness too, for those who cannot tell their colours apart.
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
svg text { fill: var(--faint); font-size: 11px; } .key span { display: inline-block; margin-right: 1.2rem; }
.key i { border-radius: 2px; display: inline-block; height: .8em; margin-right: .35em; width: .8em; }
td.bar { width: 40%; } .axis { stroke: var(--line); stroke-width: 1; } .course { fill: none; stroke: var(--course);
  stroke-width: 1.5; } .claimed { fill: var(--claimed); }
"""


def to_html(report: Report, claims: Claims | None, host: str, now: float) -> str:
    """The whole page.

    Args:
        report: what is told; its courses are drawn.
        claims: of a report by claim.
        host: name of the machine.
        now: unix time at which it is written.
    """
    watch = report.watch
    begin, end = (time.strftime("%Y-%m-%d %H:%M", time.localtime(each)) for each in (watch.begin, watch.end))
    title = f"GPU time on {_text(host)}, {begin} to {end}"
    body = [f"<h1>{title}</h1>", f'<p class="faint">Times are {_text(zone(watch.end))}.</p>']
    body += [f'<p class="remark">{_text(line)}</p>' for line in remarks(watch, None) if claims is None]
    if claims is not None:
        body += _claims(claims)
    elif report.rows:
        body += [f"<h2>By {_text(report.by)}</h2>", _key(), _rows(report)]
    if report.wasters:
        body += ["<h2>Least used for most time</h2>", _wasters(report.wasters)]
    if report.devices:
        body += ["<h2>Devices</h2>", _devices(report.devices), *_courses(report)]
    if not report.devices and claims is None:
        body.append("<p>Nothing was seen in this time.</p>")
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    body.append(f'<p class="faint">Written by gpuguard on {written}.  GPU-hours count each user of a shared GPU.</p>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """What strangers wrote, harmless in a page."""
    return escape(neutralise(text))


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], words: frozenset[int] = frozenset()) -> str:
    """Cells are HTML already; those of the columns *words* are text of any length."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="text"' if place in words else "" for place in range(len(cells))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table>\n<tr>{line(headers, "th")}</tr>\n{body}\n</table></div>'


def _key() -> str:
    parts = (f'<span><i style="background:var(--{what})"></i>{LEGEND[what]}</span>' for what, *_ in PARTS)
    return f'<p class="key">{"".join(parts)}</p>'


def _rows(report: Report) -> str:
    most = max((row.claimed + row.unclaimed for row in report.rows), default=0.0)
    waits = report.by != "device"
    whole = sum(row.wanted or 0.0 for row in report.users)
    headers = [report.by.capitalize(), "", "Claimed", "Used", "Idle", "Unknown", "Unclaimed", "kWh"]
    cells = []
    for row in report.rows:
        times = [hours(each) for each in (row.claimed, row.used, row.idle, row.unknown, row.unclaimed)]
        cell = [_text(row.name), _bar(row, most), *times, kilowatt_hours(row.energy)]
        if waits:
            share = "" if row.wanted is None or not whole else f" ({100 * row.wanted / whole:.0f} %)"
            cell += [hours(row.waiting), hours(row.wanted) + share]
        cells.append(cell)
    return _table([*headers, *(["Waited", "Wanted"] if waits else [])], cells)


def _bar(row: UsageRow, most: float) -> str:
    drawn, place = [], 0.0
    for what, *_ in PARTS:
        value = getattr(row, what)
        if value > 0:
            size = max(1.0, value / most * 200)
            title = f"<title>{LEGEND[what]}: {hours(value)} GPU-hours</title>"
            drawn.append(
                f'<rect x="{place:.1f}" width="{size:.1f}" height="{BAR_HEIGHT}" fill="var(--{what})">{title}</rect>'
            )
            place += size
    return f'<svg class="bar" viewBox="0 0 204 {BAR_HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _wasters(rows: Iterable[UsageRow]) -> str:
    cells = ([_text(row.name), hours(row.idle), hours(row.claimed), hours(row.unclaimed)] for row in rows)
    return _table(["User", "Claimed but idle", "of claimed", "Used without a claim"], cells)


def _devices(devices: Iterable[DeviceTotal]) -> str:
    cells = []
    for each in devices:
        known = each.claimed_unknown < each.seen
        free = max(0.0, each.seen - each.claimed - each.claimed_unknown)
        utilization = "n/a" if each.utilization is None else f"{each.utilization:.0f} %"
        times = [hours(each.seen), *(hours(one if known else None) for one in (each.claimed, free))]
        cells.append(
            [_text(device_label(each)), _text(each.name or "n/a"), *times, utilization, kilowatt_hours(each.energy)]
        )
    headers = ["Device", "Model", "Watched", "Claimed", "Free", "Utilization", "kWh"]
    return _table(headers, cells, frozenset({1}))


def _courses(report: Report) -> list[str]:
    drawn = []
    for each in report.devices:
        course = report.courses.get(each.device, {})
        if course:
            drawn.append(f"<h3>{_text(device_label(each))}</h3>" + _course(course, report.watch))
    if not drawn:
        return []
    key = (
        '<p class="key"><span><i style="background:var(--course)"></i>utilization</span>'
        '<span><i style="background:var(--claimed)"></i>claimed</span>Nothing is drawn where nobody watched.</p>'
    )
    return ["<h2>Over the time</h2>", key, *drawn]


def _course(course: Mapping[str, Sequence[Point]], watch: Watch) -> str:
    left, right, bottom = 34, WIDTH - 4, CHART_HEIGHT - 16
    claimed, busy = (
        bucketed(course.get(name, ()), watch.begin, watch.end, BUCKETS)
        for name in ("claimed_percent", "utilization_percent")
    )
    step = (right - left) / BUCKETS

    def y(percent: float) -> float:
        return bottom - (bottom - 6) * min(100.0, percent) / 100

    drawn = [
        f'<rect class="claimed" x="{left + number * step:.1f}" y="{y(value):.1f}" width="{step + 0.3:.1f}"'
        f' height="{bottom - y(value):.1f}"/>'
        for number, value in enumerate(claimed)
        if value
    ]
    drawn += [f'<line class="axis" x1="{left}" x2="{right}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>' for at in (0, 50, 100)]
    for line in _lines(busy):
        points = " ".join(f"{left + (number + 0.5) * step:.1f},{y(value):.1f}" for number, value in line)
        if len(line) == 1:
            x, at = left + line[0][0] * step, y(line[0][1])
            points = f"{x:.1f},{at:.1f} {x + step:.1f},{at:.1f}"
        drawn.append(f'<polyline class="course" points="{points}"/>')
    drawn += [f'<text x="0" y="{y(at) + 4:.1f}">{at} %</text>' for at in (0, 100)]
    for moment, text in round_marks(watch.begin, watch.end, 8):
        x = left + (moment - watch.begin) / (watch.end - watch.begin) * (right - left)
        anchor = "start" if x < left + 30 else "end" if x > right - 30 else "middle"
        drawn.append(f'<text x="{x:.1f}" y="{CHART_HEIGHT - 3}" text-anchor="{anchor}">{escape(text)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {CHART_HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _lines(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """The stretches in which every value is known."""
    lines: list[list[tuple[int, float]]] = [[]]
    for number, value in enumerate(values):
        if value is not None:
            lines[-1].append((number, value))
        elif lines[-1]:
            lines.append([])
    return [line for line in lines if line]


def _claims(claims: Claims) -> list[str]:
    rows, unfinished = claims
    cells = [
        [
            _text(row.id),
            _text(row.user or "n/a"),
            time.strftime("%m-%d %H:%M", time.localtime(row.ended)),
            format_duration(row.seconds),
            str(len(row.devices)),
            hours(row.gpu_seconds),
            "n/a" if row.utilization is None else f"{row.utilization:.0f} %",
            kilowatt_hours(row.energy),
            format_bytes(row.peak_memory),
            "n/a" if row.exit_status is None else str(row.exit_status),
            _text(row.command or "n/a"),
        ]
        for row in rows
    ]
    headers = ["Claim", "User", "Ended", "Took", "GPUs", "GPU-hours", "Utilization", "kWh", "Peak", "Exit", "Command"]
    said = ["<h2>By claim</h2>", "<p>Out of the audit logs that their reader may see: his own, and the machine's.</p>"]
    if unfinished:
        said.append(f"<p>{unfinished} more began in this time and have no end in the log.</p>")
    return [*said, _table(headers, cells, frozenset({1, 10})) if cells else "<p>No claim ended in this time.</p>"]
