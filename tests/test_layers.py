"""The directory listing of ARCHITECTURE.md is the import order: a module imports only what stands above it."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Collection, Mapping

import pytest
from sources import PACKAGE, ROOT, imports, module_name, modules, tree

ORDER = (
    "errors", "units", "users", "capabilities", "sanitize", "jsonio", "model", "deadline", "procfs", "backends",
    "clusters", "request", "sharing", "eligibility", "select", "device_state", "policies", "claims.safe_files",
    "claims.directory", "daemon.client", "claims", "history", "source", "queue", "daemon.broker_client", "lock",
    "api", "ray", "notify", "enforcement", "policies.files.keys", "policies.files.checks", "policies.files.loader",
    "backtest", "host", "watchdog", "training_log", "jobs", "run", "daemon", "fleet", "views", "metrics", "top",
    "web", "cli", "__init__", "__main__",
)  # fmt: skip


def layer(name: str) -> str:
    """The longest row of ORDER that *name* (dotted, with the package in front) is or lies in."""
    parts = name.split(".")[1:]
    rows = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((row for row in rows if row in ORDER), "__init__")


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

    assert listed == [name for name in ORDER if "." not in name and not name.startswith("__")]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gpuguard.select", "import gpuguard.lock"),
        ("gpuguard.select", "from gpuguard import lock"),
        ("gpuguard.select", "def f():\n    from gpuguard.views.who import rows"),
        ("gpuguard.backends.nvml", "from ..lock import Claim"),
        ("gpuguard.lock", "import importlib\nimportlib.import_module(f'gpuguard.cli.{x}')"),
        ("gpuguard.model", "from gpuguard.api import grab_gpus"),
        ("gpuguard.lock", "import gpuguard"),
        ("gpuguard.model", "import gpuguard.model"),
    ],
)
def test_a_planted_violation_is_caught(name, source):
    assert violations(ast.parse(source), name)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gpuguard.lock", "from gpuguard.model import Device\nfrom gpuguard import select"),
        ("gpuguard.backends.client", "from gpuguard.backends import open_backend"),
        ("gpuguard.errors", "if TYPE_CHECKING:\n    from gpuguard.eligibility import Refusal"),
        ("gpuguard.cli", "from gpuguard import __version__"),
    ],
)
def test_what_is_allowed_is_not_reported(name, source):
    assert violations(ast.parse(source), name) == []
