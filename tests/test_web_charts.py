"""Whoever asks `gpuguard web` for charts without end delays no look, fills no memory, and is told to wait."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import subprocess
import threading

import pytest
from builders import a_device
from sources import PACKAGE
from stores import FIRST, at, fill

from gpuguard.units import format_bytes, format_duration

pytest.importorskip("starlette", reason="NOT TESTED: needs the extra web")

from gpuguard.history.queries import query_store
from gpuguard.web import feed as feeds
from gpuguard.web.feed import MAX_CHARTS, FrameFeed
from gpuguard.web.server import application

MANY = 100
PATIENCE = 20.0


async def asked(app, path):
    """The status of an answer."""
    path, _, query = path.partition("?")
    statuses = []

    async def receive():
        await asyncio.sleep(PATIENCE)

    async def send(message):
        statuses.append(message.get("status"))

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": headers}
    await app(scope, receive, send)
    return statuses[0]


@pytest.fixture(name="feed")
def _feed(monkeypatch):
    monkeypatch.setattr(feeds, "UNWATCHED_SECONDS", 0.01)
    monkeypatch.setattr(FrameFeed, "_frame_text", lambda _: b"{}")
    return FrameFeed(None, None, lambda: [])


def drawn_when(feed, monkeypatch, go_on):
    """How many charts are drawn at the same time, at most; each waits for *go_on*."""
    at_once, most = [], []

    def drawn(metric, seconds):
        at_once.append(seconds)
        most.append(len(at_once))
        go_on.wait(PATIENCE)
        at_once.pop()
        return b"{}"

    monkeypatch.setattr(feed, "_drawn", drawn)
    return most


def test_a_hundred_charts_delay_no_look_and_are_drawn_one_by_one(feed, monkeypatch):
    go_on = threading.Event()
    most, app = drawn_when(feed, monkeypatch, go_on), application(feed, frozenset({"localhost"}))

    async def everybody():
        looking = asyncio.create_task(feed.run())
        paths = [f"/api/chart?metric=power&seconds={seconds}" for seconds in range(1000, 1000 + MANY)]
        asking = [asyncio.create_task(asked(app, path)) for path in paths]
        try:
            for _ in range(3):
                await asyncio.wait_for(feed.next(feed.frame.number), PATIENCE)
        finally:
            go_on.set()
        statuses = await asyncio.gather(*asking)
        looking.cancel()
        return statuses

    statuses = asyncio.run(everybody())
    assert sorted(set(statuses)) == [200, 503]
    assert statuses.count(200) <= MAX_CHARTS
    assert max(most) == 1


def test_the_same_chart_is_drawn_once_for_all_who_ask(feed, monkeypatch):
    go_on = threading.Event()
    go_on.set()
    most, app = drawn_when(feed, monkeypatch, go_on), application(feed, frozenset({"localhost"}))

    async def everybody():
        return await asyncio.gather(*(asked(app, "/api/chart?metric=power&seconds=600") for _ in range(MANY)))

    assert set(asyncio.run(everybody())) == {200}
    assert len(most) == 1


def test_the_end_waits_for_no_chart_but_the_one_that_is_drawn(feed, monkeypatch):
    go_on = threading.Event()
    most, app = drawn_when(feed, monkeypatch, go_on), application(feed, frozenset({"localhost"}))

    async def everybody():
        asking = [asyncio.create_task(asked(app, f"/api/chart?seconds={seconds}")) for seconds in range(600, 620)]
        while not most:
            await asyncio.sleep(0.01)
        feed.close()
        go_on.set()
        return await asyncio.gather(*asking)

    assert sorted(set(asyncio.run(everybody()))) == [200, 503]
    assert len(most) == 1


def test_a_look_that_fails_as_nobody_foresaw_is_said_and_the_next_one_goes_well(monkeypatch):
    looks = []

    def seen(_):
        looks.append(1)
        if len(looks) == 1:
            raise ZeroDivisionError("secret")
        return {"schema": 1, "devices": [], "users": [], "line": [], "unknown": []}

    monkeypatch.setattr(feeds, "UNWATCHED_SECONDS", 0.01)
    monkeypatch.setattr(FrameFeed, "_content", seen)
    feed = FrameFeed(None, None, lambda: [])

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

    series = query_store(path, lambda store: feeds._series_of(store, [uuid, "GPU-never"], "utilization", begin), now)

    known = [value for value in series.values[uuid] if value is not None]
    assert known and set(known) == {50.0}
    assert len(series.times) == len(series.values[uuid]) == len(series.values["GPU-never"])
    assert None in series.values[uuid], "nobody watched before"
    assert set(series.values["GPU-never"]) == {None}
    assert query_store(path, lambda store: feeds._series_of(store, ["GPU-never"], "power", begin), now) is None


UNITS = (PACKAGE / "web" / "page" / "units.js").read_text(encoding="utf-8")
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="NOT TESTED: needs node")


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
