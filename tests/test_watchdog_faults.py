"""A fault of ours that one policy, or one process, brings to light: the others are judged and acted on all the same.

Whoever found out what makes a rule or an action fail could else switch off the guard for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from dataclasses import replace as replace_fields

import pytest
from builders import GIB, Scripted, a_process
from test_watchdog import A_HOG, HOGS, outcomes, snapshots

from gpuguard import watchdog
from gpuguard.enforcement import actions
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.policy import Policy, Step
from gpuguard.watchdog import Watchdog


@dataclass(frozen=True)
class Broken:
    """A rule that fails."""

    def check(self, view):
        raise ZeroDivisionError("a value that nobody foresaw")


BROKEN = Policy("broken", (Broken(),), hold=0.0, steps=(Step("log"),))


@pytest.fixture
def log():
    return []


@pytest.fixture
def a_watchdog(log):
    def make(answers, *policies, **options):
        return Watchdog(Scripted(*answers), policies, append=lambda event: log.append(event) or True, **options)

    return make


def failures(log):
    return [(dict(event.facts)["policy"], event.message) for event in log if event.outcome == "failed"]


@pytest.mark.parametrize("policies", [(BROKEN, HOGS), (HOGS, BROKEN)])
def test_a_rule_that_fails_keeps_no_other_policy_from_anything(a_watchdog, log, policies):
    guard = a_watchdog(snapshots(A_HOG, number=5), *policies)
    for _ in range(4):
        guard.step()

    assert outcomes(log)  # what became of the hog
    [(policy, message)] = failures(log)
    assert policy == "broken"
    assert "the others go on: ZeroDivisionError('a value that nobody foresaw')" in message


def test_a_rule_that_goes_on_failing_is_named_once_a_minute(a_watchdog, log, monkeypatch):
    monkeypatch.setattr(watchdog, "RETRY_SECONDS", 0.0)
    guard = a_watchdog(snapshots(A_HOG, number=3), BROKEN)
    guard.step()
    guard.step()

    assert len(failures(log)) == 2


def test_a_rule_that_failed_says_nothing_of_what_was_before(monkeypatch):
    policy, memory = Policy("p", HOGS.rules, hold=20.0, steps=(Step("log"),)), EngineMemory()
    first, second, third, *later = snapshots(A_HOG, number=5, every=10.0)
    evaluate(first, [policy], memory)
    evaluate(second, [policy], memory, isolate=lambda policy, judge: None)
    assert evaluate(third, [policy], memory).verdicts == ()

    assert [len(evaluate(each, [policy], memory).verdicts) for each in later] == [0, 1]


def test_a_step_that_fails_is_not_tried_again_and_the_others_are_done(a_watchdog, log, monkeypatch):
    def act(verdict, snapshot, context, before=actions.act):
        if verdict.finding.subject.pid == 1001:
            raise ValueError("of one process alone")
        return before(verdict, snapshot, context)

    monkeypatch.setattr(actions, "act", act)
    processes = [a_process(pid, memory_used=30 * GIB) for pid in (1001, 1002)]
    hogs = replace(A_HOG, memory_used=60 * GIB, processes=tuple(processes))
    policy = Policy("hogs", HOGS.rules, hold=0.0, steps=(Step("log"),), cooldown=3600.0)
    guard = a_watchdog(snapshots(hogs, number=6), policy)
    for _ in range(5):
        guard.step()

    assert [(event.kind, event.pid) for event in log if event.kind == "log"] == [("log", 1002)]
    assert failures(log) == [
        (
            "hogs",
            "the policy hogs meets a fault inside gpuguard, and the others go on: ValueError('of one process alone')",
        )
    ]


def fail(*_, **__):
    raise OverflowError("nobody foresaw that")


def test_a_condition_that_cannot_be_judged_again_does_not_hold(a_watchdog, log, monkeypatch):
    """Before each signal it is asked; who could make that fail must not be hit for it, and no innocent either."""
    holds = []
    monkeypatch.setattr(actions, "act", lambda verdict, now, context: holds.append(context.still_true(verdict, now)))
    monkeypatch.setattr(watchdog.engine, "still_holds", fail)
    guard = a_watchdog(snapshots(A_HOG, number=3), HOGS)
    for _ in range(2):
        guard.step()

    assert holds == [False]
    assert [policy for policy, _ in failures(log)] == ["hogs"]


def test_a_fault_in_looking_after_the_unkillable_keeps_nothing_from_being_done(a_watchdog, log, monkeypatch):
    monkeypatch.setattr(actions, "give_up_unkillable", fail)
    guard = a_watchdog(snapshots(A_HOG, number=3), replace_fields(HOGS, steps=(Step("log"),)))
    for _ in range(2):
        guard.step()

    assert [event.kind for event in log if event.outcome == "done"] == ["log"]
    assert failures(log)


def test_who_listens_and_fails_keeps_no_duration_from_being_over(a_watchdog, log):
    """Looks that come after a minute, as for a driver that does not answer, would start all durations anew."""

    guard = a_watchdog(snapshots(A_HOG), HOGS, on_sample=fail, interval=(1.0, 2.0))
    looks = []

    class Ended:
        def is_set(self):
            return len(looks) > 9

        def wait(self, seconds):
            looks.append(guard.pause)

    guard.run(Ended())

    assert max(looks) <= 2.0


def test_a_callback_that_fails_does_not_end_the_loop(a_watchdog):
    """A guard whose standard error was a pipe that nobody read any more guarded nothing from its next event on."""
    looks = []

    class Ended:
        def is_set(self):
            return len(looks) > 3

        def wait(self, seconds):
            looks.append(seconds)

    def fail(event):
        raise BrokenPipeError("planted")

    a_watchdog(snapshots(A_HOG), HOGS, on_event=fail).run(Ended())

    assert len(looks) == 4
