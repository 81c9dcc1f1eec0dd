"""AMD's GPUs as the kernel shows them: the backend amd on trees of files, and what it says of what cannot be read."""

import errno
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from amd_trees import (
    ASLEEP,
    GIB,
    HOST_MEMORY,
    MI100,
    MI210,
    MI250,
    MI300A,
    MI300X,
    MI300X_CPX,
    MI300X_DPX,
    MI325X,
    MI355X,
    MIB,
    NAVI10,
    NAVI21,
    NAVI31,
    NAVI48,
    OLD,
    PHOENIX,
    POLARIS,
    STRIX_HALO,
    VEGA10,
    AmdTree,
    TreeGpu,
    put,
    put_facts,
)

from gpuguard import backends, model, procfs
from gpuguard.backends import amd, amd_fields, drm
from gpuguard.backends.amd import Amd
from gpuguard.claims.directory import lock_directory
from gpuguard.device_state import hides_use
from gpuguard.errors import BackendError, DriverNotFound, NotEnoughGpus
from gpuguard.lock import Allocator
from gpuguard.model import ALL_FIELDS, DEVICE_FIELDS, SELECT_FIELDS, VERIFY_FIELDS, WHO_FIELDS, Device, Snapshot
from gpuguard.request import Request
from gpuguard.select import choose

MACHINES: Mapping[str, tuple[TreeGpu, ...]] = {
    "mi100": (MI100, MI100),
    "mi210": (MI210,),
    "mi250": (MI250, MI250),
    "mi300x": (MI300X,) * 2,
    "mi300x-dpx": (MI300X_DPX,),
    "mi300x-cpx": (MI300X_CPX,) * 2,
    "mi300x-mixed": (MI300X, MI300X_CPX),
    "mi300a": tuple(replace(MI300A, xcps=1, address=f"000{domain}:02:00.0") for domain in range(4)),
    "mi325x": (MI325X,),
    "mi355x": (MI355X, MI355X),
    "vega10": (VEGA10,),
    "polaris": (POLARIS, POLARIS),
    "navi10": (NAVI10,),
    "navi21": (NAVI21,),
    "navi31": (NAVI31, NAVI31),
    "navi48": (NAVI48,),
    "old": (OLD,),
    "phoenix": (PHOENIX,),
    "strix-halo": (STRIX_HALO,),
    "phoenix-and-navi": (PHOENIX, NAVI31),
    "asleep": (ASLEEP, NAVI21),
    "working": (replace(MI300X, load=97, memory_load=41, used=160 * GIB), replace(NAVI21, load=143)),
    "bare": (TreeGpu("1111", load=None, memory_load=None, power=None, temperatures={}, unique_id=7),),
}


def opened(tree: AmdTree) -> Amd:
    return amd.open(str(tree.root))


def sampled(tree: AmdTree, fields: frozenset[str] = ALL_FIELDS) -> Snapshot:
    return opened(tree).sample(fields)


def reasons(snapshot: Snapshot, device: Device) -> dict[str, str]:
    return {gap.field: str(gap.reason) for gap in snapshot.gaps if gap.device == device.uuid}


# Fidelity: a second reader, written without the first one, has the same numbers.


def naive(device: Path) -> dict[str, object]:
    """What the files of a GPU say, read in the most direct way; None where they say nothing."""
    text = {path.name: path.read_text().strip() for path in device.iterdir() if path.is_file()}
    text |= {f"ras/{path.name}": path.read_text() for path in device.glob("ras/*")}
    (hwmon,) = (path.parent for path in device.glob("hwmon/*/name") if path.read_text() == "amdgpu\n")
    sensor = {path.name: path.read_text().strip() for path in hwmon.iterdir()}
    named = {label: name[:5] for name, label in sensor.items() if name.endswith("_label")}
    core = named.get("edge", named.get("junction", "none"))

    def number(known: Mapping[str, str], name: str, unit: float = 1) -> float | None:
        return float(known[name]) / unit if name in known and float(known[name]) > 0 else None

    def load(name: str) -> float | None:
        return min(float(text[name]), 100.0) if name in text else None

    clocks = {name: re.findall(r"(\d+)Mhz", text[f"pp_dpm_{name}"])[-1] for name in ("sclk", "mclk")}
    counts = [text[name] for name in text if name.endswith("_err_count")]
    speed = {"16.0": 4, "32.0": 5}
    slot = device.parents[1] if (device.parents[1] / "vendor").exists() else device
    return {
        "memory_total": int(text["mem_info_vram_total"]),
        "memory_used": int(text["mem_info_vram_used"]),
        "memory_free": int(text["mem_info_vram_total"]) - int(text["mem_info_vram_used"]),
        "utilization": load("gpu_busy_percent"),
        "memory_utilization": load("mem_busy_percent"),
        "temperature": number(sensor, f"{core}_input", 1000),
        "temperature_slowdown": number(sensor, f"{core}_crit", 1000),
        "temperature_shutdown": number(sensor, f"{core}_emergency", 1000),
        "fan_speed": 100 * number(sensor, "pwm1") / 255 if "pwm1" in sensor else None,  # type: ignore[operator]
        "power_draw": number(sensor, "power1_average", 10**6) or number(sensor, "power1_input", 10**6),
        "power_limit": number(sensor, "power1_cap", 10**6),
        "clock_sm": number(sensor, "freq1_input", 10**6),
        "clock_memory": number(sensor, "freq2_input", 10**6),
        "clock_sm_max": int(clocks["sclk"]),
        "clock_memory_max": int(clocks["mclk"]),
        "clock_graphics": number(sensor, "freq1_input", 10**6),
        "ecc_mode": True if "ras/features" in text else None,
        "ecc_corrected_volatile": sum(int(line[4:]) for c in counts for line in c.split("\n") if line[:2] == "ce")
        if counts
        else None,
        "ecc_uncorrected_volatile": 0 if counts else None,
        "retired_pages": 0 if "ras/gpu_vram_bad_pages" in text else None,
        "pcie_generation": speed[(slot / "current_link_speed").read_text()[:4]],
        "pcie_width": int((slot / "current_link_width").read_text()),
        "pci_bus_id": device.name,
        "minor_number": min(int(path.name[7:]) for path in device.glob("drm/renderD*")),
        "numa_node": int(text["numa_node"]),
        "cpu_affinity": text["local_cpulist"],
        "asleep": (device / "power/runtime_status").read_text() == "suspended\n",
        "problems": (),
        "processes": (),
    }


