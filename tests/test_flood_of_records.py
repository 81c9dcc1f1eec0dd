"""A user who opens or writes as much as possible: a look at the claims stays short, and hides nobody else's."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import eventually
from users import ALICE, BOB, HOG, Machine, a_shared_machine

from gpuguard.claims import holders, records

pytestmark = pytest.mark.root


@pytest.fixture
def machine(site: Path) -> Iterator[Machine]:
    with a_shared_machine(site, "admin") as made:
        yield made


def test_any_number_of_descriptors_of_one_user_hides_nobody_elses_lock_and_costs_a_bounded_time(machine, monkeypatch):
    asked, really, sleeping = [], holders.locked_by, "import time; print('ready', flush=True); time.sleep(100)"

    def slowly(pid: str, uid: int, *limits: float, **how: Any) -> dict[int, str]:
        if uid == BOB.pw_uid:
            asked.append(pid)
            time.sleep(0.2)
        return really(pid, uid, *limits, **how)

    monkeypatch.setattr(holders, "MOST_SECONDS", 0.1)
    monkeypatch.setattr(holders, "locked_by", slowly)
    assert machine(ALICE, "run", "--no-wait", "--", "true").returncode == 0
    with (
        machine.program(BOB, sleeping),
        machine.program(BOB, sleeping),
        machine.program(ALICE, HOG, str(machine.lock_path(7))),
    ):
        found = holders.holders_of(machine.directory, {machine.uuids[7]}, {ALICE.pw_uid, BOB.pw_uid}.__contains__)

    assert ([*found[machine.uuids[7]].values()], len(asked)) == ([ALICE.pw_uid], 1)


RECORDS = """
import fcntl, os, sys, time
for number in range(9):
    held = os.open(f"{sys.argv[1]}{number}.json", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.mkfifo(f"{sys.argv[1]}fifo{number}.json")
print("ready", flush=True)
time.sleep(100)
"""


def test_any_number_of_records_of_one_user_hides_nobody_elses(machine, monkeypatch):
    monkeypatch.setattr(records, "MOST_OF_ONE", 3)
    started = machine.directory.prefix + f"claim.{BOB.pw_uid}."
    with machine.job(ALICE, "--note", "mine"), machine.program(BOB, RECORDS, f"{machine.directory.records}/{started}"):
        found = records.read_records(machine.directory)

    assert sorted(record.user for record in found if record.uid != BOB.pw_uid) == [ALICE.pw_name]
    assert len(found) <= 1 + 3


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
        self.script = f"echo {{}} >> {self.order}; head -c 1 {turns} > /dev/null"
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
