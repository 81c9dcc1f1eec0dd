"""The names of expressions: what each stands for, its type, and where its value comes from.  None = unknown.

A name about a process makes the whole expression one about processes; without any it is about devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuguard.attribution import claims_on, claims_readable
from gpuguard.model import Device, GpuProcess
from gpuguard.policies.people import computing
from gpuguard.policies.view import HostUse, View

# Types, as they are called in faults.
BYTES, PERCENT, SECONDS, CELSIUS, WATTS, RATE = "memory size", "percentage", "duration", "temperature", "power", "rate"
NUMBER, TEXT, TEXTS, TRUTH = "number", "text", "list of texts", "truth"
EXAMPLES = {BYTES: "30GiB", PERCENT: "5%", SECONDS: "2h", CELSIUS: "85C", WATTS: "300W", RATE: "1MB/s"}

Value = float | str | bool | frozenset[str] | frozenset[float | str] | None
LONGEST_TEXT = 4096  # characters of a text that are looked at: users write their command lines themselves
_NOTHING = HostUse()


@dataclass(frozen=True)
class Place:
    """What the names of an expression are about."""

    view: View
    device: Device
    process: GpuProcess | None = None

    @property
    def host(self) -> HostUse:
        """What the process does beside the GPU."""
        if self.process is None or self.process.start_time is None:
            return _NOTHING
        return self.view.host.get((self.process.pid, self.process.start_time), _NOTHING)


@dataclass(frozen=True)
class Name:
    """A name: its type, whether it is about a process, its meaning, and how to get the value."""

    type: str
    of_process: bool
    meaning: str
    value: Callable[[Place], Value]


def _of_process(kind: str, meaning: str, get: Callable[[GpuProcess], Value]) -> Name:
    return Name(kind, True, meaning, lambda place: None if place.process is None else get(place.process))


def _of_device(kind: str, meaning: str, get: Callable[[Device], Value]) -> Name:
    return Name(kind, False, meaning, lambda place: get(place.device))


def _run_time(place: Place) -> Value:
    if place.process is None or place.process.start_time is None:
        return None
    return place.view.clock - place.process.start_time


def _command(process: GpuProcess) -> Value:
    return None if process.command is None else " ".join(process.command)[:LONGEST_TEXT]


def _groups(place: Place) -> Value:
    if place.process is None or place.process.uid is None:
        return None
    return place.view.groups.get(place.process.uid)


def _claimed(place: Place) -> Value:
    return bool(claims_on(place.view.snapshot, place.device)) if claims_readable(place.view.snapshot) else None


def _claimed_by(place: Place) -> Value:
    records = claims_on(place.view.snapshot, place.device)
    if not claims_readable(place.view.snapshot) or any(record.uid < 0 for record in records):
        return None
    return frozenset(record.user for record in records)


def _process_count(device: Device) -> Value:
    return len(computing(device)) if device.processes is not None and device.processes_plausible else None


NAMES: dict[str, Name] = {
    "memory_used": _of_process(BYTES, "of the process on the device", lambda process: process.memory_used),
    "process_utilization": _of_process(PERCENT, "of the SMs, by the process", lambda process: process.utilization),
    "run_time": Name(SECONDS, True, "since the start of the process", _run_time),
    "user": _of_process(TEXT, "name of the user", lambda process: process.user),
    "uid": _of_process(NUMBER, "number of the user", lambda process: process.uid),
    "groups": Name(TEXTS, True, "names of the groups of the user: 'students' in groups", _groups),
    "executable": _of_process(TEXT, "path of the file that runs", lambda process: process.executable),
    "command": _of_process(TEXT, "the command line, which its user writes as he likes", _command),
    "container": _of_process(TEXT, "id of the container, unknown outside", lambda process: process.container),
    "cpu": Name(PERCENT, True, "of one core, by the process", lambda place: place.host.cpu),
    "host_memory": Name(BYTES, True, "resident, beside the GPU", lambda place: place.host.memory),
    "network": Name(RATE, True, "of the process, both ways", lambda place: place.host.network),
    "utilization": _of_device(PERCENT, "of the device", lambda device: device.utilization),
    "memory_utilization": _of_device(PERCENT, "of its memory's bandwidth", lambda device: device.memory_utilization),
    "device_memory_used": _of_device(BYTES, "by all processes", lambda device: device.memory_used),
    "device_memory_free": _of_device(BYTES, "of the device", lambda device: device.memory_free),
    "device_memory_total": _of_device(BYTES, "of the device", lambda device: device.memory_total),
    "temperature": _of_device(CELSIUS, "of the device", lambda device: device.temperature),
    "temperature_slowdown": _of_device(CELSIUS, "at which it slows down", lambda device: device.temperature_slowdown),
    "power_draw": _of_device(WATTS, "of the device", lambda device: device.power_draw),
    "power_limit": _of_device(WATTS, "of the device", lambda device: device.power_limit),
    "device_index": _of_device(NUMBER, "0 is the first device", lambda device: device.index),
    "model": _of_device(TEXT, "name of the device", lambda device: device.name),
    "processes": _of_device(NUMBER, "how many compute on the device", _process_count),
    "claimed": Name(TRUTH, False, "whether somebody has claimed the device", _claimed),
    "claimed_by": Name(TEXTS, False, "names of the users who have claimed it: user not in claimed_by", _claimed_by),
}
NAMES_OF_HOST = frozenset({"cpu", "host_memory", "network"})  # those that View.host is wanted for
