"""The one reader of /proc: who a process is, where it stands in the tree of processes, and what it runs.

A process is (pid, start time), never a pid.  One that has ended, or that this user may not see, is never an error: its
fields stay unknown.  This module decides nothing about processes and never signals them: see enforcement.

Reads that may never come back, above all those of a process's memory, are made in another thread: see in_time().  A
command line lies in the memory of its process, and the process can map a file there that never answers, because it
lies on a file system of the owner's (FUSE).  Then `ps` hangs.  Here one thread hangs for each such user, and nothing
more is known of that user until it comes back.  A user whose reads each come back just in time gets no more time than
one whose reads never do: see SHARE.  Time that a read waits for a processor does not count.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from dataclasses import replace
from functools import cache
from resource import RUSAGE_THREAD, getrusage
from typing import TYPE_CHECKING, NamedTuple

from gpuguard.errors import shortage
from gpuguard.files import mounts
from gpuguard.model import GpuProcess, ProcessStat, Snapshot
from gpuguard.users import accountable_uid, certain_owner, user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    T = TypeVar("T")

LONGEST = 2**18  # bytes of an environment that are read; the rest is cut off
LONGEST_COMMAND = 4096  # and of a command line, as much as policies judge by
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h: a constant of the kernel

# Reading the facts about a process takes ten times as long as reading its line in stat, so a daemon keeps them.
FACTS_SECONDS = 60.0
COMMAND_SECONDS = 30.0  # within which a title that a program writes over its command line is seen; an exec, at once.
# The uid is read as often, because a running process only changes it to drop privileges, just after its start.

_HIDDEN = b"0 0 0 0 "
_GONE = " (deleted)"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ENVIRONMENTS = (b"CONDA_DEFAULT_ENV=", b"CONDA_PREFIX=", b"VIRTUAL_ENV=")
_CONTAINERS = (  # what /proc/PID/cgroup says, most specific first
    r"(?:docker|libpod|cri-containerd|crio|nerdctl|containerd)[-:/]([0-9a-f]{64})",
    r"/(?:kubepods|docker|libpod_parent|podman|nerdctl|default|k8s\.io)[^\n]*/(?:\w+-)?([0-9a-f]{64})",
    r"/lxc(?:\.payload)?[./]([^/\n]+)",
    r"/machine\.slice/machine-([^/\n]+)\.scope",
    r"/slurm[^\n]*/(job_\d+)",
)
_CGROUPS = "/sys/fs/cgroup"


# Files


def read_proc(path: str, limit: int = 4096) -> bytes | None:
    """Return the first *limit* bytes of a kernel file, or None if it is gone or hidden, or no descriptor is left."""
    try:
        return _read(path, limit)
    except OSError:
        return None


def _read(path: str, limit: int) -> bytes:
    # There is only one read, because the kernel makes up the content at that moment, and a second read may differ.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def read_link(path: str) -> str | None:
    """Return where a link leads, or None if it is gone or hidden."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def read_text(path: str) -> str | None:
    """Return all of a file, or None if it is gone or hidden."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def read_memory(pid: int, name: str, limit: int = 4096) -> bytes | None:
    """Return the first bytes of a file of /proc/PID that lies in the memory of the process.

    Returns None if it is gone or hidden, or if the read blocks.
    """
    return in_time(pid, "memory", lambda: read_proc(f"/proc/{pid}/{name}", limit))


def status_words(pid: int, name: bytes) -> list[bytes]:
    """Return the words behind *name* in /proc/PID/status, or [] if that cannot be read.

    The file also holds the name of the process, which its owner chooses, and in which the newline is the only end of a
    line that the kernel escapes.  It also holds all the groups of its owner.
    """
    status = read_proc(f"/proc/{pid}/status", 2**16) or b""
    return status.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal, and False if that cannot be read."""
    try:
        return bool(int(status_words(pid, b"SigCgt")[0], 16) >> (signum - 1) & 1)
    except (IndexError, ValueError):  # it has ended, or /proc is not the kernel's
        return False


# Reads that may never come back


