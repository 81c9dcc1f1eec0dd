"""The waiting line for people and for programs: what `gpuguard queue` prints.

Does not plan: see plan and turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gpuguard.clusters.slurm import Queued
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.explain import start_text
from gpuguard.queue.priority import PRIORITIES
from gpuguard.queue.reservations import ReservationCalendar, ReservationStatus, clock_text
from gpuguard.queue.settings import QueueSettings
from gpuguard.queue.state import QueueState
from gpuguard.request import spelled
from gpuguard.sanitize import display_width, neutral_command, neutralise
from gpuguard.units import format_duration
from gpuguard.views.text import Paint, shorten, table

# Slurm's jobs for people and for programs, beside the line and the claims of this machine.


def slurm_text(
    found: Sequence[Queued] | str, now: float, *, width: int | None = None, paint: Paint = lambda text, _: text
) -> list[str]:
    """A table of *found*, or why it cannot be shown."""
    if isinstance(found, str):
        return [f"Slurm does not say who waits there: {neutralise(found)}"]
    waiting = sum(job.state == "PENDING" for job in found)
    title = f"Slurm: {len(found) - waiting or 'no'} jobs with GPUs, {waiting or 'none'} waiting"
    lines = [paint(title if width is None else shorten(title, width), "bold")]
    rows = [_slurm_row(job, now) for job in found]
    return lines + (
        table(rows, ["JOB", "USER", "GPUS", "SINCE", "STATE", "NAME"], align="<<>><<", width=width) if rows else []
    )


def _slurm_row(job: Queued, now: float) -> list[str]:
    pending = job.state == "PENDING"
    since = job.submitted if pending else job.start
    ago = "" if since is None else format_duration(round(max(0.0, now - since)))
    state = f"waits: {job.reason}" if pending and job.reason else job.state.lower()
    place = f"{state} on {job.nodes}" if job.nodes and not pending else state
    return [neutralise(job.job), neutralise(job.user), str(job.gpus), ago, neutralise(place), neutralise(job.name)]


def slurm_json(found: Sequence[Queued] | str) -> list[dict[str, Any]] | None:
    """The objects that docs/json.md describes; None when Slurm does not answer."""
    if isinstance(found, str):
        return None
    return [
        {
            "job": job.job,
            "user": job.user,
            "name": job.name,
            "state": job.state,
            "num_gpus_per_node": job.gpus,
            "reason": job.reason,
            "submitted_at": job.submitted,
            "start": job.start,
            "nodes": job.nodes,
        }
        for job in found
    ]


# Reservations for people and for programs: what `gpuguard reserve`, `who` and `queue` show of them.
#
# Does not say which count: see reservations.


_HEADER = ["RESERVED FOR", "GPUS", "FROM", "UNTIL", "ID", "NOW"]


def reservations_text(reserved: ReservationCalendar, *, width: int | None = None) -> list[str]:
    """A table, and the files that do not count below it; nothing where there are none."""
    rows = [_reservation_row(one, reserved.now) for one in reserved.statuses]
    lines = table(rows, _HEADER, align="<>", width=width) if rows else []
    for one in reserved.ignored:
        owner = "somebody" if one.uid < 0 else f"uid {one.uid}"
        text = neutralise(f"not counted: reservation {one.id} of {owner}: {one.reason}")
        lines.append(text if width is None else shorten(text, width))
    return lines


def _reservation_row(one: ReservationStatus, now: float) -> list[str]:
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


def state(one: ReservationStatus, now: float) -> str:
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


def reservations_json(reserved: ReservationCalendar) -> list[dict[str, Any]]:
    """The list that docs/json.md describes; unknown is None."""
    return [reservation_json(one, reserved.now) for one in reserved.statuses]


def reservation_json(one: ReservationStatus, now: float) -> dict[str, Any]:
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


_NAMES = {value: name for name, value in PRIORITIES.items()}
_INDENT = "    "


def to_text(
    line: QueueState, site: QueueSettings, *, width: int | None = None, paint: Paint = lambda text, _: text
) -> list[str]:
    """The screen: a row per request, when it starts and why not earlier below it; then what does not count."""
    simulated = "SIMULATED node " * line.snapshot.simulated
    count = len(line.positions)
    how = "fair share" if site.rules.fair_share else "order of arrival"
    title = f"{simulated}{neutralise(line.snapshot.host)}: {count or 'no'} request{'s' * (count != 1)} in line ({how})"
    lines = [paint(title if width is None else shorten(title, width), "bold")]
    rows = [_row(place, line) for place in line.positions]
    body = table(rows, ["#", "USER", "GPUS", "WAITED", "COMMAND"], align="><>>", width=width) if rows else []
    lines += body[:1]
    for text, place in zip(body[1:], line.positions, strict=True):
        lines += [text, *_folded(_prospects(place, line), _INDENT, width)]
    if kept := reservations_text(line.facts.reserved, width=width):
        lines += ["", *kept]
    if line.ignored:
        lines += ["", "Not counted:"]
        for one in line.ignored:
            owner = "somebody" if one.uid < 0 else f"uid {one.uid}"
            lines += _folded(neutralise(f"ticket {one.id} of {owner}: {one.reason}"), "  ", width)
    if site.faults:
        lines += ["", *_folded("The rules of this site do not count, because their file has faults:", "", width)]
        lines += [text for fault in site.faults for text in fault.lines(neutralise(site.path))]
    return lines


def _folded(text: str, indent: str, width: int | None) -> list[str]:
    """*text* in lines of at most *width* columns; one word that is longer is shortened."""
    if width is None:
        return [indent + text]
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if display_width(indent + longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [shorten(indent + line, width) for line in lines]


def _row(place: QueuePosition, line: QueueState) -> list[str]:
    ticket = place.ticket
    note = f'"{neutralise(ticket.note)}"  ' if ticket.note else ""
    wanted = " or ".join(str(way.num_gpus) for way in ticket.requests)
    if ticket.priority:
        note = f"[{_NAMES.get(ticket.priority, ticket.priority)}] {note}"
    waited = format_duration(round(max(0.0, line.now - ticket.since)))
    return [str(place.number), neutralise(ticket.user), wanted, waited, note + neutral_command(ticket.command)]


def _prospects(place: QueuePosition, line: QueueState) -> str:
    text = neutralise(start_text(place, line))
    promise = place.ticket.promise
    if promise is not None and promise > line.now and not place.now:
        form = "%H:%M" if promise - line.now < 20 * 3600 else "%a %d %b %H:%M"
        text += f"; at the latest {time.strftime(form, time.localtime(promise))}, if time limits are kept"
    return text


def to_json(line: QueueState, site: QueueSettings, jobs: Sequence[Queued] | str = ()) -> dict[str, Any]:
    """The object that docs/json.md describes; unknown is None.  *jobs* are Slurm's."""
    return {
        "schema": 1,
        "host": line.snapshot.host,
        "simulated": line.snapshot.simulated,
        "taken_at": line.now,
        "fair_share": site.rules.fair_share,
        "places": [_place_json(place, line) for place in line.positions],
        "reservations": reservations_json(line.facts.reserved),
        "not_counted": [{"id": one.id, "uid": one.uid, "reason": one.reason} for one in line.ignored],
        "faults": [fault.lines(site.path)[0] for fault in site.faults],
        "slurm_jobs": slurm_json(jobs),
    }


def _place_json(place: QueuePosition, line: QueueState) -> dict[str, Any]:
    ticket = place.ticket
    return {
        "number": place.number,
        "id": ticket.id,
        "user": ticket.user,
        "uid": ticket.uid,
        "pid": ticket.pid,
        "since": ticket.since,
        "waited_seconds": max(0.0, line.now - ticket.since),
        "requests": [spelled(way) for way in ticket.requests],
        "num_gpus": ticket.num_gpus,
        "priority": _NAMES.get(ticket.priority),
        "time_limit_seconds": ticket.time_limit,
        "expected_seconds": ticket.expected,
        "expected_start": place.start,
        "latest_start": ticket.promise,
        "starts_now": place.now,
        "devices": list(place.devices),
        "why": start_text(place, line),
        "after": ticket.after,
        "note": ticket.note,
        "command": list(ticket.command) if ticket.command is not None else None,
    }
