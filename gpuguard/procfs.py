"""Who a pid is, from /proc, and whether a driver's process list can be believed.

Drivers give lists with pid 0, pid 4294967295, memory sizes in the place of pids (structures of another version), and
pids of another pid namespace.  One bad element makes the whole list implausible: the others may be right by chance.
A process that is gone, or that this user may not look into, is never an error: its fields stay unknown.
Decides nothing about processes and never signals them: see actions.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.model import GpuProcess, ProcessStat, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

# What the sum of the processes' memory may exceed the device's used memory by.  The two are read by different calls, a
# process may grow in between, and drivers round each process up to pages of 2 MiB; a scrambled list is off by far more.
SLACK = 512 * 2**20
LONGEST = 2**18  # bytes that are read of an environment; what stands behind is cut off
LONGEST_COMMAND = 4096  # and of a command line, as much as policies look at: each look hands over those of everybody
LARGEST_MEMORY = 2**44  # bytes: no device has 16 TiB

_HIDDEN = b"0 0 0 0 "
_GONE = " (deleted)"
_TICKS = os.sysconf("SC_CLK_TCK")

# Where stat_fields() has what; in proc_pid_stat(5) the state is the third.
STATE, PARENT, GROUP, SESSION, TERMINAL, START = 0, 1, 2, 3, 4, 19

# What is read about a process costs 0.5 ms: a daemon that looks once per second keeps it.
FACTS_SECONDS = 60.0
COMMAND_SECONDS = 30.0  # within which a title is seen that a program writes over its command line; another one at once
UID_SECONDS = 30.0  # a process gets another user id while it runs only by dropping privileges, just after its start
KEPT_AT_MOST = 8192  # processes in each half, 1 KiB each: more than run on 64 devices


# When a process started, in seconds since boot; and what is another one when it runs another program: its name, and
# where its data lie, None: not told.
Life = tuple[float, bytes, "bytes | None"]


class _Known:
    """What is kept of a process that runs one program, and when it was read."""

    __slots__ = ("command", "command_read", "facts", "facts_read", "given", "told", "uid", "uid_read")

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.command: bytes | None = None
        self.uid: int | None = None
        self.given: GpuProcess | None = None  # what was described last with what stands here, ...
        self.told: GpuProcess | None = None  # ... and how
        self.facts_read = self.command_read = self.uid_read = float("-inf")


class _Kept:
    """Those that were looked at lately.  Whoever is not looked at while a half fills up or ages is forgotten with it.

    A store that is emptied when it is full holds nothing that the next look needs: 5,000 processes took four times as
    much CPU.
    """

    def __init__(self) -> None:
        self.young: dict[tuple[int, Life], _Known] = {}
        self.old = self.young
        self.began = 0.0

    def of(self, pid: int, life: Life, now: float) -> _Known:
        """What is kept of a process, to be filled in."""
        key = pid, life
        known = self.young.get(key)
        if known is None:
            known = self.old.get(key) or _Known()
            if len(self.young) >= KEPT_AT_MOST or now - self.began > FACTS_SECONDS:
                self.old, self.young, self.began = self.young, {}, now
            self.young[key] = known
        return known


_kept = _Kept()

_ENVIRONMENTS = (b"CONDA_DEFAULT_ENV=", b"CONDA_PREFIX=", b"VIRTUAL_ENV=")
_CONTAINERS = (  # what /proc/PID/cgroup says, most specific first
    r"(?:docker|libpod|cri-containerd|crio|nerdctl|containerd)[-:/]([0-9a-f]{64})",
    r"/(?:kubepods|docker|libpod_parent|podman|nerdctl|default|k8s\.io)[^\n]*/(?:\w+-)?([0-9a-f]{64})",
    r"/lxc(?:\.payload)?[./]([^/\n]+)",
    r"/machine\.slice/machine-([^/\n]+)\.scope",
    r"/slurm[^\n]*/(job_\d+)",
)
_CGROUPS = "/sys/fs/cgroup"
_OF_CONTAINERS = (
    "docker", "libpod", "podman", "cri", "containerd", "nerdctl", "kubepods", "k8s.io", "/default/", "/lxc",
    "/machine-", "/slurm",
)  # fmt: skip


def implausibility(
    rows: Sequence[tuple[int, int | None]],
    *,
    alive: Callable[[int], bool],
    pid_max: int,
    memory_total: int | None = None,
    memory_used: int | None = None,
) -> str | None:
    """Why nobody may act on a process list, or None when it can be believed.

    Args:
        rows: pid and bytes of each process of one list; bytes are None where the driver does not tell.
        alive: whether a pid exists here.
        pid_max: the largest pid of this kernel.
        memory_total: bytes of the device; None: not told, so only what no device has is refused.
        memory_used: bytes in use on the device; None: not checked.
    """
    seen: set[int] = set()
    most = LARGEST_MEMORY if memory_total is None else memory_total
    for pid, memory in rows:
        if not 2 <= pid <= pid_max:
            return f"pid {pid} cannot be a process"
        if pid in seen:
            return f"pid {pid} is listed twice"
        seen.add(pid)
        if memory is not None and memory < 0:
            return f"pid {pid} has {memory} bytes"
        if memory is not None and memory > most:
            return f"pid {pid} has more memory than the device"
        if not alive(pid):
            return f"pid {pid} is not in this pid namespace"
    total = sum(memory or 0 for _, memory in rows)
    if memory_used is not None and total > memory_used + SLACK:
        return "the processes have more memory than is used"
    if total > most:
        return "the processes have more memory than the device"
    return None


_pid_max: list[int] = []


def pid_max() -> int:
    """The largest pid of this kernel; the largest that Linux knows when it does not say."""
    if not _pid_max:
        try:
            _pid_max.append(int(read_text("/proc/sys/kernel/pid_max") or 0) or 2**22)
        except ValueError:
            _pid_max.append(2**22)
    return _pid_max[0]


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
    """Whether *pid* is a process of that name, or nobody can tell."""
    told = read_proc(f"/proc/{pid}/comm")
    return told is None or told.rstrip(b"\n") == program[:15]  # of which a kernel keeps so much


def identified(process: GpuProcess, life: Life | None = None) -> GpuProcess:
    """The process with its real user id and its start time, from *life* if that was just read; cheap enough to poll."""
    return replace(process, start_time=life[0] if life else start_time(process.pid), uid=uid_of(process.pid))


def described(process: GpuProcess, life: Life | None = None) -> GpuProcess:
    """The process with everything that can be read about it; *life* is what life_of() says, if it was just asked."""
    life = life or life_of(process.pid)
    if life is None:
        return identified(process)
    now = time.monotonic()
    known = _kept.of(process.pid, life, now)
    if life[2] is None or now - known.command_read > COMMAND_SECONDS:
        command = read_memory(process.pid, "cmdline")
        if command != known.command:
            known.uid_read = known.facts_read = float("-inf")
            known.given = None
        known.command, known.command_read = command, now
    before = known.uid
    if before is None or now - known.uid_read > UID_SECONDS:
        known.uid, known.uid_read = uid_of(process.pid), now
    if now - known.facts_read > FACTS_SECONDS or known.uid != before:
        facts = _described(process.pid)
        if start_time(process.pid) != life[0]:
            # The pid became another process while we looked: nothing read in between can be told apart.
            known.uid = None
            return process
        known.facts, known.facts_read, known.given = facts, now, None
    uid = known.uid
    if known.told is None or (known.given is not process and known.given != process):
        from gpuguard.users import user_name  # who starts a job looks at devices without processes

        user = None if uid is None else user_name(uid)
        known.given, known.told = process, replace(process, start_time=life[0], uid=uid, user=user, **known.facts)
    return known.told


def described_until(listed: Iterable[GpuProcess], lives: Mapping[int, Life]) -> float:
    """The time.monotonic() at which described() will read something anew of one of them; -inf: each time."""
    until = float("inf")
    for process in listed:
        life = lives.get(process.pid)
        known = _kept.young.get((process.pid, life)) if life else None
        if known is None or known.uid is None or life is None or life[2] is None:
            return float("-inf")
        read = known.command_read + COMMAND_SECONDS, known.uid_read + UID_SECONDS, known.facts_read + FACTS_SECONDS
        until = min(until, *read)
    return until


def _described(pid: int) -> dict[str, Any]:
    # Not with psutil: its import takes 12 ms and 3 MiB, which every sampler would pay.
    return {
        "command": _words(read_memory(pid, "cmdline", LONGEST_COMMAND) or b"") or None,
        "executable": _linked(pid, "exe"),
        "working_directory": _linked(pid, "cwd"),
        "conda_environment": environment_of(_variables(read_memory(pid, "environ", LONGEST) or b"")),
        "container": container_of(read_text(f"/proc/{pid}/cgroup") or ""),
    }


def _words(cmdline: bytes) -> tuple[str, ...]:
    """The words of a command line; a program that has written another title over its own parts them with blanks."""
    whole = cmdline.removesuffix(b"\0")
    apart = b"\0" if b"\0" in whole or (whole != cmdline and b" " not in whole) else b" "
    return tuple(os.fsdecode(word) for word in whole.split(apart)) if whole else ()


def _linked(pid: int, name: str) -> str | None:
    try:
        target = os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return None
    if not target.endswith(_GONE):
        return target
    # The kernel says so of a file that was removed, and a file may bear such a name.  Nothing else is looked for where
    # it lies: on a server that does not answer (NFS), or in a user's own file system (FUSE), that may take for ever.
    from gpuguard.deadline import in_time

    return target if in_time(pid, "path", lambda: os.path.lexists(target)) else target.removesuffix(_GONE)


def _variables(environ: bytes) -> dict[str, str]:
    # Only those that are asked for: decoding all of them takes as long as everything else about the process.
    pairs = (each.partition(b"=") for each in environ.split(b"\0") if each.startswith(_ENVIRONMENTS))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def start_time(pid: int) -> float | None:
    """Seconds since boot at which the process started; None: gone or hidden."""
    life = life_of(pid)
    return life[0] if life else None


def life_of(pid: int) -> Life | None:
    """What tells a process, and the program that it runs, from any other; None: gone or hidden."""
    return life_in(read_proc(f"/proc/{pid}/stat") or b"")


def life_in(line: bytes, before: Life | None = None) -> Life | None:
    """The same from the line of /proc/PID/stat; *before*: what an earlier line of the same process told."""
    name, _, rest = line.rpartition(b")")
    if before and before[1] == name and before[2] and rest.endswith(before[2]):
        return before  # for a fourth of the time: it started when it did
    fields = rest.split(None, 42)
    if len(fields) < 20:
        return None
    # Behind the 42nd stands where data, heap, arguments and environment lie: an exec lays them anew, at random places.
    # With the name they stand for the command line, whose reading takes as long.  Zeros: not shown to this user.
    places = fields[42] if len(fields) > 42 else _HIDDEN
    try:
        return int(fields[START]) / _TICKS, name, None if places.startswith(_HIDDEN) else b" " + places
    except ValueError:  # of something that is no kernel's
        return None


def container_of(cgroup: str) -> str | None:
    """The container id (docker, podman, containerd, CRI-O), name (LXC, nspawn) or Slurm job in a cgroup file.

    Of what root has started: where a user may make cgroups he gives them the name that he likes.
    """
    if not any(word in cgroup for word in _OF_CONTAINERS):
        return None  # without `re`, which takes 0.7 MiB of the process that watches a machine without containers
    import re

    for pattern in _CONTAINERS:
        for match in re.finditer(pattern, cgroup):
            if not _is_a_users(cgroup[: match.start()].rpartition("\n")[2].rpartition("/")[0]):
                return match[1]
    return None


def _is_a_users(cgroup: str) -> bool:
    """Whether a user may make cgroups there: in his own systemd, or where it was given to him; "0::/system.slice"."""
    if "/user@" in cgroup:
        return True
    try:
        return cgroup.startswith("0::") and os.stat(_CGROUPS + cgroup[3:]).st_uid != 0
    except OSError:  # another version of cgroups, or not to be seen from here
        return False


def environment_of(variables: Mapping[str, str]) -> str | None:
    """The name of the conda environment, else of the virtual environment."""
    conda = variables.get("CONDA_DEFAULT_ENV") or os.path.basename(variables.get("CONDA_PREFIX", ""))
    return conda or os.path.basename(variables.get("VIRTUAL_ENV", "")) or None


def uid_of(pid: int) -> int | None:
    """The real uid of a process; None: gone or hidden."""
    # Not the owner of /proc/PID: that is root for every process that may not be dumped.
    words = status_words(pid, b"Uid")
    return int(words[0]) if words and words[0].isdigit() else None


def uid_behind(pid: int) -> int | None:
    """The uid of whoever a process acts for; None: gone or hidden.

    Root in effect alone is anybody who runs a program with the set-user-ID bit, with the name that he likes, and with
    whatever he had open.  Root who has become another user in effect acts for that one.
    """
    words = status_words(pid, b"Uid")
    return (int(words[0]) or int(words[1])) if len(words) > 1 and all(map(bytes.isdigit, words)) else None


def status_words(pid: int, name: bytes) -> list[bytes]:
    """What stands behind *name* in /proc/PID/status; () where nobody can tell.

    The name of the process stands there, too, and its owner chooses that: of all ends of lines the kernel writes out
    the newline alone.  And all the groups of its owner.
    """
    status = read_proc(f"/proc/{pid}/status", 2**16) or b""
    return status.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()


def read_proc(path: str, limit: int = 4096) -> bytes | None:
    """The first *limit* bytes of a file, for less than half of what a file object costs; None: gone or hidden."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, limit)
    except OSError:  # it has ended since
        return None
    finally:
        os.close(descriptor)


