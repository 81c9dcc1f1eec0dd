"""The life of a job: start it on its devices, pass signals on, keep the claim, release the devices after it.

The job inherits the claim's descriptors, so the claim outlives this process if it must.  From the start of the job on,
only an orderly end releases the claim: an exception or a SIGKILL here leaves it to the job.

Signals are blocked and fetched with sigtimedwait, never handled, so that none can arrive between two lines.  The job
stays in our process group, so the terminal serves it as if it ran alone.  A signal that the kernel sent (Ctrl-C,
Ctrl-Z) has reached the job as well and is not passed on.  A signal that was sent to this process with kill(2) is passed
on, and so is a hang-up that only the leader of the session is told of.  A kill(2) of the whole group looks the same to
us, and so reaches the job twice.

This module does not choose devices and does not print.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory, last_about
from gpuguard.enforcement import signals
from gpuguard.errors import EXIT_TIMEOUT, BackendError, ClaimError, ClaimLost, GpuguardError, shortage
from gpuguard.history import audit_log
from gpuguard.jobs.processes import (
    DRAIN_SECONDS,
    NEVER,
    SHARED_DRAIN_SECONDS,
    Drain,
    Escalation,
    StillInUse,
    answer_release_request,
    callers_variables,
    execute,
    failure,
    is_stopped,
    job_processes,
    kill_tree,
    patiently,
    processes_before_the_job,
    signal_job,
    signal_tree,
    start,
)
from gpuguard.locale import _, translated
from gpuguard.locale.messages import sentence
from gpuguard.model import (
    HEALTH,
    IDLE_TOLERANCE,
    MEMORY,
    POWER,
    PROCESS_DETAILS,
    PROCESSES,
    UTILIZATION,
    EndCause,
    EndOfClaim,
    Event,
    EventKind,
    EventOutcome,
    SignalName,
    Snapshot,
)
from gpuguard.policies.action_kinds import ENDING_ACTIONS

if TYPE_CHECKING:
    from gpuguard.jobs.isolation import Isolation
    from gpuguard.jobs.limits import JobLimits
    from gpuguard.jobs.surroundings import Surroundings

TICK_SECONDS = 2.5  # a lock that the job dropped may stay dropped for so long; a check is one flock per device
SAMPLE_SECONDS = 5.0  # between two samples for the summary: more of them would tell little more
FIRST_SAMPLE_SECONDS = 0.25  # a job shorter than this costs no driver call
SAMPLE_SECONDS_FAILING = 300.0  # between two reads of a driver that does not answer, which back off to this interval
LIMITS_SECONDS_FAILING = 10.0  # that interval if the limits of the job depend on the driver's answer

PASSED_ON = frozenset({
    signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
})  # fmt: skip
FETCHED = PASSED_ON | {signal.SIGCHLD, signals.CHECK_CLAIM}
ENDING = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
SUSPENDING = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
# When the terminal of a session has gone, the kernel sends both to its leader alone, and to the leader's group once it
# has ended: Linux drivers/tty/tty_jobctrl.c, tty_signal_session_leader().
HANG_UP = frozenset({signal.SIGHUP, signal.SIGCONT})

END_LEFTOVERS = -1.0  # JobSettings.leftover: processes that the job leaves are ended
LEFTOVER_SECONDS = 0.2  # between two looks whether they have ended

GUARD_SECONDS = 60.0  # a job that ends so soon after an ending step of a policy was ended by it, whatever its exit code
GRACE_SECONDS = 60.0  # between the signals that end a job


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """The settings with which a job runs."""

    visible: str = "index"  # or "uuid": what CUDA_VISIBLE_DEVICES gets
    time_limit: float | None = None  # seconds until the job is ended
    grace: float = GRACE_SECONDS  # between the signals that end it: *checkpoint*, SIGTERM, SIGKILL
    checkpoint: int | None = None  # a signal that comes a *grace* before the time limit, SIGTERM comes at the limit
    limits: JobLimits | None = None  # further limits at which it is ended
    tolerance: int = IDLE_TOLERANCE  # bytes above the state before the job that count as free after it
    isolation: Isolation | None = None  # where the job runs, or None: here; closed at the end
    leftover: float | None = None  # seconds for which processes that it leaves keep the claim, or None: the site's
    directory: LockDirectory | None = None  # of the claims; its daemon says what policies did to the job
    # Called before the claim is released, with the exit status, why, and what may make the job start again.
    on_end: Callable[[int, str | None, EndCause | None], None] = lambda status, why, cause: None


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended, and what its devices did meanwhile; unknown values are None."""

    status: int  # for the shell: its exit code, or 128 + the signal that ended it
    die_of: int | None  # a signal that should end this process now, with signals.die_of and no clean-up
    wall_time: float  # seconds
    outcome: EndOfClaim
    peak_memory: int | None = None  # bytes, of the fullest device
    utilization: float | None = None  # percent, mean over time and devices
    energy: float | None = None  # joules, all devices together
    killed_by: int | None = None  # the signal that ended it
    why: str | None = None  # in words, if a policy or this process began to end it, or it could not be started
    policy: str | None = None  # the policy that ended it
    remarks: tuple[str, ...] = ()  # which other processes were on its devices, and on which other devices it was


