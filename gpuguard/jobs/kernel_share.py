"""The share of a job, kept by the kernel: since Linux 6.14 its controller dmem can limit the memory of GPUs by cgroup.

It does so for the drivers amdgpu and xe, where a job runs in a cgroup that is its own and that its user may write to:

    systemd-run --user --scope gpuguard run --share --memory 20GiB -- python train.py

The kernel moves what is beyond the limit to the memory of the host, or refuses it.  Elsewhere a share is what the
claims and the warnings of `run` make of it.  Untried on such a kernel: this follows kernel/cgroup/dmem.c.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from gpuguard import procfs
from gpuguard.backends import Backend, dmem
from gpuguard.backends.drm import pairs, read_or
from gpuguard.claims.claim import Claim
from gpuguard.errors import BackendError
from gpuguard.model import HEALTH, MODEL


def keep_share(claim: Claim, backend: Backend, root: str = "") -> Callable[[], object] | None:
    """Let the kernel keep this process, and the job that it will start, to the share of *claim* on each of its GPUs.

    Returns a function that ends that, or None if the kernel does not do it here.  A lower limit that is there stays.
    """
    if claim.memory is None or (path := _own_limits(root)) is None:
        return None
    try:
        facts = backend.sample({MODEL, HEALTH}, [device.uuid for device in claim.devices]).devices
    except BackendError:
        return None
    addresses = {device.uuid: device.pci_bus_id for device in facts if not device.integrated}
    # A job may have several partitions of one GPU.
    count = Counter(addresses.get(device.uuid) or "" for device in claim.devices)
    before: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for address, number in count.items():
        regions, share = dmem.regions(read_or(path), address), number * claim.memory
        if not regions:
            return None
        above = {name: limit for name, limit in regions.items() if limit == "max" or int(limit) > share}
        before |= above
        wanted |= dict.fromkeys(above, str(share))
    undo = partial(_limit, path, before)
    if not _limit(path, wanted):
        undo()
        return None
    return undo


def _own_limits(root: str) -> str | None:
    """Return the file with the limits of our cgroup, or None if it has none, or is not ours alone."""
    with suppress(OSError):
        if (cgroup := procfs.own_cgroup(root)) is not None:
            limits, ours = f"{cgroup}/dmem.max", {os.getpid(), *(procfs.own_children() or ())}
            pids = read_or(f"{cgroup}/cgroup.procs").split()
            below = pairs(read_or(f"{cgroup}/cgroup.stat")).get("nr_descendants")
            if below == "0" and pids and ours.issuperset(map(int, pids)) and os.access(limits, os.W_OK):
                return limits
    return None


def _limit(path: str, limits: Mapping[str, str]) -> bool:
    """Write the limits, by the names of regions; return whether the kernel has taken all of them."""
    try:
        for name, limit in limits.items():  # one with each write, which is what the kernel promises to read
            with open(path, "w", encoding="ascii") as file:
                file.write(f"{name} {limit}\n")
    except OSError:
        return False
    return True
