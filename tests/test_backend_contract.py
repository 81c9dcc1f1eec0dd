"""What every backend promises, tried on each one in the process of its own in which gpuguard runs it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from math import comb
from pathlib import Path

import fake_mtml
import pytest
from amd_trees import MI300X, MI300X_DPX, AmdTree
from builders import GIB, a_device, a_mig_instance, a_process, a_snapshot
from fake_nvml import FakeNvml
from intel_trees import B60, IntelTree
from nodes import a_user, change, eventually, start
from nvml_child import gaps_of
from smi_files import a_program
from sources import PACKAGE

from gpuguard import errors, model
from gpuguard.backends import Backend, client
from gpuguard.backends.client import open_worker
from gpuguard.model import ALL_FIELDS, SELECT_FIELDS, VERIFY_FIELDS, WHO_FIELDS
from gpuguard.vendors import UUID_PREFIXES

FIELDS = {
    model.MEMORY: ("memory_total", "memory_used", "memory_free"),
    model.PROCESSES: ("processes",),
    model.UTILIZATION: ("utilization", "memory_utilization"),
    model.HEALTH: ("problems", "compute_mode", "mig_mode"),
    model.MODEL: ("name", "pci_bus_id", "minor_number", "numa_node", "cpu_affinity"),
    model.THERMAL: ("temperature", "fan_speed", "temperature_slowdown", "temperature_shutdown"),
    model.POWER: ("power_draw", "power_limit", "total_energy"),
    model.CLOCKS: (
        "clock_sm",
        "clock_sm_max",
        "clock_memory",
        "pstate",
        "throttle_reasons",
        "persistence_mode",
        "display_active",
    ),
    model.ECC: ("ecc_mode", "ecc_uncorrected_volatile", "retired_pages", "remapped_rows", "remapped_rows_uncorrected"),
    model.MEDIA: ("clock_graphics", "clock_video", "encoder_utilization", "decoder_utilization"),
    model.PCIE: ("pcie_generation", "pcie_width", "pcie_tx", "pcie_rx"),
    model.NVLINK: ("nvlink_links",),
    model.NVLINK_FLOW: ("nvlink_tx", "nvlink_rx", "nvlink_flow"),
}


class FakeDriver:
    """Four devices behind the fake driver library."""

    name = "nvml"

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = FakeNvml(place, devices=4)
        for name, value in self.fake.environment().items():
            monkeypatch.setenv(name, value)

    @contextmanager
    def busy(self, index: int) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(["sleep", "600"], text=True) as job:
            self.fake.add_process(index, job.pid, GIB)
            yield job
            job.kill()

    def lose(self, index: int) -> None:
        self.fake.lose(index)

    def divide(self) -> None:
        self.fake.add_mig(1, "3g.40gb", gi=1)
        self.fake.add_mig(1, "3g.40gb", gi=2)


class SimulatedNode:
    """Four devices that exist in a file only."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = str(place / "node")
        self.name = f"simulated:{self.place}"
        start(self.place)

    def busy(self, index: int) -> AbstractContextManager[subprocess.Popen[str]]:
        return a_user(self.place, str(index), GIB, 50.0)

    def lose(self, index: int) -> None:
        change(self.place, index, faults=("lost",))

    def divide(self) -> None:
        self.place += "-divided"
        self.name = f"simulated:{self.place}"
        start(self.place, "1xH100-80GB+1xH100-80GB:mig=3g.40gb,3g.40gb+2xH100-80GB")


