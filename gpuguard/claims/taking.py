"""The locks of one device, of a part of it, or of a share of it: all of them or none, at once or not at all.

    a device              its lock alone
    a MIG instance        its lock alone, that of its GPU shared
    a share of either     its lock shared, and a slot of it alone
    inside a claim        a lock for what is inside of it, which the outer claim's owner alone asks for

Does not choose devices: see lock.
"""

from __future__ import annotations

import fcntl

from gpuguard.claims.hold import Lock, take_lock, unlock
from gpuguard.claims.lockfiles import LockDirectory
from gpuguard.claims.slots import locked_slots, slot_names
from gpuguard.model import ClaimRecord, Device
from gpuguard.request import Request


def take(
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
        return _take_inside(directory, device, request, outer)
    wanted = [(device.uuid, fcntl.LOCK_SH if request.share else fcntl.LOCK_EX)]
    if device.parent_uuid:
        wanted.append((device.parent_uuid, fcntl.LOCK_SH))
    locks: list[Lock] = []
    try:
        for name, operation in wanted:
            if (lock := take_lock(directory, name, operation)) is None:
                unlock(locks)
                return None
            locks.append(lock)
        if request.share:
            locks += _take_slot(directory, device.uuid, request.slots)
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


def _take_slot(directory: LockDirectory, uuid: str, most: int) -> list[Lock]:
    """One of the first *most* slots; while fewer share the device, one of these is free."""
    for name in slot_names(uuid)[:most]:
        if slot := take_lock(directory, name, fcntl.LOCK_EX):
            return [slot]
    return []


def _take_inside(
    directory: LockDirectory, device: Device, request: Request, outer: ClaimRecord
) -> tuple[Lock, ...] | None:
    """The outer claim holds the device; this one excludes only its siblings in there.  Deeper ones share."""
    # Several shares of one device would have one lock for what is inside them: what is in a share excludes nobody.
    if "." in outer.id or outer.memory is not None:
        return ()
    lock = take_lock(directory, f"{device.uuid}.nested", fcntl.LOCK_SH if request.share else fcntl.LOCK_EX)
    return None if lock is None else (lock,)
