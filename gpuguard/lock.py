"""Claims: a device belongs to whoever holds its lock file.

The kernel drops an flock when its last holder dies, however it dies, so a claim cannot go stale; and the job inherits
the descriptors, so the claim lives while the wrapper *or* any process of the job lives.  The text in the record is only
for people; the lock is the truth.  Does not choose devices (see select) and never breaks a lock.

A MIG instance is locked together with a shared lock on its GPU: so instances exclude their whole GPU and the other way
round, by the kernel.
"""

from __future__ import annotations

import fcntl
import os
import time
from _thread import allocate_lock
from collections.abc import Sequence
from functools import partial

from gpuguard.clusters import outer_devices
from gpuguard.errors import ClaimLost, ImpossibleRequest, LockDirectoryError, NotEnoughGpus, WaitTimeout
from gpuguard.lockfiles import Gate, LockDirectory, is_same_file, lock_directory, open_lock, try_flock
from gpuguard.model import HEALTH, PROCESS_DETAILS, PROCESSES, VERIFY_FIELDS, ClaimRecord, Device, Snapshot
from gpuguard.nouns import dataclass, replace
from gpuguard.records import locked_devices, probe, read_record, write_record
from gpuguard.select import Choice, Request, choose, fields_needed, fields_to_verify, not_enough, taken_by

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from gpuguard.backends import Backend

__all__ = ["Claim", "LockDirectory", "acquire", "lock_directory", "look", "outer_claim", "probe"]

POLL_SECONDS = 0.25  # between two looks at the locks while waiting: some 100 us each, no driver call
ASK_SECONDS = 2.0  # between two questions to the driver while locks are free but devices look busy
_REASSERT_TRIES = 5  # somebody may be looking (see records.locked_devices) for some microseconds


@dataclass(frozen=True)
class _Lock:
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

    def __init__(self, claim_id: str, devices: tuple[Device, ...], locks: tuple[_Lock, ...]) -> None:
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

    def _write_record(self, directory: LockDirectory, note: str | None, command: Sequence[str]) -> None:
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


def acquire(
    backend: Backend,
    request: Request,
    directory: LockDirectory,
    *,
    wait: float | None = 0.0,
    note: str | None = None,
    command: Sequence[str] = (),
    on_wait: Callable[[NotEnoughGpus], None] | None = None,
) -> Claim:
    """Claim devices for *request*, all or none; nothing is held while waiting.

    Args:
        backend: of the machine; it is asked as little as possible, and not at all while too many locks are held.
        request: what is wanted; CUDA_VISIBLE_DEVICES, Slurm and an outer claim limit it further.
        directory: of the locks.
        wait: seconds; 0 not at all, None for ever.
        note: for people.
        command: of the job, for people.
        on_wait: told once in a while what is missing.

    Raises:
        NotEnoughGpus: not now, and *wait* is 0.
        WaitTimeout: not within *wait* seconds.
        ImpossibleRequest: never on this machine.
        LockDirectoryError: the directory cannot be used.
        BackendError: the devices cannot be read.
    """
    outer = outer_claim(directory)
    deadline = None if wait is None else time.monotonic() + wait
    while True:
        bounded, snapshot = _read(backend, request, outer)
        taken: dict[str, str] = {}
        claim = _lock_best(backend, snapshot, bounded, directory, outer, taken)
        if claim:
            claim._write_record(directory, note, command)
            return claim
        error = _why_not(backend, snapshot, bounded, directory, outer, taken)
        if isinstance(error, ImpossibleRequest) or wait == 0:
            raise error
        tell = partial(on_wait, error) if on_wait else None
        _await_change(snapshot, bounded, directory, outer, deadline, tell)
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout(f"the time to wait is over: {error}", error.wanted, error.available, error.refused)


def look(backend: Backend, request: Request, directory: LockDirectory) -> tuple[Snapshot, Choice]:
    """What acquire() would take now, without taking it.

    The winners alone are read a second time, with their health: a poll of eight idle devices is 37 driver calls.
    """
    outer = outer_claim(directory)
    bounded, snapshot = _read(backend, request, outer)
    claims, taken = _claims(directory, snapshot, outer)
    verified: set[str] = set()
    while True:
        choice = choose(snapshot, bounded, taken)
        unread = [device.uuid for device in choice.devices if device.uuid not in verified]
        if not unread:
            return replace(snapshot, claims=claims), choice
        snapshot = snapshot.updated(backend.sample(fields_to_verify(bounded), unread))
        verified.update(unread)


def outer_claim(directory: LockDirectory, environ: Mapping[str, str] = os.environ) -> ClaimRecord | None:
    """The living claim of this user inside which this process runs, or None."""
    claim_id = environ.get("GPUGUARD_CLAIM", "")
    if not claim_id or "/" in claim_id:
        return None
    return read_record(directory, os.geteuid(), claim_id)


def _read(backend: Backend, request: Request, outer: ClaimRecord | None) -> tuple[Request, Snapshot]:
    """A first look at all devices, and *request* within the limits that others have set for this process."""
    snapshot = backend.sample(fields_needed(request))
    limits = outer_devices(os.environ, snapshot.devices)
    within, reason = limits.uuids, limits.reason
    if outer:
        within = tuple(uuid for uuid in outer.devices if within is None or uuid in within)
        reason = f"outside the claim {outer.id} that this runs in"
        # The outer claim's own processes do not make its devices busy, nor does the memory that they use.
        request = replace(request, mine_as_free=request.mine_as_free | {os.geteuid()}, tolerance=2**63)
    if within is None:
        return request, snapshot
    bounded = replace(request, within=within, within_reason=reason)
    if fields_needed(bounded) != fields_needed(request):
        snapshot = backend.sample(fields_needed(bounded))
    return bounded, snapshot


