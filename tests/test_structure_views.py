"""What is shown of a snapshot of which one place is other: a daemon's state, or a recording that a stranger made.

query, top, the page in the browser and its charts show it in harmless characters or leave it out.  And what they
make of devices that come and go between two looks.  test_structure_readers has who and metrics.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import a_device, a_process, a_snapshot
from chances import THE_SAME
from structures import mutants
from test_structure_readers import a_state
from top_scenes import page_of, texts

from gpuguard import state
from gpuguard.claims.lockfiles import lock_directory
from gpuguard.cli import top_feed
from gpuguard.errors import BackendError, DriverUnresponsive
from gpuguard.model import Snapshot
from gpuguard.views.query import csv_lines, query_of, to_json
from gpuguard.views.query_fields import APP_FIELDS, GPU_FIELDS
from gpuguard.views.text import json_text
from gpuguard.views.top_history import History
from gpuguard.views.top_page import page
from gpuguard.views.top_scene import Scene, View
from gpuguard.views.usage import uses
from gpuguard.web.feed import METRICS, Feed

QUERIES = (query_of(",".join(GPU_FIELDS), apps=False), query_of(",".join(APP_FIELDS), apps=True))
NONE: frozenset[str] = frozenset()


def a_feed(place: Path, sample: Any) -> Feed:
    """Of the page in the browser; somebody wants to see everything."""
    source: Any = SimpleNamespace(sample=lambda: (sample(), None), throughput=sample)
    feed = Feed(source, lock_directory(str(place / "claims")), lambda: ())
    feed.curious = 1
    return feed


def lines_of(snapshot: Snapshot) -> Iterator[str]:
    """What `query` and `top` print."""
    for query in QUERIES:
        yield from csv_lines(snapshot, query, NONE, header=True, units=True)
        json_text(to_json(snapshot, query))
    scene = Scene(snapshot, uses(snapshot))
    for width in (40, 200):
        for mode in ("full", "compact"):
            yield from texts(page_of(scene, width, 30, mode=mode, tree=True))


def test_no_value_of_a_snapshot_does_anything_to_a_terminal_or_ends_a_view(tmp_path):
    """What a recording calls the kind of a process went to the terminal of `top` as it stood."""
    seen: list[Snapshot] = []
    feed = a_feed(tmp_path, lambda: seen[-1])
    for where, encoded in mutants(a_state(tmp_path)["snapshot"], brief=THE_SAME):
        try:
            seen.append(state._unpack(json.loads(encoded)))
        except (ValueError, ArithmeticError, TypeError, KeyError, AttributeError):
            continue  # as read_state()
        if len(seen[-1].devices) > 100:
            continue  # it takes seconds
        try:
            assert [line for line in lines_of(seen[-1]) if not line.isprintable()] == []
            assert b"inside gpuguard" not in feed._look()
            for metric in METRICS:
                feed._drawn(metric, 60.0)
        except Exception as error:
            raise AssertionError(where) from error
    assert len(seen) > 300


class Restless:
    """A driver whose devices come, go and change their places, and that does not answer once in a while."""

    def __init__(self) -> None:
        self.dice = random.Random(1)
        self.devices = [a_device(index, processes=(a_process(pid=os.getpid()),)) for index in range(4)]

    def sample(self, groups: object, devices: object = None) -> Snapshot:
        if self.dice.random() < 0.1:
            raise DriverUnresponsive("it hangs")
        some = self.dice.sample(self.devices, self.dice.randrange(5))
        moved = [replace(device, index=place) for place, device in enumerate(some)]
        return replace(a_snapshot(*moved), clock=time.clock_gettime(time.CLOCK_BOOTTIME))


def test_devices_that_come_and_go_between_two_looks_end_no_view(tmp_path):
    driver: Any = Restless()
    web = a_feed(tmp_path, lambda: driver.sample(None))
    args: Any = SimpleNamespace(fresh=True, tree=True, backend="nvml", dir=str(tmp_path / "claims"), filter="")
    top, history = top_feed.Feed(args, lambda: driver), History()
    for _ in range(100):
        try:
            scene = top.look()
        except BackendError:
            continue
        history.add(scene)
        for mode in ("full", "compact"):
            assert page(scene, history, View(mode=mode, tree=True), 100, 30)
        assert b"inside gpuguard" not in web._look()
        for metric in METRICS:
            web._drawn(metric, 60.0)


def test_a_view_that_shows_what_it_was_told_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuguard.views.top_processes.neutralise", str)

    with pytest.raises(AssertionError, match=r"^devices\.0\.processes\.0\.kind = NUL$"):
        test_no_value_of_a_snapshot_does_anything_to_a_terminal_or_ends_a_view(tmp_path)
