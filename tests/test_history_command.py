"""`gpuguard history` and `gpuguard report` as a user runs them, and their charts: what is unknown is a gap."""

import csv
import itertools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_uuid
from hypothesis import given
from hypothesis import strategies as st
from json_schemas import PAGE, faults, schemas
from nodes import Gpuguard
from stores import fill, set_version
from test_who import DOCUMENT, documented, printed

from gpuguard.claims.directory import lock_directory
from gpuguard.cli.history import period
from gpuguard.errors import InvalidRequest
from gpuguard.history import audit_log as log
from gpuguard.history.queries import Point
from gpuguard.history.store_schema import WIDTH
from gpuguard.model import Event
from gpuguard.sanitize import display_width
from gpuguard.views.charts import Scale, bar, bucketed, fitted, plot, round_marks, sparkline
from gpuguard.views.history import METRICS

NOW = time.time()
SLOTS = 360  # of an hour


@pytest.fixture
def store(tmp_path: Path, monkeypatch) -> str:
    """An hour of a device, until just now, half an hour of which nobody watched."""
    path = str(tmp_path / "state" / "usage.db")
    last = int(time.time() / WIDTH)
    fill(path, [*range(last - SLOTS, last - 270), *range(last - 90, last)], together=90)
    monkeypatch.setenv("GPUGUARD_STATE_DIR", os.path.dirname(path))
    monkeypatch.setenv("GPUGUARD_DIR", lock_directory(str(tmp_path / "claims")).path)
    monkeypatch.setenv("GPUGUARD_BACKEND", "simulated")
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))
    return path


@pytest.fixture
def said(store, command):
    """What a command line prints."""

    def say(*words: str) -> str:
        status, output, error = command(*words)
        assert (status, error) == (0, "")
        return str(output)

    return say


def points(text: str) -> list[dict[str, Any]]:
    (device,) = json.loads(text)["devices"]
    return list(device["points"])


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_drawn_told_and_tabulated(said, metric):
    options = "--metric", metric, "--from", "-1h"
    rows = list(csv.DictReader(said("history", *options, "--csv").splitlines()))

    assert "GPU 0" in said("history", *options)
    assert len(rows) in (178, 179, 180)
    assert abs(len(rows) - len(points(said("history", *options, "--json")))) <= 1
    assert {row["uuid"] for row in rows} == {a_uuid(0)}


def test_a_gap_has_no_points_and_is_a_gap_of_the_chart(said):
    times = [point["time"] for point in points(said("history", "--from", "1h", "--json"))]
    text = said("history", "--from", "1h", "--ascii")

    assert max(later - time for time, later in itertools.pairwise(times)) == 1810
    assert re.search(r"\*{10,} {20,}\*{10,}", text)
    assert re.search(r"The daemon saw (49|50) % of this time", text)


def test_a_young_record_fills_the_chart_of_a_long_time(said):
    text = said("history", "--from", "2h", "--ascii")

    assert re.search(r"\*{10,} {20,}\*{10,}", text)
    assert "nothing is known of the time before" in text


def test_memory_that_is_unknown_is_empty_and_null(said):
    (row, *_) = csv.DictReader(said("history", "--metric", "memory", "--from", "1h", "--csv").splitlines())
    (point, *_) = points(said("history", "--metric", "claimed", "--from", "1h", "--json"))

    assert row["memory_used_bytes"] != ""
    assert point["claimed_percent_highest"] is None


def test_the_document_describes_exactly_the_fields_that_are_printed(said):
    found: dict[str, set[str]] = {}
    for metric in METRICS:
        content = json.loads(said("history", "--from", "1h", "--metric", metric, "--json"))
        printed("history", content, found)
        assert faults(content, schemas(PAGE.read_text(encoding="utf-8"))["history"]) == []

    assert documented("history", DOCUMENT.read_text(encoding="utf-8")) == found


@pytest.mark.parametrize("word", ["0", a_uuid(0), a_uuid(0)[:12]])
def test_a_device_is_named_by_index_or_uuid(said, word):
    assert a_device(0).name in said("history", "-d", word, "--from", "1h")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("history", "-d", "7"), "--device 7 is no GPU that the daemon has seen.  There are 0."),
        (("history", "--from", "tomorrow"), "--from: 'tomorrow' is no point in time: write 7d or 12h"),
        (("history", "--from", "5"), "no point in time"),
        (("history", "--from", "2999-01-01"), "lies in the future"),
        (("history", "--from", "1h", "--to", "2h"), "no time between --from 1h and --to 2h: swap them"),
        (("report", "--since", "0001-01-01"), "--since"),
        (("report", "--html", "/nowhere/page.html"), "it cannot be written: No such file or directory"),
        (("report", "--json", "--csv"), "not allowed with argument"),
    ],
)
def test_what_cannot_be_understood_is_said(store, command, words, message):
    status, _, error = command(*words)

    assert status in (1, 2) and message in error


