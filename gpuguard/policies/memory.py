"""The rule ``memory``: too much memory of a device is in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.attribution import claims_on, places
from gpuguard.model import ClaimRecord, Finding, Subject, claim_named
from gpuguard.policies.amounts import Amount, parse_memory_amount
from gpuguard.policies.holders import USES
from gpuguard.policies.view import View
from gpuguard.units import format_bytes


@dataclass(frozen=True)
class Memory:
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

    def check(self, view: View) -> Iterator[Finding]:
        """Whose use is above the limit."""
        for device in places(view.snapshot):
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
