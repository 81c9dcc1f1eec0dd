"""Tickets of the queue: one small file per request that waits, locked by the process that waits, so they end together.

Beside each ticket lies its *waker*, a FIFO into which any user may write a byte: "check again, you may start".  The
owner and the arrival of a ticket come from the file system, never from its content.  A ticket that cannot be decoded
does not count and is reported.  This module does not decide which requests start: see priority and backfill.

    ticket.UID.ID.json  bell.UID.ID     the ticket and the waker of a user who waits
    served.UID                          its time says when a request of that user last started although others waited
    daemon/served.UID                   the time when the daemon saw that, where users may be hostile; the later counts
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import stat
import struct
import termios
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from gpuguard.claims.directory import (
    LockDirectory,
    daemon_files,
    is_same_file,
    is_unlocked,
    remove_if_same,
    try_flock,
    written_at,
)
from gpuguard.claims.records import files_by_user, first_of_each, is_id, unfinished_path
from gpuguard.claims.restrictions import SET_BACK, read_restrictions
from gpuguard.device_state import grouped
from gpuguard.errors import ClaimError, InvalidRequest, shortage
from gpuguard.files import (
    UntrustedFile,
    closed_after,
    create_file,
    open_in_place,
    open_or_create,
    open_regular,
    status_in_place,
    write_all,
)
from gpuguard.jsonio import decode, loads, sound_fields
from gpuguard.locale import _
from gpuguard.locale.messages import dumps, plain, sentence
from gpuguard.queue.priority import PRIORITIES, Ticket
from gpuguard.request import ANY_MEMORY, Request
from gpuguard.users import user_name

T = TypeVar("T")

MAX_BYTES = 8192
MOST_ALTERNATIVES = 4  # of one request
MOST_MODELS = 16  # globs of one request, each of which is compared with the names of all devices
MOST_UNREAD = 4  # bytes in a waker
MOST_OF_ONE = 32  # alternatives of all tickets of one user: so many are read and planned, the oldest tickets first
MOST_OF_SET_BACK = 4  # alternatives of all tickets of a user who is set back
MOST_OPENED = 256  # files of one user, among them those of tickets that wait for --after or have ended
MOST_WANTED = 1024  # GPUs of one ticket: it may claim to want any number, and sums of these are kept
LONGEST_SECONDS = 10 * 365 * 86400.0
LAST_TIME = 2.0**40  # unix time
CLOCK_SECONDS = 0.02  # by which the time of a file may be behind the clock
LONGEST_FAULT = 175  # characters of a parser's complaint
LONGEST_WORD, MOST_WORDS = 200, 20  # characters of a text or of a word of a command, for people; words of a command
# The text that `run --after` writes.  Any other text comes from a user, and is shown in quotes.
_AFTER = re.compile(r"waits until (process \d{1,7}|\S{1,64}'s claim [\w.-]{1,40}) has ended", re.ASCII)


@dataclass(frozen=True)
class IgnoredFile:
    """A ticket that does not count, and why."""

    uid: int
    id: str
    reason: str
    unread: tuple[tuple[float, str], ...] = ()  # the files for which it stands: when they were written, and names


@dataclass(frozen=True)
class _TicketContent:
    """The content of a ticket beside its requests."""

    priority: int = 0
    time_limit_seconds: float | None = None
    expected_seconds: float | None = None
    promise_unix_seconds: float | None = None
    pid: int | None = None
    # Texts for people: if one of them is malformed, the ticket counts without it.
    after: str | None = None
    note: str | None = None
    command: tuple[str, ...] | None = None


class OwnTicket:
    """A ticket of this process, until withdraw() or the end of the process; *content* comes from ticket_content().

    Raises:
        OSError: the ticket cannot be written; nothing of it is left.
    """

    def __init__(self, directory: LockDirectory, content: Mapping[str, Any]) -> None:
        # It has the uid, because otherwise a user could make a ticket with the number of another user's.  It has the
        # pid, so that the leader of the queue can be found, however many tickets there are.
        self.id = f"{os.geteuid()}.{os.urandom(4).hex()}p{os.getpid()}"
        self._ticket, self._bell = (_path(directory, kind, self.id) for kind in ("ticket", "bell"))
        self._descriptor = self.waker = -1
        unfinished = ticket, waker = unfinished_path(directory), unfinished_path(directory)
        encoded = dumps(content)
        try:
            os.mkfifo(waker, 0o600)
            self.waker = os.open(waker, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.fchmod(self.waker, 0o622)
            if len(encoded) > MAX_BYTES:
                raise InvalidRequest(_("the request is too long to wait with: name fewer GPUs or models."))
            self._descriptor = create_file(ticket)
            try_flock(self._descriptor)
            write_all(self._descriptor, encoded)
            os.rename(waker, self._bell)
            os.rename(ticket, self._ticket)  # others see it whole, and already locked
        except BaseException:
            for path in unfinished:
                with suppress(OSError):
                    os.unlink(path)
            self.withdraw()
            raise

    @property
    def counts(self) -> bool:
        """Whether others can see the ticket: a clean-up of old files may have removed it."""
        files = (self._descriptor, self._ticket), (self.waker, self._bell)
        return all(is_same_file(descriptor, path, unsure=True) for descriptor, path in files)

    def send_heartbeat(self) -> None:
        """Send a sign of life, see last_heartbeat()."""
        with suppress(OSError):
            os.utime(self.waker)

    def drain(self) -> bytes:
        """Return the bytes that were written into the waker since the last call."""
        try:
            return os.read(self.waker, 65536)
        except BlockingIOError:
            return b""

    def withdraw(self) -> None:
        """Remove the ticket.  It can be called again, also after it was interrupted."""
        descriptors = (self._descriptor, self.waker)
        for path, descriptor in zip((self._ticket, self._bell), descriptors, strict=True):
            if descriptor >= 0:
                remove_if_same(descriptor, path)
        self._descriptor = self.waker = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)


def new_ticket(requests: Sequence[Request], *, command: Sequence[str] = (), **fields: Any) -> Ticket:
    """Return a ticket of this process that has no file yet, and so no position; *fields* are further ones of Ticket."""
    uid = os.geteuid()
    facts = {"id": "", "uid": uid, "user": user_name(uid), "since": time.time(), "pid": os.getpid(), **fields}
    return Ticket(requests=tuple(requests), command=tuple(command), **facts)


def ticket_content(ticket: Ticket) -> dict[str, Any]:
    """Return the content of a ticket's file."""
    return {
        "schema": 1,
        "pid": ticket.pid,
        "requests": [as_json(request) for request in ticket.requests],
        "priority": ticket.priority,
        "time_limit_seconds": ticket.time_limit,
        "expected_seconds": ticket.expected,
        "promise_unix_seconds": ticket.promise,
        "after": ticket.after,
        "note": ticket.note and ticket.note[:LONGEST_WORD],
        "command": _brief(ticket.command) if ticket.command else None,
    }


