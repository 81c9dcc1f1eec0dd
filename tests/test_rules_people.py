"""Rules about people: whose device it is, who may compute, how much, for how long, and with which program."""

from dataclasses import replace

import pytest
from builders import (
    GIB,
    MIB,
    TOTAL,
    a_claim_record,
    a_device,
    a_mig_instance,
    a_process,
    a_snapshot,
    a_uuid,
    found,
    found_later,
    pids,
)
from ladders import a_policy

from gpuguard.device_state import idle_limit
from gpuguard.errors import InvalidRequest
from gpuguard.model import Device, Finding, Gap, ProcessStat
from gpuguard.policies.idle import AgeRule, IdleRule
from gpuguard.policies.quota import QuotaRule
from gpuguard.policies.rules import needs_of
from gpuguard.policies.usage import CommandRule, OutsideSchedulerRule, TrespassRule, UnclaimedRule, UsersRule
from gpuguard.policies.view import Arrivals, HostUse, device_subject
from gpuguard.units import parse_device_amount

HOUR = 3600.0
ALICE, BOB = {"uid": 1001, "user": "alice"}, {"uid": 1002, "user": "bob"}
NOW = 1_700_000_000.0  # of a_snapshot(), at clock 10000


def used_by(*processes, index: int = 0, **fields) -> Device:
    return a_device(index, memory_used=50 * GIB, processes=processes, **fields)


def a_claim(name: str, *devices: Device, age: float, **fields):
    return a_claim_record(*devices, id=name, since=NOW - age, **{**ALICE, **fields})


def test_use_of_a_device_that_nobody_has_claimed_is_found():
    [finding] = found(UnclaimedRule(), used_by(a_process(**BOB)))

    assert (finding.subject.kind, finding.subject.pid, finding.subject.user) == ("process", 4711, "bob")
    assert finding.why == "uses 10.0GiB of a GPU without a claim"


@pytest.mark.parametrize(
    ("view", "unclaimed"),
    [
        ({"claims": [a_claim_record(**ALICE)]}, []),  # of another user: that is a trespass
        ({"claims": [a_claim_record(alive=False)]}, [4711]),
        ({"gaps": [Gap(None, "claims", "no permission")]}, []),
        ({"gaps": [Gap(None, "topology", "no permission")]}, [4711]),
    ],
)
def test_use_is_unclaimed_where_no_claim_lives_and_the_claims_are_known(view, unclaimed):
    assert pids(found(UnclaimedRule(), used_by(a_process(**BOB)), **view)) == unclaimed


def test_use_of_a_gpu_that_another_user_claimed_before_is_found_where_the_file_says_so():
    bare, owner = a_process(2, **BOB), a_process(3, **ALICE)

    [finding] = found_later(UnclaimedRule(on_claimed=True), used_by(bare, owner), claims=[a_claim_record(**ALICE)])
    assert (finding.rule, pids([finding])) == ("unclaimed", [2])
    assert finding.why == "uses 10.0GiB of a GPU that alice has claimed, without a claim"
    [finding] = found_later(
        UnclaimedRule(on_claimed=True, min_memory=GIB),
        used_by(bare, owner),
        claims=[a_claim_record(**ALICE), a_claim_record(id="c", uid=1003, user="carl")],
    )
    assert finding.why == (
        "uses 10.0GiB of a GPU that alice, carl has claimed, without a claim, and less than 1.0GiB would be allowed"
    )
    assert found_later(UnclaimedRule(), used_by(bare, owner), claims=[a_claim_record(**ALICE)]) == []


@pytest.mark.parametrize(
    "claims",
    [
        [a_claim_record(id="?", uid=-1, user="?")],
        [a_claim_record(max_processes=9, **ALICE)],
        [a_claim_record(**ALICE), a_claim_record(id="b", **BOB)],
    ],
    ids=["whose lock is not known", "shared", "has one, too"],
)
def test_there_it_spares_whom_trespass_spares(claims):
    rule, bobs = UnclaimedRule(on_claimed=True), used_by(a_process(2, **BOB))

    assert found_later(rule, bobs, claims=claims) == []
    assert found_later(rule, used_by(a_process(2, container="c0ffee", **BOB)), claims=[a_claim_record(**ALICE)]) == []
    assert (
        found(rule, bobs, claims=[a_claim_record(**ALICE)]) == []
    )  # in the first sample: it may have been there first
    assert pids(found(rule, bobs)) == [2]


