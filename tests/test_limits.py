"""The limits of a job, judged on given samples: what counts, for how long, and who never counts."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_device, a_mig_instance, a_process, a_snapshot, a_uuid
from fake_nvml import NOT_SUPPORTED, FakeNvml
from nodes import Gpuguard
from test_pid_reuse import NAMESPACE, has_a_namespace

from gpuguard import model
from gpuguard.errors import InvalidRequest
from gpuguard.jobs.limits import TEMPERATURE_SECONDS, JobLimits, LimitFinding, policies_of, share_policy, used_before
from gpuguard.model import ClaimRecord, Device
from gpuguard.policies.policy import Policy
from gpuguard.policies.thresholds import HealthRule
from gpuguard.units import parse_memory_amount

ALICE, BOB = 1001, 1002
FAMILY = {4711: 1000.0, 4712: 1000.0}  # as a_process() has started


def limits(
    memory: str | None = None, temperature: float | None = None, idle: float | None = None, **facts: Any
) -> JobLimits:
    amount = None if memory is None else parse_memory_amount(memory)
    devices = facts.pop("devices", (a_uuid(0),))
    return JobLimits(policies_of(amount, temperature, idle), ClaimRecord("c1", ALICE, "alice", devices), **facts)


def judge(limits: JobLimits, *samples: Device | tuple[Device, ...], every: float = 2.5) -> list[bool]:
    """Whether a limit was reached, sample by sample."""
    found = []
    for number, sample in enumerate(samples):
        snapshot = a_snapshot(*(sample if isinstance(sample, tuple) else (sample,)), clock=10_000 + number * every)
        found.append(limits.judge(snapshot, FAMILY, every).reached is not None)
    return found


def using(memory: int | None, **fields: Any) -> Device:
    return a_device(0, processes=(a_process(4711, memory_used=memory),), memory_used=70 * GIB, **fields)


MUCH, LITTLE = using(31 * GIB), using(30 * GIB)


def test_only_what_the_limits_look_at_is_sampled():
    always = {model.MEMORY, model.PROCESSES, model.PROCESS_DETAILS}

    assert limits().fields == always
    assert limits("30GiB").fields == always
    assert limits(temperature=80.0).fields == always | {model.THERMAL}
    assert limits(idle=600.0).fields == always | {model.UTILIZATION}


HOT, IDLE = using(GIB, temperature=86.0), using(GIB, utilization=5.0)
BOTH = {"devices": (a_uuid(0), a_uuid(1))}
TWICE = a_device(0, processes=(a_process(4711, memory_used=20 * GIB), a_process(4712, memory_used=20 * GIB)))
APART = (using(20 * GIB), a_device(1, processes=(a_process(4712, memory_used=20 * GIB),)))
REUSED = a_device(0, processes=(a_process(4711, memory_used=40 * GIB, start_time=1000.5),))


def beside_a_stranger(uid: int) -> Device:
    stranger = a_process(99, memory_used=40 * GIB, uid=uid)
    return a_device(0, memory_used=70 * GIB, processes=(a_process(4711, memory_used=25 * GIB), stranger))


SEEN: dict[str, tuple[dict[str, Any], list[Any], list[bool]]] = {
    "three samples in a row": ({"memory": "30GiB"}, [MUCH] * 3, [False, False, True]),
    "one below": ({"memory": "30GiB"}, [MUCH, MUCH, LITTLE, MUCH, MUCH, MUCH], [False] * 5 + [True]),
    "a share of the GPU": ({"memory": "50%"}, [using(41 * GIB)] * 3, [False, False, True]),
    "less than that share": ({"memory": "50%"}, [using(39 * GIB)] * 3, [False] * 3),
    "two processes on one GPU": ({"memory": "30GiB"}, [TWICE] * 3, [False, False, True]),
    "two processes on two GPUs": ({"memory": "30GiB", **BOTH}, [APART] * 3, [False] * 3),
    "a reused pid": ({"memory": "30GiB"}, [REUSED] * 5, [False] * 5),
    **{
        f"a stranger, uid {uid}": ({"memory": "30GiB"}, [beside_a_stranger(uid)] * 5, [False] * 5)
        for uid in (ALICE, BOB, 0)
    },
    "heat of others": ({"temperature": 85.0}, [a_device(0, temperature=99.0, processes=(a_process(99),))] * 20, []),
    "heat": ({"temperature": 85.0}, [HOT] * 13, [False] * int(TEMPERATURE_SECONDS / 2.5) + [True]),
    "rest": ({"idle": 10.0}, [IDLE] * 5, [False] * 4 + [True]),
    "a busy sample": ({"idle": 10.0}, [*[IDLE] * 4, using(GIB, utilization=6.0), *[IDLE] * 4], []),
    "one of two GPUs is used": ({"idle": 10.0, **BOTH}, [(IDLE, a_device(1, utilization=90.0))] * 9, []),
    "both rest": ({"idle": 10.0, **BOTH}, [(IDLE, a_device(1))] * 5, [False] * 4 + [True]),
    "a GPU that the job never came to": ({"idle": 10.0}, [a_device(0)] * 5, [False] * 4 + [True]),
}


@pytest.mark.parametrize(("facts", "samples", "reached"), SEEN.values(), ids=SEEN)
def test_a_limit_is_reached_by_the_job_alone_and_in_its_time(facts, samples, reached):
    assert judge(limits(**facts), *samples) == (reached or [False] * len(samples))


@pytest.mark.parametrize(
    ("clocks", "expected"),
    [
        ((10_000, 10_002.5, 10_700, 10_702.5, 10_705), [False] * 4 + [True]),
        ((10_000, 10_002.5, 10_100), [False, False, True]),
    ],
    ids=["a pause of over ten minutes starts the time again", "a shorter one counts for nothing"],
)
def test_two_samples_far_apart_are_not_three_and_what_a_pause_is(clocks, expected):
    judged = limits("30GiB")
    reached = [judged.judge(a_snapshot(MUCH, clock=clock), FAMILY, 2.5).reached is not None for clock in clocks]

    assert reached == expected
    assert judge(limits("30GiB"), MUCH, MUCH, every=7.0) == [False, False]


def test_the_reason_names_the_option_the_device_and_both_numbers():
    judged = limits("30GiB")
    judge(judged, MUCH, MUCH)
    reached = judged.judge(a_snapshot(MUCH, clock=10_005), FAMILY, 2.5).reached

    assert reached
    assert reached.why == "the job uses 31.0GiB of GPU 0, 30GiB is allowed (--memory-limit)"
    assert (reached.limit, reached.pids) == ("memory-limit", (4711,))


def test_a_job_with_many_processes_has_a_limit_too():
    family = dict.fromkeys(range(5000, 5020), 1000.0)
    device = a_device(0, processes=tuple(a_process(pid, memory_used=2 * GIB) for pid in family))
    judged = limits("30GiB", temperature=50.0)

    reached = [judged.judge(a_snapshot(device, clock=10_000 + 2.5 * n), family, 2.5).reached for n in range(3)]
    assert reached[-1] and len(reached[-1].pids) == 20


UNKNOWN = {
    "a gap": a_device(0, processes=None, memory_used=None, temperature=None, utilization=None),
    "a list that cannot be": using(31 * GIB, processes_plausible=False, temperature=86.0, utilization=0.0),
    "no list": a_device(0, processes=None, memory_used=70 * GIB, temperature=86.0, utilization=0.0),
    "no value": using(None, temperature=None, utilization=None),
    "nobody known": a_device(0, temperature=86.0, utilization=90.0, processes=(a_process(4711, start_time=None),)),
}


@pytest.mark.parametrize("device", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_never_reaches_a_limit(device):
    assert not any(judge(limits("1GiB", 50.0, 5.0), *[device] * 30))


@pytest.mark.parametrize("device", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_for_one_sample_starts_the_time_again(device):
    everything = using(31 * GIB, temperature=86.0, utilization=0.0)

    assert not any(judge(limits("30GiB"), everything, everything, device, everything, everything))
    assert not any(judge(limits(temperature=85.0), *[everything] * 11, device, *[everything] * 11))
    assert not any(judge(limits(idle=25.0), *[everything] * 9, device, *[everything] * 9))


def test_a_limit_that_cannot_be_judged_is_said_once():
    judged = limits(idle=10.0)
    said = [
        judged.judge(a_snapshot(a_device(0, utilization=None), clock=10_000 + n), FAMILY, 1.0).blind for n in range(4)
    ]

    text = "--idle-limit cannot be kept on GPU 0 now: the driver does not tell what it is judged by."
    assert said == [(), (text,), (), ()]


def test_an_instance_is_judged_by_its_own_processes_and_not_by_those_beside_it():
    parent = a_device(0, mig_mode=True, utilization=None)
    mine = a_mig_instance(parent, 0, processes=(a_process(4711, memory_used=20 * GIB),))
    other = a_mig_instance(parent, 1, processes=(a_process(99, memory_used=39 * GIB),))

    assert not any(judge(limits("30GiB", devices=(mine.uuid,)), *[(parent, mine, other)] * 4))
    assert judge(limits("15GiB", devices=(mine.uuid,)), *[(parent, mine, other)] * 4)[2]


def sharer(**facts: Any) -> JobLimits:
    claim = ClaimRecord("c1", ALICE, "alice", (a_uuid(0),), memory=10 * GIB)
    return JobLimits((share_policy(10 * GIB),), claim, **facts)


def test_a_job_over_its_share_is_told_once_until_it_uses_less():
    judged, gib = sharer(), (12, 12, 12, 12, 9, 12, 12, 12)
    samples = [a_snapshot(using(n * GIB), clock=10_000 + 2.5 * at) for at, n in enumerate(gib)]
    told = [judged.judge(sample, FAMILY, 2.5) for sample in samples]

    assert [len(one.over) for one in told] == [0, 1, 0, 0, 0, 0, 1, 0]
    assert "uses 12.0GiB of GPU 0, 10.0GiB is allowed (--memory)" in told[1].over[0]
    assert {one.reached for one in told} == {None}
    assert [one.used for one in told[3:5]] == [12 * GIB, 9 * GIB]


def test_the_use_of_neighbours_on_a_shared_device_is_not_held_against_the_share():
    device = a_device(0, processes=(a_process(99, uid=BOB, memory_used=60 * GIB), a_process(4711, memory_used=GIB)))
    judged = sharer()
    told = [judged.judge(a_snapshot(device, clock=10_000 + 2.5 * at), FAMILY, 2.5) for at in range(4)]

    assert [finding.over for finding in told] == [()] * 4


@pytest.mark.parametrize("facts", [("0GiB", None, None), ("0%", None, None), (None, 0.0, None), (None, None, 0.0)])
def test_a_limit_of_nothing_is_refused(facts):
    with pytest.raises(InvalidRequest, match="ends every job"):
        limits(*facts)


JOB = 4711
ALONE = {a_uuid(0): 2 * GIB}


def judged_alone(
    *samples: Device, before: dict[str, int] = ALONE, known: bool = False, pid: int | None = JOB, **amounts: Any
) -> list[LimitFinding]:
    """Sample by sample, of a job with a device to itself whose driver tells pids of another namespace."""
    job = limits(before=before, pids_known=known, **amounts)
    clocks = (10_000 + 2.5 * number for number in range(len(samples)))
    return [job.judge(a_snapshot(sample, clock=next(clocks)), FAMILY, 2.5, pid=pid) for sample in samples]


def reached_alone(*samples: Device, **facts: Any) -> list[bool]:
    return [finding.reached is not None for finding in judged_alone(*samples, **facts)]


def texts(*samples: Device, **facts: Any) -> list[str]:
    return [text for finding in judged_alone(*samples, **facts) for text in finding.blind]


def unnamed(memory: int | None, **fields: Any) -> Device:
    """What the driver says in a container: processes that nobody there has."""
    rows = (a_process(99, memory_used=memory, start_time=None, uid=None),)
    return a_device(0, **{"processes": rows, "processes_plausible": False, "memory_used": memory, **fields})


LISTED = a_device(0, processes=(a_process(99, memory_used=40 * GIB),), memory_used=42 * GIB)
UNLISTED = a_device(0, processes=(), memory_used=33 * GIB)
SEEN_ALONE: dict[str, tuple[list[Device], dict[str, Any], list[bool]]] = {
    "more than before": ([unnamed(33 * GIB)] * 3, {}, [False, False, True]),
    "no more than before": ([unnamed(31 * GIB)] * 3, {}, []),
    "others may use the GPU": ([unnamed(70 * GIB)] * 9, {"before": {}}, []),
    "unknown memory": ([unnamed(None)] * 9, {}, []),
    "what is left after the command": (
        [unnamed(70 * GIB, temperature=90.0)] * 20, {"memory": "1GiB", "temperature": 50.0, "pid": None}, [],
    ),
    "a driver that has listed a process": ([LISTED, *[UNLISTED] * 9], {"known": True}, []),
    "what no list explains, with others": ([UNLISTED] * 9, {"known": True, "before": {}}, []),
}  # fmt: skip


@pytest.mark.parametrize(("samples", "facts", "reached"), SEEN_ALONE.values(), ids=SEEN_ALONE)
def test_the_memory_of_a_device_is_the_jobs_where_it_is_claimed_alone(samples, facts, reached):
    assert reached_alone(*samples, **{"memory": "30GiB", **facts}) == (reached or [False] * len(samples))


@pytest.mark.parametrize(
    "rows", [None, (), (a_process(JOB, memory_used=GIB),)], ids=["no list", "an empty list", "our pid by chance"]
)
def test_whatever_the_driver_lists_there_it_does_not_matter(rows):
    device = unnamed(33 * GIB, processes=rows, processes_plausible=True)

    assert reached_alone(device, device, device, memory="30GiB")[-1]


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
    hot, resting = unnamed(GIB, temperature=90.0), unnamed(GIB, utilization=0.0)

    assert reached_alone(*[hot] * 13, temperature=85.0, before=before)[-1]
    assert reached_alone(*[resting] * 5, idle=10.0, before=before)[-1]
    assert not any(reached_alone(*[unnamed(GIB, temperature=80.0, utilization=90.0)] * 20, temperature=85.0, idle=10.0))


def test_nobody_is_called_a_stranger_by_a_pid_that_means_somebody_else():
    device = a_device(0, processes=(a_process(99, uid=1002, user="bob"),))

    assert texts(device, device, memory="30GiB") == []


def caveats(*limits: str, before: dict[str, int] = ALONE, known: bool = False) -> list[str]:
    policies = [Policy(limit, (HealthRule(problems=("lost",)),)) for limit in limits]
    job = JobLimits(policies, ClaimRecord("c1", ALICE, "alice", (a_uuid(0),)), before=before, pids_known=known)
    return list(job.caveats([a_device(0)]))


def test_it_is_said_what_the_limits_are_judged_by_unless_pids_are_ours():
    assert caveats("memory-limit", known=True) == []
    assert caveats("memory-limit", "idle-limit") == [
        "this is a pid namespace of its own (a container), where the driver's pids name no process: --memory-limit, "
        "--idle-limit are judged by the whole GPU, with all that others do there."
    ]


def test_it_is_said_what_cannot_be_kept_and_then_not_again():
    said = caveats("memory-limit", before={})

    assert len(said) == 1
    assert said[0].startswith("--memory-limit cannot be kept on GPU 0: this is a pid namespace of its own")
    assert texts(*[unnamed(GIB)] * 4, memory="30GiB", before={}) == []


@pytest.mark.parametrize("rows", [(), None], ids=["an empty list", "no list"])
def test_a_driver_that_lists_no_process_is_found_out_and_told_once(rows):
    device = a_device(0, processes=rows, memory_used=33 * GIB)
    text = "the driver lists no processes on GPU 0: the limits of the job are judged by the whole GPU."

    assert reached_alone(*[device] * 4, memory="30GiB", known=True) == [False, False, False, True]
    assert texts(*[device] * 4, memory="30GiB", known=True).count(text) == 1


def test_an_empty_device_has_an_empty_list():
    empty = a_device(0, processes=(), memory_used=2 * GIB, temperature=90.0)

    assert texts(*[empty] * 9, temperature=85.0, known=True) == []
    assert not any(reached_alone(*[empty] * 20, temperature=85.0, known=True))


def run_in_a_container(fake: FakeNvml, place: Path, *options: str) -> Any:
    gpuguard = Gpuguard(place, fake, fast=True)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # What the job "uses" is what the test tells the driver of: that needs no code inside.
    words = gpuguard.words(
        "run", "--devices", "0", "--no-wait", "--quiet", *options, "--", "sh", "-c", "echo ready; exec sleep 60"
    )
    return subprocess.Popen([*NAMESPACE, *words], env=gpuguard.environment, text=True, **pipes)


@pytest.mark.root
@pytest.mark.skipif(not has_a_namespace(), reason="other pid namespaces (none here, or a chroot)")
@pytest.mark.parametrize("lists", [True, False], ids=["the host's pids", "no processes"])
def test_in_a_container_the_memory_limit_is_kept_by_the_memory_of_the_device(fake, tmp_path, lists):
    with run_in_a_container(fake, tmp_path, "--memory-limit", "30GiB") as wrapper:
        assert wrapper.stdout.readline() == "ready\n"
        if lists:
            fake.add_process(0, 4_000_000, 40 * GIB, stays=1)
        else:
            fake.fail("nvmlDeviceGetComputeRunningProcesses", NOT_SUPPORTED, device=0)
            fake.devices[0].memory_used = 40 * GIB
        first, ended = wrapper.stderr.readline(), wrapper.stderr.readline()
        fake.clear_processes(0)
        fake.devices[0].memory_used = 0
        rest = wrapper.communicate(timeout=60)[1]

    assert "where the driver's pids name no process: --memory-limit is judged by the whole GPU" in first
    why = "the job uses 40.0GiB of GPU 0, 30GiB is allowed (--memory-limit)"
    assert ended.endswith(f" {why}: SIGTERM to the job.\n")
    assert (wrapper.returncode, "SIGKILL" in rest) == (143, False)
