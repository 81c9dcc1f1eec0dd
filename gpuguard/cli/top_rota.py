"""What `gpuguard top` reads of which device at which look, and how looks become one snapshot.

Memory, processes and utilization are read every time, 9 driver calls per device; power, temperature and health of one
device in four, in turns, 8 more for those.  All of them at once would be 17 for each, and the driver serves one caller
at a time.  The first look reads everything.  Does not read anything itself: see top_feed.
"""

from __future__ import annotations

from dataclasses import replace

from gpuguard.model import (
    HEALTH,
    MEMORY,
    MODEL,
    POWER,
    PROCESS_DETAILS,
    PROCESSES,
    THERMAL,
    UTILIZATION,
    WHO_FIELDS,
    Device,
    Snapshot,
)

EVERY_TIME = frozenset({MEMORY, PROCESSES, PROCESS_DETAILS, UTILIZATION})
IN_TURNS = frozenset({POWER, THERMAL, HEALTH})
TURNS = 4
FIELDS = {  # group: the fields of a device that come with it
    POWER: ("power_draw", "power_limit", "total_energy"),
    THERMAL: ("temperature", "temperature_slowdown", "temperature_shutdown", "fan_speed"),
    HEALTH: ("problems", "compute_mode", "mig_mode"),
    MODEL: ("name", "pci_bus_id", "minor_number", "numa_node", "cpu_affinity"),
}


def groups(before: Snapshot | None) -> frozenset[str]:
    """What to read of all devices, after *before*."""
    if before is None:
        return WHO_FIELDS
    # Only HEALTH finds the instances of a divided device, and without them their processes would be gone.
    return EVERY_TIME | ({HEALTH} if any(device.mig_mode for device in before.devices) else set())


def turn(look: int, now: Snapshot) -> list[str]:
    """The uuids of the devices of *now* of which IN_TURNS is to be read at the *look*-th look."""
    whole = [device.uuid for device in now.devices if not device.parent_uuid]
    return whole[look % TURNS :: TURNS]


def merged(before: Snapshot | None, now: Snapshot, read: frozenset[str]) -> Snapshot:
    """*now*, with what was not *read* this time as it was *before*; a device that fails keeps nothing but its name."""
    if before is None:
        return now
    former = {device.uuid: device for device in before.devices}
    kept = {name for group, names in FIELDS.items() if group not in read for name in names}
    devices = tuple(_completed(device, former.get(device.uuid), kept) for device in now.devices)
    alive = {device.uuid for device in devices if not _fails(device)}
    gaps = tuple(gap for gap in before.gaps if gap.field in kept and (gap.device is None or gap.device in alive))
    versions = {
        name: getattr(now, name) or getattr(before, name) for name in ("driver_version", "nvml_version", "cuda_version")
    }
    return replace(now, devices=devices, gaps=(*gaps, *now.gaps), **versions)


def refreshed(now: Snapshot, more: Snapshot) -> Snapshot:
    """*now* with what *more* has read of IN_TURNS, of some devices."""
    fresh = {device.uuid: device for device in more.devices}
    names = {name for group in IN_TURNS for name in FIELDS[group]}
    devices = tuple(
        _completed(fresh[device.uuid], device, set(vars(device)) - names) if device.uuid in fresh else device
        for device in now.devices
    )
    gaps = tuple(gap for gap in now.gaps if gap.device not in fresh or gap.field not in names)
    return replace(now, devices=devices, gaps=(*gaps, *more.gaps))


def _completed(now: Device, before: Device | None, kept: set[str]) -> Device:
    if before is None:
        return now
    if _fails(now):
        return replace(now, name=now.name or before.name)
    return replace(now, **{name: getattr(before, name) for name in kept})


def _fails(device: Device) -> bool:
    """Whether it does not answer at all: what was read before says nothing about it any more."""
    values = (device.memory_total, device.temperature, device.power_draw, device.compute_mode)
    return bool(device.problems) and values == (None,) * len(values)
