"""The screen of `gpuguard top`, with textual: keys, mouse, and a thread that reads the machine.

This module is thin on purpose: page makes all that is shown, and the feed provides all that is known.  If the thread
hangs in a driver, the screen goes on, and says how old it is.  It needs the extra [tui].
"""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region, Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Static

from gpuguard.enforcement.by_hand import BY_HAND
from gpuguard.enforcement.signals import die_of
from gpuguard.errors import GpuguardError
from gpuguard.locale import N_, _, translated
from gpuguard.model import ActionName, ProcessIdentity
from gpuguard.sanitize import neutralise
from gpuguard.top import plots, process_table
from gpuguard.top.details import FIELDS, details
from gpuguard.top.devices import fields_shown
from gpuguard.top.page import page, shown_uses, title
from gpuguard.top.process_table import ProcessRow, chosen_row, moved
from gpuguard.top.scene import MODES, SORTS, History, Scene, ScreenLine, ScreenView
from gpuguard.top.scene_source import SAMPLING_THREAD, SceneFeed
from gpuguard.users import user_name
from gpuguard.views.charts import fitted
from gpuguard.views.jobs import lines_of_all

_COLOURS = ("red", "green", "yellow", "cyan", "dim", "faint")
DARK = dict(zip(_COLOURS, ("#ff6b6b", "#5fd787", "#ffd75f", "#5fd7ff", "#8a8a8a", "#5a5a5a"), strict=True))
LIGHT = dict(zip(_COLOURS, ("#c00000", "#007a30", "#8a5a00", "#00608a", "#6a6a6a", "#a0a0a0"), strict=True))


class Board(ScrollView, can_focus=False):
    """Lines of parts, drawn as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[ScreenLine] = []
        self.colours: dict[str, str] | None = DARK

    def show(self, lines: list[ScreenLine], width: int) -> None:
        """Draw those of *lines* that have changed, because most of a page is as it was a second ago."""
        size, before, self.lines = Size(width, len(lines)), self.lines, lines
        if size != self.virtual_size:
            self.virtual_size = size
            self.refresh()
            return
        shown = slice(self.scroll_offset.y, self.scroll_offset.y + self.size.height)
        rows = enumerate(zip(before[shown], lines[shown], strict=True))
        if changed := [Region(0, y, self.size.width, 1) for y, (old, new) in rows if old != new]:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """Draw one row of the screen."""
        row = y + self.scroll_offset.y
        if row >= len(self.lines):
            return Strip.blank(self.size.width, self.rich_style)
        strip = Strip([Segment(text, rich_style(style, self.colours)) for text, style in self.lines[row].parts])
        left = self.scroll_offset.x
        return strip.crop(left, left + self.size.width).extend_cell_length(self.size.width).apply_style(self.rich_style)


def rich_style(names: str, colours: dict[str, str] | None) -> Style:
    """Return the style that *names* describe, such as "bold red", in the theme's colours, or without any if None."""
    words = names.split()
    colour = next((colours[word] for word in words if word in colours), None) if colours else None
    return Style(color=colour, bold="bold" in words, dim=not colours and "dim" in words, reverse="reverse" in words)


def plain_text(words: str, width: int) -> Text:
    """Return *words*, made neutral, in exactly *width* columns."""
    return Text(fitted([(neutralise(words), "")], width)[0][0], no_wrap=True)


HELP = N_(
    "  ↑ ↓ j k PgUp PgDn End  choose a process; or click it\n  Home                   to the top, "
    "choose no process\n  ← →                    sideways, through long command lines\n  "
    "/                      filter: words, user:NAME, gpu:0,1\n  s  S  r                sort by the "
    "next, the one before, reversed;\n                         or click a heading\n  "
    "u                      only my processes, all processes\n  t                      processes "
    "below their parents\n  m                      lines per GPU: auto, full, compact\n  "
    "c                      no desktop processes\n  Enter                  the chosen process over "
    "time; the plots\n                         show it, too, or else the mean of all GPUs\n  "
    "d                      all that is known of the GPUs, or of the chosen\n                         "
    "process and its GPUs\n  "
    "J                      all jobs of `gpuguard submit` that wait or run\n  "
    "e                      its environment (your own processes)\n  x                      signal "
    "it, after a question (your own;\n                         root: those of people)\n  "
    "f                      ask the driver, or show what the daemon saw\n  a  l                   "
    "ASCII; light or dark\n  Ctrl-P                 hold the screen, and go on\n  q  "
    "Ctrl-C              leave\n\nMemory is blue, work is green.  Yellow: near a limit; red: at it.\n"
    "Limits are the temperature at which a GPU slows down and its\npower limit, or what the "
    'site\'s policies say, where you may read\nthem.  n/a: not known.  A red ! or "no claim": used '
    "unclaimed.\n"
)


