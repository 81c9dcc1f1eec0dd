"""Who really holds the locks: the processes that have them open, from /proc; and who is known to have done so just now.

Does not say whose a claim is: see records.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuguard.claims.lockfiles import LockDirectory
    from gpuguard.model import ClaimRecord

# For the processes of one user: with the usual limits 100 of them can have 50 million descriptors, which is a minute.
MOST_SECONDS = 1.0


def holders_of(
    directory: LockDirectory, uuids: set[str], is_suspect: Callable[[int], bool]
) -> dict[str, dict[int, int]]:
    """Per device the processes (of suspect uids) that hold its lock, pid -> uid, as far as this user may see them.

    From /proc/PID/fdinfo: /proc/locks names whoever took the lock, even when only the job that inherited it lives.
    Whoever has so much open that it takes too long hides his own processes alone.
    """
    paths = {os.path.realpath(directory.lock_path(uuid)): uuid for uuid in uuids}
    paths |= {inode: uuid for uuid in uuids if (inode := inode_of(directory.lock_path(uuid)))}
    found: dict[str, dict[int, int]] = {}
    spent: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        begun = time.monotonic()
        try:
            uid = os.stat(f"/proc/{entry}").st_uid or _behind(entry)
            suspect = is_suspect(uid) and (uid == 0 or spent.get(uid, 0.0) < MOST_SECONDS)
            descriptors = _descriptors(entry) if suspect else []
        except OSError:
            continue  # gone, or not ours to see
        for number in descriptors:
            uuid = paths.get(_target(entry, number))
            if uuid and _holds_lock(entry, number):
                found.setdefault(uuid, {})[int(entry)] = uid
        spent[uid] = spent.get(uid, 0.0) + time.monotonic() - begun
    return found


def _behind(pid: str) -> int:
    """The uid for which a process acts that is root in effect."""
    from gpuguard.backends.processes import uid_behind

    with _files(pid) as files:
        nothing = next(files, None) is None  # as those of the kernel itself, of which there are thousands
    return 0 if nothing else uid_behind(int(pid)) or 0


def _files(pid: str) -> os._ScandirIterator[str]:
    try:
        return os.scandir(f"/proc/{pid}/fd")
    except PermissionError:
        return os.scandir(f"/proc/{pid}/fdinfo")


def _descriptors(pid: str) -> list[str]:
    # CAP_SYS_PTRACE opens fdinfo; only CAP_DAC_READ_SEARCH opens fd, and every file of the machine with it.
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return os.listdir(f"/proc/{pid}/fdinfo")


def _target(pid: str, descriptor: str) -> str:
    """What it is open on: a path, or where that cannot be seen the inode that is locked through it."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except PermissionError:
        return locked_inode(pid, descriptor)
    except OSError:
        return ""


def locked_inode(pid: str, descriptor: str) -> str:
    """The "major:minor:inode" of the file that is locked through it, as the kernel writes it; "" without a lock."""
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as lines:
            return next((line.split()[6] for line in lines if line.startswith("lock:")), "")
    except (OSError, IndexError):
        return ""


def inode_of(path: str) -> str:
    """The file that lies there, as the kernel writes it; "" where none does."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return as_written(found)


def as_written(found: os.stat_result) -> str:
    """A file as the kernel writes it in /proc/PID/fdinfo: "major:minor:inode"."""
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"


def _holds_lock(pid: str, descriptor: str) -> bool:
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as lines:
            return any(line.startswith("lock:") for line in lines)
    except OSError:
        return False


def remembered(known: Sequence[ClaimRecord], records: Sequence[ClaimRecord]) -> dict[str, dict[int, int]]:
    """Per lock the processes that are known to hold it, pid -> uid, of claims that still live."""
    alive = {(record.uid, record.id) for record in records}
    found: dict[str, dict[int, int]] = {}
    for record in known:
        holders = {pid: record.uid for pid in record.holders if os.path.exists(f"/proc/{pid}")}
        if holders and (record.uid, record.id) in alive:
            found.update(dict.fromkeys(record.slots or record.devices, holders))
    return found
