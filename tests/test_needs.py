"""What policies want to know: all that they judge by, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_process, a_snapshot

from gpuguard import policies
from gpuguard.model import Snapshot
from gpuguard.policies import Rule
from gpuguard.policies.amounts import parse_rate
from gpuguard.policies.expression import ExpressionRule
from gpuguard.policies.expression_language import NAMES, NAMES_OF_HOST, NameSource, parse_expression
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import Policy, Scope, Step
from gpuguard.policies.rules import needs_of
from gpuguard.policies.thresholds import ProcessesRule
from gpuguard.policies.usage import OutsideSchedulerRule
from gpuguard.policies.view import RuleView
from gpuguard.watchdog import Watchdog

CALM = ProcessesRule(above=9)


def a_policy(rule: Rule = CALM, **fields: Any) -> Policy:
    return Policy("p", (CALM, rule), **{"steps": (Step("log"),), **fields})


@pytest.mark.parametrize(
    ("policy", "host"),
    [
        (a_policy(), False),
        (a_policy(IdleRule(below=5.0)), False),
        (a_policy(IdleRule(below=5.0, cpu_below=2.0)), True),
        (a_policy(IdleRule(below=5.0, network_below=parse_rate("1MB/s"))), True),
        (a_policy(ExpressionRule(parse_expression("memory_used > 1GiB"))), False),
        (a_policy(ExpressionRule(parse_expression("memory_used > 1GiB and cpu < 5%"))), True),
        (a_policy(only=Scope(users=frozenset({1}))), False),
        (a_policy(only=Scope(kinds=frozenset({"batch"}))), True),
        (a_policy(exempt=(Scope(users=frozenset({1})), Scope(kinds=frozenset({"interactive"})))), True),
    ],
)
def test_the_host_is_wanted_by_those_who_judge_by_it(policy: Policy, host: bool) -> None:
    assert needs_of([a_policy(), policy]).host is host
    assert not needs_of([]).host


def test_the_names_of_the_host_are_those_that_look_at_it() -> None:
    class Wire(dict[Any, Any]):
        def get(self, *_: object) -> Any:
            raise LookupError

    process = a_process(4711)
    device = a_device(0, processes=(process,))
    place = NameSource(RuleView(a_snapshot(device), host=Wire()), device, process)

    def looks(name: str) -> bool:
        try:
            NAMES[name].value(place)
        except LookupError:
            return True
        return False

    assert {name for name in NAMES if looks(name)} == NAMES_OF_HOST


def test_nobody_else_judges_by_the_host() -> None:
    """Whoever begins to must say so: what Needs do not name is not read, and is unknown to every rule."""
    place = Path(policies.__file__).parent
    looking = {path.name for path in place.glob("*.py") if "view.host" in path.read_text()}

    assert looking == {"idle.py", "expression_language.py", "subjects.py"}


def test_a_scheduler_is_asked_for_those_who_judge_by_it() -> None:
    assert not needs_of([a_policy()]).scheduler
    assert needs_of([a_policy(), a_policy(OutsideSchedulerRule())]).scheduler


def test_targets_are_those_of_all_steps_each_once() -> None:
    steps = (Step("notify", options=(("to", "mail"),)), Step("notify", options=(("to", "chat"),)), Step("log"))
    hooked = (Step("hook", options=(("hook", "page"),)), Step("notify", options=(("to", "mail"),)))

    assert needs_of([a_policy(steps=steps), a_policy(steps=hooked)]).targets == ("chat", "mail", "page")


def test_what_stands_is_told_of_the_policies_that_it_was_judged_by() -> None:
    """Somebody may ask between the moment in which a policy is replaced and the next look."""
    row = a_process(4711, start_time=5.0)
    snapshots = iter([a_snapshot(a_device(0, processes=(row,)), clock=100.0 + second) for second in range(3)])
    many = a_policy(ProcessesRule(above=0), hold=0.0, join="any", steps=(Step("log"), Step("log", after=3600.0)))
    guard = Watchdog(Looked(snapshots), [many])
    assert guard.status() == ()
    guard.step()
    guard.step()
    before = guard.status()
    guard.policies = (replace(many, steps=()),)

    assert [(one.last, one.next) for one in before] == [("log", "log")]
    assert guard.status() == before
    guard.step()
    assert [(one.last, one.next) for one in guard.status()] == [(None, None)]


class Looked:
    """A backend that sees these, one after the other."""

    name, simulated = "looked", True

    def __init__(self, snapshots: Iterator[Snapshot]) -> None:
        self.snapshots = snapshots

    def sample(self, fields: object, devices: object = None) -> Snapshot:
        return next(self.snapshots)

    def close(self) -> None:
        pass
