"""The verbs of `gpuguard jobs` that change something: cancel, retry, resume, hold, unhold, first, update, clean.

Each writes its event or its record first and reads the states after it.  A supervisor does it the other way round: it
writes down its start and then reads what was changed.  So one of the two always sees the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from gpuguard.backends import default_backend
from gpuguard.batch.dispatchers import changed
from gpuguard.batch.job_facts import KEPT_SECONDS, directory_of, read_jobs, remove_ended
from gpuguard.batch.job_records import CANCEL, RESUME, RETRY, JobEvent, JobRecord, JobStore, StoredJob
from gpuguard.batch.states import ENDED, RUNNING, TaskState
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.ids import job_and_task
from gpuguard.cli.jobs.owners import JobWord, job_words
from gpuguard.cli.options import SubcommandRow, add_table, quantity
from gpuguard.errors import ClaimError, InvalidRequest
from gpuguard.jsonio import loads
from gpuguard.locale import N_, _, translated
from gpuguard.locale.messages import sentence
from gpuguard.procfs import boot_id
from gpuguard.sanitize import neutralise
from gpuguard.units import format_count, parse_duration
from gpuguard.views.text import put

# A change of a record, on behalf of a user if that is not the owner.
Change = Callable[[argparse.Namespace, JobRecord, str | None], JobRecord]

IDS_OR_LAST = "such as 17, or 17.3 for a task of it (default: @, the last)"


def ids_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="such as 17, 17.3 for a task of it, or @ for the last")


def ids_or_last_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="*", default=["@"], help=IDS_OR_LAST)


def one_meant(store: JobStore, word: str) -> tuple[StoredJob, int | None]:
    """Return the job that *word* means, and its task or None for all (see claims.ids).  Raises InvalidRequest."""
    found = job_and_task(word, store.ids())
    stored = None if found is None else store.read(found[0])
    if found is None or stored is None:
        raise InvalidRequest(_("there is no job {word}: `gpuguard jobs --ended` shows all.").format(word=word))
    if found[1] is not None and found[1] >= len(stored.record.tasks):
        raise InvalidRequest(_("job {job} has no task {task}.").format(job=stored.id, task=found[1]))
    return stored, found[1]


def meant(store: JobStore, words: Sequence[str]) -> Iterator[tuple[StoredJob, int | None]]:
    """Yield the jobs that *words* mean, each with the number of a task or None for all.  Raises InvalidRequest."""
    return iter([one_meant(store, word) for word in words])  # a wrong word changes nothing of what stands before it


def _states(store: JobStore, stored: StoredJob, task: int | None) -> list[TaskState]:
    states = read_jobs(store, ids=[stored.id]).states.get(stored.id, [])
    return [state for state in states if task in (None, state.task)]


def job_name(stored: StoredJob, task: int | None) -> str:
    """Return ``"17"``, or ``"17.3"`` for a task of it."""
    return str(stored.id) if task is None else f"{stored.id}.{task}"


CANCELLED = {
    "ended": N_("job {job} is cancelled."),
    "ending": N_("job {job} is being ended."),
    "ended before": N_("job {job} has ended already."),
}


def _cancel(args: argparse.Namespace) -> int:
    status = 0
    for job in _owned(args):
        name, outcome, faults = cancel_of(job, usual_directory())
        put([_(CANCELLED[outcome]).format(job=name)])
        put([neutralise(f"gpuguard: {translated(fault)}") for fault in faults], sys.stderr)
        status |= bool(faults)
    return status


def cancel_of(job: JobWord, directory: LockDirectory) -> tuple[str, str, list[str]]:
    """Cancel the job of its owner; see JobWord.do for *directory*.  Raises GpuguardError, OSError.

    Returns:
        The job's name, with its owner if that is not the caller, and what cancel_job() returns.
    """

    def act(store: JobStore, word: str, by: str | None) -> tuple[str, str, list[str]]:
        stored, task = one_meant(store, word)
        return (job_name(stored, task), *cancel_job(store, stored, task, by))

    name, outcome, faults = job.do(act, directory)
    return neutralise(job.prefix + name), outcome, faults


def cancel_job(store: JobStore, stored: StoredJob, task: int | None, by: str | None = None) -> tuple[str, list[str]]:
    """Cancel a job or a task of it, on behalf of *by* if that is not its owner.

    Returns:
        A key of CANCELLED, and why some of its tasks could not be ended.
    """
    if all(state.state in ENDED and state.state != "lost" for state in _states(store, stored, task)):
        return "ended before", []
    why = sentence("job.cancelled_by", "cancelled by {user}", user=by) if by else None
    store.append(stored.id, JobEvent(kind=CANCEL, time=round(time.time(), 3), task=task, why=why))
    changed(store, stored.record.source, may_start=by is None)
    running = [state for state in _states(store, stored, task) if state.state in RUNNING]
    faults = []
    if running:
        from gpuguard.cli.jobs.ending import end_task  # 100 ms, for what runs
    for state in running:
        try:
            end_task(directory_of(stored.record.source), state, by=by)
        except ClaimError as fault:
            faults.append(str(fault))
    return "ending" if running else "ended", faults


def _owned(args: argparse.Namespace) -> list[JobWord]:
    """Return the jobs that are named.  A wrong word among the caller's own changes nothing of what stands before it."""
    words = job_words(args.jobs)
    meant(JobStore(), [job.word for job in words if job.owner == os.geteuid()])
    return words


def usual_directory() -> LockDirectory:
    """Return the claim directory of this machine, or the one that GPUGUARD_DIR names.  Raises ClaimError."""
    return lock_directory(os.environ.get("GPUGUARD_DIR"), backend=default_backend(), make=False)


