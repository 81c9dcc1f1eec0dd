"""What the guard does to others: act() looks at every check of preflight, writes down what it is about to do, does it.

A dry run leaves out nothing but that last call.  Does not decide whom or when: see policies.
"""

from __future__ import annotations

import os
import signal
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuguard.enforcement import signals
from gpuguard.enforcement.limits import UNKILLABLE_SECONDS, PastAction
from gpuguard.enforcement.signals import GONE, NOT_PERMITTED, SENT
from gpuguard.enforcement.target import Context, boot_clock, is_alive, plain_event
from gpuguard.model import Finding, Snapshot, Subject, Verdict
from gpuguard.sanitize import neutralise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuguard.claims.release import LockHandle
    from gpuguard.claims.release_requests import ReleaseRequest
    from gpuguard.enforcement.limits import LimitScope, PastAction
    from gpuguard.enforcement.target import ActionTarget, Context, Target
    from gpuguard.model import Event, Snapshot, Verdict

ABOUT_TO = "about to"  # the Event before a signal; another one follows only if it did not arrive
DRY_RUN = "dry run"
REFUSED = "refused"  # by a check
UNRECORDED = "not recorded"  # no line in the audit log, so nothing was done
UNKILLABLE = "unkillable"
DONE = "done"
FAILED = "failed"


@dataclass(frozen=True)
class ActionOutcome:
    """What became of an action on one process, or on none."""

    word: str
    why: str = ""
    pid: int | None = None
    against: tuple[LimitScope, ...] = ()
    wait: float | None = None  # seconds after which the same verdict is worth another try; None: it is settled


# What the guard does.


def act(verdict: Verdict, snapshot: Snapshot, context: Context) -> tuple[ActionOutcome, ...]:
    """Do what *verdict* wants, to each of its processes for which nothing speaks against it.

    Args:
        verdict: from the engine.
        snapshot: by which it was judged.
        context: who acts, with what.

    Returns:
        One Outcome per process, or one alone.  Every one leaves an Event, but a refusal that only repeats itself.
    """
    from gpuguard.enforcement.target import targets

    if verdict.action in _SIGNALS:
        found = [_on_process(verdict, snapshot, context, target) for target in targets(verdict, snapshot)]
        if found or verdict.action not in _WORDS:
            return tuple(found) or (_said(verdict, context, REFUSED, "no process is meant"),)
    if verdict.action in _WORDS and snapshot.recorded:
        return (_said(verdict, context, REFUSED, "the sample is a recording, of another time or machine"),)
    if verdict.action in _WORDS:
        return (_WORDS[verdict.action](verdict, snapshot, context),)
    return (_said(verdict, context, FAILED, f"there is no action {verdict.action!r}"),)


def _on_process(verdict: Verdict, snapshot: Snapshot, context: Context, target: Target) -> ActionOutcome:
    from gpuguard.enforcement import preflight
    from gpuguard.enforcement.target import enforced

    if context.ledger.is_settled(verdict, target.process):
        return ActionOutcome(SENT if enforced(verdict, context) else DRY_RUN, "it was done before", target.pid)
    with preflight.examined(verdict, snapshot, context, target) as case:
        if case.ended:
            context.append(_event(verdict, GONE, target, "it had ended before"))
            return ActionOutcome(GONE, "it had ended before", target.pid)
        if case.against:
            return _refused(case)
        deed = case.deed()
        if not context.append(_event(verdict, ABOUT_TO if case.live else DRY_RUN, target, deed=deed)):
            return ActionOutcome(UNRECORDED, "nothing could be written down, so nothing was done", target.pid)
        context.ledger.note(deed)
        context.ledger.settle(verdict, target.process)
        if not case.live:
            return ActionOutcome(DRY_RUN, pid=target.pid)
        word, why = _SIGNALS[verdict.action](case)
        if word != SENT:
            context.append(_event(verdict, word, target, why))
        return ActionOutcome(word, why, target.pid)


def _refused(case: ActionTarget) -> ActionOutcome:
    target = case.target
    key = (target.process, case.verdict.policy, case.verdict.action, case.live)
    outcome = _refusal(case.verdict, case.context, case.against, key, target)
    _deny_restarts(case)
    return outcome


