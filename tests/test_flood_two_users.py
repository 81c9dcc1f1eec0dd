"""One user floods the line of one device with real requests, another asks now and then: they take turns.

Nobody counts there what users had: no daemon runs, and the one claim ends each time.  The figure of 500 requests, in
simulated time, is in test_overtaking.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import eventually
from users import ALICE, BOB, Machine, a_shared_machine

pytestmark = pytest.mark.root

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
            for each in flooded.asked:
                each.terminate()
            for each in flooded.asked:
                each.wait()
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
