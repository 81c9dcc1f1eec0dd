"""One attempt to claim devices: look, lock the best ones, look again, all or nothing; or say why not.

Holds nothing when it fails, and waits for nobody: see lock for trying again.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.claims.hold import Claim, Lock, unlock
from gpuguard.claims.lockfiles import Gate, LockDirectory
from gpuguard.claims.records import locked_devices, probe, read_record
from gpuguard.claims.taking import take
from gpuguard.clusters import outer_devices
from gpuguard.errors import LockDirectoryError, NotEnoughGpus
from gpuguard.model import (
    HEALTH,
    IDLE_PROCESSES,
    PROCESS_DETAILS,
    PROCESSES,
    VERIFY_FIELDS,
    ClaimRecord,
    Device,
    Snapshot,
)
from gpuguard.request import ANY_MEMORY, Request, fields_needed, fields_to_verify
from gpuguard.select import choose, not_enough, possible, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuguard.backends import Backend
    from gpuguard.line.order import Ticket
    from gpuguard.sharing import Sharing

# Files of marks, root's and the daemon's: that module is read only where there are some.
_AGAINST = ("denied.json", "quarantined.json", "daemon/denied.json", "daemon/quarantined.json")


def outer_claim(directory: LockDirectory, environ: Mapping[str, str] = os.environ) -> ClaimRecord | None:
    """The living claim of this user inside which this process runs, or None."""
    claim_id = environ.get("GPUGUARD_CLAIM", "")
    if not claim_id or "/" in claim_id:
        return None
    return read_record(directory, os.geteuid(), claim_id)


def first_look(
    backend: Backend,
    ways: Sequence[Request],
    outer: ClaimRecord | None,
    environ: Mapping[str, str],
    *,
    in_line: bool = False,
) -> tuple[list[Request], Snapshot]:
    """A first look at all devices, and *ways* within the limits that others have set for this process.

    A list of processes takes 4.5 ms of a real driver, so it is read of the winners alone, behind their locks.  Where
    others are *in_line*, whose plan must know what is busy, or where a memory in use is unknown, it is read of each
    device whose memory does not say already that it is busy.
    """
    listed = {IDLE_PROCESSES} if in_line else frozenset()
    fields = _union(ways) | listed
    snapshot = backend.sample(fields)
    if not listed and any(device.memory_used is None and not device.problems for device in snapshot.devices):
        fields |= {IDLE_PROCESSES}
        snapshot = backend.sample(fields)
    limits = outer_devices(environ, snapshot.devices)
    within, reason = limits.uuids, limits.reason
    if outer:
        within = tuple(uuid for uuid in outer.devices if within is None or uuid in within)
        reason = f"outside the claim {outer.id} that this runs in"
        # The outer claim's own processes do not make its devices busy, nor does the memory that they use.
        ways = [replace(way, mine_as_free=way.mine_as_free | {os.geteuid()}, tolerance=ANY_MEMORY) for way in ways]
    if within is None:
        return list(ways), snapshot
    bounded = [replace(way, within=within, within_reason=reason) for way in ways]
    if not _union(bounded) <= fields:
        snapshot = backend.sample(_union(bounded) | fields)
    return bounded, snapshot


def _union(ways: Sequence[Request]) -> frozenset[str]:
    return frozenset().union(*(fields_needed(way) for way in ways))


def lock_best(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: dict[str, str],
    ticket: Ticket | None = None,
    explain: Callable[[Claim], object] = lambda claim: None,
) -> Claim | None:
    """Lock the best devices and read them again; None, and nothing locked, when that cannot be had.

    Fills *taken* with the devices that others were found to hold.  The *ticket* of whoever waits is for the daemon,
    where it gives the locks.  *explain* says what the claim is for; whoever is interrupted before its end has none.
    """
    held: dict[str, tuple[Lock, ...]] = {}
    claim: Claim | None = None
    try:
        if directory.closed:
            from gpuguard.petition import ask_for

            claim = ask_for(snapshot, request, directory, outer, taken, ticket)
        else:
            with Gate(directory):
                claim = _locked(backend, snapshot, request, directory, outer, taken, held)
        if claim is not None:
            explain(claim)
            return claim
    except BaseException:  # who holds a lock that nobody knows of keeps it as long as he runs
        if claim is None:
            _unlock_all(held)
        else:
            claim.release()
        raise
    _unlock_all(held)
    return None


def _locked(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: dict[str, str],
    held: dict[str, tuple[Lock, ...]],
) -> Claim | None:
    """The claim of the best devices.  Fills *held* with what it has locked, also where it is interrupted."""
    verified: set[str] = set()
    sharing_now = _sharing_now(directory, request, outer)
    while devices := choose(snapshot, request, taken, sharing_now(held, snapshot)).devices:
        wanted = {device.uuid for device in devices}
        for uuid in held.keys() - wanted:
            unlock(held.pop(uuid))
        if not all(_take(directory, device, request, held, taken, outer) for device in devices):
            continue
        unread = wanted - verified
        if not unread:
            locks = tuple(lock for device in devices for lock in held[device.uuid])
            claim = Claim(_new_id(outer), devices, locks, memory=request.memory, most=request.most_sharers)
            if outer or not request.share or _join(directory, snapshot, request, claim, taken):
                return claim
            held.clear()  # it has given them back
            continue
        # Whatever happened between the first look and the lock shows now: a stranger's process, a lost device.
        snapshot = look_again(backend, snapshot, request, sorted(unread), taken)
        verified |= unread
    return None


def _unlock_all(held: Mapping[str, Sequence[Lock]]) -> None:
    for locks in held.values():
        unlock(locks)


def _join(directory: LockDirectory, snapshot: Snapshot, request: Request, claim: Claim, taken: dict[str, str]) -> bool:
    from gpuguard.claims.shares import join

    return join(directory, snapshot, request, claim, taken)


def _sharing_now(
    directory: LockDirectory, request: Request, outer: ClaimRecord | None
) -> Callable[[Mapping[str, Sequence[Lock]], Snapshot], dict[str, Sharing]]:
    if not request.share or outer:
        return lambda held, snapshot: {}
    from gpuguard.claims.shares import sharing_now

    return lambda held, snapshot: sharing_now(directory, held, snapshot)


def sharing_of_claims(
    snapshot: Snapshot, request: Request, claims: Sequence[ClaimRecord], outer: ClaimRecord | None
) -> dict[str, Sharing]:
    """uuid -> who shares the device, for a request that may join them."""
    if not request.share or outer or not claims:
        return {}
    from gpuguard.claims.shares import sharing_of

    return sharing_of(snapshot, claims)


def look_again(
    backend: Backend, snapshot: Snapshot, request: Request, uuids: Sequence[str], taken: dict[str, str]
) -> Snapshot:
    """*snapshot* with a fresh look at the winners; one that the driver does not show any more counts as taken."""
    fresh = backend.sample(fields_to_verify(request), uuids)
    for uuid in set(uuids) - {device.uuid for device in fresh.devices}:
        taken[uuid] = "the driver does not show it any more"
    return snapshot.updated(fresh)


def _take(
    directory: LockDirectory,
    device: Device,
    request: Request,
    held: dict[str, tuple[Lock, ...]],
    taken: dict[str, str],
    outer: ClaimRecord | None,
) -> bool:
    if device.uuid in held:
        return True
    try:
        locks = take(directory, device, request, outer)
    except LockDirectoryError as error:
        taken[device.uuid] = str(error)
        return False
    if locks is None:
        taken.setdefault(device.uuid, "claimed by somebody just now")
        return False
    held[device.uuid] = locks
    return True


def why_not(
    backend: Backend,
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: Mapping[str, str],
    *,
    surely: bool = False,
) -> NotEnoughGpus:
    """The error with all reasons; *surely* reads what is claimed too, to tell whether it is for ever."""
    claims, others = claims_against(directory, snapshot, outer, request)
    taken = {**taken, **others, **barred(snapshot, directory, outer)}
    sharing = sharing_of_claims(snapshot, request, claims, outer)
    unclaimed = [device.uuid for device in snapshot.devices if surely or device.uuid not in taken]
    if unclaimed:
        # Whether it can ever be met depends on their health, and the reason on who uses them.
        details = VERIFY_FIELDS | fields_needed(request) | {PROCESSES, PROCESS_DETAILS, HEALTH}
        snapshot = snapshot.updated(backend.sample(details, unclaimed))
    choice = choose(snapshot, request, taken, sharing)
    if not surely and len(possible(choice).devices) < request.num_gpus:
        return why_not(backend, snapshot, request, directory, outer, taken, surely=True)
    return not_enough(snapshot, request, choice)


def claims_against(
    directory: LockDirectory, snapshot: Snapshot, outer: ClaimRecord | None, request: Request
) -> tuple[tuple[ClaimRecord, ...], dict[str, str]]:
    """The living claims, and uuid -> who stands in the way: to a request for a share nobody who shares."""
    uuids = [device.uuid for device in snapshot.devices]
    claims = probe(directory, uuids)
    if outer is None:
        alone = [record for record in claims if not (request.share and record.slots)]
        return claims, taken_by(alone, time.time())
    inner = locked_devices(directory, [f"{uuid}.nested" for uuid in uuids])
    return claims, {
        uuid: f"used by another command inside the claim {outer.id}" for uuid in uuids if f"{uuid}.nested" in inner
    }


def barred(snapshot: Snapshot, directory: LockDirectory, outer: ClaimRecord | None) -> dict[str, str]:
    """uuid -> what was decided against the device, or against any new claim of this user."""
    if directory.owner is None or not any(os.path.lexists(f"{directory.path}/{name}") for name in _AGAINST):
        return {}
    from gpuguard.marks import against

    uid = None if outer else os.geteuid()  # whoever has a claim already may divide it
    return against(directory, [device.uuid for device in snapshot.devices], uid, time.time())


def _new_id(outer: ClaimRecord | None) -> str:
    own = os.urandom(4).hex()
    if outer:
        return f"{outer.id}.{own}"
    job = os.environ.get("SLURM_JOB_ID", "")  # of a cluster whose prolog claims nothing: see clusters.slurm_jobs
    return f"slurm{job}-{own}" if job.isdecimal() and len(job) < 12 else own
