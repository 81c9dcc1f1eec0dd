"""A job is one: counted once and ended whole.  Without a claim no process ends that no rule has found."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process
from daemons import DaemonUnderTest, somebodys
from guard_scene import Scene, a_child, a_scene, started
from ladders import START, Devices, Processes, Watch, a_policy, busy, kinds, pids

from gpuguard.enforcement import actions
from gpuguard.enforcement.guard_limits import ActionLimits, PastAction
from gpuguard.model import Device, GpuProcess, ProcessStat
from gpuguard.policies.engine import may_end_with_job
from gpuguard.policies.policy import Exemption, KeptMark, Scope, Step
from gpuguard.policies.thresholds import ProcessesRule
from gpuguard.policies.usage import UnclaimedRule
from gpuguard.policies.view import JobMember, RuleView, alone, jobs_of, member_of
from gpuguard.procfs import process_facts

SHELL, LAUNCHER, INIT = 10, 20, 1
PYTHON = "/usr/bin/python3"
AROUND = {
    SHELL: ProcessStat(INIT, "S", 1.0, session=SHELL, group=SHELL, is_shell=True),
    LAUNCHER: ProcessStat(SHELL, "S", 900.0, session=SHELL, group=LAUNCHER),
}

Parents = dict[int, tuple[int, int | None]]  # pid -> its parent, and its process group


def rank(pid: int, *, start: float = 1000.0, uid: int = 1001, gib: int = 10, program: str = PYTHON) -> Any:
    return a_process(pid, start_time=start, uid=uid, user=f"u{uid}", memory_used=gib * GIB, executable=program)


def seen_as(process: Any, parent: int, group: int | None = None) -> dict[int, ProcessStat]:
    own = process.pid if group is None else group
    return {process.pid: ProcessStat(parent, "S", process.start_time, group=own, session=own)}


def view_of(clock: float, devices: list[Device], parents: Parents, **fields: Any) -> RuleView:
    """A sample whose processes have these parents and process groups."""
    seen = dict(AROUND)
    for process in (row for device in devices for row in device.processes or ()):
        seen |= seen_as(process, *parents.get(process.pid, (INIT, None)))
    return RuleView(busy(clock, *devices, **fields), seen=seen)


def number_of_jobs(parents: Parents, *processes: Any, **fields: Any) -> int:
    view = view_of(0, [a_device(processes=processes)], parents, **fields)
    return len(set(jobs_of(member_of(process, view) for process in processes).values()))


ONE, OTHER = rank(101), rank(102)
OF_A_LAUNCHER: Parents = {101: (LAUNCHER, None), 102: (LAUNCHER, None)}
OF_A_SHELL: Parents = {101: (SHELL, 101), 102: (SHELL, 102)}
CLAIM = a_claim_record(holders=(LAUNCHER,), pid=LAUNCHER)
JOBS: dict[str, tuple[Parents, list[Any], tuple[Any, ...], int]] = {
    "processes of one group": ({101: (LAUNCHER, 101), 102: (101, 101)}, [ONE, OTHER], (), 1),
    "processes of one group, of two users": (
        {101: (SHELL, 77), 102: (SHELL, 77)}, [ONE, rank(102, uid=1002)], (), 2
    ),
    "ranks to which a launcher gives sessions of their own": (
        {101 + place: (LAUNCHER, None) for place in range(8)},
        [rank(101 + place, start=1000.0 + place) for place in range(8)],
        (),
        1,
    ),
    "a minute later": (OF_A_LAUNCHER, [ONE, rank(102, start=1061.0)], (), 2),
    "another program": (OF_A_LAUNCHER, [ONE, rank(102, program="/usr/bin/java")], (), 2),
    "another user": (OF_A_LAUNCHER, [ONE, rank(102, uid=1002)], (), 2),
    "two of one shell": (OF_A_SHELL, [ONE, OTHER], (), 2),
    "two sessions of one shell": ({101: (SHELL, None), 102: (SHELL, None)}, [ONE, OTHER], (), 2),
    "of no parent": ({101: (INIT, None), 102: (INIT, None)}, [ONE, OTHER], (), 2),
    "of one not seen": ({101: (999, None), 102: (999, None)}, [ONE, OTHER], (), 2),
    "a claim, and a notebook beside it": (
        {101: (LAUNCHER, 101), 102: (101, 102), 103: (SHELL, 103)},
        [ONE, rank(102, start=5000.0), rank(103)],
        (CLAIM,),
        2,
    ),
    "a claim within a claim": (
        {101: (LAUNCHER, 101), 102: (SHELL, 101)},
        [ONE, OTHER],
        (a_claim_record(holders=(SHELL,)), a_claim_record(id="inner", holders=(LAUNCHER,))),
        2,
    ),
    "what only may belong to a claim": (OF_A_SHELL, [ONE, OTHER], (a_claim_record(holders=(555,), pid=555),), 2),
}  # fmt: skip


@pytest.mark.parametrize(("parents", "processes", "claims", "number"), JOBS.values(), ids=JOBS)
def test_processes_are_one_job_by_their_claim_their_group_or_their_launcher(parents, processes, claims, number):
    assert number_of_jobs(parents, *processes, claims=claims) == number


def test_a_parent_that_leads_a_session_starts_jobs_of_their_own():
    """A server of notebooks under systemd, a multiplexer, a service."""
    view = view_of(0, [a_device(processes=(rank(101), rank(102)))], {101: (30, None), 102: (30, None)})
    view = replace(view, seen=dict(view.seen) | {30: ProcessStat(INIT, "S", 5.0, session=30, group=30)})

    assert len(set(jobs_of(member_of(one, view) for one in view.snapshot.devices[0].processes or ()).values())) == 2


def test_a_process_whose_pid_is_another_one_by_now_is_alone():
    view = view_of(0, [a_device(processes=(rank(101),))], {101: (SHELL, 5)})
    seen = {101: ProcessStat(SHELL, "S", 2000.0, group=5, session=5)}

    for known in (seen, {}):
        assert member_of(rank(101), replace(view, seen=known)) == alone((101, 1000.0))


def test_jobs_that_touch_become_one():
    """A launcher's ranks, one of which has a child in its group."""
    first, second = JobMember((1, 0.0), "group 1", "python by 9"), JobMember((2, 1.0), "group 2", "python by 9")
    child, other = JobMember((3, 500.0), "group 2"), JobMember((4, 100.0), "group 4", "python by 9")

    assert len(set(jobs_of((first, second, child, other)).values())) == 2
    assert jobs_of((first, second, child))[first] == jobs_of((first, second, child))[child]


