"""What lasts longer than two seconds says on a terminal how far it is, and nowhere else."""

import os
import subprocess
import sys

import pytest
from nodes import on_terminal

# The command line, but for a user without patience: a bar shows at once, and as often as a fast machine needs.
AT_ONCE = """
import sys
from gpuguard.cli import main, progress
progress.SHOWN_AFTER, progress.DRAWN_EVERY = 0.0, 0.01
main(sys.argv[1:])
"""
BY_HAND = """
import time
from gpuguard.cli import progress
progress.SHOWN_AFTER = {after}
with progress.progress("reading week.csv") as advance:
    {step}
    time.sleep(2.0)
print("the end")
"""


@pytest.fixture
def week(tmp_path):
    """A policy, and a table of 8,000 samples."""
    (tmp_path / "p.yaml").write_text("version: 1\npolicies: [{name: idle, when: {idle: {below: 5%}}, steps: [warn]}]\n")
    rows = (f"{10 * second},j{job},50\n" for second in range(2_000) for job in range(4))
    (tmp_path / "week.csv").write_text("time_seconds,job,utilization_percent\n" + "".join(rows))
    return tmp_path


def backtest(*program):
    return [sys.executable, *program, "policy", "backtest", "p.yaml", "--on", "week.csv"]


@pytest.mark.terminal
def test_a_backtest_says_how_far_it_is_in_reading_and_in_judging(week):
    with on_terminal(backtest("-c", AT_ONCE), os.environ, cwd=week, columns=100) as (_, shown_until):
        shown = shown_until()

    assert "reading week.csv  [" in shown
    assert "judging week.csv  [#" in shown
    assert "%, " in shown and " left" in shown


def test_a_pipe_gets_no_bar(week):
    done = subprocess.run(backtest("-c", AT_ONCE), cwd=week, capture_output=True, text=True, check=True)

    assert (done.stderr, "[" in done.stdout) == ("", False)


@pytest.mark.terminal
@pytest.mark.parametrize(
    ("after", "step", "shows"),
    [
        (0.0, "advance(0.5)", "reading week.csv  [############............] 50%, "),
        (0.0, "pass", "reading week.csv  [###.....................] "),
        (60.0, "advance(0.5)", None),
    ],
    ids=["a known share", "an unknown share", "less time than that"],
)
def test_the_bar_shows_the_share_or_that_time_passes_and_is_gone_at_the_end(after, step, shows):
    words = [sys.executable, "-c", BY_HAND.format(after=after, step=step)]
    with on_terminal(words, os.environ, columns=100) as (_, shown_until):
        shown = shown_until()

    assert ("reading week.csv" in shown) == bool(shows)
    assert not shows or shows in shown
    assert shown.rpartition("\x1b[K")[2] == "the end\r\n"
