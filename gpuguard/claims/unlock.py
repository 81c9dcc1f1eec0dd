"""Release the locks of a claim from outside while its job lives on: without a signal, and never by age or by pid.

A lock belongs to an open file, which every process of the job shares.  pidfd_getfd(2) lends us that very file if the
kernel lets us look into the process: its owner may (unless Yama forbids it), and so may CAP_SYS_PTRACE.  Unlocking the
file frees the device for all of the processes at once.  The decision is written behind the record first, so that a
released claim is not locked again, and a release whose process was killed is finished.
The kernel says which files these are; the record only adds to that.  Where the daemon gives the locks, it also replaces
their files, so that no process need lend them, and an old descriptor that is locked again is worth nothing.

This module does not decide whether a claim may be released (see enforcement.preflight and daemon.release), but in_use()
says whether a process computes under it.
"""

from __future__ import annotations

import ctypes
import errno
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

from gpuguard.claims import grants
from gpuguard.claims.directory import Gate, LockDirectory, is_same_file, is_unlocked, remove_if_same
from gpuguard.claims.holders import as_written, hangs, inode_of, locked_by
from gpuguard.claims.records import MAX_BYTES, ReleaseRequest, probe, read_record, record_path, write_request
from gpuguard.device_state import Processes, claim_of, device_title, may_compute
from gpuguard.errors import ClaimError
from gpuguard.files import closed_after, open_in_place
from gpuguard.jsonio import loads
from gpuguard.locale.messages import all_of, sentence
from gpuguard.model import ClaimRecord, GpuProcess, Snapshot, claim_named
from gpuguard.procfs import catches, in_time, process_facts, start_time, uid_behind
from gpuguard.sanitize import neutral_command
from gpuguard.units import format_bytes, format_duration
from gpuguard.users import certain_owner

MOST_LOCKS = 256  # of one claim, because its owner can write anything into its record
SEARCH_SECONDS = 2.0  # for the owner's processes, of which there can be any number
LEND_TIMES = 4  # times as long as another read of a process, for the check of a file: see procfs.in_time
COMMAND_CHARACTERS = 60

_PIDFD_GETFD = 438  # the same number on every architecture: include/uapi/asm-generic/unistd.h


class NotPermitted(ClaimError):
    """The kernel does not let this user look into the processes of the claim."""


@dataclass(frozen=True)
class LockHandle:
    """The open files of a claim, lent by its holders; nothing is changed yet."""

    record: int  # the descriptor of its record, or -1 if no process lends it
    path: str  # of the record
    locks: tuple[int, ...]  # descriptors of its lock files
    holder: int  # pid of the process that lent the record, or 0 if none did
    pidfd: int  # of that process
    renew_granted: Callable[[], object] | None = None  # replaces the lock files that this daemon gave


def computing_under(
    claim: ClaimRecord, snapshot: Snapshot, facts: Processes
) -> tuple[tuple[GpuProcess, ...], str | None]:
    """Return the processes that compute under *claim*, and why they are unknown, or None if they are known.

    A process of the claim's owner counts as the claim's, and so does one whose owner is unknown.
    """
    users, owner = dict[int, GpuProcess](), certain_owner(claim.uid)
    for uuid in claim.devices:
        parts = [device for device in snapshot.devices if uuid in (device.uuid, device.parent_uuid)]
        if not parts:
            return (), sentence("claim.gpu_missing", "the driver does not show one of its GPUs")
        for device in parts:
            if device.processes is None or not device.processes_plausible:
                return (), sentence(
                    "claim.processes_unknown",
                    "the driver gives no list of the processes on {gpu} that could be believed",
                    gpu=device_title(device),
                )
            for process in [process for process in device.processes if may_compute(process, device)]:
                if not process.uid or process.uid == owner or claim_of(process, (claim,), facts):
                    users[process.pid] = process
    return tuple(users.values()), None