def test_little_memory_is_spared_and_unknown_memory_too():
    rule = UnclaimedRule(min_memory=GIB)
    processes = [a_process(2, memory_used=GIB - 1), a_process(3, memory_used=GIB), a_process(4, memory_used=None)]

    assert pids(found(rule, used_by(*processes))) == [3]
    assert "1.0GiB" in found(rule, used_by(*processes))[0].why


@pytest.mark.parametrize("kind", ["graphics", "compute+graphics"])
def test_a_desktop_needs_no_claim(kind):
    assert found(UnclaimedRule(), used_by(a_process(kind=kind, memory_used=25 * MIB))) == []


def test_a_claim_of_a_device_covers_its_instances_and_a_divided_device_is_only_its_instances():
    parent = used_by(a_process(), mig_mode=True)
    instance = a_mig_instance(parent, processes=(a_process(),))

    assert found(UnclaimedRule(), parent, instance, claims=[a_claim_record(parent)]) == []
    assert found(UnclaimedRule(), parent, instance, claims=[a_claim_record(instance)]) == []
    assert [finding.subject.device for finding in found(UnclaimedRule(), parent, instance)] == [instance.uuid]


def test_another_user_on_a_claimed_device_is_a_trespasser_and_the_owner_is_not():
    device = used_by(a_process(2, **ALICE), a_process(3, **BOB))

    [finding] = found_later(TrespassRule(), device, claims=[a_claim_record(**ALICE)])
    assert pids([finding]) == [3]
    assert finding.why == "uses 10.0GiB of a GPU that alice has claimed"


@pytest.mark.parametrize(
    ("claims", "trespassers"),
    [
        ([a_claim_record("GPU-elsewhere")], []),
        ([a_claim_record(id="a", **ALICE), a_claim_record(id="b", **BOB)], []),  # they share the device
        ([a_claim_record(**ALICE), a_claim_record(id="?", uid=-1, user="?")], []),  # a lock without a record
        ([a_claim_record(holders=(3,), **ALICE)], [4]),  # 3 holds the lock, whatever user it has
    ],
)
def test_a_process_under_a_claim_of_the_device_is_no_trespasser(claims, trespassers):
    assert (
        pids(found_later(TrespassRule(), used_by(a_process(3, **BOB), a_process(4, **BOB)), claims=claims))
        == trespassers
    )


def test_a_descendant_of_the_holder_is_at_home():
    claim = a_claim_record(pid=4700, **ALICE)
    seen = {3: ProcessStat(5, "S"), 5: ProcessStat(4700, "S")}

    assert found_later(TrespassRule(), used_by(a_process(3, **BOB)), claims=[claim], seen=seen) == []
    assert pids(found_later(TrespassRule(), used_by(a_process(3, **BOB)), claims=[claim])) == [3]


def test_root_is_taken_for_a_container_of_the_claim():
    root, bobs = used_by(a_process(uid=0, user="root")), a_claim_record(id="b", **BOB)

    assert found_later(TrespassRule(), root, claims=[a_claim_record()]) == []
    assert found_later(TrespassRule(), root, claims=[a_claim_record(), bobs]) == []


def test_the_user_inside_a_container_is_judged_only_when_that_is_asked_for():
    device = used_by(a_process(3, container="c0ffee", **BOB))

    assert found_later(TrespassRule(), device, claims=[a_claim_record()]) == []
    assert pids(found_later(TrespassRule(containers=True), device, claims=[a_claim_record()])) == [3]


CAROL = {"uid": 1003, "user": "carol"}
CLAIM, CAROLS = a_claim_record(id="a", **ALICE), a_claim_record(id="c", **CAROL)
AT_WORK = a_process(3, utilization=90.0, **BOB)


def idle_beside(*processes, claims=(CLAIM,), rule=None, **view):
    """What is idle, as pids and ids of claims, on a busy GPU with these *processes* and one of bob that works."""
    device = used_by(*processes, AT_WORK, utilization=view.pop("utilization", 90.0))
    findings = found(rule or IdleRule(below=5.0), device, claims=claims, **view)
    return [finding.subject.pid or finding.subject.claim for finding in findings]


