"""Connections that end: what the other side says counts, in time and in bytes, until we say something again.

A time-out of a socket begins anew with each piece, and http.client and smtplib read on for as long as something comes:
one byte now and then held a thread for ever, and a mail server whose greeting has no last line filled the memory.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

MOST_BYTES = 256 * 1024  # of all answers of a connection; the longest honest one has some 10 KiB


class ConnectionLimits:
    """What the other side of one connection has left."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._left = seconds, MOST_BYTES
        self.begin()

    def begin(self) -> None:
        """An answer is waited for from now on."""
        self._until = time.monotonic() + self._seconds

    def seconds(self) -> float:
        """So long may it still take.

        Raises:
            TimeoutError: it took too long.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
        return left

    def count(self, bytes_read: int) -> None:
        """So much has come.

        Raises:
            OSError: that is too much.
        """
        self._left -= bytes_read
        if self._left < 0:
            raise OSError(errno.EMSGSIZE, "it answers without end")


class _Limited(socket.socket):
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


def connected(host: str, port: int, limits: ConnectionLimits) -> socket.socket:
    """A connection to the first of its addresses that takes one.

    Raises:
        OSError: none does.
    """
    limits.begin()
    fault: OSError = OSError(errno.EHOSTUNREACH, "it has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        made = _Limited(family, kind, protocol)
        made.limits = limits
        try:
            made.settimeout(limits.seconds())
            made.connect(where)
        except OSError as error:
            made.close()
            fault = error
        else:
            return made
    raise fault


def encrypting(trusted: ssl.SSLContext, limits: ConnectionLimits) -> ssl.SSLContext:
    """*trusted*, whose connections count what is said in them, too."""
    import ssl

    class LimitedTls(_Limited, ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            self.limits.begin()
            self.settimeout(self.limits.seconds())
            super().do_handshake(block)

    LimitedTls.limits = limits
    trusted.sslsocket_class = LimitedTls
    return trusted