def _brief(command: Sequence[str]) -> tuple[str, ...]:
    return tuple(word[:LONGEST_WORD] for word in command[:MOST_WORDS])


def as_json(request: Request) -> dict[str, Any]:
    """Return the conditions of a request as a ticket has them."""
    if len(request.models) > MOST_MODELS:
        raise InvalidRequest(
            _("--model: at most {most} names; a glob as 'A100*' stands for several.").format(most=MOST_MODELS)
        )
    blank = vars(Request())
    facts = {name: value for name, value in vars(request).items() if value != blank[name]}
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in facts.items()}


def as_request(content: Mapping[str, Any]) -> Request:
    """Return the request with these conditions.

    Raises:
        ValueError: something in it is no condition; InvalidRequest is a ValueError.
    """
    if content.get("tolerance") == 2**63:  # as version 0.1 writes ANY_MEMORY, to a daemon that was upgraded
        content = {**content, "tolerance": ANY_MEMORY}
    request = decode(Request, content, exact=True)
    if len(request.models) > MOST_MODELS:
        raise ValueError(sentence("queue.too_many_models", "it names too many models"))
    for uid in request.mine_as_free:
        checked_number(uid, 0, 2**32)
    return request


def checked_number(value: T, least: float, most: float) -> T:
    """Return *value* if it is None or between *least* and *most*; raise ValueError otherwise."""
    number: Any = value
    if number is not None and not least <= number <= most:
        raise ValueError(sentence("queue.no_number", "a number or a time in it is none"))
    return value


def record_start(directory: LockDirectory, uid: int, *, by_daemon: bool = False) -> None:
    """Record that a request of *uid* started now although others wait: see priority.order."""
    path = daemon_files(directory).file(f"served.{uid}") if by_daemon else _path(directory, "served", str(uid))
    touch(path)


def has_started(directory: LockDirectory, uid: int, since: float) -> bool:
    """Return whether a process of *uid* has recorded a start after *since* (unix time): see record_start().

    It is also True if the process could not, because another user has made the file.
    """
    with suppress(OSError):
        status = status_in_place(_path(directory, "served", str(uid)))
        return status.st_uid != uid or status.st_mtime >= since - CLOCK_SECONDS
    return False


