"""Your jobs that outlive the terminal: `gpuguard submit` starts them.

gpuguard jobs                    what waits and runs, and what has ended last
gpuguard jobs log -f 17          what job 17 prints
gpuguard jobs cancel 17          end it, with everything that it started
gpuguard jobs retry --failed 18  start the tasks of job 18 that failed again

@ is the last job, @~1 the one before it; 18.3 is task 3 of job 18.  Root may cancel, hold and unhold the jobs of all
users: alice/17.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence

from gpuguard import files
from gpuguard.batch.dispatchers import start_missing
from gpuguard.batch.job_facts import claims_waited_for, directory_of, held_claims, open_jobs, read_jobs
from gpuguard.batch.job_records import JobStore
from gpuguard.batch.public import public_jobs
from gpuguard.batch.states import ENDED, Jobs, all_ended
from gpuguard.claims.records import read_records
from gpuguard.cli.jobs import changes
from gpuguard.cli.jobs.changes import (
    IDS_OR_LAST,
    ids_or_last_options,
    job_name,
    meant,
    one_meant,
    usual_directory,
)
from gpuguard.cli.options import JSON, SubcommandRow, add_actions, add_source_options, add_table, quantity
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.queue.settings import read_queue_settings
from gpuguard.units import parse_duration
from gpuguard.views.jobs import MOST_ENDED, all_json, details_of, json_of, lines_of, lines_of_all, listed
from gpuguard.views.text import put, put_json

EXIT_NO_PATIENCE, EXIT_LOST = 124, 125
FOLLOW_SECONDS = 0.5
CHECK_SECONDS = 5.0  # between two looks at jobs while nothing tells of a change


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuguard jobs [ACTION] [options]"
    parser.set_defaults(action=None)
    add_table(
        parser,
        ("--all", None, "those of all users that wait or run on this machine"),
        JSON,
        ("--ended", None, "all jobs that have ended, not the last 20"),
        ("--tasks", None, "a line for each task"),
    )
    add_actions(parser, VERBS, prog="gpuguard jobs")


def main(args: argparse.Namespace) -> int:
    return VERBS[args.action].main(args) if args.action else _list(args)


def _jobs(store: JobStore, *, ended: bool) -> Jobs:
    """Return the jobs to list, or with *ended* all, after the start of a dispatcher that is missing."""
    most_running = read_queue_settings().rules.jobs.running
    jobs = read_jobs(store, most_running) if ended else open_jobs(store, most_running, last=MOST_ENDED)
    if start_missing(store, jobs):
        notice = _("no process waited in the queue for your jobs: one is started.")
        put([f"gpuguard: {notice}"], sys.stderr)
    return jobs


def _list(args: argparse.Namespace) -> int:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if args.all:
        directory = usual_directory()
        public = public_jobs(directory, read_records(directory))
        if args.json:
            put_json(all_json(public))
        else:
            put(lines_of_all(public, time.time(), width=width))
        return 0
    store, now = JobStore(), time.time()
    jobs = _jobs(store, ended=args.ended)
    ids = listed(jobs, ended=args.ended)
    if args.json:
        put_json(json_of(store, jobs, ids, now))
        return 0
    put(lines_of(jobs, ids, now, claims_waited_for(jobs, now), tasks=args.tasks, width=width))
    unread = [
        _("job {job}: its record cannot be read: {path}").format(job=job, path=store.path(job)) for job in jobs.unread
    ]
    put([f"gpuguard: {line}" for line in unread], sys.stderr)
    return 0


def _show(args: argparse.Namespace) -> int:
    store, now = JobStore(), time.time()
    jobs = _jobs(store, ended=True)
    for stored, _task in meant(store, args.jobs):
        put(details_of(jobs, stored.record, now))
    return 0


def _log(args: argparse.Namespace) -> int:
    store = JobStore()
    stored, task = one_meant(store, args.job)
    if task is None and len(stored.record.tasks) > 1:
        raise InvalidRequest(
            _("job {job} has {count} tasks: name one, as in {job}.0.").format(
                job=stored.id, count=len(stored.record.tasks)
            )
        )
    attempt, position = args.attempt or 1, 0
    while True:
        state = read_jobs(store, ids=[stored.id]).states[stored.id][task or 0]
        if not args.attempt and position == 0 and state.attempt:
            attempt = state.attempt  # the last one
        path = store.log_path(stored.id, state.task, attempt)
        if attempt > state.attempt and not args.follow:
            raise InvalidRequest(_("job {job} has not started yet.").format(job=job_name(stored, task)))
        if args.path:
            put([path])
            return 0
        if attempt <= state.attempt:
            position += _copy(path, position)
        if state.attempt > attempt and not args.attempt:
            position = 0  # it was started again
        elif not args.follow or attempt < state.attempt:
            return 0
        else:
            time.sleep(FOLLOW_SECONDS)
            if state.state in ENDED and state.claim not in held_claims(directory_of(stored.record.source)):
                _copy(path, position)  # the last line comes after the claim was released
                return 0


def _copy(path: str, position: int) -> int:
    """Print a log from *position* on, and return how many bytes these are."""
    try:
        with open(path, "rb") as log:
            log.seek(position)
            shutil.copyfileobj(log, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return log.tell() - position
    except FileNotFoundError:
        raise InvalidRequest(_("there is no log {path}.").format(path=path)) from None


def _log_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        ("job", "JOB", IDS_OR_LAST, {"nargs": "?", "default": "@"}),
        ("-f --follow", None, "go on until the job has ended"),
        ("--attempt", "N", "that attempt (default: the last one)", {"type": int}),
        ("--path", None, "print the name of the file"),
    )


def _wait(args: argparse.Namespace) -> int:
    store = JobStore()
    ids = [stored.id for stored, _task in meant(store, args.jobs)]
    return wait_for(store, ids, quantity("--for", args.for_, parse_duration), any_of=args.any)


def _wait_options(parser: argparse.ArgumentParser) -> None:
    ids_or_last_options(parser)
    add_table(
        parser,
        ("--for", "DURATION", "at most so long; then the exit code is 124", {"dest": "for_"}),
        ("--any", None, "until one of them has ended"),
    )


def wait_for(store: JobStore, ids: Sequence[int], seconds: float | None = None, *, any_of: bool = False) -> int:
    """Wait until jobs have ended; return the first exit code but 0, 124 if it takes too long, or 125 for lost."""
    until = None if seconds is None else time.monotonic() + seconds
    from gpuguard.queue.leader import watch_if_possible  # 20 ms, for those that wait

    watch = watch_if_possible(store.place)
    while True:
        jobs = read_jobs(store, ids=ids)
        ended = [job for job in ids if all_ended(jobs.states.get(job, []))]
        if len(ended) == len(ids) or (any_of and ended):
            codes = [state.status for job in ended for state in jobs.states.get(job, [])]
            return next((EXIT_LOST if code is None else code for code in codes if code != 0), 0)
        start_missing(store, jobs)
        left = CHECK_SECONDS if until is None else until - time.monotonic()
        if left <= 0:
            return EXIT_NO_PATIENCE
        files.wait_for([watch.descriptor] if watch else [], min(left, CHECK_SECONDS if watch else FOLLOW_SECONDS))
        if watch:
            watch.names()


def _dispatch_options(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument("--lock", type=int, default=-1, help=argparse.SUPPRESS)  # a descriptor: see batch.dispatchers


def _dispatch(args: argparse.Namespace) -> int:
    from gpuguard.cli.jobs.dispatcher import main  # 100 ms, for the dispatcher alone

    return main(args)


VERBS = {
    "show": SubcommandRow("everything about a job", ids_or_last_options, _show),
    "log": SubcommandRow("what a job prints", _log_options, _log),
    "wait": SubcommandRow("wait until jobs have ended, and return their exit code", _wait_options, _wait),
    **changes.VERBS,
    "dispatch": SubcommandRow("wait in the queue for all jobs; submit starts it", _dispatch_options, _dispatch),
}
