"""What `gpuguard who` prints is bounded by what there is; its work grows with the devices, not with their square."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot

from gpuguard import device_state
from gpuguard.model import Gap, Snapshot
from gpuguard.views.who import MOST_CLAIMS, to_json, to_text

RECORDS = 500  # of one user, as many as are read
LONG = ("python", "\x1b" * 3900)


def flooded(records: int) -> Snapshot:
    """Eight devices that bob holds, with so many records about all of them; alice shares the first one."""
    devices = [a_device(index) for index in range(8)]
    bobs = [a_claim_record(*devices, id=f"b{each}", uid=1002, user="bob", command=LONG) for each in range(records)]
    return a_snapshot(*devices, claims=(*bobs, a_claim_record(devices[0], id="hers", uid=1001, user="alice")))


@pytest.mark.parametrize("width", [None, 100])
def test_hundreds_of_records_of_one_user_take_a_few_lines_and_hide_nobody_elses(width):
    snapshot = flooded(RECORDS)
    lines = to_text(snapshot, device_state.uses(snapshot), width=width)

    assert len(lines) < 8 * (MOST_CLAIMS + 4)
    assert sum(f"and {RECORDS - MOST_CLAIMS} more" in line and "bob" in line for line in lines) == 8
    assert sum("hers" in line for line in lines) == 1


def test_as_many_as_are_shown_are_all_shown():
    snapshot = flooded(MOST_CLAIMS)

    assert not any(" more" in line for line in to_text(snapshot, device_state.uses(snapshot)))


def test_the_json_has_them_all():
    snapshot = flooded(RECORDS)

    assert [len(each["claims"]) for each in to_json(snapshot, device_state.uses(snapshot))["devices"]][:2] == [501, 500]


def crowded(number: int) -> Snapshot:
    """So many devices, each with a claim, a process, and something that is not known."""
    devices, claims, gaps = [], [], []
    for index in range(number):
        process = a_process(1000 + index, memory_used=GIB)
        device = replace(a_device(index % 8, processes=(process,), memory_used=GIB), uuid=f"GPU-{index:08d}")
        devices.append(device)
        claims.append(a_claim_record(device, id=f"c{index}"))
        gaps.append(Gap(device.uuid, "power_draw", "not supported"))
    return replace(a_snapshot(), devices=tuple(devices), claims=tuple(claims), gaps=tuple(gaps))


def steps(snapshot: Snapshot) -> int:
    """How many lines of Python are passed to show it; each turn of a loop is one."""
    passed = 0

    def count(frame, event, _):
        nonlocal passed
        passed += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        found = device_state.uses(snapshot)
        to_text(snapshot, found)
        to_json(snapshot, found)
    finally:
        sys.settrace(before)
    return passed


def test_eight_times_the_devices_are_eight_times_the_work():
    assert steps(crowded(800)) < 8.5 * steps(crowded(100))
