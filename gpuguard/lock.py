"""From a request to a claim: look, lock the best devices, look again, all or nothing.

The two-key rule: a device is taken when its lock is free *and* it looks free, before and after it is locked.  Nothing
is held while waiting.  Does not rank devices (see select) and never breaks a lock (see hold).

A MIG instance is locked together with a shared lock on its GPU: so instances exclude their whole GPU and the other way
round, by the kernel.
"""

from __future__ import annotations

import fcntl
import os
import time
from functools import partial

from gpuguard.clusters import outer_devices
from gpuguard.errors import ImpossibleRequest, LockDirectoryError, NotEnoughGpus, WaitTimeout
from gpuguard.hold import Claim, Lock, take_lock, unlock
from gpuguard.lockfiles import Gate, LockDirectory
from gpuguard.model import HEALTH, MODEL, PROCESS_DETAILS, PROCESSES, VERIFY_FIELDS, ClaimRecord, Device, Snapshot
from gpuguard.nouns import replace
from gpuguard.records import locked_devices, probe, read_record
from gpuguard.select import Choice, Request, choose, fields_needed, fields_to_verify, not_enough, taken_by

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpuguard.backends import Backend

POLL_SECONDS = 0.25  # between two looks at the locks while waiting: some 100 us each, no driver call
_AGAINST = ("denied", "quarantined")  # kinds of marks: that module is read only where there are some
ASK_SECONDS = 2.0  # between two questions to the driver while locks are free but devices look busy


def acquire(
    backend: Backend,
    request: Request,
    directory: LockDirectory,
    *,
    wait: float | None = 0.0,
    note: str | None = None,
    command: Sequence[str] = (),
    on_wait: Callable[[NotEnoughGpus], None] | None = None,
    environ: Mapping[str, str] = os.environ,
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
        environ: what limits the request.

    Raises:
        NotEnoughGpus: not now, and *wait* is 0.
        WaitTimeout: not within *wait* seconds.
        ImpossibleRequest: never on this machine.
        LockDirectoryError: the directory cannot be used.
        BackendError: the devices cannot be read.
    """
    outer = outer_claim(directory, environ)
    deadline = None if wait is None else time.monotonic() + wait
    while True:
        bounded, snapshot = _read(backend, request, outer, environ)
        taken = _barred(snapshot, directory, outer)
        claim = _lock_best(backend, snapshot, bounded, directory, outer, taken)
        if claim:
            claim.explain(directory, note, command)
            return claim
        error = _why_not(backend, snapshot, bounded, directory, outer, taken)
        if isinstance(error, ImpossibleRequest) or wait == 0:
            raise error
        tell = partial(on_wait, error) if on_wait else None
        _await_change(snapshot, bounded, directory, outer, deadline, tell)
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout(f"the time to wait is over: {error}", error.wanted, error.available, error.refused)


def look(
    backend: Backend, request: Request, directory: LockDirectory, environ: Mapping[str, str] = os.environ
) -> tuple[Snapshot, Choice]:
    """What acquire() would take now, without taking it.

    The winners alone are read a second time, with their health: one of eight idle devices costs 39 driver calls.
    """
    outer = outer_claim(directory, environ)
    bounded, snapshot = _read(backend, request, outer, environ)
    claims, taken = _claims(directory, snapshot, outer)
    taken |= _barred(snapshot, directory, outer)
    verified: set[str] = set()
    while True:
        choice = choose(snapshot, bounded, taken)
        unread = [device.uuid for device in choice.devices if device.uuid not in verified]
        if not unread:
            return replace(snapshot, claims=claims), choice
        snapshot = _read_again(backend, snapshot, bounded, unread, taken)
        verified.update(unread)


def look_closely(
    backend: Backend, request: Request, directory: LockDirectory, environ: Mapping[str, str] = os.environ
) -> tuple[Snapshot, Choice]:
    """What look() answers, with all that the reasons need: users and commands, health and model of each device.

    Nothing else is read, because what is read can decide between equal devices, and `run` must choose the same.
    """
    return look(_Closely(backend), request, directory, environ)


class _Closely:
    """A backend that reads more than it was asked for."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.simulated = backend.name, backend.simulated
        self._backend = backend

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        return self._backend.sample({*fields, HEALTH, MODEL, PROCESSES, PROCESS_DETAILS}, devices)

    def close(self) -> None:
        self._backend.close()


def outer_claim(directory: LockDirectory, environ: Mapping[str, str] = os.environ) -> ClaimRecord | None:
    """The living claim of this user inside which this process runs, or None."""
    claim_id = environ.get("GPUGUARD_CLAIM", "")
    if not claim_id or "/" in claim_id:
        return None
    return read_record(directory, os.geteuid(), claim_id)


def _read(
    backend: Backend, request: Request, outer: ClaimRecord | None, environ: Mapping[str, str]
) -> tuple[Request, Snapshot]:
    """A first look at all devices, and *request* within the limits that others have set for this process."""
    snapshot = backend.sample(fields_needed(request))
    limits = outer_devices(environ, snapshot.devices)
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
    held: dict[str, tuple[Lock, ...]] = {}
    verified: set[str] = set()
    try:
        with Gate(directory):
            while devices := choose(snapshot, request, taken).devices:
                wanted = {device.uuid for device in devices}
                for uuid in held.keys() - wanted:
                    unlock(held.pop(uuid))
                if not all(_take(directory, device, held, taken, outer) for device in devices):
                    continue
                unread = wanted - verified
                if not unread:
                    locks = tuple(lock for device in devices for lock in held.pop(device.uuid))
                    return Claim(_new_id(outer), devices, locks)
                # Whatever happened between the first look and the lock shows now: a stranger's process, a lost device.
                snapshot = _read_again(backend, snapshot, request, sorted(unread), taken)
                verified |= unread
        return None
    finally:
        for locks in held.values():
            unlock(locks)


def _read_again(
    backend: Backend, snapshot: Snapshot, request: Request, uuids: Sequence[str], taken: dict[str, str]
) -> Snapshot:
    """*snapshot* with a fresh look at the winners; one that the driver does not show any more counts as taken."""
    fresh = backend.sample(fields_to_verify(request), uuids)
    for uuid in set(uuids) - {device.uuid for device in fresh.devices}:
        taken[uuid] = "the driver does not show it any more"
    return snapshot.updated(fresh)


def _take(
    directory: LockDirectory,
    device: Device,
    held: dict[str, tuple[Lock, ...]],
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
    locks: list[Lock] = []
    for name, operation in wanted:
        try:
            lock = take_lock(directory, name, operation)
        except LockDirectoryError as error:
            taken[device.uuid] = str(error)
            lock = None
        if lock is None:
            unlock(locks)
            taken.setdefault(device.uuid, "claimed by somebody just now")
            return False
        locks.append(lock)
    held[device.uuid] = tuple(locks)
    return True


def _why_not(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: Mapping[str, str],
) -> NotEnoughGpus:
    """The error with all reasons."""
    taken = {**taken, **_claims(directory, snapshot, outer)[1], **_barred(snapshot, directory, outer)}
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


def _barred(snapshot: Snapshot, directory: LockDirectory, outer: ClaimRecord | None) -> dict[str, str]:
    """uuid -> what was decided against the device, or against any new claim of this user."""
    if directory.owner is None or not any(os.path.lexists(f"{directory.path}/{kind}.json") for kind in _AGAINST):
        return {}
    from gpuguard.marks import against

    uid = None if outer else os.geteuid()  # whoever has a claim already may divide it
    return against(directory, [device.uuid for device in snapshot.devices], uid, time.time())


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
