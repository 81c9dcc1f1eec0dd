"""A shortage that passes during a wait: the position stays, the waiter says what it cannot see, no lock is left."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from itertools import repeat
from typing import Any

import pytest
from builders import Machine, a_device
from own_claims import acquire

from gpuguard import lock
from gpuguard.claims.directory import LockDirectory, lock_directory, open_lock, try_flock
from gpuguard.claims.records import locked_devices, read_records
from gpuguard.errors import BackendError, DriverNotFound, DriverUnresponsive, NotEnoughGpus, WaitTimeout
from gpuguard.lock import Allocator
from gpuguard.queue import reservations, waiter
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.tickets import OwnTicket, new_ticket, read_tickets, ticket_content
from gpuguard.queue.waiter import Waiter, wait_until_over
from gpuguard.request import Request

CALLS = [(os, "open", errno.EMFILE), (os, "open", errno.ENFILE), (fcntl, "flock", errno.ENOLCK)]
CALLS += [(os, "listdir", errno.ENOMEM)]


class Failing:
    """Lets a call fail *times* times, after *count* others from the moment on that it is armed."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int, *, count: int = 0, times: int = 1
    ) -> None:
        self.really, self.code, self.left, self.times = getattr(owner, name), code, count, times
        self.armed = False
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *words: Any, **more: Any) -> Any:
        self.left -= self.armed
        if self.armed and -self.times <= self.left < 0:
            raise OSError(self.code, os.strerror(self.code))
        return self.really(*words, **more)


class FailingDriver:
    """Fails at a sample of the waiter's own, once it is armed, with the next of *faults*; not where that is None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, faults: Iterable[Exception | None]) -> None:
        self.really, self.faults, self.armed = Allocator._sample_all, iter(faults), False
        monkeypatch.setattr(Allocator, "_sample_all", lambda *words, **more: self(*words, **more))

    def __call__(self, *words: Any, **more: Any) -> Any:
        if self.armed and (fault := next(self.faults, None)):
            raise fault
        return self.really(*words, **more)


@pytest.fixture
def directory(directory: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> LockDirectory:
    monkeypatch.setattr(lock, "SAMPLE_SECONDS", 0.01)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "NVIDIA_VISIBLE_DEVICES", "GPUGUARD_CLAIM"):
        monkeypatch.delenv(name, raising=False)
    return directory


def tickets(directory: LockDirectory) -> list[str]:
    return [name for name in sorted(os.listdir(directory.records)) if "ticket." in name]


def waits_behind_another(
    directory: LockDirectory,
    failing: Failing | FailingDriver,
    told: Callable[[NotEnoughGpus], object] = lambda missing: None,
    wait: float | None = 20.0,
) -> tuple[int, list[str], list[str]]:
    """How many devices a waiter gets after the fault, which tickets there were meanwhile, and what it was told.

    The fault begins when it waits, and the other claim ends then.
    """
    machine, seen, said = Machine(a_device(0)), [], []
    other = acquire(machine, Request(), directory)

    def tell(missing: NotEnoughGpus) -> None:
        seen.extend(tickets(directory))
        said.append(str(missing))
        failing.armed = True
        told(missing)
        other.release()

    claim = acquire(machine, Request(), directory, wait=wait, on_wait=tell)
    count = len(claim)
    claim.release()
    failing.armed = False
    return count, seen, said


def open_files() -> list[str]:
    """What this process has open, but for pipes: a process that reads what others have locked may have two."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return [target for target in targets if not target.startswith("pipe:")]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[1]}-{errno.errorcode[call[2]]}")
def test_whichever_single_call_fails_a_waiter_keeps_its_position_and_gets_the_device(directory, monkeypatch, call):
    open_before = len(open_files())
    for count in range(1000):
        with monkeypatch.context() as patch:
            failing = Failing(patch, *call, count=count)
            got, seen, said = waits_behind_another(directory, failing)
        left = (len(open_files()), tickets(directory), read_records(directory))

        assert (got, len(set(seen)), left) == (1, 1, (open_before, [], [])), (count, said)
        assert not locked_devices(directory, [a_device(0).uuid])
        if failing.left >= 0:
            break
    assert count > 3


def test_while_it_lasts_beyond_the_time_to_wait_it_is_the_reason(directory, monkeypatch):
    failing = Failing(monkeypatch, os, "open", errno.EMFILE, times=10**6)

    with pytest.raises(WaitTimeout, match=r"cannot be seen now.*see `ulimit -n`"):
        waits_behind_another(directory, failing, wait=2.0)


def test_without_a_ticket_and_without_waiting_it_is_an_error(directory, monkeypatch):
    with acquire(machine := Machine(a_device(0)), Request(), directory), monkeypatch.context() as patch:
        Failing(patch, os, "open", errno.EMFILE, times=10**6).armed = True

        for wait in (0, 60):
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                acquire(machine, Request(), directory, wait=wait)


def test_who_gets_no_ticket_after_the_first_sample_is_told_so(directory, monkeypatch):
    Failing(monkeypatch, waiter, "WaitingRequest", errno.EMFILE).armed = True
    machine = Machine(a_device(0))
    with acquire(machine, Request(), directory), pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        acquire(machine, Request(), directory, wait=60)


