"""Checks of what the keys of a policy file mean together: contradictions, and things that can never happen.

A fault is something that would do another thing than it says; a warning is something that is allowed but hardly meant.
Single keys are checked where they are read: see keys and decoder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from gpuguard.locale import _
from gpuguard.policies.action_kinds import HARMFUL, MESSAGES, ON_PROCESSES
from gpuguard.policies.policy import DAY, KILL_AFTER, Exemption, Scope, early_kills
from gpuguard.policies.undeclared import undeclared
from gpuguard.policies.view import FEWEST_IN_WINDOW
from gpuguard.policy_files.keys import IntervalKeys, PolicyKeys
from gpuguard.units import Amount, format_duration
from gpuguard.yaml_files.decoder import Decoder, Path, key_of, unknown

WHOM = ("users", "groups", "devices", "models", "kinds")
COUSINS = {"users": "groups", "groups": "users", "devices": "models", "models": "devices"}  # may mean the same
AT_PROCESSES = ON_PROCESSES | {"warn", "deny"}  # the last two reach a user through a process

Entries = Mapping[str, frozenset[Any]]  # key of a scope -> the entries listed there


def check(decoder: Decoder, longest: float | None = None) -> None:
    """Note every fault and warning in the decoder's source.

    Faults are looked for in everything that could be read, so that none stays hidden until another one is mended.
    Warnings are looked for only in policies that could be read as a whole.  *longest* is the number of seconds between
    samples, if something other than the file says it.
    """
    values, source, nodes = decoder.values, decoder.source, decoder.nodes
    given = {key for path in decoder.keys for key in path[:1]}
    interval: IntervalKeys | None = values.get(("interval",)) if "interval" in given else IntervalKeys()
    mode = values.get(("mode",), "observe")
    policies = {path: value for path, value in values.items() if isinstance(value, PolicyKeys)}
    names: dict[str, Path] = {}
    for place in [place for place in values if (place[:1], place[2:]) == (("policies",), ("name",))]:
        first = names.setdefault(values[place], place)
        if first != place:
            hint = _("The first is in line {line}.").format(line=nodes[first].line)
            source.fault(nodes[place], _("a second policy is called {name!r}.").format(name=values[place]), hint)
    _check_targets(decoder)
    trespass = any(
        rule.kind.finds_trespassers for policy in policies.values() for _name, rule, _place in _rules_of(policy)
    )
    for path in [path for path in nodes if len(path) == 2 and path[0] == "policies"]:
        policy = policies.get(path) or _readable(decoder, path)
        checks = _PolicyChecks(decoder, policy, path, is_whole=path in policies)
        checks.check_steps(policy.mode or mode)
        checks.check_rules(trespass=trespass)
        checks.check_until()
        checks.check_times(longest if longest is not None or interval is None else interval.longest)
        checks.check_scopes()
    _compare(decoder, policies, mode)


def _check_targets(decoder: Decoder) -> None:
    """Note the steps that send to a target that `notify` does not have."""
    values = decoder.values
    known = [str(path[1]) for path in decoder.keys if len(path) == 2 and path[0] == "notify"]
    if ("notify",) in decoder.keys and not known:
        return  # it has a fault of its own
    for place, target in values.items():
        if place[:1] != ("policies",) or place[2:3] != ("steps",) or place[4:] not in (("to",), ("hook",)):
            continue
        way = values.get(("notify", target))
        if target not in known:
            text, hint = unknown(target, known, _("target under `notify`"))
        elif place[4] == "hook" and isinstance(way, tuple) and way[0] != "hook":
            text = _("{target!r} is no hook.").format(target=target)
            hint = _("Name one that is written {hook: ...}.")
        else:
            continue
        decoder.source.fault(decoder.nodes[place], text, hint)


def _readable(decoder: Decoder, path: Path) -> PolicyKeys:
    """Return a policy that could not be read as a whole, as if the keys that could not be read were not there."""
    keys = {field.name: (*path, key_of(field)) for field in fields(PolicyKeys)}
    least: dict[str, Any] = {"name": "", "when": ("all", ()), "steps": ()}
    read = {name: decoder.values[place] for name, place in keys.items() if place in decoder.values}
    return PolicyKeys(**{**least, **read})


class _PolicyChecks:
    """The checks of one policy by itself.  A place is named by the keys below the policy."""

    def __init__(self, decoder: Decoder, policy: PolicyKeys, path: Path, *, is_whole: bool) -> None:
        self.source, self.nodes, self.policy, self.path = decoder.source, decoder.nodes, policy, path
        self.is_whole = is_whole

    def _fault(self, place: Path, text: str, hint: str = "") -> None:
        self.source.fault(self.nodes[self.path + place], text, hint)

    def _warn(self, place: Path, text: str, hint: str = "") -> None:
        if self.is_whole:
            self.source.warn(self.nodes[self.path + place], text, hint)

    def check_steps(self, mode: str) -> None:
        steps = self.policy.steps
        for number, seconds in early_kills((step.name, step.common.after) for step in steps):
            if seconds is None:
                hint = _("Put `- terminate` at least {kill_after:.0f}s before it.").format(kill_after=KILL_AFTER)
                self._fault(("steps", number), _("kill without a terminate before it."), hint)
            else:
                text = _("kill {seconds} after the terminate: a job needs time to end.").format(
                    seconds=format_duration(seconds)
                )
                self._fault(
                    ("steps", number),
                    text,
                    _("Write {{after: {seconds:.0f}s, do: kill}} or longer.").format(seconds=KILL_AFTER),
                )
        for number, (previous, step) in enumerate(pairwise(steps), 1):
            if previous.name == "kill":
                self._warn(("steps", number), _("after a kill no process is left for this step."))
            elif (step.name, step.own) == (previous.name, previous.own) and not step.common.after:
                text = _("{name} twice at the same moment.").format(name=step.name)
                self._warn(("steps", number), text, _("Give the second one an `after`."))
        harmful = next((number for number, step in enumerate(steps) if step.name in HARMFUL), None)
        if mode == "enforce" and harmful is not None and MESSAGES.isdisjoint(step.name for step in steps[:harmful]):
            text = _("{name} without a warning.").format(name=steps[harmful].name)
            self._warn(("steps", harmful), text, _("Put `- warn` some time before it."))

    def check_rules(self, *, trespass: bool) -> None:
        """Check the rules; *trespass* says whether the file has one that finds trespassers."""
        rules = list(_rules_of(self.policy))
        for name, rule, place in rules:
            if missing := undeclared(rule):  # a value that is not read is unknown, so it finds no user
                self._fault(
                    place,
                    _("{name} judges by what is not read for it: {missing}.").format(
                        name=name, missing=", ".join(missing)
                    ),
                    _("A fault of gpuguard: its class {name} must say in `needs` what it judges by.").format(
                        name=type(rule).__name__
                    ),
                )
            for key, why in _never(rule):
                at = (*place, key) if (*self.path, *place, key) in self.nodes else place
                self._warn(at, _("{name} can never fire: {why}.").format(name=name, why=why))
            if rule.kind.limits == "utilization" and (rule.below or 0.0) >= 100:
                self._warn((*place, "below"), _("{name} fires for every GPU, a busy one too.").format(name=name))
            for key in rule.kind.left_out if not trespass else ():
                self._check_left_out(rule, key, place)
            if sum(rule == other for _, other, _ in rules) > 1:
                self._warn(place, _("the same {name} rule twice.").format(name=name))
        self._check_together(rules)
        all_names = " and ".join(dict.fromkeys(name for name, _, _ in rules))
        blameless = " and ".join(dict.fromkeys(name for name, rule, _ in rules if rule.kind.innocent))
        reached = frozenset[str]().union(*(rule.reaches for _, rule, _ in rules))
        for number, step in enumerate(self.policy.steps):
            place = ("steps", number)
            innocent_harmed = blameless and step.name in HARMFUL
            if reached == {"claim"} and step.name in ON_PROCESSES:
                text = _("{name} reaches no process: such a claim has no process.").format(name=step.name)
                self._warn(place, text, _("Write `release` to take it back."))
            elif step.name == "release" and "claim" not in reached:
                text = _("release reaches no claim: {all_names} finds no claim without a process.").format(
                    all_names=all_names
                )
                self._warn(
                    place,
                    text,
                    _("Only age (claim_without_process_above), idle, quota and users (claims: true) do."),
                )
            elif not reached and step.name in AT_PROCESSES:
                text = _("{name} reaches no process: {all_names} finds GPUs, not processes.").format(
                    name=step.name, all_names=all_names
                )
                self._warn(place, text, _("Notify an administrator instead, or name processes with `per: process`."))
            elif innocent_harmed and not step.common.even_if_innocent:
                text = _("{name} for {blameless}: a user of such a GPU may not be the cause.").format(
                    name=step.name, blameless=blameless
                )
                self._fault(
                    place, text, _("If it is meant: {{do: {name}, even_if_innocent: true}}.").format(name=step.name)
                )
            elif step.common.even_if_innocent and not innocent_harmed:
                self._warn(place, _("even_if_innocent has no meaning for {name} here.").format(name=step.name))

    def _check_left_out(self, rule: Any, key: str, place: Path) -> None:
        """Warn if the policy takes something away and its rule does not say, by *key*, whether it judges all it can."""
        unsaid = (*self.path, *place, key) not in self.nodes
        if unsaid and any(step.name in HARMFUL for step in self.policy.steps):
            hint = _("Write `{key}: true`, or `{key}: false` if that is meant.").format(key=key)
            self._warn(place, f"{rule.kind.name}: {_(rule.kind.left_out[key])}", hint)

    def _check_together(self, rules: Sequence[tuple[str, Any, Path]]) -> None:
        """Warn of a utilization that must be both above and below."""
        use = [(rule, place) for _name, rule, place in rules if rule.kind.limits == "utilization"]
        lows = [(rule.below, place) for rule, place in use if rule.below is not None]
        highs = [(rule.above, place) for rule, place in use if getattr(rule, "above", None) is not None]
        if lows and highs and self.policy.when[0] == "all":
            (low, _low_place), (high, place) = min(lows), max(highs)
            if low <= high:
                text = _("this never holds together: no utilization is below {low:g}% and above {high:g}%.")
                self._warn(place, text.format(low=low, high=high), _("Write `any` in place of `all`, or two policies."))

    def check_until(self) -> None:
        until = self.policy.until
        if until is None:
            return
        if all(step.name != "pause" for step in self.policy.steps):
            self._warn(("until",), _("until has no meaning without a step that pauses."))
        limits = {name: each.below for name, each in vars(until).items() if each}
        for name, rule, _place in _rules_of(self.policy):
            low, high = (_number_of(each) for each in (limits.get(name), getattr(rule, "above", None)))
            if low is not None and high is not None and low[1] == high[1] and low[0] >= high[0]:
                text = _("a pause until below {low:g} for {name} above {high:g} ends no later than without it.")
                self._warn(("until", name), text.format(low=low[0], name=name, high=high[0]))

    def check_times(self, longest: float | None) -> None:
        policy = self.policy
        if longest is not None and policy.for_ < longest:
            place = ("for",) if (*self.path, "for") in self.nodes else ("name",)
            times = format_duration(policy.for_), format_duration(longest)
            text = _("for: {seconds} is shorter than the {longest} between two samples: one reading decides.").format(
                seconds=times[0], longest=times[1]
            )
            self._warn(place, text, _("Write a longer `for`, or a shorter interval."))
        if longest is not None:
            self._check_windows(longest)
        if policy.hours is not None and policy.hours != (0, DAY):
            # Outside of its hours the condition does not hold, and the escalation ends.
            room, elapsed = (policy.hours[1] - policy.hours[0]) % DAY or DAY, policy.for_
            for number, step in enumerate(policy.steps):
                elapsed += step.common.after
                if elapsed > room:
                    when = _("it comes {elapsed} after the condition began").format(elapsed=format_duration(elapsed))
                    over = _("the hours are over after {room}").format(room=format_duration(room))
                    self._warn(
                        ("steps", number),
                        _("{name} is never reached: {when}, and {over}.").format(name=step.name, when=when, over=over),
                    )
                    break
        if policy.claimed_above is not None and policy.claimed_above >= 100:
            self._warn(("claimed_above",), _("never: not more than 100% can be claimed."))
        if policy.days and len(set(policy.days)) != len(policy.days):
            self._fault(("days",), _("a day is named twice."), _("Name each day once."))

    def _check_windows(self, longest: float) -> None:
        """Warn of windows that hold too few samples to be judged by."""
        for _name, rule, path in _rules_of(self.policy):
            window = max((seconds for _, seconds in rule.needs.past), default=0.0)
            if not 0 < window < FEWEST_IN_WINDOW * longest:
                continue
            keys = [key for key, value in vars(rule).items() if value == window]
            key = next((key for key in keys if (*self.path, *path, key) in self.nodes), None)
            least, shorter = map(format_duration, (FEWEST_IN_WINDOW * longest, window / FEWEST_IN_WINDOW))
            between = _("{number} times the {longest} between two samples").format(
                number=FEWEST_IN_WINDOW, longest=format_duration(longest)
            )
            text = _("{window} is shorter than {between}: it may never fire.").format(
                window=format_duration(window), between=between
            )
            self._warn(
                (*path, key) if key else path,
                text,
                _("Write {least}, or `interval: {{longest: {shorter}}}`.").format(least=least, shorter=shorter),
            )

    def check_scopes(self) -> None:
        only, exempt = self.policy.only, list(_exempt(self.policy))
        for place, spared in exempt:
            if spared.until is not None and spared.until < time.time():
                self._warn((*place, "until"), _("this exemption is over."), _("Delete it."))
        if only and only.users and all(uid < 1000 for uid in only.users):
            text = _(
                "these are only root and system accounts, which are always protected: nothing will be done to them."
            )
            self._warn(("only", "users"), text)
        for key in WHOM[:4] if only else ():
            wanted = getattr(only, key)
            named = [{name: value for name, value in vars(spared).items() if value is not None} for _, spared in exempt]
            if wanted and any(spared.keys() == {key} and set(wanted) <= set(spared[key]) for spared in named):
                self._warn(("only", key), _("`except` spares all of these: none is left."))


def _rules_of(policy: PolicyKeys) -> Iterator[tuple[str, Any, Path]]:
    """Yield (name, rule, its place) for each condition."""
    name, value = policy.when
    if name not in ("all", "any"):
        yield name, value, ("when", name)
        return
    for place, (each, rule) in enumerate(value):
        yield each, rule, ("when", name, place, each)


def _number_of(limit: Amount | float | None) -> tuple[float, bool] | None:
    """Return the number of a limit and whether it is a share, or None if there is no limit."""
    return (limit.value, limit.relative) if isinstance(limit, Amount) else None if limit is None else (limit, False)


def _exempt(policy: PolicyKeys) -> Iterator[tuple[Path, Exemption]]:
    if isinstance(policy.except_, tuple):
        yield from ((("except", number), spared) for number, spared in enumerate(policy.except_))
    elif policy.except_ is not None:
        yield ("except",), policy.except_


def _never(rule: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, why) for each limit that nothing can pass."""
    for key, value in vars(rule).items():
        if key.endswith("above") and isinstance(value, Amount) and value.relative and value.value >= 100:
            yield key, _("more than 100% is not possible")
        if isinstance(value, Amount) and value.promised and rule.per != "claim":
            yield key, _("only a claim has a share (per: claim)")
        bound, why = rule.kind.bounds.get(key, (None, ""))
        if None not in (bound, value) and (value >= bound if key == "above" else value <= bound):
            yield key, _(why)


