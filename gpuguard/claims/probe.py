"""Who claims which device now: the locks that are held, each with its record where there is one.

A lock that is held without a record comes as a claim of user "unknown"; devices that a record names without their locks
being held are left out.  A device that others share has slots, so many lock files beside its own: a share holds the
lock of the device LOCK_SH, so that it excludes an exclusive claim and the other way round, and one slot LOCK_EX, so
that the kernel bounds their number and any user can count them.  Holds no lock beyond a moment.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.claims import grants
from gpuguard.claims.directory import Gate, LockDirectory, open_lock, try_flock
from gpuguard.claims.holders import held_by_no_process, holders_of, remembered
from gpuguard.claims.records import read_records
from gpuguard.errors import LockDirectoryError
from gpuguard.files import exists_in_place
from gpuguard.model import ClaimRecord
from gpuguard.request import SLOTS
from gpuguard.users import user_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpuguard.claims.grants import Grant

_NOBODY = -1
HOLDERS_SECONDS = 10.0  # after which a ClaimWatcher finds out anew who holds the locks
STEP_SECONDS = 1.0  # by which a clock is set at once, and not only made to go faster for a while


def slot_names(uuid: str) -> tuple[str, ...]:
    """The names of the lock files of a device's slots."""
    return tuple(f"{uuid}.slot{number}" for number in range(SLOTS))


def locked_slots(directory: LockDirectory, uuid: str) -> tuple[str, ...]:
    """The slots of a device that are held now; without the gate, so lock that first where it matters."""
    # The sticky directory has no files for the slots until a claim shares the device, and the first is taken first.
    if not exists_in_place(directory.lock_path(f"{uuid}.slot0")):
        return ()
    return tuple(name for name in slot_names(uuid) if _is_locked(directory, name))


def locked_devices(directory: LockDirectory, uuids: Iterable[str]) -> set[str]:
    """Those of *uuids* (or other names of locks) whose lock is held, alone or as one that shares it.

    Under the gate, so that no claim is disturbed.  A GPU of which only MIG instances are claimed is not among
    them: its lock is held shared.
    """
    with Gate(directory):
        return set(_held_locks(directory, uuids).values())


def locks_held(directory: LockDirectory, uuids: Iterable[str]) -> frozenset[str]:
    """The names of all locks that are held on these devices, of whole ones and of shares."""
    with Gate(directory):
        return frozenset(_held_locks(directory, uuids))


def probe(
    directory: LockDirectory, uuids: Iterable[str], *, known: Sequence[ClaimRecord] = ()
) -> tuple[ClaimRecord, ...]:
    """Who claims which of the devices now: one record per claim, devices and slots limited to those really locked.

    *known* are claims that were found a moment ago.  Of those that still live the holders are believed, less those that
    have ended since: to find them anew, every process of the machine is read.
    """
    with Gate(directory):
        locked, granted = _held_and_granted(directory, uuids)
    return _claims(directory, locked, granted, known)


def probe_in_gate(directory: LockDirectory, uuids: Iterable[str], *, holders: bool = False) -> tuple[ClaimRecord, ...]:
    """As probe(), for a caller that has the gate already; *holders*: read every process of the machine, too."""
    locked, granted = _held_and_granted(directory, uuids)
    if holders or not locked:
        return _claims(directory, locked, granted)
    return _join(locked, read_records(directory), {}, granted)


class ClaimWatcher:
    """Probes the claims of a directory again and again, for callers that only show them.

    Which locks are held is read each time; by which processes is found out anew every HOLDERS_SECONDS, because that
    reads every process of the machine.  A caller that decides something uses probe().
    """

    def __init__(self) -> None:
        self._known: tuple[ClaimRecord, ...] = ()
        self._forgets_at = float("-inf")

    def probe(
        self, directory: LockDirectory, uuids: Iterable[str], known: Sequence[ClaimRecord] = ()
    ) -> tuple[ClaimRecord, ...]:
        """The claims now, as probe(); *known* is what another process, as the daemon, has found a moment ago."""
        now = time.monotonic()
        if now >= self._forgets_at:
            self._known, self._forgets_at = (), now + HOLDERS_SECONDS
        self._known = probe(directory, uuids, known=known or self._known)
        return self._known

    def prepare(self, directory: LockDirectory) -> None:
        """Find out who holds the locks now, while something else is waited for."""
        start = directory.prefix
        names = [name.removeprefix(start) for name in os.listdir(directory.locks) if name.startswith(start)]
        self.probe(directory, [name for name in names if name.startswith(("GPU-", "MIG-")) and ".slot" not in name])


