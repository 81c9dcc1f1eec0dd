"""Who a process is, as far as it matters before a signal: read from /proc in one go, by pid.

Nothing here is by name alone: a name is chosen by the user who starts the process, to evade or to frame.
Does not judge: see preflight.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import select
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256

from gpuguard.backends import CONTROL_NODE, DEVICE_NODE
from gpuguard.deadline import in_time
from gpuguard.policies.view import interactive_use
from gpuguard.procfs import LONGEST, read_memory, read_text, start_time, stat_of

# Programs whose end takes a desktop, a driver service or other people's jobs along.  They count only where root put
# them: see belongs_to_the_system.
SYSTEM_PROGRAMS = (
    "nvidia-persistenced", "nv-hostengine", "nvidia-cuda-mps-*", "nv-fabricmanager", "nvidia-imex", "nvidia-powerd",
    "nvidia-smi", "dcgm*", "nvitop", "nvtop", "gpustat", "gpuguard",
    "Xorg*", "X", "Xwayland", "Xvnc", "xrdp*", "vglserver*", "gnome-shell", "gnome-session*", "gnome-remote-desktop*",
    "gdm*", "sddm*", "lightdm*", "kwin_*", "plasmashell", "plasma-keyboard", "xwaylandvideobridge", "mutter", "weston",
    "sway", "Hyprland", "hyprland", "cosmic-comp", "pulseaudio", "pipewire*", "dbus-daemon", "dbus-broker*",
    "systemd*", "sshd*", "tmux*", "screen", "login", "init", "vmware-vmx",
    "dockerd", "containerd*", "runc", "crun", "conmon", "podman", "kubelet", "pause", "slurmd", "slurmstepd", "srun",
)  # fmt: skip
_READS = 5  # of _facts_of, which may each not come back
DRIVER_FILE = CONTROL_NODE
SYSTEM_PLACES = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/opt/", "/snap/", "/nix/store/")

_DRIVER_MAPPED = re.compile(rb"\S+ \S+ \S+ \S+ \d+ +%s[\w/-]*\n" % DEVICE_NODE.encode())  # a line of /proc/PID/maps
_NS_GET_USERNS = 0xB701  # ioctl_nsfs(2): a descriptor of the user namespace that owns another namespace


@dataclass(frozen=True)
class ProcessFacts:
    """What /proc says of a process.  None = could not be read."""

    start_time: float  # seconds since boot
    uids: tuple[int, ...]  # real, effective, saved, file system
    parent: int
    group: int
    terminal: int  # device number of its controlling terminal, 0: none
    tracer: int  # pid of its debugger, 0: none
    caught: int  # signals it has handlers for: bit 0 is signal 1
    executable: str | None
    executable_owner: int | None  # uid
    command: str | None
    uses_driver: bool | None  # has DRIVER_FILE open
    cgroup: str | None  # without the ids of containers, which change with each start
    in_place: bool = True  # its program is the file at that path; False also where that cannot be seen

    @property
    def interactive(self) -> str | None:
        """In what way a person sits in front of it, or None."""
        return interactive_use(self.command or "", self.terminal, self.tracer)


def facts_of(pid: int) -> ProcessFacts | None:
    """The facts about a process; None when it is gone or hidden, or a file of it keeps its reader waiting."""
    return in_time(pid, "facts", lambda: _facts_of(pid), _READS)


def _facts_of(pid: int) -> ProcessFacts | None:
    if (now := stat_of(pid)) is None:
        return None
    status = dict(line.partition(":")[::2] for line in (read_text(f"/proc/{pid}/status") or "").splitlines())
    command, cgroup = read_memory(pid, "cmdline", LONGEST), read_text(f"/proc/{pid}/cgroup")
    executable, owner, in_place = _executable(pid)
    try:
        return ProcessFacts(
            start_time=now.start_time,
            uids=tuple(int(word) for word in status["Uid"].split()),
            parent=now.parent,
            group=now.group,
            terminal=now.terminal,
            tracer=int(status["TracerPid"]),
            caught=int(status["SigCgt"], 16),
            executable=executable,
            executable_owner=owner,
            command=None if command is None else command.replace(b"\0", b" ").decode(errors="replace"),
            uses_driver=_has_open(pid, DRIVER_FILE),
            cgroup=None if cgroup is None else re.sub(r"[0-9a-f]{12,}", "*", cgroup),
            in_place=in_place,
        )
    except (IndexError, KeyError, ValueError):
        return None


def signature(facts: ProcessFacts | None, claim: str = "") -> str:
    """User, program, script, cgroup and claim, as a hash: the same of one that is started in its place; "": unknown."""
    if facts is None or facts.executable is None or facts.cgroup is None:
        return ""
    script = next((word for word in (facts.command or "").split()[1:] if not word.startswith("-")), "")
    text = f"{facts.uids[:1]} {facts.executable} {script} {facts.cgroup} {claim}"
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]  # a cgroup takes up to 12 lines


def has_ended(pidfd: int) -> bool:
    """Whether the process is over: reaped or not.  One whose first thread has ended while others live is not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def is_alive(process: tuple[int, float]) -> bool:
    """Whether that very process, (pid, start time), still runs; True when that cannot be told."""
    pid, started = process
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        now = start_time(pid)
        return not has_ended(pidfd) and (now is None or now == started)
    finally:
        os.close(pidfd)


