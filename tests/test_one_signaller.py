"""Only enforcement/signals.py may reach for a process: elsewhere the ways to signal one are absent, not just unused."""

from __future__ import annotations

import ast

import pytest
from sources import PACKAGE, module_name, modules, tree

# By name, whatever stands before the dot: os.kill, psutil.Process(pid).kill, Popen.terminate ...
SIGNALLING = {
    "kill", "killpg", "send_signal", "terminate", "suspend",
    "pidfd_send_signal", "pthread_kill", "tgkill", "sigqueue",
}  # fmt: skip
SIGNALLER = PACKAGE / "enforcement" / "signals.py"
PROGRAMS = {"kill", "pkill", "killall", "skill", "fuser"}


def ways_to_signal(module: ast.AST) -> list[str]:
    found = []
    own = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in SIGNALLING and not _is_ours(node, own):
            found.append(f"line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & SIGNALLING:
            found.append(f"line {node.lineno}: imports it from {node.module}")
        elif isinstance(node, ast.Call) and _is_getattr_of_one(node):
            found.append(f"line {node.lineno}: getattr")
        elif isinstance(node, ast.List | ast.Tuple) and node.elts and _text(node.elts[0]) in PROGRAMS:
            found.append(f"line {node.lineno}: the program {_text(node.elts[0])}")
    return found


def _is_ours(node: ast.Attribute, own: set[str]) -> bool:
    """Whether it is a method that this module defines itself."""
    of = node.value.id if isinstance(node.value, ast.Name) else ""
    return of == "self" and node.attr in own


def _is_getattr_of_one(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "getattr" and _text(node.args[1]) in SIGNALLING


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@pytest.mark.parametrize("path", [path for path in modules() if path != SIGNALLER], ids=module_name)
def test_no_module_but_signals_can_signal_a_process(path):
    assert ways_to_signal(tree(path)) == []


def test_the_one_that_can_does():
    assert ways_to_signal(tree(SIGNALLER))


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.kill(pid, 9)",
        "os.killpg(group, 15)",
        "from os import kill",
        "psutil.Process(pid).terminate()",
        "child.send_signal(15)",
        "signal.pidfd_send_signal(fd, 9)",
        "getattr(os, 'kill')(pid, 9)",
        "subprocess.run(['pkill', 'python'])",
        "stop = os.kill",
        "class Child(Popen):\n    def stop(self):\n        self.kill()",
    ],
)
def test_a_planted_signal_is_caught(source):
    assert ways_to_signal(ast.parse(source))
