"""The driver library itself: each function that we ask, by its name in nvml.h, called as it is.

nvidia-ml-py makes a thousand functions and structures when it is imported: 82 of the 130 million instructions of the
process that reads the devices, before every job, and 5 MiB of it as long as it lives.  These are 50 functions of some
ten shapes.  Structures are those of nvml.h, which NVIDIA never changes under a name: a new one is a new function, _v2.

Does not know what a code or a value means: see nvml_calls.
"""

from __future__ import annotations

from ctypes import (
    CDLL,
    Structure,
    Union,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_longlong,
    c_uint,
    c_ulong,
    c_ulonglong,
    c_ushort,
    c_void_p,
    create_string_buffer,
)
from types import SimpleNamespace

TYPE_CHECKING = False  # see nvml_calls
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    # A function of the library and its arguments -> its code, and its value if that is 0.
    Reader = Callable[..., tuple[int, Any]]

INSUFFICIENT_SIZE = 7
_ROOM = 64  # processes on one device; a longer list is asked for once more
_NOT_AVAILABLE = 2**64 - 1  # the memory of a process that the driver does not know
_MEMORY_V2 = 0x02000028  # version 2 of nvmlMemory_t and its size, 40 bytes


class _Memory(Structure):
    _fields_ = [(name, c_ulonglong) for name in ("total", "free", "used")]


class _MemoryV2(Structure):
    _fields_ = [("version", c_uint), *((name, c_ulonglong) for name in ("total", "reserved", "free", "used"))]


