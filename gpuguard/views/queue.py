"""The queue, reservations and Slurm's jobs for people and for programs: `gpuguard queue`, `reserve` and `who`.

This module does not plan: see queue.backfill and queue.reservations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuguard.batch.dispatchers import StalledJobs
from gpuguard.clusters.slurm_jobs import Queued
from gpuguard.locale import _, translated
from gpuguard.locale.messages import Sentence, sentence
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.priority import PRIORITIES
from gpuguard.queue.reasons import passing_text, start_text, unplanned_texts
from gpuguard.queue.reservations import ReservationCalendar, ReservationStatus, clock_text
from gpuguard.queue.settings import QueueSettings
from gpuguard.queue.state import QueueState
from gpuguard.queue.tickets import IgnoredFile
from gpuguard.request import spelled
from gpuguard.sanitize import neutral_command, neutralise
from gpuguard.tables import shorten, table
from gpuguard.units import format_count, format_duration
from gpuguard.views.jobs import stalled_advice, stalled_text
from gpuguard.views.text import Paint, folded, picked


def slurm_text(
    jobs: Sequence[Queued] | str, now: float, *, width: int | None = None, paint: Paint = lambda text, _: text
) -> list[str]:
    """Return a table of *jobs*, or the reason why it cannot be shown."""
    if isinstance(jobs, str):
        return [_("Slurm does not say who waits there: {jobs}").format(jobs=neutralise(translated(jobs)))]
    waiting = sum(job.state == "PENDING" for job in jobs)
    title = _("Slurm: {running} jobs with GPUs, {waiting} waiting").format(
        running=len(jobs) - waiting or _("no"), waiting=waiting or _("none")
    )
    lines = [paint(shorten(title, width), "bold")]
    rows = [_slurm_row(job, now) for job in jobs]
    heads = [_("JOB"), _("USER"), _("GPUS"), _("SINCE"), _("STATE"), _("NAME")]
    return lines + (table(rows, heads, align="<<>><<", width=width) if rows else [])


def _slurm_row(job: Queued, now: float) -> list[str]:
    pending = job.state == "PENDING"
    since = job.submitted if pending else job.start
    ago = "" if since is None else format_duration(round(max(0.0, now - since)))
    state = _("waits: {reason}").format(reason=job.reason) if pending and job.reason else job.state.lower()
    where = _("{state} on {nodes}").format(state=state, nodes=job.nodes) if job.nodes and not pending else state
    return [neutralise(job.job), neutralise(job.user), str(job.gpus), ago, neutralise(where), neutralise(job.name)]


def slurm_json(jobs: Sequence[Queued] | str) -> list[dict[str, Any]] | None:
    """Return the objects that docs/json.md describes, or None if Slurm does not answer."""
    if isinstance(jobs, str):
        return None
    return [
        {
            **picked(job, "job", "user", "name", "state", "reason", "start", "nodes"),
            "num_gpus_per_node": job.gpus,
            "submitted_at": job.submitted,
        }
        for job in jobs
    ]


def reservations_text(reserved: ReservationCalendar, *, width: int | None = None) -> list[str]:
    """Return a table of the reservations, and below it the files that do not count; nothing if there are none."""
    rows = []
    for status in reserved.statuses:
        reservation, now = status.reservation, reserved.now
        times = translated(clock_text(reservation.begins, now)), translated(clock_text(reservation.ends, now))
        whose, told = neutralise(translated(reservation.whose)), neutralise(translated(state(status, now)))
        note = f'"{neutralise(reservation.note)}"  ' if reservation.note else ""
        rows.append([whose, str(reservation.num_gpus), *times, neutralise(reservation.id), note + told])
    heads = [_("RESERVED FOR"), _("GPUS"), _("FROM"), _("UNTIL"), "ID", _("NOW")]
    lines = table(rows, heads, align="<>", width=width) if rows else []
    for ignored in reserved.ignored:
        text = _("not counted: reservation {id} of {owner}: {reason}").format(**_not_counted(ignored))
        lines.append(shorten(neutralise(text), width))
    return lines


def _not_counted(ignored: IgnoredFile) -> dict[str, str]:
    owner = _("an unknown user") if ignored.uid < 0 else _("uid {uid}").format(uid=ignored.uid)
    return {"id": translated(ignored.id), "owner": owner, "reason": translated(ignored.reason)}


def state(status: ReservationStatus, now: float) -> str:
    """Return ``"begins in 3h"``, ``"1 of 2 used"`` or ``"over at 09:30 unless alice comes"``."""
    reservation = status.reservation
    if status.why_not:
        return sentence("reservation.does_not_count", "does not count: {why_not}", why_not=status.why_not)
    if status.over and status.no_show_at is not None:
        time = clock_text(status.no_show_at, now)
        return sentence("reservation.over", "over: {user} had no claim by {time}", user=reservation.whose, time=time)
    if reservation.begins > now:
        begins = format_duration(round(reservation.begins - now))
        return sentence("reservation.begins", "begins in {begins}", begins=begins)
    if status.no_show_at is not None and status.no_show_at < reservation.ends:
        time = clock_text(status.no_show_at, now)
        return sentence(
            "reservation.ends_unless", "over at {time} unless {user} comes", time=time, user=reservation.whose
        )
    used = min(reservation.num_gpus, len(reservation.held))
    return sentence("reservation.used", "{used} of {num_gpus} used", used=used, num_gpus=reservation.num_gpus)


def reservations_json(reserved: ReservationCalendar) -> list[dict[str, Any]]:
    """Return the list that docs/json.md describes; unknown is None."""
    return [reservation_json(status, reserved.now) for status in reserved.statuses]


def reservation_json(status: ReservationStatus, now: float) -> dict[str, Any]:
    """Return one object of that list."""
    reservation = status.reservation
    return {
        **picked(reservation, "id", "user", "uid", "group", "gid", "num_gpus", "devices", "note"),
        **picked(reservation, "made", "begins", "ends"),
        "made_by_uid": reservation.maker,
        "used": min(reservation.num_gpus, len(reservation.held)),
        "counts": status.counts,
        "over_at": status.no_show_at,
        "state": state(status, now),
    }


_NAMES = {value: name for name, value in PRIORITIES.items()}
_INDENT = "    "
# Keys of sentences that say when a request starts, and perhaps why not earlier.
_STARTS = (
    "queue.starts_now", "queue.starts_soon", "queue.starts_soon_because", "queue.starts", "queue.starts_because",
)  # fmt: skip


def to_text(
    queue: QueueState,
    site: QueueSettings,
    stalled: Sequence[StalledJobs] = (),
    *,
    width: int | None = None,
    paint: Paint = lambda text, _: text,
) -> list[str]:
    """Return the screen: a row per request, below it when it starts and why not earlier; then what does not count.

    *stalled* are the jobs that wait without a request, because no dispatcher asks for them.
    """
    host = (_("SIMULATED node ") if queue.snapshot.simulated else "") + neutralise(queue.snapshot.host)
    number = len(queue.positions) + sum(len(file.unread) for file in queue.ignored)
    count = format_count(number, "request") if number else _("no requests")
    title = _("{host}: {count} in the queue ({order})").format(
        host=host, count=count, order=_("fair share") if site.rules.fair_share else _("order of arrival")
    )
    lines = [paint(shorten(title, width), "bold")]
    rows = [_row(position, queue) for position in queue.positions]
    body = (
        table(rows, ["#", "ID", _("USER"), _("GPUS"), _("WAITED"), _("COMMAND")], align="><<>>", width=width)
        if rows
        else []
    )
    lines += body[:1]
    for text, position in zip(body[1:], queue.positions, strict=True):
        lines += [text, *folded(_prospects(position, queue), _INDENT, width)]
    lines += [line for text in unplanned_texts(queue) for line in folded(neutralise(translated(text)), "", width)]
    lines += [line for each in stalled for line in folded(f"{stalled_text(each)}  {stalled_advice()}", "", width)]
    if kept := reservations_text(queue.facts.reserved, width=width):
        lines += ["", *kept]
    if not_counted := [ignored for ignored in queue.ignored if not ignored.unread]:
        lines += ["", _("Not counted:")]
        for ignored in not_counted:
            text = _("ticket {id} of {owner}: {reason}").format(**_not_counted(ignored))
            lines += folded(neutralise(text), "  ", width)
    if site.faults:
        text = _("The rules of this site do not count, because their file has faults:")
        if site.is_last_good:
            text = _("The last good rules of this site hold, because their file has faults:")
        lines += ["", *folded(text, "", width)]
        lines += [text for fault in site.faults for text in fault.lines(neutralise(site.path))]
    return lines


def _row(position: QueuePosition, queue: QueueState) -> list[str]:
    ticket = position.ticket
    note = f'"{neutralise(ticket.note)}"  ' if ticket.note else ""
    wanted = _(" or ").join(str(way.num_gpus) for way in ticket.requests)
    if ticket.priority:
        note = f"[{_NAMES.get(ticket.priority, ticket.priority)}] {note}"
    waited = format_duration(round(max(0.0, queue.now - ticket.since)))
    who = neutralise(ticket.short_id), neutralise(ticket.user)
    return [str(position.number), *who, wanted, waited, note + neutral_command(ticket.command)]


def _prospects(position: QueuePosition, queue: QueueState) -> str:
    text = neutralise(translated(start_text(position, queue)))
    promise = position.ticket.promise
    if promise is not None and position.start is not None and position.start > promise > queue.now:
        # Requests that came later go before this one.
        text += _("; later than promised ({promise})").format(promise=translated(clock_text(promise, queue.now)))
    passing = passing_text(position, queue)
    return _("{text}; {passing}").format(text=text, passing=translated(passing)) if passing else text


def to_json(
    queue: QueueState, site: QueueSettings, jobs: Sequence[Queued] | str = (), stalled: Sequence[StalledJobs] = ()
) -> dict[str, Any]:
    """Return the object that docs/json.md describes; unknown is None.  *jobs* are Slurm's, *stalled* as in to_text."""
    return {
        "schema": 1,
        **picked(queue.snapshot, "host", "simulated"),
        "taken_at": queue.now,
        "fair_share": site.rules.fair_share,
        "places": [_position_json(position, queue) for position in queue.positions],
        "reservations": reservations_json(queue.facts.reserved),
        "not_counted": [picked(ignored, "id", "uid", "reason") for ignored in queue.ignored],
        "faults": [fault.lines(site.path)[0] for fault in site.faults],
        "slurm_jobs": slurm_json(jobs),
        "stalled_jobs": [vars(each) for each in stalled],
    }


def _position_json(position: QueuePosition, queue: QueueState) -> dict[str, Any]:
    ticket = position.ticket
    return {
        "number": position.number,
        **picked(ticket, "id", "short_id", "user", "uid", "pid", "since", "num_gpus", "after", "note", "command"),
        **picked(ticket, "time_limit_seconds", "expected_seconds"),
        "waited_seconds": max(0.0, queue.now - ticket.since),
        "requests": [spelled(way) for way in ticket.requests],
        "priority": _NAMES.get(ticket.priority),
        "expected_start": position.start,
        "latest_start": ticket.promise,
        "starts_now": position.now,
        "devices": position.devices,
        "why": start_text(position, queue),
        "reason": _reason(position, queue),
    }


def _reason(position: QueuePosition, queue: QueueState) -> str | None:
    """Return why it does not start earlier, without the time of its start, or None if the time is all that is known."""
    text = start_text(position, queue, brief=True)
    return text.values.get("why") if isinstance(text, Sentence) and text.key in _STARTS else text
