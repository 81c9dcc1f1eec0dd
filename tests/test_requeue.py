"""The action `requeue`: a job of `gpuguard submit --requeue` ends and waits again; whatever else it means is spared."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from builders import a_claim_record
from guard_scene import Scene, a_scene, python
from nodes import until
from test_owner_learns import ALICE, JOB, GuardedMachine
from users import an_open_place

from gpuguard.jobs.processes import NEVER, Escalation
from gpuguard.procfs import catches

# A process that is known for a `gpuguard run` by the signal that it catches.
SUPERVISOR = "import signal, time; signal.signal(signal.SIGURG, lambda *_: None); time.sleep(600)"


@pytest.fixture
def scene() -> Iterator[Scene]:
    with a_scene(python(), "-c", SUPERVISOR) as scene:
        until(lambda: catches(scene.pid, signal.SIGURG))
        yield scene


def claimed(scene: Scene, **fields: Any) -> Scene:
    """The offender runs under this claim."""
    facts = {"pid": scene.pid, "holders": (scene.pid,), "uid": scene.subject.uid, **fields}
    scene.snapshot = replace(scene.snapshot, claims=(a_claim_record(scene.subject.device, **facts),))
    return scene


def test_a_job_that_may_stand_in_the_queue_again_is_asked_to_end(scene):
    assert claimed(scene, requeue=True).act("requeue").word == "sent"
    assert scene.dies()
    assert [(event.kind, event.outcome) for event in scene.events] == [("requeue", "about to")]


def test_a_dry_run_ends_nothing(scene):
    assert claimed(scene, requeue=True).act("requeue", enforce=False).word == "dry run"
    assert scene.lives()


def test_what_is_no_such_job_is_refused(scene):
    for offender in (scene, claimed(scene)):
        outcome = offender.act("requeue")

        assert outcome.word == "refused" and "--requeue" in outcome.why
    assert scene.lives()


def test_a_job_whose_gpuguard_run_was_killed_is_refused_because_it_could_not_wait_again():
    with a_scene() as scene:
        outcome = claimed(scene, requeue=True).act("requeue")

        assert outcome.word == "refused" and "no gpuguard run" in outcome.why
        assert claimed(scene, requeue=True, pid=None).act("requeue").word == "refused"
        assert scene.lives()


def test_a_job_that_does_not_end_is_killed_a_grace_later_without_a_second_sigterm():
    escalation = Escalation(began=0.0, time_limit=None, grace=60.0, checkpoint=None)
    escalation.follow(10.0, "requeue", "asked")
    escalation.follow(20.0, "requeue", "asked again")

    assert (escalation.due, escalation.why) == (70.0, "asked")
    assert escalation.next_step(70.0).signum == signal.SIGKILL
    assert escalation.due == NEVER


POLICY = """
version: 1
mode: enforce
policies: [{name: hogs, when: {memory: {above: 20GiB}}, for: 400ms, steps: [requeue]}]
"""
# The first attempt uses the GPU, saves when it is asked to end, and goes on; the second one has nothing left to do.
SAVING = f"""
import os, signal, sys
def save(*_):
    print("saved", flush=True)
signal.signal(signal.SIGTERM, save)
if os.environ["GPUGUARD_ATTEMPT"] == "2":
    sys.exit(0)
{JOB}
"""


@pytest.mark.root
def test_a_policy_sends_a_job_back_into_the_queue_and_its_user_learns_of_it(site):
    def task() -> dict[str, Any]:
        answer, _end = json.JSONDecoder().raw_decode(machine.says(ALICE, "jobs", "--json"))  # notices come after it
        [job] = answer["jobs"]
        return dict(job["tasks"][0])

    with an_open_place() as place:
        machine = GuardedMachine(place, site, "everybody")
        machine.policy = POLICY
        machine.begin()
        try:
            machine.start_daemon()
            machine.says(ALICE, "submit", "--requeue", "--grace", "1s", "--", machine.python_path, "-c", SAVING)
            until(lambda: task()["state"] == "completed", f"{machine.said()}")

            assert task()["attempt"] == 2
            log = machine.says(ALICE, "jobs", "log", "1", "--attempt", "1")
            assert "saved" in log and "the grace is over: SIGKILL to the job and all its processes" in log
            assert "ended by policy hogs, to stand in the queue again (uses 40.0GiB" in log
        finally:
            machine.close()
