"""Every check whether another user's process may be signalled, or a claim released, now: all in one table.

The order is the protection.  First a pidfd is opened, which keeps meaning the same process (or the open files of the
claim are borrowed); then the driver is asked again and /proc is read; last of all the process behind the pidfd must be
alive, so that its pid cannot have changed hands meanwhile.  A fact that cannot be read counts against acting.  This
module does nothing itself: see actions.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from gpuguard import procfs
from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import of_their_users, probe, read_records
from gpuguard.claims.unlock import LockHandle, NotPermitted, computing_under, is_supervisor, lock_handle
from gpuguard.clusters import slurm_jobs
from gpuguard.device_state import computes, idle_limit
from gpuguard.enforcement import identity
from gpuguard.enforcement.guard_limits import ActionLimits, FailedCheck, PastAction
from gpuguard.enforcement.identity import DriverNodes, ProcessFacts, driver_nodes
from gpuguard.enforcement.pauses import Pauses
from gpuguard.errors import BackendError, ClaimError
from gpuguard.locale.messages import sentence
from gpuguard.model import (
    DRAWING,
    WHO_FIELDS,
    ClaimRecord,
    Device,
    Event,
    GpuProcess,
    ProcessIdentity,
    Snapshot,
    Verdict,
    claim_named,
)
from gpuguard.notify.templates import ENGLISH, LONGEST_KEEP, TEMPLATES, Template
from gpuguard.policies.action_kinds import DISRUPTIVE
from gpuguard.policies.policy import INTERACTIVE_SECONDS
from gpuguard.policies.view import JobMember, alone, identities
from gpuguard.procfs import boot_clock, in_first_pid_namespace, in_time, process_facts, start_time
from gpuguard.units import format_duration
from gpuguard.users import accountable_uid, certain_owner, may_signal
from gpuguard.vendors import MPS_SERVER

INTERVALS = 2  # between samples: a sample that is older is not acted on
TICKS = 2  # start times are cut to ticks of 10 ms: one for that of the process, one for that of the sample

# Signals that programs use to ask for a checkpoint.  Others end or stop a process, and have actions of their own.
CHECKPOINT_SIGNALS = ("USR1", "USR2", "HUP", "ALRM", "WINCH", "URG", "CONT")

_FORBIDDEN = sentence(
    "preflight.files_not_lent",
    "the kernel does not lend its open files: the daemon's unit must permit pidfd_getfd, see docs/daemon.md",
)


class Notifier(Protocol):
    """A sender of messages, which never waits until they are sent."""

    def notify(self, name: str, verdict: Verdict, snapshot: Snapshot) -> str:
        """Send a message to the target *name*, and return "queued", or why it is not."""


@dataclass(frozen=True)
class ActionContext:
    """The settings by which the guard acts, and its means."""

    backend: Backend  # to ask the driver again
    append: Callable[[Event], bool]  # writes an Event down; False if it could not
    still_true: Callable[[Verdict, Snapshot], bool]  # whether the condition holds on a fresh snapshot
    enforce: bool = False  # the daemon's switch; the policy has the other one
    interval: float = 10.0  # seconds between two samples
    protected: frozenset[int] = frozenset()  # uids that are never touched, beside root and the system's
    protected_executables: tuple[str, ...] = ()  # globs of whole paths of programs that are never touched
    # When a process came to a device, or None unless its row there is proven to be its own: see policies.view.
    arrived: Callable[[str, tuple[int, float]], float | None] = lambda device, process: None
    member: Callable[[ProcessIdentity], JobMember] = alone  # what a process shares with others of its job
    jobs: frozenset[tuple[int, float]] = frozenset()  # (pid, start time) of the jobs that we started ourselves
    share_host_pids: bool = False  # the driver's pids are ours although this is not the first pid namespace
    interactive_grace: float = INTERACTIVE_SECONDS  # that notebooks, debuggers and terminals get on top
    notifier: Notifier | None = None
    language: str = ENGLISH  # of text on terminals, unless the step names one
    templates: Mapping[str, Template] = field(default_factory=lambda: TEMPLATES)  # by language
    longest_keep: float = LONGEST_KEEP  # seconds for which users may exempt their own processes and claims
    directory: LockDirectory | None = None  # of the claims, and of the denied users and quarantined devices
    limits: ActionLimits = field(default_factory=ActionLimits)
    pauses: Pauses | None = None  # keeps the pauses that the guard must end; None if a person ends them
    alarm: tuple[str, ...] = ()  # targets of the notifier for alarms that no policy has foreseen

    def has_turn(self, verdict: Verdict, process: ProcessTarget) -> bool:
        """Return whether *process*, which no rule has found, ends now: the step was taken on one of its job that is."""
        job, found = self.member(process.identity).job, identities(verdict.finding.processes)
        return any(self.limits.is_done(verdict, other) and self.member(other).job == job for other in found)

    def is_live(self, verdict: Verdict) -> bool:
        """Return whether both switches are on; otherwise it is a dry run."""
        return self.enforce is True and verdict.enforce is True


@dataclass(frozen=True)
class ProcessTarget:
    """One process that a verdict means."""

    pid: int
    start_time: float | None
    uid: int | None
    devices: tuple[str, ...]  # uuids of those on which the sample has it
    user: str | None = None
    memory_used: int | None = None  # bytes on the first of them
    of_rest: bool = False  # no rule has found it: it ends with others of its job, see Verdict.rest

    @property
    def identity(self) -> tuple[int, float]:
        """(pid, start time)."""
        return self.pid, -1.0 if self.start_time is None else self.start_time


@dataclass
class Preflight:
    """One target, a process or a claim, with all facts that the checks go by, and the checks that failed.

    It is filled while it is checked, and not changed after that.
    """

    verdict: Verdict
    snapshot: Snapshot  # by which it was judged
    context: ActionContext
    clock: float  # when the facts were read
    process: ProcessTarget | None = None  # the target, if it is a process
    claim: ClaimRecord | None = None  # the target, if it is a claim, with the devices that it really holds
    pidfd: int = -1  # of the process, once it is held
    locks: LockHandle | None = None  # the open files of the claim, lent by its holder
    fresh: Snapshot | None = None  # the driver's answer after the target was held
    facts: ProcessFacts | None = None  # the facts about the process from /proc, read after that
    failed: tuple[FailedCheck, ...] = ()  # the reasons against acting
    ended: bool = False  # the process is over

    @cached_property
    def live(self) -> bool:
        """Whether this is more than a dry run."""
        return self.context.is_live(self.verdict)

    @property
    def identity(self) -> tuple[int, float]:
        """(pid, start time) of the process, or of the holder of the claim."""
        if self.process:
            return self.process.identity
        return (self.locks.holder, start_time(self.locks.holder) or 0.0) if self.locks else (0, 0.0)

    @property
    def uid(self) -> int | None:
        """The uid of the owner of the process or claim, or None if that is not known."""
        return self.process.uid if self.process else certain_owner(self.claim.uid) if self.claim else None

    @property
    def devices(self) -> tuple[str, ...]:
        """The uuids of the devices that are touched."""
        return self.process.devices if self.process else self.claim.devices if self.claim else ()

    @cached_property
    def devices_now(self) -> tuple[Device, ...]:
        """The devices that are touched, as the driver described them when it was asked again."""
        return tuple(device for device in (self.fresh.devices if self.fresh else ()) if device.uuid in self.devices)

    @cached_property
    def drivers(self) -> DriverNodes:
        """The drivers of the devices that are touched."""
        return driver_nodes(self.devices_now)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """The ancestors of the process or the holder."""
        return procfs.ancestors(self.identity[0])

    @cached_property
    def action(self) -> PastAction:
        """The action that is about to be done, for the limits and for the audit log."""
        devices = (self.fresh or self.snapshot).devices if self.process else ()
        used = [(device.uuid, device.memory_used) for device in devices if device.uuid in self.devices]
        member = self.context.member(self.identity) if self.process else alone(self.identity)
        return PastAction(
            clock=self.clock,
            action=self.verdict.action,
            process=self.identity,
            devices=self.devices,
            live=self.live,
            signature=identity.signature(self.facts, self.claim_of_process),
            memory_used=tuple((uuid, memory) for uuid, memory in used if memory is not None),
            memory=self.process.memory_used if self.process else None,
            policy=self.verdict.policy if self.process else "",
            uid=self.uid,
            job=member.job,
            launch=member.launch,
        )

    @cached_property
    def claim_of_process(self) -> str:
        """The id of the claim that the process or an ancestor of it holds or made, or "" if there is none."""
        if not self.process:
            return ""
        family = {self.process.pid, *self.ancestors}
        own = (claim for claim in self.snapshot.claims if claim.uid == self.process.uid)
        return next((claim.id for claim in own if family & {claim.pid, *claim.holders}), "")


def targets(verdict: Verdict, snapshot: Snapshot) -> tuple[ProcessTarget, ...]:
    """Return the processes that an action of *verdict* would mean, each once: first those that the rule has found."""
    subject = verdict.finding.subject
    wanted = [(row.pid, row.start_time, row.uid, row.user) for row in verdict.finding.processes]
    if subject.kind == "process" and subject.pid is not None:
        wanted = [(subject.pid, subject.start_time, subject.uid, subject.user)]
    rest = [(row.pid, row.start_time, row.uid, row.user) for row in verdict.rest]
    found = []
    for pid, started, uid, user in dict.fromkeys((*wanted, *rest)):
        rows = {
            device.uuid: row
            for device in snapshot.devices
            for row in device.processes or ()
            if (row.pid, row.start_time) == (pid, started)
        }
        named = [subject.device] if subject.device and (pid, started) == (subject.pid, subject.start_time) else []
        memory = next((row.memory_used for row in rows.values()), None)
        devices, of_rest = tuple(dict.fromkeys([*named, *rows])), (pid, started, uid, user) not in wanted
        found.append(ProcessTarget(pid, started, uid, devices, user, memory, of_rest))
    return tuple(found)


def checkpoint_signal(verdict: Verdict) -> int:
    """Return the signal that a step names."""
    number = dict(verdict.options).get("signal", signal.SIGUSR1)
    return int(number) if isinstance(number, int) and not isinstance(number, bool) else 0


def slurm_job(target: Preflight) -> str | None:
    """Return the Slurm job that the process or the claim belongs to."""
    if target.claim:
        return slurm_jobs.job_of_claim(target.claim.id)
    pid = target.identity[0]
    return slurm_jobs.job_of((pid, *procfs.ancestors(pid)))  # read anew, also after the checks


@contextmanager
def check_process(
    verdict: Verdict, snapshot: Snapshot, context: ActionContext, process: ProcessTarget
) -> Iterator[Preflight]:
    """Yield *process* with a pidfd and the checks that failed.  The pidfd is closed afterwards."""
    target = Preflight(verdict, snapshot, context, boot_clock(), process)
    target.failed = _failed(EARLY, target)
    with ExitStack() as stack:
        try:
            if not target.failed:  # otherwise no system call sees this pid
                target.pidfd = os.pidfd_open(process.pid)
                stack.callback(os.close, target.pidfd)
        except ProcessLookupError:
            target.ended = True
        except OSError as error:
            text = sentence("preflight.not_held", "it cannot be held: {error}", error=str(error))
            target.failed = (FailedCheck("pidfd", text),)
        if target.pidfd >= 0 and _samples_again(target, "listed"):
            target.facts, target.clock = identity.facts_of(process.pid, target.drivers), boot_clock()
            target.failed, target.ended = _failed(LATE, target), identity.has_ended(target.pidfd)
        yield target


@contextmanager
def check_claim(verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> Iterator[Preflight]:
    """Yield the claim of *verdict* with its files borrowed and the checks that failed."""
    target = Preflight(verdict, snapshot, context, boot_clock())
    claim, directory = _claim_meant(verdict, snapshot, context.directory), context.directory
    if isinstance(claim, FailedCheck):
        target.failed = (claim,)
        yield target
        return
    assert directory is not None  # otherwise no claim would be meant
    target.claim = claim
    target.failed = _failed(EARLY, target)
    with ExitStack() as stack:
        try:
            if not target.failed:
                target.locks = stack.enter_context(lock_handle(directory, claim))
        except (ClaimError, OSError) as error:
            text = _FORBIDDEN if isinstance(error, NotPermitted) else str(error)
            target.failed = (FailedCheck("files", text),)
        if target.locks and _samples_again(target, "unused"):
            assert target.fresh
            target.fresh = replace(target.fresh, claims=probe(directory, claim.devices))
            target.clock = boot_clock()
            target.failed = _failed(LATE, target)
        yield target


def _samples_again(target: Preflight, check: str) -> bool:
    """Ask the driver once more, and return whether it answers.  If it does not, *check* has failed."""
    try:
        target.fresh = target.context.backend.sample(WHO_FIELDS, list(target.devices))
    except BackendError as error:
        text = sentence("preflight.no_answer", "the driver cannot be asked again: {error}", error=str(error))
        target.failed = (FailedCheck(check, text),)
    return target.fresh is not None


def _claim_meant(verdict: Verdict, snapshot: Snapshot, directory: LockDirectory | None) -> ClaimRecord | FailedCheck:
    """Return the claim of *verdict* with the devices that it really holds, because its record may name any devices."""
    subject = verdict.finding.subject
    if subject.claim is None or subject.uid is None or subject.uid < 0 or "/" in subject.claim:
        return FailedCheck("claim", sentence("preflight.no_claim", "no claim is meant"))
    if verdict.finding.processes:
        text = sentence("preflight.claim_in_use", "processes use it: they are ended by `terminate`")
        return FailedCheck("claim", text)
    if directory is None:
        return FailedCheck("claim", sentence("claims.no_directory", "there is no directory of claims"))
    records = read_records(directory)
    named = dict(zip([(record.uid, record.id) for record in of_their_users(records)], records, strict=True))
    # Without a record the kernel still knows who holds the lock, or the daemon to whom it was given.
    claim = named.get((subject.uid, subject.claim)) or claim_named(snapshot.claims, subject.uid, subject.claim)
    held = probe(directory, claim.devices) if claim else ()
    return (claim and claim_named(held, claim.uid, claim.id)) or FailedCheck(
        "claim", sentence("preflight.claim_ended", "it has ended")
    )


# The checks.  Each returns the reason against acting, or None.


def _live(target: Preflight) -> str | None:
    if target.snapshot.recorded:
        return sentence("preflight.recorded", "the sample is a recording, of another time or machine")
    return None


def _pid(target: Preflight) -> str | None:
    pid = target.identity[0]
    is_pid = isinstance(pid, int) and 2 <= pid <= procfs.pid_max()
    return None if is_pid else sentence("preflight.no_pid", "{pid} is no pid", pid=pid)


def _known(target: Preflight) -> str | None:
    process = target.process
    unknown = process is None or process.start_time is None or process.uid is None
    return sentence("preflight.who_unknown", "who it is is not known") if unknown else None


def _fresh(target: Preflight) -> str | tuple[FailedCheck, ...] | None:
    age = target.clock - target.snapshot.clock
    if age < 0:
        return sentence("preflight.from_future", "the sample is from the future")
    if age > INTERVALS * target.context.interval:
        text = sentence("preflight.old_sample", "the sample is {time} old", time=format_duration(age))
        return (FailedCheck("fresh", text, 0.0),)
    return None


def _sampled(target: Preflight) -> str | None:
    if not target.devices:
        return sentence("preflight.on_no_gpu", "it is on no GPU")
    return _unlisted(target, target.snapshot)


def _namespace(target: Preflight) -> str | None:
    if target.context.share_host_pids or in_first_pid_namespace():
        return None
    return sentence("preflight.other_pid_namespace", "the driver's pids are those of another pid namespace")


def _start_time(target: Preflight) -> str | None:
    if target.facts is None:
        return sentence("preflight.not_in_proc", "/proc does not show it")
    if target.facts.start_time == target.identity[1]:
        return None
    return sentence("preflight.other_process", "its pid belongs to another process now")


def _sample_time(target: Preflight) -> str | None:
    latest = target.snapshot.clock - TICKS / os.sysconf("SC_CLK_TCK")
    if target.facts is None or target.facts.start_time > latest:
        return sentence("preflight.started_later", "it may have started after the sample")
    return None


def _listed(target: Preflight) -> str | None:
    if target.fresh is None or target.fresh.recorded or target.fresh.clock < target.snapshot.clock:
        return sentence("preflight.no_newer_list", "the driver gave no newer list")
    return _unlisted(target, target.fresh) if target.process else None


def _unlisted(target: Preflight, snapshot: Snapshot) -> str | None:
    pid, started = target.identity
    devices = {device.uuid: device for device in snapshot.devices}
    for device in map(devices.get, target.devices):
        if device is None or device.processes is None or not device.processes_plausible:
            return sentence("preflight.incredible_list", "the driver's list of processes cannot be believed")
        if [row.start_time for row in device.processes if row.pid == pid] != [started]:
            return sentence("preflight.not_listed", "the driver does not list it on that GPU")
    return None


def _driver(target: Preflight) -> str | None:
    if target.context.backend.simulated or (target.devices_now and not target.drivers):
        return None  # there is no node to go by: under WSL, for example
    facts, arrived = target.facts, target.context.arrived
    if facts and facts.hides and any(arrived(uuid, target.identity) is not None for uuid in target.devices):
        return None  # no other process can be meant, which is as good as seeing the files
    if facts is None or facts.uses_driver is None:
        return sentence("preflight.driver_unseen", "whether it has the driver open cannot be seen")
    if facts.uses_driver:
        return None
    return sentence("preflight.driver_not_open", "it does not have the driver open: the driver's list cannot be right")


def _kind(target: Preflight) -> str | None:
    own = _rows_now(target)
    if own and not any(computes(row, device) for device, row in own):
        return sentence("preflight.desktop", "it is no more than a desktop there")
    # All GPUs count, because a process that draws on one and computes on another takes its windows along when it ends.
    elsewhere = [row for device in target.snapshot.devices for row in device.processes or ()]
    kinds = {row.kind for row in elsewhere if row.pid == target.identity[0]} | {row.kind for _, row in own}
    if kinds & DRAWING and (target.facts is None or identity.is_at_the_seat(target.facts)):
        return sentence("preflight.own_screen", "what it draws belongs to the session at the machine's own screen")
    if any(row.kind == "mps" and _has_clients_of_several_users(device) for device, row in own):
        return sentence(
            "preflight.mps", "an MPS server of root's shares this GPU: its clients of other users would suffer"
        )
    return None


def _has_clients_of_several_users(device: Device) -> bool:
    """Return whether the end of an MPS client on *device* may take clients of other users along.

    Only root can start a server for several users, `nvidia-cuda-mps-control -multiuser-server`.  Any other server
    serves one user at a time, so only that user's clients and the server itself suffer, and it shelters no process.
    The driver lists a server as a process that computes, and its clients both as such processes and in the list of MPS.
    """
    rows = device.processes or ()
    if not any(row.uid == 0 and os.path.basename(row.executable or MPS_SERVER) == MPS_SERVER for row in rows):
        return False
    clients = [row.uid for row in rows if row.kind == "mps"]
    return len({uid if uid is None else accountable_uid(uid) for uid in clients}) > 1


def _owner(target: Preflight) -> str | None:
    uid, rows = target.uid, [row for _, row in _rows_now(target)]
    is_same = target.facts is not None and target.facts.uids[:1] == (uid,)
    if not is_same or any(row.uid is not None and row.uid != uid for row in rows):
        return sentence("preflight.other_owner", "its owner is not the one that was judged")
    if not rows or any(row.user is None or row.user == str(row.uid) for row in rows):
        return sentence("preflight.nameless", "the name of uid {uid} is not known", uid=str(uid))
    return None


def _rows_now(target: Preflight) -> list[tuple[Device, GpuProcess]]:
    """Return the rows of the process that the driver listed on each of the target's devices when it was asked again."""
    rows = ((device, row) for device in target.devices_now for row in device.processes or ())
    return [(device, row) for device, row in rows if row.pid == target.identity[0]]


