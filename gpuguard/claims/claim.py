"""A claim: locked descriptors that a job inherits, and the record that says what they are for.

The kernel drops an flock when its last holder dies, however it dies, so a claim cannot go stale; and the job inherits
the descriptors, so the claim lives while the supervisor *or* any process of the job lives.  The text in the record is
only for people; the lock is the truth.  A claim takes every lock that it needs for a device, a part or a share of it,
or none of them:

    a device              its lock alone
    a MIG instance        its lock alone, that of its GPU shared
    a share of either     its lock shared, and a slot of it alone
    inside a claim        a lock for the claims inside it, which only its owner requests

The memory of a device is promised by records, and no lock can count it.  So a share takes its locks, writes its record
and only then adds up the promises of all shares on the device: of two that start at the same moment, the one whose
record is written last sees the other.  The gate only keeps both of them from giving up needlessly.

This module does not choose devices: see lock.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gpuguard.claims.directory import LockDirectory, is_same_file, open_lock, remove_if_same, try_flock, unusable_locks
from gpuguard.claims.holders import as_written, locked_by
from gpuguard.claims.records import (
    ReleaseRequest,
    locked_slots,
    pending_request,
    probe_in_gate,
    read_record,
    released_by,
    slot_names,
    write_expected,
    write_record,
    write_request,
)
from gpuguard.clusters import device_variables
from gpuguard.device_state import started_by
from gpuguard.eligibility import Sharing, is_share_of, no_share_left, sharing_on, terms_of
from gpuguard.errors import ClaimError, ClaimLost
from gpuguard.locale import _, translated
from gpuguard.locale.messages import all_of, sentence
from gpuguard.model import ClaimRecord, Device, Snapshot
from gpuguard.procfs import process_facts
from gpuguard.request import Request

_FIRST_DESCRIPTOR = 40  # shells take 10 and the next ones for themselves, and from 64 on the kernel's table grows
_MOST_RECORDS = 50  # of one user, dead ones included, before the dead ones are removed
_REASSERT_TRIES = 5  # a probe may hold the lock shared for some microseconds
# Seconds, of which each pause takes a random part.  Only a share that did not get the gate needs them.
_PAUSES = (0.01, 0.02, 0.04)


@dataclass(frozen=True)
class JobDetails:
    """The purpose of a claim, which is shown to people and used by the plan of the queue."""

    note: str | None = None  # for people
    command: Sequence[str] = ()  # of the job, for people
    time_limit: float | None = None  # seconds from the claim on after which the job ends
    expected: Callable[[], float | None] | None = None  # returns how many seconds it takes otherwise; called to wait
    priority: int = 0  # in the queue, see queue.priority.PRIORITIES
    waited: float | None = None  # seconds in the queue, which tell others how long requests wait
    job: str | None = None  # of `gpuguard submit`: "17", or "17.3" for a task of it
    requeue: bool = False  # it stands in the queue again if a policy asks for that


@dataclass(frozen=True)
class Lock:
    """One locked descriptor.  Its identity is (device, inode), because descriptor numbers are reused."""

    descriptor: int
    path: str
    operation: int
    identity: tuple[int, int]


class Claim(Sequence[Device]):
    """Devices that are ours until release() or until the last process that inherited pass_fds has ended.

    A claim is a sequence of its devices in index order.  Any thread may release it.  In a forked child, release() only
    closes the child's copies, so the parent keeps its claim.
    """

    def __init__(
        self,
        claim_id: str,
        devices: tuple[Device, ...],
        locks: tuple[Lock, ...],
        *,
        memory: int | None = None,
        most: int | None = None,
        max_processes: int | None = None,
    ) -> None:
        self.id = claim_id
        self.devices = devices
        self.memory = memory  # bytes of each device, if the claim shares its devices
        self.most = most  # how many claims may share a device with it at most
        self.max_processes = max_processes  # how many processes of other users it accepts
        self.since: float | None = None  # unix time of its record
        self.warning: str | None = None  # what went wrong without harm to the claim, for people
        self.arrival_files: tuple[str, ...] = ()  # their times say when this user last had a claim: see queue
        self.on_release: Callable[[Claim], None] | None = None  # called once, after the release
        self.locks = locks  # () after the release
        self._record: Lock | None = None
        self._pid = os.getpid()
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, index: Any) -> Any:
        return self.devices[index]

    def __repr__(self) -> str:
        released = ", released" if self.devices and not self.locks else ""
        indices = ", ".join(str(device.index) for device in self.devices)
        return f"<Claim {self.id} of {indices or 'no GPU'}{released}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from gpuguard.tables import html_of_held_claim  # for notebooks alone

        return html_of_held_claim(self)

    def __reduce__(self) -> Any:
        raise TypeError("a claim is of one process, which hands it to its children: pickle or copy its GPUs instead.")

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """The descriptors that a job must inherit (subprocess: pass_fds) for the claim to live as long as the job."""
        record = (self._record.descriptor,) if self._record else ()
        return tuple(lock.descriptor for lock in self.locks) + record

    def environment(self, visible: str = "index") -> dict[str, str]:
        """Return the variables that the job needs in its environment to use these devices and no others.

        Args:
            visible: "index" or "uuid".  The default is indices with CUDA_DEVICE_ORDER=PCI_BUS_ID, because uuids break
                vLLM and others; MIG instances have no index and are always named by uuid.
        """
        share = {} if self.memory is None else share_environment(self.memory, self.devices, os.environ)
        return {
            **device_variables.environment_of(self.devices, os.environ, by_uuid=visible == "uuid"),
            "GPUGUARD_CLAIM": self.id,
            "GPUGUARD_GPUS": ",".join(device.uuid for device in self.devices),
            **share,
        }

    def reassert(self) -> None:
        """Make sure that the locks are still held, and lock them again if the job has unlocked them.

        Raises:
            ClaimLost: a lock is held by another process now, or its file was replaced; or the claim was released from
                outside, and then none of its locks is held any more.
        """
        with self._mutex:
            lost = [fault for lock in self.locks if (fault := _fault(lock))]
            # This comes after the locks: a release from outside is written down before it begins, so it is noticed
            # here if a released lock was just taken again.
            request = released_by(self._record.descriptor) if self._record else None
            if request:
                self._release()
                raise ClaimLost(
                    sentence(
                        "claim.released",
                        "the claim {id} was released {request}.",
                        id=self.id,
                        request=request.in_words(),
                    )
                )
            if lost:
                raise ClaimLost(lost[0])

    def hand_over(self) -> None:
        """Close our descriptors and leave the claim to a forked process, which calls take_over()."""
        with self._mutex:
            self._pid = -1
            self._release()

    def take_over(self) -> None:
        """Make the claim of the process that forked this one ours; write_record() then says so."""
        self._pid = os.getpid()
        self.renew_mutex()

    def renew_mutex(self) -> None:
        """Replace the mutex in a forked child: a thread of the parent may have held it, and does not exist there."""
        self._mutex = threading.Lock()

    def release(self) -> None:
        """Release the devices now, even if a process left over from the job has the descriptors; idempotent."""
        with self._mutex:
            self._release()
            on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release(self)

    def _release(self) -> None:
        ours = self._pid == os.getpid()
        self._release_record(ours=ours)
        for lock in self.locks:
            _close(lock, unlock=ours)
        for path in self.arrival_files if ours and self.locks else ():
            with suppress(OSError):  # the reservation was cancelled
                os.utime(path, follow_symlinks=False)
        self.locks = ()

    def _release_record(self, *, ours: bool) -> None:
        if self._record:
            if ours:
                remove_if_same(self._record.descriptor, self._record.path)
            _close(self._record, unlock=ours)
            self._record = None

    def slots(self, directory: LockDirectory) -> list[str]:
        """Return the names of the slots that the claim holds on devices that it shares."""
        names = [lock.path[len(directory.lock_path("")) :] for lock in self.locks]
        return [name for name in names if ".slot" in name]

    def write_record(
        self, directory: LockDirectory, job: JobDetails | None = None, *, owner: int | None = None
    ) -> None:
        """Write the record that tells others whose claim this is, what it is for, and when it ends.

        A second call replaces the first record, and the claim is never without one.  Root can write the record for its
        *owner*, another uid.
        """
        job = job or JobDetails()
        self.since = self.since or round(time.time(), 3)
        shared = {"memory": self.memory, "most": self.most, "slots": self.slots(directory)}
        content = {
            "schema": 1,
            "id": self.id,
            "devices": [device.uuid for device in self.devices],
            "pid": os.getpid(),
            "since": self.since,
            "ends": None if job.time_limit is None else round(time.time() + job.time_limit, 3),
            **({} if self.memory is None else shared),
            **({} if self.max_processes is None else {"max_processes": self.max_processes}),
            **({} if job.waited is None else {"waited": round(job.waited, 3)}),
            **({} if job.job is None else {"job": job.job, "requeue": job.requeue}),
            "note": job.note,
            "command": list(job.command),
            "descriptors": [lock.descriptor for lock in self.locks],  # by which it can be released: see unlock
        }
        before = self._record
        try:
            path, descriptor = write_record(directory, content, owner)
            self._record = lock_of(descriptor, path, fcntl.LOCK_EX)
            if before:
                os.close(before.descriptor)
        except OSError as error:  # a full disk: the lock is the claim, the record only explains it
            from gpuguard.claims.disk_room import why_full  # for this fault alone

            why = why_full(directory, error)
            self.warning = _("others cannot see what this claim is for: no record in {records} ({why})").format(
                records=directory.records, why=translated(why)
            )
            return
        _remove_dead_records(directory, os.geteuid() if owner is None else owner)

    def remove_record(self) -> None:
        """Remove the record; the locks stay."""
        with self._mutex:
            self._release_record(ours=True)

    def is_held_by(self, pid: int) -> bool:
        """Return whether another process of this user also has the locks, and so keeps the claim."""
        try:
            held = locked_by(pid, os.getuid(), 1.0).values()
        except OSError:  # it has ended
            return False
        return any(as_written(lock.descriptor) in held for lock in self.locks)

    def expect_end(self, when: float) -> None:
        """Write into the record when (unix time) the job should end, if that is possible, so that others know."""
        with suppress(OSError):  # only waiting requests would have used it
            if self._record:
                write_expected(self._record.descriptor, when)

    def release_request(self) -> ReleaseRequest | None:
        """Return the release request that is still waiting for an answer, or None; see records for who can make one."""
        return pending_request(self._record.descriptor) if self._record else None

    def answer(self, request: ReleaseRequest) -> None:
        """Write an answer behind the record; "released" is a promise that reassert() keeps.

        Raises:
            OSError: it cannot be written.
        """
        if self._record:
            write_request(self._record.descriptor, request)


def _remove_dead_records(directory: LockDirectory, uid: int) -> None:
    """Remove the user's dead records once there are more than _MOST_RECORDS: each job with --exec leaves one."""
    start = f"{directory.prefix}claim.{uid}."
    with suppress(OSError, ClaimError):
        own = [name for name in os.listdir(directory.records) if name.startswith(start)]
        for name in own if len(own) > _MOST_RECORDS else ():
            read_record(directory, uid, name[len(start) : -len(".json")])  # removes a dead one


