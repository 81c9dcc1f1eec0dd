"""A policy file in plain sentences: whom it is about, when, and what happens then; and what its policies find now.

Rules and actions are described by the first sentence of their help, so a new one needs nothing here.  This module reads
no files: see policy_files.loader.
"""

from __future__ import annotations

import inspect
import re
import signal
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from gpuguard.claims.daemon_client import PolicyStatusReply, StatusReply
from gpuguard.enforcement.actions import ACTION_KEYS
from gpuguard.enforcement.identity import Protected
from gpuguard.locale import N_, _, translated
from gpuguard.policies.action_kinds import DISRUPTIVE
from gpuguard.policies.policy import INTERACTIVE_SECONDS, KEPT_SECONDS, KEPT_WITHIN, Policy, Scope, Step
from gpuguard.policies.rule import Evidence
from gpuguard.policy_files.keys import DAYS
from gpuguard.policy_files.last_good import PoliciesInForce
from gpuguard.policy_files.loader import PolicyFile
from gpuguard.sanitize import neutralise
from gpuguard.tables import table
from gpuguard.units import (
    NOT_AVAILABLE,
    format_bytes,
    format_count,
    format_duration,
    local_time,
    parse_bytes,
    parse_celsius,
    parse_duration,
    parse_percent,
)
from gpuguard.users import user_name
from gpuguard.yaml_files.decoder import key_of, keys_of

_ORDERS: Mapping[str, str] = {
    "newest": N_("the newest"),
    "oldest": N_("the oldest"),
    "most_memory": N_("the largest"),
    "least_used": N_("the least used"),
    "most_power": N_("what draws most power"),
}
_WRITTEN: Mapping[Any, Callable[[Any], str]] = {
    parse_bytes: format_bytes,
    parse_celsius: lambda value: f"{value:g}C",
    parse_duration: format_duration,
    parse_percent: lambda value: f"{value:g}%",
}


def sentences(file: PolicyFile, names: Collection[str] | None = None, switch: str = "") -> Iterator[str]:
    """Yield the lines for a person, one paragraph per policy.

    *names* limits them to these policies.  *switch* says what becomes of an enforced policy, where that is known.
    """
    count = format_count(len(file.policies), "policy", "policies")
    yield _("{path}: {count}.").format(path=file.path, count=count)
    yield _("Nothing is ever done to root, to system accounts, or to a process that cannot be identified for certain.")
    yield from _protected(file.protected)
    if any(step.action in DISRUPTIVE for policy in file.policies for step in policy.steps):
        more = format_duration(INTERACTIVE_SECONDS)
        yield _(
            "What is on a terminal, a notebook or being debugged has {time} more before it is ended or stopped."
        ).format(time=more)
    if file.longest_keep:
        yield _(
            "`gpuguard keep` of a user spares what is theirs for {longest} at once, each process and claim for at most "
            "{hours:.0f} h in {days:.0f} days, unless a policy says otherwise."
        ).format(longest=format_duration(file.longest_keep), hours=KEPT_SECONDS / 3600, days=KEPT_WITHIN / 86400)
    if file.keep_events is not None:
        yield _("The daemon keeps its log for {time}.").format(time=format_duration(file.keep_events))
    for policy in file.policies:
        if names is None or policy.name in names:
            yield ""
            yield policy.name
            yield from (f"  {line}" for line in _policy(policy, switch))


def _protected(protected: Protected) -> Iterator[str]:
    parts = [
        (_("users"), map(user_name, sorted(protected.uids))),
        (_("members of"), sorted(protected.groups)),
        (_("programs"), protected.executables),
    ]
    named = [f"{what} {', '.join(names)}" for what, values in parts if (names := list(values))]
    if named:
        yield _("Nor to {names}.").format(names="; ".join(named))


def show(known: PoliciesInForce, names: Collection[str] | None) -> Iterator[str]:
    """Yield the lines for the policies that the daemon of this machine judges by, or for those of *names*."""
    acts = _("Enforced.") if known.enforcing else _("Dry run: the daemon does not enforce, it only logs.")
    yield from sentences(known.file, names, acts)
    if changed := sorted(known.only_warn if names is None else known.only_warn & set(names)):
        yield ""
        yield _("The file has faults now: until they are mended these only warn: {names}.").format(
            names=", ".join(changed)
        )


