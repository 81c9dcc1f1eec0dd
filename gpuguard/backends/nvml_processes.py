"""What a device is used for: its memory, and the processes on it, compared with each other.

A process list that cannot be true is read once more, because a process may have ended meanwhile, and is then marked as
not plausible: see processes for the rules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard import procfs
from gpuguard.backends.nvml_calls import ABSENT, FUNCTION_NOT_FOUND, NEVER, NOT_FOUND, CallResult
from gpuguard.backends.nvml_reading import Reading
from gpuguard.backends.plausibility import LARGEST_MEMORY, SLACK, implausibility
from gpuguard.device_state import IDLE_TOLERANCE, idle_limit
from gpuguard.model import BRIEF, BUSY_MEMORY, PROCESS_DETAILS, PROCESSES, Device, GpuProcess

if TYPE_CHECKING:
    Lists = dict[str, list[tuple[int, "int | None"]]]  # by kind: pid and bytes of each process

MEMORY_V2 = 0x02000028  # version 2 of nvmlMemory_t and its size, 40 bytes
KEPT_SECONDS = 4.0  # twice the shortest time between two samples of the guard: no older sample may lead to an act
MPS_SERVER = b"nvidia-cuda-mps-server"
SMALLEST_CONTEXT = 2 * 2**20  # bytes: the page that a driver gives memory in
_LISTS = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
# A client of the MPS server is listed as a compute process, too.
_KINDS = {
    ("compute",): "compute",
    ("graphics",): "graphics",
    ("compute", "graphics"): "compute+graphics",
}


def memory_of(reading: Reading) -> CallResult:
    """A nvmlMemory_t: version 2, which tells the reserve apart, else version 1."""
    if "memory v1" not in reading.place.static:
        answer = reading.ask("nvmlDeviceGetMemoryInfo", MEMORY_V2)
        if answer.code not in NEVER:
            return answer
        reading.place.static["memory v1"] = answer
    return reading.ask("nvmlDeviceGetMemoryInfo")


def read_memory(reading: Reading) -> None:
    """memory_*: all of them, or none."""
    answer = memory_of(reading)
    reading.fault("nvmlDeviceGetMemoryInfo", answer)
    if not answer.code:
        memory = answer.value
        reserved = getattr(memory, "reserved", None)
        parts = {"total": memory.total, "used": memory.used, "free": memory.free}
        if _fits(reserved=reserved or 0, **parts):
            reading.values.update({f"memory_{name}": value for name, value in parts.items()})
            if reserved is None:
                reading.gap("memory_reserved", "this driver counts it as used memory")
            else:
                reading.values["memory_reserved"] = reserved
            return
        answer = CallResult(reason=f"implausible values {parts}")
    if answer.code not in ABSENT:
        reading.memory_doubt = f"the memory of the device cannot be checked against it: {answer.reason}"
    for name in ("memory_total", "memory_used", "memory_free", "memory_reserved"):
        reading.gap(name, answer.reason)


def _fits(total: int, used: int, free: int, reserved: int) -> bool:
    """Whether these bytes can be those of one device."""
    within = 0 < total <= LARGEST_MEMORY and min(used, free, reserved) >= 0
    return within and max(used, free, reserved) <= total and used + free <= total + SLACK


def read_processes(reading: Reading) -> None:
    """processes and processes_plausible; PROCESS_DETAILS adds graphics and MPS processes and who they all are."""
    details, kinds = PROCESS_DETAILS in reading.fields, _kinds(reading)
    lists, failed, reason = _plausible_lists(reading, kinds)
    if not details and "compute" in lists and _may_be_a_desktop(reading, lists["compute"]):
        lists, failed, reason = _plausible_lists(reading, [*kinds, "graphics"])
    if "compute" not in lists:
        return
    told = lists, reading.values.get("memory_total")
    if told != reading.place.told:  # else they are the same objects, too
        reading.place.told, reading.place.listed = told, _merged(*told)
    rows = reading.place.listed
    # A desktop looks like a job when the list of graphics processes exists and could not be read.
    reading.values["processes_plausible"] = reason is None and all(each.code in NEVER for each in failed.values())
    if reason is None:
        read = procfs.described if details else procfs.identified
        rows = [read(row, reading.stats.get(row.pid)) for row in rows]
        if details and BRIEF not in reading.fields:
            rows = _with_utilization(reading, rows)
    else:
        # Whoever has these pids here is not who the driver means: they stay numbers.
        reading.gap("processes", f"implausible list: {reason}")
    reading.values["processes"] = tuple(rows)


def list_processes(reading: Reading) -> None:
    """Ask what read_processes() asks at first."""
    _lists(reading, _kinds(reading))


def _kinds(reading: Reading) -> list[str]:
    return list(_LISTS) if PROCESS_DETAILS in reading.fields else ["compute"]


def _may_be_a_desktop(reading: Reading, rows: Sequence[tuple[int, int | None]]) -> bool:
    """Whether what is in use can be a desktop's, which shows only in the list of graphics processes."""
    used = reading.values.get("memory_used")
    device = Device(0, "", memory_used=used, memory_reserved=reading.values.get("memory_reserved"))
    small = all(memory is not None and memory <= IDLE_TOLERANCE for _, memory in rows)
    return small and (bool(rows) or (used is not None and used > idle_limit(device)))


