"""Instructions of a start, counted: they say the same on a busy machine as on an idle one, where times do not.

    python benchmarks/instructions.py            (needs valgrind)

Each command runs under callgrind on 8 fake devices, half of them in use.  Counted are the process that was typed and
the one that reads the devices, which work at the same time; both with the start of their interpreter.  `run` is
counted up to the exec of its job, which fails here: valgrind does not know pidfd_open(2), by which a job is watched.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from job_start import FLOOR, GPUGUARD
from measuring import node
from section import table

SELECT = "gpuguard.select_devices(1)"
# Valgrind makes a process larger than what a sampler is copied from.
IMPORT = "import gpuguard; from gpuguard.backends import worker as sampler; sampler.SMALL = 2**40"
COMMANDS: Mapping[str, Sequence[str]] = {
    "`python -c pass`": (sys.executable, "-c", "pass"),
    "`import pynvml; nvmlInit()` (floor)": FLOOR,
    "`gpuguard run --exec`": (*GPUGUARD, "run", "--exec", "--", "/nonexistent"),
    "`gpuguard select`": (*GPUGUARD, "select"),
    "`gpuguard who`": (*GPUGUARD, "who"),
    "`gpuguard.select_devices`": (sys.executable, "-c", f"{IMPORT}; {SELECT}"),
    "... twice": (sys.executable, "-c", f"{IMPORT}; {SELECT}; {SELECT}"),
}


def counted(words: Sequence[str], environment: Mapping[str, str]) -> list[float]:
    """Millions of instructions of each process of a command, the one that was typed first."""
    with tempfile.TemporaryDirectory() as place:
        options = ["-q", "--tool=callgrind", "--trace-children=yes", f"--callgrind-out-file={place}/%p"]
        silent = subprocess.DEVNULL
        with subprocess.Popen(["valgrind", *options, *words], env=environment, stdout=silent, stderr=silent) as typed:
            typed.wait()
        pages = sorted(Path(place).iterdir(), key=lambda page: int(page.name) != typed.pid)
        found = [re.search(r"^(?:summary|totals): (\d+)", page.read_text(), re.MULTILINE) for page in pages]
        return [int(number[1]) / 1e6 for number in found if number]


def main() -> int:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start compiles gpuguard anew
    rows = []
    with node(8, busy=4) as on:
        environment = on.environment | {"PYTHONHASHSEED": "0"}
        for name, words in COMMANDS.items():
            silent = subprocess.DEVNULL
            subprocess.run(words, env=environment, stdout=silent, stderr=silent, check=False)  # compiles
            typed, *others = counted(words, environment)
            rows.append([name, f"{typed:.0f}", " + ".join(f"{each:.0f}" for each in others)])
    print(table(["millions of instructions", "typed", "reads the devices"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