def _lock_best(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: dict[str, str],
) -> Claim | None:
    """Lock the best devices and read them again; None, and nothing locked, when that cannot be had.

    Fills *taken* with the devices that others were found to hold.
    """
    held: dict[str, tuple[_Lock, ...]] = {}
    verified: set[str] = set()
    try:
        with Gate(directory):
            while devices := choose(snapshot, request, taken).devices:
                wanted = {device.uuid for device in devices}
                for uuid in held.keys() - wanted:
                    _unlock(held.pop(uuid))
                if not all(_take(directory, device, held, taken, outer) for device in devices):
                    continue
                unread = wanted - verified
                if not unread:
                    locks = tuple(lock for device in devices for lock in held.pop(device.uuid))
                    return Claim(_new_id(outer), devices, locks)
                # Whatever happened between the first look and the lock shows now: a stranger's process, a lost device.
                snapshot = snapshot.updated(backend.sample(fields_to_verify(request), sorted(unread)))
                verified |= unread
        return None
    finally:
        for locks in held.values():
            _unlock(locks)


def _take(
    directory: LockDirectory,
    device: Device,
    held: dict[str, tuple[_Lock, ...]],
    taken: dict[str, str],
    outer: ClaimRecord | None,
) -> bool:
    if device.uuid in held:
        return True
    wanted = [(device.uuid, fcntl.LOCK_EX)]
    if device.parent_uuid:
        wanted.append((device.parent_uuid, fcntl.LOCK_SH))
    if outer:
        # The outer claim holds the device; this one excludes only its siblings in there.  Deeper ones share.
        wanted = [] if "." in outer.id else [(f"{device.uuid}.nested", fcntl.LOCK_EX)]
    locks: list[_Lock] = []
    for name, operation in wanted:
        try:
            lock = _locked(directory, name, operation)
        except LockDirectoryError as error:
            taken[device.uuid] = str(error)
            lock = None
        if lock is None:
            _unlock(locks)
            taken.setdefault(device.uuid, "claimed by somebody just now")
            return False
        locks.append(lock)
    held[device.uuid] = tuple(locks)
    return True


def _locked(directory: LockDirectory, name: str, operation: int) -> _Lock | None:
    descriptor = open_lock(directory, name)
    path = directory.lock_path(name)
    if try_flock(descriptor, operation) and is_same_file(descriptor, path):
        status = os.fstat(descriptor)
        return _Lock(descriptor, path, operation, (status.st_dev, status.st_ino))
    os.close(descriptor)
    return None


def _unlock(locks: Sequence[_Lock]) -> None:
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


def _lock_again(lock: _Lock) -> bool:
    for _ in range(_REASSERT_TRIES):
        if try_flock(lock.descriptor, lock.operation):
            return True
        time.sleep(0.01)
    return False


def _why_not(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: Mapping[str, str],
) -> NotEnoughGpus:
    """The error with all reasons."""
    taken = {**taken, **_claims(directory, snapshot, outer)[1]}
    unclaimed = [device.uuid for device in snapshot.devices if device.uuid not in taken]
    if unclaimed:
        # Whether it can ever be met depends on their health, and the reason on who uses them.
        details = VERIFY_FIELDS | fields_needed(request) | {PROCESSES, PROCESS_DETAILS, HEALTH}
        snapshot = snapshot.updated(backend.sample(details, unclaimed))
    return not_enough(snapshot, request, choose(snapshot, request, taken))


def _claims(
    directory: LockDirectory, snapshot: Snapshot, outer: ClaimRecord | None
) -> tuple[tuple[ClaimRecord, ...], dict[str, str]]:
    """The living claims, and uuid -> who stands in the way."""
    uuids = [device.uuid for device in snapshot.devices]
    claims = probe(directory, uuids)
    if outer is None:
        return claims, taken_by(claims, time.time())
    inner = locked_devices(directory, _lock_names(uuids, outer))
    return claims, {
        uuid: f"used by another command inside the claim {outer.id}" for uuid in uuids if f"{uuid}.nested" in inner
    }


def _await_change(
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    deadline: float | None,
    tell: Callable[[], object] | None,
) -> None:
    """Sleep until the driver is worth asking again: enough locks are free, and one more than before or ASK_SECONDS."""
    names = _lock_names([device.uuid for device in snapshot.devices], outer)
    locked_before = locked_devices(directory, names)
    ask_at = time.monotonic() + ASK_SECONDS
    while deadline is None or time.monotonic() < deadline:
        if tell:
            tell()
        time.sleep(POLL_SECONDS if deadline is None else max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
        locked = locked_devices(directory, names)
        enough = len(names) - len(locked) >= request.num_gpus
        if enough and (locked_before - locked or time.monotonic() >= ask_at):
            return


def _lock_names(uuids: Sequence[str], outer: ClaimRecord | None) -> list[str]:
    return [f"{uuid}.nested" for uuid in uuids] if outer else list(uuids)


def _new_id(outer: ClaimRecord | None) -> str:
    own = os.urandom(4).hex()
    return f"{outer.id}.{own}" if outer else own