def in_use(claim: ClaimRecord, snapshot: Snapshot) -> str | None:
    """Return which processes compute under *claim*, in words, or why that is unknown, or None if none does."""
    snapshot = replace(snapshot, claims=(claim,))
    users, unknown = computing_under(claim, snapshot, process_facts(snapshot))
    if unknown:
        return sentence("claim.use_unknown", "whether it is used cannot be seen: {unknown}", unknown=unknown)
    return all_of([computing_text(process, snapshot.clock) for process in users], ", ") or None


def computing_text(process: GpuProcess, clock: float) -> str:
    """Return ``"pid 4711 (python train.py) computes for 3h12m with 10GiB"``; *clock* is CLOCK_BOOTTIME."""
    started = process.start_time if process.start_time is not None else start_time(process.pid)
    command = neutral_command(process.command, brief=True) if process.command else ""
    shortened = command if len(command) <= COMMAND_CHARACTERS else f"{command[:COMMAND_CHARACTERS]}..."
    text = sentence("process.pid", "pid {pid}", pid=process.pid)
    if command:
        text = sentence("process.pid_of_command", "pid {pid} ({command})", pid=process.pid, command=shortened)
    text = sentence("process.computes", "{process} computes", process=text)
    if started is not None:
        duration = format_duration(round(clock - started))
        text = sentence("process.for_time", "{computes} for {time}", computes=text, time=duration)
    if process.memory_used is None:
        return text
    return sentence("process.with_memory", "{text} with {memory}", text=text, memory=format_bytes(process.memory_used))


@contextmanager
def lock_handle(directory: LockDirectory, claim: ClaimRecord) -> Iterator[LockHandle]:
    """Borrow the open files of a living claim.

    Raises:
        NotPermitted: the kernel does not let us.
        ClaimError: they cannot be found.
    """
    path = record_path(directory, claim.uid, claim.id)
    named, granted = _descriptors_of(path, claim.uid), _granted_locks(directory, claim)
    # A lock that was taken by hand has no record: then its holder cannot be told, but the lock can be released.
    is_held = named is not None or claim_named(probe(directory, claim.devices), claim.uid, claim.id) is not None
    if not is_held and not granted:
        raise ClaimError(
            sentence(
                "claim.no_record",
                "the claim {id} has ended, or it has no record: end its processes instead.",
                id=claim.id,
            )
        )
    borrowed: list[int] = []
    try:
        try:
            handle = _borrow(directory, claim, named, borrowed)
        except ClaimError:
            if not granted:
                raise
            handle = LockHandle(-1, path, (), 0, -1)
        yield replace(handle, renew_granted=partial(_renew_granted, directory, claim) if granted else None)
    finally:
        for descriptor in borrowed:
            os.close(descriptor)


def release_locks(handle: LockHandle, decision: ReleaseRequest) -> None:
    """Release the claim for good.  The order of the steps matters.

    Raises:
        OSError: the decision could not be written down, so nothing was done.
    """
    if handle.record >= 0:
        write_request(handle.record, decision)
    for descriptor in handle.locks:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    if handle.renew_granted:
        handle.renew_granted()
    if handle.record < 0:
        return
    remove_if_same(handle.record, handle.path)  # or not: a record that is not locked counts for nothing
    fcntl.flock(handle.record, fcntl.LOCK_UN)


def is_supervisor(pid: int) -> bool:
    """Return whether a process waits for SIGURG, as `gpuguard run` does to read its claim and inform its user."""
    return catches(pid, signal.SIGURG)


def _descriptors_of(path: str, uid: int) -> tuple[int, ...] | None:
    """Return the descriptors of the locks that the record of a living claim names, or None if the claim has ended."""
    try:
        descriptor = open_in_place(path)
    except OSError:
        return None
    with closed_after(descriptor):
        if os.fstat(descriptor).st_uid != uid or is_unlocked(descriptor):
            return None
        encoded = os.read(descriptor, MAX_BYTES + 1).partition(b"\n")[0]
    try:
        numbers = loads(encoded)["descriptors"]
    except (ValueError, TypeError, KeyError):
        return ()
    sound = type(numbers) is list and all(type(number) is int and 0 <= number < 2**20 for number in numbers)
    return tuple(numbers) if sound else ()


