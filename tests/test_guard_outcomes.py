"""What the guard says that became of an action, where it could not or need not do it; and renice to the last thread."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from gpuguard.clusters import slurm_jobs
from gpuguard.enforcement import actions, signals, target
from gpuguard.model import Event, Subject


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
    monkeypatch.setattr(target, "has_ended", lambda pidfd: True)
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


# Denying: the one user, by his name.


def test_the_user_of_a_verdict_is_denied_by_his_name_else_the_only_one_of_its_processes(scene, monkeypatch):
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
    monkeypatch.setattr(slurm_jobs, "job_of", lambda pids: "12")
    monkeypatch.setattr(slurm_jobs, "against_cancelling", lambda job, uid: None)
    monkeypatch.setattr(slurm_jobs, "cancel", lambda job: answer)

    assert scene.act("cancel").word == word
