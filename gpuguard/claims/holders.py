"""The processes that really hold the locks, because /proc shows that they have them open or showed it just now.

For a file that is not regular, its driver writes /proc/PID/fdinfo, and may wait for something that the file's owner
holds: an epoll(7) that is just handing over events to a page of FUSE keeps a reader of its fdinfo waiting, and no
signal ends that (state D), not even SIGKILL.  So where we cannot see which descriptors are files (a guard with
CAP_SYS_PTRACE), a reader process with nothing of ours open reads fdinfo.  Until it comes back, it is unknown what that
user has locked.  The locks of users whose answers do come but take too much of the time are unknown as well: see
procfs.

This module does not say who owns a claim: see records.
"""

from __future__ import annotations

import errno
import os
from _thread import allocate_lock
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

from gpuguard import procfs
from gpuguard.backends import spawn
from gpuguard.files import close_all, closed_after, device_of, hold_in_place, status_in_place, wait_for
from gpuguard.locale.messages import all_of, sentence
from gpuguard.procfs import charge, in_first_pid_namespace, in_time, owed_by, stopwatch, uid_behind
from gpuguard.users import accountable_uid, user_name

if TYPE_CHECKING:
    import subprocess

    from gpuguard.claims.directory import LockDirectory
    from gpuguard.model import ClaimRecord

# The most time for the open files of one user, which procfs.SHARE of the time pays off.  With the usual limits 100
# processes can have 50 million descriptors, which take a minute to read, and a user may have 65536 uids.
MOST_SECONDS = 1.0
ROOT_SECONDS = 10.0  # for one process of root
MOST_LOCKS = 20_000  # lines of /proc/locks: reading so many takes a tenth of a second
_OF_EVERY_FILE = (b"pos:", b"flags:", b"mnt_id:", b"ino:")  # lines of /proc/PID/fdinfo, before those of the locks


