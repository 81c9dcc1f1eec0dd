"""The queue at one moment: what is read for it, who is passed over and why, and which devices would do."""

import os
import time
from dataclasses import replace

import pytest
from builders import (
    GIB,
    Machine,
    a_claim_record,
    a_device,
    a_mig_instance,
    a_process,
    a_reservation,
    a_snapshot,
    a_uuid,
)
from own_claims import acquire
from queues import HOUR, a_ticket

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import (
    DENIED,
    QUARANTINED,
    SET_BACK,
    Restriction,
    change,
    read_restrictions,
    restriction_files,
)
from gpuguard.model import ProcessStat
from gpuguard.queue import state
from gpuguard.queue.backfill import Fit
from gpuguard.queue.priority import QueueRules
from gpuguard.queue.reservations import reservation_calendar, write_reservation
from gpuguard.queue.state import QueueFacts, fit, is_responsive, is_stopped, queue_state, read_queue_facts
from gpuguard.queue.tickets import IgnoredFile
from gpuguard.request import Request

MACHINE = a_snapshot(a_device(0), a_device(1))
FIRST, SECOND = (device.uuid for device in MACHINE.devices)
BY_ARRIVAL = QueueRules(fair_share=False)
NOTHING = QueueFacts()


def restrict(directory: LockDirectory, kind: str, name: str, **fields: float | str) -> None:
    mark = Restriction(name, time.time(), **fields)
    change(directory, kind, lambda marks: marks.update({name: mark}))


def test_of_a_directory_in_which_nothing_is_there_is_nothing_to_know(directory):
    facts = read_queue_facts(directory, MACHINE, BY_ARRIVAL)

    assert replace(facts, reserved=NOTHING.reserved) == replace(NOTHING, usage={})
    assert read_queue_facts(directory, MACHINE, QueueRules()).usage is None


def test_claims_restrictions_and_reservations_are_read_with_when_the_next_of_them_is_over(directory):
    directory, now = replace(directory, keeper=os.geteuid()), time.time()
    restrict(directory, QUARANTINED, FIRST, reason="XID 79", until=now + 900)
    restrict(directory, QUARANTINED, "GPU-gone")
    restrict(directory, DENIED, "7", until=now + 800)
    restrict(directory, SET_BACK, "8", until=now + 700)
    facts = read_queue_facts(directory, MACHINE, BY_ARRIVAL)

    said = facts.quarantined[FIRST]
    assert said.startswith("quarantined by the administrator until ") and said.endswith(": XID 79")
    assert facts == QueueFacts(
        quarantined={FIRST: said},
        denied=read_restrictions(directory, DENIED, now),
        usage={},
        set_back=frozenset({"8"}),
        changes_at=now + 700,
        restriction_files=restriction_files(directory),
        reserved=facts.reserved,
    )
    assert list(facts.denied) == ["7"]
    assert read_queue_facts(replace(directory, keeper=None), MACHINE, BY_ARRIVAL).set_back == frozenset()


def test_a_reservation_and_a_claim_are_read_too(directory):
    now = time.time()
    made = write_reservation(
        directory,
        replace(a_reservation(user=os.geteuid(), devices=(FIRST,)), begins=now + 60, ends=now + HOUR, user=None),
    )
    with acquire(Machine(*MACHINE.devices), Request(), directory) as claim:
        facts = read_queue_facts(directory, MACHINE, BY_ARRIVAL)
        calendar = reservation_calendar(directory, [FIRST, SECOND], facts.claims, now)

    assert [record.id for record in facts.claims] == [claim.id]
    assert [reservation.id for reservation in facts.reservations] == [made.id]
    assert facts.reserved.reservations == facts.reservations == calendar.reservations
    assert facts.changes_at == calendar.changes_at == made.begins


def the_queue(directory, *tickets, mine=None, ignored=(), facts=NOTHING, rules=BY_ARRIVAL, machine=MACHINE):
    return queue_state(directory, machine, facts, rules, mine, (list(tickets), ignored))


def whom(queue):
    """id -> what it waits for before it may enter the queue."""
    return {position.ticket.id: position.ticket.after for position in queue.positions}


@pytest.fixture
def responsive(monkeypatch):
    """All processes are."""
    monkeypatch.setattr(state, "is_responsive", lambda directory, ticket: True)


