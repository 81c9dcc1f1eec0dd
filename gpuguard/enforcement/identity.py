"""The identity of a process, as far as it matters before a signal, read from /proc in one go by pid.

Nothing here goes by a name alone, because the user who starts a process chooses its name, to evade or to frame.
This module does not judge: see preflight.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import glob
import os
import re
import select
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import BinaryIO, TypeVar

from gpuguard.device_state import vendor_of
from gpuguard.files import closed_after
from gpuguard.model import Device
from gpuguard.policies.policy import interactive_use
from gpuguard.procfs import LONGEST, in_time, read_link, read_memory, read_text, start_time, stat_of
from gpuguard.users import certain_owner
from gpuguard.vendors import DRM_MAJOR, DRM_NODES, VENDORS

T = TypeVar("T")
DriverNodes = tuple[frozenset[int], ...]  # for each driver the device numbers of its nodes, empty if none is known

# Programs whose end would take a desktop, a driver service or other people's jobs along.  They count only where root
# has put them: see belongs_to_the_system.
DISPLAY_PROGRAMS = (
    "Xorg*", "X", "Xwayland", "Xvnc", "xrdp*", "vglserver*", "gnome-shell", "gnome-session*", "gnome-remote-desktop*",
    "gdm*", "sddm*", "lightdm*", "kwin_*", "plasmashell", "plasma-keyboard", "xwaylandvideobridge", "mutter", "weston",
    "sway", "Hyprland", "hyprland", "cosmic-comp", "pipewire*", "vmware-vmx",
)  # fmt: skip
SYSTEM_PROGRAMS = (
    *DISPLAY_PROGRAMS,
    *(program for vendor in VENDORS.values() for program in vendor.programs),
    "nvtop", "gpuguard",
    "pulseaudio", "dbus-daemon", "dbus-broker*", "systemd*", "sshd*", "tmux*", "screen", "login", "init",
    "dockerd", "containerd*", "runc", "crun", "conmon", "podman", "kubelet", "pause", "slurmd", "slurmstepd", "srun",
)  # fmt: skip
NODES = (*(pattern for vendor in VENDORS.values() for pattern in vendor.nodes), DRM_NODES)  # of all GPUs, as globs
# The nodes of the device that has a render node: card0 has the minor 0, renderD128 the minor 128.
DRM_SIBLINGS = f"/sys/dev/char/{DRM_MAJOR}:{{minor}}/device/drm/*/dev"
SYSTEM_PLACES = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/opt/", "/snap/", "/nix/store/")

# These reads may take so many times longer than others, whatever other users do, because the owner of a process can
# give it many mappings, and each of them a long name.
_TIMES = {"program": 2, "files": 4, "maps": 8, "code": 8}

_NS_GET_USERNS = 0xB701  # ioctl_nsfs(2): a descriptor of the user namespace that owns another namespace
_PROCMAP_QUERY = 0xC0686611  # include/uapi/linux/fs.h, since Linux 6.11; a query takes no longer if names are long
_QUERY = struct.Struct("9Q4I2Q")  # struct procmap_query
_NEXT_OF_A_FILE = 0x10 | 0x20  # PROCMAP_QUERY_COVERING_OR_NEXT_VMA, PROCMAP_QUERY_FILE_BACKED_VMA
_MAPPED = re.compile(rb"\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)")  # a line of /proc/PID/maps: device and inode
_KERNELS_CODE = ([b"[vdso]"], [b"[vsyscall]"])


@dataclass(frozen=True)
class ProcessFacts:
    """The facts about a process from /proc, each None if it could not be read."""

    start_time: float  # seconds since boot
    uids: tuple[int, ...]  # real, effective, saved, file system: those of the users who were given them, see users
    group: int
    terminal: int  # device number of its controlling terminal, or 0
    tracer: int  # pid of its debugger, or 0
    caught: int  # the signals that it has handlers for: bit 0 is signal 1
    executable: str | None
    executable_owner: int | None  # uid
    command: str | None
    uses_driver: bool | None  # has a node of each driver in question open, or mapped: see driver_nodes
    cgroup: str | None  # without the ids of containers, which change with each start
    in_place: bool | None = True  # its program is the file at that path; None if that was not read in time
    state: str = "R"  # as in /proc/PID/stat: R S D T t Z ...
    hides: bool = False  # its mappings could not be read to the end, which its owner can bring about
    # For a program of SYSTEM_PROGRAMS, where code lies that it can run and that is not root's: "file", "memory" or
    # "nowhere".
    foreign_code: str = "file"

    @property
    def interactive(self) -> str | None:
        """The way in which a person sits in front of the process, or None if no person does."""
        return interactive_use(self.command or "", self.terminal, self.tracer)


def facts_of(pid: int, drivers: DriverNodes = ()) -> ProcessFacts | None:
    """Return the facts about a process, or None if it is gone or hidden; *drivers* are those in question.

    Each fact that its owner can make slow or endless is read with a deadline of its own, and is unknown by itself.
    """
    if (now := stat_of(pid)) is None:
        return None
    status = dict(line.partition(":")[::2] for line in (read_text(f"/proc/{pid}/status") or "").splitlines())
    command, cgroup = read_memory(pid, "cmdline", LONGEST), read_text(f"/proc/{pid}/cgroup")
    executable, owner, in_place = _in_time(pid, "program", _executable) or (read_link(f"/proc/{pid}/exe"), None, None)
    uses_driver, hides = _uses_driver(pid, drivers)
    foreign_code = _in_time(pid, "code", _foreign_code) if _is_one_of(SYSTEM_PROGRAMS, executable) else None
    try:
        uids = [int(word) for word in status["Uid"].split()]
        owners = {uid: certain_owner(uid) for uid in set(uids)}
        return ProcessFacts(
            start_time=now.start_time,
            uids=tuple(owners[uid] for uid in uids),
            group=now.group,
            terminal=now.terminal,
            tracer=int(status["TracerPid"]),
            caught=int(status["SigCgt"], 16),
            executable=executable,
            executable_owner=owner,
            command=None if command is None else command.replace(b"\0", b" ").decode(errors="replace"),
            uses_driver=uses_driver,
            hides=hides,
            state=now.state,
            cgroup=None if cgroup is None else re.sub(r"[0-9a-f]{12,}", "*", cgroup),
            in_place=in_place,
            foreign_code=foreign_code or "file",
        )
    except (IndexError, KeyError, ValueError):
        return None


def _in_time(pid: int, kind: str, read: Callable[[int], T]) -> T | None:
    return in_time(pid, kind, functools.partial(read, pid), _TIMES[kind])


def signature(facts: ProcessFacts | None, claim: str = "") -> str:
    """Return a hash of user, program, script, cgroup and claim, or "" if unknown.

    A process that is started in place of this one has the same hash.
    """
    if facts is None or facts.executable is None or facts.cgroup is None:
        return ""
    script = next((word for word in (facts.command or "").split()[1:] if not word.startswith("-")), "")
    text = f"{facts.uids[:1]} {facts.executable} {script} {facts.cgroup} {claim}"
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]  # a cgroup takes up to 12 lines


def has_ended(pidfd: int) -> bool:
    """Return whether the process has ended, reaped or not.  It has not while any of its threads lives."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def is_alive(process: tuple[int, float]) -> bool:
    """Return whether that very process, (pid, start time), still runs; True if that cannot be told."""
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


