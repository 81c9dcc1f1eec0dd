"""What the page shows, sampled once for all viewers: one sample, one text, however many there are.

Without viewers it samples rarely, for the charts alone.  Charts come from the usage store where that reaches back far
enough; for a machine without a daemon, and for the minutes that are not in the store yet, the last 12 hours are kept
here.  One user with a GPU may write hundreds of records about it, each with a command line of 4 KiB: what goes into a
frame is bounded, and what is left out is counted among what is unknown.  Knows nothing of HTTP: see server.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from gpuguard import device_state
from gpuguard.claims.directory import LockDirectory
from gpuguard.daemon.client import StatusReply, query_daemon
from gpuguard.errors import GpuguardError
from gpuguard.history.queries import Usage, query_store, store_path
from gpuguard.history.schema import WIDTH
from gpuguard.model import Snapshot
from gpuguard.procfs import process_facts
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.state import read_queue
from gpuguard.sanitize import neutralise
from gpuguard.source import SnapshotSource
from gpuguard.views import history, queue, who
from gpuguard.views.charts import bucketed

MAX_CLAIMS, MAX_PROCESSES, MAX_POSITIONS = 8, 64, 64  # of one user: on a device, on a device, in the queue
MAX_ROWS = 512  # of all users
MAX_NAMELESS = 64  # of all users without a name: a user with user namespaces has 65536 such uids
MAX_COMMAND = 400  # characters, in all words, and of a note: more does not fit into a card
WATCHED_SECONDS = 2.0  # between two samples while there are viewers
UNWATCHED_SECONDS = 10.0  # and without
FINDINGS_SECONDS, DAEMON_SECONDS = 10.0, 2.0  # between two questions to the daemon; for its answer
MAX_POINTS = 600  # of a chart: a screen has few more columns
MAX_CHARTS = 32  # that are drawn between two samples, or wait to be: one of 400 days takes a second
MIN_SECONDS, MAX_SECONDS = 60.0, 400 * 86400.0  # of a chart
UNWRITTEN_SECONDS = 3.0 * WIDTH  # for which the store may not have what the daemon saw
METRICS = {  # as history.METRICS -> the field of a device
    "utilization": "utilization",
    "memory": "memory_used",
    "temperature": "temperature",
    "power": "power_draw",
}
TRAFFIC = {"received": "pcie_rx", "sent": "pcie_tx", "nvlink_received": "nvlink_rx", "nvlink_sent": "nvlink_tx"}
_NAN = float("nan")
# Unix times, and the values of one metric at them by uuid; None = unknown.
ChartSeries = tuple[list[float], dict[str, list[float | None]]]
RINGS = ((2.0, 600.0), (10.0, 43200.0))  # (seconds between two values, seconds that are kept)


@dataclass(frozen=True)
class Frame:
    """One sample, as the JSON object and as the server-sent event that all viewers get."""

    number: int
    text: bytes
    event: bytes


class NoRoom(Exception):
    """So many charts are asked for, or so many watch, that another one would only make all of them wait."""


def who_makes_room(owners: Sequence[str], peer: str) -> int:
    """Where in *owners* that one stands who loses a place to *peer*: the last one of whose user has the most.

    Raises NoRoom: *peer* would have as many, or is unknown ("").
    """
    [(crowd, count)] = Counter(owners).most_common(1)
    if not peer or count <= owners.count(peer) + 1:
        raise NoRoom
    return max(place for place, owner in enumerate(owners) if owner == crowd)


class FrameFeed:
    """Samples and remembers, until close().

    One thread samples and one draws charts: a client that requests charts without end takes one thread, and delays no
    sample.

    Args:
        source: of snapshots; like *traffic* it is used by one thread at a time.
        traffic: of what goes over PCIe and NVLink: some 20 ms per device in a real driver.
        directory: of the claims.
        events: the newest lines of the audit log that may be shown, oldest first, by the labels of the devices.
    """

    def __init__(
        self,
        source: SnapshotSource,
        traffic: SnapshotSource,
        directory: LockDirectory,
        events: Callable[[Mapping[str, str]], Sequence[Mapping[str, Any]]],
    ) -> None:
        self._source, self._traffic, self._directory, self._events = source, traffic, directory, events
        self._rings = [NumberRing(step, keep) for step, keep in RINGS]
        self._host = HostRates()
        self._lock = threading.Lock()  # the rings are written and read by several threads
        self._charts: dict[ChartRequest, tuple[asyncio.Future[bytes], str]] = {}  # requested since the last sample
        self._sampling = ThreadPoolExecutor(1, "gpuguard-sample")
        self._drawing = ThreadPoolExecutor(1, "gpuguard-draw")
        self._findings, self._findings_at = StatusReply(False, (), 0), -math.inf
        self.viewers = 0
        self.throughput_viewers = 0  # viewers that want to see what goes over PCIe and NVLink
        self.frame = Frame(0, b"{}", b"")
        self._new_frame = asyncio.Event()

    async def run(self) -> None:
        """Sample again and again."""
        while True:
            began = time.monotonic()
            text = await asyncio.get_running_loop().run_in_executor(self._sampling, self._frame_text)
            self.frame = Frame(self.frame.number + 1, text, b"data: " + text + b"\n\n")
            self._charts = {key: (drawn, peer) for key, (drawn, peer) in self._charts.items() if not drawn.done()}
            self._new_frame.set()
            self._new_frame = asyncio.Event()
            pause = WATCHED_SECONDS if self.viewers else UNWATCHED_SECONDS
            while time.monotonic() - began < pause:
                await asyncio.sleep(0.25 if self.viewers else 1.0)
                pause = WATCHED_SECONDS if self.viewers else UNWATCHED_SECONDS

    def close(self) -> None:
        """Begin nothing more."""
        for worker in (self._sampling, self._drawing):
            worker.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def watched(self, *, throughput: bool) -> Iterator[None]:
        """While there is one more viewer."""
        self.viewers += 1
        self.throughput_viewers += throughput
        try:
            yield
        finally:
            self.viewers -= 1
            self.throughput_viewers -= throughput

    async def next(self, after: int) -> Frame:
        """A frame newer than number *after*."""
        while self.frame.number <= after:
            await self._new_frame.wait()
        return self.frame

    def _frame_text(self) -> bytes:
        try:
            return _encoded(bounded(self._content()))
        except (GpuguardError, OSError) as error:
            fault = neutralise(str(error))
        except Exception as error:  # noqa: BLE001  the border to what strangers wrote: the next sample may go well
            fault = f"a fault inside gpuguard: {type(error).__name__}"
        return _encoded({"schema": 1, "error": fault, "taken_at": time.time()})

    def _content(self) -> dict[str, Any]:
        snapshot, age = self._source.joined()
        self.remember(snapshot)
        uses = device_state.uses(snapshot, process_facts(snapshot))
        site = read_queue_settings(self._directory)
        state = read_queue(self._directory, snapshot, rules=site.rules)
        content = who.to_json(snapshot, uses, age=age)
        content |= {
            "line": queue.to_json(state, site)["places"],
            "unknown": who.gap_lines(snapshot),
            "events": self._events({device.uuid: device.label for device in snapshot.devices}),
            **self._policy_findings(age),
            "host_use": self._host.read(),
            "throughput": self._throughput(),
        }
        return content

    def _policy_findings(self, age: float | None) -> dict[str, Any]:
        """What policies find: all of it for an administrator, else what is about this user.  Only a daemon knows."""
        if time.monotonic() - self._findings_at >= FINDINGS_SECONDS or age is None:
            self._findings_at, self._findings = time.monotonic(), StatusReply(False, (), 0)
            if age is not None:
                with suppress(GpuguardError):
                    self._findings = query_daemon(self._directory, {"do": "status"}, StatusReply, DAEMON_SECONDS)
        found = self._findings
        rows = [{**asdict(row), "enforce": found.enforcing and row.enforce} for row in found.standing]
        return {"findings": rows, "findings_left_out": found.left_out}

    def remember(self, snapshot: Snapshot) -> None:
        """Keep what charts show of it."""
        with self._lock:
            for ring in self._rings:
                ring.add(snapshot)

    def _throughput(self) -> dict[str, dict[str, float | None]] | None:
        """uuid -> bytes per second to and from the device; None while no viewer wants it."""
        if not self.throughput_viewers:
            return None
        try:
            snapshot, _ = self._traffic.sample()
        except GpuguardError:
            return None
        return {
            device.uuid: {name: getattr(device, field) for name, field in TRAFFIC.items()}
            for device in snapshot.devices
        }

    async def chart(self, asked: ChartRequest, peer: str = "") -> bytes:
        """A metric over a time: what the daemon's store has, and what was seen here since; *peer* is who asks.

        Raises:
            KeyError: there is no such metric.
            NoRoom: too many are requested.
            CancelledError: another user, who has fewer, takes the place of this one.
        """
        if asked.metric not in METRICS:
            raise KeyError(asked.metric)
        charts = self._charts
        if asked not in charts:
            if len(charts) >= MAX_CHARTS:
                place = who_makes_room([owner for _, owner in charts.values()], peer)
                charts.pop([*charts][place])[0].cancel()
            charts[asked] = asyncio.get_running_loop().run_in_executor(self._drawing, self.drawn, asked), peer
        return await asyncio.shield(charts[asked][0])  # a viewer who leaves takes it from no other one

    def drawn(self, asked: ChartRequest) -> bytes:
        """The chart as JSON: its times, and a value at each of them of each device; null is unknown."""
        now = time.time()
        begin, end = asked.period(now)
        with self._lock:
            uuids = self._rings[0].uuids(asked.metric)
            ring = next((ring for ring in self._rings if now - begin <= ring.keep), self._rings[-1])
            times, values = ring.series(asked.metric, begin, end, MAX_POINTS)
        # The daemon saw what was before our first sample; of the last minutes we know more than it keeps.
        is_recent = now - begin <= RINGS[0][1]
        until = min(times[0], end) if is_recent and times else end
        if until - begin >= WIDTH:
            with suppress(GpuguardError):
                path, period = store_path(self._directory), (begin, until)
                stored = query_store(path, lambda store: series_of(store, uuids, asked.metric, period, asked.step))
                if stored:
                    times, values = followed_by(stored, (times, values)) if is_recent else stored
        return _encoded({"schema": 1, "metric": asked.metric, "begin": begin, "times": times, "values": values})


@dataclass(frozen=True)
class ChartRequest:
    """Which chart a viewer wants: the last *seconds* before *until* (unix time; None: now), and in which steps."""

    metric: str
    seconds: float
    until: float | None = None
    step: float = 0.0  # seconds between two values, which then begin at multiples of it; 0: as many as are there

    def period(self, now: float) -> tuple[float, float]:
        """Begin and end in unix time."""
        seconds = min(max(MIN_SECONDS, self.seconds), MAX_SECONDS)
        end = now if self.until is None else min(now, max(now - MAX_SECONDS, self.until))
        if self.step:
            end = math.ceil(end / self.step) * self.step
        return end - seconds, end


def series_of(
    store: Usage, uuids: Sequence[str], metric: str, period: tuple[float, float], step: float = 0.0
) -> ChartSeries | None:
    """What the store has, in at most MAX_POINTS steps; None when it has nothing of that time."""
    kept = history.METRICS[metric]
    begin, end = period
    span = end - begin
    steps = max(1, min(MAX_POINTS, int(span / max(step, store.width(begin)))))
    values: dict[str, list[float | None]] = {}
    for uuid in uuids:  # one after the other: each has 38,400 points
        means = bucketed(store.series(uuid, kept.stored, begin, end), begin, end, steps)
        values[uuid] = [None if mean is None else kept.factor * mean for mean in means]
    if span <= 0 or all(mean is None for means in values.values() for mean in means):
        return None
    return [begin + (number + 0.5) * span / steps for number in range(steps)], values


def followed_by(former: ChartSeries, later: ChartSeries) -> ChartSeries:
    """Both, one behind the other; a device that only one of them has is unknown in the other."""
    times = list(former[0])
    # The daemon writes some 20 s behind: that is no gap.
    while times and times[-1] > former[0][-1] - UNWRITTEN_SECONDS and not _is_known(former, len(times) - 1):
        times.pop()
    values = {
        uuid: [*former[1].get(uuid, [None] * len(times))[: len(times)], *later[1].get(uuid, [None] * len(later[0]))]
        for uuid in former[1].keys() | later[1].keys()
    }
    return times + later[0], values


def _is_known(series: ChartSeries, number: int) -> bool:
    return any(values[number] is not None for values in series[1].values())


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


class NumberRing:
    """The newest values of all devices, at most one in *step* seconds; unknown is NaN."""

    def __init__(self, step: float, keep: float) -> None:
        self.step, self.keep = step, keep
        self._size = int(keep / step)
        self._times = array("d", [_NAN]) * self._size
        self._values: dict[tuple[str, str], array[float]] = {}
        self._slot = -1

    def add(self, snapshot: Snapshot) -> None:
        """Remember *snapshot*, instead of one of the same slot."""
        slot = int(snapshot.taken_at / self.step)
        if slot < self._slot:  # the clock was set back: what is later now is no past any more
            self._times = array("d", [when if when <= snapshot.taken_at else _NAN for when in self._times])
        self._slot = slot
        index = slot % self._size
        self._times[index] = snapshot.taken_at
        seen = {
            (device.uuid, metric): getattr(device, field)
            for device in snapshot.devices
            for metric, field in METRICS.items()
        }
        for key in seen.keys() | self._values.keys():
            kept = self._values.setdefault(key, array("f", [_NAN]) * self._size)
            kept[index] = _NAN if (value := seen.get(key)) is None else value

    def uuids(self, metric: str) -> list[str]:
        """The devices of which something was seen."""
        return [uuid for uuid, name in self._values if name == metric]

    def series(self, metric: str, begin: float, end: float, most: int) -> ChartSeries:
        """The values between two unix times, at most so many per device: means of those that are known."""
        order = sorted((time, index) for index, time in enumerate(self._times) if begin <= time <= end)
        width = -(-len(order) // most) or 1
        groups = [order[at : at + width] for at in range(0, len(order), width)]
        values = {
            uuid: [_mean([kept[index] for _, index in group]) for group in groups]
            for (uuid, name), kept in self._values.items()
            if name == metric
        }
        return [group[-1][0] for group in groups], values


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else None


class HostRates:
    """What the machine does beside the GPUs, as rates since the reading before; the first one has no rates."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, int | None]] | None = None

    def read(self) -> dict[str, float | int | None]:
        """CPU in percent, memory in bytes, disk and network in bytes per second; None = unknown."""
        memory = psutil.virtual_memory()
        disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
        counters = {
            "disk_read": disk.read_bytes if disk else None,
            "disk_write": disk.write_bytes if disk else None,
            "network_received": network.bytes_recv if network else None,
            "network_sent": network.bytes_sent if network else None,
        }
        before, self._before = self._before, (time.monotonic(), counters)
        seconds, former = (self._before[0] - before[0], before[1]) if before else (0.0, counters)
        return {
            "cpu_percent": psutil.cpu_percent() if before else None,
            "cpu_count": os.cpu_count(),
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            **{f"{name}_bytes_per_second": _rate(former[name], count, seconds) for name, count in counters.items()},
        }