def _granted_locks(directory: LockDirectory, claim: ClaimRecord) -> tuple[str, ...]:
    """Return the names of the locks that the daemon has given to *claim*, if this process is that daemon or root."""
    if directory.keeper is None or directory.closed:
        return ()
    with Gate(directory):
        held = grants.grant_of(directory, grants.names_of(directory))
    return tuple(name for name, grant in held.items() if grant and (grant.uid, grant.claim) == (claim.uid, claim.id))


def _renew_granted(directory: LockDirectory, claim: ClaimRecord) -> None:
    for name in _granted_locks(directory, claim):  # read again: it may be another claim's by now
        with Gate(directory):
            grant = grants.grant_of(directory, [name]).get(name)
            if grant and (grant.uid, grant.claim) == (claim.uid, claim.id):
                grants.replace_file(directory, name)


def _borrow(
    directory: LockDirectory, claim: ClaimRecord, named: tuple[int, ...] | None, borrowed: list[int]
) -> LockHandle:
    """Return the files of *claim*, and fill *borrowed* with the descriptors to close, even if an error is raised.

    *named* are the descriptors in its record, or None if it has none.
    """
    handle: LockHandle | None = None
    path = record_path(directory, claim.uid, claim.id)
    record, missing = inode_of(path), _locked_inodes(directory, claim)
    wanted, locks = set(named if named and len(named) <= MOST_LOCKS else ()), list[int]()

    def is_record(descriptor: int) -> bool:
        # The path may name another claim by now, so only the file that is locked counts.
        return is_same_file(descriptor, path) and os.fstat(descriptor).st_uid == claim.uid

    for pid, descriptors in _holders(claim, {record, *missing}):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # it has ended
        borrowed.append(pidfd)
        has_record = next((number for number, inode in descriptors.items() if inode == record), None)
        numbers = {number for number, inode in descriptors.items() if inode in missing}
        for number in sorted(numbers if has_record is None else numbers | wanted):
            if (lock := _lend(claim, pid, pidfd, number, partial(_is_lock, directory))) is not None:
                borrowed.append(lock)
                locks.append(lock)
                wanted.discard(number)
                missing.discard(as_written(lock))
        if handle is None and has_record is not None:
            lent = _lend(claim, pid, pidfd, has_record, is_record)
            if lent is not None:
                borrowed.append(lent)
                handle = LockHandle(lent, path, (), pid, pidfd)
        elif named is None and locks:
            handle = LockHandle(-1, path, (), 0, -1)
        if handle and not missing and not wanted:
            break
        if handle is None or handle.pidfd != pidfd:  # otherwise many processes would use up our descriptors
            os.close(borrowed.pop(borrowed.index(pidfd)))
    if handle and not missing:
        return replace(handle, locks=tuple(locks))
    if hangs(claim.uid):
        raise ClaimError(
            sentence(
                "claim.file_hangs",
                "an open file of {user}'s does not answer while the locks of the claim {id} are looked for: end its "
                "processes instead.",
                user=claim.user,
                id=claim.id,
            )
        )
    raise ClaimError(
        sentence(
            "claim.locks_not_open",
            "no process has the locks of the claim {id} open: it is just ending.  Look again.",
            id=claim.id,
        )
    )


def _locked_inodes(directory: LockDirectory, claim: ClaimRecord) -> set[str]:
    """Return the lock files that only *claim* has locked, as the kernel writes them, whatever its record says."""
    outer = claim.id.partition(".")[0]
    if outer != claim.id and read_record(directory, claim.uid, outer):
        return set()  # it lies inside another claim, which has the locks of these devices
    current = claim_named(probe(directory, claim.devices), claim.uid, claim.id)
    if current is None:
        return set()
    shared = {name.partition(".slot")[0] for name in current.slots}
    names = [*current.slots, *(uuid for uuid in current.devices if uuid not in shared)]
    return {inode for name in names if (inode := inode_of(directory.lock_path(name)))}


