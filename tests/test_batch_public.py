"""What every user may know of the jobs of all: by the claims that are held, and by what dispatchers have written."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import a_claim_record, a_device

from gpuguard.batch import public
from gpuguard.batch.public import PublicJob, public_jobs
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.users import user_name
from gpuguard.views.jobs import all_json, lines_of_all

NOW = 1_700_000_000.0
ME = user_name(os.geteuid())


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    return lock_directory(str(tmp_path / "claims"))


def a_waiting_job(**fields: Any) -> dict[str, Any]:
    return {"id": 18, "tasks": 1, "gpus": 2, "submitted": NOW - 60, "what": "python train.py", **fields}


@contextmanager
def a_dispatcher(directory: LockDirectory, *jobs: Any, name: str = "0", uid: int | None = None) -> Iterator[Path]:
    """The file of a dispatcher that lives, with the jobs that wait for it."""
    owner = os.geteuid() if uid is None else uid
    path = Path(directory.records, f"{directory.prefix}jobs.{owner}.{name}")
    path.write_text(json.dumps({"jobs": jobs}))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


def a_public_job(**fields: Any) -> PublicJob:
    facts = {"user": "alice", "id": "17", "state": "waiting", "since": NOW - 60, "what": "python train.py"}
    return PublicJob(**{**facts, "num_gpus": 1, **fields})


def test_a_job_runs_where_a_claim_names_it(directory):
    devices = a_device(0), a_device(3)
    claims = [a_claim_record(*devices, job="17.3"), a_claim_record(a_device(1), id="b")]

    (job,) = public_jobs(directory, claims)
    assert (job.full_id, job.state, job.num_gpus) == ("alice/17.3", "running", 2)
    assert job.devices == tuple(device.uuid for device in devices)
    assert (job.since, job.what, job.unattended) == (NOW - 3600, "python train.py", False)


def test_a_job_waits_where_the_dispatcher_of_its_user_says_so(directory):
    with a_dispatcher(directory, a_waiting_job(tasks=3)):
        (job,) = public_jobs(directory, ())

    assert (job.full_id, job.state, job.tasks, job.num_gpus) == (f"{ME}/18", "waiting", 3, 2)
    assert (job.devices, job.since, job.unattended) == ((), NOW - 60, False)


def test_a_job_whose_dispatcher_was_killed_is_unattended(directory):
    with a_dispatcher(directory, a_waiting_job()):
        pass

    assert [job.unattended for job in public_jobs(directory, ())] == [True]


@pytest.mark.parametrize("jobs", [["garbage"], [{"id": "18"}], [a_waiting_job(tasks="3")], [a_waiting_job(gpus=None)]])
def test_a_file_that_says_something_else_costs_only_its_own_jobs(directory, jobs):
    with a_dispatcher(directory, *jobs), a_dispatcher(directory, a_waiting_job(id=5), name="1"):
        assert [job.id for job in public_jobs(directory, ())] == ["5"]


def test_the_words_of_a_user_are_no_sentence_that_has_a_translation(directory):
    message = {"id": "job.held", "values": {}}
    with a_dispatcher(directory, a_waiting_job(what="held")) as path:
        path.write_text(json.dumps({**json.loads(path.read_text()), "message_ids": {"held": message}}))
        (job,) = public_jobs(directory, ())

    assert type(job.what) is str


def test_a_file_in_the_name_of_another_user_says_nothing(directory):
    with a_dispatcher(directory, a_waiting_job(), uid=os.geteuid() + 1):
        assert public_jobs(directory, ()) == []


def test_a_link_is_not_followed(directory, tmp_path):
    with a_dispatcher(directory, a_waiting_job()) as path:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert public_jobs(directory, ()) == []


def test_a_user_who_makes_very_many_files_is_read_in_part(directory, monkeypatch):
    monkeypatch.setattr(public, "first_of_each", lambda directory, names, most: (names[:1], {}))
    with a_dispatcher(directory, a_waiting_job(id=1)), a_dispatcher(directory, a_waiting_job(id=2), name="1"):
        assert [job.id for job in public_jobs(directory, ())] == ["1"]


def test_the_list_of_all_jobs_has_a_line_for_each():
    jobs = [
        a_public_job(id="17.3", state="running", num_gpus=2, devices=("GPU-0", "GPU-3")),
        a_public_job(tasks=3, since=None, what="echo \x1b[31m"),
        a_public_job(user="bob", id="4", unattended=True),
    ]
    _heading, runs, waits, alone = (line.split() for line in lines_of_all(jobs, NOW))

    assert runs == ["alice/17.3", "running", "2", "1m", "python", "train.py"]
    assert waits == ["alice/17", "3", "waiting", "1", "n/a", "echo", "\\x1b[31m"]
    assert " ".join(alone).endswith("python train.py (no process of its user waits in the queue for it)")


def test_a_list_of_no_jobs_says_so():
    assert lines_of_all([], NOW) == ["no job of `gpuguard submit` waits or runs."]


def test_programs_get_the_same():
    (job,) = all_json([a_public_job(state="running", devices=("GPU-0",))])["jobs"]

    assert job == {
        "id": "alice/17", "user": "alice", "state": "running", "num_tasks": 1, "num_gpus": 1, "devices": ["GPU-0"],
        "since_unix_seconds": NOW - 60, "what": "python train.py", "unattended": False,
    }  # fmt: skip
