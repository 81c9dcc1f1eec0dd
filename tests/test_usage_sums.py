"""What the time between two samples adds up to: nothing twice, and what is unknown as unknown."""

from __future__ import annotations

from dataclasses import replace

from builders import GIB, MIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot, a_uuid

from gpuguard.history.schema import DEVICE_COLUMNS, USER_COLUMNS, Slot, UsageSums
from gpuguard.model import Gap

LONGEST = 30.0
ALICE, BOB = 1001, 1002


def summed(*devices, begin=1000.0, seconds=10.0, energy=None, longest=LONGEST, **fields):
    """The slots after two samples of the same devices."""
    sums = UsageSums()
    former = a_snapshot(*devices, clock=500.0, taken_at=begin, **fields)
    if energy:
        former = replace(former, devices=tuple(replace(each, total_energy=energy) for each in former.devices))
    sums.add(former, longest)
    sums.add(a_snapshot(*devices, clock=500.0 + seconds, taken_at=begin + seconds, **fields), longest)
    return sums.slots


def of_device(slot: Slot, uuid=None) -> dict[str, float | None]:
    return dict(zip(DEVICE_COLUMNS, slot.devices[uuid or a_uuid(0)], strict=True))


def of_user(slot: Slot, uid=ALICE, uuid=None) -> dict[str, float]:
    return dict(zip(USER_COLUMNS, slot.users[uid, uuid or a_uuid(0)], strict=True))


def used(*devices, **fields):
    (slot,) = summed(*devices, **fields).values()
    return {key: tuple(value / 1000 for value in times) for key, times in slot.users.items()}


def test_ten_seconds_of_a_device():
    device = a_device(utilization=50.0, memory_used=8 * GIB, temperature=60.0, power_draw=300.0, total_energy=3000.0)
    (slot,) = summed(device, energy=500.0).values()

    assert of_device(slot) == {
        "seen_ms": 10_000,
        "utilization_percent_sum": 500,
        "utilization_percent_max": 50,
        "utilization_percent_unknown_ms": 0,
        "memory_used_mib_sum": 8 * GIB / MIB * 10,
        "memory_used_mib_max": 8 * GIB / MIB,
        "memory_used_mib_unknown_ms": 0,
        "temperature_celsius_sum": 600,
        "temperature_celsius_max": 60,
        "temperature_celsius_unknown_ms": 0,
        "power_draw_watts_sum": 3000,
        "power_draw_watts_max": 300,
        "power_draw_watts_unknown_ms": 0,
        "energy_joules": 2500,
        "energy_unknown_ms": 0,
        "claimed_ms": 0,
        "claimed_unknown_ms": 0,
    }


def test_what_is_unknown_is_counted_as_unknown_time_and_never_as_zero():
    nothing = dict.fromkeys(("utilization", "memory_used", "memory_free", "temperature", "power_draw"))
    for value in (None, float("nan")):
        (slot,) = summed(a_device(**{**nothing, "temperature": value}), energy=5.0).values()
        row = of_device(slot)

        for gauge in ("utilization_percent", "memory_used_mib", "temperature_celsius", "power_draw_watts"):
            assert (row[f"{gauge}_sum"], row[f"{gauge}_max"], row[f"{gauge}_unknown_ms"]) == (0, None, 10_000)
        assert row["energy_unknown_ms"] == 10_000


def test_an_energy_counter_that_began_anew_is_unknown():
    (slot,) = summed(a_device(total_energy=100.0), energy=5000.0).values()

    assert (of_device(slot)["energy_joules"], of_device(slot)["energy_unknown_ms"]) == (0, 10_000)


def test_claims_that_cannot_be_read_are_unknown_and_nobodys():
    gap = Gap(None, "claims", "no directory")
    (slot,) = summed(a_device(processes=(a_process(),)), gaps=(gap,)).values()

    assert (of_device(slot)["claimed_ms"], of_device(slot)["claimed_unknown_ms"], slot.users) == (0, 10_000, {})


def test_claimed_and_used_claimed_and_idle_used_without_a_claim():
    works = a_device(0, processes=(a_process(2), a_process(3, uid=BOB)), utilization=90.0)
    idles = a_device(1, processes=(a_process(4),), utilization=0.0)
    empty = a_device(2, utilization=0.0)

    assert used(works, idles, empty, claims=(a_claim_record(works, idles, empty),)) == {
        (ALICE, works.uuid): (10, 10, 0, 0),
        (ALICE, idles.uuid): (10, 0, 10, 0),
        (ALICE, empty.uuid): (10, 0, 10, 0),
        (BOB, works.uuid): (0, 0, 0, 10),
    }


def test_two_claims_of_a_user_on_a_device_count_once():
    device = a_device()

    assert used(device, claims=(a_claim_record(device, id="a"), a_claim_record(device, id="b")))[
        ALICE, device.uuid
    ] == (10, 0, 10, 0)


