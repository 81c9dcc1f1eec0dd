"""The kernel's own refusal: a program on a cgroup that decides which device nodes its processes may open.

A filter of type BPF_PROG_TYPE_CGROUP_DEVICE, assembled by hand and loaded by bpf(2): the kernel asks it at every open()
and mknod() of a device in that cgroup and below it, and EPERM is the answer to what it refuses.  It goes by the numbers
of a node, not by its name, lives as long as the cgroup, and needs root.  Does not know which nodes a job needs: see
isolate.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable, Collection, Mapping

from gpuguard.errors import GpuguardError

BLOCK, CHARACTER = 1, 2  # BPF_DEVCG_DEV_* of linux/bpf.h: the low half of access_type

# Fields of struct bpf_cgroup_dev_ctx, to which register 1 points.
_ACCESS_TYPE, _MAJOR, _MINOR = 0, 4, 8

_LOAD_WORD, _AND, _MOVE, _EXIT, _JUMP_EQUAL, _JUMP_NOT_EQUAL, _JUMP_ABOVE = 0x61, 0x57, 0xB7, 0x95, 0x15, 0x55, 0x25

_SYSCALL_BPF = {
    "x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280, "ppc64le": 361,
}  # fmt: skip
_PROG_LOAD, _PROG_ATTACH = 5, 8
_PROG_TYPE_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE = 15, 6
# Beside the programs of systemd (DeviceAllow=) and of outer jobs: an open must pass all of them.
_ALLOW_MULTI = 2
_ATTRIBUTES_SIZE = 128  # zeros behind what an older kernel knows are accepted


def program(rules: Mapping[int, tuple[int, Collection[int]]]) -> bytes:
    """The filter's instructions.

    Args:
        rules: major number -> (highest minor that is refused, minors that are allowed nevertheless), for character
            devices.  Everything else is allowed.
    """
    code: list[tuple[int, int, int, int, str | None]] = []  # opcode, registers, offset, constant, where it jumps to
    places: dict[str, int] = {}

    def put(opcode: int, register: int, constant: int = 0, *, jump: str | None = None, offset: int = 0) -> None:
        code.append((opcode, register, offset, constant, jump))

    for register, field in ((2, _ACCESS_TYPE), (3, _MAJOR), (4, _MINOR)):
        put(_LOAD_WORD, 1 << 4 | register, offset=field)
    put(_AND, 2, 0xFFFF)
    put(_JUMP_NOT_EQUAL, 2, CHARACTER, jump="allow")
    for major, (highest, allowed) in sorted(rules.items()):
        put(_JUMP_NOT_EQUAL, 3, major, jump=f"behind {major}")
        put(_JUMP_ABOVE, 4, highest, jump="allow")
        for minor in sorted(allowed):
            put(_JUMP_EQUAL, 4, minor, jump="allow")
        put(_MOVE, 0, 0)
        put(_EXIT, 0)
        places[f"behind {major}"] = len(code)
    places["allow"] = len(code)
    put(_MOVE, 0, 1)
    put(_EXIT, 0)
    return b"".join(
        struct.pack("=BBhi", opcode, register, offset if jump is None else places[jump] - place - 1, constant)
        for place, (opcode, register, offset, constant, jump) in enumerate(code)
    )


def load(instructions: bytes) -> int:
    """Hand the filter to the kernel, which checks it; returns its descriptor.

    Raises:
        OSError: EPERM without the right to do it, ENOSYS or EINVAL where the kernel has no such programs.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"Proprietary")  # the kernel's word for "calls none of the GPL functions"
    count = len(instructions) // 8
    attributes = struct.pack(
        "=IIQQ", _PROG_TYPE_CGROUP_DEVICE, count, ctypes.addressof(code), ctypes.addressof(licence)
    )
    descriptor = _bpf(_PROG_LOAD, attributes)
    os.set_inheritable(descriptor, False)
    return descriptor


def attach(cgroup: int, filter_: int) -> None:
    """Let the filter (its descriptor) decide for a cgroup (a descriptor of its directory) until that is removed."""
    _bpf(_PROG_ATTACH, struct.pack("=IIII", cgroup, filter_, _ATTACH_CGROUP_DEVICE, _ALLOW_MULTI))