def test_a_claim_is_as_idle_as_its_own_processes_whatever_others_do_there():
    device = used_by(a_process(2, utilization=4.0, **ALICE), AT_WORK, utilization=90.0)

    [finding] = found(IdleRule(below=5.0), device, claims=[CLAIM])
    assert (finding.subject.pid, pids([finding])) == (2, [2])
    assert finding.why == (
        "GPU 0 is idle for its claim: own processes use 4%, at most 5% is idle; only others work there"
    )
    assert idle_beside() == ["a"]  # no process is its own
    assert idle_beside(a_process(2, utilization=5.1, **ALICE)) == []
    assert idle_beside(a_process(2, utilization=0.0, **ALICE), a_process(4, utilization=9.0, **ALICE)) == []
    assert idle_beside(a_process(2, utilization=0.0, **ALICE), a_process(4, utilization=1.0, **ALICE)) == [2, 4]
    assert idle_beside(a_process(2, utilization=9.0, **CAROL), claims=(CLAIM, CAROLS)) == ["a"]  # they share it
    assert idle_beside(a_process(2, utilization=0.0, **CAROL), claims=(CLAIM, CAROLS)) == ["a", 2]


@pytest.mark.parametrize(
    ("processes", "claims"),
    [
        ([a_process(2, **ALICE)], [CLAIM]),  # the driver says nothing of its work
        ([a_process(2, utilization=0.0, **ALICE), a_process(4, **ALICE)], [CLAIM]),
        ([a_process(2, utilization=9.0, container="c0ffee", **CAROL)], [CLAIM]),  # it may be of the claim
        ([a_process(2, utilization=9.0, uid=0, user="root")], [CLAIM]),
        ([a_process(2, utilization=9.0, uid=0, user="root")], [CLAIM, CAROLS]),
        ([a_process(2, utilization=9.0, uid=None)], [CLAIM]),
        ([a_process(2, utilization=0.0, **ALICE)], [CLAIM, a_claim_record(id="b", **ALICE)]),  # of which of the two?
        ([], [CLAIM, a_claim_record(id="?", uid=-1, user="?")]),  # a lock of an unknown owner
        ([], [a_claim_record(id="b", **BOB)]),  # that user works on their own claim
    ],
)
def test_who_may_be_at_work_there_is_innocent(processes, claims):
    assert idle_beside(*processes, claims=claims) == []


def test_where_no_others_are_or_a_lock_has_no_record_no_claim_is_called_idle_beside_others():
    own, carols = a_process(2, utilization=1.0, **ALICE), a_process(4, utilization=90.0, **CAROL)
    rule, unknown = IdleRule(below=5.0), a_claim_record(id="?", uid=-1, user="?")

    assert found(rule, used_by(own, utilization=90.0), claims=[CLAIM]) == []  # the two disagree
    findings = found(rule, used_by(own, carols, utilization=90.0), claims=[CLAIM, CAROLS, unknown])
    assert [finding.subject.pid for finding in findings] == [2]


def test_a_copy_of_a_lock_makes_a_process_neither_the_claims_own_nor_a_stranger():
    lent = a_claim_record(id="a", holders=(2, 3), **ALICE)

    assert idle_beside(a_process(2, utilization=0.0, **ALICE), claims=[lent]) == []
    parents = {2: ProcessStat(4700, "S"), 3: ProcessStat(4700, "S")}
    started = a_claim_record(id="a", pid=4700, **ALICE)
    assert idle_beside(a_process(2, utilization=0.0, **ALICE), claims=[started], seen=parents) == []  # bob's is its own


def test_beside_others_a_claim_that_must_rest_on_the_cpu_too_rests_there_by_its_own_processes():
    rule, own = IdleRule(below=5.0, cpu_below=2.0), a_process(2, utilization=0.0, **ALICE)
    both = {(2, 1000.0): HostUse(cpu=1.0), (3, 1000.0): HostUse(cpu=99.0)}

    assert idle_beside(own, rule=rule, host=both) == [2]
    assert idle_beside(own, rule=rule, host={(2, 1000.0): HostUse(cpu=50.0)}) == []
    assert idle_beside(own, rule=rule) == []
    assert idle_beside(rule=rule) == ["a"]


def test_beside_others_nothing_is_idle_by_a_sliding_window_or_without_the_load_of_the_gpu():
    window = IdleRule(below=5.0, window="sliding", over=600.0)

    assert idle_beside(rule=window) == []
    assert idle_beside(utilization=None) == []


UUID = a_uuid(0)


