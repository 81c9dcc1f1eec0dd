"""What became of each task of a user's jobs, and which of them may start now, decided from facts alone.

    waiting      nothing has started; `why` says what holds it back, if that is not the GPUs
    running      its claim is held
    unwatched    its claim is held, and its supervisor is gone: the exit status will be unknown
    completed    it ended with 0
    failed       it ended with another status, or could not be started
    cancelled    its user ended it, or root
    skipped      a job that had to succeed before it did not
    lost         it was started and is gone without a word: the machine was restarted, or its supervisor was killed; or
                 that supervisor was told to end by a signal, and then the machine was restarted

A job that was submitted before the machine was started is lost until its user resumes it.  This module reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gpuguard.batch.job_records import (
    CANCEL,
    END,
    RESUME,
    RETRY,
    SKIP,
    START,
    WITHDRAW,
    JobEvent,
    JobRecord,
    Source,
    StoredJob,
)
from gpuguard.locale.messages import sentence

TaskStateName = Literal["waiting", "running", "unwatched", "completed", "failed", "cancelled", "skipped", "lost"]
ENDED: frozenset[str] = frozenset({"completed", "failed", "cancelled", "skipped", "lost"})
RUNNING: frozenset[str] = frozenset({"running", "unwatched"})
REQUEUE = 75  # the exit status by which a job asks to be started again: EX_TEMPFAIL of sysexits.h
_MOST_DOUBLINGS = 20

# The claims of this user that are held now, by id: whether the process that looks after each of them lives.
HeldClaims = Mapping[str, bool]


@dataclass(frozen=True)
class TaskState:
    """One task of a job at one moment."""

    job: int
    task: int
    state: TaskStateName
    attempt: int = 0  # of the last start
    started: float | None = None  # unix time
    ended: float | None = None
    gpus: tuple[str, ...] = ()
    claim: str | None = None
    status: int | None = None  # exit status
    why: str | None = None  # why it waits, or how it ended
    not_before: float | None = None  # unix time, of a task that waits for its next attempt
    blocked: bool = False  # it waits for something else than GPUs
    cancelled: bool = False  # its user wants it to end
    told_to_end: bool = False  # a signal has ended it, as when the machine goes down
    requeues: int = 0  # how often it stood in the queue again because it or a policy has asked for that

    @property
    def is_gone(self) -> bool:
        """Whether it was started in this boot, and neither its claim nor its end is there."""
        return self.why == _GONE or (self.state == "cancelled" and self.started is not None and self.ended is None)


_RESTARTED = sentence("job.restarted", "the machine restarted: gpuguard jobs resume")
_GONE = sentence("job.gone", "its gpuguard was killed, and how it ended is unknown: gpuguard jobs retry")
_UNWATCHED = sentence("job.unwatched", "its gpuguard was killed: the exit code will be unknown")
_UNSEEN = sentence("job.unseen", "its claim directory cannot be read now, and so not whether it still runs")
_ENDING = sentence("job.ending", "cancelled: it is being ended")
_HELD = sentence("job.held", "held: gpuguard jobs unhold")


class _History:
    """What the events say of one task, one after the other."""

    def __init__(self, record: JobRecord, task: int) -> None:
        self.record, self.boots = record, {record.boot}
        self.state = self.before = TaskState(record.id, task, "waiting")  # before the last start
        self.started_in = ""  # the boot of that
        self.failures = self.requeues = 0

    def add(self, event: JobEvent) -> None:
        """Take the next event into account.  What does not fit was late, and changes nothing."""
        state = self.state
        is_of_attempt = event.attempt == state.attempt
        if event.kind == START and state.state != "running":  # otherwise a second dispatcher was at work: it withdraws
            self.before, self.started_in = state, event.boot
            # A task that was cancelled at the moment of its start will find that out: see cli.jobs.supervisor.
            self.state = TaskState(
                state.job,
                state.task,
                "running",
                event.attempt,
                event.time,
                gpus=event.gpus,
                claim=event.claim,
                why=state.why if state.state == "cancelled" else None,
                requeues=self.requeues,
                cancelled=state.state == "cancelled",
            )
        elif event.kind == WITHDRAW and event.claim == state.claim and state.state == "running":
            self.state = _cancelled(self.before, event.time, state.why) if state.cancelled else self.before
        elif event.kind == END and is_of_attempt and state.state == "running":
            self._end(event)
        elif event.kind == CANCEL and state.state == "running":
            self.state = replace(state, cancelled=True, why=event.why)
        elif event.kind == CANCEL and state.state == "waiting":
            self.state = _cancelled(state, event.time, event.why)
        elif event.kind == RETRY and is_of_attempt and state.state != "waiting":
            self._again(None, new=True)
            self.boots.add(event.boot)
        elif event.kind == RESUME:
            self.boots.add(event.boot)
            if self._was_cut_off(event.boot) and not state.cancelled:
                self._again(None, new=True)
        elif event.kind == SKIP and state.state == "waiting":
            self.state = replace(state, state="skipped", ended=event.time, why=event.why)

    def _end(self, event: JobEvent) -> None:
        name: TaskStateName = "completed" if event.status == 0 else "failed"
        name = "cancelled" if self.state.cancelled else name
        why = self.state.why or event.why  # why it was cancelled, if its user did not do that
        told = event.outcome == "signal" and name != "cancelled"
        self.state = replace(self.state, state=name, ended=event.time, status=event.status, why=why, told_to_end=told)
        record = self.record
        wants_again = (event.status == REQUEUE or event.outcome == "requeue") and name != "cancelled"
        may_retry = name == "failed" and (record.retry_on is None or event.status in record.retry_on)
        if wants_again and self.requeues < record.requeue:
            self.requeues += 1
            self._again(event.time)
        elif may_retry and self.failures < record.retries:
            pause = record.retry_delay * 2 ** min(self.failures, _MOST_DOUBLINGS)
            self.failures += 1
            self._again(event.time + pause)

    def _again(self, not_before: float | None, *, new: bool = False) -> None:
        """Let the task wait for its next attempt; *new* if its user wants that, so that nothing counts any more."""
        state = self.state
        if new:
            self.failures = self.requeues = 0
        again = TaskState(state.job, state.task, "waiting", state.attempt, requeues=self.requeues)
        self.state = replace(again, status=state.status, not_before=not_before)

    def _was_cut_off(self, boot: str) -> bool:
        """Return whether the machine went down under it, before *boot*, so that it has not ended by itself."""
        return (self.state.state == "running" or self.state.told_to_end) and self.started_in != boot

    def result(self, claims: HeldClaims | None, boot: str) -> TaskState:
        """Return the state now; *claims* is None if it is unknown which are held."""
        state = self.state
        if state.state == "waiting" and boot not in self.boots:
            return replace(state, state="lost", why=_RESTARTED)
        if self._was_cut_off(boot):
            if state.cancelled:
                return _cancelled(state, None, state.why)
            return replace(state, state="lost", status=None, why=_RESTARTED)
        if state.state != "running":
            return state
        if claims is None:
            return replace(state, state="unwatched", why=_UNSEEN)
        supervised = claims.get(state.claim or "")
        if supervised is None:
            return _cancelled(state, None, state.why) if state.cancelled else replace(state, state="lost", why=_GONE)
        if not supervised:
            return replace(state, state="unwatched", why=_UNWATCHED)
        return replace(state, why=(state.why or _ENDING) if state.cancelled else None)


def _cancelled(state: TaskState, when: float | None, why: str | None) -> TaskState:
    return replace(state, state="cancelled", ended=when, why=why, cancelled=True)


def task_states(stored: StoredJob, claims: HeldClaims | None, boot: str) -> list[TaskState]:
    """Return the state of each task of a job, without what other jobs have to do with it."""
    histories = [_History(stored.record, task) for task in range(len(stored.record.tasks))]
    for event in stored.events:
        for history in histories if event.task is None else histories[event.task : event.task + 1]:
            history.add(event)
    return [history.result(claims, boot) for history in histories]


@dataclass(frozen=True)
class Jobs:
    """Jobs of a user at one moment; those that are missing have ended, and no other one must come after its success."""

    stored: tuple[StoredJob, ...]
    states: Mapping[int, list[TaskState]]  # by job
    unread: tuple[int, ...] = ()  # ids of jobs whose record cannot be read
    most_running: int | None = None  # tasks at the same time, as the site permits

    def waiting(self, now: float) -> Iterator[TaskState]:
        """Yield the tasks that wait, in the order in which they start; those that cannot start now say why."""
        here = None
        if self.most_running is not None:
            here = self.most_running - sum(map(_is_busy, (each for states in self.states.values() for each in states)))
        for stored in sorted(self.stored, key=lambda stored: (stored.record.rank, stored.id)):
            record, states = stored.record, self.states[stored.id]
            why = self._held_back(record, now)
            room = None if record.at_most is None else record.at_most - sum(map(_is_busy, states))
            for state in states:
                if state.state != "waiting":
                    continue
                reason = why or _no_room(state, now, room, record.at_most, here, self.most_running)
                if reason:
                    yield replace(state, blocked=True, why=reason)
                    continue
                room = None if room is None else room - 1
                here = None if here is None else here - 1
                yield state

    def next_time(self, now: float) -> float | None:
        """Return the next unix time at which a task may become startable by itself, or None."""
        times = [stored.record.begin for stored in self.stored if stored.record.begin]
        times += [state.not_before for states in self.states.values() for state in states if state.not_before]
        return min((when for when in times if when > now), default=None)

    def doomed(self) -> Iterator[tuple[TaskState, str]]:
        """Yield the tasks that can never start, because a job that had to succeed did not, and why."""
        for stored in self.stored:
            for other in stored.record.after_ok:
                states = self.states.get(other, [])
                if all_ended(states) and not _succeeded(states):
                    why = sentence("job.doomed", "job {id} did not succeed (--after-ok)", id=other)
                    yield from ((state, why) for state in self.states[stored.id] if state.state == "waiting")
                    break

    def _held_back(self, record: JobRecord, now: float) -> str | None:
        if record.held_by:
            return sentence("job.held_by", "held by {user}: gpuguard jobs unhold", user=record.held_by)
        if record.held:
            return _HELD
        # A job that was removed had ended, because only those can be removed.
        others = [*record.after, *record.after_ok]
        for job in others:
            if job in self.unread:
                return sentence("job.after_unread", "waits for job {id}, whose record cannot be read", id=job)
            if not all_ended(self.states.get(job, [])):
                return sentence("job.after", "waits for job {id}", id=job)
        for job in record.after_ok:
            if not _succeeded(self.states.get(job, [])):
                return sentence("job.doomed", "job {id} did not succeed (--after-ok)", id=job)
        if record.begin is not None and record.begin > now:
            return sentence("job.begin", "waits for its --begin")
        return None


def _no_room(
    state: TaskState, now: float, room: int | None, at_most: int | None, here: int | None, most_running: int | None
) -> str | None:
    """Return why a task of a job that is not held back cannot start now, or None."""
    if state.not_before is not None and state.not_before > now:
        return sentence("job.pause", "waits before its next attempt")
    if room is not None and room <= 0:
        return sentence("job.at_most", "waits for the job's own limit: --at-most {most}", most=at_most or 0)
    if here is not None and here <= 0:
        return sentence(
            "job.most_running", "waits for one of your {most} that run, as the site permits", most=most_running or 0
        )
    return None


def _is_busy(state: TaskState) -> bool:
    return state.state in RUNNING


def all_ended(states: Iterable[TaskState]) -> bool:
    """Return whether none of these tasks waits or runs."""
    return all(state.state in ENDED for state in states)


def ended_for_good(states: Iterable[TaskState]) -> bool:
    """Return whether the events say that all of these tasks have ended, so that only a further event changes that.

    A task that is lost has no end of its own: whether it is lost depends on the boot and on the claims.  Whether one
    that a signal has ended is lost depends on the boot.
    """
    return all(state.ended is not None and not state.told_to_end for state in states)


def _succeeded(states: Iterable[TaskState]) -> bool:
    return all(state.state == "completed" for state in states)


def jobs_of(
    stored: Iterable[StoredJob],
    claims: Mapping[Source, HeldClaims | None],
    boot: str,
    unread: Iterable[int] = (),
    most_running: int | None = None,
) -> Jobs:
    """Return all *stored* jobs with the states of their tasks, by the claims of each source; see Jobs for the rest."""
    kept = tuple(stored)
    states = {each.id: task_states(each, claims.get(each.record.source), boot) for each in kept}
    return Jobs(kept, states, tuple(unread), most_running)
