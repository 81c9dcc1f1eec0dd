"""The daemon that gives the locks dies at random instants: no claim is lost or double, and nothing stays locked."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from itertools import accumulate, permutations
from pathlib import Path
from typing import Any

import pytest
from brokered import a_machine
from chances import luck
from nodes import eventually
from users import ALICE, BOB

pytestmark = pytest.mark.root
KILLS = {"whole": 30, "shares": 20, "instances": 15}
MIG = "1xH100-80GB:mig=3g.40gb,3g.40gb"
GIB = 2**30

CLAIMANT = """
import fcntl, random
from gpuguard.errors import GpuguardError
from gpuguard.claims.directory import is_same_file
chance = random.Random(os.getpid())
asks = json.loads(sys.argv[2])
with open(sys.argv[1], "a") as log:
    print("begun", flush=True)
    while True:
        wanted, conditions = chance.choice(asks)
        try:
            answer, descriptors = exchange(directory, {"do": "claim", "devices": wanted, "conditions": conditions})
        except (GpuguardError, OSError):
            time.sleep(0.01)
            continue
        if not descriptors:
            continue
        began = time.monotonic()
        time.sleep(chance.random() * 0.1)
        facts = [open(f"/proc/self/fdinfo/{each}").read() for each in descriptors]
        paths = [directory.lock_path(name) for name in answer["locks"]]
        kept = all("lock:" in each for each in facts) and all(map(is_same_file, descriptors, paths))
        print(json.dumps([wanted, conditions.get("memory"), began, time.monotonic(), kept]), file=log, flush=True)
        for each in descriptors:
            chance.random() < 0.5 and fcntl.flock(each, fcntl.LOCK_UN)
            os.close(each)
"""


def asks(kind: str, uuids: list[str]) -> list[tuple[list[str], dict[str, Any]]]:
    """What the claimants choose among: devices and conditions."""
    shares: list[dict[str, Any]] = [{"share": True, "memory": size * GIB, "max_util": 100.0} for size in (10, 17, 30)]
    if kind == "whole":
        choices = [[one] for one in uuids[1:]] + [[one, other] for one, other in permutations(uuids[1:], 2)]
        return [(choice, {}) for choice in choices]
    if kind == "shares":
        return [([one], way) for one in uuids[1:2] for way in ({}, {}, *shares)] + [(uuids[1:3], shares[2])]
    return [([one], way) for one in uuids for way in ({}, shares[1])]


@pytest.mark.parametrize("kind", KILLS)
def test_a_daemon_that_is_killed_loses_no_claim_and_leaves_nothing_locked(site, kind):
    chance, kills = luck(7), KILLS[kind]
    keeps = ("--share", "--memory", "1GiB") if kind == "shares" else ()
    with a_machine(site, "keeper", *([MIG] if kind == "instances" else [])) as machine:
        logs = [machine.place / f"log{number}" for number in range(4)]
        devices = [one for one in machine.uuids if kind != "instances" or one.startswith("MIG-")]
        with ExitStack() as stack:
            if kind != "instances":
                stack.enter_context(machine.job(ALICE, "--gpus", "0", *keeps))
            for log, user in zip(logs, (ALICE, ALICE, BOB, BOB), strict=True):
                log.touch()
                log.chmod(0o666)
                words = str(log), json.dumps(asks(kind, devices))
                claimant = stack.enter_context(machine.program(user, CLAIMANT, *words))
                assert claimant.stdout and claimant.stdout.readline()
            for _ in range(kills):
                time.sleep(chance.random() * 0.15)
                machine.kill_daemon()
                assert kind == "instances" or 0 in machine.locked()
                machine.start_daemon()
            assert eventually(lambda: all(len(told(log)) > kills for log in logs), 30)
            # A whole device needs a moment in which none of the others has a share of it.
            ways = {True} if kind == "whole" else {True, False}
            assert eventually(lambda: {memory is None for log in logs for _, memory, *_ in told(log)} == ways, 90)
        claims = [claim for log in logs for claim in told(log)]
        assert all(kept for *_, kept in claims)
        assert all(most_at_once(claims, uuid) <= (40 if kind == "instances" else 80) * GIB for uuid in devices)
        assert eventually(lambda: machine.locked() == [])
        profile = ("--mig", "3g.40gb") if kind == "instances" else ()
        assert machine(BOB, "run", "--no-wait", "-n", str(len(devices)), *profile, "true").returncode == 0
        assert [name for name in os.listdir(machine.directory.locks) if name.endswith(".new")] == []


def told(log: Path) -> list[Any]:
    """What a claimant has written down of its claims."""
    return [json.loads(line) for line in log.read_text().rpartition("\n")[0].splitlines()]


ROOT = """
import gpuguard, random
chance = random.Random(3)
with open(sys.argv[1], "a") as log:
    print("begun", flush=True)
    while True:
        memory = chance.choice((None, None, 10 * 2**30, 30 * 2**30))
        way = {"share": True, "memory": memory, "max_util": 100.0} if memory else {}
        try:
            claim = gpuguard.grab_gpus(1, devices=sys.argv[2:], wait=0, **way)
        except gpuguard.GpuguardError:  # another one was quicker
            continue
        began = time.monotonic()
        time.sleep(chance.random() * 0.02)
        print(json.dumps([sys.argv[2:], memory, began, time.monotonic(), True]), file=log, flush=True)
        claim.release()
"""


def test_root_who_takes_locks_directly_and_the_daemon_never_overlook_each_other(site):
    with a_machine(site, "keeper") as machine, ExitStack() as stack:
        wanted = json.dumps([one for one in asks("shares", machine.uuids) if len(one[0]) == 1])
        logs = [machine.place / f"log{number}" for number in range(3)]
        words = (wanted, wanted, machine.uuids[1])
        for log, user, code, word in zip(logs, (ALICE, BOB, None), (CLAIMANT, CLAIMANT, ROOT), words, strict=True):
            log.touch()
            log.chmod(0o666)
            claimant = stack.enter_context(machine.program(user, code, str(log), word))
            assert claimant.stdout and claimant.stdout.readline()
        assert eventually(lambda: all(len(told(log)) > 15 for log in logs), 90)
        claims = [claim for log in logs for claim in told(log)]

    assert most_at_once(claims, machine.uuids[1]) <= 80 * GIB
    assert all(kept for *_, kept in claims)


def most_at_once(claims: list[list[Any]], uuid: str) -> float:
    """Bytes of the device that were promised to shares at one moment; whole ones must have been alone."""
    changes = [
        change
        for wanted, memory, began, ended, _ in claims
        if uuid in wanted
        for size in [memory or 0]
        for change in ((began, size), (ended, -size))
    ]
    alone = [(began, ended) for wanted, memory, began, ended, _ in claims if uuid in wanted and memory is None]
    for began, ended in alone:
        others = [one for one in claims if uuid in one[0] and one[2] < ended and one[3] > began]
        assert len(others) == 1, "a whole device was given while another user had it, or a part of it"
    return max(accumulate(size for _, size in sorted(changes)), default=0)
