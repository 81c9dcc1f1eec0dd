"""One process that an action would mean: who it is, by which verdict, and what is known about it by now.

Filled by preflight, step by step; read by its checks and by actions.  Decides nothing.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from gpuguard import procfs
from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory
from gpuguard.enforcement.identity import ProcessFacts, ancestors
from gpuguard.enforcement.limits import ActionLimits, LimitScope, PastAction, facts_of
from gpuguard.model import Event, Snapshot, Verdict
from gpuguard.notify.templates import ENGLISH, TEMPLATES, Template

INTERACTIVE_SECONDS = 600.0
INTERVALS = 2  # between samples: how old one may be to act by


class Notifier(Protocol):
    """Sends messages; never waits for that."""

    def notify(self, name: str, verdict: Verdict, snapshot: Snapshot) -> str:
        """Tell the target of that name; "queued", or why not."""


@dataclass(frozen=True)
class Context:
    """Who acts, by which rules, and with what.

    Args:
        backend: to ask the driver again.
        append: writes an Event down; False when it could not.
        still_true: whether the rule behind a verdict still holds on a fresh snapshot.
        enforce: the daemon's switch; the policy has the other one.
        interval: seconds between two samples.
        protected: uids that are never touched, beside root and the system's.
        protected_executables: globs of the whole paths of programs that are never touched.
        jobs: (pid, start time) of what we started ourselves as jobs.
        share_host_pids: the driver's pids are ours although this is not the first pid namespace.
        interactive_grace: seconds that notebooks, debuggers and terminals get on top.
        notifier: has notify(name of a target, verdict, snapshot), as notify.Sender.
        language: of what is written to terminals, where the step does not say.
        templates: the texts by language, those of the admin.
        directory: of the claims, where it is written down who is denied and what is quarantined.
        ledger: what was done lately.
        alarm: names of targets of the notifier that are told what no policy has foreseen.
    """

    backend: Backend
    append: Callable[[Event], bool]
    still_true: Callable[[Verdict, Snapshot], bool]
    enforce: bool = False
    interval: float = 10.0
    protected: frozenset[int] = frozenset()
    protected_executables: tuple[str, ...] = ()
    jobs: frozenset[tuple[int, float]] = frozenset()
    share_host_pids: bool = False
    interactive_grace: float = INTERACTIVE_SECONDS
    notifier: Notifier | None = None
    language: str = ENGLISH
    templates: Mapping[str, Template] = field(default_factory=lambda: TEMPLATES)
    directory: LockDirectory | None = None
    ledger: ActionLimits = field(default_factory=ActionLimits)
    alarm: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """One process of a verdict."""

    pid: int
    start_time: float | None
    uid: int | None
    devices: tuple[str, ...]  # uuids on which the sample has it
    user: str | None = None
    memory_used: int | None = None  # bytes on the first of them

    @property
    def process(self) -> tuple[int, float]:
        """Its identity."""
        return self.pid, -1.0 if self.start_time is None else self.start_time


@dataclass(frozen=True)
class ActionTarget:
    """What the checks look at, and what they said."""

    verdict: Verdict
    snapshot: Snapshot
    context: Context
    target: Target
    clock: float
    pidfd: int = -1
    again: Snapshot | None = None  # the driver's answer after the pidfd was opened
    facts: ProcessFacts | None = None  # read after that
    against: tuple[LimitScope, ...] = ()
    ended: bool = False

    @property
    def live(self) -> bool:
        """Whether this is more than a dry run."""
        return enforced(self.verdict, self.context)

    @property
    def signature(self) -> str:
        """What the process has in common with the one that is started in its place."""
        return signature(self.facts, claim_of_target(self.snapshot, self.target))

    def deed(self) -> PastAction:
        """What is about to be done, for the ledger."""
        devices = [device for uuid in self.target.devices if (device := (self.again or self.snapshot).device(uuid))]
        return PastAction(
            clock=self.clock,
            action=self.verdict.action,
            process=self.target.process,
            devices=self.target.devices,
            live=self.live,
            signature=self.signature,
            memory_used=tuple((each.uuid, each.memory_used) for each in devices if each.memory_used is not None),
            memory=self.target.memory_used,
            policy=self.verdict.policy,
            uid=self.target.uid,
        )


def enforced(verdict: Verdict, context: Context) -> bool:
    """Whether both switches are on."""
    return context.enforce is True and verdict.enforce is True


def checkpoint_signal(verdict: Verdict) -> int:
    """The signal that a step names."""
    number = dict(verdict.options).get("signal", signal.SIGUSR1)
    return int(number) if isinstance(number, int) and not isinstance(number, bool) else 0


def boot_clock() -> float:
    """CLOCK_BOOTTIME, seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def targets(verdict: Verdict, snapshot: Snapshot) -> tuple[Target, ...]:
    """The processes that an action of *verdict* would mean, each once."""
    subject = verdict.finding.subject
    if subject.kind == "process" and subject.pid is not None:
        wanted = [(subject.pid, subject.start_time, subject.uid, subject.user)]
    else:
        wanted = [(each.pid, each.start_time, each.uid, each.user) for each in verdict.finding.processes]
    found = []
    for pid, start_time, uid, user in dict.fromkeys(wanted):
        rows = {
            device.uuid: row
            for device in snapshot.devices
            for row in device.processes or ()
            if (row.pid, row.start_time) == (pid, start_time)
        }
        named = subject.device if subject.kind == "process" else None
        devices = tuple(dict.fromkeys([*([named] if named else []), *rows]))
        memory = next((row.memory_used for row in rows.values()), None)
        found.append(Target(pid, start_time, uid, devices, user, memory))
    return tuple(found)


