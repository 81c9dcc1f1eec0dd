"""Who belongs to a job that did not start here, and until when; with real processes."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml
from nodes import Gpuguard, until
from nodes_of_devices import OPEN
from proc import runs

from gpuguard import procfs
from gpuguard.errors import GpuguardError
from gpuguard.jobs import adoption, isolation
from gpuguard.jobs.adoption import ProcessFamily

# A process that starts a child when it is told so on its stdin, says the child's pid, and can start it in a session of
# its own ("away").  Ends with its stdin.
PARENT = """
import subprocess, sys
children = []
for line in sys.stdin:
    children.append(subprocess.Popen(["sleep", "100"], stdin=subprocess.DEVNULL, start_new_session="away" in line))
    print(children[-1].pid, flush=True)
"""


class Job:
    """A process that leads its process group, and its children."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid, self.children = self.process.pid, list[int]()

    def child(self, where: str = "") -> int:
        self.process.stdin.write(f"{where}\n")
        self.process.stdin.flush()
        self.children.append(int(self.process.stdout.readline()))
        return self.children[-1]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.end()
        for pid in self.children:
            kill(pid)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


@pytest.fixture
def silent() -> Iterator[int]:
    """A descriptor that never can be read."""
    ends = os.pipe()
    yield ends[0]
    for end in ends:
        os.close(end)


@pytest.fixture
def of() -> Iterator[Callable[..., ProcessFamily]]:
    """Makes families, and forgets them."""
    with contextlib.ExitStack() as stack:

        def make(*pids: int, tree: bool = True) -> ProcessFamily:
            return stack.enter_context(contextlib.closing(ProcessFamily(pids, tree=tree)))

        yield make


def kill(pid: int) -> None:
    """End a process that is nobody's child here, and wait until it has."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not runs(pid))


def test_a_process_and_what_it_has_started_belong_together(job, of):
    child = job.child()

    assert set(of(job.pid).members) == {job.pid, child}
    assert set(of(job.pid, tree=False).members) == {job.pid}


def test_what_was_started_later_is_found_when_somebody_ends(job, of, silent):
    first = job.child()
    both = of(job.pid)
    second = job.child("away")
    kill(first)

    assert both.wait(silent) and set(both.members) == {job.pid, second}


@pytest.mark.parametrize(
    ("tree", "where", "belongs"),
    [(True, "", True), (True, "away", False), (False, "", False)],
    ids=["in the group of a member", "in a session of its own that nobody saw", "without --tree"],
)
def test_an_orphan_belongs_to_the_group_of_a_member_alone(job, of, silent, tree, where, belongs):
    alone = of(job.pid, tree=tree)
    orphan = job.child(where)
    job.end()

    assert alone.wait(silent) == belongs
    assert set(alone.members) == ({orphan} if belongs else set())


def test_a_neighbour_in_the_same_session_does_not_belong_to_it(job, of):
    with subprocess.Popen(["sleep", "100"]) as neighbour:
        assert set(of(job.pid).members) == {job.pid}
        neighbour.kill()


def test_no_process_waits_for_itself(of):
    with pytest.raises(GpuguardError):
        of(os.getpid())
    assert os.getpid() not in of(os.getppid()).members


def test_a_process_that_has_ended_but_was_not_buried_is_none(job, of):
    job.process.kill()
    until(lambda: not runs(job.pid))

    with pytest.raises(GpuguardError, match="has ended"):
        of(job.pid)
    assert Path(f"/proc/{job.pid}").exists()


def test_a_pid_that_is_another_process_by_now_does_not_join(job, of, monkeypatch):
    child = job.child()
    listed = procfs.processes()
    older = listed[child]._replace(start_time=listed[child].start_time - 0.01)
    monkeypatch.setattr(adoption, "processes", lambda: {job.pid: listed[job.pid], child: older})

    assert set(of(job.pid).members) == {job.pid}


DEVICES = 4


def filters() -> str:
    """Why no device filter can be had here, "" when one can."""
    if os.geteuid() != 0:
        return "device filters (not root)"
    try:
        isolation.check_device_filter()
    except GpuguardError as error:
        return f"device filters ({str(error).splitlines()[0]})"
    return ""


UNTESTED = filters()


def filtered(test: Any) -> Any:
    """A test of root's that needs a device filter, while no other makes one."""
    test = pytest.mark.skipif(bool(UNTESTED), reason=UNTESTED or "can be had")(test)
    return pytest.mark.usefixtures("alone")(pytest.mark.root(test))


@pytest.mark.usefixtures("alone")
def test_a_kernel_without_device_filters_refuses_the_job(monkeypatch, tmp_path):
    def refused(command: int, attributes: bytes) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(isolation, "bpf", refused)
    monkeypatch.setattr(isolation, "own_cgroup", lambda: str(tmp_path))

    with pytest.raises(GpuguardError, match="takes no device filter from us \\(Operation not permitted\\)"):
        isolation.prepare_cgroup({}, "x")
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
    return [name for name in os.listdir(isolation.own_cgroup()) if name.startswith(isolation.PREFIX)]


@filtered
@pytest.mark.parametrize("manner", [[], ["--exec"]], ids=["watched", "exec"])
def test_root_can_open_only_what_is_claimed(root, nodes, manner):
    done = root("run", "--devices", "1,3", "--isolate", *manner, "--", sys.executable, "-c", OPEN, *nodes, "/dev/null")

    assert done.stdout.split()[1::2] == ["EPERM", "ENXIO", "EPERM", "ENXIO", "opened"], done.stderr
    isolation.sweep(isolation.own_cgroup())
    assert groups() == []


@filtered
def test_root_cannot_make_the_nodes_of_others(root: Gpuguard, tmp_path: Path) -> None:
    def made(minor: int) -> int:
        node = str(tmp_path / f"made{minor}")
        return root("run", "--devices", "1", "--isolate", "mknod", node, "c", "195", str(minor)).returncode

    assert (made(0) != 0, made(1)) == (True, 0)


@filtered
def test_the_cgroup_goes_with_the_job(root):
    during = root("run", "--isolate", "--", "sh", "-c", "grep ^0:: /proc/self/cgroup")

    assert isolation.PREFIX in during.stdout
    assert groups() == []


@filtered
def test_a_killed_wrapper_leaves_the_filter_on_and_the_next_job_clears_up(root, nodes):
    code = f"import time\nprint('ready', flush=True)\ninput()\n{OPEN}"
    words = ("run", "--devices", "1", "--isolate", "--", sys.executable, "-c", code, *nodes)
    with root.start(*words, stdin=subprocess.PIPE) as wrapper:
        assert wrapper.stdout.readline() == "ready\n"
        wrapper.kill()
        wrapper.wait()
        [left] = groups()
        root("run", "--devices", "0", "--isolate", "--", "true")
        assert groups() == [left]
        wrapper.stdin.write("\n")
        wrapper.stdin.flush()

        assert wrapper.stdout.read().split()[1::2] == ["EPERM", "ENXIO", "EPERM", "EPERM"]
    until(lambda: not root("run", "--devices", "0", "--isolate", "--", "true").returncode and groups() == [])


@filtered
def test_a_cgroup_whose_maker_lives_is_not_swept():
    parent = isolation.own_cgroup()
    _, close = isolation.prepare_cgroup({}, f"test-{os.getpid()}")

    isolation.sweep(parent)  # flock goes by the open file, so that this process stands for another one
    assert len(groups()) == 1
    close()
    assert groups() == []
