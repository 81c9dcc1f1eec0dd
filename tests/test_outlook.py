"""What people hear of what policies have against them, and when which step comes next."""

from __future__ import annotations

from builders import a_device, a_process
from ladders import START, Watch, a_policy, busy

from gpuguard.policies.engine import KILL_AFTER, Step
from gpuguard.policies.outlook import outlook

LADDER = a_policy("warn", "terminate", Step("kill", KILL_AFTER), cooldown=1000)


def steps(watch: Watch) -> list[tuple[str | None, str | None, float | None]]:
    """(last step, next one, when) of everything that stands."""
    return [(one.last, one.next, one.due and one.due - START) for one in outlook(watch.policies, watch.memory)]


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
    found = outlook(watch.policies, watch.memory)

    assert [(one.policy, one.subject.pid, one.since - START) for one in found] == [
        ("p", 1, 0.0), ("calm", 1, 0.0), ("p", 2, 20.0), ("calm", 2, 20.0),
    ]  # fmt: skip
    assert outlook((calm,), Watch().memory) == ()
