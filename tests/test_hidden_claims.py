"""A lock that no process has open: its user hides it, and is judged as if there were no claim; nobody else suffers."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from claimholders import a_ready_child, see_locks_alone
from daemons import SOMEBODY, a_daemon, somebodys
from nodes import eventually

from gpuguard.claims import holders
from gpuguard.claims.directory import LockDirectory, lock_directory, open_lock
from gpuguard.policies.usage import TrespassRule, UnclaimedRule
from gpuguard.policies.view import RuleView

POLICY = """
version: 1
mode: enforce
policies: [{name: no-claim, for: 400ms, when: {unclaimed: {}}, steps: [terminate]}]
"""
HIDE = """
import fcntl, os, socket, sys, time
path, uid, node = sys.argv[1:]
if node:
    from gpuguard.backends import simulated
    simulated.use("0", 30 * 2**30, 50.0, spec=node)
lock = os.open(path, os.O_RDONLY | os.O_CREAT, 0o444)
fcntl.flock(lock, fcntl.LOCK_EX)
ends = socket.socketpair()
socket.send_fds(ends[0], [b"x"], [lock])
os.close(lock)
os.setgroups([]); os.setresgid(*[int(uid)] * 3); os.setresuid(*[int(uid)] * 3)
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def a_hider(path: str, node: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process of uid 20001 that keeps the lock at *path*, and has no descriptor of it; it may compute on a node."""
    words = [sys.executable, "-c", HIDE, path, str(SOMEBODY), node]
    with a_ready_child(words) as child:
        yield child


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    found = lock_directory(str(tmp_path / "claims"))
    os.close(open_lock(found, "GPU-a"))
    return found


@pytest.mark.root
def test_who_hides_a_lock_computes_without_a_claim_and_root_is_told_what_it_is(tmp_path: Path) -> None:
    with a_daemon(tmp_path, POLICY, "--enforce", named=True) as daemon:
        device = daemon.uuid(0)
        with a_hider(str(tmp_path / "claims" / "lock" / device), daemon.node) as job:
            [hidden] = daemon.until("claim")
            assert (hidden["outcome"], hidden["devices"]) == ("hidden", [device])
            assert "descriptors in flight over a unix socket" in hidden["message"]
            assert f"the process ends that keeps it, which may be: pid {job.pid} of " in hidden["message"]
            assert eventually(lambda: job.poll() == -15, 20.0), daemon.said()

        assert len(daemon.events("claim")) == 1, "once, as long as it lasts"
        shown = daemon.gpuguard("who").stdout
        assert "no process holds it" not in shown, "it is free when that process has ended"


@pytest.mark.root
def test_who_holds_a_lock_by_hand_has_a_claim(tmp_path: Path) -> None:
    with a_daemon(tmp_path, POLICY, "--enforce", named=True) as daemon:
        lock = str(tmp_path / "claims" / "lock" / daemon.uuid(0))
        with somebodys(daemon.node, "0", 30 * GIB, lock) as job:
            before = daemon.state()["snapshot"]["clock"]
            assert eventually(lambda: daemon.state()["snapshot"]["clock"] > before + 3.0, 20.0), daemon.said()

            assert (job.poll(), daemon.events("terminate"), daemon.events("claim")) == (None, [], [])


def test_a_hidden_claim_is_none_for_the_rules() -> None:
    device = a_device(memory_used=50 * GIB, processes=(a_process(uid=1002, user="bob"),))
    hidden = a_claim_record(device, uid=-1, user="unknown", hidden=True)
    hers = a_claim_record(device, uid=1001, user="alice")

    assert list(UnclaimedRule().check(RuleView(a_snapshot(device, claims=(hidden,)))))
    assert list(TrespassRule().check(RuleView(a_snapshot(device, claims=(hidden, hers)))))
    assert not list(TrespassRule().check(RuleView(a_snapshot(device, claims=(hidden,)))))


@pytest.mark.root
def test_a_lock_in_a_message_is_held_by_no_process(directory: LockDirectory) -> None:
    with a_hider(directory.lock_path("GPU-a")):
        assert holders.held_by_no_process(directory, ["GPU-a"]) == {"GPU-a"}
    assert holders.held_by_no_process(directory, ["GPU-a"]) == set(), "free again"


@pytest.mark.root
def test_a_lock_that_a_process_has_open_is_not(directory: LockDirectory) -> None:
    with open(directory.lock_path("GPU-a")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert holders.held_by_no_process(directory, ["GPU-a"]) == set()


@pytest.mark.root
def test_nor_one_that_nobody_can_tell_about(directory: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process it cannot be read what it has open: it may be the one, and unknown is innocent."""
    really = os.listdir

    def refused(path: str) -> list[str]:
        if path.startswith(f"/proc/{other.pid}/fd"):
            raise PermissionError(13, "Permission denied")
        return really(path)

    with a_hider(directory.lock_path("GPU-a")), subprocess.Popen(["sleep", "600"]) as other:
        try:
            monkeypatch.setattr(os, "listdir", refused)
            assert holders.held_by_no_process(directory, ["GPU-a"]) == set()
            monkeypatch.undo()
            monkeypatch.setattr(holders, "MOST_SECONDS", 0.0)
            assert holders.held_by_no_process(directory, ["GPU-a"]) == set(), "nor where it takes too long"
        finally:
            other.kill()


@pytest.mark.root
def test_also_a_guard_that_may_not_see_what_files_are_finds_it(directory, monkeypatch):
    see_locks_alone(monkeypatch)
    with a_hider(directory.lock_path("GPU-a")):
        assert holders.held_by_no_process(directory, ["GPU-a"]) == {"GPU-a"}
    with open(directory.lock_path("GPU-a")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert holders.held_by_no_process(directory, ["GPU-a"]) == set()
