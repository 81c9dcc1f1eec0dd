"""The actions of policies.  Each is one thing: its keys in a step, its help (their docstring), its function.

act() runs every check of preflight, writes down what it is about to do, and only then does it, unless the writing took
so long that the checks are out of date; a dry run leaves out only that last call.  What an action takes away, and from
whom, stands in policies.action_kinds, since the engine goes by it; limits says how often the guard may act.  This
module does not decide whom an action hits or when: see policies.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from gpuguard.claims import restrictions, unlock
from gpuguard.claims.records import RELEASED, ReleaseRequest
from gpuguard.claims.unlock import LockHandle
from gpuguard.clusters import slurm_jobs
from gpuguard.device_state import idle_limit, unlisted_memory, usable_devices
from gpuguard.enforcement import identity, preflight, signals
from gpuguard.enforcement.guard_limits import HOUR, LIMITS, UNKILLABLE_SECONDS, FailedCheck, PastAction, facts_of
from gpuguard.enforcement.pauses import Pause
from gpuguard.enforcement.preflight import CHECKPOINT_SIGNALS, ActionContext, Preflight, ProcessTarget
from gpuguard.enforcement.terminals import NO_TERMINAL, WRITTEN, write_to_terminal
from gpuguard.errors import ClaimError, InvalidRequest, LockDirectoryError
from gpuguard.history.audit_log import line_of
from gpuguard.locale.messages import all_of, sentence
from gpuguard.model import (
    ActionName,
    ActionWord,
    Device,
    Event,
    Finding,
    GpuProcess,
    ProcessIdentity,
    Snapshot,
    Subject,
    Verdict,
    claim_named,
)
from gpuguard.notify.templates import deed_text, message_for
from gpuguard.policies.action_kinds import COUNTED, DISRUPTIVE, HARMFUL
from gpuguard.procfs import boot_clock, start_time
from gpuguard.units import format_duration, parse_duration

TOLD: frozenset[ActionWord] = frozenset({"done", "logged"})  # the words of a message that has reached the user
NOT_TAKEN: frozenset[ActionWord] = frozenset(
    {"refused", "not recorded", "failed", "not permitted"}
)  # the words of a step that took nothing away

WRITE_SECONDS = 1.0  # for a line in the audit log; if it takes longer, the checks before it no longer count

Result = tuple[ActionWord, str]  # a word, and the reason if the word does not say it

_NO_PROCESS = sentence("action.no_process", "no process is meant")
_ENDED = sentence("action.ended_before", "it had ended before")
_NOT_RECORDED = sentence("action.not_recorded", "nothing could be written down, so nothing was done")


@dataclass(frozen=True)
class ActionOutcome:
    """The outcome of an action on one process, or on none."""

    word: ActionWord
    why: str = ""
    pid: int | None = None
    failed: tuple[FailedCheck, ...] = ()
    wait: float | None = None  # seconds after which the same verdict is worth another try; None if it is settled
    sent: PastAction | None = None  # the action that was done to the process


# Each function for a process or a claim is called last, after a preflight in which no check failed.


def _forward(target: Preflight, signum: int) -> Result:
    return signals.forward(target.pidfd, signum), ""


def parse_checkpoint_signal(text: str) -> int:
    """Return the number of a signal that is written as ``"USR1"`` or ``"SIGUSR1"``."""
    name = text.upper().removeprefix("SIG")
    if name not in CHECKPOINT_SIGNALS:
        raise InvalidRequest(f"{text!r} is no signal for a checkpoint: write one of {', '.join(CHECKPOINT_SIGNALS)}.")
    return int(signal.Signals[f"SIG{name}"])


@dataclass(frozen=True)
class CheckpointKeys:
    """Send a signal on which the program saves its work, if it has been made to.

    A program that was not made for it is ended by most of these signals.

    Args:
        signal: USR1, USR2, HUP, ALRM, WINCH, URG or CONT.
    """

    signal: Annotated[int, parse_checkpoint_signal] = int(signal.SIGUSR1)


def _checkpoint(target: Preflight) -> Result:
    return _forward(target, preflight.checkpoint_signal(target.verdict))


@dataclass(frozen=True)
class TerminateKeys:
    """Ask the process to end, by SIGTERM (and SIGCONT, if it is stopped)."""


def _terminate(target: Preflight) -> Result:
    word = signals.forward(target.pidfd, signal.SIGTERM)
    if word == "sent":  # a stopped process sees SIGTERM only when it goes on
        _end_pause(target)
        signals.forward(target.pidfd, signal.SIGCONT)
    return word, ""


def _end_pause(target: Preflight) -> None:
    """End the pause of a process that has been asked to end; otherwise another user would seem to have resumed it."""
    pauses, process = target.context.pauses, target.process
    if pauses and process and (pause := pauses.of(process.identity, live=target.live)):
        pauses.end(pause, sentence("pause.asked_to_end", "it has been asked to end"), live=target.live)


@dataclass(frozen=True)
class KillKeys:
    """End the process by SIGKILL; not before 30 s after a terminate.  It can lose work and wedge the GPU."""


@dataclass(frozen=True)
class PauseKeys:
    """Stop the process by SIGSTOP; it keeps its memory.

    It goes on when the condition holds no more, and when the policy is changed or the guard ends.
    """


def _debt_fault(target: Preflight) -> str:
    """Write down that the process, which is about to be paused, must go on again; return why that failed, or ""."""
    pauses, process = target.context.pauses, target.process
    try:
        if pauses and process:
            pauses.begin(_pause_of(target, process))
    except OSError as error:
        return sentence(
            "pause.unwritten",
            "it cannot be written down that it must go on again: {error}",
            error=error.strerror or str(error),
        )
    return ""


def _pause_of(target: Preflight, process: ProcessTarget) -> Pause:
    return Pause(
        process.identity,
        policy=target.verdict.policy,
        uid=process.uid,
        user=process.user,
        devices=process.devices,
        claim=target.claim_of_process or None,
        traced=bool(target.facts and target.facts.tracer),
        on_terminal=_is_told_on_terminal(target),
    )


@dataclass(frozen=True)
class ResumeKeys:
    """Let a process that the policy has paused go on before the condition ends."""


def _without_preflight(verdict: Verdict, context: ActionContext, process: ProcessTarget) -> ActionOutcome | None:
    """Return the outcome if no preflight is needed, or None.

    A pause that lasts already needs none, and neither does the end of a pause, which the guard owes the process.
    """
    if context.pauses is None or verdict.action not in ("pause", "resume"):
        return None
    live = context.is_live(verdict)
    pause, word = context.pauses.of(process.identity, live=live), _done(verdict, context)
    if verdict.action == "pause":
        lasts = ActionOutcome(word, sentence("pause.lasts", "it is paused"), process.pid)
        return lasts if pause and pause.policy == verdict.policy else None
    if pause is None or pause.policy != verdict.policy:  # what another policy has paused it for may still be so
        return _logged(verdict, context, "refused", sentence("pause.none", "this policy has not paused it"))
    context.pauses.end(pause, verdict.finding.why, live=live)
    return ActionOutcome(word, pid=process.pid)


def _done(verdict: Verdict, context: ActionContext) -> ActionWord:
    """Return the word for an action that was done to a process before, or would have been."""
    return "sent" if context.is_live(verdict) else "dry run"


def parse_niceness(text: str) -> int:
    """Return a niceness of 1 to 19."""
    if not re.fullmatch(r"[1-9]|1[0-9]", text):
        raise InvalidRequest(f"{text!r} is no niceness: write a number from 1 to 19; 19 is the nicest.")
    return int(text)


@dataclass(frozen=True)
class ReniceKeys:
    """Lower the priority of the process on the CPU.

    Args:
        niceness: 1 to 19, the nicest.
    """

    niceness: Annotated[int, parse_niceness] = 10


def _renice(target: Preflight) -> Result:
    """Lower the priority of every thread, and never raise one.

    A priority can be set only by pid.  A process that is alive afterwards has kept its pid all the time.  A thread that
    no longer belongs to this process gets back the priority that it had.
    """
    wanted, pid = dict(target.verdict.options).get("niceness", 10), target.identity[0]
    try:
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            before = os.getpriority(os.PRIO_PROCESS, thread)
            if isinstance(wanted, int) and before < wanted <= 19:
                os.setpriority(os.PRIO_PROCESS, thread, wanted)
                if identity.has_ended(target.pidfd) or not os.path.exists(f"/proc/{pid}/task/{thread}"):
                    os.setpriority(os.PRIO_PROCESS, thread, before)
    except PermissionError:
        return "not permitted", ""
    except OSError:
        return "gone", ""
    return "sent", ""


@dataclass(frozen=True)
class ReleaseKeys:
    """Take a claim back under which no process computes; its shell or notebook lives on and is told.

    Processes that compute are asked to end by `terminate` instead: each of the two leaves out what the other means.
    """


def _release(target: Preflight) -> Result:
    assert target.locks
    verdict = target.verdict
    try:
        by = sentence("by.policy", "the policy {policy}", policy=verdict.policy)
        release_claim(target.locks, ReleaseRequest(RELEASED, by, verdict.finding.why))
    except (OSError, ClaimError) as error:
        return "failed", str(error)
    return "done", ""


def release_claim(locks: LockHandle, request: ReleaseRequest) -> None:
    """Release a claim, and let its `gpuguard run` inform its user now, not at its next tick.

    Raises as release_locks() does.
    """
    unlock.release_locks(locks, request)
    if unlock.is_supervisor(locks.holder):
        signals.forward(locks.pidfd, signals.CHECK_CLAIM)


@dataclass(frozen=True)
class CancelKeys:
    """End the Slurm job to which the process or the claim belongs, by scancel: all of it, on all its nodes.

    The daemon's user must be allowed that: root, SlurmUser or an operator of Slurm.
    """


def _cancel(target: Preflight) -> Result:
    job = preflight.slurm_job(target)
    # This is asked after the job was read, because no other process has the pid as long as this one lives.
    ended = job is None or (target.process is not None and identity.has_ended(target.pidfd))
    over = sentence("action.job_ended", "its job has ended")
    fault = over if ended or job is None else slurm_jobs.cancel(job)
    return ("failed", fault) if fault else ("sent" if target.process else "done", "")


@dataclass(frozen=True)
class RequeueKeys:
    """Ask a job of `gpuguard submit --requeue` to end, by SIGTERM, and let it stand in the queue again under its id.

    Its `gpuguard run` ends all of it by SIGKILL a --grace later.  Other processes are refused, and later steps wait.
    """


@dataclass(frozen=True)
class LogKeys:
    """Write a line into the audit log, nothing else."""


def _log(verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> ActionOutcome:
    return ActionOutcome("done" if context.append(_event(verdict, "done")) else "not recorded")


@dataclass(frozen=True)
class WarnKeys:
    """Tell the user on the terminal of the process what was seen and what comes next.

    Args:
        language: of the text; without it the one in which `messages` of the file has texts, else English.
    """

    language: Literal["en", "zh"] | None = None


def _warn(verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> ActionOutcome:
    """Write once to each terminal of the processes that are meant, or of the holders of a claim if none is meant.

    A `gpuguard run` writes the event of this warning into the log of its job.
    """
    subject, processes = verdict.finding.subject, preflight.targets(verdict, snapshot)
    claim = None if verdict.finding.processes else claim_named(snapshot.claims, subject.uid, subject.claim)
    readers = [(target.pid, target.uid, target.start_time) for target in processes]
    readers += [(pid, subject.uid, start_time(pid)) for pid in (claim.holders if claim else ())]
    known = ((identity.facts_of(pid), uid, started) for pid, uid, started in readers)
    terminals = {
        (facts.terminal, facts.uids[0])
        for facts, uid, started in known
        if facts and facts.terminal and facts.uids[:1] == (uid,) and facts.start_time == started
    }
    if not context.is_live(verdict):
        return _logged(verdict, context, "dry run")
    language = str(dict(verdict.options).get("language") or context.language)
    message = message_for(verdict, snapshot, language, context.templates, longest_keep=context.longest_keep)
    last = verdict.next_action in DISRUPTIVE | {"release"}
    words = {write_to_terminal(terminal, uid, message.body, last=last) for terminal, uid in sorted(terminals)}
    meant = [Preflight(verdict, snapshot, context, snapshot.clock, process) for process in processes]
    claims = [(subject.uid, subject.claim), *((target.uid, target.claim_of_process) for target in meant)]
    if WRITTEN in words:
        return _logged(verdict, context, "done")
    if any(_is_supervised(snapshot, *claim) for claim in claims):
        return _logged(verdict, context, "logged")
    return _logged(verdict, context, "undelivered", all_of(sorted(words), ", ") or NO_TERMINAL)


@dataclass(frozen=True)
class NotifyKeys:
    """Send a message to one of the targets that the file names under `notify`.

    Args:
        to: name of the target.
    """

    to: str


@dataclass(frozen=True)
class RunHookKeys:
    """Run a program of the admin: no shell, facts as JSON on its standard input and in its environment.

    Args:
        hook: name of a target under `notify` that is a hook.
    """

    hook: str


def _notify(verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> ActionOutcome:
    options = dict(verdict.options)
    target = options.get("to") or options.get("hook")
    if not isinstance(target, str) or context.notifier is None:
        return _logged(verdict, context, "failed", sentence("action.no_receiver", "there is no receiver"))
    if not context.is_live(verdict):
        return _logged(verdict, context, "dry run")
    answer = context.notifier.notify(target, verdict, snapshot)
    return _logged(verdict, context, "done") if answer == "queued" else _logged(verdict, context, "failed", answer)


@dataclass(frozen=True)
class DenyKeys:
    """Give the user no new claims for a time; those that they have stay.  See `gpuguard deny`.

    Args:
        for: how long.
    """

    for_: Annotated[float, parse_duration] = 7200.0


def _deny(verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> ActionOutcome:
    """Deny new claims to the one user that the verdict is about, but never to an account of the system."""
    subject, processes = verdict.finding.subject, verdict.finding.processes
    uids = {process.uid for process in processes} if subject.uid is None else {subject.uid}
    uid = uids.pop() if len(uids) == 1 else None
    if uid is None:
        return _logged(verdict, context, "refused", sentence("action.no_user", "no user in particular is meant"))
    if identity.is_of_the_system(uid) or uid in context.protected:
        why = sentence("preflight.uid_protected", "uid {uid} is protected", uid=uid)
        return _logged(verdict, context, "refused", why)
    user = subject.user or next((process.user for process in processes if process.uid == uid), None)
    return _restrict(verdict, context, restrictions.DENIED, str(uid), user)


@dataclass(frozen=True)
class QuarantineKeys:
    """Take the GPU out of service: no user gets a new claim of it.  At most half of the GPUs: never the only one.

    The owner of a claim keeps it.  See `gpuguard quarantine`.

    Args:
        for: how long; without it, until an administrator ends it.
    """

    for_: Annotated[float, parse_duration] | None = None


def _quarantine(
    verdict: Verdict, snapshot: Snapshot, context: ActionContext, process: ProcessIdentity | None = None
) -> ActionOutcome:
    """Quarantine the device, but never the whole machine, because a driver may report nonsense.

    *process* is the process that causes the quarantine, which ends with it.
    """
    uuid = verdict.finding.subject.device
    if uuid is None:
        return _logged(verdict, context, "refused", sentence("action.no_gpu", "no GPU is meant"))
    if context.directory is not None:
        out = {uuid, *restrictions.read_restrictions(context.directory, restrictions.QUARANTINED, time.time())}
        claimable = usable_devices(snapshot)
        if sum(not out.isdisjoint((device.uuid, device.parent_uuid)) for device in claimable) > len(claimable) / 2:
            why = sentence(
                "action.half_of_gpus", "more than half of the GPUs would be out of service: ask an administrator"
            )
            return _logged(verdict, context, "refused", why)
    return _restrict(verdict, context, restrictions.QUARANTINED, uuid, process=process)


def _restrict(
    verdict: Verdict,
    context: ActionContext,
    kind: str,
    name: str,
    user: str | None = None,
    process: ProcessIdentity | None = None,
) -> ActionOutcome:
    if context.directory is None:
        why = sentence("action.no_directory", "there is no directory of claims to write it into")
        return _logged(verdict, context, "failed", why)
    if not context.is_live(verdict):
        return _logged(verdict, context, "dry run")
    if not context.append(_event(verdict, "about to")):
        return ActionOutcome("not recorded", _NOT_RECORDED)
    now, seconds = time.time(), dict(verdict.options).get("for")
    until = None if seconds is None else now + float(seconds)
    by, reason = sentence("by.policy", "the policy {policy}", policy=verdict.policy), verdict.finding.why
    lasts = kind == restrictions.QUARANTINED and verdict.kind is not None and verdict.kind.outlasts_boot
    mark = restrictions.Restriction(name, now, until, reason, by, user, process, until_reboot=not lasts)
    try:
        restrictions.change(context.directory, kind, lambda found: restrictions.extend(found, mark))
    except LockDirectoryError as error:
        return _logged(verdict, context, "failed", str(error))
    return ActionOutcome("done")


@dataclass(frozen=True)
class Action:
    """One action: its function for each process that is meant, for the claim if no process is, or without a target."""

    keys: type  # the keys of a step that it takes; the docstring is the help
    on_process: Callable[[Preflight], Result] | None = None  # after its preflight
    on_claim: Callable[[Preflight], Result] | None = None  # after its preflight
    otherwise: Callable[[Verdict, Snapshot, ActionContext], ActionOutcome] | None = None


ACTIONS: Mapping[ActionName, Action] = {
    "log": Action(LogKeys, otherwise=_log),
    "warn": Action(WarnKeys, otherwise=_warn),
    "notify": Action(NotifyKeys, otherwise=_notify),
    "checkpoint": Action(CheckpointKeys, on_process=_checkpoint),
    "terminate": Action(TerminateKeys, on_process=_terminate),
    "kill": Action(KillKeys, on_process=lambda target: _forward(target, signal.SIGKILL)),
    "pause": Action(PauseKeys, on_process=lambda target: _forward(target, signal.SIGSTOP)),
    "resume": Action(ResumeKeys, on_process=lambda target: _forward(target, signal.SIGCONT)),
    "renice": Action(ReniceKeys, on_process=_renice),
    "deny": Action(DenyKeys, otherwise=_deny),
    "quarantine": Action(QuarantineKeys, otherwise=_quarantine),
    "release": Action(ReleaseKeys, on_claim=_release),
    "cancel": Action(CancelKeys, on_process=_cancel, on_claim=_cancel),
    "requeue": Action(RequeueKeys, on_process=_terminate),
    "run_hook": Action(RunHookKeys, otherwise=_notify),  # an older word for notify with a hook
}
ACTION_KEYS: Mapping[str, type] = {name: action.keys for name, action in ACTIONS.items()}


def act(verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> tuple[ActionOutcome, ...]:
    """Do the action of *verdict*, judged by *snapshot*, to each of its processes for which no check has failed.

    Returns:
        One outcome per process, or a single one.  Each leaves an Event, except a refusal that only repeats itself.
    """
    action = ACTIONS.get(verdict.action)
    if action is None:
        why = sentence("action.unknown", "there is no action {action}", action=repr(verdict.action))
        return (_logged(verdict, context, "failed", why),)
    if action.on_process:
        outcomes = []
        for process in preflight.targets(verdict, snapshot):
            if process.of_rest and not context.has_turn(verdict, process):
                continue
            if context.limits.is_done(verdict, process.identity):
                before = sentence("action.done_before", "it was done before")
                outcomes.append(ActionOutcome(_done(verdict, context), before, process.pid))
            elif settled := _without_preflight(verdict, context, process):
                outcomes.append(settled)
            else:
                with preflight.check_process(verdict, snapshot, context, process) as target:
                    outcomes.append(_carry_out(action.on_process, target))
        if outcomes or not action.on_claim:
            return tuple(outcomes) or (_logged(verdict, context, "refused", _NO_PROCESS),)
    if snapshot.recorded:
        why = sentence("preflight.recorded", "the sample is a recording, of another time or machine")
        return (_logged(verdict, context, "refused", why),)
    if action.on_claim:
        with preflight.check_claim(verdict, snapshot, context) as target:
            return (_carry_out(action.on_claim, target),)
    assert action.otherwise
    return (action.otherwise(verdict, snapshot, context),)


def _carry_out(do: Callable[[Preflight], Result], target: Preflight) -> ActionOutcome:
    verdict, context, process = target.verdict, target.context, target.process
    pid = process.pid if process else None
    if target.ended:
        context.append(_event(verdict, "gone", process, _ENDED))
        return ActionOutcome("gone", _ENDED, pid)
    if target.failed:
        return _refused(target)
    owes = target.live and verdict.action == "pause"
    # This comes before the line that announces the pause: a full disk may have room for that line alone, and then it
    # would announce for ever a pause that never came.
    if owes and (fault := _debt_fault(target)):
        context.append(_event(verdict, "failed", process, fault))
        return ActionOutcome("failed", fault, pid)
    outcome = _announce(do, target)
    if verdict.action in ("terminate", "requeue") and outcome.word == "dry run":
        _end_pause(target)
    if owes and outcome.word != "sent" and context.pauses and process:
        context.pauses.drop(process.identity)
    return outcome


def _announce(do: Callable[[Preflight], Result], target: Preflight) -> ActionOutcome:
    """Write down what is about to be done, and do it, unless it is a dry run."""
    verdict, context, process = target.verdict, target.context, target.process
    pid, action = process.pid if process else None, target.action
    event = _event(verdict, "about to" if target.live else "dry run", process, action=action)
    claim = event.claim or target.claim_of_process or None
    event = replace(event, claim=claim, devices=event.devices or target.devices)
    begun = boot_clock()
    if not context.append(event):
        return ActionOutcome("not recorded", _NOT_RECORDED, pid)
    # If the disk hung meanwhile, the checks are that old, and the process may run something else by now.
    took = boot_clock() - begun
    if took > WRITE_SECONDS:
        late = sentence(
            "action.written_late",
            "its line in the audit log took {seconds} to write: what was decided before is too old",
            seconds=format_duration(took),
        )
        context.append(_event(verdict, "refused", process, late))
        return ActionOutcome("refused", late, pid, wait=0.0)
    context.limits.record(action, verdict)
    if not target.live:
        if verdict.action == "pause" and process and context.pauses:
            context.pauses.rehearse(_pause_of(target, process))
        return ActionOutcome("dry run", pid=pid)
    word, why = do(target)
    if word not in ("sent", "done"):
        context.append(_event(verdict, word, process, why))
    elif process:
        _tell_on_terminal(target, event)
    return ActionOutcome(word, why, pid, sent=action if word == "sent" else None)


def _tell_on_terminal(target: Preflight, event: Event) -> None:
    """Write on the terminal of the process what was done to it, unless a `gpuguard run` tells its user."""
    if target.facts and _is_told_on_terminal(target) and (text := deed_text(line_of(event))):
        terminal, uid = target.facts.terminal, target.facts.uids[0]
        write_to_terminal(terminal, uid, f"gpuguard: {text}", last=target.verdict.action in HARMFUL)


def _is_told_on_terminal(target: Preflight) -> bool:
    """Return whether the process has a terminal, and no `gpuguard run` that writes into the job's log."""
    claim = target.verdict.finding.subject.claim or target.claim_of_process
    return bool(target.facts and target.facts.terminal) and not _is_supervised(target.snapshot, target.uid, claim)


