"""Text that strangers wrote, made harmless for whoever reads it.

A command line, a note or a container name is written by whoever started the job, and is read by somebody else, perhaps
by root.  Nothing of it may move the cursor, hide or turn round other text, or break a line.  Does not lay out: see
views.text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Printable by their category, and yet invisible: a name can be faked and a message hidden with them.
_INVISIBLE = frozenset(
    (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x2800, 0x3164, 0xFFA0)
).union(range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))
# Real scripts stack up to four marks on a letter; a hundred of them paint over the lines above and below.
_MARKS_AT_MOST = 4
# What no shell finds anything in: the letters that shlex.quote() leaves alone.
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_@%+=:,./-")


def neutralise(text: str) -> str:
    r"""*text* with every character that is not plainly visible written out, as in ``\x1b`` or ``\u202e``.

    What comes back is one line of printable characters, and neutralising it again changes nothing.
    """
    if text.isascii() and text.isprintable():
        return text
    import unicodedata  # 0.4 ms and 0.7 MiB that plain text need not pay

    pieces = []
    marks = _MARKS_AT_MOST  # a mark without a letter before it would sit on our own text
    for character in text:
        if unicodedata.category(character) in ("Mn", "Me"):
            marks += 1
            visible = marks <= _MARKS_AT_MOST and ord(character) not in _INVISIBLE
        else:
            visible = character.isprintable() and ord(character) not in _INVISIBLE
            marks = 0
        pieces.append(character if visible else _written_out(character))
    return "".join(pieces)


def display_width(text: str) -> int:
    """How many columns *text* takes on a terminal: 2 for a wide East Asian character, 0 for a combining mark."""
    return len(text) if text.isascii() else sum(map(columns_of, text))


def columns_of(character: str) -> int:
    """How many of them one character takes."""
    import unicodedata

    # Vowels and final consonants of Hangul join the syllable before them.
    if unicodedata.category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def neutral_command(words: Sequence[str] | None, *, brief: bool = False) -> str:
    """A command line as one neutral line, with quotes where a shell needs them; ``"n/a"`` when unknown.

    Args:
        words: the program and its arguments.
        brief: leave out the directory of the program, so that more of the rest fits.
    """
    if words is None:
        return "n/a"
    program = [word.rpartition("/")[2] or word for word in words[:1]] if brief else words[:1]
    return neutralise(" ".join(map(_quoted, [*program, *words[1:]])))


def _quoted(word: str) -> str:
    """As shlex.quote(), which loads re for it: 5 ms."""
    if word and _PLAIN.issuperset(word):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"


def _written_out(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of an argument that is no text (PEP 383)
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
