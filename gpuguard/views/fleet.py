"""The answers of other hosts, for people and for programs: `who`, `queue`, `select` and `top` with --hosts.

Each host is shown under the name by which it was asked for.  This module asks no host, and takes only values that
gpuguard.fleet.answers has checked and made harmless.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuguard.device_state import EXACT_STATES, UserTotal, grouped
from gpuguard.fleet.answers import HostAnswer, HostDevice, HostReply
from gpuguard.locale import N_, _, ngettext, translated
from gpuguard.sanitize import neutral_command
from gpuguard.tables import shorten, table
from gpuguard.units import NOT_AVAILABLE, format_bytes, format_count, format_duration, format_rounded, local_time
from gpuguard.vendors import names_instance
from gpuguard.views.charts import sparkline
from gpuguard.views.columns import FLEET_COLUMNS
from gpuguard.views.text import Paint, picked
from gpuguard.views.who import LABELS, TOTALS, total_cells

if TYPE_CHECKING:
    from gpuguard.device_state import DeviceState

SHOWN_ROWS = 256  # of one host: a machine has 8 devices, or 56 instances
_CLAIMS = 8  # of a device
_USERS = 6  # of a host, in `top`
_UUID = re.compile(r"[A-Za-z0-9-]{1,80}")


@dataclass(frozen=True)
class FleetSums:
    """One host in numbers."""

    states: Counter[DeviceState]  # of devices; the instances of a divided one count in its place
    memory_used: float | None
    memory_total: float | None
    utilization: tuple[float | None, ...]  # percent, per device
    users: Counter[str]  # devices per user
    waiting: int


def sums(answer: HostAnswer) -> FleetSums:
    """Sum up the answer of one host to `who --json`."""
    divided = {device.parent_uuid for device in answer.devices}
    whole = [device for device in answer.devices if device.uuid not in divided]
    return FleetSums(
        Counter(_state_of(device.state) for device in whole),
        _sum(device.memory_used_bytes for device in whole),
        _sum(device.memory_total_bytes for device in whole),
        tuple(device.utilization_percent for device in whole),
        Counter({_name(user.user): user.devices for user in answer.users[:SHOWN_ROWS] if user.devices}),
        len(answer.waiting),
    )


def _state_of(*words: str | None) -> DeviceState:
    """Return the first of *words* that is a state this version knows, or "unknown"."""
    return next((state for word in words for state in EXACT_STATES if state == word), "unknown")


def in_words(counted: Iterable[FleetSums]) -> str:
    """Return ``"8 GPUs: 3 free, 5 in use; 2 wait"`` for all of *counted* together."""
    hosts = list(counted)
    states, waiting = sum((host.states for host in hosts), Counter()), sum(host.waiting for host in hosts)
    parts = [f"{states[state]} {_(LABELS[state][0])}" for state in LABELS if states[state]]
    words = format_count(states.total(), "GPU") + (f": {', '.join(parts)}" if parts else "")
    return words + (
        "; " + ngettext("{number} waits", "{number} wait", waiting).format(number=waiting) if waiting else ""
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum, which is unknown as soon as one of *values* is: without that value it would be too small."""
    known = list(values)
    return None if not known or None in known else sum(value for value in known if value is not None)


def host_lines(reply: HostReply, width: int | None, paint: Paint) -> list[str]:
    """Return the lines of a host for `who --hosts`: its name and sums, and a line per device."""
    answer = reply.answer
    if answer is None:
        return []  # end_lines() names all of those together
    rows, states = [], []
    for device in answer.devices[:SHOWN_ROWS]:
        states.append(_state_of(device.exact_state, device.state))
        cells = [shorten(column.cell(device.device), 40) for column in FLEET_COLUMNS]
        rows.append([*cells, _(LABELS[states[-1]][0]), _users_of(device, answer.taken_at)])
    body = table(
        rows,
        align="".join(column.align for column in FLEET_COLUMNS),
        width=None if width is None else width - 2,
        paint=lambda cell, row, place: paint(cell, LABELS[states[row]][1]) if place == len(FLEET_COLUMNS) else cell,
    )
    recorded = _("RECORDED ") if answer.recorded else ""
    title = f"{recorded}{_simulated(answer)}{reply.host}: {in_words([sums(answer)])}"
    more = len(answer.devices) - SHOWN_ROWS
    lines = [paint(_fit(title, width), "bold"), *(f"  {line}" for line in body)]
    return lines + ([f"  ... {_('and {number} more').format(number=more)}"] if more > 0 else [])


