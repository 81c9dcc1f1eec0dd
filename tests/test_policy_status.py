"""What people hear of what policies have against them, and when which step comes next."""

import time
from dataclasses import dataclass, field, replace

import pytest
from builders import GIB, a_claim_record, a_device, a_process
from ladders import START, Finds, Watch, a_policy, busy

from gpuguard.claims.daemon_client import PolicyStatusReply, StatusReply
from gpuguard.daemon.requests import status_reply
from gpuguard.enforcement import actions
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.model import Finding, Subject
from gpuguard.policies.engine import AGAIN_SECONDS, PolicyStatus, evaluate, policy_status
from gpuguard.policies.policy import KILL_AFTER, KeptMark, Step
from gpuguard.policies.rule import Rule, RuleKind, RuleNeeds
from gpuguard.policies.view import MOST, HostUse, RuleView, ValueSeries, claim_subject, device_subject, process_subject
from gpuguard.views.policy import status_lines
from gpuguard.watchdog import Watchdog

LADDER = a_policy("warn", "terminate", Step("kill", KILL_AFTER), cooldown=1000)


def steps(watch: Watch) -> list[tuple[str | None, str | None, float | None]]:
    """(last step, next one, when) of everything that stands."""
    return [
        (row.last, row.next, row.due and row.due - START) for row in policy_status(watch.policies, watch.memory, {})
    ]


def test_before_each_step_it_is_known_when_that_comes():
    watch = Watch(LADDER)
    watch.until(10)
    assert steps(watch) == [(None, "warn", 30.0)]

    watch.until(40, begin=20)
    assert steps(watch) == [("warn", "terminate", 90.0)]
    watch.until(90, begin=50)
    assert steps(watch) == [("terminate", "kill", 90.0 + KILL_AFTER)]


ALICE_RUNS = process_subject(a_device(), a_process())
WARNED = PolicyStatus(
    "p", ALICE_RUNS, START, "warn", "terminate", START + 90, False,
    harm="terminate", harm_due=START + 90, rule="processes", why="uses memory",
)  # fmt: skip
OF_P = "p", ALICE_RUNS


@pytest.mark.parametrize(
    ("facts", "changed"),
    [
        ({}, {}),
        ({"refused": {OF_P: (1, "it is protected")}}, {"refused": "it is protected"}),
        ({"refused": {OF_P: (0, "no terminal")}}, {}),
        ({"refused": {("q", OF_P[1]): (1, "it is protected")}}, {}),
        ({"put_off": {OF_P: (1, START + 600)}}, {"due": START + 600, "harm_due": START + 600}),
        (
            {"put_off": {OF_P: (0, START + 50)}},
            {"last": None, "next": "warn", "due": START + 50, "harm_due": START + 110},
        ),
        ({"kept": {("uid", 1002): KeptMark(START + 900)}}, {}),
        ({"kept": {("uid", 1001): KeptMark(START + 900)}}, None),
    ],
    ids=[
        "as it is", "refused", "refused before", "refused to another policy", "put off", "the first step put off",
        "another user kept", "kept",
    ],
)  # fmt: skip
def test_what_stands_is_said_with_what_was_seen_what_comes_and_what_is_in_the_way(facts, changed):
    watch = Watch(LADDER)
    watch.until(30)
    rows = policy_status(watch.policies, watch.memory, **{"put_off": {}, **facts})

    assert rows == (() if changed is None else (replace(WARNED, **changed),))


def test_what_was_promised_to_a_person_at_a_terminal_happens_after_their_grace():
    watch = Watch(a_policy("warn", "pause", Step("terminate"), Step("kill", KILL_AFTER), cooldown=9000))
    at_terminal = {(4711, 1000.0): HostUse(terminal="/dev/pts/1")}
    promised, worst, happened = [], [], []
    for clock in range(0, 2500, 10):
        for verdict in watch.sees(RuleView(busy(clock), host=at_terminal)).verdicts:
            happened.append((verdict.action, clock, verdict.graced))
            promised.append((verdict.next_action, verdict.next_after and clock + verdict.next_after))
            worst.append((verdict.harm_action, verdict.harm_after and clock + verdict.harm_after))

    assert happened == [("warn", 30, 0), ("pause", 690, 600), ("terminate", 1290, 600), ("kill", 1920, 600)]
    assert promised == [*(step[:2] for step in happened[1:]), (None, None)]
    assert worst == [("terminate", 1290), ("terminate", 1290), ("kill", 1920), (None, None)]