def test_a_process_stays_in_its_job_when_its_claim_has_ended_or_its_group_is_another_one():
    before, after, other = (
        JobMember((1, 5.0), "claim a of 1"),
        JobMember((1, 5.0), "group 7"),
        JobMember((2, 5.0), "group 7"),
    )

    assert len(set(jobs_of((before, after, other)).values())) == 1
    nobodys = JobMember((0, 0.0), "the claim x"), JobMember((0, 0.0), "the claim y")
    assert len(set(jobs_of(nobodys).values())) == 2


# What the engine makes of it.


def eight_ranks(gib: int = 10) -> tuple[list[Device], Parents]:
    """A job of eight ranks on four GPUs."""
    ranks = [rank(101 + place, gib=gib) for place in range(8)]
    devices = [a_device(n, processes=ranks[2 * n : 2 * n + 2], memory_used=2 * gib * GIB) for n in range(4)]
    devices = [replace(device, processes=tuple(device.processes or ())) for device in devices]
    return devices, {one.pid: (LAUNCHER, None) for one in ranks}


def at_its_end(policy: Any, devices: list[Device], parents: Any, **fields: Any) -> Any:
    watch = Watch(policy)
    for clock in (0, 10, 20, 30):
        judgement = watch.sees(view_of(clock, devices, parents, **fields))
    return judgement


def test_a_job_of_eight_ranks_on_four_gpus_is_ended_whole_at_once():
    judgement = at_its_end(a_policy("terminate", rules=(UnclaimedRule(),), at_most_jobs=1), *eight_ranks())

    assert (pids(judgement.verdicts), kinds(judgement)) == (set(range(101, 109)), set())