@pytest.mark.usefixtures("responsive")
def test_a_request_that_has_no_file_yet_is_the_last_one_and_counts_as_it_is(directory):
    first, second = a_ticket(1, id="a"), a_ticket(2, id="b")
    mine = a_ticket(3, id="", gpus=2)

    assert whom(the_queue(directory, first, second, mine=mine)) == {"a": None, "b": None, "": None}
    changed = replace(second, requests=(Request(num_gpus=2),))
    [_, position] = the_queue(directory, first, second, mine=changed).positions
    assert (position.ticket.id, position.ticket.requests) == ("b", changed.requests)


@pytest.mark.usefixtures("responsive")
@pytest.mark.parametrize(
    ("unread_of", "name", "after"),
    [(1, "c", "waits for 2 earlier requests of its user"), (2, "c", None), (1, "", None)],
)
def test_a_request_beyond_those_that_are_read_of_its_user_waits_for_them(directory, unread_of, name, after):
    ignored = [IgnoredFile(unread_of, "x", "too many", unread=((1.0, "file"),)), IgnoredFile(1, "y", "torn")]
    own = a_ticket(1, id="a"), a_ticket(1, id="b"), a_ticket(2, id="z")

    queue = the_queue(directory, *own, mine=a_ticket(1, id=name), ignored=ignored)
    assert whom(queue)[name] == after
    assert queue.ignored == tuple(ignored)


@pytest.mark.usefixtures("responsive")
@pytest.mark.parametrize(("set_back", "order"), [((), "ab"), (("a",), "ba"), (("1",), "ba"), (("2",), "ab")])
def test_a_request_or_a_user_that_was_set_back_comes_last(directory, set_back, order):
    queue = the_queue(
        directory, a_ticket(1, id="a"), a_ticket(2, id="b"), facts=QueueFacts(set_back=frozenset(set_back))
    )

    assert "".join(position.ticket.id for position in queue.positions) == order


@pytest.mark.usefixtures("responsive")
def test_the_requests_of_a_denied_user_wait_for_the_end_of_that(directory):
    denied = {"1": Restriction("1", 0.0, reason="too many", user="al")}
    tickets = a_ticket(1, id="a"), a_ticket(1, id="b", after="waits for a job"), a_ticket(2, id="c")

    assert whom(the_queue(directory, *tickets, facts=QueueFacts(denied=denied))) == {
        "a": "new claims of al are denied by the administrator: too many",
        "b": "waits for a job",
        "c": None,
    }


def test_a_request_whose_process_does_not_answer_is_passed_and_keeps_its_position(directory, monkeypatch):
    monkeypatch.setattr(state, "is_responsive", lambda directory, ticket: ticket.id in "cd")
    tickets = [a_ticket(number, id=name, gpus=2) for number, name in enumerate("abcd")]

    queue = the_queue(directory, *tickets)
    assert whom(queue) == {"a": "it does not answer", "b": "it does not answer", "c": None, "d": None}
    assert ([position.ticket.id for position in queue.positions if position.now], queue.unresponsive) == (
        ["c"],
        {"a", "b"},
    )
    assert the_queue(directory, *tickets, mine=tickets[0]).unresponsive == frozenset(), "we answer"


@pytest.mark.usefixtures("responsive")
@pytest.mark.parametrize("keeper", [None, 4711])
def test_where_users_may_be_hostile_one_request_of_each_starts_while_others_wait(directory, keeper):
    of_one = [a_ticket(1, id=name) for name in "abc"]
    queue = the_queue(replace(directory, keeper=keeper), *of_one, a_ticket(2, id="d", gpus=2))

    first = "another request of its user starts first" if keeper else None
    assert whom(queue) == {"a": None, "b": first, "c": first, "d": None}
    alone = the_queue(replace(directory, keeper=keeper), *of_one)
    assert whom(alone) == dict.fromkeys("abc")


@pytest.mark.usefixtures("responsive")
def test_a_request_for_a_share_sees_who_shares_the_devices(directory):
    share = Request(share=True, memory=10 * GIB)
    sharer = a_claim_record(FIRST, memory=75 * GIB, slots=(f"{FIRST}.slot0",))
    facts = QueueFacts(claims=(sharer,))

    queue = the_queue(directory, a_ticket(id="a", requests=(share,)), facts=facts)
    assert {uuid: sharing.claims for uuid, sharing in queue.sharing.items()} == {FIRST: (sharer,)}
    assert [position.devices for position in queue.positions] == [(SECOND,)]
    assert the_queue(directory, a_ticket(id="a"), facts=facts).sharing == {}


