"""What the daemon tells the admin about the claim directory: a lock that one user keeps from all, room that runs out.

Says each thing once as long as it lasts.  Changes nothing: root decides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.disk_room import SCARCE, room_for_records
from gpuguard.claims.holders import inode_of, takers_of
from gpuguard.users import user_name

LOOK_SECONDS = 5.0  # between two looks
HELD_SECONDS = 10.0  # the gate is held while the driver answers; who leads the queue, or watches that, has a ticket

Said = Callable[[str, str, str], object]  # kind and outcome of an event, and its message


class ClaimUpkeep:
    """Looks at the claim directory now and then, and tells *say* what is wrong."""

    def __init__(self, directory: LockDirectory, say: Said) -> None:
        self._directory, self._say = directory, say
        self._look_at = 0.0
        self._held: Mapping[tuple[str, int], float] = {}  # name of a lock and the pid that took it -> since when
        self._told: set[tuple[str, int]] = set()
        self._was_scarce = False

    def look(self, pids_in_queue: Iterable[int | None]) -> None:
        """What is there now.  *pids_in_queue*: of the processes that wait, which may hold the locks of the queue."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        with suppress(OSError):  # it is being removed
            self._look_at_locks(now, frozenset(pids_in_queue))
            self._look_at_room()

    def _look_at_locks(self, now: float, waiting: frozenset[int | None]) -> None:
        directory = self._directory
        paths = {name: directory.lock_path(name) for name in ("gate", "queue")} | {"directory": directory.locks}
        names = {inode: name for name, path in paths.items() if (inode := inode_of(path))}
        taken = [(names[inode], int(pid)) for inode, pid in takers_of(names)]
        self._held = {
            lock: self._held.get(lock, now)
            for lock in taken
            if lock[0] == "gate" or lock[1] not in {*waiting, os.getpid()}
        }
        self._told &= self._held.keys()
        for lock, since in self._held.items():
            if now - since >= HELD_SECONDS and lock not in self._told:
                self._told.add(lock)
                name, pid = lock
                self._say("claims", "lock kept", f"{_taker(pid)} keeps {paths[name]} locked, so every start is delayed")

    def _look_at_room(self) -> None:
        status = os.statvfs(self._directory.records)
        scarce = status.f_files > 0 and status.f_ffree < (1 - SCARCE) * status.f_files
        scarce = scarce or status.f_bavail < (1 - SCARCE) * status.f_blocks
        if scarce and not self._was_scarce and (room := room_for_records(self._directory)).own:
            self._say("claims", "no room", f"records and tickets of users have little room left: {room.in_words()}")
        self._was_scarce = scarce


def _taker(pid: int) -> str:
    try:
        return f"pid {pid} of {user_name(os.stat(f'/proc/{pid}').st_uid)}"
    except OSError:
        return f"pid {pid}, which has ended and left it to another process,"
