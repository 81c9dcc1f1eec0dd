"""One sample, laid out so that everything about a device, a process, a claim or a user is found at once.

Only what may be judged is in it: plausible lists, processes whose identity is known, claims that live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuguard.model import ClaimRecord, Device, GpuProcess, Subject
from gpuguard.policies.view import View, forget_subjects, judged

Identity = tuple[int, float]  # of a process: pid, start_time
SubjectIdentity = tuple[str, str | None, int | None, float | None, int | None, str | None]


@dataclass(frozen=True)
class Sight:
    """A view with its indexes.

    Args:
        view: what was seen.
        zone: seconds east of UTC.
        devices: by uuid.
        processes: by (pid, start_time): the devices on which it runs, and what the driver says of it there.
        claims: living ones by uid and id; an id alone can be copied by somebody else.
        claims_on: living ones by device.
        territory: the devices where a user has a process or a claim, by uid.
        gaps: field -> reason by device; under None what is missing of the whole machine.
    """

    view: View
    zone: float
    devices: Mapping[str, Device]
    processes: Mapping[Identity, Mapping[str, GpuProcess]]
    claims: Mapping[tuple[int, str], ClaimRecord]
    claims_on: Mapping[str, tuple[ClaimRecord, ...]]
    territory: Mapping[int, set[str]]
    gaps: Mapping[str | None, Mapping[str, str]]

    def claim_of(self, subject: Subject) -> ClaimRecord | None:
        """The living claim that a subject names."""
        if subject.claim is None or subject.uid is None:
            return None
        return self.claims.get((subject.uid, subject.claim))

    def blindness(self, uuid: str) -> str | None:
        """Why the processes of a device cannot be judged; None when they can."""
        device = self.devices.get(uuid)
        if device is None:
            return "the device is missing from the sample"
        if device.processes is None:
            gaps = self.gaps.get(uuid, {})
            return gaps.get("processes") or gaps.get("device") or "the driver gives no list of processes"
        return None if device.processes_plausible else "the list of processes is not plausible"


def look(view: View, zone: float = 0.0) -> Sight:
    """Lay out one sample."""
    snapshot = view.snapshot
    processes: dict[Identity, dict[str, GpuProcess]] = {}
    territory: dict[int, set[str]] = {}
    for device in snapshot.devices:
        for process in judged(device):
            assert process.start_time is not None and process.uid is not None  # judged() leaves out the others
            processes.setdefault((process.pid, process.start_time), {})[device.uuid] = process
            territory.setdefault(process.uid, set()).add(device.uuid)
    forget_subjects(sum(map(len, processes.values())))
    # A claim without a readable record has no owner: nobody is judged by it.
    claims = {(claim.uid, claim.id): claim for claim in snapshot.claims if claim.alive and claim.uid >= 0}
    claims_on: dict[str, tuple[ClaimRecord, ...]] = {}
    for claim in claims.values():
        territory.setdefault(claim.uid, set()).update(claim.devices)
        for uuid in claim.devices:
            claims_on[uuid] = (*claims_on.get(uuid, ()), claim)
    gaps: dict[str | None, dict[str, str]] = {}
    for gap in snapshot.gaps:
        gaps.setdefault(gap.device, {})[gap.field] = gap.reason
    devices = {device.uuid: device for device in snapshot.devices}
    return Sight(view, zone, devices, processes, claims, claims_on, territory, gaps)


def identity_of(subject: Subject) -> SubjectIdentity:
    """What makes a subject the same as a sample ago."""
    return (subject.kind, subject.device, subject.pid, subject.start_time, subject.uid, subject.claim)


def reach_of(subject: Subject, processes: Sequence[GpuProcess], sight: Sight) -> tuple[str, ...]:
    """The devices that are touched when something is done about *subject* and *processes*."""
    if subject.kind == "process" and len(processes) == 1 and processes[0].start_time is not None:
        there = sight.processes.get((processes[0].pid, processes[0].start_time), {})
        if len(there) == 1 and subject.device in there:
            return tuple(there)  # as for nearly all findings: it spares them two sets and a sorting
    reach = {subject.device} if subject.device else set()
    for process in processes:
        if process.start_time is not None:
            reach.update(sight.processes.get((process.pid, process.start_time), ()))
    claim = sight.claim_of(subject)
    if claim is not None and (subject.kind == "claim" or not reach):
        reach.update(claim.devices)
    if not reach and subject.uid is not None:
        reach.update(sight.territory.get(subject.uid, ()))
    return tuple(sorted(reach))