def test_processes_are_counted_where_the_file_says_so():
    judgement = at_its_end(a_policy("terminate", rules=(UnclaimedRule(),), at_most_processes=2), *eight_ranks())

    assert (len(pids(judgement.verdicts)), kinds(judgement)) == (2, {"waiting"})


def test_another_job_on_the_same_gpu_waits_until_the_first_is_seen_to_have_ended():
    devices, parents = eight_ranks()
    stranger = rank(200, uid=1002, gib=1)
    devices[0] = replace(devices[0], processes=(*(devices[0].processes or ()), stranger), memory_used=21 * GIB)
    watch = Watch(a_policy("terminate", rules=(UnclaimedRule(),), cooldown=1000))
    for clock in (0, 10, 20, 30):
        first = watch.sees(view_of(clock, devices, parents))
    left = [replace(device, processes=tuple(row for row in device.processes or () if row == stranger), memory_used=GIB)
            for device in devices]  # fmt: skip

    assert pids(first.verdicts) == set(range(101, 109))
    assert pids(watch.sees(view_of(40, left, parents)).verdicts) == {200}


def test_its_effect_is_seen_when_all_of_it_is_gone():
    devices, parents = eight_ranks()
    stranger = rank(200, uid=1002, gib=1)
    devices[0] = replace(devices[0], processes=(*(devices[0].processes or ()), stranger), memory_used=21 * GIB)
    watch = Watch(a_policy("terminate", rules=(UnclaimedRule(),), cooldown=1000))
    for clock in (0, 10, 20, 30):
        watch.sees(view_of(clock, devices, parents))
    half = [replace(devices[0], processes=(rank(102), stranger), memory_used=11 * GIB), *devices[1:]]

    assert 200 not in pids(watch.sees(view_of(40, half, parents)).verdicts)


ORDERS = {
    "newest": 303,
    "oldest": 301,
    "most_memory": 302,
    "least_used": 304,
    "most_power": 305,
}


@pytest.mark.parametrize(("order", "first"), ORDERS.items())
def test_which_job_comes_first_is_sayable(order: Any, first: int):
    facts: dict[int, dict[str, Any]] = {
        301: {"start": 100.0}, 302: {"gib": 60}, 303: {"start": 3000.0}, 304: {}, 305: {},
    }  # fmt: skip
    devices = [
        a_device(n, processes=(rank(pid, **how),), memory_used=60 * GIB, utilization=0.0 if pid == 304 else 90.0,
                 power_draw=600.0 if pid == 305 else 100.0)
        for n, (pid, how) in enumerate(facts.items())
    ]  # fmt: skip
    policy = a_policy("terminate", at_most_jobs=1, order=order)

    assert pids(at_its_end(policy, devices, {pid: (SHELL, pid) for pid in facts}).verdicts) == {first}


def test_no_job_is_moved_out_of_the_way_by_an_old_or_a_new_process_beside_it():
    """Beside a job that came last there is an old process of its group, found as well."""
    newcomer, decoy, other = rank(401, start=5000.0), rank(402, start=10.0), rank(403, start=2000.0, uid=1002)
    devices = [a_device(n, processes=(one,)) for n, one in enumerate((newcomer, decoy, other))]
    policy = a_policy("terminate", at_most_jobs=1, order="newest")

    assert pids(at_its_end(policy, devices, {401: (SHELL, 401), 402: (SHELL, 401)}).verdicts) == {401, 402}


def test_a_rule_about_a_number_means_the_newest_jobs_and_no_more_than_are_too_many():
    kernels = [rank(501, start=1000.0), rank(502, start=2000.0), rank(503, start=3000.0)]
    policy = a_policy("terminate", rules=(ProcessesRule(above=2, per="user"),))
    server = {one.pid: (LAUNCHER, None) for one in kernels}

    assert pids(at_its_end(policy, [a_device(processes=tuple(kernels))], server).verdicts) == {503}


def test_a_job_that_brings_the_number_over_the_limit_is_meant_whole():
    old, ranks = rank(501, start=1000.0), [rank(511, start=2000.0), rank(512, start=2000.0)]
    policy = a_policy("terminate", rules=(ProcessesRule(above=2, per="user"),))
    parents = {501: (SHELL, 501), 511: (SHELL, 511), 512: (SHELL, 511)}

    assert pids(at_its_end(policy, [a_device(processes=(old, *ranks))], parents).verdicts) == {511, 512}


