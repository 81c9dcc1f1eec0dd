"""Where `gpuguard top` gets its scenes from: the daemon's last sample while that is new enough, else the driver.

The driver is asked in a process of its own.  Every call here may take seconds when a driver hangs, so the screen makes
them in a thread.  This module draws nothing.

Memory, processes and utilization are read every time, with 9 driver calls per device.  Power, temperature and health
take 8 more calls and are read from one device in four, in turns: all at once they would make 17 calls per device, and
the driver serves one caller at a time.  The first sample reads everything.  Clocks, errors, video and PCIe take 21 more
calls.  They are read in the same turns, and only while they are shown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gpuguard import model
from gpuguard.backends import Backend
from gpuguard.batch.public import PublicJob, public_jobs
from gpuguard.claims.directory import LockDirectory
from gpuguard.device_state import uses
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.enforcement.by_hand import Operator, signal_process
from gpuguard.enforcement.guard_limits import ActionLimits
from gpuguard.enforcement.identity import Protected
from gpuguard.errors import GpuguardError
from gpuguard.history import audit_log
from gpuguard.host import HostUses
from gpuguard.model import ActionName, Device, ProcessIdentity, ProcessStat, Snapshot
from gpuguard.policy_files.loader import load_policies
from gpuguard.procfs import process_facts, read_memory
from gpuguard.queue.priority import Ticket
from gpuguard.queue.reasons import start_text
from gpuguard.queue.state import read_queue
from gpuguard.queue.tickets import read_tickets
from gpuguard.source import SnapshotSource
from gpuguard.top.scene import Ancestor, HostMeters, Scene, Thresholds
from gpuguard.users import user_name

SAMPLING_THREAD = "gpuguard-samples"  # in which the screen uses a feed
EVERY_TIME = frozenset({model.MEMORY, model.PROCESSES, model.PROCESS_DETAILS, model.UTILIZATION})
IN_TURNS = frozenset({model.POWER, model.THERMAL, model.HEALTH})
TURNS = 4
SLOW_DEVICES = 2  # at most so many have their model.SLOW_GROUPS read in one sample


def groups(before: Snapshot | None, new: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the groups to read of all devices after the sample *before*; *new* holds those not wanted until now."""
    if before is None:
        return model.WHO_FIELDS | new
    # Only model.HEALTH finds the instances of a divided device, and without these their processes would be missing.
    return EVERY_TIME | new | ({model.HEALTH} if any(device.mig_mode for device in before.devices) else set())


def due_devices(number: int, now: Snapshot, turns: int = TURNS) -> list[str]:
    """Return the uuids of the devices of *now* whose turn it is in the *number*-th sample, each once in *turns*."""
    whole = [device.uuid for device in now.devices if not device.parent_uuid]
    return whole[number % turns :: turns]


def merged(before: Snapshot | None, now: Snapshot, read: frozenset[str], wanted: frozenset[str]) -> Snapshot:
    """Return *now*, with those groups that are *wanted* but were not *read* this time as they were *before*.

    A device that fails keeps nothing but its name.
    """
    if before is None:
        return now
    former = {device.uuid: device for device in before.devices}
    kept = {name for group, names in model.GROUPED_FIELDS.items() if group in wanted - read for name in names}
    if "processes" in kept:
        kept.add("processes_plausible")  # which says whether that list can be relied on
    devices = tuple(_completed(device, former.get(device.uuid), kept) for device in now.devices)
    alive = {None, *(device.uuid for device in devices if not _fails(device))}
    gaps = tuple(gap for gap in before.gaps if gap.field in kept and gap.device in alive)
    names = ("driver_version", "nvml_version", "cuda_version")
    versions = {name: getattr(now, name) or getattr(before, name) for name in names}
    return replace(now, devices=devices, gaps=(*gaps, *now.gaps), **versions)


def _completed(now: Device, before: Device | None, kept: set[str]) -> Device:
    if before is None:
        return now
    if _fails(now):
        return replace(now, name=now.name or before.name)
    return replace(now, **{name: getattr(before, name) for name in kept})


def _fails(device: Device) -> bool:
    """Return whether a device does not answer at all, so that earlier readings say nothing about it any more."""
    values = (device.memory_total, device.temperature, device.power_draw, device.compute_mode)
    return bool(device.problems) and values == (None,) * len(values)


POLICY_FILE = "/etc/gpuguard/policy.yaml"
LATE_SECONDS = 0.5  # how late a daemon may be that samples as often as the screen is drawn
QUEUE_SECONDS = 5.0  # between two plans of the queue, because one costs more than a sample and changes slowly