def test_a_time_may_be_written_in_many_ways(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    try:
        now = 1_795_000_000.0
        begins = [
            period(("--from", text), ("--to", "now"), now)[0]
            for text in ("-12h", "12h", "2026-11-18", "2026-11-18T01:30", "2026-11-18T01:30+00:00", "2026-11-18T01:30Z")
        ]
    finally:
        monkeypatch.undo()
        time.tzset()

    first = 1_794_931_200  # 2026-11-18 in Shanghai
    assert begins == [now - 43200, now - 43200, first, first + 5400, first + 5400 + 28800, first + 5400 + 28800]


def test_what_lies_in_the_future_is_cut_off():
    assert period(("--from", "1h"), ("--to", "2999-01-01"), NOW) == (NOW - 3600, NOW)
    with pytest.raises(InvalidRequest):
        period(("--from", "now"), ("--to", "now"), NOW)


@pytest.mark.parametrize("form", [(), ("--json",), ("--csv",), ("--html", "-")])
@pytest.mark.parametrize("by", ["user", "group", "device", "claim"])
def test_every_report_has_every_form(said, by, form):
    assert said("report", "--since", "1h", "--by", by, *form)


def test_a_page_replaces_a_file_and_writes_through_no_link(store, command, tmp_path):
    """In a directory of another user's a link may stand at that path, to whatever root may write."""
    page, victim = tmp_path / "week.html", tmp_path / "victim"
    page.write_text("an old one")
    assert command("report", "--since", "1h", "--html", str(page)) == (0, "", "")
    assert page.read_text().startswith("<!DOCTYPE html>")

    victim.write_text("mine")
    page.unlink()
    page.symlink_to(victim)
    status, _, error = command("report", "--since", "1h", "--html", str(page))
    assert status == 1 and "this is no regular file" in error
    assert (victim.read_text(), page.is_symlink()) == ("mine", True)
    assert not list(tmp_path.glob("*.new"))


def test_a_report_by_claim_needs_no_store(said, store, tmp_path):
    os.unlink(store)
    facts = (("wall_time_seconds", 60.0),)
    log.append(Event(time=NOW - 60, kind="release", outcome="settled", claim="abc", devices=("GPU-1",), facts=facts))

    assert "abc" in said("report", "--by", "claim")


@pytest.mark.parametrize("words", [("report", "--since", "30d"), ("history", "--from", "30d")])
@pytest.mark.parametrize(
    ("damage", "advice"),
    [
        (os.unlink, "`gpuguard daemon` makes it"),
        (lambda store: os.truncate(store, 30_000), "sets it aside"),
        (lambda store: set_version(store, 1), "sets it aside"),
    ],
    ids=["missing", "torn", "older"],
)
def test_a_store_that_is_of_no_use_is_an_error_with_advice_and_is_not_touched(store, command, words, damage, advice):
    damage(store)
    place = Path(store).parent
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    status, output, error = command(*words)

    assert (status, output) == (1, "")
    assert advice in error
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_output_without_unicode_is_drawn_in_ascii(store, tmp_path):
    gpuguard = Gpuguard(tmp_path, None, PYTHONIOENCODING="ascii")
    done = gpuguard("history", "--from", "1h", "--metric", "temperature")

    assert done.returncode == 0 and done.stdout.isascii()
    assert "100 C" in done.stdout or "60 C" in done.stdout


SHARES = st.none() | st.floats(-1, 3, allow_nan=False)


def width_of(parts):
    return sum(display_width(text) for text, _ in parts)


@given(SHARES, st.integers(1, 80), st.booleans())
def test_a_bar_takes_exactly_its_columns(share, width, ascii_only):
    parts = bar(share, width, "green", ascii_only=ascii_only)

    assert width_of(parts) == width
    assert not ascii_only or all(text.isascii() for text, _ in parts)


FULL = {0.0: "░░░░", 0.5: "██░░", 1.0: "████", 2.0: "████", 0.3: "█▎░░", 0.001: "▏░░░", None: "╌╌╌╌"}
FULL_IN_ASCII = {0.0: "....", 0.5: "##..", 1.0: "####", 0.01: "#...", None: "----"}


@pytest.mark.parametrize(("ascii_only", "bars"), [(False, FULL), (True, FULL_IN_ASCII)])
def test_a_bar_is_as_full_as_its_share(ascii_only, bars):
    shown = {share: bar(share, 4, "green", ascii_only=ascii_only) for share in bars}

    assert {share: "".join(text for text, _ in parts) for share, parts in shown.items()} == bars


def test_a_sparkline_has_the_newest_at_the_right_and_a_blank_where_nothing_is_known():
    assert sparkline([0.0, 0.5, None, 1.0], 6, 1.0) == "  ▁▅ █"
    assert sparkline([0.0, 0.5, None, 1.0], 2, 1.0) == " █"
    assert sparkline([0.0, 0.5, 1.0], 3, 1.0, ascii_only=True) == "_=#"
    assert sparkline([1.0], 3, 0.0) == "   "


@given(st.lists(st.tuples(st.text(st.sampled_from("ab 实験\u0301"), max_size=9), st.just(""))), st.integers(0, 40))
def test_fitted_parts_take_exactly_so_many_columns_whatever_their_characters(parts, width):
    found = fitted(parts, width)

    # A wide character that does not fit leaves a column free, which is filled with a blank.
    assert width_of(found) == width


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


def test_marks_lie_at_round_times_of_the_wall_clock_over_a_change_of_the_clock(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    begin = time.mktime((2026, 10, 23, 12, 0, 0, 0, 0, -1))
    marks = [text for _, text in round_marks(begin, begin + 5 * 86400, 8)]

    assert marks == ["Sat 10-24", "Sun 10-25", "Mon 10-26", "Tue 10-27", "Wed 10-28"]
    assert all(time.localtime(moment).tm_hour == 0 for moment, _ in round_marks(begin, begin + 5 * 86400, 8))
