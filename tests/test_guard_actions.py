"""What the guard does to others: to the one process that is meant, written down before it is done."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_uuid
from guard_scene import SLEEP, SOMEBODY, Scene, a_child, a_scene, python, somebody, started
from nodes import until
from proc import state

from gpuguard import procfs
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.restrictions import DENIED, QUARANTINED, Restriction, change, read_restrictions
from gpuguard.enforcement import actions, guard_limits, identity, preflight, signals
from gpuguard.enforcement.actions import ACTIONS, give_up_unkillable, parse_checkpoint_signal, parse_niceness
from gpuguard.enforcement.guard_limits import HOUR, ActionLimits, PastAction
from gpuguard.enforcement.pauses import Pause, Pauses
from gpuguard.errors import InvalidRequest
from gpuguard.model import Event, Snapshot, Subject, Verdict
from gpuguard.policies.action_kinds import COUNTED, ON_PROCESSES
from gpuguard.policies.rule import RuleKind

SIGNALS = ["terminate", "pause", "resume", "renice"]


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


def test_bystanders_on_the_same_device_in_the_same_session_and_of_the_same_name_live():
    with a_child("sh", "-c", "sleep 600 & sleep 600 & wait") as shell, a_child(*SLEEP) as beside:
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


@pytest.mark.parametrize(
    ("parse", "taken", "refused", "said"),
    [
        (
            parse_checkpoint_signal,
            {"USR2": signal.SIGUSR2, "sigusr1": signal.SIGUSR1, "Hup": 1},
            ("TERM", "SIGKILL", "STOP", "10", ""),
            "write one of USR1, USR2",
        ),
        (parse_niceness, {"1": 1, "10": 10, "19": 19}, ("0", "20", "-5", "01", "nice"), "from 1 to 19"),
    ],
)
def test_a_policy_names_a_checkpoint_signal_as_kill_does_and_a_niceness_from_1_to_19(parse, taken, refused, said):
    assert {text: parse(text) for text in taken} == taken
    for text in refused:
        with pytest.raises(InvalidRequest, match=said):
            parse(text)


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
    before, book.past = book.past, []
    for done in before:
        book.record(replace(done, clock=done.clock - seconds))


def outlives_sigkill(scene: Scene, **more: Any) -> None:
    """A process in the driver cannot be made here: one that was never killed looks the same."""
    devices = (a_uuid(0), "GPU-y")
    killed = PastAction(
        procfs.boot_clock() - 61, "kill", (scene.pid, scene.process.start_time), devices, live=True, policy="hogs"
    )
    scene.context(**more).limits.record(killed)


def test_who_outlives_sigkill_is_given_up_its_device_quarantined_and_people_told_once(scene):
    outlives_sigkill(scene, notifier=(post := Post()), alarm=("ops", "mail"))

    (outcome,) = give_up_unkillable(scene.context(), scene.snapshot)
    said = "it outlived SIGKILL by 61s: no further signal can help"
    assert outcome == actions.ActionOutcome("unkillable", said, scene.pid)
    assert give_up_unkillable(scene.context(), scene.snapshot) == ()
    given_up, quarantine = (event for event in lines(scene) if event.kind != "notify")
    assert given_up == Event(
        time=0.0,
        kind="kill",
        outcome="unkillable",
        devices=(a_uuid(0), "GPU-y"),
        pid=scene.pid,
        message=said,
        facts=(("policy", "hogs"),),
    )
    reset = f"pid {scene.pid} outlived SIGKILL: the GPU needs a reset"
    assert (quarantine.outcome, quarantine.message, quarantine.devices) == (  # here no claims are known
        "failed", f"{reset}: there is no directory of claims to write it into", (a_uuid(0),),
    )  # fmt: skip
    assert {(verdict.policy, verdict.finding.why) for verdict in post.verdicts} == {("hogs", reset)}
    assert post.asked == ["ops", "mail"]
    assert scene.act().word == "refused"

    os.kill(scene.pid, signal.SIGKILL)
    assert scene.dies()
    assert give_up_unkillable(scene.context(), scene.snapshot) == ()
    assert scene.context().limits.unkillable == {}


def quarantined(directory: LockDirectory) -> list[str]:
    return list(read_restrictions(directory, QUARANTINED, time.time()))


@pytest.mark.parametrize("row", ["gone", "of another", "not to be believed", "unknown"])
def test_no_device_is_quarantined_for_a_process_that_the_driver_does_not_list(scene, directory, row):
    """A user can let a process of their own linger for good, which has long given its GPU back."""
    rows = {"gone": (), "of another": (a_process(pid=2),), "unknown": None}.get(row, (scene.process,))
    scene.machine.change(0, processes=rows, processes_plausible=row != "not to be believed")
    outlives_sigkill(scene, directory=directory)
    (outcome,) = give_up_unkillable(scene.context(), scene.machine.sample(()))

    assert outcome.word == "unkillable"
    assert quarantined(directory) == []


ON_THE_DEVICE: dict[str, dict[str, Any]] = {
    "listed": {},
    "listed, its process has ended": {"start_time": None},
    "memory is missing": {"processes": (), "memory_used": 40 * GIB},
    "memory is unknown": {"processes": (), "memory_used": None, "memory_free": None},
    "the list is unknown": {"processes": None, "memory_used": 0},
    "the list is not to be believed": {"processes": (), "processes_plausible": False, "memory_used": 0},
}


@pytest.mark.parametrize("what", ON_THE_DEVICE)
def test_a_quarantine_ends_with_the_process_that_caused_it_and_when_its_memory_is_back(scene, directory, what):
    scene.machine.devices.append(a_device(1))  # at most half of the machine
    outlives_sigkill(scene, directory=directory)
    give_up_unkillable(scene.context(), scene.machine.sample(()))
    assert quarantined(directory) == [a_uuid(0)]
    there = dict(ON_THE_DEVICE[what])
    row = replace(scene.process, memory_used=40 * GIB, start_time=there.pop("start_time", scene.start_time))
    scene.machine.change(0, **{"processes": (row,), **there})

    limits_of_a_new_daemon = {"limits": guard_limits.ActionLimits()}
    scene.context(**limits_of_a_new_daemon)
    give_up_unkillable(scene.context(), scene.machine.sample(()))
    assert quarantined(directory) == [a_uuid(0)]

    scene.machine.change(0, processes=(), processes_plausible=True, memory_used=0, memory_free=80 * GIB)
    give_up_unkillable(scene.context(), scene.machine.sample(()))
    assert quarantined(directory) == []
    assert lines(scene)[-1] == Event(
        time=0.0,
        kind="quarantine",
        outcome="ended",
        devices=(a_uuid(0),),
        pid=scene.pid,
        message="the process is gone from the GPU, and its memory is back",
    )


def test_what_an_administrator_has_quarantined_stays_whatever_becomes_of_a_process(scene, directory):
    by_root = Restriction(a_uuid(0), 0.0, time.time() + 7200, "XID 79")
    change(directory, QUARANTINED, lambda marks: marks.update({by_root.name: by_root}))
    scene.machine.devices.append(a_device(1))
    outlives_sigkill(scene, directory=directory)
    give_up_unkillable(scene.context(), scene.machine.sample(()))
    scene.machine.change(0, processes=(), memory_used=0)
    give_up_unkillable(scene.context(), scene.machine.sample(()))

    assert read_restrictions(directory, QUARANTINED, time.time())[a_uuid(0)].reason == "XID 79"


def test_a_process_that_outlived_sigkill_protects_no_other_on_its_device(scene):
    with a_child() as lingering:
        other = lingering.pid, started(lingering.pid)
        scene.listed(scene.process, a_process(other[0], start_time=other[1]))
        killed = PastAction(procfs.boot_clock() - 61, "kill", other, (a_uuid(0),), live=True)
        scene.context().limits.record(killed)
        give_up_unkillable(scene.context(), scene.machine.sample(()))

        assert scene.act().word == "sent"
        assert scene.dies()


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
        assert [check.check for check in second.act().failed] == ["one per device"]


def test_a_verdict_that_comes_again_is_not_done_again(scene, monkeypatch):
    sent: list[int] = []
    monkeypatch.setattr(signals, "forward", lambda pidfd, signum: sent.append(signum) or "sent")
    verdict = scene.verdict()

    for _ in range(3):
        (outcome,) = actions.act(verdict, scene.snapshot, scene.context())
        assert (outcome.word, outcome.wait) == ("sent", None)
        later(scene, monkeypatch, 60)
    assert sent == [signal.SIGTERM, signal.SIGCONT]


def test_a_zombie_is_gone_and_gets_no_signal(scene, monkeypatch):
    os.kill(scene.pid, signal.SIGKILL)
    assert scene.dies()
    monkeypatch.setattr(signals, "forward", lambda *of: pytest.fail("a signal"))

    assert scene.act() == actions.ActionOutcome("gone", "it had ended before", scene.pid)


def test_a_process_whose_first_thread_has_ended_is_alive_and_is_hit():
    code = "import ctypes, threading; threading.Thread(target=time.sleep, args=(600,)).start()"
    with a_program(code, last="ctypes.CDLL(None).pthread_exit(None)") as scene:
        until(lambda: state(scene.pid) == "Z")

        assert scene.lives()
        assert scene.act().word == "sent"
        assert scene.dies()


@pytest.mark.parametrize("action", SIGNALS)
def test_without_a_line_in_the_log_nothing_is_done(scene, monkeypatch, action):
    monkeypatch.setattr(signals, "forward", lambda *of: pytest.fail("a signal"))
    monkeypatch.setattr(os, "setpriority", lambda *of: pytest.fail("a change"))
    scene.context(append=lambda event: False)

    unwritten = "nothing could be written down, so nothing was done"
    assert scene.act(action) == actions.ActionOutcome("not recorded", unwritten, scene.pid)
    assert scene.act("log") == actions.ActionOutcome("not recorded")


def test_the_line_is_there_before_the_signal(scene, monkeypatch):
    scene.row(container="c0ffee")
    monkeypatch.setattr(signals, "forward", lambda *of: scene.events[-1].outcome)

    assert scene.act("resume").word == "about to"
    (event, _) = scene.events
    assert (event.kind, event.pid, event.user, event.devices) == ("resume", scene.pid, "alice", (scene.subject.device,))
    assert dict(event.facts)["start_time_seconds"] == scene.process.start_time
    assert dict(event.facts)["policy"] == "a-policy"
    assert dict(event.facts)["container"] == "c0ffee"


def test_who_is_paused_already_is_not_paused_again(scene, mocker):
    scene.context(pauses=mocker.Mock(of=lambda process, live: mocker.Mock(policy="a-policy")))

    assert scene.act("pause") == actions.ActionOutcome("sent", "it is paused", scene.pid)
    assert scene.lives() and not scene.events


@pytest.mark.parametrize("tracer", [0, 1])
@pytest.mark.parametrize("enforce", [True, False])
def test_a_pause_says_who_is_paused_where_and_whether_a_debugger_was_there(
    scene, directory, monkeypatch, enforce, tracer
):
    read = identity.facts_of
    monkeypatch.setattr(identity, "facts_of", lambda *of: replace(read(*of), tracer=tracer))
    claim = a_claim_record(a_uuid(0), id="c1", uid=scene.process.uid, pid=scene.pid)
    scene.snapshot = replace(scene.snapshot, claims=(claim,))
    kept = Pauses(directory, scene.write)
    scene.context(pauses=kept, interactive_grace=0.0)
    assert scene.act("pause", enforce=enforce).word == ("sent" if enforce else "dry run")

    process = scene.pid, scene.start_time
    pause = Pause(process, "a-policy", scene.process.uid, "alice", (a_uuid(0),), "c1", traced=bool(tracer))
    assert kept.of(process, live=enforce) == pause
    assert kept.read() == ((pause,) if enforce else ())
    again = scene.act("pause", enforce=enforce)
    assert again == actions.ActionOutcome("sent" if enforce else "dry run", "it is paused", scene.pid)
    scene.events.clear()
    assert scene.act("resume", enforce=enforce) == actions.ActionOutcome(again.word, pid=scene.pid)
    assert [event.message for event in scene.events][:1] == [SEEN]
    assert kept.of(process, live=enforce) is None


@pytest.mark.parametrize("switches", [(False, False), (False, True), (True, False), (1, True), (True, 1)])
def test_both_switches_must_be_on(scene, monkeypatch, switches):
    scene.context(enforce=switches[0])

    assert scene.act(enforce=switches[1]) == actions.ActionOutcome("dry run", pid=scene.pid)
    assert scene.lives()
    monkeypatch.setattr(preflight.ActionContext, "is_live", lambda *of: True)  # the planted fault
    assert scene.act(enforce=switches[1]).word == "sent"
    assert scene.dies()


def test_a_refusal_that_repeats_itself_is_written_once(scene):
    scene.context(still_true=lambda verdict, snapshot: False)
    for _ in range(5):
        scene.act()

    assert [event.outcome for event in scene.events] == ["refused"]


@pytest.mark.parametrize(("kind", "word"), [("user", "sent"), ("device", "refused")])
def test_a_verdict_about_a_user_means_their_processes_and_one_about_a_device_alone_nobody(scene, kind, word):
    finding = scene.verdict().finding
    subject = replace(finding.subject, kind=kind, pid=None, start_time=None)
    about = replace(finding, subject=subject, processes=finding.processes if kind == "user" else ())

    (outcome,) = actions.act(replace(scene.verdict(), finding=about), scene.snapshot, scene.context())
    assert (outcome.word, outcome.pid) == (word, scene.pid if word == "sent" else None)
    assert scene.lives() if word == "refused" else scene.dies()


def test_before_a_signal_it_is_asked_whether_the_condition_holds_for_that_very_process(scene):
    asked = []
    scene.context(still_true=lambda verdict, _: asked.append([row.pid for row in verdict.finding.processes]) or True)
    finding = replace(scene.verdict().finding, processes=(scene.process, a_process(scene.pid, start_time=1.0)))
    subject = replace(finding.subject, kind="user", pid=None, start_time=None)

    actions.act(replace(scene.verdict(), finding=replace(finding, subject=subject)), scene.snapshot, scene.context())
    assert asked == [[scene.pid]]


SEEN = "uses 41.0GiB, 40.0GiB are allowed"


def a_line(scene: Scene, action: str, outcome: str, why: str = "", **facts: Any) -> Event:
    """The line about the process of a scene; *facts* beside those of every line."""
    known: dict[str, Any] = {
        "policy": "a-policy", "rule": "memory", "step": 0, "uid": scene.process.uid, "uids": None,
        "start_time_seconds": scene.start_time, "container": "c0ffee", **facts,
    }  # fmt: skip
    return Event(
        time=0.0,
        kind=action,
        outcome=outcome,
        user="alice",
        devices=(a_uuid(0),),
        pid=scene.pid,
        message=f"{SEEN}: {why}" if why else SEEN,
        facts=tuple(known.items()),
    )


def lines(scene: Scene) -> list[Event]:
    assert all(abs(event.time - time.time()) < 60 for event in scene.events)
    return [replace(event, time=0.0) for event in scene.events]


def of_the_action(scene: Scene) -> dict[str, Any]:
    [past] = scene.context().limits.past
    return guard_limits.facts_of(past)


@pytest.mark.parametrize("action", ["terminate", "pause"])
@pytest.mark.parametrize(("enforce", "outcome"), [(True, "about to"), (False, "dry run")])
def test_the_line_of_an_action_says_whom_it_hits_why_and_by_which_policy(scene, action, enforce, outcome):
    scene.row(container="c0ffee")
    scene.act(action, enforce=enforce)

    assert lines(scene) == [a_line(scene, action, outcome, **of_the_action(scene))]
    [past] = scene.context().limits.past
    assert (past.action, past.process, past.devices, past.live, past.policy, past.uid) == (
        action, (scene.pid, scene.start_time), (a_uuid(0),), enforce, "a-policy", scene.process.uid,
    )  # fmt: skip
    assert past.memory_used == ((a_uuid(0), 40 * GIB),) and past.memory == 10 * GIB


def test_the_line_of_what_was_not_done_says_why(scene, monkeypatch):
    scene.row(container="c0ffee")
    refused = scene.act("kill")
    assert lines(scene) == [a_line(scene, "kill", "refused", refused.why)]
    assert refused == actions.ActionOutcome("refused", refused.why, scene.pid, refused.failed)
    assert refused.why == "it was not asked to end first: put terminate before kill"

    scene.events.clear()
    took = iter((0.0, actions.WRITE_SECONDS + 0.5))
    monkeypatch.setattr(actions, "boot_clock", lambda: next(took))
    late = scene.act()
    assert late.why == "its line in the audit log took 1s to write: what was decided before is too old"
    assert late == actions.ActionOutcome("refused", late.why, scene.pid, wait=0.0)
    assert lines(scene)[1] == a_line(scene, "terminate", "refused", late.why)
    assert scene.lives()

    os.kill(scene.pid, signal.SIGKILL)
    assert scene.dies()
    scene.events.clear()
    assert scene.act() == actions.ActionOutcome("gone", "it had ended before", scene.pid)
    assert lines(scene) == [a_line(scene, "terminate", "gone", "it had ended before")]


def restricted(directory: LockDirectory, kind: str) -> dict[str, tuple[Restriction, float | None]]:
    """What stands, without its times, and for how long each was made."""
    marks = read_restrictions(directory, kind, time.time())
    return {
        name: (replace(mark, since=0.0, until=None), None if mark.until is None else mark.until - mark.since)
        for name, mark in marks.items()
    }


@pytest.mark.parametrize(("options", "seconds"), [((("for", 60.0),), 60.0), ((), None)])
def test_a_denial_names_the_user_the_policy_what_was_seen_and_how_long_it_lasts(scene, directory, options, seconds):
    scene.context(directory=directory)
    uid = str(scene.process.uid)

    assert scene.act("deny", options=options, enforce=False) == actions.ActionOutcome("dry run")
    assert restricted(directory, DENIED) == {}
    assert scene.act("deny", options=options) == actions.ActionOutcome("done")
    mark = Restriction(uid, 0.0, None, SEEN, "the policy a-policy", "alice", until_reboot=True)
    assert restricted(directory, DENIED) == {uid: (mark, seconds)}
    assert lines(scene) == [a_line(scene, "deny", word, container=None) for word in ("dry run", "about to")]


@pytest.mark.parametrize("outlasts", [True, False])
def test_a_quarantine_for_what_outlasts_a_boot_outlasts_it(scene, directory, outlasts):
    scene.machine.devices.append(a_device(1))
    scene.snapshot = scene.machine.sample(())
    scene.context(directory=directory)
    kind = RuleKind("memory", innocent=True, outlasts_boot=outlasts)

    assert scene.act("quarantine", kind=kind) == actions.ActionOutcome("done")
    mark = Restriction(a_uuid(0), 0.0, None, SEEN, "the policy a-policy", until_reboot=not outlasts)
    assert restricted(directory, QUARANTINED) == {a_uuid(0): (mark, None)}


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a protected user": ("deny", {"protected": True}, "refused", "uid {uid} is protected"),
    "a user of the system": ("deny", {"uid": 12}, "refused", "uid 12 is protected"),
    "root": ("deny", {"uid": 0}, "refused", "uid 0 is protected"),
    "two users": ("deny", {"uid": None, "beside": True}, "refused", "no user in particular is meant"),
    "no directory": ("deny", {"directory": None}, "failed", "there is no directory of claims to write it into"),
    "no GPU": ("quarantine", {"device": None}, "refused", "no GPU is meant"),
    "the only GPU": (
        "quarantine",
        {},
        "refused",
        "more than half of the GPUs would be out of service: ask an administrator",
    ),
    "no such action": ("nuke", {}, "failed", "there is no action 'nuke'"),
    "no receiver": ("notify", {}, "failed", "there is no receiver"),
    "no process": ("terminate", {"processes": ()}, "refused", "no process is meant"),
}


@pytest.mark.parametrize(("action", "facts", "word", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_said_and_written_down(scene, directory, action, facts, word, why):
    uid = scene.process.uid
    protected = frozenset({uid} if "protected" in facts else ())
    scene.context(directory=facts.get("directory", directory), protected=protected)
    subject = replace(scene.subject, **{name: facts[name] for name in ("uid", "device") if name in facts})
    rows = (scene.process, replace(scene.process, pid=1, uid=uid + 1)) if "beside" in facts else (scene.process,)
    finding = replace(scene.verdict().finding, subject=subject, processes=rows)
    if "processes" in facts:
        finding = replace(finding, subject=Subject("device", a_uuid(0)), processes=())

    (outcome,) = actions.act(replace(scene.verdict(action), finding=finding), scene.snapshot, scene.context())
    assert outcome == actions.ActionOutcome(word, why.format(uid=uid))
    [event] = scene.events
    assert (event.kind, event.outcome, event.message) == (action, word, f"{SEEN}: {outcome.why}")
    assert restricted(directory, DENIED) == restricted(directory, QUARANTINED) == {}


class Post:
    """Takes messages until it is full."""

    def __init__(self, answer: str = "queued") -> None:
        self.asked, self.verdicts = list[str](), list[Verdict]()
        self.answer = answer

    def notify(self, name: str, verdict: Verdict, snapshot: Snapshot) -> str:
        self.asked.append(name)
        self.verdicts.append(verdict)
        return self.answer


@pytest.mark.parametrize(("action", "key"), [("notify", "to"), ("run_hook", "hook")])
def test_a_message_goes_to_the_target_that_the_step_names(scene, action, key):
    scene.context(notifier=(post := Post()))

    assert scene.act(action, options=((key, "ops"),)).word == "done"
    assert scene.act(action, options=((key, "ops"),), enforce=False).word == "dry run"
    assert post.asked == ["ops"]


@pytest.mark.parametrize(("options", "asked"), [((("to", "ops"),), ["ops"]), ((), [])], ids=["not taken", "no target"])
def test_a_message_that_is_not_taken_or_has_no_target_is_no_success(scene, options, asked):
    scene.context(notifier=(post := Post("the queue is full")))

    assert scene.act("notify", options=options).word == "failed"
    assert ("the queue is full" in str(scene.events[-1].message), post.asked) == (bool(options), asked)


@pytest.mark.parametrize(("action", "word"), [("log", "done"), ("nuke", "failed")])
def test_log_and_an_action_that_does_not_exist_write_a_line_and_do_nothing_else(scene, action, word):
    assert scene.act(action).word == word
    assert [(event.kind, event.outcome) for event in scene.events] == [(action, word)]


OTHER = (2, 1.0)
NOW = 600.0


def an_action(process: tuple[int, float], uid: int | None = None, **fields: Any) -> PastAction:
    return PastAction(
        NOW, **{"action": "terminate", "devices": ("GPU",), "live": True, **fields}, process=process, uid=uid
    )


def actions_done(scene: Scene, *, ago: float, count: int = 1, **fields: Any) -> None:
    """Let the guard remember so many; a field may follow from the scene."""
    for number in range(count):
        facts = {
            "action": "terminate",
            "process": (2 + number, scene.snapshot.clock - ago - 60),
            "devices": (f"GPU-of-{number}",),
            "live": True,
            **{name: value(scene) if callable(value) else value for name, value in fields.items()},
        }
        scene.context().limits.record(PastAction(scene.snapshot.clock - ago, **facts))  # type: ignore[arg-type]


def done(**fields: Any) -> Callable[[Scene], None]:
    return lambda scene: actions_done(scene, **fields)


def themselves(scene: Scene) -> tuple[int, float]:
    return scene.pid, scene.start_time


def there(scene: Scene) -> tuple[str | None, ...]:
    return (scene.subject.device,)


def their_uid(scene: Scene) -> int | None:
    return scene.process.uid


def own_signature(scene: Scene) -> str:
    return identity.signature(identity.facts_of(scene.pid))


def outlives(scene: Scene) -> None:
    process = themselves(scene)
    scene.context().limits.unkillable[process] = an_action(process)


def restarts(scene: Scene, *, times: int = 2) -> None:
    """The program of the scene was ended so often within the hour, and was started again after each end."""
    started = scene.snapshot.clock - 4000  # below 0 on a machine that has just been started, and still the order of all
    for number in range(times):
        ago = 3000.0 - 900 * number
        actions_done(scene, ago=ago, process=(2 + number, started), signature=own_signature(scene))
        started = scene.snapshot.clock - ago + 1


LIMITS: list[tuple[str, Callable[[Scene], None], str]] = [
    ("rate", done(ago=20, count=3, action="checkpoint"), "terminate"),
    ("victims", done(ago=600, count=10), "terminate"),
    ("victims", done(ago=600, count=5, uid=their_uid), "terminate"),
    ("one per device", done(ago=10, devices=there), "terminate"),
    # pid 2 has ended, but its memory has not come back
    (
        "one per device",
        done(ago=20, devices=there, memory=1, memory_used=lambda scene: ((*there(scene), 0),)),
        "terminate",
    ),
    ("repetition", done(ago=10, process=themselves), "terminate"),
    ("escalation", lambda scene: None, "kill"),
    ("escalation", done(ago=29, process=themselves), "kill"),
    ("escalation", done(ago=40, process=themselves, live=False), "kill"),  # a dry run
    ("restart loop", restarts, "terminate"),
    ("unkillable", outlives, "terminate"),
    ("unkillable", done(ago=1800, action="kill", process=themselves), "terminate"),
]
_CHECK_OF = {
    "rate": "_rate", "victims": "_victims", "one per device": "_busy_device", "repetition": "_repetition",
    "escalation": "_escalation", "restart loop": "_restart_loop", "unkillable": "_unkillable",
}  # fmt: skip


@pytest.mark.parametrize(("limit", "before", "action"), LIMITS, ids=[limit for limit, _, _ in LIMITS])
def test_a_limit_spares_and_without_it_the_innocent_is_hit(scene, monkeypatch, limit, before, action):
    before(scene)

    refused = scene.act(action)
    assert [check.check for check in refused.failed] == [limit]
    assert scene.lives()

    owner = guard_limits if limit in ("one per device", "repetition", "restart loop") else guard_limits.ActionLimits
    monkeypatch.setattr(owner, _CHECK_OF[limit], lambda *of: None)
    assert scene.act(action).word == "sent"
    assert scene.dies()


WITHIN: dict[str, tuple[Callable[[Scene], None], str]] = {
    "rate": (done(ago=61, count=3), "terminate"),
    "victims": (done(ago=600, count=9), "terminate"),
    "own victims": (done(ago=600, count=4, uid=their_uid), "terminate"),
    "victims of one": (done(ago=600, count=5, uid=4711), "terminate"),
    "effect seen": (done(ago=20, devices=there), "terminate"),  # pid 2 has ended
    "escalation": (done(ago=31, process=themselves), "kill"),
    "escalation of a policy that is patient": (done(ago=3 * HOUR, process=themselves), "kill"),
    "restart loop": (lambda scene: restarts(scene, times=1), "terminate"),
    "ran at the same time": (done(ago=61, count=2, signature=own_signature), "terminate"),
    "dry run": (done(ago=10, count=10, live=False), "terminate"),
}


@pytest.mark.parametrize(("before", "action"), WITHIN.values(), ids=WITHIN)
def test_within_the_limits_it_goes_on(scene, before, action):
    before(scene)

    assert scene.act(action).word == "sent"


def test_a_user_of_whom_many_are_ended_uses_up_no_others_share_of_the_hour():
    book, pids, ended, refusals = guard_limits.ActionLimits(), count(2), Counter(), []
    for uid in (uid for uid in (1001, 1002, 1003, 1004, 1005) for _ in range(20)):
        process = (next(pids), 1.0)
        if refused := list(book.failed(an_action(process, uid), lambda past: True)):
            refusals += refused
            continue
        ended[uid] += 1
        book.record(PastAction(0.0, "terminate", process, ("GPU",), live=True, uid=uid))

    assert ended == {1001: 5, 1002: 3, 1003: 1, 1004: 1}
    assert "the 5 that are left are for other users: of this one 5 were ended" in refusals[0].text
    assert refusals[0].wait == HOUR - NOW


def test_the_grace_of_a_notebook_ends(scene, monkeypatch):
    read = identity.facts_of
    monkeypatch.setattr(identity, "facts_of", lambda *of: replace(read(*of), command="python -m ipykernel_launcher"))
    assert scene.act().wait == pytest.approx(600, abs=1)
    clock = procfs.boot_clock

    monkeypatch.setattr(preflight, "boot_clock", lambda: clock() + 601)
    scene.context(interval=1000.0)
    assert scene.act().word == "sent"


@pytest.mark.parametrize("action", sorted(actions.ACTIONS))
def test_a_recording_is_refused_by_every_action_and_that_is_written_down(scene, action):
    scene.snapshot = replace(scene.snapshot, recorded=True)

    assert scene.act(action).word == "refused"
    scene.act(action)
    assert {event.outcome for event in scene.events} == {"refused"}
    # What takes something away is tried again and again: one line is enough.
    assert len(scene.events) == 1 or action not in actions.COUNTED
    assert "a recording" in str(scene.events[0].message)


@pytest.mark.parametrize("action", SIGNALS)
def test_who_ends_after_the_line_was_written_is_gone_and_that_is_written_too(scene, action):
    write = scene.facts["append"]

    def append(event: Event) -> bool:
        if event.outcome == "about to":
            os.kill(scene.pid, signal.SIGKILL)
            os.waitpid(scene.pid, 0)
        return bool(write(event))

    scene.context(append=append)

    assert scene.act(action).word == "gone"
    assert [event.outcome for event in scene.events] == ["about to", "gone"]


@pytest.fixture
def priorities(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is asked of the kernel, which has 0 for everybody and does nothing."""
    asked: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda kind, pid: 0)
    monkeypatch.setattr(os, "setpriority", lambda kind, pid, niceness: asked.append(niceness))
    return asked


