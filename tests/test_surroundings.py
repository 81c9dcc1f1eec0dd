"""What the user of a job is told of others on its GPUs, and of the job on GPUs that it has not claimed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from daemons import ANOTHER, somebodys
from nodes import Gpuguard, start, until

from gpuguard.claims.directory import lock_directory
from gpuguard.errors import BackendError
from gpuguard.jobs import surroundings
from gpuguard.jobs.surroundings import JobMeter, Surroundings
from gpuguard.model import Gap, ProcessStat

ME, BOB = os.getuid(), 4242
MINE, OTHER = a_device(0), a_device(1)


class Claimed:
    """A claim of the first device."""

    def __init__(self, memory: int | None = None, max_processes: int | None = None) -> None:
        self.memory, self.max_processes = memory, max_processes

    def __iter__(self) -> Iterator[Any]:
        return iter((MINE,))


class Driver:
    name, simulated = "driver", True

    def __init__(self, *devices: Any) -> None:
        self.devices, self.asked, self.fails = devices, 0, False

    def sample(self, fields: Any, devices: Any = None) -> Any:
        self.asked += 1
        if self.fails:
            raise BackendError("no answer")
        return a_snapshot(*self.devices)


@pytest.fixture
def around(tmp_path, monkeypatch):
    """Surroundings of a job, with claims that the test gives, and no waiting."""

    def made(*devices: Any, claims: Any = (), stats: Any = None, **claim: Any) -> Surroundings:
        monkeypatch.setattr(surroundings, "with_claims", lambda snapshot, find: replace(snapshot, claims=tuple(claims)))
        monkeypatch.setattr(surroundings, "process_facts", lambda snapshot: stats or {})
        made = Surroundings(Claimed(**claim), Driver(*devices), lock_directory(str(tmp_path)))  # type: ignore[arg-type]
        made._look_at = 0.0
        return made

    return made


def used_by(process: Any, index: int = 0) -> Any:
    return a_device(index, memory_used=13 * GIB, processes=(process,))


OURS = a_claim_record(uid=ME, holders=(50,))


def test_a_stranger_is_told_once_and_its_memory_is_not_the_jobs(around):
    here, meter = around(claims=[OURS]), JobMeter([MINE.uuid])
    snapshot = a_snapshot(used_by(a_process(99, uid=BOB, user="bob", memory_used=3 * GIB)))
    told = [list(here.news(here.strangers(snapshot))) for _ in range(3)]
    meter.add(snapshot, here.strangers(snapshot))

    assert told == [["bob (pid 99) computes on GPU 0 too, which you have claimed."], [], []]
    assert (meter.peak_memory, list(here.remarks)) == (10 * GIB, ["GPU 0 with bob (pid 99)"])


def test_where_the_memory_of_a_stranger_is_unknown_that_of_the_job_is_too():
    meter, stranger = JobMeter([MINE.uuid]), a_process(99, uid=BOB, memory_used=None)
    meter.add(a_snapshot(used_by(stranger)), [(MINE, stranger)])

    assert meter.peak_memory is None


@pytest.mark.parametrize(
    ("process", "claims", "claim"),
    [
        (a_process(99, uid=ME), [OURS], {}),
        (a_process(99, uid=0), [OURS], {}),
        (a_process(99, uid=None), [OURS], {}),
        (a_process(99, uid=BOB, container="c0ffee"), [OURS], {}),
        (a_process(99, uid=BOB, kind="graphics", memory_used=GIB), [OURS], {}),
        (a_process(50, uid=BOB), [OURS], {}),
        (a_process(99, uid=BOB), [OURS, a_claim_record(id="b", uid=BOB)], {}),
        (a_process(99, uid=BOB), [OURS], {"memory": GIB}),
        (a_process(99, uid=BOB), [OURS], {"max_processes": 3}),
    ],
    ids=["the user's", "root's", "of an unknown user", "in a container", "a desktop", "the job's, as another user",
         "with a claim there", "a shared GPU", "others are accepted"],
)  # fmt: skip
def test_no_other_process_is_a_stranger(around, process, claims, claim):
    assert around(claims=claims, **claim).strangers(a_snapshot(used_by(process))) == []


def test_a_list_that_cannot_be_believed_and_pids_of_another_namespace_tell_nothing(around, monkeypatch):
    bobs = used_by(a_process(99, uid=BOB))

    assert around(claims=[OURS]).strangers(a_snapshot(replace(bobs, processes_plausible=False))) == []
    assert around(claims=[OURS]).strangers(a_snapshot(replace(bobs, processes=None))) == []
    monkeypatch.setattr(Driver, "simulated", False)
    monkeypatch.setattr(surroundings, "in_first_pid_namespace", lambda: False)
    assert around(claims=[OURS]).strangers(a_snapshot(bobs)) == []


def test_another_user_cannot_fill_the_log_of_a_job():
    here = Surroundings(Claimed(), Driver(), None)  # type: ignore[arg-type]
    many = [(MINE, a_process(pid, uid=BOB, user="bob")) for pid in range(100, 200)]

    assert len(list(here.news(many))) == len(here.remarks) == surroundings.MOST_TOLD
    assert list(here.news(many)) == []


def test_where_the_claims_cannot_be_read_nobody_is_a_stranger_and_nothing_is_elsewhere(around, monkeypatch):
    here = around(MINE, OUTSIDE, claims=[])
    gap = (Gap(None, "claims", "no permission"),)
    monkeypatch.setattr(surroundings, "with_claims", lambda snapshot, find: replace(snapshot, gaps=gap))

    assert here.strangers(a_snapshot(used_by(a_process(99, uid=BOB)))) == []
    assert list(here.look(lambda: FAMILY)) == []


FAMILY = {4711: 1000.0}
OUTSIDE = used_by(a_process(4711, uid=ME), 1)


def test_a_job_that_computes_beside_its_claim_is_told_once(around):
    here = around(MINE, OUTSIDE, claims=[OURS])
    first = list(here.look(lambda: FAMILY))
    here._look_at = 0.0

    assert len(first) == 1 and first[0].startswith("the job computes on GPU 1 (pid 4711), which it has not claimed")
    assert list(here.look(lambda: FAMILY)) == [] and list(here.remarks) == ["GPU 1 without a claim (pid 4711)"]


def test_on_a_gpu_that_another_job_of_the_user_has_claimed_it_is_told_too(around):
    theirs = a_claim_record(OTHER, id="second", uid=ME, holders=(60,))

    assert len(list(around(MINE, OUTSIDE, claims=[OURS, theirs]).look(lambda: FAMILY))) == 1


@pytest.mark.parametrize(
    ("devices", "claims", "stats", "family"),
    [
        ((used_by(a_process(4711, uid=ME)), OTHER), [OURS], {}, FAMILY),
        ((MINE, OUTSIDE), [OURS], {}, {}),
        ((MINE, OUTSIDE), [OURS], {}, {4711: 2.0}),
        ((MINE, replace(OUTSIDE, processes_plausible=False)), [OURS], {}, FAMILY),
        ((MINE, OUTSIDE), [OURS, a_claim_record(OTHER, id="inner", uid=ME, holders=(60,))],
         {4711: ProcessStat(60, "S", 1000.0)}, FAMILY),
    ],
    ids=["on its own", "another process", "its pid is another one now", "a garbled list", "a job within the job"],
)  # fmt: skip
def test_nothing_else_counts_as_beside_the_claim(around, devices, claims, stats, family):
    assert list(around(*devices, claims=claims, stats=stats).look(lambda: family)) == []


def test_the_driver_is_asked_ever_more_rarely_and_one_that_fails_is_asked_again(around, monkeypatch):
    here, now = around(MINE, OUTSIDE, claims=[OURS]), [100.0]
    monkeypatch.setattr(surroundings.time, "monotonic", lambda: now[0])
    here._backend.fails = True  # type: ignore[attr-defined]
    for _ in range(3600):
        list(here.look(lambda: FAMILY))
        now[0] += 1.0
    asked = here._backend.asked  # type: ignore[attr-defined]
    here._backend.fails = False  # type: ignore[attr-defined]
    now[0] += 600.0

    assert asked == 12  # after 8, 16, ... 512 s, and then each ten minutes
    assert len(list(here.look(lambda: FAMILY))) == 1


def test_without_a_row_of_the_user_nothing_is_read_of_the_job(around):
    def never() -> Any:
        raise AssertionError("it was asked for")

    assert list(around(MINE, used_by(a_process(4711, uid=BOB), 1), claims=[OURS]).look(never)) == []


# Of real jobs.

HARD_CODED = """
import os, sys, time
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
from gpuguard.backends import simulated
simulated.use(None, 10 * 2**30, 50.0)
print("uses", flush=True)
sys.stdin.read()
"""


def run(gpuguard: Gpuguard, *job: str) -> subprocess.Popen[str]:
    return gpuguard.start("run", "--devices", "1", "--", sys.executable, "-c", *job, stdin=subprocess.PIPE)


def test_the_log_of_a_job_says_while_it_runs_and_in_its_last_line_that_it_is_elsewhere(tmp_path: Path) -> None:
    """Half of all research scripts set the variable, and defeated their claim in silence."""
    start(str(tmp_path / "node"))
    gpuguard = Gpuguard(tmp_path, None, fast=True)
    with run(gpuguard, HARD_CODED) as wrapper:
        until(lambda: gpuguard.events("outside"))
        err = wrapper.communicate("", timeout=60)[1]

    assert "the job computes on GPU 0 (pid" in err and "leave CUDA_VISIBLE_DEVICES as gpuguard sets it" in err
    assert "GPU 0 without a claim (pid" in err.splitlines()[-1]
    assert [event["outcome"] for event in gpuguard.events("outside")] == ["owner warned"]


@pytest.mark.root
def test_a_stranger_on_the_gpu_is_told_in_the_log_of_every_job_and_the_peak_is_the_jobs_own(tmp_path: Path) -> None:
    start(str(tmp_path / "node"))
    gpuguard = Gpuguard(tmp_path, None, fast=True)
    with (
        run(gpuguard, HARD_CODED.replace('os.environ["CUDA_VISIBLE_DEVICES"] = "0"', "")) as wrapper,
        ExitStack() as stack,
    ):
        assert wrapper.stdout and wrapper.stdout.readline() == "uses\n"
        stranger = stack.enter_context(somebodys(str(tmp_path / "node"), "1", 30 * GIB, uid=ANOTHER))
        until(lambda: gpuguard.events("stranger"))
        err = wrapper.communicate("", timeout=60)[1]

    assert f"(pid {stranger.pid}) computes on GPU 1 too, which you have claimed." in err
    assert err.splitlines()[-1].endswith(f"GPU 1 with {ANOTHER} (pid {stranger.pid})") and "peak 10.0GiB" in err
