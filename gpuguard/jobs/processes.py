"""The processes of a job: how they are started, ended one signal after the other, and waited for.

They start as if gpuguard were not there: with the same signals, exit code and error messages.  They are ended by an
escalation, which begins with the time limit, with another limit that is reached, or with a request to stop; the first
escalation that begins goes on to its end.  They are waited for until none of them uses the devices and the memory is
really free, because otherwise the next job gets a device that is full.  Does not judge limits (see limits), and prints
and records nothing: see run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from stat import S_ISREG
from typing import Any

from gpuguard import procfs
from gpuguard.backends import Backend, spawn
from gpuguard.claims.claim import Claim
from gpuguard.claims.records import ENDING, REFUSED, RELEASED, STOP, ReleaseRequest
from gpuguard.claims.unlock import in_use
from gpuguard.device_state import grouped
from gpuguard.enforcement import signals
from gpuguard.errors import (
    EXIT_FAILED,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    BackendError,
    ClaimError,
    shortage,
)
from gpuguard.locale import _, ngettext, translated
from gpuguard.locale.messages import sentence
from gpuguard.model import (
    HEALTH,
    MEMORY,
    POWER,
    PROCESS_DETAILS,
    PROCESSES,
    ClaimRecord,
    Device,
    EndOfClaim,
    EventKind,
    SignalName,
    Snapshot,
)
from gpuguard.procfs import read_stat
from gpuguard.units import format_duration
from gpuguard.users import user_name

Process = tuple[int, float]  # pid, start time in seconds since boot

NEVER = float("inf")
KILL_SECONDS = 5.0  # for how long killing a tree is repeated, because its members can fork meanwhile

DRAIN_SECONDS = 60.0  # the driver frees within a second or so; longer means a fault that waiting does not cure
# On a shared device the memory of a neighbour's dead process looks the same, so waiting ends when the driver is usually
# done.
SHARED_DRAIN_SECONDS = 2.0
QUIET_SECONDS = 2.0  # before that no user wonders why the prompt does not come back
POLL_SECONDS = (0.1, 1.0)  # first and longest pause while the memory is being freed
TRIES = 100  # of a call that finds no free file or memory; the first of these pauses lies between two tries
MOST_NAMED = 5  # of the processes that a job leaves
# Between two samples while a process outlives the job.  The end of an adopted process wakes us earlier.
USER_POLL_SECONDS = 5.0

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_SELF = "gpuguard run"  # as the author of an answer


def descendants() -> dict[int, float]:
    """Return the living processes below this one, adopted ones included: pid -> start time in seconds since boot."""
    return {pid: stat.start_time for pid, stat in procfs.descendants(os.getpid()).items()}


def job_processes(others: Collection[Process], claim_id: str, command: int = 0) -> dict[int, float]:
    """Return the descendants() that belong to the job: not *others*, our workers, or processes that these started.

    This process adopts what *others* have started and left behind, just like what the job leaves.  So if there are
    others, an adopted process is the job's only if it was started with the id of the job's claim in its environment.

    Args:
        others: see processes_before_the_job().
        claim_id: of the job.
        command: pid of the job's first process, as long as it lives.
    """
    excluded, own = set(spawn.worker_pids()), os.getpid()
    doubtful = not {pid for pid, _start in others} <= excluded

    def is_of_the_job(pid: int, parent: int, start: float) -> bool:
        if pid in excluded or parent in excluded or (pid, start) in others:
            return False
        return not doubtful or parent != own or pid == command or born_under(claim_id, pid)

    found: dict[int, float] = {}
    for pid, stat in procfs.descendants(own).items():  # parents before their children
        if is_of_the_job(pid, stat.parent, stat.start_time):
            found[pid] = stat.start_time
        else:
            excluded.add(pid)
    # The child of a process that forks and ends while /proc is read may be missed; but it becomes a child of ours.
    return found or {pid: start for pid, start in children() or () if is_of_the_job(pid, own, start)}


def born_under(claim_id: str, pid: int) -> bool:
    """Return whether the process was started with the claim in its environment, or False if that cannot be read."""
    environment = procfs.read_memory(pid, "environ", 2**20) or b""
    return f"GPUGUARD_CLAIM={claim_id}".encode() in environment.split(b"\0")


def children() -> frozenset[Process] | None:
    """Return what this process started or adopted and has not reaped, or None if the kernel does not say."""
    stats = procfs.own_children()
    return None if stats is None else frozenset((pid, stat.start_time) for pid, stat in stats.items())


def processes_before_the_job() -> frozenset[Process]:
    """Return the processes that already run below this one: if a script became it by exec, all that it has started."""
    before = patiently(children)
    if before is not None and {pid for pid, _start in before} <= spawn.worker_pids():
        return frozenset(before)  # the usual case, in which the processes of the machine need not be read
    return frozenset(patiently(descendants).items())


def patiently(call: Callable[..., Any], *words: Any, **more: Any) -> Any:
    """Return what *call* returns; if no file or memory is left, try again for a while, because the job needs us."""
    for _attempt in range(TRIES):
        try:
            return call(*words, **more)
        except OSError as error:
            if not shortage(error):
                raise
        time.sleep(POLL_SECONDS[0])
    return call(*words, **more)


# Starting the processes of a job: as a child, or in place of this process.


def become_subreaper() -> None:
    """Make this process adopt what the job leaves, so that a process that outlives it can be seen and waited for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def callers_variables() -> dict[str, str]:
    """Return os.environ without LC_CTYPE if only this interpreter set it (PEP 538), as in cron, which has no locale."""
    variables = dict(os.environ)
    if variables.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8"):
        # The environment at exec, which setenv() does not change.  If it is hidden, keeping LC_CTYPE does no harm.
        with suppress(OSError), open("/proc/self/environ", "rb") as came:
            if b"\0LC_CTYPE=" not in b"\0" + came.read():
                del variables["LC_CTYPE"]
    return variables


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: Sequence[int],
    blocked: Collection[int],
    enter: Callable[[], None] | None = None,
) -> tuple[int, int]:
    """Fork and exec.

    Args:
        pass_fds: descriptors that the program inherits.
        blocked: signals that are blocked in this process from before the fork on; the program does not see that.
        enter: called in the new process; puts it into its namespaces or cgroup.

    Returns:
        The new pid, and a descriptor from which the errno of a failed exec can be read, as a number in ASCII.
    """
    report, child_report = patiently(os.pipe)  # a user who has waited for hours must not lose the devices over this
    # An ignored SIGCHLD would make the kernel reap the job and keep its exit status to itself.
    children_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid: int = patiently(os.fork)
    if pid == 0:
        try:
            if children_ignored:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            os.write(child_report, b"%d" % execute(command, environment, pass_fds, mask, enter))
        finally:
            os._exit(EXIT_NOT_FOUND)
    os.close(child_report)
    return pid, report


