"""The kernel's own refusal: a program on a cgroup that decides which device nodes its processes may open.

A filter of type BPF_PROG_TYPE_CGROUP_DEVICE, assembled by hand and loaded by bpf(2): the kernel asks it at every open()
and mknod() of a device in that cgroup and below it, and EPERM is the answer to what it refuses.  It goes by the numbers
of a node, not by its name, lives as long as the cgroup, and needs root.  Does not know which nodes a job needs: see
isolate.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Collection, Mapping

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
