"""A stand-in for the module pymtml of mthreads-ml-py, in this process: devices, and calls that fail.

fake = FakeMtml(devices=2)
monkeypatch.setitem(sys.modules, "pymtml", fake)
fake.fail("mtmlGpuGetTemperature", 4, device=1)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 2**30
LOST = 669


class MTMLError(Exception):
    """As the binding raises it."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class FakeGpu:
    """What the library tells of a device."""

    index: int
    uuid: str
    used: int = GIB
    ecc: int = 1
    divided: int = 0
    pending: int = 0


class FakeMtml:
    """The module: each function of the library is an attribute."""

    MTMLError = MTMLError

    def __init__(self, devices: int = 2, lost: Path | None = None) -> None:
        self.devices = [FakeGpu(index, f"8f3c0a7e-0000-4000-8000-00000000000{index}") for index in range(devices)]
        self.count: int | None = None
        self.lost = lost  # a folder: a device is lost once there is a file with its index as the name
        self.missing: set[str] = set()  # functions that an older binding does not have
        self.initialised = 0
        self._failing: dict[tuple[str, int | None], Exception] = {}
        self._answers: dict[str, Callable[..., Any]] = {
            "mtmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "mtmlDeviceGetName": lambda gpu: "MTT S4000",
            "mtmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(
                sbdf=f"0000:0{gpu.index}:00.0", pciCurGen=4, pciCurWidth=16
            ),
            "mtmlDeviceGetGpuPath": lambda gpu: f"/dev/mtgpu.{gpu.index}",
            "mtmlDeviceGetMpcMode": lambda gpu: gpu.divided,
            "mtmlDeviceGetFanSpeed": lambda gpu, fan: 30 + fan,
            "mtmlDeviceGetPowerUsage": lambda gpu: 81_500,
            "mtmlMemoryGetTotal": lambda gpu: 48 * GIB,
            "mtmlMemoryGetUsed": lambda gpu: gpu.used,
            "mtmlMemoryGetUtilization": lambda gpu: 12,
            "mtmlMemoryGetClock": lambda gpu: 8000,
            "mtmlMemoryGetMaxClock": lambda gpu: 9000,
            "mtmlMemoryGetEccMode": lambda gpu: (gpu.ecc, gpu.ecc),
            "mtmlMemoryGetEccErrorCounter": lambda gpu, kind, counter, place: 10 * kind + counter + place,
            "mtmlMemoryGetRetiredPagesCount": lambda gpu: SimpleNamespace(sbeCount=2, dbeCount=1),
            "mtmlMemoryGetRetiredPagesPendingStatus": lambda gpu: gpu.pending,
            "mtmlGpuGetUtilization": lambda gpu: 77,
            "mtmlGpuGetTemperature": lambda gpu: 50 + gpu.index,
            "mtmlGpuGetClock": lambda gpu: 1700,
            "mtmlGpuGetMaxClock": lambda gpu: 1750,
            "mtmlVpuGetClock": lambda gpu: 1200,
            "mtmlVpuGetUtilization": lambda gpu: SimpleNamespace(encUtil=3, decUtil=4),
        }

    def fail(self, function: str, error: int | Exception, device: int | None = None) -> None:
        """Let a function fail from now on, for one device or for all."""
        assert hasattr(self, function), function
        self._failing[function, device] = error if isinstance(error, Exception) else MTMLError(error)

    def __getattr__(self, name: str) -> Any:
        if name in ("mtmlGpuContext", "mtmlMemoryContext", "mtmlVpuContext"):
            return self._part
        if name.startswith("_") or name in self.missing or name not in self._answers:
            raise AttributeError(name)

        def answer(gpu: FakeGpu, *arguments: int) -> Any:
            self._check(name, gpu.index)
            return self._answers[name](gpu, *arguments)

        return answer

    def mtmlLibraryInit(self) -> None:
        """As the library has it."""
        self._check("mtmlLibraryInit")
        self.initialised += 1

    def mtmlLibraryShutDown(self) -> None:
        """As the library has it."""
        self._check("mtmlLibraryShutDown")
        self.initialised -= 1

    def mtmlLibraryCountDevice(self) -> int:
        """As the library has it."""
        return len(self.devices) if self.count is None else self.count

    def mtmlLibraryInitDeviceByIndex(self, index: int) -> FakeGpu:
        """As the library has it."""
        self._check("mtmlLibraryInitDeviceByIndex", index)
        return self.devices[index]

    @contextmanager
    def _part(self, device: FakeGpu) -> Iterator[FakeGpu]:
        """The context of a part of a device."""
        self._check("mtmlGpuContext", device.index)
        yield device

    def _check(self, function: str, device: int | None = None) -> None:
        error = self._failing.get((function, device)) or self._failing.get((function, None))
        if error:
            raise error
        if self.lost and (self.lost / str(device)).exists():
            raise MTMLError(LOST)