def belongs_to_the_system(facts: ProcessFacts) -> bool:
    """Whether it runs a program of SYSTEM_PROGRAMS, as root or from where only root can put it.

    A file of that name in a home directory protects nothing; a hard link to a program of root there neither, nor
    another program of root's that a user has mounted at that path in a namespace of their own.
    """
    if facts.executable is None:
        return False
    name = os.path.basename(facts.executable.removesuffix(" (deleted)"))
    if not any(fnmatchcase(name, pattern) for pattern in SYSTEM_PROGRAMS):
        return False
    put_there_by_root = facts.executable.startswith(SYSTEM_PLACES) and facts.executable_owner == 0 and facts.in_place
    return 0 in facts.uids or put_there_by_root


@dataclass(frozen=True)
class Protected:
    """The users and programs that the admin has put out of the guard's reach."""

    uids: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()  # names; all their members
    executables: tuple[str, ...] = ()  # globs of the whole paths of programs

    def uids_of(self, seen: Iterable[int], groups: Mapping[int, frozenset[str]]) -> frozenset[int]:
        """The uids that are meant, of those *seen*; *groups*: the names of each one's, where they are known."""
        members = {uid for uid in seen if self.groups and (uid not in groups or self.groups & groups[uid])}
        return self.uids | members


def runs_one_of(facts: ProcessFacts, globs: Collection[str]) -> bool:
    """Whether its program is one of *globs*: a file of root's, or of the owner of what lies there for us.

    In a mount namespace of one's own a file of one's own can have any path, and so can a file of root's.
    """
    if facts.executable is None:
        return bool(globs)
    path = facts.executable.removesuffix(" (deleted)")
    if not facts.in_place or not any(fnmatchcase(path, glob) for glob in globs):
        return False
    try:
        return facts.executable_owner in (0, os.stat(path).st_uid)
    except OSError:
        return facts.executable_owner == 0


@functools.cache
def uid_min() -> int:
    """The first uid of people, from /etc/login.defs; 1000 where that does not say."""
    found = re.search(r"^\s*UID_MIN\s+(\d{1,9})\s*$", read_text("/etc/login.defs") or "", re.MULTILINE)
    return int(found[1]) if found and int(found[1]) > 0 else 1000


@functools.cache
def overflow_uid() -> int:
    """The uid that stands for every user that cannot be told."""
    text = (read_text("/proc/sys/kernel/overflowuid") or "").strip()
    return int(text) if text.isdigit() else 65534


def is_of_the_system(uid: int) -> bool:
    """Whether no person has that uid: it is the system's, or stands for users that cannot be told."""
    return uid < uid_min() or uid == overflow_uid()


def _executable(pid: int) -> tuple[str | None, int | None, bool]:
    """(path, uid of its owner, whether that file lies at that path)."""
    # A process whose first thread has ended shows its program only in the others.
    for directory in (f"/proc/{pid}", *_threads(pid)):
        try:
            path = os.readlink(f"{directory}/exe")
        except OSError:
            continue
        try:
            seen = os.stat(f"{directory}/exe")
        except OSError:
            # Files of FUSE tell even root nothing but their path: a process must not be spared for that.
            return path, None, False
        if not stat.S_ISREG(seen.st_mode):
            return None, None, False
        return path, seen.st_uid, _lies_at(path, seen, pid)
    return None, None, False


def _lies_at(path: str, seen: os.stat_result, pid: int) -> bool:
    """Whether a file is the one at *path*, as its process sees it unless it made what it sees itself."""
    if not seen.st_nlink:
        return True  # of a package that was upgraded since
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root{path}" if _sees_what_root_made(pid) else path), seen)
    except OSError:
        return False


def _sees_what_root_made(pid: int) -> bool:
    """Whether its mount namespace is the machine's, or one that root made: a container's, a service's."""
    try:
        mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        owner = fcntl.ioctl(mounts, _NS_GET_USERNS)
    except OSError:
        return False
    finally:
        os.close(mounts)
    try:
        return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))
    finally:
        os.close(owner)


def _has_open(pid: int, path: str) -> bool | None:
    absent: bool | None = False
    try:
        wanted = os.stat(path).st_rdev
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                seen = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.S_ISCHR(seen.st_mode) and seen.st_rdev == wanted:
                    return True
    except PermissionError:
        absent = None  # only CAP_DAC_READ_SEARCH opens that directory, and every file of the machine with it
    except OSError:
        return None
    # CAP_SYS_PTRACE is enough for the mappings: the driver's library maps its devices.  And the files are those of the
    # first thread, which may have ended, or have other ones than those that compute; what is mapped is everybody's.
    for directory in (f"/proc/{pid}", *_threads(pid)[-2:]):
        if in_time(pid, "maps", functools.partial(_maps_the_driver, f"{directory}/maps")):
            return True
    return absent


def _maps_the_driver(path: str) -> bool:
    # Line by line: with 65,530 mappings of a file with a long name its owner makes 300 MB of it.
    with open(path, "rb") as lines:
        return any(map(_DRIVER_MAPPED.match, lines))


def _threads(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
