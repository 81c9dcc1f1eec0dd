"""How soon requests that wait begin when many GPUs become free at once, and how many processes read devices until then.

    python benchmarks/waking.py --waiters 16 --rounds 5

A job of 8 fake GPUs is killed while so many real `gpuguard run -n 1` wait.  Each job notes when it starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import FakeNvml
from job_start import children
from nodes import eventually
from starters import surroundings

GPUS = 8
SECONDS = 60.0  # for all to be there
JOB = ("sh", "-c", 'touch "$0/$$"; exec sleep 600')


def a_round(waiters: int) -> tuple[int, list[float]]:
    """How many processes read devices while all wait, and the seconds until each of the first jobs starts."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = surroundings(stack.enter_context(FakeNvml(place, devices=GPUS)), place / "claims")
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start compiles gpuguard anew

        def run(number: int, starts: Path) -> subprocess.Popen[bytes]:
            starts.mkdir(exist_ok=True)
            words = ["run", "--quiet", "--wait", "-n", str(number), "--", *JOB, str(starts)]
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuguard", *words], env=environment, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(kill, process.pid)
            return process

        before, starts = place / "before", place / "starts"
        holder = run(GPUS, before)
        assert eventually(lambda: any(before.iterdir()), SECONDS)
        waiting = [run(1, starts) for _ in range(waiters)]
        assert eventually(lambda: len(list((place / "claims").rglob("*ticket.*"))) == waiters, SECONDS)
        time.sleep(10)  # until those that found a leader have put their worker away
        workers = sum(len(children(process.pid)) for process in waiting)
        killed = time.time()
        kill(holder.pid)
        assert eventually(lambda: len(list(starts.iterdir())) >= min(GPUS, waiters), SECONDS)
        return workers, sorted(start.stat().st_mtime - killed for start in starts.iterdir())[:GPUS]


def kill(group: int) -> None:
    """A wrapper and its job."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Print the medians of all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiters", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds = [a_round(args.waiters) for _ in range(args.rounds)]
    first, last = (1000 * statistics.median(times[place] for _workers, times in rounds) for place in (0, -1))
    workers = max(number for number, _times in rounds)
    print(
        f"{args.waiters} wait with {workers} worker(s); starts after {first:.0f} ms, the {GPUS}th after {last:.0f} ms"
    )


if __name__ == "__main__":
    main()
