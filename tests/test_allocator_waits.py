"""What a request waits for: those before it in the queue, a reservation, the daemon."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from builders import GIB, Machine, a_device, a_process
from claiming import acquire, preview

from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.claims.records import locked_devices
from gpuguard.errors import ClaimError, ImpossibleRequest, NotEnoughGpus, WaitTimeout
from gpuguard.lock import Allocator, go_on_waiting, pause_waiting
from gpuguard.model import HEALTH, IDLE_PROCESSES
from gpuguard.queue import reservations, tickets
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.leader import MAY_START
from gpuguard.queue.priority import Ticket
from gpuguard.queue.tickets import OwnTicket, read_tickets, ticket_content, wake
from gpuguard.request import Request

HOUR = 3600.0


def two() -> Machine:
    return Machine(a_device(0), a_device(1))


def test_a_request_that_waits_lets_others_lead_while_its_process_is_stopped(directory: LockDirectory) -> None:
    machine, said = Machine(a_device(0)), []

    def stop(_: NotEnoughGpus) -> None:
        said.append(pause_waiting())
        go_on_waiting()

    with acquire(machine, Request(), directory), pytest.raises(WaitTimeout):
        acquire(machine, Request(), directory, wait=0.5, on_wait=stop)

    assert said and all(said) and not pause_waiting()


@pytest.fixture
def queue(directory: LockDirectory) -> Iterator[Machine]:
    """Two devices, one of them claimed for an hour, and a request that waits for both."""
    machine = two()
    with acquire(machine, Request(), directory, time_limit=HOUR):
        first = OwnTicket(directory, ticket_content(Ticket("", 0, "", 0.0, (Request(num_gpus=2),), pid=os.getpid())))
        yield machine
        first.withdraw()


def test_a_request_that_is_called_too_early_takes_nothing_and_goes_on_waiting(directory, queue):
    leader, told = open_lock(directory, "queue"), []
    assert try_flock(leader)

    def call(error: NotEnoughGpus) -> None:
        if len(told) < 3:
            wake(directory, read_tickets(directory)[0], MAY_START)
        told.append(str(error))

    call.tell_every = 0.1  # type: ignore[attr-defined]
    with pytest.raises(WaitTimeout, match="it would delay"):
        acquire(queue, Request(), directory, wait=2, on_wait=call)

    os.close(leader)
    assert len(told) > 3
    assert len(locked_devices(directory, [device.uuid for device in queue.devices])) == 1


def test_no_more_than_the_least_is_taken_while_others_wait(directory: LockDirectory) -> None:
    machine = Machine(a_device(0), a_device(1), a_device(2))
    with acquire(machine, Request(), directory, time_limit=HOUR):
        first = OwnTicket(directory, ticket_content(Ticket("", 0, "", 0.0, (Request(num_gpus=3),), pid=os.getpid())))
        with acquire(machine, Request(max_gpus=2), directory, time_limit=60) as claim:
            assert len(claim) == 1
        first.withdraw()
        with acquire(machine, Request(max_gpus=2), directory, time_limit=60) as claim:
            assert len(claim) == 2


@pytest.mark.root  # nobody else can reserve for others
def test_a_look_leaves_out_what_is_reserved_for_another_user(directory: LockDirectory) -> None:
    machine, now = two(), time.time()
    wanted = Reservation(
        "", os.geteuid(), os.geteuid() + 1, "bob", 1, now - 1, now + HOUR, (machine.devices[1].uuid,), now
    )
    made = reservations.write_reservation(directory, wanted)
    _, choice = preview(machine, Request(), directory)
    assert [device.index for device in choice.devices] == [0]
    assert "'s reservation until " in choice.refused[0].reasons[0].text

    reservations.remove_reservation(directory, made)
    _, choice = preview(machine, Request(), directory)
    assert [device.index for device in choice.devices] == [1]


def test_where_the_daemon_gives_the_locks_nothing_is_claimed_without_it(directory: LockDirectory) -> None:
    closed = replace(directory, closed=True, keeper=os.geteuid())

    for ask in (acquire, preview):
        with pytest.raises(ClaimError, match="It alone gives the GPUs"):
            ask(two(), Request(), closed)


def test_reasons_name_the_users_of_the_processes_in_the_way(directory: LockDirectory) -> None:
    machine = Machine(a_device(0, processes=(a_process(812, user="bob"),)))
    _, choice = Allocator(machine, directory, [Request()]).preview(with_reasons=True)

    assert choice.devices == ()
    assert "used by bob (pid 812" in choice.refused[0].reasons[0].text
    assert {group for fields, _ in machine.asked for group in fields} >= {"health", "model", "process_details"}


def test_inside_a_claim_the_wait_is_over_when_its_time_is(directory):
    machine = Machine(a_device(0))
    with acquire(machine, Request(), directory, environ={}) as outer:
        environ = {"GPUGUARD_CLAIM": outer.id}
        with (
            acquire(machine, Request(), directory, environ=environ),
            pytest.raises(WaitTimeout, match="inside the claim"),
        ):
            acquire(machine, Request(), directory, environ=environ, wait=0.5)


def test_inside_a_claim_one_hears_what_is_missing_and_starts_when_a_sibling_ends(directory):
    machine, told = Machine(a_device(0)), list[str]()
    with acquire(machine, Request(), directory, environ={}) as outer:
        environ = {"GPUGUARD_CLAIM": outer.id}
        sibling = acquire(machine, Request(), directory, environ=environ)

        def tell(error: NotEnoughGpus) -> None:
            told.append(str(error))
            sibling.release()

        acquire(machine, Request(), directory, environ=environ, wait=60, on_wait=tell).release()
    assert len(told) == 1 and "used by another command inside the claim" in told[0]


def test_of_two_ways_the_one_that_can_be_met_some_day_says_what_is_missing(directory):
    machine = Machine(a_device(0))
    with acquire(machine, Request(), directory, environ={}):
        for ways in ([Request(num_gpus=9), Request()], [Request(), Request(num_gpus=9)]):
            with pytest.raises(NotEnoughGpus, match="wanted 1 GPU") as caught:
                acquire(machine, ways[0], directory, alternatives=ways[1:], environ={})

            assert not isinstance(caught.value, ImpossibleRequest)


def test_a_user_whose_request_waited_has_been_served(directory):
    machine = Machine(a_device(0))
    holder = acquire(machine, Request(), directory, environ={})
    assert tickets.last_started(directory, os.geteuid()) is None

    acquire(machine, Request(), directory, wait=60, on_wait=lambda error: holder.release(), environ={}).release()

    assert tickets.last_started(directory, os.geteuid()) is not None


def test_a_request_that_did_not_wait_counts_as_no_turn(directory):
    acquire(Machine(), Request(), directory, environ={}).release()

    assert tickets.last_started(directory, os.geteuid()) is None


def test_a_process_that_arrives_between_the_look_and_the_lock_is_seen(directory: LockDirectory) -> None:
    machine = Machine(a_device(0), a_device(1))

    def arrive() -> None:
        if len(machine.asked) == 2:  # the second question is about the device that was just locked
            locked = machine.asked[1][1]
            place = next(i for i, device in enumerate(machine.devices) if locked == (device.uuid,))
            machine.change(place, processes=(a_process(),), memory_used=10 * GIB, memory_free=70 * GIB)

    machine.before_sample = arrive
    with acquire(machine, Request(), directory) as claim:
        busy = [device.uuid for device in machine.devices if device.processes]

        assert claim[0].uuid not in busy
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


def test_a_device_that_vanishes_between_the_look_and_the_lock_is_not_taken(directory):
    machine = Machine(a_device(0), a_device(1))

    def vanish() -> None:
        if len(machine.asked) == 2:
            machine.devices = [device for device in machine.devices if machine.asked[1][1] != (device.uuid,)]

    machine.before_sample = vanish
    with acquire(machine, Request(), directory) as claim:
        assert claim.devices == tuple(machine.devices)
