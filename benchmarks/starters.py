"""Many starters at the same instant: how many run, does anybody share a device, how do the others end.

    python benchmarks/starters.py --starters 64 --rounds 10 --latency 0 500
    python benchmarks/starters.py --starters 64 --rounds 3 --amd gpus
    python benchmarks/starters.py --starters 80 --rounds 3 --amd partitions
    python benchmarks/starters.py --starters 40 --rounds 5 --amd gpus --kill

Each round starts `gpuguard run -n 1` so often at once on 8 fake devices (the real nvidia-ml-py on a fake driver), or
on 8 of AMD's in a tree of files, whole or as 63 partitions: Linux has no minor for the 64th.
The job notes its device and the time of its start and end; two jobs that overlap on one device are a double.  With
--kill all wait until they have run, and each wrapper is killed as soon as its job has begun: the job lives on, and its
device is not given to another one before it has ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from amd_trees import MI300X, MI300X_CPX, AmdTree
from fake_nvml import FakeNvml

NOT_NOW = 75
JOB = """
import os, sys, time
begun, device = time.monotonic(), os.environ.get("GPUGUARD_GPUS") or os.environ["CUDA_VISIBLE_DEVICES"]
place, gate, seconds = sys.argv[1:]
open(os.path.join(place, f"begun-{os.getpid()}"), "w").close()
while gate and not os.path.exists(gate):
    time.sleep(0.01)
time.sleep(float(seconds))
open(os.path.join(place, str(os.getpid())), "w").write(f"{device} {begun} {time.monotonic()}")
"""


@dataclass
class Round:
    """How one round ended."""

    ran: int = 0
    doubles: int = 0
    tracebacks: int = 0
    seconds: float = 0.0
    devices: int = 0  # on which anything ran
    complaint: str = ""  # of one of them
    statuses: Counter[int] = field(default_factory=Counter)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} x exit {status}" for status, count in sorted(self.statuses.items()))
        return f"{self.ran} ran, {self.doubles} doubles, {self.tracebacks} tracebacks, {ends}, {self.seconds:.1f} s"


def start_together(
    place: Path,
    environment: dict[str, str],
    starters: int,
    *,
    wait: bool,
    job_seconds: float = 0.05,
    starter: Sequence[str] = (),
    kill: bool = False,
) -> Round:
    """Start *starters* wrappers at once; without waiting, the jobs last until all wrappers have decided.

    *starter* is a wrapper of somebody else; the words of the job follow it.
    """
    place.mkdir()
    gate = place / "gate"
    option = ["--wait"] if wait else ["--no-wait"]
    words = [*(starter or [sys.executable, "-m", "gpuguard", "run", *option, "-n", "1", "--"])]
    words += [sys.executable, "-S", "-c", JOB, str(place), "" if wait else str(gate), str(job_seconds)]
    begun = time.monotonic()
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(words, env=environment, **pipes) for _ in range(starters)]  # type: ignore[call-overload]
    outcome = Round()
    undecided = list(running)
    while not wait and len(undecided) > len(list(place.glob("begun-*"))) and time.monotonic() < begun + 120:
        undecided = [process for process in undecided if process.poll() is None]
        time.sleep(0.02)
    gate.touch()
    if kill:
        _kill_wrappers(place, running)
    for process in running:
        _, complaint = process.communicate(timeout=300)
        outcome.tracebacks += "Traceback" in complaint
        outcome.complaint = complaint or outcome.complaint
        outcome.statuses[process.returncode] += 1
    outcome.seconds = time.monotonic() - begun
    spans = [note.read_text().split() for note in place.iterdir() if note.name.isdigit()]
    outcome.ran, outcome.devices = len(spans), len({device for device, *_ in spans})
    outcome.doubles = overlaps([(device, float(begun), float(end)) for device, begun, end in spans])
    return outcome


def _kill_wrappers(place: Path, wrappers: Sequence[subprocess.Popen[str]]) -> None:
    """Kill each wrapper once its job has begun, until none is left."""
    while left := {wrapper.pid: wrapper for wrapper in wrappers if wrapper.poll() is None}:
        for note in place.glob("begun-*"):
            with suppress(OSError):  # the job has ended
                stat = Path("/proc", note.name.partition("-")[2], "stat").read_text()
                if wrapper := left.get(int(stat.rpartition(")")[2].split()[1])):
                    wrapper.kill()
        time.sleep(0.01)


def overlaps(spans: list[tuple[str, float, float]]) -> int:
    """How many of (device, begin, end) overlap with an earlier one on the same device."""
    last: dict[str, float] = {}
    count = 0
    for device, begun, end in sorted(spans, key=lambda span: span[1]):
        count += begun < last.get(device, 0.0)
        last[device] = max(end, last.get(device, 0.0))
    return count


def surroundings(fake: FakeNvml | None, claims: Path, backend: str = "nvml") -> dict[str, str]:
    """The environment of a wrapper on a machine with the fake driver, or that another backend reads."""
    own = {"GPUGUARD_DIR": str(claims), "GPUGUARD_EVENTS": str(claims / "events.jsonl"), "GPUGUARD_BACKEND": backend}
    foreign = ("CUDA_", "SLURM_", "GPUGUARD_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | (fake.environment() if fake else {}) | own


@contextmanager
def of_nvidia(place: Path, latency_us: int) -> Iterator[dict[str, str]]:
    """A machine with 8 devices of NVIDIA: the environment of a wrapper."""
    with FakeNvml(place) as fake:
        fake.latency_us = latency_us
        yield surroundings(fake, place / "claims")


@contextmanager
def of_amd(place: Path, *, divided: bool) -> Iterator[dict[str, str]]:
    """A machine with 8 devices of AMD, whole or divided into 63 partitions: the environment of a wrapper."""
    gpus = [MI300X_CPX] * 7 + [replace(MI300X_CPX, partitions=7)] if divided else [MI300X] * 8
    tree = AmdTree(place / "machine", *gpus)
    yield surroundings(None, place / "claims", f"amd:{tree.root}")


def main() -> int:
    """Run the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starters", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--latency", type=int, nargs="+", default=[0, 500], metavar="US", help="per driver call")
    parser.add_argument("--amd", choices=("gpus", "partitions"), help="on such devices instead")
    parser.add_argument("--wait", action="store_true", help="all wait until they have run")
    parser.add_argument("--kill", action="store_true", help="kill each wrapper while its job runs; the others wait")
    args = parser.parse_args()
    options = {"wait": args.wait or args.kill, "kill": args.kill, "job_seconds": 0.5 if args.kill else 0.05}
    faults = 0
    for latency in args.latency if args.amd is None else [0]:
        for number in range(args.rounds):
            with tempfile.TemporaryDirectory() as name:
                place = Path(name)
                machine = of_amd(place, divided=args.amd == "partitions") if args.amd else of_nvidia(place, latency)
                with machine as environment:
                    outcome = start_together(place / "round", environment, args.starters, **options)
            print(f"{args.amd or f'{latency} us per call'}, round {number + 1}: {outcome}", flush=True)
            expected = args.starters if options["wait"] else min(args.starters, 63 if args.amd == "partitions" else 8)
            faults += outcome.doubles + outcome.tracebacks + (outcome.ran != expected)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