def execute(
    command: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: Sequence[int],
    mask: Collection[int] | None = None,
    enter: Callable[[], None] | None = None,
) -> int:
    """Exec with the signal dispositions that this process was started with; return the errno if that fails."""
    # Python ignores SIGPIPE and SIGXFSZ from its start on.  Any other ignored signal was inherited (nohup) and stays
    # ignored.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would swallow a Ctrl-C between here and exec
    try:
        for descriptor in pass_fds:
            os.set_inheritable(descriptor, True)
        if enter is not None:
            try:
                enter()
            except OSError as error:  # a job that was to be isolated is never started without isolation
                why = _("the job could not be isolated ({strerror}), so it was not started").format(
                    strerror=error.strerror
                )
                os.write(2, f"gpuguard: {why}.\n".encode())
                os._exit(EXIT_FAILED)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if not command[0]:
            return errno.ENOENT
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        return error.errno or errno.EINVAL


def exec_fault(program: str) -> int | None:
    """Return the errno with which execute() of *program* would fail now, or None if it is there or only exec can tell.

    This function searches as exec does: a name without a slash in our PATH, which the job inherits, and any other name
    from this directory on.
    """
    if not program:
        return errno.ENOENT
    fault = errno.ENOENT
    for path in [program] if "/" in program else [os.path.join(place, program) for place in os.get_exec_path()]:
        try:
            is_executable = S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):  # such as a file server that is down
                return None
            fault = errno.EACCES if error.errno == errno.EACCES else fault
            continue
        if is_executable:
            return None
        fault = errno.EACCES
    return fault