def _holders(claim: ClaimRecord, inodes: set[str]) -> Iterator[tuple[int, dict[int, str]]]:
    """Yield the owner's processes that have one of *inodes* locked: pid, and descriptor -> inode; supervisor first.

    Their effective user may be root, because a set-user-ID program keeps the files that its user has open.
    """
    until, own = time.monotonic() + SEARCH_SECONDS, os.getpid()  # this process has open what it borrowed
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {own}
    for pid in sorted(pids, key=lambda pid: pid != claim.pid):
        descriptors: dict[int, str] = {}
        with suppress(OSError):
            uid = os.stat(f"/proc/{pid}").st_uid or uid_behind(pid) or 0
            if certain_owner(uid) == certain_owner(claim.uid):
                if (left := until - time.monotonic()) <= 0:
                    return
                files = locked_by(pid, claim.uid, left)
                descriptors = {number: inode for number, inode in files.items() if inode in inodes}
        if descriptors:
            yield pid, descriptors


def _lend(claim: ClaimRecord, pid: int, pidfd: int, number: int, is_wanted: Callable[[int], bool]) -> int | None:
    """Return a copy of a descriptor of another process, or None if it is not open or not the right one.

    The check runs in a thread, because the file may be one of FUSE instead of a lock, and even closing our copy of it
    then takes as long as its owner likes.  A check that does not end in time is a ClaimError.
    """
    outcomes: list[int | NotPermitted | None] = []
    deciding, late = threading.Lock(), threading.Event()

    def copy() -> None:
        outcome: int | NotPermitted | None = None
        try:
            descriptor = _getfd(pidfd, number)
            with suppress(OSError):
                outcome = descriptor if is_wanted(descriptor) else None
            if outcome is None:
                os.close(descriptor)
        except NotPermitted as error:
            outcome = error
        except OSError:
            pass  # closed meanwhile, or the process has ended
        with deciding:
            if late.is_set() and isinstance(outcome, int):
                os.close(outcome)
            outcomes.append(outcome)

    in_time(pid, "lent", copy, LEND_TIMES)
    with deciding:
        if not outcomes:
            late.set()
            if not os.path.exists(f"/proc/{pid}"):
                return None
            raise ClaimError(
                sentence(
                    "claim.lock_hangs",
                    "a file that the claim {id} names as its own does not answer: end its processes instead.",
                    id=claim.id,
                )
            )
    if isinstance(outcomes[0], NotPermitted):
        raise outcomes[0]
    return outcomes[0]


def _is_lock(directory: LockDirectory, descriptor: int) -> bool:
    """Return whether a borrowed file is a lock file of *directory*, because a record is only its owner's word.

    It has another name here if it was opened where its owner had mounted the directory elsewhere.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    path, start = os.readlink(f"/proc/self/fd/{descriptor}"), f"{os.path.realpath(directory.locks)}/{directory.prefix}"
    if path.startswith(start) and "/" not in path[len(start) :]:
        return is_same_file(descriptor, path)
    names = [name for name in os.listdir(directory.locks) if name.startswith(directory.prefix)]
    return any(is_same_file(descriptor, f"{directory.locks}/{name}") for name in names)


def _getfd(pidfd: int, number: int) -> int:
    """Return a copy of a descriptor of another process, which is the same open file.

    Raises:
        NotPermitted: the kernel does not let us look into the process.
        OSError: the process has no such descriptor, or has ended.
    """
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, number, 0))
    if descriptor >= 0:
        return descriptor  # close-on-exec: the kernel makes it so
    if (code := ctypes.get_errno()) in (errno.EPERM, errno.EACCES):
        raise NotPermitted(
            sentence("claim.not_permitted", "the kernel does not let you look into the processes of this claim.")
        )
    raise OSError(code, os.strerror(code))
