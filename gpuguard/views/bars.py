"""Bars, sparklines and alarm colours: numbers as pictures of one line.

A part is (text, style name); style names are those of views.text, joined by blanks, and "" is plain.
An unknown number has no bar, no place in a sparkline and no colour.  Knows nothing of devices: see top_devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuguard.views.text import display_width, shorten

Part = tuple[str, str]

_EIGHTHS = " ▏▎▍▌▋▊▉"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_ASCII_HEIGHTS = "_.,-=+*#"


def bar(share: float | None, width: int, colour: str, *, ascii_only: bool = False) -> list[Part]:
    """A bar of *width* columns of which *share* (0..1) is filled."""
    if share is None:
        return [(("-" if ascii_only else "╌") * width, "faint")]
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)  # a little is not nothing
    full, rest = divmod(eighths, 8)
    if ascii_only:
        filled = min(width, full + (rest >= 4 or not full) * bool(eighths))
        return [("#" * filled, colour), ("." * (width - filled), "faint")]
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    return [(text, colour), ("░" * (width - len(text)), "faint")]


def sparkline(values: Iterable[float | None], width: int, top: float, *, ascii_only: bool = False) -> str:
    """The last *width* of *values* as heights between 0 and *top*, the newest at the right; a blank where unknown."""
    heights = _ASCII_HEIGHTS if ascii_only else _HEIGHTS
    last = list(values)[-width:] if width > 0 else []
    drawn = [
        " " if value is None or top <= 0 else heights[min(7, max(0, int(value / top * 8)))]  # 8 steps
        for value in last
    ]
    return "".join(drawn).rjust(max(0, width))


def alarm(value: float | None, warn: float | None, bad: float | None, calm: str = "green") -> str:
    """The colour of *value*: red from *bad* on, yellow from *warn* on; an unknown limit gives no alarm."""
    if value is None:
        return "dim"
    if bad is not None and value >= bad:
        return "bold red"
    return "yellow" if warn is not None and value >= warn else calm


def fitted(parts: Sequence[Part], width: int) -> list[Part]:
    """*parts* in exactly *width* columns: filled up with blanks or shortened."""
    found: list[Part] = []
    left = width
    for text, style in parts:
        if display_width(text) > left:
            found.append((shorten(text, left), style))
            left -= display_width(found[-1][0])
            break
        found.append((text, style))
        left -= display_width(text)
    return [*found, (" " * left, "")] if left > 0 else found
