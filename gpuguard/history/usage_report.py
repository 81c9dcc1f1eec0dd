"""How GPUs were used over a period: what each user claimed, used, left idle and waited for, and the energy it took.

Hours that were not watched are in no sum, and unknown values are None or have a column of their own; they are never 0.
Users, groups and devices come from the usage store.  The cost of each claim, and what policies did to users, come from
the audit log, because the store knows neither.  Does not read either: see queries and audit_log.  Does not write: see
views.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuguard.device_state import grouped
from gpuguard.history.audit_log import Line, devices_of, facts_of, uids_of
from gpuguard.history.queries import TIMES, DeviceTotal, Point, Usage, Watch
from gpuguard.history.store_schema import NOBODY_KNOWS
from gpuguard.jsonio import sound_fields
from gpuguard.model import ClaimRecord

FROM_LOG = ("claim", "policy")
BY = ("user", "group", "device", *FROM_LOG)
_SUMMED = (*TIMES, "energy", "waiting", "wanted")  # fields that are added up for the members of a group
WASTERS = 5


@dataclass(frozen=True)
class UsageRow:
    """What one user, one group or one device had, in GPU-seconds."""

    name: str
    uid: int | None = None  # of a user
    device: str | None = None  # uuid
    host: str | None = None  # or None for this machine, as in all rows
    claimed: float = 0.0
    used: float = 0.0  # of the claimed time
    idle: float = 0.0  # of the claimed time
    unknown: float = 0.0  # of the claimed time; nothing tells whether it was used
    unclaimed: float = 0.0  # used without a claim
    energy: float | None = None  # joules, or None if they were not measured
    waiting: float | None = 0.0  # seconds with a request in the queue, or None if that is unknown
    wanted: float | None = 0.0  # GPU-seconds asked for while waiting


@dataclass(frozen=True)
class Report:
    """Everything that a report shows."""

    by: str
    watch: Watch
    rows: Sequence[UsageRow]  # by user, device or group, as requested; empty if the report comes from the log
    users: Sequence[UsageRow]  # summed over all hosts if there are several
    devices: Sequence[DeviceTotal]
    queue_unknown: float  # seconds in which the queue could not be read
    courses: Mapping[str, Mapping[str, Sequence[Point]]] = field(default_factory=dict)  # uuid -> metric -> points
    claims: Sequence[ClaimRow] | None = None  # if the report is by claim, else None
    claims_without_end: int | None = None  # how many more claims began without a known end
    policies: Sequence[PolicyRow] | None = None  # if the report is by policy, else None
    watches: Mapping[str, Watch] = field(default_factory=dict)  # host -> its watch; empty if it is about this machine
    sums: Sequence[UsageRow] = ()  # by user or group, over several hosts

    @property
    def wasters(self) -> list[UsageRow]:
        """Users with the most GPU time idle (others could not have it) or unclaimed (others did not know of it)."""
        users = sorted(self.users, key=lambda row: -(row.idle + row.unclaimed))
        return [row for row in users[:WASTERS] if row.idle + row.unclaimed > 0]


def usage_report(
    usage: Usage,
    by: str,
    begin: float,
    end: float,
    name_of: Callable[[int], str],
    groups_of: Callable[[int], Collection[str]],
    metrics: Iterable[str] = (),
) -> Report:
    """Report on the time between two unix times.

    Args:
        usage: the store.
        by: one of BY.
        name_of: uid -> the user's name.
        groups_of: uid -> names of the user's groups; only called for "group".
        metrics: of the store, whose course over the time is to be given for each device.
    """
    watch, waited, devices = usage.watched(begin, end), usage.waiting(begin, end), usage.devices(begin, end)
    queue_unknown, _ = waited.pop(NOBODY_KNOWS, (0.0, 0.0))
    users = _users(usage, begin, end, waited, name_of)
    # If the queue could never be read, no user is known not to have waited.
    if queue_unknown >= watch.seen * 0.99:
        users = [replace(row, waiting=row.waiting or None, wanted=row.wanted or None) for row in users]
    rows: list[UsageRow] = []
    if by == "user":
        rows = users
    elif by == "group":
        rows = _groups(users, groups_of)
    elif by == "device":
        times = usage.totals("device", begin, end)
        rows = [
            UsageRow(
                total.device.label,
                device=total.device.uuid,
                energy=total.energy,
                waiting=None,
                wanted=None,
                **times.get(total.device.uuid, {}),
            )
            for total in devices
        ]
    courses = {
        total.device.uuid: {name: usage.series(total.device.uuid, name, begin, end) for name in metrics}
        for total in devices
        if metrics
    }
    return Report(by, watch, rows, users, devices, queue_unknown, courses)


def _users(
    usage: Usage, begin: float, end: float, waited: Mapping[int, tuple[float, float]], name_of: Callable[[int], str]
) -> list[UsageRow]:
    energy = usage.energy(begin, end)
    rows = {
        uid: UsageRow(name_of(uid), uid, energy=energy.get(uid), **times)
        for uid, times in usage.totals("uid", begin, end).items()
    }
    for uid, (waiting, wanted) in waited.items():
        # A user who only waited had no device that could take energy.
        row = rows.get(uid) or UsageRow(name_of(uid), uid, energy=0.0)
        rows[uid] = replace(row, waiting=waiting, wanted=wanted)
    return list(rows.values())


def _groups(users: Iterable[UsageRow], groups_of: Callable[[int], Collection[str]]) -> list[UsageRow]:
    """Add up the members of each group; a user in several groups counts in each of them."""
    known = ((row.uid, row) for row in users if row.uid is not None)
    return _sums(grouped((name, row) for uid, row in known for name in groups_of(uid) or ("(in no group)",)))


def _sums(members: Mapping[str, Iterable[UsageRow]]) -> list[UsageRow]:
    """Add up the rows under each name; the largest sum comes first."""
    found = []
    for name, rows in members.items():
        known = {part: [value for row in rows if (value := getattr(row, part)) is not None] for part in _SUMMED}
        sums: dict[str, Any] = {part: sum(values) if values else None for part, values in known.items()}
        found.append(UsageRow(name, **sums))
    return sorted(found, key=lambda row: -row.claimed)


def joined_report(by: str, begin: float, end: float, reports: Mapping[str, Report]) -> Report:
    """Join the reports of several hosts: each row gets its host, and users and groups are also added up by name.

    A single number about the watched time is that of the host of which least is known.
    """

    def with_hosts(name: str) -> list[Any]:
        return [replace(row, host=host) for host, report in reports.items() for row in getattr(report, name) or ()]

    watches = {host: report.watch for host, report in reports.items()}
    begins = [watch.store_begins for watch in watches.values()]
    known = [found for found in begins if found is not None]
    seen = min((watch.seen for watch in watches.values()), default=0.0)
    width = max((watch.width for watch in watches.values()), default=0)
    rows = [] if by in FROM_LOG else with_hosts("rows")
    sums = _sums(grouped((row.name, row) for row in rows)) if by in ("user", "group") else []
    return Report(
        by,
        Watch(begin, end, seen, max(known) if known and len(known) == len(begins) else None, width),
        rows,
        sums if by == "user" else (),
        with_hosts("devices"),
        max((report.queue_unknown for report in reports.values()), default=0.0),
        claims=with_hosts("claims") if by == "claim" else None,
        claims_without_end=sum(report.claims_without_end or 0 for report in reports.values())
        if by == "claim"
        else None,
        policies=with_hosts("policies") if by == "policy" else None,
        watches=watches,
        sums=sums,
    )


@dataclass(frozen=True)
class ClaimRow:
    """A claim that has ended or still runs; the last fields are facts of the event that recorded its end."""

    id: str
    user: str | None = None
    devices: tuple[str, ...] = ()  # uuids
    ended: float | None = None  # unix time, or None while it runs
    command: str | None = None
    wall_time_seconds: float | None = None
    utilization_percent: float | None = None  # mean over the job and its devices
    energy_joules: float | None = None
    peak_memory_bytes: int | None = None  # of the job
    exit_status: int | None = None
    host: str | None = None

    @property
    def gpu_seconds(self) -> float | None:
        """The claim's duration times the number of its devices, or None if the duration is unknown."""
        return None if self.wall_time_seconds is None else self.wall_time_seconds * len(self.devices)


