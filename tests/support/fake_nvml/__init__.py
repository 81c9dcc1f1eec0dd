"""A fake driver library for tests: one C file behind the real C ABI, and a state that tests change as it runs.

    with FakeNvml(tmp_path, devices=8) as fake:
        fake.devices[3].memory_used = 20 * GIB
        fake.fail("nvmlDeviceGetTemperature", NOT_SUPPORTED, device=3)
        subprocess.run([...], env={**os.environ, **fake.environment()})

The structures below are the single source: the C header of the shared state is generated from them.
Names of functions are those of the C library; without the suffix ``_v2`` they mean all versions of it.
Does not imitate what a driver computes: it says what the test told it to say.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
GIB = 2**30

SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 0, 1, 2, 3, 4
NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED, TIMEOUT = 6, 7, 9, 10
FUNCTION_NOT_FOUND, LOST, RESET_REQUIRED, VERSION_MISMATCH, UNKNOWN = 13, 15, 16, 18, 999
HANG, ABORT = -1, -2

KINDS = {"compute": 1, "graphics": 2, "compute+graphics": 3, "mps": 4, "compute+mps": 5}
DRIVERS = {580: "580.65.06", 470: "470.256.02", 418: "418.226.00"}
MAX_DEVICES, MAX_PROCESSES, MAX_MIG, MAX_LINKS, MAX_SAMPLES = 64, 128, 8, 18, 120

SOURCE = Path(__file__).with_name("fake_nvml.c")
# What the C file defines, in its order: the number of a function is its place here.
FUNCTIONS = tuple(dict.fromkeys(re.findall(r"^(?:API|NUMBER|PROCESSES)\((\w+)", SOURCE.read_text(), re.MULTILINE)))

Number = ctypes.c_int64


class Process(ctypes.Structure):
    """A row of a process list."""

    _fields_ = [
        *[(name, Number) for name in ("pid", "memory", "kind", "gi", "ci", "sm_utilization", "time_stamp")],
        ("counted", Number),  # its memory is part of the device's used memory
        ("stays", Number),  # listed although the pid is dead
        *[(f"{name}_utilization", Number) for name in ("memory", "encoder", "decoder")],
    ]


class Mig(ctypes.Structure):
    """A MIG instance."""

    _fields_ = [
        *[(name, Number) for name in ("gi", "ci", "gpu_slices", "compute_slices")],
        *[(name, Number) for name in ("memory_total", "memory_used", "memory_reserved")],
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
    ]


class Link(ctypes.Structure):
    """An NVLink."""

    _fields_ = [("active", Number), ("remote_type", Number), ("remote_bus_id", ctypes.c_char * 32)]


_DEVICE_NUMBERS = {
    "minor": 0, "numa_node": 0, "cpu_affinity": 0xFFFF, "error": 0,
    "memory_total": 81559 * MIB, "memory_used": 4 * MIB, "memory_reserved": 540 * MIB,
    "utilization": 0, "memory_utilization": 0,
    "temperature": 34, "temperature_slowdown": 89, "temperature_shutdown": 92, "fan": 30,
    "power_mw": 71_000, "power_limit_mw": 700_000, "energy_mj": 5_000_000,
    "clock_sm": 345, "clock_sm_max": 1980, "clock_memory": 2619, "clock_memory_max": 2619, "pstate": 0,
    "clock_video": 765, "encoder_utilization": 12, "decoder_utilization": 34,
    "throttle_reasons": 1, "persistence": 1, "compute_mode": 0,
    "ecc": 1, "ecc_corrected_volatile": 0, "ecc_uncorrected_volatile": 0,
    "ecc_corrected_aggregate": 0, "ecc_uncorrected_aggregate": 0, "retired_pages": 0, "retired_pages_pending": 0,
    "remapped_corrected": 0, "remapped_uncorrected": 0, "remap_pending": 0, "remap_failed": 0,
    "fabric_health": -1,  # the mask; -1: it is in no NVLink fabric
    "pcie_generation": 5, "pcie_width": 16, "pcie_tx_kbs": 100, "pcie_rx_kbs": 200, "mig_mode": 0, "process_stride": 24,
    "nvlink_tx_kib": 0, "nvlink_rx_kib": 0, "nvlink_time_us": 1,  # of each link that is active
    "process_count": 0, "sample_count": 0, "mig_count": 0, "last_seen_time_stamp": -1,
}  # fmt: skip


class DeviceState(ctypes.Structure):
    """A device, as the library will report it."""

    _fields_ = [
        *[(name, Number) for name in _DEVICE_NUMBERS],
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("bus_id", ctypes.c_char * 32),
        ("samples", Number * MAX_SAMPLES),
        ("topology", Number * MAX_DEVICES),
        ("links", Link * MAX_LINKS),
        ("mig", Mig * MAX_MIG),
        ("processes", Process * MAX_PROCESSES),
    ]


class Fault(ctypes.Structure):
    """What one function does on one device: after *after* more calls, return *code*, *times* times (-1: for ever)."""

    _fields_ = [("code", Number), ("after", Number), ("times", Number)]


_MACHINE_NUMBERS = ("device_count", "latency_us", "init_delay_ms", "cuda_version", "one_at_a_time")


class State(ctypes.Structure):
    """The whole machine."""

    _fields_ = [
        *[(name, Number) for name in _MACHINE_NUMBERS],
        ("driver_version", ctypes.c_char * 80),
        ("nvml_version", ctypes.c_char * 80),
        ("calls", Number * len(FUNCTIONS)),
        ("latencies_us", Number * len(FUNCTIONS)),  # of one function; 0: latency_us
        ("faults", Fault * (MAX_DEVICES + 1) * len(FUNCTIONS)),  # the last column: calls without a device
        ("devices", DeviceState * MAX_DEVICES),
    ]


class FakeNvml:
    """A machine with *devices* GPUs whose driver library is the fake one."""

    def __init__(
        self, directory: Path | str, devices: int = 8, name: str = "NVIDIA H100 80GB HBM3", driver: int = 580
    ) -> None:
        self.path = str(Path(directory, "fake-nvml.state"))
        self.library = library(driver)
        Path(self.path).write_bytes(bytes(ctypes.sizeof(State)))
        self._open()
        self._state.device_count = devices
        self._state.cuda_version = 13000 if driver >= 580 else 11040
        self._state.driver_version = DRIVERS[driver].encode()
        self._state.nvml_version = f"{'13' if driver >= 580 else '11'}.{DRIVERS[driver]}".encode()
        for index in range(max(devices, 16)):  # tests let more appear later
            self._default(index, name)

    @classmethod
    def attach(cls, path: str | None = None, driver: int = 580) -> FakeNvml:
        """The machine that somebody else made: *path* or $FAKE_NVML_STATE."""
        fake = cls.__new__(cls)
        fake.path = path or os.environ["FAKE_NVML_STATE"]
        fake.library = library(driver) if path else ""
        fake._open()
        return fake

    def _open(self) -> None:
        with Path(self.path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(State))
        self._state = State.from_buffer(self._map)
        self.devices = [FakeDevice(self, index) for index in range(MAX_DEVICES)]

    def _default(self, index: int, name: str) -> None:
        device = self.devices[index]
        for field, value in _DEVICE_NUMBERS.items():
            setattr(device, field, value)
        device.uuid = f"GPU-{index:08x}-fa4e-4000-8000-{index:012x}"
        device.name = name
        domain, place = divmod(index, 16)
        device.bus_id = f"{domain:08X}:{0x1B + 0x10 * place if place < 14 else place:02X}:00.0"
        device.minor = index
        device.numa_node = index // 4
        device.cpu_affinity = 0xFFFF << (16 * (index // 4 % 4))
        for other in range(MAX_DEVICES):
            self._state.devices[index].topology[other] = 40 if index // 4 == other // 4 else 50

    def __enter__(self) -> FakeNvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the state; libraries that have it open go on."""
        del self._state
        self._map.close()

    def environment(self) -> dict[str, str]:
        """Variables for a child process that shall see this machine."""
        return {"LD_LIBRARY_PATH": str(Path(self.library).parent), "FAKE_NVML_STATE": self.path}

    def add_process(self, device: int, pid: int, memory: int, kind: str = "compute", **more: int) -> None:
        """List a process until its pid is gone (stays=1: longer).  Its memory counts as used (counted=0: not)."""
        state = self._state.devices[device]
        row = Process(pid, memory, KINDS[kind], 0xFFFFFFFF, 0xFFFFFFFF, 0, 0, 1, 0, 1)
        for field, value in more.items():
            setattr(row, field, value)
        state.processes[state.process_count] = row
        state.process_count += 1

    def clear_processes(self, device: int) -> None:
        """No process on that device any more."""
        self._state.devices[device].process_count = 0

    def become_gb10(self, device: int) -> None:
        """Let a device answer as the GPU of a DGX Spark does, which has the host's memory."""
        self.devices[device].name = "NVIDIA GB10"
        self.devices[device].bus_id = "0000000F:01:00.0"
        calls = ("MemoryInfo", "MemoryInfo_v2", "EnforcedPowerLimit", "RemappedRows", "FanSpeed")
        for call in calls:
            self.fail(f"nvmlDeviceGet{call}", NOT_SUPPORTED, device)

    def add_mig(self, device: int, profile: str, gi: int, ci: int = 0, memory_used: int = 13 * MIB) -> str:
        """Divide a device: adds one instance such as ``"3g.40gb"`` and returns its uuid."""
        state = self._state.devices[device]
        slices, size = int(profile[0]), int(profile.partition(".")[2].rstrip("gb"))
        uuid = f"MIG-{device:08x}-{gi:04x}-{ci:04x}-8000-{0:012x}"
        name = f"{state.name.decode()} MIG {profile}"
        row = Mig(gi, ci, slices, slices, size * GIB, memory_used, 5 * MIB, uuid.encode(), name.encode())
        state.mig[state.mig_count] = row
        state.mig_count += 1
        state.mig_mode = 1
        return uuid

    def connect(self, device: int, link: int, remote_bus_id: str, remote_type: int = 0) -> None:
        """An active NVLink to the device (type 0) or switch (type 2) with that bus id."""
        self._state.devices[device].links[link] = Link(1, remote_type, remote_bus_id.encode())

    def set_topology(self, one: int, other: int, level: int) -> None:
        """The common ancestor of two devices: 10 PIX, 20 PXB, 30 PHB, 40 NODE, 50 SYS."""
        self._state.devices[one].topology[other] = level
        self._state.devices[other].topology[one] = level

    def fail(self, function: str, code: int, device: int | None = None, *, after: int = 0, times: int = -1) -> None:
        """Let *function* return *code* (HANG, ABORT: never), on one device or on all; SUCCESS heals it."""
        columns = range(MAX_DEVICES + 1) if device is None else (device,)
        for row in _rows(function):
            for column in columns:
                fault = self._state.faults[row][column]
                # The code comes last, because the library looks at it first.
                fault.after, fault.times = after, times
                fault.code = code

    def hang(self, function: str, device: int | None = None) -> None:
        """Let *function* not return until it is healed with fail(function, SUCCESS)."""
        self.fail(function, HANG, device)

    def slow(self, function: str, microseconds: int) -> None:
        """Let each call of *function* take so long, in place of latency_us; 0: as the others."""
        for row in _rows(function):
            self._state.latencies_us[row] = microseconds

    def lose(self, device: int, code: int = LOST) -> None:
        """Let every call on that device fail, from now on."""
        self._state.devices[device].error = code

    def heal(self) -> None:
        """No faults any more."""
        ctypes.memset(ctypes.addressof(self._state.faults), 0, ctypes.sizeof(self._state.faults))
        for device in self.devices:
            device.error = 0

    def calls(self) -> dict[str, int]:
        """How often each function was called, by all processes, since the last reset_calls()."""
        return {name: count for name, count in zip(FUNCTIONS, self._state.calls, strict=True) if count}

    def reset_calls(self) -> None:
        """Count from 0 again."""
        ctypes.memset(ctypes.addressof(self._state.calls), 0, ctypes.sizeof(self._state.calls))

    def __setattr__(self, name: str, value: object) -> None:
        if name in _MACHINE_NUMBERS:
            setattr(self._state, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _MACHINE_NUMBERS:
            return getattr(self._state, name)
        raise AttributeError(name)


class FakeDevice:
    """Reads and writes the fields of DeviceState, text as str; ``samples`` takes a list."""

    def __init__(self, fake: FakeNvml, index: int) -> None:
        self.__dict__.update(fake=fake, index=index)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.fake._state.devices[self.index], name)
        return value.decode() if isinstance(value, bytes) else value

    def __setattr__(self, name: str, value: int | str | bytes | Sequence[int]) -> None:
        state = self.fake._state.devices[self.index]
        if name == "samples":
            assert not isinstance(value, int | str | bytes)
            state.samples[: len(value)] = value
            state.sample_count = len(value)
        elif hasattr(type(state), name):
            setattr(state, name, value.encode() if isinstance(value, str) else value)
        else:
            raise AttributeError(f"a fake GPU has no {name!r}")


