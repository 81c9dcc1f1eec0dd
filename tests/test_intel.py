"""The backend intel on trees of files as the drivers xe and i915 show them: the numbers, the faults, the sleep."""

from __future__ import annotations

import copy
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from intel_trees import (
    A380_I915,
    A380_XE,
    B60,
    B580,
    FLEX_170,
    GIB,
    MACHINES,
    MAX_1550,
    METEOR_LAKE,
    IntelCard,
    IntelTree,
    regions_answer,
)
from nvml_child import gaps_of

from gpuguard import model, procfs
from gpuguard.backends import drm, intel, intel_memory, open_backend
from gpuguard.errors import BackendError
from gpuguard.model import ALL_FIELDS, DEVICE_FIELDS, VERIFY_FIELDS, Device, Snapshot

MIB = 2**20
ME = os.getpid()


def looked_twice(tree: IntelTree, seconds: float = 1.0, fields: Any = ALL_FIELDS) -> Snapshot:
    """The second of two samples, between which time goes by."""
    backend = intel.open(str(tree.place), tree.clock)
    backend.sample(fields)
    tree.advance(seconds)
    return backend.sample(fields)


def only(snapshot: Snapshot) -> Device:
    (device,) = snapshot.devices
    return device


def why(snapshot: Snapshot, field: str) -> str:
    return gaps_of(snapshot, only(snapshot))[field]


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., IntelTree]:
    return lambda *cards: IntelTree(tmp_path, cards)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """This user may not look into the processes of others."""
    real = os.open

    def refuse(path: str, *rest: int) -> int:
        if str(path).endswith("/fd"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *rest)

    monkeypatch.setattr(drm.os, "open", refuse)


# Fidelity: a second, naive reader of the same files


def number_in(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def sensor(device: Path, kind: str, suffix: str, *labels: str) -> float | None:
    """What the sensor with the first of *labels* says; i915 gives no labels and has one sensor."""
    found = {path.read_text().strip(): path for path in device.glob(f"hwmon/*/{kind}*_label")}
    for label in labels:
        if label in found:
            return number_in(Path(str(found[label]).replace("_label", f"_{suffix}")))
    return next((number_in(path) for path in device.glob(f"hwmon/*/{kind}1_{suffix}")), None)


def scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def expected(tree: IntelTree, card: IntelCard) -> dict[str, Any]:
    """What the files of one GPU say."""
    device, folder = tree.device(card.address), tree.card(card.address)
    told: dict[str, Any] = {
        "pci_bus_id": card.address,
        "numa_node": number_in(device / "numa_node"),
        "cpu_affinity": (device / "local_cpulist").read_text().strip(),
        "asleep": card.asleep,
        "integrated": not card.vram,
        "memory_shared_with_host": not card.vram,
        "memory_total": sum(card.vram) or 65536000 * 1024,
        "memory_used": card.used + GIB if card.used else GIB,
        "temperature": scaled(sensor(device, "temp", "input", "pkg"), 1e3),
        "temperature_slowdown": scaled(sensor(device, "temp", "crit", "pkg"), 1e3),
        "power_limit": scaled(sensor(device, "power", "max", "card", "pkg"), 1e6),
        "total_energy": scaled(sensor(device, "energy", "input", "card", "pkg"), 1e6),
        "pcie_generation": 4 if card.vram else None,
        "pcie_width": 8 if card.vram else None,
    }
    told["power_draw"] = None
    if told["total_energy"]:
        told["power_draw"] = tree.watts[card.address] / (1 if "card" in card.labels or card.driver == "i915" else 2)
    if card.driver == "i915":
        clocks, tops = list(folder.glob("gt_act_freq_mhz")), list(folder.glob("gt_RP0_freq_mhz"))
        reasons = [path for path in folder.glob("gt/gt0/throttle_reason_*") if path.name != "throttle_reason_status"]
        told["utilization"] = 80 / 4
    else:
        media = {path.parent.parent for path in device.glob("tile*/gt*/gtidle/name") if "-mc" in path.read_text()}
        clocks = [path for path in device.glob("tile*/gt*/freq0/act_freq") if path.parent.parent not in media]
        tops = [path.with_name("rp0_freq") for path in clocks]
        reasons = list(device.glob("tile*/gt*/freq0/throttle/reason_*"))
        told["utilization"] = 80 / 4 if card.counts else None
        told["clock_video"] = max((number_in(gt / "freq0/act_freq") for gt in media), default=None)  # type: ignore[type-var]
    told["clock_sm"] = max(map(number_in, clocks), default=None)  # type: ignore[type-var]
    told["clock_sm_max"] = max(map(number_in, tops), default=None)  # type: ignore[type-var]
    names = {"pl1": "sw_power_cap"}  # the only reason that the trees have
    active = {names[path.name.rpartition("reason_")[2]] for path in reasons if number_in(path)}
    told["throttle_reasons"] = tuple(active) if reasons else None
    if card.asleep:
        known = ("pci_bus_id", "numa_node", "cpu_affinity", "asleep", "integrated", "memory_shared_with_host")
        told = {name: value if name in known else None for name, value in told.items()} | {"utilization": 0.0}
    return told


def differences(tree: IntelTree, snapshot: Snapshot) -> list[str]:
    """What the snapshot says otherwise than the files, or leaves out without a gap."""
    cards = [card for card in tree.cards.values() if card.vram] or list(tree.cards.values())
    found = []
    for device, card in zip(snapshot.devices, cards, strict=True):
        for name, value in expected(tree, card).items():
            seen = getattr(device, name)
            if seen != (value if isinstance(value, bool) or value is None else pytest.approx(value)):
                found.append(f"{card.address} {name}: {seen} instead of {value}")
        silent = [name for name in DEVICE_FIELDS if getattr(device, name) is None]
        found += [f"{card.address} {name}: no gap" for name in silent if name not in gaps_of(snapshot, device)]
    return found


def loaded(tree: IntelTree) -> IntelTree:
    for card in tree.cards.values():
        tree.load[card.address] = 20
        tree.client(card.address, ME, memory=GIB, **{"ccs" if card.driver == "xe" else "compute": 80})
    return tree


@pytest.mark.parametrize("name", MACHINES)
def test_it_says_what_the_files_say(tmp_path: Path, name: str) -> None:
    tree = loaded(IntelTree(tmp_path, MACHINES[name]))

    assert differences(tree, looked_twice(tree)) == []


def test_the_second_reader_finds_a_planted_difference(machine: Callable[..., IntelTree]) -> None:
    tree = loaded(machine(B580))
    snapshot = looked_twice(tree)
    (tree.device(B580.address) / "hwmon/hwmon10/temp2_input").write_text("42000\n")

    assert differences(tree, snapshot) == ["0000:03:00.0 temperature: 41.3 instead of 42.0"]


# Faults: a file that is missing, or says something else


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FAULTS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\xff\0garbage \xfe"),
    "too long a number": lambda path: path.write_text("9" * 30),
    "a folder": be_a_folder,
    "a fifo": be_a_fifo,
}
# Where a fault may lead to another value: the file says what the others mean, or that there are such files.
MEANINGS = {
    "/uevent": {"name"},
    "/vendor": {"pcie_generation", "pcie_width"},
    "/local_cpulist": {"cpu_affinity"},  # a text
    "/throttle/": {"throttle_reasons"},
    "/throttle_reason_": {"throttle_reasons"},
}


