"""Snapshots as plain JSON values and back; what comes from a file is checked field by field.

A recording may come from anybody: a text where a number should be must not reach a view or a rule.
"""

from __future__ import annotations

import inspect

from gpuguard.errors import BackendError
from gpuguard.model import ClaimRecord, Device, Gap, GpuProcess, Snapshot
from gpuguard.nouns import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_INSIDE = {f"tuple[{kind.__name__}, ...]": kind for kind in (GpuProcess, Device, Gap, ClaimRecord)}


def pack(noun: object) -> dict[str, Any]:
    """A noun of the model as plain values, without those that are what they are when nobody says anything."""
    kind = type(noun)
    return {name: _plain(value) for name, value in vars(noun).items() if value != getattr(kind, name, _NOTHING)}


_NOTHING = object()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return pack(value) if type(value) in _INSIDE.values() else value


def unpack(packed: object) -> Snapshot:
    """The snapshot that pack() made plain, as one of another time.  Raises BackendError."""
    snapshot: Snapshot = _noun(Snapshot, packed)
    return replace(snapshot, recorded=True)


def _noun(kind: type, packed: object) -> Any:
    if not isinstance(packed, dict):
        raise BackendError(f"a {kind.__name__} of this recording is none.")
    values = {}
    annotations = inspect.get_annotations(kind)
    for name, value in packed.items():
        if name not in annotations:
            continue  # of a later version, which only adds
        try:
            values[name] = _checked(annotations[name], value)
        except (ValueError, TypeError, KeyError):
            raise BackendError(f"{name} of a {kind.__name__} of this recording cannot be {value!r:.60}.") from None
    try:
        return kind(**values)
    except TypeError as error:
        raise BackendError(f"this recording lacks something: {error}.") from None


def _checked(annotation: str, value: Any) -> Any:
    if value is None and annotation.endswith("| None"):
        return None
    expected = annotation.removesuffix(" | None")
    if expected in _INSIDE:
        return tuple(_noun(_INSIDE[expected], one) for one in _list(value))
    return _TYPES[expected](value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def _exactly(*kinds: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) not in kinds or (type(value) is float and value - value != 0):  # inf and nan
            raise TypeError
        return value

    return check


def _tuple_of(*checks: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of any length when there is one check, else of exactly that many."""

    def check(value: Any) -> Any:
        items = _list(value)
        if len(checks) == 1:
            return tuple(checks[0](one) for one in items)
        return tuple(each(one) for each, one in zip(checks, items, strict=True))

    return check


_TEXT, _WHOLE, _NUMBER = _exactly(str), _exactly(int), _exactly(int, float)
# By annotation, as it is written in model.py.
_TYPES: dict[str, Callable[[Any], Any]] = {
    "str": _TEXT,
    "int": _WHOLE,
    "float": _NUMBER,
    "bool": _exactly(bool),
    "tuple[str, ...]": _tuple_of(_TEXT),
    "tuple[int, ...]": _tuple_of(_WHOLE),
    "tuple[tuple[int, str], ...]": _tuple_of(_tuple_of(_WHOLE, _TEXT)),
    "tuple[tuple[str, str, str], ...]": _tuple_of(_tuple_of(_TEXT, _TEXT, _TEXT)),
}
