"""What samples show of a job: its numbers, other users on its GPUs, and the job itself on GPUs that it has not claimed.

All of it is only reported, in the job's log and in its last line.  Processes of root and processes in containers are
left out, because they may be the job's own.  Processes are filtered by uid before anything else is read, so a job that
is alone costs no look at /proc or at other claims.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory
from gpuguard.device_state import (
    claim_of,
    claims_on,
    claims_readable,
    computes,
    device_title,
    mean_watts,
    started_by,
    usable_devices,
)
from gpuguard.errors import BackendError
from gpuguard.locale.messages import sentence
from gpuguard.model import HEALTH, MEMORY, PROCESS_DETAILS, PROCESSES, Device, GpuProcess, Snapshot
from gpuguard.procfs import boot_clock, in_first_pid_namespace, process_facts
from gpuguard.source import read_state, with_claims

FIELDS = frozenset({MEMORY, PROCESSES, PROCESS_DETAILS})
FIRST_LOOK_SECONDS = 4.0  # the wait doubles after each look, because most jobs find their GPU at once
LOOK_SECONDS = 60.0  # at most, between two looks at all GPUs where a daemon publishes what it sees
MOST_TOLD = 8  # strangers per job: another user must not fill its log with processes that come and go
OWN_LOOK_SECONDS = 600.0  # at most, where each of these looks must ask the driver


Stranger = tuple[Device, GpuProcess]  # a process of another user, and where it is


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


class Surroundings:
    """The observations around one job, and its numbers."""

    def __init__(self, claim: Claim, backend: Backend, directory: LockDirectory | None) -> None:
        # The numbers of a shared device are not the job's alone, but also its neighbours'.
        self.meter = JobMeter([device.uuid for device in claim] if claim.memory is None else ())
        self.remarks: dict[str, None] = {}  # for the last line of the job, in the order in which they came
        self._claim, self._backend, self._directory = claim, backend, directory
        self._uuids = frozenset(device.uuid for device in claim)
        self._knows_pids = backend.simulated or in_first_pid_namespace() is not False
        self._told: set[object] = set()  # strangers
        self._elsewhere: set[str] = set()  # uuids
        self._look_at, self._wait = time.monotonic() + FIRST_LOOK_SECONDS, FIRST_LOOK_SECONDS

    def strangers(self, snapshot: Snapshot) -> list[Stranger]:
        """Return the processes of other users on the devices of the job."""
        claim = self._claim
        if not self._knows_pids or self._directory is None or claim.memory is not None or claim.max_processes:
            return []  # neighbours are no strangers
        perhaps = [
            (device, process)
            for device in snapshot.devices
            for process in _rows(device, self._uuids)
            if process.uid not in (None, 0, os.getuid()) and not process.container and computes(process, device)
        ]
        if not perhaps:
            return []
        known = with_claims(snapshot, lambda: self._directory)
        if not claims_readable(known):
            return []
        stats = process_facts(known)
        return [each for each in perhaps if claim_of(each[1], claims_on(known, each[0]), stats) is None]

    def news(self, strangers: Iterable[Stranger]) -> Iterator[str]:
        """Yield a sentence about each of *strangers* that was not there in the samples before."""
        for device, process in strangers:
            mark = device.uuid, process.pid, process.start_time
            if mark not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(mark)
                who = process.user or f"uid {process.uid}"
                known = {"user": who, "pid": str(process.pid)}
                remark = sentence(
                    "stranger.remark", "GPU {device} with {user} (pid {pid})", device=device.label, **known
                )
                self.remarks[remark] = None
                yield sentence(
                    "stranger.computes",
                    "{user} (pid {pid}) computes on {gpu} too, which you have claimed.",
                    gpu=device_title(device),
                    **known,
                )

    def look(self, family: Callable[[], Mapping[int, float]]) -> Iterator[str]:
        """Yield a sentence about each GPU on which the job computes without a claim, if it is time to look again.

        *family* returns the living processes of the job: pid -> start time.
        """
        now = time.monotonic()
        if now < self._look_at or not self._knows_pids or self._directory is None:
            return
        around = read_state(self._directory, boot_clock(), simulated=self._backend.simulated)
        self._wait = min(2 * self._wait, LOOK_SECONDS if around else OWN_LOOK_SECONDS)
        self._look_at = now + self._wait
        try:
            around = around or self._backend.sample(FIELDS | {HEALTH})
        except BackendError:
            return
        for device, pid in self._outside(around, family):
            if device.uuid not in self._elsewhere:
                self._elsewhere.add(device.uuid)
                remark = sentence(
                    "outside.remark", "GPU {device} without a claim (pid {pid})", device=device.label, pid=pid
                )
                self.remarks[remark] = None
                yield sentence(
                    "outside.computes",
                    "the job computes on {gpu} (pid {pid}), which it has not claimed: leave CUDA_VISIBLE_DEVICES as "
                    "gpuguard sets it, and count GPUs from 0 in the job.",
                    gpu=device_title(device),
                    pid=pid,
                )

    def _outside(self, around: Snapshot, family: Callable[[], Mapping[int, float]]) -> Iterator[tuple[Device, int]]:
        others = frozenset(device.uuid for device in usable_devices(around)) - self._uuids
        own = [
            (device, process)
            for device in around.devices
            for process in _rows(device, others)
            if process.uid == os.getuid() and process.start_time is not None and computes(process, device)
        ]
        living = family().items() if own else ()
        own = [(device, process) for device, process in own if (process.pid, process.start_time) in living]
        if own:
            known = with_claims(around, lambda: self._directory)
            stats = process_facts(known)
            for device, process in own if claims_readable(known) else ():
                if started_by(process, claims_on(known, device), stats) is None:  # else a job within the job started it
                    yield device, process.pid


def _rows(device: Device, uuids: frozenset[str]) -> tuple[GpuProcess, ...]:
    believed = device.uuid in uuids and device.processes_plausible
    return (device.processes or ()) if believed else ()