def belongs_to_the_system(facts: ProcessFacts, draws: bool = False) -> bool:
    """Return whether it runs a program of SYSTEM_PROGRAMS alone, as root or from a place where only root can put it.

    None of these protects a process: a file of that name in a home directory, a hard link there to a program of root's,
    another program of root's that a user has mounted at that path in a namespace of their own, or a program into which
    its user has brought code (LD_PRELOAD).  Such code may unmap itself once its work on a GPU has begun, and therefore
    only display servers may have the driver open.  A display server that *draws* may compile code in its memory.
    """
    if facts.executable is None or not _is_one_of(SYSTEM_PROGRAMS, facts.executable):
        return False
    put_there_by_root = facts.executable.startswith(SYSTEM_PLACES) and facts.executable_owner == 0 and facts.in_place
    displays = _is_one_of(DISPLAY_PROGRAMS, facts.executable)
    brought_nothing = {"nowhere": displays or not facts.uses_driver, "memory": displays and draws}
    return 0 in facts.uids or bool(put_there_by_root and brought_nothing.get(facts.foreign_code))


def _is_one_of(programs: tuple[str, ...], executable: str | None) -> bool:
    return any(fnmatchcase(os.path.basename((executable or "").removesuffix(" (deleted)")), name) for name in programs)


