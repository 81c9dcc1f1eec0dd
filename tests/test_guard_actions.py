"""What the guard does to others: to the one process that is meant, written down before it is done."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import a_process
from guarded import SLEEP, Scene, a_child, a_scene, somebody, started, until
from users import interpreter

from gpuguard import procfs
from gpuguard.enforcement import actions, preflight, signals
from gpuguard.enforcement.actions import ACTIONS, give_up_unkillable, parse_checkpoint_signal, parse_niceness
from gpuguard.enforcement.limits import ActionLimits, PastAction
from gpuguard.errors import InvalidRequest
from gpuguard.model import Event, Snapshot, Verdict
from gpuguard.policies.policy import COUNTED, ON_PROCESSES

SIGNALS = ["terminate", "pause", "resume", "renice"]


def python() -> str:
    return interpreter() if os.geteuid() == 0 else sys.executable


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@contextlib.contextmanager
def a_program(code: str, last: str = "time.sleep(600)") -> Iterator[Scene]:
    """A scene with a Python program that has said that it is ready."""
    read, write_end = os.pipe()
    code = f"import os, signal, time\n{code}\nos.write({write_end}, b'.')\n{last}"
    with a_scene(python(), "-c", code, pass_fds=(write_end,)) as scene:
        os.close(write_end)
        os.read(read, 1)
        os.close(read)
        yield scene


def test_what_the_engine_says_of_actions_it_says_of_those_that_there_are():
    assert ACTIONS.keys() > COUNTED | ON_PROCESSES


# One process, and nobody else.


def test_bystanders_on_the_same_device_in_the_same_session_and_of_the_same_name_live():
    with (
        a_child("sh", "-c", "sleep 600 & sleep 600 & wait") as shell,
        a_child(*SLEEP) as beside,
    ):
        until(lambda: len(children(shell.pid)) == 2)
        offender, sibling = children(shell.pid)
        scene = Scene(offender, somebody() or os.getuid())
        also = a_process(beside.pid, start_time=started(beside.pid), uid=scene.process.uid)
        scene.listed(scene.process, also)
        scene.snapshot = scene.machine.sample(())

        assert scene.act().word == "sent"
        assert scene.dies()
        assert {state(sibling), state(shell.pid), state(beside.pid)} <= set("RS")
        os.kill(sibling, signal.SIGKILL)
        os.close(scene.pidfd)


def children(pid: int) -> list[int]:
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if (Path(f"/proc/{child}/comm").read_text().strip()) == "sleep"]


def test_a_stopped_process_ends_too(scene):
    os.kill(scene.pid, signal.SIGSTOP)
    until(lambda: state(scene.pid) == "T")

    assert scene.act().word == "sent"
    assert scene.dies()


def test_pause_and_resume(scene):
    assert scene.act("pause").word == "sent"
    until(lambda: state(scene.pid) == "T")
    assert scene.act("resume").word == "sent"
    until(lambda: state(scene.pid) == "S")
    assert scene.lives()


def test_a_checkpoint_signal_reaches_a_program_that_waits_for_it():
    with a_program("signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))") as scene:
        assert scene.act("checkpoint", options=(("signal", int(signal.SIGUSR2)),)).word == "sent"
        assert scene.dies()


@pytest.mark.parametrize(("text", "number"), [("USR2", signal.SIGUSR2), ("sigusr1", signal.SIGUSR1), ("Hup", 1)])
def test_a_policy_names_a_checkpoint_signal_as_kill_does(text, number):
    assert parse_checkpoint_signal(text) == number


@pytest.mark.parametrize("text", ["TERM", "SIGKILL", "STOP", "10", ""])
def test_a_policy_names_no_other_signal_for_a_checkpoint(text):
    with pytest.raises(InvalidRequest, match="write one of USR1, USR2"):
        parse_checkpoint_signal(text)


def test_a_niceness_is_written_as_a_number_from_1_to_19():
    assert [parse_niceness(text) for text in ("1", "10", "19")] == [1, 10, 19]
    for text in ("0", "20", "-5", "01", "nice"):
        with pytest.raises(InvalidRequest, match="from 1 to 19"):
            parse_niceness(text)


@pytest.mark.parametrize("number", [0, 9, 15, 19, 64, True, "USR1", 10**9])
def test_no_other_signal_passes_for_a_checkpoint(number):
    with a_program("for n in (10, 15): signal.signal(n, lambda *_: os._exit(0))") as scene:
        assert scene.act("checkpoint", options=(("signal", number),)).word == "refused"
        assert scene.lives()


def test_a_lower_priority_for_every_thread_and_never_a_higher_one():
    with a_program("import threading; threading.Thread(target=time.sleep, args=(600,)).start()") as scene:
        threads = [int(name) for name in os.listdir(f"/proc/{scene.pid}/task")]
        assert len(threads) == 2
        low = min(19, os.nice(0) + 7)  # the tests may run with a low priority themselves

        assert scene.act("renice", options=(("niceness", low),)).word == "sent"
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {low}
        scene.context(limits=ActionLimits())
        assert scene.act("renice", options=(("niceness", low - 4),)).word == "sent"
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {low}


# The ladder.


def test_who_ignores_sigterm_is_killed_only_after_a_grace(monkeypatch):
    with a_program("signal.signal(signal.SIGTERM, signal.SIG_IGN)") as scene:
        assert scene.act("kill").word == "refused"
        assert scene.act().word == "sent"
        assert 29 < (scene.act("kill").wait or 0) <= 30
        assert scene.lives()

        later(scene, monkeypatch, 31)
        assert scene.act("kill").word == "sent"
        assert scene.dies()


def later(scene: Scene, patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the guard believe that its actions were so much earlier."""
    book = scene.context().limits
    book.past = [replace(done, clock=done.clock - seconds) for done in book.past]