def touch(path: str, owner: int | None = None) -> bool:
    """Set the time of the file to now, making it if needed; return whether that worked and the file is *owner*'s."""
    with suppress(OSError), closed_after(open_or_create(path, os.O_RDONLY | os.O_NONBLOCK, 0o644)) as descriptor:
        if owner in (None, os.fstat(descriptor).st_uid):
            os.utime(descriptor)
            return True
    return False


def last_started(directory: LockDirectory, uid: int) -> float | None:
    """Return the unix time at which a request of *uid* last started, or None if that is unknown."""
    times = [written_at(_path(directory, "served", str(uid)), (uid,))]
    if directory.keeper is not None:  # the user's own file could be removed or backdated
        files = daemon_files(directory)
        times.append(written_at(files.file(f"served.{uid}"), files.owners()))
    return max(filter(None, times), default=None)


def read_tickets(directory: LockDirectory) -> tuple[list[Ticket], list[IgnoredFile]]:
    """Read the tickets that are planned, in no order, and the others: these do not count, or wait for older ones.

    Any user can make any number of tickets.  So only the oldest ones of each user are opened, and the rest have to wait
    until those have started: they cost no other user anything.  Files of ended processes are removed where permitted.
    """
    is_set_back = read_restrictions(directory, SET_BACK, time.time()) if directory.keeper is not None else {}
    tickets: list[Ticket] = []
    ignored: list[IgnoredFile] = []
    for owner, files in files_by_user(directory, _is_finished(directory, "ticket")).items():
        room = math.inf if owner == 0 else MOST_OF_SET_BACK if str(owner) in is_set_back else MOST_OF_ONE
        opened, own = 0, list[Ticket]()
        for _since, name in files:
            if room <= 0 or (owner and opened >= MOST_OPENED):
                break
            opened += 1
            document = _read_file(directory, "ticket", name, _read_ticket)
            if isinstance(document, Ticket):
                own.append(replace(document, owner_uid=owner))
                # A ticket that is not queued yet holds back no other ticket of its user.
                room -= len(document.requests) if document.after is None else 0
            elif document is not None:
                ignored.append(document)
        last = max(filter(None, (last_started(directory, uid) for uid in {ticket.uid for ticket in own})), default=None)
        tickets += [replace(ticket, served=last) for ticket in own]
        if unread := tuple(files[opened:]):
            ignored.append(_left_out(owner, len(unread), len(own), unread))
    return tickets, ignored


def tickets_of_process(directory: LockDirectory, pid: int) -> list[Ticket]:
    """Return the tickets of a process from their names alone, so without requests; an earlier version's are missing."""
    try:
        start, end = f"{directory.prefix}ticket.{os.stat(f'/proc/{pid}').st_uid}.", f"p{pid}.json"
    except OSError:
        return []
    names = [name for name in directory.names() if name.startswith(start) and name.endswith(end)]
    return [_unread_ticket(directory, int(start.split(".")[-2]), 0.0, name) for name in names]


def _unread_ticket(directory: LockDirectory, uid: int, since: float, name: str) -> Ticket:
    ticket_id = name[len(f"{directory.prefix}ticket.") : -len(".json")]
    pid = ticket_id.rpartition("p")[2]
    return Ticket(ticket_id, uid, user_name(uid), since, (), pid=int(pid) if pid.isdecimal() else None)


def read_ticket(directory: LockDirectory, uid: int, ticket_id: str) -> Ticket | None:
    """Return the ticket of *uid* with this id, or None if it is no id, there is none, or its process has ended."""
    owner, _dot, number = ticket_id.partition(".")
    if owner != str(uid) or not is_id(number):
        return None
    name = os.path.basename(_path(directory, "ticket", ticket_id))
    document = _read_file(directory, "ticket", name, _read_ticket)
    return document if isinstance(document, Ticket) and document.uid == uid else None


def ticket_path(directory: LockDirectory, ticket_id: str) -> str:
    """Return the path of the ticket with this id."""
    return _path(directory, "ticket", ticket_id)


def _left_out(uid: int, count: int, before: int, unread: tuple[tuple[float, str], ...] = ()) -> IgnoredFile:
    return IgnoredFile(
        uid,
        sentence("queue.more", "{count} more", count=count),
        sentence("queue.before_them", "{user} has {most} before them", user=user_name(uid), most=before),
        unread,
    )


def _is_finished(directory: LockDirectory, kind: str) -> Callable[[str], bool]:
    """Return a function that says whether a name is that of a finished file of this kind."""
    start = f"{directory.prefix}{kind}."
    return lambda name: name.startswith(start) and name.endswith(".json")


