"""HAZARDS.md is complete and true; and what the package never does, because it goes wrong somewhere."""

import ast
import os
import re
from pathlib import Path

import pytest
from parallel import LONGEST
from sources import PACKAGE, ROOT, module_name, modules, tree

from gpuguard.claims.directory import lock_directory, open_lock

# The last numbers of HAZARDS.md: hazards, what was said to a researcher, and what to an administrator.
LAST = {"H": 112, "U": 15, "A": 26}
# Name or text -> why not, and the files that may: a socket takes its mode from nothing but the umask.
NEVER = {
    "lockf": ("its locks end as soon as any descriptor of the file is closed", ""),
    "PR_SET_PDEATHSIG": ("it fires when the thread that forked ends, while the process lives", ""),
    # The two leave out files of users who use it so.
    "/dev/shm": ("files there are removed when their user logs out", "claims/holders.py backends/drm.py"),
    "select.select": ("it fails beyond 1,024 descriptors", ""),
    "umask": ("it belongs to all threads of the process", "daemon/socket_server.py web/server.py"),
    "killpg": ("a group is never what was judged", ""),
}  # fmt: skip


def rows(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each number, as in "H3", with (file, test) of what holds it."""
    found = re.findall(r"^\| ([HUA]\d+) \| [^|]+ \| (.*) \|$", text, re.MULTILINE)
    return [(number, re.findall(r"`(\w+)::(\w+)`", held)) for number, held in found]


def used(module: ast.AST) -> set[str]:
    """Dotted names, and texts that are no docstrings."""
    texts = {node.value for node in ast.walk(module) if isinstance(node, ast.Expr)}
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            found |= {node.attr, ast.unparse(node)}
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            found.add(node.value)
    return found


def never(module: ast.AST, path: str) -> list[str]:
    names = used(module)
    return [
        f"{what}: {why}"
        for what, (why, allowed) in NEVER.items()
        if path not in allowed.split() and any(what == name or (what[0] == "/" and what in name) for name in names)
    ]


def test_every_number_is_there_once_with_its_tests_and_every_test_exists():
    held = rows((ROOT / "tests" / "HAZARDS.md").read_text(encoding="utf-8"))

    assert [number for number, _ in held] == [f"{kind}{n}" for kind, last in LAST.items() for n in range(1, last + 1)]
    assert all(tests for _, tests in held)
    for file, name in {one for _, tests in held for one in tests}:
        body = tree(ROOT / "tests" / f"test_{file}.py").body
        assert f"test_{name}" in {node.name for node in body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_a_row_without_a_test_and_one_that_is_there_twice_are_noticed():
    text = "| H3 | words | `a::b`<br>`c::d` |\n| H4 | words | nothing |\n" + "| U4 | words | `a::b` |\n" * 2

    assert rows(text) == [("H3", [("a", "b"), ("c", "d")]), ("H4", []), *[("U4", [("a", "b")])] * 2]


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_nothing_of_this_is_used_anywhere(path):
    assert never(tree(path), str(path.relative_to(PACKAGE))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import fcntl\nfcntl.lockf(3, 2)",
        "from os import umask",
        "import select\nselect.select([], [], [])",
        "PLACE = '/dev/shm/locks'",
        "from prctl import PR_SET_PDEATHSIG",
    ],
)
def test_a_planted_use_is_caught(source):
    assert never(ast.parse(source), "x.py")


def test_a_lock_file_of_somebody_else_is_opened_without_o_creat(tmp_path, monkeypatch):
    directory = lock_directory(str(tmp_path))
    os.close(open_lock(directory, "GPU-1"))
    opened, real = [], os.open

    def spy(path, flags, *more, **words):
        opened.append((str(path), flags))
        return real(path, flags, *more, **words)

    monkeypatch.setattr(os, "open", spy)
    os.close(open_lock(directory, "GPU-1"))

    assert {flags & os.O_CREAT for path, flags in opened if path.endswith("GPU-1")} == {0}


HERE = Path(__file__).parent


def test_each_of_the_longest_files_is_there() -> None:
    assert [name for name in LONGEST if not (HERE / f"{name}.py").exists()] == []
