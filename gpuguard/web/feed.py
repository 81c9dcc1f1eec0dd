"""What the page shows, looked at once for all who watch: one sample, one text, however many viewers there are.

While nobody watches it looks rarely, for the charts alone.  Knows nothing of HTTP: see server.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from gpuguard import device_state
from gpuguard.claims.directory import LockDirectory
from gpuguard.errors import GpuguardError
from gpuguard.history.queries import Point, Usage, query_store, store_path
from gpuguard.model import Snapshot
from gpuguard.procfs import process_facts
from gpuguard.queue.explain import read_queue
from gpuguard.queue.settings import read_queue_settings
from gpuguard.sanitize import neutralise
from gpuguard.views import queue, who
from gpuguard.web.samples import METRICS, RINGS, ChartSeries, Host, NumberRing

# How much of what users wrote goes into a frame, which all viewers get every two seconds.
#
# One user with a GPU may write hundreds of records about it, each with a command line of 4 KiB.  What is left out is
# counted among what is unknown.


MOST_CLAIMS, MOST_PROCESSES, MOST_PLACES = 8, 64, 64  # of one user: on a device, on a device, in line
MOST_ROWS = 512  # of all users
MOST_NAMELESS = 64  # of all users without a name: who may use user namespaces has 65536 such uids
LONGEST_COMMAND = 400  # characters, in all words, and of a note: more does not fit into a card


def bounded(content: Mapping[str, Any]) -> dict[str, Any]:
    """*content* of a frame, with so much of each list and each command line."""
    left_out: list[str] = []
    devices = []
    for device in content["devices"]:
        name = f"GPU {device['index']}"
        claims = _some(device["claims"], MOST_CLAIMS, f"{name}: claims", left_out)
        processes = device["processes"]
        if processes is not None:
            processes = _some(processes, MOST_PROCESSES, f"{name}: processes", left_out)
        devices.append({**device, "claims": claims, "processes": processes})
    line = _some(content["line"], MOST_PLACES, "the waiting line", left_out)
    users = _some(content["users"], 1, "users", left_out)
    return {**content, "devices": devices, "users": users, "line": line, "unknown": [*left_out, *content["unknown"]]}


def _some(rows: Sequence[Mapping[str, Any]], most: int, what: str, left_out: list[str]) -> list[Mapping[str, Any]]:
    """The first *most* rows of each user, and a word on the others: nobody's crowd hides somebody else."""
    of_user: Counter[str] = Counter()
    nameless = 0
    shown: list[Mapping[str, Any]] = []
    for row in rows:
        user = str(row["user"])
        of_user[user] += 1
        if of_user[user] > most or len(shown) >= MOST_ROWS or (user.isdecimal() and nameless >= MOST_NAMELESS):
            continue
        nameless += user.isdecimal()
        shown.append({name: _cut(value) for name, value in row.items()})
    if len(rows) > len(shown):
        left_out.append(f"{what}: {len(rows) - len(shown)} more are not shown")
    return shown


def _cut(value: Any) -> Any:
    """*value*, a text or a list of texts no longer than can be read."""
    if isinstance(value, str):
        return "".join(_short([value]))
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return list(_short(value))
    return value


def _short(words: Sequence[str]) -> Iterator[str]:
    left = LONGEST_COMMAND
    for word in words:
        if len(word) >= left:
            yield word[:left] + "..."
            return
        yield word
        left -= len(word) + 1


WATCHED_SECONDS = 2.0  # between two looks while somebody watches
UNWATCHED_SECONDS = 10.0  # and else
MOST_POINTS = 600  # of a chart: a screen has few more columns
MOST_CHARTS = 32  # that are drawn between two looks, or wait to be: one of 400 days takes a second
LONGEST_SECONDS = 400 * 86400.0
STORED = {  # metric -> its name in the usage store, and what to multiply by
    "utilization": ("utilization_percent", 1.0),
    "memory": ("memory_used_mib", 2.0**20),
    "temperature": ("temperature_celsius", 1.0),
    "power": ("power_draw_watts", 1.0),
}


class FrameSource(Protocol):
    """Where snapshots come from."""

    def joined(self) -> tuple[Snapshot, float | None]:
        """The machine with its claims, and how old that is."""

    def throughput(self) -> Snapshot | None:
        """The machine with what goes over PCIe and NVLink: some 20 ms per device in a real driver."""


@dataclass(frozen=True)
class Frame:
    """What was seen at one look, as the JSON object and as the server-sent event that all viewers get."""

    number: int
    text: bytes
    event: bytes


class TooManyViewers(Exception):
    """So many charts are asked for that another one would only make all of them wait."""