def _retry(args: argparse.Namespace) -> int:
    store = JobStore()
    for stored, task in meant(store, args.jobs):
        tried = ENDED - {"completed", "cancelled"} if args.failed else ENDED
        again = [state for state in _states(store, stored, task) if state.state in tried]
        _again(store, stored, again)
        put([_("job {job}: {count} again.").format(job=job_name(stored, task), count=format_count(len(again), "task"))])
    return 0


def _again(store: JobStore, stored: StoredJob, states: Sequence[TaskState]) -> None:
    if states:
        event = JobEvent(kind=RETRY, time=round(time.time(), 3), boot=boot_id())
        store.append(stored.id, *(replace(event, task=state.task, attempt=state.attempt) for state in states))
        changed(store, stored.record.source)


def _retry_options(parser: argparse.ArgumentParser) -> None:
    ids_options(parser)
    parser.add_argument("--failed", action="store_true", help="only the tasks that have failed or were lost")


def _resume(args: argparse.Namespace) -> int:
    store, resumed = JobStore(), 0
    jobs = read_jobs(store)
    for stored in jobs.stored:
        lost = [state for state in jobs.states[stored.id] if state.state == "lost"]
        if any(not state.is_gone for state in lost):
            store.append(stored.id, JobEvent(kind=RESUME, time=round(time.time(), 3), boot=boot_id()))
            changed(store, stored.record.source)
        _again(store, stored, [state for state in lost if state.is_gone])
        resumed += bool(lost)
    put([_("{count} resumed.").format(count=format_count(resumed, "job"))])
    return 0


def _change(args: argparse.Namespace, how: Change, said: str) -> int:
    """Change the records of jobs that wait, and say what was done of those of which a task still waits."""

    def act(store: JobStore, word: str, by: str | None) -> tuple[int, bool]:
        stored, task = one_meant(store, word)
        if task is not None:
            raise InvalidRequest(_("{job}.{task} is a task: name its job, {job}.").format(job=stored.id, task=task))
        if waits := _waits(store, stored):  # what a job of the past is tried again with must be what it was
            store.replace(how(args, stored.record, by))
            changed(store, stored.record.source, may_start=by is None)
            waits = _waits(store, stored)
        return stored.id, waits

    status = 0
    for job in _owned(args):
        number, waits = job.do(act, usual_directory())
        name = neutralise(f"{job.prefix}{number}")
        if waits:
            put([_(said).format(job=name)])
        else:
            put([f"gpuguard: {_('no task of job {job} waits any more.').format(job=name)}"], sys.stderr)
            status = 1
    return status


def _waits(store: JobStore, stored: StoredJob) -> bool:
    return any(state.state == "waiting" for state in _states(store, stored, None))


def _held(args: argparse.Namespace, record: JobRecord, by: str | None) -> JobRecord:
    return replace(record, held=True, held_by=by)


def _unheld(args: argparse.Namespace, record: JobRecord, by: str | None) -> JobRecord:
    return replace(record, held=False, held_by=None)


def _first(args: argparse.Namespace, record: JobRecord, by: str | None) -> JobRecord:
    return replace(record, rank=-time.time())


def _updated(args: argparse.Namespace, record: JobRecord, by: str | None) -> JobRecord:
    from gpuguard.cli.jobs.words import arguments_of  # 50 ms, for `update` alone
    from gpuguard.cli.run import parsed

    options = loads(record.options.encode())
    options |= {} if args.time_limit is None else {"time_limit": args.time_limit}
    options |= {} if args.num_gpus is None else {"num_gpus": args.num_gpus}
    command = record.command if args.command is None else tuple(shlex.split(args.command))
    updated = replace(record, command=command, options=json.dumps(options))
    job = parsed(arguments_of(updated, 0))
    return replace(updated, gpus=job.requests[0].num_gpus)


def _update_options(parser: argparse.ArgumentParser) -> None:
    ids_options(parser)
    add_table(
        parser,
        ("-n --num-gpus", "N", "so many GPUs"),
        ("--time-limit", "DURATION", "as in 4h"),
        ("--command", "TEXT", "another command, as in 'python train.py --lr 0.1'"),
    )


def _clean(args: argparse.Namespace) -> int:
    seconds = quantity("--older-than", args.older_than, parse_duration)
    removed = remove_ended(JobStore(), time.time() - (KEPT_SECONDS if seconds is None else seconds))
    put([_("{count} removed.").format(count=format_count(removed, "job"))])
    return 0


def _clean_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="DURATION", help="that ended so long ago (default: 30d)")


def _no_options(parser: argparse.ArgumentParser) -> None:
    pass


VERBS = {
    "cancel": SubcommandRow("end jobs, or take them out of the queue", ids_options, _cancel),
    "retry": SubcommandRow("start jobs that have ended again", _retry_options, _retry),
    "resume": SubcommandRow("start the jobs that were lost, as when the machine restarted", _no_options, _resume),
    "hold": SubcommandRow(
        "keep jobs that wait from starting",
        ids_options,
        partial(_change, how=_held, said=N_("job {job} is held.")),
    ),
    "unhold": SubcommandRow(
        "let them start",
        ids_options,
        partial(_change, how=_unheld, said=N_("job {job} is not held any more.")),
    ),
    "first": SubcommandRow(
        "start a job before your others",
        ids_options,
        partial(_change, how=_first, said=N_("job {job} comes before your others.")),
    ),
    "update": SubcommandRow(
        "change jobs that wait",
        _update_options,
        partial(_change, how=_updated, said=N_("job {job} is changed.")),
    ),
    "clean": SubcommandRow("remove jobs that have ended, with their logs", _clean_options, _clean),
}