@dataclass(frozen=True)
class Protected:
    """The users and programs that the admin has put out of the guard's reach."""

    uids: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()  # names; all their members
    executables: tuple[str, ...] = ()  # globs of the whole paths of programs

    def uids_of(self, seen: Iterable[int], groups: Mapping[int, frozenset[str]]) -> frozenset[int]:
        """Return the protected uids, with the members of protected groups among those *seen*.

        *groups* has the names of each uid's groups, where they are known.
        """
        members = {uid for uid in seen if self.groups and (uid not in groups or self.groups & groups[uid])}
        return self.uids | members


def has_path_of(facts: ProcessFacts, globs: Collection[str]) -> bool:
    """Return whether the path of its program matches one of *globs*, or cannot be read."""
    path = (facts.executable or "").removesuffix(" (deleted)")
    return bool(globs) and (not path or any(fnmatchcase(path, glob) for glob in globs))


def runs_one_of(facts: ProcessFacts, globs: Collection[str]) -> bool:
    """Return whether its program is one of *globs*: a file of root's, or of the owner of the file that we see there.

    In a mount namespace of their own, users can give any path to a file of their own, and to a file of root's as well.
    """
    if facts.executable is None or facts.in_place is None or not has_path_of(facts, globs):
        return has_path_of(facts, globs)
    if not facts.in_place:
        return False
    try:
        return facts.executable_owner in (0, os.stat(facts.executable.removesuffix(" (deleted)")).st_uid)
    except OSError:
        return facts.executable_owner == 0


@functools.cache
def uid_min() -> int:
    """Return the first uid of people, from /etc/login.defs, or 1000 if that does not say."""
    found = re.search(r"^\s*UID_MIN\s+(\d{1,9})\s*$", read_text("/etc/login.defs") or "", re.MULTILINE)
    return int(found[1]) if found and int(found[1]) > 0 else 1000


@functools.cache
def overflow_uid() -> int:
    """Return the uid that stands for every user who cannot be identified."""
    text = (read_text("/proc/sys/kernel/overflowuid") or "").strip()
    return int(text) if text.isdigit() else 65534


def is_of_the_system(uid: int) -> bool:
    """Return whether no person has that uid: it is the system's, or stands for users who cannot be identified."""
    return uid < uid_min() or uid == overflow_uid()


def _executable(pid: int) -> tuple[str | None, int | None, bool]:
    """Return (path, uid of its owner, whether that file lies at that path) of the program."""
    # A process whose first thread has ended shows its program only in the other threads.
    for directory in (f"/proc/{pid}", *_threads(pid)):
        if path := read_link(f"{directory}/exe"):
            try:
                seen = os.stat(f"{directory}/exe")
            except OSError:
                # Files of FUSE show even root only their path, and a process must not be spared for that.
                return path, None, False
            return (path, seen.st_uid, _lies_at(path, seen, pid)) if stat.S_ISREG(seen.st_mode) else (None, None, False)
    return None, None, False


def _lies_at(path: str, seen: os.stat_result, pid: int) -> bool:
    """Return whether a file is the one at *path*, as its process sees it, or as we do if the process made its view."""
    if not seen.st_nlink:
        return True  # its package was upgraded since
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root{path}" if _sees_what_root_made(pid) else path), seen)
    except OSError:
        return False


