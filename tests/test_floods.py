"""Users who flood the queue and the daemon: what that costs others is counted, in files, plans and driver calls.

How long it takes is measured by tests/support/floods.py.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from broker_machine import FOR_BOTH_BROKERS
from daemons import ask
from floods import CAROL, flooded
from nodes import eventually, start
from queues import a_ticket
from test_socket_server import a_server, connect, said
from test_tickets_users import as_uid
from users import ALICE, BOB

from gpuguard.backends import simulated
from gpuguard.claims.directory import BROKERED, LockDirectory, lock_directory
from gpuguard.claims.restrictions import SET_BACK, Restriction, change
from gpuguard.daemon import broker as broker_module
from gpuguard.daemon import socket_server
from gpuguard.daemon.broker import Broker
from gpuguard.daemon.socket_server import DescriptorReply
from gpuguard.model import ALL_FIELDS, Snapshot
from gpuguard.queue import state, tickets
from gpuguard.queue.priority import QueueRules
from gpuguard.queue.reasons import start_text, unplanned_texts
from gpuguard.queue.settings import QueueSettings
from gpuguard.queue.state import QueueFacts, QueueState, queue_state
from gpuguard.queue.tickets import (
    OwnTicket,
    read_tickets,
    ticket_content,
    tickets_of_process,
    waiting_tickets,
    wanted,
)
from gpuguard.request import Request
from gpuguard.views.queue import to_text

WORDY = tuple(Request(models=(f"*{number}*", "*")) for number in range(4))


class Flooded:
    """A directory in which users wait, on a simulated node of 8 devices, and what was done for them."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        start(str(place / "node"), "8xH100-80GB")
        made = lock_directory(f"{place}/claims")
        gate = Path(made.lock_path("gate"))
        gate.touch()
        gate.chmod(BROKERED)  # by which everybody knows that the daemon gives the locks
        self.directory: LockDirectory = lock_directory(f"{place}/claims")
        self.node, self.done = str(place / "node"), Counter[str]()
        self.stack = ExitStack()
        opened, fit = tickets.open_regular, state.fit
        monkeypatch.setattr(tickets, "open_regular", lambda path: self.done.update(["opened"]) or opened(path))
        monkeypatch.setattr(state, "fit", lambda *facts: self.done.update(["fits"]) or fit(*facts))

    def waits(self, uid: int, number: int = 1, **fields: Any) -> list[OwnTicket]:
        """So many requests of a user wait from now on."""
        with as_uid(uid):
            made = [OwnTicket(self.directory, ticket_content(a_ticket(uid, **fields))) for _ in range(number)]
        for ticket in made:
            self.stack.callback(self.ends, uid, ticket)
        return made

    def ends(self, uid: int, ticket: OwnTicket) -> None:
        with as_uid(uid):
            ticket.withdraw()

    @property
    def snapshot(self) -> Snapshot:
        return simulated.open(self.node).sample(ALL_FIELDS)

    @property
    def queue(self) -> QueueState:
        return queue_state(self.directory, self.snapshot, QueueFacts(), QueueRules())

    def broker(self) -> Broker:
        machine = simulated.open(self.node)
        sample = machine.sample
        machine.sample = lambda *facts: self.done.update(["samples"]) or sample(*facts)  # type: ignore[method-assign]
        broker = Broker(self.directory, lambda: machine)
        self.stack.callback(broker.close)
        return broker


@pytest.fixture
def flood(open_place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flooded]:
    made = Flooded(open_place, monkeypatch)
    with made.stack:
        yield made


@pytest.mark.root
def test_of_any_number_of_requests_of_one_user_a_bounded_number_is_opened_and_planned(flood):
    flood.waits(BOB.pw_uid, 150, requests=WORDY)
    flood.waits(ALICE.pw_uid, 3)
    queue = flood.queue

    assert Counter(position.ticket.uid for position in queue.positions) == {BOB.pw_uid: 8, ALICE.pw_uid: 3}
    assert [(file.uid, file.id) for file in queue.ignored] == [(BOB.pw_uid, "142 more")]
    assert flood.done["opened"] == 11
    assert flood.done["fits"] <= tickets.MOST_OF_ONE + 1


