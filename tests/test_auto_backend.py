"""Which backends show a machine: found in the kernel's files before any worker starts, and nothing else is touched."""

import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_snapshot

from gpuguard import backends
from gpuguard.backends import BACKENDS, DEFAULT_BACKEND, default_backend, open_backend
from gpuguard.backends import merged as merging
from gpuguard.backends.merged import MergedBackend
from gpuguard.claims.directory import lock_directory
from gpuguard.cli import build_parser, options
from gpuguard.cli.options import name_backend
from gpuguard.errors import BackendError, DriverMismatch, InvalidRequest
from gpuguard.lock import Allocator
from gpuguard.model import MODEL, Device, Gap, Snapshot
from gpuguard.request import Request
from gpuguard.select import choose, unread_vendor
from gpuguard.source import SnapshotSource
from gpuguard.vendors import INTEL, NVIDIA, VENDORS

ALL = {vendor.backend: "" for vendor in VENDORS.values()}


@pytest.fixture(autouse=True)
def all_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each vendor has a backend."""
    monkeypatch.setattr(backends, "BACKENDS", {**BACKENDS, **ALL})


class Tree:
    """The files of a machine's kernel, as far as they say which GPUs it has."""

    def __init__(self, place: Path) -> None:
        self.root, self.nodes = place, 128
        for folder in ("sys/bus/pci/drivers/pcieport", "sys/bus/pci/devices", "dev/dri"):
            (place / folder).mkdir(parents=True)

    def gpu(self, driver: str, address: str, *, node: bool = True, **files: str) -> None:
        folder = self.root / "sys/bus/pci/drivers" / driver / address
        render = folder / "drm" / f"renderD{self.nodes}"
        render.mkdir(parents=True)
        (folder.parent / "bind").touch()
        for name, text in files.items():
            (folder / name).write_text(text)
        if node:
            (self.root / "dev/dri" / render.name).touch()
        self.nodes += 1

    def without_driver(self, address: str, vendor: str, kind: str) -> None:
        folder = self.root / "sys/bus/pci/devices" / address
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")

    def backends(self, wanted: str | None = None) -> str:
        return backends.backends_here(wanted, str(self.root))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def nvidia(tree: Tree) -> None:
    tree.gpu("nvidia", "0000:01:00.0")


def radeon(tree: Tree) -> None:
    tree.gpu("amdgpu", "0000:03:00.0", mem_busy_percent="0\n")


def vega10(tree: Tree) -> None:
    tree.gpu("amdgpu", "0000:0a:00.0", unique_id="02150e5a2c5e1b31\n")


def apu(tree: Tree) -> None:
    tree.gpu("amdgpu", "0000:0e:00.0", unique_id="")


def old_apu(tree: Tree) -> None:
    tree.gpu("amdgpu", "0000:0e:00.0")


def arc(tree: Tree) -> None:
    tree.gpu("xe", "0000:04:00.0")


def iris(tree: Tree) -> None:
    tree.gpu("i915", "0000:00:02.0")


def moore_threads(tree: Tree) -> None:
    tree.gpu("mtgpu", "0000:05:00.0")


@pytest.mark.parametrize(
    ("gpus", "backends"),
    [
        ([], "nvml"),  # WSL, or a machine whose driver is missing: NVML says which
        ([nvidia], "nvml"),
        ([nvidia, iris], "nvml"),
        ([nvidia, apu], "nvml"),
        ([radeon], "amd"),
        ([vega10], "amd"),
        ([radeon, apu], "amd"),
        ([apu], "amd"),
        ([nvidia, old_apu], "nvml"),
        ([arc], "intel"),
        ([iris], "intel"),
        ([arc, iris], "intel"),
        ([arc, apu], "intel"),
        ([radeon, iris], "amd"),
        ([apu, iris], "amd,intel"),
        ([moore_threads], "mthreads"),
        ([moore_threads, iris], "mthreads"),
        ([arc, vega10, nvidia], "nvml,amd,intel"),
    ],
    ids=lambda value: "+".join(gpu.__name__ for gpu in value) if isinstance(value, list) else value,
)
def test_the_backends_of_a_machine_are_those_of_its_gpus_and_integrated_ones_count_alone_only(tree, gpus, backends):
    for gpu in gpus:
        gpu(tree)

    assert tree.backends() == backends


@pytest.mark.parametrize(
    ("gpus", "wanted", "backends"),
    [
        ([nvidia, apu], "amd", "nvml,amd"),
        ([nvidia, iris], "intel", "nvml,intel"),
        ([nvidia, iris], "amd", "nvml"),
        ([radeon], "amd", "amd"),
        ([], "intel", "nvml"),
    ],
)
def test_an_integrated_gpu_counts_where_its_vendor_is_wanted(tree, gpus, wanted, backends):
    for gpu in gpus:
        gpu(tree)

    assert tree.backends(wanted) == backends