class SceneFeed:
    """Reads the machine again and again; used by one thread at a time.

    Args:
        backend: name of the backend.
        open_backend: opens it when the driver is needed for the first time.
        find_directory: finds the directory of the claims.
        choose_log: decides, before the first signal, which audit log signals are written to.

    Attributes:
        more: groups of fields beside WHO_FIELDS that are shown.
        every: seconds between two scenes; once the daemon's sample is older, the driver is asked.
            None if the daemon's sample is good enough.
    """

    def __init__(
        self,
        backend: str,
        open_backend: Callable[[], Backend],
        find_directory: Callable[[], LockDirectory],
        choose_log: Callable[[], object],
    ) -> None:
        self.tree = False  # whether a scene has the ancestors of the processes that compute
        self.more: frozenset[str] = frozenset()
        self.every: float | None = None
        self.source = SnapshotSource(backend, open_backend, find_directory, read=self._read_driver)
        self._find_directory, self._choose_log = find_directory, choose_log
        self._before: Snapshot | None = None  # the last snapshot from the driver
        self._wanted: frozenset[str] = frozenset()  # the groups that it was to have
        self._samples = self._driver_samples = 0
        self._host = HostUses()
        self._queue: tuple[float, tuple[tuple[Ticket, str], ...], tuple[PublicJob, ...]] = (float("-inf"), (), ())
        self._limits = ActionLimits()
        self._thresholds, self._protected = site_rules(POLICY_FILE)

    def sample(self) -> Scene:
        """Sample the machine now.  Raises GpuguardError if neither the daemon nor the driver tells."""
        snapshot, age = self.source.joined()
        if age and self.every and age > self.every + LATE_SECONDS:
            self.source.fresh, self.every = True, None  # only once, because the user may still choose the daemon's
            snapshot, age = self.source.joined()
        if snapshot.recorded:
            return Scene(snapshot, uses(snapshot), thresholds=self._thresholds)
        stats = process_facts(snapshot)
        # Rates need the current time, because the daemon's snapshot may be the same as before.
        host = self._host.sample(replace(snapshot, clock=time.clock_gettime(time.CLOCK_BOOTTIME)))
        viewer = user_name(os.geteuid())
        if not 0 <= snapshot.clock - self._queue[0] < QUEUE_SECONDS:
            self._queue = snapshot.clock, *self._planned(snapshot, viewer)
        above, meters = _above(stats) if self.tree else {}, host_meters(is_first=not self._samples)
        self._samples += 1
        _planned_at, waiting, jobs = self._queue
        return Scene(snapshot, uses(snapshot, stats), host, waiting, jobs, above, age, meters, self._thresholds, viewer)

    def send(self, action: ActionName, process: ProcessIdentity, devices: tuple[str, ...]) -> ActionOutcome:
        """Signal a process by hand.  Raises GpuguardError if the driver cannot be asked about it."""
        self._choose_log()
        operator = Operator(self.source.backend(), audit_log.append, self._limits, self._protected)
        return signal_process(operator, action, process, devices)

    def _read_driver(self, backend: Backend) -> Snapshot:
        before, more = self._before, self.more
        wanted = model.WHO_FIELDS | more
        read = groups(before, wanted - self._wanted if before else more)
        self._driver_samples += 1
        try:
            now = merged(before, backend.sample(read), read, wanted)
            for turn, turns in (
                (IN_TURNS | (more - model.SLOW_GROUPS), TURNS),
                (more & model.SLOW_GROUPS, len(now.devices) // SLOW_DEVICES),
            ):
                due = due_devices(self._driver_samples, now, max(TURNS, turns)) if turn and before else []
                if due:
                    now = now.updated(merged(now, backend.sample(turn, due), turn, model.ALL_FIELDS))
        except GpuguardError:
            self._before = None  # so that everything is read anew once it answers again
            raise
        self._before, self._wanted = now, wanted
        return now

    def _planned(self, snapshot: Snapshot, viewer: str) -> tuple[tuple[tuple[Ticket, str], ...], tuple[PublicJob, ...]]:
        """Return the tickets in the queue, each with its expected start, and the jobs, those of *viewer* first."""
        try:
            directory = self._find_directory()
            jobs = tuple(sorted(public_jobs(directory, snapshot.claims), key=lambda job: job.user != viewer))
            if not read_tickets(directory)[0]:
                return (), jobs
            queue = read_queue(directory, snapshot)
        except (GpuguardError, OSError):
            return (), ()  # the claims are missing as well, and the screen says so
        return tuple((position.ticket, start_text(position, queue)) for position in queue.positions), jobs


def host_meters(*, is_first: bool) -> HostMeters:
    """Read CPU, memory and swap of the machine; CPU is a rate, so it is unknown in the first sample."""
    import psutil  # not above, because man pages are made from the commands where no package is installed

    cpu, memory, swap = psutil.cpu_percent(), psutil.virtual_memory(), psutil.swap_memory()
    used = memory.total - memory.available
    return HostMeters(
        None if is_first else cpu, used, memory.total, swap.used, swap.total, os.getloadavg(), os.cpu_count()
    )


def _above(stats: Mapping[int, ProcessStat | None]) -> dict[int, Ancestor]:
    """Return every process that was looked up, by its pid."""
    known = {pid: stat for pid, stat in stats.items() if stat and stat.start_time is not None}
    return {pid: Ancestor(stat.parent, *_user_and_command(pid, stat.start_time)) for pid, stat in known.items()}


@lru_cache(maxsize=10_000)
def _user_and_command(pid: int, _: float | None) -> tuple[str | None, tuple[str, ...] | None]:
    """Read the user and the command of a process, once for each start time that its pid has had."""
    words = (read_memory(pid, "cmdline") or b"").rstrip(b"\0")
    command = tuple(word.decode("utf-8", "surrogateescape") for word in words.split(b"\0")) if words else None
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid), command
    except OSError:
        return None, command


def site_rules(path: str) -> tuple[Thresholds, Protected]:
    """Return the thresholds of the site's policies and what they never touch, both empty if they cannot be read."""
    if not os.access(path, os.R_OK):
        return Thresholds(), Protected()
    file = load_policies(path)
    rules: list[Any] = [rule for policy in file.policies for rule in policy.rules]
    power = [rule.above for rule in rules if rule.kind.limits == "power_draw"]
    memory = [rule.above for rule in rules if rule.kind.limits == "memory_used" and not rule.above.promised]
    return (
        Thresholds(
            temperature=min((rule.above for rule in rules if rule.kind.limits == "temperature"), default=None),
            power=min((amount.value for amount in power if not amount.relative), default=None),
            power_share=min((amount.value / 100 for amount in power if amount.relative), default=None),
            memory=min((amount.value for amount in memory if not amount.relative), default=None),
            memory_share=min((amount.value / 100 for amount in memory if amount.relative), default=None),
        ),
        file.protected,
    )
