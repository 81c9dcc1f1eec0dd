"""The one way to ask the daemon: requests go to its socket, and its replies come back decoded.

A reply counts only if the kernel says that the process which listens there is the daemon.  requests has what the
daemon does with a request; server listens.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from gpuguard.claims.directory import LockDirectory, daemon_files, last_about
from gpuguard.errors import GpuguardError
from gpuguard.files import close_all, closed_after
from gpuguard.jsonio import decode, loads
from gpuguard.locale import N_, _, translated
from gpuguard.locale.messages import Sentence, dumps, sentence

SOCKET_NAME = "daemon.sock"
MAX_REQUEST_BYTES = 4096  # including the end of the line
MAX_REPLY_BYTES = 2**17
MAX_DESCRIPTORS = 64  # of one reply
SO_PASSRIGHTS = 83  # since Linux 6.16; the number of asm-generic, as on every machine that NVIDIA has drivers for
REPLY_SECONDS = 10.0
CLOCK_TICK = 0.02  # seconds by which the time of a file may be behind the clock
_ROOM = socket.CMSG_LEN(MAX_DESCRIPTORS * struct.calcsize("i"))  # for the descriptors that come with a reply
_ADVICE = N_("An administrator starts one: see `gpuguard daemon --help`.")

_Reply = TypeVar("_Reply")


class NoDaemonSocket(GpuguardError):
    """No daemon answers."""


class DaemonBusy(GpuguardError):
    """The daemon hung up: it has too many requests."""


@dataclass(frozen=True)
class ExemptionReply:
    """The reply to `keep`."""

    until_unix_seconds: float
    user: str | None
    device: str | None


@dataclass(frozen=True)
class EndedReply:
    """The reply to `end`: how many exemptions were ended."""

    ended: int


@dataclass(frozen=True)
class PolicyStatusReply:
    """One finding of a policy, and the steps that were taken and are to come."""

    policy: str
    kind: str
    user: str | None
    pid: int | None
    claim: str | None
    device: str | None
    since_unix_seconds: float
    last: str | None
    next: str | None
    next_unix_seconds: float | None
    enforce: bool
    refused: str | None = None
    harm: str | None = None
    harm_unix_seconds: float | None = None
    device_label: str | None = None
    rule: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class StatusReply:
    """The reply to `status`."""

    enforcing: bool
    standing: tuple[PolicyStatusReply, ...]
    left_out: int
    trouble: str | None = None  # why the daemon does not serve its metrics
    unguarded: str | None = None  # what the policy file says but the daemon does not do


@dataclass(frozen=True)
class EventRow:
    """A line of the daemon's log about the user who asks, without its facts about other users."""

    time_unix_seconds: float
    kind: str
    outcome: str
    facts: dict[str, float | str | None]
    user: str | None = None
    devices: tuple[str, ...] = ()
    pid: int | None = None
    claim: str | None = None
    message: str | None = None
    exact_outcome: str | None = None  # set where `outcome` is a word for jobs from before an upgrade

    def for_older_jobs(self) -> EventRow:
        """Return the event in words that `gpuguard run` also reports if its job began before this version."""
        word = _OLDER_WORDS.get((self.kind, self.outcome))
        if word is None:
            return self
        # Such jobs take the text behind the last colon of a failed warning for the reason, and leave it out.
        message = self.message
        if self.outcome == "logged":
            message = sentence("because", "{what}: {why}", what=str(message), why="logged")
        return replace(self, outcome=word, message=message, exact_outcome=self.outcome)

    def line(self) -> dict[str, Any]:
        """Return the event as a line of the audit log."""
        line = {"schema": 1, **asdict(self)}
        exact, message = line.pop("exact_outcome"), self.message
        if exact:
            line["outcome"] = exact
        if exact == "logged" and message is not None:
            without = message.values.get("what") if isinstance(message, Sentence) else None
            line["message"] = without or message.removesuffix(": logged")
        return line


# Jobs run for weeks, and the program that tells their users about policies is as old as they are.  These are the words
# that it knows in place of new ones.
_OLDER_WORDS = {("warn", "logged"): "failed", ("warn", "undelivered"): "failed", ("resume", "done"): "about to"}


@dataclass(frozen=True)
class EventsReply:
    """The reply to `events`: the newest events, the oldest of them first."""

    events: tuple[EventRow, ...]


@dataclass(frozen=True)
class ReloadReply:
    """The reply to `reload`."""

    path: str
    policies: int
    faults: int
    first: str | None


@dataclass(frozen=True)
class GrantReply:
    """The reply to `claim`: the id of the claim and the names of its locks."""

    claim: str
    locks: tuple[str, ...]


def query_daemon(
    directory: LockDirectory, request: Mapping[str, Any], kind: type[_Reply], seconds: float = REPLY_SECONDS
) -> _Reply:
    """Send *request* to the daemon of *directory* and return its reply, which must be a *kind*.

    Raises:
        GpuguardError: there is no daemon, it does not answer within *seconds*, or it refuses.
    """
    content, descriptors = exchange(directory, request, seconds)
    close_all(descriptors)
    return decoded(content, kind)


