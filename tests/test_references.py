"""What comments and docstrings of the package refer to with "see ..." is there."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from sources import module_name, modules, tree

# Not manual pages, paths, or words of English.
_NAME = r"(?!the |its )([a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)*)(?![\w/]|\.[a-z]|\(\d)"
_SEE = re.compile(rf"(?:^|[:.,] |\()[Ss]ee {_NAME}(?:\(\))?(?: and {_NAME})?")
MODULES = [module_name(path) for path in modules()]


def names_in(node: ast.AST) -> Iterator[str]:
    """What a module or a class defines: functions, classes, methods, variables."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            yield inner.name
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


NAMES = {module_name(path): {*names_in(tree(path))} for path in modules()}
MEMBERS = {
    node.name: {*names_in(node)}
    for path in modules()
    for node in ast.walk(tree(path))
    if isinstance(node, ast.ClassDef)
}


def texts(source: str) -> Iterator[str]:
    """The comments and docstrings of a file, each in one line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield " ".join((ast.get_docstring(node) or "").split())
    comment = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment += token.string.removeprefix("#") + " "
        elif token.type not in (tokenize.NL, tokenize.NEWLINE):
            yield " ".join(comment.split())
            comment = ""


def references(source: str) -> list[str]:
    return [name for text in texts(source) for groups in _SEE.findall(text) for name in groups if name]


def is_there(reference: str, module: str) -> bool:
    """Whether a module, or a name in *module*, of another module or of a class, is called so."""
    owner, _, name = reference.rpartition(".")
    if any(f".{known}".endswith(f".{reference}") for known in MODULES):
        return True
    if not owner:
        return name in NAMES[module] or name in MEMBERS
    homes = [known for known in MODULES if f".{known}".endswith(f".{owner}")]
    return any(name in NAMES[home] for home in homes) or name in MEMBERS.get(owner, ())


def test_what_a_comment_refers_to_is_there() -> None:
    found = [(module_name(path), name) for path in modules() for name in references(path.read_text(encoding="utf-8"))]

    assert len(found) > 100
    assert [(module, name) for module, name in found if not is_there(name, module)] == []


def test_references_are_found_in_comments_and_docstrings() -> None:
    docstring = '"""Does not judge: see engine.\n\nSee lock.nothing.  As subuid(5) says, see docs/cli.md."""\n'
    comments = "x = 1  # bytes: see\n# policies.gone() and queue.plan.\n"

    found = references(docstring + comments)

    assert found == ["engine", "lock.nothing", "policies.gone", "queue.plan"]
    assert [name for name in found if not is_there(name, "gpuguard.lock")] == ["lock.nothing", *found[2:]]
