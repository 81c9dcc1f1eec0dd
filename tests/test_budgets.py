"""Sizes: a file is read in one sitting, a function on one screen.

A file that needs more says why in a comment line ``# budget: WHY``; a function says it behind its ``def`` line.
Docstrings do not count for a function: explaining at length is no fault.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import PACKAGE, ROOT, modules

FILE, MEDIAN_FILE, DRAWER, FUNCTION = 400, 150, 60, 40
_REASON = re.compile(r"#\s*budget:\s*\S+")

EVERYTHING = [
    *modules(),
    *sorted(path for place in ("tests", "examples", "benchmarks") for path in (ROOT / place).rglob("*.py")),
]


def file_excess(source: str, limit: int) -> str | None:
    lines = source.splitlines()
    if len(lines) <= limit or any(_REASON.match(line) for line in lines):
        return None
    return f"{len(lines)} lines, {limit} are allowed"


def function_excesses(source: str) -> Iterator[str]:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = _length(node)
            signature = lines[node.lineno - 1 : node.body[0].lineno - 1] or [lines[node.lineno - 1]]
            if length > FUNCTION and not any(_REASON.search(line) for line in signature):
                yield f"line {node.lineno}: {node.name} has {length} lines, {FUNCTION} are allowed"


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_stay_small(path: Path):
    source = path.read_text(encoding="utf-8")
    drawer = path.name == "__init__.py" and path.parent.parent == PACKAGE

    assert file_excess(source, DRAWER if drawer else FILE) is None
    assert list(function_excesses(source)) == []


def test_the_median_file_is_short():
    assert statistics.median(len(path.read_text(encoding="utf-8").splitlines()) for path in modules()) <= MEDIAN_FILE


def test_an_oversized_file_is_caught_unless_it_says_why():
    assert file_excess("x = 1\n" * 401, FILE)
    assert file_excess("# budget: a table, read by name\n" + "x = 1\n" * 401, FILE) is None


def test_an_oversized_function_is_caught_unless_it_says_why():
    body = "    x = 1\n" * 40
    assert list(function_excesses("def f():\n" + body))
    assert not list(function_excesses("def f():  # budget: one table of options\n" + body))
    assert not list(
        function_excesses('def f():\n    """Long.\n\n    Text.\n    """\n' + body.replace("x = 1\n", "x = 1\n", 1)[10:])
    )
