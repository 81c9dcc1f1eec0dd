"""Moore Threads GPUs, through mthreads-ml-py, the binding of the vendor's library libmtml.

The binding also has the names of NVIDIA's, which are not used: many of them return 0 or an empty list for what the
library does not know or refuses.  The library lists no processes, so a GPU is judged by its memory in use alone.
Untried on hardware.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuguard import model
from gpuguard.backends import COUNTED_AS_USED, ECC_IS_OFF, PAGES_PENDING, SILENT, UNRESPONSIVE
from gpuguard.backends.drm import CardReading, NotTold, snapshot_of
from gpuguard.backends.nvml_calls import (
    FUNCTION_NOT_FOUND,
    LOST,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    PROBLEMS,
    REASONS,
    TIMEOUT,
    UNKNOWN,
)
from gpuguard.backends.plausibility import is_uuid
from gpuguard.errors import BackendError, DriverNotFound, InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.model import Device, DeviceAndGaps, Gap, Snapshot
from gpuguard.procfs import boot_clock
from gpuguard.vendors import MTHREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_GPU_IS_LOST = 669  # MTML_ERROR_GPU_IS_LOST
# Return codes of mtml.h, and what they are called for NVIDIA's library.
_CODES = {4: NOT_SUPPORTED, 5: NO_PERMISSION, 7: NOT_FOUND, 11: TIMEOUT, 667: FUNCTION_NOT_FOUND, _GPU_IS_LOST: LOST}
MOST_DEVICES = 1024  # of a machine: more is a count without a meaning

_NO_LIST = sentence("mthreads.no_list", "this driver lists no processes")


class _Row(NamedTuple):
    """A field that one function of the library tells: of the device, or of a part of it that is opened for the call."""

    field: str
    part: str  # "", "Gpu", "Memory" or "Vpu"
    function: str
    arguments: tuple[int, ...] = ()
    convert: Callable[[Any], Any] = lambda value: value


def _minor(path: str) -> int | None:
    """Return the number at the end of "/dev/mtgpu.0"."""
    found = re.search(r"\d+$", path)
    return int(found[0]) if found else None


def _pages(count: Any) -> int:
    return int(count.sbeCount + count.dbeCount)


_DRAM = 1  # MTML_MEMORY_LOCATION_DRAM
_ROWS = (
    _Row("name", "", "mtmlDeviceGetName", (), lambda name: f"{MTHREADS.title} {name}"),
    _Row("pci_bus_id", "", "mtmlDeviceGetPciInfo", (), lambda info: info.sbdf),
    _Row("minor_number", "", "mtmlDeviceGetGpuPath", (), _minor),
    _Row("memory_total", "Memory", "mtmlMemoryGetTotal"),
    _Row("memory_used", "Memory", "mtmlMemoryGetUsed"),
    _Row("utilization", "Gpu", "mtmlGpuGetUtilization"),
    _Row("memory_utilization", "Memory", "mtmlMemoryGetUtilization"),
    _Row("mig_mode", "", "mtmlDeviceGetMpcMode", (), bool),  # divided into multi primary cores, which are not read
    _Row("temperature", "Gpu", "mtmlGpuGetTemperature"),
    _Row("fan_speed", "", "mtmlDeviceGetFanSpeed", (0,)),
    _Row("power_draw", "", "mtmlDeviceGetPowerUsage", (), lambda milliwatts: milliwatts / 1000),
    _Row("clock_sm", "Gpu", "mtmlGpuGetClock"),
    _Row("clock_sm_max", "Gpu", "mtmlGpuGetMaxClock"),
    _Row("clock_memory", "Memory", "mtmlMemoryGetClock"),
    _Row("clock_memory_max", "Memory", "mtmlMemoryGetMaxClock"),
    _Row("ecc_mode", "Memory", "mtmlMemoryGetEccMode", (), lambda modes: modes[0] == 1),
    _Row("ecc_corrected_volatile", "Memory", "mtmlMemoryGetEccErrorCounter", (0, 0, _DRAM)),
    _Row("ecc_uncorrected_volatile", "Memory", "mtmlMemoryGetEccErrorCounter", (1, 0, _DRAM)),
    _Row("ecc_corrected_aggregate", "Memory", "mtmlMemoryGetEccErrorCounter", (0, 1, _DRAM)),
    _Row("ecc_uncorrected_aggregate", "Memory", "mtmlMemoryGetEccErrorCounter", (1, 1, _DRAM)),
    _Row("retired_pages", "Memory", "mtmlMemoryGetRetiredPagesCount", (), _pages),
    _Row("clock_graphics", "Gpu", "mtmlGpuGetClock"),
    _Row("clock_video", "Vpu", "mtmlVpuGetClock"),
    _Row("encoder_utilization", "Vpu", "mtmlVpuGetUtilization", (), lambda rates: rates.encUtil),
    _Row("decoder_utilization", "Vpu", "mtmlVpuGetUtilization", (), lambda rates: rates.decUtil),
    _Row("pcie_generation", "", "mtmlDeviceGetPciInfo", (), lambda info: info.pciCurGen),
    _Row("pcie_width", "", "mtmlDeviceGetPciInfo", (), lambda info: info.pciCurWidth),
)  # fmt: skip


def open(spec: str = "") -> MThreads:
    """Open the GPUs of this machine.  Raises BackendError if the driver cannot be reached."""
    if spec:
        raise InvalidRequest(
            sentence(
                "mthreads.takes_none",
                "the backend mthreads takes no {spec}: write `--backend mthreads`.",
                spec=repr(spec),
            )
        )
    return MThreads()


class MThreads:
    """A Backend."""

    name = "mthreads"
    simulated = False

    def __init__(self) -> None:
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self.ahead = False
        self._open = False
        self._start()

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does."""
        self._start()
        taken_at, clock = time.time(), boot_clock()
        # A device that was never read may be any.
        uuids = [self._uuids.get(index) for index in range(self._count)]
        wanted = [index for index, uuid in enumerate(uuids) if devices is None or uuid in (None, *devices)]
        read = [self._read(index, fields) for index in wanted]
        found = [(device, missing) for device, missing in read if devices is None or device.uuid in devices]
        gaps = [Gap(None, "topology", REASONS[NOT_SUPPORTED])] if model.TOPOLOGY in fields else []
        return snapshot_of(self, (taken_at, clock), found, gaps, driver_version=MTHREADS.kernel_version())

    def close(self) -> None:
        """Let go of the driver."""
        if self._open:
            with suppress(self._mtml.MTMLError):
                self._mtml.mtmlLibraryShutDown()
        self._open = False

    def _start(self) -> None:
        if not self._open:
            self._mtml, self._count = _library()
            self._open = True
            self._handles: dict[int, Any] = {}
            self._uuids: dict[int, str] = {}

    def _read(self, index: int, fields: Collection[str]) -> DeviceAndGaps:
        uuid = self._uuids.get(index, f"unknown-{index}")
        if index in self.skip:
            return _broken(index, uuid, UNRESPONSIVE), [Gap(uuid, "device", SILENT)]
        self.progress(index)
        try:
            uuid = self._opened(index)
            reading = CardReading(uuid, fields)
            for row in _ROWS:
                if model.DEVICE_FIELDS[row.field].group in fields:
                    reading.set(row.field, lambda row=row: self._told(index, row))  # type: ignore[misc]
            _conclude(reading)
            if model.HEALTH in fields:
                reading.values["problems"] = self._problems(index)
        except self._mtml.MTMLError as error:
            reason = REASONS[_CODES.get(error.value, UNKNOWN)]
            closed = sentence("problem.cannot_be_opened", "cannot be opened: {reason}", reason=reason)
            problem = PROBLEMS[LOST] if error.value == _GPU_IS_LOST else closed
            return _broken(index, uuid, problem), [Gap(uuid, "device", reason)]
        return Device(index, uuid, vendor=MTHREADS.name, **reading.values), reading.gaps

    def _opened(self, index: int) -> str:
        """Open a device, and return its uuid.  Raises MTMLError."""
        if index not in self._handles:
            handle = self._mtml.mtmlLibraryInitDeviceByIndex(index)
            told = self._mtml.mtmlDeviceGetUUID(handle)
            # Locks and selectors know a device by its prefix, which this library may leave out.
            uuid = told if told.startswith(MTHREADS.uuid_prefix) else f"{MTHREADS.uuid_prefix}{told}"
            if not is_uuid(told) or uuid in self._uuids.values():
                raise self._mtml.MTMLError(7)  # by this uuid a claim would name no device, or two
            self._handles[index], self._uuids[index] = handle, uuid
        return self._uuids[index]

    def _told(self, index: int, row: _Row) -> object:
        """Return what the library tells.  Raises NotTold, and MTMLError if the device is lost."""
        call, handle = getattr(self._mtml, row.function, None), self._handles[index]
        if call is None:
            raise NotTold(REASONS[FUNCTION_NOT_FOUND])
        try:
            if not row.part:
                return row.convert(call(handle, *row.arguments))
            with getattr(self._mtml, f"mtml{row.part}Context")(handle) as part:
                return row.convert(call(part, *row.arguments))
        except self._mtml.MTMLError as error:
            if error.value == _GPU_IS_LOST:
                raise
            raise NotTold(REASONS[_CODES.get(error.value, UNKNOWN)]) from None
        except UnicodeDecodeError:
            raise NotTold(sentence("nvml.not_utf8", "the text is not UTF-8")) from None

    def _problems(self, index: int) -> tuple[str, ...]:
        row = _Row("problems", "Memory", "mtmlMemoryGetRetiredPagesPendingStatus")
        with suppress(NotTold):
            return (PAGES_PENDING,) if self._told(index, row) == 1 else ()
        return ()


