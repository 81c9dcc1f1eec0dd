"""Random schedules of faults: whoever is hit was seen, without a hole, as long as the policy says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from builders import written
from chances import THE_SAME
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schedules import DEVICES, FAULTS, INTERVAL, LOOKS_BACK, NO_CLAIMS, NO_SAMPLE, PAUSES, RULES, WINDOW, Troubled

from gpuguard import watchdog
from gpuguard.enforcement import actions, preflight
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.enforcement.preflight import ActionContext, Preflight, targets
from gpuguard.errors import BackendError
from gpuguard.model import Snapshot, Verdict
from gpuguard.policies import engine, view
from gpuguard.policies.policy import DESTRUCTIVE, Policy, Step
from gpuguard.watchdog import Watchdog

EXAMPLES = 2000
LADDERS = ((Step("terminate"),), (Step("warn"), Step("terminate", 20.0)), (Step("pause"), Step("resume", 10.0)))

# Most of the time nothing is wrong: otherwise nobody would ever be hit.
fault = st.sampled_from([""] * 60 + list(FAULTS))
of_all = st.sampled_from([""] * 20 + [NO_SAMPLE, NO_CLAIMS])
moment = st.tuples(st.sampled_from([INTERVAL] * 12 + list(PAUSES)), st.tuples(*[fault] * DEVICES), of_all)
whole = (INTERVAL, ("",) * DEVICES, "")
schedule = st.builds(
    lambda whole_ones, more: [whole] * whole_ones + more,
    st.sampled_from([0, 0, 3, 11]),
    st.lists(moment, min_size=4, max_size=14),
)
policy = st.builds(
    lambda rule, hold, steps: Policy(rule, (RULES[rule],), hold=hold, enforce=True, steps=steps),
    st.sampled_from(sorted(RULES)),
    st.sampled_from([0.0, 20.0]),
    st.sampled_from(LADDERS),
)


def hits(verdict: Verdict) -> bool:
    """Whether it takes something away from a process."""
    return verdict.action in DESTRUCTIVE and bool(verdict.finding.processes)


class Law:
    """Stands where actions are: looks at each that would be done, and lets some wait."""

    def __init__(self, machine: Troubled, policy: Policy, waits: list[bool]) -> None:
        self.machine, self.policy, self.waits = machine, policy, waits
        self.done: list[Verdict] = []

    def act(self, verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> tuple[ActionOutcome, ...]:
        found = [Preflight(verdict, snapshot, context, snapshot.clock, each) for each in targets(verdict, snapshot)]
        if any(preflight.EARLY["sampled"].ask(target) for target in found):
            return (ActionOutcome("refused"),)  # one that waited, while the list was garbled
        self.check(verdict)
        if self.waits and self.waits.pop():
            return (ActionOutcome("refused", wait=5.0),)
        self.done.append(verdict)
        return (ActionOutcome("sent"),)

    def check(self, verdict: Verdict) -> None:
        if not hits(verdict):
            return
        for process in verdict.finding.processes:
            assert self.machine.listed((process.pid, process.start_time)), "not in the newest list"
        since, now = self.machine.since(verdict, self.policy.name), self.machine.said[-1].clock
        assert since is not None, "nothing is known of the subject now"
        needed = self.policy.hold + sum(step.after for step in self.policy.steps[: verdict.step + 1])
        assert now - since >= needed, f"known for {now - since}s only"
        assert len([each for each in self.machine.said if each.clock >= since]) >= 2, "one look"
        if self.policy.name in LOOKS_BACK:
            series = self.machine.since(verdict, "memory")
            assert series is not None and now - series >= 0.9 * WINDOW, "a trend with a hole"


def guarded(policy: Policy, schedule: Any, waits: list[bool]) -> Law:
    """The watchdog, through that schedule."""
    machine = Troubled()
    law = Law(machine, policy, waits)
    guard = Watchdog(machine, (policy,), enforce=True, append=written, interval=(INTERVAL, INTERVAL))
    setattr(guard, "_view_of", machine.look_around)  # noqa: B010
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actions, "act", law.act)
        for pause, faults, everywhere in schedule:
            machine.suffer(pause, faults, everywhere)
            try:
                judgement = guard.step()
            except BackendError:
                assert everywhere == NO_SAMPLE
                continue
            for verdict in judgement.verdicts:
                law.check(verdict)
    return law


def laws(examples: int, same: bool) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=same,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def search(examples: int, *, same: bool = THE_SAME) -> Counter[str]:
    """How often something destructive was done, by rule; *same*: with the dice of all other runs."""
    done: Counter[str] = Counter()

    @laws(examples, same)
    @given(policy, schedule, st.lists(st.booleans(), max_size=3))
    def run(policy: Policy, schedule: Any, waits: list[bool]) -> None:
        law = guarded(policy, schedule, waits)
        done[policy.name] += sum(map(hits, law.done))

    run()
    return done


def test_nobody_is_hit_whose_data_was_bad_within_the_window():
    done = search(EXAMPLES)

    assert set(done) == set(RULES)
    assert min(done.values()) > 5, done


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (
            view,
            "judged_processes",
            lambda device: tuple(row for row in device.processes or () if row.uid and row.start_time),
        ),
        (engine.EngineMemory, "start_anew", lambda *_: None),
        (watchdog.Watchdog, "_holds", lambda *_: True),
        (watchdog, "_is_same", lambda *_: True),
    ],
    ids=[
        "garbled lists are believed",
        "a pause is overlooked",
        "who waits is not looked at",
        "who waits, through a pause",
    ],
)
def test_a_planted_fault_is_found(monkeypatch, where, name, broken):
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        search(EXAMPLES, same=True)  # with other dice some need more examples than there are: seen once
