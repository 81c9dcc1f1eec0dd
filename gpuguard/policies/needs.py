"""What policies want to know of a machine beside its devices' memory and processes, worked out once for each set.

What nobody judges by is not read.  Does not read anything: see watchdog.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuguard.model import WHO_FIELDS
from gpuguard.policies import Rule
from gpuguard.policies.health import Health
from gpuguard.policies.outside_scheduler import OutsideScheduler
from gpuguard.policies.policy import Policy


@dataclass(frozen=True)
class Needs:
    """What some policies judge by.

    Args:
        policies: those.
        fields: the groups of a sample.
        host: what processes do beside the GPU: View.host.
        scheduler: to whom an outer scheduler has given the devices: View.scheduled.
        targets: names of whom any of them tells of anything.
    """

    policies: Sequence[Policy]
    fields: frozenset[str]
    host: bool
    scheduler: bool
    targets: tuple[str, ...]


def needs_of(policies: Sequence[Policy]) -> Needs:
    """What *policies* want to know; () want what everybody is shown."""
    rules = [rule for policy in policies for rule in policy.rules]
    return Needs(
        policies,
        fields=WHO_FIELDS.union(*(rule.further_fields for rule in rules if isinstance(rule, Health))),
        host=any(map(_looks_at_host, rules)) or any(map(_tells_kinds_apart, policies)),
        scheduler=any(isinstance(rule, OutsideScheduler) for rule in rules),
        targets=tuple(sorted(set(_targets(policies)))),
    )


def _looks_at_host(rule: Rule) -> bool:
    return getattr(rule, "looks_at_host", False)


def _tells_kinds_apart(policy: Policy) -> bool:
    """Whether its scopes do, by the terminals of processes."""
    return any(scope.kinds is not None for scope in (policy.only, *policy.exempt))


def _targets(policies: Iterable[Policy]) -> Iterable[str]:
    for options in (dict(step.options) for policy in policies for step in policy.steps):
        if name := options.get("to") or options.get("hook"):
            yield str(name)
