"""Which AMD GPUs there are, and what each of them is called.

KFD says which devices can compute: a data center GPU has seven further cards for partitions, in every mode, and the
dead ones among them look like the others.  A card that KFD does not know can still draw, and compute by Vulkan.  This
module reads no value that changes: see amd_fields.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.backends import kfd
from gpuguard.backends.amd_fields import GpuFiles
from gpuguard.backends.drm import NotTold, cards, entries, listed, read, read_or
from gpuguard.errors import DriverNotFound
from gpuguard.locale.messages import sentence
from gpuguard.vendors import AMD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuguard.backends.drm import Card
    from gpuguard.backends.kfd import KfdNode

# The reasons for which a GPU has no number of its own.  With any other one, as while it is reset, it may have one.
_NO_NUMBER = ("drm.absent", "drm.empty", "drm.not_supported")


@dataclass(frozen=True)
class AmdGpu:
    """A GPU on the PCI bus."""

    card: Card
    files: GpuFiles
    index: int
    ordinal: int  # what the variables of ROCm call it; one that KFD does not know has a number that means none
    uuid: str
    nodes: tuple[KfdNode, ...]  # one, or one for each partition; none if KFD does not know the GPU
    unnamed: str | None = None  # why its uuid cannot be told

    @property
    def integrated(self) -> bool:
        """Whether it is part of the CPU."""
        return self.files.integrated

    @property
    def is_lost(self) -> bool:
        """Whether it has vanished from the bus."""
        return not os.path.exists(self.card.folder)

    @property
    def uuids(self) -> frozenset[str]:
        """Its own uuid and those of its partitions."""
        return frozenset({self.uuid, *map(self.uuid_of, self.nodes)})

    def uuid_of(self, partition: KfdNode) -> str:
        """Return the uuid of a partition: KFD gives all of them the number of the GPU."""
        return f"{AMD.instance_prefix}{self.uuid.partition('-')[2]}-{partition.partition}"


def state(root: str) -> tuple[object, ...]:
    """Return what changes when GPUs or partitions come or go."""
    return kfd.generation(root), frozenset(entries(f"{root}/sys/class/drm"))


def find(root: str, indices: dict[str, int]) -> tuple[AmdGpu, ...]:
    """Return the GPUs in the order in which ROCm counts them, and behind them those that it cannot use.

    A GPU that is part of the CPU is left out beside others.  *indices* are those of the GPUs that were found before, by
    their addresses, and get those of new ones.  Raises DriverNotFound if there are none.
    """
    usable = _usable(root)
    if not usable:
        raise DriverNotFound(_why_none(root))
    numbers = {card.address: _unique_id(card, nodes) for card, nodes in usable}
    shared = Counter(numbers.values())
    integrated = {card.address for card, nodes in usable if _is_integrated(root, card, nodes, numbers[card.address])}
    beyond = max((node.position + 1 for _, nodes in usable for node in nodes), default=0)
    found = []
    for card, nodes in usable:
        if card.address in integrated and len(integrated) < len(usable):
            continue
        index, number = indices.setdefault(card.address, len(indices)), numbers[card.address]
        uuid, unnamed = card.uuid, None
        if isinstance(number, NotTold):
            uuid, unnamed = f"unknown-{index}", number.reason
        elif number and shared[number] == 1:
            uuid = f"{AMD.uuid_prefix}{number:016x}"
        files = GpuFiles(root, card, integrated=card.address in integrated)
        ordinal = nodes[0].position if nodes else beyond + index
        found.append(AmdGpu(card, files, index, ordinal, uuid, nodes, unnamed))
    return tuple(found)


def _usable(root: str) -> list[tuple[Card, tuple[KfdNode, ...]]]:
    """Return the GPUs that can be used, each with its nodes, in the order of ROCm and then by their addresses."""
    nodes, hides_nodes = kfd.topology(root)
    there = {card.address: card for card in cards(root, AMD)}
    nodes_of: dict[str, list[KfdNode]] = {address: [] for address in there}
    for node in nodes:
        # A virtual GPU (SR-IOV) may have a PCI function of its own; any other function is the number of a partition.
        address = node.address if node.address in there else node.gpu_address
        nodes_of.setdefault(address, []).append(node)
    # What KFD hides, a container may not use.
    usable = [
        (card, tuple(nodes_of[address])) for address, card in there.items() if nodes_of[address] or not hides_nodes
    ]
    return sorted(usable, key=lambda pair: pair[1][0].position if pair[1] else len(nodes))


def _unique_id(card: Card, nodes: Sequence[KfdNode]) -> int | NotTold:
    """Return the number that the chip has of its own, 0 if it has none, or why that cannot be told now."""
    if nodes and nodes[0].unique_id:
        return nodes[0].unique_id
    try:
        text = read(f"{card.device}/unique_id")
        return int(text, 16) if re.fullmatch(r"[0-9a-fA-F]{1,16}", text) else 0
    except NotTold as untold:
        return 0 if untold.key in _NO_NUMBER else untold


def _is_integrated(root: str, card: Card, nodes: Sequence[KfdNode], number: int | NotTold) -> bool:
    """Return whether a GPU is part of the CPU.  No file is read that could wake it.

    Such a GPU has neither a counter of the load of its memory nor a fan.  It has no number either, or KFD says that its
    memory is what it maps of the host's.  An MI300A has such a counter, and memory of its own.
    """
    files = GpuFiles(root, card, integrated=True)
    if os.path.exists(f"{card.device}/mem_busy_percent") or files.has_fan():
        return False
    heap = nodes[0].memory if nodes else None
    return number == 0 or (heap is not None and str(heap) == read_or(f"{card.device}/mem_info_gtt_total"))


def _why_none(root: str) -> str:
    if not os.path.isdir(f"{root}/sys/class/drm"):
        return sentence("amd.no_drm", "the kernel shows no GPUs here: there is no {path}/sys/class/drm.", path=root)
    if any(":" in name for name in listed(f"{root}/sys/bus/pci/drivers/radeon")):
        return sentence(
            "amd.radeon",
            "the AMD GPUs here run on the driver radeon, which tells nothing of them.  Those of 2012 and later can "
            "run on amdgpu: see `modinfo amdgpu`, parameters si_support and cik_support.",
        )
    if not os.path.isdir(f"{root}/sys/module/amdgpu"):
        return sentence("amd.not_loaded", "the driver of AMD GPUs is not loaded: `sudo modprobe amdgpu`.")
    return sentence("amd.none", "the driver amdgpu has no GPU here.  In a container: pass /dev/kfd and /dev/dri to it.")
