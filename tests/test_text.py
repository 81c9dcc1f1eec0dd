"""Text that strangers wrote, on a terminal that somebody else reads."""

import io
import json
import os
import shlex
import time
import unicodedata
from pathlib import Path

import pytest
from builders import Scripted, a_device, a_snapshot
from guard_scene import a_scene
from hypothesis import example, given
from hypothesis import strategies as st

from gpuguard.enforcement import guard_limits
from gpuguard.enforcement.guard_limits import recover_actions
from gpuguard.history import audit_log
from gpuguard.model import Event
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.thresholds import MemoryRule
from gpuguard.sanitize import display_width, neutral_command, neutralise
from gpuguard.tables import shorten, table
from gpuguard.units import parse_memory_amount
from gpuguard.views.text import json_text, put, style
from gpuguard.watchdog import Watchdog

HOSTILE = {
    "ANSI escape": ("\x1b[2J", r"\x1b[2J"),
    "C1 control": ("\x9b31m", r"\x9b31m"),
    "new line": ("a\nb\r\tc", r"a\nb\r\tc"),
    "delete": ("\x7f", r"\x7f"),
    "bidi override": ("\u202egnp.exe", r"\u202egnp.exe"),
    "bidi isolate": ("\u2066x\u2069", r"\u2066x\u2069"),
    "zero width": ("al\u200bice", r"al\u200bice"),
    "byte order mark": ("\ufeffx", r"\ufeffx"),
    "line and paragraph separator": ("\u2028\u2029", r"\u2028\u2029"),
    "byte that is no text": (os.fsdecode(b"\xff\x1b"), r"\xff\x1b"),
    "lone surrogate": ("\ud800", r"\ud800"),
    "tag character": ("\U000e0041", r"\U000e0041"),
    "variation selector": ("x\ufe0f\U000e0101", r"x\ufe0f\U000e0101"),
    "Hangul filler": ("\u3164", r"\u3164"),
    "soft hyphen": ("a\u00adb", r"a\xadb"),
    "unusual blank": ("a\u00a0b\u3000", r"a\xa0b\u3000"),
    "private use": ("\ue000", r"\ue000"),
    "mark without a letter": ("\u0301x", r"\u0301x"),
}


