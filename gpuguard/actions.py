"""Signals: the only file that sends any, and to others only through a pidfd.

A pid can be given to somebody else between a look and a kill; a pidfd keeps meaning the same process.
First our own job and ourselves, for run; then what the guard does to others: act() looks at every check of preflight,
writes down what it is about to do, and only then does it.  A dry run leaves out nothing but that last call.
Does not decide whom or when: see run and policies.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from gpuguard.claims.releasing import Grip
    from gpuguard.claims.wishes import Letter
    from gpuguard.guards.case import Case, Context, Target
    from gpuguard.guards.ledger import Against, Deed
    from gpuguard.model import Event, Snapshot, Verdict

LETTER = signal.SIGURG  # "look at your claim": nobody who does not wait for it notices it

SENT = "sent"
GONE = "gone"
NOT_PERMITTED = "not permitted"

ABOUT_TO = "about to"  # the Event before a signal; another one follows only if it did not arrive
DRY_RUN = "dry run"
REFUSED = "refused"  # by a check
UNRECORDED = "not recorded"  # no line in the audit log, so nothing was done
UNKILLABLE = "unkillable"
DONE = "done"
FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """What became of an action on one process, or on none."""

    word: str
    why: str = ""
    pid: int | None = None
    against: tuple[Against, ...] = ()
    wait: float | None = None  # seconds after which the same verdict is worth another try; None: it is settled


def forward(pidfd: int, signum: int) -> str:
    """Send *signum* to a process of our own job; never raises for what that process did meanwhile.

    Args:
        pidfd: from os.pidfd_open, of a process that this one has started or adopted.
        signum: the signal.

    Returns:
        "sent", "gone" (it has ended), or "not permitted" (it changed its user, as sudo does).
    """
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return GONE
    except PermissionError:
        return NOT_PERMITTED
    return SENT


def stop_self(signum: int = signal.SIGSTOP) -> None:  # pragma: no cover: see die_of
    """Stop this process as Ctrl-Z does; comes back when somebody continues it.

    By SIGTSTP it is not stopped where nobody could continue it: in a process group without a shell.
    """
    former = None if signum == signal.SIGSTOP else signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)
    if former is not None:
        signal.signal(signum, former)


def die_of(signum: int) -> NoReturn:  # pragma: no cover: whoever dies counts nothing; test_actions sees it from outside
    """End this process by *signum*, so that whoever waits for it sees that signal; runs no clean-up.

    A shell script stops at Ctrl-C only when its command died *of* SIGINT: an exit code of 130 lets it go on.
    """
    signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    signal.raise_signal(signum)
    os._exit(128 + signum)


# What the guard does.


def act(verdict: Verdict, snapshot: Snapshot, context: Context) -> tuple[Outcome, ...]:
    """Do what *verdict* wants, to each of its processes for which nothing speaks against it.

    Args:
        verdict: from the engine.
        snapshot: by which it was judged.
        context: who acts, with what.

    Returns:
        One Outcome per process, or one alone.  Every one leaves an Event, but a refusal that only repeats itself.
    """
    from gpuguard.guards.case import targets

    if verdict.action in _SIGNALS:
        found = [_on_process(verdict, snapshot, context, target) for target in targets(verdict, snapshot)]
        if found or verdict.action not in _WORDS:
            return tuple(found) or (_said(verdict, context, REFUSED, "no process is meant"),)
    if verdict.action in _WORDS and snapshot.recorded:
        return (_said(verdict, context, REFUSED, "the sample is a recording, of another time or machine"),)
    if verdict.action in _WORDS:
        return (_WORDS[verdict.action](verdict, snapshot, context),)
    return (_said(verdict, context, FAILED, f"there is no action {verdict.action!r}"),)


def _on_process(verdict: Verdict, snapshot: Snapshot, context: Context, target: Target) -> Outcome:
    from gpuguard.guards import preflight
    from gpuguard.guards.case import enforced

    if context.ledger.is_settled(verdict, target.process):
        return Outcome(SENT if enforced(verdict, context) else DRY_RUN, "it was done before", target.pid)
    with preflight.examined(verdict, snapshot, context, target) as case:
        if case.ended:
            context.append(_event(verdict, GONE, target, "it had ended before"))
            return Outcome(GONE, "it had ended before", target.pid)
        if case.against:
            return _refused(case)
        deed = case.deed()
        if not context.append(_event(verdict, ABOUT_TO if case.live else DRY_RUN, target, deed=deed)):
            return Outcome(UNRECORDED, "nothing could be written down, so nothing was done", target.pid)
        context.ledger.note(deed)
        context.ledger.settle(verdict, target.process)
        if not case.live:
            return Outcome(DRY_RUN, pid=target.pid)
        word, why = _SIGNALS[verdict.action](case)
        if word != SENT:
            context.append(_event(verdict, word, target, why))
        return Outcome(word, why, target.pid)


def _refused(case: Case) -> Outcome:
    target = case.target
    key = (target.process, case.verdict.policy, case.verdict.action, case.live)
    return _refusal(case.verdict, case.context, case.against, key, target)


def _refusal(
    verdict: Verdict, context: Context, against: tuple[Against, ...], key: object, target: Target | None = None
) -> Outcome:
    texts, waits = "; ".join(each.text for each in against), [each.wait for each in against]
    wait = None if None in waits else max(wait for wait in waits if wait is not None)
    # A refusal that waits comes back with every sample: one line is enough.
    if context.ledger.refused_anew(key, tuple(each.check for each in against)):
        context.append(_event(verdict, REFUSED, target, texts))
    return Outcome(REFUSED, texts, target.pid if target else None, against, wait)


# Each of these is the last call of a preflight that found nothing: they are reached from _on_process alone.
# What became of it is a word, and why, where the word does not tell.


def _signal(case: Case, signum: int) -> tuple[str, str]:
    return forward(case.pidfd, signum), ""


def _terminate(case: Case) -> tuple[str, str]:
    word = forward(case.pidfd, signal.SIGTERM)
    if word == SENT:  # a stopped process sees SIGTERM only when it goes on
        forward(case.pidfd, signal.SIGCONT)
    return word, ""


def _checkpoint(case: Case) -> tuple[str, str]:
    from gpuguard.guards.case import checkpoint_signal

    return _signal(case, checkpoint_signal(case.verdict))


def _renice(case: Case) -> tuple[str, str]:
    """Lower the priority of every thread; never raises one.

    Only pids reach a priority.  A process that is alive afterwards has kept its pid all the time; a thread that is not
    of this process any more gets back what it had.
    """
    from gpuguard.guards.case import has_ended

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


def _cancel(case: Case) -> tuple[str, str]:
    """End the Slurm job that the process belongs to; whose it is was asked by preflight."""
    from gpuguard.clusters import slurm_jobs
    from gpuguard.guards import identity
    from gpuguard.guards.case import has_ended

    job = slurm_jobs.job_of((case.target.pid, *identity.ancestors(case.target.pid)))
    # Asked after that: as long as it lives nobody else has its pid.
    fault = "its job has ended" if job is None or has_ended(case.pidfd) else slurm_jobs.cancel(job)
    return (FAILED, fault) if fault else (SENT, "")


_SIGNALS: Mapping[str, Callable[[Case], tuple[str, str]]] = {
    "checkpoint": _checkpoint,
    "terminate": _terminate,
    "kill": lambda case: _signal(case, signal.SIGKILL),
    "pause": lambda case: _signal(case, signal.SIGSTOP),
    "resume": lambda case: _signal(case, signal.SIGCONT),
    "renice": _renice,
    "cancel": _cancel,
}


# What touches no process.


def _log(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    written = context.append(_event(verdict, DONE))
    return Outcome(DONE) if written else Outcome(UNRECORDED)


def _warn(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    """Tell the people in front of the processes, each terminal once."""
    from gpuguard.guards import identity, terminals
    from gpuguard.guards.case import enforced, targets
    from gpuguard.guards.ledger import DISRUPTIVE
    from gpuguard.messages import message_for

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
    words = {terminals.write(terminal, uid, message.body, last=last) for terminal, uid in sorted(found)}
    if terminals.WRITTEN in words:
        return _said(verdict, context, DONE)
    return _said(verdict, context, FAILED, ", ".join(sorted(words)) or terminals.NO_TERMINAL)


def _holders(verdict: Verdict, snapshot: Snapshot) -> tuple[int, ...]:
    """The processes that hold a claim under which none computes: its shell sits there."""
    from gpuguard.model import claim_named

    subject, processes = verdict.finding.subject, verdict.finding.processes
    claim = None if processes else claim_named(snapshot.claims, subject.uid, subject.claim)
    return claim.holders if claim else ()


def _notify(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    """Hand a message to the target that the step names: `to` of notify, `hook` of run_hook."""
    from gpuguard.guards.case import enforced

    options = dict(verdict.options)
    target = options.get("to") or options.get("hook")
    if not isinstance(target, str) or context.notifier is None:
        return _said(verdict, context, FAILED, "there is nobody to send it to")
    if not enforced(verdict, context):
        return _said(verdict, context, DRY_RUN)
    answer = context.notifier.notify(target, verdict, snapshot)
    return _said(verdict, context, DONE) if answer == "queued" else _said(verdict, context, FAILED, answer)


def _deny(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    """No new claims for the one user whom the verdict is about; people of the system are never meant."""
    from gpuguard import marks
    from gpuguard.guards import identity

    subject, processes = verdict.finding.subject, verdict.finding.processes
    uids = {each.uid for each in processes} if subject.uid is None else {subject.uid}
    uid = uids.pop() if len(uids) == 1 else None
    if uid is None:
        return _said(verdict, context, REFUSED, "nobody in particular is meant")
    if identity.is_of_the_system(uid) or uid in context.protected:
        return _said(verdict, context, REFUSED, f"uid {uid} is protected")
    user = subject.user or next((each.user for each in processes if each.uid == uid), None)
    return _mark(verdict, context, marks.DENIED, str(uid), user)


def _quarantine(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    """Nobody gets the device.  A driver that talks nonsense must not take the whole machine out of service."""
    import time

    from gpuguard import marks

    uuid = verdict.finding.subject.device
    if uuid is None:
        return _said(verdict, context, REFUSED, "no device is meant")
    if context.directory is not None:
        out = set(marks.read_marks(context.directory, marks.QUARANTINED, time.time())) - {uuid}
        if sum(device.uuid in out for device in snapshot.devices) >= max(1, len(snapshot.devices) // 2):
            return _said(verdict, context, REFUSED, "half of the devices are out of service: ask an administrator")
    return _mark(verdict, context, marks.QUARANTINED, uuid)


def _mark(verdict: Verdict, context: Context, kind: str, name: str, user: str | None = None) -> Outcome:
    import time

    from gpuguard import marks
    from gpuguard.errors import LockDirectoryError
    from gpuguard.guards.case import enforced

    if context.directory is None:
        return _said(verdict, context, FAILED, "there is no directory of claims to write it into")
    if not enforced(verdict, context):
        return _said(verdict, context, DRY_RUN)
    if not context.append(_event(verdict, ABOUT_TO)):
        return Outcome(UNRECORDED, "nothing could be written down, so nothing was done")
    now, seconds = time.time(), dict(verdict.options).get("for")
    until = None if seconds is None else now + float(seconds)
    mark = marks.Mark(name, now, until, verdict.finding.why, f"the policy {verdict.policy}", user)
    try:
        marks.change(context.directory, kind, lambda found: marks.prolong(found, mark))
    except LockDirectoryError as error:
        return _said(verdict, context, FAILED, str(error))
    return Outcome(DONE)


def let_go(grip: Grip, letter: Letter) -> None:
    """Give a claim up as releasing.let_go does; `gpuguard run` then tells its user now, not at its next tick."""
    from gpuguard.claims import releasing

    releasing.let_go(grip, letter)
    if releasing.listens(grip.holder):
        forward(grip.pidfd, LETTER)


def _release(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    """Give up the locks of a claim under which nobody computes; its job lives on, but for cancel, which ends it."""
    from gpuguard.claims.wishes import RELEASED, Letter
    from gpuguard.clusters import slurm_jobs
    from gpuguard.errors import ClaimError
    from gpuguard.guards import vacancy

    with vacancy.examined(verdict, snapshot, context) as case:
        if case.against or case.grip is None:
            key = (verdict.finding.subject, verdict.policy, verdict.action, case.live)
            return _refusal(verdict, context, case.against, key)
        deed = case.deed()
        if not context.append(_event(verdict, ABOUT_TO if case.live else DRY_RUN, deed=deed)):
            return Outcome(UNRECORDED, "nothing could be written down, so nothing was done")
        context.ledger.note(deed)
        if not case.live:
            return Outcome(DRY_RUN)
        if verdict.action == "cancel":
            job = slurm_jobs.job_of_claim(str(verdict.finding.subject.claim))
            fault = "its job has ended" if job is None else slurm_jobs.cancel(job)
            return _said(verdict, context, FAILED, fault) if fault else Outcome(DONE)
        try:
            let_go(case.grip, Letter(RELEASED, f"the policy {verdict.policy}", verdict.finding.why))
        except (OSError, ClaimError) as error:
            return _said(verdict, context, FAILED, str(error))
        return Outcome(DONE)


def _said(verdict: Verdict, context: Context, word: str, why: str = "") -> Outcome:
    context.append(_event(verdict, word, why=why))
    return Outcome(word, why)


_WORDS: Mapping[str, Callable[[Verdict, Snapshot, Context], Outcome]] = {
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
    verdict: Verdict, outcome: str, target: Target | None = None, why: str = "", deed: Deed | None = None
) -> Event:
    from gpuguard.guards.case import event_of

    return event_of(verdict, outcome, target, why, deed)
