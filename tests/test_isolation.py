"""An isolated job reaches the nodes of its own devices and of no others; and is otherwise a job like any other."""

import os
import shlex
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import Machine as Nodeless
from builders import a_device
from chances import luck
from fake_nvml import FakeNvml
from hypothesis import given
from hypothesis import strategies as st
from nodes import SECONDS, Gpuguard, until
from nodes_of_devices import OPEN, can_have_private_dev, private_dev
from proc import state
from sources import ROOT
from test_job_control import COUNT, Terminal
from users import ALICE, BOB, Machine, interpreter

from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory
from gpuguard.clusters.device_variables import renumbered
from gpuguard.errors import GpuguardError
from gpuguard.jobs import isolation
from gpuguard.jobs.isolation import Nodes, filter_program
from gpuguard.vendors import AMD, INTEL, NVIDIA

DEVICES = 4
ALL = [f"/dev/nvidia{index}" for index in range(DEVICES)]
CAPABILITIES = (
    "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi2/access 21\ngpu2/gi1/access 92\n"
)


def spaces() -> str:
    """Why bubblewrap cannot be tested here, "" when it can."""
    if not can_have_private_dev():
        return "jobs in bubblewrap (no root with mount namespaces, or a chroot)"
    if not shutil.which("bwrap"):
        return "jobs in bubblewrap (no bwrap: apt-get install bubblewrap)"
    tried = ["setpriv", f"--reuid={ALICE.pw_uid}", "--clear-groups", "bwrap", "--dev-bind", "/", "/", "true"]
    done = subprocess.run(tried, capture_output=True, text=True, cwd="/")
    return f"jobs in bubblewrap ({done.stderr.strip()})" if done.returncode else ""


def isolated(test: Any) -> Any:
    """A test of root's that needs a user's namespace."""
    return pytest.mark.root(pytest.mark.skipif(bool(UNTESTED), reason=UNTESTED or "can be had")(test))


UNTESTED = spaces()


def test_a_job_has_the_nodes_of_its_devices_and_those_that_all_share():
    nodes = Nodes(frozenset({1, 3}))

    assert [minor for minor in range(256) if not nodes.hides(195, minor)] == [1, 3, *range(248, 256)]
    assert not any(nodes.hides(major, minor) for major in (1, 5, 226, 510) for minor in range(256))


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "minors").write_text(CAPABILITIES)
    (tmp_path / "devices").write_text(
        "Character devices:\n195 nvidia\n507 nvidia-caps\n508 nvidia-caps-imex-channels\n"
    )
    return {"minors": str(tmp_path / "minors"), "majors": str(tmp_path / "devices")}


def test_an_instance_has_its_own_capabilities_and_a_whole_device_those_of_its_instances_and_no_others(tables):
    instance = a_device(0, minor_number=0, parent_uuid="GPU-x", gpu_instance_id=1, compute_instance_id=0)
    device = a_device(0, minor_number=2)
    nodes = isolation.nodes_of([instance], [instance], **tables)

    assert nodes == Nodes(frozenset({0}), frozenset({12, 13}), 507)
    assert [minor for minor in range(100) if not nodes.hides(507, minor)] == [12, 13]
    assert isolation.nodes_of([device], [device], **tables) == Nodes(frozenset({2}), frozenset({92}), 507)


def test_minors_are_those_of_the_driver_not_the_indices_and_an_unknown_one_is_none():
    assert isolation.nodes_of([a_device(0, minor_number=5)], [a_device(0)]).gpus == {5}
    with pytest.raises(GpuguardError, match="does not say which node GPU 3 has"):
        isolation.nodes_of([], [a_device(3, minor_number=None)])
    with pytest.raises(GpuguardError, match="does not say the numbers of MIG-1"):
        isolation.nodes_of([], [a_device(0, uuid="MIG-1", parent_uuid="GPU-x", gpu_instance_id=None)])


