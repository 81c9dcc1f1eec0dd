"""A claim: locked descriptors that a job inherits, and the record that says what they are for.

The kernel drops an flock when its last holder dies, however it dies, so a claim cannot go stale; and the job inherits
the descriptors, so the claim lives while the wrapper *or* any process of the job lives.  The text in the record is only
for people; the lock is the truth.  Does not look for devices: see lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from _thread import allocate_lock
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.claims.directory import LockDirectory, is_same_file, open_lock, try_flock
from gpuguard.claims.records import read_record, write_expected, write_record
from gpuguard.claims.release_requests import pending_request, released, write
from gpuguard.clusters import visible_devices
from gpuguard.errors import ClaimError, ClaimLost
from gpuguard.model import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gpuguard.claims.release_requests import ReleaseRequest
else:
    from _collections_abc import Sequence  # of the interpreter; the package collections would take 3 ms

_FIRST = 40  # number of a descriptor: shells take 10 and the next ones for themselves, and from 64 on it costs memory
_UNTIDY = 50  # records of one user, dead ones among them
_REASSERT_TRIES = 5  # somebody may be looking (see records.locked_devices) for some microseconds


@dataclass(frozen=True)
class Lock:
    """One locked descriptor; its identity is (device, inode), because descriptor numbers are used again."""

    descriptor: int
    path: str
    operation: int
    identity: tuple[int, int]


class Claim(Sequence[Device]):
    """Devices that are ours until release() or until the last process that inherited pass_fds has ended.

    A sequence of its devices in index order.  May be released from any thread; in a forked child release() only closes
    the child's copies, so the parent keeps its claim.
    """

    def __init__(
        self,
        claim_id: str,
        devices: tuple[Device, ...],
        locks: tuple[Lock, ...],
        *,
        memory: int | None = None,
        most: int | None = None,
    ) -> None:
        self.id = claim_id
        self.devices = devices
        self.memory = memory  # bytes of each device, of a claim that shares them
        self.most = most  # so many claims at most share a device with it
        self.since: float | None = None  # unix time of its record
        self.warning: str | None = None  # what went wrong without harm to the claim, for people
        self.arrivals: tuple[str, ...] = ()  # files whose time says when this user last had a claim, see reservefiles
        self._locks = locks
        self._record: Lock | None = None
        self._pid = os.getpid()
        self._mutex = allocate_lock()

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, place: Any) -> Any:
        return self.devices[place]

    def __repr__(self) -> str:
        back = ", given back" if self.devices and not self.locks else ""
        return f"<Claim {self.id} of {', '.join(str(device.index) for device in self.devices) or 'no device'}{back}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from gpuguard.sanitize import of_held

        return of_held(self)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a claim is of one process, which hands it to its children: pickle or copy its devices instead."
        )

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def wish(self) -> ReleaseRequest | None:
        """What somebody who may wishes of this claim, and was not answered yet."""
        return pending_request(self._record.descriptor) if self._record else None

    def answer(self, letter: ReleaseRequest) -> None:
        """Write *letter* behind the record; "released" is a promise that reassert() keeps.

        Raises:
            OSError: it cannot be written.
        """
        if self._record:
            write(self._record.descriptor, letter)

    @property
    def locks(self) -> tuple[Lock, ...]:
        """What it holds."""
        return self._locks

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Descriptors that a job must inherit (subprocess: pass_fds) for the claim to live as long as it does."""
        record = (self._record.descriptor,) if self._record else ()
        return tuple(lock.descriptor for lock in self._locks) + record

    def environment(self, visible: str = "index") -> dict[str, str]:
        """What the job must have in its environment to use these devices and no others.

        Args:
            visible: "index" or "uuid".  Indices with CUDA_DEVICE_ORDER=PCI_BUS_ID by default, because uuids break vLLM
                and others; MIG instances have no index and always go by uuid.
        """
        share = {} if self.memory is None else share_environment(self.memory, self.devices, os.environ)
        return {
            **visible_devices.environment_of(self.devices, by_uuid=visible == "uuid"),
            "GPUGUARD_CLAIM": self.id,
            "GPUGUARD_GPUS": ",".join(device.uuid for device in self.devices),
            **share,
        }

    def reassert(self) -> None:
        """Make sure that the locks are still held, and take them again if the job gave them away.

        Raises:
            ClaimLost: a lock is held by somebody else now, or its file was replaced; or the claim was released from
                outside, and then nothing of it is held any more.
        """
        with self._mutex:
            lost = [fault for lock in self._locks if (fault := _fault(lock))]
            # Afterwards: whoever gives a claim up writes that down first, so what was just taken again is seen here.
            letter = released(self._record.descriptor) if self._record else None
            if letter:
                self._give_back(ours=self._pid == os.getpid())
                raise ClaimLost(f"the claim {self.id} was released {letter.in_words()}.")
            if lost:
                raise ClaimLost(lost[0])

    def release(self) -> None:
        """Give the devices back now, also if a leftover of the job still has the descriptors.  Idempotent."""
        with self._mutex:
            self._give_back(ours=self._pid == os.getpid())

    def _give_back(self, *, ours: bool) -> None:
        if self._record:
            if ours and is_same_file(self._record.descriptor, self._record.path):
                _remove(self._record.path)
            _let_go(self._record, unlock=ours)
        for lock in self._locks:
            _let_go(lock, unlock=ours)
        for path in self.arrivals if ours and self._locks else ():
            _touch(path)
        self._locks, self._record = (), None

    def withdraw(self) -> None:
        """Take the record back; the locks stay."""
        with self._mutex:
            if self._record:
                if is_same_file(self._record.descriptor, self._record.path):
                    _remove(self._record.path)
                _let_go(self._record, unlock=True)
                self._record = None

    def slots(self, directory: LockDirectory) -> list[str]:
        """The names of the slots that it holds of devices which it shares."""
        names = [lock.path[len(directory.lock_path("")) :] for lock in self._locks]
        return [name for name in names if ".slot" in name]

    def explain(
        self,
        directory: LockDirectory,
        note: str | None,
        command: Sequence[str],
        *,
        ends: float | None = None,
        owner: int | None = None,
    ) -> None:
        """Write the record that tells others whose claim this is, what it is for, and when (unix time) it ends.

        Again: the new one takes the place of the first, and nobody sees the claim without one.  Root can write it for
        its *owner*, another uid.
        """
        self.since = self.since or round(time.time(), 3)
        shared = {"memory": self.memory, "most": self.most, "slots": self.slots(directory)}
        content = {
            "schema": 1,
            "id": self.id,
            "devices": [device.uuid for device in self.devices],
            "pid": os.getpid(),
            "since": self.since,
            "ends": ends,
            **({} if self.memory is None else shared),
            "note": note,
            "command": list(command),
            "descriptors": [lock.descriptor for lock in self._locks],  # by which it can be released: see releasing
        }
        before = self._record
        try:
            path, descriptor = write_record(directory, content, owner)
            self._record = lock_of(descriptor, path, fcntl.LOCK_EX)
            if before:
                os.close(before.descriptor)
        except OSError as error:  # a full disk: the lock is the claim, the record only explains it
            from gpuguard.claims.room import why_full

            why = why_full(directory, error)
            self.warning = f"others cannot see what this claim is for: no record in {directory.records} ({why})"
            return
        _tidy(directory, os.geteuid() if owner is None else owner)

    def expect(self, when: float) -> None:
        """Let the record tell others when (unix time) the job should end, as far as anybody can tell."""
        try:
            if self._record:
                write_expected(self._record.descriptor, when)
        except OSError:
            return  # only those who wait would have known


