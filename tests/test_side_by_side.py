"""What runs in several workers at once: the longest files come first, and what a machine has once is had in turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from nodes import eventually
from side_by_side import LONGEST, a_turn, longest_first

HERE = Path(__file__).parent
ASKS = """
from side_by_side import alone
def test_it(alone): pass
"""


def test_each_of_the_longest_files_is_there() -> None:
    assert [name for name in LONGEST if not (HERE / f"{name}.py").exists()] == []


def test_the_longest_files_come_first_and_the_tests_of_a_file_stay_in_order() -> None:
    names = ["test_a", LONGEST[1], "test_a", LONGEST[0], LONGEST[1], "test_b"]
    items = [SimpleNamespace(path=Path(f"{name}.py"), place=place) for place, name in enumerate(names)]

    longest_first(items)

    assert [item.place for item in items] == [3, 1, 4, 0, 2, 5]


def test_who_wants_a_machine_for_himself_waits_for_whoever_has_it(tmp_path: Path) -> None:
    (tmp_path / "test_asks.py").write_text(ASKS)
    words = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", str(tmp_path)]
    with a_turn():
        other = subprocess.Popen(words, env={"PYTHONPATH": str(HERE)}, stdout=subprocess.DEVNULL)
        assert eventually(lambda: waits_for_a_lock(other.pid), 60)

    assert other.wait(60) == 0


def waits_for_a_lock(pid: int) -> bool:
    """As /proc/locks says it: ``12: -> FLOCK  ADVISORY  WRITE PID ...``."""
    return any(line.split()[1:6:4] == ["->", str(pid)] for line in Path("/proc/locks").read_text().splitlines())
