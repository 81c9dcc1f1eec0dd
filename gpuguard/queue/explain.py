"""The queue for one request: whether it may start, waiting for that, and its position and start in words.

Reads the claims, the restrictions of users and devices, recent use, and the site's rules; the queue and
its plan follow from that (see state).  Does not sleep (see waiter) and claims nothing (see lock).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import replace as replace_noun
from functools import partial

from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import Gate, LockDirectory
from gpuguard.claims.probe import probe_in_gate
from gpuguard.claims.restrictions import (
    DENIED,
    QUARANTINED,
    SET_BACK,
    quarantine_text,
    read_restrictions,
    restriction_files,
)
from gpuguard.claims.room import why_full
from gpuguard.errors import BackendError, GpuguardError, ImpossibleRequest, LockDirectoryError, NotEnoughGpus
from gpuguard.history.queries import query_store, store_path
from gpuguard.model import MEMORY, PROCESSES, VERIFY_FIELDS, ClaimRecord, Snapshot
from gpuguard.queue.backfill import QueuePosition, promise
from gpuguard.queue.calendar import PlannedReservation, clock_text
from gpuguard.queue.priority import QueueRules, Ticket
from gpuguard.queue.reservation_store import arrive
from gpuguard.queue.reservations import reservation_calendar, with_reserved_instances
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.state import QueueFacts, QueueState, queue_state, reserved_for_others
from gpuguard.queue.tickets import write_served
from gpuguard.queue.waiter import Waiter
from gpuguard.request import Request, fields_needed
from gpuguard.select import waiting_error
from gpuguard.units import format_duration
from gpuguard.users import user_name

REFRESH_SECONDS = 60.0  # the greatest age of the position that a waiting user reads
USAGE_SECONDS = 60.0  # the greatest age of what is known of the users' GPU time
_known_usage: dict[str, tuple[float, dict[int, float] | None]] = {}  # path -> monotonic time, answer


def read_queue(
    directory: LockDirectory, snapshot: Snapshot, rules: QueueRules, mine: Ticket | None = None
) -> QueueState:
    """The queue as it is now; with *mine* at its end, if that has no file yet.

    Args:
        directory: of the claims.
        snapshot: with the fields that the requests of the queue need.
        rules: of the site.
        mine: the caller's ticket.
    """
    return queue_state(directory, snapshot, _facts(directory, snapshot, rules), rules, mine)


def reservation_start(
    backend: Backend, directory: LockDirectory, snapshot: Snapshot, request: Request
) -> dict[str, str]:
    """uuid -> for which user it is reserved, of the devices that this user could not have now in an empty queue."""
    snapshot = with_reserved_instances(backend, directory, snapshot)
    facts = _facts(directory, snapshot, QueueRules(fair_share=False))
    return reserved_for_others(snapshot, facts, new_ticket([request]))


class WaitingRequest:
    """A request that may have to wait, from its first sample on until leave().

    Args:
        backend: of the machine.
        directory: of the claims.
        priority, time_limit, expected, note, command: of the request, see lock.acquire.
    """

    def __init__(self, backend: Backend, directory: LockDirectory, job: JobDetails) -> None:
        self._backend, self._directory = backend, directory
        lasts = job.expected() if job.expected and job.time_limit is None else None
        self._ticket = partial(
            new_ticket,
            priority=job.priority,
            time_limit=job.time_limit,
            expected=lasts,
            note=job.note,
            command=job.command,
        )
        self._rules = read_queue_settings().rules
        self._waiter: Waiter | None = None
        self._was_turn = self._was_called = False  # since the last call of turn()
        self._fields = frozenset({MEMORY, PROCESSES})  # that the requests of the queue need, if this process leads it
        self._bookings: tuple[PlannedReservation, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it has a ticket."""
        return self._waiter is not None

    def turn(self, snapshot: Snapshot, ways: Sequence[Request]) -> QueueAnswer:
        """Whether it may start now, by its own sample."""
        mine = self._waiter.ticket if self._waiter else self._ticket(ways)
        turn = self._turn(snapshot, ways, mine)
        if self._was_turn or (self._was_called and not turn.ways):
            turn = self._turn(self._closer(snapshot), ways, mine)
        self._was_turn, self._was_called = bool(turn.ways), False
        # A user who has to wait for their own reservation has come, too.
        self._bookings = turn.line.facts.reservations
        arrive(self._directory, self._bookings)
        return turn

    def _turn(self, snapshot: Snapshot, ways: Sequence[Request], mine: Ticket) -> QueueAnswer:
        snapshot = with_reserved_instances(self._backend, self._directory, snapshot)
        line = read_queue(self._directory, snapshot, self._rules, mine)
        return QueueAnswer(line, line.of(mine.id), tuple(ways))

    def _closer(self, snapshot: Snapshot) -> Snapshot:
        """With the health of all devices: a start that failed may have been planned on a broken one."""
        try:
            return snapshot.updated(self._backend.sample({PROCESSES, *VERIFY_FIELDS}))
        except BackendError:
            return snapshot

    def sleep(
        self,
        snapshot: Snapshot,
        ways: Sequence[Request],
        deadline: float | None,
        error: NotEnoughGpus,
        on_wait: Callable[[NotEnoughGpus], object] | None,
    ) -> NotEnoughGpus:
        """Wait until it is worth to try again, or until the *deadline* (monotonic); returns why it had to wait."""
        if self._waiter is None:
            self._waiter = self._join(snapshot, ways)
            error = self.turn(snapshot, ways).explained(error)
        told = time.monotonic()

        def tell() -> None:
            nonlocal error, told
            if on_wait is None:
                return
            if time.monotonic() - told >= REFRESH_SECONDS:
                told, error = time.monotonic(), self.turn(snapshot, ways).explained(error)
            on_wait(error)

        seconds = None if deadline is None else deadline - time.monotonic()
        self._waiter.sleep(seconds, tell, getattr(on_wait, "tell_every", None))
        self._was_called = True
        return error

    def served(self, claim: Claim) -> None:
        """It has started; if it has a reservation, its user has come to it."""
        write_served(self._directory)
        # The end of a job on other devices is no sign of that: it would bring back a reservation that is over.
        devices = {device.uuid for device in claim}
        claim.arrival_files = arrive(
            self._directory, [one for one in self._bookings if not devices.isdisjoint(one.devices)]
        )

    def stand_aside(self) -> None:
        """Let another process lead the queue; the position stays."""
        if self._waiter:
            self._waiter.stand_aside()

    def pause(self) -> None:
        """See Waiter.pause."""
        if self._waiter:
            self._waiter.pause()

    def go_on(self) -> None:
        """See Waiter.go_on."""
        if self._waiter:
            self._waiter.go_on()

    def leave(self) -> None:
        """Wait no longer."""
        if self._waiter:
            self._waiter.leave()

    def _join(self, snapshot: Snapshot, ways: Sequence[Request]) -> Waiter:
        mine = self._ticket(ways)
        line = read_queue(self._directory, snapshot, self._rules, mine)
        mine = replace(mine, promise=promised(line, self._rules, mine))
        try:
            return Waiter(
                self._directory, [device.uuid for device in snapshot.devices], mine, partial(self._survey, line)
            )
        except OSError as error:
            why = why_full(self._directory, error)
            raise LockDirectoryError(
                f"no ticket can be written into {self._directory.records}: {why}.  Try --no-wait."
            ) from error

    def _survey(self, before: QueueState, closely: bool) -> QueueState:
        """A sample for all that wait.  While the driver fails, no request starts, and it is read again later."""
        try:
            snapshot = self._backend.sample(self._fields)
            if closely:
                snapshot = self._closer(snapshot)
            snapshot = with_reserved_instances(self._backend, self._directory, snapshot)
            line = read_queue(self._directory, snapshot, self._rules)
            needed = frozenset().union(*(fields_needed(way) for one in line.places for way in one.ticket.requests))
            if needed <= self._fields:
                return line
            self._fields |= needed
        except BackendError:
            return replace(before, places=())
        return self._survey(before, closely)


