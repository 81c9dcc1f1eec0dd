"""A user who opens or writes as much as he can: a look at the claims stays short, and hides nobody else's."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml import FakeNvml
from users import ALICE, BOB, DEVICES, Machine

from gpuguard.claims import holders, records

pytestmark = pytest.mark.root


@pytest.fixture
def machine(site: Path) -> Iterator[Machine]:
    place = Path(tempfile.mkdtemp(prefix="gpuguard-users-"))
    place.chmod(0o755)
    with FakeNvml(place, DEVICES) as fake:
        yield Machine(place, site, fake, "admin")
    shutil.rmtree(place)


HOG = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(100)
"""


def test_any_number_of_descriptors_of_one_user_hides_nobody_elses_lock_and_costs_a_bounded_time(machine, monkeypatch):
    asked, really, sleeping = [], holders._locked, "import time; print('ready', flush=True); time.sleep(100)"

    def slowly(pid: str, uid: int, paths: dict[str, str]) -> list[tuple[str, str]]:
        if os.stat(f"/proc/{pid}").st_uid == BOB.pw_uid:
            asked.append(pid)
            time.sleep(0.2)
        return really(pid, uid, paths)

    monkeypatch.setattr(holders, "MOST_SECONDS", 0.1)
    monkeypatch.setattr(holders, "_locked", slowly)
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
