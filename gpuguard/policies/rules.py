"""The table of rules, by their names in policy files, and what the rules of some policies need together.

Everything else about a rule stands in its class: see rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuguard.model import WHO_FIELDS
from gpuguard.policies.action_kinds import DISRUPTIVE
from gpuguard.policies.expression import ExpressionRule
from gpuguard.policies.idle import AgeRule, IdleRule
from gpuguard.policies.policy import Policy
from gpuguard.policies.quota import QuotaRule
from gpuguard.policies.rule import Rule, RuleNeeds
from gpuguard.policies.thresholds import (
    HealthRule,
    HostCpuRule,
    HostMemoryRule,
    MemoryRule,
    PowerRule,
    ProcessesRule,
    TemperatureRule,
    UtilizationRule,
)
from gpuguard.policies.trends import ForecastRule, MemoryGrowthRule
from gpuguard.policies.usage import CommandRule, OutsideSchedulerRule, TrespassRule, UnclaimedRule, UsersRule

RULES: dict[str, type[Rule]] = {
    rule.kind.name: rule
    for rule in (
        MemoryRule,
        MemoryGrowthRule,
        TemperatureRule,
        PowerRule,
        UtilizationRule,
        IdleRule,
        ProcessesRule,
        ForecastRule,
        UnclaimedRule,
        TrespassRule,
        UsersRule,
        QuotaRule,
        AgeRule,
        HealthRule,
        CommandRule,
        OutsideSchedulerRule,
        HostMemoryRule,
        HostCpuRule,
        ExpressionRule,
    )
}


@dataclass(frozen=True)
class Needs(RuleNeeds):
    """The needs of some policies together, beyond what is read for everybody."""

    kinds: bool = False  # whether it matters who sits in front of a process, so that debuggers are looked for
    targets: tuple[str, ...] = ()  # names of the targets that any of them notifies


def needs_of(policies: Sequence[Policy]) -> Needs:
    """Return what *policies* need; () need what everybody is shown.  For the past, see view.windows_of()."""
    rules = [rule.needs for policy in policies for rule in policy.rules]
    kinds = any(scope and scope.kinds for policy in policies for scope in (policy.only, *policy.exempt))
    kinds = kinds or any(step.action in DISRUPTIVE for policy in policies for step in policy.steps)
    options = [dict(step.options) for policy in policies for step in policy.steps]
    of_machine = [rule.machine for rule in rules if rule.machine is not None]
    return Needs(
        fields=WHO_FIELDS.union(*(rule.fields for rule in rules)),
        host=kinds or any(rule.host for rule in rules),
        machine=tuple(limit for limits in of_machine for limit in limits) if of_machine else None,
        scheduler=any(rule.scheduler for rule in rules),
        gpu_seconds=tuple({window for rule in rules for window in rule.gpu_seconds}),
        kinds=kinds,
        targets=tuple(sorted({str(name) for given in options if (name := given.get("to") or given.get("hook"))})),
    )
