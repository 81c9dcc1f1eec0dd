"""The one reader of /proc: who a process is, where it stands in the tree of processes, and what it runs.

A process is (pid, start time), never a pid.  One that has ended, or that this user may not see, is never an error: its
fields stay unknown.  What lies in the memory of a process is read with a deadline: see deadline.
Decides nothing about processes and never signals them: see enforcement.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from gpuguard.deadline import in_time
from gpuguard.errors import shortage
from gpuguard.model import GpuProcess, ProcessStat, Snapshot
from gpuguard.users import certain_owner, user_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LONGEST = 2**18  # bytes that are read of an environment; what stands behind is cut off
LONGEST_COMMAND = 4096  # and of a command line, as much as policies judge by
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h: a constant of the kernel

# What is read about a process takes ten times as long as its line in stat: a daemon keeps it.
FACTS_SECONDS = 60.0
COMMAND_SECONDS = 30.0  # within which a title is seen that a program writes over its command line; an exec at once.
# The uid is read as often: a process that runs gets another one only by dropping privileges, just after its start.

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
    """The first *limit* bytes of a file of the kernel; None: gone, hidden, or no descriptor is left."""
    try:
        return _read(path, limit)
    except OSError:
        return None


def _read(path: str, limit: int) -> bytes:
    # In one read: the kernel makes up what it says at that moment, and a second one may be of another moment.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def read_link(path: str) -> str | None:
    """Where a link leads; None: gone or hidden."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def read_text(path: str) -> str | None:
    """All of a file; None: gone or hidden."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def read_memory(pid: int, name: str, limit: int = 4096) -> bytes | None:
    """The first bytes of a file of /proc/PID that lies in the memory of the process; None also when that blocks."""
    return in_time(pid, "memory", lambda: read_proc(f"/proc/{pid}/{name}", limit))


def status_words(pid: int, name: bytes) -> list[bytes]:
    """The words behind *name* in /proc/PID/status; none where that cannot be read.

    The name of the process stands there, too, and its owner chooses that: of all ends of lines the kernel escapes
    the newline alone.  And all the groups of its owner.
    """
    status = read_proc(f"/proc/{pid}/status", 2**16) or b""
    return status.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal; False where that cannot be read."""
    try:
        return bool(int(status_words(pid, b"SigCgt")[0], 16) >> (signum - 1) & 1)
    except (IndexError, ValueError):  # it has ended; a /proc that is not the kernel's
        return False


# One process


# What people type into: a program that they start from it is a job of its own.
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
    # Where its data, arguments and environment lie: an exec lays them anew, at random places.  With the name this
    # stands for the program that runs.  None: not shown to this user.
    layout: bytes | None

    @property
    def lives(self) -> bool:
        """Whether it is more than an entry that its parent has not reaped."""
        return self.state not in ("Z", "X")


def parse_stat(line: bytes) -> Stat | None:
    """The content of /proc/PID/stat; None: it is something else."""
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
    """Who *pid* is now; None: ended, or hidden from this user.  Raises OSError: no descriptor is left."""
    try:
        return parse_stat(_read(f"/proc/{pid}/stat", 4096))
    except OSError as error:
        if shortage(error):
            raise
        return None


def stat_of(pid: int) -> Stat | None:
    """As read_stat(), but None also where no descriptor is left."""
    return parse_stat(read_proc(f"/proc/{pid}/stat") or b"")


def start_time(pid: int) -> float | None:
    """Seconds since boot at which the process started; None: it cannot be read."""
    stat = stat_of(pid)
    return stat.start_time if stat else None


def own_memory(pid: int) -> int | None:
    """Bytes that a process has in memory; of what it shares with others its part; without files that can be read again.

    None: gone, hidden, or not read in time.  It takes time for each page: see deadline.
    """
    text = in_time(pid, "pages", lambda: read_proc(f"/proc/{pid}/smaps_rollup"), times=4) or b""
    parts = re.findall(rb"^Pss_(?:Anon|Shmem): +(\d+) kB$", text, re.MULTILINE)
    return sum(map(int, parts)) * 1024 if parts else None


def uid_of(pid: int) -> int | None:
    """The real uid of a process; None: gone or hidden."""
    # Not the owner of /proc/PID: that is root for every process that may not be dumped.
    words = status_words(pid, b"Uid")
    return int(words[0]) if words and words[0].isdigit() else None


