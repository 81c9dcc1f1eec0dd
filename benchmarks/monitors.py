"""What a steady monitor costs: gpuguard beside nvitop, gpustat, glances and nvitop-exporter, in one run, in turns.

    python benchmarks/monitors.py --seconds 30 --rounds 2 --others /path/to/venv/bin

8 fake devices (the real nvidia-ml-py on a fake driver library with no latency), 40 processes, one look per second, a
terminal of 120x40; the servers are scraped each second.  CPU is what the scheduler counted for the monitor and its
children, memory is their Pss.  The others are taken from --others, a virtual environment of their own; without it only
gpuguard is measured.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import GIB, FakeNvml
from job_start import amount, children
from metrics import cpu_ms, free_port, scrape, until_ready
from starters import surroundings

DEVICES, PROCESSES = 8, 40
COLUMNS, ROWS = 120, 40
WARM_UP_SECONDS = 5.0
END_SECONDS = 10.0  # after which a program that was asked to end is killed
OURS = {
    "gpuguard top": ["-m", "gpuguard", "top", "--every", "1s", "--fresh"],
    "gpuguard top --plain": ["-m", "gpuguard", "top", "--every", "1s", "--fresh", "--plain"],
    "gpuguard who --watch 1s": ["-m", "gpuguard", "who", "--watch", "1s", "--fresh"],
    "gpuguard metrics --serve": ["-m", "gpuguard", "metrics", "--fresh", "--serve", "127.0.0.1:{port}"],
}
THEIRS = {
    "nvitop": ["nvitop", "--monitor", "full", "--interval", "1"],
    "gpustat -i 1": ["gpustat", "-i", "1", "-cup"],
    "glances": ["glances", "--time", "1"],
    "nvitop-exporter": ["nvitop-exporter", "--bind-address", "127.0.0.1", "--port", "{port}"],
}


def measured(
    command: list[str],
    environment: dict[str, str],
    seconds: float,
    warm_up: float = WARM_UP_SECONDS,
    *,
    draws: bool = True,
) -> tuple[float, float]:
    """CPU in percent of one core, and memory in MiB, of *command* on a terminal, on which it *draws* or not."""
    port = free_port()
    serves = any("{port}" in word for word in command)
    command = [word.replace("{port}", str(port)) for word in command]
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written: list[int] = []
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
    ) as monitor:
        os.close(follower)
        threading.Thread(target=_drain, args=(leader, written), daemon=True).start()
        try:
            time.sleep(warm_up)
            url = f"http://127.0.0.1:{port}/metrics"
            if serves:
                until_ready(url)
            if monitor.poll() is not None:
                sys.exit(f"{command} has ended with status {monitor.returncode}: {_last(written)}")
            family = [monitor.pid, *children(monitor.pid)]
            begun, before = time.monotonic(), cpu_ms(family)
            drawn = len(written)
            while time.monotonic() < begun + seconds:
                time.sleep(1.0)
                if serves:
                    scrape(url)
            cpu = (cpu_ms(family) - before) / (time.monotonic() - begun) / 10
            memory = sum(map(_pss, family))
            assert serves or not draws or len(written) > drawn, "it has drawn nothing"
        finally:
            _end(monitor)
    os.close(leader)
    return cpu, memory


def _pss(pid: int) -> float:
    try:
        return amount(f"/proc/{pid}/smaps_rollup", "Pss")
    except (FileNotFoundError, ProcessLookupError):  # it was started for a moment
        return 0.0


def _end(monitor: subprocess.Popen[bytes]) -> None:
    monitor.terminate()
    try:
        monitor.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        monitor.kill()


_tail: list[bytes] = []


def _drain(leader: int, written: list[int]) -> None:
    with suppress(OSError):
        while piece := os.read(leader, 65536):
            written.append(len(piece))
            if b"\x1b[6n" in piece:  # where is the cursor?  gpustat waits for the answer
                os.write(leader, b"\x1b[1;1R")
            _tail[:] = [*_tail[-20:], piece]


def _last(written: list[int]) -> str:
    return b"".join(_tail).decode(errors="replace")[-500:] if written else "it said nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="each monitor is measured so often, in turns")
    parser.add_argument("--only", metavar="WORD", default="", help="only those with this word in their name")
    parser.add_argument("--others", metavar="DIR", help="bin/ of an environment with nvitop and gpustat")
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    commands = {name: [sys.executable, *words] for name, words in OURS.items()}
    if args.others:
        commands |= {name: [f"{args.others}/{words[0]}", *words[1:]] for name, words in THEIRS.items()}
    commands = {name: command for name, command in commands.items() if args.only in name}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as where, ExitStack() as stack:
        fake = stack.enter_context(FakeNvml(Path(where), devices=DEVICES))
        for number in range(PROCESSES):
            job = stack.enter_context(subprocess.Popen(["sleep", "7200"]))
            stack.callback(job.kill)
            # stays: else the fake library itself looks into /proc at each call, which is no cost of ours.
            fake.add_process(number % DEVICES, job.pid, GIB, stays=1)
        environment = surroundings(fake, Path(where) / "claims") | {"TERM": "xterm-256color"}
        for _ in range(args.rounds):
            for name, command in commands.items():
                found[name].append(measured(command, environment, args.seconds))
    print(f"{'':26} {'CPU of one core':>16} {'memory (Pss)':>13}")
    for name, values in found.items():
        cpu, memory = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{name:26} {cpu:14.2f} % {memory:9.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
