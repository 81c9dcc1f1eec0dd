"""Reservations on devices: which ones are kept for them at what time, and when another job finds its own free of them.

A reservation is of so many out of some devices.  Which of them are kept is decided anew at each sample, so that jobs
lose as little by it as can be: first those that its user holds, then those whose claims have a time limit that ends
before, then those that are wanted least.  Only time limits count, because gpuguard keeps them; a job of unknown length
may still run in a day.  Does not read reservations: see reservations; does not say who starts: see plan.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

HORIZON_SECONDS = 86400.0  # a job of unknown length keeps no further away from a reservation than this
FOR_EVER = float("inf")


@dataclass(frozen=True)
class PlannedReservation:
    """A reservation: so many devices for one user, from a time until another one."""

    id: str
    uid: int
    user: str
    num_gpus: int
    begins: float  # unix time
    ends: float
    devices: tuple[str, ...]  # uuids of those that will do
    held: tuple[str, ...] = ()  # those of them in claims of that user now


@dataclass(frozen=True)
class ReservedSpan:
    """From when until when (unix time) a device is kept for a reservation."""

    begins: float
    ends: float
    booking: PlannedReservation


@dataclass(frozen=True)
class DeviceAvailability:
    """What is known of the devices when one looks.

    Args:
        free_at: uuid -> unix time from which it is free if no other job starts; without those for which that is
            unknown.
        users: uuid -> uids that have it.
        kin: uuid -> uuids that cannot be used beside it: a GPU and its MIG instances.
    """

    free_at: Mapping[str, float]
    users: Mapping[str, Collection[int]] = field(default_factory=dict)
    relatives: Mapping[str, Collection[str]] = field(default_factory=dict)

    def will_do(self, uuid: str, booking: PlannedReservation, when: float) -> bool:
        """Whether the reservation can have the device at that time."""
        available = self.free_at.get(uuid, FOR_EVER) <= when or booking.uid in self.users.get(uuid, ())
        return available and uuid in booking.devices


Calendar = Mapping[str, Sequence[ReservedSpan]]


def calendar(
    reservations: Sequence[PlannedReservation],
    position_text: DeviceAvailability,
    now: float,
    last: Mapping[str, float] | None = None,
) -> Calendar:
    """uuid -> when it is kept for which reservation, in order of time.

    Args:
        bookings: that are not over, the first made first.
        prospects: of the devices.
        now: unix time.
        last: uuid -> how much it is wanted; the most wanted are kept last.
    """
    dislike = last or {}
    known = {uuid for booking in reservations for uuid in booking.devices}
    order = sorted(
        known,
        key=lambda uuid: (
            uuid not in position_text.users,
            position_text.free_at.get(uuid, FOR_EVER) <= now,
            dislike.get(uuid, 0.0),
            uuid,
        ),
    )
    spans: dict[str, list[ReservedSpan]] = {}
    for group in _groups([booking for booking in reservations if booking.ends > now]):
        for uuid, span in _kept(group, position_text, now, order):
            # Not its GPU with an instance: that cannot be had whole, and its other instances stay free.
            spans.setdefault(uuid, []).append(span)
    return {uuid: sorted(found, key=lambda span: span.begins) for uuid, found in spans.items()}


def _groups(reservations: Sequence[PlannedReservation]) -> list[list[PlannedReservation]]:
    """Those that overlap in time, with those that overlap these, and so on."""
    left, groups = list(reservations), []
    while left:
        group = [left.pop(0)]
        for one in group:
            near = [each for each in left if each.begins < one.ends and one.begins < each.ends]
            left = [each for each in left if each not in near]
            group += near  # the loop goes on with them
        groups.append(group)
    return groups


def _kept(
    group: Sequence[PlannedReservation], position_text: DeviceAvailability, now: float, order: Sequence[str]
) -> list[tuple[str, ReservedSpan]]:
    """Which device is kept when, for reservations that overlap in time.

    Where all can have the same devices, as many are kept at each moment as are reserved then; what is missing comes as
    soon as time limits set something free, so no job may share that for longer.  Where they differ, a job
    that began on a device which another one needs later could not move: each gets devices of its own.
    """
    if not _alike(group):
        found = _matched(group, position_text, now, order)
        return [(uuid, ReservedSpan(max(now, each.begins), each.ends, each)) for uuid, each in found.items()]
    borders = {max(now, each) for one in group for each in (one.begins, one.ends)}
    freed = {when for when in position_text.free_at.values() if min(borders) < when < max(borders)} - borders
    spans, found = [], dict[str, PlannedReservation]()
    for begins, ends in pairwise(sorted(borders | freed)):
        active = [each for each in group if each.begins <= begins < each.ends]
        before = found if begins in freed else {}  # a reservation keeps the devices that it has
        found = _matched(active, position_text, begins, sorted(order, key=lambda uuid: uuid not in before))
        spans += [(uuid, ReservedSpan(begins, ends, booking)) for uuid, booking in found.items()]
    return spans


def _alike(group: Sequence[PlannedReservation]) -> bool:
    return len({frozenset(each.devices) for each in group}) == 1


def _matched(
    active: Sequence[PlannedReservation], position_text: DeviceAvailability, when: float, order: Sequence[str]
) -> dict[str, PlannedReservation]:
    """uuid -> the reservation that keeps it from that time on: as many as can be, the first of *order* first.

    The devices that can be kept together are a matroid: taking them greedily, and moving those that were taken
    before to another reservation where that makes room, gives the best set.
    """
    got: dict[str, list[str]] = {booking.id: [] for booking in active}
    missing = sum(booking.num_gpus for booking in active)

    def put(uuid: str, tried: set[str]) -> bool:
        fitting = [
            each
            for each in active
            if each.id not in tried and position_text.will_do(uuid, each, max(when, each.begins))
        ]
        for booking in fitting:
            if len(got[booking.id]) < booking.num_gpus:
                got[booking.id].append(uuid)
                return True
        tried.update(booking.id for booking in fitting)
        for mine in (got[booking.id] for booking in fitting):
            for place, other in enumerate(mine):
                if put(other, tried):
                    mine[place] = uuid
                    return True
        return False

    for uuid in order:
        if not missing:
            break
        missing -= put(uuid, set())
    return {uuid: booking for booking in active for uuid in got[booking.id]}


@dataclass(frozen=True)
class StartingJob:
    """A job of a plan that starts now; *until* is inf where no time limit ends it."""

    id: str
    uid: int
    devices: tuple[str, ...]
    until: float


class Calendars:
    """What is kept for reservations while a plan is made.

    Args:
        bookings: that are not over, the first made first.
        prospects: of the devices before any ticket of the plan starts.
        now: unix time.
    """

    def __init__(
        self, reservations: Sequence[PlannedReservation], position_text: DeviceAvailability, now: float
    ) -> None:
        self._bookings, self._before, self._now = reservations, position_text, now
        self._known: dict[tuple[object, ...], Calendar] = {}  # most tickets of a queue are alike

    def after(self, started: Sequence[StartingJob], wanted: Sequence[str], uid: int | None = None) -> Calendar:
        """The calendar once *started* run, where possible of none of the devices *wanted*, the best of them first.

        Without what is reserved for *uid*.
        """
        if not self._bookings:
            return {}
        others = [booking for booking in self._bookings if booking.uid != uid]
        key = (tuple(job.id for job in started), tuple(wanted), uid if len(others) < len(self._bookings) else None)
        if key not in self._known:
            last = {uuid: float(place) for place, uuid in enumerate(reversed(wanted), 1)}
            self._known[key] = calendar(others, self._prospects(started), self._now, last)
        return self._known[key]

    def reserved_beside(self, started: Sequence[StartingJob], wanted: Sequence[str], uid: int) -> Calendar:
        """What a user has to leave alone to start beside *started*, which have claimed nothing yet.

        Users for whom devices are reserved may not come: what they are about to claim is kept for them
        only when they have it, and until then what else there is, should one of them be gone, or all.
        """
        found = self.after(started, wanted, uid)
        begun_for = {job.uid for job in started} & {booking.uid for booking in self._bookings} - {uid}
        for gone in [{guest} for guest in begun_for] + [begun_for] * (len(begun_for) > 1):
            there = [job for job in started if job.uid not in gone]
            theirs = {uuid for job in started if job.uid in gone for uuid in job.devices}  # to be kept first of all
            others = sorted([uuid for uuid in wanted if uuid not in theirs], key=lambda uuid: uuid in found)
            without = self.after(there, others, uid)
            found = {uuid: _merged(found.get(uuid, ()), without.get(uuid, ())) for uuid in [*found, *without]}
        return found

    def _prospects(self, started: Sequence[StartingJob]) -> DeviceAvailability:
        free_at = dict(self._before.free_at)
        users = {uuid: set(uids) for uuid, uids in self._before.users.items()}
        for booking in self._bookings:
            for uuid in booking.held:
                users.setdefault(uuid, set()).add(booking.uid)
        for job in started:
            for uuid in job.devices:
                users.setdefault(uuid, set()).add(job.uid)
                for each in (uuid, *self._before.relatives.get(uuid, ())):
                    free_at[each] = max(job.until, free_at.get(each, FOR_EVER))  # it may join one that has no limit
        return DeviceAvailability(free_at, users, self._before.relatives)

    def begun_for(self, uid: int) -> list[PlannedReservation]:
        """The reservations for a user that have begun."""
        return [one for one in self._bookings if one.uid == uid and one.begins <= self._now < one.ends]

    def uses_own_reservations(self, uid: int, devices: Collection[str], started: Sequence[StartingJob]) -> bool:
        """Whether a job gets no more than what is reserved for its user now, which no other user would get."""
        own = self.begun_for(uid)
        reserved = {uuid for one in own for uuid in one.devices}
        used = {uuid for one in own for uuid in one.held}
        used |= {uuid for job in started if job.uid == uid for uuid in job.devices} & reserved
        return reserved.issuperset(devices) and len(used.union(devices)) <= sum(one.num_gpus for one in own)


def _merged(some: Sequence[ReservedSpan], others: Sequence[ReservedSpan]) -> list[ReservedSpan]:
    return sorted([*some, *others], key=lambda span: span.begins)


def reservation_text(booking: PlannedReservation, now: float) -> str:
    """``"kept for alice's reservation from 09:00"``, ``"... until 12:00"`` once it has begun."""
    if booking.begins > now:
        return f"kept for {booking.user}'s reservation from {clock_text(booking.begins, now)}"
    return f"kept for {booking.user}'s reservation until {clock_text(booking.ends, now)}"


def clock_text(when: float, now: float) -> str:
    """A time for people: ``"09:00"`` today, else ``"Sat 21 Nov 09:00"``."""
    there = time.localtime(when)
    return time.strftime("%H:%M" if there[:3] == time.localtime(now)[:3] else "%a %d %b %H:%M", there)


def clear_at(spans: Sequence[ReservedSpan], uid: int, earliest: float, lasts: float) -> float:
    """The earliest time at which a job of a user can have a device for so long: between what is kept for others."""
    for span in spans:
        if span.booking.uid != uid and span.begins < earliest + lasts and earliest < span.ends:
            earliest = span.ends
    return earliest


def in_the_way(spans: Sequence[ReservedSpan], uid: int, now: float, lasts: float) -> PlannedReservation | None:
    """The reservation for which a job that starts now cannot have the device, or None."""
    return next(
        (each.booking for each in spans if each.booking.uid != uid and each.begins < now + lasts and now < each.ends),
        None,
    )


def can_be_met(booking: PlannedReservation, others: Sequence[PlannedReservation], devices: Collection[str]) -> bool:
    """Whether a machine with these devices, all of them free, has room for it beside *others*."""
    (group, *_) = _groups([booking, *others])
    empty, order = DeviceAvailability(dict.fromkeys(devices, -FOR_EVER)), sorted(devices)
    alike = _alike(group)
    for when in {each.begins for each in group} if alike else {booking.begins}:
        active = [each for each in group if not alike or each.begins <= when < each.ends]
        if len(_matched(active, empty, when, order)) < sum(each.num_gpus for each in active):
            return False
    return True
