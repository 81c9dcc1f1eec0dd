"""What the page shows, sampled once for all viewers: one sample and one text, however many there are.

Without viewers it samples rarely, for the charts alone.  Charts come from the usage store where that reaches back far
enough.  The last 12 hours are kept here, for a machine without a daemon and for the minutes that are not in the store
yet.  One user with a GPU may write hundreds of records about it, each with a command line of 4 KiB, so a frame is
bounded, and what is left out of it is counted among the unknown.  A frame is English, and has its sentences in Chinese
in a field of its own, by their texts.  Knows nothing of HTTP: see server.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from gpuguard import device_state
from gpuguard.batch.public import public_jobs
from gpuguard.claims.daemon_client import StatusReply, query_daemon
from gpuguard.claims.directory import LockDirectory
from gpuguard.errors import GpuguardError
from gpuguard.history.queries import Usage, query_store, store_path
from gpuguard.history.store_schema import WIDTH
from gpuguard.locale import catalogue, translated
from gpuguard.locale.messages import Sentence, sentence
from gpuguard.model import Snapshot
from gpuguard.procfs import process_facts
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.state import read_queue
from gpuguard.sanitize import neutralise
from gpuguard.source import SnapshotSource
from gpuguard.views import history, jobs, queue, who
from gpuguard.views.charts import bucketed

MAX_CLAIMS, MAX_PROCESSES, MAX_POSITIONS = 8, 64, 64  # of one user: on a device, on a device, in the queue
MAX_JOBS = 64  # of one user, which wait or run
MAX_ROWS = 512  # of all users
MAX_NAMELESS = 64  # of all users without a name: a user with user namespaces has 65536 such uids
MAX_COMMAND = 400  # characters, in all words, and of a note, because more does not fit into a card
WATCHED_SECONDS = 2.0  # between two samples while there are viewers
UNWATCHED_SECONDS = 10.0  # between two samples without viewers
FINDINGS_SECONDS, DAEMON_SECONDS = 10.0, 2.0  # between two questions to the daemon, and to wait for its answer
MAX_POINTS = 600  # of a chart: a screen has few more columns
MAX_CHARTS = 32  # drawn, or waiting to be drawn, between two samples: one of 400 days takes a second
MIN_SECONDS, MAX_SECONDS = 60.0, 400 * 86400.0  # of a chart
UNWRITTEN_SECONDS = 3.0 * WIDTH  # for so long the store may not have what the daemon saw
METRICS = {  # a metric, named as in history.METRICS -> the field of a device
    "utilization": "utilization",
    "memory": "memory_used",
    "temperature": "temperature",
    "power": "power_draw",
}
TRAFFIC = {"received": "pcie_rx", "sent": "pcie_tx", "nvlink_received": "nvlink_rx", "nvlink_sent": "nvlink_tx"}
# Places of sentences in which a duration stands, and its units in Chinese.  A user's name or words may look like one.
_TIMES = ("age", "ahead", "begins", "limit", "longest", "now", "seconds", "span", "time", "waited")
_UNITS = {"d": "天", "h": "小时", "m": "分", "s": "秒", "ms": "毫秒"}
_DURATION, _UNIT = re.compile(r"(?:\d+(?:ms|[dhms]))+"), re.compile(r"ms|[dhms]")
_END = "\0"  # of a duration: between it and Chinese no blank stands
_AT_END = re.compile(f"{_END}(?: (?=[\u4e00-\u9fff]))?")
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
    """So many charts are requested, or there are so many viewers, that another one would only make all of them wait."""


def who_makes_room(owners: Sequence[str], peer: str) -> int:
    """Return the index in *owners* of the one that loses its place to *peer*: the last of the user who has the most.

    Raises NoRoom: *peer* would have as many, or is unknown ("").
    """
    [(crowd, count)] = Counter(owners).most_common(1)
    if not peer or count <= owners.count(peer) + 1:
        raise NoRoom
    return max(place for place, owner in enumerate(owners) if owner == crowd)


class FrameFeed:
    """Samples and remembers, until close().

    One thread samples and one draws charts, so a client that requests charts without end takes one thread, and delays
    no sample.

    Args:
        source: of snapshots; one thread at a time uses it, and likewise *traffic*.
        traffic: of what goes over PCIe and NVLink, which takes some 20 ms per device in a real driver.
        directory: of the claims.
        events: returns the newest lines of the audit log that may be shown, oldest first, given the devices' labels.
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
        self._host, self._say = HostRates(), catalogue("zh_CN").gettext
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
            while time.monotonic() - began < (WATCHED_SECONDS if self.viewers else UNWATCHED_SECONDS):
                await asyncio.sleep(0.25 if self.viewers else 1.0)

    def close(self) -> None:
        """Begin no more work."""
        for worker in (self._sampling, self._drawing):
            worker.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def watched(self, *, throughput: bool) -> Iterator[None]:
        """Count one more viewer during the block."""
        self.viewers += 1
        self.throughput_viewers += throughput
        try:
            yield
        finally:
            self.viewers -= 1
            self.throughput_viewers -= throughput

    async def next(self, after: int) -> Frame:
        """Return a frame newer than number *after*, once there is one."""
        while self.frame.number <= after:
            await self._new_frame.wait()
        return self.frame

    def _frame_text(self) -> bytes:
        try:
            content = bounded(self._content())
            return _encoded({**content, "chinese": chinese(_shown(content), self._say)})
        except (GpuguardError, OSError) as error:
            fault = neutralise(str(error))
        except Exception as error:  # noqa: BLE001  the border to what strangers wrote: the next sample may go well
            fault = sentence("web.fault", "a fault inside gpuguard: {error}", error=type(error).__name__)
        words = chinese([fault], self._say)
        return _encoded({"schema": 1, "error": fault, "taken_at": time.time(), "chinese": words})

    def _content(self) -> dict[str, Any]:
        snapshot, age = self._source.joined()
        self.remember(snapshot)
        uses = device_state.uses(snapshot, process_facts(snapshot))
        site = read_queue_settings(self._directory)
        state = read_queue(self._directory, snapshot, rules=site.rules)
        content = who.to_json(snapshot, uses, age=age)
        content |= {
            "line": queue.to_json(state, site)["places"],
            "jobs": [jobs.public_json(job) for job in public_jobs(self._directory, snapshot.claims)],
            "models": {device.uuid: device_state.model_name(device) for device in snapshot.devices if device.name},
            "unknown": who.gap_lines(snapshot),
            "events": self._events({device.uuid: device.label for device in snapshot.devices}),
            **self._policy_findings(age),
            "host_use": self._host.read(),
            "throughput": self._throughput(),
        }
        return content

    def _policy_findings(self, age: float | None) -> dict[str, Any]:
        """Return what policies find: all for an administrator, else what is about this user.  Only a daemon knows."""
        if time.monotonic() - self._findings_at >= FINDINGS_SECONDS or age is None:
            self._findings_at, self._findings = time.monotonic(), StatusReply(False, (), 0)
            if age is not None:
                with suppress(GpuguardError):
                    self._findings = query_daemon(self._directory, {"do": "status"}, StatusReply, DAEMON_SECONDS)
        found = self._findings
        rows = [{**asdict(row), "enforce": found.enforcing and row.enforce} for row in found.standing]
        return {"findings": rows, "findings_left_out": found.left_out}

    def remember(self, snapshot: Snapshot) -> None:
        """Keep what charts show of *snapshot*."""
        with self._lock:
            for ring in self._rings:
                ring.add(snapshot)

    def _throughput(self) -> dict[str, dict[str, float | None]] | None:
        """Return uuid -> bytes per second to and from the device; None if no viewer wants it or it cannot be read."""
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
        """Return a metric over a period: what the store has, and what was seen here since; *peer* is the user who asks.

        Raises:
            KeyError: there is no such metric.
            NoRoom: too many charts are requested.
            CancelledError: another user, who has fewer charts, takes the place of this one.
        """
        if asked.metric not in METRICS:
            raise KeyError(asked.metric)
        charts = self._charts
        if asked not in charts:
            if len(charts) >= MAX_CHARTS:
                place = who_makes_room([owner for _, owner in charts.values()], peer)
                charts.pop([*charts][place])[0].cancel()
            charts[asked] = asyncio.get_running_loop().run_in_executor(self._drawing, self.drawn, asked), peer
        return await asyncio.shield(charts[asked][0])  # a viewer who leaves must not take it from another one

    def drawn(self, asked: ChartRequest) -> bytes:
        """Return the chart as JSON: its times, and a value at each of them for each device; null is unknown."""
        now = time.time()
        begin, end = asked.period(now)
        with self._lock:
            uuids = self._rings[0].uuids(asked.metric)
            ring = next((ring for ring in self._rings if now - begin <= ring.keep), self._rings[-1])
            times, values = ring.series(asked.metric, begin, end, MAX_POINTS)
        # The daemon saw what was before our first sample, but of the last minutes we know more than it keeps.
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
    step: float = 0.0  # seconds between two values, which then begin at multiples of it; 0: as many as there are

    def period(self, now: float) -> tuple[float, float]:
        """Return begin and end in unix time."""
        seconds = min(max(MIN_SECONDS, self.seconds), MAX_SECONDS)
        end = now if self.until is None else min(now, max(now - MAX_SECONDS, self.until))
        if self.step:
            end = math.ceil(end / self.step) * self.step
        return end - seconds, end


