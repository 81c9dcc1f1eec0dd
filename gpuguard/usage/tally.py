"""What the time between two samples adds up to: per device, per user and device, and who waits, in slots of 10 s.

An interval is known by the sample at its end.  What that sample does not say is counted as unknown time, never as zero;
so is a gap of more than a few intervals (the machine slept, the driver hung), and a device that was not there at both
ends.  Durations are those of CLOCK_BOOTTIME, so that a clock that is set back counts nothing twice; only the place in
time is the wall clock's.  Does not store anything: see recorder.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpuguard.attribution import claim_of, claims_on, claims_readable, places
from gpuguard.model import Device, GpuProcess, Snapshot
from gpuguard.request import computes, idle_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gpuguard.model import ClaimRecord

    Row = tuple[float | None, ...]
    Wanted = Mapping[int, int]

WIDTH = 10  # seconds
WORKS_FROM = 1.0  # percent: below it a device idles, as in `gpuguard who`
MOST_WATTS = 10_000.0  # no device draws as much: a counter that says so is another one, or began anew

# What is averaged over time, from a device, in the unit in which it is stored.
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
# Claimed time that is neither used nor idle is time of which nobody can tell.
USER_COLUMNS = ("claimed_ms", "used_ms", "idle_ms", "unclaimed_ms")
# In which a user waits, whether with one request or with ten; and times the GPUs that all of them ask for.
WAITING_COLUMNS = ("waiting_ms", "wanted_gpu_seconds")
NOBODY_KNOWS = -1  # in the place of a uid: the time in which the waiting line could not be read
_HIGHEST = tuple(name.endswith("_max") for name in DEVICE_COLUMNS)
_NOTHING = (None,) * len(DEVICE_COLUMNS)


class Slot:
    """What has been added up so far: DEVICE_COLUMNS by uuid, USER_COLUMNS by uid and uuid, WAITING_COLUMNS by uid."""

    def __init__(self) -> None:
        self.devices: dict[str, Row] = {}
        self.users: dict[tuple[int, str], tuple[float, ...]] = {}
        self.waiting: dict[int, tuple[float, ...]] = {}

    def add(self, rates: Slot, seconds: float) -> None:
        """Add so many seconds of what *rates* says of one second."""
        for uuid, rate in rates.devices.items():
            self.devices[uuid] = _plus(self.devices.get(uuid), rate, seconds)
        for key, each in rates.users.items():
            self.users[key] = _sum(self.users.get(key), each, seconds)
        for uid, each in rates.waiting.items():
            self.waiting[uid] = _sum(self.waiting.get(uid), each, seconds)


class Tally:
    """The sums of the samples so far, by slot: unix time // WIDTH."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.now: Snapshot | None = None
        self._current: int | None = None  # the slot in which the next interval begins

    def add(self, snapshot: Snapshot, longest: float, wanted: Wanted | None = None) -> None:
        """Add the time since the snapshot before; of more than *longest* seconds nothing is known.

        Args:
            snapshot: what there is now.
            longest: seconds.
            wanted: uid -> GPUs that the user waits for now; None: nobody can tell.
        """
        before, self.now = self.now, snapshot
        self._current = math.floor(snapshot.taken_at / WIDTH)
        if before is None or not 0 < (passed := snapshot.clock - before.clock) <= longest:
            return
        rates = rates_of(before, snapshot)
        rates.waiting.update(_waiting(wanted))
        for slot, seconds in _pieces(snapshot.taken_at - passed, snapshot.taken_at):
            self.slots.setdefault(slot, Slot()).add(rates, seconds)

    def complete(self, *, all_of_them: bool = False) -> dict[int, Slot]:
        """The slots to which the next sample adds nothing, or all of them."""
        return {slot: one for slot, one in self.slots.items() if all_of_them or slot != self._current}


def rates_of(before: Snapshot, now: Snapshot) -> Slot:
    """What one second between these two snapshots adds to a slot."""
    readable = claims_readable(now)
    rates, formers, undivided = Slot(), {one.uuid: one for one in before.devices}, {one.uuid for one in places(now)}
    for device in now.devices:
        former = formers.get(device.uuid)
        if former is not None:
            energy = _energy(former, device, now.clock - before.clock)
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
    row += [0.0, 1000.0] if claimed is None else [1000.0 * claimed, 0.0]
    return tuple(row)


