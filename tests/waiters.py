"""Requests that wait in the queue on a simulated node, each a process.

from waiters import Room
room = Room(tmp_path, devices=1); with room.job() as holder, room.wait("-n", "1") as waiter: ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nodes import Gpuguard, a_user, change, eventually, start

from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import read_records
from gpuguard.queue.leader import flock_holder
from gpuguard.queue.tickets import read_tickets

# The command line with shorter times, and with a note of each look at the devices.
IMPATIENT = """
import os, sys
from gpuguard.queue import leader as leading, waiter as waiting, state
from gpuguard.backends import client
for name, seconds in (word.split("=") for word in os.environ["WAITERS"].split()):
    module = next(module for module in (waiting, leading, state) if hasattr(module, name))
    setattr(module, name, float(seconds))
    if hasattr(leading, name) and hasattr(waiting, name):
        setattr(leading, name, float(seconds))
if os.environ.get("NO_INOTIFY"):
    def refused(self, path):
        raise OSError(28, "No space left on device")
    leading.DirectoryWatch.__init__ = refused
sample = client.WorkerBackend.sample
def noted(self, *words):
    with open(os.environ["SAMPLES"], "a") as notes:
        notes.write(f"{os.getpid()}\\n")
    return sample(self, *words)
client.WorkerBackend.sample = noted
from gpuguard.cli import main
sys.exit(main(sys.argv[1:]))
"""
STEADY = "OWN_CHECK_SECONDS=300 HEALTH_SECONDS=300"


class Waiter:
    """`gpuguard run` in the queue, or with its job."""

    def __init__(self, room: Room, process: subprocess.Popen[str]) -> None:
        self.room, self.process, self.pid = room, process, process.pid

    @property
    def waits(self) -> bool:
        """Whether it has a ticket."""
        return any(ticket.pid == self.pid for ticket in read_tickets(self.room.directory)[0])

    @property
    def runs(self) -> bool:
        """Whether it has a claim."""
        return any(record.pid == self.pid for record in read_records(self.room.directory))

    @property
    def leads(self) -> bool:
        """Whether it leads the queue."""
        return self.room.leader == self.pid

    def signal(self, number: int) -> None:
        """Only to it, not to its job."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """It and its job."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.communicate()


class Room:
    """A node with so many devices, and all requests that wait for one."""

    def __init__(self, place: Path, devices: int = 1, times: str = STEADY, **variables: str) -> None:
        self.place, self.samples = place, place / "samples"
        self.holders: set[int] = set()  # pids of job()
        start(str(place / "node"), f"{devices}xH100-80GB")
        self.gpuguard = Gpuguard(place, None, SAMPLES=str(self.samples), WAITERS=times, **variables)
        self.directory = lock_directory(str(place / "claims"))

    @contextlib.contextmanager
    def run(
        self, *words: str, command: tuple[str, ...] = ("sleep", "600"), quiet: bool = True, **variables: str
    ) -> Iterator[Waiter]:
        """`gpuguard run` with these options; killed at the end."""
        process = subprocess.Popen(
            [sys.executable, "-c", IMPATIENT, "run", *["--quiet"] * quiet, *words, "--", *command],
            env={**self.gpuguard.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=os.setpgrp,  # of this session still: or SIGTSTP would not stop it, as no shell could continue it
        )
        waiter = Waiter(self, process)
        try:
            yield waiter
        finally:
            waiter.kill()

    @contextlib.contextmanager
    def job(self, *words: str, **more: object) -> Iterator[Waiter]:
        """A job that runs."""
        with self.run(*words, **more) as waiter:  # type: ignore[arg-type]
            self.holders.add(waiter.pid)
            assert eventually(lambda: waiter.runs, 30.0), waiter.process.poll()
            yield waiter

    @contextlib.contextmanager
    def wait(self, *words: str, **more: object) -> Iterator[Waiter]:
        """A request in the queue, which has a leader."""
        with self.run(*words, **more) as waiter:  # type: ignore[arg-type]
            assert eventually(lambda: waiter.waits and self.leader is not None, 30.0), waiter.process.poll()
            yield waiter

    @property
    def leader(self) -> int | None:
        """pid of the process that holds the lock of the queue."""
        path = self.directory.lock_path("queue")
        if not os.path.exists(path):
            return None
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return flock_holder(descriptor)
        finally:
            os.close(descriptor)

    def looks(self) -> int:
        """How often the driver was asked, but for the watchdogs of jobs."""
        pids = self.samples.read_text().split() if self.samples.exists() else []
        return sum(int(pid) not in self.holders for pid in pids)

    def stranger(self, device: int = 0) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """A process on a device without a claim."""
        return a_user(str(self.place / "node"), str(device), 10 * 2**30)

    def suffer(self, device: int, *faults: str) -> None:
        """The device has these faults from now on, or none."""
        change(str(self.place / "node"), device, faults=faults)