def failure(program: str, code: int) -> tuple[int, str]:
    """Return the exit code and the message for a *program* that could not be started, as a shell gives them."""
    is_missing, is_absent = code in (errno.ENOENT, errno.ENOTDIR), code == errno.ENOENT
    is_denied, is_script, is_path = code == errno.EACCES, program.endswith(".py"), "/" in program
    is_here, has_no_interpreter = os.path.isfile(program) and not is_path, os.path.exists(program) and is_path
    variable, sets_one, _value = program.partition("=")
    texts = (
        (is_absent and is_here, _("command not found in PATH, but here.  Write `gpuguard run ... -- {how}`.")),
        (is_absent and has_no_interpreter, _("the interpreter that its first line names does not exist.")),
        (
            is_missing and " " in program.strip(),
            _("command not found.  Leave out the quotes around the command; where it needs a shell: sh -c '...'."),
        ),
        (
            is_absent and sets_one and variable.isidentifier(),
            _("command not found.  To set a variable: env {program} CMD."),
        ),
        (is_missing, _("command not found.  Is it installed, and in PATH?")),
        (code == errno.ENOEXEC, _("{reason}.  A script needs a first line such as #!/bin/sh.")),
        (is_denied and is_script, _("{reason}.  Write `gpuguard run ... -- python {program}`.")),
        (is_denied and os.path.isdir(program), _("it is a directory, not a program.")),
        (is_denied, _("{reason}.  `chmod +x` makes a file a program.")),
        (True, "{reason}."),
    )
    how = f"python {program}" if is_script else f"./{program}"
    text = next(text for applies, text in texts if applies)
    text = text.format(reason=os.strerror(code), program=program, how=how)
    return EXIT_NOT_FOUND if is_missing else EXIT_NOT_EXECUTABLE, f"{program or repr(program)}: {text}"


# Ending the processes of a job.


@dataclass(frozen=True)
class EscalationStep:
    """One signal on the way to the end of a job."""

    signum: int
    pause: float  # seconds until the next one is due
    kind: EventKind  # of its event
    why: str
    short_why: str  # for the owner, who has already read the full reason
    limit: str | None = None  # "memory-limit"

    @property
    def name(self) -> SignalName:
        """``"SIGTERM"``."""
        return SignalName(signal.Signals(self.signum).name)

    @property
    def words(self) -> str:
        """The sentence that tells the owner of the job about it."""
        target = _("the job and all its processes") if self.signum == signal.SIGKILL else _("the job")
        return _("{why}: {signal} to {target}.").format(why=translated(self.short_why), signal=self.name, target=target)


