"""The screens of `gpuguard top`, as textual draws them, are those that were looked at: tests/screens.

A file has the rows of one size, below each the letters of its colours (blank: as most of the screen), and what the
letters mean in the dark and the light theme: so a change of a word or a colour is a line of a diff, which SVG is not.
After a change that is meant: ``python tests/test_top_screens.py --write``, and look at the pictures of ``--svg DIR``.
"""

import asyncio
import html
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from builders import GIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot
from top_scenes import a_scene

from gpuguard.queue.priority import Ticket
from gpuguard.request import Request
from gpuguard.top.scene import HostMeters, Scene, ScreenView

pytest.importorskip("textual")

from gpuguard.top.app import DARK, Top

SCREENS = Path(__file__).with_name("screens")
SIZES = [(80, 24), (120, 40), (200, 60)]
CASES = [(size, count) for size in SIZES for count in (8, 16)]
CELL, LINE, TOP = 12.2, 24.4, 1.5  # of the pictures that textual exports
Style = tuple[str, bool, str]  # colour, bold, background


def the_node(count: int, moment: int) -> Scene:
    """GPUs in every state, *moment* seconds after the beginning; from the eighth on each is as the one 8 before."""
    devices, claims = [], []
    for index in range(count):
        kind = ("busy", "busy", "idle", "unclaimed", "claimed", "ill", "divided", "free")[index % 8]
        load = 0 if kind == "idle" else round(50 + 45 * math.sin((moment + 7 * index) / 9))
        user, name = (("alice", "train.py"), ("bob", "eval.py"))[index % 2]
        work = a_process(
            4000 + index, user=user, uid=1001 + index % 2, command=("python", name, "--fold", str(index)),
            memory_used=62 * GIB, utilization=float(load), start_time=10_000.0 - 3_700 * (index + 1),
            memory_utilization=load * 0.55, encoder_utilization=0.0, decoder_utilization=0.0,
        )  # fmt: skip
        told: dict[str, Any] = {
            "pstate": 0 if load else 8, "clock_sm": 1980 if load else 345, "encoder_utilization": 0.0,
            "decoder_utilization": 0.0, "pcie_generation": 5, "pcie_width": 16, "pcie_rx": load * 4e7,
            "pcie_tx": load * 1e7, "pci_bus_id": f"00000000:{16 + index:02X}:00.0", "persistence_mode": True,
            "ecc_uncorrected_volatile": int(index == 7),
        }  # fmt: skip
        busy: dict[str, Any] = {
            "memory_used": 62 * GIB, "utilization": float(load), "power_draw": 300.0 + 4 * load, "processes": (work,),
            "temperature": 50.0 + load / 4, "temperature_slowdown": 80.0,
        }  # fmt: skip
        more = busy if kind in ("busy", "idle", "unclaimed") else {"mig_mode": kind == "divided"}
        device = a_device(index, **told, **more)
        if kind == "ill":
            device = a_device(index, problems=("lost",), memory_used=None, memory_free=None, utilization=None)
        devices.append(device)
        if kind == "divided":
            devices += [a_mig_instance(device, number) for number in range(2)]
        if kind in ("busy", "idle", "claimed"):
            claims.append(
                a_claim_record(device, id=f"{index:06x}", user=user, uid=1001 + index % 2, note=f"run {index}")
            )
    snapshot = a_snapshot(
        *devices, claims=tuple(claims), taken_at=1_700_000_000.0 + moment, clock=10_000.0 + moment, simulated=False
    )
    waiting = [
        (Ticket("t1", 1003, "carol", 1_699_999_000.0, (Request(2),), note="ablation"), "starts in about 2h"),
        (Ticket("t2", 1002, "bob", 1_699_999_900.0, (Request(4),)), "start unknown: a GPU is in use without a claim"),
    ]
    machine = HostMeters(34.0, 120 * GIB, 512 * GIB, 2 * GIB, 8 * GIB, (12.4, 11.0, 9.8), 64)
    return a_scene(snapshot=snapshot, waiting=tuple(waiting), machine=machine)


def picture(size: tuple[int, int], count: int, *, light: bool) -> str:
    """The SVG of the screen after two minutes."""

    async def taken() -> str:
        scenes = [the_node(count, moment) for moment in range(120)]
        feed: Any = SimpleNamespace(sample=lambda: scenes[-1], tree=False, source=SimpleNamespace(fresh=False))
        app = Top(feed, ScreenView(), scenes[0], 3600.0, light=light)
        async with app.run_test(size=size) as pilot:
            for scene in scenes[1:]:
                app.history.add(scene)
            app.sampled(scenes[-1])
            await pilot.pause()
            return app.export_screenshot()

    with mock.patch.dict("os.environ", {"COLORTERM": "truecolor"}), mock.patch("time.localtime", time.gmtime):
        return asyncio.run(taken())


