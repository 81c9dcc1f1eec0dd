"""Looks that may never come back, each in another thread: at what a process has in its memory, above all.

A command line lies in the memory of its process, and whoever reads it waits while that memory is being changed.  That
takes as long as its owner likes: he reads a file of a file system of his own there (FUSE), which never answers.  `ps`
hangs, then.  Here one thread hangs for each such user, and of him nothing more is known until it comes back.  Who lets
each look come back just in time, at each of his processes, gets no more time than who never does: see SHARE.  What a
look waits for a processor is nobody's fault.
Decides nothing: what was not seen in time is unknown.
"""

from __future__ import annotations

import os
from _thread import _local, allocate_lock, start_new_thread
from resource import RUSAGE_THREAD, getrusage
from time import monotonic, thread_time
from typing import TYPE_CHECKING

from gpuguard.users import user_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

SECONDS = 0.5  # a look takes 0.05 ms; the sampler has 1.5 s for a device
SECONDS_AGAIN = 0.02  # while others hang: many users who do so must not take the time of all
SHARE = 0.05  # of all time may go to looks at one user, in the long run
NOTICED = 0.002  # seconds; who has 200 processes of which each look takes less holds up nobody
MOST_HANGING = 16  # or nearly so: from then on none of users without a name, of whom one user can have 65536


class _Within(_local):
    """What looks within a look took, in each thread: they count by themselves."""

    seconds, waits = 0.0, 0


class _Reader:
    """A thread that looks for others, again and again."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.asked, self.answered = allocate_lock(), allocate_lock()
        self.asked.acquire()
        self.answered.acquire()
        self.look: Callable[[], object] | None = None
        self.found: object = None
        self.fault: BaseException | None = None
        self.took = 0.0  # seconds, without those in which others had the processor
        start_new_thread(self._run, ())

    def _run(self) -> None:
        while True:
            self.asked.acquire()
            assert self.look
            self.found = self.fault = None
            _within.seconds, _within.waits = 0.0, 0
            took = stopwatch()
            try:
                self.found = self.look()
            except BaseException as fault:  # noqa: BLE001  it is raised where somebody asked for the look
                self.fault = fault
            self.took = took()
            self.answered.release()


_within = _Within()
_free: list[_Reader] = []
Key = tuple[int, str]  # uid, kind of the look
_hanging: dict[Key, _Reader] = {}  # who still waits for something of that user
_spent: dict[Key, tuple[float, float]] = {}  # seconds that slow looks took, and when; SHARE of the time pays it off


def in_time(pid: int, kind: str, look: Callable[[], T], times: int = 1) -> T | None:
    """What *look* finds at a process; None: it fails, or does not come back.

    Args:
        pid: of the process.
        kind: what is looked at; of whom one look hangs no other one of that kind is tried.
        look: called in another thread; an OSError that it raises is nothing found, another error the caller's.
        times: how much longer than one it may take, of a look with such looks in it.
    """
    try:
        key = os.stat(f"/proc/{pid}").st_uid, kind
    except OSError:
        return None
    _welcome_back()
    begun = monotonic()
    owed = owed_by(begun)
    slow = len(owed.keys() | _hanging.keys())
    if key in _hanging or (slow >= MOST_HANGING and user_name(key[0]) == str(key[0])):
        return None
    left = _most(times, sum(owed.values()) - owed.get(key, 0.0)) - owed.get(key, 0.0)
    if left <= 0:
        return None
    try:
        looker = _free.pop() if _free else _Reader()
        looker = looker if looker.pid == os.getpid() else _Reader()
    except (IndexError, RuntimeError):  # another thread was quicker; there are too many threads
        return None
    looker.look = look
    waits = _waits()
    looker.asked.release()
    came_back = looker.answered.acquire(timeout=left)
    now = monotonic()
    _within.seconds += now - begun
    _within.waits += _waits() - waits
    took = looker.took if came_back else now - begun
    charge(key, took, now)
    if not came_back:
        _hanging[key] = looker
        return None
    found, fault = looker.found, looker.fault
    _free.append(looker)
    if fault and not isinstance(fault, OSError):
        raise fault
    return found  # type: ignore[return-value]


def _welcome_back() -> None:
    """Whoever hung and does not any more."""
    for one, looker in list(_hanging.items()):
        if looker.pid != os.getpid():  # of whom we are a copy: it has no thread here
            _hanging.pop(one, None)
            _spent.clear()
        elif looker.answered.acquire(False):
            _hanging.pop(one, None)
            _free.append(looker)


def _waits() -> int:
    """How often this thread has waited for something else than a processor."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw


def stopwatch() -> Callable[[], float]:
    """Says how many seconds have gone since, in this thread, without those in which others had the processor."""
    begun, used, waits = monotonic(), thread_time(), _waits()

    def took() -> float:
        waited = _waits() - waits > _within.waits
        return monotonic() - begun - _within.seconds if waited else thread_time() - used

    return took


def charge(key: Key, took: float, now: float) -> None:
    """A look at that user took so many seconds: SHARE of the time from *now* (monotonic) on pays it off."""
    if took > NOTICED:
        _spent[key] = owed_by(now).get(key, 0.0) + took, now


def owed_by(now: float) -> dict[Key, float]:
    """The seconds that slow looks took and that are not paid off yet."""
    for key, (seconds, since) in list(_spent.items()):
        if seconds <= (now - since) * SHARE:
            _spent.pop(key, None)
    return {key: seconds - (now - since) * SHARE for key, (seconds, since) in list(_spent.items())}


def _most(times: int, others: float) -> float:
    """How long looks at one user may take, where those at *others* took so long just now."""
    if times > 1:
        return times * SECONDS
    return SECONDS_AGAIN if _hanging else max(SECONDS_AGAIN, SECONDS - others)
