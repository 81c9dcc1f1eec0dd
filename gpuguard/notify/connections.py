"""Connections that end: each answer of the other side is bounded in time, and all of them together in bytes.

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


class ConnectionLimits:
    """The time and the bytes that the other side of one connection has left."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._left = seconds, MOST_BYTES
        self.begin()

    def begin(self) -> None:
        """Start the time within which the next answer must come."""
        self._until = time.monotonic() + self._seconds

    def seconds(self) -> float:
        """Return how long the answer may still take.  Raises TimeoutError: it took too long."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, sentence("notify.no_answer", "no answer in time"))
        return left

    def count(self, bytes_read: int) -> None:
        """Count the bytes that have come.  Raises OSError: they are too many."""
        self._left -= bytes_read
        if self._left < 0:
            raise OSError(errno.EMSGSIZE, sentence("notify.endless_answer", "it answers without end"))


class _LimitedSocket(socket.socket):
    limits: ConnectionLimits

    def recv_into(self, *into: Any, **how: Any) -> int:
        self.settimeout(self.limits.seconds())
        got = super().recv_into(*into, **how)
        self.limits.count(got)
        return got

    def sendall(self, *what: Any, **how: Any) -> None:
        self.limits.begin()
        self.settimeout(self.limits.seconds())
        super().sendall(*what, **how)
        self.limits.begin()

    def send(self, *what: Any, **how: Any) -> int:
        self.settimeout(self.limits.seconds())
        return super().send(*what, **how)


def connect(host: str, port: int, limits: ConnectionLimits) -> socket.socket:
    """Connect to the first address of *host* that accepts.  Raises OSError: none does."""
    limits.begin()
    fault: OSError = OSError(errno.EHOSTUNREACH, sentence("notify.no_address", "it has no address"))
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = _LimitedSocket(family, kind, protocol)
        connection.limits = limits
        try:
            connection.settimeout(limits.seconds())
            connection.connect(address)
        except OSError as error:
            connection.close()
            fault = error
        else:
            return connection
    raise fault


def limit_tls(context: ssl.SSLContext, limits: ConnectionLimits) -> ssl.SSLContext:
    """Return *context*, whose connections now keep to *limits*."""

    class LimitedTlsSocket(_LimitedSocket, ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            self.limits.begin()
            self.settimeout(self.limits.seconds())
            super().do_handshake(block)

    LimitedTlsSocket.limits = limits
    context.sslsocket_class = LimitedTlsSocket
    return context
