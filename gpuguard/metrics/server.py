"""A few pages over HTTP, read only: one thread, and bounds on whoever connects.

All connections share the thread that calls run(), so none costs a thread.  Each has SECONDS in all, and at most
MOST_CONNECTIONS live: a new one ends the one that has said nothing for longest.  Only GET and HEAD; a Host that is not
ours is refused, because a web page in somebody's browser could read us under a name that it had sent to our address.
Knows nothing of what the pages say.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.sanitize import neutralise

MOST_CONNECTIONS = 64
MOST_BYTES = 8192  # of a request
SECONDS = 10.0  # for a connection, without the time in which a page is made
LINGER_SECONDS = 1.0  # in which a peer that says more than it should takes what it was sent: to close would tear that
_BACKLOG = 512  # who does not fit in it waits for a second until the kernel asks again
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_WORDS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 421: "Misdirected Request",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}  # fmt: skip
_TEXT = "text/plain; charset=utf-8"
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Page(NamedTuple):
    """An answer."""

    body: str
    content_type: str = _TEXT
    status: int = 200


Pages = Callable[[str, Mapping[str, list[str]]], Page]  # path, query -> page


class _Response(NamedTuple):
    page: Page
    whole: bool = True  # with its body
    lingers: bool = True  # whoever asked may say more, and to close would tear what he is sent


@dataclass(eq=False)
class _Connection:
    """Somebody who reads."""

    socket: socket.socket
    until: float  # time.monotonic()
    got: bytes = b""
    rest: memoryview | None = None  # of the answer
    told: bool = False
    lingers: bool = True  # see _Answer


def listen(address: str, *, exposed: bool) -> socket.socket:
    """A socket at ``"127.0.0.1:9835"`` or ``"[::1]:9835"``.

    Args:
        address: where; port 0 is any that is free.
        exposed: whether it may be another address than one of this machine's own loopback.

    Raises:
        InvalidRequest: it means nothing, is open to others, or is taken.
    """
    host, colon, port = address.rpartition(":")
    text = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    family, where = _numbers(text)
    number = int(port) if port.isascii() and port.isdecimal() and colon else -1
    if not where or not 0 <= number <= 65535:
        raise InvalidRequest(f"{address!r} is no address: say it as 127.0.0.1:9835 or [::1]:9835.")
    ours = where[0] == 127 if family == socket.AF_INET else int.from_bytes(where, "big") == 1
    if not ours and not exposed:
        raise InvalidRequest(
            f"{address} can be reached from other machines, and there is no password: everybody there would see who "
            f"uses which GPU.  Say that it is meant with --expose (daemon: --metrics-expose), or take 127.0.0.1."
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((text, number))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            f"{address} cannot be had: {os.strerror(error.errno or 0)}.  Name another port."
        ) from error
    return listener


def host_names(exposed: Collection[str]) -> frozenset[str]:
    """Names under which we may be asked, beside addresses, which no page can forge."""
    return LOCAL_NAMES | {name.lower().rstrip(".") for name in (*exposed, socket.gethostname()) if name}


class Server:
    """Serves *pages* at *listener*, to whoever asks for one of *hosts* or for an address.

    Args:
        listener: from listen(); closed by close().
        pages: makes each page, in the thread of run().
        hosts: from host_names().
        limit: seconds for a connection.
    """

    def __init__(self, listener: socket.socket, pages: Pages, hosts: frozenset[str], limit: float = SECONDS) -> None:
        self._listener, self._pages, self._hosts, self._limit = listener, pages, hosts, limit
        name = listener.getsockname()
        self.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        self._bell, self._ringer = socket.socketpair()
        self._poll = select.poll()
        self._connections: dict[int, _Connection] = {}  # by descriptor; who has been silent for longest comes first
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve in a thread of its own, until close()."""
        self._thread = threading.Thread(target=self.run, name="gpuguard-pages", daemon=True)
        self._thread.start()

    def close(self, seconds: float = 1.0) -> None:
        """Serve no more.  A page that is being made may take longer than *seconds*: then its thread ends later."""
        self._ringer.send(b".")
        if self._thread:
            self._thread.join(seconds)
        if not self._thread or not self._thread.is_alive():
            self._ringer.close()

    def run(self) -> None:
        """Serve until close(), in this thread."""
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)
        try:
            while self._round():
                pass
        finally:
            for descriptor in tuple(self._connections):
                self._drop(descriptor)
            self._listener.close()
            self._bell.close()

    def _round(self) -> bool:
        wait = None
        if self._connections:
            soonest = min(each.until for each in self._connections.values())
            wait = max(0.0, soonest - time.monotonic()) * 1000
        for descriptor, _ in self._poll.poll(wait):
            if descriptor == self._bell.fileno():
                return False
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._connections:
                self._serve(descriptor)
        if self._connections:
            now = time.monotonic()
            for descriptor in [descriptor for descriptor, each in self._connections.items() if each.until <= now]:
                self._drop(descriptor)
        return True

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError:  # no descriptor is left: those that we hold end by their time
            time.sleep(0.01)
            return
        peer.setblocking(False)
        if len(self._connections) >= MOST_CONNECTIONS:
            self._drop(next(iter(self._connections)))
        descriptor = peer.fileno()
        self._connections[descriptor] = _Connection(peer, time.monotonic() + self._limit)
        self._poll.register(descriptor, select.POLLIN)
        self._serve(descriptor)  # its request is mostly there

    def _drop(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._connections.pop(descriptor).socket.close()

    def _serve(self, descriptor: int) -> None:
        connection = self._connections[descriptor]
        try:
            if connection.rest:
                self._send(descriptor, connection)
            elif not (got := connection.socket.recv(MOST_BYTES)):
                self._drop(descriptor)
            elif not connection.told:
                self._connections[descriptor] = self._connections.pop(descriptor)
                connection.got += got
                self._take(descriptor, connection)
        except BlockingIOError:
            return
        except OSError:  # it hung up
            if descriptor in self._connections:
                self._drop(descriptor)

    def _take(self, descriptor: int, connection: _Connection) -> None:
        head, end, more = connection.got.replace(b"\r\n", b"\n").lstrip(b"\n").partition(b"\n\n")
        if not end and len(connection.got) <= MOST_BYTES:
            return
        begun = time.monotonic()
        answer = self._answer(head) if end else _Response(Page("the request is too long\n", status=431))
        deaf = time.monotonic() - begun
        for each in self._connections.values():
            each.until += deaf
        connection.rest, connection.told = memoryview(_written(answer.page, answer.whole)), True
        connection.lingers = bool(more) or answer.lingers
        self._poll.modify(descriptor, select.POLLOUT)
        self._send(descriptor, connection)

    def _send(self, descriptor: int, connection: _Connection) -> None:
        assert connection.rest is not None
        connection.rest = connection.rest[connection.socket.send(connection.rest) :]
        if connection.rest:
            return
        if not connection.lingers:
            self._drop(descriptor)
            return
        connection.socket.shutdown(socket.SHUT_WR)
        connection.until = time.monotonic() + LINGER_SECONDS
        self._poll.modify(descriptor, select.POLLIN)

    def _answer(self, head: bytes) -> _Response:
        try:
            method, target, hosts, more = _parsed(head)
        except ValueError as error:
            return _Response(Page(f"{neutralise(str(error))}\n", status=400))
        if method not in ("GET", "HEAD"):
            return _Response(Page("only GET and HEAD\n", status=405))
        if not self._is_us(hosts):
            text = "that host name is not ours; where this is served on purpose, name it when exposing it\n"
            return _Response(Page(text, status=421), method == "GET")
        try:
            path, query = _place(target)
        except ValueError:
            return _Response(Page("that address means nothing\n", status=400))
        try:
            page = self._pages(path, query)
        except GpuguardError as error:
            page = Page(f"{neutralise(' '.join(str(error).split()))}\n", status=503)
        except Exception as error:  # noqa: BLE001  the border to strangers: no request may end the thread of all others
            page = Page(f"a fault inside gpuguard: {type(error).__name__}\n", status=500)
        return _Response(page, method == "GET", lingers=more)

    def _is_us(self, hosts: tuple[str, ...]) -> bool:
        if len(hosts) != 1:
            return False
        name, colon, port = hosts[0].lower().rpartition(":")
        if not (colon and port.isdecimal() and (not name.startswith("[") or name.endswith("]"))):
            name = hosts[0].lower()
        return name.rstrip(".") in self._hosts or _is_address(name)


def _is_address(name: str) -> bool:
    return bool(_numbers(name[1:-1] if name.startswith("[") and name.endswith("]") else name)[1])


def _numbers(address: str) -> tuple[int, bytes]:
    """The family of an address and its 4 or 16 bytes, none where it is no address; ipaddress would take 0.3 MiB."""
    for family, text in ((socket.AF_INET, address), (socket.AF_INET6, address.partition("%")[0])):  # fe80::1%eth0
        with suppress(OSError, ValueError):
            return family, socket.inet_pton(family, text)
    return family, b""


@lru_cache(maxsize=8)  # Prometheus asks in the same words each time
def _parsed(head: bytes) -> tuple[str, str, tuple[str, ...], bool]:
    """Method, target, the values of Host, and whether more is to come behind the head."""
    first, *rest = head.decode("ascii", "surrogateescape").split("\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[0] or not set(words[0]) <= _TOKEN:
        raise ValueError("that is no request of HTTP/1.1")
    if not words[1].startswith("/") or not words[1].isprintable() or not words[1].isascii():
        raise ValueError("the address must begin with a slash, and be plain text")
    hosts, more = [], False
    for line in rest:
        name, colon, value = line.partition(":")
        if not colon or not name or not set(name) <= _TOKEN:
            raise ValueError("a header makes no sense")
        if name.lower() == "host":
            hosts.append(value.strip())
        more = more or name.lower() in ("content-length", "transfer-encoding")
    return words[0], words[1], tuple(hosts), more


def _place(target: str) -> tuple[str, dict[str, list[str]]]:
    """Path and query of an address."""
    if target.removeprefix("/").isalnum():
        return target, {}  # as Prometheus asks: a guard keeps 0.8 MiB for as long as it runs
    from urllib.parse import parse_qs, urlsplit

    parts = urlsplit(target)
    return parts.path, parse_qs(parts.query, max_num_fields=16)


def _written(page: Page, wanted: bool) -> bytes:
    body = page.body.encode("utf-8", "backslashreplace")
    head = (
        f"HTTP/1.1 {page.status} {_WORDS[page.status]}\r\n"
        f"Content-Type: {page.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        + "Allow: GET, HEAD\r\n"
        * (page.status == 405)
        + "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Content-Security-Policy: default-src 'none'\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + (body if wanted else b"")