@pytest.mark.parametrize(
    ("options", "asked"),
    [({}, [10]), ({"niceness": 19}, [19]), ({"niceness": 20}, []), ({"niceness": 0}, []), ({"niceness": "low"}, [])],
)
def test_a_niceness_is_10_unless_the_step_names_one_that_there_is(scene, priorities, options, asked):
    assert scene.act("renice", options=tuple(options.items())).word == "sent"

    assert priorities == asked


@pytest.mark.parametrize("what", ["has ended", "is of another process"])
def test_a_thread_that_is_not_of_this_process_any_more_gets_back_what_it_had(scene, priorities, monkeypatch, what):
    if what == "has ended":
        monkeypatch.setattr(identity, "has_ended", lambda pidfd: bool(priorities))  # after the first was changed
    else:
        monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith(f"/proc/{scene.pid}/task/"))
    scene.act("renice")

    assert priorities == [10, 0]


@pytest.mark.parametrize(("error", "word"), [(PermissionError, "not permitted"), (ProcessLookupError, "gone")])
def test_a_priority_that_cannot_be_changed_is_said_and_written_down(scene, monkeypatch, error, word):
    def fail(*of: int) -> None:
        raise error

    monkeypatch.setattr(os, "getpriority", lambda *of: 0)  # whatever these tests are run with
    monkeypatch.setattr(os, "setpriority", fail)

    outcome = scene.act("renice", options=(("niceness", 19),))

    assert (outcome.word, outcome.why) == (word, "")  # the word says it all
    assert [event.outcome for event in scene.events] == ["about to", word]


