"""What a command that waits says: one line of a terminal, written anew; in a log all reasons, then a line a minute."""

from __future__ import annotations

import os
import re
import time
from types import SimpleNamespace

import pytest
from nodes import Gpuguard, on_terminal, start, until

from gpuguard.cli import terminal as progress
from gpuguard.cli.run import WaitProgress
from gpuguard.cli.terminal import print_notice
from gpuguard.errors import NotEnoughGpus
from gpuguard.sanitize import display_width

MISSING = NotEnoughGpus("wanted 2 GPUs: number 1 of 1 in line, starts now.\n  device 0: busy\nadvice", 2, 0)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test moves forward."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: os.terminal_size((40, 24)))


def test_a_log_gets_all_reasons_once_and_then_a_line_a_minute(clock, capsys):
    log = WaitProgress(False)
    for _ in range(150):
        log.missing(MISSING)
        clock[0] += 1

    assert capsys.readouterr().err.splitlines() == [
        "gpuguard: waiting for 0s: wanted 2 GPUs: number 1 of 1 in line, starts now.",
        "  device 0: busy",
        "advice",
        "gpuguard: waiting for 1m: wanted 2 GPUs: number 1 of 1 in line, starts now.",
        "gpuguard: waiting for 2m: wanted 2 GPUs: number 1 of 1 in line, starts now.",
    ]


def test_a_terminal_has_one_line_a_second_at_most_that_fits_and_goes_away(clock, terminal, capsys):
    line = WaitProgress(False)
    for _ in range(5):
        line.missing(MISSING)
        clock[0] += 0.5
    line.done()
    line.done()

    *shown, last = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert shown == [f"gpuguard: waiting for {n}s: number 1 o…" for n in (0, 1, 2)]
    assert last == ""


def test_nothing_said_leaves_nothing_to_clean_up(terminal, capsys):
    WaitProgress(False).done()
    quiet = WaitProgress(True)
    quiet.missing(MISSING)
    quiet.done()

    assert capsys.readouterr().err == ""


def test_hostile_words_are_neutral_and_wide_ones_fit(terminal, capsys):
    print_notice("\x1b[2J李小明" * 9, again=True)

    shown = capsys.readouterr().err.removeprefix("\r\x1b[K")
    assert shown.isprintable() and 36 <= display_width(shown) <= 37


