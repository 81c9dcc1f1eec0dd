"""What numbers for a training log cost: gpuguard.collector beside nvitop's ResourceMetricCollector, on a fake driver.

    python benchmarks/collecting.py [--python /path/to/python/with/nvitop] [--devices 8] [--seconds 10]

Each runs alone for some seconds at ten looks per second; CPU is that of the process and of all its children, per look;
memory is the proportional share (PSS) of all of them, without that of a bare interpreter.  The fake driver answers at
once: a real one adds the time of its calls to both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import FakeNvml

ROOT = Path(__file__).resolve().parent.parent

_COMMON = """
import json, os, resource, sys, time
def pss(pid):
    return sum(int(line.split()[1]) for line in open(f"/proc/{pid}/smaps_rollup") if line.startswith("Pss:"))
def family():
    threads = os.listdir("/proc/self/task")
    children = [pid for thread in threads for pid in open(f"/proc/self/task/{thread}/children").read().split()]
    return [os.getpid(), *map(int, children)]
def cpu(own):
    ticks = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for pid in own[1:]:
        fields = open(f"/proc/{pid}/stat").read().rpartition(") ")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total
bare = pss(os.getpid())
seconds = float(sys.argv[1])
"""
_END = """
time.sleep(1)
own = family()
began, start = cpu(own), time.monotonic()
time.sleep(seconds)
used, looks = cpu(own) - began, (time.monotonic() - start) / 0.1
print(json.dumps({"cpu_ms": 1000 * used / looks, "memory_mib": (sum(map(pss, own)) - bare) / 1024,
                  "numbers": len(collect())}))
os._exit(0)
"""
PROGRAMS = {
    "gpuguard.collector": """
import gpuguard
numbers = gpuguard.collector(interval=0.1)
numbers.start()
collect = numbers.collect
""",
    "nvitop ResourceMetricCollector": """
from nvitop import Device, ResourceMetricCollector
numbers = ResourceMetricCollector(Device.all(), interval=0.1)
numbers.start("train")
numbers.daemonize(lambda metrics: True, interval=0.1)
collect = numbers.collect
""",
}


def measure(python: str, program: str, seconds: float, fake: FakeNvml) -> dict[str, float] | None:
    """CPU milliseconds per look, MiB, and how many numbers there are; None when it does not run."""
    environment = {**os.environ, **fake.environment(), "PYTHONPATH": str(ROOT)}
    environment.pop("GPUGUARD_BACKEND", None)
    words = [python, "-c", _COMMON + program + _END, str(seconds)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stderr.strip().splitlines()[-1], file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has nvitop")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        fake = FakeNvml(Path(place), devices=args.devices)
        print("| collector | CPU per look | memory | numbers |\n|---|---|---|---|")
        for name, program in PROGRAMS.items():
            python = sys.executable if name.startswith("gpuguard") else args.python
            if found := measure(python, program, args.seconds, fake):
                print(
                    f"| {name} | {found['cpu_ms']:.1f} ms | {found['memory_mib']:.1f} MiB | {found['numbers']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
