"""The dispatcher: the one process of a user that waits in the queue for all of the user's jobs that wait.

It is started by `gpuguard submit`, and by whatever finds that it is missing, and ends when nothing waits any more.  One
ticket stands for the tasks that come next, with an alternative for each kind of them.  When it has got a claim, it
forks a supervisor, which takes the claim over and is on its own from then on; see supervisor.  When the dispatcher is
killed, nothing is lost but its position in the queue.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpuguard.batch.dispatchers import lock_path, open_lock
from gpuguard.batch.job_facts import KEPT_SECONDS, directory_of, open_jobs, remove_ended
from gpuguard.batch.job_records import END, SKIP, START, WITHDRAW, JobEvent, JobRecord, JobStore, Source
from gpuguard.batch.public import PublicJobs, publish, waiting_jobs
from gpuguard.batch.states import Jobs, TaskState
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import is_same_file, try_flock
from gpuguard.cli.jobs.supervisor import supervise
from gpuguard.cli.jobs.words import arguments_of
from gpuguard.cli.options import backend_of
from gpuguard.cli.run import MOST_ALTERNATIVES, ParsedRun, parsed, priority_of
from gpuguard.enforcement import signals
from gpuguard.errors import GpuguardError, ImpossibleRequest, InvalidRequest, NotEnoughGpus
from gpuguard.files import wait_for
from gpuguard.jobs import isolation, limits, surroundings  # noqa: F401  (gpuguard may be upgraded under a supervisor)
from gpuguard.locale import _, translated
from gpuguard.lock import Allocator
from gpuguard.procfs import boot_id
from gpuguard.queue import waiter  # noqa: F401  (the first job that waits may do so after an upgrade)
from gpuguard.queue.leader import watch_if_possible
from gpuguard.queue.settings import read_queue_settings
from gpuguard.request import Request

CHECK_SECONDS = 60.0  # between two looks at the records while nothing tells of a change
POLL_SECONDS = 5.0  # between two looks if the kernel has no watch left for us
FAILURE_SECONDS = 30.0  # after a fault of the driver or of the claim directory
_LOCK_TRIES, _LOCK_SECONDS = 20, 0.01  # another process holds the lock for a moment, to see whether a dispatcher runs
_STOPPING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class _Changed(Exception):
    """The records have changed, so that what the ticket asks for may be something else now."""


@dataclass(frozen=True)
class Candidate:
    """A task that may start as soon as there are devices for it."""

    record: JobRecord
    state: TaskState
    job: ParsedRun
    requests: tuple[Request, ...]


class Dispatcher:
    """Starts the jobs of a user on the devices of one source, one after the other."""

    def __init__(self, args: argparse.Namespace, store: JobStore) -> None:
        self.store, self.source = store, Source(backend=args.backend, dir=args.dir)
        self.directory = directory_of(self.source, make=True)
        self.backend = backend_of(args)
        self.lock = args.lock
        if self.lock >= 0:
            os.set_inheritable(self.lock, False)  # what we start may outlive us
        self.seen = b""  # the last change of the records that was read
        self.until: float | None = None  # unix time at which they may mean something else by themselves
        self.public = PublicJobs()  # what was written last
        self.complaint = ""  # the last one in our log
        self.watch = watch_if_possible(store.place)

    def run(self) -> None:
        """Start jobs until none waits any more, unless another dispatcher does so."""
        while self._becomes_the_only_one():
            while self._is_the_only_one() and self._dispatch_once():
                pass
            fcntl.flock(self.lock, fcntl.LOCK_UN)
            if not self._waiting(self._read()):  # a job that was submitted just now may have seen us at work
                break
        with suppress(OSError):
            remove_ended(self.store, time.time() - KEPT_SECONDS)

    def _becomes_the_only_one(self) -> bool:
        if not self._is_the_only_one():
            with suppress(OSError):  # it has none yet
                os.close(self.lock)
            self.lock = open_lock(self.directory, self.store, self.source)
        for _attempt in range(_LOCK_TRIES):
            if try_flock(self.lock):
                return True
            time.sleep(_LOCK_SECONDS)
        return False

    def _is_the_only_one(self) -> bool:
        """Return whether our lock is still the one that others see: a clean-up of old files may have removed it."""
        return is_same_file(self.lock, lock_path(self.directory, self.store, self.source))

    def _read(self) -> Jobs:
        self.seen = self.store.change()
        jobs = open_jobs(self.store, read_queue_settings(self.directory).rules.jobs.running)
        self.until = jobs.next_time(time.time())
        own = [stored.id for stored in jobs.stored if stored.record.source == self.source]
        public = waiting_jobs(jobs, own, self.store.place)
        if public != self.public:
            with suppress(OSError):  # only people would have read it
                publish(self.lock, public)
        self.public = public
        return jobs

    def _waiting(self, jobs: Jobs) -> list[TaskState]:
        own = {stored.id for stored in jobs.stored if stored.record.source == self.source}
        return [state for state in jobs.waiting(time.time()) if state.job in own]

    def _dispatch_once(self) -> bool:
        """Start one task, or wait until one may start; return whether any task waits."""
        try:
            jobs = self._read()
            waiting = self._waiting(jobs)
            if self._skip_doomed(jobs):
                pass
            elif candidates := self._candidates(jobs):
                self._start_one(candidates)
            elif waiting:
                self.backend.close()
                self._sleep(self.tell_every)
        except _Changed:
            return True
        except (GpuguardError, OSError) as fault:
            if (complaint := translated(str(fault))) != self.complaint:
                print(complaint, file=sys.stderr, flush=True)
            self.complaint = complaint
            self._sleep(FAILURE_SECONDS)
            return True
        return bool(waiting)

    @property
    def tell_every(self) -> float:
        """The seconds until the records are looked at, even if nothing tells of a change: see Allocator."""
        left = CHECK_SECONDS if self.until is None else self.until - time.time()
        return max(0.0, min(CHECK_SECONDS, left))

    def _sleep(self, seconds: float) -> None:
        """Sleep until something tells of a change of the records, at most so long."""
        if self.watch is None:
            time.sleep(max(0.0, min(seconds, POLL_SECONDS)))
            return
        if self.store.change() == self.seen:
            wait_for([self.watch.descriptor], seconds)
        self.watch.names()

    def _skip_doomed(self, jobs: Jobs) -> bool:
        """Write down which tasks can never start, and return whether there were any."""
        doomed = list(jobs.doomed())
        for state, why in doomed:
            self.store.append(state.job, JobEvent(kind=SKIP, time=_now(), task=state.task, why=why))
        if doomed:
            self.store.tell()
        return bool(doomed)

    def _candidates(self, jobs: Jobs) -> list[Candidate]:
        """Return the first task of each job that may start; a job that cannot be understood any more has failed."""
        records = {stored.id: stored.record for stored in jobs.stored}
        candidates: dict[int, Candidate] = {}
        for state in self._waiting(jobs):
            record = records[state.job]
            if state.blocked or state.job in candidates:
                continue
            try:
                job = parsed(arguments_of(record, state.task))
            except (InvalidRequest, ValueError) as fault:
                self._cannot_start(state, str(fault))
                continue
            requests = tuple(
                replace(request, within=record.within, within_reason=record.within_reason) for request in job.requests
            )
            candidates[state.job] = Candidate(record, state, job, requests)
        return list(candidates.values())

    def _cannot_start(self, state: TaskState, why: str) -> None:
        attempt, now = state.attempt + 1, _now()
        started = JobEvent(kind=START, time=now, task=state.task, attempt=attempt, boot=boot_id())
        ended = JobEvent(kind=END, time=now, task=state.task, attempt=attempt, status=125, why=why)
        self.store.append(state.job, started, ended)
        self.store.tell()

    def _start_one(self, candidates: Sequence[Candidate]) -> None:
        """Wait for devices for one of *candidates*, and start it.  Raises _Changed, GpuguardError, OSError."""
        first, began = candidates[0], time.monotonic()
        bound = read_queue_settings(self.directory).rules.bound
        asked, requests = _asked_together(candidates, bound)
        time_limits = [candidate.job.time_limit for candidate in asked]
        longest = None if None in time_limits else max(limit or 0.0 for limit in time_limits)
        details = JobDetails(first.job.args.note, first.job.command, longest, None, priority_of(first.job.args))

        def check(error: NotEnoughGpus) -> None:
            if self.store.change() != self.seen or (self.until is not None and time.time() >= self.until):
                jobs = self._read()
                now = [] if list(jobs.doomed()) else self._candidates(jobs)
                if not now or _asked_together(now, bound)[1] != requests:
                    raise _Changed

        on_wait = _Callback(check, lambda: self.tell_every)
        allocator = Allocator(self.backend, self.directory, requests, environ={}, job=details, on_wait=on_wait)
        try:
            claim = allocator.acquire(None)
        except ImpossibleRequest as error:
            self._cannot_start(first.state, str(error))
            return
        try:
            # What it was for may have been cancelled meanwhile.
            meant = next((task for task in self._candidates(self._read()) if allocator.met in task.requests), None)
            if meant is not None and self._is_the_only_one():
                self._hand_over(claim, meant, waited=time.monotonic() - began)
        finally:
            claim.release()  # unless it was handed over
        self.complaint = ""

    def _hand_over(self, claim: Claim, task: Candidate, waited: float) -> None:
        """Fork the supervisor of a task, which gets the claim.  Raises OSError if there is none; the task waits on."""
        state = replace(task.state, attempt=task.state.attempt + 1, claim=claim.id)
        started = JobEvent(
            kind=START,
            time=_now(),
            task=state.task,
            attempt=state.attempt,
            boot=boot_id(),
            claim=claim.id,
            gpus=tuple(device.label for device in claim),
        )
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # what has begun is brought to its end
        try:
            self.store.append(state.job, started)
            try:
                self._fork(claim, task, state, waited, mask)
            except OSError:
                self.store.append(state.job, replace(started, kind=WITHDRAW, time=_now()))
                raise
            claim.hand_over()
            self.store.tell()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _fork(
        self, claim: Claim, task: Candidate, state: TaskState, waited: float, mask: set[signal.Signals | int]
    ) -> None:
        # The supervisor must not be our child: it lives on when we end, and no process needs to reap it.
        child = os.fork()
        if child:
            _pid, status = os.waitpid(child, 0)
            if status:
                raise OSError(_("no process can be started for job {id}").format(id=state.job))
            return
        status = 125
        try:
            os.setsid()
            if os.fork():
                status = 0
            else:
                os.close(self.lock)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                status = supervise(self.store, task.record, state, claim, task.job, self.directory, waited)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # into the log of the job
            raise
        finally:
            sys.stderr.flush()
            os._exit(status)


@dataclass(frozen=True)
class _Callback:
    """What Allocator calls while it waits, and after how many seconds at most."""

    call: Callable[[NotEnoughGpus], None]
    seconds: Callable[[], float]

    def __call__(self, error: NotEnoughGpus) -> None:
        self.call(error)

    @property
    def tell_every(self) -> float:
        return self.seconds()


def _asked_together(candidates: Sequence[Candidate], bound: float) -> tuple[list[Candidate], tuple[Request, ...]]:
    """Return the first of *candidates* and those that one ticket can ask for with it, and all of their requests.

    They have its priority, and a ticket has only so many alternatives.  Once the first has waited for *bound* seconds,
    because small jobs always find a GPU before it finds four, it is asked for alone: as between requests in the queue.
    """
    first, *others = candidates
    asked, requests = [first], dict.fromkeys(first.requests)
    for candidate in others if first.record.submitted + bound > time.time() else ():
        more = requests | dict.fromkeys(candidate.requests)
        if candidate.job.args.priority == first.job.args.priority and len(more) <= 1 + MOST_ALTERNATIVES:
            asked.append(candidate)
            requests = more
    return asked, tuple(requests)


def _now() -> float:
    return round(time.time(), 3)


def main(args: argparse.Namespace) -> int:
    """Be the dispatcher of this user, unless there is one."""
    # A claim that was not handed over yet has our pid in its record.  So that what cancels it asks for its release, as
    # of any `gpuguard run`, instead of ending this process, we have the handler by which a supervisor is known.
    signal.signal(signals.CHECK_CLAIM, lambda *_: None)
    Dispatcher(args, JobStore()).run()
    return 0
