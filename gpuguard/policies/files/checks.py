"""What the keys of a policy file mean together: contradictions, and what can never happen.

A fault is what would do another thing than it says; a warning is what is allowed, but hardly meant.  Single keys are
checked where they are read: see policykeys and decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuguard.policies.amounts import Amount
from gpuguard.policies.files.decoder import Decoder, Path, below, unknown
from gpuguard.policies.files.keys import ExceptKeys, IntervalKeys, PolicyKeys, ScopeKeys
from gpuguard.policies.policy import HARMFUL, KILL_AFTER, ON_PROCESSES
from gpuguard.units import format_duration

# What policies mean beside each other: two that end the same processes, and an exemption that another one undoes.
#
# Only what is certain is said: whether a user is in a group is known on the machine alone, and a policy for some people
# that is stricter than the one for all is no contradiction.  Does not look at a policy by itself: see policychecks.


WHOM = ("users", "groups", "devices", "models", "kinds")
COUSINS = {"users": "groups", "groups": "users", "devices": "models", "models": "devices"}  # one may mean the other
BY_CONTENT = frozenset({"expression", "users", "command", "health"})  # two of them need have nothing in common
DAY = 86400

Holds = Callable[[str, frozenset[Any], Mapping[str, frozenset[Any]]], bool]
Found = tuple[Path, str, str]  # where, what is the matter, what to do


def rules_of(policy: PolicyKeys, path: Path) -> Iterator[tuple[str, Any, Path]]:
    """(name, rule, its path) of each condition."""
    name, value = policy.when
    if name not in ("all", "any"):
        yield name, value, below(path, "when", name)
        return
    for place, (each, rule) in enumerate(value):
        yield each, rule, below(path, "when", name, place, each)


def compare(decoder: Decoder, policies: Mapping[Path, PolicyKeys]) -> None:
    """Note in the decoder's source what is the matter with harmful policies, once for each rule of each."""
    mode = decoder.values.get(("mode",), "observe")
    harmful = [
        (path, policy) for path, policy in policies.items() if any(step.name in HARMFUL for step in policy.steps)
    ]
    for number, (path, policy) in enumerate(harmful):
        for name, rule, where in rules_of(policy, path):
            found = (
                warning
                for first_path, first in harmful[:number]
                if (first.mode or mode) == (policy.mode or mode)  # one that only observes ends nobody
                for first_name, first_rule, first_where in rules_of(first, first_path)
                if first_name == name and (rule == first_rule or name not in BY_CONTENT)
                for warning in _between(
                    (first_path, first, first_where), (path, policy, where), name, rule == first_rule
                )
            )
            if warning := next(found, None):
                decoder.source.warn(decoder.nodes[warning[0]], *warning[1:])


def _between(
    one: tuple[Path, PolicyKeys, Path], two: tuple[Path, PolicyKeys, Path], name: str, same_rule: bool
) -> Iterator[Found]:
    (first_path, first, first_where), (path, policy, where) = one, two
    if not _meet(first, policy):
        return
    if same_rule:
        yield from _undone(first_path, first, policy, name)
        yield from _undone(path, policy, first, name)
    if _whom(first.only) == _whom(policy.only):
        yield (
            where,
            f"{first.name!r} ends processes of the same users for {name}, too: whichever is faster wins.",
            "Give them different `only`, or make one policy of both.",
        )
    elif _contains(first.only, policy.only):
        yield from _shadowed(where, policy, first, name, same_rule)
    elif _contains(policy.only, first.only):
        yield from _shadowed(first_where, first, policy, name, same_rule)
    else:
        yield (
            where,
            f"{first.name!r} ends some of the same processes for {name}, too: whichever is faster wins.",
            "Give them `only` that have nobody in common, or make one policy of both.",
        )


def _shadowed(where: Path, narrow: PolicyKeys, wide: PolicyKeys, name: str, same_rule: bool) -> Iterator[Found]:
    """A policy for some that never comes to its end, because the one for more is there before."""
    if same_rule and _delay(wide) <= _delay(narrow) and _acts_wherever(wide, narrow):
        yield (
            where,
            f"{wide.name!r} ends the same processes for {name} after {format_duration(_delay(wide))}, so this one, "
            f"after {format_duration(_delay(narrow))}, changes nothing.",
            f"Spare them in {wide.name!r} by `except`.",
        )


def _acts_wherever(wide: PolicyKeys, narrow: PolicyKeys) -> bool:
    """Whether *wide*, whose `only` has all of *narrow*'s, spares nobody there and at no time."""
    return (
        wide.hours in (None, narrow.hours)
        and wide.days in (None, narrow.days)
        and wide.at_most == narrow.at_most
        and wide.start_grace <= narrow.start_grace
        and wide.devices_at_least <= narrow.devices_at_least
        and (
            wide.except_ == narrow.except_ or all(_disjoint(each, _whom(narrow.only)) for _, each in _exempt(wide, ()))
        )
    )