FILE_SECONDS = 0.5  # the worker that reads the devices has 1.5 s for each
SECONDS_AGAIN = 0.02  # while other reads hang, so that many users with such reads do not take the time of all
SHARE = 0.05  # of all time may go to reads of one user's processes, in the long run
NOTICED = 0.002  # seconds; 200 processes whose reads each take less hold up nothing
MOST_HANGING = 16  # hanging or slow reads; then none is tried for uids without a name: one user can have 65536 of them


class _Within(threading.local):
    """What the reads within a read took, in each thread; they are counted separately."""

    seconds, waits = 0.0, 0


class _ReadingThread:
    """A thread that reads for others, again and again."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.asked, self.answered = threading.Lock(), threading.Lock()
        self.asked.acquire()
        self.answered.acquire()
        self.read: Callable[[], object] | None = None
        self.result: object = None
        self.fault: BaseException | None = None
        self.took = 0.0  # seconds, without those in which others had the processor
        threading.Thread(target=self._run, name="gpuguard reads", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.asked.acquire()
            assert self.read
            self.result = self.fault = None
            _within.seconds, _within.waits = 0.0, 0
            took = stopwatch()
            try:
                self.result = self.read()
            except BaseException as fault:  # noqa: BLE001  it is raised in the thread that asked for the read
                self.fault = fault
            self.took = took()
            self.answered.release()


_within = _Within()
_free: list[_ReadingThread] = []
Key = tuple[int, str]  # accountable uid, kind of read
_hanging: dict[Key, _ReadingThread] = {}  # readers that still wait for something of that user
_spent: dict[Key, tuple[float, float]] = {}  # seconds that slow reads took, and when; SHARE of the time pays them off


def in_time(pid: int, kind: str, read: Callable[[], T], times: int = 1) -> T | None:
    """Return what *read* returns about a process, or None if it fails or does not come back.

    Args:
        pid: of the process.
        kind: what is read; while one read of a user's processes hangs, no other one of that kind is tried.
        read: is called in another thread.  An OSError that it raises gives None; any other error is raised here.
        times: how many times as long as one read it may take, if there are several such reads in it.
    """
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    key = accountable_uid(uid), kind
    _collect()
    begun = time.monotonic()
    owed = owed_by(begun)
    slow = len(owed.keys() | _hanging.keys())
    if key in _hanging or (slow >= MOST_HANGING and user_name(key[0]) == str(key[0])):
        return None
    left = _most(times, sum(owed.values()) - owed.get(key, 0.0)) - owed.get(key, 0.0)
    if left <= 0:
        return None
    try:
        reader = _free.pop() if _free else _ReadingThread()
        reader = reader if reader.pid == os.getpid() else _ReadingThread()
    except (IndexError, RuntimeError):  # another thread was quicker, or there are too many threads
        return None
    reader.read = read
    waits = _waits()
    reader.asked.release()
    came_back = reader.answered.acquire(timeout=left)
    now = time.monotonic()
    _within.seconds += now - begun
    _within.waits += _waits() - waits
    charge(key, reader.took if came_back else now - begun, now)
    if not came_back:
        _hanging[key] = reader
        return None
    result, fault = reader.result, reader.fault
    _free.append(reader)
    if fault and not isinstance(fault, OSError):
        raise fault
    return result  # type: ignore[return-value]


def _collect() -> None:
    """Take back the readers that no longer hang."""
    for key, reader in list(_hanging.items()):
        if reader.pid != os.getpid():  # we were forked: its thread stayed with the parent
            _hanging.pop(key, None)
            _spent.clear()
        elif reader.answered.acquire(blocking=False):
            _hanging.pop(key, None)
            _free.append(reader)


def _waits() -> int:
    """How often this thread has waited for something other than a processor."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw


def stopwatch() -> Callable[[], float]:
    """Return a function that gives this thread's seconds since now, without those in which others had the processor."""
    begun, used, waits = time.monotonic(), time.thread_time(), _waits()

    def took() -> float:
        waited = _waits() - waits > _within.waits
        return time.monotonic() - begun - _within.seconds if waited else time.thread_time() - used

    return took


