"""The memory of GPUs by cgroup, as the kernel's controller dmem counts it since Linux 6.14 for amdgpu and xe.

A region is the memory of a GPU or of one of its tiles: "drm/0000:03:00.0/vram0".  Every user may read the counts of all
users, and reading them wakes no GPU.  In a container nothing is told, because the root of the cgroups is not visible
there.  Untried on such a kernel: this follows kernel/cgroup/dmem.c.  This module limits nothing: see jobs.kernel_share.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

from gpuguard.backends.drm import ABSENT, NotTold, listed, number, read, read_or
from gpuguard.locale.messages import sentence
from gpuguard.units import format_bytes
from gpuguard.users import user_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_REGION = re.compile(r"^(drm/(\S+)/vram\d*) (\d+|max)$", re.MULTILINE)
_SLICE_OF_USER = re.compile(r"user-(\d+)\.slice")  # systemd makes one for each user who has logged in


def root_of_cgroups(root: str) -> str:
    """Return the folder of the cgroups of all processes."""
    return f"{root.rstrip('/')}/sys/fs/cgroup"


def regions(text: str, address: str) -> dict[str, str]:
    """Return the regions of the GPU at *address* in a file of the controller: name -> bytes as text, or "max"."""
    return {name: amount for name, place, amount in _REGION.findall(text) if place == address}


def is_counted(root: str, address: str) -> bool:
    """Return whether the kernel counts the memory of a GPU here."""
    return bool(regions(read_or(f"{root_of_cgroups(root)}/dmem.capacity"), address))


def amount(what: Literal["capacity", "current"], root: str, address: str) -> int:
    """Return the bytes of memory that a GPU has, or that are in use by all together.  Raises NotTold."""
    amounts = regions(read(f"{root_of_cgroups(root)}/dmem.{what}"), address).values()
    if not amounts:
        raise NotTold(ABSENT)
    return sum(map(number, amounts))


def held(root: str) -> dict[str, dict[str, int]]:
    """Return who holds how many bytes of each GPU: its address -> name -> bytes.

    The cgroup of a user has the name of the user; that of a service or a container has its own: "docker-4f5e.scope".
    """
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for cgroup in _counted(root_of_cgroups(root)):
        of_user = _SLICE_OF_USER.fullmatch(os.path.basename(cgroup))
        name = user_name(int(of_user[1])) if of_user else os.path.basename(cgroup)
        for _, address, amount in _REGION.findall(read_or(f"{cgroup}/dmem.current")):
            if int(amount):
                found[address][name] = found[address].get(name, 0) + int(amount)
    return found


def _counted(folder: str) -> Iterator[str]:
    """Yield the cgroups at the second level, such as user.slice/user-1000.slice, or at the first if none is counted."""
    for name in listed(folder):
        if os.path.exists(f"{folder}/{name}/dmem.current"):
            below = [f"{folder}/{name}/{child}" for child in listed(f"{folder}/{name}")]
            yield from [path for path in below if os.path.exists(f"{path}/dmem.current")] or [f"{folder}/{name}"]


def with_holders(reason: str, holders: Mapping[str, int]) -> str:
    """Add to *reason*, why the processes of others are unknown, who holds memory: name -> bytes."""
    if not holders:
        return reason
    most_first = sorted(holders.items(), key=lambda holder: -holder[1])
    names = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in most_first)
    return sentence("drm.held_by", "{reason}; its memory is held by {names}", reason=reason, names=names)