def test_who_outlives_sigkill_is_given_up_and_its_device_left_alone(scene):
    # A process in the driver cannot be made here: one that was never killed looks the same.
    killed = PastAction(procfs.boot_clock() - 61, "kill", (scene.pid, scene.process.start_time), ("GPU-x",), live=True)
    scene.context().limits.record(killed)

    (outcome,) = give_up_unkillable(scene.context(), scene.snapshot)
    assert (outcome.word, outcome.pid) == ("unkillable", scene.pid)
    assert give_up_unkillable(scene.context(), scene.snapshot) == ()
    assert [(event.kind, event.outcome) for event in scene.events] == [("kill", "unkillable"), ("quarantine", "failed")]
    assert scene.act().word == "refused"

    os.kill(scene.pid, signal.SIGKILL)
    assert scene.dies()
    assert give_up_unkillable(scene.context(), scene.snapshot) == ()
    assert scene.context().limits.unkillable == {}


def test_the_targets_of_the_policies_are_told_once_of_a_process_that_outlives_sigkill(scene):
    killed = PastAction(
        procfs.boot_clock() - 61, "kill", (scene.pid, scene.process.start_time), ("GPU-x", "GPU-y"), live=True
    )
    scene.context(notifier=(post := Post()), alarm=("ops", "mail")).limits.record(killed)
    give_up_unkillable(scene.context(), scene.snapshot)
    give_up_unkillable(scene.context(), scene.snapshot)

    assert post.asked == ["ops", "mail"]


@pytest.mark.parametrize("done", [{"action": "terminate"}, {"live": False}, {"process": (2**22, 1.0)}])
def test_only_who_was_really_killed_and_is_still_there_is_given_up(scene, done):
    facts = {"action": "kill", "process": (scene.pid, scene.process.start_time), "devices": (), "live": True, **done}
    scene.context().limits.record(PastAction(procfs.boot_clock() - 61, **facts))

    assert give_up_unkillable(scene.context(), scene.snapshot) == ()


def test_the_second_victim_on_a_device_waits_for_the_effect_on_the_first():
    with a_program("signal.signal(signal.SIGTERM, signal.SIG_IGN)") as first, a_scene() as second:
        second.context(limits=first.context().limits)
        assert first.act().word == "sent"

        later(first, pytest.MonkeyPatch(), 20)  # 15 s are over, but the first one still lives
        assert [each.check for each in second.act().failed] == ["one per device"]


def test_a_verdict_that_comes_again_is_not_done_again(scene, monkeypatch):
    sent: list[int] = []
    monkeypatch.setattr(signals, "forward", lambda pidfd, signum: sent.append(signum) or "sent")
    verdict = scene.verdict()

    for _ in range(3):
        (outcome,) = actions.act(verdict, scene.snapshot, scene.context())
        assert (outcome.word, outcome.wait) == ("sent", None)
        later(scene, monkeypatch, 60)
    assert sent == [signal.SIGTERM, signal.SIGCONT]


# Dead, half dead.


def test_a_zombie_is_gone_and_gets_no_signal(scene, monkeypatch):
    os.kill(scene.pid, signal.SIGKILL)
    assert scene.dies()
    monkeypatch.setattr(signals, "forward", lambda *of: pytest.fail("a signal"))

    assert scene.act().word == "gone"


def test_a_process_whose_first_thread_has_ended_is_alive_and_is_hit():
    code = "import ctypes, threading; threading.Thread(target=time.sleep, args=(600,)).start()"
    with a_program(code, last="ctypes.CDLL(None).pthread_exit(None)") as scene:
        until(lambda: state(scene.pid) == "Z")

        assert scene.lives()
        assert scene.act().word == "sent"
        assert scene.dies()


# Written down first; and a dry run is the same but for the last call.


