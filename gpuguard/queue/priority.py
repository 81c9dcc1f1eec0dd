"""Priority: the order of the tickets in the queue.

Tickets are ordered by the first of these that differs:

    set back        requests that were set back come last
    priority        the higher class first
    overdue         the oldest request of each user who has waited longer than promised, and has got nothing for as long
                    as the site permits
    fair share      the user with the least recent GPU time is next; each of their requests counts as if it had run
                    already, so that 500 tickets get no further than one
    last start      the user who started a job longest ago
    arrival         the oldest first

This module does not decide which requests start when: see backfill.  It reads nothing: see tickets.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from gpuguard.device_state import grouped
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.request import Request
from gpuguard.units import parse_duration, parse_leftover, parse_percent

PRIORITIES = {"low": -1, "normal": 0, "high": 1}
TYPICAL_SECONDS = 3600.0  # the length of a job without a time limit or an estimate, in fair share and in doubt
USUAL_WAITS = 3.0  # a request is passed freely until it has waited for so many times the usual wait ...
BACKLOGS = 1.5  # ... or so many times the backlog, because devices stay empty for wide requests, and more jobs come
LONGEST_WAIT = 20 * 86400.0  # a longer wait of one job counts as this


@dataclass(frozen=True)
class Ticket:
    """One request that waits.  Unknown values are None."""

    id: str  # unique among all: it begins with the uid of its owner
    uid: int
    user: str
    since: float  # unix time of its arrival, from the file system, so that it cannot be backdated
    requests: tuple[Request, ...]  # any of them will do, the first is preferred
    priority: int = 0
    time_limit: float | None = None  # seconds, kept by gpuguard
    expected: float | None = None  # seconds, estimated from what the user's jobs have taken before
    promise: float | None = None  # unix time, see backfill.promise
    owner_uid: int | None = None  # the uid that answers for *uid*, see users.accountable_uids, or None: its own
    served: float | None = None  # unix time at which a request of its user last got a claim
    set_back: bool = False  # at the end of the queue, because it, or its user, did not take an offer
    after: str | None = None  # what it waits for before it enters the queue
    pid: int | None = None
    note: str | None = None
    command: tuple[str, ...] | None = None

    @property
    def short_id(self) -> str:
        """The id as people write it, see claims.ids: that of its file without uid and pid, or "" without a file."""
        return self.id.rpartition(".")[2].partition("p")[0]

    @property
    def lasts(self) -> float | None:
        """The seconds that the job will take, or None if that is unknown."""
        return self.expected if self.time_limit is None else self.time_limit

    @property
    def owner(self) -> int:
        """The uid for which it counts in fair share: a user with thousands of uids has no more than one."""
        return self.uid if self.owner_uid is None else self.owner_uid

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of the preferred alternative."""
        return self.requests[0].num_gpus


@dataclass(frozen=True)
class PriorityKeys:
    """The highest priority that users get; the uids of *high* get high, and those of *low* never more than low."""

    everybody: Literal["low", "normal", "high"] = "normal"
    high: tuple[Annotated[int, "user"], ...] = ()
    low: tuple[Annotated[int, "user"], ...] = ()


def _parse_share(text: str) -> float:
    return parse_percent(text) / 100


@dataclass(frozen=True)
class ReservationKeys:
    """What users may reserve for themselves.

    Args:
        devices: so many at a time, all their reservations together; 0: none.
        longest: of one reservation.
        ahead: so early at most.
        no_show: after so long without a claim it is over.
    """

    devices: int = 2
    longest: Annotated[float, parse_duration] = 86400.0
    ahead: Annotated[float, parse_duration] = 14 * 86400.0
    no_show: Annotated[float, parse_duration] = 1800.0


@dataclass(frozen=True)
class JobKeys:
    """How many tasks of `gpuguard submit` each user may have; None: any number.

    Args:
        waiting: in the queue and in records that wait for it.
        running: at the same time.
    """

    waiting: int | None = None
    running: int | None = None


@dataclass(frozen=True)
class QueueRules:
    """The site's rules for the queue; the fields are the keys of line.yaml."""

    fair_share: bool = True  # if False, first come, first served within a priority
    half_life: Annotated[float, parse_duration] = 7 * 86400.0  # after which used GPU time counts half
    patience: Annotated[float, _parse_share] = 0.25  # of the planned wait: shorter jobs may put a start off by that
    bound: Annotated[float, parse_duration] = 24 * 3600.0  # then none passes a request whose start cannot be planned
    priority: PriorityKeys = field(default_factory=PriorityKeys)
    reservations: ReservationKeys = field(default_factory=ReservationKeys)
    jobs: JobKeys = field(default_factory=JobKeys)
    leftover: Annotated[float, parse_leftover] = float("inf")  # for which processes that a job leaves keep its claim

    def __post_init__(self) -> None:
        if self.half_life <= 0:
            raise InvalidRequest(_("half_life must be more than 0: write fair_share: false to count nothing."))

    def highest(self, uid: int) -> int:
        """Return the highest priority that *uid* gets."""
        keys = self.priority
        return PRIORITIES["low" if uid in keys.low else "high" if uid in keys.high else keys.everybody]


