"""JSON of strangers that is nested deeply is no JSON: the parser never sees it, for it would end the process.

Whoever may write a record, a ticket or a line to the door's socket could end the daemon otherwise.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from sources import ROOT, module_name, modules, tree

from gpuguard.claims.daemon_client import MAX_REQUEST_BYTES
from gpuguard.jsonio import loads

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


# A thread of as little stack as musl gives.  Whoever asks first asks with brackets alone.
IN_A_SMALL_THREAD = """
import os, sys, threading
threading.stack_size(128 * 1024)
from gpuguard.claims.directory import lock_directory
from gpuguard.daemon.socket_server import SocketServer as Door
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
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support:{ROOT}/tests"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line)["ok"] for line in done.stdout.splitlines()] == [False, True]


def readers(module: ast.AST) -> list[int]:
    """The lines on which *module* has the json module read something that may be nested however deeply."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    read = [one for one in calls if ast.unparse(one.func) in ("json.loads", "json.load", "json.JSONDecoder")]
    plain = [node.lineno for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.module == "json"]
    return plain + [one.lineno for one in read]


def test_nobody_reads_json_past_the_one_place():
    assert [module_name(path) for path in modules() if readers(tree(path))] == ["gpuguard.jsonio"]