@pytest.mark.parametrize(
    ("scheduled", "rule", "outside"),
    [
        ({UUID: frozenset({1001})}, OutsideSchedulerRule(), [3]),
        ({UUID: frozenset()}, OutsideSchedulerRule(), [2, 3]),
        ({UUID: frozenset()}, OutsideSchedulerRule(containers=False), [2]),
        ({}, OutsideSchedulerRule(), []),  # it says nothing of the device
        (None, OutsideSchedulerRule(), []),  # there is none
    ],
)
def test_a_process_is_outside_the_scheduler_where_the_device_was_not_given_to_its_user(scheduled, rule, outside):
    device = used_by(a_process(2, **ALICE), a_process(3, container="c0ffee", **BOB))

    findings = found(rule, device, scheduled=scheduled)
    assert pids(findings) == outside
    if len(outside) == 2:
        assert findings[0].why == "uses 10.0GiB of a GPU that the scheduler has given to no user"


def test_an_instance_is_given_with_its_device():
    parent = a_device(mig_mode=True)
    instance = a_mig_instance(parent, processes=(a_process(2, **ALICE), a_process(3, **BOB)))

    assert pids(found(OutsideSchedulerRule(), parent, instance, scheduled={parent.uuid: frozenset({1001})})) == [3]


GROUPS = {1001: frozenset({"staff"}), 1002: frozenset({"students", "alumni"})}


@pytest.mark.parametrize(
    ("rule", "hit"),
    [
        (UsersRule(deny=(1002,)), [3]),
        (UsersRule(deny_groups=("students",)), [3]),
        (UsersRule(allow=(1001,)), [3, 4]),
        (UsersRule(allow_groups=("staff", "students")), []),  # nothing is known of carol's groups
        (UsersRule(allow_groups=("staff",)), [3]),
        (UsersRule(allow=(1002,), allow_groups=("staff",)), []),
        (UsersRule(allow=(1001, 1002, 1003), deny=(1001,)), [2]),
        (UsersRule(allow_groups=("students",), deny_groups=("alumni",)), [2, 3]),
    ],
)
def test_who_is_denied_or_not_allowed_is_found(rule, hit):
    device = used_by(a_process(2, **ALICE), a_process(3, **BOB), a_process(4, uid=1003, user="carol"))

    assert pids(found(rule, device, groups=GROUPS)) == hit


def test_the_reason_names_user_and_group():
    device = used_by(a_process(3, **BOB))

    whys = [
        found(rule, device, groups=GROUPS)[0].why
        for rule in (UsersRule(deny_groups=("alumni",)), UsersRule(allow=(7,)))
    ]
    assert whys == [
        "bob is in the group alumni, which is denied, and uses 10.0GiB",
        "bob is not among those who are allowed and uses 10.0GiB",
    ]


def test_a_process_that_runs_for_too_long_is_found():
    rule = AgeRule(run_time_above=2 * HOUR)

    [finding] = found(rule, used_by(a_process(2, start_time=2700.0), a_process(3, start_time=2900.0)))
    assert (finding.subject.pid, finding.why) == (2, "has run for 2h1m, 2h are allowed")


def a_past(device: Device, *used: tuple[float, float]):
    return {(device_subject(device), "memory_used"): used}


EMPTY = [(10_000.0 - seconds, 4.0 * MIB) for seconds in range(7200, -1, -60)]


def test_a_claim_without_a_process_is_found_after_its_time():
    device, rule = a_device(), AgeRule(claim_without_process_above=HOUR)

    [finding] = found(rule, device, claims=[a_claim("x", device, age=7100)], past=a_past(device, *EMPTY))
    assert (finding.subject.kind, finding.subject.claim, finding.subject.uid) == ("claim", "x", 1001)
    assert finding.why == "held for 1h58m, the last 1h without a process"
    assert rule.needs.past == (("memory_used", HOUR),)


@pytest.mark.parametrize(("more", "finds"), [(0, 1), (1, 0)])
def test_a_claim_is_unused_up_to_the_memory_that_an_idle_device_may_hold(more, finds):
    device = a_device(memory_used=idle_limit(a_device()) + more)
    claims, rule = [a_claim("x", device, age=7100)], AgeRule(claim_without_process_above=HOUR)

    assert len(found(rule, device, claims=claims, past=a_past(device, *EMPTY))) == finds


