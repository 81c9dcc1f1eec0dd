"""Each check before an action by itself: what it has against a target, in words, at its edges."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot, a_uuid

from gpuguard.enforcement import identity, preflight
from gpuguard.enforcement.guard_limits import ActionLimits, PastAction
from gpuguard.enforcement.identity import ProcessFacts
from gpuguard.enforcement.preflight import (
    EARLY,
    LATE,
    ActionContext,
    Preflight,
    ProcessTarget,
    checkpoint_signal,
    effect_seen,
    slurm_job,
    targets,
)
from gpuguard.locale import translated
from gpuguard.model import Finding, Subject, Verdict
from gpuguard.policies.view import JobMember
from gpuguard.procfs import pid_max, start_time

UUID = a_uuid(0)
ROW = a_process(4711)
DEVICE = a_device(0, processes=(ROW,))
FACTS = ProcessFacts(
    start_time=1000.0,
    uids=(1001,) * 4,
    group=4711,
    terminal=0,
    tracer=0,
    caught=0,
    executable="/usr/bin/python3",
    executable_owner=0,
    command="python3 train.py",
    uses_driver=True,
    cgroup="0::/x",
)
CLAIM = a_claim_record(UUID, id="c1", requeue=True)


def a_verdict(action: str = "terminate", *processes: Any, subject: Subject | None = None, **fields: Any) -> Verdict:
    finding = Finding("memory", subject or Subject("user", uid=1001), "", processes or (ROW,))
    return Verdict(**{"policy": "p", "finding": finding, "action": action, "step": 0, "since": 1.0, **fields})


class Means:
    """A backend that answers nothing, of which a test says whether it is a simulated one."""

    def __init__(self, *, simulated: bool = True) -> None:
        self.simulated = simulated


def a_target(context: dict[str, Any] | None = None, **fields: Any) -> Preflight:
    """A process that nothing protects, or the claim of *fields*."""
    settings = {"append": lambda event: True, "still_true": lambda verdict, snapshot: True, **(context or {})}
    given = ActionContext(settings.pop("backend", Means()), **settings)
    snapshot = a_snapshot(DEVICE, claims=(CLAIM,))
    facts = {
        "verdict": a_verdict(),
        "snapshot": snapshot,
        "clock": snapshot.clock + 1.0,
        "process": ProcessTarget(4711, 1000.0, 1001, (UUID,), "alice", 10 * GIB),
        "fresh": replace(snapshot, clock=snapshot.clock + 1.0),
        "facts": FACTS,
        **fields,
    }
    return Preflight(context=given, **facts)


def a_claim_target(**fields: Any) -> Preflight:
    return a_target(**{"process": None, "claim": CLAIM, "facts": None, **fields})


def against(name: str, target: Preflight) -> Any:
    """What a check has against a target."""
    answer = {**EARLY, **LATE}[name].check(target)
    if isinstance(answer, str):
        return translated(answer)
    return [(check.check, translated(check.text), check.wait) for check in answer] if answer else None


def of_rows(*rows: Any, **device: Any) -> Preflight:
    """The driver's second answer has these rows on the device."""
    return a_target(fresh=a_snapshot(a_device(0, processes=rows, **device), clock=10_001.0))


def a_row(**fields: Any) -> Any:
    return replace(ROW, **fields)


