"""Leading the waiting line: hearing what may change it, looking once for all, and ringing at whoever may start.

The driver is asked only after something ended that matters: a claim, a ticket, a stranger's process.  Where the kernel
tells of nothing (no inotify left, memory that is still being freed, a utilization that must fall) one looks again after
a while, less and less often.  Does not know who leads, nor what it is like to wait: see waiting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from gpuguard.claims.lockfiles import LockDirectory
from gpuguard.claims.records import locks_held
from gpuguard.line.order import Ticket
from gpuguard.line.plan import Place
from gpuguard.line.standing import Standing, listens
from gpuguard.line.tickets import ring
from gpuguard.line.wakeup import REPLACED, DirectoryWatch, Processes
from gpuguard.model import Device
from gpuguard.request import idle_limit

YOUR_TURN = b"."
LOOK_SECONDS = 300.0  # one looks whether devices were lost, or came back
SAMPLE_SECONDS = 10.0  # while somebody waits for what the kernel does not tell of
SETTLE_SECONDS = 0.25  # at first, while a device that nobody claims is not empty yet; then twice that, and so on
CHECK_SECONDS = (0.02, 0.2, 2.0)  # after a file was closed: its lock is given up a moment later
POLL_SECONDS = 2.0  # between two looks at the locks and the tickets where inotify is not to be had
CLAIM_SECONDS = 0.002  # the locks of one claim are given up one after the other
RING_SECONDS = 0.5  # whoever was told that it is his turn takes so long at most, or is told again
PART = 4  # of the time at most one in so many parts is spent with looking because of tickets that come and go
STRANGERS = 64  # processes without a claim whose end is awaited


class Leader:
    """Whoever leads the line, until close().

    Args:
        directory: of the claims.
        uuids: of the machine's devices.
        look: reads the machine and the line, for all who wait; more closely now and then, and where somebody
            who was told did not come.
    """

    def __init__(self, directory: LockDirectory, uuids: Sequence[str], look: Callable[[bool], Standing]) -> None:
        self._directory, self._uuids, self._look = directory, tuple(uuids), look
        self._strangers = Processes()
        self._watch: DirectoryWatch | None = None
        with suppress(OSError):  # none left: then one looks at the files now and then
            self._watch = DirectoryWatch(directory.records)
        self._seen: frozenset[str] = frozenset()  # names of the tickets, where there is no watch
        self._locked: frozenset[str] = frozenset()  # names of the locks that were held before we looked
        self._told: list[Ticket] = []  # whose turn it was when we looked last
        self._rung: dict[str, float] = {}  # id of a ticket -> when we told its owner, monotonic
        self._deaf: list[Ticket] = []  # who do not listen
        self._checks: list[float] = []  # monotonic times at which the locks are looked at
        self._look_at = 0.0  # and when the driver is asked although nothing is known to have ended
        self._pause = RING_SECONDS  # until the same ones are told again
        self._settling = SETTLE_SECONDS
        self._closely_at = time.monotonic() + LOOK_SECONDS  # when the health of the devices is read next
        self._cost = 0.0  # seconds that the last look took

    @property
    def descriptors(self) -> list[int]:
        """Readable when something has happened."""
        return [*([self._watch.descriptor] if self._watch else []), *self._strangers.descriptors]

    @property
    def until(self) -> float:
        """When to come back at the latest, monotonic."""
        return min([self._look_at, *self._checks])

    def must_look(self, ready: Collection[int]) -> bool:
        """Whether it is time to look; *ready* are the descriptors that are readable."""
        if self._watch and self._watch.descriptor in ready:
            self._hear(self._watch.names())
        if not set(self._strangers.descriptors).isdisjoint(ready) or self._something_ended():
            self._settling = SETTLE_SECONDS
            return True
        return time.monotonic() >= self._look_at

    def look(self, own: str) -> bool:
        """Look once for all and ring at whoever may start, or never can; whether that is the ticket *own*.

        It is told each time: whoever leads may have had to make his ticket anew.
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
        ring(self._directory, called, YOUR_TURN)
        self._told, known = meant, set(self._rung)
        self._rung = {one.id: now if one in called else self._rung.get(one.id, now) for one in meant}
        self._pause = min(SAMPLE_SECONDS, self._pause * 2) if known == set(self._rung) else RING_SECONDS
        self._deaf = [place.ticket for place in line.places if place.ticket.id in line.deaf]
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
        return long_ago and listens(self._directory, told)

    def _hear(self, names: set[str]) -> None:
        """Something happened to these files: look at once where no lock is about it, else when the lock can be free."""
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
        """Whether a lock was given up, as far as it is time to look for that."""
        now = time.monotonic()
        if not self._checks or now < self._checks[0]:
            return False
        self._checks = [after for after in self._checks if after > now] or self._poll(now)
        if any(listens(self._directory, ticket) for ticket in self._deaf):
            self._look_soon(now)
        if not self._watch and self._tickets() != self._seen:
            self._look_soon(now)
        if locks_held(self._directory, self._uuids) >= self._locked:
            return False
        time.sleep(CLAIM_SECONDS)
        return True

    def _next_look(self, line: Standing, *, told: bool) -> float:
        """Seconds until the driver is asked although nothing is known to have ended."""
        if not line.places:
            return SAMPLE_SECONDS  # the driver did not answer
        claimed = {uuid for claim in line.facts.claims for uuid in claim.devices}
        unclaimed = [device for device in line.snapshot.devices if device.uuid not in claimed]
        pids = [process.pid for device in unclaimed for process in device.processes or ()]
        deaf = self._strangers.watch(pids[:STRANGERS])
        ways = [way for place in line.places for way in place.ticket.requests]
        pause = LOOK_SECONDS
        if (
            deaf
            or len(pids) > STRANGERS
            or any(way.max_util is not None or way.max_temperature is not None or way.share for way in ways)
            or any(claim.since is None for claim in line.facts.claims)  # no record: nobody tells of its end
        ):
            pause = SAMPLE_SECONDS
        if deaf or any(_is_settling(device) for device in unclaimed):
            pause = min(pause, self._settling)
            self._settling = min(SAMPLE_SECONDS, self._settling * 2)
        pause = min(pause, max(0.0, line.facts.changes_at - line.now) + CHECK_SECONDS[0])
        return min(pause, self._pause) if told else pause


def _concerns(place: Place) -> bool:
    """Whether its owner should look for himself: it is his turn, or his request cannot be met any more."""
    return place.now or (place.request is None and place.ticket.after is None)


def _is_settling(device: Device) -> bool:
    """Whether a device is in use by nobody of whom one could hear: mostly memory of a job that was killed just now."""
    if device.processes is None:
        return True
    return not device.processes and (device.memory_used is None or device.memory_used > idle_limit(device))
