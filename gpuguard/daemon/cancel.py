"""Ending a waiting request or a job by its id: users can end their own, and root can end those of all users.

A request is ended by the signal that ends it by hand, and a job by its `gpuguard run`, as `release --stop` does.  What
a file says about its process is only its owner's word.  So a process is signalled only if it belongs to the owner of
the file and, after its pidfd was opened, the kernel says that it has this very file of the request or the claim locked.

This module does not release a claim whose processes live on: see release.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from gpuguard.claims.directory import LockDirectory, is_unlocked
from gpuguard.claims.holders import as_written, flock_holder, locked_by
from gpuguard.claims.ids import full_id, one_of
from gpuguard.claims.records import STOP, ReleaseRequest, read_record, read_records, record_path
from gpuguard.daemon.release import POLL_SECONDS, SupervisorChannel, unsupervised
from gpuguard.enforcement import by_hand, signals
from gpuguard.errors import ClaimError
from gpuguard.files import open_in_place
from gpuguard.history import audit_log
from gpuguard.locale import _
from gpuguard.locale.messages import sentence
from gpuguard.model import ClaimRecord, Event
from gpuguard.procfs import catches, uid_of
from gpuguard.queue.priority import Ticket
from gpuguard.queue.tickets import ticket_path, waiting_tickets
from gpuguard.users import user_name

END_SECONDS = 10.0  # for a process that was signalled to end
HOLDER_SECONDS = 1.0  # to read what a process has locked

ENDED = "ended"  # the request, or the program that had the claim
ENDING = "ending"  # the `gpuguard run` of the job ends it now


class LockHolder(NamedTuple):
    """A process that was proven to have locked the file behind *descriptor*."""

    pid: int
    pidfd: int
    descriptor: int


def cancel(directory: LockDirectory, text: str, by: str | None = None) -> tuple[Ticket | ClaimRecord, str]:
    """End the request or the job that *text* means (see claims.ids); return which one it was, and ENDED or ENDING.

    *by* is the user who wants it, by default the one with whose rights it is done.

    Raises:
        ClaimError: it was not ended; the message says why.
    """
    # Read the tickets first, because a request has the record of its claim before it gives up its ticket; so none is
    # overlooked.
    waiting = waiting_tickets(directory) or ()
    both: list[Ticket | ClaimRecord] = [*read_records(directory), *waiting]
    meant = one_of(text, {(each.uid, each.short_id): each for each in both}.values(), os.geteuid())
    if meant is None:
        raise ClaimError(
            _(
                "no request and no claim has an id that begins with {text!r}, and it is no job: "
                "`gpuguard queue`, `gpuguard who` and `gpuguard jobs` show them."
            ).format(text=text)
        )
    by = by or user_name(os.geteuid())
    return meant, _end_request(directory, meant, by) if isinstance(meant, Ticket) else _end_job(directory, meant, by)


def _end_request(directory: LockDirectory, ticket: Ticket, by: str) -> str:
    with _lock_holder(ticket_path(directory, ticket.id), ticket) as holder:
        if holder:
            # A program that catches only Ctrl-C goes on after it, as a notebook does; `gpuguard run` ends by either.
            by_interrupt = catches(holder.pid, signal.SIGINT) and not catches(holder.pid, signal.SIGTERM)
            return _end(directory, holder, signal.SIGINT if by_interrupt else signal.SIGTERM, ticket)
    if claim := read_record(directory, ticket.uid, ticket.short_id):  # it has just started
        return _end_job(directory, claim, by)
    raise ClaimError(
        _(
            "no process is seen that waits with the request {id}: it has just ended, or it runs in a container, where "
            "it can be ended."
        ).format(id=full_id(ticket))
    )


def _end_job(directory: LockDirectory, claim: ClaimRecord, by: str) -> str:
    with SupervisorChannel(directory, claim) as supervisor:
        if supervisor:
            supervisor.stop_job(ReleaseRequest(STOP, by, at=time.time()))
            return ENDING
    with _lock_holder(record_path(directory, claim.uid, claim.id), claim) as holder:
        if holder is None:
            raise unsupervised(directory, claim)
        return _end(directory, holder, signal.SIGTERM, claim)


@contextmanager
def _lock_holder(path: str, meant: Ticket | ClaimRecord) -> Iterator[LockHolder | None]:
    """Yield the owner's process that is proven to have locked the file of *meant* at *path*, or None if none is."""
    opened: list[int] = []
    try:
        with suppress(OSError):
            opened.append(open_in_place(path))
        is_theirs = bool(opened) and os.fstat(opened[0]).st_uid == meant.uid
        yield _find_holder(opened, meant.uid, meant.pid) if is_theirs else None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _find_holder(opened: list[int], uid: int, pid: int | None) -> LockHolder | None:
    # The process that took the lock may have ended, and its pid may be another one's, while a child keeps the lock.
    for candidate in filter(None, dict.fromkeys((flock_holder(opened[0]), pid))):
        with suppress(OSError):
            opened.append(pidfd := os.pidfd_open(candidate))
            locked = locked_by(candidate, uid, HOLDER_SECONDS).values()
            if as_written(opened[0]) in locked and uid_of(candidate) == uid:
                return LockHolder(candidate, pidfd, opened[0])
    return None


def _end(directory: LockDirectory, holder: LockHolder, signum: int, meant: Ticket | ClaimRecord) -> str:
    """Signal the process, and wait until neither the request nor its claim is left."""
    by, devices = os.getuid(), meant.devices if isinstance(meant, ClaimRecord) else ()
    event = Event(
        time=time.time(),
        kind="terminate",
        outcome="about to",
        user=meant.user,
        devices=devices,
        pid=holder.pid,
        claim=meant.short_id,
        message=sentence("cancel.asked", "asked for by {user}", user=user_name(by)),
        facts=(("policy", by_hand.NAME), ("uid", meant.uid), ("by_uid", by)),
    )
    if not audit_log.append(event):
        raise ClaimError(
            _("nothing was done, because the log cannot be written: {complaint}.").format(
                complaint=audit_log.complaint()
            )
        )
    signals.forward(holder.pidfd, signum)
    signals.forward(holder.pidfd, signal.SIGCONT)  # a stopped process sees the other signal only when it goes on
    until = time.monotonic() + END_SECONDS
    while not is_unlocked(holder.descriptor) or read_record(directory, meant.uid, meant.short_id):
        if time.monotonic() >= until:
            raise ClaimError(
                _("process {pid} was asked to end, and has not ended within {seconds:.0f}s.").format(
                    pid=holder.pid, seconds=END_SECONDS
                )
            )
        time.sleep(POLL_SECONDS)
    return ENDED
