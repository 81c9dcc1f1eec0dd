"""Every document that differs in one place from one which the program wrote: of another type, missing, doubled, huge.

from structures import mutants
for name, encoded in mutants({"uid": 7, "devices": ["GPU-1"]}): ...
    # one of them is "devices.0 = null", b'{"uid": 7, "devices": [null]}'

All of them, in the same order each time: nothing is left to dice.  test_damaged_documents throws dice at bytes, too.
"""

import json
from collections.abc import Iterator
from typing import Any

LONG = 2**20  # of a text
MANY = 10_000  # in a list
DEEP = 60  # brackets, fewer than are refused

VALUES: dict[str, bytes] = {
    "null": b"null",
    "true": b"true",
    "false": b"false",
    "0": b"0",
    "-1": b"-1",
    "1.5": b"1.5",
    "2**53": b"9007199254740992",
    "-2**63": b"-9223372036854775808",
    "2**64": b"18446744073709551616",
    "10**400": b"1" + b"0" * 400,
    "5000 digits": b"9" * 5000,
    "1e400": b"1e400",
    "-1e400": b"-1e400",
    "1e-400": b"1e-400",
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "empty text": b'""',
    "long text": b'"' + b"x" * LONG + b'"',
    "NUL": b'"a\\u0000b"',
    "half a pair": b'"\\ud800"',
    "lines": b'"a\\nb\\r\\n"',
    "escape": b'"\\u001b[2J\\u202e"',
    "number in text": b'"17"',
    "path": b'"../../../../../../etc/hostname"',
    "digits": b'"' + b"9" * 5000 + b'"',
    "other digits": b'"\\u0663.\\u00b2"',
    "glob": b'"[!\\u0000-\\uffff]*["',
    "[]": b"[]",
    "[[]]": b"[[]]",
    "[null]": b"[null]",
    "{}": b"{}",
    "{'': null}": b'{"": null}',
    "deep": b"[" * DEEP + b"]" * DEEP,
    "too deep": b"[" * 500 + b"]" * 500,
    "deep object": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "many numbers": b"[" + b"0," * MANY + b"0]",
    "many texts": b"[" + b'"a",' * MANY + b'"a"]',
    "many keys": b"{" + b",".join(b'"%d":0' % number for number in range(MANY)) + b"}",
}
BRIEF = frozenset({"null", "true", "-1", "10**400", "1e400", "NaN", "half a pair", "NUL", "[]", "[[]]", "{'': null}"})
_HERE = "<here>"

Path = tuple[Any, ...]


def mutants(document: Any, *, brief: bool = False) -> Iterator[tuple[str, bytes]]:
    """(what is other, the document) for each node of *document* and each other value that it may have.

    Args:
        document: plain values.
        brief: only with the values that differ most from each other, half of them at each node in turn.
    """
    document = json.loads(json.dumps(document))  # a tuple is a list there
    few = [name for name in VALUES if name in BRIEF]
    for place, path in enumerate(_paths(document)):
        where = ".".join(map(str, path)) or "all"
        before, _, after = json.dumps(_with(document, path, _HERE)).encode().partition(b'"%s"' % _HERE.encode())
        for name in few[place % 2 :: 2] if brief else VALUES:
            yield f"{where} = {name}", before + VALUES[name] + after
        for name, value in _bent(_at(document, path), MANY // 50 if brief else MANY):
            yield f"{where} {name}", before + value + after


def _bent(node: Any, many: int) -> Iterator[tuple[str, bytes]]:
    """(what is other, the node) for each part that is missing, doubled or too much."""
    if isinstance(node, dict):
        for key in node:
            without = {name: value for name, value in node.items() if name != key}
            yield f"without {key}", json.dumps(without).encode()
            own, other = json.dumps({key: node[key]}).encode(), json.dumps({key: None}).encode()
            rest = json.dumps(without).encode()[1:-1]
            for twice in (own[1:-1], other[1:-1]), (other[1:-1], own[1:-1]):
                yield f"twice {key}", b"{" + b", ".join(filter(None, (*twice, rest))) + b"}"
        yield "with more", json.dumps({**node, "more": {"of": ["this"]}}).encode()
        yield "with a key of no name", json.dumps({**node, "": 1}).encode()
        yield "with a key of half a pair", json.dumps({**node, "\ud800": 1}).encode()
    if isinstance(node, list) and node:
        yield "doubled", json.dumps([*node, *node]).encode()
        yield "less one", json.dumps(node[:-1]).encode()
        yield "many times", json.dumps(node[:1] * many).encode()


def _paths(node: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inside:
        yield from _paths(value, (*path, key))


def _at(node: Any, path: Path) -> Any:
    for key in path:
        node = node[key]
    return node


def _with(node: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = _with(node[path[0]], path[1:], value)
    return copy
