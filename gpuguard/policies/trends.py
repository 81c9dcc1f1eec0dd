"""Rules by trend: ``memory_growth`` (memory in use rises too fast, as in a leak), ``forecast`` (it will be full soon).

The trend of a series is told by the slopes between all pairs of some of its samples (Theil-Sen).  The middle one hardly
moves when a quarter of the samples is wild.  A single jump, however high, lifts only about half of the slopes, so that
a job that loads its model once is no trend.  H. Theil 1950; P. K. Sen, JASA 63 (1968) 1379.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Annotated, Literal

from gpuguard.device_state import device_title
from gpuguard.locale import N_
from gpuguard.locale.messages import all_of, sentence
from gpuguard.model import Device, Finding, GpuProcess, Subject
from gpuguard.policies.rule import Rule, RuleKind, RuleNeeds
from gpuguard.policies.view import RuleView, clock_of, covers, findings_where
from gpuguard.units import Rate, format_bytes, format_duration, parse_duration, parse_percent, parse_rate

POINTS = 24  # 276 pairs
GOLDEN = 0.618034  # samples are picked at uneven distances, so that they keep no pace with a value that rises and falls


def slopes(view: RuleView, subject: Subject, field: str, seconds: float) -> list[float]:
    """Return the slopes per second, rising, between all pairs of at most POINTS samples of the last *seconds*.

    Returns [0.0] if nothing changes; otherwise [] unless the samples cover the time without a large hole.
    """
    series = view.past.get((subject, field), ())
    first = bisect_left(series, view.clock - seconds, key=clock_of)
    points = [series[first + place] for place in _places(len(series) - first)]
    if points and all(value == points[0][1] for _, value in points):
        return [0.0]
    if not covers(series, first, view.clock, seconds):
        return []
    return sorted(
        (later - earlier) / (at - before)
        for place, (at, later) in enumerate(points)
        for before, earlier in points[:place]
        if at > before
    )


def sure(ordered: Sequence[float]) -> float:
    """Return the slope that three quarters of ordered slopes reach.

    Chance alone lifts so many above 0 once in some thousand times: with 24 points it lifts 50% +- 7% (M. G. Kendall,
    Biometrika 30 (1938) 81), and a jump half-way lifts 56% at most.
    """
    return ordered[int(0.25 * (len(ordered) - 1))]


def _places(count: int) -> Sequence[int]:
    if count <= POINTS:
        return range(count)
    return [int((k + k * GOLDEN % 1) * count / POINTS) for k in range(POINTS)]


@dataclass(frozen=True)
class MemoryGrowthRule(Rule):
    """Memory in use grows faster than allowed, by a robust trend: one jump is no growth.

    above: bytes per time.
    over: the window of the trend; nothing is found before gpuguard has watched for so long.
    per: process or device (then no action on a process follows).

        when: {memory_growth: {above: 1GiB/10m, over: 30m}}
    """

    kind = RuleKind(
        "memory_growth",
        innocent=False,
        advice={
            "en": "Look for what keeps growing, or end the process.",
            "zh": "请检查显存持续增长的原因，或结束进程。",
        },
    )

    above: Annotated[Rate, parse_rate]
    over: Annotated[float, parse_duration] = 600.0
    per: Literal["process", "device"] = "process"

    @property
    def needs(self) -> RuleNeeds:
        """The series of memory in use, as far back as the window."""
        return RuleNeeds(past=(("memory_used", self.over),))

    def check(self, view: RuleView) -> list[Finding]:
        """Return a finding for each subject whose memory grows too fast."""

        def why(device: Device, subject: Subject, memory: int | None, processes: tuple[GpuProcess, ...]) -> str | None:
            rates = slopes(view, subject, "memory_used", self.over)
            if memory is None or not rates or sure(rates) <= self.above.per_second:
                return None
            return sentence(
                "memory.growth",
                "memory on {gpu} grows by {grown} in {time} (trend over {span}), {limit} is allowed",
                gpu=device_title(device),
                grown=format_bytes(median_low(rates) * self.above.seconds),
                time=format_duration(self.above.seconds),
                span=format_duration(self.over),
                limit=self.above.text,
            )

        return findings_where("memory_growth", view, self.per, why)


@dataclass(frozen=True)
class ForecastRule(Rule):
    """The memory of a GPU will be full soon, if it grows on as it did.  An estimate: made for warnings.

    full_within: how soon.
    over: the window of the trend; nothing is found before gpuguard has watched for so long.
    confidence: how much of the window must agree: of the growth rates between all pairs of its samples, the share
        by which the memory is full in time.  One jump reaches 56% at most.
    per: device (no action on a process follows) or process (full by the growth of that process alone).

    A GPU that shares the host's memory is not judged.

        when: {forecast: {full_within: 15m, confidence: 90%}}
    """

    kind = RuleKind("forecast", innocent=True, not_in_tables=N_("how much memory a GPU has"))

    full_within: Annotated[float, parse_duration]
    over: Annotated[float, parse_duration] = 600.0
    confidence: Annotated[float, parse_percent] = 80.0
    per: Literal["device", "process"] = "device"

    @property
    def needs(self) -> RuleNeeds:
        """The series of memory in use, as far back as the window."""
        return RuleNeeds(past=(("memory_used", self.over),), memory_size=True)

    def check(self, view: RuleView) -> list[Finding]:
        """Return a finding for each subject by whose trend memory will be full soon."""

        def why(device: Device, subject: Subject, memory: int | None, processes: tuple[GpuProcess, ...]) -> str | None:
            free = device.memory_free
            if free is None and device.memory_total is not None and device.memory_used is not None:
                free = max(device.memory_total - device.memory_used - (device.memory_reserved or 0), 0)
            rates = slopes(view, subject, "memory_used", self.over)
            if memory is None or free is None or not rates or (rate := median_low(rates)) <= 0:
                return None
            confidence = 100 * sum(free <= rate * self.full_within for rate in rates) / len(rates)
            if confidence < self.confidence:
                return None
            full = sentence(
                "memory.forecast",
                "memory of {gpu} is full in about {time}: {free} is free and {rate} more is used each minute "
                "(confidence {confidence})",
                gpu=device_title(device),
                time=format_duration(free / rate),
                free=format_bytes(free),
                rate=format_bytes(rate * 60),
                confidence=f"{confidence:.0f}%",
            )
            within = format_duration(self.full_within)
            return all_of((full, sentence("memory.full_soon", "less than {limit} is not enough", limit=within)))

        return findings_where("forecast", view, self.per, why)
