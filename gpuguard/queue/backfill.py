"""Backfill: which tickets of the queue start now, which ones start later and when, and why not earlier.

Each request, in the order of the queue, is planned on those devices that will do and are free first.  That gives its
*planned start*.  A request that joins the queue is promised that start plus a quarter of the wait until then.  Shorter
jobs may go first as long as all others start as promised, and a user who had more GPU time cannot put off one who had
less.

No start can be planned where jobs without a time limit run.  There the plan goes by estimates, which promise nothing:
requests pass each other by response ratio until one of them has waited for the bound, see priority.bound_now.  From
then on a later request passes that one only if it probably ends before the devices suffice, or on devices that are left
over.  Devices that are kept for a reservation go to no other user, and their user need not wait for other requests: see
calendar.

On 92 days of a full server (Philly, 356 jobs) the mean wait is 77 h and the longest one 374 h, and with time limits
they are 37 and 386 h.  In order of arrival they would be 162 and 472 h: see benchmarks/replay.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuguard.queue.calendar import (
    HORIZON_SECONDS,
    Calendar,
    Calendars,
    DeviceAvailability,
    Reservation,
    StartingJob,
    clear_at,
)
from gpuguard.queue.priority import TYPICAL_SECONDS, QueueRules, Ticket, due_at, overdue
from gpuguard.request import Request

UNKNOWN = float("inf")  # a time that will come some day


@dataclass(frozen=True)
class PlannedStart:
    """A start (unix time) on devices.  It is inf if it comes some day, and *request* is None if it never comes."""

    start: float
    request: Request | None = None
    devices: tuple[str, ...] = ()


NEVER = PlannedStart(UNKNOWN)


# Whether a job would share a device -> uuid -> the unix time until which the device is busy with what is planned on it.
BusyDevices = dict[bool, dict[str, float]]

MOST_PLANNED = 256  # tickets; those behind them get no planned start yet
FIRST_OF_USER = 4  # tickets of each user that are planned in any case, so that no user can fill the plan
MOST_TRIED = 64  # lengths that are tried one by one
SHORTEST_SECONDS = 60.0  # no job counts as shorter in the order
TRUST = 0.4  # how much an estimate counts in the order: 0 is not at all, 1 is as if it were known
# An estimate says little about a single job, and devices that stay empty are a cost to everybody.  So a job passes a
# request that has waited for the bound if this part of its probable length fits, a request that has waited for twice
# the bound if twice this part fits, and so on.
DOUBT = 1 / 3


@dataclass(frozen=True)
class Fit:
    """The devices for one request."""

    eligible: tuple[str, ...]  # uuids of those that could ever satisfy it, best first
    open: frozenset[str]  # those of them that do now


@dataclass(frozen=True)
class Machine:
    """The state of the machine that a plan is made from."""

    fits: Mapping[Request, Fit]  # request -> its devices, for all requests of the queue
    ends: Mapping[str, float] = field(default_factory=dict)  # uuid -> unix time at which its claim ends by time limit
    estimates: Mapping[str, float] = field(default_factory=dict)  # that end, or one estimated from earlier jobs
    guesses: Mapping[str, float] = field(default_factory=dict)  # one of these, or a guess, for all claims
    relatives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # uuid -> those that cannot be used with it
    reservations: tuple[Reservation, ...] = ()  # that are not over
    free: frozenset[str] = frozenset()  # uuids of devices that are not in use, for the reservations


@dataclass(frozen=True)
class QueuePosition:
    """The position of a ticket in the queue, and its planned start."""

    ticket: Ticket  # of the request
    number: int  # 1 is the first
    start: float | None  # unix time of its likely start, or None if that is unknown
    in_order: float | None  # unix time of its start if no ticket behind it started first, or None
    now: bool = False  # whether it may start now
    request: Request | None = None  # the planned alternative, or None if it can never start on this machine
    devices: tuple[str, ...] = ()  # uuids that are planned for it
    held_back_by: str | None = None  # id of the ticket, or reservation, that it would have to pass
    kept: Mapping[str, Reservation] = field(default_factory=dict)  # uuid -> for which it must leave the device alone
    latest: float | None = None  # unix time of its start if all jobs before it use up their time limits, or None


def promise(position: QueuePosition, rules: QueueRules, now: float) -> float | None:
    """Return when the job starts at the latest if the jobs before it keep their time limits, or None if unknown.

    The wait is a quarter longer than planned.  Of 0 to 40 % that gave the shortest mean wait among those whose longest
    wait does not exceed that of FIFO.
    """
    return None if position.in_order is None else now + (1 + rules.patience) * (position.in_order - now)


def plan(
    queue: Sequence[Ticket], machine: Machine, usage: Mapping[int, float], rules: QueueRules, now: float
) -> list[QueuePosition]:
    """Return the positions of *queue*, which is in order.  See priority.order for that, *usage* and *now*."""
    waiting = planned_for(queue)
    planner = _Planner(machine, usage, rules, now, late_ones(queue, rules, now))
    in_order = planner.schedule(waiting)
    starting = planner.start_all(waiting)
    waiting = [ticket for ticket in waiting if ticket.id not in starting]
    later = planner.schedule(waiting) if starting else in_order
    # A ticket that is held back starts only after the one that it waits for, so the others do not wait for it.
    estimated = planner.estimated([ticket for ticket in waiting if ticket.id not in planner.held_back])
    positions = []
    for number, ticket in enumerate(queue, 1):
        starts_now = ticket.id in starting
        planned = starting.get(ticket.id) or later.get(ticket.id) or PlannedStart(UNKNOWN, ticket.requests[0])
        latest, likely = planned.start, estimated.get(ticket.id, planned)
        planned = likely if likely.start < latest else planned
        # If a ticket fits now and is held back for another one, it is unknown until when.
        held_back_by = None if starts_now else planner.held_back.get(ticket.id)
        positions.append(
            QueuePosition(
                ticket,
                number,
                start=None if held_back_by and held_back_by not in planner.reserved else _known(planned.start),
                in_order=_known(in_order.get(ticket.id, NEVER).start),
                latest=None if held_back_by else _known(latest),
                now=starts_now,
                request=planned.request,
                devices=planned.devices,
                held_back_by=held_back_by,
                kept=planner.kept_for_others(ticket, planned) if machine.reservations else {},
            )
        )
    return positions


def late_ones(queue: Sequence[Ticket], rules: QueueRules, now: float) -> frozenset[str]:
    """Return the ids of the tickets of *queue* that have waited beyond the bound: the oldest one of each user.

    A ticket that has only missed its promise is not among them, because the promise may rest on a time limit that a job
    exceeded a minute ago.
    """
    return overdue([ticket for ticket in queue if ticket.since + rules.bound < now], rules, now)


def _without(waiting: Sequence[Ticket], started: Ticket) -> list[Ticket]:
    """Return *waiting* without *started*, which takes the first place of its user if it has no time limit."""
    if started.time_limit is not None:
        return [ticket for ticket in waiting if ticket is not started]

    def is_alike(ticket: Ticket) -> bool:
        return (ticket.owner, ticket.set_back, ticket.priority) == (started.owner, started.set_back, started.priority)

    own = [ticket for ticket in waiting if is_alike(ticket) and ticket is not started]
    places = [index for index, ticket in enumerate(waiting) if is_alike(ticket)]
    moved = dict(zip(places[1:], own, strict=True))
    return [moved.get(index, ticket) for index, ticket in enumerate(waiting) if index != places[0]]


def backlog(tickets: Collection[Ticket], machine: Machine, now: float) -> float:
    """Return for how many seconds the devices probably have work if no further jobs come.

    The work of the jobs that run and of those that wait counts as shared evenly among the devices.  Returns UNKNOWN if
    nothing is known about the length of any job that waits.
    """
    if all(ticket.lasts is None for ticket in tickets):
        return UNKNOWN
    devices = {uuid for fit in machine.fits.values() for uuid in fit.eligible}
    ends = {**machine.guesses, **machine.estimates}
    running = sum(max(0.0, ends.get(uuid, now) - now) for uuid in devices)
    waiting = sum(ticket.num_gpus * _probable_seconds(ticket) for ticket in tickets if ticket.after is None)
    return (running + waiting) / max(1, len(devices))


def _goes_before(ticket: Ticket, other: Ticket) -> bool:
    """Return whether a ticket came before another one, and only fair share can have put it behind that one."""
    is_older = (ticket.since, ticket.id) < (other.since, other.id)
    return is_older and (ticket.set_back, -ticket.priority) <= (other.set_back, -other.priority)


def _probable_seconds(ticket: Ticket) -> float:
    return TYPICAL_SECONDS if ticket.lasts is None else ticket.lasts


def planned_for(queue: Sequence[Ticket]) -> list[Ticket]:
    """Return the tickets of *queue* that get a planned start."""
    waiting: list[Ticket] = []
    of_user: dict[int, int] = {}
    for ticket in queue:
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
    free_at: list[float]


class _Planner:
    """A plan in the making: each ticket that starts now is added to *busy*, and all after it are planned anew."""

    def __init__(
        self, machine: Machine, usage: Mapping[int, float], rules: QueueRules, now: float, late: frozenset[str]
    ) -> None:
        self.machine, self.usage, self.rules, self.now, self.late = machine, usage, rules, now, late
        self.busy: BusyDevices = {False: {}, True: {}}
        self.starting: list[tuple[Ticket, PlannedStart]] = []
        self.is_estimate = False  # whether the lengths of earlier jobs count, by which nothing is decided
        self.started: list[StartingJob] = []
        self.reserved = tuple(reservation.key for reservation in machine.reservations)
        free_at = {uuid: end for uuid, end in machine.ends.items() if end > now} | dict.fromkeys(machine.free, now)
        self.calendars = Calendars(machine.reservations, DeviceAvailability(free_at, relatives=machine.relatives), now)
        self.calendar: Calendar = {}  # what is kept for reservations, as the schedule of the queue has it
        self.liked = max((fit.eligible for fit in machine.fits.values()), key=len, default=())
        # id of a ticket that fits now -> the id of the one that it would have to pass
        self.held_back: dict[str, str] = {}
        # Hashing a request takes long, and its alternative is needed a thousand times.
        self._kinds: dict[Request, _Alternative | None] = {}
        self._alternatives: dict[str, tuple[_Alternative, ...]] = {}  # id of a ticket -> those that are possible

    def schedule(self, waiting: Sequence[Ticket]) -> dict[str, PlannedStart]:
        """Return the planned start of each ticket if all of them start in order."""
        busy = {shared: until.copy() for shared, until in self.busy.items()}
        self.calendar = self.calendars.after(self.started, self.liked)
        schedule = {}
        for ticket in waiting:
            planned = schedule[ticket.id] = self.earliest(ticket, busy, self.calendar)
            self.occupy(busy, ticket, planned)
        return schedule

    def start_all(self, waiting: Sequence[Ticket]) -> dict[str, PlannedStart]:
        """Let all tickets start that can start now, and return their planned starts by id."""
        left = list(waiting)
        while started := self.next_to_start(left):
            left = _without(left, started)
        return {ticket.id: planned for ticket, planned in self.starting}

    def estimated(self, waiting: Sequence[Ticket]) -> dict[str, PlannedStart]:
        """The planned starts if each ticket starts once there is room and takes as long as earlier jobs."""
        machine = replace(self.machine, ends=self.machine.estimates)
        planner = _Planner(machine, self.usage, self.rules, self.now, self.late)
        planner.is_estimate, planner.started = True, self.started
        for ticket, planned in self.starting:
            planner.occupy(planner.busy, ticket, planned)
        return planner.as_there_is_room(waiting)

    def as_there_is_room(self, waiting: Sequence[Ticket]) -> dict[str, PlannedStart]:
        """Return the planned start of each ticket if each starts once there is room for it, and alike ones in order."""
        self.calendar = self.calendars.after(self.started, self.liked)
        alike: dict[tuple[object, ...], list[tuple[int, Ticket]]] = {}  # in each list, the first ticket comes last
        for place, ticket in reversed(list(enumerate(waiting))):
            kind = tuple(map(id, self.alternatives(ticket)))
            alike.setdefault(kind if kind in alike or len(alike) < MOST_TRIED else (), []).append((place, ticket))
        soonest = [(self.now, *tickets.pop(), tickets) for tickets in alike.values()]
        heapq.heapify(soonest)
        schedule = {}
        while soonest:
            _, place, ticket, others = heapq.heappop(soonest)
            planned = self.earliest(ticket, self.busy, self.calendar)
            if soonest and (planned.start, place) > soonest[0][:2]:  # devices are never free earlier than they were
                heapq.heappush(soonest, (planned.start, place, ticket, others))
                continue
            schedule[ticket.id] = planned
            self.occupy(self.busy, ticket, planned)
            if others:
                heapq.heappush(soonest, (planned.start, *others.pop(), others))
        return schedule

    def lasts(self, ticket: Ticket) -> float:
        """Return the seconds that the job takes at most (time limit), or probably (in an estimate), or UNKNOWN."""
        limit = UNKNOWN if ticket.time_limit is None else ticket.time_limit
        return min(limit, ticket.expected) if self.is_estimate and ticket.expected is not None else limit

    def occupy(self, busy: BusyDevices, ticket: Ticket, planned: PlannedStart) -> None:
        """Let the job occupy the devices in *busy* from its planned start on."""
        until = planned.start + self.lasts(ticket)
        for uuid in planned.devices:
            for related in (uuid, *self.machine.relatives.get(uuid, ())):
                for shared in (False,) if planned.request and planned.request.share else (False, True):
                    busy[shared][related] = max(until, busy[shared].get(related, until))

    def earliest(self, ticket: Ticket, busy: BusyDevices, kept: Calendar | None = None) -> PlannedStart:
        """Return the earliest start of a ticket with any of its alternatives; without *kept*, as if it started next."""
        best = NEVER
        lasts = surely_over_after(ticket)
        for alternative in self.alternatives(ticket):
            uuids, request = alternative.fit.eligible, alternative.request
            taken = busy[request.share]
            free_at = alternative.free_at
            if taken:  # a job that shares may end before those that are there already
                free_at = [max(free, taken.get(uuid, free)) for uuid, free in zip(uuids, free_at, strict=True)]
            calendar = self.calendars.reserved_beside(self.started, uuids, ticket.uid) if kept is None else kept
            spans = [calendar.get(uuid, ()) for uuid in uuids] if calendar else []
            while True:
                clear = free_at
                if spans:
                    clear = [
                        clear_at(reserved, ticket.uid, free, lasts)
                        for reserved, free in zip(spans, free_at, strict=True)
                    ]
                chosen = sorted(range(len(clear)), key=clear.__getitem__)[: request.num_gpus]
                start = clear[chosen[-1]]
                # By the time that the last of them is free, the first may be reserved.
                if not spans or all(clear_at(spans[index], ticket.uid, start, lasts) == start for index in chosen):
                    break
                free_at = [max(start, free) for free in free_at]
            if best.request is None or start < best.start:
                best = PlannedStart(start, request, tuple([uuids[index] for index in chosen]))
        return best

    def alternatives(self, ticket: Ticket) -> tuple[_Alternative, ...]:
        """Return those of the ticket's requests that can be met some day."""
        if ticket.id not in self._alternatives:
            for request in ticket.requests:
                if request not in self._kinds:
                    self._kinds[request] = self._alternative(request)
            possible = [self._kinds[request] for request in ticket.requests]
            self._alternatives[ticket.id] = tuple(filter(None, possible))
        return self._alternatives[ticket.id]

    def _alternative(self, request: Request) -> _Alternative | None:
        fit = self.machine.fits.get(request)
        if fit is None or len(fit.eligible) < request.num_gpus:
            return None
        ends = self.machine.ends
        # The end of a job that should have ended by now is unknown.
        free_at = [
            self.now if uuid in fit.open else end if (end := ends.get(uuid, UNKNOWN)) > self.now else UNKNOWN
            for uuid in fit.eligible
        ]
        return _Alternative(request, fit, free_at)

    def next_to_start(self, waiting: Sequence[Ticket]) -> Ticket | None:
        """Return the next ticket that starts now, or None.  It counts as started from here on."""
        self.held_back = {}
        fits = self._fitting_now(waiting)
        if not fits:
            return None
        base = self.schedule(waiting) if self._is_any_start_known(waiting) else {}
        overdue_before, count = dict[str, int](), 0  # id -> how many overdue tickets are before it
        for ticket in waiting:
            overdue_before[ticket.id] = count
            count += ticket.id in self.late
        refused: dict[tuple[object, ...], str] = {}
        for ticket in fits:
            # Many tickets are alike.  After MOST_TRIED of them, a longer one has to wait where a shorter one had to.
            kinds = tuple(map(id, self.alternatives(ticket)))
            alike = (kinds, ticket.uid, ticket.priority, ticket.time_limit is None, overdue_before[ticket.id])
            key = (*alike, ticket.time_limit) if len(refused) < MOST_TRIED else alike
            planned = self.earliest(ticket, self.busy)
            is_late = base and base[ticket.id].start > self.now
            held_back = refused.get(key) if planned.start <= self.now and is_late else None
            held_back = held_back or self._held_back_by(ticket, planned, waiting, base)
            if held_back is None and (held_back := self._kept_free_for(ticket, planned, waiting, base)):
                self.held_back[ticket.id] = held_back
                continue
            if held_back is None:
                return self._start(ticket, planned)
            refused[key] = refused[alike] = self.held_back[ticket.id] = held_back
        # Reservations move with a start, so two tickets can be held back for each other.  Then the first of them in the
        # queue starts if it would start now in order.  Otherwise it waits until a job ends, after which both may be in
        # time.
        base = base or self.schedule(waiting)
        for ticket in waiting:
            if base[ticket.id].start <= self.now and self._in_circle(ticket.id):
                return self._start(ticket, self.earliest(ticket, self.busy))
        return None

    def _is_any_start_known(self, waiting: Sequence[Ticket]) -> bool:
        """Return whether there are starts that follow from time limits or reservations, and that could be put off."""
        return bool(self.machine.ends or self.reserved) or any(
            ticket.time_limit is not None or ticket.promise is not None for ticket in waiting
        )

    def _fitting_now(self, waiting: Sequence[Ticket]) -> list[Ticket]:
        """Return the tickets for which enough devices are free, in the order in which they are tried.

        In each class the tickets with a time limit come first, beginning with the shortest.  Those without one follow
        by response ratio (Brinch Hansen 1971), which is wait plus length, divided by the length, and then divided by
        the place of the user's first ticket in the queue.  So a short job goes first and a long one later, and a job of
        a user who had much GPU time goes first only if it has waited that much longer.  Because an estimate says little
        about a single job, the length is the geometric mean of the estimate and a typical length.
        """
        fitting = set()
        for alternative in {id(kind): kind for ticket in waiting for kind in self.alternatives(ticket)}.values():
            taken = self.busy[alternative.request.share]
            if sum(uuid not in taken for uuid in alternative.fit.open) >= alternative.request.num_gpus:
                fitting.add(id(alternative))
        if not fitting:
            return []
        places: dict[int, int] = {}  # owner -> place of their next ticket in the queue
        for number, ticket in enumerate(waiting, 1):
            places.setdefault(ticket.owner, number)

        def rank(ticket: Ticket) -> tuple[float, ...]:
            alike = ticket.set_back, not self.calendars.begun_for(ticket.uid), -ticket.priority
            if ticket.time_limit is not None:
                return *alike, False, ticket.time_limit
            waited = self.now - ticket.since
            lasts = TYPICAL_SECONDS * (max(SHORTEST_SECONDS, _probable_seconds(ticket)) / TYPICAL_SECONDS) ** TRUST
            place = places[ticket.owner] if self.rules.fair_share else 1
            return *alike, True, -(waited + lasts) / lasts / place

        return sorted((one for one in waiting if not fitting.isdisjoint(map(id, self.alternatives(one)))), key=rank)

    def _start(self, ticket: Ticket, planned: PlannedStart) -> Ticket:
        self.occupy(self.busy, ticket, planned)
        self.starting.append((ticket, planned))
        self.started.append(self._starting(ticket, planned))
        return ticket

    def _in_circle(self, ticket_id: str) -> bool:
        """Return whether a ticket is held back for one that is held back for it, directly or through others."""
        chain = [ticket_id]
        while (other := self.held_back.get(chain[-1])) and other not in chain:
            chain.append(other)
        return other == ticket_id

    def _held_back_by(
        self, ticket: Ticket, planned: PlannedStart, waiting: Sequence[Ticket], base: Mapping[str, PlannedStart]
    ) -> str | None:
        """Return the id of a ticket that this start would postpone further than allowed, or None if there is none.

        *base* holds the planned starts that follow from time limits, and is empty if there are none.
        """
        if planned.start > self.now:
            mine = {uuid for alternative in self.alternatives(ticket) for uuid in alternative.fit.eligible}
            kept = self.kept_for_others(ticket, planned)
            blocking = [reservation for uuid, reservation in kept.items() if uuid in mine]
            return min(blocking, key=lambda reservation: reservation.begins).key if blocking else self.reserved[0]
        if not base or self.calendars.uses_own_reservations(ticket.uid, planned.devices, self.started):
            return None
        busy, calendar = {shared: until.copy() for shared, until in self.busy.items()}, self.calendar
        self.occupy(busy, ticket, planned)
        if not calendar.keys().isdisjoint(planned.devices):  # other devices are kept instead
            calendar = self.calendars.after([*self.started, self._starting(ticket, planned)], self.liked)
        for other in waiting:
            if other is ticket:
                continue
            again = self.earliest(other, busy, calendar)
            self.occupy(busy, other, again)
            if again.start > self._limit(other, ticket, base[other.id].start) + 1e-3:
                return other.id
        return None

    def _limit(self, other: Ticket, passing: Ticket, planned: float) -> float:
        """Return until when *passing* may put *other* off."""
        had_more = self.rules.fair_share and self.usage.get(passing.owner, 0.0) > self.usage.get(other.owner, 0.0)
        if had_more or passing.set_back or passing.priority < other.priority:
            return planned
        if other.promise is None:
            # Between two tickets that fit now, and about which nothing is certain, the order of trying them decides.
            is_open = planned <= self.now and passing.time_limit is None and other.time_limit is None
            is_open = is_open and not self.calendars.begun_for(passing.uid)  # which puts it first for its devices alone
            return UNKNOWN if is_open else planned
        return max(planned, due_at(other, self.rules))

    def _kept_free_for(
        self, ticket: Ticket, planned: PlannedStart, waiting: Sequence[Ticket], base: Mapping[str, PlannedStart]
    ) -> str | None:
        """Return the id of the request beyond the bound that *ticket* would probably delay, or None.

        Of several requests beyond the bound that want these devices, only the oldest counts.  This is EASY backfill by
        estimates (Tsafrir, Etsion and Feitelson 2007): a job may pass if it probably ends before the devices suffice,
        or if it takes devices that are left over then.  Devices are kept for only one request at a time, because
        several that wait for all devices start one after another once the first one has got them.
        """
        if self.calendars.uses_own_reservations(ticket.uid, planned.devices, self.started):
            return None
        devices = set(planned.devices)
        late = [other for other in waiting if other.id in self.late and _goes_before(other, ticket)]
        for other in sorted(late, key=lambda other: other.since):
            if ticket.time_limit is not None and base[other.id].start != UNKNOWN:
                continue  # gpuguard keeps time limits, so that request is not put off beyond its promise
            wanted = [(kind, len(devices.intersection(kind.fit.eligible))) for kind in self.alternatives(other)]
            if any(taken for _, taken in wanted):
                waited = self.now - other.since
                delays = any(taken and self._delays(kind, taken, ticket, waited) for kind, taken in wanted)
                return other.id if delays else None
        return None

    def _delays(self, alternative: _Alternative, taken: int, passing: Ticket, waited: float) -> bool:
        """Return whether *passing*, on *taken* of its devices, probably delays a request that has *waited* so long."""
        busy = self._probably_busy()
        known = {**self.machine.guesses, **self.machine.estimates, **busy}
        fit, count = alternative.fit, alternative.request.num_gpus
        ends = sorted(
            self.now if uuid in fit.open and uuid not in busy else max(self.now, known.get(uuid, UNKNOWN))
            for uuid in fit.eligible
        )
        suffice = ends[count - 1]
        left_over = sum(end <= suffice for end in ends) - count
        if suffice == UNKNOWN or passing.lasts is None:
            return True
        doubt = 1.0 if passing.time_limit is not None else DOUBT * waited / self.rules.bound
        return taken > left_over and self.now + doubt * passing.lasts > suffice

    def _probably_busy(self) -> dict[str, float]:
        """Return uuid -> when the device is probably free again, for the devices that this plan gives away."""
        busy: dict[str, float] = {}
        for ticket, planned in self.starting:
            for uuid in planned.devices:
                for related in (uuid, *self.machine.relatives.get(uuid, ())):
                    busy[related] = max(busy.get(related, 0.0), self.now + _probable_seconds(ticket))
        return busy

    def kept_for_others(self, ticket: Ticket, planned: PlannedStart) -> dict[str, Reservation]:
        """Return uuid -> the reservation for which this ticket must leave the device alone if it starts now."""
        fit = self.machine.fits.get(planned.request or ticket.requests[0])
        others = [job for job in self.started if job.id != ticket.id]
        calendar = self.calendars.reserved_beside(others, fit.eligible if fit else (), ticket.uid)
        lasts = surely_over_after(ticket)
        return {
            uuid: span.reservation
            for uuid, spans in calendar.items()
            for span in reversed(spans)  # the first one counts
            if span.excludes(ticket.uid, self.now, lasts)
        }

    def _starting(self, ticket: Ticket, planned: PlannedStart) -> StartingJob:
        until = UNKNOWN if ticket.time_limit is None else self.now + ticket.time_limit
        return StartingJob(id=ticket.id, uid=ticket.uid, devices=planned.devices, until=until)


def surely_over_after(ticket: Ticket) -> float:
    """Return the seconds after which a reservation can count on a ticket's devices: only time limits are kept."""
    return max(HORIZON_SECONDS, ticket.expected or 0.0) if ticket.time_limit is None else ticket.time_limit
