"""The engine at its edges: the hour without a zone, a rhythm of fractions, what is recorded, noted and comes next."""

import copy
from dataclasses import replace

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_uuid
from ladders import Finds, Watch, a_policy, actions, busy, kinds, pids

from gpuguard.backtest.backtest import rehearse
from gpuguard.model import Finding, Subject
from gpuguard.policies.action_kinds import ON_PROCESSES
from gpuguard.policies.engine import (
    EngineMemory,
    EscalationState,
    evaluate,
    still_holds,
    why_inapplicable,
    worst_step,
)
from gpuguard.policies.expression import ExpressionRule, parse_expression
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import KeptMark, Step
from gpuguard.policies.thresholds import UtilizationRule
from gpuguard.policies.view import HostUse, RuleView, process_subject

HOUR = 3600.0
MIDNIGHT = 1_699_920_000.0  # of 2023-11-14, UTC


def test_without_a_zone_hours_are_those_of_utc_to_the_second():
    policy = a_policy("warn", hours=(12 * HOUR, 13 * HOUR), hold=0)
    noted = []
    for second in (12 * HOUR - 1, 12 * HOUR, 13 * HOUR - 1, 13 * HOUR):
        sample = busy(0, taken_at=MIDNIGHT + second)
        noted.append((kinds(evaluate(sample, (policy,), EngineMemory())), holds(policy, sample)))

    assert noted == [({"hours"}, False), (set(), True), (set(), True), ({"hours"}, False)]


def holds(policy, sample) -> bool:
    [process] = sample.devices[0].processes
    subject = Subject("process", sample.devices[0].uuid, process.pid, process.start_time, process.uid)
    return still_holds(policy, subject, RuleView(sample), EngineMemory())


def test_samples_may_be_a_fraction_of_a_second_apart():
    watch = Watch(a_policy("warn", hold=0.5), interval=0.25)

    judged = [watch.sees(busy(clock)) for clock in (0, 0.25, 0.5)]

    assert [actions(each) for each in judged] == [[], [], ["warn"]]
    assert not any(each.notes for each in judged)


NOBODY = a_device(processes=())


@pytest.mark.parametrize("unknown", [{"start_time": None}, {"uid": None}])
def test_a_process_with_an_unknown_identity_never_appears(unknown):
    process = a_process(**unknown)
    subject = Subject("process", a_uuid(0), process.pid, process.start_time, process.uid)
    rule = Finds(lambda view: [Finding("x", subject, "why", (process,))])
    watch = Watch(a_policy("warn", rules=(rule,)))

    assert watch.until(100, a_device(processes=(process,))) == []


def test_unknown_processes_are_left_out_of_a_finding_about_a_device():
    known, unknown = a_process(1000), a_process(1001, uid=None)
    device = a_device(processes=(known, unknown))
    rule = Finds(lambda view: [Finding("x", Subject("device", a_uuid(0)), "why", (known, unknown))])
    watch = Watch(a_policy("terminate", rules=(rule,), hold=10))
    watch.sees(busy(0, device))

    assert pids(watch.sees(busy(10, device)).verdicts) == {1000}


def test_a_claim_whose_devices_cannot_be_seen_is_left_alone():
    claim = a_claim_record()
    rule = Finds(lambda view: [Finding("x", Subject("claim", uid=1001, claim=claim.id), "idle")])
    watch = Watch(a_policy("release", rules=(rule,)))

    assert watch.until(100, a_device(processes=None), claims=(claim,)) == []
    assert watch.until(200, a_device(), claims=(claim,), begin=110) == [(140, "release"), (180, "release")]


@pytest.mark.parametrize(
    ("device", "kept", "holds"),
    [
        (a_device(processes=(a_process(),)), None, True),
        (NOBODY, None, False),
        (a_device(processes=(a_process(start_time=9_000.0),)), None, False),  # its pid is another process now
        (a_device(processes=(a_process(),), processes_plausible=False), None, False),
        (a_device(processes=(a_process(),)), 1001, False),
    ],
)
def test_a_condition_is_looked_at_once_more_without_a_sample_of_its_own(device, kept, holds):
    policy = a_policy("warn")
    watch = Watch(policy)
    watch.until(30)
    if kept:
        watch.memory.kept["uid", kept] = KeptMark(20_000.0)
    before = copy.deepcopy(watch.memory)
    subject = process_subject(a_device(), a_process())

    assert still_holds(policy, subject, RuleView(busy(35, device)), watch.memory) is holds
    assert (watch.memory.states, watch.memory.past) == (before.states, before.past)


@pytest.mark.parametrize(
    "rule",
    [
        IdleRule(below=5.0),
        IdleRule(below=5.0, window="sliding", over=200.0),
        UtilizationRule(below=5.0),
        UtilizationRule(below=5.0, per="process"),
        *(ExpressionRule(parse_expression(f"{name} < 5%")) for name in ("utilization", "process_utilization", "cpu")),
        ExpressionRule(parse_expression("network < 1kB/s")),
    ],
    ids=lambda rule: str(rule)[:60],
)
def test_what_rests_because_the_guard_has_stopped_it_is_not_idle_by_any_rule(rule):
    resting, other = a_process(utilization=0.0), a_process(1001, utilization=0.0, start_time=1001.0)
    devices = [
        a_device(n, processes=(row,), memory_used=20 * GIB, utilization=0.0) for n, row in ((0, resting), (1, other))
    ]
    host = {(row.pid, row.start_time): HostUse(cpu=0.0, network=0.0) for row in (resting, other)}
    watch = Watch(a_policy("warn", rules=(rule,)))

    said = set()
    for clock in range(0, 400, 10):
        view = RuleView(busy(clock, *devices), host=host, paused=frozenset({(resting.pid, resting.start_time)}))
        said |= {verdict.finding.subject.device for verdict in watch.sees(view).verdicts}

    assert said == {devices[1].uuid}


