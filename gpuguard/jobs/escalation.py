"""How a job is ended: one signal after the other, each when it is due, until nothing of the job is left.

The ladder of a time limit stands from the start of the job on, and its checkpoint signal comes before the time is over;
any other limit that is reached puts up one that begins at once.  Whichever begins first is climbed to its end.
Does not judge limits (see limits), and says and records nothing: see run.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.claims.release_requests import ENDING, REFUSED, RELEASED, STOP, ReleaseRequest
from gpuguard.device_state import may_compute
from gpuguard.enforcement import signals
from gpuguard.errors import BackendError, ClaimError
from gpuguard.jobs.drain import descendants, patiently
from gpuguard.model import HEALTH, MEMORY, PROCESS_DETAILS, PROCESSES
from gpuguard.procfs import read_stat
from gpuguard.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuguard.backends import Backend
    from gpuguard.claims.claim import Claim

NEVER = float("inf")
KILL_SECONDS = 5.0  # for how long killing a tree is repeated, because its members can fork meanwhile

TIME_LIMIT = "time limit"


@dataclass(frozen=True)
class EscalationStep:
    """One signal on the way to the end of a job."""

    signum: int
    pause: float  # seconds until the next one is due
    kind: str  # of its event
    why: str
    said: str  # the same for its owner, who has heard it before
    limit: str | None = None  # "memory-limit"

    @property
    def name(self) -> str:
        """``"SIGTERM"``."""
        return signal.Signals(self.signum).name

    @property
    def words(self) -> str:
        """For the owner of the job."""
        whom = "the job and all its processes" if self.signum == signal.SIGKILL else "the job"
        return f"{self.said}: {self.name} to {whom}."


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
        self.due, self._ahead = began + time_limit, _last(TIME_LIMIT, over, over, grace)
        if checkpoint:
            # Never at once: a job in its first moments has no handler yet, and would end of the signal.
            early = min(grace, time_limit / 2)
            soon = f"{over} in {format_duration(early)}"
            self.due -= early
            self._ahead = (EscalationStep(checkpoint, early, TIME_LIMIT, soon, soon), *self._ahead)

    def begin(self, now: float, kind: str, why: str, limit: str | None = None) -> None:
        """Put up a ladder that begins at once, unless another one is climbed already."""
        if self.why is not None:
            return
        said = "the grace is over" if self._checkpoint else why
        self.due, self._ahead = now, _last(kind, why, said, self._grace, limit)
        if self._checkpoint:
            self._ahead = (EscalationStep(self._checkpoint, self._grace, kind, why, why, limit), *self._ahead)

    def take(self, now: float) -> EscalationStep | None:
        """The next signal if it is due."""
        if now < self.due:
            return None
        rung, *ahead = self._ahead
        self._ahead, self.due, self.why = tuple(ahead), now + rung.pause, rung.why
        return rung


def _last(
    kind: str, why: str, said: str, grace: float, limit: str | None = None
) -> tuple[EscalationStep, EscalationStep]:
    return (
        EscalationStep(signal.SIGTERM, grace, kind, why, said, limit),
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


# What `gpuguard run` does about a wish behind the record of its claim: end the job, or give the devices up without.
#
# Who may write there is decided by the kernel (see wishes).  Devices are given up only while no process of the job
# computes on them, by a look of our own; what cannot be seen counts as a process.  Does not unlock: see Claim.reassert.


_MYSELF = "gpuguard run"


def obey_release_request(
    wish: ReleaseRequest, claim: Claim, backend: Backend, ending: Escalation, say: Callable[[str], None]
) -> None:
    """Answer *wish*; what is promised is done by the next reassert() of the claim, or by the ladder of *ending*."""
    if wish.what == STOP:
        answer = ReleaseRequest(ENDING, _MYSELF)
    elif against := in_use(claim, backend):
        answer = ReleaseRequest(REFUSED, _MYSELF, against)
    else:
        answer = ReleaseRequest(RELEASED, wish.by, wish.why)
    try:
        claim.answer(answer)
    except (OSError, ClaimError) as error:
        say(f"a wish to release the claim {wish.in_words()} could not be answered: {error}")
        return
    if answer.what == ENDING:
        ending.begin(time.monotonic(), "release", f"to be released {wish.in_words()}")
    elif answer.what == REFUSED:
        say(f"the claim was to be released {wish.in_words()}.  Refused: {answer.why}.")


def in_use(claim: Claim, backend: Backend) -> str | None:
    """Why the devices cannot be given up now: a process of the job computes there, or that cannot be seen."""
    fields = {MEMORY, PROCESSES, PROCESS_DETAILS} | ({HEALTH} if any(each.parent_uuid for each in claim) else set())
    uuids = {device.uuid for device in claim}
    try:
        snapshot = backend.sample(fields, list(uuids))
    except BackendError as error:
        return f"whether the job computes cannot be seen: {error}"
    here = [each for each in snapshot.devices if each.uuid in uuids or each.parent_uuid in uuids]
    if uuids - {each.uuid for each in here}:
        return "the driver does not show one of the devices"
    family = descendants()
    for device in here:
        if device.processes is None or not device.processes_plausible:
            return f"the driver gives no list of the processes on device {device.index} that could be believed"
        for process in filter(may_compute, device.processes):
            if process.pid in family or not process.uid or process.uid == os.geteuid():
                return f"pid {process.pid} computes on device {device.index}"
    return None
