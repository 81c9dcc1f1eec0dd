"""Where `gpuguard top` gets its scenes from: what the daemon saw while that is fresh, else the driver.

The driver is asked in a process of its own, which is copied off before any thread is started.  Every call here may
take seconds, when a driver hangs: top_app makes them in a thread.  Draws nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuguard.backends import Backend
from gpuguard.claims.watch import ClaimWatcher
from gpuguard.cli import deny
from gpuguard.cli.options import directory_of, of_daemon
from gpuguard.device_state import uses
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.enforcement.by_hand import Operator, signal_process
from gpuguard.enforcement.identity import Protected
from gpuguard.enforcement.limits import ActionLimits
from gpuguard.errors import GpuguardError
from gpuguard.history import audit_log
from gpuguard.host import HostUses
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
    ProcessStat,
    Snapshot,
)
from gpuguard.procfs import process_facts, read_memory
from gpuguard.top.scene import Ancestor, Identity, Scene, Thresholds, Waits

# What `gpuguard top` reads of which device at which look, and how looks become one snapshot.
#
# Memory, processes and utilization are read every time, 9 driver calls per device; power, temperature and health of
# one device in four, in turns, 8 more for those.  All of them at once would be 17 for each, and the driver serves one
# caller at a time.  The first look reads everything.  Does not read anything itself: see top_feed.


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


def due_devices(look: int, now: Snapshot) -> list[str]:
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


POLICY_FILE = "/etc/gpuguard/policy.yaml"
LINE_SECONDS = 5.0  # a plan of the waiting line costs more than a look, and changes slowly


class SceneFeed:
    """Looks at the machine again and again; used by one thread at a time.

    Args:
        args: with backend, dir, fresh.
        opened: opens the backend, at the first look that needs the driver.
    """

    def __init__(self, args: argparse.Namespace, opened: Callable[[], Backend]) -> None:
        self._args, self._open = args, opened
        self.fresh: bool = args.fresh
        self.tree: bool = args.tree
        self._backend: Backend | None = None
        self._former: Snapshot | None = None  # of the driver
        self._looks = 0
        self._lookout = ClaimWatcher()
        self._host = HostUses()
        self._line: tuple[float, tuple[Waits, ...]] = (float("-inf"), ())
        self._limits = ActionLimits()
        self._ancestors: dict[Identity, Ancestor] = {}
        self._thresholds, self._protected = site_rules(POLICY_FILE)

    def look(self) -> Scene:
        """The machine now.  Raises GpuguardError when neither the daemon nor the driver tells."""
        from gpuguard.cli import who

        clock = time.clock_gettime(time.CLOCK_BOOTTIME)
        snapshot = None if self.fresh else of_daemon(self._args, clock)
        age = clock - snapshot.clock if snapshot else None
        snapshot = who.with_claims(self._args, snapshot or self._drivers(), self._lookout)
        if snapshot.recorded:
            return Scene(snapshot, uses(snapshot), thresholds=self._thresholds)
        seen = process_facts(snapshot)
        # The daemon's look may be the same as before: rates need the time of ours.
        host = self._host.look(replace(snapshot, clock=time.clock_gettime(time.CLOCK_BOOTTIME)))
        return Scene(
            snapshot,
            uses(snapshot, seen),
            host,
            self._waiting(snapshot),
            self._above(seen) if self.tree else {},
            age,
            os.getloadavg()[0],
            self._thresholds,
        )

    def send(self, action: str, process: Identity, devices: tuple[str, ...]) -> ActionOutcome:
        """Signal a process by hand.  Raises GpuguardError when the driver cannot be asked about it."""
        deny.choose_log(self._args)
        operator = Operator(self._driver(), audit_log.append, self._limits, self._protected)
        return signal_process(operator, action, process, devices)

    def close(self) -> None:
        """Let go of the driver."""
        if self._backend:
            self._backend.close()

    def _driver(self) -> Backend:
        if self._backend is None:
            self._backend = self._open()
        return self._backend

    def _drivers(self) -> Snapshot:
        before, driver, read = self._former, self._driver(), groups(self._former)
        self._looks += 1
        try:
            now = merged(before, driver.sample(read), read)
            if before and (turn := due_devices(self._looks, now)):
                now = refreshed(now, driver.sample(IN_TURNS, turn))
            self._former = now
        except GpuguardError:
            self._former = None  # once it answers again, everything is read anew
            raise
        return self._former

    def _waiting(self, snapshot: Snapshot) -> tuple[Waits, ...]:
        """Who waits, in order, and when each is expected to start."""
        if snapshot.clock - self._line[0] >= LINE_SECONDS or snapshot.clock < self._line[0]:
            self._line = snapshot.clock, self._planned(snapshot)
        return self._line[1]

    def _planned(self, snapshot: Snapshot) -> tuple[Waits, ...]:
        from gpuguard.queue.tickets import read_tickets

        try:
            directory = directory_of(self._args)
            if not read_tickets(directory)[0]:
                return ()
            from gpuguard.queue.explain import in_words, stand
            from gpuguard.queue.settings import read_queue_settings

            line = stand(directory, snapshot, read_queue_settings().rules)
        except (GpuguardError, OSError):
            return ()  # the claims are missing too, and that is said
        tickets = [(place.ticket, in_words(place, line)) for place in line.places]
        return tuple(Waits(one.user, one.num_gpus, one.since, when, one.note) for one, when in tickets)

    def _above(self, seen: Mapping[int, ProcessStat | None]) -> dict[int, Ancestor]:
        """Every process that was looked up, with its command; read once per process."""
        from gpuguard.users import user_name

        found: dict[int, Ancestor] = {}
        kept: dict[Identity, Ancestor] = {}
        for pid, process in seen.items():
            if process is None or process.start_time is None:
                continue
            identity = (pid, process.start_time)
            known = self._ancestors.get(identity)
            if known is None:
                words = (read_memory(int(pid), "cmdline") or b"").rstrip(b"\0")
                command = (
                    tuple(word.decode("utf-8", "surrogateescape") for word in words.split(b"\0")) if words else None
                )
                try:
                    user = user_name(os.stat(f"/proc/{pid}").st_uid)
                except OSError:
                    user = None
                known = Ancestor(process.parent, user, command)
            kept[identity] = found[pid] = Ancestor(process.parent, known.user, known.command)
        self._ancestors = kept
        return found


def site_rules(path: str) -> tuple[Thresholds, Protected]:
    """What the site's policies find too much, and whom they never touch; nothing of both where we may not read them."""
    if not os.access(path, os.R_OK):
        return Thresholds(), Protected()
    from gpuguard.policies.files.loader import load_policies
    from gpuguard.policies.thresholds import MemoryRule, PowerRule, TemperatureRule

    file = load_policies(path)
    rules = [rule for policy in file.policies for rule in policy.rules]
    power = [rule.above for rule in rules if isinstance(rule, PowerRule)]
    memory = [rule.above for rule in rules if isinstance(rule, MemoryRule) and not rule.above.promised]
    return (
        Thresholds(
            temperature=min((rule.above for rule in rules if isinstance(rule, TemperatureRule)), default=None),
            power=min((one.value for one in power if not one.relative), default=None),
            power_share=min((one.value / 100 for one in power if one.relative), default=None),
            memory=min((one.value for one in memory if not one.relative), default=None),
            memory_share=min((one.value / 100 for one in memory if one.relative), default=None),
        ),
        file.protected,
    )