def test_the_step_that_harms_is_known_from_the_beginning_and_when_it_comes():
    watch = Watch(a_policy("warn", "notify", "terminate"))
    [warning] = [verdict for clock in range(0, 40, 10) for verdict in watch.sees(busy(clock)).verdicts]
    [row] = policy_status(watch.policies, watch.memory, {})

    assert (warning.action, warning.next_action, warning.harm_action, warning.harm_after) == (
        "warn", "notify", "terminate", 120.0,
    )  # fmt: skip
    assert (row.next, row.harm, row.harm_due) == ("notify", "terminate", START + 30 + 120)


def test_a_step_that_means_nobody_is_no_harm_to_a_claim():
    claim = a_claim_record()
    rule = Finds(lambda view: [Finding("age", claim_subject(claim), "unused")])
    watch = Watch(a_policy("warn", "terminate", "release", rules=(rule,)))
    watch.until(30, claims=(claim,))
    [row] = policy_status(watch.policies, watch.memory, {})

    assert (row.next, row.due, row.harm, row.harm_due) == ("release", START + 30 + 120, "release", START + 30 + 120)


def test_what_was_promised_happens():
    watch = Watch(LADDER)
    happened = []
    for clock in range(0, 130, 10):
        told = steps(watch)
        for verdict in watch.sees(busy(clock)).verdicts:
            happened.append((verdict.action, told[0][1:] == (verdict.action, float(clock))))

    assert happened == [("warn", True), ("terminate", True), ("kill", True)]


def test_after_the_last_step_it_is_told_that_all_begins_anew_when_the_cooldown_is_over():
    """A user whose process still did what a policy forbids was told that none had anything against them."""
    watch = Watch(LADDER)
    watch.until(120)
    assert steps(watch) == [("kill", "warn", 120.0 + 1000 + 30)]

    watch.until(1140, begin=130)
    assert steps(watch) == [(None, "warn", 1150.0)]
    assert [verdict.action for verdict in watch.sees(busy(1150)).verdicts] == ["warn"]


@pytest.mark.parametrize(
    ("policy", "devices"), [(LADDER, [a_device()]), (a_policy("warn", cooldown=1000), [])], ids=["does well", "changed"]
)
def test_after_the_last_step_nothing_stands_of_who_does_well_or_of_a_policy_that_was_changed(policy, devices):
    watch = Watch(LADDER)
    watch.until(130)
    watch.policies = (policy,)
    watch.sees(busy(140, *devices))
    watch.sees(busy(150, *devices[1:]))

    assert steps(watch) == []


@pytest.mark.parametrize("clock", [20, 130])
def test_of_a_policy_whose_judgement_failed_nothing_stands(clock):
    watch = Watch(LADDER)
    watch.until(clock)
    assert watch.memory.states["p"]
    evaluate(busy(clock + 10), watch.policies, watch.memory, isolate=lambda policy, judge: None)

    assert not watch.memory.states.get("p")


def test_what_stands_is_told_although_the_last_look_has_failed():
    """The end of the cooldown was forgotten by then, and the question what stands got a fault for an answer."""
    watch = Watch(a_policy(Step("warn", after=7), cooldown=5))
    watch.until(40)

    def fail(policy, judge):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(busy(50), watch.policies, watch.memory, isolate=fail)

    assert steps(watch) == [("warn", "warn", 40.0 + 5 + 30 + 7)]


class Seen:
    """A backend that sees the same job each second."""

    name, simulated, clock = "seen", True, 0.0

    def sample(self, fields, devices=None):
        self.clock += 1
        return busy(self.clock)

    def close(self):
        pass


