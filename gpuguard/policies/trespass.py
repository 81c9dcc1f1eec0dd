"""Use of a device that somebody else has claimed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.attribution import claim_of, claims_on, places
from gpuguard.model import Finding
from gpuguard.policies.people import called, computing
from gpuguard.policies.view import View, process_subject
from gpuguard.units import format_bytes


@dataclass(frozen=True)
class Trespass:
    """A process computes on a device that another user has claimed.

    Whoever holds the lock of the claim is at home there, and so are the other processes of its owner.  In favour of
    the process: root's are taken for containers of the claim, and a lock without a record may be anybody's.

    containers: judge processes in containers, too; their user often is not the user who started the container.
    Those that a user runs without root (rootless) are always judged: they are no containers here.

        when: {trespass: {}}
    """

    containers: bool = False

    def check(self, view: View) -> Iterator[Finding]:
        """A finding per process and device."""
        for device in places(view.snapshot):
            here = claims_on(view.snapshot, device)
            if not here or any(record.uid < 0 for record in here):
                continue
            for process in computing(device):
                if not process.uid or (process.container and not self.containers):
                    continue
                if claim_of(process, here, view.seen) is None:
                    owners = ", ".join(called(record.user, record.uid) for record in here)
                    why = f"uses {format_bytes(process.memory_used)} of a device that {owners} has claimed"
                    yield Finding("trespass", process_subject(device, process), why, (process,))
