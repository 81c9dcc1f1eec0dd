"""Calls of NVIDIA's driver library: one call -> a value, or a code and a reason in words; and all calls for one device.

This module alone knows NVMLError.  A value that the driver cannot give, or that cannot be true (fan 255 %,
4294967295 C), stays unknown and leaves a gap.  This module does not know what the calls mean: see nvml_fields.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from gpuguard.backends import GPU_LOST, IS_LOST
from gpuguard.errors import BackendError, DriverMismatch, DriverNotFound, DriverPermission
from gpuguard.locale.messages import sentence
from gpuguard.model import BRIEF, DEVICE_FIELDS, Gap
from gpuguard.vendors import NVIDIA

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gpuguard.model import GpuProcess
    from gpuguard.procfs import Stat

# Return codes of nvml.h.
INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 2, 3, 4, 6
INSUFFICIENT_SIZE, DRIVER_NOT_LOADED, TIMEOUT = 7, 9, 10
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, LOST, RESET_REQUIRED, VERSION_MISMATCH, IN_USE = 12, 13, 15, 16, 18, 19
NO_DATA, DEPRECATED, NOT_READY, UNKNOWN = 21, 26, 27, 999
BAD_TEXT = -1  # not in nvml.h: a string that is not UTF-8

REASONS = {
    NOT_SUPPORTED: sentence("nvml.not_supported", "not supported"),
    NO_PERMISSION: sentence("nvml.no_permission", "no permission"),
    NOT_FOUND: sentence("nvml.nothing_found", "nothing found"),
    FUNCTION_NOT_FOUND: sentence("nvml.not_in_driver", "this driver does not have it"),
    LOST: GPU_LOST,
    RESET_REQUIRED: sentence("driver.gpu_needs_reset", "the GPU needs a reset"),
    NO_DATA: sentence("nvml.no_value", "no value"),
    DEPRECATED: sentence("nvml.deprecated", "deprecated in this driver"),
    TIMEOUT: sentence("nvml.timed_out", "the driver timed out"),
    UNKNOWN: sentence("nvml.unknown_error", "unknown driver error"),
    BAD_TEXT: sentence("nvml.not_utf8", "the text is not UTF-8"),
}

PROBLEMS = {
    LOST: IS_LOST,
    RESET_REQUIRED: sentence("problem.reset_required", "reset required"),
}

# The value does not exist here: that says nothing bad about the device.
ABSENT = frozenset({NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, NO_DATA, DEPRECATED})
# ... and will not exist later, as long as this process lives.
NEVER = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, DEPRECATED})

# Calls in all before the code is believed.  INSUFFICIENT_SIZE: a list grew faster than the buffer for it.
_TRIES = {INSUFFICIENT_SIZE: 4, TIMEOUT: 2, IN_USE: 2, NOT_READY: 2, UNKNOWN: 2}

# Driver 535.261 does not load without glibc: "dlvsym: symbol not found", and its programs ask for glibc's loader.
NEEDS_GLIBC = sentence(
    "nvml.needs_glibc",
    "NVIDIA's driver library needs glibc, and this Python stands on another C library (musl, as in Alpine).\n"
    "Use a Python, in a container an image, of a distribution with glibc: Debian, Ubuntu, Rocky.  "
    "`--backend simulated` tries gpuguard without a GPU.",
)
_NOT_IN_BINDING = sentence("nvml.not_in_binding", "this nvidia-ml-py does not have it")


@dataclass(slots=True)
class CallResult:
    """The result of a call: a value, or a code and the reason."""

    value: Any = None
    code: int = 0
    reason: str = ""


def call(nvml: Any, function: str, *arguments: Any, tries: Mapping[int, int] = _TRIES) -> CallResult:
    """Call a function of the driver; it may be missing in nvidia-ml-py as well as in the driver itself."""
    made = 0
    while True:
        made += 1
        try:
            asked = (
                OWN_FUNCTIONS[function](nvml, function) if function in OWN_FUNCTIONS else getattr(nvml, function, None)
            )
            if asked is None:
                return CallResult(None, FUNCTION_NOT_FOUND, _NOT_IN_BINDING)
            return CallResult(asked(*arguments))
        except nvml.NVMLError as error:
            code, reason = error.value, REASONS.get(error.value) or _other(error)
        except UnicodeDecodeError:
            code, reason = BAD_TEXT, REASONS[BAD_TEXT]
        if made >= tries.get(code, 1):
            return CallResult(None, code, reason)


def _other(error: Any) -> str:
    return sentence("nvml.other_code", "{words} (code {code})", words=str(error), code=error.value)


_ROOM = 64  # processes on one device; as a rule there are fewer
PROCESS_LISTS = frozenset(
    f"nvmlDeviceGet{kind}RunningProcesses_v{version}"
    for kind in ("Compute", "Graphics", "MPSCompute")
    for version in (2, 3)
)


@cache
def process_list(nvml: Any, function: str) -> Callable[[Any], list[tuple[int, int | None]]]:
    """Return a function that gets the pid and the bytes of each process of a device in one call of the driver.

    The binding's own function asks for the length of the list first, which takes a real driver as long as the list.
    Bindings before 12.575 have none for version 2, whose rows are those of version 3.
    """
    library = ctypes.CDLL("libnvidia-ml.so.1")  # the one that the binding has loaded
    entry = getattr(library, function, None)
    unknown = nvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value

    def list_of(handle: Any) -> list[tuple[int, int | None]]:
        if entry is None:
            raise nvml.NVMLError(FUNCTION_NOT_FOUND)
        room = _ROOM
        while True:
            rows, count = (nvml.c_nvmlProcessInfo_t * room)(), ctypes.c_uint(room)
            code = entry(handle, ctypes.byref(count), rows)
            if code != INSUFFICIENT_SIZE or room > _ROOM:
                break
            room = max(_ROOM, count.value) * 2  # more may begin meanwhile
        if code:
            raise nvml.NVMLError(code)
        listed = rows[: min(count.value, room)]
        return [(row.pid, None if row.usedGpuMemory == unknown else row.usedGpuMemory) for row in listed]

    return list_of


FABRIC = "nvmlDeviceGetGpuFabricInfoV"


def fabric_health(nvml: Any, function: str) -> Callable[[Any], int] | None:
    """Return a function that gets the health mask of a device in an NVLink fabric, or None if nvidia-ml-py has none."""
    kind, asked = getattr(nvml, "c_nvmlGpuFabricInfo_v2_t", None), getattr(nvml, function, None)
    if kind is None or asked is None:
        return None

    def health_of(handle: Any) -> int:
        info = kind()
        asked(handle, ctypes.byref(info))
        return int(info.healthMask)

    return health_of


# Used in place of the binding's functions: (nvml, function) -> a function of the handle, or None.
OWN_FUNCTIONS: Mapping[str, Callable[[Any, str], Callable[[Any], Any] | None]] = {
    **dict.fromkeys(PROCESS_LISTS, process_list),
    FABRIC: fabric_health,
}


def start() -> Any:
    """Load and initialise the driver library, and return the binding.  Raises BackendError: the cause, what to do."""
    try:
        import pynvml as nvml  # it may be missing, and only the process that reads the devices needs it
    except ImportError:
        text = sentence("nvml.no_binding", "the Python package nvidia-ml-py is missing: `pip install nvidia-ml-py`.")
        raise DriverNotFound(text) from None
    answer = call(nvml, "nvmlInit", tries={})
    if answer.code:
        raise _init_error(nvml, answer)
    return nvml


def has_glibc() -> bool:
    """Return whether NVIDIA's library can be loaded at all, asking the C library itself, and not at import."""
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):
        return False


