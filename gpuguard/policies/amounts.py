"""Limits as people write them: "40GiB" or "90%" of what there is, "1GiB/10m" of growth.

Keeps the text, so that a finding names the limit in the words of the policy file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuguard.errors import InvalidRequest
from gpuguard.units import parse_bytes, parse_duration, parse_percent, parse_watts


@dataclass(frozen=True)
class Amount:
    """A limit in base units, in percent of a total that is known only when it is judged, or what a claim asked for."""

    value: float
    text: str = field(compare=False)
    relative: bool = False
    promised: bool = False  # each claim has its own: its share of the device

    def of(self, total: float | None, promised: float | None = None) -> float | None:
        """The limit in base units; None when it is a part of an unknown *total*, or nothing was *promised*."""
        if self.promised:
            return promised
        if not self.relative:
            return self.value
        return None if total is None else self.value / 100 * total


@dataclass(frozen=True)
class Rate:
    """Bytes per time."""

    count: int  # bytes
    seconds: float
    text: str = field(compare=False)

    @property
    def per_second(self) -> float:
        """Bytes per second."""
        return self.count / self.seconds


def parse_memory_amount(text: str) -> Amount:
    """An amount of ``"40GiB"``, of ``"90%"`` of the device's memory, or ``"share"``: what a claim on it asked for."""
    if text.strip() == "share":
        return Amount(0, "share", promised=True)
    if text.strip().endswith("%"):
        return Amount(parse_percent(text), text.strip(), relative=True)
    return Amount(parse_bytes(text), text.strip())


def parse_power_amount(text: str) -> Amount:
    """An amount of ``"300W"`` or of ``"95%"`` of the device's power limit."""
    if text.strip().endswith("%"):
        return Amount(parse_percent(text), text.strip(), relative=True)
    return Amount(parse_watts(text), text.strip())


def parse_rate(text: str) -> Rate:
    """A rate of ``"1GiB/10m"`` or ``"1MB/s"``."""
    count, slash, per = text.partition("/")
    per = per.strip()
    if not slash or not per:
        raise InvalidRequest(f"{text!r} is not a rate: write it like '1GiB/10m' or '1MB/s'.")
    seconds = parse_duration(per if per[0].isdigit() else f"1{per}")
    if seconds <= 0:
        raise InvalidRequest(f"{text!r} is per no time at all: write it like '1GiB/10m'.")
    return Rate(parse_bytes(count), seconds, text.strip())