def own_events(directory: LockDirectory, since: float, seconds: float = 2.0) -> list[dict[str, Any]]:
    """Return what the daemon of *directory* logged about this user after *since* (unix time), as audit log lines.

    The daemon is asked only if there is something.  Raises GpuguardError: it does not answer within *seconds*.
    """
    last = last_about(directory, os.geteuid())
    if last is None or last < since - CLOCK_TICK:
        return []
    # All jobs of a user may ask at once.
    reply = retried(partial(query_daemon, directory, {"do": "events"}, EventsReply, seconds), seconds)
    return [row.line() for row in reply.events if row.time_unix_seconds >= since]


def retried(ask: Callable[[], _Reply], seconds: float) -> _Reply:
    """Return what *ask* returns; call it again for at most so many *seconds* while the daemon is busy."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while True:
        try:
            return ask()
        except DaemonBusy:
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause * (1 + os.urandom(1)[0] / 255))  # those that are refused together come back one by one
        pause = min(2 * pause, 0.5)


def exchange(
    directory: LockDirectory, request: Mapping[str, Any], seconds: float = REPLY_SECONDS
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the reply as it came, with its descriptors, which are close-on-exec and become the caller's.

    It raises what query_daemon() raises.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connect(connection, directory, seconds)
            files = daemon_files(directory)
            if directory.owner is None or peer_uid(connection) not in files.owners():
                raise GpuguardError(
                    _("{file} is not that of the daemon.  Look at it with `ls -l`.").format(
                        file=files.file(SOCKET_NAME)
                    )
                )
            connection.sendall(encoded(request))
            line, descriptors = _receive(connection)
    except TimeoutError as error:
        raise NoDaemonSocket(
            _("no daemon answers in {path} in time.  Try again; `gpuguard doctor` looks at the machine.").format(
                path=directory.path
            )
        ) from error
    except (ConnectionResetError, BrokenPipeError) as error:
        raise _busy(directory) from error
    except OSError as error:
        raise NoDaemonSocket(
            _("no daemon answers in {path} ({strerror}).  {advice}").format(
                path=directory.path, strerror=error.strerror, advice=_(_ADVICE)
            )
        ) from error
    try:
        return _accepted(directory, line), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def decoded(content: Mapping[str, Any], kind: type[_Reply]) -> _Reply:
    """Decode *content* as a *kind*; raise a GpuguardError if a field is missing, as in a reply of another version."""
    try:
        return decode(kind, dict(content))
    except ValueError as error:
        raise GpuguardError(
            _(
                "the daemon gave an answer that cannot be understood: {error}.  Restart it: it may be of "
                "another version."
            ).format(error=error)
        ) from None


def connect(connection: socket.socket, directory: LockDirectory, seconds: float) -> None:
    """Connect to the daemon's socket, waiting while its backlog is full; raise an OSError if it cannot be reached."""
    deadline = time.monotonic() + seconds
    with short_path(directory) as path:
        while True:
            try:
                connection.connect(path)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(0.01)


def encoded(content: Mapping[str, Any]) -> bytes:
    """Encode *content* as one line of JSON."""
    return dumps(content) + b"\n"


def peer_uid(connection: socket.socket) -> int:
    """Return the uid at the other end, as the kernel gives it."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


@contextmanager
def short_path(directory: LockDirectory) -> Iterator[str]:
    """Yield the socket's path through a descriptor of its directory, because the kernel takes at most 107 bytes."""
    with closed_after(os.open(daemon_files(directory).path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"


def _receive(connection: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """Receive one line and the descriptors that came with it."""
    line, descriptors = b"", list[int]()
    with ExitStack() as stack:
        stack.callback(close_all, descriptors)
        while not line.endswith(b"\n") and len(line) <= MAX_REPLY_BYTES:
            # They are close-on-exec from the start, because another thread may start a program at any moment.  For
            # that reason socket.recv_fds() will not do: it drops its flags.
            more, attached, _, _ = connection.recvmsg(65536, _ROOM, socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in attached:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += [number for (number,) in struct.iter_unpack("i", content)]
            if not more:
                break
            line += more
        stack.pop_all()
    return line, tuple(descriptors)


def _accepted(directory: LockDirectory, line: bytes) -> dict[str, Any]:
    """Return the fields of a reply, or raise a GpuguardError if it is a refusal."""
    try:
        reply = loads(line)
    except ValueError as error:  # the daemon hung up
        raise _busy(directory) from error
    reply = reply if isinstance(reply, dict) else {}
    if reply.pop("ok", None) is not True:
        unclear = _("the daemon gave an answer that cannot be understood.")
        told = reply.get("error")
        raise GpuguardError(translated(told) if isinstance(told, str) and told else unclear)
    return reply


def _busy(directory: LockDirectory) -> DaemonBusy:
    return DaemonBusy(_("the daemon in {path} is busy.  Try again.").format(path=directory.path))