def differences(device: Device, gaps: Mapping[str, str], expected: Mapping[str, object]) -> list[str]:
    """Where the device says something else than *expected*, or leaves something out without a word."""
    found = []
    for name, value in expected.items():
        told = getattr(device, name)
        if told != value and not (isinstance(value, float) and told == pytest.approx(value)):
            found.append(f"{name}: {told} instead of {value}")
        if value is None and name not in gaps:
            found.append(f"{name}: no gap")
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_the_backend_says_what_the_files_say(machine: str, tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, *MACHINES[machine])
    snapshot = sampled(tree)
    found = {device.pci_bus_id: device for device in snapshot.devices if device.parent_uuid is None}
    kept = [folder for folder, gpu in zip(tree.devices, tree.gpus, strict=True) if folder.name in found]
    left_out = [gpu for folder, gpu in zip(tree.devices, tree.gpus, strict=True) if folder.name not in found]

    assert all(gpu.integrated for gpu in left_out) and kept
    for folder in kept:
        device, expected = found[folder.name], naive(folder)
        gaps = reasons(snapshot, device)
        if device.integrated:
            expected |= {"memory_total": None, "memory_used": None, "memory_free": None}
            gaps |= dict.fromkeys(expected, "see the tests of GPUs that are part of the CPU")
            expected = {name: value for name, value in expected.items() if not name.startswith("memory_")}
        if device.asleep:
            asleep = {name for group in amd_fields.ROWS.values() for name in group} | {"pcie_generation", "pcie_width"}
            expected |= dict.fromkeys(asleep) | dict.fromkeys(drm.IDLE_ASLEEP, 0.0)
        assert differences(device, gaps, expected) == []
        unknown = {name for name in DEVICE_FIELDS if getattr(device, name) is None}
        assert unknown <= reasons(snapshot, device).keys()


def test_the_second_reader_can_see_a_difference(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI210)
    snapshot = sampled(tree)
    put(tree.devices[0] / "gpu_busy_percent", "55")
    (tree.devices[0] / "mem_busy_percent").unlink()

    assert differences(snapshot.devices[0], reasons(snapshot, snapshot.devices[0]), naive(tree.devices[0])) == [
        "utilization: 0.0 instead of 55.0",
        "memory_utilization: 0.0 instead of None",
        "memory_utilization: no gap",
    ]


def test_a_partition_has_what_its_gpu_has_and_gaps_for_what_only_the_gpu_tells(tmp_path: Path) -> None:
    snapshot = sampled(AmdTree(tmp_path, MI300X_DPX))
    whole, first, second = snapshot.devices

    assert (first.temperature, first.name, first.pci_bus_id) == (whole.temperature, whole.name, whole.pci_bus_id)
    assert (first.minor_number, second.minor_number) == (128, 129)
    assert (first.utilization, first.power_draw, first.ecc_mode) == (None, None, None)
    assert all(gap.is_lasting for gap in snapshot.gaps if (gap.device, gap.field) == (first.uuid, "utilization"))
    unknown = {name for name in DEVICE_FIELDS if getattr(first, name) is None}
    assert unknown <= reasons(snapshot, first).keys()


# Faults: whatever a file says, nothing unknown is a number, and no other GPU suffers.

