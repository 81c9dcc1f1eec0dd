"""What is wrong with a machine, and what to do."""

import grp
import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from builders import a_device, a_mig_instance, a_process, a_snapshot

from gpuguard.backends import BACKENDS
from gpuguard.batch.dispatchers import StalledJobs
from gpuguard.claims.directory import daemon_files
from gpuguard.claims.disk_room import Room, RoomUsage
from gpuguard.cli import doctor as doctor_command
from gpuguard.cli.doctor import driver_of, drivers_of
from gpuguard.errors import DriverMismatch, DriverNotFound, DriverUnresponsive
from gpuguard.model import Gap, Snapshot
from gpuguard.sanitize import display_width
from gpuguard.vendors import AMD, INTEL, MTHREADS, NVIDIA
from gpuguard.views.doctor import (
    CHECKS,
    DRIVER_CHECKS,
    FAULT,
    OK,
    WARNING,
    DoctorFacts,
    DriverFacts,
    checks,
    to_text,
    worst,
)

HEALTHY = DoctorFacts(
    host="node1",
    backend="nvml",
    uid=1001,
    snapshot=a_snapshot(a_device(persistence_mode=True)),
    answer_seconds=0.03,
    drivers=(DriverFacts(NVIDIA, ("nvidia",), "550.54.15", nodes={"/dev/nvidia0": True, "/dev/nvidiactl": True}),),
    lock_path="/run/gpuguard",
    lock_owner=0,
    file_system="tmpfs",
    first_pid_namespace=True,
    hidepid="",
    protected_regular=2,
    python="3.11.7",
    packages={"gpuguard": "0.1.0", "nvidia-ml-py": "13.0", "psutil": "7.0"},
)


def found(name, **facts):
    return {check.name: check for check in checks(replace(HEALTHY, **facts))}[name]


def without_driver(error, **facts):
    return {"error": error, "snapshot": None, "library_error": "cannot open", **facts}


def test_a_healthy_machine_has_nothing_to_do():
    assert worst(checks(HEALTHY)) == OK
    assert to_text(HEALTHY, checks(HEALTHY))[-1] == "Everything is fine."


@pytest.mark.parametrize(
    ("backend", "absent"),
    [
        ("smi:node7.xml", {"library", "lock directory", "container"}),
        ("replay:node7.rec", {"library", "lock directory", "container"}),
        ("simulated", {"library", "versions", "persistence mode"}),
        ("smi", {"library"}),
    ],
)
def test_what_a_backend_does_not_need_is_not_asked_for(backend, absent):
    facts = replace(HEALTHY, backend=backend, library_error="none", lock_error="of another time", container="docker")

    assert not absent & {check.name for check in checks(facts)}
    assert ":" not in backend or worst(checks(facts)) == OK


