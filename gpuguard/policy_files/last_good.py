"""What guards a machine while its policy file has faults: the last good policies that the faulty text leaves unchanged.

A policy that was changed warns, and takes nothing away, because what it will say is not known yet.  So do all policies
if a common setting was changed, or if the new text cannot be read.  Pure but for the functions that keep the text and
the names: see daemon.service.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gpuguard.files import read_file, write_file
from gpuguard.jsonio import loads
from gpuguard.policies.action_kinds import COUNTED
from gpuguard.policy_files.loader import PolicyFile, parse
from gpuguard.yaml_files.decoder import Accounts, Name
from gpuguard.yaml_files.yaml_text import LARGEST, YamlNode, YamlSource

TEXT, NAMES = "policy.last-good.yaml", "policy.names.json"
POLICIES = "policies.json"  # among the daemon's files, for `gpuguard policy show`


def still_in_force(last: PolicyFile, content: bytes) -> PolicyFile:
    """Return what holds of *last*, a file without faults, while the text is *content*, which has some."""
    before, now = _plain(last.text), _plain(content)
    same = {key: value for key, value in before.items() if key != "policies"} == {
        key: value for key, value in now.items() if key != "policies"
    }
    number = Counter(str(policy.get("name")) for policy in _policies(now))
    unchanged = {
        policy["name"]
        for policy in _policies(before)
        if same and policy in _policies(now) and number[str(policy["name"])] == 1
    }
    policies = (
        policy
        if policy.name in unchanged
        else replace(policy, steps=tuple(step for step in policy.steps if step.action not in COUNTED))
        for policy in last.policies
    )
    return replace(last, policies=tuple(policies))


def public(file: PolicyFile, last: PolicyFile, *, enforcing: bool) -> bytes:
    """Return what everybody may know of the policies in force: all that *file* says, but for the ways to send messages.

    *file* is what still holds of *last*, the good file.  *enforcing* is the daemon's own switch.
    """
    text = _plain(file.text)
    shown = {key: value for key, value in text.items() if key not in ("notify", "messages")}
    if file.notify:
        shown["notify"] = {name: {"hook": {"command": ["/bin/true"]}} for name in file.notify}  # so that it can be read
    changed = [policy.name for policy in file.policies if policy not in last.policies]
    return json.dumps({"path": file.path, "enforcing": enforcing, "only_warn": changed, "file": shown}).encode()


@dataclass(frozen=True)
class PoliciesInForce:
    """The policies that the daemon of this machine judges by."""

    file: PolicyFile
    enforcing: bool  # whether the daemon acts at all
    only_warn: frozenset[str]  # policies that were changed in a file with faults


def in_force(path: str, owners: tuple[int, ...]) -> PoliciesInForce:
    """Read what public() wrote at *path*.  Raises OSError, or ValueError: it is something else."""
    content = loads(read_file(path, 2 * LARGEST, owners))
    if not isinstance(content, dict) or not isinstance(content.get("file"), dict):
        raise ValueError("it is of another version")
    text = json.dumps(content["file"], ensure_ascii=False)
    file = parse(text, str(content.get("path")), accounts=Accounts(remembered={}))
    return PoliciesInForce(file, content.get("enforcing") is True, frozenset(map(str, content.get("only_warn") or ())))


def keep(folder: str, text: bytes, names: Mapping[Name, int]) -> None:
    """Keep the text of a good file, and the numbers of its users.  Raises OSError."""
    write_file(os.path.join(folder, TEXT), text, mode=0o600, sync=True)
    content = json.dumps([[kind, name, number] for (kind, name), number in names.items()]).encode("ascii")
    write_file(os.path.join(folder, NAMES), content, mode=0o600, sync=True)


def kept_text(folder: str) -> bytes | None:
    """Return the text that was kept, or None if there is none that only root or this user can have written."""
    with suppress(OSError):
        return read_file(os.path.join(folder, TEXT), LARGEST, (0, os.geteuid()))
    return None


def kept_names(folder: str) -> dict[Name, int]:
    """Return the numbers that were kept, or {} if there are none."""
    with suppress(OSError, ValueError, TypeError):
        content = read_file(os.path.join(folder, NAMES), LARGEST, (0, os.geteuid()))
        return {(str(kind), str(name)): int(number) for kind, name, number in loads(content)}
    return {}


def _plain(content: bytes) -> dict[str, Any]:
    """Return the text as mappings, lists and texts, or {} if it is something else."""
    root = YamlSource(content).tree()
    data = _data(root) if root else None
    return data if isinstance(data, dict) else {}


def _data(node: YamlNode) -> Any:
    if node.kind == "mapping":
        pairs = [(key.text, _data(value)) for key, value in node.pairs]
        return dict(pairs) if len(dict(pairs)) == len(pairs) else pairs  # a key that stands there twice is a fault
    return [_data(item) for item in node.items] if node.kind == "sequence" else node.text


def _policies(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    policies = data.get("policies")
    return [policy for policy in policies if isinstance(policy, dict)] if isinstance(policies, list) else []