def same(before: object, after: object) -> bool:
    """Whether a field says the same; a rate that was measured in two ways is rounded in two ways."""
    return after == (pytest.approx(before) if isinstance(before, float) else before)


def wrong(healthy: Snapshot, broken: Snapshot, path: str) -> list[str]:
    """The fields of a machine with a broken file that say something else, and have no gap."""
    allowed = {name for part, names in MEANINGS.items() if part in path for name in names} | {"processes"}
    found = []
    for before, after in zip(healthy.devices, broken.devices, strict=True):
        gaps = gaps_of(broken, after)
        changed = [name for name in DEVICE_FIELDS if not same(getattr(before, name), getattr(after, name))]
        found += [f"{path} {name}: {getattr(after, name)}" for name in changed if name not in gaps.keys() | allowed]
        found += [f"{path} {name} is 0" for name in changed if getattr(after, name) == 0 and name not in gaps]
        if ME not in [process.pid for process in after.processes or ()]:
            found.append(f"{path} hides the process")
    return found


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "card",
    [replace(B580, labels=("card",)), A380_I915, METEOR_LAKE],
    ids=lambda card: f"{card.device_id} {card.driver}",
)
def test_a_broken_file_costs_its_own_fields_alone(tmp_path: Path, card: IntelCard, fault: str) -> None:
    tree = loaded(IntelTree(tmp_path, (card,)))
    healthy = looked_twice(copy.deepcopy(tree))
    files = [path for path in tree.files() if not path.endswith("pci.ids")]
    if fault == "missing":  # a process that has ended, a chip with another limit
        files = [path for path in files if not path.startswith("proc/") and not path.endswith("/power1_max")]
    found: list[str] = []
    for path in files:
        again, kept = copy.deepcopy(tree), (tmp_path / path).read_bytes()
        again.broken = tmp_path / path
        again.write_counters()
        FAULTS[fault](again.broken)
        found += wrong(healthy, looked_twice(again), path)
        mend(again.broken, kept)

    assert found == []
    assert len(files) >= 15


