"""The queue at one moment: the tickets, the machine, and the plan that follows from both.

Reads the tickets, claims, restrictions, recent use and the site's rules, but not the driver.  Does not wait: see
waiter.  Does not put the plan into words: see reasons.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuguard.claims.claim import sharing_of
from gpuguard.claims.directory import Gate, LockDirectory
from gpuguard.claims.records import probe_in_gate
from gpuguard.claims.restrictions import (
    DENIED,
    QUARANTINED,
    SET_BACK,
    Restriction,
    denial_of,
    denial_text,
    quarantine_text,
    read_restrictions,
    restriction_files,
)
from gpuguard.device_state import grouped
from gpuguard.eligibility import Sharing
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history.queries import query_store, store_path
from gpuguard.locale.messages import sentence
from gpuguard.model import ClaimRecord, Device, Snapshot
from gpuguard.procfs import stat_of
from gpuguard.queue.backfill import Fit, Machine, QueuePosition, backlog, plan
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.estimates import probable_end
from gpuguard.queue.priority import TYPICAL_SECONDS, QueueRules, Ticket, bound_now, order
from gpuguard.queue.reservations import ReservationCalendar, reservation_calendar
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.tickets import IgnoredFile, read_tickets, unread_since
from gpuguard.request import Request
from gpuguard.select import Choice, choose, claimed_by, possible, usable_together
from gpuguard.users import accountable_uid, accountable_uids

UNRESPONSIVE_SECONDS = 15.0  # a ticket whose waker is not read for so long is passed over
USAGE_SECONDS = 60.0  # after which the users' GPU time is read again
_ANOTHER_FIRST = sentence("queue.another_first", "another request of its user starts first")
_SILENT = sentence("queue.silent", "it does not answer")
WaitingTickets = tuple[Sequence[Ticket], Sequence[IgnoredFile]]  # as read_tickets() returns them
_known_usage: dict[str, tuple[float, dict[int, float] | None]] = {}  # path -> monotonic time, answer


@dataclass(frozen=True)
class QueueFacts:
    """What is known besides a snapshot."""

    claims: Sequence[ClaimRecord] = ()  # only those that live
    quarantined: Mapping[str, str] = field(default_factory=dict)  # uuid -> why it is out of service, in words
    denied: Mapping[str, Restriction] = field(default_factory=dict)  # by uid, for users who may make no claim now
    usage: Mapping[int, float] | None = None  # uid -> recent GPU-seconds, or None if they are not counted here
    set_back: frozenset[str] = frozenset()  # ids of tickets, and uids as text, that were moved to the end of the queue
    reservations: tuple[Reservation, ...] = ()  # only those that count
    changes_at: float = float("inf")  # unix time at which the next of these is over by itself
    restriction_files: tuple[str, ...] = ()  # those in which a change of the restrictions would show
    reserved: ReservationCalendar = field(default_factory=ReservationCalendar)  # all reservations, to be shown


@dataclass(frozen=True)
class QueueState:
    """The queue at one moment.  Tickets in *unresponsive* (ids) are passed, because their processes do not respond."""

    positions: tuple[QueuePosition, ...]
    ignored: tuple[IgnoredFile, ...]
    snapshot: Snapshot
    facts: QueueFacts
    now: float
    unresponsive: frozenset[str] = frozenset()
    bound: float = QueueRules.bound  # seconds after which a request is passed only by jobs that end in time
    sharing: Mapping[str, Sharing] = field(default_factory=dict)  # uuid -> who shares the device

    def of(self, ticket_id: str) -> QueuePosition:
        """The position of a ticket that is in the queue."""
        return next(position for position in self.positions if position.ticket.id == ticket_id)


def read_queue(
    directory: LockDirectory, snapshot: Snapshot, mine: Ticket | None = None, *, rules: QueueRules | None = None
) -> QueueState:
    """Read the queue as it is now, with the ticket *mine* at its end if that has no file yet.

    *snapshot* has the fields that the requests of the queue need.  *rules* are the site's, or None to read its file.
    """
    if rules is None:
        rules = read_queue_settings(directory).rules
    return queue_state(directory, snapshot, read_queue_facts(directory, snapshot, rules), rules, mine)


def read_queue_facts(directory: LockDirectory, snapshot: Snapshot, rules: QueueRules) -> QueueFacts:
    """Read the claims, restrictions, reservations and recent use as they are now."""
    now = time.time()
    uuids = [device.uuid for device in snapshot.devices]
    quarantined = read_restrictions(directory, QUARANTINED, now)
    denied = read_restrictions(directory, DENIED, now)
    set_back = {} if directory.keeper is None else read_restrictions(directory, SET_BACK, now)
    restrictions = (*quarantined.values(), *denied.values(), *set_back.values())
    ends = [restriction.until for restriction in restrictions if restriction.until is not None]
    with Gate(directory):
        claims = probe_in_gate(directory, uuids)  # without holders: they need all of /proc, and do not matter here
    reserved = reservation_calendar(directory, uuids, claims, now)
    return QueueFacts(
        claims=claims,
        quarantined={uuid: quarantine_text(quarantined[uuid]) for uuid in uuids if uuid in quarantined},
        denied=denied,
        usage=_recent_usage(directory, rules) if rules.fair_share else {},
        set_back=frozenset(set_back),
        reservations=reserved.reservations,
        reserved=reserved,
        changes_at=min([*ends, reserved.changes_at]),
        restriction_files=restriction_files(directory) if restrictions else (),
    )


def _recent_usage(directory: LockDirectory, rules: QueueRules) -> dict[int, float] | None:
    """uid -> recent GPU-seconds from the daemon's store, or None if there is none."""
    path, now = store_path(directory), time.monotonic()
    read_at, known = _known_usage.get(path, (-USAGE_SECONDS, None))
    if now - read_at >= USAGE_SECONDS:
        try:
            known = query_store(path, lambda usage: usage.decayed(rules.half_life))
        except GpuguardError:
            known = None
        _known_usage[path] = now, known
    return known


