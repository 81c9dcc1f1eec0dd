"""Joining a device that others share: who shares it, what is promised already, and the check that nobody is quicker.

The memory of a device is promised by records, which no lock can count.  So a share takes its locks, writes its record
and only then adds up what all that are there promise: of two that come at the same moment, the one whose record is
written last sees the other.  The gate only keeps both of them from going back for nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.claims.records import probe_in_gate
from gpuguard.device_state import started_by
from gpuguard.eligibility import Sharing, is_share_of, no_share_left, sharing_on, terms_of
from gpuguard.model import ClaimRecord, Snapshot
from gpuguard.procfs import process_facts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from gpuguard.claims.claim import Claim, Lock
    from gpuguard.claims.directory import LockDirectory
    from gpuguard.request import Request

# Seconds, each time a random part of it: only a share that did not get the gate needs them.
_PAUSES = (0.01, 0.02, 0.04)


def sharing_of(snapshot: Snapshot, claims: Sequence[ClaimRecord]) -> dict[str, Sharing]:
    """uuid -> who shares the device, for each device of *snapshot* that is shared by one of *claims*."""
    shares = [record for record in claims if record.slots]
    if not shares:
        return {}
    sharing = {}
    for device in snapshot.devices:
        here = tuple(record for record in shares if is_share_of(record, device.uuid))
        if here:
            sharing[device.uuid] = sharing_on(device, here, _owners(replace(snapshot, devices=(device,), claims=here)))
    return sharing


def sharing_now(directory: LockDirectory, held: Mapping[str, Sequence[Lock]], snapshot: Snapshot) -> dict[str, Sharing]:
    """Who shares which device at this moment, without the locks *held* here; the caller has the gate."""
    uuids = [device.uuid for device in snapshot.devices]
    own = {lock.path[len(directory.lock_path("")) :] for locks in held.values() for lock in locks}
    sharing = sharing_of(snapshot, _without(probe_in_gate(directory, uuids), own))
    # Whether a process may belong to a share as one of those that hold its locks: they are looked up only then.
    if any(
        not all(sharing[device.uuid].belongs(process.pid) for process in device.processes or ())
        for device in snapshot.devices
        if device.uuid in sharing
    ):
        sharing = sharing_of(snapshot, _without(probe_in_gate(directory, uuids, holders=True), own))
    return sharing


def join(directory: LockDirectory, snapshot: Snapshot, request: Request, claim: Claim, taken: dict[str, str]) -> bool:
    """Write down that *claim* shares its devices, then see whether there is room for it; else it is released.

    Fills *taken* with the devices on which there is none.  Of several that meet and are too many together all go back;
    so they try again, each after another pause.
    """
    pauses = iter(_PAUSES)
    try:
        while True:
            claim.write_record(directory)
            late = _over_capacity(directory, snapshot, request, claim)
            pause = next(pauses, None)
            if not late or pause is None:
                break
            claim.remove_record()
            time.sleep(pause * os.urandom(1)[0] / 255)
    except BaseException:
        claim.release()
        raise
    if late:
        claim.release()
        taken.update(late)
    return not late


def _owners(snapshot: Snapshot) -> dict[int, int]:
    """pid -> uid of the share that it surely belongs to, on the one device of *snapshot*.

    A process belongs to its user's share.  Root's may be a container of any user: it needs an ancestor with a share.
    """
    uids = {record.uid for record in snapshot.claims}
    processes = snapshot.devices[0].processes or ()
    owners = {process.pid: process.uid for process in processes if process.uid and process.uid in uids}
    if len(owners) < len(processes):
        facts = process_facts(snapshot)
        for process in processes:
            if process.pid not in owners and (record := started_by(process, snapshot.claims, facts)):
                owners[process.pid] = record.uid
    return owners


def _over_capacity(directory: LockDirectory, snapshot: Snapshot, request: Request, claim: Claim) -> dict[str, str]:
    """uuid -> why, for each device of *claim* on which the shares, with its own, are more than there is.

    Its own record must have been written before.  Nothing that others write about our own slots counts.
    """
    records = probe_in_gate(directory, [device.uuid for device in claim])
    others = [record for record in records if (record.uid, record.id) != (os.geteuid(), claim.id)]
    sharing = sharing_of(snapshot, _without(others, set(claim.slots(directory))))
    terms = terms_of(snapshot, request, {}, sharing)
    reasons = {device.uuid: [reason.text for reason in no_share_left(device, terms)] for device in claim}
    return {uuid: "; ".join(texts) for uuid, texts in reasons.items() if texts}


def _without(claims: Iterable[ClaimRecord], slots: Collection[str]) -> tuple[ClaimRecord, ...]:
    return tuple(replace(claim, slots=tuple(slot for slot in claim.slots if slot not in slots)) for claim in claims)
