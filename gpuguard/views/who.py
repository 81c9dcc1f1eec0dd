"""The screen and the JSON of `gpuguard who`.

docs/json.md describes every field of the JSON, and a test compares the two.  device_state decides who uses what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from gpuguard import device_state
from gpuguard.device_state import ClaimUse, DeviceUse, ProcessUse, computes, grouped, may_compute, user_label
from gpuguard.locale import N_, _, translated
from gpuguard.locale.messages import all_of, sentence
from gpuguard.model import SLOTS, Device, Snapshot
from gpuguard.sanitize import display_width, neutral_command, neutralise
from gpuguard.tables import shorten, table
from gpuguard.units import format_bytes, format_count, format_duration, local_time
from gpuguard.views.columns import NAME, WHO_COLUMNS
from gpuguard.views.text import Paint, picked, wrapped

if TYPE_CHECKING:
    from gpuguard.device_state import DeviceState
    from gpuguard.queue.priority import Ticket
    from gpuguard.queue.reservations import ReservationCalendar

LABELS: Mapping[DeviceState, tuple[str, str]] = {  # (words, colour)
    "free": (N_("free"), "green"),
    "claimed": (N_("claimed, no process yet"), "yellow"),
    "in_use": (N_("in use"), "bold"),
    "idle": (N_("claimed but idle"), "yellow"),
    "unclaimed_use": (N_("used without a claim"), "red"),
    "unhealthy": (N_("unhealthy"), "bold red"),
    "unknown": (N_("unknown"), "yellow"),
    "quarantined": (N_("quarantined"), "bold red"),
    "divided": (N_("divided"), "dim"),
    "reserved": (N_("reserved"), "yellow"),
    "asleep": (N_("free, asleep"), "green"),
}
ENDED = N_("has ended, its memory is still held")  # of a process that the driver goes on listing
TOTALS = (N_("USER"), N_("GPUS"), N_("PROCESSES"), N_("MEMORY"), N_("CLAIMED"), N_("IDLE"))
_INDENT = "     "
_SHORTEST_NAME = 16  # columns of a name: "GeForce RTX 4090"
MOST_CLAIMS = 10  # lines of a user below a device: 8 claims can share it, but any number of records may be about it
# The screen does not say why other fields are unknown: no SXM module has a fan.  The JSON names all gaps.
_SHOWN = {"memory_total", "processes", "problems", *(column.field for column in WHO_COLUMNS)}
_NOT_SHOWN = set(Device.__match_args__) - _SHOWN


@dataclass(frozen=True)
class WaitingRequests:
    """The requests that wait for devices, in the order of the queue."""

    tickets: Sequence[Ticket] = ()
    unplanned: Sequence[str] = ()  # texts that say how many more requests wait for those


def to_text(
    snapshot: Snapshot,
    uses: Sequence[DeviceUse],
    waiting: WaitingRequests = WaitingRequests(),
    *,
    reserved: ReservationCalendar | None = None,
    width: int | None = None,
    paint: Paint = lambda text, _: text,
    age: float | None = None,
) -> list[str]:
    """Return the screen: title, devices with their claims and processes, totals per user, requests that wait, gaps.

    Args:
        snapshot: of the whole machine, for the title and the gaps of what is shown.
        uses: the devices to show.
        width: columns of the terminal, or None (a pipe) if nothing is to be shortened.
        age: seconds since the daemon read the driver, or None if it was read just now.
    """
    title = _title(snapshot, age)
    titles = [shorten(line, width) for line in wrapped(title, width)] if width else [title]
    lines = [*(paint(line, "bold") for line in titles), *_device_lines(snapshot, uses, width, paint)]
    if totals := device_state.user_totals(tuple(uses)):
        lines += ["", *table(map(total_cells, totals), list(map(_, TOTALS)), align="<>>>>>", width=width)]
    if waiting.tickets:
        rows = [_waiting_row(ticket, snapshot.taken_at) for ticket in waiting.tickets]
        lines += [
            "",
            *table(rows, [_("WAITING"), "ID", _("GPUS"), _("SINCE"), "PID", _("COMMAND")], align="<<>>>", width=width),
            *(shorten(neutralise(translated(text)), width) for text in waiting.unplanned),
        ]
    if reserved:
        from gpuguard.views.queue import reservations_text  # loads the queue, so only if something is reserved

        kept = reservations_text(reserved, width=width)
        lines += ["", *kept] if kept else []
    if gaps := gap_lines(snapshot, {use.device.uuid for use in uses}):
        lines += ["", _("Not known:"), *(shorten(f"  {neutralise(translated(gap))}", width) for gap in gaps)]
    return lines


def _title(snapshot: Snapshot, age: float | None) -> str:
    whole = [device for device in snapshot.devices if not device.parent_uuid]
    parts = [format_count(len(whole), "GPU")]
    if snapshot.driver_version:
        parts.append(_("driver {driver_version}").format(driver_version=snapshot.driver_version))
    parts.append(local_time(snapshot.taken_at, "%Y-%m-%d %H:%M:%S"))
    if age is not None:
        parts.append(_("seen by the daemon {age} ago").format(age=format_duration(age)))
    kind = (_("RECORDED ") if snapshot.recorded else "") + (_("SIMULATED node ") if snapshot.simulated else "")
    return neutralise(f"{kind}{snapshot.host}: {', '.join(parts)}")


def _device_lines(snapshot: Snapshot, uses: Sequence[DeviceUse], width: int | None, paint: Paint) -> list[str]:
    if not uses:
        return [_("nothing to show")]
    heads = [*(_(column.head) for column in WHO_COLUMNS), _("STATE")]
    cells = [[column.cell(use.device) for column in WHO_COLUMNS] for use in uses]
    for row, use in zip(cells, uses, strict=True):
        row.append(_(LABELS[use.state][0]) + _left(use))
    if width is not None:  # the name gives way to the state, but not one that ends with the profile of a MIG instance
        over = sum(2 + max(map(display_width, column)) for column in zip(heads, *cells, strict=True)) - 2 - width
        name = WHO_COLUMNS.index(NAME)
        room = max(_SHORTEST_NAME, max(display_width(row[name]) for row in cells) - max(0, over))
        for row, use in zip(cells, uses, strict=True):
            row[name] = row[name] if use.device.mig_profile else shorten(row[name], room)
    devices = table(
        cells,
        heads,
        align="".join(column.align for column in WHO_COLUMNS),
        width=width,
        paint=lambda cell, row, place: paint(cell, LABELS[uses[row].state][1]) if place == len(WHO_COLUMNS) else cell,
    )
    below = [list(_rows_below(use, snapshot, width is not None)) for use in uses]
    texts = iter(table(chain(*below), align="<<<>>", width=None if width is None else width - len(_INDENT)))
    lines = devices[:1]
    for line, use, rows in zip(devices[1:], uses, below, strict=True):
        lines.append(line)
        if use.reason:
            reason = neutralise(translated(use.reason))
            lines.append(shorten(_INDENT + _("why: {reason}").format(reason=reason), width))
        lines += [_INDENT + next(texts) for _ in rows]
    return lines


def _left(use: DeviceUse) -> str:
    """Return ``", shared: 40.0GiB and 6 slots left"`` for a device that is shared, or ""."""
    memory, slots = _left_of_shared(use)
    if slots is None:
        return ""
    left = _("an unknown part") if memory is None else format_bytes(memory)
    return _(", shared: {left} and {count} left").format(left=left, count=format_count(slots, "slot"))


def _left_of_shared(use: DeviceUse) -> tuple[int | None, int | None]:
    """Return (the bytes that are not claimed, or None if unknown; how many may join, or None if it is not shared)."""
    if not any(held.record.slots for held in use.claims):
        return None, None
    from gpuguard.eligibility import share_left, sharing_on, slots_left  # 4 ms, for shared devices alone

    uids = {held.record.id: held.record.uid for held in use.claims}
    owners = {running.process.pid: uids[running.claim] for running in use.processes or () if running.claim in uids}
    sharing = sharing_on(use.device, [held.record for held in use.claims], owners)
    return (share_left(use.device, sharing), slots_left(sharing, SLOTS)) if sharing.count else (None, None)


def _rows_below(use: DeviceUse, snapshot: Snapshot, brief: bool) -> Iterable[list[str]]:
    of_user: dict[str | None, int] = {}
    for held in use.claims:
        of_user[held.user] = of_user.get(held.user, 0) + 1
        if of_user[held.user] <= MOST_CLAIMS:
            yield _claim_row(held, snapshot, brief)
    for user, number in of_user.items():
        if number > MOST_CLAIMS:
            more = _("and {number} more").format(number=number - MOST_CLAIMS)
            yield [_("claim"), more, neutralise(user_label(user)), "", "", "", _("which --json shows")]
    for running in use.processes or ():
        yield _process_row(running, use, snapshot, brief)


def _claim_row(held: ClaimUse, snapshot: Snapshot, brief: bool) -> list[str]:
    record = held.record
    note = f'"{neutralise(record.note)}"  ' if record.note else ""
    remarks = [word for word, true in ((_("orphaned"), held.orphaned), (_("stopped"), held.stopped)) if true]
    remarks += [_("its share")] if record.slots else []
    remarks += [_("job {id}").format(id=neutralise(record.job))] if record.job else []
    if record.hidden and record.holders:
        remarks += [_("held by {users} together: counts as no claim").format(users=neutralise(record.user))]
    elif record.hidden:
        remarks += [_("no process holds it: counts as no claim")]
    since = None if record.since is None else snapshot.taken_at - record.since
    return [
        _("claim"),
        neutralise(record.id),
        neutralise(user_label(held.user)),
        format_duration(since),
        format_bytes(record.memory) if record.slots else "",
        ", ".join(remarks),
        note + neutral_command(record.command, brief=brief),
    ]


def _process_row(running: ProcessUse, use: DeviceUse, snapshot: Snapshot, brief: bool) -> list[str]:
    process = running.process
    if running.claim is not None:
        remarks = [(_("perhaps ") if running.guessed else "") + running.claim]
    else:
        remarks = [_("no claim")] if may_compute(process, use.device) else []
    remarks += [_(ENDED)] if process.ended else []
    remarks += [process.kind] if process.kind != "compute" else []
    remarks += [_("stopped")] if running.stopped else []
    container = _("in {container}: ").format(container=neutralise(process.container[:12])) if process.container else ""
    return [
        "pid",
        str(process.pid),
        neutralise(user_label(process.user, process.uid)),
        format_duration(_running(running, snapshot)),
        format_bytes(process.memory_used),
        neutralise(", ".join(remarks)),
        container + neutral_command(process.command, brief=brief),
    ]


def total_cells(total: device_state.UserTotal) -> list[str]:
    """Return the cells that stand below TOTALS for a user."""
    devices, processes, claimed, idle = map(str, (total.devices, total.processes, total.claimed, total.idle))
    return [neutralise(user_label(total.user)), devices, processes, format_bytes(total.memory_used), claimed, idle]


def _waiting_row(ticket: Ticket, now: float) -> list[str]:
    note = f'"{neutralise(ticket.note)}"  ' if ticket.note else ""
    since = format_duration(now - ticket.since)
    command = note + neutral_command(ticket.command)
    return [neutralise(ticket.user), neutralise(ticket.short_id), str(ticket.num_gpus), since, str(ticket.pid), command]


def gap_lines(snapshot: Snapshot, shown: Collection[str] | None = None) -> list[str]:
    """Return sentences like ``"GPU 0, 7: power_draw, temperature: not supported"``, equal fields and reasons together.

    They are only about what the screen shows; *shown* holds the uuids of its devices, or None for all.
    """
    hidden = set() if shown is None else {device.uuid for device in snapshot.devices} - set(shown)
    unknown = grouped(
        ((gap.device, gap.reason), gap.field)
        for gap in snapshot.gaps
        if gap.field not in _NOT_SHOWN and gap.device not in hidden
    )
    alike = grouped(((", ".join(sorted(names)), reason), device) for (device, reason), names in unknown.items())
    known = {device.uuid: device.label for device in snapshot.devices}
    lines = []
    for (fields, reason), uuids in alike.items():
        labels = [known[uuid] for uuid in uuids if uuid in known]
        gpus = [f"GPU {', '.join(labels)}"] if labels else []
        where = [sentence("who.all_gpus", "all GPUs")] if 1 < len(labels) == len(known) else gpus
        lines.append(all_of([*where, fields, reason], ": "))
    return lines


def to_json(
    snapshot: Snapshot,
    uses: Sequence[DeviceUse],
    waiting: WaitingRequests = WaitingRequests(),
    *,
    reserved: ReservationCalendar | None = None,
    age: float | None = None,
) -> dict[str, Any]:
    """Return the object that docs/json.md describes; unknown is None."""
    index_of = {device.uuid: device.index for device in snapshot.devices}
    reservations = []
    if reserved:
        from gpuguard.views.queue import reservations_json  # loads the queue, so only if something is reserved

        reservations = reservations_json(reserved)
    return {
        "schema": 1,
        **picked(snapshot, "host", "backend", "simulated", "recorded", "taken_at", "driver_version"),
        "age_seconds": None if age is None else round(age, 3),
        "devices": [_device_json(use, snapshot) for use in uses],
        "users": [
            picked(total, "user", "devices", "processes", "claimed", "idle", "memory_used_bytes")
            for total in device_state.user_totals(tuple(uses))
        ],
        "waiting": [
            picked(ticket, "id", "short_id", "user", "pid", "num_gpus", "since", "note", "command")
            for ticket in waiting.tickets
        ],
        "reservations": reservations,
        "gaps": [
            {**picked(gap, "device", "field", "reason"), "index": index_of.get(gap.device or "")}
            for gap in snapshot.gaps
        ],
    }


def _device_json(use: DeviceUse, snapshot: Snapshot) -> dict[str, Any]:
    device, (share_left, slots_left) = use.device, _left_of_shared(use)
    return {
        **picked(device, "index", "label", "uuid", "name", "vendor", "pci_bus_id", "parent_uuid", "mig_profile"),
        "state": use.plain_state,
        "exact_state": use.state,
        **picked(use, "reason", "problems"),
        **picked(device, "integrated", "asleep", "memory_shared_with_host"),
        **picked(device, "memory_total_bytes", "memory_used_bytes", "memory_free_bytes"),
        **picked(device, "utilization_percent", "memory_utilization_percent"),
        **picked(device, "temperature_celsius", "fan_speed_percent", "power_draw_watts", "power_limit_watts"),
        "processes_plausible": device.processes_plausible,
        "claims": [_claim_json(held) for held in use.claims],
        "share_left_bytes": share_left,
        "slots_left": slots_left,
        "processes": None
        if use.processes is None
        else [_process_json(running, use, snapshot) for running in use.processes],
    }


def _claim_json(held: ClaimUse) -> dict[str, Any]:
    record = held.record
    return {
        **picked(record, "id", "pid", "since", "ends", "expected", "note", "command", "job"),
        **picked(record, "alive", "holders", "memory_bytes"),
        **picked(held, "user", "idle", "orphaned", "stopped"),
        "uid": None if held.user is None else record.uid,
    }


def _process_json(running: ProcessUse, use: DeviceUse, snapshot: Snapshot) -> dict[str, Any]:
    process = running.process
    return {
        **picked(process, "pid", "user", "uid", "kind", "command", "executable", "container"),
        **picked(process, "working_directory", "conda_environment", "memory_used_bytes", "utilization_percent"),
        **picked(process, "memory_utilization_percent", "encoder_utilization_percent", "decoder_utilization_percent"),
        "computes": computes(process, use.device),
        "ended": process.ended,
        **picked(running, "claim", "stopped"),
        "claim_guessed": running.guessed,
        "running_seconds": _running(running, snapshot),
    }


def _running(running: ProcessUse, snapshot: Snapshot) -> float | None:
    start = running.process.start_time
    return None if start is None else round(max(0.0, snapshot.clock - start), 2)