def test_a_job_on_gpus_of_amd_or_intel_has_their_render_nodes_and_no_other_node_of_a_gpu():
    """NVIDIA's GPUs are hidden, too.  A control node such as /dev/kfd, whose major number is no GPU's, stays."""
    for vendor in (AMD, INTEL):
        nodes = Nodes(frozenset({128, 130}), vendor=vendor)

        assert [minor for minor in range(300) if not nodes.hides(226, minor)] == [128, 130]
        assert nodes.hides(226, 2**20 - 1), "the minors of DRM go so far where there are many GPUs"
        assert [minor for minor in range(256) if not nodes.hides(195, minor)] == list(range(248, 256))
        assert not nodes.hides(234, 0)


def test_a_partition_of_an_amd_gpu_has_a_render_node_of_its_own_and_no_capabilities(tables):
    part = a_device(0, vendor="amd", minor_number=129, uuid="XCP-1-1", parent_uuid="GPU-1", gpu_instance_id=1)
    nodes = isolation.nodes_of([part], [part], **tables)

    assert nodes == Nodes(frozenset({129}), vendor=AMD)
    assert isolation.needed(nodes, "/dev") == ["/dev/kfd", "/dev/dri/renderD129"]
    assert isolation.needed(Nodes(frozenset({128}), vendor=INTEL), "/x") == ["/x/dri/renderD128"]


def test_where_the_nodes_of_a_vendor_are_not_known_the_job_is_refused():
    device = a_device(0, vendor="mthreads")

    with pytest.raises(GpuguardError, match="nodes of Moore Threads cannot be hidden yet"):
        isolation.nodes_of([device], [device])


@pytest.mark.parametrize(
    ("vendor", "advice"),
    [("nvidia", "Run `nvidia-modprobe -u -c 0`"), ("amd", r"/dev/kfd, .*/renderD7 does not exist: load .*amdgpu")],
)
def test_nodes_that_are_missing_are_named_with_what_to_do(monkeypatch, tmp_path, vendor, advice):
    device, dev = a_device(0, vendor=vendor, minor_number=7), str(tmp_path)
    claim, directory = Claim("1dea", (device,), ()), LockDirectory(dev, dev, dev)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(GpuguardError, match=advice.replace("/dev", dev)):
        isolation.isolate(claim, Nodeless(device), directory, dev=dev)


def test_cuda_counts_the_devices_that_it_can_open():
    two = [a_device(2), a_device(5)]

    assert renumbered(two, by_uuid=False) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert renumbered(two, by_uuid=True) == {}
    assert renumbered([a_device(2, parent_uuid="GPU-x")], by_uuid=False) == {}


def test_rocm_and_level_zero_count_them_so_too():
    for vendor in (AMD, INTEL):
        two = [a_device(2, vendor=vendor.name), a_device(5, vendor=vendor.name, ordinal=3)]

        assert renumbered(two, by_uuid=False) == {vendor.visible: "0,1"}


def test_a_simulated_device_has_no_node_to_hide(tmp_path):
    done = Gpuguard(tmp_path, None)("run", "--isolate", "--", "true")

    assert (done.returncode, "a simulated GPU has none" in done.stderr) == (125, True)


def test_without_bubblewrap_the_job_is_refused_and_told_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")

    with pytest.raises(GpuguardError, match="apt install bubblewrap"):
        isolation.check_bubblewrap()


def test_where_there_are_no_namespaces_the_job_is_refused_and_told_what_to_allow(monkeypatch, tmp_path):
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(GpuguardError, match=r"(?s)No permissions to create new namespace.*sysctl"):
        isolation.check_bubblewrap()


