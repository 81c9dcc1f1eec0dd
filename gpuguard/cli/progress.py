"""A progress bar on the terminal for work that takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpuguard.cli.terminal import rewrite, rewrites
from gpuguard.units import format_duration

SHOWN_AFTER = 2.0  # seconds after which a wait needs an explanation
DRAWN_EVERY = 0.2  # seconds
_COLUMNS = 24


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on stderr, if that is a terminal, while the block runs longer than SHOWN_AFTER; remove it at the end.

    The function that comes back takes the share that is done, 0 to 1.  Until it is called, the bar only shows that time
    passes.
    """
    share: float | None = None
    ended = threading.Event()

    def advance(done: float) -> None:
        nonlocal share
        share = min(done, 1.0)

    def draw() -> None:
        began = time.monotonic()
        if ended.wait(SHOWN_AFTER):
            return
        while not ended.is_set():
            seconds = time.monotonic() - began
            rewrite(f"{what}  {bar(share, seconds)} {_how_long(share, seconds)}")
            ended.wait(DRAWN_EVERY)
        rewrite("")

    drawing = threading.Thread(target=draw, daemon=True) if rewrites() else None
    if drawing:
        drawing.start()
    try:
        yield advance
    finally:
        ended.set()
        if drawing:
            drawing.join()


def bar(share: float | None, seconds: float = 0.0) -> str:
    """Return ``"[#########...........]"``, or a mark that moves with time if the share that is done is unknown."""
    if share is None:
        at = int(seconds * 5) % (_COLUMNS - 2)
        return f"[{'.' * at}###{'.' * (_COLUMNS - 3 - at)}]"
    return f"[{'#' * int(share * _COLUMNS):.<{_COLUMNS}}]"


def _how_long(share: float | None, seconds: float) -> str:
    """Return ``"45%, 7s left"``, or how much time has passed if the share is unknown."""
    if share is None:
        return format_duration(seconds)
    return f"{share:.0%}" + (f", {format_duration(seconds * (1 - share) / share)} left" if share >= 0.05 else "")
