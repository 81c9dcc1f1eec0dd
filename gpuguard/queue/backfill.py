"""Backfill: which tickets of the queue start now, which later and when, and why not earlier.

Each request in turn is planned on the devices that will do and are free first; what becomes of it is its *planned
start*.  Whoever joins the line is promised that start plus a quarter of the wait until then.  Shorter jobs may go first
as long as everybody still starts by his promise, and nobody whose user had more than you can put yours off.  Where no
start can be planned, because nobody knows when the jobs end, small requests pass a big one until it has waited for the
bound of the site; from then on the devices that it could use stay empty until they suffice.

On 92 days of a full server (Philly, 356 jobs) this has a mean wait of 37 h and a longest one of 386 h, against 162 and
463 in order of arrival: benchmarks/replay.py.  Nothing is held for anybody who waits; and a plan claims nothing.
What is kept for a reservation nobody else gets, and its user gets it without waiting for others: see booking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuguard.queue.calendar import (
    HORIZON_SECONDS,
    Calendar,
    Calendars,
    DeviceAvailability,
    PlannedReservation,
    StartingJob,
    clear_at,
    in_the_way,
)
from gpuguard.queue.priority import QueueRules, Ticket, due_at, overdue
from gpuguard.request import Request

# What a plan consists of: planned starts, and until when devices are busy by them.
#
# Does not decide who starts when: see plan.


UNKNOWN = float("inf")  # some day


@dataclass(frozen=True)
class PlannedStart:
    """A start (unix time) on devices: inf is some day, None for the request never."""

    start: float
    request: Request | None = None
    devices: tuple[str, ...] = ()


NEVER = PlannedStart(UNKNOWN)


class BusyDevices:
    """Until when the devices of a plan are busy: for whoever wants one alone, and for whoever shares."""

    def __init__(self, alone: dict[str, float] | None = None, shared: dict[str, float] | None = None) -> None:
        self._alone, self._shared = alone or {}, shared or {}

    def copy(self) -> BusyDevices:
        """One that can be filled further."""
        return BusyDevices(dict(self._alone), dict(self._shared))

    def until(self, *, shared: bool) -> Mapping[str, float]:
        """uuid -> unix time, of those on which something is planned."""
        return self._shared if shared else self._alone

    def add(self, it: PlannedStart, lasts: float | None, relatives: Mapping[str, tuple[str, ...]]) -> None:
        """Something runs on its devices from its start on."""
        if it.request is None:
            return
        until = UNKNOWN if lasts is None else it.start + lasts
        for uuid in it.devices:
            for each in (uuid, *relatives.get(uuid, ())):
                for taken in (self._alone,) if it.request.share else (self._alone, self._shared):
                    taken[each] = max(until, taken.get(each, until))


MOST_PLANNED = 256  # tickets; those behind them get no planned start yet
FIRST_OF_USER = 4  # tickets of each user that are planned in any case, so that no user can fill the plan
MOST_TRIED = 64  # lengths that are tried one by one


@dataclass(frozen=True)
class Fit:
    """The devices for one request.

    Args:
        eligible: uuids of those that could ever satisfy it, best first.
        open: those of them that do now.
    """

    eligible: tuple[str, ...]
    open: frozenset[str]


@dataclass(frozen=True)
class Machine:
    """What a plan is made of.

    Args:
        fits: request -> its devices, for all requests of the queue.
        ends: uuid -> unix time at which its claim will end; without the devices for which that is unknown.
        kin: uuid -> uuids that cannot be used beside it: a GPU and its MIG instances.
        bookings: that are not over.
        free: uuids that are not in use, for the reservations.
        limits: uuid -> unix time at which a time limit ends its last claim, for the bookings.
    """

    fits: Mapping[Request, Fit]
    ends: Mapping[str, float] = field(default_factory=dict)
    relatives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reservations: tuple[PlannedReservation, ...] = ()
    free: frozenset[str] = frozenset()
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class QueuePosition:
    """The position of a ticket in the queue, and its planned start.

    Args:
        ticket: whose place it is.
        number: 1 is the first.
        start: unix time of its planned start, None: unknown.
        in_order: the same if no ticket behind it started first.
        now: whether it may start now.
        request: the way that is planned; None: it can never start on this machine.
        devices: uuids that are planned for it.
        passes: id of the ticket that it would have to pass, or of the reservation.
        kept: uuid -> the reservation for which it must leave the device alone.
    """

    ticket: Ticket
    number: int
    start: float | None
    in_order: float | None
    now: bool = False
    request: Request | None = None
    devices: tuple[str, ...] = ()
    held_back_by: str | None = None
    kept: Mapping[str, PlannedReservation] = field(default_factory=dict)


def promise(place: QueuePosition, rules: QueueRules, now: float) -> float | None:
    """By when the job starts at the latest, if the time limits before it are kept; None where that is unknown.

    A quarter more than planned: of 0 to 40 % that gave the least mean wait within the longest one of FIFO.
    """
    return None if place.in_order is None else now + (1 + rules.patience) * (place.in_order - now)


def plan(
    line: Sequence[Ticket], machine: Machine, usage: Mapping[int, float], rules: QueueRules, now: float
) -> list[QueuePosition]:
    """The positions of *line*, which is in order.

    Args:
        line: see line.order.
        machine: its devices.
        usage: uid -> recent GPU-seconds.
        rules: of the site.
        now: unix time.
    """
    waiting = planned_for(line)
    late = overdue([ticket for ticket in line if ticket.since + rules.bound < now], rules, now)
    plans = _Planner(machine, usage, rules, now, late)
    in_order = plans.schedule(waiting)
    starting: dict[str, PlannedStart] = {}
    while chosen := plans.next_to_start(waiting):
        starting[chosen[0].id] = chosen[1]
        waiting.remove(chosen[0])
    planned = plans.schedule(waiting) if starting else in_order
    places = []
    for number, ticket in enumerate(line, 1):
        first = _known(in_order.get(ticket.id, NEVER).start)
        now = ticket.id in starting
        it = starting.get(ticket.id) or planned.get(ticket.id) or PlannedStart(UNKNOWN, ticket.requests[0])
        # A ticket that fits now is held back for another one: until when is unknown.
        held = None if now else plans.held_back.get(ticket.id)
        start = None if held and held not in plans.reserved else _known(it.start)
        kept = plans.kept_for_others(ticket, it) if machine.reservations else {}
        places.append(QueuePosition(ticket, number, start, first, now, it.request, it.devices, held, kept))
    return places


def planned_for(line: Sequence[Ticket]) -> list[Ticket]:
    """Those of *line* that get a planned start."""
    waiting: list[Ticket] = []
    of_user: dict[int, int] = {}
    for ticket in line:
        if ticket.after is None:
            of_user[ticket.owner] = of_user.get(ticket.owner, 0) + 1
            if len(waiting) < MOST_PLANNED or of_user[ticket.owner] <= FIRST_OF_USER:
                waiting.append(ticket)
    return waiting


def _known(start: float) -> float | None:
    return None if start == UNKNOWN else start


@dataclass(frozen=True)
class _Alternative:
    """One kind of request, its devices, and when each is free if no other ticket starts."""

    request: Request
    fit: Fit
    first: list[float]


class _Planner:
    """The plan in the making: what starts now is added to *busy*, and everything after it is planned anew."""

    def __init__(
        self, machine: Machine, usage: Mapping[int, float], rules: QueueRules, now: float, late: frozenset[str]
    ) -> None:
        # Not those that only missed their promise: it may rest on an estimate that a job exceeded a minute ago.
        self.machine, self.usage, self.rules, self.now, self.late = machine, usage, rules, now, late
        self.busy = BusyDevices()
        self.started: list[StartingJob] = []
        self.reserved = tuple(booking.id for booking in machine.reservations)
        free_at = {uuid: end for uuid, end in machine.limits.items() if end > now} | dict.fromkeys(machine.free, now)
        self.calendars = Calendars(machine.reservations, DeviceAvailability(free_at, relatives=machine.relatives), now)
        self.calendar: Calendar = {}  # what is kept for reservations, as the schedule of the queue has it
        self.liked = max((fit.eligible for fit in machine.fits.values()), key=len, default=())
        # id of a ticket that fits now -> the id of the one that it would have to pass
        self.held_back: dict[str, str] = {}
        self._kinds: dict[
            Request, _Alternative | None
        ] = {}  # a request is long to hash, and asked for a thousand times
        self._ways: dict[str, tuple[_Alternative, ...]] = {}  # id of a ticket -> its ways that are possible

    def schedule(self, waiting: Sequence[Ticket]) -> dict[str, PlannedStart]:
        """The planned start of each ticket when all start in order."""
        busy = self.busy.copy()
        self.calendar = self.calendars.after(self.started, self.liked)
        planned = {}
        for ticket in waiting:
            it = planned[ticket.id] = self.earliest(ticket, busy, self.calendar)
            busy.add(it, ticket.lasts, self.machine.relatives)
        return planned

    def earliest(self, ticket: Ticket, busy: BusyDevices, kept: Calendar | None = None) -> PlannedStart:
        """The earliest start of one ticket in any of its ways; without a calendar as if it started next."""
        best = NEVER
        for way in self.ways(ticket):
            uuids, taken = way.fit.eligible, busy.until(shared=way.request.share)
            free = way.first
            if taken:  # one that shares may be over before those that are there already
                free = [max(first, taken.get(uuid, first)) for uuid, first in zip(uuids, free, strict=True)]
            spans = self.calendars.reserved_beside(self.started, uuids, ticket.uid) if kept is None else kept
            places, start = _soonest(ticket, free, uuids, spans, way.request.num_gpus)
            if best.request is None or start < best.start:
                best = PlannedStart(start, way.request, tuple([uuids[place] for place in places]))
        return best

    def ways(self, ticket: Ticket) -> tuple[_Alternative, ...]:
        """Those of its requests that can be met some day."""
        if ticket.id not in self._ways:
            self._kinds |= {each: self._way(each) for each in ticket.requests if each not in self._kinds}
            self._ways[ticket.id] = tuple(way for each in ticket.requests if (way := self._kinds[each]))
        return self._ways[ticket.id]

    def _way(self, request: Request) -> _Alternative | None:
        fit = self.machine.fits.get(request)
        if fit is None or len(fit.eligible) < request.num_gpus:
            return None
        ends = self.machine.ends
        # A job that should have ended: its end is unknown.
        first = [
            self.now if uuid in fit.open else end if (end := ends.get(uuid, UNKNOWN)) > self.now else UNKNOWN
            for uuid in fit.eligible
        ]
        return _Alternative(request, fit, first)

    def _fits_now(self, way: _Alternative) -> bool:
        taken = self.busy.until(shared=way.request.share)
        return sum(uuid not in taken for uuid in way.fit.open) >= way.request.num_gpus

    def next_to_start(self, waiting: Sequence[Ticket]) -> tuple[Ticket, PlannedStart] | None:
        """The next ticket that starts now; it counts as started from here on."""
        self.held_back = {}
        fitting = {id(way) for way in self._kinds.values() if way and self._fits_now(way)}
        fits = [one for one in waiting if any(id(way) in fitting for way in self.ways(one))] if fitting else []
        if not fits:
            return None
        base = self.schedule(waiting)
        stands = self._behind_how_many(waiting)
        # The shortest first, in each class; of those of unknown length the first in order.
        fits.sort(
            key=lambda one: (
                one.set_back,
                not self.calendars.begun_for(one.uid),
                -one.priority,
                UNKNOWN if one.lasts is None else one.lasts,
            )
        )
        refused: dict[tuple[object, ...], str] = {}
        for ticket in fits:
            # Many are alike; and after so many, where a shorter one had to wait, a longer one has to.
            ways = tuple(map(id, self.ways(ticket)))
            alike = (ways, ticket.uid, ticket.priority, ticket.time_limit is None, stands[ticket.id])
            kind = (*alike, ticket.lasts) if len(refused) < MOST_TRIED else alike
            it = self.earliest(ticket, self.busy)
            held_back = refused.get(kind) if it.start <= self.now < base[ticket.id].start else None
            held_back = held_back or self._held_back_by(ticket, it, waiting, base)
            if held_back is None:
                return self._start(ticket, it)
            refused[kind] = refused[alike] = self.held_back[ticket.id] = held_back
        # Reservations move with a start, so two can be held back for each other: then the first of them in the queue
        # starts, if it would in order.  Otherwise it waits for an end that is to come, after which they may both be in
        # time.
        in_turn = [one for one in waiting if base[one.id].start <= self.now]
        stuck = next((one for one in in_turn if self._in_circle(one.id)), None)
        return self._start(stuck, self.earliest(stuck, self.busy)) if stuck else None

    def _start(self, ticket: Ticket, it: PlannedStart) -> tuple[Ticket, PlannedStart]:
        self.busy.add(it, ticket.lasts, self.machine.relatives)
        self.started.append(self._starting(ticket, it))
        return ticket, it

    def _in_circle(self, name: str) -> bool:
        """Whether it is held back for a ticket that is held back for it, perhaps over others."""
        chain = [name]
        while (other := self.held_back.get(chain[-1])) and other not in chain:
            chain.append(other)
        return other == name

    def _behind_how_many(self, waiting: Sequence[Ticket]) -> dict[str, int]:
        """id -> how many overdue tickets stand before it."""
        stands, count = {}, 0
        for ticket in waiting:
            stands[ticket.id] = count
            count += ticket.id in self.late
        return stands

    def _held_back_by(
        self, ticket: Ticket, it: PlannedStart, waiting: Sequence[Ticket], base: Mapping[str, PlannedStart]
    ) -> str | None:
        """The id of a ticket that its start would postpone further than allowed; None: it may start."""
        if it.start > self.now:
            mine = {uuid for way in self.ways(ticket) for uuid in way.fit.eligible}
            kept = [booking for uuid, booking in self.kept_for_others(ticket, it).items() if uuid in mine]
            return min(kept, key=lambda booking: booking.begins).id if kept else next(iter(self.reserved))
        if self.calendars.uses_own_reservations(ticket.uid, it.devices, self.started):
            return None
        busy, calendar = self.busy.copy(), self.calendar
        busy.add(it, ticket.lasts, self.machine.relatives)
        if not calendar.keys().isdisjoint(it.devices):  # others are kept in their place
            calendar = self.calendars.after([*self.started, self._starting(ticket, it)], self.liked)
        behind = False  # whether the others in the loop stand behind this one
        for other in waiting:
            if other is ticket:
                behind = True
                continue
            again = self.earliest(other, busy, calendar)
            busy.add(again, other.lasts, self.machine.relatives)
            if again.start > self._limit(other, ticket, base[other.id].start) + 1e-3:
                return other.id
            if other.id in self.late and not behind and self._takes_from(other, ticket, it, base[other.id]):
                return other.id
        return None

    def _limit(self, other: Ticket, passing: Ticket, planned: float) -> float:
        """Until when *other* can be put off by *passing*."""
        had_more = self.rules.fair_share and self.usage.get(passing.owner, 0.0) > self.usage.get(other.owner, 0.0)
        if other.promise is None or had_more or passing.set_back or passing.priority < other.priority:
            return planned
        return max(planned, due_at(other, self.rules))

    def _takes_from(self, other: Ticket, passing: Ticket, it: PlannedStart, planned: PlannedStart) -> bool:
        """Whether it takes a device that *other*, who has waited long enough, could use."""
        if planned.start != UNKNOWN and passing.time_limit is not None:
            return False  # it will be off the device in time: gpuguard sees to that
        return any(
            uuid in self.machine.fits[way].eligible
            for uuid in it.devices
            for way in other.requests
            if way in self.machine.fits
        )

    def kept_for_others(self, ticket: Ticket, it: PlannedStart) -> dict[str, PlannedReservation]:
        """uuid -> the reservation for which this ticket must leave the device alone if it starts now."""
        fit = self.machine.fits.get(it.request or ticket.requests[0])
        others = [job for job in self.started if job.id != ticket.id]
        spans = self.calendars.reserved_beside(others, fit.eligible if fit else (), ticket.uid)
        lasts = surely_over_after(ticket)
        found = {uuid: in_the_way(each, ticket.uid, self.now, lasts) for uuid, each in spans.items()}
        return {uuid: booking for uuid, booking in found.items() if booking}

    def _starting(self, ticket: Ticket, it: PlannedStart) -> StartingJob:
        until = UNKNOWN if ticket.time_limit is None else self.now + ticket.time_limit
        return StartingJob(ticket.id, ticket.uid, it.devices, until)


def _soonest(
    ticket: Ticket, free: list[float], uuids: Sequence[str], kept: Calendar, count: int
) -> tuple[list[int], float]:
    """The places of so many of the devices, and when all of them can be had; *free* says when their jobs have ended."""
    lasts = surely_over_after(ticket)
    while True:
        clear = free
        if kept:
            spans = [kept.get(uuid, ()) for uuid in uuids]
            clear = [clear_at(each, ticket.uid, since, lasts) for each, since in zip(spans, free, strict=True)]
        places = sorted(range(len(clear)), key=clear.__getitem__)[:count]
        start = clear[places[-1]]
        # By the time that the last of them is free, the first may be reserved.
        if not kept or all(clear_at(spans[place], ticket.uid, start, lasts) == start for place in places):
            return places, start
        free = [max(start, since) for since in free]


def surely_over_after(ticket: Ticket) -> float:
    """Seconds after which a reservation can count on its devices: only a time limit is kept."""
    return max(HORIZON_SECONDS, ticket.expected or 0.0) if ticket.time_limit is None else ticket.time_limit
