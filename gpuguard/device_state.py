"""Who uses what: each device of a snapshot with its state, its claims and its processes, and the totals per user.

Which claim a process belongs to is told by attribution; nothing is decided by it here.  Does not read anything: /proc
comes in as `Seen`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuguard.model import ClaimRecord, Device, GpuProcess, ProcessStat, Snapshot
from gpuguard.request import computes, idle_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Whose a process is: the claim that it belongs to.
#
# A process belongs to the claim on the same device whose lock it holds; else to the one that an ancestor of it holds
# or made (a child started with close_fds does not inherit the lock); else to the claim of the same user; else, when
# it is root's (a container) or nobody's that we may know, to the only claim there.  The last two are guesses, in
# favour of the process.  A record says what its owner likes: the pid in it counts only where the holders cannot be
# seen, and never for a process of somebody else; and an id alone is no claim, since others may have copied it.  Does
# not read anything: /proc comes in as `Seen`.


_NONE = {None}

if TYPE_CHECKING:
    # pids that were looked up: None is "there is no such process", an absent one could not be told.
    Processes = Mapping[int, ProcessStat | None]
else:
    Processes = object


def claims_readable(snapshot: Snapshot) -> bool:
    """Whether the claims of *snapshot* are all there; without that, no claim means nothing."""
    return not any(gap.device is None and gap.field == "claims" for gap in snapshot.gaps)


def claims_on(snapshot: Snapshot, device: Device) -> tuple[ClaimRecord, ...]:
    """The living claims that name *device*, or the device that it is a part of; hidden ones are none."""
    uuid, parent = device.uuid, device.parent_uuid
    claims = snapshot.claims
    return tuple(
        [one for one in claims if one.alive and not one.hidden and (uuid in one.devices or parent in one.devices)]
    )


def places(snapshot: Snapshot) -> tuple[Device, ...]:
    """The devices on which somebody can compute: not those that are divided into instances, which stand for them."""
    divided = {device.parent_uuid for device in snapshot.devices}
    if divided == _NONE:  # as on most machines, of which every rule asks it
        return snapshot.devices
    return tuple([device for device in snapshot.devices if device.uuid not in divided])


def claim_of(process: GpuProcess, here: Sequence[ClaimRecord], seen: Processes) -> ClaimRecord | None:
    """The claim, of those *here*, that *process* belongs to; None: to none."""
    if not here:
        return None
    if record := started_by(process, here, seen):
        return record
    if process.uid:
        return next((record for record in here if process.uid == record.uid), None)
    return here[0] if len(here) == 1 else None


def started_by(process: GpuProcess, here: Sequence[ClaimRecord], seen: Processes) -> ClaimRecord | None:
    """The claim, of those *here*, whose lock the process or an ancestor of it holds, or whose maker that is."""
    for pid in _line_of(process.pid, seen):
        for record in here:
            if pid in record.holders or (pid == record.pid and _may_have_made(record, pid, process, seen)):
                return record
    return None


def _may_have_made(record: ClaimRecord, pid: int, process: GpuProcess, seen: Processes) -> bool:
    if record.holders:
        return False  # who made it is one of them, or has ended; in a container its pid is another one
    there = seen.get(pid)
    uid = process.uid if pid == process.pid else there.uid if there else None
    return uid is None or uid == record.uid


def _line_of(pid: int, seen: Processes) -> Iterator[int]:
    """*pid*, its parent, its grandparent, ... as far as they were looked up."""
    passed: set[int] = set()
    while pid > 1 and pid not in passed:
        passed.add(pid)
        yield pid
        process = seen.get(pid)
        pid = process.parent if process else 0


FREE, CLAIMED, IN_USE, IDLE = "free", "claimed", "in_use", "idle"
UNCLAIMED_USE, UNHEALTHY, UNKNOWN = "unclaimed_use", "unhealthy", "unknown"
# A divided (MIG) device is what the most remarkable of its instances is.
STATES = (UNHEALTHY, UNCLAIMED_USE, IN_USE, IDLE, CLAIMED, UNKNOWN, FREE)

IDLE_BELOW = 1.0  # percent, mean of the driver's sample buffer


@dataclass(frozen=True)
class QueuedRequest:
    """Somebody who waits for devices."""

    user: str
    pid: int | None
    num_gpus: int
    since: float | None = None  # unix time
    note: str | None = None
    command: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ClaimUse:
    """A claim on one device."""

    record: ClaimRecord
    idle: bool | None  # its processes do no work there
    orphaned: bool | None  # the job lives, the wrapper that supervised it does not
    stopped: bool | None  # the job is stopped (Ctrl-Z) and still holds the device

    @property
    def user(self) -> str | None:
        """Whose it is; None for a lock that somebody holds without having left a record."""
        return self.record.user if self.record.uid >= 0 else None


@dataclass(frozen=True)
class ProcessUse:
    """A process on one device."""

    process: GpuProcess
    claim: str | None  # id; None: used without a claim
    stopped: bool | None


@dataclass(frozen=True)
class DeviceUse:
    """A device and what goes on there."""

    device: Device
    state: str
    reason: str | None  # of unhealthy, unknown and of use that no process accounts for
    claims: tuple[ClaimUse, ...]
    processes: tuple[ProcessUse, ...] | None  # None: the driver gives no list


@dataclass(frozen=True)
class UserTotal:
    """What one user has on the whole machine."""

    user: str | None  # None: processes whose owner cannot be seen
    devices: int  # with processes of the user
    processes: int
    memory_used: int | None  # bytes
    claimed: int  # devices
    idle: int  # claimed devices on which nothing works


def uses(snapshot: Snapshot, seen: Processes | None = None) -> tuple[DeviceUse, ...]:
    """Each device of *snapshot* with its state, claims and processes, in the order of the snapshot."""
    readable = claims_readable(snapshot)
    on: dict[str, list[ClaimRecord]] = {}
    for record in snapshot.claims:
        for uuid in set(record.devices if record.alive else ()):
            on.setdefault(uuid, []).append(record)
    found = []
    for device in snapshot.devices:
        here = tuple(on.get(device.uuid, ()))
        processes = _processes_on(device, here, seen or {})
        state, reason = _state(device, bool(here), processes, readable)
        held = tuple(_claim_use(record, state, snapshot, seen or {}) for record in here)
        found.append(DeviceUse(device, state, reason, held, processes))
    return tuple(_divided(use, found) if use.device.mig_mode and not use.device.parent_uuid else use for use in found)


def user_totals(found: tuple[DeviceUse, ...]) -> tuple[UserTotal, ...]:
    """One row per user, the one with the most devices first.  A memory sum with an unknown part is unknown."""
    memory: dict[str | None, dict[tuple[int, str], int | None]] = {}  # of a pid on a device
    claimed: dict[str | None, set[str]] = {}
    idle: dict[str | None, set[str]] = {}
    for use in found:
        uuid = use.device.uuid
        for held in use.claims:
            claimed.setdefault(held.user, set()).add(uuid)
            if held.idle:
                idle.setdefault(held.user, set()).add(uuid)
        for running in use.processes or ():
            process = running.process
            if process.user not in memory:
                memory[process.user] = {}
            memory[process.user][process.pid, uuid] = process.memory_used
    rows = []
    for user in {*memory, *claimed}:
        used = memory.get(user, {})
        known = [bytes_used for bytes_used in used.values() if bytes_used is not None]
        rows.append(
            UserTotal(
                user,
                devices=len({uuid for _, uuid in used}),
                processes=len({pid for pid, _ in used}),
                memory_used=sum(known) if len(known) == len(used) else None,
                claimed=len(claimed.get(user, ())),
                idle=len(idle.get(user, ())),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.devices, -row.claimed, row.user is None, row.user or "")))


def chosen(found: tuple[DeviceUse, ...], users: frozenset[str], devices: frozenset[str]) -> tuple[DeviceUse, ...]:
    """Only what belongs to *users* (names) on *devices* (uuids); an empty set stands for all."""
    kept = tuple(use for use in found if not devices or use.device.uuid in devices)
    if not users:
        return kept
    own = []
    for use in kept:
        claims = tuple(held for held in use.claims if held.user in users)
        processes = tuple(running for running in use.processes or () if running.process.user in users)
        if claims or processes:
            own.append(replace(use, claims=claims, processes=processes))
    return tuple(own)


def _processes_on(device: Device, here: tuple[ClaimRecord, ...], seen: Processes) -> tuple[ProcessUse, ...] | None:
    if device.processes is None:
        return None
    # The owner and the ancestors of a pid from another namespace are those of some other process.
    owners = here if device.processes_plausible else ()
    found = []
    for process in device.processes:
        claim = claim_of(process, owners, seen) if owners else None
        one = seen.get(process.pid)
        found.append(ProcessUse(process, claim.id if claim else None, one.state in "Tt" if one else None))
    return tuple(found)


def _claim_use(record: ClaimRecord, state: str, snapshot: Snapshot, seen: Processes) -> ClaimUse:
    idle = {IDLE: True, CLAIMED: True, UNCLAIMED_USE: True, IN_USE: False}.get(state)
    job = [pid for pid in record.holders if pid != record.pid]
    stopped = _stopped(job or ([] if record.pid is None else [record.pid]), seen)
    return ClaimUse(record, idle, _orphaned(record, snapshot, seen), stopped)


def _state(
    device: Device, claimed: bool, processes: tuple[ProcessUse, ...] | None, readable: bool
) -> tuple[str, str | None]:
    if device.problems:
        return UNHEALTHY, ", ".join(device.problems)
    if device.compute_mode == "prohibited":
        return UNHEALTHY, "its compute mode is 'prohibited'"
    if not readable:
        return UNKNOWN, "the claims cannot be read"
    listed = processes or () if device.processes_plausible else ()
    if not any(computes(one.process) for one in listed):
        hidden = _hidden_use(device)
        if hidden is None:
            return UNKNOWN, "no process list" if processes is None else "the process list makes no sense"
        if not hidden:
            return (CLAIMED if claimed else FREE), None
        if not claimed:
            return UNCLAIMED_USE, "memory is in use, by processes that are not listed"
    elif not claimed or not any(one.claim is not None and computes(one.process) for one in listed):
        return UNCLAIMED_USE, None
    idle = device.utilization is not None and device.utilization < IDLE_BELOW
    return (IDLE if idle else IN_USE), None


def _hidden_use(device: Device) -> bool | None:
    """Whether memory tells of processes that the list does not; None when nothing can be told."""
    if device.memory_used is not None:
        desktop = sum(one.memory_used or 0 for one in device.processes or () if not computes(one))
        if device.memory_used - desktop > idle_limit(device):
            return True
    if device.processes is None or (device.processes and not device.processes_plausible):
        return None
    return False


def _divided(use: DeviceUse, found: list[DeviceUse]) -> DeviceUse:
    """A device in MIG mode: nobody runs on it but on its instances."""
    instances = [other for other in found if other.device.parent_uuid == use.device.uuid]
    if use.state == UNHEALTHY:
        return use
    if not instances:
        return replace(use, state=UNHEALTHY, reason="divided (MIG), and without an instance")
    elsewhere = {running.process.pid for other in instances for running in other.processes or ()}
    own = tuple(running for running in use.processes or () if running.process.pid not in elsewhere)
    state = min((other.state for other in instances), key=STATES.index)
    return replace(use, state=state, reason=None, processes=own)


def _orphaned(record: ClaimRecord, snapshot: Snapshot, seen: Processes) -> bool | None:
    if record.pid is None:
        return None
    if record.holders and record.pid not in record.holders:
        # The record of a job in a container names the pid that its wrapper has in there.
        holders = [seen.get(pid) for pid in record.holders]
        return not any(holder and holder.inner_pid == record.pid for holder in holders)
    if record.pid not in seen:
        return None
    wrapper = seen[record.pid]
    if wrapper is None or wrapper.state == "Z":
        return True
    if record.since is None or wrapper.start_time is None:
        return False
    # Somebody else's holders cannot be seen, and the pid may be another process by now.  2 s: clocks are adjusted.
    born = snapshot.taken_at - snapshot.clock + wrapper.start_time
    return born > record.since + 2


def _stopped(pids: list[int], seen: Processes) -> bool | None:
    processes = [process for process in map(seen.get, pids) if process]
    return all(process.state in "Tt" for process in processes) if processes else None
