"""Waiting in the queue: a ticket of this process, and sleeping until it may start.

No server keeps the queue.  One of the waiting processes holds the lock `queue` and leads: the kernel wakes it when a
claim or an unclaimed process ends, it samples once for all, and wakes those that may start now (see leader).  The
others sleep; a process that is woken samples by itself before it claims.  When the leader ends, one of the others takes
over.  Another process, the deputy, leads as long as the leader does nothing, because it is stopped (Ctrl-Z), stuck or
hostile.  If the deputy fails as well, each of the others samples now and then.  This module claims nothing: see lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.claims.disk_room import why_full
from gpuguard.claims.holders import flock_holder
from gpuguard.claims.records import read_record, read_records, record_path
from gpuguard.errors import (
    BackendError,
    ClaimError,
    ImpossibleRequest,
    InvalidRequest,
    LockDirectoryError,
    NotEnoughGpus,
    passing,
)
from gpuguard.files import wait_for
from gpuguard.locale import _, translated
from gpuguard.locale.messages import sentence
from gpuguard.model import MEMORY, PROCESSES, VERIFY_FIELDS, ClaimRecord, Snapshot
from gpuguard.queue.backfill import QueuePosition, promise
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.leader import (
    CHECK_SECONDS,
    MAY_START,
    POLL_SECONDS,
    Leader,
    ProcessWatch,
    watch_if_possible,
)
from gpuguard.queue.priority import Ticket
from gpuguard.queue.reasons import brief_text, kept_for_others, position_text
from gpuguard.queue.reservations import record_arrival, with_reserved_instances
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.state import QueueState, is_responsive, is_stopped, read_queue
from gpuguard.queue.tickets import (
    OwnTicket,
    last_heartbeat,
    new_ticket,
    read_tickets,
    record_start,
    ticket_content,
    tickets_of_process,
    wake,
)
from gpuguard.request import Request, fields_needed_by_all
from gpuguard.select import waiting_error

NEW_LEADER = b"l"
OWN_CHECK_SECONDS = 30.0  # a leader and a deputy that both do nothing delay the others by so much at most
ALONE_SECONDS = 3.0  # the most delay once they were found to do nothing: any program can hold their locks
WATCH_SECONDS = 0.5  # between two signs of life of the leader, and between two checks of them by the deputy
DEPUTY_SECONDS = 2.0  # between two checks of the others whether there is a deputy
SILENT_SECONDS = 1.0  # a leader without a sign of life for so long is passed
SIGNS_MISSED = 3  # a leader that is silent for so many times OWN_CHECK_SECONDS counts as none
PROGRESS_SECONDS = 1.0  # between two lines of progress on a terminal
LOG_SECONDS = 30.0  # between two lines in a log, and between two checks of the claim that --after names
REFRESH_SECONDS = 60.0  # the greatest age of the position that a waiting user reads
WAKES, WAKE_SECONDS = 20.0, 2.0  # a process may be woken for nothing so often in a row, then once in so many seconds
HEIRS = 3  # so many others are woken by a leader that leaves

_PID = re.compile(r"[1-9][0-9]{0,6}")


class WaitingRequest:
    """A request of *job* that may have to wait.  Once it has a ticket in the queue, *waiter* holds that."""

    def __init__(self, backend: Backend, directory: LockDirectory, job: JobDetails) -> None:
        self._backend, self._directory = backend, directory
        self._ticket = partial(
            new_ticket,
            priority=job.priority,
            time_limit=job.time_limit,
            expected=job.expected() if job.expected else None,
            note=job.note,
            command=job.command,
        )
        self._rules = read_queue_settings(directory).rules
        self.waiter: Waiter | None = None
        self._could_start = self._was_woken = False  # since the last check()
        self._fields = frozenset({MEMORY, PROCESSES})  # needed by the requests of the queue, if this process leads it
        self._reservations: tuple[Reservation, ...] = ()

    @property
    def waited(self) -> float | None:
        """Seconds since the request joined the queue, or None if it has no ticket."""
        return time.time() - self.waiter.ticket.since if self.waiter else None

    def ticket_of(self, requests: Sequence[Request]) -> Ticket:
        """Return the request's ticket in the queue, or the ticket with which it would join the queue."""
        return self.waiter.ticket if self.waiter else self._ticket(requests)

    def check(self, snapshot: Snapshot, requests: Sequence[Request]) -> QueueAnswer:
        """Decide whether this request may start now, by this process's own sample.  Any one of *requests* will do."""
        mine = self.ticket_of(requests)
        answer = self._check(snapshot, requests, mine)
        needed = _fields_of(answer.queue)
        # It is also unsure before it joins the queue: a request may start on an instance of a divided GPU although the
        # whole GPU is busy.
        is_unsure = self._was_woken or self.waiter is None
        # Read the fields that requests before this one depend on, or it could pass them.  Reservations need them as
        # well: one that seems to have room on a broken or a divided device would lose its own devices.
        is_blind = not needed <= fields_needed_by_all(*requests) or bool(answer.queue.facts.reservations)
        if self._could_start or (is_blind if answer.startable else is_unsure):
            answer = self._check(self._with_health(snapshot, needed), requests, mine)
        self._could_start, self._was_woken = bool(answer.startable), False
        # A user who has to wait for their own reservation counts as having come.
        self._reservations = answer.queue.facts.reservations
        record_arrival(self._directory, self._reservations)
        return answer

    def _check(self, snapshot: Snapshot, requests: Sequence[Request], mine: Ticket) -> QueueAnswer:
        snapshot = with_reserved_instances(self._backend, self._directory, snapshot)
        queue = read_queue(self._directory, snapshot, mine, rules=self._rules)
        return QueueAnswer(queue, queue.of(mine.id), tuple(requests))

    def _with_health(self, snapshot: Snapshot, needed: frozenset[str]) -> Snapshot:
        """Add the health of all devices to *snapshot*: a start that failed may have been planned on a broken one."""
        try:
            return snapshot.updated(self._backend.sample({PROCESSES, *VERIFY_FIELDS, *needed}))
        except BackendError:
            return snapshot

    def sleep(
        self,
        snapshot: Snapshot,
        requests: Sequence[Request],
        deadline: float | None,
        error: NotEnoughGpus,
        on_wait: Callable[[NotEnoughGpus], object] | None,
    ) -> NotEnoughGpus:
        """Wait until it is worth trying again, or until the *deadline* (monotonic), and return why it had to wait."""
        if self.waiter is None:
            self.waiter = self._join(snapshot, requests)
            error = self.check(snapshot, requests).explained(error)
        checked_at = time.monotonic()

        def report() -> None:
            nonlocal error, checked_at
            if on_wait is None:
                return
            if time.monotonic() - checked_at >= REFRESH_SECONDS:
                checked_at, error = time.monotonic(), self.check(snapshot, requests).explained(error)
            on_wait(error)

        seconds = None if deadline is None else deadline - time.monotonic()
        self.waiter.sleep(seconds, report, getattr(on_wait, "tell_every", None))
        self._was_woken = True
        return error

    def started(self, claim: Claim) -> None:
        """Record that the request has its *claim*, and that its user has come to their reservation, if any."""
        record_start(self._directory, os.geteuid())
        # Only reservations of its devices count, because the end of a job on other devices is no sign that the user has
        # come: it would bring back a reservation that is over.
        devices = {device.uuid for device in claim}
        here = [reservation for reservation in self._reservations if not devices.isdisjoint(reservation.devices)]
        claim.arrival_files = record_arrival(self._directory, here)

    def _join(self, snapshot: Snapshot, requests: Sequence[Request]) -> Waiter:
        mine = self._ticket(requests)
        queue = read_queue(self._directory, snapshot, mine, rules=self._rules)
        mine = replace(mine, promise=promise(queue.of(mine.id), self._rules, queue.now))
        uuids = [device.uuid for device in snapshot.devices]
        try:
            return Waiter(self._directory, uuids, mine, partial(self._sample_for_all, queue), self._backend)
        except OSError as error:
            why = translated(why_full(self._directory, error))
            raise LockDirectoryError(
                _("no ticket can be written into {records}: {why}.  Try --no-wait.").format(
                    records=self._directory.records, why=why
                )
            ) from error

    def _sample_for_all(self, before: QueueState, with_health: bool) -> QueueState:
        """Sample for all requests that wait.  While the driver fails, no request starts, and it is read again later.

        Raises:
            BackendError: this process can start no worker.  Another one may be able to, so let that one lead.
        """
        while True:
            try:
                snapshot = self._backend.sample(self._fields)
                if with_health:
                    snapshot = self._with_health(snapshot, self._fields)
                snapshot = with_reserved_instances(self._backend, self._directory, snapshot)
                queue = read_queue(self._directory, snapshot, rules=self._rules)
            except BackendError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                return replace(before, positions=())
            if (needed := _fields_of(queue)) <= self._fields:
                return queue
            self._fields |= needed


