"""A daemon that enforces `trespass` or `unclaimed`, and users who would have it end another user's process."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from builders import GIB
from claimholders import a_ready_child, a_record, by_hand
from daemons import SOMEBODY, DaemonUnderTest, a_daemon, somebodys
from nodes import eventually

pytestmark = pytest.mark.root

MALLORY, CAROL = 20002, 20003
TRESPASS = """
version: 1
mode: enforce
policies: [{name: strangers, for: 400ms, when: {trespass: {}}, steps: [terminate]}]
"""
UNCLAIMED = TRESPASS.replace("trespass", "unclaimed")
COMPUTE = """
import fcntl, os, sys, time
from gpuguard.backends import simulated
node, device, own, uid, service, *locks = sys.argv[1:]
simulated.use(device, 30 * 2**30, 50.0, spec=node)
for path in (own, *locks):
    fcntl.flock(os.open(path, os.O_RDONLY | os.O_CREAT, 0o444), fcntl.LOCK_EX)
keeper = os.fork() if service else 1
if not keeper:
    uid = service
os.setgroups([]); os.setresgid(*[int(uid)] * 3); os.setresuid(*[int(uid)] * 3)
if keeper:
    print("ready", flush=True)
    time.sleep(600)
sys.stdin.read()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonUnderTest]:
    with a_daemon(tmp_path, TRESPASS, "--enforce", named=True) as daemon:
        yield daemon


def lock_path(daemon: DaemonUnderTest, device: int) -> str:
    return str(daemon.place / "claims" / "lock" / daemon.uuid(device))


def pids_on(daemon: DaemonUnderTest, device: int) -> set[int]:
    return {process["pid"] for process in daemon.devices()[device].get("processes") or ()}


