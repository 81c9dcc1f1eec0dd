"""Where a file can be damaged, and the source of each damaged copy.  Runs none of them: see mutate.

What is no behaviour is left alone: annotations, what type checkers alone read, and damage after which Python compiles
to the same.  Whether the *words* of a sentence (what stands inside of an f-string) are right, a reader says and no
test: they are marked, and tried only on demand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPUTED = (ast.Name, ast.Attribute, ast.Call, ast.NamedExpr, ast.Subscript)  # conditions that nothing else damages

Path = tuple[tuple[ast.AST, str, int | None], ...]  # the way down to a node: parent, its field, the place in a list


@dataclass(frozen=True)
class Mutant:
    """One damaged copy.

    Args:
        number: in the order of the file.
        line: where, from 1.
        text: of that line.
        what: was damaged.
        source: all of the damaged file.
        sites: first lines of the statements one of which must run if a test is to notice; none: any test might.
        at_import: it runs when the file is loaded.
        words: it is in a sentence for people.
    """

    number: int
    line: int
    text: str
    what: str
    source: str
    sites: frozenset[int]
    at_import: bool
    words: bool


def mutants(source: str) -> list[Mutant]:
    """All of a file, in the order of its lines."""
    tree, lines = ast.parse(source), source.splitlines()
    sound = compile(tree, "", "exec", dont_inherit=True)
    found: list[Mutant] = []
    for path, node, what, new in _damaged(tree):
        _put(path, ast.fix_missing_locations(ast.copy_location(new, node)))
        damaged = None if _alike(compile(tree, "", "exec", dont_inherit=True), sound) else ast.unparse(tree)
        _put(path, node)
        if damaged is not None:
            line: int = node.lineno  # type: ignore[attr-defined]
            at_import, sites = _sites(tree, path)
            words = any(isinstance(parent, ast.JoinedStr) for parent, _, _ in path)
            text = lines[line - 1].strip()
            found.append(Mutant(len(found), line, text, what, damaged, sites, at_import, words))
    return found


def named(source: str) -> set[tuple[str, str]]:
    """(text of the line, what is damaged) of all of a file, and of what compiles to the same: in no time."""
    lines = source.splitlines()
    return {(lines[node.lineno - 1].strip(), what) for _, node, what, _ in _damaged(ast.parse(source))}  # type: ignore[attr-defined]


def with_hits(source: str, file: str) -> str:
    """*source* that appends the line of each statement of its functions to *file* when it runs for the first time.

    The lines are in ``hit_.seen`` too, which a test runner clears.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in ast.walk(node):
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(inner, name, None)
                    if isinstance(block, list) and not isinstance(inner, ast.ClassDef):
                        block[:] = [each for one in block for each in _hit_before(one)]
    place = max(i for i, one in enumerate(tree.body) if isinstance(one, ast.ImportFrom) or i == 0) + 1
    tree.body[place:place] = ast.parse(_HIT.format(file=file)).body
    return ast.unparse(ast.fix_missing_locations(tree))


_HIT = """
def hit_(line):
    if line not in hit_.seen:
        hit_.seen.add(line)
        try:
            with open({file!r}, "a") as file:
                file.write(f"{{line}}\\n")
        except OSError:
            pass
hit_.seen = set()
"""


def _hit_before(one: ast.stmt) -> Iterator[ast.stmt]:
    is_text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
    if not (is_text or hasattr(one, "counted") or isinstance(one, (ast.Nonlocal, ast.Global))):
        hit = ast.Expr(ast.Call(ast.Name("hit_", ast.Load()), [ast.Constant(one.lineno)], []))
        hit.counted = one.counted = True  # type: ignore[attr-defined]
        yield ast.copy_location(hit, one)
    yield one


def _places(node: ast.AST, path: Path) -> Iterator[tuple[Path, ast.AST]]:
    """Every node that runs, with the way to it."""
    if _is_for_types(node):
        return
    if path:
        yield path, node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield from _places(child, (*path, (node, name, index)))


