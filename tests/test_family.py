"""Who belongs to a job that did not start here, and until when; with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wrapped import until

from gpuguard.errors import GpuguardError
from gpuguard.jobs import adopt
from gpuguard.jobs.adopt import ProcessFamily

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
        assert self.process.stdin and self.process.stdout
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
        assert self.process.stdin and self.process.stdout
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
    made = []

    def make(*pids: int, tree: bool = True) -> ProcessFamily:
        made.append(ProcessFamily(pids, tree=tree))
        return made[-1]

    yield make
    for each in made:
        each.close()


def kill(pid: int) -> None:
    """End a process that is nobody's child here, and wait until it has."""
    try:
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
    os.close(pidfd)
    until(lambda: adopt.kin_of(pid) is None)


def test_a_process_and_what_it_has_started_belong_together(job, of):
    child = job.child()

    assert set(of(job.pid).members) == {job.pid, child}
    assert set(of(job.pid, tree=False).members) == {job.pid}


def test_it_ends_with_the_last_one(job, of, silent):
    child, both = job.child(), of(job.pid)
    job.end()

    assert both.wait(silent) and set(both.members) == {child}
    kill(child)
    assert not both.wait(silent) and both.members == {}


def test_what_was_started_later_is_found_when_somebody_ends(job, of, silent):
    first = job.child()
    both = of(job.pid)
    second = job.child("away")
    kill(first)

    assert both.wait(silent) and set(both.members) == {job.pid, second}


def test_an_orphan_in_the_group_of_a_member_belongs_to_it(job, of, silent):
    alone = of(job.pid)
    orphan = job.child()
    job.end()

    assert alone.wait(silent) and set(alone.members) == {orphan}


def test_an_orphan_in_a_session_of_its_own_that_nobody_saw_is_missed(job, of, silent):
    alone = of(job.pid)
    job.child("away")
    job.end()

    assert not alone.wait(silent)


def test_without_tree_nobody_else_belongs_to_it(job, of, silent):
    alone = of(job.pid, tree=False)
    job.child()
    job.end()

    assert not alone.wait(silent)


def test_a_neighbour_in_the_same_session_does_not_belong_to_it(job, of):
    with subprocess.Popen(["sleep", "100"]) as neighbour:
        assert set(of(job.pid).members) == {job.pid}
        neighbour.kill()


def test_nobody_waits_for_himself(of):
    with pytest.raises(GpuguardError):
        of(os.getpid())
    assert os.getpid() not in of(os.getppid()).members


def test_a_process_that_has_ended_but_was_not_buried_is_none(job, of):
    job.process.kill()
    until(lambda: adopt.kin_of(job.pid) is None)

    with pytest.raises(GpuguardError, match="has ended"):
        of(job.pid)
    assert Path(f"/proc/{job.pid}").exists()


def test_a_pid_that_is_another_process_by_now_does_not_join(job, of, monkeypatch):
    child, read = job.child(), adopt.kin_of
    listed = {pid: kin for pid, kin in adopt.processes().items() if pid in (job.pid, child)}
    older = adopt.Kin(job.pid, job.pid, job.pid, listed[child].started - 1)
    monkeypatch.setattr(adopt, "processes", lambda: {job.pid: listed[job.pid], child: older})

    assert read(child) == listed[child]
    assert set(of(job.pid).members) == {job.pid}


def test_who_has_ended_can_be_forgotten_without_waiting(job, of):
    child, both = job.child(), of(job.pid)
    kill(child)
    both.refresh()

    assert set(both.members) == {job.pid}


def test_a_descriptor_that_can_be_read_ends_the_sleep(job, of):
    read, write = os.pipe()
    os.write(write, b"x")

    assert of(job.pid).wait(read)
    os.close(read)
    os.close(write)
