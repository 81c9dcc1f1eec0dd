"""Use without a claim."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from gpuguard.attribution import claims_on, claims_readable, places
from gpuguard.model import Finding
from gpuguard.policies.people import computing
from gpuguard.policies.view import View, process_subject
from gpuguard.units import format_bytes, parse_bytes


@dataclass(frozen=True)
class Unclaimed:
    """A process computes on a device that nobody has claimed.

    min_memory: processes with less memory there do not count; absent: all count.

    Does not hold while the claims cannot be read, and never for desktops.

        when: {unclaimed: {min_memory: 1GiB}}
    """

    min_memory: Annotated[int, parse_bytes] = 0

    def check(self, view: View) -> Iterator[Finding]:
        """A finding per process and device."""
        if not claims_readable(view.snapshot):
            return
        limit = f", {format_bytes(self.min_memory)} are too much for that" if self.min_memory else ""
        for device in places(view.snapshot):
            if claims_on(view.snapshot, device):
                continue
            for process in computing(device):
                if self.min_memory and (process.memory_used is None or process.memory_used < self.min_memory):
                    continue
                why = f"uses {format_bytes(process.memory_used)} of a device that nobody has claimed{limit}"
                yield Finding("unclaimed", process_subject(device, process), why, (process,))