def series_of(
    store: Usage, uuids: Sequence[str], metric: str, period: tuple[float, float], step: float = 0.0
) -> ChartSeries | None:
    """Return what the store has, in at most MAX_POINTS steps, or None if it has nothing of that period."""
    kept = history.METRICS[metric]
    begin, end = period
    span = end - begin
    steps = max(1, min(MAX_POINTS, int(span / max(step, store.width(begin)))))
    values: dict[str, list[float | None]] = {}
    for uuid in uuids:  # one after the other, because each has 38,400 points
        means = bucketed(store.series(uuid, kept.stored, begin, end), begin, end, steps)
        values[uuid] = [None if mean is None else kept.factor * mean for mean in means]
    if span <= 0 or all(mean is None for means in values.values() for mean in means):
        return None
    return [begin + (number + 0.5) * span / steps for number in range(steps)], values


def followed_by(former: ChartSeries, later: ChartSeries) -> ChartSeries:
    """Join both series, one behind the other; a device that only one of them has is unknown in the other."""
    times = list(former[0])
    # The daemon writes some 20 s later than it sees, which is no gap.
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
        """Remember *snapshot*, in place of one in the same slot."""
        slot = int(snapshot.taken_at / self.step)
        if slot < self._slot:  # the clock was set back, so what is later than now is not the past any more
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
        """Return the devices of which something was seen."""
        return [uuid for uuid, name in self._values if name == metric]

    def series(self, metric: str, begin: float, end: float, most: int) -> ChartSeries:
        """Return the values between two unix times, at most *most* per device: means of those that are known."""
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
    """What the machine does beside the GPUs, as rates since the previous reading; the first reading has no rates."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, int | None]] | None = None

    def read(self) -> dict[str, float | int | None]:
        """Return CPU in percent, memory in bytes, disk and network in bytes per second; None = unknown."""
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
    """Return *content* of a frame, with each list and each command line cut to its limit."""
    left_out: list[str] = []
    devices = []
    for device in content["devices"]:
        name = f"GPU {device['index']}"
        claims = _some(device["claims"], MAX_CLAIMS, sentence("web.claims", "{gpu}: claims", gpu=name), left_out)
        processes = device["processes"]
        if processes is not None:
            what = sentence("web.processes", "{gpu}: processes", gpu=name)
            processes = _some(processes, MAX_PROCESSES, what, left_out)
        devices.append({**device, "claims": claims, "processes": processes})
    lists = {
        part: _some(content[part], most, what, left_out)
        for part, most, what in (
            ("line", MAX_POSITIONS, sentence("web.queue", "the queue")),
            ("jobs", MAX_JOBS, sentence("web.jobs", "jobs")),
            ("users", 1, sentence("web.users", "users")),
        )
    }
    events = [{name: _cut(value) for name, value in event.items()} for event in content["events"]]
    return {**content, **lists, "devices": devices, "events": events, "unknown": [*left_out, *content["unknown"]]}


def _some(rows: Sequence[Mapping[str, Any]], most: int, what: str, left_out: list[str]) -> list[Mapping[str, Any]]:
    """Return the first *most* rows of each user, and note the others, so that no user's crowd hides other users."""
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
        count = len(rows) - len(shown)
        left_out.append(sentence("web.left_out", "{what}: {count} more are not shown", what=what, count=count))
    return shown


