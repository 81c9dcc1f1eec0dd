"""The daemon's socket: every user of this machine may send it requests.

Each connection carries one request and one reply, each of them one line of JSON.  The user who asks is the one that the
kernel names (SO_PEERCRED), never the one that the request names.  A separate thread listens and never waits for a
client: one that sends nothing, too much or open files, or keeps many connections open, loses its own connections and no
other user's.  requests says what requests mean; client is the other side.

    {"do": "keep", "for_seconds": 14400, "reason": "paper deadline"}
    {"ok": true, "until_unix_seconds": 1795212345.0}
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from queue import PriorityQueue
from typing import Any

from gpuguard.claims.daemon_client import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    SO_PASSRIGHTS,
    encoded,
    peer_uid,
    short_path,
)
from gpuguard.claims.directory import LockDirectory
from gpuguard.errors import GpuguardError
from gpuguard.files import close_all
from gpuguard.jsonio import loads
from gpuguard.locale.messages import cut, plain, sentence
from gpuguard.users import accountable_uid

MAX_ERROR = 600  # characters, which fit into a reply even when written out as \uXXXX
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_USER = 32, 4
REQUEST_SECONDS = 2.0  # for a request to be complete
MAX_CLOSING = 64  # threads that wait until what a client has sent is closed
PAUSE_SECONDS = 0.005  # after each connection, so that a client that never stops connecting costs little

# Requests that may read the driver, the log, or all that a user has open.  Each kind has a thread of its own, which
# handles them one after the other, in turns by user.
SLOW = frozenset({"claim", "events", "release"})


@dataclass(frozen=True)
class DescriptorReply:
    """A reply with descriptors that are handed to the client; the server then closes its own copies."""

    content: Mapping[str, Any]
    descriptors: tuple[int, ...]


Reply = Mapping[str, Any] | DescriptorReply
Handler = Callable[[int, Mapping[str, Any]], Reply]  # uid, request -> reply


@dataclass
class _Client:
    """A connection whose request is not answered yet."""

    connection: socket.socket
    uid: int
    owner: int  # the user behind that uid: see users.accountable_uid
    deadline: float  # monotonic
    received: bytes = b""


class _TurnQueue:
    """Requests that wait for a thread, in turns by user: a user who sends many delays others by one at most."""

    def __init__(self) -> None:
        self._entries = PriorityQueue[tuple[float, int, tuple[_Client, bytes] | None]]()
        self._round, self._number = 0.0, count()
        self._next = defaultdict[int, float](float)  # user -> the first round in which they have no turn

    def put(self, entry: tuple[_Client, bytes] | None) -> None:
        """Add a request in its user's turn, or add None, at which the thread ends, behind all that are there."""
        turn = math.inf
        if entry:
            owner = entry[0].owner
            turn = max(self._round, self._next[owner])  # this round, if the user has no turn in it yet
            self._next[owner] = turn + 1
        self._entries.put((turn, next(self._number), entry))

    def get(self) -> tuple[_Client, bytes] | None:
        """Return the next request as soon as there is one, or None when the thread must end."""
        self._round, _, entry = self._entries.get()
        return entry