def order(tickets: Collection[Ticket], usage: Mapping[int, float], rules: QueueRules, now: float) -> list[Ticket]:
    """Return all tickets in the order of the queue, each with the priority that the site permits; *now* is unix time.

    *usage* maps a uid, or the uid that it belongs to -> recent GPU-seconds; a missing one counts as 0.
    """
    tickets = [
        ticket if ticket.priority == (real := permitted(ticket, rules)) else replace(ticket, priority=real)
        for ticket in tickets
    ]
    # Of 500 tickets of one user, some are always old.  They count as overdue only if none started for as long.
    starved = [ticket for ticket in tickets if ticket.served is None or ticket.served + rules.bound <= now]
    late = overdue(starved, rules, now) if rules.fair_share else frozenset()
    queue: list[Ticket] = []
    for set_back, negative in sorted({(ticket.set_back, -ticket.priority) for ticket in tickets}):
        alike = [ticket for ticket in tickets if (ticket.set_back, -ticket.priority) == (set_back, negative)]
        members = sorted(alike, key=_arrival)
        queue += [ticket for ticket in members if ticket.id in late]
        others = [ticket for ticket in members if ticket.id not in late]
        queue += _by_fair_share(others, usage) if rules.fair_share else others
    return queue


def bound_now(rules: QueueRules, waits: Collection[float], backlog: float) -> QueueRules:
    """Return *rules* with the bound that fits the load.

    Where all requests wait for days, a bound of a day is nothing: every request would be beyond it, and all would start
    in order of arrival.  So it is 3 times the mean wait or 1.5 times the backlog, whichever is less.  *waits* (seconds)
    are those of the jobs that run now.  A job could forge its wait, so no more than LONGEST_WAIT of each counts.
    *backlog* (seconds) is about the wait in order of arrival, see backfill.backlog; a single job that goes on and on
    makes it endless.
    """
    usual = sum(min(LONGEST_WAIT, wait) for wait in waits) / len(waits) if waits else 0.0
    return replace(rules, bound=max(rules.bound, min(USUAL_WAITS * usual, BACKLOGS * backlog)))


def permitted(ticket: Ticket, rules: QueueRules) -> int:
    """Return the priority that the ticket really has."""
    return min(ticket.priority, rules.highest(ticket.uid))


def overdue(tickets: Collection[Ticket], rules: QueueRules, now: float) -> frozenset[str]:
    """Return the ids of tickets that have waited longer than they should: of each user the oldest that could start.

    A request does not pass an older one of the same kind that was promised a later start: the older one counts instead.
    """
    alike, oldest = dict[tuple[object, ...], Ticket](), dict[int, Ticket]()
    for ticket in sorted(tickets, key=_arrival):
        if ticket.after is None and not ticket.set_back:
            kind = ticket.owner, ticket.num_gpus, ticket.priority, ticket.time_limit, ticket.expected
            first = alike.setdefault(kind, ticket)
            if due_at(ticket, rules) < now:
                oldest.setdefault(ticket.owner, first)
    return frozenset(ticket.id for ticket in oldest.values())


def due_at(ticket: Ticket, rules: QueueRules) -> float:
    """Return when a ticket becomes overdue: at its promised start, or else after the bound.

    A forged promise cannot lie before the ticket's arrival.
    """
    return ticket.since + rules.bound if ticket.promise is None else max(ticket.since, ticket.promise)


def _by_fair_share(tickets: Sequence[Ticket], usage: Mapping[int, float]) -> list[Ticket]:
    """Return *tickets* so that the user who is charged least is next, then the one whose last start is longest ago.

    Where usage is not counted, and the claim that just ended was the only one, no user is charged anything.  Without
    the last start, all tickets of a user who came first with many would then start before those of others.
    """
    of_user = grouped((ticket.owner, ticket) for ticket in reversed(tickets))  # so that pop() gives the oldest
    served = {uid: max(ticket.served or 0.0 for ticket in own) for uid, own in of_user.items()}
    users = [(usage.get(uid, 0.0), served[uid], _arrival(own[-1]), uid) for uid, own in of_user.items()]
    heapq.heapify(users)
    queue = []
    while users:
        charged, _, _, uid = heapq.heappop(users)
        ticket = of_user[uid].pop()
        queue.append(ticket)
        if of_user[uid]:
            # A ticket that is not queued yet, or whose process is stopped, holds back no other ticket of its user.
            if ticket.after is None:
                charged += ticket.num_gpus * (TYPICAL_SECONDS if ticket.lasts is None else ticket.lasts)
            heapq.heappush(users, (charged, served[uid], _arrival(of_user[uid][-1]), uid))
    return queue


def _arrival(ticket: Ticket) -> tuple[float, str]:
    return ticket.since, ticket.id
