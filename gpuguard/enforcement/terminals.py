"""Writes to the terminal of a process, like write(1).  Never waits for it, and never writes to another user's."""

from __future__ import annotations

import os
import stat

from gpuguard.locale.messages import sentence
from gpuguard.sanitize import neutralise

WRITTEN = "written"
NO_TERMINAL = sentence("terminal.none", "no terminal")
NOT_THE_OWNERS = sentence("terminal.of_another_user", "the terminal belongs to another user")
TERMINAL_REFUSED = sentence("terminal.refused", "the terminal takes no messages")
FULL = sentence("terminal.full", "the terminal does not read")

MOST_LINES = 20
_PSEUDO_TERMINALS = range(136, 144)  # major numbers of /dev/pts/N


def write_to_terminal(terminal: int, uid: int, text: str, *, last: bool = False, place: str = "/dev/pts") -> str:
    """Write *text* to a pseudo-terminal, if it belongs to *uid* and takes messages, without ever waiting for it.

    Args:
        terminal: its device number, as in /proc/PID/stat; its node lies in *place*.
        uid: the user to whom it must belong.
        text: lines; every character in them that is not plainly visible is written out.
        last: whether this is the last notice before something is taken away: `mesg n` does not hold it up.

    Returns:
        "written", or the reason why not.
    """
    if os.major(terminal) not in _PSEUDO_TERMINALS:
        return NO_TERMINAL
    number = (os.major(terminal) - _PSEUDO_TERMINALS[0]) * 256 + os.minor(terminal)
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(f"{place}/{number}", flags)
    except PermissionError:
        return TERMINAL_REFUSED  # `mesg n`, which only root can override
    except OSError:
        return NO_TERMINAL
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISCHR(seen.st_mode) or seen.st_rdev != terminal:
            return NO_TERMINAL
        if seen.st_uid != uid:
            return NOT_THE_OWNERS  # a container numbers its terminals anew, so this is another one
        if not (last or seen.st_mode & stat.S_IWGRP):
            return TERMINAL_REFUSED
        lines = [neutralise(line) for line in text.rstrip().splitlines()[:MOST_LINES]]
        os.write(descriptor, "\r\n".join(["", *lines, ""]).encode())  # neutralise leaves nothing that has no bytes
        return WRITTEN
    except OSError:
        return FULL
    finally:
        os.close(descriptor)
