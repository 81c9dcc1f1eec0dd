"""What each group of fields of the model reads: the tables ROWS and READERS.

What a device is used for, its memory and its processes, is in nvml_usage.  Does not find devices: see nvml.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard import model
from gpuguard.backends.nvml_calls import FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NEVER, CallResult
from gpuguard.backends.nvml_processes import read_idle_processes, read_memory, read_processes
from gpuguard.backends.nvml_reading import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

UTILIZATION_SAMPLES = 1  # nvmlSamplingType_t
_SAMPLE_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
_NVLINK_COUNTERS = {138: "nvlink_tx", 139: "nvlink_rx"}  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_*, KiB, of each link
_COMPUTE_MODES = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
_THROTTLE_REASONS = {  # nvmlClocksEventReason*, by bit
    0: "gpu_idle", 1: "applications_clocks_setting", 2: "sw_power_cap", 3: "hw_slowdown", 4: "sync_boost",
    5: "sw_thermal_slowdown", 6: "hw_thermal_slowdown", 7: "hw_power_brake_slowdown", 8: "display_clock_setting",
}  # fmt: skip


@dataclass(frozen=True)
class FieldRow:
    """One field from one call."""

    field: str
    functions: tuple[str, ...]  # the newest first; the next one is asked when the driver does not have it
    arguments: tuple[Any, ...] = ()
    convert: Callable[[Any], Any] | None = None
    static: bool = False
    setting: bool = False  # asked seldom
    lately: bool = False  # may be of a moment ago
    brief: bool = False  # read although only BRIEF is wanted


def bus_id(info: Any) -> str | None:
    """The pci bus id in a nvmlPciInfo_t."""
    try:
        return str(info.busId) if info else None
    except UnicodeDecodeError:
        return None


def thousandth(number: int) -> float:
    """Milliwatts -> watts, millijoules -> joules."""
    return number / 1000


def kibibytes(number: int) -> float:
    """KiB/s -> bytes per second."""
    return number * 1024.0


def bits(words: Collection[int]) -> list[int]:
    """The numbers of the set bits in an array of 64-bit words, the lowest first."""
    found = []
    for place, word in enumerate(words):
        while word:
            lowest = word & -word
            found.append(64 * place + lowest.bit_length() - 1)
            word ^= lowest
    return found


def number_ranges(numbers: list[int]) -> str | None:
    """[0, 1, 2, 8] -> "0-2,8"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts) or None


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Names of the set bits; a bit that is newer than this table by its number."""
    return tuple(_THROTTLE_REASONS.get(bit, f"bit_{bit}") for bit in bits([mask]))


PCI_BUS_ID = FieldRow("pci_bus_id", ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo"), (), bus_id, True)

ROWS: dict[str, tuple[FieldRow, ...]] = {
    model.MODEL: (
        FieldRow("name", ("nvmlDeviceGetName",), static=True, brief=True),
        PCI_BUS_ID,
        FieldRow("minor_number", ("nvmlDeviceGetMinorNumber",), static=True),
        FieldRow("cpu_affinity", ("nvmlDeviceGetCpuAffinity",), (16,), lambda words: number_ranges(bits(words)), True),
        # Not nvmlDeviceGetNumaNodeId: that is the node that the device's own memory forms, on Grace.
        FieldRow(
            "numa_node", ("nvmlDeviceGetMemoryAffinity",), (16, 0), lambda words: next(iter(bits(words)), None), True
        ),
    ),
    model.THERMAL: (
        FieldRow("temperature", ("nvmlDeviceGetTemperature",), (0,), float, lately=True, brief=True),
        FieldRow("fan_speed", ("nvmlDeviceGetFanSpeed",), (), float, setting=True),  # no rule asks, and it takes 137 us
        FieldRow("temperature_slowdown", ("nvmlDeviceGetTemperatureThreshold",), (1,), float, True),
        FieldRow("temperature_shutdown", ("nvmlDeviceGetTemperatureThreshold",), (0,), float, True),
    ),
    model.POWER: (
        FieldRow("power_draw", ("nvmlDeviceGetPowerUsage",), (), thousandth, lately=True, brief=True),
        FieldRow("power_limit", ("nvmlDeviceGetEnforcedPowerLimit",), (), thousandth, setting=True),
        FieldRow("total_energy", ("nvmlDeviceGetTotalEnergyConsumption",), (), thousandth),
    ),
    model.CLOCKS: (
        FieldRow("clock_sm", ("nvmlDeviceGetClockInfo",), (1,)),
        FieldRow("clock_memory", ("nvmlDeviceGetClockInfo",), (2,)),
        FieldRow("clock_sm_max", ("nvmlDeviceGetMaxClockInfo",), (1,), None, True),
        FieldRow("clock_memory_max", ("nvmlDeviceGetMaxClockInfo",), (2,), None, True),
        FieldRow("pstate", ("nvmlDeviceGetPerformanceState",)),
        FieldRow(
            "throttle_reasons",
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            (),
            throttle_reasons,
        ),
        FieldRow("persistence_mode", ("nvmlDeviceGetPersistenceMode",), (), bool, setting=True),
    ),
    model.PCIE: (
        FieldRow("pcie_generation", ("nvmlDeviceGetCurrPcieLinkGeneration",)),
        FieldRow("pcie_width", ("nvmlDeviceGetCurrPcieLinkWidth",)),
        FieldRow("pcie_tx", ("nvmlDeviceGetPcieThroughput",), (0,), kibibytes),
        FieldRow("pcie_rx", ("nvmlDeviceGetPcieThroughput",), (1,), kibibytes),
    ),
}


def read_rows(reading: Reading, group: str) -> None:
    """Read the fields of *group* that are one call each."""
    values, constants = reading.values, reading.place.constants
    for row in ROWS[group]:
        if row.field in constants:
            values[row.field] = constants[row.field]
        elif row.brief or model.BRIEF not in reading.fields:
            read_row(reading, row)


def read_row(reading: Reading, row: FieldRow) -> None:
    """Read one field."""
    for function in row.functions:
        if row.static:
            answer = reading.ask_once(f"{row.field} {function}", function, *row.arguments)
        elif row.setting:
            answer = reading.ask_seldom(function)
        elif row.lately:
            answer = reading.ask_lately(function, *row.arguments, key=row.field + function)
        else:
            answer = reading.ask_where_told(function, *row.arguments, key=row.field + function)
        if answer.code != FUNCTION_NOT_FOUND:
            break
    if reading.take(row.field, answer, row.convert) and row.static:
        reading.place.constants[row.field] = reading.values[row.field]


def read_utilization(reading: Reading) -> None:
    """utilization: mean of the driver's sample buffer (some seconds), else its last sample period (1/6 to 1 s)."""
    mean = _mean_utilization(reading)
    if mean is not None:
        reading.values["utilization"] = mean
        if model.BRIEF in reading.fields:
            return
    rates = reading.ask("nvmlDeviceGetUtilizationRates")
    reading.take("memory_utilization", rates, lambda rates: float(rates.memory))
    if mean is None:
        reading.take("utilization", rates, lambda rates: float(rates.gpu))