@pytest.mark.parametrize(("hostile", "shown"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_not_plainly_visible_is_written_out(hostile, shown):
    assert neutralise(hostile) == shown


@pytest.mark.parametrize(
    "text", ["python train.py --lr=0.1 'a b' \\n", "李小明", "Zoë", "e\u0301", "שלום", "한국어", "ไม่", "ﬁ", "😀"]
)
def test_honest_text_of_any_language_stays_as_it_is(text):
    assert neutralise(text) == text


def test_a_tower_of_marks_is_cut_off_so_that_it_does_not_paint_over_other_lines():
    assert neutralise("e" + "\u0301" * 6) == "e" + "\u0301" * 4 + r"\u0301\u0301"


def faults(text: str) -> list[str]:
    """Characters of *text* that may move the cursor, break a line, be invisible or turn the order round."""
    bad = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return [character for character in text if unicodedata.category(character) in bad]


@given(st.binary(max_size=60).map(os.fsdecode) | st.text(st.characters(), max_size=40))
@example("\x1b]0;title\x07")
@example("a" + "\u0300" * 50)
@example("\ud83d\ude00")
def test_nothing_survives_neutralising_that_could_harm_a_screen(text):
    neutral = neutralise(text)

    assert faults(neutral) == []
    assert len(neutral.splitlines()) <= 1
    assert neutralise(neutral) == neutral
    neutral.encode("utf-8")


def test_the_checker_of_harm_sees_harm():
    assert faults("\x1b\u202e\u200b\u2028\udc80\U000e0041") == list("\x1b\u202e\u200b\u2028\udc80\U000e0041")


@given(st.lists(st.text(st.characters(codec="ascii"), max_size=6)))
def test_a_command_line_is_quoted_as_a_shell_needs_it(words: list[str]) -> None:
    assert neutral_command(words) == neutralise(shlex.join(words))
    assert neutral_command(None) == "n/a"


def test_a_brief_command_line_leaves_out_where_the_program_lies():
    assert neutral_command(("/opt/conda/bin/python", "/home/a/x.py"), brief=True) == "python /home/a/x.py"
    assert neutral_command(("/",), brief=True) == "/"
    assert neutral_command((), brief=True) == ""


@pytest.mark.parametrize(
    ("text", "width"),
    [("abc", 3), ("李小明", 6), ("e\u0301", 1), ("한", 2), ("ｱ", 1), ("Ａ", 2), ("😀", 2), ("", 0), ("ไม่", 2)],
)
def test_width_is_counted_in_columns(text, width):
    assert display_width(text) == width


@given(st.binary(max_size=40).map(os.fsdecode) | st.text(max_size=40), st.integers(0, 30))
@example("李小明", 4)
@example("e\u0301e\u0301", 1)
def test_a_shortened_text_takes_at_most_the_width(text, width):
    short = shorten(neutralise(text), width)

    assert display_width(short) <= width
    assert short == neutralise(text) or short == "" or short.endswith("…")


def test_wide_characters_and_marks_line_up_with_latin():
    lines = table([["李小明", "1"], ["bob", "22"], ["Zoe\u0308", "3"]], ["USER", "GPUS"], align="<>")

    assert lines == ["USER    GPUS", "李小明     1", "bob       22", "Zoe\u0308        3"]
    assert {display_width(line) for line in lines} == {12}


def test_a_pipe_gets_everything_and_a_terminal_what_fits():
    rows = [["claim", "python " + "x" * 100], ["pid", "李" * 60]]

    assert all(len(line) > 60 for line in table(rows))
    assert [display_width(line) for line in table(rows, width=39)] == [39, 38]
    assert all(line.endswith("…") for line in table(rows, width=39))


@given(st.lists(st.tuples(*[st.text(max_size=12).map(neutralise)] * 3), min_size=1, max_size=5), st.integers(1, 40))
def test_no_line_is_wider_than_the_terminal(rows, width):
    assert all(display_width(line) <= width for line in table(rows, ["A", "B", "C"], align=">", width=width))


def test_no_line_ends_in_blanks():
    assert table([["a", "", ""], ["bbb", "c", ""]]) == ["a", "bbb  c"]


def test_colour_changes_no_column():
    plain = table([["free", "x"], ["in use", "y"]], width=20)
    rows, paint = [["free", "x"], ["in use", "y"]], lambda cell, _row, column: cell if column else f"<{cell}>"
    painted = table(rows, width=20, paint=paint)

    assert [line.replace("<", "").replace(">", "") for line in painted] == plain


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, "\x1b[1;32mfree\x1b[0m"),
        ({"NO_COLOR": ""}, "\x1b[1;32mfree\x1b[0m"),
        ({"NO_COLOR": "1"}, "free"),
        ({"TERM": "dumb"}, "free"),
    ],
)
def test_colours_are_for_terminals_only_and_can_be_declined(environ, shown):
    assert style(Terminal(), environ)("free", "bold green") == shown
    assert style(io.StringIO(), environ)("free", "bold green") == "free"


def test_a_terminal_without_unicode_gets_escapes_and_no_traceback():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    put(["李…"], stream)
    stream.flush()

    assert raw.getvalue() == b"\\u674e\\u2026\n"


@given(st.binary(max_size=30).map(os.fsdecode) | st.text(st.characters(), max_size=30))
def test_json_is_ascii_and_valid_whatever_the_text(text):
    encoded = json_text({"command": (text, None, 1.5)})

    assert encoded.isascii()
    json.loads(encoded)["command"][0].encode("utf-8")


STEPS = (Step("log"),)
SMALL = Policy("small", (MemoryRule(above=parse_memory_amount("20MiB")),), hold=0.0, steps=STEPS)


def test_deeds_are_remembered_over_a_restart_in_spite_of_a_flood(tmp_path: Path, monkeypatch):
    log = tmp_path / "events.jsonl"
    monkeypatch.setenv("GPUGUARD_EVENTS", str(log))
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 2**16)
    monkeypatch.setattr(guard_limits, "BURST_LINES", 50)
    dog = Watchdog(Scripted(a_snapshot(a_device())), (SMALL,), append=audit_log.append)
    with a_scene() as scene:
        scene.context(append=dog._record)
        assert scene.act().word == "sent"
    for _ in range(3000):
        dog._record(Event(time=time.time(), kind="log", outcome="done", user="bob", pid=7))

    assert len(recover_actions(str(log), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()).actions) == 1
