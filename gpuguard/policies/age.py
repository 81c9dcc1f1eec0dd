"""What has gone on for too long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from gpuguard.errors import InvalidRequest
from gpuguard.model import Device, Finding
from gpuguard.policies.people import COMPUTING, claim_subject, everywhere
from gpuguard.policies.trend import recent
from gpuguard.policies.view import View, device_subject, process_subject
from gpuguard.request import idle_limit
from gpuguard.units import format_duration, parse_duration


@dataclass(frozen=True)
class Age:
    """A process has run for too long, or a claim was held for too long without a process.

    run_time_above: since the start of the process.
    claim_without_process_above: in all that time no memory was used on any device of the claim, and none of them has a
        process now.  Known only after gpuguard has watched for so long.

        when: {age: {run_time_above: 72h, claim_without_process_above: 2h}}
    """

    run_time_above: Annotated[float, parse_duration] | None = None
    claim_without_process_above: Annotated[float, parse_duration] | None = None

    def __post_init__(self) -> None:
        if self.run_time_above is None and self.claim_without_process_above is None:
            raise InvalidRequest("no age is given: write run_time_above or claim_without_process_above.")

    def needs(self) -> tuple[tuple[str, float], ...]:
        """The memory of the devices, for claims."""
        limit = self.claim_without_process_above
        return () if limit is None else (("memory_used", limit),)

    def check(self, view: View) -> Iterator[Finding]:
        """A finding per process and device, and one per claim."""
        if self.run_time_above is not None:
            yield from self._processes(view, self.run_time_above)
        if self.claim_without_process_above is not None:
            yield from self._claims(view, self.claim_without_process_above)

    def _processes(self, view: View, limit: float) -> Iterator[Finding]:
        now = view.clock
        for device, process in everywhere(view):
            assert process.start_time is not None  # judged() leaves out the others
            run_time = now - process.start_time
            if run_time > limit:
                why = f"has run for {format_duration(run_time)}, {format_duration(limit)} are allowed"
                yield Finding("age", process_subject(device, process), why, (process,))

    def _claims(self, view: View, limit: float) -> Iterator[Finding]:
        for record in view.snapshot.claims:
            if not record.alive or record.uid < 0 or record.since is None or not record.devices:
                continue
            held = view.snapshot.taken_at - record.since
            devices = [view.snapshot.device(uuid) for uuid in record.devices]
            if held > limit and all(device and _unused(device, view, limit) for device in devices):
                why = f"held for {format_duration(held)}, the last {format_duration(limit)} without a process"
                yield Finding("age", claim_subject(record), why)


def _unused(device: Device, view: View, seconds: float) -> bool:
    divided = any(other.parent_uuid == device.uuid for other in view.snapshot.devices)
    if divided or device.processes is None or not device.processes_plausible or device.memory_used is None:
        return False
    if any(process.kind in COMPUTING for process in device.processes):
        return False
    past = recent(view, device_subject(device), "memory_used", seconds)
    return bool(past) and max(device.memory_used, *(memory for _, memory in past)) <= idle_limit(device)