def _init_error(nvml: Any, answer: CallResult) -> BackendError:
    if answer.code == LIBRARY_NOT_FOUND and not has_glibc():
        return DriverNotFound(NEEDS_GLIBC)
    if answer.code == LIBRARY_NOT_FOUND:
        text = sentence(
            "nvml.no_library",
            "libnvidia-ml.so.1 was not found: there is no NVIDIA driver here, or this container was started without "
            "it.\nInstall the driver, or start the container with `--gpus all`.  "
            "`--backend simulated` tries gpuguard without a GPU.",
        )
        return DriverNotFound(text)
    # This call answers without an initialisation: "13.580.65.06" is CUDA 13, driver 580.65.06.
    library = str(call(nvml, "nvmlSystemGetNVMLVersion").value or "").partition(".")[2] or None
    kernel = NVIDIA.kernel_version()
    if answer.code == DRIVER_NOT_LOADED:
        text = sentence(
            "nvml.no_kernel_module",
            "libnvidia-ml.so.1 ({library}) is there, but no NVIDIA kernel module answers.\n"
            "Load it with `sudo modprobe nvidia` (after a kernel update: reboot), or see `dmesg`.  "
            "`--backend simulated` tries gpuguard without a GPU.",
            library=library or sentence("nvml.unknown_version", "of unknown version"),
        )
        return DriverNotFound(text)
    if answer.code == VERSION_MISMATCH:
        text = sentence(
            "nvml.mismatch",
            "the driver library is of version {library}, the loaded kernel module of version {kernel}: the driver was "
            "updated while the old module was in use.\n"
            "Reboot; or end all GPU processes and who watches them (`systemctl stop gpuguard`) and reload the module: "
            "`sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia`.",
            library=library or sentence("nvml.unknown", "unknown"),
            kernel=kernel or sentence("nvml.unknown", "unknown"),
        )
        return DriverMismatch(text, library, kernel)
    if answer.code == NO_PERMISSION:
        text = sentence(
            "nvml.refused",
            "the driver refuses this user.  "
            "Look at `ls -l /dev/nvidiactl /dev/nvidia0` and ask for the group that may open them.",
        )
        return DriverPermission(text)
    text = sentence(
        "nvml.not_initialised",
        "the driver cannot be initialised: {reason}.  Try `nvidia-smi`, and see `dmesg`.",
        reason=answer.reason,
    )
    return BackendError(text)


