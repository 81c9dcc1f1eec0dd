"""Who really holds the locks: the processes that have them open, from /proc; and who is known to have done so just now.

Does not say whose a claim is: see records.
"""

from __future__ import annotations

import os
import time

from gpuguard.claims.inplace import device_of, hold_in_place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from gpuguard.claims.lockfiles import LockDirectory
    from gpuguard.model import ClaimRecord

# For the processes of one user: with the usual limits 100 of them can have 50 million descriptors, which is a minute.
MOST_SECONDS = 1.0
_OF_EVERY_FILE = (b"pos:", b"flags:", b"mnt_id:", b"ino:")  # lines of /proc/PID/fdinfo; then come those of its locks


def holders_of(
    directory: LockDirectory, uuids: set[str], is_suspect: Callable[[int], bool]
) -> dict[str, dict[int, int]]:
    """Per device the processes (of suspect uids) that hold its lock, pid -> uid, as far as this user may see them.

    From /proc/PID/fdinfo: /proc/locks names whoever took the lock, even when only the job that inherited it lives.
    Whoever has so much open that it takes too long hides his own processes alone.
    """
    start = f"{os.path.realpath(directory.locks)}/{directory.prefix}"
    inodes = {uuid: inode for uuid in uuids if (inode := inode_of(directory.lock_path(uuid)))}
    paths = {name: uuid for uuid, inode in inodes.items() for name in (start + uuid, inode)}
    found: dict[str, dict[int, int]] = {}
    spent: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        begun = time.monotonic()
        try:
            uid = os.stat(f"/proc/{entry}").st_uid or _behind(entry)
            suspect = is_suspect(uid) and (uid == 0 or spent.get(uid, 0.0) < MOST_SECONDS)
            maybe = _locked(entry, uid, paths) if suspect else []
        except OSError:
            continue  # gone, or not ours to see
        for number, uuid in maybe:
            # In a mount namespace of his own anybody has a file of his own at that path.
            if not number or locked_inode(entry, number) == inodes[uuid]:
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


def _locked(pid: str, uid: int, paths: dict[str, str]) -> list[tuple[str, str]]:
    """Those of *paths*, by path or inode, on which a process has a descriptor, with that; "": it has a lock for sure.

    Raises:
        OSError: it is gone, or not ours to see.
    """
    try:
        targets = [(number, target_of(pid, number)) for number in os.listdir(f"/proc/{pid}/fd")]
    except PermissionError:
        # CAP_SYS_PTRACE opens fdinfo; only CAP_DAC_READ_SEARCH opens fd, and every file of the machine with it.
        if not may_see_locks(pid):
            return []
        from gpuguard.claims.fdlocks import locked_files

        return [("", paths[inode]) for inode in locked_files(int(pid), uid, MOST_SECONDS).values() if inode in paths]
    return [(number, paths[path]) for number, path in targets if path in paths]


def locked_by(pid: int, uid: int, seconds: float) -> dict[int, str]:
    """Descriptor -> "major:minor:inode" of what a process has locked, as fdlocks.locked_files().

    Without a process apart where it can be seen which descriptors are files.

    Raises:
        OSError: it is gone, or not ours to see.
    """
    until, found = time.monotonic() + seconds, dict[int, str]()
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            target = target_of(pid, number)
            # What stands for a device writes there what its driver likes; claims may lie in shared memory.
            if not target.startswith("/") or (target.startswith("/dev/") and not target.startswith("/dev/shm/")):
                continue
            if time.monotonic() > until:
                break
            if inode := locked_inode(pid, number):
                found[int(number)] = inode
    except PermissionError:
        from gpuguard.claims.fdlocks import locked_files

        return locked_files(pid, uid, seconds) if may_see_locks(pid) else {}
    return found


def may_see_locks(pid: str | int) -> bool:
    """Whether it has files open, and fdinfo of it is ours to read: opening it waits for nobody.

    Raises:
        OSError: it is gone, or not ours to see.
    """
    for number in os.listdir(f"/proc/{pid}/fdinfo")[:1]:
        os.close(os.open(f"/proc/{pid}/fdinfo/{number}", os.O_RDONLY | os.O_CLOEXEC))
        return True
    return False


def target_of(pid: str | int, descriptor: str) -> str:
    """The path on which it is open.

    Raises:
        PermissionError: that is not ours to see.
    """
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except PermissionError:
        raise
    except OSError:
        return ""  # closed meanwhile


def locked_inode(pid: str | int, descriptor: str) -> str:
    """The "major:minor:inode" of the file that is locked through it, as the kernel writes it; "" where none is.

    Of a regular file alone: of what else it may be this may never come back, see fdlocks.
    Anybody may put another kind of lock on a file that he may read.  And what the kernel says of every file stands in
    front: behind it may follow text of the owner, lines and all (the name of a dma-buf).
    """
    from gpuguard.backends.processes import read_proc

    for line in (read_proc(f"/proc/{pid}/fdinfo/{descriptor}") or b"").split(b"\n"):
        words = line.split()
        if line.startswith(b"lock:"):
            if words[2:3] == [b"FLOCK"] and len(words) > 6:
                return words[6].decode("ascii", "replace")
        elif not line.startswith(_OF_EVERY_FILE):
            break
    return ""


def answer() -> NoReturn:
    """Read what processes have locked until nobody asks any more: the life of a reader, see fdlocks."""
    from gpuguard.backends import sampler
    from gpuguard.backends.apart import stopwatch

    sampler.send(1, ("ready",))
    while request := sampler.receive(0):
        pid, seconds = request
        until, took = time.monotonic() + seconds, stopwatch()
        found: list[tuple[int, str]] = []
        try:
            for number in os.listdir(f"/proc/{pid}/fdinfo"):
                if time.monotonic() > until:
                    break
                if inode := locked_inode(pid, number):
                    found.append((int(number), inode))
        except OSError:  # it has ended
            pass
        sampler.send(1, (found, took()))
    os._exit(0)


def inode_of(path: str) -> str:
    """The file that lies there, as the kernel writes it; "" where none does."""
    try:
        held = hold_in_place(path)
        try:
            return as_written(held)
        finally:
            os.close(held)
    except (OSError, ValueError):  # no name of a file
        return ""


def as_written(descriptor: int) -> str:
    """An open file as the kernel writes it in /proc/PID/fdinfo and /proc/locks: "major:minor:inode"."""
    device = device_of(descriptor)
    return f"{os.major(device):02x}:{os.minor(device):02x}:{os.fstat(descriptor).st_ino}"


def remembered(known: Sequence[ClaimRecord], records: Sequence[ClaimRecord]) -> dict[str, dict[int, int]]:
    """Per lock the processes that are known to hold it, pid -> uid, of claims that still live."""
    alive = {(record.uid, record.id) for record in records}
    found: dict[str, dict[int, int]] = {}
    for record in known:
        holders = {pid: record.uid for pid in record.holders if os.path.exists(f"/proc/{pid}")}
        if holders and (record.uid, record.id) in alive:
            found.update(dict.fromkeys(record.slots or record.devices, holders))
    return found
