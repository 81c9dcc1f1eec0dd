"""Grants: lock files that the daemon alone gives to users, each of them once.

A user who was given a locked descriptor can keep it after unlocking it, and lock it again at any time, past the queue
and any denial.  So each file is given away once: a grant is a *new* file, locked before it takes the place of the one
whose lock was free, and a file that was given away and is found free is replaced before anybody learns that it is.  An
old descriptor is then one of a file without a name, and locks nothing that counts.

What stands in the file says to whom it was given, so that this is known after any crash; it counts only while the file
is locked.  Does not decide who gets what: see daemon.broker.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuguard.claims.directory import BROKERED, LockDirectory, is_same_file, open_lock, try_flock
from gpuguard.errors import GpuguardError, LockDirectoryError
from gpuguard.files import write_file
from gpuguard.jsonio import decode, loads
from gpuguard.locale import _
from gpuguard.model import ClaimRecord

_MAX_BYTES = 256
EARLIER = b"{}\n"  # in a file that every user could open before


@dataclass(frozen=True)
class Grant:
    """To whom a lock was given: a uid, and the id of the claim.

    Of a share also what was promised to it, and of a part of a GPU which GPU that is: its driver may not show it any
    more while it is still claimed.
    """

    uid: int
    claim: str
    memory: int | None = None  # bytes of the device
    most: int | None = None  # so many claims at most share the device with it
    parent: str | None = None  # uuid
    max_processes: int | None = None  # how many processes of other users the claim accepts

    def confirmed(self, record: ClaimRecord) -> ClaimRecord:
        """*record* with what was promised to the claim, whatever it says itself."""
        record = replace(record, max_processes=self.max_processes or record.max_processes)
        return record if self.memory is None else replace(record, memory=self.memory, most=self.most)


def lock_for(directory: LockDirectory, name: str, to: Grant) -> int | None:
    """A locked descriptor for *to*, which is all that holds the lock; None: it is locked.  The caller has the gate.

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
            _("{lock_path} cannot be made anew: {strerror}; the log of the daemon says why.").format(
                lock_path=directory.lock_path(name), strerror=error.strerror
            )
        ) from error
    finally:
        os.close(before)


def grant_of(directory: LockDirectory, names: Iterable[str]) -> dict[str, Grant | None]:
    """Those of *names* whose lock is held, and to whom it was given; None: locked by root, or unknown.

    The caller has the gate.  After that no process can lock what is not named here with a descriptor that was kept.
    """
    grants: dict[str, Grant | None] = {}
    for name in names:
        if not os.path.lexists(directory.lock_path(name)):
            continue
        try:
            descriptor = open_lock(directory, name)
        except LockDirectoryError:
            grants[name] = None  # it is not what it should be: no user gets it
            continue
        try:
            if not renew(directory, name, descriptor):
                grants[name] = _grant_in(descriptor)
        finally:
            os.close(descriptor)
    return grants


def renew(directory: LockDirectory, name: str, descriptor: int) -> bool:
    """Whether the lock is free for sure: a file that another process may have open is replaced by a new one."""
    if not try_flock(descriptor) or not is_same_file(descriptor, directory.lock_path(name)):
        return False
    if os.fstat(descriptor).st_size:
        try:
            os.close(_renewed(directory, name, b""))
        except OSError:  # a full disk: it must not be called free
            return False
    return True


def replace_file(directory: LockDirectory, name: str) -> None:
    """Put a new file in the place of one, locked or not; for those that no claim rests on.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.lexists(directory.lock_path(name)):
        os.close(_renewed(directory, name, b""))


def granted(directory: LockDirectory) -> dict[str, Grant | None] | None:
    """As grant_of(), for all locks that are held, by the word of the daemon; None: it does not answer."""
    try:
        from gpuguard.daemon.client import exchange  # sockets: where a broker is, and not before each job

        answer, _ = exchange(directory, {"do": "claims"})
        names, rows = ("uid", "claim", "memory", "most", "parent", "max_processes"), answer["held"].items()
        return {name: None if row is None else decode(Grant, dict(zip(names, row, strict=False))) for name, row in rows}
    except (GpuguardError, AttributeError, KeyError, TypeError, ValueError):
        return None


def names_of(directory: LockDirectory) -> list[str]:
    """The names of all locks of devices."""
    return [name for name in os.listdir(directory.locks) if name not in ("gate", "queue") and not name.endswith(".new")]


def _renewed(directory: LockDirectory, name: str, content: bytes) -> int:
    """A new file in the place of one whose lock the caller has; its descriptor, read-only and locked."""
    held: list[int] = []

    def lock(written: int) -> None:
        # What is given away is open for reading alone, and only we can open the file again.
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
