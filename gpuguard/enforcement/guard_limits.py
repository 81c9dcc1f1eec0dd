"""Limits on the guard itself: those that follow from its recent actions, and how much it may write into its log.

Many signals at once are always a mistake: of a policy, of a driver, or of ours.  So signals come one by one, far apart.
Dry runs are counted as enforced actions are, so that a dry run shows what would really happen.  After a restart, the
actions of the last hour are read from the audit log, because each had its line there before it was done.
Times are CLOCK_BOOTTIME, in seconds.  This module does not look at the machine: see preflight.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import cast

from gpuguard.history.audit_log import read_log
from gpuguard.jsonio import loads
from gpuguard.locale.messages import sentence
from gpuguard.model import ActionName, Event, ProcessIdentity, Verdict
from gpuguard.policies.action_kinds import DISRUPTIVE, ENDING_ACTIONS
from gpuguard.policies.engine import EFFECT_SECONDS
from gpuguard.policies.policy import KILL_AFTER
from gpuguard.policies.view import JobMember, Jobs, alone, jobs_of
from gpuguard.procfs import boot_id

HOUR = 3600.0
JOBS_PER_MINUTE = 3  # that are signalled, unless a policy file names another number
JOBS_PER_HOUR = 10  # that are ended, likewise
MOST_JOBS = 100  # that a policy file may allow; this many are assumed if it is not known what was done
ENDED_PER_HOUR = 2  # processes of one program, each started after the end of the one before: something restarts it
BETWEEN_ACTIONS = 15.0  # on one device, and before an action is repeated on the same process
UNKILLABLE_SECONDS = 60.0  # a process that outlives SIGKILL so long sits in the driver: more signals change nothing
REMEMBERED = 1_000

LIMITS = frozenset({"rate", "victims", "one per device", "repetition", "escalation", "restart loop", "unkillable"})


@dataclass(frozen=True)
class FailedCheck:
    """A reason not to act now."""

    check: str  # its name in the table of checks
    text: str
    wait: float | None = None  # seconds after which it is worth another try; None if time alone changes nothing


@dataclass(frozen=True)
class PastAction:
    """An action that was done to a process, would have been, or is about to be."""

    clock: float
    action: ActionName
    process: ProcessIdentity
    devices: tuple[str, ...]  # uuids
    live: bool  # False for a dry run
    signature: str = ""  # user, program, script, claim, cgroup: a restarted process shares it with the one before
    memory_used: tuple[tuple[str, int], ...] = ()  # uuid -> bytes in use before, where known
    memory: int | None = None  # bytes that the process had on each of them
    policy: str = ""  # the policy that asked for it
    uid: int | None = None  # the owner of the process
    job: str = ""  # see JobMember
    launch: str = ""

    @property
    def member(self) -> JobMember:
        """The process as a part of its job."""
        return JobMember(self.process, self.job, self.launch) if self.job else alone(self.process)


@dataclass
class ActionLimits:
    """The actions of the last hour, and the limits that follow from them."""

    past: list[PastAction] = field(default_factory=list)
    per_minute: int = JOBS_PER_MINUTE
    per_hour: int = JOBS_PER_HOUR
    # (process, live) -> clock of its first SIGTERM: a policy may wait longer than an hour before it kills
    _asked_to_end: dict[object, float] = field(default_factory=dict)
    # process -> the SIGKILL that it outlived, with the devices that are not quarantined for it yet
    unkillable: dict[ProcessIdentity, PastAction] = field(default_factory=dict)
    _done: deque[tuple[Verdict, ProcessIdentity]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _wanted: dict[object, float] = field(default_factory=dict)
    _refused: dict[object, object] = field(default_factory=dict)

    def record(self, action: PastAction, verdict: Verdict | None = None) -> None:
        """Remember *action*, and the *verdict* that it was done for."""
        if verdict is not None:
            self._done.append((verdict, action.process))
        if action.action == "terminate":
            _shorten(self._asked_to_end)
            key = action.process, action.live
            self._asked_to_end[key] = min(action.clock, self._asked_to_end.get(key, action.clock))
        self.past = [*(past for past in self.past if action.clock - past.clock < HOUR), action]

    def priority(self, verdict: Verdict) -> tuple[int, int]:
        """Return the key by which verdicts are sorted when not all can be carried out now.

        The user whose processes were acted on least lately comes first, and among equals the one who holds the most
        memory.  So no user can keep the guard from others, or from a large process of their own, by many small
        processes that break a rule.
        """
        processes = verdict.finding.processes
        uids = {process.uid for process in processes} | {verdict.finding.subject.uid}
        lately = sum(past.uid in uids for past in self.past if past.uid is not None)
        return lately, -sum(process.memory_used or 0 for process in processes)

    def is_done(self, verdict: Verdict, process: ProcessIdentity) -> bool:
        """Return whether that very verdict was carried out on *process*.

        A verdict about several processes comes again until none of them has to wait, and a second SIGTERM can break off
        the checkpoint that the first one has started.
        """
        return any(settled is verdict and identity == process for settled, identity in self._done)

    def first_wanted(self, key: object, clock: float) -> float:
        """Return the clock at which *key* was asked about for the first time."""
        _shorten(self._wanted)
        return self._wanted.setdefault(key, clock)

    def refused_anew(self, key: object, why: object) -> bool:
        """Return whether a refusal is worth a line: the last one of *key* was not for the same reasons."""
        _shorten(self._refused)
        before = self._refused.get(key)
        self._refused[key] = why
        return before != why

    def failed(self, action: PastAction, effect_seen: Callable[[PastAction], bool]) -> Iterator[FailedCheck]:
        """Yield every limit that *action*, about to be done, would break.  Dry runs and real actions do not mix.

        *effect_seen* says whether an action on one of the devices has done what it was meant to do.
        """
        lately = [past for past in self.past if past.live == action.live and 0 <= action.clock - past.clock < HOUR]
        disruptive = [past for past in lately if past.action in DISRUPTIVE]
        jobs = jobs_of((*(past.member for past in lately), action.member))
        found = [self._rate(lately, action, jobs)]
        if action.action in ENDING_ACTIONS:
            found.append(self._victims([past for past in lately if past.action in ENDING_ACTIONS], action, jobs))
        if action.action in DISRUPTIVE:
            found += [_busy_device(disruptive, action, jobs, effect_seen), _restart_loop(disruptive, action)]
        found += [_repetition(lately, action), self._escalation(action), self._unkillable(lately, action)]
        return filter(None, found)

    def _rate(self, lately: list[PastAction], action: PastAction, jobs: Jobs) -> FailedCheck | None:
        """Check the limit per minute.  A job counts by its first signal in it, so that it is never hit by halves."""
        begun = _begun([past for past in lately if action.clock - past.clock < 60], jobs)
        if jobs[action.member] in begun or len(begun) < self.per_minute:
            return None
        wait = sorted(begun.values())[-self.per_minute] + 60 - action.clock
        text = sentence(
            "limits.jobs_per_minute", "{count} jobs signalled in one minute are the most", count=self.per_minute
        )
        return FailedCheck("rate", text, wait)

    def _victims(self, ended: list[PastAction], action: PastAction, jobs: Jobs) -> FailedCheck | None:
        """Check the limit per hour and, within it, that of each user: as many jobs as are then left for the others.

        Users who let small jobs of their own be ended thereby use up only their own part of the hour: one user 5 of
        10, and another one 3 of the 5 that are left.
        """
        begun = _begun(ended, jobs)
        left = self.per_hour - len(begun)
        own = len({jobs[past.member] for past in ended if past.uid == action.uid})
        if jobs[action.member] in begun or own < left:
            return None
        text = sentence("limits.jobs_per_hour", "{count} jobs ended in one hour are the most", count=self.per_hour)
        if left > 0:
            text = sentence(
                "limits.jobs_of_user",
                "{count} jobs ended in one hour are the most, and the {left} that are left are for other users: of "
                "this one {own} were ended",
                count=self.per_hour,
                left=left,
                own=own,
            )
        return FailedCheck("victims", text, min(begun.values()) + HOUR - action.clock)

    def _escalation(self, action: PastAction) -> FailedCheck | None:
        if action.action != "kill":
            return None
        asked = self._asked_to_end.get((action.process, action.live))
        if asked is None:
            text = sentence("limits.not_asked", "it was not asked to end first: put terminate before kill")
            return FailedCheck("escalation", text)
        age = action.clock - asked
        if age < KILL_AFTER:
            text = sentence(
                "limits.asked_lately",
                "it was asked to end {time} ago, and has {limit} to do it",
                time=f"{age:.0f}s",
                limit=f"{KILL_AFTER:.0f}s",
            )
            return FailedCheck("escalation", text, KILL_AFTER - age)
        return None

    def _unkillable(self, lately: Iterable[PastAction], action: PastAction) -> FailedCheck | None:
        if action.process in self.unkillable:
            text = sentence("limits.outlived_kill", "it outlived SIGKILL: no further signal can help")
            return FailedCheck("unkillable", text)
        if _times_of(lately, action.process, "kill"):
            text = sentence("limits.killed_before", "it was killed before: no further signal can help")
            return FailedCheck("unkillable", text)
        return None


def _begun(done: Iterable[PastAction], jobs: Jobs) -> dict[str, float]:
    """Return the clock of the first of the actions *done* to each job."""
    # Of each job the first comes last, and stays.
    return {jobs[past.member]: past.clock for past in sorted(done, key=attrgetter("clock"), reverse=True)}


def _busy_device(
    disruptive: Iterable[PastAction], action: PastAction, jobs: Jobs, effect_seen: Callable[[PastAction], bool]
) -> FailedCheck | None:
    for past in disruptive:
        if jobs[past.member] == jobs[action.member] or set(action.devices).isdisjoint(past.devices):
            continue
        age, pid = action.clock - past.clock, past.process[0]
        if age < BETWEEN_ACTIONS:
            text = sentence("limits.comes_first", "pid {pid} on this GPU comes first", pid=pid)
            return FailedCheck("one per device", text, BETWEEN_ACTIONS - age)
        if age < EFFECT_SECONDS and not effect_seen(past):
            text = sentence("limits.effect_unseen", "the effect on pid {pid} on this GPU is not seen yet", pid=pid)
            return FailedCheck("one per device", text, EFFECT_SECONDS - age)
    return None


def _times_of(lately: Iterable[PastAction], process: ProcessIdentity, action: str) -> list[float]:
    return [past.clock for past in lately if (past.process, past.action) == (process, action)]


def _repetition(lately: Iterable[PastAction], action: PastAction) -> FailedCheck | None:
    last = max(_times_of(lately, action.process, action.action), default=float("-inf"))
    age = action.clock - last
    if age >= BETWEEN_ACTIONS:
        return None
    text = sentence("limits.repetition", "{action} was done {time} ago", action=action.action, time=f"{age:.0f}s")
    return FailedCheck("repetition", text, BETWEEN_ACTIONS - age)


def _restart_loop(disruptive: Iterable[PastAction], action: PastAction) -> FailedCheck | None:
    if not action.signature:
        return None
    same = (past for past in disruptive if past.signature == action.signature and past.process != action.process)
    ended = {past.process: past.clock for past in sorted(same, key=attrgetter("clock"))}  # by its last action
    # Processes that ran at the same time are no restarts of each other.  If one is of another boot, it is unknown when
    # it was started.
    restarts, last = 0, float("-inf")
    for (_, started), end in sorted(ended.items(), key=lambda item: item[1]):
        if (started >= last or started < 0) and end <= action.process[1]:
            restarts, last = restarts + 1, end
    if restarts < ENDED_PER_HOUR:
        return None
    text = sentence(
        "limits.restart_loop",
        "the same program was ended {count} times within the hour, and was started again each time",
        count=restarts,
    )
    return FailedCheck("restart loop", text)


def _shorten(memory: dict[object, float] | dict[object, object]) -> None:
    """Forget the older half of a memory that has grown too long."""
    if len(memory) > REMEMBERED:
        for key in list(memory)[: REMEMBERED // 2]:
            del memory[key]


OUTCOMES = {"about to": True, "dry run": False}  # of the line before an action -> whether the action is enforced
BEGIN = re.compile(rb'\{"schema": 1, "time_unix_seconds": (\d{1,12}(?:\.\d+)?)[,}]')

_MARK = b'"clock_seconds": '  # in the facts of every action, and of nothing else
_CLOCK = re.compile(_MARK + rb"(\d{1,12}(?:\.\d+)?)[,}]")


@dataclass(frozen=True)
class RecoveredActions:
    """The actions of the last hour, the oldest first, and why some of them are only assumed."""

    actions: tuple[PastAction, ...] = ()
    problem: str | None = None


def recover_actions(path: str, clock: float, now: float) -> RecoveredActions:
    """Return the actions of the last hour in the log at *path* and in the older file beside it.

    If the log cannot be read, or a line of it means nothing, an action is assumed in its place.  So no crash can lose
    an action, and a guard that is restarted each minute signals no more often.
    *clock* and *now* are CLOCK_BOOTTIME and unix time now.
    """
    actions: list[PastAction] = []
    damaged, boot = 0, boot_id()
    try:
        for line in read_log(path):
            begun = BEGIN.match(line)
            if begun and now - float(begun[1]) > HOUR and not _is_recent(line, boot, clock):
                # That age is by a clock that may have been set since; another clock tells when actions of this boot
                # were done.
                actions, damaged = [action for action in actions if action.process >= (0, 0.0)], 0
            elif not begun or not line.endswith(b"}\n"):
                damaged += 1
            elif _MARK in line:
                action = _action_of(line, boot, clock, now)
                actions, damaged = ([*actions, action], damaged) if action else (actions, damaged + 1)
    except OSError as error:
        text = sentence(
            "limits.log_unreadable",
            "the audit log cannot be read ({error}), so what was done in the last hour is unknown",
            error=error.strerror or str(error),
        )
        return RecoveredActions(_feared(MOST_JOBS, clock), text)
    text = sentence(
        "limits.log_damaged",
        "damaged lines in the audit log: {count}; each counts as a process that was ended just now",
        count=damaged,
    )
    known = sorted(actions, key=lambda action: action.clock)
    return RecoveredActions((*known, *_feared(damaged, clock)), text if damaged else None)


def facts_of(action: PastAction) -> dict[str, float | str | None]:
    """Return the facts that the line of an action has besides those of every line."""
    return {
        "signature": action.signature or None,
        "job": action.job or None,
        "launch": action.launch or None,
        "clock_seconds": action.clock,
        "boot": boot_id(),
    }


def _is_recent(line: bytes, boot: str, clock: float) -> bool:
    """Return whether *line* is of an action of the last hour in this boot, whatever time of day it names."""
    found = _CLOCK.search(line)
    return bool(found and boot and boot.encode() in line and clock - float(found[1]) < HOUR)


def _action_of(line: bytes, boot: str, clock: float, now: float) -> PastAction | None:
    """Return the action that a line announces, or None if the line cannot be right."""
    try:
        event = loads(line)
        facts = event["facts"]
        done_at = float(facts["clock_seconds"])
        same_boot = facts.get("boot") == boot != ""
        process = (int(event.get("pid") or 0), float(facts.get("start_time_seconds") or 0.0))
        age = max(0.0, clock - done_at) if same_boot else max(0.0, now - float(event["time_unix_seconds"]))
        return PastAction(
            clock=clock - age,
            action=cast("ActionName", str(event["kind"])),  # a newer version may have others, which no limit is about
            # A process of another boot is no process of this one, whichever has its pid now.
            process=process if same_boot else (0, -done_at),
            devices=tuple(map(str, event.get("devices", ()))),
            live=OUTCOMES[event["outcome"]],
            signature=str(facts.get("signature") or ""),
            policy=str(facts.get("policy") or ""),
            uid=None if facts.get("uid") is None else int(facts["uid"]),
            job=str(facts.get("job") or ""),
            launch=str(facts.get("launch") or ""),
        )
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
        return None


def _feared(count: int, clock: float) -> tuple[PastAction, ...]:
    numbers = range(1, min(count, MOST_JOBS) + 1)
    return tuple(
        PastAction(clock, "terminate", (0, -float(number)), (), live) for number in numbers for live in (True, False)
    )


BURST_LINES = 1_000  # about one user, before the limit of
SECONDS_PER_LINE = 10.0  # for each further line: 3 MB a day
REPORT_SECONDS = 60.0  # between two lines that say how many were left out
_SAME_USER = sentence("limits.same_user", "the same user")
_NAMELESS = sentence("limits.nameless_users", "users without a name")


class AuditQuota:
    """The number of audit log lines that each user has had.  Clocks are in seconds and never go back.

    Only the last 30,000 lines are kept.  Within minutes, a user who again and again starts and ends processes that a
    policy looks at would push out the lines about what was done to others.
    The line of an action, its announcement and its outcome are always written.  All users without a name count as one,
    because a user who may use user namespaces has 65536 such uids.
    """

    def __init__(self) -> None:
        self._spent: dict[str | None, float] = {}  # user -> clock at which nothing counts against them any more
        self._left_out: dict[str | None, tuple[float, Counter[str]]] = {}  # user -> since which clock, counts by kind
        self._announced: tuple[object, ...] | None = None

    def admits(self, event: Event, clock: float) -> bool:
        """Return whether *event* is to be written down; if not, it is counted."""
        about = event.kind, event.pid, event.claim, event.devices, event.user
        is_action = any(name == "clock_seconds" for name, _ in event.facts)
        if is_action or event.kind == "resume" or event.outcome in ("about to", "unkillable"):
            self._announced = about
            return True
        if about == self._announced or (event.user, event.pid, event.claim) == (None, None, None):  # about the machine
            return True
        user = event.user if event.user and not event.user.isdecimal() else None
        spent = max(clock, self._spent.get(user, clock)) + SECONDS_PER_LINE
        if spent - clock > BURST_LINES * SECONDS_PER_LINE:
            _, counts = self._left_out.setdefault(user, (clock, Counter()))
            counts[event.outcome if event.kind == "note" else event.kind] += 1
            return False
        self._spent[user] = spent
        return True

    def left_out(self, clock: float) -> Iterator[Event]:
        """Yield, once a minute for each user about whom lines were left out, a line that says so."""
        self._spent = {user: spent for user, spent in self._spent.items() if spent > clock}
        for user, (since, counts) in tuple(self._left_out.items()):
            if clock - since < REPORT_SECONDS:
                continue
            del self._left_out[user]
            number = sum(counts.values())
            text = sentence(
                "limits.lines_left_out",
                "{count} lines about {user} within {time}, more than one in {limit}: {kinds}",
                count=number,
                user=_SAME_USER if user else _NAMELESS,
                time=f"{clock - since:.0f}s",
                limit=f"{SECONDS_PER_LINE:.0f}s",
                kinds=", ".join(f"{kind} {count}" for kind, count in counts.most_common()),
            )
            yield Event(
                time=time.time(), kind="note", outcome="left out", user=user, message=text, facts=(("lines", number),)
            )