@pytest.mark.parametrize(("late", "finds"), [(0.0, 1), (0.4, 1), (1.0, 0)])
def test_in_a_window_of_ten_intervals_a_sample_may_be_late_but_none_may_be_missing(late, finds):
    """At `--interval 200ms` a window of 2 s never fired: no sample comes on the dot."""
    device, interval = a_device(), HOUR / 10
    clocks = [10_000.0 - interval * (number - late * (number == 5)) for number in range(12)]
    past = [(clock, 4.0 * MIB) for clock in sorted(set(clocks))]
    claims = [a_claim("x", device, age=7100)]

    assert (
        len(found(AgeRule(claim_without_process_above=HOUR), device, claims=claims, past=a_past(device, *past)))
        == finds
    )


@pytest.mark.parametrize(
    ("device", "age", "past"),
    [
        (a_device(), 3500, EMPTY),  # too young
        (used_by(a_process()), 7100, EMPTY),
        (replace(used_by(a_process(memory_used=None)), memory_used=4 * MIB), 7100, EMPTY),
        (a_device(processes=None), 7100, EMPTY),
        (a_device(processes_plausible=False), 7100, EMPTY),
        (a_device(memory_used=None, memory_free=None), 7100, EMPTY),
        (a_device(memory_used=3 * GIB), 7100, EMPTY),  # somebody is there who is not listed
        (a_device(), 7100, []),
        (a_device(), 7100, EMPTY[-30:]),  # half an hour is known
        (a_device(), 7100, [*EMPTY[:60], *EMPTY[90:]]),  # with a hole of half an hour
        (a_device(), 7100, [*EMPTY[:90], (EMPTY[90][0], 5.0 * GIB), *EMPTY[91:]]),  # it worked in between
    ],
)
def test_a_claim_is_not_called_unused_unless_that_is_known(device, age, past):
    claims = [a_claim("x", device, age=age)]

    assert found(AgeRule(claim_without_process_above=HOUR), device, claims=claims, past=a_past(device, *past)) == []


@pytest.mark.parametrize(
    "unfit", [{"alive": False}, {"uid": -1}, {"since": None}, {"devices": ()}, {"devices": (a_uuid(7),)}]
)
def test_a_claim_of_nobody_known_on_nothing_or_of_unknown_age_is_not_called_unused(unfit):
    device = a_device()
    claim = replace(a_claim("x", device, age=7100), **unfit)

    assert found(AgeRule(claim_without_process_above=HOUR), device, claims=[claim], past=a_past(device, *EMPTY)) == []


def runs(executable: str | None, *arguments: str) -> Device:
    return used_by(a_process(executable=executable, command=("python", *arguments)))


MINER, LISTED = CommandRule(("/home/*/xmrig*",)), CommandRule(executables_other_than=("/usr/bin/*", "/opt/*"))
NOTEBOOK = CommandRule(("/usr/bin/python3*",), arguments=("* ipykernel*", "*-m jupyter*"))


@pytest.mark.parametrize(
    ("rule", "device", "finds"),
    [
        (MINER, runs("/home/bob/xmrig-6.2"), True),
        (CommandRule(("/home/bob/xmrig",)), runs("/home/bob/xmrig (deleted)"), True),
        (MINER, runs("/usr/bin/python3", "/home/bob/xmrig"), False),  # the file that runs, not what it calls itself
        (MINER, runs(None, "/home/bob/xmrig"), False),
        (LISTED, runs("/usr/bin/python3"), False),
        (LISTED, runs("/tmp/miner"), True),
        (LISTED, runs(None), False),
        (NOTEBOOK, runs("/usr/bin/python3.11", "-m", "ipykernel_launcher"), True),
        (NOTEBOOK, runs("/usr/bin/python3.11", "train.py"), False),
        (NOTEBOOK, runs("/usr/bin/perl", "-m", "ipykernel_launcher"), False),
        (NOTEBOOK, used_by(a_process(executable="/usr/bin/python3", command=None)), False),
        (CommandRule(("/a/?",)), runs("/a/*"), True),
        (CommandRule(("/a/b",)), runs("/a/*"), False),  # the text of a user is no pattern
    ],
)
def test_a_program_is_found_by_its_path_and_its_arguments(rule, device, finds):
    whys = [finding.why for finding in found(rule, device)]

    assert whys == [f"runs {device.processes[0].executable} and uses 10.0GiB"] * finds


def test_the_text_of_a_user_may_be_endless():
    rule = CommandRule(("/usr/bin/python3",), arguments=("*" + "a*" * 200 + "b",))

    assert found(rule, runs("/usr/bin/python3", "a" * 2_000_000)) == []


