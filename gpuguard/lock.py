"""From a request to a claim: look, lock the best devices, look again, all or nothing.

The two-key rule: a device is taken when its lock is free *and* it looks free, before and after it is locked.  Nothing
is held while waiting.  Does not rank devices (see select) and never breaks a lock (see hold).

A MIG instance is locked together with a shared lock on its GPU: so instances exclude their whole GPU and the other way
round, by the kernel.  A share of a device holds its lock shared too, beside a slot of it: see shares.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.claims.claim import Claim, Lock, unlock
from gpuguard.claims.directory import Gate, LockDirectory
from gpuguard.claims.records import locked_devices, probe, read_record
from gpuguard.claims.shares import lock_parts
from gpuguard.clusters import outer_devices
from gpuguard.errors import (
    BackendError,
    GpuguardError,
    ImpossibleRequest,
    LockDirectoryError,
    NotEnoughGpus,
    WaitTimeout,
    passing,
)
from gpuguard.model import (
    HEALTH,
    IDLE_PROCESSES,
    MODEL,
    PROCESS_DETAILS,
    PROCESSES,
    VERIFY_FIELDS,
    ClaimRecord,
    Device,
    Snapshot,
)
from gpuguard.request import ANY_MEMORY, Request, fields_needed, fields_to_verify
from gpuguard.select import Choice, choose, claimed_by, not_enough, possible, possible_desktops

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from gpuguard.backends import Backend
    from gpuguard.queue.explain import WaitingRequest
    from gpuguard.queue.priority import Ticket
    from gpuguard.sharing import Sharing

    _Details = tuple[str | None, Sequence[str], float | None]  # of a claim: its note, command and time limit

# One attempt to claim devices: look, lock the best ones, look again, all or nothing; or say why not.
#
# Holds nothing when it fails, and waits for nobody: see lock for trying again.


# Files of marks, root's and the daemon's: that module is read only where there are some.
_AGAINST = ("denied.json", "quarantined.json", "daemon/denied.json", "daemon/quarantined.json")


def outer_claim(directory: LockDirectory, environ: Mapping[str, str] = os.environ) -> ClaimRecord | None:
    """The living claim of this user inside which this process runs, or None."""
    claim_id = environ.get("GPUGUARD_CLAIM", "")
    if not claim_id or "/" in claim_id:
        return None
    return read_record(directory, os.geteuid(), claim_id)


def first_sample(
    backend: Backend,
    ways: Sequence[Request],
    outer: ClaimRecord | None,
    environ: Mapping[str, str],
    *,
    in_line: bool = False,
) -> tuple[list[Request], Snapshot]:
    """A first look at all devices, and *ways* within the limits that others have set for this process.

    A list of processes takes 4.5 ms of a real driver, so it is read of the winners alone, behind their locks.  Where
    others are *in_line*, whose plan must know what is busy, or where a memory in use is unknown, it is read of each
    device whose memory does not say already that it is busy.
    """
    listed = {IDLE_PROCESSES} if in_line else frozenset()
    fields = _union(ways) | listed
    snapshot = backend.sample(fields)
    if not listed and any(device.memory_used is None and not device.problems for device in snapshot.devices):
        fields |= {IDLE_PROCESSES}
        snapshot = backend.sample(fields)
    limits = outer_devices(environ, snapshot.devices)
    within, reason = limits.uuids, limits.reason
    if outer:
        within = tuple(uuid for uuid in outer.devices if within is None or uuid in within)
        reason = f"outside the claim {outer.id} that this runs in"
        # The outer claim's own processes do not make its devices busy, nor does the memory that they use.
        ways = [replace(way, mine_as_free=way.mine_as_free | {os.geteuid()}, tolerance=ANY_MEMORY) for way in ways]
    if within is None:
        return list(ways), snapshot
    bounded = [replace(way, within=within, within_reason=reason) for way in ways]
    if not _union(bounded) <= fields:
        snapshot = backend.sample(_union(bounded) | fields)
    return bounded, snapshot


def _union(ways: Sequence[Request]) -> frozenset[str]:
    return frozenset().union(*(fields_needed(way) for way in ways))


def lock_best(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: dict[str, str],
    ticket: Ticket | None = None,
    explain: Callable[[Claim], object] = lambda claim: None,
) -> Claim | None:
    """Lock the best devices and read them again; None, and nothing locked, when that cannot be had.

    Fills *taken* with the devices that others were found to hold.  The *ticket* of whoever waits is for the daemon,
    where it gives the locks.  *explain* says what the claim is for; whoever is interrupted before its end has none.
    """
    held: dict[str, tuple[Lock, ...]] = {}
    claim: Claim | None = None
    try:
        if directory.closed:
            from gpuguard.daemon.broker_client import request_grant

            claim = request_grant(snapshot, request, directory, outer, taken, ticket)
        else:
            with Gate(directory):
                claim = _locked(backend, snapshot, request, directory, outer, taken, held)
        if claim is not None:
            explain(claim)
            return claim
    except BaseException:  # who holds a lock that nobody knows of keeps it as long as he runs
        if claim is None:
            _unlock_all(held)
        else:
            claim.release()
        raise
    _unlock_all(held)
    return None


def _locked(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: dict[str, str],
    held: dict[str, tuple[Lock, ...]],
) -> Claim | None:
    """The claim of the best devices.  Fills *held* with what it has locked, also where it is interrupted."""
    verified: set[str] = set()
    sharing_now = _current_sharing(directory, request, outer)
    while True:
        choice = choose(snapshot, request, taken, sharing_now(held, snapshot))
        devices, wanted = choice.devices, {device.uuid for device in choice.devices}
        if not devices:
            desktops = possible_desktops(snapshot, choice)
            if not desktops:
                return None
            snapshot = sample_again(backend, snapshot, request, desktops, taken)
            continue
        for uuid in held.keys() - wanted:
            unlock(held.pop(uuid))
        if not all(_lock_chosen(directory, device, request, held, taken, outer) for device in devices):
            continue
        unread = wanted - verified
        if not unread:
            locks = tuple(lock for device in devices for lock in held[device.uuid])
            claim = Claim(_new_id(outer), devices, locks, memory=request.memory, most=request.most_sharers)
            if outer or not request.share or _join(directory, snapshot, request, claim, taken):
                return claim
            held.clear()  # it has given them back
            continue
        # Whatever happened between the first look and the lock shows now: a stranger's process, a lost device.
        snapshot = sample_again(backend, snapshot, request, sorted(unread), taken)
        verified |= unread


def _unlock_all(held: Mapping[str, Sequence[Lock]]) -> None:
    for locks in held.values():
        unlock(locks)


def _join(directory: LockDirectory, snapshot: Snapshot, request: Request, claim: Claim, taken: dict[str, str]) -> bool:
    from gpuguard.claims.shares import join

    return join(directory, snapshot, request, claim, taken)


def _current_sharing(
    directory: LockDirectory, request: Request, outer: ClaimRecord | None
) -> Callable[[Mapping[str, Sequence[Lock]], Snapshot], dict[str, Sharing]]:
    if not request.share or outer:
        return lambda held, snapshot: {}
    from gpuguard.claims.shares import sharing_now

    return lambda held, snapshot: sharing_now(directory, held, snapshot)


def sharing_of_claims(
    snapshot: Snapshot, request: Request, claims: Sequence[ClaimRecord], outer: ClaimRecord | None
) -> dict[str, Sharing]:
    """uuid -> who shares the device, for a request that may join them."""
    if not request.share or outer or not claims:
        return {}
    from gpuguard.claims.shares import sharing_of

    return sharing_of(snapshot, claims)


def sample_again(
    backend: Backend, snapshot: Snapshot, request: Request, uuids: Sequence[str], taken: dict[str, str]
) -> Snapshot:
    """*snapshot* with a fresh look at the winners; one that the driver does not show any more counts as taken."""
    fresh = backend.sample(fields_to_verify(request), uuids)
    for uuid in set(uuids) - {device.uuid for device in fresh.devices}:
        taken[uuid] = "the driver does not show it any more"
    return snapshot.updated(fresh)


def _lock_chosen(
    directory: LockDirectory,
    device: Device,
    request: Request,
    held: dict[str, tuple[Lock, ...]],
    taken: dict[str, str],
    outer: ClaimRecord | None,
) -> bool:
    if device.uuid in held:
        return True
    try:
        locks = lock_parts(directory, device, request, outer)
    except LockDirectoryError as error:
        taken[device.uuid] = str(error)
        return False
    if locks is None:
        taken.setdefault(device.uuid, "claimed just now")
        return False
    held[device.uuid] = locks
    return True


def why_not(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: Mapping[str, str],
    *,
    surely: bool = False,
) -> NotEnoughGpus:
    """The error with all reasons; *surely* reads what is claimed too, to tell whether it is for ever."""
    claims, others = claims_against(directory, snapshot, outer, request)
    taken = {**taken, **others, **barred(snapshot, directory, outer)}
    sharing = sharing_of_claims(snapshot, request, claims, outer)
    unclaimed = [device.uuid for device in snapshot.devices if surely or device.uuid not in taken]
    if unclaimed:
        # Whether it can ever be met depends on their health, and the reason on who uses them.
        details = VERIFY_FIELDS | fields_needed(request) | {PROCESSES, PROCESS_DETAILS, HEALTH}
        snapshot = snapshot.updated(backend.sample(details, unclaimed))
    choice = choose(snapshot, request, taken, sharing)
    if not surely and len(possible(choice).devices) < request.num_gpus:
        return why_not(backend, snapshot, request, directory, outer, taken, surely=True)
    return not_enough(snapshot, request, choice)


def claims_against(
    directory: LockDirectory, snapshot: Snapshot, outer: ClaimRecord | None, request: Request
) -> tuple[tuple[ClaimRecord, ...], dict[str, str]]:
    """The living claims, and uuid -> who stands in the way: to a request for a share nobody who shares."""
    uuids = [device.uuid for device in snapshot.devices]
    claims = probe(directory, uuids)
    if outer is None:
        alone = [record for record in claims if not (request.share and record.slots)]
        return claims, claimed_by(alone, time.time())
    inner = locked_devices(directory, [f"{uuid}.nested" for uuid in uuids])
    return claims, {
        uuid: f"used by another command inside the claim {outer.id}" for uuid in uuids if f"{uuid}.nested" in inner
    }


def barred(snapshot: Snapshot, directory: LockDirectory, outer: ClaimRecord | None) -> dict[str, str]:
    """uuid -> what was decided against the device, or against any new claim of this user."""
    if directory.owner is None or not any(os.path.lexists(f"{directory.path}/{name}") for name in _AGAINST):
        return {}
    from gpuguard.claims.restrictions import against

    uid = None if outer else os.geteuid()  # whoever has a claim already may divide it
    return against(directory, [device.uuid for device in snapshot.devices], uid, time.time())


def _new_id(outer: ClaimRecord | None) -> str:
    own = os.urandom(4).hex()
    if outer:
        return f"{outer.id}.{own}"
    job = os.environ.get("SLURM_JOB_ID", "")  # of a cluster whose prolog claims nothing: see clusters.slurm_jobs
    return f"slurm{job}-{own}" if job.isdecimal() and len(job) < 12 else own


POLL_SECONDS = 0.25  # between two looks at the locks while waiting: some 100 us each, no driver call
DRIVER_SECONDS = 600.0  # in which a driver may fail whoever waits: it is being loaded anew, or its sampler was killed
ASK_SECONDS = 2.0  # between two questions to the driver while locks are free but devices look busy, or nothing is seen
_in_queue: list[WaitingRequest] = []  # requests of this process that may wait, for pause_waiting()


def acquire(
    backend: Backend,
    request: Request,
    directory: LockDirectory,
    *,
    alternatives: Sequence[Request] = (),
    wait: float | None = 0.0,
    note: str | None = None,
    command: Sequence[str] = (),
    time_limit: float | None = None,
    expected: Callable[[], float | None] | None = None,
    priority: int = 0,
    on_wait: Callable[[NotEnoughGpus], None] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Claim:
    """Claim devices for *request*, all or none; nothing is held while waiting.

    Args:
        backend: of the machine; it is asked as little as possible, and not at all while too many locks are held.
        request: what is wanted; CUDA_VISIBLE_DEVICES, Slurm and an outer claim limit it further.
        directory: of the locks.
        alternatives: what will do as well, the best liked first.
        wait: seconds in line; 0 not at all, None for ever.
        note: for people.
        command: of the job, for people.
        time_limit: seconds from the claim on after which it ends, for people and for those who wait; None: unknown.
        expected: says how many seconds it takes otherwise, as far as anybody can tell; asked only by whoever waits.
        priority: in line, see line.order.PRIORITIES.
        on_wait: told once in a while what is missing, or every so many seconds as its attribute tell_every says; what
            it raises ends the waiting.
        environ: what limits the request.

    Raises:
        NotEnoughGpus: not now, and *wait* is 0.
        WaitTimeout: not within *wait* seconds.
        ImpossibleRequest: never on this machine.
        LockDirectoryError: the directory cannot be used.
        BackendError: the devices cannot be read; who waits in line looks again for DRIVER_SECONDS.
        OSError: no file, lock or memory is left for a look; who waits in line already looks again later instead.
    """
    outer, deadline = outer_claim(directory, environ), None if wait is None else time.monotonic() + wait
    lines: list[WaitingRequest] = []  # at most one, as soon as somebody waits
    claim: Claim | None = None

    def join() -> WaitingRequest:
        _in_queue.append(_waiting_request(backend, directory, priority, time_limit, expected, note, command))
        lines.append(_in_queue[-1])
        return lines[0]

    try:
        ways, details = (request, *alternatives), (note, command, time_limit)
        try:
            claim = _wait_for(backend, ways, directory, wait, deadline, details, join, on_wait, outer, environ)
        finally:
            for line in lines:
                _in_queue.remove(line)
                line.leave()
        return claim
    except BaseException:  # Ctrl-C, and once more while it leaves: nobody would know of the claim, or of the place
        for line in lines:
            line.leave()
        if claim is not None:
            claim.release()
        raise


def pause_waiting() -> bool:
    """Let other processes lead the queue while this one is stopped, until go_on_waiting(); whether it waits there.

    For the signal handler of SIGTSTP: it may be called at any moment.  The places in the queue stay.
    """
    for line in _in_queue:
        line.pause()
    return any(line.waits for line in _in_queue)


def go_on_waiting() -> None:
    """After pause_waiting(): lead the queue again, unless another process does by now."""
    for line in _in_queue:
        line.go_on()


def _wait_for(
    backend: Backend,
    ways: Sequence[Request],
    directory: LockDirectory,
    wait: float | None,
    deadline: float | None,
    details: _Details,
    join: Callable[[], WaitingRequest],
    on_wait: Callable[[NotEnoughGpus], None] | None,
    outer: ClaimRecord | None,
    environ: Mapping[str, str],
) -> Claim:
    """The claim, as soon as it can be had; *join* stands in line, once it is known that somebody waits."""
    line, error, failures = None, None, list[float]()
    while True:
        try:
            if line is None and outer is None and (error or someone_waits(directory)):
                line = join()
            bounded, snapshot = first_sample(backend, ways, outer, environ, in_line=bool(line))
            claim, error = _attempt(backend, snapshot, bounded, directory, outer, line, details)
            if claim is not None:
                return claim
            failures.clear()
            if isinstance(error, ImpossibleRequest) or wait == 0:
                raise error
            if outer:
                _await_sibling(snapshot, ways[0], directory, deadline, error, on_wait)
            elif line:  # else look once more, at all that its plan goes by
                error = line.sleep(snapshot, bounded, deadline, error, on_wait)
        except (OSError, MemoryError, GpuguardError) as fault:
            error = _sample_later(fault, ways[0], line, outer and error, deadline, on_wait, failures)
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout.after(error)


def _sample_later(
    fault: Exception,
    request: Request,
    line: WaitingRequest | None,
    waits_inside: object,
    deadline: float | None,
    on_wait: Callable[[NotEnoughGpus], None] | None,
    failures: list[float],
) -> NotEnoughGpus:
    """A pause of one who waits and cannot look now, which is no reason to lose his place: why he still waits.

    A driver that does not come back within DRIVER_SECONDS is one; *failures* are the times since the last good look.
    """
    waits, wanted = line.waits if line else waits_inside, request.num_gpus
    failures.append(time.monotonic())
    patience = DRIVER_SECONDS - (failures[-1] - failures[0])
    why = passing(fault) or (str(fault) if isinstance(fault, BackendError) and patience > 0 else None)
    if not waits or not why:
        raise fault
    if line:
        line.stand_aside()
    text = f"wanted {wanted} GPU{'s' * (wanted != 1)}: what is free cannot be seen now, and is tried again: {why}"
    error = NotEnoughGpus(text, wanted)
    if on_wait:
        on_wait(error)
    time.sleep(ASK_SECONDS if deadline is None else max(0.0, min(ASK_SECONDS, deadline - time.monotonic())))
    return error


def _ends(time_limit: float | None) -> float | None:
    return None if time_limit is None else round(time.time() + time_limit, 3)


def someone_waits(directory: LockDirectory, kinds: tuple[str, ...] = ("ticket.", "reserve.")) -> bool:
    """Whether there may be a line, or a reservation.  All that a command pays for both when there is neither."""
    starts = tuple(directory.prefix + kind for kind in kinds)
    return any(name.startswith(starts) for name in directory.names())


def _waiting_request(backend: Backend, directory: LockDirectory, *details: Any) -> WaitingRequest:
    from gpuguard.queue.explain import WaitingRequest

    return WaitingRequest(backend, directory, *details)


def _attempt(
    backend: Backend,
    snapshot: Snapshot,
    ways: Sequence[Request],
    directory: LockDirectory,
    outer: ClaimRecord | None,
    line: WaitingRequest | None,
    details: _Details,
) -> tuple[Claim | None, NotEnoughGpus]:
    """A claim if it is our turn and devices can be had, with its record; else why not."""

    def explain(claim: Claim) -> None:
        note, command, time_limit = details
        claim.explain(directory, note, command, ends=_ends(time_limit))
        if line:
            line.served(claim)

    taken = barred(snapshot, directory, outer)
    turn = line.turn(snapshot, ways) if line else None
    if turn:
        taken |= turn.kept
    ticket, nothing = turn.place.ticket if turn and turn.place else None, NotEnoughGpus("")
    for way in turn.ways if turn else ways:
        if (claim := lock_best(backend, snapshot, way, directory, outer, taken, ticket, explain)) is not None:
            return claim, nothing
    if line and line.waits and turn and turn.is_later:
        return None, turn.explained(NotEnoughGpus(f"wanted {ways[0].num_gpus} GPUs.", ways[0].num_gpus))
    surely = turn is not None and turn.is_impossible
    errors = [why_not(backend, snapshot, way, directory, outer, taken, surely=surely) for way in ways]
    error = next((each for each in errors if not isinstance(each, ImpossibleRequest)), errors[0])
    return None, turn.explained(error) if turn else error


def sample_and_lock(
    backend: Backend, request: Request, directory: LockDirectory, environ: Mapping[str, str] = os.environ
) -> tuple[Snapshot, Choice]:
    """What acquire() would take now, without taking it.

    The winners alone are read a second time, with their health: one of eight idle devices costs 31 driver calls.

    Raises:
        ClaimError: the daemon alone gives the locks, and there is none.
    """
    outer = outer_claim(directory, environ)
    if directory.closed and outer is None:
        from gpuguard.daemon.broker_client import refuse_without_daemon

        refuse_without_daemon(directory)
    is_reserved = outer is None and someone_waits(directory, ("reserve.",))
    (bounded,), snapshot = first_sample(backend, (request,), outer, environ, in_line=is_reserved)
    claims, taken = claims_against(directory, snapshot, outer, request)
    taken |= barred(snapshot, directory, outer)
    if is_reserved:
        taken |= _reserved(backend, directory, snapshot, bounded)
    verified: set[str] = set()
    while True:
        choice = choose(snapshot, bounded, taken, sharing_of_claims(snapshot, bounded, claims, outer))
        unread = [device.uuid for device in choice.devices if device.uuid not in verified]
        unread = unread or (possible_desktops(snapshot, choice) if not choice.devices else [])
        if not unread:
            return replace(snapshot, claims=claims), choice
        snapshot = sample_again(backend, snapshot, bounded, unread, taken)
        verified.update(unread)


def _reserved(backend: Backend, directory: LockDirectory, snapshot: Snapshot, request: Request) -> dict[str, str]:
    from gpuguard.queue.explain import reservation_start

    return reservation_start(backend, directory, snapshot, request)


def sample_closely(
    backend: Backend, request: Request, directory: LockDirectory, environ: Mapping[str, str] = os.environ
) -> tuple[Snapshot, Choice]:
    """What look() answers, with all that the reasons need: users and commands, health and model of each device.

    Nothing else is read, because what is read can decide between equal devices, and `run` must choose the same.
    """
    return sample_and_lock(_Closely(backend), request, directory, environ)


class _Closely:
    """A backend that reads more than it was asked for."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.simulated, self.close = backend.name, backend.simulated, backend.close
        self._sample = backend.sample

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        return self._sample({*fields, HEALTH, MODEL, PROCESSES, PROCESS_DETAILS}, devices)


def _await_sibling(
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    deadline: float | None,
    error: NotEnoughGpus,
    on_wait: Callable[[NotEnoughGpus], object] | None,
) -> None:
    """Sleep until another command inside the same claim is worth being asked for: there is no line in there."""
    names = [f"{device.uuid}.nested" for device in snapshot.devices]
    locked_before = locked_devices(directory, names)
    ask_at = time.monotonic() + ASK_SECONDS
    while deadline is None or time.monotonic() < deadline:
        if on_wait:
            on_wait(error)
        time.sleep(POLL_SECONDS if deadline is None else max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
        locked = locked_devices(directory, names)
        enough = len(names) - len(locked) >= request.num_gpus
        if enough and (locked_before - locked or time.monotonic() >= ask_at):
            return
