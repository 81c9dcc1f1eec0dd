"""The rows of benchmarks/run that grow: devices, processes, policies, waiters; with the exponent of their growth.

An exponent of 1 is linear.  It is fitted to all points; the last step tells what the cost is like where it is large,
because what does not grow at all hides growth among the small ones.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import peers
from evaluating import POLICIES as RULES
from evaluating import a_busy_node
from fake_nvml import GIB, MAX_PROCESSES
from measuring import Node, node
from peers import Program, last_words, placed
from rows import Extent
from section import table

from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.view import RuleView
from gpuguard.queue.backfill import Fit, Machine, plan
from gpuguard.queue.priority import QueueRules, Ticket, order
from gpuguard.request import Request

LOOKS = """
import statistics, sys, time
times, end = [], time.monotonic() + 5  # gpustat waits for 0.1 s at each device
while len(times) < 2 or len(times) <= int(sys.argv[1]) and time.monotonic() < end:
    begun = time.process_time()
    look()
    times.append(1000 * (time.process_time() - begun))
print(statistics.median(times[1:]))
"""
# So many processes that do nothing, until whoever started them is gone.
CROWD = """
import os, sys
for number in range(int(sys.argv[1])):
    if not (child := os.fork()):
        os.close(1)
        os.read(0, 1)
        os._exit(0)
    print(child)
sys.stdout.flush()
os.read(0, 1)
"""
Points = Mapping[int, float]  # size -> milliseconds


def exponent(points: Points) -> float:
    """The slope of a line through the logarithms, least squares."""
    xs, ys = [math.log(size) for size in points], [math.log(max(cost, 1e-6)) for cost in points.values()]
    return statistics.linear_regression(xs, ys).slope


def grown(what: str, found: Mapping[str, Points]) -> str:
    """A table: a column for each size, and how the cost grows."""
    sizes = list(next(iter(found.values())))
    rows = []
    for name, points in found.items():
        steps = dict(list(points.items())[-2:])
        fitted = [f"{exponent(points):.2f}", f"{exponent(steps):.2f}"] if len(points) > 1 else ["", ""]
        rows.append([name, *(f"{points[size]:.2f}" if size in points else "" for size in sizes), *fitted])
    return table([f"ms of CPU at so many {what}", *map(str, sizes), "exponent", "last step"], rows)


def devices(extent: Extent) -> str:
    """One look at 1 to 64 devices with 5 processes each."""
    sizes = [size for size in (1, 8, 16, 64) if size <= max(16, extent.largest // 50)]
    found: dict[str, dict[int, float]] = {}
    errors: dict[str, str] = {}
    for size in sizes:
        with node(size) as on:
            _look(on, size, extent, found, errors)
    return "\n\n".join([grown("devices", found), *_told(errors)])


def processes(extent: Extent) -> str:
    """One look at 64 devices (--quick: 8) with 1 to 5,000 processes."""
    count = 64 if extent.largest > 8 * MAX_PROCESSES else 8
    found: dict[str, dict[int, float]] = {}
    errors: dict[str, str] = {}
    for size in [size for size in (1, 100, 500, 1000, 5000) if size <= extent.largest]:
        with node(count, busy=0) as on, crowd(size) as pids:
            for number, pid in enumerate(pids):
                on.fake.add_process(number % count, pid, GIB // 16, stays=1)
            _look(on, size, extent, found, errors)
    return "\n\n".join([grown("processes", found), *_told(errors)])


@contextmanager
def crowd(size: int) -> Iterator[list[int]]:
    """So many processes; their pids."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-ISc", CROWD, str(size)], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin and parent.stdout
        yield [int(parent.stdout.readline()) for _ in range(size)]
        parent.stdin.close()


def _look(on: Node, size: int, extent: Extent, found: dict[str, dict[int, float]], errors: dict[str, str]) -> None:
    for program in peers.LOOKS:
        whole = Program(program.name, (*program.words[:-1], program.words[-1] + LOOKS, str(min(extent.pairs, 5))))
        if not (words := placed(whole, extent.others)):
            continue
        ended = subprocess.run(words, env=on.environment, capture_output=True, text=True, check=False, timeout=300)
        if ended.returncode:
            errors[program.name] = last_words(ended.stderr)
        else:
            found.setdefault(program.name, {})[size] = float(ended.stdout.splitlines()[-1])


def _told(errors: Mapping[str, str]) -> list[str]:
    return [f"`{name}` does not run: {error}" for name, error in errors.items()]


def policies(extent: Extent) -> str:
    """One step of the engine, 8 devices with 40 processes, 1 to 500 policies."""
    points: dict[int, float] = {}
    for size in [size for size in (1, 10, 50, 100, 500) if size <= extent.largest]:
        many = tuple(replace(RULES[number % len(RULES)], name=f"p{number}") for number in range(size))
        memory, clock = EngineMemory(), iter(range(10**6))

        def step(many: tuple[object, ...] = many, memory: EngineMemory = memory, clock: Iterator[int] = clock) -> float:
            view = RuleView(a_busy_node(10_000.0 + next(clock)))
            begun = time.thread_time()
            evaluate(view, many, memory, interval=1.0)  # type: ignore[arg-type]
            return time.thread_time() - begun

        points[size] = _median_ms(step, 3 + extent.pairs)
    return grown("policies", {"engine": points})


def waiters(extent: Extent) -> str:
    """One plan of the queue for 8 devices in use, 1 to 500 who wait; half of them with a time limit."""
    points: dict[int, float] = {}
    uuids = tuple(f"GPU-{number}" for number in range(8))
    for size in [size for size in (1, 10, 50, 100, 500) if size <= extent.largest]:
        tickets = [_ticket(number) for number in range(size)]
        fits = {request: Fit(uuids, frozenset(uuids[:1])) for ticket in tickets for request in ticket.requests}
        machine = Machine(fits, {uuid: 100_000.0 + 600 * number for number, uuid in enumerate(uuids[1:])})

        def look(tickets: Sequence[Ticket] = tickets, machine: Machine = machine) -> float:
            begun = time.thread_time()
            plan(order(tickets, {}, QueueRules(), 50_000.0), machine, {}, QueueRules(), 50_000.0)
            return time.thread_time() - begun

        points[size] = _median_ms(look, extent.pairs)
    return grown("waiters", {"plan of the queue": points})


def _ticket(number: int) -> Ticket:
    request = Request(num_gpus=(1, 1, 2, 4, 8)[number % 5])
    limit = 600.0 * (1 + number % 7) if number % 2 else None
    return Ticket(f"{number:06}", 1000 + number % 9, "", 49_000.0 + number, (request,), time_limit=limit)


def _median_ms(once: Callable[[], float], times: int) -> float:
    once()
    return 1000 * statistics.median(once() for _ in range(times))