def _rate(before: int | None, now: int | None, seconds: float) -> int | None:
    if before is None or now is None or now < before or seconds <= 0:  # a counter that began anew tells nothing
        return None
    return round((now - before) / seconds)


def bounded(content: Mapping[str, Any]) -> dict[str, Any]:
    """*content* of a frame, with so much of each list and each command line."""
    left_out: list[str] = []
    devices = []
    for device in content["devices"]:
        name = f"GPU {device['index']}"
        claims = _some(device["claims"], MAX_CLAIMS, f"{name}: claims", left_out)
        processes = device["processes"]
        if processes is not None:
            processes = _some(processes, MAX_PROCESSES, f"{name}: processes", left_out)
        devices.append({**device, "claims": claims, "processes": processes})
    positions = _some(content["line"], MAX_POSITIONS, "the queue", left_out)
    users = _some(content["users"], 1, "users", left_out)
    unknown = [*left_out, *content["unknown"]]
    events = [{name: _cut(value) for name, value in event.items()} for event in content["events"]]
    return {**content, "devices": devices, "users": users, "line": positions, "events": events, "unknown": unknown}


def _some(rows: Sequence[Mapping[str, Any]], most: int, what: str, left_out: list[str]) -> list[Mapping[str, Any]]:
    """The first *most* rows of each user, and a word on the others: no user's crowd hides other users."""
    of_user: Counter[str] = Counter()
    nameless = 0
    shown: list[Mapping[str, Any]] = []
    for row in rows:
        user = str(row["user"])
        of_user[user] += 1
        if of_user[user] > most or len(shown) >= MAX_ROWS or (user.isdecimal() and nameless >= MAX_NAMELESS):
            continue
        nameless += user.isdecimal()
        shown.append({name: _cut(value) for name, value in row.items()})
    if len(rows) > len(shown):
        left_out.append(f"{what}: {len(rows) - len(shown)} more are not shown")
    return shown


def _cut(value: Any) -> Any:
    """*value*, a text or a list of texts no longer than can be read."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    kept, left = [], MAX_COMMAND
    for word in words:
        if len(word) >= left:
            kept.append(word[:left] + "...")
            break
        kept.append(word)
        left -= len(word) + 1
    return kept[0] if isinstance(value, str) else kept
