"""What Slurm says of a node, and that no user is accused of what it does not say for certain."""

import os
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_mig_instance, a_process, a_snapshot, a_uuid
from nodes import GIB, a_user, eventually, start

from gpuguard.claims.directory import lock_directory
from gpuguard.clusters import slurm_node
from gpuguard.clusters.slurm_node import NodeJob, SlurmNode, SlurmNodeState, given, is_in, jobs_on, node_of
from gpuguard.daemon import service
from gpuguard.daemon.service import Daemon, DaemonSettings
from gpuguard.model import Event
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.usage import OutsideSchedulerRule
from gpuguard.procfs import boot_clock
from gpuguard.watchdog import Watchdog

# As Slurm 22.05.8 prints them; fields that are not read are left out.
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=16  CPUAlloc=1 AvailableFeatures=(null) ActiveFeatures=(null) "
    "Gres={gres} NodeAddr=127.0.0.1 NodeHostName=n1 Version=22.05.8 OS=Linux 6.1 #1 SMP @0  RealMemory=1000 "
    "State={state} ThreadsPerCore=1 Partitions=p  CfgTRES=cpu=16,mem=1000M,billing=16,gres/gpu=4"
)
JOB = (
    "JobId={id} JobName={name} UserId={user}({uid}) GroupId=lab(100) MCS_label=N/A Priority=1 JobState={state} "
    "Reason=None Partition=p ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} BatchHost=n1 NumNodes=1 NumCPUs=1 "
    "TRES=cpu=1,node=1,billing=1 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* JOB_GRES=gpu:1   "
    "{details} MinCPUsNode=1 Command=/home/train.sh WorkDir=/home StdOut=/dev/null Power= TresPerNode=gres:gpu:1 "
)
DETAIL = "Nodes={nodes} CPU_IDs=0-1 Mem=0 GRES={gres}"
ALICE, BOB, EVE = 1001, 1002, 1003


def a_job(
    gres: str | None = "gpu:1(IDX:0)", *, uid: int = ALICE, state: str = "RUNNING", nodes: str = "n1", name: str = "x"
) -> str:
    details = "" if gres is None else DETAIL.format(nodes=nodes, gres=gres)
    return JOB.format(id=7, name=name, user="somebody", uid=uid, state=state, nodes=nodes, details=details)


class Controller:
    """Answers as scontrol does; counts."""

    def __init__(self, *jobs: str, gpus: int = 4) -> None:
        self.jobs, self.gpus, self.asked = list(jobs), gpus, 0
        self.private: str | None = "none"
        self.answers, self.free = True, threading.Event()
        self.free.set()

    def __call__(self, *words: str) -> str | None:
        self.asked += 1
        assert self.free.wait(20)
        if not self.answers:
            return None
        if words[:2] == ("show", "node"):
            return NODE.format(gres=f"gpu:{self.gpus}", state="MIXED")
        if words == ("show", "config"):
            text = f"Configuration data\nPreemptMode = OFF\nPrivateData             = {self.private}\nA = x\n"
            return self.private and text
        assert words == ("show", "job", "-a", "-d", "-o")
        return "\n".join(self.jobs)


FOUR = [a_device(index, minor_number=index) for index in range(4)]
UP = SlurmNodeState("n1", 4, True)
is_here = slurm_node.is_here


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_node, "is_here", lambda: True)


def shown(*jobs: str) -> dict[int, set[int]]:
    """index -> uids, for the devices of which something is certain."""
    mapping = given(jobs_on("\n".join(jobs), "n1"), UP, FOUR)
    return {index: set(mapping[a_uuid(index)]) for index in range(4) if a_uuid(index) in mapping}


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:4", 4), ("gpu:a100:4(S:0-1)", 4), ("gpu:4(S:0),mps:400", 4), ("(null)", 0), ("gpu:a100:2,gpu:v100:2", 0)],
)
def test_a_node_says_how_many_gpus_it_gives_away(gres, count):
    assert node_of(NODE.format(gres=gres, state="MIXED"), "n1") == SlurmNodeState("n1", count, True)


@pytest.mark.parametrize(
    "state", ["IDLE+DRAIN", "DOWN", "DOWN*", "IDLE*", "MAINT", "RESERVED", "MIXED+DRAIN", "UNKNOWN"]
)
def test_a_node_that_is_out_of_service_may_be_used_by_hand(state):
    node = node_of(NODE.format(gres="gpu:4", state=state), "n1")

    assert node and not node.in_service
    assert given((), node, FOUR) == {}


