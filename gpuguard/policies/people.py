"""What the rules about people have in common: who computes where, and how a claim or a process is called in a finding.

Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuguard.attribution import places
from gpuguard.model import ClaimRecord, Device, GpuProcess, Subject
from gpuguard.policies.view import View, judged

COMPUTING = ("compute", "mps")  # a desktop is graphics, or both at once, and is nobody's job


def computing(device: Device) -> tuple[GpuProcess, ...]:
    """The processes of *device* that may be judged and that compute there; no desktops."""
    here = judged(device)
    for process in here:  # mostly all of them: no generator is needed then
        if process.kind not in COMPUTING:
            return tuple(each for each in here if each.kind in COMPUTING)
    return here


def everywhere(view: View) -> Iterator[tuple[Device, GpuProcess]]:
    """Each computing process on each device; a device that is divided has none but those of its instances."""
    for device in places(view.snapshot):
        for process in computing(device):
            yield device, process


def claim_subject(record: ClaimRecord) -> Subject:
    """A claim, on all of its devices."""
    return Subject("claim", uid=record.uid, claim=record.id, user=record.user)


def called(user: str | None, uid: int | None) -> str:
    """A user as people know him: the name, else the number."""
    return user or f"uid {uid}"
