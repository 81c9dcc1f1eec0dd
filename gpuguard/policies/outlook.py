"""What policies have against whom now, and which step comes next when: for people who ask.  Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuguard.model import Subject
from gpuguard.policies.ladder import Memory, Standing
from gpuguard.policies.policy import KILL_AFTER, Policy


@dataclass(frozen=True)
class Outlook:
    """One condition that holds for somebody.

    Args:
        policy: its name.
        subject: for whom.
        since: clock since when.
        last: the last step that was taken, None before the first.
        next: the one that comes if nothing changes, None after the last.
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


def outlook(policies: Sequence[Policy], memory: Memory) -> tuple[Outlook, ...]:
    """Everything that stands, by policy, the oldest first."""
    found = []
    for policy in policies:
        for standing in memory.standings.get(policy.name, {}).values():
            steps, done = policy.steps, standing.done
            found.append(
                Outlook(
                    policy=policy.name,
                    subject=standing.subject,
                    since=standing.since,
                    last=steps[done - 1].action if done else None,
                    next=steps[done].action if done < len(steps) else None,
                    due=_due(policy, standing),
                    enforce=policy.enforce,
                )
            )
    return tuple(sorted(found, key=lambda one: one.since))


def _due(policy: Policy, standing: Standing) -> float | None:
    if standing.done >= len(policy.steps):
        return None
    step = policy.steps[standing.done]
    due = (standing.stepped_at if standing.done else standing.since + policy.hold) + step.after
    if step.action == "kill":
        return None if standing.terminated_at is None else max(due, standing.terminated_at + KILL_AFTER)
    return due
