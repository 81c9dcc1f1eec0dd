"""Joining a device that others share: the locks, what is promised already, and the check that nobody is quicker.

The memory of a device is promised by records, which no lock can count.  So a share takes its locks, writes its record
and only then adds up what all that are there promise: of two that come at the same moment, the one whose record is
written last sees the other.  The gate only keeps both of them from going back for nothing.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.claims.claim import Claim, Lock, lock_device, unlock
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import probe_in_gate
from gpuguard.claims.slots import locked_slots, slot_names
from gpuguard.eligibility import no_share_left, terms_of
from gpuguard.model import ClaimRecord, Device, Snapshot
from gpuguard.request import Request
from gpuguard.sharing import Sharing, is_share_of, sharing_on

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

# Seconds, each time a random part of it: only who is without the gate needs them.
_PAUSES = (0.01, 0.02, 0.04)


def sharing_of(snapshot: Snapshot, claims: Sequence[ClaimRecord]) -> dict[str, Sharing]:
    """uuid -> who shares the device, for each device of *snapshot* that is shared by one of *claims*."""
    shares = [record for record in claims if record.slots]
    if not shares:
        return {}
    found = {}
    for device in snapshot.devices:
        here = tuple(record for record in shares if is_share_of(record, device.uuid))
        if here:
            found[device.uuid] = sharing_on(device, here, _owners(replace(snapshot, devices=(device,), claims=here)))
    return found


def _owners(snapshot: Snapshot) -> dict[int, int]:
    """pid -> uid of the share that it surely belongs to, on the one device of *snapshot*.

    A process belongs to its user's share.  Root's may be a container of anybody: it needs an ancestor with a share.
    """
    uids = {record.uid for record in snapshot.claims}
    processes = snapshot.devices[0].processes or ()
    owners = {process.pid: process.uid for process in processes if process.uid and process.uid in uids}
    if len(owners) < len(processes):
        from gpuguard.device_state import started_by
        from gpuguard.procfs import process_facts

        seen = process_facts(snapshot)
        for process in processes:
            if process.pid not in owners and (record := started_by(process, snapshot.claims, seen)):
                owners[process.pid] = record.uid
    return owners


def sharing_now(directory: LockDirectory, held: Mapping[str, Sequence[Lock]], snapshot: Snapshot) -> dict[str, Sharing]:
    """Who shares which device at this moment, without the locks *held* here; the caller has the gate."""
    uuids = [device.uuid for device in snapshot.devices]
    own = {lock.path[len(directory.lock_path("")) :] for locks in held.values() for lock in locks}
    sharing = sharing_of(snapshot, _without(probe_in_gate(directory, uuids), own))
    if any(_is_puzzling(device, sharing) for device in snapshot.devices):
        sharing = sharing_of(snapshot, _without(probe_in_gate(directory, uuids, holders=True), own))
    return sharing


def _is_puzzling(device: Device, sharing: Mapping[str, Sharing]) -> bool:
    """Whether a process may belong to a share as one of those that hold its locks: they are asked only then."""
    here = sharing.get(device.uuid)
    return here is not None and not all(here.belongs(process.pid) for process in device.processes or ())


def join(directory: LockDirectory, snapshot: Snapshot, request: Request, claim: Claim, taken: dict[str, str]) -> bool:
    """Say that *claim* shares its devices, then look whether there is room for it; else it is given back.

    Fills *taken* with the devices on which there is none.  Of several that meet and are too many together all go back;
    so they try again, each after another pause.
    """
    pauses = iter(_PAUSES)
    try:
        while True:
            claim.explain(directory, None, ())
            late = _over_capacity(directory, snapshot, request, claim)
            pause = next(pauses, None)
            if not late or pause is None:
                break
            claim.withdraw()
            time.sleep(pause * os.urandom(1)[0] / 255)
    except BaseException:
        claim.release()
        raise
    if late:
        claim.release()
        taken.update(late)
    return not late


def _over_capacity(directory: LockDirectory, snapshot: Snapshot, request: Request, claim: Claim) -> dict[str, str]:
    """uuid -> why, for each device of *claim* on which the shares, with its own, are more than there is.

    Its own record must have been written before.  Nothing that others write about our own slots counts.
    """
    own = set(claim.slots(directory))
    found = probe_in_gate(directory, [device.uuid for device in claim])
    others = _without((record for record in found if (record.uid, record.id) != (os.geteuid(), claim.id)), own)
    terms = terms_of(snapshot, request, {}, sharing_of(snapshot, others))
    reasons = {device.uuid: [reason.text for reason in no_share_left(device, terms)] for device in claim}
    return {uuid: "; ".join(texts) for uuid, texts in reasons.items() if texts}


def _without(claims: Iterable[ClaimRecord], slots: Collection[str]) -> tuple[ClaimRecord, ...]:
    return tuple(replace(one, slots=tuple(slot for slot in one.slots if slot not in slots)) for one in claims)


# The locks of one device, of a part of it, or of a share of it: all of them or none, at once or not at all.
#
#     a device              its lock alone
#     a MIG instance        its lock alone, that of its GPU shared
#     a share of either     its lock shared, and a slot of it alone
#     inside a claim        a lock for what is inside of it, which the outer claim's owner alone asks for
#
# Does not choose devices: see lock.


def lock_parts(
    directory: LockDirectory, device: Device, request: Request, outer: ClaimRecord | None
) -> tuple[Lock, ...] | None:
    """The locks of *device* for *request*; None, and nothing locked, when somebody else has one of them.

    Args:
        directory: of the locks.
        device: a GPU or a MIG instance.
        request: for a share of it or for all of it.
        outer: the claim inside which this process runs.

    Raises:
        LockDirectoryError: a lock file cannot be used.
    """
    if outer:
        return _lock_inside(directory, device, request, outer)
    wanted = [(device.uuid, fcntl.LOCK_SH if request.share else fcntl.LOCK_EX)]
    if device.parent_uuid:
        wanted.append((device.parent_uuid, fcntl.LOCK_SH))
    locks: list[Lock] = []
    try:
        for name, operation in wanted:
            if (lock := lock_device(directory, name, operation)) is None:
                unlock(locks)
                return None
            locks.append(lock)
        if request.share:
            locks += _lock_slot(directory, device.uuid, request.slots)
        # A share of the whole GPU holds the lock of the parent shared too.  One that takes its slot after this look
        # sees the instance, because it reads the device once more behind its locks, and a divided one is refused.
        shared_whole = device.parent_uuid and locked_slots(directory, device.parent_uuid)
        # Shares that a daemon has given hold their slots alone: see giving.
        kept = directory.keeper is not None and not request.share and locked_slots(directory, device.uuid)
        if shared_whole or kept or len(locks) < len(wanted) + request.share:
            unlock(locks)
            return None
    except BaseException:
        unlock(locks)
        raise
    return tuple(locks)


def _lock_slot(directory: LockDirectory, uuid: str, most: int) -> list[Lock]:
    """One of the first *most* slots; while fewer share the device, one of these is free."""
    for name in slot_names(uuid)[:most]:
        if slot := lock_device(directory, name, fcntl.LOCK_EX):
            return [slot]
    return []


def _lock_inside(
    directory: LockDirectory, device: Device, request: Request, outer: ClaimRecord
) -> tuple[Lock, ...] | None:
    """The outer claim holds the device; this one excludes only its siblings in there.  Deeper ones share."""
    # Several shares of one device would have one lock for what is inside them: what is in a share excludes nobody.
    if "." in outer.id or outer.memory is not None:
        return ()
    lock = lock_device(directory, f"{device.uuid}.nested", fcntl.LOCK_SH if request.share else fcntl.LOCK_EX)
    return None if lock is None else (lock,)
