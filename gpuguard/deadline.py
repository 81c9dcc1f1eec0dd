"""Reads that may never come back, above all those of a process's memory, each in another thread.

A command line lies in the memory of its process, and the process can map a file there that never answers, because it
lies on a file system of the owner's (FUSE).  Then `ps` hangs.  Here one thread hangs for each such user, and nothing
more is known of that user until it comes back.  A user whose reads each come back just in time gets no more time than
one whose reads never do: see SHARE.  Time that a read waits for a processor does not count.  Decides nothing: a value
that was not read in time is unknown.
"""

from __future__ import annotations

import os
import threading
from resource import RUSAGE_THREAD, getrusage
from time import monotonic, thread_time
from typing import TYPE_CHECKING

from gpuguard.users import accountable_uid, user_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

FILE_SECONDS = 0.5  # the worker that reads the devices has 1.5 s for each
SECONDS_AGAIN = 0.02  # while other reads hang, so that many users with such reads do not take the time of all
SHARE = 0.05  # of all time may go to reads of one user's processes, in the long run
NOTICED = 0.002  # seconds; 200 processes whose reads each take less hold up nothing
MOST_HANGING = 16  # hanging or slow reads; then none is tried for uids without a name: one user can have 65536 of them


class _Within(threading.local):
    """What the reads within a read took, in each thread; they are counted separately."""

    seconds, waits = 0.0, 0


class _ReadingThread:
    """A thread that reads for others, again and again."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.asked, self.answered = threading.Lock(), threading.Lock()
        self.asked.acquire()
        self.answered.acquire()
        self.read: Callable[[], object] | None = None
        self.result: object = None
        self.fault: BaseException | None = None
        self.took = 0.0  # seconds, without those in which others had the processor
        threading.Thread(target=self._run, name="gpuguard reads", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.asked.acquire()
            assert self.read
            self.result = self.fault = None
            _within.seconds, _within.waits = 0.0, 0
            took = stopwatch()
            try:
                self.result = self.read()
            except BaseException as fault:  # noqa: BLE001  it is raised in the thread that asked for the read
                self.fault = fault
            self.took = took()
            self.answered.release()


_within = _Within()
_free: list[_ReadingThread] = []
Key = tuple[int, str]  # accountable uid, kind of read
_hanging: dict[Key, _ReadingThread] = {}  # readers that still wait for something of that user
_spent: dict[Key, tuple[float, float]] = {}  # seconds that slow reads took, and when; SHARE of the time pays them off


def in_time(pid: int, kind: str, read: Callable[[], T], times: int = 1) -> T | None:
    """Return what *read* returns about a process, or None if it fails or does not come back.

    Args:
        pid: of the process.
        kind: what is read; while one read of a user's processes hangs, no other one of that kind is tried.
        read: is called in another thread.  An OSError that it raises gives None; any other error is raised here.
        times: how many times as long as one read it may take, if there are several such reads in it.
    """
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    key = accountable_uid(uid), kind
    _collect()
    begun = monotonic()
    owed = owed_by(begun)
    slow = len(owed.keys() | _hanging.keys())
    if key in _hanging or (slow >= MOST_HANGING and user_name(key[0]) == str(key[0])):
        return None
    left = _most(times, sum(owed.values()) - owed.get(key, 0.0)) - owed.get(key, 0.0)
    if left <= 0:
        return None
    try:
        reader = _free.pop() if _free else _ReadingThread()
        reader = reader if reader.pid == os.getpid() else _ReadingThread()
    except (IndexError, RuntimeError):  # another thread was quicker, or there are too many threads
        return None
    reader.read = read
    waits = _waits()
    reader.asked.release()
    came_back = reader.answered.acquire(timeout=left)
    now = monotonic()
    _within.seconds += now - begun
    _within.waits += _waits() - waits
    charge(key, reader.took if came_back else now - begun, now)
    if not came_back:
        _hanging[key] = reader
        return None
    result, fault = reader.result, reader.fault
    _free.append(reader)
    if fault and not isinstance(fault, OSError):
        raise fault
    return result  # type: ignore[return-value]


def _collect() -> None:
    """Take back the readers that no longer hang."""
    for key, reader in list(_hanging.items()):
        if reader.pid != os.getpid():  # we were forked: its thread stayed with the parent
            _hanging.pop(key, None)
            _spent.clear()
        elif reader.answered.acquire(blocking=False):
            _hanging.pop(key, None)
            _free.append(reader)


def _waits() -> int:
    """How often this thread has waited for something other than a processor."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw


def stopwatch() -> Callable[[], float]:
    """Return a function that gives this thread's seconds since now, without those in which others had the processor."""
    begun, used, waits = monotonic(), thread_time(), _waits()

    def took() -> float:
        waited = _waits() - waits > _within.waits
        return monotonic() - begun - _within.seconds if waited else thread_time() - used

    return took


def charge(key: Key, took: float, now: float, noticed: float = NOTICED) -> None:
    """Charge a user for a read that took so many seconds; SHARE of the time from *now* (monotonic) on pays it off."""
    if took > noticed:
        _spent[key] = owed_by(now).get(key, 0.0) + took, now


def owed_by(now: float) -> dict[Key, float]:
    """The seconds that slow reads of each user took and that are not paid off yet."""
    for key, (seconds, since) in list(_spent.items()):
        if seconds <= (now - since) * SHARE:
            _spent.pop(key, None)
    return {key: seconds - (now - since) * SHARE for key, (seconds, since) in list(_spent.items())}


def _most(times: int, others: float) -> float:
    """How long a read of one user may take, if other slow reads have just taken *others* seconds."""
    if times > 1:
        return times * FILE_SECONDS
    return SECONDS_AGAIN if _hanging else max(SECONDS_AGAIN, FILE_SECONDS - others)
