"""Charts in a terminal: a line over time in braille dots or ASCII, bars, sparklines and alarm colours.

Unknown values leave a gap: nothing is drawn there, no line leads over it, and it has no colour.  Text that comes in is
already neutral.  Does not know what is drawn: see history, report and gpuguard.top.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuguard.history.queries import Point, Watch
from gpuguard.locale import N_, _
from gpuguard.sanitize import display_width
from gpuguard.tables import shorten
from gpuguard.units import local_time
from gpuguard.views.text import Paint

Values = Sequence["float | None"]
Part = tuple[str, str]  # (text, style of views.text, "" for plain)

# The dots of a braille character from top to bottom, left and right: https://www.unicode.org/charts/PDF/U2800.pdf
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800
_EIGHTHS = " ▏▎▍▌▋▊▉"
_HEIGHTS, _ASCII_HEIGHTS = "▁▂▃▄▅▆▇█", "_.,-=+*#"
_STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
# The seconds that may lie between two marks below a chart, and how such a mark is written.
_MARKS = [
    (seconds, form)
    for form, steps in (
        ("%H:%M:%S", (10, 30)),
        ("%H:%M", (_MINUTE, 2 * _MINUTE, 5 * _MINUTE, 10 * _MINUTE, 30 * _MINUTE, _HOUR, 2 * _HOUR, 3 * _HOUR)),
        (N_("%a %H:%M"), (6 * _HOUR, 12 * _HOUR)),
        (N_("%a %m-%d"), (_DAY,)),
        ("%m-%d", (2 * _DAY, 7 * _DAY, 14 * _DAY)),
        ("%Y-%m-%d", (28 * _DAY, 91 * _DAY, 365 * _DAY)),
    )
    for seconds in steps
]


@dataclass(frozen=True)
class Scale:
    """A vertical axis."""

    lowest: float
    highest: float
    unit: str

    def row_of(self, value: float, rows: int) -> int:
        """Return the row of *value* among *rows*; 0 is the top."""
        share = (value - self.lowest) / (self.highest - self.lowest)
        return min(rows - 1, max(0, rows - 1 - round(share * (rows - 1))))


def scale_of(values: Iterable[float], unit: str, *, lowest: float = 0.0, highest: float | None = None) -> Scale:
    """Return an axis that ends with a round number above all *values*, or at *highest*."""
    if highest is not None:
        return Scale(lowest, highest, unit)
    span = max(max(values, default=1.0) - lowest, 1e-9)
    power = 10.0 ** math.floor(math.log10(span))
    return Scale(lowest, lowest + next(step * power for step in _STEPS if step * power >= span * 0.999), unit)


def bucketed(points: Iterable[Point], begin: float, end: float, count: int) -> list[float | None]:
    """Return the means of *points* over *count* equal parts of a period, None for a part of which nothing is known."""
    width = (end - begin) / count
    sums, weights = [0.0] * count, [0.0] * count
    for point in points:
        if point.mean is None or point.known <= 0:
            continue
        first, last = point.time, min(point.time + point.seconds, end)
        for number in range(max(0, int((first - begin) / width)), min(count, math.ceil((last - begin) / width))):
            both = min(last, begin + (number + 1) * width) - max(first, begin + number * width)
            weight = max(0.0, both) * point.known / point.seconds
            sums[number] += point.mean * weight
            weights[number] += weight
    return [total / weight if weight > 0 else None for total, weight in zip(sums, weights, strict=True)]


def known_period(courses: Iterable[Iterable[Point]], watch: Watch) -> tuple[float, float]:
    """Return the known part of a period, so that a record that began an hour ago is no dot on a week's axis."""
    known = [point for points in courses for point in points if point.mean is not None]
    if not known:
        return watch.begin, watch.end
    begin = max(watch.begin, watch.store_begins or 0.0, min(point.time for point in known))
    return begin, min(watch.end, max(point.time + point.seconds for point in known))