SNAPSHOT = a_snapshot(DEVICE)
UNSEEN = "whether it has the driver open cannot be seen"
OTHER_OWNER = "its owner is not the one that was judged"
NOT_LISTED, INCREDIBLE = "the driver does not list it on that GPU", "the driver's list of processes cannot be believed"
CHECKS: list[tuple[str, Preflight, Any]] = [
    *((name, a_target(), None) for name in (*EARLY, *LATE) if name not in ("claim", "unused", "family", "namespace")),
    ("live", a_target(snapshot=a_snapshot(recorded=True)), "the sample is a recording, of another time or machine"),
    ("pid", a_target(process=ProcessTarget(1, 5.0, 1001, (UUID,))), "1 is no pid"),
    ("pid", a_target(process=ProcessTarget(2, 5.0, 1001, (UUID,))), None),
    ("pid", a_target(process=ProcessTarget(pid_max(), 5.0, 1001, (UUID,))), None),
    ("pid", a_target(process=ProcessTarget(pid_max() + 1, 5.0, 1001, (UUID,))), f"{pid_max() + 1} is no pid"),
    ("known", a_target(process=ProcessTarget(4711, None, 1001, (UUID,))), "who it is is not known"),
    ("known", a_target(process=ProcessTarget(4711, 5.0, None, (UUID,))), "who it is is not known"),
    ("fresh", a_target(clock=SNAPSHOT.clock - 0.5), "the sample is from the future"),
    ("fresh", a_target(clock=SNAPSHOT.clock), None),
    ("fresh", a_target({"interval": 1.0}, clock=SNAPSHOT.clock + preflight.INTERVALS), None),
    (
        "fresh",
        a_target({"interval": 1.0}, clock=SNAPSHOT.clock + preflight.INTERVALS + 1.0),
        [("fresh", f"the sample is {preflight.INTERVALS + 1:.0f}s old", 0.0)],
    ),
    ("sampled", a_target(process=ProcessTarget(4711, 1000.0, 1001, ())), "it is on no GPU"),
    ("sampled", a_target(snapshot=a_snapshot(a_device(0))), NOT_LISTED),
    ("sampled", a_target(snapshot=a_snapshot(a_device(0, processes=None))), INCREDIBLE),
    ("sampled", a_target(snapshot=a_snapshot(a_device(1))), INCREDIBLE),
    ("sampled", a_target(snapshot=a_snapshot(replace(DEVICE, processes_plausible=False))), INCREDIBLE),
    ("start time", a_target(facts=None), "/proc does not show it"),
    ("start time", a_target(facts=replace(FACTS, start_time=5.0)), "its pid belongs to another process now"),
    ("sample time", a_target(facts=None), "it may have started after the sample"),
    ("sample time", a_target(facts=replace(FACTS, start_time=9_999.99)), "it may have started after the sample"),
    (
        "sample time",
        a_target(facts=replace(FACTS, start_time=SNAPSHOT.clock - preflight.TICKS / os.sysconf("SC_CLK_TCK"))),
        None,
    ),
    ("listed", a_target(fresh=None), "the driver gave no newer list"),
    ("listed", a_target(fresh=replace(SNAPSHOT, recorded=True)), "the driver gave no newer list"),
    ("listed", a_target(fresh=replace(SNAPSHOT, clock=9_999.0)), "the driver gave no newer list"),
    ("listed", a_target(fresh=SNAPSHOT), None),
    ("listed", of_rows(a_process(18), ROW), None),
    ("listed", of_rows(), NOT_LISTED),
    ("listed", of_rows(a_row(start_time=7.0)), NOT_LISTED),
    ("listed", a_claim_target(fresh=a_snapshot(a_device(0, processes=None), clock=10_001.0)), None),
    ("kind", of_rows(a_row(kind="graphics", memory_used=GIB)), "it is no more than a desktop there"),
    (
        "kind",
        of_rows(
            a_row(kind="mps"),
            a_process(18, uid=0, user="root", executable="/usr/bin/nvidia-cuda-mps-server"),
            a_process(19, uid=1002, user="bob", kind="mps"),
        ),
        "an MPS server of root's shares this GPU: its clients of other users would suffer",
    ),
    ("kind", of_rows(), None),
    ("owner", a_target(facts=None), OTHER_OWNER),
    ("owner", a_target(facts=replace(FACTS, uids=(1002, 1001, 1001, 1001))), OTHER_OWNER),
    ("owner", of_rows(a_row(uid=1002)), OTHER_OWNER),
    ("owner", of_rows(a_row(uid=None)), None),
    ("owner", of_rows(), "the name of uid 1001 is not known"),
    ("owner", of_rows(a_row(user=None)), "the name of uid 1001 is not known"),
    ("owner", of_rows(a_row(user="1001")), "the name of uid 1001 is not known"),
    ("protected", a_target(facts=None), "whose it is cannot be read"),
    ("protected", a_target(facts=replace(FACTS, uids=(1001, 1001, 0, 1001))), "uid 0 is the system's"),
    ("protected", a_target({"protected": {1001}}), "uid 1001 is protected"),
    ("protected", a_claim_target(context={"protected": {1001}}), "uid 1001 is protected"),
    ("program", a_target(facts=None), "its program cannot be read"),
    ("program", a_target(facts=replace(FACTS, executable=None)), "its program cannot be read"),
    ("program", a_target({"protected_executables": ("/opt/*",)}), None),
    ("power", a_target(facts=None), None),
    ("stopped", a_target(verdict=a_verdict("pause"), facts=replace(FACTS, state="t")), "it is stopped already"),
    ("stopped", a_target(verdict=a_verdict("pause")), None),
    ("stopped", a_target(facts=replace(FACTS, state="T")), None),
    ("stopped", a_target(verdict=a_verdict("pause"), facts=None), None),
    ("catches", a_target(verdict=a_verdict("checkpoint"), facts=replace(FACTS, caught=1 << 9)), None),
    (
        "catches",
        a_target(verdict=a_verdict("checkpoint"), facts=replace(FACTS, caught=~(1 << 9))),
        "it has no way to answer SIGUSR1: most programs end of it",
    ),
    (
        "catches",
        a_target(verdict=a_verdict("checkpoint"), facts=None),
        "it has no way to answer SIGUSR1: most programs end of it",
    ),
    (
        "catches",
        a_target(verdict=a_verdict("checkpoint", options=(("signal", 9),))),
        "signal 9 is none for a checkpoint",
    ),
    ("claim", a_claim_target(), None),
    ("claim", a_claim_target(fresh=None), "it does not hold what it held just now"),
    ("claim", a_claim_target(fresh=a_snapshot(claims=())), "it does not hold what it held just now"),
    (
        "claim",
        a_claim_target(fresh=a_snapshot(claims=(replace(CLAIM, devices=(UUID, a_uuid(1))),))),
        "it does not hold what it held just now",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "target", "expected"), CHECKS, ids=[f"{c[0]} {i}" for i, c in enumerate(CHECKS)])