def test_no_integrated_gpu_hides_that_one_of_nvidia_has_no_driver(tree):
    iris(tree)
    tree.without_driver("0000:01:00.1", NVIDIA.pci_id, "0x040300")  # its sound card
    assert tree.backends() == "intel"

    tree.without_driver("0000:01:00.0", NVIDIA.pci_id, "0x030200")
    assert tree.backends() == "nvml"
    assert tree.backends("intel") == "intel"


def test_a_gpu_of_the_host_that_a_container_cannot_open_does_not_count(tree):
    nvidia(tree)
    tree.gpu("amdgpu", "0000:03:00.0", node=False, mem_busy_percent="0\n")

    assert tree.backends() == "nvml"


def test_auto_is_the_default_and_the_backend_of_this_machine_opens_in_this_process(tmp_path, monkeypatch):
    monkeypatch.delenv("GPUGUARD_BACKEND", raising=False)
    assert default_backend() == DEFAULT_BACKEND == "auto"
    assert backends.resolved("simulated:x,nvml", None) == "simulated:x,nvml"

    monkeypatch.setattr(backends, "backends_here", lambda: "simulated")
    assert open_backend(f"auto:{tmp_path}").name == "simulated"
    monkeypatch.setattr(backends, "backends_here", lambda: "nvml,smi")
    with pytest.raises(InvalidRequest, match="several backends"):
        open_backend("auto")


@pytest.mark.parametrize(
    ("words", "here", "wanted", "named"),
    [
        ([], "nvml", "nvml", "auto"),
        (["--vendor", "amd"], "nvml,amd", "nvml,amd", "auto"),
        (["--vendor", "amd"], "nvml", "nvml,amd", "nvml,amd"),
        (["--vendor", "amd", "--backend", "nvml"], "nvml", "nvml,amd", "nvml"),
    ],
)
def test_a_wanted_integrated_gpu_is_named_for_the_commands_of_the_job_too(monkeypatch, words, here, wanted, named):
    monkeypatch.delenv("GPUGUARD_BACKEND", raising=False)
    monkeypatch.setattr(options, "resolved", backends.resolved.__wrapped__)
    monkeypatch.setattr(backends, "backends_here", lambda vendor=None: wanted if vendor else here)
    args = build_parser("run").parse_args([*words, "true"])
    name_backend(args)

    assert args.backend == named


# What a machine of NVIDIA pays for the others.

COUNTED = """
import os, sys
from gpuguard.backends import backends_here
sys.addaudithook(lambda event, args: print(event, *args[:1]) if event in ("open", "os.listdir") else None)
before = set(sys.modules)
print(backends_here(None, sys.argv[1]))
print("modules", *(set(sys.modules) - before))
"""


