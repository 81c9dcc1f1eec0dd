"""What people hear of what policies have against them, and when which step comes next."""

from __future__ import annotations

import pytest
from builders import a_device, a_process
from ladders import START, Watch, a_policy, busy

from gpuguard.enforcement import actions
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.policies.engine import evaluate, policy_status
from gpuguard.policies.policy import KILL_AFTER, Step
from gpuguard.watchdog import Watchdog

LADDER = a_policy("warn", "terminate", Step("kill", KILL_AFTER), cooldown=1000)


def steps(watch: Watch) -> list[tuple[str | None, str | None, float | None]]:
    """(last step, next one, when) of everything that stands."""
    return [(one.last, one.next, one.due and one.due - START) for one in policy_status(watch.policies, watch.memory)]


def test_before_the_first_step_it_is_known_when_that_comes():
    watch = Watch(LADDER)
    watch.until(10)

    assert steps(watch) == [(None, "warn", 30.0)]


def test_after_a_step_comes_the_next_one_in_its_time():
    watch = Watch(LADDER)
    watch.until(40)

    assert steps(watch) == [("warn", "terminate", 90.0)]
    watch.until(90, begin=50)
    assert steps(watch) == [("terminate", "kill", 90.0 + KILL_AFTER)]


def test_what_was_promised_happens():
    watch = Watch(LADDER)
    happened = []
    for clock in range(0, 130, 10):
        told = steps(watch)
        for verdict in watch.sees(busy(clock)).verdicts:
            happened.append((verdict.action, told[0][1:] == (verdict.action, float(clock))))

    assert happened == [("warn", True), ("terminate", True), ("kill", True)]


def test_after_the_last_step_it_is_told_that_all_begins_anew_when_the_cooldown_is_over():
    """A user whose process still did what a policy forbids was told that none had anything against him."""
    watch = Watch(LADDER)
    watch.until(120)
    assert steps(watch) == [("kill", "warn", 120.0 + 1000 + 30)]

    watch.until(1140, begin=130)
    assert steps(watch) == [(None, "warn", 1150.0)]
    assert [verdict.action for verdict in watch.sees(busy(1150)).verdicts] == ["warn"]


def test_who_does_well_after_the_last_step_stands_nowhere():
    watch = Watch(LADDER)
    watch.until(130)
    watch.sees(busy(140, a_device()))
    watch.sees(busy(150))

    assert steps(watch) == []


def test_what_stood_after_the_last_step_of_a_policy_that_was_changed_stands_nowhere():
    watch = Watch(LADDER)
    watch.until(130)
    watch.policies = (a_policy("warn", cooldown=1000),)
    watch.sees(busy(140))

    assert steps(watch) == [] and not watch.memory.spent


def test_who_goes_while_another_one_stays_after_the_last_step_is_left_out_alone():
    alone, both = a_device(processes=(a_process(7),)), a_device(processes=(a_process(7), a_process(8)))
    watch = Watch(a_policy("warn", cooldown=1000))
    watch.until(40, both)
    watch.sees(busy(50, alone))
    [left] = watch.memory.spent["p"].values()

    assert left.subject.pid == 7


@pytest.mark.parametrize("clock", [20, 130])
def test_of_a_policy_whose_judgement_failed_nothing_stands(clock):
    watch = Watch(LADDER)
    watch.until(clock)
    assert watch.memory.standings["p"] or watch.memory.spent["p"]
    evaluate(busy(clock + 10), watch.policies, watch.memory, apart=lambda policy, judge: None)

    assert not watch.memory.standings.get("p") and not watch.memory.spent.get("p")


def test_what_stands_is_told_although_the_last_look_has_failed():
    """The end of the cooldown was forgotten by then, and who asked what stood against him got a fault for an answer."""
    watch = Watch(a_policy(Step("warn", after=7), cooldown=5))
    watch.until(40)

    def fail(policy, judge):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(busy(50), watch.policies, watch.memory, apart=fail)

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

    assert [(one.last, one.next, one.due and one.due - START) for one in guard.outlook()] == [
        ("warn", "terminate", 605.0)
    ]


def test_a_policy_without_steps_promises_nothing():
    watch = Watch(a_policy(steps=()))
    watch.until(40)

    assert steps(watch) == [(None, None, None)]


def test_a_kill_has_no_time_while_nobody_was_asked_to_end():
    watch = Watch(LADDER)
    watch.until(90)
    (standing,) = watch.memory.standings["p"].values()
    standing.terminated_at = None

    assert steps(watch) == [("terminate", "kill", None)]


def test_the_oldest_stands_first_and_nobody_who_is_well_behaved():
    calm = a_policy("warn", name="calm", hold=1000)
    watch = Watch(LADDER, calm)
    watch.until(10, a_device(processes=(a_process(1),)))
    watch.until(20, a_device(processes=(a_process(1), a_process(2))), begin=20)
    found = policy_status(watch.policies, watch.memory)

    assert [(one.policy, one.subject.pid, one.since - START) for one in found] == [
        ("p", 1, 0.0), ("calm", 1, 0.0), ("p", 2, 20.0), ("calm", 2, 20.0),
    ]  # fmt: skip
    assert policy_status((calm,), Watch().memory) == ()
