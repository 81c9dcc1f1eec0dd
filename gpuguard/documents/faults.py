"""What is wrong with a file, and where.  Finds nothing itself: see yaml_nodes and decoding."""

from __future__ import annotations

from dataclasses import dataclass

from gpuguard.text import display_width, neutralise

LARGEST = 64 * 1024  # bytes: the longest policy file that we have seen has 6 KiB
_WIDTH = 110  # characters of a line that are shown of it


@dataclass(frozen=True)
class Fault:
    """What is wrong at one place of a file; line and column count from 1, 0 for a fault of the file as a whole."""

    line: int
    column: int
    text: str
    hint: str = ""
    excerpt: str = ""  # the line itself

    def lines(self, path: str) -> list[str]:
        """``path:line:column: text``, the line with a caret under it, and the hint."""
        place = f"{path}:{self.line}:{self.column}" if self.line else path
        found = [neutralise(f"{place}: {self.text}")]
        if self.excerpt:
            cut = max(0, self.column - 1 - _WIDTH // 2) if len(self.excerpt) > _WIDTH else 0
            before = ("…" if cut else "") + neutralise(self.excerpt[cut : self.column - 1])
            behind = neutralise(self.excerpt[self.column - 1 : cut + _WIDTH])
            found += [
                f"  {before}{behind}{'…' * (len(self.excerpt) > cut + _WIDTH)}",
                f"  {' ' * display_width(before)}^",
            ]
        return [*found, f"  {neutralise(self.hint)}"] if self.hint else found
