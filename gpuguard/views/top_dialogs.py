"""What opens over the screen of `gpuguard top`: help, the filter, a signal with its confirmation, pages of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from gpuguard.byhand import BY_HAND

HELP = """\
  ↑ ↓ j k PgUp PgDn End  choose a process; or click it
  Home                   to the top, choose nobody
  ← →                    sideways, through long command lines
  /                      filter: words, user:NAME, gpu:0,1
  s  S  r                sort by the next, the one before, reversed;
                         or click a heading
  u                      only my processes, all processes
  t                      processes below their parents
  m                      lines per GPU: auto, full, compact
  c                      no desktop processes
  Enter                  the chosen process over time
  e                      its environment (your own processes)
  x                      signal it, after a question (your own;
                         root: those of people)
  f                      ask the driver, or show what the daemon saw
  a  l                   ASCII; light or dark
  Ctrl-P                 hold the screen, and go on
  q  Ctrl-C              leave

Memory is blue, work is green.  Yellow: near a limit; red: at it.
Limits are the temperature at which a device slows down and its
power limit, or what the site's policies say, where you may read
them.  n/a: not known.  A red ! or "no claim": used unclaimed.
"""


class Pages(ModalScreen[None]):
    """A page of text, read anew every second as long as it is open."""

    BINDINGS: ClassVar = [Binding("escape,q,enter,question_mark", "dismiss", "close")]

    def __init__(self, heading: str, text: Callable[[int], str], reveal: Callable[[int], str] | None = None) -> None:
        super().__init__()
        self._heading, self._text, self._reveal = heading, text, reveal

    def compose(self) -> ComposeResult:
        """The frame."""
        with Vertical(id="box"):
            yield Static(Text(self._heading, style="bold"), id="heading")
            with VerticalScroll():
                yield Static(id="body")
            more = "   v shows what is hidden" if self._reveal else ""
            yield Static(Text(f"Esc closes{more}", style="dim"), id="foot")

    def on_mount(self) -> None:
        """Fill it."""
        self.call_after_refresh(self.fill)
        self.set_interval(1.0, self.fill)

    def fill(self) -> None:
        """The text of now."""
        body = self.query_one("#body", Static)
        body.update(Text(self._text(max(20, self.query_one(VerticalScroll).size.width - 2))))

    def key_v(self) -> None:
        """Show what is hidden."""
        if self._reveal:
            self._text, self._reveal = self._reveal, None
            self.fill()


class Filter(ModalScreen[str | None]):
    """Asks for words."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss", "keep the old one")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """A line at the bottom."""
        yield Input(self._text, placeholder="words, user:NAME, gpu:0,1 (empty: all; Esc: as before)", id="filter")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter."""
        self.dismiss(event.value)


class Signal(ModalScreen[str | None]):
    """Asks which signal, then whether that is meant; its answer is one of BY_HAND."""

    BINDINGS: ClassVar = [Binding("escape,q,n", "dismiss", "nothing")]
    KEYS: ClassVar = {"t": "terminate", "k": "kill", "p": "pause", "c": "resume"}

    def __init__(self, process: Sequence[str]) -> None:
        super().__init__()
        self._process = process
        self._chosen: str | None = None

    def compose(self) -> ComposeResult:
        """The question."""
        with Vertical(id="box", classes="small"):
            yield Static(Text("Signal this process?", style="bold"))
            yield Static(Text("\n".join(self._process)), id="process")
            yield Static(id="question")

    def on_mount(self) -> None:
        """Ask which."""
        rows = [f"  {key}  {BY_HAND[action]}" for key, action in self.KEYS.items()]
        self.query_one("#question", Static).update(Text("\n".join(["", *rows, "", "  Esc  nothing"])))

    def on_key(self, event: object) -> None:
        """Choose; then only y says yes."""
        key = getattr(event, "key", "")
        if self._chosen is None:
            self._chosen = self.KEYS.get(key)
            if self._chosen:
                words = f"\nReally?  {BY_HAND[self._chosen]}\n\n  y  yes, send it\n  any other key: nothing"
                self.query_one("#question", Static).update(Text(words, style="bold"))
        else:
            self.dismiss(self._chosen if key == "y" else None)