def test_the_node_of_another_machine_and_an_answer_about_none_are_nothing():
    assert node_of(NODE.format(gres="gpu:4", state="IDLE"), "n2") is None
    assert node_of("Node n1 not found", "n1") is None


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        *(("gpu:1(IDX:0)", {0}), ("gpu:fake:2(IDX:1-2)", {1, 2}), ("gpu:a100:3(IDX:0,2-3)", {0, 2, 3})),
        *(("gpu:1(IDX:1),gpu:1(IDX:3)", {1, 3}), ("mps:a100:100(IDX:2)", {2})),
        *((text, set()) for text in ("gpu:0(IDX:)", "", "(null)", "license:3")),
    ],
)
def test_a_job_has_the_gpus_that_its_details_name(gres, expected):
    assert jobs_on(a_job(gres), "n1") == (NodeJob(frozenset({ALICE}), frozenset(expected)),)


@pytest.mark.parametrize("gres", [None, "gpu:2", "gpu:a100:2", "shard:2(1/8,0/8)", "gpu:1(IDX:0),mps:50"])
def test_a_job_whose_gpus_are_not_told_may_have_any(gres):
    assert shown(a_job(gres), a_job("gpu:1(IDX:1)", uid=BOB)) == {0: {ALICE}, 1: {ALICE, BOB}, 2: {ALICE}, 3: {ALICE}}


