"""Text for terminals: paragraphs and colours; and JSON.  Their tables are those of gpuguard.tables.

Text from strangers passes the neutraliser of gpuguard.sanitize first.  Does not read anything.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from gpuguard.locale.messages import with_ids
from gpuguard.sanitize import display_width
from gpuguard.tables import shorten

Paint = Callable[[str, str], str]  # (text, "red" or "bold red") -> text

_COLOURS = {
    "red": "31", "green": "32", "yellow": "33", "cyan": "36", "bold": "1", "dim": "2", "faint": "2", "reverse": "7",
}  # fmt: skip


# A word, or a Chinese character with the punctuation that may not begin or end a line.
_WORD = r"[（「《“]*[\u2e80-\u9fff\uff00-\uffef][，。：；、！？）」》”…]*|[^\s\u2e80-\u9fff\uff00-\uffef]+|\s+"


def wrapped(text: str, width: int) -> list[str]:
    """Return *text*, one paragraph, in lines of at most *width* columns; Chinese breaks between any two characters."""
    lines = [""]
    for word in re.findall(_WORD, text):
        if lines[-1] and display_width(lines[-1] + word.rstrip()) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += word if lines[-1] else word.lstrip()
    return lines


def folded(text: str, indent: str, width: int | None) -> list[str]:
    """Return *text* in lines of at most *width* columns; a single word that is longer is shortened."""
    if width is None:
        return [indent + text]
    return [shorten(indent + line, width) for line in wrapped(text, width - display_width(indent))]


def style(stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> Paint:
    """Return a function (text, "red" or "bold red") -> text that colours only if *stream* (None: stdout) is a terminal.

    https://no-color.org: a NO_COLOR that is not empty switches colours off.
    """
    if not (stream or sys.stdout).isatty() or environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return lambda text, _: text

    def painted(text: str, names: str) -> str:
        codes = ";".join(_COLOURS[name] for name in names.split())
        return f"\x1b[{codes}m{text}\x1b[0m" if codes else text

    return painted


def put(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Print *lines* at once, even into a pipe; what the encoding of *stream* (None: stdout) lacks is escaped."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write("".join(f"{line}\n" for line in lines).encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def put_json(content: Mapping[str, Any], indent: int | None = 2) -> None:
    """Print *content* as one JSON object."""
    put([json_text(content, indent)])


def picked(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of *value* for JSON, where a name has its unit: "power_draw_watts" is value.power_draw."""
    return {name: getattr(value, name if hasattr(value, name) else name.rpartition("_")[0]) for name in names}


def json_text(content: Mapping[str, Any], indent: int | None = 2) -> str:
    """Return *content* as one JSON object in ASCII, valid for every reader: bytes that are no text become U+FFFD."""
    return json.dumps(_valid(with_ids(content)), indent=indent, ensure_ascii=True, allow_nan=False)


def _valid(content: Any) -> Any:
    if isinstance(content, str):
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in content)
    if isinstance(content, Mapping):
        return {_valid(key): _valid(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_valid(value) for value in content]
    return content
