"""A job of benchmarks/chaos.py: it uses what it was given, and writes down what gpuguard knows nothing of.

    python chaos_job.py PLACE ROLE SECONDS BYTES whole|share DEVICES

PLACE/device.N: locked for as long as it has device N, by a lock that nobody but these jobs looks at.  PLACE/PID.log: a
line of JSON for each thing that happens to it, above all each signal.  DEVICES "": what its variable says.
A "sleeper" never uses what it has, a "deaf" one stays in spite of SIGTERM.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

# A process that ends gives its files back one after the other, the lock of gpuguard perhaps before ours.
TRIES, BETWEEN = 50, 0.02


def main(place: str, role: str, seconds: str, memory: str, way: str, devices: str) -> int:
    log = os.open(f"{place}/{os.getpid()}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def say(what: str, **facts: Any) -> None:
        os.write(log, (json.dumps({"what": what, "at": time.time(), **facts}) + "\n").encode())

    def told(number: int, frame: FrameType | None) -> None:
        say("signal", number=number)
        if (role, number) != ("deaf", signal.SIGTERM):
            os._exit(0)

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, told)
    given = (devices or os.environ.get("ROCR_VISIBLE_DEVICES") or os.environ["CUDA_VISIBLE_DEVICES"]).split(",")
    say("begun", role=role, devices=given, way=way)
    # Who chose it himself has no right to it, and a sleeper's claim is given up by the guard while he sleeps.
    alone = not devices and role != "sleeper"
    kept = [_lock(f"{place}/device.{one}", way == "share") for one in given if alone]
    for one, descriptor in zip(given, kept, strict=False):
        if descriptor is None:
            say("overlap", device=one)
    if role != "sleeper":
        from gpuguard.backends import simulated
        from gpuguard.errors import GpuguardError

        try:
            simulated.use(given, int(memory), 60.0, spec=os.environ["GPUGUARD_BACKEND"].partition(":")[2])
        except GpuguardError as error:  # as for any program: there is not so much memory left
            say("no room", error=str(error))
            return 1
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        time.sleep(0.05)
    say("done")
    return 0


def _lock(path: str, shared: bool) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    for _ in range(TRIES):
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            time.sleep(BETWEEN)
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
