"""The leader of the queue: it notices changes, samples once for all requests, and wakes those that may start.

The driver is read only after something that matters has ended: a claim, a ticket, or a process without a claim.  The
kernel reports when the last holder of a file that was open for writing closes it, however the holder dies (inotify,
IN_CLOSE_WRITE).  So a process that watches the directory of records and tickets is woken, while reading these files
wakes none.  Where the kernel reports nothing (no inotify watch is left, memory is still being freed, a utilization must
fall), the leader samples again after a while, less and less often.  Does not decide which process leads: see waiter.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import locks_held
from gpuguard.device_state import idle_limit
from gpuguard.files import wait_for
from gpuguard.queue.priority import Ticket
from gpuguard.queue.state import QueueState, is_responsive
from gpuguard.queue.tickets import wake

MAY_START = b"."  # the byte that wakes a process that may start
HEALTH_SECONDS = 300.0  # between two checks for devices that were lost or came back
SAMPLE_SECONDS = 10.0  # between two samples while a request waits for something that the kernel does not report
SETTLE_SECONDS = 0.25  # the first pause while an unclaimed device is not empty yet; each further one is twice as long
CHECK_SECONDS = (0.02, 0.2, 2.0)  # after a file was closed, because its lock is released a moment later
POLL_SECONDS = 2.0  # between two checks of the locks and the tickets where inotify is not available
CLAIM_SECONDS = 0.002  # to wait for all locks of one claim, which are released one after the other
START_SECONDS = 0.5  # a request that was woken starts within this time, or is woken again
PART = 4  # samples because of tickets that come and go take at most one in so many parts of the time
MOST_WATCHED = 64  # processes without a claim whose end is awaited

# linux/inotify.h
_ATTRIB, _CLOSE_WRITE, _MOVED_TO, _DELETE, _DELETE_SELF, _OVERFLOW = 0x4, 0x8, 0x80, 0x200, 0x400, 0x4000
REPLACED = "replaced"  # reported in place of the name of a file elsewhere
_HEAD = struct.Struct("iIII")


class DirectoryWatch:
    """Reports which files of a directory appeared, were closed after writing, or were removed.

    Raises:
        OSError: the kernel gives this user no further watch (fs.inotify.max_user_instances).
    """

    def __init__(self, path: str) -> None:
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._directory = libc.inotify_add_watch(self.descriptor, os.fsencode(path), _CLOSE_WRITE | _MOVED_TO | _DELETE)
        if self._directory < 0:
            number = ctypes.get_errno()
            self.close()
            raise OSError(number, os.strerror(number), path)

    def follow(self, paths: Iterable[str]) -> None:
        """Report as well when one of these files elsewhere is removed or replaced; one that is missing is ignored."""
        for path in paths:
            self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), _ATTRIB | _DELETE_SELF)

    def names(self) -> set[str]:
        """The names of files that changed since the last call; "" is among them if the kernel lost some."""
        changed: set[str] = set()
        while True:
            try:
                events = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return changed
            while events:
                watch, mask, _, length = _HEAD.unpack_from(events)
                name = os.fsdecode(events[_HEAD.size : _HEAD.size + length].rstrip(b"\0"))
                changed.add("" if mask & _OVERFLOW else name if watch == self._directory else REPLACED)
                events = events[_HEAD.size + length :]

    def close(self) -> None:
        """Stop watching."""
        os.close(self.descriptor)


def watch_if_possible(path: str) -> DirectoryWatch | None:
    """Return a watch of a directory, or None if the kernel gives this user no further one: then look now and then."""
    with suppress(OSError):
        return DirectoryWatch(path)
    return None


class ProcessWatch:
    """Waits for the end of processes of any user."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # pid -> pidfd

    def watch(self, pids: Iterable[int]) -> set[int]:
        """Watch exactly these processes from now on; return those that cannot be watched or have ended already."""
        wanted, unwatched = set(pids), set()
        for pid in self._open.keys() - wanted:
            os.close(self._open.pop(pid))
        for pid in wanted - self._open.keys():
            try:
                self._open[pid] = os.pidfd_open(pid)
            except (OSError, OverflowError):  # it ended, is of another namespace or no pid, or no descriptor is left
                unwatched.add(pid)
        ended = wait_for(self._open.values(), 0.0)
        for pid in [pid for pid, descriptor in self._open.items() if descriptor in ended]:
            os.close(self._open.pop(pid))
            unwatched.add(pid)
        return unwatched

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that are readable once their process has ended."""
        return list(self._open.values())

    def close(self) -> None:
        """Stop watching all processes."""
        self.watch(())


class Leader:
    """Leads the queue of a machine with the devices *uuids*, until close().

    *read* samples the machine and the queue for all requests that wait.  It is told to read the health of devices as
    well now and then, and when a request that was woken did not start.
    """

    def __init__(self, directory: LockDirectory, uuids: Sequence[str], read: Callable[[bool], QueueState]) -> None:
        self._directory, self._uuids, self._read = directory, tuple(uuids), read
        self._processes = ProcessWatch()  # for those without a claim
        self._watch = watch_if_possible(directory.records)
        self._tickets: frozenset[str] = frozenset()  # names of their files, if there is no watch
        self._locked: frozenset[str] = frozenset()  # names of the locks that were held before the last sample
        self._startable: list[Ticket] = []  # the tickets that could start at the last sample
        self._woken_at: dict[str, float] = {}  # id of a ticket -> when it was woken, monotonic
        self._unresponsive: list[Ticket] = []
        self._checks: list[float] = []  # monotonic times at which the locks are checked
        self._sample_at = 0.0  # monotonic time at which the driver is read even if nothing is known to have ended
        self._start_pause = START_SECONDS  # until the same requests are woken again
        self._settle_pause = SETTLE_SECONDS
        self._health_at = time.monotonic() + HEALTH_SECONDS  # when the health of the devices is read next
        self._cost = 0.0  # seconds that the last sample took

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that are readable when something has happened."""
        return [*([self._watch.descriptor] if self._watch else []), *self._processes.descriptors]

    @property
    def until(self) -> float:
        """Monotonic time at which to call must_sample() again at the latest."""
        return min([self._sample_at, *self._checks])

    def must_sample(self, ready: Collection[int]) -> bool:
        """Whether it is time to sample; *ready* holds the descriptors that are readable."""
        now = time.monotonic()
        if self._watch and self._watch.descriptor in ready:
            names = self._watch.names()
            kinds = {name.removeprefix(self._directory.prefix).partition(".")[0] for name in names}
            if kinds & {"claim", ""}:  # its lock may be free in a moment
                self._checks = [now, *(now + after for after in CHECK_SECONDS)]
            if kinds & {"ticket", "reserve", "waived", REPLACED, ""}:
                self._sample_soon(now)
        if not set(self._processes.descriptors).isdisjoint(ready) or self._was_lock_released():
            self._settle_pause = SETTLE_SECONDS
            return True
        return time.monotonic() >= self._sample_at

    def sample(self, own: str) -> bool:
        """Sample once for all requests and wake those that may start, or never can; tell whether *own* is among them.

        *own* is the id of the leader's ticket.  It is passed each time, because the ticket may have been made anew.
        """
        began = time.monotonic()
        self._locked = locks_held(self._directory, self._uuids)
        if not self._watch:
            self._tickets = self._ticket_names()
        with_health = began >= self._health_at or any(
            began - self._woken_at[ticket.id] >= START_SECONDS and is_responsive(self._directory, ticket)
            for ticket in self._startable  # it was woken, and has not started
        )
        queue = self._read(with_health)
        now = time.monotonic()
        self._cost = now - began
        if with_health:
            self._health_at = now + HEALTH_SECONDS
        self._uuids = tuple(device.uuid for device in queue.snapshot.devices)
        # A request that cannot be met any more is woken as well, so that it finds that out for itself.
        self._startable = [
            position.ticket
            for position in queue.positions
            if position.now or (position.request is None and position.ticket.after is None)
        ]
        before = self._woken_at
        others = [ticket for ticket in self._startable if ticket.id != own]
        woken = [ticket for ticket in others if now - before.get(ticket.id, 0.0) > START_SECONDS]
        wake(self._directory, woken, MAY_START)
        self._woken_at = {
            ticket.id: now if ticket in woken else before.get(ticket.id, now) for ticket in self._startable
        }
        is_same = before.keys() == self._woken_at.keys()
        self._start_pause = min(SAMPLE_SECONDS, self._start_pause * 2) if is_same else START_SECONDS
        self._unresponsive = [
            position.ticket for position in queue.positions if position.ticket.id in queue.unresponsive
        ]
        self._sample_at = now + self._pause(queue)
        self._checks = self._checks or self._poll(now)
        if self._watch:
            self._watch.follow(queue.facts.restriction_files)
        return any(ticket.id == own for ticket in self._startable)

    def close(self) -> None:
        """Stop leading."""
        self._processes.close()
        if self._watch:
            self._watch.close()

    def _sample_soon(self, now: float) -> None:
        self._sample_at = min(self._sample_at, now + max(CHECK_SECONDS[0], (PART - 1) * self._cost))

    def _poll(self, now: float) -> list[float]:
        return [] if self._watch and not self._unresponsive else [now + POLL_SECONDS]

    def _ticket_names(self) -> frozenset[str]:
        start = f"{self._directory.prefix}ticket."
        return frozenset(name for name in os.listdir(self._directory.records) if name.startswith(start))

    def _was_lock_released(self) -> bool:
        """Check whether a lock was released, if it is time for that."""
        now = time.monotonic()
        if not self._checks or now < self._checks[0]:
            return False
        self._checks = [after for after in self._checks if after > now] or self._poll(now)
        if any(is_responsive(self._directory, ticket) for ticket in self._unresponsive):
            self._sample_soon(now)
        if not self._watch and self._ticket_names() != self._tickets:
            self._sample_soon(now)
        if locks_held(self._directory, self._uuids) >= self._locked:
            return False
        time.sleep(CLAIM_SECONDS)
        return True

    def _pause(self, queue: QueueState) -> float:
        """Seconds until the driver is read even if nothing is known to have ended."""
        if not queue.positions:
            return SAMPLE_SECONDS  # the driver did not answer
        claimed = {uuid for claim in queue.facts.claims for uuid in claim.devices}
        unclaimed = [device for device in queue.snapshot.devices if device.uuid not in claimed]
        pids = [process.pid for device in unclaimed for process in device.processes or ()]
        unwatched = self._processes.watch(pids[:MOST_WATCHED])
        requests = [request for position in queue.positions for request in position.ticket.requests]
        waits_for_values = any(
            request.max_util is not None or request.max_temperature is not None or request.share for request in requests
        )
        without_record = any(claim.since is None for claim in queue.facts.claims)  # its end is not reported
        is_blind = len(pids) > MOST_WATCHED  # an end of the others is not reported
        # A request that waits although devices are free may start by time alone: when a job exceeds its limit or its
        # usual length, or another request exceeds its promise or the bound.
        is_held_back = any(position.held_back_by for position in queue.positions)
        polls = is_blind or waits_for_values or without_record or is_held_back
        pause = SAMPLE_SECONDS if polls else HEALTH_SECONDS
        # A device may be in use by no process that can be watched.  Mostly it is memory of a job that was just killed.
        if unwatched or any(
            device.processes is None
            or (not device.processes and (device.memory_used is None or device.memory_used > idle_limit(device)))
            for device in unclaimed
        ):
            pause = min(pause, self._settle_pause)
            self._settle_pause = min(SAMPLE_SECONDS, self._settle_pause * 2)
        pause = min(pause, max(0.0, queue.facts.changes_at - queue.now) + CHECK_SECONDS[0])
        return min(pause, self._start_pause) if any(position.now for position in queue.positions) else pause
