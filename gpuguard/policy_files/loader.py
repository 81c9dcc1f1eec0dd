"""Policy files: YAML -> policies, with every fault at its line and column.

A file with a fault gives no policy at all, because half of a policy is another policy.  Names of users are resolved
once, here.  This module does not keep the last good file: see last_good.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import Any, get_args

from gpuguard.enforcement.identity import Protected
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.model import DESKTOP_MEMORY, ActionName
from gpuguard.notify.targets import Target
from gpuguard.notify.templates import Template
from gpuguard.policies.policy import Policy, Step
from gpuguard.policy_files.checks import check
from gpuguard.policy_files.keys import DAYS, FileKeys, LimitKeys, PolicyKeys, parse_until
from gpuguard.users import is_powerful
from gpuguard.yaml_files.decoder import DATE, GROUP, UNKNOWN, USER, Accounts, Decoder, GoneUser, TaggedValue
from gpuguard.yaml_files.yaml_text import Fault, YamlSource, in_order, read_file

READ_SECONDS = 20.0  # systemd restarts a daemon that shows no sign of life for 60 seconds
TOO_LONG = (
    "What was in force stays so.  Names of users and groups may come from a server that does not answer: see whether "
    "`gpuguard policy check` takes as long, then try `gpuguard daemon --reload`."
)


@dataclass(frozen=True)
class PolicyFile:
    """The content of a policy file."""

    path: str  # as it was named
    policies: tuple[Policy, ...] = ()  # none when there is a fault
    notify: Mapping[str, Target] = field(default_factory=dict)  # target name -> where its messages go
    messages: Mapping[str, Template] = field(default_factory=dict)  # language -> texts of the admin's own
    interval: tuple[float, float] = (2.0, 10.0)  # (shortest, longest) seconds between samples
    longest_keep: float = 86400.0  # seconds for which users may ask to be left alone
    limits: LimitKeys = field(default_factory=LimitKeys)
    keep_events: float | None = None  # seconds for which the daemon keeps log files that it set aside
    protected: Protected = field(default_factory=Protected)  # the users and programs that are never touched
    desktop_memory: int = DESKTOP_MEMORY  # bytes: see device_state.beyond_desktop
    faults: tuple[Fault, ...] = ()  # mistakes that make the file useless, in the order of the lines
    warnings: tuple[Fault, ...] = ()  # things that are allowed but hardly meant
    fingerprint: str = ""  # SHA-256 of the text
    text: bytes = field(default=b"", compare=False)
    gone: tuple[str, ...] = ()  # names of users and groups that mean no user any more, in words


def load_policies(
    path: str, *, trusted_owner: bool | None = None, accounts: Accounts | None = None, longest: float | None = None
) -> PolicyFile:
    """Read a policy file.  Whatever is wrong with its content or with the file itself is one of its faults, not raised.

    Args:
        path: of the file.
        trusted_owner: whether only root may be able to change it; None means yes if we can use it to affect others.
        accounts: the users and groups, by default those of this machine.
        longest: seconds between samples, if something other than the file says it.
    """
    content = content_of(path, trusted_owner=trusted_owner)
    return content if isinstance(content, PolicyFile) else parse(content, path, accounts=accounts, longest=longest)


def load_in_time(path: str, longest: float | None = None, accounts: Accounts | None = None) -> PolicyFile:
    """Call load_policies() for a service: a directory server that does not answer costs it READ_SECONDS at most."""
    read: queue.SimpleQueue[PolicyFile] = queue.SimpleQueue()
    try:
        threading.Thread(
            target=lambda: read.put(load_policies(path, longest=longest, accounts=accounts)), daemon=True
        ).start()
        return read.get(timeout=READ_SECONDS)
    except RuntimeError as error:
        return faulty(path, _("no thread could be started that reads the file: {error}.").format(error=error))
    except queue.Empty:
        return faulty(
            path, _("reading the file took more than {seconds:.0f} s.").format(seconds=READ_SECONDS), TOO_LONG
        )


def content_of(path: str, *, trusted_owner: bool | None = None) -> bytes | PolicyFile:
    """Return the text of a policy file, or a PolicyFile that says why it cannot be read.

    *trusted_owner* means the same as in load_policies().
    """
    only_root = is_powerful() if trusted_owner is None else trusted_owner
    try:
        return read_file(path, only_root=only_root)
    except OSError as error:
        return faulty(path, _("the file cannot be read: {strerror}.").format(strerror=error.strerror or error))
    except InvalidRequest as error:
        return faulty(path, error.fault, error.hint)


def faulty(path: str, text: str, hint: str = "") -> PolicyFile:
    """Return a PolicyFile that is useless as a whole."""
    return PolicyFile(path, faults=(Fault(0, 0, text, hint),))


def parse(
    content: bytes | str, path: str = "policy", *, accounts: Accounts | None = None, longest: float | None = None
) -> PolicyFile:
    """Return the policies that *content* describes, or its faults.

    *path* only names it.  The other arguments mean the same as in load_policies().
    """
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    fingerprint = sha256(content).hexdigest()
    source = YamlSource(content)
    accounts = accounts or Accounts()
    decoder = Decoder(source, {USER: accounts.user, GROUP: accounts.group, DATE: parse_until})
    keys = decoder.root(FileKeys)
    check(decoder, longest)
    policies = []
    if keys is not None and not source.faults:
        for place, policy in enumerate(keys.policies):
            try:
                policies.append(_policy_of(policy, keys.mode, accounts))
            except InvalidRequest as error:
                source.fault(decoder.nodes["policies", place], error.fault, error.hint)
    faults, warnings = in_order(source.faults), in_order(source.warnings)
    if faults or keys is None:
        return PolicyFile(path, faults=faults, warnings=warnings, fingerprint=fingerprint, text=content)
    protected = Protected()
    if keys.protect:
        if _spares_unknown(keys.protect.users, keys.protect.groups, accounts):
            policies = [replace(policy, enforce=False) for policy in policies]
        protected = Protected(frozenset(keys.protect.users), frozenset(keys.protect.groups), keys.protect.executables)
    return PolicyFile(
        path,
        tuple(policies),
        notify={name: target for name, (_, target) in keys.notify.items()},
        messages=dict(keys.messages.items()),
        interval=(keys.interval.shortest, keys.interval.longest),
        longest_keep=keys.keep.longest,
        limits=keys.limits,
        keep_events=keys.events.keep,
        protected=protected,
        desktop_memory=keys.desktop_memory,
        warnings=warnings,
        fingerprint=fingerprint,
        text=content,
        gone=tuple(error.fault for error in accounts.gone.values()),
    )


def _policy_of(keys: PolicyKeys, mode: str, accounts: Accounts) -> Policy:
    """Return the policy that the engine works with.

    A name that means no user any more accuses no user, because its number may be another user's by now.  In an
    exemption it still spares the number that it had; if that was never seen, the policy only observes.
    """
    name, value = keys.when
    joined = name in ("all", "any")
    exempt = [each for each in (keys.except_ if isinstance(keys.except_, tuple) else (keys.except_,)) if each]
    rules = tuple(rule for _, rule in value) if joined else (value,)
    spared: list[tuple[Iterable[int], Iterable[str]]] = [(each.users or (), each.groups or ()) for each in exempt]
    spared += [(getattr(rule, key), getattr(rule, key)) for rule in rules for key in rule.kind.spares]
    known = not any(_spares_unknown(users, groups, accounts) for users, groups in spared)
    only = keys.only
    if only and only.users is not None:
        only = replace(only, users=frozenset(_present(only.users)))
    return Policy(
        name=keys.name,
        rules=tuple(map(_of_present_users, rules)),
        join=name if joined else "all",
        hold=keys.for_,
        start_grace=keys.start_grace,
        only=only,
        told=bool(only and only.told),
        exempt=tuple(exempt),
        devices_at_least=keys.devices_at_least,
        hours=keys.hours,
        days=frozenset(map(DAYS.index, keys.days)) if keys.days else None,
        claimed_above=keys.claimed_above,
        at_most_users=keys.at_most.users,
        at_most_jobs=keys.at_most.jobs or Policy.at_most_jobs,
        at_most_processes=keys.at_most.processes,
        order=keys.at_most.order or ("newest" if any(rule.kind.newest_first for rule in rules) else Policy.order),
        some_beyond=keys.at_most.beyond == "some",
        until=keys.until,
        message=keys.message,
        keep=keys.keep,
        cooldown=keys.cooldown,
        enforce=(keys.mode or mode) == "enforce" and known,
        steps=tuple(map(_step, keys.steps)),
    )


def _present(uids: Iterable[int]) -> Iterator[int]:
    return (uid for uid in uids if not isinstance(uid, GoneUser))


def _of_present_users(rule: Any) -> Any:
    """Return the rule without the users whom it accuses by a name that means no user any more."""
    for key in rule.kind.accuses:
        named = getattr(rule, key)
        if any(isinstance(uid, GoneUser) for uid in named):
            # A rule must name a user.  One that denies UNKNOWN, which is the number of no user, finds no user.
            rule = replace(rule, **{key: tuple(_present(named)) or (UNKNOWN,)})
    return rule


def _spares_unknown(users: Iterable[int], groups: Iterable[str], accounts: Accounts) -> bool:
    """Return whether any of the spared users and groups is unknown, both now and from before."""
    return UNKNOWN in users or any((GROUP, name) in accounts.gone for name in groups)


def _step(tag: TaggedValue) -> Step:
    options = ((field.name.rstrip("_"), getattr(tag.own, field.name)) for field in fields(tag.own))
    action = next(name for name in get_args(ActionName) if name == tag.name)
    return Step(action, tag.common.after, tuple((name, value) for name, value in options if value is not None))
