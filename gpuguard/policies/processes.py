"""The rule ``processes``: too many processes compute on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gpuguard.attribution import places
from gpuguard.model import Finding
from gpuguard.policies.holders import USES
from gpuguard.policies.people import computing
from gpuguard.policies.view import View


@dataclass(frozen=True)
class Processes:
    """More processes compute on one device than allowed, altogether or by one user.

    above: how many are allowed.
    per: device (no action on a process follows) or user (all processes of that user there are meant).

    Processes of unknown owner are not counted.

        when: {processes: {above: 2}}
    """

    above: int
    per: Literal["device", "user"] = "device"

    def check(self, view: View) -> Iterator[Finding]:
        """Where there are too many."""
        for device in places(view.snapshot):
            for subject, _, processes in USES[self.per](view, device):
                count = len(processes if self.per == "user" else computing(device))
                if count > self.above:
                    why = f"{count} processes compute on device {device.index}, {self.above} processes are allowed"
                    yield Finding("processes", subject, why, processes)
