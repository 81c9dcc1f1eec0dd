"""How each group of the model's fields is read from the files of an AMD GPU: the table ROWS, and its memory.

The files are those of the kernel's Documentation/gpu/amdgpu.  Those that keep a reader waiting (pcie_bw) or start work
for each read (sdma_* of a process) are never read.  This module does not find GPUs: see amd_gpus.
"""

from __future__ import annotations

import os
import re
import struct
from functools import cached_property
from typing import TYPE_CHECKING

from gpuguard import model
from gpuguard.backends import PAGES_PENDING
from gpuguard.backends.drm import (
    ABSENT,
    CardReading,
    NotTold,
    Sensors,
    host_memory,
    listed,
    number,
    pairs,
    percent,
    product_name,
    read,
    read_bytes,
    read_link,
    read_or,
    read_place,
)
from gpuguard.backends.plausibility import LARGEST_MEMORY
from gpuguard.locale.messages import sentence
from gpuguard.vendors import AMD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuguard.backends.drm import Card

# The switch on a card between its slot and its GPU, at whose upper port the link of the slot can be seen.
_SWITCH = ("0x1002", "0x1478")
_CORE = ("edge", "junction")  # data center GPUs hide the temperature of the edge
# The struct gpu_metrics_v1_3 of the driver's kgd_pp_interface.h: its size, format and revision, and at its end the
# indep_throttle_status.  The bits of older tables differ from chip to chip; those of the MI300 count times instead.
_METRICS = struct.Struct("<HBB108xQ")
# Its bits, SMU_THROTTLER_* of the driver's amdgpu_smu.h, by what nvidia-smi calls such a reason.  Bit 36, the hotspot,
# is left out: the firmware of RDNA 3 and 4 sets it at all times (https://gitlab.freedesktop.org/drm/amd/-/issues/3251).
_THROTTLERS = {
    "sw_power_cap": 0x00FF_00FF,  # limits of power (0 to 7) and of current (16 to 23)
    "sw_thermal_slowdown": 0xFFF << 32 & ~(1 << 36),  # limits of temperature
    "hw_thermal_slowdown": 0xF << 44,  # VRHOT, PROCHOT: from outside of the firmware
}
_MORE_THAN_ALL = sentence("amd.more_than_all", "more is in use than there is")
_FAILED = sentence("problem.page_retirement_failed", "page retirement failed")


class GpuFiles:
    """The files of one GPU.  All methods raise NotTold."""

    def __init__(self, root: str, card: Card, *, integrated: bool) -> None:
        self.root, self.card, self.integrated = root, card, integrated
        self.sensors = Sensors(card)

    @cached_property
    def name(self) -> str:
        """The name of the product."""
        return product_name(self.root, self.card, AMD)

    def number(self, name: str) -> int:
        """Return the number in a file of the PCI device."""
        return number(read(f"{self.card.device}/{name}"))

    def has_fan(self) -> bool:
        """Return whether the board has a fan that the driver knows."""
        try:
            return bool(self.sensors.path("pwm", suffix=""))
        except NotTold:
            return False

    def memory(self, what: str) -> int:
        """Return the bytes of memory that are "total" or "used", with those of the host that an integrated GPU maps."""
        kinds = ("vram", "gtt") if self.integrated else ("vram",)
        sizes = [self.number(f"mem_info_{kind}_{what}") for kind in kinds]
        if not all(0 <= size < LARGEST_MEMORY for size in sizes):
            raise NotTold(sentence("nvml.implausible_value", "implausible value {value}", value=str(sizes)))
        return sum(sizes)


def read_memory(reading: CardReading, files: GpuFiles) -> None:
    """Read the memory: counters of the driver, which wake no GPU.

    An integrated GPU has a part of the host's memory that the firmware keeps for it, often filled by the display, and
    maps more of it as it needs.  Together they never have more than the host, and free is what the host can still give.
    """
    values = reading.values
    values["memory_shared_with_host"] = files.integrated
    reading.set("memory_total", lambda: _total(files))
    reading.set("memory_used", lambda: files.memory("used"))
    if "memory_total" in values and "memory_used" in values:
        free = values["memory_total"] - values["memory_used"]
        if free < 0:
            del values["memory_used"]
            reading.gap("memory_used", _MORE_THAN_ALL)
        elif files.integrated:
            reading.set("memory_free", lambda: min(free, host_memory(files.root, "MemAvailable")))
        else:
            values["memory_free"] = free


def _total(files: GpuFiles) -> int | None:
    total = files.memory("total")
    return min(total, host_memory(files.root, "MemTotal")) if files.integrated else total or None


def read_model(reading: CardReading, files: GpuFiles) -> None:
    """Read what the GPU is and where it lies."""
    reading.values["integrated"] = files.integrated
    reading.set("name", lambda: files.name)
    read_place(reading, files.card)


