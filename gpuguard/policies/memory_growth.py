"""The rule ``memory_growth``: memory in use rises too fast, as in a leak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.attribution import places
from gpuguard.model import Finding
from gpuguard.policies.amounts import Rate, parse_rate
from gpuguard.policies.holders import USES
from gpuguard.policies.trend import middle, slopes, sure
from gpuguard.policies.view import View
from gpuguard.units import format_bytes, format_duration, parse_duration


@dataclass(frozen=True)
class MemoryGrowth:
    """Memory in use grows faster than allowed, by a robust trend: one jump is no growth.

    above: bytes per time.
    over: the window of the trend; nothing is found before gpuguard has watched for so long.
    per: process or device (then no action on a process follows).

        when: {memory_growth: {above: 1GiB/10m, over: 30m}}
    """

    above: Annotated[Rate, parse_rate]
    over: Annotated[float, parse_duration] = 600.0
    per: Literal["process", "device"] = "process"

    def needs(self) -> tuple[tuple[str, float], ...]:
        """The series of memory in use, as far back as the window."""
        return (("memory_used", self.over),)

    def check(self, view: View) -> Iterator[Finding]:
        """Whose memory grows too fast."""
        for device in places(view.snapshot):
            for subject, used, processes in USES[self.per](view, device):
                if used is None or not (rates := slopes(view, subject, "memory_used", self.over)):
                    continue
                if sure(rates) > self.above.per_second:
                    grown = (
                        f"{format_bytes(middle(rates) * self.above.seconds)} in {format_duration(self.above.seconds)}"
                    )
                    why = (
                        f"memory on device {device.index} grows by {grown} (trend over {format_duration(self.over)}), "
                        f"{self.above.text} is allowed"
                    )
                    yield Finding("memory_growth", subject, why, processes)