def test_two_jobs_of_one_shell_of_which_one_is_guilty():
    guilty, innocent = rank(601, gib=60), rank(602, gib=1)
    policy = a_policy("terminate", rules=(UnclaimedRule(min_memory=20 * GIB),))
    parents = {601: (SHELL, 77), 602: (SHELL, 77)}  # a script without job control: even of one group

    assert pids(at_its_end(policy, [a_device(processes=(guilty, innocent))], parents).verdicts) == {601}


# Of a claimed job the rule has found a part.

CLAIM = a_claim_record(holders=(LAUNCHER,), pid=LAUNCHER)
HOGS = a_policy("warn", "terminate", "kill", rules=(Processes(above=50 * GIB),))


def ended(policy: Any, *ranks: Any, claims: Any = (CLAIM,), parent: int = LAUNCHER, kept: Any = None) -> list[Any]:
    """The processes that each verdict of the terminate means, as (found, rest), with each rank on a GPU of its own."""
    devices = [a_device(n, processes=(one,), memory_used=60 * GIB) for n, one in enumerate(ranks)]
    watch = Watch(policy)
    for clock in range(0, 100, 10):
        watch.memory.kept = kept or {}
        judgement = watch.sees(view_of(clock, devices, {one.pid: (parent, None) for one in ranks}, claims=claims))
        found = [verdict for verdict in judgement.verdicts if verdict.action != "warn"]
        assert not any(verdict.rest for verdict in judgement.verdicts if verdict not in found)
        if found:
            return [(pids((verdict,)), {row.pid for row in verdict.rest}) for verdict in found]
    return []


def test_where_a_rule_finds_one_rank_of_a_claimed_job_all_of_it_ends():
    assert ended(HOGS, rank(101, gib=60), rank(102), rank(103)) == [({101}, {102, 103})]


@pytest.mark.parametrize(
    "of",
    [
        {"claims": ()},
        {"parent": SHELL},
        {"claims": (replace(CLAIM, uid=1002),)},
        {"claims": (replace(CLAIM, holders=(555,), pid=555),)},
        {"claims": (replace(CLAIM, alive=False),)},
    ],
    ids=["no claim", "beside the claim", "another user's", "perhaps of a claim", "a claim that is over"],
)
def test_without_a_claim_of_its_own_no_process_ends_that_the_rule_has_not_found(of: Any):
    assert ended(HOGS, rank(101, gib=60), rank(102), **of) == [({101}, set())]


def test_another_user_below_a_claim_is_no_part_of_its_job():
    assert ended(HOGS, rank(101, gib=60), rank(102, uid=1002)) == [({101}, set())]


def test_a_rank_that_the_policy_spares_outlives_its_job():
    policy = replace(HOGS, exempt=(Exemption(devices=("1",)),))
    kept = {("device", a_device(2).uuid): KeptMark(START + 9999)}

    assert ended(policy, rank(101, gib=60), rank(102), rank(103)) == [({101}, {103})]
    assert ended(HOGS, rank(101, gib=60), rank(102), rank(103), kept=kept) == [({101}, {102})]
    assert ended(replace(HOGS, only=Scope(devices=("0",))), rank(101, gib=60), rank(102)) == [({101}, set())]


def test_each_process_of_a_job_ends_once_however_many_the_rule_has_found():
    assert ended(HOGS, rank(101, gib=60), rank(102, gib=60), rank(103)) == [({101}, {103}), ({102}, set())]


def test_a_job_ends_whole_where_its_process_was_found_on_another_gpu_first():
    """The step of the GPU that was found first stands for both, and the other GPU comes first in the sample."""
    hog, other = rank(101, gib=60), rank(102)
    parents, watch = {101: (LAUNCHER, None), 102: (LAUNCHER, None)}, Watch(replace(HOGS, steps=(Step("terminate"),)))
    for clock, gib in ((0, 1), (5, 60), (15, 60), (25, 60), (40, 60)):
        on_first = replace(hog, memory_used=gib * GIB)
        devices = [a_device(n, processes=(one,)) for n, one in enumerate((on_first, hog, other))]
        judgement = watch.sees(view_of(clock, devices, parents, claims=(CLAIM,)))

    assert [(pids((one,)), {row.pid for row in one.rest}) for one in judgement.verdicts] == [({101}, {102})]


