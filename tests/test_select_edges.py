"""Choosing devices at the edges: where a difference begins to count, what decides between equals, what is said."""

from __future__ import annotations

import pytest
from builders import GIB, MIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot

from gpuguard.errors import NotEnoughGpus
from gpuguard.model import Gap
from gpuguard.request import Request
from gpuguard.select import choose, not_enough
from gpuguard.sharing import NOBODY, Sharing

TOLERANCE = Request().tolerance
ANY = Request(max_processes=3, max_util=100.0)


def ranked(*devices, request=ANY, sharing=None):
    """Indices, the best first.  Of equals that is the highest."""
    return [device.index for device in choose(a_snapshot(*devices), request, {}, sharing).eligible]


def said(request, *devices):
    error = not_enough(a_snapshot(*devices), request, choose(a_snapshot(*devices), request, {}))
    assert isinstance(error, NotEnoughGpus)
    return str(error)


@pytest.mark.parametrize(("more", "less", "order"), [(1024, 1023, [0, 1]), (512, 511, [0, 1]), (1023, 512, [1, 0])])
def test_free_memory_counts_in_steps_of_512_mib(more, less, order):
    busy = {"processes": (a_process(),), "memory_used": 70 * GIB}

    assert ranked(*(a_device(i, memory_free=free * MIB, **busy) for i, free in enumerate((more, less)))) == order


@pytest.mark.parametrize(("low", "high", "order"), [(4.0, 5.0, [0, 1]), (0.0, 4.0, [1, 0]), (9.0, 10.0, [0, 1])])
def test_utilization_counts_in_steps_of_5_percent(low, high, order):
    assert ranked(a_device(0, utilization=low), a_device(1, utilization=high)) == order


@pytest.mark.parametrize(("cool", "hot", "order"), [(44.0, 45.0, [0, 1]), (40.0, 44.0, [1, 0]), (49.0, 50.0, [0, 1])])
def test_temperature_counts_in_steps_of_5_degrees(cool, hot, order):
    assert ranked(a_device(0, temperature=cool), a_device(1, temperature=hot)) == order


def test_what_holds_as_much_as_an_idle_device_may_counts_as_empty_and_idle():
    just = {"memory_used": TOLERANCE}
    assert ranked(a_device(0, **just, memory_free=GIB, memory_total=None),
                  a_device(1, memory_used=TOLERANCE + 1, memory_free=GIB, memory_total=None)) == [0, 1]  # fmt: skip
    assert ranked(a_device(0, memory_used=0), a_device(1, **just, memory_free=10 * GIB)) == [1, 0]


def test_a_device_whose_health_marks_are_known_to_be_clean_comes_before_one_of_unknown_marks():
    clean = {"retired_pages": 0, "remapped_rows": 0, "ecc_uncorrected_aggregate": 0, "ecc_uncorrected_volatile": 0}

    assert ranked(a_device(0, **clean), a_device(1, **{**clean, "retired_pages": None})) == [0, 1]
    assert ranked(a_device(0, **clean), a_device(1, **{**clean, "retired_pages": 1})) == [0, 1]


def test_a_device_of_which_nobody_knows_the_processes_comes_after_one_without_any():
    devices = (a_device(0), a_device(1, processes=None))
    unreadable = a_snapshot(*devices, gaps=(Gap(devices[1].uuid, "processes", "not supported"),))

    assert [device.index for device in choose(unreadable, Request(), {}).eligible] == [0, 1]
    assert ranked(*devices, request=Request()) == [1, 0]  # only not read yet


# Shares.


def shared(index, count, used=0.0, **fields):
    """A device with so many shares of 10 GiB."""
    device = a_device(index, memory_used=int(used * GIB), **fields)
    slots = [(f"{device.uuid}.slot{number}",) for number in range(count)]
    claims = [a_claim_record(device, id=f"c{slot}", memory=10 * GIB, slots=slot) for slot in slots]
    return device, Sharing(tuple(claims)) if claims else NOBODY


@pytest.mark.parametrize(
    ("counts", "strategy", "order"),
    [
        ((1, 2), "spread", [0, 1]),  # the one with most left
        ((1, 0), "spread", [0, 1]),  # the one that is shared already
        ((2, 1), "pack", [0, 1]),  # the one with least left
        ((1, 0), "pack", [0, 1]),
        ((1, 1), "pack", [1, 0]),
    ],
)
def test_a_share_goes_where_somebody_shares_already_and_packed_where_the_least_is_left(counts, strategy, order):
    devices, sharing = zip(*(shared(index, count) for index, count in enumerate(counts)), strict=True)
    request = Request(share=True, memory=5 * GIB, strategy=strategy)

    assert (
        ranked(*devices, request=request, sharing={d.uuid: s for d, s in zip(devices, sharing, strict=True)}) == order
    )


# MIG.


def test_an_instance_is_preferred_with_its_gpu():
    parents = [a_device(index, mig_mode=True) for index in (0, 1)]
    instances = [a_mig_instance(parent, 0) for parent in parents]

    assert ranked(*parents, *instances, request=Request(prefer=("0",))) == [0, 1]
    assert ranked(*parents, *instances, request=Request(prefer=("1",))) == [1, 0]


def test_one_job_never_gets_a_whole_gpu_and_an_instance():
    whole, divided = a_device(0), a_device(1, mig_mode=True)
    devices = (whole, divided, a_mig_instance(divided, 0))

    assert choose(a_snapshot(*devices), Request(num_gpus=2), {}).devices == ()
    assert "1 of them are MIG instances: one job cannot use them together" in said(Request(num_gpus=2), *devices)
    assert "MIG instances" not in said(Request(num_gpus=2), *devices[1:])  # there is no whole one


def test_instances_stand_behind_their_gpu_in_the_order_of_their_numbers():
    parent = a_device(0, mig_mode=True)
    numbers = [(2, 0), (1, 1), (1, 0)]
    instances = [
        a_mig_instance(parent, place, gpu_instance_id=gpu, compute_instance_id=compute)
        for place, (gpu, compute) in enumerate(numbers)
    ]
    refused = choose(a_snapshot(*instances, parent, a_device(1)), Request(min_free=900 * GIB), {}).refused

    assert [each.device.gpu_instance_id for each in refused] == [None, 1, 1, 2, None]
    assert [each.device.compute_instance_id for each in refused] == [None, 0, 1, 0, None]


# What is said.


@pytest.mark.parametrize(("count", "more"), [(16, False), (17, True)])
def test_at_most_16_devices_are_explained(count, more):
    busy = [a_device(i, processes=(a_process(),), memory_used=10 * GIB) for i in range(count)]

    lines = said(Request(), *busy).splitlines()
    assert [line for line in lines if line.startswith("  and ")] == ["  and 1 more"] * more
    assert said(Request(), *busy).count("device") >= 16


def test_what_an_outer_limit_leaves_is_said_as_what_can_be_used():
    devices = (a_device(0), a_device(1))
    request = Request(num_gpus=2, within=(devices[0].uuid,), within_reason="outside CUDA_VISIBLE_DEVICES")

    assert said(request, *devices).startswith("wanted 2 GPUs, but only 1 exists that can be used.")
