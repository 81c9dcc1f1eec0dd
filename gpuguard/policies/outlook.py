"""What policies have against whom now, and which step comes next when: for people who ask.  Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuguard.model import Subject
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
    put_off: Mapping[tuple[str, SubjectIdentity], tuple[int, float]] | None = None,
) -> tuple[Outlook, ...]:
    """Everything that stands, the oldest first.

    Args:
        policies: that were judged by.
        memory: of the engine.
        put_off: (policy, identity) -> the place of a step whose time has come, and the clock until which a check has
            put it off.
    """
    found = []
    for policy in policies:
        name, steps = policy.name, policy.steps
        for identity, one in (*memory.standings.get(name, {}).items(), *memory.spent.get(name, {}).items()):
            done, due = (put_off or {}).get((name, identity)) or (one.done, _due(policy, one))
            last = steps[done - 1].action if done else None
            following = steps[done % len(steps)].action if steps else None
            found.append(Outlook(name, one.subject, one.since, last, following, due, policy.enforce))
    return tuple(sorted(found, key=lambda one: one.since))


def _due(policy: Policy, standing: Standing) -> float | None:
    if not policy.steps:
        return None
    if standing.done == len(policy.steps):
        return standing.stepped_at + policy.cooldown + policy.hold + policy.steps[0].after
    step = policy.steps[standing.done]
    due = (standing.stepped_at if standing.done else standing.since + policy.hold) + step.after
    if step.action == "kill":
        return None if standing.terminated_at is None else max(due, standing.terminated_at + KILL_AFTER)
    return due
