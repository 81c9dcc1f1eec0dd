"""What came back from a host, read as what it is: bytes of a stranger.

An answer is one JSON object of bounded size and depth, or it is an error with a reason.  What a view takes out of it
goes through text(), number() and rows(), which give None and nothing for what has another type.
Does not make text harmless for terminals: the views do, with gpuguard.sanitize.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuguard.fleet.ssh import Reply
from gpuguard.jsonio import loads

DEPTH = 32  # of an answer: `who --json` has 6
ROWS = 4096  # of a list; whoever sends a million would hold up the answers of all other hosts
_LINE = 300  # characters of an error that are shown
_SSH_FAILED = 255
_NOT_FOUND = 127

Facts = Mapping[str, Any]

_NEXT = {  # what ssh says: what to do
    "Host key verification failed": "connect once by hand, and compare its key: ssh {host}",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "ask its admin why its key changed, before anything else",
    "Permission denied": "ssh must get in without a password: ssh-copy-id {host}, or ssh-add; see docs/fleet.md",
    "Could not resolve hostname": "is it spelled right? An alias belongs into ~/.ssh/config",
    "Connection refused": "no sshd listens there, or on another port",
    "Bad owner or permissions": "see `man ssh_config`, FILES",
}


@dataclass(frozen=True)
class HostReply:
    """What one host said."""

    host: str  # as it was asked for, whatever it calls itself
    seconds: float
    facts: Facts | None = None  # the JSON of its view
    refusal: str | None = None  # the view's own no: not enough GPUs
    error: str | None = None  # why there is neither


def reply_of(reply: Reply) -> HostReply:
    """What *reply* means."""
    if reply.fault is not None:
        return HostReply(reply.host, reply.seconds, error=reply.fault)
    said = _sentence(reply)
    if reply.status == 0:
        try:
            return _judged(reply, _object(reply.out))
        except ValueError as error:
            return HostReply(reply.host, reply.seconds, error=f"its answer cannot be read: {error}")
    if reply.status == 1 and said.startswith("wanted "):
        return HostReply(reply.host, reply.seconds, refusal=said)
    try:  # `gpuguard serve-ssh` and `explain` say no in JSON
        return _judged(reply, _object(reply.out))
    except ValueError:
        return HostReply(reply.host, reply.seconds, error=_failure(reply, said))


def _judged(reply: Reply, facts: Facts) -> HostReply:
    if "refused" in facts:
        reason = " ".join((text(facts, "reason") or "it does not answer that").split())  # one line, as each error
        return HostReply(reply.host, reply.seconds, error=f"refused there: {reason[:_LINE]}")
    if facts.get("schema") != 1:
        return HostReply(
            reply.host, reply.seconds, error="its gpuguard is of another version: its JSON has not schema 1"
        )
    return HostReply(reply.host, reply.seconds, facts=facts)


def _failure(reply: Reply, said: str) -> str:
    if reply.status == _NOT_FOUND:
        return "gpuguard is not on the PATH there: install it, or name it with --remote /path/to/gpuguard"
    if reply.status == _SSH_FAILED:
        more = next((what.format(host=reply.host) for word, what in _NEXT.items() if word.encode() in reply.err), "")
        return (said or "ssh failed and said nothing") + (f" ({more})" if more else "")
    return said or f"gpuguard ended there with status {reply.status} and said nothing"


def _sentence(reply: Reply) -> str:
    """The line of standard error that says most: gpuguard's first one, else the last one of all."""
    lines = [line.strip() for line in reply.err.decode("utf-8", "replace").splitlines() if line.strip()]
    own = next((line.removeprefix("gpuguard: ") for line in lines if line.startswith("gpuguard: ")), None)
    return (own or (lines[-1] if lines else ""))[:_LINE]


def _object(content: bytes) -> Facts:
    """The JSON object in *content*, behind what the shell's start-up files may have said before it."""
    begin = 0 if content.startswith(b"{") else content.find(b"\n{") + 1
    if not begin and not content.startswith(b"{"):
        raise ValueError("it is no JSON" if content.strip() else "it is empty")
    try:
        found = loads(content[begin:], DEPTH)
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
    except json.JSONDecodeError:
        raise ValueError("it is no JSON, or only a part of it") from None
    except ValueError as error:  # of ours, or a number of 5,000 digits
        raise ValueError(str(error)[:100]) from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def text(facts: Facts, name: str) -> str | None:
    """A text of *facts*; None where it is none."""
    value = facts.get(name)
    return value if isinstance(value, str) else None


def number(facts: Facts, name: str) -> float | None:
    """A number of *facts*, at least 0; None where it is none."""
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        return None
    return float(value)


def rows(facts: Facts, name: str) -> list[Facts]:
    """The objects in a list of *facts*, the first ROWS."""
    value = facts.get(name)
    return [one for one in value[:ROWS] if isinstance(one, dict)] if isinstance(value, list) else []


def texts(facts: Facts, name: str) -> list[str]:
    """The texts in a list of *facts*, the first ROWS."""
    value = facts.get(name)
    return [one for one in value[:ROWS] if isinstance(one, str)] if isinstance(value, list) else []
