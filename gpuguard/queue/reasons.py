"""Why a request waits, when it starts, and for whom a device is kept: the queue in sentences.

They stand in JSON and in the daemon's answers, too: translated() shows them.  Does not decide any of it: see state and
backfill.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory
from gpuguard.device_state import device_title
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _, translated
from gpuguard.locale.messages import all_of, nsentence, sentence
from gpuguard.model import HEALTH, MEMORY, PROCESSES, ClaimRecord, Snapshot
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.priority import QueueRules, Ticket
from gpuguard.queue.reservations import ReservationCalendar, clock_text
from gpuguard.queue.state import QueueFacts, QueueState, choose_for, expected_end, kept_from, read_queue_facts
from gpuguard.queue.tickets import new_ticket
from gpuguard.request import Request
from gpuguard.units import format_duration
from gpuguard.users import user_name

_AND = " and "  # one of locale.SEPARATORS


def reservation_text(reservation: Reservation, now: float) -> str:
    """``"kept for alice's reservation from 09:00"``, ``"... until 12:00"`` once it has begun."""
    time = _from_or_until(reservation, now)
    return sentence("queue.kept", "kept for {user}'s reservation {time}", user=reservation.whose, time=time)


def _from_or_until(reservation: Reservation, now: float) -> str:
    if reservation.begins > now:
        return sentence("queue.from", "from {time}", time=clock_text(reservation.begins, now))
    return sentence("queue.until", "until {time}", time=clock_text(reservation.ends, now))


def kept_for_others(queue: QueueState, ticket_id: str) -> dict[str, str]:
    """uuid -> for whom the device is kept, in words: others may start on it now, or it is reserved for them.

    A share keeps no device from other shares, because the claim counts memory and the plan does not.
    """
    mine = queue.of(ticket_id)
    shares = mine.request is not None and mine.request.share
    return {uuid: reservation_text(reservation, queue.now) for uuid, reservation in mine.kept.items()} | {
        uuid: sentence("queue.offered", "about to be claimed by {user}, who waited for it", user=other.ticket.user)
        for other in queue.positions
        if other.now and other.ticket.id != ticket_id and not (shares and other.request and other.request.share)
        for uuid in other.devices
    }


def reserved_for_others(
    backend: Backend, directory: LockDirectory, snapshot: Snapshot, request: Request
) -> dict[str, str]:
    """uuid -> for whom it is reserved, in words, for devices that this user could not have even in an empty queue."""
    # The health of all devices is needed: a reservation that seems to have room on a broken one needs another.
    snapshot = snapshot.updated(backend.sample({MEMORY, PROCESSES, HEALTH}))
    facts = read_queue_facts(directory, snapshot, QueueRules(fair_share=False))
    ticket = new_ticket([request])
    kept = kept_from(snapshot, facts, ticket)
    return {uuid: reservation_text(reservation, ticket.since) for uuid, reservation in kept.items()}


def reserved_now(snapshot: Snapshot, reserved: ReservationCalendar) -> dict[str, str]:
    """uuid -> for whom it is reserved, in words, for devices that are kept for reservations that have begun."""
    begun = tuple(reservation for reservation in reserved.reservations if reservation.begins <= reserved.now)
    facts = QueueFacts(claims=snapshot.claims, quarantined=dict(snapshot.quarantined), reservations=begun)
    any_user = Ticket(id="", uid=-1, user="", since=reserved.now, requests=(Request(),))
    kept = kept_from(snapshot, facts, any_user)
    return {uuid: reservation_text(reservation, reserved.now) for uuid, reservation in kept.items()}


def brief_text(position: QueuePosition, queue: QueueState) -> str:
    """One line for a terminal, the reason first: ``"the job of bob has no time limit (2 of 3 in the queue)"``.

    It is in the language of the user.
    """
    text = translated(start_text(position, queue, brief=True))
    if position.ticket.after:
        return text
    return _("{text} ({number} of {count} in the queue)").format(
        text=text, number=position.number, count=len(queue.positions)
    )


def position_text(position: QueuePosition, queue: QueueState) -> str:
    """``"number 2 of 3 in the queue, starts in about 2h"``, without the number if the request is not queued yet."""
    text = start_text(position, queue)
    if position.ticket.after:
        return text
    return sentence(
        "queue.number",
        "number {number} of {count} in the queue, {text}",
        number=position.number,
        count=len(queue.positions),
        text=text,
    )


def start_text(position: QueuePosition, queue: QueueState, *, brief: bool = False) -> str:
    """When it starts and why not earlier: ``"starts in about 2h, when GPU 3 is free: time limit of al's job"``.

    With *brief* the latest start is left out, and if the start is unknown, only the reason is given.
    """
    text, latest = _likely_text(position, queue, brief), certain_start(position)
    soonest = max(queue.now, position.start or 0.0) + 1
    if brief or position.now or position.ticket.after or latest is None or latest <= soonest:
        return text
    return sentence(
        "queue.latest",
        "{text}; at the latest {promise}, if time limits are kept",
        text=text,
        promise=clock_text(math.ceil(latest / 60) * 60.0, queue.now),  # without its seconds it would be earlier
    )


def certain_start(position: QueuePosition) -> float | None:
    """When it starts at the latest (unix time) if time limits are kept, or None if that is unknown.

    Others may put it off until its promise.  The promise alone is not enough, because users with less GPU time may have
    joined since.
    """
    return None if position.latest is None else max(position.latest, position.ticket.promise or 0.0)


def _likely_text(position: QueuePosition, queue: QueueState, brief: bool) -> str:
    if position.ticket.after:
        return sentence("queue.not_queued", "not queued yet: {after}", after=position.ticket.after)
    if position.now:
        return sentence("queue.starts_now", "starts now")
    if position.held_back_by:
        delayed = _held_back_text(position.held_back_by, position, queue)
        return sentence("queue.held_back", "held back: it would delay {request}", request=delayed)
    if position.request is None:
        return sentence("queue.no_gpus", "no GPUs for it as things are")
    if not position.devices:
        return sentence("queue.too_far", "too far behind for a plan")
    why = _kept_out_text(position.request, position.devices, queue)
    if why is None and position.start is not None:
        return _start_in_words(position.start, queue, _freed_text(position, position.start, queue))
    why = why or _unknown_end_text(position, queue)
    return why if brief else sentence("queue.unknown", "start unknown: {why}", why=why)


def _kept_out_text(request: Request, devices: Sequence[str], queue: QueueState) -> str | None:
    """What keeps a share off one of *devices*, or None; not the claims there, because the plan knows their ends."""
    if not request.share:
        return None
    try:
        refused = choose_for(queue.snapshot, request, queue.facts, queue.sharing).refused
    except InvalidRequest:
        return None
    reasons = (
        sentence("because", "{what}: {why}", what=device_title(refusal.device), why=reason.text)
        for refusal in refused
        for reason in refusal.reasons
        if refusal.device.uuid in devices and reason.option not in ("", "--memory", "--slots")
    )
    return next(reasons, None)


def _held_back_text(delayed: str, position: QueuePosition, queue: QueueState) -> str:
    """The request or the reservation that *position* would delay, and when it could start or will start instead."""
    for other in queue.positions:
        if other.ticket.id == delayed:
            facts = {"user": other.ticket.user, "count": str(other.ticket.num_gpus)}
            text = sentence("queue.came_before", "{user}'s request for {count}, which came before", **facts)
            if other.ticket.since + queue.bound < queue.now:
                waited = format_duration(round(queue.now - other.ticket.since))
                text = sentence(
                    "queue.waited",
                    "{user}'s request for {count}, which has waited for {waited}",
                    **facts,
                    waited=waited,
                )
            room = int((other.latest or 0.0) - queue.now) // 60 * 60.0  # whole minutes, as people write them
            if room <= 0:
                return text
            advice = sentence(
                "queue.limit_at_most",
                "with a --time-limit of at most {limit} it could start now",
                limit=format_duration(room),
            )
            return all_of((text, advice))
    reservation = next((reserved for reserved in queue.facts.reservations if reserved.key == delayed), None)
    if reservation is None:
        return sentence("queue.reservation", "reservation {delayed}", delayed=delayed)
    time = _from_or_until(reservation, queue.now)
    parts: list[str] = [
        sentence("queue.reservation_of", "the reservation of {user} {time}", user=reservation.whose, time=time)
    ]
    if position.start is not None:
        parts.append(_start_in_words(position.start, queue))
    if reservation.begins > queue.now and position.ticket.time_limit is None:
        parts.append(sentence("queue.limit_before", "with a --time-limit that ends before, it could start now"))
    return all_of(parts)


def unplanned_texts(queue: QueueState, users: Collection[str] = ()) -> list[str]:
    """One text for each user (or each of *users*) with more requests than are planned at a time: how many wait."""
    return [
        nsentence(
            "queue.unplanned",
            "{number} more request of {user} waits until those before it have started",
            "{number} more requests of {user} wait until those before them have started",
            len(file.unread),
            user=user_name(file.uid),
        )
        for file in queue.ignored
        if file.unread and (not users or user_name(file.uid) in users)
    ]


def passing_text(position: QueuePosition, queue: QueueState) -> str | None:
    """Until when shorter requests may start before this one, or None if a start was promised or it starts now."""
    ticket = position.ticket
    if position.now or ticket.after or ticket.promise is not None or position.request is None:
        return None
    until = ticket.since + queue.bound
    if until > queue.now:
        time = clock_text(until, queue.now)
        return sentence("queue.shorter_first", "shorter jobs may start before this one until {time}", time=time)
    return sentence("queue.ending_first", "only jobs that probably end before its GPUs are free start first")


def _start_in_words(start: float, queue: QueueState, why: str = "") -> str:
    if (seconds := round(start - queue.now)) <= 0:
        if why:
            return sentence("queue.starts_soon_because", "starts in a moment, {why}", why=why)
        return sentence("queue.starts_soon", "starts in a moment")
    time = format_duration(seconds)
    if why:
        return sentence("queue.starts_because", "starts in about {seconds}, {why}", seconds=time, why=why)
    return sentence("queue.starts", "starts in about {seconds}", seconds=time)


def _freed_text(position: QueuePosition, start: float, queue: QueueState) -> str:
    """Which device is the last one to be free and how that is known, or "" if it is not known."""
    for kept in queue.facts.reservations:
        if abs(kept.ends - start) < 1.0:
            time = _from_or_until(kept, queue.now)
            return sentence(
                "queue.after_reservation", "after the reservation of {user} {time}", user=kept.whose, time=time
            )
    for uuid in position.devices:
        claim = _claim_on(uuid, queue)
        if claim is None:
            continue
        end = expected_end(claim, queue.now)
        if end is not None and abs(end - start) < 1.0:
            device = queue.snapshot.device(uuid)
            freed = sentence("queue.freed", "when {gpu} is free", gpu=device_title(device) if device else uuid)
            facts = {"freed": freed, "user": claim.user}
            if end == claim.ends:
                return sentence("queue.by_its_limit", "{freed}: time limit of {user}'s job", **facts)
            if (claim.expected or 0.0) <= queue.now:
                return sentence(
                    "queue.outran", "{freed}, a guess: {user}'s job runs longer than their earlier ones", **facts
                )
            return sentence(
                "queue.as_earlier_ones", "{freed}, if {user}'s job takes as long as their earlier ones", **facts
            )
    before = _on_the_same_devices(position, queue)
    return sentence("queue.after_request", "after {user}'s request", user=before.ticket.user) if before else ""


def _unknown_end_text(position: QueuePosition, queue: QueueState) -> str:
    if before := _on_the_same_devices(position, queue):
        user = before.ticket.user
        return sentence("queue.endless_request", "{user}'s request before it has no time limit", user=user)
    claimed = {uuid: claim for uuid in position.devices if (claim := _claim_on(uuid, queue))}
    claims = {claim.id: claim for claim in claimed.values()}
    endless = [claim for claim in claims.values() if claim.ends is None and claim.expected is None]
    if not endless:
        others = set(position.devices) - set(claimed)
        is_used = any(device.processes for device in queue.snapshot.devices if device.uuid in others)
        is_late = any((expected_end(claim, queue.now) or 0.0) <= queue.now for claim in claims.values())
        if claims and (is_late or not is_used):
            return sentence("queue.over_its_time", "a job is over its time")
        if is_used:
            return sentence("queue.unclaimed_use", "a GPU is in use without a claim")
        return sentence("queue.not_free", "a GPU is not free, though it has no claim")
    unknown = sentence("queue.unknown_user", "an unknown user")
    users = all_of(sorted({claim.user if claim.uid >= 0 else unknown for claim in endless}), _AND)
    return nsentence(
        "queue.endless_jobs",
        "the job of {users} has no time limit",
        "the jobs of {users} have no time limit",
        len(endless),
        users=users,
    )


def _on_the_same_devices(position: QueuePosition, queue: QueueState) -> QueuePosition | None:
    """The nearest request before it that is planned on one of its devices and starts no later, or None.

    If the start of *position* is unknown, any start counts.
    """
    before = [other for other in queue.positions[: position.number - 1] if set(other.devices) & set(position.devices)]
    if position.start is not None:  # a small job may find room before a large one
        before = [other for other in before if other.start is not None and other.start <= position.start]
    return before[-1] if before else None


def _claim_on(uuid: str, queue: QueueState) -> ClaimRecord | None:
    return next((claim for claim in queue.facts.claims if uuid in claim.devices), None)
