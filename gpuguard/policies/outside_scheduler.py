"""Use of a device that the scheduler has given to somebody else, or to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.model import Finding
from gpuguard.policies.people import everywhere
from gpuguard.policies.view import View, process_subject
from gpuguard.units import format_bytes


@dataclass(frozen=True)
class OutsideScheduler:
    """A process computes on a device that the scheduler (Slurm, for one) has not given to its user.

    containers: false spares processes in containers, where jobs start some whose user is not the user of the job.

    Holds nowhere without a scheduler, and not on devices of which it says nothing.

        when: {outside_scheduler: {}}
    """

    containers: bool = True

    def check(self, view: View) -> Iterator[Finding]:
        """A finding per process and device."""
        if view.scheduled is None:
            return
        for device, process in everywhere(view):
            given = view.scheduled.get(device.uuid, view.scheduled.get(device.parent_uuid or device.uuid))
            if given is None or process.uid in given or (process.container and not self.containers):
                continue
            to = "other users" if given else "nobody"
            why = f"uses {format_bytes(process.memory_used)} of a device that the scheduler has given to {to}"
            yield Finding("outside_scheduler", process_subject(device, process), why, (process,))