def stat_fields(pid: int) -> list[bytes]:
    """The words of /proc/PID/stat from the state on: the name before it may itself hold blanks and brackets.

    Raises:
        OSError: the process has ended or is hidden, or there is no descriptor left.
    """
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)


def read_memory(pid: int, name: str, limit: int = 4096) -> bytes | None:
    """The same of a file of /proc/PID that lies in the memory of the process; None also where it keeps us waiting."""
    from gpuguard.deadline import in_time  # who starts a job reads nobody's

    return in_time(pid, "memory", lambda: read_proc(f"/proc/{pid}/{name}", limit))


def read_text(path: str) -> str | None:
    """All of a file; None: gone or hidden."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


# What /proc tells everybody about the processes of a snapshot and of its claims: parent, state, inner pid.


Stat = list[bytes]  # the fields of /proc/PID/stat behind the name

# Most processes are in the same state at the next look, and to make a noun takes four times as long as to find it.
_nouns: dict[tuple[bytes, bytes, bytes], ProcessStat] = {}
_FEW = 64  # of ended processes, that may be kept on any machine
_STATES = 4  # of one process, that are kept: it runs, sleeps, and waits for a disk
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h: a constant of the kernel


def in_first_pid_namespace() -> bool | None:
    """Whether our pids are the machine's; None when that cannot be told."""
    try:
        return os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return None


