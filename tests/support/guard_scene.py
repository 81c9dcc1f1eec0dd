"""Real processes on a device that does not exist, and everything that the guard needs to act on them.

with a_scene() as scene:                one offender, whom nothing protects: scene.act() ends them
    scene.context(protected=...)        change what the guard goes by; scene.row(kind=...) what the driver says of them
    scene.act("kill"); scene.lives()
"""

import contextlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, Machine, a_device, a_process
from nodes import until
from users import interpreter

from gpuguard import procfs
from gpuguard.enforcement import actions, identity
from gpuguard.enforcement.preflight import ActionContext, check_process, targets
from gpuguard.model import Event, Finding, GpuProcess, Snapshot, Subject, Verdict
from gpuguard.procfs import boot_clock
from gpuguard.vendors import AMD, VENDORS, Vendor

SOMEBODY = 20001  # a uid that nobody has
SLEEP = ("sleep", "600")


def somebody() -> int | None:
    """A user who is not root, to run a child as: another one where this is root."""
    return SOMEBODY if os.geteuid() == 0 else None


def python() -> str:
    """One that the user of a child may run."""
    return interpreter() if os.geteuid() == 0 else sys.executable


def set_user_id_program(place: Path) -> str:
    """A program that is root in effect for any user who runs it, as `su` and `passwd` are: it sleeps."""
    for folder in (place, *place.parents):
        folder.chmod(0o755)  # pytest's own let nobody else in
        if folder.name.startswith("pytest-of-"):
            break  # xdist puts one more between
    program = shutil.copy("/usr/bin/sleep", place / "sleep")
    os.chmod(program, 0o4755)
    if os.statvfs(place).f_flag & os.ST_NOSUID:
        pytest.skip("programs with a set-user-ID bit (none here)")
    return str(program)


def started(pid: int) -> float:
    """The start time of a process, once a sample taken now can be told from it."""
    start = procfs.start_time(pid)
    assert start is not None
    until(lambda: boot_clock() > start + 0.035)
    return start


class Listing(Machine):
    """A machine whose samples are taken when they are asked for."""

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        clock = boot_clock()
        return replace(super().sample(fields, devices), clock=clock)


class Guard:
    """A guard that enforces on *machine*, and what it wrote down."""

    def __init__(self, machine: Machine, **facts: Any) -> None:
        self.machine, self.snapshot = machine, machine.sample((), None)
        self.events: list[Event] = []
        self.facts: dict[str, Any] = {
            "backend": machine,
            "append": self.write,
            "still_true": lambda verdict, snapshot: True,
            "enforce": True,
            **facts,
        }
        self._context: ActionContext | None = None

    def write(self, event: Event) -> bool:
        self.events.append(event)
        return True

    def context(self, **facts: Any) -> ActionContext:
        """What the guard goes by, changed by *facts*."""
        if self._context is None or facts:
            before = {"limits": self._context.limits} if self._context else {}
            self.facts = {**self.facts, **before, **facts}
            self._context = ActionContext(**self.facts)
        return self._context


class Scene(Guard):
    """One offender on device 0, a verdict on them, and a guard that enforces it."""

    def __init__(self, pid: int, uid: int, *others: GpuProcess) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self.start_time = started(pid)
        self.process = a_process(pid, start_time=self.start_time, uid=uid, memory_used=10 * GIB)
        machine = Listing(a_device(0, processes=(self.process, *others), memory_used=40 * GIB))
        super().__init__(machine, interactive_grace=600.0, jobs=frozenset({(pid, self.start_time)}))
        self.subject = Subject("process", machine.devices[0].uuid, pid, self.start_time, uid, user="alice")

    def row(self, **fields: Any) -> None:
        """What the driver says of the offender from now on, and said already."""
        self.process = replace(self.process, **fields)
        self.listed(self.process)
        self.snapshot = self.machine.sample((), None)

    def listed(self, *rows: GpuProcess) -> None:
        """Whom the driver lists from now on."""
        self.machine.change(0, processes=rows)

    def verdict(self, action: str = "terminate", **fields: Any) -> Verdict:
        finding = Finding("memory", self.subject, "uses 41.0GiB, 40.0GiB are allowed", (self.process,))
        return Verdict(
            policy="a-policy",
            finding=finding,
            action=action,
            step=0,
            since=self.snapshot.clock - 60,
            **{"enforce": True, **fields},
        )

    def act(self, action: str = "terminate", **fields: Any) -> actions.ActionOutcome:
        """What became of it."""
        (outcome,) = actions.act(self.verdict(action, **fields), self.snapshot, self.context())
        return outcome

    def against(self) -> set[str]:
        """The checks that speak against it."""
        failed: set[str] = set()
        for process in targets(self.verdict(), self.snapshot):
            with check_process(self.verdict(), self.snapshot, self.context(), process) as target:
                failed |= {check.check for check in target.failed} or ({"alive"} if target.ended else set())
        return failed

    def lives(self) -> bool:
        return not select.select([self.pidfd], [], [], 0)[0]

    def dies(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 10)[0])


@contextlib.contextmanager
def a_child(
    *command: str, uid: int | None = None, session: bool = True, **more: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of *uid*, somebody's by default; ended at the end."""
    user = somebody() if uid is None else uid
    ours = user in (None, os.getuid() or None)  # a user who is not root may not even ask to be themselves
    as_user: dict[str, Any] = {} if ours else {"user": user, "group": user or 0, "extra_groups": []}
    with subprocess.Popen(command or SLEEP, start_new_session=session, cwd="/", **as_user, **more) as child:
        try:
            yield child
        finally:
            child.kill()


@contextlib.contextmanager
def a_scene(*command: str, uid: int | None = None, **more: Any) -> Iterator[Scene]:
    """An offender, whom nothing protects."""
    with a_child(*command, uid=uid, **more) as child:
        owner = uid if uid is not None else (somebody() or os.getuid())
        scene = Scene(child.pid, owner)
        try:
            yield scene
        finally:
            os.close(scene.pidfd)


# Nodes that every user can open stand for those of GPUs.  The device that is meant has the render node 5.
KFD, RENDER, OTHER_RENDER, CARD = "/dev/full", "/dev/zero", "/dev/random", "/dev/urandom"
AMD_HERE = replace(AMD, nodes=(KFD,))


@contextlib.contextmanager
def on_a_gpu_of(
    vendor: Vendor, patch: pytest.MonkeyPatch, place: Path, minor: int | None, opened: str
) -> Iterator[Scene]:
    """An offender on a GPU of *vendor*, with one node open."""
    patch.setattr(identity, "NODES", (KFD, RENDER, OTHER_RENDER, CARD))
    patch.setattr(identity, "DRM_MAJOR", 1)
    patch.setattr(identity, "DRM_SIBLINGS", f"{place}/{{minor}}/*/dev")
    for path in (RENDER, CARD):
        node = os.stat(path).st_rdev
        (folder := place / "5" / os.path.basename(path)).mkdir(parents=True)
        (folder / "dev").write_text(f"{os.major(node)}:{os.minor(node)}\n")
    patch.setitem(VENDORS, vendor.name, replace(vendor, major=vendor.major and 1))
    with open(opened, "rb") as node_of_it, a_scene(stdin=node_of_it) as scene:
        patch.setattr(scene.machine, "simulated", False)
        scene.machine.change(0, vendor=vendor.name, minor_number=minor)
        scene.snapshot = scene.machine.sample((), None)
        yield scene
