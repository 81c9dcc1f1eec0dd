"""Pages of many simulated exporters behind one address: what each of N nodes tells Prometheus, made by gpuguard.

A node has 8 devices, all fields known, 6 of them claimed by 4 users whose processes run there, a user in line and a
daemon with three policies.  Its numbers change from page to page as those of a busy node do; its uuids are its own.
"""

from __future__ import annotations

import random
import resource
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from test_metrics import FULL

from gpuguard.device_state import uses
from gpuguard.metrics.compat import COMPAT
from gpuguard.metrics.exposition import to_prometheus
from gpuguard.metrics.facts import MetricFacts
from gpuguard.metrics.families import metric_families

DEVICES, CLAIMED = 8, 6
USERS = ("alice", "bob", "carol", "dave")
VARIANTS = 32
_NODE = "NODENODE"  # in every uuid of a page, where the number of the node goes


def page(variant: int, compat: tuple[str, ...] = ()) -> str:
    """One look at a node, in the exposition format, with ``_NODE`` in its uuids."""
    dice = random.Random(variant)
    devices = []
    for index in range(DEVICES):
        busy = {
            "uuid": f"GPU-{_NODE}-1111-2222-3333-{index:012d}", "utilization": dice.uniform(60, 100),
            "memory_utilization": dice.uniform(20, 60), "temperature": dice.randint(55, 75),
            "power_draw": dice.uniform(400, 650), "memory_used": dice.randint(60 * GIB, 70 * GIB),
            "clock_sm": dice.choice((1755, 1830, 1980)), "total_energy": 1e9 + variant * 15 * 550.0 + index,
        }  # fmt: skip
        job = a_process(1000 + index, user=USERS[index % len(USERS)], memory_used=60 * GIB)
        devices.append(a_device(index, **{**FULL, **busy}, processes=(job,) if index < CLAIMED else ()))
    claims = [
        a_claim_record(device, id=f"c{index}", user=USERS[index % len(USERS)], pid=1000 + index)
        for index, device in enumerate(devices[:CLAIMED])
    ]
    snapshot = a_snapshot(*devices, claims=tuple(claims))
    actions = {(policy, what, "done"): 3 for policy in ("idle", "quota", "hot") for what in ("warn", "terminate")}
    facts = MetricFacts(
        snapshot.taken_at + 2, "0.1.0", snapshot, current=True, uses=uses(snapshot, {}), driver_up=True,
        waiting=(("eve", snapshot.taken_at - 60),), daemon_up=True, actions=actions, unrecorded=0, troubles=0,
        interval=2.0,
    )  # fmt: skip
    found = metric_families(facts)
    for name in compat:
        found += COMPAT[name](snapshot)
    return to_prometheus(found)


def series(text: str) -> int:
    """How many numbers a page has."""
    return sum(not line.startswith("#") for line in text.splitlines())


class Pages:
    """A server of the pages /0 ... /N, on loopback; one thread, one answer per connection."""

    def __init__(self, compat: tuple[str, ...] = ()) -> None:
        self.texts = [page(variant, compat).encode() for variant in range(VARIANTS)]
        self.answered = self.bytes = 0
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(10)
                try:
                    self._answer(connection)
                except OSError:
                    continue

    def _answer(self, connection: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            piece = connection.recv(4096)
            if not piece:
                return
            request += piece
        node = int(request.split(b" ", 2)[1].lstrip(b"/"))
        text = self.texts[(self.answered + node) % VARIANTS].replace(_NODE.encode(), b"%08x" % node)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nConnection: close\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        self.answered += 1
        self.bytes += len(text)
