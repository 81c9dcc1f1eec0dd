"""The waiting line for people and for programs: what `gpuguard queue` prints.

Does not plan: see plan and turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gpuguard.clusters.slurm_queue import Queued
from gpuguard.line.file import LineFile
from gpuguard.line.order import PRIORITIES
from gpuguard.line.plan import Place
from gpuguard.line.standing import Standing
from gpuguard.line.turn import in_words
from gpuguard.select import spelled
from gpuguard.units import format_duration
from gpuguard.views import reservations, slurm
from gpuguard.views.text import Paint, display_width, neutral_command, neutralise, shorten, table

_NAMES = {value: name for name, value in PRIORITIES.items()}
_INDENT = "    "


def to_text(
    line: Standing, site: LineFile, *, width: int | None = None, paint: Paint = lambda text, _: text
) -> list[str]:
    """The screen: a row per request, when it starts and why not earlier below it; then what does not count."""
    simulated = "SIMULATED node " * line.snapshot.simulated
    count = len(line.places)
    how = "fair share" if site.rules.fair_share else "order of arrival"
    title = f"{simulated}{neutralise(line.snapshot.host)}: {count or 'no'} request{'s' * (count != 1)} in line ({how})"
    lines = [paint(title if width is None else shorten(title, width), "bold")]
    rows = [_row(place, line) for place in line.places]
    body = table(rows, ["#", "USER", "GPUS", "WAITED", "COMMAND"], align="><>>", width=width) if rows else []
    lines += body[:1]
    for text, place in zip(body[1:], line.places, strict=True):
        lines += [text, *_folded(_prospects(place, line), _INDENT, width)]
    if kept := reservations.to_text(line.facts.reserved, width=width):
        lines += ["", *kept]
    if line.torn:
        lines += ["", "Not counted:"]
        for one in line.torn:
            whose = "somebody" if one.uid < 0 else f"uid {one.uid}"
            lines += _folded(neutralise(f"ticket {one.id} of {whose}: {one.reason}"), "  ", width)
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


def _row(place: Place, line: Standing) -> list[str]:
    ticket = place.ticket
    note = f'"{neutralise(ticket.note)}"  ' if ticket.note else ""
    wanted = " or ".join(str(way.num_gpus) for way in ticket.requests)
    if ticket.priority:
        note = f"[{_NAMES.get(ticket.priority, ticket.priority)}] {note}"
    waited = format_duration(round(max(0.0, line.now - ticket.since)))
    return [str(place.number), neutralise(ticket.user), wanted, waited, note + neutral_command(ticket.command)]


def _prospects(place: Place, line: Standing) -> str:
    text = neutralise(in_words(place, line))
    promise = place.ticket.promise
    if promise is not None and promise > line.now and not place.now:
        form = "%H:%M" if promise - line.now < 20 * 3600 else "%a %d %b %H:%M"
        text += f"; at the latest {time.strftime(form, time.localtime(promise))}, if time limits are kept"
    return text


def to_json(line: Standing, site: LineFile, jobs: Sequence[Queued] | str = ()) -> dict[str, Any]:
    """The object that docs/json.md describes; unknown is None.  *jobs* are Slurm's."""
    return {
        "schema": 1,
        "host": line.snapshot.host,
        "simulated": line.snapshot.simulated,
        "taken_at": line.now,
        "fair_share": site.rules.fair_share,
        "places": [_place_json(place, line) for place in line.places],
        "reservations": reservations.to_json(line.facts.reserved),
        "not_counted": [{"id": one.id, "uid": one.uid, "reason": one.reason} for one in line.torn],
        "faults": [fault.lines(site.path)[0] for fault in site.faults],
        "slurm_jobs": slurm.to_json(jobs),
    }


def _place_json(place: Place, line: Standing) -> dict[str, Any]:
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
        "why": in_words(place, line),
        "after": ticket.after,
        "note": ticket.note,
        "command": list(ticket.command) if ticket.command is not None else None,
    }
