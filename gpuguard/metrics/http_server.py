"""A few read-only pages over HTTP, by the standard library's server with bounds on its clients.

Each connection has a thread, carries one request and ends with its answer.  It lasts CONNECTION_SECONDS, not counting
the time in which its page is made; at most MAX_CONNECTIONS are open, and a further one ends the oldest.  A request has
at most MAX_REQUEST_BYTES.  Only GET and HEAD are answered, and only for a Host that is ours, because a web page in a
user's browser could otherwise read our pages under a name that its owner had pointed to our address.

The server does not make the pages: see pages().
"""

from __future__ import annotations

import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from gpuguard import __version__
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.metrics.compat import COMPAT
from gpuguard.metrics.exposition import negotiated, prometheus_text
from gpuguard.metrics.facts import MetricFacts
from gpuguard.sanitize import neutralise

ADDRESS = "127.0.0.1:9835"
MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8192
CONNECTION_SECONDS = 10.0
LINGER_SECONDS = 1.0  # for a client that sends more than a request to read its answer, which closing would cut off
PAGE_SECONDS = 1.0  # for which a page is kept, so that a thousand scrapes a second cost no more than one
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_POLL_SECONDS = 0.25  # between two searches for connections whose time is over
_TEXT = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """The answer to a request."""

    body: str
    content_type: str = _TEXT
    status: int = 200


Pages = Callable[[str, Mapping[str, list[str]], str], Page]  # path, query, value of the Accept header -> page


def pages(facts: Callable[[Collection[str]], MetricFacts], compat: Collection[str]) -> Pages:
    """Return what makes /metrics; there ?compat=dcgm adds the names of an exporter to those of *compat*."""
    kept: dict[tuple[str, ...], tuple[float, str]] = {}  # by content type and names
    lock = threading.Lock()  # so that the driver is read only once for several clients

    def page(path: str, query: Mapping[str, list[str]], accept: str) -> Page:
        if path == "/":
            return Page(f"gpuguard {__version__} on {os.uname().nodename}: the numbers are at /metrics\n")
        if path != "/metrics":
            return Page("there is only /metrics\n", status=404)
        wanted = {*compat, *query.get("compat", ())}
        if unknown := wanted - set(COMPAT):
            return Page(f"compat: there is no {min(unknown)!r}, but {', '.join(COMPAT)}\n", status=400)
        names, content_type = sorted(wanted), negotiated(accept)
        key = (content_type, *names)
        with lock:
            if key not in kept or time.monotonic() - kept[key][0] >= PAGE_SECONDS:
                kept[key] = time.monotonic(), prometheus_text(facts(names), names, content_type)
            return Page(kept[key][1], content_type)

    return page


def listening_address(text: str, *, exposed: bool) -> tuple[IPv4Address | IPv6Address, int]:
    """Return address and port of ``"127.0.0.1:9835"`` or ``"[::1]:9835"``; port 0 is any that is free.

    Raises InvalidRequest: it is no address, or it is not on this machine's loopback and not *exposed* on purpose.
    """
    host, colon, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    number = int(port) if colon and port.isascii() and port.isdecimal() else -1
    address = None
    with suppress(ValueError):
        address = ip_address(host)
    if address is None or not 0 <= number <= 65535:
        raise InvalidRequest(f"{text!r} is no address: write it as 127.0.0.1:9835 or [::1]:9835.")
    if not exposed and not (address.is_loopback and getattr(address, "ipv4_mapped", None) is None):
        raise InvalidRequest(
            f"{text} can be reached from other machines, and there is no password: everybody there would see who "
            f"uses which GPU.  Confirm that with --expose (daemon: --metrics-expose), or take 127.0.0.1."
        )
    return address, number


def host_names(exposed: Collection[str]) -> frozenset[str]:
    """Return the names by which clients may address us, besides IP addresses, which no page can forge."""
    return LOCAL_NAMES | {name.lower().rstrip(".") for name in (*exposed, socket.gethostname()) if name}


def host_of(header: str) -> str:
    """Return the name in the value of a Host header, in lower case and without its port."""
    name, colon, port = header.lower().rpartition(":")
    return name if colon and port.isdecimal() and not header.endswith("]") else header.lower()