CLAIM = Subject("claim", uid=1001, claim="c1")
FOUND = Finding("age", CLAIM, "held without a process")
UNUSED = Finds(lambda view: [FOUND])
HELD = (a_claim_record(a_device(), id="c1", uid=1001),)


def test_a_pause_that_counts_for_nothing_moves_all_times_of_an_escalation():
    memory, subject = EngineMemory(), Subject("device", a_uuid(0))
    before = EscalationState(subject, since=1.0, stepped_at=2.0, held_until=3.0, terminated_at=4.0, again_at=0.0)
    memory.states = {
        "p": {subject: replace(before)},
        "q": {subject: replace(before, terminated_at=None)},
    }
    memory.stop_clocks(100.0)

    moved = replace(before, since=101.0, stepped_at=102.0, held_until=103.0, terminated_at=104.0, shifted=True)
    assert [*memory.states["p"].values(), *memory.states["q"].values()] == [moved, replace(moved, terminated_at=None)]


PROCESS = process_subject(a_device(), a_process())
OF_A_PROCESS = Finding("age", PROCESS, "runs", (a_process(),))
BUSY_CLAIM = Finding("idle", CLAIM, "idle", (a_process(),))
DEVICE = Finding("health", Subject("device", a_device().uuid), "lost")


@pytest.mark.parametrize("action", sorted(ON_PROCESSES))
def test_a_step_on_processes_is_passed_over_where_none_is_meant(action):
    no_process = f"{action} is passed over: no process is meant"

    assert why_inapplicable(Step(action), FOUND) == f"{no_process} (a claim is taken back by `release`)"
    assert why_inapplicable(Step(action), DEVICE) == no_process
    for found in (OF_A_PROCESS, BUSY_CLAIM, replace(OF_A_PROCESS, processes=())):
        assert why_inapplicable(Step(action), found) is None


def test_release_is_passed_over_for_processes_and_for_what_is_no_claim():
    for found in (OF_A_PROCESS, BUSY_CLAIM, replace(OF_A_PROCESS, processes=())):
        assert why_inapplicable(Step("release"), found) == "release is passed over: processes are meant"
    assert why_inapplicable(Step("release"), DEVICE) == "release is passed over: no claim is meant"
    assert why_inapplicable(Step("release"), FOUND) is None


@pytest.mark.parametrize(
    ("steps", "worst"),
    [
        ((("warn", 1.0), ("notify", 2.0)), None),
        ((("deny", 1.0), ("release", 2.0)), ("release", 2.0)),
        ((("pause", 1.0), ("kill", 2.0), ("terminate", 3.0)), ("kill", 2.0)),
        ((("pause", 1.0), ("release", 2.0)), ("pause", 1.0)),
        ((("terminate", 5.0), ("kill", 4.0)), ("kill", 4.0)),
    ],
)
def test_of_the_coming_steps_a_user_hears_of_the_one_that_takes_most_and_of_equals_of_the_first(steps, worst):
    assert worst_step(steps) == worst


def test_a_terminate_without_a_victim_is_no_verdict_but_a_note_and_release_comes_after_it():
    watch = Watch(a_policy("warn", "terminate", "kill", "release", rules=(UNUSED,), cooldown=1000))
    assert watch.until(80, a_device(), claims=HELD) == [(30, "warn")]

    passed_over = watch.sees(busy(90, a_device(), claims=HELD))
    assert (passed_over.verdicts, kinds(passed_over)) == ((), {"nobody"})
    assert watch.until(300, a_device(), claims=HELD, begin=100) == [(150, "release")]


def test_a_step_that_means_nobody_delays_no_real_one_on_the_same_device():
    full = a_device(processes=(a_process(1000, uid=1002),), memory_used=20 * GIB)
    idle = Finds(lambda view: [Finding("idle", Subject("claim", full.uuid, uid=1001, claim="c1"), "rests")])
    watch = Watch(
        a_policy("terminate", name="idle", rules=(idle,), cooldown=1000),
        a_policy("terminate", name="real", cooldown=1000),
    )
    watch.until(20, full, claims=HELD)

    assert actions(watch.sees(busy(30, full, claims=HELD))) == ["terminate"]


def test_a_claim_that_is_released_in_a_rehearsal_is_gone_from_its_next_sample_on():
    samples = [RuleView(busy(clock, a_device(), claims=HELD)) for clock in range(0, 200, 10)]
    held = Finds(lambda view: [FOUND] if view.snapshot.claims else [])
    judged = list(rehearse(samples, [a_policy("release", rules=(held,), cooldown=0.0)], interval=10))

    assert [verdict.action for _, judgement in judged for verdict in judgement.verdicts] == ["release"]
    assert [len(view.snapshot.claims) for view, _ in judged][:6] == [1, 1, 1, 1, 0, 0]
