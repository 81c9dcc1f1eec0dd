"""The audit log: one JSON object per line, appended whole or not at all, for its owner alone; and its only reader.

It lies in $GPUGUARD_EVENTS, else $XDG_STATE_HOME/gpuguard/events.jsonl, else ~/.local/state/gpuguard/events.jsonl.
This module does not decide which events are worth a line.  Writing never raises, so a caller that must not act
unrecorded checks what append() returns.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, BinaryIO

from gpuguard.files import closed_after, open_file, open_named
from gpuguard.jsonio import loads
from gpuguard.locale import _
from gpuguard.locale.messages import dumps, sentence
from gpuguard.model import Event
from gpuguard.users import user_name

MACHINE_EVENTS = "/var/log/gpuguard/events.jsonl"  # of the daemon that root started
ROTATE_BYTES = 10 * 2**20  # about 30,000 lines; the older file is kept beside it as events.jsonl.1
MOST_OLDER = 1000  # files: 10 GB
MAX_BYTES = 4 * ROTATE_BYTES  # of a log that cannot be set aside: beyond them no line is written

_keep_seconds: float | None = None  # for which still older files are kept, as .2, .3, ..., or None to keep none
_reason = ""  # why a line could not be written
_stuck = False  # whether the log cannot be set aside, which was reported

Line = Mapping[str, Any]  # an event as it is decoded


def keep_older(seconds: float | None) -> None:
    """From now on, keep the files that this process sets aside until *seconds* after their last line."""
    global _keep_seconds
    _keep_seconds = seconds


def append(event: Event) -> bool:
    """Write *event* at the end of the log, and return whether it could be written."""
    global _reason
    try:
        _append(event)
    except OSError as error:
        _reason = error.strerror or str(error)
        return False
    return True


def _append(event: Event) -> None:
    path = events_path()
    with closed_after(_open(path)) as descriptor:
        if os.fstat(descriptor).st_size >= MAX_BYTES:
            _rotate(path, descriptor)
        line = _encoded(event)
        # One write of one line: O_APPEND keeps the lines of several processes apart.
        written = os.write(descriptor, line)
        if written < len(line):  # the disk is full: take the piece back, or the next line would be a part of it
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if os.fstat(descriptor).st_size == end:
                os.ftruncate(descriptor, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _try_to_rotate(path, descriptor, event)


def complaint() -> str:
    """Return which log could not be written when append() last returned False, and why."""
    return f"{events_path()}{_reason and f': {_reason}'}"


def events_path() -> str:
    """Return the path of the log that the lines of this user go to."""
    named = os.environ.get("GPUGUARD_EVENTS")
    if named:
        return named
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "gpuguard", "events.jsonl")


def _open(path: str) -> int:
    # O_NONBLOCK, because a FIFO in that place must not hang the job that is being started.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return open_named(path, flags)
    except FileNotFoundError:
        # The uid has no name or HOME.  A directory named ~ is not made: a user who removes `~` removes another one.
        if path.startswith("~"):
            raise OSError(errno.ENOENT, _("your home directory is unknown; set HOME")) from None
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        return _create(path, flags)


def _create(path: str, flags: int) -> int:
    try:
        descriptor = open_named(path, flags | os.O_CREAT | os.O_EXCL)
    except FileExistsError:  # another process was quicker
        return open_named(path, flags)
    if os.geteuid() == 0 and path == MACHINE_EVENTS:
        # The log is the daemon's: one that root made would keep the daemon from writing, and so from doing anything.
        owner = os.stat(os.path.dirname(path))
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    return descriptor


def _encoded(event: Event) -> bytes:
    known = {name: value for name, value in line_of(event).items() if value not in (None, [], {})}
    # A lone surrogate (a file name that is no UTF-8) is written as \udcXX by json's ASCII output.
    return dumps(known) + b"\n"


def _try_to_rotate(path: str, descriptor: int, event: Event) -> None:
    """Rotate the log as _rotate() does.  If that fails, the line stands all the same, and the next one tries again."""
    global _stuck
    try:
        _rotate(path, descriptor)
        _stuck = False
    except OSError as error:
        if not _stuck:
            why = sentence(
                "log.not_set_aside",
                "{path} cannot be renamed: {error}.  At {size} MiB nothing more is written",
                path=path,
                error=str(error.strerror),
                size=MAX_BYTES >> 20,
            )
            os.write(descriptor, _encoded(Event(time=event.time, kind="log", outcome="not set aside", message=why)))
        _stuck = True


def _rotate(path: str, descriptor: int) -> None:
    """Rename a file that has grown too large.  Of several processes that find it, the one with its lock does so."""
    status = os.fstat(descriptor)
    if status.st_size < ROTATE_BYTES or not stat.S_ISREG(status.st_mode):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        current = os.lstat(path)
    except (BlockingIOError, FileNotFoundError):  # another process is doing it, or was quicker
        return
    if os.path.samestat(current, status):
        if _keep_seconds is not None:
            _move_older(path, time.time() - _keep_seconds)
        os.rename(path, f"{path}.1")


def _move_older(path: str, begin: float) -> None:
    """Give each older file the next number, the oldest first; remove those whose last line is from before *begin*."""
    for number, name in reversed(older_files(path).items()):
        if number >= MOST_OLDER or os.lstat(name).st_mtime < begin:
            os.unlink(name)
        else:
            os.rename(name, f"{path}.{number + 1}")


def older_files(path: str) -> dict[int, str]:
    """Return the files beside the log at *path* that were set aside, by their numbers, the newest first."""
    ends = {name: name.removeprefix(f"{path}.") for name in glob.glob(f"{glob.escape(path)}.*")}
    return dict(sorted((int(end), name) for name, end in ends.items() if re.fullmatch(r"[1-9][0-9]{0,4}", end)))


def read_log(path: str, most: int | None = None) -> Iterator[bytes]:
    """Yield the newest lines of the log at *path*, those of the rotated file beside it first, each with its line end.

    Args:
        path: of the log; one that does not exist has no lines.
        most: bytes that are read at most, or None to read all.

    Raises:
        OSError: it cannot be read, or is no ordinary file.
    """
    with ExitStack() as stack:
        opened = (_open_for_reading(name) for name in (f"{path}.1", path))
        files = [stack.enter_context(file) for file in opened if file is not None]
        sizes = [os.fstat(file.fileno()).st_size for file in files]
        skipped = 0 if most is None else max(0, sum(sizes) - most)
        for file, size in zip(files, sizes, strict=True):
            if skipped < size:
                if skipped:
                    file.seek(skipped - 1)
                    file.readline()  # skip all before the first whole line
                yield from file
            skipped = max(0, skipped - size)


class LogFollower:
    """A reader of the log at *path* that follows it while other processes write and rotate it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._position, self._inode = 0, 0

    def older(self) -> list[bytes]:
        """Return the lines of the files that were set aside, the oldest first.

        Raises:
            OSError: one of them cannot be read, or is no ordinary file.
        """
        found: list[bytes] = []
        for name in reversed(older_files(self.path).values()):
            with _open_for_reading(name) or nullcontext(()) as lines:
                found += lines
        return found

    def newer(self) -> list[bytes]:
        """Return the whole lines that came since the last call, at first all.

        A line that is still being written is left for the next call.

        Raises:
            OSError: there is no log, or it cannot be read, or is no ordinary file.
        """
        lines: list[bytes] = []
        with ExitStack() as stack:
            opened = (_open_for_reading(path) for path in (self.path, f"{self.path}.1"))
            file, rotated = (stack.enter_context(file) if file else None for file in opened)
            if not (file or rotated):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
            if rotated and os.fstat(rotated.fileno()).st_ino == self._inode:
                lines += self._rest_of(rotated)
            if file:  # after a rotation there is none until the next line
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._position:
                    self._position, self._inode = 0, status.st_ino
                lines += self._rest_of(file)
        return lines

    def _rest_of(self, file: BinaryIO) -> list[bytes]:
        file.seek(self._position)
        # Only whole lines count, because a piece of a line after them may be taken back.
        *lines, rest = (more := file.read()).split(b"\n")
        self._position += len(more) - len(rest)
        return lines


