"""Signals by hand: every check of the guard, on real processes; a line in the audit log before each signal."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from builders import GIB, a_device, a_process
from guarded import Listing, somebody, started, until
from top_scenes import an_orphan

from gpuguard import procfs
from gpuguard.enforcement.actions import GONE, REFUSED, SENT, UNRECORDED
from gpuguard.enforcement.by_hand import BY_HAND, Operator, signal_process
from gpuguard.enforcement.identity import Protected
from gpuguard.enforcement.limits import ActionLimits
from gpuguard.users import user_name


class Desk:
    """A child on a device, and a hand that may signal it."""

    def __init__(self, child, uid):
        self.child, self.events, self.written = child, [], True
        self.process = a_process(child.pid, start_time=started(child.pid), uid=uid, user="alice")
        self.machine = Listing(a_device(0, processes=(self.process,), memory_used=20 * GIB))
        self.machine.simulated = True
        self.operator = Operator(self.machine, self.append, ActionLimits())

    def append(self, event):
        self.events.append((event.kind, event.outcome, self.child.lives()))
        return self.written

    def signal(self, action="terminate", **changes):
        identity = (self.process.pid, self.process.start_time)
        return signal_process(replace(self.operator, **changes), action, identity, (a_device(0).uuid,))

    def state(self):
        stat = procfs.read_proc(f"/proc/{self.child.pid}/stat") or b""
        return stat.rpartition(b") ")[2][:1].decode()


@pytest.fixture
def desk():
    with an_orphan(somebody()) as child:
        yield Desk(child, somebody() or os.getuid())


def test_the_line_in_the_log_comes_before_the_signal(desk):
    outcome = desk.signal()

    assert (outcome.word, desk.child.ends()) == (SENT, True)
    assert desk.events == [("terminate", "about to", True)]


def test_no_line_no_signal(desk):
    desk.written = False

    assert desk.signal().word == UNRECORDED
    assert desk.child.lives()


def test_a_process_can_be_stopped_and_go_on(desk):
    assert desk.signal("pause").word == SENT
    until(lambda: desk.state() == "T")

    assert desk.signal("resume").word == SENT
    until(lambda: desk.state() != "T")


def test_sigkill_comes_30_seconds_after_sigterm_at_the_earliest(desk):
    outcome = desk.signal("kill")

    assert outcome.word == REFUSED
    assert desk.child.lives()


def test_the_limits_of_the_guard_hold_from_one_signal_to_the_next(desk):
    assert [desk.signal(action).word for action in ("pause", "resume", "pause")] == [SENT, SENT, REFUSED]


def test_whoever_has_the_pid_now_is_not_whoever_was_chosen(desk):
    desk.process = replace(desk.process, start_time=desk.process.start_time - 1)

    assert desk.signal().word == GONE
    assert desk.child.lives()


def test_a_process_that_has_left_the_device_is_left_alone(desk):
    desk.machine.change(0, processes=())

    assert desk.signal().word == GONE
    assert desk.child.lives()


def test_under_pids_of_another_namespace_nobody_is_signalled(desk):
    desk.machine.simulated = False

    if os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
        assert "pid namespace" in desk.signal().why
        assert desk.child.lives()


def test_whom_the_site_protects_nobody_signals_by_hand(desk):
    outcome = desk.signal(protected=Protected(uids=frozenset({desk.process.uid})))

    assert (outcome.word, desk.child.lives()) == (REFUSED, True)
    assert "protected" in outcome.why


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_does_not_reach_processes_of_root():
    with an_orphan() as child:
        desk = Desk(child, 0)

        assert "uid 0 is the system's" in desk.signal().why
        assert child.lives()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_user_reaches_only_their_own(desk, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: desk.process.uid + 1)

    assert desk.signal().why == "it belongs to alice: only root signals processes of others"
    assert desk.events == []


def test_the_event_says_who_asked(desk):
    texts = []
    desk.signal(append=lambda event: bool(texts.append(event.message)) or True)

    assert texts == [f"asked for by {user_name(os.getuid())}"]


def test_only_what_the_question_offers_can_be_sent(desk):
    assert set(BY_HAND) == {"terminate", "kill", "pause", "resume"}
    assert desk.signal("checkpoint").word == REFUSED
    assert desk.signal("deny").word == REFUSED
    assert desk.events == []
