"""Connections that end: all that the other side of one says is bounded together, in time and in bytes.

The time-out of a socket begins anew with each piece, and http.client and smtplib read on for as long as something
comes.  So one byte now and then held a thread for ever, and a mail server whose greeting has no last line filled the
memory.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from typing import Any

from gpuguard.locale.messages import sentence

MOST_BYTES = 256 * 1024  # of all answers of a connection; the longest honest one has some 10 KiB
MOST_TIMEOUTS = 10  # for all answers of a connection; each of them has one time-out to begin in


class BoundedSocket(socket.socket):
    """A connection that can be read until the monotonic time *ends*, and no more bytes than *left*."""

    ends: float
    left = MOST_BYTES

    def recv_into(self, *into: Any, **how: Any) -> int:
        """Read as socket.recv_into() does.  Raises OSError: the bound is reached."""
        if time.monotonic() >= self.ends:
            raise TimeoutError(errno.ETIMEDOUT, sentence("notify.no_answer", "no answer in time"))
        got = super().recv_into(*into, **how)
        self.left -= got
        if self.left < 0:
            raise OSError(errno.EMSGSIZE, sentence("notify.endless_answer", "it answers without end"))
        return got


def connect(address: tuple[str, int], timeout: float, *_: object) -> BoundedSocket:
    """Connect as socket.create_connection() does."""
    connection = BoundedSocket(fileno=socket.create_connection(address, timeout).detach())
    connection.settimeout(timeout)
    connection.ends = time.monotonic() + MOST_TIMEOUTS * timeout
    return connection


def tls_context(ca_file: str, timeout: float) -> ssl.SSLContext:
    """Return a context for one connection, which is bounded as those of connect() are."""

    class BoundedTlsSocket(BoundedSocket, ssl.SSLSocket):
        ends = time.monotonic() + MOST_TIMEOUTS * timeout

    context = ssl.create_default_context(cafile=ca_file or None)
    context.sslsocket_class = BoundedTlsSocket
    return context
