"""Claim records: one small JSON file per claim that tells people who holds what and why.

The lock is the truth, the record is a comment: it counts only while it is itself locked (by the descriptors that the
job inherits, so it dies with the claim), its owner is the file's uid and never its content, and devices that it
names without their locks being held are left out.  Unreadable means "claimed, no details".
"""

from __future__ import annotations

import fcntl
import os
import stat

from gpuguard.errors import LockDirectoryError
from gpuguard.lockfiles import Gate, LockDirectory, is_same_file, open_lock, try_flock
from gpuguard.model import ClaimRecord
from gpuguard.users import user_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

MAX_BYTES = 4096
_NOBODY = -1


def write_record(directory: LockDirectory, content: Mapping[str, Any]) -> tuple[str, int]:
    """Write a record that lives as long as the returned descriptor, or a copy of it in a job, does.

    Returns:
        The path of the record and its locked descriptor (close-on-exec).
    """
    path = record_path(directory, os.geteuid(), str(content["id"]))
    unfinished = f"{path}.new"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.fchmod(descriptor, 0o644)
        try_flock(descriptor)
        os.write(descriptor, _encoded(content))
        os.rename(unfinished, path)  # readers see it whole, and already locked
    except BaseException:
        os.unlink(unfinished)
        os.close(descriptor)
        raise
    return path, descriptor


def record_path(directory: LockDirectory, uid: int, claim_id: str) -> str:
    """Where the record of a claim lies."""
    return f"{directory.records}/{directory.prefix}claim.{uid}.{claim_id}.json"