ROOM = Room("/run/gpuguard/claims", True, 64 * 2**20, 63 * 2**20, 16384, 16372, (RoomUsage(0, 11, 2**20),))
FILLED = replace(ROOM, files_free=2000, taken=(RoomUsage(2**22 + 7, 14000, 2 * 2**20), RoomUsage(0, 11, 2**20)))
NO_GPU = without_driver(DriverNotFound("none"), drivers=())
DIVIDED = a_device(mig_mode=True)
AMDS = DriverFacts(AMD, ("amdgpu",), "6.8.5", "ROCm 6.3.1", {"/dev/dri/renderD128": True, "/dev/kfd": True})
CLOSED = {"/dev/dri/renderD128": False, "/dev/kfd": False}
KEPT_OUT = replace(AMDS, nodes=CLOSED, groups=("render", "video"))
OF_AMD = a_device(vendor="amd", problems=("lost",))
DIAGNOSES = [
    ("kernel driver", {"drivers": (AMDS,)}, OK, "AMD: amdgpu 6.8.5, ROCm 6.3.1", None),
    ("kernel driver", {"drivers": (replace(AMDS, version=None, toolkit=None),)}, OK, "AMD: amdgpu", None),
    ("device nodes", {}, OK, "NVIDIA: you may open /dev/nvidia0, /dev/nvidiactl", None),
    ("device nodes", {"drivers": (KEPT_OUT,)}, FAULT,
     "AMD: you may not open /dev/dri/renderD128, /dev/kfd", "`sudo usermod -aG render,video $USER`, then log in again"),
    ("device nodes", {"drivers": (KEPT_OUT,), "container": "docker"}, FAULT, "not open", "--device /dev/kfd"),
    ("device nodes", {"drivers": (replace(AMDS, nodes={**CLOSED, "/dev/dri/renderD128": True}),)}, FAULT,
     "AMD: you may not open /dev/kfd", "`sudo dmesg | grep -i -e amdgpu` may say why"),
    ("device nodes", {"drivers": (replace(AMDS, nodes={**CLOSED, "/dev/kfd": True, "/dev/dri/renderD129": True}),)},
     WARNING, "AMD: you may not open /dev/dri/renderD128", "ls -l /dev"),
    ("device nodes", {"drivers": (DriverFacts(INTEL, ("xe",)),)}, FAULT,
     "Intel: there is no device node", "grep -i -e xe -e i915"),
    ("untried", {"drivers": (AMDS,)}, WARNING, "AMD: gpuguard was not tried", "with `rocm-smi`"),
    ("untried", {"drivers": (DriverFacts(INTEL),)}, WARNING, "Intel: gpuguard was not tried", "with `xpu-smi`"),
    ("untried", {"drivers": (DriverFacts(MTHREADS),)}, WARNING, "Moore Threads: gpuguard was not", "`mthreads-gmi`"),
    ("memory by cgroup", {"drivers": (replace(AMDS, counted=True),)}, OK, "AMD: the kernel counts it (dmem)", None),
    ("driver", {"snapshot": a_snapshot(gaps=(Gap(None, "amd devices", "it hangs"),))}, FAULT,
     "amd devices: it hangs", None),
    ("driver", without_driver(DriverUnresponsive("it hangs"), drivers=(AMDS,)), FAULT, "hangs", "grep -i -e amdgpu`"),
    ("devices", {"snapshot": a_snapshot(OF_AMD)}, FAULT, "unhealthy: GPU 0: lost", "grep -i -e amdgpu`.  Reboot"),
    ("devices", {"snapshot": replace(a_snapshot(), devices=()), "drivers": (AMDS,)}, FAULT, "no GPU", "-e amdgpu"),
    ("processes", {"snapshot": a_snapshot(a_device(vendor="amd", processes_plausible=False))}, WARNING,
     "no sense", None),
    ("audit log", {"full_log": "/var/log/x"}, FAULT, "no room for the next line of /var/log/x", "signals no process"),
    ("driver", NO_GPU, FAULT, "no driver of a GPU", "gpuguard sim start"),
    ("driver", {**NO_GPU, "container": "docker"}, FAULT, "container sees no GPU", "--gpus all"),
    ("driver", without_driver(DriverUnresponsive("the driver hangs")), FAULT, "the driver hangs", "dmesg"),
    ("library", without_driver(DriverNotFound("none")), FAULT, "cannot open", "Install"),
    ("library", {"library_error": "cannot open"}, FAULT, "", "--backend smi"),
    ("library", {**NO_GPU, "glibc": False, "container": "docker"}, FAULT, "needs glibc", "Debian"),
    ("driver", {**NO_GPU, "glibc": False, "container": "docker"}, FAULT, "no driver of a GPU", "gpuguard sim start"),
    ("versions", without_driver(DriverMismatch("x", "560.1", "550.2")), FAULT,
     "library 560.1, kernel module 550.2", "systemctl stop gpuguard"),
    ("versions", {"drivers": (DriverFacts(NVIDIA, version="535.1"),)}, WARNING, "535.1", "Reboot"),
    ("devices", {"snapshot": a_snapshot(a_device(problems=("lost",)), a_device())}, FAULT,
     "1 of 2 unhealthy: GPU 0: lost", "after `sudo systemctl stop gpuguard`"),
    ("devices", {"snapshot": replace(a_snapshot(), devices=())}, FAULT, "", None),
    ("devices", {"snapshot": a_snapshot(DIVIDED, a_mig_instance(DIVIDED))}, OK, "1 healthy, and 1 MIG instance", None),
    ("processes", {"snapshot": a_snapshot(a_device(processes=None))}, WARNING, "no process list of GPU 0", "memory"),
    ("processes", {"snapshot": a_snapshot(a_device(processes=(a_process(),), processes_plausible=False))}, WARNING,
     "no sense", "pip install -U nvidia-ml-py"),
    ("processes", {"snapshot": a_snapshot(a_device(processes_plausible=False)), "first_pid_namespace": False}, WARNING,
     "no sense", "--pid=host"),
    ("processes", {"snapshot": a_snapshot(a_device(processes=None, memory_used=None))}, FAULT,
     "neither a process list nor the memory in use of GPU 0", "No job gets such a GPU"),
    ("persistence mode", {"snapshot": a_snapshot(a_device(persistence_mode=False))}, WARNING, "off on 1 of 1", "-pm 1"),
    ("lock directory", {"lock_error": "it is writable for others"}, FAULT, "writable for others", None),
    ("lock directory", {"lock_path": "/run/lock", "lock_owner": None}, WARNING, "sticky", "sudo gpuguard setup"),
    ("lock directory", {"lock_path": "/home/x", "lock_owner": 1001}, WARNING,
     "of uid 1001 alone", "sudo gpuguard setup"),
    ("lock directory", {"lock_path": "/run/gpuguard", "lock_faults": ("x does not exist",)}, FAULT,
     "1 GPU cannot be claimed by you: x does not exist", None),
    ("room", {"room": replace(ROOM, own=False)}, WARNING,
     "on /run, which any user can fill", "`sudo gpuguard setup` gives"),
    ("room", {"room": replace(ROOM, own=False), "container": "docker"}, WARNING, "can fill", "on the host"),
    ("room", {"room": ROOM}, OK, "system of its own: 12 of 16,384 files and 1MiB of 64MiB are taken", None),
    ("room", {"room": FILLED}, WARNING,
     "4194311 has 14,000 of 16,384 files and 2MiB of 64MiB", "-user 4194311 -delete"),
    ("room", {"room": replace(FILLED, files_free=0)}, FAULT, "has 14,000", "position in the queue"),
    ("room", {"room": replace(ROOM, size_free=0)}, FAULT, "files without a name take 1 and 63MiB", "lsof +L1"),
    ("room", {"room": replace(ROOM, own=False, size_free=0), "lock_path": "/data/claims"}, FAULT,
     "no room for another record in /run/gpuguard/claims", "df -h"),
    ("daemon", {"daemon_silent": True}, WARNING, "the daemon of /run/gpuguard does not answer", "restart gpuguard"),
    ("daemon", {"daemon_trouble": "[::1]:9 cannot be had"}, WARNING, "does not serve its metrics: [::1]:9", "ss -ltnp"),
    ("daemon", {"daemon_fault": "/run/gpuguard/daemon is no directory"}, FAULT, "no directory", "sudo gpuguard setup"),
    ("pauses", {"left_paused": 1}, FAULT, "1 process is paused by a policy, and no daemon runs", "gpuguard resume"),
    ("pauses", {"left_paused": 2}, FAULT, "2 processes are paused by policies, and no daemon", "Start the daemon"),
    ("queue", {"line_path": "l", "line_faults": ("l:2:1: x",), "line_last_good": True}, FAULT,
     "1 fault, the first: l:2", "the last good l holds"),
    ("queue", {"line_path": "/etc/gpuguard/line.yaml"}, OK, "as /etc/gpuguard/line.yaml says", None),
    ("queue", {"line_path": "l", "line_faults": ("l:2:1: x", "y")}, FAULT,
     "2 faults, the first: l:2", "defaults"),
    ("pid namespace", {"first_pid_namespace": False}, WARNING, "container", "--pid=host"),
    ("hidepid", {"hidepid": "2"}, WARNING, "hidepid=2", "sudo gpuguard who"),
    ("hidepid", {"hidepid": "invisible", "uid": 0}, OK, "root", None),
    ("environment", {"outer": (0, "CUDA_VISIBLE_DEVICES is empty")}, WARNING, "empty", "Unset"),
    ("environment", {"outer": (1, "CUDA_VISIBLE_DEVICES=3 allows only GPU 3")}, WARNING, "only GPU 3", "Unset"),
    ("environment", {"environ": {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}}, WARNING, "FASTEST_FIRST", "PCI_BUS_ID"),
    ("container", {"container": "docker", "lock_path": "/run/lock"}, WARNING,
     "docker", "-v /run/gpuguard:/run/gpuguard"),
    ("jobs", {"stalled": (StalledJobs(54321, 2),)}, WARNING, "54321: 2 jobs in the queue", "`gpuguard jobs` of"),
    ("logout", {"logout": "ends"}, WARNING, "at logout", "loginctl enable-linger"),
    ("logout", {"logout": "needs a scope"}, OK, "stay, because yours linger", None),
    ("container", {"container": "docker"}, OK, "claims of the host", None),
    ("kernel", {"protected_regular": 1}, OK, "fs.protected_regular=1", None),
    ("kernel", {"protected_hardlinks": 0}, WARNING, "fs.protected_hardlinks=0", "sysctl -w fs.protected_hardlinks=1"),
    ("python", {"packages": {"psutil": None}}, FAULT, "psutil missing", "pip install psutil"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "status", "says", "advises"), DIAGNOSES)
