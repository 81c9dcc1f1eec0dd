"""benchmarks/run: one tiny row of each kind, without the programs that it compares with."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chances import luck
from nodes import eventually
from proc import born_with
from soak import FIFTHS, Reading, faults
from sources import ROOT

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
WORDS = [sys.executable, str(BENCHMARKS / "run"), "--quick", "--peers", "none"]
PYTHON = [sys.executable, "-c"]
BESIDE = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"


def test_a_row_is_written_between_the_markers_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# Before\n\n<!-- benchmarks/run writes from here -->\nold\n<!-- to here -->\n\n## After\n")

    for row in ("waiters", "policies", "waiters"):
        subprocess.run([*WORDS, "--only", row, "--output", str(page)], check=True, capture_output=True, timeout=60)

    text = page.read_text()
    assert text.startswith("# Before\n") and text.endswith("\n## After\n")
    assert "old" not in text
    assert text.count("### policies: ") == text.count("### waiters: ") == 1
    assert text.index("### policies: ") < text.index("### waiters: "), "in the order of the table of rows"
    assert "`--quick`" in text and "load" in text


SCRIPTS = {  # what it shows: (a script beside the benchmarks, what it prints)
    "the page names each cell in which another program is before gpuguard": (
        """
from section import places
table = "| | 8 x 0 us, ms | MiB |\\n| --- | --- | --- |\\n| `ours` | 30 | 9 |\\n| `own too` | 10 (3.00) | 9 |\\n"
print(places({'who: Who uses what': table + '| `theirs` | 60 (0.50) | 8 (1.12) |'}, {'theirs'}))
""",
        "Of 2 such cells, gpuguard is not before the other program in 1:\n\n- who, `theirs`: MiB (1.12)\n",
    ),
    "a program that fails is named with its error": (
        """
from measuring import in_turns, node
from peers import Program
broken = Program('broken', (sys.executable, '-c', 'raise SystemExit("no such thing")'))
calls = Program('calls', (sys.executable, '-c', 'import pynvml; pynvml.nvmlInit()'))
with node(2) as on:
    found = in_turns((broken, calls), on, None, 1)
print(found['broken'].error, len(found['broken'].wall))
print(sum(found['calls'].calls.values()), found['calls'].resident > 5, found['calls'].cpu[0] > 0)
""",
        "exit 1: no such thing 0\n1 True True\n",
    ),
    "who asks nvidia-smi asks the driver": (
        """
import subprocess
from measuring import node
with node(2) as on:
    on.fake.reset_calls()
    subprocess.run(['nvidia-smi', '--query-gpu=index,memory.total'], env=on.environment, check=True)
    listed = ['nvidia-smi', '--query-compute-apps=gpu_uuid,pid,used_gpu_memory']
    rows = subprocess.run(listed, env=on.environment, check=True, capture_output=True, text=True).stdout
    calls = on.fake.calls()
print(rows.count(', 1024\\n'), calls['nvmlDeviceGetComputeRunningProcesses_v3'], calls['nvmlInit_v2'])
""",
        "0, 81559\n1, 81559\n10 2 2\n",
    ),
    "the CPU time of what a monitor has started, and of what has ended, is the monitor's": (
        """
import os, subprocess
from metrics import cpu_ms
before = cpu_ms([os.getpid()])
busy = 'import time\\nwhile time.process_time() < 0.3: pass'
subprocess.run([sys.executable, '-c', busy], check=True)
print(cpu_ms([os.getpid()]) - before > 250, cpu_ms([2**22]))
""",
        "True 0.0\n",
    ),
    "growth is fitted": (
        """
from measuring import node
from scaling import exponent
print(round(exponent({1: 2, 10: 20, 100: 200}), 3), round(exponent({1: 1, 10: 100}), 3))
""",
        "1.0 2.0\n",
    ),
}


@pytest.mark.parametrize(("script", "output"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_part_of_the_benchmarks_does_what_it_should(script: str, output: str) -> None:
    done = subprocess.run([*PYTHON, BESIDE + script], check=True, capture_output=True, text=True, timeout=60)

    assert done.stdout == output


def test_a_fleet_that_is_told_to_end_leaves_no_prometheus_behind(tmp_path: Path) -> None:
    pid, program = tmp_path / "pid", tmp_path / "prometheus"
    program.write_text(f"#!/bin/sh\necho $$ >{pid}.new\nmv {pid}.new {pid}\nexec sleep 60\n")
    program.chmod(0o755)
    script = BESIDE + (
        "import fleet\nfleet.fleet_store.per_page = fleet.fleet_store.on_disk = lambda: None\n"
        "sys.argv[1:] = ['nodes', '1']\nfleet.main()\n"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*PYTHON, script], env=environment) as running:
        try:
            assert eventually(pid.exists)
            running.terminate()
            status = running.wait(30)
        finally:
            running.kill()

    assert status == 143
    assert not os.path.exists(f"/proc/{pid.read_text().strip()}")
    assert {each.name for each in tmp_path.iterdir()} == {"pid", "prometheus"}


def test_it_leaves_nothing_behind_when_it_is_told_to_end(tmp_path: Path) -> None:
    environment, mark = {**os.environ, "TMPDIR": str(tmp_path)}, f"TMPDIR={tmp_path}"
    words = [*WORDS, "--only", "who", "--output", os.devnull]
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as running:
        try:
            assert eventually(lambda: len(born_with(mark)) > 20)
            running.terminate()
            status = running.wait(30)
        finally:
            running.kill()

    assert status == 143
    assert eventually(lambda: born_with(mark) == [])
    assert list(tmp_path.iterdir()) == []


CHAOS_WORDS = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--seconds", "6"]


@pytest.mark.root
@pytest.mark.parametrize("kind", ["everybody", "broker", "keeper"])
def test_nobody_loses_a_device_or_is_hit_while_everything_dies(kind: str) -> None:
    seed = str(luck(f"chaos {kind}").randrange(2**31))
    done = subprocess.run([*CHAOS_WORDS, "--kind", kind, "--seed", seed], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 faults\n")


@pytest.mark.root
@pytest.mark.parametrize(
    ("variant", "found"), [("unlocked", "two have device"), ("harsh", "an innocent was signalled")]
)
def test_a_planted_fault_is_found(variant: str, found: str) -> None:
    words = [*CHAOS_WORDS, "--kind", "broker", "--variant", variant]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)

    assert done.returncode == 1, done.stdout + done.stderr
    assert found in done.stdout


ONE = Reading(memory=20.0, descriptors=30, threads=9, worker=77)


def soaked(seconds: int, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--seconds", str(seconds), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_a_guard_that_looks_hundreds_of_times_does_not_grow() -> None:
    done = soaked(12)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing has grown\n")


@pytest.mark.parametrize(
    ("variant", "found"), [("memory", "it has grown"), ("descriptors", "descriptors, and has"), ("worker", "workers")]
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