def test_a_check_says_what_it_has_against_a_target(monkeypatch, name, target, expected):
    monkeypatch.setattr(preflight, "may_signal", lambda uids: True)
    monkeypatch.setattr(identity, "is_of_the_system", lambda uid: uid < 1000)

    assert against(name, target) == expected


def test_a_protected_program_is_named(monkeypatch):
    answers, kinds = iter([True, None, False]), []
    monkeypatch.setattr(preflight, "in_time", lambda pid, kind, look: kinds.append(kind) or next(answers))
    target = a_target({"protected_executables": ("/usr/bin/*",)})

    found = [against("program", target) for _ in range(3)]
    assert found == ["/usr/bin/python3 is protected", "/usr/bin/python3 is protected", None]
    assert kinds == ["program"] * 3 and "program" in identity._TIMES, "one that hangs spares the wait for the other"


@pytest.mark.parametrize("kind", ["graphics", "compute+graphics", "compute"])
def test_a_program_of_the_system_may_compile_code_only_where_it_draws(monkeypatch, kind):
    asked = []
    monkeypatch.setattr(identity, "belongs_to_the_system", lambda *words: bool(asked.append(words) or True))

    assert against("program", of_rows(a_row(kind=kind))) == "/usr/bin/python3 belongs to the system"
    assert asked == [(FACTS, "graphics" in kind)]


def test_without_the_power_to_signal_it_says_so(monkeypatch):
    asked = []
    monkeypatch.setattr(preflight, "may_signal", lambda uids: bool(asked.append(uids)))

    assert against("power", a_target()) == (
        "gpuguard may not signal processes of others: it is not root, and runs without CAP_KILL"
    )
    assert asked == [FACTS.uids]


@pytest.mark.parametrize(
    ("simulated", "drivers", "facts", "arrived", "expected"),
    [
        (True, (), None, None, None),
        (False, (), None, None, None),
        (False, (frozenset({5}),), FACTS, None, None),
        (False, (frozenset({5}),), None, None, UNSEEN),
        (False, (frozenset({5}),), replace(FACTS, uses_driver=None), 1.0, UNSEEN),
        (False, (frozenset({5}),), replace(FACTS, uses_driver=None, hides=True), 1.0, None),
        (
            False, (frozenset({5}),), replace(FACTS, uses_driver=None, hides=True), None,
            UNSEEN,
        ),
        (
            False, (frozenset({5}),), replace(FACTS, uses_driver=False), None,
            "it does not have the driver open: the driver's list cannot be right",
        ),
    ],
)  # fmt: skip
def test_a_process_is_only_believed_to_use_a_gpu_whose_driver_it_has_open(
    monkeypatch, simulated, drivers, facts, arrived, expected
):
    asked = []

    def nodes(devices: Any) -> Any:
        asked.append(devices)
        return drivers

    def came(uuid: str, process: Any) -> Any:
        assert process == (4711, 1000.0)
        return {UUID: None, a_uuid(1): arrived}[uuid]

    monkeypatch.setattr(preflight, "driver_nodes", nodes)
    process = ProcessTarget(4711, 1000.0, 1001, (UUID, a_uuid(1)))
    target = a_target({"backend": Means(simulated=simulated), "arrived": came}, process=process, facts=facts)

    assert against("driver", target) == expected
    assert asked == ([] if simulated else [(DEVICE,)])


