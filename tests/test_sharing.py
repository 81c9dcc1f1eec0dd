"""What is left of a shared device, by what was promised and what the driver shows.  Its locks: see test_shares."""

from __future__ import annotations

from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot

from gpuguard.model import ClaimRecord, Device
from gpuguard.request import Request
from gpuguard.select import Choice, choose
from gpuguard.sharing import NOBODY, Sharing, memory_left, sharing_on, slots_left

ALICE, BOB = 1001, 1002
DEVICE = a_device(0, memory_used=0)


def a_share(gib: float | None, slot: int = 0, device: Device = DEVICE, **fields: Any) -> ClaimRecord:
    """Somebody's share of so many GiB, in that slot of the device."""
    memory = None if gib is None else int(gib * GIB)
    return a_claim_record(device, id=f"c{slot}", memory=memory, slots=(f"{device.uuid}.slot{slot}",), **fields)


def chosen(device: Device, sharing: Sharing, **request: Any) -> Choice:
    wanted = Request(share=True, memory=request.pop("memory", 10 * GIB), **request)
    return choose(a_snapshot(device), wanted, {}, {device.uuid: sharing})


def reasons(device: Device, sharing: Sharing, **request: Any) -> list[str]:
    return [reason.text for refusal in chosen(device, sharing, **request).refused for reason in refusal.reasons]


def test_what_was_promised_is_gone_although_nobody_uses_it_yet():
    assert memory_left(DEVICE, Sharing((a_share(10), a_share(20, 1, uid=BOB)))) == 50 * GIB


def test_whoever_uses_more_than_his_share_counts_with_what_he_uses():
    device = a_device(0, memory_used=30 * GIB, processes=(a_process(7, memory_used=30 * GIB),))

    assert memory_left(device, Sharing((a_share(10),), owners={7: ALICE})) == 50 * GIB
    assert memory_left(device, Sharing((a_share(40),), owners={7: ALICE})) == 40 * GIB


def test_the_memory_of_strangers_is_gone_beside_what_was_promised():
    device = a_device(0, memory_used=30 * GIB, processes=(a_process(7, memory_used=25 * GIB),))

    assert memory_left(device, Sharing((a_share(10),), owners={})) == 40 * GIB


def test_a_process_of_unknown_memory_leaves_its_memory_to_the_strangers():
    device = a_device(0, memory_used=30 * GIB, processes=(a_process(7, memory_used=None),))

    assert memory_left(device, Sharing((a_share(10),), owners={7: ALICE})) == 40 * GIB


@pytest.mark.parametrize("unknown", ["memory_total", "memory_used"])
def test_nobody_can_tell_what_is_left_where_the_driver_does_not(unknown):
    device = a_device(0, **{unknown: None})

    assert memory_left(device, NOBODY) is None
    assert chosen(device, NOBODY).devices == ()


def test_a_device_whose_use_is_unknown_gives_no_share_and_says_so():
    assert "its memory in use is unknown" in reasons(a_device(0, memory_used=None), NOBODY)


def test_a_share_that_even_an_empty_device_does_not_have_is_refused():
    assert reasons(DEVICE, NOBODY, memory=81 * GIB) == ["has 80.0GiB of memory even when it is empty"]


def test_a_share_beside_others_says_who_they_are_when_it_does_not_fit():
    others = Sharing((a_share(50), a_share(25, 1, uid=BOB, user="bob")))

    assert reasons(DEVICE, others) == ["only 5.0GiB left beside alice (50.0GiB) and bob (25.0GiB)"]


def test_a_device_for_one_process_cannot_be_shared():
    (said,) = reasons(a_device(0, memory_used=0, compute_mode="exclusive_process"), NOBODY)

    assert said.startswith("in exclusive-process mode")


# Who shares it


def test_of_several_records_for_one_slot_the_greatest_counts():
    sharing = sharing_on(DEVICE, [a_share(10), a_share(1, user="liar")])

    assert [record.memory for record in sharing.claims] == [10 * GIB]
    assert sharing.count == 1


@pytest.mark.parametrize("gib", [None, 0, -1, 81])
def test_a_share_that_cannot_be_true_makes_the_device_one_that_nobody_can_join(gib):
    sharing = sharing_on(DEVICE, [a_share(10), a_share(gib, 1)])

    assert (len(sharing.claims), sharing.unknown) == (1, 1)
    assert "whose record cannot be read" in reasons(DEVICE, sharing)[0]


def test_a_share_of_another_device_is_none_of_this_one():
    other = a_share(10, device=a_device(1))

    assert sharing_on(DEVICE, [other]) == Sharing()


def test_each_of_those_who_share_may_bound_how_many_do():
    assert slots_left(Sharing((a_share(10),)), 8) == 7
    assert slots_left(Sharing((a_share(10, most=2),)), 8) == 1
    assert slots_left(Sharing((a_share(10, most=2), a_share(10, 1))), 8) == 0
    assert slots_left(Sharing((a_share(10, most=0),)), 8) == 7  # no bound that anybody could set


def test_a_full_device_says_that_no_more_may_join():
    (said,) = reasons(DEVICE, Sharing((a_share(10, most=1),)))

    assert said == "shared by 1 already, and no more may join: alice (10.0GiB)"


# Which device


def best(strategy: str, *sharings: Sharing, **fields: Any) -> int:
    """The index of the device that a share is put on."""
    machine = a_snapshot(*[a_device(index, memory_used=0, **fields) for index in range(len(sharings))])
    on = {device.uuid: each for device, each in zip(machine.devices, sharings, strict=True)}
    return choose(machine, Request(share=True, memory=10 * GIB, strategy=strategy), {}, on).devices[0].index


def test_packing_fills_the_shared_device_that_is_fullest():
    little, much = Sharing((a_share(10),)), Sharing((a_share(40),))

    assert best("pack", NOBODY, little, much, NOBODY) == 2


def test_spreading_joins_the_shared_device_with_most_room_so_that_whole_devices_stay_whole():
    little, much = Sharing((a_share(10),)), Sharing((a_share(40),))

    assert best("spread", NOBODY, much, little, NOBODY) == 2
