"""Tickets, reservations and records of two users: none can hurt, flood, wake without end, or pretend to be another."""

from __future__ import annotations

import fcntl
import os
import pwd
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import a_reservation
from nodes import eventually
from queues import a_ticket
from users import ALICE, BOB, HOG, Machine, a_shared_machine

from gpuguard.claims import holders
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.queue import reservations
from gpuguard.queue.state import is_responsive
from gpuguard.queue.tickets import (
    OwnTicket,
    read_tickets,
    record_start,
    ticket_content,
    unread_since,
    wake,
)

pytestmark = pytest.mark.root


@pytest.fixture
def directory(open_place: Path) -> LockDirectory:
    return lock_directory(f"{open_place}/claims")


def as_user(user: pwd.struct_passwd, what: Callable[[], object], *, stays: bool = False) -> int:
    """Do it in a process of *user*; with *stays* the process waits to be killed, and its pid comes back."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        status = 1
        try:
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            what()
            os.write(writing, b"done")
            if stays:
                signal.pause()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    os.close(writing)
    try:
        assert os.read(reading, 4) == b"done"
    finally:
        os.close(reading)
        if not stays:
            os.waitpid(child, 0)
    return child


@pytest.fixture
def alice(directory: LockDirectory) -> Iterator[int]:
    """pid of a process of alice that waits in the queue."""
    kept: list[OwnTicket] = []
    child = as_user(ALICE, lambda: kept.append(OwnTicket(directory, ticket_content(a_ticket()))), stays=True)
    yield child
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_a_stranger_can_wake_but_neither_listen_nor_remove(directory: LockDirectory, alice: int) -> None:
    def tries() -> None:
        (ticket,) = read_tickets(directory)[0]
        wake(directory, [ticket], b".")
        assert unread_since(directory, ticket) > 0
        for name in os.listdir(directory.records):
            with pytest.raises(PermissionError):
                os.unlink(f"{directory.records}/{name}")
            with pytest.raises(PermissionError):
                os.open(f"{directory.records}/{name}", os.O_RDWR | os.O_NONBLOCK)

    as_user(BOB, tries)


def test_a_stranger_with_the_number_of_another_users_ticket_does_not_have_its_position(directory, alice):
    (hers,) = read_tickets(directory)[0]

    def copy() -> None:
        own = OwnTicket(directory, ticket_content(a_ticket()))
        os.rename(own._ticket, f"{directory.records}/ticket.{BOB.pw_uid}.{hers.id.rpartition('.')[2]}.json")
        found, _ = read_tickets(directory)
        assert len(found) == len({ticket.id for ticket in found}) == 2

    as_user(BOB, copy)


def test_any_number_of_reservations_of_one_user_costs_the_others_a_bounded_time(directory, monkeypatch):
    monkeypatch.setattr(reservations, "MOST_OF_ONE", 3)
    now = time.time()
    as_user(BOB, lambda: [reservations.write_reservation(directory, a_reservation(BOB.pw_uid)) for _ in range(7)])
    for _ in range(5):
        reservations.write_reservation(directory, a_reservation(ALICE.pw_uid))
    found, ignored, _ = reservations.read_reservations(directory, now)

    assert Counter(reservation.maker for reservation in found) == {0: 5, BOB.pw_uid: 3}, "root may have any number"
    assert [(file.uid, file.id) for file in ignored] == [(BOB.pw_uid, "4 more")]


def test_a_dead_ticket_that_a_stranger_keeps_locked_is_not_waited_for(directory, alice):
    (ticket,) = read_tickets(directory)[0]
    assert is_responsive(directory, ticket)
    (name,) = (name for name in os.listdir(directory.records) if name.endswith(".json"))
    os.kill(alice, 9)
    # A process that opened the file before can lock it now: the kernel does not mind whose it is.
    ghost = os.open(f"{directory.records}/{name}", os.O_RDONLY)
    while True:
        try:
            fcntl.flock(ghost, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            continue
    found, _ = read_tickets(directory)
    os.close(ghost)

    assert [other.id for other in found] == [ticket.id]
    assert not is_responsive(directory, ticket)


def test_a_mark_of_having_been_served_that_another_user_made_does_not_count(directory, alice):
    as_user(BOB, lambda: Path(f"{directory.records}/{directory.prefix}served.{ALICE.pw_uid}").touch())
    assert read_tickets(directory)[0][0].served is None
    os.unlink(f"{directory.records}/{directory.prefix}served.{ALICE.pw_uid}")
    as_user(ALICE, lambda: record_start(directory, ALICE.pw_uid))

    assert read_tickets(directory)[0][0].served is not None


def test_any_number_of_descriptors_of_one_user_hides_nobody_elses_lock_and_costs_a_bounded_time(admin, monkeypatch):
    asked, really, sleeping = [], holders.locked_by, "import time; print('ready', flush=True); time.sleep(100)"

    def slowly(pid: str, uid: int, *limits: float, **how: Any) -> dict[int, str]:
        if uid == BOB.pw_uid:
            asked.append(pid)
            time.sleep(0.2)
        return really(pid, uid, *limits, **how)

    monkeypatch.setattr(holders, "MOST_SECONDS", 0.1)
    monkeypatch.setattr(holders, "locked_by", slowly)
    assert admin(ALICE, "run", "--no-wait", "--", "true").returncode == 0
    with (
        admin.program(BOB, sleeping),
        admin.program(BOB, sleeping),
        admin.program(ALICE, HOG, str(admin.lock_path(7))),
    ):
        found = holders.holders_of(admin.directory, {admin.uuids[7]}, {ALICE.pw_uid, BOB.pw_uid}.__contains__)

    assert ([*found[admin.uuids[7]].values()], len(asked)) == ([ALICE.pw_uid], 1)


REQUESTS, ROUNDS = 40, 4


class Flooded:
    """One device, and jobs that write down whose they are and run until the test lets them end: no clock decides."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.order, turns = machine, machine.place / "order", machine.place / "turns"
        self.order.touch()
        os.mkfifo(turns)
        for path in (self.order, turns):
            path.chmod(0o666)
        self.turns = os.open(turns, os.O_RDWR)
        self.script = f"echo {{}} >> {self.order}; exec head -c 1 {turns} > /dev/null"
        self.asked: list[subprocess.Popen[bytes]] = []

    def asks(self, user: pwd.struct_passwd) -> None:
        script = self.script.format(user.pw_name)
        self.asked.append(self.machine.start(user, "run", "--quiet", "--gpus", "0", "--", "sh", "-c", script))

    def waiting(self, user: pwd.struct_passwd) -> int:
        return len(list(Path(self.machine.directory.records).glob(f"*ticket.{user.pw_uid}.*.json")))

    def started(self) -> list[str]:
        return self.order.read_text().split()

    def next(self) -> str:
        """Ends the job that runs; whose is the one that starts then?"""
        before = len(self.started())
        os.write(self.turns, b"\n")
        assert eventually(lambda: len(self.started()) > before, 60)
        return self.started()[before]


@pytest.fixture
def flooded(site: Path) -> Iterator[Flooded]:
    with a_shared_machine(site, "admin", devices=1) as machine:
        flooded = Flooded(machine)
        try:
            yield flooded
        finally:
            for process in flooded.asked:
                process.terminate()
            for process in flooded.asked:
                process.wait()
            os.close(flooded.turns)


@pytest.mark.parametrize("fair", [True, False])
def test_at_most_one_job_of_a_flood_of_forty_starts_before_hers(flooded, fair):
    rules = flooded.machine.place / "line.yaml"
    rules.write_text(f"fair_share: {str(fair).lower()}\n")
    flooded.machine.environment["GPUGUARD_LINE"] = str(rules)
    for _ in range(REQUESTS + 1):
        flooded.asks(BOB)
    assert eventually(lambda: flooded.waiting(BOB) == REQUESTS and len(flooded.started()) == 1, 120)
    turns = []
    for _ in range(ROUNDS if fair else 1):
        flooded.asks(ALICE)
        assert eventually(lambda: flooded.waiting(ALICE) == 1, 60)
        turns.append({flooded.next(), flooded.next()})

    assert turns == [{ALICE.pw_name, BOB.pw_name}] * ROUNDS if fair else turns == [{BOB.pw_name}]
