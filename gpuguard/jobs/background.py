"""A process that stays behind when the command that started it has ended: to hold a claim, for one."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable


def detach(keep: Collection[int]) -> None:
    """Leave the terminal, the directory and every descriptor but those of *keep*."""
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number not in keep:
            try:
                os.close(number)
            except OSError:
                continue  # the one of listdir itself


def listen(signals: Iterable[int]) -> tuple[int, int]:
    """From now on each of *signals* is written into a pipe as one byte, and does nothing else: the pipe's two ends."""
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake)
    for signum in signals:
        signal.signal(signum, lambda number, frame: None)
    return woken, wake
