"""Whose a process is: the claim that it belongs to.

A process belongs to the claim on the same device whose lock it holds; else to the one that an ancestor of it holds or
made (a child started with close_fds does not inherit the lock); else to the claim of the same user; else, when it is
root's (a container) or nobody's that we may know, to the only claim there.  The last two are guesses, in favour of the
process.  A record says what its owner likes: the pid in it counts only where the holders cannot be seen, and never for
a process of somebody else; and an id alone is no claim, since others may have copied it.  Does not read anything: /proc
comes in as `Seen`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuguard.model import ClaimRecord, Device, GpuProcess, Seen, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_NONE = {None}

if TYPE_CHECKING:
    # pids that were looked up: None is "there is no such process", an absent one could not be told.
    Processes = Mapping[int, Seen | None]
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