class Escalation:
    """Decides which signal comes next, and when.  Times are in seconds of time.monotonic().

    SIGTERM comes *time_limit* seconds after *began*, and SIGKILL *grace* seconds after SIGTERM.  The signal
    *checkpoint*, if any, comes *grace* seconds before SIGTERM.
    """

    def __init__(self, began: float, time_limit: float | None, grace: float, checkpoint: int | None) -> None:
        self.due = NEVER  # when the next signal is to be sent
        self.why: str | None = None  # the reason for the last signal, None before the first one
        self._grace, self._checkpoint = grace, checkpoint
        self._ahead: tuple[EscalationStep, ...] = ()
        if time_limit is None:
            return
        over = sentence("job.time_over", "the time limit is over")
        self.due, self._ahead = began + time_limit, self._last_steps("time limit", over, over)
        if checkpoint:
            # Never send it at once: a job that has just started has no handler yet, and the signal would end it.
            early = min(grace, time_limit / 2)
            soon = sentence("job.time_over_in", "the time limit is over in {time}", time=format_duration(early))
            self.due -= early
            self._ahead = (EscalationStep(checkpoint, early, "time limit", soon, soon), *self._ahead)

    def begin(self, now: float, kind: EventKind, why: str, limit: str | None = None) -> None:
        """Begin an escalation at once, unless another one is already under way."""
        if self.why is not None:
            return
        short_why = sentence("job.grace_over", "the grace is over") if self._checkpoint else why
        self.due, self._ahead = now, self._last_steps(kind, why, short_why, limit)
        if self._checkpoint:
            self._ahead = (EscalationStep(self._checkpoint, self._grace, kind, why, why, limit), *self._ahead)

    def follow(self, now: float, kind: EventKind, why: str) -> None:
        """Begin an escalation of which another process has sent the SIGTERM, unless one is already under way."""
        if self.why is None:
            over = sentence("job.grace_over", "the grace is over")
            self.why, self.due = why, now + self._grace
            self._ahead = (EscalationStep(signal.SIGKILL, NEVER, kind, why, over),)

    def next_step(self, now: float) -> EscalationStep | None:
        """Return the next step if it is due, or None, and move on to the step after it."""
        if now < self.due:
            return None
        step, *ahead = self._ahead
        self._ahead, self.due, self.why = tuple(ahead), now + step.pause, step.why
        return step

    def _last_steps(
        self, kind: EventKind, why: str, short_why: str, limit: str | None = None
    ) -> tuple[EscalationStep, EscalationStep]:
        return (
            EscalationStep(signal.SIGTERM, self._grace, kind, why, short_why, limit),
            EscalationStep(
                signal.SIGKILL, NEVER, kind, why, sentence("job.grace_over_too", "the grace is over too"), limit
            ),
        )


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped now."""
    stat = patiently(read_stat, pid)
    return stat is not None and stat.state == "T"


def signal_job(pid: int, pidfd: int, signum: int) -> None:
    """Signal the command itself, which decides what happens to its children."""
    signals.forward(pidfd, signum)
    if is_stopped(pid):  # a stopped process keeps the signal pending
        signals.forward(pidfd, signal.SIGCONT)


def signal_tree(signum: int, family: Callable[[], dict[int, float]]) -> int:
    """Signal every living process of the job, as *family* finds them; return how many there were."""
    living: dict[int, float] = patiently(family)
    for pid, started in living.items():
        try:
            pidfd = patiently(os.pidfd_open, pid)
        except ProcessLookupError:
            continue
        stat = patiently(read_stat, pid)  # read after the pidfd was opened, to signal only the process that was found
        if stat and stat.start_time == started:
            signals.forward(pidfd, signum)
        os.close(pidfd)
    return len(living)


def kill_tree(reap: Callable[[], None], family: Callable[[], dict[int, float]]) -> None:
    """Send SIGKILL to all processes of the job, as *family* finds them, until none is left.

    *reap* collects those that have ended.
    """
    until = time.monotonic() + KILL_SECONDS
    while signal_tree(signal.SIGKILL, family) and time.monotonic() < until:
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)
        reap()


def answer_release_request(
    request: ReleaseRequest, claim: Claim, backend: Backend, escalation: Escalation, notify: Callable[[str], None]
) -> None:
    """Answer *request*: end the job, or release the devices without ending it.

    The kernel decides who may write such a request (see claims.records).  Devices are released only while no process of
    the job computes on them, which a sample of our own must show; what cannot be read counts as a process.  The next
    reassert() of the claim, or *escalation*, does what the answer promises.
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
        notify(
            _("a request to release the claim {in_words} could not be answered: {error}").format(
                in_words=translated(request.in_words()), error=translated(str(error))
            )
        )
        return
    if answer.what == ENDING:
        why = sentence("job.stopped", "stopped {request}", request=request.in_words())
        escalation.begin(time.monotonic(), "release", why)
    elif answer.what == REFUSED:
        notify(
            _("the claim was to be released {in_words}.  Refused: {why}.").format(
                in_words=translated(request.in_words()), why=translated(answer.why)
            )
        )