def _protected(target: Preflight) -> str | None:
    uids = (target.uid,) if target.claim else target.facts.uids if target.facts else (None,)
    for uid in dict.fromkeys(uids):
        if uid is None:
            return sentence("preflight.owner_unread", "whose it is cannot be read")
        if identity.is_of_the_system(uid):
            return sentence("preflight.uid_of_system", "uid {uid} is the system's", uid=uid)
        if uid in target.context.protected:
            return sentence("preflight.uid_protected", "uid {uid} is protected", uid=uid)
    return None


def _program(target: Preflight) -> str | None:
    facts, globs = target.facts, target.context.protected_executables
    if facts is None or facts.executable is None:
        return sentence("preflight.program_unread", "its program cannot be read")
    if identity.belongs_to_the_system(facts, any(row.kind in DRAWING for _, row in _rows_now(target))):
        return sentence("preflight.program_of_system", "{program} belongs to the system", program=facts.executable)
    if not identity.has_path_of(facts, globs):
        return None
    # This has a deadline, because that path may lead us to a user's own file system, or to a server that hangs.
    meant = in_time(target.identity[0], "program", partial(identity.runs_one_of, facts, globs))
    if meant is False:
        return None
    return sentence("preflight.program_protected", "{program} is protected", program=facts.executable)