@pytest.mark.parametrize("action", SIGNALS)
def test_without_a_line_in_the_log_nothing_is_done(scene, monkeypatch, action):
    monkeypatch.setattr(signals, "forward", lambda *of: pytest.fail("a signal"))
    monkeypatch.setattr(os, "setpriority", lambda *of: pytest.fail("a change"))
    scene.context(append=lambda event: False)

    assert scene.act(action).word == "not recorded"


def test_the_line_is_there_before_the_signal(scene, monkeypatch):
    scene.row(container="c0ffee")
    monkeypatch.setattr(signals, "forward", lambda *of: scene.events[-1].outcome)

    assert scene.act("resume").word == "about to"
    (event, _) = scene.events
    assert (event.kind, event.pid, event.user, event.devices) == ("resume", scene.pid, "alice", (scene.subject.device,))
    assert dict(event.facts)["start_time_seconds"] == scene.process.start_time
    assert dict(event.facts)["policy"] == "a-policy"
    assert dict(event.facts)["container"] == "c0ffee"


@pytest.mark.parametrize("switches", [(False, False), (False, True), (True, False), (1, True), (True, 1)])
def test_both_switches_must_be_on(scene, monkeypatch, switches):
    scene.context(enforce=switches[0])

    assert scene.act(enforce=switches[1]).word == "dry run"
    assert scene.lives()
    monkeypatch.setattr(preflight.ActionContext, "is_live", lambda *of: True)  # the planted fault
    assert scene.act(enforce=switches[1]).word == "sent"
    assert scene.dies()


@pytest.mark.parametrize("action", [*SIGNALS, "kill", "checkpoint"])
def test_a_dry_run_leaves_the_same_events_as_a_real_one_but_for_the_outcome(action):
    def events(enforce: bool) -> list[object]:
        with a_scene() as scene:
            scene.context(enforce=enforce)
            scene.act(action)
            told = [replace(event, time=0, pid=0, facts=lasting(event)) for event in scene.events]
            return [event if event.outcome == "refused" else replace(event, outcome="") for event in told]

    assert events(enforce=True) == events(enforce=False)


def lasting(event: Event) -> list[object]:
    return [fact for fact in event.facts if fact[0] not in ("start_time_seconds", "clock_seconds")]


def test_a_refusal_that_repeats_itself_is_written_once(scene):
    scene.context(still_true=lambda verdict, snapshot: False)
    for _ in range(5):
        scene.act()

    assert [event.outcome for event in scene.events] == ["refused"]


def test_an_action_that_does_not_exist_fails_and_is_written_down(scene):
    assert scene.act("nuke").word == "failed"
    assert [event.outcome for event in scene.events] == ["failed"]


def test_a_verdict_about_a_user_means_their_processes(scene):
    finding = scene.verdict().finding
    about = replace(finding, subject=replace(finding.subject, kind="user", pid=None, start_time=None, device=None))

    (outcome,) = actions.act(replace(scene.verdict(), finding=about), scene.snapshot, scene.context())
    assert (outcome.word, outcome.pid) == ("sent", scene.pid)


def test_a_verdict_about_a_device_alone_means_nobody(scene):
    finding = replace(scene.verdict().finding, processes=(), subject=replace(scene.subject, kind="device", pid=None))

    (outcome,) = actions.act(replace(scene.verdict(), finding=finding), scene.snapshot, scene.context())
    assert outcome.word == "refused"
    assert scene.lives()


# Words.


class Post:
    """Takes messages until it is full."""

    def __init__(self, answer: str = "queued") -> None:
        self.asked: list[str] = []
        self.answer = answer

    def notify(self, name: str, verdict: Verdict, snapshot: Snapshot) -> str:
        self.asked.append(name)
        return self.answer


@pytest.mark.parametrize(("action", "key"), [("notify", "to"), ("run_hook", "hook")])
def test_a_message_goes_to_the_target_that_the_step_names(scene, action, key):
    scene.context(notifier=(post := Post()))

    assert scene.act(action, options=((key, "ops"),)).word == "done"
    assert scene.act(action, options=((key, "ops"),), enforce=False).word == "dry run"
    assert post.asked == ["ops"]


def test_a_message_that_is_not_taken_is_no_success(scene):
    scene.context(notifier=Post("the queue is full"))

    assert scene.act("notify", options=(("to", "ops"),)).word == "failed"
    assert "the queue is full" in str(scene.events[-1].message)


def test_a_step_without_a_target_tells_nobody(scene):
    scene.context(notifier=(post := Post()))

    assert scene.act("notify").word == "failed"
    assert post.asked == []


def test_log_writes_a_line_and_nothing_else(scene):
    assert scene.act("log").word == "done"
    assert [(event.kind, event.outcome) for event in scene.events] == [("log", "done")]
