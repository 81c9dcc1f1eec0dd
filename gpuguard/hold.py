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
from collections.abc import Sequence

from gpuguard.errors import ClaimLost
from gpuguard.lockfiles import LockDirectory, is_same_file, open_lock, try_flock
from gpuguard.model import Device
from gpuguard.nouns import dataclass
from gpuguard.records import write_record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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

    def __init__(self, claim_id: str, devices: tuple[Device, ...], locks: tuple[Lock, ...]) -> None:
        self.id = claim_id
        self.devices = devices
        self.warning: str | None = None  # what went wrong without harm to the claim, for people
        self._locks = locks
        self._record: tuple[str, int] | None = None
        self._pid = os.getpid()
        self._mutex = allocate_lock()

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, place: Any) -> Any:
        return self.devices[place]

    def __repr__(self) -> str:
        return f"<Claim {self.id} of {', '.join(str(device.index) for device in self.devices) or 'no device'}>"

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Descriptors that a job must inherit (subprocess: pass_fds) for the claim to live as long as it does."""
        record = (self._record[1],) if self._record else ()
        return tuple(lock.descriptor for lock in self._locks) + record

    def environment(self, visible: str = "index") -> dict[str, str]:
        """What the job must have in its environment to use these devices and no others.

        Args:
            visible: "index" or "uuid".  Indices with CUDA_DEVICE_ORDER=PCI_BUS_ID by default, because uuids break vLLM
                and others; MIG instances have no index and always go by uuid.
        """
        by_uuid = visible == "uuid" or any(device.parent_uuid for device in self.devices)
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(each.uuid if by_uuid else str(each.index) for each in self.devices),
            "GPUGUARD_CLAIM": self.id,
            "GPUGUARD_GPUS": ",".join(device.uuid for device in self.devices),
        }

    def reassert(self) -> None:
        """Make sure that the locks are still held, and take them again if the job gave them away.

        Raises:
            ClaimLost: a lock is held by somebody else now, or its file was replaced.
        """
        with self._mutex:
            for lock in self._locks:
                if not is_same_file(lock.descriptor, lock.path):
                    raise ClaimLost(
                        f"the lock file {lock.path} was removed or replaced: others can claim the device now."
                    )
                if not _lock_again(lock):
                    raise ClaimLost(
                        f"{lock.path} is locked by somebody else: the job, or somebody in it, had unlocked it."
                    )

    def release(self) -> None:
        """Give the devices back now, also if a leftover of the job still has the descriptors.  Idempotent."""
        with self._mutex:
            ours = self._pid == os.getpid()
            if self._record:
                path, descriptor = self._record
                if ours and is_same_file(descriptor, path):
                    os.unlink(path)
                _let_go(descriptor, None, unlock=ours)
            for lock in self._locks:
                _let_go(lock.descriptor, lock.identity, unlock=ours)
            self._locks, self._record = (), None

    def explain(self, directory: LockDirectory, note: str | None, command: Sequence[str]) -> None:
        """Write the record that tells others whose claim this is and what it is for."""
        content = {
            "schema": 1,
            "id": self.id,
            "devices": [device.uuid for device in self.devices],
            "pid": os.getpid(),
            "since": round(time.time(), 3),
            "note": note,
            "command": list(command),
        }
        try:
            self._record = write_record(directory, content)
        except OSError as error:  # a full disk: the lock is the claim, the record only explains it
            self.warning = (
                f"others cannot see what this claim is for: no record in {directory.records} ({error.strerror})"
            )


def take_lock(directory: LockDirectory, name: str, operation: int) -> Lock | None:
    """Take the lock of a name (a uuid), exclusive or shared; None when somebody else has it."""
    descriptor = open_lock(directory, name)
    path = directory.lock_path(name)
    if try_flock(descriptor, operation) and is_same_file(descriptor, path):
        status = os.fstat(descriptor)
        return Lock(descriptor, path, operation, (status.st_dev, status.st_ino))
    os.close(descriptor)
    return None


def unlock(locks: Sequence[Lock]) -> None:
    """Give locks back."""
    for lock in locks:
        _let_go(lock.descriptor, lock.identity, unlock=True)


def _let_go(descriptor: int, identity: tuple[int, int] | None, *, unlock: bool) -> None:
    try:
        status = os.fstat(descriptor)
        if identity and (status.st_dev, status.st_ino) != identity:
            return  # somebody closed our descriptor, and the number means another file now
        if unlock:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
    except OSError:
        return  # closed already


def _lock_again(lock: Lock) -> bool:
    for _ in range(_REASSERT_TRIES):
        if try_flock(lock.descriptor, lock.operation):
            return True
        time.sleep(0.01)
    return False