def test_each_fault_is_named_with_what_to_do(name, facts, status, says, advises):
    check = found(name, **facts)

    assert check.status == status
    assert says in check.found
    assert (advises or "") in (check.advice or "")


def test_drivers_of_several_vendors_get_lines_of_their_own():
    lines = [(check.name, check.found) for check in checks(replace(HEALTHY, drivers=(*HEALTHY.drivers, KEPT_OUT)))]

    assert [found.partition(":")[0] for name, found in lines if name == "kernel driver"] == ["NVIDIA", "AMD"]
    assert [found.partition(":")[0] for name, found in lines if name == "device nodes"] == ["NVIDIA", "AMD"]


@pytest.mark.parametrize(
    ("backend", "drivers", "asked"),
    [("nvml", HEALTHY.drivers, True), ("nvml", (AMDS,), False), ("nvml", (), True), ("amd", (), False),
     ("nvml,amd", (*HEALTHY.drivers, AMDS), True)],
)  # fmt: skip
def test_the_library_of_nvidia_is_asked_for_where_nothing_else_can_be_meant(monkeypatch, backend, drivers, asked):
    monkeypatch.setitem(BACKENDS, "amd", "")

    assert asked is ("library" in {check.name for check in checks(replace(HEALTHY, backend=backend, drivers=drivers))})