def _user_rows(
    device: Device, snapshot: Snapshot, around: Sequence[ClaimRecord] | None
) -> Iterator[tuple[tuple[int, str], tuple[float, ...]]]:
    """Per second of each user of *device*.  A claim counts once, on the device that it names, and whole.

    How much of a shared device it takes is only its own word.  Whoever is under none of the claims *around* is there
    without any; None: the device is divided, and its instances tell.
    """
    instances = [other for other in snapshot.devices if other.parent_uuid == device.uuid] if around is None else []
    here = [record for record in snapshot.claims if record.alive and device.uuid in record.devices]
    listed = _listed([device, *instances])
    owners: dict[int, list[ClaimRecord]] = {}
    for record in here:
        if record.uid >= 0:
            owners.setdefault(record.uid, []).append(record)
    working = [claim_of(process, here, {}) for process in listed or ()]
    for uid, own in owners.items():
        some = listed is None or any(record in working for record in own)
        works = _works(device, listed, divided=bool(instances)) if some else False
        if works is False and _hides_use(device, listed):
            works = None
        yield (uid, device.uuid), (1000.0, 1000.0 * (works is True), 1000.0 * (works is False), 0.0)
    if around is not None:
        strangers = {process.uid for process in listed or () if claim_of(process, around, {}) is None}
        for stranger in strangers:
            if stranger is not None and stranger not in owners:
                yield (stranger, device.uuid), (0.0, 0.0, 0.0, 1000.0)


def _listed(devices: list[Device]) -> list[GpuProcess] | None:
    """What computes on a device and its instances; None: the driver gives no list that can be believed."""
    known = [device for device in devices if device.processes is not None]
    if not known or not all(device.processes_plausible for device in known):
        return None
    return [process for device in known for process in device.processes or () if computes(process)]


def _works(device: Device, listed: list[GpuProcess] | None, *, divided: bool) -> bool | None:
    if device.utilization is not None and device.utilization < WORKS_FROM and not divided:
        return False
    return None if listed is None or device.utilization is None or divided else True


def _hides_use(device: Device, listed: list[GpuProcess] | None) -> bool:
    """Whether memory tells of processes that the list does not."""
    used, idles = device.memory_used, device.utilization is not None and device.utilization < WORKS_FROM
    return not listed and not idles and used is not None and used > idle_limit(device)


def _energy(before: Device, now: Device, seconds: float) -> float | None:
    """Watts, by the driver's counter."""
    if before.total_energy is None or now.total_energy is None:
        return None
    watts = (now.total_energy - before.total_energy) / seconds
    return watts if 0 <= watts <= MOST_WATTS else None


def _waiting(wanted: Wanted | None) -> dict[int, tuple[float, ...]]:
    """Per second of each user who waits."""
    if wanted is None:
        return {NOBODY_KNOWS: (1000.0, 0.0)}
    return {uid: (1000.0, float(gpus)) for uid, gpus in wanted.items()}


def _sum(former: tuple[float, ...] | None, rate: tuple[float, ...], seconds: float) -> tuple[float, ...]:
    if former is None:
        return tuple([seconds * new for new in rate])
    return tuple([old + seconds * new for old, new in zip(former, rate, strict=True)])


def _plus(former: Row | None, rate: Row, seconds: float) -> Row:
    return tuple([
        _larger(old, new) if highest else (old or 0.0) + (new or 0.0) * seconds
        for highest, old, new in zip(_HIGHEST, former or _NOTHING, rate, strict=True)
    ])  # fmt: skip


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None or (other is not None and other > one) else one


def _pieces(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """(slot, seconds of it) for each slot between two unix times."""
    slot = math.floor(begin / WIDTH)
    while begin < end:
        border = min(end, (slot + 1) * WIDTH)
        if border > begin:
            yield slot, border - begin
        slot, begin = slot + 1, border
