"""The numbers of a job: what its devices did while it ran, and how often they are read.

Does not read them itself; unknown stays None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuguard.model import Device, Snapshot

TICK_SECONDS = 2.5  # how long a lock that the job dropped may stay dropped: one flock per device each time
SAMPLE_SECONDS_FAILING = 300.0  # a driver that does not answer is asked ever more rarely, at last so often
LIMITS_SECONDS_FAILING = 10.0  # and so often where the limits of the job depend on its answer


@dataclass(frozen=True)
class JobEnd:
    """How a job ended, and what its devices did meanwhile; None = unknown."""

    status: int  # for the shell: its exit code, or 128 + the signal that ended it
    die_of: int | None  # a signal that this process should end of now, with signals.die_of and no clean-up
    wall_time: float  # seconds
    outcome: str
    peak_memory: int | None = None  # bytes, of the fullest device
    utilization: float | None = None  # percent, mean over time and devices
    energy: float | None = None  # joules, all devices together


class JobMeter:
    """What *devices* did from the first sample on."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._uuids = [device.uuid for device in devices]
        self._first_energy: dict[str, float] = {}
        self._last_energy: dict[str, float] = {}
        self._utilization: list[float] = []
        self._samples = 0
        self.peak_memory: int | None = None  # bytes, of the fullest device

    def add(self, snapshot: Snapshot) -> None:
        """Count a sample that was taken while the job ran."""
        self.add_last(snapshot)
        self._samples += 1
        for device in filter(None, map(snapshot.device, self._uuids)):
            if device.memory_used is not None:
                self.peak_memory = max(self.peak_memory or 0, device.memory_used)
            # What the driver averages reaches back some seconds: in the first sample to before the job.
            if self._samples > 1 and device.utilization is not None:
                self._utilization.append(device.utilization)

    def add_last(self, snapshot: Snapshot) -> None:
        """Count a sample that was taken after the job: only its energy."""
        for device in filter(None, map(snapshot.device, self._uuids)):
            # A MIG instance has no meter of its own: what is there is its parent's, with the neighbours in it.
            if device.total_energy is not None and device.parent_uuid is None:
                self._first_energy.setdefault(device.uuid, device.total_energy)
                self._last_energy[device.uuid] = device.total_energy

    @property
    def counts(self) -> bool:
        """Whether there is a sample of the time of the job, without which no energy can be told."""
        return bool(self._samples and self._uuids)

    def utilization(self) -> float | None:
        """Percent, mean over samples and devices."""
        return sum(self._utilization) / len(self._utilization) if self._utilization else None

    def energy(self) -> float | None:
        """Joules of all devices together; None when one of them does not count, or counted backwards."""
        used = [self._last_energy[uuid] - self._first_energy[uuid] for uuid in self._first_energy]
        known = self.counts and len(used) == len(self._uuids) and min(used) >= 0
        return sum(used) if known else None


def slower(every: float, *, limited: bool) -> float:
    """Seconds until a driver that has just failed is asked again; *limited*: the job has limits to keep."""
    return min(2 * every or TICK_SECONDS, LIMITS_SECONDS_FAILING if limited else SAMPLE_SECONDS_FAILING)
