"""Signals: the only file that sends any, and to others only through a pidfd.

A pid can be given to somebody else between a look and a kill; a pidfd keeps meaning the same process.
First our own job and ourselves, for run; then what the guard does to others: act() looks at every check of preflight,
writes down what it is about to do, and only then does it.  A dry run leaves out nothing but that last call.
Does not decide whom or when: see run and policies.
"""

from __future__ import annotations

import os
import signal

from gpuguard.nouns import dataclass

TYPE_CHECKING = False  # typing costs 6 ms of import; what the guard needs is imported where it is needed: see run
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from gpuguard.case import Case, Context, Target
    from gpuguard.ledger import Against
    from gpuguard.model import Event, Snapshot, Verdict

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


def stop_self() -> None:
    """Stop this process as Ctrl-Z does; comes back when somebody continues it."""
    signal.raise_signal(signal.SIGSTOP)


def die_of(signum: int) -> NoReturn:
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
    from gpuguard.case import targets

    if verdict.action in _SIGNALS:
        found = [_on_process(verdict, snapshot, context, target) for target in targets(verdict, snapshot)]
        return tuple(found) or (_said(verdict, context, REFUSED, "no process is meant"),)
    if verdict.action in _WORDS:
        return (_WORDS[verdict.action](verdict, snapshot, context),)
    return (_said(verdict, context, FAILED, f"there is no action {verdict.action!r}"),)


def preflight(verdict: Verdict, snapshot: Snapshot, context: Context) -> tuple[Against, ...]:
    """Everything that speaks now against acting on the processes of *verdict*; nothing is done."""
    from gpuguard.preflight import preflight

    return preflight(verdict, snapshot, context)


def give_up(context: Context) -> tuple[Outcome, ...]:
    """Look after the processes that were killed: those that are still there a minute later are left alone for good.

    They sit in the driver, where no signal reaches them, and their devices are of no use until somebody resets them.
    When they are gone after all, their devices are as others are.
    To be called after each sample.  Returns an Outcome, "unkillable", for each that is found for the first time.
    """
    from gpuguard.case import boot_clock, is_alive
    from gpuguard.ledger import UNKILLABLE_SECONDS

    now, found = boot_clock(), []
    stuck = context.ledger.unkillable
    for process in [each for each in stuck if not is_alive(each)]:
        del stuck[process]  # somebody has reset the device
    for deed in context.ledger.deeds:
        over = deed.live and deed.action == "kill" and now - deed.clock >= UNKILLABLE_SECONDS
        if over and deed.process not in stuck and is_alive(deed.process):
            stuck[deed.process] = deed.devices
            why = f"it outlived SIGKILL by {now - deed.clock:.0f}s: its devices need a reset, and are left alone"
            found.append(Outcome(UNKILLABLE, why, deed.process[0]))
            context.append(_plain_event("kill", UNKILLABLE, why, deed.devices, deed.process[0]))
    return tuple(found)


def _on_process(verdict: Verdict, snapshot: Snapshot, context: Context, target: Target) -> Outcome:
    from gpuguard import preflight
    from gpuguard.case import enforced

    if context.ledger.is_settled(verdict, target.process):
        return Outcome(SENT if enforced(verdict, context) else DRY_RUN, "it was done before", target.pid)
    with preflight.examined(verdict, snapshot, context, target) as case:
        if case.ended:
            context.append(_event(verdict, GONE, target, "it had ended before"))
            return Outcome(GONE, "it had ended before", target.pid)
        if case.against:
            return _refused(case)
        if not context.append(_event(verdict, ABOUT_TO if case.live else DRY_RUN, target)):
            return Outcome(UNRECORDED, "nothing could be written down, so nothing was done", target.pid)
        context.ledger.note(case.deed())
        context.ledger.settle(verdict, target.process)
        if not case.live:
            return Outcome(DRY_RUN, pid=target.pid)
        word = _SIGNALS[verdict.action](case)
        if word != SENT:
            context.append(_event(verdict, word, target))
        return Outcome(word, pid=target.pid)


def _refused(case: Case) -> Outcome:
    target, texts = case.target, "; ".join(each.text for each in case.against)
    waits = [each.wait for each in case.against]
    wait = None if None in waits else max(wait for wait in waits if wait is not None)
    checks = tuple(each.check for each in case.against)
    # A refusal that waits comes back with every sample: one line is enough.
    if case.context.ledger.refused_anew((target.process, case.verdict.policy, case.verdict.action, case.live), checks):
        case.context.append(_event(case.verdict, REFUSED, target, texts))
    return Outcome(REFUSED, texts, target.pid, case.against, wait)


# Each of these is the last call of a preflight that found nothing: they are reached from _on_process alone.


def _terminate(case: Case) -> str:
    word = forward(case.pidfd, signal.SIGTERM)
    if word == SENT:  # a stopped process sees SIGTERM only when it goes on
        forward(case.pidfd, signal.SIGCONT)
    return word