class FirstSeen:
    """How old claims are at least, for a caller that samples again and again: as old as it knows them.

    The age in a record is its owner's word: a user who wrote each minute that a claim was made just now was never
    judged by rules that leave a new claim alone for a while.  A claim without a record has an age by this, too, and
    none grows older by hours because the machine's clock is set.  Nothing is known of the time before the first sample.
    """

    def __init__(self) -> None:
        # uid, id, uuid -> CLOCK_BOOTTIME, and the unix time that it was then
        self._seen: dict[tuple[int, str, str], tuple[float, float]] = {}

    def dated(self, claims: Iterable[ClaimRecord], clock: float, now: float) -> tuple[ClaimRecord, ...]:
        """*claims* as found at *clock* (CLOCK_BOOTTIME), which was *now* (unix time), none younger than it is."""
        seen: dict[tuple[int, str, str], tuple[float, float]] = {}
        dated = []
        for claim in claims:
            for uuid in claim.devices:
                key = claim.uid, claim.id, uuid
                seen[key] = min(self._seen.get(key, (clock, now)), (clock, now))
            # A claim may have got a device since.
            first, then = max((seen[claim.uid, claim.id, uuid] for uuid in claim.devices), default=(clock, now))
            known_since = now - (clock - first)
            since = claim.since
            if since is not None and abs(known_since - then) > STEP_SECONDS:  # it was written by the clock of then
                since += known_since - then
            if claim.devices and (since is None or since > known_since):
                since = known_since
            dated.append(claim if since == claim.since else replace(claim, since=since))
        self._seen = seen
        return tuple(dated)


def _claims(
    directory: LockDirectory,
    locked: Mapping[str, str],
    granted: Mapping[str, Grant | None],
    known: Sequence[ClaimRecord] = (),
) -> tuple[ClaimRecord, ...]:
    if not locked:
        return ()
    records = read_records(directory)
    holders = remembered(known, records)
    if locked.keys() <= holders.keys():
        return _join(locked, records, holders, granted)
    uids = {record.uid for record in records}
    holders = holders_of(directory, set(locked), lambda uid: uid in uids)
    if lost := locked.keys() - holders.keys():  # a lock without a record, or with another user's
        holders.update(holders_of(directory, lost, lambda uid: uid not in uids))
    claims = _join(locked, records, holders, granted)
    ownerless = {name for claim in claims if claim.uid == _NOBODY for name in claim.slots or claim.devices}
    hidden = held_by_no_process(directory, ownerless - holders.keys())
    return tuple(replace(claim, hidden=True) if hidden & {*claim.slots, *claim.devices} else claim for claim in claims)


def _join(
    locked: Mapping[str, str],
    records: Sequence[ClaimRecord],
    holders: Mapping[str, Mapping[int, int]],
    granted: Mapping[str, Grant | None],
) -> tuple[ClaimRecord, ...]:
    """The records with what is really theirs of the locks that are held (name -> uuid), and one for each other lock.

    What the daemon has given is known to it, whatever a record says.
    """
    claims = []
    explained: set[str] = set()
    for record in records:
        names = {
            name
            for name, uuid in locked.items()
            if uuid in record.devices
            # A share of a device holds a slot; a record that names one does not have the device alone.
            and (name in record.slots if name != uuid else not record.slots)
            and _may_hold(record, holders.get(name, {}), granted.get(name))
        }
        held = {locked[name] for name in names}
        devices = tuple(uuid for uuid in record.devices if uuid in held)
        if devices or not record.devices:
            pids = {pid for name in names for pid in holders.get(name, {})}
            for grant in filter(None, map(granted.get, names)):
                record = grant.confirmed(record)
            slots = tuple(sorted(names - held))
            claims.append(replace(record, devices=devices, slots=slots, holders=tuple(sorted(pids))))
            explained |= names
    unexplained: dict[str, ClaimRecord] = {}
    for name in sorted(locked.keys() - explained):
        claim = _without_record(name, locked[name], holders.get(name, {}), granted.get(name))
        same = unexplained.get(claim.id, claim)  # several devices that were given to one claim
        devices, slots = (*same.devices, *claim.devices), (*same.slots, *claim.slots)
        unexplained[claim.id] = replace(claim, devices=tuple(dict.fromkeys(devices)), slots=tuple(dict.fromkeys(slots)))
    return (*claims, *unexplained.values())


