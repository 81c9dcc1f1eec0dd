"""What a rule may look at: the newest snapshot, the past of the values that rules asked for, and facts about people.

Time comes from the snapshot.  Nothing in here reads anything: watchdog and backtest fill it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from gpuguard.attribution import Processes
from gpuguard.model import Device, GpuProcess, Snapshot, Subject

Sample = tuple[float, float]  # (clock, value)
_FEW = 64  # subjects of ended processes that may be kept on any machine


@dataclass(frozen=True)
class HostUse:
    """What a process does beside the GPU.  None = unknown."""

    cpu: float | None = None  # percent of one core, since the sample before
    memory: int | None = None  # bytes resident
    network: float | None = None  # bytes per second of its network namespace or cgroup, since the sample before
    terminal: str | None = None  # "/dev/pts/3"; "" when it has none


@dataclass(frozen=True)
class View:
    """Everything that a rule may judge by.

    Args:
        snapshot: with its claims.
        past: (subject key, field) -> samples, oldest first, without gaps filled in; only what rules asked for.
        host: what processes do beside the GPU, by (pid, start_time).
        groups: uid -> names of the user's groups.
        scheduled: uuid -> uids to which an outer scheduler has given the device; None where there is no scheduler.
        seen: the processes of devices and claims with their ancestors, as far as they were looked up in /proc.
        gpu_seconds: uid -> (window in seconds -> GPU-seconds claimed in it), from the usage store; {} when unknown.
    """

    snapshot: Snapshot
    past: Mapping[tuple[str, str], Sequence[Sample]] = field(default_factory=dict)
    host: Mapping[tuple[int, float], HostUse] = field(default_factory=dict)
    groups: Mapping[int, frozenset[str]] = field(default_factory=dict)
    scheduled: Mapping[str, frozenset[int]] | None = None
    seen: Processes = field(default_factory=dict)
    gpu_seconds: Mapping[int, Mapping[float, float]] = field(default_factory=dict)

    @property
    def clock(self) -> float:
        """CLOCK_BOOTTIME of the snapshot, seconds."""
        return self.snapshot.clock


def key_of(subject: Subject) -> str:
    """The identity of a subject as text, for memories: never a pid without its start time."""
    return f"{subject.kind}|{subject.device}|{subject.pid}@{subject.start_time}|{subject.uid}|{subject.claim}"


def process_subject(device: Device, process: GpuProcess) -> Subject:
    """A process on one device."""
    return _process_subject(device.uuid, process.pid, process.start_time, process.uid, process.user)


@cache  # every rule makes the same ones at every sample: a fifth of all the time that judging takes
def _process_subject(uuid: str, pid: int, start_time: float | None, uid: int | None, user: str | None) -> Subject:
    return Subject("process", device=uuid, pid=pid, start_time=start_time, uid=uid, user=user)


def forget_subjects(living: int) -> None:
    """Forget those of processes that have ended, once they are more than those of the *living* ones."""
    if _process_subject.cache_info().currsize > 2 * living + _FEW:
        _process_subject.cache_clear()


def device_subject(device: Device) -> Subject:
    """A device as such."""
    return _device_subject(device.uuid)


@lru_cache(maxsize=256)
def _device_subject(uuid: str) -> Subject:
    return Subject("device", device=uuid)


def judged(device: Device) -> tuple[GpuProcess, ...]:
    """The processes of *device* that may be judged at all.

    None of a list that is not plausible, and only those whose identity is known.
    """
    if not device.processes_plausible or not device.processes:
        return ()
    for process in device.processes:
        if process.start_time is None or process.uid is None:
            return tuple(each for each in device.processes if each.start_time is not None and each.uid is not None)
    return device.processes
