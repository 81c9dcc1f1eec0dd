"""What every user may know of the jobs of others: a line for each job that waits, in the file that a dispatcher locks.

The records themselves lie in the homes of their users.  What runs is seen by its claim, whose record names the job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from gpuguard.batch.states import Jobs
from gpuguard.claims.directory import LockDirectory, is_unlocked
from gpuguard.files import open_regular
from gpuguard.jsonio import decode, loads
from gpuguard.sanitize import neutral_command

MOST = 200  # jobs of one dispatcher
_LONGEST = 2**17  # bytes of a file
_LONGEST_COMMAND = 200  # characters


@dataclass(frozen=True)
class WaitingJob:
    """A job of which tasks wait."""

    id: int
    tasks: int  # that wait
    gpus: int  # of each task
    submitted: float  # unix time
    what: str  # the command, as text


@dataclass(frozen=True)
class PublicJobs:
    """The jobs that wait for one dispatcher, as it has written them."""

    jobs: tuple[WaitingJob, ...] = ()
    place: str = ""  # where the records lie: see JobStore


def waiting_jobs(jobs: Jobs, ids: Sequence[int], place: str) -> PublicJobs:
    """Return the jobs of *ids* of which tasks wait, and the *place* of their records."""
    waiting: list[WaitingJob] = []
    for stored in jobs.stored:
        count = sum(state.state == "waiting" for state in jobs.states[stored.id]) if stored.id in ids else 0
        if count and len(waiting) < MOST:
            record, what = stored.record, neutral_command(stored.record.command)[:_LONGEST_COMMAND]
            waiting.append(WaitingJob(stored.id, count, record.gpus, record.submitted, what))
    return PublicJobs(tuple(waiting), place)


def publish(lock: int, jobs: PublicJobs) -> None:
    """Write into the file behind *lock*, which is our dispatcher's, what waits for it.  Raises OSError."""
    descriptor = os.open(f"/proc/self/fd/{lock}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(asdict(jobs)).encode())
    finally:
        os.close(descriptor)


def published(directory: LockDirectory) -> Iterator[tuple[int, bool, PublicJobs]]:
    """Yield of each dispatcher the uid of its user, whether it lives, and what waits for it."""
    start = f"{directory.prefix}jobs."
    for name in sorted(name for name in directory.names() if name.startswith(start)):
        try:
            descriptor, status = open_regular(f"{directory.records}/{name}")
        except OSError:
            continue
        try:
            if name[len(start) :].partition(".")[0] == str(status.st_uid):  # otherwise it has another user's name
                jobs = decode(PublicJobs, loads(os.read(descriptor, _LONGEST)))
                yield status.st_uid, not is_unlocked(descriptor), jobs
        except ValueError:  # it is just being written
            continue
        finally:
            os.close(descriptor)
