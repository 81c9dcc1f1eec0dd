"""Claim records: one small JSON file per claim that tells people who holds what and why.

The lock is the truth, the record is a comment: it counts only while it is itself locked (by the descriptors that the
job inherits, so it dies with the claim), its owner is the file's uid and never its content, and devices that it
names without their locks being held are left out.  Unreadable means "claimed, no details".
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.claims.directory import Gate, LockDirectory, is_same_file, open_lock, try_flock
from gpuguard.claims.holders import held_by_no_process, holders_of, remembered
from gpuguard.claims.slots import locked_slots
from gpuguard.errors import LockDirectoryError, shortage
from gpuguard.files import create_file, exists_in_place, open_regular, status_in_place, write_all
from gpuguard.jsonio import loads
from gpuguard.model import ClaimRecord
from gpuguard.users import parties, user_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from gpuguard.claims.grants import Grant

MAX_BYTES = 4096
LARGEST = 2**50  # of a number in a record: a time, or the bytes of a device
MOST_OF_ONE = 500  # records of one user that are read: claims beyond them have no details
_NOBODY = -1
_EXPECTED = b', "expected": '  # the last value of a record, behind which there is room for a time
_ROOM = b" " * 12


def write_record(directory: LockDirectory, content: Mapping[str, Any], owner: int | None = None) -> tuple[str, int]:
    """Write a record that lives as long as the returned descriptor, or a copy of it in a job, does.

    Args:
        directory: of the claims.
        content: with the id of the claim.
        owner: uid of whose it is, where root writes it for him.

    Returns:
        The path of the record and its locked descriptor (close-on-exec).
    """
    path = record_path(directory, os.geteuid() if owner is None else owner, str(content["id"]))
    unfinished = unfinished_path(directory)
    descriptor = create_file(unfinished, owner=owner)
    try:
        try_flock(descriptor)
        write_all(descriptor, _encoded(content))
        _put_there(unfinished, path)  # readers see it whole, and already locked
    except BaseException:
        for name in (unfinished, path):  # who is interrupted may have given it its name already
            if is_same_file(descriptor, name):
                os.unlink(name)
        os.close(descriptor)
        raise
    return path, descriptor


def unfinished_path(directory: LockDirectory) -> str:
    """Where a file is written that gets its name when it is whole.

    Nobody learns that name from it: who makes a file of that name just before keeps the finished one away.
    """
    return f"{directory.records}/{directory.prefix}unfinished.{os.urandom(8).hex()}.new"


def _put_there(unfinished: str, path: str) -> None:
    """Give a file its name; what somebody has put there makes way for root's."""
    try:
        os.rename(unfinished, path)
    except IsADirectoryError:
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
        if library.renameat2(-100, os.fsencode(unfinished), -100, os.fsencode(path), 2):  # AT_FDCWD, RENAME_EXCHANGE
            raise


def record_path(directory: LockDirectory, uid: int, claim_id: str) -> str:
    """Where the record of a claim lies."""
    return f"{directory.records}/{directory.prefix}claim.{uid}.{claim_id}.json"


