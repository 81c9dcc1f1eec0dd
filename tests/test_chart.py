"""Charts in a terminal: what is known is drawn where it was, what is not leaves a gap, and everything fits."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.history.queries import Point
from gpuguard.sanitize import display_width
from gpuguard.views.charts import Scale, bucketed, plot, round_marks, scale_of, stacked

PERCENT = Scale(0.0, 100.0, "%")
HOUR = 3600.0
BEGIN = 1_700_000_100.0 // HOUR * HOUR


@pytest.fixture(autouse=True)
def _zone(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def a_point(begin: float, mean: float | None, seconds: float = 60.0, known: float | None = None) -> Point:
    return Point(begin, seconds, (seconds if known is None else known) if mean is not None else 0.0, mean, mean)


def drawing(values, rows=4, *, ascii_only=True):
    """The columns of a chart, without its axes."""
    lines = plot(values, PERCENT, BEGIN, BEGIN + HOUR, rows, ascii_only=ascii_only)[:rows]
    width = len(values) if ascii_only else len(values) // 2
    bodies = [line.partition("|" if ascii_only else "│")[2].ljust(width) for line in lines]
    return ["".join(column) for column in zip(*bodies, strict=True)]


DRAWINGS = {  # what it shows: (values, rows, the columns)
    "a high value at the top, zero at the bottom": ([100.0, 100.0, 0.0, 0.0], 4, ["*   ", "*   ", " ||*", "   *"]),
    "a gap that no line leads over": ([100.0, None, None, 0.0], 4, ["*   ", "    ", "    ", "   *"]),
    "zero, but not the unknown": ([0.0, None], 4, ["   *", "    "]),
    "a rise without holes": ([0.0, 100.0, 0.0], 8, ["       *", "*|||||| ", " ||||||*"]),
}


@pytest.mark.parametrize(("values", "rows", "columns"), DRAWINGS.values(), ids=DRAWINGS)
def test_what_is_known_is_drawn_where_it_was(values, rows, columns):
    assert drawing(values, rows) == columns


def test_with_dots_zero_is_drawn_and_unknown_is_not():
    assert drawing([0.0, 0.0, None, None], ascii_only=False) == ["   ⣀", "    "]


@given(st.lists(st.none() | st.floats(-50, 150), min_size=30, max_size=200), st.integers(3, 30), st.booleans())
def test_a_chart_fits_into_its_width_whatever_is_drawn(values, rows, ascii_only):
    lines = plot(values, PERCENT, BEGIN, BEGIN + 50 * HOUR, rows, ascii_only=ascii_only)
    columns = len(values) if ascii_only else len(values) // 2

    assert len(lines) == rows + 2
    assert max(map(display_width, lines[:-1])) <= columns + 7
    assert not ascii_only or "".join(lines).isascii()


BUCKETS = {  # what it shows: (points, end, columns, their means)
    "a mean of what was known": ([(0.0, 10.0), (60.0, 40.0, 60.0, 30.0), (120.0, None)], 240.0, 2, [20.0, None]),
    "a slot that is wider than a column": ([(0.0, 7.0, 900.0)], 1800.0, 6, [7.0, 7.0, 7.0, None, None, None]),
    "points outside of the time": ([(-60.0, 1.0), (0.0, 2.0), (120.0, 3.0)], 60.0, 1, [2.0]),
}


@pytest.mark.parametrize(("points", "end", "columns", "means"), BUCKETS.values(), ids=BUCKETS)
def test_a_column_is_the_mean_of_its_part_of_the_time(points, end, columns, means):
    assert bucketed([a_point(*point) for point in points], 0.0, end, columns) == pytest.approx(means)


@pytest.mark.parametrize(
    ("most", "highest"), [(0.0, 1e-9), (0.7, 0.8), (7.9, 8.0), (43.0, 50.0), (79.6, 80.0), (650.0, 800.0)]
)
def test_an_axis_ends_with_a_round_number_above_the_values(most, highest):
    assert scale_of([most], "W").highest == pytest.approx(highest)


def test_marks_lie_at_round_times_of_the_wall_clock_over_a_change_of_the_clock(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    begin = time.mktime((2026, 10, 23, 12, 0, 0, 0, 0, -1))
    marks = [text for _, text in round_marks(begin, begin + 5 * 86400, 8)]

    assert marks == ["Sat 10-24", "Sun 10-25", "Mon 10-26", "Tue 10-27", "Wed 10-28"]
    assert all(time.localtime(moment).tm_hour == 0 for moment, _ in round_marks(begin, begin + 5 * 86400, 8))


@pytest.mark.parametrize("span", [60.0, 600.0, HOUR, 12 * HOUR, 3 * 86400.0, 30 * 86400.0, 400 * 86400.0])
def test_there_are_some_marks_and_not_too_many_for_any_time(span):
    marks = round_marks(BEGIN, BEGIN + span, 6)

    assert 1 <= len(marks) <= 7


def test_parts_of_a_bar_have_their_lengths_and_a_small_one_is_not_lost():
    def plain(text: str, colour: str) -> str:
        return text

    assert stacked([(50.0, "#", ""), (25.0, "-", ""), (0.01, "!", ""), (0.0, "?", "")], 100.0, 20, plain) == (
        "##########-----!"
    )
    assert len(stacked([(99.0, "#", ""), (0.5, "-", ""), (0.5, "!", "")], 100.0, 20, plain)) == 20
