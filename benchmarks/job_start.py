"""What stands before every job: time, memory and driver calls of `gpuguard run`, on 8 fake devices.

    python benchmarks/job_start.py --pairs 40

The real nvidia-ml-py on a fake driver library with no latency.  Times are medians of A B A B runs, with compiled
byte code, and compared with the floor: `python -c "import pynvml; pynvml.nvmlInit()"`.  Memory is what /proc says of
the wrapper and of all its processes together (Pss) while the job runs, and while it waits for a device.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import GIB, FakeNvml
from starters import surroundings

FLOOR = [sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"]
GPUGUARD = [sys.executable, "-c", "import sys; from gpuguard.__main__ import main; sys.exit(main())"]
SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
COMMANDS = {
    "floor: import pynvml; nvmlInit()": FLOOR,
    "gpuguard run -- true": [*GPUGUARD, "run", "--", "true"],
    "gpuguard run --exec -- true": [*GPUGUARD, "run", "--exec", "--", "true"],
    "gpuguard select": [*GPUGUARD, "select"],
    "gpuguard who": [*GPUGUARD, "who"],
}
IMPORTS = ("pass", "import gpuguard")


def medians(commands: Mapping[str, Sequence[str]], pairs: int, environment: dict[str, str]) -> dict[str, float]:
    """Wall time of each command in ms, the median of *pairs* rounds in which each runs once."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(pairs):
        for name, words in commands.items():
            begun = time.perf_counter()
            subprocess.run(words, env=environment, check=True, **SILENT)
            times[name].append((time.perf_counter() - begun) * 1000)
    return {name: statistics.median(all_times) for name, all_times in times.items()}


def driver_calls(fake: FakeNvml, environment: dict[str, str], *words: str) -> int:
    """How many calls reach the driver library during one command."""
    fake.reset_calls()
    subprocess.run([*GPUGUARD, *words], env=environment, check=True, **SILENT)
    return sum(fake.calls().values())


def memory(environment: dict[str, str], options: list[str], is_there: Callable[[int], bool]) -> str:
    """Resident memory of the wrapper, and proportional memory of it and its children without the job."""
    with subprocess.Popen([*GPUGUARD, "run", *options, "--", "sleep", "600"], env=environment, **SILENT) as wrapper:
        while not is_there(wrapper.pid):
            time.sleep(0.05)
        time.sleep(1)
        family = [wrapper.pid, *(pid for pid in children(wrapper.pid) if command(pid)[:1] != ["sleep"])]
        resident = amount(f"/proc/{wrapper.pid}/status", "VmRSS")
        proportional = sum(amount(f"/proc/{pid}/smaps_rollup", "Pss") for pid in family)
        wrapper.send_signal(signal.SIGTERM)
    return f"{resident:6.1f} MiB resident; {proportional:.1f} MiB (Pss) with its worker"


def children(pid: int) -> list[int]:
    """The processes that *pid* has started, in any of its threads."""
    return [int(word) for each in Path(f"/proc/{pid}/task").glob("*/children") for word in each.read_text().split()]


def command(pid: int) -> list[str]:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def amount(path: str, name: str) -> float:
    """A row of a file in /proc, in MiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def measure_time(environment: dict[str, str], pairs: int) -> None:
    """Print how long each command takes, in ms and in floors."""
    times = medians(COMMANDS, pairs, environment)
    floor = next(iter(times.values()))
    for name, median in times.items():
        show(name, f"{median:6.1f} ms  {median / floor:.2f} x floor")
    bare, lazy = medians({name: [sys.executable, "-c", name] for name in IMPORTS}, pairs, environment).values()
    show("import gpuguard", f"{lazy - bare:6.1f} ms over bare python ({bare:.1f} ms)")


def measure_calls(fake: FakeNvml, environment: dict[str, str]) -> None:
    """Print how many calls reach the driver library."""
    show("driver calls of select -n 1", f"{driver_calls(fake, environment, 'select'):4d}    8 idle devices")
    users = [subprocess.Popen(["sleep", "600"]) for _ in range(20)]
    for number, user in enumerate(users):
        fake.add_process(number // 5, user.pid, 8 * GIB)
    show("", f"{driver_calls(fake, environment, 'select'):4d}    4 of 8 devices with 5 processes each")
    for number, user in enumerate(users):
        fake.clear_processes(number // 5)
        user.kill()
        user.wait()
    show("driver calls of run -- true", f"{driver_calls(fake, environment, 'run', '--', 'true'):4d}    8 idle devices")


def measure_memory(fake: FakeNvml, environment: dict[str, str]) -> None:
    """Print what the wrapper takes while its job runs, and while it waits for a device."""
    show("supervisor while the job runs", memory(environment, ["-n", "8"], has_started_its_job))
    for index in range(8):
        fake.add_process(index, os.getpid(), 8 * GIB)
    show("supervisor while it waits", memory(environment, ["--quiet"], has_asked))


def has_started_its_job(pid: int) -> bool:
    """Whether the wrapper has a child that is the job."""
    return any(command(child)[0] == "sleep" for child in children(pid))


def has_asked(pid: int) -> bool:
    """Whether the wrapper has looked at the devices, and waits."""
    time.sleep(2)
    return True


def show(name: str, figure: str) -> None:
    """A line of the table."""
    print(f"{name:34} {figure}", flush=True)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start compiles gpuguard anew
    with tempfile.TemporaryDirectory() as place, FakeNvml(Path(place)) as fake:
        environment = surroundings(fake, Path(place) / "claims")
        measure_time(environment, args.pairs)
        measure_calls(fake, environment)
        measure_memory(fake, environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
