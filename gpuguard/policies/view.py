"""The data a rule may judge by: the newest snapshot, who came first, what is one job, the past, facts about people.

Time comes from the snapshot.  Nothing in this module reads anything: watchdog and backtest fill the view.  A rule says
in its ``needs`` what it judges by: see rule.  Holes in the past are not filled in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from gpuguard.device_state import (
    Processes,
    claim_of,
    claims_by_device,
    claims_on,
    computes,
    grouped,
    innermost_claim,
    is_blamed_on,
    lock_identity,
    may_compute,
    started_by,
    usable_devices,
)
from gpuguard.locale.messages import sentence
from gpuguard.model import ClaimRecord, Device, Finding, Gap, GpuProcess, ProcessIdentity, Snapshot, Subject

if TYPE_CHECKING:
    from gpuguard.policies.rule import Rule

_GPU_MISSING = sentence("sample.gpu_missing", "the GPU is missing from the sample")
_OF_HOST = sentence("driver.memory_of_host", "its memory is the host's")
_NO_LIST = sentence("sample.no_process_list", "the driver gives no list of processes")
_IMPLAUSIBLE_LIST = sentence("sample.implausible_list", "the list of processes is not plausible")

Sample = tuple[float, float]  # (clock, value)
START_SLACK = 0.02  # seconds: start times and clocks are cut to ticks of 10 ms
_MaybeIdentified = tuple[int, float | None]  # pid, start_time; None: it could not be read
_OnDevice = tuple[object, ...]  # a claim on one device: see device_state.lock_identity()
_UTILIZATION: dict[str, Any] = dict.fromkeys(
    ("utilization", "memory_utilization", "encoder_utilization", "decoder_utilization")  # of devices and processes
)


@dataclass(frozen=True)
class HostUse:
    """The activity of a process beside the GPU.  None means unknown."""

    cpu: float | None = None  # percent of one core, since the sample before
    memory: int | None = None  # bytes resident
    network: float | None = None  # bytes per second of its network namespace or cgroup, since the sample before
    terminal: str | None = None  # "/dev/pts/3"; "" when it has none
    traced: bool | None = None  # by a debugger


@dataclass(frozen=True)
class UserUse:
    """What all processes of a user that can be read take of the machine together.  None means unknown."""

    user: str  # the name
    cpu: float | None = None  # percent of one core, since some seconds ago
    memory: int | None = None  # bytes; also unknown if no rule asks for so little


@dataclass(frozen=True)
class MachineUse:
    """The machine beside its GPUs.  None means unknown."""

    memory: int | None = None  # total bytes
    cores: int | None = None
    users: Mapping[int, UserUse] = field(default_factory=dict)  # by uid; no accounts of the system


# Who came first


@dataclass(frozen=True)
class _KnownList:
    """The last believable list of a device."""

    clock: float
    pids: frozenset[int]
    arrived: dict[ProcessIdentity, float | None]  # those whose start time is known -> see Arrivals.arrived()
    using: frozenset[_MaybeIdentified]  # those that use the device, or may use it: no desktops


@dataclass(frozen=True)
class _FirstSight:
    """A claim on one device when it was first seen."""

    clock: float  # a process that began later came after the claim
    there_first: frozenset[_MaybeIdentified] | None = None  # None: no list since then could be believed


@dataclass
class Arrivals:
    """The order in which processes and claims came to the devices of one machine, as far as snapshots show it.

    A claim that is made later must not turn an older process into a trespasser, and the time in a record is only its
    owner's word.  So this relies on what was seen: since when the driver's list of a device has each process, as far as
    that can be believed, and the first snapshot that shows a claim on a device.  engine.evaluate() feeds it, so that
    rehearsals agree with the daemon.  It holds for one boot: make a new one when the clock runs backwards.
    """

    _lists: dict[str, _KnownList] = field(default_factory=dict)  # by uuid
    _claims: dict[_OnDevice, _FirstSight] = field(default_factory=dict)
    _knows_claims: bool = False  # whether an earlier snapshot had all claims

    def look(self, snapshot: Snapshot) -> None:
        """Take in the next snapshot."""
        there = claims_by_device(snapshot)
        claims: dict[_OnDevice, _FirstSight] = {}
        for device in snapshot.devices:
            known = self._lists.get(device.uuid)
            now = _listed(device, known, snapshot.clock)
            for claim in there[device.uuid] if there else ():
                on_device = lock_identity(claim, device.uuid, device.parent_uuid)
                sight = self._claims.get(on_device) or _FirstSight(self._came(claim, snapshot))
                if sight.there_first is None and now is not None:
                    # A process on the first list that shows the claim may have come before it, or with it.
                    older = {process for process in now.using if (process[1] or 0.0) < sight.clock}
                    sight = _FirstSight(sight.clock, frozenset(older | (known.using if known else set())))
                claims[on_device] = sight
            if now is not None:
                self._lists[device.uuid] = now
        if there is not None:
            # A claim that was another one meanwhile, or belonged to no known user, counts as new when it comes back.
            self._claims, self._knows_claims = claims, True

    def arrived(self, device: str, process: ProcessIdentity) -> float | None:
        """Return CLOCK_BOOTTIME of the first list of *device* (a uuid) with that process, after one without its pid.

        The process lived when the list without its pid was read, so that no other process has had the pid since, and it
        has stood on every believable list after it.  None if that is not proven: its pid was there before, it is
        younger than the last list without it, or its row could not be identified once.
        """
        known = self._lists.get(device)
        return known.arrived.get(process) if known else None

    def was_there_before(self, claim: ClaimRecord, device: Device, process: GpuProcess) -> bool:
        """Whether *process* used *device* before *claim* came, or may have; a claim that was not seen yet is newer."""
        sight = self._claims.get(lock_identity(claim, device.uuid, device.parent_uuid))
        there_first = sight.there_first if sight and process.start_time is not None else None
        return there_first is None or not there_first.isdisjoint(
            {(process.pid, process.start_time), (process.pid, None)}
        )

    def _came(self, claim: ClaimRecord, snapshot: Snapshot) -> float:
        """Return the latest clock at which *claim*, which is new in *snapshot*, can have come.

        In the very first snapshot, when every claim is new, that is the time that the claim itself gives.
        """
        if self._knows_claims or claim.since is None:
            return snapshot.clock
        # Rounded, because unix times have lost their last digits.
        return min(snapshot.clock, round(snapshot.clock - (snapshot.taken_at - claim.since), 3))


def _listed(device: Device, before: _KnownList | None, clock: float) -> _KnownList | None:
    """Return the list of *device* that was read at *clock*, or None if it cannot be believed."""
    if device.processes is None or not device.processes_plausible:
        return None
    arrived: dict[ProcessIdentity, float | None] = {}
    for process in device.processes:
        if process.start_time is not None:
            identity = process.pid, process.start_time
            # A younger process may have the pid of another one that came meanwhile, ended, and is still listed.
            is_new = (
                before is not None
                and process.start_time < before.clock - START_SLACK
                and process.pid not in before.pids
            )
            arrived[identity] = clock if is_new else before.arrived.get(identity) if before else None
    # A process is not blamed later for what could not be read of it now.
    using = frozenset(
        (process.pid, process.start_time)
        for process in device.processes
        if may_compute(process, device) or (process.memory_used is None and not process.ended)
    )
    pids = frozenset(process.pid for process in device.processes)
    return _KnownList(clock, pids, arrived, using)


# What rules see


@dataclass(frozen=True)
class RuleView:
    """Everything that a rule may judge by."""

    snapshot: Snapshot  # with its claims
    # (subject, field) -> samples, oldest first, without gaps filled in; only what rules asked for
    past: Mapping[tuple[Subject, str], Sequence[Sample]] = field(default_factory=dict)
    # what processes do beside the GPU, by (pid, start_time)
    host: Mapping[tuple[int, float], HostUse] = field(default_factory=dict)
    machine: MachineUse = field(default_factory=MachineUse)
    # processes that the guard has stopped, which rest for that reason alone: see without_pauses
    paused: frozenset[tuple[int, float]] = frozenset()
    groups: Mapping[int, frozenset[str]] = field(default_factory=dict)  # uid -> names of the user's groups
    # uuid -> uids to which an outer scheduler has given the device; None if there is no scheduler
    scheduled: Mapping[str, frozenset[int]] | None = None
    # the processes of devices and claims with their ancestors, as far as they were looked up in /proc
    seen: Processes = field(default_factory=dict)
    # uid -> (window in seconds -> GPU-seconds claimed in it), from the usage store; {} when unknown
    gpu_seconds: Mapping[int, Mapping[float, float]] = field(default_factory=dict)
    arrivals: Arrivals = field(default_factory=Arrivals)  # the order in which processes and claims came
    accountable: Mapping[int, int] = field(default_factory=dict)  # uid -> the uid that answers for it; else itself
    suspended: float | None = None  # seconds for which the machine has slept since it was booted

    @property
    def clock(self) -> float:
        """CLOCK_BOOTTIME of the snapshot, seconds."""
        return self.snapshot.clock


def without_pauses(view: RuleView) -> RuleView:
    """Return *view* with the use of paused processes and of their GPUs as unknown.

    Otherwise they would be idle because the guard has paused them.
    """
    if not view.paused:
        return view

    def is_paused(row: GpuProcess) -> bool:
        return (row.pid, row.start_time) in view.paused

    devices = []
    for device in view.snapshot.devices:
        if device.processes and any(map(is_paused, device.processes)):
            rows = tuple(replace(row, **_UTILIZATION) if is_paused(row) else row for row in device.processes)
            device = replace(device, processes=rows, **_UTILIZATION)
        devices.append(device)
    resting = {
        process: replace(view.host[process], cpu=None, network=None) for process in view.paused & view.host.keys()
    }
    return replace(view, snapshot=replace(view.snapshot, devices=tuple(devices)), host={**view.host, **resting})


def without_host_memory(view: RuleView) -> RuleView:
    """Return *view* with the size of a GPU's memory, and what is free of it, as unknown where they are the host's.

    Otherwise programs that use no GPU could bring about a breach.
    """
    snapshot = view.snapshot
    shared = [device.uuid for device in snapshot.devices if device.memory_shared_with_host]
    if not shared:
        return view
    devices = tuple(
        replace(device, memory_total=None, memory_free=None) if device.memory_shared_with_host else device
        for device in snapshot.devices
    )
    gaps = tuple(Gap(uuid, name, _OF_HOST) for uuid in shared for name in ("memory_total", "memory_free"))
    return replace(view, snapshot=replace(snapshot, devices=devices, gaps=(*snapshot.gaps, *gaps)))


def process_subject(device: Device, process: GpuProcess) -> Subject:
    """Return a process on one device as a subject."""
    return Subject("process", device.uuid, process.pid, process.start_time, process.uid, user=process.user)


def device_subject(device: Device) -> Subject:
    """Return the device itself as a subject, no matter who uses it."""
    return Subject("device", device=device.uuid)


def claim_subject(record: ClaimRecord, device: Device | None = None) -> Subject:
    """Return a claim as a subject, on all of its devices or on one of them."""
    return Subject("claim", device.uuid if device else None, uid=record.uid, claim=record.id, user=record.user)


def judged_processes(device: Device) -> tuple[GpuProcess, ...]:
    """Return the processes of *device* that may be judged at all.

    These are only processes whose identity is known, and none of a list that is not plausible.
    """
    if not device.processes_plausible or not device.processes:
        return ()
    return tuple(process for process in device.processes if None not in (process.start_time, process.uid))


def computing(device: Device) -> tuple[GpuProcess, ...]:
    """Return the processes of *device* that may be judged and that surely compute there, but no desktops."""
    return tuple(process for process in judged_processes(device) if computes(process, device))


def computing_processes(view: RuleView) -> Iterator[tuple[Device, GpuProcess]]:
    """Yield each computing process on each device; a divided device has only those of its instances."""
    for device in usable_devices(view.snapshot):
        for process in computing(device):
            yield device, process


def uses_of(view: RuleView, device: Device, per: str) -> Iterator[tuple[Subject, int | None, tuple[GpuProcess, ...]]]:
    """Yield each subject of kind *per* on *device*: the device, a process, a user, or a claim with its processes.

    With it come the bytes of memory that it uses, and the processes that an action would mean.

    If a user has two claims, it is unknown which process belongs to which, unless the claims share the device and the
    processes were started below them.
    """
    if per == "device":
        yield device_subject(device), device.memory_used, ()
        return
    processes = computing(device)
    if per == "process":
        for process in processes:
            yield process_subject(device, process), process.memory_used, (process,)
    elif per == "user":
        for own in grouped([(process.uid, process) for process in processes]).values():
            subject = Subject("user", device=device.uuid, uid=own[0].uid, user=own[0].user)
            yield subject, _known_memory(own), tuple(own)
    else:
        claims = claims_on(view.snapshot, device)
        for claim in claims:
            alone = sum(other.uid == claim.uid for other in claims) == 1
            if claim.uid >= 0 and (alone or claim.slots):
                made_by = claim_of if alone else started_by
                own = [
                    process
                    for process in processes
                    if made_by(process, claims, view.seen) == claim and is_blamed_on(process, claim, view.seen)
                ]
                yield claim_subject(claim, device), _known_memory(own), tuple(own)


def _known_memory(processes: Sequence[GpuProcess]) -> int | None:
    """Return the memory that is known to be used, or None: never too much, so that it accuses no user wrongly."""
    known = [process.memory_used for process in processes if process.memory_used is not None]
    return sum(known) if known else None


def findings_where(
    rule: str,
    view: RuleView,
    per: str,
    why: Callable[[Device, Subject, int | None, tuple[GpuProcess, ...]], str | None],
) -> list[Finding]:
    """Return a finding for each subject of the kind *per* on each device for which *why* says something."""
    return [
        Finding(rule, subject, text, processes)
        for device in usable_devices(view.snapshot)
        for subject, memory, processes in uses_of(view, device, per)
        if (text := why(device, subject, memory, processes))
    ]


@dataclass(frozen=True)
class SampleIndex:
    """A view, laid out so that everything about a device, a process, a claim or a user is found at once.

    It has only what may be judged: plausible lists, processes whose identity is known, claims that live.
    """

    view: RuleView  # what was seen
    clock: float  # CLOCK_BOOTTIME of the snapshot, seconds
    zone: float  # seconds east of UTC
    devices: Mapping[str, Device]  # by uuid
    # by (pid, start_time): the devices on which it runs, and what the driver says of it there
    processes: Mapping[ProcessIdentity, Mapping[str, GpuProcess]]
    # living ones by uid and id, as a subject names them; an id alone can be copied by another user
    claims: Mapping[tuple[int | None, str | None], ClaimRecord]
    claims_on: Mapping[str, Sequence[ClaimRecord]]  # living ones by device
    territory: Mapping[int, set[str]]  # the devices where a user has a process or a claim, by uid
    # field -> reason by device; under None, the gaps of the whole machine
    gaps: Mapping[str | None, Mapping[str, str]]

    @cached_property
    def jobs(self) -> Mapping[tuple[int, str], Mapping[ProcessIdentity, GpuProcess]]:
        """The processes of each claimed job, by uid and id of the claim."""
        found: dict[tuple[int, str], dict[ProcessIdentity, GpuProcess]] = {}
        for identity, places in self.processes.items():
            process = next(iter(places.values()))
            if claim := innermost_claim(process, self.view.snapshot.claims, self.view.seen):
                found.setdefault((claim.uid, claim.id), {})[identity] = process
        return found

    def blindness(self, uuid: str) -> str | None:
        """Return why the processes of a device cannot be judged, or None if they can."""
        device = self.devices.get(uuid)
        if device is None:
            return _GPU_MISSING
        if device.processes is None:
            gaps = self.gaps.get(uuid, {})
            return gaps.get("processes") or gaps.get("device") or _NO_LIST
        return None if device.processes_plausible else _IMPLAUSIBLE_LIST


def index_sample(view: RuleView, zone: float = 0.0) -> SampleIndex:
    """Lay out one sample."""
    view = without_host_memory(without_pauses(view))
    snapshot = view.snapshot
    processes: dict[ProcessIdentity, dict[str, GpuProcess]] = {}
    territory: dict[int, set[str]] = {}
    for device in snapshot.devices:
        for process in judged_processes(device):
            # judged_processes() leaves out the others.
            assert process.start_time is not None and process.uid is not None
            processes.setdefault((process.pid, process.start_time), {})[device.uuid] = process
            territory.setdefault(process.uid, set()).add(device.uuid)
    # A claim without a readable record has no owner: no user is judged by it.
    claims: dict[tuple[int | None, str | None], ClaimRecord] = {
        (claim.uid, claim.id): claim for claim in snapshot.claims if claim.alive and claim.uid >= 0
    }
    claims_on: dict[str, list[ClaimRecord]] = {}
    for claim in claims.values():
        territory.setdefault(claim.uid, set()).update(claim.devices)
        for uuid in claim.devices:
            claims_on.setdefault(uuid, []).append(claim)
    gaps: dict[str | None, dict[str, str]] = {}
    for gap in snapshot.gaps:
        gaps.setdefault(gap.device, {})[gap.field] = gap.reason
    devices = {device.uuid: device for device in snapshot.devices}
    return SampleIndex(view, snapshot.clock, zone, devices, processes, claims, claims_on, territory, gaps)


def reach_of(subject: Subject, processes: Sequence[GpuProcess], index: SampleIndex) -> tuple[str, ...]:
    """Return the devices that are touched when an action is taken on *subject* and *processes*."""
    reach = {subject.device} if subject.device else set()
    for process in processes:
        if process.start_time is not None:
            reach.update(index.processes.get((process.pid, process.start_time), ()))
    claim = index.claims.get((subject.uid, subject.claim))
    if claim is not None and (subject.kind == "claim" or not reach):
        reach.update(claim.devices)
    if not reach and subject.uid is not None:
        reach.update(index.territory.get(subject.uid, ()))
    return tuple(sorted(reach))


# Which processes form one job: the guard counts a job once, and ends it whole.
#
# With a claim, a job is the processes that hold the lock of the innermost one, or were started below such a process.
# Without one, it is the processes that share a process group; or that share a parent that only starts programs, the
# program, and the time of the start: a launcher whose ranks have groups of their own.  A job belongs to one user.  A
# process that only may belong to a claim, or of which nothing is known, is a job by itself.
#
# Where a rule finds a part of a claimed job, all of it ends.  Without a claim no process ends that no rule has found.


TOGETHER_SECONDS = 60.0  # a launcher starts its ranks within these


@dataclass(frozen=True)
class JobMember:
    """A process, and what it shares with the others of its job."""

    process: ProcessIdentity
    job: str  # its claim or its process group, with its user
    launch: str = ""  # its parent and program, with its user, where that parent only starts programs

    def belongs_with(self, other: JobMember) -> bool:
        """Whether both are known to belong to one job."""
        together = abs(self.process[1] - other.process[1]) <= TOGETHER_SECONDS
        return self.job == other.job or (together and self.launch == other.launch != "")


Jobs = Mapping[JobMember, str]  # the job of each process, by a name for it


def alone(process: ProcessIdentity) -> JobMember:
    """Return a member of a job by itself: *process* is not known to share anything."""
    return JobMember(process, f"process {process}")


def member_of(process: GpuProcess, view: RuleView) -> JobMember:
    """Return *process* with what it shares with others of its job."""
    identity = process.pid, -1.0 if process.start_time is None else process.start_time
    stat, user = view.seen.get(process.pid), f"of {process.uid}"
    if stat is None or process.uid is None or stat.start_time != process.start_time:
        return alone(identity)
    if claim := innermost_claim(process, view.snapshot.claims, view.seen):
        return JobMember(identity, f"claim {claim.id} {user}")
    parent = view.seen.get(stat.parent)
    launches = parent and stat.parent > 1 and parent.session != stat.parent and not parent.is_shell
    launch = f"{process.executable} by {stat.parent}@{parent.start_time} {user}" if parent and launches else ""
    group = f"group {stat.group} {user}" if stat.group else alone(identity).job
    return JobMember(identity, group, launch if process.executable else "")


def identities(processes: Iterable[GpuProcess]) -> frozenset[ProcessIdentity]:
    """Return (pid, start time) of each process whose start is known."""
    return frozenset((process.pid, process.start_time) for process in processes if process.start_time is not None)


def jobs_of(members: Iterable[JobMember]) -> Jobs:
    """Return what stands for the job of each of *members*, the same text for all members of one job."""
    jobs = {member: member.job for member in members}
    merged: dict[str, str] = {}

    def merged_into(job: str) -> str:
        while job in merged:
            job = merged[job]
        return job

    def merge(one: str, other: str) -> None:
        one, other = merged_into(one), merged_into(other)
        if one != other:
            merged[other] = one

    first: dict[ProcessIdentity, str] = {}  # a process stays in its job even if its claim or group has changed by now
    for member, job in jobs.items():
        merge(first.setdefault(member.process, job) if member.process[0] > 0 else job, job)
    launched = sorted((member for member in jobs if member.launch), key=lambda each: (each.launch, each.process[1]))
    for before, member in pairwise(launched):
        if before.belongs_with(member):
            merge(before.job, member.job)
    return {member: merged_into(job) for member, job in jobs.items()}


# The past of values


PROCESS_FIELDS = frozenset({"memory_used"})  # the others are recorded per device only

# Samples per series.  A day at one per second would be 7 MB for each device and process; 170 kB are enough to see a
# trend by, and a mean over 42 s of a day hides nothing that a rule about a day would ask for.
MOST = 2048

LARGEST_DISTANCE = 3  # intervals between two samples: whatever happened in a longer pause was not seen
REMEMBERED_DISTANCES = 9
FEWEST_IN_WINDOW = 10  # samples: if a window has fewer, it is unknown how the time was spent
LARGEST_HOLE = 1.02 / FEWEST_IN_WINDOW  # of a window
LATE = 1.5  # intervals between two samples, if a window has just enough of them, because no sample comes on the dot
PROBES = 64  # places of a series at which holes are looked for


class SampleRhythm:
    """The distances between samples, to tell a pause from a slow rhythm."""

    def __init__(self) -> None:
        self.clock: float | None = None
        self._distances: deque[float] = deque(maxlen=REMEMBERED_DISTANCES)

    def largest(self, interval: float | None) -> float:
        """Return the longest distance in seconds that is no pause, or infinity while no rhythm is known."""
        usual = interval if interval is not None else median(self._distances) if self._distances else float("inf")
        return usual * LARGEST_DISTANCE

    def beat(self, clock: float) -> None:
        """Note that a sample was taken at *clock*."""
        if self.clock is not None and clock > self.clock:
            self._distances.append(clock - self.clock)
        self.clock = clock


class ValueSeries(list[Sample]):
    """The samples (clock, value) of the last *window* seconds, oldest first, at most MOST of them.

    If more samples came than that, each entry stands for a slice of time: its last clock and the mean of its values.
    """

    def __init__(self, window: float) -> None:
        super().__init__()
        self.window = window
        self._opened, self._members = 0.0, 0  # the newest slice: its first clock, and its number of samples

    def add(self, clock: float, value: float) -> None:
        """Add a sample, and forget those that are now older than the window."""
        if self._members and clock - self._opened < self.window / MOST:
            self._members += 1
            mean = self[-1][1]
            self[-1] = (clock, mean + (value - mean) / self._members)
        else:
            self._opened, self._members = clock, 1
            self.append((clock, value))
        del self[: bisect_left(self, clock - self.window, key=clock_of)]


class Past(dict[tuple[Subject, str], ValueSeries]):
    """The series of each (subject, field)."""

    def record(self, snapshot: Snapshot, windows: Mapping[str, float], largest_hole: float) -> None:
        """Add what *snapshot* knows of the fields in *windows* (field -> seconds).

        A series with a hole longer than *largest_hole* starts afresh.  A series that no rule asks for any more, or
        that got no value for a whole window, is forgotten.
        """
        clock = snapshot.clock
        for key, value in _values(snapshot, windows):
            series = self.get(key)
            if series is None or clock - series[-1][0] > largest_hole:
                series = self[key] = ValueSeries(windows[key[1]])
            series.window = windows[key[1]]
            series.add(clock, value)
        for key, series in list(self.items()):
            if series[-1][0] < clock - windows.get(key[1], -1.0):
                del self[key]


def windows_of(rules: Iterable[Rule]) -> dict[str, float]:
    """Return the longest past in seconds that any of *rules* needs, by field."""
    return dict(sorted(past for rule in rules for past in rule.needs.past))  # of one field the longest comes last


def _values(snapshot: Snapshot, names: Collection[str]) -> Iterator[tuple[tuple[Subject, str], float]]:
    """Yield the value of each field of *names* that is known, with its (subject, field)."""
    of_processes = PROCESS_FIELDS.intersection(names)
    for device in snapshot.devices if names else ():
        nouns: list[tuple[Subject, object, Collection[str]]] = [(device_subject(device), device, names)]
        if of_processes:
            nouns += ((process_subject(device, each), each, of_processes) for each in judged_processes(device))
        for subject, noun, fields in nouns:
            for name in fields:
                if (value := getattr(noun, name, None)) is not None:
                    yield (subject, name), value


def recent(view: RuleView, subject: Subject, field: str, seconds: float) -> list[Sample]:
    """Return the samples of the last *seconds*, or [] unless they cover that time without a large hole."""
    series = view.past.get((subject, field), ())
    first = bisect_left(series, view.clock - seconds, key=clock_of)
    return [series[place] for place in range(first, len(series))] if covers(series, first, view.clock, seconds) else []


def clock_of(sample: Sample) -> float:
    """Return when *sample* was taken."""
    return sample[0]


def covers(series: Sequence[Sample], first: int, now: float, seconds: float) -> bool:
    """Return whether *series*, from the place *first* on, covers the last *seconds* without a large hole."""
    if first == len(series):
        return False
    count = len(series) - first
    step = -(-count // PROBES)
    clocks = [now - seconds, *(series[place][0] for place in range(first, len(series), step)), series[-1][0], now]
    largest = max(LARGEST_HOLE, LATE / (count - 1)) if count >= FEWEST_IN_WINDOW else LARGEST_HOLE
    return max(later - earlier for earlier, later in pairwise(clocks)) <= largest * seconds
