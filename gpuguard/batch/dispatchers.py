"""The dispatchers of this user: whether one runs, and how it is told of a change, or started.

A dispatcher waits in the queue for all jobs of a user and a source that wait: see cli.jobs.dispatcher.  It holds a lock
beside the claims as long as it lives.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from gpuguard.batch.job_facts import directory_of, open_jobs
from gpuguard.batch.job_records import JobStore, Source
from gpuguard.batch.logout import outliving
from gpuguard.batch.public import published
from gpuguard.batch.states import Jobs
from gpuguard.claims.directory import LockDirectory, is_unlocked
from gpuguard.claims.holders import flock_holder
from gpuguard.errors import ClaimError, GpuguardError
from gpuguard.files import READING, closed_after, create_file, open_in_place
from gpuguard.locale import _

# The dispatcher must not be the child of a process that would have to reap it, such as a notebook.  It has its lock
# before it loads gpuguard, so that no command that comes meanwhile takes it for dead: the pipe is closed by exec.
_DETACH = """
import contextlib, fcntl, os, sys
lock, (executing, its_end) = os.open(sys.argv[1], os.O_RDONLY | os.O_NOFOLLOW), os.pipe()
if os.fork():
    os.close(its_end)
    os.read(executing, 1)
else:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.set_inheritable(lock, True)
    os.execv(sys.argv[2], [*sys.argv[2:], "--lock", str(lock)])
"""
# The variables of what a dispatcher is started in, which it outlives; a job has its own environment.
_OF_THE_STARTER = ("CUDA_", "ROCR_", "HIP_", "ZE_", "SLURM_", "GPUGUARD_CLAIM", "GPUGUARD_GPUS", "GPUGUARD_MEMORY")


def lock_path(directory: LockDirectory, store: JobStore, source: Source) -> str:
    """Return the file that the dispatcher of *store* and *source* locks, beside the claims: never on NFS."""
    whose = zlib.crc32(os.fsencode(f"{store.place}\0{source.backend}"))
    return f"{directory.records}/{directory.prefix}jobs.{os.geteuid()}.{whose:08x}"


def open_lock(directory: LockDirectory, store: JobStore, source: Source) -> int:
    """Open the lock of the dispatcher.  Raises ClaimError, OSError."""
    path = lock_path(directory, store, source)
    with suppress(FileExistsError):
        os.close(create_file(path))
    descriptor = open_in_place(path, READING)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise ClaimError(_("{path} is another user's: ask an administrator to remove it.").format(path=path))
    return descriptor


def dispatcher_of(directory: LockDirectory, store: JobStore, source: Source) -> int | None:
    """Return the pid of the dispatcher, 0 if it is unknown, or None if none runs.

    Raises ClaimError, OSError.
    """
    with closed_after(open_lock(directory, store, source)) as descriptor:
        return None if is_unlocked(descriptor) else flock_holder(descriptor) or 0


def changed(store: JobStore, source: Source, *, may_start: bool = True) -> None:
    """Tell the dispatcher that records have changed; start one if none runs and *may_start* is true.

    Raises GpuguardError, OSError.
    """
    directory = directory_of(source, make=True)
    store.tell()
    pid = dispatcher_of(directory, store, source)
    if pid is None and may_start:
        _start(directory, store, source)
    elif pid:
        from gpuguard.queue.leader import MAY_START  # 20 ms, where there is one
        from gpuguard.queue.tickets import tickets_of_process, wake

        wake(directory, tickets_of_process(directory, pid), MAY_START)


def start_missing(store: JobStore, jobs: Jobs) -> bool:
    """Start the dispatchers that should run and do not, because they were killed; return whether there were any."""
    started = False
    for source in {source for source, _job in _without_dispatcher(store, jobs)}:
        with suppress(GpuguardError, OSError):
            _start(directory_of(source, make=True), store, source)
            started = True
    return started


@dataclass(frozen=True)
class StalledJobs:
    """The jobs of a user that wait although the dispatcher was killed that would start them."""

    uid: int
    jobs: int


def stalled_jobs(directory: LockDirectory) -> list[StalledJobs]:
    """Return the jobs of each user that wait without a dispatcher: ours by their records, others' as published."""
    store, counts = JobStore(), Counter[int]()
    for uid, lives, public in published(directory):
        if uid != os.geteuid() and not lives:
            counts[uid] += len(public.jobs)
    counts[os.geteuid()] = len(_without_dispatcher(store, open_jobs(store)))
    return [StalledJobs(uid, jobs) for uid, jobs in sorted(counts.items()) if jobs]


def _without_dispatcher(store: JobStore, jobs: Jobs) -> set[tuple[Source, int]]:
    """Return the jobs that wait although no dispatcher waits for them, each with its source."""
    sources = {stored.id: stored.record.source for stored in jobs.stored}
    waiting = {(sources[state.job], state.job) for state in jobs.waiting(time.time())}
    missing = set()
    for source in {source for source, _job in waiting}:
        with suppress(GpuguardError, OSError):
            if dispatcher_of(directory_of(source, make=True), store, source) is None:
                missing.add(source)
    return {(source, job) for source, job in waiting if source in missing}


def _start(directory: LockDirectory, store: JobStore, source: Source) -> None:
    """Start a dispatcher that outlives this process and its terminal.  Raises GpuguardError, OSError."""
    words = [sys.executable, "-m", "gpuguard", "jobs", "dispatch"]
    words += ["--backend", source.backend] if source.backend else []
    words += ["--dir", source.dir] if source.dir else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_STARTER)}
    with open(os.path.join(store.place, "dispatcher.log"), "ab") as log:
        done = subprocess.run(
            [*outliving(), sys.executable, "-I", "-S", "-c", _DETACH, lock_path(directory, store, source), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=environment,
            check=False,
        )
    if done.returncode:
        raise GpuguardError(
            _("no process could be started that waits in the queue for your jobs: see {log}.").format(log=log.name)
        )
