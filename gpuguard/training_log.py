"""Numbers of this job for its training log: what its GPUs, its processes and the host did since a tag began.

    with gpuguard.collector() as numbers, numbers.tag("train"):
        writer.add_scalars(numbers.collect())   # {"train/gpu:0/memory_used (MiB)/mean": 3712.0, ...}

A thread samples once per interval.  The driver is asked in a process of its own, so that a driver that hangs cannot
hang the training.  Without a driver there are still the numbers of the host, and trouble says why there are no others.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from gpuguard.backends import Backend, default_backend
from gpuguard.backends.client import WorkerBackend, open_worker
from gpuguard.clusters.device_variables import groups_needed, outer_devices
from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.host import HostNumbers, members_of
from gpuguard.model import HEALTH, MEMORY, POWER, PROCESS_DETAILS, PROCESSES, THERMAL, UTILIZATION, Device, Snapshot
from gpuguard.vendors import names_instance

if TYPE_CHECKING:
    from gpuguard.backends.merged import MergedBackend

FIELDS = frozenset({MEMORY, UTILIZATION, THERMAL, POWER, PROCESSES, PROCESS_DETAILS})
SHORTEST_SECONDS = 0.05
_MIB = 2**20
_DEVICE = {  # our name with its unit -> the field, and what its value is divided by
    "memory_used (MiB)": ("memory_used", _MIB),
    "memory_free (MiB)": ("memory_free", _MIB),
    "utilization (%)": ("utilization", 1),
    "memory_utilization (%)": ("memory_utilization", 1),
    "temperature (C)": ("temperature", 1),
    "power_draw (W)": ("power_draw", 1),
}


def collector(
    pids: Collection[int] | None = None,
    interval: float = 1.0,
    *,
    devices: Collection[str] | None = None,
    backend: Backend | str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Collector:
    """Return a collector of numbers; use it in a ``with`` statement, or start() and stop() it as often as you like.

    Args:
        pids: of the processes to watch with all their descendants; None means this process, and empty means none.
        interval: seconds between two samples.
        devices: uuids, or None for those that CUDA_VISIBLE_DEVICES, Slurm or the container leaves to this process.
        backend: see backends.open_backend; None means $GPUGUARD_BACKEND, or nvml if that is not set.
        environ: the variables that say which devices are left to this process.

    Raises:
        InvalidRequest: the interval is too short.
    """
    if not interval >= SHORTEST_SECONDS:
        raise InvalidRequest(f"an interval of {interval} s: {SHORTEST_SECONDS} s are the least.")
    watched = frozenset({os.getpid()} if pids is None else pids)
    source = default_backend() if backend is None else backend
    return Collector(source, watched, interval, None if devices is None else frozenset(devices), dict(environ))


class TagStatistics:
    """The numbers that were seen since a tag began."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.began, self.samples = time.monotonic(), 0
        # The name of a number -> how often it was known, its sum, and its lowest, highest and newest value.
        self.sums: dict[str, tuple[int, float, float, float, float]] = {}

    def add(self, numbers: Mapping[str, float | None]) -> None:
        """Add a sample; a number that is unknown counts for nothing."""
        self.samples += 1
        for name, value in numbers.items():
            if value is not None:
                count, total, least, most, _ = self.sums.get(name, (0, 0.0, value, value, value))
                self.sums[name] = count + 1, total + value, min(least, value), max(most, value), float(value)

    def numbers(self) -> dict[str, float]:
        """Return ``{"train/gpu:0/power_draw (W)/mean": 311.5, ..., "train/duration (s)": 60.2}``."""
        prefix = f"{self.name}/" if self.name else ""
        found: dict[str, float] = {}
        for name, (count, total, least, most, newest) in self.sums.items():
            kinds = {"mean": total / count, "min": float(least), "max": float(most), "last": newest}
            found |= {f"{prefix}{name}/{kind}": value for kind, value in kinds.items()}
        found[f"{prefix}duration (s)"] = time.monotonic() - self.began
        found[f"{prefix}samples"] = float(self.samples)
        return found


