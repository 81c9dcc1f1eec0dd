"""Many processes fight for few devices and are killed at random instants: nobody may ever hold what another one holds.

    python benchmarks/contention.py --seconds 60 --processes 200

The workers run what acquire() runs for each try, and release().  An oracle beside the locks, a page of shared memory
with one slot per device, says who believes that he holds it: a slot that names another living process is an overlap, a
lock that is still held when all workers are dead is stale.  --variant plants a fault, to show that the oracle sees it.
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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from gpuguard.claims import claim as hold
from gpuguard.claims.claim import Lock
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import locked_devices
from gpuguard.lock import Allocator
from gpuguard.model import Device, Snapshot
from gpuguard.request import Request

GIB = 2**30
HOLDS, OVERLAPS, DYING = 0, 1, 2  # places of the counters behind the slots, three per worker


@dataclass(frozen=True)
class Outcome:
    """What a run has shown."""

    holds: int  # devices held, summed over all claims
    kills: int
    overlaps: int
    stale: int  # locks still held after all workers were dead
    dying: int  # devices taken from a killed process that had lost its locks, and was no zombie yet

    def __str__(self) -> str:
        return (
            f"{self.holds:,} holds, {self.kills:,} SIGKILLs: {self.overlaps} overlaps, {self.stale} stale; "
            f"{self.dying} taken from a dying process"
        )


PF_EXITING = 0x4  # include/linux/sched.h, in the ninth field of /proc/PID/stat; set before the files are closed


class IdleMachine:
    """A backend on which all devices are always idle, so that only the locks decide."""

    name = "idle"
    simulated = True

    def __init__(self, count: int) -> None:
        self._devices = tuple(
            Device(
                index=index,
                uuid=f"GPU-{index:08d}",
                memory_total=80 * GIB,
                memory_used=0,
                memory_free=80 * GIB,
                memory_reserved=0,
                processes=(),
                problems=(),
                utilization=0.0,
            )
            for index in range(count)
        )

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """The same machine every time."""
        chosen = tuple(device for device in self._devices if devices is None or device.uuid in devices)
        return Snapshot("here", "idle", time.time(), time.monotonic(), chosen)

    def close(self) -> None:
        """Nothing to let go of."""


def break_stale(directory: LockDirectory) -> None:
    """The classic fault: a lock that cannot be had is called stale, and its file removed."""
    proper = hold.lock_device

    def broken(directory: LockDirectory, name: str, operation: int) -> Lock | None:
        taken = proper(directory, name, operation)
        if taken is None and random.random() < 0.05:
            Path(directory.lock_path(name)).unlink(missing_ok=True)
        return taken

    hold.lock_device = broken


def no_exclusion(directory: LockDirectory) -> None:
    """A lock that everybody gets, like LOCK_SH taken for LOCK_EX."""
    hold.try_flock = lambda descriptor, operation=0: True  # type: ignore[attr-defined]


VARIANTS: dict[str, Callable[[LockDirectory], None]] = {
    "none": lambda directory: None,
    "break-stale": break_stale,
    "no-exclusion": no_exclusion,
}


def fight(
    place: Path, *, seconds: float, processes: int = 200, devices: int = 8, variant: str = "none", seed: int = 1
) -> Outcome:
    """Let *processes* workers fight for *devices*, kill and replace them at random; returns what was seen."""
    directory = lock_directory(str(place))
    board = mmap.mmap(-1, 8 * (devices + 3 * processes))
    dice = random.Random(seed)
    workers = {place: _started(directory, board, devices, place, variant, seed) for place in range(processes)}
    kills = 0
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(dice.uniform(0.0, 0.04))
            victim = dice.choice(list(workers))
            _end(workers[victim])
            kills += 1
            workers[victim] = _started(directory, board, devices, victim, variant, seed + kills)
    finally:
        for pid in workers.values():
            _end(pid)
    counters = struct.unpack(f"{3 * processes}q", board[8 * devices :])
    stale = locked_devices(directory, [f"GPU-{index:08d}" for index in range(devices)])
    return Outcome(
        sum(counters[HOLDS::3]), kills, sum(counters[OVERLAPS::3]), len(stale), dying=sum(counters[DYING::3])
    )


def _started(directory: LockDirectory, board: mmap.mmap, devices: int, place: int, variant: str, seed: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        VARIANTS[variant](directory)
        _work(directory, board, devices, place, random.Random(seed * 1000 + place))
    finally:
        os._exit(1)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _work(directory: LockDirectory, board: mmap.mmap, devices: int, place: int, dice: random.Random) -> None:
    machine = IdleMachine(devices)
    everything = machine.sample(())
    counters = 8 * (devices + 3 * place)
    while True:
        request = Request(num_gpus=dice.choice((1, 1, 1, 2, 4)))
        claim = Allocator(machine, directory, [request]).lock_best(request, everything, {}, with_record=False)
        if claim is None:
            time.sleep(dice.uniform(0.0, 0.1))
            continue
        claim.write_record(directory)
        owners = [_enter(board, 8 * device.index) for device in claim]
        time.sleep(dice.uniform(0.0, 0.003))
        overlaps = owners.count("alive") + sum(_leave(board, 8 * device.index) for device in claim)
        before = struct.unpack_from("3q", board, counters)
        happened = len(claim), overlaps, owners.count("dying")
        struct.pack_into("3q", board, counters, *map(sum, zip(before, happened, strict=True)))
        claim.release()


def _enter(board: mmap.mmap, slot: int) -> str:
    """Write our name into the slot; what the process that it names is: "alive", "dying", or "gone"."""
    (before,) = struct.unpack_from("q", board, slot)
    struct.pack_into("q", board, slot, os.getpid())
    return "gone" if before in (0, os.getpid()) else _state(before)


def _leave(board: mmap.mmap, slot: int) -> bool:
    """Clear the slot; True when it no longer names us."""
    (before,) = struct.unpack_from("q", board, slot)
    struct.pack_into("q", board, slot, 0)
    return bool(before != os.getpid())


def _state(pid: int) -> str:
    """Whether it is "alive", and can still run code of its own; "dying": it lost its locks, and is no zombie yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return "gone"
    if fields[0] in "ZX":
        return "gone"
    return "dying" if int(fields[6]) & PF_EXITING else "alive"


def main() -> int:
    """Run the fight that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the dice: who is killed, and when")
    parser.add_argument("--variant", choices=VARIANTS, default="none", help="plant a fault")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        outcome = fight(
            Path(place), seconds=args.seconds, processes=args.processes, variant=args.variant, seed=args.seed
        )
    print(outcome)
    return 1 if outcome.overlaps or outcome.stale else 0


if __name__ == "__main__":
    sys.exit(main())
