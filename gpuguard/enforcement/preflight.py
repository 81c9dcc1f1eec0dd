"""Whether somebody else's process may be signalled now: every check, in one place, on facts read afresh.

The order is the protection.  First a pidfd, which keeps meaning the same process; then the driver is asked again and
/proc is read; last of all the process behind the pidfd is alive, so that its pid cannot have changed hands meanwhile.
What cannot be read counts against acting.  Sends nothing: see actions.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from dataclasses import replace as changed
from functools import partial

from gpuguard import capabilities, procfs
from gpuguard.claims.records import probe, read_record
from gpuguard.claims.release import LockHandle, NotPermitted, lock_handle, users_of
from gpuguard.clusters import slurm_jobs
from gpuguard.deadline import in_time
from gpuguard.enforcement import identity
from gpuguard.enforcement.action_keys import CHECKPOINT_SIGNALS
from gpuguard.enforcement.limits import DISRUPTIVE, LimitScope, PastAction
from gpuguard.enforcement.target import (
    INTERVALS,
    ActionTarget,
    Target,
    boot_clock,
    checkpoint_signal,
    enforced,
    has_ended,
    is_alive,
    targets,
)
from gpuguard.enforcement.target import Context as Context
from gpuguard.errors import BackendError, ClaimError
from gpuguard.model import WHO_FIELDS, ClaimRecord, GpuProcess, Snapshot, Verdict, claim_named
from gpuguard.procfs import in_first_pid_namespace, process_facts, start_time
from gpuguard.request import idle_limit
from gpuguard.units import format_duration

TICKS = 2  # start times are cut to ticks of 10 ms: one for the process's, one for the sample's


@contextmanager
def examined(verdict: Verdict, snapshot: Snapshot, context: Context, target: Target) -> Iterator[ActionTarget]:
    """*target* with a pidfd and everything that speaks against acting on it; the pidfd is closed afterwards."""
    case = ActionTarget(verdict, snapshot, context, target, boot_clock())
    case = replace(case, against=_said(EARLY, case))
    if case.against:
        yield case  # no system call has seen this pid yet
        return
    try:
        pidfd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        yield replace(case, ended=True)
        return
    except OSError as error:
        yield replace(case, against=(LimitScope("pidfd", f"it cannot be held: {error}"),))
        return
    try:
        again = _asked_before(case)
        if isinstance(again, LimitScope):
            yield replace(case, against=(again,))
            return
        case = replace(case, pidfd=pidfd, again=again, facts=identity.facts_of(target.pid), clock=boot_clock())
        case = replace(case, against=_said(LATE, case), ended=has_ended(pidfd))
        yield case
    finally:
        os.close(pidfd)


def preflight(verdict: Verdict, snapshot: Snapshot, context: Context) -> tuple[LimitScope, ...]:
    """Everything that speaks now against acting on the processes of *verdict*; () when they may be signalled."""
    found: list[LimitScope] = []
    for target in targets(verdict, snapshot):
        with examined(verdict, snapshot, context, target) as case:
            found += case.against or ([LimitScope("alive", "it has ended")] if case.ended else [])
    return tuple(found)


def _asked_before(case: ActionTarget) -> Snapshot | LimitScope:
    try:
        return case.context.backend.sample(WHO_FIELDS, list(case.target.devices))
    except BackendError as error:
        return LimitScope("listed", f"the driver cannot be asked again: {error}")


def _said(checks: dict[str, Check], case: ActionTarget) -> tuple[LimitScope, ...]:
    found: list[LimitScope] = []
    for name, check in checks.items():
        said = check(case)
        if isinstance(said, str):
            found.append(LimitScope(name, said))
        elif said:
            found.extend(said)
    return tuple(found)


# The checks.  Each says what speaks against acting, or None.


def _pid(case: ActionTarget) -> str | None:
    if not isinstance(case.target.pid, int) or not 2 <= case.target.pid <= procfs.pid_max():
        return f"{case.target.pid} is no pid"
    return None


def _live(case: ActionTarget) -> str | None:
    return "the sample is a recording, of another time or machine" if case.snapshot.recorded else None


def _known(case: ActionTarget) -> str | None:
    return "who it is is not known" if case.target.start_time is None or case.target.uid is None else None


def _fresh(case: ActionTarget) -> str | None:
    age = case.clock - case.snapshot.clock
    if age < 0:
        return "the sample is from the future"
    return f"the sample is {format_duration(age)} old" if age > INTERVALS * case.context.interval else None


def _sampled(case: ActionTarget) -> str | None:
    return _unlisted(case, case.snapshot) if case.target.devices else "it is on no device"


def _namespace(case: ActionTarget) -> str | None:
    if case.context.share_host_pids or in_first_pid_namespace():
        return None
    return "the driver's pids are those of another pid namespace"


def _start_time(case: ActionTarget) -> str | None:
    if case.facts is None:
        return "/proc does not show it"
    return None if case.facts.start_time == case.target.start_time else "its pid belongs to another process now"


def _sample_time(case: ActionTarget) -> str | None:
    latest = case.snapshot.clock - TICKS / os.sysconf("SC_CLK_TCK")
    if case.facts is None or case.facts.start_time > latest:
        return "it may have started after the sample"
    return None


def _listed(case: ActionTarget) -> str | None:
    if case.again is None or case.again.recorded or case.again.clock < case.snapshot.clock:
        return "the driver gave no newer list"
    return _unlisted(case, case.again)


def _driver(case: ActionTarget) -> str | None:
    if case.context.backend.simulated or not os.path.exists(identity.DRIVER_FILE):
        return None  # nothing to hold on to: under WSL, for example
    if case.facts is None or case.facts.uses_driver is None:
        return "whether it has the driver open cannot be seen"
    if case.facts.uses_driver:
        return None
    return "it does not have the driver open: the driver's list cannot be right"


def _kind(case: ActionTarget) -> str | None:
    rows = [row for uuid in case.target.devices for row in _rows(case.again, uuid)]
    elsewhere = [row for device in case.snapshot.devices for row in device.processes or ()]
    other = {row.kind for row in (*rows, *elsewhere) if row.pid == case.target.pid} - {"compute"}
    if other:
        return f"it is a {other.pop()} process: only compute processes are signalled"
    if any(row.kind == "mps" for row in rows):
        return "an MPS server shares this device: its other clients would suffer"
    return None


def _owner(case: ActionTarget) -> str | None:
    rows = [row for uuid in case.target.devices for row in _rows(case.again, uuid) if row.pid == case.target.pid]
    if case.facts is None or case.facts.uids[:1] != (case.target.uid,):
        return "its owner is not the one that was judged"
    if any(row.uid is not None and row.uid != case.target.uid for row in rows):
        return "its owner is not the one that was judged"
    if not rows or any(row.user is None or row.user == str(row.uid) for row in rows):
        return f"nobody knows who uid {case.target.uid} is"
    return None


def _protected(case: ActionTarget) -> str | None:
    if case.facts is None:
        return "whose it is cannot be read"
    for uid in case.facts.uids:
        if identity.is_of_the_system(uid):
            return f"uid {uid} is the system's"
        if uid in case.context.protected:
            return f"uid {uid} is protected"
    return None


def _program(case: ActionTarget) -> str | None:
    if case.facts is None or case.facts.executable is None:
        return "its program cannot be read"
    if identity.belongs_to_the_system(case.facts):
        return f"{case.facts.executable} belongs to the system"
    globs = case.context.protected_executables
    # Apart: what lies there for us may be a user's own file system, or a server that does not answer.
    meant = in_time(case.target.pid, "program", partial(identity.runs_one_of, case.facts, globs)) if globs else False
    return None if meant is False else f"{case.facts.executable} is protected"


def _power(case: ActionTarget) -> str | None:
    if case.facts is None or capabilities.may_signal(case.facts.uids):
        return None
    return "gpuguard may not signal processes of others: it is not root, and runs without CAP_KILL"


def _family(case: ActionTarget) -> str | None:
    if case.target.process in case.context.jobs:
        return None
    own, pid = os.getpid(), case.target.pid
    if pid == own or pid in identity.ancestors(own):
        return "gpuguard itself stands on it"
    if own in identity.ancestors(pid):
        return "it is a part of gpuguard"
    if case.facts is None or case.facts.group == os.getpgrp():
        return "it is in gpuguard's process group"
    return None


def _interactive(case: ActionTarget) -> tuple[LimitScope, ...] | None:
    kind = case.facts.interactive if case.facts else "perhaps interactive"
    if kind is None or case.verdict.action not in DISRUPTIVE:
        return None
    verdict = case.verdict
    key = (case.target.process, verdict.policy, verdict.action, verdict.since, case.live)
    over = case.context.ledger.wanted_since(key, case.clock) + case.context.interactive_grace
    if case.clock >= over:
        return None
    left = over - case.clock
    return (LimitScope("interactive", f"it is {kind}, and has {format_duration(left)} more", left),)


def _catches(case: ActionTarget) -> str | None:
    if case.verdict.action != "checkpoint":
        return None
    number = checkpoint_signal(case.verdict)
    if number not in {signal.Signals[f"SIG{name}"] for name in CHECKPOINT_SIGNALS}:
        return f"signal {number} is none for a checkpoint"
    if case.facts and case.facts.caught >> (number - 1) & 1:
        return None
    return f"it has no way to answer {signal.Signals(number).name}: most programs end of it"


def _slurm(case: ActionTarget) -> str | None:
    if case.verdict.action != "cancel":
        return None
    pid = case.target.pid
    return slurm_jobs.against_cancelling(slurm_jobs.job_of((pid, *identity.ancestors(pid))), case.target.uid)


def _rule(case: ActionTarget) -> str | None:
    if case.again is not None and case.context.still_true(case.verdict, case.snapshot.updated(case.again)):
        return None
    return "the condition does not hold any more"


def _limits(case: ActionTarget) -> tuple[LimitScope, ...]:
    return tuple(
        case.context.ledger.against(
            case.verdict.action,
            case.target.process,
            case.target.devices,
            uid=case.target.uid,
            clock=case.clock,
            live=case.live,
            signature=case.signature,
            effect_seen=lambda deed: _effect_seen(deed, case.again or case.snapshot),
        )
    )


def _effect_seen(deed: PastAction, now: Snapshot) -> bool:
    """Whether the process of *deed* is gone and its memory is back, on those of its devices that *now* has."""
    if is_alive(deed.process):
        return False
    for uuid, before in deed.memory_used:
        device = now.device(uuid)
        if device and (device.memory_used is None or device.memory_used > before - (deed.memory or 0) // 2):
            return False
    return True


def _unlisted(case: ActionTarget, snapshot: Snapshot) -> str | None:
    for uuid in case.target.devices:
        device = snapshot.device(uuid)
        if device is None or device.processes is None or not device.processes_plausible:
            return "the driver's list of processes cannot be believed"
        same = [row for row in device.processes if row.pid == case.target.pid]
        if [row.start_time for row in same] != [case.target.start_time]:
            return "the driver does not list it on that device"
    return None


def _rows(snapshot: Snapshot | None, uuid: str) -> tuple[GpuProcess, ...]:
    device = snapshot.device(uuid) if snapshot else None
    return (device.processes or ()) if device else ()


Check = Callable[[ActionTarget], "str | tuple[LimitScope, ...] | None"]

EARLY: dict[str, Check] = {"live": _live, "pid": _pid, "known": _known, "fresh": _fresh, "sampled": _sampled}
LATE: dict[str, Check] = {
    "namespace": _namespace,
    "start time": _start_time,
    "sample time": _sample_time,
    "listed": _listed,
    "driver": _driver,
    "kind": _kind,
    "owner": _owner,
    "protected": _protected,
    "program": _program,
    "power": _power,
    "family": _family,
    "interactive": _interactive,
    "catches": _catches,
    "slurm": _slurm,
    "rule": _rule,
    "limits": _limits,
}


# Whether a policy may release somebody's claim now: every check, on facts read afresh, as before a signal.
#
# Nobody computes under it, by a second look that the driver answers after the files of the claim were borrowed; what
# cannot be seen counts as somebody.  Gives nothing up: see actions and releasing.


_FORBIDDEN = "the kernel does not lend its open files: the daemon's unit must permit pidfd_getfd, see docs/daemon.md"


@dataclass(frozen=True)
class ReleaseCheck:
    """A claim that is meant, and what speaks against releasing it."""

    verdict: Verdict
    live: bool
    claim: ClaimRecord | None = None
    grip: LockHandle | None = None
    holder: tuple[int, float] = (0, 0.0)  # pid, start time of the process that lent its files
    clock: float = field(default_factory=boot_clock)
    against: tuple[LimitScope, ...] = ()

    def deed(self) -> PastAction:
        """What is about to be done, for the ledger."""
        devices, uid = (self.claim.devices, self.claim.uid) if self.claim else ((), None)
        return PastAction(self.clock, self.verdict.action, self.holder, devices, self.live, uid=uid)


@contextmanager
def examine_release(verdict: Verdict, snapshot: Snapshot, context: Context) -> Iterator[ReleaseCheck]:
    """The claim of *verdict* with its files borrowed, and everything that speaks against releasing it."""
    case = ReleaseCheck(verdict, enforced(verdict, context))
    claim = _claim(verdict, snapshot, context)
    if isinstance(claim, LimitScope):
        yield replace(case, against=(claim,))
        return
    case = replace(case, claim=claim)
    against = [each for each in (_release_fresh(case, snapshot, context), _release_protected(case, context)) if each]
    if against or context.directory is None:
        yield replace(case, against=tuple(against))
        return
    with ExitStack() as stack:
        try:
            grip = stack.enter_context(lock_handle(context.directory, claim))
            again = context.backend.sample(WHO_FIELDS, list(claim.devices))
        except NotPermitted:
            yield replace(case, against=(LimitScope("files", _FORBIDDEN),))
            return
        except (ClaimError, OSError) as error:
            yield replace(case, against=(LimitScope("files", str(error)),))
            return
        except BackendError as error:
            yield replace(case, against=(LimitScope("unused", f"the driver cannot be asked again: {error}"),))
            return
        holder = (grip.holder, start_time(grip.holder) or 0.0)
        case = replace(case, grip=grip, holder=holder, clock=boot_clock())
        yield replace(case, against=tuple(_release_reason(case, snapshot, again, context)))


def _claim(verdict: Verdict, snapshot: Snapshot, context: Context) -> ClaimRecord | LimitScope:
    """The claim that is meant, with what it really holds: its record may name whatever devices it likes."""
    subject = verdict.finding.subject
    if subject.claim is None or subject.uid is None or subject.uid < 0 or "/" in subject.claim:
        return LimitScope("claim", "no claim is meant")
    if verdict.finding.processes:
        return LimitScope("claim", "processes use it: they are ended by `terminate`")
    if context.directory is None:
        return LimitScope("claim", "there is no directory of claims")
    meant = subject.uid, subject.claim
    claim = read_record(context.directory, *meant)
    if claim is None and context.directory.keeper is not None:  # the daemon knows to whom it gave a lock
        claim = claim_named(snapshot.claims, *meant)
    held = probe(context.directory, claim.devices) if claim else ()
    return claim_named(held, *meant) or LimitScope("claim", "it has ended")


def _release_reason(case: ReleaseCheck, snapshot: Snapshot, again: Snapshot, context: Context) -> Iterator[LimitScope]:
    assert case.claim and case.grip and context.directory
    claims = probe(context.directory, case.claim.devices)
    claim = claim_named(claims, case.claim.uid, case.claim.id)
    if claim is None or set(claim.devices) != set(case.claim.devices):
        yield LimitScope("claim", "it does not hold what it held just now")
        return
    if again.clock < snapshot.clock:
        yield LimitScope("unused", "the driver gave no newer list")
    again = changed(again, claims=claims)
    users, unknown = users_of(claim, again, process_facts(again))
    if unknown:
        yield LimitScope("unused", unknown)
    elif users:
        yield LimitScope("unused", f"pid {users[0].pid} computes under it")
    elif any(each.memory_used is None or each.memory_used > idle_limit(each) for each in again.devices):
        yield LimitScope("unused", "memory is in use, though nobody is listed")
    if case.verdict.action == "cancel":
        why = slurm_jobs.against_cancelling(slurm_jobs.job_of_claim(claim.id), claim.uid)
        yield from (LimitScope("slurm", why),) if why else ()
    own = os.getpid()
    if case.grip.holder == own or case.grip.holder in identity.ancestors(own):
        yield LimitScope("family", "gpuguard itself stands on it")
    if not context.still_true(case.verdict, snapshot.updated(again)):
        yield LimitScope("rule", "the condition does not hold any more")
    yield from context.ledger.against(
        case.verdict.action,
        case.holder,
        claim.devices,
        uid=claim.uid,
        clock=case.clock,
        live=case.live,
        signature="",
        effect_seen=lambda deed: True,
    )


def _release_fresh(case: ReleaseCheck, snapshot: Snapshot, context: Context) -> LimitScope | None:
    age = case.clock - snapshot.clock
    if 0 <= age <= INTERVALS * context.interval:
        return None
    return LimitScope("fresh", f"the sample is {format_duration(abs(age))} {'old' if age > 0 else 'from the future'}")


def _release_protected(case: ReleaseCheck, context: Context) -> LimitScope | None:
    assert case.claim
    uid = case.claim.uid
    if identity.is_of_the_system(uid):
        return LimitScope("protected", f"uid {uid} is the system's")
    return LimitScope("protected", f"uid {uid} is protected") if uid in context.protected else None
