"""Giving up the locks of a claim whose job lives on, from outside: no signal, and nothing broken by age or by pid.

A lock belongs to an open file, which every process of the job shares.  pidfd_getfd(2) lends us that very file, to those
whom the kernel lets look into the process: its owner (unless Yama forbids it) and CAP_SYS_PTRACE.  Unlocking it there
frees the device for all of them at once.  The decision is written behind the record first (see wishes), so that a claim
which was given up is not taken again, and whoever comes after a killed releaser finishes what he began.
Does not decide whether a claim may be released: see vacancy, and the command release.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from gpuguard.attribution import Processes, claim_of, computes
from gpuguard.backends.processes import uid_behind
from gpuguard.claims.lockfiles import LockDirectory, is_same_file
from gpuguard.claims.records import descriptors_of, record_path
from gpuguard.claims.wishes import Letter, write
from gpuguard.errors import ClaimError
from gpuguard.model import ClaimRecord, GpuProcess, Snapshot

MOST_LOCKS = 256  # of one claim: a record says what its owner likes
SEARCH_SECONDS = 2.0  # among the owner's processes, of which he can have any number
LEND_SECONDS = 2.0  # for a file to be looked at

_PIDFD_GETFD = 438  # the same number on every architecture: include/uapi/asm-generic/unistd.h
_LIBRARY: list[object] = []
_held_up: dict[int, threading.Thread] = {}  # uid -> who still waits for a file of that user


class NotPermitted(ClaimError):
    """The kernel does not let this user look into the processes of the claim."""


@dataclass(frozen=True)
class Grip:
    """The open files of a claim, lent by its holders; nothing is changed yet.

    Args:
        record: the descriptor of its record.
        path: of the record.
        locks: descriptors of its lock files.
        holder: pid of the process that lent the record.
        pidfd: of that process.
    """

    record: int
    path: str
    locks: tuple[int, ...]
    holder: int
    pidfd: int


@contextmanager
def gripped(directory: LockDirectory, claim: ClaimRecord) -> Iterator[Grip]:
    """Borrow the open files of a living claim.

    Raises:
        NotPermitted: the kernel does not let us.
        ClaimError: they cannot be found.
    """
    path = record_path(directory, claim.uid, claim.id)
    wanted = descriptors_of(directory, claim.uid, claim.id)
    if wanted is None or len(wanted) > MOST_LOCKS:
        raise ClaimError(
            f"the claim {claim.id} has ended, or it does not say what it holds: end its processes instead."
        )
    borrowed: list[int] = []
    try:
        yield _borrow(directory, claim, path, frozenset(wanted), borrowed)
    finally:
        for descriptor in borrowed:
            os.close(descriptor)


def let_go(grip: Grip, letter: Letter) -> None:
    """Give the claim up for good; the order matters.

    Raises:
        OSError: the decision could not be written down, so nothing was done.
    """
    write(grip.record, letter)
    for descriptor in grip.locks:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with suppress(OSError):  # only its owner and root may; a record that is not locked counts for nothing
        if is_same_file(grip.record, grip.path):
            os.unlink(grip.path)
    fcntl.flock(grip.record, fcntl.LOCK_UN)


def listens(pid: int) -> bool:
    """Whether that process waits for SIGURG, as `gpuguard run` does: it looks at its claim then, and tells its user."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (signal.SIGURG - 1) & 1)


def users_of(claim: ClaimRecord, snapshot: Snapshot, seen: Processes) -> tuple[tuple[GpuProcess, ...], str | None]:
    """Who computes under *claim*, and why that cannot be told (None: it can).

    Whose process it is counts as the claim's as soon as nobody can tell otherwise.
    """
    found: dict[int, GpuProcess] = {}
    for uuid in claim.devices:
        places = [device for device in snapshot.devices if uuid in (device.uuid, device.parent_uuid)]
        if not places:
            return (), "the driver does not show one of its devices"
        for device in places:
            if device.processes is None or not device.processes_plausible:
                return (), f"the driver gives no list of the processes on device {device.index} that could be believed"
            for process in filter(computes, device.processes):
                if not process.uid or process.uid == claim.uid or claim_of(process, (claim,), seen):
                    found[process.pid] = process
    return tuple(found.values()), None


def _borrow(
    directory: LockDirectory, claim: ClaimRecord, path: str, wanted: frozenset[int], borrowed: list[int]
) -> Grip:
    grip: Grip | None = None
    locks: dict[int, int] = {}

    def is_record(descriptor: int) -> bool:
        # The path may name another claim by now; the file that is locked is what counts.
        return is_same_file(descriptor, path) and os.fstat(descriptor).st_uid == claim.uid

    for pid, number in _holders(claim, path):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # it has ended
        borrowed.append(pidfd)
        for each in sorted(wanted - locks.keys()):
            if (lock := _lent(claim, pidfd, each, partial(_is_lock, directory))) is not None:
                borrowed.append(lock)
                locks[each] = lock
        if grip is None and (record := _lent(claim, pidfd, number, is_record)) is not None:
            borrowed.append(record)
            grip = Grip(record, path, (), pid, pidfd)
        if grip and not wanted - locks.keys():
            return replace(grip, locks=tuple(locks.values()))
        if grip is None or grip.pidfd != pidfd:  # one could have so many processes that we have no descriptors left
            os.close(borrowed.pop(borrowed.index(pidfd)))
    raise ClaimError(f"no process has the locks of the claim {claim.id} open: it is just ending.  Look again.")


