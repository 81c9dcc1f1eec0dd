"""The pure middle decides from what it is given: same snapshot and request, same answer."""

from __future__ import annotations

import ast

import pytest
from sources import PACKAGE, imports, module_name, tree

IMPURE = {
    "os", "time", "signal", "subprocess", "socket", "pathlib", "threading", "psutil", "pynvml",
    "asyncio", "datetime", "multiprocessing", "random", "secrets", "shutil", "sys", "tempfile",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "exec", "eval"}

NAMES = ("request", "sharing", "eligibility", "topology", "select", "line/order", "line/busy", "line/plan")
CHOOSING = [PACKAGE / f"{name}.py" for name in NAMES]
PURE = [*CHOOSING, *sorted((PACKAGE / "policies").glob("*.py"))]


def impurities(module: ast.AST, name: str = "gpuguard.select") -> list[str]:
    found = [f"line {line} imports {what}" for line, what in imports(module, name) if what.split(".")[0] in IMPURE]
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"line {node.lineno} calls {node.func.id}()")
    return found


@pytest.mark.parametrize("path", PURE, ids=module_name)
def test_the_pure_middle_touches_nothing_outside_its_arguments(path):
    assert impurities(tree(path), module_name(path)) == []


@pytest.mark.parametrize(
    "source", ["import os", "def f():\n    from time import time", "import os.path as p", "open('x')"]
)
def test_a_planted_impurity_is_caught(source):
    assert impurities(ast.parse(source))
