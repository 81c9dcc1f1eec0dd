"""Adopting on a machine that two users share: each his own jobs, and root the jobs of each for him."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from users import ALICE, BOB, Machine, a_shared_machine
from wrapped import until

from gpuguard.claims.records import read_records

pytestmark = pytest.mark.root
GIB = 2**30


@pytest.fixture
def machine(site: Path) -> Iterator[Machine]:
    with a_shared_machine(site, "admin") as made:
        yield made


@pytest.fixture
def sleepers(machine: Machine) -> Iterator[Any]:
    """Starts processes of users on devices."""
    started = []

    def start(user: Any, *devices: int) -> int:
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        started.append(subprocess.Popen(["sleep", "100"], cwd="/", **who))
        for device in devices:
            machine.fake.add_process(device, started[-1].pid, GIB)
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()
    until(lambda: machine.locked() == [])


def test_nobody_adopts_the_job_of_another_user(machine, sleepers):
    his = sleepers(BOB, 3)
    done = machine(ALICE, "adopt", str(his))

    assert (done.returncode, machine.locked()) == (1, [])
    assert f"process {his} belongs to {BOB.pw_name}: only its owner or root" in done.stderr


def test_nobody_claims_a_device_on_which_a_stranger_computes(machine, sleepers):
    hers, his = sleepers(ALICE, 2, 3), sleepers(BOB, 3)
    done = machine(ALICE, "adopt", str(hers))

    assert (done.returncode, machine.locked()) == (1, [])
    assert f"{BOB.pw_name} computes on GPU 3 too (pid {his})" in done.stderr


def test_an_adopted_device_is_kept_from_the_other_user_until_the_job_ends(machine, sleepers):
    hers = sleepers(ALICE, *range(8))
    assert machine(ALICE, "adopt", str(hers), "--note", "mine").returncode == 0

    refused = machine(BOB, "run", "--no-wait", "--", "true")
    assert (refused.returncode, refused.stderr.count(f"claimed by {ALICE.pw_name}, ")) == (75, 8)
    os.kill(hers, signal.SIGKILL)
    until(lambda: machine.locked() == [])


def test_what_root_adopts_belongs_to_the_owner_of_the_job(machine, sleepers):
    hers = sleepers(ALICE, 5)
    said = json.loads(machine(None, "adopt", str(hers), "--json").stdout)
    [record] = read_records(machine.directory)

    assert (record.uid, record.user, record.id) == (ALICE.pw_uid, ALICE.pw_name, said["claim"])
    owners = Path(f"/proc/{said['holder_pid']}/status").read_text().partition("Uid:")[2].split()[:4]
    assert owners == [str(ALICE.pw_uid)] * 4


def test_root_adopts_jobs_of_one_user_at_a_time(machine, sleepers):
    done = machine(None, "adopt", str(sleepers(ALICE, 1)), str(sleepers(BOB, 2)))

    assert (done.returncode, machine.locked()) == (2, [])


def test_whoever_is_denied_adopts_nothing(machine, sleepers):
    hers = sleepers(ALICE, 1)
    assert machine(None, "deny", ALICE.pw_name, "--for", "1h").returncode == 0
    done = machine(ALICE, "adopt", str(hers))

    assert (done.returncode, machine.locked()) == (1, [])
    assert "GPU 1 cannot be claimed" in done.stderr