@dataclass(frozen=True)
class QueueAnswer:
    """The position of one request at one moment."""

    line: QueueState
    place: QueuePosition | None
    asked: tuple[Request, ...]

    @property
    def ways(self) -> tuple[Request, ...]:
        """The alternative that may be claimed now."""
        if self.place is None or not self.place.now or self.place.request is None:
            return ()
        chosen = self.asked[self.place.ticket.requests.index(self.place.request)]
        alone = len(self.line.places) == 1
        return (chosen if alone else replace_noun(chosen, max_gpus=None),)

    @property
    def is_later(self) -> bool:
        """Whether the driver need not be read: another request starts first."""
        return self.place is not None and not self.place.now and self.place.request is not None

    @property
    def is_impossible(self) -> bool:
        """Whether it can never start, as the queue has it."""
        return self.place is not None and self.place.request is None and self.place.ticket.after is None

    @property
    def kept(self) -> dict[str, str]:
        """uuid -> for which user it is kept, of devices that others may claim now."""
        return self.line.kept_for_others(self.place.ticket.id) if self.place else {}

    def explained(self, error: NotEnoughGpus) -> NotEnoughGpus:
        """*error* with queue position and estimated start; one that waiting cannot help is returned as it is."""
        if self.place is None or isinstance(error, ImpossibleRequest):
            return error
        where = position_text(self.place, self.line)
        if not self.place.ticket.id and not self.place.ticket.after:  # not queued, but could be
            where = f"not now; it would be {where}"
        return waiting_error(self.place.ticket.num_gpus, where, error)


