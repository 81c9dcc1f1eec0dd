"""Charts of the page: a client that asks for them without end delays no sample, fills no memory, and has to wait."""

import asyncio
import json
import math
import random
import shutil
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from builders import a_device
from sources import PACKAGE
from stores import FIRST, a_sample, at, fill

from gpuguard.units import format_bytes, format_duration

pytest.importorskip("starlette", reason="the page in the browser (no starlette or uvicorn: pip install -e '.[dev]')")

from gpuguard.history.queries import query_store
from gpuguard.web import feed as feeds
from gpuguard.web.feed import MAX_CHARTS, ChartRequest, FrameFeed, series_of
from gpuguard.web.server import application

MANY = 100
PATIENCE = 60.0


async def asked(app, path, client="192.0.2.1"):
    """The status of an answer to another machine."""
    path, _, query = path.partition("?")
    statuses = []

    async def receive():
        await asyncio.sleep(PATIENCE)

    async def send(message):
        statuses.append(message.get("status"))

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": headers}
    scope["client"] = (client, 40_000)
    await app(scope, receive, send)
    return statuses[0]


@pytest.fixture(name="feed")
def _feed(monkeypatch):
    monkeypatch.setattr(feeds, "UNWATCHED_SECONDS", 0.01)
    monkeypatch.setattr(FrameFeed, "_frame_text", lambda _: b"{}")
    return FrameFeed(None, None, None, lambda _: [])


class Drawing:
    """Charts whose drawing waits for *go_on*; how many were drawn at the same time, each time that one began."""

    def __init__(self, feed, monkeypatch):
        self.feed, self.go_on = feed, threading.Event()
        self.together, self._now = [], 0
        monkeypatch.setattr(feed, "drawn", self._drawn)

    def _drawn(self, asked):
        self._now += 1
        self.together.append(self._now)
        self.go_on.wait(PATIENCE)
        self._now -= 1
        return b"{}"

    def statuses(self, queries, meanwhile, others=()):
        """Of the answers to all of these at once, and to *others*, from elsewhere, behind them; then it goes on."""

        async def requested():
            app = application(self.feed, frozenset({"localhost"}))
            answers = [asyncio.create_task(asked(app, f"/api/chart?{query}")) for query in queries]
            answers += [asyncio.create_task(asked(app, f"/api/chart?{query}", "192.0.2.2")) for query in others]
            try:
                await meanwhile()
            finally:
                self.go_on.set()
            return await asyncio.gather(*answers)

        return asyncio.run(requested())


@pytest.fixture(name="drawing")
def _drawing(feed, monkeypatch):
    return Drawing(feed, monkeypatch)


def test_a_hundred_charts_delay_no_sample_and_are_drawn_one_by_one(feed, drawing):
    async def three_samples():
        sampling = asyncio.create_task(feed.run())
        for _ in range(3):
            await asyncio.wait_for(feed.next(feed.frame.number), PATIENCE)
        sampling.cancel()

    statuses = drawing.statuses([f"metric=power&seconds={1000 + number}" for number in range(MANY)], three_samples)

    assert sorted(set(statuses)) == [200, 503]
    assert statuses.count(200) <= MAX_CHARTS
    assert max(drawing.together) == 1


def test_a_crowd_of_charts_of_one_viewer_makes_room_for_another_ones(drawing):
    crowd = [f"metric=power&seconds={1000 + number}" for number in range(MANY)]
    statuses = drawing.statuses(crowd, lambda: asyncio.sleep(0), ["metric=memory&seconds=600", "seconds=700"])

    assert statuses[MANY:] == [200, 200]
    assert statuses[:MANY].count(200) == MAX_CHARTS - 2


def test_the_same_chart_is_drawn_once_for_all_viewers(drawing):
    assert set(drawing.statuses(["metric=power&seconds=600"] * MANY, lambda: asyncio.sleep(0))) == {200}
    assert drawing.together == [1]


def test_the_end_waits_for_no_chart_but_the_one_that_is_drawn(feed, drawing):
    async def closed():
        while not drawing.together:
            await asyncio.sleep(0.01)
        feed.close()

    statuses = drawing.statuses([f"seconds={600 + number}" for number in range(20)], closed)

    assert sorted(set(statuses)) == [200, 503]
    assert drawing.together == [1]


def test_a_sample_that_fails_unforeseen_is_said_and_the_next_one_goes_well(monkeypatch):
    looks = []

    def seen(_):
        looks.append(1)
        if len(looks) == 1:
            raise ZeroDivisionError("secret")
        return {"schema": 1, **dict.fromkeys(("devices", "users", "line", "jobs", "findings", "events", "unknown"), ())}

    monkeypatch.setattr(feeds, "UNWATCHED_SECONDS", 0.01)
    monkeypatch.setattr(FrameFeed, "_content", seen)
    feed = FrameFeed(None, None, None, lambda _: [])

    async def two():
        looking = asyncio.create_task(feed.run())
        frames = [await asyncio.wait_for(feed.next(number), PATIENCE) for number in range(2)]
        looking.cancel()
        return [json.loads(frame.text) for frame in frames]

    first, second = asyncio.run(two())
    assert first["error"] == "a fault inside gpuguard: ZeroDivisionError"
    assert second["devices"] == []


