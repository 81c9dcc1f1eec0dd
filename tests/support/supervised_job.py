"""A supervised job for tests: the real run() and the real claims, above a backend that reads one file.

wrapper = Wrapped(tmp_path)                    the machine: two idle devices, of which the job gets the first
wrapper.start("sh", "-c", "sleep 5")           a process like `gpuguard run`; as a program: wrapped.py PLACE JSON CMD...
wrapper.machine(memory_used=..., processes=..., fail=...)       changes what the backend reads
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from builders import GIB, MIB, a_device, a_process, a_snapshot
from own_claims import acquire

from gpuguard import run
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import probe
from gpuguard.enforcement import signals
from gpuguard.errors import BackendError
from gpuguard.jobs import processes
from gpuguard.jobs.processes import become_subreaper
from gpuguard.model import Snapshot
from gpuguard.request import Request

IDLE: dict[str, Any] = {"memory_used": 4 * MIB, "processes": [], "utilization": 0.0, "energy": 1000.0, "fail": False}
UUIDS = [a_device(index).uuid for index in (0, 1)]


class FileBackend:
    """Device 0 as PLACE/machine says; counts in PLACE/samples how often it was asked."""

    name = "simulated"
    simulated = True

    def __init__(self, place: Path) -> None:
        self.place = place

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        with (self.place / "samples").open("a") as samples:
            samples.write(f"{' '.join(sorted(fields))}\n")
        now = json.loads((self.place / "machine").read_text())
        if now["fail"]:
            raise BackendError("the driver does not answer")
        first = a_device(
            0,
            memory_used=now["memory_used"],
            processes=tuple(a_process(pid, memory_used=GIB, start_time=None) for pid in now["processes"]),
            utilization=now["utilization"],
            total_energy=now["energy"],
        )
        chosen = [device for device in (first, a_device(1)) if devices is None or device.uuid in devices]
        return a_snapshot(*chosen, clock=time.clock_gettime(time.CLOCK_BOOTTIME))

    def close(self) -> None:
        pass


class Wrapped:
    """One machine, and the wrappers that were started on it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.claims = place / "claims"
        self.claims.mkdir()
        self.machine()
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Wrapped:
        return self

    def __exit__(self, *_: object) -> None:
        for wrapper in self._started:
            with wrapper:  # closes its pipes, and waits
                wrapper.kill()

    def machine(self, **facts: Any) -> None:
        """Let the backend read this from now on."""
        new = self.place / "machine.new"
        new.write_text(json.dumps(IDLE | facts))
        new.replace(self.place / "machine")

    def start(self, *command: str, constants: dict[str, Any] | None = None, **options: Any) -> subprocess.Popen[str]:
        """A wrapper with *options* of run(), and with *constants* of run and settle replaced."""
        popen = {name: options.pop(name) for name in ("preexec_fn", "start_new_session", "env") if name in options}
        wrapper = subprocess.Popen(
            self.words(*command, constants=constants, **options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,
        )
        self._started.append(wrapper)
        return wrapper

    def words(self, *command: str, constants: dict[str, Any] | None = None, **options: Any) -> list[str]:
        """The command line of a wrapper."""
        steering = json.dumps({"options": options, "constants": constants or {}})
        return [sys.executable, __file__, str(self.place), steering, *command]

    def run(self, *command: str, **options: Any) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a wrapper that ends by itself."""
        wrapper = self.start(*command, **options)
        out, err = wrapper.communicate(timeout=60)
        return wrapper.returncode, out, err

    @property
    def samples(self) -> int:
        """How often the backend was asked since the claim was made."""
        return len((self.place / "samples").read_text().splitlines())

    def is_claimed(self) -> bool:
        """Whether anybody holds device 0."""
        return any(UUIDS[0] in record.devices for record in probe(a_directory(self.claims), UUIDS))

    def events(self) -> list[dict[str, Any]]:
        """The audit log."""
        lines = (self.place / "events").read_text().rpartition("\n")[0]  # the last one may just be being written
        return [json.loads(line) for line in lines.splitlines()]


def a_directory(place: Path) -> LockDirectory:
    """A claim directory of one's own."""
    return lock_directory(str(place), backend="simulated")


def content(path: Path) -> str:
    """What a job has written to *path*; empty while there is nothing."""
    return path.read_text() if path.exists() else ""


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def first_line(wrapper: subprocess.Popen[str]) -> str:
    return wrapper.stdout.readline().strip()


def end(*wrappers: subprocess.Popen[str]) -> str:
    """Wait for the end, and return what the last one wrote to stderr."""
    return [wrapper.communicate(timeout=60)[1] for wrapper in wrappers][-1]


def main(place: Path, steering: dict[str, Any], command: list[str]) -> None:
    os.environ["GPUGUARD_EVENTS"] = str(place / "events")
    backend = FileBackend(place)
    become_subreaper()
    claim = acquire(backend, Request(devices=("0",)), a_directory(place / "claims"), wait=0.0)
    (place / "samples").write_text("")
    for name, value in steering["constants"].items():
        setattr(run if hasattr(run, name) else processes, name, value)
    settings = run.JobSettings(**steering["options"])
    ended = run.run(command, claim, backend, settings, notify=lambda text: print(f"gpuguard: {text}", file=sys.stderr))
    print(f"ended: {ended}", file=sys.stderr)
    if ended.die_of:
        sys.stderr.flush()
        signals.die_of(ended.die_of)
    sys.exit(ended.status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