def stats_of(pids: Iterable[int], lines: Mapping[int, bytes] | None = None) -> dict[int, Stat | None]:
    """/proc/PID/stat of each of *pids*, read unless it is one of *lines*; None where it cannot be read."""
    return {pid: _fields(lines[pid]) if lines and pid in lines else _stat(pid) for pid in pids}


def process_facts(
    snapshot: Snapshot, stats: dict[int, Stat | None] | None = None, *, ancestors: bool = True
) -> dict[int, ProcessStat | None]:
    """All processes of *snapshot* and of its claims, with their *ancestors*.

    None is "there is no such process".  A pid is left out where its absence proves nothing: /proc is mounted with
    hidepid, we are in a pid namespace of our own, or the pid is one that a container gave.

    Args:
        snapshot: with its claims.
        stats: of processes that were read just now, so that nobody reads them twice.
        ancestors: whether they are looked up, too; where there are no claims nobody needs them.
    """
    if snapshot.recorded:
        return {}  # whoever has these pids here and now is somebody else
    read = stats or {}
    pids = {process.pid for device in snapshot.devices for process in device.processes or ()}
    pids.update(pid for record in snapshot.claims for pid in (*record.holders, record.pid) if pid is not None)
    people = {pid for record in snapshot.claims for pid in record.holders or (record.pid,)}
    seen: dict[int, ProcessStat | None] = {}
    todo = list(pids)
    while todo:
        pid = todo.pop()
        if pid not in seen and pid > 0:
            stat = read[pid] if pid in read else _stat(pid)
            seen[pid] = process = _read_facts(pid, stat, closely=pid in people)
            if process and ancestors:
                todo.append(process.parent)
    if len(_nouns) > _STATES * len(seen) + _FEW:
        _nouns.clear()  # most are of processes that have ended
    gone = {pid for pid, process in seen.items() if process is None}
    uncertain = {pid for pid in gone if not in_first_pid_namespace() or alive(pid)}
    owners = {(record.uid, record.pid) for record in snapshot.claims if record.pid in gone - uncertain}
    if owners:
        uncertain.update(pid for uid, pid in owners & _inner_pids() if pid)
    return {pid: process for pid, process in seen.items() if pid not in uncertain}


