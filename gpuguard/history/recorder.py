"""Writes the usage store in a thread of its own, so that a full, locked or slow disk holds up no other thread.

The thread that samples adds each snapshot to the sums, and never waits for a disk.  Slots are written when they are
complete, so that a crash loses only the current one.  Slots that cannot be written wait in memory, and an admin is told
once.  Does not compute the sums: see schema.  Does not know the file: see store.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from gpuguard.errors import GpuguardError
from gpuguard.history import store
from gpuguard.history.queries import SpentSeconds, Usage
from gpuguard.history.store_schema import WIDTH, Slot, UsageSums, Wanted
from gpuguard.locale.messages import all_of, sentence
from gpuguard.model import Snapshot

PENDING = 720  # slots that may wait to be written: 2 hours, some 10 MiB with 8 devices
WRITE_SECONDS = float(WIDTH)  # between two writes of the complete slots; spent() is updated after each
REOPEN_SECONDS = 10.0
SUMS_SHARE = 100  # the windows of quotas are summed so rarely that this takes 1 % of the time at most

Say = Callable[[str], object]


class Recorder:
    """The one writer of the usage store at *path*.  It calls *say* once with each thing that an admin should read."""

    def __init__(self, path: str, say: Say) -> None:
        self.path = path
        self.windows: frozenset[float] = frozenset()  # in seconds, those that spent() covers
        self.trouble: str | None = sentence("usage_store.not_open", "it is not open yet")
        self._tried = threading.Event()  # set once trouble tells whether it could be opened
        self._say, self._said = say, False
        self._spent: SpentSeconds = {}
        self._summed: tuple[frozenset[float], dict[int, dict[float, float]]] = (frozenset(), {})
        self._newer = False  # something was written since the windows were summed
        self._sum_at = 0.0  # time.monotonic() from which on the windows may be summed again
        self._thread = threading.Thread(target=self._run, name="gpuguard-usage", daemon=True)
        self._stopping = threading.Event()
        self._sums = UsageSums()
        self._adding = threading.Lock()  # held while the sums change
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._checked = False  # the whole file was checked for damage
        self._damaged = 0  # how often a store was set aside; after the second time nothing is recorded any more
        self._retry_at = 0.0

    def start(self) -> None:
        """Start the thread, which opens the store."""
        self._thread.start()

    def record(self, snapshot: Snapshot, longest: float, wanted: Wanted | None = None) -> None:
        """Add *snapshot* to the sums, waiting only for these.  Call it from one thread only.  See UsageSums.add()."""
        with self._adding:
            self._sums.add(snapshot, longest, wanted)
            slots = self._sums.slots
            for slot in sorted(slots)[: max(0, len(slots) - PENDING)]:
                del slots[slot]

    def spent(self) -> SpentSeconds:
        """GPU-seconds that each user has claimed in each of the windows, or {} if that is unknown."""
        return self._spent

    def why_unknown(self, seconds: float) -> str | None:
        """Why spent() is unknown, or None if it is known or nothing is recorded.

        Waits at most *seconds* for the store to be opened.
        """
        if not self._thread.is_alive():
            return None
        self._tried.wait(seconds)
        return self.trouble

    def stop(self, seconds: float) -> None:
        """Write all slots and close the store.  If that takes longer than *seconds*, the thread finishes it alone."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._write()
            self._tried.set()
            while not self._stopping.wait(WRITE_SECONDS):
                self._write()
                self._sum()
            self._retry_at = 0.0
            self._write(everything=True)
        finally:
            ended = sentence("usage_store.writer_ended", "its writer has ended")
            self.trouble, self._spent = self.trouble or ended, {}
            self._tried.set()
            self._close()

    def _write(self, *, everything: bool = False) -> None:
        """Write the complete slots, unless that failed a moment ago."""
        if time.monotonic() < self._retry_at or self._damaged > 1:
            return
        with self._adding:
            complete = self._sums.complete(all_of_them=everything)
            if self._connection and not complete:
                return
            for number in complete:  # anything that is added to one of them from now on is written next time
                del self._sums.slots[number]
            devices = self._sums.now.devices if self._sums.now else ()
        try:
            self._lock = store.lock(self.path) if self._lock is None else self._lock
            self._connection = self._connection or store.opened(self.path, check=not self._checked)
            self._checked = True
            if complete:
                store.write(self._connection, complete, devices)
                complete = {}
                store.move_journal(self._connection)
                self._newer = True
        except (OSError, sqlite3.Error, MemoryError, GpuguardError) as error:
            with self._adding:
                for number, slot in complete.items():
                    self._sums.slots.setdefault(number, Slot()).add(slot, 1.0)
            self._fail(error)
        else:
            if self._said:
                self._said = False
                self._say(
                    sentence("usage_store.written_again", "the usage store {path} is written again", path=self.path)
                )
            self.trouble = None

    def _fail(self, error: Exception) -> None:
        self._close()
        self._spent, self._summed = {}, (frozenset(), {})
        self._retry_at = time.monotonic() + REOPEN_SECONDS
        reason = str(error)
        if not isinstance(error, (GpuguardError, store.Outdated)):  # whose texts are sentences
            reason = " ".join(reason.split()).rstrip(".") or sentence("usage_store.no_memory", "no memory is left")
        if isinstance(error, OSError):
            reason = sentence(
                "usage_store.other_place",
                "{error}: {path}; GPUGUARD_STATE_DIR names another place",
                error=str(error.strerror),
                path=str(error.filename),
            )
        facts = {"path": self.path, "reason": reason}
        if type(error) is sqlite3.DatabaseError:  # its subclasses are about the disk and locks
            self._set_aside(
                sentence("usage_store.damaged", "the usage store {path} is damaged ({reason})", **facts), "damaged"
            )
        elif isinstance(error, store.Outdated):
            self._set_aside(
                sentence(
                    "usage_store.outdated", "the usage store {path} is of an earlier gpuguard ({reason})", **facts
                ),
                "old",
            )
        else:
            self.trouble = sentence(
                "usage_store.unwritable", "the usage store {path} cannot be written: {reason}", **facts
            )
            if not self._said:
                self._said = True
                kept = sentence(
                    "usage_store.kept_in_memory",
                    "it is tried again, and what GPUs are used for is kept in memory for 2 hours",
                )
                self._say(all_of((self.trouble, kept)))

    def _set_aside(self, trouble: str, why: str) -> None:
        self._damaged += 1
        self._checked = False
        self.trouble = trouble
        try:
            name = store.set_aside(self.path, why)
        except OSError as error:
            self._say(
                sentence(
                    "usage_store.not_renamed",
                    "{why} and cannot be renamed: {error}; nothing is recorded until the next start",
                    why=trouble,
                    error=str(error),
                )
            )
            self._damaged += 1
            return
        renamed = (
            sentence("usage_store.renamed", "it was renamed to {name}, a new one is begun", name=name)
            if self._damaged == 1
            else sentence(
                "usage_store.renamed_again",
                "it was renamed to {name}, for the second time: nothing is recorded any more",
                name=name,
            )
        )
        self._say(all_of((trouble, renamed)))
        if self._damaged == 1:
            self._retry_at = 0.0
            self._write()

    def _sum(self) -> None:
        """Update spent() from the slots that are written and those that wait to be."""
        windows, now = self.windows, self._sums.now
        if not windows or not self._connection or not now:
            self._spent = {}
            return
        begun = time.monotonic()
        if self._summed[0] != windows or (self._newer and begun >= self._sum_at):
            try:
                self._summed = windows, Usage(self._connection, now.taken_at).gpu_seconds(windows)
            except (sqlite3.Error, MemoryError) as error:
                self._fail(error)
                return
            self._newer = False
            self._sum_at = time.monotonic() + SUMS_SHARE * (time.monotonic() - begun)
        spent = {uid: dict(seconds) for uid, seconds in self._summed[1].items()}
        with self._adding:
            waiting = [(number, slot.users.copy()) for number, slot in self._sums.slots.items()]
        for number, users in waiting:
            for (uid, _), times in users.items():
                seconds = spent.setdefault(uid, {})
                for window in windows:
                    if number * WIDTH >= now.taken_at - window:
                        seconds[window] = seconds.get(window, 0.0) + times[0] / 1000
        self._spent = spent

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection:
            with suppress(sqlite3.Error):
                connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
