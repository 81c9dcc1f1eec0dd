"""Who came first: since when the driver's list of a device has each process, and which processes it had before a claim.

A claim that is made later must not turn an older process into a trespasser, and the time in a record is only its
owner's word.  So this relies on what was seen: the lists of processes that can be believed, and the first snapshot that
shows a claim on a device.  Reads nothing; engine.evaluate() feeds it, so that rehearsals agree with the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuguard.device_state import claims_by_device, lock_identity, may_compute
from gpuguard.model import ClaimRecord, Device, GpuProcess, ProcessIdentity, Snapshot

START_SLACK = 0.02  # seconds: start times and clocks are cut to ticks of 10 ms
_MaybeIdentified = tuple[int, float | None]  # pid, start_time; None: it could not be read
_OnDevice = tuple[object, ...]  # a claim on one device: see device_state.lock_identity()


@dataclass(frozen=True)
class _KnownList:
    """The last believable list of a device."""

    clock: float
    pids: frozenset[int]
    arrived: dict[ProcessIdentity, float | None]  # those whose start time is known -> see Arrivals.arrived()
    using: frozenset[_MaybeIdentified]  # those that use the device, or may use it: no desktops


@dataclass(frozen=True)
class _FirstSight:
    """A claim on one device when it was first seen."""

    clock: float  # a process that began later came after the claim
    there_first: frozenset[_MaybeIdentified] | None = None  # None: no list since then could be believed


@dataclass
class Arrivals:
    """The order in which processes and claims came to the devices of one machine, as far as snapshots show it.

    It holds for one boot: make a new one when the clock runs backwards.
    """

    _lists: dict[str, _KnownList] = field(default_factory=dict)  # by uuid
    _claims: dict[_OnDevice, _FirstSight] = field(default_factory=dict)
    _knows_claims: bool = False  # whether an earlier snapshot had all claims

    def look(self, snapshot: Snapshot) -> None:
        """Take in the next snapshot."""
        there = claims_by_device(snapshot)
        claims: dict[_OnDevice, _FirstSight] = {}
        for device in snapshot.devices:
            known = self._lists.get(device.uuid)
            now = _listed(device, known, snapshot.clock)
            for claim in there[device.uuid] if there else ():
                on_device = lock_identity(claim, device.uuid, device.parent_uuid)
                sight = self._claims.get(on_device) or _FirstSight(self._came(claim, snapshot))
                if sight.there_first is None and now is not None:
                    # A process on the first list that shows the claim may have come before it, or with it.
                    older = {process for process in now.using if (process[1] or 0.0) < sight.clock}
                    sight = _FirstSight(sight.clock, frozenset(older | (known.using if known else set())))
                claims[on_device] = sight
            if now is not None:
                self._lists[device.uuid] = now
        if there is not None:
            # A claim that was another one meanwhile, or belonged to no known user, counts as new when it comes back.
            self._claims, self._knows_claims = claims, True

    def arrived(self, device: str, process: ProcessIdentity) -> float | None:
        """Return CLOCK_BOOTTIME of the first list of *device* (a uuid) with that process, after one without its pid.

        The process lived when the list without its pid was read, so that no other process has had the pid since, and it
        has stood on every believable list after it.  None if that is not proven: its pid was there before, it is
        younger than the last list without it, or its row could not be identified once.
        """
        known = self._lists.get(device)
        return known.arrived.get(process) if known else None

    def was_there_before(self, claim: ClaimRecord, device: Device, process: GpuProcess) -> bool:
        """Whether *process* used *device* before *claim* came, or may have; a claim that was not seen yet is newer."""
        sight = self._claims.get(lock_identity(claim, device.uuid, device.parent_uuid))
        there_first = sight.there_first if sight and process.start_time is not None else None
        return there_first is None or not there_first.isdisjoint(
            {(process.pid, process.start_time), (process.pid, None)}
        )

    def _came(self, claim: ClaimRecord, snapshot: Snapshot) -> float:
        """Return the latest clock at which *claim*, which is new in *snapshot*, can have come.

        In the very first snapshot, when every claim is new, that is the time that the claim itself gives.
        """
        if self._knows_claims or claim.since is None:
            return snapshot.clock
        # Rounded, because unix times have lost their last digits.
        return min(snapshot.clock, round(snapshot.clock - (snapshot.taken_at - claim.since), 3))


def _listed(device: Device, before: _KnownList | None, clock: float) -> _KnownList | None:
    """Return the list of *device* that was read at *clock*, or None if it cannot be believed."""
    if device.processes is None or not device.processes_plausible:
        return None
    arrived: dict[ProcessIdentity, float | None] = {}
    for process in device.processes:
        if process.start_time is not None:
            identity = process.pid, process.start_time
            # A younger process may have the pid of another one that came meanwhile, ended, and is still listed.
            lived = before is not None and process.start_time < before.clock - START_SLACK
            is_new = lived and before is not None and process.pid not in before.pids
            arrived[identity] = clock if is_new else before.arrived.get(identity) if before else None
    # A process is not blamed later for what could not be read of it now.
    using = frozenset(
        (process.pid, process.start_time)
        for process in device.processes
        if may_compute(process, device) or (process.memory_used is None and not process.ended)
    )
    pids = frozenset(process.pid for process in device.processes)
    return _KnownList(clock, pids, arrived, using)