def holders_of(
    directory: LockDirectory, uuids: set[str], is_suspect: Callable[[int], bool], *, by_any_name: bool = False
) -> dict[str, dict[int, int]]:
    """Return for each device the processes (of suspect uids) that hold its lock, pid -> uid, as far as we may see them.

    They come from /proc/PID/fdinfo, because /proc/locks names the process that took the lock, even when only the job
    that inherited it still lives.  A user who has too many files open to be read in time hides only processes of their
    own.  With *by_any_name* the locks are also found where they were opened in a mount namespace that gives the
    directory another name, for which all open files are read.
    """
    start = f"{os.path.realpath(directory.locks)}/{directory.prefix}"
    names = {inode: uuid for uuid in uuids if (inode := inode_of(directory.lock_path(uuid)))}
    paths = set[str]() if by_any_name else {start + uuid for uuid in names.values()}
    holders: dict[str, dict[int, int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            uid = os.stat(f"/proc/{pid}").st_uid or _uid_behind(pid)
            locked = locked_by(pid, uid, ROOT_SECONDS, paths=paths) if is_suspect(uid) else {}
        except OSError:
            continue  # it has ended, or is not ours to see
        for inode in locked.values() & names.keys():
            holders.setdefault(names[inode], {})[int(pid)] = uid
    return holders


def _uid_behind(pid: str) -> int:
    """Return the uid for which a process acts whose effective uid is root's."""
    try:
        files = os.scandir(f"/proc/{pid}/fd")
    except PermissionError:
        files = os.scandir(f"/proc/{pid}/fdinfo")
    with files:
        if next(files, None) is None:  # like each of the kernel's own threads, of which there are thousands
            return 0
    return uid_behind(int(pid)) or 0


def locked_by(
    pid: int | str, uid: int, seconds: float, *, paths: Collection[str] = (), whole: bool = False
) -> dict[int, str]:
    """Return descriptor -> "major:minor:inode" of what a process has locked, as locked_files() does.

    Where we can see which descriptors are files, the reader process is not needed, and only files at *paths* are read
    if any are given.  Go by the inodes, because in a mount namespace of their own users can have other files at these
    paths.  Reading takes no longer than what is left to the user of MOST_SECONDS, which does not limit root.

    Raises:
        TimeoutError: with *whole*, not everything could be read in that time.
        OSError: the process has ended, or is not ours to see.
    """
    key, took, locked, complete = (accountable_uid(uid), _KIND), stopwatch(), dict[int, str](), True
    begun = monotonic()
    left = min(seconds, MOST_SECONDS - owed_by(begun).get(key, 0.0)) if uid else seconds
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            if monotonic() > begun + left:
                complete = False
                break
            target = target_of(pid, number)
            # The driver of a device node writes there whatever it likes; but claims may lie in shared memory.
            is_file = target.startswith("/") and (not target.startswith("/dev/") or target.startswith("/dev/shm/"))
            if (target in paths if paths else is_file) and (inode := locked_inode(pid, number)):
                locked[int(number)] = inode
    except PermissionError:
        # CAP_SYS_PTRACE opens fdinfo; fd needs CAP_DAC_READ_SEARCH, which would open every file of the machine.
        return locked_files(pid, uid, left, whole=whole) if may_see_locks(pid) else {}
    charge(key, took(), monotonic(), noticed=0.0)
    if whole and not complete:
        raise TimeoutError
    return locked


def held_by_no_process(directory: LockDirectory, names: Iterable[str]) -> set[str]:
    """Return those of the locks *names* that are held although no process is seen to have them open.

    A lock lives as long as its open file, which may lie where no list of descriptors shows it: in a message that no
    process receives (SCM_RIGHTS, unix(7)), in a mapping, in an io_uring.  Two scans must miss it, because a process may
    hand it on to another during a scan, and the kernel must still list it in between.  No lock is returned if the files
    of any process may not be read, or if those of root take too long.  A user whose files take too long cannot thereby
    turn a lock that no other process has open into a claim.
    """
    inodes = {inode: name for name in names if (inode := inode_of(directory.lock_path(name)))}
    hidden = set(inodes) if in_first_pid_namespace() else set()
    for _scan in range(2):
        takers = takers_of(hidden) if hidden else []
        still = hidden if takers is None else {inode for inode, *_ in takers}
        hidden = _open_nowhere(still, [pid for _, pid, _ in takers or ()])
    return {inodes[inode] for inode in hidden}


def takers_of(inodes: Collection[str]) -> list[tuple[str, str, str]] | None:
    """Return (inode, pid of the process that took it and may have ended, "READ" or "WRITE") of each lock on *inodes*.

    Returns None if the machine has more locks than MOST_LOCKS.  Any user can take a million, and the kernel needs a
    quarter of an hour to list those, because it begins with the first lock again for each page.
    """
    with open("/proc/locks", encoding="ascii") as locks:
        lines = [*map(str.split, islice(locks, MOST_LOCKS))]
    taken = [(words[5], words[4], words[3]) for words in lines if words[1] == "FLOCK" and words[5] in inodes]
    return None if len(lines) == MOST_LOCKS else taken


def flock_holder(descriptor: int) -> int | None:
    """The pid of the process that took the flock on this file, as the kernel reports it, or None."""
    try:
        # Pid 0 stands for a process in another pid namespace.
        return next((int(pid) or None for _, pid, _ in takers_of([as_written(descriptor)]) or ()), None)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES):
            raise
    return None


def _open_nowhere(inodes: Collection[str], first: Iterable[str]) -> set[str]:
    """Return those of *inodes* that no process is seen to have locked; none if root's files cannot be read.

    *first* holds the pids to look at before all others.
    """
    left = set(inodes)
    _cut_short.clear()
    # The process that took a lock usually still has it open, and then no other one is read.  Init is left out, because
    # it is no job and may have capabilities that root lacks here.
    for entry in filter(str.isdigit, dict.fromkeys([*first, *os.listdir("/proc")]) if left else ()):
        try:
            uid = os.stat(f"/proc/{entry}").st_uid
            tables = [entry] if entry != "1" else []
            if tables and not os.listdir(f"/proc/{entry}/fdinfo"):  # its first thread has ended
                tables = [f"{entry}/task/{thread}" for thread in os.listdir(f"/proc/{entry}/task")]
            for table in tables:
                left -= set(locked_by(table, uid, ROOT_SECONDS, whole=True).values())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except TimeoutError:
            if uid == 0:
                return set()
            _cut_short.add(accountable_uid(uid))
        except OSError:
            return set()
        if not left:
            break
    return left


def hidden_claim_text(paths: Iterable[str]) -> str:
    """Explain what it means that no process has the locks at *paths* open, and what helps."""
    hiders = {pid: uid for path in paths for pid, uid in _possible_hiders(path).items()}
    named = [
        sentence("process.of_user", "pid {pid} of {user}", pid=pid, user=user_name(uid))
        for pid, uid in sorted(hiders.items())
    ]
    named += [
        sentence(
            "lock.user_unread",
            "a process of {user}, whose open files cannot be read to the end in time",
            user=user_name(uid),
        )
        for uid in sorted(_cut_short)
    ]
    if not named:
        return sentence(
            "lock.hidden",
            "the GPU is locked, and no process has its lock file open: the open file lies in a message that no process "
            "receives (descriptors in flight over a unix socket), in a mapping or in an io_uring.  It counts as no "
            "claim.  The lock is free when that process ends; /proc/net/unix lists all unix sockets.",
        )
    return sentence(
        "lock.hidden_by",
        "the GPU is locked, and no process has its lock file open: the open file lies in a message that no process "
        "receives (descriptors in flight over a unix socket), in a mapping or in an io_uring.  It counts as no "
        "claim.  The lock is free when the process ends that keeps it, which may be: {processes}.",
        processes=all_of(named, ", "),
    )


def _possible_hiders(path: str) -> dict[int, int]:
    """Return the processes, pid -> uid, that map the file at *path* or have a socket with descriptors in flight."""
    inode, hiders = status_in_place(path).st_ino, dict[int, int]()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        if in_time(int(entry), "hiders", partial(_may_hide, entry, inode)):
            with suppress(OSError):  # it has ended
                hiders[int(entry)] = os.stat(f"/proc/{entry}").st_uid
    return hiders


def _may_hide(pid: str, inode: int) -> bool:
    with open(f"/proc/{pid}/maps", "rb") as maps:
        if any(words[4] == b"%d" % inode for words in map(bytes.split, maps)):
            return True
    return any(_has_descriptors_in_flight(pid, number) for number in os.listdir(f"/proc/{pid}/fd"))


def _has_descriptors_in_flight(pid: str, descriptor: str) -> bool:
    if not target_of(pid, descriptor).startswith("socket:"):
        return False
    lines = (procfs.read_proc(f"/proc/{pid}/fdinfo/{descriptor}") or b"").split(b"\n")
    return any(line.startswith(b"scm_fds:") and line.split()[1:] != [b"0"] for line in lines)


def may_see_locks(pid: str | int) -> bool:
    """Return whether a process has open files whose fdinfo we may read.  Opening fdinfo never waits.

    Raises:
        OSError: the process has ended, or is not ours to see.
    """
    for number in os.listdir(f"/proc/{pid}/fdinfo")[:1]:
        os.close(os.open(f"/proc/{pid}/fdinfo/{number}", os.O_RDONLY | os.O_CLOEXEC))
        return True
    return False


def target_of(pid: str | int, descriptor: str) -> str:
    """Return the path that a descriptor is open on, or "" if it was closed meanwhile.

    Raises:
        PermissionError: it is not ours to see.
    """
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except PermissionError:
        raise
    except OSError:
        return ""  # closed meanwhile


def locked_inode(pid: str | int, descriptor: str) -> str:
    """Return "major:minor:inode" of the file that is locked through a descriptor, as the kernel writes it, or "".

    Call it for regular files only, because with anything else it may never come back.  Only a flock counts, because any
    user may put another kind of lock on a file that they can read.  The lines that the kernel writes for every file
    come first; text of the owner may follow them, line breaks included (the name of a dma-buf), and is not read.
    """
    for line in (procfs.read_proc(f"/proc/{pid}/fdinfo/{descriptor}") or b"").split(b"\n"):
        words = line.split()
        if line.startswith(b"lock:"):
            if words[2:3] == [b"FLOCK"] and len(words) > 6:
                return words[6].decode("ascii", "replace")
        elif not line.startswith(_OF_EVERY_FILE):
            break
    return ""


def holders_answer() -> NoReturn:
    """Run the reader process: read what processes have locked until no further request comes."""
    spawn.send(1, ("ready",))
    while request := spawn.receive(0):
        pid, seconds = request
        until, took = monotonic() + seconds, stopwatch()
        found: list[tuple[int, str]] = []
        whole = True
        with suppress(OSError):  # it has ended
            for number in os.listdir(f"/proc/{pid}/fdinfo"):
                if monotonic() > until:
                    whole = False
                    break
                if inode := locked_inode(pid, number):
                    found.append((int(number), inode))
        spawn.send(1, (found, took(), whole))
    os._exit(0)


def inode_of(path: str) -> str:
    """Return the file at *path* as the kernel writes it, or "" if there is none."""
    try:
        with closed_after(hold_in_place(path)) as held:
            return as_written(held)
    except (OSError, ValueError):  # it is not the name of a file
        return ""


def as_written(descriptor: int) -> str:
    """Return an open file as the kernel writes it in /proc/PID/fdinfo and /proc/locks: "major:minor:inode"."""
    device = device_of(descriptor)
    return f"{os.major(device):02x}:{os.minor(device):02x}:{os.fstat(descriptor).st_ino}"


def remembered(known: Sequence[ClaimRecord], records: Sequence[ClaimRecord]) -> dict[str, dict[int, int]]:
    """Return for each lock the processes that are known to hold it, pid -> uid, of claims that still live."""
    alive = {(record.uid, record.id) for record in records}
    found: dict[str, dict[int, int]] = {}
    for record in known:
        holders = {pid: record.uid for pid in record.holders if os.path.exists(f"/proc/{pid}")}
        if holders and (record.uid, record.id) in alive:
            found.update(dict.fromkeys(record.slots or record.devices, holders))
    return found


SLACK_SECONDS = 0.5  # of waiting beyond the time that a look may take
SLACK_AGAIN = 0.05  # while others hang: many such users together must not take up all time
START_SECONDS = 10.0  # for a reader to start
# From so many that hang or nearly do, no uid without a name is read, because one user can have 65536 of them.
MOST_HANGING = 16

_KIND = "locks"
_reading = allocate_lock()
_CODE = "import gpuguard.claims.holders as holders; holders.holders_answer()"
_reader: list[tuple[int, subprocess.Popen[bytes], int, int]] = []  # the pid that started it, its process, and its pipes
_hanging: dict[int, subprocess.Popen[bytes]] = {}  # uid -> the reader that waits for something of that user
_ended: list[subprocess.Popen[bytes]] = []  # readers to reap
_cut_short: set[int] = set()  # users whose open files the last search for hidden locks did not read to the end


def locked_files(pid: int | str, uid: int, seconds: float, *, whole: bool = False) -> dict[int, str]:
    """Return descriptor -> "major:minor:inode" of what a process has locked, from the reader; {} also if unknown.

    *pid* may be "PID/task/TID".  When the reader does not come back, only the locks of the user *uid* are unknown.

    Raises:
        TimeoutError: with *whole*, not everything could be read in these *seconds*.
    """
    answer = _read_by_reader(pid, uid, seconds)
    if whole and (answer is None or not answer[2]):
        raise TimeoutError
    return dict(answer[0]) if answer else {}


def _read_by_reader(pid: int | str, uid: int, seconds: float) -> tuple[list[tuple[int, str]], float, bool] | None:
    """Ask the reader for descriptors with inodes, the seconds it took, and whether that is all; None if unknown."""
    with _reading:
        uid = accountable_uid(uid)
        _reap()
        slow = owed_by(monotonic()).keys() | {(other, _KIND) for other in _hanging}
        if _is_unknown(uid) or (len(slow) >= MOST_HANGING and user_name(uid) == str(uid)):
            return None
        try:
            _, reader, ask, answers = _started()
            begun = monotonic()
            spawn.send(ask, (pid, seconds))
            if not wait_for([answers], seconds + (SLACK_AGAIN if _hanging else SLACK_SECONDS)):
                _hanging[uid] = reader
                charge((uid, _KIND), (now := monotonic()) - begun, now)
                _close()
                return None
            answer = spawn.receive(answers)
        except OSError:  # there can be no further process or file, or the reader has ended
            answer = None
        if answer is None:
            _close()
            return None
        charge((uid, _KIND), answer[1], monotonic())
        return answer[0], answer[1], answer[2]


def hangs(uid: int) -> bool:
    """Return whether a user's locks are unknown: the reader has not come back, or took too long again and again."""
    with _reading:
        _reap()
        return _is_unknown(accountable_uid(uid))


def _is_unknown(uid: int) -> bool:
    return uid in _hanging or owed_by(monotonic()).get((uid, _KIND), 0.0) >= MOST_SECONDS


def _started() -> tuple[int, subprocess.Popen[bytes], int, int]:
    if _reader and _reader[0][0] != os.getpid():  # it belongs to the process that forked us
        _close()
    if not _reader:
        _reader.append(_start())
    return _reader[0]


def _start() -> tuple[int, subprocess.Popen[bytes], int, int]:
    request_end, ask, answers, answer_end = opened = spawn.pipes(2)
    try:
        process = spawn.start_interpreter(_CODE, "", (request_end, answer_end))
    except OSError:
        close_all(opened)
        raise
    close_all((request_end, answer_end))
    if not wait_for([answers], START_SECONDS) or spawn.receive(answers) is None:
        close_all((ask, answers))
        _ended.append(process)
        raise OSError(errno.ETIME, os.strerror(errno.ETIME))
    return os.getpid(), process, ask, answers


def _close() -> None:
    """Give up the reader, which ends when its pipe is closed."""
    for owner, process, *descriptors in _reader:
        close_all(descriptors)
        if owner == os.getpid() and process not in _hanging.values():
            _ended.append(process)
    _reader.clear()


def _reap() -> None:
    _ended[:] = [process for process in _ended if process.poll() is None]
    for uid, process in list(_hanging.items()):
        if process.poll() is not None:
            del _hanging[uid]
