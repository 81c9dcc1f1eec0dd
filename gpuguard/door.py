"""The daemon's door: a Unix socket at which everybody on this machine may ask it for something.

One request and one answer per connection, each one line of JSON of at most 4 KiB.  Who asks is what the kernel says
(SO_PEERCRED), never what he writes.  A thread of its own listens, and never waits for anybody: whoever sends nothing,
too much, or keeps many connections open loses his own ones and nobody else's.  Knows nothing of what is asked for: see
keeping.

    {"do": "keep", "for_seconds": 14400, "reason": "paper deadline"}
    {"ok": true, "until_unix_seconds": 1795212345.0}
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from gpuguard.errors import GpuguardError
from gpuguard.lockfiles import LockDirectory

NAME = "daemon.sock"
LARGEST = 4096  # bytes of a request or an answer, with the end of the line
LONGEST_ERROR = 600  # characters: written out as \uXXXX they fit as well
MOST, MOST_OF_ONE = 32, 4  # connections in all and of one user
PATIENCE_SECONDS = 2.0  # for a request to be complete
PAUSE_SECONDS = 0.005  # after each connection: somebody who never stops connecting costs little

Answer = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]


@dataclass
class _Visitor:
    connection: socket.socket
    uid: int
    deadline: float  # monotonic
    received: bytes = field(default=b"")


class Door:
    """Listens in *directory*, which must be one that only its owner can write to, until close().

    Args:
        directory: of the claims.
        answer: called in the thread of the door with the uid of whoever asks and his request; a GpuguardError that it
            raises becomes the answer.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, directory: LockDirectory, answer: Answer) -> None:
        self._directory, self._answer = directory, answer
        self._visitors: dict[int, _Visitor] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with _short_path(directory) as path:
            # Only one daemon holds the directory's lock, so this socket is that of one that is dead.
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._listener.bind(path)
            os.chmod(path, 0o666)
        self._listener.listen(64)
        self._wake_read, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gpuguard-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        os.write(self._wake, b".")
        self._thread.join(PATIENCE_SECONDS)
        with _short_path(self._directory) as path, suppress(FileNotFoundError):
            os.unlink(path)
        if not self._thread.is_alive():
            os.close(self._wake)
            os.close(self._wake_read)

    def _run(self) -> None:
        while True:
            poll = select.poll()
            for descriptor in (self._wake_read, self._listener.fileno(), *self._visitors):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(500 if self._visitors else None)}
            if self._wake_read in ready:
                break
            for descriptor in ready & self._visitors.keys():
                self._listen_to(self._visitors[descriptor])
            now = time.monotonic()
            for visitor in [each for each in self._visitors.values() if now >= each.deadline]:
                self._send_away(visitor)
            if self._listener.fileno() in ready:
                self._let_in()
        for visitor in list(self._visitors.values()):
            self._send_away(visitor)
        self._listener.close()

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # he has gone already, or there are no descriptors left
            time.sleep(PAUSE_SECONDS)
            return
        connection.setblocking(False)
        uid = _uid_behind(connection)
        own = sum(visitor.uid == uid for visitor in self._visitors.values())
        if own >= MOST_OF_ONE or len(self._visitors) >= MOST:
            connection.close()
        else:
            deadline = time.monotonic() + PATIENCE_SECONDS
            self._visitors[connection.fileno()] = _Visitor(connection, uid, deadline)
        time.sleep(PAUSE_SECONDS)

    def _listen_to(self, visitor: _Visitor) -> None:
        try:
            more = visitor.connection.recv(LARGEST + 1 - len(visitor.received))
        except BlockingIOError:
            return
        except OSError:
            self._send_away(visitor)
            return
        visitor.received += more
        line, end, _ = visitor.received.partition(b"\n")
        if end or not more or len(line) > LARGEST:
            answer = _encoded(self._answered(visitor.uid, line))
            with suppress(OSError):  # it fits into the socket's buffer: whoever does not read it waits for himself
                visitor.connection.send(answer, socket.MSG_NOSIGNAL)
            self._send_away(visitor)

    def _answered(self, uid: int, line: bytes) -> Mapping[str, Any]:
        if len(line) > LARGEST:
            return {"ok": False, "error": f"a request has at most {LARGEST} bytes."}
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return {"ok": False, "error": "a request is one line with one JSON object."}
        try:
            return {"ok": True, **self._answer(uid, request)}
        except GpuguardError as error:
            return {"ok": False, "error": str(error)[:LONGEST_ERROR]}

    def _send_away(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.connection.fileno()]
        visitor.connection.close()


def ask(directory: LockDirectory, request: Mapping[str, Any], seconds: float = 10.0) -> dict[str, Any]:
    """What the daemon of *directory* answers.

    Raises:
        GpuguardError: there is none, it does not answer within *seconds*, or it says no.
    """
    nobody = f"no daemon answers in {directory.path}"
    advice = "An administrator starts one: see `gpuguard daemon --help`."
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            _connect(connection, directory, time.monotonic() + seconds)
            if _uid_behind(connection) not in (0, directory.owner):
                raise GpuguardError(f"{directory.path}/{NAME} is not that of the daemon.  Look at it with `ls -l`.")
            connection.sendall(_encoded(request))
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline(LARGEST + 1))
    except TimeoutError as error:
        raise GpuguardError(f"{nobody} in time.  Try again; `gpuguard doctor` looks at the machine.") from error
    except OSError as error:
        raise GpuguardError(f"{nobody} ({error.strerror}).  {advice}") from error
    except ValueError as error:  # it hung up: too many at once
        raise GpuguardError(f"the daemon in {directory.path} is busy.  Try again.") from error
    if not isinstance(answer, dict) or answer.get("ok") is not True:
        said = answer.get("error") if isinstance(answer, dict) else None
        raise GpuguardError(str(said or "the daemon gave an answer that cannot be understood."))
    return answer


def _connect(connection: socket.socket, directory: LockDirectory, deadline: float) -> None:
    with _short_path(directory) as path:
        while True:
            try:
                connection.connect(path)
                return
            except BlockingIOError:  # too many stand before the door
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(0.01)


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode("ascii") + b"\n"


def _uid_behind(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


@contextmanager
def _short_path(directory: LockDirectory) -> Iterator[str]:
    """The socket's path through a descriptor of its directory: the kernel takes 107 bytes at most."""
    here = os.open(directory.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{here}/{NAME}"
    finally:
        os.close(here)
