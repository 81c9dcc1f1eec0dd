"""The one place where JSON is read: what strangers wrote may be nested only so deeply.

Python's parser goes down one frame of the C stack with each bracket.  A thread has 128 KiB of it with musl, where
1,000 brackets end the process, whatever it was guarding; 1 MiB ends after 9,000 with Python 3.13.  So brackets are
counted before the parser sees them.

Does not write.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