def subjects(findings: list[Finding]) -> list[object]:
    return sorted((finding.subject.claim or finding.subject.pid for finding in findings), key=str)


def test_the_newest_claims_are_in_excess_and_the_oldest_never():
    devices = [a_device(index) for index in range(5)]
    claims = [
        a_claim("new", devices[4], age=100),
        a_claim("old", devices[0], devices[1], age=9000),
        a_claim("middle", devices[2], devices[3], age=5000),
    ]

    assert subjects(found(QuotaRule(devices=5), *devices, claims=claims)) == []
    assert subjects(found(QuotaRule(devices=4), *devices, claims=claims)) == ["new"]
    assert subjects(found(QuotaRule(devices=3), *devices, claims=claims)) == ["middle", "new"]
    assert found(QuotaRule(devices=4), *devices, claims=claims)[0].why == "alice has 5 GPUs, the limit is 4"


def test_an_action_means_the_processes_of_the_claim_in_excess_and_no_others():
    old, new = a_process(2, start_time=1000.0), a_process(3, start_time=9950.0)
    devices = [used_by(old, index=0), used_by(new, index=1)]
    claims = [a_claim("old", devices[0], age=9000), a_claim("new", devices[1], age=100)]

    assert pids(found(QuotaRule(devices=1), *devices, claims=claims)) == [3]
    assert pids(found(QuotaRule(claims=1), *devices, claims=claims)) == [3]


@pytest.mark.parametrize("own_devices", [0, 1])
def test_a_user_who_copies_the_id_of_a_claim_has_none_of_its_processes_accused(own_devices):
    devices = [used_by(a_process(2, **ALICE), index=0), a_device(1)]
    original = a_claim("c0ffee", devices[0], age=9000)
    copied = [a_claim("c0ffee", *devices[1:][:own_devices], age=100, **BOB), a_claim("b", age=200, **BOB)]

    accused = found(QuotaRule(claims=1), *devices, claims=[original, *copied])
    assert [(finding.subject.user, finding.processes) for finding in accused] == [("bob", ())]


EACH_ON_ONE = [used_by(a_process(2 + index, start_time=1000.0 + index), index=index) for index in range(3)]
OF_TWO = [used_by(a_process(2, **ALICE), index=0), used_by(a_process(3, **BOB), index=1)]
OF_ALICE = [
    a_claim("pair", a_device(0), a_device(1), age=9000),
    a_claim("one", a_device(2), age=100),
]
OF_UNKNOWN_AGE = a_claim_record(a_device(0), id="x", since=None, **ALICE)


@pytest.mark.parametrize(
    ("rule", "devices", "claims", "excess"),
    [
        (QuotaRule(devices=2), EACH_ON_ONE, [], [4]),
        (QuotaRule(devices=3), EACH_ON_ONE, [], []),
        (QuotaRule(claims=0), EACH_ON_ONE, [], []),
        (QuotaRule(claims=1), [a_device(0), a_device(1)], [OF_UNKNOWN_AGE, a_claim("y", a_device(1), age=9000)], ["y"]),
        (QuotaRule(devices=1), OF_TWO, [], []),
        (QuotaRule(devices=0), OF_TWO, [], [2, 3]),
        (QuotaRule(devices=parse_device_amount("67%")), EACH_ON_ONE, [], [4]),
        (QuotaRule(devices=parse_device_amount("66%")), EACH_ON_ONE, [], [3, 4]),
        (QuotaRule(devices=parse_device_amount("1%")), EACH_ON_ONE, [], [3, 4]),
        (QuotaRule(devices=parse_device_amount("5%")), EACH_ON_ONE, [], [3, 4]),
        (QuotaRule(devices=parse_device_amount("0%")), EACH_ON_ONE, [], [2, 3, 4]),
        (QuotaRule(devices=1, per="claim"), [a_device(index) for index in range(3)], OF_ALICE, ["pair"]),
    ],
    ids=[
        "processes without a claim", "as many as allowed", "none is a claim", "the oldest is of unknown age",
        "each user has one", "each user has none", "a share: 2.01 of 3", "a share: 1.98 of 3", "a share has one",
        "any share has one", "no share", "each claim by itself",
    ],
)  # fmt: skip
def test_what_is_in_excess(rule, devices, claims, excess):
    assert subjects(found(rule, *devices, claims=claims)) == excess