def new_ticket(
    ways: Sequence[Request],
    *,
    priority: int = 0,
    time_limit: float | None = None,
    expected: float | None = None,
    note: str | None = None,
    command: Sequence[str] = (),
    after: str | None = None,
) -> Ticket:
    """A ticket of this process that has no file yet, so no position and no promise."""
    uid = os.geteuid()
    return Ticket(
        id="",
        uid=uid,
        user=user_name(uid),
        since=time.time(),
        requests=tuple(ways),
        priority=priority,
        time_limit=time_limit,
        expected=expected,
        after=after,
        pid=os.getpid(),
        note=note,
        command=tuple(command),
    )


def promised(line: QueueState, rules: QueueRules, ticket: Ticket) -> float | None:
    """By when *ticket* starts at the latest when it joins *line*, unix time; None: unknown."""
    place = line.of(ticket.id)
    return promise(place, rules, line.now) if place else None


def _facts(directory: LockDirectory, snapshot: Snapshot, rules: QueueRules) -> QueueFacts:
    now = time.time()
    uuids = [device.uuid for device in snapshot.devices]
    marks, denials = read_restrictions(directory, QUARANTINED, now), read_restrictions(directory, DENIED, now)
    set_back = {} if directory.keeper is None else read_restrictions(directory, SET_BACK, now)
    ends = [mark.until for mark in (*marks.values(), *denials.values(), *set_back.values()) if mark.until is not None]
    with Gate(directory):
        claims = probe_in_gate(directory, uuids)  # holders, from all of /proc, do not matter here
    booked = reservation_calendar(directory, uuids, claims, now)
    return QueueFacts(
        claims=claims,
        quarantined={uuid: quarantine_text(marks[uuid]) for uuid in uuids if uuid in marks},
        denied=frozenset(int(uid) for uid in denials if uid.isdecimal() and len(uid) <= 10),
        usage=_usage(directory, rules) if rules.fair_share else {},
        set_back=frozenset(set_back),
        reservations=booked.reservations,
        reserved=booked,
        changes_at=min([*ends, booked.changes_at]),
        mark_files=restriction_files(directory) if marks or denials or set_back else (),
    )


def _usage(directory: LockDirectory, rules: QueueRules) -> dict[int, float] | None:
    """uid -> recent GPU-seconds from the daemon's store; None without one."""
    path, now = store_path(directory), time.monotonic()
    asked, known = _known_usage.get(path, (-USAGE_SECONDS, None))
    if now - asked >= USAGE_SECONDS:
        try:
            known = query_store(path, lambda usage: usage.decayed(rules.half_life))
        except GpuguardError:
            known = None
        _known_usage[path] = now, known
    return known


