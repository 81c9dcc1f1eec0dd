"""What comments and docstrings of the package refer to with "see ..." is there."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from sources import module_name, modules, tree

# Not manual pages, paths, or words of English.
_NAME = r"(?!the |its )([a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)*)(?![\w/]|\.[a-z]|\(\d)"
_COMMENT = re.compile(r"\s*([^#\s].*  )?(?:#(.*))?")
_SEE = re.compile(rf"(?:^|[:.,] |\()[Ss]ee {_NAME}(?:\(\))?(?: and {_NAME})?")


def names_in(node: ast.AST) -> Iterator[str]:
    """What a module or a class defines: functions, classes, methods, variables."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            yield inner.name
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


@cache  # not while tests are collected, which each worker does
def known() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """What each module has, and what each class has."""
    trees = {module_name(path): tree(path) for path in modules()}
    classes = [node for whole in trees.values() for node in ast.walk(whole) if isinstance(node, ast.ClassDef)]
    return {name: {*names_in(whole)} for name, whole in trees.items()}, {
        node.name: {*names_in(node)} for node in classes
    }


def texts(source: str) -> Iterator[str]:
    """The comments and docstrings of a file, each in one line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield " ".join((ast.get_docstring(node) or "").split())
    comment = ""
    for line in source.splitlines():
        code, found = _COMMENT.match(line).groups()
        if code or found is None:
            yield " ".join(comment.split())
            comment = ""
        comment += f"{found or ''} "
    yield " ".join(comment.split())


def references(source: str) -> list[str]:
    return [name for text in texts(source) for groups in _SEE.findall(text) for name in groups if name]


def is_there(reference: str, module: str) -> bool:
    """Whether a module, or a name in *module*, of another module or of a class, is called so."""
    owner, _, name = reference.rpartition(".")
    names, members = known()
    if any(f".{home}".endswith(f".{reference}") for home in names):
        return True
    if not owner:
        return name in names[module] or name in members
    homes = [home for home in names if f".{home}".endswith(f".{owner}")]
    return any(name in names[home] for home in homes) or name in members.get(owner, ())


def test_what_a_comment_refers_to_is_there() -> None:
    found = [(module_name(path), name) for path in modules() for name in references(path.read_text(encoding="utf-8"))]

    assert len(found) > 100, len(found)
    assert [(module, name) for module, name in found if not is_there(name, module)] == []


def test_references_are_found_in_comments_and_docstrings() -> None:
    docstring = '"""Does not judge: see engine.\n\nSee lock.nothing.  As subuid(5) says, see docs/cli.md."""\n'
    comments = "x = 1  # bytes: see\n# policies.gone() and queue.plan.\n"

    found = references(docstring + comments)

    assert found == ["engine", "lock.nothing", "policies.gone", "queue.plan"]
    assert [name for name in found if not is_there(name, "gpuguard.lock")] == ["lock.nothing", *found[2:]]
