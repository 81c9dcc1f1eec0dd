"""Tickets of the queue: one small file per request that waits, locked by the process that waits, so they end together.

Beside each lies its *bell*, a FIFO into which any user may write a byte: "check again, you may start".  That is all
that it can do.  The owner and the arrival of a ticket come from the file system, never from its content; one that
cannot be decoded does not count and is reported.  Does not decide who starts: see priority and backfill.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
import struct
import termios
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gpuguard.claims.directory import LockDirectory, daemon_files, is_same_file, try_flock
from gpuguard.claims.records import first_of_each, unfinished_path
from gpuguard.errors import ClaimError, InvalidRequest, shortage
from gpuguard.files import (
    UntrustedFile,
    create_file,
    open_in_place,
    open_or_create,
    open_regular,
    status_in_place,
    write_all,
)
from gpuguard.jsonio import loads
from gpuguard.queue.priority import PRIORITIES, Ticket
from gpuguard.request import Request
from gpuguard.users import parties, user_name

# When a request of a user last started: while requests of theirs start, none of them is overdue.
#
#     served.UID           of that user, who could also remove or backdate it
#     daemon/served.UID    of the daemon, where it gives the locks, because users may be hostile there
#
# The later one counts.  Which tickets are overdue: see priority.


def note(directory: LockDirectory, uid: int, *, by_daemon: bool = False) -> None:
    """Record that a request of *uid* started now, although others wait."""
    path = daemon_files(directory).file(f"served.{uid}") if by_daemon else _own(directory, uid)
    with suppress(OSError):
        mark = open_or_create(path, os.O_WRONLY | os.O_NONBLOCK, 0o644)
        try:
            os.utime(mark)
        finally:
            os.close(mark)


def last_served(directory: LockDirectory, uid: int) -> float | None:
    """When that was, unix time; None: unknown."""
    places: list[tuple[str, tuple[int, ...]]] = [(_own(directory, uid), (uid,))]
    if directory.keeper is not None:
        files = daemon_files(directory)
        places.append((files.file(f"served.{uid}"), files.owners()))
    times = []
    for path, owners in places:
        with suppress(OSError):
            status = status_in_place(path)
            times += [status.st_mtime] if status.st_uid in owners else []
    return max(times, default=None)


def _own(directory: LockDirectory, uid: int) -> str:
    return f"{directory.records}/{directory.prefix}served.{uid}"


MAX_BYTES = 8192
MOST_ALTERNATIVES = 4  # alternatives of one request
MOST_MODELS = 16  # globs of one request, each of which is compared with the names of all devices
MOST_UNHEARD = 4
MOST_OF_ONE = 1000  # tickets of one user; more of them are left out
MOST_WANTED = 1024  # GPUs: a ticket may say what it likes, and sums of it are kept
LONGEST_SECONDS = 10 * 365 * 86400.0

_TUPLES = frozenset({"devices", "models", "exclude", "prefer", "within"})
_WHOLE = frozenset({"num_gpus", "max_gpus", "min_free", "min_total", "max_processes", "tolerance", "memory", "slots"})
_NUMBERS = frozenset({"min_free_fraction", "max_util", "max_memory_util", "max_temperature"})
_WORDS = frozenset({"strategy", "within_reason", "mig"})


@dataclass(frozen=True)
class IgnoredFile:
    """A ticket that does not count, and why."""

    uid: int
    id: str
    reason: str


class OwnTicket:
    """A ticket of this process, until leave() or the end of the process.

    Args:
        directory: of the claims.
        content: of the ticket, see ticket_content().

    Raises:
        OSError: it cannot be written; then nothing of it is left.
    """

    def __init__(self, directory: LockDirectory, content: Mapping[str, Any]) -> None:
        # With the uid: else a user could make a ticket with the number of another user's.
        self.id = f"{os.geteuid()}.{os.urandom(4).hex()}"
        self._ticket, self._bell = (_path(directory, kind, self.id) for kind in ("ticket", "bell"))
        self._descriptor = self.waker = -1
        unfinished = ticket, waker = unfinished_path(directory), unfinished_path(directory)
        try:
            self.waker = _new_waker(waker)
            os.fchmod(self.waker, 0o622)
            self._write(ticket, json.dumps(dict(content)).encode())
            os.rename(waker, self._bell)
            os.rename(ticket, self._ticket)  # others see it whole, and already locked
        except BaseException:
            for path in unfinished:
                with suppress(OSError):
                    os.unlink(path)
            self.leave()
            raise

    def _write(self, path: str, encoded: bytes) -> None:
        if len(encoded) > MAX_BYTES:
            raise InvalidRequest("the request is too long to wait with: name fewer devices or models.")
        self._descriptor = create_file(path)
        try_flock(self._descriptor)
        write_all(self._descriptor, encoded)

    @property
    def counts(self) -> bool:
        """Whether others can see it: a clean-up of old files may have removed it."""
        places = (self._descriptor, self._ticket), (self.waker, self._bell)
        return all(is_same_file(*place, unsure=True) for place in places)

    def send_heartbeat(self) -> None:
        """Give a sign of life, see last_sign()."""
        with suppress(OSError):
            os.utime(self.waker)

    def drain(self) -> bytes:
        """The bytes that were written into the bell since the last time."""
        try:
            return os.read(self.waker, 65536)
        except BlockingIOError:
            return b""

    def leave(self) -> None:
        """Wait no longer.  Idempotent, also after it was interrupted."""
        for path, descriptor in ((self._ticket, self._descriptor), (self._bell, self.waker)):
            with suppress(OSError):
                if descriptor >= 0 and is_same_file(descriptor, path):
                    os.unlink(path)
        ours, self._descriptor, self.waker = (self._descriptor, self.waker), -1, -1
        for descriptor in ours:
            with suppress(OSError):
                if descriptor >= 0:
                    os.close(descriptor)


def _new_waker(path: str) -> int:
    os.mkfifo(path, 0o600)
    try:
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except BaseException:
        os.unlink(path)
        raise


def ticket_content(ticket: Ticket) -> dict[str, Any]:
    """What is written into the file of a ticket."""
    return {
        "schema": 1,
        "pid": ticket.pid,
        "requests": [as_json(request) for request in ticket.requests],
        "priority": ticket.priority,
        "time_limit_seconds": ticket.time_limit,
        "expected_seconds": ticket.expected,
        "promise_unix_seconds": ticket.promise,
        "after": ticket.after,
        "note": ticket.note and ticket.note[:200],
        "command": [word[:200] for word in ticket.command[:20]] if ticket.command else None,
    }


def as_json(request: Request) -> dict[str, Any]:
    """The conditions of a request, as they stand in a ticket."""
    if len(request.models) > MOST_MODELS:
        raise InvalidRequest(f"--model: at most {MOST_MODELS} names; a glob as 'A100*' stands for several.")
    blank = vars(Request())
    facts = {name: value for name, value in vars(request).items() if value != blank[name]}
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in facts.items()}


def write_served(directory: LockDirectory) -> None:
    """Record that a request of this user started now, although others wait: see priority.overdue."""
    note(directory, os.geteuid())


def read_tickets(directory: LockDirectory) -> tuple[list[Ticket], list[IgnoredFile]]:
    """All tickets, in no order, and those that do not count; files of ended processes are removed where permitted."""
    start = f"{directory.prefix}ticket."
    tickets: list[Ticket] = []
    there = [each for each in directory.names() if each.startswith(start) and each.endswith(".json")]
    names, ignored = first_of_each_user(directory, there, MOST_OF_ONE)
    for name in names:
        found = _read(directory, name, name[len(start) : -len(".json")])
        if isinstance(found, Ticket):
            tickets.append(found)
        elif found:
            ignored.append(found)
    owner = parties({ticket.uid for ticket in tickets})
    last: dict[int, float | None] = {}
    for uid, owner_uid in owner.items():
        last[owner_uid] = max(filter(None, (last.get(owner_uid), last_served(directory, uid))), default=None)
    return [replace(one, owner_uid=(owner_uid := owner[one.uid]), served=last[owner_uid]) for one in tickets], ignored


def first_of_each_user(directory: LockDirectory, names: list[str], most: int) -> tuple[list[str], list[IgnoredFile]]:
    """Of each user's files the first *most*, and a line about the others."""
    names, beyond = first_of_each(directory, names, most)
    return names, [
        IgnoredFile(uid, f"{n} more", f"{user_name(uid)} has {most} before them") for uid, n in beyond.items()
    ]


