"""What the page in the browser costs: CPU and memory of `gpuguard web` and its worker, per number of viewers.

    python benchmarks/web.py --viewers 0 1 100 --seconds 20

A simulated node of 8 devices, 5 of them in use.  CPU is what the scheduler counted for all threads, in percent of one
core; memory is Pss.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

import psutil
from nodes import Gpuguard
from web_pages import a_busy_node, a_server, ask

REQUEST = b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


def cpu_seconds(family: list[psutil.Process]) -> float:
    files = [each for process in family for each in Path(f"/proc/{process.pid}/task").glob("*/schedstat")]
    return sum(int(each.read_text().split()[0]) for each in files) / 1e9


def measured(port: int, family: list[psutil.Process], viewers: int, seconds: float) -> tuple[float, float, float]:
    """Percent of a core, MiB, and KiB per second that each viewer got."""
    got = [0]
    with ExitStack() as held:
        for _ in range(viewers):
            viewer = held.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            viewer.sendall(REQUEST)
            threading.Thread(target=drain, args=(viewer, got), daemon=True).start()
        time.sleep(3)
        before, began, bytes_before = cpu_seconds(family), time.monotonic(), got[0]
        time.sleep(seconds)
        used, took = cpu_seconds(family) - before, time.monotonic() - began
        memory = sum(process.memory_full_info().pss for process in family) / 2**20
    return 100 * used / took, memory, (got[0] - bytes_before) / took / max(1, viewers) / 1024


def drain(viewer: socket.socket, got: list[int]) -> None:
    try:
        while some := viewer.recv(65536):
            got[0] += len(some)
    except OSError:
        return  # the measurement has ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, nargs="+", default=[0, 1, 100])
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        gpuguard = Gpuguard(Path(place), None)
        gpuguard("sim", "start", "8xH100-80GB")
        print("viewers  % of a core  MiB (Pss)  KiB/s each")
        for viewers in args.viewers:
            with a_busy_node(gpuguard), a_server(gpuguard) as (port, process):
                ask(port, "/api/now")
                own = psutil.Process(process.pid)
                cpu, memory, rate = measured(port, [own, *own.children(recursive=True)], viewers, args.seconds)
                print(f"{viewers:7}  {cpu:11.2f}  {memory:9.1f}  {rate:10.1f}")


if __name__ == "__main__":
    main()
