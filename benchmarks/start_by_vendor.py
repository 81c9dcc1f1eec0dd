"""How long the start of a job takes on 8 GPUs of AMD, whose files need no library, and on 8 of NVIDIA.

    python benchmarks/start_by_vendor.py --pairs 20

`gpuguard run --no-wait -- true`, medians of runs in turns: on a tree of AMD's files, and on the fake driver library
with the times that single calls of real drivers take (`REALISTIC` in measuring.py).  A real library also takes time to
be initialised.  12 ms is what nvmlInit took on one H200 (README.md, "On a real GPU").  165 ms is half of what Init and
Shutdown took together on 8 B200: about 100 of both cost 33 s of CPU (NVIDIA/mig-parted#332).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import FakeNvml
from job_start import GPUGUARD, medians
from measuring import REALISTIC
from starters import of_amd, surroundings

START = {"": [*GPUGUARD, "run", "--no-wait", "--", "true"]}
INITIALISING = (0, 12, 165)  # milliseconds


def of_nvidia(place: Path, stack: ExitStack, initialising: int) -> dict[str, str]:
    """The environment of a wrapper on a machine whose driver takes its time."""
    fake = stack.enter_context(FakeNvml(place))
    fake.init_delay_ms, fake.one_at_a_time = initialising, True
    fake.latency_us = REALISTIC[""]
    for function, microseconds in REALISTIC.items():
        if function:
            fake.slow(function, microseconds)
    return surroundings(fake, place / "claims")


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    with ExitStack() as stack:
        amd, *places = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in (None, *INITIALISING))
        machines = {"AMD": stack.enter_context(of_amd(amd, divided=False))} | {
            f"NVIDIA, initialised in {milliseconds} ms": of_nvidia(place, stack, milliseconds)
            for place, milliseconds in zip(places, INITIALISING, strict=True)
        }
        for environment in machines.values():
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start compiles gpuguard anew
        rounds = [[medians(START, 1, environment)[""] for environment in machines.values()] for _ in range(pairs)]
    columns = [statistics.median(times) for times in zip(*rounds, strict=True)]
    for name, median in zip(machines, columns, strict=True):
        print(f"{name:32} {median:6.1f} ms; AMD's start is {columns[0] / median:.2f} x")


if __name__ == "__main__":
    main()