def _is_supervised(snapshot: Snapshot, uid: int | None, claim_id: str | None) -> bool:
    """Return whether a claim is that of a `gpuguard run`, which tells its user what the guard's log says about it."""
    claim = claim_named(snapshot.claims, uid, claim_id)
    return claim is not None and claim.pid is not None and unlock.is_supervisor(claim.pid)


def _refused(target: Preflight) -> ActionOutcome:
    verdict, process, failed = target.verdict, target.process, target.failed
    text, waits = all_of(check.text for check in failed), [check.wait for check in failed]
    wait = None if None in waits else max(wait for wait in waits if wait is not None)
    # A refusal that only has to wait is repeated with every sample, and one line is enough.
    whom = process.identity if process else verdict.finding.subject
    key = (whom, verdict.policy, verdict.action, target.live)
    if target.context.limits.refused_anew(key, tuple(check.check for check in failed)):
        target.context.append(_event(verdict, "refused", process, text))
    why = {check.check: check.text for check in failed}
    if process and "restart loop" in why and why.keys() <= LIMITS and target.context.directory is not None:
        # The program is started again each time that it is ended.  More signals would change nothing, so its user gets
        # no new claims for an hour.  Otherwise the user could keep the next process safe by having two of them ended.
        finding = replace(verdict.finding, why=why["restart loop"])
        denial = replace(verdict, finding=finding, action="deny", options=(("for", HOUR),))
        _restrict(denial, target.context, restrictions.DENIED, str(process.uid), process.user)
    return ActionOutcome("refused", text, process.pid if process else None, failed, wait)