def queue_state(
    directory: LockDirectory,
    snapshot: Snapshot,
    facts: QueueFacts,
    rules: QueueRules,
    mine: Ticket | None = None,
    waiting: WaitingTickets | None = None,
) -> QueueState:
    """Find the positions of all tickets, and those that may start now; *mine* counts as it is, not as its file says.

    A process that is stopped (Ctrl-Z), or does not respond, keeps its position, but no other request waits for it.
    *waiting* holds the tickets that were read a moment ago, or is None to read them now.
    """
    tickets, ignored = waiting or read_tickets(directory)
    if mine and all(ticket.id != mine.id for ticket in tickets):
        owner = accountable_uid(mine.uid)
        before = sum(ticket.owner == owner for ticket in tickets)
        is_left_out = mine.id and any(file.unread and file.uid == owner for file in ignored)
        waits = sentence("queue.waits_for_own", "waits for {count} earlier requests of its user", count=before)
        after = waits if is_left_out else mine.after
        tickets = [*tickets, replace(mine, owner_uid=owner, after=after)]
    elif mine:
        tickets = [replace(ticket, requests=mine.requests) if ticket.id == mine.id else ticket for ticket in tickets]
    tickets = [
        replace(ticket, set_back=not facts.set_back.isdisjoint((ticket.id, str(ticket.owner)))) for ticket in tickets
    ]
    now, own = time.time(), mine and mine.id
    unresponsive: dict[str, str] = {}
    usage = usage_of_owners(used_by(facts.claims, now) if facts.usage is None else facts.usage)
    requests = {request for ticket in tickets if ticket.after is None for request in ticket.requests}
    sharing = _sharing(snapshot, facts, requests)
    machine = _machine(snapshot, facts, requests, sharing, now)
    rules = bound_now(rules, [claim.waited or 0.0 for claim in facts.claims], backlog(tickets, machine, now))
    denials = {ticket.id: denial_of(facts.denied, ticket.uid) for ticket in tickets}
    tickets = _passed_over(tickets, {name: denial_text(denial) for name, denial in denials.items() if denial})
    while True:
        positions = plan(order(tickets, usage, rules, now), machine, usage, rules, now)
        if directory.keeper is not None and (further := _further_offers(positions)):
            tickets = _passed_over(tickets, dict.fromkeys(further, _ANOTHER_FIRST))
            continue
        starting = [position.ticket for position in positions if position.now]
        if all(ticket.id == own or is_responsive(directory, ticket) for ticket in starting):
            return QueueState(
                tuple(positions),
                tuple(ignored),
                snapshot,
                facts,
                now,
                unresponsive=frozenset(unresponsive),
                bound=rules.bound,
                sharing=sharing,
            )
        # If one does not respond, many may not, because the script that started them all may have been stopped.
        for ticket in tickets:
            if ticket.id != own and not is_responsive(directory, ticket):
                unresponsive[ticket.id] = _SILENT
        tickets = _passed_over(tickets, unresponsive)