def test_the_user_of_a_verdict_is_denied_by_their_name_else_the_only_one_of_its_processes(scene, monkeypatch):
    asked = []
    monkeypatch.setattr(
        actions, "_restrict", lambda verdict, context, *what: asked.append(what) or actions.ActionOutcome("done")
    )
    alice = replace(scene.process, user="alice")
    bob = replace(alice, pid=scene.pid + 1, uid=alice.uid + 1, user="bob")

    for uid, processes in ((None, (alice,)), (None, (alice, bob)), (bob.uid, (alice, bob))):
        subject = Subject("device", scene.subject.device, uid=uid)
        finding = replace(scene.verdict().finding, subject=subject, processes=processes)
        actions.act(replace(scene.verdict("deny"), finding=finding), scene.snapshot, scene.context())
    assert asked == [("denied", str(alice.uid), "alice"), ("denied", str(bob.uid), "bob")]


def test_what_runs_already_when_others_are_ended_is_not_back():
    book, program = guard_limits.ActionLimits(), {"devices": ("GPU-c",), "signature": "a program"}
    book.record(PastAction(500.0, "terminate", (2, 100.0), ("GPU-a",), live=True, signature="a program"))
    book.record(PastAction(520.0, "terminate", (3, 505.0), ("GPU-b",), live=True, signature="a program"))

    assert list(book.failed(an_action((4, 100.0), 1001, **program), lambda past: True)) == []


@pytest.mark.parametrize(
    ("command", "claim", "same"),
    [("python -u train.py --seed 2", "a", True), ("python mine.py", "a", False), ("python train.py", "b", False)],
)
def test_another_script_or_claim_is_another_program(scene, command, claim, same):
    facts = identity.facts_of(scene.pid)
    assert facts
    before = identity.signature(replace(facts, command="python train.py --seed 1"), "a")

    assert (identity.signature(replace(facts, command=command), claim) == before) is same


@pytest.mark.root
def test_whose_program_is_always_started_again_gets_no_new_claims_instead_of_a_pardon(tmp_path):
    with a_scene(uid=SOMEBODY) as scene:
        directory = lock_directory(str(tmp_path / "claims"))
        scene.context(directory=directory)
        restarts(scene)
        assert [check.check for check in scene.act().failed] == ["restart loop"]

        denied = read_restrictions(directory, DENIED, time.time())[str(SOMEBODY)]
        assert denied.reason == "the same program was ended 2 times within the hour, and was started again each time"
        assert denied.until and 3500 < denied.until - time.time() <= 3600
        assert [(event.kind, event.outcome) for event in scene.events] == [
            ("terminate", "refused"),
            ("deny", "about to"),
        ]
        assert scene.lives()