_SAMPLE_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


def _mean_utilization(reading: Reading) -> float | None:
    samples = reading.ask_where_told("nvmlDeviceGetSamples", UTILIZATION_SAMPLES, 0)
    if samples.value is None:
        return None
    kind, rows = samples.value
    if kind >= len(_SAMPLE_VALUES):  # a type that is newer than this
        return None
    numbers = [getattr(row.sampleValue, _SAMPLE_VALUES[kind]) for row in rows]
    sound = [number for number in numbers if 0 <= number <= 100]
    return sum(sound) / len(sound) if sound else None


def read_health(reading: Reading) -> None:
    """problems, compute_mode, mig_mode."""
    mode = reading.ask_seldom("nvmlDeviceGetComputeMode")
    reading.take("compute_mode", mode, _COMPUTE_MODES.get)
    reading.fault("nvmlDeviceGetComputeMode", mode)

    mig = reading.ask_seldom("nvmlDeviceGetMigMode")
    reading.fault("nvmlDeviceGetMigMode", mig)
    if mig.code in NEVER:
        reading.values["mig_mode"] = False  # a device or driver without MIG is not in MIG mode
    else:
        reading.take("mig_mode", mig, lambda modes: modes[0] == 1)

    rows = remapped_rows(reading)
    reading.fault("nvmlDeviceGetRemappedRows", rows)
    if rows.code in NEVER:
        pending = reading.ask_unless_never("nvmlDeviceGetRetiredPagesPendingStatus")
        reading.fault("nvmlDeviceGetRetiredPagesPendingStatus", pending)
        if pending.value == 1:
            reading.problem("page retirement pending")
    elif not rows.code:
        _, _, pending_remap, failed = rows.value
        if pending_remap:
            reading.problem("row remap pending")
        if failed:
            reading.problem("row remap failed")