@functools.cache
def library(driver: int = 580) -> str:
    """Path of the library as that driver generation had it, built once per process tree."""
    shared = os.environ.get("FAKE_NVML_BUILD")
    if not shared:
        shared = tempfile.mkdtemp(prefix="fake-nvml-")
        os.environ["FAKE_NVML_BUILD"] = shared
        atexit.register(_remove, shared, os.getpid())
    return str(build(Path(shared, str(driver)), driver))


def build(directory: Path, driver: int = 580) -> Path:
    """Compile libnvidia-ml.so.1 into *directory*; functions newer than *driver* do not exist in it."""
    target = directory / "libnvidia-ml.so.1"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "state.h").write_text(_header())
    temporary = directory / f"library.{os.getpid()}"
    options = ["-shared", "-fPIC", "-pthread", "-O1", "-Wall", "-Werror", "-fno-sanitize=undefined", f"-I{directory}"]
    command = [*_compiler(), *options, f"-DDRIVER={driver}", "-o", str(temporary), str(SOURCE)]
    # zig keeps its cache in the home directory, which may not be writable; scripts/test names one for all builds.
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(directory / "zig"), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"the fake driver library does not compile:\n{done.stderr}")
    temporary.rename(target)
    return target


def _compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise RuntimeError("no C compiler for the fake driver library: install cc, or run `pip install ziglang` (101 MB).")