@pytest.mark.parametrize(
    ("shares", "first", "expected"),
    [
        (True, False, None),
        (False, True, None),
        (False, False, "the driver's pids are those of another pid namespace"),
    ],
)
def test_pids_of_another_namespace_mean_nobody_here(monkeypatch, shares, first, expected):
    monkeypatch.setattr(preflight, "in_first_pid_namespace", lambda: first)

    assert against("namespace", a_target({"share_host_pids": shares})) == expected


FAMILY = {
    "a stranger": ({}, None),
    "this process": ({"pid": 50}, "gpuguard itself stands on it"),
    "its parent": ({"pid": 40}, "gpuguard itself stands on it"),
    "its child": ({"ancestors": (50, 40)}, "it is a part of gpuguard"),
    "one of its group": ({"facts": replace(FACTS, group=60)}, "it is in gpuguard's process group"),
    "one that is not seen": ({"facts": None}, "it is in gpuguard's process group"),
    "a job of its own": ({"pid": 40, "jobs": {(40, 1000.0)}}, None),
}


@pytest.mark.parametrize(("target", "expected"), FAMILY.values(), ids=FAMILY)
def test_the_guard_ends_nothing_on_which_it_stands(monkeypatch, target, expected):
    pid, ancestors = target.get("pid", 4711), target.get("ancestors", (1,))
    monkeypatch.setattr(preflight.os, "getpid", lambda: 50)
    monkeypatch.setattr(preflight.os, "getpgrp", lambda: 60)
    monkeypatch.setattr(preflight.procfs, "ancestors", {50: (40, 1), pid: ancestors, 40: (1,)}.get)
    process = ProcessTarget(pid, 1000.0, 1001, (UUID,))
    facts = target.get("facts", FACTS)

    assert (
        against("family", a_target({"jobs": target.get("jobs", frozenset())}, process=process, facts=facts)) == expected
    )


def test_a_claim_on_which_the_guard_stands_is_not_ended(monkeypatch):
    monkeypatch.setattr(preflight.os, "getpid", lambda: 50)
    monkeypatch.setattr(preflight.procfs, "ancestors", lambda pid: (40, 1))

    assert against("family", a_claim_target(locks=SimpleNamespace(holder=40))) == "gpuguard itself stands on it"
    assert against("family", a_claim_target(locks=SimpleNamespace(holder=41))) is None
    own = a_claim_target(locks=SimpleNamespace(holder=os.getppid()))
    assert own.identity == (os.getppid(), start_time(os.getppid())) and a_claim_target().identity == (0, 0.0)


def test_a_person_in_front_of_a_process_gets_time_once():
    limits = ActionLimits()

    def left(clock: float, **fields: Any) -> Any:
        target = {"verdict": a_verdict(graced=100.0), "facts": replace(FACTS, tracer=7), **fields}
        return against("interactive", a_target({"limits": limits, "interactive_grace": 600.0}, clock=clock, **target))

    [(check, text, wait)] = left(5000.0)
    assert (check, wait) == ("interactive", 500.0)
    assert text == f"it is {translated(replace(FACTS, tracer=7).interactive)}, and has 8m20s more"
    assert left(5499.0)[0][2] == 1.0
    assert left(5500.0) is None
    [(_, unseen, _)] = left(5000.0, facts=None, process=ProcessTarget(4712, 1000.0, 1001, (UUID,)))
    assert unseen == "it is perhaps interactive, and has 8m20s more"
    assert left(5500.0, verdict=a_verdict(graced=100.0, since=2.0))[0][2] == 500.0, "another breach"
    assert left(5500.0, verdict=a_verdict("kill", graced=100.0))[0][2] == 500.0, "another step"
    assert left(5500.0, verdict=a_verdict("warn")) is None
    assert left(5500.0, facts=FACTS) is None


REQUEUES = {
    "another action": ("terminate", {}, True, None),
    "of its claim": ("requeue", {}, True, None),
    "without a supervisor": (
        "requeue", {}, False, "no gpuguard run is left that would put its job into the queue again"
    ),
    "whose maker is unknown": (
        "requeue", {"pid": None, "holders": (4711,)}, True,
        "no gpuguard run is left that would put its job into the queue again",
    ),
    "that may not": (
        "requeue", {"requeue": False}, True, "it belongs to no job that may stand in the queue again (--requeue)"
    ),
    "of another user": (
        "requeue", {"uid": 1002}, True, "it belongs to no job that may stand in the queue again (--requeue)"
    ),
    "of a task": ("requeue", {"id": "c1"}, True, None),
}  # fmt: skip


