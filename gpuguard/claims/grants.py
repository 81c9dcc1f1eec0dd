"""Grants: lock files that the daemon alone gives to users, each of them only once.

A user who was given a locked descriptor can keep it after unlocking it, and lock it again at any time, past the queue
and any denial.  So each file is given away once: a grant is a *new* file, locked before it takes the place of the one
whose lock was free, and a file that was given away and is found free is replaced before anybody learns that it is free.
An old descriptor then belongs to a file without a name, and locks nothing that counts.

The file's content says to whom it was given, so that this is known after any crash; it counts only while the file is
locked.  This module does not decide which user gets what: see daemon.broker.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuguard.claims.directory import BROKERED, LockDirectory, is_same_file, open_lock, try_flock
from gpuguard.errors import GpuguardError, LockDirectoryError
from gpuguard.files import closed_after, write_file
from gpuguard.jsonio import decode, loads
from gpuguard.locale.messages import sentence
from gpuguard.model import ClaimRecord

_MAX_BYTES = 256
EARLIER = b"{}\n"  # marks a file that every user could open before


@dataclass(frozen=True)
class Grant:
    """The uid and the claim to which a lock was given.

    A share also has what was promised to it, and a part of a GPU has the uuid of that GPU, because the driver may no
    longer show the part while it is still claimed.
    """

    uid: int
    claim: str
    memory: int | None = None  # bytes of the device
    most: int | None = None  # the most claims that share the device with it
    parent: str | None = None  # uuid
    max_processes: int | None = None  # how many processes of other users the claim accepts

    def confirmed(self, record: ClaimRecord) -> ClaimRecord:
        """Return *record* with what was promised to the claim, whatever the record itself says."""
        record = replace(record, max_processes=self.max_processes or record.max_processes)
        return record if self.memory is None else replace(record, memory=self.memory, most=self.most)


def lock_for(directory: LockDirectory, name: str, to: Grant) -> int | None:
    """Return a descriptor for *to* that alone holds the lock, or None if the lock is taken.  The caller has the gate.

    Raises:
        LockDirectoryError: the lock file cannot be used.
    """
    before = open_lock(directory, name)
    try:
        if not try_flock(before) or not is_same_file(before, directory.lock_path(name)):
            return None
        content = {key: value for key, value in vars(to).items() if value is not None}
        return _renewed(directory, name, json.dumps(content).encode() + b"\n")
    except OSError as error:
        raise LockDirectoryError(
            sentence(
                "lock.not_anew",
                "{lock_path} cannot be made anew: {strerror}; the log of the daemon says why.",
                lock_path=directory.lock_path(name),
                strerror=str(error.strerror),
            )
        ) from error
    finally:
        os.close(before)


def grant_of(directory: LockDirectory, names: Iterable[str]) -> dict[str, Grant | None]:
    """Return the grant of each of *names* whose lock is held, or None where root has locked it or it is unknown.

    The caller has the gate.  Afterwards no process can use a descriptor that it kept to lock what is not named here.
    """
    grants: dict[str, Grant | None] = {}
    for name in names:
        if not os.path.lexists(directory.lock_path(name)):
            continue
        try:
            descriptor = open_lock(directory, name)
        except LockDirectoryError:
            grants[name] = None  # the file is not what it should be, so no user gets it
            continue
        with closed_after(descriptor):
            if not renew(directory, name, descriptor):
                grants[name] = _grant_in(descriptor)
    return grants


def renew(directory: LockDirectory, name: str, descriptor: int) -> bool:
    """Return whether the lock is surely free, after replacing a file that another process may still have open."""
    if not try_flock(descriptor) or not is_same_file(descriptor, directory.lock_path(name)):
        return False
    if os.fstat(descriptor).st_size:
        try:
            os.close(_renewed(directory, name, b""))
        except OSError:  # the disk may be full, and the lock must not be called free
            return False
    return True


def replace_file(directory: LockDirectory, name: str) -> None:
    """Put a new file in the place of one on which no claim rests, locked or not.

    Raises:
        OSError: the new file cannot be made.
    """
    if os.path.lexists(directory.lock_path(name)):
        os.close(_renewed(directory, name, b""))


def granted(directory: LockDirectory) -> dict[str, Grant | None] | None:
    """Ask the daemon for the grants of all locks that are held, as grant_of(), or return None if it does not answer."""
    try:
        from gpuguard.claims.daemon_client import exchange  # loads sockets, needed only where there is a broker

        answer, _ = exchange(directory, {"do": "claims"})
        names, rows = ("uid", "claim", "memory", "most", "parent", "max_processes"), answer["held"].items()
        return {name: None if row is None else decode(Grant, dict(zip(names, row, strict=False))) for name, row in rows}
    except (GpuguardError, AttributeError, KeyError, TypeError, ValueError):
        return None


def names_of(directory: LockDirectory) -> list[str]:
    """Return the names of all locks of devices."""
    return [name for name in os.listdir(directory.locks) if name not in ("gate", "queue") and not name.endswith(".new")]


def _renewed(directory: LockDirectory, name: str, content: bytes) -> int:
    """Replace a file whose lock the caller has; return the descriptor of the new one, read-only and locked."""
    held: list[int] = []

    def lock(written: int) -> None:
        # The descriptor that is given away is open for reading only, and only we can open the file again.
        held.append(os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC))
        fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)

    owner = directory.keeper if os.geteuid() == 0 else None
    try:
        write_file(directory.lock_path(name), content, mode=BROKERED, owner=owner, prepare=lock)
    except BaseException:
        for descriptor in held:
            os.close(descriptor)
        raise
    return held[0]


def _grant_in(descriptor: int) -> Grant | None:
    try:
        content = loads(os.pread(descriptor, _MAX_BYTES, 0))
        return decode(Grant, content)
    except (OSError, ValueError):
        return None
