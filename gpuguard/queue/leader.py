"""The leader of the queue: hears what may change it, samples once for all, and wakes the requests that may start.

The driver is read only after something ended that matters: a claim, a ticket, a process without a claim.  Where the
kernel reports nothing (no inotify left, memory that is still being freed, a utilization that must fall) it samples
again after a while, less and less often.  Does not decide which process leads: see waiter.
"""

from __future__ import annotations

import errno
import os
import re
import select
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.holders import as_written
from gpuguard.claims.probe import locks_held
from gpuguard.device_state import idle_limit
from gpuguard.model import Device
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.priority import Ticket
from gpuguard.queue.state import QueueState, has_waker
from gpuguard.queue.tickets import wake

# Being woken by the kernel: when a claim or a ticket ends, when a process ends, when a bell is written to.
#
# The kernel reports when the last holder of a file that was open for writing closes it, however that dies (inotify,
# IN_CLOSE_WRITE); readers do not count.  So the records of claims and the tickets wake a process that watches the
# directory of both, and reading them wakes none.


# linux/inotify.h
_ATTRIB, _CLOSE_WRITE, _MOVED_TO, _DELETE, _DELETE_SELF, _OVERFLOW = 0x4, 0x8, 0x80, 0x200, 0x400, 0x4000
REPLACED = "replaced"  # what is reported of a single file
_HEAD = struct.Struct("iIII")


