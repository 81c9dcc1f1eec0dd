"""Reservations: which of them count, which devices they keep, and until when.

What users may reserve is checked by each reader: what is too much does not count, the last made first; root's
always counts if there is room for it.  One is over at its end, or when its user has had no claim for as long as the
site says.  Does not say which devices are kept from whom: see booking.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory
from gpuguard.model import HEALTH, MEMORY, PROCESSES, ClaimRecord, Snapshot
from gpuguard.queue.calendar import PlannedReservation, can_be_met, clock_text
from gpuguard.queue.priority import ReservationKeys
from gpuguard.queue.reservation_store import Reservation, read
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.tickets import IgnoredFile
from gpuguard.units import format_duration
from gpuguard.users import parties

MOST_COUNTED = 256  # with more, planning would take too long


@dataclass(frozen=True)
class ReservationStatus:
    """Whether a reservation counts.

    Args:
        reservation: as made.
        why_not: why it does not count; "" when it does.
        held: uuids of its devices that are in claims of its user now.
        no_show_at: unix time at which it is over unless its user makes a claim before; None while the user has one.
        over: whether it is over before its end, because its user came too late.
    """

    reservation: Reservation
    why_not: str = ""
    held: tuple[str, ...] = ()
    no_show_at: float | None = None
    over: bool = False

    @property
    def counts(self) -> bool:
        """Whether devices are kept for it."""
        return not self.why_not and not self.over


@dataclass(frozen=True)
class ReservationCalendar:
    """All reservations at one moment.

    Args:
        judged: those that have not ended, the first made first.
        torn: files that cannot be understood.
        now: unix time of that moment.
    """

    statuses: tuple[ReservationStatus, ...] = ()
    ignored: tuple[IgnoredFile, ...] = ()
    now: float = 0.0

    @property
    def reservations(self) -> tuple[PlannedReservation, ...]:
        """Those that count."""
        return tuple(one.reservation.booking(one.held) for one in self.statuses if one.counts)

    @property
    def changes_at(self) -> float:
        """Unix time at which the next of them begins or is over by itself."""
        times = [
            when
            for one in self.statuses
            if one.counts
            for when in (one.reservation.begins, one.reservation.ends, one.no_show_at)
            if when is not None and when > self.now
        ]
        return min(times, default=math.inf)


def reservation_calendar(
    directory: LockDirectory, uuids: Collection[str], claims: Sequence[ClaimRecord], now: float
) -> ReservationCalendar:
    """The reservations as they count now.

    Args:
        directory: of the claims.
        uuids: of the devices that the machine has now.
        claims: that live.
        now: unix time.
    """
    start = f"{directory.prefix}reserve."
    if not any(name.startswith(start) for name in directory.names()):
        return ReservationCalendar(now=now)
    found, ignored, arrivals = read(directory, now)
    keys = read_queue_settings().reservations
    return ReservationCalendar(tuple(judge(found, uuids, claims, arrivals, keys, now)), tuple(ignored), now)


def with_reserved_instances(backend: Backend, directory: LockDirectory, snapshot: Snapshot) -> Snapshot:
    """*snapshot* with the MIG instances, which show only where health was read (39 calls), if some are reserved.

    Raises:
        BackendError: the driver does not answer.
    """
    start = f"{directory.prefix}reserve."
    if not any(name.startswith(start) for name in directory.names()):
        return snapshot
    seen = {device.uuid for device in snapshot.devices}
    named = {uuid for one in read(directory, snapshot.taken_at)[0] for uuid in one.devices if uuid.startswith("MIG-")}
    return snapshot if named <= seen else snapshot.updated(backend.sample({MEMORY, PROCESSES, HEALTH}))


def judge(
    found: Sequence[Reservation],
    uuids: Collection[str],
    claims: Sequence[ClaimRecord],
    arrivals: Mapping[tuple[int, str], float],
    keys: ReservationKeys,
    now: float,
) -> list[ReservationStatus]:
    """Which of them count.

    Args:
        arrivals: (uid, key of a reservation) -> unix time at which that user last began or ended a claim.
    """
    statuses: list[ReservationStatus] = []
    counted: list[PlannedReservation] = []
    owner, quota = parties(one.maker for one in found), dict[int, int]()
    for one in sorted(found, key=lambda each: (each.made, each.key)):
        if one.ends <= now:
            continue
        own = [claim for claim in claims if claim.uid == one.uid and not set(claim.devices).isdisjoint(one.devices)]
        held = tuple(uuid for uuid in one.devices if any(uuid in claim.devices for claim in own))
        deadline = max(one.begins, one.made, arrivals.get((one.uid, one.key), 0.0)) + keys.no_show
        # A claim that came later does not bring back what others were promised meanwhile.
        present = any(claim.since is None or claim.since < deadline for claim in own)
        if now >= deadline and not present:
            statuses.append(ReservationStatus(one, held=held, no_show_at=deadline, over=True))
            continue
        booking = one.booking()
        why_not = "" if one.maker == 0 else _beyond(one, keys, quota.get(owner[one.maker], 0))
        if not why_not and not can_be_met(booking, counted, uuids):
            why_not = _no_room(booking, uuids)
        if not why_not and len(counted) >= MOST_COUNTED:
            why_not = f"there are more than {MOST_COUNTED} already"
        if not why_not:
            counted.append(booking)
            quota[owner[one.maker]] = quota.get(owner[one.maker], 0) + one.num_gpus
        statuses.append(ReservationStatus(one, why_not, held, None if present and now >= one.begins else deadline))
    return statuses


def what_if(wanted: Reservation, found: ReservationCalendar, uuids: Collection[str]) -> str:
    """Why a new reservation would not count; "" when it would.  Says when there would be room for it."""
    keys = read_queue_settings().reservations
    others = found.reservations
    earlier = [one.reservation for one in found.statuses if one.counts]
    owner = parties((wanted.maker, *(one.maker for one in earlier)))
    own = sum(one.num_gpus for one in earlier if owner[one.maker] == owner[wanted.maker])
    booking = wanted.booking()
    why_not = "" if wanted.maker == 0 else _beyond(wanted, keys, own)
    if why_not or can_be_met(booking, others, uuids):
        return why_not
    why_not = _no_room(booking, uuids)
    for begins in sorted(one.ends for one in others if one.ends > booking.begins):
        moved = replace(booking, begins=begins, ends=begins + booking.ends - booking.begins)
        if can_be_met(moved, others, uuids):
            return f"{why_not}, and enough from {clock_text(begins, found.now)} on"
    return why_not


def _beyond(one: Reservation, keys: ReservationKeys, before: int) -> str:
    """Why a user may not have this one beside so many devices in earlier ones; "" when it is allowed."""
    if before + one.num_gpus > keys.devices:
        beside = f" ({before} of them in earlier ones)" if before else ""
        gpus = f"{keys.devices} GPU{'s' * (keys.devices != 1)}" if keys.devices else "no GPUs"
        return f"users may reserve {gpus} at a time here{beside}, all their reservations together"
    if one.ends - one.begins > keys.longest + 1:
        return f"users may reserve for {format_duration(keys.longest)} at most here"
    if one.begins - one.made > keys.ahead + 1:
        return f"users may reserve {format_duration(keys.ahead)} ahead at most here"
    return ""


def _no_room(booking: PlannedReservation, uuids: Collection[str]) -> str:
    there = len(set(booking.devices) & set(uuids))
    if there < booking.num_gpus:
        return f"only {there} of its devices {'is' if there == 1 else 'are'} there"
    return "earlier reservations leave too few devices at that time"