def test_roots_processes_and_locks_without_a_record_are_nobodys():
    claims = [a_claim_record(id="?", uid=-1, user="?")]

    assert found(QuotaRule(devices=0), used_by(a_process(uid=0, user="root")), claims=claims) == []


def test_a_quota_below_0_is_refused():
    with pytest.raises(InvalidRequest, match="below 0 makes no sense"):
        QuotaRule(devices=-1)


@pytest.mark.parametrize("keys", [{"claims": 1}, {"gpu_hours": HOUR, "within": HOUR}, {"shared_by": ("lab",)}])
def test_a_quota_of_each_claim_knows_devices_and_memory_only(keys):
    with pytest.raises(InvalidRequest, match="per: claim knows devices and memory only"):
        QuotaRule(**{"devices": 1, **keys}, per="claim")


def test_a_group_shares_a_quota():
    members = [a_process(2 + index, uid=1001 + index, start_time=100.0 + index) for index in range(3)]
    devices = [used_by(process, index=index) for index, process in enumerate(members)]
    groups = {1001: frozenset({"lab"}), 1002: frozenset({"lab"}), 1003: frozenset({"other"})}

    [finding] = found(QuotaRule(devices=1, shared_by=("lab",)), *devices, groups=groups)
    assert (finding.subject.pid, finding.why) == (3, "group lab has 2 GPUs, the limit is 1")


LAB = {1001: frozenset({"lab"}), 1002: frozenset({"lab"})}


def test_a_member_of_a_group_puts_no_other_in_excess_by_records_of_nothing():
    """They cost nothing: a hundred of them left the others of the group no claim at all."""
    own = a_claim("own", a_device(0), age=100, **BOB)
    empty = [replace(a_claim(f"{number}", a_device(0), age=9000), devices=()) for number in range(100)]
    shared = QuotaRule(claims=1, shared_by=("lab",))

    assert found(shared, a_device(0), claims=[own, *empty], groups=LAB) == []
    assert subjects(found(shared, a_device(0), a_device(1), claims=[own, *OF_ALICE[:1]], groups=LAB)) == ["own"]


def test_no_lock_without_a_record_puts_anything_else_of_its_user_in_excess():
    """Users locked a GPU and sent the lock to a program of another one: it was over the limit, and lost its job."""
    devices = [
        a_device(0, processes=(a_process(2, start_time=9000.0),), memory_used=10 * GIB),
        a_device(1),
        a_device(2),
    ]
    job = a_claim("job", devices[1], age=10)
    sent = [replace(a_claim(f"no-record-{at}", devices[at], age=9000), pid=None) for at in (0, 2)]

    accused = found(QuotaRule(devices=2), *devices, claims=[job, *sent[1:]])
    assert subjects(accused) == ["no-record-2"]
    accused = found(QuotaRule(devices=2), *devices, claims=[job, *sent])
    assert subjects(accused) == ["no-record-2"], "nothing computes under it"


def test_of_a_quota_for_each_claim_it_is_said_that_it_is_one_process_which_has_no_claim():
    devices = [used_by(a_process(2, **ALICE), index=index) for index in (0, 1)]

    whys = {finding.why for finding in found(QuotaRule(devices=1, per="claim"), *devices)}
    assert whys == {"one process of alice has 2 GPUs, the limit is 1"}


def test_a_process_that_began_long_ago_and_comes_to_a_gpu_now_is_no_older_than_who_was_there():
    """A process that had only slept so far came to a GPU, and another member of the group was in excess."""
    sleeper, there = a_process(2, start_time=1.0, **ALICE), a_process(3, start_time=9000.0, **BOB)
    before = [a_device(0, processes=()), used_by(there, index=1)]
    devices, arrivals = [used_by(sleeper, index=0), used_by(there, index=1)], Arrivals()
    for shown, clock in ((before, 9990.0), (devices, 10_000.0)):
        arrivals.look(a_snapshot(*shown, clock=clock))

    rule = QuotaRule(devices=1, shared_by=("lab",))
    assert pids(found(rule, *devices, groups=LAB, arrivals=arrivals)) == [2]
    assert pids(found(rule, *devices, groups=LAB)) == [3], "where nothing is known of when they came"


def test_of_claims_that_were_first_seen_together_the_time_of_the_record_tells_the_newer_one():
    same = [replace(a_claim(name, a_device(), age=100), written=NOW - 200 + at) for at, name in enumerate("cab")]

    assert subjects(found(QuotaRule(claims=2), a_device(), claims=same)) == ["b"]


