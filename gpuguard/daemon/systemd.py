"""What a service owes its manager: notices of its state to systemd, and signals heard between two of its rounds."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress


def notify_systemd(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send *state* to the service manager that started us, if one did: sd_notify(3)."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        # It may be starting anew, and will expect signs of life again; or there is no descriptor left for now.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as messenger:
            messenger.settimeout(1.0)
            messenger.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


@contextmanager
def signal_waiter(*numbers: signal.Signals) -> Iterator[Callable[[float], set[int]]]:
    """A function that waits so many seconds for these signals and returns those that came."""
    # A pipe instead of blocked signals: hooks would inherit those.
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(reader, select.POLLIN)

    def wait(seconds: float) -> set[int]:
        return set(os.read(reader, 1024)) if poll.poll(seconds * 1000) else set()

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(former)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
