"""What came of the tests of policies, for people and as JSON: for each failure what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuguard.rehearsals.scenario import Expected
from gpuguard.rehearsals.trial import Got, Outcome, Trial
from gpuguard.units import format_duration
from gpuguard.views.text import neutralise


def trial_lines(trial: Trial) -> Iterator[str]:
    """One line per test, more for a failure."""
    for path, fault in trial.faults:
        yield from fault.lines(neutralise(path))
    path = neutralise(trial.path)
    if trial.faults:
        yield f"{path}: no test was run."
        return
    for outcome in trial.outcomes:
        yield f"{'ok    ' if outcome.passed else 'FAILED'}  {neutralise(outcome.name)}"
        if not outcome.passed:
            yield from (f"          {neutralise(line)}" for line in _differences(outcome))
    failed = sum(not outcome.passed for outcome in trial.outcomes)
    many = f"{len(trial.outcomes)} test{'s' * (len(trial.outcomes) != 1)}"
    yield f"{path}: {many}, {failed} failed." if failed else f"{path}: {many}, all passed."


def _differences(outcome: Outcome) -> Iterator[str]:
    for expected in outcome.missing:
        yield f"expected  {_expected(expected)}"
    for got in outcome.surplus:
        yield f"got       {_got(got)}"
    if outcome.missing and not outcome.surplus:
        met = ", ".join(f"{got.action} at {format_duration(got.at)}" for got in outcome.got)
        yield f"got       nothing but what was expected: {met}" if met else "got       nothing at all"


def _expected(expected: Expected) -> str:
    words = [f"at {format_duration(expected.at)}: {expected.action}"]
    words += [f"by {expected.policy}"] if expected.policy else []
    words += [f"for {expected.user}"] if expected.user else []
    words += [f"on device {expected.device}"] if expected.device is not None else []
    return " ".join(words)


def _got(got: Got) -> str:
    where = f" on device {got.device}" if got.device is not None else ""
    whom = f" for {', '.join(got.users)}" if got.users else ""
    return f"at {format_duration(got.at)}: {got.action} by {got.policy}{whom}{where}, because {got.why}"


def trial_json(trial: Trial) -> dict[str, Any]:
    """One object per file."""
    return {
        "path": trial.path,
        "policies": trial.policies,
        "ok": not trial.faults and all(outcome.passed for outcome in trial.outcomes),
        "faults": [{"path": path, **vars(fault)} for path, fault in trial.faults],
        "tests": [
            {
                "name": outcome.name,
                "passed": outcome.passed,
                "got": [_got_json(got) for got in outcome.got],
                "missing": [
                    {"at_seconds": each.at, "action": each.action, "policy": each.policy, "user": each.user,
                     "device": each.device}
                    for each in outcome.missing
                ],
                "surplus": [_got_json(got) for got in outcome.surplus],
            }
            for outcome in trial.outcomes
        ],
    }  # fmt: skip


def _got_json(got: Got) -> dict[str, Any]:
    return {
        "at_seconds": got.at,
        "action": got.action,
        "policy": got.policy,
        "users": list(got.users),
        "device": got.device,
        "why": got.why,
    }
