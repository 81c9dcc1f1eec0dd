"""Signals by hand: every check of the guard, on real processes; a line in the audit log before each signal."""

import os
from dataclasses import replace

import pytest
from builders import a_device
from guard_scene import Scene, somebody
from top_scenes import Orphan, an_orphan

from gpuguard.enforcement import by_hand
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.enforcement.by_hand import BY_HAND, Operator, signal_process
from gpuguard.enforcement.guard_limits import ActionLimits
from gpuguard.enforcement.identity import Protected
from gpuguard.model import WHO_FIELDS, Finding
from gpuguard.policies.view import process_subject
from gpuguard.procfs import boot_clock
from gpuguard.users import user_name


class Desk(Scene):
    """Somebody on a device, and a hand that may signal them."""

    def __init__(self, child: Orphan, uid: int) -> None:
        super().__init__(child.pid, uid)
        self.child, self.log, self.written = child, [], True
        self.operator = Operator(self.machine, self.append, ActionLimits())

    def append(self, event):
        self.log.append((event.kind, event.outcome, self.child.lives()))
        return self.written

    def signal(self, action="terminate", **changes):
        identity = (self.process.pid, self.process.start_time)
        return signal_process(replace(self.operator, **changes), action, identity, (a_device(0).uuid,))


@pytest.fixture
def desk():
    with an_orphan(somebody()) as child:
        yield Desk(child, somebody() or os.getuid())


def test_the_line_in_the_log_comes_before_the_signal(desk):
    outcome = desk.signal()

    assert (outcome.word, desk.child.ends()) == ("sent", True)
    assert desk.log == [("terminate", "about to", True)]


def test_what_is_done_is_done_to_that_process_alone(desk, monkeypatch):
    monkeypatch.setattr(by_hand, "act", lambda *asked: [asked])
    asked_for, sample = [], desk.machine.sample
    monkeypatch.setattr(desk.machine, "sample", lambda *of: asked_for.append(of) or sample(*of))
    verdict, snapshot, _ = desk.signal()

    assert asked_for == [(WHO_FIELDS, [a_device(0).uuid])]
    subject = process_subject(a_device(0), desk.process)
    asked = f"asked for by {user_name(os.getuid())}"
    assert verdict.finding == Finding("by hand", subject, asked, (desk.process,))
    assert (verdict.policy, verdict.action, verdict.step, verdict.enforce) == ("by hand", "terminate", 0, True)
    assert 0 <= boot_clock() - verdict.since < 60
    assert [device.uuid for device in snapshot.devices] == [a_device(0).uuid]


def test_whoever_asks_is_in_front_of_the_terminal_and_needs_no_grace(desk, monkeypatch):
    monkeypatch.setattr(by_hand, "act", lambda *asked: [asked])

    assert desk.signal()[2].interactive_grace == 0.0


def test_no_line_no_signal(desk):
    desk.written = False

    assert desk.signal().word == "not recorded"
    assert desk.child.lives()


def test_the_limits_of_the_guard_hold_from_one_signal_to_the_next(desk):
    words = [desk.signal(action).word for action in ("kill", "pause", "resume", "pause")]

    assert words == ["refused", "sent", "sent", "refused"]  # SIGKILL comes 30 seconds after SIGTERM at the earliest
    assert desk.child.lives()


@pytest.mark.parametrize("who", ["has the pid now", "has left the GPU"])
def test_only_whoever_was_chosen_and_is_still_there_is_signalled(desk, who):
    if who == "has the pid now":
        desk.process = replace(desk.process, start_time=desk.process.start_time - 1)
    else:
        desk.machine.change(0, processes=())

    assert desk.signal() == ActionOutcome("gone", "it is not on the GPU any more", desk.process.pid)
    assert desk.child.lives()


def test_under_pids_of_another_namespace_nobody_is_signalled(desk):
    desk.machine.simulated = False

    if os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
        assert "pid namespace" in desk.signal().why
        assert desk.child.lives()


@pytest.mark.parametrize(
    "protects",
    [
        lambda process: Protected(uids=frozenset({process.uid})),
        lambda process: Protected(groups=frozenset({"operators"})),  # whose members nobody looked up: anyone may be one
        lambda process: Protected(executables=("/*",)),
    ],
    ids=["a user", "a group", "a program"],
)
def test_whom_the_site_protects_nobody_signals_by_hand(desk, protects):
    outcome = desk.signal(protected=protects(desk.process))

    assert (outcome.word, desk.child.lives()) == ("refused", True)
    assert "protected" in outcome.why


@pytest.mark.root
def test_root_does_not_reach_processes_of_root():
    with an_orphan() as child:
        desk = Desk(child, 0)

        assert "uid 0 is the system's" in desk.signal().why
        assert child.lives()


@pytest.mark.root
def test_a_user_reaches_only_their_own(desk, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: desk.process.uid + 1)

    why = "it belongs to alice: only root signals processes of others"
    assert desk.signal() == ActionOutcome("refused", why, desk.process.pid)
    desk.machine.change(0, processes=(replace(desk.process, user=None),))
    assert desk.signal().why == "it belongs to a user who is not known: only root signals processes of others"
    assert desk.log == []


def test_the_event_says_who_asked(desk):
    texts = []
    desk.signal(append=lambda event: bool(texts.append(event.message)) or True)

    assert texts == [f"asked for by {user_name(os.getuid())}"]


def test_only_what_the_question_offers_can_be_sent(desk):
    assert set(BY_HAND) == {"terminate", "kill", "pause", "resume"}
    assert desk.signal("checkpoint") == ActionOutcome("refused", "there is no action 'checkpoint'", desk.process.pid)
    assert desk.signal("deny") == ActionOutcome("refused", "there is no action 'deny'", desk.process.pid)
    assert desk.log == []
