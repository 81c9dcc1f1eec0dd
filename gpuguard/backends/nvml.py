"""NVIDIA devices, through nvidia-ml-py: which there are, their MIG instances, and how they are connected.

The driver library is initialised once per process, and again in a forked child.  Handles and facts that never change
are kept; everything else is read when it is asked for.  A device that fails alone becomes a problem of that device.
A call may hang or crash in the driver, so run this in a worker: see client.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from gpuguard import model
from gpuguard.backends import SILENT, UNRESPONSIVE, nvml_fields
from gpuguard.backends.nvml_calls import (
    BAD_TEXT,
    LOST,
    NOT_FOUND,
    PROBLEMS,
    REASONS,
    CallResult,
    DeviceLost,
    KnownDevice,
    Reading,
    call,
    start,
)
from gpuguard.backends.nvml_fields import FIRST_READERS, READERS
from gpuguard.backends.plausibility import is_uuid
from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.model import Device, DeviceAndGaps, Gap, Snapshot
from gpuguard.procfs import boot_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
    from typing import Any

# How old a kept setting may be for a caller that samples all devices again and again.  Settings are limits and modes,
# which an administrator sets; fans and replaced rows, for which no job is stopped; and that no process draws or is a
# client of MPS.
# They are forgotten earlier if another process computes: see nvml_fields._forget.  A caller that names devices is about
# to act on what it sees, so it gets the current values.
SETTINGS_SECONDS = 10.0
# How old temperature and power draw may be for a person at a screen, who wants BRIEF: power is a mean of one second.
# A sample every 2 s, as `who --watch` takes it, has the current values.
RECENT_SECONDS = 1.5
SLOW_SECONDS = 0.0005  # for the first device; if it is faster, the others are read before threads have started
MOST_DEVICES = 1024  # of a machine: each takes a call, so a count without a meaning would take hours
_TOPOLOGY = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t

_NOT_FOR_MIG = sentence("driver.not_for_mig", "not told for MIG instances")


def open(spec: str = "") -> Nvml:
    """Open the devices of this machine.  Raises BackendError if the driver cannot be reached."""
    if spec:
        raise InvalidRequest(
            sentence("nvml.takes_none", "the backend nvml takes no {spec}: write `--backend nvml`.", spec=repr(spec))
        )
    return Nvml()


class Nvml:
    """A Backend.

    With `ahead` and a slow driver, several threads read the devices that it sees for the first time.
    """

    name = "nvml"
    simulated = False

    def __init__(self) -> None:
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self.ahead = False
        self._pid = 0
        self._settings_read = self._recent_read = float("-inf")
        self._start()

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does.  HEALTH finds MIG instances, which follow their parent and have its index."""
        self._start()
        # Read before any call, so that nothing that started later is taken for something that was seen.
        taken_at, clock = time.time(), boot_clock()
        versions = self._versions(fields) if model.MODEL in fields else {}
        if clock - self._settings_read > SETTINGS_SECONDS:
            self._settings_read = clock
            for known in self._devices.values():
                known.settings.clear()
        if clock - self._recent_read > RECENT_SECONDS:
            self._recent_read = clock
            for known in self._devices.values():
                known.recent.clear()
        seek = None if devices is None else frozenset(devices)
        if any(uuid.startswith("MIG-") for uuid in seek or ()):
            fields = {*fields, model.HEALTH}  # which finds instances
        read = self._read_all(fields, seek)
        found = [device for device, _ in read]
        gaps = [gap for _, missing in read for gap in missing]
        topology = None
        if model.TOPOLOGY in fields:
            topology, missing = self._connections(found)
            gaps += missing
        return Snapshot(
            host=os.uname().nodename,
            backend=self.name,
            taken_at=taken_at,
            clock=clock,
            devices=tuple(found),
            gaps=tuple(gaps),
            topology=topology,
            driver_version=versions.get("driver_version"),
            nvml_version=versions.get("nvml_version"),
            cuda_version=versions.get("cuda_version"),
        )

    def close(self) -> None:
        """Let go of the driver."""
        # A forked child must not shut down what belongs to its parent.
        if self._pid == os.getpid():
            call(self._nvml, "nvmlShutdown")
        self._pid = 0

    def _start(self) -> None:
        if self._pid != os.getpid():
            self._nvml = start()
            self._pid = os.getpid()
            self._count: int | None = None
            self._devices: dict[int, KnownDevice] = {}
            self._owners: dict[str, int] = {}  # uuid -> index
            self._ahead: Ahead | None = None
            self._settings_read = self._recent_read = float("-inf")
            self._static: dict[str, str | None] = {}
            self._ancestors: dict[tuple[int, int], CallResult] = {}

    def _read_all(self, fields: Collection[str], seek: Set[str] | None) -> list[DeviceAndGaps]:
        """Return the devices with their gaps, in index order; with *seek*, only those uuids and their families."""
        found: list[DeviceAndGaps] = []
        count, begun = self._device_count(), time.monotonic()
        for index in range(count):
            opened = self._devices.get(index)
            # Threads never read the first device: what the binding creates only when it is first needed must not be
            # created by several threads at once.
            if index == 1 and self.ahead and seek is None and not opened and time.monotonic() - begun > SLOW_SECONDS:
                self._ahead = self._read_ahead(fields)
            if seek is not None and not (self._may_be(opened, seek) if opened else self._unknown(seek)):
                continue
            readings = self._read(index, fields, seek)
            if seek is None or any(device.uuid in seek for device, _ in readings):
                found += readings
        self._ahead = None
        return found

    def _read(self, index: int, fields: Collection[str], seek: Set[str] | None) -> list[DeviceAndGaps]:
        """Return a device and its MIG instances, or nothing if it turns out not to be one of *seek*."""
        known = self._devices.get(index)
        uuid = known.uuid if known and self._owners.get(known.uuid) == index else f"unknown-{index}"
        if index in self.skip:
            return [(Device(index, uuid, problems=(UNRESPONSIVE,)), [Gap(uuid, "device", SILENT)])]
        self.progress(index)
        prefetched = self._ahead and self._ahead.of(index)
        opened = known or prefetched or self._opened(index)
        if isinstance(opened, KnownDevice) and self._owners.get(opened.uuid) != index:
            opened = self._named(opened)
        if isinstance(opened, CallResult):
            closed = sentence("problem.cannot_be_opened", "cannot be opened: {reason}", reason=opened.reason)
            problem = PROBLEMS.get(opened.code, closed)
            return [(Device(index, uuid, problems=(problem,)), [Gap(uuid, "device", opened.reason)])]
        if seek is not None:
            if not self._may_be(opened, seek):
                return []
            opened.settings.clear()
            opened.recent.clear()
        reading = Reading(self._nvml, opened, fields)
        try:
            nvml_fields.read(reading)
            parts = self._own(list(instances(reading)), reading) if reading.values.get("mig_mode") else []
        except DeviceLost:
            return [_lost(opened, fields)]
        finally:
            opened.ahead.clear()
        problems = tuple(reading.problems) if model.HEALTH in fields or reading.problems else None
        return [(Device(index, opened.uuid, problems=problems, **reading.values), reading.gaps), *parts]

    def _own(self, instances: list[DeviceAndGaps], reading: Reading) -> list[DeviceAndGaps]:
        """Return those of *instances* that no other device has as well: by its uuid one would be claimed for both."""
        found = []
        for instance, gaps in instances:
            if (owner := self._owners.setdefault(instance.uuid, instance.index)) == instance.index:
                found.append((instance, gaps))
            else:
                has_it = sentence("nvml.has_it_too", "GPU {index} has {uuid}, too", index=owner, uuid=instance.uuid)
                reading.gap("mig instances", has_it)
        return found

    def _named(self, opened: KnownDevice) -> KnownDevice | CallResult:
        """Return *opened*, or why it cannot be claimed: its uuid does not distinguish it from others."""
        owner = self._owners.setdefault(opened.uuid, opened.index) if is_uuid(opened.uuid) else None
        if owner == opened.index:
            return opened
        self._devices.pop(opened.index, None)
        if owner is None:
            return CallResult(None, BAD_TEXT, _odd_uuid(opened.uuid))
        return CallResult(None, BAD_TEXT, sentence("nvml.same_uuid", "GPU {index} has the same uuid", index=owner))

    def _read_ahead(self, fields: Collection[str]) -> Ahead:
        def prefetch(index: int) -> KnownDevice | CallResult:
            opened = self._opened(index)
            if isinstance(opened, KnownDevice):
                with suppress(DeviceLost):
                    nvml_fields.read(Prefetch(self._nvml, opened, fields), FIRST_READERS)
            return opened

        return Ahead([index for index in range(1, self._device_count()) if index not in self.skip], prefetch)

    def _may_be(self, opened: KnownDevice, seek: Set[str]) -> bool:
        """Return whether the device is one of *seek*, or may have an instance of *seek* that was seen nowhere yet."""
        known = not seek.isdisjoint({opened.uuid, *opened.instances})
        return known or any(uuid.startswith("MIG-") for uuid in self._unknown(seek))

    def _unknown(self, seek: Set[str]) -> Set[str]:
        return seek - {uuid for opened in self._devices.values() for uuid in (opened.uuid, *opened.instances)}

    def _device_count(self) -> int:
        if self._count is None:
            answer = call(self._nvml, "nvmlDeviceGetCount")
            if answer.code:
                raise BackendError(
                    sentence(
                        "nvml.no_count",
                        "the driver does not count its GPUs: {reason}.  Try `nvidia-smi`.",
                        reason=answer.reason,
                    )
                )
            if not 0 <= answer.value <= MOST_DEVICES:
                raise BackendError(
                    sentence(
                        "nvml.odd_count",
                        "the driver counts {count} GPUs, which cannot be.  Try `nvidia-smi`.",
                        count=answer.value,
                    )
                )
            self._count = int(answer.value)
        return self._count

    def _opened(self, index: int) -> KnownDevice | CallResult:
        handle = call(self._nvml, "nvmlDeviceGetHandleByIndex", index)
        if handle.code:
            return handle
        uuid = call(self._nvml, "nvmlDeviceGetUUID", handle.value)
        if uuid.code:
            return uuid
        self._devices[index] = KnownDevice(index, handle.value, uuid.value)
        return self._devices[index]

    def _versions(self, fields: Collection[str]) -> dict[str, str | None]:
        if "driver_version" not in self._static:
            self._static["driver_version"] = call(self._nvml, "nvmlSystemGetDriverVersion").value
        if model.BRIEF not in fields and "cuda_version" not in self._static:
            cuda = call(self._nvml, "nvmlSystemGetCudaDriverVersion").value
            self._static["nvml_version"] = call(self._nvml, "nvmlSystemGetNVMLVersion").value
            self._static["cuda_version"] = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
        return self._static

    def _connections(self, devices: list[Device]) -> tuple[tuple[tuple[str, str, str], ...], list[Gap]]:
        """Return Snapshot.topology of the devices that can be asked, and a gap for each pair that is unknown."""
        healthy = [device for device in devices if device.index in self._devices and not device.parent_uuid]
        healthy = [device for device in healthy if not {PROBLEMS[LOST], UNRESPONSIVE} & set(device.problems or ())]
        linked = any(device.nvlink_links for device in healthy)
        buses = {device.uuid: self._bus_id(device) if linked else None for device in healthy}
        pairs, gaps = [], []
        for one, other in combinations(healthy, 2):
            if linked and _by_nvlink(one, other, buses):
                pairs.append((one.uuid, other.uuid, "NVLINK"))
                continue
            answer = self._ancestor(one.index, other.index)
            if answer.value in _TOPOLOGY:
                pairs.append((one.uuid, other.uuid, _TOPOLOGY[answer.value]))
            else:
                level = sentence("nvml.level", "level {number}", number=answer.value)
                gaps.append(Gap(one.uuid, f"topology to {other.uuid}", answer.reason or level))
        return tuple(pairs), gaps

    def _ancestor(self, one: int, other: int) -> CallResult:
        if (one, other) not in self._ancestors:
            self.progress(one)
            handles = (self._devices[one].handle, self._devices[other].handle)
            answer = call(self._nvml, "nvmlDeviceGetTopologyCommonAncestor", *handles)
            if answer.code:
                return answer
            self._ancestors[one, other] = answer
        return self._ancestors[one, other]

    def _bus_id(self, device: Device) -> str | None:
        reading = Reading(self._nvml, self._devices[device.index], ())
        try:
            nvml_fields.read_row(reading, nvml_fields.PCI_BUS_ID)
        except DeviceLost:
            return None
        return reading.values.get("pci_bus_id")


