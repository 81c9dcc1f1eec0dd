"""What telling Prometheus costs: driver calls, CPU and memory per scrape, beside nvitop-exporter where it is installed.

    python benchmarks/metrics.py --scrapes 30 --nvitop /path/to/venv/bin/nvitop-exporter

8 fake devices (the real nvidia-ml-py on a fake driver library with no latency), 40 processes, 4 claims.  CPU is what
the scheduler counted for all threads of a program and of its worker, memory is resident and Pss.  A scrape comes each
1.2 s, because what was told within a second is told again from memory.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import GIB, FakeNvml
from guard import CLAIMS, DAEMON, DEVICES, PROCESSES
from job_start import amount, children, show
from starters import surroundings

SECONDS_BETWEEN = 1.2


def cpu_ms(pids: list[int]) -> float:
    """CPU time of all threads so far, and of the programs that these processes have started and that have ended."""
    total = 0.0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # such a program: it counts where it was started now
            files = Path(f"/proc/{pid}/task").glob("*/schedstat")
            total += sum(int(each.read_text().split()[0]) for each in files) / 1e6
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            total += (int(fields[13]) + int(fields[14])) * 1000 / os.sysconf("SC_CLK_TCK")
    return total


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            scrape(url)
            return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def started(words: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "w") as said, subprocess.Popen(words, env=environment, stdout=said, stderr=said) as process:
        try:
            yield process
        finally:
            process.terminate()


def measure(title: str, pid: int, fake: FakeNvml, url: str | None, scrapes: int) -> None:
    """Print what *pid* and its children take while *url* is asked; None: while nobody asks."""
    for _ in range(2):
        if url:
            scrape(url)
        time.sleep(SECONDS_BETWEEN)
    pids = [pid, *children(pid)]
    fake.reset_calls()
    before, begun, size = cpu_ms(pids), time.monotonic(), 0
    for _ in range(scrapes):
        size = len(scrape(url)) if url else 0
        time.sleep(SECONDS_BETWEEN)
    cpu, passed = cpu_ms(pids) - before, time.monotonic() - begun
    calls = sum(fake.calls().values())
    rss = [amount(f"/proc/{one}/status", "VmRSS") for one in pids]
    pss = sum(amount(f"/proc/{one}/smaps_rollup", "Pss") for one in pids)
    cost = f"{cpu / scrapes:6.2f} ms CPU and {calls / scrapes:4.0f} driver calls per scrape"
    memory = f"{rss[0]:.1f} MiB resident ({sum(rss):.1f} with its worker, Pss {pss:.1f})"
    show(title, f"{cost}, {cpu / passed / 10:.2f} % of a core; {memory}; page {size / 1024:.0f} KiB")


def compare(fake: FakeNvml, place: Path, environment: dict[str, str], scrapes: int, nvitop: str | None) -> None:
    def run(title: str, words: Callable[[str], list[str]], path: str = "/metrics", *, quiet: bool = False) -> None:
        address = f"127.0.0.1:{free_port()}"
        url = f"http://{address}{path}"
        with started(words(address), environment, place / "said") as process:
            if quiet:
                time.sleep(3)
            else:
                until_ready(url)
            measure(title, process.pid, fake, None if quiet else url, scrapes)

    python = [sys.executable, "-m", "gpuguard"]
    daemon = [sys.executable, "-c", DAEMON, "daemon", "--interval", "1s"]
    run("metrics --serve", lambda address: [*python, "metrics", "--serve", address])
    run("the same, ?compat=dcgm", lambda address: [*python, "metrics", "--serve", address], "/metrics?compat=dcgm")
    if nvitop:
        run(
            "nvitop-exporter",
            lambda address: [nvitop, "--bind-address", "127.0.0.1", "--port", re.sub(".*:", "", address)],
        )
    run("daemon without --metrics", lambda address: daemon, quiet=True)
    run("daemon --metrics, unasked", lambda address: [*daemon, "--metrics", address], quiet=True)
    run("daemon --metrics", lambda address: [*daemon, "--metrics", address])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scrapes", type=int, default=30)
    parser.add_argument("--nvitop", metavar="PROGRAM", help="nvitop-exporter of an environment of its own")
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as text, FakeNvml(Path(text)) as fake:
        place = Path(text)
        environment = surroundings(fake, place / "claims") | {"GPUGUARD_EVENTS": str(place / "events.jsonl")}
        jobs = [subprocess.Popen(["sleep", "1000"]) for _ in range(PROCESSES)]
        claim = [sys.executable, "-m", "gpuguard", "run", "--quiet", "-n", "1", "--", "sleep", "1000"]
        wrappers = [subprocess.Popen(claim, env=environment) for _ in range(CLAIMS)]
        try:
            time.sleep(3)
            for number, job in enumerate(jobs):
                # stays: else the fake library itself looks into /proc at each call, which is no cost of ours.
                fake.add_process(number % DEVICES, job.pid, 2 * GIB, stays=1)
            compare(fake, place, environment, args.scrapes, args.nvitop)
        finally:
            for process in (*wrappers, *jobs):
                process.terminate()
            for process in (*wrappers, *jobs):
                process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
