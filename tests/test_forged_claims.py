"""Records that copy what others have: nobody is hit for what somebody else writes about himself."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from daemons import SOMEBODY, a_daemon, somebodys
from nodes import GIB, eventually

MALLORY = 20002
QUOTA = """
version: 1
mode: enforce
policies:
  - {name: quota, for: 400ms, when: {quota: {claims: 1}}, steps: [terminate]}
  - {name: hogs, for: 400ms, when: {memory: {above: 35GiB}}, steps: [terminate]}
"""

pytestmark = pytest.mark.root


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


def test_who_gives_a_claim_in_excess_the_id_of_hers_has_her_job_live(tmp_path: Path) -> None:
    with a_daemon(tmp_path, QUOTA, "--enforce", named=True) as daemon, ExitStack() as stack:
        hers, records, now = daemon.uuid(0), tmp_path / "claims" / "claims", time.time()
        job = stack.enter_context(somebodys(daemon.node, "0", 30 * GIB, str(tmp_path / "claims" / "lock" / hers)))
        stack.enter_context(a_record(records, SOMEBODY, "c0ffee", now - 60, hers))
        stack.enter_context(a_record(records, MALLORY, "1", now - 20))
        stack.enter_context(a_record(records, MALLORY, "c0ffee", now - 10))

        assert eventually(lambda: any(event.get("claim") == "c0ffee" for event in daemon.events())), daemon.said()
        assert (job.poll(), daemon.events("terminate")) == (None, [])


@pytest.mark.parametrize("since", [10**400, float("nan")], ids=["huge", "none"])
def test_no_record_switches_the_guard_off(tmp_path: Path, since: float) -> None:
    with a_daemon(tmp_path, QUOTA, "--enforce", named=True) as daemon:
        lock = str(tmp_path / "claims" / "lock" / daemon.uuid(0))
        with (
            a_record(tmp_path / "claims" / "claims", MALLORY, "f00", since),
            somebodys(daemon.node, "0", 40 * GIB, lock) as offender,
        ):
            assert offender.wait(20) == -signal.SIGTERM, daemon.said()
