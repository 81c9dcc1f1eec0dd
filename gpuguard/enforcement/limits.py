"""What the guard has done lately, and the limits that follow from it.

Many signals at once are always a mistake: of a policy, of a driver, of ours.  So they come one by one, far apart, and
what was done without being enforced counts like what was, so that a dry run shows what would really happen.
After a restart it is filled from the audit log: see recall.  Times are CLOCK_BOOTTIME, in seconds.
Does not look at the machine: see preflight.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from gpuguard.claims.restrictions import boot_id
from gpuguard.jsonio import loads
from gpuguard.model import Event, Verdict

HOUR = 3600.0
SIGNALS_PER_MINUTE = 3
VICTIMS_PER_HOUR = 10
ENDED_PER_HOUR = 2  # of the same program, each started after the end of the one before: something restarts it
BETWEEN_DEEDS = 15.0  # on one device, and before the same is done to the same process again
EFFECT_SECONDS = 50.0  # a driver may take so long to give the memory of an ended process back
KILL_GRACE = 30.0  # between terminate and kill, whatever the policy says
UNKILLABLE_SECONDS = 60.0  # a process that outlives SIGKILL so long sits in the driver: more signals change nothing
REMEMBERED = 1_000

LIMITS = frozenset({"rate", "victims", "one per device", "repetition", "escalation", "restart loop", "unkillable"})

ENDING = frozenset({"terminate", "kill"})
DISRUPTIVE = ENDING | {"pause", "cancel"}

Identity = tuple[int, float]  # pid, start time


@dataclass(frozen=True)
class LimitScope:
    """A reason not to act now."""

    check: str  # its name in the table of checks
    text: str
    wait: float | None = None  # seconds after which it is worth another try; None: time alone changes nothing


@dataclass(frozen=True)
class PastAction:
    """Something that was done to a process, or would have been."""

    clock: float
    action: str
    process: Identity
    devices: tuple[str, ...]  # uuids
    live: bool  # False: dry run
    signature: str = ""  # user, program, script, claim: what a restarted process has in common with the one before
    memory_used: tuple[tuple[str, int], ...] = ()  # uuid -> bytes in use before, where known
    memory: int | None = None  # bytes that the process had on each of them
    policy: str = ""  # by which it was wanted
    uid: int | None = None  # whose process it was


@dataclass
class ActionLimits:
    """The deeds of the last hour, and what follows from them."""

    deeds: list[PastAction] = field(default_factory=list)
    unkillable: dict[Identity, tuple[str, ...]] = field(default_factory=dict)  # process -> devices not to be touched
    _settled: deque[tuple[Verdict, Identity]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _wanted: dict[object, float] = field(default_factory=dict)
    _refused: dict[object, object] = field(default_factory=dict)

    def note(self, deed: PastAction) -> None:
        """Remember *deed*."""
        self.deeds = [*(each for each in self.deeds if deed.clock - each.clock < HOUR), deed]

    def in_turn(self, verdict: Verdict) -> tuple[int, int]:
        """What verdicts are to be sorted by when not all can be carried out now.

        First comes of whose processes fewest were met lately, then who holds the most memory: nobody keeps the guard
        from others, or from what is large of his own, by many small processes that break a rule.
        """
        processes = verdict.finding.processes
        uids = {process.uid for process in processes} | {verdict.finding.subject.uid}
        lately = sum(deed.uid in uids for deed in self.deeds if deed.uid is not None)
        return lately, -sum(process.memory_used or 0 for process in processes)

    def settle(self, verdict: Verdict, process: Identity) -> None:
        """Remember that *verdict* was carried out on *process*."""
        self._settled.append((verdict, process))

    def is_settled(self, verdict: Verdict, process: Identity) -> bool:
        """Whether that very verdict was: one that means several processes comes again until none of them has to wait.

        A second SIGTERM can break off the checkpoint that the first one has started.
        """
        return any(one is verdict and whom == process for one, whom in self._settled)

    def wanted_since(self, key: object, clock: float) -> float:
        """When *key* was asked about for the first time."""
        _shorten(self._wanted)
        return self._wanted.setdefault(key, clock)

    def refused_anew(self, key: object, why: object) -> bool:
        """Whether *key* was not refused for the same reasons the last time: then it is worth a line."""
        _shorten(self._refused)
        before = self._refused.get(key)
        self._refused[key] = why
        return before != why

    def against(
        self,
        action: str,
        process: Identity,
        devices: Collection[str],
        *,
        uid: int | None,
        clock: float,
        live: bool,
        signature: str,
        effect_seen: Callable[[PastAction], bool],
    ) -> Iterator[LimitScope]:
        """Every limit that *action* on *process* would break.

        Args:
            action: its name.
            process: the process.
            devices: uuids on which it is.
            uid: whose it is.
            clock: now.
            live: whether this is enforced; deeds of dry runs and of real ones do not mix.
            signature: of the process, as in Deed.
            effect_seen: whether a deed on one of the devices has done what it was meant to do.
        """
        lately = [deed for deed in self.deeds if deed.live == live and 0 <= clock - deed.clock < HOUR]
        ending = [deed for deed in lately if deed.action in DISRUPTIVE]
        checks = (
            _rate(lately, clock),
            _victims(ending, process, uid, action, clock),
            _busy_device(ending, process, devices, clock, action, effect_seen),
            _repetition(lately, process, action, clock),
            _escalation(lately, process, action, clock),
            _restart_loop(ending, process, action, signature),
            self._unkillable(process, devices) or _killed(lately, process),
        )
        yield from (each for each in checks if each)

    def _unkillable(self, process: Identity, devices: Collection[str]) -> LimitScope | None:
        if process in self.unkillable:
            return LimitScope("unkillable", "it outlived SIGKILL: no further signal can help")
        if any(not set(devices).isdisjoint(stuck) for stuck in self.unkillable.values()):
            return LimitScope("unkillable", "a process on this device outlived SIGKILL: the device is left alone")
        return None


def _rate(lately: list[PastAction], clock: float) -> LimitScope | None:
    minute = sorted(deed.clock for deed in lately if clock - deed.clock < 60)
    if len(minute) < SIGNALS_PER_MINUTE:
        return None
    wait = minute[-SIGNALS_PER_MINUTE] + 60 - clock
    return LimitScope("rate", f"{SIGNALS_PER_MINUTE} signals in one minute are the most", wait)


def _victims(
    ending: list[PastAction], process: Identity, uid: int | None, action: str, clock: float
) -> LimitScope | None:
    """The limit of all, and within it that of each user: as many as are left for the others then.

    Whoever lets small processes of his own be ended uses up what is left of the hour for himself alone: 5 of 10, and of
    the 5 that are left another one 3.
    """
    victims: dict[Identity, PastAction] = {}
    for deed in ending:
        victims.setdefault(deed.process, deed)
    if action not in DISRUPTIVE or process in victims:
        return None
    left = VICTIMS_PER_HOUR - len(victims)
    own = sum(deed.uid == uid for deed in victims.values())
    if own < left:
        return None
    text = f"{VICTIMS_PER_HOUR} processes in one hour are the most"
    if left > 0:
        text += f", and the {left} that are left are for other users: of this one {own} were ended"
    return LimitScope("victims", text, min(deed.clock for deed in victims.values()) + HOUR - clock)


def _busy_device(
    ending: Iterable[PastAction],
    process: Identity,
    devices: Collection[str],
    clock: float,
    action: str,
    effect_seen: Callable[[PastAction], bool],
) -> LimitScope | None:
    if action not in DISRUPTIVE:
        return None
    for deed in ending:
        if deed.process == process or set(devices).isdisjoint(deed.devices):
            continue
        age = clock - deed.clock
        if age < BETWEEN_DEEDS:
            return LimitScope(
                "one per device", f"pid {deed.process[0]} on this device comes first", BETWEEN_DEEDS - age
            )
        if age < EFFECT_SECONDS and not effect_seen(deed):
            text = f"the effect on pid {deed.process[0]} on this device is not seen yet"
            return LimitScope("one per device", text, EFFECT_SECONDS - age)
    return None


def _repetition(lately: Iterable[PastAction], process: Identity, action: str, clock: float) -> LimitScope | None:
    last = max((deed.clock for deed in lately if (deed.process, deed.action) == (process, action)), default=None)
    if last is None or clock - last >= BETWEEN_DEEDS:
        return None
    return LimitScope("repetition", f"{action} was done {clock - last:.0f}s ago", last + BETWEEN_DEEDS - clock)


def _escalation(lately: Iterable[PastAction], process: Identity, action: str, clock: float) -> LimitScope | None:
    if action != "kill":
        return None
    asked = min((deed.clock for deed in lately if (deed.process, deed.action) == (process, "terminate")), default=None)
    if asked is None:
        return LimitScope("escalation", "it was not asked to end first: put terminate before kill")
    if clock - asked < KILL_GRACE:
        text = f"it was asked to end {clock - asked:.0f}s ago, and has {KILL_GRACE:.0f}s to do it"
        return LimitScope("escalation", text, asked + KILL_GRACE - clock)
    return None


def _killed(lately: Iterable[PastAction], process: Identity) -> LimitScope | None:
    if any((deed.process, deed.action) == (process, "kill") for deed in lately):
        return LimitScope("unkillable", "it was killed before: no further signal can help")
    return None


def _restart_loop(ending: Iterable[PastAction], process: Identity, action: str, signature: str) -> LimitScope | None:
    if action not in DISRUPTIVE or not signature:
        return None
    ended: dict[Identity, float] = {}
    for deed in ending:
        if deed.signature == signature and deed.process != process:
            ended[deed.process] = max(deed.clock, ended.get(deed.process, deed.clock))
    # Those that ran at the same time are no restarts of each other.  When one of another boot was started is unknown.
    restarts, last = 0, float("-inf")
    for (_, started), end in sorted(ended.items(), key=lambda one: one[1]):
        if (started >= last or started < 0) and end <= process[1]:
            restarts, last = restarts + 1, end
    if restarts < ENDED_PER_HOUR:
        return None
    text = f"the same program was ended {restarts} times within the hour, and was started again each time"
    return LimitScope("restart loop", text)


def _shorten(memory: dict[object, float] | dict[object, object]) -> None:
    """Forget the older half of a memory that has grown too long."""
    if len(memory) > REMEMBERED:
        for key in list(memory)[: REMEMBERED // 2]:
            del memory[key]


# What the guard did before it was started again: its deeds of the last hour, out of the audit log.
#
# Every deed has had its line there before it was done, so no crash can lose one, and whoever is started again each
# minute signals no more often than who stays.  Where the log cannot be read, or a line of it means nothing, there may
# have been a deed.  Does not write the log: see history; what follows from deeds is in ledger.


OUTCOMES = {"about to": True, "dry run": False}  # of the lines that stand before a deed: whether it was one in earnest
BEGIN = re.compile(rb'\{"schema": 1, "time_unix_seconds": (\d{1,12}(?:\.\d+)?)[,}]')

_MARK = b'"clock_seconds": '  # in the facts of every deed, and of nothing else
_CLOCK = re.compile(_MARK + rb"(\d{1,12}(?:\.\d+)?)[,}]")


@dataclass(frozen=True)
class Recalled:
    """The deeds of the last hour, the oldest first, and why some of them are only feared."""

    deeds: tuple[PastAction, ...] = ()
    trouble: str | None = None


def recent_actions(path: str, clock: float, now: float) -> Recalled:
    """The deeds in the log at *path* and in the older file beside it.

    Args:
        path: of the log; one that does not exist has no deeds.
        clock: CLOCK_BOOTTIME now.
        now: unix time now.
    """
    deeds: list[PastAction] = []
    damaged, boot = 0, boot_id()
    try:
        for line in _lines(path):
            begun = BEGIN.match(line)
            if begun and now - float(begun[1]) > HOUR and not _is_late(line, boot, clock):
                # By a clock that may have been set since; of this boot another one tells what was when.
                deeds, damaged = [deed for deed in deeds if deed.process >= (0, 0.0)], 0
            elif not begun or not line.endswith(b"}\n"):
                damaged += 1
            elif _MARK in line:
                deed = _deed(line, boot, clock, now)
                deeds, damaged = ([*deeds, deed], damaged) if deed else (deeds, damaged + 1)
    except OSError as error:
        text = (
            f"the audit log cannot be read ({error.strerror or error}), so nobody knows what was done in the last hour"
        )
        return Recalled(_feared(VICTIMS_PER_HOUR, clock), text)
    text = f"damaged lines in the audit log: {damaged}; each counts as a process that was ended just now"
    known = sorted(deeds, key=lambda deed: deed.clock)
    return Recalled((*known, *_feared(damaged, clock)), text if damaged else None)


def facts_of(deed: PastAction) -> dict[str, float | str | None]:
    """What the line of a deed says of it, beside what every line says."""
    return {"signature": deed.signature or None, "clock_seconds": deed.clock, "boot": boot_id()}


def is_action_event(event: Event) -> bool:
    """Whether it is the line of a deed: those are read again after a restart."""
    return any(name == "clock_seconds" for name, _ in event.facts)


def _lines(path: str) -> Iterator[bytes]:
    for each in (f"{path}.1", path):
        try:
            # O_NONBLOCK: a FIFO in that place must not hang the daemon.
            descriptor = os.open(each, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{each} is no file that remembers anything")
            yield from file


def _is_late(line: bytes, boot: str, clock: float) -> bool:
    """Whether it is the line of a deed of the last hour in this boot, whatever time of day it names."""
    found = _CLOCK.search(line)
    return bool(found and boot and boot.encode() in line and clock - float(found[1]) < HOUR)


def _deed(line: bytes, boot: str, clock: float, now: float) -> PastAction | None:
    """The deed that a line announces; None when the line cannot be right."""
    try:
        event = loads(line)
        facts = event["facts"]
        done_at = float(facts["clock_seconds"])
        same_boot = facts.get("boot") == boot != ""
        process = (int(event.get("pid") or 0), float(facts.get("start_time_seconds") or 0.0))
        age = max(0.0, clock - done_at) if same_boot else max(0.0, now - float(event["time_unix_seconds"]))
        return PastAction(
            clock=clock - age,
            action=str(event["kind"]),
            # A process of another boot is nobody here, whoever has its pid.
            process=process if same_boot else (0, -done_at),
            devices=tuple(map(str, event.get("devices", ()))),
            live=OUTCOMES[event["outcome"]],
            signature=str(facts.get("signature") or ""),
            policy=str(facts.get("policy") or ""),
            uid=None if facts.get("uid") is None else int(facts["uid"]),
        )
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
        return None


def _feared(number: int, clock: float) -> tuple[PastAction, ...]:
    numbers = range(1, min(number, VICTIMS_PER_HOUR) + 1)
    return tuple(
        PastAction(clock, "terminate", (0, -float(each)), (), live) for each in numbers for live in (True, False)
    )


# How many lines of the audit log may be about one user.
#
# The last 30,000 are kept.  Who starts and ends what a policy looks at, again and again, would push out of the log
# within minutes what was done to others, and what limits the guard itself after a restart: see recall.  A deed, what
# announces it, and what became of it are always written; of all else so many lines, and how many were left out.  All
# users without a name count as one: who may use user namespaces has 65536 such uids.  Writes nothing.


AT_ONCE = 1_000  # lines about one user, and then
EVERY = 10.0  # seconds one: of whom ever so much is to be said, that is 3 MB a day
TELL_SECONDS = 60.0  # between two lines that say how many were left out


@dataclass
class _LeftOut:
    """What was not written about one user."""

    since: float  # unix time
    clock: float
    user: str | None
    what: Counter[str] = field(default_factory=Counter)


class Lines:
    """Who has had how many lines; clocks are in seconds and never go back."""

    def __init__(self) -> None:
        self._spent: dict[str | None, float] = {}  # user -> clock at which nothing counts against him any more
        self._left_out: dict[str | None, _LeftOut] = {}
        self._announced: tuple[object, ...] | None = None

    def admits(self, event: Event, clock: float) -> bool:
        """Whether *event* is to be written down; if not, it is counted."""
        about = event.kind, event.pid, event.claim, event.devices, event.user
        if is_action_event(event) or event.outcome in ("about to", "unkillable"):
            self._announced = about
            return True
        if about == self._announced or (event.user, event.pid, event.claim) == (None, None, None):  # about the machine
            return True
        whom = _whom(event)
        spent = max(clock, self._spent.get(whom, clock)) + EVERY
        if spent - clock > AT_ONCE * EVERY:
            out = self._left_out.setdefault(whom, _LeftOut(event.time, clock, whom))
            out.what[event.outcome if event.kind == "note" else event.kind] += 1
            return False
        self._spent[whom] = spent
        return True

    def left_out(self, clock: float) -> Iterator[Event]:
        """For each of whom lines were left out a line that says so, once a minute."""
        self._spent = {whom: spent for whom, spent in self._spent.items() if spent > clock}
        for whom, out in tuple(self._left_out.items()):
            if clock - out.clock < TELL_SECONDS:
                continue
            del self._left_out[whom]
            number, what = sum(out.what.values()), ", ".join(f"{kind} {n}" for kind, n in out.what.most_common())
            seconds = time.time() - out.since
            same = "the same user" if out.user else "users without a name"
            text = f"{number} lines about {same} within {seconds:.0f}s, more than one in {EVERY:.0f}s: {what}"
            yield Event(time.time(), "note", "left out", out.user, message=text, facts=(("lines", number),))


def _whom(event: Event) -> str | None:
    """The user whom *event* is about; None: one of all of whom nobody knows who they are."""
    return event.user if event.user and not event.user.isdecimal() else None
