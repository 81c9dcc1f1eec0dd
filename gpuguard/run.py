"""The life of a job: start it on its devices, pass signals on, keep the claim, give the devices back after it.

The job inherits the claim's descriptors, so the claim outlives this process if it must.  From the start of the job on,
only an orderly end releases the claim: an exception or a SIGKILL here leaves it to the job.  Signals are blocked and
fetched with sigtimedwait, never handled: nothing can arrive between two lines.  The job stays in our process group, so
the terminal serves it as if it ran alone: what the kernel sent (Ctrl-C, Ctrl-Z, hang-up) reached the job too and is not
passed on; what somebody sent to this process with kill(2) is.  A kill(2) of the whole group looks the same to us, and
so reaches the job twice.  Does not choose devices and does not print.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from gpuguard.device_state import IDLE_TOLERANCE
from gpuguard.enforcement import signals
from gpuguard.errors import BackendError, ClaimError, ClaimLost, shortage
from gpuguard.history import audit_log
from gpuguard.jobs import drain
from gpuguard.jobs.drain import descendants, patiently
from gpuguard.jobs.escalation import NEVER, TIME_LIMIT, Escalation, is_stopped, kill_tree, signal_job, signal_tree
from gpuguard.jobs.meter import TICK_SECONDS, JobEnd, JobMeter, slower
from gpuguard.jobs.spawn import callers_variables, execute, failure, start
from gpuguard.model import HEALTH, MEMORY, POWER, UTILIZATION, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuguard.backends import Backend
    from gpuguard.claims.claim import Claim
    from gpuguard.jobs.isolation import Isolation
    from gpuguard.jobs.limits import JobLimits
    from gpuguard.model import Snapshot

SAMPLE_SECONDS = 5.0  # for the summary: finer would tell little more
FIRST_SAMPLE_SECONDS = 0.25  # a job shorter than this costs no driver call

EXIT_TIMEOUT = 124
LEFT = "left to its processes"  # the outcome of a claim that lives on

PASSED_ON = frozenset({
    signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
})  # fmt: skip
FETCHED = PASSED_ON | {signal.SIGCHLD, signals.CHECK_CLAIM}
ENDING = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
SUSPENDING = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})


def run(
    command: Sequence[str],
    claim: Claim,
    backend: Backend,
    *,
    visible: str = "index",
    time_limit: float | None = None,
    grace: float = 60.0,
    checkpoint: int | None = None,
    limits: JobLimits | None = None,
    tolerance: int = IDLE_TOLERANCE,
    isolation: Isolation | None = None,
    later: Callable[[], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> JobEnd:
    """Run *command* on the devices of *claim*, and release the claim when it is done with them.

    Args:
        command: what to run, at least one word.
        claim: goes over to this function.
        backend: for the numbers of the summary and to see when the devices are free again; it may fail at any time.
        visible: "index" or "uuid", what CUDA_VISIBLE_DEVICES gets.
        time_limit: seconds until the job is ended, None for no limit.
        grace: seconds between the signals that end it: *checkpoint*, SIGTERM, SIGKILL.
        checkpoint: the first of them, None for none.  It comes a *grace* before the time limit, SIGTERM at it.
        limits: further ones, at which it is ended too.
        tolerance: bytes above the state before the job that count as free after it.
        isolation: the place in which the job runs, None: here.  Is closed at the end.
        later: called once when the job has run for a moment, for what is not worth keeping it waiting.
        say: gets each message for the user, in words.

    Returns:
        How it ended.  The caller obeys die_of.
    """
    environment = _environment(claim, visible, isolation)
    ending = Escalation(time.monotonic(), time_limit, grace, checkpoint)
    enter = isolation.enter if isolation else None
    job = _Job(command, environment, claim, backend, say, ending, limits, enter)
    job.later = later
    job.attend()
    ended = job.finish(tolerance)
    if isolation:
        isolation.close()
    return ended


def _environment(claim: Claim, visible: str, isolation: Isolation | None) -> dict[str, str]:
    return {**callers_variables(), **claim.environment(visible), **(isolation.environment if isolation else {})}


def exec_command(
    command: Sequence[str],
    claim: Claim,
    backend: Backend,
    *,
    visible: str = "index",
    isolation: Isolation | None = None,
) -> tuple[int, str]:
    """Become *command*, without a supervisor: the claim lives as long as the processes that hold its descriptors.

    Returns:
        Only when it cannot be started: exit code and message.
    """
    environment = _environment(claim, visible, isolation)
    backend.close()
    _record("claim", "handed over", claim, command=command)
    enter = isolation.enter if isolation else None
    code = execute(command, environment, claim.pass_fds, enter=enter)
    if isolation:
        isolation.close()
    return failure(command[0], code)


class _Job:
    """A running job with its claim."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        claim: Claim,
        backend: Backend,
        say: Callable[[str], None],
        ending: Escalation,
        limits: JobLimits | None,
        enter: Callable[[], None] | None,
    ) -> None:
        self.claim, self.backend, self.say = claim, backend, say
        self.ending, self.limits = ending, limits
        # What a shared device does is its neighbours' doing too.
        self.meter = JobMeter(claim if claim.memory is None else ())
        self.status: int | None = None
        self.interrupted = self.killed_by_interrupt = False
        self.told: set[str] = set()
        self.later: Callable[[], None] | None = None
        self.began = time.monotonic()
        self.tick_at = self.began + FIRST_SAMPLE_SECONDS
        self.sample_at, self.sample_every = self.tick_at, 0.0 if limits else SAMPLE_SECONDS
        self.limited = self.beyond = False  # whether the time limit ended it; whether it was signalled for another one
        self.others = drain.children() or frozenset()
        self.pid, self.report = start(command, environment, claim.pass_fds, FETCHED, enter)
        self.pidfd = patiently(os.pidfd_open, self.pid)
        signal.signal(signals.CHECK_CLAIM, lambda *_: None)  # fetched like the others; a handler is what others can see
        self.program = command[0]
        _record("claim", "started", claim, command=command)

    def attend(self) -> None:
        """Stay until the job has ended."""
        self.reap()
        while self.status is None:
            due = min(self.tick_at, self.ending.due)
            if got := signal.sigtimedwait(FETCHED, max(0.0, due - time.monotonic())):
                self.receive(got)
            self.reap()
            self.end_if_due()
            if self.status is None and time.monotonic() >= self.tick_at:
                self.tick_if_possible()

    def receive(self, got: signal.struct_siginfo) -> None:
        """Pass a signal on, unless it came from the kernel (si_code > 0), which sends to the whole group."""
        if got.si_signo == signal.SIGINT:
            self.interrupted = True
        if got.si_signo == signals.CHECK_CLAIM:
            self.tick_at = time.monotonic()
        if got.si_signo not in PASSED_ON or got.si_code > 0:
            return
        if signals.forward(self.pidfd, got.si_signo) == signals.NOT_PERMITTED:
            name = signal.Signals(got.si_signo).name
            self.say(f"may not pass {name} on to the job: it runs as another user.  Send it as that user or as root.")

    def reap(self) -> None:
        """Collect every child that has ended, also adopted ones; stop with the job when the terminal has stopped it."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOHANG)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid != self.pid:
                continue
            if ended.si_code == os.CLD_EXITED:
                self.status = ended.si_status
            elif ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
                self.status = 128 + ended.si_status
                self.killed_by_interrupt = ended.si_status == signal.SIGINT
            elif ended.si_code == os.CLD_STOPPED and ended.si_status in SUSPENDING:
                self.stop_along()

    def stop_along(self) -> None:
        """Stop too, so that the shell shows its prompt; whoever continues this process alone continues the job."""
        # Not for SIGSTOP: that comes from somebody who will continue the job alone, and nobody would continue us.
        signals.stop_self()
        while got := signal.sigtimedwait(FETCHED - {signal.SIGCHLD}, 0):
            if got.si_signo != signal.SIGCONT or is_stopped(self.pid):
                self.receive(got)

    def tick_if_possible(self) -> None:
        """tick(); where there is no file or memory for that now the next one may go well, and the job needs us."""
        try:
            self.tick()
        except (OSError, ClaimError, MemoryError) as fault:
            text = f"the claim and the limits of the job cannot be looked after now: {shortage(fault) or fault}"
            try:
                if text not in self.told:
                    self.say(text)
                    self.told.add(text)
            except OSError:  # its words are in a file that cannot be opened either
                return

    def tick(self) -> None:
        """Hold the claim, and take a sample when it is time."""
        # Denser at first, so that a short job has its numbers too: after 0.25, 0.5, 1, 2, 4 s.
        now = time.monotonic()
        self.tick_at = now + min(TICK_SECONDS, now - self.began)
        if self.later:
            later, self.later = self.later, None
            later()
        if wish := self.claim.wish():
            from gpuguard.jobs.escalation import obey_release_request

            obey_release_request(wish, self.claim, self.backend, self.ending, self.say)
        try:
            self.claim.reassert()
        except ClaimLost as lost:
            if str(lost) not in self.told:
                self.told.add(str(lost))
                self.say(f"CLAIM LOST: {lost}  The job goes on, but somebody else may use its device now.")
                _record("claim lost", "job goes on", self.claim, message=str(lost))
        if time.monotonic() >= self.sample_at:
            self.sample(self.meter.add)

    def sample(self, count: Callable[[Snapshot], None]) -> None:
        """Read the claimed devices; a driver that fails costs the numbers, not the job."""
        fields = {MEMORY, UTILIZATION, POWER} | (self.limits.fields if self.limits else frozenset())
        if any(device.parent_uuid for device in self.claim):
            fields.add(HEALTH)  # which brings the MIG instances along
        try:
            snapshot = self.backend.sample(fields, [device.uuid for device in self.claim])
            count(snapshot)
            if "driver" in self.told:
                self.told.discard("driver")
                self.say("the driver answers again: the limits of the job are kept.")
            self.judge(snapshot)
            # Limits are looked at with every tick.
            self.sample_every = 0.0 if self.limits else min(SAMPLE_SECONDS, time.monotonic() - self.began)
        except BackendError as fault:
            self.sample_every = slower(self.sample_every, limited=bool(self.limits))
            if self.limits and "driver" not in self.told:
                self.told.add("driver")
                self.say(f"the limits of the job cannot be kept as long as the driver does not answer: {fault}")
        self.sample_at = time.monotonic() + self.sample_every

    def judge(self, snapshot: Snapshot) -> None:
        """Begin to end the job when it has reached one of its limits; tell its owner who else is on his devices."""
        if not self.limits:
            return
        living = self.pid if self.status is None else None
        judged = self.limits.judge(snapshot, descendants(), TICK_SECONDS, pid=living)
        for text in judged.strangers:
            _record("stranger", "owner warned", self.claim, message=text)
        if self.claim.memory is not None and judged.used is not None:
            self.meter.peak_memory = max(self.meter.peak_memory or 0, judged.used)
        for text in judged.over:
            _record("share", "owner warned", self.claim, message=text)
        for text in (*judged.strangers, *judged.blind, *judged.over):
            self.say(text)
        if judged.reached and (self.status is None or judged.reached.pids):
            self.ending.begin(time.monotonic(), "limit", judged.reached.why, judged.reached.limit)

    def end_if_due(self) -> None:
        """Send the next signal of the ladder when it is due: SIGKILL goes to all that is left of the job."""
        rung = self.ending.take(time.monotonic())
        if rung is None:
            return
        self.limited |= rung.kind == TIME_LIMIT and rung.signum == signal.SIGTERM and self.status is None
        self.beyond |= rung.limit is not None and self.status is None
        _record(rung.kind, rung.name, self.claim, message=rung.why, limit=rung.limit)
        self.say(rung.words)
        if self.status is None and rung.signum != signal.SIGKILL:
            signal_job(self.pid, self.pidfd, rung.signum)
            return
        self.backend.close()  # its process is one of them; the next sample starts another
        if rung.signum == signal.SIGKILL:
            kill_tree(self.reap)
        else:
            signal_tree(rung.signum)

    def pause(self, seconds: float) -> int | None:
        """Wait for a child's end or a signal at most so long; a signal that asks this process to end, or None."""
        due = min(self.ending.due, self.tick_at if self.limits else NEVER)
        got = signal.sigtimedwait(FETCHED, max(0.0, min(seconds, due - time.monotonic())))
        self.reap()
        if self.limits and time.monotonic() >= self.tick_at:
            self.sample(self.meter.add_last)
            self.tick_at = max(self.sample_at, time.monotonic() + TICK_SECONDS)
        self.end_if_due()
        if got and got.si_signo in SUSPENDING:
            signals.stop_self()
        return got.si_signo if got and got.si_signo in ENDING else None

    def finish(self, tolerance: int) -> JobEnd:
        """Give the devices back once the job is really off them."""
        wall_time = time.monotonic() - self.began
        if (code := self.exec_error()) is not None:
            status, message = failure(self.program, code)
            self.say(message)
            self.claim.release()
            ended = JobEnd(status, None, wall_time, "could not be started")
            _record("release", ended.outcome, self.claim, ended=ended)
            return ended
        status, die_of = self.final_status()
        try:
            outcome = patiently(self.settling(tolerance).wait_until_free)
            self.claim.release()
        except drain.Left as left:
            # Without LOCK_UN: our descriptors close with this process, and theirs keep the claim.
            self.say(f"not waiting any longer: {left.users}, and the claim is its own now.")
            outcome, die_of = LEFT, left.signum
        ended = JobEnd(
            status, die_of, wall_time, outcome, self.meter.peak_memory, self.meter.utilization(), self.meter.energy()
        )
        _record("release", outcome, self.claim, message=self.ending.why, ended=ended)
        return ended

    def settling(self, tolerance: int) -> drain.Settling:
        """What the claim waits for now."""
        return drain.Settling(
            tuple(self.claim),
            self.backend,
            pause=self.pause,
            say=self.say,
            seen=self.meter.add_last if self.meter.counts else None,
            tolerance=tolerance,
            others=self.others,
            longest=drain.SETTLE_SECONDS if self.claim.memory is None else drain.SHARED_SETTLE_SECONDS,
        )

    def exec_error(self) -> int | None:
        """The errno with which exec failed, or None."""
        try:
            code = os.read(self.report, 16)
        finally:
            os.close(self.report)
        return int(code) if code else None

    def final_status(self) -> tuple[int, int | None]:
        """Exit status, and the signal that this process should die of."""
        assert self.status is not None
        if self.limited or (self.beyond and self.status == 0):  # what a limit has ended must not look like success
            return EXIT_TIMEOUT, None
        interrupted = self.interrupted or signal.SIGINT in signal.sigpending()
        return self.status, signal.SIGINT if self.killed_by_interrupt and interrupted else None


def _record(
    kind: str,
    outcome: str,
    claim: Claim,
    *,
    message: str | None = None,
    command: Sequence[str] | None = None,
    ended: JobEnd | None = None,
    limit: str | None = None,
) -> None:
    facts: dict[str, float | int | str | None] = {"uid": os.getuid()} | ({"limit": limit} if limit else {})
    if ended:
        facts |= {
            "exit_status": ended.status,
            "wall_time_seconds": round(ended.wall_time, 3),
            "peak_memory_bytes": ended.peak_memory,
            "mean_utilization_percent": ended.utilization,
            "energy_joules": ended.energy,
        }
    event = Event(
        time=time.time(),
        kind=kind,
        outcome=outcome,
        user=os.environ.get("LOGNAME") or os.environ.get("USER"),
        devices=tuple(device.uuid for device in claim),
        pid=os.getpid(),
        claim=claim.id,
        message=" ".join(command)[:1000] if command else message,
        facts=tuple(facts.items()),
    )
    audit_log.append(event)