def _sees_what_root_made(pid: int) -> bool:
    """Return whether its mount namespace is the machine's, or one that root made: a container's, a service's."""
    try:
        with closed_after(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) as mounts:
            owner = fcntl.ioctl(mounts, _NS_GET_USERNS)
    except OSError:
        return False
    with closed_after(owner):
        return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))


def driver_nodes(devices: Iterable[Device]) -> DriverNodes:
    """Return for each driver of *devices* the device numbers of the nodes of which every user of them has one open.

    No number is known of a driver whose nodes cannot be seen.  The driver of a vendor that may lack nodes is left out
    where it has none.
    """
    found: dict[str, set[int]] = {}
    for device in devices:
        vendor = vendor_of(device)
        if vendor.may_lack_nodes and not os.path.exists(vendor.control_node):
            continue
        numbers = found.setdefault(vendor.name, {node.st_rdev for node in _nodes("", vendor.nodes)})
        if vendor.major == DRM_MAJOR and device.minor_number is not None:
            numbers |= _drm_numbers(device.minor_number)
    return tuple(map(frozenset, found.values()))


def _drm_numbers(minor: int) -> set[int]:
    """Return the device numbers of the render node with this *minor* and of the card node of the same device."""
    siblings = [read_text(path) or "" for path in glob.glob(DRM_SIBLINGS.format(minor=minor))]
    pairs = (text.strip().partition(":")[::2] for text in siblings)
    numbers = {os.makedev(int(major), int(minor)) for major, minor in pairs if major.isdecimal() and minor.isdecimal()}
    return {os.makedev(DRM_MAJOR, minor), *numbers}


def _nodes(root: str, patterns: Iterable[str]) -> Iterator[os.stat_result]:
    for path in (path for pattern in patterns for path in glob.glob(root + pattern)):
        with suppress(OSError):
            if stat.S_ISCHR((seen := os.stat(path)).st_mode):
                yield seen


def _uses_driver(pid: int, drivers: DriverNodes) -> tuple[bool | None, bool]:
    """Return whether it uses all *drivers*, and whether its mappings could not be read to the end."""
    if not drivers:
        return False, False
    unopened = _in_time(pid, "files", lambda pid: _unseen(drivers, _open_nodes(pid)))
    if unopened == ():
        return True, False
    # CAP_SYS_PTRACE is enough to read the mappings, and the driver's library maps its devices.  The open files are only
    # those of the first thread, which may have ended, or have other files than the threads that compute; the mappings
    # are those of all threads.
    left = drivers if unopened is None else unopened
    unused = _in_time(pid, "maps", lambda pid: _unseen(left, _mapped_nodes(pid)))
    if unused == ():
        return True, False
    return (None if None in (unopened, unused) or not all(drivers) else False), unused is None


def _unseen(drivers: DriverNodes, nodes: Iterable[int]) -> DriverNodes:
    """Return the *drivers* that have none of *nodes*, which are read no further than until there is no such driver."""
    for number in nodes:
        drivers = tuple(numbers for numbers in drivers if number not in numbers)
        if not drivers:
            break
    return drivers


def _open_nodes(pid: int) -> Iterator[int]:
    """Yield the numbers of the character devices that its first thread has open.  Raises OSError if we may not look.

    Only CAP_DAC_READ_SEARCH opens that directory, and with it all others.
    """
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            seen = os.stat(f"/proc/{pid}/fd/{name}")
            if stat.S_ISCHR(seen.st_mode):
                yield seen.st_rdev


def _mapped_nodes(pid: int) -> Iterator[int]:
    """Yield the numbers of the nodes of GPUs that it maps.

    A mapping tells its file by device and inode alone.  In a container, or a mount namespace of their own, users can
    give any path to a node, and it may be another file with the same number.
    """
    found = (node for root in ("", f"/proc/{pid}/root") for node in _nodes(root, NODES))
    numbers = {(node.st_dev, node.st_ino): node.st_rdev for node in found}
    for directory in (f"/proc/{pid}", *_threads(pid)[-2:]):
        with suppress(FileNotFoundError), open(f"{directory}/maps", "rb") as maps:
            yield from (numbers[file] for file in _mapped_files(maps) if file in numbers)


