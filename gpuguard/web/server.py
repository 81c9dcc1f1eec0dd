"""The server of the page: a few paths that only answer GET, and everything that a stranger could try with them.

Loopback or a Unix socket by itself; another address needs a token, because whoever sees the page sees who runs what.
The name that a browser asked for (Host) must be one of ours, so that no other site's script can read the page through
a name of its own (DNS rebinding).  Scripts come from here alone (CSP), and the page writes text, never markup.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gpuguard.web.feed import Busy, Feed

PAGE = Path(__file__).parent / "page"
FILES = {  # path -> (file, type)
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
HEADERS = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; "
     b"connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)  # fmt: skip
MOST_VIEWERS = 200
COOKIE = "gpuguard_token"
BEAT_SECONDS = 15.0  # a sign of life on a stream that has nothing to say

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def application(feed: Feed, hosts: frozenset[str], token: str | None = None) -> Guard:
    """The page of *feed*.

    Args:
        feed: what it shows.
        hosts: names, without a port, under which browsers may ask for it.
        token: what they must know; None: nothing.
    """

    @asynccontextmanager
    async def looking(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(feed.run())
        try:
            yield
        finally:
            task.cancel()
            feed.close()

    async def now(_: Request) -> Response:
        return Response((await feed.next(0)).text, media_type="application/json")

    async def chart(request: Request) -> Response:
        try:
            seconds = float(request.query_params.get("seconds", "600"))
            if not math.isfinite(seconds):
                raise ValueError
            text = await feed.chart(request.query_params.get("metric", "utilization"), seconds)
        except (Busy, asyncio.CancelledError):  # nobody but the end of the server cancels a request
            reason = "too many charts are asked for: try again in a moment\n"
            return PlainTextResponse(reason, 503, {"retry-after": "5"})
        except (ValueError, KeyError, OverflowError):
            return PlainTextResponse("metric and seconds make no chart\n", 400)
        return Response(text, media_type="application/json")

    async def stream(request: Request) -> Response:
        if feed.viewers >= MOST_VIEWERS:  # Stream counts itself without giving way to another request in between
            return PlainTextResponse("too many watch already: try again in a minute\n", 503, {"retry-after": "60"})
        return Stream(feed, curious="throughput" in request.query_params)

    routes = [Route("/api/now", now), Route("/api/chart", chart), Route("/api/stream", stream)]
    routes += [Route(path, _file(*what)) for path, what in FILES.items()]
    return Guard(Starlette(routes=routes, lifespan=looking), hosts, token)


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = (PAGE / name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, headers={"content-type": kind})

    return answer


class Stream(Response):
    """Server-sent events: each frame as soon as there is one, the first at once, until the viewer leaves."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, *, curious: bool) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._feed, self._curious = feed, curious

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it (ASGI)."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        gone = asyncio.create_task(_disconnection(receive))
        seen = 0
        with self._feed.watched(curious=self._curious):
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
            finally:
                gone.cancel()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Guard:
    """Stands before the application: who asks, by which name, and what is sent along with every answer."""

    def __init__(self, app: Starlette, hosts: frozenset[str], token: str | None) -> None:
        self._app, self._hosts, self._token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fault = self._fault(scope)
        app: Any = PlainTextResponse(fault[1], fault[0]) if fault else self._app
        cookie = None if fault else self._new_cookie(scope)

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                more = [cookie] if cookie else [(b"connection", b"close")] if fault else []
                message["headers"] = [*message.get("headers", ()), *HEADERS, *more]
            await send(message)

        await app(scope, receive, guarded)

    def _fault(self, scope: Scope) -> tuple[int, str] | None:
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page only shows: GET\n"
        said = dict(scope["headers"])
        if b"transfer-encoding" in said or said.get(b"content-length", b"0") != b"0":
            return 400, "a question has no body\n"  # of which we would read all that comes
        names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(names) != 1 or _without_port(names[0]) not in self._hosts:
            return 421, "this page is not known by that name: see `gpuguard web --help`, --host\n"
        if self._token and not self._knows(scope):
            return 401, "a token is needed: open the address with ?token=... that `gpuguard web` printed\n"
        return None

    def _knows(self, scope: Scope) -> bool:
        assert self._token
        headers = dict(scope["headers"])
        given = [headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer "), _cookie(headers)]
        given += _asked(scope)
        return any(hmac.compare_digest(one.encode(), self._token.encode()) for one in given)

    def _new_cookie(self, scope: Scope) -> tuple[bytes, bytes] | None:
        """So that the token need not stay in the address."""
        if not self._token or not _asked(scope):
            return None
        return b"set-cookie", f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/".encode("ascii")


def _asked(scope: Scope) -> list[str]:
    return parse_qs(scope["query_string"].decode("latin-1")).get("token", [])


def _cookie(headers: dict[bytes, bytes]) -> str:
    """Ours, among those that others on this host have set.

    By hand: SimpleCookie takes seconds for 60 KB of backslashes, from whoever knows no token, and finds nothing behind
    a cookie that it does not understand.
    """
    for one in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = one.partition("=")
        if name.strip() == COOKIE:
            return value.strip()
    return ""


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() and not host.endswith("]") else host).lower()