def _compare(decoder: Decoder, policies: Mapping[Path, PolicyKeys], mode: str) -> None:
    """Warn of two policies that end the same processes, and of exemptions that another policy undoes, once per rule.

    Only certain conflicts are reported.  Whether a user is in a group is known only on the machine, and a policy for
    some people that is stricter than the one for all is no contradiction.
    """
    harmful = [
        (path, policy) for path, policy in policies.items() if any(step.name in HARMFUL for step in policy.steps)
    ]
    for number, (path, policy) in enumerate(harmful):
        for name, rule, place in _rules_of(policy):
            warnings = (
                warning
                for first_path, first in harmful[:number]
                if (first.mode or mode) == (policy.mode or mode)  # a policy that only observes ends no process
                for first_name, first_rule, first_place in _rules_of(first)
                if first_name == name and (rule == first_rule or not rule.kind.by_content) and _meet(first, policy)
                for warning in (
                    *(_undone(first_path, first, policy, name) if rule == first_rule else ()),
                    *(_undone(path, policy, first, name) if rule == first_rule else ()),
                    *_overlaps((first_path + first_place, first), (path + place, policy), name, rule == first_rule),
                )
            )
            if warning := next(warnings, None):
                decoder.source.warn(decoder.nodes[warning[0]], *warning[1:])