WORKING = replace(NAVI21, load=37, memory_load=12, ras=True, fabric=5, gtt_used=MIB, modes="SPX", mode="SPX")
TEXTS = {"empty": "", "garbage": "\x00?! ué", "beyond all": str(2**64 - 1), "negative": "-7", "a long number": "9" * 60}
REFUSALS = [errno.EPERM, errno.EBUSY, errno.EINVAL, errno.EIO, errno.EACCES, errno.ENODEV, errno.EOPNOTSUPP]
# What is said by more than one file can be another value: some fields any, others a known one.
ELSEWISE = {
    "fan_speed": 100 * 900 / 3300, "temperature": 40.0, "temperature_slowdown": 110.0, "temperature_shutdown": 115.0,
    "ecc_corrected_volatile": 6,
}  # fmt: skip
ELSEWHERE = {
    "uuid",
    "index",
    "ordinal",
    "name",
    "integrated",
    "memory_shared_with_host",
    "processes",
    "processes_plausible",
    "problems",
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[AmdTree, list[Path], Snapshot]:
    """A machine of two GPUs, the files of the first, and what it shows while they are as they should be."""
    tree = AmdTree(tmp_path_factory.mktemp("amd"), WORKING, WORKING)
    tree.computes(0, os.getpid())
    tree.draws(0, os.getpid(), "drm-resident-vram:\t1048576 KiB", "drm-engine-gfx:\t5 ns")
    nodes = tree.topology / "nodes/1"
    entry = tree.root / f"sys/class/kfd/kfd/proc/{os.getpid()}"
    places = [tree.devices[0], nodes, entry, tree.root / f"proc/{os.getpid()}/fdinfo"]
    files = [path for place in places for path in sorted(place.rglob("*")) if path.is_file() and not path.is_symlink()]
    return tree, [*files, tree.topology / "generation_id", tree.root / "sys/module/amdgpu/version"], sampled(tree)


def lies(now: Snapshot, healthy: Snapshot) -> list[str]:
    """What *now* says that is neither what the healthy GPUs said nor unknown with a reason."""
    found = []
    for device in now.devices:
        sound = next(other for other in healthy.devices if other.pci_bus_id in (device.pci_bus_id, None))
        gaps = reasons(now, device)
        for name in (name for name in vars(device) if name not in ELSEWHERE):
            value = getattr(device, name)
            if value is None and name in DEVICE_FIELDS and name not in gaps:
                found.append(f"GPU {device.index}: {name} has no gap")
            if value not in (None, getattr(sound, name), ELSEWISE.get(name)):
                found.append(f"GPU {device.index}: {name} is {value}")
    return found


def writes(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


FAULTS: Mapping[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    **{name: writes(text) for name, text in TEXTS.items()},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_costs_its_own_field(damaged: tuple[AmdTree, list[Path], Snapshot], fault: str) -> None:
    tree, files, healthy = damaged
    found = {}
    for path in files:
        content = path.read_bytes()
        path.unlink()
        FAULTS[fault](path)
        try:
            found[path] = lies(sampled(tree), healthy)
        finally:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            path.write_bytes(content)

    assert len(files) > 60
    assert {path.name: said for path, said in found.items() if said} == {}


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
def test_a_file_that_the_kernel_refuses_costs_its_own_field(
    damaged: tuple[AmdTree, list[Path], Snapshot], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, files, healthy = damaged
    real, refused = os.open, [""]

    @cache
    def place(path: str) -> str:
        return os.path.realpath(path)

    def open_or_refuse(path: str, *rest: int) -> int:
        if place(path) == refused[0]:
            raise OSError(code, os.strerror(code))
        return real(path, *rest)

    monkeypatch.setattr(drm.os, "open", open_or_refuse)
    found = {}
    for path in files:
        refused[0] = str(path)
        found[path] = lies(sampled(tree), healthy)

    assert {path.name: said for path, said in found.items() if said} == {}


@pytest.mark.parametrize("folder", ["hwmon", "ras", "drm", "power", "mem_banks", "io_links", "kfd/proc", "class/drm"])
def test_a_folder_that_cannot_be_listed_costs_its_own_fields(
    damaged: tuple[AmdTree, list[Path], Snapshot], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, _, healthy = damaged
    real = os.listdir

    def listdir(path: str) -> list[str]:
        if str(path).endswith(folder):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(drm.os, "listdir", listdir)
    try:
        assert lies(sampled(tree), healthy) == []
    except DriverNotFound:
        assert folder.endswith("drm")


def test_a_planted_lie_is_found(damaged: tuple[AmdTree, list[Path], Snapshot], monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _, healthy = damaged
    monkeypatch.setitem(amd_fields.ROWS[model.POWER], "power_draw", lambda files: 0)  # type: ignore[index]

    assert [line for line in lies(sampled(tree), healthy) if "GPU 0" in line] == ["GPU 0: power_draw is 0.0"]


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("gpu_busy_percent", "104", "utilization", 100.0),
        ("gpu_busy_percent", "65535", "utilization", None),
        ("gpu_busy_percent", "-1", "utilization", None),
        ("pp_dpm_sclk", "S: 19Mhz *\n0: 615Mhz\n1: 800Mhz", "clock_sm_max", 800),
        ("pp_dpm_sclk", "\n", "clock_sm_max", None),
        ("pp_dpm_mclk", "0: 0Mhz *", "clock_memory_max", None),
        ("hwmon/hwmon3/power1_cap", "0", "power_limit", None),
        ("hwmon/hwmon3/temp1_input", "511000", "temperature", None),
        ("mem_info_vram_total", "0", "memory_total", None),
        ("mem_info_vram_used", str(17 * GIB), "memory_used", None),
        ("mem_info_vram_used", str(17 * GIB), "memory_free", None),
        ("ras/umc_err_count", "Query currently inaccessible", "ecc_corrected_volatile", None),
        ("ras/gpu_vram_bad_pages", "0x1 : 0x1000 : R\n0x2 : 0x1000 : R", "retired_pages", 2),
        ("numa_node", "-1", "numa_node", None),
    ],
)  # fmt: skip
def test_what_drivers_are_known_to_say(tmp_path: Path, name: str, text: str, field: str, value: object) -> None:
    tree = AmdTree(tmp_path, MI210 if name.startswith("ras") else NAVI21)
    put(tree.devices[0] / name, text)

    assert getattr(sampled(tree).devices[0], field) == value


def test_a_fan_without_a_control_is_measured_by_its_turns(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, NAVI21)
    (tree.hwmon(0) / "pwm1").unlink()
    assert sampled(tree).devices[0].fan_speed == pytest.approx(900 / 33)
    put(tree.hwmon(0) / "fan1_max", "0")
    assert sampled(tree).devices[0].fan_speed is None


def test_a_block_without_counters_does_not_hide_those_of_the_others(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    tree = AmdTree(tmp_path, MI210)
    refuse("sdma_err_count", errno.EINVAL)

    assert sampled(tree).devices[0].ecc_corrected_volatile == 6


@pytest.mark.parametrize(
    ("name", "text", "problems"),
    [
        ("gpu_vram_bad_pages", "0x1 : 0x1000 : P\n0x2 : 0x1000 : R", ("page retirement pending",)),
        ("gpu_vram_bad_pages", "0x1 : 0x1000 : F", ("page retirement failed",)),
        ("umc_err_count", "ue: 2\nce: 0\nde: 0", ("uncorrectable memory errors since the driver was loaded",)),
        ("umc_err_count", "Query currently inaccessible", ()),
    ],
)
def test_broken_memory_is_a_problem(tmp_path: Path, name: str, text: str, problems: tuple[str, ...]) -> None:
    tree = AmdTree(tmp_path, MI300X)
    put(tree.devices[0] / "ras" / name, text)

    assert sampled(tree, VERIFY_FIELDS).devices[0].problems == problems


def test_an_error_whose_page_is_retired_is_counted_and_no_problem(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X)
    put(tree.devices[0] / "ras/umc_err_count", "ue: 2\nce: 0")
    put(tree.devices[0] / "ras/gpu_vram_bad_pages", "0x1 : 0x1000 : R")
    device = sampled(tree).devices[0]

    assert (device.problems, device.ecc_uncorrected_volatile, device.retired_pages) == ((), 2, 1)


def metrics(status: int, size: int = 120, form: int = 1, revision: int = 3) -> bytes:
    """The table gpu_metrics: bytes 112 to 119 say what slows the GPU down."""
    return size.to_bytes(2, "little") + bytes((form, revision)) + b"\x07" * 108 + status.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("status", "reasons"),
    [
        (0, ()),
        (1 << 0, ("sw_power_cap",)),
        (1 << 23, ("sw_power_cap",)),
        (1 << 34, ("sw_thermal_slowdown",)),
        (1 << 36, ()),  # set at all times on some chips
        (1 << 47, ("hw_thermal_slowdown",)),
        (1 << 57, ()),
        (0xFFFF_00FF_00FF, ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown")),
    ],
)
def test_why_a_gpu_is_slowed_down_has_the_names_of_nvidia_smi(
    tmp_path: Path, status: int, reasons: tuple[str, ...]
) -> None:
    tree = AmdTree(tmp_path, NAVI31)
    (tree.devices[0] / "gpu_metrics").write_bytes(metrics(status))

    assert sampled(tree).devices[0].throttle_reasons == reasons


@pytest.mark.parametrize(
    "table",
    [
        metrics(1, revision=4),
        metrics(1, form=2),
        metrics(1, size=104),
        metrics(1)[:119],
        metrics(2**64 - 1),
        b"",
        b"garbage",
    ],
)
def test_a_table_that_is_another_or_damaged_says_nothing_of_what_slows_a_gpu_down(tmp_path: Path, table: bytes) -> None:
    tree = AmdTree(tmp_path, NAVI31)
    (tree.devices[0] / "gpu_metrics").write_bytes(table)
    snapshot = sampled(tree)

    assert snapshot.devices[0].throttle_reasons is None
    assert "tell it" in (why := reasons(snapshot, snapshot.devices[0])["throttle_reasons"]) or "not support" in why


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the kernel refuse to open the files that end with a name."""

    def plant(name: str, code: int) -> None:
        real = os.open

        def open_or_refuse(path: str, *rest: int) -> int:
            if str(path).endswith(name):
                raise OSError(code, os.strerror(code))
            return real(path, *rest)

        monkeypatch.setattr(drm.os, "open", open_or_refuse)

    return plant


# Which GPUs there are


def uuids(tree: AmdTree) -> list[str]:
    return [device.uuid for device in sampled(tree).devices]


def test_the_dead_cards_of_partitions_are_no_gpus(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X, MI300X)
    devices = sampled(tree).devices

    assert len(list((tmp_path / "sys/class/drm").glob("renderD*"))) == 16
    assert [device.minor_number for device in devices] == [128, 136]


def test_gpus_on_the_same_bus_of_other_domains_are_others(tmp_path: Path) -> None:
    devices = sampled(AmdTree(tmp_path, *MACHINES["mi300a"])).devices

    assert [device.pci_bus_id for device in devices] == [f"{domain:04x}:02:00.0" for domain in range(4)]
    assert [device.integrated for device in devices] == [False] * 4
    assert len({device.uuid for device in devices}) == 4


def test_63_partitions_of_64_can_be_used(tmp_path: Path) -> None:
    snapshot = sampled(AmdTree(tmp_path, *(MI300X_CPX,) * 8, minors=63))
    parts = [device for device in snapshot.devices if device.parent_uuid]

    assert len(parts) == len({part.uuid for part in parts}) == 63
    assert [part.number for part in parts] == list(range(63))
    assert [part.label for part in parts[8:16]] == [f"1.{number}" for number in range(8)]
    choice = choose(snapshot, Request(num_gpus=63, allow_mig_set=True), {})
    assert len(choice.devices) == 63


def test_without_kfd_the_cards_that_have_memory_are_the_gpus(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI210, POLARIS, kfd=False)
    snapshot = sampled(tree)

    assert [device.uuid for device in snapshot.devices] == [tree.uuid(0), "PCI-0000-23-00-0"]
    assert [device.processes for device in snapshot.devices] == [(), ()]


def test_a_gpu_that_kfd_does_not_know_comes_last_and_one_that_is_left_out_keeps_its_number(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, OLD, PHOENIX, NAVI31)
    devices = sampled(tree).devices

    assert [(device.pci_bus_id, device.index, device.number) for device in devices] == [
        ("0000:43:00.0", 0, 1),
        ("0000:03:00.0", 1, 3),
    ]


def test_gpus_that_kfd_hides_from_a_container_are_left_out(tmp_path: Path, refuse: Callable[..., None]) -> None:
    tree = AmdTree(tmp_path, MI210, MI210)
    refuse("nodes/1/properties", errno.EPERM)

    assert uuids(tree) == [tree.uuid(1)]
    assert [device.number for device in sampled(tree).devices] == [0]


def test_virtual_functions_are_gpus_of_their_own(tmp_path: Path) -> None:
    gpus = (replace(MI210, address=f"0000:03:02.{function}") for function in range(3))
    devices = sampled(AmdTree(tmp_path, *gpus)).devices

    assert [device.pci_bus_id for device in devices] == [f"0000:03:02.{function}" for function in range(3)]
    assert [device.parent_uuid for device in devices] == [None] * 3


def test_another_generation_of_the_topology_is_read_anew(tmp_path: Path) -> None:
    whole = replace(MI300X, xcps=1)
    tree = AmdTree(tmp_path, whole, whole)
    backend = opened(tree)
    before = backend.sample(VERIFY_FIELDS)
    shutil.rmtree(tree.root / "sys")
    AmdTree(tmp_path / "new", replace(MI300X_DPX, xcps=1), whole)
    (tmp_path / "new/sys").rename(tree.root / "sys")
    put(tree.topology / "generation_id", "3")
    after = backend.sample(VERIFY_FIELDS)

    assert [device.label for device in before.devices] == ["0", "1"]
    assert [device.label for device in after.devices] == ["0", "0.0", "0.1", "1"]
    assert [device.number for device in after.devices if device.label == "1"] == [2]


def test_a_gpu_that_vanished_is_lost_and_comes_back(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI210, MI210)
    backend = opened(tree)
    sound = backend.sample(WHO_FIELDS)
    tree.devices[0].rename(tmp_path / "away")
    lost = backend.sample(WHO_FIELDS)
    put(tree.topology / "generation_id", "3")
    still = backend.sample(WHO_FIELDS)
    (tmp_path / "away").rename(tree.devices[0])
    put(tree.topology / "generation_id", "4")

    assert [device.problems for device in lost.devices] == [("lost",), ()]
    assert [device.uuid for device in still.devices] == [device.uuid for device in sound.devices]
    assert [device.problems for device in backend.sample(WHO_FIELDS).devices] == [(), ()]


def test_a_gpu_whose_driver_was_unbound_is_lost(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI210, MI210)
    backend = opened(tree)
    backend.sample(WHO_FIELDS)
    for path in (tmp_path / "sys/class/drm").iterdir():
        if tree.devices[0].name in os.readlink(path):
            path.unlink()

    assert [device.problems for device in backend.sample(WHO_FIELDS).devices] == [("lost",), ()]


def test_when_all_gpus_vanish_they_are_lost(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI210)
    backend = opened(tree)
    tree.lose(0)
    put(tree.topology / "generation_id", "3")

    assert [device.problems for device in backend.sample(SELECT_FIELDS).devices] == [("lost",)]


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ([], "there is no .*/sys/class/drm"),
        (["sys/class/drm"], "modprobe amdgpu"),
        (["sys/class/drm", "sys/bus/pci/drivers/radeon/0000:01:00.0"], "driver radeon"),
        (["sys/class/drm", "sys/module/amdgpu"], "container"),
    ],
)
def test_a_machine_without_a_gpu_says_what_to_do(tmp_path: Path, folders: list[str], words: str) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)

    with pytest.raises(DriverNotFound, match=words):
        amd.open(str(tmp_path))


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no directory"):
        amd.open(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "simulated"),
    [
        ("amd", False), ("amd:/tmp/x", True), ("amd:", False), ("intel:/tmp/x", True), ("nvml", False),
        ("simulated", True), ("simulated:/x", True), ("nvml,amd", False), ("amd:/x,simulated:/y", True),
        ("smi:/x", False), ("replay:/x", False),
    ],
)  # fmt: skip
def test_a_node_that_exists_only_in_files_keeps_its_claims_there(name: str, simulated: bool) -> None:
    assert backends.is_simulated(name) is simulated


# Identity


@pytest.mark.parametrize("number", [0xE3AA140F9A5F9E31, 0xABCDEF, 1])
def test_a_number_of_the_chip_is_written_with_all_its_zeros(tmp_path: Path, number: int) -> None:
    assert uuids(AmdTree(tmp_path, replace(NAVI21, unique_id=number))) == [f"GPU-{number:016x}"]
    (tmp_path / "other").mkdir()
    assert uuids(AmdTree(tmp_path / "other", replace(NAVI21, unique_id=number), kfd=False)) == [f"GPU-{number:016x}"]


# The tree adds the index of a GPU to its number.
@pytest.mark.parametrize("numbers", [(None, 0), (9, 8)], ids=["none", "the same"])
def test_gpus_without_numbers_of_their_own_are_named_by_their_places(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    gpus = (replace(MI210, unique_id=number) for number in numbers)

    assert uuids(AmdTree(tmp_path, *gpus)) == ["PCI-0000-03-00-0", "PCI-0000-23-00-0"]


def test_a_gpu_whose_number_cannot_be_read_while_it_is_reset_is_not_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., None]
) -> None:
    tree = AmdTree(tmp_path, NAVI21, kfd=False)
    refuse("/unique_id", errno.EBUSY)
    backend = opened(tree)
    snapshot = backend.sample(SELECT_FIELDS)

    assert (snapshot.devices[0].uuid, snapshot.devices[0].problems) == ("unknown-0", ("its uuid cannot be read",))
    assert choose(snapshot, Request(), {}).devices == ()
    monkeypatch.undo()
    assert backend.sample(SELECT_FIELDS).devices[0].uuid == tree.uuid(0)


def test_a_partition_is_named_by_its_gpu_and_its_number(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X_DPX, replace(MI300X_DPX, unique_id=None))

    assert [device.uuid for device in sampled(tree).devices] == [
        "GPU-e3aa140f9a5f9e31", "XCP-e3aa140f9a5f9e31-0", "XCP-e3aa140f9a5f9e31-1",
        "PCI-0000-23-00-0", "XCP-0000-23-00-0-0", "XCP-0000-23-00-0-1",
    ]  # fmt: skip


# Partitions


def parts(tree: AmdTree, fields: frozenset[str] = VERIFY_FIELDS) -> list[Device]:
    return [device for device in sampled(tree, fields).devices if device.parent_uuid]


def test_the_memory_of_a_partition_is_what_its_processes_have(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X_DPX)
    tree.computes(0, os.getpid(), vram=50 * GIB, node=1)
    first, second = parts(tree)

    assert (first.memory_used, first.memory_free, first.processes) == (0, 96 * GIB, ())
    assert (second.memory_used, second.memory_free) == (50 * GIB, 46 * GIB)
    assert [process.pid for process in second.processes or ()] == [os.getpid()]


def test_what_the_kernel_keeps_for_a_process_does_not_spoil_the_other_partitions(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X_DPX)
    tree.computes(0, os.getpid(), vram=50 * GIB, node=1)
    tree.uses(0, 60 * GIB)
    first, second = parts(tree)

    assert (first.memory_used, second.memory_used, second.memory_free) == (0, None, None)
    assert first.processes == () and second.processes


@pytest.mark.parametrize("vram", [0, GIB])
def test_memory_that_no_process_explains_keeps_all_partitions_from_being_given_away(tmp_path: Path, vram: int) -> None:
    tree = AmdTree(tmp_path, MI300X_DPX)
    tree.computes(0, os.getpid(), vram=vram, node=1)
    tree.uses(0, 46 * GIB)
    snapshot = sampled(tree, VERIFY_FIELDS)

    assert [device.memory_used for device in snapshot.devices[1:]] == [None, None]
    assert choose(snapshot, Request(), {}).devices == ()


def test_a_single_partition_that_is_left_is_one_nevertheless(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X_CPX, minors=1)

    assert [(part.mig_profile, part.gpu_instance_id, part.memory_total) for part in parts(tree)] == [
        ("cpx", 0, 24 * GIB)
    ]


def test_partitions_whose_mode_is_not_told_have_no_profile(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X_DPX)
    (tree.devices[0] / "current_compute_partition").unlink()

    assert [part.mig_profile for part in parts(tree)] == [None, None]


def test_a_partition_is_found_by_its_uuid_alone(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X, MI300X_CPX)
    backend = opened(tree)

    assert [device.label for device in backend.sample(SELECT_FIELDS).devices] == ["0", "1"]
    uuid = backend.sample(VERIFY_FIELDS).devices[4].uuid
    assert [device.label for device in backend.sample(SELECT_FIELDS, [uuid]).devices] == [
        "1", *(f"1.{number}" for number in range(8))
    ]  # fmt: skip
    for not_there in ("XCP-e3aa140f9a5f9e31-0", "XCP-e3aa140f9a5f9e31-7"):
        assert backend.sample(SELECT_FIELDS, [not_there]).devices == ()


def test_memory_that_cannot_be_read_of_one_partition_leaves_all_unknown(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    tree = AmdTree(tmp_path, MI300X_DPX)
    tree.computes(0, os.getpid(), vram=GIB, node=1)
    refuse(f"vram_{tree.gpu_ids[0][1]}", errno.EACCES)

    assert [(part.memory_used, part.processes) for part in parts(tree)] == [(None, None), (None, None)]


def test_only_what_is_asked_for_is_told_of_a_partition(tmp_path: Path) -> None:
    part = parts(AmdTree(tmp_path, MI300X_DPX), frozenset({model.HEALTH}))[0]

    assert (part.problems, part.memory_total, part.processes) == ((), None, None)


def test_without_its_size_a_partition_has_no_free_memory(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, MI300X_DPX)
    shutil.rmtree(tree.topology / "nodes/1/mem_banks")

    assert [(part.memory_total, part.memory_free is None) for part in parts(tree)] == [(None, True), (96 * GIB, False)]


# Processes


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def listed(tree: AmdTree, fields: frozenset[str] = WHO_FIELDS, index: int = 0) -> list[tuple[int, int | None, str]]:
    device = sampled(tree, fields).devices[index]
    return [(process.pid, process.memory_used, process.kind) for process in device.processes or ()]


def test_a_process_of_rocm_is_listed_with_its_memory_and_its_identity(tmp_path: Path, child: int) -> None:
    tree = AmdTree(tmp_path, MI210, MI210)
    tree.computes(1, child, 9 * GIB)
    tree.computes(1, os.getpid(), 5 * GIB)
    first, second = sampled(tree).devices

    assert first.processes == () and second.processes_plausible
    own = next(process for process in second.processes or () if process.pid == os.getpid())
    assert (own.memory_used, own.kind, own.uid, own.utilization) == (5 * GIB, "compute", os.getuid(), None)
    assert own.start_time == procfs.start_time(os.getpid()) and own.command
    assert {process.pid for process in second.processes or ()} == {child, os.getpid()}


def test_a_program_that_only_looks_is_no_user(tmp_path: Path, child: int) -> None:
    tree = AmdTree(tmp_path, MI210, MI210)
    tree.computes(0, child, vram=0, queues=0)
    tree.draws(0, child, "drm-resident-vram:\t2048 KiB")
    tree.draws(1, os.getpid(), "drm-resident-vram:\t0")
    assert listed(tree) == listed(tree, index=1) == []

    tree.computes(0, child, vram=0, queues=1)
    assert listed(tree) == [(child, 2 * MIB, "compute")]


def test_the_contexts_of_a_process_count_together(tmp_path: Path, child: int) -> None:
    tree = AmdTree(tmp_path, MI210)
    entry = tree.computes(0, child, GIB)
    put(entry / f"context_1/vram_{tree.gpu_ids[0][0]}", str(2 * GIB))
    tree.uses(0, 4 * GIB)

    assert listed(tree) == [(child, 3 * GIB, "compute")]
    assert listed(tree, frozenset({model.IDLE_PROCESSES})) == [(child, 3 * GIB, "compute")]


def test_a_new_context_of_a_known_process_counts_as_soon_as_all_processes_are_looked_into(
    tmp_path: Path, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, clock = AmdTree(tmp_path, MI210), [1000.0]
    monkeypatch.setattr(amd, "boot_clock", lambda: clock[0])
    backend = opened(tree)
    entry = tree.computes(0, child, GIB)

    def memory(seconds: float) -> int | None:
        clock[0] += seconds
        (process,) = backend.sample(WHO_FIELDS).devices[0].processes or ()
        return process.memory_used

    assert memory(0) == GIB
    put(entry / f"context_1/vram_{tree.gpu_ids[0][0]}", str(64 * MIB))
    assert memory(1) == GIB
    assert memory(10) == GIB + 64 * MIB
    put(entry / f"context_2/vram_{tree.gpu_ids[0][0]}", str(2 * GIB))
    tree.uses(0, 4 * GIB)  # which nothing explains
    assert memory(1) == 3 * GIB + 64 * MIB


def test_memory_that_cannot_be_read_is_a_use_of_unknown_size(
    tmp_path: Path, child: int, refuse: Callable[..., None]
) -> None:
    tree = AmdTree(tmp_path, MI210)
    tree.computes(0, child, GIB)
    refuse(f"vram_{tree.gpu_ids[0][0]}", errno.EACCES)

    assert listed(tree) == [(child, None, "compute")]


@pytest.mark.parametrize("missing", ["proc", "topology/nodes/1/gpu_id"])
def test_where_kfd_lists_nothing_the_processes_are_unknown(tmp_path: Path, missing: str) -> None:
    tree = AmdTree(tmp_path, MI210)
    path = tree.root / "sys/class/kfd/kfd" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    snapshot = sampled(tree)

    assert snapshot.devices[0].processes is None
    assert "processes" in reasons(snapshot, snapshot.devices[0])


def test_of_two_figures_of_one_process_the_larger_counts(tmp_path: Path, child: int) -> None:
    tree = AmdTree(tmp_path, MI210)
    tree.computes(0, child, 4 * GIB)
    tree.draws(0, child, "drm-resident-vram:\t5 GiB")
    tree.uses(0, 6 * GIB)
    backend = opened(tree)

    def memory() -> int | None:
        (process,) = backend.sample(WHO_FIELDS).devices[0].processes or ()
        return process.memory_used

    assert memory() == 5 * GIB
    assert memory() == 5 * GIB  # though its files are not read again
    tree.computes(0, child, GIB)
    tree.uses(0, 2 * GIB)
    assert memory() == GIB  # what it had then says nothing of it now
    tree.draws(0, child, "drm-resident-vram:\t1 GiB")
    assert memory() == GIB


@pytest.mark.parametrize(
    ("lines", "kind", "memory"),
    [
        (("drm-resident-vram:\t1 GiB", "drm-memory-vram:\t2 GiB", "drm-engine-gfx:\t7 ns"), "graphics", GIB),
        (("drm-memory-vram:\t2 GiB", "drm-engine-compute:\t7 ns"), "compute", 2 * GIB),
        (
            ("drm-memory-vram:\t2 GiB", "drm-engine-compute:\t7 ns", "drm-engine-gfx:\t7 ns"),
            "compute+graphics",
            2 * GIB,
        ),
        (("drm-memory-vram:\t3 MiB",), "graphics", 3 * MIB),
        (("drm-engine-gfx:\t7 ns",), "graphics", None),
    ],
)
def test_a_client_of_the_driver_draws_or_computes(
    tmp_path: Path, child: int, lines: tuple[str, ...], kind: str, memory: int | None
) -> None:
    tree = AmdTree(tmp_path, NAVI31)
    tree.draws(0, child, *lines)
    tree.uses(0, 3 * GIB)

    assert listed(tree) == [(child, memory, kind)]


def test_a_client_of_an_old_kernel_is_read(tmp_path: Path, child: int) -> None:
    tree = AmdTree(tmp_path, VEGA10)
    path = tree.draws(0, child)
    put(path, "pdev:\t0000:03:00.0\npasid:\t32771\nvram mem:\t1048576 kB\ngtt mem:\t0 kB\ngfx0:\t1.23%")
    tree.uses(0, 2 * GIB)

    assert listed(tree) == [(child, GIB, "graphics")]


def test_the_utilization_of_a_client_needs_two_looks(
    tmp_path: Path, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, clock = AmdTree(tmp_path, NAVI31), [1000.0]
    monkeypatch.setattr(amd, "boot_clock", lambda: clock[0])
    backend = opened(tree)

    def utilization(nanoseconds: int, seconds: float) -> float | None:
        clock[0] += seconds
        tree.draws(0, child, "drm-resident-vram:\t1 MiB", f"drm-engine-gfx:\t{nanoseconds} ns")
        (process,) = backend.sample(WHO_FIELDS).devices[0].processes or ()
        return process.utilization

    assert utilization(10**9, 1) is None
    assert utilization(15 * 10**8, 1) == pytest.approx(50)
    assert utilization(9 * 10**9, 1) == 100
    assert utilization(8 * 10**9, 1) is None  # the counter went back
    assert utilization(8 * 10**9, 1) == 0


def test_a_dead_process_that_kfd_still_lists_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    tree = AmdTree(tmp_path, MI210)
    tree.computes(0, dead.pid, 4096)
    (device,) = sampled(tree).devices

    if procfs.in_first_pid_namespace():
        assert [process.ended for process in device.processes or ()] == [True]
    else:
        assert not device.processes_plausible


def test_memory_of_others_that_cannot_be_seen_keeps_a_gpu_from_being_given_away(
    tmp_path: Path, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = AmdTree(tmp_path, NAVI31, NAVI31)
    tree.draws(0, child, "drm-resident-vram:\t20 GiB", "drm-engine-gfx:\t7 ns")
    tree.uses(0, 21 * GIB)
    real = os.open

    def open_or_refuse(path: str, *rest: int) -> int:
        if path.endswith(f"/{child}/fd"):
            raise PermissionError(errno.EACCES, "no")
        return real(path, *rest)

    monkeypatch.setattr(drm.os, "open", open_or_refuse)
    snapshot = sampled(tree, VERIFY_FIELDS)
    hidden, free = snapshot.devices

    assert (hidden.processes, hides_use(hidden), hides_use(free)) == ((), True, False)
    assert [device.index for device in choose(snapshot, Request(), {}).devices] == [1]
    assert "processes of other users" in [gap.field for gap in snapshot.gaps]


def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each look at clients from now on, whether it goes through all processes."""
    found, real = [], drm.ClientScanner.read

    def read(self: drm.ClientScanner, *, everywhere: bool) -> drm.Clients:
        found.append(everywhere)
        return real(self, everywhere=everywhere)

    monkeypatch.setattr(drm.ClientScanner, "read", read)
    return found


def test_all_processes_are_looked_into_only_where_it_can_matter(
    tmp_path: Path, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, clock, found = AmdTree(tmp_path, NAVI31), [1000.0], looks(monkeypatch)
    monkeypatch.setattr(amd, "boot_clock", lambda: clock[0])
    backend = opened(tree)

    def look(seconds: float, devices: list[str] | None = None) -> list[bool]:
        clock[0] += seconds
        found.clear()
        backend.sample(WHO_FIELDS, devices)
        return list(found)

    assert look(0) == [True]
    assert look(1) == [False]
    assert look(1, [tree.uuid(0)]) == [True]  # the caller is about to act
    tree.uses(0, 2 * GIB)
    assert look(1) == [False, True]
    assert look(1) == [False]
    tree.draws(0, child, "drm-resident-vram:\t2 GiB", "drm-engine-gfx:\t7 ns")
    assert look(9) == [False]
    assert look(2) == [True]
    tree.uses(0, 4 * GIB)
    tree.draws(0, child, "drm-resident-vram:\t4 GiB", "drm-engine-gfx:\t7 ns")
    assert look(1) == [False]  # a known process explains it
    found.clear()
    backend.sample({model.MEMORY, model.UTILIZATION})
    assert found == []


def test_an_empty_list_of_one_user_proves_nothing_without_the_memory_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = AmdTree(tmp_path, NAVI31)
    (tree.devices[0] / "mem_info_vram_used").unlink()
    assert sampled(tree).devices[0].processes == ()

    monkeypatch.setattr(drm.ClientScanner, "read", lambda self, **_: drm.Clients((), hidden=True))
    snapshot = sampled(tree, VERIFY_FIELDS)
    assert snapshot.devices[0].processes is None
    assert choose(snapshot, Request(), {}).devices == ()


# Sleep


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the files that are opened from now on."""
    found: set[str] = set()
    real = os.open

    def noted(path: str, *rest: int) -> int:
        found.add(os.path.realpath(path))
        return real(path, *rest)

    monkeypatch.setattr(drm.os, "open", noted)
    return found


# What the driver keeps in memory, and what belongs to the PCI bus.
WAKE_NOTHING = re.compile(
    r"uevent|power/runtime_status|mem_info_\w+|unique_id|product_name|numa_node|local_cpulist|current_compute_partition"
)


def test_a_gpu_that_sleeps_is_not_woken(tmp_path: Path, read_files: set[str]) -> None:
    tree = AmdTree(tmp_path, replace(ASLEEP, modes="SPX", mode="SPX", ras=True), NAVI21)
    snapshot = opened(tree).sample(ALL_FIELDS)
    opened(tree).sample(ALL_FIELDS, [tree.uuid(0)])
    asleep, awake = snapshot.devices
    read = {path.removeprefix(f"{tree.devices[0]}/") for path in read_files if str(tree.devices[0]) in path}

    assert (asleep.asleep, awake.asleep) == (True, False)
    assert asleep.memory_free == asleep.memory_total - asleep.memory_used  # type: ignore[operator]
    assert (asleep.name, asleep.problems, asleep.processes) == ("AMD GPU 1002:73bf", (), ())
    assert (asleep.temperature, asleep.utilization, asleep.pcie_width) == (None, 0.0, None)
    assert reasons(snapshot, asleep)["temperature"] == drm.ASLEEP
    assert [name for name in read if not WAKE_NOTHING.fullmatch(name)] == []
    assert any("hwmon" in path for path in read_files)  # those of the other GPU


def test_files_that_block_or_start_work_are_never_read(tmp_path: Path, read_files: set[str]) -> None:
    tree = AmdTree(tmp_path, MI300X, MI300X_CPX)
    for device in tree.devices:
        put(device / "pcie_bw", "1 2 256")
    tree.computes(0, os.getpid())
    sampled(tree, ALL_FIELDS - {model.CLOCKS})

    assert read_files
    assert [path for path in read_files if re.search(r"pcie_bw|sdma_\d|stats_|counters_|gpu_metrics", path)] == []
    sampled(tree)  # the firmware is asked for its table only where the reasons for slower clocks are wanted
    assert [path for path in read_files if re.search(r"pcie_bw|sdma_\d|stats_|counters_", path)] == []
    assert [path for path in read_files if path.endswith("gpu_metrics")] != []


# GPUs that are part of the CPU


def test_the_memory_of_an_integrated_gpu_is_the_hosts(tmp_path: Path, child: int) -> None:
    tree = AmdTree(tmp_path, PHOENIX)
    tree.draws(0, child, "drm-resident-vram:\t5 MiB", "drm-resident-gtt:\t3 GiB", "drm-engine-compute:\t7 ns")
    put(tree.devices[0] / "mem_info_gtt_used", str(3 * GIB))
    (device,) = sampled(tree).devices

    assert (device.integrated, device.memory_shared_with_host) == (True, True)
    assert (device.memory_total, device.memory_used) == (35 * GIB, 3 * GIB + 600 * MIB)
    assert device.memory_free == 35 * GIB - 3 * GIB - 600 * MIB
    assert [process.memory_used for process in device.processes or ()] == [3 * GIB + 5 * MIB]


def test_an_integrated_gpu_has_no_more_than_its_host(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, replace(STRIX_HALO, gtt=132 * GIB))
    (device,) = sampled(tree).devices

    assert (device.memory_total, device.memory_free) == (HOST_MEMORY, 96 * GIB)
    assert not hides_use(device)  # though the display fills all that the firmware keeps for it


def test_of_a_process_whose_files_are_hidden_an_integrated_gpu_tells_no_memory(tmp_path: Path, child: int) -> None:
    tree = AmdTree(tmp_path, PHOENIX)
    tree.computes(0, child, vram=MIB)

    assert listed(tree) == [(child, None, "compute")]


@pytest.mark.parametrize("missing", ["proc/meminfo", "mem_info_gtt_total"])
def test_memory_of_the_host_that_is_not_told_is_unknown(tmp_path: Path, missing: str) -> None:
    tree = AmdTree(tmp_path, replace(PHOENIX, unique_id=None))
    (tmp_path / missing if "/" in missing else tree.devices[0] / missing).unlink()
    snapshot = sampled(tree)

    assert (snapshot.devices[0].memory_total, snapshot.devices[0].memory_free) == (None, None)
    assert {"memory_total", "memory_free"} <= reasons(snapshot, snapshot.devices[0]).keys()


def test_an_integrated_gpu_without_sensors_is_known_as_well(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, PHOENIX)
    shutil.rmtree(tree.devices[0] / "hwmon")

    assert sampled(tree).devices[0].integrated is True


def test_an_integrated_gpu_with_a_number_is_known_by_its_memory(tmp_path: Path) -> None:
    assert sampled(AmdTree(tmp_path, replace(PHOENIX, unique_id=77))).devices[0].integrated is True


# Connections


@pytest.mark.parametrize(
    ("gpus", "level"),
    [
        ((MI300X, MI300X), "NVLINK"),
        ((MI300X, replace(MI300X, fabric=9)), "PHB"),
        ((NAVI21, NAVI21), "PHB"),
        ((NAVI21, replace(NAVI31, address="0001:03:00.0")), "NODE"),
    ],
)
def test_how_two_gpus_are_connected(tmp_path: Path, gpus: tuple[TreeGpu, ...], level: str) -> None:
    tree = AmdTree(tmp_path, *gpus)

    assert [how for *_, how in sampled(tree).topology or ()] == [level]


def test_gpus_below_one_switch_or_of_two_sockets(tmp_path: Path) -> None:
    below = [replace(NAVI21, switch=False, bridge="pci0000:00/0000:00:01.0") for _ in range(2)]
    tree = AmdTree(tmp_path, *below, *(replace(NAVI21, address=f"000{domain}:03:00.0") for domain in (1, 2)))
    put(tree.devices[3] / "numa_node", "1")
    put(tree.devices[2] / "numa_node", "0")
    levels = {(one, two): how for one, two, how in sampled(tree).topology or ()}

    assert levels[tree.uuid(0), tree.uuid(1)] == "PXB"
    assert levels[tree.uuid(0), tree.uuid(2)] == "NODE"
    assert levels[tree.uuid(0), tree.uuid(3)] == "SYS"


def test_a_copied_tree_without_links_tells_no_connections(tmp_path: Path) -> None:
    for card in (0, 1):
        device = tmp_path / f"sys/class/drm/card{card}/device"
        facts = {"DRIVER": "amdgpu", "PCI_ID": "1002:73BF", "PCI_SLOT_NAME": f"0000:{card + 3:02x}:00.0"}
        put_facts(device / "uevent", facts, "=")
        put(device / "mem_info_vram_total", str(GIB))
        put(device / "mem_busy_percent", "0")
    snapshot = amd.open(str(tmp_path)).sample(ALL_FIELDS)

    assert [device.uuid for device in snapshot.devices] == ["PCI-0000-03-00-0", "PCI-0000-04-00-0"]
    assert snapshot.topology == ()
    assert "topology to PCI-0000-04-00-0" in [gap.field for gap in snapshot.gaps]


# Claims


def test_16_starters_get_8_gpus_and_no_gpu_twice(tmp_path: Path) -> None:
    tree = AmdTree(tmp_path, *(MI210,) * 8)
    name = f"amd:{tree.root}"
    directory = lock_directory(backend=name)
    claims, refused, gate = [], [], threading.Barrier(16)

    def starts() -> None:
        allocator = Allocator(opened(tree), directory, [Request()], environ={})
        gate.wait()
        try:
            claims.append(allocator.acquire(wait=0))
        except NotEnoughGpus as error:
            refused.append(error)

    starters = [threading.Thread(target=starts) for _ in range(16)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    given = [device.uuid for claim in claims for device in claim.devices]
    for claim in claims:
        claim.release()

    assert directory.path == str(tmp_path)
    assert sorted(given) == [tree.uuid(index) for index in range(8)]
    assert len(refused) == 8
