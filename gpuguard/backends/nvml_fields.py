"""How each group of the model's fields is read: the tables ROWS and READERS.

The memory of a device and its list of processes are compared with each other.  A list that cannot be true is read once
more, because a process may have ended in between; if it still cannot be true, it is marked as not plausible.  This
module does not find devices: see nvml.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuguard import model, procfs
from gpuguard.backends import COUNTED_AS_USED, ECC_IS_OFF, FIRST_LOOK, PAGES_PENDING
from gpuguard.backends.nvml_calls import (
    ABSENT,
    FABRIC,
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NEVER,
    NOT_FOUND,
    NOT_SUPPORTED,
    CallResult,
    Keep,
    Rates,
    Reading,
    is_fault,
)
from gpuguard.backends.plausibility import LARGEST_MEMORY, SLACK, implausibility
from gpuguard.locale.messages import sentence
from gpuguard.model import (
    BRIEF,
    BUSY_MEMORY,
    IDLE_TOLERANCE,
    MOST_DESKTOP_MEMORY,
    PROCESS_DETAILS,
    PROCESSES,
    GpuProcess,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any

    Lists = dict[str, list[tuple[int, "int | None"]]]  # by kind: pid and bytes of each process

UTILIZATION_SAMPLES = 1  # nvmlSamplingType_t
_SAMPLE_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
# Rates of a process in percent, and their names in nvmlProcessUtilizationSample_t.
_PROCESS_RATES = {
    "utilization": "smUtil", "memory_utilization": "memUtil",
    "encoder_utilization": "encUtil", "decoder_utilization": "decUtil",
}  # fmt: skip
_NVLINK_COUNTERS = {138: "nvlink_tx", 139: "nvlink_rx"}  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_*, in KiB for each link
_COMPUTE_MODES = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
_THROTTLE_REASONS = {  # nvmlClocksEventReason*, by bit
    0: "gpu_idle", 1: "applications_clocks_setting", 2: "sw_power_cap", 3: "hw_slowdown", 4: "sync_boost",
    5: "sw_thermal_slowdown", 6: "hw_thermal_slowdown", 7: "hw_power_brake_slowdown", 8: "display_clock_setting",
}  # fmt: skip

# NVML_GPU_FABRIC_HEALTH_MASK_*_ROUTE_UNHEALTHY: its position and width in the mask, and the value for "yes".
_ROUTE_SHIFT, _ROUTE_WIDTH, _ROUTE_UNHEALTHY = 4, 0x3, 1

MEMORY_V2 = 0x02000028  # version 2 of nvmlMemory_t and its size, 40 bytes
KEPT_SECONDS = 4.0  # twice the shortest time between two samples of the guard: no action may rest on an older sample
MPS_SERVER = b"nvidia-cuda-mps-server"
SMALLEST_CONTEXT = 2 * 2**20  # bytes: drivers hand out memory in pages of this size
_LISTS = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
# A client of the MPS server is also listed as a compute process.
_KINDS = {("compute",): "compute", ("graphics",): "graphics", ("compute", "graphics"): "compute+graphics"}


_OF_HOST = sentence("driver.memory_of_host", "its memory is the host's")
_NO_LINK = sentence("nvml.no_link", "no link tells")


@dataclass(frozen=True)
class FieldRow:
    """A field that one call fills."""

    field: str
    functions: tuple[str, ...]  # the newest first; the next one is tried when the driver lacks one
    arguments: tuple[Any, ...] = ()
    convert: Callable[[Any], Any] | None = None
    keep: Keep = "refusal"
    brief: bool = False  # read even when only BRIEF is wanted


def bus_id(info: Any) -> str | None:
    """Return the PCI bus id in an nvmlPciInfo_t, or None if there is none or it is not UTF-8."""
    try:
        return str(info.busId) if info else None
    except UnicodeDecodeError:
        return None


def thousandth(number: int) -> float:
    """Convert milliwatts to watts, or millijoules to joules."""
    return number / 1000


def kibibytes(number: int) -> float:
    """Convert KiB/s to bytes per second."""
    return number * 1024.0


def first_as_float(numbers: Sequence[int]) -> float:
    """Return the first of *numbers*: the utilization, which its sampling period follows."""
    return float(numbers[0])


def bits(words: Collection[int]) -> list[int]:
    """Return the numbers of the set bits in an array of 64-bit words, the lowest first."""
    return [
        64 * number + bit for number, word in enumerate(words) for bit in range(word.bit_length()) if word >> bit & 1
    ]


def cpu_ranges(words: Collection[int]) -> str | None:
    """Return the set bits as ranges: "0-2,8"; None if there are none."""
    from gpuguard.units import format_ranges  # 1 ms, and the start of a job asks for no CPUs

    return format_ranges(bits(words)) or None


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Name the set bits; a bit that is newer than this table is named by its number."""
    return tuple(_THROTTLE_REASONS.get(bit, f"bit_{bit}") for bit in bits([mask]))


