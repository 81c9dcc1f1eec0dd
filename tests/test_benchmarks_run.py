"""benchmarks/run: one tiny row of each kind, without the programs that it compares with."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chances import IN_CAMPAIGNS, luck
from nodes import eventually
from proc import born_with
from queues import a_ticket
from soak import FIFTHS, Reading, faults
from sources import ROOT
from start_times import order_violations

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


# Each script in a process of its own, so that none finds what another has put on the path.
IMPORT_EACH = """
import importlib, os, sys
import gpuguard.daemon.service, gpuguard.queue.waiter, urllib.request  # once for all of them
for name in sorted(file.removesuffix(".py") for file in os.listdir(sys.path[0]) if file.endswith(".py")):
    if not os.fork():
        importlib.import_module(name)
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""


def without_imports(folder: Path) -> list[str]:
    """The scripts in a folder that cannot import what they name."""
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{IMPORT_EACH}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def test_each_script_finds_what_it_imports(tmp_path):
    (tmp_path / "planted.py").write_text("import test_metrics")

    assert (without_imports(BENCHMARKS), without_imports(tmp_path)) == ([], ["planted"])


CHAOS_WORDS = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--seconds", "4"]


@pytest.mark.root
@pytest.mark.parametrize(
    "words", ["everybody", *(pytest.param(words, marks=IN_CAMPAIGNS) for words in ("broker", "keeper --amd"))]
)
def test_nobody_loses_a_device_or_is_hit_while_everything_dies(words: str) -> None:
    seed = str(luck(f"chaos {words}").randrange(2**31))
    command = [*CHAOS_WORDS, "--seed", seed, "--kind", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 faults\n")


@pytest.mark.root
@IN_CAMPAIGNS
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
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def test_a_guard_that_looks_hundreds_of_times_does_not_grow() -> None:
    done = soaked(6)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing has grown\n")


@IN_CAMPAIGNS
@pytest.mark.parametrize(
    ("variant", "found"),
    [("descriptors", "descriptors, and has"), ("memory", "it has grown"), ("worker", "workers")],
)
def test_a_guard_that_keeps_something_of_each_look_or_starts_its_worker_again_is_found(variant, found):
    done = soaked(6, "--variant", variant)

    assert done.returncode == 1, done.stdout + done.stderr
    assert found in done.stdout


@pytest.mark.parametrize(
    ("late", "found"),
    [
        ({"memory": 22.1}, "it has grown by 2.1 MiB"),
        ({"descriptors": 33}, "it had at most 30 descriptors, and has at least 33"),
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
    assert faults([ONE] * 4 * FIFTHS + [replace(ONE, descriptors=32)] * FIFTHS) == []


def told(*words: str) -> list[dict[str, Any]]:
    """The rows of benchmarks/start_times.py."""
    words = (sys.executable, str(BENCHMARKS / "start_times.py"), "--json", *words)
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
    return list(json.loads(done.stdout)["rows"])


@pytest.mark.parametrize("seed", ["1", "2"])
def test_starts_that_are_told_keep_the_order_and_the_likely_one_is_no_later_than_the_certain_one(seed: str) -> None:
    (row,) = told("--jobs", "100", "--seed", seed)

    assert row["told"] > 20 and row["certain"] > 20
    assert (row["likely_after_certain"], row["order_violations"]) == (0, 0)


def test_jobs_samples_and_quantiles_are_replayed(tmp_path: Path) -> None:
    """Each asks for more than the server can do at once; two requests for all of it wait for one another."""
    jobs, samples, quantiles = (tmp_path / name for name in ("jobs", "samples", "quantiles"))
    jobs.write_text("user,t_submit_s,gpus,duration_s\n" + "a,0,8,100\n" * 3)
    pods = "".join(f"p{pod},{at},{50 * (at < 500)},0\n" for pod in range(30) for at in range(0, 1000, 57))
    samples.write_text(f"pod,t_s,util,mem_mib\n{pods}")
    quantiles.write_text("percentile,a,b\n0,0,1\n50,20,30\n100,99,100\n")
    rows = told(str(jobs), str(samples), str(quantiles), "--limits", "100%")

    assert [row["drawn"] for row in rows] == ["limits", "pods, limits", "lengths, arrivals, GPUs, limits"]
    assert [row["jobs"] for row in rows] == [3, 12, 400]
    assert rows[0]["told"] == 2 and all(row["waited"] > 0 for row in rows)


def test_a_later_request_that_is_told_an_earlier_start_is_seen() -> None:
    first, second, other = a_ticket(), a_ticket(), a_ticket(2)

    assert order_violations([(first, 9.0), (second, 8.0), (other, 1.0)]) == 1
    assert order_violations([(first, 8.0), (second, None), (other, 1.0)]) == 0