@contextmanager
def a_bystander(daemon: DaemonUnderTest, device: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process of uid 20001 that computes without a claim, as the daemon has seen."""
    with somebodys(daemon.node, str(device), 30 * GIB) as job:
        assert eventually(lambda: job.pid in pids_on(daemon, device)), daemon.said()
        yield job


def claimed_by_hand(daemon: DaemonUnderTest, device: int = 0, *uids: int) -> list[str]:
    """A command that locks a device by hand, and gives copies of the lock to the further *uids*."""
    return by_hand(lock_path(daemon, device), *(uids or (MALLORY,)))


def spare(daemon: DaemonUnderTest, *jobs: subprocess.Popen[str]) -> None:
    """The daemon judges again and again, and spares these jobs."""
    before = daemon.state()["snapshot"]["clock"]
    assert eventually(lambda: daemon.state()["snapshot"]["clock"] > before + 3.0), daemon.said()
    assert ([job.poll() for job in jobs], daemon.events("terminate")) == ([None] * len(jobs), []), daemon.said()


def end_a_newcomer(daemon: DaemonUnderTest, device: int = 0) -> None:
    """The guard guards: who comes to that device now is ended."""
    with somebodys(daemon.node, str(device), 10 * GIB) as newcomer:
        assert newcomer.wait(60) == -signal.SIGTERM, daemon.said()


def start_again(daemon: DaemonUnderTest) -> None:
    before = len(daemon.events("daemon"))
    assert daemon.end() == 0
    daemon.start("--interval", "200ms", "--enforce", named=True)
    daemon.until("daemon", before + 1)


def test_a_lock_that_is_taken_by_hand_later_makes_nobody_a_trespasser(daemon: DaemonUnderTest) -> None:
    with a_bystander(daemon) as job, a_ready_child(claimed_by_hand(daemon)):
        [told] = daemon.until("claim")
        spare(daemon, job)

        assert (told["outcome"], told["pid"], told["devices"]) == ("others were there first", job.pid, [daemon.uuid(0)])
        end_a_newcomer(daemon)
        assert (job.poll(), len(daemon.events("claim"))) == (None, 1), "the admin is told once"


def test_a_run_that_puts_up_with_others_makes_nobody_a_trespasser(daemon: DaemonUnderTest) -> None:
    words = daemon.gpuguard.words("run", "--devices", "0", "--max-processes", "9", "--no-wait", "--", "sleep", "600")
    with a_bystander(daemon) as job, subprocess.Popen(words, env=daemon.gpuguard.environment) as run:
        try:
            assert eventually(lambda: bool(daemon.state()["snapshot"]["claims"])), daemon.said()
            with somebodys(daemon.node, "0", 10 * GIB) as later:
                spare(daemon, job, later)
        finally:
            run.terminate()


def test_a_record_that_says_that_it_is_old_makes_nobody_a_trespasser(daemon: DaemonUnderTest) -> None:
    records, uuid = daemon.place / "claims" / "claims", daemon.uuid(0)
    with ExitStack() as stack:
        # It lies there before the job comes, and its lock is taken afterwards.
        stack.enter_context(a_record(records, MALLORY, "f00", since=1.0, devices=[uuid]))
        job = stack.enter_context(a_bystander(daemon))
        stack.enter_context(a_ready_child(claimed_by_hand(daemon)))
        daemon.until("claim")
        path = records / f"claim.{MALLORY}.f00.json"
        path.write_text(json.dumps({"id": "f00", "since": 2.0, "devices": [uuid]}))
        spare(daemon, job)

        [claim] = daemon.state()["snapshot"]["claims"]
        assert (claim["uid"], claim["since"] > 1e9) == (MALLORY, True)
        start_again(daemon)
        spare(daemon, job)
        end_a_newcomer(daemon)


@pytest.mark.parametrize("forgets", [False, True], ids=["started again", "started for the first time"])
def test_a_daemon_that_starts_under_an_old_claim_knows_who_came_first(daemon: DaemonUnderTest, forgets: bool) -> None:
    with ExitStack() as stack:
        job = stack.enter_context(a_bystander(daemon))
        stack.enter_context(a_ready_child(claimed_by_hand(daemon)))
        stack.enter_context(a_record(daemon.place / "claims" / "claims", MALLORY, "f00", devices=[daemon.uuid(0)]))
        assert eventually(lambda: [claim["id"] for claim in daemon.state()["snapshot"]["claims"]] == ["f00"])
        assert daemon.end() == 0
        if forgets:
            for name in ("daemon/state.json", "state.json"):
                (daemon.place / "claims" / name).unlink(missing_ok=True)
        meanwhile = stack.enter_context(somebodys(daemon.node, "0", 10 * GIB))  # while nobody guards
        daemon.start("--interval", "200ms", "--enforce", named=True)

        assert meanwhile.wait(60) == -signal.SIGTERM, daemon.said()
        assert job.poll() is None


def test_who_computes_under_a_claim_that_was_lost_is_no_trespasser_on_the_next_one(daemon: DaemonUnderTest) -> None:
    with somebodys(daemon.node, "0", 30 * GIB, lock_path(daemon, 0)) as job:
        assert eventually(lambda: job.pid in pids_on(daemon, 0)), daemon.said()
        os.unlink(lock := lock_path(daemon, 0))  # as all of them are when the directory is made anew
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL, 0o444))
        with a_ready_child(claimed_by_hand(daemon)):
            daemon.until("claim")
            spare(daemon, job)
            end_a_newcomer(daemon)


def computing(daemon: DaemonUnderTest, *locks: str, service: int | None = None) -> list[str]:
    """A command that computes on device 0 as uid 20001 with these locks; *service*: a uid that is given copies."""
    uid, other = str(SOMEBODY), "" if service is None else str(service)
    return [sys.executable, "-c", COMPUTE, daemon.node, "0", lock_path(daemon, 0), uid, other, *locks]


def test_a_lock_that_two_users_hold_together_shields_nobody(tmp_path: Path) -> None:
    with (
        a_daemon(tmp_path, UNCLAIMED, "--enforce", named=True) as daemon,
        a_ready_child(computing(daemon, service=MALLORY)) as job,
    ):
        [told] = daemon.until("claim")
        assert (told["outcome"], told["devices"]) == ("held by several users", [daemon.uuid(0)])
        assert re.search(rf"of \S+ \(pid \d+\) and somebody \(pid {job.pid}\) together", told["message"])
        assert eventually(lambda: job.poll() == -signal.SIGTERM), daemon.said()


def test_who_names_all_users_who_hold_a_lock_together(daemon: DaemonUnderTest) -> None:
    with a_ready_child(claimed_by_hand(daemon, 0, MALLORY, CAROL)) as holder:
        daemon.until("claim")
        shown = daemon.gpuguard("who").stdout

        assert re.search(r"held by \S+ \(pid \d+\) and \S+ \(pid \d+\) together: counts as no claim", shown)
        assert f"(pid {holder.pid})" in shown


@pytest.mark.parametrize("policy", [UNCLAIMED, TRESPASS], ids=["unclaimed", "trespass"])
def test_who_was_only_sent_a_copy_of_a_lock_keeps_their_claim_and_is_no_offender(tmp_path: Path, policy: str) -> None:
    """A service keeps what it is sent; a copy of mallory's lock is no lock of the user who received it."""
    with a_daemon(tmp_path, policy, "--enforce", named=True) as daemon, ExitStack() as stack:
        job = stack.enter_context(somebodys(daemon.node, "0", 30 * GIB, lock_path(daemon, 0)))
        stack.enter_context(a_ready_child(claimed_by_hand(daemon, 1, MALLORY, SOMEBODY)))
        daemon.until("claim")
        spare(daemon, job)


def test_a_copy_that_a_service_of_root_keeps_leaves_the_claim_to_its_user(tmp_path: Path) -> None:
    with (
        a_daemon(tmp_path, UNCLAIMED, "--enforce", named=True) as daemon,
        a_ready_child(computing(daemon, service=0)) as job,
    ):
        spare(daemon, job)
        assert [claim["uid"] for claim in daemon.state()["snapshot"]["claims"]] == [SOMEBODY]