def event_of(
    verdict: Verdict, outcome: str, target: Target | None = None, why: str = "", deed: PastAction | None = None
) -> Event:
    """The line of the audit log about what becomes of *verdict*, for *target* if it is about one of its processes.

    With *deed*: the line before it, by which it is remembered when the guard is started again.
    """
    subject = verdict.finding.subject
    devices = target.devices if target else (subject.device,) if subject.device else ()
    facts: dict[str, float | int | str | None] = {
        "policy": verdict.policy,
        "rule": verdict.finding.rule,
        "step": verdict.step,
        "uid": target.uid if target else subject.uid,
        "start_time_seconds": target.start_time if target else subject.start_time,
        "container": next(
            (each.container for each in verdict.finding.processes if target and each.pid == target.pid), None
        ),
    }
    facts |= facts_of(deed) if deed else {}
    text = verdict.finding.why + (f": {why}" if why else "")
    pid = target.pid if target else subject.pid
    user = (target.user if target else None) or subject.user
    return plain_event(verdict.action, outcome, text, devices, pid, user=user, claim=subject.claim, facts=facts)


def plain_event(
    kind: str,
    outcome: str,
    text: str,
    devices: tuple[str, ...],
    pid: int | None,
    *,
    user: str | None = None,
    claim: str | None = None,
    facts: Mapping[str, float | int | str | None] | None = None,
) -> Event:
    """A line of the audit log, of this moment."""
    more = tuple((facts or {}).items())
    return Event(time.time(), kind, outcome, user, devices, pid=pid, claim=claim, message=text, facts=more)


def has_ended(pidfd: int) -> bool:
    """Whether the process is over: reaped or not.  One whose first thread has ended while others live is not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def signature(facts: ProcessFacts | None, claim: str = "") -> str:
    """User, program, script, cgroup and claim of a process, as a hash; "" when they cannot be read."""
    if facts is None or facts.executable is None or facts.cgroup is None:
        return ""
    script = next((word for word in (facts.command or "").split()[1:] if not word.startswith("-")), "")
    text = f"{facts.uids[:1]} {facts.executable} {script} {facts.cgroup} {claim}"
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]  # a cgroup takes up to 12 lines


def claim_of_target(snapshot: Snapshot, target: Target) -> str:
    """The id of the claim that a process or an ancestor of it holds or made; "" without one."""
    family = {target.pid, *ancestors(target.pid)}
    own = (one for one in snapshot.claims if one.uid == target.uid and family & {one.pid, *one.holders})
    return next((one.id for one in own), "")


def is_alive(process: tuple[int, float]) -> bool:
    """Whether that very process still runs; True when nobody can tell."""
    pid, start_time = process
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        now = procfs.start_time(pid)
        return not has_ended(pidfd) and (now is None or now == start_time)
    finally:
        os.close(pidfd)
