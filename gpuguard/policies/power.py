"""The rule ``power``: a device draws too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.model import Finding
from gpuguard.policies.amounts import Amount, parse_power_amount
from gpuguard.policies.holders import USES, wholes
from gpuguard.policies.view import View


@dataclass(frozen=True)
class Power:
    """A device draws more power than allowed.

    above: watts, or percent of the device's power limit.
    per: device (no action on a process follows) or process (each process that computes there is meant).

        when: {power: {above: 95%}}
    """

    above: Annotated[Amount, parse_power_amount]
    per: Literal["device", "process"] = "device"

    def check(self, view: View) -> Iterator[Finding]:
        """Which devices draw too much."""
        for device, parts in wholes(view):
            limit = self.above.of(device.power_limit)
            if device.power_draw is not None and limit is not None and device.power_draw > limit:
                whole = f" of {device.power_limit:.0f}W" if self.above.relative else ""
                why = f"device {device.index} draws {device.power_draw:.0f}W, {self.above.text}{whole} is allowed"
                for part in parts if self.per == "process" else (device,):
                    for subject, _, processes in USES[self.per](view, part):
                        yield Finding("power", subject, why, processes)
