"""The audit log: one JSON object per line, appended whole, readable by its owner alone.

It lies in $GPUGUARD_EVENTS, else $XDG_STATE_HOME/gpuguard/events.jsonl, else ~/.local/state/gpuguard/events.jsonl.
Does not decide what is worth a line, and never fails: whoever must not act unrecorded looks at what append() returns.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuguard.model import Event

MACHINE_EVENTS = "/var/log/gpuguard/events.jsonl"  # of the daemon that root started
ROTATE_BYTES = 10 * 2**20  # about 30,000 lines; one older file is kept beside it as events.jsonl.1

MOST_BYTES = 4 * ROTATE_BYTES  # of a log that cannot be set aside: then there is no further line

_reason = ""  # why a line could not be written
_stuck = False  # it is known, and said, that the log cannot be set aside


def append(event: Event) -> bool:
    """Write *event* behind the others; False when it could not be written down."""
    path = events_path()
    try:
        descriptor = _open(path)
    except OSError as error:
        _remember(error)
        return False
    try:
        if os.fstat(descriptor).st_size >= MOST_BYTES:
            _rotate(path, descriptor)
        line = _line(event)
        # One write of one line: O_APPEND keeps the lines of several processes apart.
        written = os.write(descriptor, line)
        if written < len(line):  # the disk is full: end the torn line, so that the next one can be read
            os.write(descriptor, b"\n")
            _remember(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        _try_to_rotate(path, descriptor, event)
        return written == len(line)
    except OSError as error:
        _remember(error)
        return False
    finally:
        os.close(descriptor)


def complaint() -> str:
    """Which log could not be written when append() said False the last time, and why."""
    return f"{events_path()}{_reason and f': {_reason}'}"


def _remember(error: OSError) -> None:
    global _reason
    _reason = error.strerror or str(error)


def events_path() -> str:
    """Where the lines of this user go."""
    named = os.environ.get("GPUGUARD_EVENTS")
    if named:
        return named
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "gpuguard", "events.jsonl")


def _open(path: str) -> int:
    # O_NONBLOCK: a FIFO in that place must not hang the job that is being started.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    # The directory may be that of the daemon's user, or of any other one, who may not steer what root writes.
    careful = os.geteuid() == 0 and _others_may_write(os.path.dirname(path) or ".")
    flags |= os.O_NOFOLLOW if careful else 0
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        if path.startswith("~"):  # of a uid without a name or HOME; who removes a directory ~ means another one
            raise OSError(errno.ENOENT, "nobody knows where your home directory is; set HOME") from None
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        return _made(path, flags)
    except OSError as error:
        if careful and error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link in a directory where others may write") from None
        raise
    if careful and os.fstat(descriptor).st_nlink != 1:
        os.close(descriptor)
        raise OSError(f"{path} is also another file")
    return descriptor


def _others_may_write(directory: str) -> bool:
    """Whether anybody but root can have made a file there, or will make the directory that is missing."""
    try:
        found = os.stat(directory)
    except FileNotFoundError:
        return True
    return found.st_uid != 0 or bool(found.st_mode & 0o022)


def _made(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # somebody else was quicker
        return os.open(path, flags)
    if os.geteuid() == 0 and path == MACHINE_EVENTS:
        # It is the daemon's: a log that root made would keep it from writing, and so from doing anything.
        owner = os.stat(os.path.dirname(path))
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    return descriptor


def _line(event: Event) -> bytes:
    import json

    # `time` is the one field of an Event whose name does not say its unit.
    facts = {"time_unix_seconds": event.time} | {name: value for name, value in vars(event).items() if name != "time"}
    known = {name: value for name, value in facts.items() if value not in (None, ())}
    if event.facts:
        known["facts"] = {name: value for name, value in event.facts if value is not None}
    # A lone surrogate (a file name that is no UTF-8) is written as \udcXX by json's ASCII output.
    return json.dumps({"schema": 1} | known, separators=(", ", ": ")).encode("ascii") + b"\n"


def _try_to_rotate(path: str, descriptor: int, event: Event) -> None:
    """As _rotate(); where that fails the line stands all the same, and it is tried again behind the next one."""
    global _stuck
    try:
        _rotate(path, descriptor)
        _stuck = False
    except OSError as error:
        if not _stuck:
            why = f"{path} cannot be renamed: {error.strerror}.  At {MOST_BYTES >> 20} MiB nothing more is written"
            os.write(descriptor, _line(type(event)(event.time, "log", "not set aside", message=why)))
        _stuck = True


def _rotate(path: str, descriptor: int) -> None:
    """Rename a file that has grown too large; of several processes that see it, the one with its lock does it."""
    seen = os.fstat(descriptor)
    if seen.st_size < ROTATE_BYTES or not stat.S_ISREG(seen.st_mode):
        return
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    try:
        now = os.lstat(path)
    except FileNotFoundError:  # somebody else was quicker
        return
    if (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino):
        os.rename(path, f"{path}.1")
