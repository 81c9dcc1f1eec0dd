"""Text of other users, made harmless for its readers; and tables of it as HTML, for notebooks.

A command line, a note or a container name is written by the user who started the job, and read by others, perhaps by
root.  No part of it may move the cursor, hide or turn round other text, or break a line.  This module does not lay out
text: see views.text.
"""

from __future__ import annotations

import shlex
import unicodedata
from typing import TYPE_CHECKING

from gpuguard.units import NOT_AVAILABLE, format_bytes, format_duration, format_rounded, local_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuguard.claims.claim import Claim
    from gpuguard.model import ClaimRecord, Device, Snapshot

# These are printable by their category and yet invisible, so they can fake a name or hide a message.
_INVISIBLE = frozenset(
    (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x2800, 0x3164, 0xFFA0)
).union(range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))
# Real scripts stack up to four marks on a letter; a hundred of them paint over the lines above and below.
_MARKS_AT_MOST = 4


def neutralise(text: str) -> str:
    r"""Return *text* with every character that is not plainly visible written out, as in ``\x1b`` or ``\u202e``.

    The result is one line of printable characters, and neutralising it again changes nothing.
    """
    if text.isascii() and text.isprintable():
        return text
    pieces = []
    marks = _MARKS_AT_MOST  # a mark without a letter before it would sit on our own text
    for character in text:
        if unicodedata.category(character) in ("Mn", "Me"):
            marks += 1
            visible = marks <= _MARKS_AT_MOST and ord(character) not in _INVISIBLE
        else:
            visible = character.isprintable() and ord(character) not in _INVISIBLE
            marks = 0
        if visible:
            pieces.append(character)
        elif "\udc80" <= character <= "\udcff":  # a byte of an argument that is not text (PEP 383)
            pieces.append(f"\\x{ord(character) - 0xDC00:02x}")
        else:
            pieces.append(character.encode("unicode_escape").decode("ascii"))
    return "".join(pieces)


def display_width(text: str) -> int:
    """Return how many columns *text* takes on a terminal: 2 for a wide East Asian character, 0 for a combining mark."""
    return len(text) if text.isascii() else sum(map(columns_of, text))


def columns_of(character: str) -> int:
    """Return how many columns one character takes on a terminal."""
    # Vowels and final consonants of Hangul join the syllable before them.
    if unicodedata.category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def neutral_command(words: Sequence[str] | None, *, brief: bool = False) -> str:
    """Return a command line as one neutral line, with quotes where a shell needs them, or ``"n/a"`` if it is unknown.

    *brief* leaves out the directory of the program.
    """
    if words is None:
        return NOT_AVAILABLE
    program = [word.rpartition("/")[2] or word for word in words[:1]] if brief else words[:1]
    return neutralise(" ".join(map(shlex.quote, [*program, *words[1:]])))


# Tables for notebooks, which `_repr_html_` returns.  Everything is escaped, because names are text of other users.

_DEVICE_HEADS = ("GPU", "name", "memory", "util", "temp", "power", "processes", "claimed by")
_HELD_HEADS = ("in this process", "GPU", "name", "memory", "uuid")
_CLAIM_HEADS = ("claim", "user", "for", "memory", "note", "command")


def of_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot's devices as HTML, and its claims if it knows of any."""
    kind = ("RECORDED " if snapshot.recorded else "") + ("SIMULATED " if snapshot.simulated else "")
    title = f"<p><b>{escaped(kind + snapshot.host)}</b></p>"
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
    from html import escape  # its table of names is for notebooks and pages alone

    return escape(neutralise(text))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = "".join(f"<th>{escaped(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def _device_row(device: Device, claims: Sequence[ClaimRecord]) -> list[str]:
    users = dict.fromkeys(claim.user for claim in claims if device.uuid in claim.devices)
    return [
        f"{device.label} {device.mig_profile or ''}".strip(),
        device.name or NOT_AVAILABLE,
        f"{format_bytes(device.memory_used)} / {format_bytes(device.memory_total)}",
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
