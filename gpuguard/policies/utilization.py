"""The rule ``utilization``: a device or a process keeps the GPU busier, or less busy, than allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.attribution import places
from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding
from gpuguard.policies.holders import USES
from gpuguard.policies.view import View
from gpuguard.units import parse_percent


@dataclass(frozen=True)
class Utilization:
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

    def check(self, view: View) -> Iterator[Finding]:
        """Who is beyond the limit."""
        for device in places(view.snapshot):
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
