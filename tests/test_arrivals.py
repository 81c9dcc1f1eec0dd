"""Who came first: an older process is no trespasser on a claim that is made later, whatever that says of its age."""

from dataclasses import replace

import pytest
from builders import GIB, MIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot, a_uuid, pids
from ladders import a_policy

from gpuguard.model import ClaimRecord, Device, Gap, GpuProcess, ProcessStat, Snapshot
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.usage import TrespassRule
from gpuguard.policies.view import Arrivals, RuleView

START, UNIX = 10_000.0, 1_700_000_000.0  # of the first look: CLOCK_BOOTTIME, and the unix time that it is then
GPU = a_uuid(0)
BOBS = a_process(2, uid=1002, user="bob", start_time=9_000.0)
A_NEWCOMER = a_process(3, uid=1002, user="bob", start_time=10_015.0)
ALICE = a_claim_record(id="a", uid=1001, user="alice", pid=None, since=UNIX)
NO_CLAIMS = Gap(None, "claims", "no permission")


def a_list(*processes: GpuProcess, **fields: object) -> Device:
    return a_device(memory_used=50 * GIB, processes=processes, **fields)


UNREADABLE, GARBLED = a_list(processes_plausible=False), replace(a_device(), processes=None)
Look = tuple[Device | tuple[Device, ...], tuple[ClaimRecord, ...]]


def seen(*looks: Look, gaps: dict[int, Gap] | None = None) -> tuple[Arrivals, Snapshot]:
    """What is known after these looks, ten seconds apart, and the last of them."""
    arrivals, snapshot = Arrivals(), a_snapshot()
    for number, (shown, claims) in enumerate(looks):
        devices = shown if isinstance(shown, tuple) else (shown,)
        times = {"clock": START + 10 * number, "taken_at": UNIX + 10 * number}
        gap = (gaps or {}).get(number)
        snapshot = a_snapshot(*devices, claims=() if gap else claims, gaps=(gap,) if gap else (), **times)
        arrivals.look(snapshot)
    return arrivals, snapshot


def trespassers(*looks: Look, gaps: dict[int, Gap] | None = None) -> list[int]:
    """Whom the rule finds at the last of these looks."""
    arrivals, snapshot = seen(*looks, gaps=gaps)
    return pids(list(TrespassRule().check(RuleView(snapshot, arrivals=arrivals))))


@pytest.mark.parametrize("since", [UNIX - 86400, UNIX + 86400, None], ids=["old", "new", "without a record"])
def test_who_was_there_before_the_claim_is_no_trespasser_and_who_came_later_is_one(since):
    claim = replace(ALICE, since=since)
    before, after = (a_list(BOBS), ()), (a_list(BOBS, A_NEWCOMER), (claim,))

    assert trespassers(before, (a_list(BOBS), (claim,)), after, after) == [3]


def test_a_child_of_who_was_there_first_is_no_trespasser_either_while_that_uses_the_gpu():
    """Somebody claimed the GPU of a running job, and each process that it started from then on was ended."""
    known, snapshot = seen((a_list(BOBS), ()), (a_list(BOBS), (ALICE,)), (a_list(BOBS, A_NEWCOMER), (ALICE,)))
    child_of = {pid: {3: ProcessStat(8, "S"), 8: ProcessStat(pid, "S")} for pid in (BOBS.pid, 9)}
    found = [
        pids([*TrespassRule().check(RuleView(snapshot, arrivals=known, seen=stats))]) for stats in child_of.values()
    ]

    assert found == [[], [3]]
    known.look(gone := a_snapshot(a_list(A_NEWCOMER), claims=(ALICE,)))
    assert pids([*TrespassRule().check(RuleView(gone, arrivals=known, seen=child_of[BOBS.pid]))]) == [3]


