"""The same numbers under the names, labels and units of other exporters, for their dashboards.

These are dcgm-exporter, nvitop-exporter and, as "amd", AMD's device-metrics-exporter.  They cover only what gpuguard
reads: no profiling counters, nothing per pid, and no XID errors, which a driver reports only to programs that wait for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpuguard.metrics.families import Labels, MetricFamily, distinct, family, labels, number
from gpuguard.model import Device, Snapshot
from gpuguard.vendors import AMD, NVIDIA, Vendor

_MIB = 2**-20
# name, kind, help, field of Device, factor: as in dcgm-exporter's etc/default-counters.csv, with its optional rows
DCGM: tuple[tuple[str, str, str, str, float], ...] = (
    ("SM_CLOCK", "gauge", "SM clock frequency (in MHz).", "clock_sm", 1),
    ("MEM_CLOCK", "gauge", "Memory clock frequency (in MHz).", "clock_memory", 1),
    ("GPU_TEMP", "gauge", "GPU temperature (in C).", "temperature", 1),
    ("POWER_USAGE", "gauge", "Power draw (in W).", "power_draw", 1),
    ("POWER_MGMT_LIMIT", "gauge", "Power limit (in W).", "power_limit", 1),
    ("TOTAL_ENERGY_CONSUMPTION", "counter", "Energy since the driver was loaded (in mJ).", "total_energy", 1000),
    ("GPU_UTIL", "gauge", "GPU utilization (in %).", "utilization", 1),
    ("MEM_COPY_UTIL", "gauge", "Memory utilization (in %).", "memory_utilization", 1),
    ("ENC_UTIL", "gauge", "Encoder utilization (in %).", "encoder_utilization", 1),
    ("DEC_UTIL", "gauge", "Decoder utilization (in %).", "decoder_utilization", 1),
    ("FAN_SPEED", "gauge", "Fan speed (in %).", "fan_speed", 1),
    ("FB_TOTAL", "gauge", "Framebuffer memory (in MiB).", "memory_total", _MIB),
    ("FB_FREE", "gauge", "Framebuffer memory free (in MiB).", "memory_free", _MIB),
    ("FB_USED", "gauge", "Framebuffer memory used (in MiB).", "memory_used", _MIB),
    ("FB_RESERVED", "gauge", "Framebuffer memory reserved (in MiB).", "memory_reserved", _MIB),
    ("ECC_SBE_VOL_TOTAL", "counter", "Single-bit errors since the driver was loaded.", "ecc_corrected_volatile", 1),
    ("ECC_DBE_VOL_TOTAL", "counter", "Double-bit errors since the driver was loaded.", "ecc_uncorrected_volatile", 1),
    ("ECC_SBE_AGG_TOTAL", "counter", "Single-bit errors of its life.", "ecc_corrected_aggregate", 1),
    ("ECC_DBE_AGG_TOTAL", "counter", "Double-bit errors of its life.", "ecc_uncorrected_aggregate", 1),
    ("UNCORRECTABLE_REMAPPED_ROWS", "counter", "Rows that uncorrectable errors had remapped.",
     "remapped_rows_uncorrected", 1),
)  # fmt: skip
_WHOLE = frozenset({"FB_TOTAL", "FB_FREE", "FB_USED", "FB_RESERVED"})  # dcgm-exporter reports whole MiB
NVITOP: tuple[tuple[str, str, str, float], ...] = (
    ("gpu_utilization_Percentage", "GPU utilization (%).", "utilization", 1),
    ("gpu_memory_utilization_Percentage", "GPU memory utilization (%).", "memory_utilization", 1),
    ("gpu_memory_total_MiB", "GPU memory total (MiB).", "memory_total", _MIB),
    ("gpu_memory_used_MiB", "GPU memory used (MiB).", "memory_used", _MIB),
    ("gpu_memory_free_MiB", "GPU memory free (MiB).", "memory_free", _MIB),
    ("gpu_clock_sm_MHz", "GPU SM clock (MHz).", "clock_sm", 1),
    ("gpu_encoder_utilization_Percentage", "GPU encoder utilization (%).", "encoder_utilization", 1),
    ("gpu_decoder_utilization_Percentage", "GPU decoder utilization (%).", "decoder_utilization", 1),
    ("gpu_clock_graphics_MHz", "GPU graphics clock (MHz).", "clock_graphics", 1),
    ("gpu_clock_video_MHz", "GPU video clock (MHz).", "clock_video", 1),
    ("gpu_clock_memory_MHz", "GPU memory clock (MHz).", "clock_memory", 1),
    ("gpu_power_usage_W", "GPU power usage (W).", "power_draw", 1),
    ("gpu_power_limit_W", "GPU power limit (W).", "power_limit", 1),
    ("gpu_temperature_C", "GPU temperature (C).", "temperature", 1),
    ("gpu_fan_speed_Percentage", "GPU fan speed (%).", "fan_speed", 1),
    ("gpu_pcie_tx_throughput_MiBps", "GPU PCIe transmit throughput (MiB/s).", "pcie_tx", _MIB),
    ("gpu_pcie_rx_throughput_MiBps", "GPU PCIe receive throughput (MiB/s).", "pcie_rx", _MIB),
    ("gpu_nvlink_total_tx_throughput_MiBps", "GPU total NVLink transmit throughput (MiB/s).", "nvlink_tx", _MIB),
    ("gpu_nvlink_total_rx_throughput_MiBps", "GPU total NVLink receive throughput (MiB/s).", "nvlink_rx", _MIB),
)
# As in docs/configuration/metricslist.md of AMD's device-metrics-exporter; all are gauges there.
AMD_EXPORTER: tuple[tuple[str, str, str, float], ...] = (
    ("gpu_gfx_activity", "Graphics engine usage (0 to 100).", "utilization", 1),
    ("gpu_umc_activity", "Memory engine usage (0 to 100).", "memory_utilization", 1),
    ("gpu_total_vram", "Total VRAM (in MB).", "memory_total", _MIB),
    ("gpu_used_vram", "Used VRAM (in MB).", "memory_used", _MIB),
    ("gpu_free_vram", "Free VRAM (in MB).", "memory_free", _MIB),
    ("gpu_power_usage", "Power usage (in W).", "power_draw", 1),
    ("gpu_energy_consumed", "Energy since the driver was loaded (in uJ).", "total_energy", 1e6),
    ("gpu_ecc_correct_total", "Correctable errors.", "ecc_corrected_volatile", 1),
    ("gpu_ecc_uncorrect_total", "Uncorrectable errors.", "ecc_uncorrected_volatile", 1),
)
# The exporter has names of their own for the sensors of MI300 and its successors, and for those of older GPUs.
_AMD_SENSORS = (
    ("gpu_edge_temperature", "gpu_junction_temperature", "Temperature (in C).", "temperature"),
    ("gpu_average_package_power", "gpu_package_power", "Socket power (in W).", "power_draw"),
)
_AMD_CLOCKS = (("GPU_CLOCK_TYPE_SYSTEM", "0", "clock_sm"), ("GPU_CLOCK_TYPE_MEMORY", "8", "clock_memory"))


def _of(vendor: Vendor, snapshot: Snapshot) -> list[Device]:
    return [device for device in distinct(snapshot.devices) if device.vendor == vendor.name]


def dcgm(snapshot: Snapshot) -> Iterator[MetricFamily]:
    """Yield what dcgm-exporter would report; the parts of a divided device have its uuid, as they do there."""
    devices = _of(NVIDIA, snapshot)
    named = {device.uuid: _dcgm_labels(device, snapshot) for device in devices}
    for name, kind, text, field, factor in DCGM:
        values = {named[device.uuid]: number(getattr(device, field), factor) for device in devices}
        if name in _WHOLE:
            values = {key: value and int(value) for key, value in values.items()}
        yield family(f"DCGM_FI_DEV_{name}", text, values.items(), kind)
    remapped = [device for device in devices if device.remapped_rows is not None]
    corrected = [(named[device.uuid], _corrected_rows(device)) for device in remapped]
    text = "Rows that correctable errors had remapped."
    yield family("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", text, corrected, "counter")
    failed = [(named[device.uuid], _remap_failed(device)) for device in remapped]
    yield family("DCGM_FI_DEV_ROW_REMAP_FAILURE", "1 when remapping a row has failed.", failed)


def _remap_failed(device: Device) -> bool | None:
    return None if device.problems is None else "row remap failed" in device.problems


def _corrected_rows(device: Device) -> int | None:
    both, uncorrected = device.remapped_rows, device.remapped_rows_uncorrected
    return None if both is None or uncorrected is None else both - uncorrected


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
        # Releases of dcgm-exporter differ in this label, and dashboards are written for either.
        Hostname=snapshot.host,
        hostname=snapshot.host,
        DCGM_FI_DRIVER_VERSION=snapshot.driver_version,
    )


def nvitop(snapshot: Snapshot) -> Iterator[MetricFamily]:
    """Yield what nvitop-exporter would report about the devices."""
    host, devices = snapshot.host, {}
    parts: dict[str, int] = {}  # uuid of a divided device -> its instances so far
    for device in _of(NVIDIA, snapshot):
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
    yield from _nvlinks(devices)
    count = sum(device.parent_uuid is None for device in devices.values())
    versions = {"driver_version": snapshot.driver_version, "cuda_driver_version": snapshot.cuda_version}
    machine = labels(hostname=host, device_count=count, **versions)
    yield family("nvitop_info", "The machine, under the name that nvitop-exporter gives it.", [(machine, 1)])


def _nvlinks(devices: dict[Labels, Device]) -> Iterator[MetricFamily]:
    for column, way, verb in ((1, "tx", "transmit"), (2, "rx", "receive")):
        rates = {
            key: {link[0]: number(link[column], _MIB) for link in device.nvlink_flow}
            for key, device in devices.items()
            if device.nvlink_flow
        }
        mean = [(key, sum(filter(None, of_links.values())) / len(of_links)) for key, of_links in rates.items()]
        text = f"GPU mean NVLink {verb} throughput (MiB/s)."
        yield family(f"gpu_nvlink_mean_{way}_throughput_MiBps", text, mean)
        each = [
            (labels(link=link, **dict(key)), rate) for key, of_links in rates.items() for link, rate in of_links.items()
        ]
        yield family(f"gpu_nvlink_{way}_throughput_MiBps", f"GPU NVLink {verb} throughput (MiB/s).", each)


def amd(snapshot: Snapshot) -> Iterator[MetricFamily]:
    """Yield what AMD's device-metrics-exporter would report about the GPUs of AMD."""
    devices = {_amd_labels(device, snapshot): device for device in _of(AMD, snapshot)}
    for name, text, field, factor in AMD_EXPORTER:
        yield family(name, text, [(key, number(getattr(device, field), factor)) for key, device in devices.items()])
    for older, newer, text, field in _AMD_SENSORS:
        for name in (older, newer):
            of_name = [key for key, device in devices.items() if ("MI3" in (device.name or "")) == (name == newer)]
            yield family(name, text, [(key, number(getattr(devices[key], field))) for key in of_name])
    clocks = [
        (labels(clock_index=index, clock_type=kind, **dict(key)), number(getattr(device, field)))
        for key, device in devices.items()
        for kind, index, field in _AMD_CLOCKS
    ]
    yield family("gpu_clock", "Clocks (in MHz).", clocks)
    count = sum(device.parent_uuid is None for device in devices.values())
    yield family("gpu_nodes_total", "Number of GPUs.", [(labels(hostname=snapshot.host), count)] if devices else [])


def _amd_labels(device: Device, snapshot: Snapshot) -> Labels:
    whole = (snapshot.device(device.parent_uuid) if device.parent_uuid else None) or device
    return labels(
        gpu_id=device.index,
        gpu_uuid=whole.uuid,
        gpu_partition_id=device.gpu_instance_id or 0,
        card_model=whole.name,
        driver_version=snapshot.driver_version,
        hostname=snapshot.host,
    )


COMPAT: dict[str, Callable[[Snapshot], Iterator[MetricFamily]]] = {"dcgm": dcgm, "nvitop": nvitop, "amd": amd}