class Program:
    """Four devices behind a program nvidia-smi."""

    name = "smi"

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place / "bin"
        self.devices = [a_device(index, uuid=f"GPU-{index}") for index in range(4)]
        monkeypatch.setenv("PATH", f"{self.place}:/usr/bin:/bin")
        a_program(self.place, a_snapshot(*self.devices))

    @contextmanager
    def busy(self, index: int) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(["sleep", "600"], text=True) as job:
            process = a_process(job.pid, memory_used=GIB, command=("sleep",))
            self.devices[index] = replace(
                self.devices[index], processes=(process,), memory_used=GIB, memory_free=79 * GIB
            )
            a_program(self.place, a_snapshot(*self.devices))
            yield job
            job.kill()

    def lose(self, index: int) -> None:
        text = (self.place / "xml").read_text(encoding="utf-8")
        head, *rest = text.split("<gpu ")
        rest[index] = re.sub(r">[^<\n]+<", ">GPU is lost<", rest[index])
        (self.place / "xml").write_text("<gpu ".join([head, *rest]), encoding="utf-8")

    def divide(self) -> None:
        parent = replace(self.devices[1], mig_mode=True, utilization=None)
        instances = [a_mig_instance(parent, number) for number in (0, 1)]
        a_program(self.place, a_snapshot(self.devices[0], parent, *instances, *self.devices[2:]))


class IntelFiles:
    """Four Intel GPUs in a tree of files."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cards = tuple(replace(B60, address=f"0000:0{number}:00.0") for number in (3, 4, 5, 6))
        self.tree = IntelTree(place / "machine", cards)
        self.name = f"intel:{self.tree.place}"

    @contextmanager
    def busy(self, index: int) -> Iterator[subprocess.Popen[str]]:
        place = self.tree.place / "job"
        place.mkdir()
        with subprocess.Popen(["sleep", "600"], text=True, cwd=place) as job:
            fdinfo = self.tree.client(f"0000:0{index + 3}:00.0", job.pid, memory=GIB, ccs=50)
            fdinfo.rename(place / "fdinfo")
            fdinfo.symlink_to(f"/proc/{job.pid}/cwd/fdinfo")  # which is gone when the process has ended
            yield job
            job.kill()

    def lose(self, index: int) -> None:
        self.tree.lose(f"0000:0{index + 3}:00.0")


class UserOfKfd(subprocess.Popen[str]):
    """A process whose entry in KFD the kernel removes when it ends."""

    entry: Path

    def kill(self) -> None:
        super().kill()
        shutil.rmtree(self.entry, ignore_errors=True)


class KernelFilesOfAmd:
    """Four devices that the kernel's files show."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = AmdTree(place / "amd", *(4 * [MI300X]))
        self.name = f"amd:{self.tree.root}"

    @contextmanager
    def busy(self, index: int) -> Iterator[subprocess.Popen[str]]:
        with UserOfKfd(["sleep", "600"], text=True) as job:
            job.entry = self.tree.computes(index, job.pid, GIB)
            yield job
            job.kill()

    def lose(self, index: int) -> None:
        self.tree.lose(index)

    def divide(self) -> None:
        self.tree = AmdTree(self.tree.root.with_name("divided"), MI300X, MI300X_DPX, MI300X, MI300X)
        self.name = f"amd:{self.tree.root}"


PYMTML = """
import sys
from pathlib import Path
from fake_mtml import FakeMtml
sys.modules[__name__] = FakeMtml(devices=4, lost=Path({lost!r}))
"""


class LibraryOfMooreThreads:
    """Four devices behind a stand-in for the binding of the library, which lists no processes."""

    name = "mthreads"

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = place / "lost"
        self.lost.mkdir()
        (place / "pymtml.py").write_text(PYMTML.format(lost=str(self.lost)), encoding="utf-8")
        monkeypatch.syspath_prepend(place)  # workers have this path; other interpreters have the variable
        monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{Path(fake_mtml.__file__).parent}", prepend=os.pathsep)

    def lose(self, index: int) -> None:
        (self.lost / str(index)).touch()