def read_idle_processes(reading: Reading) -> None:
    """What read_processes() reads, unless the memory in use says enough: two calls for each busy device."""
    used = reading.values.get("memory_used")
    if PROCESSES not in reading.fields and (used is None or used < BUSY_MEMORY):
        read_processes(reading)


def _plausible_lists(reading: Reading, kinds: list[str]) -> tuple[Lists, dict[str, CallResult], str | None]:
    lists, failed = _lists(reading, kinds)
    reason = _implausibility(reading, lists, reading.values.get("memory_used"))
    if reason:
        # A process that ended or grew between two calls looks the same: once more, the memory last.
        lists, failed = _lists(reading, kinds)
        used = memory_of(reading).value if "memory_used" in reading.values else None
        reason = _implausibility(reading, lists, used and used.used)
    for kind, answer in failed.items():
        reading.gap("processes" if kind == "compute" else f"processes ({kind})", answer.reason)
        reading.fault(f"{kind} processes", answer)
    return lists, failed, reason


def _lists(reading: Reading, kinds: list[str]) -> tuple[Lists, dict[str, CallResult]]:
    answers = {"compute": _list(reading, "compute")}
    _forget(reading, answers["compute"])
    for kind in kinds[1:]:
        if BRIEF not in reading.fields or not _must_be_empty(kind, reading, answers["compute"]):
            answers[kind] = reading.place.settings.get(kind) or _list(reading, kind)
    lists = {kind: answer.value for kind, answer in answers.items() if not answer.code}
    return lists, {kind: answer for kind, answer in answers.items() if answer.code}


def _forget(reading: Reading, computing: CallResult) -> None:
    """Forget what is kept of the device if somebody may have come since the last look."""
    place, used = reading.place, reading.values.get("memory_used")
    known = {pid for pid, _ in place.told[0]["compute"]} if place.told else ()
    if computing.code or not all(pid in known for pid, _ in computing.value):
        place.settings.clear()  # clients of MPS are listed as compute processes, too
    elif used is None or place.used is None or used > place.used:
        place.settings.pop("graphics", None)  # who draws needs memory
    place.used = used


def _must_be_empty(kind: str, reading: Reading, computing: CallResult) -> bool:
    """Whether a list other than that of who is *computing* need not be asked for: a third of what a look waits for."""
    if computing.code:
        return False
    if kind == "mps":  # a client is listed as a compute process, too, and so is the server that it talks to
        return not any(procfs.may_be(pid, MPS_SERVER) for pid, _ in computing.value)
    # Only where the driver's own memory is not counted: a desktop that shows nothing has 5 MiB (GTX 1080).
    used, kept = reading.values.get("memory_used"), reading.values.get("memory_reserved")
    return not computing.value and kept is not None and used is not None and used < SMALLEST_CONTEXT


