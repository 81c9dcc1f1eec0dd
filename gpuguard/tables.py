"""Tables of text and of HTML, and the rows that stand for a device and a claim in what Python objects show.

`print(gpuguard.who())` shows text, see text_of_snapshot(), and a notebook the same rows as HTML, in which everything is
escaped, because names are text of other users.  The tables of commands have columns of their own: see views.  Does not
read anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuguard.sanitize import columns_of, display_width, neutral_command, neutralise
from gpuguard.units import NOT_AVAILABLE, format_bytes, format_duration, format_rounded, local_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpuguard.claims.claim import Claim
    from gpuguard.model import ClaimRecord, Device, Snapshot

DEVICE_HEADS = ("GPU", "name", "memory", "util", "temp", "power", "processes", "claimed by")
CLAIM_HEADS = ("claim", "user", "for", "memory", "note", "command")
_HELD_HEADS = ("in this process", "GPU", "name", "memory", "uuid")


def shorten(text: str, width: int | None) -> str:
    """Return *text*, or its beginning and ``…``, in at most *width* columns; None (a pipe) leaves it as it is."""
    if width is None or display_width(text) <= width:
        return text
    used, kept = 1, []
    for character in text:
        used += columns_of(character)
        if used > width:
            break
        kept.append(character)
    return ("".join(kept) + "…") if width > 0 else ""


def padded(text: str, width: int, align: str = "<") -> str:
    """Return *text* with blanks behind it, or before it (``>``), in at least *width* columns."""
    blanks = " " * (width - display_width(text))
    return blanks + text if align == ">" else text + blanks


def table(
    rows: Iterable[Sequence[str]],
    headers: Sequence[str] | None = None,
    *,
    align: str = "",
    width: int | None = None,
    paint: Callable[[str, int, int], str] | None = None,
) -> list[str]:
    """Return lines with the columns of *rows* under each other, two spaces between them.

    Args:
        rows: neutral text, one sequence per row, all of one length.
        headers: a first row, never painted.
        align: ``<`` or ``>`` per column; ``<`` where it is too short.
        width: columns of the terminal; the last column is shortened to fit.  None (a pipe): nothing is shortened.
        paint: puts colour on a cell: (padded cell, its row, its column) -> cell.
    """
    whole = [*([headers] if headers else []), *rows]
    widths = [max(map(display_width, column)) for column in zip(*whole, strict=True)]
    lines = []
    for number, row in enumerate(whole, -1 if headers else 0):
        left, cells = width, []
        last = max((column for column, cell in enumerate(row) if cell), default=0)
        for column, cell in enumerate(row[: last + 1]):
            is_right = align[column : column + 1] == ">"
            if is_right or column != last:  # no blanks at the end of a line: they would wrap on a terminal
                cell = padded(cell, widths[column], ">" if is_right else "<")
            if left is not None:
                cell = shorten(cell, left)
                left = max(0, left - widths[column] - 2)
            cells.append(paint(cell, number, column) if paint and number >= 0 else cell)
            if left == 0:
                break
        lines.append("  ".join(cells))
    return lines


def text_of_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot's devices as a table of text."""
    rows = (list(map(neutralise, device_row(device, snapshot.claims))) for device in snapshot.devices)
    return "\n".join([neutralise(title(snapshot)), *table(rows, DEVICE_HEADS)])


def title(snapshot: Snapshot) -> str:
    """Return the name of the host, and whether it is a real one as it is now."""
    kind = ("RECORDED " if snapshot.recorded else "") + ("SIMULATED " if snapshot.simulated else "")
    return kind + snapshot.host


def device_row(device: Device, claims: Sequence[ClaimRecord]) -> list[str]:
    """Return the cells under DEVICE_HEADS, which may hold text of other users."""
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


def claim_row(claim: ClaimRecord, now: float | None) -> list[str]:
    """Return the cells under CLAIM_HEADS, which may hold text of other users; *now* is a unix time, or None."""
    known = None if now is None or claim.since is None else max(0.0, now - claim.since)
    memory = "all" if claim.memory is None else format_bytes(claim.memory)
    since = format_duration(known)
    return [claim.id, claim.user, since, memory, claim.note or "", neutral_command(claim.command)]


# For notebooks: what `_repr_html_` returns


def html_of_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot's devices as HTML, and its claims if it knows of any."""
    heading = f"<p><b>{escaped(title(snapshot))}</b></p>"
    parts = [heading, _html_table(DEVICE_HEADS, (device_row(device, snapshot.claims) for device in snapshot.devices))]
    if snapshot.claims:
        rows = (claim_row(claim, snapshot.taken_at) for claim in snapshot.claims)
        parts.append(_html_table(CLAIM_HEADS, rows))
    return "".join(parts)


def html_of_claim(claim: ClaimRecord) -> str:
    """Return one claim as HTML."""
    return _html_table(CLAIM_HEADS, [claim_row(claim, None)])


def html_of_held_claim(claim: Claim) -> str:
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
    return heading + _html_table(_HELD_HEADS, rows)


def escaped(text: str) -> str:
    """Return *text* as HTML that shows it."""
    from html import escape  # brings a table of 2,000 names, which `gpuguard run` would load each time

    return escape(neutralise(text))


def _html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = "".join(f"<th>{escaped(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