@pytest.mark.root
def test_those_that_are_read_are_the_oldest_and_all_others_follow_in_order(flood):
    sweep = flood.waits(BOB.pw_uid, 150)
    served = []
    while sweep:
        queue = flood.queue
        first = min(queue.positions, key=lambda position: position.number).ticket.id
        served.append(first)
        [ended] = [ticket for ticket in sweep if ticket.id == first]
        sweep.remove(ended)
        flood.ends(BOB.pw_uid, ended)

    assert len(served) == 150
    assert served == sorted(served, key=served.index)


@pytest.mark.root
def test_one_that_was_not_read_is_told_to_wait_for_those_of_its_user(flood):
    flood.waits(BOB.pw_uid, tickets.MOST_OF_ONE + 2)
    *_, (since, name) = flood.queue.ignored[0].unread
    last = name.removeprefix(f"{flood.directory.prefix}ticket.").removesuffix(".json")
    mine = a_ticket(BOB.pw_uid, id=last, since=since)
    queue = queue_state(flood.directory, flood.snapshot, QueueFacts(), QueueRules(), mine)
    position = queue.of(last)

    assert not position.now
    assert start_text(position, queue) == "not queued yet: waits for 32 earlier requests of its user"


@pytest.mark.root
def test_requests_that_wait_for_a_job_and_those_of_ended_processes_hold_back_no_other_of_their_user(flood):
    flood.waits(BOB.pw_uid, 100, after="waits until process 1 has ended")
    for ticket in flood.waits(BOB.pw_uid, 100):
        os.close(os.dup2(os.open("/dev/null", os.O_RDONLY), ticket._descriptor))  # as if its process had been killed
        ticket._descriptor = -1
    [last] = flood.waits(BOB.pw_uid)

    assert last.id in [position.ticket.id for position in flood.queue.positions]


@pytest.mark.root
def test_queue_says_how_many_of_whom_are_not_planned_yet(flood):
    flood.waits(BOB.pw_uid, 100)
    flood.waits(ALICE.pw_uid)
    queue = flood.queue
    lines = to_text(queue, QueueSettings())

    assert unplanned_texts(queue) == ["68 more requests of bin wait until those before them have started"]
    assert unplanned_texts(queue, [ALICE.pw_name]) == []
    assert "101 requests in the queue" in lines[0]
    assert lines[-1] == unplanned_texts(queue)[0], "they are no tickets that do not count"


@pytest.mark.root
def test_the_leader_is_found_among_any_number_of_requests(flood):
    flood.waits(BOB.pw_uid, 100)
    leader = flood.waits(0)[0]
    flood.done.clear()

    assert [ticket.id for ticket in tickets_of_process(flood.directory, os.getpid())] == [leader.id]
    assert not flood.done["opened"]


@pytest.mark.root
def test_those_that_were_not_read_still_count_as_waiting(flood):
    flood.waits(BOB.pw_uid, 100, gpus=2)
    waiting = waiting_tickets(flood.directory)

    assert waiting and len(waiting) == 100
    assert wanted(waiting) == {BOB.pw_uid: 2 * 32 + 68}, "at least one GPU each"


@pytest.mark.root
def test_the_requests_of_a_user_who_is_set_back_cost_next_to_nothing_and_come_last(flood):
    flood.waits(BOB.pw_uid, 100)
    flood.waits(ALICE.pw_uid)
    back = Restriction(str(BOB.pw_uid), 0.0, 2.0**36)
    change(flood.directory, SET_BACK, lambda restrictions: restrictions.update({back.name: back}))
    found, _ = read_tickets(flood.directory)

    assert Counter(ticket.uid for ticket in found) == {BOB.pw_uid: tickets.MOST_OF_SET_BACK, ALICE.pw_uid: 1}