class Collector:
    """The object that collector() returns.  You may call all its methods from any thread.

    trouble: why the devices cannot be read, or None while they can.
    """

    def __init__(
        self,
        source: Backend | str,
        pids: frozenset[int],
        interval: float,
        devices: frozenset[str] | None,
        environ: Mapping[str, str],
    ) -> None:
        self.trouble: str | None = None
        self._source, self._pids, self._interval = source, pids, interval
        self._devices, self._environ = devices, environ
        self._opened: WorkerBackend | MergedBackend | None = None  # the backend, if we opened it ourselves
        self._hosts, self._fields, self._process = HostNumbers(), FIELDS, os.getpid()
        self._tags = [TagStatistics("")]
        self._newest: float | None = None  # when the last sample ended
        self._sampling = threading.Lock()  # held during a sample; always taken before _lock
        self._lock = threading.Lock()  # guards the tags
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Collector:
        """Begin to sample, with nothing counted yet; this has no effect if it has begun already."""
        with self._sampling:
            if self._thread is None:
                with self._lock:
                    for tag in self._tags:
                        tag.clear()
                self._hosts, self._process, self._stop = HostNumbers(), os.getpid(), threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stop,), name="gpuguard", daemon=True)
                self._thread.start()
        return self

    def stop(self) -> None:
        """Sample no more, but keep what was counted.  Calling this again has no effect."""
        if self._is_forked():
            return
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread and thread is not threading.current_thread():
            thread.join()
        with self._sampling:
            if self._opened:
                self._opened.close()
            self._opened = self._newest = None

    def __enter__(self) -> Collector:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @contextmanager
    def tag(self, name: str) -> Iterator[Collector]:
        """Count everything that follows also under *name*; inside another tag it is called "outer/inner"."""
        if not name or "/" in name:
            raise InvalidRequest(f"a tag cannot be called {name!r}: choose a name without a slash.")
        with self._lock:
            above = self._tags[-1].name
            own = TagStatistics(f"{above}/{name}" if above else name)
            self._tags.append(own)
        try:
            yield self
        finally:
            with self._lock:
                self._tags.remove(own)

    def clear(self) -> None:
        """Begin the innermost tag anew."""
        with self._lock:
            self._tags[-1].clear()

    def collect(self) -> dict[str, float]:
        """Return the numbers of the innermost tag since it began: flat, without unknown ones.

        Sample at once if the last sample is older than half an interval, or if the tag has none yet.  In a process that
        was forked (a worker that loads data), nothing is sampled, and there are no numbers.
        """
        if self._is_forked():
            return {}
        with self._sampling:  # the thread may be sampling for us just now
            if self._thread is not None and (self._is_stale() or not self._tags[-1].samples):
                self._sample_now()
        with self._lock:
            return self._tags[-1].numbers()

    def _is_forked(self) -> bool:
        # The thread stayed with the parent, which may be in the middle of a conversation over the pipes to the worker.
        return os.getpid() != self._process

    def _run(self, stop: threading.Event) -> None:
        began = time.monotonic()
        while not stop.is_set():
            with self._sampling:
                if not stop.is_set() and self._is_stale():  # otherwise collect() has sampled just now
                    self._sample_now()
            stop.wait(self._interval - (time.monotonic() - began) % self._interval)

    def sample(self) -> None:
        """Read the devices now, besides the thread's own samples; this has no effect while the collector is stopped."""
        if not self._is_forked():
            with self._sampling:
                if self._thread is not None:
                    self._sample_now()

    look = sample  # its name in 0.1

    def _is_stale(self) -> bool:
        return self._newest is None or time.monotonic() - self._newest > self._interval / 2

    def _sample_now(self) -> None:
        numbers = self._numbers()
        self._newest = time.monotonic()
        with self._lock:
            for tag in self._tags:
                tag.add(numbers)

    def _numbers(self) -> dict[str, float | None]:
        numbers = {f"host/{name}": value for name, value in self._hosts.host().items()}
        trees = {pid: members_of(pid) for pid in self._pids}
        for pid, members in trees.items():
            numbers |= {f"pid:{pid}/host/{name}": value for name, value in self._hosts.tree(pid, members).items()}
        snapshot = self._sample()
        uuids = self._uuids(snapshot) if snapshot else None
        for device in snapshot.devices if snapshot else ():
            if uuids is not None and device.uuid not in uuids:
                continue
            scope = f"gpu:{device.index}" + (f".{device.gpu_instance_id}" if device.parent_uuid else "")
            for name, (field, scale) in _DEVICE.items():
                value = getattr(device, field)
                numbers[f"{scope}/{name}"] = None if value is None else value / scale
            if device.processes is not None and device.processes_plausible:
                for pid, members in trees.items():
                    numbers |= {f"pid:{pid}/{scope}/{name}": value for name, value in _share(device, members).items()}
        return numbers

    def _sample(self) -> Snapshot | None:
        try:
            backend = self._source
            if isinstance(backend, str):
                backend = self._opened = self._opened or open_worker(backend)
            snapshot = backend.sample(self._fields)
            needed = groups_needed(self._environ, snapshot.devices)
            if any(names_instance(uuid) for uuid in self._uuids(snapshot) or ()):
                needed |= {HEALTH}  # the group that finds instances
            if not needed <= self._fields:
                self._fields |= needed
                snapshot = backend.sample(self._fields)
        except BackendError as error:
            if self.trouble is None:
                warnings.warn(f"gpuguard.collector has no numbers of GPUs: {error}", RuntimeWarning, stacklevel=2)
            self.trouble = str(error)
            return None
        self.trouble = None
        return snapshot

    def _uuids(self, snapshot: Snapshot) -> Collection[str] | None:
        if self._devices is not None:
            return self._devices
        return outer_devices(self._environ, snapshot.devices).uuids


def _share(device: Device, members: Collection[int]) -> dict[str, float | None]:
    """Return how much of a device a family of processes uses; a part that is unknown makes the sum unknown."""
    own = [process for process in device.processes or () if process.pid in members]
    memory = [process.memory_used for process in own if process.memory_used is not None]
    utilization = [process.utilization for process in own if process.utilization is not None]
    return {
        "memory_used (MiB)": sum(memory) / _MIB if len(memory) == len(own) else None,
        "utilization (%)": sum(utilization) if own and len(utilization) == len(own) else None,
    }
