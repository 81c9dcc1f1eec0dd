"""How a worker and its client talk over their pipes.  How a worker is started and ended: see spawn.

Messages travel in frames: a 4-byte length and a marshal of a tuple.  Which device is being read is no frame, of which
each would wake the client up: it is written into a file in memory, which the client reads when it has waited too long.
"""

from __future__ import annotations

import marshal
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LONGEST = 2**26  # bytes of a frame: as a length any four letters are more

Mark = tuple["int | None", float]  # the index of the device that is read, None: none; and since when (monotonic)


def write_mark(mark: int, index: int | None) -> None:
    """Mark that device *index* is about to be read; None: none of them."""
    number = -1 if index is None else index
    os.pwrite(mark, number.to_bytes(8, "little", signed=True) + time.monotonic_ns().to_bytes(8, "little"), 0)


def read_mark(mark: int) -> Mark:
    """What was marked last; one that is just being written may be read half."""
    marked = os.pread(mark, 16, 0)
    index = int.from_bytes(marked[:8], "little", signed=True)
    return None if index < 0 else index, int.from_bytes(marked[8:], "little") / 1e9


def send(descriptor: int, message: Any) -> None:
    """Write one frame."""
    body = marshal.dumps(message)
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def receive(descriptor: int, ready: Callable[[], object] | None = None) -> Any:
    """Read one frame; None when the other end is gone, or of no use: a library has printed into the pipe.

    What follows that could not be told apart, and text taken for a length would be waited for.

    Args:
        descriptor: to read from.
        ready: called before each piece of it is read; returns when one is there, or raises what this raises then.
    """
    head = _read(descriptor, 4, ready)
    size = int.from_bytes(head, "little")
    try:
        body = _read(descriptor, size, ready) if size <= LONGEST else b""
        found = marshal.loads(body) if body else None
        return found if type(found) is tuple else None
    except (ValueError, EOFError, TypeError):
        return None


def _read(descriptor: int, count: int, ready: Callable[[], object] | None) -> bytes:
    parts = b""
    while len(parts) < count:
        if ready:
            ready()
        part = os.read(descriptor, count - len(parts))
        if not part:
            return b""
        parts += part
    return parts
