"""Values by a key that several of them share, as lists or as sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of *pairs* (key, value) by their keys; keys and values keep their order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def summed(pairs: Iterable[tuple[Key, Number]]) -> dict[Key, Number]:
    """Return the sum of the numbers of *pairs* (key, number) by their keys, which keep their order."""
    return {key: sum(numbers) for key, numbers in grouped(pairs).items()}
