"""What happens to a device between the look and the lock: the second look sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import GIB, a_device, a_process
from machines import Machine

from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import locked_devices
from gpuguard.lock import acquire
from gpuguard.model import HEALTH, IDLE_PROCESSES
from gpuguard.request import Request


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    return lock_directory(str(tmp_path))


def indices(claim: Claim) -> list[int]:
    return [device.index for device in claim]


def test_a_stranger_who_arrives_between_the_look_and_the_lock_is_seen(directory: LockDirectory) -> None:
    machine = Machine(a_device(0), a_device(1))

    def arrive() -> None:
        if len(machine.asked) == 2:  # the second question is about the device that was just locked
            locked = machine.asked[1][1]
            place = next(i for i, device in enumerate(machine.devices) if locked == (device.uuid,))
            machine.change(place, processes=(a_process(),), memory_used=10 * GIB, memory_free=70 * GIB)

    machine.before_sample = arrive
    with acquire(machine, Request(), directory) as claim:
        busy = [device.index for device in machine.devices if device.processes]

        assert indices(claim) != busy
        assert len(locked_devices(directory, [device.uuid for device in machine.devices])) == 1


def test_a_device_of_unknown_memory_is_asked_for_its_processes_at_the_first_look(directory: LockDirectory) -> None:
    machine = Machine(a_device(0, memory_used=None, processes=(a_process(),)), a_device(1))
    with acquire(machine, Request(), directory) as claim:
        assert [device.index for device in claim] == [1]

    first, second, *_ = [fields for fields, devices in machine.asked if devices is None]
    assert second - first == {IDLE_PROCESSES}


def test_a_device_that_breaks_between_the_look_and_the_lock_is_passed_over(directory: LockDirectory) -> None:
    machine = Machine(a_device(0, problems=None), a_device(1, problems=None))

    def break_down() -> None:
        fields, locked = machine.asked[-1]
        if HEALTH in fields and locked is not None and len(machine.asked) == 2:
            place = next(i for i, device in enumerate(machine.devices) if locked == (device.uuid,))
            machine.change(place, problems=("lost",))
        elif HEALTH in fields:
            for place, device in enumerate(machine.devices):
                if device.problems is None:
                    machine.change(place, problems=())

    machine.before_sample = break_down
    with acquire(machine, Request(), directory) as claim:
        assert claim[0].problems == ()


def test_a_device_that_vanishes_between_the_look_and_the_lock_is_not_taken(
    directory: LockDirectory,
) -> None:
    machine = Machine(a_device(0), a_device(1))

    def vanish() -> None:
        if len(machine.asked) == 2:
            machine.devices = [each for each in machine.devices if machine.asked[1][1] != (each.uuid,)]

    machine.before_sample = vanish
    with acquire(machine, Request(), directory) as claim:
        assert indices(claim) == [device.index for device in machine.devices]