def owner_of(pid: int) -> int | None:
    """The uid of the user whose process it is, who may have been given its real uid by root; None: gone or hidden."""
    uid = uid_of(pid)
    return None if uid is None else certain_owner(uid)


def uid_behind(pid: int) -> int | None:
    """The uid of the user that a process acts for; None: gone or hidden.

    Root in effect alone is any user who runs a program with the set-user-ID bit, with any name, and with anything
    open.  Root who has become another user in effect acts for that one.
    """
    words = status_words(pid, b"Uid")
    return (int(words[0]) or int(words[1])) if len(words) > 1 and all(map(bytes.isdigit, words)) else None


def alive(pid: int) -> bool:
    """Whether *pid* is a process here; also true for those that /proc hides from this user (hidepid)."""
    if os.path.exists(f"/proc/{pid}"):
        return True
    try:
        os.close(os.pidfd_open(pid))
    except (OSError, OverflowError):
        return False
    return True


def may_be(pid: int, program: bytes) -> bool:
    """Whether *pid* is a process of that name, or its name cannot be read."""
    name = read_proc(f"/proc/{pid}/comm")
    return name is None or name.rstrip(b"\n") == program[:15]  # of which a kernel keeps so much


@cache
def pid_max() -> int:
    """The largest pid of this kernel; the largest that Linux knows when it does not say."""
    text = (read_text("/proc/sys/kernel/pid_max") or "").strip()
    return int(text) if text.isdecimal() and int(text) else 2**22


def in_first_pid_namespace() -> bool | None:
    """Whether our pids are the machine's; None when that cannot be read."""
    namespace = read_link("/proc/self/ns/pid")
    return None if namespace is None else namespace == FIRST_PID_NAMESPACE


def boot_clock() -> float:
    """CLOCK_BOOTTIME, seconds: the clock of start times, which is never set and counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Of this boot: a clock that counts from the start of the machine, and start times, mean nothing in another."""
    return (read_proc("/proc/sys/kernel/random/boot_id", 8) or b"").decode("ascii", "replace")


# The tree of processes


def processes() -> dict[int, Stat]:
    """All processes that this user may see, also those not reaped.  Raises OSError: no descriptor is left."""
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    return {pid: stat for pid, stat in stats.items() if stat}


def descendants(pid: int) -> dict[int, Stat]:
    """Living processes below *pid*, also below a zombie; with those that it has adopted, being their subreaper.

    Raises OSError: no descriptor is left.
    """
    everything = processes()
    children: dict[int, list[int]] = {}
    for child, stat in everything.items():
        children.setdefault(stat.parent, []).append(child)
    below: dict[int, Stat] = {}
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in below and child != pid:
                below[child] = everything[child]
                todo.append(child)
    return {child: stat for child, stat in below.items() if stat.lives}


def own_children() -> dict[int, Stat] | None:
    """What this process has started or adopted and has not reaped; None: that cannot be read."""
    pids: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            # Only with CONFIG_PROC_CHILDREN.  A child of another user stands here, too, where hidepid keeps it from us.
            pids.update(map(int, _read(f"/proc/self/task/{thread}/children", 2**16).split()))
    except OSError:
        return None
    stats = {pid: stat_of(pid) for pid in pids}
    return None if None in stats.values() else {pid: stat for pid, stat in stats.items() if stat}


def ancestors(pid: int) -> tuple[int, ...]:
    """The parent of *pid*, its parent, ... up to the first process, as far as they can be read."""
    found: dict[int, None] = {}
    stat = stat_of(pid)
    while stat and stat.parent > 0 and stat.parent not in found:
        found[stat.parent] = None
        stat = stat_of(stat.parent)
    return tuple(found)