def test_on_the_gpus_of_the_rest_others_wait_until_its_effect_is_seen():
    ranks = rank(101, gib=60), rank(102)
    devices = [a_device(n, processes=(one,), memory_used=60 * GIB) for n, one in enumerate(ranks)]
    other = a_policy("terminate", name="later", hold=100.0, rules=(Devices(means=True),), only=Scope(devices=("1",)))
    watch = Watch(replace(HOGS, steps=(Step("terminate"),), hold=90.0), other)
    for clock in range(0, 101, 10):
        view = view_of(clock, devices, {101: (LAUNCHER, None), 102: (LAUNCHER, None)}, claims=(CLAIM,))
        judgement = watch.sees(view)

    assert [note.kind for note in judgement.notes if note.policy == "later"] == ["waiting"]


def test_until_the_signal_it_is_asked_whether_anything_spares_a_rank():
    """What preflight asks just before: on what the driver has read again."""
    ranks, watch = (rank(101, gib=60), rank(102)), Watch(HOGS)
    view = view_of(0, [a_device(processes=ranks)], {101: (LAUNCHER, None), 102: (LAUNCHER, None)}, claims=(CLAIM,))

    def may_end(process: Any, policy: Any = HOGS) -> bool:
        return may_end_with_job(policy, process, view, watch.memory)

    assert may_end(ranks[1])
    assert not may_end(rank(103)), "it is not listed any more"
    assert not may_end(ranks[1], replace(HOGS, exempt=(Exemption(users=frozenset({1001})),)))
    watch.memory.kept = {("uid", 1001): KeptMark(START + 9999)}
    assert not may_end(ranks[1])


@pytest.fixture
def two_ranks() -> Iterator[tuple[Scene, GpuProcess, subprocess.Popen[bytes]]]:
    """One whom a rule has found, and another of the same job: its row, and the process."""
    with a_child() as child, a_scene() as scene:
        rest = replace(scene.process, pid=child.pid, start_time=started(child.pid))
        scene.listed(scene.process, rest)
        scene.snapshot = scene.machine.sample((), None)
        jobs = frozenset({(row.pid, row.start_time) for row in (scene.process, rest)})
        scene.context(member=lambda identity: JobMember(identity, "claim x of 1001"), jobs=jobs)
        yield scene, rest, child


def act(scene: Scene, rest: Any, action: str = "terminate") -> list[tuple[int | None, str]]:
    outcomes = actions.act(scene.verdict(action, rest=(rest,)), scene.snapshot, scene.context())
    return [(outcome.pid, outcome.word) for outcome in outcomes]


def test_each_process_of_the_job_has_its_own_line_and_its_own_signal(two_ranks):
    scene, rest, other = two_ranks

    assert act(scene, rest) == [(scene.pid, "sent"), (rest.pid, "sent")]
    assert scene.dies() and other.wait(60) == -signal.SIGTERM
    assert [(event.pid, event.outcome, event.message) for event in scene.events] == [
        (scene.pid, "about to", "uses 41.0GiB, 40.0GiB are allowed"),
        (rest.pid, "about to", "its job ends whole: uses 41.0GiB, 40.0GiB are allowed"),
    ]


@pytest.mark.parametrize(
    "context",
    [
        {"still_true": lambda verdict, snapshot: bool(verdict.rest)},
        {"member": alone},
        {"append": lambda event: False},
    ],
    ids=["the condition is over", "another job", "a full disk"],
)
def test_no_other_process_of_the_job_ends_for_one_that_goes_on(two_ranks, context):
    scene, rest, other = two_ranks
    scene.context(**context)

    assert rest.pid not in dict(act(scene, rest))
    assert other.poll() is None


def test_each_process_of_the_job_has_its_own_preflight(two_ranks):
    scene, rest, other = two_ranks
    scene.context(still_true=lambda verdict, snapshot: not verdict.rest)

    assert act(scene, rest) == [(scene.pid, "sent"), (rest.pid, "refused")]
    assert other.poll() is None