def _list(reading: Reading, kind: str) -> CallResult:
    answer = reading.ask(f"nvmlDeviceGet{_LISTS[kind]}RunningProcesses_v3")
    if answer.code == FUNCTION_NOT_FOUND:
        answer = reading.ask(f"nvmlDeviceGet{_LISTS[kind]}RunningProcesses_v2")
    if kind != "compute" and not answer.code and not answer.value:
        reading.place.settings[kind] = answer  # nobody: until somebody may have come, see _forget
    return answer


def _implausibility(reading: Reading, lists: Lists, used: int | None) -> str | None:
    if any(lists.values()) and reading.memory_doubt:
        return reading.memory_doubt
    total = reading.values.get("memory_total")
    reading.stats = {}
    for rows in filter(None, lists.values()):
        reason = implausibility(
            rows,
            alive=lambda pid: _is_alive(reading, pid),
            pid_max=procfs.pid_max(),
            memory_total=total,
            memory_used=used,
        )
        if reason:
            return reason
    if sum(map(bool, lists.values())) < 2:
        return None  # it has been judged as it is
    most: dict[int, int] = {}
    for pid, memory in (row for rows in lists.values() for row in rows):
        most[pid] = max(memory or 0, most.get(pid, 0))
    if total is not None and sum(most.values()) > total:
        return "the processes of all kinds have more memory than the device"
    return None


def _is_alive(reading: Reading, pid: int) -> bool:
    """As procfs.alive(); what is read of those that are goes into *reading*."""
    stat = procfs.stats_of((pid,))[pid]
    if stat is None:
        return procfs.alive(pid)
    reading.stats[pid] = stat
    return True


def _merged(lists: Lists, memory_total: int | None) -> list[GpuProcess]:
    """One process per pid: its kind from all lists, its memory from the list that says most."""
    kinds: dict[int, tuple[str, ...]] = {}
    memory: dict[int, int] = {}
    for kind, rows in lists.items():
        for pid, used in rows:
            kinds[pid] = (*kinds.get(pid, ()), kind)
            if used is not None and (memory_total is None or used <= memory_total):
                memory[pid] = max(used, memory.get(pid, 0))
    return [GpuProcess(pid, memory.get(pid), _KINDS.get(found, "mps")) for pid, found in kinds.items()]


def _with_utilization(reading: Reading, rows: list[GpuProcess]) -> list[GpuProcess]:
    """SM utilization of each process: mean of the driver's samples since the last time, else what was read just before.

    The driver tells each sample once, to whom names the newest that he has.  Whoever looks again before a signal would
    know nothing, so a mean is kept for KEPT_SECONDS, for that very process.
    """
    place, now = reading.place, time.monotonic()
    if not rows:
        place.utilizations = {}
        return rows
    answer = reading.ask_where_told("nvmlDeviceGetProcessUtilization", place.utilization_seen)
    if answer.code and answer.code != NOT_FOUND:  # NOT_FOUND: no sample since the last time
        reading.gap("processes (utilization)", answer.reason)
        return rows
    samples: dict[int, list[int]] = {}
    for sample in answer.value or ():
        place.utilization_seen = max(place.utilization_seen, sample.timeStamp)
        sound = samples.setdefault(sample.pid, [])
        if 0 <= sample.smUtil <= 100:
            sound.append(sample.smUtil)
    before, place.utilizations = place.utilizations, {}
    if not samples and not before:
        return rows
    found = []
    for row in rows:
        read_at, percent = before.get((row.pid, row.start_time), (float("-inf"), 0.0))
        if row.pid in samples:  # a new sample that cannot be true makes it unknown
            read_at, percent = now, sum(samples[row.pid]) / max(1, len(samples[row.pid]))
        if samples.get(row.pid) == [] or now - read_at > KEPT_SECONDS:
            found.append(row)
            continue
        if row.start_time is not None:
            place.utilizations[row.pid, row.start_time] = read_at, percent
        found.append(replace(row, utilization=percent))
    return found