NOBODY, BOB, BOTH, NEW = a_list(), a_list(BOBS), a_list(BOBS, A_NEWCOMER), a_list(A_NEWCOMER)
UNKNOWN = a_list(replace(BOBS, start_time=None, uid=None))
HERS, SINCE_BOOT, OLD = (ALICE,), (replace(ALICE, since=UNIX - START + 0.5),), (replace(ALICE, since=UNIX - 10),)
WHOLE = a_device(mig_mode=False, processes=(BOBS,))
DIVIDED = replace(WHOLE, mig_mode=True, processes=())
TWO = a_device(0, processes=()), a_device(1, processes=(BOBS,), memory_used=50 * GIB)
LOOKS: dict[str, tuple[list[Look], list[int]]] = {
    "on the first list with the claim, perhaps before it": ([(NOBODY, ()), (NOBODY, ()), (NEW, HERS), (NEW, HERS)], []),
    "after the first list with the claim": ([(NOBODY, ()), (NOBODY, HERS), (NEW, HERS)], [3]),
    "not identified when the claim came": ([(UNKNOWN, ()), (UNKNOWN, HERS), (BOTH, HERS)], [3]),
    "not identified, on a claim as old as the boot": ([(UNKNOWN, SINCE_BOOT), (BOB, SINCE_BOOT)], []),
    "there first, and missed by the list for a while": ([(BOB, ()), (NOBODY, HERS), (NOBODY, HERS), (BOB, HERS)], []),
    "after a restart, on a claim that is younger than the process": ([(NOBODY, OLD), (BOB, OLD)], [2]),
    "there before a gap in which the claim came": ([(BOB, ()), (UNREADABLE, ()), (UNREADABLE, HERS), (BOB, HERS)], []),
    "on a claim that was given up and taken again": ([(NOBODY, HERS), (BOB, ()), (BOB, HERS)], []),
    "on one more device of a claim": (
        [(TWO, HERS), (TWO, (replace(ALICE, devices=tuple(device.uuid for device in TWO)),))], []
    ),
    "with a pid that was there first": ([(BOB, ()), (BOB, HERS), (a_list(replace(A_NEWCOMER, pid=2)), HERS)], [2]),
    "older than the claim, on an instance that is new": (
        [(WHOLE, ()), ((DIVIDED, a_mig_instance(DIVIDED, processes=(BOBS,))), HERS)], []
    ),
}  # fmt: skip


@pytest.mark.parametrize(("looks", "found"), LOOKS.values(), ids=LOOKS)
def test_a_trespasser_has_certainly_come_after_the_claim(looks, found):
    assert trespassers(*looks) == found


@pytest.mark.parametrize(
    ("since", "found"), [(UNIX - 900, []), (UNIX - 2000, [2]), (None, [])], ids=["later", "earlier", "no record"]
)
def test_at_the_first_look_of_all_the_start_of_the_process_and_the_age_of_the_claim_tell(since, found):
    first = (a_list(BOBS), (replace(ALICE, since=since),))  # bob's began 1000 s ago

    assert trespassers(first, first) == found


@pytest.mark.parametrize("unseen", [UNREADABLE, GARBLED], ids=["unreadable", "garbled"])
def test_a_list_that_cannot_be_believed_is_no_look(unseen):
    """In the gap the claim came; who began before it was seen may have been there first, who began later was not."""
    later = a_process(4, uid=1002, start_time=10_025.0)
    looks = [(a_list(), ()), (unseen, ()), (unseen, (ALICE,)), (a_list(BOBS, A_NEWCOMER, later), (ALICE,))]

    assert trespassers(*looks) == [4]


def test_claims_that_cannot_be_read_for_a_while_are_no_newer_for_it():
    claimed, intruded = (a_list(), (ALICE,)), (a_list(A_NEWCOMER), (ALICE,))

    assert trespassers(claimed, claimed, intruded, intruded, gaps={2: NO_CLAIMS}) == [3]


@pytest.mark.parametrize("meanwhile", [{"hidden": True}, {}], ids=["held by several users", "of an unknown owner"])
def test_a_claim_that_was_none_meanwhile_is_a_new_one(meanwhile):
    """Its user could make it none, wait until another user computed there, and make it the old claim again."""
    claimed, nobodys = (a_list(), (ALICE,)), replace(ALICE, id="no-record-GPU-00000000", uid=-1, **meanwhile)

    assert trespassers(claimed, claimed, (a_list(BOBS), (nobodys,)), (a_list(BOBS), (ALICE,))) == []


@pytest.mark.parametrize(
    "again",
    [replace(ALICE, id="b"), replace(ALICE, uid=1003, user="carol"), replace(ALICE, slots=(f"{GPU}.slot1",))],
    ids=["another id", "another owner", "another lock"],
)
def test_a_claim_is_no_older_than_what_it_is(again):
    """A record that is written anew, renamed or copied says nothing of when its lock was taken."""
    old = (a_list(), (ALICE,))

    assert trespassers(old, (a_list(BOBS), ()), (a_list(BOBS), (again,))) == []
    assert trespassers(old, (a_list(BOBS), (ALICE,)), (a_list(BOBS), (again,))) == []


