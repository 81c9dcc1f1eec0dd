"""A policy file in plain sentences: who is meant, when, and what happens then.

Rules and actions are described by the first sentence of their help, so a new one needs nothing here.  Does not read
files: see policyfile.
"""

from __future__ import annotations

import inspect
import re
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from gpuguard.enforcement.actions import ACTION_KEYS
from gpuguard.enforcement.identity import Protected
from gpuguard.enforcement.preflight import INTERACTIVE_SECONDS
from gpuguard.policies.files.decoder import keys_of, name_of
from gpuguard.policies.files.keys import DAYS
from gpuguard.policies.files.loader import PolicyFile
from gpuguard.policies.policy import DISRUPTIVE, Policy, Scope, Step
from gpuguard.units import (
    format_bytes,
    format_count,
    format_duration,
    parse_bytes,
    parse_celsius,
    parse_duration,
    parse_percent,
)
from gpuguard.users import user_name
from gpuguard.views.text import table

_WRITTEN: Mapping[Any, Callable[[Any], str]] = {
    parse_bytes: format_bytes,
    parse_celsius: lambda value: f"{value:g}C",
    parse_duration: format_duration,
    parse_percent: lambda value: f"{value:g}%",
}


def sentences(file: PolicyFile) -> Iterator[str]:
    """The lines for a person; one paragraph per policy."""
    yield f"{file.path}: {format_count(len(file.policies), 'policy', 'policies')}."
    yield "Nothing is ever done to root, to system accounts, or to a process that cannot be identified for certain."
    yield from _protected(file.protected)
    if any(step.action in DISRUPTIVE for policy in file.policies for step in policy.steps):
        more = format_duration(INTERACTIVE_SECONDS)
        yield f"What is on a terminal, a notebook or being debugged has {more} more before it is ended or stopped."
    for policy in file.policies:
        yield ""
        yield policy.name
        yield from (f"  {line}" for line in _policy(policy, file))


def _protected(protected: Protected) -> Iterator[str]:
    parts = [
        ("users", map(user_name, sorted(protected.uids))),
        ("members of", sorted(protected.groups)),
        ("programs", protected.executables),
    ]
    named = [f"{what} {', '.join(names)}" for what, each in parts if (names := list(each))]
    if named:
        yield f"Nor to {'; '.join(named)}."


def _policy(policy: Policy, file: PolicyFile) -> Iterator[str]:
    held = f"for {format_duration(policy.hold)} without a break" if policy.hold else "at one moment"
    conditions = "this" if len(policy.rules) == 1 else f"{policy.join} of this"
    yield f"When {conditions} holds {held}:"
    yield from (f"  - {rule_text(rule)}" for rule in policy.rules)
    yield from _whom(policy)
    yield from _occasion(policy)
    yield "Then, counted from when it began:"
    rows, elapsed = [], policy.hold
    for step in policy.steps:
        elapsed += step.after
        rows.append((f"  after {format_duration(elapsed)}", step_text(step)))
    yield from table(rows)
    yield from _restraint(policy)
    if policy.enforce:
        yield "Enforced, if the daemon is started with --enforce; else only logged."
    else:
        yield "Dry run: mode is observe, so what would be done is only logged."


def _whom(policy: Policy) -> Iterator[str]:
    yield f"It is about {scope_text(policy.only) or 'everybody'}."
    for scope in policy.exempt:
        until = f" until {_local(scope.until)}" if scope.until is not None else ""
        yield f"It spares {scope_text(scope)}{until}."
    if policy.start_grace:
        yield f"Processes and claims younger than {format_duration(policy.start_grace)} are innocent."
    if policy.devices_at_least > 1:
        yield f"It must hold on {policy.devices_at_least} devices of the same user at once."


def _occasion(policy: Policy) -> Iterator[str]:
    times = []
    if policy.hours is not None:
        times.append(" to ".join(f"{int(at // 3600):02}:{int(at // 60 % 60):02}" for at in policy.hours))
    if policy.days is not None:
        times.append("on " + ", ".join(DAYS[day] for day in sorted(policy.days)))
    if times:
        yield f"Only {' '.join(times)}, local time; outside of that every ladder ends."
    if policy.claimed_above is not None:
        yield f"Only while more than {policy.claimed_above:g}% of the devices are claimed."


def _restraint(policy: Policy) -> Iterator[str]:
    yield (
        f"If that would hit more than {format_count(policy.at_most_users, 'user')} or "
        f"{format_count(policy.at_most_processes, 'process', 'processes')} at the same moment, "
        f"{'only as many as that are, the oldest breach first' if policy.some_beyond else 'nobody is hit'}."
    )
    if policy.cooldown:
        yield f"After the last step the same one is left alone for {format_duration(policy.cooldown)}."


def _local(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def rule_text(rule: Any) -> str:
    """The first sentence of the rule's help, and the keys that were written (or matter)."""
    values = ", ".join(f"{key}: {text}" for key, text in written(rule))
    return first_sentence(type(rule)) + (f"  ({values})" if values else "")


def first_sentence(noun: type) -> str:
    """Of the docstring."""
    paragraph = " ".join(inspect.cleandoc(noun.__doc__ or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z])", paragraph)[0]


def step_text(step: Step) -> str:
    """What a step does."""
    text = first_sentence(ACTION_KEYS[step.action])
    text = f"{step.action}: {text[:1].lower()}{text[1:]}"
    options = ", ".join(f"{key}: {_option(key, value)}" for key, value in step.options)
    return f"{text}  ({options})" if options else text


def _option(key: str, value: Any) -> str:
    import signal

    if key == "signal":
        return signal.Signals(value).name
    return str(value)


def scope_text(scope: Scope) -> str:
    """``users alice, bob on devices 0, 1``; empty when nothing is given."""
    parts = []
    if scope.users is not None:
        parts.append("users " + ", ".join(sorted(map(user_name, scope.users))))
    for what, names in (("groups", scope.groups), ("devices", scope.devices), ("models", scope.models)):
        if names is not None:
            parts.append(f"{what} {', '.join(sorted(names))}")
    if scope.kinds is not None:
        parts.append(f"{', '.join(sorted(scope.kinds))} processes")
    return " and at the same time ".join(parts)


def written(noun: Any) -> Iterator[tuple[str, str]]:
    """(key, value as one writes it) of what is not at its default, and of what has no default."""
    kind: Any = type(noun)
    hints, _ = keys_of(kind)
    defaults = {each.name: each.default for each in fields(noun)}
    for key, hint in hints.items():
        name = name_of(kind, key)
        value = getattr(noun, name)
        if value != defaults[name]:
            yield key, _text_of(value, hint)


def _text_of(value: Any, hint: Any) -> str:
    if isinstance(value, tuple | frozenset):
        return f"[{', '.join(user_name(one) if type(one) is int else str(one) for one in value)}]"
    for note in _notes(hint):
        if note in _WRITTEN:
            return _WRITTEN[note](value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "text", value))


def _notes(hint: Any) -> tuple[Any, ...]:
    own = tuple(getattr(hint, "__metadata__", ()))
    return own + tuple(note for part in typing.get_args(hint) for note in _notes(part))