def _mapped_files(maps: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield (device, inode) of each mapping of a file.

    They are never all in memory, because /proc/PID/maps can be 300 MB and more.
    """
    place = 0
    try:
        while True:
            query = _QUERY.pack(_QUERY.size, _NEXT_OF_A_FILE, place, *[0] * 12)
            _, _, _, _, place, _, _, _, inode, major, minor, *_ = _QUERY.unpack(
                fcntl.ioctl(maps, _PROCMAP_QUERY, query)
            )
            yield os.makedev(major, minor), inode
    except OSError as error:
        if error.errno != errno.ENOTTY:  # which an older kernel returns
            if error.errno in (errno.ENOENT, errno.ESRCH):  # there are no more mappings; the thread has ended
                return
            raise
    for match in filter(None, map(_MAPPED.match, maps)):
        yield os.makedev(int(match[1], 16), int(match[2], 16)), int(match[3])


def _foreign_code(pid: int) -> str:
    """Return where foreign code lies that a process can run: "file", "memory" or "nowhere".

    Foreign is all code except unchanged files of root's in places where only root can put them.  Users can bring code
    in by LD_PRELOAD, and go on in memory that is no file ("memory") or in pages of root's library that they have
    changed ("file").  In a user namespace of their own they can even choose what /proc/PID/exe says (PR_SET_MM).
    """
    if not _sees_what_root_made(pid) or not os.path.samefile(f"/proc/{pid}/ns/user", "/proc/self/ns/user"):
        return "file"
    runs = is_file = False
    found = set[bool]()
    with open(f"/proc/{pid}/smaps", "rb") as lines:
        for line in lines:
            name, *words = line.rstrip(b"\n").split(None, 5)
            if not name.endswith(b":"):
                access, _, device, inode, *path = words
                runs, is_file = b"x" in access and path not in _KERNELS_CODE, inode != b"0"
                if runs:
                    found.add(is_file)
                if runs and is_file and not _is_roots(pid, os.fsdecode(path[0]), device, int(inode)):
                    return "file"
            elif runs and is_file and name in (b"Anonymous:", b"Swap:") and words[0] != b"0":
                return "file"
    return "file" if True not in found else "memory" if False in found else "nowhere"


def _is_roots(pid: int, path: str, device: bytes, inode: int) -> bool:
    if not path.startswith(SYSTEM_PLACES):
        return False
    seen = os.stat(f"/proc/{pid}/root{path}")
    number = b"%02x:%02x" % (os.major(seen.st_dev), os.minor(seen.st_dev))
    return (seen.st_uid, number, seen.st_ino) == (0, device, inode)


def _threads(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


SESSIONS = "/run/systemd/sessions"  # a file of systemd-logind for each: "UID=1000", "SEAT=seat0", "SCOPE=..."


def is_at_the_seat(facts: ProcessFacts) -> bool:
    """Return whether a process belongs to a session at a seat: the screen and keyboard that are plugged in.

    logind assigns seats, and never assigns one to a session over ssh.  Users choose neither the seat nor the scope of a
    session, in which the kernel keeps its processes.  Processes below the systemd of a user belong to all sessions of
    that user.
    """
    uid, cgroup = facts.uids[0], facts.cgroup or ""
    own = re.search(rf":/user\.slice/user-{uid}\.slice/(session-[^/\n]+\.scope|user@{uid}\.service)", cgroup)
    if own is None:
        return False
    with suppress(OSError):
        for name in os.listdir(SESSIONS):
            session = dict(line.partition("=")[::2] for line in (read_text(f"{SESSIONS}/{name}") or "").splitlines())
            is_own = session.get("UID") == str(uid) and own[1] in (session.get("SCOPE"), f"user@{uid}.service")
            if is_own and session.get("SEAT") and session.get("STATE") != "closing":
                return True
    return False
