"""The jobs of this user as they are now: their records and events, joined with the claims that are held.

Two facts are read one after the other, so what seems lost is read again until both say so twice: a supervisor writes
down the end of its job before it lets go of the claim, a task that was started meanwhile has its claim before its start
is written, and the record of a claim is not seen at the moment in which a supervisor replaces that of the dispatcher.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

from gpuguard.batch.job_records import JobStore, Source
from gpuguard.batch.states import HeldClaims, Jobs, all_ended, ended_for_good, jobs_of
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import read_records
from gpuguard.claims.unlock import is_supervisor
from gpuguard.errors import GpuguardError
from gpuguard.model import ClaimRecord
from gpuguard.procfs import boot_id, stat_of, uid_of

KEPT_SECONDS = 30 * 86400.0  # after its end a job is removed with its logs
UNFINISHED_SECONDS = 3600.0  # after which what a submission has begun was not finished because it was killed


def directory_of(source: Source, *, make: bool = False) -> LockDirectory:
    """Return the claim directory of the jobs of *source*.  Raises ClaimError."""
    return lock_directory(source.dir, backend=source.backend or "", make=make)


def held_claims(directory: LockDirectory) -> dict[str, bool]:
    """Return the ids of this user's claims that are held now, and whether a `gpuguard run` looks after each one."""
    uid = os.geteuid()
    return {record.id: is_looked_after(record) for record in read_records(directory) if record.uid == uid}


def is_looked_after(claim: ClaimRecord) -> bool:
    """Return whether the `gpuguard run` of a claim lives, or the dispatcher that has not handed it over yet."""
    stat = None if claim.pid is None else stat_of(claim.pid)
    if claim.pid is None or stat is None or not stat.lives:
        return False
    return uid_of(claim.pid) == claim.uid and is_supervisor(claim.pid)


def open_jobs(store: JobStore, most_running: int | None = None, *, last: int = 0) -> Jobs:
    """Return the jobs of this user that wait or run, and the *last* that have ended; see Jobs for the bound.

    The others are not read.  A few jobs more may be returned, which have ended as well.
    """
    ended = store.ended()
    ids = store.ids()
    left_out = [job for job in ids if job in ended]
    left_out = left_out[: max(0, len(left_out) - last)]
    jobs = read_jobs(store, most_running, set(ids).difference(left_out))
    now = ended | {stored.id: stored.size for stored in jobs.stored if ended_for_good(jobs.states[stored.id])}
    if now != ended:
        with suppress(OSError):  # it will be read once more
            store.keep_ended(now)
    return jobs


def read_jobs(store: JobStore, most_running: int | None = None, ids: Iterable[int] | None = None) -> Jobs:
    """Return the jobs of this user on this host as they are now; see Jobs for the bound.

    These are all, or those of *ids* and the ones that must succeed before them.
    """
    found = {job: store.read(job) for job in (store.ids() if ids is None else ids)}
    others = {job for stored in found.values() if stored for job in stored.record.after_ok}
    found |= {job: store.read(job) for job in others.difference(found)}
    known = {job: stored for job, stored in sorted(found.items()) if stored}
    unread = [job for job, stored in found.items() if not stored and os.path.lexists(store.path(job))]
    before: list[int] = []
    while True:
        claims = {source: _claims_of(source) for source in {stored.record.source for stored in known.values()}}
        jobs = jobs_of(known.values(), claims, boot_id(), unread, most_running)
        gone = [job for job, states in jobs.states.items() if any(state.is_gone for state in states)]
        fresh = {job: stored for job in gone if (stored := store.read(job)) and stored != known[job]}
        if not fresh and gone == before:
            return jobs
        before = gone
        known |= fresh


def claims_waited_for(jobs: Jobs, now: float) -> dict[Source, list[ClaimRecord]]:
    """Return the claims of all users where a task waits for GPUs."""
    records = {stored.id: stored.record for stored in jobs.stored}
    found: dict[Source, list[ClaimRecord]] = {}
    for source in {records[state.job].source for state in jobs.waiting(now) if not state.blocked}:
        with suppress(GpuguardError, OSError):
            found[source] = list(read_records(directory_of(source)))
    return found


def remove_ended(store: JobStore, older: float) -> int:
    """Remove the jobs that have ended before *older* (unix time), unless another job names them; return how many.

    Raises OSError.
    """
    jobs, removed = read_jobs(store), 0
    needed = {job for each in jobs.stored for job in (*each.record.after, *each.record.after_ok)}
    for stored in jobs.stored:
        states = jobs.states[stored.id]
        last = max(state.ended or state.started or stored.record.submitted for state in states)
        if all_ended(states) and last <= older and stored.id not in needed:
            store.remove(stored.id)
            removed += 1
    store.remove_unfinished(time.time() - UNFINISHED_SECONDS)
    return removed


def _claims_of(source: Source) -> HeldClaims | None:
    try:
        return held_claims(directory_of(source))
    except (GpuguardError, OSError):
        return None