def _power(target: Preflight) -> str | None:
    if target.facts is None or may_signal(target.facts.uids):
        return None
    return sentence(
        "preflight.no_power",
        "gpuguard may not signal processes of others: it is not root, and runs without CAP_KILL",
    )


def _family(target: Preflight) -> str | None:
    own, pid = os.getpid(), target.identity[0]
    if target.process and target.identity in target.context.jobs:
        return None
    if pid == own or pid in procfs.ancestors(own):
        return sentence("preflight.own_ancestor", "gpuguard itself stands on it")
    if target.claim:
        return None
    if own in target.ancestors:
        return sentence("preflight.own_part", "it is a part of gpuguard")
    if target.facts is None or target.facts.group == os.getpgrp():
        return sentence("preflight.own_group", "it is in gpuguard's process group")
    return None


def _interactive(target: Preflight) -> tuple[FailedCheck, ...] | None:
    kind = target.facts.interactive if target.facts else sentence("interactive.perhaps", "perhaps interactive")
    verdict = target.verdict
    if kind is None or verdict.action not in DISRUPTIVE:
        return None
    key = (target.identity, verdict.policy, verdict.action, verdict.since, target.live)
    grace = target.context.interactive_grace - verdict.graced
    left = target.context.limits.first_wanted(key, target.clock) + grace - target.clock
    if left <= 0:
        return None
    text = sentence("preflight.interactive", "it is {kind}, and has {time} more", kind=kind, time=format_duration(left))
    return (FailedCheck("interactive", text, left),)