@pytest.mark.parametrize("ladder", [("warn", "terminate"), ("warn", "terminate", "pause")])
def test_a_step_that_a_check_has_put_off_is_told_as_the_next_one_and_until_when(monkeypatch, ladder):
    """It is on a terminal, and has ten minutes more: its user was told that nothing came any more."""

    def act(verdict, snapshot, context):
        return (ActionOutcome("refused", wait=600.0) if verdict.action == "terminate" else ActionOutcome("done"),)

    monkeypatch.setattr(actions, "act", act)
    guard = Watchdog(Seen(), [a_policy(*(Step(action) for action in ladder), hold=0.0)])
    for _ in range(5):
        guard.step()

    [row] = guard.status()
    assert (row.last, row.next, row.due and row.due - START) == ("warn", "terminate", 605.0)


def test_a_step_that_a_check_refused_was_not_taken_and_comes_again(monkeypatch):
    def act(verdict, snapshot, context):
        return (ActionOutcome("done" if verdict.action == "warn" else "refused", "uid 7 is protected"),)

    monkeypatch.setattr(actions, "act", act)
    guard = Watchdog(Seen(), [a_policy(Step("warn"), Step("terminate"), Step("kill", KILL_AFTER), hold=0.0)])
    for _ in range(5):
        guard.step()

    [row] = guard.status()
    assert (row.last, row.refused, row.next) == ("warn", "uid 7 is protected", "terminate")
    assert row.due and row.due - START == 3 + AGAIN_SECONDS
    [text] = status_lines(StatusReply(True, (status_reply(row),), 0), time.time())
    assert "last step warn, terminate was refused (uid 7 is protected); terminate " in text


@pytest.mark.parametrize(("left", "then"), [(60.0, "in 1m, at "), (-1.0, "with the next look, if nothing changes")])
def test_no_step_is_announced_for_a_time_that_is_over(left, then):
    whom = "p", "process", "al", 7, None, None  # its policy, kind, user, pid, claim and device
    row = PolicyStatusReply(
        *whom, START, None, "terminate", START + left, enforce=True, harm="terminate", harm_unix_seconds=START + left
    )

    [text] = status_lines(StatusReply(True, (row,), 0), START)
    assert f"; terminate {then}" in text


def test_a_kill_has_no_time_while_nobody_was_asked_to_end():
    watch = Watch(LADDER)
    watch.until(90)
    (standing,) = watch.memory.states["p"].values()
    standing.terminated_at = None

    assert steps(watch) == [("terminate", "kill", None)]


def test_the_oldest_stands_first_and_nobody_who_is_well_behaved():
    calm = a_policy("warn", name="calm", hold=1000)
    watch = Watch(LADDER, calm)
    watch.until(10, a_device(processes=(a_process(1),)))
    watch.until(20, a_device(processes=(a_process(1), a_process(2))), begin=20)
    found = policy_status(watch.policies, watch.memory, {})

    assert [(row.policy, row.subject.pid, row.since - START) for row in found] == [
        ("p", 1, 0.0), ("calm", 1, 0.0), ("p", 2, 20.0), ("calm", 2, 20.0),
    ]  # fmt: skip
    assert policy_status((calm,), Watch().memory, {}) == ()


@dataclass(frozen=True)
class Looks(Rule):
    """Notes what it sees of the past."""

    wanted: tuple[tuple[str, float], ...]
    seen: list[dict[tuple[Subject, str], list[tuple[float, float]]]] = field(default_factory=list, compare=False)

    kind = RuleKind("looks", innocent=True)

    @property
    def needs(self):
        return RuleNeeds(past=self.wanted)

    def check(self, view: RuleView):
        self.seen.append({key: list(series) for key, series in view.past.items()})
        return ()


def past_of(rule: Looks, *samples, **settings):
    """What *rule* saw of the past at the last of *samples*."""
    watch = Watch(a_policy("warn", rules=(rule,)), **settings)
    for sample in samples:
        watch.sees(sample)
    return rule.seen[-1]