def _undone(path: Path, policy: PolicyKeys, other: PolicyKeys, name: str) -> Iterator[tuple[Path, str, str]]:
    """Yield (where, what, advice) for each exemption without effect, because another policy ends its processes."""
    for place, spared in _exempt(policy) if _contains(other.only, policy.only) else ():
        if not any(_covers(each, _whom(spared)) for _, each in _exempt(other)):
            text = _("whom this spares, {name!r} ends for {rule} all the same.").format(name=other.name, rule=name)
            yield (
                path + place,
                text,
                _("Give {name!r} the same `except`, or an `only` without them.").format(name=other.name),
            )


def _overlaps(
    first: tuple[Path, PolicyKeys], second: tuple[Path, PolicyKeys], name: str, same_rule: bool
) -> Iterator[tuple[Path, str, str]]:
    """Yield (where, what, advice) if two policies that end processes for the same reason get in each other's way."""
    (_path, one), (place, two) = first, second
    inner, outer = _contains(one.only, two.only), _contains(two.only, one.only)
    if inner != outer:
        # The policy for some users never gets to end anything, because the one for more users is faster.
        (wide, (place, narrow)) = (one, second) if inner else (two, first)
        sooner, later = _delay(wide), _delay(narrow)
        if same_rule and sooner <= later and _acts_wherever(wide, narrow):
            yield (
                place,
                _(
                    "{name!r} ends the same processes for {rule} after {sooner}, so this one, after {later}, "
                    "changes nothing."
                ).format(name=wide.name, rule=name, sooner=format_duration(sooner), later=format_duration(later)),
                _("Spare them in {name!r} by `except`.").format(name=wide.name),
            )
    elif inner:
        text = _("{name!r} ends processes of the same users for {rule}, too: whichever is faster wins.").format(
            name=one.name, rule=name
        )
        yield place, text, _("Give them different `only`, or make one policy of both.")
    else:
        text = _("{name!r} ends some of the same processes for {rule}, too: whichever is faster wins.").format(
            name=one.name, rule=name
        )
        yield place, text, _("Give them `only` that have no user in common, or make one policy of both.")


