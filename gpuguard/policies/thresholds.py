"""The rule ``memory``: too much memory of a device is in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.device_state import claims_on, usable_devices
from gpuguard.errors import InvalidRequest
from gpuguard.model import ClaimRecord, Finding, Subject, claim_named
from gpuguard.policies.amounts import Amount, parse_memory_amount, parse_power_amount
from gpuguard.policies.subjects import USES, computing, wholes
from gpuguard.policies.view import RuleView
from gpuguard.units import format_bytes, parse_celsius, parse_percent


@dataclass(frozen=True)
class MemoryRule:
    """More memory of one device is in use than allowed, by one process, user or claim, or altogether.

    above: bytes, or percent of the device's memory; or share, with per: claim: what the claim asked for when it began
        to share its devices (gpuguard run --share --memory).  A claim that shares nothing cannot exceed it.
    per: process, user (all processes of a user on the device), claim (all its processes on one of its devices), or
        device (then it is nobody's fault in particular: no action on a process follows).

    Memory that the driver does not tell is not counted.

        when: {memory: {above: 90%, per: user}}
    """

    above: Annotated[Amount, parse_memory_amount]
    per: Literal["process", "user", "claim", "device"] = "process"

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Whose use is above the limit."""
        for device in usable_devices(view.snapshot):
            claims = claims_on(view.snapshot, device) if self.above.promised else ()
            for_all = self.above.of(device.memory_total)
            for subject, used, processes in USES[self.per](view, device):
                share = _share_of(subject, claims) if claims else None
                limit = for_all if share is None else share
                if used is not None and limit is not None and used > limit >= 0:
                    whole = f" of {format_bytes(device.memory_total)}" if self.above.relative else ""
                    allowed = f"its share of {format_bytes(share)}" if self.above.promised else self.above.text
                    why = f"uses {format_bytes(used)} of device {device.index}, {allowed}{whole} is allowed"
                    yield Finding("memory", subject, why, processes)


def _share_of(subject: Subject, claims: Sequence[ClaimRecord]) -> int | None:
    claim = claim_named(claims, subject.uid, subject.claim)
    return claim.memory if claim else None


# The rule ``temperature``: a device is too hot.


@dataclass(frozen=True)
class TemperatureRule:
    """A device is hotter than allowed.

    above: degrees Celsius.
    per: device (no action on a process follows) or process (each process that computes there is meant).

    Whoever is on a hot device may not be the cause (a fan, the room, the neighbour): processes are meant only by
    `per: process`.

        when: {temperature: {above: 85C}}
    """

    above: Annotated[float, parse_celsius]
    per: Literal["device", "process"] = "device"

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Which devices are too hot."""
        for device, parts in wholes(view):
            if device.temperature is not None and device.temperature > self.above:
                why = f"device {device.index} has {device.temperature:.0f}C, {self.above:g}C is allowed"
                for part in parts if self.per == "process" else (device,):
                    for subject, _, processes in USES[self.per](view, part):
                        yield Finding("temperature", subject, why, processes)


# The rule ``power``: a device draws too much.


@dataclass(frozen=True)
class PowerRule:
    """A device draws more power than allowed.

    above: watts, or percent of the device's power limit.
    per: device (no action on a process follows) or process (each process that computes there is meant).

        when: {power: {above: 95%}}
    """

    above: Annotated[Amount, parse_power_amount]
    per: Literal["device", "process"] = "device"

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Which devices draw too much."""
        for device, parts in wholes(view):
            limit = self.above.of(device.power_limit)
            if device.power_draw is not None and limit is not None and device.power_draw > limit:
                whole = f" of {device.power_limit:.0f}W" if self.above.relative else ""
                why = f"device {device.index} draws {device.power_draw:.0f}W, {self.above.text}{whole} is allowed"
                for part in parts if self.per == "process" else (device,):
                    for subject, _, processes in USES[self.per](view, part):
                        yield Finding("power", subject, why, processes)


# The rule ``utilization``: a device or a process keeps the GPU busier, or less busy, than allowed.


@dataclass(frozen=True)
class UtilizationRule:
    """The GPU is busier than `above`, or less busy than `below`.  For devices that are held but rest, see idle.

    above: percent of time.  Exactly one of above and below.
    below: percent of time.
    per: device (the share of time in which any kernel ran; no action on a process follows) or process (the share
        of the multiprocessors that it used itself, where the driver tells it).

        when: {utilization: {above: 95%}}
    """

    above: Annotated[float | None, parse_percent] = None
    below: Annotated[float | None, parse_percent] = None
    per: Literal["device", "process"] = "device"

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise InvalidRequest("utilization wants exactly one of above and below: {utilization: {above: 95%}}.")

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Who is beyond the limit."""
        for device in usable_devices(view.snapshot):
            for subject, _, processes in USES[self.per](view, device):
                percent = processes[0].utilization if self.per == "process" else device.utilization
                if percent is None:
                    continue
                if self.above is not None and percent > self.above:
                    limit = f"at most {self.above:g}% is allowed"
                elif self.below is not None and percent < self.below:
                    limit = f"at least {self.below:g}% is expected"
                else:
                    continue
                why = f"utilization of device {device.index} is {percent:.3g}%, {limit}"
                yield Finding("utilization", subject, why, processes)


# The rule ``processes``: too many processes compute on one device.


@dataclass(frozen=True)
class ProcessesRule:
    """More processes compute on one device than allowed, altogether or by one user.

    above: how many are allowed.
    per: device (no action on a process follows) or user (all processes of that user there are meant).

    Processes of unknown owner are not counted.

        when: {processes: {above: 2}}
    """

    above: int
    per: Literal["device", "user"] = "device"

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Where there are too many."""
        for device in usable_devices(view.snapshot):
            for subject, _, processes in USES[self.per](view, device):
                count = len(processes if self.per == "user" else computing(device))
                if count > self.above:
                    why = f"{count} processes compute on device {device.index}, {self.above} processes are allowed"
                    yield Finding("processes", subject, why, processes)
