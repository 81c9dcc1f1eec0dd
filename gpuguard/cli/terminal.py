"""Notices on stderr, and the screen of a command that draws again and again."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from gpuguard.locale import _
from gpuguard.sanitize import neutralise
from gpuguard.tables import shorten
from gpuguard.views.text import put

WRITE_SECONDS = 1.0  # how long to wait for a slow reader of stderr

unread: deque[str] = deque(maxlen=100)  # the texts that write() has left for later


def print_notice(text: str, *, again: bool = False) -> None:
    """Write *text* to stderr; with *again*, on one line of the terminal, which the next notice overwrites."""
    lines = [neutralise(line) for line in f"gpuguard: {text}".splitlines()]
    if again:
        rewrite(lines[0])
    else:
        write("\n".join(lines) + "\n")


def rewrite(line: str) -> None:
    """Write *line* over the last line of the terminal; an empty one clears it."""
    # Leave room for the ^C of a user who has waited long enough: if it wrapped, it would keep the line on the screen.
    write("\r\x1b[K" + shorten(line, (width(2) or 80) - 1 - len("^C")))


def write(text: str, seconds: float = WRITE_SECONDS) -> None:
    """Write *text* to stderr, whatever has become of it: a job must not end because its log or its terminal is gone.

    Nor may the job outlive its limits because its reader stands still (Ctrl-S, a pager), so text that is not read
    within *seconds* comes with the next text.
    """
    unread.append(text)
    write_rest(seconds)
    if unread and not text.endswith("\n"):
        unread.pop()


def write_rest(seconds: float | None = None) -> None:
    """Write the texts that are left, if they begin to be read within *seconds*; None: however long it takes."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with suppress(OSError, IndexError):  # IndexError: another thread has written it
        while unread and poll.poll(None if seconds is None else seconds * 1000):
            print(unread.popleft(), end="", file=sys.stderr, flush=True)


def rewrites() -> bool:
    """Whether stderr is a terminal whose last line can be rewritten, which an editor's cannot.

    Nor can it from the background, because there the user is typing on that line.
    """
    if not is_terminal() or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:  # it is not this session's terminal, so there is no job control
        return True


def is_terminal() -> bool:
    """Whether a person reads stderr right now."""
    return os.isatty(2)


@contextmanager
def screen(*, alternate: bool = True) -> Iterator[None]:
    """Let the block draw again and again until Ctrl-C or SIGTERM.

    On the *alternate* screen there is no cursor, and the shell's lines come back afterwards.
    """
    former = signal.signal(signal.SIGTERM, end_on_signal)
    try:
        if alternate:
            sys.stdout.write("\x1b[?1049h\x1b[?25l")
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, former)
        if alternate:
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()


def end_on_signal(*_: object) -> NoReturn:
    """End as SIGTERM asks, through the clauses that restore the shell's screen."""
    raise SystemExit(128 + signal.SIGTERM)


def draw(lines: Sequence[str]) -> None:
    """Write *lines* on the screen so that each overwrites what stood there."""
    put(["\x1b[H" + "\n".join(line + "\x1b[K" for line in lines) + "\x1b[J"])


def fitting(lines: list[str], else_use: str) -> list[str]:
    """Return the *lines* that fit on the terminal; the others are counted, and *else_use* says how to see them."""
    columns, rows = size()
    room = max(2, (rows or 24) - 1)
    if len(lines) <= room:
        return lines
    more = _("... {lines} more lines: enlarge the window, or {else_use}").format(
        lines=len(lines) - room + 1, else_use=else_use
    )
    return [*lines[: room - 1], shorten(more, columns or 80)]


def can_redraw() -> bool:
    """Whether stdout is a terminal on which anything can be drawn at any place, which an editor's is not."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def writes_braille() -> bool:
    """Whether stdout can encode more than ASCII."""
    try:
        "⠿│°".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def size(descriptor: int = 1) -> tuple[int | None, int | None]:
    """Return columns and rows of the terminal, or (None, None) for a pipe or a file."""
    try:
        terminal = os.get_terminal_size(descriptor)
    except OSError:
        return None, None
    return terminal.columns or 80, terminal.lines or 24


def width(descriptor: int = 1) -> int | None:
    """Return the columns of the terminal, or None for a pipe or a file."""
    return size(descriptor)[0]