@pytest.mark.root
def test_a_request_that_cannot_be_met_is_refused_before_any_ticket_is_read(flood):
    flood.waits(BOB.pw_uid, 100)
    broker, uuids = flood.broker(), [device.uuid for device in flood.snapshot.devices]
    flood.done.clear()
    for conditions in ({"min_free": 2**50}, {"models": ["none such"]}, {"max_temperature": 0.0}):
        assert "refused" in broker.claim(CAROL.pw_uid, {"devices": uuids, "conditions": conditions})

    assert flood.done == {"samples": 3}


@pytest.mark.root
def test_a_claim_reads_the_queue_once_however_many_wait(flood):
    flood.waits(BOB.pw_uid, 100, requests=WORDY)
    flood.waits(CAROL.pw_uid, 100, requests=WORDY)
    offered = {uuid for position in flood.queue.positions if position.now for uuid in position.devices}
    broker, free = flood.broker(), [device for device in flood.snapshot.devices if device.uuid not in offered]
    flood.done.clear()
    reply = broker.claim(ALICE.pw_uid, {"devices": [free[0].uuid], "conditions": {}})
    assert isinstance(reply, DescriptorReply), reply
    for descriptor in reply.descriptors:
        os.close(descriptor)

    assert (flood.done["opened"], flood.done["fits"]) == (16, 5), "each kind of request once"
    assert flood.done["samples"] <= 3


def test_requests_that_take_long_are_handled_in_turns_by_user(tmp_path, monkeypatch):
    directory = lock_directory(str(tmp_path / "claims"))
    uids, real = iter((7, 7, 7, 8, 9)), socket_server.peer_uid
    is_listener = lambda: threading.current_thread().name == "gpuguard-socket"  # noqa: E731
    monkeypatch.setattr(socket_server, "peer_uid", lambda one: next(uids, os.geteuid()) if is_listener() else real(one))
    done, handled = threading.Event(), list[int]()

    def handle(uid: int, request: Any) -> dict[str, Any]:
        if request["do"] == "claim":
            handled.append(request["number"])
            done.wait(120)
        return {}

    with a_server(directory, handle), ExitStack() as stack:
        stack.callback(done.set)
        connections = [stack.enter_context(connect(directory)) for _ in range(5)]
        for number, connection in enumerate(connections):
            connection.sendall(json.dumps({"do": "claim", "number": number}).encode() + b"\n")
            assert eventually(lambda: bool(handled))  # the first one is in work, and the others come to wait together
        assert ask(directory, {"do": "x"}) == {}
        done.set()
        assert [said(connection) for connection in connections] == [b'{"ok": true}\n'] * 5

    assert handled[0] == 0
    assert {3, 4} < set(handled[1:4]), "one of each user, whichever of the first came first"


@pytest.mark.root
def test_who_keeps_the_daemon_busy_is_an_event_once_as_long_as_that_lasts(flood, monkeypatch):
    broker, [uuid, *_] = flood.broker(), [device.uuid for device in flood.snapshot.devices]
    monkeypatch.setattr(broker_module, "COUNT_SECONDS", 0.0)

    def told(least: float) -> list[tuple[str, str | None]]:
        monkeypatch.setattr(broker_module, "BUSY_SECONDS", least)
        broker.claim(BOB.pw_uid, {"devices": [uuid], "conditions": {"min_free": 2**50}})
        return [(event.outcome, event.user) for event in broker.tend()]

    assert [told(least) for least in (60.0, 0.0, 0.0, 60.0, 0.0)] == [[], [busy := ("busy", "bin")], [], [], [busy]]


@FOR_BOTH_BROKERS
@pytest.mark.root
def test_beside_the_floods_of_two_users_a_third_one_gets_a_device_and_the_daemon_goes_on_sampling(broker):
    with flooded(broker, BOB, CAROL, tickets=150, threads=3):
        for _ in range(3):
            done = broker(ALICE, "run", "--no-wait", "--", "true")
            assert done.returncode == 0, done.stderr
        assert broker.daemon and broker.daemon.poll() is None
    assert "resampling" not in broker.said()
