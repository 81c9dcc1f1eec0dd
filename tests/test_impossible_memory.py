"""Memory that no device can have: it is unknown, and no list of processes is believed beside it."""

from __future__ import annotations

import os

import pytest
from fake_nvml import GIB, NOT_SUPPORTED, FakeNvml
from nvml_child import gaps_of, sampled


def test_processes_of_all_kinds_must_fit_on_the_device_together(fake: FakeNvml, sleeper: int) -> None:
    for pid, kind in ((os.getpid(), "compute"), (sleeper, "graphics")):
        fake.add_process(0, pid, 50 * GIB, kind, counted=0)
    fake.devices[0].memory_used = 60 * GIB
    snapshot = sampled(fake, "WHO_FIELDS")

    assert not snapshot.devices[0].processes_plausible
    assert "of all kinds" in gaps_of(snapshot, snapshot.devices[0])["processes"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("memory_total", 0), ("memory_total", 2**60), ("memory_used", 2**60), ("memory_reserved", 2**60)],
)
def test_impossible_memory_is_unknown_and_no_list_is_checked_against_it(fake: FakeNvml, field: str, value: int) -> None:
    fake.add_process(0, os.getpid(), GIB)
    setattr(fake.devices[0], field, value)
    snapshot = sampled(fake, "WHO_FIELDS")
    device = snapshot.devices[0]

    assert (device.memory_total, device.memory_used, device.memory_free, device.memory_reserved) == (None,) * 4
    assert not device.processes_plausible
    assert "cannot be checked" in gaps_of(snapshot, device)["processes"]
    assert {gap.device for gap in snapshot.gaps} == {device.uuid}


def test_a_driver_that_never_tells_memory_can_still_have_a_list_that_is_believed(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    fake.add_process(0, os.getpid(), GIB)

    assert sampled(fake, "WHO_FIELDS").devices[0].processes_plausible
