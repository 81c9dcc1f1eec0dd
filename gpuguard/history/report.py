"""What GPUs were used for over a time: who claimed, used, left idle and waited for how much, and what it took.

Hours that were not watched are in no sum, and what is unknown is None or a column of its own, never 0.  Users, groups
and devices come from the usage store; what each claim took comes from the audit log, since the store knows no claims.
Does not read either: see queries and audit_log.  Does not write: see views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuguard.history.audit_log import Line, devices_of, facts_of
from gpuguard.history.queries import DeviceTotal, Point, Total, Usage, Waited, Watch

BY = ("user", "group", "device", "claim")
TIMES = ("claimed", "used", "idle", "unknown", "unclaimed")  # of a UsageRow, in GPU-seconds
WASTERS = 5


@dataclass(frozen=True)
class UsageRow:
    """What one user, one group or one device had, in GPU-seconds."""

    name: str
    uid: int | None = None  # of a user
    device: str | None = None  # uuid
    claimed: float = 0.0
    used: float = 0.0  # of the claimed time
    idle: float = 0.0  # of the claimed time
    unknown: float = 0.0  # of the claimed time: it is not known whether it was used
    unclaimed: float = 0.0  # used without a claim
    energy: float | None = None  # joules; None: they were not measured
    waiting: float | None = 0.0  # seconds with a request in the queue; None: not known
    wanted: float | None = 0.0  # GPU-seconds asked for while waiting

    @property
    def wasted(self) -> float:
        """What others could not have, or did not know of."""
        return self.idle + self.unclaimed


@dataclass(frozen=True)
class Report:
    """Everything that a report shows."""

    by: str
    watch: Watch
    users: tuple[UsageRow, ...]
    devices: tuple[DeviceTotal, ...]
    device_rows: tuple[UsageRow, ...]
    groups: tuple[UsageRow, ...] | None  # None: not asked for
    queue_unknown: float  # seconds in which the queue could not be read
    courses: Mapping[str, Mapping[str, tuple[Point, ...]]] = field(default_factory=dict)  # uuid -> metric -> points

    @property
    def rows(self) -> tuple[UsageRow, ...]:
        """By user, device or group, as was asked; none by claim."""
        return {"user": self.users, "device": self.device_rows, "group": self.groups or ()}.get(self.by, ())

    @property
    def wasters(self) -> tuple[UsageRow, ...]:
        """Users whose GPUs did the least for the most time."""
        users = sorted(self.users, key=lambda row: -row.wasted)
        return tuple(row for row in users[:WASTERS] if row.wasted > 0)


def usage_report(
    usage: Usage,
    by: str,
    begin: float,
    end: float,
    name_of: Callable[[int], str],
    groups_of: Callable[[int], Collection[str]],
    metrics: Iterable[str] = (),
) -> Report:
    """The report on a time.

    Args:
        usage: the store.
        by: one of BY.
        begin: unix time.
        end: unix time.
        name_of: uid -> the user's name.
        groups_of: uid -> names of the user's groups; asked for "group" alone.
        metrics: of the store, whose course over the time is wanted for each device.
    """
    watch = usage.watched(begin, end)
    waited = usage.waiting(begin, end)
    users = _users(usage.totals("user", begin, end), usage.energy(begin, end), waited, watch, name_of)
    devices = usage.devices(begin, end)
    by_device = {total.device: total for total in usage.totals("device", begin, end)}
    rows = []
    for device in devices:
        times = _times(by_device.get(device.device) or Total(0.0, 0.0, 0.0, 0.0))
        unknown: dict[str, Any] = {"waiting": None, "wanted": None}
        rows.append(UsageRow(device_label(device), None, device.device, energy=device.energy, **unknown, **times))
    return Report(
        by,
        watch,
        tuple(users),
        tuple(devices),
        tuple(rows),
        tuple(_groups(users, groups_of)) if by == "group" else None,
        _queue_unknown(waited),
        {
            device.device: {name: tuple(usage.series(device.device, name, begin, end)) for name in metrics}
            for device in devices
        }
        if metrics
        else {},
    )


def device_label(device: DeviceTotal) -> str:
    """``"GPU 3"``; one that has no index any more, and a MIG instance, is known by its uuid."""
    return device.device if device.index is None else f"GPU {device.index}"


def _queue_unknown(waited: Iterable[Waited]) -> float:
    return sum(wait.waiting for wait in waited if wait.uid is None)


def _users(
    totals: Iterable[Total],
    energy: Mapping[int, float | None],
    waited: Collection[Waited],
    watch: Watch,
    name_of: Callable[[int], str],
) -> list[UsageRow]:
    # Where the queue could never be read, it is not known of any user that they did not wait.
    is_known = _queue_unknown(waited) < watch.seen * 0.99
    rows: dict[int, UsageRow] = {}
    for total in totals:
        if total.uid is not None:
            row = UsageRow(name_of(total.uid), total.uid, energy=energy.get(total.uid))
            rows[total.uid] = replace(row, **_times(total))
    for wait in waited:
        if wait.uid is not None:
            # A user who only waited had no device that could take energy.
            row = rows.get(wait.uid) or UsageRow(name_of(wait.uid), wait.uid, energy=0.0)
            rows[wait.uid] = replace(row, waiting=wait.waiting, wanted=wait.wanted)
    if not is_known:
        return [replace(row, waiting=row.waiting or None, wanted=row.wanted or None) for row in rows.values()]
    return list(rows.values())


def _times(total: Total) -> dict[str, Any]:
    return {name: getattr(total, name) for name in TIMES}


def _groups(users: Iterable[UsageRow], groups_of: Callable[[int], Collection[str]]) -> list[UsageRow]:
    """The members of each group together; a user in several groups counts in each."""
    members: dict[str, list[UsageRow]] = {}
    for row in users:
        assert row.uid is not None
        for name in groups_of(row.uid) or ("(in no group)",):
            members.setdefault(name, []).append(row)
    return sorted((_summed(name, rows) for name, rows in members.items()), key=lambda row: -row.claimed)


def _summed(name: str, rows: Collection[UsageRow]) -> UsageRow:
    def total(field_name: str) -> float | None:
        values = [value for row in rows if (value := getattr(row, field_name)) is not None]
        return sum(values) if values else None

    times: dict[str, Any] = {part: sum(getattr(row, part) for row in rows) for part in TIMES}
    return UsageRow(name, energy=total("energy"), waiting=total("waiting"), wanted=total("wanted"), **times)


@dataclass(frozen=True)
class ClaimRow:
    """A claim that has ended."""

    id: str
    user: str | None
    devices: tuple[str, ...]  # uuids
    ended: float  # unix time
    seconds: float | None
    utilization: float | None  # percent, mean over the job and its devices
    energy: float | None  # joules
    peak_memory: int | None  # bytes, of the job
    exit_status: int | None
    command: str | None

    @property
    def gpu_seconds(self) -> float | None:
        """Its time, times its devices."""
        return None if self.seconds is None else self.seconds * len(self.devices)


def ended_claims(
    lines: Iterable[Line], begin: float, end: float, name_of: Callable[[int], str] = str
) -> tuple[list[ClaimRow], int]:
    """The claims that ended between two unix times, the largest first, and how many began there without an end.

    A claim counts in the time in which it ended, and whole.

    Args:
        lines: of the audit log.
        begin: unix time.
        end: unix time.
        name_of: uid -> the user's name, for jobs without one in their environment.
    """
    commands: dict[str, str] = {}
    begun: set[str] = set()
    rows: dict[str, ClaimRow] = {}
    ended: set[str] = set()
    for line in sorted(lines, key=lambda line: float(line["time_unix_seconds"])):
        claim, when = line.get("claim"), float(line["time_unix_seconds"])
        if not isinstance(claim, str):
            continue
        if line.get("kind") == "claim" and line.get("outcome") == "started":
            commands[claim] = str(line.get("message") or "")
            if begin <= when < end:
                begun.add(claim)
        elif line.get("kind") == "release" and "wall_time_seconds" in facts_of(line):
            ended.add(claim)
            if begin <= when < end:
                rows[claim] = _claim_row(claim, line, when, commands.get(claim), name_of)
    largest = sorted(rows.values(), key=lambda row: -(row.gpu_seconds or 0.0))
    return largest, len(begun - ended)


def _claim_row(claim: str, line: Line, when: float, command: str | None, name_of: Callable[[int], str]) -> ClaimRow:
    facts = facts_of(line)
    uid = _number(facts, "uid")
    peak, status = (_number(facts, name) for name in ("peak_memory_bytes", "exit_status"))
    user = line.get("user")
    return ClaimRow(
        claim,
        user if isinstance(user, str) else None if uid is None else name_of(int(uid)),
        tuple(devices_of(line)),
        when,
        _number(facts, "wall_time_seconds"),
        _number(facts, "mean_utilization_percent"),
        _number(facts, "energy_joules"),
        None if peak is None else int(peak),
        None if status is None else int(status),
        command or None,
    )


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    return float(value)
