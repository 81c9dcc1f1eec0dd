"""Notices on stderr, and the screen of a command that draws again and again."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from gpuguard.sanitize import neutralise
from gpuguard.views.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn, TextIO


def print_notice(text: str, *, again: bool = False) -> None:
    """Write *text* to stderr; with *again* in one line of the terminal, which the next one overwrites."""
    lines = [neutralise(line) for line in f"gpuguard: {text}".splitlines()]
    if again:
        rewrite(lines[0])
    else:
        write("\n".join(lines) + "\n")


def rewrite(line: str) -> None:
    """Write *line* over the last one of the terminal; an empty one clears it."""
    # With room for the ^C of a user who has waited long enough: on a second row it would keep the line there.
    try:
        columns = os.get_terminal_size(2).columns or 80
    except OSError:  # it was closed just now
        columns = 80
    write("\r\x1b[K" + shorten(line, columns - 1 - len("^C")))


def write(text: str) -> None:
    """To stderr, whatever has become of it: a job must not end because its log or its terminal is gone."""
    with suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def rewrites() -> bool:
    """Whether stderr is a terminal whose last line can be written anew: that of an editor cannot.

    Nor can it in the background, where that line is what the user types.
    """
    if not is_terminal() or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:  # not the terminal of this session: so without job control
        return True


def is_terminal() -> bool:
    """Whether stderr is read by a person right now."""
    return os.isatty(2)


_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


@contextmanager
def screen(*, alternate: bool = True, cursor: bool = False) -> Iterator[None]:
    """What is drawn again and again until Ctrl-C or SIGTERM: on the *alternate* screen, so that the shell's lines come
    back afterwards, and without a *cursor*.
    """
    former = signal.signal(signal.SIGTERM, end_on_signal)
    hide, show = ("", "") if cursor else ("\x1b[?25l", "\x1b[?25h")
    try:
        if alternate:
            sys.stdout.write(f"\x1b[?1049h{hide}")
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, former)
        if alternate:
            sys.stdout.write(f"{show}\x1b[?1049l")
            sys.stdout.flush()


def drawn(lines: Sequence[str]) -> str:
    """*lines* so that each overwrites what stood there."""
    return _HOME + "\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_REST


def fitting(lines: list[str], else_use: str) -> list[str]:
    """*lines* that fit on the terminal; those that do not are counted, and *else_use* says how to see them."""
    columns, rows = size()
    room = max(2, (rows or 24) - 1)
    if len(lines) <= room:
        return lines
    more = f"... {len(lines) - room + 1} more lines: enlarge the window, or {else_use}"
    return [*lines[: room - 1], shorten(more, columns or 80)]


def can_redraw(stream: TextIO) -> bool:
    """Whether *stream* is a terminal on which something can be drawn at a place: that of an editor is not."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def size() -> tuple[int | None, int | None]:
    """Columns and rows of the terminal; None and None for a pipe or a file."""
    try:
        terminal = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None, None
    return terminal.columns or 80, terminal.lines or 24


def end_on_signal(*_: object) -> NoReturn:
    """End as SIGTERM asks for, through the clauses that give the shell's screen back."""
    raise SystemExit(128 + 15)