def position_text(place: QueuePosition, line: QueueState) -> str:
    """``"number 2 of 3 in line, starts in about 2h"``; of who has no place without a number."""
    words = start_text(place, line)
    return words if place.ticket.after else f"number {place.number} of {len(line.places)} in line, {words}"


def start_text(place: QueuePosition, line: QueueState) -> str:
    """When it starts and why not earlier: ``"starts in about 2h, when device 3 is free: earlier jobs of al"``."""
    if place.ticket.after:
        return f"not in line yet: {place.ticket.after}"
    if place.now:
        return "starts now"
    if place.held_back_by:
        return f"held back: it would delay {_who(place.held_back_by, line)}{_and_then(place, line)}"
    if place.request is None:
        return "no devices for it as things are"
    if not place.devices:
        return "too far behind for a plan"
    if place.start is None:
        return f"nobody knows when it starts: {_unknown_ends(place, line)}"
    why = _freed_by(place, line)
    return f"starts in about {_until(place.start, line)}{', ' + why if why else ''}"


def _who(name: str, line: QueueState) -> str:
    other = line.of(name)
    if other is None:
        booking = next((one for one in line.facts.reservations if one.id == name), None)
        return _reservation(booking, line.now) if booking else f"reservation {name}"
    return f"{other.ticket.user}'s request for {other.ticket.num_gpus}, which came before"


def _reservation(booking: PlannedReservation, now: float) -> str:
    begun = booking.begins <= now
    when = f"until {clock_text(booking.ends, now)}" if begun else f"from {clock_text(booking.begins, now)}"
    return f"the reservation of {booking.user} {when}"


def _and_then(place: QueuePosition, line: QueueState) -> str:
    """When it starts if it waits for the end of a reservation, and how it could start before it."""
    booking = next((one for one in line.facts.reservations if one.id == place.held_back_by), None)
    if booking is None:
        return ""
    later = f"; starts in about {_until(place.start, line)}" if place.start is not None else ""
    return later + "; with a --time-limit that ends before, it could start now" * (
        booking.begins > line.now and place.ticket.time_limit is None
    )


def _until(start: float, line: QueueState) -> str:
    return format_duration(round(max(0.0, start - line.now)))


def _freed_by(place: QueuePosition, line: QueueState) -> str:
    """Which device is the last one to be free, and what says so."""
    for booking in line.facts.reservations:
        if place.start is not None and abs(booking.ends - place.start) < 1.0:
            return f"after {_reservation(booking, line.now)}"
    for uuid in place.devices:
        claim = _last_claim(uuid, line)
        if claim is None:
            continue
        end = claim.ends if claim.ends is not None else claim.expected
        if end is not None and place.start is not None and abs(end - place.start) < 1.0:
            how = "time limit" if claim.ends is not None else "earlier jobs"
            return f"when device {_index(uuid, line)} is free: {how} of {claim.user}'s job"
    before = [other for other in line.places[: place.number - 1] if set(other.devices) & set(place.devices)]
    return f"after {before[-1].ticket.user}'s request" if before else ""


def _unknown_ends(place: QueuePosition, line: QueueState) -> str:
    before = [other for other in line.places[: place.number - 1] if set(other.devices) & set(place.devices)]
    if before:
        return f"{before[-1].ticket.user}'s request before it has no time limit"
    claims = {claim.id: claim for uuid in place.devices if (claim := _last_claim(uuid, line))}
    blind = [claim for claim in claims.values() if claim.ends is None and claim.expected is None]
    if claims and not blind:
        return "a job is over its time"
    if not blind:
        used = any(device.processes for device in line.snapshot.devices if device.uuid in place.devices)
        return "a device is in use without a claim" if used else "a device is not free, though nobody has claimed it"
    names = sorted({claim.user for claim in blind})
    jobs = "jobs of {} have" if len(blind) > 1 else "job of {} has"
    return f"the {jobs.format(' and '.join(names))} no time limit"


def _last_claim(uuid: str, line: QueueState) -> ClaimRecord | None:
    return next((claim for claim in line.facts.claims if uuid in claim.devices), None)


def _index(uuid: str, line: QueueState) -> str:
    device = line.snapshot.device(uuid)
    return str(device.index) if device else uuid
