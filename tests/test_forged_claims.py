"""Records that copy what others have: nobody is hit for what somebody else writes about himself."""

from __future__ import annotations

import fcntl
import json
import os
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
policies: [{name: quota, for: 300ms, when: {quota: {claims: 1}}, steps: [terminate]}]
"""

pytestmark = pytest.mark.root


@contextmanager
def a_record(place: Path, uid: int, name: str, age: float, *devices: str) -> Iterator[None]:
    """A living record of *uid*, which says what it likes."""
    path = place / f"claim.{uid}.{name}.json"
    with path.open("x") as file:
        os.fchown(file.fileno(), uid, uid)
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"id": name, "devices": devices, "since": time.time() - age}, file)
        file.flush()
        yield


def test_who_gives_a_claim_in_excess_the_id_of_hers_has_her_job_live(tmp_path: Path) -> None:
    with a_daemon(tmp_path, QUOTA, "--enforce", named=True) as daemon, ExitStack() as stack:
        hers, records = daemon.uuid(0), tmp_path / "claims" / "claims"
        job = stack.enter_context(somebodys(daemon.node, "0", 30 * GIB, str(tmp_path / "claims" / "lock" / hers)))
        stack.enter_context(a_record(records, SOMEBODY, "c0ffee", 60.0, hers))
        stack.enter_context(a_record(records, MALLORY, "1", 20.0))
        stack.enter_context(a_record(records, MALLORY, "c0ffee", 10.0))

        assert eventually(lambda: any(event.get("claim") == "c0ffee" for event in daemon.events())), daemon.said()
        assert (job.poll(), daemon.events("terminate")) == (None, [])
