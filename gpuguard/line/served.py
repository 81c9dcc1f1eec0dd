"""When a user last left the line with a claim: while that goes on he is not overdue, however old his other tickets are.

    served.UID           of that user, who could also remove it, or turn its time back
    daemon/served.UID    of the daemon, where it gives the locks, because users may be hostile there

The later one counts.  Does not say who is overdue: see order.
"""

from __future__ import annotations

import os
from contextlib import suppress

from gpuguard.claims.daemonfiles import daemon_files
from gpuguard.claims.inplace import made_in_place, status_in_place
from gpuguard.claims.lockfiles import LockDirectory


def note(directory: LockDirectory, uid: int, *, by_daemon: bool = False) -> None:
    """Write down that a request of *uid* was served now, although others wait."""
    path = daemon_files(directory).file(f"served.{uid}") if by_daemon else _own(directory, uid)
    with suppress(OSError):
        mark = made_in_place(path, os.O_WRONLY | os.O_NONBLOCK, 0o644)
        try:
            os.utime(mark)
        finally:
            os.close(mark)


def last(directory: LockDirectory, uid: int) -> float | None:
    """When that was, unix time; None: nobody knows of it."""
    places: list[tuple[str, tuple[int, ...]]] = [(_own(directory, uid), (uid,))]
    if directory.keeper is not None:
        files = daemon_files(directory)
        places.append((files.file(f"served.{uid}"), files.owners()))
    times = []
    for path, owners in places:
        with suppress(OSError):
            status = status_in_place(path)
            times += [status.st_mtime] if status.st_uid in owners else []
    return max(times, default=None)


def _own(directory: LockDirectory, uid: int) -> str:
    return f"{directory.records}/{directory.prefix}served.{uid}"