def _catches(target: Preflight) -> str | None:
    if target.verdict.action != "checkpoint":
        return None
    number = checkpoint_signal(target.verdict)
    if number not in {signal.Signals[f"SIG{name}"] for name in CHECKPOINT_SIGNALS}:
        return sentence("preflight.no_checkpoint", "signal {number} is none for a checkpoint", number=number)
    if target.facts and target.facts.caught >> (number - 1) & 1:
        return None
    name = signal.Signals(number).name
    return sentence("preflight.no_handler", "it has no way to answer {name}: most programs end of it", name=name)


def _stopped(target: Preflight) -> str | None:
    if target.verdict.action == "pause" and target.facts and target.facts.state in "Tt":
        return sentence("preflight.stopped", "it is stopped already")
    return None


def _slurm(target: Preflight) -> str | None:
    if target.verdict.action != "cancel":
        return None
    return slurm_jobs.against_cancelling(slurm_job(target), target.uid)


def _requeues(target: Preflight) -> str | None:
    if target.verdict.action != "requeue":
        return None
    claim = claim_named(target.snapshot.claims, target.uid, target.claim_of_process.partition(".")[0])
    if claim is None or not claim.requeue:
        return sentence("preflight.no_requeue", "it belongs to no job that may stand in the queue again (--requeue)")
    if claim.pid is None or not is_supervisor(claim.pid):
        return sentence(
            "preflight.no_supervisor", "no gpuguard run is left that would put its job into the queue again"
        )
    return None