DEVICE = device_subject(a_device())


def test_a_rule_sees_the_values_that_it_asked_for_and_the_newest_among_them():
    samples = [busy(clock, a_device(utilization=float(clock))) for clock in range(0, 70, 10)]

    past = past_of(Looks((("utilization", 20),)), *samples)

    assert past == {(DEVICE, "utilization"): [(10_040, 40), (10_050, 50), (10_060, 60)]}


def test_unknown_is_no_sample_of_a_device_or_of_a_process():
    samples = [busy(0, a_device(utilization=5.0)), busy(10, a_device(utilization=None))]
    assert past_of(Looks((("utilization", 60),)), *samples) == {(DEVICE, "utilization"): [(10_000, 5)]}

    samples = [busy(i * 10, a_device(processes=(a_process(memory_used=used),))) for i, used in enumerate((GIB, None))]
    past = past_of(Looks((("memory_used", 60),)), *samples)
    assert past[process_subject(a_device(), a_process()), "memory_used"] == [(10_000, GIB)]


def test_a_series_with_a_hole_starts_afresh():
    samples = [busy(clock, a_device(0), a_device(1)) for clock in (0, 10)]
    samples += [busy(clock, a_device(1)) for clock in range(20, 60, 10)] + [busy(60, a_device(0), a_device(1))]

    past = past_of(Looks((("utilization", 600),)), *samples)

    assert len(past[DEVICE, "utilization"]) == 1
    assert len(past[device_subject(a_device(1)), "utilization"]) == 7


def test_after_a_pause_nothing_is_remembered():
    samples = [busy(clock) for clock in (0, 10, 20, 3600)]

    assert [len(series) for series in past_of(Looks((("utilization", 7200),)), *samples).values()] == [1]


def test_the_longest_window_that_any_rule_wants_is_kept():
    rules = (Looks((("utilization", 30),)), Looks((("utilization", 100), ("power_draw", 10))))
    watch = Watch(a_policy("warn", rules=rules))
    for clock in range(0, 300, 10):
        watch.sees(busy(clock))

    assert {name[1]: len(series) for name, series in watch.memory.past.items()} == {"utilization": 11, "power_draw": 2}


def test_who_was_not_seen_for_a_window_is_forgotten():
    rule = Looks((("memory_used", 50),))
    gone = busy(0, a_device(processes=(a_process(),)))

    past = past_of(rule, gone, *(busy(clock, a_device()) for clock in range(10, 90, 10)))

    assert past.keys() == {(DEVICE, "memory_used")}


def test_a_past_that_nobody_wants_any_more_is_forgotten():
    watch = Watch(a_policy("warn", rules=(Looks((("utilization", 600),)),)))
    watch.sees(busy(0))
    watch.policies = (a_policy("warn"),)
    watch.sees(busy(10))

    assert watch.memory.past == {}


def test_the_past_of_processes_with_an_unknown_identity_is_not_recorded():
    device = a_device(processes=(a_process(start_time=None), a_process(2, uid=None)))

    assert past_of(Looks((("memory_used", 60),)), busy(0, device)).keys() == {(DEVICE, "memory_used")}


def test_a_long_window_is_kept_as_means_of_slices():
    series = ValueSeries(window=100_000.0)
    for second in range(120_000):
        series.add(float(second), float(second % 2))

    assert len(series) <= MOST + 1
    assert series[-1][0] == 119_999
    assert abs(sum(value for _, value in series) / len(series) - 0.5) < 0.01
    assert series[0][0] >= 19_999


@pytest.mark.parametrize(
    ("last", "refused", "stage"),
    [(None, None, "found"), ("warn", None, "warned"), ("log", None, "found"), ("terminate", None, "acted"),
     ("warn", "it is protected", "refused")],
)  # fmt: skip
def test_how_far_a_breach_has_come_is_one_word(last, refused, stage):
    status = PolicyStatus("p", Subject("device"), 0.0, last, None, None, True, refused=refused)

    assert status.stage == stage
