"""A stage for the screen of `gpuguard top`: a source whose scenes the test chooses, and textual's Pilot at the keys."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from builders import GIB, a_device, a_process
from textual.widgets import Static
from top_scenes import a_scene

from gpuguard.enforcement.actions import SENT, ActionOutcome
from gpuguard.top.app import Board, Top
from gpuguard.top.scene import Scene, ScreenView

ALICE = a_process(10, user="alice", start_time=9_000.0, command=("python", "a.py"), utilization=10.0)
BOB = a_process(20, user="bob", uid=1002, start_time=9_900.0, memory_used=30 * GIB, utilization=90.0)
DEVICES = (a_device(0, processes=(ALICE,), memory_used=11 * GIB), a_device(1, processes=(BOB,), memory_used=31 * GIB))


class Feed:
    """A source whose next scene the test chooses."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.fresh, self.tree = scene, False, False
        self.trouble: Exception | None = None
        self.answers, self.looks = threading.Event(), 0
        self.answers.set()
        self.sent: list[tuple[str, Any, tuple[str, ...]]] = []
        self.sends: Callable[..., ActionOutcome] = lambda *words: ActionOutcome(SENT)

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
        for _ in range(400):
            if holds():
                return
            await self.pilot.pause(0.025)
        raise AssertionError("this does not come to be")


def played(
    play: Callable[[Stage], Awaitable[None]],
    scene: Scene | None = None,
    size: tuple[int, int] = (100, 30),
    every: float = 0.05,
    **view: Any,
) -> Feed:
    scene = scene or a_scene(*DEVICES)
    feed = Feed(scene)

    async def run() -> None:
        app = Top(feed, ScreenView(**view), scene, every)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await play(Stage(app, pilot, feed))
        feed.answers.set()

    asyncio.run(run())
    return feed