def _delay(policy: PolicyKeys) -> float:
    """Return the seconds from the moment when the condition holds to the first harmful step."""
    first = next(number for number, step in enumerate(policy.steps) if step.name in HARMFUL)
    delays: list[float] = [step.common.after for step in policy.steps[: first + 1]]
    return policy.for_ + sum(delays)


def _acts_wherever(wide: PolicyKeys, narrow: PolicyKeys) -> bool:
    """Return whether *wide*, whose `only` has all of *narrow*'s, spares none of these users at any time."""
    whom = _whom(narrow.only)
    return (
        wide.hours in (None, narrow.hours)
        and wide.days in (None, narrow.days)
        and wide.at_most == narrow.at_most
        and wide.start_grace <= narrow.start_grace
        and wide.devices_at_least <= narrow.devices_at_least
        and (
            wide.except_ == narrow.except_
            or all(
                spared.until is not None
                or any(
                    key in whom and not entries & whom[key] and not _may_be_others(key, entries | whom[key])
                    for key, entries in _whom(spared).items()
                )
                for _, spared in _exempt(wide)
            )
        )
    )


def _meet(one: PolicyKeys, two: PolicyKeys) -> bool:
    """Return whether there are certainly processes and moments that both policies are about."""
    first, second = _whom(one.only), _whom(two.only)
    if one.claimed_above != two.claimed_above or (one.days and two.days and {*one.days}.isdisjoint(two.days)):
        return False
    if one.hours and two.hours:
        (begin, end), (other_begin, other_end) = one.hours, two.hours
        length, other_length = (end - begin) % DAY or DAY, (other_end - other_begin) % DAY or DAY
        if (other_begin - begin) % DAY >= length and (begin - other_begin) % DAY >= other_length:
            return False
    for key, other in (("users", "groups"), ("devices", "models")):
        # "users: alice" and "groups: students" may have no user in common.
        if {key, other} <= first.keys() ^ second.keys() and (key in first) != (other in first):
            return False
    return (
        all(first[key] & second[key] for key in first.keys() & second.keys())
        and not any(_covers(spared, second, perhaps=True) for _, spared in _exempt(one))
        and not any(_covers(spared, first, perhaps=True) for _, spared in _exempt(two))
    )