def _further_offers(positions: Sequence[QueuePosition]) -> set[str]:
    """Ids of the tickets that could start beside another one of their user while another user waits.

    Where users may be hostile, all tickets of one user may keep only as many devices from others as one ticket does;
    the next may start once that one has started.  The user's tickets that want no more GPUs are included: otherwise
    one after another could start in the next plan, and with 1,000 tickets each plan takes long.
    """
    starting = [position for position in positions if position.now and position.request]
    others = [position for position in positions if not position.now and position.request]
    waiting = {position.ticket.owner for position in others if not position.ticket.after}
    first = {position.ticket.owner: position.ticket.id for position in reversed(starting)}
    most: dict[int, int] = {}  # owner -> the most GPUs that one of the further tickets wants
    for ticket, request in ((position.ticket, position.request) for position in starting):
        if ticket.id != first[ticket.owner] and waiting - {ticket.owner} and request:
            most[ticket.owner] = max(request.num_gpus, most.get(ticket.owner, 0))
    return {
        ticket.id
        for ticket in (position.ticket for position in positions)
        if ticket.id != first.get(ticket.owner)
        and min(request.num_gpus for request in ticket.requests) <= most.get(ticket.owner, 0)
    }


def _passed_over(tickets: Sequence[Ticket], reasons: Mapping[str, str]) -> list[Ticket]:
    return [
        replace(ticket, after=ticket.after or reasons[ticket.id]) if ticket.id in reasons else ticket
        for ticket in tickets
    ]


def kept_from(snapshot: Snapshot, facts: QueueFacts, ticket: Ticket) -> dict[str, Reservation]:
    """uuid -> the reservation for which *ticket* must leave the device alone, even in an empty queue."""
    if not facts.reservations:
        return {}
    now = time.time()
    sharing = _sharing(snapshot, facts, ticket.requests)
    (position,) = plan([ticket], _machine(snapshot, facts, ticket.requests, sharing, now), {}, QueueRules(), now)
    return dict(position.kept)


def _sharing(snapshot: Snapshot, facts: QueueFacts, requests: Collection[Request]) -> Mapping[str, Sharing]:
    """Call sharing_of() once for all *requests*, because it reads from /proc who started a process."""
    return sharing_of(snapshot, facts.claims) if any(request.share for request in requests) else {}


def _machine(
    snapshot: Snapshot,
    facts: QueueFacts,
    requests: Collection[Request],
    sharing: Mapping[str, Sharing],
    now: float,
) -> Machine:
    parts = [(device.uuid, device.parent_uuid) for device in snapshot.devices if device.parent_uuid]
    relatives = grouped(pair for part, whole in parts for pair in ((part, whole), (whole, part)))
    return Machine(
        {request: fit(snapshot, request, facts, sharing) for request in requests},
        last_ends(facts.claims, lambda claim: claim.ends),
        last_ends(facts.claims, lambda claim: expected_end(claim, now)),
        last_ends(
            facts.claims,
            lambda claim: (
                expected_end(claim, now)
                or probable_end(now if claim.since is None else claim.since, TYPICAL_SECONDS, now)
            ),
        ),
        {uuid: tuple(uuids) for uuid, uuids in relatives.items()},
        facts.reservations,
        fit(snapshot, Request(), facts, {}).open if facts.reservations else frozenset(),
    )


