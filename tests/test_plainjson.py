"""Reading JSON without the json module gives what json.loads() gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuguard import plainjson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def without_json(encoded: bytes) -> Any:
    """What loads() gives in a process that has not loaded json."""
    modules = sys.modules.copy()
    for name in [name for name in sys.modules if name.partition(".")[0] == "json"]:
        del sys.modules[name]
    try:
        return plainjson.loads(encoded)
    finally:
        sys.modules.update(modules)


def outcome(read: Callable[[bytes], Any], encoded: bytes) -> str:
    """The value, or that there is none; as text, because nan is not equal to itself."""
    try:
        return repr(read(encoded))
    except ValueError:
        return "not JSON"


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_what_json_writes_is_read_alike(value: Any, indent: int | None, ascii_only: bool) -> None:
    encoded = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")

    assert outcome(without_json, encoded) == outcome(json.loads, encoded)


@given(VALUES.map(json.dumps), st.integers(0, 60), st.text('{}[],:"\\ue1.-+ \t\nNaInfty', max_size=3))
def test_what_is_damaged_is_read_alike(text: str, place: int, planted: str) -> None:
    damaged = (text[:place] + planted + text[place + 1 :]).encode("utf-8", "surrogatepass")

    assert outcome(without_json, damaged) == outcome(json.loads, damaged)


@pytest.mark.parametrize("encoded", [b"", b" ", b"{", b"nul", b"{} {}", b"[1,]", b"\xff", b'"\n"', b"1 \x00"])
def test_what_is_no_json_is_a_value_error(encoded: bytes) -> None:
    assert outcome(without_json, encoded) == outcome(json.loads, encoded) == "not JSON"


def test_where_python_has_no_such_parser_json_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_json", None)

    assert without_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize("lacking", ["strict", "array_hook"])
def test_where_the_parser_asks_for_more_than_it_is_told_json_reads(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(plainjson._Rules, lacking)

    assert without_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