def test_a_rehearsal_means_the_same_processes(two_ranks):
    scene, rest, other = two_ranks
    scene.context(enforce=False)

    assert act(scene, rest) == [(scene.pid, "dry run"), (rest.pid, "dry run")]
    assert scene.lives() and other.poll() is None


# What the limits make of it.


def done(pid: int, job: str, *, ago: float = 0.0, action: str = "terminate", device: str = "GPU-a") -> PastAction:
    return PastAction(START - ago, action, (pid, 1.0), (f"{device}{pid}",), True, uid=1001, job=job)


def refused(book: ActionLimits, action: PastAction) -> set[str]:
    return {check.check for check in book.failed(action, lambda past: False)}


def test_the_limits_count_jobs_and_end_none_by_halves():
    book = ActionLimits()
    for number in range(40):
        assert refused(book, done(100 + number, "one")) == set()
        book.record(done(100 + number, "one"))

    assert refused(book, done(200, "two")) == set()


def test_a_site_says_how_many():
    book = ActionLimits(per_minute=2, per_hour=3)
    for number in range(2):
        book.record(done(100 + number, f"job {number}", ago=300.0))

    assert refused(book, done(200, "another")) == {"victims"}  # one is left, and that is for others
    assert refused(book, replace(done(201, "another"), uid=1002)) == set()
    assert refused(replace(book, per_hour=9), done(200, "another")) == set()


def test_a_pause_is_no_end():
    book = ActionLimits(per_minute=100)
    for number in range(30):
        book.record(done(100 + number, f"job {number}", action="pause"))

    assert refused(book, done(200, "another")) == set()


def test_what_was_asked_to_end_is_not_another_job_because_its_claim_is_over():
    book = ActionLimits(per_hour=1)
    book.record(done(100, "claim a of 1001", ago=300.0))

    assert refused(book, done(100, "group 100")) == set()


def test_the_rest_of_a_job_does_not_wait_for_the_effect_on_its_gpu():
    book = ActionLimits()
    book.record(replace(done(100, "one", ago=20.0), devices=("GPU-x",)))

    assert refused(book, replace(done(101, "one"), devices=("GPU-x",))) == set()
    assert refused(book, replace(done(102, "two"), devices=("GPU-x",))) == {"one per device"}


POLICY = """
version: 1
mode: enforce
limits: {per_minute: 1, per_hour: 2}
policies:
  - {name: unclaimed, when: {unclaimed: {}}, for: 300ms, at_most: {jobs: 1}, steps: [terminate]}
"""


@pytest.mark.root
def test_a_daemon_ends_all_ranks_of_a_job_and_the_line_of_each_names_it(tmp_path):
    daemon = DaemonUnderTest(tmp_path)
    daemon.policy.write_text(POLICY)
    with ExitStack() as stack:
        ranks = [stack.enter_context(somebodys(daemon.node, str(n % 2), 2 * GIB)) for n in range(4)]
        daemon.start("--interval", "200ms", "--enforce", named=True)  # what comes later is started again
        stack.enter_context(daemon.begun())

        assert [child.wait(60) for child in ranks] == [-signal.SIGTERM] * 4, daemon.said()
        events = [event for event in daemon.events("terminate") if event["outcome"] == "about to"]
        assert len(events) == 4 and len({event["facts"]["launch"] for event in events}) == 1


@pytest.mark.root
def test_what_makes_a_job_is_read_of_real_processes():
    """Of a launcher that gives its ranks sessions of their own, and of a shell with two jobs."""
    with ExitStack() as stack:
        children = [stack.enter_context(a_child()) for _ in range(2)]
        rows = [a_process(child.pid, start_time=started(child.pid), executable="/bin/sleep") for child in children]
        snapshot = busy(0, a_device(processes=tuple(rows)))
        view = RuleView(snapshot, seen=process_facts(snapshot))
        one, other = (member_of(row, view) for row in rows)

    assert one.job != other.job and one.launch == other.launch and str(os.getpid()) in one.launch
    launcher = view.seen[os.getpid()]
    assert launcher and (launcher.group, launcher.session) == (os.getpgrp(), os.getsid(0))