class AllVendors:
    """Two devices of NVIDIA, one of AMD and one of Intel, which the backend auto has found."""

    name = "auto"

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.amd = AmdTree(place / "amd", MI300X)
        self.nvidia, self.intel = place / "nvidia", IntelTree(place / "intel", (B60,))
        start(str(self.nvidia), "2xH100-80GB")
        self._monkeypatch = monkeypatch
        self._finds(self.nvidia)

    def _finds(self, nvidia: Path) -> None:
        found = f"intel:{self.intel.place},amd:{self.amd.root},simulated:{nvidia}"
        self._monkeypatch.setattr(client, "resolved", lambda name, vendor: found)

    @contextmanager
    def busy(self, index: int) -> Iterator[subprocess.Popen[str]]:
        with UserOfKfd(["sleep", "600"], text=True) as job:
            job.entry = self.amd.computes(index - 2, job.pid, GIB)
            yield job
            job.kill()

    def lose(self, index: int) -> None:
        change(str(self.nvidia), index, faults=("lost",))

    def divide(self) -> None:
        divided = self.nvidia.with_name("divided")
        start(str(divided), "1xH100-80GB+1xH100-80GB:mig=3g.40gb,3g.40gb")
        self._finds(divided)


Divisible = FakeDriver | SimulatedNode | Program | KernelFilesOfAmd | AllVendors
ListsProcesses = Divisible | IntelFiles
Machine = ListsProcesses | LibraryOfMooreThreads
LISTING = [FakeDriver, SimulatedNode, Program, KernelFilesOfAmd, IntelFiles, AllVendors]
ALONE = [FakeDriver, SimulatedNode, Program, KernelFilesOfAmd, IntelFiles, LibraryOfMooreThreads]


@pytest.fixture(params=[*LISTING, LibraryOfMooreThreads])
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made: Machine = request.param(tmp_path, monkeypatch)
    return made


@pytest.fixture
def opened(machine: Machine) -> Iterator[Callable[[], Backend]]:
    backends = []

    def open_it() -> Backend:
        backends.append(open_worker(machine.name))
        return backends[-1]

    yield open_it
    for backend in backends:
        backend.close()


@pytest.fixture
def backend(opened: Callable[[], Backend]) -> Backend:
    return opened()


def test_every_device_has_an_index_and_a_uuid_whatever_is_read(backend: Backend) -> None:
    devices = backend.sample(()).devices

    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert len({device.uuid for device in devices}) == 4
    assert all(device.uuid.startswith(UUID_PREFIXES) for device in devices)


def test_a_group_brings_its_fields_and_no_others(backend: Backend) -> None:
    for group, fields in FIELDS.items():
        snapshot = backend.sample({group})
        others = {name for other, names in FIELDS.items() if other != group for name in names}

        for device in snapshot.devices:
            missing = {name for name in fields if getattr(device, name) is None}
            assert missing <= gaps_of(snapshot, device).keys()
            assert [(group, name) for name in others if getattr(device, name) is not None] == []


def test_memory_adds_up(backend: Backend) -> None:
    for device in backend.sample(SELECT_FIELDS).devices:
        assert device.memory_total and device.memory_used is not None and device.memory_free is not None
        assert device.memory_used + device.memory_free + (device.memory_reserved or 0) == device.memory_total


def test_only_the_devices_that_are_asked_for_are_read(backend: Backend) -> None:
    uuids = [device.uuid for device in backend.sample(()).devices]

    assert [device.index for device in backend.sample(VERIFY_FIELDS, [uuids[3], uuids[1]]).devices] == [1, 3]
    assert backend.sample(VERIFY_FIELDS, ["GPU-nobody"]).devices == ()
    assert backend.sample(VERIFY_FIELDS, []).devices == ()


def test_a_snapshot_is_taken_before_anything_that_starts_later(backend: Backend) -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
    snapshot = backend.sample(ALL_FIELDS)
    after = time.clock_gettime(time.CLOCK_BOOTTIME), time.time()

    assert before[0] <= snapshot.clock <= after[0]
    assert before[1] <= snapshot.taken_at <= after[1]
    assert snapshot.host == os.uname().nodename


@pytest.mark.parametrize("machine", LISTING, indirect=True)
def test_a_process_is_listed_with_its_identity_until_it_dies(machine: ListsProcesses, backend: Backend) -> None:
    with machine.busy(2) as job:
        device = backend.sample({model.MEMORY, model.IDLE_PROCESSES}).devices[2]
        (process,) = device.processes or ()
        assert (process.pid, process.memory_used, process.uid) == (job.pid, GIB, os.getuid())
        assert process.start_time and process.user is None
        job.kill()

        assert eventually(lambda: backend.sample({model.MEMORY, model.IDLE_PROCESSES}).devices[2].processes == ())


