"""The limits of a job whose processes the driver does not show: in a container, or where it lists none at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_device, a_process, a_snapshot, a_uuid
from fake_nvml import NOT_SUPPORTED, FakeNvml
from test_pid_reuse import NAMESPACE, has_a_namespace

from gpuguard.jobs.limits import AssumedProcess, JobLimits, LimitFinding, policies_of, share_policy, used_before
from gpuguard.model import ClaimRecord, Device
from gpuguard.policies.amounts import parse_memory_amount

JOB = 4711
FAMILY = {JOB: 1000.0}
ALONE = {a_uuid(0): 2 * GIB}


def judged(
    *samples: Device, before: dict[str, int] | None = None, known: bool = False, **limits: Any
) -> list[LimitFinding]:
    """Sample by sample, of a job with a device to itself whose driver tells pids of another namespace."""
    memory = parse_memory_amount(limits.pop("memory")) if "memory" in limits else None
    policies = policies_of(memory, limits.pop("temperature", None), limits.pop("idle", None))
    claim = ClaimRecord("c1", 1001, "alice", (a_uuid(0),))
    job = JobLimits(policies, claim, assumed=AssumedProcess(ALONE if before is None else before, known))
    pid = limits.pop("pid", JOB)
    return [
        job.judge(a_snapshot(sample, clock=10_000 + 2.5 * number), FAMILY, 2.5, pid=pid)
        for number, sample in enumerate(samples)
    ]


def reached(*samples: Device, **facts: Any) -> list[bool]:
    return [one.reached is not None for one in judged(*samples, **facts)]


def texts(*samples: Device, **facts: Any) -> list[str]:
    return [text for one in judged(*samples, **facts) for text in (*one.blind, *one.strangers)]


def using(memory: int | None, **fields: Any) -> Device:
    """What the driver says in a container: processes that nobody there has."""
    rows = (a_process(99, memory_used=memory, start_time=None, uid=None),)
    return a_device(0, **{"processes": rows, "processes_plausible": False, "memory_used": memory, **fields})


# In a pid namespace of its own


def test_the_memory_of_a_device_that_is_claimed_alone_is_the_jobs_above_what_was_there_before():
    assert reached(*[using(33 * GIB)] * 3, memory="30GiB") == [False, False, True]
    assert reached(*[using(31 * GIB)] * 3, memory="30GiB") == [False] * 3


@pytest.mark.parametrize(
    "rows", [None, (), (a_process(JOB, memory_used=GIB),)], ids=["no list", "an empty list", "our pid by chance"]
)
def test_whatever_the_driver_lists_there_it_does_not_matter(rows):
    device = using(33 * GIB, processes=rows, processes_plausible=True)

    assert reached(device, device, device, memory="30GiB")[-1]


def test_where_others_may_use_the_device_its_memory_is_nobodys():
    assert not any(reached(*[using(70 * GIB)] * 9, memory="30GiB", before={}))


def test_the_memory_before_the_job_is_that_of_devices_that_nobody_used():
    devices = (
        a_device(0, memory_used=GIB),
        a_device(1, memory_used=None),
        a_device(2, processes=(a_process(99),), memory_used=9 * GIB),
        a_device(3, processes=None, memory_used=0),
    )

    assert used_before(devices) == {a_uuid(0): GIB, a_uuid(3): 0}


@pytest.mark.parametrize("before", [ALONE, {}], ids=["alone", "with others"])
def test_heat_and_rest_are_those_of_the_device(before):
    hot, resting = using(GIB, temperature=90.0), using(GIB, utilization=0.0)

    assert reached(*[hot] * 13, temperature=85.0, before=before)[-1]
    assert reached(*[resting] * 5, idle=10.0, before=before)[-1]
    assert not any(reached(*[using(GIB, temperature=80.0, utilization=90.0)] * 20, temperature=85.0, idle=10.0))


def test_unknown_memory_ends_nobody():
    assert not any(reached(*[using(None)] * 9, memory="30GiB"))


def test_after_the_command_has_ended_its_device_is_not_judged_by_what_is_left_in_it():
    assert not any(reached(*[using(70 * GIB, temperature=90.0)] * 20, memory="1GiB", temperature=50.0, pid=None))


def test_nobody_is_called_a_stranger_by_a_pid_that_means_somebody_else():
    device = a_device(0, processes=(a_process(99, uid=1002, user="bob"),))

    assert texts(device, device, memory="30GiB") == []


# What is said before the start


def caveats(*limits: str, before: dict[str, int] | None = None, known: bool = False) -> list[str]:
    return list(AssumedProcess(ALONE if before is None else before, known).caveats(limits, [a_device(0)]))


def test_where_pids_are_ours_nothing_is_said():
    assert caveats("memory-limit", known=True) == []


def test_it_is_said_what_the_limits_are_judged_by():
    assert caveats("memory-limit", "idle-limit") == [
        "this is a pid namespace of its own (a container), where the driver's pids name no process: --memory-limit, "
        "--idle-limit are judged by the whole GPU, with all that others do there."
    ]


def test_it_is_said_what_cannot_be_kept_and_then_not_again():
    said = caveats("memory-limit", before={})

    assert len(said) == 1
    assert said[0].startswith("--memory-limit cannot be kept on GPU 0: this is a pid namespace of its own")
    assert texts(*[using(GIB)] * 4, memory="30GiB", before={}) == []


def test_of_a_share_too_it_is_said_once_that_it_cannot_be_kept():
    assert caveats("memory-limit", "memory", before={})[0].startswith(
        "--memory-limit, --memory cannot be kept on GPU 0:"
    )
    claim = ClaimRecord("c1", 1001, "alice", (a_uuid(0),), memory=10 * GIB)

    def said(known: bool, rows: Any) -> list[str]:
        job = JobLimits((share_policy(10 * GIB),), claim, assumed=AssumedProcess({}, known))
        samples = [a_snapshot(using(GIB, processes=rows, processes_plausible=True), clock=10_000 + n) for n in range(5)]
        return [text for sample in samples for text in job.judge(sample, FAMILY, 1.0, pid=JOB).blind]

    unknown = (a_process(JOB, memory_used=None),)
    assert said(False, unknown) == []
    assert said(True, unknown) == [
        "--memory cannot be kept on GPU 0 now: the driver does not tell what it is judged by."
    ]


# A driver that lists no processes

UNLISTED = a_device(0, processes=(), memory_used=33 * GIB)


@pytest.mark.parametrize("rows", [(), None], ids=["an empty list", "no list"])
def test_a_driver_that_lists_no_process_is_found_out_and_told_once(rows):
    device = a_device(0, processes=rows, memory_used=33 * GIB)
    text = "the driver lists no processes on GPU 0: the limits of the job are judged by the whole GPU."

    assert reached(*[device] * 4, memory="30GiB", known=True) == [False, False, False, True]
    assert texts(*[device] * 4, memory="30GiB", known=True).count(text) == 1


def test_a_driver_that_has_listed_somebody_can_list():
    listed = a_device(0, processes=(a_process(99, memory_used=40 * GIB),), memory_used=42 * GIB)

    assert not any(reached(listed, *[UNLISTED] * 9, memory="30GiB", known=True))


def test_an_empty_device_has_an_empty_list():
    empty = a_device(0, processes=(), memory_used=2 * GIB, temperature=90.0)

    assert texts(*[empty] * 9, temperature=85.0, known=True) == []
    assert not any(reached(*[empty] * 20, temperature=85.0, known=True))


def test_without_a_device_to_itself_a_job_is_not_judged_by_what_no_list_explains():
    assert not any(reached(*[UNLISTED] * 9, memory="30GiB", known=True, before={}))


# In a real pid namespace of its own, on a driver that tells the pids of its host

FAST = """
import sys
from gpuguard import run
run.TICK_SECONDS = 0.2
from gpuguard.cli import main
main(sys.argv[1:])
"""


def run_in_a_container(fake: FakeNvml, place: Path, *options: str) -> subprocess.Popen[str]:
    words = [*NAMESPACE, sys.executable, "-c", FAST, "run", "--gpus", "0", "--no-wait", *options, "--"]
    (place / "claims").mkdir()
    # What the job "uses" is what the test tells the driver of: that needs no code inside.
    return subprocess.Popen(
        [*words, "sh", "-c", "echo ready; exec sleep 60"],
        env={**os.environ, **fake.environment(), "GPUGUARD_DIR": str(place / "claims")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.root
@pytest.mark.skipif(not has_a_namespace(), reason="NOT TESTED: needs a private pid namespace (not in a chroot)")
@pytest.mark.parametrize("lists", [True, False], ids=["the host's pids", "no processes"])
def test_in_a_container_the_memory_limit_is_kept_by_the_memory_of_the_device(fake, tmp_path, lists):
    with run_in_a_container(fake, tmp_path, "--memory-limit", "30GiB") as wrapper:
        assert wrapper.stdout and wrapper.stdout.readline() == "ready\n"
        if lists:
            fake.add_process(0, 4_000_000, 40 * GIB, stays=1)
        else:
            fake.fail("nvmlDeviceGetComputeRunningProcesses", NOT_SUPPORTED, device=0)
            fake.devices[0].memory_used = 40 * GIB
        assert wrapper.stderr
        first, ended = wrapper.stderr.readline(), wrapper.stderr.readline()
        fake.clear_processes(0)
        fake.devices[0].memory_used = 0
        rest = wrapper.communicate(timeout=30)[1]

    assert "where the driver's pids name no process: --memory-limit is judged by the whole GPU" in first
    assert (
        ended == "gpuguard: the job uses 40.0GiB of device 0, 30GiB is allowed (--memory-limit): SIGTERM to the job.\n"
    )
    assert (wrapper.returncode, "SIGKILL" in rest) == (143, False)


@pytest.mark.root
@pytest.mark.skipif(not has_a_namespace(), reason="NOT TESTED: needs a private pid namespace (not in a chroot)")
def test_in_a_container_a_limit_that_cannot_be_kept_is_said_and_ends_nobody(fake, tmp_path):
    with run_in_a_container(fake, tmp_path, "--memory-limit", "30GiB", "--max-processes", "1") as wrapper:
        assert wrapper.stdout and wrapper.stdout.readline() == "ready\n"
        fake.add_process(0, 4_000_000, 40 * GIB, stays=1)
        said = wrapper.stderr.readline() if wrapper.stderr else ""
        with pytest.raises(subprocess.TimeoutExpired):
            wrapper.wait(1.5)
        wrapper.kill()  # which takes all of the namespace along
        rest = wrapper.communicate(timeout=30)[1]

    assert said.startswith("gpuguard: --memory-limit cannot be kept on GPU 0: this is a pid namespace of its own")
    assert "SIG" not in rest
