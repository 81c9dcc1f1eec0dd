"""What the usage store keeps: the sums of samples in slots of 10 s, and the tables that hold them.

The sample at the end of an interval speaks for all of it.  A value that is missing from that sample counts as unknown
time, never as zero; so does a gap of more than a few intervals (the machine slept, the driver hung), and a device that
was not there at both ends.  Durations come from CLOCK_BOOTTIME, so that nothing counts twice when the clock is set
back; only the point in time comes from the wall clock.

Each kind of row has three tables, such as `devices_900s` for slots of 900 s; a slot's number is unix time // its width.
The rows of 400 days have to fit into 40 MB.  So one key holds both a row's slot and its device or holder, and time is
kept in ticks: 900 s of them fit into two bytes, where milliseconds take three.  Does not read or write: see queries and
store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuguard.device_state import (
    claim_of,
    claims_on,
    claims_readable,
    grouped,
    hides_use,
    is_idle,
    may_compute,
    mean_watts,
    usable_devices,
)
from gpuguard.model import ClaimRecord, Device, GpuProcess, Snapshot

Row = tuple[float | None, ...]
Times = tuple[float, ...]
Wanted = Mapping[int, int]  # uid -> GPUs that the user waits for

WIDTH = 10  # seconds

# The values of a device that are averaged over time, in the unit in which they are stored.
GAUGES: dict[str, Callable[[Device], float | None]] = {
    "utilization_percent": lambda device: device.utilization,
    "memory_used_mib": lambda device: None if device.memory_used is None else device.memory_used / 2**20,
    "temperature_celsius": lambda device: device.temperature,
    "power_draw_watts": lambda device: device.power_draw,
}
DEVICE_COLUMNS = (
    "seen_ms",
    *(f"{gauge}_{part}" for gauge in GAUGES for part in ("sum", "max", "unknown_ms")),
    "energy_joules",
    "energy_unknown_ms",
    "claimed_ms",
    "claimed_unknown_ms",
)
# Claimed time that is neither used nor idle is unknown time.
USER_COLUMNS = ("claimed_ms", "used_ms", "idle_ms", "unclaimed_ms")
# Time in which a user waits, whether with one request or with ten; and GPU-seconds that all of these ask for.
WAITING_COLUMNS = ("waiting_ms", "wanted_gpu_seconds")
NOBODY_KNOWS = -1  # stands in place of a uid for the time in which the queue could not be read
_HIGHEST = tuple(name.endswith("_max") for name in DEVICE_COLUMNS)
_NOTHING = (None,) * len(DEVICE_COLUMNS)


@dataclass
class Slot:
    """The sums of one slot so far: DEVICE_COLUMNS by uuid, USER_COLUMNS by uid and uuid, WAITING_COLUMNS by uid."""

    devices: dict[str, Row] = field(default_factory=dict)
    users: dict[tuple[int, str], Times] = field(default_factory=dict)
    waiting: dict[int, Times] = field(default_factory=dict)

    def add(self, rates: Slot, seconds: float) -> None:
        """Add *rates*, which holds the sums of one second, for so many seconds."""
        for uuid, new in rates.devices.items():
            columns = zip(_HIGHEST, self.devices.get(uuid, _NOTHING), new, strict=True)
            self.devices[uuid] = tuple([_sum(*column, seconds) for column in columns])
        several: list[tuple[dict[Any, Times], dict[Any, Times]]] = [
            (self.users, rates.users),
            (self.waiting, rates.waiting),
        ]
        for sums, more in several:
            for key, times in more.items():
                former = sums.get(key) or (0.0,) * len(times)
                sums[key] = tuple([old + seconds * value for old, value in zip(former, times, strict=True)])


class UsageSums:
    """The sums of all samples so far, by slot number (unix time // WIDTH)."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.now: Snapshot | None = None
        self._current: int | None = None  # the slot in which the next interval begins

    def add(self, snapshot: Snapshot, longest: float, wanted: Wanted | None = None) -> None:
        """Add the time since the last snapshot, unless it is longer than *longest* seconds: such a gap is left out.

        *wanted* maps a uid to the GPUs that the user waits for now, or is None if that is unknown.
        """
        before, self.now = self.now, snapshot
        self._current = math.floor(snapshot.taken_at / WIDTH)
        if before is None or not 0 < (passed := snapshot.clock - before.clock) <= longest:
            return
        rates = rates_of(before, snapshot)
        waiting = {uid: (1000.0, float(gpus)) for uid, gpus in (wanted or {}).items()}
        rates.waiting.update({NOBODY_KNOWS: (1000.0, 0.0)} if wanted is None else waiting)
        begin = snapshot.taken_at - passed
        for slot in range(math.floor(begin / WIDTH), self._current + 1):
            seconds = min(snapshot.taken_at, (slot + 1) * WIDTH) - max(begin, slot * WIDTH)
            if seconds > 0:
                self.slots.setdefault(slot, Slot()).add(rates, seconds)

    def complete(self, *, all_of_them: bool = False) -> dict[int, Slot]:
        """The slots to which the next sample adds nothing, or all of them."""
        return {number: slot for number, slot in self.slots.items() if all_of_them or number != self._current}


def rates_of(before: Snapshot, now: Snapshot) -> Slot:
    """What one second between these two snapshots adds to a slot."""
    readable = claims_readable(now)
    rates, formers = Slot(), {device.uuid: device for device in before.devices}
    undivided = {device.uuid for device in usable_devices(now)}
    for device in now.devices:
        former = formers.get(device.uuid)
        if former is not None:
            energy = mean_watts(former, device, now.clock - before.clock)
            around = claims_on(now, device)
            rates.devices[device.uuid] = _device_row(device, energy, bool(around) if readable else None)
            if readable:
                rates.users.update(_user_rows(device, now, around if device.uuid in undivided else None))
    return rates


def _device_row(device: Device, watts: float | None, claimed: bool | None) -> Row:
    row: list[float | None] = [1000.0]
    for read in GAUGES.values():
        value = read(device)
        row += [0.0, None, 1000.0] if value is None or not math.isfinite(value) else [value, value, 0.0]
    row += [0.0, 1000.0] if watts is None else [watts, 0.0]
    row += [0.0, 1000.0] if claimed is None else [1000.0 if claimed else 0.0, 0.0]
    return tuple(row)


def _user_rows(
    device: Device, snapshot: Snapshot, around: Sequence[ClaimRecord] | None
) -> Iterator[tuple[tuple[int, str], tuple[float, ...]]]:
    """Yield the sums of one second for each user of *device*.  A claim counts once, whole, on the device that it names.

    A process that belongs to none of the claims *around* is unclaimed.  *around* is None if the device is divided,
    because unclaimed processes then count on its instances.
    """
    instances = [other for other in snapshot.devices if other.parent_uuid == device.uuid] if around is None else []
    here = [record for record in snapshot.claims if record.alive and device.uuid in record.devices]
    listed = _listed([device, *instances])
    owners = grouped((record.uid, record) for record in here if record.uid >= 0)
    working = [claim_of(process, here, {}) for process in listed or ()]
    for uid, own in owners.items():
        some = listed is None or any(record in working for record in own)
        works = _works(device, listed, divided=bool(instances)) if some else False
        if works is False and not listed and not is_idle(device) and hides_use(device):
            works = None  # memory in use shows that the list is missing processes
        yield (uid, device.uuid), (1000.0, 1000.0 if works is True else 0.0, 1000.0 if works is False else 0.0, 0.0)
    if around is not None:
        strangers = {process.uid for process in listed or () if claim_of(process, around, {}) is None}
        for stranger in strangers:
            if stranger is not None and stranger not in owners:
                yield (stranger, device.uuid), (0.0, 0.0, 0.0, 1000.0)


def _listed(devices: list[Device]) -> list[GpuProcess] | None:
    """The processes that compute on a device and its instances, or None if the driver gives no plausible list."""
    known = [device for device in devices if device.processes is not None]
    if not known or not all(device.processes_plausible for device in known):
        return None
    return [process for device in known for process in device.processes or () if may_compute(process, device)]


def _works(device: Device, listed: list[GpuProcess] | None, *, divided: bool) -> bool | None:
    if is_idle(device) and not divided:
        return False
    return None if listed is None or device.utilization is None or divided else True


def _sum(highest: bool, old: float | None, new: float | None, seconds: float) -> float | None:
    if not highest:
        return (old or 0.0) + (new or 0.0) * seconds
    return new if old is None or (new is not None and new > old) else old


VERSION = 2
SLOTS = {WIDTH: 720, 60: 2880, 900: 38400}  # width in seconds -> slots that are kept: 2 hours, 48 hours, 400 days
COARSEST = max(SLOTS)

EPOCH = 1_577_836_800  # 2020, where a slot of each width begins, so that keys until 2035 take five bytes
NUMBER_BITS = 16  # the bits of a key that hold the number of a device or a holder
MOST_NUMBERS = 2**NUMBER_BITS - 1

TICK_MS, MEMORY_MIB = 40, 16  # the units in which time and memory are kept
# The end of a column's name above -> (the end of its name in the tables, the unit).
_UNIT_FACTORS = {
    "_ms": ("_ticks", TICK_MS),
    "_mib_sum": ("_16mib_sum", MEMORY_MIB),
    "_mib_max": ("_16mib_max", MEMORY_MIB),
}
# The parts of a user's time; the first three add up to the claimed time.
USER_PARTS = ("used_ms", "idle_ms", "unknown_ms", "unclaimed_ms")
COLUMNS = {"devices": DEVICE_COLUMNS, "users": USER_PARTS, "waiting": WAITING_COLUMNS}

# These tables say what the numbers in the keys mean.  A holder without a device waits for one.
NAMES = (
    "CREATE TABLE devices (id INTEGER PRIMARY KEY, uuid TEXT UNIQUE NOT NULL, name TEXT, parent TEXT, place INTEGER)",
    "CREATE TABLE holders (id INTEGER PRIMARY KEY, uid INTEGER NOT NULL, device INTEGER NOT NULL, UNIQUE(uid, device))",
)


def stored(column: str) -> tuple[str, int]:
    """The name of a column in the tables, and the unit in which it is kept there."""
    for end, (kept, unit) in _UNIT_FACTORS.items():
        if column.endswith(end):
            return column.removesuffix(end) + kept, unit
    return column, 1


def key(slot: int, number: int, width: int) -> int:
    """The key of a row: *number* is that of its device or holder.  The rows of one slot lie together."""
    return (slot - EPOCH // width << NUMBER_BITS) + number


def slot_of(row: int, width: int) -> int:
    """The slot of a key."""
    return (row >> NUMBER_BITS) + EPOCH // width


def rows(kind: str, width: int) -> str:
    """A sub-query for the rows from one key up to, but without, another; the columns are named as above.

    Rows of devices have `device`, a number.  All others have `uid` and `device`, and those of users have `claimed_ms`.
    """
    columns = [f"(key >> {NUMBER_BITS}) + {EPOCH // width} AS slot"]
    columns += [f"{name} * {unit} AS {column}" for column in COLUMNS[kind] for name, unit in [stored(column)]]
    number = f"key & {MOST_NUMBERS}"
    if kind == "devices":
        return f"SELECT {number} AS device, {', '.join(columns)} FROM devices_{width}s WHERE key >= ? AND key < ?"
    if kind == "users":
        columns.append(f"(used_ticks + idle_ticks + unknown_ticks) * {TICK_MS} AS claimed_ms")
    return (
        f"SELECT uid, device, {', '.join(columns)} FROM {kind}_{width}s CROSS JOIN holders ON id = {number}"
        " WHERE key >= ? AND key < ?"
    )


def holdings(width: int) -> str:
    """A sub-query like rows(): the ticks for which each user had each device, `had`, and that device's own columns."""
    return (
        f"SELECT users.key >> {NUMBER_BITS} AS slot, device, uid, joules, seen, unknown,"
        " used_ticks + idle_ticks + unknown_ticks + unclaimed_ticks AS had"
        f" FROM users_{width}s AS users CROSS JOIN holders ON holders.id = users.key & {MOST_NUMBERS} CROSS JOIN"
        " (SELECT key AS place, energy_joules AS joules, seen_ticks AS seen, energy_unknown_ticks AS unknown"
        f" FROM devices_{width}s) ON place = (users.key & ~{MOST_NUMBERS}) + device"
        " WHERE users.key >= ? AND users.key < ?"
    )


def _table(kind: str, width: int) -> str:
    names = [name for name, _ in map(stored, COLUMNS[kind])]
    columns = ", ".join(f"{name} INTEGER{'' if name.endswith('_max') else ' NOT NULL'}" for name in names)
    # Not WITHOUT ROWID: rows that are added at the end fill their pages to 96 %, but only to 84 % in such a table.
    return f"CREATE TABLE {kind}_{width}s (key INTEGER PRIMARY KEY, {columns})"


def _insert(kind: str, width: int) -> str:
    names = [name for name, _ in map(stored, COLUMNS[kind])]
    # MAX() of several values is NULL when one of them is.
    highest = "{0} = MAX(COALESCE({0}, excluded.{0}), COALESCE(excluded.{0}, {0}))"
    sums = ", ".join((highest if name.endswith("_max") else "{0} = {0} + excluded.{0}").format(name) for name in names)
    return f"INSERT INTO {kind}_{width}s VALUES (?{', ?' * len(names)}) ON CONFLICT (key) DO UPDATE SET {sums}"


EACH = [(kind, width) for kind in COLUMNS for width in SLOTS]
TABLES = [*NAMES, *(_table(kind, width) for kind, width in EACH)]
INSERT = {(kind, width): _insert(kind, width) for kind, width in EACH}