def test_whether_a_claim_is_used_may_be_unknown():
    untold = a_device(0, processes=None, utilization=90.0)
    vague = a_device(1, processes=(a_process(2),), utilization=None)
    hidden = a_device(2, processes=(), utilization=90.0, memory_used=40 * GIB)
    odd = a_device(3, processes=(a_process(3, uid=BOB),), processes_plausible=False, utilization=90.0)
    found = used(untold, vague, hidden, odd, claims=(a_claim_record(untold, vague, hidden, odd),))

    assert set(found) == {(ALICE, device.uuid) for device in (untold, vague, hidden, odd)}
    assert set(found.values()) == {(10, 0, 0, 0)}


def test_a_desktop_uses_nothing():
    assert used(a_device(processes=(a_process(kind="graphics"),))) == {}


def test_a_lock_without_a_record_claims_the_device_for_nobody():
    device = a_device()
    (slot,) = summed(device, claims=(a_claim_record(device, uid=-1),)).values()

    assert (of_device(slot)["claimed_ms"], slot.users) == (10_000, {})


def test_an_instance_is_a_device_and_a_claim_on_the_whole_is_one_claim():
    parent = a_device(0, mig_mode=True, utilization=None)
    first, second = a_mig_instance(parent, 0, processes=(a_process(2, uid=BOB),)), a_mig_instance(parent, 1)
    claims = (a_claim_record(first, uid=BOB, id="b"), a_claim_record(parent, id="a"))
    (slot,) = summed(parent, first, second, claims=claims).values()

    assert slot.users == {(ALICE, parent.uuid): (10_000, 0, 10_000, 0), (BOB, first.uuid): (10_000, 0, 0, 0)}
    assert of_device(slot, second.uuid)["claimed_ms"] == 10_000
    assert of_device(slot, second.uuid)["utilization_percent_unknown_ms"] == 10_000


def test_who_claimed_the_whole_uses_its_instances_with_a_claim():
    parent = a_device(0, mig_mode=True, utilization=None)
    instance = a_mig_instance(parent, 0, processes=(a_process(),))

    assert used(parent, instance, claims=(a_claim_record(parent),)) == {(ALICE, parent.uuid): (10, 0, 0, 0)}


def test_a_container_s_process_belongs_to_the_only_claim():
    device = a_device(processes=(a_process(uid=0, user="root"),), utilization=90.0)

    assert used(device, claims=(a_claim_record(device),)) == {(ALICE, device.uuid): (10, 10, 0, 0)}
    assert used(device) == {(0, device.uuid): (0, 0, 0, 10)}


def test_a_process_on_an_instance_without_a_claim_is_found_there_only():
    parent = a_device(0, mig_mode=True, processes=(a_process(),))
    instance = a_mig_instance(parent, 0, processes=(a_process(),))

    assert used(parent, instance) == {(ALICE, instance.uuid): (0, 0, 0, 10)}


def test_an_interval_is_divided_among_the_slots_that_it_touches():
    slots = summed(a_device(), begin=1003.0, seconds=20.0)

    assert {slot: of_device(one)["seen_ms"] for slot, one in slots.items()} == {100: 7000, 101: 10_000, 102: 3000}


def test_a_gap_of_too_many_seconds_is_unknown():
    assert summed(a_device(), seconds=30.5) == {}
    assert summed(a_device(), seconds=0.0) == {}


def test_a_clock_that_is_set_back_counts_nothing_twice():
    sums = UsageSums()
    walls = [1000.0 + 5 * number for number in range(10)] + [1000.0 + 5 * number for number in range(10)]
    for number, taken_at in enumerate(walls):
        sums.add(a_snapshot(clock=500.0 + 5 * number, taken_at=taken_at), LONGEST)

    assert sum(of_device(slot)["seen_ms"] or 0 for slot in sums.slots.values()) == 19 * 5000


def test_a_device_counts_when_it_is_there_at_both_ends():
    sums = UsageSums()
    sums.add(a_snapshot(a_device(0), clock=500.0, taken_at=1000.0), LONGEST)
    sums.add(a_snapshot(a_device(0), a_device(1), clock=505.0, taken_at=1005.0), LONGEST)
    sums.add(a_snapshot(a_device(1), clock=510.0, taken_at=1010.0), LONGEST)
    (slot,) = sums.slots.values()

    assert {uuid: of_device(slot, uuid)["seen_ms"] for uuid in slot.devices} == {a_uuid(0): 5000, a_uuid(1): 5000}


def test_a_slot_is_complete_when_the_next_sample_cannot_add_to_it():
    sums = UsageSums()
    for number in range(5):
        sums.add(a_snapshot(clock=500.0 + 6 * number, taken_at=1000.0 + 6 * number), LONGEST)

    assert (set(sums.complete()), set(sums.complete(all_of_them=True))) == ({100, 101}, {100, 101, 102})
