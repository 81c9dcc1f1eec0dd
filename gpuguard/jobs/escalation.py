"""How a job is ended: one signal after the other, each when it is due, until nothing of the job is left.

The escalation of a time limit is known from the start of the job on, and its checkpoint signal comes before the time is
over; any other limit that is reached, and a request to stop, begins one at once.  The first that begins goes on to its
end.  Also what `gpuguard run` does about a release request behind the record of its claim.
Does not judge limits (see limits), and prints and records nothing: see run.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.claims.records import ENDING, REFUSED, RELEASED, STOP, ReleaseRequest
from gpuguard.enforcement import signals
from gpuguard.errors import BackendError, ClaimError
from gpuguard.jobs.drain import descendants, patiently
from gpuguard.model import HEALTH, MEMORY, PROCESS_DETAILS, PROCESSES, ClaimRecord
from gpuguard.procfs import read_stat
from gpuguard.units import format_duration
from gpuguard.users import user_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuguard.backends import Backend
    from gpuguard.claims.claim import Claim

NEVER = float("inf")
KILL_SECONDS = 5.0  # for how long killing a tree is repeated, because its members can fork meanwhile

TIME_LIMIT = "time limit"
_SELF = "gpuguard run"  # as the author of an answer


@dataclass(frozen=True)
class EscalationStep:
    """One signal on the way to the end of a job."""

    signum: int
    pause: float  # seconds until the next one is due
    kind: str  # of its event
    why: str
    short_why: str  # for the owner, who has read the whole before
    limit: str | None = None  # "memory-limit"

    @property
    def name(self) -> str:
        """``"SIGTERM"``."""
        return signal.Signals(self.signum).name

    @property
    def words(self) -> str:
        """For the owner of the job."""
        target = "the job and all its processes" if self.signum == signal.SIGKILL else "the job"
        return f"{self.short_why}: {self.name} to {target}."


class Escalation:
    """Which signal comes next, and when; time is an argument, in seconds of time.monotonic().

    Args:
        began: when the job began.
        time_limit: seconds until SIGTERM, None for no such limit.
        grace: seconds between two signals.
        checkpoint: the first signal, None for none.
    """

    def __init__(self, began: float, time_limit: float | None, grace: float, checkpoint: int | None) -> None:
        self.due = NEVER  # when the next signal is to be sent
        self.why: str | None = None  # the last one was sent
        self._grace, self._checkpoint = grace, checkpoint
        self._ahead: tuple[EscalationStep, ...] = ()
        if time_limit is None:
            return
        over = "the time limit is over"
        self.due, self._ahead = began + time_limit, self._last_steps(TIME_LIMIT, over, over)
        if checkpoint:
            # Never at once: a job in its first moments has no handler yet, and would end of the signal.
            early = min(grace, time_limit / 2)
            soon = f"{over} in {format_duration(early)}"
            self.due -= early
            self._ahead = (EscalationStep(checkpoint, early, TIME_LIMIT, soon, soon), *self._ahead)

    def begin(self, now: float, kind: str, why: str, limit: str | None = None) -> None:
        """Begin an escalation at once, unless another one goes on already."""
        if self.why is not None:
            return
        short_why = "the grace is over" if self._checkpoint else why
        self.due, self._ahead = now, self._last_steps(kind, why, short_why, limit)
        if self._checkpoint:
            self._ahead = (EscalationStep(self._checkpoint, self._grace, kind, why, why, limit), *self._ahead)

    def next_step(self, now: float) -> EscalationStep | None:
        """The next signal if it is due."""
        if now < self.due:
            return None
        step, *ahead = self._ahead
        self._ahead, self.due, self.why = tuple(ahead), now + step.pause, step.why
        return step

    def _last_steps(
        self, kind: str, why: str, short_why: str, limit: str | None = None
    ) -> tuple[EscalationStep, EscalationStep]:
        return (
            EscalationStep(signal.SIGTERM, self._grace, kind, why, short_why, limit),
            EscalationStep(signal.SIGKILL, NEVER, kind, why, "the grace is over too", limit),
        )


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped now."""
    stat = patiently(read_stat, pid)
    return stat is not None and stat.state == "T"


def signal_job(pid: int, pidfd: int, signum: int) -> None:
    """Signal the command itself, which decides what becomes of its children."""
    signals.forward(pidfd, signum)
    if is_stopped(pid):  # a stopped process keeps the signal pending
        signals.forward(pidfd, signal.SIGCONT)


def signal_tree(signum: int) -> int:
    """Signal every living process below this one, but not this one; returns how many there were."""
    family: dict[int, float] = patiently(descendants)
    for pid, started in family.items():
        try:
            pidfd = patiently(os.pidfd_open, pid)
        except ProcessLookupError:
            continue
        stat = patiently(read_stat, pid)  # read behind the pidfd: it is still the one that was found below us
        if stat and stat.start_time == started:
            signals.forward(pidfd, signum)
        os.close(pidfd)
    return len(family)


def kill_tree(reap: Callable[[], None]) -> None:
    """SIGKILL every descendant until none is left; *reap* collects those that have ended."""
    until = time.monotonic() + KILL_SECONDS
    while signal_tree(signal.SIGKILL) and time.monotonic() < until:
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)
        reap()


def answer_release_request(
    request: ReleaseRequest, claim: Claim, backend: Backend, escalation: Escalation, notify: Callable[[str], None]
) -> None:
    """Answer *request*: end the job, or release the devices without.

    Who may write there is decided by the kernel (see claims.records).  Devices are released only while no process of
    the job computes on them, by a sample of our own; what cannot be seen counts as a process.  What is promised is done
    by the next reassert() of the claim, or by *escalation*.
    """
    if request.what == STOP:
        answer = ReleaseRequest(ENDING, _SELF)
    elif reason := _in_use(claim, backend):
        answer = ReleaseRequest(REFUSED, _SELF, reason)
    else:
        answer = ReleaseRequest(RELEASED, request.by, request.why)
    try:
        claim.answer(answer)
    except (OSError, ClaimError) as error:
        notify(f"a request to release the claim {request.in_words()} could not be answered: {error}")
        return
    if answer.what == ENDING:
        escalation.begin(time.monotonic(), "release", f"to be released {request.in_words()}")
    elif answer.what == REFUSED:
        notify(f"the claim was to be released {request.in_words()}.  Refused: {answer.why}.")


def _in_use(claim: Claim, backend: Backend) -> str | None:
    """Why the devices cannot be released now: a process of the job computes there, or that is unknown."""
    from gpuguard.claims.release import in_use  # of `run` only a job whose claim is asked for needs it

    fields = {MEMORY, PROCESSES, PROCESS_DETAILS} | ({HEALTH} if any(device.parent_uuid for device in claim) else set())
    uuids, uid = tuple(device.uuid for device in claim), os.geteuid()
    try:
        snapshot = backend.sample(fields, list(uuids))
    except BackendError as error:
        return f"whether it is used cannot be seen: {error}"
    holders = (os.getpid(), *descendants())
    return in_use(ClaimRecord(claim.id, uid, user_name(uid), uuids, pid=os.getpid(), holders=holders), snapshot)
