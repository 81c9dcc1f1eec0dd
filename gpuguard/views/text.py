"""Text for terminals: a table printer, colours, JSON.

What strangers wrote passes the neutraliser of gpuguard.sanitize first.  Does not read anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuguard.sanitize import columns_of
from gpuguard.sanitize import display_width as display_width
from gpuguard.sanitize import neutral_command as neutral_command
from gpuguard.sanitize import neutralise as neutralise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any, TextIO

    Paint = Callable[[str, str], str]
else:
    Paint = object

_COLOURS = {
    "red": "31", "green": "32", "yellow": "33", "cyan": "36", "bold": "1", "dim": "2", "faint": "2", "reverse": "7",
}  # fmt: skip


def shorten(text: str, width: int) -> str:
    """*text*, or its beginning and ``…``, so that it takes at most *width* columns."""
    if display_width(text) <= width:
        return text
    used, kept = 1, []
    for character in text:
        used += columns_of(character)
        if used > width:
            break
        kept.append(character)
    return ("".join(kept) + "…") if width > 0 else ""


def table(
    rows: Iterable[Sequence[str]],
    headers: Sequence[str] | None = None,
    *,
    align: str = "",
    width: int | None = None,
    paint: Callable[[str, int], str] | None = None,
) -> list[str]:
    """Lines with the columns of *rows* under each other, two spaces between them.

    Args:
        rows: neutral text, one sequence per row, all of one length.
        headers: a first row, never painted.
        align: ``<`` or ``>`` per column; left where it is too short.
        width: columns of the terminal; the last column is shortened to fit.  None (a pipe): nothing is.
        paint: puts colour on a cell: (padded cell, its column) -> cell.
    """
    body = [list(row) for row in rows]
    whole = ([list(headers)] if headers else []) + body
    if not whole:
        return []
    widths = [max(map(display_width, column)) for column in zip(*whole, strict=True)]
    lines = []
    for number, row in enumerate(whole):
        colour = paint if number or not headers else None
        lines.append(_line(row, widths, align, width, colour))
    return lines


def _line(
    row: list[str], widths: list[int], align: str, width: int | None, paint: Callable[[str, int], str] | None
) -> str:
    left, cells, last = width, [], max((place for place, cell in enumerate(row) if cell), default=0)
    for place, cell in enumerate(row[: last + 1]):
        right = align[place : place + 1] == ">"
        # No blanks at the end of a line: they wrap on a terminal, and show up in a diff.
        padded = cell if place == last and not right else _padded(cell, widths[place], right)
        if left is not None:
            padded = shorten(padded, left)
            left = max(0, left - widths[place] - 2)
        cells.append(paint(padded, place) if paint else padded)
        if left == 0:
            break
    return "  ".join(cells)


def style(stream: TextIO, environ: Mapping[str, str]) -> Paint:
    """A function (text, "red" or "bold red") -> text that colours on a terminal, and nowhere else.

    https://no-color.org: NO_COLOR, when it is not empty, switches colours off.
    """
    if not stream.isatty() or environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return lambda text, _: text

    def painted(text: str, names: str) -> str:
        codes = ";".join(_COLOURS[name] for name in names.split())
        return f"\x1b[{codes}m{text}\x1b[0m" if codes else text

    return painted


def put(lines: Iterable[str], stream: TextIO) -> None:
    """Print *lines* at once, also into a pipe; what the encoding of *stream* lacks is written out, and never fails."""
    stream.write(writable("".join(f"{line}\n" for line in lines), stream))
    stream.flush()


def writable(text: str, stream: TextIO) -> str:
    """*text* in what the encoding of *stream* has."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def json_text(content: Mapping[str, Any], indent: int | None = 2) -> str:
    """*content* as one JSON object in ASCII, valid for every reader: bytes that are no text become U+FFFD."""
    import json

    return json.dumps(_valid(content), indent=indent, ensure_ascii=True, allow_nan=False)


def _valid(content: Any) -> Any:
    from collections.abc import Mapping

    if isinstance(content, str):
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in content)
    if isinstance(content, Mapping):
        return {_valid(key): _valid(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_valid(value) for value in content]
    return content


def _padded(cell: str, width: int, right: bool) -> str:
    blanks = " " * (width - display_width(cell))
    return blanks + cell if right else cell + blanks