def _conclude(reading: CardReading) -> None:
    """Set what follows from other fields, and leave a gap for each field of which the library knows nothing."""
    if model.MEMORY in reading.fields:
        total, used = (reading.values.get(f"memory_{name}") for name in ("total", "used"))
        if isinstance(total, int) and isinstance(used, int) and used <= total:
            reading.values["memory_free"] = total - used
        else:
            reading.gap("memory_free", next((gap.reason for gap in reading.gaps), REASONS[UNKNOWN]))
        reading.gap("memory_reserved", COUNTED_AS_USED)
        reading.values["memory_shared_with_host"] = False
    if model.HEALTH in reading.fields:
        reading.values.setdefault("mig_mode", False)  # a driver without this mode has not divided the device
        reading.values["asleep"] = False
    if model.MODEL in reading.fields:
        reading.values["integrated"] = False
    if model.ECC in reading.fields and not reading.values.get("ecc_mode"):
        for name in [name for name in reading.values if name.startswith("ecc_") and name != "ecc_mode"]:
            del reading.values[name]
            reading.gap(name, ECC_IS_OFF)
    if {model.PROCESSES, model.IDLE_PROCESSES} & set(reading.fields):
        reading.gap("processes", _NO_LIST)
    reading.close()


def _broken(index: int, uuid: str, problem: str) -> Device:
    return Device(index, uuid, vendor=MTHREADS.name, problems=(problem,))


