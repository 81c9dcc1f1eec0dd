"""What the guard has done lately, and the limits that follow from it.

Many signals at once are always a mistake: of a policy, of a driver, of ours.  So they come one by one, far apart, and
what was done without being enforced counts like what was, so that a dry run shows what would really happen.
After a restart it is filled from the audit log: see recall.  Times are CLOCK_BOOTTIME, in seconds.
Does not look at the machine: see preflight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from gpuguard.model import Verdict

HOUR = 3600.0
SIGNALS_PER_MINUTE = 3
VICTIMS_PER_HOUR = 10
ENDED_PER_HOUR = 2  # of the same program of the same user in the same place: something starts it again each time
BETWEEN_DEEDS = 15.0  # on one device, and before the same is done to the same process again
EFFECT_SECONDS = 50.0  # a driver may take so long to give the memory of an ended process back
KILL_GRACE = 30.0  # between terminate and kill, whatever the policy says
UNKILLABLE_SECONDS = 60.0  # a process that outlives SIGKILL so long sits in the driver: more signals change nothing
REMEMBERED = 1_000

ENDING = frozenset({"terminate", "kill"})
DISRUPTIVE = ENDING | {"pause", "cancel"}

Identity = tuple[int, float]  # pid, start time


@dataclass(frozen=True)
class Against:
    """A reason not to act now."""

    check: str  # its name in the table of checks
    text: str
    wait: float | None = None  # seconds after which it is worth another try; None: time alone changes nothing


@dataclass(frozen=True)
class Deed:
    """Something that was done to a process, or would have been."""

    clock: float
    action: str
    process: Identity
    devices: tuple[str, ...]  # uuids
    live: bool  # False: dry run
    signature: str = ""  # user, program and cgroup: what a restarted process has in common with the one before
    memory_used: tuple[tuple[str, int], ...] = ()  # uuid -> bytes in use before, where known
    memory: int | None = None  # bytes that the process had on each of them
    policy: str = ""  # by which it was wanted
    uid: int | None = None  # whose process it was


@dataclass
class Ledger:
    """The deeds of the last hour, and what follows from them."""

    deeds: list[Deed] = field(default_factory=list)
    unkillable: dict[Identity, tuple[str, ...]] = field(default_factory=dict)  # process -> devices not to be touched
    _settled: deque[tuple[Verdict, Identity]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _wanted: dict[object, float] = field(default_factory=dict)
    _refused: dict[object, object] = field(default_factory=dict)

    def note(self, deed: Deed) -> None:
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
        effect_seen: Callable[[Deed], bool],
    ) -> Iterator[Against]:
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

    def _unkillable(self, process: Identity, devices: Collection[str]) -> Against | None:
        if process in self.unkillable:
            return Against("unkillable", "it outlived SIGKILL: no further signal can help")
        if any(not set(devices).isdisjoint(stuck) for stuck in self.unkillable.values()):
            return Against("unkillable", "a process on this device outlived SIGKILL: the device is left alone")
        return None


def _rate(lately: list[Deed], clock: float) -> Against | None:
    minute = sorted(deed.clock for deed in lately if clock - deed.clock < 60)
    if len(minute) < SIGNALS_PER_MINUTE:
        return None
    wait = minute[-SIGNALS_PER_MINUTE] + 60 - clock
    return Against("rate", f"{SIGNALS_PER_MINUTE} signals in one minute are the most", wait)


def _victims(ending: list[Deed], process: Identity, uid: int | None, action: str, clock: float) -> Against | None:
    """The limit of all, and within it that of each user: as many as are left for the others then.

    Whoever lets small processes of his own be ended uses up what is left of the hour for himself alone: 5 of 10, and of
    the 5 that are left another one 3.
    """
    victims: dict[Identity, Deed] = {}
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
    return Against("victims", text, min(deed.clock for deed in victims.values()) + HOUR - clock)


def _busy_device(
    ending: Iterable[Deed],
    process: Identity,
    devices: Collection[str],
    clock: float,
    action: str,
    effect_seen: Callable[[Deed], bool],
) -> Against | None:
    if action not in DISRUPTIVE:
        return None
    for deed in ending:
        if deed.process == process or set(devices).isdisjoint(deed.devices):
            continue
        age = clock - deed.clock
        if age < BETWEEN_DEEDS:
            return Against("one per device", f"pid {deed.process[0]} on this device comes first", BETWEEN_DEEDS - age)
        if age < EFFECT_SECONDS and not effect_seen(deed):
            text = f"the effect on pid {deed.process[0]} on this device is not seen yet"
            return Against("one per device", text, EFFECT_SECONDS - age)
    return None


def _repetition(lately: Iterable[Deed], process: Identity, action: str, clock: float) -> Against | None:
    last = max((deed.clock for deed in lately if (deed.process, deed.action) == (process, action)), default=None)
    if last is None or clock - last >= BETWEEN_DEEDS:
        return None
    return Against("repetition", f"{action} was done {clock - last:.0f}s ago", last + BETWEEN_DEEDS - clock)


def _escalation(lately: Iterable[Deed], process: Identity, action: str, clock: float) -> Against | None:
    if action != "kill":
        return None
    asked = min((deed.clock for deed in lately if (deed.process, deed.action) == (process, "terminate")), default=None)
    if asked is None:
        return Against("escalation", "it was not asked to end first: put terminate before kill")
    if clock - asked < KILL_GRACE:
        text = f"it was asked to end {clock - asked:.0f}s ago, and has {KILL_GRACE:.0f}s to do it"
        return Against("escalation", text, asked + KILL_GRACE - clock)
    return None


def _killed(lately: Iterable[Deed], process: Identity) -> Against | None:
    if any((deed.process, deed.action) == (process, "kill") for deed in lately):
        return Against("unkillable", "it was killed before: no further signal can help")
    return None


def _restart_loop(ending: Iterable[Deed], process: Identity, action: str, signature: str) -> Against | None:
    if action not in DISRUPTIVE or not signature:
        return None
    others = {deed.process for deed in ending if deed.signature == signature} - {process}
    if len(others) < ENDED_PER_HOUR:
        return None
    return Against("restart loop", f"the same program was ended {len(others)} times within the hour and is back")


def _shorten(memory: dict[object, float] | dict[object, object]) -> None:
    """Forget the older half of a memory that has grown too long."""
    if len(memory) > REMEMBERED:
        for key in list(memory)[: REMEMBERED // 2]:
            del memory[key]
