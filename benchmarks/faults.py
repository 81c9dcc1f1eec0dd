"""How long each command takes to answer while one of 8 devices hangs, crashes or is lost.

    python benchmarks/faults.py

The faults are those of tests/test_faulty_drivers.py, which checks what the answers say.  The bound is 5 s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import FakeNvml
from nodes import Gpuguard
from test_faulty_drivers import ONE_BAD_DEVICE

BOUND_SECONDS = 5.0
COMMANDS = (["who"], ["explain"], ["select", "-n", "7"], ["run", "--no-wait", "-n", "7", "--", "true"])


def main() -> int:
    """Print a row per fault: the seconds that each command took."""
    print(f"{'':50}" + "".join(f"{words[0]:>9}" for words in COMMANDS))
    slowest = 0.0
    for name, break_it in {"nothing": lambda fake: None, **ONE_BAD_DEVICE}.items():
        with tempfile.TemporaryDirectory() as place, FakeNvml(Path(place)) as fake:
            break_it(fake)
            gpuguard = Gpuguard(Path(place), fake)
            took = []
            for words in COMMANDS:
                begun = time.monotonic()
                assert gpuguard(*words, cwd=place).returncode == 0  # in a process of its own
                took.append(time.monotonic() - begun)
        slowest = max(slowest, *took)
        print(f"{name:50}" + "".join(f"{seconds:7.2f} s" for seconds in took), flush=True)
    print(f"slowest {slowest:.2f} s")
    return 1 if slowest > BOUND_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
