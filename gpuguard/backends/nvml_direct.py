"""The driver calls of every look, past the functions of nvidia-ml-py: by its library, its structures and its errors.

Its functions do a lot around each call, and there is one for each, so that a daemon that looks once a second finds
none of them in the processor's caches.  What they answer is the same: tests/test_nvml_direct.py compares them.
Does not know what the calls mean, nor what their codes: see nvml_calls.
"""

from __future__ import annotations

TYPE_CHECKING = False  # see nvml_calls
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

INVALID_ARGUMENT, INSUFFICIENT_SIZE = 2, 7
_ROOM = 64  # processes on one device, as a rule


def _number(nvml: Any, function: str) -> Callable[..., int]:
    """A function whose last argument points to where it leaves a number."""
    entry, kind, byref, failed = nvml._nvmlGetFunctionPointer(function), nvml.c_uint, nvml.byref, nvml.NVMLError
    if function in _LONG:
        kind = nvml.c_ulonglong

    def ask(*arguments: Any) -> int:
        number = kind()
        if code := entry(*arguments, byref(number)):
            raise failed(code)
        return number.value  # type: ignore[no-any-return]

    return ask


def _processes(nvml: Any, function: str) -> Callable[[Any], list[tuple[int, int | None]]]:
    """The pid and the bytes of each process of a list, in one call.

    The binding asks for its length first, and a real driver takes 4.5 ms each time (see benchmarks/measuring.py).
    Bindings before 12.575 have no function for the second version, whose rows are those of the third.
    """
    entry, byref, failed = nvml._nvmlGetFunctionPointer(function), nvml.byref, nvml.NVMLError
    unknown = nvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
    usual = type((nvml.c_nvmlProcessInfo_t * _ROOM)())  # made once: a look asks 24 times

    def ask(handle: Any) -> list[tuple[int, int | None]]:
        rows, room = usual(), _ROOM
        count = nvml.c_uint(room)
        code = entry(handle, byref(count), rows)
        if code == INSUFFICIENT_SIZE:
            room = max(_ROOM, count.value) * 2  # more may begin meanwhile
            rows, count = (nvml.c_nvmlProcessInfo_t * room)(), nvml.c_uint(room)
            code = entry(handle, byref(count), rows)
        if code:
            raise failed(code)
        listed = min(count.value, room)
        pids, sizes = _column(rows, "pid", "I", listed), _column(rows, "usedGpuMemory", "Q", listed)
        return [(pid, None if used == unknown else used) for pid, used in zip(pids, sizes, strict=True)]

    return ask


def _samples(nvml: Any, function: str) -> Callable[..., list[float]]:
    """The numbers in a buffer of samples; [] of a type that is newer than this.

    The binding asks for its length each time; here that is done once, and again when there may be more than fit.
    """
    entry, byref, failed = nvml._nvmlGetFunctionPointer(function), nvml.byref, nvml.NVMLError
    room = 0

    def ask(handle: Any, sampled: int, since: int) -> list[float]:
        nonlocal room
        kind, count, rows = nvml.c_uint(), nvml.c_uint(room), (nvml.c_nvmlSample_t * room)()
        arguments = handle, sampled, nvml.c_ulonglong(since), byref(kind), byref(count)
        code = entry(*arguments, rows) if room else INSUFFICIENT_SIZE
        if code in (INVALID_ARGUMENT, INSUFFICIENT_SIZE) or count.value >= room:
            if code := entry(*arguments, None):
                raise failed(code)
            room, rows = 2 * count.value, (nvml.c_nvmlSample_t * count.value)()
            code = entry(*arguments, rows)
        if code:
            raise failed(code)
        return _column(rows, "sampleValue", _KINDS[kind.value], count.value) if kind.value < len(_KINDS) else []

    return ask


def _column(rows: Any, field: str, kind: Any, count: int) -> list[Any]:
    """One field of the first *count* structures of an array; the binding would look for text in each."""
    if not count:
        return []
    place, numbers = getattr(type(rows[0]), field), memoryview(rows).cast("B").cast(kind)
    step = len(numbers) // len(rows)
    return list(numbers[place.offset // numbers.itemsize : count * step : step])


_KINDS = "dILQqiH"  # of numbers, by nvmlValueType_t
_UNSIGNED = (
    "nvmlDeviceGetMinorNumber", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetFanSpeed", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetPerformanceState", "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetComputeMode", "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetPcieThroughput", "nvmlDeviceGetRetiredPagesPendingStatus",
)  # fmt: skip
_LONG = (
    "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)  # fmt: skip
_LISTS = [f"nvmlDeviceGet{kind}RunningProcesses_v{n}" for kind in ("Compute", "Graphics", "MPSCompute") for n in (2, 3)]

# By their names what makes them, once for each process that asks.
DIRECT: dict[str, Callable[[Any, str], Callable[..., Any]]] = {
    **dict.fromkeys((*_UNSIGNED, *_LONG), _number),
    **dict.fromkeys(_LISTS, _processes),
    "nvmlDeviceGetSamples": _samples,
}