def _in_use(claim: Claim, backend: Backend) -> str | None:
    """Return why the devices cannot be released now: a process of the job computes there, or may do so.  Or None."""
    fields = {MEMORY, PROCESSES, PROCESS_DETAILS} | ({HEALTH} if any(device.parent_uuid for device in claim) else set())
    uuids, uid = tuple(device.uuid for device in claim), os.geteuid()
    try:
        snapshot = backend.sample(fields, list(uuids))
    except BackendError as error:
        return sentence("claim.use_unknown", "whether it is used cannot be seen: {unknown}", unknown=str(error))
    holders = (os.getpid(), *descendants())
    return in_use(ClaimRecord(claim.id, uid, user_name(uid), uuids, pid=os.getpid(), holders=holders), snapshot)


# Waiting until the processes have ended and the memory is free.  This part only reads.


class StillInUse(Exception):
    """*signum* cut the waiting short while *pids* of the job still live; the claim is theirs if they hold it.

    *words* describes these processes.
    """

    def __init__(self, signum: int, pids: Collection[int], words: str) -> None:
        super().__init__(words)
        self.signum, self.pids, self.words = signum, pids, words


@dataclass(frozen=True)
class Drain:
    """The devices of a job that has ended, and what their claim waits for."""

    devices: Sequence[Device]  # as they were before the job
    backend: Backend
    pause: Callable[[float], int | None]  # takes up to so many seconds; returns a signal that asks us to stop waiting
    notify: Callable[[str], None]  # gets a text when the user would wonder why it takes so long
    count: Callable[[Snapshot], None] | None  # gets each snapshot, with the energy; None if nothing counts
    tolerance: int  # bytes above the state before the job that count as free
    others: frozenset[Process] = frozenset()  # that ran below this process before the job
    longest: float = DRAIN_SECONDS  # to wait for memory that no process holds any more
    # Returns the seconds for which processes that use no device keep the claim; called only if there are any.
    leftover: Callable[[], float] = lambda: NEVER
    claim_id: str = ""

    def wait_until_free(self) -> EndOfClaim:
        """Wait until no process of the job needs the devices and their memory is back where it was.

        Returns the outcome.  Raises StillInUse if a signal comes while processes of the job still live.
        """
        snapshot = None
        with suppress(BackendError):  # living processes are seen without a driver
            # A list of processes is the most expensive thing to ask a driver for.  It is not read if no process of the
            # job lives and the devices hold no more than before, whatever holds it.
            living = children()
            if living is not None and living <= self.others and self._is_clear(self._sample((MEMORY,))):
                return "settled"
            snapshot = self._sample()
        try:
            snapshot = self._wait_for_processes(snapshot)
            return self._wait_for_memory(snapshot) if snapshot else "driver unreachable"
        except BackendError:
            return "driver unreachable"

    def _wait_for_processes(self, snapshot: Snapshot | None) -> Snapshot | None:
        """Wait for processes that use a device, and for others as long as leftover() says; return the last snapshot."""
        known: set[int] = set()
        began = used = time.monotonic()
        delay, notified, keep = POLL_SECONDS[0], False, -1.0  # until leftover() is called
        while living := job_processes(self.others, self.claim_id):
            now, users = time.monotonic(), users_of(snapshot, self.devices, living) if snapshot else {}
            words = _in_words(users) if users else _named(living)
            if users:
                used = now
                if not users.keys() <= known:
                    self.notify(_("the job ended, but {words}: the claim stays until that ends.").format(words=words))
                    known |= users.keys()
            elif now - used >= (keep := self.leftover() if keep < 0 else keep):
                if keep:
                    self.notify(
                        _("{words}, for {seconds} without a GPU: the claim is released.").format(
                            words=words, seconds=format_duration(keep)
                        )
                    )
                return snapshot
            elif not notified and now - began > QUIET_SECONDS:
                notified = True
                until = (
                    ngettext("until it ends", "until they end", len(living))
                    if keep == NEVER
                    else _("for {seconds}, longer if they use a GPU").format(seconds=format_duration(keep))
                )
                command = _("`gpuguard release {claim_id}` releases it before.").format(claim_id=self.claim_id)
                self.notify(
                    _("the job ended, but {words}: the claim stays {until}.  {command}").format(
                        words=words, until=until, command=command
                    )
                )
            if signum := self.pause(USER_POLL_SECONDS if users else delay):
                raise StillInUse(signum, users or living, words)
            delay = min(delay * 1.5, USER_POLL_SECONDS)
            with suppress(BackendError):  # a process that was seen to use a device is taken to use it while it lives
                snapshot = self._sample()
        return snapshot

    def _wait_for_memory(self, snapshot: Snapshot) -> EndOfClaim:
        began, delay, notified = time.monotonic(), POLL_SECONDS[0], False
        while full := [device.index for device in self.devices if _residue(snapshot, device) > self.tolerance]:
            waited = time.monotonic() - began
            if waited > self.longest:
                return "memory did not settle"
            if waited > QUIET_SECONDS and not notified:
                gpus = ", ".join(map(str, full))
                self.notify(
                    _("the job ended; waiting for the driver to free the memory of GPU {gpus} ...").format(gpus=gpus)
                )
                notified = True
            if self.pause(delay):
                return "interrupted"
            delay = min(delay * 1.5, POLL_SECONDS[1])
            snapshot = self._sample()
        return "settled"

    def _is_clear(self, snapshot: Snapshot) -> bool:
        """Return whether the devices hold no more memory than before the job, whatever holds it."""
        for before in self.devices:
            now, used_before = snapshot.device(before.uuid), _unaccounted(before)
            if now is None or now.memory_used is None or used_before is None:
                return False
            if now.memory_used - used_before > self.tolerance:
                return False
        return True

    def _sample(self, groups: Collection[str] = (MEMORY, PROCESSES)) -> Snapshot:
        fields = {*groups, POWER} if self.count else {*groups}
        fields |= {HEALTH} if any(device.parent_uuid for device in self.devices) else set()
        snapshot = self.backend.sample(fields, [device.uuid for device in self.devices])
        if self.count:
            self.count(snapshot)
        return snapshot


