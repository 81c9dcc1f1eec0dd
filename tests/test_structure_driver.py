"""Every command on a driver of which one answer is other than a driver gives it: a number, a text, a list."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import a_device, a_snapshot, a_uuid
from chances import THE_SAME
from fake_nvml import FakeNvml
from nvml_child import answer_of
from smi_files import write_smi

from gpuguard.backends import open_backend
from gpuguard.model import ALL_FIELDS

FEW = (-1, 2**32 - 1, 2**63 - 1)
SWEEP = "import hostile_driver; answer = hostile_driver.findings(fake, {place!r}, {numbers}, {only!r})"


def sweep(place: Path, only: str = "") -> str:
    return SWEEP.format(place=str(place / "claims"), numbers=FEW if THE_SAME else "hostile_driver.NUMBERS", only=only)


@pytest.fixture
def three(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, devices=3)


def test_no_answer_of_a_driver_stops_a_command_or_gives_a_device_twice(three: FakeNvml, tmp_path: Path) -> None:
    assert answer_of(three, sweep(tmp_path)) == []


def test_who_takes_any_text_for_the_name_of_a_device_is_found(three: FakeNvml, tmp_path: Path) -> None:
    found = answer_of(three, f"nvml.Nvml._named = lambda backend, place: place\n{sweep(tmp_path, 'uuid')}")

    assert any("['1', '1']" in one for one in found)
    assert any(one.startswith("uuid = b'': select") and "claimed by unknown" in one for one in found)


WHOSE = {
    "another device's": lambda devices: devices[2],
    "its own device's": lambda devices: devices[1],
    "that of an instance of another device": lambda devices: devices[0].mig[0],
    "its sibling's": lambda devices: devices[1].mig[1],
}


@pytest.mark.parametrize("whose", WHOSE)
def test_an_instance_whose_name_is_something_elses_is_nobodys(three: FakeNvml, whose: str) -> None:
    for device, number in ((0, 1), (1, 1), (1, 2)):
        three.add_mig(device, "3g.40gb", number)
    devices = three._state.devices
    devices[1].mig[0].uuid = WHOSE[whose](devices).uuid
    look = "found = nvml.open().sample(ALL_FIELDS)\nanswer = [one.uuid for one in found.devices], len(found.gaps)"
    found, gaps = answer_of(three, look)

    assert (len(found), len(set(found)), gaps > 0) == (5, 5, True)


@pytest.mark.parametrize("count", [1025, 10**6, 2**32 - 1])
def test_a_driver_that_counts_what_cannot_be_is_not_believed(three: FakeNvml, count: int) -> None:
    three.device_count = count
    look = "try:\n    answer = nvml.open().sample(ALL_FIELDS)\nexcept Exception as error:\n    answer = str(error)"

    assert answer_of(three, look) == f"the driver counts {count} devices, which cannot be.  Try `nvidia-smi`."


@pytest.mark.parametrize("uuid", [a_uuid(0), "", "GPU-", "gate", "GPU-../gate", "GPU-1/gate", "GPU-\u202e"])
def test_what_nvidia_smi_does_not_tell_from_another_device_is_nobodys(tmp_path: Path, uuid: str) -> None:
    file = write_smi(tmp_path / "smi.xml", a_snapshot(a_device(0), a_device(1)))
    file.write_text(file.read_text().replace(a_uuid(1), uuid))
    first, second = open_backend(f"smi:{file}").sample(ALL_FIELDS).devices
    why = "another device has the same uuid" if uuid == a_uuid(0) else "nvidia-smi does not tell its uuid"

    assert (first.uuid, first.problems) == (a_uuid(0), ())
    assert (second.uuid, second.problems) == ("unknown-1", (why,))
