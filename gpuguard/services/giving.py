"""All the locks of one claim or none of them, where the daemon gives them: of devices, of parts of them, of shares.

    a device, a MIG instance    its lock
    a share of either           one of its slots, in which stands what was promised to it

No lock is held shared here: whoever was given one could hold it past his claim, and nobody could renew the file.  So
the daemon keeps apart what excludes each other, by the locks that it has given and what stands in them: it is the only
one who can open the files.  A lock is taken first and everything else looked at then; root takes locks himself in the
same order, so one of the two sees the other.  Does not decide whose turn it is: see broker.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from dataclasses import replace as replace_noun

from gpuguard.claims.grants import Grant, give, look, names_of, replace_file
from gpuguard.claims.lockfiles import Gate, LockDirectory, open_lock, try_flock
from gpuguard.claims.records import probe_in_gate
from gpuguard.claims.shares import sharing_of
from gpuguard.claims.slots import slot_names
from gpuguard.errors import LockDirectoryError
from gpuguard.model import Snapshot
from gpuguard.sharing import Sharing

BY_SOMEBODY = "claimed by somebody just now"
IN_PART = "a part of the device, or the whole of it, is claimed"


def give_all(
    directory: LockDirectory, snapshot: Snapshot, names: Sequence[str], to: Grant, descriptors: list[int]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the locks of the devices *names*, or uuid -> why not.

    Args:
        directory: of the locks.
        snapshot: says which device is a part of which.
        names: uuids.
        to: whose they become; with memory they are shares.
        descriptors: filled with the locked ones; the caller closes them, also when it was refused.
    """
    given: list[str] = []
    with Gate(directory):
        for name in names:
            own = replace(to, parent=_parent(snapshot, name, None))
            lock = (
                _give_slot(directory, name, own, descriptors) if to.memory else _give(directory, name, own, descriptors)
            )
            if lock is None:
                return (), {name: "it has no slot left" if to.memory else BY_SOMEBODY}
            given.append(lock)
        refused = conflicts(directory, snapshot, names, given, shared=to.memory is not None)
        if not refused and to.memory is None:
            for name in names:
                # What an earlier owner's jobs have locked inside of it must not stand in this one's way.
                replace_file(directory, f"{name}.nested")
    return tuple(given), refused


def conflicts(
    directory: LockDirectory, snapshot: Snapshot | None, names: Sequence[str], own: Collection[str], *, shared: bool
) -> dict[str, str]:
    """uuid -> why it cannot be had, of the devices *names*, by the locks of others; the caller has the gate.

    Args:
        directory: of the locks.
        snapshot: says which device is a part of which; None when that does not matter yet.
        names: uuids.
        own: names of locks that are not others'.
        shared: whether shares of them are wanted.
    """
    held = look(directory, [name for name in names_of(directory) if name not in own and not name.endswith(".nested")])
    found: dict[str, str] = {}
    for lock, grant in held.items():
        uuid = lock.partition(".slot")[0]
        is_slot = lock != uuid
        for name in names:
            if uuid == name and not (is_slot and shared):
                found[name] = "shared by others just now" if is_slot else BY_SOMEBODY
                continue
            is_part = snapshot and _parent(snapshot, uuid, grant) == name
            is_whole = snapshot and _parent(snapshot, name, None) == uuid
            if is_part or (is_whole and (is_slot or grant or _is_alone(directory, uuid))):
                found[name] = IN_PART
    return found


def sharing_beside(
    directory: LockDirectory, snapshot: Snapshot, names: Sequence[str], own: Collection[str]
) -> dict[str, Sharing]:
    """uuid -> who else shares the device, by what was given to them; *own* slots do not count."""
    devices = tuple(device for device in snapshot.devices if device.uuid in names)
    here, found = replace_noun(snapshot, devices=devices, claims=()), dict[str, Sharing]()
    for holders in (False, True):  # all of /proc only where a process is nobody's without it
        with Gate(directory):
            records = probe_in_gate(directory, names, holders=holders)
        # What a record says of its own processes is anybody's word.
        claims = [
            replace_noun(one, pid=None, slots=tuple(slot for slot in one.slots if slot not in own)) for one in records
        ]
        found = sharing_of(here, claims)
        if all(
            found[each.uuid].belongs(one.pid) for each in devices if each.uuid in found for one in each.processes or ()
        ):
            break
    return found


def _give(directory: LockDirectory, name: str, to: Grant, descriptors: list[int]) -> str | None:
    descriptor = give(directory, name, to)
    if descriptor is None:
        return None
    descriptors.append(descriptor)
    return name


def _give_slot(directory: LockDirectory, name: str, to: Grant, descriptors: list[int]) -> str | None:
    return next((slot for slot in slot_names(name) if _give(directory, slot, to, descriptors)), None)


def _parent(snapshot: Snapshot, name: str, grant: Grant | None) -> str | None:
    """The GPU of which it is a part, as the driver shows it or did when it was given."""
    device = snapshot.device(name)
    return device.parent_uuid if device else grant.parent if grant else None


def _is_alone(directory: LockDirectory, name: str) -> bool:
    """Whether root, who took it himself, has all of the device, not a part of it."""
    try:
        descriptor = open_lock(directory, name)
    except LockDirectoryError:
        return True
    try:
        return not try_flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