def _checkpoint(case: Case) -> str:
    from gpuguard.case import checkpoint_signal

    return forward(case.pidfd, checkpoint_signal(case.verdict))


def _renice(case: Case) -> str:
    """Lower the priority of every thread; never raises one.

    Only pids reach a priority.  A process that is alive afterwards has kept its pid all the time; a thread that is not
    of this process any more gets back what it had.
    """
    from gpuguard.case import has_ended

    wanted, pid = dict(case.verdict.options).get("niceness", 10), case.target.pid
    try:
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            before = os.getpriority(os.PRIO_PROCESS, thread)
            if isinstance(wanted, int) and before < wanted <= 19:
                os.setpriority(os.PRIO_PROCESS, thread, wanted)
                if has_ended(case.pidfd) or not os.path.exists(f"/proc/{pid}/task/{thread}"):
                    os.setpriority(os.PRIO_PROCESS, thread, before)
    except PermissionError:
        return NOT_PERMITTED
    except OSError:
        return GONE
    return SENT


_SIGNALS: Mapping[str, Callable[[Case], str]] = {
    "checkpoint": _checkpoint,
    "terminate": _terminate,
    "kill": lambda case: forward(case.pidfd, signal.SIGKILL),
    "pause": lambda case: forward(case.pidfd, signal.SIGSTOP),
    "resume": lambda case: forward(case.pidfd, signal.SIGCONT),
    "renice": _renice,
}


# What touches no process.


def _log(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    written = context.append(_event(verdict, DONE))
    return Outcome(DONE) if written else Outcome(UNRECORDED)


def _warn(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    """Tell the people in front of the processes, each terminal once."""
    from gpuguard import identity, terminals
    from gpuguard.case import enforced, targets
    from gpuguard.ledger import DISRUPTIVE
    from gpuguard.messages import message_for

    found = set()
    for target in targets(verdict, snapshot):
        facts = identity.facts_of(target.pid) if target.pid > 1 else None
        if facts and facts.start_time == target.start_time and facts.uids[:1] == (target.uid,) and facts.terminal:
            found.add((facts.terminal, facts.uids[0]))
    if not enforced(verdict, context):
        return _said(verdict, context, DRY_RUN)
    message = message_for(verdict, snapshot, context.language)
    last = verdict.next_action in DISRUPTIVE
    words = {terminals.write(terminal, uid, message.body, last=last) for terminal, uid in sorted(found)}
    if terminals.WRITTEN in words:
        return _said(verdict, context, DONE)
    return _said(verdict, context, FAILED, ", ".join(sorted(words)) or terminals.NO_TERMINAL)


def _notify(verdict: Verdict, snapshot: Snapshot, context: Context) -> Outcome:
    """Hand a message to the target that the step names: `to` of notify, `hook` of run_hook."""
    from gpuguard.case import enforced

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
    from gpuguard import identity, marks

    subject, processes = verdict.finding.subject, verdict.finding.processes
    uids = {each.uid for each in processes} if subject.uid is None else {subject.uid}
    uid = uids.pop() if len(uids) == 1 else None
    if uid is None:
        return _said(verdict, context, REFUSED, "nobody in particular is meant")
    if uid < identity.uid_min() or uid == identity.overflow_uid() or uid in context.protected:
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
        if 2 * sum(device.uuid in out for device in snapshot.devices) + 2 > max(2, len(snapshot.devices)):
            return _said(verdict, context, REFUSED, "half of the devices are out of service: ask an administrator")
    return _mark(verdict, context, marks.QUARANTINED, uuid)


def _mark(verdict: Verdict, context: Context, kind: str, name: str, user: str | None = None) -> Outcome:
    import time

    from gpuguard import marks
    from gpuguard.case import enforced
    from gpuguard.errors import LockDirectoryError

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


def _said(verdict: Verdict, context: Context, word: str, why: str = "") -> Outcome:
    context.append(_event(verdict, word, why=why))
    return Outcome(word, why)


_WORDS: Mapping[str, Callable[[Verdict, Snapshot, Context], Outcome]] = {
    "log": _log,
    "warn": _warn,
    "notify": _notify,
    "deny": _deny,
    "quarantine": _quarantine,
    "run_hook": _notify,
}

# Every action; what a step may say about it is in actiontable.
ACTIONS = frozenset(_SIGNALS) | frozenset(_WORDS)


def _event(verdict: Verdict, outcome: str, target: Target | None = None, why: str = "") -> Event:
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
    text = verdict.finding.why + (f": {why}" if why else "")
    pid = target.pid if target else subject.pid
    user = (target.user if target else None) or subject.user
    return _plain_event(verdict.action, outcome, text, devices, pid, user=user, claim=subject.claim, facts=facts)


def _plain_event(
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
    import time

    from gpuguard.model import Event

    more = tuple((facts or {}).items())
    return Event(time.time(), kind, outcome, user, devices, pid=pid, claim=claim, message=text, facts=more)