def reaching(file: PolicyFile, uid: int, groups: Collection[str]) -> list[str]:
    """Return the names of the policies that can reach a user, neither for others alone nor sparing all of theirs."""

    def means(scope: Scope, *others: str) -> bool:
        given = {key for key, value in vars(scope).items() if value is not None}
        if scope.users is not None and uid not in scope.users:
            return False
        if scope.groups is not None and scope.groups.isdisjoint(groups):
            return False
        return given <= {"users", "groups", *others}

    return [
        policy.name
        for policy in file.policies
        if (policy.only is None or means(policy.only, "devices", "models", "kinds", "told"))
        and not any(means(scope) for scope in policy.exempt)
    ]


def _policy(policy: Policy, switch: str) -> Iterator[str]:
    held = (
        _("for {time} without a break").format(time=format_duration(policy.hold)) if policy.hold else _("at one moment")
    )
    several = {"all": N_("all of this"), "any": N_("any of this")}
    conditions = _("this") if len(policy.rules) == 1 else _(several[policy.join])
    yield _("When {conditions} holds {held}:").format(conditions=conditions, held=held)
    for rule in policy.rules:
        values = ", ".join(f"{key}: {text}" for key, text in written(rule))
        yield f"  - {_(first_sentence(type(rule)))}" + (f"  ({values})" if values else "")
        yield from ("    " + _(text) for key, text in rule.kind.left_out.items() if not getattr(rule, key))
    about = scope_text(policy.only) if policy.only else ""
    yield _("It is about {scope}.").format(scope=about or _("everybody"))
    if policy.told:
        yield _("It takes nothing from a user whom no message has reached.")
    for scope in policy.exempt:
        until = _(" until {time}").format(time=local_time(scope.until)) if scope.until is not None else ""
        yield _("It spares {scope}{until}.").format(scope=scope_text(scope), until=until)
    if policy.start_grace:
        yield _("Processes and claims younger than {time} are innocent: the time above begins after that.").format(
            time=format_duration(policy.start_grace)
        )
    if policy.devices_at_least > 1:
        yield _("It must hold on {number} GPUs of the same user at once.").format(number=policy.devices_at_least)
    yield from _schedule(policy)
    if policy.message:
        yield _("Users are told: {message}").format(message=policy.message)
    if policy.start_grace:
        first = policy.start_grace + policy.hold + sum(step.after for step in policy.steps[:1])
        yield _("For what has just started the first step comes after {time}.").format(time=format_duration(first))
    yield _("Then, counted from when it began:")
    rows, elapsed = [], policy.hold
    for step in policy.steps:
        elapsed += step.after
        rows.append((_("  after {time}").format(time=format_duration(elapsed)), step_text(step)))
    yield from table(rows)
    if policy.until:
        values = ", ".join(f"{key}: {text}" for key, text in written(policy.until))
        yield _("A pause lasts until this is reached on each GPU of the process: {values}.").format(values=values)
    number = format_count(policy.at_most_jobs, "job")
    if policy.at_most_processes:
        number = format_count(policy.at_most_processes, "process", "processes")
    yield _("At most {users} and {number} are hit at once; the others follow, {which} of each user first.").format(
        users=format_count(policy.at_most_users, "user"), number=number, which=_(_ORDERS[policy.order])
    )
    if policy.rests_on is not Evidence.CLOCK and not policy.some_beyond:
        yield _("If that would be more users, none is hit: what the rules rest on can fail for everybody at once.")
    if not policy.may_be_kept:
        yield _("`gpuguard keep` spares no user who asks for it, because others suffer; what root keeps is spared.")
    if policy.cooldown:
        yield _("After the last step the same one is left alone for {time}.").format(
            time=format_duration(policy.cooldown)
        )
    if policy.enforce:
        yield switch or _("Enforced, if the daemon is started with --enforce; else only logged.")
    else:
        yield _("Dry run: mode is observe, so what would be done is only logged.")


def _schedule(policy: Policy) -> Iterator[str]:
    times = []
    if policy.hours is not None:
        times.append(_(" to ").join(f"{int(at // 3600):02}:{int(at // 60 % 60):02}" for at in policy.hours))
    if policy.days is not None:
        times.append(_("on {days}").format(days=", ".join(DAYS[day] for day in sorted(policy.days))))
    if times:
        yield _("Only {times}, local time; outside of that every ladder ends.").format(times=" ".join(times))
    if policy.claimed_above is not None:
        yield _("Only while more than {percent:g}% of the GPUs are claimed.").format(percent=policy.claimed_above)


def first_sentence(noun: type) -> str:
    """Return the first sentence of the docstring of *noun*."""
    paragraph = " ".join(inspect.cleandoc(noun.__doc__ or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z])", paragraph)[0]