@pytest.mark.parametrize("beside", [iris, apu])
def test_a_machine_of_nvidia_pays_a_few_system_calls_and_loads_no_module_of_another_vendor(tree, beside):
    nvidia(tree)
    beside(tree)
    command = [sys.executable, "-c", COUNTED, str(tree.root)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert lines[-2:] == ["nvml", "modules"]
    # A folder that is there takes 5 calls: open, fstat, twice getdents, close; a file 3; one that is missing 1.
    calls = sum(1 if not os.path.exists(word) else 5 if kind == "os.listdir" else 3
                for kind, word in (line.split(" ", 1) for line in lines[:-2]))  # fmt: skip
    assert calls <= 30


# A vendor whose backend fails is missed only where it was not asked for.


class Worker:
    """A worker of a vendor's devices, or of nothing but a fault."""

    simulated = False

    def __init__(self, name: str, *devices: Device, fault: str = "") -> None:
        self.name, self.devices, self.fault = name, devices, fault

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        if self.fault:
            raise DriverMismatch(self.fault)
        wanted = tuple(d for d in self.devices if devices is None or d.uuid in devices)
        return replace(a_snapshot(a_device()), devices=wanted, backend=self.name)

    def close(self) -> None:
        pass


def merged(*workers: Any) -> MergedBackend:
    return MergedBackend(",".join(worker.name for worker in workers), workers)


AMD2 = tuple(a_device(i, uuid=f"GPU-{i:016x}", vendor="amd", name="AMD Instinct MI300X", ordinal=i + 1) for i in (0, 1))
ARC = a_device(0, uuid="PCI-0000-04-00-0", vendor="intel", name="Intel Arc B580")
MISMATCH = "the driver was updated: reboot."


def test_the_devices_of_several_vendors_stand_in_one_order_and_keep_the_numbers_that_their_backend_gives():
    snapshot = merged(Worker("intel", ARC), Worker("amd", *AMD2), Worker("nvml", a_device()))
    found = [(device.index, device.vendor, device.number) for device in snapshot.sample(()).devices]

    assert found == [(0, "nvidia", 0), (1, "amd", 1), (2, "amd", 2), (3, "intel", 0)]


def test_the_devices_that_were_never_read_keep_their_places(tree, monkeypatch):
    nvidia(tree)
    tree.gpu("nvidia", "0000:02:00.0")
    folders = backends.gpu_folders
    monkeypatch.setattr(merging, "gpu_folders", lambda vendor: folders(vendor, str(tree.root)))
    broken = Worker("nvml", fault=MISMATCH)
    snapshot = merged(broken, Worker("amd", *AMD2)).sample(())

    assert [(device.index, device.number) for device in snapshot.devices] == [(2, 1), (3, 2)]
    assert snapshot.gaps == (Gap(None, "nvidia devices", MISMATCH),)


BROKEN = a_snapshot(*AMD2, gaps=(Gap(None, "nvidia devices", MISMATCH),))


@pytest.mark.parametrize(
    ("conditions", "could"),
    [
        ({}, True),
        ({"num_gpus": 2}, True),
        ({"vendor": "amd"}, False),
        ({"vendor": "nvidia"}, True),
        ({"models": ("MI300X",)}, False),
        ({"models": ("H100",)}, True),
        ({"models": ("*",)}, True),
        ({"devices": ("0",)}, False),
        ({"devices": (AMD2[0].uuid, "1")}, False),
        ({"devices": ("0", "5")}, True),
        ({"exclude": ("0",)}, True),
    ],
)
def test_a_request_misses_a_vendor_that_cannot_be_read_if_it_could_take_its_devices(conditions, could):
    assert (unread_vendor(BROKEN, Request(**conditions)) is not None) is could
    assert unread_vendor(replace(BROKEN, gaps=(Gap(None, "claims", ""),)), Request(**conditions)) is None


def allocator(place: Path, *workers: Worker, **conditions: object) -> Allocator:
    return Allocator(merged(*workers), lock_directory(str(place / "claims")), [Request(**conditions)], environ={})


def test_such_a_request_is_an_error_that_says_how_to_do_without_and_others_go_on(tmp_path):
    broken, amd = Worker("intel", fault=MISMATCH), Worker("amd", *AMD2)
    with pytest.raises(
        BackendError, match=r"(?s)GPUs of Intel cannot be read.*driver was updated.*--vendor amd"
    ) as error:
        allocator(tmp_path, broken, amd).acquire()
    with pytest.raises(BackendError):
        allocator(tmp_path, broken, amd, vendor="intel").preview()

    assert not isinstance(error.value, InvalidRequest)
    with allocator(tmp_path, broken, amd, vendor="amd").acquire() as claim:
        assert [device.vendor for device in claim] == ["amd"]


def test_what_the_indices_of_a_list_depend_on_is_read_before_they_are_believed(tmp_path):
    asked: list[Collection[str]] = []

    class Recording(Worker):
        def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
            asked.append(fields)
            return super().sample(fields, devices)

    backend = merged(Recording("intel", ARC))
    environ = {"ZE_AFFINITY_MASK": "0"}
    Allocator(backend, lock_directory(str(tmp_path / "claims")), [Request()], environ=environ).preview()

    assert MODEL not in asked[0] and MODEL in asked[1]


def test_a_device_of_another_vendor_is_refused_and_there_are_no_other_vendors():
    snapshot = a_snapshot(a_device(), ARC)
    choice = choose(snapshot, Request(vendor="intel"), {})

    assert [device.vendor for device in choice.devices] == ["intel"]
    assert [reason.text for reason in choice.refused[0].reasons] == ["its vendor is NVIDIA"]
    with pytest.raises(InvalidRequest, match="there is no vendor 'voodoo': choose one of nvidia, amd"):
        Request(vendor="voodoo")


@pytest.mark.parametrize("node", [True, False])
def test_a_vendor_whose_control_node_is_missing_cannot_be_used_here_whatever_sys_shows(tmp_path, monkeypatch, node):
    broken, arc = Worker("nvml", fault=MISMATCH), Worker("intel", ARC)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: node if path == NVIDIA.control_node else exists(path))
    request = allocator(tmp_path, broken, arc)

    if node:
        with pytest.raises(BackendError):
            request.acquire()
    else:
        with request.acquire() as claim:
            assert claim[0].vendor == INTEL.name


@pytest.mark.parametrize(
    ("named", "published", "counts"),
    [
        ("auto", "nvml", True),
        ("auto", "nvml,amd", True),
        ("nvml", "nvml", True),
        ("smi", "nvml", True),
        ("amd", "nvml", False),
        ("nvml", "nvml,amd", False),
        ("simulated:/a,simulated:/b", "simulated", True),
    ],
)
def test_the_snapshot_of_the_daemon_counts_for_a_backend_of_the_same_devices(
    tmp_path, monkeypatch, named, published, counts
):
    snapshot, other = a_snapshot(backend=published), a_snapshot(a_device(1))
    monkeypatch.setattr("gpuguard.source.read_state", lambda *_, **__: snapshot)
    directory = lock_directory(str(tmp_path / "claims"))
    source = SnapshotSource(named, lambda: Worker("x"), lambda: directory, read=lambda _: other)

    assert source.sample()[0] is (snapshot if counts else other)
