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

from gpuguard.attempt import (
    barred,
    claims_against,
    first_look,
    lock_best,
    look_again,
    outer_claim,
    sharing_of_claims,
    why_not,
)
from gpuguard.claims.hold import Claim
from gpuguard.claims.lockfiles import LockDirectory
from gpuguard.claims.records import locked_devices
from gpuguard.errors import BackendError, GpuguardError, ImpossibleRequest, NotEnoughGpus, WaitTimeout, passing
from gpuguard.model import HEALTH, MODEL, PROCESS_DETAILS, PROCESSES, ClaimRecord, Snapshot
from gpuguard.select import Choice, Request, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from gpuguard.backends import Backend
    from gpuguard.line.turn import InLine

    _Details = tuple[str | None, Sequence[str], float | None]  # of a claim: its note, command and time limit

POLL_SECONDS = 0.25  # between two looks at the locks while waiting: some 100 us each, no driver call
DRIVER_SECONDS = 600.0  # in which a driver may fail whoever waits: it is being loaded anew, or its sampler was killed
ASK_SECONDS = 2.0  # between two questions to the driver while locks are free but devices look busy, or nothing is seen
_in_queue: list[InLine] = []  # requests of this process that may wait, for pause_waiting()


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
    lines: list[InLine] = []  # at most one, as soon as somebody waits
    claim: Claim | None = None

    def join() -> InLine:
        _in_queue.append(_in_line(backend, directory, priority, time_limit, expected, note, command))
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
    join: Callable[[], InLine],
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
            bounded, snapshot = first_look(backend, ways, outer, environ, in_line=bool(line))
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
            error = _look_later(fault, ways[0], line, outer and error, deadline, on_wait, failures)
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout.after(error)


def _look_later(
    fault: Exception,
    request: Request,
    line: InLine | None,
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


def _in_line(backend: Backend, directory: LockDirectory, *details: Any) -> InLine:
    from gpuguard.line.turn import InLine

    return InLine(backend, directory, *details)


def _attempt(
    backend: Backend,
    snapshot: Snapshot,
    ways: Sequence[Request],
    directory: LockDirectory,
    outer: ClaimRecord | None,
    line: InLine | None,
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


def look(
    backend: Backend, request: Request, directory: LockDirectory, environ: Mapping[str, str] = os.environ
) -> tuple[Snapshot, Choice]:
    """What acquire() would take now, without taking it.

    The winners alone are read a second time, with their health: one of eight idle devices costs 31 driver calls.

    Raises:
        ClaimError: the daemon alone gives the locks, and there is none.
    """
    outer = outer_claim(directory, environ)
    if directory.closed and outer is None:
        from gpuguard.petition import refuse_without_daemon

        refuse_without_daemon(directory)
    is_reserved = outer is None and someone_waits(directory, ("reserve.",))
    (bounded,), snapshot = first_look(backend, (request,), outer, environ, in_line=is_reserved)
    claims, taken = claims_against(directory, snapshot, outer, request)
    taken |= barred(snapshot, directory, outer)
    if is_reserved:
        taken |= _reserved(backend, directory, snapshot, bounded)
    verified: set[str] = set()
    while True:
        choice = choose(snapshot, bounded, taken, sharing_of_claims(snapshot, bounded, claims, outer))
        unread = [device.uuid for device in choice.devices if device.uuid not in verified]
        if not unread:
            return replace(snapshot, claims=claims), choice
        snapshot = look_again(backend, snapshot, bounded, unread, taken)
        verified.update(unread)


def _reserved(backend: Backend, directory: LockDirectory, snapshot: Snapshot, request: Request) -> dict[str, str]:
    from gpuguard.line.turn import reserved_from

    return reserved_from(backend, directory, snapshot, request)


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
