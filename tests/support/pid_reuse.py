"""Forced reuse of pids: run as root in a pid namespace of its own, by test_pid_reuse.

python pid_reuse.py CAMPAIGN COUNT [FAULT]      prints {"hit": .., "spared": ..} as JSON

A process is sampled, ends, and another one gets its pid at once (ns_last_pid), at the worst moment that there is.
"""

import atexit
import collections
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

from amd_trees import POLARIS, AmdTree
from builders import GIB, a_device, a_process
from guard_scene import AMD_HERE, KFD, SOMEBODY, Listing
from nodes import until

from gpuguard import procfs, users
from gpuguard.backends import Backend, amd
from gpuguard.enforcement import actions, identity, preflight, signals
from gpuguard.enforcement.preflight import ActionContext
from gpuguard.model import WHO_FIELDS, Event, Finding, GpuProcess, Snapshot, Subject, Verdict
from gpuguard.policies import view
from gpuguard.policies.view import Arrivals
from gpuguard.procfs import boot_clock
from gpuguard.vendors import VENDORS

LAST_PID = "/proc/sys/kernel/ns_last_pid"
_ready = os.pipe()


def a_sleeper(pid: int | None = None, *, node: str = os.devnull) -> int:
    """A process of somebody, that has *pid*, and *node* open."""
    if pid is not None:
        with open(LAST_PID, "w") as last:
            last.write(str(pid - 1))
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.setresuid(SOMEBODY, SOMEBODY, SOMEBODY)
        os.open(node, os.O_RDONLY)
        os.write(_ready[1], b".")
        while True:
            signal.pause()
    os.read(_ready[0], 1)
    assert pid in (None, child), "somebody else took the pid"
    return child


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def was_hit(pid: int) -> bool:
    """Whether a signal has ended it; it is gone afterwards."""
    # A signal that was sent acts before the process runs again; SIGKILL would only hide it.
    os.kill(pid, signal.SIGCONT)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended and _is_pending(pid):
        ended, status = os.waitpid(pid, 0)
    if ended:
        return os.WTERMSIG(status) == signal.SIGTERM
    end(pid)
    return False


def _is_pending(pid: int) -> bool:
    """SIGTERM was sent to it, or it is on its way out."""
    with open(f"/proc/{pid}/status") as status:
        text = status.read()
    facts = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    pending = int(facts["ShdPnd"], 16) | int(facts.get("SigPnd", "0"), 16)
    return bool(pending >> (signal.SIGTERM - 1) & 1) or facts["State"][0] in "ZX"


def a_row(pid: int) -> GpuProcess:
    return a_process(pid, start_time=procfs.start_time(pid), uid=SOMEBODY)


class Everybody(frozenset[tuple[int, float]]):
    """All are children of this process: that must protect nobody."""

    def __contains__(self, process: object) -> bool:
        return True


def guard(machine: Backend, append: Callable[[Event], bool] = lambda event: True) -> ActionContext:
    return ActionContext(machine, append, lambda *_: True, enforce=True, jobs=Everybody(), share_host_pids=True)


def act(row: GpuProcess, snapshot: Snapshot, context: ActionContext) -> str:
    subject = Subject("process", snapshot.devices[0].uuid, row.pid, row.start_time, row.uid)
    verdict = Verdict(
        policy="p",
        finding=Finding("memory", subject, "why"),
        action="terminate",
        step=0,
        since=snapshot.clock,
        enforce=True,
    )
    return actions.act(verdict, snapshot, context)[0].word


def a_sample(row: GpuProcess) -> tuple[Listing, Snapshot]:
    machine = Listing(a_device(0, processes=(row,), memory_used=40 * GIB))
    assert row.start_time is not None
    start = row.start_time
    until(lambda: boot_clock() > start + 0.021)
    return machine, machine.sample(())


def between_decision_and_signal() -> bool:
    """The offender ends when everything was checked, and the next one has their pid before the signal."""
    offender = a_sleeper()
    row = a_row(offender)
    machine, snapshot = a_sample(row)
    reached: list[int] = []

    def replaced(event: Event) -> bool:
        if not reached:
            end(offender)
            reached.append(a_sleeper(offender))
        return True

    word = act(row, snapshot, guard(machine, replaced))
    assert word in ("gone", "sent") and reached, word
    return was_hit(offender)


def between_sample_and_pidfd() -> bool:
    """The offender ends after the sample; who has their pid now is on the device, too."""
    offender = a_sleeper()
    row = a_row(offender)
    machine, snapshot = a_sample(row)
    end(offender)
    a_sleeper(offender)
    machine.devices = [replace(machine.devices[0], processes=(a_row(offender),))]
    act(row, snapshot, guard(machine))
    return was_hit(offender)