class _Rates(Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class _ProcessV1(Structure):
    _fields_ = [("pid", c_uint), ("used", c_ulonglong)]


class _Process(Structure):
    _fields_ = [("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint)]


class _ProcessSample(Structure):
    _fields_ = [
        ("pid", c_uint),
        ("timeStamp", c_ulonglong),
        *((name, c_uint) for name in ("smUtil", "memUtil", "encUtil", "decUtil")),
    ]


class _Value(Union):
    _fields_ = [
        ("dVal", c_double),
        ("uiVal", c_uint),
        ("ulVal", c_ulong),
        ("ullVal", c_ulonglong),
        ("sllVal", c_longlong),
        ("siVal", c_int),
        ("usVal", c_ushort),
    ]


class _Sample(Structure):
    _fields_ = [("timeStamp", c_ulonglong), ("sampleValue", _Value)]


class _FieldValue(Structure):
    _fields_ = [
        ("fieldId", c_uint),
        ("scopeId", c_uint),
        ("timestamp", c_longlong),
        ("latency", c_longlong),
        ("valueType", c_int),
        ("nvmlReturn", c_int),
        ("value", _Value),
    ]


class _Attributes(Structure):
    _fields_ = [
        ("others", c_uint * 6),
        ("gpuInstanceSliceCount", c_uint),
        ("computeInstanceSliceCount", c_uint),
        ("memorySizeMB", c_ulonglong),
    ]


class _PciInfo(Structure):
    _fields_ = [
        ("legacy", c_char * 16),
        *((name, c_uint) for name in ("domain", "bus", "device", "device_id", "subsystem_id")),
        ("bus_id", c_char * 32),
    ]


class Library:
    """libnvidia-ml.so.1.  Raises OSError where it cannot be loaded."""

    def __init__(self) -> None:
        self._library = CDLL("libnvidia-ml.so.1")

    def call(self, function: str, *arguments: Any) -> tuple[int, Any]:
        """The code of a *function* of CALLS, and its value if that is 0.  Raises AttributeError: it is not there."""
        return CALLS[function](getattr(self._library, function), *arguments)

    def words(self, code: int) -> str:
        """What the driver calls a code."""
        function = self._library["nvmlErrorString"]
        function.restype = c_char_p
        return (function(code) or b"").decode(errors="replace")


def _nothing(function: Any, *arguments: int) -> tuple[int, Any]:
    return function(*arguments), None


def _numbers(kind: Any, count: int) -> Reader:
    """Functions that write *count* numbers, each through a pointer of its own."""

    def read(function: Any, *arguments: Any) -> tuple[int, Any]:
        cells = [kind() for _ in range(count)]
        code = function(*arguments, *map(byref, cells))
        return code, cells[0].value if count == 1 else [cell.value for cell in cells]

    return read


def _structure(kind: Any, **given: int) -> Reader:
    def read(function: Any, handle: Any) -> tuple[int, Any]:
        found = kind(**given)
        return function(handle, byref(found)), found

    return read


def _text(size: int) -> Reader:
    def read(function: Any, *arguments: Any) -> tuple[int, Any]:
        found = create_string_buffer(size)
        code = function(*arguments, found, c_uint(size))
        return code, None if code else found.value.decode()

    return read


def _handle(function: Any, *arguments: Any) -> tuple[int, Any]:
    found = c_void_p()
    return function(*arguments, byref(found)), found


def _pci(function: Any, *arguments: Any) -> tuple[int, Any]:
    found = _PciInfo()
    code = function(*arguments, byref(found))
    return code, None if code else SimpleNamespace(busId=found.bus_id.decode())


def _words_of_bits(function: Any, handle: Any, size: int, *scope: int) -> tuple[int, Any]:
    found = (c_ulong * size)()
    return function(handle, c_uint(size), found, *scope), found


def _processes(kind: Any) -> Reader:
    """A list of processes in one call, where nvidia-ml-py asks for its length first: 4.5 ms each (see benchmarks)."""

    def read(function: Any, handle: Any) -> tuple[int, Any]:
        count, room = c_uint(_ROOM), _ROOM
        rows = (kind * room)()
        code = function(handle, byref(count), rows)
        if code == INSUFFICIENT_SIZE:
            room = count.value = count.value * 2 + 5
            rows = (kind * room)()
            code = function(handle, byref(count), rows)
        if code:
            return code, None
        return code, [
            SimpleNamespace(pid=row.pid, usedGpuMemory=None if row.used == _NOT_AVAILABLE else row.used)
            for row in rows[: min(count.value, room)]
        ]

    return read


def _samples(function: Any, handle: Any, kind: int, since: int) -> tuple[int, Any]:
    value_type, count = c_int(), c_uint()
    code = function(handle, kind, c_ulonglong(since), byref(value_type), byref(count), None)
    if code:
        return code, None
    room = count.value
    rows = (_Sample * room)()
    code = function(handle, kind, c_ulonglong(since), byref(value_type), byref(count), rows)
    return code, (value_type.value, rows[: min(count.value, room)])


def _utilization_of_processes(function: Any, handle: Any, since: int) -> tuple[int, Any]:
    count = c_uint()
    code = function(handle, None, byref(count), c_ulonglong(since))
    if code != INSUFFICIENT_SIZE:
        return code, []
    room = count.value
    rows = (_ProcessSample * room)()
    code = function(handle, rows, byref(count), c_ulonglong(since))
    return code, rows[: min(count.value, room)]


def _retired_pages(function: Any, handle: Any, cause: int) -> tuple[int, Any]:
    count = c_uint()
    code = function(handle, cause, byref(count), None)
    if code not in (0, INSUFFICIENT_SIZE):
        return code, None
    room = count.value = count.value * 2 + 5
    pages = (c_ulonglong * room)()
    code = function(handle, cause, byref(count), pages)
    return code, pages[: min(count.value, room)]


def _field_values(function: Any, handle: Any, wanted: Sequence[tuple[int, int]]) -> tuple[int, Any]:
    found = (_FieldValue * len(wanted))()
    for value, (number, link) in zip(found, wanted, strict=True):
        value.fieldId, value.scopeId = number, link
    return function(handle, len(wanted), found), found


_LISTS = tuple(f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute"))

_SHAPES: dict[Reader, tuple[str, ...]] = {
    _nothing: ("nvmlInitWithFlags", "nvmlShutdown"),
    _numbers(c_int, 1): ("nvmlSystemGetCudaDriverVersion",),
    _text(80): ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion"),
    _text(96): ("nvmlDeviceGetUUID", "nvmlDeviceGetName"),
    _handle: ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMigDeviceHandleByIndex"),
    _pci: ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetNvLinkRemotePciInfo_v2"),
    _words_of_bits: ("nvmlDeviceGetCpuAffinity", "nvmlDeviceGetMemoryAffinity"),
    _structure(_Memory): ("nvmlDeviceGetMemoryInfo",),
    _structure(_MemoryV2, version=_MEMORY_V2): ("nvmlDeviceGetMemoryInfo_v2",),
    _structure(_Rates): ("nvmlDeviceGetUtilizationRates",),
    _structure(_Attributes): ("nvmlDeviceGetAttributes_v2",),
    _field_values: ("nvmlDeviceGetFieldValues",),
    _retired_pages: ("nvmlDeviceGetRetiredPages",),
    _samples: ("nvmlDeviceGetSamples",),
    _utilization_of_processes: ("nvmlDeviceGetProcessUtilization",),
    _processes(_Process): tuple(f"{name}_{version}" for name in _LISTS for version in ("v2", "v3")),
    _processes(_ProcessV1): _LISTS,
    _numbers(c_uint, 2): ("nvmlDeviceGetMigMode", "nvmlDeviceGetEccMode"),
    _numbers(c_uint, 4): ("nvmlDeviceGetRemappedRows",),
    _numbers(c_ulonglong, 1): (
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetTotalEccErrors",
    ),
    _numbers(c_uint, 1): (
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureThreshold",
        "nvmlDeviceGetFanSpeed",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetMaxClockInfo",
        "nvmlDeviceGetPerformanceState",
        "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetPcieThroughput",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetComputeInstanceId",
    ),
}
CALLS = {name: read for read, names in _SHAPES.items() for name in names}