def charge(key: Key, took: float, now: float, noticed: float = NOTICED) -> None:
    """Charge a user for a read that took so many seconds; SHARE of the time from *now* (monotonic) on pays it off."""
    if took > noticed:
        _spent[key] = owed_by(now).get(key, 0.0) + took, now


def owed_by(now: float) -> dict[Key, float]:
    """The seconds that slow reads of each user took and that are not paid off yet."""
    for key, (seconds, since) in list(_spent.items()):
        if seconds <= (now - since) * SHARE:
            _spent.pop(key, None)
    return {key: seconds - (now - since) * SHARE for key, (seconds, since) in list(_spent.items())}


def _most(times: int, others: float) -> float:
    """How long a read of one user may take, if other slow reads have just taken *others* seconds."""
    if times > 1:
        return times * FILE_SECONDS
    return SECONDS_AGAIN if _hanging else max(SECONDS_AGAIN, FILE_SECONDS - others)


# One process


# The programs that people type into.  A program that they start from one is a job of its own.
SHELLS = frozenset(b"sh bash dash zsh fish ksh mksh csh tcsh busybox".split())


class Stat(NamedTuple):
    """What /proc/PID/stat says of a process: see proc_pid_stat(5)."""

    name: bytes  # "4711 (python": with the pid; its owner chooses the rest
    state: str  # R S D T t Z X ...
    parent: int
    group: int
    session: int
    terminal: int  # device number of the controlling terminal, 0: none
    cpu_seconds: float
    start_time: float  # seconds since boot
    resident: int  # bytes
    # Where its data, arguments and environment lie.  An exec lays them anew, at random places, so that this and the
    # name together stand for the program that runs.  None if it is not shown to this user.
    layout: bytes | None

    @property
    def lives(self) -> bool:
        """Whether the process is more than an entry that its parent has not reaped."""
        return self.state not in ("Z", "X")


def parse_stat(line: bytes) -> Stat | None:
    """Return the content of /proc/PID/stat, or None if *line* is something else."""
    name, _, rest = line.rpartition(b")")  # the name may itself hold blanks and brackets
    fields = rest.split(None, 42)
    try:
        layout = fields[42] if len(fields) > 42 else _HIDDEN
        parent, group, session, terminal = map(int, fields[1:5])
        return Stat(
            name,
            fields[0].decode("ascii"),
            parent,
            group,
            session,
            terminal,
            (int(fields[11]) + int(fields[12])) / _TICKS,
            int(fields[19]) / _TICKS,
            int(fields[21]) * _PAGE,
            None if layout.startswith(_HIDDEN) else layout,
        )
    except (IndexError, ValueError):
        return None


def read_stat(pid: int) -> Stat | None:
    """Return what *pid* is now, or None if it has ended or is hidden from this user.

    Raises OSError if no descriptor is left.
    """
    try:
        return parse_stat(_read(f"/proc/{pid}/stat", 4096))
    except OSError as error:
        if shortage(error):
            raise
        return None


def stat_of(pid: int) -> Stat | None:
    """Return the same as read_stat(), or None if no descriptor is left."""
    return parse_stat(read_proc(f"/proc/{pid}/stat") or b"")


def start_time(pid: int) -> float | None:
    """Return the seconds since boot at which the process started, or None if that cannot be read."""
    stat = stat_of(pid)
    return stat.start_time if stat else None


def own_memory(pid: int) -> int | None:
    """Return the bytes that a process has in memory, or None if it is gone, hidden, or not read in time.

    Memory that it shares with others counts by its part, and files that can be read again do not count.  The read
    takes time for each page: see in_time().
    """
    text = in_time(pid, "pages", lambda: read_proc(f"/proc/{pid}/smaps_rollup"), times=4) or b""
    parts = re.findall(rb"^Pss_(?:Anon|Shmem): +(\d+) kB$", text, re.MULTILINE)
    return sum(map(int, parts)) * 1024 if parts else None


def uid_of(pid: int) -> int | None:
    """Return the real uid of a process, or None if it is gone or hidden."""
    # The owner of /proc/PID is not used, because it is root for every process that may not be dumped.
    words = status_words(pid, b"Uid")
    return int(words[0]) if words and words[0].isdigit() else None


