"""json.loads() without its import, which is most of what `gpuguard who` would take: records and the daemon's state.

`import json` compiles regular expressions and loads `re`: 5 ms, while the parser that does the work is built in.  Where
Python has no such parser, or json is loaded already, json does it.  Does not write.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing costs 6 ms of import
if TYPE_CHECKING:
    from typing import Any


class _Rules:
    """What json.loads() says to the parser."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def loads(encoded: bytes) -> Any:
    """The value of one JSON text in UTF-8.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    scan = None if "json" in sys.modules else _scanner()
    if scan is None:
        import json

        return json.loads(encoded)
    text = encoded.decode("utf-8", "surrogatepass").strip(" \t\n\r")
    try:
        value, end = scan(text, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("more than one JSON value")
    return value


def _scanner() -> Any:
    try:
        from _json import make_scanner
    except ImportError:
        return None
    return make_scanner(_Rules)  # type: ignore[arg-type]  # any object with these attributes will do