def _open_for_reading(path: str) -> BinaryIO | None:
    try:
        return open_file(path)
    except FileNotFoundError:
        return None


def decoded(lines: Iterable[bytes]) -> tuple[list[Line], int]:
    """Return the events of a log, and how many of its lines are none: torn by a full disk, or from something else."""
    events: list[Line] = []
    torn = 0
    for encoded in filter(None, map(bytes.strip, lines)):
        content = None
        with suppress(ValueError):
            content = loads(encoded)
        if isinstance(content, dict) and content.get("schema") == 1 and is_number(content.get("time_unix_seconds")):
            # A job writes down $LOGNAME, which any user can set.  So the name is taken from its uid.
            uid = facts_of(content).get("uid")
            name = user_name(uid) if type(uid) is int else None
            events.append(content if name in (None, str(uid)) else {**content, "user": name})
        else:
            torn += 1
    return events, torn


def line_of(event: Event) -> Line:
    """Return *event* in the form in which a line of the log is decoded."""
    return {
        "schema": 1,
        "time_unix_seconds": event.time,  # the one field whose name does not say its unit
        **{name: value for name, value in vars(event).items() if name not in ("time", "recorded")},
        "outcome": event.outcome if event.recorded else f"{event.outcome} (not recorded)",
        "devices": list(event.devices),
        "facts": {name: value for name, value in event.facts if value is not None},
    }


def facts_of(line: Line) -> Mapping[str, Any]:
    """Return the further facts of an event."""
    facts = line.get("facts")
    return facts if isinstance(facts, Mapping) else {}


def uids_of(line: Line) -> frozenset[int]:
    """Return the uids of the users that an event of the daemon is about."""
    uid, others = facts_of(line).get("uid"), facts_of(line).get("uids")
    uids = [uid, *map(int, filter(str.isdecimal, others.split() if isinstance(others, str) else ()))]
    return frozenset(uid for uid in uids if type(uid) is int)


def devices_of(line: Line) -> list[str]:
    """Return the uuids of the devices that an event is about."""
    devices = line.get("devices")
    return [uuid for uuid in devices if isinstance(uuid, str)] if isinstance(devices, list) else []


def is_number(value: object) -> bool:
    """Return whether *value* is a number that can be shown, also as a time."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**40
