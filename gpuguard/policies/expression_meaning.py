"""What the parts of an expression mean: which types go together, and what comes out.

A part has been checked when it is made; its value then cannot raise.  None = unknown.  Reads no text: see
expression_language.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gpuguard.policies.expression_names import EXAMPLES, LONGEST_TEXT, NUMBER, TEXT, TEXTS, TRUTH, Place, Value
from gpuguard.policies.expression_tokens import Word, fault

ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
EQUALITY = {"==": operator.eq, "!=": operator.ne}
_ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

Evaluate = Callable[[Place], Value]


@dataclass(frozen=True)
class Part:
    """A part of an expression: its type, where it begins, its value."""

    type: str
    word: Word
    value: Evaluate


def compared(left: Part, sign: Word, right: Part) -> Part:
    """The comparison of two parts of one type."""
    if sign.text in ORDER and left.type in (TEXT, TEXTS, TRUTH):
        raise fault(sign.column, f"{sign.text} is for amounts, and {left.word.text} is a {left.type}.")
    if left.type != right.type:
        raise fault(right.word.column, _mismatch(left, right))
    if left.type in (TEXTS, TRUTH):
        raise fault(sign.column, f"{left.word.text} is a {left.type}: write {_other_way(left)}.")
    compare: Callable[..., bool] = {**ORDER, **EQUALITY}[sign.text]
    known: Callable[[Value], Value] = _known_text if left.type == TEXT else _known_number

    def value(place: Place) -> Value:
        first, second = known(left.value(place)), known(right.value(place))
        return None if first is None or second is None else compare(first, second)

    return Part(TRUTH, left.word, value)


def calculated(left: Part, sign: Word, right: Part) -> Part:
    """Sum, difference, product or quotient; unknown when it is no finite number."""
    for part in (left, right):
        if part.type in (TEXT, TEXTS, TRUTH):
            raise fault(part.word.column, f"nothing can be calculated with {part.word.text}, a {part.type}.")
    if sign.text in "+-" and left.type != right.type:
        raise fault(right.word.column, _mismatch(left, right))
    kind = left.type
    if sign.text == "*" and NUMBER not in (left.type, right.type):
        raise fault(sign.column, f"a {left.type} times a {right.type} makes no sense.")
    if sign.text == "*" and left.type == NUMBER:
        kind = right.type
    if sign.text == "/" and right.type != NUMBER:
        if left.type != right.type:
            raise fault(right.word.column, _mismatch(left, right))
        kind = NUMBER

    def value(place: Place) -> Value:
        first, second = _known_number(left.value(place)), _known_number(right.value(place))
        if first is None or second is None or (sign.text == "/" and second == 0):
            return None
        return _known_number(_ARITHMETIC[sign.text](first, second))

    return Part(kind, left.word, value)


def _mismatch(left: Part, right: Part) -> str:
    for bare, other in ((right, left), (left, right)):
        if bare.word.kind == "number" and bare.type == NUMBER and other.type in EXAMPLES:
            return f"{bare.word.text} has no unit: write a {other.type}, like {EXAMPLES[other.type]}."
    return f"{right.word.text} is a {right.type}, and {left.word.text} is a {left.type}: they cannot be compared."


def _other_way(part: Part) -> str:
    if part.type == TEXTS:
        return f"'alice' in {part.word.text}"
    return f"{part.word.text}, or not {part.word.text}" if part.word.kind == "name" else "it without a comparison"


def must_be_truth(part: Part) -> None:
    """A fault unless *part* is a condition."""
    if part.type != TRUTH:
        raise fault(part.word.column, f"{part.word.text} is a {part.type}, not a condition: compare it with something.")


def join(keyword: str, values: list[Evaluate]) -> Evaluate:
    """The truths *values*, joined by "and" or "or"."""
    decisive = keyword == "or"  # one true decides an "or", one false an "and", whatever is unknown

    def value(place: Place) -> Value:
        known: Value = not decisive
        for evaluate in values:
            one = evaluate(place)
            if one is decisive:
                return decisive
            known = None if one is None else known
        return known

    return value


def opposite(value: Evaluate) -> Evaluate:
    """Not *value*; what is unknown has an unknown opposite."""
    return lambda place: None if (found := value(place)) is None else not found


def is_in(one: Value, several: Value) -> Value:
    """Whether *one* is among *several*."""
    if one is None or not isinstance(several, frozenset):
        return None
    return one in several


def is_like(text: Value, glob: str) -> Value:
    """Whether *text* matches *glob*, which the admin wrote; the text is its user's."""
    return fnmatchcase(text[:LONGEST_TEXT], glob) if isinstance(text, str) else None


def _known_text(value: Value) -> str | None:
    return value if isinstance(value, str) else None


def _known_number(value: Value) -> float | None:
    """As a float, so that nothing grows without end; None unless it is a number, and finite."""
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
