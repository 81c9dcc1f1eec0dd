"""The table of rules: the name in a policy file, and the class whose fields are its keys there; and what rules need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuguard.model import WHO_FIELDS
from gpuguard.policies.expression import ExpressionRule
from gpuguard.policies.idle import AgeRule, IdleRule
from gpuguard.policies.policy import DISRUPTIVE, Policy
from gpuguard.policies.quota import QuotaRule
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
from gpuguard.policies.view import Rule
from gpuguard.units import Amount

RULES: dict[str, type[Rule]] = {
    "memory": MemoryRule,
    "memory_growth": MemoryGrowthRule,
    "temperature": TemperatureRule,
    "power": PowerRule,
    "utilization": UtilizationRule,
    "idle": IdleRule,
    "processes": ProcessesRule,
    "forecast": ForecastRule,
    "unclaimed": UnclaimedRule,
    "trespass": TrespassRule,
    "users": UsersRule,
    "quota": QuotaRule,
    "age": AgeRule,
    "health": HealthRule,
    "command": CommandRule,
    "outside_scheduler": OutsideSchedulerRule,
    "host_memory": HostMemoryRule,
    "host_cpu": HostCpuRule,
    "expression": ExpressionRule,
}


@dataclass(frozen=True)
class Needs:
    """What some policies judge by."""

    policies: Sequence[Policy]
    fields: frozenset[str]  # the groups of a sample
    host: bool  # what processes do beside the GPU: RuleView.host
    # What each user takes of the machine, RuleView.machine: the limits of memory, () when only of its cores
    machine: tuple[Amount, ...] | None
    kinds: bool  # whether a person sits in front of a process, so that debuggers are looked for
    scheduler: bool  # to whom an outer scheduler has given the devices: RuleView.scheduled
    targets: tuple[str, ...]  # names of the targets that any of them notifies


def needs_of(policies: Sequence[Policy]) -> Needs:
    """What *policies* want to know; () want what everybody is shown."""
    rules = [rule for policy in policies for rule in policy.rules]
    kinds = any(scope and scope.kinds for policy in policies for scope in (policy.only, *policy.exempt))
    kinds = kinds or any(step.action in DISRUPTIVE for policy in policies for step in policy.steps)
    options = [dict(step.options) for policy in policies for step in policy.steps]
    of_machine = [rule for rule in rules if isinstance(rule, HostMemoryRule | HostCpuRule)]
    return Needs(
        policies,
        fields=WHO_FIELDS.union(*(rule.further_fields for rule in rules if isinstance(rule, HealthRule))),
        host=kinds or any(getattr(rule, "reads_host", False) for rule in rules),
        machine=tuple(rule.above for rule in of_machine if isinstance(rule, HostMemoryRule)) if of_machine else None,
        kinds=kinds,
        scheduler=any(isinstance(rule, OutsideSchedulerRule) for rule in rules),
        targets=tuple(sorted({str(name) for given in options if (name := given.get("to") or given.get("hook"))})),
    )
