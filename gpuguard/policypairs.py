"""What policies mean beside each other: two that end the same processes, and an exemption that another one undoes.

Only what is certain is said: whether a user is in a group is known on the machine alone, and a policy for some people
that is stricter than the one for all is no contradiction.  Does not look at a policy by itself: see policychecks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpuguard.documents.decoding import Decoder, Path, below
from gpuguard.policykeys import ExceptKeys, PolicyKeys, ScopeKeys
from gpuguard.units import format_duration

HARMFUL = frozenset({"terminate", "kill", "pause", "deny", "release", "cancel"})  # take something away from somebody
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
        yield from _overtaken(where, policy, first, name, same_rule)
    elif _contains(policy.only, first.only):
        yield from _overtaken(first_where, first, policy, name, same_rule)
    else:
        yield (
            where,
            f"{first.name!r} ends some of the same processes for {name}, too: whichever is faster wins.",
            "Give them `only` that have nobody in common, or make one policy of both.",
        )


def _overtaken(where: Path, narrow: PolicyKeys, wide: PolicyKeys, name: str, same_rule: bool) -> Iterator[Found]:
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
        and (wide.except_ == narrow.except_ or all(_apart(each, _whom(narrow.only)) for _, each in _exempt(wide, ())))
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


def _apart(spared: ExceptKeys, whom: Mapping[str, frozenset[Any]]) -> bool:
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
