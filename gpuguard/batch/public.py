"""What every user may know of the jobs of others: a line for each job that waits, in the file that a dispatcher locks.

The records themselves lie in the homes of their users.  What runs is seen by its claim, whose record names the job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from gpuguard.batch.states import Jobs
from gpuguard.claims.directory import LockDirectory, is_unlocked
from gpuguard.claims.records import first_of_each
from gpuguard.files import closed_after, open_regular
from gpuguard.jsonio import decode, loads
from gpuguard.locale.messages import plain
from gpuguard.model import ClaimRecord
from gpuguard.sanitize import neutral_command
from gpuguard.users import user_name

MOST = 200  # jobs of one dispatcher
MOST_OF_ONE = 100  # files of one user that are read
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


@dataclass(frozen=True)
class PublicJob:
    """A job of any user that waits or runs, as every user may know it."""

    user: str
    id: str  # among those of its user: "17", or "17.3" for a task that runs
    state: Literal["running", "waiting"]
    since: float | None  # unix time of its start or, while it waits, of its submission
    what: str  # the command, as text
    num_gpus: int  # of each task
    devices: tuple[str, ...] = ()  # uuids, while it runs
    tasks: int = 1  # that wait
    unattended: bool = False  # no process of its user waits in the queue for it

    @property
    def full_id(self) -> str:
        """The id that means the same to every user, such as "alice/17"."""
        return f"{self.user}/{self.id}"


def public_jobs(directory: LockDirectory, claims: Iterable[ClaimRecord]) -> list[PublicJob]:
    """Return the jobs of all users: those that run, by the *claims* that are held, and those that wait.

    Raises OSError.
    """
    jobs = [
        PublicJob(claim.user, claim.job, "running", claim.since, neutral_command(claim.command),
                  len(claim.devices), claim.devices)
        for claim in claims
        if claim.job
    ]  # fmt: skip
    for uid, lives, waiting in published(directory):
        user = user_name(uid)
        jobs += [
            PublicJob(user, str(job.id), "waiting", job.submitted, job.what, job.gpus, (), job.tasks, not lives)
            for job in waiting.jobs
        ]
    return jobs


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
    with closed_after(os.open(f"/proc/self/fd/{lock}", os.O_WRONLY | os.O_CLOEXEC)) as descriptor:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(asdict(jobs)).encode())


def published(directory: LockDirectory) -> Iterator[tuple[int, bool, PublicJobs]]:
    """Yield of each dispatcher the uid of its user, whether it lives, and what waits for it."""
    start = f"{directory.prefix}jobs."
    names = sorted(name for name in directory.names() if name.startswith(start))
    for name in first_of_each(directory, names, MOST_OF_ONE)[0]:
        try:
            descriptor, status = open_regular(f"{directory.records}/{name}")
        except OSError:
            continue
        with closed_after(descriptor), suppress(ValueError):  # it is just being written
            if name[len(start) :].partition(".")[0] == str(status.st_uid):  # otherwise it has another user's name
                content = plain(loads(os.read(descriptor, _LONGEST)))  # a user's words are no sentences
                jobs = decode(PublicJobs, content)
                yield status.st_uid, not is_unlocked(descriptor), jobs