def _deny_restarts(case: ActionTarget) -> None:
    """No new claims for an hour for the user whose program is started again each time that it is ended.

    More signals would change nothing; without this two processes that are ended would buy the next one its safety.
    """
    from gpuguard.claims import restrictions
    from gpuguard.enforcement.limits import HOUR, LIMITS

    why = {each.check: each.text for each in case.against}
    if "restart loop" in why and why.keys() <= LIMITS and case.context.directory is not None:
        finding = replace(case.verdict.finding, why=why["restart loop"])
        verdict = replace(case.verdict, finding=finding, action="deny", options=(("for", HOUR),))
        _restrict(verdict, case.context, restrictions.DENIED, str(case.target.uid), case.target.user)


def _refusal(
    verdict: Verdict, context: Context, against: tuple[LimitScope, ...], key: object, target: Target | None = None
) -> ActionOutcome:
    texts, waits = "; ".join(each.text for each in against), [each.wait for each in against]
    wait = None if None in waits else max(wait for wait in waits if wait is not None)
    # A refusal that waits comes back with every sample: one line is enough.
    if context.ledger.refused_anew(key, tuple(each.check for each in against)):
        context.append(_event(verdict, REFUSED, target, texts))
    return ActionOutcome(REFUSED, texts, target.pid if target else None, against, wait)


# Each of these is the last call of a preflight that found nothing: they are reached from _on_process alone.
# What became of it is a word, and why, where the word does not tell.


def _signal(case: ActionTarget, signum: int) -> tuple[str, str]:
    return signals.forward(case.pidfd, signum), ""


def _terminate(case: ActionTarget) -> tuple[str, str]:
    word = signals.forward(case.pidfd, signal.SIGTERM)
    if word == SENT:  # a stopped process sees SIGTERM only when it goes on
        signals.forward(case.pidfd, signal.SIGCONT)
    return word, ""


def _checkpoint(case: ActionTarget) -> tuple[str, str]:
    from gpuguard.enforcement.target import checkpoint_signal

    return _signal(case, checkpoint_signal(case.verdict))


def _renice(case: ActionTarget) -> tuple[str, str]:
    """Lower the priority of every thread; never raises one.

    Only pids reach a priority.  A process that is alive afterwards has kept its pid all the time; a thread that is not
    of this process any more gets back what it had.
    """
    from gpuguard.enforcement.target import has_ended

    wanted, pid = dict(case.verdict.options).get("niceness", 10), case.target.pid
    try:
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            before = os.getpriority(os.PRIO_PROCESS, thread)
            if isinstance(wanted, int) and before < wanted <= 19:
                os.setpriority(os.PRIO_PROCESS, thread, wanted)
                if has_ended(case.pidfd) or not os.path.exists(f"/proc/{pid}/task/{thread}"):
                    os.setpriority(os.PRIO_PROCESS, thread, before)
    except PermissionError:
        return NOT_PERMITTED, ""
    except OSError:
        return GONE, ""
    return SENT, ""


def _cancel(case: ActionTarget) -> tuple[str, str]:
    """End the Slurm job that the process belongs to; whose it is was asked by preflight."""
    from gpuguard.clusters import slurm_jobs
    from gpuguard.enforcement import identity
    from gpuguard.enforcement.target import has_ended

    job = slurm_jobs.job_of((case.target.pid, *identity.ancestors(case.target.pid)))
    # Asked after that: as long as it lives nobody else has its pid.
    fault = "its job has ended" if job is None or has_ended(case.pidfd) else slurm_jobs.cancel(job)
    return (FAILED, fault) if fault else (SENT, "")


_SIGNALS: Mapping[str, Callable[[ActionTarget], tuple[str, str]]] = {
    "checkpoint": _checkpoint,
    "terminate": _terminate,
    "kill": lambda case: _signal(case, signal.SIGKILL),
    "pause": lambda case: _signal(case, signal.SIGSTOP),
    "resume": lambda case: _signal(case, signal.SIGCONT),
    "renice": _renice,
    "cancel": _cancel,
}


# What touches no process.


def _log(verdict: Verdict, snapshot: Snapshot, context: Context) -> ActionOutcome:
    written = context.append(_event(verdict, DONE))
    return ActionOutcome(DONE) if written else ActionOutcome(UNRECORDED)


