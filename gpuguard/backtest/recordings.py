"""Recorded samples for rehearsals: a recording of `gpuguard record`, or a table in CSV.

A sample of a recording is a RuleView: the snapshot with its claims, what processes do beside the GPU, which user is in
which groups, and which process descends from which.  It does not hold what an outer scheduler gave out, nor the
GPU-hours of the past.  See backends.replay for the file.  A table has one row per time, job and device:

    time_seconds,host,device,job,user,groups,kind,utilization_percent,memory_bytes,temperature_celsius,power_watts

Only time_seconds and job are required.  Columns may stand in any order, and an empty cell is unknown.  Rows with the
same host share that machine; rows with a device but no host all belong to one machine; without both columns, every job
had a device and a machine of its own.  Judges nothing: see backtest.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import groupby, pairwise
from math import isfinite
from statistics import median
from typing import Any

from gpuguard.backends import replay
from gpuguard.device_state import grouped
from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.files import open_file
from gpuguard.jsonio import decode
from gpuguard.locale import _
from gpuguard.locale.messages import sentence
from gpuguard.model import Device, Gap, GpuProcess, ProcessIdentity, ProcessStat, Snapshot
from gpuguard.policies.view import HostUse, MachineUse, RuleView, UserUse

# Name of a column -> what it holds, and the factor for its numbers.  pod, t_s, util and mem_mib are the names in the
# traces of alibaba/clusterdata.
COLUMNS: Mapping[str, tuple[str, float]] = {
    "time_seconds": ("time", 1), "t_s": ("time", 1),
    "job": ("job", 1), "pod": ("job", 1),
    "host": ("host", 1), "device": ("device", 1), "user": ("user", 1),
    "groups": ("groups", 1), "kind": ("kind", 1),
    "utilization_percent": ("utilization", 1), "util": ("utilization", 1),
    "memory_bytes": ("memory", 1), "memory_mib": ("memory", 2**20), "mem_mib": ("memory", 2**20),
    "temperature_celsius": ("temperature", 1), "power_watts": ("power", 1),
}  # fmt: skip
_NO_CLAIMS = sentence("recording.no_claims", "the recording does not tell who had claimed what")
_TEXTS = frozenset({"job", "host", "device", "user", "groups", "kind"})
_KINDS = ("batch", "interactive", "container")
_UIDS_FROM = 100_000  # for users who exist only in a recording
_FIRST_PID = 1000
_CLOCK = 1e6  # at time 0, as on a machine that was up for 11 days; a clock of 0 would mean one that is booting
_LATEST = 1e10  # the year 2286: a larger time is in milliseconds
_UNIX = 1e8  # a time from here on (in 1973) is unix time; a smaller one counts from the start of the recording


@dataclass(frozen=True)
class RecordedRow:
    """One sample of one job on one device.  None = unknown."""

    time: float  # seconds
    job: str  # "" = no job uses the device
    host: str
    device: str
    user: str
    groups: str = ""  # names with blanks between them
    kind: str = "batch"  # or interactive, container
    utilization: float | None = None  # percent
    memory: float | None = None  # bytes
    temperature: float | None = None
    power: float | None = None


@dataclass(frozen=True)
class Recording:
    """The content of a recording or a table."""

    rows: tuple[RecordedRow, ...]  # in order of time
    interval: float  # seconds between two samples of the same job, the median
    columns: frozenset[str]  # what the file holds: time, job, utilization, ...
    people: Mapping[str, int] = field(default_factory=dict)  # user name -> uid, if the file holds that
    # returns the samples of each host, where the rows are not all that was recorded
    replayed: Callable[[], Iterator[Iterator[RuleView]]] | None = None
    # names the job of a process in a sample
    job_of: Callable[[GpuProcess], str] = lambda process: (process.command or ("",))[0]

    @property
    def start(self) -> float:
        """Time of the first sample."""
        return self.rows[0].time

    @property
    def dated(self) -> bool:
        """Whether the times are unix times."""
        return self.start >= _UNIX

    def jobs(self) -> dict[tuple[str, str], list[RecordedRow]]:
        """Return (host, job) -> its samples, in order of time."""
        return grouped(((row.host, row.job), row) for row in self.rows if row.job)

    def holes(self, longest: float) -> int:
        """Count the pauses of more than *longest* seconds between two samples of the same job."""
        return sum(distance > longest for distance in _distances(self.rows))


def read_recording(path: str, advance: Callable[[float], None] = lambda share: None) -> Recording:
    """Read a file of `gpuguard record`, or a table with a header; *advance* gets the share that has been read, 0 to 1.

    Raises:
        InvalidRequest: it is a table that cannot be understood, or has fewer than two samples.
        BackendError: it is a recording that cannot be read.
    """
    try:
        with open_file(path) as file:
            compressed = file.read(2) == b"\x1f\x8b"
        if compressed:
            return _read_recorded(path, advance)
        with TextIOWrapper(open_file(path), "utf-8-sig", newline="") as lines:
            rows, columns = _rows(path, _told(lines, os.stat(path).st_size or 1, advance))
    except OSError as error:
        raise InvalidRequest(
            _("{path} cannot be read: {strerror}.").format(path=path, strerror=error.strerror)
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(_("{path} is not CSV in UTF-8: {error}.").format(path=path, error=error)) from error
    distances = _distances(rows)
    if not distances:
        raise InvalidRequest(_("{path} has no job with two samples: there is nothing to judge.").format(path=path))
    return Recording(tuple(rows), median(distances), columns)


def _told(lines: Iterable[str], size: int, advance: Callable[[float], None]) -> Iterator[str]:
    """Yield *lines* of a file of *size* bytes, and tell *advance* the share that has been read."""
    read = 0
    for line in lines:
        read += len(line)
        advance(read / size)
        yield line


def _rows(path: str, lines: Iterable[str]) -> tuple[list[RecordedRow], frozenset[str]]:
    reader = csv.reader(lines)
    header = [name.strip().lower() for name in next(reader, [])]
    places = {COLUMNS[name][0]: (place, COLUMNS[name][1]) for place, name in enumerate(header) if name in COLUMNS}
    if len(places) < sum(name in COLUMNS for name in header):
        raise InvalidRequest(_("{path}:1: two columns say the same: keep one of them.").format(path=path))
    for column, name in (("time", "time_seconds"), ("job", "job")):
        if column not in places:
            raise InvalidRequest(
                _("{path}:1: there is no column {name!r}.\nKnown columns: {columns}.").format(
                    path=path, name=name, columns=", ".join(COLUMNS)
                )
            )
    rows = [_row(f"{path}:{reader.line_num}", cells, places) for cells in reader if cells]
    rows.sort(key=lambda row: row.time)
    return rows, frozenset(places)


def _row(place: str, cells: list[str], places: Mapping[str, tuple[int, float]]) -> RecordedRow:
    texts = dict.fromkeys(_TEXTS, "")
    numbers: dict[str, float | None] = {}
    for column, (index, scale) in places.items():
        cell = cells[index].strip() if index < len(cells) else ""
        if column in _TEXTS:
            texts[column] = cell
        else:
            numbers[column] = _number(place, column, cell, scale)
    time = numbers.pop("time")
    if time is None:
        raise InvalidRequest(_("{place}: the time is missing.").format(place=place))
    if time > _LATEST:
        raise InvalidRequest(_("{place}: the time {time:g} is not in seconds.").format(place=place, time=time))
    if texts["kind"] not in ("", *_KINDS):
        raise InvalidRequest(
            _("{place}: kind: {kind!r} is none of {kinds}.").format(
                place=place, kind=texts["kind"], kinds=", ".join(_KINDS)
            )
        )
    own = "" if "device" in places or "host" in places else texts["job"]
    return RecordedRow(
        time,
        texts["job"],
        texts["host"] or own or "recording",
        texts["device"] or texts["job"],
        texts["user"] or texts["job"],
        texts["groups"],
        texts["kind"] or "batch",
        **numbers,
    )


def _number(place: str, column: str, cell: str, scale: float) -> float | None:
    if not cell:
        return None
    try:
        number = float(cell) * scale
    except ValueError:
        raise InvalidRequest(
            _("{place}: {column}: {cell!r} is not a number.").format(place=place, column=column, cell=cell)
        ) from None
    if not isfinite(number) or (column != "temperature" and number < 0):
        raise InvalidRequest(
            _("{place}: {column}: {cell!r} is not possible; leave unknown cells empty.").format(
                place=place, column=column, cell=cell
            )
        )
    return number


def _distances(rows: Iterable[RecordedRow]) -> list[float]:
    times = grouped(((row.host, row.device, row.job), row.time) for row in rows)
    return [later - earlier for seen in times.values() for earlier, later in pairwise(seen) if later > earlier]


Numbering = Callable[[str], int]  # gives each name a number of its own


def _numbering(first: int, known: Mapping[str, int] | None = None) -> Numbering:
    """Number names upwards from *first*, in the order in which they are asked for; *known* names keep their numbers."""
    numbers = dict(known or {})
    return lambda name: numbers.setdefault(name, first + len(numbers))


def people(known: Mapping[str, int] | None = None) -> Numbering:
    """Give user names uids, although the users need not exist on this machine; users in *known* keep theirs."""
    numbers = {"root": 0, **(known or {})}
    return _numbering(max(_UIDS_FROM, *(uid + 1 for uid in numbers.values())), numbers)


def views_of(recording: Recording, uid_of: Numbering) -> Iterator[Iterator[RuleView]]:
    """Yield the samples of each machine, the oldest first; *uid_of* gives user names their uids."""
    if recording.replayed:
        yield from recording.replayed()
        return
    for host, rows in grouped((row.host, row) for row in recording.rows).items():
        yield _views_of_table(host, rows, recording, uid_of)


def _views_of_table(host: str, rows: list[RecordedRow], recording: Recording, uid_of: Numbering) -> Iterator[RuleView]:
    pid_of, index_of = _numbering(_FIRST_PID), _numbering(0)
    begun: dict[str, float] = {}
    for now in _together(rows, recording.interval / 2):
        at = now[0].time
        clock = at + _CLOCK - recording.start
        host_uses: dict[ProcessIdentity, HostUse] = {}
        devices = []
        for name, there in groupby(sorted(now, key=lambda row: row.device), key=lambda row: row.device):
            here = list(there)
            processes = []
            for row in here:
                if row.job:
                    identity = pid_of(row.job), begun.setdefault(row.job, clock)
                    host_uses[identity] = HostUse(terminal="/dev/pts/0" if row.kind == "interactive" else "")
                    processes.append(_process(row, identity, uid_of))
            devices.append(_device(index_of(name), name, here, tuple(processes)))
        # The claims of that time are unknown, so a rule that asks about them must find nothing.
        gap = Gap(None, "claims", _NO_CLAIMS)
        snapshot = Snapshot(host, "recording", at, clock, tuple(devices), (gap,))
        groups = (
            {uid_of(row.user): frozenset(row.groups.split()) for row in now} if "groups" in recording.columns else {}
        )
        yield RuleView(snapshot, host=host_uses, groups=groups)


def _together(rows: list[RecordedRow], slack: float) -> Iterator[list[RecordedRow]]:
    """Group rows into samples of the machine: recorders read one device after the other, so their times differ."""
    now: list[RecordedRow] = []
    seen: set[tuple[str, str]] = set()
    for row in rows:
        key = row.device, row.job
        if now and (key in seen or row.time - now[0].time > slack):
            yield now
            now, seen = [], set()
        now.append(row)
        seen.add(key)
    if now:
        yield now


def _process(row: RecordedRow, identity: ProcessIdentity, uid_of: Numbering) -> GpuProcess:
    return GpuProcess(
        identity[0],
        None if row.memory is None else int(row.memory),
        start_time=identity[1],
        uid=uid_of(row.user),
        user=row.user,
        command=(row.job,),
        container="recorded" if row.kind == "container" else None,
    )


def _device(index: int, name: str, rows: list[RecordedRow], processes: tuple[GpuProcess, ...]) -> Device:
    memory = [row.memory for row in rows]
    known = [row.utilization for row in rows if row.utilization is not None]
    return Device(
        index,
        f"GPU-{name}",
        processes=processes,
        utilization=max(known, default=None),
        memory_used=None if None in memory else int(sum(used for used in memory if used is not None)),
        temperature=rows[0].temperature,
        power_draw=rows[0].power,
    )


def _read_recorded(path: str, advance: Callable[[float], None]) -> Recording:
    rows: list[RecordedRow] = []
    times: list[float] = []
    uids: dict[str, int] = {}
    for view in views(path, advance):
        times.append(view.snapshot.taken_at)
        for device in view.snapshot.devices:
            for process in device.processes or ():
                rows.append(
                    RecordedRow(
                        view.snapshot.taken_at,
                        _job_name(process),
                        view.snapshot.host,
                        device.uuid,
                        process.user or "unknown",
                        utilization=device.utilization if process.utilization is None else process.utilization,
                        memory=process.memory_used,
                        temperature=device.temperature,
                        power=device.power_draw,
                    )
                )
                if process.user is not None and process.uid is not None:
                    uids.setdefault(process.user, process.uid)
        for claim in view.snapshot.claims:
            if claim.uid >= 0:
                uids.setdefault(claim.user, claim.uid)
    distances = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    if not distances:
        raise InvalidRequest(_("{path} has fewer than two samples: there is nothing to judge.").format(path=path))
    if not rows:  # rows without a job give an idle machine a beginning, an end and no pause between them
        rows = [RecordedRow(time, "", "", "", "") for time in times]

    def replayed() -> Iterator[Iterator[RuleView]]:
        for host in dict.fromkeys(view.snapshot.host for view in views(path)):
            yield (view for view in views(path) if view.snapshot.host == host)

    columns = frozenset(column for column, _ in COLUMNS.values())
    return Recording(tuple(rows), median(distances), columns, uids, replayed, _job_name)


def _job_name(process: GpuProcess) -> str:
    """Return a readable name that no other process of the recording has."""
    program = (process.command or ("process",))[0].rpartition("/")[2] or "process"
    started = "" if process.start_time is None else f"@{process.start_time:.2f}"
    return f"{program} {process.pid}{started}"


def pack(view: RuleView) -> dict[str, Any]:
    """Return a sample as plain values."""
    return {
        "snapshot": replay.pack(view.snapshot),
        "host": {
            f"{pid}@{start}": {name: value for name, value in vars(use).items() if value is not None}
            for (pid, start), use in view.host.items()
        },
        "machine": vars(view.machine) | {"users": {str(uid): vars(use) for uid, use in view.machine.users.items()}},
        "groups": {str(uid): sorted(names) for uid, names in view.groups.items()},
        "seen": {
            str(pid): stat and [stat.parent, stat.state, stat.start_time, stat.inner_pid]
            for pid, stat in view.seen.items()
        },
        "process_groups": {
            str(pid): [stat.group, stat.session, stat.is_shell] for pid, stat in view.seen.items() if stat
        },
    }


@dataclass(frozen=True)
class _PackedMachine:
    memory: int | None = None
    cores: int | None = None
    users: dict[str, UserUse] = field(default_factory=dict)  # by uid


@dataclass(frozen=True)
class _PackedPeople:
    """The part of a sample beside its snapshot, in the form that it has in JSON."""

    host: dict[str, HostUse] = field(default_factory=dict)  # by pid@start_time
    machine: _PackedMachine = field(default_factory=_PackedMachine)
    groups: dict[str, frozenset[str]] = field(default_factory=dict)
    seen: dict[str, tuple[int, str, float | None, int | None] | None] = field(default_factory=dict)
    process_groups: dict[str, tuple[int, int, bool]] = field(default_factory=dict)  # absent in older recordings


def unpack(sample: Mapping[str, Any]) -> RuleView:
    """Rebuild the view that pack() turned into plain values.  Raises BackendError."""
    snapshot = replay.unpack(sample.get("snapshot"))
    try:
        packed = decode(_PackedPeople, sample)
        named = ((key.split("@"), use) for key, use in packed.host.items())
        host = {(int(pid), float(start_time)): use for (pid, start_time), use in named}
        groups = {int(uid): names for uid, names in packed.groups.items()}
        seen = {
            int(pid): ProcessStat(*facts, None, *packed.process_groups.get(pid, ())) if facts else None
            for pid, facts in packed.seen.items()
        }
        users = {int(uid): use for uid, use in packed.machine.users.items()}
        machine = MachineUse(packed.machine.memory, packed.machine.cores, users)
        return RuleView(snapshot, host=host, machine=machine, groups=groups, seen=seen)
    except ValueError as error:
        raise BackendError(
            sentence(
                "recording.processes",
                "what this recording says of processes cannot be understood: {error}.",
                error=f"{error!r:.100}",
            )
        ) from None


def views(path: str, advance: Callable[[float], None] = lambda share: None) -> Iterator[RuleView]:
    """Yield the samples of a recording, the oldest first.  Raises BackendError."""
    return map(unpack, replay.read_samples(path, advance))
