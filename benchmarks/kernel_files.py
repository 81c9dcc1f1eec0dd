"""What a look costs at GPUs that the kernel's files show: 8 of AMD or Intel, 40 processes on them among 500.

    python benchmarks/kernel_files.py --seconds 60

The backend reads a tree of files once a second, as its worker does for the daemon; each tenth look or so is one into
all processes.  CPU is that of this process during the looks.  The 40 are real, the 460 others exist in the tree alone,
each with 10 open files.  A real driver takes time of its own for each file, which is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from amd_trees import MI300X, AmdTree
from intel_trees import B60, GIB, IntelTree

from gpuguard.backends import OpenedBackend, amd, intel
from gpuguard.model import WHO_FIELDS

GPUS, PROCESSES, OTHERS, FILES = 8, 40, 460, 10


def of_amd(place: Path, pids: list[int]) -> OpenedBackend:
    """Each process uses a GPU by ROCm, and has it open."""
    tree = AmdTree(place, *(GPUS * [MI300X]))
    for number, pid in enumerate(pids):
        tree.computes(number % GPUS, pid, GIB)
        tree.draws(number % GPUS, pid, "drm-memory-vram:\t1 GiB", client=number)
    return amd.open(str(place))


def of_intel(place: Path, pids: list[int]) -> OpenedBackend:
    """Each process uses a GPU."""
    cards = tuple(replace(B60, address=f"0000:{3 + 2 * number:02x}:00.0") for number in range(GPUS))
    tree = IntelTree(place, cards)
    for number, pid in enumerate(pids):
        tree.client(cards[number % GPUS].address, pid, memory=GIB, ccs=50)
    return intel.open(str(place))


VENDORS = {"AMD": of_amd, "Intel": of_intel}


def add_files(place: Path, pids: list[int]) -> None:
    """Give each process open files that are none of a GPU."""
    for pid in pids:
        for folder in ("fd", "fdinfo"):
            (place / f"proc/{pid}/{folder}").mkdir(parents=True, exist_ok=True)
        for number in range(200, 200 + FILES):
            (place / f"proc/{pid}/fd/{number}").symlink_to("/dev/null" if number % 5 == 0 else f"socket:[{number}]")


def looks(backend: OpenedBackend, seconds: int) -> list[float]:
    """The seconds of CPU of each look, one a second; the first one of all is left out."""
    backend.sample(WHO_FIELDS)
    taken = []
    for _ in range(seconds):
        time.sleep(1.0)
        begun = time.process_time()
        snapshot = backend.sample(WHO_FIELDS)
        taken.append(time.process_time() - begun)
    assert sum(len(device.processes or ()) for device in snapshot.devices) == PROCESSES
    return taken


def main() -> None:
    """Measure both vendors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each vendor")
    seconds = parser.parse_args().seconds
    for vendor, machine in VENDORS.items():
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            jobs = [stack.enter_context(subprocess.Popen(["sleep", "86400"])) for _ in range(PROCESSES)]
            for job in jobs:
                stack.callback(job.kill)
            pids = [job.pid for job in jobs]
            backend = machine(place, pids)
            add_files(place, [*pids, *range(2**22 + 1, 2**22 + 1 + OTHERS)])
            taken = looks(backend, seconds)
        mean, usual, worst = (1000 * value for value in (statistics.mean(taken), statistics.median(taken), max(taken)))
        print(f"{vendor:5} {mean / 10:.2f} % of a core: a look {usual:.1f} ms of CPU (median), {worst:.1f} ms at most")


if __name__ == "__main__":
    main()
