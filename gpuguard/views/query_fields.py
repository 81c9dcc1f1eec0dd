"""The fields of `nvidia-smi --query-gpu` and `--query-compute-apps`: names, units, and where they come from.

A field that stands here has nvidia-smi's spelling and form; `nvidia-smi --help-query-gpu` has the whole list.
Fields that gpuguard does not read are missing, so that a script fails instead of working on blanks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuguard import model
from gpuguard.model import Device, GpuProcess, Snapshot

NOT_KNOWN = "[N/A]"
Value = str | int | float | None


@dataclass(frozen=True)
class Subject:
    """What one row of the answer is about."""

    snapshot: Snapshot
    device: Device
    process: GpuProcess | None = None


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        text: what it is, for --help-query.
        value: of a subject, in *unit*; None: not known.
        group: of the model, which has to be read for it; None: it always comes along.
        unit: as in the header, "MiB"; "" for none.
        digits: after the point.
    """

    text: str
    value: Callable[[Subject], Value]
    group: str | None = None
    unit: str = ""
    digits: int = 0

    def written(self, value: Value, *, units: bool) -> str:
        """As nvidia-smi writes it."""
        if value is None:
            return NOT_KNOWN
        text = f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)
        return f"{text} {self.unit}" if units and self.unit else text


def _device(name: str) -> Callable[[Subject], Value]:
    return lambda of: getattr(of.device, name)


def _mebibytes(name: str) -> Callable[[Subject], Value]:
    def value(of: Subject) -> Value:
        amount = getattr(of.device, name)
        return None if amount is None else int(amount) >> 20

    return value


def _number(name: str) -> Callable[[Subject], Value]:
    def value(of: Subject) -> Value:
        found = getattr(of.device, name)
        return None if found is None else float(found)

    return value


def _switch(name: str) -> Callable[[Subject], Value]:
    return lambda of: {True: "Enabled", False: "Disabled", None: None}[getattr(of.device, name)]


def _bus(place: slice) -> Callable[[Subject], Value]:
    """A part of "00000000:83:00.0", as nvidia-smi writes it."""

    def value(of: Subject) -> Value:
        bus_id = of.device.pci_bus_id
        return None if bus_id is None else f"0x{bus_id[place]}"

    return value


def _reason(name: str) -> Callable[[Subject], Value]:
    def value(of: Subject) -> Value:
        reasons = of.device.throttle_reasons
        return None if reasons is None else "Active" if name in reasons else "Not Active"

    return value


def _timestamp(of: Subject) -> Value:
    moment = of.snapshot.taken_at
    return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"


def _count(of: Subject) -> Value:
    return sum(device.parent_uuid is None for device in of.snapshot.devices)


def _pstate(of: Subject) -> Value:
    return None if of.device.pstate is None else f"P{of.device.pstate}"


_COMPUTE_MODES = {"default": "Default", "exclusive_process": "Exclusive_Process", "prohibited": "Prohibited"}
_REASONS = {  # nvidia-smi's word: ours
    "gpu_idle": "gpu_idle", "applications_clocks_setting": "applications_clocks_setting",
    "sw_power_cap": "sw_power_cap", "hw_slowdown": "hw_slowdown", "hw_thermal_slowdown": "hw_thermal_slowdown",
    "hw_power_brake_slowdown": "hw_power_brake_slowdown", "sw_thermal_slowdown": "sw_thermal_slowdown",
    "sync_boost": "sync_boost",
}  # fmt: skip