class FrameFeed:
    """Looks and remembers, until close().

    One thread looks and one draws charts: whoever asks for charts without end takes one thread, and delays no look.

    Args:
        source: of snapshots; it is used by one thread at a time.
        directory: of the claims.
        events: the newest lines of the audit log that may be shown, oldest first.
    """

    def __init__(
        self, source: FrameSource, directory: LockDirectory, events: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        self._source, self._directory, self._events = source, directory, events
        self._rings = [NumberRing(step, keep) for step, keep in RINGS]
        self._host = Host()
        self._lock = threading.Lock()  # the rings are written and read by threads
        self._charts: dict[tuple[str, float], asyncio.Future[bytes]] = {}  # asked for since the last look
        self._looking = ThreadPoolExecutor(1, "gpuguard-look")
        self._drawing = ThreadPoolExecutor(1, "gpuguard-draw")
        self.viewers = 0
        self.curious = 0  # viewers that want to see what goes over PCIe and NVLink
        self.frame = Frame(0, b"{}", b"")
        self._came = asyncio.Event()

    async def run(self) -> None:
        """Look again and again."""
        while True:
            began = time.monotonic()
            text = await asyncio.get_running_loop().run_in_executor(self._looking, self._look)
            self.frame = Frame(self.frame.number + 1, text, b"data: " + text + b"\n\n")
            self._charts = {key: drawn for key, drawn in self._charts.items() if not drawn.done()}
            self._came.set()
            self._came = asyncio.Event()
            pause = WATCHED_SECONDS if self.viewers else UNWATCHED_SECONDS
            while time.monotonic() - began < pause:
                await asyncio.sleep(0.25 if self.viewers else 1.0)
                pause = WATCHED_SECONDS if self.viewers else UNWATCHED_SECONDS

    def close(self) -> None:
        """Begin nothing more."""
        for worker in (self._looking, self._drawing):
            worker.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def watched(self, *, curious: bool) -> Iterator[None]:
        """While one more watches."""
        self.viewers += 1
        self.curious += curious
        try:
            yield
        finally:
            self.viewers -= 1
            self.curious -= curious

    async def next(self, after: int) -> Frame:
        """A frame newer than number *after*."""
        while self.frame.number <= after:
            await self._came.wait()
        return self.frame

    def _look(self) -> bytes:
        try:
            return _encoded(bounded(self._seen()))
        except (GpuguardError, OSError) as error:
            fault = neutralise(str(error))
        except Exception as error:  # noqa: BLE001  the border to whatever strangers wrote: the next look may go well
            fault = f"a fault inside gpuguard: {type(error).__name__}"
        return _encoded({"schema": 1, "error": fault, "taken_at": time.time()})

    def _seen(self) -> dict[str, Any]:
        snapshot, age = self._source.joined()
        with self._lock:
            for ring in self._rings:
                ring.add(snapshot)
        found = device_state.uses(snapshot, process_facts(snapshot))
        site = read_queue_settings()
        line = read_queue(self._directory, snapshot, site.rules)
        content = who.to_json(snapshot, found, age=age)
        content |= {
            "line": queue.to_json(line, site)["places"],
            "unknown": who.gap_lines(snapshot),
            "events": self._events(),
            "host_use": self._host.look(),
            "throughput": self._throughput(),
        }
        return content

    def _throughput(self) -> dict[str, dict[str, float | None]] | None:
        """uuid -> bytes per second to and from the device; None while nobody wants to know."""
        if not self.curious:
            return None
        try:
            snapshot = self._source.throughput()
        except GpuguardError:
            return None
        devices = snapshot.devices if snapshot else ()
        return {
            device.uuid: {
                "received": device.pcie_rx,
                "sent": device.pcie_tx,
                "nvlink_received": device.nvlink_rx,
                "nvlink_sent": device.nvlink_tx,
            }
            for device in devices
        }

    async def chart(self, metric: str, seconds: float) -> bytes:
        """The last *seconds* of a metric: the store of the daemon where it reaches further back than we do.

        Raises:
            KeyError: there is no such metric.
            Busy: too many are asked for.
        """
        if metric not in METRICS:
            raise KeyError(metric)
        seconds = min(max(60.0, seconds), LONGEST_SECONDS)
        charts, key = self._charts, (metric, seconds)
        if key not in charts:
            if len(charts) >= MOST_CHARTS:
                raise TooManyViewers
            charts[key] = asyncio.get_running_loop().run_in_executor(self._drawing, self._drawn, metric, seconds)
        return await asyncio.shield(charts[key])  # whoever leaves takes it from nobody else

    def _drawn(self, metric: str, seconds: float) -> bytes:
        begin = time.time() - seconds
        series = self._stored(metric, begin) if seconds > RINGS[0][1] else None
        if series is None:
            with self._lock:
                ring = next((one for one in self._rings if seconds <= one.keep), self._rings[-1])
                series = ring.series(metric, begin, MOST_POINTS)
        return _encoded({"schema": 1, "metric": metric, "begin": begin, "times": series.times, "values": series.values})

    def _stored(self, metric: str, begin: float) -> ChartSeries | None:
        with self._lock:
            uuids = self._rings[0].uuids(metric)
        try:
            return query_store(store_path(self._directory), lambda store: _series_of(store, uuids, metric, begin))
        except GpuguardError:
            return None


def _series_of(store: Usage, uuids: Sequence[str], metric: str, begin: float) -> ChartSeries | None:
    """What the store has, in at most MOST_POINTS steps; None when it has nothing of that time."""
    name, factor = STORED[metric]
    width = max(store.width(begin), (store.now - begin) / MOST_POINTS)
    values, found = {}, False
    for uuid in uuids:  # one after the other: each has 38,400 points
        points = store.series(uuid, name, begin, store.now)
        values[uuid], found = _means(points, begin, width, factor), found or bool(points)
    if not found:
        return None
    steps = range(int((store.now - begin) / width) + 1)
    drawn = {uuid: [each.get(step) for step in steps] for uuid, each in values.items()}
    return ChartSeries([begin + (step + 0.5) * width for step in steps], drawn)


def _means(points: Sequence[Point], begin: float, width: float, factor: float) -> dict[int, float]:
    """By the step in which they lie."""
    sums: dict[int, tuple[float, int]] = {}
    for point in points:
        if point.mean is not None:
            at = int((point.time - begin) / width)
            total, count = sums.get(at, (0.0, 0))
            sums[at] = total + factor * point.mean, count + 1
    return {at: total / count for at, (total, count) in sums.items()}


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
