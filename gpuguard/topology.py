"""Which of equally good devices work best together: those with the shortest ways between them.

Pure.  Does not know what a good device is: see select.
"""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

from gpuguard.model import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

# How close two devices are, as the driver calls it; a pair that nobody knows counts as the farthest.
LEVELS = {"SYS": 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5, "NVLINK": 6}
_UNKNOWN, _SAME_GPU = 0, 7

# Sets that are compared one by one: any number of up to 16 devices is at most 12870 sets, about 30 ms.
_FIELD_OF_SEARCH = 13_000


def best_connected(
    fixed: Sequence[Device], pool: Sequence[Device], need: int, topology: Sequence[tuple[str, str, str]]
) -> list[Device]:
    """*fixed* and *need* devices of *pool*: the set whose worst connection is best.

    Ties: the sum of all connections, then the fewest NUMA nodes, then the first ones of *pool*.  Exact up to
    _FIELD_OF_SEARCH sets; beyond, one set is grown from each device of the pool and the best of them is taken.
    """
    devices = [*fixed, *pool]
    links = _links(devices, topology)
    start, rest = tuple(range(len(fixed))), range(len(fixed), len(devices))
    if comb(len(pool), need) <= _FIELD_OF_SEARCH:
        sets = [start + more for more in combinations(rest, need)]
    else:
        sets = [_grown(start, seed, rest, need, links) for seed in rest]
    nodes = [device.numa_node if device.numa_node is not None else f"unknown {i}" for i, device in enumerate(devices)]

    def quality(members: tuple[int, ...]) -> tuple[int, int, int]:
        levels = [links[one][other] for one, other in combinations(members, 2)]
        return min(levels), sum(levels), -len({nodes[member] for member in members})

    # max() keeps the first of equals, and the sets come in rank order.
    return [devices[member] for member in max(sets, key=quality)]


def _grown(start: tuple[int, ...], seed: int, rest: range, need: int, links: list[list[int]]) -> tuple[int, ...]:
    members = [*start, seed]
    left = [one for one in rest if one != seed]
    worst = {one: min(links[one][member] for member in members) for one in left}
    total = {one: sum(links[one][member] for member in members) for one in left}
    while len(members) < len(start) + need:
        best = max(left, key=lambda one: (worst[one], total[one], -one))
        members.append(best)
        left.remove(best)
        for one in left:
            worst[one] = min(worst[one], links[one][best])
            total[one] += links[one][best]
    return tuple(sorted(members))


def _links(devices: Sequence[Device], topology: Sequence[tuple[str, str, str]]) -> list[list[int]]:
    known = {}
    for one, other, level in topology:
        known[one, other] = known[other, one] = LEVELS.get(level, _UNKNOWN)
    # The driver knows connections between GPUs only: a MIG instance stands where its GPU stands.
    gpus = [device.parent_uuid or device.uuid for device in devices]
    return [[_SAME_GPU if one == other else known.get((one, other), _UNKNOWN) for other in gpus] for one in gpus]