def _damaged(tree: ast.Module) -> Iterator[tuple[Path, ast.AST, str, ast.AST]]:
    """(The way to a node, the node, what is damaged, the node that stands there instead) of each damage."""
    for path, node in _places(tree, ()):
        for kind, new in _damages(node):
            yield path, node, f"{kind}: {ast.unparse(node).splitlines()[0][:70]}", new


def _is_for_types(node: ast.AST) -> bool:
    place = node.test if isinstance(node, ast.If) else node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(place, ast.Name) and place.id == "TYPE_CHECKING"


def _put(path: Path, new: ast.AST) -> None:
    parent, name, index = path[-1]
    if index is None:
        setattr(parent, name, new)
    else:
        getattr(parent, name)[index] = new


def _damages(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What can be wrong at this node: (in a word, the node that stands there instead)."""
    if isinstance(node, ast.Compare):
        for place, one in enumerate(node.ops):
            swapped: Any = SWAPS[type(one)]()
            yield (
                "comparison",
                ast.Compare(node.left, [*node.ops[:place], swapped, *node.ops[place + 1 :]], node.comparators),
            )
    elif isinstance(node, ast.BoolOp):
        other: Any = SWAPS[type(node.op)]()
        yield "operator", ast.BoolOp(other, node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        other = SWAPS[type(node.op)]()
        yield "operator", ast.BinOp(node.left, other, node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "truth", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "number", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.IfExp):
        yield "choice", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, (ast.If, ast.While)) and isinstance(node.test, COMPUTED):
        opposite = ast.UnaryOp(ast.Not(), node.test)
        changed = ast.If if isinstance(node, ast.If) else ast.While
        yield "condition", changed(opposite, node.body, node.orelse)
    elif isinstance(node, (ast.Break, ast.Continue, ast.Raise, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield))
    ):
        yield "statement", ast.Pass()


def _alike(one: CodeType, other: CodeType) -> bool:
    """Whether both do the same, wherever their lines are."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable")
    if any(getattr(one, part, None) != getattr(other, part, None) for part in parts):
        return False
    pairs = list(zip(one.co_consts, other.co_consts, strict=False))
    return len(one.co_consts) == len(other.co_consts) and all(
        _alike(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else repr(a) == repr(b) for a, b in pairs
    )


def _sites(tree: ast.Module, path: Path) -> tuple[bool, frozenset[int]]:
    """(Whether it runs at import, the lines of which one must run if anybody is to notice)."""
    inside = [i for i, (node, name, _) in enumerate(path) if isinstance(node, FUNCTIONS) and name == "body"]
    steps = [getattr(node, name)[index] if index is not None else getattr(node, name) for node, name, index in path]
    if inside and not isinstance(path[inside[-1]][0], ast.Lambda):
        return False, frozenset({next(one.lineno for one in reversed(steps) if isinstance(one, ast.stmt))})
    if any(not isinstance(path[i][0], ast.Lambda) for i in inside):
        statement = next(one for one in reversed(steps) if isinstance(one, ast.stmt))
        return False, frozenset({statement.lineno})
    around = [one for one in steps if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if around:  # a default or a decorator
        return True, frozenset(each.lineno for each in around[0].body)
    if isinstance(steps[0], ast.ClassDef):
        return not inside, frozenset()
    names = {one.id for one in ast.walk(steps[0]) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return not inside, frozenset(_users_of(names, tree))


def _users_of(names: Iterable[str], tree: ast.Module) -> Iterator[int]:
    """First lines of the statements in functions that use one of these names of the module."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in ast.walk(function):
                own = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
                used = {one.id for child in own for one in ast.walk(child) if isinstance(one, ast.Name)}
                if isinstance(statement, ast.stmt) and used & set(names):
                    yield statement.lineno