def _by_nvlink(one: Device, other: Device, buses: Mapping[str, str | None]) -> bool:
    """Return whether a link joins the two, or links of both go to switches: an end that is no device is a switch."""
    ends, other_ends = ({end for _, end in device.nvlink_links or ()} for device in (one, other))
    if buses[other.uuid] in ends or buses[one.uuid] in other_ends:
        return True
    devices = set(buses.values())
    return bool(ends - devices) and bool(other_ends - devices)


def _lost(opened: KnownDevice, fields: Collection[str]) -> DeviceAndGaps:
    """Return a device that was lost before or while it was read; no value that was just read counts."""
    name = opened.facts.get(("nvmlDeviceGetName",), CallResult()).value
    device = Device(opened.index, opened.uuid, name=name, problems=(PROBLEMS[LOST],))
    return device, [Gap(opened.uuid, group, REASONS[LOST]) for group in sorted(set(fields) - {model.BRIEF})]


THREADS = 8


class Ahead:
    """Threads that call *read* with each of *indices*, about in their order, for the first sample of many devices.

    NVML may be called from several threads at once, and a caller that samples only once mostly waits for it.  The
    answers are kept with the device until it is read in its turn.  Only then is it found out what they mean, and on
    which device a driver hangs.  Later samples use no threads, because threads cost CPU time.
    """

    def __init__(self, indices: Sequence[int], read: Callable[[int], Any]) -> None:
        self._done: dict[int, threading.Event] = {}
        self._results: dict[int, Any] = {}
        self._read_device = read
        for first in range(min(THREADS, len(indices))):
            own = {index: threading.Event() for index in indices[first::THREADS]}
            try:
                threading.Thread(target=self._run, args=(own,), daemon=True).start()
            except RuntimeError:  # this user may start no more, so the other devices are read in their turn
                return
            self._done.update(own)

    def of(self, index: int) -> Any:
        """Wait for *read* of a device and return its result, or None if it failed or was not called."""
        if done := self._done.pop(index, None):
            done.wait()
        return self._results.pop(index, None)

    def _run(self, own: Mapping[int, threading.Event]) -> None:
        for index, done in own.items():
            try:
                self._results[index] = self._read_device(index)
            except Exception:  # noqa: BLE001, S110  it is raised again when the device is read in its turn
                pass
            finally:
                done.set()


