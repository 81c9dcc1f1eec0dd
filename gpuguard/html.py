"""Tables for notebooks and print(), which `_repr_html_` and `__str__` return.

Everything is escaped, because names are text of other users.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from gpuguard.sanitize import display_width, neutral_command, neutralise
from gpuguard.units import NOT_AVAILABLE, format_bytes, format_duration, format_rounded, local_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuguard.claims.claim import Claim
    from gpuguard.model import ClaimRecord, Device, Snapshot

_DEVICE_HEADS = ("GPU", "name", "memory", "util", "temp", "power", "processes", "claimed by")
_HELD_HEADS = ("in this process", "GPU", "name", "memory", "uuid")
_CLAIM_HEADS = ("claim", "user", "for", "memory", "note", "command")


def text_of_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot's devices as a table of text."""
    rows = [_DEVICE_HEADS, *(map(neutralise, _device_row(device, snapshot.claims)) for device in snapshot.devices)]
    columns = list(zip(*rows, strict=True))
    widths = [max(map(display_width, column)) for column in columns]
    padded = (
        [cell + " " * (width - display_width(cell)) for cell in column]
        for column, width in zip(columns, widths, strict=True)
    )
    return "\n".join([_title(snapshot), *("  ".join(row).rstrip() for row in zip(*padded, strict=True))])


def _title(snapshot: Snapshot) -> str:
    kind = ("RECORDED " if snapshot.recorded else "") + ("SIMULATED " if snapshot.simulated else "")
    return neutralise(kind + snapshot.host)


def of_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot's devices as HTML, and its claims if it knows of any."""
    title = f"<p><b>{escape(_title(snapshot))}</b></p>"
    parts = [title, _table(_DEVICE_HEADS, (_device_row(device, snapshot.claims) for device in snapshot.devices))]
    if snapshot.claims:
        rows = (_claim_row(claim, snapshot.taken_at) for claim in snapshot.claims)
        parts.append(_table(_CLAIM_HEADS, rows))
    return "".join(parts)


def of_claim(claim: ClaimRecord) -> str:
    """Return one claim as HTML."""
    return _table(_CLAIM_HEADS, [_claim_row(claim, None)])


def of_held(claim: Claim) -> str:
    """Return a claim of this process as HTML: its devices, and the numbers that programs in it have for them."""
    if not claim.locks and claim.devices:
        return f"<p><b>{escaped(f'claim {claim.id}')}</b> {escaped('was given back')}</p>"
    since = "" if claim.since is None else f"since {local_time(claim.since, '%H:%M')}"
    title = f"<p><b>{escaped(f'claim {claim.id}')}</b> {escaped(since)}</p>"
    rows = (
        [
            str(place),
            *_device_row(device, ())[:2],
            format_bytes(device.memory_total if claim.memory is None else claim.memory),
            device.uuid,
        ]
        for place, device in enumerate(claim)
    )
    return title + _table(_HELD_HEADS, rows)


def escaped(text: str) -> str:
    """Return *text* as HTML that shows it."""
    return escape(neutralise(text))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = "".join(f"<th>{escaped(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def _device_row(device: Device, claims: Sequence[ClaimRecord]) -> list[str]:
    host = " (host)" if device.memory_shared_with_host else ""
    users = dict.fromkeys(claim.user for claim in claims if device.uuid in claim.devices)
    return [
        f"{device.label} {device.mig_profile or ''}".strip(),
        device.name or NOT_AVAILABLE,
        f"{format_bytes(device.memory_used)} / {format_bytes(device.memory_total)}{host}",
        format_rounded(device.utilization, "%"),
        format_rounded(device.temperature, "°C"),
        format_rounded(device.power_draw, "W"),
        NOT_AVAILABLE if device.processes is None else str(len(device.processes)),
        ", ".join(users),
    ]


def _claim_row(claim: ClaimRecord, now: float | None) -> list[str]:
    known = None if now is None or claim.since is None else max(0.0, now - claim.since)
    memory = "all" if claim.memory is None else format_bytes(claim.memory)
    since = format_duration(known)
    return [claim.id, claim.user, since, memory, claim.note or "", neutral_command(claim.command)]