def read_documents(
    directory: LockDirectory,
    kind: str,
    names: Iterable[str],
    most: int,
    read: Callable[[LockDirectory, int, str], T | IgnoredFile | None],
) -> tuple[list[T], list[IgnoredFile]]:
    """Call *read* with a descriptor and its UID.ID, for each user's first *most* files of a kind.

    Returns:
        The results, and the files that are ignored.

    Raises:
        OSError: a file cannot be opened now.  That says nothing about the file, and ignoring it would pass its owner.
    """
    first, beyond = first_of_each(directory, [*filter(_is_finished(directory, kind), names)], most)
    ignored = [_left_out(uid, count, most) for uid, count in beyond.items()]
    documents: list[T] = []
    for name in first:
        document = _read_file(directory, kind, name, read)
        if isinstance(document, IgnoredFile):
            ignored.append(document)
        elif document is not None:
            documents.append(document)
    return documents, ignored


def _read_file(
    directory: LockDirectory,
    kind: str,
    name: str,
    read: Callable[[LockDirectory, int, str], T | IgnoredFile | None],
) -> T | IgnoredFile | None:
    """Return the result of *read* for one file, or None if it has just ended.  Raises OSError as read_documents()."""
    key = name[len(f"{directory.prefix}{kind}.") : -len(".json")]
    try:
        descriptor, _status = open_regular(f"{directory.records}/{name}")
    except UntrustedFile as error:
        return IgnoredFile(error.uid, key[:80], str(error.strerror))
    except FileNotFoundError:
        return None
    except OSError as error:
        if shortage(error):
            raise
        text = sentence("queue.not_read", "it cannot be read: {strerror}", strerror=str(error.strerror))
        return IgnoredFile(-1, key[:80], text)
    with closed_after(descriptor):
        return read(directory, descriptor, key)


def read_document(
    descriptor: int, name: str, shown: str, most_bytes: int, parse: Callable[[dict[str, Any], os.stat_result], T]
) -> T | IgnoredFile:
    """Return the result of *parse*, which raises ValueError, for the JSON in a file of at most *most_bytes*.

    *name* is the UID.ID in the name of the file; *shown* is its name for people if it cannot be understood.
    """
    status = os.fstat(descriptor)
    uid, _dot, number = name.partition(".")
    if uid != str(status.st_uid) or not is_id(number):
        text = sentence("queue.not_its_name", "its name is not that of its owner")
        return IgnoredFile(status.st_uid, name[:80], text)
    try:
        encoded = os.read(descriptor, most_bytes + 1)
        if len(encoded) > most_bytes:
            raise ValueError(sentence("queue.too_long", "it is too long"))
        content = loads(encoded)
        if not isinstance(content, dict):
            raise ValueError(sentence("queue.no_object", "it is no object"))
        return parse(content, status)
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        fault = str(error)
        fault = fault[:LONGEST_FAULT] if len(fault) > LONGEST_FAULT else fault  # a slice is no sentence
        text = sentence("queue.not_understood", "it cannot be understood: {error}", error=fault)
        return IgnoredFile(status.st_uid, shown, text)


def _read_ticket(directory: LockDirectory, descriptor: int, ticket_id: str) -> Ticket | IgnoredFile | None:
    if not is_unlocked(descriptor):
        return read_document(descriptor, ticket_id, ticket_id, MAX_BYTES, partial(_ticket_of, ticket_id=ticket_id))
    # Its process has ended.
    uid, number = os.fstat(descriptor).st_uid, ticket_id.partition(".")[2]
    if os.geteuid() in (uid, 0) and is_id(number):
        path, waker = (_path(directory, *words) for words in (("ticket", ticket_id), ("bell", f"{uid}.{number}")))
        remove_if_same(descriptor, path)
        with suppress(OSError):
            if stat.S_ISFIFO(status_in_place(waker).st_mode):
                os.unlink(waker)
    return None