class Prefetch(Reading):
    """A reading that only keeps its answers, for another reading of the device."""

    def call(self, function: str, *arguments: Any) -> CallResult:
        """Call *function* as Reading.call() does, and keep the answer."""
        answer = call(self.nvml, function, self.device.handle, *arguments)
        asked = (function, *arguments)
        self.device.ahead[asked] = answer
        if answer.code == LOST:
            raise DeviceLost
        return answer


def instances(parent: Reading) -> Iterator[DeviceAndGaps]:
    """Yield the instances of a device in MIG mode, each with its gaps.  Raises DeviceLost."""
    count = parent.call_kept("fact", "nvmlDeviceGetMaxMigDeviceCount")
    if count.code:
        parent.gap("mig instances", count.reason)
    uuids: list[str] = []
    for number in range(count.value or 0):
        handle = parent.call("nvmlDeviceGetMigDeviceHandleByIndex", number)
        if handle.code == NOT_FOUND:
            continue  # the numbers in use need not be the first ones
        if handle.code:
            parent.gap("mig instances", _of_instance(number, handle.reason))
            continue
        instance = Reading(parent.nvml, KnownDevice(parent.device.index, handle.value, ""), parent.fields)
        uuid = instance.call("nvmlDeviceGetUUID")
        sound = not uuid.code and uuid.value.startswith("MIG-") and is_uuid(uuid.value)
        if not sound or uuid.value in uuids:
            parent.gap("mig instances", _of_instance(number, uuid.reason or _odd_uuid(uuid.value)))
            continue
        instance.device.uuid = uuid.value
        uuids.append(uuid.value)
        yield _read(instance, parent), instance.gaps
    parent.device.instances = frozenset(uuids)


