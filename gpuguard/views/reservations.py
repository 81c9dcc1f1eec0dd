"""Reservations for people and for programs: what `gpuguard reserve`, `who` and `queue` show of them.

Does not say which count: see reservations.
"""

from __future__ import annotations

from typing import Any

from gpuguard.line.booking import clock_text
from gpuguard.line.reservations import Judged, Reserved
from gpuguard.units import format_duration
from gpuguard.views.text import neutralise, shorten, table

_HEADER = ["RESERVED FOR", "GPUS", "FROM", "UNTIL", "ID", "NOW"]


def to_text(reserved: Reserved, *, width: int | None = None) -> list[str]:
    """A table, and the files that do not count below it; nothing where there are none."""
    rows = [_row(one, reserved.now) for one in reserved.judged]
    lines = table(rows, _HEADER, align="<>", width=width) if rows else []
    for one in reserved.torn:
        whose = "somebody" if one.uid < 0 else f"uid {one.uid}"
        text = neutralise(f"not counted: reservation {one.id} of {whose}: {one.reason}")
        lines.append(text if width is None else shorten(text, width))
    return lines


def _row(one: Judged, now: float) -> list[str]:
    it = one.reservation
    note = f'"{neutralise(it.note)}"' if it.note else ""
    return [
        neutralise(it.user),
        str(it.num_gpus),
        clock_text(it.begins, now),
        clock_text(it.ends, now),
        neutralise(it.id),
        "  ".join(filter(None, [note, neutralise(state(one, now))])),
    ]


def state(one: Judged, now: float) -> str:
    """``"begins in 3h"``, ``"1 of 2 used"``, ``"over at 09:30 unless alice comes"``."""
    it = one.reservation
    if one.why_not:
        return f"does not count: {one.why_not}"
    if one.over and one.no_show_at is not None:
        return f"over: {it.user} had no claim by {clock_text(one.no_show_at, now)}"
    if it.begins > now:
        return f"begins in {format_duration(round(it.begins - now))}"
    if one.no_show_at is not None:
        return f"over at {clock_text(one.no_show_at, now)} unless {it.user} comes"
    return f"{min(it.num_gpus, len(one.held))} of {it.num_gpus} used"


def to_json(reserved: Reserved) -> list[dict[str, Any]]:
    """The list that docs/json.md describes; unknown is None."""
    return [reservation_json(one, reserved.now) for one in reserved.judged]


def reservation_json(one: Judged, now: float) -> dict[str, Any]:
    """One of them."""
    it = one.reservation
    return {
        "id": it.id,
        "user": it.user,
        "uid": it.uid,
        "made_by_uid": it.maker,
        "made": it.made,
        "num_gpus": it.num_gpus,
        "begins": it.begins,
        "ends": it.ends,
        "devices": list(it.devices),
        "used": min(it.num_gpus, len(one.held)),
        "counts": one.counts,
        "over_at": one.no_show_at,
        "state": state(one, now),
        "note": it.note,
    }