def opened(path: str, place: str) -> int | IgnoredFile | None:
    """A descriptor of the ordinary file at *path*, which is called *place* where it does not count; None: it is gone.

    Raises:
        OSError: none can be opened now, which says nothing of the file: its owner would be passed over.
    """
    try:
        return open_regular(path)[0]
    except UntrustedFile as error:
        return IgnoredFile(error.uid, place[:80], str(error.strerror))
    except OSError as error:
        if shortage(error):
            raise
        return (
            None if error.errno == errno.ENOENT else IgnoredFile(-1, place[:80], f"it cannot be read: {error.strerror}")
        )


def waiting_tickets(directory: LockDirectory) -> tuple[Ticket, ...] | None:
    """All tickets, in no order; None: the queue cannot be read."""
    try:
        return tuple(read_tickets(directory)[0])
    except (ClaimError, OSError):
        return None


def wanted(waiting: Iterable[Ticket] | None) -> dict[int, int] | None:
    """uid -> GPUs that all requests of that user ask for; None: unknown."""
    if waiting is None:
        return None
    found: dict[int, int] = {}
    for ticket in waiting:
        found[ticket.uid] = found.get(ticket.uid, 0) + min(max(0, ticket.num_gpus), MOST_WANTED)
    return found


def _read(directory: LockDirectory, name: str, place: str) -> Ticket | IgnoredFile | None:
    path = f"{directory.records}/{name}"
    descriptor = opened(path, place)
    if not isinstance(descriptor, int):
        return descriptor
    try:
        status = os.fstat(descriptor)
        uid, _, number = place.partition(".")
        if try_flock(descriptor, fcntl.LOCK_SH):
            _remove_dead(directory, path, descriptor, status.st_uid, number)
            return None
        if uid != str(status.st_uid) or not number.isalnum():
            return IgnoredFile(status.st_uid, place[:80], "its name is not that of its owner")
        return _decoded(os.read(descriptor, MAX_BYTES + 1), status, place)
    finally:
        os.close(descriptor)


