"""`gpuguard web`, run as a user runs it, and asked as a browser asks.

with a_page(gpuguard) as port: answer, text = ask(port, "/api/now")
"""

import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from nodes import Gpuguard, until
from proc import free_port

PATIENCE = 60.0  # seconds: far beyond any answer, even on a busy machine
JOBS = (  # (user-facing note, how many devices, memory, utilization) of the jobs of a_busy_node
    ("train llama, 2 of 4 epochs", 3, "61GiB", "93%"),
    ("蛋白质折叠 第三轮", 1, "22GiB", "47%"),
    ("", 1, "9GiB", "0%"),
)


@contextmanager
def a_server(gpuguard: Gpuguard, *words: str, port: int = 0) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The page on a port of loopback (0: a free one), and its process; without a token unless *words* name one."""
    port = port or free_port()
    words = words if "--token-file" in words else ("--no-token", *words)
    with gpuguard.start("web", "--listen", f"127.0.0.1:{port}", *words) as server:
        try:
            until(lambda: answers(port) or server.poll() is not None)
            assert server.poll() is None, server.stderr and server.stderr.read()
            yield port, server
        finally:
            server.terminate()
            server.wait(PATIENCE)


@contextmanager
def a_page(gpuguard: Gpuguard, *words: str, port: int = 0) -> Iterator[int]:
    """The port of the page."""
    with a_server(gpuguard, *words, port=port) as (found, _):
        yield found


def answers(port: int) -> bool:
    """Whether a server listens there."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """One request; _ in the name of a header stands for -."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


@contextmanager
def a_busy_node(gpuguard: Gpuguard) -> Iterator[None]:
    """Jobs that hold and use devices of the simulated node, one process without a claim, and a request that waits."""
    gpuguard.environment["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    with ExitStack() as running:

        def begin(*words: str) -> None:
            line = ["python", "-m", "gpuguard", *words]  # without the place of this Python: it gets into a picture
            process = running.enter_context(
                subprocess.Popen(line, env=gpuguard.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            running.callback(process.terminate)

        use = ["python", "-m", "gpuguard", "sim", "use"]
        for number, (note, count, memory, utilization) in enumerate(JOBS, start=1):
            begin("run", "-n", str(count), "--note", note, "--", *use, "--memory", memory, "--utilization", utilization)
            wanted = sum(job[1] for job in JOBS[:number])
            until(partial(_claims, gpuguard, wanted))
        begin("sim", "use", "--device", "6", "--memory", "14GiB", "--utilization", "71%")
        begin("run", "-n", "4", "--note", "waits for the night", "--", "true")
        until(lambda: gpuguard.json("queue")["places"])
        until(lambda: gpuguard.json("who")["devices"][6]["processes"])
        yield


def _claims(gpuguard: Gpuguard, least: int) -> bool:
    """Whether so many devices have a claim and a process."""
    devices = gpuguard.json("who")["devices"]
    return sum(1 for device in devices if device["claims"] and device["processes"]) >= least
