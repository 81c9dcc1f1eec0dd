"""What `gpuguard top` shows: a Scene is one sample of the machine, a ScreenView says how it is to be shown.

Reads nothing and draws nothing: see feed and page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuguard.batch.public import PublicJob
from gpuguard.device_state import DeviceUse, grouped
from gpuguard.model import GpuProcess, ProcessIdentity, Snapshot
from gpuguard.policies.view import HostUse
from gpuguard.queue.priority import Ticket
from gpuguard.views.charts import Part

MODES = ("auto", "full", "compact")
SORTS = ("gpu", "pid", "user", "memory", "sm", "cpu", "host", "time", "command")
SLOWDOWN_MARGIN = 10.0  # degrees: a device is worth a look once it is this close to its slowdown temperature


@dataclass(frozen=True)
class Ancestor:
    """A process above one that computes."""

    parent: int
    user: str | None
    command: tuple[str, ...] | None


@dataclass(frozen=True)
class Thresholds:
    """The values from which the site's policies find something; None: they do not judge by it."""

    temperature: float | None = None
    power: float | None = None  # watts
    power_share: float | None = None  # of the limit, 0..1
    memory: float | None = None  # bytes
    memory_share: float | None = None


@dataclass(frozen=True)
class HostMeters:
    """The machine beside its GPUs; None = unknown."""

    cpu: float | None  # percent of all cores, since the previous sample
    memory_used: int  # bytes that are not available to programs
    memory_total: int
    swap_used: int
    swap_total: int
    load: tuple[float, float, float]  # averages over 1, 5 and 15 minutes
    cores: int | None


@dataclass(frozen=True)
class Scene:
    """One sample of the machine."""

    snapshot: Snapshot  # of the machine, with its claims
    uses: tuple[DeviceUse, ...]  # its devices with their claims and processes
    host: Mapping[ProcessIdentity, HostUse] = field(default_factory=dict)  # what processes do beside the GPU
    waiting: tuple[tuple[Ticket, str], ...] = ()  # the queue in its order, with "starts in about 2h"
    jobs: tuple[PublicJob, ...] = ()  # of `gpuguard submit`, those of the viewer first
    # Pid -> a process above one that computes; filled only for the tree.
    ancestors: Mapping[int, Ancestor] = field(default_factory=dict)
    age: float | None = None  # seconds since the daemon looked; None: the driver was asked
    machine: HostMeters | None = None
    thresholds: Thresholds = Thresholds()  # of the site's policies
    viewer: str = ""  # the user who looks: root may signal the processes of others


@dataclass(frozen=True)
class ScreenView:
    """How a scene is shown."""

    mode: str = "auto"  # one of MODES
    sort: str = "gpu"  # one of SORTS
    reverse: bool = False  # the other way round
    users: frozenset[str] = frozenset()  # only their processes and devices; empty: those of all users
    devices: frozenset[str] = frozenset()  # only these uuids; empty: all
    text: str = ""  # words that a process must contain in its user, pid or command; user:NAME and gpu:0 are exact
    compute_only: bool = False  # no desktop processes
    tree: bool = False  # processes below their parents
    ascii_only: bool = False  # no characters beyond ASCII in bars and trees
    past: bool = True  # with sparklines
    selected: ProcessIdentity | None = None  # the process under the cursor


@dataclass(frozen=True)
class ScreenLine:
    """A line of the screen; *process* is the one whose row it is, *keys* say what a click on its columns sorts by."""

    parts: tuple[Part, ...]
    process: ProcessIdentity | None = None
    keys: tuple[tuple[int, int, str], ...] = ()  # first column, column behind the last, one of SORTS

    @property
    def text(self) -> str:
        """The text without colours."""
        return "".join(text for text, _ in self.parts).rstrip()


KEPT = 300  # samples: five minutes at one a second
FORGOTTEN = 600  # a process is forgotten so many samples after its end
METRICS = ("memory", "utilization", "temperature", "power")  # of a device: shares 0..1, degrees, watts


@dataclass(frozen=True)
class Moment:
    """One process in one sample; None = unknown."""

    memory: int | None  # bytes, on all devices together
    sm: float | None  # percent, the mean of its devices, as are the next three
    bandwidth: float | None  # of their memory
    encoder: float | None
    decoder: float | None
    cpu: float | None
    host: int | None


def moment_of(parts: Sequence[GpuProcess], host: HostUse | None) -> Moment:
    """Combine *parts*, one for each device that a process is on."""
    memory = [part.memory_used for part in parts]
    return Moment(
        memory=None if None in memory else sum(size or 0 for size in memory),
        sm=_mean(part.utilization for part in parts),
        bandwidth=_mean(part.memory_utilization for part in parts),
        encoder=_mean(part.encoder_utilization for part in parts),
        decoder=_mean(part.decoder_utilization for part in parts),
        cpu=host.cpu if host else None,
        host=host.memory if host else None,
    )


def _mean(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None


class History:
    """What has been seen since the start: rings of the last KEPT values, per device and per process."""

    def __init__(self) -> None:
        self.devices: dict[str, dict[str, deque[float | None]]] = {}
        self.processes: dict[ProcessIdentity, deque[Moment]] = {}
        self.machine: deque[HostMeters] = deque(maxlen=KEPT)
        self._seen: dict[ProcessIdentity, int] = {}
        self._samples = 0
        self._times: deque[float] = deque(maxlen=KEPT)  # of the machine's clock

    def add(self, scene: Scene) -> None:
        """Remember what *scene* shows."""
        self._samples += 1
        self._times.append(scene.snapshot.taken_at)
        if scene.machine:
            self.machine.append(scene.machine)
        for device in scene.snapshot.devices:
            rings = self.devices.setdefault(device.uuid, {name: deque(maxlen=KEPT) for name in METRICS})
            known = device.memory_used is not None and device.memory_total
            rings["memory"].append((device.memory_used or 0) / (device.memory_total or 1) if known else None)
            rings["utilization"].append(None if device.utilization is None else device.utilization / 100)
            rings["temperature"].append(device.temperature)
            rings["power"].append(device.power_draw)
        for uuid in set(self.devices) - {device.uuid for device in scene.snapshot.devices}:
            del self.devices[uuid]
        running = grouped(
            ((process.pid, process.start_time), process)
            for device in scene.snapshot.devices
            for process in device.processes or ()
            if process.start_time is not None
        )
        for identity, parts in running.items():
            moments = self.processes.setdefault(identity, deque(maxlen=KEPT))
            moments.append(moment_of(parts, scene.host.get(identity)))
            self._seen[identity] = self._samples
        for identity in [key for key, last in self._seen.items() if self._samples - last > FORGOTTEN]:
            del self._seen[identity], self.processes[identity]

    @property
    def seconds_between(self) -> float:
        """The mean time from one sample to the next."""
        passed = self._times[-1] - self._times[0] if self._times else 0.0
        return passed / (len(self._times) - 1) if passed > 0 else 1.0
