"""Keeps further devices of this node for a command that Ray runs, as long as somebody reads and writes its pipes.

It says how many the node may have, then each device that Ray gives, one a line.  It is told "want 2"
(two more) and "keep 0,3" (give the others back).
Signals do not end it: they are for the job, and its devices must be counted until that has ended.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from gpuguard.cli.terminal import print_notice
from gpuguard.clusters import ray as engine
from gpuguard.errors import GpuguardError

POLL_SECONDS = 0.1


def main(have: int) -> int:
    said = os.dup(1)
    os.dup2(2, 1)  # whatever Ray prints
    try:
        ray = engine.load()
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, GpuguardError, RuntimeError, ValueError) as error:
        print_notice(f"Ray cannot be asked for other devices of this node: {error}")
        return 1
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # now, because Ray has set handlers of its own
        signal.signal(signum, signal.SIG_IGN)
    places = engine.LocalNodeDevices(have)
    os.write(said, b"%d\n" % places.left)
    heard, asked = b"", select.poll()
    asked.register(0, select.POLLIN)
    while True:
        if asked.poll(1000 * POLL_SECONDS):
            if not (more := os.read(0, 4096)):
                return 0
            *lines, heard = (heard + more).split(b"\n")
            for line in lines:
                word, _, rest = line.decode().partition(" ")
                if word == "want":
                    places.want(len(places.pending) + int(rest))
                else:
                    places.keep(rest.split(","))
        for device in places.arrived():
            os.write(said, f"{device}\n".encode())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
