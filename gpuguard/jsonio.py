"""The one place where JSON is read: what strangers wrote may be nested only so deeply.

Python's parser goes down one frame of the C stack with each bracket.  A thread has 128 KiB of it with musl, where
1,000 brackets end the process, whatever it was guarding; 1 MiB ends after 9,000 with Python 3.13.  So brackets are
counted before the parser sees them.

Does not write.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DEEPEST = 100  # our own files have 8
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def loads(encoded: bytes) -> Any:
    """The value of one JSON text in UTF-8.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    return json.loads(shallow(encoded))


def shallow(encoded: bytes, deepest: int = DEEPEST) -> str:
    """The text of *encoded*, in UTF-8; a parser goes down at most *deepest* brackets in it.

    Raises:
        ValueError: it is no text, or nested more deeply.
    """
    if encoded.count(b"[") + encoded.count(b"{") > deepest:
        # Outside of strings no JSON has a backslash: a parser stops at the first, so what comes behind does not count.
        strings = encoded.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        brackets = b"".join(strings[::2]).translate(_BRACKETS, _OTHERS)
        for _ in range(deepest):
            brackets = brackets.replace(b"[]", b"")
        if brackets:  # or they are no pairs: then it is no JSON either
            raise ValueError("it is nested too deeply")
    return encoded.decode("utf-8", "surrogatepass")


def is_finite(value: object) -> bool:
    """Whether no number in a JSON value is none: Python reads NaN and 1e400, and nobody reads what it makes of them."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or value - value == 0


# Plain values, as JSON has them, made into nouns: each field is what its hint says, or all of it is refused.
#
# What another process wrote may have a text in the place of a number, or a number that is none, and comes from another
# version or from somebody with a grudge: none of that must reach a view or a rule.  Does not read files.


LARGEST = 2**53  # of a number: below it a float is exact, and as a time it is a date that can be shown

_checks: dict[tuple[type, bool], dict[str, Callable[[Any], Any]]] = {}


def noun(kind: type, packed: object, *, exact: bool = False) -> Any:
    """A *kind* with these fields.

    Args:
        kind: a noun with hints that are written as texts.
        packed: its fields by name.
        exact: refuse names that it does not have; else a later version has added them, and they are left out.

    Raises:
        ValueError: a field is not what it should be, or is missing.
    """
    if not isinstance(packed, dict):
        raise ValueError(f"a {kind.__name__} is none")
    key = kind, exact
    checks = _checks.get(key) or _checks.setdefault(key, {n: _check(h, key) for n, h in kind.__annotations__.items()})
    fields = {}
    for name, value in packed.items():
        if name not in checks:
            if exact:
                raise ValueError(f"a {kind.__name__} has no {name:.60}")
            continue
        try:
            fields[name] = checks[name](value)
        except TypeError:
            raise ValueError(f"{name} of a {kind.__name__} cannot be {value!r:.60}") from None
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _check(hint: str, key: tuple[type, bool]) -> Callable[[Any], Any]:
    """What gives a value of that hint as the field has it, and raises TypeError where it is none."""
    if hint.endswith(" | None"):
        inner = _check(hint.removesuffix(" | None"), key)
        return lambda value: None if value is None else inner(value)
    if hint.startswith("tuple["):
        parts = _parts(hint[len("tuple[") : -1])
        checks = [_check(part, key) for part in parts if part != "..."]
        return _several(checks[0]) if parts[-1] == "..." else _each(checks)
    if hint in _PLAIN:
        return _PLAIN[hint]
    kind, exact = key
    inside = vars(sys.modules[kind.__module__]).get(hint)
    return (lambda value: noun(inside, value, exact=exact)) if isinstance(inside, type) else _nothing


def _parts(text: str) -> list[str]:
    """["tuple[int, str]", "..."] of "tuple[int, str], ..."."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _several(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: tuple([check(one) for one in _list(value)])


def _each(checks: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if len(_list(value)) != len(checks):
            raise TypeError
        return tuple([each(one) for each, one in zip(checks, value, strict=True)])

    return check


def _list(value: Any) -> Any:
    if type(value) not in (list, tuple):
        raise TypeError
    return value


def _exactly(*kinds: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError
        return value

    return check


def _number(*kinds: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) not in kinds or not abs(value) <= LARGEST:  # nor is NaN
            raise TypeError
        return value

    return check


def _nothing(value: Any) -> Any:
    raise TypeError(value)


_PLAIN = {"str": _exactly(str), "bool": _exactly(bool), "int": _number(int), "float": _number(int, float)}
