"""The directory listing of ARCHITECTURE.md is the import order: a module imports only what stands above it."""

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Collection, Mapping

import pytest
from sources import PACKAGE, ROOT, imports, module_name, modules, tree

ORDER = (
    "locale", "errors", "units", "users", "sanitize", "tables", "files", "jsonio",
    "model", "vendors", "device_state", "procfs", "clusters", "backends", "request", "eligibility",
    "select", "yaml_files", "policies", "claims", "history", "queue", "batch", "source", "lock", "api", "ray", "notify",
    "enforcement", "policy_files", "backtest", "host", "watchdog", "training_log", "jobs", "run", "daemon", "fleet",
    "views", "metrics", "top", "web", "cli", "__init__", "__main__",
)  # fmt: skip


def layer(name: str) -> str:
    """The row of ORDER in which *name* (dotted, with the package in front) lies."""
    _, row, *_ = *name.split("."), ""
    return row if row in ORDER else "__init__"


def violations(module: ast.AST, name: str) -> list[str]:
    """Imports of *module* that stand at its own place or below it, as "line N imports X"."""
    own = layer(name)
    found = []
    for line, imported in imports(module, name):
        if imported == "gpuguard.__version__":
            continue  # the package is loaded before anything in it, so this cannot be a cycle
        if imported.split(".")[0] != "gpuguard":
            continue
        other = layer(imported)
        if own == "__init__" and imported == "gpuguard.":
            continue  # its names are loaded when they are used
        if other == own and own != "__init__" and PACKAGE.joinpath(*own.split(".")).is_dir():
            continue
        if ORDER.index(other) >= ORDER.index(own):
            found.append(f"line {line} imports {imported}, which does not stand above {own}")
    return found


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_a_module_imports_only_what_stands_above_it(path):
    assert violations(tree(path), module_name(path)) == []


def circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle():
    names = {module_name(path) for path in modules()}
    graph = {}
    for path in modules():
        found = (imported for _, imported in imports(tree(path), module_name(path)) if imported[-1:] != ".")
        graph[module_name(path)] = {one if one in names else one.rpartition(".")[0] for one in found} & names

    assert circle(graph) == []
    assert circle({"a": ["b"], "b": ["a"]})


def test_every_module_has_a_place_in_the_order():
    here = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    assert here - set(ORDER) == set(), "say in ORDER and in ARCHITECTURE.md where it stands"


def test_the_architecture_lists_the_modules_in_this_order():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    rows = re.findall(r"^ {6}([a-z_]+(?:[./][a-z_.]+)?(?:, [a-z_]+(?:[./][a-z_.]+)?)*)/? {2,}", text, re.MULTILINE)
    listed = [name.rstrip("/") for row in rows for name in row.split(", ")]

    assert listed == [name for name in ORDER if not name.startswith("__")]


def ambiguous(paths: Collection[str]) -> set[str]:
    """Names of several modules; in `cli` and `views` a file is called as its command."""
    parts = [path.split("/") for path in paths]
    names = Counter(words[-1] for words in parts if words[0] != "views" and (words[0] != "cli" or len(words) > 2))
    return {name for name, number in names.items() if number > 1 and not name.startswith("__")}


def test_the_name_of_a_module_says_what_it_is_without_its_package():
    moved = "For programs that were started before an upgrade"
    paths = {path.relative_to(PACKAGE).as_posix() for path in modules() if moved not in path.read_text("utf-8")[:60]}

    assert ambiguous(paths) == set()
    assert ambiguous(paths | {"queue/records.py", "cli/jobs/signals.py"}) == {"records.py", "signals.py"}


@pytest.mark.parametrize(
    ("name", "source", "allowed"),
    [
        ("gpuguard.select", "import gpuguard.lock", False),
        ("gpuguard.select", "from gpuguard import lock", False),
        ("gpuguard.select", "def f():\n    from gpuguard.views.who import rows", False),
        ("gpuguard.backends.nvml", "from ..lock import Claim", False),
        ("gpuguard.lock", "import importlib\nimportlib.import_module(f'gpuguard.cli.{x}')", False),
        ("gpuguard.model", "from gpuguard.api import grab_gpus", False),
        ("gpuguard.lock", "import gpuguard", False),
        ("gpuguard.model", "import gpuguard.model", False),
        ("gpuguard.lock", "from gpuguard.model import Device\nfrom gpuguard import select", True),
        ("gpuguard.backends.client", "from gpuguard.backends import open_backend", True),
        ("gpuguard.errors", "if TYPE_CHECKING:\n    from gpuguard.eligibility import Refusal", True),
        ("gpuguard.cli", "from gpuguard import __version__", True),
    ],
)
def test_a_planted_violation_is_caught_and_what_is_allowed_is_not(name, source, allowed):
    assert (violations(ast.parse(source), name) == []) is allowed


IMPURE = {
    "os", "time", "signal", "subprocess", "socket", "pathlib", "threading", "psutil", "pynvml",
    "asyncio", "datetime", "multiprocessing", "random", "secrets", "shutil", "sys", "tempfile",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "exec", "eval"}

NAMES = ("request", "eligibility", "select", "queue/priority", "queue/calendar", "queue/backfill")
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


@pytest.mark.parametrize(
    "source",
    [
        SIGNALLER.read_text(encoding="utf-8"),
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