def owner_of(pid: int) -> int | None:
    """Return the uid of the user whose process it is, or None if it is gone or hidden.

    Root may have given the real uid of the process to that user.
    """
    uid = uid_of(pid)
    return None if uid is None else certain_owner(uid)


def uid_behind(pid: int) -> int | None:
    """Return the uid of the user that a process acts for, or None if it is gone or hidden.

    A process that is root in effect alone may belong to any user who runs a program with the set-user-ID bit, with any
    name and with anything open.  A root process that has become another user in effect acts for that user.
    """
    words = status_words(pid, b"Uid")
    return (int(words[0]) or int(words[1])) if len(words) > 1 and all(map(bytes.isdigit, words)) else None


def alive(pid: int) -> bool:
    """Return whether *pid* is a process here, which may be one that /proc hides from this user (hidepid)."""
    if os.path.exists(f"/proc/{pid}"):
        return True
    try:
        os.close(os.pidfd_open(pid))
    except (OSError, OverflowError):
        return False
    return True


def may_be(pid: int, program: bytes) -> bool:
    """Return whether *pid* is a process with the name *program*, or its name cannot be read."""
    name = read_proc(f"/proc/{pid}/comm")
    return name is None or name.rstrip(b"\n") == program[:15]  # a kernel keeps so much of a name


@cache
def pid_max() -> int:
    """Return the largest pid of this kernel, or the largest that Linux knows if the kernel does not say."""
    text = (read_text("/proc/sys/kernel/pid_max") or "").strip()
    return int(text) if text.isdecimal() and int(text) else 2**22


def in_first_pid_namespace() -> bool | None:
    """Return whether our pids are the machine's, or None if that cannot be read."""
    namespace = read_link("/proc/self/ns/pid")
    return None if namespace is None else namespace == FIRST_PID_NAMESPACE


def boot_clock() -> float:
    """Return CLOCK_BOOTTIME in seconds: the clock of start times, never set, and counting while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the id of this boot.  Start times, and clocks that count from the boot, mean nothing in another one."""
    return (read_proc("/proc/sys/kernel/random/boot_id", 8) or b"").decode("ascii", "replace")


