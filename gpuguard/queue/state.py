"""The queue at one moment: the tickets, the machine, and the plan that follows from both.

Reads neither the driver nor the locks: it gets a snapshot and what is known of the claims.  Does not wait: see waiter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import replace as replace_noun

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.shares import sharing_of
from gpuguard.errors import InvalidRequest
from gpuguard.model import ClaimRecord, Device, Snapshot
from gpuguard.procfs import stats_of
from gpuguard.queue.backfill import Fit, Machine, QueuePosition, plan
from gpuguard.queue.calendar import PlannedReservation, reservation_text
from gpuguard.queue.priority import QueueRules, Ticket, order
from gpuguard.queue.reservations import ReservationCalendar
from gpuguard.queue.tickets import IgnoredFile, read_tickets, unread_since
from gpuguard.request import Request
from gpuguard.select import choose, claimed_by, possible, usable_together
from gpuguard.users import parties

UNRESPONSIVE_SECONDS = 15.0  # a ticket whose bell is not read for so long is passed over


@dataclass(frozen=True)
class QueueFacts:
    """What is known beside a snapshot.

    Args:
        claims: that live.
        barred: uuid -> why it is out of service, in words.
        denied: uids that may make no claim now.
        usage: uid -> recent GPU-seconds; None: not counted here.
        set_back: ids of tickets, and uids as text, that were moved to the end of the queue.
        bookings: reservations that count.
        reserved: all of them, to be shown.
        changes_at: unix time at which the next of these is over by itself.
        mark_files: in which barred and denied stand.
    """

    claims: Sequence[ClaimRecord] = ()
    quarantined: Mapping[str, str] = field(default_factory=dict)
    denied: frozenset[int] = frozenset()
    usage: Mapping[int, float] | None = None
    set_back: frozenset[str] = frozenset()
    reservations: tuple[PlannedReservation, ...] = ()
    changes_at: float = float("inf")
    mark_files: tuple[str, ...] = ()
    reserved: ReservationCalendar = field(default_factory=ReservationCalendar)


@dataclass(frozen=True)
class QueueState:
    """The queue at one moment."""

    places: tuple[QueuePosition, ...]
    ignored: tuple[IgnoredFile, ...]
    snapshot: Snapshot
    facts: QueueFacts
    now: float
    unresponsive: frozenset[str] = (
        frozenset()
    )  # ids of tickets that are passed over, because their processes do not respond

    def of(self, ticket_id: str) -> QueuePosition | None:
        """The position of a ticket."""
        return next((place for place in self.places if place.ticket.id == ticket_id), None)

    def kept_for_others(self, ticket_id: str) -> dict[str, str]:
        """uuid -> for which user it is kept, of the devices on which others may start now, or that are reserved for
        them.

        A share is not kept from other shares: the plan does not count memory, the claim does.
        """
        mine = self.of(ticket_id)
        shares = bool(mine and mine.request and mine.request.share)
        reserved = {uuid: reservation_text(booking, self.now) for uuid, booking in mine.kept.items()} if mine else {}
        return reserved | {
            uuid: f"about to be claimed by {place.ticket.user}, who waited for it"
            for place in self.places
            if place.now and place.ticket.id != ticket_id and not (shares and place.request and place.request.share)
            for uuid in place.devices
        }


def queue_state(
    directory: LockDirectory, snapshot: Snapshot, facts: QueueFacts, rules: QueueRules, mine: Ticket | None = None
) -> QueueState:
    """The positions of all tickets, and which may start now; with *mine*, if it has no file yet, as the newest.

    What *mine* requests counts, not what its file says, which may be more.  A process that is stopped (Ctrl-Z), or does
    not respond, keeps its position, but no other request waits for it.
    """
    tickets, ignored = read_tickets(directory)
    if mine and all(ticket.id != mine.id for ticket in tickets):
        tickets.append(replace(mine, owner_uid=parties([mine.uid])[mine.uid]))
    elif mine:
        tickets = [replace(one, requests=mine.requests) if one.id == mine.id else one for one in tickets]
    tickets = [replace(one, set_back=not facts.set_back.isdisjoint((one.id, str(one.owner)))) for one in tickets]
    now, own = time.time(), mine and mine.id
    unresponsive: dict[str, str] = {}
    usage = _together(used_by(facts.claims, now) if facts.usage is None else facts.usage)
    machine = _machine(snapshot, facts, {way for ticket in tickets for way in ticket.requests})
    tickets = _passed_over(
        tickets, {one.id: "its user may make no claim now" for one in tickets if one.uid in facts.denied}
    )
    while True:
        places = plan(order(tickets, usage, rules, now), machine, usage, rules, now)
        if directory.keeper is not None and (further := _further_offers(places)):
            tickets = _passed_over(tickets, dict.fromkeys(further, "another request of its user starts first"))
            continue
        if all(has_waker(directory, place.ticket) for place in places if place.now and place.ticket.id != own):
            return QueueState(tuple(places), tuple(ignored), snapshot, facts, now, frozenset(unresponsive))
        # Where one does not, many may: the script that started them all may have been stopped.
        unresponsive |= {
            one.id: "it does not answer" for one in tickets if one.id != own and not has_waker(directory, one)
        }
        tickets = _passed_over(tickets, unresponsive)


def _further_offers(places: Sequence[QueuePosition]) -> set[str]:
    """Ids of the tickets that could start beside another one of their user, while another user waits.

    Where users may be hostile, all tickets of one user keep devices from others as one ticket does: the next one has
    its turn when that has started.
    """
    waiting = {place.ticket.owner for place in places if not place.now and place.request and not place.ticket.after}
    offered: set[int] = set()
    further = set()
    for place in places:
        if place.now:
            user = place.ticket.owner
            if user in offered and waiting - {user}:
                further.add(place.ticket.id)
            offered.add(user)
    return further


def reserved_for_others(snapshot: Snapshot, facts: QueueFacts, ticket: Ticket) -> dict[str, str]:
    """uuid -> for which user it is reserved, of the devices that *ticket* must leave alone even in an empty queue."""
    if not facts.reservations:
        return {}
    now = time.time()
    (place,) = plan([ticket], _machine(snapshot, facts, ticket.requests), {}, QueueRules(), now)
    return {uuid: reservation_text(booking, now) for uuid, booking in place.kept.items()}


def reserved_now(snapshot: Snapshot, reserved: ReservationCalendar) -> dict[str, str]:
    """uuid -> for whom it is reserved, of the devices that are kept for reservations that have begun."""
    begun = tuple(booking for booking in reserved.reservations if booking.begins <= reserved.now)
    facts = QueueFacts(claims=snapshot.claims, quarantined=dict(snapshot.quarantined), reservations=begun)
    nobody = Ticket(id="", uid=-1, user="", since=reserved.now, requests=(Request(),))
    return reserved_for_others(snapshot, facts, nobody)


def _passed_over(tickets: Sequence[Ticket], absent: Mapping[str, str]) -> list[Ticket]:
    return [replace(one, after=one.after or absent[one.id]) if one.id in absent else one for one in tickets]


def _machine(snapshot: Snapshot, facts: QueueFacts, ways: Collection[Request]) -> Machine:
    family: dict[str, list[str]] = {}
    for device in snapshot.devices:
        if device.parent_uuid:
            family.setdefault(device.uuid, []).append(device.parent_uuid)
            family.setdefault(device.parent_uuid, []).append(device.uuid)
    return Machine(
        {way: fit(snapshot, way, facts) for way in ways},
        ends_of(facts.claims),
        {uuid: tuple(relatives) for uuid, relatives in family.items()},
        facts.reservations,
        fit(snapshot, Request(), facts).open if facts.reservations else frozenset(),
        limits_of(facts.claims),
    )


def fit(snapshot: Snapshot, request: Request, facts: QueueFacts) -> Fit:
    """The devices for one request, of any user."""
    alone = [claim for claim in facts.claims if not (request.share and claim.slots)]
    sharing = sharing_of(snapshot, facts.claims) if request.share else None
    try:
        choice = choose(snapshot, request, claimed_by(alone, snapshot.taken_at) | dict(facts.quarantined), sharing)
    except InvalidRequest:  # it names a device that is not there any more
        return Fit((), frozenset())
    opened = {device.uuid for device in choice.eligible}
    others = [device for device in possible(choice).devices if device.uuid not in opened]
    kind: Sequence[Device] = [*choice.eligible, *others]
    if request.num_gpus > 1:
        kind = usable_together(kind, request.num_gpus, opened)
    return Fit(
        tuple(device.uuid for device in kind), frozenset(device.uuid for device in kind if device.uuid in opened)
    )


def ends_of(claims: Sequence[ClaimRecord]) -> dict[str, float]:
    """uuid -> unix time at which the last claim on it should end; without those for which that is unknown."""
    ends: dict[str, float] = {}
    unknown = set()
    for claim in claims:
        end = claim.ends if claim.ends is not None else claim.expected
        for uuid in claim.devices:
            if end is None:
                unknown.add(uuid)
            else:
                ends[uuid] = max(end, ends.get(uuid, end))
    return {uuid: end for uuid, end in ends.items() if uuid not in unknown}


def limits_of(claims: Sequence[ClaimRecord]) -> dict[str, float]:
    """The same by time limits alone."""
    return ends_of([replace_noun(claim, expected=None) for claim in claims])


def _together(usage: Mapping[int, float]) -> dict[int, float]:
    """The use of all uids of a user together: with a new uid for each job a user would always have had nothing."""
    found: dict[int, float] = {}
    for uid, owner_uid in parties(usage).items():
        found[owner_uid] = found.get(owner_uid, 0.0) + usage[uid]
    return found


def used_by(claims: Sequence[ClaimRecord], now: float) -> dict[int, float]:
    """uid -> GPU-seconds of the claims that live, where the earlier ones are not counted."""
    usage: dict[int, float] = {}
    for claim in claims:
        if claim.since is not None and claim.uid >= 0:
            usage[claim.uid] = usage.get(claim.uid, 0.0) + len(claim.devices) * max(0.0, now - claim.since)
    return usage


def has_waker(directory: LockDirectory, ticket: Ticket) -> bool:
    """Whether its process would start: it is neither stopped nor stuck, and reads its bell."""
    return not _stands_still(ticket) and unread_since(directory, ticket) > time.time() - UNRESPONSIVE_SECONDS


def _stands_still(ticket: Ticket) -> bool:
    try:
        return ticket.pid is not None and os.stat(f"/proc/{ticket.pid}").st_uid == ticket.uid and is_stopped(ticket.pid)
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a process stands still (Ctrl-Z)."""
    stat = stats_of((pid,))[pid]
    return stat is not None and stat.state in ("T", "t")
