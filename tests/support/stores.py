"""Usage stores for tests: filled ones, and processes that do something to them.

fill(path, range(100, 200)); total(path) -> seconds; with a_fork(job, path) as child: child.kill()
"""

import multiprocessing
import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from builders import GIB, a_claim_record, a_device, a_process, a_snapshot

from gpuguard.history import store
from gpuguard.history.queries import query_store
from gpuguard.history.store_schema import SLOTS, WIDTH, Slot, rates_of, rows
from gpuguard.model import Device, Snapshot

ALICE = 1001
FIRST = 169_999_920  # a slot that begins a quarter of an hour
DEVICES, USERS, PER_DEVICE = 8, 36, (1, 1, 2, 3)
ALL = (-(2**63), 2**63 - 1)  # keys
FORK = multiprocessing.get_context("fork")


def at(slots: int) -> float:
    """Unix time, so many slots after the first."""
    return float((FIRST + slots) * WIDTH)


def a_sample(taken_at: float, uid: int = ALICE, **fields: Any) -> Snapshot:
    """A device, claimed and used by one user."""
    device = a_device(processes=(a_process(uid=uid),), utilization=50.0, temperature=60.0, power_draw=300.0)
    claim = a_claim_record(device, uid=uid)
    return a_snapshot(device, claims=(claim,), **{"taken_at": taken_at, "clock": taken_at, **fields})


def a_slot(seconds: float = WIDTH, uid: int = ALICE) -> Slot:
    """So many seconds of it."""
    slot = Slot()
    slot.add(rates_of(a_sample(1000.0, uid), a_sample(1010.0, uid)), seconds)
    return slot


def a_busy_snapshot(
    chance: random.Random, taken_at: float, per_device: tuple[int, ...] = PER_DEVICE, idle: float = 0.5
) -> Snapshot:
    """Eight devices, each claimed by so many of the users."""
    devices, claims = [], []
    for index in range(DEVICES):
        device = a_device(index)
        users = [20000 + user for user in chance.sample(range(USERS), chance.choice(per_device))]
        claims += [a_claim_record(device, id=f"{index}-{uid}", uid=uid) for uid in users]
        workers = tuple(a_process(100 * index + pid, uid=uid) for pid, uid in enumerate(users, 2))
        devices.append(
            a_device(
                index,
                processes=workers,
                memory_used=chance.randrange(80 * GIB),
                utilization=0.0 if chance.random() < idle else chance.uniform(2, 100),
                temperature=chance.uniform(30, 90),
                power_draw=chance.uniform(60, 700),
                total_energy=400.0 * taken_at + chance.uniform(0, 100),
            )
        )
    return a_snapshot(*devices, claims=tuple(claims), taken_at=taken_at, clock=taken_at)


def written(path: str, slots: Mapping[int, Slot], devices: Iterable[Device] = (), *, check: bool = False) -> None:
    """Write these slots as a daemon that lives only for that."""
    with closing(store.opened(path, check=check)) as connection:
        store.write(connection, slots, devices)
        store.move_journal(connection)


def fill(path: str, numbers: Iterable[int], together: int = 1, uid: int = ALICE) -> None:
    """Write these slots, so many in a transaction."""
    waiting = list(numbers)
    with closing(store.opened(path, check=False)) as connection:
        while waiting:
            batch, waiting = waiting[:together], waiting[together:]
            store.write(connection, {number: a_slot(uid=uid) for number in batch}, a_sample(0.0).devices)
            store.move_journal(connection)


def set_version(path: str, version: int) -> None:
    """Make it a store of another version of gpuguard."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


def held(path: str, now: float) -> dict[int, tuple[int, float, float]]:
    """width -> (slots, seconds seen, seconds claimed): of all resolutions, in one look."""

    def ask(usage: Any) -> dict[int, tuple[int, float, float]]:
        sums = {}
        read = usage._connection.execute  # the store has no public way to choose a resolution
        for width in SLOTS:
            devices, users = (f"FROM ({rows(kind, width)})" for kind in ("devices", "users"))
            slots, seen = read(f"SELECT COUNT(DISTINCT slot), SUM(seen_ms) / 1000.0 {devices}", ALL).fetchone()
            (claimed,) = read(f"SELECT SUM(claimed_ms) / 1000.0 {users}", ALL).fetchone()
            sums[width] = slots, seen or 0.0, claimed or 0.0
        return sums

    return query_store(path, ask, now)


@contextmanager
def a_fork(job: Callable[..., object], *words: object) -> Iterator[Any]:
    """A process that does *job*; ended at the end."""
    child = FORK.Process(target=job, args=words)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()