GPU_FIELDS: Mapping[str, Field] = {
    "timestamp": Field("when it was asked, YYYY/MM/DD HH:MM:SS.msec", _timestamp),
    "hostname": Field("of the machine", lambda of: of.snapshot.host),
    "driver_version": Field("of the display driver", lambda of: of.snapshot.driver_version, model.MODEL),
    "count": Field("number of GPUs in the machine", _count),
    "index": Field("from 0; can change at each boot", _device("index")),
    "name": Field("official name of the product", _device("name"), model.MODEL),
    "uuid": Field("never changes", _device("uuid")),
    "pci.bus_id": Field("as domain:bus:device.function, in hex", _device("pci_bus_id"), model.MODEL),
    "pci.domain": Field("in hex", _bus(slice(4, 8)), model.MODEL),
    "pci.bus": Field("in hex", _bus(slice(9, 11)), model.MODEL),
    "pci.device": Field("in hex", _bus(slice(12, 14)), model.MODEL),
    "pcie.link.gen.current": Field("generation of the link now", _device("pcie_generation"), model.PCIE),
    "pcie.link.width.current": Field("lanes of the link now", _device("pcie_width"), model.PCIE),
    "persistence_mode": Field("Enabled or Disabled", _switch("persistence_mode"), model.CLOCKS),
    "fan.speed": Field("of what is possible", _number("fan_speed"), model.THERMAL, "%"),
    "pstate": Field("P0 is the fastest, P15 the slowest", _pstate, model.CLOCKS),
    **{
        f"clocks_event_reasons.{name}": Field("why the clocks are not higher", _reason(ours), model.CLOCKS)
        for name, ours in _REASONS.items()
    },
    "memory.total": Field("installed", _mebibytes("memory_total"), model.MEMORY, "MiB"),
    "memory.reserved": Field("by driver and firmware", _mebibytes("memory_reserved"), model.MEMORY, "MiB"),
    "memory.used": Field("by contexts", _mebibytes("memory_used"), model.MEMORY, "MiB"),
    "memory.free": Field("free", _mebibytes("memory_free"), model.MEMORY, "MiB"),
    "compute_mode": Field(
        "Default, Exclusive_Process or Prohibited",
        lambda of: _COMPUTE_MODES.get(of.device.compute_mode or ""),
        model.HEALTH,
    ),
    "utilization.gpu": Field("time in which a kernel ran", _number("utilization"), model.UTILIZATION, "%"),
    "utilization.memory": Field(
        "time in which memory was read or written", _number("memory_utilization"), model.UTILIZATION, "%"
    ),
    "temperature.gpu": Field("of the core, degrees C", _number("temperature"), model.THERMAL),
    "power.draw": Field("now", _number("power_draw"), model.POWER, "W", 2),
    "power.limit": Field("which the driver keeps to", _number("power_limit"), model.POWER, "W", 2),
    "enforced.power.limit": Field("which the driver keeps to", _number("power_limit"), model.POWER, "W", 2),
    "clocks.current.sm": Field("of the multiprocessors", _device("clock_sm"), model.CLOCKS, "MHz"),
    "clocks.current.memory": Field("of the memory", _device("clock_memory"), model.CLOCKS, "MHz"),
    "clocks.max.sm": Field("of the multiprocessors, at most", _device("clock_sm_max"), model.CLOCKS, "MHz"),
    "clocks.max.memory": Field("of the memory, at most", _device("clock_memory_max"), model.CLOCKS, "MHz"),
    "ecc.mode.current": Field("Enabled or Disabled", _switch("ecc_mode"), model.ECC),
    **{
        f"ecc.errors.{kind}.{since}.total": Field(f"since {began}", _device(f"ecc_{kind}_{since}"), model.ECC)
        for kind in ("corrected", "uncorrected")
        for since, began in (("volatile", "the driver was loaded"), ("aggregate", "the device was made"))
    },
    "mig.mode.current": Field("Enabled or Disabled", _switch("mig_mode"), model.HEALTH),
}


def _memory_of_process(of: Subject) -> Value:
    used = of.process.memory_used if of.process else None
    return None if used is None else used >> 20


def _process_name(of: Subject) -> Value:
    process = of.process
    return (process.command[0] if process.command else process.executable) if process else None


APP_FIELDS: Mapping[str, Field] = {
    "timestamp": GPU_FIELDS["timestamp"],
    "gpu_name": GPU_FIELDS["name"],
    "gpu_bus_id": GPU_FIELDS["pci.bus_id"],
    "gpu_uuid": Field("of the GPU; of the whole GPU where it is divided", _device("uuid")),
    "pid": Field("of the process", lambda of: of.process.pid if of.process else None),
    "process_name": Field("of its program", _process_name, model.PROCESS_DETAILS),
    "used_gpu_memory": Field("that it uses on the GPU", _memory_of_process, None, "MiB"),
    "user": Field("whose it is (nvidia-smi does not have it)", lambda of: of.process.user if of.process else None,
                  model.PROCESS_DETAILS),
}  # fmt: skip

# Other spellings that nvidia-smi takes; the header shows the first.
GPU_ALIASES: Mapping[str, str] = {
    "gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "clocks.sm": "clocks.current.sm",
    "clocks.mem": "clocks.current.memory", "clocks.max.mem": "clocks.max.memory",
    **{f"clocks_throttle_reasons.{name}": f"clocks_event_reasons.{name}" for name in _REASONS},
}  # fmt: skip
APP_ALIASES: Mapping[str, str] = {"name": "process_name", "used_memory": "used_gpu_memory"}
