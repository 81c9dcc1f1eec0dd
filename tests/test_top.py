"""The screen of `gpuguard top`, driven by textual's Pilot: keys, mouse, sizes, drivers that hang, signals."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from builders import GIB, a_device, a_process, a_snapshot
from guarded import Listing, somebody, started
from top_scenes import a_scene, an_orphan

from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.enforcement.by_hand import Operator, signal_process
from gpuguard.enforcement.limits import ActionLimits
from gpuguard.errors import DriverUnresponsive
from gpuguard.users import user_name

pytest.importorskip("textual")

from textual.widgets import Input
from top_stage import ALICE, DEVICES, played

from gpuguard.top.app import Board, Sampled


def test_the_screen_shows_the_page_and_follows_the_machine():
    async def play(stage):
        assert stage.pids() == [10, 20]
        stage.feed.scene = a_scene(a_device(0), DEVICES[1])
        await stage.until(lambda: stage.pids() == [20])
        stage.feed.scene = a_scene(a_device(0, problems=("lost",), memory_used=None, memory_free=None), DEVICES[1])
        await stage.until(lambda: any("unhealthy (lost)" in line for line in stage.lines()))

    played(play)


@pytest.mark.parametrize(("count", "size"), [(0, (80, 24)), (1, (20, 5)), (8, (200, 60)), (64, (80, 24))])
def test_any_number_of_devices_on_any_screen(count, size):
    async def play(stage):
        await stage.press("end", "home", "m", "m", "down", "t", "?", "escape", "question_mark")
        assert stage.lines()

    snapshot = replace(a_snapshot(), devices=tuple(a_device(n, processes=(ALICE,)) for n in range(count)))
    played(play, a_scene(snapshot=snapshot), size, every=1.0)


def test_keys_sort_and_turn_round():
    async def play(stage):
        await stage.press("s", "s", "s")
        assert stage.app.view.sort == "memory" and stage.pids() == [20, 10]
        await stage.press("r")
        assert stage.pids() == [10, 20]
        await stage.press("S")
        assert stage.app.view.sort == "user"
        assert "sort user reversed" in stage.words("#title")

    played(play)


def test_a_filter_is_typed_and_escape_keeps_the_old_one():
    async def play(stage):
        await stage.press("slash", *"bob", "enter")
        assert stage.pids() == [20] and "filter bob" in stage.words("#title")
        await stage.press("slash", *"xyz", "escape")
        assert stage.pids() == [20]
        await stage.press("slash")
        stage.app.screen.query_one(Input).value = ""
        await stage.press("enter")
        assert stage.pids() == [10, 20]

    played(play)


def test_only_mine():
    mine = a_process(30, user=user_name(os.getuid()), uid=os.getuid())

    async def play(stage):
        await stage.press("u")
        assert stage.pids() == [30]
        await stage.press("u")
        assert stage.pids() == [10, 30]

    played(play, a_scene(a_device(0, processes=(ALICE, mine))))


def test_the_tree_and_the_driver_are_asked_of_the_feed():
    async def play(stage):
        await stage.press("t", "f")
        assert (stage.feed.tree, stage.feed.fresh) == (True, True)
        assert "the driver itself is asked" in stage.words("#foot")
        await stage.press("t")
        assert stage.feed.tree is False and "help" in stage.words("#foot")

    played(play)


def test_the_mouse_chooses_and_sorts():
    async def play(stage):
        row = next(n for n, line in enumerate(stage.board.lines) if line.process == (20, 9_900.0))
        await stage.pilot.click(Board, offset=(10, row))
        assert stage.app.view.selected == (20, 9_900.0)
        header = next(n for n, line in enumerate(stage.board.lines) if line.keys)
        begin = next(begin for begin, _, key in stage.board.lines[header].keys if key == "memory")
        await stage.pilot.click(Board, offset=(begin + 1, header))
        assert stage.app.view.sort == "memory" and stage.pids() == [20, 10]
        await stage.pilot.click(Board, offset=(begin + 1, header))
        assert stage.app.view.reverse

    played(play)


def test_the_cursor_is_kept_in_sight():
    many = tuple(a_process(100 + n, start_time=9_000.0) for n in range(60))

    async def play(stage):
        await stage.press("end")
        assert stage.app.view.selected == (159, 9_000.0)
        await stage.until(lambda: stage.board.scroll_offset.y > 30)
        await stage.press("home")
        await stage.until(lambda: stage.board.scroll_offset.y == 0)

    played(play, a_scene(a_device(0, processes=many)))


def test_a_new_size_is_a_new_page():
    async def play(stage):
        assert sum("UTL" in line for line in stage.lines()) == 2
        await stage.pilot.resize_terminal(80, 8)
        await stage.until(lambda: not any("UTL" in line for line in stage.lines()))
        assert {len(line) <= 80 for line in stage.lines()} == {True}

    played(play)


def test_a_driver_that_hangs_is_told_while_the_keys_still_work(monkeypatch):
    monkeypatch.setattr("gpuguard.top.app.SILENT", 0.2)

    async def play(stage):
        stage.feed.answers.clear()
        await stage.until(lambda: "the driver does not answer" in stage.words("#alert"))
        assert "s old" in stage.words("#alert")
        await stage.press("s")
        assert stage.app.view.sort == "pid" and stage.pids() == [10, 20]
        stage.feed.answers.set()
        await stage.until(lambda: not stage.app.screen_stack[0].query_one("#alert").display)

    played(play)


def test_the_end_does_not_wait_for_a_driver_that_hangs():
    async def play(stage):
        stage.feed.answers.clear()
        looks = stage.feed.looks
        await stage.until(lambda: stage.feed.looks >= looks)

    played(play)


def test_an_error_of_the_driver_is_shown_and_passes():
    async def play(stage):
        stage.feed.trouble = DriverUnresponsive("the driver \x1b[31m does not\nanswer.  Try `nvidia-smi`.")
        await stage.until(lambda: "Try `nvidia-smi`" in stage.words("#alert"))
        assert "\x1b" not in stage.words("#alert")
        stage.feed.trouble = None
        await stage.until(lambda: not stage.app.screen_stack[0].query_one("#alert").display)

    played(play)


def test_a_look_that_ends_while_the_screen_is_taken_down_is_not_shown():
    async def play(stage):
        await stage.app.screen_stack[0].query("#foot").remove()
        stage.app.on_sampled(Sampled(a_scene(DEVICES[1])))
        await stage.app.screen_stack[0].query(Board).remove()
        stage.app.on_sampled(Sampled(a_scene(DEVICES[0])))

        assert stage.app.scene.snapshot.devices == a_scene(DEVICES[0]).snapshot.devices

    played(play)


def test_the_screen_can_be_held():
    async def play(stage):
        await stage.press("ctrl+p")
        looks = stage.feed.looks
        stage.feed.scene = a_scene(DEVICES[1])
        await stage.until(lambda: stage.feed.looks > looks + 2)
        assert stage.pids() == [10, 20] and "held" in stage.words("#alert")
        await stage.press("ctrl+p")
        await stage.until(lambda: stage.pids() == [20])

    played(play)


def test_a_process_over_time_and_help():
    async def play(stage):
        await stage.press("enter")
        assert "choose a process first" in stage.words("#foot")
        await stage.press("down", "enter")
        await stage.until(lambda: "GPU memory: now 10.0GiB" in stage.dialog())
        assert "CPU: n/a" in stage.dialog() and "pid 10 of alice: python a.py" in stage.dialog()
        await stage.press("escape", "question_mark")
        await stage.until(lambda: "choose a process" in stage.dialog())

    played(play)


def test_the_environment_hides_secrets_until_it_is_asked(monkeypatch):
    with an_orphan() as child:
        own = a_process(child.pid, start_time=started(child.pid), uid=os.getuid())

        async def play(stage):
            await stage.press("down", "e")
            await stage.until(lambda: "API_TOKEN=(hidden)" in stage.dialog())
            assert "hunter2" not in stage.dialog()
            await stage.press("v")
            await stage.until(lambda: "API_TOKEN=hunter2" in stage.dialog())

        played(play, a_scene(a_device(0, processes=(own,))))


@pytest.fixture(autouse=True)
def a_secret(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")


def test_the_environment_of_a_process_that_has_ended_is_nobodys():
    gone = a_process(2**22 - 1, start_time=1.0)

    async def play(stage):
        await stage.press("down", "e")
        await stage.until(lambda: "it has ended" in stage.dialog())

    played(play, a_scene(a_device(0, processes=(gone,))))


@pytest.mark.parametrize("keys", [["escape"], ["t", "n"], ["t", "enter"], ["t", "t"], ["y"], ["y", "y", "escape"]])
def test_without_a_yes_to_the_question_nothing_is_sent(keys):
    async def play(stage):
        await stage.press("down", "x", *keys)
        await stage.pilot.pause(0.1)

    assert played(play).sent == []


def test_a_yes_sends_what_was_chosen_to_the_process_that_was_chosen_then():
    async def play(stage):
        await stage.press("down", "x")
        stage.feed.scene = a_scene(DEVICES[1])  # it is gone from the screen meanwhile
        await stage.until(lambda: stage.pids() == [20])
        await stage.press("p", "y")
        await stage.until(lambda: "pause pid 10: sent" in stage.words("#foot"))

    assert played(play).sent == [("pause", (10, 9_000.0), (DEVICES[0].uuid,))]


def test_a_real_process_is_ended_after_the_question():
    with an_orphan(somebody()) as child:
        own = a_process(child.pid, start_time=started(child.pid), uid=somebody() or os.getuid(), user="alice")
        machine, events = Listing(a_device(0, processes=(own,), memory_used=20 * GIB)), []
        operator = Operator(machine, lambda event: events.append(event.outcome) or True, ActionLimits())

        async def play(stage):
            stage.feed.sends = lambda *words: signal_process(operator, *words)
            await stage.press("down", "x", "t")
            assert str(child.pid) in stage.dialog() and "Really?  SIGTERM" in stage.dialog()
            assert child.lives() and events == []
            await stage.press("y")
            await stage.until(lambda: "sent" in stage.words("#foot"))

        played(play, a_scene(a_device(0, processes=(own,))))
        assert (child.ends(), events) == (True, ["about to"])


def test_a_refusal_is_said_with_its_reason():
    async def play(stage):
        stage.feed.sends = lambda *words: ActionOutcome("refused", "it belongs to \x1b[1malice", 10)
        await stage.press("down", "x", "k", "y")
        await stage.until(lambda: "not done: kill pid 10: refused: it belongs to \\x1b[1malice" in stage.words("#foot"))

    played(play)


def test_nobody_in_a_recording_is_signalled():
    async def play(stage):
        await stage.press("down", "x")
        assert "recording" in stage.words("#foot")

    scene = a_scene(*DEVICES)
    assert played(play, replace(scene, snapshot=replace(scene.snapshot, recorded=True))).sent == []


def test_without_colours_there_are_none(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def play(stage):
        assert stage.board.colours is None
        assert all(segment.style is None or segment.style.color is None or segment.style.color.get_truecolor().red
                   == segment.style.color.get_truecolor().blue for segment in stage.board.render_line(0))  # fmt: skip

    played(play)


def test_light_and_dark():
    async def play(stage):
        dark = stage.board.colours
        await stage.press("l")
        assert stage.board.colours != dark and stage.app.theme == "textual-light"

    played(play)


def test_only_what_has_changed_is_drawn_and_nothing_is_laid_out_anew(mocker):
    async def play(stage):
        laid_out = mocker.spy(stage.app.screen_stack[0], "_refresh_layout")
        drawn, rows = mocker.spy(stage.board, "render_line"), set()
        for gib in range(12, 30):  # on a slow machine the first ones meet the beginning
            laid_out.reset_mock(), drawn.reset_mock()
            scene = a_scene(replace(DEVICES[0], processes=(replace(ALICE, memory_used=gib * GIB),)), DEVICES[1])
            stage.feed.scene = replace(scene, snapshot=replace(scene.snapshot, taken_at=scene.snapshot.taken_at + gib))
            now = f"{gib}.0GiB"
            await stage.until(lambda now=now: drawn.called and any(now in line for line in stage.lines()))
            rows = {call.args[0] for call in drawn.call_args_list}
            if any(now in stage.lines()[y] for y in rows) and len(rows) < 6 and not laid_out.called:
                return
        raise AssertionError(f"drawn are {rows}, laid out anew {laid_out.called}")

    played(play)
