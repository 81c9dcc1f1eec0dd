"""Damaged records, tickets, marks, states and requests: each is read as what it says or as nothing, and harms nobody.

What is damaged is what gpuguard itself writes.  The same dice at each run; scripts/torture throws others.
YAML is damaged by test_policy_mutations, XML by test_smi, HTTP by test_serving, recordings by test_tape.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot
from chances import luck
from commands import Gpuguard
from test_door import connect, said

from gpuguard import marks, state
from gpuguard.claims import records
from gpuguard.claims.calling import LARGEST
from gpuguard.claims.daemonfiles import daemon_files
from gpuguard.claims.lockfiles import LockDirectory, lock_directory
from gpuguard.line import tickets
from gpuguard.model import ClaimRecord, Snapshot
from gpuguard.request import Request
from gpuguard.services.door import Door

ROUNDS = 250
UUID = "GPU-00000000"
VALUES = (
    b"null", b"true", b"-1", b"0.5", b"1e999", b"-1e999", b"NaN", b"9" * 400, b"18446744073709551616", b"[]", b"{}",
    b'""', b'"\\ud800"', b'"\\u0000\\u001b[2J"', b"[" * 500, b'["x", 1]', b'{"x": 1}', b"1e9", b'"1"',
)  # fmt: skip
PIECES = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"\xff", b"\x00", b"\n", b"\\", b"")


def damaged(document: bytes, number: int) -> bytes:
    """*document*, in JSON, with values, bytes or parts that are others, doubled or missing."""
    chance = luck(number)
    for _ in range(chance.choice((1, 1, 2, 5))):
        words = list(re.finditer(rb'-?[0-9.]+(e[0-9]+)?|"[^"]*"|null|true|false', document))
        start = chance.randrange(len(document) + 1)
        end = min(len(document), start + chance.choice((0, 1, 1, 3, 20)))
        piece = chance.choice((*PIECES, bytes([chance.randrange(256)]), document[start:end] * 2, document[:end][-40:]))
        if words and chance.random() < 0.6:
            (start, end), piece = chance.choice(words).span(), chance.choice(VALUES)
        document = document[:start] + piece + document[end:]
    return document[: chance.randrange(len(document) + 1)] if number % 10 == 0 else document


@contextmanager
def planted(path: str, content: bytes) -> Iterator[None]:
    """A file with that content, locked as a living claim's and a ticket's are."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, content)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
        os.unlink(path)


RECORD = {
    "devices": [UUID], "pid": 17, "since": 1.5e9, "note": "n", "command": ["python", "x"], "ends": 2e9, "expected": 1.0,
    "memory": 2**30, "slots": ["a"], "most": 3,
}  # fmt: skip


def is_a_record(record: ClaimRecord) -> bool:
    texts = (*record.devices, *record.slots, *(record.command or ()), record.note or "")
    numbers = [each for each in (record.since, record.ends, record.expected) if each is not None]
    whole = [each for each in (record.pid, record.memory, record.most) if each is not None]
    sound = all(type(each) is str for each in texts) and all(type(each) is int for each in whole)
    usable = all(type(each) in (int, float) for each in numbers) and all(0 <= each < 2**53 for each in numbers + whole)
    return sound and usable and record.uid == os.geteuid()


def a_damaged_record(directory: LockDirectory, number: int) -> None:
    with planted(records.record_path(directory, os.geteuid(), "abcd"), damaged(json.dumps(RECORD).encode(), number)):
        (record,) = records.read_records(directory)
        assert is_a_record(record), record


def a_damaged_ticket(directory: LockDirectory, number: int) -> None:
    request = Request(num_gpus=2, min_free=2**30, models=("A100*",), mine_as_free=frozenset({0}))
    ticket = tickets.Ticket("x", 0, "", 0.0, (request,), time_limit=60.0, pid=os.getpid(), note="n", command=("a",))
    whole = json.dumps(tickets.ticket_content(ticket)).encode()
    path = f"{directory.records}/{directory.prefix}ticket.{os.geteuid()}.abcd.json"
    with planted(path, damaged(whole, number)):
        found, torn = tickets.read_tickets(directory)
        assert len(found) + len(torn) == 1
        assert all(type(one.priority) is int and abs(one.requests[0].num_gpus) <= 2**63 for one in found), found


A_SNAPSHOT = a_snapshot(
    a_device(processes=(a_process(command=("python",)),)), claims=(a_claim_record(),), simulated=True
)


def a_damaged_state(directory: LockDirectory, number: int) -> None:
    state.write_state(directory, A_SNAPSHOT, 10.0)
    path = Path(daemon_files(directory).file("state.json"))
    path.write_bytes(damaged(path.read_bytes(), number))
    found = state.read_state(directory, A_SNAPSHOT.clock, simulated=True)
    assert found is None or isinstance(found, Snapshot)


def a_damaged_mark(directory: LockDirectory, number: int) -> None:
    now = time.time()
    mark = marks.Mark(UUID, now, now + 1000.0, "why")
    marks.change(directory, marks.QUARANTINED, lambda them: marks.prolong(them, mark))
    (path,) = (Path(one) for one in marks.mark_files(directory) if os.path.exists(one))
    path.write_bytes(damaged(path.read_bytes(), number))
    reasons = marks.against(directory, [UUID, "GPU-1"], None, now)
    assert set(reasons) <= {UUID, "GPU-1"} and all(reason.isprintable() for reason in reasons.values()), reasons


KINDS: dict[str, Callable[[LockDirectory, int], None]] = {
    "record": a_damaged_record, "ticket": a_damaged_ticket, "state": a_damaged_state, "mark": a_damaged_mark,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_read_as_what_it_says_or_as_nothing(directory, kind):
    for number in range(ROUNDS):
        try:
            KINDS[kind](directory, number)
        except Exception as error:
            raise AssertionError(f"{kind} {number}") from error


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [("record", records, "_number"), ("ticket", tickets, "whole")],
)
def test_a_reader_that_believes_any_type_is_found(directory, kind, module, name, monkeypatch):
    monkeypatch.setattr(module, name, lambda value, *_: value)

    with pytest.raises(AssertionError, match=rf"^{kind} \d+$"):
        test_what_is_damaged_is_read_as_what_it_says_or_as_nothing(directory, kind)


def test_a_damaged_request_gets_an_answer_and_the_next_one_is_served(directory):
    whole = b'{"do": "claim", "devices": ["GPU-1"], "seconds": 1.5, "note": "n"}\n'
    door = Door(directory, lambda uid, request: {"uid": uid})
    try:
        for number in range(ROUNDS // 4):
            with connect(directory) as connection:
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(damaged(whole, number).replace(b"\n", b" ")[:LARGEST] + b"\n")
                answer = json.loads(said(connection))
            assert answer["ok"] is (answer.get("uid") == os.geteuid()), number
    finally:
        door.close()


def test_who_and_queue_show_whatever_damaged_records_and_tickets_say(tmp_path):
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_DEBUG="1")
    directory = lock_directory(str(tmp_path / "claims"))
    chance = luck("shown")
    for _ in range(3):
        number = chance.randrange(10**6)
        content = damaged(json.dumps(RECORD | {"since": chance.choice((1e308, 10**300, -5, 0))}).encode(), number)
        with planted(records.record_path(directory, os.geteuid(), "abcd"), content):
            for words in (("who",), ("queue", "--json")):
                assert gpuguard(*words).returncode == 0, (number, content)