def cells_of(svg: str, size: tuple[int, int]) -> tuple[list[str], list[list[Style]]]:
    """Rows of characters, and of the style of each."""
    columns, rows = size
    styles = {
        name: (colour, "bold" in more) for name, colour, more in re.findall(r"-(r\d+) \{ fill: (#\w+)(.*?)\}", svg)
    }
    characters = [[" "] * columns for _ in range(rows)]
    grounds = [[""] * columns for _ in range(rows)]
    colours: list[list[tuple[str, bool]]] = [[("", False)] * columns for _ in range(rows)]
    for colour, x, y, width in re.findall(r'<rect fill="(#\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', svg):
        row, first, cells = round((float(y) - TOP) / LINE), round(float(x) / CELL), round(float(width) / CELL)
        grounds[row][first : first + cells] = [colour] * cells
    place = r'class="[\w-]+-(r\d+)" x="([\d.]+)" y="[\d.]+" textLength="[\d.]+" clip-path="url\(#[\w-]+-line-(\d+)\)"'
    texts = re.findall(f"<text {place}>(.*?)</text>", svg)
    for name, x, line, text in texts:
        words, row, first = html.unescape(text).replace("\xa0", " "), int(line), round(float(x) / CELL)
        characters[row][first : first + len(words)] = words
        colours[row][first : first + len(words)] = [styles[name]] * len(words)
    styled = [
        [
            (*(colour if character.strip() else ("", False)), ground)
            for character, colour, ground in zip(*row, strict=True)
        ]
        for row in zip(characters, colours, grounds, strict=True)
    ]
    return ["".join(row) for row in characters], styled


def screen(size: tuple[int, int], count: int) -> str:
    """What the file of this size and number of GPUs says."""
    rows, dark = cells_of(picture(size, count, light=False), size)
    same, light = cells_of(picture(size, count, light=True), size)
    assert rows == same, "the themes differ in more than colours"
    pairs = [list(zip(*row, strict=True)) for row in zip(dark, light, strict=True)]
    (usual, _), *_ = Counter(pair for row in pairs for pair in row).most_common()
    letters: dict[tuple[Style, Style], str] = {usual: " "}
    lines = []
    for row, styled in zip(rows, pairs, strict=True):
        names = "".join(letters.setdefault(pair, chr(ord("a") + len(letters) - 1)) for pair in styled)
        lines += [f"|{row.rstrip()}", *([f":{names.rstrip()}"] if names.strip() else [])]
    lines += [
        "",
        *(f"{letter} = {described(pair[0])}; light: {described(pair[1])}" for pair, letter in letters.items()),
    ]
    return "\n".join(lines) + "\n"


def described(style: Style) -> str:
    colour, bold, ground = style
    return f"{colour or 'nothing'} on {ground}{' bold' * bold}"


def file_of(size: tuple[int, int], count: int) -> Path:
    return SCREENS / f"top-{size[0]}x{size[1]}-{count}.txt"


@pytest.mark.parametrize(("size", "count"), CASES)
def test_the_screen_is_the_one_that_was_looked_at(size, count):
    written = file_of(size, count).read_text(encoding="utf-8")

    assert screen(size, count) == written, "a change that is meant: scripts/generate"


def test_a_changed_word_and_a_changed_colour_are_noticed(monkeypatch):
    size, count = CASES[0]
    written = file_of(size, count).read_text(encoding="utf-8")

    monkeypatch.setitem(DARK, "green", "#00ff00")
    assert "#00ff00 on" in screen(size, count) != written
    monkeypatch.undo()
    monkeypatch.setattr("gpuguard.top.page.format_count", lambda number, noun: f"{number} card")
    assert " card" in screen(size, count) != written


def main() -> None:
    for size, count in CASES:
        if "--write" in sys.argv:
            file_of(size, count).write_text(screen(size, count), encoding="utf-8")
        if "--svg" in sys.argv:
            for light in (False, True):
                name = f"{file_of(size, count).stem}-{'light' if light else 'dark'}.svg"
                svg = picture(size, count, light=light)
                (Path(sys.argv[sys.argv.index("--svg") + 1]) / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
