"""benchmarks/jobs_campaign.py: a short campaign of kills, and what its checker sees."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from broker_machine import Brokered
from jobs_campaign import Campaign, faults
from sources import ROOT

from gpuguard.batch.job_records import END, START, JobEvent, JobRecord, Source, StoredJob
from gpuguard.batch.states import Jobs, jobs_of

HERE = Source()
WITNESS = ["ann 1 0 1 start", "ann 1 0 1 end 1", "ann 1 0 2 start", "ann 1 0 2 end 0"]


def the_jobs(*statuses: int | None) -> dict[str, Jobs]:
    """One job, an attempt for each status."""
    events: list[JobEvent] = []
    for attempt, status in enumerate(statuses, 1):
        events.append(JobEvent(kind=START, time=0.0, task=0, attempt=attempt, boot="boot", claim="c"))
        if status is not None:
            events.append(JobEvent(kind=END, time=0.0, task=0, attempt=attempt, status=status))
    record = JobRecord(
        id=1, command=("true",), options="{}", source=HERE, working_directory="/", submitted=0.0, boot="boot", retries=3
    )
    return {"ann": jobs_of([StoredJob(record, tuple(events))], {HERE: {}}, "boot")}


def test_what_is_sound_has_no_faults():
    assert faults(the_jobs(1, 0), {"ann": [1]}, WITNESS) == []
    assert faults(the_jobs(1, None), {"ann": [1]}, WITNESS[:3]) == []


@pytest.mark.parametrize(
    ("statuses", "ids", "witness"),
    [
        ((1, 0), [1, 1], WITNESS),
        ((1, 0), [1, 2], WITNESS),
        ((1, 0), [1], [*WITNESS, "ann 1 0 2 start"]),
        ((1, 0), [1], [*WITNESS, "ann 1 0 3 start"]),
        ((1, 0), [1], [*WITNESS, "ann 1 0 2 double"]),
        ((1, 0), [1], WITNESS[:3]),
        ((1, 1, 1, 1), [1], WITNESS),
        ((1,), [1], WITNESS[:2]),
        ((1, 0), [1], [*WITNESS[:1], "ann 1 0 1 end 0", *WITNESS[2:]]),
    ],
    ids=[
        "id twice",
        "id lost",
        "ran twice",
        "ran unknown",
        "double",
        "not completed",
        "not failed",
        "waits for ever",
        "ran after success",
    ],
)
def test_the_checker_sees_what_is_wrong(statuses, ids, witness):
    assert faults(the_jobs(*statuses), {"ann": ids}, witness)


def test_every_task_ends_once_in_a_true_state_whatever_is_killed(tmp_path: Path):
    for seconds in (3, 20, 100):  # on a busy machine nothing may have begun yet that could be killed
        words = ["--seconds", str(seconds), "--jobs", "8", "--longest", "0.4", "--one-user"]
        program = [sys.executable, str(ROOT / "benchmarks" / "jobs_campaign.py"), *words]
        done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)

        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        assert told["faults"] == 0
        if told["killed"]:
            break
    assert told["killed"]


def test_a_job_that_lives_on_a_gpu_that_is_free_is_found(tmp_path: Path):
    campaign = Campaign(Brokered(tmp_path, ROOT, "everybody", "1xH100-80GB"), 0, 0.0, 0.0, Random(1), {})
    campaign.prepare()
    (uuid,) = campaign.machine.uuids
    code = "import sys, time; file = open(sys.argv[1] + '/' + sys.argv[2]); print(flush=True); time.sleep(600)"
    words = [sys.executable, "-c", code, str(campaign.witness), uuid]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as job:
        assert job.stdout and job.stdout.readline()
        campaign.look_for_orphans()
        job.kill()

    assert campaign.found == [f"process {job.pid} on {uuid}, which is free"]