def _fields_of(queue: QueueState) -> frozenset[str]:
    """Return the field groups that are needed to plan all requests of *queue*."""
    return fields_needed_by_all(*[request for position in queue.positions for request in position.ticket.requests])


@dataclass(frozen=True)
class QueueAnswer:
    """The position of one request at one moment; *requested* are its alternatives."""

    queue: QueueState
    position: QueuePosition
    requested: tuple[Request, ...]

    @property
    def startable(self) -> tuple[Request, ...]:
        """The alternative that may be claimed now, or () while the request has to wait."""
        if not self.position.now or self.position.request is None:
            return ()
        chosen = self.requested[self.position.ticket.requests.index(self.position.request)]
        return (chosen if len(self.queue.positions) == 1 else replace(chosen, max_gpus=None),)

    @property
    def is_later(self) -> bool:
        """Whether the driver need not be read: another request starts first."""
        return not self.position.now and self.position.request is not None

    @property
    def kept(self) -> dict[str, str]:
        """uuid -> the user for whom it is kept, for devices that others may claim now."""
        return kept_for_others(self.queue, self.position.ticket.id)

    def explained(self, error: NotEnoughGpus) -> NotEnoughGpus:
        """Return *error* with the queue position and the estimated start, if waiting can help."""
        if isinstance(error, ImpossibleRequest):
            return error
        text, ticket = position_text(self.position, self.queue), self.position.ticket
        if not ticket.id and not ticket.after:  # not queued, but could be
            text = sentence("queue.not_now", "not now; it would be {text}", text=text)
        explained = waiting_error(ticket.num_gpus, text, error)
        explained.brief = brief_text(self.position, self.queue)
        return explained