def _bpf(command: int, attributes: bytes) -> int:
    machine = os.uname().machine
    if machine not in _SYSCALL_BPF:
        raise OSError(errno.ENOSYS, f"the number of bpf(2) on {machine} is not known")
    # A 32-bit Python on a 64-bit kernel would use other numbers.
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(errno.ENOSYS, "a 32-bit Python cannot call bpf(2) here")
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES_SIZE)
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.syscall(_SYSCALL_BPF[machine], command, buffer, _ATTRIBUTES_SIZE)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


# A cgroup for one job of root's, with a filter on its device nodes.
#
# It lies below our own cgroup, so every limit that holds for us holds for the job.  The filter is the kernel's and
# lives as long as the cgroup: it stays when this process is killed.  Then only the empty directory is left when the
# job ends, and the next isolated job removes it: a lock on the directory says whether its maker still needs it.


PREFIX = "gpuguard-"
_TRIES = 20  # a directory that is not locked yet may be taken for one that was left


def check() -> None:
    """Whether root can filter devices here.

    Raises:
        GpuguardError: no; the message says why.
    """
    own_cgroup()
    os.close(_load({}))


def prepare_cgroup(
    rules: Mapping[int, tuple[int, Collection[int]]], name: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make the cgroup of the job *name*, with a filter for *rules*; how to enter it, and how to remove it."""
    parent = own_cgroup()
    sweep(parent)
    filter_ = _load(rules)
    path = f"{parent}/{PREFIX}{name}"
    try:
        directory = _make(path)
        try:
            attach(directory, filter_)
            processes = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            os.rmdir(path)
            os.close(directory)
            raise
    except OSError as error:
        raise _refused(f"{path}: {error.strerror}") from error
    finally:
        os.close(filter_)  # the cgroup keeps it

    def enter() -> None:
        os.write(processes, b"0")

    def close() -> None:
        os.close(processes)
        _remove(path)  # a process that is left keeps it, with the filter
        os.close(directory)

    return enter, close


def sweep(parent: str) -> None:
    """Remove the empty cgroups whose makers were killed."""
    for name in os.listdir(parent):
        if not name.startswith(PREFIX):
            continue
        try:
            directory = os.open(f"{parent}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # somebody was quicker
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(f"{parent}/{name}")
        except BlockingIOError:
            continue  # its maker lives
        finally:
            os.close(directory)


def own_cgroup() -> str:
    """The directory of the cgroup (version 2) that this process is in.

    Raises:
        GpuguardError: there is none that we can see and write.
    """
    # What users name, cgroups and places of mounts, may hold any other end of a line.
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        own = next((line[3:].rstrip("\n") for line in lines if line.startswith("0::")), None)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        mounts = [line.split(" ") for line in lines if " - cgroup2 " in line]
    for fields in mounts:
        root, place = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), word) for word in fields[3:5])
        below = root.rstrip("/")
        if own is not None and (own == root or own.startswith(f"{below}/")):
            path = (place + own[len(below) :]).rstrip("/")
            if os.access(path, os.W_OK):
                return path
            raise _refused(f"{path} cannot be written to, as in a container")
    raise _refused("no cgroup file system of version 2 is mounted")


def _make(path: str) -> int:
    """Make the directory and lock it."""
    for _ in range(_TRIES):
        try:
            os.mkdir(path)
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # swept already
            continue
        fcntl.flock(directory, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(directory), os.stat(path)):
                return directory
        except FileNotFoundError:
            pass
        os.close(directory)
    raise FileNotFoundError(errno.ENOENT, "somebody removes it again and again", path)


def _remove(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        return  # not empty, or gone


def _load(rules: Mapping[int, tuple[int, Collection[int]]]) -> int:
    try:
        return load(program(rules))
    except OSError as error:
        raise _refused(f"the kernel takes no device filter from us ({error.strerror})") from error


def _refused(why: str) -> GpuguardError:
    return GpuguardError(
        f"--isolate cannot be had: {why}.\n"
        "Root needs a writable cgroup file system of version 2 and the right to use bpf(2) (not in an ordinary "
        "container).  Or run the job as an ordinary user with bubblewrap installed."
    )
