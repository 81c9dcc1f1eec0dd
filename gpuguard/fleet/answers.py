"""The answers of hosts: bytes from a stranger, which become values here and nowhere else.

An answer is one JSON object of bounded size and depth whose fields are of the right types, or it is an error with a
reason.  Its texts are made harmless for terminals, and its texts and lists are bounded; only `--json` passes on the
original.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuguard.errors import EXIT_NOT_FOUND
from gpuguard.fleet.ssh import Reply
from gpuguard.history.queries import TIMES, DeviceTotal, SeenDevice, Watch
from gpuguard.history.usage_report import ClaimRow, PolicyRow, Report, UsageRow
from gpuguard.jsonio import decode, loads
from gpuguard.locale import N_, _, translated
from gpuguard.locale.messages import Sentence, plain
from gpuguard.model import Device
from gpuguard.sanitize import neutralise
from gpuguard.vendors import NVIDIA

DEPTH = 32  # of an answer: `who --json` has 6
ROWS = 4096  # of a list; one of a million would hold up the answers of all other hosts
_TEXT = 400  # characters of a text
_LINE = 300  # characters of an error that are shown
_SSH_FAILED = 255

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
    vendor: str = NVIDIA.name  # older ones do not say it
    state: str | None = None
    exact_state: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_shared_with_host: bool | None = None
    utilization_percent: float | None = None
    claims: tuple[HostClaim, ...] = ()
    processes: tuple[HostProcess, ...] | None = None

    @property
    def device(self) -> Device:
        """The device as views print it."""
        instance = self.label.partition(".")[2]
        return Device(
            self.index,
            self.uuid,
            self.name,
            parent_uuid=self.parent_uuid,
            mig_profile=self.mig_profile,
            gpu_instance_id=int(instance) if instance.isdecimal() else None,
            vendor=self.vendor,
            memory_used=self.memory_used_bytes,
            memory_total=self.memory_total_bytes,
            memory_shared_with_host=self.memory_shared_with_host,
            utilization=self.utilization_percent,
        )


@dataclass(frozen=True)
class HostUser:
    """What a user has, from `who --json`: the fields of a UserTotal, in that order."""

    user: str | None
    devices: int
    processes: int
    memory_used_bytes: int | None
    claimed: int
    idle: int


@dataclass(frozen=True)
class HostTicket:
    """A request that waits, from `queue --json`."""

    user: str
    num_gpus: int
    number: int = 0  # the position in the queue; `who` gives none
    waited_seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class HostAnswer:
    """The fields of the JSON of `who`, `queue`, `select` and `explain` that views show; missing ones are unknown."""

    recorded: bool = False
    simulated: bool = False
    taken_at: float | None = None
    devices: tuple[HostDevice, ...] = ()
    users: tuple[HostUser, ...] = ()
    waiting: tuple[HostTicket, ...] = ()
    places: tuple[HostTicket, ...] = ()


@dataclass(frozen=True)
class HostUsage:
    """The usage of a user, a group or a device, from `report --json`."""

    name: str
    uid: int | None
    uuid: str | None
    claimed_gpu_seconds: float
    used_gpu_seconds: float
    idle_gpu_seconds: float
    unknown_gpu_seconds: float
    unclaimed_gpu_seconds: float
    energy_joules: float | None
    waiting_seconds: float | None
    wanted_gpu_seconds: float | None

    @property
    def row(self) -> UsageRow:
        """The usage as reports have it."""
        row = UsageRow(self.name, self.uid, self.uuid, energy=self.energy_joules)
        row = replace(row, waiting=self.waiting_seconds, wanted=self.wanted_gpu_seconds)
        return replace(row, **{part: getattr(self, f"{part}_gpu_seconds") for part in TIMES})


@dataclass(frozen=True)
class HostDeviceTotal:
    """What a device did, from `report --json`."""

    uuid: str
    index: int | None
    name: str | None
    parent_uuid: str | None
    watched_seconds: float
    claimed_seconds: float | None
    claimed_unknown_seconds: float
    utilization_percent: float | None
    energy_joules: float | None
    energy_unknown_seconds: float

    @property
    def total(self) -> DeviceTotal:
        """The totals as reports have them."""
        return DeviceTotal(
            SeenDevice(self.uuid, self.name, self.parent_uuid, self.index),
            self.watched_seconds,
            self.claimed_seconds or 0.0,  # with None, all the time that was watched is unknown
            self.claimed_unknown_seconds,
            self.utilization_percent,
            self.energy_joules,
            self.energy_unknown_seconds,
        )


@dataclass(frozen=True)
class HostReport:
    """The content of `report --json`; a list is None if it was not asked for."""

    by: str
    begin: float
    end: float
    slot_seconds: int
    watched_seconds: float
    record_begins: float | None
    devices: tuple[HostDeviceTotal, ...]
    line_unknown_seconds: float
    rows: tuple[HostUsage, ...] | None = None
    claims: tuple[ClaimRow, ...] | None = None
    claims_without_end: int | None = None
    policies: tuple[PolicyRow, ...] | None = None

    @property
    def report(self) -> Report:
        """The report of that machine."""
        watch = Watch(self.begin, self.end, self.watched_seconds, self.record_begins, self.slot_seconds)
        rows, devices = [usage.row for usage in self.rows or ()], [device.total for device in self.devices]
        return Report(
            self.by,
            watch,
            rows,
            (),
            devices,
            self.line_unknown_seconds,
            claims=self.claims,
            claims_without_end=self.claims_without_end,
            policies=self.policies,
        )


@dataclass(frozen=True)
class HostReply:
    """The reply of one host."""

    host: str  # as it was asked for, whatever it calls itself
    seconds: float
    answer: HostAnswer | None = None
    report: HostReport | None = None  # the answer to `report`
    facts: Facts | None = None  # the JSON of its view, as it came
    refusal: str | None = None  # the view's own refusal: not enough GPUs
    error: str | None = None  # why there is neither an answer nor a refusal


def reply_of(reply: Reply, kind: type[HostAnswer | HostReport] = HostAnswer) -> HostReply:
    """Read *reply* as the *kind* of answer that was asked for."""
    host, seconds = reply.host, reply.seconds
    if reply.fault is not None:
        return HostReply(host, seconds, error=reply.fault)
    # The line of standard error that says most: gpuguard's first one, else the last one of all.
    lines = [line.strip() for line in reply.err.decode("utf-8", "replace").splitlines() if line.strip()]
    own = [line.removeprefix("gpuguard: ") for line in lines if line.startswith("gpuguard: ")]
    said = neutralise((own[:1] or lines[-1:] or [""])[0][:_LINE])
    if reply.status == 1 and said.startswith("wanted "):
        return HostReply(host, seconds, refusal=said)
    try:  # because `gpuguard serve-ssh` and `explain` also refuse in JSON
        return reply_with(host, seconds, _object(reply.out), kind)
    except ValueError as error:
        if reply.status == 0:
            return HostReply(host, seconds, error=_("its answer cannot be read: {error}").format(error=error))
    if reply.status == EXIT_NOT_FOUND:
        fault = _("gpuguard is not on the PATH there: install it, or name it with --remote /path/to/gpuguard")
    elif reply.status == _SSH_FAILED:
        more = next((_(what).format(host=host) for word, what in _NEXT.items() if word.encode() in reply.err), "")
        fault = (said or _("ssh failed and said nothing")) + (f" ({more})" if more else "")
    else:
        fault = said or _("gpuguard ended there with status {status} and said nothing").format(status=reply.status)
    return HostReply(host, seconds, error=fault)


def reply_with(host: str, seconds: float, facts: Facts, kind: type[HostAnswer | HostReport] = HostAnswer) -> HostReply:
    """Return the reply of a host whose view has given *facts*.

    Raises:
        ValueError: a field is of another type than it should be.
    """
    if "refused" in facts:
        reason = facts.get("reason")
        line = " ".join(translated(reason).split()) if isinstance(reason, str) else _("it does not answer that")
        harmless = _harmless(line)[:_LINE]
        return HostReply(host, seconds, error=_("refused there: {harmless}").format(harmless=harmless))
    if facts.get("schema") != 1:
        return HostReply(host, seconds, error=_("its gpuguard is of another version: its JSON has not schema 1"))
    if kind is HostAnswer:
        return HostReply(host, seconds, decode(HostAnswer, _harmless(facts)), facts=facts)
    if any(len(value) > ROWS for value in facts.values() if isinstance(value, list)):  # a sum of some would be wrong
        fault = _("its report has more than {most} rows: ask for a shorter time, or with --user").format(most=ROWS)
        return HostReply(host, seconds, error=fault)
    return HostReply(host, seconds, report=decode(HostReport, _harmless(facts)), facts=facts)


def _harmless(value: Any) -> Any:
    """Return *value* with its texts made harmless for a terminal, and with texts and lists cut to their bounds."""
    if isinstance(value, Sentence):
        return Sentence(_harmless(plain(value)), value.key, _harmless(dict(value.values)))
    if isinstance(value, str):
        return neutralise(value[:_TEXT])
    if isinstance(value, list):
        return [_harmless(item) for item in value[:ROWS]]
    return {name: _harmless(item) for name, item in value.items()} if isinstance(value, dict) else value


def _object(content: bytes) -> Facts:
    """Return the JSON object in *content*, after anything that the shell's start-up files may have printed."""
    begin = 0 if content.startswith(b"{") else content.find(b"\n{") + 1
    if not begin and not content.startswith(b"{"):
        raise ValueError(_("it is no JSON") if content.strip() else _("it is empty"))
    try:
        found: Facts = loads(content[begin:], DEPTH)  # an object, because it begins with a brace
    except UnicodeDecodeError:
        raise ValueError(_("it is no text")) from None
    except json.JSONDecodeError:
        raise ValueError(_("it is no JSON, or only a part of it")) from None
    except ValueError as error:  # one of our own, or a number of 5,000 digits
        raise ValueError(str(error)[:100]) from None
    return found
