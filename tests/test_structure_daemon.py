"""A whole daemon beside files of which one place is other than gpuguard writes it: it looks, judges and answers on.

Its policies look at claims, its line at tickets and reservations; each look publishes what it saw.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chances import THE_SAME
from daemons import DaemonUnderTest, a_daemon
from nodes import eventually
from test_structure_commands import UUID, as_files, batches

from gpuguard.claims.calling import ask
from gpuguard.claims.lockfiles import LockDirectory, lock_directory
from gpuguard.line.order import Ticket
from gpuguard.line.tickets import ticket_content
from gpuguard.request import Request

NOW = time.time()
POLICY = """
version: 1
mode: enforce
policies:
  - {name: quota, for: 1s, when: {quota: {claims: 1}}, steps: [warn]}
  - {name: hogs, for: 1s, when: {memory: {above: share, per: claim}}, steps: [warn]}
  - {name: idle, for: 1s, when: {idle: {}}, steps: [warn]}
"""
RECORD = {
    "id": "c", "devices": [UUID], "pid": os.getpid(), "since": NOW - 100, "note": "n", "command": ["python", "x"],
    "ends": NOW + 1000, "expected": NOW + 500, "memory": 2**30, "slots": [f"{UUID}.slot0"], "most": 3,
    "descriptors": [5],
}  # fmt: skip
RESERVATION = {
    "schema": 1, "uid": os.geteuid(), "num_gpus": 1, "begins_unix_seconds": NOW - 10,
    "ends_unix_seconds": NOW + 1000, "devices": [UUID], "note": "n",
}  # fmt: skip
TICKET = ticket_content(Ticket("x", 0, "", 0.0, (Request(devices=("0",), models=("*",)),), pid=os.getpid(), note="n"))
KINDS: dict[str, tuple[Any, int]] = {
    "claim": (RECORD, 400), "ticket": (TICKET, 400), "reserve": (RESERVATION, 90),
}  # fmt: skip


class Place:
    """Where the files go."""

    def __init__(self, daemon: DaemonUnderTest) -> None:
        self.directory: LockDirectory = lock_directory(str(daemon.place / "claims"))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonUnderTest]:
    with a_daemon(tmp_path, POLICY) as one:
        yield one


def goes_on(daemon: DaemonUnderTest) -> bool:
    """Whether it looks twice more without trouble, and publishes what it saw."""
    for _ in range(2):
        before = daemon.state()["snapshot"]["clock"]
        eventually(lambda before=before: daemon.state()["snapshot"]["clock"] > before or troubled(daemon), 20.0)  # type: ignore[misc]
        if troubled(daemon) or daemon.state()["snapshot"]["clock"] <= before:
            return False
    return "Traceback" not in daemon.said()


def troubled(daemon: DaemonUnderTest) -> bool:
    return any(event["outcome"] == "failed" for event in daemon.events("watchdog"))


def test_a_daemon_looks_and_answers_on(daemon):
    place, uuid = Place(daemon), daemon.uuid(0).encode()
    every = {kind: list(batches(document, most, brief=THE_SAME)) for kind, (document, most) in KINDS.items()}
    for number in range(max(map(len, every.values()))):
        with ExitStack() as stack:
            planted = {kind: of_kind[number] for kind, of_kind in every.items() if number < len(of_kind)}
            for kind, batch in planted.items():
                meant = [(where, encoded.replace(UUID.encode(), uuid)) for where, encoded in batch]
                stack.enter_context(as_files(place, meant, kind))  # type: ignore[arg-type]
            ends = {kind: (batch[0][0], batch[-1][0]) for kind, batch in planted.items()}
            assert goes_on(daemon), f"{ends}: {daemon.said()}"
            assert ask(place.directory, {"do": "status"})["ok"]


def test_a_daemon_that_believes_any_type_is_found(tmp_path):
    """A fault is planted: what a record says is a time is believed."""
    planted = tmp_path / "planted"
    planted.mkdir()
    code = "import gpuguard.claims.records as r\nr._number = lambda value, kind: value\n"
    (planted / "sitecustomize.py").write_text(code)
    with (
        a_daemon(tmp_path, POLICY, environment={"PYTHONPATH": str(planted)}) as daemon,
        pytest.raises(AssertionError, match="a fault inside gpuguard: TypeError"),
    ):
        test_a_daemon_looks_and_answers_on(daemon)