def own_cgroup(root: str = "") -> str | None:
    """Return the directory of the cgroup of version 2 in which we are, or None if it is not mounted here.

    Raises OSError.
    """
    # Users choose names of cgroups, which may contain any other line ending.
    with open(f"{root}/proc/self/cgroup", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        own = next((line[3:].rstrip("\n") for line in lines if line.startswith("0::")), None)
    for mount in mounts(f"{root}/proc/self/mountinfo"):
        below = mount.root.rstrip("/")
        if mount.kind == "cgroup2" and own is not None and (own == mount.root or own.startswith(f"{below}/")):
            return root + (mount.point + own[len(below) :]).rstrip("/")
    return None


# The tree of processes


def processes() -> dict[int, Stat]:
    """Return all processes that this user may see, even those not reaped.  Raises OSError if no descriptor is left."""
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    return {pid: stat for pid, stat in stats.items() if stat}


def descendants(pid: int) -> dict[int, Stat]:
    """Return the living processes below *pid*, even below a zombie, and those that it has adopted as their subreaper.

    Raises OSError if no descriptor is left.
    """
    everything = processes()
    children = defaultdict[int, list[int]](list)
    for child, stat in everything.items():
        children[stat.parent].append(child)
    below: dict[int, Stat] = {}
    todo = [pid]
    while todo:
        for child in children[todo.pop()]:
            if child not in below and child != pid:
                below[child] = everything[child]
                todo.append(child)
    return {child: stat for child, stat in below.items() if stat.lives}


def own_children() -> dict[int, Stat] | None:
    """Return the processes that this one has started or adopted and not reaped, or None if that cannot be read."""
    pids: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            # The file needs CONFIG_PROC_CHILDREN.  It has even a child of another user that hidepid keeps from us.
            pids.update(map(int, _read(f"/proc/self/task/{thread}/children", 2**16).split()))
    except OSError:
        return None
    stats = {pid: stat_of(pid) for pid in pids}
    return None if None in stats.values() else {pid: stat for pid, stat in stats.items() if stat}


def ancestors(pid: int) -> tuple[int, ...]:
    """Return the parent of *pid*, its parent, ... up to the first process, as far as they can be read."""
    found: dict[int, None] = {}
    stat = stat_of(pid)
    while stat and stat.parent > 0 and stat.parent not in found:
        found[stat.parent] = None
        stat = stat_of(stat.parent)
    return tuple(found)


def process_facts(snapshot: Snapshot, stats: Mapping[int, Stat | None] | None = None) -> dict[int, ProcessStat | None]:
    """Return all processes of *snapshot* and of its claims, with their ancestors.

    None means that there is no such process.  A pid is left out if its absence proves nothing: /proc is mounted with
    hidepid, we are in a pid namespace of our own, or a container gave the pid.  *stats* were read just now.
    """
    if snapshot.recorded:
        return {}  # these pids are other processes here and now
    read = dict(stats or {})
    owners = {pid for record in snapshot.claims for pid in record.holders or (record.pid,)}
    todo = [process.pid for device in snapshot.devices for process in device.processes or ()]
    todo += [pid for record in snapshot.claims for pid in (*record.holders, record.pid) if pid is not None]
    seen: dict[int, ProcessStat | None] = {}
    while todo:
        pid = todo.pop()
        if pid in seen or pid <= 0:
            continue
        stat = read[pid] if pid in read else stat_of(pid)
        uid, inner = _inner_pid(pid) if stat and pid in owners else (None, None)
        if stat is None:
            seen[pid] = None
            continue
        facts = stat.parent, stat.state, stat.start_time, inner, uid
        seen[pid] = ProcessStat(*facts, stat.group, stat.session, stat.name.partition(b"(")[2] in SHELLS)
        todo.append(stat.parent)
    gone = {pid for pid, process in seen.items() if process is None}
    uncertain = {pid for pid in gone if not in_first_pid_namespace() or alive(pid)}
    claimed = {(record.uid, record.pid) for record in snapshot.claims if record.pid in gone - uncertain}
    if claimed:
        everywhere = {_inner_pid(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
        uncertain.update(pid for _, pid in claimed & everywhere if pid)
    return {pid: process for pid, process in seen.items() if pid not in uncertain}


def _inner_pid(pid: int) -> tuple[int | None, int | None]:
    """Return (uid of its user, innermost pid).

    The pid is None for a process of our own namespace, and both are None if they cannot be read.
    """
    pids = status_words(pid, b"NSpid")
    inner = int(pids[-1]) if len(pids) > 1 and pids[-1].isdigit() else None
    return owner_of(pid) if pids else None, inner


# What a process runs


class _Known:
    """The facts that were read about a process while it runs one program, and when."""

    __slots__ = ("command", "command_read", "facts", "facts_read", "uid", "used")

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.command: bytes | None = None
        self.uid: int | None = None
        self.facts_read = self.command_read = self.used = float("-inf")


_known: dict[tuple[int, float, bytes, bytes | None], _Known] = {}
_cleaned = [0.0]  # when those that are not used any more were last forgotten


def identified(process: GpuProcess, stat: Stat | None = None) -> GpuProcess:
    """Return the process with its user and its start time, from *stat* if that was just read.  It is cheap to poll."""
    started = stat.start_time if stat else start_time(process.pid)
    return replace(process, start_time=started, uid=owner_of(process.pid))


def described(process: GpuProcess, stat: Stat | None = None) -> GpuProcess:
    """Return the process with everything that can be read about it.  *stat* is its Stat if that was just read."""
    stat = stat or stat_of(process.pid)
    if stat is None:
        return identified(process)
    now = time.monotonic()
    known = _known_of((process.pid, stat.start_time, stat.name, stat.layout), now)
    facts_due = now - known.facts_read > FACTS_SECONDS
    if facts_due or stat.layout is None or now - known.command_read > COMMAND_SECONDS:
        (command, environ), uid = _memory_of(process.pid), owner_of(process.pid)
        if facts_due or (command, uid) != (known.command, known.uid):
            facts = _facts_of(process.pid, command, environ)
            if start_time(process.pid) != stat.start_time:
                # The pid became another process meanwhile, so the facts may be those of the one or of the other.
                return process
            known.facts, known.facts_read = facts, now
        known.command, known.uid, known.command_read = command, uid, now
    user = None if known.uid is None else user_name(known.uid)
    return replace(process, start_time=stat.start_time, uid=known.uid, user=user, **known.facts)


def _known_of(identity: tuple[int, float, bytes, bytes | None], now: float) -> _Known:
    if now - _cleaned[0] > FACTS_SECONDS:
        for other in [other for other, known in _known.items() if now - known.used > FACTS_SECONDS]:
            del _known[other]
        _cleaned[0] = now
    known = _known.setdefault(identity, _Known())
    known.used = now
    return known


def _memory_of(pid: int) -> tuple[bytes | None, bytes | None]:
    """Return the command line and the environment.

    They share one read with a deadline, because each such read takes two changes of threads.
    """
    files = (("cmdline", LONGEST_COMMAND), ("environ", LONGEST))
    read = in_time(pid, "memory", lambda: [read_proc(f"/proc/{pid}/{name}", limit) for name, limit in files])
    command, environ = read or (None, None)
    return command, environ


def _facts_of(pid: int, command: bytes | None, environ: bytes | None) -> dict[str, Any]:
    # psutil will not do: files in the memory of the process, or on a server that does not answer, need a deadline.
    return {
        "command": _words(command or b"") or None,
        "executable": _link(pid, "exe"),
        "working_directory": _link(pid, "cwd"),
        "conda_environment": conda_environment_in(_variables(environ or b"")),
        "container": container_of(read_text(f"/proc/{pid}/cgroup") or ""),
    }


def _words(cmdline: bytes) -> tuple[str, ...]:
    """Return the words of a command line.

    A program that has written another title over its own separates them with blanks.
    """
    whole = cmdline.removesuffix(b"\0")
    separator = b"\0" if b"\0" in whole or (whole != cmdline and b" " not in whole) else b" "
    return tuple(os.fsdecode(word) for word in whole.split(separator)) if whole else ()


def _link(pid: int, name: str) -> str | None:
    target = read_link(f"/proc/{pid}/{name}")
    if target is None or not target.endswith(_GONE):
        return target
    # The kernel appends this to the path of a removed file, but a file may also have such a name.  No other path is
    # looked up, because on a server that does not answer (NFS), or in a user's own file system (FUSE), that may take
    # for ever.
    return target if in_time(pid, "path", lambda: os.path.lexists(target)) else target.removesuffix(_GONE)


def _variables(environ: bytes) -> dict[str, str]:
    pairs = (word.partition(b"=") for word in environ.split(b"\0") if word.startswith(_ENVIRONMENTS))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def conda_environment_in(variables: Mapping[str, str]) -> str | None:
    """Return the name of the conda environment, or else of the virtual environment, or None if there is neither."""
    conda = variables.get("CONDA_DEFAULT_ENV") or os.path.basename(variables.get("CONDA_PREFIX", ""))
    return conda or os.path.basename(variables.get("VIRTUAL_ENV", "")) or None


def container_of(cgroup: str) -> str | None:
    """Return the container id (docker, podman, containerd, CRI-O), name (LXC, nspawn) or Slurm job in a cgroup file.

    Only what root has started counts, because where users may make cgroups, they choose the names.
    """
    for pattern in _CONTAINERS:
        for match in re.finditer(pattern, cgroup):
            if not _is_a_users(cgroup[: match.start()].rpartition("\n")[2].rpartition("/")[0]):
                return match[1]
    return None


def _is_a_users(cgroup: str) -> bool:
    """Return whether a user may make cgroups in *cgroup*, as in "0::/system.slice".

    They may in their own systemd, and where the cgroup was given to them.
    """
    if "/user@" in cgroup:
        return True
    try:
        return cgroup.startswith("0::") and os.stat(_CGROUPS + cgroup[3:]).st_uid != 0
    except OSError:  # another version of cgroups, or not to be seen from here
        return False
