"""The part of the screen of `gpuguard top` that shows lines of parts, and what their styles look like there."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from gpuguard.views.bars import fitted
from gpuguard.views.text import neutralise
from gpuguard.views.top_scene import Line

DARK = {
    "red": "#ff6b6b",
    "green": "#5fd787",
    "yellow": "#ffd75f",
    "cyan": "#5fd7ff",
    "dim": "#8a8a8a",
    "faint": "#5a5a5a",
}
LIGHT = {
    "red": "#c00000",
    "green": "#007a30",
    "yellow": "#8a5a00",
    "cyan": "#00608a",
    "dim": "#6a6a6a",
    "faint": "#a0a0a0",
}


class Board(ScrollView, can_focus=False):
    """Lines of parts, drawn as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.colours: dict[str, str] | None = DARK

    def show(self, lines: list[Line], width: int) -> None:
        """Draw those of *lines* that are new: most of a page is as it was a second ago."""
        size, before = Size(width, len(lines)), self.lines
        self.lines = lines
        if size != self.virtual_size:
            self.virtual_size = size
            self.refresh()
            return
        top, height = self.scroll_offset.y, self.size.height
        shown = slice(top, top + height)
        changed = [y for y, (old, new) in enumerate(zip(before[shown], lines[shown], strict=True)) if old != new]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        """One row of the screen."""
        place = y + self.scroll_offset.y
        if place >= len(self.lines):
            return Strip.blank(self.size.width, self.rich_style)
        strip = Strip([Segment(text, rich_style(style, self.colours)) for text, style in self.lines[place].parts])
        left = self.scroll_offset.x
        return strip.crop(left, left + self.size.width).extend_cell_length(self.size.width).apply_style(self.rich_style)


def rich_style(names: str, colours: dict[str, str] | None) -> Style:
    """ "bold red" in the colours of the theme; None: without any."""
    words = names.split()
    colour = next((colours[word] for word in words if word in colours), None) if colours else None
    return Style(color=colour, bold="bold" in words, dim=not colours and "dim" in words, reverse="reverse" in words)


def rich_text(line: Line, colours: dict[str, str] | None) -> Text:
    """*line* as rich has it."""
    text = Text(no_wrap=True)
    for words, style in line.parts:
        text.append(words, rich_style(style, colours))
    return text


def plain_text(words: str, width: int) -> Text:
    """*words*, made neutral, in exactly *width* columns."""
    return Text(fitted([(neutralise(words), "")], width)[0][0], no_wrap=True)
