"""What the page remembers by itself: the last 12 hours, in two rings of numbers of four bytes.

For a machine without a daemon, and for the minutes that the usage store has not written yet.  Unknown is NaN.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from gpuguard.model import Device, Snapshot

METRICS = ("utilization", "memory", "temperature", "power")
_NAN = float("nan")
RINGS = ((2.0, 600.0), (10.0, 43200.0))  # (seconds between two values, seconds that are kept)


@dataclass(frozen=True)
class ChartSeries:
    """Values of one metric: times[i] is the unix time of values[uuid][i]; None = unknown."""

    times: list[float]
    values: dict[str, list[float | None]]


class NumberRing:
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

    def series(self, metric: str, begin: float, most: int) -> ChartSeries:
        """The values since *begin* (unix time), at most so many per device: means of those that are known."""
        order = sorted((time, place) for place, time in enumerate(self._times) if time >= begin)
        width = -(-len(order) // most) or 1
        groups = [order[at : at + width] for at in range(0, len(order), width)]
        return ChartSeries(
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


# What the machine does beside the GPUs: CPU, memory, disk and network, as rates since the look before.


class Host:
    """Looks at the machine; the first look knows no rates."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float, float, float] | None = None

    def look(self) -> dict[str, float | int | None]:
        """CPU in percent, memory in bytes, disk and network in bytes per second; None = unknown."""
        import psutil

        memory = psutil.virtual_memory()
        disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
        now = (
            time.monotonic(),
            *((disk.read_bytes, disk.write_bytes) if disk else (float("nan"), float("nan"))),
            *((network.bytes_recv, network.bytes_sent) if network else (float("nan"), float("nan"))),
        )
        before, self._before = self._before, now
        rates = [_rate(before, now, place) for place in (1, 2, 3, 4)]
        return {
            "cpu_percent": psutil.cpu_percent() if before else None,
            "cpu_count": os.cpu_count(),
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "disk_read_bytes_per_second": rates[0],
            "disk_write_bytes_per_second": rates[1],
            "network_received_bytes_per_second": rates[2],
            "network_sent_bytes_per_second": rates[3],
        }


def _rate(before: tuple[float, ...] | None, now: tuple[float, ...], place: int) -> float | None:
    if before is None or now[0] <= before[0]:
        return None
    rate = (now[place] - before[place]) / (now[0] - before[0])
    return round(rate) if rate >= 0 else None  # NaN, or a counter that began anew