def _warn(verdict: Verdict, snapshot: Snapshot, context: Context) -> ActionOutcome:
    """Tell the people in front of the processes, each terminal once."""
    from gpuguard.enforcement import identity
    from gpuguard.enforcement.limits import DISRUPTIVE
    from gpuguard.enforcement.target import enforced, targets
    from gpuguard.notify.templates import message_for

    found = set()
    for target in targets(verdict, snapshot):
        facts = identity.facts_of(target.pid)
        if facts and facts.start_time == target.start_time and facts.uids[:1] == (target.uid,) and facts.terminal:
            found.add((facts.terminal, facts.uids[0]))
    for pid in _holders(verdict, snapshot):
        facts = identity.facts_of(pid)
        if facts and facts.uids[:1] == (verdict.finding.subject.uid,) and facts.terminal:
            found.add((facts.terminal, facts.uids[0]))
    if not enforced(verdict, context):
        return _said(verdict, context, DRY_RUN)
    language = dict(verdict.options).get("language") or context.language
    message = message_for(verdict, snapshot, str(language), context.templates)
    last = verdict.next_action in DISRUPTIVE | {"release"}
    words = {write(terminal, uid, message.body, last=last) for terminal, uid in sorted(found)}
    if WRITTEN in words:
        return _said(verdict, context, DONE)
    return _said(verdict, context, FAILED, ", ".join(sorted(words)) or NO_TERMINAL)


def _holders(verdict: Verdict, snapshot: Snapshot) -> tuple[int, ...]:
    """The processes that hold a claim under which none computes: its shell sits there."""
    from gpuguard.model import claim_named

    subject, processes = verdict.finding.subject, verdict.finding.processes
    claim = None if processes else claim_named(snapshot.claims, subject.uid, subject.claim)
    return claim.holders if claim else ()


def _notify(verdict: Verdict, snapshot: Snapshot, context: Context) -> ActionOutcome:
    """Hand a message to the target that the step names: `to` of notify, `hook` of run_hook."""
    from gpuguard.enforcement.target import enforced

    options = dict(verdict.options)
    target = options.get("to") or options.get("hook")
    if not isinstance(target, str) or context.notifier is None:
        return _said(verdict, context, FAILED, "there is nobody to send it to")
    if not enforced(verdict, context):
        return _said(verdict, context, DRY_RUN)
    answer = context.notifier.notify(target, verdict, snapshot)
    return _said(verdict, context, DONE) if answer == "queued" else _said(verdict, context, FAILED, answer)


def _deny(verdict: Verdict, snapshot: Snapshot, context: Context) -> ActionOutcome:
    """No new claims for the one user whom the verdict is about; people of the system are never meant."""
    from gpuguard.claims import restrictions
    from gpuguard.enforcement import identity

    subject, processes = verdict.finding.subject, verdict.finding.processes
    uids = {each.uid for each in processes} if subject.uid is None else {subject.uid}
    uid = uids.pop() if len(uids) == 1 else None
    if uid is None:
        return _said(verdict, context, REFUSED, "nobody in particular is meant")
    if identity.is_of_the_system(uid) or uid in context.protected:
        return _said(verdict, context, REFUSED, f"uid {uid} is protected")
    user = subject.user or next((each.user for each in processes if each.uid == uid), None)
    return _restrict(verdict, context, restrictions.DENIED, str(uid), user)