def _claim(target: Preflight) -> str | None:
    assert target.claim
    now = claim_named(target.fresh.claims, target.claim.uid, target.claim.id) if target.fresh else None
    if now is None or set(now.devices) != set(target.claim.devices):
        return sentence("preflight.claim_changed", "it does not hold what it held just now")
    return None


def _unused(target: Preflight) -> str | None:
    assert target.claim and target.fresh
    users, unknown = computing_under(target.claim, target.fresh, process_facts(target.fresh))
    if unknown:
        return unknown
    if users:
        return sentence("preflight.computes", "pid {pid} computes under it", pid=users[0].pid)
    held = set(target.claim.devices)  # for a divided GPU the driver shows all instances
    devices = [device for device in target.fresh.devices if held & {device.uuid, device.parent_uuid}]
    if any(device.memory_used is None or device.memory_used > idle_limit(device) for device in devices):
        return sentence("preflight.memory_in_use", "memory is in use, though no process is listed")
    return None


def _rule(target: Preflight) -> str | None:
    def own(rows: tuple[GpuProcess, ...]) -> tuple[GpuProcess, ...]:
        return tuple(row for row in rows if (row.pid, row.start_time) == target.identity)

    finding = target.verdict.finding  # by now it may hold only for other processes of the user
    meant = replace(finding, processes=own(finding.processes))
    verdict = replace(target.verdict, finding=meant, rest=own(target.verdict.rest))
    if target.fresh and target.context.still_true(verdict, target.snapshot.updated(target.fresh)):
        return None
    return sentence("preflight.condition_over", "the condition does not hold any more")