class TextScreen(ModalScreen[None]):
    """A page of text that is read anew every second as long as it is open."""

    BINDINGS: ClassVar = [Binding("escape,q,enter,question_mark", "dismiss", "close")]

    def __init__(self, heading: str, text: Callable[[int], str], reveal: Callable[[int], str] | None = None) -> None:
        super().__init__()
        self._heading, self._text, self._reveal = heading, text, reveal

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield Static(Text(self._heading, style="bold"), id="heading")
            with VerticalScroll():
                yield Static(id="body")
            more = _("   v shows what is hidden") if self._reveal else ""
            yield Static(Text(_("Esc closes{more}").format(more=more), style="dim"), id="foot")

    def on_mount(self) -> None:
        self.call_after_refresh(self.fill)
        self.set_interval(1.0, self.fill)

    def fill(self) -> None:
        body = self.query_one("#body", Static)
        body.update(Text(self._text(max(20, self.query_one(VerticalScroll).size.width - 2))))

    def key_v(self) -> None:
        if self._reveal:
            self._text, self._reveal = self._reveal, None
            self.fill()


class FilterScreen(ModalScreen[str | None]):
    """Asks for the words of the filter."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss", "keep the old one")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Input(self._text, placeholder=_("words, user:NAME, gpu:0,1 (empty: all; Esc: as before)"), id="filter")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class SignalScreen(ModalScreen[ActionName | None]):
    """Asks which signal to send, then whether the user means it; its answer is one of BY_HAND, or None."""

    BINDINGS: ClassVar = [Binding("escape,q,n", "dismiss", "nothing")]
    KEYS: ClassVar[Mapping[str, ActionName]] = {"t": "terminate", "k": "kill", "p": "pause", "c": "resume"}

    def __init__(self, process: Sequence[str]) -> None:
        super().__init__()
        self._process = process
        self._chosen: ActionName | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="box", classes="small"):
            yield Static(Text(_("Signal this process?"), style="bold"))
            yield Static(Text("\n".join(self._process)), id="process")
            rows = [f"  {key}  {_(BY_HAND[action])}" for key, action in self.KEYS.items()]
            yield Static(Text("\n".join(["", *rows, "", _("  Esc  nothing")])), id="question")

    def on_key(self, event: object) -> None:
        key = getattr(event, "key", "")
        if self._chosen is None:
            self._chosen = self.KEYS.get(key)
            if self._chosen:
                words = _("\nReally?  {action}\n\n  y  yes, send it\n  any other key: nothing").format(
                    action=_(BY_HAND[self._chosen])
                )
                self.query_one("#question", Static).update(Text(words, style="bold"))
        else:
            self.dismiss(self._chosen if key == "y" else None)


SILENT = 3.0  # intervals without an answer, after which the screen says so
_FOOT = N_(" ?:help /:filter s:sort t:tree u:mine Enter:past d:details e:env x:signal q:quit")


class Top(App[None]):
    """The screen of `gpuguard top`."""

    CSS = """
    Board { height: 1fr; scrollbar-size: 1 1; overflow-x: hidden; }
    #title, #foot, #alert { height: 1; }
    #title { background: $panel; }
    #foot { color: $text-muted; background: $panel; }
    #alert { display: none; background: $error; color: $text; text-style: bold; }
    ModalScreen { align: center middle; }
    #box { width: 90%; max-width: 120; height: 90%; border: round $primary; padding: 0 1; background: $surface; }
    #box.small { height: auto; max-width: 76; padding: 1 2; }
    #foot, #heading { height: 1; }
    FilterScreen { align: left bottom; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("q,ctrl+c", "quit", "leave", priority=False),
        Binding("question_mark,h,f1", "help", "help"),
        Binding("slash,ctrl+f", "filter", "filter"),
        Binding("down,j", "move(1)", "down"),
        Binding("up,k", "move(-1)", "up"),
        Binding("pagedown", "move(10)", "down"),
        Binding("pageup", "move(-10)", "up"),
        Binding("home", "first", "first"),
        Binding("end", "move(100000)", "last"),
        Binding("left", "sideways(-20)", "left"),
        Binding("right", "sideways(20)", "right"),
        Binding("s", "turn('sort', 1)", "sort"),
        Binding("S", "turn('sort', -1)", "sort"),
        Binding("r", "flip('reverse')", "reverse"),
        Binding("t", "flip('tree')", "tree"),
        Binding("a", "flip('ascii_only')", "ascii"),
        Binding("c", "flip('compute_only')", "compute only"),
        Binding("u", "mine", "mine"),
        Binding("m", "turn('mode', 1)", "mode"),
        Binding("l", "light", "light"),
        Binding("f", "fresh", "fresh"),
        Binding("ctrl+p", "hold", "hold"),
        Binding("enter", "over_time", "over time"),
        Binding("d", "details", "details"),
        Binding("J", "jobs", "jobs"),
        Binding("e", "environment", "environment"),
        Binding("x,ctrl+k", "signal", "signal"),
    ]

    def __init__(self, feed: SceneFeed, view: ScreenView, scene: Scene, every: float, *, light: bool = False) -> None:
        super().__init__()
        self._feed, self._every = feed, every
        self.view, self.scene = view, scene
        self.history = History()
        self.history.add(scene)
        self.notice = ""
        self._problem, self._sampled_at, self._light = "", time.monotonic(), light
        self._held, self._sideways = False, 0
        self._in_detail = False  # whether the page of details is open
        self._written: dict[str, Text] = {}
        self._longer = False  # whether the page is longer than the board
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._ends = threading.Event()

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        yield Static(id="alert", markup=False)
        yield Board()
        yield Static(_FOOT, id="foot", markup=False)

    def on_mount(self) -> None:
        self._set_theme()
        self._feed.tree = self.view.tree
        # It is a daemon thread, so that the end does not wait for a driver that hangs.
        threading.Thread(target=self._sample_again, name=SAMPLING_THREAD, daemon=True).start()
        self.set_interval(1.0, self._tick)
        if not self.is_headless and os.isatty(0):
            self.set_interval(1.0, self._end_with_terminal)
        self.call_after_refresh(self.draw)

    def on_unmount(self) -> None:
        self._ends.set()
        self._jobs.put(None)

    def _sample_again(self) -> None:
        """Sample at each interval, and do the jobs of the queue in between; this is what the thread runs."""
        while not self._ends.is_set():
            due = time.monotonic() + self._every
            try:
                self.call_later(self.sampled, self._feed.sample())
            except GpuguardError as error:
                self.call_later(self._show_problem, " ".join(translated(str(error)).split()))
            while (left := due - time.monotonic()) > 0 and not self._ends.is_set():
                try:
                    job = self._jobs.get(timeout=left)
                except queue.Empty:
                    break
                if job is None:
                    break
                job()

    def sampled(self, scene: Scene) -> None:
        self._sampled_at, self._problem = time.monotonic(), ""
        self.history.add(scene)
        if not self._held:
            self.scene = scene
            self.draw()

    def _show_problem(self, text: str) -> None:
        self._problem = text
        self._tick()

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.draw)

    @property
    def silent(self) -> float:
        """The seconds since the last answer."""
        return time.monotonic() - self._sampled_at

    @property
    def _is_up(self) -> bool:
        """Whether there is a page to draw on: a sample may end while the page is taken down."""
        return bool(self.screen_stack) and len(self.screen_stack[0].query("#title, #alert, Board, #foot")) == 4

    def draw(self) -> None:
        if not self._is_up:
            return
        board = self.screen_stack[0].query_one(Board)
        width, height = max(20, self.size.width), self.size.height
        self._feed.more = fields_shown(width) | (FIELDS if self._in_detail else frozenset())
        for _attempt in range(2):  # a page that is longer than before loses a column to the scroll bar
            columns = width - self._longer + self._sideways
            lines = page(self.scene, self.history, self.view, columns, height - 2)
            was, self._longer = self._longer, len(lines) > board.size.height
            if was == self._longer:
                break
        board.show(lines, columns)
        board.scroll_to(x=self._sideways, animate=False, force=True)
        self._tick()

    def _end_with_terminal(self) -> None:
        """End as by a hang-up if the terminal has gone, because su and docker may keep that signal to themselves.

        Otherwise Textual would read the end of its input again and again, without a pause.
        """
        terminal = select.poll()
        terminal.register(0, 0)
        if terminal.poll(0):
            die_of(signal.SIGHUP)

    def _tick(self) -> None:
        """Write the title and the foot, and the alarm if no answer comes."""
        if not self._is_up:
            return
        width = max(20, self.size.width)
        parts, colours = title(self.scene, self.view, width, self.silent).parts, self._colours()
        styled = [(words, rich_style(style, colours)) for words, style in parts]
        self._write("#title", Text.assemble(*styled, no_wrap=True))
        late = self.silent > max(SILENT * self._every, SILENT)
        if words := self._problem or (_("the driver does not answer") if late else ""):
            words = _(" {words} -- what you see is {silent:.0f}s old").format(words=words, silent=self.silent)
        elif self._held:
            held = max(0.0, time.time() - self.scene.snapshot.taken_at)
            words = _(" held for {held:.0f}s: Ctrl-P goes on").format(held=held)
        self.screen_stack[0].query_one("#alert", Static).display = bool(words)
        self._write("#alert", plain_text(words, width))
        self._write("#foot", plain_text(f" {self.notice}" if self.notice else _(_FOOT), width))

    def _write(self, name: str, text: Text) -> None:
        """Write a line if it has changed.  It stays one line, so nothing else need be laid out anew for it."""
        if self._written.get(name) != text:
            self._written[name] = text
            self.screen_stack[0].query_one(name, Static).update(text, layout=False)

    # Keys.  A notice lasts until the next one.

    def on_key(self) -> None:
        self.notice = ""

    def action_help(self) -> None:
        self.push_screen(TextScreen("gpuguard top", lambda width: _(HELP)))

    def action_filter(self) -> None:
        former = self.view.text
        self.push_screen(FilterScreen(former), lambda text: self._change(text=former if text is None else text))

    def action_move(self, by: int) -> None:
        shown = [line.process for line in self.query_one(Board).lines if line.process]
        self.view = moved(shown, self.view, by)
        self._redraw_at_cursor()

    def action_first(self) -> None:
        self.view = replace(self.view, selected=None)
        self.draw()
        self.query_one(Board).scroll_home(animate=False)

    def action_sideways(self, by: int) -> None:
        self._sideways = min(2000, max(0, self._sideways + by))
        self.draw()

    def action_turn(self, name: str, by: int) -> None:
        values = {"sort": SORTS, "mode": MODES}[name]
        self._change(**{name: values[(values.index(getattr(self.view, name)) + by) % len(values)]})

    def action_flip(self, name: str) -> None:
        self._change(**{name: not getattr(self.view, name)})

    def action_mine(self) -> None:
        self._change(users=frozenset() if self.view.users else frozenset({user_name(os.getuid())}))

    def action_light(self) -> None:
        self._light = not self._light
        self._set_theme()
        self.draw()

    def action_fresh(self) -> None:
        self._feed.source.fresh = fresh = not self._feed.source.fresh
        daemon = _("what the daemon saw is shown, while it is fresh")
        self.notice = _("the driver itself is asked") if fresh else daemon
        self._tick()

    def action_hold(self) -> None:
        self._held = not self._held
        self._tick()

    def action_over_time(self) -> None:
        if row := self._chosen():

            def draw(width: int) -> str:
                now = self.scene.snapshot.taken_at
                return plots.over_time(self.history, row, now, width, ascii_only=self.view.ascii_only)

            self.push_screen(TextScreen(process_table.heading(row), draw))

    def action_details(self) -> None:
        def text(_width: int) -> str:
            return details(self.scene, shown_uses(self.scene, self.view), chosen_row(self.scene, self.view))

        def closed(_nothing: object) -> None:
            self._in_detail = False
            self.draw()

        self._in_detail = True
        self.draw()
        self.push_screen(TextScreen(_("All that is known"), text), closed)

    def action_jobs(self) -> None:
        def text(width: int) -> str:
            return "\n".join(lines_of_all(self.scene.jobs, self.scene.snapshot.taken_at, width=width))

        self.push_screen(TextScreen(_("Jobs that wait or run"), text))

    def action_environment(self) -> None:
        if row := self._chosen():
            shown, hidden = process_table.environment(row), process_table.environment(row, hide=False)
            self.push_screen(TextScreen(process_table.heading(row), lambda width: shown, lambda width: hidden))

    def action_signal(self) -> None:
        if (row := self._chosen()) is None or row.identity is None:
            return
        if self.scene.snapshot.recorded:
            self._notify_user(_("this is a recording: no process of it can be signalled"))
            return
        identity, devices = row.identity, row.uuids

        def answered(action: ActionName | None) -> None:
            if action:
                self._notify_user(_("{action} pid {pid} ...").format(action=action, pid=row.pid))
                self._jobs.put(lambda: self._send(action, identity, devices))

        self.push_screen(SignalScreen(process_table.description(row)), answered)

    def _send(self, action: ActionName, process: ProcessIdentity, devices: tuple[str, ...]) -> None:  # in the thread
        try:
            outcome = self._feed.send(action, process, devices)
        except GpuguardError as error:
            self.call_later(
                self._notify_user, _("nothing was done: {error}").format(error=" ".join(translated(str(error)).split()))
            )
            return
        words = _("{action} pid {pid}: {outcome}").format(action=action, pid=process[0], outcome=_(outcome.word))
        words += f": {translated(outcome.why)}" if outcome.why else ""
        self.call_later(
            self._notify_user, words if outcome.word == "sent" else _("not done: {words}").format(words=words)
        )

    def _chosen(self) -> ProcessRow | None:
        row = chosen_row(self.scene, self.view)
        if row is None:
            self._notify_user(_("choose a process first: arrow keys, or a click"))
        return row

    def _notify_user(self, text: str) -> None:
        self.notice = text
        self._tick()

    def _change(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]
        self._feed.tree = self.view.tree
        self.draw()

    def _redraw_at_cursor(self) -> None:
        self.draw()
        board = self.query_one(Board)
        rows = [row for row, line in enumerate(board.lines) if line.process and line.process == self.view.selected]
        if rows:
            board.scroll_to_region(Region(self._sideways, rows[0], 1, 1), animate=False, force=True)

    # The mouse.

    def on_click(self, event: events.Click) -> None:
        """Sort by the heading, or choose the process, that was clicked; two clicks show the process over time."""
        if len(self.screen_stack) > 1:
            return
        board = self.query_one(Board)
        row = event.screen_y - board.region.y + board.scroll_offset.y
        if not 0 <= row < len(board.lines) or event.screen_y < board.region.y:
            return
        line, column = board.lines[row], event.screen_x + board.scroll_offset.x
        key = next((key for begin, end, key in line.keys if begin <= column < end), None)
        if key:
            self._change(**({"reverse": not self.view.reverse} if key == self.view.sort else {"sort": key}))
        elif line.process:
            self._change(selected=line.process)
            if event.chain == 2:
                self.action_over_time()

    # Colours.

    def _set_theme(self) -> None:
        self.theme = "textual-light" if self._light else "textual-dark"
        board = self.screen_stack[0].query_one(Board)
        board.colours = self._colours()
        board.refresh()

    def _colours(self) -> dict[str, str] | None:
        if os.environ.get("NO_COLOR"):
            return None
        return LIGHT if self._light else DARK
