"""Tables for notebooks, which `_repr_html_` returns.

Everything is escaped, because names are text of other users.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from gpuguard.sanitize import neutralise
from gpuguard.tables import CLAIM_HEADS, DEVICE_HEADS, claim_row, device_row, title
from gpuguard.units import format_bytes, local_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuguard.claims.claim import Claim
    from gpuguard.model import ClaimRecord, Snapshot

_HELD_HEADS = ("in this process", "GPU", "name", "memory", "uuid")


def of_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot's devices as HTML, and its claims if it knows of any."""
    heading = f"<p><b>{escaped(title(snapshot))}</b></p>"
    parts = [heading, _table(DEVICE_HEADS, (device_row(device, snapshot.claims) for device in snapshot.devices))]
    if snapshot.claims:
        rows = (claim_row(claim, snapshot.taken_at) for claim in snapshot.claims)
        parts.append(_table(CLAIM_HEADS, rows))
    return "".join(parts)


def of_claim(claim: ClaimRecord) -> str:
    """Return one claim as HTML."""
    return _table(CLAIM_HEADS, [claim_row(claim, None)])


def of_held(claim: Claim) -> str:
    """Return a claim of this process as HTML: its devices, and the numbers that programs in it have for them."""
    if not claim.locks and claim.devices:
        return f"<p><b>{escaped(f'claim {claim.id}')}</b> {escaped('was given back')}</p>"
    since = "" if claim.since is None else f"since {local_time(claim.since, '%H:%M')}"
    heading = f"<p><b>{escaped(f'claim {claim.id}')}</b> {escaped(since)}</p>"
    rows = (
        [
            str(place),
            *device_row(device, ())[:2],
            format_bytes(device.memory_total if claim.memory is None else claim.memory),
            device.uuid,
        ]
        for place, device in enumerate(claim)
    )
    return heading + _table(_HELD_HEADS, rows)


def escaped(text: str) -> str:
    """Return *text* as HTML that shows it."""
    return escape(neutralise(text))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = "".join(f"<th>{escaped(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
