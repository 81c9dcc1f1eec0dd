"""The server of the page: a few paths that only answer GET, and bounds on what clients do with them.

The page shows more than everybody may know, so it needs a token unless the caller gives none.  The token comes in the
address, and the browser is redirected to an address without it.  The browser keeps a cookie that only this run of the
server accepts, because browsers send cookies to every port of a name, and so also to the next program at this port.
The name that a browser asks for (Host) must be one of ours, so that no other site's script can read the page through a
name of its own (DNS rebinding).  Scripts come from here alone (CSP), and the page writes text, never markup.  By
itself, uvicorn waits without end for a request that never comes and for a client that never reads, and a Unix socket
that it makes is open to every user: see Connection and listening().  The server of metrics does not serve the page: it
is the standard library's because it runs in a daemon of root, and there each of 200 viewers of a stream would take a
thread.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import secrets
import socket
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpuguard.daemon.socket_server import bind_socket
from gpuguard.errors import GpuguardError
from gpuguard.locale import catalogue
from gpuguard.metrics.http_server import host_of
from gpuguard.model import EventKind, EventOutcome
from gpuguard.procfs import read_text
from gpuguard.views.events import FACTS
from gpuguard.web.feed import ChartRequest, FrameFeed, NoRoom, who_makes_room

PAGE = Path(__file__).parent / "page"
_PARTS = ("page.js", "charts.js", "nodes.js", "words.js", "units.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css")
FILES = {"/": "index.html", **{f"/{name}": name for name in _PARTS}}
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
HEADERS = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; "
     b"connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)  # fmt: skip
MAX_VIEWERS = 200
MAX_STEP = 86400.0  # seconds between two values of a chart
COOKIE = "gpuguard_token"
BEAT_SECONDS = 15.0  # between two signs of life on a stream without a new frame
MAX_CONNECTIONS = 300  # browsers open up to six each for the files, and one for the stream
REQUEST_SECONDS = 10.0  # for a request to arrive whole, the first or the next
STALLED_SECONDS = 20.0  # for a reader to take what fills its buffers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def application(feed: FrameFeed, hosts: frozenset[str], token: str | None = None) -> RequestGuard:
    """Return the page of *feed*, for browsers that ask for one of *hosts* (no port) and know the *token*, if any."""

    @asynccontextmanager
    async def sampling(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(feed.run())
        try:
            yield
        finally:
            task.cancel()
            feed.close()

    async def now(_: Request) -> Response:
        return Response((await feed.next(0)).text, media_type="application/json")

    async def chart(request: Request) -> Response:
        given = request.query_params
        try:
            seconds, step = float(given.get("seconds", "600")), float(given.get("step", "0"))
            until = float(given["until"]) if "until" in given else None
            if not all(map(math.isfinite, (seconds, until or 0.0))) or not (step == 0 or 1 <= step <= MAX_STEP):
                raise ValueError
            asked = ChartRequest(given.get("metric", "utilization"), seconds, until, step)
            text = await feed.chart(asked, peer_of(request.scope))
        except (NoRoom, asyncio.CancelledError):  # cancelled by the end of the server, or for another user
            reason = "too many charts are requested: try again in a moment\n"
            return PlainTextResponse(reason, 503, {"retry-after": "5"})
        except (ValueError, KeyError, OverflowError):
            return PlainTextResponse("metric, seconds, until and step make no chart\n", 400)
        return Response(text, media_type="application/json")

    streams: list[Stream] = []

    async def stream(request: Request) -> Response:
        peer = peer_of(request.scope)
        if len(streams) >= MAX_VIEWERS:  # Stream counts itself without letting another request in between
            try:
                streams[who_makes_room([other.peer for other in streams], peer)].end()
            except NoRoom:
                return PlainTextResponse("too many watch already: try again in a minute\n", 503, {"retry-after": "60"})
        return Stream(feed, streams, peer, throughput="throughput" in request.query_params)

    contents = {path: (PAGE / name).read_bytes() for path, name in FILES.items()}
    contents["/words.js"] += chinese_words().encode()

    async def file(request: Request) -> Response:
        path = request.url.path
        kind = KINDS[Path(FILES[path]).suffix]
        return Response(contents[path], headers={"content-type": f"{kind}; charset=utf-8"})

    routes = [Route("/api/now", now), Route("/api/chart", chart), Route("/api/stream", stream)]
    routes += [Route(path, file) for path in FILES]
    return RequestGuard(Starlette(routes=routes, lifespan=sampling), hosts, token)


def chinese_words() -> str:
    """Return JavaScript that gives the page the words of the log that the catalogue has."""
    say = catalogue("zh_CN").gettext
    words = *get_args(EventKind), *get_args(EventOutcome), *FACTS
    return f"WORDS.zh.log = {json.dumps({word: say(word) for word in words})};\n"


class Stream(Response):
    """Server-sent events: each frame as soon as there is one, the first at once, until the viewer leaves or end().

    *streams* holds all streams that are being sent; *peer* is the one that receives this one: see peer_of().
    """

    media_type = "text/event-stream"

    def __init__(self, feed: FrameFeed, streams: list[Stream], peer: str, *, throughput: bool) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._feed, self._streams, self.peer, self._throughput = feed, streams, peer, throughput
        self._gone: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Send no more, and count this stream no more."""
        if self in self._streams:
            self._streams.remove(self)
        if self._gone:
            self._gone.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        self._gone = gone = asyncio.create_task(_disconnection(receive))
        seen = 0
        self._streams.append(self)
        with self._feed.watched(throughput=self._throughput):
            try:
                await send(start)
                while not gone.done():
                    coming = asyncio.create_task(self._feed.next(seen))
                    await asyncio.wait((gone, coming), timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    text = b": still here\n\n"
                    if coming.done():
                        seen, text = coming.result().number, coming.result().event
                    coming.cancel()
                    await send({"type": "http.response.body", "body": text, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                self.end()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def peer_of(scope: Scope) -> str:
    """Return the sender of a request, for bounds per user: a user of this machine, or another machine.

    Returns "" over a Unix socket, and if it is unknown: the kernel's table may lack a socket when others come and go.
    """
    host, port = scope.get("client") or ("", 0)
    if not host:
        return ""
    address = ip_address(host)
    packed = address.packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    end = f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
    sockets = read_text(f"/proc/net/tcp{'6' if len(packed) > 4 else ''}") or ""
    uids = [fields[7] for fields in map(str.split, sockets.splitlines()) if fields[1] == end]
    return f"uid {uids[0]}" if uids else "" if address.is_loopback else host


class RequestGuard:
    """Checks each request before the application: method, Host, token; and adds headers to every answer."""

    def __init__(self, app: Starlette, hosts: frozenset[str], token: str | None) -> None:
        self._app, self._hosts, self._token = app, hosts, token
        self._cookie = secrets.token_urlsafe()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fault = self._fault(scope)
        app: Any = PlainTextResponse(fault[1], fault[0]) if fault else self._app
        headers = list(HEADERS)
        if fault:
            headers.append((b"connection", b"close"))
        elif self._token and _tokens_in_query(scope):
            cookie = f"{COOKIE}={self._cookie}; HttpOnly; SameSite=Strict; Path=/"
            headers.append((b"set-cookie", cookie.encode("ascii")))
            if scope["path"] == "/":  # otherwise the token stays in the address, in copied links and in the history
                app = Response(None, 303, {"location": "./"})

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await app(scope, receive, guarded)

    def _fault(self, scope: Scope) -> tuple[int, str] | None:
        headers = dict(scope["headers"])
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        for is_fault, status, text in (
            (scope["method"] not in ("GET", "HEAD"), 405, "this page only shows: GET\n"),
            (has_body, 400, "a request has no body\n"),  # otherwise we would read all that comes
            (len(names) != 1 or host_of(names[0]) not in self._hosts,
             421, "this page is not known by that name: see `gpuguard web --help`, --host\n"),
            (self._token and not self._has_token(scope),
             401, "a token is needed: open the address with ?token=... that `gpuguard web` printed\n"),
        ):  # fmt: skip
            if is_fault:
                return status, text
        return None

    def _has_token(self, scope: Scope) -> bool:
        assert self._token
        headers = dict(scope["headers"])
        # Parsed by hand, because SimpleCookie takes seconds for 60 KB of backslashes, which clients without a token can
        # send, and finds nothing behind a cookie that it does not understand.
        cookies = [cookie.partition("=") for cookie in headers.get(b"cookie", b"").decode("latin-1").split(";")]
        cookie = next((value.strip() for name, _, value in cookies if name.strip() == COOKIE), "")
        given = [headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer "), *_tokens_in_query(scope)]
        pairs = [(cookie, self._cookie), *((token, self._token) for token in given)]
        return any(hmac.compare_digest(found.encode(), wanted.encode()) for found, wanted in pairs)


def _tokens_in_query(scope: Scope) -> list[str]:
    return parse_qs(scope["query_string"].decode("latin-1")).get("token", [])


@contextmanager
def listening(host: str, port: int, path: str | None) -> Iterator[socket.socket]:
    """Yield a socket that listens on *host* and *port*, or at *path*, where only our user and group can connect.

    Raises GpuguardError if another program listens there, or if we may not.
    """
    where = path or f"{host}:{port}"
    try:
        if path is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener, identity = socket.create_server((host, port), family=family), None
        else:
            listener = _listen_at(path)
            identity = _identity(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GpuguardError(f"--listen {where}: {reason}.  Choose another address, as in 127.0.0.1:8467.") from None
    try:
        yield listener
    finally:
        listener.close()
        if path is not None:
            with suppress(OSError):
                if _identity(path) == identity:  # it is not that of a program that came after us
                    os.unlink(path)


def _listen_at(path: str) -> socket.socket:
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            try:
                client.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)  # of a server that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bind_socket(listener, path, 0o117)
    except OSError:
        listener.close()
        raise
    listener.listen(128)
    return listener


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


class Connection(H11Protocol):
    """One connection, which ends when the other side keeps us waiting."""

    _arriving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many, the one that has been silent for longest makes room."""
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of the connection."""
        for timer in (self._arriving, self._stalled):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take some bytes of a request."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before and self._arriving:
            self._arriving.cancel()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        before = self.cycle
        super().on_response_complete()
        if self.cycle is before:  # the next request is not here already
            self._expect_request()

    def shutdown(self) -> None:
        """End with the server, because a stream would go on, and browsers come back by themselves."""
        super().shutdown()
        if self.cycle and not self.cycle.response_complete:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Set a time limit, because the other side reads too slowly."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Lift the time limit, because the other side has caught up."""
        if self._stalled:
            self._stalled.cancel()
        super().resume_writing()

    def _make_room(self) -> None:
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        silent = [(other.request_due, other) for other in others if other.request_due is not None]
        _, oldest = min(silent, key=lambda pair: pair[0], default=(0.0, self))
        if oldest._arriving:
            oldest._arriving.cancel()
        oldest.transport.abort()

    @property
    def request_due(self) -> float | None:
        """The time when its request must be complete, or None while a request is answered."""
        return None if self._arriving is None or self._arriving.cancelled() else self._arriving.when()

    def _expect_request(self) -> None:
        if self._arriving:
            self._arriving.cancel()
        self._arriving = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
