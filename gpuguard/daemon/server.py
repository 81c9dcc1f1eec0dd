"""The daemon's door: a Unix socket at which everybody on this machine may ask it for something.

One request and one answer per connection, each one line of JSON of at most 4 KiB.  Who asks is what the kernel says
(SO_PEERCRED), never what he writes.  A thread of its own listens, and never waits for anybody: whoever sends nothing,
too much, or open files, or keeps many connections open loses his own ones and nobody else's.  Knows nothing of what is
asked for: see verbs; the other side is calling.

    {"do": "keep", "for_seconds": 14400, "reason": "paper deadline"}
    {"ok": true, "until_unix_seconds": 1795212345.0}
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from gpuguard.claims.directory import LockDirectory
from gpuguard.daemon.client import LARGEST, PASS_RIGHTS, encoded, short_path, uid_behind
from gpuguard.errors import GpuguardError
from gpuguard.jsonio import loads

LONGEST_ERROR = 600  # characters: written out as \uXXXX they fit as well
MOST, MOST_OF_ONE = 32, 4  # connections in all and of one user
PATIENCE_SECONDS = 2.0  # for a request to be complete
MOST_HANGING = 64  # threads that wait for what somebody has sent to be closed
PAUSE_SECONDS = 0.005  # after each connection: somebody who never stops connecting costs little

# What may ask the driver, or look through all that somebody has open: each is answered by a thread of its own, one
# request after the other.
SLOW = frozenset({"claim", "release"})


@dataclass(frozen=True)
class Handover:
    """An answer with descriptors that go over to whoever asked; the door closes its own."""

    content: Mapping[str, Any]
    descriptors: tuple[int, ...]


Answer = Callable[[int, Mapping[str, Any]], Mapping[str, Any] | Handover]


@dataclass
class _Connection:
    """Who asks."""

    connection: socket.socket
    uid: int
    deadline: float  # monotonic
    received: bytes = b""


class SocketServer:
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
        self._visitors: dict[int, _Connection] = {}
        self._inside: dict[str, SimpleQueue[tuple[_Connection, bytes] | None]] = {name: SimpleQueue() for name in SLOW}
        self._served: list[_Connection] = []  # whose requests lie in there, or are being answered
        self._hanging: list[tuple[int, threading.Thread]] = []  # uid -> who closes what he has sent
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with short_path(directory) as path:
            # Only one daemon holds the directory's lock, so this socket is that of one that is dead.
            with suppress(FileNotFoundError):
                os.unlink(path)
            # Not chmod(): it follows links, and root may listen where another user could put one.
            before = os.umask(0o111)
            try:
                self._listener.bind(path)
            finally:
                os.umask(before)
        with suppress(OSError):  # an older kernel: see _part
            self._listener.setsockopt(socket.SOL_SOCKET, PASS_RIGHTS, 0)
        self._listener.listen(64)
        self._wake_read, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gpuguard-door", daemon=True)
        self._thread.start()
        for inside in self._inside.values():
            threading.Thread(target=self._serve, args=(inside,), name="gpuguard-server", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        os.write(self._wake, b".")
        for inside in self._inside.values():
            inside.put(None)
        self._thread.join(PATIENCE_SECONDS)
        with short_path(self._directory) as path, suppress(FileNotFoundError):
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
        uid = uid_behind(connection)
        here = [*self._visitors.values(), *self._served]
        full = len(here) >= MOST
        self._hanging = [(whose, thread) for whose, thread in self._hanging if thread.is_alive()]
        his = [*(visitor.uid for visitor in here), *(whose for whose, _ in self._hanging)].count(uid)
        if his >= MOST_OF_ONE or (full and not self._visitors):
            self._part(connection, uid)
        else:
            if full:  # whoever may use user namespaces has 65536 uids: the one that says nothing for longest makes room
                self._send_away(next(iter(self._visitors.values())))
            deadline = time.monotonic() + PATIENCE_SECONDS
            self._visitors[connection.fileno()] = _Connection(connection, uid, deadline)
        time.sleep(PAUSE_SECONDS)

    def _listen_to(self, visitor: _Connection) -> None:
        try:
            more = _bytes_alone(visitor.connection, LARGEST + 1 - len(visitor.received))
        except BlockingIOError:
            return
        except OSError:
            more = None
        if more is None:
            self._send_away(visitor)
            return
        visitor.received += more
        line, end, _ = visitor.received.partition(b"\n")
        if end or not more or len(line) > LARGEST:
            request = _request(line)
            if isinstance(request, dict) and (inside := self._inside.get(request.get("do", ""))):
                del self._visitors[visitor.connection.fileno()]
                self._served.append(visitor)
                inside.put((visitor, line))
                return
            self._reply(visitor, request)
            self._send_away(visitor)

    def _serve(self, inside: SimpleQueue[tuple[_Connection, bytes] | None]) -> None:
        while waiting := inside.get():
            visitor, line = waiting
            try:
                self._reply(visitor, _request(line))
            finally:
                self._served.remove(visitor)
                self._part(visitor.connection, visitor.uid)

    def _reply(self, visitor: _Connection, request: dict[str, Any] | str) -> None:
        answer = self._answered(visitor.uid, request)
        descriptors = answer.descriptors if isinstance(answer, Handover) else ()
        content = answer.content if isinstance(answer, Handover) else answer
        try:
            # It fits into the socket's buffer: whoever does not read it waits for himself.
            socket.send_fds(visitor.connection, [encoded(content)], descriptors, socket.MSG_NOSIGNAL)
        except OSError:
            return  # he has gone, so nobody has the descriptors but us
        finally:
            # What is handed over is a copy: with ours open, what was given would never end.
            for descriptor in descriptors:
                os.close(descriptor)

    def _answered(self, uid: int, request: dict[str, Any] | str) -> Mapping[str, Any] | Handover:
        if isinstance(request, str):
            return {"ok": False, "error": request}
        try:
            answer = self._answer(uid, request)
        except GpuguardError as error:
            return {"ok": False, "error": str(error)[:LONGEST_ERROR]}
        except Exception:  # noqa: BLE001  whoever finds a fault of ours must not be the last one who is served
            kind, value, traceback = sys.exc_info()
            threading.excepthook(threading.ExceptHookArgs((kind, value, traceback, threading.current_thread())))
            return {"ok": False, "error": "a fault inside the daemon, which its log shows."}
        if isinstance(answer, Handover):
            return Handover({"ok": True, **answer.content}, answer.descriptors)
        return {"ok": True, **answer}

    def _send_away(self, visitor: _Connection) -> None:
        del self._visitors[visitor.connection.fileno()]
        self._part(visitor.connection, visitor.uid)

    def _part(self, connection: socket.socket, uid: int) -> None:
        """Hang up.

        With the connection goes what was sent and not read.  If open files are among it and nobody else has them open,
        they are closed, and a socket with SO_LINGER lets whoever does that wait for as long as its sender likes.
        """
        with suppress(OSError, RuntimeError):  # the latter: there are too many threads
            connection.shutdown(socket.SHUT_RDWR)  # no more can come
            while more := _bytes_alone(connection, 65536):
                continue
            if more is None and len(self._hanging) < MOST_HANGING:
                thread = threading.Thread(target=connection.close, name="gpuguard-goodbye", daemon=True)
                thread.start()
                self._hanging.append((uid, thread))
                return
        connection.close()


def _bytes_alone(connection: socket.socket, most: int) -> bytes | None:
    """What was sent, at most so many bytes; None, and nothing is taken, when open files came with it.

    Raises:
        OSError: nothing was sent yet, or he has gone.
    """
    seen, _, flags, _ = connection.recvmsg(most, 0, socket.MSG_PEEK)
    return None if flags & socket.MSG_CTRUNC else connection.recv(len(seen)) if seen else b""


def _request(line: bytes) -> dict[str, Any] | str:
    """What is asked for; in words why it is nothing."""
    if len(line) > LARGEST:
        return f"a request has at most {LARGEST} bytes."
    try:
        request = loads(line)
    except ValueError:
        request = None
    if not isinstance(request, dict):
        return "a request is one line with one JSON object."
    # Whatever cannot be looked up would end the thread that listens to everybody.
    return request if isinstance(request.get("do", ""), str) else 'a request says what to "do", in one word.'