def process_facts(snapshot: Snapshot, stats: Mapping[int, Stat | None] | None = None) -> dict[int, ProcessStat | None]:
    """All processes of *snapshot* and of its claims, with their ancestors.

    None is "there is no such process".  A pid is left out where its absence proves nothing: /proc is mounted with
    hidepid, we are in a pid namespace of our own, or the pid is one that a container gave.  *stats* were read just now.
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
    """(uid of its user, innermost pid), the latter None for one of our own namespace; both None: cannot be read."""
    pids = status_words(pid, b"NSpid")
    inner = int(pids[-1]) if len(pids) > 1 and pids[-1].isdigit() else None
    return owner_of(pid) if pids else None, inner


# What a process runs


class _Known:
    """What was read of a process that runs one program, and when."""

    __slots__ = ("command", "command_read", "facts", "facts_read", "uid", "used")

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.command: bytes | None = None
        self.uid: int | None = None
        self.facts_read = self.command_read = self.used = float("-inf")


_known: dict[tuple[int, float, bytes, bytes | None], _Known] = {}
_cleaned = [0.0]  # when those that are not used any more were last forgotten


def identified(process: GpuProcess, stat: Stat | None = None) -> GpuProcess:
    """The process with its user and its start time, from *stat* if that was just read; cheap enough to poll."""
    started = stat.start_time if stat else start_time(process.pid)
    return replace(process, start_time=started, uid=owner_of(process.pid))


def described(process: GpuProcess, stat: Stat | None = None) -> GpuProcess:
    """The process with everything that can be read about it; *stat*: of it, if that was just read."""
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
                # The pid became another process meanwhile: what was read may be of the one or of the other.
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
    """The command line and the environment, in one read with a deadline: each of these takes two changes of threads."""
    files = (("cmdline", LONGEST_COMMAND), ("environ", LONGEST))
    read = in_time(pid, "memory", lambda: [read_proc(f"/proc/{pid}/{name}", limit) for name, limit in files])
    command, environ = read or (None, None)
    return command, environ


def _facts_of(pid: int, command: bytes | None, environ: bytes | None) -> dict[str, Any]:
    # Not with psutil: what lies in the memory of the process, or on a server that does not answer, needs a deadline.
    return {
        "command": _words(command or b"") or None,
        "executable": _link(pid, "exe"),
        "working_directory": _link(pid, "cwd"),
        "conda_environment": environment_of(_variables(environ or b"")),
        "container": container_of(read_text(f"/proc/{pid}/cgroup") or ""),
    }


def _words(cmdline: bytes) -> tuple[str, ...]:
    """The words of a command line; a program that has written another title over its own separates them with blanks."""
    whole = cmdline.removesuffix(b"\0")
    separator = b"\0" if b"\0" in whole or (whole != cmdline and b" " not in whole) else b" "
    return tuple(os.fsdecode(word) for word in whole.split(separator)) if whole else ()


def _link(pid: int, name: str) -> str | None:
    target = read_link(f"/proc/{pid}/{name}")
    if target is None or not target.endswith(_GONE):
        return target
    # The kernel says so of a file that was removed, and a file may have such a name.  Nothing else is looked up where
    # it lies: on a server that does not answer (NFS), or in a user's own file system (FUSE), that may take for ever.
    return target if in_time(pid, "path", lambda: os.path.lexists(target)) else target.removesuffix(_GONE)


def _variables(environ: bytes) -> dict[str, str]:
    pairs = (word.partition(b"=") for word in environ.split(b"\0") if word.startswith(_ENVIRONMENTS))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def environment_of(variables: Mapping[str, str]) -> str | None:
    """The name of the conda environment, else of the virtual environment."""
    conda = variables.get("CONDA_DEFAULT_ENV") or os.path.basename(variables.get("CONDA_PREFIX", ""))
    return conda or os.path.basename(variables.get("VIRTUAL_ENV", "")) or None


def container_of(cgroup: str) -> str | None:
    """The container id (docker, podman, containerd, CRI-O), name (LXC, nspawn) or Slurm job in a cgroup file.

    Only of what root has started: where users may make cgroups they choose the names.
    """
    for pattern in _CONTAINERS:
        for match in re.finditer(pattern, cgroup):
            if not _is_a_users(cgroup[: match.start()].rpartition("\n")[2].rpartition("/")[0]):
                return match[1]
    return None


def _is_a_users(cgroup: str) -> bool:
    """Whether a user may make cgroups there: in their systemd, or where it was given to them; "0::/system.slice"."""
    if "/user@" in cgroup:
        return True
    try:
        return cgroup.startswith("0::") and os.stat(_CGROUPS + cgroup[3:]).st_uid != 0
    except OSError:  # another version of cgroups, or not to be seen from here
        return False
