"""A screen that is drawn again and again at the same place of a terminal, without any library."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn, TextIO

# The alternate screen, so that the shell's lines come back afterwards.
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def drawn(lines: Sequence[str]) -> str:
    """*lines* so that each overwrites what stood there."""
    return _HOME + "\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_REST


def fitting(lines: list[str], else_use: str) -> list[str]:
    """*lines* that fit on the terminal; those that do not are counted, and *else_use* says how to see them."""
    from gpuguard.views.text import shorten

    columns, rows = size()
    room = max(2, (rows or 24) - 1)
    if len(lines) <= room:
        return lines
    more = f"... {len(lines) - room + 1} more lines: enlarge the window, or {else_use}"
    return [*lines[: room - 1], shorten(more, columns or 80)]


def has_places(stream: TextIO) -> bool:
    """Whether *stream* is a terminal on which something can be drawn at a place: that of an editor is not."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def size() -> tuple[int | None, int | None]:
    """Columns and rows of the terminal; None and None for a pipe or a file."""
    try:
        found = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None, None
    return found.columns or 80, found.lines or 24


def leave(*_: object) -> NoReturn:
    """End as SIGTERM asks for, through the clauses that give the shell's screen back."""
    raise SystemExit(128 + 15)
