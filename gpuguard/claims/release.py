"""Giving up the locks of a claim whose job lives on, from outside: no signal, and nothing broken by age or by pid.

A lock belongs to an open file, which every process of the job shares.  pidfd_getfd(2) lends us that very file, to those
whom the kernel lets look into the process: its owner (unless Yama forbids it) and CAP_SYS_PTRACE.  Unlocking it there
frees the device for all of them at once.  The decision is written behind the record first (see wishes), so that a claim
which was given up is not taken again, and whoever comes after a killed releaser finishes what he began.
Which files these are says the kernel; what the record says of it only adds to that.  Where the daemon gives the locks
it makes their files anew as well, so nobody need lend them, and whoever locks his old one again has nothing.
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

from gpuguard.claims.directory import Gate, LockDirectory, is_same_file, try_flock
from gpuguard.claims.holders import as_written, hangs, inode_of, locked_by
from gpuguard.claims.records import MAX_BYTES, probe, read_record, record_path
from gpuguard.claims.release_requests import ReleaseRequest, write
from gpuguard.deadline import in_time
from gpuguard.device_state import Processes, claim_of, may_compute
from gpuguard.errors import ClaimError
from gpuguard.files import open_in_place
from gpuguard.jsonio import loads
from gpuguard.model import ClaimRecord, GpuProcess, Snapshot, claim_named
from gpuguard.procfs import status_words, uid_behind

MOST_LOCKS = 256  # of one claim: a record says what its owner likes
SEARCH_SECONDS = 2.0  # among the owner's processes, of which he can have any number
LEND_TIMES = 4  # as long as another look, for a file to be looked at

_PIDFD_GETFD = 438  # the same number on every architecture: include/uapi/asm-generic/unistd.h


class NotPermitted(ClaimError):
    """The kernel does not let this user look into the processes of the claim."""


@dataclass(frozen=True)
class LockHandle:
    """The open files of a claim, lent by its holders; nothing is changed yet.

    Args:
        record: the descriptor of its record; -1: nobody lends it.
        path: of the record.
        locks: descriptors of its lock files.
        holder: pid of the process that lent the record; 0: none.
        pidfd: of that process.
        given: takes back what this daemon has given to the claim.
    """

    record: int
    path: str
    locks: tuple[int, ...]
    holder: int
    pidfd: int
    given: Callable[[], object] | None = None


@contextmanager
def lock_handle(directory: LockDirectory, claim: ClaimRecord) -> Iterator[LockHandle]:
    """Borrow the open files of a living claim.

    Raises:
        NotPermitted: the kernel does not let us.
        ClaimError: they cannot be found.
    """
    path = record_path(directory, claim.uid, claim.id)
    named, given = _descriptors_of(directory, claim.uid, claim.id), _given(directory, claim)
    if named is None and not given:
        raise ClaimError(f"the claim {claim.id} has ended, or it has no record: end its processes instead.")
    borrowed: list[int] = []
    try:
        try:
            grip = _borrow(directory, claim, path, frozenset(named or ()), borrowed)
        except ClaimError:
            if not given:
                raise
            grip = LockHandle(-1, path, (), 0, -1)
        yield replace(grip, given=partial(_relock, directory, claim) if given else None)
    finally:
        for descriptor in borrowed:
            os.close(descriptor)


def let_go(grip: LockHandle, letter: ReleaseRequest) -> None:
    """Give the claim up for good; the order matters.

    Raises:
        OSError: the decision could not be written down, so nothing was done.
    """
    if grip.record >= 0:
        write(grip.record, letter)
    for descriptor in grip.locks:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    if grip.given:
        grip.given()
    if grip.record < 0:
        return
    with suppress(OSError):  # only its owner and root may; a record that is not locked counts for nothing
        if is_same_file(grip.record, grip.path):
            os.unlink(grip.path)
    fcntl.flock(grip.record, fcntl.LOCK_UN)


def listens(pid: int) -> bool:
    """Whether that process waits for SIGURG, as `gpuguard run` does: it looks at its claim then, and tells its user."""
    caught = status_words(pid, b"SigCgt")
    return bool(caught and int(caught[0], 16) >> (signal.SIGURG - 1) & 1)


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
            for process in filter(may_compute, device.processes):
                if not process.uid or process.uid == claim.uid or claim_of(process, (claim,), seen):
                    found[process.pid] = process
    return tuple(found.values()), None


def _descriptors_of(directory: LockDirectory, uid: int, claim_id: str) -> tuple[int, ...] | None:
    """The numbers under which the processes of a living claim have its locks open, as its record says; None: it ended.

    () where the record says nothing that could be such numbers.
    """
    path = record_path(directory, uid, claim_id)
    try:
        descriptor = open_in_place(path)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid != uid or try_flock(descriptor, fcntl.LOCK_SH):
            return None
        content = loads(os.read(descriptor, MAX_BYTES + 1).partition(b"\n")[0])
        numbers = content["descriptors"]
        sound = type(numbers) is list and all(type(each) is int and 0 <= each < 2**20 for each in numbers)
        return tuple(numbers) if sound else ()
    except (ValueError, TypeError, KeyError):
        return ()
    finally:
        os.close(descriptor)


def _given(directory: LockDirectory, claim: ClaimRecord) -> tuple[str, ...]:
    """The names of the locks that the daemon has given to *claim*, if this process is that daemon, or root."""
    if directory.keeper is None or directory.closed:
        return ()
    from gpuguard.claims import grants

    with Gate(directory):
        held = grants.grant_of(directory, grants.names_of(directory))
    return tuple(name for name, to in held.items() if to and (to.uid, to.claim) == (claim.uid, claim.id))


def _relock(directory: LockDirectory, claim: ClaimRecord) -> None:
    from gpuguard.claims import grants

    for name in _given(directory, claim):  # asked again: it may be somebody else's by now
        with Gate(directory):
            to = grants.grant_of(directory, [name]).get(name)
            if to and (to.uid, to.claim) == (claim.uid, claim.id):
                grants.replace_file(directory, name)


def _borrow(
    directory: LockDirectory, claim: ClaimRecord, path: str, named: frozenset[int], borrowed: list[int]
) -> LockHandle:
    grip: LockHandle | None = None
    record, missing = inode_of(path), _held(directory, claim)
    wanted, locks = set(named if len(named) <= MOST_LOCKS else ()), list[int]()

    def is_record(descriptor: int) -> bool:
        # The path may name another claim by now; the file that is locked is what counts.
        return is_same_file(descriptor, path) and os.fstat(descriptor).st_uid == claim.uid

    for pid, found in _holders(claim, {record, *missing}):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # it has ended
        borrowed.append(pidfd)
        has_record = next((number for number, inode in found.items() if inode == record), None)
        numbers = {number for number, inode in found.items() if inode in missing}
        for each in sorted(numbers if has_record is None else numbers | wanted):
            if (lock := _lent(claim, pid, pidfd, each, partial(_is_lock, directory))) is not None:
                borrowed.append(lock)
                locks.append(lock)
                wanted.discard(each)
                missing.discard(as_written(lock))
        if grip is None and has_record is not None:
            lent = _lent(claim, pid, pidfd, has_record, is_record)
            if lent is not None:
                borrowed.append(lent)
                grip = LockHandle(lent, path, (), pid, pidfd)
        if grip and not missing and not wanted:
            break
        if grip is None or grip.pidfd != pidfd:  # one could have so many processes that we have no descriptors left
            os.close(borrowed.pop(borrowed.index(pidfd)))
    if grip and not missing:
        return replace(grip, locks=tuple(locks))
    raise ClaimError(_why_not_found(claim))


def _why_not_found(claim: ClaimRecord) -> str:
    if hangs(claim.uid):
        return (
            f"an open file of {claim.user}'s does not answer who looks for the locks of the claim {claim.id}: end its "
            "processes instead."
        )
    return f"no process has the locks of the claim {claim.id} open: it is just ending.  Look again."


def _held(directory: LockDirectory, claim: ClaimRecord) -> set[str]:
    """The lock files that it alone has locked, as the kernel writes them, whatever its record says of descriptors."""
    outer = claim.id.partition(".")[0]
    if outer != claim.id and read_record(directory, claim.uid, outer):
        return set()  # inside of another one, whose the locks of these devices are
    seen = claim_named(probe(directory, claim.devices), claim.uid, claim.id)
    if seen is None:
        return set()
    shared = {name.partition(".slot")[0] for name in seen.slots}
    names = [*seen.slots, *(uuid for uuid in seen.devices if uuid not in shared)]
    return {inode for name in names if (inode := inode_of(directory.lock_path(name)))}


def _lent(claim: ClaimRecord, pid: int, pidfd: int, number: int, is_wanted: Callable[[int], bool]) -> int | None:
    """A copy of a descriptor of another process if it is open and the right one.

    Looked at apart: a file of FUSE may be anything's but a lock's, and even closing our copy of it waits for as long as
    its owner likes.

    Raises:
        NotPermitted: the kernel does not allow it.
        ClaimError: a file of that user's cannot be closed.
    """
    found: list[int | NotPermitted | None] = []
    deciding, late = threading.Lock(), threading.Event()

    def look() -> None:
        try:
            lent: int | NotPermitted | None = _checked(pidfd, number, is_wanted)
        except NotPermitted as error:
            lent = error
        with deciding:
            if late.is_set() and isinstance(lent, int):
                os.close(lent)
            found.append(lent)

    in_time(pid, "lent", look, LEND_TIMES)
    with deciding:
        if not found:
            late.set()
            if not os.path.exists(f"/proc/{pid}"):
                return None
            raise ClaimError(
                f"a file that the claim {claim.id} names as its own does not answer: end its processes instead."
            )
    if isinstance(found[0], NotPermitted):
        raise found[0]
    return found[0]


def _checked(pidfd: int, number: int, is_wanted: Callable[[int], bool]) -> int | None:
    with suppress(OSError):  # closed meanwhile, or the process has ended
        descriptor = _getfd(pidfd, number)
        try:
            if is_wanted(descriptor):
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
    return None


def _holders(claim: ClaimRecord, inodes: set[str]) -> Iterator[tuple[int, dict[int, str]]]:
    """The processes of its owner that have one of *inodes* locked: pid, and by which descriptor; first its supervisor.

    In effect they may be root: whoever runs a program with the set-user-ID bit keeps what he has open.
    """
    until, own = time.monotonic() + SEARCH_SECONDS, os.getpid()  # we have what we borrowed
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {own}
    for pid in sorted(pids, key=lambda pid: pid != claim.pid):
        found: dict[int, str] = {}
        with suppress(OSError):
            if (os.stat(f"/proc/{pid}").st_uid or uid_behind(pid)) == claim.uid:
                if (left := until - time.monotonic()) <= 0:
                    return
                files = locked_by(pid, claim.uid, left)
                found = {number: inode for number, inode in files.items() if inode in inodes}
        if found:
            yield pid, found


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

    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, number, 0))
    if descriptor >= 0:
        return descriptor  # close-on-exec: the kernel makes it so
    code = ctypes.get_errno()
    error = OSError(code, os.strerror(code))
    if isinstance(error, PermissionError):
        raise NotPermitted("the kernel does not let you look into the processes of this claim.")
    raise error
