"""What `nvidia-smi -q -x` would write about a snapshot, and a program of that name which prints it.

    write_smi(path, a_snapshot(a_device()), {"fan_speed": "[Unknown Error]", "fb_memory_usage/used": None})

The last argument puts other texts in the place of values on every device; None leaves the element out.
"""

import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from gpuguard.model import Device, GpuProcess, Snapshot

_HEAD = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
_TYPES = {"compute": "C", "graphics": "G", "compute+graphics": "C+G", "mps": "M+C"}
_MODES = {"default": "Default", "exclusive_process": "Exclusive_Process", "prohibited": "Prohibited"}
_REASONS = ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sw_thermal_slowdown")

Odd = Mapping[str, "str | None"]

# Prints its file without the processes that have ended, as the driver would; hangs while there is a file "hang".
_PROGRAM = """#!{python} -IS
import os, re, sys, time
place = {place!r}
while os.path.exists(place + "/hang"):
    time.sleep(0.05)
text = open(place + ("/list" if "-L" in sys.argv else "/xml"), encoding="utf-8").read()
def gone(entry):
    try:
        with open("/proc/" + re.search("<pid>([0-9]*)", entry[0])[1] + "/stat", "rb") as stat:
            return "" if stat.read().rpartition(b") ")[2][:1] in b"ZX" else entry[0]
    except OSError:
        return ""
print(re.sub("(?s)<process_info>.*?</process_info>", gone, text), end="")
sys.exit(15 if "GPU is lost" in text else 0)
"""


def smi_xml(snapshot: Snapshot, odd: Odd | None = None) -> str:
    """The document."""
    whole = [device for device in snapshot.devices if not device.parent_uuid]
    parts = [
        _leaf("timestamp", "Fri Aug  4 11:44:30 2023", {}),
        _leaf("driver_version", snapshot.driver_version or "N/A", odd or {}),
        _leaf("cuda_version", snapshot.cuda_version or "N/A", odd or {}),
        _leaf("attached_gpus", str(len(whole)), {}),
    ]
    for device in whole:
        instances = [each for each in snapshot.devices if each.parent_uuid == device.uuid]
        bus = device.pci_bus_id or "N/A"
        parts.append(f"<gpu id={quoteattr(bus)}>\n{_gpu(device, instances, odd or {})}</gpu>\n")
    return f"{_HEAD}<nvidia_smi_log>\n{''.join(parts)}</nvidia_smi_log>\n"


def write_smi(path: Path, snapshot: Snapshot, odd: Odd | None = None) -> Path:
    """Write it to a file; returns the path."""
    path.write_text(smi_xml(snapshot, odd), encoding="utf-8")
    return path


