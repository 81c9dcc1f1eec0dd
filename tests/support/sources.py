"""The project's own source as syntax trees, for the tests on its structure."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gpuguard"


def modules() -> list[Path]:
    """Every source file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    """``gpuguard.cli.who`` of a file, ``gpuguard.cli`` of a drawer, ``gpuguard.__init__`` of the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports(module: ast.AST, of: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that *module* imports when it runs, in functions too; TYPE_CHECKING is skipped.

    ``from a import b`` gives "a.b".  import_module("a") and import_module(f"a.{b}") give "a" and "a.".

    Args:
        module: the tree.
        of: its name, against which relative imports are resolved.
    """
    for node in _run_time_nodes(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [*of.split(".")[: -node.level], node.module])) if node.level else node.module
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            yield node.lineno, _constant_start(node.args[0])


def _run_time_nodes(module: ast.AST) -> Iterator[ast.AST]:
    todo = [module]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo.extend(node.orelse)
        else:
            todo.extend(ast.iter_child_nodes(node))


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _constant_start(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