def _without_record(name: str, uuid: str, holders: Mapping[int, int], grant: Grant | None) -> ClaimRecord:
    uids = set(holders.values())
    uid = grant.uid if grant else uids.pop() if len(uids) == 1 else _NOBODY
    user = user_name(uid) if uid >= 0 else "unknown"
    slots = (name,) if name != uuid else ()
    claim_id = grant.claim if grant else f"no-record-{uuid[:12]}{name[len(uuid) :].replace('.', '-')}"
    record = ClaimRecord(claim_id, uid, user, (uuid,), holders=tuple(sorted(holders)), slots=slots)
    return grant.confirmed(record) if grant else record


def _may_hold(record: ClaimRecord, holders: Mapping[int, int], grant: Grant | None) -> bool:
    """False for a record that names a device which visibly is another user's."""
    if grant:
        return (record.uid, record.id.partition(".")[0]) == (grant.uid, grant.claim)
    return not holders or record.uid in holders.values()


def _held_and_granted(
    directory: LockDirectory, uuids: Iterable[str]
) -> tuple[dict[str, str], Mapping[str, Grant | None]]:
    """The locks that are held, as _held_locks(), and to whom the daemon gave them, where it does."""
    if directory.keeper is None:
        return _held_locks(directory, uuids), {}
    if not directory.closed:
        locked = _held_locks(directory, uuids)
        return locked, grants.grant_of(directory, locked)
    wanted, granted = set(uuids), grants.granted(directory)
    if granted is None:  # no daemon: nobody can claim now, and those who do say so themselves
        pairs = [(record, uuid) for record in read_records(directory) for uuid in record.devices if uuid in wanted]
        return {name: uuid for record, uuid in pairs for name in record.slots or (uuid,) if uuid in name}, {}
    names = [(name, name if name in wanted else name.rpartition(".slot")[0]) for name in granted]
    return {name: uuid for name, uuid in names if uuid in wanted}, granted


def _held_locks(directory: LockDirectory, uuids: Iterable[str]) -> dict[str, str]:
    """The locks that are held, name -> uuid: that of a device where one has it alone, else its locked slots."""
    if directory.closed:
        return _held_and_granted(directory, uuids)[0]
    locked = {}
    for uuid in uuids:
        if not exists_in_place(directory.lock_path(uuid)):
            continue
        try:
            descriptor = open_lock(directory, uuid)
        except LockDirectoryError:
            locked[uuid] = uuid  # planted: nobody can claim it until root has looked at it
            continue
        try:
            if not try_flock(descriptor, fcntl.LOCK_SH):
                locked[uuid] = uuid
            elif slots := locked_slots(directory, uuid):
                locked.update(dict.fromkeys(slots, uuid))
            elif (
                directory.keeper is not None
                # A file of which a user may have kept a descriptor is made anew; an empty one is shared by root.
                and not grants.renew(directory, uuid, descriptor)
                and os.fstat(descriptor).st_size
            ):
                locked[uuid] = uuid
        finally:
            os.close(descriptor)
    return locked


def _is_locked(directory: LockDirectory, name: str) -> bool:
    if not exists_in_place(directory.lock_path(name)):
        return False
    try:
        descriptor = open_lock(directory, name)
    except LockDirectoryError:
        return True  # planted: nobody can say what it hides until root has looked at it
    try:
        if directory.keeper is None:
            return not try_flock(descriptor, fcntl.LOCK_SH)
        # Given by the daemon: its receiver may hold it shared, or keep a descriptor of it.
        return not grants.renew(directory, name, descriptor)
    finally:
        os.close(descriptor)