def remapped_rows(reading: Reading) -> CallResult:
    """(corrected, uncorrected, pending, failed) of a device with row remapping (Ampere and later)."""
    return reading.ask_seldom("nvmlDeviceGetRemappedRows")


def read_ecc(reading: Reading) -> None:
    """ecc_*, retired_pages, remapped_rows."""
    mode = reading.ask("nvmlDeviceGetEccMode")
    reading.take("ecc_mode", mode, lambda modes: modes[0] == 1)
    for uncorrected, kind in enumerate(("corrected", "uncorrected")):
        for aggregate, since in enumerate(("volatile", "aggregate")):
            name = f"ecc_{kind}_{since}"
            if mode.code or not reading.values.get("ecc_mode"):
                reading.gap(name, mode.reason or "ECC is off")
            else:
                reading.take(name, reading.ask("nvmlDeviceGetTotalEccErrors", uncorrected, aggregate))
    pages = [reading.ask("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    failed = next((answer for answer in pages if answer.code), None)
    reading.take("retired_pages", failed or CallResult(sum(len(answer.value) for answer in pages)))
    reading.take("remapped_rows", remapped_rows(reading), lambda rows: rows[0] + rows[1])


def read_nvlink(reading: Reading) -> None:
    """nvlink_links: the active ones, or none at all; a link's other end never changes."""
    links = []
    for link in range(getattr(reading.nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        answer = reading.ask("nvmlDeviceGetNvLinkState", link)
        if answer.code == INVALID_ARGUMENT and link:
            break  # fewer links than the binding knows of
        if answer.value == 1:
            answer = reading.ask_once(f"nvlink {link}", "nvmlDeviceGetNvLinkRemotePciInfo", link)
            links.append((link, bus_id(answer.value)))
        if answer.code:
            reading.gap("nvlink_links", f"link {link}: {answer.reason}")
            return
    reading.values["nvlink_links"] = tuple(links)


def read_nvlink_flow(reading: Reading) -> None:
    """nvlink_tx, nvlink_rx: from counters, so the mean since this backend looked last."""
    links = range(getattr(reading.nvml, "NVML_NVLINK_MAX_LINKS", 18))
    wanted = tuple([(number, link) for number in _NVLINK_COUNTERS for link in links])
    answer = reading.ask_unless_never("nvmlDeviceGetFieldValues", wanted)
    told = [] if answer.code else [each for each in answer.value if each.nvmlReturn == 0 and _is_sound(each)]
    sums = dict.fromkeys(_NVLINK_COUNTERS.values(), 0)
    for each in told:
        sums[_NVLINK_COUNTERS[each.fieldId]] += getattr(each.value, _SAMPLE_VALUES[each.valueType])
    before, at = reading.place.flow, max((each.timestamp for each in told), default=0) / 1e6
    reading.place.flow = (at, sums) if told else None
    for name, count in sums.items():
        if not told:
            reading.gap(name, answer.reason or "no link tells")
        elif before is None or at <= before[0] or count < before[1][name]:
            reading.gap(name, "a rate needs two looks")
        else:
            reading.take(name, CallResult((count - before[1][name]) * 1024.0 / (at - before[0])))


def _is_sound(counter: Any) -> bool:
    return counter.fieldId in _NVLINK_COUNTERS and 0 <= counter.valueType < len(_SAMPLE_VALUES)


# In this order: the process list is compared with the memory.
READERS: Mapping[str, Callable[[Reading], None]] = {
    model.MEMORY: read_memory,
    model.PROCESSES: read_processes,
    model.IDLE_PROCESSES: read_idle_processes,
    model.UTILIZATION: read_utilization,
    model.HEALTH: read_health,
    model.ECC: read_ecc,
    model.NVLINK: read_nvlink,
    model.NVLINK_FLOW: read_nvlink_flow,
}


def read(reading: Reading) -> None:
    """Read all groups that are wanted.  Raises DeviceLost."""
    for group, reader in READERS.items():
        if group in reading.fields:
            reader(reading)
    for group in ROWS:
        if group in reading.fields:
            read_rows(reading, group)