CLAIM_FACTS = ("wall_time_seconds", "utilization_percent", "energy_joules", "peak_memory_bytes", "exit_status")


def claim_rows(
    lines: Iterable[Line],
    begin: float,
    end: float,
    name_of: Callable[[int], str] = str,
    running: Sequence[ClaimRow] = (),
) -> tuple[list[ClaimRow], int]:
    """The claims that ended between two unix times and those *running*, the largest first; and a count of the others.

    The others began in that time and have no known end.  A claim counts as a whole, and when it ends.  *lines* are of
    the audit log; *name_of* names users by uid where a job had no name in its environment.
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
        elif line.get("kind") in ("release", "claim") and "wall_time_seconds" in facts_of(line):
            if claim in ended and line["kind"] == "claim":  # the daemon wrote this line, and the job's own says more
                continue
            ended.add(claim)
            if begin <= when < end:
                user, uid = line.get("user"), facts_of(line).get("uid", facts_of(line).get("owner_uid"))
                if not isinstance(user, str):
                    user = name_of(uid) if type(uid) is int else None
                facts = {name.removeprefix("mean_"): value for name, value in facts_of(line).items()}
                known = sound_fields(ClaimRow, facts, CLAIM_FACTS)
                seen = str(line.get("message") or "") if line["kind"] == "claim" else ""
                command = commands.get(claim) or seen or None
                rows[claim] = ClaimRow(claim, user, tuple(devices_of(line)), when, command, **known)
    found = [*rows.values(), *(row for row in running if row.id not in ended)]
    largest = sorted(found, key=lambda row: -(row.gpu_seconds or 0.0))
    return largest, len(begun - ended - {row.id for row in running})


def running_claims(records: Iterable[ClaimRecord], now: float) -> list[ClaimRow]:
    """One row for each claim of *records*, all of which live at the unix time *now*."""
    return [
        ClaimRow(
            record.id,
            record.user,
            record.devices,
            command=shlex.join(record.command) if record.command else None,
            wall_time_seconds=None if record.since is None else max(0.0, now - record.since),
        )
        for record in records
    ]


@dataclass(frozen=True)
class PolicyRow:
    """How often one policy took one action against one user, counted by process or claim."""

    user: str | None  # or None for no user in particular, as when a GPU was set aside
    uid: int | None
    policy: str
    action: str
    done: int = 0  # for a message this means that it has reached the user
    undelivered: int = 0  # messages that no user can have seen
    dry_run: int = 0
    not_done: int = 0  # refused by a check, or failed
    last: float = 0.0  # unix time of the last of these
    host: str | None = None


_COUNTED = {"about to": "done", "done": "done", "logged": "done", "undelivered": "undelivered", "dry run": "dry_run"}


def policy_rows(lines: Iterable[Line], begin: float, end: float, name_of: Callable[[int], str]) -> list[PolicyRow]:
    """Count what policies did to users between two unix times, by user and policy, with actions in order of first use.

    *lines* are of audit logs; *name_of* names users by uid.
    """
    rows: dict[tuple[object, ...], PolicyRow] = {}
    announced: set[tuple[str, ...]] = set()
    for line in sorted(lines, key=lambda line: float(line["time_unix_seconds"])):
        facts, when, outcome = facts_of(line), float(line["time_unix_seconds"]), str(line.get("outcome"))
        policy, action, user = str(facts.get("policy") or ""), str(line.get("kind")), str(line.get("user") or "")
        # Only steps of policies have a number, except the end of a pause, which is owed whatever becomes of the step.
        is_step = "step" in facts or (action == "resume" and outcome in _COUNTED)
        if not (policy and is_step and begin <= when < end):
            continue
        step = policy, action, user, str(line.get("pid"))
        counted = _COUNTED.get(outcome, "not_done")
        failed = counted == "not_done" and step in announced  # the announced action was not done after all
        for uid in uids_of(line) or (None,):
            row = PolicyRow(user or None if uid is None else name_of(uid), uid, policy, action)
            row = rows.get((row.user, policy, action), row)
            row = replace(row, done=row.done - failed, last=when)
            rows[row.user, policy, action] = replace(row, **{counted: getattr(row, counted) + 1})
        announced.discard(step)
        if outcome == "about to":
            announced.add(step)
    return sorted(rows.values(), key=lambda row: (row.user or "", row.policy))
