"""What the keys of a policy file mean together: contradictions, and what can never happen.

A fault is what would do another thing than it says; a warning is what is allowed, but hardly meant.  Single keys are
checked where they are read: see policykeys and decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuguard.documents.decoding import Decoder, Path, below, unknown
from gpuguard.policies.amounts import Amount
from gpuguard.policies.policy import KILL_AFTER, ON_PROCESSES
from gpuguard.policykeys import ExceptKeys, IntervalKeys, PolicyKeys
from gpuguard.policypairs import DAY, HARMFUL, compare, rules_of
from gpuguard.units import format_duration

AT_PROCESSES = frozenset({"warn", "checkpoint", "terminate", "kill", "pause", "resume", "renice", "deny"})
MESSAGES = frozenset({"warn", "notify"})
# Rules about a state of the device, which the processes on it need not have caused.
INNOCENT = frozenset({"temperature", "power", "forecast", "health"})
HOTTEST = 130.0  # degrees Celsius: no sensor tells more, and readings above it are not believed


@dataclass(frozen=True)
class Setting:
    """What is known around a policy; None where that part of the file has faults of its own."""

    mode: str
    longest: float | None  # seconds between two samples
    targets: Mapping[str, tuple[str, Any]] | None


def check(decoder: Decoder) -> None:
    """Note every fault and warning in the decoder's source, for all policies that could be read."""
    values = decoder.values
    given = {key for path in decoder.keys for key in path[:1]}
    interval: IntervalKeys | None = values.get(("interval",)) if "interval" in given else IntervalKeys()
    targets = values.get(("notify",)) if "notify" in given else {}
    setting = Setting(values.get(("mode",), "observe"), interval.longest if interval else None, targets)
    policies = {path: value for path, value in values.items() if isinstance(value, PolicyKeys)}
    _names(decoder, policies)
    for path, policy in policies.items():
        for checker in (_steps, _targets, _rules, _time, _scope):
            checker(decoder, setting, policy, path)
    compare(decoder, policies)


def _names(decoder: Decoder, policies: Mapping[Path, PolicyKeys]) -> None:
    names: dict[str, Path] = {}
    for path, policy in policies.items():
        first = names.setdefault(policy.name, path)
        if first != path:
            line = decoder.nodes[below(first, "name")].line
            place = decoder.nodes[below(path, "name")]
            decoder.source.fault(place, f"a second policy is called {policy.name!r}.", f"The first is in line {line}.")


def _steps(decoder: Decoder, setting: Setting, policy: PolicyKeys, path: Path) -> None:
    since_terminate: float | None = None
    for place, step in enumerate(policy.steps):
        node = decoder.nodes[below(path, "steps", place)]
        if since_terminate is not None:
            since_terminate += step.common.after
        if step.name == "kill" and since_terminate is None:
            decoder.source.fault(
                node, "kill without a terminate before it.", f"Put `- terminate` at least {KILL_AFTER:.0f}s before it."
            )
        elif step.name == "kill" and since_terminate is not None and since_terminate < KILL_AFTER:
            decoder.source.fault(
                node,
                f"kill {format_duration(since_terminate)} after the terminate: a job needs time to end.",
                f"Write {{after: {KILL_AFTER:.0f}s, do: kill}} or longer.",
            )
        if step.name == "terminate":
            since_terminate = 0.0
        previous = policy.steps[place - 1] if place else None
        if previous and previous.name == "kill":
            decoder.source.warn(node, "after a kill nobody is left for this step.")
        elif previous and (step.name, step.own) == (previous.name, previous.own) and not step.common.after:
            decoder.source.warn(node, f"{step.name} twice at the same moment.", "Give the second one an `after`.")
    harmful = next((place for place, step in enumerate(policy.steps) if step.name in HARMFUL), None)
    enforced = (policy.mode or setting.mode) == "enforce"
    if enforced and harmful is not None and not any(step.name in MESSAGES for step in policy.steps[:harmful]):
        node = decoder.nodes[below(path, "steps", harmful)]
        decoder.source.warn(
            node, f"{policy.steps[harmful].name} without a warning.", "Put `- warn` some time before it."
        )


def _targets(decoder: Decoder, setting: Setting, policy: PolicyKeys, path: Path) -> None:
    for place, step in enumerate(policy.steps):
        for key in ("to", "hook"):
            target = getattr(step.own, key, None)
            if not isinstance(target, str) or setting.targets is None:
                continue
            node = decoder.nodes[below(path, "steps", place, key)]
            if target not in setting.targets:
                decoder.source.fault(node, *unknown(target, setting.targets, "target under `notify`"))
            elif key == "hook" and setting.targets[target][0] != "hook":
                decoder.source.fault(node, f"{target!r} is no hook.", "Name one that is written {hook: ...}.")


