"""Records that copy what others have: nobody is hit for what somebody else writes about himself."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from commands import Gpuguard
from daemons import SOMEBODY, a_daemon, somebodys
from fake_nvml import FakeNvml
from guarded import set_user_id_program
from nodes import eventually

from gpuguard.claims.directory import lock_directory, open_lock
from gpuguard.claims.records import probe
from gpuguard.claims.release import let_go, lock_handle
from gpuguard.claims.release_requests import ReleaseRequest
from gpuguard.model import ProcessStat
from gpuguard.policies.amounts import parse_memory_amount
from gpuguard.policies.thresholds import MemoryRule
from gpuguard.policies.view import RuleView

MALLORY = 20002
QUOTA = """
version: 1
mode: enforce
policies:
  - {name: quota, for: 400ms, when: {quota: {claims: 1}}, steps: [terminate]}
  - {name: hogs, for: 400ms, when: {memory: {above: 35GiB}}, steps: [terminate]}
"""


@contextmanager
def a_record(place: Path, uid: int, name: str, since: float, *devices: str) -> Iterator[None]:
    """A living record of *uid*, which says what it likes."""
    path = place / f"claim.{uid}.{name}.json"
    with path.open("x") as file:
        os.fchown(file.fileno(), uid, uid)
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"id": name, "devices": devices, "since": since}, file)
        file.flush()
        yield


@pytest.mark.root
def test_who_gives_a_claim_in_excess_the_id_of_hers_has_her_job_live(tmp_path: Path) -> None:
    with a_daemon(tmp_path, QUOTA, "--enforce", named=True) as daemon, ExitStack() as stack:
        hers, records, now = daemon.uuid(0), tmp_path / "claims" / "claims", time.time()
        job = stack.enter_context(somebodys(daemon.node, "0", 30 * GIB, str(tmp_path / "claims" / "lock" / hers)))
        stack.enter_context(a_record(records, SOMEBODY, "c0ffee", now - 60, hers))
        stack.enter_context(a_record(records, MALLORY, "1", now - 20))
        stack.enter_context(a_record(records, MALLORY, "c0ffee", now - 10))

        assert eventually(lambda: any(event.get("claim") == "c0ffee" for event in daemon.events())), daemon.said()
        assert (job.poll(), daemon.events("terminate")) == (None, [])


@pytest.mark.root
@pytest.mark.parametrize("since", [10**400, float("nan")], ids=["huge", "none"])
def test_no_record_switches_the_guard_off(tmp_path: Path, since: float) -> None:
    with a_daemon(tmp_path, QUOTA, "--enforce", named=True) as daemon:
        lock = str(tmp_path / "claims" / "lock" / daemon.uuid(0))
        with (
            a_record(tmp_path / "claims" / "claims", MALLORY, "f00", since),
            somebodys(daemon.node, "0", 40 * GIB, lock) as offender,
        ):
            assert offender.wait(20) == -signal.SIGTERM, daemon.said()


@pytest.mark.parametrize(
    "forged",
    [
        {"id": "c1"},  # that of her claim
        {"pid": 21},  # her process
        {"pid": 11},  # what started it
        {"pid": 11, "holders": (31,)},  # the same by somebody whose own processes can be seen
    ],
)
def test_what_a_record_copies_from_another_accuses_nobody(forged):
    device = a_device(processes=(a_process(21, memory_used=12 * GIB),))
    slot = f"{device.uuid}.slot"
    hers = a_claim_record(device, id="c1", memory=20 * GIB, slots=(f"{slot}0",), holders=(11,), since=2.0)
    bobs = {"id": "c2", "uid": 1002, "user": "bob", "pid": 31, "since": 1.0, "memory": GIB, "slots": (f"{slot}1",)}
    his = a_claim_record(device, **{**bobs, **forged})
    seen = {21: ProcessStat(parent=11, state="S"), 11: ProcessStat(parent=0, state="S", uid=1001)}

    assert (
        list(
            MemoryRule(parse_memory_amount("share"), per="claim").check(
                RuleView(a_snapshot(device, claims=(his, hers)), seen=seen)
            )
        )
        == []
    )


# A claim of somebody's, whose only holder is a program that is root in effect.
HELD_BY_ROOTS_PROGRAM = """
import fcntl, json, os, pwd, sys
from types import SimpleNamespace
from gpuguard.claims.claim import Claim, lock_device as take_lock
from gpuguard.claims.directory import lock_directory
path, uuid, program = sys.argv[1:]
os.setgroups([]); os.setresgid(*[20001] * 3); os.setresuid(*[20001] * 3)
directory = lock_directory(path)
claim = Claim("c0ffee", (SimpleNamespace(uuid=uuid, index=0),), (take_lock(directory, uuid, fcntl.LOCK_EX),))
claim.explain(directory, None, ["x"])
for descriptor in claim.pass_fds:
    os.set_inheritable(descriptor, True)
os.execv(program, ["sleep", "600"])
"""


@pytest.mark.root
def test_a_claim_held_by_a_program_with_the_set_user_id_bit_is_not_roots(tmp_path: Path) -> None:
    """It was, to the guard: and what is root's is out of every policy's reach."""
    program, place = set_user_id_program(tmp_path), tmp_path / "claims"
    directory = lock_directory(str(place))
    os.close(open_lock(directory, "GPU-a"))
    with subprocess.Popen([sys.executable, "-c", HELD_BY_ROOTS_PROGRAM, str(place), "GPU-a", program]) as holder:
        try:
            assert eventually(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n")
            [claim] = probe(directory, ["GPU-a"])
            with lock_handle(directory, claim) as grip:
                let_go(grip, ReleaseRequest("released", "root"))
        finally:
            holder.kill()

    assert (claim.uid, claim.id, claim.holders, grip.holder) == (SOMEBODY, "c0ffee", (holder.pid,), holder.pid)


@pytest.mark.parametrize("torn", ['{"id": "c0', "{", '{"since": "\\q"}', "{1: 2}", "[" * 4000])
@pytest.mark.parametrize("words", [["who"], ["select"], ["explain"], ["queue"], ["run", "--", "true"], ["release"]])
def test_a_file_that_is_no_json_stops_nobody(fake: FakeNvml, tmp_path: Path, torn: str, words: list[str]) -> None:
    """In a process that has not loaded json the parser has another error of its own: this stopped everybody once."""
    gpuguard = Gpuguard(tmp_path, fake)
    with gpuguard.start("run", "--", "sleep", "60") as job, ExitStack() as stack:
        stack.callback(job.terminate)
        assert eventually(lambda: any((tmp_path / "claims" / "claims").glob("claim.*")))
        for kind in ("claim", "ticket", "reserve"):
            file = stack.enter_context((tmp_path / f"claims/claims/{kind}.{os.getuid()}.torn.json").open("x"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(torn)
            file.flush()
        done = gpuguard(*words)

    assert (done.returncode, "inside gpuguard" in done.stderr) == (0, False), done.stderr
