"""The one place where JSON and stored records become values: bounded in depth, finite, each field of its type.

Data from another process may come from another version, from a program that was killed, or from a user who wants to do
harm: text in place of a number must not reach a view or a rule.  Does not open or write files: see files.
"""

from __future__ import annotations

import json
import math
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from gpuguard.locale.messages import MESSAGE_IDS, Sentence, with_sentences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeVar

    T = TypeVar("T")

DEEPEST = 100  # nested brackets; our own files have 8
LARGEST = 2**53  # the largest number: below it a float is exact, and a time is a date that can be shown

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def loads(encoded: bytes, deepest: int = DEEPEST) -> Any:
    """Parse one JSON text in UTF-8, with its sentences; NaN, Infinity and numbers beyond a float are refused.

    Raises ValueError if it is not such a text, or is nested more deeply than *deepest* brackets.
    """
    # Python's parser takes one frame of the C stack for each bracket.  With musl a thread has 128 KiB of stack, where
    # 1,000 brackets end the process; with Python 3.13, 9,000 use up 1 MiB.  So they are counted before it runs.
    if encoded.count(b"[") + encoded.count(b"{") > deepest:
        # JSON has no backslash outside of strings.  A parser stops at the first one, so the text behind it is ignored.
        strings = encoded.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        brackets = b"".join(strings[::2]).translate(_BRACKETS, _OTHERS)
        for _ in range(deepest):
            brackets = brackets.replace(b"[]", b"")
        if brackets:  # or they are not in pairs, and then it is not JSON either
            raise ValueError("it is nested too deeply")
    content = _DECODER.decode(encoded.decode("utf-8", "surrogatepass"))
    ids = content.pop(MESSAGE_IDS, None) if isinstance(content, dict) else None
    return with_sentences(content, ids) if ids else content


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word:.40} is no number, or is too large")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def decode(kind: type[T], packed: object, *, exact: bool = False) -> T:
    """Make a *kind* from these fields, each checked against its type hint.

    Args:
        kind: a dataclass; its hints are str, bool, int, float, other such dataclasses, X | None, and tuples, lists,
            frozensets or dictionaries of them.  A list of JSON becomes the tuple or frozenset of the hint.
        packed: its fields by name, as JSON has them.
        exact: refuse names that *kind* does not have; otherwise they are left out, as a later version has added them.

    Raises:
        ValueError: a field is not what it should be, or is missing.
    """
    if not isinstance(packed, dict):
        raise ValueError(f"this is no {kind.__name__}")
    readers = _readers(kind, exact)  # type: ignore[arg-type]  # mypy takes a type[T] for unhashable
    fields = {}
    for name, value in packed.items():
        if name in readers:
            fields[name] = _field(kind, name, readers[name], value)
        elif exact:
            raise ValueError(f"a {kind.__name__} has no {name:.60}")
    try:
        return kind(**fields)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def sound_fields(kind: type, packed: object, names: Iterable[str]) -> dict[str, Any]:
    """Those of the named fields of a *kind* that are there and of the right type, for documents that count in part."""
    readers, fields = _readers(kind, False), {}
    for name in names:
        if isinstance(packed, dict) and name in packed:
            try:
                fields[name] = _field(kind, name, readers[name], packed[name])
            except ValueError:
                continue
    return fields


def _field(kind: type, name: str, read: Callable[[Any], Any], value: object) -> Any:
    try:
        return read(value)
    except TypeError:
        raise ValueError(f"{name} of a {kind.__name__} cannot be {value!r:.60}") from None


@cache
def _readers(kind: type, exact: bool) -> Mapping[str, Callable[[Any], Any]]:
    return {name: _reader(hint, exact) for name, hint in get_type_hints(kind).items()}


@cache  # 60 fields of a device have six hints
def _reader(hint: Any, exact: bool) -> Callable[[Any], Any]:
    """Return a function that turns a JSON value into one of that type hint, or raises TypeError if it is none."""
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return _first_of([_reader(each, exact) for each in arguments if each is not NoneType], NoneType in arguments)
    if get_origin(hint) is tuple and arguments[-1] is not ...:
        return _row([_reader(each, exact) for each in arguments])
    if get_origin(hint) in (tuple, list, frozenset):
        make, item = get_origin(hint), _reader(arguments[0], exact)
        return lambda value: make([item(each) for each in _checked(value, list, tuple)])
    if get_origin(hint) is dict:
        item = _reader(arguments[1], exact)
        return lambda value: {_checked(key, str): item(each) for key, each in _checked(value, dict).items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: decode(hint, value, exact=exact)
    if hint is int or hint is float:
        return lambda value: _number(value, *((int, float) if hint is float else (int,)))
    kinds = (hint,) if hint in (str, bool) else ()  # JSON has no values of any other type
    return lambda value: _checked(value, *kinds)


def _first_of(readers: list[Callable[[Any], Any]], optional: bool) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        for reader in readers[:-1]:
            try:
                return reader(value)
            except TypeError:
                continue
        return readers[-1](value)

    return read


def _row(readers: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if len(_checked(value, list, tuple)) != len(readers):
            raise TypeError
        return tuple([reader(item) for reader, item in zip(readers, value, strict=True)])

    return read


def _checked(value: Any, *kinds: type) -> Any:
    """Return *value* if it is exactly of one of *kinds*: True is no number.  A sentence is a text."""
    if type(value) not in kinds and not (str in kinds and isinstance(value, Sentence)):
        raise TypeError
    return value


def _number(value: Any, *kinds: type) -> Any:
    if not abs(_checked(value, *kinds)) <= LARGEST:  # this is the case for NaN as well
        raise TypeError
    return value
