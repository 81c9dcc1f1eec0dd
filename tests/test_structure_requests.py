"""The daemon's requests: one of which one place is other than a client writes it, and answers that no daemon gives.

Each request gets an answer, none gets past its own refusal into a fault, and both threads serve the next one.  Whoever
asks takes an answer for what it says, or says in words that it cannot be understood.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chances import THE_SAME
from nodes import eventually, start
from structures import mutants
from test_daemon_requests import Requests
from test_socket_server import connect, said

from gpuguard.backends import simulated
from gpuguard.claims import grants
from gpuguard.claims.directory import BROKERED, lock_directory
from gpuguard.cli import run_command_line
from gpuguard.daemon import broker_client, exemptions, requests, server
from gpuguard.daemon.broker import Broker
from gpuguard.daemon.client import MAX_REQUEST_BYTES, exchange
from gpuguard.daemon.server import SocketServer
from gpuguard.errors import GpuguardError
from gpuguard.jsonio import loads
from gpuguard.model import ALL_FIELDS, Subject
from gpuguard.policies.engine import PolicyStatus
from gpuguard.policies.files.loader import PolicyFile
from gpuguard.queue.tickets import as_json
from gpuguard.request import Request

SOMEBODY = 20001
STATUS = PolicyStatus("p", Subject("process", "GPU-1", 4711, 1.0, 7, user="alice"), 1.0, "warn", "terminate", 5.0, True)


class Counter:
    """A real socket server, with all that the daemon does behind it, and a simulated node of four devices."""

    def __init__(self, place: Path) -> None:
        os.chmod(place, 0o755)
        start(str(place / "node"))
        fake = Requests(str(place))
        gate = Path(fake.directory.lock_path("gate"))
        gate.touch()
        gate.chmod(BROKERED)  # by which everybody knows that the daemon gives the locks
        self.directory = lock_directory(f"{place}/claims")
        self.machine = simulated.open(str(place / "node"))
        self.snapshot = self.machine.sample(ALL_FIELDS)
        self.uuids = [device.uuid for device in self.snapshot.devices]
        fake.statuses = (STATUS,)
        broker = Broker(self.directory, lambda: simulated.open(str(place / "node")))
        self.context = replace(fake.context, directory=self.directory, broker=broker)
        self.asker = 0
        before = threading.enumerate()
        self.socket_server = SocketServer(
            self.directory, lambda uid, request: requests.handle(self.context, self.asker, request)
        )
        self.threads = [thread for thread in threading.enumerate() if thread not in before]
        self.devices = fake.uuids

    def lives(self) -> bool:
        return len(self.threads) > 1 and all(thread.is_alive() for thread in self.threads)

    def says(self, line: bytes) -> Any:
        """What is answered to the bytes of a request."""
        with connect(self.directory) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(line.replace(b"\n", b" ")[:MAX_REQUEST_BYTES] + b"\n")
            return json.loads(said(connection) or b"null")


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    monkeypatch.setattr(server, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(exemptions, "MAX_CHANGES", 10**9)
    monkeypatch.setattr(broker_client, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(requests, "load_in_time", lambda path: PolicyFile(path))
    made = Counter(tmp_path)
    yield made
    made.socket_server.close()


def requests_to(counter: Counter) -> list[dict[str, Any]]:
    """One of each kind, as the clients write them."""
    answer, descriptors = exchange(counter.directory, {"do": "claim", "devices": counter.uuids[1:2], "conditions": {}})
    for descriptor in descriptors:
        os.close(descriptor)
    wanted = Request(min_free=2**20, models=("*",), max_util=90.0, mine_as_free=frozenset({0}), prefer=("0",))
    times = {"priority": 0, "time_limit_seconds": 60.0, "expected_seconds": 10.0}
    claim = {"do": "claim", "devices": counter.uuids[:1], "conditions": as_json(wanted), "inside": None, "ticket": None}
    share = as_json(Request(share=True, memory=2**30, slots=3))
    reason = {"for_seconds": 60, "reason": "why"}
    return [
        {"do": "keep", "uid": 7, "device": counter.devices[0], **reason},
        {"do": "end", "uid": 7},
        {"do": "release", "claim": answer["claim"], "uid": 0, "reason": "why"},
        {"do": "claims"},
        {"do": "status", "uid": 7},
        {"do": "events"},
        {"do": "reload"},
        {"do": "deny", "uid": 7, "end": False, **reason},
        {"do": "quarantine", "device": counter.devices[1], "end": False, **reason},
        {**claim, **times},
        {**claim, "conditions": share, "ticket": "0.x"},
        {"do": "claim", "devices": counter.uuids[1:2], "inside": answer["claim"]},
    ]


@pytest.mark.parametrize("asker", [0, SOMEBODY], ids=["root", "somebody"])
def test_every_request_gets_an_answer_and_the_next_one_is_served(counter, asker, monkeypatch):
    faults: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: faults.append(repr(told.exc_value)))
    every = requests_to(counter)
    counter.asker = asker
    assert {one["do"] for one in every} == set(requests.HANDLERS)
    for request in every:
        for where, line in mutants(request):
            answer = counter.says(line)
            assert counter.lives(), f"{request['do']}: {where} ended the door: {faults}"
            assert isinstance(answer, dict) and answer.get("ok") in (True, False), f"{request['do']}: {where}"
            assert not faults and "inside" not in answer.get("error", ""), f"{request['do']}: {where}: {faults}"


def test_a_request_that_ends_the_thread_is_found(counter, monkeypatch):
    """As it was: whatever cannot be looked up in a set, for which no answer was given any more."""
    monkeypatch.setattr(server, "_decoded", as_it_was)
    monkeypatch.setattr(Counter, "says", lambda counter, line: while_it_lives(counter, line))

    with pytest.raises(AssertionError, match=r"^keep: do = \[\] ended the door"):
        test_every_request_gets_an_answer_and_the_next_one_is_served(counter, 0, monkeypatch)
    for client in counter.socket_server._clients.values():
        client.connection.close()
    counter.socket_server._listener.close()


def as_it_was(line: bytes) -> dict[str, Any] | str:
    try:
        request = loads(line)
    except ValueError:
        request = None
    return request if isinstance(request, dict) else "a request is one line with one JSON object."


def while_it_lives(counter: Counter, line: bytes) -> Any:
    with connect(counter.directory) as connection:
        connection.sendall(line[:MAX_REQUEST_BYTES] + b"\n")
        eventually(lambda: bool(select.select([connection], [], [], 0)[0]) or not counter.lives())
        return json.loads(said(connection) or b"null") if counter.lives() else None


def asks_for_a_claim(counter: Counter) -> None:
    request, taken = Request(devices=("0",)), dict[str, str]()
    claim = broker_client.request_grant(counter.snapshot, request, counter.directory, None, taken, None)
    if claim:
        assert "/" not in claim.id
        claim.release()


def command(*words: str) -> Any:
    def run(counter: Counter) -> None:
        assert run_command_line([*words, "--dir", counter.directory.path]) in (0, 1, 3)

    return run


# what is asked -> who reads the answer
CLIENTS: dict[str, list[Any]] = {
    "keep": [command("keep", "--for", "1h", "--user", "7"), command("keep", "--for", "1h", "--user", "7", "--json")],
    "end": [command("keep", "--end", "--user", "7"), command("keep", "--end", "--user", "7", "--json")],
    "status": [command("keep", "--status"), command("keep", "--status", "--json")],
    "reload": [command("daemon", "--reload")],
    "claims": [lambda counter: grants.granted(counter.directory)],
    "claim": [asks_for_a_claim],
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_wrong_answer_is_no_fault_of_whoever_asked(counter, name, monkeypatch, capsys):
    request = next(one for one in requests_to(counter) if one["do"] == name)
    answer, descriptors = exchange(counter.directory, {"do": "status"} if name == "status" else request)
    for descriptor in descriptors:
        os.close(descriptor)
    before = len(os.listdir("/proc/self/fd"))
    for where, encoded in mutants({"ok": True, **answer}, brief=THE_SAME and name == "status"):
        monkeypatch.setattr(server, "encoded", lambda content, encoded=encoded: encoded[: 2**16] + b"\n")
        for reads in CLIENTS[name]:
            try:
                reads(counter)
            except GpuguardError:
                pass
            except Exception as error:
                raise AssertionError(f"{name}: {where}") from error
            told = capsys.readouterr().err
            assert "inside gpuguard" not in told, f"{name}: {where}: {told}"
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)  # the threads of the server close theirs