def _stat(pid: int) -> Stat | None:
    line = read_proc(f"/proc/{pid}/stat")
    return None if line is None else _fields(line)


def _fields(line: bytes) -> Stat:
    # The name in front may contain blanks and brackets: fields are counted from behind it.
    return line.rpartition(b") ")[2].split(None, 24)


def _read_facts(pid: int, stat: Stat | None, closely: bool) -> ProcessStat | None:
    try:
        if stat is None:
            return None
        if not closely:
            return _made(stat[STATE], stat[PARENT], stat[START])
        uid, inner = _status(pid) or (None, None)
        return replace(_made(stat[STATE], stat[PARENT], stat[START]), inner_pid=inner, uid=uid)
    except (IndexError, ValueError):
        return None


def _made(state: bytes, parent: bytes, start: bytes) -> ProcessStat:
    key = state, parent, start
    found = _nouns.get(key)
    if found is None:
        found = _nouns[key] = ProcessStat(int(parent), state.decode(), int(start) / _TICKS)
    return found


def _inner_pids() -> set[tuple[int, int | None]]:
    """(uid, pid in its own namespace) of every process of the machine that lives in another namespace than ours."""
    found = (_status(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return {one for one in found if one and one[1] is not None}


def _status(pid: int) -> tuple[int, int | None] | None:
    """(uid, innermost pid), the latter None for a process of our own namespace."""
    # In front of the pids stand all groups of the user.
    status = read_proc(f"/proc/{pid}/status", 65536) or b""
    try:
        uids, pids = (status.partition(name)[2].partition(b"\n")[0].split() for name in (b"\nUid:", b"\nNSpid:"))
        return int(uids[0]), int(pids[-1]) if len(pids) > 1 else None
    except (IndexError, ValueError):
        return None


# /proc/PID/stat of processes that are looked at again and again, kept open: to read it anew takes half as long.
#
# An open one stands for that one process for ever: when it has ended, reading says so, whoever has its pid by then.
# Who looks once keeps nothing open.


MOST = 256  # files, and no more than a quarter of those that this process may have open
_LONGEST = 4096  # bytes


class StatFiles:
    """Those of one backend, from one sample to the next."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, Life | None]] = {}  # by pid: descriptor, and what was read from it last
        self.lines: dict[int, bytes] = {}  # that were read for the sample that is under way, by pid
        self._before = self.lines  # and for the one before it
        self._most = min(MOST, os.sysconf("SC_OPEN_MAX") // 4)

    def turn(self) -> None:
        """A new sample begins: whoever the one before it did not read is forgotten."""
        self._before, self.lines = self.lines, {}
        for pid in self._open.keys() - self._before.keys():
            os.close(self._open.pop(pid)[0])

    def life(self, pid: int) -> Life | None:
        """Who *pid* is now, as life_of() says; None: gone or hidden."""
        known, line = self._open.get(pid) or self._opened(pid), None
        if known:
            try:
                line = os.pread(known[0], _LONGEST, 0)
            except OSError:  # it has ended, and another process may have its pid
                os.close(self._open.pop(pid)[0])
                known = None
        if not known:
            line = read_proc(f"/proc/{pid}/stat")
        if line is None:
            self.lines.pop(pid, None)
            return None
        self.lines[pid] = line
        life = life_in(line, known and known[1])
        if known and life is not known[1]:
            self._open[pid] = known[0], life
        return life

    def _opened(self, pid: int) -> tuple[int, Life | None] | None:
        if pid in self._before and len(self._open) < self._most:
            try:
                self._open[pid] = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC), None
            except OSError:
                return None
        return self._open.get(pid)

    def close(self) -> None:
        """Keep none open."""
        self.lines = {}
        self.turn()

    __del__ = close


def boot_clock() -> float:
    """CLOCK_BOOTTIME, seconds: the clock of start times, which is never set and counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Of this boot: a clock that counts from the start of the machine, and start times, mean nothing in another."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(8)
    except OSError:
        return ""