def test_every_check_is_shown_to_find_something():
    # file system: an unsafe one is already an error of the lock directory
    assert {name for name, *_ in DIAGNOSES} == {*CHECKS, *DRIVER_CHECKS} - {"file system"}


def test_unknown_is_no_fault():
    names = "file_system first_pid_namespace hidepid protected_regular protected_hardlinks"
    nothing = dict.fromkeys(names.split())
    snapshot = a_snapshot(a_device(persistence_mode=None, problems=None), driver_version=None)

    assert worst(checks(replace(HEALTHY, snapshot=snapshot, drivers=(DriverFacts(NVIDIA),), **nothing))) == OK


@pytest.mark.parametrize("width", [None, 60, 80, 200])
def test_the_screen_fits_and_no_word_of_advice_is_lost(width):
    facts = replace(HEALTHY, **without_driver(DriverMismatch("x\x1b[2J\ny", "1", "2")), lock_error="no " * 60)
    lines = to_text(facts, checks(facts), width=width)
    text = " ".join(" ".join(lines).split())

    assert all(line.isprintable() for line in lines)
    assert width is None or all(display_width(line) <= width for line in lines)
    assert text.count("no ") >= 60
    assert all(" ".join(check.advice.split()) in text for check in checks(facts) if check.advice)


@pytest.fixture
def an_amd_machine(tmp_path: Path) -> str:
    """Files of the kernel that show one AMD GPU and the version of its driver, and its nodes."""
    device = "sys/class/drm/card1/device"
    texts = {
        f"{device}/uevent": "DRIVER=amdgpu\nPCI_ID=1002:74A1\nPCI_SLOT_NAME=0000:03:00.0\n",
        f"{device}/drm/renderD128/dev": "226:128\n",
        "sys/module/amdgpu/version": "6.8.5\n",
        "opt/rocm/.info/version": "6.3.1-48\n",
        "dev/dri/renderD128": "",
        "dev/kfd": "",
    }
    for name, text in texts.items():
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