@pytest.mark.parametrize(("action", "fields", "supervised", "expected"), REQUEUES.values(), ids=REQUEUES)
def test_a_job_goes_into_the_queue_again_where_its_run_is_there_to_do_so(
    monkeypatch, action, fields, supervised, expected
):
    monkeypatch.setattr(preflight, "is_supervisor", lambda pid: supervised and pid == 4700)
    monkeypatch.setattr(preflight.procfs, "ancestors", lambda pid: (4700, 1))
    inner = replace(CLAIM, id="c1.0", pid=4700) if fields.get("id") else None
    claims = (*filter(None, [inner]), replace(CLAIM, **fields))
    target = a_target(verdict=a_verdict(action), snapshot=a_snapshot(DEVICE, claims=claims))

    assert against("requeue", target) == expected


def test_a_claim_is_unused_where_no_process_computes_and_no_memory_is_used(monkeypatch):
    asked = []
    answer: list[Any] = [((), None)]

    def computing(claim: Any, snapshot: Any, seen: Any) -> Any:
        asked.append((claim, snapshot, seen))
        return answer[0]

    monkeypatch.setattr(preflight, "computing_under", computing)
    monkeypatch.setattr(preflight, "process_facts", lambda snapshot: ("facts of", snapshot))
    target = a_claim_target(fresh=a_snapshot(a_device(0), a_device(1, memory_used=9 * GIB)))
    assert against("unused", target) is None
    assert asked == [(CLAIM, target.fresh, ("facts of", target.fresh))]

    answer[0] = ((a_process(17), a_process(18)), None)
    assert against("unused", target) == "pid 17 computes under it"
    answer[0] = ((), "it cannot be seen")
    assert against("unused", target) == "it cannot be seen"
    answer[0] = ((), None)
    in_use = "memory is in use, though no process is listed"
    for memory, expected in ((9 * GIB, in_use), (None, in_use), (2**29, None)):
        used = a_claim_target(fresh=a_snapshot(a_device(0, memory_used=memory)))
        assert against("unused", used) == expected
    divided = a_snapshot(a_device(0, mig_mode=True), a_mig_instance(a_device(0), memory_used=9 * GIB))
    assert against("unused", a_claim_target(fresh=divided)) == in_use


def test_the_condition_is_looked_at_again_for_the_target_alone():
    asked = []

    def still_true(verdict: Verdict, snapshot: Any) -> bool:
        asked.append((verdict, snapshot))
        return len(asked) == 1

    other = a_process(18)
    target = a_target({"still_true": still_true}, verdict=a_verdict("terminate", ROW, other))
    assert against("rule", target) is None
    assert against("rule", target) == "the condition does not hold any more"
    assert asked[0] == (a_verdict("terminate", ROW), target.snapshot.updated(target.fresh))
    assert against("rule", a_target(fresh=None)) == "the condition does not hold any more"


def test_an_effect_is_seen_when_the_process_is_gone_and_half_of_its_memory_is_back(monkeypatch):
    alive = [False]
    monkeypatch.setattr(identity, "is_alive", lambda process: alive[0] and process == (17, 5.0))
    past = PastAction(
        0.0, "kill", (17, 5.0), (UUID,), True, memory_used=((UUID, 30 * GIB), ("gone", 1)), memory=10 * GIB
    )

    def seen(used: int | None, **fields: Any) -> bool:
        return effect_seen(replace(past, **fields), a_snapshot(a_device(0, memory_used=used)))

    assert seen(25 * GIB) and not seen(25 * GIB + 1) and not seen(None)
    assert seen(30 * GIB, memory=None) and not seen(30 * GIB + 1, memory=None)
    assert seen(99 * GIB, memory_used=())
    alive[0] = True
    assert not seen(0)