class Waiter:
    """A process that waits in the queue with *ticket*, until withdraw(); see Leader for *uuids* and *read*.

    The worker of *backend* ends before this process sleeps, unless the process leads.

    Raises:
        OSError: the ticket cannot be written.
        LockDirectoryError: the queue's lock file cannot be used.
    """

    def __init__(
        self,
        directory: LockDirectory,
        uuids: Sequence[str],
        ticket: Ticket,
        read: Callable[[bool], QueueState],
        backend: Backend,
    ) -> None:
        self._directory, self._uuids, self._read, self._backend = directory, uuids, read, backend
        self._leads: Leader | None = None
        self._is_substitute = False  # whether it leads although another process has the queue's lock
        self._is_deputy = False
        self._leader_tickets: Sequence[Ticket] | None = None  # of the process that the deputy watches
        self._leader = ProcessWatch()  # whose end makes us try to lead
        self._wakes, self._woken_at = WAKES, time.monotonic()
        self._own_check = ALONE_SECONDS  # seconds between two checks of whether any process leads
        self._may_be_alone = True  # until such a check has found a process that leads
        with ExitStack() as stack:
            self._queue = open_lock(directory, "queue")
            stack.callback(os.close, self._queue)
            # The directory itself serves as the deputy's lock, because users cannot make a further lock file, and a
            # machine that was set up by an earlier version has none.
            self._deputy = os.open(directory.locks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._deputy)
            self._held = OwnTicket(directory, ticket_content(ticket))
            stack.callback(self._held.withdraw)
            self.ticket = replace(ticket, id=self._held.id)
            stack.pop_all()

    def sleep(self, seconds: float | None, report: Callable[[], object], every: float | None = None) -> None:
        """Return when it is worth trying, or after *seconds*; *report* is called about every *every* seconds."""
        until = None if seconds is None else time.monotonic() + seconds
        own_check_at = time.monotonic() + self._own_check
        must_sample = may_lead = True
        while until is None or time.monotonic() < until:
            if may_lead:
                self._try_to_lead()
            if self._leads and must_sample:
                self._held.send_heartbeat()
                if self._leads.sample(self.ticket.id):
                    self._slow_down(until)
                    return
            report()
            if not (self._leads or self._may_be_alone):  # these sample again in a moment
                self._backend.close()
            ready = self._nap(until, every)
            messages = b""
            if self._held.waker in ready:
                self._slow_down(until)
                messages = self._held.drain()
            # The daemon wakes even a leader: for a decision of its own, which nothing else reports.
            must_sample = not self._leads or self._leads.must_sample(ready) or MAY_START in messages
            # Where the daemon decides which request is next, its word counts even for a leader.
            if MAY_START in messages and (self._directory.closed or not self._leads):
                return
            has_ended = not ready.isdisjoint(self._leader.descriptors)
            may_lead = not self._leads and (NEW_LEADER in messages or has_ended or self._must_take_over())
            if time.monotonic() >= own_check_at:
                may_lead, is_alone = not self._leads, self._is_alone()
                self._may_be_alone = is_alone
                self._own_check = min(ALONE_SECONDS, OWN_CHECK_SECONDS) if is_alone else OWN_CHECK_SECONDS
                own_check_at = time.monotonic() + self._own_check
                if is_alone:
                    return

    def withdraw(self) -> None:
        """Leave the queue, and let another process lead.  It can be called again, also after it was interrupted."""
        if self._queue < 0:
            return
        self._held.withdraw()
        self._leader.close()
        self.resign()
        locks, self._queue = (self._queue, self._deputy), -1
        for lock in locks:
            os.close(lock)

    def resign(self) -> None:
        """Let another process lead if this one does, because it cannot sample, and go on waiting."""
        leads, self._leads = self._leads, None
        if leads:
            with suppress(OSError, ClaimError):
                leads.close()
                self._is_substitute = False
                fcntl.flock(self._queue, fcntl.LOCK_UN)
                self._resign_as_deputy()
                self._find_heirs()

    def _resign_as_deputy(self) -> None:
        self._is_deputy = False
        fcntl.flock(self._deputy, fcntl.LOCK_UN)

    def _others(self) -> list[Ticket]:
        return [ticket for ticket in read_tickets(self._directory)[0] if ticket.id != self.ticket.id]

    def _find_heirs(self) -> None:
        tickets = sorted(self._others(), key=lambda ticket: -ticket.since)  # the newest will wait longest
        heirs = (ticket for ticket in tickets if is_responsive(self._directory, ticket))
        wake(self._directory, list(islice(heirs, HEIRS)), NEW_LEADER)

    def _nap(self, until: float | None, every: float | None) -> set[int]:
        """Sleep, and return the descriptors that are readable."""
        now = time.monotonic()
        ends = [now + min(self._own_check, every or (PROGRESS_SECONDS if os.isatty(2) else OWN_CHECK_SECONDS))]
        ends += [self._leads.until] if self._leads else []
        ends += [until] if until is not None else []
        others = self._leads.descriptors if self._leads else self._leader.descriptors
        if self._leads:
            self._held.send_heartbeat()  # after a sample, and even if something always wakes it before a pause is over
        while True:
            left = min(ends) - time.monotonic()
            pause = WATCH_SECONDS if self._leads or self._is_deputy else DEPUTY_SECONDS
            ready = wait_for([self._held.waker, *others], min(left, pause))
            if ready or left <= pause:
                return ready
            if self._leads:
                self._held.send_heartbeat()
            if self._ends_substitution() or (not self._leads and self._must_take_over()):
                return ready

    def _must_take_over(self) -> bool:
        """Return whether this process is the deputy and has to lead, because no process does so for the others."""
        with suppress(OSError, ClaimError):
            self._is_deputy = try_flock(self._deputy)
            if not self._is_deputy or self._shows_life(self._leader_tickets, SILENT_SECONDS):
                return False
            self._leader_tickets = self._find_leader()
            if self._shows_life(self._leader_tickets, SILENT_SECONDS):
                return False
            return self._leader_tickets is not None or try_flock(self._queue)
        return False

    def _ends_substitution(self) -> bool:
        """Stop leading as a substitute if the leader works again, and return whether it does.

        If the leader has gone, this process becomes the leader.
        """
        if not self._is_substitute:
            return False
        with suppress(OSError, ClaimError):
            if try_flock(self._queue):
                self._is_substitute = False
                self._resign_as_deputy()
                return False
            self._leader_tickets = self._find_leader()
            if self._leads and self._shows_life(self._leader_tickets, SILENT_SECONDS):
                self._leads.close()
                self._leads, self._is_substitute = None, False
                return True
        return False

    def _find_leader(self) -> Sequence[Ticket] | None:
        """Return the tickets of the process that has the lock of the queue, or None if that is none or unknown."""
        pid = flock_holder(self._queue)
        if pid is None:
            return None
        if is_stopped(pid):
            return []
        tickets = tickets_of_process(self._directory, pid)
        return tickets or [ticket for ticket in self._others() if ticket.pid == pid]

    def _shows_life(self, tickets: Sequence[Ticket] | None, seconds: float) -> bool:
        """Return whether the process of *tickets* is not stopped, and gave a sign of life within so many seconds."""
        since = time.time() - seconds
        return any(
            is_responsive(self._directory, ticket) and last_heartbeat(self._directory, ticket) > since
            for ticket in tickets or ()
        )

    def _slow_down(self, until: float | None) -> None:
        """Wait if this process was woken for nothing again and again, because any user can write into a waker."""
        now = time.monotonic()
        self._wakes = min(WAKES, self._wakes + (now - self._woken_at) / WAKE_SECONDS) - 1
        self._woken_at = now
        if self._wakes < 0:
            time.sleep(WAKE_SECONDS if until is None else max(0.0, min(WAKE_SECONDS, until - now)))

    def _try_to_lead(self) -> None:
        if self._leads:
            return
        for _attempt in range(2):  # the leader may end before its pid is known, and its end would go unnoticed
            if try_flock(self._queue):
                break
            pid = flock_holder(self._queue)
            if not self._leader.watch([pid] if pid else []) and pid:
                self._is_substitute = self._must_take_over()
                if self._is_substitute:
                    break
                return
        else:
            return
        if not self._is_substitute:
            self._resign_as_deputy()  # one of the other processes watches this one
        self._leader.close()
        self._leads = Leader(self._directory, self._uuids, self._read)
        with suppress(OSError, ClaimError):
            wake(self._directory, self._others(), NEW_LEADER)  # so that they watch this process from now on

    def _is_alone(self) -> bool:
        """Return whether this process must sample by itself, because no leader does; called now and then."""
        if not self._held.counts:  # the ticket was removed: a new position is better than none
            with suppress(OSError):
                held = OwnTicket(self._directory, ticket_content(self.ticket))
                self._held.withdraw()
                self._held, self.ticket = held, replace(self.ticket, id=held.id)
            return True
        if self._leads:
            self._held.send_heartbeat()
            return False
        return not self._shows_life(self._find_leader(), SIGNS_MISSED * OWN_CHECK_SECONDS)


