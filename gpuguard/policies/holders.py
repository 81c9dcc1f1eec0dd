"""Who holds a device: the subjects that a rule can be `per`, with the processes that an action would mean.

Only processes that may be judged at all, and never a desktop.  Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuguard.attribution import claim_of, claims_on, places, started_by
from gpuguard.model import ClaimRecord, Device, GpuProcess, Subject
from gpuguard.policies.people import computing
from gpuguard.policies.view import View, device_subject, process_subject

Use = tuple[Subject, int | None, tuple[GpuProcess, ...]]  # who, bytes of memory, whom an action would mean


def wholes(view: View) -> Iterator[tuple[Device, tuple[Device, ...]]]:
    """Each device that is no part of another one here, with the places on it: its instances, else itself."""
    uuids, parts = {device.uuid for device in view.snapshot.devices}, places(view.snapshot)
    for whole in view.snapshot.devices:
        if whole.parent_uuid not in uuids:
            yield whole, tuple(one for one in parts if whole.uuid in (one.uuid, one.parent_uuid))


def per_device(view: View, device: Device) -> Iterator[Use]:
    """The device as such: nobody in particular is to blame."""
    yield device_subject(device), device.memory_used, ()


def per_process(view: View, device: Device) -> Iterator[Use]:
    """Each process that computes there."""
    for process in computing(device):
        yield process_subject(device, process), process.memory_used, (process,)


def per_user(view: View, device: Device) -> Iterator[Use]:
    """Each user of the device with all processes there."""
    of_user: dict[int | None, list[GpuProcess]] = {}
    for process in computing(device):
        of_user.setdefault(process.uid, []).append(process)
    for processes in of_user.values():
        subject = Subject("user", device=device.uuid, uid=processes[0].uid, user=processes[0].user)
        yield subject, known_sum(processes), tuple(processes)


def per_claim(view: View, device: Device) -> Iterator[Use]:
    """Each claim with its processes there.

    Where a user has two claims nobody knows which is whose, unless they share the device and were started below them.
    """
    claims = claims_on(view.snapshot, device)
    for claim in claims:
        if claim.uid < 0:
            continue
        if sum(other.uid == claim.uid for other in claims) == 1:
            found = tuple(one for one in computing(device) if claim_of(one, claims, view.seen) == claim)
            yield claim_here(device, claim), known_sum(found), found
        elif claim.slots:
            found = tuple(one for one in computing(device) if started_by(one, claims, view.seen) == claim)
            yield claim_here(device, claim), known_sum(found), found


def claim_here(device: Device, claim: ClaimRecord) -> Subject:
    """A claim, on one of its devices."""
    return Subject("claim", device=device.uuid, uid=claim.uid, claim=claim.id, user=claim.user)


def known_sum(processes: Sequence[GpuProcess]) -> int | None:
    """The memory that is known to be used: never too much, so it accuses nobody wrongly."""
    known = [process.memory_used for process in processes if process.memory_used is not None]
    return sum(known) if known else None


USES = {"process": per_process, "user": per_user, "claim": per_claim, "device": per_device}
