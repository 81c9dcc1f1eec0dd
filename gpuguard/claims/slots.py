"""The slots of a device: so many lock files beside its own, each held by one of the claims that share it.

A share holds the lock of the device LOCK_SH, so that it excludes an exclusive claim and the other way round, and one
slot LOCK_EX, so that the kernel bounds their number and anybody can count them.  How much memory a share is good for
stands in its record: see records.
"""

from __future__ import annotations

import fcntl
import os

from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.errors import LockDirectoryError
from gpuguard.files import exists_in_place
from gpuguard.request import SLOTS


def slot_names(uuid: str) -> tuple[str, ...]:
    """The names of the lock files of a device's slots."""
    return tuple(f"{uuid}.slot{number}" for number in range(SLOTS))


def locked_slots(directory: LockDirectory, uuid: str) -> tuple[str, ...]:
    """The slots of a device that somebody holds now; without the gate, so ask for it first where it matters."""
    # The sticky directory has no files for the slots until somebody shares the device, and the first is taken first.
    if not exists_in_place(directory.lock_path(f"{uuid}.slot0")):
        return ()
    return tuple(name for name in slot_names(uuid) if _is_locked(directory, name))


def _is_locked(directory: LockDirectory, name: str) -> bool:
    if not exists_in_place(directory.lock_path(name)):
        return False
    try:
        descriptor = open_lock(directory, name)
    except LockDirectoryError:
        return True  # planted: nobody can say what it hides until root has looked at it
    try:
        if directory.keeper is None:
            return not try_flock(descriptor, fcntl.LOCK_SH)
        # Given by the daemon: it may be shared, or kept, by whoever had it alone.
        from gpuguard.claims.grants import renew

        return not renew(directory, name, descriptor)
    finally:
        os.close(descriptor)