def mend(path: Path, content: bytes) -> None:
    if path.is_dir():
        path.rmdir()
    elif path.exists():
        path.unlink()
    path.write_bytes(content)


# Rates: differences of counters over a time that the test moves


def test_a_rate_needs_two_looks(machine: Callable[..., IntelTree]) -> None:
    tree = loaded(machine(B580))
    backend = intel.open(str(tree.place), tree.clock)
    first = backend.sample(ALL_FIELDS)

    assert (only(first).power_draw, only(first).utilization) == (None, None)
    assert why(first, "power_draw") == why(first, "utilization") == "a rate needs two looks"
    assert only(first).total_energy == 70_003


@pytest.mark.parametrize(
    ("seconds", "known"), [(0.01, False), (0.3, True), (1.0, True), (100.0, True), (150.0, False)], ids=str
)
def test_two_looks_are_compared_if_they_lie_neither_too_close_nor_too_far_apart(
    machine: Callable[..., IntelTree], seconds: float, known: bool
) -> None:
    tree = loaded(machine(B580))
    device = only(looked_twice(tree, seconds))

    assert device.power_draw == (pytest.approx(43.0) if known else None)
    assert device.utilization == (pytest.approx(20.0) if known else None)


def test_a_look_that_follows_closely_says_what_the_one_before_said(machine: Callable[..., IntelTree]) -> None:
    tree = loaded(machine(B580))
    backend = intel.open(str(tree.place), tree.clock)
    backend.sample(ALL_FIELDS)
    tree.advance(1.0)
    backend.sample(ALL_FIELDS)
    tree.watts[B580.address] = 190.0
    tree.advance(0.01)

    assert only(backend.sample(ALL_FIELDS)).power_draw == pytest.approx(43.0)

    tree.advance(0.99)

    assert only(backend.sample(ALL_FIELDS)).power_draw == pytest.approx(190.0)