@pytest.mark.parametrize("machine", LISTING, indirect=True)
def test_the_details_say_who_a_process_is(machine: ListsProcesses, backend: Backend) -> None:
    with machine.busy(2):
        (process,) = backend.sample(WHO_FIELDS).devices[2].processes or ()

    assert process.user and process.command and process.executable


def test_a_lost_device_is_named_and_hides_no_other(machine: Machine, backend: Backend) -> None:
    healthy = backend.sample(WHO_FIELDS)
    machine.lose(1)
    snapshot = backend.sample(WHO_FIELDS)
    lost = snapshot.devices[1]

    assert (lost.uuid, lost.problems) == (healthy.devices[1].uuid, ("lost",))
    assert (lost.memory_used, lost.processes, lost.utilization) == (None, None, None)
    assert gaps_of(snapshot, lost)
    assert [device.problems for device in snapshot.devices if device.index != 1] == [()] * 3


@pytest.mark.parametrize("machine", [FakeDriver, SimulatedNode, Program, KernelFilesOfAmd, AllVendors], indirect=True)
def test_instances_come_with_the_health_of_their_parent(machine: Divisible, opened: Callable[[], Backend]) -> None:
    machine.divide()
    backend = opened()
    snapshot = backend.sample(VERIFY_FIELDS)
    parent, first, second = snapshot.devices[1:4]

    assert [device.index for device in snapshot.devices] == [0, 1, 1, 1, 2, 3]
    assert (parent.mig_mode, parent.parent_uuid, first.parent_uuid, second.parent_uuid) == (
        True, None, parent.uuid, parent.uuid,
    )  # fmt: skip
    assert first.mig_profile == ("dpx" if parent.vendor == "amd" else "3g.40gb")
    assert first.memory_total and parent.memory_total
    assert 0.44 < first.memory_total / parent.memory_total <= 0.51  # drivers keep some of the whole for themselves
    assert first.utilization is None and "utilization" in gaps_of(snapshot, first)
    assert parent.vendor == "amd" or (parent.utilization is None and "utilization" in gaps_of(snapshot, parent))
    assert [device.uuid for device in backend.sample(SELECT_FIELDS).devices if device.parent_uuid] == []
    assert second.uuid in [device.uuid for device in opened().sample(SELECT_FIELDS, [second.uuid]).devices]


def test_the_topology_has_each_pair_of_devices_once(backend: Backend) -> None:
    snapshot = backend.sample({model.TOPOLOGY, model.NVLINK})
    if snapshot.topology is None:
        assert "topology" in {gap.field for gap in snapshot.gaps}
        return
    pairs = [frozenset(pair[:2]) for pair in snapshot.topology]
    of_one_vendor = sum(comb(count, 2) for count in Counter(device.vendor for device in snapshot.devices).values())

    assert len(pairs) == len(set(pairs)) == of_one_vendor
    assert {how for *_, how in snapshot.topology} <= {"NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS"}


def test_closing_twice_is_closing_once(backend: Backend) -> None:
    backend.sample(SELECT_FIELDS)
    backend.close()
    backend.close()


# What the worker of a backend relies on, so that a call that hangs costs one device.

ASK = """
import json, sys
from gpuguard.backends import open_backend
from gpuguard.model import WHO_FIELDS
backend, marks = open_backend(sys.argv[1]), []
backend.progress, backend.skip, backend.ahead = marks.append, {2}, False
devices = backend.sample(WHO_FIELDS).devices
print(json.dumps([marks, [device.problems for device in devices if device.index == 2]]))
"""


def breaches(name: str, **environment: str) -> list[str]:
    """What the backend *name*, of four devices, does wrong when its third device must not be touched."""
    words = [sys.executable, "-c", ASK, name]
    environment = {**os.environ, **environment}
    done = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        return [done.stderr.splitlines()[-1]]
    marks, skipped = json.loads(done.stdout)
    tells = set(marks) == {None} or set(marks) - {2, None} == {0, 1, 3}  # a program reads all of them at once
    spares = 2 not in marks and skipped in ([], [["unresponsive"]])
    return ["it does not say what it reads"] * (not tells) + ["it reads what it must skip"] * (not spares)