def test_what_the_kernel_shows_of_a_driver_is_found(an_amd_machine):
    expected = DriverFacts(AMD, ("amdgpu",), "6.8.5", "ROCm 6.3.1-48", {"/dev/dri/renderD128": True, "/dev/kfd": True})

    assert driver_of(AMD, an_amd_machine) == expected
    assert driver_of(INTEL, an_amd_machine) == DriverFacts(INTEL)


def test_of_a_node_that_is_closed_the_group_is_named_whose_members_may_open_it(an_amd_machine, monkeypatch):
    group = grp.getgrgid(max(os.getgid(), 1))
    for name, mode in (("kfd", 0o660), ("dri/renderD128", 0o600)):
        os.chown(f"{an_amd_machine}/dev/{name}", -1, group.gr_gid)
        os.chmod(f"{an_amd_machine}/dev/{name}", mode)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = driver_of(AMD, an_amd_machine)

    assert (found.groups, set(found.nodes.values())) == ((group.gr_name,), {False})


def test_a_driver_without_files_in_sys_is_found_by_its_nodes(tmp_path):
    for name in ("sys/module/nvidia", "dev"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    found = driver_of(NVIDIA, str(tmp_path))

    assert (found.modules, list(found.nodes)) == (("nvidia",), ["/dev/nvidia0", "/dev/nvidiactl"])


def test_the_drivers_are_those_of_the_devices_or_without_any_those_that_are_here(monkeypatch):
    here = {"nvidia": DriverFacts(NVIDIA), "amd": AMDS, "intel": DriverFacts(INTEL, ("i915",))}
    monkeypatch.setattr(doctor_command, "driver_of", lambda vendor: here.get(vendor.name, DriverFacts(vendor)))

    def names(backend: str, snapshot: Snapshot | None) -> list[str]:
        return [driver.vendor.name for driver in drivers_of(backend, snapshot)]

    assert names("auto", a_snapshot(a_device(), a_device(vendor="amd"))) == ["nvidia", "amd"]
    assert names("auto", None) == ["amd", "intel"]
    assert names("nvml", a_snapshot(a_device())) == ["nvidia"]
    assert names("smi", a_snapshot(a_device())) == ["nvidia"]
    assert names("simulated", a_snapshot(a_device())) == []


@pytest.fixture
def doctor(node, command):
    return lambda *words: command("doctor", *words)


def test_the_command_is_content_with_a_simulated_node(doctor):
    status, said, _ = doctor()

    assert status == 0 and said.startswith("SIMULATED node on ")


def test_the_command_reads_the_file_of_the_queue(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUGUARD_LINE", str(tmp_path / "line.yaml"))
    (tmp_path / "line.yaml").write_text("half_life: 7d\nbond: 24h\n")
    status, said, _ = doctor()

    assert status == 1 and "line.yaml:2:1: " in said


@pytest.mark.parametrize(
    ("place", "mode", "says"),
    [(".", 0o777, "writable for others"), ("daemon", 0o775, "mode 0775"), ("daemon", None, "is no directory")],
)
def test_a_directory_that_cannot_be_trusted_is_a_fault_with_exit_code_1(doctor, directory, place, mode, says):
    path = Path(directory.path, place)
    if mode is None:
        path.touch()
    else:
        path.mkdir(exist_ok=True)
        path.chmod(mode)
    status, said, _ = doctor("--dir", directory.path)

    assert status == 1 and says in said


def test_a_daemon_that_was_killed_is_a_warning(doctor, directory):
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(daemon_files(directory).file("daemon.sock"))
    status, said, _ = doctor("--dir", directory.path)

    assert status == 0 and "does not answer: it hangs, or was killed" in said


def test_a_machine_without_a_driver_gives_exit_code_4_and_its_findings(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    status, said, _ = doctor("--backend", "nvml", "--json")

    assert status == 4
    assert {check["name"]: check["status"] for check in json.loads(said)["checks"]}["driver"] == FAULT
