"""A device filter on root's job: what he did not claim cannot be opened or made, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Gpuguard
from fake_nvml import FakeNvml
from nodes_of_devices import OPEN
from wrapped import until

from gpuguard.errors import GpuguardError
from gpuguard.jobs import device_filter

# They count what lies in this process's own cgroup, which all that was started with it share.
pytestmark = pytest.mark.usefixtures("alone")

DEVICES = 4


def filters() -> str:
    """Why no device filter can be had here, "" when one can."""
    if os.geteuid() != 0:
        return "NOT TESTED: device filters need root"
    try:
        device_filter.check()
    except GpuguardError as error:
        return f"NOT TESTED: {error}".splitlines()[0]
    return ""


needs_filter = pytest.mark.skipif(bool(filters()), reason=filters() or "can be had")


def test_a_kernel_without_device_filters_refuses_the_job(monkeypatch, tmp_path):
    def refused(code: bytes) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(device_filter, "load", refused)
    monkeypatch.setattr(device_filter, "own_cgroup", lambda: str(tmp_path))

    with pytest.raises(GpuguardError, match="takes no device filter from us \\(Operation not permitted\\)"):
        device_filter.prepare_cgroup({}, "x")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    """Nodes of DEVICES devices, with other names, because the filter goes by numbers."""
    paths = []
    for index in range(DEVICES):
        paths.append(str(tmp_path / f"node{index}"))
        os.mknod(paths[-1], 0o666 | 0o020000, os.makedev(195, index))
    return paths


@pytest.fixture
def root(tmp_path: Path, fake: FakeNvml) -> Gpuguard:
    return Gpuguard(tmp_path, fake)


def groups() -> list[str]:
    """The cgroups of isolated jobs."""
    return [name for name in os.listdir(device_filter.own_cgroup()) if name.startswith(device_filter.PREFIX)]


@pytest.mark.root
@needs_filter
@pytest.mark.parametrize("manner", [[], ["--exec"]], ids=["watched", "exec"])
def test_root_can_open_only_what_he_claimed(root, nodes, manner):
    done = root("run", "--gpus", "1,3", "--isolate", *manner, "--", sys.executable, "-c", OPEN, *nodes, "/dev/null")

    assert done.stdout.split()[1::2] == ["EPERM", "ENXIO", "EPERM", "ENXIO", "opened"], done.stderr
    device_filter.sweep(device_filter.own_cgroup())
    assert groups() == []


@pytest.mark.root
@needs_filter
def test_root_cannot_make_the_nodes_of_others(root: Gpuguard, tmp_path: Path) -> None:
    def made(minor: int) -> int:
        node = str(tmp_path / f"made{minor}")
        return root("run", "--gpus", "1", "--isolate", "mknod", node, "c", "195", str(minor)).returncode

    assert (made(0) != 0, made(1)) == (True, 0)


@pytest.mark.root
@needs_filter
def test_the_cgroup_goes_with_the_job(root):
    during = root("run", "--isolate", "--", "sh", "-c", "grep ^0:: /proc/self/cgroup")

    assert device_filter.PREFIX in during.stdout
    assert groups() == []


@pytest.mark.root
@needs_filter
def test_a_killed_wrapper_leaves_the_filter_on_and_the_next_job_clears_up(root, nodes):
    code = f"import time\nprint('ready', flush=True)\ninput()\n{OPEN}"
    words = ("run", "--gpus", "1", "--isolate", "--", sys.executable, "-c", code, *nodes)
    with root.start(*words, stdin=subprocess.PIPE) as wrapper:
        assert wrapper.stdin and wrapper.stdout
        assert wrapper.stdout.readline() == "ready\n"
        wrapper.kill()
        wrapper.wait()
        [left] = groups()
        root("run", "--gpus", "0", "--isolate", "--", "true")
        assert groups() == [left]
        wrapper.stdin.write("\n")
        wrapper.stdin.flush()

        assert wrapper.stdout.read().split()[1::2] == ["EPERM", "ENXIO", "EPERM", "EPERM"]
    until(lambda: not root("run", "--gpus", "0", "--isolate", "--", "true").returncode and groups() == [])


@pytest.mark.root
@needs_filter
def test_a_cgroup_whose_maker_lives_is_not_swept():
    parent = device_filter.own_cgroup()
    _, close = device_filter.prepare_cgroup({}, f"test-{os.getpid()}")

    device_filter.sweep(parent)  # flock goes by the open file, so that this process stands for another one
    assert len(groups()) == 1
    close()
    assert groups() == []
