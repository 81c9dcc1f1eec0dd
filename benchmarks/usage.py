"""What the usage store takes: its size after 400 days, what a sample costs to record, and how long reading takes.

    python benchmarks/usage.py [--days 400]

8 devices and 36 users: each device is claimed by three of them in every quarter of an hour, three wait.  The past
is written by the daemon's own code, three slots per quarter of an hour, the last two days a slot per ten seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from builders import a_device
from job_start import show
from stores import a_busy_snapshot

from gpuguard.history import store
from gpuguard.history.queries import Usage, query_store
from gpuguard.history.recorder import Recorder
from gpuguard.history.store_schema import COARSEST, WIDTH, Slot, rates_of

BATCH = 96  # slots in one transaction, to be done in time
ROUNDS = 20


def slots(now: int, days: float) -> Iterator[tuple[int, Slot]]:
    """(number, slot): one of 900 s for each quarter of an hour, of 10 s in the last two days."""
    chance = random.Random(1)
    fine = now - 2 * 86400
    taken_at, former = now - int(days * 86400) // COARSEST * COARSEST, a_busy_snapshot(chance, 0, (3,), 0.2)
    while taken_at < now:
        width = WIDTH if taken_at >= fine else COARSEST // 3
        if taken_at % COARSEST == 0:
            snapshot = a_busy_snapshot(chance, taken_at, (3,), 0.2)
            rates = rates_of(former, snapshot)
            rates.waiting = {20000 + number: (1000.0, 2.0) for number in range(3)}
            former = snapshot
        slot = Slot()
        slot.add(rates, width)
        yield taken_at // WIDTH, slot
        taken_at += width


def fill(path: str, now: int, days: float) -> None:
    """Write the past."""
    connection = store.opened(path, check=False)
    # Nobody's only copy: it may be faster than safe.
    connection.execute("PRAGMA synchronous = OFF")
    batch: dict[int, Slot] = {}
    for number, slot in slots(now, days):
        batch[number] = slot
        if len(batch) == BATCH:
            store.write(connection, batch, ())
            store.move_journal(connection)
            batch = {}
    store.write(connection, batch or {now // WIDTH: Slot()}, ())
    store.move_journal(connection)
    connection.close()


def milliseconds(act: Callable[[], Any], rounds: int = ROUNDS) -> str:
    """Median and worst of *rounds*."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        act()
        times.append((time.perf_counter() - begun) * 1000)
    return f"{statistics.median(times):8.2f} ms  worst {max(times):.2f}"


def measure_writing(path: str, now: int) -> None:
    """Print what a sample costs whoever samples, and a slot the writer's thread."""
    chance = random.Random(2)
    snapshots = [a_busy_snapshot(chance, now + WIDTH * number) for number in range(ROUNDS + 1)]
    recorder = Recorder(path, print)
    samples = iter(snapshots)
    show("a sample, for whoever samples", milliseconds(lambda: recorder.record(next(samples), 30.0)))
    begun = time.perf_counter()
    connection = store.opened(path, check=True)
    show("opening, with a look through it", f"{(time.perf_counter() - begun) * 1000:8.2f} ms")
    number = iter(range(now // WIDTH, now // WIDTH + ROUNDS))

    def write() -> None:
        slot = Slot()
        slot.add(rates_of(*snapshots[:2]), WIDTH)
        store.write(connection, {next(number): slot}, snapshots[0].devices)
        store.move_journal(connection)

    show("a slot of 10 s, with fsync", milliseconds(write))
    connection.close()


def measure_reading(path: str, now: int, days: float) -> None:
    """Print how long questions take, with opening and closing."""
    device = a_device(0).uuid
    questions: dict[str, Callable[[Usage], Any]] = {
        "chart, 1 hour": lambda usage: usage.series(device, "utilization_percent", now - 3600, now),
        "chart, 12 hours": lambda usage: usage.series(device, "memory_used_mib", now - 12 * 3600, now),
        "chart, 400 days": lambda usage: usage.series(device, "memory_used_mib", now - days * 86400, now),
        "totals per user, 7 days": lambda usage: usage.totals("uid", now - 7 * 86400, now),
        "totals per user, 400 days": lambda usage: usage.totals("uid", now - days * 86400, now),
        "energy per user, 7 days": lambda usage: usage.energy(now - 7 * 86400, now),
        "energy per user, 400 days": lambda usage: usage.energy(now - days * 86400, now),
        "quota of one window, 7 days": lambda usage: usage.gpu_seconds({7 * 86400.0}),
        "fair share, half-life 7 days": lambda usage: usage.decayed(7 * 86400.0),
    }
    for name, question in questions.items():
        number = len(query_store(path, question, now))
        spent = milliseconds(partial(query_store, path, question, now))
        show(name, f"{spent}  ({number} rows)")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=400.0)
    args = parser.parse_args()
    now = 1_700_000_000 // COARSEST * COARSEST
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "usage.db")
        fill(path, now, args.days)
        show("size", f"{os.path.getsize(path) / 1e6:8.1f} MB")
        measure_reading(path, now, args.days)
        measure_writing(path, now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
