"""The rule ``temperature``: a device is too hot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.model import Finding
from gpuguard.policies.holders import USES, wholes
from gpuguard.policies.view import View
from gpuguard.units import parse_celsius


@dataclass(frozen=True)
class Temperature:
    """A device is hotter than allowed.

    above: degrees Celsius.
    per: device (no action on a process follows) or process (each process that computes there is meant).

    Whoever is on a hot device may not be the cause (a fan, the room, the neighbour): processes are meant only by
    `per: process`.

        when: {temperature: {above: 85C}}
    """

    above: Annotated[float, parse_celsius]
    per: Literal["device", "process"] = "device"

    def check(self, view: View) -> Iterator[Finding]:
        """Which devices are too hot."""
        for device, parts in wholes(view):
            if device.temperature is not None and device.temperature > self.above:
                why = f"device {device.index} has {device.temperature:.0f}C, {self.above:g}C is allowed"
                for part in parts if self.per == "process" else (device,):
                    for subject, _, processes in USES[self.per](view, part):
                        yield Finding("temperature", subject, why, processes)