def _users_of(device: HostDevice, now: float | None) -> str:
    """Return ``'alice for 2h "note" train.py'`` for the claims, then the users of processes that have no claim."""
    parts = []
    for claim in device.claims[:_CLAIMS]:
        words = [_name(claim.user)]
        if now is not None and claim.since is not None:
            words.append(_("for {time}").format(time=format_duration(round(max(0.0, now - claim.since)))))
        if claim.note:
            words.append(f'"{shorten(claim.note, 60)}"')
        if claim.command:
            words.append(shorten(neutral_command(claim.command[:20], brief=True), 200))
        parts.append(" ".join(words))
    claimants = {claim.user for claim in device.claims}
    users = dict.fromkeys(process.user for process in device.processes or () if process.claim is None)
    without = "" if device.state == "unclaimed_use" and not device.claims else _(" without a claim")
    return ", ".join(parts + [_name(user) + without for user in users if user not in claimants])


def queue_lines(reply: HostReply, width: int | None, paint: Paint) -> list[str]:
    """Return the lines of a host for `queue --hosts`: its requests, and when each is expected to start."""
    answer = reply.answer
    if answer is None or not answer.places:
        return []  # as for most hosts: idle_queue_lines() says how many
    cells = []
    for ticket in answer.places[:SHOWN_ROWS]:
        waited, why = format_duration(round(ticket.waited_seconds)), shorten(translated(ticket.why), 200)
        cells.append([str(ticket.number), _name(ticket.user), str(ticket.num_gpus), waited, why])
    heads = ["#", _("USER"), _("GPUS"), _("WAITED"), _("STARTS")]
    body = table(cells, heads, align="><>>", width=None if width is None else width - 2)
    title = _simulated(answer) + _("{host}: {number} in the queue").format(host=reply.host, number=len(answer.places))
    return [paint(_fit(title, width), "bold"), *(f"  {line}" for line in body)]


def idle_queue_lines(replies: Sequence[HostReply]) -> list[str]:
    """Return the line that says on how many hosts no request waits, if there are any."""
    count = sum(reply.answer is not None and not reply.answer.places for reply in replies)
    return [_("No request waits on {hosts}.").format(hosts=format_count(count, "host"))] if count else []


def room(reply: HostReply, form: str, separator: str) -> str | None:
    """Return ``"0,3"``, the devices of `select --json` there, judged by chosen(), or None if there is no room."""
    devices = reply.answer.devices if reply.answer is not None else ()
    if not devices:
        return None
    by_uuid = form == "uuid" or any(names_instance(device.uuid) for device in devices)
    return separator.join(str(device.uuid if by_uuid else device.index) for device in devices)


def chosen(reply: HostReply) -> HostReply:
    """Return *reply* to `select`, or an error if it names anything but devices, because scripts pass them on."""
    if reply.answer is None:
        return reply
    devices = reply.answer.devices
    names = (room(reply, "index", ",") or "").split(",")
    fault = None
    if not devices or not all(0 <= device.index < 10_000 and _UUID.fullmatch(device.uuid) for device in devices):
        fault = _("its answer names no GPUs")
    elif len(set(names)) < len(names):  # CUDA sees no device of such a list
        fault = _("its answer names a GPU twice")
    return replace(reply, answer=None, facts=None, error=fault) if fault else reply


def room_line(reply: HostReply, devices: str | None, hosts: Sequence[str], width: int | None, paint: Paint) -> str:
    """Return the line of `select --hosts` on a terminal: the host, and its devices or why there are none."""
    name = reply.host.ljust(max(map(len, hosts)))
    if devices is not None and reply.answer is not None:
        models = Counter(shorten(device.name or NOT_AVAILABLE, 40) for device in reply.answer.devices)
        what = ", ".join(f"{count} x {model}" for model, count in models.items())
        return paint(_fit(f"{name}  {devices}  ({what})", width), "green")
    why = _("no room: {why}").format(why=reply.refusal) if reply.refusal else reply.error or ""
    return paint(_fit(f"{name}  {shorten(why, 200)}", width), "" if reply.refusal else "red")


def total_lines(replies: Sequence[HostReply], width: int | None) -> list[str]:
    """Return a table of what users have on all hosts together."""
    totals = grouped(
        (_name(user.user), user)
        for reply in replies
        if reply.answer is not None
        for user in reply.answer.users[:SHOWN_ROWS]
    )
    rows = []
    for name, on_hosts in totals.items():
        devices, processes, claimed, idle = (
            sum(getattr(user, field) for user in on_hosts) for field in ("devices", "processes", "claimed", "idle")
        )
        memory = _sum(user.memory_used_bytes for user in on_hosts)
        total = UserTotal(name, devices, processes, None if memory is None else int(memory), claimed, idle)
        cells = total_cells(total)
        rows.append((-devices, name, [cells[0], str(len(on_hosts)), *cells[1:]]))
    heads = [_(head) for head in (TOTALS[0], N_("HOSTS"), *TOTALS[1:])]
    return table([cells for *_key, cells in sorted(rows)], heads, align="<>>>>>>", width=width) if rows else []


