"""What a service owes its manager: telling systemd how it is, and hearing signals between two of its rounds.

Does nothing of its own: see daemon.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress


def tell_systemd(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send *state* to the service manager that started us, if one did: sd_notify(3)."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        # It restarts, and will ask for signs of life again; or there is no descriptor left for now.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as messenger:
            messenger.settimeout(1.0)
            messenger.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


@contextmanager
def signals(*numbers: signal.Signals) -> Iterator[Callable[[float], set[int]]]:
    """A function that waits so many seconds for these signals and returns those that came."""
    # A pipe instead of blocked signals: hooks would inherit those.
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    former = {number: signal.signal(number, lambda *_: None) for number in numbers}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(reader, select.POLLIN)

    def wait(seconds: float) -> set[int]:
        return set(os.read(reader, 1024)) if poll.poll(seconds * 1000) else set()

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