@pytest.mark.parametrize(("before", "now", "checks"), [(40, 0, []), (0, 40, ["one per device"])])
def test_the_effect_is_looked_for_in_the_drivers_latest_answer(before, now, checks):
    used = ((UUID, 40 * GIB),)
    past = PastAction(SNAPSHOT.clock - 20.0, "kill", (17, 5.0), (UUID,), False, memory_used=used, memory=10 * GIB)
    seen, fresh = (replace(SNAPSHOT, devices=(replace(DEVICE, memory_used=gib * GIB),)) for gib in (before, now))
    target = a_target({"limits": ActionLimits([past])}, snapshot=seen, fresh=fresh)

    assert [check for check, _, _ in against("limits", target) or ()] == checks


def test_an_action_is_remembered_with_all_that_the_limits_go_by(monkeypatch):
    monkeypatch.setattr(preflight.procfs, "ancestors", lambda pid: (4700, 1))
    used = a_snapshot(a_device(0, processes=(ROW,), memory_used=40 * GIB), a_device(1, memory_used=GIB), clock=10_001.0)
    member = JobMember((4711, 1000.0), "j", "l")
    target = a_target({"member": lambda process: member, "enforce": True}, fresh=used, verdict=a_verdict(enforce=True))

    assert target.claim_of_process == "c1"
    assert target.action == PastAction(
        10_001.0, "terminate", (4711, 1000.0), (UUID,), True, identity.signature(FACTS, "c1"),
        ((UUID, 40 * GIB),), 10 * GIB, "p", 1001, "j", "l",
    )  # fmt: skip
    dry = a_claim_target().action
    assert (dry.live, dry.memory_used, dry.memory, dry.policy, dry.uid) == (False, (), None, "", 1001)
    assert (dry.devices, dry.signature, dry.member) == ((UUID,), "", preflight.alone((0, 0.0)))


@pytest.mark.parametrize(
    ("claim", "expected"),
    [({"pid": 4711}, "c1"), ({"pid": 1, "holders": (4700,)}, "c1"), ({"uid": 1002}, ""), ({"pid": 4701}, "")],
)
def test_the_claim_of_a_process_is_one_of_its_user_that_its_family_holds(monkeypatch, claim, expected):
    monkeypatch.setattr(preflight.procfs, "ancestors", lambda pid: (4700,) if pid == 4711 else ())
    target = a_target(snapshot=a_snapshot(DEVICE, claims=(replace(CLAIM, **claim),)))

    assert target.claim_of_process == expected


def test_a_verdict_means_each_process_once_on_all_its_devices():
    both = a_snapshot(
        a_device(0, processes=(a_row(memory_used=5),)), a_device(1, processes=(a_row(memory_used=7), a_process(18)))
    )
    alice = ProcessTarget(4711, 1000.0, 1001, (UUID, a_uuid(1)), "alice", 5)
    assert targets(a_verdict("warn", ROW, ROW), both) == (alice,)
    named = Subject("process", device="MIG-1", uid=1001, user="alice", pid=4711, start_time=1000.0)
    assert targets(a_verdict(subject=named), both) == (replace(alice, devices=("MIG-1", UUID, a_uuid(1))),)
    assert targets(a_verdict(subject=replace(named, device=None)), both) == (alice,)
    gone = ProcessTarget(19, 1000.0, 1001, (), "alice", None)
    assert targets(a_verdict("warn", a_row(pid=19)), both) == (gone,)
    assert targets(a_verdict("warn", a_row(start_time=5.0)), both) == (replace(gone, pid=4711, start_time=5.0),)


@pytest.mark.parametrize(
    ("options", "number"), [((), 10), ((("signal", 12),), 12), ((("signal", True),), 0), ((("signal", "USR1"),), 0)]
)
def test_the_signal_of_a_checkpoint_is_the_one_that_the_step_names(options, number):
    assert checkpoint_signal(a_verdict("checkpoint", options=options)) == number


def test_the_slurm_job_is_that_of_the_process_or_of_the_claim(monkeypatch):
    monkeypatch.setattr(preflight.procfs, "ancestors", lambda pid: (pid - 1, 1))
    monkeypatch.setattr(preflight.slurm_jobs, "job_of", lambda pids: f"job of {pids}")
    monkeypatch.setattr(preflight.slurm_jobs, "job_of_claim", lambda claim: f"job of {claim}")
    against_it = []
    monkeypatch.setattr(preflight.slurm_jobs, "against_cancelling", lambda job, uid: against_it.append((job, uid)))

    assert slurm_job(a_target()) == "job of (4711, 4710, 1)"
    assert slurm_job(a_claim_target()) == "job of c1"
    assert against("slurm", a_target(verdict=a_verdict("cancel"))) is None
    assert against_it == [("job of (4711, 4710, 1)", 1001)]