@pytest.mark.parametrize("background", [False, True])
def test_a_terminal_that_cannot_write_a_line_anew_is_told_as_a_log(clock, terminal, monkeypatch, capsys, background):
    if background:
        monkeypatch.setattr(progress.os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    else:
        monkeypatch.setenv("TERM", "dumb")
    line = WaitProgress(False)
    for _ in range(5):
        line.missing(MISSING)
        clock[0] += 1
    line.done()

    assert capsys.readouterr().err == f"gpuguard: waiting for 0s: {MISSING}\n"


def test_in_the_background_nothing_is_written_over_what_the_user_types(clock, terminal, monkeypatch, capsys):
    line = WaitProgress(False)
    line.missing(MISSING)
    monkeypatch.setattr(progress.os, "tcgetpgrp", lambda _: os.getpgrp() + 1)  # Ctrl-Z, bg
    for _ in range(5):
        clock[0] += 1
        line.missing(MISSING)
    line.done()

    assert capsys.readouterr().err.count("\r") == 1


def test_a_terminal_that_went_away_ends_nothing(monkeypatch, capsys):
    def gone(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(progress.os, "get_terminal_size", gone)
    monkeypatch.setattr(progress.sys, "stderr", SimpleNamespace(write=gone, flush=lambda: None))
    print_notice("x", again=True)


@pytest.fixture
def gpuguard(tmp_path):
    (tmp_path / "claims").mkdir()
    start(str(tmp_path / "node"), "2xH100-80GB")
    return Gpuguard(tmp_path, None)


@pytest.fixture
def job(gpuguard):
    """A job on both devices."""
    with gpuguard.start("run", "-n", "2", "--time-limit", "2h", "--", "sh", "-c", "echo ready; exec sleep 60") as job:
        job.stdout.readline()
        yield job
        job.terminate()


def undated(text):
    """What was said, as if it had been said at once."""
    return re.sub(r"about 1h59m\b", "about 2h", re.sub(r"waiting for \d+s\b", "waiting for 0s", text))


@pytest.mark.terminal
@pytest.mark.parametrize("columns", [30, 80, 200])
def test_a_waiting_run_keeps_to_one_line_and_leaves_none(gpuguard, job, columns):
    words = gpuguard.words("run", "-n", "2", "--", "echo", "it runs")
    with on_terminal(words, gpuguard.environment, columns=columns) as (_, shown_until):
        before = shown_until(lambda text: text.count("\r\x1b[K") >= 3)
        job.terminate()
        shown = shown_until()

    lines = before.split("\r\x1b[K")[1:]
    assert "\n" not in before and all(display_width(line + "^C") < columns for line in lines)
    reason = "gpuguard: waiting for 0s: number 1 of 1 in line, starts in about 2h, when device "
    whole = columns - 4 - len("1h59m10s") + len("2h0s")  # of a line that was cut before its times were made equal
    assert any(undated(line).startswith(reason[:whole].rstrip()) for line in lines)
    assert re.search(r"\r\x1b\[Kgpuguard: GPU 0,1 \(SIMULATED\) · claim \w+\r\nit runs\r\n", shown)


@pytest.mark.terminal
def test_ctrl_c_leaves_an_empty_line(gpuguard, job):
    with on_terminal(gpuguard.words("run", "--", "true"), gpuguard.environment) as (process, shown_until):
        shown_until(lambda text: "waiting for" in text)
        process.send_signal(2)

        assert process.wait(timeout=30) == -2
        assert shown_until().endswith("\r\x1b[K")


def test_a_log_of_a_waiting_run_names_every_device_once(gpuguard, job, tmp_path):
    with open(tmp_path / "log", "w") as log, gpuguard.start("run", "--", "true", stderr=log) as second:
        until(lambda: "shows each device" in (tmp_path / "log").read_text())
        second.kill()

    text = undated((tmp_path / "log").read_text())
    assert text.startswith("gpuguard: waiting for 0s: wanted 1 GPU: number 1 of 1 in line, starts in about 2h, when ")
    assert [text.count(f"\n  device {index}: claimed by ") for index in (0, 1)] == [1, 1]
    assert text.endswith("\n`gpuguard explain -n 1` shows each device.\n")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--no-wait",), 75, "gpuguard: wanted 1 GPU: not now; it would be number 2 of 2 in line, "),
        (("--wait", "0s"), 75, "gpuguard: wanted 1 GPU: not now; it would be number 2 of 2 in line, "),
        (("--wait", "300ms"), 124, "the time to wait is over: wanted 1 GPU: number 2 of 2 in line, "),
        (("--no-wait", "--or", "-n 2"), 75, "number 2 of 2 in line"),
        (("-n", "3"), 125, "wanted 3 GPUs, but only 2 exist."),
        (("-n", "3", "--wait", "300ms"), 125, "wanted 3 GPUs, but only 2 exist."),
    ],
)
def test_the_exit_code_of_run_behind_others_says_why(gpuguard, job, words, code, message):
    with gpuguard.start("run", "-n", "2", "--", "true") as first:
        first.stderr.readline()
        done = gpuguard("run", *words, "--", "true")
        first.kill()

    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


def test_a_free_device_that_is_kept_for_who_came_before_is_not_taken(gpuguard):
    with gpuguard.start("run", "--time-limit", "1h", "--", "sh", "-c", "echo ready; exec sleep 60") as job:
        job.stdout.readline()
        with gpuguard.start("run", "-n", "2", "--", "true") as first:
            first.stderr.readline()
            longer = gpuguard("run", "--no-wait", "--time-limit", "2h", "--", "true")
            shorter = gpuguard("run", "--no-wait", "--time-limit", "10m", "--", "echo", "ran")
            first.kill()
        job.terminate()

    assert longer.returncode == 75 and "held back: it would delay " in longer.stderr
    assert (shorter.returncode, shorter.stdout) == (0, "ran\n")
