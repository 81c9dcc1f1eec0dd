"""What the page remembers by itself: the last 12 hours, in two rings of numbers of four bytes.

For a machine without a daemon, and for the minutes that the usage store has not written yet.  Unknown is NaN.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from gpuguard.model import Device, Snapshot

METRICS = ("utilization", "memory", "temperature", "power")
_NAN = float("nan")
RINGS = ((2.0, 600.0), (10.0, 43200.0))  # (seconds between two values, seconds that are kept)


@dataclass(frozen=True)
class Series:
    """Values of one metric: times[i] is the unix time of values[uuid][i]; None = unknown."""

    times: list[float]
    values: dict[str, list[float | None]]


class Ring:
    """The newest values of all devices, at most one in *step* seconds."""

    def __init__(self, step: float, keep: float) -> None:
        self.step, self.keep = step, keep
        self._size = int(keep / step)
        self._times = array("d", [_NAN]) * self._size
        self._values: dict[tuple[str, str], array[float]] = {}
        self._slot = -1

    def add(self, snapshot: Snapshot) -> None:
        """Remember *snapshot*, instead of one of the same slot."""
        slot = int(snapshot.taken_at / self.step)
        if slot < self._slot:
            self._times = array("d", [_NAN]) * self._size  # the clock was set back: what was is no past any more
        self._slot = slot
        place = slot % self._size
        self._times[place] = snapshot.taken_at
        seen = {(device.uuid, metric): _value(device, metric) for device in snapshot.devices for metric in METRICS}
        for key in seen.keys() | self._values.keys():
            kept = self._values.setdefault(key, array("f", [_NAN]) * self._size)
            kept[place] = seen.get(key, _NAN)

    def uuids(self, metric: str) -> list[str]:
        """The devices of which something was seen."""
        return [uuid for uuid, name in self._values if name == metric]

    def series(self, metric: str, begin: float, most: int) -> Series:
        """The values since *begin* (unix time), at most so many per device: means of those that are known."""
        order = sorted((time, place) for place, time in enumerate(self._times) if time >= begin)
        width = -(-len(order) // most) or 1
        groups = [order[at : at + width] for at in range(0, len(order), width)]
        return Series(
            [group[-1][0] for group in groups],
            {
                uuid: [_mean([kept[place] for _, place in group]) for group in groups]
                for (uuid, name), kept in self._values.items()
                if name == metric
            },
        )


def _value(device: Device, metric: str) -> float:
    found = {
        "utilization": device.utilization,
        "memory": device.memory_used,
        "temperature": device.temperature,
        "power": device.power_draw,
    }[metric]
    return _NAN if found is None else float(found)


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else None
