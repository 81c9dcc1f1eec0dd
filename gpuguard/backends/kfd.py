"""KFD, the part of AMD's driver that computes, as /sys/class/kfd shows it: its nodes, their links, and who has memory.

A node is a GPU, or a partition of one (XCP), that programs of ROCm can use.  The kernel's amdkfd/kfd_topology.c and
kfd_process.c define the files.  Every user may read them, and they tell of the processes of all users, by the pids of
the machine.  This module does not know the GPUs themselves: see amd.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpuguard.backends.drm import NotTold, entries, listed, number, pairs, read, read_or, refused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_XGMI = "11"  # CRAT_IOLINK_TYPE_XGMI of kfd_crat.h
_FUNCTION = 7  # the bits of location_id in which the partitions of a GPU have their number


@dataclass(frozen=True)
class KfdNode:
    """A GPU or a partition of one."""

    number: int  # of its folder, by which links name it
    position: int  # among the nodes with SIMDs: the index that the variables of ROCm use
    gpu_id: int | None  # names the files of a process; it changes with the mode of the GPU
    domain: int
    location: int  # bus << 8 | device << 3 | function, where the function may be the number of a partition
    render_minor: int | None
    unique_id: int  # of the GPU, 0 if it has none
    memory: int | None  # bytes; those of its host on a GPU that is part of the CPU
    neighbours: frozenset[int]  # the numbers of the nodes to which XGMI leads

    @property
    def address(self) -> str:
        """Its place on the PCI bus: "0000:03:00.0"."""
        return _address(self.domain, self.location)

    @property
    def gpu_address(self) -> str:
        """The place of the GPU if the node is a partition."""
        return _address(self.domain, self.location & ~_FUNCTION)

    @property
    def partition(self) -> int:
        """Its number if it is a partition."""
        return self.location & _FUNCTION


def _address(domain: int, location: int) -> str:
    return f"{domain:04x}:{location >> 8:02x}:{location >> 3 & 31:02x}.{location & _FUNCTION}"


def generation(root: str) -> str:
    """Return what changes whenever the nodes change, or "" without KFD."""
    return read_or(f"{_folder(root)}/topology/generation_id")


def topology(root: str) -> tuple[tuple[KfdNode, ...], bool]:
    """Return the nodes with SIMDs, in the order in which ROCm counts them, and whether some node cannot be read.

    A container may use only its own GPUs, and gets EPERM from the nodes of others.
    """
    folder = f"{_folder(root)}/topology/nodes"
    found: list[KfdNode] = []
    hides = False
    for name in filter(str.isdecimal, listed(folder)):
        try:
            facts = pairs(read(f"{folder}/{name}/properties"))
            if number(facts.get("simd_count", "")) > 0:
                found.append(_node(f"{folder}/{name}", facts, len(found)))
        except NotTold:
            hides = True
    return tuple(found), hides


def _node(folder: str, facts: Mapping[str, str], position: int) -> KfdNode:
    """Return the node in *folder*.  Raises NotTold if its place on the PCI bus is unknown."""
    minor = _known(facts.get("drm_render_minor", ""))
    return KfdNode(
        number=int(os.path.basename(folder)),
        position=position,
        gpu_id=_known(read_or(f"{folder}/gpu_id")) or None,
        domain=number(facts.get("domain", "0")),  # kernels before 5.9 know a single one
        location=number(facts.get("location_id", "")),
        render_minor=minor or None,
        unique_id=_known(facts.get("unique_id", "")) or 0,
        memory=_known(pairs(read_or(f"{folder}/mem_banks/0/properties")).get("size_in_bytes", "")) or None,
        neighbours=frozenset(_neighbours(folder)),
    )


def _neighbours(folder: str) -> Iterable[int]:
    for kind in ("io_links", "p2p_links"):
        for link in listed(f"{folder}/{kind}"):
            facts = pairs(read_or(f"{folder}/{kind}/{link}/properties"))
            if facts.get("type") == _XGMI and (node := _known(facts.get("node_to", ""))) is not None:
                yield node


def _known(text: str) -> int | None:
    try:
        return number(text)
    except NotTold:
        return None


class KfdProcesses(NamedTuple):
    """The processes that have KFD open, and what they use."""

    pids: frozenset[int]  # all of them, also those that only look, such as rocm-smi
    memory: Mapping[int, Mapping[int, int | None]]  # gpu_id -> pid -> bytes, None if unknown
    contexts: Mapping[int, Sequence[str]]  # pid -> the folders of its address spaces, for a process that uses a node


def processes(root: str, gpu_ids: Collection[int], known: KfdProcesses | None = None) -> KfdProcesses:
    """Return who uses the nodes *gpu_ids*.  Raises NotTold if the kernel does not list them.

    To open KFD makes an entry of a process for each GPU.  Only memory or a queue there is a use.  Of a process of
    *known*, only the entries that it used then are read, in the contexts that it had then.
    """
    folder = f"{_folder(root)}/proc"
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise refused(error) from None
    uses: dict[int, dict[int, int | None]] = {gpu_id: {} for gpu_id in gpu_ids}
    pids = frozenset(int(name) for name in names if name.isdecimal())
    contexts: dict[int, Sequence[str]] = {}
    for pid in pids:
        if known and pid in known.pids:
            wanted = [gpu_id for gpu_id in gpu_ids if pid in known.memory.get(gpu_id, ())]
            own = known.contexts.get(pid, ())
        else:
            wanted, own = list(gpu_ids), _contexts(f"{folder}/{pid}")
        memory = {gpu_id: _memory(own, gpu_id) for gpu_id in wanted}
        queues = _queues(own) if 0 in memory.values() else frozenset()
        for gpu_id, used in memory.items():
            if used != 0 or gpu_id in queues:
                uses[gpu_id][pid] = used
                contexts[pid] = own
    return KfdProcesses(pids, uses, contexts)


def _contexts(entry: str) -> list[str]:
    """Return the folders of the address spaces of a process: its entry, and each further one that it has made."""
    return [entry, *(f"{entry}/{name}" for name in entries(entry) if name.startswith("context_"))]


def _memory(contexts: Iterable[str], gpu_id: int) -> int | None:
    """Return the bytes of a process in all its contexts, or None if they are unknown.

    There is no file if the process may not use the GPU, or has just ended.
    """
    used = 0
    for context in contexts:
        try:
            used += number(read(f"{context}/vram_{gpu_id}"))
        except NotTold as untold:
            if untold.key != "drm.absent":
                return None
    return used if used >= 0 else None


def _queues(contexts: Iterable[str]) -> frozenset[int | None]:
    """Return the GPUs on which a process has a queue of commands."""
    queues = [f"{context}/queues/{name}" for context in contexts for name in entries(f"{context}/queues")]
    return frozenset(_known(read_or(f"{queue}/gpuid")) for queue in queues)


def _folder(root: str) -> str:
    return f"{root.rstrip('/')}/sys/class/kfd/kfd"