class PageServer(ThreadingHTTPServer):
    """Listens at an address for clients whose Host is one of our names or an IP address; serve() answers them.

    Args:
        address: from listening_address().
        hosts: from host_names().
        seconds: how long a connection may last.

    Raises:
        InvalidRequest: the address is taken.
    """

    daemon_threads = True
    request_queue_size = 512  # a client that does not fit waits a second until its kernel tries again

    pages: Pages

    def __init__(
        self, address: tuple[IPv4Address | IPv6Address, int], hosts: frozenset[str], seconds: float = CONNECTION_SECONDS
    ) -> None:
        self.hosts, self.seconds = hosts, seconds
        self._ends: dict[socket.socket, float] = {}  # when each connection ends, monotonic; the oldest comes first
        self._ended = threading.Condition()
        self._thread: threading.Thread | None = None
        host, port = str(address[0]), address[1]
        self.address_family = socket.AF_INET if address[0].version == 4 else socket.AF_INET6
        shown = f"[{host}]" if ":" in host else host
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise InvalidRequest(
                sentence(
                    "metrics.no_port",
                    "{address} cannot be had: {reason}.  Name another port.",
                    address=f"{shown}:{port}",
                    reason=reason,
                )
            ) from error
        self.address = f"{shown}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Bind without asking DNS for our name, which may take long."""
        socketserver.TCPServer.server_bind(self)

    def start(self, pages: Pages) -> None:
        """Serve in a thread of its own, until close()."""
        self._thread = threading.Thread(target=self.serve, args=(pages,), name="gpuguard-pages", daemon=True)
        self._thread.start()

    def serve(self, pages: Pages) -> None:
        """Serve *pages*, which several threads may call at once, until close() or an exception ends it."""
        self.pages = pages
        self.serve_forever(_POLL_SECONDS)

    def close(self) -> None:
        """Stop serving; a page that is being made may be finished later."""
        if self._thread and self._thread.is_alive():
            self.shutdown()
        self.server_close()
        with self._ended:
            for connection in self._ends:
                _hang_up(connection)

    def expect(self, connection: socket.socket, seconds: float) -> None:
        """Let *connection* last for so many seconds from now."""
        with self._ended:
            if connection in self._ends:
                self._ends[connection] = time.monotonic() + seconds

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; when too many connections are open, the oldest makes room first."""
        with self._ended:
            if len(self._ends) >= MAX_CONNECTIONS:
                silent = (connection for connection, end in self._ends.items() if end < float("inf"))
                _hang_up(next(silent, next(iter(self._ends))))
                self._ended.wait_for(lambda: len(self._ends) < MAX_CONNECTIONS, timeout=1.0)
            if len(self._ends) >= MAX_CONNECTIONS:
                request.close()
                return
            self._ends[request] = time.monotonic() + self.seconds
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections whose time is over."""
        now = time.monotonic()
        with self._ended:
            for connection, end in self._ends.items():
                if end <= now:
                    _hang_up(connection)

    def close_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        super().close_request(request)
        with self._ended:
            self._ends.pop(request, None)
            self._ended.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that is gone or gets no thread: neither is worth a line, nor ends the service."""


def _hang_up(connection: socket.socket) -> None:
    """Wake the thread that reads from *connection* or writes to it; the thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _BoundedLines:
    """The lines of a request, at most MAX_REQUEST_BYTES together."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file, self._left = file, MAX_REQUEST_BYTES

    def readline(self, size: int) -> bytes:
        """Read a line as from a file.  Raises HTTPException: the request is too long."""
        line = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise HTTPException("the request is too long")
        return line


class _Handler(BaseHTTPRequestHandler):
    """Handles one connection."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # so an error has headers, even for a client that named no version
    error_message_format = "%(message)s\n"
    error_content_type = _TEXT

    def handle(self) -> None:
        """Answer one request, and let the client read the answer."""
        self.rfile = _BoundedLines(self.rfile)  # type: ignore[assignment]
        self.command = ""
        try:
            self.raw_requestline = self.rfile.readline(MAX_REQUEST_BYTES)
            if not self.raw_requestline:
                return
            if self.parse_request():
                self._answer()
        except HTTPException as error:
            self.requestline, self.request_version = "", self.default_request_version
            self.send_error(431, str(error))
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        self.server.expect(self.connection, LINGER_SECONDS)
        while self.connection.recv(MAX_REQUEST_BYTES):
            pass

    def _answer(self) -> None:
        hosts = self.headers.get_all("Host") or []
        is_path = self.path.startswith("/") and self.path.isascii() and self.path.isprintable()
        for is_fault, status, text in (
            (self.command not in ("GET", "HEAD"), 405, "only GET and HEAD"),
            (self.headers.defects or not is_path, 400, "that is no request of HTTP/1.1"),
            (len(hosts) != 1 or not self._is_ours(host_of(hosts[0].strip())),
             421, "that host name is not ours; where this is served on purpose, name it when exposing it"),
        ):  # fmt: skip
            if is_fault:
                self.send_error(status, text)
                return
        self.server.expect(self.connection, float("inf"))
        page = self._page()
        self.server.expect(self.connection, self.server.seconds)
        body = page.body.encode("utf-8", "backslashreplace")
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _page(self) -> Page:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, max_num_fields=16)
        except ValueError:
            return Page("that address means nothing\n", status=400)
        try:
            return self.server.pages(parts.path, query, ",".join(self.headers.get_all("Accept") or []))
        except GpuguardError as error:
            return Page(f"{neutralise(' '.join(str(error).split()))}\n", status=503)
        except Exception as error:  # noqa: BLE001  the border to strangers: they are told no more than that
            return Page(f"a fault inside gpuguard: {type(error).__name__}\n", status=500)

    def _is_ours(self, name: str) -> bool:
        with suppress(ValueError):
            return bool(ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name))
        return name.rstrip(".") in self.server.hosts

    def end_headers(self) -> None:
        """Add the headers that every answer has for browsers and proxies."""
        if self.command not in ("", "GET", "HEAD"):
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'")
        super().end_headers()

    def version_string(self) -> str:
        """Return the Server header, which tells strangers no version of Python."""
        return "gpuguard"

    def log_message(self, *_: object) -> None:
        """Log nothing, because requests are not worth a line."""
