"""What `gpuguard explain` prints: a choice of devices, for people and for programs.

Does not choose; the texts of the reasons come from eligibility.
"""

from __future__ import annotations

from typing import Any

from gpuguard.device_state import device_title, vendor_of
from gpuguard.eligibility import UNSHARED, Reason, Sharing, share_left, shared_by, slots_left
from gpuguard.errors import ImpossibleRequest
from gpuguard.locale import _, translated
from gpuguard.model import SLOTS, Device, Snapshot
from gpuguard.request import Request, spelled
from gpuguard.sanitize import neutralise
from gpuguard.select import Choice, instances_note, not_enough
from gpuguard.tables import table
from gpuguard.units import format_bytes, format_count
from gpuguard.views.text import Paint, picked

START, WAIT, NEVER = "start", "wait", "never"


def outcome(snapshot: Snapshot, request: Request, choice: Choice) -> str:
    """Return what `run` would do now: "start", "wait" or "never" (the request cannot be met on this machine)."""
    if choice.devices:
        return START
    return NEVER if isinstance(not_enough(snapshot, request, choice), ImpossibleRequest) else WAIT


def to_text(
    snapshot: Snapshot,
    request: Request,
    choice: Choice,
    limits: str = "",
    start: tuple[bool, str] | None = None,
    *,
    paint: Paint = lambda text, _: text,
) -> list[str]:
    """Return lines: each device with its rank or its reasons, then what `run` would do.

    Args:
        limits: what an outer scheduler or CUDA_VISIBLE_DEVICES allows, or "" for no limit.
        start: (whether it could start now, its queue position in words), or None if it would not have to queue.
    """
    simulated = _("  SIMULATED") if snapshot.simulated else ""
    rows, colours = [], []
    for device in _all(choice):
        rows += (of_device := _rows(device, choice))
        chosen = "bold green" if device in choice.devices else "green"
        colours += ["red" if _reasons(device, choice) else chosen, *[""] * (len(of_device) - 1)]
    lines = [f"{neutralise(snapshot.host)}{simulated}: gpuguard run {spelled(request)}"]
    lines += [neutralise(_("limit: {limits}").format(limits=translated(limits)))] if limits else []
    lines += table(rows, paint=lambda cell, row, column: paint(cell, colours[row]) if column == 1 else cell)
    return [*lines, *_verdict(snapshot, request, choice, start)]


def to_json(
    snapshot: Snapshot, request: Request, choice: Choice, limits: str = "", start: tuple[bool, str] | None = None
) -> dict[str, Any]:
    """Return the object that docs/json.md describes, with None for unknown."""
    return {
        "schema": 1,
        **picked(snapshot, "host", "backend", "simulated", "taken_at"),
        "request": spelled(request),
        "limits": limits or None,
        "outcome": WAIT if choice.devices and start and not start[0] else outcome(snapshot, request, choice),
        "line": neutralise(start[1]) if start else None,
        "chosen": [device.uuid for device in choice.devices],
        "devices": [_device_json(device, request, choice) for device in _all(choice)],
    }


def _device_json(device: Device, request: Request, choice: Choice) -> dict[str, Any]:
    reasons, sharing = _reasons(device, choice), _sharing(device, choice)
    return {
        **picked(device, "index", "uuid", "name", "memory_free_bytes", "memory_total_bytes"),
        "eligible": not reasons,
        "rank": None if reasons else choice.eligible.index(device) + 1,
        "reasons": [reason.text for reason in reasons],
        "permanent": any(reason.permanent for reason in reasons),
        "shared_by": [record.user for record in sharing.claims],
        "share_left_bytes": share_left(device, sharing) if request.share else None,
        "slots_left": slots_left(sharing, request.slots) if request.share else None,
    }


def _sharing(device: Device, choice: Choice) -> Sharing:
    return (choice.sharing or {}).get(device.uuid, UNSHARED)


def _rows(device: Device, choice: Choice) -> list[list[str]]:
    title = translated(device_title(device))
    reasons = [neutralise(translated(reason.text)) for reason in _reasons(device, choice)]
    if reasons:
        return [[title, _("REFUSED"), reasons[0]], *(["", "", more] for more in reasons[1:])]
    facts = [_("choice {number}").format(number=choice.eligible.index(device) + 1)]
    free = device.memory_free
    facts += [
        _("free memory unknown") if free is None else _("{memory_free} free").format(memory_free=format_bytes(free))
    ]
    facts += [_("memory shared with the host")] if device.memory_shared_with_host else []
    facts += [_("asleep: it wakes when a job uses it")] if device.asleep else []
    sharing = _sharing(device, choice)
    if sharing.count:
        left = format_bytes(share_left(device, sharing))
        slots = format_count(slots_left(sharing, SLOTS), "slot")
        facts.append(
            _("shared by {shared_by}: {left} and {slots} left").format(
                shared_by=translated(shared_by(sharing)), left=left, slots=slots
            )
        )
    judged_alone = device.processes is None and not device.asleep
    facts += [_("its list of processes is unknown: judged by memory alone")] if judged_alone else []
    facts += [why] if (why := _passed_over(device, choice)) else []
    return [[title, _("CHOSEN") if device in choice.devices else _("ELIGIBLE"), ", ".join(facts)]]


def _passed_over(device: Device, choice: Choice) -> str | None:
    """Say why *device* is not chosen although one of lower rank is, or return None."""
    if not choice.devices or device in choice.devices:
        return None
    if choice.eligible.index(device) > max(map(choice.eligible.index, choice.devices)):
        return None
    if bool(device.parent_uuid) is not bool(choice.devices[0].parent_uuid):
        return _("not chosen: one job cannot use both whole GPUs and parts of divided ones")
    command = vendor_of(device).topology_command
    return _("not chosen: the others are closer to each other ({command})").format(command=command)


def _verdict(snapshot: Snapshot, request: Request, choice: Choice, start: tuple[bool, str] | None) -> list[str]:
    what = outcome(snapshot, request, choice)
    position = [_("If you ran it now: {start}.").format(start=neutralise(translated(start[1])))] if start else []
    names = ", ".join(translated(device_title(device)) for device in choice.devices)
    if what == START and start and not start[0]:
        return [_("It would wait although {names} could be had: others wait before it.").format(names=names), *position]
    if what == START:
        note = instances_note(choice.devices, request)
        return [
            _("It would start at once on {names}.").format(names=names),
            *([_("Note: {note}").format(note=note)] if note else []),
        ]
    error = not_enough(snapshot, request, choice)  # its reasons stand above, by device
    if what == WAIT:
        return [_("It would wait: {first}").format(first=translated(error.headline)), *position]
    return [_("It can never start: {first}").format(first=translated(error.headline)), *filter(None, [error.advice])]


def _all(choice: Choice) -> list[Device]:
    devices = [*choice.eligible, *(refusal.device for refusal in choice.refused)]

    def position(device: Device) -> tuple[object, ...]:
        return device.index, device.parent_uuid is not None, device.gpu_instance_id or 0, device.uuid

    return sorted(devices, key=position)


def _reasons(device: Device, choice: Choice) -> tuple[Reason, ...]:
    return next((refusal.reasons for refusal in choice.refused if refusal.device.uuid == device.uuid), ())