def _logged(verdict: Verdict, context: ActionContext, word: ActionWord, why: str = "") -> ActionOutcome:
    # A step that was not taken is tried again, so one line per breach is enough until the reason changes.
    key = (verdict.finding.subject, verdict.policy, verdict.action, verdict.since, context.is_live(verdict))
    if word not in NOT_TAKEN or verdict.action not in COUNTED or context.limits.refused_anew(key, why):
        context.append(_event(verdict, word, why=why))
    return ActionOutcome(word, why)


def _event(
    verdict: Verdict,
    outcome: ActionWord,
    process: ProcessTarget | None = None,
    why: str = "",
    action: PastAction | None = None,
) -> Event:
    """Return the audit log's line about the outcome of *verdict*, for *process* if it is about one of its processes.

    With *action*, it is the line before that action, from which a restarted guard remembers it.
    """
    finding, subject, what = verdict.finding, verdict.finding.subject, verdict.finding.why
    if process and process.of_rest:
        what = sentence("action.whole_job", "its job ends whole: {why}", why=what)
    pid = process.pid if process else subject.pid
    uids = sorted({str(found.uid) for found in finding.processes if found.uid is not None})
    facts: dict[str, float | int | str | None] = {
        "policy": verdict.policy,
        "rule": finding.rule,
        "step": verdict.step,
        "uid": process.uid if process else subject.uid,
        "uids": None if process or subject.uid is not None else " ".join(uids) or None,  # it is about no user
        "start_time_seconds": process.start_time if process else subject.start_time,
        "container": next((found.container for found in finding.processes if process and found.pid == pid), None),
    }
    if verdict.action == "warn" and verdict.harm_after is not None:
        harm_at = round(time.time() + verdict.harm_after, 1)
        facts |= {"harm_action": verdict.harm_action, "harm_unix_seconds": harm_at}
    facts |= facts_of(action) if action else {}
    return Event(
        time=time.time(),
        kind=verdict.action,
        outcome=outcome,
        user=(process.user if process else None) or subject.user,
        devices=process.devices if process else (subject.device,) if subject.device else (),
        pid=pid,
        claim=subject.claim,
        message=sentence("because", "{what}: {why}", what=what, why=why) if why else what,
        facts=tuple(facts.items()),
    )


