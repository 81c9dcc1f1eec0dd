"""MIG instances: parts of a device that are devices of their own, with their own uuid, memory and processes.

What belongs to the whole board (temperature, bus, NUMA node) is taken over from the parent.  Utilization of an instance
is not told by the driver, and stays unknown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard import model
from gpuguard.backends.nvml_calls import NOT_FOUND, Answer
from gpuguard.backends.nvml_reading import OF_THE_BOARD, Place, Reading, is_uuid
from gpuguard.backends.nvml_usage import read_idle_processes, read_memory, read_processes
from gpuguard.model import Device, Gap

if TYPE_CHECKING:
    from collections.abc import Iterator


def instances(parent: Reading) -> Iterator[tuple[Device, list[Gap]]]:
    """The instances of a device in MIG mode, each with its gaps.  Raises DeviceLost."""
    count = parent.ask_once("mig places", "nvmlDeviceGetMaxMigDeviceCount")
    if count.code:
        parent.gap("mig instances", count.reason)
    uuids: list[str] = []
    for number in range(count.value or 0):
        handle = parent.ask("nvmlDeviceGetMigDeviceHandleByIndex", number)
        if handle.code == NOT_FOUND:
            continue  # the places that are taken need not be the first ones
        if handle.code:
            parent.gap("mig instances", f"instance {number}: {handle.reason}")
            continue
        instance = Reading(parent.nvml, Place(parent.place.index, handle.value, ""), parent.fields, parent.files)
        uuid = instance.ask("nvmlDeviceGetUUID")
        sound = not uuid.code and uuid.value.startswith("MIG-") and is_uuid(uuid.value)
        if not sound or uuid.value in uuids:
            parent.gap("mig instances", f"instance {number}: {uuid.reason or f'its uuid is {uuid.value!r:.40}'}")
            continue
        instance.place.uuid = uuid.value
        uuids.append(uuid.value)
        yield _read(instance, parent), instance.gaps
    parent.place.instances = frozenset(uuids)


def _read(instance: Reading, parent: Reading) -> Device:
    name = instance.ask("nvmlDeviceGetName")
    profile = str(name.value or "").partition(" MIG ")[2] or _profile(instance.ask("nvmlDeviceGetAttributes_v2"))
    if model.MODEL in instance.fields:
        instance.take("name", name)
    instance.take("gpu_instance_id", instance.ask("nvmlDeviceGetGpuInstanceId"))
    instance.take("compute_instance_id", instance.ask("nvmlDeviceGetComputeInstanceId"))
    if model.MEMORY in instance.fields:
        read_memory(instance)
    if model.PROCESSES in instance.fields:
        read_processes(instance)
    if model.IDLE_PROCESSES in instance.fields:
        read_idle_processes(instance)
    if model.UTILIZATION in instance.fields:
        instance.gap("utilization", "not told for MIG instances")
    for gap in parent.gaps:
        if gap.field in OF_THE_BOARD:
            instance.gap(gap.field, gap.reason)
    values = {key: parent.values[key] for key in OF_THE_BOARD if key in parent.values} | instance.values
    device = Device(parent.place.index, instance.place.uuid, parent_uuid=parent.place.uuid, **values)
    return replace(device, mig_profile=profile, problems=tuple(dict.fromkeys([*parent.problems, *instance.problems])))


def _profile(attributes: Answer) -> str | None:
    """ "3g.40gb", or "1c.3g.40gb" for a compute instance that is smaller than its GPU instance."""
    if attributes.code:
        return None
    slices, compute = attributes.value.gpuInstanceSliceCount, attributes.value.computeInstanceSliceCount
    size = f"{slices}g.{round(attributes.value.memorySizeMB / 1024)}gb"
    return size if compute == slices else f"{compute}c.{size}"