@pytest.mark.parametrize("slots", [60, 6 * 60])
def test_a_chart_of_the_store_has_the_means_of_what_was_seen(tmp_path, slots):
    path = str(tmp_path / "usage.db")
    fill(path, range(FIRST, FIRST + slots), together=1000)
    uuid, begin, now = a_device().uuid, at(0) - 1000, at(slots)

    series = query_store(path, lambda store: series_of(store, [uuid, "GPU-never"], "utilization", (begin, now)), now)

    assert series
    times, values = series
    known = [value for value in values[uuid] if value is not None]
    assert known and set(known) == {50.0}
    assert len(times) == len(values[uuid]) == len(values["GPU-never"])
    assert None in values[uuid], "nobody watched before"
    assert set(values["GPU-never"]) == {None}
    assert query_store(path, lambda store: series_of(store, ["GPU-never"], "power", (begin, now)), now) is None


SLOTS = 30


def drawn(tmp_path, monkeypatch, seen_at: Sequence[float], **request: float) -> dict[str, Any]:
    """The chart of a page that saw a machine at these seconds, beside a daemon that kept the SLOTS before second 0."""
    monkeypatch.setenv("GPUGUARD_STATE_DIR", str(tmp_path))
    fill(str(tmp_path / "usage.db"), range(FIRST - SLOTS, FIRST), together=SLOTS)
    feed = FrameFeed(None, None, None, lambda _: [])
    for second in seen_at:
        feed.remember(a_sample(at(0) + second))
    monkeypatch.setattr(feeds.time, "time", lambda: at(0) + max(seen_at))
    chart: dict[str, Any] = json.loads(feed.drawn(ChartRequest("utilization", **{"seconds": 600, **request})))
    return chart


def test_the_chart_of_ten_minutes_begins_with_what_the_daemon_saw_before_the_page_began(tmp_path, monkeypatch):
    chart = drawn(tmp_path, monkeypatch, [20, 22, 24])

    known = [time for time, value in zip(chart["times"], chart["values"][a_device().uuid], strict=True) if value == 50]
    assert known[0] == pytest.approx(at(-SLOTS), abs=10) and chart["begin"] < known[0]
    assert known[-3:] == [at(0) + second for second in (20, 22, 24)]


@pytest.mark.parametrize(("seen_at", "gap"), [([20, 22, 24], False), ([120, 122], True)])
def test_what_the_daemon_has_not_written_yet_is_no_gap_unless_it_ended_long_before(tmp_path, monkeypatch, seen_at, gap):
    values = drawn(tmp_path, monkeypatch, seen_at)["values"][a_device().uuid]

    assert (None in values[values.index(50) :]) is gap


def test_a_clock_that_is_set_back_a_little_costs_no_more_than_that(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUGUARD_STATE_DIR", str(tmp_path))
    feed = FrameFeed(None, None, None, lambda _: [])
    for second in (*range(0, 600, 2), 595):
        feed.remember(a_sample(at(0) + second))
    monkeypatch.setattr(feeds.time, "time", lambda: at(0) + 595)

    for seconds, earliest in ((600, 0), (3600, 8)):
        times = json.loads(feed.drawn(ChartRequest("utilization", seconds)))["times"]
        assert times == sorted(set(times))
        assert (times[0], times[-1]) == (at(0) + earliest, at(0) + 595)


def test_a_chart_of_an_earlier_time_ends_there(tmp_path, monkeypatch):
    chart = drawn(tmp_path, monkeypatch, [20, 22], seconds=120, until=at(-5))

    assert chart["begin"] == at(-5) - 120
    assert max(chart["times"]) < at(-5)
    assert 50 in chart["values"][a_device().uuid]


def test_a_chart_by_the_hour_has_whole_hours(tmp_path, monkeypatch):
    chart = drawn(tmp_path, monkeypatch, [20, 22], seconds=7 * 86400, step=3600)

    assert len(chart["times"]) == 7 * 24
    assert chart["begin"] % 3600 == 0
    assert sum(value is not None for value in chart["values"][a_device().uuid]) == 1


UNITS = (PACKAGE / "web" / "page" / "units.js").read_text(encoding="utf-8")
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="the code of the page in node (no node: apt-get install nodejs)")


def in_the_browser(script: str, function: str, values: list[float]) -> list[str]:
    code = f"{script}\nconsole.log(JSON.stringify({json.dumps(values)}.map((value) => UNITS.{function}(value))));"
    done = subprocess.run([str(NODE), "-e", code], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def some_values(highest: float) -> list[float]:
    """Whole numbers, since exact halves are rounded to even in Python and up in a browser."""
    chance = random.Random(16)
    borders = [border + step for border in (0, 1, 60, 999, 1000, 1023, 3600, 86400, 1000 * 2**20) for step in (0, 1)]
    return [*borders, *(math.floor(math.exp(chance.uniform(0, math.log(highest)))) for _ in range(500))]


def differences(script: str) -> list[tuple[float, str, str]]:
    sizes, durations = some_values(2.0**50), [*some_values(400 * 86400.0), 0.25]
    rows = [
        *zip(sizes, in_the_browser(script, "bytes", sizes), map(format_bytes, sizes), strict=True),
        *zip(durations, in_the_browser(script, "duration", durations), map(format_duration, durations), strict=True),
    ]
    return [row for row in rows if row[1] != row[2]]


@needs_node
def test_memory_and_durations_are_written_as_in_a_terminal():
    assert differences(UNITS) == []


@needs_node
def test_another_border_between_two_units_is_found():
    planted = UNITS.replace(">= 1000", ">= 1024")

    assert planted != UNITS and differences(planted)
