"""Builders with harmless defaults: a test states only the facts that matter to it.

from builders import GIB, a_device, a_process, a_snapshot
a_snapshot(a_device(), a_device(memory_used=40 * GIB), a_device(processes=(a_process(user="bob"),)))
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from gpuguard import model
from gpuguard.model import ClaimRecord, Device, Event, Finding, Gap, GpuProcess, Snapshot, Subject
from gpuguard.policies.rule import Rule
from gpuguard.policies.view import Arrivals, RuleView, Sample, device_subject, process_subject
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.reservations import ReservationCalendar, ReservationStatus

MIB = 2**20
GIB = 2**30
TOTAL = 80 * GIB


def a_uuid(index: int, kind: str = "GPU") -> str:
    """A well-formed uuid that starts with the index: GPU-00000003-0000-4000-8000-000000000003."""
    return f"{kind}-{index:08x}-0000-4000-8000-{index:012x}"


def a_device(index: int = 0, **fields: Any) -> Device:
    """A healthy, idle H100 80GB.  memory_free follows from memory_used (and the reverse) unless it is given."""
    facts: dict[str, Any] = {
        "uuid": a_uuid(index),
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{index + 1:02X}:00.0",
        "minor_number": index,
        "numa_node": 0,
        "memory_total": TOTAL,
        "memory_reserved": 0,
        "processes": (),
        "utilization": 0.0,
        "memory_utilization": 0.0,
        "problems": (),
        "compute_mode": "default",
        "mig_mode": False,
        "temperature": 35.0,
        "power_draw": 70.0,
        "power_limit": 700.0,
    }
    facts.update(fields)
    facts.setdefault("memory_used", _difference(facts, "memory_free", 4 * MIB))
    facts.setdefault("memory_free", _difference(facts, "memory_used", None))
    return Device(index=index, **facts)


def a_mig_instance(parent: Device, number: int = 0, **fields: Any) -> Device:
    """A MIG instance of *parent*: 3g.40gb, with the parent's index."""
    facts: dict[str, Any] = {
        "uuid": a_uuid(16 * (parent.index + 1) + number, "MIG"),
        "parent_uuid": parent.uuid,
        "mig_profile": "3g.40gb",
        "mig_mode": True,
        "gpu_instance_id": number + 1,
        "compute_instance_id": 0,
        "memory_total": 40 * GIB,
        "utilization": None,
        "memory_utilization": None,
    }
    facts.update(fields)
    return a_device(parent.index, **facts)


def a_partition(parent: Device, number: int = 0, **fields: Any) -> Device:
    """A partition of *parent*, an AMD GPU in the mode CPX."""
    facts: dict[str, Any] = {
        "uuid": f"XCP-{parent.uuid[4:]}-{number}",
        "vendor": "amd",
        "name": "AMD Instinct MI300X",
        "mig_profile": "cpx",
        "gpu_instance_id": number,
        "compute_instance_id": None,
        "memory_total": 24 * GIB,
    }
    return a_mig_instance(parent, number, **{**facts, **fields})


def a_process(pid: int = 4711, **fields: Any) -> GpuProcess:
    """A compute process of alice with 10 GiB."""
    facts: dict[str, Any] = {
        "memory_used": 10 * GIB,
        "kind": "compute",
        "start_time": 1000.0,
        "uid": 1001,
        "user": "alice",
        "command": ("python", "train.py"),
    }
    facts.update(fields)
    return GpuProcess(pid=pid, **facts)


def a_snapshot(*devices: Device, **fields: Any) -> Snapshot:
    """A machine with these devices (one idle device when none is given), at clock 10000.

    Devices that were all built without an index are numbered in the order given.
    """
    given = devices or (a_device(),)
    if len({device.uuid for device in given}) < len(given):
        given = tuple(_numbered(device, index) for index, device in enumerate(given))
    facts: dict[str, Any] = {
        "host": "node1",
        "backend": "simulated",
        "taken_at": 1_700_000_000.0,
        "clock": 10_000.0,
        "driver_version": "550.54.15",
        "nvml_version": "12.550.54.15",
        "cuda_version": "12.4",
    }
    facts.update(fields)
    return Snapshot(devices=given, **facts)


def a_claim_record(*devices: Device | str, **fields: Any) -> ClaimRecord:
    """A living claim of alice on these devices (or uuids), made an hour before a_snapshot()."""
    facts: dict[str, Any] = {
        "id": "a1b2c3",
        "uid": 1001,
        "user": "alice",
        "pid": 4700,
        "since": 1_700_000_000.0 - 3600,
        "command": ("python", "train.py"),
    }
    facts.update(fields)
    uuids = tuple(device if isinstance(device, str) else device.uuid for device in devices)
    return ClaimRecord(devices=uuids or (a_uuid(0),), **facts)


def written(event: Event) -> bool:
    """An audit log: it takes everything but a fault of ours, which the guard survives and a test must not."""
    assert (event.kind, event.outcome) != ("watchdog", "failed"), event.message
    return True


def _difference(facts: dict[str, Any], other: str, otherwise: int | None) -> int | None:
    """memory_total minus reserved minus the *other* part, where all are known."""
    total, part = facts.get("memory_total"), facts.get(other)
    if total is None or part is None:
        return None if other in facts else otherwise
    return int(total - part - (facts.get("memory_reserved") or 0))


def _numbered(device: Device, index: int) -> Device:
    identity = a_device(index)
    return replace(device, index=index, uuid=identity.uuid, pci_bus_id=identity.pci_bus_id, minor_number=index)


