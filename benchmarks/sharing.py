"""Many processes share few devices, or want one alone, and are killed at random: no device is ever promised twice.

    python benchmarks/sharing.py --seconds 60 --processes 64

An oracle beside the locks, a page of shared memory with one row per worker, says who believes to hold what.  A worker
writes its row when it has its claim and adds up the rows of the living: of two that hold too much together, the one
whose row is written last sees the other.  --no-gate takes the gate away, which only fairness may depend on; --variant
plants a fault, to show that the oracle sees it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from contention import GIB, IdleMachine, _end, _state

from gpuguard import lock
from gpuguard.backends import Backend
from gpuguard.claims import claim as hold
from gpuguard.claims import records
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import locked_devices
from gpuguard.lock import Allocator
from gpuguard.request import Request

CAPACITY = 80 * GIB
ALONE = CAPACITY + 1  # what a worker writes that has its device alone
ROW = struct.Struct("qqq")  # pid, device, bytes
SIZES = (5, 10, 20, 30, 45)


@dataclass(frozen=True)
class Outcome:
    """What a run has shown."""

    shares: int
    alone: int
    kills: int
    broken: int  # times at which a device was promised to more than it has, or to one alone and to somebody else
    stale: int  # locks still held after all workers were dead
    fullest: int  # bytes, the most that was promised of a device

    def __str__(self) -> str:
        fullest = f"fullest device {self.fullest / GIB:.0f} of {CAPACITY / GIB:.0f}GiB"
        claims = f"{self.shares:,} shares, {self.alone:,} claims alone, {self.kills:,} SIGKILLs"
        return f"{claims}, {fullest}: {self.broken} broken promises, {self.stale} stale locks"


@contextmanager
def _open_gate(directory: LockDirectory) -> Iterator[None]:
    yield


def without_gate() -> None:
    """What happens to who does not get the gate in time, all the time."""
    lock.Gate = records.Gate = _open_gate  # type: ignore


def no_first_look() -> None:
    """No fault: whoever sees nobody before he takes his locks must see the others behind them."""
    lock.sharing_now = lambda *words: {}  # type: ignore


def no_look() -> None:
    """Count the slots alone."""
    no_first_look()
    hold._over_capacity = lambda *words: {}


def no_exclusion() -> None:
    """A lock that everybody gets."""
    hold.try_flock = lambda descriptor, operation=0: True  # type: ignore


def late_record() -> None:
    """Look first, write the record then, and take a slot without a record for nothing."""
    no_first_look()
    proper = Claim.write_record

    def nothing_first(self: Claim, directory: LockDirectory, job: JobDetails | None = None, **more: Any) -> None:
        if self._record is None and job is None and self not in seen:
            seen.append(self)
            return
        proper(self, directory, job, **more)

    seen: list[Claim] = []
    Claim.write_record = nothing_first  # type: ignore
    hold._over_capacity = _blind(hold._over_capacity)


def _blind(proper: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
    """Slots without a record count for nothing."""

    def overbooked(directory: LockDirectory, snapshot: Any, request: Any, claim: Any) -> dict[str, str]:
        late = proper(directory, snapshot, request, claim)
        return {uuid: why for uuid, why in late.items() if "record cannot be read" not in why}

    return overbooked


VARIANTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "no-first-look": no_first_look,
    "no-look": no_look,
    "no-exclusion": no_exclusion,
    "late-record": late_record,
}


def fight(
    place: Path,
    *,
    seconds: float,
    processes: int = 64,
    devices: int = 3,
    gate: bool = True,
    variant: str = "none",
    seed: int = 1,
) -> Outcome:
    """Let *processes* workers claim parts of *devices*, kill and replace them at random; returns what was seen."""
    directory = lock_directory(str(place))
    board = mmap.mmap(-1, processes * (ROW.size + 32))
    dice = random.Random(seed)
    started = partial(_started, directory, board, devices, processes, gate, variant)
    workers = {place: started(place, seed * 1000 + place) for place in range(processes)}
    kills = 0
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(dice.uniform(0.0, 0.04))
            victim = dice.choice(list(workers))
            _end(workers[victim])
            kills += 1
            workers[victim] = started(victim, seed * 1000 + processes + kills)
    finally:
        for pid in workers.values():
            _end(pid)
    return _outcome(directory, board, devices, processes, kills)


def _outcome(directory: LockDirectory, board: mmap.mmap, devices: int, processes: int, kills: int) -> Outcome:
    counts = [struct.unpack_from("4q", board, processes * ROW.size + 32 * place) for place in range(processes)]
    stale = locked_devices(directory, [f"GPU-{index:08d}" for index in range(devices)])
    several, alone, broken, fullest = zip(*counts, strict=True)
    return Outcome(sum(several), sum(alone), kills, sum(broken), len(stale), max(fullest))


def _started(
    directory: LockDirectory,
    board: mmap.mmap,
    devices: int,
    processes: int,
    gate: bool,
    variant: str,
    place: int,
    seed: int,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not gate:
            without_gate()
        VARIANTS[variant]()
        _work(directory, board, devices, place, processes, random.Random(seed))
    finally:
        os._exit(1)


def _work(
    directory: LockDirectory, board: mmap.mmap, devices: int, place: int, processes: int, dice: random.Random
) -> None:
    machine = IdleMachine(devices)
    everything = machine.sample(())
    row, counters = place * ROW.size, processes * ROW.size + 32 * place
    while True:
        size = dice.choice(SIZES) * GIB if dice.random() < 0.9 else ALONE
        request = (
            Request() if size == ALONE else Request(share=True, memory=size, strategy=dice.choice(("pack", "spread")))
        )
        claim = Allocator(machine, directory, [request]).lock_best(request, everything, {}, with_record=False)
        if claim is None:
            time.sleep(dice.uniform(0.0, 0.02))
            continue
        claim.write_record(directory, JobDetails("a fight"))
        ROW.pack_into(board, row, os.getpid(), claim[0].index, size)
        promised = _promised(board, processes, claim[0].index)
        if promised > CAPACITY and promised != ALONE:
            # Somebody may be dead and not look so yet: the kernel frees his locks before he is a zombie.
            time.sleep(0.01)
            promised = _promised(board, processes, claim[0].index)
        is_broken = promised > CAPACITY and promised != ALONE
        several, alone, broken, fullest = struct.unpack_from("4q", board, counters)
        counts = several + (size != ALONE), alone + (size == ALONE), broken + is_broken
        struct.pack_into("4q", board, counters, *counts, max(fullest, 0 if promised == ALONE else promised))
        time.sleep(dice.uniform(0.0, 0.01))
        ROW.pack_into(board, row, 0, 0, 0)
        claim.release()


def _promised(board: mmap.mmap, processes: int, device: int) -> int:
    """Bytes that the living believe to have of the device."""
    rows = [ROW.unpack_from(board, place * ROW.size) for place in range(processes)]
    return sum(size for pid, index, size in rows if pid and index == device and _state(pid) == "alive")


def race(
    place: Path, *, starters: int, rounds: int, memory: int, gate: bool = True, variant: str = "none"
) -> list[int]:
    """How many of *starters*, who all begin at one moment, get their share of the only device, for each round."""
    directory, machine = lock_directory(str(place)), IdleMachine(1)
    contenders = [(machine, Request(share=True, memory=memory))] * starters
    return [sum(winners(directory, contenders, gate=gate, variant=variant)) for _ in range(rounds)]


def winners(
    directory: LockDirectory, contenders: Sequence[tuple[Backend, Request]], *, gate: bool = True, variant: str = "none"
) -> list[bool]:
    """Which of the *contenders*, who all begin at one moment, get what they ask for on their machine."""
    board = mmap.mmap(-1, 8 * (len(contenders) + 1))
    places = range(8, len(board), 8)
    pids = [
        _starter(directory, board, place, *contender, gate, variant)
        for place, contender in zip(places, contenders, strict=True)
    ]
    try:
        board[0] = 1
        end = time.monotonic() + 30
        while 0 in (results := [board[place] for place in places]) and time.monotonic() < end:
            time.sleep(0.001)
        return [result == 1 for result in results]
    finally:
        for pid in pids:
            _end(pid)


def _starter(
    directory: LockDirectory, board: mmap.mmap, place: int, machine: Backend, request: Request, gate: bool, variant: str
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if not gate:
            without_gate()
        VARIANTS[variant]()
        everything = machine.sample(())
        while not board[0]:
            pass
        claim = Allocator(machine, directory, [request]).lock_best(request, everything, {}, with_record=False)
        board[place] = 1 if claim else 2
        signal.pause()
    finally:
        os._exit(1)


def main() -> int:
    """Run the fight that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--no-gate", action="store_true", help="take the gate away")
    parser.add_argument("--variant", choices=VARIANTS, default="none", help="plant a fault")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        outcome = fight(
            Path(place), seconds=args.seconds, processes=args.processes, gate=not args.no_gate, variant=args.variant
        )
    print(outcome)
    return 1 if outcome.broken or outcome.stale else 0


if __name__ == "__main__":
    sys.exit(main())