def _tidy(directory: LockDirectory, uid: int) -> None:
    """Remove the many records of dead claims of *uid*: each job with --exec leaves one, and only he and root may."""
    start = f"{directory.prefix}claim.{uid}."
    try:
        own = [name for name in os.listdir(directory.records) if name.startswith(start)]
        for name in own if len(own) > _UNTIDY else ():
            read_record(directory, uid, name[len(start) : -len(".json")])  # a dead one is removed by that
    except (OSError, ClaimError):
        return


SHARE_VARIABLES = ("GPUGUARD_MEMORY", "TF_FORCE_GPU_ALLOW_GROWTH", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def share_environment(memory: int, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str]:
    """What keeps honest programs inside their share of a device, where their framework listens to its environment.

    JAX takes 75 % of a device at its start unless it is told a fraction, TensorFlow nearly all unless it is told to
    grow.  PyTorch takes what it needs and has no such variable in all its releases: torch.cuda.
    set_per_process_memory_fraction() with GPUGUARD_MEMORY does it.  A smaller fraction that was set already stays.
    """
    found = {"GPUGUARD_MEMORY": str(memory), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    totals = [device.memory_total for device in devices if device.memory_total]
    if len(totals) == len(devices) > 0 and "XLA_CLIENT_MEM_FRACTION" not in environ:  # JAX refuses both names at once
        fraction = min(memory / max(totals), 1.0)
        before = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
        smaller = before.replace(".", "", 1).isdecimal() and 0 < float(before) <= fraction
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = before if smaller else f"{int(fraction * 10000) / 10000:.4f}"
    return found


def lock_device(directory: LockDirectory, name: str, operation: int) -> Lock | None:
    """Take the lock of a name (a uuid), exclusive or shared; None when somebody else has it."""
    # Its number comes first: whatever interrupts us behind the flock finds one descriptor, and closes it.
    descriptor, path, lock = _separate(open_lock(directory, name)), directory.lock_path(name), None
    try:
        if try_flock(descriptor, operation) and is_same_file(descriptor, path):
            lock = Lock(descriptor, path, operation, _identity(descriptor))
        return lock
    finally:
        if lock is None:
            os.close(descriptor)


def lock_of(descriptor: int, path: str, operation: int) -> Lock:
    """What *descriptor* has locked, under a number that no script redirects."""
    further = _separate(descriptor)
    return Lock(further, path, operation, _identity(further))


def _separate(descriptor: int) -> int:
    """After ``exec 3>log`` neither a shell nor what it starts has what it inherited as 3."""
    try:
        further = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    except OSError:  # so many may not be open here
        return descriptor
    os.close(descriptor)
    return further


def unlock(locks: Sequence[Lock]) -> None:
    """Give locks back."""
    for lock in locks:
        _let_go(lock, unlock=True)


def _let_go(lock: Lock, *, unlock: bool) -> None:
    try:
        if _identity(lock.descriptor) != lock.identity:
            return  # somebody closed our descriptor, and the number means another file now
        try:
            if unlock:
                fcntl.flock(lock.descriptor, fcntl.LOCK_UN)
        finally:
            os.close(lock.descriptor)
    except OSError:
        return  # closed already


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # whoever released it from outside was quicker


def _touch(path: str) -> None:
    try:
        os.utime(path, follow_symlinks=False)
    except OSError:
        return  # the reservation was cancelled


def _fault(lock: Lock) -> str | None:
    if not is_same_file(lock.descriptor, lock.path, unsure=True):
        return f"the lock file {lock.path} was removed or replaced: others can claim the device now."
    if not _lock_again(lock):
        return f"{lock.path} is locked by somebody else: the job, or somebody in it, had unlocked it."
    return None


def _lock_again(lock: Lock) -> bool:
    for _ in range(_REASSERT_TRIES):
        if try_flock(lock.descriptor, lock.operation):
            return True
        time.sleep(0.01)
    return False
