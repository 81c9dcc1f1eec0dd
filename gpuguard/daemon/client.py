"""Asking the daemon for something: its door seen from outside.

The answer counts only if whoever listens there is the daemon, as the kernel says.  Knows nothing of what is asked for:
see verbs.  Does not listen: see door.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpuguard.claims.directory import LockDirectory, daemon_files
from gpuguard.errors import GpuguardError
from gpuguard.jsonio import decode, loads

NAME = "daemon.sock"
LARGEST = 4096  # bytes of a request, with the end of the line
LARGEST_ANSWER = 2**17
PASS_RIGHTS = 83  # SO_PASSRIGHTS of Linux 6.16, asm-generic: every machine that NVIDIA has drivers for
MOST_DESCRIPTORS = 64  # that come with one answer
ADVICE = "An administrator starts one: see `gpuguard daemon --help`."


class NoDaemonSocket(GpuguardError):
    """Nobody answers at the daemon's door."""


class DaemonBusy(GpuguardError):
    """The daemon hung up: too many ask at once."""


def call_daemon(directory: LockDirectory, request: Mapping[str, Any], seconds: float = 10.0) -> dict[str, Any]:
    """What the daemon of *directory* answers.

    Raises:
        GpuguardError: there is none, it does not answer within *seconds*, or it says no.
    """
    answer, descriptors = call(directory, request, seconds)
    for descriptor in descriptors:
        os.close(descriptor)
    return answer


def call(
    directory: LockDirectory, request: Mapping[str, Any], seconds: float = 10.0
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The same, with the descriptors that came with the answer; they are the caller's, and close-on-exec."""
    nobody = f"no daemon answers in {directory.path}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            _connect(connection, directory, time.monotonic() + seconds)
            files = daemon_files(directory)
            if directory.owner is None or uid_behind(connection) not in files.owners():
                raise GpuguardError(f"{files.file(NAME)} is not that of the daemon.  Look at it with `ls -l`.")
            connection.sendall(encoded(request))
            line, descriptors = _received(connection)
    except TimeoutError as error:
        raise NoDaemonSocket(f"{nobody} in time.  Try again; `gpuguard doctor` looks at the machine.") from error
    except (ConnectionResetError, BrokenPipeError) as error:
        raise DaemonBusy(f"the daemon in {directory.path} is busy.  Try again.") from error
    except OSError as error:
        raise NoDaemonSocket(f"{nobody} ({error.strerror}).  {ADVICE}") from error
    try:
        return _understood(directory, line), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _received(connection: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """One line and what came with it."""
    line, descriptors = b"", list[int]()
    try:
        while not line.endswith(b"\n") and len(line) <= LARGEST_ANSWER:
            # Close-on-exec from the start: another thread may start a program at any moment.
            more, came, _, _ = socket.recv_fds(connection, 65536, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            descriptors += came
            if not more:
                break
            line += more
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return line, tuple(descriptors)


def _understood(directory: LockDirectory, line: bytes) -> dict[str, Any]:
    try:
        answer = loads(line)
    except ValueError as error:  # it hung up
        raise DaemonBusy(f"the daemon in {directory.path} is busy.  Try again.") from error
    if not isinstance(answer, dict) or answer.get("ok") is not True:
        said = answer.get("error") if isinstance(answer, dict) else None
        raise GpuguardError(str(said or "the daemon gave an answer that cannot be understood."))
    return answer


def _connect(connection: socket.socket, directory: LockDirectory, deadline: float) -> None:
    with short_path(directory) as path:
        while True:
            try:
                connection.connect(path)
                return
            except BlockingIOError:  # too many stand before the door
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(0.01)


def encoded(content: Mapping[str, Any]) -> bytes:
    """One line of JSON."""
    return json.dumps(content).encode("ascii") + b"\n"


def uid_behind(connection: socket.socket) -> int:
    """Who is at the other end, as the kernel says."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


@contextmanager
def short_path(directory: LockDirectory) -> Iterator[str]:
    """The socket's path through a descriptor of its directory: the kernel takes 107 bytes at most."""
    here = os.open(daemon_files(directory).path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{here}/{NAME}"
    finally:
        os.close(here)


# What the daemon answers at its door, a noun for each request.
#
# An answer that lacks a field, as that of a daemon of another version may, is refused.  Does not ask: see calling.


@dataclass(frozen=True)
class ExemptionReply:
    """To `keep`."""

    until_unix_seconds: float
    user: str | None
    device: str | None


@dataclass(frozen=True)
class ReleaseReply:
    """To `end`."""

    ended: int


@dataclass(frozen=True)
class PolicyStatusReply:
    """One thing that a policy has against somebody."""

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


@dataclass(frozen=True)
class StatusReply:
    """To `status`."""

    enforcing: bool
    standing: tuple[PolicyStatusReply, ...]
    left_out: int


@dataclass(frozen=True)
class ReloadReply:
    """To `reload`."""

    path: str
    policies: int
    faults: int
    first: str | None


@dataclass(frozen=True)
class GrantReply:
    """To `claim`: the id of the claim and the names of its locks."""

    claim: str
    locks: tuple[str, ...]


def checked(answer: Mapping[str, Any], kind: type) -> Mapping[str, Any]:
    """*answer*, if it has all that a *kind* has, as it should be.

    Raises:
        GpuguardError: it has not.
    """
    try:
        decode(kind, dict(answer))
    except ValueError as error:
        raise GpuguardError(
            f"the daemon gave an answer that cannot be understood: {error}.  Restart it: it may be of another version."
        ) from None
    return answer
