"""Nobody pushes out of the audit log what was done to others, however much there is to be said about him."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from builders import GIB, a_device, a_process, a_snapshot
from guarded import a_scene
from test_watchdog import Recording

from gpuguard.enforcement import limits
from gpuguard.enforcement.limits import AT_ONCE, EVERY, TELL_SECONDS, Lines, recent_actions
from gpuguard.history import audit_log
from gpuguard.model import Event
from gpuguard.policies.amounts import parse_memory_amount
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.thresholds import MemoryRule
from gpuguard.watchdog import Watchdog

STEPS = (Step("log"),)
SMALL = Policy("small", (MemoryRule(above=parse_memory_amount("20MiB")),), hold=0.0, steps=STEPS)


def a_line(user: str | None = "bob", kind: str = "log", outcome: str = "done", **facts: float) -> Event:
    return Event(time.time(), kind, outcome, user, pid=7, facts=tuple(facts.items()))


def written(lines: Lines, event: Event, clock: float, number: int = AT_ONCE + 50) -> int:
    return sum(lines.admits(event, clock) for _ in range(number))


@pytest.mark.parametrize("event", [a_line(), a_line("bob", "note", "cleared"), a_line(None), a_line(None, uid=1001)])
def test_about_one_user_there_are_so_many_lines_and_then_few(event):
    lines = Lines()

    assert written(lines, event, 5000.0) == AT_ONCE
    assert written(lines, event, 5000.0 + 6 * EVERY) == 6
    assert written(lines, a_line("alice"), 5000.0) == AT_ONCE


@pytest.mark.parametrize(
    "event",
    [
        a_line(kind="terminate", outcome="about to", clock_seconds=1.0),
        a_line(kind="terminate", outcome="dry run", clock_seconds=1.0),
        a_line(kind="deny", outcome="about to"),
        a_line(kind="kill", outcome="unkillable"),
        Event(time.time(), "watchdog", "driver unresponsive"),
    ],
)
def test_what_is_done_is_always_written_and_what_is_about_the_machine(event):
    lines = Lines()
    written(lines, a_line(), 5000.0)

    assert written(lines, event, 5000.0) == AT_ONCE + 50


def test_what_became_of_a_deed_is_written_behind_it():
    lines = Lines()
    written(lines, a_line(), 5000.0)
    lines.admits(a_line(kind="terminate", outcome="about to", clock_seconds=1.0), 5000.0)

    assert lines.admits(a_line(kind="terminate", outcome="not permitted"), 5000.0)
    assert not lines.admits(a_line(kind="kill", outcome="failed"), 5000.0)


def test_all_users_without_a_name_have_as_many_lines_as_one_with_a_name():
    lines = Lines()
    uids = range(100_000, 100_000 + AT_ONCE + 50)

    assert sum(lines.admits(a_line(str(uid)), 5000.0) for uid in uids) == AT_ONCE
    (told,) = lines.left_out(5000.0 + TELL_SECONDS)
    assert (told.user, "50 lines about users without a name" in (told.message or "")) == (None, True)


def test_a_line_once_a_minute_says_what_was_left_out_about_whom():
    lines = Lines()
    written(lines, a_line(), 5000.0, AT_ONCE + 3)
    written(lines, a_line(outcome="cleared", kind="note"), 5000.0, 2)
    early = list(lines.left_out(5000.0 + TELL_SECONDS - 1))
    (told,) = lines.left_out(5000.0 + TELL_SECONDS)

    assert early == [] == list(lines.left_out(5000.0 + 3 * TELL_SECONDS))
    assert (told.kind, told.outcome, told.user, told.facts) == ("note", "left out", "bob", (("lines", 5),))
    assert "5 lines about the same user" in (told.message or "") and "log 3, cleared 2" in (told.message or "")


def test_who_is_heard_of_no_more_is_forgotten():
    lines = Lines()
    for number in range(100):
        lines.admits(a_line(f"user{number}"), 5000.0)
    list(lines.left_out(5000.0 + 2 * EVERY))

    assert lines._spent == {}


def test_a_flood_of_one_user_leaves_the_lines_about_others_and_says_so(tmp_path: Path, monkeypatch):
    log, told, clock = tmp_path / "events.jsonl", [], [5000.0]
    monkeypatch.setenv("GPUGUARD_EVENTS", str(log))
    monkeypatch.setattr(limits, "AT_ONCE", 20)
    monkeypatch.setattr("gpuguard.watchdog.boot_clock", lambda: clock[0])
    alices = a_process(pid=99, uid=1001, user="alice", memory_used=GIB)
    samples = []
    for at in range(8):  # each of bob's processes is seen three times
        bobs = [a_process(pid=1000 + n, uid=1002, user="bob", memory_used=GIB) for n in range(at * 30, at * 30 + 90)]
        device = a_device(memory_used=40 * GIB, processes=(*bobs, alices))
        samples.append(a_snapshot(device, clock=10_000.0 + at, taken_at=1.7e9 + at))
    dog = Watchdog(Recording(*samples), (SMALL,), append=audit_log.append, on_event=told.append)
    for _ in samples:
        dog.step()
        clock[0] += TELL_SECONDS / 6

    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(event["user"] == "alice" for event in events) == sum(event.user == "alice" for event in told) > 0
    assert 20 <= sum(event["user"] == "bob" for event in events) <= 35
    assert any(event["outcome"] == "left out" and event["user"] == "bob" for event in events)
    assert sum(event.user == "bob" for event in told) > 150


def test_deeds_are_remembered_over_a_restart_in_spite_of_a_flood(tmp_path: Path, monkeypatch):
    log = tmp_path / "events.jsonl"
    monkeypatch.setenv("GPUGUARD_EVENTS", str(log))
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 2**16)
    monkeypatch.setattr(limits, "AT_ONCE", 50)
    dog = Watchdog(Recording(a_snapshot(a_device())), (SMALL,), append=audit_log.append)
    with a_scene() as scene:
        scene.context(append=dog._record)
        assert scene.act().word == "sent"
    for _ in range(3000):
        dog._record(a_line())

    assert len(recent_actions(str(log), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()).deeds) == 1