def choose_for(snapshot: Snapshot, request: Request, facts: QueueFacts, sharing: Mapping[str, Sharing]) -> Choice:
    """Choose the devices that will do for one request of any user; *sharing* comes from sharing_of().

    Raises InvalidRequest as choose() does.
    """
    alone = [claim for claim in facts.claims if not (request.share and claim.slots)]
    taken = claimed_by(alone, snapshot.taken_at) | dict(facts.quarantined)
    return choose(snapshot, request, taken, sharing if request.share else None)


def fit(snapshot: Snapshot, request: Request, facts: QueueFacts, sharing: Mapping[str, Sharing]) -> Fit:
    """The devices for one request of any user; *sharing* comes from sharing_of()."""
    try:
        choice = choose_for(snapshot, request, facts, sharing)
    except InvalidRequest:  # it names a device that is not there any more
        return Fit((), frozenset())
    opened = {device.uuid for device in choice.eligible}
    others = [device for device in possible(choice).devices if device.uuid not in opened]
    devices: Sequence[Device] = [*choice.eligible, *others]
    if request.num_gpus > 1:
        devices = usable_together(devices, request.num_gpus, opened)
    uuids = tuple(device.uuid for device in devices)
    return Fit(uuids, frozenset(uuids) & opened)


def last_ends(claims: Sequence[ClaimRecord], end_of: Callable[[ClaimRecord], float | None]) -> dict[str, float]:
    """uuid -> unix time at which the last claim on the device ends, unless *end_of* is None for a claim on it."""
    ends: dict[str, float] = {}
    for claim in claims:
        end = end_of(claim)
        for uuid in claim.devices:
            ends[uuid] = max(math.inf if end is None else end, ends.get(uuid, 0.0))
    return {uuid: end for uuid, end in ends.items() if end < math.inf}


def expected_end(claim: ClaimRecord, now: float) -> float | None:
    """When a claim ends, judged by its user's earlier jobs but no later than its time limit; or None if unknown."""
    if claim.expected is None:
        return claim.ends
    since = min(now, claim.expected) if claim.since is None else claim.since
    end = probable_end(since, claim.expected - since, now)
    return end if claim.ends is None else min(end, claim.ends)


def usage_of_owners(usage: Mapping[int, float]) -> dict[int, float]:
    """Add up the use of all uids of each user; otherwise a new uid for each job would always have used nothing."""
    uses = grouped((owner, usage[uid]) for uid, owner in accountable_uids(usage).items())
    return {owner: sum(own) for owner, own in uses.items()}


def used_by(claims: Sequence[ClaimRecord], now: float) -> dict[int, float]:
    """uid -> GPU-seconds of the claims that live, for where the use of earlier ones is not known."""
    uses = grouped(
        (claim.uid, len(claim.devices) * max(0.0, now - claim.since))
        for claim in claims
        if claim.since is not None and claim.uid >= 0
    )
    return {uid: sum(own) for uid, own in uses.items()}


def is_responsive(directory: LockDirectory, ticket: Ticket) -> bool:
    """Whether the ticket's process is neither stopped nor stuck, and reads its waker."""
    with suppress(OSError):
        if ticket.pid is not None and os.stat(f"/proc/{ticket.pid}").st_uid == ticket.uid and is_stopped(ticket.pid):
            return False
    return unread_since(directory, ticket) > time.time() - UNRESPONSIVE_SECONDS


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (Ctrl-Z)."""
    stat = stat_of(pid)
    return stat is not None and stat.state in ("T", "t")