def _of_instance(number: int, reason: str) -> str:
    return sentence("nvml.instance", "instance {number}: {reason}", number=number, reason=reason)


def _odd_uuid(uuid: str) -> str:
    return sentence("nvml.odd_uuid", "its uuid is {uuid}", uuid=f"{uuid!r:.40}")


def _read(instance: Reading, parent: Reading) -> Device:
    name = instance.call("nvmlDeviceGetName")
    profile = str(name.value or "").partition(" MIG ")[2] or _profile(instance.call("nvmlDeviceGetAttributes_v2"))
    if model.MODEL in instance.fields:
        instance.set_field("name", name)
    instance.set_field("gpu_instance_id", instance.call("nvmlDeviceGetGpuInstanceId"))
    instance.set_field("compute_instance_id", instance.call("nvmlDeviceGetComputeInstanceId"))
    for group in (model.MEMORY, model.PROCESSES, model.IDLE_PROCESSES):
        if group in instance.fields:
            READERS[group](instance)
    if model.UTILIZATION in instance.fields:
        instance.gap("utilization", _NOT_FOR_MIG)
    for gap in parent.gaps:
        if gap.field in model.OF_THE_BOARD:
            instance.gap(gap.field, gap.reason)
    values = {key: parent.values[key] for key in model.OF_THE_BOARD if key in parent.values} | instance.values
    device = Device(parent.device.index, instance.device.uuid, parent_uuid=parent.device.uuid, **values)
    return replace(device, mig_profile=profile, problems=tuple(dict.fromkeys([*parent.problems, *instance.problems])))


def _profile(attributes: CallResult) -> str | None:
    """Return "3g.40gb", or "1c.3g.40gb" for a compute instance that is smaller than its GPU instance."""
    if attributes.code:
        return None
    slices, compute = attributes.value.gpuInstanceSliceCount, attributes.value.computeInstanceSliceCount
    size = f"{slices}g.{round(attributes.value.memorySizeMB / 1024)}gb"
    return size if compute == slices else f"{compute}c.{size}"