def _whom(scope: Scope | None) -> Entries:
    """Return key -> its entries, for the keys that are given."""
    given = {key: getattr(scope, key) for key in WHOM} if scope else {}
    return {key: frozenset(value) for key, value in given.items() if value is not None}


def _contains(wide: Scope | None, narrow: Scope | None) -> bool:
    outer, inner = _whom(wide), _whom(narrow)
    return all(key in inner and inner[key] <= outer[key] for key in outer)


def _covers(spared: Exemption, whom: Entries, *, perhaps: bool = False) -> bool:
    """Return whether an exemption without an end spares everybody in *whom*, for certain or *perhaps*."""
    outer = _whom(spared)
    return spared.until is None and bool(outer) and all(_holds(key, outer[key], whom, perhaps) for key in outer)


def _holds(key: str, entries: frozenset[Any], whom: Entries, perhaps: bool) -> bool:
    if key not in whom:
        return perhaps and COUSINS.get(key) in whom
    return whom[key] <= entries or (perhaps and _may_be_others(key, entries | whom[key]))


def _may_be_others(key: str, entries: frozenset[Any]) -> bool:
    """Return whether different entries of *key* may mean the same users or devices.

    All students may be staff, each A100 is an A*, and 0 may be GPU-5f0e; but alice is not bob, and 0 is not 1.
    """
    return key in ("groups", "models") or (key == "devices" and not all(map(str.isdecimal, entries)))
