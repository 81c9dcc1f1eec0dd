"""A machine to measure on, and the one way in which a command is measured: in turns with the others."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

import fake_nvml
from fake_nvml import GIB, FakeNvml
from peers import Program, last_words, placed
from starters import surroundings

PROCESSES_EACH = 5
SLEEPER = ("setpriv", "--pdeathsig", "KILL", "sleep", "7200")  # even one that we are ended while starting goes with us
# Microseconds.  Process lists, fan, memory and utilization: driver 610 on an RTX 4090 (flightlessmango/MangoHud#2104);
# power: 2,743 answers a second from a K40m (wookayin/gpustat#76); PCIe: the reference of NVML says that each answer is
# counted over 20 ms.  Whatever nobody has told of is taken to cost what memory does.  And nobody has told how much a
# driver does for several threads at once, so here it is nothing; where each call takes 500 us they wait side by side.
REALISTIC = {
    "": 12,
    "nvmlDeviceGetComputeRunningProcesses": 4491,
    "nvmlDeviceGetGraphicsRunningProcesses": 4491,
    "nvmlDeviceGetMPSComputeRunningProcesses": 4491,
    "nvmlDeviceGetFanSpeed": 137,
    "nvmlDeviceGetUtilizationRates": 3,
    "nvmlDeviceGetPowerUsage": 365,
    "nvmlDeviceGetPcieThroughput": 20_000,
}
LATENCIES = {"0 us": {"": 0}, "500 us": {"": 500}, "realistic": REALISTIC}


@dataclass(frozen=True)
class Node:
    """A fake machine, and what the programs that run on it are told."""

    fake: FakeNvml
    environment: dict[str, str]
    place: Path
    title: str


@dataclass
class Cost:
    """What one program took; an error instead, where it could not."""

    wall: list[float] = field(default_factory=list)  # ms
    cpu: list[float] = field(default_factory=list)  # ms, with all that it started
    resident: float = 0.0  # MiB, of the largest of its processes
    calls: Mapping[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def median(self) -> float:
        """Of the wall times."""
        return statistics.median(self.wall)


def _end(job: subprocess.Popen[bytes]) -> None:
    job.kill()
    job.wait()


@contextmanager
def node(devices: int, latency: str = "0 us", busy: int | None = None) -> Iterator[Node]:
    """A machine with so many devices; on *busy* of them (None: all) are 5 processes."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fake = stack.enter_context(FakeNvml(place, devices=devices))
        for number in range(PROCESSES_EACH * (devices if busy is None else busy)):
            job = subprocess.Popen(SLEEPER)
            stack.callback(_end, job)
            # stays: else the fake library itself looks into /proc at each call, which is no cost of anybody's.
            fake.add_process(number // PROCESSES_EACH, job.pid, GIB, stays=1)
        fake.one_at_a_time = latency == "realistic"
        for function, microseconds in LATENCIES[latency].items():
            if function:
                fake.slow(function, microseconds)
            else:
                fake.latency_us = microseconds
        own = {
            "PATH": f"{_smi(place, fake)}:{os.environ['PATH']}",
            "GPU_GATE_LOCK_DIR": str(place / "gpu-gate"),
            "GENV_TMPDIR": str(place / "genv"),
            "TERM": "xterm-256color",
        }
        environment = surroundings(fake, place / "claims") | own
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start compiles everything anew
        yield Node(fake, environment, place, f"{devices} x {latency}")


def _smi(place: Path, fake: FakeNvml) -> Path:
    """A folder with an `nvidia-smi`, for genv, which asks no library: it asks the fake one, as the others do."""
    target = place / "bin" / "nvidia-smi"
    target.parent.mkdir()
    _compiled("smi.c", target, fake.library)
    return target.parent


def in_turns(programs: Sequence[Program], on: Node, others: Path | None, pairs: int) -> dict[str, Cost]:
    """Each once per round, A B A B; the first round, which fills caches, is not counted."""
    commands = {one.name: words for one in programs if (words := placed(one, others))}
    found = {name: Cost() for name in commands}
    for number in range(pairs + 1):
        for name, words in commands.items():
            if not found[name].error:
                _once(words, on, found[name], counts=number > 0)
    return found


def _once(words: Sequence[str], on: Node, cost: Cost, *, counts: bool) -> None:
    on.fake.reset_calls()
    result, said = on.place / "metered", on.place / "said"
    result.unlink(missing_ok=True)
    quiet = subprocess.DEVNULL
    with said.open("wb") as file:
        metered = [str(meter(on.place)), str(result), *words]
        subprocess.run(metered, env=on.environment, stdin=quiet, stdout=quiet, stderr=file, check=False)
    status, seconds, cpu, resident = map(float, (result.read_text() if result.exists() else "124 0 0 0").split())
    if status:
        cost.error = f"exit {status:.0f}: {last_words(said.read_text(errors='replace'))}"
    elif counts:
        cost.wall.append(seconds * 1000)
        cost.cpu.append(cpu * 1000)
        cost.resident = max(cost.resident, resident / 1024)
        cost.calls = on.fake.calls()


def meter(place: Path) -> Path:
    """The program that measures, compiled once per machine."""
    target = place / "meter"
    if not target.exists():
        _compiled("meter.c", target)
    return target


def _compiled(name: str, target: Path, *libraries: str) -> None:
    source = Path(__file__).with_name(name)
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(target.parent / "zig"), **os.environ}  # as in fake_nvml.build()
    command = [*fake_nvml._compiler(), "-O1", "-o", str(target), str(source), *libraries]
    subprocess.run(command, check=True, env=cache)
