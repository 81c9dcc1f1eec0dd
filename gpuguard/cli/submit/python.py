"""`gpuguard submit` for Python programs: the same job, as an object."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpuguard.batch.dispatchers import changed, start_missing
from gpuguard.batch.job_facts import read_jobs
from gpuguard.batch.job_records import JobStore
from gpuguard.batch.states import TaskState
from gpuguard.cli import build_parser
from gpuguard.cli.jobs import EXIT_NO_PATIENCE, wait_for
from gpuguard.cli.jobs.changes import cancel_job, one_meant
from gpuguard.cli.submit.detached import store_job
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.locale import _
from gpuguard.units import format_duration


@dataclass(frozen=True)
class Job:
    """A job of `gpuguard submit` on this machine, which outlives this program."""

    id: int

    @property
    def tasks(self) -> list[TaskState]:
        """The state of each of its tasks now; a job that was removed has none."""
        jobs = read_jobs(JobStore(), ids=[self.id])
        start_missing(JobStore(), jobs)
        return jobs.states.get(self.id, [])

    @property
    def result(self) -> str:
        """What became of its first task: "waiting", "running", "completed", "failed", ...; see `gpuguard jobs`."""
        return next((state.state for state in self.tasks), "lost")

    @property
    def log(self) -> str | None:
        """The path of what the last attempt of its first task prints, or None before the first attempt."""
        state = next(iter(self.tasks), None)
        return JobStore().log_path(self.id, state.task, state.attempt) if state and state.attempt else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the job has ended, and return its exit code: the first one that is not 0, or 125 if it has none.

        Args:
            timeout: seconds, or None to wait for ever.

        Raises:
            TimeoutError: it has not ended within *timeout*.
        """
        status = wait_for(JobStore(), [self.id], timeout)
        if status == EXIT_NO_PATIENCE and any(state.state in ("waiting", "running") for state in self.tasks):
            text = _("job {job} has not ended within {time}.").format(job=self.id, time=format_duration(timeout or 0.0))
            raise TimeoutError(text)
        return status

    def cancel(self) -> None:
        """End the job with all of its processes, or take it out of the queue.

        Raises:
            ClaimError: a task that runs could not be ended.
        """
        store = JobStore()
        stored, _task = one_meant(store, str(self.id))
        _outcome, faults = cancel_job(store, stored, None)
        if faults:
            raise ClaimError(faults[0])


def submit(command: Sequence[str], gpus: int = 1, **options: object) -> Job:
    """Start *command* as a job that outlives this program, as soon as there are GPUs for it.

    Args:
        command: the program and its arguments.
        gpus: how many.
        options: those of `gpuguard submit`, as in time_limit="4h", after_ok=17, sweep=["lr=0.1,0.01"], hold=True.

    Raises:
        InvalidRequest: an option is wrong.
        ImpossibleRequest: the job could never start on this machine.
    """
    if isinstance(command, str):  # a sequence of its letters
        raise InvalidRequest(_("the command is a list of words, as in {words}.").format(words=command.split()))
    words = ["-n", str(gpus)]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else [value]:
            if each not in (None, False):
                words += [option] if each is True else [option, str(each)]
    record = store_job(build_parser("submit").parse_args([*words, "--", *command]))
    with suppress(GpuguardError, OSError):  # the job is there, and the next look at it tries again
        changed(JobStore(), record.source)
    return Job(record.id)