def wait_until_over(
    what: str,
    directory: LockDirectory,
    ticket: Ticket,
    report: Callable[[str], object],
    environ: Mapping[str, str] = os.environ,
    has_ended: Callable[[str], bool] = lambda what: False,
) -> None:
    """Wait until the claim or the process *what* has ended; meanwhile, a ticket shows that in the queue.

    Args:
        what: a pid; or the id of a claim, or the beginning of one.
        ticket: of the waiting request, for others to see; no other request waits for it.
        report: called once in a while, with a text that says what is waited for.
        environ: says inside which claim this runs.
        has_ended: returns whether there was a claim with an id that no living claim has.

    Raises:
        InvalidRequest: there is no such claim or process, or it cannot end before this process does.
    """
    if not what:  # --after "$UNSET"
        raise InvalidRequest(_("--after is empty: name a claim or a process."))
    # The id of a claim has eight hexadecimal digits: one that looks like a pid is taken for a claim if there is one.
    claims = [claim for claim in read_records(directory) if claim.id.startswith(what)]
    claims = [claim for claim in claims if claim.id == what] or claims
    if not claims and _PID.fullmatch(what):
        _wait_for_process(int(what), directory, ticket, report)
        return
    if not claims and has_ended(what):
        return
    if len(claims) != 1:
        raise InvalidRequest(_which_one(what, claims))
    own = environ.get("GPUGUARD_CLAIM", "")
    if own == claims[0].id or own.startswith(f"{claims[0].id}."):
        raise InvalidRequest(
            _("--after {what} is the claim that this runs in: it would wait for itself.").format(what=what)
        )
    _wait_for_claim(claims[0], directory, ticket, report)