class DirectoryWatch:
    """Reports which files of a directory appeared, ended or were removed.

    Raises:
        OSError: the kernel gives no further watch to this user (fs.inotify.max_user_instances).
    """

    def __init__(self, path: str) -> None:
        import ctypes

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
        """Report also when one of these files, elsewhere, is removed or replaced; if it is there."""
        for path in paths:
            self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), _ATTRIB | _DELETE_SELF)

    def names(self) -> set[str]:
        """The names of changed files since the last call; "" when some were lost."""
        found: set[str] = set()
        while True:
            try:
                events = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return found
            at = 0
            while at < len(events):
                watch, mask, _, length = _HEAD.unpack_from(events, at)
                name = os.fsdecode(events[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0"))
                found.add("" if mask & _OVERFLOW else name if watch == self._directory else REPLACED)
                at += _HEAD.size + length

    def close(self) -> None:
        """Watch no longer."""
        os.close(self.descriptor)


class ProcessWatch:
    """Waits for the end of processes of any user."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # pid -> pidfd

    def watch(self, pids: Iterable[int]) -> set[int]:
        """Wait for exactly these from now on; returns those that cannot be watched, or have ended already."""
        wanted, unresponsive = set(pids), set()
        for pid in self._open.keys() - wanted:
            os.close(self._open.pop(pid))
        for pid in wanted - self._open.keys():
            try:
                self._open[pid] = os.pidfd_open(pid)
            except (OSError, OverflowError):  # ended, of another namespace, no descriptors left; or it is no pid at all
                unresponsive.add(pid)
        ended = wait_for(self._open.values(), 0.0)
        for pid in [pid for pid, descriptor in self._open.items() if descriptor in ended]:
            os.close(self._open.pop(pid))
            unresponsive.add(pid)
        return unresponsive

    @property
    def descriptors(self) -> list[int]:
        """Readable once the process has ended."""
        return list(self._open.values())

    def close(self) -> None:
        """Watch no process any more."""
        self.watch(())


def wait_for(descriptors: Collection[int], seconds: float | None) -> set[int]:
    """Which of *descriptors* are readable; sleeps until one is, at most so many seconds."""
    poll = select.poll()  # select() knows no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds * 1000))}


def flock_holder(descriptor: int) -> int | None:
    """The pid of the process that took the flock on this file, as the kernel says, or None."""
    place = re.compile(rf"FLOCK +ADVISORY +WRITE +(\d+) +{as_written(descriptor)} ")
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as locks:
            for line in locks:
                if "->" not in line and (found := place.search(line)):
                    return int(found[1]) or None  # 0: in another pid namespace
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES):
            raise
    return None


YOUR_TURN = b"."
LOOK_SECONDS = 300.0  # between two checks whether devices were lost, or came back
SAMPLE_SECONDS = 10.0  # while a request waits for what the kernel does not report
SETTLE_SECONDS = 0.25  # at first, while an unclaimed device is not empty yet; then twice that, and so on
CHECK_SECONDS = (0.02, 0.2, 2.0)  # after a file was closed: its lock is given up a moment later
POLL_SECONDS = 2.0  # between two checks of the locks and the tickets where inotify is not available
CLAIM_SECONDS = 0.002  # the locks of one claim are given up one after the other
RING_SECONDS = 0.5  # a request that was woken starts within so long, or is woken again
PART = 4  # at most one in so many parts of the time is spent on samples because of tickets that come and go
STRANGERS = 64  # processes without a claim whose end is awaited


class Leader:
    """Leads the queue, until close().

    Args:
        directory: of the claims.
        uuids: of the machine's devices.
        look: samples the machine and the queue, for all that wait; with health now and then, and where a request
            that was woken did not start.
    """

    def __init__(self, directory: LockDirectory, uuids: Sequence[str], look: Callable[[bool], QueueState]) -> None:
        self._directory, self._uuids, self._look = directory, tuple(uuids), look
        self._strangers = ProcessWatch()
        self._watch: DirectoryWatch | None = None
        with suppress(OSError):  # none left: then the files are checked now and then
            self._watch = DirectoryWatch(directory.records)
        self._seen: frozenset[str] = frozenset()  # names of the tickets, where there is no watch
        self._locked: frozenset[str] = frozenset()  # names of the locks that were held before the last sample
        self._told: list[Ticket] = []  # those that could start at the last sample
        self._rung: dict[str, float] = {}  # id of a ticket -> when it was woken, monotonic
        self._deaf: list[Ticket] = []  # those that do not respond
        self._checks: list[float] = []  # monotonic times at which the locks are checked
        self._look_at = 0.0  # and when the driver is read although nothing is known to have ended
        self._pause = RING_SECONDS  # until the same ones are woken again
        self._settling = SETTLE_SECONDS
        self._closely_at = time.monotonic() + LOOK_SECONDS  # when the health of the devices is read next
        self._cost = 0.0  # seconds that the last sample took

    @property
    def descriptors(self) -> list[int]:
        """Readable when something has happened."""
        return [*([self._watch.descriptor] if self._watch else []), *self._strangers.descriptors]

    @property
    def until(self) -> float:
        """When to come back at the latest, monotonic."""
        return min([self._look_at, *self._checks])

    def must_look(self, ready: Collection[int]) -> bool:
        """Whether it is time to sample; *ready* are the descriptors that are readable."""
        if self._watch and self._watch.descriptor in ready:
            self._hear(self._watch.names())
        if not set(self._strangers.descriptors).isdisjoint(ready) or self._something_ended():
            self._settling = SETTLE_SECONDS
            return True
        return time.monotonic() >= self._look_at

    def look(self, own: str) -> bool:
        """Sample once for all and wake the requests that may start, or never can; whether *own* is one of them.

        *own* is given each time: the leader may have had to make its ticket anew.
        """
        began = time.monotonic()
        self._locked = locks_held(self._directory, self._uuids)
        if not self._watch:
            self._seen = self._tickets()
        closely = began >= self._closely_at or any(self._waits_in_vain(ticket) for ticket in self._told)
        line = self._look(closely)
        now = time.monotonic()
        self._cost = now - began
        if closely:
            self._closely_at = now + LOOK_SECONDS
        self._uuids = tuple(device.uuid for device in line.snapshot.devices)
        meant = [place.ticket for place in line.places if _concerns(place)]
        called = [one for one in meant if one.id != own and now - self._rung.get(one.id, 0.0) > RING_SECONDS]
        wake(self._directory, called, YOUR_TURN)
        self._told, known = meant, set(self._rung)
        self._rung = {one.id: now if one in called else self._rung.get(one.id, now) for one in meant}
        self._pause = min(SAMPLE_SECONDS, self._pause * 2) if known == set(self._rung) else RING_SECONDS
        self._deaf = [place.ticket for place in line.places if place.ticket.id in line.unresponsive]
        self._look_at = now + self._next_look(line, told=any(place.now for place in line.places))
        self._checks = self._checks or self._poll(now)
        if self._watch:
            self._watch.follow(line.facts.mark_files)
        return any(one.id == own for one in meant)

    def close(self) -> None:
        """Lead no longer."""
        self._strangers.close()
        if self._watch:
            self._watch.close()

    def _waits_in_vain(self, told: Ticket) -> bool:
        long_ago = time.monotonic() - self._rung.get(told.id, 0.0) >= RING_SECONDS
        return long_ago and has_waker(self._directory, told)

    def _hear(self, names: set[str]) -> None:
        """These files changed: sample at once where no lock is about it, else when the lock can be free."""
        kinds = {name.removeprefix(self._directory.prefix).partition(".")[0] for name in names}
        now = time.monotonic()
        if kinds & {"claim", ""}:
            self._checks = [now, *(now + after for after in CHECK_SECONDS)]
        if kinds & {"ticket", "reserve", REPLACED, ""}:
            self._look_soon(now)

    def _look_soon(self, now: float) -> None:
        self._look_at = min(self._look_at, now + max(CHECK_SECONDS[0], (PART - 1) * self._cost))

    def _poll(self, now: float) -> list[float]:
        return [] if self._watch and not self._deaf else [now + POLL_SECONDS]

    def _tickets(self) -> frozenset[str]:
        start = f"{self._directory.prefix}ticket."
        return frozenset(name for name in os.listdir(self._directory.records) if name.startswith(start))

    def _something_ended(self) -> bool:
        """Whether a lock was released, as far as it is time to check that."""
        now = time.monotonic()
        if not self._checks or now < self._checks[0]:
            return False
        self._checks = [after for after in self._checks if after > now] or self._poll(now)
        if any(has_waker(self._directory, ticket) for ticket in self._deaf):
            self._look_soon(now)
        if not self._watch and self._tickets() != self._seen:
            self._look_soon(now)
        if locks_held(self._directory, self._uuids) >= self._locked:
            return False
        time.sleep(CLAIM_SECONDS)
        return True

    def _next_look(self, line: QueueState, *, told: bool) -> float:
        """Seconds until the driver is read although nothing is known to have ended."""
        if not line.places:
            return SAMPLE_SECONDS  # the driver did not answer
        claimed = {uuid for claim in line.facts.claims for uuid in claim.devices}
        unclaimed = [device for device in line.snapshot.devices if device.uuid not in claimed]
        pids = [process.pid for device in unclaimed for process in device.processes or ()]
        unresponsive = self._strangers.watch(pids[:STRANGERS])
        ways = [way for place in line.places for way in place.ticket.requests]
        pause = LOOK_SECONDS
        if (
            unresponsive
            or len(pids) > STRANGERS
            or any(way.max_util is not None or way.max_temperature is not None or way.share for way in ways)
            or any(claim.since is None for claim in line.facts.claims)  # no record: its end is not reported
        ):
            pause = SAMPLE_SECONDS
        if unresponsive or any(_is_settling(device) for device in unclaimed):
            pause = min(pause, self._settling)
            self._settling = min(SAMPLE_SECONDS, self._settling * 2)
        pause = min(pause, max(0.0, line.facts.changes_at - line.now) + CHECK_SECONDS[0])
        return min(pause, self._pause) if told else pause


def _concerns(place: QueuePosition) -> bool:
    """Whether its process should check: it may start, or its request cannot be met any more."""
    return place.now or (place.request is None and place.ticket.after is None)


def _is_settling(device: Device) -> bool:
    """Whether a device is in use by no process that can be watched: mostly memory of a job that was killed just now."""
    if device.processes is None:
        return True
    return not device.processes and (device.memory_used is None or device.memory_used > idle_limit(device))