def end_lines(replies: Sequence[HostReply], width: int | None, paint: Paint) -> list[str]:
    """Return lines that say how many hosts answered, and which did not, each with its reason."""
    silent = [reply for reply in replies if reply.error is not None]
    answered = _("{number} of {hosts} hosts answered").format(number=len(replies) - len(silent), hosts=len(replies))
    lines = [answered + (_("; not these:") if silent else ".")]
    cells = [[reply.host, shorten(reply.error or "", 200)] for reply in silent]
    return lines + [paint(f"  {line}", "red") for line in table(cells, width=None if width is None else width - 2)]


def to_json(replies: Sequence[HostReply], timeout: float) -> dict[str, Any]:
    """Return the object that docs/json.md describes: one object per host, whether it answered or not."""
    return {
        "schema": 1,
        "asked": len(replies),
        "answered": sum(reply.error is None for reply in replies),
        "timeout_seconds": timeout,
        "hosts": [
            {**picked(reply, "host", "error", "refusal"), "seconds": round(reply.seconds, 3), "answer": reply.facts}
            for reply in replies
        ],
    }


# The screen of `gpuguard top --hosts`: a line per host, with the utilization of each device as one character.


@dataclass(frozen=True)
class KnownHost:
    """The newest facts that are known of a host."""

    counted: FleetSums | None = None  # None if it has never answered
    at: float = 0.0  # monotonic time of that answer
    error: str | None = None  # why the last question has no answer


def after(known: KnownHost, reply: HostReply, now: float) -> KnownHost:
    """Return what is *known* after *reply*: an error keeps the last answer, and its age says how old that is."""
    if reply.answer is None:
        return KnownHost(known.counted, known.at, reply.error or reply.refusal)
    return KnownHost(sums(reply.answer), now)


_HEADS = (
    N_("HOST"), N_("GPUS"), N_("FREE"), N_("UTILIZATION"), N_("MEMORY"), N_("WAIT"), N_("AGE"), N_("USERS"),
)  # fmt: skip


def page(
    hosts: Sequence[str],
    fleet: Mapping[str, KnownHost],
    now: float,
    *,
    width: int | None,
    paint: Paint,
    ascii_only: bool = False,
) -> list[str]:
    """Return the lines: the fleet in sums, then each host.

    *now* is monotonic; *fleet* has the hosts of which anything is known.
    """
    silent = sum(known.error is not None for known in fleet.values())
    counted = in_words(known.counted for known in fleet.values() if known.counted)
    title = f"{format_count(len(hosts), 'host')}, {counted}"
    title += (
        "; " + ngettext("{number} does not answer", "{number} do not answer", silent).format(number=silent)
        if silent
        else ""
    )
    names = max(map(len, hosts))
    rows = [_known_row(host.ljust(names), fleet.get(host), now, ascii_only) for host in hosts]
    heads = [_(head) for head in _HEADS]
    whole = iter(table([row for row in rows if len(row) > 2], heads, align="<>><>>>", width=width) or [heads[0]])
    lines = [paint(_fit(f"{local_time(time.time(), '%H:%M:%S')}  {title}", width), "bold"), next(whole)]
    for host, row in zip(hosts, rows, strict=True):  # the reason why a host is unknown needs the room of its numbers
        line = _fit(next(whole) if len(row) > 2 else "  ".join(row), width)
        known = fleet.get(host)
        lines.append(paint(line, "dim" if known is None else "red" if known.error is not None else ""))
    return lines


def _known_row(host: str, known: KnownHost | None, now: float, ascii_only: bool) -> list[str]:
    if known is None or (known.counted is None and known.error is None):
        return [host, _("asked")]
    error, counted = shorten(known.error or "", 200), known.counted
    if counted is None:
        return [host, error]
    memory = f"{format_bytes(counted.memory_used)}/{format_bytes(counted.memory_total)}"
    users = ", ".join(f"{user} {count}" for user, count in counted.users.most_common(_USERS))
    users += (
        " " + _("and {number} more").format(number=len(counted.users) - _USERS) if len(counted.users) > _USERS else ""
    )
    return [
        host,
        str(counted.states.total()),
        str(counted.states["free"]),
        _utilization(counted.utilization, ascii_only),
        memory if (counted.memory_used, counted.memory_total) != (None, None) else NOT_AVAILABLE,
        str(counted.waiting or ""),
        format_duration(round(max(0.0, now - known.at))),
        "; ".join(filter(None, (error, users))),
    ]


def _utilization(values: tuple[float | None, ...], ascii_only: bool) -> str:
    shown = values[:16]
    heights = sparkline(shown, len(shown), 100.0, ascii_only=ascii_only)
    drawn = "".join("?" if value is None else height for value, height in zip(shown, heights, strict=True))
    total = _sum(values)
    return f"{drawn} {format_rounded(None if total is None else total / len(values), '%')}"


def _name(user: str | None) -> str:
    return shorten(user or _("unknown"), 40)


def _simulated(answer: HostAnswer) -> str:
    return _("SIMULATED node ") if answer.simulated else ""


def _fit(line: str, width: int | None) -> str:
    return line if width is None else shorten(line, width)
