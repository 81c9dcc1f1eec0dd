"""What came back from a host: bytes of a stranger, which become values here, once.

An answer is one JSON object of bounded size and depth whose fields are of the right types, or it is an error with a
reason.  Its texts are made harmless for terminals and bounded, its lists too; only `--json` passes on what came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuguard.fleet.ssh import Reply
from gpuguard.jsonio import decode, loads
from gpuguard.locale import N_, _, translated
from gpuguard.model import Device
from gpuguard.sanitize import neutralise

DEPTH = 32  # of an answer: `who --json` has 6
ROWS = 4096  # of a list; one of a million would hold up the answers of all other hosts
_TEXT = 400  # characters of a text
_LINE = 300  # characters of an error that are shown
_SSH_FAILED = 255
_NOT_FOUND = 127

Facts = Mapping[str, Any]

_NEXT = {  # what ssh says: what to do
    "Host key verification failed": N_("connect once by hand, and compare its key: ssh {host}"),
    "REMOTE HOST IDENTIFICATION HAS CHANGED": N_("ask its admin why its key changed, before anything else"),
    "Permission denied": N_("ssh must get in without a password: ssh-copy-id {host}, or ssh-add; see docs/fleet.md"),
    "Could not resolve hostname": N_("is it spelled right? An alias belongs into ~/.ssh/config"),
    "Connection refused": N_("no sshd listens there, or on another port"),
    "Bad owner or permissions": N_("see `man ssh_config`, FILES"),
}


@dataclass(frozen=True)
class HostClaim:
    """A claim of `who --json`."""

    user: str | None = None
    since: float | None = None
    note: str | None = None
    command: tuple[str, ...] | None = None


@dataclass(frozen=True)
class HostProcess:
    """A process of `who --json`."""

    user: str | None = None
    claim: str | None = None


@dataclass(frozen=True)
class HostDevice:
    """A device of `who --json` or `select --json`."""

    index: int
    uuid: str
    label: str = ""
    parent_uuid: str | None = None
    mig_profile: str | None = None
    name: str | None = None
    state: str | None = None
    exact_state: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: float | None = None
    claims: tuple[HostClaim, ...] = ()
    processes: tuple[HostProcess, ...] | None = None

    @property
    def device(self) -> Device:
        """As views print it."""
        instance = self.label.partition(".")[2]
        return Device(
            self.index,
            self.uuid,
            self.name,
            parent_uuid=self.parent_uuid,
            mig_profile=self.mig_profile,
            gpu_instance_id=int(instance) if instance.isdecimal() else None,
            memory_used=self.memory_used_bytes,
            memory_total=self.memory_total_bytes,
            utilization=self.utilization_percent,
        )


@dataclass(frozen=True)
class HostUser:
    """What a user has, by `who --json`: the fields of a UserTotal, in that order."""

    user: str | None
    devices: int
    processes: int
    memory_used_bytes: int | None
    claimed: int
    idle: int


@dataclass(frozen=True)
class HostTicket:
    """A request that waits, by `queue --json`."""

    user: str
    num_gpus: int
    number: int = 0  # in the order of the queue; `who` says none
    waited_seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class HostAnswer:
    """What the JSON of `who`, `queue`, `select` and `explain` have for these views; what is not there is unknown."""

    recorded: bool = False
    simulated: bool = False
    taken_at: float | None = None
    devices: tuple[HostDevice, ...] = ()
    users: tuple[HostUser, ...] = ()
    waiting: tuple[HostTicket, ...] = ()
    places: tuple[HostTicket, ...] = ()


@dataclass(frozen=True)
class HostReply:
    """What one host said."""

    host: str  # as it was asked for, whatever it calls itself
    seconds: float
    answer: HostAnswer | None = None
    facts: Facts | None = None  # the JSON of its view, as it came
    refusal: str | None = None  # the view's own no: not enough GPUs
    error: str | None = None  # why there is neither


def reply_of(reply: Reply) -> HostReply:
    """What *reply* means."""
    host, seconds = reply.host, reply.seconds
    if reply.fault is not None:
        return HostReply(host, seconds, error=reply.fault)
    # The line of standard error that says most: gpuguard's first one, else the last one of all.
    lines = [line.strip() for line in reply.err.decode("utf-8", "replace").splitlines() if line.strip()]
    own = [line.removeprefix("gpuguard: ") for line in lines if line.startswith("gpuguard: ")]
    said = neutralise((own[:1] or lines[-1:] or [""])[0][:_LINE])
    if reply.status == 1 and said.startswith("wanted "):
        return HostReply(host, seconds, refusal=translated(said))
    try:  # `gpuguard serve-ssh` and `explain` say no in JSON, too
        return reply_with(host, seconds, _object(reply.out))
    except ValueError as error:
        if reply.status == 0:
            return HostReply(host, seconds, error=_("its answer cannot be read: {error}").format(error=error))
    if reply.status == _NOT_FOUND:
        fault = _("gpuguard is not on the PATH there: install it, or name it with --remote /path/to/gpuguard")
    elif reply.status == _SSH_FAILED:
        more = next((_(what).format(host=host) for word, what in _NEXT.items() if word.encode() in reply.err), "")
        fault = (translated(said) or _("ssh failed and said nothing")) + (f" ({more})" if more else "")
    else:
        fault = translated(said) or _("gpuguard ended there with status {status} and said nothing").format(
            status=reply.status
        )
    return HostReply(host, seconds, error=fault)


def reply_with(host: str, seconds: float, facts: Facts) -> HostReply:
    """The reply of a host whose view has said *facts*.

    Raises:
        ValueError: a field is of another type than it should be.
    """
    if "refused" in facts:
        reason = facts.get("reason")
        line = " ".join(reason.split()) if isinstance(reason, str) else _("it does not answer that")
        return HostReply(
            host, seconds, error=_("refused there: {harmless}").format(harmless=translated(_harmless(line)[:_LINE]))
        )
    if facts.get("schema") != 1:
        return HostReply(host, seconds, error=_("its gpuguard is of another version: its JSON has not schema 1"))
    return HostReply(host, seconds, decode(HostAnswer, _harmless(facts)), facts)


def _harmless(value: Any) -> Any:
    """*value* with texts that a terminal can show, and no more of them than it can."""
    if isinstance(value, str):
        return neutralise(value[:_TEXT])
    if isinstance(value, list):
        return [_harmless(item) for item in value[:ROWS]]
    return {name: _harmless(item) for name, item in value.items()} if isinstance(value, dict) else value


def _object(content: bytes) -> Facts:
    """The JSON object in *content*, behind what the shell's start-up files may have said before it."""
    begin = 0 if content.startswith(b"{") else content.find(b"\n{") + 1
    if not begin and not content.startswith(b"{"):
        raise ValueError(_("it is no JSON") if content.strip() else _("it is empty"))
    try:
        found: Facts = loads(content[begin:], DEPTH)  # an object, since it begins with its bracket
    except UnicodeDecodeError:
        raise ValueError(_("it is no text")) from None
    except json.JSONDecodeError:
        raise ValueError(_("it is no JSON, or only a part of it")) from None
    except ValueError as error:  # of ours, or a number of 5,000 digits
        raise ValueError(str(error)[:100]) from None
    return found
