"""The numbers of a job: peak memory, mean utilization and energy of its devices, taken from samples."""

from __future__ import annotations

from collections.abc import Sequence

from gpuguard.device_state import mean_watts
from gpuguard.model import Device, GpuProcess, Snapshot


class JobMeter:
    """Sums up what devices did from the first sample on, as the usage store does; what is unknown stays None."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = list(uuids)
        self._last: Snapshot | None = None
        self._joules: dict[str, float] = {}
        self._unknown_energy: set[str] = set()
        self._busy = self._known = 0.0  # percent x seconds, and seconds, of all devices together
        self.peak_memory: int | None = None  # bytes, of the fullest device

    def add(self, snapshot: Snapshot, strangers: Sequence[tuple[Device, GpuProcess]] = ()) -> None:
        """Count a sample that was taken while the job ran, without what *strangers* hold."""
        for device in filter(None, map(snapshot.device, self._uuids)):
            theirs = [process.memory_used for where, process in strangers if where.uuid == device.uuid]
            if device.memory_used is not None and None not in theirs:
                self.peak_memory = max(self.peak_memory or 0, device.memory_used - sum(filter(None, theirs)))
            # The averages of the driver reach back some seconds, those in the first sample to before the job.
            if self._last is not None and device.utilization is not None:
                seconds = snapshot.clock - self._last.clock
                self._busy += device.utilization * seconds
                self._known += seconds
        self.add_after(snapshot)

    def add_after(self, snapshot: Snapshot) -> None:
        """Count a sample that was taken after the job: only its energy."""
        last, self._last = self._last, snapshot
        seconds = snapshot.clock - last.clock if last else 0.0
        if last is None or seconds <= 0:
            return
        for uuid in self._uuids:
            before, now = last.device(uuid), snapshot.device(uuid)
            watts = mean_watts(before, now, seconds) if before and now else None
            # A MIG instance has no energy counter of its own: it shows its parent's, which includes the neighbours.
            if watts is None or (now and now.parent_uuid):
                self._unknown_energy.add(uuid)
            else:
                self._joules[uuid] = self._joules.get(uuid, 0.0) + watts * seconds

    @property
    def counts(self) -> bool:
        """Whether there is a sample from the time of the job; without one, no energy can be known."""
        return bool(self._last and self._uuids)

    def utilization(self) -> float | None:
        """Return the mean over time and devices in percent, or None if it is unknown."""
        return self._busy / self._known if self._known else None

    def energy(self) -> float | None:
        """Return the joules of all devices together, or None if those of one are unknown for some of the time."""
        known = self._uuids and not self._unknown_energy and len(self._joules) == len(self._uuids)
        return sum(self._joules.values()) if known else None
