"""A job on devices whose driver does not tell whose processes are whose: one process stands for all of the job.

That is so in a container with pids of its own (the driver's are the host's), and where the driver lists no processes.
A device that is claimed for the job alone is the job's with all the memory that is in use above what was before; where
others may use it too, the memory of the job is unknown.  Heat and rest are the device's in any case.
Pure: see limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuguard.model import ClaimRecord, Device, GpuProcess
from gpuguard.request import IDLE_TOLERANCE

MEMORY_LIMITS = ("memory", "memory-limit")  # the share of a device, and what ends a job
_HERE = "this is a pid namespace of its own (a container), where the driver's pids name nobody"


def used_before(devices: Sequence[Device]) -> dict[str, int]:
    """uuid -> bytes that were in use before the job, of those of *devices* that were nobody's."""
    return {one.uuid: one.memory_used for one in devices if one.memory_used is not None and not one.processes}


@dataclass
class StandIn:
    """What is known of the devices of a job besides their processes.

    Args:
        before: uuid -> bytes in use before the job, of the devices that are claimed for it alone.
        pids_known: whether the driver's pids are those of this pid namespace.
    """

    before: Mapping[str, int] = field(default_factory=dict)
    pids_known: bool = True
    _listed: set[str] = field(default_factory=set)  # devices on which the driver has listed a process
    _unlisted: set[str] = field(default_factory=set)  # devices that did not show who uses them in the last sample

    def needed(self, devices: Sequence[Device]) -> frozenset[str]:
        """The uuids of those of *devices*, one sample of the job's, that do not show which processes are the job's."""
        if not self.pids_known:
            return frozenset(device.uuid for device in devices)
        self._listed.update(device.uuid for device in devices if device.processes)
        unlisted = {device.uuid for device in devices if self._is_used_unseen(device)}
        lasting, self._unlisted = unlisted & self._unlisted, unlisted
        return frozenset(lasting)

    def _is_used_unseen(self, device: Device) -> bool:
        before = self.before.get(device.uuid)
        if before is None or device.uuid in self._listed:
            return False  # where processes are listed at all, a list that is missing is a gap
        if device.processes is None:
            return True
        return device.memory_used is not None and device.memory_used - before > IDLE_TOLERANCE

    def put_on(self, device: Device, process: tuple[int, float] | None, claim: ClaimRecord) -> Device:
        """*device* with the one process (pid, start time) that stands for the job; None: the job has ended."""
        rows: tuple[GpuProcess, ...] = ()
        if process is not None:
            before, used = self.before.get(device.uuid), device.memory_used
            own = None if before is None or used is None else max(0, used - before)
            rows = (GpuProcess(process[0], own, start_time=process[1], uid=claim.uid, user=claim.user),)
        return replace(device, processes=rows, processes_plausible=True)

    def caveats(self, limits: Sequence[str], devices: Sequence[Device]) -> Iterator[str]:
        """What the owner of a job with these *limits* ("memory-limit") on *devices* should know before it starts."""
        if self.pids_known:
            return
        open_to_others = [str(device.index) for device in devices if device.uuid not in self.before]
        kept = [f"--{one}" for one in limits if one not in MEMORY_LIMITS or len(open_to_others) < len(devices)]
        unkept = [f"--{one}" for one in limits if one in MEMORY_LIMITS and open_to_others]
        if kept:
            are = "are" if len(kept) > 1 else "is"
            yield f"{_HERE}: {', '.join(kept)} {are} judged by the whole GPU, whoever else uses it."
        if unkept:
            yield (
                f"{', '.join(unkept)} cannot be kept on GPU {','.join(open_to_others)}: {_HERE}, and others may use "
                "that GPU too.  Claim it for this job alone, or start the container with its host's pids (--pid=host)."
            )


def hidden(device: Device) -> str:
    """What the owner of the job should know when it turns out only now."""
    return f"the driver lists no processes on GPU {device.index}: the limits of the job are judged by the whole GPU."