def _library() -> tuple[Any, int]:
    """Load and initialise the library, and return its binding and the number of devices.  Raises BackendError."""
    try:
        import pymtml  # it is an extra, and only the process that reads the devices needs it
    except ImportError:
        text = sentence(
            "mthreads.no_binding", "the Python package mthreads-ml-py is missing: `pip install 'gpuguard[mthreads]'`."
        )
        raise DriverNotFound(text) from None
    try:
        pymtml.mtmlLibraryInit()
        count = pymtml.mtmlLibraryCountDevice()
    except OSError:
        text = sentence(
            "mthreads.no_library",
            "libmtml.so was not found: there is no driver of Moore Threads here, or this container was started without "
            "it.\n`--backend simulated` tries gpuguard without a GPU.",
        )
        raise DriverNotFound(text) from None
    except pymtml.MTMLError as error:
        text = sentence(
            "mthreads.not_initialised",
            "the driver of Moore Threads cannot be initialised: {reason}.  Try `mthreads-gmi`, and see `dmesg`.",
            reason=f"{error} (code {error.value})",
        )
        raise BackendError(text) from None
    if not 0 <= count <= MOST_DEVICES:
        raise BackendError(
            sentence(
                "mthreads.odd_count",
                "the driver counts {count} GPUs, which cannot be.  Try `mthreads-gmi`.",
                count=count,
            )
        )
    return pymtml, count
