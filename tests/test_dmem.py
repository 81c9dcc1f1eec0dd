"""The controller dmem of the kernel's cgroups: who holds memory of a GPU, and the share that the kernel keeps."""

from __future__ import annotations

import errno
import io
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from amd_trees import MI300X_DPX, NAVI31, STRIX_HALO, AmdTree, TreeGpu
from intel_trees import ASLEEP, B580, MAX_1550, METEOR_LAKE, IntelTree
from nvml_child import gaps_of
from own_claims import acquire

from gpuguard.backends import amd, dmem, drm, intel
from gpuguard.claims.directory import LockDirectory
from gpuguard.cli import build_parser, run
from gpuguard.cli.doctor import driver_of
from gpuguard.cli.job_log import JobLog, JobReport
from gpuguard.errors import BackendError
from gpuguard.jobs import kernel_share
from gpuguard.jobs.kernel_share import keep_share
from gpuguard.model import HEALTH, MEMORY, SELECT_FIELDS, WHO_FIELDS, Device
from gpuguard.request import Request
from gpuguard.run import JobEnd
from gpuguard.users import user_name
from gpuguard.vendors import AMD, INTEL, NVIDIA

GIB = 2**30
MINE = "user.slice/user-1000.slice/mine.scope"
ALONE = {"cgroup.procs": f"{os.getpid()}\n", "cgroup.stat": "nr_descendants 0\nnr_dying_descendants 3\n"}


