"""What policies have against whom now, and which step comes next when: for people who ask.  Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuguard.model import Subject, Verdict
from gpuguard.policies.ladder import Memory, Standing
from gpuguard.policies.policy import KILL_AFTER, Policy
from gpuguard.policies.sight import SubjectIdentity


@dataclass(frozen=True)
class Outlook:
    """One condition that holds for somebody.

    Args:
        policy: its name.
        subject: for whom.
        since: clock since when.
        last: the last step that was taken, None before the first.
        next: the one that comes if nothing changes; after the last one the first, when its cooldown is over.
        due: clock at which that is, if every sample until then finds the same.
        enforce: the policy's own switch.
    """

    policy: str
    subject: Subject
    since: float
    last: str | None
    next: str | None
    due: float | None
    enforce: bool


def outlook(
    policies: Sequence[Policy],
    memory: Memory,
    waiting: Mapping[tuple[str, SubjectIdentity], tuple[Verdict, float]] | None = None,
) -> tuple[Outlook, ...]:
    """Everything that stands, the oldest first.

    Args:
        policies: that were judged by.
        memory: of the engine.
        waiting: (policy, identity) -> a step whose time has come, and the clock until which a check has put it off.
    """
    found = []
    for policy in policies:
        name, steps, enforce = policy.name, policy.steps, policy.enforce
        still = [(identity, one, *_next(policy, one)) for identity, one in memory.standings.get(name, {}).items()]
        for identity, one in memory.spent.get(name, {}).items():
            anew = memory.cooling[name, identity] + policy.hold + steps[0].after
            still.append((identity, one, steps[-1].action, steps[0].action, anew))
        for identity, one, last, following, due in still:
            if waiting and (name, identity) in waiting:
                verdict, until = waiting[name, identity]
                last, following, due = _before(policy, verdict.step), verdict.action, until
            found.append(Outlook(name, one.subject, one.since, last, following, due, enforce))
    return tuple(sorted(found, key=lambda one: one.since))


def _next(policy: Policy, one: Standing) -> tuple[str | None, str | None, float | None]:
    """The last step, the next one, and when that is."""
    following = policy.steps[one.done].action if one.done < len(policy.steps) else None
    return _before(policy, one.done), following, _due(policy, one)


def _before(policy: Policy, step: int) -> str | None:
    return policy.steps[step - 1].action if step else None


def _due(policy: Policy, standing: Standing) -> float | None:
    if standing.done >= len(policy.steps):
        return None
    step = policy.steps[standing.done]
    due = (standing.stepped_at if standing.done else standing.since + policy.hold) + step.after
    if step.action == "kill":
        return None if standing.terminated_at is None else max(due, standing.terminated_at + KILL_AFTER)
    return due
