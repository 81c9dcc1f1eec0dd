"""Claim records: one small JSON file per claim that tells people who holds what and why.

The lock is the truth, the record is a comment: it counts only while it is itself locked (by the descriptors that the
job inherits, so it dies with the claim), its owner is the file's uid and never its content.  Unreadable means "claimed,
no details".

Behind the record of a living claim stand release requests, each a line of JSON, and what became of them.  Its owner and
root can write there, and a user who may look into the owner's processes; the kernel sees to that.  The claim has the
file open, so it reads what is meant for this very claim even when the path is gone, and nobody can plant or flood it.

    released    it is decided: the locks are being released, and every reader of this finishes what was begun
    yield       please release the devices, the job may live on       stop    please end the job
    refused     no, and why                                           ending  the job is being ended

Does not say which locks are held (see probe), and releases nothing (see claim and release).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.claims.directory import LockDirectory, is_same_file, try_flock
from gpuguard.errors import ClaimError, shortage
from gpuguard.files import create_file, open_regular, status_in_place, write_all
from gpuguard.jsonio import loads, sound_fields
from gpuguard.model import ClaimRecord
from gpuguard.units import local_time
from gpuguard.users import parties, user_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

MAX_BYTES = 4096
LARGEST = 2**50  # of a number in a record: a time, or the bytes of a device
MOST_OF_ONE = 500  # records of one user that are read: claims beyond them have no details
_FIELDS = ("devices", "pid", "since", "note", "command", "ends", "expected", "memory", "slots", "most")
_EXPECTED = b', "expected": '  # the last value of a record, behind which there is room for a time
_ROOM = b" " * 12

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)

RELEASED, YIELD, STOP, REFUSED, ENDING = "released", "yield", "stop", "refused", "ending"
_REQUESTS = frozenset({YIELD, STOP})
_WORDS = frozenset({RELEASED, YIELD, STOP, REFUSED, ENDING})
LONGEST = 400  # characters of a reason: there is one, and it is for people
READ_BYTES = 16_384  # from the end: a record has 4 KiB, a request less than 3
FULL_BYTES = 65_536


def record_path(directory: LockDirectory, uid: int, claim_id: str) -> str:
    """Where the record of a claim lies."""
    return f"{directory.records}/{directory.prefix}claim.{uid}.{claim_id}.json"


def unfinished_path(directory: LockDirectory) -> str:
    """Where a file is written that gets its name when it is whole.

    Random, because a user who knew it could make a file of that name just before, and keep the finished one away.
    """
    return f"{directory.records}/{directory.prefix}unfinished.{os.urandom(8).hex()}.new"


def write_record(directory: LockDirectory, content: Mapping[str, Any], owner: int | None = None) -> tuple[str, int]:
    """Write a record that lives as long as its descriptor, or a copy of it in a job, does.

    *content* has the id of the claim; *owner* is the uid for whom root writes it.  Returns the path of the record and
    its locked descriptor (close-on-exec).
    """
    path = record_path(directory, os.geteuid() if owner is None else owner, str(content["id"]))
    unfinished = unfinished_path(directory)
    descriptor = create_file(unfinished, owner=owner)
    try:
        try_flock(descriptor)
        write_all(descriptor, _encoded(content))
        try:
            os.rename(unfinished, path)  # readers see it whole, and already locked
        except IsADirectoryError:  # a directory that was put there makes way for it
            library = ctypes.CDLL(None, use_errno=True)
            names = (_AT_FDCWD, os.fsencode(unfinished), _AT_FDCWD, os.fsencode(path))
            if library.renameat2(*names, _RENAME_EXCHANGE):
                raise
    except BaseException:
        for name in (unfinished, path):  # an interruption may come when it has its name already
            if is_same_file(descriptor, name):
                os.unlink(name)
        os.close(descriptor)
        raise
    return path, descriptor


def _encoded(content: Mapping[str, Any]) -> bytes:
    content = dict(content)
    # The command line is the one part that may be long; the claim is worth more than its last arguments.
    while len(encoded := json.dumps({**content, "expected": None}).encode()) > MAX_BYTES - len(_ROOM):
        command, note = content.get("command") or (), content.get("note") or ""
        if command:
            content["command"] = [word[:200] for word in command[: len(command) // 2]]
        else:
            content["note"] = note[: len(note) // 2]
    return encoded[:-1] + _ROOM + b"}"


def write_expected(descriptor: int, when: float) -> None:
    """Write into a record, in place, as a job holds the file, when (unix time) its job should end."""
    record = os.pread(descriptor, MAX_BYTES, 0).partition(b"\n")[0]
    offset = record.rfind(_EXPECTED) + len(_EXPECTED)
    room = len(record) - len(b"}") - offset
    if _EXPECTED in record and len(text := b"%.3f" % when) <= room:
        os.pwrite(descriptor, text.ljust(room), offset)


def read_records(directory: LockDirectory) -> list[ClaimRecord]:
    """All records whose claim lives, oldest first; those of dead claims are removed where this user may."""
    start = f"{directory.prefix}claim."
    names = [name for name in directory.names() if name.startswith(start) and name.endswith(".json")]
    names, _ = first_of_each(directory, names, MOST_OF_ONE)
    records = [record for name in names if (record := _read_record(directory, name))]
    return sorted(records, key=lambda record: (record.since or 0, record.id))


def read_record(directory: LockDirectory, uid: int, claim_id: str) -> ClaimRecord | None:
    """The record of one living claim of one user; None when there is none."""
    if directory.is_missing():
        return None
    return _read_record(directory, record_path(directory, uid, claim_id).removeprefix(f"{directory.records}/"))


def first_of_each(directory: LockDirectory, names: list[str], most: int) -> tuple[list[str], dict[int, int]]:
    """Of each user's files the first *most*, and uid -> how many there are beyond; root's are not counted.

    Everybody reads them all, and any user can make any number.
    """
    if len(names) <= most:
        return names, {}
    files = []
    for name in names:
        try:
            status = status_in_place(f"{directory.records}/{name}")
        except OSError:
            continue  # it has just ended
        files.append((status.st_uid, status.st_ctime, name))
    whose = parties({uid for uid, _, _ in files})
    of_user: dict[int, list[tuple[float, str]]] = {}
    for uid, since, name in files:
        of_user.setdefault(whose[uid], []).append((since, name))
    beyond = {uid: len(own) - most for uid, own in of_user.items() if uid and len(own) > most}
    return [name for uid, own in of_user.items() for _, name in sorted(own)[: most if uid else None]], beyond


def _read_record(directory: LockDirectory, name: str) -> ClaimRecord | None:
    path = f"{directory.records}/{name}"
    try:
        descriptor, status = open_regular(path)
    except OSError as error:
        if shortage(error):  # it is not gone for that
            raise
        return None
    try:
        if try_flock(descriptor, fcntl.LOCK_SH):
            if os.geteuid() in (status.st_uid, 0) and is_same_file(descriptor, path):
                with suppress(OSError):  # another reader was quicker
                    os.unlink(path)
            return None
        key = name[len(f"{directory.prefix}claim.") : -len(".json")]
        # Else it has the name of another user's.  In a namespace of users all others look like one.
        if key.partition(".")[0] != str(status.st_uid) and status.st_uid != os.lstat(directory.records).st_uid:
            return None
        return _decoded(os.read(descriptor, MAX_BYTES + 1), status.st_uid, key)
    finally:
        os.close(descriptor)


def _decoded(encoded: bytes, uid: int, key: str) -> ClaimRecord:
    encoded = encoded.partition(b"\n")[0]  # behind it are release requests
    try:
        content = loads(encoded) if len(encoded) <= MAX_BYTES else None
    except ValueError:
        content = None
    fields = {
        name: value
        for name, value in sound_fields(ClaimRecord, content, _FIELDS).items()
        # Others calculate with it: an endless number would end the reader that subtracts it from a time.
        if not isinstance(value, int | float) or 0 <= value <= LARGEST
    }
    return ClaimRecord(**{"devices": (), **fields}, id=key.partition(".")[2], uid=uid, user=user_name(uid))


@dataclass(frozen=True)
class ReleaseRequest:
    """One line behind a record: a request, or the answer to one."""

    what: str  # RELEASED, YIELD, STOP, REFUSED or ENDING
    by: str  # who wrote it: "root", "alice", "the policy idle-claims"
    why: str = ""  # for people
    at: float = 0.0  # unix time

    def in_words(self) -> str:
        """``"by root at 15:04: others wait"``."""
        when = local_time(self.at, " at %H:%M") if self.at else ""
        return f"by {self.by}{when}" + (f": {self.why}" if self.why else "")


def write_request(descriptor: int, request: ReleaseRequest) -> None:
    """Write a request or an answer behind a record.

    Raises:
        ClaimError: it is full of them; a decision finds room, whatever its owner has written there.
        OSError: it cannot be written.
    """
    end = os.fstat(descriptor).st_size
    if end > FULL_BYTES and request.what == RELEASED:
        end = MAX_BYTES  # of the record itself
        os.ftruncate(descriptor, end)
    if end > FULL_BYTES:
        raise ClaimError("the record of this claim is full of release requests: end its processes instead.")
    content = {
        "what": request.what,
        "by": request.by[:LONGEST],
        "why": request.why[:LONGEST],
        "at_unix_seconds": round(request.at or time.time(), 3),
    }
    line = b"\n" + json.dumps(content).encode("ascii") + b"\n"
    if os.pwrite(descriptor, line, end) < len(line):
        raise OSError(errno.ENOSPC, "no space left for a release request")


def read_requests(descriptor: int) -> tuple[ReleaseRequest, ...]:
    """What stands behind a record, oldest first; a line that cannot be read counts for nothing."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, READ_BYTES, max(0, size - READ_BYTES))
    lines = tail.split(b"\n")[1:]  # the first one is the record, or a piece of a request
    return tuple(request for line in lines if line and (request := _decode_request(line)))


def released_by(descriptor: int) -> ReleaseRequest | None:
    """The decision that this claim is released, if there is one."""
    try:
        return next((request for request in read_requests(descriptor) if request.what == RELEASED), None)
    except OSError:
        return None  # the program has closed our descriptor


def pending_request(descriptor: int) -> ReleaseRequest | None:
    """The last request, if it was not answered yet."""
    try:
        requests = read_requests(descriptor)
    except OSError:
        return None
    return requests[-1] if requests and requests[-1].what in _REQUESTS else None


def _decode_request(line: bytes) -> ReleaseRequest | None:
    try:
        content = loads(line)
    except ValueError:
        return None
    if isinstance(content, dict):
        content["at"] = content.get("at_unix_seconds")
    fields = sound_fields(ReleaseRequest, content, ("what", "by", "why", "at"))
    if fields.get("what") not in _WORDS:
        return None
    at = fields.get("at", 0.0)
    return ReleaseRequest(
        fields["what"],
        by=fields.get("by", "")[:LONGEST],
        why=fields.get("why", "")[:LONGEST],
        at=float(at) if 0 <= at < 2**40 else 0.0,
    )
