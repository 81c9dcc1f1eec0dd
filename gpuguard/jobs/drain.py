"""After the job: which of its processes still use the devices, and when their memory is really free again.

A claim that ends before that gives the next job a device that is still full.  Reads only; sends no signal.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard import procfs
from gpuguard.errors import BackendError, shortage
from gpuguard.model import HEALTH, MEMORY, POWER, PROCESSES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

    from gpuguard.backends import Backend
    from gpuguard.model import Device, Snapshot

    Process = tuple[int, float]  # pid, start time in seconds since boot

DRAINED = "settled"  # this word and the next ones are outcomes in the audit log
NOT_DRAINED = "memory did not settle"
DRIVER_UNREACHABLE = "driver unreachable"
INTERRUPTED = "interrupted"

DRAIN_SECONDS = 60.0  # the driver frees within a second or so; longer means a fault that waiting does not cure
# On a shared device what a neighbour leaves looks the same, so waiting ends when the driver usually is ready.
SHARED_DRAIN_SECONDS = 2.0
QUIET_SECONDS = 2.0  # before that nobody wonders why the prompt does not come back
POLL_SECONDS = (0.1, 1.0)  # first and longest pause while the memory is being freed
TRIES = 100  # of a read that finds no file or memory, each after the first of these pauses
USER_POLL_SECONDS = 5.0  # between two samples while a process outlives the job; the end of an adopted one wakes us


class StillInUse(Exception):
    """Waiting was cut short by a signal while processes of the job still use a device: the claim is theirs now.

    Args:
        signum: the signal.
        users: the processes, in words.
    """

    def __init__(self, signum: int, users: str) -> None:
        super().__init__(users)
        self.signum = signum
        self.users = users


@dataclass(frozen=True)
class Drain:
    """The devices of a job that has ended, and what their claim waits for.

    Args:
        devices: the claimed devices as they were before the job.
        backend: read at least once.
        pause: waits up to so many seconds, less when a child ends; returns a signal that asks us to stop waiting.
        notify: gets a text when the user would wonder why it takes so long.
        count: gets each snapshot, with the energy that its devices have used; None: it is not wanted.
        tolerance: bytes above the state before the job that count as free.
        others: children of this process that are not of the job, from before it.
        longest: seconds to wait for memory that no process holds any more.
    """

    devices: Sequence[Device]
    backend: Backend
    pause: Callable[[float], int | None]
    notify: Callable[[str], None]
    count: Callable[[Snapshot], None] | None
    tolerance: int
    others: frozenset[Process] = frozenset()
    longest: float = DRAIN_SECONDS

    def wait_until_free(self) -> str:
        """Wait until no process of the job uses the devices and their memory is back where it was.

        Returns:
            "settled", "memory did not settle", "driver unreachable", or "interrupted".

        Raises:
            StillInUse: a signal came while processes of the job still use a device.
        """
        try:
            # A list of processes is the dearest that a driver can be asked for: not where no process of the job lives,
            # and the devices hold no more than before whatever is on it.
            living = children()
            if living is not None and living <= self.others and self._is_clear(self._sample((MEMORY,))):
                return DRAINED
            return self._wait_for_memory(self._wait_for_users(self._sample()))
        except BackendError:
            return DRIVER_UNREACHABLE

    def _wait_for_users(self, snapshot: Snapshot) -> Snapshot:
        known: set[int] = set()
        while users := users_of(snapshot, self.devices):
            if not users.keys() <= known:
                self.notify(f"the job ended, but {_in_words(users)}: the claim stays until that ends.")
                known |= users.keys()
            if signum := self.pause(USER_POLL_SECONDS):
                raise StillInUse(signum, _in_words(users))
            try:
                snapshot = self._sample()
            except BackendError:
                continue  # those that were seen to use a device are believed to use it as long as they live
        return snapshot

    def _wait_for_memory(self, snapshot: Snapshot) -> str:
        began, delay, notified = time.monotonic(), POLL_SECONDS[0], False
        while full := [device.index for device in self.devices if _residue(snapshot, device) > self.tolerance]:
            waited = time.monotonic() - began
            if waited > self.longest:
                return NOT_DRAINED
            if waited > QUIET_SECONDS and not notified:
                gpus = ", ".join(map(str, full))
                self.notify(f"the job ended; waiting for the driver to free the memory of GPU {gpus} ...")
                notified = True
            if self.pause(delay):
                return INTERRUPTED
            delay = min(delay * 1.5, POLL_SECONDS[1])
            snapshot = self._sample()
        return DRAINED

    def _is_clear(self, snapshot: Snapshot) -> bool:
        """Whether the devices hold no more than before the job, whatever holds it."""
        for before in self.devices:
            now, used_before = snapshot.device(before.uuid), _unaccounted(before)
            if now is None or now.memory_used is None or used_before is None:
                return False
            if now.memory_used - used_before > self.tolerance:
                return False
        return True

    def _sample(self, groups: Collection[str] = (MEMORY, PROCESSES)) -> Snapshot:
        fields = {*groups, POWER} if self.count else {*groups}
        fields |= {HEALTH} if any(device.parent_uuid for device in self.devices) else set()
        snapshot = self.backend.sample(fields, [device.uuid for device in self.devices])
        if self.count:
            self.count(snapshot)
        return snapshot


def users_of(snapshot: Snapshot, devices: Sequence[Device]) -> dict[int, tuple[int, ...]]:
    """Descendants of this process that use *devices*: pid -> the indices of those.  An unknown list names none."""
    users: dict[int, tuple[int, ...]] = {}
    for device in devices:
        now = snapshot.device(device.uuid)
        for process in (now.processes if now else None) or ():
            users[process.pid] = (*users.get(process.pid, ()), device.index)
    if not users:
        return {}
    family = descendants()
    return {pid: indices for pid, indices in users.items() if pid in family}


def descendants() -> dict[int, float]:
    """Living processes below this one, with those it adopted: pid -> start time in seconds since boot."""
    return {pid: stat.start_time for pid, stat in procfs.descendants(os.getpid()).items()}


def children() -> frozenset[Process] | None:
    """What this process started or adopted and has not reaped; None: the kernel does not say."""
    stats = procfs.own_children()
    return None if stats is None else frozenset((pid, stat.start_time) for pid, stat in stats.items())


def patiently(call: Callable[..., Any], *words: Any, **more: Any) -> Any:
    """What *call* returns, tried again for a while where no file or memory is left: the job runs, and needs us."""
    for _ in range(TRIES):
        try:
            return call(*words, **more)
        except OSError as error:
            if not shortage(error):
                raise
        time.sleep(POLL_SECONDS[0])
    return call(*words, **more)


def _residue(snapshot: Snapshot, before: Device) -> int:
    """Bytes that the device holds for no process, above the state before the job; 0 when that cannot be known."""
    now = snapshot.device(before.uuid)
    used_now, used_before = _unaccounted(now) if now else None, _unaccounted(before)
    return 0 if used_now is None or used_before is None else used_now - used_before


def _unaccounted(device: Device) -> int | None:
    """Used bytes without those of living processes: what a dead one leaves is what has to be freed."""
    if device.memory_used is None:
        return None
    living = [process for process in device.processes or () if os.path.exists(f"/proc/{process.pid}")]
    if any(process.memory_used is None for process in living):
        return None
    return device.memory_used - sum(process.memory_used or 0 for process in living)


def _in_words(users: dict[int, tuple[int, ...]]) -> str:
    """``"pid 4321 (tensorboard) still uses GPU 3"``, with a name that the process chose itself."""
    return " and ".join(
        f"pid {pid} ({_name_of(pid)}) still uses GPU {','.join(map(str, indices))}" for pid, indices in users.items()
    )


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().rstrip("\n")
    except OSError:
        return "?"
