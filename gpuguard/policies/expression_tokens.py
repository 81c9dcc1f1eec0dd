"""The words of an expression, each with its column.  No number is so long, and no text so odd, that it matters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gpuguard.errors import InvalidRequest
from gpuguard.policies.expression_names import (
    BYTES,
    CELSIUS,
    EXAMPLES,
    NUMBER,
    PERCENT,
    RATE,
    SECONDS,
    TEXT,
    WATTS,
    Value,
)
from gpuguard.units import parse_bytes, parse_celsius, parse_duration, parse_watts

LONGEST = 1000  # characters of an expression
MOST = 200  # words

_WORD = re.compile(
    r"""(?P<blank>[ \t\n]+)
      | (?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>(?:[A-Za-z%°][A-Za-z%°0-9.]*(?:/s)?)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<text>'[^'\\\n]*'|"[^"\\\n]*")
      | (?P<sign><=|>=|==|!=|<|>|\+|-|\*|/|\(|\)|\[|\]|,)""",
    re.VERBOSE,
)
_UNITS: dict[str, Callable[[str], float]] = {  # type -> reader of number and unit together
    BYTES: parse_bytes, PERCENT: lambda text: float(text.rstrip("%")), SECONDS: parse_duration,
    CELSIUS: parse_celsius, WATTS: parse_watts, RATE: lambda text: parse_bytes(text[:-2]),
}  # fmt: skip
_FORMS = {
    BYTES: r"[kKMGT]?i?B", PERCENT: r"%", SECONDS: r"(ms|[smhdw])([0-9.]+(ms|[smhdw]))*", CELSIUS: r"°?C",
    WATTS: r"[mk]?W", RATE: r"[kKMGT]?i?B/s",
}  # fmt: skip
_ADVICE = {
    "=": "== compares", "&": "write: and", "|": "write: or", "!": "write: not", ";": "an expression is one condition",
    "'": "a text ends with the quote that it began with, and has no \\ in it", "**": "there is no power",
    "//": "write /", ".": "a name has no parts", "{": "lists stand in ( )", "`": "texts stand in ' '",
}  # fmt: skip


@dataclass(frozen=True)
class Word:
    """One word.  kind: number (with a unit, or without), text, name, sign, end."""

    kind: str
    text: str
    column: int  # from 1 on
    type: str = ""  # of numbers and texts
    value: Value = None


def fault(column: int, text: str) -> InvalidRequest:
    """What is wrong, and where."""
    return InvalidRequest(f"column {column}: {text}")


def words(expression: str) -> list[Word]:
    """The words of *expression*, an end behind them.

    Raises:
        InvalidRequest: with the column of what cannot be read.
    """
    if len(expression) > LONGEST:
        raise fault(LONGEST, f"an expression has at most {LONGEST} characters, this one {len(expression)}.")
    found: list[Word] = []
    place = 0
    while place < len(expression):
        match = _WORD.match(expression, place)
        if match is None:
            raise _unreadable(expression, place)
        if match.lastgroup != "blank":
            found.append(_word(match, place + 1))
        if len(found) > MOST:
            raise fault(place + 1, f"an expression has at most {MOST} words.")
        place = match.end()
    return [*found, Word("end", "the end", place + 1)]


def _word(match: re.Match[str], column: int) -> Word:
    text = match[0]
    if match["number"]:
        return _number(match["number"], match["unit"], column)
    if match["text"]:
        return Word("text", text, column, TEXT, text[1:-1])
    return Word("name" if match["name"] else "sign", text, column)


def _number(digits: str, unit: str, column: int) -> Word:
    whole, _, part = digits.partition(".")
    if len(whole) > 15 or len(part) > 9:
        raise fault(column, "a number has at most 15 digits, and 9 behind the point.")
    if len(whole) > 1 and whole[0] == "0":
        raise fault(column, f"{digits} begins with 0: write {whole.lstrip('0') or '0'}.")
    if not unit:
        return Word("number", digits, column, NUMBER, float(digits))
    for kind, form in _FORMS.items():
        if re.fullmatch(form, unit):
            try:
                return Word("number", digits + unit, column, kind, float(_UNITS[kind](digits + unit)))
            except InvalidRequest as error:
                raise fault(column, str(error)) from error
    raise fault(column, f"{unit!r} is no unit: write an amount like {', '.join(EXAMPLES.values())}.")


def _unreadable(expression: str, place: int) -> InvalidRequest:
    advice = next((advice for start, advice in _ADVICE.items() if expression.startswith(start, place)), None)
    if expression[place] == '"':
        advice = _ADVICE["'"]
    return fault(place + 1, f"{expression[place]!r} has no meaning here{': ' + advice if advice else ''}.")