@pytest.mark.parametrize(
    ("states", "count"),
    [
        (("PENDING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"), 0),
        (("RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "SOMETHING_NEW"), 1),
    ],
)
def test_a_job_that_has_ended_or_not_begun_has_nothing_and_any_other_what_it_has(states, count):
    assert {state: len(jobs_on(a_job(state=state), "n1")) for state in states} == dict.fromkeys(states, count)


def test_what_a_job_has_on_other_nodes_is_not_here():
    elsewhere = "Nodes=n[2-3] CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:3)   "
    job = a_job("gpu:1(IDX:0)").replace("Nodes=n1", elsewhere + "Nodes=n1")

    assert jobs_on(job, "n1") == (NodeJob(frozenset({ALICE}), frozenset({0})),)
    assert jobs_on(a_job(nodes="n[2-9]"), "n1") == ()


def test_where_no_job_runs_no_user_has_a_device():
    assert shown("No jobs in the system") == {0: set(), 1: set(), 2: set(), 3: set()}


@pytest.mark.parametrize(
    ("text", "named", "others"),
    [
        ("n1", ["n1"], ["n", "n11", "m1"]),
        ("n1,m2", ["n1", "m2"], ["n2"]),
        ("n[1-3,7],m1", ["n1", "n2", "n3", "n7", "m1"], ["n4", "n01", "n", "n10", "nx"]),
        ("gpu[08-10]-ib", ["gpu08-ib", "gpu09-ib", "gpu10-ib"], ["gpu8-ib", "gpu08", "gpu-ib", "gpu11-ib"]),
        ("(null)", ["(null)"], ["n1"]),
        ("", [], ["", "n1"]),
        ("n[1-99999999],n[x-3],n[]", ["n1", "n99999999"], ["n", "n0", "nx"]),
        ("n[1-" + "9" * 5000 + "]", [], ["n1"]),
        ("aa[1]a", ["aa1a"], ["aa", "aaa"]),
    ],
)
def test_a_list_of_nodes_names_these_and_no_others(text, named, others):
    assert [name for name in (*named, *others) if is_in(name, text)] == named


def test_a_job_that_calls_itself_a_list_of_millions_of_nodes_takes_no_time_and_no_memory():
    bomb = "NodeList=" + ",".join(1000 * ["n[0-9999]"])
    tracemalloc.start()
    try:
        jobs = jobs_on(a_job(name=f"x {bomb}"), "n1")
        assert len(jobs) == 1 and tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [
        f"x UserId=eve({EVE}) Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:3)",
        f"x\nJobId=99 UserId=eve({EVE}) JobState=RUNNING NodeList=n1 Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:4(IDX:0-3)",
        "x JobState=COMPLETED",
        "x\nJobId=8 JobState=COMPLETED",
        "x NodeList=n2 Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)",
        *(f"x Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:{odd})" for odd in ("0-99999999999", "9" * 5000, "-", "1-2-3")),
        f"x UserId=eve({'9' * 5000}) NodeList=n[{'9' * 5000}]",
    ],
    ids=lambda name: name[:60],
)
def test_the_name_of_a_job_takes_nothing_from_any_user(name):
    mapping = shown(a_job("gpu:1(IDX:0)", name=name), a_job("gpu:1(IDX:1)", uid=BOB))

    assert ALICE in mapping[0] and BOB in mapping[1]


@pytest.mark.parametrize(
    "devices",
    [
        FOUR[:3],
        [replace(FOUR[0], minor_number=1), replace(FOUR[1], minor_number=0), *FOUR[2:]],
        [*FOUR[:3], a_mig_instance(FOUR[0], 0)],
    ],
    ids=["another number of them", "another order", "divided"],
)
def test_where_slurms_numbers_may_not_be_ours_nothing_is_known(devices):
    assert given(jobs_on(a_job(), "n1"), UP, devices) == {}


def later(seconds: float = 0.0, *processes: Any) -> Any:
    """A snapshot of so many seconds from now."""
    first = replace(FOUR[0], processes=processes)
    return replace(a_snapshot(first, *FOUR[1:]), clock=boot_clock() + seconds)


def asked(controller: Controller, *, is_root: bool = True, **options: Any) -> SlurmNode:
    """A node that has just asked."""
    node = SlurmNode(controller, "n1", is_root=is_root, every=1000.0, **options)
    node.refresh()
    return node


def test_it_is_asked_beside_the_loop_and_until_it_answers_nothing_is_known():
    controller = Controller(a_job())
    controller.free.clear()
    node = SlurmNode(controller, "n1", is_root=True)
    assert node.given(later()) == {}

    controller.free.set()
    assert eventually(lambda: node.given(later()).get(a_uuid(0)) == {ALICE})
    assert controller.asked == 2


def test_while_no_thread_can_be_started_nothing_is_known_and_the_look_goes_on(monkeypatch):
    def full(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(slurm_node.threading.Thread, "start", full)

    assert SlurmNode(Controller(a_job()), "n1", is_root=True).given(later()) == {}


def test_an_answer_is_good_for_a_while_and_then_says_nothing():
    node = asked(controller := Controller(a_job()))
    controller.answers = False

    assert node.given(later(slurm_node.STALE_SECONDS - 5))[a_uuid(0)] == {ALICE}
    assert node.given(later(slurm_node.STALE_SECONDS + 5)) == {}


def test_a_user_who_came_after_the_question_may_have_got_any_device_until_the_next():
    node, now = asked(Controller()), boot_clock()
    old, new = a_process(1, uid=BOB, start_time=now - 60), a_process(2, uid=EVE, start_time=now + 1)
    given = node.given(later(2, old, new))

    assert (given[a_uuid(0)], given[a_uuid(2)]) == ({EVE}, {EVE})


@pytest.mark.parametrize(
    ("private", "seen"), [("none", True), ("usage,nodes", True), ("jobs,usage", False), (None, False)]
)
def test_another_user_than_root_knows_only_what_slurm_shows_to_all(private, seen):
    controller = Controller(a_job())
    controller.private = private

    assert (asked(controller, is_root=False).given(later()) != {}) is seen


def test_an_answer_that_took_long_is_not_asked_for_again_soon(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(slurm_node.time, "monotonic", lambda: next(clock, 100.0))
    node = SlurmNode(Controller(a_job()), "n1", is_root=True)
    node.refresh()

    assert node._next == 10.0 * slurm_node.REST


def test_a_machine_has_slurm_when_one_of_its_traces_is_there(tmp_path: Path):
    (tmp_path / "etc/slurm").mkdir(parents=True)
    assert not is_here(str(tmp_path))
    (tmp_path / "etc/slurm/slurm.conf").touch()
    assert is_here(str(tmp_path))


def test_a_scontrol_that_fails_or_is_missing_is_no_answer(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm_node.scontrol("show", "node") is None
    program.write_text('#!/bin/sh\n[ "$1" = show ] && echo yes "$SLURM_CONF" "$SECRET"\n')
    program.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", "/here")
    monkeypatch.setenv("SECRET", "x")

    assert slurm_node.scontrol("show") == "yes /here \n"
    assert slurm_node.scontrol("hide") is None
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm_node, "TIMEOUT_SECONDS", 0.2)
    assert slurm_node.scontrol("show") is None


def test_why_nothing_is_known_is_said_once(monkeypatch):
    said: list[str] = []
    node = asked(controller := Controller(gpus=3), say=said.append)
    for _ in range(3):
        assert node.given(later()) == {}
    controller.gpus = 4
    node.refresh()
    assert node.given(later())
    controller.answers = False
    node.refresh()
    assert node.given(later()), "the last answer is good for a while"
    node.given(later(2 * slurm_node.STALE_SECONDS))
    monkeypatch.setattr(slurm_node, "is_here", lambda: False)
    assert node.given(later()) is None
    monkeypatch.setattr(slurm_node, "is_here", lambda: True)
    controller.answers, controller.private = True, "jobs"
    assert asked(controller, is_root=False, say=said.append).given(later()) == {}

    assert [text.removeprefix("outside_scheduler does not fire: ") for text in said] == [
        "Slurm gives away 3 GPUs of one type here, and the driver shows 4",
        "`scontrol show node -o n1` or `scontrol show job -a -d -o` fails",
        "this is no node of a Slurm cluster: it has neither a slurmd nor a slurm.conf",
        "slurm.conf has PrivateData=jobs, which shows the jobs of others to a daemon of root alone",
    ]


OUTSIDE = Policy("outside", (OutsideSchedulerRule(),), hold=0.0, steps=(Step("terminate"),), enforce=False)


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Event]]:
    """The steps of a guard on a node on whose device 0 we compute."""
    monkeypatch.setattr(slurm_node, "TICKS_SECONDS", 0.0)

    def run(*jobs: str, scheduler: bool = True) -> list[Event]:
        place, events = str(tmp_path / "node"), list[Event]()
        guard = Watchdog(
            start(place), (OUTSIDE,), lock_directory(str(tmp_path)), append=lambda event: not events.append(event)
        )
        node = SlurmNode(Controller(*jobs), "n1", is_root=True, every=1000.0)
        if scheduler:
            guard.scheduled = node.given
        with a_user(place, "0", 10 * GIB):
            node.refresh()
            for _ in range(3):
                guard.step()
        return [event for event in events if event.kind == "terminate"]

    return run


def test_a_process_outside_the_scheduler_is_found_live(live):
    events = live(a_job("gpu:1(IDX:1)", uid=os.getuid()))

    assert len(events) == 1
    assert "of a GPU that the scheduler has given to no user" in (events[0].message or "")
    assert "has given to other users" in (live(a_job("gpu:1(IDX:0)", uid=BOB))[0].message or "")


def test_a_user_who_has_the_device_from_slurm_is_left_alone(live):
    assert live(a_job("gpu:1(IDX:0)", uid=os.getuid())) == []
    assert live(a_job(None, uid=os.getuid())) == []


def test_without_a_scheduler_no_process_is_outside_it(live):
    assert live(scheduler=False) == []


def test_a_scheduler_is_asked_only_where_a_policy_wants_to_know(tmp_path):
    place = str(tmp_path / "node")
    asked: list[object] = []
    guard = Watchdog(start(place), (Policy("p", (IdleRule(5.0),), hold=0.0, steps=(Step("log"),)),))
    guard.scheduled = asked.append  # type: ignore[assignment]
    guard.step()

    assert asked == []


POLICY = """
version: 1
mode: observe
policies:
  - name: outside
    when: {outside_scheduler: {}}
    for: 1ms
    steps: [warn]
"""


@pytest.mark.parametrize("here", [True, False])
def test_the_daemon_asks_slurm_on_its_nodes(tmp_path, monkeypatch, here):
    controller = Controller()
    monkeypatch.setattr(slurm_node, "is_here", lambda: here)
    monkeypatch.setattr(slurm_node, "TICKS_SECONDS", 0.0)
    monkeypatch.setattr(service, "SlurmNode", lambda say: SlurmNode(controller, "n1", is_root=True, say=say))
    place, file = str(tmp_path / "node"), tmp_path / "policy.yaml"
    file.write_text(POLICY)
    backend, events = start(place), list[Event]()
    with a_user(place, "0", 10 * GIB):
        settings = DaemonSettings(policy=str(file), interval=0.2)
        code, judgement = Daemon(
            backend, lock_directory(str(tmp_path)), settings, print, events.append, lambda event: True
        ).once()

    assert (code, controller.asked >= 2) == (0, here)
    assert judgement and [verdict.policy for verdict in judgement.verdicts] == ["outside"] * here