def _encoded(content: Mapping[str, Any]) -> bytes:
    import json

    content = dict(content)
    # The command line is the one part that may be long; the claim is worth more than its last arguments.
    while len(encoded := json.dumps(content).encode()) > MAX_BYTES:
        command, note = content.get("command") or (), content.get("note") or ""
        if command:
            content["command"] = [word[:200] for word in command[: len(command) // 2]]
        else:
            content["note"] = note[: len(note) // 2]
    return encoded


def read_records(directory: LockDirectory) -> list[ClaimRecord]:
    """All records whose claim lives, oldest first; those of dead claims are removed where this user may."""
    start = f"{directory.prefix}claim."
    with os.scandir(directory.records) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(start) and entry.name.endswith(".json")]
    records = [record for name in names if (record := _read_record(f"{directory.records}/{name}", name, start))]
    return sorted(records, key=lambda record: (record.since or 0, record.id))


def read_record(directory: LockDirectory, uid: int, claim_id: str) -> ClaimRecord | None:
    """The record of one living claim of one user; None when there is none."""
    start = f"{directory.prefix}claim."
    path = record_path(directory, uid, claim_id)
    return _read_record(path, os.path.basename(path), start)


def _read_record(path: str, name: str, start: str) -> ClaimRecord | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return None
        if try_flock(descriptor, fcntl.LOCK_SH):
            _remove_stale(path, descriptor, status.st_uid)
            return None
        return _decoded(os.read(descriptor, MAX_BYTES + 1), status.st_uid, name[len(start) : -len(".json")])
    finally:
        os.close(descriptor)


def _remove_stale(path: str, descriptor: int, uid: int) -> None:
    if os.geteuid() in (uid, 0) and is_same_file(descriptor, path):
        try:
            os.unlink(path)
        except OSError:
            return  # somebody else was quicker


def _decoded(encoded: bytes, uid: int, name: str) -> ClaimRecord:
    import json

    try:
        content = json.loads(encoded) if len(encoded) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        content = {}
    command, devices = content.get("command"), content.get("devices")
    return ClaimRecord(
        id=name.partition(".")[2],
        uid=uid,
        user=user_name(uid),
        devices=tuple(each for each in devices if isinstance(each, str)) if isinstance(devices, list) else (),
        pid=_typed(content.get("pid"), int),
        since=_typed(content.get("since"), (int, float)),
        note=_typed(content.get("note"), str),
        command=tuple(str(word) for word in command) if isinstance(command, list) else None,
    )


def _typed(value: Any, kind: type | tuple[type, ...]) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def probe(directory: LockDirectory, uuids: Iterable[str]) -> tuple[ClaimRecord, ...]:
    """Who claims which of the devices now: the locks that are held, each with its record where there is one.

    Args:
        directory: of the claims.
        uuids: of the devices to look at.

    Returns:
        One record per claim, devices limited to those really locked.  A lock without a record comes as a record of
        user "unknown".
    """
    locked = locked_devices(directory, uuids)
    if not locked:
        return ()
    records = read_records(directory)
    uids = {record.uid for record in records}
    holders = _holders(directory, locked, lambda uid: uid in uids)
    if lost := locked - holders.keys():  # a lock without a record, or with somebody else's
        holders.update(_holders(directory, lost, lambda uid: uid not in uids))
    claims = []
    explained: set[str] = set()
    for record in records:
        devices = tuple(uuid for uuid in record.devices if uuid in locked and _may_hold(record, holders.get(uuid, {})))
        if devices or not record.devices:
            pids = {pid for uuid in devices for pid, uid in holders.get(uuid, {}).items()}
            claims.append(_completed(record, devices, pids))
            explained.update(devices)
    for uuid in sorted(locked - explained):
        pids = set(holders.get(uuid, {}))
        uids = set(holders.get(uuid, {}).values())
        uid = uids.pop() if len(uids) == 1 else _NOBODY
        user = user_name(uid) if uid >= 0 else "unknown"
        claims.append(ClaimRecord(f"no-record-{uuid[:12]}", uid, user, (uuid,), holders=tuple(sorted(pids))))
    return tuple(claims)


def locked_devices(directory: LockDirectory, uuids: Iterable[str]) -> set[str]:
    """Those of *uuids* whose lock somebody holds; asked under the gate, so that nobody is disturbed by the asking.

    A GPU of which only MIG instances are claimed is not among them: its lock is held shared.
    """
    found = set()
    with Gate(directory):
        for uuid in uuids:
            if not os.path.lexists(directory.lock_path(uuid)):
                continue
            try:
                descriptor = open_lock(directory, uuid)
            except LockDirectoryError:
                found.add(uuid)  # planted: nobody can claim it until root has looked at it
                continue
            if not try_flock(descriptor, fcntl.LOCK_SH):
                found.add(uuid)
            os.close(descriptor)
    return found


def _may_hold(record: ClaimRecord, holders: Mapping[int, int]) -> bool:
    """False for a record that names a device which visibly is somebody else's."""
    return not holders or record.uid in holders.values()


def _completed(record: ClaimRecord, devices: tuple[str, ...], pids: set[int]) -> ClaimRecord:
    from gpuguard.nouns import replace

    return replace(record, devices=devices, holders=tuple(sorted(pids)))


def _holders(directory: LockDirectory, uuids: set[str], is_suspect: Callable[[int], bool]) -> dict[str, dict[int, int]]:
    """Per device the processes (of suspect uids) that hold its lock, pid -> uid, as far as this user may see them.

    From /proc/PID/fdinfo: /proc/locks names whoever took the lock, even when only the job that inherited it lives.
    """
    paths = {os.path.realpath(directory.lock_path(uuid)): uuid for uuid in uuids}
    found: dict[str, dict[int, int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            uid = os.stat(f"/proc/{entry}").st_uid
            descriptors = os.listdir(f"/proc/{entry}/fd") if is_suspect(uid) else []
        except OSError:
            continue  # gone, or not ours to see
        for number in descriptors:
            uuid = paths.get(_target(entry, number))
            if uuid and _holds_lock(entry, number):
                found.setdefault(uuid, {})[int(entry)] = uid
    return found


def _target(pid: str, descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""


def _holds_lock(pid: str, descriptor: str) -> bool:
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as lines:
            return any(line.startswith("lock:") for line in lines)
    except OSError:
        return False