def cgroups(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below the folder of all cgroups, which this returns."""
    folder = root / "sys/fs/cgroup"
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="ascii")
    return folder


def counted(address: str, *sizes: int) -> str:
    """A file of the controller: the bytes of each tile of a GPU, and those of things that are no GPU."""
    lines = [f"drm/{address}/vram{tile} {size}" for tile, size in enumerate(sizes)]
    return "\n".join(["cma/reserved 7", "drm/0000:99:00.0/vram 12345", f"drm/{address}/stolen 9", *lines, ""])


def seen_by_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """This user may not look into the processes of others."""
    monkeypatch.setattr(drm.ClientScanner, "read", lambda self, **_: drm.Clients((), hidden=True))


# Who holds memory


def test_who_holds_memory_is_the_user_or_else_the_service_or_container(tmp_path: Path) -> None:
    cgroups(
        tmp_path,
        {
            "dmem.current": counted("0000:03:00.0", 30 * GIB),
            "user.slice/dmem.current": counted("0000:03:00.0", 20 * GIB),
            "user.slice/user-4242424.slice/dmem.current": counted("0000:03:00.0", 12 * GIB, 8 * GIB),
            "user.slice/user-4242425.slice/dmem.current": counted("0000:03:00.0", 0),
            "system.slice/dmem.current": counted("0000:03:00.0", 9 * GIB),
            "system.slice/docker-4f5e.scope/dmem.current": counted("0000:03:00.0", 9 * GIB),
            "system.slice/cron.service/cgroup.procs": "1\n",
            "kubepods/dmem.current": counted("0000:03:00.0", GIB),
            "kubepods/pod1/cgroup.procs": "1\n",
            "init.scope/cgroup.procs": "1\n",
        },
    )

    assert dmem.held(str(tmp_path))["0000:03:00.0"] == {
        user_name(4242424): 20 * GIB,
        "docker-4f5e.scope": 9 * GIB,
        "kubepods": GIB,
    }


@pytest.mark.parametrize("vendor", ["amd", "intel"])
def test_where_processes_are_hidden_a_gap_says_who_holds_memory(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_by_a_user(monkeypatch)
    if vendor == "amd":
        tree = AmdTree(tmp_path, NAVI31, NAVI31)
        backend: Any = amd.open(str(tree.root))
        address, field = tree.devices[0].name, "processes of other users"
    else:
        machine = IntelTree(tmp_path, (B580,))
        backend, address, field = intel.open(str(tmp_path), machine.clock), B580.address, "processes"
    (plain,) = (gap.reason for gap in backend.sample(WHO_FIELDS).gaps if gap.field == field)
    cgroups(tmp_path, {"a.service/dmem.current": counted(address, GIB), "b/dmem.current": counted(address, 2 * GIB)})
    snapshot = backend.sample(WHO_FIELDS)

    first, *others = snapshot.devices
    assert [gap.is_of_this_user for gap in snapshot.gaps if gap.field == "processes"] == [True] * (vendor == "intel")
    assert gaps_of(snapshot, first)[field] == f"{plain}; its memory is held by b 2.0GiB, a.service 1.0GiB"
    assert [gaps_of(snapshot, device)[field] for device in others] == [plain for _ in others]


# The size of a GPU that sleeps


def an_intel(tmp_path: Path, *cards: Any) -> Device:
    tree = IntelTree(tmp_path, cards)
    return intel.open(str(tmp_path), tree.clock).sample(SELECT_FIELDS).devices[0]


def test_a_sleeping_gpu_that_was_never_awake_has_its_size_and_use(tmp_path: Path) -> None:
    asleep = an_intel(tmp_path / "untold", ASLEEP)
    for name, size in (("capacity", 12 * GIB), ("current", GIB)):
        cgroups(tmp_path / "told", {f"dmem.{name}": counted(ASLEEP.address, size)})
    told = an_intel(tmp_path / "told", ASLEEP)

    assert (asleep.memory_total, asleep.memory_free) == (None, None)
    assert (told.memory_total, told.memory_used, told.memory_free) == (12 * GIB, GIB, 11 * GIB)


def test_what_the_driver_does_not_tell_this_user_the_controller_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_by_a_user(monkeypatch)
    cgroups(tmp_path, {"dmem.capacity": counted(MAX_1550.address, 60 * GIB, 60 * GIB)})
    cgroups(tmp_path, {"dmem.current": counted(MAX_1550.address, GIB, 2 * GIB)})
    tree = IntelTree(tmp_path, (replace(MAX_1550, used=0),))
    backend = intel.open(str(tmp_path), tree.clock)
    used = backend.sample(SELECT_FIELDS).devices[0]
    (tmp_path / "dev/dri/renderD128").unlink()
    closed = intel.open(str(tmp_path), tree.clock).sample(SELECT_FIELDS).devices[0]

    assert (used.memory_total, used.memory_used) == (128 * GIB, 3 * GIB)
    assert (closed.memory_total, closed.memory_used) == (120 * GIB, 3 * GIB)


def test_a_gpu_that_is_not_counted_is_unknown_and_not_empty(tmp_path: Path) -> None:
    cgroups(tmp_path, {"dmem.current": counted("0000:03:00.0", GIB)})

    with pytest.raises(drm.NotTold, match="does not tell it"):
        dmem.amount("current", str(tmp_path), "0000:04:00.0")


def test_the_memory_of_an_integrated_gpu_is_not_counted(tmp_path: Path) -> None:
    cgroups(tmp_path, {"dmem.current": counted(METEOR_LAKE.address, GIB)})

    assert an_intel(tmp_path, METEOR_LAKE).memory_used == 0


def test_the_doctor_says_that_the_kernel_counts(tmp_path: Path) -> None:
    AmdTree(tmp_path, NAVI31)
    address = next(iter(drm.cards(str(tmp_path), AMD))).address
    assert not driver_of(AMD, str(tmp_path)).counted

    cgroups(tmp_path, {"dmem.capacity": counted(address, GIB)})
    assert [driver_of(vendor, str(tmp_path)).counted for vendor in (AMD, INTEL, NVIDIA)] == [True, False, False]


# The share of a job


@dataclass
class Shared:
    """A claim with a share, as far as the kernel must know it."""

    devices: tuple[Device, ...]
    memory: int | None = 5 * GIB


REFUSED = str(9 * 10**18)  # a limit that cannot be changed


class Limits(io.StringIO):
    """A file of limits that is written: the kernel changes the region that is named, and refuses what is none."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        """Let the kernel read what was written."""
        lines = dict(line.split(" ") for line in self._path.read_text(encoding="ascii").splitlines())
        name, _, limit = self.getvalue().strip().partition(" ")
        if lines.get(name) == REFUSED:
            raise OSError(errno.EINVAL, "Invalid argument")
        lines[name] = limit
        self._path.write_text("".join(f"{region} {amount}\n" for region, amount in lines.items()), encoding="ascii")
        super().close()


class Machine:
    """A machine with the GPUs of AMD, where this process is in a cgroup that may be limited."""

    def __init__(self, root: Path, *gpus: TreeGpu) -> None:
        self.tree = AmdTree(root, *gpus)
        self.addresses = [device.name for device in self.tree.devices]
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n0::/{MINE}\n", encoding="ascii")
        mount = "25 22 0:23 / /sys/fs/cgroup rw - cgroup2 c rw\n"
        (root / "proc/self/mountinfo").write_text(mount, encoding="ascii")
        self.own = cgroups(root, {f"{MINE}/{name}": text for name, text in ALONE.items()}) / MINE
        self.limit(**{f"drm/{address}/vram": "max" for address in self.addresses})

    def limit(self, **limits: str) -> None:
        """Set the limits that there are."""
        lines = {"drm/0000:99:00.0/vram": "max", **limits}
        (self.own / "dmem.max").write_text("".join(f"{name} {limit}\n" for name, limit in lines.items()), "ascii")

    @property
    def limits(self) -> list[str]:
        """The limits of the GPUs, in their order."""
        lines = dict(line.split(" ") for line in (self.own / "dmem.max").read_text(encoding="ascii").splitlines())
        assert lines["drm/0000:99:00.0/vram"] == "max"
        return [lines[f"drm/{address}/vram"] for address in self.addresses]

    def keep(self, memory: int | None = 5 * GIB, *, backend: Any = None) -> Callable[[], object] | None:
        """Let the kernel keep a claim on all devices; partitions instead of GPUs that have some."""
        opened = amd.open(str(self.tree.root))
        devices = opened.sample({HEALTH, MEMORY}).devices
        parents = {device.parent_uuid for device in devices}
        claim: Any = Shared(tuple(device for device in devices if device.uuid not in parents), memory)
        return keep_share(claim, backend or opened, str(self.tree.root))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of limits are written as those of the kernel are."""
    real = open
    monkeypatch.setattr(
        "builtins.open",
        lambda path, mode="r", **how: (
            Limits(Path(path)) if mode == "w" and str(path).endswith("dmem.max") else real(path, mode, **how)
        ),
    )


@pytest.mark.usefixtures("kernel")
def test_the_kernel_keeps_a_job_to_its_share_of_each_gpu_until_it_has_ended(tmp_path: Path) -> None:
    machine = Machine(tmp_path, NAVI31, NAVI31)
    lift = machine.keep()

    assert machine.limits == [str(5 * GIB)] * 2
    assert lift
    lift()
    assert machine.limits == ["max"] * 2


@pytest.mark.usefixtures("kernel")
def test_a_lower_limit_stays(tmp_path: Path) -> None:
    machine = Machine(tmp_path, NAVI31, NAVI31)
    sizes = dict(zip(machine.addresses, (GIB, 6 * GIB), strict=True))
    machine.limit(**{f"drm/{address}/vram": str(size) for address, size in sizes.items()})
    lift = machine.keep()

    assert machine.limits == [str(GIB), str(5 * GIB)]
    assert lift
    lift()
    assert machine.limits == [str(GIB), str(6 * GIB)]


@pytest.mark.usefixtures("kernel")
def test_shares_of_several_partitions_are_one_limit_of_their_gpu(tmp_path: Path) -> None:
    machine = Machine(tmp_path, MI300X_DPX)

    assert machine.keep()
    assert machine.limits == [str(10 * GIB)]


OTHER_PLACES = {
    "in another version": ("proc/self/cgroup", "4:memory:/x\n"),
    "without /proc": ("proc/self/cgroup", None),
    "without the controller": ("dmem.max", None),
    "beside another process": ("cgroup.procs", f"{os.getppid()}\n{os.getpid()}\n"),
    "outside of what can be seen": ("cgroup.procs", ""),
    "with cgroups below": ("cgroup.stat", "nr_descendants 1\n"),
    "where no GPU is counted": ("dmem.max", "drm/0000:99:00.0/vram max\n"),
    "where one GPU is refused": (
        "dmem.max",
        f"drm/0000:99:00.0/vram max\ndrm/0000:03:00.0/vram max\ndrm/0000:23:00.0/vram {REFUSED}\n",
    ),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("name", "text"), OTHER_PLACES.values(), ids=OTHER_PLACES)
def test_elsewhere_nothing_is_limited(name: str, text: str | None, tmp_path: Path) -> None:
    machine = Machine(tmp_path, NAVI31, NAVI31)
    file = (tmp_path if name.startswith("proc/") else machine.own) / name
    file.unlink()
    if text is not None:
        file.write_text(text, encoding="ascii")
    limits = machine.own / "dmem.max"
    before = limits.exists() and limits.read_text(encoding="ascii")

    assert machine.keep() is None
    assert (limits.exists() and limits.read_text(encoding="ascii")) == before


@pytest.mark.usefixtures("kernel")
def test_a_gpu_without_memory_of_its_own_or_a_claim_without_a_share_is_not_limited(tmp_path: Path) -> None:
    integrated, whole = Machine(tmp_path / "a", STRIX_HALO), Machine(tmp_path / "b", NAVI31)

    assert (integrated.keep(), integrated.limits) == (None, ["max"])
    assert (whole.keep(memory=None), whole.limits) == (None, ["max"])


def test_a_driver_that_fails_now_limits_nothing(tmp_path: Path) -> None:
    class Silent:
        def sample(self, *_: object) -> None:
            raise BackendError("silent")

    assert Machine(tmp_path, NAVI31).keep(backend=Silent()) is None


def test_an_own_worker_beside_this_process_is_no_other_process(tmp_path: Path, kernel: None) -> None:
    machine = Machine(tmp_path, NAVI31)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        (machine.own / "cgroup.procs").write_text(f"{os.getpid()}\n{child.pid}\n", encoding="ascii")
        kept = machine.keep()
        assert child.stdin
        child.stdin.close()

    assert kept is not None


@pytest.mark.parametrize("kept", [True, False])
def test_run_says_that_the_kernel_keeps_a_share_until_the_job_has_ended(
    kept: bool,
    tmp_path: Path,
    directory: LockDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    happened: list[str] = []
    backend = amd.open(str(AmdTree(tmp_path, NAVI31).root))
    backend.simulated = False
    claim = acquire(backend, Request(share=True, memory=5 * GIB), directory)
    ended = JobEnd(status=7, die_of=None, wall_time=1.0, outcome="settled")
    monkeypatch.setattr(run, "run", lambda *_, **__: happened.append("the job") or ended)
    lift = (lambda: happened.append("lifted")) if kept else None
    monkeypatch.setattr(kernel_share, "keep_share", lambda claim, backend: lift)
    args, log = build_parser("run").parse_args(["--share", "--memory", "5GiB", "--", "true"]), JobLog()
    report = JobReport(log, (), ["true"])

    assert run.run_on(claim, run.parsed(args), backend, directory, report, waited=0.0) == 7
    assert happened == (["the job", "lifted"] if kept else ["the job"])
    assert ("the kernel keeps it to 5.0GiB of each GPU" in capfd.readouterr().err) is kept
    claim.release()
