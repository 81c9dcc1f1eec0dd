"""The socket of the page, and how long a stranger may hold one of its connections.

uvicorn alone waits without end for a request that never comes and for a reader that never reads, and a Unix socket of
its own making is open to everybody.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from uvicorn.protocols.http.h11_impl import H11Protocol

from gpuguard.claims.calling import PASS_RIGHTS
from gpuguard.errors import GpuguardError

MOST_CONNECTIONS = 300  # browsers open up to six each for the files, and one for the stream
REQUEST_SECONDS = 10.0  # for a request to arrive whole, the first or the next
STALLED_SECONDS = 20.0  # for a reader to take what fills its buffers


@contextmanager
def listening(host: str, port: int, path: str | None) -> Iterator[socket.socket]:
    """A socket that listens on *host* and *port*, or at *path*, where only our user and group can connect.

    Raises:
        GpuguardError: somebody else listens there, or we may not.
    """
    where = path or f"{host}:{port}"
    try:
        if path is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            ours, identity = socket.create_server((host, port), family=family), None
        else:
            ours = _at(path)
            identity = _identity(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GpuguardError(f"--listen {where}: {reason}.  Choose another address, as in 127.0.0.1:8467.") from None
    try:
        yield ours
    finally:
        ours.close()
        if path is not None:
            with suppress(OSError):
                if _identity(path) == identity:  # and not that of one who came after us
                    os.unlink(path)


def _at(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not _answered(path):
            os.unlink(path)  # of a server that was killed
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)  # the mode must be right from the first moment
    try:
        ours.bind(path)
    except OSError:
        ours.close()
        raise
    finally:
        os.umask(before)
    with suppress(OSError):  # an older kernel.  Who closes open files that somebody sends may wait for long
        ours.setsockopt(socket.SOL_SOCKET, PASS_RIGHTS, 0)
    ours.listen(128)
    return ours


def _answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            return False
    return True


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


class Connection(H11Protocol):
    """One connection, which ends when its other side keeps us waiting."""

    _arriving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let one in: whoever has said nothing for longest makes room."""
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        for timer in (self._arriving, self._stalled):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before and self._arriving:
            self._arriving.cancel()

    def on_response_complete(self) -> None:
        """The next request may come."""
        before = self.cycle
        super().on_response_complete()
        if self.cycle is before:  # and it is not here already
            self._expect_request()

    def shutdown(self) -> None:
        """The server ends: a stream would go on, and browsers come back by themselves."""
        super().shutdown()
        if self.cycle and not self.cycle.response_complete:
            self.transport.abort()

    def pause_writing(self) -> None:
        """The other side reads too slowly."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._stalled:
            self._stalled.cancel()
        super().resume_writing()

    def _make_room(self) -> None:
        waits = {one: one.asked_by for one in self.connections if isinstance(one, Connection) and one is not self}
        silent = [(until, one) for one, until in waits.items() if until is not None]
        longest = min(silent, key=lambda pair: pair[0], default=(0.0, self))[1]
        longest.end()

    def end(self) -> None:
        """Hang up."""
        if self._arriving:
            self._arriving.cancel()
        self.transport.abort()

    @property
    def asked_by(self) -> float | None:
        """When it must have asked; None while it is answered."""
        return None if self._arriving is None or self._arriving.cancelled() else self._arriving.when()

    def _expect_request(self) -> None:
        if self._arriving:
            self._arriving.cancel()
        self._arriving = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