def a_program(place: Path, snapshot: Snapshot, odd: Odd | None = None) -> Path:
    """A program nvidia-smi in *place*, which must stand first in the PATH."""
    place.mkdir(exist_ok=True)
    write_smi(place / "xml", snapshot, odd)
    (place / "list").write_text(_listing(snapshot), encoding="utf-8")
    program = place / "nvidia-smi"
    program.write_text(_PROGRAM.format(python=sys.executable, place=str(place)), encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def _listing(snapshot: Snapshot) -> str:
    lines, numbers = [], dict.fromkeys((device.uuid for device in snapshot.devices), -1)
    for device in snapshot.devices:
        if device.parent_uuid is None:
            lines.append(f"GPU {device.index}: {device.name} (UUID: {device.uuid})\n")
        else:
            numbers[device.parent_uuid] += 1
            number = numbers[device.parent_uuid]
            lines.append(f"  MIG {device.mig_profile}     Device  {number}: (UUID: {device.uuid})\n")
    return "".join(lines)


def _gpu(device: Device, instances: list[Device], odd: Odd) -> str:
    rows = {
        "product_name": device.name,
        "persistence_mode": _enabled(device.persistence_mode),
        "display_active": _enabled(device.display_active),
        "mig_mode/current_mig": "N/A" if device.mig_mode is None else _enabled(device.mig_mode),
        "mig_devices": "".join(_instance(number, each, odd) for number, each in enumerate(instances)) or "None",
        "uuid": device.uuid,
        "minor_number": _number(device.minor_number),
        "pci/pci_bus_id": device.pci_bus_id,
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen": _number(device.pcie_generation),
        "pci/pci_gpu_link_info/link_widths/current_link_width": _number(device.pcie_width, "x"),
        "pci/tx_util": _kibibytes(device.pcie_tx),
        "pci/rx_util": _kibibytes(device.pcie_rx),
        "fan_speed": _number(device.fan_speed, " %"),
        "performance_state": None if device.pstate is None else f"P{device.pstate}",
        **{
            f"clocks_event_reasons/clocks_event_reason_{name}": (
                "Active" if name in (device.throttle_reasons or ()) else "Not Active"
            )
            for name in _REASONS
        },
        **_memory(device),
        "compute_mode": _MODES.get(device.compute_mode or ""),
        "utilization/gpu_util": _number(device.utilization, " %"),
        "utilization/memory_util": _number(device.memory_utilization, " %"),
        "utilization/encoder_util": _number(device.encoder_utilization, " %"),
        "utilization/decoder_util": _number(device.decoder_utilization, " %"),
        "ecc_mode/current_ecc": _enabled(device.ecc_mode),
        "ecc_errors/volatile/sram_correctable": "0",
        "ecc_errors/volatile/dram_correctable": _number(device.ecc_corrected_volatile),
        "ecc_errors/volatile/sram_uncorrectable": "0",
        "ecc_errors/volatile/dram_uncorrectable": _number(device.ecc_uncorrected_volatile),
        "ecc_errors/aggregate/sram_correctable": "0",
        "ecc_errors/aggregate/dram_correctable": _number(device.ecc_corrected_aggregate),
        "ecc_errors/aggregate/sram_uncorrectable": "0",
        "ecc_errors/aggregate/dram_uncorrectable": _number(device.ecc_uncorrected_aggregate),
        "retired_pages/multiple_single_bit_retirement/retired_count": _number(device.retired_pages),
        "retired_pages/double_bit_retirement/retired_count": _number(None if device.retired_pages is None else 0),
        "remapped_rows/remapped_row_corr": _number(_corrected_rows(device)),
        "remapped_rows/remapped_row_unc": _number(device.remapped_rows_uncorrected),
        "remapped_rows/remapped_row_pending": "No",
        "gpu_recovery_action": "None",
        "temperature/gpu_temp": _number(device.temperature, " C"),
        "temperature/gpu_temp_max_threshold": _number(device.temperature_shutdown, " C"),
        "temperature/gpu_temp_slow_threshold": _number(device.temperature_slowdown, " C"),
        "gpu_power_readings/power_draw": _number(device.power_draw, " W", 2),
        "gpu_power_readings/current_power_limit": _number(device.power_limit, " W", 2),
        "clocks/sm_clock": _number(device.clock_sm, " MHz"),
        "clocks/mem_clock": _number(device.clock_memory, " MHz"),
        "clocks/graphics_clock": _number(device.clock_graphics, " MHz"),
        "clocks/video_clock": _number(device.clock_video, " MHz"),
        "max_clocks/sm_clock": _number(device.clock_sm_max, " MHz"),
        "max_clocks/mem_clock": _number(device.clock_memory_max, " MHz"),
        "supported_clocks/supported_mem_clock/value": "1593 MHz",
        "processes": _processes(device, instances, odd),
    }
    tree: dict[str, object] = {}
    for path, text in rows.items():
        found = odd.get(path, text or "N/A")
        *above, name = path.split("/")
        place = tree
        for part in above:
            place = place.setdefault(part, {})  # type: ignore[assignment]
        place[name] = found
    return _written(tree)


def _written(tree: Mapping[str, object]) -> str:
    lines = []
    for name, inside in tree.items():
        if isinstance(inside, dict):
            lines.append(f"<{name}>\n{_written(inside)}</{name}>\n")
        elif inside is not None:
            text = str(inside)
            lines.append(f"<{name}>{text if text.startswith('<') else escape(text)}</{name}>\n")
    return "".join(lines)


def _corrected_rows(device: Device) -> int | None:
    both, uncorrected = device.remapped_rows, device.remapped_rows_uncorrected
    return None if both is None or uncorrected is None else both - uncorrected


def _memory(device: Device) -> dict[str, str | None]:
    parts = {"total": device.memory_total, "reserved": device.memory_reserved, "used": device.memory_used,
             "free": device.memory_free}  # fmt: skip
    return {f"fb_memory_usage/{name}": _mebibytes(amount) for name, amount in parts.items()}


def _instance(number: int, device: Device, odd: Odd) -> str:
    memory = {path.partition("/")[2]: text or "N/A" for path, text in _memory(device).items()}
    return (
        "<mig_device>\n"
        + _leaf("index", str(number), {})
        + _leaf("gpu_instance_id", str(device.gpu_instance_id), odd)
        + _leaf("compute_instance_id", str(device.compute_instance_id), odd)
        + f"<fb_memory_usage>{_written(memory)}</fb_memory_usage>\n</mig_device>\n"
    )


def _processes(device: Device, instances: list[Device], odd: Odd) -> str:
    if device.processes is None:
        return "N/A"
    entries = [_process(each, "N/A", "N/A", odd) for each in device.processes]
    for one in instances:
        ids = str(one.gpu_instance_id), str(one.compute_instance_id)
        entries += [_process(each, *ids, odd) for each in one.processes or ()]
    return "".join(entries) or "<!-- none -->"


def _process(process: GpuProcess, gi: str, ci: str, odd: Odd) -> str:
    rows = {
        "gpu_instance_id": gi,
        "compute_instance_id": ci,
        "pid": str(process.pid),
        "type": _TYPES[process.kind],
        "process_name": (process.command or ("python",))[0],
        "used_memory": _mebibytes(process.memory_used) or "N/A",
    }
    inside = "".join(_leaf(name, text, odd, "processes/process_info/") for name, text in rows.items())
    return f"<process_info>\n{inside}</process_info>\n"


def _leaf(name: str, text: str, odd: Odd, above: str = "") -> str:
    found = odd.get(f"{above}{name}", text)
    return "" if found is None else f"<{name}>{escape(found)}</{name}>\n"


def _number(value: float | None, unit: str = "", digits: int = 0) -> str | None:
    return None if value is None else f"{value:.{digits}f}{unit}"


def _mebibytes(amount: int | None) -> str | None:
    return None if amount is None else f"{amount >> 20} MiB"


def _kibibytes(rate: float | None) -> str | None:
    return None if rate is None else f"{rate / 1024:.0f} KB/s"


def _enabled(switch: bool | None) -> str | None:
    return None if switch is None else "Enabled" if switch else "Disabled"
