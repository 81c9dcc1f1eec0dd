"""Text of other users, made harmless for its readers.

A command line, a note or a container name is written by the user who started the job, and read by others, perhaps by
root.  No part of it may move the cursor, hide or turn round other text, or break a line.  This module does not lay out
text: see views.text.
"""

from __future__ import annotations

import shlex
import unicodedata
from typing import TYPE_CHECKING

from gpuguard.units import NOT_AVAILABLE

if TYPE_CHECKING:
    from collections.abc import Sequence


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