class Machine:
    """A backend over devices that the test may change between two samples; it counts and records what it is asked."""

    name = "machine"
    simulated = True

    def __init__(self, *devices: Device) -> None:
        self.devices = list(devices) or [a_device(index=index) for index in range(4)]
        self.asked: list[tuple[frozenset[str], tuple[str, ...] | None]] = []
        self.before_sample: Callable[[], object] = bool  # no lambda: a machine goes to other processes, too

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        self.asked.append((frozenset(fields), None if devices is None else tuple(devices)))
        self.before_sample()
        chosen = [
            each for each in self.devices if devices is None or each.uuid in devices or each.parent_uuid in devices
        ]
        return a_snapshot(*chosen)

    def close(self) -> None:
        pass

    def change(self, index: int, **fields: object) -> None:
        self.devices[index] = replace(self.devices[index], **fields)  # type: ignore[arg-type]


class Reticent(Machine):
    """A machine that tells what it is asked for and no more, as drivers do; MIG instances show where health is read."""

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        if any(uuid.startswith("MIG-") for uuid in devices or ()):
            fields = {*fields, model.HEALTH}
        snapshot = super().sample(fields, devices)
        shown = [device for device in snapshot.devices if model.HEALTH in fields or device.parent_uuid is None]
        silent = [device.uuid for device in shown if device.processes is None and model.PROCESSES in fields]
        told = tuple(self._told(device, fields) for device in shown)
        return replace(snapshot, devices=told, gaps=tuple(Gap(uuid, "processes", "not told") for uuid in silent))

    def _told(self, device: Device, fields: Collection[str]) -> Device:
        idle = device.memory_used is None or device.memory_used < model.BUSY_MEMORY
        if model.PROCESSES not in fields and not (model.IDLE_PROCESSES in fields and idle):
            device = replace(device, processes=None, processes_plausible=True)
        return device if model.HEALTH in fields else replace(device, problems=None, compute_mode=None, mig_mode=None)


class Scripted:
    """A backend that shows one snapshot after the other, the last one for ever; an error among them is raised."""

    name, simulated = "scripted", True

    def __init__(self, *shown: Snapshot | Exception) -> None:
        self.shown, self.asked = list(shown), list[Collection[str]]()

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        self.asked.append(fields)
        now = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        if isinstance(now, Exception):
            raise now
        return now

    def close(self) -> None:
        pass


NOW = 1_800_000_000.0
HOUR = 3600.0
UUIDS = tuple(f"d{number}" for number in range(8))
_numbers = itertools.count(1)


def a_reservation(user: int = 1, gpus: int = 1, begins: float = HOUR, hours: float = 1.0, **fields: Any) -> Reservation:
    """One of a user for himself, or for the group *gid*, made now, for an hour from in an hour; the names ascend."""
    facts: dict[str, Any] = {
        "id": f"r{next(_numbers):06}", "maker": user, "uid": user, "user": f"u{user}", "num_gpus": gpus,
        "begins": NOW + begins, "ends": NOW + begins + hours * HOUR, "devices": UUIDS, "made": NOW,
    }  # fmt: skip
    return Reservation(**{**facts, **fields, **({"uid": None, "user": None} if "gid" in fields else {})})


def a_reserved(*statuses: ReservationStatus, now: float = NOW, **fields: Any) -> ReservationCalendar:
    """What was read: one reservation that counts, unless others are given."""
    return ReservationCalendar(
        statuses or (ReservationStatus(a_reservation(), no_show_at=now + 1.5 * HOUR),), now=now, **fields
    )


HELD = a_device(memory_used=20 * GIB, utilization=0.0, processes=(a_process(),))
A_DEVICE = device_subject(a_device())
A_PROCESS = process_subject(a_device(), a_process())


def found(rule: Rule, *devices: Device, claims: Any = (), gaps: Any = (), **view: Any) -> list[Finding]:
    """What *rule* finds on a machine of these, each with the name of the rule."""
    findings = list(rule.check(RuleView(a_snapshot(*devices, claims=tuple(claims), gaps=tuple(gaps)), **view)))
    assert {finding.rule for finding in findings} <= {rule.kind.name}
    return findings


def found_later(rule: Rule, *devices: Device, claims: Any, **view: Any) -> list[Finding]:
    """What *rule* finds there if the processes came after the claims."""
    return found(rule, *devices, claims=claims, arrivals=claims_first(claims, *devices), **view)


def claims_first(claims: Any, *devices: Device) -> Arrivals:
    """What is known if the processes on *devices* came after the *claims*."""
    arrivals, empty = Arrivals(), [replace(device, processes=()) for device in devices]
    for shown in (empty, devices):
        arrivals.look(a_snapshot(*shown, claims=tuple(claims)))
    return arrivals


def pids(findings: list[Finding]) -> list[int]:
    return sorted(process.pid for finding in findings for process in finding.processes)


def a_series(of: Callable[[float], float], *, seconds: float = 600, every: float = 10) -> list[Sample]:
    """Up to the clock of a_snapshot(); *of* is given the seconds since the beginning."""
    steps = int(seconds / every)
    return [(10_000 - seconds + step * every, of(step * every)) for step in range(steps + 1)]


def a_past(samples: list[Sample], field: str = "utilization", of: Subject = A_DEVICE) -> dict:
    return {"past": {(of, field): samples}}