class SocketServer:
    """Listens in *directory*, which only its owner can write to, until close().

    *handle* gets the uid of the client and its request; a GpuguardError that it raises becomes the reply.
    Raises OSError: the socket cannot be made.
    """

    def __init__(self, directory: LockDirectory, handle: Handler) -> None:
        self._directory, self._handle = directory, handle
        self._clients: dict[int, _Client] = {}  # by descriptor; the one that has been silent for longest comes first
        self._queues: dict[str, _TurnQueue] = {name: _TurnQueue() for name in SLOW}
        self._handled: list[_Client] = []  # clients whose requests are in these queues or are being handled
        self._closing: list[tuple[int, threading.Thread]] = []  # owner, and what closes the files that they sent
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with short_path(directory) as path:
            # Only one daemon holds the directory's lock, so a socket that is already here belongs to a dead one.
            with suppress(FileNotFoundError):
                os.unlink(path)
            bind_socket(self._listener, path, 0o111)
        self._listener.listen(64)
        self._wake_read, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gpuguard-socket", daemon=True)
        self._thread.start()
        for queue in self._queues.values():
            threading.Thread(target=self._handle_slow, args=(queue,), name="gpuguard-requests", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        os.write(self._wake, b".")
        for queue in self._queues.values():
            queue.put(None)
        self._thread.join(REQUEST_SECONDS)
        with short_path(self._directory) as path, suppress(FileNotFoundError):
            os.unlink(path)
        if not self._thread.is_alive():
            os.close(self._wake)
            os.close(self._wake_read)

    def _run(self) -> None:
        while True:
            poll = select.poll()
            for descriptor in (self._wake_read, self._listener.fileno(), *self._clients):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(500 if self._clients else None)}
            if self._wake_read in ready:
                break
            for descriptor in ready & self._clients.keys():
                self._read(self._clients[descriptor])
            now = time.monotonic()
            for client in [client for client in self._clients.values() if now >= client.deadline]:
                self._drop(client)
            if self._listener.fileno() in ready:
                self._accept()
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone already, or there are no descriptors left
            time.sleep(PAUSE_SECONDS)
            return
        connection.setblocking(False)
        uid = peer_uid(connection)
        owner = accountable_uid(uid)
        clients = [*self._clients.values(), *self._handled]
        full = len(clients) >= MAX_CONNECTIONS
        self._closing = [(whose, thread) for whose, thread in self._closing if thread.is_alive()]
        of_user = [*(client.owner for client in clients), *(whose for whose, _ in self._closing)].count(owner)
        if of_user >= MAX_CONNECTIONS_PER_USER or (full and not self._clients):
            self._hang_up(connection, owner)
        else:
            # A user may have uids that /etc/subuid does not name, so the client that is silent for longest makes room.
            if full:
                self._drop(next(iter(self._clients.values())))
            self._clients[connection.fileno()] = _Client(connection, uid, owner, time.monotonic() + REQUEST_SECONDS)
        time.sleep(PAUSE_SECONDS)

    def _read(self, client: _Client) -> None:
        try:
            more = _receive_without_files(client.connection, MAX_REQUEST_BYTES + 1 - len(client.received))
        except BlockingIOError:
            return
        except OSError:
            more = None
        if more is None:
            self._drop(client)
            return
        client.received += more
        line, end, _ = client.received.partition(b"\n")
        if end or not more or len(line) > MAX_REQUEST_BYTES:
            request = _decoded(line)
            if isinstance(request, dict) and (queue := self._queues.get(request.get("do", ""))):
                del self._clients[client.connection.fileno()]
                self._handled.append(client)
                queue.put((client, line))
                return
            self._reply(client, request)
            self._drop(client)

    def _handle_slow(self, queue: _TurnQueue) -> None:
        while entry := queue.get():
            client, line = entry
            try:
                self._reply(client, _decoded(line))
            finally:
                self._handled.remove(client)
                self._hang_up(client.connection, client.owner)

    def _reply(self, client: _Client, request: dict[str, Any] | str) -> None:
        reply = self._reply_to(client.uid, request)
        content, descriptors = (reply.content, reply.descriptors) if isinstance(reply, DescriptorReply) else (reply, ())
        try:
            if len(line := encoded(content)) > MAX_REPLY_BYTES:
                line = encoded(plain(content))
            # It fits into the socket's buffer, so a client that does not read it holds up nothing.
            socket.send_fds(client.connection, [line], descriptors, socket.MSG_NOSIGNAL)
        except OSError:
            return  # the client has gone, so only we have the descriptors
        finally:
            # The client has copies.  With ours still open, a claim that was given would never end.
            close_all(descriptors)

    def _reply_to(self, uid: int, request: dict[str, Any] | str) -> Reply:
        if isinstance(request, str):
            return {"ok": False, "error": request}
        try:
            reply = self._handle(uid, request)
        except GpuguardError as error:
            return {"ok": False, "error": cut(str(error), MAX_ERROR)}
        except Exception:  # noqa: BLE001  a request that finds a fault of ours must not be the last that is handled
            kind, value, traceback = sys.exc_info()
            threading.excepthook(threading.ExceptHookArgs((kind, value, traceback, threading.current_thread())))
            fault = sentence("daemon.fault", "a fault inside the daemon, which its log shows.")
            return {"ok": False, "error": fault}
        if isinstance(reply, DescriptorReply):
            return DescriptorReply({"ok": True, **reply.content}, reply.descriptors)
        return {"ok": True, **reply}

    def _drop(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        self._hang_up(client.connection, client.owner)

    def _hang_up(self, connection: socket.socket, owner: int) -> None:
        """Close the connection.

        What was sent and not read goes with it.  Open files in it are closed if no other process has them open, and a
        socket with SO_LINGER makes the one that closes it wait for as long as its sender likes, so a thread does that.
        """
        with suppress(OSError, RuntimeError):  # RuntimeError: there are too many threads
            connection.shutdown(socket.SHUT_RDWR)  # nothing more can come
            while more := _receive_without_files(connection, 65536):
                continue
            if more is None and len(self._closing) < MAX_CLOSING:
                thread = threading.Thread(target=connection.close, name="gpuguard-closing", daemon=True)
                thread.start()
                self._closing.append((owner, thread))
                return
        connection.close()


def bind_socket(listener: socket.socket, path: str, umask: int) -> None:
    """Bind a Unix socket that takes no open files from clients; *umask* makes its mode right from the first moment."""
    # chmod() would follow links, and root may listen where another user could put one.
    former = os.umask(umask)
    try:
        listener.bind(path)
    finally:
        os.umask(former)
    with suppress(OSError):  # the kernel is older than 6.16.  Closing files that a client sends may take long
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def _receive_without_files(connection: socket.socket, most: int) -> bytes | None:
    """Receive what was sent, or return None and receive nothing if open files came with it.

    Raises OSError: nothing was sent yet.
    """
    peeked, _, flags, _ = connection.recvmsg(most, 0, socket.MSG_PEEK)
    return None if flags & socket.MSG_CTRUNC else connection.recv(len(peeked)) if peeked else b""


def _decoded(line: bytes) -> dict[str, Any] | str:
    """Return the request in *line*, or say in words why it is none."""
    if len(line) > MAX_REQUEST_BYTES:
        return sentence("request.too_long", "a request has at most {most} bytes.", most=MAX_REQUEST_BYTES)
    try:
        request = plain(loads(line))  # only our own texts are sentences
    except ValueError:
        request = None
    if not isinstance(request, dict):
        return sentence("request.none", "a request is one line with one JSON object.")
    # A value that cannot be looked up in a table would end the thread that listens.
    if isinstance(request.get("do", ""), str):
        return request
    return sentence("request.no_word", 'a request says what to "do", in one word.')