def give_up_unkillable(context: ActionContext, snapshot: Snapshot) -> tuple[ActionOutcome, ...]:
    """Stop signalling processes that are still there a minute after they were killed; call it after each sample.

    They sit in a driver or on a dead file system, where no signal reaches them; or the user who made them lets them
    linger, which any user can do.  So they shield only themselves.  A device needs a reset only if the driver goes on
    listing such a process on it: it is quarantined, but never more than half of the machine, and the targets of the
    policies' messages are informed.  The quarantine ends when the driver no longer lists the process and its memory is
    back, or with a reboot.

    Returns:
        An outcome, "unkillable", for each process that is found for the first time.
    """
    now, outcomes = snapshot.clock, []
    unkillable = context.limits.unkillable
    for process in [process for process in unkillable if not identity.is_alive(process)]:
        del unkillable[process]
    for past in context.limits.past:
        over = past.live and past.action == "kill" and now - past.clock >= UNKILLABLE_SECONDS
        if over and past.process not in unkillable and identity.is_alive(past.process):
            unkillable[past.process] = past
            why = sentence(
                "action.outlived_kill",
                "it outlived SIGKILL by {time}: no further signal can help",
                time=f"{now - past.clock:.0f}s",
            )
            pid, facts = past.process[0], (("policy", past.policy or None),)
            outcomes.append(ActionOutcome("unkillable", why, pid))
            context.append(
                Event(
                    time=time.time(),
                    kind="kill",
                    outcome="unkillable",
                    user=None,
                    devices=past.devices,
                    pid=pid,
                    message=why,
                    facts=facts,
                )
            )
    for process, past in unkillable.items():
        listed = {uuid: rows for uuid in past.devices if (rows := _rows_of(process, snapshot.device(uuid)))}
        _quarantine_devices(past, listed, context, snapshot)
        unkillable[process] = replace(past, devices=tuple(uuid for uuid in past.devices if uuid not in listed))
    _end_quarantines(context, snapshot)
    return tuple(outcomes)


