"""The one place where JSON is read: what strangers wrote may be nested only so deeply, and it costs no import.

Python's parser goes down one frame of the C stack with each bracket.  A thread has 128 KiB of it with musl, where
1,000 brackets end the process, whatever it was guarding; 1 MiB ends after 9,000 with Python 3.13.  So brackets are
counted before the parser sees them.

`import json` compiles regular expressions and loads `re`: 5 ms, while the parser that does the work is built in.  Where
Python has no such parser, or json is loaded already, json does it.  Does not write.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing costs 6 ms of import
if TYPE_CHECKING:
    from typing import Any

DEEPEST = 100  # our own files have 8
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


class _Rules:
    """What json.loads() says to the parser."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    array_hook = None  # since Python 3.15
    parse_float = float
    parse_int = int
    parse_constant = float


def loads(encoded: bytes) -> Any:
    """The value of one JSON text in UTF-8.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    text = shallow(encoded)
    scan = None if "json" in sys.modules else _scanner()
    if scan is None:
        import json

        return json.loads(text)
    text = text.strip(" \t\n\r")
    try:
        value, end = scan(text, 0)
    except (StopIteration, SystemError):  # the latter before Python 3.12: its own error is one of json, not loaded here
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("more than one JSON value")
    return value


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


def _scanner() -> Any:
    try:
        from _json import make_scanner

        return make_scanner(_Rules)  # type: ignore[arg-type]  # any object with these attributes will do
    except (ImportError, AttributeError):  # a later Python may want to be told more
        return None
