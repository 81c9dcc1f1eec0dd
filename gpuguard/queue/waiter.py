"""Waiting in the queue: a ticket of this process, and sleeping until it may start.

No server keeps the queue.  One of the waiting processes holds the lock `queue` and leads: the kernel wakes it when a
claim or an unclaimed process ends, it samples once for all, and wakes those that may start now (see leader).  The
others sleep, and read nothing; a process that is woken samples by itself before it claims.  When the leader ends, the
kernel wakes the others and one of them takes over.  One of the others, the deputy, watches the leader and leads in its
place as long as it does nothing: stopped (Ctrl-Z), stuck or hostile.  Where that fails, too, each of the others samples
now and then.  Claims nothing: see lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.claims.records import read_record, read_records, record_path
from gpuguard.claims.room import why_full
from gpuguard.errors import ClaimError, InvalidRequest, LockDirectoryError, passing
from gpuguard.model import ClaimRecord
from gpuguard.queue.leader import YOUR_TURN, DirectoryWatch, Leader, ProcessWatch, flock_holder, wait_for
from gpuguard.queue.priority import Ticket
from gpuguard.queue.state import QueueState, has_waker, is_stopped
from gpuguard.queue.tickets import OwnTicket, last_heartbeat, read_tickets, ticket_content, wake

NEW_LEADER = b"l"
OWN_LOOK_SECONDS = 30.0  # a leader and a deputy that both do nothing delay the others by so much at most
WATCH_SECONDS = 0.5  # between two signs of life of the leader, and between two checks of them by the deputy
DEPUTY_SECONDS = 2.0  # between two checks of the others whether there is a deputy
SILENT_SECONDS = 1.0  # a leader without a sign of life for so long is passed
SIGNS_MISSED = 3  # so many times as long a leader may be silent
TELL_SECONDS = 1.0  # between two lines of progress on a terminal
WAKES, WAKE_SECONDS = 20.0, 2.0  # so often in a row a process may be woken for nothing, then once in so many seconds
HEIRS = 3  # a leader that leaves wakes so many others


class Waiter:
    """A request that waits in the queue, until leave().

    Args:
        directory: of the claims.
        uuids: of the machine's devices.
        ticket: what for; its id and time of arrival come from the file that is made.
        look: samples the machine and the queue, for all that wait, see Leader.

    Raises:
        OSError: the ticket cannot be written.
        LockDirectoryError: the queue's lock file cannot be used.
    """

    def __init__(
        self, directory: LockDirectory, uuids: Sequence[str], ticket: Ticket, look: Callable[[bool], QueueState]
    ) -> None:
        self._directory, self._uuids, self._look = directory, uuids, look
        self._leads: Leader | None = None
        self._stands_in = False  # leads although another process has the lock of the queue
        self._is_deputy = False
        self._leader_tickets: Sequence[Ticket] | None = None  # of the process that the deputy watches
        self._leader = ProcessWatch()  # whose end makes us try to lead
        self._wakes, self._woken = WAKES, time.monotonic()
        self._queue, held = open_lock(directory, "queue"), None
        self._deputy = -1
        try:
            # The directory itself is the lock of the deputy: users cannot make a further lock file, and a machine that
            # was set up by an earlier version has none.
            self._deputy = os.open(directory.locks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._held = held = OwnTicket(directory, ticket_content(ticket))
            self.ticket = replace(ticket, id=held.id)
        except BaseException:
            if held:
                held.leave()
            if self._deputy >= 0:
                os.close(self._deputy)
            os.close(self._queue)
            raise

    def sleep(self, seconds: float | None, tell: Callable[[], object], every: float | None = None) -> None:
        """Return when it is worth to try, and after *seconds*; *tell* is called every *every* seconds unless that is
        None."""
        until = None if seconds is None else time.monotonic() + seconds
        own_look = time.monotonic() + OWN_LOOK_SECONDS
        must_look = leaderless = True
        while until is None or time.monotonic() < until:
            if leaderless and self._takes_the_lead():
                must_look = True
            if self._leads and must_look:
                self._held.send_heartbeat()
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
            ended = not ready.isdisjoint(self._leader.descriptors)
            leaderless = not self._leads and (NEW_LEADER in sounds or ended or self._must_lead())
            if time.monotonic() >= own_look:
                own_look, leaderless = time.monotonic() + OWN_LOOK_SECONDS, not self._leads
                if self._is_alone():
                    return

    def leave(self) -> None:
        """Wait no longer, and let another process lead.  Idempotent, also after it was interrupted."""
        if self._queue < 0:
            return
        self._held.leave()
        self._leader.close()
        self.stand_aside()
        locks, self._queue, self._deputy = (self._queue, self._deputy), -1, -1
        for lock in locks:
            os.close(lock)

    def stand_aside(self) -> None:
        """Let another process lead, if this one does: others would wait for a leader that cannot sample.  The position
        stays."""
        leads, self._leads = self._leads, None
        if leads:
            with suppress(OSError, ClaimError):
                leads.close()
                self._give_up_the_locks()
                self._find_heirs()

    def pause(self) -> None:
        """Let another process lead while this one is stopped, until go_on(); from a signal handler, at any moment."""
        if self._queue >= 0:
            with suppress(OSError, ClaimError):
                self._give_up_the_locks()
                if self._leads:
                    self._find_heirs()

    def go_on(self) -> None:
        """Lead again after pause(), unless another process does by now."""
        if self._queue >= 0 and self._leads:
            with suppress(ClaimError):
                self._stands_in = not try_flock(self._queue)

    def _give_up_the_locks(self) -> None:
        self._stands_in = False
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        self._resign_as_deputy()

    def _find_heirs(self) -> None:
        others = [ticket for ticket in read_tickets(self._directory)[0] if ticket.id != self.ticket.id]
        tickets = sorted(others, key=lambda ticket: -ticket.since)
        heirs = (ticket for ticket in tickets if has_waker(self._directory, ticket))  # the newest will wait longest
        wake(self._directory, [heir for heir, _ in zip(heirs, range(HEIRS), strict=False)], NEW_LEADER)

    def _nap(self, until: float | None, every: float | None) -> set[int]:
        """Sleep; the descriptors that are readable."""
        now = time.monotonic()
        ends = [now + (every or (TELL_SECONDS if os.isatty(2) else OWN_LOOK_SECONDS))]
        ends += [self._leads.until] if self._leads else []
        ends += [until] if until is not None else []
        others = self._leads.descriptors if self._leads else self._leader.descriptors
        while True:
            left = min(ends) - time.monotonic()
            pause = WATCH_SECONDS if self._leads or self._is_deputy else DEPUTY_SECONDS
            ready = wait_for([self._held.waker, *others], min(left, pause))
            if ready or left <= pause:
                return ready
            if self._leads:
                self._held.send_heartbeat()
            if self._must_end_standing_in() or (not self._leads and self._must_lead()):
                return ready

    def _must_lead(self) -> bool:
        """Whether the deputy has to lead: no process does, or one that does nothing for the others."""
        with suppress(OSError, ClaimError):
            self._is_deputy = try_flock(self._deputy)
            if not self._is_deputy or self._leader_shows_life():
                return False
            self._leader_tickets = self._find_leader()
            return not self._leader_shows_life() and (self._leader_tickets is not None or try_flock(self._queue))
        return False

    def _must_end_standing_in(self) -> bool:
        """Whether the leader works again, so that this one leads no longer.  If the leader has gone, this one is it."""
        if not self._stands_in:
            return False
        with suppress(OSError, ClaimError):
            if try_flock(self._queue):
                self._stands_in = False
                self._resign_as_deputy()
                return False
            self._leader_tickets = self._find_leader()
            if self._leads and self._leader_shows_life():
                self._leads.close()
                self._leads, self._stands_in = None, False
                return True
        return False

    def _find_leader(self) -> Sequence[Ticket] | None:
        """The tickets of the process that has the lock of the queue; None where that is none, or unknown."""
        pid = flock_holder(self._queue)
        if pid is None:
            return None
        return [] if is_stopped(pid) else [one for one in read_tickets(self._directory)[0] if one.pid == pid]

    def _leader_shows_life(self) -> bool:
        """Whether the leader, as it was last found, is not stopped, and has given a sign of life just now."""
        lately = time.time() - SILENT_SECONDS
        tickets = self._leader_tickets or ()
        return any(has_waker(self._directory, one) and last_heartbeat(self._directory, one) > lately for one in tickets)

    def _resign_as_deputy(self) -> None:
        self._is_deputy = False
        fcntl.flock(self._deputy, fcntl.LOCK_UN)

    def _hush(self, ready: set[int], until: float | None) -> bytes:
        if self._held.waker not in ready:
            return b""
        self._is_woken(until)
        return self._held.drain()

    def _is_woken(self, until: float | None) -> None:
        """A process that is woken for nothing again and again waits: any user can write into a bell."""
        now = time.monotonic()
        self._wakes = min(WAKES, self._wakes + (now - self._woken) / WAKE_SECONDS) - 1
        self._woken = now
        if self._wakes < 0:
            time.sleep(WAKE_SECONDS if until is None else max(0.0, min(WAKE_SECONDS, until - now)))

    def _takes_the_lead(self) -> bool:
        if self._leads:
            return False
        for _ in range(2):  # the leader may end before its pid is known, and its end would go unnoticed
            if try_flock(self._queue):
                break
            pid = flock_holder(self._queue)
            if not self._leader.watch([pid] if pid else []) and pid:
                self._stands_in = self._must_lead()
                if self._stands_in:
                    break
                return False
        else:
            return False
        if not self._stands_in:
            self._resign_as_deputy()  # one of the others watches this one
        self._leader.close()
        self._leads = Leader(self._directory, self._uuids, self._look)
        with suppress(OSError, ClaimError):
            others = [ticket for ticket in read_tickets(self._directory)[0] if ticket.id != self.ticket.id]
            wake(self._directory, others, NEW_LEADER)  # whose end they must hear of from now on
        return True

    def _is_alone(self) -> bool:
        """Now and then: whether this process must sample by itself, because no leader does."""
        if not self._held.counts:  # the ticket was removed: a new position is better than none
            with suppress(OSError):
                held = OwnTicket(self._directory, ticket_content(self.ticket))
                self._held.leave()
                self._held, self.ticket = held, replace(self.ticket, id=held.id)
            return True
        if self._leads:
            self._held.send_heartbeat()
            return False
        pid = flock_holder(self._queue)
        leader = [ticket for ticket in read_tickets(self._directory)[0] if ticket.pid == pid is not None]
        lately = time.time() - SIGNS_MISSED * OWN_LOOK_SECONDS
        return not any(
            has_waker(self._directory, one) and last_heartbeat(self._directory, one) > lately for one in leader
        )


# Waiting for the end of something else before entering the queue: a claim, or a process of any user.
#
# Meanwhile a ticket shows it in the queue; no other request waits for it.  The kernel reports the end.


LOOK_SECONDS = 30.0  # between two lines in a log, and two checks of the claim
POLL_SECONDS = 2.0  # so often without inotify
CHECK_SECONDS = (0.02, 0.2, 2.0)  # after its file was closed: its lock is given up a moment later

_PID = re.compile(r"[1-9][0-9]{0,6}")


def wait_until_over(
    what: str,
    directory: LockDirectory,
    ticket: Ticket,
    tell: Callable[[str], object],
    environ: Mapping[str, str] = os.environ,
    has_ended: Callable[[str], bool] = lambda what: False,
) -> None:
    """Return when the claim or the process *what* has ended.

    Args:
        what: a pid; or the id of a claim, or the beginning of one.
        directory: of the claims.
        ticket: of the waiting request, for others to see.
        tell: called once in a while with what is waited for.
        environ: says inside which claim this runs.
        has_ended: whether there was such a claim, of an id that no living one has.

    Raises:
        InvalidRequest: there is no such claim or process, or it cannot end before this process does.
        LockDirectoryError: no ticket can be written.
    """
    if not what:  # --after "$UNSET"
        raise InvalidRequest("--after is empty: name a claim or a process.")
    # The id of a claim has eight hexadecimal digits: one that looks like a pid is taken for a claim if there is one.
    found = [claim for claim in read_records(directory) if claim.id.startswith(what)]
    found = [claim for claim in found if claim.id == what] or found
    if not found and _PID.fullmatch(what):
        _until_process_ends(int(what), directory, ticket, tell)
        return
    if not found and has_ended(what):
        return
    if len(found) != 1:
        raise InvalidRequest(_which_one(what, found))
    own = environ.get("GPUGUARD_CLAIM", "")
    if own == found[0].id or own.startswith(f"{found[0].id}."):
        raise InvalidRequest(f"--after {what} is the claim that this runs in: it would wait for itself.")
    _until_claim_ends(found[0], directory, ticket, tell)


def _which_one(what: str, found: list[ClaimRecord]) -> str:
    if found:
        return f"--after {what} could be {', '.join(claim.id for claim in found)}: write more of it."
    advice = "`gpuguard who` shows the claims, `gpuguard queue` who waits, `gpuguard events` which claims have ended."
    return f"--after {what}: there is no such claim or process now, and no event of such a claim.\n{advice}"


def _until_process_ends(pid: int, directory: LockDirectory, ticket: Ticket, tell: Callable[[str], object]) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise InvalidRequest(_which_one(str(pid), [])) from None
    except OSError as error:
        raise InvalidRequest(
            f"--after {pid}: nobody can hear when that ends ({error.strerror}).  Name the process itself, or a claim."
        ) from None
    after = f"waits until process {pid} has ended"
    try:
        with _seen_to_wait(directory, replace(ticket, after=after)):
            tell(after)
            while not wait_for([process], _pause()):
                tell(after)
    finally:
        os.close(process)


def _until_claim_ends(
    claim: ClaimRecord, directory: LockDirectory, ticket: Ticket, tell: Callable[[str], object]
) -> None:
    after = f"waits until {claim.user}'s claim {claim.id} has ended"
    file = os.path.basename(record_path(directory, claim.uid, claim.id))
    checks: list[float] = []
    watch: DirectoryWatch | None = None
    with suppress(OSError):  # none left: then one looks now and then
        watch = DirectoryWatch(directory.records)
    try:
        with _seen_to_wait(directory, replace(ticket, after=after)):
            while _lives(directory, claim):
                tell(after)
                pause = checks.pop(0) if checks else _pause() if watch else min(POLL_SECONDS, _pause())
                wait_for([watch.descriptor] if watch else [], pause)
                if watch and not watch.names().isdisjoint({file, ""}):
                    checks = [*CHECK_SECONDS]
    finally:
        if watch:
            watch.close()


def _lives(directory: LockDirectory, claim: ClaimRecord) -> bool:
    try:
        return read_record(directory, claim.uid, claim.id) is not None
    except (OSError, ClaimError) as error:
        if not passing(error):
            raise
        return True  # as far as can be seen now


def _pause() -> float:
    return TELL_SECONDS if os.isatty(2) else LOOK_SECONDS


@contextmanager
def _seen_to_wait(directory: LockDirectory, ticket: Ticket) -> Iterator[None]:
    """A ticket for others to see."""
    try:
        held = OwnTicket(directory, ticket_content(ticket))
    except OSError as error:
        why = why_full(directory, error)
        raise LockDirectoryError(f"no ticket can be written into {directory.records}: {why}.") from error
    try:
        yield
    finally:
        held.leave()