PCI_BUS_ID = FieldRow("pci_bus_id", ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo"), (), bus_id, "fact")

_ROWS = (
    FieldRow("name", ("nvmlDeviceGetName",), keep="fact", brief=True),
    PCI_BUS_ID,
    FieldRow("minor_number", ("nvmlDeviceGetMinorNumber",), keep="fact"),
    FieldRow("cpu_affinity", ("nvmlDeviceGetCpuAffinity",), (16,), cpu_ranges, "fact"),
    # nvmlDeviceGetNumaNodeId would give the node that the device's own memory forms on Grace.
    FieldRow(
        "numa_node", ("nvmlDeviceGetMemoryAffinity",), (16, 0), lambda words: next(iter(bits(words)), None), "fact"
    ),
    FieldRow("temperature", ("nvmlDeviceGetTemperature",), (0,), float, keep="recent", brief=True),
    FieldRow(
        "fan_speed", ("nvmlDeviceGetFanSpeed",), (), float, keep="setting"
    ),  # no rule needs it, and the call takes 137 us
    FieldRow("temperature_slowdown", ("nvmlDeviceGetTemperatureThreshold",), (1,), float, "fact"),
    FieldRow("temperature_shutdown", ("nvmlDeviceGetTemperatureThreshold",), (0,), float, "fact"),
    FieldRow("power_draw", ("nvmlDeviceGetPowerUsage",), (), thousandth, keep="recent", brief=True),
    FieldRow("power_limit", ("nvmlDeviceGetEnforcedPowerLimit",), (), thousandth, keep="setting"),
    FieldRow("total_energy", ("nvmlDeviceGetTotalEnergyConsumption",), (), thousandth),
    FieldRow("clock_sm", ("nvmlDeviceGetClockInfo",), (1,)),
    FieldRow("clock_memory", ("nvmlDeviceGetClockInfo",), (2,)),
    FieldRow("clock_sm_max", ("nvmlDeviceGetMaxClockInfo",), (1,), None, "fact"),
    FieldRow("clock_memory_max", ("nvmlDeviceGetMaxClockInfo",), (2,), None, "fact"),
    FieldRow("pstate", ("nvmlDeviceGetPerformanceState",)),
    FieldRow(
        "throttle_reasons",
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        (),
        throttle_reasons,
    ),
    FieldRow("persistence_mode", ("nvmlDeviceGetPersistenceMode",), (), bool, keep="setting"),
    FieldRow("display_active", ("nvmlDeviceGetDisplayActive",), (), bool, keep="setting"),
    FieldRow("clock_graphics", ("nvmlDeviceGetClockInfo",), (0,)),
    FieldRow("clock_video", ("nvmlDeviceGetClockInfo",), (3,)),
    FieldRow("encoder_utilization", ("nvmlDeviceGetEncoderUtilization",), (), first_as_float),
    FieldRow("decoder_utilization", ("nvmlDeviceGetDecoderUtilization",), (), first_as_float),
    FieldRow("pcie_generation", ("nvmlDeviceGetCurrPcieLinkGeneration",)),
    FieldRow("pcie_width", ("nvmlDeviceGetCurrPcieLinkWidth",)),
    FieldRow("pcie_tx", ("nvmlDeviceGetPcieThroughput",), (0,), kibibytes),
    FieldRow("pcie_rx", ("nvmlDeviceGetPcieThroughput",), (1,), kibibytes),
)
ROWS = {
    group: tuple(row for row in _ROWS if model.DEVICE_FIELDS[row.field].group == group)
    for group in dict.fromkeys(model.DEVICE_FIELDS[row.field].group for row in _ROWS)
}


def read_rows(reading: Reading, group: str) -> None:
    """Read the fields of *group* that take one call each."""
    for row in ROWS[group]:
        if row.brief or model.BRIEF not in reading.fields:
            read_row(reading, row)


def read_row(reading: Reading, row: FieldRow) -> None:
    """Read one field."""
    for function in row.functions:
        answer = reading.call_kept(row.keep, function, *row.arguments)
        if answer.code != FUNCTION_NOT_FOUND:
            break
    reading.set_field(row.field, answer, row.convert)


def memory_of(reading: Reading) -> CallResult:
    """Read an nvmlMemory_t: version 2, which reports the reserved memory separately, or else version 1."""
    answer = reading.call_kept("refusal", "nvmlDeviceGetMemoryInfo", MEMORY_V2)
    return reading.call("nvmlDeviceGetMemoryInfo") if answer.code in NEVER else answer


def read_memory(reading: Reading) -> None:
    """Read all memory_* fields, or none of them."""
    answer = memory_of(reading)
    reading.fault("nvmlDeviceGetMemoryInfo", answer)
    if answer.code == NOT_SUPPORTED:
        _read_host_memory(reading)
        return
    if not answer.code:
        memory = answer.value
        reserved = getattr(memory, "reserved", None)
        parts = {"total": memory.total, "used": memory.used, "free": memory.free}
        if _fits(reserved=reserved or 0, **parts):
            reading.values.update({f"memory_{name}": value for name, value in parts.items()})
            _set_shared(reading, shared=False)
            if reserved is None:
                reading.gap("memory_reserved", COUNTED_AS_USED)
            else:
                reading.values["memory_reserved"] = reserved
            return
        reason = sentence("driver.implausible_values", "implausible values {values}", values=str(parts))
        answer = CallResult(reason=reason)
    if answer.code not in ABSENT:
        reading.memory_doubt = sentence(
            "nvml.memory_doubt",
            "the memory of the GPU cannot be checked against it: {reason}",
            reason=answer.reason,
        )
    for name in (*model.GROUPED_FIELDS[model.MEMORY], *(("integrated",) if model.MODEL in reading.fields else ())):
        reading.gap(name, answer.reason)


def _read_host_memory(reading: Reading) -> None:
    """Read the memory of a GPU that has none of its own: GB10 and Jetson, whose memory calls are not supported.

    A job can have what the host can still give.  What is in use there is known of processes on the GPU alone, and added
    up when those have been read: see _add_up_use().
    """
    import psutil  # not above, because only these devices need it

    host = psutil.virtual_memory()
    reading.values.update(memory_total=host.total, memory_free=host.available)
    _set_shared(reading, shared=True)
    reading.gap("memory_reserved", _OF_HOST)


def _set_shared(reading: Reading, *, shared: bool) -> None:
    """Note whose memory it is: where it is the host's, the GPU is a part of the CPU."""
    reading.values["memory_shared_with_host"] = shared
    if model.MODEL in reading.fields:
        reading.values["integrated"] = shared


def _add_up_use(reading: Reading) -> None:
    """Set memory_used of a device that shares the host's memory to that of its processes, if all of it is known."""
    rows = reading.values.get("processes") if reading.values.get("processes_plausible") else None
    amounts = [None] if rows is None else [row.memory_used for row in rows if not row.ended]
    if None in amounts:
        reading.gap("memory_used", _OF_HOST)
    else:
        reading.values["memory_used"] = sum(amounts)


def _fits(total: int, used: int, free: int, reserved: int) -> bool:
    """Return whether these amounts (bytes) can belong to one device."""
    within = 0 < total <= LARGEST_MEMORY and min(used, free, reserved) >= 0
    return within and max(used, free, reserved) <= total and used + free <= total + SLACK


def read_processes(reading: Reading) -> None:
    """Read processes and processes_plausible; PROCESS_DETAILS adds graphics and MPS ones, and details from /proc."""
    details, kinds = PROCESS_DETAILS in reading.fields, _kinds(reading)
    lists, failed, reason = _plausible_lists(reading, kinds)
    if not details and "compute" in lists and _may_be_a_desktop(reading, lists["compute"]):
        lists, failed, reason = _plausible_lists(reading, [*kinds, "graphics"])
    if "compute" not in lists:
        return
    read_now = lists, reading.values.get("memory_total")
    if read_now != reading.device.told:  # otherwise the rows stay the same objects as well
        reading.device.told, reading.device.listed = read_now, _merged(*read_now)
    rows = reading.device.listed
    # A desktop looks like a job when the list of graphics processes exists but could not be read.
    reading.values["processes_plausible"] = reason is None and all(answer.code in NEVER for answer in failed.values())
    if reason is None:
        read, ended = procfs.described if details else procfs.identified, _ended(reading, rows)
        rows = [replace(row, ended=True) if row.pid in ended else read(row, reading.stats.get(row.pid)) for row in rows]
        if details and BRIEF not in reading.fields:
            rows = _with_utilization(reading, rows)
    else:
        # The processes that have these pids here are not the ones that the driver means, so the pids stay mere numbers.
        reading.gap("processes", sentence("driver.implausible_list", "implausible list: {reason}", reason=reason))
    reading.values["processes"] = tuple(rows)


def _ended(reading: Reading, rows: Iterable[GpuProcess]) -> set[int]:
    """Return the pids of *rows* that no longer belong to a process.

    A pid that was once listed without a process counts as ended until the driver drops it: another process may have
    got it since, perhaps because the user who left the row behind arranged that.
    """
    reading.device.ended = {row.pid for row in rows} & (reading.device.ended | reading.gone)
    return reading.device.ended


def _kinds(reading: Reading) -> list[str]:
    return list(_LISTS) if PROCESS_DETAILS in reading.fields else ["compute"]


def _may_be_a_desktop(reading: Reading, rows: Sequence[tuple[int, int | None]]) -> bool:
    """Return whether the memory in use can be a desktop's, which shows only in the list of graphics processes."""
    used = reading.values.get("memory_used")
    small = all(memory is not None and memory <= MOST_DESKTOP_MEMORY for _, memory in rows)
    return small and (bool(rows) or (used is not None and used > IDLE_TOLERANCE))


def read_idle_processes(reading: Reading) -> None:
    """Read what read_processes() reads, unless the memory in use says enough: that saves two calls per busy device."""
    used = reading.values.get("memory_used")
    if PROCESSES not in reading.fields and (used is None or used < BUSY_MEMORY):
        read_processes(reading)


def _plausible_lists(reading: Reading, kinds: list[str]) -> tuple[Lists, dict[str, CallResult], str | None]:
    lists, failed = _lists(reading, kinds)
    reason = _implausibility(reading, lists, reading.values.get("memory_used"))
    if reason or not reading.gone <= reading.device.ended:
        # A process that ended or grew between two calls looks the same, so all is read once more, and the memory last.
        lists, failed = _lists(reading, kinds)
        used = memory_of(reading).value if "memory_used" in reading.values else None
        reason = _implausibility(reading, lists, used and used.used)
    for kind, answer in failed.items():
        reading.gap("processes" if kind == "compute" else f"processes ({kind})", answer.reason)
        if is_fault(answer):
            text = sentence("problem.list_failed", "{kind} processes: {reason}", kind=kind, reason=answer.reason)
            reading.problem(text)
    return lists, failed, reason


def _lists(reading: Reading, kinds: list[str]) -> tuple[Lists, dict[str, CallResult]]:
    answers = {"compute": _list(reading, "compute")}
    _forget(reading, answers["compute"])
    for kind in kinds[1:]:
        if BRIEF not in reading.fields or not _must_be_empty(kind, reading, answers["compute"]):
            answers[kind] = reading.device.settings.get((kind,)) or _list(reading, kind)
    lists = {kind: answer.value for kind, answer in answers.items() if not answer.code}
    return lists, {kind: answer for kind, answer in answers.items() if answer.code}


def _forget(reading: Reading, computing: CallResult) -> None:
    """Forget what is kept about the device if a new process may have appeared since the last sample."""
    device, used = reading.device, reading.values.get("memory_used")
    known = {pid for pid, _ in device.told[0]["compute"]} if device.told else ()
    if computing.code or not all(pid in known for pid, _ in computing.value):
        device.settings.clear()  # because clients of MPS are also listed as compute processes
    elif used is None or device.used is None or used > device.used:
        device.settings.pop(("graphics",), None)  # because drawing needs memory
    device.used = used


def _must_be_empty(kind: str, reading: Reading, computing: CallResult) -> bool:
    """Return whether the list of this *kind* need not be read, because it can only be empty."""
    if computing.code:
        return False
    if kind == "mps":  # a client is also listed as a compute process, and so is the server that it talks to
        return not any(procfs.may_be(pid, MPS_SERVER) for pid, _ in computing.value)
    # This holds only where the driver's own memory is not counted: a desktop that shows nothing has 5 MiB (GTX 1080).
    used, kept = reading.values.get("memory_used"), reading.values.get("memory_reserved")
    return not computing.value and kept is not None and used is not None and used < SMALLEST_CONTEXT


def _list(reading: Reading, kind: str) -> CallResult:
    answer = reading.call(f"nvmlDeviceGet{_LISTS[kind]}RunningProcesses_v3")
    if answer.code == FUNCTION_NOT_FOUND:
        answer = reading.call(f"nvmlDeviceGet{_LISTS[kind]}RunningProcesses_v2")
    if kind != "compute" and not answer.code and not answer.value:
        reading.device.settings[kind,] = answer  # empty until a process may have appeared: see _forget
    return answer


def _implausibility(reading: Reading, lists: Lists, used: int | None) -> str | None:
    if any(lists.values()) and reading.memory_doubt:
        return reading.memory_doubt
    total = reading.values.get("memory_total")
    reading.stats, reading.gone = {}, set()
    own_pids = procfs.in_first_pid_namespace() is True
    for rows in filter(None, lists.values()):
        reason = implausibility(
            rows,
            alive=lambda pid: _is_alive(reading, pid),
            pid_max=procfs.pid_max(),
            own_pids=own_pids,
            memory_total=total,
            memory_used=used,
        )
        if reason:
            return reason
    if sum(map(bool, lists.values())) < 2:
        return None  # a single list has been judged above
    most: dict[int, int] = {}
    for pid, memory in (row for rows in lists.values() for row in rows):
        most[pid] = max(memory or 0, most.get(pid, 0))
    if total is not None and sum(most.values()) > total:
        return sentence("implausible.more_than_gpu_in_all", "the processes of all kinds have more memory than the GPU")
    return None


def _is_alive(reading: Reading, pid: int) -> bool:
    """Return what procfs.alive() does, and keep in *reading* what was learned about the process."""
    stat = procfs.stat_of(pid)
    if stat:
        reading.stats[pid] = stat
    elif not procfs.alive(pid):
        reading.gone.add(pid)
    return pid not in reading.gone


def _merged(lists: Lists, memory_total: int | None) -> list[GpuProcess]:
    """Merge the lists into one process per pid, with its kind from all lists and the most memory that any reports."""
    kinds: dict[int, tuple[str, ...]] = {}
    memory: dict[int, int] = {}
    for kind, rows in lists.items():
        for pid, used in rows:
            kinds[pid] = (*kinds.get(pid, ()), kind)
            if used is not None and (memory_total is None or used <= memory_total):
                memory[pid] = max(used, memory.get(pid, 0))
    return [GpuProcess(pid, memory.get(pid), _KINDS.get(found, "mps")) for pid, found in kinds.items()]


def _with_utilization(reading: Reading, rows: list[GpuProcess]) -> list[GpuProcess]:
    """Add the utilization of each process: the mean of the driver's samples since the last call, or else a recent mean.

    The driver hands out each sample once, to a caller that names the newest one it has.  The second reading, just
    before a signal, would therefore know nothing, so a mean is kept for KEPT_SECONDS for exactly that process.
    """
    device, now = reading.device, time.monotonic()
    if not rows:
        device.utilizations = {}
        return rows
    answer = reading.call_kept("refusal", "nvmlDeviceGetProcessUtilization", device.utilization_seen)
    if answer.code and answer.code != NOT_FOUND:  # NOT_FOUND: there is no sample since the last call
        reading.gap("processes (utilization)", answer.reason)
        return rows
    samples: dict[int, list[Any]] = {}
    for sample in answer.value or ():
        device.utilization_seen = max(device.utilization_seen, sample.timeStamp)
        samples.setdefault(sample.pid, []).append(sample)
    means: dict[tuple[int, float | None], tuple[float, Rates]] = {}
    for key in ((row.pid, row.start_time) for row in rows):
        fresh, kept = samples.get(key[0]), device.utilizations.get(key)
        if fresh:
            means[key] = (
                now,
                {name: _mean_of(getattr(sample, field) for sample in fresh) for name, field in _PROCESS_RATES.items()},
            )
        elif kept and now - kept[0] <= KEPT_SECONDS:
            means[key] = kept
    device.utilizations = {key: mean for key, mean in means.items() if key[1] is not None}
    return [replace(row, **means.get((row.pid, row.start_time), (0.0, {}))[1]) for row in rows]


def _mean_of(percentages: Iterable[float]) -> float | None:
    """Return the mean of the values that can be true, or None if there are none."""
    sound = [value for value in percentages if 0 <= value <= 100]
    return sum(sound) / len(sound) if sound else None


def read_utilization(reading: Reading) -> None:
    """Read utilization: the mean of the driver's sample buffer (some seconds), else its last period (1/6 to 1 s)."""
    mean = _mean_utilization(reading)
    if mean is not None:
        reading.values["utilization"] = mean
        if model.BRIEF in reading.fields:
            return
    rates = reading.call("nvmlDeviceGetUtilizationRates")
    reading.set_field("memory_utilization", rates, lambda rates: float(rates.memory))
    if mean is None:
        reading.set_field("utilization", rates, lambda rates: float(rates.gpu))


def _mean_utilization(reading: Reading) -> float | None:
    samples = reading.call_kept("refusal", "nvmlDeviceGetSamples", UTILIZATION_SAMPLES, 0)
    if samples.value is None:
        return None
    kind, rows = samples.value
    if kind >= len(_SAMPLE_VALUES):  # a type that is newer than this table
        return None
    return _mean_of(getattr(row.sampleValue, _SAMPLE_VALUES[kind]) for row in rows)


def read_health(reading: Reading) -> None:
    """Read problems, compute_mode, mig_mode and asleep."""
    reading.values["asleep"] = False  # this library keeps the devices that it has opened awake
    mode = reading.call_kept("setting", "nvmlDeviceGetComputeMode")
    reading.set_field("compute_mode", mode, _COMPUTE_MODES.get)
    reading.fault("nvmlDeviceGetComputeMode", mode)

    mig = reading.call_kept("setting", "nvmlDeviceGetMigMode")
    reading.fault("nvmlDeviceGetMigMode", mig)
    if mig.code in NEVER:
        reading.values["mig_mode"] = False  # a device or driver without MIG is not in MIG mode
        reading.gap("mig_mode", mig.reason)  # and has no mode to report
    else:
        reading.set_field("mig_mode", mig, lambda modes: modes[0] == 1)

    rows = remapped_rows(reading)
    reading.fault("nvmlDeviceGetRemappedRows", rows)
    if rows.code in NEVER:
        pending = reading.call_kept("setting", "nvmlDeviceGetRetiredPagesPendingStatus")
        reading.fault("nvmlDeviceGetRetiredPagesPendingStatus", pending)
        if pending.value == 1:
            reading.problem(PAGES_PENDING)
    elif not rows.code:
        _, _, pending_remap, failed = rows.value
        if pending_remap:
            reading.problem(sentence("problem.row_remap_pending", "row remap pending"))
        if failed:
            reading.problem(sentence("problem.row_remap_failed", "row remap failed"))

    fabric = reading.call_kept("setting", FABRIC)
    if not fabric.code and fabric.value >> _ROUTE_SHIFT & _ROUTE_WIDTH == _ROUTE_UNHEALTHY:
        reading.problem(sentence("problem.unhealthy_route", "the NVLink fabric has an unhealthy route"))


def remapped_rows(reading: Reading) -> CallResult:
    """Read (corrected, uncorrected, pending, failed) of a device with row remapping (Ampere and later)."""
    return reading.call_kept("setting", "nvmlDeviceGetRemappedRows")


def read_ecc(reading: Reading) -> None:
    """Read ecc_*, retired_pages and remapped_rows*."""
    mode = reading.call("nvmlDeviceGetEccMode")
    reading.set_field("ecc_mode", mode, lambda modes: modes[0] == 1)
    for uncorrected, kind in enumerate(("corrected", "uncorrected")):
        for aggregate, since in enumerate(("volatile", "aggregate")):
            name = f"ecc_{kind}_{since}"
            if mode.code or not reading.values.get("ecc_mode"):
                reading.gap(name, mode.reason or ECC_IS_OFF)
            else:
                reading.set_field(name, reading.call("nvmlDeviceGetTotalEccErrors", uncorrected, aggregate))
    pages = [reading.call("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    failed = next((answer for answer in pages if answer.code), None)
    reading.set_field("retired_pages", failed or CallResult(sum(len(answer.value) for answer in pages)))
    reading.set_field("remapped_rows", remapped_rows(reading), lambda rows: rows[0] + rows[1])
    reading.set_field("remapped_rows_uncorrected", remapped_rows(reading), lambda rows: rows[1])


def read_nvlink(reading: Reading) -> None:
    """Read nvlink_links: all active links, or none; the other end of a link never changes, so it is kept."""
    links = []
    for link in range(getattr(reading.nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        answer = reading.call("nvmlDeviceGetNvLinkState", link)
        if answer.code == INVALID_ARGUMENT and link:
            break  # the device has fewer links than the binding knows of
        if answer.value == 1:
            answer = reading.call_kept("fact", "nvmlDeviceGetNvLinkRemotePciInfo", link)
            links.append((link, bus_id(answer.value)))
        if answer.code:
            why = sentence("nvml.link", "link {number}: {reason}", number=link, reason=answer.reason)
            reading.gap("nvlink_links", why)
            return
    reading.values["nvlink_links"] = tuple(links)


def read_nvlink_flow(reading: Reading) -> None:
    """Read nvlink_flow, nvlink_tx and nvlink_rx from counters: each is a mean since this backend's last sample."""
    links = range(getattr(reading.nvml, "NVML_NVLINK_MAX_LINKS", 18))
    wanted = tuple([(number, link) for number in _NVLINK_COUNTERS for link in links])
    answer = reading.call_kept("refusal", "nvmlDeviceGetFieldValues", wanted)
    at, counts = (0.0, {}) if answer.code else _link_counts(answer.value)
    before, reading.device.flow = reading.device.flow, (at, counts) if counts else None
    if (
        before is None
        or at <= before[0]
        or before[1].keys() != counts.keys()
        or any(count < before[1][key] for key, count in counts.items())
    ):
        for name in (*_NVLINK_COUNTERS.values(), "nvlink_flow"):
            reading.gap(name, answer.reason or (FIRST_LOOK if counts else _NO_LINK))
        return
    rates = {key: (count - before[1][key]) * 1024.0 / (at - before[0]) for key, count in counts.items()}
    for name in _NVLINK_COUNTERS.values():
        reading.set_field(name, CallResult(sum(rate for (_, of), rate in rates.items() if of == name)))
    reading.values["nvlink_flow"] = tuple(
        (link, rates[link, "nvlink_tx"], rates[link, "nvlink_rx"])
        for link in links
        if {(link, "nvlink_tx"), (link, "nvlink_rx")} <= rates.keys()
    )


def _link_counts(counters: Sequence[Any]) -> tuple[float, dict[tuple[int, str], int]]:
    """Return the time of the reading (s) and the KiB so far by link and nvlink_tx or nvlink_rx, where a link tells."""
    told = [
        counter
        for counter in counters
        if counter.nvmlReturn == 0
        and counter.fieldId in _NVLINK_COUNTERS
        and 0 <= counter.valueType < len(_SAMPLE_VALUES)
    ]
    counts = {
        (counter.scopeId, _NVLINK_COUNTERS[counter.fieldId]): getattr(counter.value, _SAMPLE_VALUES[counter.valueType])
        for counter in told
    }
    return max((counter.timestamp for counter in told), default=0) / 1e6, counts


# The order matters, because the process list is compared with the memory.
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


# The calls that each reader makes first.  Whether IDLE_PROCESSES are needed is not known at that point.
FIRST_READERS = {
    **{group: reader for group, reader in READERS.items() if group != model.IDLE_PROCESSES},
    model.PROCESSES: lambda reading: _lists(reading, _kinds(reading)),
}


def read(reading: Reading, readers: Mapping[str, Callable[[Reading], object]] = READERS) -> None:
    """Read all groups that are wanted.  Raises DeviceLost."""
    for group, reader in readers.items():
        if group in reading.fields:
            reader(reading)
    for group in ROWS:
        if group in reading.fields:
            read_rows(reading, group)
    if reading.values.get("memory_shared_with_host"):
        _add_up_use(reading)
