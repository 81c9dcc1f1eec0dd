"""The rule ``memory_growth``: memory in use rises too fast, as in a leak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.device_state import usable_devices
from gpuguard.model import Device, Finding
from gpuguard.policies.amounts import Rate, parse_rate
from gpuguard.policies.series import middle, slopes, sure
from gpuguard.policies.subjects import USES
from gpuguard.policies.view import RuleView
from gpuguard.units import format_bytes, format_duration, parse_duration, parse_percent


@dataclass(frozen=True)
class MemoryGrowthRule:
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

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Whose memory grows too fast."""
        for device in usable_devices(view.snapshot):
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


# The rule ``forecast``: memory will be full soon, if it grows on as it did.


@dataclass(frozen=True)
class ForecastRule:
    """The memory of a device will be full soon, if it grows on as it did.  An estimate: made for warnings.

    full_within: how soon.
    over: the window of the trend; nothing is found before gpuguard has watched for so long.
    confidence: how much of the window must agree: of the growth rates between all pairs of its samples, the share
        by which the memory is full in time.  One jump reaches 56% at most.
    per: device (no action on a process follows) or process (full by the growth of that process alone).

        when: {forecast: {full_within: 15m, confidence: 90%}}
    """

    full_within: Annotated[float, parse_duration]
    over: Annotated[float, parse_duration] = 600.0
    confidence: Annotated[float, parse_percent] = 80.0
    per: Literal["device", "process"] = "device"

    def needs(self) -> tuple[tuple[str, float], ...]:
        """The series of memory in use, as far back as the window."""
        return (("memory_used", self.over),)

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Where memory will be full."""
        for device in usable_devices(view.snapshot):
            if (free := _free(device)) is None:
                continue
            for subject, used, processes in USES[self.per](view, device):
                if used is None or not (rates := slopes(view, subject, "memory_used", self.over)):
                    continue
                in_time = sum(free <= rate * self.full_within for rate in rates)
                confidence = 100 * in_time / len(rates)
                rate = middle(rates)
                if confidence >= self.confidence and rate > 0:
                    why = (
                        f"memory of device {device.index} is full in about {format_duration(free / rate)}: "
                        f"{format_bytes(free)} is free and {format_bytes(rate * 60)} more is used each minute "
                        f"(confidence {confidence:.0f}%); less than {format_duration(self.full_within)} is not enough"
                    )
                    yield Finding("forecast", subject, why, processes)


def _free(device: Device) -> int | None:
    if device.memory_free is not None:
        return device.memory_free
    if device.memory_total is None or device.memory_used is None:
        return None
    return max(device.memory_total - device.memory_used - (device.memory_reserved or 0), 0)
