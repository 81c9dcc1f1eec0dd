"""Waiting inside a claim: there is no line in there, so one looks at the locks, and asks the driver now and then."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import a_device
from machines import Machine

from gpuguard import lock
from gpuguard.claims.lockfiles import LockDirectory, lock_directory, open_lock, try_flock
from gpuguard.errors import ImpossibleRequest, NotEnoughGpus, WaitTimeout
from gpuguard.request import Request

ERROR = NotEnoughGpus("")


class Clock:
    """Time that passes only while somebody sleeps, and what happens at which moment of it."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()
        self.happens: dict[float, Callable[[], None]] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        assert len(self.slept) < 100, "it does not come back"
        for moment in [each for each in self.happens if each <= self.now]:
            self.happens.pop(moment)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lock.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(lock.time, "sleep", clock.sleep)
    return clock


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    return lock_directory(str(tmp_path))


class Siblings:
    """Other commands inside the same claim, one on each device of the machine."""

    def __init__(self, directory: LockDirectory, machine: Machine) -> None:
        self.snapshot = machine.sample(())
        self.locks = [open_lock(directory, f"{device.uuid}.nested") for device in machine.devices]
        assert all(map(try_flock, self.locks))

    def end(self) -> None:
        os.close(self.locks.pop())


@pytest.mark.parametrize(("wanted", "back"), [(1, 1.0), (2, 2.0), (3, 3.0)])
def test_one_comes_back_with_the_look_that_finds_enough_locks_given_up(clock, directory, wanted, back):
    siblings = Siblings(directory, Machine(*map(a_device, range(3))))
    clock.happens = dict.fromkeys((1.0, 2.0, 3.0), siblings.end)
    told: list[float] = []

    lock._await_sibling(
        siblings.snapshot, Request(num_gpus=wanted), directory, None, ERROR, lambda _: told.append(clock.now)
    )

    assert clock.slept == [0.25] * int(4 * back)
    assert told == [0.25 * number for number in range(int(4 * back))]
    while siblings.locks:
        siblings.end()


def test_while_enough_locks_are_free_the_driver_is_asked_again_after_two_seconds(clock, directory):
    lock._await_sibling(Machine().sample(()), Request(num_gpus=1), directory, None, ERROR, None)

    assert clock.slept == [0.25] * 8


def test_nobody_sleeps_longer_than_he_wants_to_wait(clock, directory):
    siblings = Siblings(directory, Machine(a_device(0)))

    lock._await_sibling(siblings.snapshot, Request(), directory, 0.625, ERROR, None)

    assert clock.slept == [0.25, 0.25, 0.125]
    siblings.end()


def test_inside_a_claim_the_wait_is_over_when_its_time_is(clock, directory):
    machine = Machine(a_device(0))
    with lock.acquire(machine, Request(), directory, environ={}) as outer:
        environ = {"GPUGUARD_CLAIM": outer.id}
        with (
            lock.acquire(machine, Request(), directory, environ=environ),
            pytest.raises(WaitTimeout, match="inside the claim"),
        ):
            lock.acquire(machine, Request(), directory, environ=environ, wait=0.5)

    assert clock.slept == [0.25, 0.25]


def test_inside_a_claim_one_hears_what_is_missing_and_starts_when_a_sibling_ends(directory):
    machine, told = Machine(a_device(0)), list[str]()
    with lock.acquire(machine, Request(), directory, environ={}) as outer:
        environ = {"GPUGUARD_CLAIM": outer.id}
        sibling = lock.acquire(machine, Request(), directory, environ=environ)

        def tell(error: NotEnoughGpus) -> None:
            told.append(str(error))
            sibling.release()

        lock.acquire(machine, Request(), directory, environ=environ, wait=60, on_wait=tell).release()
    assert len(told) == 1 and "used by another command inside the claim" in told[0]


def test_of_two_ways_the_one_that_can_be_met_some_day_says_what_is_missing(directory):
    machine = Machine(a_device(0))
    with lock.acquire(machine, Request(), directory, environ={}):
        for ways in ([Request(num_gpus=9), Request()], [Request(), Request(num_gpus=9)]):
            with pytest.raises(NotEnoughGpus, match="wanted 1 GPU") as caught:
                lock.acquire(machine, ways[0], directory, alternatives=ways[1:], environ={})

            assert not isinstance(caught.value, ImpossibleRequest)


def test_the_end_of_a_claim_is_written_in_milliseconds(monkeypatch):
    monkeypatch.setattr(lock.time, "time", lambda: 1000.12345)

    assert (lock._ends(60.0), lock._ends(None)) == (1060.123, None)