SHARE_VARIABLES = ("GPUGUARD_MEMORY", "TF_FORCE_GPU_ALLOW_GROWTH", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def share_environment(memory: int, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep honest programs inside their share, if their framework reads its environment.

    JAX takes 75 % of a device at its start unless it is told a fraction, TensorFlow nearly all of it unless it is told
    to grow.  PyTorch takes what it needs, and not all of its releases have such a variable: use
    torch.cuda.set_per_process_memory_fraction() with GPUGUARD_MEMORY.  A smaller fraction that was set already stays.
    """
    variables = {"GPUGUARD_MEMORY": str(memory), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    totals = [device.memory_total for device in devices if device.memory_total]
    if len(totals) == len(devices) > 0 and "XLA_CLIENT_MEM_FRACTION" not in environ:  # JAX refuses both names at once
        fraction = min(memory / max(totals), 1.0)
        before = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
        smaller = before.replace(".", "", 1).isdecimal() and 0 < float(before) <= fraction
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = before if smaller else f"{int(fraction * 10000) / 10000:.4f}"
    return variables


def lock_faults(
    directory: LockDirectory, devices: Sequence[Device], request: Request, outer: ClaimRecord | None
) -> dict[str, str]:
    """Return uuid -> why this process can never claim the device for *request*: a lock file that it cannot use."""
    if outer and (outer.memory is not None or "." in outer.id):
        return {}
    names: dict[str, list[str]] = {}  # of the lock files that each needs
    for device in devices:
        slots = slot_names(device.uuid)[: request.slots] if request.share else ()
        family = [*filter(None, (device.uuid, device.parent_uuid)), *slots]
        names[device.uuid] = [f"{device.uuid}.nested"] if outer else family
    faults = unusable_locks(directory, [name for own in names.values() for name in own])
    return {uuid: fault for uuid, own in names.items() if (fault := next(filter(None, map(faults.get, own)), None))}


def lock_parts(
    directory: LockDirectory, device: Device, request: Request, outer: ClaimRecord | None
) -> tuple[Lock, ...] | None:
    """Take the locks of *device* for *request*, inside the claim *outer* if there is one.

    Returns None, and leaves nothing locked, if one of them is held.

    Raises:
        LockDirectoryError: a lock file cannot be used.
    """
    if outer:
        # The outer claim holds the device, so this one excludes only its siblings in there.  Claims that lie deeper
        # exclude no job.  Those inside a share exclude none either, because all shares of a device would have the same
        # lock for the claims inside them.
        if "." in outer.id or outer.memory is not None:
            return ()
        lock = lock_device(directory, f"{device.uuid}.nested", fcntl.LOCK_SH if request.share else fcntl.LOCK_EX)
        return None if lock is None else (lock,)
    wanted = [(device.uuid, fcntl.LOCK_SH if request.share else fcntl.LOCK_EX)]
    if device.parent_uuid:
        wanted.append((device.parent_uuid, fcntl.LOCK_SH))
    locks: list[Lock] = []
    complete = False
    try:
        for name, operation in wanted:
            if (lock := lock_device(directory, name, operation)) is None:
                return None
            locks.append(lock)
        if request.share:
            # While fewer than request.slots claims share the device, one of its first request.slots slots is free.
            for name in slot_names(device.uuid)[: request.slots]:
                if slot := lock_device(directory, name, fcntl.LOCK_EX):
                    locks.append(slot)
                    break
        # A share of the whole GPU holds the lock of the parent shared as well.  A share that takes its slot after this
        # check sees the instance, because it reads the device again once it has its locks, and a divided device is
        # refused.
        shared_whole = device.parent_uuid and locked_slots(directory, device.parent_uuid)
        # Shares that a daemon has given hold nothing but their slots: see daemon.broker.
        shared_by_daemon = directory.keeper is not None and not request.share and locked_slots(directory, device.uuid)
        needed = len(wanted) + (1 if request.share else 0)  # the slot
        complete = len(locks) == needed and not (shared_whole or shared_by_daemon)
        return tuple(locks) if complete else None
    finally:
        if not complete:
            unlock(locks)


def lock_device(directory: LockDirectory, name: str, operation: int) -> Lock | None:
    """Lock the file named *name* (a uuid), exclusively or shared, or return None if another process has it."""
    # The descriptor gets its number first, so that an interruption after the flock finds one descriptor to close.
    descriptor, path, lock = _high_descriptor(open_lock(directory, name)), directory.lock_path(name), None
    try:
        if try_flock(descriptor, operation) and is_same_file(descriptor, path):
            lock = Lock(descriptor, path, operation, _identity(descriptor))
        return lock
    finally:
        if lock is None:
            os.close(descriptor)


def lock_of(descriptor: int, path: str, operation: int) -> Lock:
    """Return the lock that *descriptor* holds, under a number that no script redirects."""
    high = _high_descriptor(descriptor)
    return Lock(high, path, operation, _identity(high))


def unlock(locks: Sequence[Lock]) -> None:
    """Unlock and close *locks*."""
    for lock in locks:
        _close(lock, unlock=True)


def _high_descriptor(descriptor: int) -> int:
    """Return the same open file under another number: ``exec 3>log`` makes a shell lose what it inherited as 3."""
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
    except OSError:  # such a high number is not allowed here
        return descriptor
    os.close(descriptor)
    return high


def _close(lock: Lock, *, unlock: bool) -> None:
    with suppress(OSError):  # closed already
        if _identity(lock.descriptor) != lock.identity:
            return  # the program closed our descriptor, and the number means another file now
        try:
            if unlock:
                fcntl.flock(lock.descriptor, fcntl.LOCK_UN)
        finally:
            os.close(lock.descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _fault(lock: Lock) -> str | None:
    """Return what is wrong with a lock that should be held, or None; take it again if it was only unlocked."""
    if not is_same_file(lock.descriptor, lock.path, unsure=True):
        return sentence("lock.file_replaced", "the lock file {path} was removed or replaced.", path=lock.path)
    for _try in range(_REASSERT_TRIES):
        if try_flock(lock.descriptor, lock.operation):
            return None
        time.sleep(0.01)
    return sentence(
        "lock.of_another",
        "{path} is locked by another process: the job, or a process in it, had unlocked it.",
        path=lock.path,
    )


def sharing_of(snapshot: Snapshot, claims: Sequence[ClaimRecord]) -> dict[str, Sharing]:
    """Return uuid -> who shares the device, for each device of *snapshot* that one of *claims* shares."""
    shares = [record for record in claims if record.slots]
    if not shares:
        return {}
    sharing = {}
    for device in snapshot.devices:
        here = tuple(record for record in shares if is_share_of(record, device.uuid))
        if here:
            sharing[device.uuid] = sharing_on(device, here, _owners(replace(snapshot, devices=(device,), claims=here)))
    return sharing


def sharing_now(directory: LockDirectory, held: Mapping[str, Sequence[Lock]], snapshot: Snapshot) -> dict[str, Sharing]:
    """Return uuid -> who shares the device now, without the locks *held* here.  The caller has the gate."""
    uuids = [device.uuid for device in snapshot.devices]
    own = {lock.path[len(directory.lock_path("")) :] for locks in held.values() for lock in locks}
    sharing = sharing_of(snapshot, _without(probe_in_gate(directory, uuids), own))
    # A process may belong to a share because it holds its locks.  The holders are looked up only if that can matter.
    if any(
        not all(sharing[device.uuid].belongs(process.pid) for process in device.processes or ())
        for device in snapshot.devices
        if device.uuid in sharing
    ):
        sharing = sharing_of(snapshot, _without(probe_in_gate(directory, uuids, holders=True), own))
    return sharing


def join(directory: LockDirectory, snapshot: Snapshot, request: Request, claim: Claim, taken: dict[str, str]) -> bool:
    """Write down that *claim* shares its devices, then check whether there is room for it; if not, release it.

    Fills *taken* with the devices that have no room.  If several claims meet that are too many together, all of them
    withdraw, so each tries again after a different pause.
    """
    pauses = iter(_PAUSES)
    try:
        while True:
            claim.write_record(directory)
            late = _over_capacity(directory, snapshot, request, claim)
            pause = next(pauses, None)
            if not late or pause is None:
                break
            claim.remove_record()
            time.sleep(pause * os.urandom(1)[0] / 255)
    except BaseException:
        claim.release()
        raise
    if late:
        claim.release()
        taken.update(late)
    return not late


def _owners(snapshot: Snapshot) -> dict[int, int]:
    """Return pid -> uid of the share that the process surely belongs to, on the one device of *snapshot*.

    A process belongs to its user's share.  A process of root may be a container of any user, so it needs an ancestor
    with a share.
    """
    uids = {record.uid for record in snapshot.claims}
    processes = snapshot.devices[0].processes or ()
    owners = {process.pid: process.uid for process in processes if process.uid and process.uid in uids}
    if len(owners) < len(processes):
        facts = process_facts(snapshot)
        for process in processes:
            if process.pid not in owners and (record := started_by(process, snapshot.claims, facts)):
                owners[process.pid] = record.uid
    return owners


def _over_capacity(directory: LockDirectory, snapshot: Snapshot, request: Request, claim: Claim) -> dict[str, str]:
    """Return uuid -> why, for each device of *claim* whose shares, with its own, are more than there is room for.

    The record of *claim* must have been written before.  Nothing that others write about our own slots counts.
    """
    records = probe_in_gate(directory, [device.uuid for device in claim])
    others = [record for record in records if (record.uid, record.id) != (os.geteuid(), claim.id)]
    sharing = sharing_of(snapshot, _without(others, set(claim.slots(directory))))
    terms = terms_of(snapshot, request, {}, sharing)
    reasons = {device.uuid: [reason.text for reason in no_share_left(device, terms)] for device in claim}
    return {uuid: all_of(texts) for uuid, texts in reasons.items() if texts}


def _without(claims: Iterable[ClaimRecord], slots: Collection[str]) -> tuple[ClaimRecord, ...]:
    return tuple(replace(claim, slots=tuple(slot for slot in claim.slots if slot not in slots)) for claim in claims)