def _limits(target: Preflight) -> tuple[FailedCheck, ...]:
    def is_seen(past: PastAction) -> bool:
        return target.process is None or effect_seen(past, target.fresh or target.snapshot)

    return tuple(target.context.limits.failed(target.action, is_seen))


def effect_seen(past: PastAction, now: Snapshot) -> bool:
    """Return whether the process of *past* is gone and its memory is back."""
    return not identity.is_alive(past.process) and memory_is_back(past, now)


def memory_is_back(past: PastAction, now: Snapshot) -> bool:
    """Return whether the memory of the process of *past* is back, on those of its devices that *now* has."""
    before = dict(past.memory_used)
    return all(
        device.memory_used is not None and device.memory_used <= before[device.uuid] - (past.memory or 0) // 2
        for device in now.devices
        if device.uuid in before
    )


@dataclass(frozen=True)
class PreflightCheck:
    """A row of the table: a check, and the kinds of targets that it is for."""

    check: Callable[[Preflight], str | tuple[FailedCheck, ...] | None]
    process: bool = True
    claim: bool = False


# EARLY has the checks that open nothing; LATE has those that run once the target is held and the driver has answered
# again.
EARLY = {
    "live": PreflightCheck(_live, claim=True),
    "pid": PreflightCheck(_pid),
    "known": PreflightCheck(_known),
    "fresh": PreflightCheck(_fresh, claim=True),
    "sampled": PreflightCheck(_sampled),
}
LATE = {
    "namespace": PreflightCheck(_namespace),
    "start time": PreflightCheck(_start_time),
    "sample time": PreflightCheck(_sample_time),
    "listed": PreflightCheck(_listed, claim=True),
    "driver": PreflightCheck(_driver),
    "kind": PreflightCheck(_kind),
    "owner": PreflightCheck(_owner),
    "protected": PreflightCheck(_protected, claim=True),
    "program": PreflightCheck(_program),
    "power": PreflightCheck(_power),
    "family": PreflightCheck(_family, claim=True),
    "interactive": PreflightCheck(_interactive),
    "catches": PreflightCheck(_catches),
    "stopped": PreflightCheck(_stopped),
    "slurm": PreflightCheck(_slurm, claim=True),
    "requeue": PreflightCheck(_requeues),
    "claim": PreflightCheck(_claim, process=False, claim=True),
    "unused": PreflightCheck(_unused, process=False, claim=True),
    "rule": PreflightCheck(_rule, claim=True),
    "limits": PreflightCheck(_limits, claim=True),
}


def _failed(checks: Mapping[str, PreflightCheck], target: Preflight) -> tuple[FailedCheck, ...]:
    found: list[FailedCheck] = []
    for name, check in checks.items():
        if not (check.claim if target.claim else check.process):
            continue
        answer = check.check(target)
        if isinstance(answer, str):
            found.append(FailedCheck(name, answer))
        elif answer:
            found.extend(answer)
    return tuple(found)
