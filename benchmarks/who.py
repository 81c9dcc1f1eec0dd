"""What `gpuguard who` costs beside `nvitop -1` and the floor, with the daemon running and without it, in turns.

    python benchmarks/who.py --pairs 20 --others /path/to/venv/bin

8 fake devices (the real nvidia-ml-py on a fake driver library with no latency), 40 processes, 4 claims.  The floor is
`python -c "import pynvml; pynvml.nvmlInit()"`; a real driver takes longer for it than the fake one.  Wall times and CPU
(of the command and all that it starts) are medians of A B A B runs with compiled byte code.  nvitop is taken from
--others, a virtual environment of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import GIB, FakeNvml
from guard import CLAIMS, DAEMON, DEVICES, PROCESSES
from job_start import FLOOR, GPUGUARD, show
from starters import surroundings

WHO = [*GPUGUARD, "who"]


def in_turns(
    commands: Mapping[str, Sequence[str]], pairs: int, environment: dict[str, str]
) -> dict[str, tuple[float, float]]:
    """Wall and CPU time of each command in ms, medians of *pairs* rounds in which each runs once."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(pairs):
        for name, words in commands.items():
            begun, before = time.perf_counter(), _cpu()
            subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True)
            found[name].append(((time.perf_counter() - begun) * 1000, (_cpu() - before) * 1000))
    return {
        name: (_median(value[0] for value in each), _median(value[1] for value in each)) for name, each in found.items()
    }


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def compared(title: str, commands: Mapping[str, Sequence[str]], pairs: int, environment: dict[str, str]) -> None:
    """Print a table: the first of *commands* is what the others are compared with."""
    print(title)
    times = in_turns(commands, pairs, environment)
    base = next(iter(times.values()))
    for name, (wall, cpu) in times.items():
        show(f"  {name}", f"{wall:6.1f} ms ({wall / base[0]:.2f} x), {cpu:6.1f} ms of CPU ({cpu / base[1]:.2f} x)")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--others", metavar="DIR", help="bin/ of an environment with nvitop")
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    nothing = [sys.executable, "-c", "pass"]
    with tempfile.TemporaryDirectory() as where, ExitStack() as stack:
        fake = stack.enter_context(FakeNvml(Path(where), devices=DEVICES))
        environment = surroundings(fake, Path(where) / "claims")
        words = [sys.executable, "-m", "gpuguard", "run", "--quiet", "-n", "1", "--", "sleep", "7200"]
        for _ in range(CLAIMS):
            stack.callback(stack.enter_context(subprocess.Popen(words, env=environment)).terminate)
        time.sleep(3)
        for number in range(PROCESSES):
            job = stack.enter_context(subprocess.Popen(["sleep", "7200"]))
            stack.callback(job.kill)
            # stays: else the fake library itself looks into /proc at each call, which is no cost of ours.
            fake.add_process(number % DEVICES, job.pid, GIB, stays=1)
        base = {"nvitop -1": [args.others + "/nvitop", "-1"]} if args.others else {}
        commands = {**base, "floor": FLOOR, "gpuguard who": WHO, "python -c pass": nothing}
        compared("without the daemon", commands, args.pairs, environment)
        with subprocess.Popen([sys.executable, "-c", DAEMON, "daemon", "--interval", "2s"], env=environment) as daemon:
            time.sleep(5)
            compared("with the daemon", {**commands, "gpuguard who --json": [*WHO, "--json"]}, args.pairs, environment)
            daemon.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