def _ticket_of(content: dict[str, Any], status: os.stat_result, ticket_id: str) -> Ticket:
    told, content = content.get("after"), plain(content)  # a user's words are no sentences
    requests = content["requests"]
    if not isinstance(requests, list) or not 1 <= len(requests) <= MOST_ALTERNATIVES:
        raise ValueError(sentence("queue.no_request", "it asks for nothing, or for too much"))
    texts = sound_fields(_TicketContent, content, ("after", "note", "command"))
    fields = decode(_TicketContent, {**content, "after": None, "note": None, "command": None, **texts})
    return Ticket(
        id=ticket_id,
        uid=status.st_uid,
        user=user_name(status.st_uid),
        # The inode's change time cannot be backdated, and a ticket that is changed loses its position.
        since=status.st_ctime,
        requests=tuple(as_request(request) for request in requests),
        priority=checked_number(fields.priority, min(PRIORITIES.values()), max(PRIORITIES.values())),
        time_limit=_seconds(fields.time_limit_seconds),
        expected=_seconds(fields.expected_seconds),
        promise=_seconds(fields.promise_unix_seconds, LAST_TIME),
        after=fields.after and _after(str(told)),
        pid=checked_number(fields.pid, 1, 2**22),
        note=fields.note and fields.note[:LONGEST_WORD],
        command=fields.command and _brief(fields.command),
    )


def _after(text: str) -> str:
    """Return what `run --after` writes as a sentence, made anew: a user may have written its message."""
    if not _AFTER.fullmatch(text):
        return f'"{text[:LONGEST_WORD]}"'
    values = {"pid": "", "user": "", "id": "", **plain(getattr(text, "values", {}))}
    ours = (
        sentence("queue.after_process", "waits until process {pid} has ended", pid=values["pid"]),
        sentence(
            "queue.after_claim", "waits until {user}'s claim {id} has ended", user=values["user"], id=values["id"]
        ),
    )
    return next((own for own in ours if own == text), str(plain(text)))


def _seconds(value: float | None, most: float = LONGEST_SECONDS) -> float | None:
    return None if value is None else float(checked_number(value, 0, most))


def waiting_tickets(directory: LockDirectory) -> tuple[Ticket, ...] | None:
    """Return all tickets in no order, some without their requests, or None if the queue cannot be read."""
    try:
        tickets, ignored = read_tickets(directory)
    except (ClaimError, OSError):
        return None
    return (*tickets, *(_unread_ticket(directory, file.uid, *unread) for file in ignored for unread in file.unread))


def wanted(waiting: Iterable[Ticket] | None) -> dict[int, int] | None:
    """Return uid -> GPUs that all requests of that user ask for, at least one each, or None if *waiting* is unknown."""
    if waiting is None:
        return None
    gpus = grouped((ticket.uid, ticket.num_gpus if ticket.requests else 1) for ticket in waiting)
    return {uid: sum(min(max(0, number), MOST_WANTED) for number in numbers) for uid, numbers in gpus.items()}


def wake(directory: LockDirectory, tickets: Collection[Ticket], message: bytes) -> None:
    """Wake the processes of *tickets*; *message* is one byte that says why."""
    for ticket in tickets:
        with suppress(OSError), _opened_waker(directory, ticket) as waker:  # or it has ended
            # A process that has unread bytes will check anyway, and the last of them says since when it has not read.
            if _unread(waker) < MOST_UNREAD:
                os.write(waker, message)


def unread_since(directory: LockDirectory, ticket: Ticket) -> float:
    """Return the unix time since which a waker has unread bytes: inf if all were read, -inf if there is no reader."""
    try:
        with _opened_waker(directory, ticket) as waker:
            return os.fstat(waker).st_mtime if _unread(waker) else math.inf
    except OSError as error:
        return math.inf if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) else -math.inf


def last_heartbeat(directory: LockDirectory, ticket: Ticket) -> float:
    """Return the unix time of the last sign of life of the ticket's process, or -inf without a waker.

    A byte that is written into the waker counts as one.
    """
    try:
        return status_in_place(_path(directory, "bell", ticket.id)).st_mtime
    except OSError:
        return -math.inf


@contextmanager
def _opened_waker(directory: LockDirectory, ticket: Ticket) -> Iterator[int]:
    """Open a ticket's waker for writing, because only its owner can open it for reading.

    Raises:
        OSError: it has no reader, or is not the owner's.
    """
    path = _path(directory, "bell", ticket.id)
    with closed_after(open_in_place(path, os.O_WRONLY | os.O_NONBLOCK)) as waker:
        status = os.fstat(waker)
        if not stat.S_ISFIFO(status.st_mode) or status.st_uid != ticket.uid:
            raise OSError(errno.EINVAL, "the waker is not the owner's", path)
        yield waker


def _unread(waker: int) -> int:
    """Return how many bytes are unread."""
    count: int = struct.unpack("i", fcntl.ioctl(waker, termios.FIONREAD, bytes(4)))[0]
    return count


def _path(directory: LockDirectory, kind: str, name: str) -> str:
    extension = ".json" if kind == "ticket" else ""
    return f"{directory.records}/{directory.prefix}{kind}.{name}{extension}"