def _rows_of(process: ProcessIdentity, device: Device | None) -> tuple[GpuProcess, ...]:
    rows = device.processes or () if device and device.processes_plausible else ()
    return tuple(row for row in rows if (row.pid, row.start_time) == process)


def _quarantine_devices(
    past: PastAction, listed: Mapping[str, tuple[GpuProcess, ...]], context: ActionContext, snapshot: Snapshot
) -> None:
    """Take the devices out of service, and inform the targets once."""
    why = sentence("action.reset_needed", "pid {pid} outlived SIGKILL: the GPU needs a reset", pid=past.process[0])
    for number, (uuid, rows) in enumerate(listed.items()):
        finding = Finding("unkillable", Subject("device", device=uuid), why, rows)
        verdict = Verdict(
            policy=past.policy or "unkillable",
            finding=finding,
            action="quarantine",
            step=0,
            since=past.clock,
            enforce=True,
        )
        _quarantine(verdict, snapshot, context, past.process)
        for name in context.alarm if number == 0 else ():
            act(replace(verdict, action="notify", options=(("to", name),)), snapshot, context)


def _end_quarantines(context: ActionContext, snapshot: Snapshot) -> None:
    """End the quarantine of devices that no longer suffer from the process for which they were quarantined."""
    if context.directory is None:
        return
    quarantined = restrictions.read_restrictions(context.directory, restrictions.QUARANTINED, time.time())
    caused = {uuid: mark.process for uuid, mark in quarantined.items() if mark.process}
    over = {
        uuid: process
        for uuid, process in caused.items()
        if all(_is_rid_of(each, snapshot.device(uuid)) for each in (process, *context.limits.unkillable))
    }
    if over:
        restrictions.change(
            context.directory, restrictions.QUARANTINED, lambda found: [found.pop(uuid, None) for uuid in over]
        )
    for uuid, (pid, _) in over.items():
        text = sentence("action.quarantine_over", "the process is gone from the GPU, and its memory is back")
        context.append(
            Event(time=time.time(), kind="quarantine", outcome="ended", devices=(uuid,), pid=pid, message=text)
        )


def _is_rid_of(process: ProcessIdentity, device: Device | None) -> bool:
    """Return whether it is certain that nothing of a process is left on *device*."""
    if device is None or device.processes is None or not device.processes_plausible:
        return False
    unlisted = unlisted_memory(device)
    is_back = unlisted is not None and unlisted <= idle_limit(device)
    return is_back and all(row.pid != process[0] for row in device.processes)
