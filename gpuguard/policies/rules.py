"""The table of rules: the name in a policy file, and the class whose fields are the keys there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpuguard.model import WHO_FIELDS, Finding, GpuProcess, Subject
from gpuguard.policies import Rule
from gpuguard.policies.expression import ExpressionRule
from gpuguard.policies.health import HealthRule
from gpuguard.policies.idle import AgeRule, IdleRule
from gpuguard.policies.memory_trends import ForecastRule, MemoryGrowthRule
from gpuguard.policies.policy import Policy
from gpuguard.policies.quota import QuotaRule
from gpuguard.policies.thresholds import MemoryRule, PowerRule, ProcessesRule, TemperatureRule, UtilizationRule
from gpuguard.policies.usage import CommandRule, OutsideSchedulerRule, TrespassRule, UnclaimedRule, UsersRule
from gpuguard.policies.view import SampleIndex

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
    "expression": ExpressionRule,
}


# Several rules in one condition: `any` unites their findings, `all` joins them on what they share.
#
# A join takes the facts of two subjects together, and keeps them if they contradict neither each other nor the sample:
#
#     process p on device d   +  device d            the process p
#     process p of user u     +  user u              the process p
#     device d                +  claim c             the claim c, if it holds d
#     device d                +  user u              the device d for u, if u computes or has a claim there
#     anything                +  node                that thing
#
# What comes out is of the narrower kind and means the processes that both sides mean: a side that names none means all
# that fit it.  Two sides that name no process in common do not meet.


NARROWEST_FIRST = ("process", "claim", "device", "user", "node")


def findings_of(policy: Policy, sight: SampleIndex) -> Sequence[Finding]:
    """For whom the whole condition of *policy* holds now.  Every rule is asked, so that none loses a sample."""
    found = [list(rule.check(sight.view)) for rule in policy.rules]
    joined = found[0]
    for further in found[1:]:
        joined = [*joined, *further] if policy.join == "any" else list(_join(joined, further, sight))
    return joined


def _join(left: Iterable[Finding], right: Iterable[Finding], sight: SampleIndex) -> Iterator[Finding]:
    by_device: dict[str | None, list[Finding]] = {}
    for finding in right:
        by_device.setdefault(finding.subject.device, []).append(finding)
    anywhere = by_device.get(None, [])
    everywhere = [finding for findings in by_device.values() for finding in findings]
    for finding in left:
        device = finding.subject.device
        for other in everywhere if device is None else [*by_device.get(device, ()), *anywhere]:
            together = _meet(finding, other, sight)
            if together is not None:
                yield together


def _meet(left: Finding, right: Finding, sight: SampleIndex) -> Finding | None:
    subject = _both(left.subject, right.subject)
    if subject is None or not _is_so(subject, sight):
        return None
    processes = _common(left.processes, right.processes, subject, sight)
    if not processes and (left.processes or right.processes):
        return None
    return Finding(left.rule, subject, f"{left.why}; {right.why}", processes)


def _both(left: Subject, right: Subject) -> Subject | None:
    facts = []
    for one, other in (
        (left.device, right.device),
        (left.pid, right.pid),
        (left.start_time, right.start_time),
        (left.uid, right.uid),
        (left.claim, right.claim),
    ):
        if one is not None and other is not None and one != other:
            return None
        facts.append(other if one is None else one)
    kind = min(left.kind, right.kind, key=NARROWEST_FIRST.index)
    device, pid, start_time, uid, claim = facts
    return Subject(kind, device, pid, start_time, uid, claim, left.user or right.user)  # type: ignore[arg-type]


def _is_so(subject: Subject, sight: SampleIndex) -> bool:
    """Whether the facts of a subject, which come from two sides, are true together."""
    claim = sight.claim_of(subject)
    if subject.claim is not None and claim is None:
        return False
    if claim is not None and subject.device is not None and subject.device not in claim.devices:
        return False
    if subject.pid is not None and subject.start_time is not None:
        return subject.device is None or subject.device in sight.processes.get((subject.pid, subject.start_time), ())
    if subject.device is not None and subject.uid is not None and claim is None:
        return subject.device in sight.territory.get(subject.uid, ())
    return True


def _common(
    left: Sequence[GpuProcess], right: Sequence[GpuProcess], subject: Subject, sight: SampleIndex
) -> tuple[GpuProcess, ...]:
    if left and right:
        named = {(process.pid, process.start_time) for process in right}
        return tuple(process for process in left if (process.pid, process.start_time) in named)
    return tuple(process for process in left or right if _fits(process, subject, sight))


def _fits(process: GpuProcess, subject: Subject, sight: SampleIndex) -> bool:
    places = sight.processes.get((process.pid, process.start_time)) if process.start_time is not None else None
    if not places or (subject.device is not None and subject.device not in places):
        return False
    return subject.uid is None or process.uid == subject.uid


# What policies want to know of a machine beside its devices' memory and processes, worked out once for each set.
#
# What nobody judges by is not read.  Does not read anything: see watchdog.


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
        fields=WHO_FIELDS.union(*(rule.further_fields for rule in rules if isinstance(rule, HealthRule))),
        host=any(map(_needs_host, rules)) or any(map(_needs_kinds, policies)),
        scheduler=any(isinstance(rule, OutsideSchedulerRule) for rule in rules),
        targets=tuple(sorted(set(_targets(policies)))),
    )


def _needs_host(rule: Rule) -> bool:
    return getattr(rule, "looks_at_host", False)


def _needs_kinds(policy: Policy) -> bool:
    """Whether its scopes do, by the terminals of processes."""
    return any(scope.kinds is not None for scope in (policy.only, *policy.exempt))


def _targets(policies: Iterable[Policy]) -> Iterable[str]:
    for options in (dict(step.options) for policy in policies for step in policy.steps):
        if name := options.get("to") or options.get("hook"):
            yield str(name)
