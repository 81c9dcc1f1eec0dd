"""Answers of a driver that cannot be true: uuids that name nothing, impossible process lists.

This module does not read the driver: see nvml, smi.  Numbers out of range: see model.DeviceField.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuguard.locale.messages import sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The most by which the sum of the processes' memory may exceed the device's used memory.  Different calls read the two,
# a process may grow in between, and drivers round each process up to pages of 2 MiB; a scrambled list is off by far
# more.
SLACK = 512 * 2**20
LARGEST_MEMORY = 2**44  # bytes: no device has 16 TiB
PAGE = 4096  # bytes: the smallest page that any driver gives a process


def is_uuid(text: str) -> bool:
    """Return whether *text* can name one device in a claim: "GPU-5f...", "MIG-GPU-5f.../1/0"."""
    inside = "-/" if text.startswith("MIG-") else "-"
    sound = "-" in text and len(text) <= 128 and text.isascii() and text[0].isalnum() and text[-1].isalnum()
    return sound and all(letter.isalnum() or letter in inside for letter in text)


def implausibility(
    rows: Sequence[tuple[int, int | None]],
    *,
    alive: Callable[[int], bool],
    pid_max: int,
    own_pids: bool = False,
    memory_total: int | None = None,
    memory_used: int | None = None,
) -> str | None:
    """Return why a process list may not be acted on, or None if it can be believed.

    Drivers report lists with pid 0, pid 4294967295, memory sizes in the place of pids (structures of another version),
    and pids of another pid namespace.  One bad element makes the whole list implausible, because the others may look
    right only by chance.

    A process that has ended is no such element.  The driver lists it as long as one of its children has the device
    open, so any user can have one on every device, and would thereby keep all rules from applying to anybody there.
    For the same reason it means nothing how many they are or whether we have seen them alive, because they may end
    between two samples.  A user cannot choose a memory size that is no whole number of pages: such a number
    comes from another field, and the list is garbage.  A living process whose pid stands beside dead ones by chance is
    still not hit, because it must have the driver open before it is signalled: see enforcement.preflight.

    Args:
        rows: pid and bytes of each process of one list; bytes are None where the driver does not report them.
        alive: whether a pid exists here.
        pid_max: the largest pid of this kernel.
        own_pids: whether our pid namespace is the machine's, so that a pid that does not exist has ended.
        memory_total: bytes of the device, or None if unknown: then only what no device has is refused.
        memory_used: bytes in use on the device, or None to skip that check.
    """
    seen: set[int] = set()
    most = LARGEST_MEMORY if memory_total is None else memory_total
    for pid, memory in rows:
        if not 2 <= pid <= pid_max:
            return sentence("implausible.pid", "pid {pid} cannot be a process", pid=pid)
        if pid in seen:
            return sentence("implausible.twice", "pid {pid} is listed twice", pid=pid)
        seen.add(pid)
        if memory is not None and memory < 0:
            return sentence("implausible.bytes", "pid {pid} has {memory} bytes", pid=pid, memory=memory)
        if memory is not None and memory > most:
            return sentence("implausible.pid_more_than_gpu", "pid {pid} has more memory than the GPU", pid=pid)
        if not (alive(pid) or (own_pids and (memory or 0) % PAGE == 0)):
            return sentence("implausible.pid_elsewhere", "pid {pid} is not in this pid namespace", pid=pid)
    total = sum(memory or 0 for _, memory in rows)
    if memory_used is not None and total > memory_used + SLACK:
        return sentence("implausible.more_than_used", "the processes have more memory than is used")
    if total > most:
        return sentence("implausible.more_than_gpu", "the processes have more memory than the GPU")
    return None
