"""The daemon's warnings about the claim directory: a lock that one user keeps from all others, room that runs out.

Each warning is given once for as long as its cause lasts.  This module changes nothing, because that is up to root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from glob import glob

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.disk_room import SCARCE, room_for_records
from gpuguard.claims.holders import inode_of, takers_of
from gpuguard.locale.messages import sentence
from gpuguard.model import EventKind, EventOutcome
from gpuguard.users import user_name

LOOK_SECONDS = 5.0  # between two looks
HELD_SECONDS = 10.0  # the gate is held while the driver answers; the leader of the queue and its deputy have tickets

_Lock = tuple[str, int]  # a path, and the pid of the process that took its lock


class ClaimUpkeep:
    """A periodic check of the claim directory, which reports faults to *say* as an event's kind, outcome and text."""

    def __init__(self, directory: LockDirectory, say: Callable[[EventKind, EventOutcome, str], object]) -> None:
        self._directory, self._say = directory, say
        self._look_at = 0.0
        self._held: Mapping[_Lock, float] = {}  # since when
        self._told: Mapping[str, tuple[EventOutcome, str]] = {}

    def look(self, pids_in_queue: Iterable[int | None]) -> None:
        """Check the directory if it is time.  The waiting processes *pids_in_queue* may hold the locks of the queue."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        with suppress(OSError):  # the directory is being removed
            self._held = {lock: self._held.get(lock, now) for lock in self._locks({*pids_in_queue, os.getpid()})}
            late = [lock for lock, since in self._held.items() if now - since >= HELD_SECONDS]
            found = {**self._scarce_room(), **{str(lock): _kept(*lock) for lock in late}}
            for trouble in found.keys() - self._told.keys():
                self._say("claims", *found[trouble])
            self._told = found

    def _locks(self, allowed: set[int | None]) -> Iterable[_Lock]:
        directory = self._directory
        paths = {inode_of(path): path for path in (directory.locks, *glob(directory.lock_path("*")))}
        taken = [(paths[inode], int(pid), kind) for inode, pid, kind in takers_of(paths) or ()]
        of_queue = {directory.locks, directory.lock_path("queue")}
        # A claim of a share or of a MIG instance locks that for itself, and the GPU jointly with other claims.
        claim = {pid for path, pid, kind in taken if kind == "WRITE" and path not in of_queue}
        for path, pid, kind in taken:
            is_allowed = (
                pid in allowed
                if path in of_queue
                else path != directory.lock_path("gate") and (kind != "READ" or pid in claim)
            )
            if not is_allowed:
                yield path, pid

    def _scarce_room(self) -> dict[str, tuple[EventOutcome, str]]:
        path = self._directory.records
        room, own = os.statvfs(path), os.stat(path).st_dev != os.stat(os.path.dirname(path)).st_dev
        plenty = room.f_ffree >= (1 - SCARCE) * room.f_files and room.f_bavail >= (1 - SCARCE) * room.f_blocks
        if plenty or not own:
            return {}
        if told := self._told.get("room"):
            return {"room": told}
        words = room_for_records(self._directory).in_words()
        text = sentence("room.little", "records and tickets have little room left: {room}", room=words)
        return {"room": ("no room", text)}


def _kept(path: str, pid: int) -> tuple[EventOutcome, str]:
    taker = sentence("process.pid", "pid {pid}", pid=pid)
    with suppress(OSError):  # it has ended, and another process still has the lock open
        user = user_name(os.stat(f"/proc/{pid}").st_uid)
        taker = sentence("process.of_user", "pid {pid} of {user}", pid=pid, user=user)
    return "lock kept", sentence(
        "lock.kept", "{process} keeps {path} locked, so every start is delayed", process=taker, path=path
    )