# How long an answer is kept: a fact for ever, a setting for nvml.SETTINGS_SECONDS and, where BRIEF is wanted, a recent
# one for nvml.RECENT_SECONDS.  Of other calls only a refusal is kept, as a setting, because the device does not have
# the value.
Keep = Literal["fact", "setting", "recent", "refusal"]
Answers = dict[tuple[Any, ...], CallResult]  # by function and arguments
Rates = dict[str, Any]  # of a process: field of the model -> percent or None


class KnownDevice:
    """A device as the driver library knows it, and what is kept of it between two samples."""

    def __init__(self, index: int, handle: Any, uuid: str) -> None:
        self.index = index
        self.handle = handle
        self.uuid = uuid
        self.facts: Answers = {}
        self.settings: Answers = {}
        self.recent: Answers = {}
        self.ahead: Answers = {}  # of other threads: see nvml.Ahead
        self.used: int | None = None  # bytes in use when its processes were last listed
        self.instances: frozenset[str] = frozenset()  # uuids of its MIG instances, as last seen
        self.told: Any = None  # its lists of processes as they were the last time, ...
        self.listed: list[GpuProcess] = []  # ... and the processes in them
        self.ended: set[int] = set()  # pids that are still listed although no process had them at some sample
        self.utilization_seen = 0  # time stamp of the newest process utilization sample
        # The traffic over NVLink: (when it was read, KiB since ever by link and field).
        self.flow: tuple[float, dict[tuple[int, str], int]] | None = None
        self.utilizations: dict[tuple[int, float | None], tuple[float, Rates]] = {}  # of processes: when read, and what


class DeviceLost(Exception):
    """The device is lost, and any further call on it would fail as well."""


class Reading:
    """The values, gaps and problems known so far of one device in one sample."""

    def __init__(self, nvml: Any, device: KnownDevice, fields: Collection[str]) -> None:
        self.nvml = nvml
        self.device = device
        self.fields = fields
        self.values: dict[str, Any] = {}
        self.gaps: list[Gap] = []
        self.problems: list[str] = []
        self.stats: dict[int, Stat] = {}  # of the processes that it lists
        self.gone: set[int] = set()  # pids that it lists but no process has
        self.memory_doubt: str | None = None  # why the memory of its processes cannot be checked

    def call(self, function: str, *arguments: Any) -> CallResult:
        """Call *function* for this device.  Raises DeviceLost."""
        ahead = self.device.ahead
        prefetched = ahead.pop((function, *arguments), None) if ahead else None
        answer = prefetched or call(self.nvml, function, self.device.handle, *arguments)
        if answer.code:
            if answer.code == LOST:
                raise DeviceLost
            if answer.code == RESET_REQUIRED:
                self.problem(PROBLEMS[RESET_REQUIRED])
        return answer

    def call_kept(self, keep: Keep, function: str, *arguments: Any) -> CallResult:
        """Call *function* as call() does, unless its answer is kept: see Keep."""
        device, key = self.device, (function, *arguments)
        kept = {
            "fact": device.facts,
            "setting": device.settings,
            "recent": device.recent if BRIEF in self.fields else {},
        }
        values, refusals = kept.get(keep, {}), device.facts if keep in ("fact", "setting") else device.settings
        answer = values.get(key) or refusals.get(key) or self.call(function, *arguments)
        if answer.code == 0:
            values[key] = answer
        elif answer.code in NEVER:
            refusals[key] = answer
        return answer

    def set_field(self, name: str, answer: CallResult, convert: Callable[[Any], Any] | None = None) -> None:
        """Set a field of the device, or leave a gap."""
        if answer.code:
            self.gap(name, answer.reason)
            return
        value = convert(answer.value) if convert else answer.value
        facts = DEVICE_FIELDS.get(name)
        if value is None or (facts and not facts.holds(value)):
            value = f"{answer.value!r:.40}"
            self.gap(name, sentence("nvml.implausible_value", "implausible value {value}", value=value))
        else:
            self.values[name] = value

    def gap(self, name: str, reason: str) -> None:
        """Say why a field is unknown."""
        self.gaps.append(Gap(self.device.uuid, name, reason))

    def problem(self, text: str) -> None:
        """Say what is wrong with the device."""
        if text not in self.problems:
            self.problems.append(text)

    def fault(self, function: str, answer: CallResult) -> None:
        """Note a problem if a call that always works on healthy devices gave a code that those do not give."""
        if is_fault(answer):
            text = sentence("problem.call_failed", "{function}: {reason}", function=function, reason=answer.reason)
            self.problem(text)


def is_fault(answer: CallResult) -> bool:
    """Return whether a call that always works on healthy devices gave a code that those do not give."""
    return bool(answer.code) and answer.code not in ABSENT and answer.code != RESET_REQUIRED