def users_of(snapshot: Snapshot, devices: Sequence[Device], family: Collection[int]) -> dict[int, list[int]]:
    """Return the pids of *family* that use *devices*: pid -> the indices of these devices.

    A device whose list of processes is unknown contributes none.
    """
    return grouped(
        (process.pid, device.index)
        for device in filter(None, (snapshot.device(device.uuid) for device in devices))
        for process in device.processes or ()
        if process.pid in family
    )


def _named(living: Collection[int]) -> str:
    """Return ``"2 processes of it still run (pid 4321 tmux, pid 4322 python)"``."""
    names = [f"pid {pid} {_name(pid)}" for pid in sorted(living)]
    more = _(", and {count} more").format(count=len(names) - MOST_NAMED) if len(names) > MOST_NAMED else ""
    listed = f"{', '.join(names[:MOST_NAMED])}{more}"
    return ngettext(
        "{count} process of it still runs ({names})", "{count} processes of it still run ({names})", len(names)
    ).format(count=len(names), names=listed)


def _residue(snapshot: Snapshot, before: Device) -> int:
    """Return the bytes that the device holds for no process, beyond those before the job, or 0 if unknown."""
    now = snapshot.device(before.uuid)
    used_now, used_before = _unaccounted(now) if now else None, _unaccounted(before)
    return 0 if used_now is None or used_before is None else used_now - used_before


def _unaccounted(device: Device) -> int | None:
    """Return the used bytes without those of living processes, or None if unknown.

    The driver has yet to free what a dead process leaves.
    """
    if device.memory_used is None:
        return None
    living = [process for process in device.processes or () if os.path.exists(f"/proc/{process.pid}")]
    if any(process.memory_used is None for process in living):
        return None
    return device.memory_used - sum(process.memory_used or 0 for process in living)


def _in_words(users: dict[int, list[int]]) -> str:
    """Return ``"pid 4321 (tensorboard) still uses GPU 3"``, with a name that the process chose itself."""
    return _(" and ").join(
        _("pid {pid} ({name}) still uses GPU {devices}").format(
            pid=pid, name=_name(pid), devices=",".join(map(str, indices))
        )
        for pid, indices in users.items()
    )


def _name(pid: int) -> str:
    return (procfs.read_proc(f"/proc/{pid}/comm") or b"?").decode(errors="replace").rstrip("\n")
