"""Several devices: the best connected ones among equally good ones."""

from itertools import combinations

import pytest
from builders import GIB, a_device, a_mig_instance, a_process, a_snapshot, a_uuid
from hypothesis import given
from hypothesis import strategies as st

from gpuguard import select as topology
from gpuguard.request import Request
from gpuguard.select import LEVELS, best_connected, choose


def pairs(count, level):
    """level(i, j) -> the name of the connection of each pair; None for pairs that nobody knows."""
    named = ((a_uuid(i), a_uuid(j), level(i, j)) for i, j in combinations(range(count), 2))
    return tuple(pair for pair in named if pair[2])


def winners(number, devices, connections, **fields):
    machine = a_snapshot(*devices, topology=connections)
    return [device.index for device in choose(machine, Request(number, **fields), {}).devices]


@pytest.mark.parametrize(("better", "worse"), list(combinations(reversed(LEVELS), 2)))
def test_the_levels_are_ordered(better, worse):
    connections = pairs(4, lambda i, j: better if (i, j) == (0, 2) else worse)

    assert winners(2, [a_device(i) for i in range(4)], connections) == [0, 2]


def test_the_worst_connection_of_a_set_counts_before_the_sum():
    # 0-1-2 in a row of NVLINKs that ends in SYS, against 3-4-5 which are all PIX.
    row = {(0, 1): "NVLINK", (1, 2): "NVLINK", (3, 4): "PIX", (3, 5): "PIX", (4, 5): "PIX"}
    connections = pairs(6, lambda i, j: row.get((i, j), "SYS"))

    assert winners(3, [a_device(i) for i in range(6)], connections) == [3, 4, 5]


def test_without_topology_one_numa_node_is_preferred():
    devices = [a_device(i, numa_node=(0, 1, 0, 1, 0)[i]) for i in range(5)]

    assert winners(3, devices, None) == [0, 2, 4]


def test_with_equal_connections_the_ranking_decides():
    assert winners(2, [a_device(i) for i in range(4)], pairs(4, lambda i, j: "NVLINK")) == [2, 3]


def test_preferred_devices_are_taken_before_connections_are_looked_at():
    connections = pairs(4, lambda i, j: "NVLINK" if (i, j) == (2, 3) else "SYS")

    assert winners(2, [a_device(i) for i in range(4)], connections, prefer=("0",)) in ([0, 2], [0, 3])
    assert winners(2, [a_device(i) for i in range(4)], connections, prefer=("0", "1")) == [0, 1]


def test_a_good_connection_does_not_make_up_for_a_busy_device():
    connections = pairs(3, lambda i, j: "NVLINK" if (i, j) == (0, 1) else "SYS")
    busy = a_device(0, processes=(a_process(),), memory_used=10 * GIB)

    assert winners(2, [busy, a_device(1), a_device(2)], connections, max_processes=1) == [1, 2]


def test_the_last_device_is_the_one_best_connected_with_those_that_are_fixed():
    connections = pairs(4, lambda i, j: "NVLINK" if (i, j) == (0, 1) else "SYS")

    assert winners(2, [a_device(i) for i in range(4)], connections, prefer=("0",)) == [0, 1]


def test_among_too_many_sets_to_compare_a_connected_one_is_still_found():
    ring = {4, 9, 13, 18, 22, 27, 31, 39}  # one of 76,904,685 sets
    connections = pairs(40, lambda i, j: "NVLINK" if {i, j} <= ring else "PIX" if i + j == 39 else "SYS")

    assert winners(8, [a_device(i) for i in range(40)], connections) == sorted(ring)
    assert winners(8, [a_device(i) for i in range(40)], connections, prefer=("22", "9")) == sorted(ring)


def test_instances_of_one_gpu_are_closest():
    gpus = [a_device(i, mig_mode=True) for i in range(2)]
    instances = [a_mig_instance(gpu, number) for gpu in gpus for number in range(2)]
    machine = a_snapshot(*gpus, *instances, topology=((a_uuid(0), a_uuid(1), "NVLINK"),))
    choice = choose(machine, Request(2, prefer=(instances[1].uuid,), allow_mig_set=True), {})

    assert {device.parent_uuid for device in choice.devices} == {gpus[0].uuid}


LEVEL = st.sampled_from([None, *LEVELS])


@given(st.data())
def test_up_to_sixteen_candidates_the_best_set_is_found(data):
    count = data.draw(st.integers(2, 7))
    number = data.draw(st.integers(2, count))
    drawn = {pair: data.draw(LEVEL) for pair in combinations(range(count), 2)}
    devices = [a_device(i) for i in range(count)]
    found = best_connected([], devices, number, pairs(count, lambda i, j: drawn[i, j]))

    def worst(members):
        return min(LEVELS.get(drawn[pair], 0) for pair in combinations(sorted(members), 2))

    assert worst([device.index for device in found]) == max(map(worst, combinations(range(count), number)))


@given(st.integers(2, 8), st.randoms(use_true_random=False))
def test_grown_sets_find_the_socket_like_the_exact_search(number, random):
    order = random.sample(range(16), 16)
    devices = [a_device(i, numa_node=order.index(i) // 8) for i in order]

    def level(i, j):
        places = order.index(i), order.index(j)
        return "SYS" if places[0] // 8 != places[1] // 8 else "PIX" if places[0] // 4 == places[1] // 4 else "NODE"

    connections = pairs(16, level)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "MOST_SETS", 0)
        grown = best_connected([], devices, number, connections)

    def quality(members):
        levels = [LEVELS[level(*sorted((a.index, b.index)))] for a, b in combinations(members, 2)]
        return min(levels), sum(levels)

    assert len({device.uuid for device in grown}) == number
    assert quality(grown) == quality(best_connected([], devices, number, connections))
