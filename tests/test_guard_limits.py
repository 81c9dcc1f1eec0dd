"""What was done lately speaks against doing more: signals come one by one, and far apart."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from builders import GIB, a_process, a_uuid
from guarded import SOMEBODY, Scene, a_scene

from gpuguard import procfs
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.restrictions import DENIED, read_restrictions
from gpuguard.clusters import slurm
from gpuguard.enforcement import actions, identity, limits, preflight, signals
from gpuguard.enforcement.limits import HOUR, REMEMBERED, PastAction
from gpuguard.model import Event, Finding, Subject, Verdict

OTHER = (2, 1.0)
NOW = 600.0


def an_action(process: tuple[int, float], uid: int | None = None, **fields: Any) -> PastAction:
    return PastAction(
        NOW, **{"action": "terminate", "devices": ("GPU",), "live": True, **fields}, process=process, uid=uid
    )


def seen(past: PastAction) -> bool:
    return True


def actions_done(scene: Scene, *, ago: float, count: int = 1, **fields: Any) -> None:
    for number in range(count):
        facts = {
            "action": "terminate",
            "process": (2 + number, scene.snapshot.clock - ago - 60),
            "devices": (f"GPU-of-{number}",),
            "live": True,
            **fields,
        }
        scene.context().limits.record(PastAction(scene.snapshot.clock - ago, **facts))  # type: ignore[arg-type]


def own_signature(scene: Scene) -> str:
    return identity.signature(identity.facts_of(scene.pid))


def restarts(scene: Scene, *, times: int = 2) -> None:
    """The program of the scene was ended so often within the hour, and was started again after each end."""
    started = scene.snapshot.clock - 4000  # below 0 on a machine that has just been started, and still the order of all
    for number in range(times):
        ago = 3000.0 - 900 * number
        actions_done(scene, ago=ago, process=(2 + number, started), signature=own_signature(scene))
        started = scene.snapshot.clock - ago + 1


LIMITS: list[tuple[str, Callable[[Scene], None], str]] = [
    ("rate", lambda scene: actions_done(scene, ago=20, count=3, action="checkpoint"), "terminate"),
    ("victims", lambda scene: actions_done(scene, ago=600, count=10), "terminate"),
    ("victims", lambda scene: actions_done(scene, ago=600, count=5, uid=scene.process.uid), "terminate"),
    ("one per device", lambda scene: actions_done(scene, ago=10, devices=(scene.subject.device,)), "terminate"),
    (
        "one per device",  # pid 2 has ended, but its memory has not come back
        lambda scene: actions_done(
            scene, ago=20, devices=(scene.subject.device,), memory=1, memory_used=((scene.subject.device, 0),)
        ),
        "terminate",
    ),
    (
        "repetition",
        lambda scene: actions_done(scene, ago=10, process=(scene.pid, scene.process.start_time)),
        "terminate",
    ),
    ("escalation", lambda scene: None, "kill"),
    (
        "escalation",
        lambda scene: actions_done(scene, ago=29, process=(scene.pid, scene.process.start_time)),
        "kill",
    ),
    (
        "restart loop",
        restarts,
        "terminate",
    ),
    (
        "unkillable",
        lambda scene: scene.context().limits.unkillable.update({OTHER: (a_uuid(0),)}),
        "terminate",
    ),
]
_CHECK_OF = {
    "rate": "_rate", "victims": "_victims", "one per device": "_busy_device", "repetition": "_repetition",
    "escalation": "_escalation", "restart loop": "_restart_loop",
}  # fmt: skip


@pytest.mark.parametrize(("limit", "before", "action"), LIMITS, ids=[limit for limit, _, _ in LIMITS])
def test_a_limit_spares_and_without_it_the_innocent_is_hit(scene, monkeypatch, limit, before, action):
    before(scene)

    refused = scene.act(action)
    assert [each.check for each in refused.failed] == [limit]
    assert scene.lives()

    if limit == "unkillable":
        monkeypatch.setattr(limits.ActionLimits, "_unkillable", lambda *of: None)
    else:
        monkeypatch.setattr(limits, _CHECK_OF[limit], lambda *of: None)
    assert scene.act(action).word == "sent"
    assert scene.dies()


@pytest.mark.parametrize(
    ("before", "action"),
    [
        (lambda scene: actions_done(scene, ago=61, count=3), "terminate"),
        (lambda scene: actions_done(scene, ago=600, count=9), "terminate"),
        (lambda scene: actions_done(scene, ago=600, count=4, uid=scene.process.uid), "terminate"),
        (lambda scene: actions_done(scene, ago=600, count=5, uid=4711), "terminate"),
        (lambda scene: actions_done(scene, ago=20, devices=(scene.subject.device,)), "terminate"),  # pid 2 has ended
        (lambda scene: actions_done(scene, ago=31, process=(scene.pid, scene.process.start_time)), "kill"),
        (lambda scene: restarts(scene, times=1), "terminate"),
        (lambda scene: actions_done(scene, ago=61, count=2, signature=own_signature(scene)), "terminate"),
        (lambda scene: actions_done(scene, ago=10, count=10, live=False), "terminate"),
    ],
    ids=[
        "rate",
        "victims",
        "own victims",
        "victims of one",
        "effect seen",
        "escalation",
        "restart loop",
        "ran at the same time",
        "dry run",
    ],
)
def test_within_the_limits_it_goes_on(scene, before, action):
    before(scene)

    assert scene.act(action).word == "sent"


def test_whoever_has_many_ended_uses_up_no_others_share_of_the_hour():
    """Ten small processes that break a rule on purpose kept the guard from everybody for an hour."""
    book, pids, ended = limits.ActionLimits(), count(2), Counter()
    for uid in (uid for uid in (1001, 1002, 1003, 1004, 1005) for _ in range(20)):
        process = (next(pids), 1.0)
        if list(book.failed(an_action(process, uid), seen)):
            continue
        ended[uid] += 1
        book.record(PastAction(0.0, "terminate", process, ("GPU",), live=True, uid=uid))

    assert ended == {1001: 5, 1002: 3, 1003: 1, 1004: 1}


def test_a_share_that_is_used_up_says_for_whom_the_rest_is():
    book = limits.ActionLimits([PastAction(0.0, "terminate", (2 + i, 1.0), ("GPU",), True, uid=1001) for i in range(5)])
    [refusal] = book.failed(an_action((99, 1.0), 1001), seen)

    assert "the 5 that are left are for other users: of this one 5 were ended" in refusal.text
    assert refusal.wait == HOUR - NOW


def test_those_come_first_of_whom_fewest_were_met_and_then_the_largest():
    book = limits.ActionLimits([PastAction(0.0, "checkpoint", (2, 1.0), ("GPU",), True, uid=1001)])
    names = {
        "small of the one who was met": a_verdict(1001, 1),
        "large of the one who was met": a_verdict(1001, 70),
        "small of another": a_verdict(1002, 1),
        "large of another": a_verdict(1002, 70),
        "claim of another, without a process": a_claims_verdict(1002),
        "claim of the one who was met": a_claims_verdict(1001),
    }

    assert sorted(names, key=lambda name: book.priority(names[name])) == [
        "large of another",
        "small of another",
        "claim of another, without a process",
        "large of the one who was met",
        "small of the one who was met",
        "claim of the one who was met",
    ]


def a_claims_verdict(uid: int) -> Verdict:
    return Verdict("p", Finding("r", Subject("claim", uid=uid), "why"), "log", 0, 0.0)


def a_verdict(uid: int, gib: int) -> Verdict:
    process = a_process(uid=uid, memory_used=gib * GIB)
    return Verdict("p", Finding("r", Subject("process", uid=uid), "why", (process,)), "terminate", 0, 0.0)


def test_what_a_dry_run_did_not_do_does_not_count_as_done(scene):
    actions_done(scene, ago=40, process=(scene.pid, scene.process.start_time), live=False)

    assert scene.act("kill").word == "refused"


def test_a_refusal_that_waits_says_for_how_long_and_others_do_not(scene):
    actions_done(scene, ago=10, devices=(scene.subject.device,))
    assert 0 < (scene.act().wait or 0) <= 5

    scene.context(still_true=lambda verdict, snapshot: False)
    assert scene.act().wait is None


def test_the_grace_of_a_notebook_ends(scene, monkeypatch):
    read = identity.facts_of
    monkeypatch.setattr(identity, "facts_of", lambda pid: replace(read(pid), command="python -m ipykernel_launcher"))
    assert scene.act().wait == pytest.approx(600, abs=1)
    clock = procfs.boot_clock

    monkeypatch.setattr(preflight, "boot_clock", lambda: clock() + 601)
    scene.context(interval=1000.0)
    assert scene.act().word == "sent"


def test_who_was_killed_and_lives_gets_no_further_signal(scene):
    actions_done(scene, ago=1800, action="kill", process=(scene.pid, scene.process.start_time))

    assert [each.check for each in scene.act("kill").failed if each.check == "unkillable"] == ["unkillable"]
    assert scene.lives()


def test_what_is_remembered_of_refusals_is_bounded_and_the_newest_stays(scene):
    book = scene.context().limits
    for number in range(3 * REMEMBERED):
        assert book.refused_anew(number, "why")

    assert len(book._refused) <= REMEMBERED + 1
    assert not book.refused_anew(3 * REMEMBERED - 1, "why")


# What the guard says that became of an action, where it could not or need not do it; and renice to the last thread.


@pytest.mark.parametrize("action", sorted(actions.ACTIONS))
def test_a_recording_is_refused_by_every_action_and_that_is_written_down(scene, action):
    scene.snapshot = replace(scene.snapshot, recorded=True)

    assert scene.act(action).word == "refused"
    assert [event.outcome for event in scene.events] == ["refused"]
    assert "a recording" in str(scene.events[0].message)


def test_that_a_process_had_ended_before_is_written_down_and_settles_nothing(scene):
    os.kill(scene.pid, signal.SIGKILL)
    assert scene.dies()

    assert [scene.act().word, scene.act().word] == ["gone", "gone"]
    assert [event.outcome for event in scene.events] == ["gone", "gone"]


def test_a_signal_that_does_not_arrive_leaves_a_second_line(scene, monkeypatch):
    monkeypatch.setattr(signals, "forward", lambda *of: signals.GONE)

    assert scene.act().word == "gone"
    assert [event.outcome for event in scene.events] == ["about to", "gone"]


@pytest.mark.parametrize("action", ["terminate", "pause", "resume", "renice"])
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


# Renice: of pids alone, so it looks again.


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


def test_a_thread_of_a_process_that_has_ended_gets_back_what_it_had(scene, priorities, monkeypatch):
    monkeypatch.setattr(identity, "has_ended", lambda pidfd: bool(priorities))  # after the first was changed
    scene.act("renice")

    assert priorities == [10, 0]


def test_a_thread_that_is_not_of_this_process_any_more_gets_back_what_it_had(scene, priorities, monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith(f"/proc/{scene.pid}/task/"))
    scene.act("renice")

    assert priorities == [10, 0]


@pytest.mark.parametrize(("error", "word"), [(PermissionError, "not permitted"), (ProcessLookupError, "gone")])
def test_a_priority_that_cannot_be_changed_is_said_and_written_down(scene, monkeypatch, error, word):
    def fail(*of: int) -> None:
        raise error

    monkeypatch.setattr(os, "getpriority", lambda *of: 0)  # whatever these tests are run with
    monkeypatch.setattr(os, "setpriority", fail)

    assert scene.act("renice", options=(("niceness", 19),)).word == word
    assert [event.outcome for event in scene.events] == ["about to", word]


# Denying: the one user, by their name.


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


# Cancelling: what Slurm answers.


@pytest.mark.parametrize(("answer", "word"), [(None, "sent"), ("scancel fails", "failed")])
def test_a_job_that_slurm_does_not_cancel_is_a_failure(scene, monkeypatch, answer, word):
    monkeypatch.setattr(slurm, "job_of", lambda pids: "12")
    monkeypatch.setattr(slurm, "against_cancelling", lambda job, uid: None)
    monkeypatch.setattr(slurm, "cancel", lambda job: answer)

    assert scene.act("cancel").word == word


def test_what_runs_already_when_others_are_ended_is_not_back():
    """Four jobs of one user started at once: two were ended, and the others, which ran all the time, were spared."""
    book, program = limits.ActionLimits(), {"devices": ("GPU-c",), "signature": "a program"}
    book.record(PastAction(500.0, "terminate", (2, 100.0), ("GPU-a",), live=True, signature="a program"))
    book.record(PastAction(520.0, "terminate", (3, 100.0), ("GPU-b",), live=True, signature="a program"))

    assert list(book.failed(an_action((4, 100.0), 1001, **program), seen)) == []
    assert list(book.failed(an_action((4, 530.0), 1001, **program), seen)) == [], "that is one restart"


@pytest.mark.parametrize("other", ["another script", "another claim"])
def test_another_script_or_claim_is_another_program(scene, other):
    """Two scripts that were given up on purpose bought a third one its safety."""
    facts = identity.facts_of(scene.pid)
    assert facts
    one = identity.signature(replace(facts, command="python train.py --seed 1"), "a")
    again = identity.signature(replace(facts, command="python -u train.py --seed 2"), "a")
    another = {"another script": ("python mine.py", "a"), "another claim": ("python train.py", "b")}[other]
    command, claim = another

    assert one == again != identity.signature(replace(facts, command=command), claim)


@pytest.mark.root
def test_whose_program_is_always_started_again_gets_no_new_claims_instead_of_a_pardon(tmp_path):
    with a_scene(uid=SOMEBODY) as scene:
        directory = lock_directory(str(tmp_path / "claims"))
        scene.context(directory=directory)
        restarts(scene)
        assert [each.check for each in scene.act().failed] == ["restart loop"]

        denied = read_restrictions(directory, DENIED, time.time())[str(SOMEBODY)]
        assert denied.reason == "the same program was ended 2 times within the hour, and was started again each time"
        assert denied.until and 3500 < denied.until - time.time() <= 3600
        assert [(event.kind, event.outcome) for event in scene.events] == [
            ("terminate", "refused"),
            ("deny", "about to"),
        ]
        assert scene.lives()
