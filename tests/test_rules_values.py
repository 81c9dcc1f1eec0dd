"""Rules about values that a device or a process shows, and where memory is going: growth is found, a jump is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    A_DEVICE,
    A_PROCESS,
    GIB,
    HELD,
    MIB,
    TOTAL,
    a_claim_record,
    a_device,
    a_mig_instance,
    a_past,
    a_process,
    a_series,
    a_snapshot,
    a_uuid,
    found,
    pids,
)

from gpuguard.errors import InvalidRequest
from gpuguard.model import CLOCKS, ECC, ClaimRecord, Device, ProcessStat, Subject
from gpuguard.policies.expression import ExpressionRule, parse_expression
from gpuguard.policies.idle import AgeRule, IdleRule
from gpuguard.policies.quota import QuotaRule
from gpuguard.policies.rule import Rule
from gpuguard.policies.thresholds import (
    HealthRule,
    HostCpuRule,
    HostMemoryRule,
    MemoryRule,
    PowerRule,
    ProcessesRule,
    TemperatureRule,
    UtilizationRule,
)
from gpuguard.policies.trends import ForecastRule, MemoryGrowthRule, slopes
from gpuguard.policies.usage import CommandRule, OutsideSchedulerRule, UnclaimedRule, UsersRule
from gpuguard.policies.view import (
    HostUse,
    MachineUse,
    Past,
    RuleView,
    SampleRhythm,
    UserUse,
    ValueSeries,
    covers,
    device_subject,
    index_sample,
    process_subject,
    recent,
    without_pauses,
)
from gpuguard.units import parse_host_memory_amount, parse_memory_amount, parse_power_amount, parse_rate

ALICE, BOB = {"uid": 1001, "user": "alice"}, {"uid": 1002, "user": "bob"}


@pytest.mark.parametrize(
    ("text", "total", "limit"),
    [
        ("40GiB", 80 * GIB, 40 * GIB),
        ("40GiB", None, 40 * GIB),
        ("50%", 80 * GIB, 40 * GIB),
        ("0%", 80 * GIB, 0),
        ("58%", 50, 29),  # a quota is rounded down: 28.999 were 28 of 50 GPUs
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
    assert (pids([finding]), finding.why) == ([1], "uses 75.0GiB of GPU 0, 90% of 80.0GiB is allowed")


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


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize("parent", [11, 31])
def test_who_was_sent_a_copy_of_a_lock_is_no_part_of_that_claim_and_who_was_started_below_it_is(has_own, parent):
    """A process of alice's was counted to mallory's share, which promised less, and ended for it."""
    device = a_device(processes=(a_process(21, memory_used=12 * GIB, **ALICE),))
    mallory = {"uid": 1003, "user": "mallory", "memory": GIB, "slots": (f"{device.uuid}.slot0",), "since": 1.0}
    claims = [a_claim_record(device, id="m", pid=None, holders=(21, 31), **mallory)]
    if has_own:
        own = {"memory": 20 * GIB, "slots": (f"{device.uuid}.slot1",), "since": 2.0}
        claims.append(a_claim_record(device, id="a", pid=None, holders=(11,), **own, **ALICE))
    seen = {21: ProcessStat(parent, "S"), 11: ProcessStat(1, "S"), 31: ProcessStat(1, "S")}
    found_here = found(MemoryRule(parse_memory_amount("share"), per="claim"), device, claims=claims, seen=seen)

    assert [finding.subject.claim for finding in found_here] == (["m"] if parent == 31 else [])


def a_share(device: Device, claim_id: str, gib: int, **fields: object) -> ClaimRecord:
    return a_claim_record(device, id=claim_id, memory=gib * GIB, slots=(f"{device.uuid}.slot{claim_id[-1]}",), **fields)


OVER_SHARE = MemoryRule(parse_memory_amount("share"), per="claim")


def test_a_claim_is_held_to_the_share_that_it_asked_for():
    device = a_device(processes=(a_process(1, memory_used=12 * GIB), a_process(2, memory_used=12 * GIB, **BOB)))
    claims = (a_share(device, "c1", 10), a_share(device, "c2", 20, uid=1002, user="bob"))

    (finding,) = found(OVER_SHARE, device, claims=claims)
    assert (finding.subject.claim, pids([finding])) == ("c1", [1])
    assert finding.why == "uses 12.0GiB of GPU 0, its share of 10.0GiB is allowed"


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


@pytest.mark.parametrize(
    ("rule", "judged"),
    [
        (MemoryRule(parse_memory_amount("10GiB")), True),
        (MemoryRule(parse_memory_amount("10GiB"), per="device"), True),
        (MemoryRule(parse_memory_amount("10%")), False),
        (MemoryRule(parse_memory_amount("10%"), per="device"), False),
        (ExpressionRule(parse_expression("memory_used > 10GiB")), True),
        (ExpressionRule(parse_expression("device_memory_free < 70GiB")), False),
        (ExpressionRule(parse_expression("device_memory_total > 1GiB")), False),
    ],
)
def test_how_much_memory_the_host_has_is_no_breach_of_any_user(rule, judged):
    device = a_device(memory_used=20 * GIB, processes=(a_process(memory_used=20 * GIB),))
    shared = replace(device, memory_shared_with_host=True)

    assert list(rule.check(index_sample(RuleView(a_snapshot(device))).view))
    assert bool(list(rule.check(index_sample(RuleView(a_snapshot(shared))).view))) == judged
    assert rule.needs.memory_size != judged
    gaps = index_sample(RuleView(a_snapshot(shared))).gaps[device.uuid]
    assert gaps == dict.fromkeys(("memory_total", "memory_free"), "its memory is the host's")


def test_a_divided_device_is_not_judged_beside_its_instances():
    parent = a_device(memory_used=79 * GIB, mig_mode=True)
    instance = a_mig_instance(parent, memory_used=39 * GIB)

    findings = found(MemoryRule(parse_memory_amount("90%"), per="device"), parent, instance)
    assert [finding.subject.device for finding in findings] == [instance.uuid]


def test_a_device_above_the_limit_is_too_hot_and_at_the_limit_it_is_not():
    (finding,) = found(TemperatureRule(85.0), a_device(temperature=91.0), a_device(1, temperature=85.0))

    assert finding.why == "GPU 0 has 91C, 85C is allowed"


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
UNCOUNTED = a_device(processes=(a_process(1), a_process(2, kind="graphics", memory_used=GIB), a_process(3, uid=None)))


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

    assert pids(found(ProcessesRule(above=1, per="user"), a_device(processes=processes))) == [2]  # the newest


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
    assert [(finding.subject.kind, finding.subject.user) for finding in accused] == [("user", user) for user in users]
    assert pids(accused) == [7] * len(users)


def test_what_a_user_takes_of_the_machine_is_said_with_what_is_allowed():
    assert [found(rule, machine=MACHINE)[0].why for rule in (HALF_OF_MEMORY, HALF_OF_CORES)] == [
        "uses 51.0GiB of the machine's memory, 50% of 100.0GiB is allowed",
        "uses 5.1 of 10 cores, 50% of them is allowed",
    ]
    assert found(HostMemoryRule(parse_host_memory_amount("51GiB")), machine=MACHINE) == []
    (more,) = found(HostMemoryRule(parse_host_memory_amount("50GiB")), machine=MACHINE)
    assert more.why == "uses 51.0GiB of the machine's memory, 50GiB is allowed"


TWO_OF_ALICE = a_process(1, memory_used=30 * GIB), a_process(2, memory_used=20 * GIB)
NAMELESS = a_process(3, uid=7, user=None, memory_used=30 * GIB)
THIRTY, NOTHING = parse_memory_amount("30GiB"), parse_memory_amount("0GiB")
HELD_BY_ALICE = {"claims": (a_claim_record(id="c1"),)}
WARM = a_device(temperature=85.4, power_draw=300.4, power_limit=None, utilization=50.04)

# rule, devices, what else is known -> subject, which processes are meant, why
FOUND: dict[str, tuple[Rule, tuple[Device, ...], dict[str, Any], tuple[Subject, list[int], str] | None]] = {
    "memory of a process": (
        MemoryRule(parse_memory_amount("29GiB")),
        (a_device(processes=TWO_OF_ALICE),),
        {},
        (process_subject(a_device(), TWO_OF_ALICE[0]), [1], "uses 30.0GiB of GPU 0, 29GiB is allowed"),
    ),
    "as much memory as is allowed": (MemoryRule(THIRTY), (a_device(processes=TWO_OF_ALICE),), {}, None),
    "any memory": (
        MemoryRule(NOTHING, per="device"),
        (a_device(memory_used=1),),
        {},
        (device_subject(a_device()), [], "uses 1B of GPU 0, 0GiB is allowed"),
    ),
    "memory of a user": (
        MemoryRule(THIRTY, per="user"),
        (a_device(processes=(*TWO_OF_ALICE, NAMELESS)),),
        {},
        (
            Subject("user", a_uuid(0), uid=1001, user="alice"),
            [1, 2],
            "uses 50.0GiB of GPU 0, 30GiB is allowed",
        ),
    ),
    "memory of a claim": (
        MemoryRule(THIRTY, per="claim"),
        (a_device(processes=(*TWO_OF_ALICE, NAMELESS)),),
        HELD_BY_ALICE,
        (
            Subject("claim", a_uuid(0), uid=1001, claim="c1", user="alice"),
            [1, 2],
            "uses 50.0GiB of GPU 0, 30GiB is allowed",
        ),
    ),
    "heat": (
        TemperatureRule(84.5),
        (WARM,),
        {},
        (device_subject(WARM), [], "GPU 0 has 85C, 84.5C is allowed"),
    ),
    "power in watts": (
        PowerRule(parse_power_amount("300W")),
        (WARM,),
        {},
        (device_subject(WARM), [], "GPU 0 draws 300W, 300W is allowed"),
    ),
    "power in percent": (
        PowerRule(parse_power_amount("95%")),
        (POWER,),
        {},
        (device_subject(POWER), [], "GPU 0 draws 345W, 95% of 350W is allowed"),
    ),
    "power in percent of an unknown limit": (PowerRule(parse_power_amount("95%")), (WARM,), {}, None),
    "unknown power": (PowerRule(parse_power_amount("95%")), (a_device(power_draw=None),), {}, None),
    "busy": (
        UtilizationRule(above=50.0),
        (WARM,),
        {},
        (device_subject(WARM), [], "utilization of GPU 0 is 50%, at most 50% is allowed"),
    ),
    "not busy": (
        UtilizationRule(below=62.5),
        (WARM,),
        {},
        (device_subject(WARM), [], "utilization of GPU 0 is 50%, at least 62.5% is expected"),
    ),
    "processes on a GPU": (
        ProcessesRule(above=2),
        (THREE,),
        {},
        (device_subject(THREE), [], "3 processes compute on GPU 0, 2 processes are allowed"),
    ),
    "processes of a user": (
        ProcessesRule(above=1, per="user"),
        (THREE,),
        {},
        (
            Subject("user", a_uuid(0), uid=1001, user="alice"),
            [3, 2],
            "3 processes compute on GPU 0, 1 processes are allowed",
        ),
    ),
    "faults": (
        HealthRule(
            problems=("lost", "*pending*"),
            throttle_reasons=("hw*",),
            ecc_corrected_above=1,
            ecc_uncorrected_above=0,
            retired_pages_above=2,
            remapped_rows_above=3,
            with_processes=True,
        ),
        (
            a_device(
                problems=("row remap pending", "other", "lost"),
                throttle_reasons=("hw slowdown", "sw power cap"),
                ecc_corrected_volatile=2,
                ecc_uncorrected_volatile=1,
                retired_pages=3,
                remapped_rows=4,
                processes=(NAMELESS,),
            ),
        ),
        {},
        (
            device_subject(a_device()),
            [3],
            "row remap pending, lost; slowed down by hw slowdown; 2 corrected memory errors, 1 are allowed; "
            "1 uncorrected memory errors, 0 are allowed; 3 retired pages, 2 are allowed; "
            "4 remapped rows, 3 are allowed",
        ),
    ),
    "as many faults as are allowed": (
        HealthRule(ecc_corrected_above=2, ecc_uncorrected_above=1, retired_pages_above=3),
        (a_device(ecc_corrected_volatile=2, ecc_uncorrected_volatile=1, retired_pages=3),),
        {},
        None,
    ),
    "memory of the machine": (
        HostMemoryRule(parse_host_memory_amount("50%")),
        (a_device(processes=(NAMELESS,)),),
        {"machine": replace(MACHINE, users={1: UserUse("daemon", 1.0, 51 * GIB), 0: UserUse("root", 1.0, 90 * GIB)})},
        (
            Subject("user", uid=1, user="daemon"),
            [],
            "uses 51.0GiB of the machine's memory, 50% of 100.0GiB is allowed",
        ),
    ),
    "idle": (
        IdleRule(below=5.0),
        (a_device(memory_used=2 * GIB, utilization=4.96, processes=(NAMELESS,)),),
        {},
        (
            process_subject(a_device(), NAMELESS),
            [3],
            "GPU 0 is idle: utilization 4.96%, at most 5% is idle, while 2.0GiB is held",
        ),
    ),
    "idle claim": (
        IdleRule(below=5.0),
        (a_device(memory_used=None, utilization=5.0),),
        HELD_BY_ALICE,
        (
            Subject("claim", a_uuid(0), uid=1001, claim="c1", user="alice"),
            [],
            "GPU 0 is idle: utilization 5%, at most 5% is idle",
        ),
    ),
    "idle claim of root": (
        IdleRule(below=5.0),
        (a_device(memory_used=None, utilization=5.0),),
        {"claims": (a_claim_record(id="c1", uid=0, user="root"), a_claim_record(id="c2", uid=-1, user="?"))},
        (
            Subject("claim", a_uuid(0), uid=0, claim="c1", user="root"),
            [],
            "GPU 0 is idle: utilization 5%, at most 5% is idle",
        ),
    ),
    "idle memory that no process has": (
        IdleRule(below=5.0, memory_above=GIB),
        (a_device(memory_used=GIB + 1, utilization=0.0),),
        {},
        (
            device_subject(a_device()),
            [],
            "GPU 0 is idle: utilization 0%, at most 5% is idle, while 1.0GiB is held",
        ),
    ),
    "little idle memory": (
        IdleRule(below=5.0, memory_above=GIB), (a_device(memory_used=GIB, utilization=0.0),), {}, None
    ),
    "age": (
        AgeRule(run_time_above=8999.0),
        (a_device(processes=(NAMELESS,)),),
        {},
        (process_subject(a_device(), NAMELESS), [3], "has run for 2h30m, 2h29m are allowed"),
    ),
    "as old as is allowed": (AgeRule(run_time_above=9000.0), (a_device(processes=(NAMELESS,)),), {}, None),
    "unclaimed": (
        UnclaimedRule(),
        (a_device(processes=(NAMELESS,)),),
        {},
        (process_subject(a_device(), NAMELESS), [3], "uses 30.0GiB of a GPU without a claim"),
    ),
    "unclaimed above a limit": (
        UnclaimedRule(min_memory=30 * GIB),
        (a_device(processes=(NAMELESS,)),),
        {},
        (
            process_subject(a_device(), NAMELESS),
            [3],
            "uses 30.0GiB of a GPU without a claim, and less than 30.0GiB would be allowed",
        ),
    ),
    "little unclaimed": (UnclaimedRule(min_memory=30 * GIB + 1), (a_device(processes=(NAMELESS,)),), {}, None),
    "denied": (
        UsersRule(deny=(7,)),
        (a_device(processes=(NAMELESS,)),),
        {},
        (process_subject(a_device(), NAMELESS), [3], "uid 7 is denied and uses 30.0GiB"),
    ),
    "a program": (
        CommandRule(executables=("/opt/*",)),
        (a_device(processes=(replace(NAMELESS, executable="/opt/x (deleted)"),)),),
        {},
        (process_subject(a_device(), NAMELESS), [3], "runs /opt/x (deleted) and uses 30.0GiB"),
    ),
    "outside the scheduler": (
        OutsideSchedulerRule(),
        (a_device(processes=(NAMELESS,)),),
        {"scheduled": {a_uuid(0): frozenset({8})}},
        (
            process_subject(a_device(), NAMELESS),
            [3],
            "uses 30.0GiB of a GPU that the scheduler has given to other users",
        ),
    ),
    "given to none by the scheduler": (
        OutsideSchedulerRule(),
        (a_device(processes=(NAMELESS,)),),
        {"scheduled": {a_uuid(0): frozenset()}},
        (process_subject(a_device(), NAMELESS), [3], "uses 30.0GiB of a GPU that the scheduler has given to no user"),
    ),
    "too many GPUs": (
        QuotaRule(devices=0),
        (a_device(processes=(NAMELESS,)),),
        {},
        (process_subject(a_device(), NAMELESS), [3], "uid 7 has 1 GPUs, the limit is 0"),
    ),
    "a process with too many GPUs": (
        QuotaRule(devices=1, per="claim"),
        (a_device(0, processes=(NAMELESS,)), a_device(1, processes=(NAMELESS,))),
        {},
        (process_subject(a_device(), NAMELESS), [3], "one process of uid 7 has 2 GPUs, the limit is 1"),
    ),
    "a claim with too much memory": (
        QuotaRule(memory=25.0, per="claim"),
        (a_device(0, processes=TWO_OF_ALICE), a_device(1)),
        {"claims": (a_claim_record(a_uuid(0), id="c1"),)},
        (
            Subject("claim", uid=1001, claim="c1", user="alice"),
            [1, 2],
            "one claim of alice uses 50.0GiB, 31.2% of the memory of all GPUs, 25% is allowed",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "devices", "view", "finding"), FOUND.values(), ids=FOUND)
def test_what_a_rule_finds_is_said_with_its_numbers_and_means_those_processes(rule, devices, view, finding):
    findings = found(rule, *devices, **view)

    assert [(each.subject, [process.pid for process in each.processes], each.why) for each in findings] == (
        [finding] if finding else []
    )
    assert [each.subject.user for each in findings] == ([finding[0].user] if finding else [])  # is for people alone


EVERY_TEN = [900.0 + 10 * number for number in range(11)]


@pytest.mark.parametrize(
    ("clocks", "whole"),
    [
        ([], False),
        (EVERY_TEN, True),
        (EVERY_TEN[1:-1], True),  # a tenth of the window may be missing at either end
        ([*EVERY_TEN[:5], 955.0, *EVERY_TEN[6:]], True),
        ([*EVERY_TEN[:5], *EVERY_TEN[6:]], False),
        ([*EVERY_TEN[:4], 939.0, 954.0, *EVERY_TEN[6:]], True),  # a late one among eleven
        ([*EVERY_TEN[:4], 939.0, 954.1, *EVERY_TEN[6:]], False),
        ([910.19, *EVERY_TEN[2:-1]], True),
        ([910.21, *EVERY_TEN[2:-1]], False),  # fewer than ten
        ([*EVERY_TEN[1:-2], 989.81], True),
        ([*EVERY_TEN[1:-2], 989.79], False),
        ([*(900.0 + number / 2 for number in range(100)), 960.3, *(961.0 + number / 2 for number in range(78))], False),
    ],
)
def test_a_window_counts_where_its_samples_leave_no_large_hole(clocks, whole):
    series = [(clock, clock / 10) for clock in (100.0, 899.9, *clocks)]
    view = RuleView(a_snapshot(a_device(), clock=1000.0), past={(A_DEVICE, "utilization"): series})

    assert covers(series, 2, 1000.0, 100.0) is whole
    assert recent(view, A_DEVICE, "utilization", 100.0) == (series[2:] if whole else [])
    assert recent(view, A_DEVICE, "temperature", 100.0) == recent(view, A_PROCESS, "utilization", 100.0) == []


def test_the_rhythm_of_samples_is_learnt_from_the_last_distances():
    rhythm = SampleRhythm()
    assert (rhythm.largest(None), rhythm.largest(5.0)) == (float("inf"), 15.0)
    for clock in (0.0, 0.0, 10.0, 20.0, 19.0, 120.0):
        rhythm.beat(clock)
    assert (rhythm.clock, rhythm.largest(None), rhythm.largest(5.0)) == (120.0, 30.0, 15.0)

    for number in range(9):
        rhythm.beat(200.0 + number)
    assert rhythm.largest(None) == 3.0


def test_a_series_keeps_the_means_of_slices_and_forgets_what_is_older_than_its_window():
    series = ValueSeries(window=2048.0)
    for clock, value in ((5.0, 1.0), (5.5, 3.0), (5.9, 5.0), (6.0, 9.0), (7.5, 2.0)):
        series.add(clock, value)
    assert series == [(5.9, 3.0), (6.0, 9.0), (7.5, 2.0)]

    series.add(2054.0, 1.0)
    assert series == [(6.0, 9.0), (7.5, 2.0), (2054.0, 1.0)]


def test_a_past_begins_anew_behind_a_hole_and_ends_when_no_value_has_come_for_a_window():
    past, windows, device = Past(), {"utilization": 30.0}, a_device(utilization=7.0)
    key = device_subject(device), "utilization"

    def seen_at(clock, **fields):
        past.record(a_snapshot(replace(device, **fields), clock=clock), windows, largest_hole=15.0)
        return list(past.get(key, ()))

    assert [len(seen_at(clock)) for clock in (0.0, 10.0, 25.0, 40.0)] == [1, 2, 3, 3]
    assert seen_at(55.1, utilization=8.0) == [(55.1, 8.0)], "a hole of more than 15 s"
    assert seen_at(85.1, utilization=None) == [(55.1, 8.0)]
    assert seen_at(85.2, utilization=None) == []
    windows["utilization"] = 60.0
    seen_at(90.0)
    assert past[key].window == 60.0


def test_what_is_paused_uses_nothing_and_its_device_neither():
    paused, other = a_process(1, utilization=9.0, memory_utilization=8.0), a_process(2, utilization=7.0)
    device = a_device(0, utilization=50.0, memory_utilization=40.0, processes=(paused, other))
    beside = a_device(1, utilization=50.0, processes=(other,))
    use = HostUse(cpu=3.0, network=4.0, terminal="/dev/pts/1")
    view = RuleView(a_snapshot(device, beside), host={(1, 1000.0): use, (2, 1000.0): use}, paused={(1, 1000.0)})
    shown = without_pauses(view)

    nothing = {"utilization": None, "memory_utilization": None}
    assert shown.snapshot.devices == (
        replace(device, processes=(replace(paused, **nothing), other), **nothing), beside,
    )  # fmt: skip
    assert shown.host == {(1, 1000.0): replace(use, cpu=None, network=None), (2, 1000.0): use}
    assert without_pauses(replace(view, paused=frozenset())).snapshot == view.snapshot


LEAK = MemoryGrowthRule(parse_rate("1GiB/10m"))


def growing(of: Callable[[float], float], subject: Subject = A_PROCESS) -> dict:
    return a_past(a_series(of), "memory_used", subject)


def test_steady_growth_is_found():
    (finding,) = found(LEAK, HELD, **growing(lambda t: 2 * GIB * t / 600))

    assert finding.subject == A_PROCESS
    assert finding.why == (
        "memory on GPU 0 grows by 2.0GiB in 10m (trend over 10m), 1GiB/10m is allowed"
    )  # fmt: skip


def a_jump(at: float) -> list:
    return a_series(lambda t: 60 * GIB if t > at else 0)


def up_and_down(period: float) -> list:
    return a_series(lambda t: (20 + t % period) * GIB, every=1)


NO_GROWTH = {
    "level": a_series(lambda t: 20 * GIB),
    "slow": a_series(lambda t: 0.9 * GIB * t / 600),
    "falling": a_series(lambda t: -5 * GIB * t / 600),
    "the window is not full": a_series(lambda t: 10 * GIB * t / 600, seconds=300),
    **{f"one jump at {at}": a_jump(at) for at in (20, 200, 300, 310, 500, 590)},
    **{f"up and down in {period} s": up_and_down(period) for period in (20, 24.7, 25, 25.3, 26, 50, 51, 90)},
}


@pytest.mark.parametrize("course", NO_GROWTH.values(), ids=NO_GROWTH)
def test_what_is_no_steady_growth_is_not_found(course):
    past = a_past(course, "memory_used", A_PROCESS)

    assert found(LEAK, HELD, **past) == []
    assert found(ForecastRule(full_within=900.0, per="process"), HELD, **past) == []


def test_growth_is_seen_through_wild_samples():
    assert found(LEAK, HELD, **growing(lambda t: 0 if t % 70 == 0 else 4 * GIB * t / 600)) != []


def slopes_of(*samples: tuple[float, float], seconds: float = 60.0) -> list[float]:
    """Slopes at clock 100 of samples that were recorded."""
    series = ValueSeries(window=1000.0)
    for clock, value in samples:
        series.add(clock, value)
    key = (A_DEVICE, "memory_used")
    return slopes(RuleView(a_snapshot(clock=100.0), past={key: series}), A_DEVICE, "memory_used", seconds)


def test_what_has_not_been_seen_for_the_whole_time_has_no_trend():
    assert slopes_of() == []
    assert slopes_of((10.0, 1.0), (20.0, 2.0), (30.0, 3.0)) == []  # the last sample is older than the time


def test_what_does_not_change_grows_by_nothing():
    assert slopes_of(*[(clock, 7.0) for clock in range(0, 101, 10)]) == [0.0]
    assert slopes_of(*[(clock, 7.0 + (clock == 0)) for clock in range(0, 101, 10)]) == [0.0]  # not within the time


def test_the_forecast_says_when_memory_is_full_and_how_sure_it_is():
    device = a_device(memory_used=70 * GIB)

    (finding,) = found(ForecastRule(full_within=900.0), device, **growing(lambda t: (60 + t / 60) * GIB, A_DEVICE))
    assert finding.processes == ()
    assert finding.why == (
        "memory of GPU 0 is full in about 10m: 10.0GiB is free and 1.0GiB more is used each minute "
        "(confidence 100%); less than 15m is not enough"
    )


GROWS = growing(lambda t: (60 + t / 60) * GIB, A_DEVICE)


@pytest.mark.parametrize(
    ("device", "within", "past", "finds"),
    [
        (a_device(memory_used=70 * GIB), 900.0, GROWS, True),
        (a_device(memory_used=70 * GIB), 640.0, growing(lambda t: 60 * GIB + t * 2**24, A_DEVICE), True),
        (a_device(memory_used=70 * GIB), 599.0, GROWS, False),
        (a_device(memory_used=70 * GIB, memory_free=None, memory_total=TOTAL), 900.0, GROWS, True),
        (a_device(memory_used=70 * GIB, memory_free=None, memory_total=None), 900.0, GROWS, False),
        (a_device(memory_used=TOTAL, memory_free=0), 900.0, growing(lambda t: TOTAL, A_DEVICE), False),
    ],
    ids=[
        "full soon",
        "full just then",
        "there is time",
        "free is not told",
        "nor the size",
        "full and nothing changes",
    ],
)
def test_the_forecast_is_told_when_memory_is_full_soon(device, within, past, finds):
    assert bool(found(ForecastRule(full_within=within), device, **past)) is finds


def test_the_forecast_is_silent_below_its_confidence():
    device = a_device(memory_used=70 * GIB)
    wild = growing(lambda t: (60 + t / 60 + (t * 7919 % 11)) * GIB, A_DEVICE)

    assert found(ForecastRule(full_within=900.0, confidence=95.0), device, **wild) == []
    assert found(ForecastRule(full_within=900.0, confidence=50.0), device, **wild) != []
    assert found(ForecastRule(full_within=900.0, confidence=100.0), device, **GROWS) != []


COUNTS = {
    "ecc_corrected_above": "ecc_corrected_volatile",
    "ecc_uncorrected_above": "ecc_uncorrected_volatile",
    "retired_pages_above": "retired_pages",
    "remapped_rows_above": "remapped_rows",
}


def whys(rule: HealthRule, *devices) -> list[str]:
    return [finding.why for finding in rule.check(RuleView(a_snapshot(*devices)))]


@pytest.mark.parametrize(
    ("problems", "found"),
    [
        (("lost",), True),
        (("row remap pending",), True),
        (("nvmlDeviceGetMigMode: reset required", "reset required"), True),
        (("unresponsive",), False),
        ((), False),
        (None, False),
    ],
)
def test_a_problem_is_found_by_its_name_or_a_glob(problems, found):
    rule = HealthRule(problems=("lost", "reset required", "*pending*"))

    assert bool(whys(rule, a_device(problems=problems))) == found


def test_a_device_that_is_slowed_down_is_found_and_a_slow_idle_one_is_not():
    rule = HealthRule(throttle_reasons=("hw_*",))

    hot = a_device(throttle_reasons=("gpu_idle", "hw_thermal_slowdown"))
    assert whys(rule, hot) == ["slowed down by hw_thermal_slowdown"]
    assert whys(rule, a_device(throttle_reasons=("gpu_idle",))) == []
    assert whys(rule, a_device(throttle_reasons=None)) == []


@pytest.mark.parametrize(("key", "field"), COUNTS.items())
def test_a_count_is_found_above_its_limit_and_never_when_it_is_unknown(key, field):
    rule = HealthRule(**{key: 3})

    assert [bool(whys(rule, a_device(**{field: count}))) for count in (None, 0, 3, 4)] == [False, False, False, True]


def test_one_finding_per_device_names_all_that_is_wrong():
    rule = HealthRule(problems=("*",), throttle_reasons=("hw_*",), retired_pages_above=0)
    device = a_device(problems=("lost", "odd"), throttle_reasons=("hw_slowdown",), retired_pages=2)

    assert whys(rule, device) == ["lost, odd; slowed down by hw_slowdown; 2 retired pages, 0 are allowed"]


@pytest.mark.parametrize("with_processes", [False, True])
def test_processes_are_meant_when_that_is_asked_for_but_only_those_that_may_be_judged(with_processes):
    job, desktop, stranger = a_process(), a_process(2, kind="graphics", memory_used=GIB), a_process(3, uid=None)
    device = a_device(problems=("lost",), processes=(job, desktop, stranger))

    [finding] = found(HealthRule(problems=("*",), with_processes=with_processes), device)
    assert (finding.subject, finding.processes) == (A_DEVICE, (job,) * with_processes)


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        ({"problems": ("lost",)}, set()),
        ({"throttle_reasons": ("hw_slowdown",)}, {CLOCKS}),
        *(({key: 0}, {ECC}) for key in COUNTS),
        ({"throttle_reasons": ("hw_slowdown",), "retired_pages_above": 1}, {CLOCKS, ECC}),
    ],
)
def test_only_what_a_rule_judges_by_is_asked_of_the_driver(keys, groups):
    assert HealthRule(**keys).needs.fields == groups


def test_a_device_whose_memory_is_held_at_rest_is_idle():
    (finding,) = found(IdleRule(below=5.0), HELD)

    assert finding.subject == A_PROCESS
    assert finding.why == "GPU 0 is idle: utilization 0%, at most 5% is idle, while 20.0GiB is held"


@pytest.mark.parametrize(
    ("below", "utilization", "idle"),
    [(5.0, 0.0, True), (5.0, 5.0, True), (5.0, 5.1, False), (5.0, None, False), (0.0, 0.0, True), (0.0, 1.0, False)],
)
def test_utilization_up_to_the_limit_is_idle_and_unknown_never(below, utilization, idle):
    assert bool(found(IdleRule(below=below), replace(HELD, utilization=utilization))) is idle


@pytest.mark.parametrize("memory", [0, GIB, None])
def test_an_unclaimed_device_with_little_or_unknown_memory_is_free_not_idle(memory):
    assert found(IdleRule(below=5.0), replace(HELD, memory_used=memory)) == []


@pytest.mark.parametrize(
    ("device", "claimed", "subjects"),
    [
        (a_device(), True, [Subject("claim", a_uuid(0), uid=1001, claim="a1b2c3", user="alice")]),
        (HELD, True, [A_PROCESS]),  # a claim that is used is found by its process
        (a_device(processes=(a_process(uid=None),)), True, []),
        (replace(HELD, processes=None), False, [A_DEVICE]),
    ],
    ids=["a claim without a process", "a claim with one", "an unknown process", "no list of processes"],
)
def test_what_is_idle_is_the_claim_the_process_or_the_device_alone(device, claimed, subjects):
    claims = [a_claim_record(device)] if claimed else []

    assert [finding.subject for finding in found(IdleRule(below=5.0), device, claims=claims)] == subjects


@pytest.mark.parametrize(
    ("use", "idle"),
    [
        (HostUse(cpu=1.0, network=10.0), True),
        (HostUse(cpu=30.0, network=10.0), False),
        (HostUse(cpu=1.0, network=2e6), False),
        (HostUse(cpu=None, network=10.0), False),
        (HostUse(cpu=1.0, network=None), False),
        (None, False),
    ],
)
def test_idle_beside_the_gpu_too_needs_to_be_known(use, idle):
    rule = IdleRule(below=5.0, cpu_below=2.0, network_below=parse_rate("1MB/s"))
    host = {(4711, 1000.0): use} if use else {}

    assert bool(found(rule, HELD, host=host)) is idle


def test_one_busy_process_keeps_the_others_on_the_device_innocent():
    device = replace(HELD, processes=(a_process(1), a_process(2)))
    host = {(1, 1000.0): HostUse(cpu=0.0), (2, 1000.0): HostUse(cpu=90.0)}

    assert found(IdleRule(below=5.0, cpu_below=2.0), device, host=host) == []


SLIDING = IdleRule(below=5.0, window="sliding", over=3600.0, share=80.0)


def test_a_short_burst_does_not_help_in_a_sliding_window():
    burst = a_series(lambda t: 100.0 if t > 3500 else 0.0, seconds=3600)

    (finding,) = found(SLIDING, replace(HELD, utilization=100.0), **a_past(burst))
    assert "97% of the last 1h" in finding.why


REST = a_series(lambda t: 0.0, seconds=3600)


@pytest.mark.parametrize(
    ("device", "course"),
    [
        (HELD, a_series(lambda t: 100.0 if t % 40 == 0 else 0.0, seconds=3600)),
        (HELD, REST[60:]),
        (HELD, [sample for sample in REST if not 7000 < sample[0] < 7500]),
        (replace(HELD, processes=(a_process(start_time=9000.0),)), REST),
    ],
    ids=["work in a fair share of it", "it is not covered", "it has a hole", "a process that is newer"],
)
def test_a_sliding_window_in_which_there_was_work_or_something_is_unknown_finds_nobody(device, course):
    assert found(SLIDING, device, **a_past(course)) == []


@pytest.mark.parametrize(("held", "finds"), [(3700.0, True), (3500.0, False), (None, False)])
def test_a_claim_is_judged_by_a_sliding_window_only_when_it_is_as_old(held, finds):
    device = a_device()
    claim = a_claim_record(device, since=None if held is None else a_snapshot().taken_at - held)

    assert bool(found(SLIDING, device, claims=[claim], **a_past(REST))) is finds