def test_a_member_of_two_groups_is_found_once():
    groups = {1001: frozenset({"lab", "course"})}

    assert len(found(QuotaRule(devices=0, shared_by=("lab", "course")), used_by(a_process()), groups=groups)) == 1


def test_a_share_of_the_memory_is_a_share_of_all_devices():
    devices = [
        used_by(a_process(2, memory_used=30 * GIB, start_time=100.0), index=0),
        used_by(a_process(3, memory_used=20 * GIB, start_time=200.0), index=1),
    ]

    assert found(QuotaRule(memory=32.0), *devices) == []
    [finding] = found(QuotaRule(memory=25.0), *devices)
    assert (finding.subject.pid, finding.why) == (
        3,
        "alice uses 50.0GiB, 31.2% of the memory of all GPUs, 25% is allowed",
    )
    assert found(QuotaRule(memory=25.0), *devices, a_device(2, memory_total=None, memory_used=0)) == []
    assert TOTAL == 80 * GIB


def test_gpu_hours_in_a_window_put_the_newest_in_excess():
    rule = QuotaRule(gpu_hours=100 * HOUR, within=7 * 24 * HOUR)
    devices = [used_by(a_process(2, start_time=100.0), index=0), used_by(a_process(3, start_time=200.0), index=1)]

    def used(hours: float):
        return found(rule, *devices, gpu_seconds={1001: {7 * 24 * HOUR: hours * HOUR}})

    assert used(100) == []
    assert subjects(used(130)) == [3]
    assert used(130)[0].why == "alice had 130 GPU-hours in 7d, the limit is 100"
    assert found(rule, *devices, gpu_seconds={}) == []
    assert found(rule, *devices, gpu_seconds={1001: {24 * HOUR: 1e9}}) == []
    assert found(rule, gpu_seconds={1001: {7 * 24 * HOUR: 1e9}}) == []


def test_gpu_time_is_asked_for_in_the_windows_in_which_a_quota_counts_it():
    week, month = QuotaRule(gpu_hours=HOUR, within=7 * 24 * HOUR), QuotaRule(gpu_hours=HOUR, within=30 * 24 * HOUR)
    policies = [a_policy(name="a", rules=(week, QuotaRule(devices=2))), a_policy(name="b", rules=(month, week))]

    assert set(needs_of(policies).gpu_seconds) == {7 * 24 * HOUR, 30 * 24 * HOUR}
    assert needs_of([a_policy()]).gpu_seconds == ()


def test_a_process_on_two_devices_has_two_devices_but_is_one():
    process = a_process(2)

    devices = [used_by(process, index=0), used_by(process, index=1)]

    [finding] = found(QuotaRule(devices=1), *devices)
    assert finding.processes == (process,)
    [finding] = found(QuotaRule(devices=1), *devices, claims=[a_claim("x", *devices, age=9000)])
    assert (finding.subject.claim, finding.processes) == ("x", (process,))


def test_the_claims_of_a_denied_user_are_found_where_no_process_uses_them():
    rule, mine = UsersRule(deny=(1001,), claims=True), a_claim_record(**ALICE)
    busy = used_by(a_process(2, **ALICE))

    [finding] = found(rule, a_device(), claims=[mine])
    assert (finding.subject.kind, finding.subject.claim, finding.processes) == ("claim", "a1b2c3", ())
    assert finding.why == "alice is denied and has a claim"
    assert [one.subject.kind for one in found(rule, busy, claims=[mine])] == ["process"]
    assert found(UsersRule(deny=(1001,)), a_device(), claims=[mine]) == []
    assert found(UsersRule(deny=(1002,), claims=True), a_device(), claims=[mine]) == []


@pytest.mark.parametrize(
    "device",
    [
        a_device(processes=None),
        a_device(processes=(), processes_plausible=False),
        a_device(processes=(a_process(9, uid=0, user="root"),)),
        a_device(processes=(a_process(9, uid=None),)),
        a_device(3),
    ],
    ids=["no list", "garbled", "root's, perhaps a container of it", "of an unknown user", "on another GPU alone"],
)
def test_a_claim_that_may_be_used_is_not_found_as_unused(device):
    assert found(UsersRule(deny=(1001,), claims=True), device, claims=[a_claim_record(a_uuid(0), **ALICE)]) == []
