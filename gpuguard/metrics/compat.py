"""The same numbers under the names, labels and units of dcgm-exporter and of nvitop-exporter, for their dashboards.

Only what gpuguard reads: no profiling counters, no PCIe and NVLink throughput, no encoders, nothing per pid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpuguard.metrics.facts import ERROR_FIELDS, MetricFacts
from gpuguard.metrics.families import Labels, MetricFamily, distinct, family, labels, number
from gpuguard.model import Device, Snapshot

_MIB = 2**-20
# name, kind, help, field of Device, factor: etc/default-counters.csv of dcgm-exporter, and rows that are optional there
DCGM: tuple[tuple[str, str, str, str, float], ...] = (
    ("SM_CLOCK", "gauge", "SM clock frequency (in MHz).", "clock_sm", 1),
    ("MEM_CLOCK", "gauge", "Memory clock frequency (in MHz).", "clock_memory", 1),
    ("GPU_TEMP", "gauge", "GPU temperature (in C).", "temperature", 1),
    ("POWER_USAGE", "gauge", "Power draw (in W).", "power_draw", 1),
    ("POWER_MGMT_LIMIT", "gauge", "Power limit (in W).", "power_limit", 1),
    ("TOTAL_ENERGY_CONSUMPTION", "counter", "Energy since the driver was loaded (in mJ).", "total_energy", 1000),
    ("GPU_UTIL", "gauge", "GPU utilization (in %).", "utilization", 1),
    ("MEM_COPY_UTIL", "gauge", "Memory utilization (in %).", "memory_utilization", 1),
    ("FAN_SPEED", "gauge", "Fan speed (in %).", "fan_speed", 1),
    ("FB_TOTAL", "gauge", "Framebuffer memory (in MiB).", "memory_total", _MIB),
    ("FB_FREE", "gauge", "Framebuffer memory free (in MiB).", "memory_free", _MIB),
    ("FB_USED", "gauge", "Framebuffer memory used (in MiB).", "memory_used", _MIB),
    ("FB_RESERVED", "gauge", "Framebuffer memory reserved (in MiB).", "memory_reserved", _MIB),
    ("ECC_SBE_VOL_TOTAL", "counter", "Single-bit errors since the driver was loaded.", "ecc_corrected_volatile", 1),
    ("ECC_DBE_VOL_TOTAL", "counter", "Double-bit errors since the driver was loaded.", "ecc_uncorrected_volatile", 1),
    ("ECC_SBE_AGG_TOTAL", "counter", "Single-bit errors of its life.", "ecc_corrected_aggregate", 1),
    ("ECC_DBE_AGG_TOTAL", "counter", "Double-bit errors of its life.", "ecc_uncorrected_aggregate", 1),
)
_WHOLE = frozenset({"FB_TOTAL", "FB_FREE", "FB_USED", "FB_RESERVED"})  # dcgm-exporter tells whole MiB
NVITOP: tuple[tuple[str, str, str, float], ...] = (
    ("gpu_utilization_Percentage", "GPU utilization (%).", "utilization", 1),
    ("gpu_memory_utilization_Percentage", "GPU memory utilization (%).", "memory_utilization", 1),
    ("gpu_memory_total_MiB", "GPU memory total (MiB).", "memory_total", _MIB),
    ("gpu_memory_used_MiB", "GPU memory used (MiB).", "memory_used", _MIB),
    ("gpu_memory_free_MiB", "GPU memory free (MiB).", "memory_free", _MIB),
    ("gpu_clock_sm_MHz", "GPU SM clock (MHz).", "clock_sm", 1),
    ("gpu_clock_memory_MHz", "GPU memory clock (MHz).", "clock_memory", 1),
    ("gpu_power_usage_W", "GPU power usage (W).", "power_draw", 1),
    ("gpu_power_limit_W", "GPU power limit (W).", "power_limit", 1),
    ("gpu_temperature_C", "GPU temperature (C).", "temperature", 1),
    ("gpu_fan_speed_Percentage", "GPU fan speed (%).", "fan_speed", 1),
)


def dcgm(facts: MetricFacts) -> Iterator[MetricFamily]:
    """What dcgm-exporter would tell; the parts of a divided device bear its uuid, as there."""
    snapshot = facts.snapshot
    if not snapshot or not facts.current:
        return
    named = {device.uuid: _dcgm_labels(device, snapshot) for device in snapshot.devices}
    for name, kind, text, field, factor in DCGM:
        devices = facts.errors or snapshot.devices if field in ERROR_FIELDS else snapshot.devices
        values = {named[device.uuid]: number(getattr(device, field), factor) for device in distinct(devices)}
        if name in _WHOLE:
            values = {key: value and int(value) for key, value in values.items()}
        yield family(f"DCGM_FI_DEV_{name}", text, values.items(), kind)


def _dcgm_labels(device: Device, snapshot: Snapshot) -> Labels:
    whole = (snapshot.device(device.parent_uuid) if device.parent_uuid else None) or device
    return labels(
        gpu=device.index,
        UUID=whole.uuid,
        pci_bus_id=whole.pci_bus_id,
        device=None if whole.minor_number is None else f"nvidia{whole.minor_number}",
        modelName=whole.name,
        GPU_I_PROFILE=device.mig_profile if device.parent_uuid else None,
        GPU_I_ID=device.gpu_instance_id if device.parent_uuid else None,
        # Its releases differ in this label, and dashboards are written for either.
        Hostname=snapshot.host,
        hostname=snapshot.host,
        DCGM_FI_DRIVER_VERSION=snapshot.driver_version,
    )


def nvitop(facts: MetricFacts) -> Iterator[MetricFamily]:
    """What nvitop-exporter would tell of the devices."""
    snapshot = facts.snapshot
    if not snapshot or not facts.current:
        return
    host, devices = snapshot.host, {}
    parts: dict[str, int] = {}  # uuid of a divided device -> its instances so far
    for device in distinct(snapshot.devices):
        index = str(device.index)
        if device.parent_uuid:  # nvitop counts instances from 0, whatever id the driver gave them
            parts[device.parent_uuid] = position = parts.get(device.parent_uuid, -1) + 1
            index = f"{device.index}:{position}"
        devices[labels(hostname=host, index=index, devicename=device.name, uuid=device.uuid)] = device
    for name, text, field, factor in NVITOP:
        yield family(name, text, [(key, number(getattr(device, field), factor)) for key, device in devices.items()])
    shares = [
        (key, None if device.memory_used is None else round(100 * device.memory_used / device.memory_total, 3))
        for key, device in devices.items()
        if device.memory_total
    ]
    yield family("gpu_memory_percent_Percentage", "GPU memory percent (%).", shares)
    count = sum(device.parent_uuid is None for device in snapshot.devices)
    versions = {"driver_version": snapshot.driver_version, "cuda_driver_version": snapshot.cuda_version}
    machine = labels(hostname=host, device_count=count, **versions)
    yield family("nvitop_info", "The machine, under the name that nvitop-exporter gives it.", [(machine, 1)])


COMPAT: dict[str, Callable[[MetricFacts], Iterator[MetricFamily]]] = {"dcgm": dcgm, "nvitop": nvitop}