def _cut(value: Any) -> Any:
    """Return *value*, with a text or a list of texts cut to MAX_COMMAND characters; a sentence remains one."""
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
    if isinstance(value, Sentence):
        return Sentence(kept[0], value.key, value.values)
    return kept[0] if isinstance(value, str) else kept


def _shown(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a frame that the page shows as sentences; among the others are the words of users."""
    for part in ("devices", "line", "findings", "events"):
        for row in content[part]:
            yield from filter(None, map(row.get, ("reason", "refused", "message")))
            yield from (value for _name, value in row.get("facts", ()))
    yield from content["unknown"]


def chinese(texts: Iterable[object], say: Callable[[str], str]) -> dict[str, str]:
    """Return the sentences among *texts* in Chinese, by their texts; *say* has the Chinese of a message."""
    return {
        text: _cut(_AT_END.sub("", translated(_with_units(text), say))) for text in texts if isinstance(text, Sentence)
    }


def _with_units(text: str) -> str:
    """Return a sentence whose durations have Chinese units, and _END behind them."""
    if not isinstance(text, Sentence):
        return text
    values = {
        name: _UNIT.sub(lambda unit: _UNITS[unit[0]], value) + _END
        if name in _TIMES and _DURATION.fullmatch(value)
        else _with_units(value)
        for name, value in text.values.items()
    }
    return Sentence(text, text.key, values)
