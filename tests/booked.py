"""Builders for tests of reservations.

from booked import a_reservation, a_reserved
judge([a_reservation(user=1, gpus=2)], UUIDS, (), {}, ReservationKeys(), NOW)
"""

from __future__ import annotations

import itertools
from typing import Any

from gpuguard.queue.reservation_store import Reservation
from gpuguard.queue.reservations import ReservationCalendar, ReservationStatus

NOW = 1_800_000_000.0
HOUR = 3600.0
UUIDS = tuple(f"d{number}" for number in range(8))
_numbers = itertools.count(1)


def a_reservation(user: int = 1, gpus: int = 1, begins: float = HOUR, hours: float = 1.0, **fields: Any) -> Reservation:
    """One of a user for himself, made now, for an hour from in an hour; later ones have later names."""
    facts: dict[str, Any] = {
        "id": f"r{next(_numbers):06}", "maker": user, "uid": user, "user": f"u{user}", "num_gpus": gpus,
        "begins": NOW + begins, "ends": NOW + begins + hours * HOUR, "devices": UUIDS, "made": NOW,
    }  # fmt: skip
    return Reservation(**{**facts, **fields})


def a_reserved(*statuses: ReservationStatus, now: float = NOW, **fields: Any) -> ReservationCalendar:
    """What was read: one reservation that counts, unless others are given."""
    return ReservationCalendar(
        statuses or (ReservationStatus(a_reservation(), no_show_at=now + 1.5 * HOUR),), now=now, **fields
    )