def _which_one(what: str, claims: list[ClaimRecord]) -> str:
    if claims:
        return _("--after {what} could be {claims}: write more of it.").format(
            what=what, claims=", ".join(claim.id for claim in claims)
        )
    advice = _(
        "`gpuguard who` shows the claims, `gpuguard queue` who waits, `gpuguard events` which claims have ended."
    )
    return _("--after {what}: there is no such claim or process now, and no event of such a claim.\n{advice}").format(
        what=what, advice=advice
    )


def _wait_for_process(pid: int, directory: LockDirectory, ticket: Ticket, report: Callable[[str], object]) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise InvalidRequest(_which_one(str(pid), [])) from None
    except OSError as error:
        raise InvalidRequest(
            _("--after {pid}: its end cannot be waited for ({strerror}).  Name the process itself, or a claim.").format(
                pid=pid, strerror=error.strerror
            )
        ) from None
    after = sentence("queue.after_process", "waits until process {pid} has ended", pid=pid)
    with ExitStack() as stack:
        stack.callback(os.close, process)
        stack.callback(_visible_ticket(directory, ticket, after).withdraw)
        report(translated(after))
        while not wait_for([process], _progress_seconds()):
            report(translated(after))


def _wait_for_claim(
    claim: ClaimRecord, directory: LockDirectory, ticket: Ticket, report: Callable[[str], object]
) -> None:
    after = sentence("queue.after_claim", "waits until {user}'s claim {id} has ended", user=claim.user, id=claim.id)
    file = os.path.basename(record_path(directory, claim.uid, claim.id))
    checks: list[float] = []
    watch = watch_if_possible(directory.records)
    with ExitStack() as stack:
        if watch:
            stack.callback(watch.close)
        stack.callback(_visible_ticket(directory, ticket, after).withdraw)
        while _lives(directory, claim):
            report(translated(after))
            pause = _progress_seconds() if watch else min(POLL_SECONDS, _progress_seconds())
            wait_for([watch.descriptor] if watch else [], checks.pop(0) if checks else pause)
            if watch and not watch.names().isdisjoint({file, ""}):
                checks = [*CHECK_SECONDS]


def _progress_seconds() -> float:
    return PROGRESS_SECONDS if os.isatty(2) else LOG_SECONDS


def _lives(directory: LockDirectory, claim: ClaimRecord) -> bool:
    try:
        return read_record(directory, claim.uid, claim.id) is not None
    except (OSError, ClaimError) as error:
        if not passing(error):
            raise
        return True  # as far as can be seen now


def _visible_ticket(directory: LockDirectory, ticket: Ticket, after: str) -> OwnTicket:
    """Return a ticket for others to see, until it is withdrawn."""
    try:
        return OwnTicket(directory, ticket_content(replace(ticket, after=after)))
    except OSError as error:
        why = translated(why_full(directory, error))
        raise LockDirectoryError(
            _("no ticket can be written into {records}: {why}.").format(records=directory.records, why=why)
        ) from error
