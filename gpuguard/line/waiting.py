"""The waiting line at work: one's own ticket in it, and sleeping until it is one's turn.

No server keeps the line.  One of those who wait holds the lock `queue` and leads: the kernel wakes him when a claim or
a stranger's process ends, he looks once for all, and rings at whoever may start now (see leading).  The others sleep,
and ask neither the driver nor anybody else; whoever is rung looks for himself before he believes it.  When the leader
ends, however, the kernel tells the others and one of them takes over.  A leader who does nothing (stopped, stuck or
hostile) delays the others to a look of their own now and then.  Claims nothing: see lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from gpuguard.claims.lockfiles import LockDirectory, open_lock, try_flock
from gpuguard.errors import ClaimError
from gpuguard.line.leading import YOUR_TURN, Leader
from gpuguard.line.order import Ticket
from gpuguard.line.standing import Standing, listens
from gpuguard.line.tickets import Held, last_sign, read_tickets, ring, ticket_content
from gpuguard.line.wakeup import Processes, flock_holder, wait_for

NEW_LEADER = b"l"
OWN_LOOK_SECONDS = 30.0  # a leader who does nothing delays the others by so much at most
SIGNS_MISSED = 3  # so many times as long a leader may be silent
TELL_SECONDS = 1.0  # between two signs of life for whoever sits at the terminal
WAKES, WAKE_SECONDS = 20.0, 2.0  # so often in a row one may be called for nothing, then once in so many seconds
HEIRS = 3  # whoever leaves while he leads tells so many that nobody does


class Waiter:
    """One who waits in line, until leave().

    Args:
        directory: of the claims.
        uuids: of the machine's devices.
        ticket: what for; its id and time of arrival come from the file that is made.
        look: reads the machine and the line, for all who wait, see Leader.

    Raises:
        OSError: the ticket cannot be written.
        LockDirectoryError: the line's lock file cannot be used.
    """

    def __init__(
        self, directory: LockDirectory, uuids: Sequence[str], ticket: Ticket, look: Callable[[bool], Standing]
    ) -> None:
        self._directory, self._uuids, self._look = directory, uuids, look
        self._leads: Leader | None = None
        self._leader = Processes()  # whose end makes us try to lead
        self._wakes, self._woken = WAKES, time.monotonic()
        self._queue, held = open_lock(directory, "queue"), None
        try:
            self._held = held = Held(directory, ticket_content(ticket))
            self.ticket = replace(ticket, id=held.id)
        except BaseException:
            if held:
                held.leave()
            os.close(self._queue)
            raise

    def sleep(self, seconds: float | None, tell: Callable[[], object], every: float | None = None) -> None:
        """Return when it is worth to try, and after *seconds*; *tell* is called *every* so many if that is not None."""
        until = None if seconds is None else time.monotonic() + seconds
        own_look = time.monotonic() + OWN_LOOK_SECONDS
        must_look = leaderless = True
        while until is None or time.monotonic() < until:
            if leaderless and self._takes_the_lead():
                must_look = True
            if self._leads and must_look:
                self._held.live()
                if self._leads.look(self.ticket.id):
                    self._is_woken(until)
                    return
            tell()
            ready = self._nap(until, every)
            sounds = self._hush(ready, until)
            if self._leads:
                must_look = self._leads.must_look(ready)
            elif YOUR_TURN in sounds:
                return
            leaderless = not self._leads and (NEW_LEADER in sounds or not ready.isdisjoint(self._leader.descriptors))
            if time.monotonic() >= own_look:
                own_look, leaderless = time.monotonic() + OWN_LOOK_SECONDS, not self._leads
                if self._is_alone():
                    return

    def leave(self) -> None:
        """Wait no longer, and let somebody else lead.  Idempotent, also after it was interrupted."""
        if self._queue < 0:
            return
        self._held.leave()
        self._leader.close()
        self.stand_aside()
        queue, self._queue = self._queue, -1
        os.close(queue)

    def stand_aside(self) -> None:
        """Let somebody else lead, if we do: others would wait for whoever cannot look.  Our place stays."""
        leads, self._leads = self._leads, None
        if leads:
            with suppress(OSError, ClaimError):
                leads.close()
                fcntl.flock(self._queue, fcntl.LOCK_UN)
                self._find_heirs()

    def _find_heirs(self) -> None:
        others = [ticket for ticket in read_tickets(self._directory)[0] if ticket.id != self.ticket.id]
        tickets = sorted(others, key=lambda ticket: -ticket.since)
        heirs = (ticket for ticket in tickets if listens(self._directory, ticket))  # the last will wait the longest
        ring(self._directory, [heir for heir, _ in zip(heirs, range(HEIRS), strict=False)], NEW_LEADER)

    def _nap(self, until: float | None, every: float | None) -> set[int]:
        """Sleep; the descriptors that are readable."""
        now = time.monotonic()
        ends = [now + (every or (TELL_SECONDS if os.isatty(2) else OWN_LOOK_SECONDS))]
        ends += [self._leads.until] if self._leads else []
        ends += [until] if until is not None else []
        others = self._leads.descriptors if self._leads else self._leader.descriptors
        return wait_for([self._held.bell, *others], min(ends) - now)

    def _hush(self, ready: set[int], until: float | None) -> bytes:
        if self._held.bell not in ready:
            return b""
        self._is_woken(until)
        return self._held.hush()

    def _is_woken(self, until: float | None) -> None:
        """Whoever is called for nothing again and again takes his time: anybody can ring a bell."""
        now = time.monotonic()
        self._wakes = min(WAKES, self._wakes + (now - self._woken) / WAKE_SECONDS) - 1
        self._woken = now
        if self._wakes < 0:
            time.sleep(WAKE_SECONDS if until is None else max(0.0, min(WAKE_SECONDS, until - now)))

    def _takes_the_lead(self) -> bool:
        if self._leads:
            return False
        for _ in range(2):  # whoever leads may end before it is known who he is, and then nobody would hear of it
            if try_flock(self._queue):
                break
            pid = flock_holder(self._queue)
            if not self._leader.watch([pid] if pid else []) and pid:
                return False
        else:
            return False
        self._leader.close()
        self._leads = Leader(self._directory, self._uuids, self._look)
        with suppress(OSError, ClaimError):
            others = [ticket for ticket in read_tickets(self._directory)[0] if ticket.id != self.ticket.id]
            ring(self._directory, others, NEW_LEADER)  # whose end they must hear of from now on
        return True

    def _is_alone(self) -> bool:
        """Now and then: whether we must look for ourselves, because nobody does it for us."""
        if not self._held.counts:  # somebody cleaned up: a new place is better than none
            with suppress(OSError):
                held = Held(self._directory, ticket_content(self.ticket))
                self._held.leave()
                self._held, self.ticket = held, replace(self.ticket, id=held.id)
            return True
        if self._leads:
            self._held.live()
            return False
        pid = flock_holder(self._queue)
        leader = [ticket for ticket in read_tickets(self._directory)[0] if ticket.pid == pid is not None]
        lately = time.time() - SIGNS_MISSED * OWN_LOOK_SECONDS
        return not any(listens(self._directory, one) and last_sign(self._directory, one) > lately for one in leader)
