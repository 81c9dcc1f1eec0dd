"""Rules about values that a device or a process shows: memory, temperature, power, utilization, processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import GIB, MIB, a_claim_record, a_device, a_mig_instance, a_process, found, pids

from gpuguard.errors import InvalidRequest
from gpuguard.model import ClaimRecord, Device, ProcessStat
from gpuguard.policies.thresholds import (
    HostCpuRule,
    HostMemoryRule,
    MemoryRule,
    PowerRule,
    ProcessesRule,
    TemperatureRule,
    UtilizationRule,
)
from gpuguard.policies.view import MachineUse, UserUse, device_subject
from gpuguard.units import parse_host_memory_amount, parse_memory_amount, parse_power_amount, parse_rate

ALICE, BOB = {"uid": 1001, "user": "alice"}, {"uid": 1002, "user": "bob"}


@pytest.mark.parametrize(
    ("text", "total", "limit"),
    [
        ("40GiB", 80 * GIB, 40 * GIB),
        ("40GiB", None, 40 * GIB),
        ("50%", 80 * GIB, 40 * GIB),
        ("0%", 80 * GIB, 0),
        ("90%", None, None),
    ],
)
def test_a_memory_limit_is_in_bytes_or_in_percent_of_the_device(text, total, limit):
    assert parse_memory_amount(text).of(total) == limit


@pytest.mark.parametrize(
    ("text", "rate"), [("1GiB/10m", GIB / 600), ("1MB/s", 1e6), ("60MiB/m", MIB), (" 1kB / 2s ", 500)]
)
def test_a_rate_is_bytes_per_time(text, rate):
    assert parse_rate(text).per_second == rate


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_rate, text) for text in ("1GiB", "1GiB/", "/s", "1GiB/10", "1/s", "1GiB/0s", "1GiB/10m/s", "")),
        *((parse_memory_amount, text) for text in ("40", "40 GiB extra", "101%", "-5%", "300W", "")),
    ],
)
def test_what_is_no_rate_or_amount_is_refused(parse, text):
    with pytest.raises(InvalidRequest):
        parse(text)


def test_a_process_above_the_limit_is_found_with_its_use_and_the_limit_and_only_that():
    big, small = a_process(1, memory_used=75 * GIB), a_process(2, memory_used=72 * GIB)

    (finding,) = found(MemoryRule(parse_memory_amount("90%")), a_device(processes=(big, small)))
    assert (pids([finding]), finding.why) == ([1], "uses 75.0GiB of device 0, 90% of 80.0GiB is allowed")


def test_the_memory_of_a_user_is_that_of_all_processes_of_theirs_on_one_device():
    mine = [a_process(pid, memory_used=25 * GIB, **ALICE) for pid in (1, 2)]
    other = a_process(3, memory_used=25 * GIB, **BOB)
    elsewhere = a_process(4, memory_used=25 * GIB, **BOB)
    rule = MemoryRule(parse_memory_amount("40GiB"), per="user")

    (finding,) = found(rule, a_device(0, processes=(*mine, other)), a_device(1, processes=(elsewhere,)))
    assert (finding.subject.uid, finding.subject.kind, pids([finding])) == (1001, "user", [1, 2])


def test_the_memory_of_a_claim_is_that_of_its_owners_processes():
    device = a_device(processes=(a_process(1, memory_used=30 * GIB), a_process(2, memory_used=30 * GIB, **BOB)))
    rule = MemoryRule(parse_memory_amount("20GiB"), per="claim")

    (finding,) = found(rule, device, claims=[a_claim_record(device, id="c1")])
    assert (finding.subject.claim, pids([finding])) == ("c1", [1])


ROOT, OF_BOB = {"uid": 0, "user": "root"}, {"id": "c2", **BOB}


@pytest.mark.parametrize(
    ("owner", "claims", "blamed"),
    [
        (ALICE, [{"id": "c1"}, {"id": "c2"}], []),  # nobody knows whose the process is
        (ROOT, [{"id": "?", "uid": -1, "user": "?"}], []),  # a lock without a record
        (ROOT, [{"id": "c1"}], ["c1"]),  # a container of root belongs to the one claim of its device
        (ROOT, [{"id": "c1"}, OF_BOB], []),  # and to none of two
    ],
)
def test_a_claim_is_blamed_only_for_processes_that_are_certainly_its_own(owner, claims, blamed):
    device = a_device(processes=(a_process(memory_used=30 * GIB, **owner),))
    rule = MemoryRule(parse_memory_amount("20GiB"), per="claim")

    findings = found(rule, device, claims=[a_claim_record(device, **claim) for claim in claims])
    assert [finding.subject.claim for finding in findings] == blamed


def a_share(device: Device, claim_id: str, gib: int, **fields: object) -> ClaimRecord:
    return a_claim_record(device, id=claim_id, memory=gib * GIB, slots=(f"{device.uuid}.slot{claim_id[-1]}",), **fields)


OVER_SHARE = MemoryRule(parse_memory_amount("share"), per="claim")


def test_a_claim_is_held_to_the_share_that_it_asked_for():
    device = a_device(processes=(a_process(1, memory_used=12 * GIB), a_process(2, memory_used=12 * GIB, **BOB)))
    claims = (a_share(device, "c1", 10), a_share(device, "c2", 20, uid=1002, user="bob"))

    (finding,) = found(OVER_SHARE, device, claims=claims)
    assert (finding.subject.claim, pids([finding])) == ("c1", [1])
    assert finding.why == "uses 12.0GiB of device 0, its share of 10.0GiB is allowed"


def test_a_claim_that_shares_nothing_has_no_share_to_exceed():
    device = a_device(processes=(a_process(memory_used=79 * GIB),))

    assert found(OVER_SHARE, device, claims=(a_claim_record(device),)) == []
    assert found(OVER_SHARE, device, claims=(a_share(device, "c1", -1),)) == []


def test_of_two_shares_of_one_user_each_answers_for_what_was_started_below_it():
    device = a_device(processes=(a_process(21, memory_used=12 * GIB), a_process(22, memory_used=12 * GIB)))
    claims = (a_share(device, "c1", 10, pid=11), a_share(device, "c2", 10, pid=12))
    seen = {
        21: ProcessStat(parent=11, state="S"),
        22: ProcessStat(parent=999, state="S"),
        11: ProcessStat(parent=0, state="S"),
    }

    (finding,) = found(OVER_SHARE, device, claims=claims, seen=seen)
    assert (finding.subject.claim, pids([finding])) == ("c1", [21])


def test_where_the_holders_of_a_claim_can_be_seen_the_pid_in_its_record_says_nothing():
    device = a_device(processes=(a_process(21, memory_used=12 * GIB),))

    def blamed(**fields: object) -> list[int]:
        claims = (a_share(device, "c1", 10, pid=21, **fields), a_share(device, "c2", 10, pid=12))
        return pids(found(OVER_SHARE, device, claims=claims))

    assert (blamed(), blamed(holders=(99,))) == ([21], [])


def test_the_memory_of_a_device_is_nobodys_fault_in_particular():
    device = a_device(memory_used=79 * GIB, processes=(a_process(),))

    (finding,) = found(MemoryRule(parse_memory_amount("90%"), per="device"), device)
    assert finding.subject == device_subject(device)
    assert finding.processes == ()


def test_a_divided_device_is_not_judged_beside_its_instances():
    parent = a_device(memory_used=79 * GIB, mig_mode=True)
    instance = a_mig_instance(parent, memory_used=39 * GIB)

    findings = found(MemoryRule(parse_memory_amount("90%"), per="device"), parent, instance)
    assert [finding.subject.device for finding in findings] == [instance.uuid]


def test_a_device_above_the_limit_is_too_hot_and_at_the_limit_it_is_not():
    (finding,) = found(TemperatureRule(85.0), a_device(temperature=91.0), a_device(1, temperature=85.0))

    assert finding.why == "device 0 has 91C, 85C is allowed"


def test_processes_on_a_hot_device_are_not_meant_unless_the_policy_says_so():
    device = a_device(temperature=91.0, processes=(a_process(1), a_process(2)))

    assert pids(found(TemperatureRule(85.0), device)) == []
    assert pids(found(TemperatureRule(85.0, per="process"), device)) == [1, 2]


def test_a_hot_divided_device_is_found_once():
    parent = a_device(temperature=91.0, power_draw=690.0, mig_mode=True)
    instances = [a_mig_instance(parent, number, temperature=91.0, power_draw=690.0) for number in (0, 1)]

    for rule in (TemperatureRule(85.0), PowerRule(parse_power_amount("95%"))):
        assert [finding.subject for finding in found(rule, parent, *instances)] == [device_subject(parent)]


def test_on_a_hot_device_the_processes_of_its_instances_are_meant():
    parent = a_device(temperature=91.0, mig_mode=True)
    instance = a_mig_instance(parent, temperature=None, processes=(a_process(7),))

    assert pids(found(TemperatureRule(85.0, per="process"), parent, instance)) == [7]


POWER, HALF = a_device(power_draw=345.0, power_limit=350.0), a_device(utilization=50.0)
THREE = a_device(processes=tuple(a_process(pid) for pid in (1, 2, 3)))
UNCOUNTED = a_device(processes=(a_process(1), a_process(2, kind="graphics"), a_process(3, uid=None)))


@pytest.mark.parametrize(
    ("rule", "device", "finds"),
    [
        *((PowerRule(parse_power_amount(limit)), POWER, True) for limit in ("300W", "95%")),
        *((PowerRule(parse_power_amount(limit)), POWER, False) for limit in ("345W", "350W", "100%")),
        *((UtilizationRule(above=percent), HALF, percent < 50.0) for percent in (49.0, 50.0)),
        *((UtilizationRule(below=percent), HALF, percent > 50.0) for percent in (50.0, 51.0)),
        *((ProcessesRule(above=number), THREE, number < 3) for number in (2, 3)),
        (ProcessesRule(above=1), UNCOUNTED, False),  # a desktop, and a process of nobody knows whom
    ],
)
def test_power_utilization_and_the_number_of_processes_have_a_limit_that_may_be_reached(rule, device, finds):
    assert bool(found(rule, device)) is finds


def test_utilization_of_a_process_is_its_own():
    device = a_device(utilization=99.0, processes=(a_process(1, utilization=96.0), a_process(2, utilization=3.0)))

    assert pids(found(UtilizationRule(above=95.0, per="process"), device)) == [1]


def test_processes_of_one_user_are_counted_for_that_user_alone():
    processes = (a_process(1, **ALICE), a_process(2, **ALICE), a_process(3, **BOB))

    assert pids(found(ProcessesRule(above=1, per="user"), a_device(processes=processes))) == [1, 2]


MACHINE = MachineUse(100 * GIB, 10, {1001: UserUse("alice", 510.0, 51 * GIB), 1002: UserUse("bob", 500.0, 50 * GIB)})
UNKNOWN = MachineUse(100 * GIB, 10, {1001: UserUse("alice")})
OF_ROOT = MachineUse(100 * GIB, 10, {0: UserUse("root", 900.0, 90 * GIB)})
NO_TOTALS = replace(MACHINE, memory=None, cores=None)
HALF_OF_MEMORY, HALF_OF_CORES = HostMemoryRule(parse_host_memory_amount("50%")), HostCpuRule(50.0)


@pytest.mark.parametrize("rule", [HALF_OF_MEMORY, HALF_OF_CORES])
@pytest.mark.parametrize(
    ("machine", "users"),
    [(MACHINE, ["alice"]), (UNKNOWN, []), (OF_ROOT, []), (NO_TOTALS, []), (MachineUse(), [])],
    ids=["more than half", "unknown use", "root", "unknown machine", "nothing known"],
)
def test_a_user_who_takes_more_of_the_machine_than_allowed_is_found_with_their_processes_on_gpus(rule, machine, users):
    devices = [a_device(index, processes=(a_process(7, **ALICE), a_process(8, **BOB))) for index in (0, 1)]

    accused = found(rule, *devices, machine=machine)
    assert [finding.subject.user for finding in accused] == users
    assert pids(accused) == [7] * len(users)


def test_what_a_user_takes_of_the_machine_is_said_with_what_is_allowed():
    assert [found(rule, machine=MACHINE)[0].why for rule in (HALF_OF_MEMORY, HALF_OF_CORES)] == [
        "uses 51.0GiB of the machine's memory, 50% of 100.0GiB is allowed",
        "uses 5.1 of 10 cores, 50% of them is allowed",
    ]
    assert found(HostMemoryRule(parse_host_memory_amount("51GiB")), machine=MACHINE) == []
