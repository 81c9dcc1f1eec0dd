"""The screen of `gpuguard top`, driven by textual's Pilot: keys, mouse, sizes, drivers that hang, signals."""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import GIB, a_device, a_process, a_snapshot
from guard_scene import Listing, somebody, started
from top_scenes import a_scene, an_orphan

from gpuguard.batch.public import PublicJob
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.enforcement.by_hand import Operator, signal_process
from gpuguard.enforcement.guard_limits import ActionLimits
from gpuguard.errors import DriverUnresponsive
from gpuguard.model import PCIE
from gpuguard.top.scene import Scene, ScreenView
from gpuguard.users import user_name

pytest.importorskip("textual")

from textual.widgets import Input, Static

from gpuguard.top.app import Board, Top

ALICE = a_process(10, user="alice", start_time=9_000.0, command=("python", "a.py"), utilization=10.0)
BOB = a_process(20, user="bob", uid=1002, start_time=9_900.0, memory_used=30 * GIB, utilization=90.0)
DEVICES = (a_device(0, processes=(ALICE,), memory_used=11 * GIB), a_device(1, processes=(BOB,), memory_used=31 * GIB))


class Feed:
    """A source whose next scene the test chooses."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.tree, self.source = scene, False, SimpleNamespace(fresh=False)
        self.trouble: Exception | None = None
        self.answers, self.looks = threading.Event(), 0
        self.answers.set()
        self.sent: list[tuple[str, Any, tuple[str, ...]]] = []
        self.sends: Callable[..., ActionOutcome] = lambda *words: ActionOutcome("sent")

    def sample(self) -> Scene:
        self.looks += 1
        self.answers.wait(60)
        if self.trouble:
            raise self.trouble
        return self.scene

    def send(self, action: str, process: Any, devices: tuple[str, ...]) -> ActionOutcome:
        self.sent.append((action, process, devices))
        return self.sends(action, process, devices)


class Stage:
    """A running screen."""

    def __init__(self, app: Top, pilot: Any, feed: Feed) -> None:
        self.app, self.pilot, self.feed = app, pilot, feed

    @property
    def board(self) -> Board:
        return self.app.screen_stack[0].query_one(Board)

    def lines(self) -> list[str]:
        return [line.text for line in self.board.lines]

    def pids(self) -> list[int]:
        return [line.process[0] for line in self.board.lines if line.process]

    def words(self, name: str) -> str:
        return str(self.app.screen_stack[0].query_one(name, Static).render())

    def dialog(self) -> str:
        return "\n".join(str(each.render()) for each in self.app.screen.query(Static))

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, holds: Callable[[], object]) -> None:
        for _ in range(2400):
            if holds():
                return
            await self.pilot.pause(0.025)
        raise AssertionError("this does not come to be")


@pytest.fixture(autouse=True)
def a_secret(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")


def on_screen(scene: Scene | None = None, size: tuple[int, int] = (100, 30), every: float = 0.05) -> Any:
    """A test that plays on a running screen, its first argument; the others are fixtures."""

    def decorated(play: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def run(fixtures: dict[str, Any]) -> None:
            feed = Feed(scene or a_scene(*DEVICES))
            app = Top(feed, ScreenView(), feed.scene, every)
            async with app.run_test(size=size) as pilot:
                await pilot.pause()
                await play(Stage(app, pilot, feed), **fixtures)
            feed.answers.set()

        def test(**fixtures: Any) -> None:
            asyncio.run(run(fixtures))

        _, *others = inspect.signature(play).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return decorated


@on_screen()
async def test_the_screen_shows_the_page_and_follows_the_machine(stage):
    assert stage.pids() == [10, 20]
    stage.feed.scene = a_scene(a_device(0), DEVICES[1])
    await stage.until(lambda: stage.pids() == [20])
    stage.feed.scene = a_scene(a_device(0, problems=("lost",), memory_used=None, memory_free=None), DEVICES[1])
    await stage.until(lambda: any("unhealthy (lost)" in line for line in stage.lines()))


@pytest.mark.parametrize(("count", "size"), [(0, (80, 24)), (1, (20, 5)), (8, (200, 60)), (64, (80, 24))])
def test_any_number_of_devices_on_any_screen(count, size):
    devices = tuple(a_device(n, processes=(ALICE,)) for n in range(count))

    @on_screen(a_scene(snapshot=replace(a_snapshot(), devices=devices)), size, every=1.0)
    async def play(stage):
        await stage.press("end", "home", "m", "m", "down", "t", "?", "escape", "question_mark")
        assert stage.lines()

    play()


WAITS = PublicJob("bob", "17", "waiting", None, "python train.py \x1b[31m", 2, tasks=3)


@on_screen(a_scene(*DEVICES, jobs=(WAITS,)), (60, 24))
async def test_a_key_lists_the_jobs_that_wait_or_run(stage):
    assert any("bob/17 3 waiting" in line for line in stage.lines())
    await stage.press("J")
    await stage.until(lambda: "bob/17" in stage.dialog())
    assert "3 waiting" in stage.dialog() and "\x1b" not in stage.dialog()
    stage.feed.scene = a_scene(*DEVICES)
    await stage.until(lambda: "no job of `gpuguard submit`" in stage.dialog())
    await stage.press("escape")
    assert len(stage.app.screen_stack) == 1


@on_screen()
async def test_keys_sort_and_turn_round(stage):
    await stage.press("s", "s", "s")
    assert stage.app.view.sort == "memory" and stage.pids() == [20, 10]
    await stage.press("r")
    assert stage.pids() == [10, 20]
    await stage.press("S")
    assert stage.app.view.sort == "user"
    assert "sort user reversed" in stage.words("#title")


@on_screen()
async def test_a_filter_is_typed_and_escape_keeps_the_old_one(stage):
    await stage.press("slash", *"bob", "enter")
    assert stage.pids() == [20] and "filter bob" in stage.words("#title")
    await stage.press("slash", *"xyz", "escape")
    assert stage.pids() == [20]
    await stage.press("slash")
    stage.app.screen.query_one(Input).value = ""
    await stage.press("enter")
    assert stage.pids() == [10, 20]


MINE = a_process(30, user=user_name(os.getuid()), uid=os.getuid())


@on_screen(a_scene(a_device(0, processes=(ALICE, MINE))))
async def test_only_mine(stage):
    await stage.press("u")
    assert stage.pids() == [30]
    await stage.press("u")
    assert stage.pids() == [10, 30]


@on_screen(a_scene(a_device(0, processes=(ALICE,))))
async def test_only_mine_leaves_the_gpus_of_the_machine_where_nothing_is_mine(stage):
    device = stage.lines()[0].split()[:3]
    await stage.press("u")
    assert stage.pids() == [] and stage.lines()[0].split()[:3] == device


@on_screen()
async def test_the_tree_and_the_driver_are_asked_of_the_feed(stage):
    await stage.press("t", "f")
    assert (stage.feed.tree, stage.feed.source.fresh) == (True, True)
    assert "the driver itself is asked" in stage.words("#foot")
    await stage.press("t")
    assert stage.feed.tree is False and "help" in stage.words("#foot")


@on_screen()
async def test_the_mouse_chooses_and_sorts(stage):
    row = next(n for n, line in enumerate(stage.board.lines) if line.process == (20, 9_900.0))
    await stage.pilot.click(Board, offset=(10, row))
    assert stage.app.view.selected == (20, 9_900.0)
    header = next(n for n, line in enumerate(stage.board.lines) if line.keys)
    begin = next(begin for begin, _, key in stage.board.lines[header].keys if key == "memory")
    await stage.pilot.click(Board, offset=(begin + 1, header))
    assert stage.app.view.sort == "memory" and stage.pids() == [20, 10]
    await stage.pilot.click(Board, offset=(begin + 1, header))
    assert stage.app.view.reverse


@on_screen()
async def test_a_driver_that_hangs_is_told_while_the_keys_still_work(stage, monkeypatch):
    monkeypatch.setattr("gpuguard.top.app.SILENT", 0.2)
    stage.feed.answers.clear()
    await stage.until(lambda: "the driver does not answer" in stage.words("#alert"))
    assert "s old" in stage.words("#alert")
    await stage.press("s")
    assert stage.app.view.sort == "pid" and stage.pids() == [10, 20]
    stage.feed.answers.set()
    await stage.until(lambda: not stage.app.screen_stack[0].query_one("#alert").display)


@on_screen()
async def test_the_end_does_not_wait_for_a_driver_that_hangs(stage):
    stage.feed.answers.clear()
    looks = stage.feed.looks
    await stage.until(lambda: stage.feed.looks > looks)


@on_screen()
async def test_an_error_of_the_driver_is_shown_and_passes(stage):
    stage.feed.trouble = DriverUnresponsive("the driver \x1b[31m does not\nanswer.  Try `nvidia-smi`.")
    await stage.until(lambda: "Try `nvidia-smi`" in stage.words("#alert"))
    assert "\x1b" not in stage.words("#alert")
    stage.feed.trouble = None
    await stage.until(lambda: not stage.app.screen_stack[0].query_one("#alert").display)


@on_screen()
async def test_a_look_that_ends_while_the_screen_is_taken_down_is_not_shown(stage):
    await stage.app.screen_stack[0].query("#foot").remove()
    stage.app.sampled(a_scene(DEVICES[1]))
    await stage.app.screen_stack[0].query(Board).remove()
    stage.app.sampled(a_scene(DEVICES[0]))

    assert stage.app.scene.snapshot.devices == a_scene(DEVICES[0]).snapshot.devices


@on_screen()
async def test_the_screen_can_be_held(stage):
    await stage.press("ctrl+p")
    looks = stage.feed.looks
    stage.feed.scene = a_scene(DEVICES[1])
    await stage.until(lambda: stage.feed.looks > looks + 2)
    assert stage.pids() == [10, 20] and "held" in stage.words("#alert")
    await stage.press("ctrl+p")
    await stage.until(lambda: stage.pids() == [20])


@on_screen()
async def test_a_process_over_time_and_help(stage):
    await stage.press("enter")
    assert "choose a process first" in stage.words("#foot")
    await stage.press("down", "enter")
    await stage.until(lambda: "its memory: 10.0GiB" in stage.dialog())
    assert "CPU: n/a" in stage.dialog() and "pid 10 of alice: python a.py" in stage.dialog()
    await stage.press("escape", "question_mark")
    await stage.until(lambda: "choose a process" in stage.dialog())


@on_screen()
async def test_all_that_is_known_is_read_while_it_is_shown(stage):
    assert PCIE not in stage.feed.more
    await stage.press("d")
    await stage.until(lambda: "GPU 1 " in stage.dialog())
    assert PCIE in stage.feed.more
    await stage.press("escape", "down", "d")
    await stage.until(lambda: "pid 10 of alice" in stage.dialog())
    assert "GPU 1 " not in stage.dialog()
    await stage.press("escape")
    await stage.until(lambda: PCIE not in stage.feed.more)


@on_screen()
async def test_the_environment_hides_secrets_until_it_is_asked(stage):
    with an_orphan() as child:
        own = a_process(child.pid, start_time=started(child.pid), uid=os.getuid())
        stage.feed.scene = a_scene(a_device(0, processes=(own,)))
        await stage.until(lambda: stage.pids() == [child.pid])
        await stage.press("down", "e")
        await stage.until(lambda: "API_TOKEN=(hidden)" in stage.dialog())
        assert "hunter2" not in stage.dialog()
        await stage.press("v")
        await stage.until(lambda: "API_TOKEN=hunter2" in stage.dialog())


@on_screen(a_scene(a_device(0, processes=(a_process(2**22 - 1, start_time=1.0),))))
async def test_the_environment_of_a_process_that_has_ended_is_nobodys(stage):
    await stage.press("down", "e")
    await stage.until(lambda: "it has ended" in stage.dialog())


@pytest.mark.parametrize("keys", [["escape"], ["t", "n"], ["t", "enter"], ["t", "t"], ["y"], ["y", "y", "escape"]])
@on_screen()
async def test_without_a_yes_to_the_question_nothing_is_sent(stage, keys):
    await stage.press("down", "x", *keys)
    await stage.pilot.pause(0.1)

    assert stage.feed.sent == []


@on_screen()
async def test_a_yes_sends_what_was_chosen_to_the_process_that_was_chosen_then(stage):
    await stage.press("down", "x")
    stage.feed.scene = a_scene(DEVICES[1])  # it is gone from the screen meanwhile
    await stage.until(lambda: stage.pids() == [20])
    await stage.press("p", "y")
    await stage.until(lambda: "pause pid 10: sent" in stage.words("#foot"))

    assert stage.feed.sent == [("pause", (10, 9_000.0), (DEVICES[0].uuid,))]


@on_screen()
async def test_a_real_process_is_ended_after_the_question(stage):
    with an_orphan(somebody()) as child:
        own = a_process(child.pid, start_time=started(child.pid), uid=somebody() or os.getuid(), user="alice")
        machine, events = Listing(a_device(0, processes=(own,), memory_used=20 * GIB)), []
        operator = Operator(machine, lambda event: events.append(event.outcome) or True, ActionLimits())
        stage.feed.scene = a_scene(a_device(0, processes=(own,)))
        stage.feed.sends = lambda *words: signal_process(operator, *words)
        await stage.until(lambda: stage.pids() == [child.pid])
        await stage.press("down", "x", "t")
        assert str(child.pid) in stage.dialog() and "Really?  SIGTERM" in stage.dialog()
        assert child.lives() and events == []
        await stage.press("y")
        await stage.until(lambda: "sent" in stage.words("#foot"))

        assert (child.ends(), events) == (True, ["about to"])


@on_screen()
async def test_a_refusal_is_said_with_its_reason(stage):
    stage.feed.sends = lambda *words: ActionOutcome("refused", "it belongs to \x1b[1malice", 10)
    await stage.press("down", "x", "k", "y")
    await stage.until(lambda: "not done: kill pid 10: refused: it belongs to \\x1b[1malice" in stage.words("#foot"))


@on_screen(a_scene(snapshot=a_snapshot(*DEVICES, recorded=True)))
async def test_nobody_in_a_recording_is_signalled(stage):
    await stage.press("down", "x")

    assert "recording" in stage.words("#foot") and stage.feed.sent == []


@pytest.fixture
def no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("no_color")
@on_screen()
async def test_without_colours_there_are_none(stage):
    colours = [segment.style and segment.style.color for segment in stage.board.render_line(0)]

    assert stage.board.colours is None
    assert all(color is None or color.get_truecolor().red == color.get_truecolor().blue for color in colours)
