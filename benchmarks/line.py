"""Many wait for few devices and are killed at random instants: nobody is lost, passed without end, or let in too early.

    python benchmarks/line.py --waiters 200 --devices 8

Each waiter is a real `gpuguard run` on a simulated node.  Each job takes a lock of its own on each of its devices: one
that another job has is an overlap.  Then the recorded order is looked at: whoever lived must have been served, and once
the oldest request has waited for longer than the bound nobody else may start before it.  --variant plants a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from job_start import amount

from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import read_records
from gpuguard.queue.tickets import waiting_tickets

SLACK_SECONDS = 0.75  # what is on its way already when a bound is over, and whoever was told at the same moment
MIXED = (1, 1, 1, 1, 2, 2, 4, 8)

WAITER = """
import os, sys
from dataclasses import replace
from gpuguard.claims import claim as hold
from gpuguard.queue import leader as leading, backfill as plan, priority, waiter as waiting
priority.USUAL_WAITS = 0.0  # the bound stays as it is
read = waiting.read_queue_settings
def impatient(*words):
    site = read(*words)
    return replace(site, rules=replace(site.rules, bound=float(os.environ["BOUND"])))
waiting.read_queue_settings = impatient
def none(*words): return None
PLANTED = {
    "": lambda: None,
    "no-exclusion": lambda: setattr(hold, "try_flock", lambda *words: True),
    "no-ring": lambda: (setattr(leading, "wake", none), setattr(waiting, "OWN_CHECK_SECONDS", 600.0)),
    "any-fit": lambda: [setattr(plan._Planner, name, none) for name in ("_held_back_by", "_kept_free_for")],
}
PLANTED[os.environ["VARIANT"]]()
with open(os.environ["PLACE"] + "/samples", "a") as notes:
    from gpuguard.backends import client as isolated
    look = isolated.WorkerBackend.sample
    def noted(self, *words):
        if sys.argv[-2] != "sleep":  # a job's watchdog looks at its own device
            os.write(descriptor, b"x")
        return look(self, *words)
    descriptor = os.open(notes.name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    isolated.WorkerBackend.sample = noted
from gpuguard.__main__ import main
main()
"""
JOB = """
import fcntl, os, sys, time
place, pid, seconds = sys.argv[1], os.getppid(), float(sys.argv[2])
began, uuids, overlaps = time.time(), os.environ["GPUGUARD_GPUS"].split(","), 0
kept = []
for uuid in uuids:
    kept.append(os.open(f"{place}/oracle.{uuid}", os.O_RDWR | os.O_CREAT))
    try: fcntl.flock(kept[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: overlaps += 1
log = os.open(f"{place}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(log, f"start {pid} {began} {overlaps} {','.join(uuids)}\\n".encode())
time.sleep(seconds)
os.write(log, f"end {pid} {time.time()} 0 {','.join(uuids)}\\n".encode())
"""


@dataclass
class Outcome:
    """What a run has shown; times in seconds."""

    served: int = 0
    killed: int = 0
    overlaps: int = 0
    lost: int = 0
    passed: int = 0  # starts before the oldest request, which had waited for longer than the bound
    gaps: list[float] = field(default_factory=list)  # end of a job -> next start on its device
    idle_cpu: float = 0.0  # of one waiter, percent
    idle_looks: int = 0  # driver calls while nothing changed
    idle_seconds: float = 0.0
    idle_memory: float = 0.0  # of one waiter, MiB (Pss)

    def __str__(self) -> str:
        gaps = sorted(self.gaps) or [0.0]
        return (
            f"{self.served} served, {self.killed} killed: {self.overlaps} overlaps, {self.lost} lost, "
            f"{self.passed} passed beyond the bound\n"
            f"end to next start: median {statistics.median(gaps) * 1e3:.0f} ms, p90 "
            f"{gaps[len(gaps) * 9 // 10] * 1e3:.0f} ms of {len(gaps)}\n"
            f"idle for {self.idle_seconds:.0f} s: {self.idle_cpu:.3f} % CPU and {self.idle_memory:.1f} MiB (Pss) "
            f"per waiter, {self.idle_looks} driver calls"
        )


class Hall:
    """A simulated node and all who wait for it."""

    def __init__(self, place: Path, devices: int, bound: float, variant: str) -> None:
        self.place = place
        own = {"BOUND": str(bound), "VARIANT": variant, "PLACE": str(place)}
        sim = {"GPUGUARD_BACKEND": f"simulated:{place}/node", "GPUGUARD_DIR": str(place / "claims")}
        self.environment = {**os.environ, **own, **sim, "GPUGUARD_EVENTS": str(place / "events")}
        words = [sys.executable, "-m", "gpuguard", "sim", "start", f"{devices}xRTX4090"]
        subprocess.run(words, env=self.environment, check=True, stdout=subprocess.DEVNULL)
        self.directory: LockDirectory = lock_directory(str(place / "claims"))

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """`gpuguard run` in a session of its own."""
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-c", WAITER, "run", "--quiet", *words]
        return subprocess.Popen(
            command, env=self.environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def looks(self) -> int:
        """How often the driver was asked."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.getsize(self.place / "samples")
        return 0


def torture(
    place: Path,
    *,
    waiters: int,
    devices: int,
    kills: int = 0,
    bound: float = 3.0,
    idle: float = 0.0,
    longest: float = 0.3,
    patience: float = 60.0,
    variant: str = "",
    seed: int = 1,
) -> Outcome:
    """Let so many wait, kill some, and see whether everybody else is served in an order that keeps the bound."""
    hall, chance, outcome = Hall(place, devices, bound, variant), random.Random(seed), Outcome()
    blocker = hall.start("-n", str(devices), "--", "sleep", "600")
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        _until(lambda: bool(read_records(hall.directory)), patience)
        for _ in range(waiters):
            count = min(chance.choice(MIXED), devices)
            job = (sys.executable, "-ISc", JOB, str(place), f"{chance.uniform(longest / 6, longest):.3f}")
            process = hall.start("-n", str(count), "--", *job)
            processes[process.pid] = process
            if len(processes) % 10 == 9:
                time.sleep(0.3)
        _until(lambda: len(waiting_tickets(hall.directory) or ()) + len(list(_rows(place))) >= waiters, patience)
        since = {pid: time.time() for pid in processes}
        since |= {ticket.pid or 0: ticket.since for ticket in waiting_tickets(hall.directory) or ()}
        if idle:
            _measure_idle(hall, processes, idle, outcome)
        os.killpg(blocker.pid, signal.SIGKILL)
        victims = _served_or_killed(processes, kills, chance, patience)
        _judge(place, since, processes, victims, bound, outcome)
    finally:
        for process in (blocker, *processes.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outcome


def _until(holds: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError("the waiters did not come into line")
        time.sleep(0.05)


def _measure_idle(hall: Hall, processes: dict[int, subprocess.Popen[bytes]], seconds: float, outcome: Outcome) -> None:
    time.sleep(3.0)
    before, looks = sum(map(_cpu, processes)), hall.looks()
    time.sleep(seconds)
    outcome.idle_cpu = (sum(map(_cpu, processes)) - before) / seconds / len(processes) * 100
    outcome.idle_looks, outcome.idle_seconds = hall.looks() - looks, seconds
    outcome.idle_memory = sum(amount(f"/proc/{pid}/smaps_rollup", "Pss") for pid in processes) / len(processes)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _served_or_killed(
    processes: dict[int, subprocess.Popen[bytes]], kills: int, chance: random.Random, patience: float
) -> set[int]:
    """Kill some at random, waiters, wrappers and whole jobs, and return when all have ended, or patience has."""
    victims: set[int] = set()
    deadline = time.monotonic() + patience
    while (alive := [pid for pid, each in processes.items() if each.poll() is None]) and time.monotonic() < deadline:
        if len(victims) < kills:
            victim = chance.choice(alive)
            victims.add(victim)
            with contextlib.suppress(ProcessLookupError):
                chance.choice((os.kill, os.killpg))(victim, signal.SIGKILL)
        time.sleep(0.02)
    return victims


def _judge(
    place: Path,
    since: dict[int, float],
    processes: dict[int, subprocess.Popen[bytes]],
    victims: set[int],
    bound: float,
    outcome: Outcome,
) -> None:
    rows = sorted(_rows(place), key=lambda row: row[2])
    outcome.killed = len(victims)
    outcome.lost = sum(each.poll() != 0 for pid, each in processes.items() if pid not in victims)
    outcome.overlaps = sum(row[3] for row in rows)
    waiting = {pid: since[pid] for pid in processes if pid not in victims}
    began = {row[1]: row[2] for row in rows if row[0] == "start"}
    ended: dict[str, float] = {}
    for kind, pid, at, _, uuids in rows:
        if kind == "end":
            ended |= dict.fromkeys(uuids, at)
            continue
        outcome.served += 1
        outcome.gaps += [at - max(ended[uuid] for uuid in uuids)] if all(uuid in ended for uuid in uuids) else []
        oldest = min(waiting, key=waiting.__getitem__, default=pid)
        if oldest != pid and waiting[oldest] + bound + SLACK_SECONDS < at < began.get(oldest, at) - SLACK_SECONDS:
            outcome.passed += 1
        waiting.pop(pid, None)


def _rows(place: Path) -> Iterator[tuple[str, int, float, int, list[str]]]:
    with contextlib.suppress(FileNotFoundError):
        for line in (place / "log").read_text().splitlines():
            kind, pid, at, overlaps, uuids = line.split(" ")
            yield kind, int(pid), float(at), int(overlaps), uuids.split(",")


def main() -> None:
    """Print what a run has shown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiters", type=int, default=200)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--bound", type=float, default=3.0, help="seconds")
    parser.add_argument("--longest", type=float, default=0.3, help="seconds of the longest job; the shortest: a sixth")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds to measure who waits")
    parser.add_argument("--variant", default="", choices=["", "no-exclusion", "no-ring", "any-fit"])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        outcome = torture(Path(place), patience=180.0 + 100 * args.longest, **vars(args))
    print(f"{args.waiters} waiters, {args.devices} devices, load {os.getloadavg()[0]:.1f}\n{outcome}")


if __name__ == "__main__":
    main()