def read_problems(reading: CardReading, files: GpuFiles) -> None:
    """Add the problems of the memory.  Of a GPU that sleeps, or does not tell, none are known.

    An error that could not be corrected is no problem any more once the pages that caused it are retired.
    """
    if reading.asleep:
        return
    pages = read_or(f"{files.card.device}/ras/gpu_vram_bad_pages")
    reading.problems += [problem for state, problem in (("P", PAGES_PENDING), ("F", _FAILED)) if _pages(pages, state)]
    told = pairs(read_or(f"{files.card.device}/ras/umc_err_count")).get("ue", "")
    # The driver resets a GPU after such an error and retires the page, but counts on until it is loaded again.
    if told.isdecimal() and int(told) and not _pages(pages, "R"):
        errors = sentence("problem.memory_errors", "uncorrectable memory errors since the driver was loaded")
        reading.problems.append(errors)


def read_link_of_slot(reading: CardReading, files: GpuFiles) -> None:
    """Read the link between slot and card: behind the switch of a card every link is as fast as it can be."""
    above = os.path.dirname(os.path.dirname(files.card.device))
    is_switch = (read_or(f"{above}/vendor"), read_or(f"{above}/device")) == _SWITCH
    read_link(reading, above if is_switch else files.card.device, wakes=True)


def _throttle_reasons(files: GpuFiles) -> tuple[str, ...]:
    table = read_bytes(f"{files.card.device}/gpu_metrics")
    size, form, revision, status = _METRICS.unpack(table[: _METRICS.size].ljust(_METRICS.size, b"\0"))
    if (size, form, revision) != (_METRICS.size, 1, 3) or len(table) < size:
        raise NotTold(sentence("drm.not_supported", "the driver does not support it on this GPU"))
    if status == 2**64 - 1:
        raise NotTold(ABSENT)
    return tuple(name for name, bits in _THROTTLERS.items() if status & bits)


def _power(files: GpuFiles) -> float:
    """Return the watts: a chip tells its mean power or its power now, and rarely both."""
    try:
        return files.sensors.value("power", suffix="average") / 10**6
    except NotTold:
        return files.sensors.value("power") / 10**6


def _highest(files: GpuFiles, name: str) -> int:
    """Return the MHz of the last level of a clock: "2: 2100Mhz *"."""
    levels = re.findall(r"^\w+: *(\d{1,6})mhz", read(f"{files.card.device}/{name}"), re.IGNORECASE | re.MULTILINE)
    return int(levels[-1]) if levels else 0


def _errors(files: GpuFiles, kind: str) -> int | None:
    """Return the errors of all blocks of the GPU since the driver was loaded: "ue" uncorrectable, "ce" corrected.

    A block without counters refuses as "not supported".  If any other one does not tell, the sum is unknown.
    """
    folder = f"{files.card.device}/ras"
    counts = []
    for name in listed(folder):
        if name.endswith("_err_count"):
            try:
                text = read(f"{folder}/{name}")
            except NotTold as untold:
                if untold.key != "drm.not_supported":
                    raise
            else:
                counts.append(number(pairs(text).get(kind, text)))
    return sum(counts) if counts else None


def _pages(text: str, state: str) -> int:
    """Return how many pages have a state: "0x0000a1b2 : 0x00001000 : R" for one that is retired."""
    return len(re.findall(rf": *{state}$", text, re.MULTILINE))


def _retired(files: GpuFiles) -> int:
    try:
        return _pages(read(f"{files.card.device}/ras/gpu_vram_bad_pages"), "R")
    except NotTold as untold:
        if untold.key == "drm.empty":
            return 0
        raise


# The fields of a group that are gaps while the GPU sleeps, and how each of them is read.
ROWS: Mapping[str, Mapping[str, Callable[[GpuFiles], object]]] = {
    model.UTILIZATION: {
        "utilization": lambda files: percent(files.number("gpu_busy_percent")),
        "memory_utilization": lambda files: percent(files.number("mem_busy_percent")),
    },
    model.THERMAL: {
        "temperature": lambda files: files.sensors.value("temp", *_CORE) / 1000,
        "temperature_slowdown": lambda files: files.sensors.value("temp", *_CORE, suffix="crit") / 1000,
        "temperature_shutdown": lambda files: files.sensors.value("temp", *_CORE, suffix="emergency") / 1000,
        "fan_speed": lambda files: files.sensors.fan_speed(),
    },
    model.POWER: {
        "power_draw": _power,
        "power_limit": lambda files: files.sensors.value("power", suffix="cap") / 10**6 or None,
    },
    model.CLOCKS: {
        "clock_sm": lambda files: files.sensors.value("freq", "sclk") // 10**6,
        "clock_sm_max": lambda files: _highest(files, "pp_dpm_sclk"),
        "clock_memory": lambda files: files.sensors.value("freq", "mclk") // 10**6,
        "clock_memory_max": lambda files: _highest(files, "pp_dpm_mclk"),
        "throttle_reasons": _throttle_reasons,
    },
    model.MEDIA: {"clock_graphics": lambda files: files.sensors.value("freq", "sclk") // 10**6},
    model.ECC: {
        "ecc_mode": lambda files: bool(read(f"{files.card.device}/ras/features")),
        "ecc_corrected_volatile": lambda files: _errors(files, "ce"),
        "ecc_uncorrected_volatile": lambda files: _errors(files, "ue"),
        "retired_pages": _retired,
    },
}