@pytest.mark.parametrize("machine", ALONE, indirect=True)  # several backends are tried one by one
def test_it_says_which_device_it_reads_and_skips_those_that_hang(machine: Machine) -> None:
    assert breaches(machine.name) == []


BY_THE_BOOK = '''
"""Four devices, written by what CONTRIBUTING.md says; the second one of `--backend toy:hang` never answers."""

import os
import time

from gpuguard.model import Device, Snapshot
from gpuguard.procfs import boot_clock


def open(spec):
    return Toy(hangs=spec == "hang")


class Toy:
    name = "toy"
    simulated = False

    def __init__(self, hangs):
        self.hangs = hangs
        self.progress = lambda index: None
        self.skip = ()
        self.ahead = False

    def sample(self, fields, devices=None):
        taken_at, clock = time.time(), boot_clock()
        found = [self.read(index) for index in range(4) if index not in self.skip]
        wanted = tuple(device for device in found if devices is None or device.uuid in devices)
        return Snapshot(os.uname().nodename, self.name, taken_at, clock, wanted)

    def read(self, index):
        self.progress(index)
        while self.hangs and index == 1:
            time.sleep(60)
        return Device(index, f"TOY-{index}", memory_total=2**30, memory_used=0, memory_free=2**30, problems=())

    def close(self):
        pass
'''


def with_the_backend(place: Path, source: str) -> dict[str, str]:
    """The environment in which gpuguard has one backend more, the module *source*: its file and its row."""
    package = place / "gpuguard"
    for folder in (package, package / "backends"):
        folder.mkdir()
        for path in (PACKAGE / folder.relative_to(package)).iterdir():
            if path.name not in ("backends", "__pycache__"):
                (folder / path.name).symlink_to(path)
    (package / "backends" / "toy.py").write_text(source, encoding="utf-8")
    rows = (PACKAGE / "backends" / "__init__.py").read_text(encoding="utf-8")
    (package / "backends" / "__init__.py").unlink()
    (package / "backends" / "__init__.py").write_text(
        rows.replace("BACKENDS = {\n", 'BACKENDS = {\n    "toy": "four devices",\n'), encoding="utf-8"
    )
    return {"PYTHONPATH": str(place), "GPUGUARD_DIR": str(place / "claims")}


def who(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "gpuguard", "who", "--json", "--backend", name]
    environment = {**os.environ, **environment}
    return subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, check=False)


def test_a_call_that_hangs_in_a_backend_by_the_book_costs_one_device(tmp_path: Path) -> None:
    environment = with_the_backend(tmp_path, BY_THE_BOOK)
    shown = who("toy:hang", environment)

    assert [device["problems"] for device in json.loads(shown.stdout)["devices"]] == [[], ["unresponsive"], [], []]
    assert breaches("toy", **environment) == []


@pytest.mark.parametrize("name", ["progress", "skip", "ahead"])
def test_a_backend_that_lacks_what_its_worker_needs_is_refused(tmp_path: Path, name: str) -> None:
    environment = with_the_backend(tmp_path, re.sub(rf"self\.{name} = .*", "pass", BY_THE_BOOK))
    refused = who("toy", environment)

    assert refused.returncode == errors.EXIT_NO_DRIVER
    assert "the backend toy" in refused.stderr and "CONTRIBUTING.md" in refused.stderr


@pytest.mark.parametrize(
    ("line", "breach"),
    [
        ("self.progress(index)", "it does not say what it reads"),
        ("if index not in self.skip", "it reads what it must skip"),
    ],
)
def test_a_planted_breach_of_the_contract_is_found(tmp_path: Path, line: str, breach: str) -> None:
    environment = with_the_backend(tmp_path, BY_THE_BOOK.replace(line, "pass" if "(" in line else ""))

    assert breaches("toy", **environment) == [breach]
