"""JSON of strangers that is nested deeply is no JSON: the parser never sees it, for it would end the process.

Whoever may write a record, a ticket or a line to the door's socket could end the daemon otherwise.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources import PACKAGE, ROOT, module_name, modules, tree

from gpuguard.claims import grants, records
from gpuguard.daemon import server
from gpuguard.daemon.client import MAX_REQUEST_BYTES
from gpuguard.enforcement import limits
from gpuguard.fleet.answers import DEPTH, reply_of
from gpuguard.fleet.ssh import Reply
from gpuguard.history import audit_log
from gpuguard.jsonio import DEEPEST, loads
from gpuguard.queue import reservations, tickets

TEXTS = st.text('{}[],:"\\a é\n', max_size=60)
VALUES = st.recursive(
    TEXTS | st.integers(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


def depth(value: object) -> int:
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth, inside), default=0)


def is_shallow(encoded: bytes, deepest: int) -> bool:
    try:
        loads(encoded, deepest)
    except ValueError as error:
        return str(error) != "it is nested too deeply"
    return True


@given(VALUES, st.booleans(), st.integers(0, 9))
def test_what_is_too_deep_is_refused_and_nothing_else_is(value: object, ascii_only: bool, deepest: int) -> None:
    encoded = json.dumps(value, ensure_ascii=ascii_only).encode()

    assert is_shallow(encoded, deepest) is (depth(value) <= deepest)


@given(VALUES, st.text('{}[],:"\\a', max_size=20), st.integers(1, 200))
def test_whatever_comes_first_a_parser_is_led_no_deeper(value: object, planted: str, place: int) -> None:
    """What is damaged is refused, or the parser stops before it is deep: seen by a parser that counts."""
    text = json.dumps(value)
    damaged = text[:place] + planted + text[place:]

    assert not is_shallow(damaged.encode(), 3) or led(damaged) <= 3


def led(text: str) -> int:
    """How deep a parser goes in *text* at most, until it meets what no JSON has outside of a string."""
    level = deepest = place = 0
    while place < len(text) and text[place] != "\\":
        if text[place] == '"':
            place += 1
            while place < len(text) and text[place] != '"':
                place += 2 if text[place] == "\\" else 1
        level += (text[place : place + 1] in ("[", "{")) - (text[place : place + 1] in ("]", "}"))
        if level < 0:
            break
        deepest, place = max(deepest, level), place + 1
    return deepest


def nested(document: dict[str, object], levels: int) -> bytes:
    """*document* with something in it that makes it that deep, which its reader has no use for."""
    more = b"[" * (levels - 1) + b"]" * (levels - 1)
    return b'{"more": ' + more + b", " + json.dumps(document).encode()[1:]


def in_a_file(read: Callable[[int], object]) -> Callable[[bytes], object]:
    def reading(encoded: bytes) -> object:
        descriptor = os.memfd_create("file")
        try:
            os.write(descriptor, encoded)
            os.lseek(descriptor, 0, os.SEEK_SET)
            return read(descriptor)
        finally:
            os.close(descriptor)

    return reading


def document_of(parse: Callable[..., object]) -> Callable[[int], object]:
    return lambda descriptor: tickets.read_document(descriptor, f"{os.geteuid()}.x", "x", 4096, parse)


HERE = os.stat(__file__)
DEED = {
    "kind": "terminate", "outcome": "about to", "time_unix_seconds": 1.0,
    "facts": {"clock_seconds": 1.0, "boot": "b", "start_time_seconds": 1.0},
}  # fmt: skip
RESERVATION = {
    "uid": HERE.st_uid, "begins_unix_seconds": 1.0, "ends_unix_seconds": 2.0, "devices": [], "num_gpus": 1,
}  # fmt: skip
# What is written, and its reader: what it gives for a document that it cannot understand is falsy or a Torn.
KINDS: dict[str, tuple[dict[str, object], Callable[[bytes], object]]] = {
    "record": ({"devices": ["GPU-1"]}, lambda encoded: records._decoded(encoded, 7, "7.x").devices),
    "letter": ({"what": "stop"}, records._decode_request),
    "grant": ({"uid": 7, "claim": "x"}, in_a_file(grants._grant_in)),
    "ticket": ({"requests": [{"num_gpus": 1}]}, in_a_file(document_of(partial(tickets._ticket_of, ticket_id="x")))),
    "reservation": (RESERVATION, in_a_file(document_of(partial(reservations._reservation_of, number="x")))),
    "request": ({"do": "x"}, lambda encoded: isinstance(server._decoded(encoded), dict)),
    "deed": (DEED, lambda encoded: limits._action_of(encoded, "b", 2.0, 2.0)),
    "event": ({"schema": 1, "time_unix_seconds": 1.0}, lambda encoded: audit_log.decoded([encoded])[0]),
}


def understood(kind: str, levels: int) -> bool:
    document, read = KINDS[kind]
    found = read(nested(document, levels))
    return bool(found) and not isinstance(found, tickets.IgnoredFile)


@pytest.mark.parametrize("kind", KINDS)
def test_each_reader_takes_what_is_as_deep_as_may_be_and_refuses_what_is_deeper(kind):
    assert (understood(kind, DEEPEST), understood(kind, DEEPEST + 1)) == (True, False)


def test_an_answer_of_another_host_is_refused_earlier():
    answers = [reply_of(Reply("a", 0.1, 0, nested({"schema": 1}, levels))) for levels in (DEPTH, DEPTH + 1)]

    assert [answer.error is None for answer in answers] == [True, False]


# A thread of as little stack as musl gives.  Whoever asks first asks with brackets alone.
IN_A_SMALL_THREAD = """
import os, sys, threading
threading.stack_size(128 * 1024)
from gpuguard.claims.directory import lock_directory
from gpuguard.daemon.server import SocketServer as Door
from test_socket_server import connect, said
directory = lock_directory(sys.argv[1])
door = Door(directory, lambda uid, request: {"well": True})
for line in (b"[" * int(sys.argv[2]), b"{}"):
    with connect(directory) as connection:
        connection.sendall(line + b"\\n")
        print(said(connection).decode(), end="", flush=True)
door.close()
"""


def test_brackets_do_not_end_the_daemon(tmp_path: Path) -> None:
    words = [sys.executable, "-c", IN_A_SMALL_THREAD, str(tmp_path / "claims"), str(MAX_REQUEST_BYTES - 1)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line)["ok"] for line in done.stdout.splitlines()] == [False, True]


def readers(module: ast.AST) -> list[int]:
    """The lines on which *module* has the json module read something that may be nested however deeply."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    read = [one for one in calls if ast.unparse(one.func) in ("json.loads", "json.load", "json.JSONDecoder")]
    plain = [node.lineno for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.module == "json"]
    return plain + [one.lineno for one in read]


@pytest.mark.parametrize("path", [one for one in modules() if one != PACKAGE / "jsonio.py"], ids=module_name)
def test_nobody_reads_json_past_the_one_place(path):
    assert readers(tree(path)) == []


@pytest.mark.parametrize(
    "code", ["json.loads(x)", "json.load(file)", "from json import loads", "json.JSONDecoder().decode(x)"]
)
def test_who_reads_past_it_is_found(code):
    assert readers(ast.parse(code)) == [1]