@pytest.mark.parametrize(("left", "pause"), [(None, 2.0), (60.0, 2.0), (1.5, 1.5), (-1.0, 0.0)])
def test_it_looks_again_after_two_seconds_or_at_the_end_of_its_time(tmp_path, monkeypatch, left, pause):
    pauses: list[float] = []
    monkeypatch.setattr(lock.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(lock.time, "sleep", pauses.append)

    allocator = Allocator(Machine(a_device(0)), lock_directory(str(tmp_path)), [Request(num_gpus=2)])
    allocator._deadline = left and 1000.0 + left
    error = allocator._pause_after(OSError(errno.EMFILE, "too many"), True, [])

    assert pauses == [pause]
    assert str(error).startswith("wanted 2 GPUs: what is free cannot be seen now")


@pytest.mark.parametrize("error", [DriverUnresponsive, DriverNotFound, BackendError])
def test_a_driver_that_fails_for_a_while_takes_no_position(directory, monkeypatch, error):
    driver = FailingDriver(monkeypatch, [error("the driver is being loaded anew.")] * 3)

    got, seen, said = waits_behind_another(directory, driver)

    assert (got, len(set(seen)), next(driver.faults, None)) == (1, 1, None)
    assert said[-1].endswith("and is tried again: the driver is being loaded anew.")


def test_one_that_does_not_come_back_ends_the_wait_with_its_own_error(directory, monkeypatch):
    monkeypatch.setattr(lock, "DRIVER_SECONDS", 2.0)
    driver, said = FailingDriver(monkeypatch, repeat(DriverNotFound("no NVIDIA kernel module answers."))), []

    with pytest.raises(DriverNotFound, match="no NVIDIA kernel module answers"):
        waits_behind_another(directory, driver, lambda missing: said.append(str(missing)))
    assert len(said) > 2 and said[-1].endswith("is tried again: no NVIDIA kernel module answers.")
    assert not tickets(directory)


def test_one_that_fails_now_and_then_is_never_given_up(directory, monkeypatch):
    """What counts is for how long it has not answered."""
    monkeypatch.setattr(lock, "DRIVER_SECONDS", 0.05)
    monkeypatch.setattr(Waiter, "sleep", lambda _waiter, _seconds, tell, _every: tell())  # as if called at once
    fault, machine = DriverUnresponsive("a driver call did not come back."), Machine(a_device(0))
    driver = FailingDriver(monkeypatch, [fault, None] * 10)
    other = acquire(machine, Request(), directory)

    def told(missing: NotEnoughGpus) -> None:
        driver.armed = True
        if len(list(copy(driver.faults))) < 2:
            other.release()

    acquire(machine, Request(), directory, wait=20.0, on_wait=told).release()

    assert next(driver.faults, None) is None


def test_who_leads_and_cannot_look_lets_another_one_lead(directory, monkeypatch):
    failing, free = Failing(monkeypatch, os, "scandir", errno.ENOMEM, times=2), []

    def told(missing: NotEnoughGpus) -> None:
        failing.armed = not free
        if "cannot be seen" in str(missing):
            queue = open_lock(directory, "queue")
            free.append(try_flock(queue))
            os.close(queue)

    waits_behind_another(directory, failing, told)

    assert free == [True]


def test_a_command_inside_a_claim_that_waits_for_another_one_there_goes_on(directory, monkeypatch):
    machine, said = Machine(a_device(0)), []
    with acquire(machine, Request(), directory) as outer:
        inside = {"GPUGUARD_CLAIM": outer.id}
        other = acquire(machine, Request(), directory, environ=inside)
        failing = Failing(monkeypatch, os, "open", errno.EMFILE)

        def tell(missing: NotEnoughGpus) -> None:
            said.append("cannot be seen" in str(missing))
            other.release()
            failing.armed = True

        acquire(machine, Request(), directory, wait=20.0, environ=inside, on_wait=tell).release()

    assert said == [False, True]


def test_who_waits_for_the_end_of_a_claim_and_cannot_see_it_goes_on(directory, monkeypatch):
    claim, said = acquire(Machine(a_device(0)), Request(), directory), []
    failing = Failing(monkeypatch, os, "open", errno.EMFILE)

    def tell(text: str) -> None:
        said.append(text)
        if len(said) > 1:
            claim.release()
        failing.armed = True

    monkeypatch.setattr(waiter, "LOG_SECONDS", 0.01)
    wait_until_over(claim.id, directory, new_ticket([Request()]), tell)

    assert failing.left < 0 and len(said) == 2


@pytest.mark.parametrize("left", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["tickets", "reservations", "who came", "rules"])
def test_what_cannot_be_opened_now_is_not_taken_for_nothing(directory, monkeypatch, tmp_path, what, left):
    """Whoever cannot read the tickets of others would pass them."""
    rules = tmp_path / "line.yaml"
    rules.write_text("fair_share: false\n")
    now, wanted = time.time(), Reservation("", 0, os.geteuid(), "", 1, time.time(), time.time() + 60, ("GPU-1",))
    mine = reservations.write_reservation(directory, wanted)
    reservations.record_arrival(directory, [mine])
    held = OwnTicket(directory, ticket_content(new_ticket([Request()])))
    read = {
        "tickets": lambda: [each.id for each in read_tickets(directory)[0]],
        "reservations": lambda: reservations.read_reservations(directory, now)[0],
        "who came": lambda: reservations.read_reservations(directory, now)[2],
        "rules": lambda: read_queue_settings(path=str(rules)).rules,
    }[what]
    known = read()
    with monkeypatch.context() as patch:
        Failing(patch, os, "open", errno.EMFILE, count=left).armed = True
        try:
            found = read()
        except OSError:
            found = known
    held.withdraw()

    assert known and found == known
