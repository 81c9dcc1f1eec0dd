"""Two users and root: a claim is given up by its owner and root, and by nothing that anybody else can do or plant."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chances import luck
from nodes import eventually
from users import ALICE, BOB, Machine, a_shared_machine

from gpuguard.claims.records import read_records

pytestmark = pytest.mark.root


@pytest.fixture(params=["admin", "sticky"])
def machine(request: pytest.FixtureRequest, site: Path) -> Iterator[Machine]:
    with a_shared_machine(site, request.param) as made:
        yield made


def claim_id(machine: Machine, user=ALICE) -> str:
    [claim] = [claim for claim in read_records(machine.directory) if claim.uid == user.pw_uid]
    return claim.id


def test_alice_and_root_release_alices_claim_and_bob_does_not(machine):
    for who in (ALICE, None):
        with machine.job(ALICE, "-n", "3"), machine.job(BOB, "-n", "2") as (_, his):
            name = claim_id(machine)
            refused = machine(BOB, "release", name)
            stopped = machine(BOB, "release", name, "--stop")
            before = machine.locked()
            done = machine(who, "release", name, "--reason", "tidy")

            assert (refused.returncode, stopped.returncode, len(before)) == (1, 1, 5)
            assert f"only {ALICE.pw_name} and root can release it" in refused.stderr
            assert done.returncode == 0, done.stderr
            assert sorted(map(str, machine.locked())) == sorted(his.split(","))


def test_each_sees_his_own_claims_and_root_all(machine):
    with machine.job(ALICE, "-n", "1"), machine.job(BOB, "-n", "1"):
        lists = [json.loads(machine(who, "release", "--json").stdout)["claims"] for who in (ALICE, BOB, None)]

    assert [{claim["user"] for claim in each} for each in lists] == [
        {ALICE.pw_name}, {BOB.pw_name}, {ALICE.pw_name, BOB.pw_name},
    ]  # fmt: skip


WRITE = """
import os, sys
LETTER = b'\\n{"what": "released", "by": "root", "why": "mine now"}\\n'
for path in sys.argv[1:]:
    for attempt in (
        lambda: os.pwrite(os.open(path, os.O_WRONLY | os.O_APPEND), LETTER, 0),
        lambda: os.truncate(path, 0),
        lambda: os.unlink(path),
        lambda: os.rename(path, path + ".old"),
        lambda: os.chmod(path, 0o666),
    ):
        try:
            attempt()
            print("done to", path)
        except OSError:
            pass
print("tried")
"""


def test_nobody_else_can_put_a_letter_behind_a_record(machine):
    with machine.job(ALICE, "-n", "2") as (run, _):
        said = machine.python(BOB, WRITE, *map(str, machine.records()))
        os.kill(run.pid, signal.SIGURG)  # look at your claim: there is nothing

        assert said == "tried\n"
        assert len(machine.locked()) == 2 and machine(ALICE, "release", claim_id(machine)).returncode == 0


PLANT = """
import json, os, sys, fcntl, time
place, prefix, alice, name, uuid, lock = sys.argv[1:]
held = os.open(lock, os.O_RDONLY)
record = {"id": name, "devices": [uuid], "pid": 1, "since": 1.0, "descriptors": [held]}
for who in (alice, str(os.geteuid())):
    path = f"{place}/{prefix}claim.{who}.{name if who != alice else 'f0f0f0f0'}.json"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(file, json.dumps(record).encode() + b'\\n{"what": "released", "by": "root"}\\n')
    fcntl.flock(file, fcntl.LOCK_EX)
for planted in ("x", f"release.{alice}.{name}"):
    os.symlink("/etc/passwd", f"{place}/{prefix}claim.{alice}.{planted}.json")
print("planted", flush=True)
time.sleep(100)
"""


def test_planted_records_symlinks_and_copies_of_an_id_release_nothing_of_alices(machine):
    with machine.job(ALICE, "-n", "2") as (_, hers):
        name = claim_id(machine)
        device = int(hers.split(",")[0])
        words = (
            machine.directory.records, machine.directory.prefix, str(ALICE.pw_uid), name,
            machine.uuids[device], str(machine.lock_path(device)),
        )  # fmt: skip
        with machine.program(BOB, PLANT, *words):
            unclear = machine(None, "release", name)
            own = machine(BOB, "release", name)  # his copy of the id
            forged = machine(None, "release", "f0f0f0f0")
            assert sorted(map(str, machine.locked())) == sorted(hers.split(",")), (own, forged, unclear)
            assert f"{ALICE.pw_name}.{name}" in unclear.stderr
            assert machine(None, "release", f"{ALICE.pw_name}.{name}").returncode == 0
            assert machine.locked() == []


def test_releaser_and_holder_are_killed_at_random_instants_and_the_claim_is_held_or_free(machine):
    chance, seen, longest = luck(machine.kind), {0: 0, 3: 0}, 0.1
    with machine.job(BOB, "-n", "2") as (_, his):
        bystander = sorted(map(int, his.split(",")))
        for turn in range(16):  # of each of the two kinds of directories
            with machine.job(ALICE, "-n", "3") as (run, _):
                releaser = machine.start(ALICE, "release", claim_id(machine))
                time.sleep(chance.uniform(0, longest))
                victim = releaser if turn % 2 else run
                victim.kill()
                victim.wait()
                if victim is run:
                    releaser.wait(60)  # the job holds what it inherited, or gives it up whole
                assert eventually(lambda: len(machine.locked()) - 2 in (0, 3), 10), machine.locked()
                time.sleep(0.1)
                hers = [index for index in machine.locked() if index not in bystander]
                assert len(hers) in (0, 3) and set(bystander) <= set(machine.locked())
                seen[len(hers)] += 1
                if victim is releaser:
                    longest *= 2 if hers else 0.5  # some instants lie before the release and some behind it
            assert eventually(lambda: machine.locked() == bystander, 20)

    assert min(seen.values()) >= 1, seen


def test_a_flood_of_wishes_holds_up_nobody(machine):
    with machine.job(ALICE, "-n", "2") as (run, _), machine.job(BOB, "-n", "2") as (other, _):
        flood = [machine.start(BOB, "release", claim_id(machine), "--stop") for _ in range(6)]
        for one in flood:
            assert one.wait(60) == 1
        assert (run.poll(), other.poll(), len(machine.locked())) == (None, None, 4)
        for _ in range(2000):
            os.kill(run.pid, signal.SIGURG)
        assert machine(ALICE, "release", claim_id(machine)).returncode == 0
        assert subprocess.run(["true"], check=True).returncode == 0 and run.poll() is None
