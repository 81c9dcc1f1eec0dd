"""The usage store and a real daemon: what it saw is there, and quotas of GPU time fire."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from daemons import SOMEBODY, DaemonUnderTest, a_daemon
from lines import a_ticket
from nodes import eventually
from stores import fill

from gpuguard.claims.directory import lock_directory
from gpuguard.daemon.service import NEVER_FIRES
from gpuguard.history.queries import query_store
from gpuguard.history.schema import WIDTH
from gpuguard.queue.tickets import OwnTicket, ticket_content

QUOTA = """
version: 1
mode: enforce
interval: {shortest: 200ms, longest: 200ms}
policies:
  - {name: hours, for: 0s, when: {quota: {gpu_hours: LIMIT, within: 1h}}, steps: [log]}
"""
# Claims a device as root, and becomes somebody: what is claimed is his then.
CLAIM = """
import ctypes, glob, os, sys, time
import gpuguard
claim = gpuguard.grab_gpus(1)
for path in glob.glob(sys.argv[1] + "/claims/claims/claim.*.json"):
    os.chown(path, int(sys.argv[2]), int(sys.argv[2]))
os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # or /proc/PID would stay root's
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def a_claim(daemon: DaemonUnderTest) -> Iterator[None]:
    """Somebody's claim on a device."""
    words = [sys.executable, "-c", CLAIM, str(daemon.place), str(SOMEBODY)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=daemon.gpuguard.environment) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            yield
        finally:
            child.kill()


def claimed(daemon: DaemonUnderTest) -> float:
    """What the store has of him."""
    found = query_store(f"{daemon.place}/claims/usage.db", lambda usage: usage.gpu_seconds({3600.0}))
    return found.get(SOMEBODY, {}).get(3600.0, 0.0)


@pytest.mark.root
def test_a_quota_of_gpu_time_fires_when_the_time_is_used_up_and_not_before(tmp_path):
    with a_daemon(tmp_path, QUOTA.replace("LIMIT", "2s"), "--enforce", named=True) as daemon, a_claim(daemon):
        (event, *_) = daemon.until("log")

        assert "are allowed" in event["message"]
        assert event["user"] == "somebody"
        assert daemon.end() == 0
    assert claimed(daemon) >= 2.0


@pytest.mark.root
def test_what_was_used_before_a_restart_counts(tmp_path):
    now = int(time.time() / WIDTH)
    fill(f"{tmp_path}/claims/usage.db", range(now - 20, now - 2), uid=SOMEBODY)
    with a_daemon(tmp_path, QUOTA.replace("LIMIT", "170s"), named=True) as daemon, a_claim(daemon):
        (event, *_) = daemon.until("log")
        daemon.end()
        once = daemon.gpuguard("daemon", "--policy", str(daemon.policy), "--once")

    assert "GPU-hours in 0.0417 days" in event["message"]
    assert "GPU-hours in 0.0417 days" in once.stderr
    assert NEVER_FIRES not in once.stderr + daemon.said()


def test_what_was_used_is_known_to_everybody_after_a_clean_end(tmp_path):
    with a_daemon(tmp_path) as daemon:
        daemon.state()
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > 0)
        uuid = daemon.uuid(0)
        devices = []

        def seen() -> bool:
            devices[:] = query_store(f"{tmp_path}/claims/usage.db", lambda usage: usage.devices(0.0, usage.now + 1))
            return bool(devices)

        assert eventually(seen, 30.0), "10 s slots are written when they are complete"
        assert devices[0].device == uuid
        before, looked = devices[0].seen, daemon.state()["snapshot"]["clock"]
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > looked + 1)
        daemon.end()

    assert seen()
    assert devices[0].seen > before


def test_who_waits_in_line_is_known_to_everybody(tmp_path):
    with a_daemon(tmp_path) as daemon:
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > 0)
        ticket = OwnTicket(lock_directory(f"{tmp_path}/claims"), ticket_content(a_ticket(gpus=3)))
        try:
            assert eventually(lambda: daemon.state()["snapshot"]["clock"] > time.clock_gettime(time.CLOCK_BOOTTIME) - 1)
            time.sleep(2.5)  # some intervals, of which the time is what is counted
        finally:
            ticket.leave()
        daemon.end()
    found = query_store(f"{tmp_path}/claims/usage.db", lambda usage: usage.waiting(0.0, usage.now + 900))

    assert [one.uid for one in found] == [os.geteuid()]
    assert found[0].wanted >= found[0].waiting > 0


@pytest.mark.parametrize("once", [False, True])
def test_without_a_store_it_says_so_at_load_and_a_quota_of_gpu_time_never_fires(tmp_path, once):
    (tmp_path / "file").write_text("")
    environment = {"GPUGUARD_STATE_DIR": str(tmp_path / "file")}
    if once:
        daemon = DaemonUnderTest(tmp_path)
        daemon.policy.write_text(QUOTA.replace("LIMIT", "1s"))
        daemon.gpuguard.environment |= environment
        said = daemon.gpuguard("daemon", "--policy", str(daemon.policy), "--once").stderr
    else:
        with a_daemon(tmp_path, QUOTA.replace("LIMIT", "1s"), environment=environment) as daemon:
            daemon.until("policy")
            assert eventually(lambda: NEVER_FIRES in daemon.said())
            assert daemon.end() == 0
        said = daemon.said()

    assert NEVER_FIRES in said
    assert str(tmp_path / "file") in said


def test_policies_that_do_not_ask_for_gpu_time_are_not_told_about_it(tmp_path):
    policy = QUOTA.replace("quota: {gpu_hours: LIMIT, within: 1h}", "memory: {above: 1GiB}")
    daemon = DaemonUnderTest(tmp_path)
    daemon.policy.write_text(policy)

    assert NEVER_FIRES not in daemon.gpuguard("daemon", "--policy", str(daemon.policy), "--once").stderr