def _rules(decoder: Decoder, setting: Setting, policy: PolicyKeys, path: Path) -> None:
    rules = list(rules_of(policy, path))
    for name, rule, place in rules:
        for key, why in _never(name, rule):
            node = decoder.nodes.get(below(place, key)) or decoder.nodes[place]
            decoder.source.warn(node, f"{name} can never fire: {why}.")
        if sum(rule == other for _, other, _ in rules) > 1:
            decoder.source.warn(decoder.nodes[place], f"the same {name} rule twice.")
    blameless = [name for name, _, _ in rules if name in INNOCENT]
    subjectless = all(_about_devices(name, rule) for name, rule, _ in rules)
    unpeopled = all(name == "age" and rule.run_time_above is None for name, rule, _ in rules)
    claimless = not any(_about_claims(name, rule) for name, rule, _ in rules)
    for number, step in enumerate(policy.steps):
        node = decoder.nodes[below(path, "steps", number)]
        if unpeopled and step.name in ON_PROCESSES:
            decoder.source.warn(
                node, f"{step.name} reaches nobody: such a claim has no process.", "Write `release` to take it back."
            )
        elif claimless and step.name == "release":
            decoder.source.warn(
                node,
                f"release reaches nobody: {_and(name for name, _, _ in rules)} finds no claim without a process.",
                "Only age (claim_without_process_above), idle and quota do.",
            )
        elif subjectless and step.name in AT_PROCESSES:
            decoder.source.warn(
                node,
                f"{step.name} reaches nobody: {_and(name for name, _, _ in rules)} finds devices, not processes.",
                "Notify somebody instead, or name processes with `per: process`.",
            )
        elif blameless and step.name in HARMFUL and not step.common.even_if_innocent:
            decoder.source.fault(
                node,
                f"{step.name} for {_and(blameless)}: whoever is on such a device may not be the cause.",
                f"If it is meant: {{do: {step.name}, even_if_innocent: true}}.",
            )
        elif step.common.even_if_innocent and not (blameless and step.name in HARMFUL):
            decoder.source.warn(node, f"even_if_innocent has no meaning for {step.name} here.")


def _and(names: Iterator[str] | list[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _about_devices(name: str, rule: Any) -> bool:
    return getattr(rule, "per", "") == "device" or (name == "health" and not rule.with_processes)


def _about_claims(name: str, rule: Any) -> bool:
    """Whether it finds claims under which nobody computes."""
    if name == "age":
        return rule.claim_without_process_above is not None
    return name in ("idle", "quota")


def _never(name: str, rule: Any) -> Iterator[tuple[str, str]]:
    """(key, why) for limits that nothing can pass."""
    for key, value in vars(rule).items():
        if key.endswith("above") and isinstance(value, Amount) and value.relative and value.value >= 100:
            yield key, "more than 100% is not possible"
        if isinstance(value, Amount) and value.promised and rule.per != "claim":
            yield key, "only a claim has a share (per: claim)"
        if name == "utilization" and key == "above" and value is not None and value >= 100:
            yield key, "no utilization is above 100%"
        if key.endswith("below") and name != "idle" and isinstance(value, float) and value <= 0:
            yield key, "nothing is below 0%"
        if name == "temperature" and key == "above" and value >= HOTTEST:
            yield key, f"readings above {HOTTEST:.0f}C are not believed"


def _time(decoder: Decoder, setting: Setting, policy: PolicyKeys, path: Path) -> None:
    longest = setting.longest
    place = below(path, "for")
    node = decoder.nodes.get(place) or decoder.nodes[below(path, "name")]
    if longest is not None and policy.for_ < longest:
        decoder.source.warn(
            node,
            f"for: {format_duration(policy.for_)} is shorter than the {format_duration(longest)} between two samples: "
            "one reading decides.",
            "Write a longer `for`, or a shorter interval.",
        )
    _reached(decoder, policy, path)
    if policy.claimed_above is not None and policy.claimed_above >= 100:
        decoder.source.warn(decoder.nodes[below(path, "claimed_above")], "never: not more than 100% can be claimed.")
    if policy.days and len(set(policy.days)) != len(policy.days):
        decoder.source.fault(decoder.nodes[below(path, "days")], "a day is named twice.", "Name each day once.")


def _reached(decoder: Decoder, policy: PolicyKeys, path: Path) -> None:
    """Steps for which the hours are too short: outside of them the condition does not hold, and the ladder ends."""
    if policy.hours is None or policy.hours == (0, DAY):
        return
    room, elapsed = (policy.hours[1] - policy.hours[0]) % DAY or DAY, policy.for_
    for place, step in enumerate(policy.steps):
        elapsed += step.common.after
        if elapsed > room:
            decoder.source.warn(
                decoder.nodes[below(path, "steps", place)],
                f"{step.name} is never reached: it comes {format_duration(elapsed)} after the condition began, and the "
                f"hours are over after {format_duration(room)}.",
            )
            return


def _scope(decoder: Decoder, setting: Setting, policy: PolicyKeys, path: Path) -> None:
    several = isinstance(policy.except_, tuple)
    exempt = policy.except_ if isinstance(policy.except_, tuple) else (policy.except_,)
    for place, each in enumerate(exempt):
        where = below(path, "except", place) if several else below(path, "except")
        if isinstance(each, ExceptKeys) and each.until is not None and each.until < time.time():
            decoder.source.warn(decoder.nodes[below(where, "until")], "this exemption is over.", "Delete it.")
    if policy.only is None:
        return
    system = [uid for uid in policy.only.users or () if uid < 1000]
    if policy.only.users and len(system) == len(policy.only.users):
        decoder.source.warn(
            decoder.nodes[below(path, "only", "users")],
            "these are only root and system accounts, which are always protected: nothing will be done to them.",
        )
    for key in ("users", "groups", "devices", "models"):
        wanted, spared = (
            getattr(policy.only, key),
            [getattr(each, key) for each in exempt if each and _alone(each, key)],
        )
        if wanted and any(set(wanted) <= set(names) for names in spared):
            decoder.source.warn(
                decoder.nodes[below(path, "only", key)], "`except` spares all of these: nobody is left."
            )


def _alone(each: ExceptKeys, key: str) -> bool:
    return all((value is not None) == (name == key) for name, value in vars(each).items())