def _encoded(content: Mapping[str, Any]) -> bytes:
    import json

    content = dict(content)
    # The command line is the one part that may be long; the claim is worth more than its last arguments.
    while len(encoded := json.dumps({**content, "expected": None}).encode()) > MAX_BYTES - len(_ROOM):
        command, note = content.get("command") or (), content.get("note") or ""
        if command:
            content["command"] = [word[:200] for word in command[: len(command) // 2]]
        else:
            content["note"] = note[: len(note) // 2]
    return encoded[:-1] + _ROOM + b"}"


def write_expected(descriptor: int, when: float) -> None:
    """Write into a record when (unix time) its job should end: in its place, as a job holds the file it inherited."""
    record = os.pread(descriptor, MAX_BYTES, 0).partition(b"\n")[0]
    place = record.rfind(_EXPECTED) + len(_EXPECTED)
    room = len(record) - len(b"}") - place
    if _EXPECTED in record and len(told := b"%.3f" % when) <= room:
        os.pwrite(descriptor, told.ljust(room), place)


def read_records(directory: LockDirectory) -> list[ClaimRecord]:
    """All records whose claim lives, oldest first; those of dead claims are removed where this user may."""
    start = f"{directory.prefix}claim."
    names = [name for name in directory.names() if name.startswith(start) and name.endswith(".json")]
    if not names:
        return []
    names, _ = first_of_each(directory, names, MOST_OF_ONE)
    root = os.lstat(directory.records).st_uid
    records = [record for name in names if (record := _read_record(f"{directory.records}/{name}", name, start, root))]
    return sorted(records, key=lambda record: (record.since or 0, record.id))


def first_of_each(directory: LockDirectory, names: list[str], most: int) -> tuple[list[str], dict[int, int]]:
    """Of each user's files the first *most*, and uid -> how many there are beyond; root's are not counted.

    Everybody reads them all (30 us each), and anybody can make any number.
    """
    if len(names) <= most:
        return names, {}
    found = []
    for name in names:
        try:
            status = status_in_place(f"{directory.records}/{name}")
        except OSError:
            continue  # it has just ended
        found.append((status.st_uid, status.st_ctime, name))
    whose = parties({uid for uid, _, _ in found})
    of_user: dict[int, list[tuple[float, str]]] = {}
    for uid, since, name in found:
        of_user.setdefault(whose[uid], []).append((since, name))
    beyond = {uid: len(own) - most for uid, own in of_user.items() if uid and len(own) > most}
    return [name for uid, own in of_user.items() for _, name in sorted(own)[: most if uid else None]], beyond


def read_record(directory: LockDirectory, uid: int, claim_id: str) -> ClaimRecord | None:
    """The record of one living claim of one user; None when there is none."""
    if directory.is_missing():
        return None
    start = f"{directory.prefix}claim."
    path = record_path(directory, uid, claim_id)
    return _read_record(path, os.path.basename(path), start, os.lstat(directory.records).st_uid)


def _read_record(path: str, name: str, start: str, root: int) -> ClaimRecord | None:
    try:
        descriptor, status = open_regular(path)
    except OSError as error:
        if shortage(error):  # it is not gone for that
            raise
        return None
    try:
        if try_flock(descriptor, fcntl.LOCK_SH):
            _remove_stale(path, descriptor, status.st_uid)
            return None
        place = name[len(start) : -len(".json")]
        # Or it stands where that of another user is looked for.  In a namespace of users all others look like one.
        if place.partition(".")[0] != str(status.st_uid) and status.st_uid != root:
            return None
        return _decoded(os.read(descriptor, MAX_BYTES + 1), status.st_uid, place)
    finally:
        os.close(descriptor)


def _remove_stale(path: str, descriptor: int, uid: int) -> None:
    if os.geteuid() in (uid, 0) and is_same_file(descriptor, path):
        try:
            os.unlink(path)
        except OSError:
            return  # somebody else was quicker


def _decoded(encoded: bytes, uid: int, name: str) -> ClaimRecord:
    encoded = encoded.partition(b"\n")[0]  # behind it are letters: see wishes
    try:
        content = loads(encoded) if len(encoded) <= MAX_BYTES else None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        content = {}
    command, devices, slots = content.get("command"), content.get("devices"), content.get("slots")
    return ClaimRecord(
        id=name.partition(".")[2],
        uid=uid,
        user=user_name(uid),
        devices=tuple(each for each in devices if isinstance(each, str)) if isinstance(devices, list) else (),
        pid=_number(content.get("pid"), int),
        since=_number(content.get("since"), (int, float)),
        note=note if isinstance(note := content.get("note"), str) else None,
        command=tuple(str(word) for word in command) if isinstance(command, list) else None,
        ends=_number(content.get("ends"), (int, float)),
        expected=_number(content.get("expected"), (int, float)),
        memory=_number(content.get("memory"), int),
        slots=tuple(each for each in slots if isinstance(each, str)) if isinstance(slots, list) else (),
        most=_number(content.get("most"), int),
    )


def _number(value: Any, kind: type | tuple[type, ...]) -> Any:
    """*value* if others can calculate with it: one that is no float could end whoever subtracts it from a time."""
    if not isinstance(value, kind) or isinstance(value, bool):
        return None
    number: Any = value
    return number if 0 <= number <= LARGEST else None


def probe(
    directory: LockDirectory, uuids: Iterable[str], *, known: Sequence[ClaimRecord] = ()
) -> tuple[ClaimRecord, ...]:
    """Who claims which of the devices now: the locks that are held, each with its record where there is one.

    Args:
        directory: of the claims.
        uuids: of the devices to look at.
        known: claims that were found a moment ago.  Of those that still live the holders are believed, less who has
            ended since: to look for them anew takes longer than all the rest (12 ms with 300 processes).

    Returns:
        One record per claim, devices and slots limited to those really locked.  A lock without a record comes as a
        record of user "unknown".
    """
    with Gate(directory):
        locked, given = _read_one(directory, uuids)
    return _probed(directory, locked, given, known)


def probe_in_gate(directory: LockDirectory, uuids: Iterable[str], *, holders: bool = False) -> tuple[ClaimRecord, ...]:
    """As probe(), for who has the gate already; *holders*: ask every process of the machine what it holds, too."""
    locked, given = _read_one(directory, uuids)
    if holders or not locked:
        return _probed(directory, locked, given)
    return _joined(locked, read_records(directory), {}, given)


def locks_held(directory: LockDirectory, uuids: Iterable[str]) -> frozenset[str]:
    """The names of all locks that are held on these devices, of whole ones and of shares."""
    with Gate(directory):
        return frozenset(_held_locks(directory, uuids))


def _probed(
    directory: LockDirectory,
    locked: Mapping[str, str],
    given: Mapping[str, Grant | None],
    known: Sequence[ClaimRecord] = (),
) -> tuple[ClaimRecord, ...]:
    if not locked:
        return ()
    records = read_records(directory)
    holders = remembered(known, records)
    if locked.keys() <= holders.keys():
        return _joined(locked, records, holders, given)
    uids = {record.uid for record in records}
    holders = holders_of(directory, set(locked), lambda uid: uid in uids)
    if lost := locked.keys() - holders.keys():  # a lock without a record, or with somebody else's
        holders.update(holders_of(directory, lost, lambda uid: uid not in uids))
    claims = _joined(locked, records, holders, given)
    ownerless = {name for one in claims if one.uid == _NOBODY for name in one.slots or one.devices}
    hidden = held_by_no_process(directory, ownerless - holders.keys())
    return tuple(replace(one, hidden=True) if hidden & {*one.slots, *one.devices} else one for one in claims)


def _joined(
    locked: Mapping[str, str],
    records: Sequence[ClaimRecord],
    holders: Mapping[str, Mapping[int, int]],
    given: Mapping[str, Grant | None],
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
            # Who shares a device holds a slot; whoever names one does not have the device alone.
            and (name in record.slots if name != uuid else not record.slots)
            and _may_hold(record, holders.get(name, {}), given.get(name))
        }
        held = {locked[name] for name in names}
        devices = tuple(uuid for uuid in record.devices if uuid in held)
        if devices or not record.devices:
            pids = {pid for name in names for pid, uid in holders.get(name, {}).items()}
            for grant in filter(None, map(given.get, names)):
                record = grant.confirmed(record)
            slots = tuple(sorted(names - held))
            claims.append(replace(record, devices=devices, slots=slots, holders=tuple(sorted(pids))))
            explained |= names
    unexplained: dict[str, ClaimRecord] = {}
    for name in sorted(locked.keys() - explained):
        found = _without_record(name, locked[name], holders.get(name, {}), given.get(name))
        same = unexplained.get(found.id, found)  # several devices that were given to one claim
        devices, slots = (*same.devices, *found.devices), (*same.slots, *found.slots)
        unexplained[found.id] = replace(found, devices=tuple(dict.fromkeys(devices)), slots=tuple(dict.fromkeys(slots)))
    claims += unexplained.values()
    return tuple(claims)


def _without_record(name: str, uuid: str, holders: Mapping[int, int], grant: Grant | None) -> ClaimRecord:
    uids = set(holders.values())
    uid = grant.uid if grant else uids.pop() if len(uids) == 1 else _NOBODY
    user = user_name(uid) if uid >= 0 else "unknown"
    slots = (name,) if name != uuid else ()
    claim_id = grant.claim if grant else f"no-record-{uuid[:12]}{name[len(uuid) :].replace('.', '-')}"
    record = ClaimRecord(claim_id, uid, user, (uuid,), holders=tuple(sorted(holders)), slots=slots)
    return grant.confirmed(record) if grant else record


def locked_devices(directory: LockDirectory, uuids: Iterable[str]) -> set[str]:
    """Those of *uuids* (or other names of locks) whose lock somebody holds, alone or as one who shares it.

    Asked under the gate, so that nobody is disturbed by the asking.  A GPU of which only MIG instances are claimed is
    not among them: its lock is held shared.
    """
    with Gate(directory):
        return set(_held_locks(directory, uuids).values())


def _read_one(directory: LockDirectory, uuids: Iterable[str]) -> tuple[dict[str, str], Mapping[str, Grant | None]]:
    """The locks that are held, as below, and to whom the daemon gave them, where it does."""
    if directory.keeper is None:
        return _held_locks(directory, uuids), {}
    from gpuguard.claims import grants

    if directory.closed:
        wanted, given = set(uuids), grants.granted(directory)
        if given is None:  # no daemon: nobody can claim now, and those who do say so themselves
            said = [(one, uuid) for one in read_records(directory) for uuid in one.devices if uuid in wanted]
            return {name: uuid for one, uuid in said for name in one.slots or (uuid,) if uuid in name}, {}
        names = [(name, name if name in wanted else name.rpartition(".slot")[0]) for name in given]
        return {name: uuid for name, uuid in names if uuid in wanted}, given
    locked = _held_locks(directory, uuids)
    return locked, grants.grant_of(directory, locked)


def _held_locks(directory: LockDirectory, uuids: Iterable[str]) -> dict[str, str]:
    """The locks that are held, name -> uuid: that of a device where one has it alone, else its locked slots."""
    if directory.closed:
        return _read_one(directory, uuids)[0]
    found = {}
    for uuid in uuids:
        if not exists_in_place(directory.lock_path(uuid)):
            continue
        try:
            descriptor = open_lock(directory, uuid)
        except LockDirectoryError:
            found[uuid] = uuid  # planted: nobody can claim it until root has looked at it
            continue
        try:
            if not try_flock(descriptor, fcntl.LOCK_SH):
                found[uuid] = uuid
            elif slots := locked_slots(directory, uuid):
                found.update(dict.fromkeys(slots, uuid))
            elif directory.keeper is not None and not _is_free(directory, uuid, descriptor):
                found[uuid] = uuid
        finally:
            os.close(descriptor)
    return found


def _is_free(directory: LockDirectory, name: str, descriptor: int) -> bool:
    """Whether nobody can have kept a descriptor of it; what somebody may have is made anew."""
    from gpuguard.claims.grants import renew

    return renew(directory, name, descriptor) or not os.fstat(descriptor).st_size  # not given: root shares it


def _may_hold(record: ClaimRecord, holders: Mapping[int, int], grant: Grant | None) -> bool:
    """False for a record that names a device which visibly is somebody else's."""
    if grant:
        return (record.uid, record.id.partition(".")[0]) == (grant.uid, grant.claim)
    return not holders or record.uid in holders.values()