def step_text(step: Step) -> str:
    """Describe what a step does."""
    text = _(first_sentence(ACTION_KEYS[step.action]))
    text = f"{step.action}: {text[:1].lower()}{text[1:]}"
    values: list[tuple[str, Any]] = list(step.options)
    hints, _required = keys_of(ACTION_KEYS[step.action])
    options = [
        f"{key}: {signal.Signals(value).name if key == 'signal' else _text_of(value, hints.get(key))}"
        for key, value in values
    ]
    return f"{text}  ({', '.join(options)})" if options else text


def scope_text(scope: Scope) -> str:
    """Return whom a scope means: ``users alice, bob and at the same time devices 0, 1``."""
    parts = []
    if scope.users is not None:
        parts.append(_("users") + " " + ", ".join(sorted(map(user_name, scope.users))))
    for what, names in ((_("groups"), scope.groups), (_("devices"), scope.devices), (_("models"), scope.models)):
        if names is not None:
            parts.append(f"{what} {', '.join(sorted(names))}")
    if scope.kinds is not None:
        parts.append(_("{kinds} processes").format(kinds=", ".join(sorted(scope.kinds))))
    return _(" and at the same time ").join(parts)


def written(noun: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, value as people write it) of each field that is not at its default or has no default."""
    kind: Any = type(noun)
    hints, _required = keys_of(kind)
    for field in fields(noun):
        if (value := getattr(noun, field.name)) != field.default:
            yield key_of(field), _text_of(value, hints[key_of(field)])


def _text_of(value: Any, hint: Any) -> str:
    if isinstance(value, tuple | frozenset):
        return f"[{', '.join(user_name(item) if type(item) is int else str(item) for item in value)}]"
    for note in _notes(hint):
        if note in _WRITTEN:
            return _WRITTEN[note](value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "text", value))


def _notes(hint: Any) -> tuple[Any, ...]:
    own = tuple(getattr(hint, "__metadata__", ()))
    return own + tuple(note for part in typing.get_args(hint) for note in _notes(part))


def status_lines(status: StatusReply, now: float, person: str = "") -> list[str]:
    """Return a line for each condition that holds: for whom, since when, what was done, and what comes when.

    Args:
        status: what the daemon finds.
        now: unix time.
        person: the user to name if no policy has anything against them.
    """
    lines = [_status_line(row, now, status.enforcing and row.enforce) for row in status.standing]
    if status.left_out:
        lines.append(_("and {number} more").format(number=status.left_out))
    return [neutralise(line) for line in lines] or [
        _("no policy has anything against {person} now.").format(person=person or _("you"))
    ]


def _status_line(row: PolicyStatusReply, now: float, enforced: bool) -> str:
    what = {
        "process": _("process {pid}").format(pid=row.pid),
        "claim": _("claim {claim}").format(claim=row.claim),
        "user": _("all of it"),
    }.get(row.kind, row.kind)
    user = f"{row.user}, " if row.user else ""
    device = f"GPU {row.device_label}" if row.device_label else row.device  # a uuid says by itself what it is
    where = _(" on {device}").format(device=device) if device else ""
    since = format_duration(max(0, round(now - row.since_unix_seconds)))
    done = _(", last step {step}").format(step=_(row.last)) if row.last else ""
    if row.refused:
        done += _(", {step} was refused ({why})").format(
            step=_(row.next or NOT_AVAILABLE), why=_(translated(row.refused))
        )
    if row.next is None:
        then = _("no step is left")
    elif row.next_unix_seconds is None:
        then = _("{step} waits for the step before it").format(step=_(row.next))
    else:
        left = round(row.next_unix_seconds - now)
        when = _("in {time}").format(time=format_duration(left)) if left > 0 else _("with the next look")
        then = _("{step} {when}").format(step=_(row.next), when=when)
        is_due = row.harm == row.next and left <= 0  # its time has passed, so it would be no news
        if row.harm and row.harm_unix_seconds is not None and not is_due:
            at = local_time(row.harm_unix_seconds, "%Y-%m-%d %H:%M:%S")
            then += (
                _(", at {time}").format(time=at)
                if row.harm == row.next
                else _(", {step} at {time}").format(step=_(row.harm), time=at)
            )
        then += _(", if nothing changes") + ("" if enforced else _(" (a dry run: only written down)"))
    seen = f" ({translated(row.why)})" if row.why else ""
    return _("{user}{what}{where}: {policy} for {since}{seen}{done}; {then}").format(
        user=user, what=what, where=where, policy=row.policy, since=since, seen=seen, done=done, then=then
    )