def test_a_counter_that_went_back_gives_no_rate(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    backend = intel.open(str(tree.place), tree.clock)
    backend.sample(ALL_FIELDS)
    tree.now, tree._joules[B580.address] = 1001.0, 5.0
    tree.write_counters()
    snapshot = backend.sample(ALL_FIELDS)

    assert only(snapshot).power_draw is None
    assert why(snapshot, "power_draw") == "its counter went back"


def test_a_counter_of_more_than_32_bits_is_no_wrap(machine: Callable[..., IntelTree]) -> None:
    tree = machine(A380_I915)
    tree._joules[A380_I915.address] = 2**32 / 1e6 - 10
    tree.write_counters()

    assert only(looked_twice(tree)).power_draw == pytest.approx(51.0)


def test_a_counter_of_energy_at_0_tells_nothing(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    tree._joules[B580.address] = 0.0
    tree.watts[B580.address] = 0.0
    tree.write_counters()
    snapshot = looked_twice(tree)

    assert (only(snapshot).power_draw, only(snapshot).total_energy) == (None, None)
    assert why(snapshot, "total_energy") == "its counter stands at 0"


def test_the_chip_tells_the_energy_where_the_sensor_of_the_card_stands_at_0(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    tree.broken = tree.device(B580.address) / "hwmon/hwmon10/energy1_input"
    tree.broken.write_text("0\n", encoding="ascii")

    assert only(looked_twice(tree)).power_draw == pytest.approx(43.0 / 2)


RPM = "the driver tells how fast the fans turn, and not how fast they can"


def test_the_speed_of_a_fan_is_told_where_the_driver_says_how_fast_it_can_turn(
    machine: Callable[..., IntelTree],
) -> None:
    tree = machine(B580)
    untold = looked_twice(tree)
    (hwmon,) = (tree.device(B580.address) / "hwmon").iterdir()
    (hwmon / "fan1_max").write_text("3150\n", encoding="ascii")

    assert (only(untold).fan_speed, why(untold, "fan_speed")) == (None, RPM)
    assert only(looked_twice(tree)).fan_speed == 30


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("pl4", "sw_power_cap"),
        ("thermal", "sw_thermal_slowdown"),
        ("prochot", "hw_thermal_slowdown"),
        ("ratl", "ratl"),
        ("status", None),
    ],
)
def test_why_a_gpu_is_slowed_down_has_the_names_of_nvidia_smi(
    machine: Callable[..., IntelTree], reason: str, name: str | None
) -> None:
    tree = machine(replace(B580, address="0000:04:00.0"))
    (tree.device("0000:04:00.0") / f"tile0/gt0/freq0/throttle/reason_{reason}").write_text("1\n", encoding="ascii")

    assert only(looked_twice(tree)).throttle_reasons == ((name,) if name else ())


def test_a_limit_of_0_is_none(machine: Callable[..., IntelTree]) -> None:
    tree = machine(A380_I915)
    (tree.card(A380_I915.address).parents[1] / "hwmon/hwmon10/power1_max").write_text("0\n", encoding="ascii")
    snapshot = looked_twice(tree)

    assert only(snapshot).power_limit is None
    assert why(snapshot, "power_limit") == "no limit is set"


def test_the_busiest_class_of_engines_is_the_load(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    tree.client(B580.address, ME, memory=GIB, ccs=80, rcs=30, vcs=50)
    tree.client(B580.address, os.getppid(), memory=GIB, rcs=35)
    device = only(looked_twice(tree))

    assert device.utilization == pytest.approx(65.0)  # of the one render engine; there are 2 of vcs and 4 of ccs
    assert {process.pid: process.utilization for process in device.processes or ()} == pytest.approx(
        {ME: 30.0, os.getppid(): 35.0}
    )


def test_the_load_is_never_above_100_percent(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    tree.client(B580.address, ME, memory=GIB, rcs=170)
    device = only(looked_twice(tree))

    assert (device.utilization, [process.utilization for process in device.processes or ()]) == (100.0, [100.0])


def test_a_process_counts_from_its_second_look_on(machine: Callable[..., IntelTree]) -> None:
    tree = loaded(machine(FLEX_170))
    backend = intel.open(str(tree.place), tree.clock)
    backend.sample(ALL_FIELDS)
    tree.client(FLEX_170.address, os.getppid(), memory=GIB, render=60)
    uuid = "PCI-0000-4d-00-0"
    for load in (20.0, 60.0):
        tree.advance(1.0)

        assert only(backend.sample(ALL_FIELDS, [uuid])).utilization == pytest.approx(load)


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("card", [B580, A380_I915], ids=lambda card: card.driver)
def test_where_processes_are_hidden_the_sleep_of_the_engines_tells_the_load(
    machine: Callable[..., IntelTree], card: IntelCard
) -> None:
    tree = machine(card)
    tree.client(card.address, ME, memory=GIB, rcs=10, render=10)
    tree.load[card.address] = 70.0

    assert only(looked_twice(tree)).utilization == pytest.approx(70.0)


@pytest.mark.usefixtures("hidden")
def test_the_busiest_tile_is_the_load(machine: Callable[..., IntelTree]) -> None:
    tree = machine(MAX_1550)
    backend = intel.open(str(tree.place), tree.clock)
    tree.load[MAX_1550.address] = 90.0
    tree.broken = tree.device(MAX_1550.address) / "tile0/gt0/gtidle/idle_residency_ms"
    for milliseconds in (5000, 6000):
        tree.broken.write_text(f"{milliseconds}\n", encoding="ascii")
        snapshot = backend.sample(ALL_FIELDS)
        tree.advance(1.0)

    assert only(snapshot).utilization == pytest.approx(90.0)


def test_a_virtual_function_that_counts_nothing_has_no_load(tmp_path: Path) -> None:
    tree = loaded(IntelTree(tmp_path, MACHINES["virtual function"]))
    snapshot = looked_twice(tree)

    assert only(snapshot).utilization is None
    assert [process.utilization for process in only(snapshot).processes or ()] == [None]


# Memory: what the kernel tells, what processes hold, and what this user cannot see


def test_the_memory_of_all_tiles_counts(machine: Callable[..., IntelTree]) -> None:
    device = only(looked_twice(machine(MAX_1550)))

    assert (device.memory_total, device.memory_used, device.memory_free) == (128 * GIB, 2 * GIB, 126 * GIB)


def test_what_the_driver_does_not_tell_is_the_sum_of_what_processes_hold(machine: Callable[..., IntelTree]) -> None:
    tree = machine(FLEX_170)
    tree.client(FLEX_170.address, ME, memory=3 * GIB, compute=10)
    tree.client(FLEX_170.address, os.getppid(), memory=GIB, render=10)
    snapshot = looked_twice(tree)

    assert only(snapshot).memory_used == 4 * GIB
    assert "the sum of what its processes hold" in why(snapshot, "memory_used")


@pytest.mark.usefixtures("hidden")
def test_use_that_this_user_cannot_see_is_unknown(machine: Callable[..., IntelTree]) -> None:
    snapshot = looked_twice(loaded(machine(FLEX_170)))
    device = only(snapshot)

    assert (device.memory_total, device.memory_used, device.memory_free, device.processes) == (
        16 * GIB, None, None, None,
    )  # fmt: skip
    assert {why(snapshot, name) for name in ("memory_used", "memory_free", "processes")} == {
        "the processes of other users cannot be seen"
    }


@pytest.mark.usefixtures("hidden")
def test_use_that_the_driver_tells_needs_no_right_to_see_processes(machine: Callable[..., IntelTree]) -> None:
    device = only(looked_twice(loaded(machine(B580))))

    assert (device.memory_used, device.processes) == (B580.used + GIB, None)


def test_without_proc_nothing_is_known_of_processes(machine: Callable[..., IntelTree]) -> None:
    tree = machine(FLEX_170)
    (tree.place / "proc/meminfo").unlink()
    (tree.place / "proc").rmdir()

    assert (only(looked_twice(tree)).processes, only(looked_twice(tree)).memory_used) == (None, None)


@pytest.mark.parametrize("hides", ["pid namespace", "hidepid"])
def test_processes_that_proc_leaves_out_are_hidden(monkeypatch: pytest.MonkeyPatch, hides: str) -> None:
    entries = drm.entries
    if hides == "hidepid":
        monkeypatch.setattr(drm, "entries", lambda folder: [name for name in entries(folder) if name != "1"])
    monkeypatch.setattr(procfs, "in_first_pid_namespace", lambda: hides != "pid namespace")

    assert drm.ClientScanner("/").read(everywhere=True).hidden


def test_a_node_that_cannot_be_opened_leaves_the_memory_unknown(
    machine: Callable[..., IntelTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, opened = machine(B580), os.open

    def refuse(path: Any, *arguments: Any) -> int:
        if "/dev/dri/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    snapshot = looked_twice(tree)

    assert only(snapshot).memory_total is None
    assert why(snapshot, "memory_total").endswith("renderD128 cannot be opened: no permission")


def test_processes_that_share_memory_leave_no_less_than_nothing(machine: Callable[..., IntelTree]) -> None:
    tree = machine(FLEX_170)
    for pid in (ME, os.getppid()):
        tree.client(FLEX_170.address, pid, memory=9 * GIB, render=10)

    assert only(looked_twice(tree, fields={model.MEMORY})).memory_free == 0


def test_an_integrated_gpu_has_what_the_host_can_give(machine: Callable[..., IntelTree]) -> None:
    tree = machine(METEOR_LAKE)
    tree.client(METEOR_LAKE.address, ME, memory=2 * GIB, rcs=10)
    device = only(looked_twice(tree))

    assert device.memory_shared_with_host and device.integrated
    assert (device.memory_total, device.memory_used) == (65536000 * 1024, 2 * GIB)
    assert device.memory_free == 50000000 * 1024  # MemAvailable


# The question for the memory regions, put to a kernel of the test


class Kernel:
    """Answers the ioctl of a driver as the kernel does: the length first, then as much as there is room for."""

    def __init__(self, card: IntelCard, used: int) -> None:
        self.answer = regions_answer(card, used)
        self.calls: list[int] = []

    def __call__(self, node: int, number: int, request: bytearray) -> int:
        self.calls.append(number)
        assert stat.S_ISCHR(os.fstat(node).st_mode)
        if number == 0xC0286440:  # DRM_IOCTL_XE_DEVICE_QUERY
            extensions, query, size, data = struct.unpack_from("=QIIQ", request)
            assert (extensions, query, len(request)) == (0, 1, 40)
            struct.pack_into("=I", request, 12, self.told(size, data))
        else:
            assert number == 0xC0106479  # DRM_IOCTL_I915_QUERY
            items, flags, item = struct.unpack("=IIQ", request)
            query, size, _, data = struct.unpack("=QiIQ", ctypes.string_at(item, 24))
            assert (items, flags, query) == (1, 0, 4)
            ctypes.memmove(item + 8, struct.pack("=i", self.told(size, data)), 4)
        return 0

    def told(self, size: int, data: int) -> int:
        if size:
            ctypes.memmove(data, self.answer, size)
        return len(self.answer)


def behind_a_node(tree: IntelTree, card: IntelCard) -> drm.Card:
    """The card of *tree*, whose render node is a character device rather than a file."""
    node = tree.place / "dev/dri/renderD128"
    node.unlink()
    node.symlink_to("/dev/null")
    return drm.Card(card.address, "", card.driver, "", 128)


@pytest.mark.parametrize(("card", "used"), [(A380_XE, 5 * MIB), (A380_I915, 7 * MIB), (MAX_1550, 0)], ids=str)
def test_the_kernel_is_asked_for_the_memory_regions(
    machine: Callable[..., IntelTree], monkeypatch: pytest.MonkeyPatch, card: IntelCard, used: int
) -> None:
    tree, kernel = machine(card), Kernel(card, used)
    monkeypatch.setattr(fcntl, "ioctl", kernel)
    regions = intel_memory.regions(str(tree.place), behind_a_node(tree, card))

    assert [(region.total, region.used) for region in regions if region.of_gpu] == [
        (total, used if tile == 0 else 0) for tile, total in enumerate(card.vram)
    ]
    assert len(kernel.calls) == 2


@pytest.mark.parametrize("card", [A380_XE, A380_I915], ids=lambda card: card.driver)
@pytest.mark.parametrize("length", [0, -22, 2**20])
def test_a_kernel_that_tells_no_regions_is_believed(
    machine: Callable[..., IntelTree], monkeypatch: pytest.MonkeyPatch, card: IntelCard, length: int
) -> None:
    tree, kernel = machine(card), Kernel(card, 0)
    monkeypatch.setattr(kernel, "told", lambda size, data: length & 0xFFFFFFFF if card.driver == "xe" else length)
    monkeypatch.setattr(fcntl, "ioctl", kernel)

    with pytest.raises(drm.NotTold, match="does not tell its memory regions"):
        intel_memory.regions(str(tree.place), behind_a_node(tree, card))


def test_a_gpu_that_its_driver_has_given_up_is_unhealthy(
    machine: Callable[..., IntelTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = machine(B580)
    behind_a_node(tree, B580)

    def wedged(*_: object) -> int:
        raise OSError(errno.ECANCELED, "Operation canceled")

    monkeypatch.setattr(fcntl, "ioctl", wedged)

    assert only(looked_twice(tree, fields={model.HEALTH})).problems == ("given up by its driver until it is reset",)


def test_a_real_device_of_another_kind_is_no_gpu(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    behind_a_node(tree, B580)
    snapshot = looked_twice(tree)

    assert only(snapshot).memory_total is None
    assert only(snapshot).problems == ()


def test_a_card_without_a_render_node_has_no_memory_that_is_known(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    (tree.place / "sys/class/drm/renderD128").unlink()
    for path in (tree.device(B580.address) / "drm/renderD128").iterdir():
        path.unlink()
    (tree.device(B580.address) / "drm/renderD128").rmdir()

    assert why(looked_twice(tree), "memory_total") == "it has no render node"


# Sleep


@pytest.fixture
def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all files that are opened from now on."""
    found: list[str] = []
    real = os.open

    def note(path: Any, *arguments: Any, **options: Any) -> int:
        found.append(str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", note)
    return found


WAKES = ("hwmon", "tile", "/gt", "fdinfo", "current_link", "dev/dri")


def test_a_sleeping_gpu_is_not_woken(tmp_path: Path, opened_files: list[str]) -> None:
    tree = loaded(IntelTree(tmp_path, MACHINES["asleep"]))
    device = only(looked_twice(tree))

    assert [path for path in opened_files if any(part in path for part in WAKES)] == []
    assert any("runtime_status" in path for path in opened_files)
    assert (device.asleep, device.name, device.minor_number) == (True, "Intel Arc B580", 128)


def test_what_wakes_is_noticed(machine: Callable[..., IntelTree], opened_files: list[str]) -> None:
    looked_twice(loaded(machine(B580)))

    assert [part for part in WAKES if not any(part in path for path in opened_files)] == []


def test_a_sleeping_gpu_beside_one_that_is_awake_is_not_woken(tmp_path: Path, opened_files: list[str]) -> None:
    tree = loaded(IntelTree(tmp_path, MACHINES["one asleep beside one awake"]))
    asleep, awake = looked_twice(tree).devices
    of_the_sleeping = [f"{ME}/fdinfo/3", "card2/device/hwmon", "card2/device/tile", "dri/renderD128"]

    assert [path for path in opened_files if any(part in path for part in of_the_sleeping)] == []
    assert (asleep.temperature, awake.temperature) == (None, 41.5)


def test_a_sleeping_gpu_that_no_process_has_open_holds_nothing(tmp_path: Path) -> None:
    device = only(looked_twice(IntelTree(tmp_path, MACHINES["asleep"])))

    assert (device.processes, device.memory_used) == ((), 0)


@pytest.mark.usefixtures("hidden")
def test_a_sleeping_gpu_computes_for_no_process_that_is_hidden(machine: Callable[..., IntelTree]) -> None:
    tree = loaded(machine(B580))
    (tree.device(B580.address) / "power/runtime_status").write_text("suspended\n", encoding="ascii")
    device = only(looked_twice(tree))

    assert (device.processes, device.memory_used) == (None, 0)


def test_a_sleeping_gpu_of_unknown_size_says_what_would_tell_it(tmp_path: Path) -> None:
    snapshot = looked_twice(IntelTree(tmp_path, MACHINES["asleep"]))

    for field in ("memory_total", "memory_free"):
        assert why(snapshot, field) == "its size is not told while it sleeps; any use wakes it"


def test_what_a_process_holds_on_a_sleeping_gpu_is_unknown(tmp_path: Path) -> None:
    device = only(looked_twice(loaded(IntelTree(tmp_path, MACHINES["asleep"]))))

    assert [(process.pid, process.memory_used) for process in device.processes or ()] == [(ME, None)]
    assert device.memory_used is None


def test_the_size_of_a_gpu_is_known_while_it_sleeps_if_it_was_ever_told(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    backend = intel.open(str(tree.place), tree.clock)
    backend.sample(ALL_FIELDS)
    (tree.device(B580.address) / "power/runtime_status").write_text("suspended\n", encoding="ascii")
    device = only(backend.sample(ALL_FIELDS))

    assert (device.memory_total, device.memory_used, device.memory_free) == (12 * GIB, 0, 12 * GIB)


# How GPUs are connected


def test_how_two_gpus_are_connected(machine: Callable[..., IntelTree]) -> None:
    near = replace(B60, address="0000:07:00.0")
    tree = machine(B60, near, replace(B60, address="0000:08:00.0"))
    backend = intel.open(str(tree.place), tree.clock)
    levels = {(one, other): how for one, other, how in backend.sample(ALL_FIELDS).topology or ()}
    first, second, far = (f"PCI-0000-{bus}-00-0" for bus in ("05", "07", "08"))

    assert levels == {(first, second): "NODE", (first, far): "SYS", (second, far): "SYS"}
    assert backend.sample(ALL_FIELDS, [first, far]).topology == ((first, far, "SYS"),)
    backend.skip = {1}
    assert backend.sample(ALL_FIELDS).topology == ((first, far, "SYS"),)


# Processes


@pytest.mark.parametrize(
    ("engines", "kind"),
    [
        ({"ccs": 10}, "compute"),
        ({"ccs": 10, "rcs": 10}, "compute"),
        ({"rcs": 10}, "compute+graphics"),
        ({"rcs": 10, "bcs": 10}, "compute+graphics"),
        ({"vcs": 10}, "graphics"),
        ({}, "compute+graphics"),
    ],
    ids=str,
)
def test_the_engines_that_a_process_uses_say_what_it_does(
    machine: Callable[..., IntelTree], engines: dict[str, float], kind: str
) -> None:
    tree = machine(B580)
    tree.client(B580.address, ME, memory=GIB, **engines)

    assert [process.kind for process in only(looked_twice(tree)).processes or ()] == [kind]


def test_a_program_that_only_watches_is_no_process_of_the_gpu(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    tree.client(B580.address, ME)

    assert only(looked_twice(tree)).processes == ()


def test_a_process_that_opened_a_gpu_twice_is_listed_once(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    tree.client(B580.address, ME, memory=GIB, ccs=10)
    tree.client(B580.address, ME, memory=2 * GIB, ccs=10)

    (process,) = only(looked_twice(tree)).processes or ()
    assert (process.pid, process.memory_used, process.uid) == (ME, 3 * GIB, os.getuid())


def test_a_busy_gpu_need_not_be_looked_for_processes(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    tree.client(B580.address, ME, memory=4 * GIB, ccs=10)

    assert only(looked_twice(tree, fields={model.MEMORY, model.IDLE_PROCESSES})).processes is None
    assert only(looked_twice(tree, fields={model.IDLE_PROCESSES})).processes != ()


def test_a_new_process_is_seen_by_a_caller_that_names_the_device_and_after_a_while(
    machine: Callable[..., IntelTree],
) -> None:
    tree = machine(B580)
    backend = intel.open(str(tree.place), tree.clock)
    backend.sample(VERIFY_FIELDS)
    tree.client(B580.address, ME, memory=GIB, ccs=10)
    tree.advance(1.0)
    later = backend.sample(VERIFY_FIELDS)
    named = backend.sample(VERIFY_FIELDS, ["PCI-0000-03-00-0"])

    assert (only(later).processes, len(only(named).processes or ())) == ((), 1)

    tree.client(B580.address, os.getppid(), memory=GIB, ccs=10)
    tree.advance(intel.SCAN_SECONDS)

    assert len(only(backend.sample(VERIFY_FIELDS)).processes or ()) == 2


def test_a_file_of_a_gpu_that_fdinfo_does_not_describe_may_be_in_use(machine: Callable[..., IntelTree]) -> None:
    tree = machine(FLEX_170)
    tree.client(FLEX_170.address, ME, memory=GIB, compute=10)
    tree.broken = tree.place / f"proc/{ME}/fdinfo/3"
    tree.broken.write_text("pos:\t0\nflags:\t02\n", encoding="ascii")  # i915 before Linux 5.19
    device = only(looked_twice(tree))

    assert [(process.pid, process.kind) for process in device.processes or ()] == [(ME, "compute+graphics")]
    assert device.memory_used is None


# Which GPUs there are


def test_beside_a_discrete_gpu_the_integrated_one_is_left_out_but_counted(tmp_path: Path) -> None:
    tree = IntelTree(tmp_path, MACHINES["meteor lake and b580"])
    device = only(looked_twice(tree))

    assert (device.index, device.ordinal, device.number, device.uuid) == (0, 1, 1, "PCI-0000-03-00-0")


def test_a_discrete_gpu_may_lie_on_the_first_bus_of_a_virtual_machine(machine: Callable[..., IntelTree]) -> None:
    tree = machine(replace(B60, address="0000:00:05.0"))

    assert only(looked_twice(tree)).integrated is False


def test_a_gpu_that_is_gone_is_lost_and_hides_no_other(tmp_path: Path) -> None:
    tree = IntelTree(tmp_path, MACHINES["two b60"])
    backend = intel.open(str(tmp_path), tree.clock)
    backend.sample(ALL_FIELDS)
    tree.lose("0000:05:00.0")
    lost, other = backend.sample(ALL_FIELDS).devices

    assert (lost.index, lost.uuid, lost.name, lost.problems) == (0, "PCI-0000-05-00-0", "Intel Arc Pro B60", ("lost",))
    assert (other.index, other.problems, other.memory_total) == (1, (), 24 * GIB)


def test_a_driver_that_was_loaded_again_is_read_as_before(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    backend = intel.open(str(tree.place), tree.clock)
    backend.sample(ALL_FIELDS)
    for node in ("sys/class/drm/card1", f"sys/devices/pci0000:03/{'/'.join(BRIDGES)}/0000:03:00.0/drm/card1"):
        (tree.place / node).rename((tree.place / node).with_name("card7"))
    link = tree.place / "sys/class/drm/card7"
    link.unlink()
    link.symlink_to(tree.device(B580.address) / "drm/card7")
    tree.advance(1.0)
    device = only(backend.sample(ALL_FIELDS))

    assert (device.problems, device.temperature, device.power_draw) == ((), 41.3, None)


def test_a_gpu_that_another_driver_has_taken_under_the_same_names_is_lost(machine: Callable[..., IntelTree]) -> None:
    tree = machine(B580)
    backend = intel.open(str(tree.place), tree.clock)
    backend.sample(ALL_FIELDS)
    driver = tree.device(B580.address) / "driver"
    driver.unlink()
    driver.symlink_to(tree.place / "sys/bus/pci/drivers/stub")

    assert only(backend.sample(ALL_FIELDS)).problems == ("lost",)


BRIDGES = ("0000:03:01.0", "0000:03:1a.0", "0000:03:1b.0")


def test_a_device_that_hangs_is_not_touched(tmp_path: Path, opened_files: list[str]) -> None:
    tree = IntelTree(tmp_path, MACHINES["two b60"])
    backend = intel.open(str(tmp_path), tree.clock)
    read: list[int | None] = []
    backend.skip, backend.progress = {1}, read.append
    opened_files.clear()
    snapshot = backend.sample(ALL_FIELDS)

    assert (read, snapshot.devices[1].problems) == ([0], ("unresponsive",))
    assert [path for path in opened_files if "a5:00.0/" in path and ("hwmon" in path or "tile" in path)] == []


def test_only_what_is_asked_for_is_read(tmp_path: Path, opened_files: list[str]) -> None:
    tree = IntelTree(tmp_path, MACHINES["two b60"])
    backend = open_backend(f"intel:{tmp_path}")
    opened_files.clear()
    snapshot = backend.sample((), ["PCI-0000-a5-00-0"])
    backend.close()

    assert [(device.index, device.uuid) for device in snapshot.devices] == [(1, "PCI-0000-a5-00-0")]
    assert snapshot.simulated and backend.simulated
    assert [path for path in opened_files if any(part in path for part in (*WAKES, "proc"))] == []
    assert tree.files()


def test_without_a_gpu_it_says_what_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"no Intel GPU was found: .*/sys/class/drm has no card") as failed:
        intel.open(str(tmp_path))

    assert "lspci -k" in str(failed.value)