def run(
    command: Sequence[str],
    claim: Claim,
    backend: Backend,
    settings: JobSettings | None = None,
    *,
    later: Callable[[], None] | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> JobEnd:
    """Run *command* on the devices of *claim*, and release the claim when it is done with them.

    Args:
        claim: belongs to this function from now on.
        backend: for the numbers of the summary and to see when the devices are free again; it may fail at any time.
        later: called once when the job has run for a moment, to do things that the job need not wait for.
        notify: gets each message for the user, in words.

    Returns:
        How the job ended.  The caller obeys die_of.
    """
    settings = settings or JobSettings()
    supervisor = JobSupervisor(command, claim, backend, settings, later, notify)
    supervisor.supervise()
    ended = supervisor.finish()
    if settings.isolation:
        settings.isolation.close()
    return ended


def exec_command(
    command: Sequence[str],
    claim: Claim,
    backend: Backend,
    *,
    visible: str = "index",
    isolation: Isolation | None = None,
) -> tuple[int, str]:
    """Become *command*, without a supervisor: the claim lives as long as the processes that hold its descriptors.

    Returns only if the command cannot be started: the exit code and a message.
    """
    backend.close()
    log_claim("claim", "handed over", claim, " ".join(command)[:1000])
    enter = isolation.enter if isolation else None
    code = execute(command, _environment(claim, visible, isolation), claim.pass_fds, enter=enter)
    if isolation:
        isolation.close()
    return failure(command[0], code)


def _environment(claim: Claim, visible: str, isolation: Isolation | None) -> dict[str, str]:
    return {**callers_variables(), **claim.environment(visible), **(isolation.environment if isolation else {})}


class JobSupervisor:
    """A running job with its claim."""

    def __init__(
        self,
        command: Sequence[str],
        claim: Claim,
        backend: Backend,
        settings: JobSettings,
        later: Callable[[], None] | None,
        notify: Callable[[str], None],
    ) -> None:
        self.claim, self.backend, self.notify, self.later = claim, backend, notify, later
        self.settings, self.limits = settings, settings.limits
        self.escalation = Escalation(time.monotonic(), settings.time_limit, settings.grace, settings.checkpoint)
        self.surroundings: Surroundings | None = None  # from the first sample on: a short job does not load it
        self.status: int | None = None
        self.killed_by: int | None = None  # the signal
        self.interrupted = self.told_to_end = False  # told by a signal that did not come from the kernel
        self.reported: set[str] = set()  # messages that the user need not read twice
        self.began = time.monotonic()
        self.tick_at = self.began + FIRST_SAMPLE_SECONDS
        self.sample_at, self.sample_every = self.tick_at, 0.0 if self.limits else SAMPLE_SECONDS
        self.limited = self.beyond = False  # whether the time limit ended it, or another limit signalled it
        self.others = processes_before_the_job()
        self.program = command[0]
        self.guard_seen = self.started_at = time.time()  # the daemon's lines were read up to this time
        self.guard_lines: list[audit_log.Line] = []  # what the daemon did to this job
        environment = _environment(claim, settings.visible, settings.isolation)
        enter = settings.isolation.enter if settings.isolation else None
        self.pid, self.exec_report = start(command, environment, claim.pass_fds, FETCHED, enter)
        self.pidfd = patiently(os.pidfd_open, self.pid)
        # The signal is fetched like the others.  It has a handler, because other processes can see that.
        signal.signal(signals.CHECK_CLAIM, lambda *_: None)
        log_claim("claim", "started", claim, shlex.join(command)[:1000])

    def supervise(self) -> None:
        """Look after the job until it has ended."""
        self.reap()
        while self.status is None:
            due = min(self.tick_at, self.escalation.due)
            if received := signal.sigtimedwait(FETCHED, max(0.0, due - time.monotonic())):
                self.receive(received)
            self.reap()
            self.end_if_due()
            if self.status is None and time.monotonic() >= self.tick_at:
                self.tick_if_possible()

    def receive(self, received: signal.struct_siginfo) -> None:
        """Pass a signal on, unless the kernel (si_code > 0) has sent it to the whole group."""
        self.interrupted |= received.si_signo == signal.SIGINT
        if received.si_signo == signals.CHECK_CLAIM:
            self.tick_at = time.monotonic()
        to_us_alone = received.si_code <= 0 or (received.si_signo in HANG_UP and os.getsid(0) == os.getpid())
        if received.si_signo not in PASSED_ON or not to_us_alone:
            return
        self.told_to_end |= received.si_signo in ENDING
        if signals.forward(self.pidfd, received.si_signo) == "not permitted":
            name = signal.Signals(received.si_signo).name
            self.notify(
                _(
                    "may not pass {name} on to the job, which runs as another user: send it as that user or root."
                ).format(name=name)
            )

    def reap(self) -> None:
        """Collect every child that has ended, also adopted ones; stop with the job if the terminal has stopped it."""
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
                self.killed_by = ended.si_status
                self.status = 128 + ended.si_status
            elif ended.si_code == os.CLD_STOPPED and ended.si_status in SUSPENDING:
                # Stop as well, so that the shell shows its prompt; continuing this process alone continues the job.
                # SIGSTOP does not stop us, because its sender will continue the job alone, and nothing would continue
                # us.
                signals.stop_self()
                while received := signal.sigtimedwait(FETCHED - {signal.SIGCHLD}, 0):
                    if received.si_signo != signal.SIGCONT or is_stopped(self.pid):
                        self.receive(received)

    def tick_if_possible(self) -> None:
        """Call tick(); only report a shortage of files or memory, as the next call may succeed and the job needs us."""
        try:
            self.tick()
        except (OSError, ClaimError, MemoryError) as fault:
            text = _("the claim and the limits of the job cannot be looked after now: {shortage}").format(
                shortage=shortage(fault) or translated(str(fault))
            )
            try:
                if text not in self.reported:
                    self.notify(text)
                    self.reported.add(text)
            except OSError:  # the text of the message is in a file that cannot be opened either
                return

    def tick(self) -> None:
        """Hold the claim, and take a sample when it is time."""
        # Ticks are denser at first, so that even a short job has its numbers: after 0.25, 0.5, 1, 2, 4 s.
        now = time.monotonic()
        self.tick_at = now + min(TICK_SECONDS, now - self.began)
        if self.later:
            later, self.later = self.later, None
            later()
        self.report_guard()
        try:
            self.check_claim()
        except ClaimLost as lost:
            if str(lost) not in self.reported:
                self.reported.add(str(lost))
                self.notify(
                    _("CLAIM LOST: {lost}  The job goes on, but another job may use its GPU now.").format(
                        lost=translated(str(lost))
                    )
                )
                log_claim("claim lost", "job goes on", self.claim, str(lost))
        if time.monotonic() >= self.sample_at:
            self.sample(self.count)

    def count(self, snapshot: Snapshot) -> None:
        """Add a sample to the numbers of the job, and tell its user which other processes are on its devices."""
        around = self.surroundings
        if around is None:
            return
        strangers = around.strangers(snapshot)
        around.meter.add(snapshot, strangers)
        news: list[tuple[EventKind, str]] = [("stranger", text) for text in around.news(strangers)]
        news += [("outside", text) for text in around.look(self.family)]
        for kind, text in news:
            log_claim(kind, "owner warned", self.claim, text)
            self.notify(translated(text))

    def count_after(self, snapshot: Snapshot) -> None:
        """Add a sample that was taken after the job to its numbers."""
        if self.surroundings:
            self.surroundings.meter.add_after(snapshot)

    def check_claim(self) -> None:
        """Answer a release request for the claim, and hold the claim.  Raises ClaimLost if it is no longer ours."""
        if request := self.claim.release_request():
            answer_release_request(request, self.claim, self.backend, self.escalation, self.notify)
        self.claim.reassert()

    def report_guard(self) -> None:
        """Tell the user what policies did to this job since the last call, except that they ended it: see finish()."""
        directory = self.settings.directory
        last = last_about(directory, os.geteuid()) if directory else None
        if directory is None or last is None or last <= self.guard_seen:
            return
        try:
            from gpuguard.claims.daemon_client import (
                own_events,  # sockets: only if a policy did something, not for each job
            )
            from gpuguard.notify.templates import deed_text

            lines = own_events(directory, self.started_at)
        except (ImportError, GpuguardError, OSError):  # it was upgraded meanwhile, or the daemon is busy
            return  # the next tick asks again
        self.guard_seen = last
        for line in [line for line in lines if line not in self.guard_lines and self.is_meant(line)]:
            self.guard_lines.append(line)
            if self.is_requeue(line):
                self.escalation.follow(time.monotonic(), "requeue", line["message"])
            text = deed_text(line)
            on_terminal = line["kind"] == "warn" and line["outcome"] == "done"
            if text and not on_terminal and not (self.status is not None and line["kind"] in ENDING_ACTIONS):
                self.notify(text)

    def is_meant(self, line: audit_log.Line) -> bool:
        """Return whether a line of the daemon about this user is about this job."""
        if line["claim"]:
            return str(line["claim"]).partition(".")[0] == self.claim.id.partition(".")[0]
        if line["pid"]:
            return line["pid"] in {self.pid, *self.family()}
        return not line["devices"] or not {device.uuid for device in self.claim}.isdisjoint(line["devices"])

    def is_requeue(self, line: audit_log.Line) -> bool:
        """Return whether with a line the daemon has asked this job to end, and to stand in the queue again."""
        return (line["kind"], line["outcome"]) == ("requeue", "about to")

    def ended_by(self) -> tuple[str, str] | None:
        """Return the policy that ended the job, and why, in words, or None if none did."""
        killed = self.status in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        for line in reversed(self.guard_lines):
            ending = line["kind"] in ENDING_ACTIONS and line["outcome"] == "about to"
            soon = time.time() - line["time_unix_seconds"] < GUARD_SECONDS
            if ending and (killed or soon or self.is_requeue(line)):
                policy, why = str(line["facts"].get("policy")), line["message"]
                if self.is_requeue(line):
                    return policy, sentence(
                        "job.requeued_by_policy",
                        "ended by policy {policy}, to stand in the queue again ({why})",
                        policy=policy,
                        why=why,
                    )
                return policy, sentence(
                    "job.ended_by_policy", "ended by policy {policy} ({why})", policy=policy, why=why
                )
        return None

    def family(self) -> dict[int, float]:
        """Return the processes of the job: pid -> start time."""
        return job_processes(self.others, self.claim.id, self.pid)

    def sample(self, count: Callable[[Snapshot], None]) -> None:
        """Read the claimed devices.  If the driver fails, the numbers are lost, but not the job."""
        if self.surroundings is None:
            with suppress(ImportError):  # it was upgraded meanwhile
                from gpuguard.jobs.surroundings import Surroundings

                self.surroundings = Surroundings(self.claim, self.backend, self.settings.directory)
        fields = {MEMORY, UTILIZATION, POWER, PROCESSES, PROCESS_DETAILS}
        fields |= self.limits.fields if self.limits else frozenset()
        if any(device.parent_uuid for device in self.claim):
            fields.add(HEALTH)  # this brings the MIG instances along
        try:
            snapshot = self.backend.sample(fields, [device.uuid for device in self.claim])
            count(snapshot)
            if "driver" in self.reported:
                self.reported.discard("driver")
                self.notify(_("the driver answers again: the limits of the job are kept."))
            self.judge(snapshot)
            # Limits are judged with every tick.
            self.sample_every = 0.0 if self.limits else min(SAMPLE_SECONDS, time.monotonic() - self.began)
        except BackendError as fault:
            self.sample_every = next_sample_seconds(self.sample_every, limited=bool(self.limits))
            if self.limits and "driver" not in self.reported:
                self.reported.add("driver")
                self.notify(
                    _("the limits of the job cannot be kept as long as the driver does not answer: {fault}").format(
                        fault=translated(str(fault))
                    )
                )
        self.sample_at = time.monotonic() + self.sample_every

    def judge(self, snapshot: Snapshot) -> None:
        """Begin to end the job if it has reached one of its limits."""
        if not self.limits:
            return
        living = self.pid if self.status is None else None
        finding = self.limits.judge(snapshot, self.family(), TICK_SECONDS, pid=living)
        if self.surroundings and self.claim.memory is not None and finding.used is not None:
            meter = self.surroundings.meter
            meter.peak_memory = max(meter.peak_memory or 0, finding.used)
        for text in finding.over:
            log_claim("share", "owner warned", self.claim, text)
        for text in (*finding.blind, *finding.over):
            self.notify(translated(text))
        if finding.reached and (self.status is None or finding.reached.pids):
            self.escalation.begin(time.monotonic(), "limit", finding.reached.why, finding.reached.limit)

    def end_if_due(self) -> None:
        """Send the next signal of the escalation if it is due; SIGKILL goes to all that is left of the job."""
        step = self.escalation.next_step(time.monotonic())
        if step is None:
            return
        self.limited |= step.kind == "time limit" and step.signum == signal.SIGTERM and self.status is None
        self.beyond |= step.limit is not None and self.status is None
        log_claim(step.kind, step.name, self.claim, step.why, **({"limit": step.limit} if step.limit else {}))
        self.notify(step.words)
        if self.status is None and step.signum != signal.SIGKILL:
            signal_job(self.pid, self.pidfd, step.signum)
            return
        if step.signum == signal.SIGKILL:
            kill_tree(self.reap, self.family)
        else:
            signal_tree(step.signum, self.family)

    def pause(self, seconds: float) -> int | None:
        """Wait for a child's end or a signal, at most so long.

        Returns:
            A signal that asks this process to end, or None.

        Raises:
            ClaimLost: the claim was released meanwhile.
        """
        due = min(self.escalation.due, self.tick_at if self.limits else NEVER)
        received = signal.sigtimedwait(FETCHED, max(0.0, min(seconds, due - time.monotonic())))
        self.reap()
        if self.limits and time.monotonic() >= self.tick_at:
            self.sample(self.count_after)
            self.tick_at = max(self.sample_at, time.monotonic() + TICK_SECONDS)
        if received and received.si_signo == signals.CHECK_CLAIM:
            self.check_claim()
        self.end_if_due()
        if received and received.si_signo in SUSPENDING:
            signals.stop_self()
        return received.si_signo if received and received.si_signo in ENDING else None

    def finish(self) -> JobEnd:
        """Release the devices once the job is really off them."""
        wall_time = time.monotonic() - self.began
        code = os.read(self.exec_report, 16)  # the errno with which exec failed, or nothing
        os.close(self.exec_report)
        if code:
            return self.end_unstarted(int(code), wall_time)
        self.report_guard()
        policy, by_policy = self.ended_by() or (None, None)
        if by_policy:
            self.notify(translated(by_policy))
        status, die_of = self.final_status()
        if self.settings.leftover == END_LEFTOVERS:
            self.end_leftovers()
        # A machine that goes down tells the job first, or this process: then the signal is still to be fetched.
        cause: EndCause | None = "signal" if self.told_to_end or signal.sigpending() & ENDING else None
        if any(map(self.is_requeue, self.guard_lines)):
            cause = "requeue"
        why = by_policy or self.words_for_end(cause)
        self.settings.on_end(status, why, cause)
        outcome, interrupted_by = self.release()
        meter = self.surroundings.meter if self.surroundings else None
        ended = JobEnd(
            status=status,
            die_of=interrupted_by or die_of,
            wall_time=wall_time,
            outcome=outcome,
            peak_memory=meter.peak_memory if meter else None,
            utilization=meter.utilization() if meter else None,
            energy=meter.energy() if meter else None,
            killed_by=self.killed_by,
            why=why,
            policy=policy,
            remarks=tuple(self.surroundings.remarks) if self.surroundings else (),
        )
        _log_end(self.claim, ended, by_policy or self.escalation.why)
        return ended

    def end_unstarted(self, code: int, wall_time: float) -> JobEnd:
        """Release the devices of a job that could not be started; *code* is the errno."""
        status, message = failure(self.program, code)
        self.notify(message)
        self.settings.on_end(status, message, None)
        self.claim.release()
        ended = JobEnd(status=status, die_of=None, wall_time=wall_time, outcome="could not be started", why=message)
        _log_end(self.claim, ended)
        return ended

    def words_for_end(self, cause: EndCause | None) -> str | None:
        """Return why the job has ended, if this process has ended it."""
        if self.escalation.why:
            return sentence("job.ended_by_run", "ended by gpuguard run: {why}", why=self.escalation.why)
        return sentence("job.told_to_end", "its gpuguard run was told to end by a signal") if cause else None

    def release(self) -> tuple[EndOfClaim, int | None]:
        """Release the devices once nothing of the job needs them; return how, and the signal that ended the wait."""
        drain = Drain(
            self.claim.devices,
            self.backend,
            pause=self.pause,
            notify=self.notify,
            count=self.count_after if self.surroundings and self.surroundings.meter.counts else None,
            tolerance=self.settings.tolerance,
            others=self.others,
            longest=DRAIN_SECONDS if self.claim.memory is None else SHARED_DRAIN_SECONDS,
            leftover=self.leftover_seconds,
            claim_id=self.claim.id,
        )
        try:
            outcome = patiently(drain.wait_until_free)
        except ClaimLost as lost:
            self.notify(translated(str(lost)))
            outcome = "released"
        except StillInUse as left:
            if any(self.claim.is_held_by(pid) for pid in left.pids):
                # LOCK_UN is not called: our descriptors close with this process, and theirs keep the claim.
                self.notify(_("not waiting any longer: {words}, and the claim is theirs now.").format(words=left.words))
                return "left to its processes", left.signum
            self.notify(
                _("not waiting any longer: {words}, but without the locks of the claim, which ends.").format(
                    words=left.words
                )
            )
            return "interrupted", left.signum
        self.claim.release()
        return outcome, None

    def end_leftovers(self) -> None:
        """End the processes that the job has left: SIGTERM, and SIGKILL a grace later."""
        until = time.monotonic() + self.settings.grace
        if signal_tree(signal.SIGTERM, self.family):
            while self.family() and time.monotonic() < until:
                signal.sigtimedwait({signal.SIGCHLD}, LEFTOVER_SECONDS)
                self.reap()
            kill_tree(self.reap, self.family)

    def leftover_seconds(self) -> float:
        """Return for how long processes that the job has left, and that use no device, keep the claim."""
        if self.settings.leftover == END_LEFTOVERS:
            return NEVER  # what SIGKILL has not ended yet
        if self.settings.leftover is not None:
            return self.settings.leftover
        try:
            from gpuguard.queue.settings import read_queue_settings  # 20 ms, only for a job that leaves something

            return read_queue_settings(self.settings.directory).rules.leftover
        except (ImportError, OSError):  # it was upgraded meanwhile; or nothing can be opened now
            return NEVER

    def final_status(self) -> tuple[int, int | None]:
        """Return the exit status, and the signal that this process should die of, or None."""
        assert self.status is not None
        if self.limited or (self.beyond and self.status == 0):  # what a limit has ended must not look like success
            return EXIT_TIMEOUT, None
        interrupted = self.interrupted or signal.SIGINT in signal.sigpending()
        return self.status, signal.SIGINT if self.killed_by == signal.SIGINT and interrupted else None


def next_sample_seconds(every: float, *, limited: bool) -> float:
    """Return the seconds until a driver that has just failed is read again; *limited* if the job has limits to keep."""
    return min(2 * every or TICK_SECONDS, LIMITS_SECONDS_FAILING if limited else SAMPLE_SECONDS_FAILING)


def log_claim(
    kind: EventKind,
    outcome: EventOutcome | SignalName,
    claim: Claim | None,
    message: str | None = None,
    **facts: float | str | None,
) -> None:
    """Write into the audit log what happened to the claim of this process, or to its request if it has no claim."""
    audit_log.append(
        Event(
            time=time.time(),
            kind=kind,
            outcome=outcome,
            user=os.environ.get("LOGNAME") or os.environ.get("USER"),
            devices=() if claim is None else tuple(device.uuid for device in claim.devices),
            pid=os.getpid(),
            claim=None if claim is None else claim.id,
            message=message,
            facts=(("uid", os.getuid()), *facts.items()),
        )
    )


def _log_end(claim: Claim, ended: JobEnd, message: str | None = None) -> None:
    log_claim(
        "release",
        ended.outcome,
        claim,
        message,
        policy=ended.policy,
        exit_status=ended.status,
        wall_time_seconds=round(ended.wall_time, 3),
        peak_memory_bytes=ended.peak_memory,
        mean_utilization_percent=ended.utilization,
        energy_joules=ended.energy,
    )