def _remove_dead(directory: LockDirectory, path: str, descriptor: int, uid: int, number: str) -> None:
    if os.geteuid() not in (uid, 0) or not number.isalnum():
        return
    with suppress(OSError):
        if is_same_file(descriptor, path):
            os.unlink(path)
        waker = _path(directory, "bell", f"{uid}.{number}")
        if stat.S_ISFIFO(status_in_place(waker).st_mode):
            os.unlink(waker)


def _decoded(encoded: bytes, status: os.stat_result, ticket_id: str) -> Ticket | IgnoredFile:
    try:
        if len(encoded) > MAX_BYTES:
            raise ValueError("it is too long")
        content = loads(encoded)
        command = content.get("command")
        requests = content["requests"]
        if not isinstance(requests, list) or not 1 <= len(requests) <= MOST_ALTERNATIVES:
            raise ValueError("it asks for nothing, or for too much")
        return Ticket(
            id=ticket_id,
            uid=status.st_uid,
            user=user_name(status.st_uid),
            # Of the inode: it cannot be backdated, and a ticket that is changed loses its position.
            since=status.st_ctime,
            requests=tuple(as_request(each) for each in requests),
            priority=whole(content.get("priority", 0), min(PRIORITIES.values()), max(PRIORITIES.values())),
            time_limit=_seconds(content.get("time_limit_seconds")),
            expected=_seconds(content.get("expected_seconds")),
            promise=_seconds(content.get("promise_unix_seconds"), 2.0**40),
            after=_text(content.get("after")),
            pid=None if content.get("pid") is None else whole(content["pid"], 1, 2**22),
            note=_text(content.get("note")),
            command=tuple(_text(word) or "" for word in command) if isinstance(command, list) else None,
        )
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        return IgnoredFile(status.st_uid, ticket_id, f"it cannot be understood: {error}"[:200])