def test_of_two_claims_the_trespass_is_on_the_older_one():
    hers, carols = replace(ALICE, slots=(f"{GPU}.slot0",)), replace(ALICE, id="c", uid=1003, user="carol")
    looks = [(a_list(), ()), (a_list(), (hers,)), (a_list(BOBS), (hers,)), (a_list(BOBS), (hers, carols))]
    arrivals, snapshot = seen(*looks)
    [finding] = TrespassRule().check(RuleView(snapshot, arrivals=arrivals))

    assert finding.why == "uses 10.0GiB of a GPU that alice has claimed"


@pytest.mark.parametrize("kind", ["graphics", "compute+graphics"])
@pytest.mark.parametrize("memory", [25 * MIB, 40 * GIB, None])
def test_what_was_spared_as_a_desktop_then_is_judged_from_the_moment_it_is_more(memory, kind):
    desktop = replace(BOBS, kind=kind, memory_used=memory)
    grown = replace(desktop, memory_used=40 * GIB)
    looks = [(a_list(desktop), ()), (a_list(desktop), (ALICE,)), (a_list(grown), (ALICE,))]

    assert trespassers(*looks) == ([2] if memory == 25 * MIB else [])


@pytest.mark.parametrize("whole", [True, False], ids=["of the GPU", "of the instance"])
def test_on_an_instance_the_claim_of_the_gpu_and_that_of_the_instance_count(whole):
    parent = a_device(mig_mode=True, processes=())
    empty, used = a_mig_instance(parent, processes=()), a_mig_instance(parent, processes=(BOBS,))
    claim = replace(ALICE, devices=((parent if whole else empty).uuid,))

    assert trespassers(((parent, used), ()), ((parent, used), (claim,))) == []
    assert trespassers(((parent, empty), (claim,)), ((parent, used), (claim,))) == [2]


def arrived(process: GpuProcess, *lists: Device) -> float | None:
    return seen(*((device, ()) for device in lists))[0].arrived(GPU, (process.pid, process.start_time or 0.0))


@pytest.mark.parametrize(
    ("lists", "clock"),
    [
        ([a_list(BOBS)], None),  # the first list had it already
        ([a_list(), a_list(BOBS), a_list(BOBS)], START + 10),
        ([UNREADABLE, a_list(BOBS)], None),
        ([a_list(), UNREADABLE, a_list(BOBS)], START + 20),
        ([a_list(), a_list(BOBS), UNREADABLE, a_list(BOBS)], START + 10),
        ([a_list(), a_list(BOBS), a_list(), a_list(BOBS)], START + 30),
        ([a_list(), a_list(replace(BOBS, start_time=1.0)), a_list(BOBS)], None),  # its pid was there
        ([a_list(), a_list(replace(BOBS, start_time=None)), a_list(BOBS)], None),  # it was not identified
        ([a_list(), a_list(BOBS), a_list(replace(BOBS, start_time=None)), a_list(BOBS)], None),
        ([a_list(), a_list(BOBS), a_list()], None),
    ],
)
def test_an_arrival_is_proven_by_a_list_without_the_pid_and_all_lists_since(lists, clock):
    assert arrived(BOBS, *lists) == clock


@pytest.mark.parametrize(("start_time", "clock"), [(START - 0.03, START + 10), (START - 0.01, None), (START + 5, None)])
def test_who_began_after_the_last_list_without_them_may_have_the_pid_of_another(start_time, clock):
    """Of one who came to the device in between, ended, and is still listed, because a child of theirs lives."""
    process = replace(BOBS, start_time=start_time)

    assert arrived(process, a_list(), a_list(process), a_list(process)) == clock


def test_the_engine_goes_by_it_and_begins_again_with_the_next_boot():
    policy, memory, found = a_policy(rules=(TrespassRule(),), hold=0.0), EngineMemory(), []
    alone, both, old = a_list(BOBS), a_list(BOBS, A_NEWCOMER), replace(ALICE, since=UNIX - 10 * 86400)
    looks = [(START, alone, ()), (START + 10, alone, (old,)), (START + 20, both, (old,)), (START - 500, alone, (old,))]
    for clock, device, claims in looks:
        evaluate(a_snapshot(device, claims=claims, clock=clock, taken_at=UNIX), [policy], memory)
        found.append([state.subject.pid for state in memory.states[policy.name].values()])

    assert found == [[], [], [3], [2]]
