"""Policy files: YAML -> policies, with every fault at its line and column.

A file with a fault gives no policy at all, because half of a policy is another policy.  Names of users are resolved
once, here.  Does not keep the last good file: see daemon.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields

from gpuguard import __version__
from gpuguard.digests import sha256
from gpuguard.documents.accounts import Accounts
from gpuguard.documents.decoding import GROUP, USER, Broken, Decoder, Tag, below
from gpuguard.documents.yaml_nodes import LARGEST, Fault, Source
from gpuguard.errors import InvalidRequest
from gpuguard.guards.identity import Protected
from gpuguard.policies.policy import Policy, Scope, Step
from gpuguard.policychecks import check
from gpuguard.policychild import PolicyFile, content_of, plain
from gpuguard.policykeys import DAYS, ExceptKeys, FileKeys, PolicyKeys, ProtectKeys, ScopeKeys


def load_policies(path: str, *, trusted_owner: bool | None = None, accounts: Accounts | None = None) -> PolicyFile:
    """Read a policy file; never raises for what stands in it or for how it lies there: see its faults.

    Args:
        path: of the file.
        trusted_owner: nobody but root may be able to change it; None: if we can do something to others by it.
        accounts: who is who; this machine's by default.
    """
    content = content_of(path, trusted_owner=trusted_owner)
    return content if isinstance(content, PolicyFile) else parse(content, path, accounts=accounts)


def answer(path: str) -> None:
    """Be the child of policychild: the text is on standard input, and what it says goes to standard output."""
    content = os.pread(0, LARGEST + 1, 0)
    os.write(1, marshal.dumps((__version__, plain(parse(content, path)))))


def parse(content: bytes | str, path: str = "policy", *, accounts: Accounts | None = None) -> PolicyFile:
    """The policies that *content* describes, or its faults; *path* only names it."""
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    fingerprint = sha256(content)
    if len(content) > LARGEST:
        fault = Fault(0, 0, f"the text is larger than {LARGEST // 1024} KiB.", "Split it, or delete what is not used.")
        return PolicyFile(path, faults=(fault,), fingerprint=fingerprint)
    try:
        source = Source(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, len(before[before.rfind(b"\n") + 1 :].decode("utf-8")) + 1
        fault = Fault(line, column, f"byte 0x{content[error.start]:02x} is not UTF-8.", "Save the file as UTF-8.")
        return PolicyFile(path, faults=(fault,), fingerprint=fingerprint)
    keys, policies = _decode(source, accounts or Accounts())
    faults, warnings = _in_order(source.faults), _in_order(source.warnings)
    if faults or keys is None:
        return PolicyFile(path, faults=faults, warnings=warnings, fingerprint=fingerprint)
    return PolicyFile(
        path,
        policies,
        notify={name: target for name, (_, target) in keys.notify.items()},
        messages=dict(keys.messages.items()),
        interval=(keys.interval.shortest, keys.interval.longest),
        longest_keep=keys.keep.longest,
        protected=_protected(keys.protect),
        warnings=warnings,
        fingerprint=fingerprint,
    )


def _in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(set(faults), key=lambda fault: (fault.line, fault.column, fault.text)))


def _decode(source: Source, accounts: Accounts) -> tuple[FileKeys | None, tuple[Policy, ...]]:
    root = source.tree()
    if root is None:
        return None, ()
    decoder = Decoder(source, {USER: accounts.user, GROUP: accounts.group})
    with suppress(Broken):
        decoder.value(root, FileKeys)
    check(decoder)
    keys: FileKeys | None = decoder.values.get(())
    if keys is None or source.faults:
        return None, ()
    policies = []
    for place, each in enumerate(keys.policies):
        try:
            policies.append(policy_of(each, keys.mode))
        except InvalidRequest as error:
            source.fault(decoder.nodes[below((), "policies", place)], *str(error).split("\n", 1))
    return keys, tuple(policies)


def policy_of(keys: PolicyKeys, mode: str) -> Policy:
    """What the engine works with."""
    name, value = keys.when
    joined = name in ("all", "any")
    exempt = keys.except_ if isinstance(keys.except_, tuple) else (keys.except_,)
    return Policy(
        name=keys.name,
        rules=tuple(rule for _, rule in value) if joined else (value,),
        join=name if joined else "all",
        hold=keys.for_,
        start_grace=keys.start_grace,
        only=_scope(keys.only) if keys.only else Scope(),
        exempt=tuple(_scope(each) for each in exempt if each),
        devices_at_least=keys.devices_at_least,
        hours=keys.hours,
        days=frozenset(map(DAYS.index, keys.days)) if keys.days else None,
        claimed_above=keys.claimed_above,
        at_most_users=keys.at_most.users,
        at_most_processes=keys.at_most.processes,
        cooldown=keys.cooldown,
        enforce=(keys.mode or mode) == "enforce",
        steps=tuple(map(_step, keys.steps)),
    )


def _scope(keys: ScopeKeys | ExceptKeys) -> Scope:
    return Scope(
        users=None if keys.users is None else frozenset(keys.users),
        groups=None if keys.groups is None else frozenset(keys.groups),
        devices=keys.devices,
        models=keys.models,
        kinds=None if keys.kinds is None else frozenset(keys.kinds),
        until=keys.until if isinstance(keys, ExceptKeys) else None,
    )


def _protected(keys: ProtectKeys | None) -> Protected:
    return Protected(frozenset(keys.users), frozenset(keys.groups), keys.executables) if keys else Protected()


def _step(tag: Tag) -> Step:
    options = ((each.name.rstrip("_"), getattr(tag.own, each.name)) for each in fields(tag.own))
    return Step(tag.name, tag.common.after, tuple((name, value) for name, value in options if value is not None))