def within_the_sample() -> bool:
    """The driver lists the offender, which ends, and /proc is read of the process that has its pid now."""
    offender = a_sleeper()
    machine = Listing(a_device(0, memory_used=40 * GIB))
    snapshot = machine.sample(())
    end(offender)
    row = a_row(a_sleeper(offender))
    machine.devices = [replace(machine.devices[0], processes=(row,))]
    snapshot = replace(snapshot, devices=tuple(machine.devices))
    act(row, snapshot, guard(machine))
    return was_hit(offender)


def whose_files_are_hidden(began: str) -> bool:
    """What the process has mapped cannot be read, so that it is known by when it came to the device."""
    identity._uses_driver = lambda pid, drivers: (None, True)
    preflight.driver_nodes = lambda devices: (frozenset({1}),)
    machine, seen = Listing(a_device(0, memory_used=40 * GIB)), Arrivals()
    machine.simulated = False
    offender = a_sleeper()
    until(lambda: boot_clock() > (procfs.start_time(offender) or 0.0) + 0.035)
    seen.look(machine.sample(()))
    if began == "after the last list":
        end(offender)  # it came to the device and has ended since; the driver still lists it: a child of it lives
        a_sleeper(offender)
    row = a_row(offender)
    machine.devices = a_sample(row)[0].devices
    snapshot = machine.sample(())
    seen.look(snapshot)
    act(row, snapshot, replace(guard(machine), arrived=seen.arrived))
    return was_hit(offender)


@cache
def a_gpu_of_amd() -> AmdTree:
    place = tempfile.mkdtemp(prefix="gpuguard-kfd-")
    atexit.register(shutil.rmtree, place)
    return AmdTree(Path(place), POLARIS)


def whom_kfd_remembers(*, ends: bool) -> bool:
    """KFD keeps the entry of a process that has ended, and all samples show it as that of who has the pid now."""
    identity.NODES = (KFD,)
    VENDORS["amd"] = AMD_HERE
    users._names[SOMEBODY] = "alice"
    tree, pid = a_gpu_of_amd(), a_sleeper(node=KFD)
    entry = tree.computes(0, pid, 0)
    backend = amd.open(str(tree.root))
    backend.simulated = False
    backend.sample(WHO_FIELDS)
    if ends:
        end(pid)
        a_sleeper(pid)
    began = procfs.start_time(pid) or 0.0
    until(lambda: boot_clock() > began + 0.035)
    snapshot = backend.sample(WHO_FIELDS)
    (row,) = snapshot.devices[0].processes or ()
    assert (row.pid, row.start_time) == (pid, began)
    act(row, snapshot, guard(backend))
    shutil.rmtree(entry)
    return was_hit(pid)


def right_target() -> bool:
    """Nothing happens in between."""
    offender = a_sleeper()
    row = a_row(offender)
    machine, snapshot = a_sample(row)
    assert act(row, snapshot, guard(machine)) == "sent"
    return was_hit(offender)


def another_namespace() -> bool:
    """Nothing happens in between, but the pids here are not those of the driver."""
    offender = a_sleeper()
    row = a_row(offender)
    machine, snapshot = a_sample(row)
    assert act(row, snapshot, replace(guard(machine), share_host_pids=False)) == "refused"
    return was_hit(offender)


CAMPAIGNS: dict[str, Callable[[], bool]] = {
    "namespace": another_namespace,
    "decision": between_decision_and_signal,
    "pidfd": between_sample_and_pidfd,
    "sample": within_the_sample,
    "right": right_target,
    "hidden": partial(whose_files_are_hidden, "before the last list"),
    "arrival": partial(whose_files_are_hidden, "after the last list"),
    "kfd": partial(whom_kfd_remembers, ends=True),
    "on kfd": partial(whom_kfd_remembers, ends=False),
}


def os_kill(pidfd: int, signum: int) -> Literal["sent"]:
    """What one writes who does not know better: the pid of a pidfd, and a signal to that."""
    os.kill(_meant[0], signum)
    return "sent"


_meant = [0]


def plant(fault: str) -> None:
    if fault == "os.kill":
        signals.forward = os_kill
        sampled = preflight.check_process

        def remembered(verdict, snapshot, context, target):  # type: ignore[no-untyped-def]
            _meant[0] = target.pid
            return sampled(verdict, snapshot, context, target)

        preflight.check_process = remembered
    if fault == "any arrival":
        view.START_SLACK = -math.inf
    for check in fault.split(",") if fault not in ("os.kill", "any arrival") else ():
        preflight.LATE[check] = preflight.PreflightCheck(lambda target: None)


def main() -> None:
    campaign, count, *fault = sys.argv[1:]
    for each in fault:
        plant(each)
    told = collections.Counter("hit" if CAMPAIGNS[campaign]() else "spared" for _ in range(int(count)))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