def _undone(path: Path, policy: PolicyKeys, other: PolicyKeys, name: str) -> Iterator[Found]:
    """An exemption from which nobody has anything, because another policy ends them all the same."""
    if not _contains(other.only, policy.only):
        return
    for place, spared in _exempt(policy, path):
        if not any(_covers(each, _whom(spared)) for _, each in _exempt(other, ())):
            yield (
                place,
                f"whom this spares, {other.name!r} ends for {name} all the same.",
                f"Give {other.name!r} the same `except`, or an `only` without them.",
            )


def _meet(one: PolicyKeys, two: PolicyKeys) -> bool:
    """Whether there are certainly processes and moments that both policies are about."""
    return (
        one.claimed_above == two.claimed_above
        and (not one.days or not two.days or bool({*one.days} & {*two.days}))
        and _hours_meet(one.hours, two.hours)
        and _scopes_meet(_whom(one.only), _whom(two.only))
        and not any(_covers(each, _whom(two.only), _may_hold) for _, each in _exempt(one, ()))
        and not any(_covers(each, _whom(one.only), _may_hold) for _, each in _exempt(two, ()))
    )


def _hours_meet(one: tuple[float, float] | None, two: tuple[float, float] | None) -> bool:
    if one is None or two is None:
        return True
    return (two[0] - one[0]) % DAY < ((one[1] - one[0]) % DAY or DAY) or (one[0] - two[0]) % DAY < (
        (two[1] - two[0]) % DAY or DAY
    )


def _whom(scope: ScopeKeys | ExceptKeys | None) -> dict[str, frozenset[Any]]:
    """key -> its entries, for those keys that are given."""
    given = {key: getattr(scope, key) for key in WHOM} if scope else {}
    return {key: frozenset(value) for key, value in given.items() if value is not None}


def _scopes_meet(one: Mapping[str, frozenset[Any]], two: Mapping[str, frozenset[Any]]) -> bool:
    for key, other in (("users", "groups"), ("devices", "models")):
        # "users: alice" and "groups: students" may have nobody in common.
        if {key, other} <= one.keys() ^ two.keys() and (key in one) != (other in one):
            return False
    return all(one[key] & two[key] for key in one.keys() & two.keys())


def _contains(wide: ScopeKeys | None, narrow: ScopeKeys | None) -> bool:
    outer, inner = _whom(wide), _whom(narrow)
    return all(key in inner and inner[key] <= outer[key] for key in outer)


def _holds(key: str, entries: frozenset[Any], whom: Mapping[str, frozenset[Any]]) -> bool:
    return key in whom and whom[key] <= entries


def _may_hold(key: str, entries: frozenset[Any], whom: Mapping[str, frozenset[Any]]) -> bool:
    if key not in whom or whom[key] <= entries:
        return key in whom or COUSINS.get(key) in whom
    return _may_be_others(key, entries | whom[key])


def _may_be_others(key: str, entries: frozenset[Any]) -> bool:
    """All students may be staff, each A100 is an A*, and 0 may be GPU-5f0e; but alice is not bob, and 0 is not 1."""
    return key in ("groups", "models") or (key == "devices" and not all(map(str.isdecimal, entries)))


def _disjoint(spared: ExceptKeys, whom: Mapping[str, frozenset[Any]]) -> bool:
    """Whether an exemption certainly spares nobody in *whom*, or will one day."""
    return spared.until is not None or any(
        key in whom and not entries & whom[key] and not _may_be_others(key, entries | whom[key])
        for key, entries in _whom(spared).items()
    )


def _covers(spared: ExceptKeys, whom: Mapping[str, frozenset[Any]], holds: Holds = _holds) -> bool:
    """Whether an exemption that does not end spares everybody in *whom*, for certain or by _may_hold perhaps."""
    outer = _whom(spared)
    return spared.until is None and bool(outer) and all(holds(key, outer[key], whom) for key in outer)


def _exempt(policy: PolicyKeys, path: Path) -> Iterator[tuple[Path, ExceptKeys]]:
    if isinstance(policy.except_, tuple):
        yield from ((below(path, "except", place), each) for place, each in enumerate(policy.except_))
    elif policy.except_ is not None:
        yield below(path, "except"), policy.except_


def _delay(policy: PolicyKeys) -> float:
    """Seconds from when the condition holds to the first harmful step."""
    elapsed = policy.for_
    for step in policy.steps:
        elapsed += step.common.after
        if step.name in HARMFUL:
            break
    return elapsed


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
                "Notify an administrator instead, or name processes with `per: process`.",
            )
        elif blameless and step.name in HARMFUL and not step.common.even_if_innocent:
            decoder.source.fault(
                node,
                f"{step.name} for {_and(blameless)}: a user of such a device may not be the cause.",
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
