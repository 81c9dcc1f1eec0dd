"""benchmarks/run: one tiny row of each kind, without the programs that it compares with."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chances import IN_CAMPAIGNS, luck
from nodes import eventually
from proc import born_with
from soak import FIFTHS, Reading, faults
from sources import ROOT

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
WORDS = [sys.executable, str(BENCHMARKS / "run"), "--quick", "--peers", "none"]
BESIDE = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"


def test_a_row_is_written_between_the_markers_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# Before\n\n<!-- benchmarks/run writes from here -->\nold\n<!-- to here -->\n\n## After\n")

    for row in ("waiters", "policies", "waiters"):
        subprocess.run([*WORDS, "--only", row, "--output", str(page)], check=True, capture_output=True, timeout=300)

    text = page.read_text()
    assert text.startswith("# Before\n") and text.endswith("\n## After\n")
    assert "old" not in text
    assert text.count("### policies: ") == text.count("### waiters: ") == 1
    assert text.index("### policies: ") < text.index("### waiters: "), "in the order of the table of rows"
    assert "`--quick`" in text and "load" in text


A_PROGRAM_THAT_FAILS = """
from measuring import in_turns, node
from peers import Program
broken = Program('broken', (sys.executable, '-c', 'raise SystemExit("no such thing")'))
calls = Program('calls', (sys.executable, '-c', 'import pynvml; pynvml.nvmlInit()'))
with node(2) as on:
    found = in_turns((broken, calls), on, None, 1)
print(found['broken'].error, len(found['broken'].wall))
print(sum(found['calls'].calls.values()), found['calls'].resident > 5, found['calls'].cpu[0] > 0)
"""


def test_a_program_that_fails_is_named_with_its_error() -> None:
    words = [sys.executable, "-c", BESIDE + A_PROGRAM_THAT_FAILS]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)

    assert done.stdout == "exit 1: no such thing 0\n1 True True\n"


def test_it_leaves_nothing_behind_when_it_is_told_to_end(tmp_path: Path) -> None:
    environment, mark = {**os.environ, "TMPDIR": str(tmp_path)}, f"TMPDIR={tmp_path}"
    words = [*WORDS, "--only", "who", "--output", os.devnull]
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as running:
        try:
            assert eventually(lambda: len(born_with(mark)) > 20)
            running.terminate()
            status = running.wait(60)
        finally:
            running.kill()

    assert status == 143
    assert eventually(lambda: born_with(mark) == [])
    # A C compiler that is ended leaves its assembly.
    assert [path for path in tmp_path.iterdir() if path.suffix != ".s"] == []


CHAOS_WORDS = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--seconds", "4"]


@pytest.mark.root
@pytest.mark.parametrize("kind", ["everybody", pytest.param("broker", marks=IN_CAMPAIGNS), "keeper"])
def test_nobody_loses_a_device_or_is_hit_while_everything_dies(kind: str) -> None:
    seed = str(luck(f"chaos {kind}").randrange(2**31))
    done = subprocess.run([*CHAOS_WORDS, "--kind", kind, "--seed", seed], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 faults\n")


@pytest.mark.root
@pytest.mark.parametrize(
    ("variant", "found"),
    [pytest.param("unlocked", "two have device", marks=IN_CAMPAIGNS), ("harsh", "an innocent was signalled")],
)
def test_a_planted_fault_is_found(variant: str, found: str) -> None:
    words = [*CHAOS_WORDS, "--kind", "broker", "--variant", variant]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)

    assert done.returncode == 1, done.stdout + done.stderr
    assert found in done.stdout


ONE = Reading(memory=20.0, descriptors=30, threads=9, worker=77)


def soaked(seconds: int, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--seconds", str(seconds), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def test_a_guard_that_looks_hundreds_of_times_does_not_grow() -> None:
    done = soaked(8)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing has grown\n")


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        ("descriptors", "descriptors, and has"),
        pytest.param("memory", "it has grown", marks=IN_CAMPAIGNS),
        pytest.param("worker", "workers", marks=IN_CAMPAIGNS),
    ],
)
def test_a_guard_that_keeps_something_of_each_look_or_starts_its_worker_again_is_found(variant, found):
    done = soaked(6, "--variant", variant)

    assert done.returncode == 1, done.stdout + done.stderr
    assert found in done.stdout


@pytest.mark.parametrize(
    ("late", "found"),
    [
        ({"memory": 22.1}, "it has grown by 2.1 MiB"),
        ({"descriptors": 31}, "it had at most 30 descriptors, and has at least 31"),
        ({"threads": 10}, "it had at most 9 threads, and has at least 10"),
        ({"worker": 78}, "it has had 2 workers"),
    ],
)
def test_what_grows_is_told(late: dict[str, float], found: str) -> None:
    assert faults([ONE] * 4 * FIFTHS + [replace(ONE, **late)] * FIFTHS) == [found]


def test_a_guard_that_could_hardly_be_looked_at_is_not_called_sound() -> None:
    assert faults([ONE] * (FIFTHS - 1)) == ["it could be looked at 4 times only"]


def test_what_is_only_open_for_a_moment_or_at_the_start_has_not_grown() -> None:
    start, moment = replace(ONE, memory=10.0, descriptors=20), replace(ONE, memory=20.5, descriptors=40)

    assert faults([start] * FIFTHS + [ONE, moment] * FIFTHS * 2) == []
