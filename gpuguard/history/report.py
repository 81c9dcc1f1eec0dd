"""What GPUs were used for over a time: who claimed, used, left idle and waited for how much, and what it took.

Hours that nobody watched are in no sum, and what is unknown is None or a column of its own, never 0.  Does not read the
store: see consult.  Does not write anything down: see views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpuguard.history.queries import DeviceTotal, Point, Total, Usage, Waited, Watch

BY = ("user", "group", "device", "claim")
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
    unknown: float = 0.0  # of the claimed time: nobody can tell whether it was used
    unclaimed: float = 0.0  # used without a claim
    energy: float | None = None  # joules; None: nobody measured them
    waiting: float | None = 0.0  # seconds with a request in line; None: nobody can tell
    wanted: float | None = 0.0  # GPU-seconds asked for while waiting

    @property
    def wasted(self) -> float:
        """What others could not have, or nobody knew of."""
        return self.idle + self.unclaimed


@dataclass(frozen=True)
class Report:
    """Everything that a report tells."""

    by: str
    watch: Watch
    users: tuple[UsageRow, ...]
    devices: tuple[DeviceTotal, ...]
    device_rows: tuple[UsageRow, ...]
    groups: tuple[UsageRow, ...] | None  # None: not asked for
    line_unknown: float  # seconds in which nobody could tell who waits
    courses: Mapping[str, Mapping[str, tuple[Point, ...]]] = field(default_factory=dict)  # uuid -> metric -> points

    @property
    def rows(self) -> tuple[UsageRow, ...]:
        """By whatever was asked for; none by claim."""
        return {"user": self.users, "device": self.device_rows, "group": self.groups or ()}.get(self.by, ())

    @property
    def wasters(self) -> tuple[UsageRow, ...]:
        """Users whose GPUs did the least for the most time."""
        found = sorted(self.users, key=lambda row: -row.wasted)
        return tuple(row for row in found[:WASTERS] if row.wasted > 0)


def gathered(
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
    return Report(
        by,
        watch,
        tuple(users),
        tuple(devices),
        tuple(_device_rows(usage.totals("device", begin, end), devices)),
        tuple(_groups(users, groups_of)) if by == "group" else None,
        _line_unknown(waited),
        {
            each.device: {name: tuple(usage.series(each.device, name, begin, end)) for name in metrics}
            for each in devices
        }
        if metrics
        else {},
    )


def device_label(device: DeviceTotal) -> str:
    """``"GPU 3"``; one that has no index any more, and a MIG instance, is known by its uuid."""
    return device.device if device.index is None else f"GPU {device.index}"


def _line_unknown(waited: Iterable[Waited]) -> float:
    return sum(each.waiting for each in waited if each.uid is None)


def _users(
    totals: Iterable[Total],
    energy: Mapping[int, float | None],
    waited: Collection[Waited],
    watch: Watch,
    name_of: Callable[[int], str],
) -> list[UsageRow]:
    # If nobody could ever look at the line, nobody knows that somebody did not wait.
    told = _line_unknown(waited) < watch.seen * 0.99
    rows: dict[int, UsageRow] = {}
    for each in totals:
        if each.uid is not None:
            times = {name: getattr(each, name) for name in ("claimed", "used", "idle", "unknown", "unclaimed")}
            rows[each.uid] = UsageRow(name_of(each.uid), each.uid, energy=energy.get(each.uid), **times)
    for one in waited:
        if one.uid is not None:
            # Whoever only waited had no device that could take energy.
            row = rows.get(one.uid) or UsageRow(name_of(one.uid), one.uid, energy=0.0)
            rows[one.uid] = replace(row, waiting=one.waiting, wanted=one.wanted)
    if not told:
        return [replace(row, waiting=row.waiting or None, wanted=row.wanted or None) for row in rows.values()]
    return list(rows.values())


def _device_rows(totals: Iterable[Total], devices: Iterable[DeviceTotal]) -> Iterable[UsageRow]:
    by_device = {each.device: each for each in totals}
    for device in devices:
        each = by_device.get(device.device) or Total(0.0, 0.0, 0.0, 0.0)
        times = {name: getattr(each, name) for name in ("claimed", "used", "idle", "unknown", "unclaimed")}
        yield UsageRow(
            device_label(device), None, device.device, energy=device.energy, waiting=None, wanted=None, **times
        )


def _groups(users: Iterable[UsageRow], groups_of: Callable[[int], Collection[str]]) -> list[UsageRow]:
    """The members of each group together; whoever is in several counts in each."""
    found: dict[str, list[UsageRow]] = {}
    for row in users:
        assert row.uid is not None
        for name in groups_of(row.uid) or ("(in no group)",):
            found.setdefault(name, []).append(row)
    return sorted((_together(name, rows) for name, rows in found.items()), key=lambda row: -row.claimed)


def _together(name: str, rows: Collection[UsageRow]) -> UsageRow:
    energies = [row.energy for row in rows if row.energy is not None]
    waits, wants = ([value for value in values if value is not None] for values in (
        [row.waiting for row in rows], [row.wanted for row in rows]
    ))  # fmt: skip
    return UsageRow(
        name,
        claimed=sum(row.claimed for row in rows),
        used=sum(row.used for row in rows),
        idle=sum(row.idle for row in rows),
        unknown=sum(row.unknown for row in rows),
        unclaimed=sum(row.unclaimed for row in rows),
        energy=sum(energies) if energies else None,
        waiting=sum(waits) if waits else None,
        wanted=sum(wants) if wants else None,
    )