def _header() -> str:
    sizes = ("DEVICES", "PROCESSES", "MIG", "LINKS", "SAMPLES")
    parts = [f"#define MAX_{name} {globals()['MAX_' + name]}" for name in sizes]
    parts += ["enum {", *[f"  F_{name}," for name in FUNCTIONS], "  FUNCTION_COUNT };"]
    for structure in (Process, Mig, Link, DeviceState, Fault, State):
        rows = [f"  {_declare(field[0], field[1])};" for field in structure._fields_]
        parts += ["typedef struct {", *rows, f"}} {structure.__name__};"]
        size = f"sizeof({structure.__name__}) == {ctypes.sizeof(structure)}"
        parts.append(f'_Static_assert({size}, "same layout as in Python");')
    return "\n".join(parts) + "\n"


def _declare(name: str, kind: Any) -> str:
    suffix = ""
    while issubclass(kind, ctypes.Array):
        suffix, kind = f"{suffix}[{kind._length_}]", kind._type_
    plain = {Number: "int64_t", ctypes.c_char: "char"}
    return f"{plain.get(kind, kind.__name__)} {name}{suffix}"


def _rows(function: str) -> list[int]:
    pattern = re.compile(re.escape(function) + r"(_v\d)?")
    rows = [row for row, name in enumerate(FUNCTIONS) if pattern.fullmatch(name)]
    if not rows:
        raise ValueError(f"the fake library has no {function!r}")
    return rows


def _remove(directory: str, owner: int) -> None:
    # A forked child runs this too, and must not take the library away from its parent.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