DIVIDED = a_device(1, mig_mode=True)
PARTS = a_mig_instance(DIVIDED, 0), a_mig_instance(DIVIDED, 1)


@pytest.mark.parametrize(
    ("request_", "would_do", "are_free"),
    [
        (Request(), [a_uuid(0), *(part.uuid for part in PARTS)], [a_uuid(0), *(part.uuid for part in PARTS)]),
        (Request(num_gpus=2, allow_mig_set=True), [part.uuid for part in PARTS], [part.uuid for part in PARTS]),
        (Request(devices=("0",)), [a_uuid(0)], [a_uuid(0)]),
        (Request(devices=("7",)), [], []),
        (Request(max_temperature=30.0), [a_uuid(0), *(part.uuid for part in PARTS)], []),
        (Request(models=("A100",)), [], []),
    ],
)
def test_the_devices_for_a_request_are_of_one_kind_where_it_wants_several(request_, would_do, are_free):
    found = fit(a_snapshot(a_device(0), DIVIDED, *PARTS), request_, NOTHING, {})

    assert (set(found.eligible), found.open) == (set(would_do), frozenset(are_free))


def test_a_share_has_room_beside_the_others_and_no_device_that_is_claimed_alone_or_out_of_service():
    share, alone = Request(share=True, memory=10 * GIB), Request()
    claims = (
        a_claim_record(FIRST, id="s", memory=60 * GIB, slots=(f"{FIRST}.slot0",)),
        a_claim_record(SECOND, id="a"),
    )
    machine = a_snapshot(*(a_device(number) for number in range(3)))
    facts = QueueFacts(claims=claims, quarantined={a_uuid(2): "XID 79"})
    sharing = state._sharing(machine, facts, [share])

    assert fit(machine, share, facts, sharing).open == {FIRST}
    assert fit(machine, replace(share, memory=21 * GIB), facts, sharing).open == frozenset()
    assert fit(machine, alone, facts, sharing).open == frozenset()


@pytest.mark.parametrize(
    ("stat", "stopped"),
    [(None, False), *((ProcessStat(1, letter), letter in "Tt") for letter in "RSDTtZ")],
)
def test_a_process_is_stopped_by_a_signal_or_by_a_debugger(monkeypatch, stat, stopped):
    monkeypatch.setattr(state, "stat_of", lambda pid: stat)

    assert is_stopped(4711) is stopped


@pytest.mark.parametrize(
    ("fields", "unread_for", "responds"),
    [
        ({}, -1e9, True),
        ({}, 14.9, True),
        ({}, 15.0, False),
        ({"pid": None}, -1e9, True),
        ({"pid": "stopped"}, -1e9, False),
        ({"pid": "stopped", "uid": -5}, -1e9, True),  # of another user: its pid was given to a new process
        ({"pid": 2**22 + 1}, -1e9, True),
    ],
)
def test_a_request_answers_while_its_process_reads_what_wakes_it(directory, monkeypatch, fields, unread_for, responds):
    stopped = fields.get("pid") == "stopped"
    monkeypatch.setattr(state, "is_stopped", lambda pid: stopped)
    monkeypatch.setattr(state, "unread_since", lambda directory, ticket: 1000.0 - unread_for)
    monkeypatch.setattr(state.time, "time", lambda: 1000.0)
    facts = {"uid": os.geteuid(), **fields, "pid": os.getpid() if stopped else fields.get("pid", os.getpid())}

    assert is_responsive(directory, replace(a_ticket(), **facts)) is responds


def test_a_request_that_no_device_fits_has_none():
    assert fit(MACHINE, Request(min_free=99 * GIB), NOTHING, {}) == Fit((), frozenset())
    busy = replace(MACHINE, devices=(a_device(0, processes=(a_process(),)), MACHINE.devices[1]))
    assert fit(busy, Request(), NOTHING, {}) == Fit((SECOND, FIRST), frozenset({SECOND}))