def plot(values: Values, scale: Scale, begin: float, end: float, rows: int, *, ascii_only: bool = False) -> list[str]:
    """Draw a line chart with its axes and their marks; two of *values* take one column, in ASCII one does.

    Args:
        values: one for each equal part of the period.
        begin, end: unix times.
        rows: lines of the drawing alone.
    """
    drawn = _in_ascii(values, scale, rows) if ascii_only else _in_braille(values, scale, rows)
    labels = {0: scale.highest, rows - 1: scale.lowest}
    if rows >= 5:
        labels[rows // 2] = scale.highest - (scale.highest - scale.lowest) * (rows // 2) / (rows - 1)
    written = {row: f"{value:.3g} {scale.unit}" if row == 0 else f"{value:.3g}" for row, value in labels.items()}
    margin = max(map(display_width, written.values()))
    axis = "|" if ascii_only else "│"
    lines = [f"{written.get(row, ''):>{margin}} {axis}{line}".rstrip() for row, line in enumerate(drawn)]
    below, times = _marks(begin, end, len(values) if ascii_only else len(values) // 2, ascii_only=ascii_only)
    return [*lines, " " * (margin + 1) + below, " " * (margin + 2) + times]


def _in_braille(values: Values, scale: Scale, rows: int) -> list[str]:
    cells = [[0] * (len(values) // 2) for _ in range(rows)]
    for x, first, last in _strokes(values, scale, rows * 4):
        for y in range(first, last + 1):
            if x // 2 < len(cells[0]):
                cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in row) for row in cells]


def _in_ascii(values: Values, scale: Scale, rows: int) -> list[str]:
    cells = [[" "] * len(values) for _ in range(rows)]
    for x, first, last in _strokes(values, scale, rows):
        for y in range(first, last + 1):
            cells[y][x] = "|"
        value = values[x]
        assert value is not None
        cells[scale.row_of(value, rows)][x] = "*"
    return ["".join(row) for row in cells]


def _strokes(values: Values, scale: Scale, rows: int) -> Iterable[tuple[int, int, int]]:
    """Yield (column, first row, last row) for each value, including the way from the value before it."""
    former = None
    for x, value in enumerate(values):
        if value is None:
            former = None
            continue
        y = scale.row_of(value, rows)
        if former is None or former == y:
            yield x, y, y
        else:
            yield x, min(y, former + 1 if former < y else y), max(y, former - 1 if former > y else y)
        former = y


def _marks(begin: float, end: float, columns: int, *, ascii_only: bool) -> tuple[str, str]:
    """Return the lower axis with its marks, and the times below it, in this machine's time zone or $TZ."""
    line, dash, tick = ("+", "-", "+") if ascii_only else ("└", "─", "┴")
    below, times = [dash] * columns, [" "] * (columns + 12)
    free = 0
    for moment, text in round_marks(begin, end, max(1, columns // 14)):
        column = round((moment - begin) / (end - begin) * columns)
        if column >= columns:
            continue
        place = max(0, column - len(text) // 2)
        if place >= free and place + len(text) <= len(times):
            below[column] = tick
            times[place : place + len(text)] = text
            free = place + len(text) + 1
    return line + "".join(below), "".join(times).rstrip()


def round_marks(begin: float, end: float, most: int) -> list[tuple[float, str]]:
    """Return round times between two unix times, about *most* of them at most, and how each is written.

    They are round by the clock on the wall, even if it was put forward or back in between.
    """
    step, form = next((mark for mark in _MARKS if (end - begin) / mark[0] <= most), _MARKS[-1])
    day = time.localtime(begin)
    moment = time.mktime((day.tm_year, day.tm_mon, day.tm_mday, 0, 0, 0, 0, 0, -1))
    if step < _HOUR:  # no zone is put forward by less than half an hour
        moment = begin - (begin - moment) % step
    marks = []
    while moment < end:
        if moment >= begin:
            marks.append((moment, local_time(moment, _(form))))
        if step < _DAY:
            moment += step
        else:
            day = time.localtime(moment + _DAY / 2)
            moment = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + step // _DAY, 0, 0, 0, 0, 0, -1))
    return marks


def stacked(parts: Sequence[tuple[float, str, str]], most: float, columns: int, paint: Paint) -> str:
    """Draw a bar of several parts, each (value, character, colour); *most* would fill all columns.

    No part is lost: one that is not 0 takes a column at least, if there is room.
    """
    sizes = [0 if value <= 0 else max(1, round(value / most * columns)) for value, _, _ in parts]
    while sum(sizes) > columns:
        sizes[sizes.index(max(sizes))] -= 1
    return "".join(paint(mark * size, colour) for size, (_, mark, colour) in zip(sizes, parts, strict=True) if size)


def bar(share: float | None, width: int, colour: str, *, ascii_only: bool = False) -> list[Part]:
    """Draw a bar of *width* columns of which *share* (0..1) is filled."""
    if share is None:
        return [(("-" if ascii_only else "╌") * width, "faint")]
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)  # a little must not look like nothing
    full, rest = divmod(eighths, 8)
    if ascii_only:
        filled = min(width, max(1, full + (1 if rest >= 4 else 0))) if eighths else 0
        return [("#" * filled, colour), ("." * (width - filled), "faint")]
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    return [(text, colour), ("░" * (width - len(text)), "faint")]


def sparkline(values: Iterable[float | None], width: int, top: float, *, ascii_only: bool = False) -> str:
    """Draw the last *width* of *values* as heights between 0 and *top*, the newest at the right, unknown ones blank."""
    heights = _ASCII_HEIGHTS if ascii_only else _HEIGHTS
    last = list(values)[-width:] if width > 0 else []
    drawn = [
        " " if value is None or top <= 0 else heights[min(7, max(0, int(value / top * 8)))]  # 8 steps
        for value in last
    ]
    return "".join(drawn).rjust(max(0, width))


def alarm(value: float | None, warn: float | None, bad: float | None, calm: str = "green") -> str:
    """Return the colour of *value*: red from *bad* on, yellow from *warn* on; an unknown limit gives no alarm."""
    if value is None:
        return "dim"
    if bad is not None and value >= bad:
        return "bold red"
    return "yellow" if warn is not None and value >= warn else calm


def fitted(parts: Sequence[Part], width: int) -> list[Part]:
    """Fit *parts* into exactly *width* columns: they are filled up with blanks, or shortened."""
    pieces: list[Part] = []
    left = width
    for text, style in parts:
        if display_width(text) > left:
            pieces.append((shorten(text, left), style))
            left -= display_width(pieces[-1][0])
            break
        pieces.append((text, style))
        left -= display_width(text)
    return [*pieces, (" " * left, "")] if left > 0 else pieces