def as_request(content: Mapping[str, Any]) -> Request:
    """The request with these conditions.

    Raises:
        ValueError: there is something that is none; InvalidRequest is one.
    """
    facts: dict[str, Any] = {}
    for name, value in content.items():
        if name in _TUPLES:
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise ValueError(f"{name} is no list of names")
            facts[name] = tuple(value)
            if name == "models" and len(value) > MOST_MODELS:
                raise ValueError("it names too many models")
        elif name in _WHOLE:
            facts[name] = whole(value, -(2**63), 2**63)
        elif name in _NUMBERS:
            facts[name] = _number(value)
        elif (name in _WORDS and isinstance(value, str)) or (name == "share" and isinstance(value, bool)):
            facts[name] = value
        elif name == "mine_as_free" and isinstance(value, list):
            facts[name] = frozenset(whole(each, 0, 2**32) for each in value)
        else:
            raise ValueError(f"{name[:40]} is no condition of a request")
    return Request(**facts)


def whole(value: object, least: int, most: int) -> int:
    """*value* if it is such a number; else a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError("a number in it is none")
    return value


def _number(value: object) -> float:
    # Nor is an integer that no float can be: of those it would be an OverflowError.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 2.0**63:
        raise ValueError("a number in it is none")
    return float(value)


def _seconds(value: object, most: float = LONGEST_SECONDS) -> float | None:
    if value is None:
        return None
    seconds = _number(value)
    if not 0 <= seconds <= most:
        raise ValueError("a time in it is none")
    return seconds


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def wake(directory: LockDirectory, tickets: Collection[Ticket], sound: bytes) -> None:
    """Wake some of those who wait; *sound* is one byte and says what for."""
    for ticket in tickets:
        with suppress(OSError):  # he has gone
            waker = _open_waker(directory, ticket)
            try:
                # A process that has not read these will check anyway, and the last of them says since when it has not.
                if _unheard(waker) < MOST_UNHEARD:
                    os.write(waker, sound)
            finally:
                os.close(waker)


def unread_since(directory: LockDirectory, ticket: Ticket) -> float:
    """Since when a bell has unread bytes, unix time; inf: all were read, -inf: there is no reader."""
    try:
        waker = _open_waker(directory, ticket)
        try:
            return os.fstat(waker).st_mtime if _unheard(waker) else math.inf
        finally:
            os.close(waker)
    except OSError as error:
        return math.inf if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) else -math.inf


def last_heartbeat(directory: LockDirectory, ticket: Ticket) -> float:
    """When its owner last gave a sign of life, or the bell was written to: unix time, -inf without a bell."""
    try:
        return status_in_place(_path(directory, "bell", ticket.id)).st_mtime
    except OSError:
        return -math.inf


def _open_waker(directory: LockDirectory, ticket: Ticket) -> int:
    """For writing: only its owner can open it for reading.  OSError: it has no reader, or is not the owner's."""
    path = _path(directory, "bell", ticket.id)
    waker = open_in_place(path, os.O_WRONLY | os.O_NONBLOCK)
    status = os.fstat(waker)
    if stat.S_ISFIFO(status.st_mode) and status.st_uid == ticket.uid:
        return waker
    os.close(waker)
    raise OSError(errno.EINVAL, "the bell is not the owner's", path)


def _unheard(waker: int) -> int:
    """How many bytes are unread."""
    count: int = struct.unpack("i", fcntl.ioctl(waker, termios.FIONREAD, bytes(4)))[0]
    return count


def _path(directory: LockDirectory, kind: str, ticket_id: str) -> str:
    extension = ".json" if kind == "ticket" else ""
    return f"{directory.records}/{directory.prefix}{kind}.{ticket_id}{extension}"