def _lent(claim: ClaimRecord, pidfd: int, number: int, is_wanted: Callable[[int], bool]) -> int | None:
    """A copy of a descriptor of another process if it is open and the right one.

    In a thread: a file of FUSE may be anything's but a lock's, and even closing our copy of it waits for as long as its
    owner likes.  So each user can hold up one thread, and nobody who waits for an answer.

    Raises:
        NotPermitted: the kernel does not allow it.
        ClaimError: a file of that user's cannot be closed.
    """
    found: list[int | NotPermitted | None] = []
    deciding, late = threading.Lock(), threading.Event()

    def look() -> None:
        try:
            lent: int | NotPermitted | None = _looked_at(pidfd, number, is_wanted)
        except NotPermitted as error:
            lent = error
        with deciding:
            if late.is_set() and isinstance(lent, int):
                os.close(lent)
            found.append(lent)

    if claim.uid not in _held_up or not _held_up[claim.uid].is_alive():
        thread = _held_up[claim.uid] = threading.Thread(target=look, name="gpuguard-lent", daemon=True)
        thread.start()
        thread.join(LEND_SECONDS)
    with deciding:
        if not found:
            late.set()
            raise ClaimError(
                f"a file that the claim {claim.id} names as its own does not answer: end its processes instead."
            )
    if isinstance(found[0], NotPermitted):
        raise found[0]
    return found[0]


def _looked_at(pidfd: int, number: int, is_wanted: Callable[[int], bool]) -> int | None:
    with suppress(OSError):  # closed meanwhile, or the process has ended
        descriptor = _getfd(pidfd, number)
        try:
            if is_wanted(descriptor):
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
    return None


def _holders(claim: ClaimRecord, path: str) -> Iterator[tuple[int, int]]:
    """(pid, descriptor) of the processes of its owner that have the record open with its lock; first its supervisor."""
    try:
        found = os.stat(path)
    except OSError:
        return
    # fdinfo opens to CAP_SYS_PTRACE; to fd belongs CAP_DAC_READ_SEARCH, and every file of the machine with it.
    inode = f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} "
    until, own = time.monotonic() + SEARCH_SECONDS, os.getpid()  # we have what we borrowed
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {own}
    for pid in sorted(pids, key=lambda pid: pid != claim.pid):
        with suppress(OSError):
            # In effect it may be root: whoever runs a program with the set-user-ID bit keeps what he has open.
            if (os.stat(f"/proc/{pid}").st_uid or uid_behind(pid)) == claim.uid:
                for number in os.listdir(f"/proc/{pid}/fdinfo"):
                    if time.monotonic() > until:
                        return
                    if _locks(f"/proc/{pid}/fdinfo/{number}", inode):
                        yield pid, int(number)


def _locks(facts: str, inode: str) -> bool:
    with suppress(OSError), open(facts, encoding="ascii", errors="replace") as lines:
        return any(line.startswith("lock:") and inode in line for line in lines)
    return False


def _is_lock(directory: LockDirectory, descriptor: int) -> bool:
    """Whether a borrowed file is one of the lock files of *directory*: what a record says is its owner's word."""
    named = os.readlink(f"/proc/self/fd/{descriptor}")
    start = f"{os.path.realpath(directory.locks)}/{directory.prefix}"
    if not named.startswith(start) or "/" in named[len(start) :]:
        return False
    return stat.S_ISREG(os.fstat(descriptor).st_mode) and is_same_file(descriptor, named)


def _getfd(pidfd: int, number: int) -> int:
    """A copy of a descriptor of another process: the same open file.

    Raises:
        NotPermitted: the kernel does not allow it.
        OSError: it has no such descriptor, or has ended.
    """
    import ctypes

    if not _LIBRARY:
        _LIBRARY.append(ctypes.CDLL(None, use_errno=True))
    library = _LIBRARY[0]
    assert isinstance(library, ctypes.CDLL)
    descriptor = int(library.syscall(_PIDFD_GETFD, pidfd, number, 0))
    if descriptor >= 0:
        return descriptor  # close-on-exec: the kernel makes it so
    code = ctypes.get_errno()
    error = OSError(code, os.strerror(code))
    if isinstance(error, PermissionError):
        raise NotPermitted("the kernel does not let you look into the processes of this claim.")
    raise error
