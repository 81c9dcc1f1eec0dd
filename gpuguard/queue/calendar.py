"""The reservation calendar: which devices are kept for reservations at what time, and when other jobs can have them.

A reservation is for a number of devices out of a set.  At each sample it is decided anew which of them are kept, so
that jobs lose as little as possible: first the devices that its user holds, then those whose claims end by their time
limit before it begins, then those that are wanted least.  Only time limits count, because gpuguard keeps them; a job of
unknown length may still run in a day.

This module reads nothing: see reservations.  It does not decide which requests start: see backfill.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gpuguard.device_state import grouped
from gpuguard.locale.messages import sentence

HORIZON_SECONDS = 86400.0  # a job of unknown length keeps no further away from a reservation than this
FOR_EVER = float("inf")


@dataclass(frozen=True)
class Reservation:
    """A number of devices that are reserved for one user, or for the users of a group, between two times."""

    id: str  # unique among those of its maker
    maker: int  # uid of the owner of its file
    uid: int | None  # of the user it is for, or None if it is for a group
    user: str | None  # the name of *uid*
    num_gpus: int
    begins: float  # unix time
    ends: float
    devices: tuple[str, ...]  # uuids of those that will do
    made: float = 0.0  # unix time, from the file system, so that it cannot be backdated
    note: str | None = None  # for people
    held: tuple[str, ...] = ()  # those of its devices that are in claims of its users now
    gid: int | None = None  # of the group it is for
    group: str | None = None  # the name of *gid*, or None if it is unknown, or no group has that number any more
    members: Container[int] = ()  # uids of the users in the group

    @property
    def whose(self) -> str:
        """The user or group it is for, in words: ``"alice"``, ``"group vision"``."""
        if self.user is not None:
            return self.user
        group = self.group or sentence("reservation.unknown_group", "{gid} (unknown here)", gid=str(self.gid))
        return sentence("reservation.group", "group {group}", group=group)

    def admits(self, uid: int) -> bool:
        """Return whether it is for this user."""
        return uid == self.uid or uid in self.members

    @property
    def key(self) -> str:
        """The key, unique among all reservations."""
        return f"{self.maker}.{self.id}"


@dataclass(frozen=True)
class ReservedSpan:
    """The time (from *begins* to *ends*, unix time) for which a device is kept for a reservation."""

    begins: float
    ends: float
    reservation: Reservation

    def excludes(self, uid: int, start: float, lasts: float) -> bool:
        """Return whether a job of this user that starts at *start* and *lasts* so long cannot have the device."""
        return not self.reservation.admits(uid) and self.begins < start + lasts and start < self.ends


@dataclass(frozen=True)
class DeviceAvailability:
    """The state of the devices now, as far as it is known."""

    free_at: Mapping[str, float]  # uuid -> unix time from which it is free if no other job starts, where known
    users: Mapping[str, Collection[int]] = field(default_factory=dict)  # uuid -> uids that have it
    relatives: Mapping[str, Collection[str]] = field(default_factory=dict)  # a GPU and its MIG instances


Calendar = Mapping[str, Sequence[ReservedSpan]]


def calendar(
    reservations: Sequence[Reservation],
    availability: DeviceAvailability,
    now: float,
    last: Mapping[str, float] | None = None,
) -> Calendar:
    """Return uuid -> the spans for which the device is kept for one of *reservations*, in order of time.

    *reservations* begin with the one that was made first.  *last* maps uuid -> how much the device is wanted; the most
    wanted devices are kept last.
    """
    dislike = last or {}

    def rank(uuid: str) -> tuple[bool, bool, float, str]:
        is_free = availability.free_at.get(uuid, FOR_EVER) <= now
        return uuid not in availability.users, is_free, dislike.get(uuid, 0.0), uuid

    order = sorted({uuid for reservation in reservations for uuid in reservation.devices}, key=rank)
    to_come = _groups([reservation for reservation in reservations if reservation.ends > now])
    # An instance does not keep its GPU: that cannot be had whole, and its other instances stay free.
    spans = grouped(kept for group in to_come for kept in _kept(group, availability, now, order))
    return {uuid: sorted(kept, key=lambda span: span.begins) for uuid, kept in spans.items()}


def _groups(reservations: Sequence[Reservation]) -> list[list[Reservation]]:
    """Group the reservations that overlap in time, directly or through others."""
    left, groups = list(reservations), []
    while left:
        group = [left.pop(0)]
        for member in group:
            near = [other for other in left if other.begins < member.ends and member.begins < other.ends]
            left = [other for other in left if other not in near]
            group += near  # the loop goes on with them
        groups.append(group)
    return groups


def _kept(
    group: Sequence[Reservation], availability: DeviceAvailability, now: float, order: Sequence[str]
) -> list[tuple[str, ReservedSpan]]:
    """Return which device is kept when, for reservations that overlap in time.

    If all of them can have the same devices, as many are kept at each moment as are reserved then, and missing ones are
    added when time limits set devices free.  If their devices differ, each reservation gets devices of its own, because
    a job that began on a device that another reservation needs later could not move.
    """
    if not _alike(group):
        matched = _matched(group, availability, now, order)
        return [
            (uuid, ReservedSpan(max(now, reservation.begins), reservation.ends, reservation))
            for uuid, reservation in matched.items()
        ]
    borders = {max(now, when) for reservation in group for when in (reservation.begins, reservation.ends)}
    freed = {when for when in availability.free_at.values() if min(borders) < when < max(borders)} - borders
    spans, matched = [], dict[str, Reservation]()
    for begins, ends in pairwise(sorted(borders | freed)):
        active = [reservation for reservation in group if reservation.begins <= begins < reservation.ends]
        before = matched if begins in freed else {}  # a reservation keeps the devices that it has
        matched = _matched(active, availability, begins, sorted(order, key=lambda uuid: uuid not in before))
        spans += [(uuid, ReservedSpan(begins, ends, reservation)) for uuid, reservation in matched.items()]
    return spans


def _alike(group: Sequence[Reservation]) -> bool:
    return len({frozenset(reservation.devices) for reservation in group}) == 1


def _matched(
    active: Sequence[Reservation], availability: DeviceAvailability, when: float, order: Sequence[str]
) -> dict[str, Reservation]:
    """Return uuid -> the reservation that keeps it from *when* on, for as many devices as possible.

    The first devices of *order* are preferred.  The sets of devices that can be kept together are a matroid, so the
    best set results from taking them greedily, and moving devices that were taken before to another reservation if that
    makes room.
    """
    got: dict[str, list[str]] = {reservation.key: [] for reservation in active}
    missing = sum(reservation.num_gpus for reservation in active)

    def can_have(reservation: Reservation, uuid: str) -> bool:
        is_free = availability.free_at.get(uuid, FOR_EVER) <= max(when, reservation.begins)
        is_theirs = uuid in reservation.held or any(map(reservation.admits, availability.users.get(uuid, ())))
        return uuid in reservation.devices and (is_free or is_theirs)

    def put(uuid: str, tried: set[str]) -> bool:
        fitting = [
            reservation for reservation in active if reservation.key not in tried and can_have(reservation, uuid)
        ]
        for reservation in fitting:
            if len(got[reservation.key]) < reservation.num_gpus:
                got[reservation.key].append(uuid)
                return True
        tried.update(reservation.key for reservation in fitting)
        for mine in (got[reservation.key] for reservation in fitting):
            for index, other in enumerate(mine):
                if put(other, tried):
                    mine[index] = uuid
                    return True
        return False

    for uuid in order:
        if not missing:
            break
        missing -= put(uuid, set())
    return {uuid: reservation for reservation in active for uuid in got[reservation.key]}


@dataclass(frozen=True, kw_only=True)
class StartingJob:
    """A job of a plan that starts now; *until* is inf if no time limit ends it."""

    id: str
    uid: int
    devices: tuple[str, ...]
    until: float


class Calendars:
    """The calendars of *reservations* (not over, the first made first) while a plan is made.

    *availability* is that of the devices before any ticket of the plan starts.
    """

    def __init__(self, reservations: Sequence[Reservation], availability: DeviceAvailability, now: float) -> None:
        self._reservations, self._before, self._now = reservations, availability, now
        self._known: dict[tuple[object, ...], Calendar] = {}  # most tickets of a queue are alike

    def after(self, started: Sequence[StartingJob], wanted: Sequence[str], uid: int | None = None) -> Calendar:
        """Return the calendar once the jobs *started* run, without the reservations for *uid*.

        If possible it keeps none of the devices *wanted*, which begin with the best.
        """
        if not self._reservations:
            return {}
        others = [reservation for reservation in self._reservations if uid is None or not reservation.admits(uid)]
        is_theirs = len(others) < len(self._reservations)
        key = (tuple(job.id for job in started), tuple(wanted), uid if is_theirs else None)
        if key not in self._known:
            last = {uuid: float(rank) for rank, uuid in enumerate(reversed(wanted), 1)}
            self._known[key] = calendar(others, self._availability_after(started), self._now, last)
        return self._known[key]

    def reserved_beside(self, started: Sequence[StartingJob], wanted: Sequence[str], uid: int) -> Calendar:
        """Return what a user has to leave alone to start beside the jobs *started*, which have claimed nothing yet.

        Users for whom devices are reserved may not come.  The devices that they are about to claim are kept for them
        only once they have claimed them.  Until then, those devices are kept as well that would be kept if one of these
        users, or all of them, were gone.
        """
        spans = self.after(started, wanted, uid)
        coming = {job.uid for job in started} - {uid}
        absent = {one for one in coming if any(reservation.admits(one) for reservation in self._reservations)}
        for gone in [{user} for user in absent] + ([absent] if len(absent) > 1 else []):
            present = [job for job in started if job.uid not in gone]
            theirs = {uuid for job in started if job.uid in gone for uuid in job.devices}  # which are to be kept first
            others = sorted([uuid for uuid in wanted if uuid not in theirs], key=lambda uuid: uuid in spans)
            without = self.after(present, others, uid)
            spans = {
                uuid: sorted([*spans.get(uuid, ()), *without.get(uuid, ())], key=lambda span: span.begins)
                for uuid in [*spans, *without]
            }
        return spans

    def _availability_after(self, started: Sequence[StartingJob]) -> DeviceAvailability:
        free_at = dict(self._before.free_at)
        users = {uuid: set(uids) for uuid, uids in self._before.users.items()}
        for reservation in self._reservations:
            for uuid in reservation.held:
                users.setdefault(uuid, set())
        for job in started:
            for uuid in job.devices:
                users.setdefault(uuid, set()).add(job.uid)
                for relative in (uuid, *self._before.relatives.get(uuid, ())):
                    # It may join a job that has no time limit.
                    free_at[relative] = max(job.until, free_at.get(relative, FOR_EVER))
        return DeviceAvailability(free_at, users, self._before.relatives)

    def begun_for(self, uid: int) -> list[Reservation]:
        """Return the reservations for a user that have begun."""
        return [
            reservation
            for reservation in self._reservations
            if reservation.admits(uid) and reservation.begins <= self._now < reservation.ends
        ]

    def uses_own_reservations(self, uid: int, devices: Collection[str], started: Sequence[StartingJob]) -> bool:
        """Return whether a job gets no more than is reserved for its user now, which no user without that would get."""
        own = self.begun_for(uid)
        reserved = {uuid for reservation in own for uuid in reservation.devices}
        used = {uuid for reservation in own for uuid in reservation.held}
        theirs = [job for job in started if any(reservation.admits(job.uid) for reservation in own)]
        used |= {uuid for job in theirs for uuid in job.devices} & reserved
        most = sum(reservation.num_gpus for reservation in own)
        return reserved.issuperset(devices) and len(used.union(devices)) <= most


def clear_at(spans: Sequence[ReservedSpan], uid: int, earliest: float, lasts: float) -> float:
    """Return the earliest time at which a job of a user can have a device for so long, between the spans of others."""
    for span in spans:
        if span.excludes(uid, earliest, lasts):
            earliest = span.ends
    return earliest


def can_be_met(reservation: Reservation, others: Sequence[Reservation], devices: Collection[str]) -> bool:
    """Return whether a machine with these devices, all of them free, has room for a reservation beside *others*."""
    (group, *_) = _groups([reservation, *others])
    empty, order = DeviceAvailability(dict.fromkeys(devices, -FOR_EVER)), sorted(devices)
    alike = _alike(group)
    for when in {member.begins for member in group} if alike else {reservation.begins}:
        active = [member for member in group if not alike or member.begins <= when < member.ends]
        if len(_matched(active, empty, when, order)) < sum(member.num_gpus for member in active):
            return False
    return True