class Isolated:
    """A machine with DEVICES fake devices and their nodes, used by Alice."""

    def __init__(self, machine: Machine, prefix: list[str]) -> None:
        self.machine, self.prefix = machine, prefix
        self.environment = {**machine.environment, "PATH": "/usr/bin:/bin:/usr/sbin"}

    def words(self, *words: str) -> list[str]:
        return [*self.prefix, *self.machine.words(*words)]

    def __call__(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"env": self.environment, "cwd": "/", "stdin": subprocess.DEVNULL, **options}
        return subprocess.run(self.words(*words), capture_output=True, text=True, timeout=SECONDS, **options)

    def start(self, *words: str, under: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        words = (*self.prefix, *under, *self.machine.words(*words))
        return subprocess.Popen(words, env=self.environment, cwd="/", text=True, **pipes)


@pytest.fixture
def alice(site: Path, open_place: Path) -> Iterator[Isolated]:
    with FakeNvml(open_place, DEVICES) as fake, private_dev(open_place, DEVICES, {"renamed": (195, 2)}) as inside:
        yield Isolated(Machine(open_place, site, fake, "admin"), inside(ALICE))


def python(machine: Isolated, code: str, *words: str) -> list[str]:
    return [machine.machine.python_path, "-c", code, *words]


@isolated
@pytest.mark.parametrize("manner", [[], ["--exec"]], ids=["watched", "exec"])
def test_a_user_sees_only_the_claimed_nodes(alice, manner):
    paths = [*ALL, "/dev/renamed", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/null"]
    done = alice("run", "--devices", "1,3", "--isolate", *manner, "--", *python(alice, OPEN, *paths))

    assert dict(line.split() for line in done.stdout.splitlines()) == {
        "nvidia0": "ENOENT", "nvidia1": "ENXIO", "nvidia2": "ENOENT", "nvidia3": "ENXIO", "renamed": "ENOENT",
        "nvidiactl": "ENXIO", "nvidia-uvm": "ENXIO", "null": "opened",
    }, done.stderr  # fmt: skip


@isolated
def test_without_the_option_all_nodes_are_there(alice):
    done = alice("run", "--devices", "1", "--", *python(alice, OPEN, *ALL))

    assert done.stdout.split()[1::2] == ["ENXIO"] * DEVICES


ESCAPES = """
import os, subprocess, sys
outside = sys.argv[1]
def tried(what, *words):
    print(what, subprocess.run(words, capture_output=True).returncode != 0)
tried("mknod", "mknod", "/tmp/gpuguard-node", "c", "195", "0")
tried("mknod as root of a namespace", "unshare", "-Ur", "mknod", "/tmp/gpuguard-node", "c", "195", "0")
tried("umount", "umount", "/dev")
tried("umount as root of a namespace", "unshare", "-Urm", "umount", "/dev")
tried("through another process", "ls", f"/proc/{outside}/root/dev/nvidia0")
tried("the namespace of another process", "nsenter", f"--mount=/proc/{outside}/ns/mnt", "ls", "/dev/nvidia0")
"""


@isolated
def test_the_other_nodes_can_neither_be_made_nor_reached_by_a_detour(alice):
    with subprocess.Popen([*alice.prefix, "sleep", "60"]) as outside:
        done = alice("run", "--devices", "1", "--isolate", "--", *python(alice, ESCAPES, str(outside.pid)))
        outside.kill()

    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines()] == ["True"] * 6, done


SELF = """
import os
print(os.getcwd(), os.getppid())
print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GPUGUARD_GPUS"])
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapPrm", "NoNewPrivs"))))
"""


@isolated
def test_the_job_is_a_child_of_gpuguard_in_the_same_directory_without_rights_of_its_own(alice):
    words = ("run", "--devices", "2,3", "--isolate", "--", *python(alice, SELF))
    with alice.start(*words, under=("env", "-C", "/usr/share")) as wrapper:
        where, devices, rights = wrapper.stdout.read().splitlines()

    assert where == f"/usr/share {wrapper.pid}"
    assert devices == f"0,1 {','.join(alice.machine.uuids[2:4])}"
    assert rights.split() == ["0" * 16, "1"]


@isolated
def test_gpuguard_inside_an_isolated_job_divides_its_claim(alice):
    inner = alice.machine.words("run", "--no-wait", "--isolate", "--", *python(alice, OPEN, *ALL))
    done = alice("run", "--devices", "1,3", "--isolate", "--visible", "uuid", "--", *inner)
    whole = alice("run", "--devices", "1,3", "--isolate", "--visible", "uuid", "--", *alice.machine.words("select"))

    answers = done.stdout.split()[1::2]
    assert answers.count("ENXIO") == 1 and "ENXIO" in (answers[1], answers[3]), done.stderr
    assert whole.stdout in ("1\n", "3\n"), whole.stderr


@isolated
def test_what_is_denied_and_quarantined_outside_is_so_inside_an_isolated_job(alice):
    machine, go = alice.machine, alice.machine.place / "go"
    claim = shlex.join(machine.words("run", "--no-wait", "--", "true"))
    told = shlex.join(machine.words("select", "-n", "2"))
    inside = f"echo ready; while ! test -e {go}; do sleep 0.02; done; {told}; unset GPUGUARD_CLAIM; {claim}"
    words = ("run", "--devices", "1,3", "--isolate", "--visible", "uuid", "--", "sh", "-c", inside)
    with alice.start(*words) as job:
        assert job.stderr and job.stdout.readline() == "ready\n"
        for mark in (("deny", ALICE.pw_name, "--for", "1h"), ("quarantine", machine.uuids[3])):
            assert machine(None, *mark).returncode == 0
        go.touch()
        said = job.stderr.read()

    assert "GPU 3: quarantined by the administrator" in said, said
    assert f"GPU 1: new claims of {ALICE.pw_name} are denied by the administrator" in said, said


@isolated
def test_a_directory_of_another_user_is_not_trusted_inside_either(alice):
    other = alice.machine.place / "other"
    other.mkdir()
    os.chown(other, BOB.pw_uid, BOB.pw_gid)
    inner = alice.machine.words("run", "--no-wait", "--dir", str(other), "--", "true")
    done = alice("run", "--devices", "1", "--isolate", "--", *inner)

    assert (done.returncode, "who could replace the lock files" in done.stderr) == (125, True)


@isolated
def test_exit_codes_pass_through(alice):
    scripts = {"exit 7": 7, "kill -KILL $$": 137, "kill -TERM $$": 143}

    assert {script: alice("run", "--isolate", "--", "sh", "-c", script).returncode for script in scripts} == scripts
    assert alice("run", "--isolate", "--", "no-such-program").returncode == 127


@isolated
def test_a_node_that_is_not_made_yet_is_named_with_what_makes_it(alice):
    subprocess.run([*alice.prefix[:2], "rm", "/dev/nvidia-uvm"], check=True)

    done = alice("run", "--isolate", "--", "true")

    assert (done.returncode, done.stderr.count("/dev/nvidia-uvm does not exist yet")) == (125, 1)
    assert "nvidia-modprobe" in done.stderr and alice.machine.locked() == []


@isolated
def test_signals_reach_the_job_itself(alice):
    trap = "trap 'echo got; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    with alice.start("run", "--isolate", "--", "sh", "-c", trap) as wrapper:
        assert wrapper.stdout.readline() == "ready\n"
        wrapper.terminate()

        assert wrapper.wait(SECONDS) == 3
        assert wrapper.stdout.read() == "got\n"


@isolated
def test_an_isolated_job_keeps_its_claim_when_its_wrapper_is_killed(alice):
    chance = luck(10)
    for _ in range(10):
        with alice.start("run", "--devices", "2", "--isolate", "--", "sh", "-c", "echo $$; exec sleep 60") as wrapper:
            job = int(wrapper.stdout.readline())
            time.sleep(chance.random() * 0.05)
            wrapper.kill()
            wrapper.wait()

            assert alice.machine.locked() == [2]
            os.kill(job, signal.SIGKILL)
            until(lambda: alice.machine.locked() == [])


@isolated
@pytest.mark.terminal
def test_an_isolated_job_obeys_the_terminal(alice, monkeypatch):
    for name, value in alice.environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal("bash", "--norc", "--noprofile", "--noediting", "-i")
    try:
        terminal.expect("ready> ")
        script = alice.machine.place / "count.py"
        script.write_text("import os\nos.write(1, b'<pid %d>' % os.getpid())\n" + COUNT)
        words = alice.words("run", "--isolate", "--", alice.machine.python_path, str(script), "INT", "2")
        terminal.type(f"{shlex.join(words)}\n")
        job = int(terminal.expect(r"<pid (\d+)>")[1])
        terminal.expect("<started>")
        terminal.type("\x03")
        terminal.expect("<seen 1>")
        terminal.type("\x1a")
        terminal.expect("Stopped")
        terminal.type("fg\n")
        until(lambda: state(job) != "T")  # before that a Ctrl-C would be the shell's
        terminal.type("\x03")
        terminal.expect("<seen 2>")
        terminal.expect("<total 2>")

        assert terminal.status() == 0
    finally:
        terminal.close()


BLOCK, CHARACTER = 1, 2  # BPF_DEVCG_DEV_* of linux/bpf.h


READ_WRITE, MAKE = 6, 1  # BPF_DEVCG_ACC_READ | BPF_DEVCG_ACC_WRITE, BPF_DEVCG_ACC_MKNOD of linux/bpf.h
INSTRUCTION = struct.Struct("=BBhi")


def executed(code: bytes, kind: int, major: int, minor: int, access: int = READ_WRITE) -> int:
    """What the kernel would answer, 1 is "allowed"; instructions as Linux's instruction-set.rst has them."""
    context = struct.pack("=III", access << 16 | kind, major, minor)
    lines = list(INSTRUCTION.iter_unpack(code))
    registers = {1: 0}
    place = steps = 0
    while steps < 10_000:
        opcode, operands, offset, constant = lines[place]
        target, source = operands & 15, operands >> 4
        place, steps = place + 1, steps + 1
        match opcode:
            case 0x61:  # load a word
                registers[target] = struct.unpack_from("=I", context, registers[source] + offset)[0]
            case 0x57:
                registers[target] &= constant & 0xFFFFFFFFFFFFFFFF
            case 0xB7:
                registers[target] = constant
            case 0x15:
                place += offset if registers[target] == constant else 0
            case 0x55:
                place += offset if registers[target] != constant else 0
            case 0x25:
                place += offset if registers[target] > constant else 0
            case 0x95:
                return registers[0]
            case _:
                raise AssertionError(f"the kernel knows no instruction {opcode:#x} like that")
    raise AssertionError("it does not end")


SPACE = """
import os, sys
from gpuguard.jobs import isolation
from gpuguard.vendors import AMD
nodes = isolation.Nodes(frozenset({129}), vendor=AMD)
enter, _ = isolation.prepare_namespace(isolation.hidden(nodes, "/dev"), "/dev")
enter()
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
DRI = {"kfd": (510, 9), "dri/card0": (226, 0), "dri/renderD128": (226, 128), "dri/renderD129": (226, 129)}


@isolated
def test_a_user_sees_only_the_render_nodes_of_a_job_on_amds_gpus(site, open_place):
    paths = [f"/dev/{name}" for name in (*DRI, "renamed", "nvidia0", "null")]
    with private_dev(open_place, 1, {**DRI, "renamed": (226, 128)}) as inside:
        words = [*inside(ALICE), "env", f"PYTHONPATH={site}:{ROOT}", interpreter(), "-c", SPACE, OPEN, *paths]
        done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=SECONDS)

    assert dict(line.split() for line in done.stdout.splitlines()) == {
        "kfd": "ENXIO", "card0": "ENOENT", "renderD128": "ENOENT", "renderD129": "ENXIO", "renamed": "ENOENT",
        "nvidia0": "ENOENT", "null": "opened",
    }, done.stderr  # fmt: skip


minors = st.frozensets(st.integers(0, 300), max_size=20)
vendors = st.sampled_from([NVIDIA, AMD, INTEL])
nodes = st.builds(Nodes, minors, minors, st.none() | st.integers(234, 511), vendors)


@given(nodes, st.integers(0, 600) | st.sampled_from([195, 226, 507]), st.integers(0, 2**20 - 1) | st.integers(0, 300))
def test_it_refuses_exactly_the_hidden_nodes(wanted, major, minor):
    code = filter_program(wanted.rules())

    assert executed(code, CHARACTER, major, minor) == (not wanted.hides(major, minor))
    assert executed(code, CHARACTER, major, minor, MAKE) == (not wanted.hides(major, minor))
    assert executed(code, BLOCK, major, minor) == 1


def test_the_filter_of_other_nodes_is_found():
    code = filter_program(Nodes(frozenset({1})).rules())

    assert [minor for minor in range(9) if executed(code, CHARACTER, 195, minor)] == [1]