def _quarantine(verdict: Verdict, snapshot: Snapshot, context: Context) -> ActionOutcome:
    """Nobody gets the device.  A driver that talks nonsense must not take the whole machine out of service."""
    import time

    from gpuguard.claims import restrictions

    uuid = verdict.finding.subject.device
    if uuid is None:
        return _said(verdict, context, REFUSED, "no device is meant")
    if context.directory is not None:
        out = set(restrictions.read_restrictions(context.directory, restrictions.QUARANTINED, time.time())) - {uuid}
        if sum(device.uuid in out for device in snapshot.devices) >= max(1, len(snapshot.devices) // 2):
            return _said(verdict, context, REFUSED, "half of the devices are out of service: ask an administrator")
    return _restrict(verdict, context, restrictions.QUARANTINED, uuid)


def _restrict(verdict: Verdict, context: Context, kind: str, name: str, user: str | None = None) -> ActionOutcome:
    import time

    from gpuguard.claims import restrictions
    from gpuguard.enforcement.target import enforced
    from gpuguard.errors import LockDirectoryError

    if context.directory is None:
        return _said(verdict, context, FAILED, "there is no directory of claims to write it into")
    if not enforced(verdict, context):
        return _said(verdict, context, DRY_RUN)
    if not context.append(_event(verdict, ABOUT_TO)):
        return ActionOutcome(UNRECORDED, "nothing could be written down, so nothing was done")
    now, seconds = time.time(), dict(verdict.options).get("for")
    until = None if seconds is None else now + float(seconds)
    mark = restrictions.Restriction(name, now, until, verdict.finding.why, f"the policy {verdict.policy}", user)
    try:
        restrictions.change(context.directory, kind, lambda found: restrictions.prolong(found, mark))
    except LockDirectoryError as error:
        return _said(verdict, context, FAILED, str(error))
    return ActionOutcome(DONE)


def let_go(grip: LockHandle, letter: ReleaseRequest) -> None:
    """Give a claim up as releasing.let_go does; `gpuguard run` then tells its user now, not at its next tick."""
    from gpuguard.claims import release as releasing

    releasing.let_go(grip, letter)
    if releasing.listens(grip.holder):
        signals.forward(grip.pidfd, signals.CHECK_CLAIM)


def _release(verdict: Verdict, snapshot: Snapshot, context: Context) -> ActionOutcome:
    """Give up the locks of a claim under which nobody computes; its job lives on, but for cancel, which ends it."""
    from gpuguard.claims.release_requests import RELEASED, ReleaseRequest
    from gpuguard.clusters import slurm_jobs
    from gpuguard.enforcement import preflight as vacancy
    from gpuguard.errors import ClaimError

    with vacancy.examine_release(verdict, snapshot, context) as case:
        if case.against or case.grip is None:
            key = (verdict.finding.subject, verdict.policy, verdict.action, case.live)
            return _refusal(verdict, context, case.against, key)
        deed = case.deed()
        if not context.append(_event(verdict, ABOUT_TO if case.live else DRY_RUN, deed=deed)):
            return ActionOutcome(UNRECORDED, "nothing could be written down, so nothing was done")
        context.ledger.note(deed)
        if not case.live:
            return ActionOutcome(DRY_RUN)
        if verdict.action == "cancel":
            job = slurm_jobs.job_of_claim(str(verdict.finding.subject.claim))
            fault = "its job has ended" if job is None else slurm_jobs.cancel(job)
            return _said(verdict, context, FAILED, fault) if fault else ActionOutcome(DONE)
        try:
            let_go(case.grip, ReleaseRequest(RELEASED, f"the policy {verdict.policy}", verdict.finding.why))
        except (OSError, ClaimError) as error:
            return _said(verdict, context, FAILED, str(error))
        return ActionOutcome(DONE)


def _said(verdict: Verdict, context: Context, word: str, why: str = "") -> ActionOutcome:
    context.append(_event(verdict, word, why=why))
    return ActionOutcome(word, why)


_WORDS: Mapping[str, Callable[[Verdict, Snapshot, Context], ActionOutcome]] = {
    "log": _log,
    "warn": _warn,
    "notify": _notify,
    "deny": _deny,
    "quarantine": _quarantine,
    "release": _release,
    "cancel": _release,
    "run_hook": _notify,
}

# Every action; what a step may say about it is in actiontable.
ACTIONS = frozenset(_SIGNALS) | frozenset(_WORDS)


def _event(
    verdict: Verdict, outcome: str, target: Target | None = None, why: str = "", deed: PastAction | None = None
) -> Event:
    from gpuguard.enforcement.target import event_of

    return event_of(verdict, outcome, target, why, deed)


# A few lines on the terminal of a process, for the person in front of it.
#
# Only on a terminal that belongs to the owner of the process, and only while he takes messages (`mesg n` refuses them),
# unless it is the last notice.  Never waits for a terminal, and never becomes its session's.


WRITTEN = "written"
NO_TERMINAL = "no terminal"
NOT_HIS = "the terminal belongs to somebody else"
TERMINAL_REFUSED = "the terminal takes no messages"
FULL = "the terminal does not read"

MOST_LINES = 20
_PSEUDO_TERMINALS = range(136, 144)  # major numbers of /dev/pts/N


def write(terminal: int, uid: int, text: str, *, last: bool = False, place: str = "/dev/pts") -> str:
    """Write *text* to a pseudo-terminal.

    Args:
        terminal: its device number, as in /proc/PID/stat.
        uid: to whom it must belong.
        text: lines; everything in them that is not plainly visible is written out.
        last: the last notice before something is taken away: `mesg n` does not hold it up.
        place: the directory of the pseudo-terminals.

    Returns:
        "written", or why not.
    """
    if os.major(terminal) not in _PSEUDO_TERMINALS:
        return NO_TERMINAL
    number = (os.major(terminal) - _PSEUDO_TERMINALS[0]) * 256 + os.minor(terminal)
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(f"{place}/{number}", flags)
    except PermissionError:
        return TERMINAL_REFUSED  # `mesg n`, which only root can pass over
    except OSError:
        return NO_TERMINAL
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISCHR(seen.st_mode) or seen.st_rdev != terminal:
            return NO_TERMINAL
        if seen.st_uid != uid:
            return NOT_HIS  # a container numbers its terminals anew: this is another one
        if not (last or seen.st_mode & stat.S_IWGRP):
            return TERMINAL_REFUSED
        lines = [neutralise(line) for line in text.rstrip().splitlines()[:MOST_LINES]]
        os.write(descriptor, "\r\n".join(["", *lines, ""]).encode("utf-8", "replace"))
        return WRITTEN
    except OSError:
        return FULL
    finally:
        os.close(descriptor)


# Processes that outlive SIGKILL: nothing more is sent to them, their devices go out of service, and people are told.
#
# They sit in a driver or on a dead file system, where no signal reaches them; until that is mended every further signal
# would be one for nothing.  Sends no signal: what is done about the device are actions as those of any policy.


def give_up(context: Context, snapshot: Snapshot) -> tuple[ActionOutcome, ...]:
    """Look after the processes that were killed: those that are still there a minute later are left alone for good.

    Their devices are quarantined until an administrator ends that, but never more than half of the machine, and the
    targets of the policies' messages are told.  When such a process is gone after all, the guard acts on its devices
    again.  To be called after each sample.

    Returns:
        An Outcome, "unkillable", for each that is found for the first time.
    """
    now, found = boot_clock(), []
    stuck = context.ledger.unkillable
    for process in [each for each in stuck if not is_alive(each)]:
        del stuck[process]  # somebody has reset the device
    for deed in context.ledger.deeds:
        over = deed.live and deed.action == "kill" and now - deed.clock >= UNKILLABLE_SECONDS
        if over and deed.process not in stuck and is_alive(deed.process):
            stuck[deed.process] = deed.devices
            why = f"it outlived SIGKILL by {now - deed.clock:.0f}s: its devices need a reset, and are left alone"
            found.append(ActionOutcome(UNKILLABLE, why, deed.process[0]))
            facts = {"policy": deed.policy or None}
            context.append(plain_event("kill", UNKILLABLE, why, deed.devices, deed.process[0], facts=facts))
            _quarantine_device(deed, now, context, snapshot)
    return tuple(found)


def _quarantine_device(deed: PastAction, now: float, context: Context, snapshot: Snapshot) -> None:
    why = f"pid {deed.process[0]} outlived SIGKILL by {now - deed.clock:.0f}s: the device needs a reset"
    for place, uuid in enumerate(deed.devices):
        device = snapshot.device(uuid)
        rows = [row for row in (device.processes or () if device else ()) if (row.pid, row.start_time) == deed.process]
        finding = Finding("unkillable", Subject("device", device=uuid), why, tuple(rows))
        verdict = Verdict(deed.policy or "unkillable", finding, "quarantine", 0, deed.clock, enforce=True)
        act(verdict, snapshot, context)
        for target in context.alarm if place == 0 else ():
            act(replace(verdict, action="notify", options=(("to", target),)), snapshot, context)
