"""The supervisor of a job that was started by the dispatcher: `gpuguard run`'s own code, with a log for a terminal."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import replace

from gpuguard.batch.dispatchers import changed
from gpuguard.batch.job_records import END, WITHDRAW, JobEvent, JobRecord, JobStore
from gpuguard.batch.states import TaskState, task_states
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import LockDirectory
from gpuguard.cli.job_log import JobLog, JobReport
from gpuguard.cli.options import backend_of
from gpuguard.cli.run import ParsedRun, run_on, set_environment
from gpuguard.errors import GpuguardError
from gpuguard.files import closed_after
from gpuguard.jobs.processes import become_subreaper, job_processes
from gpuguard.locale import _, translated
from gpuguard.model import EndCause
from gpuguard.procfs import boot_id
from gpuguard.units import local_time


def supervise(
    store: JobStore,
    record: JobRecord,
    state: TaskState,
    claim: Claim,
    job: ParsedRun,
    directory: LockDirectory,
    waited: float,
) -> int:
    """Run one attempt of a task on *claim*, which this process takes over, and write down how it ends."""
    args, causes = job.args, list[EndCause | None]()

    def write_end(status: int, why: str | None, cause: EndCause | None = None) -> None:
        causes.append(cause)
        with suppress(GpuguardError, OSError):  # a full disk: the job will count as lost
            store.append(record.id, replace(_event(END, state), status=status, why=why, outcome=cause))
            changed(store, record.source, may_start=False)

    claim.take_over()
    try:
        _redirect(store.log_path(record.id, state.task, state.attempt))
        # The record comes before the check: what is cancelled after the check is ended by the process that it names.
        name = f"{record.id}.{state.task}" if len(record.tasks) > 1 else str(record.id)
        requeue = state.requeues < record.requeue
        details = JobDetails(args.note, job.command, job.time_limit, waited=waited, job=name, requeue=requeue)
        claim.write_record(directory, details)
        if _was_changed(store, record, state):
            store.append(record.id, _event(WITHDRAW, state))
            claim.release()
            status = 0
        else:
            become_subreaper()
            _use_environment(store, record, state)
            set_environment(args)
            log = JobLog(quiet=args.quiet, path=args.log_file)
            log.say(
                _("job {id}, attempt {attempt}, submitted at {time}").format(
                    id=name,
                    attempt=state.attempt,
                    time=local_time(record.submitted, "%Y-%m-%d %H:%M:%S"),
                )
            )
            report = JobReport(log, job.targets, job.command)
            status = run_on(claim, job, backend_of(args), directory, report, waited=0.0, on_end=write_end)
    except (GpuguardError, OSError, ValueError) as fault:
        print(f"gpuguard: {translated(str(fault))}", file=sys.stderr, flush=True)
        if not job_processes((), claim.id):  # otherwise the claim is theirs, and the task is unwatched from now on
            write_end(125, str(fault))
            claim.release()
        status = 125
    with suppress(GpuguardError, OSError):
        # Now a dispatcher may be missing, because it was killed; before, it would have been started as a part of the
        # job.  If this process was told to end, so may be all of this user's, because the machine goes down.
        changed(store, record.source, may_start="signal" not in causes)
    return status


def _event(kind: str, state: TaskState) -> JobEvent:
    when = round(time.time(), 3)
    return JobEvent(kind=kind, time=when, task=state.task, attempt=state.attempt, claim=state.claim)


def _was_changed(store: JobStore, record: JobRecord, state: TaskState) -> bool:
    """Return whether the job was cancelled, held, updated or removed since the dispatcher has read it.

    What changes a record comes either before the start was written, and is seen here, or after it, and then the command
    that changes it sees that the task has started.
    """
    stored = store.read(record.id)
    if stored is None or stored.record != record:
        return True
    now = task_states(stored, {state.claim or "": True}, boot_id())[state.task]
    return now.cancelled or now.claim != state.claim  # started by another dispatcher before: see states


def _redirect(path: str) -> None:
    """Let the job, and what is said of it, write into its log, and read nothing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with closed_after(os.open(os.devnull, os.O_RDONLY)) as empty, closed_after(os.open(path, flags, 0o600)) as log:
        for descriptor, source in enumerate((empty, log, log)):
            os.dup2(source, descriptor)


def _use_environment(store: JobStore, record: JobRecord, state: TaskState) -> None:
    """Become what the job was submitted from: its environment and its directory.  Raises OSError, ValueError."""
    environment = {"PYTHONUNBUFFERED": "1", **store.environment(record.id)}
    environment["GPUGUARD_JOB"] = str(record.id)
    environment["GPUGUARD_TASK"] = record.tasks[state.task].get("task", str(state.task))
    environment["GPUGUARD_ATTEMPT"] = str(state.attempt)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(record.working_directory)
