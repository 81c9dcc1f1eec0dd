"""Intel GPUs, as the kernel's drivers xe and i915 show them: sysfs, hwmon, the fdinfo of processes, and one ioctl.

No file tells the load or the power, so both follow from counters that are read twice.  A sleeping GPU is not woken:
only what the PCI bus knows is read, and who has it open.  A user who may not look into the processes of others, and to
whom the driver does not tell the memory in use, cannot see who uses a GPU: then it is unknown, never none.  Untried on
hardware: this follows from files that real machines wrote, and from the source of the drivers.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from gpuguard import model
from gpuguard.backends import (
    COUNTED_AS_USED,
    FIRST_LOOK,
    GPU_LOST,
    IS_LOST,
    SILENT,
    UNRESPONSIVE,
    dmem,
    drm,
    intel_memory,
)
from gpuguard.backends.drm import ABSENT, ASLEEP, CardReading, NotTold, number, read
from gpuguard.errors import BackendError
from gpuguard.locale.messages import sentence
from gpuguard.model import BUSY_MEMORY, Device, DeviceAndGaps, Gap, GpuProcess, Snapshot
from gpuguard.procfs import boot_clock
from gpuguard.vendors import INTEL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from gpuguard.backends.drm import Card, Clients, DrmClient
    from gpuguard.backends.intel_memory import MemoryRegion

SCAN_SECONDS = 10.0  # after which all processes are looked into again, and not only those that had a GPU open
# Two readings of a counter give a rate if they lie so far apart (seconds).  Over less time its steps are too coarse;
# over more the rate says nothing of now, and xe counts energy in 32 bits, which are enough for 4 minutes at 1000 W.
SHORTEST, LONGEST = 0.2, 120.0

# Keys of fdinfo.  The regions are vram0 or local0 of each tile, and for the memory of the host system, system0 or gtt.
_MEMORY = {False: re.compile(r"drm-(total|resident)-(?:vram|local)\d+"),
           True: re.compile(r"drm-(total|resident)-(?:system|gtt)\d*")}  # fmt: skip  # by whether it is integrated
_BUSY = re.compile(r"drm-(?:cycles|engine)-(?!capacity-)(.+)")
# How the work of an engine counts; classes as xe and as i915 name them.  The render engine serves both: such programs
# are judged by their memory, as are those whose work is not told.
_KINDS = {"ccs": "compute", "compute": "compute", "rcs": "compute+graphics", "render": "compute+graphics"}

# What nvidia-smi calls the reasons for which the drivers hold a clock down; others keep the names that these give them.
_THROTTLERS = {
    **dict.fromkeys(("pl1", "pl2", "pl4"), "sw_power_cap"),
    "thermal": "sw_thermal_slowdown",
    "prochot": "hw_thermal_slowdown",
}

_WENT_BACK = sentence("intel.went_back", "its counter went back")
_STANDS = sentence("intel.counter_stands", "its counter stands at 0")
_NO_COUNTERS = sentence("intel.no_counters", "the driver does not count the work of its processes")
_HIDDEN = sentence("drm.hidden", "the processes of other users cannot be seen")
_SIZE_ASLEEP = sentence("intel.size_asleep", "its size is not told while it sleeps; any use wakes it")
_SUMMED = sentence("intel.summed", "the driver does not tell it: the sum of what its processes hold")
_RPM = sentence("intel.rpm", "the driver tells how fast the fans turn, and not how fast they can")
_NO_LIMIT = sentence("intel.no_limit", "no limit is set")
_WEDGED = sentence("problem.wedged", "given up by its driver until it is reset")


def open(spec: str = "", clock: Callable[[], float] = boot_clock) -> Intel:
    """Open the GPUs of this machine, or those of the tree of files *spec*.  Raises BackendError if there are none."""
    return Intel(os.path.abspath(spec) if spec else "", clock)


class Intel:
    """A Backend."""

    name = "intel"

    def __init__(self, root: str, clock: Callable[[], float]) -> None:
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self.ahead = False
        self.simulated = bool(root)
        self._root, self._clock = root, clock
        self._scanner, self._scanned = drm.ClientScanner(root), float("-inf")
        self._lists = drm.ProcessLists()
        self._gpus = _found(root)
        self._names: frozenset[str] = frozenset()  # of the cards and nodes when they were found
        self._cards: Mapping[str, Card] = {}

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does."""
        taken_at, clock = time.time(), self._clock()
        look = _Look(
            self._root, fields, clock, self._lists, lambda: self._clients(clock, everywhere=devices is not None)
        )
        present = self._present()
        found = [
            self._read(index, gpu, present.get(gpu.card.address), look)
            for index, gpu in enumerate(self._gpus)
            if devices is None or gpu.card.uuid in devices
        ]
        topology, unconnected = None, list[Gap]()
        if model.TOPOLOGY in fields:
            shown = [gpu.card for index, gpu in enumerate(self._gpus) if index not in self.skip]
            wanted = {card.uuid: card for card in shown if devices is None or card.uuid in devices}
            topology, unconnected = drm.connections(wanted)
        version = None if self.simulated else INTEL.kernel_version()
        return drm.snapshot_of(self, (taken_at, clock), found, unconnected, topology=topology, driver_version=version)

    def close(self) -> None:
        """Nothing stays open between two samples."""

    def _present(self) -> Mapping[str, Card]:
        """Return the cards that there are, by address: found anew if one has come, gone, or got another driver."""
        names = frozenset(drm.entries(f"{self._root}/sys/class/drm"))
        if names != self._names or any(drm.driver_of(card.folder) != card.driver for card in self._cards.values()):
            self._names, self._cards = names, {card.address: card for card in drm.cards(self._root, INTEL)}
        return self._cards

    def _clients(self, clock: float, *, everywhere: bool) -> Clients:
        """Look for the processes that use GPUs: everywhere for a caller that is about to act, and from time to time."""
        if everywhere or clock - self._scanned >= SCAN_SECONDS:
            everywhere, self._scanned = True, clock
        return self._scanner.read(everywhere=everywhere)

    def _read(self, index: int, gpu: _Gpu, card: Card | None, look: _Look) -> DeviceAndGaps:
        """Return a GPU as it is read, and its gaps."""
        uuid, ordinal = gpu.card.uuid, None if gpu.ordinal == index else gpu.ordinal
        device = partial(Device, index, uuid, vendor=INTEL.name, ordinal=ordinal)
        if index in self.skip:
            return device(problems=(UNRESPONSIVE,)), [Gap(uuid, "device", SILENT)]
        self.progress(index)
        if card is None:
            return device(name=gpu.name, problems=(IS_LOST,)), [Gap(uuid, "device", GPU_LOST)]
        if card != gpu.card:  # its driver was loaded again
            gpu = self._gpus[index] = replace(gpu, card=card, name=None, counters=Counters())
        gpu.sensors.check()
        gpu.counters.forget(look.clock)
        view = _View(gpu, CardReading(uuid, look.fields, gpu.card.asleep), look)
        for group, reader in _READERS.items():
            if group in look.fields:
                reader(view)
        drm.read_rows(view.reading, _ROWS, view)
        view.reading.close()
        if model.HEALTH in look.fields or view.reading.problems:
            view.reading.values["problems"] = tuple(view.reading.problems)
        return device(**view.reading.values), view.reading.gaps


def _found(root: str) -> list[_Gpu]:
    """Return the GPUs to show: the discrete ones, or if there are none, the one that is part of the CPU."""
    gpus = [_Gpu(card, ordinal, _is_integrated(root, card)) for ordinal, card in enumerate(drm.cards(root, INTEL))]
    if gpus:
        return [gpu for gpu in gpus if not gpu.integrated] or gpus
    raise BackendError(
        sentence(
            "intel.none",
            "no Intel GPU was found: {folder} has no card of the drivers xe and i915.\n"
            "See `lspci -k` for the driver of the GPU, and in a container whether it has the host's /sys.  "
            "`--backend simulated` tries gpuguard without a GPU.",
            folder=f"{root}/sys/class/drm",
        )
    )


def _is_integrated(root: str, card: Card) -> bool:
    """Return whether a GPU is part of the CPU: it lies on the CPU's own bus, and no memory of its own is known.

    In a virtual machine a discrete one may lie there.
    """
    if not card.address.startswith("0000:00:"):
        return False
    try:
        return card.asleep or not any(region.of_gpu for region in intel_memory.regions(root, card))
    except (OSError, NotTold):
        return True


class _Count(NamedTuple):
    """A counter as it was last read."""

    at: float  # seconds
    amount: float
    whole: float  # what its growth is a part of: seconds, nanoseconds, cycles
    growth: float | None


class Counters:
    """The counters of a GPU, and how they have grown since they were last read."""

    def __init__(self) -> None:
        self._last: dict[object, _Count] = {}

    def growth(self, key: object, at: float, amount: float, whole: float) -> float:
        """Return by how much a counter has grown while *whole* grew by one.  Raises NotTold.

        A reading that follows too closely gives the same answer as the one before.
        """
        before = self._last.get(key)
        if before and at - before.at < SHORTEST and amount >= before.amount:
            growth = before.growth
        else:
            comparable = before and at - before.at <= LONGEST and whole > before.whole and amount >= before.amount
            growth = (amount - before.amount) / (whole - before.whole) if before and comparable else None
            self._last[key] = _Count(at, amount, whole, growth)
        if growth is None:
            raise NotTold(_WENT_BACK if before and amount < before.amount else FIRST_LOOK)
        return growth

    def forget(self, at: float) -> None:
        """Forget what is too old to compare with, such as the counters of processes that have ended."""
        self._last = {key: last for key, last in self._last.items() if at - last.at <= LONGEST}


@dataclass
class _Gpu:
    """A GPU, and what is kept of it between two samples."""

    card: Card
    ordinal: int  # among all Intel GPUs, the integrated one included: Level Zero counts it
    integrated: bool
    name: str | None = None
    memory_total: int | None = None  # bytes, once they are known
    counters: Counters = field(default_factory=Counters)

    @cached_property
    def sensors(self) -> drm.Sensors:
        """Its sensors."""
        return drm.Sensors(self.card)


@dataclass
class _Look:
    """One sample of all GPUs."""

    root: str
    fields: Collection[str]
    clock: float
    lists: drm.ProcessLists
    find_clients: Callable[[], Clients]

    @cached_property
    def clients(self) -> Clients:
        """The processes that have GPUs open, which are looked for only where a field needs them."""
        return self.find_clients()

    @cached_property
    def held(self) -> Mapping[str, Mapping[str, int]]:
        """Who holds how many bytes of each GPU, where the kernel counts that: its address -> name -> bytes."""
        return dmem.held(self.root)


@dataclass
class _View:
    """One sample of one GPU."""

    gpu: _Gpu
    reading: CardReading
    look: _Look

    @cached_property
    def clients(self) -> list[DrmClient]:
        """The open files of this GPU, as far as they can be seen."""
        return [client for client in self.look.clients.found if client.address == self.gpu.card.address]

    @cached_property
    def undescribed(self) -> list[int]:
        """The pids of the processes that have it open and of which nothing else is known, as while it sleeps."""
        return [pid for pid, address in self.look.clients.undescribed if address == self.gpu.card.address]

    @cached_property
    def regions(self) -> list[MemoryRegion] | str:
        """The regions of its memory, or why they are unknown."""
        try:
            return intel_memory.regions(self.look.root, self.gpu.card)
        except NotTold as gap:
            return gap.reason
        except OSError as error:
            if error.errno == errno.ECANCELED:  # the answer of xe to each call once it is wedged
                self.reading.problems.append(_WEDGED)
            return drm.refused(error).reason

    @cached_property
    def shares(self) -> dict[tuple[int, str], float]:
        """The percent of each class of engines that each process, by its pid, has used since the last look."""
        shares: dict[tuple[int, str], float] = defaultdict(float)
        for client in self.clients:
            for engine, key in _engines(tuple(client.values)):
                # xe tells how many cycles went by until it was read; i915 counts nanoseconds.
                cycles = client.values.get(f"drm-total-cycles-{engine}", 0)
                whole = cycles if key.startswith("drm-cycles") else self.look.clock * 1e9
                engines = client.values.get(f"drm-engine-capacity-{engine}", 1) or 1
                counter = client.number, engine
                with suppress(NotTold):
                    share = self.gpu.counters.growth(counter, self.look.clock, client.values[key], whole)
                    shares[client.pid, engine] += 100 * share / engines
        return shares

    def sensor(self, kind: str, suffixes: Iterable[str], zero: str = _STANDS) -> tuple[str, int]:
        """Read the first value of a sensor of this *kind*, and return its file, too; *zero* says what 0 means.

        The sensor of the card is preferred to that of the chip, and may be missing or stand at 0.  i915 has no labels,
        and one sensor of each kind.
        """
        reason: str = ABSENT
        for path in self._sensors(kind, suffixes):
            if value := number(read(path)):
                return path, value
            reason = zero
        raise NotTold(reason)

    def _sensors(self, kind: str, suffixes: Iterable[str]) -> Iterator[str]:
        for suffix, label in product(suffixes, ("card", "pkg", "")):
            with suppress(NotTold):
                yield self.gpu.sensors.path(kind, label, suffix=suffix)


# Groups of fields


def _read_model(view: _View) -> None:
    drm.read_place(view.reading, view.gpu.card)
    view.gpu.name = view.gpu.name or drm.product_name(view.look.root, view.gpu.card, INTEL)
    view.reading.values["name"] = view.gpu.name
    view.reading.values["integrated"] = view.gpu.integrated


def _read_memory(view: _View) -> None:
    """Read memory_*: of the host if the GPU is part of the CPU."""
    reading = view.reading
    reading.values["memory_shared_with_host"] = view.gpu.integrated
    reading.set("memory_total", lambda: _memory_total(view))
    reading.set("memory_used", lambda: _memory_used(view))
    reading.set("memory_free", lambda: _memory_free(view))
    reading.gap("memory_reserved", COUNTED_AS_USED)


def _memory_total(view: _View) -> int:
    if view.gpu.integrated:
        return drm.host_memory(view.look.root, "MemTotal")
    reason: str = _SIZE_ASLEEP
    if not view.reading.asleep:
        reason = view.regions if isinstance(view.regions, str) else ABSENT
        if not isinstance(view.regions, str):
            view.gpu.memory_total = sum(region.total for region in view.regions if region.of_gpu)
    if not view.gpu.memory_total:
        try:
            view.gpu.memory_total = dmem.amount("capacity", view.look.root, view.gpu.card.address)
        except NotTold:
            raise NotTold(reason) from None
    return view.gpu.memory_total


def _memory_used(view: _View) -> int:
    """Return the memory in use that the driver tells, or else what the processes hold, if all can be seen."""
    if not (view.gpu.integrated or view.reading.asleep or isinstance(view.regions, str)):
        told = sum(region.used for region in view.regions if region.of_gpu)
        if told:  # 0 is the answer to users whom it does not tell
            return told
    if not view.gpu.integrated:
        with suppress(NotTold):
            return dmem.amount("current", view.look.root, view.gpu.card.address)
    if view.reading.asleep and not (view.clients or view.undescribed):
        # The kernel keeps a GPU awake for each address space of a process: it holds a reference (xe_vm_create()).
        return 0
    if view.look.clients.hidden:
        raise NotTold(_HIDDEN)
    held = [_memory_of(client, integrated=view.gpu.integrated) for client in view.clients]
    if view.undescribed or None in held:
        raise NotTold(ASLEEP if view.reading.asleep else ABSENT)
    if not view.reading.asleep:
        view.reading.gap("memory_used", _SUMMED)
    return sum(filter(None, held))


def _memory_free(view: _View) -> int:
    total, used = (view.reading.values.get(f"memory_{name}") for name in ("total", "used"))
    if not isinstance(total, int) or not isinstance(used, int):
        unknown = "memory_used" if isinstance(total, int) else "memory_total"
        raise NotTold(next(gap.reason for gap in view.reading.gaps if gap.field == unknown))
    free = max(0, total - used)  # processes that share memory are each counted with it
    return min(free, drm.host_memory(view.look.root, "MemAvailable")) if view.gpu.integrated else free


def _memory_of(client: DrmClient, *, integrated: bool) -> int | None:
    """Return the bytes that a client holds: in the memory of the GPU, or for an integrated one in that of the host.

    What is resident counts, because the rest of its total may have been moved out.
    """
    keys = _memory_keys(tuple(client.values), integrated=integrated)
    return sum(client.values[key] for key in keys) if keys else None


def _read_processes(view: _View) -> None:
    if view.look.clients.hidden:
        view.reading.gap("processes", dmem.with_holders(_HIDDEN, view.look.held.get(view.gpu.card.address, {})))
        return
    shares: dict[int, list[float]] = defaultdict(list)
    for (pid, _), share in view.shares.items():
        shares[pid].append(share)
    rows = [row for client in view.clients if (row := _row(client, integrated=view.gpu.integrated))]
    rows += [GpuProcess(pid, None, "compute+graphics") for pid in view.undescribed]
    merged = drm.merged_rows(sorted(rows, key=lambda row: row.pid))
    if model.PROCESS_DETAILS in view.reading.fields:
        merged = [
            replace(row, utilization=min(100.0, max(shares[row.pid]))) if shares[row.pid] else row for row in merged
        ]
    view.look.lists.read(view.reading, merged)


@lru_cache(64)  # all clients of a driver have the same keys
def _memory_keys(keys: tuple[str, ...], *, integrated: bool) -> tuple[str, ...]:
    """Return the keys of the regions whose memory counts: of what is resident, or else of the total."""
    found = [(match[1], match[0]) for key in keys if (match := _MEMORY[integrated].fullmatch(key))]
    kind = "resident" if any(kind == "resident" for kind, _ in found) else "total"
    return tuple(key for told, key in found if told == kind)


@lru_cache(64)
def _engines(keys: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the classes of engines whose work is counted, each with its key."""
    return tuple((match[1], key) for key in keys if (match := _BUSY.fullmatch(key)))


def _row(client: DrmClient, *, integrated: bool) -> GpuProcess | None:
    """Return the process of a client, or None if it holds no memory and has never used an engine, as a monitor does."""
    worked = [engine for engine, key in _engines(tuple(client.values)) if client.values[key]]
    memory = _memory_of(client, integrated=integrated)
    if not worked and memory == 0:
        return None
    kinds = {_KINDS.get(engine, "graphics") for engine in worked} or {"compute+graphics"}
    return GpuProcess(client.pid, memory, min(kinds))  # "compute" comes before "compute+graphics" and "graphics"


def _read_idle_processes(view: _View) -> None:
    used = view.reading.values.get("memory_used")
    if model.PROCESSES not in view.reading.fields and not (isinstance(used, int) and used >= BUSY_MEMORY):
        _read_processes(view)


def _utilization(view: _View) -> float:
    """Return the load of the busiest class of engines; if not all processes can be seen, of all engines together."""
    if not view.look.clients.hidden and any(_engines(tuple(client.values)) for client in view.clients):
        load: dict[str, float] = defaultdict(float)
        for (_, engine), share in view.shares.items():
            load[engine] += share
        if not load:
            raise NotTold(FIRST_LOOK)
        return min(100.0, max(load.values()))
    return min(100.0, max(0.0, 100.0 * (1 - _idle(view))))


def _idle(view: _View) -> float:
    """Return the part of the time in which the engines for computing slept: of the tile that slept least."""
    shares: list[float] = []
    untold = None
    for path in _residencies(view.gpu.card):
        try:  # all are read before one that is not told ends it: the next look needs each of them
            milliseconds, at = number(read(path)), view.look.clock
            shares.append(view.gpu.counters.growth(path, at, milliseconds, at * 1000))
        except NotTold as gap:
            untold = gap
    if untold or not shares:
        raise untold or NotTold(_NO_COUNTERS)
    return min(shares)


def _residencies(card: Card) -> list[str]:
    """Return the files that count the milliseconds in which the engines for computing slept, one for each tile."""
    if card.driver == "i915":
        return [f"{card.folder}/gt/gt0/rc6_residency_ms"]
    return [f"{gt}/gtidle/idle_residency_ms" for gt in _gts(card) if not _is_media(gt)]


def _gts(card: Card) -> list[str]:
    """Return the folders of the groups of engines (GT) of a GPU with the driver xe; each tile has one or two."""
    tiles = [f"{card.device}/{name}" for name in drm.listed(card.device) if re.fullmatch(r"tile\d+", name)]
    return [f"{tile}/{name}" for tile in tiles for name in drm.listed(tile) if re.fullmatch(r"gt\d+", name)]


def _is_media(gt: str) -> bool:
    return drm.read_or(f"{gt}/gtidle/name").endswith("-mc")


def _read_health(view: _View) -> None:
    view.reading.values["asleep"] = view.reading.asleep
    view.reading.values["mig_mode"] = False  # no Intel GPU is divided
    if not view.reading.asleep:
        view.regions  # noqa: B018  it tells whether the driver has given up the GPU


def _fan_speed(view: _View) -> float:
    try:
        return view.gpu.sensors.fan_speed()
    except NotTold:
        view.gpu.sensors.value("fan")  # which says so where there is no fan
        raise NotTold(_RPM) from None


def _celsius(view: _View, suffix: str) -> float:
    return view.sensor("temp", (suffix,))[1] / 1000


def _power(view: _View) -> float:
    path, microjoules = view.sensor("energy", ("input",))
    return view.gpu.counters.growth(path, view.look.clock, microjoules, view.look.clock) / 1e6


def _clock(view: _View, which: str, *, media: bool = False) -> int:
    """Return a clock in MHz: the highest of all tiles."""
    card = view.gpu.card
    if card.driver == "xe":
        paths = [f"{gt}/freq0/{which}_freq" for gt in _gts(card) if _is_media(gt) == media]
    else:
        paths = [] if media else [f"{card.folder}/gt_{which.replace('rp', 'RP')}_freq_mhz"]
    if not paths:
        raise NotTold(ABSENT)
    return max(number(read(path)) for path in paths)


def _throttle_reasons(card: Card) -> tuple[str, ...]:
    if card.driver == "xe":
        places = [(f"{gt}/freq0/throttle", "reason_") for gt in _gts(card)]
    else:
        places = [(f"{card.folder}/gt/gt0", "throttle_reason_")]
    files = [
        (f"{folder}/{name}", name[len(start) :])
        for folder, start in places
        for name in drm.listed(folder)
        if name.startswith(start)
    ]
    if not files:
        raise NotTold(ABSENT)
    active = [reason for path, reason in files if number(read(path)) and reason != "status"]
    reasons = [_THROTTLERS.get(reason, reason) for reason in active]
    return tuple(dict.fromkeys(reasons))


def _read_pcie(view: _View) -> None:
    drm.read_link(view.reading, _upstream(view.gpu.card), wakes=True)


def _upstream(card: Card) -> str:
    """Return the folder of the PCI device at which the card's link to the machine ends.

    A discrete GPU lies behind a switch on its card, and its own link, to that switch, always says 2.5 GT/s and 1 lane.
    """
    device = os.path.realpath(card.device)
    port = os.path.dirname(os.path.dirname(device))
    return port if drm.read_or(f"{port}/vendor") == "0x8086" else device


_READERS: Mapping[str, Callable[[_View], None]] = {
    model.MEMORY: _read_memory,  # the first: the list of processes is compared with it
    model.PROCESSES: _read_processes,
    model.IDLE_PROCESSES: _read_idle_processes,
    model.HEALTH: _read_health,
    model.MODEL: _read_model,
    model.PCIE: _read_pcie,
}

# The fields of a group that are gaps while the GPU sleeps, and how each of them is read.
_ROWS: Mapping[str, Mapping[str, Callable[[_View], object]]] = {
    model.UTILIZATION: {"utilization": _utilization},
    model.THERMAL: {
        "temperature": lambda view: _celsius(view, "input"),
        "temperature_slowdown": lambda view: _celsius(view, "crit"),
        "temperature_shutdown": lambda view: _celsius(view, "emergency"),
        "fan_speed": _fan_speed,
    },
    model.POWER: {
        "total_energy": lambda view: view.sensor("energy", ("input",))[1] / 1e6,
        "power_draw": _power,
        # The limit for a longer time, which is the lower one, or else that for a moment; 0 switches a limit off.
        "power_limit": lambda view: view.sensor("power", ("max", "cap"), zero=_NO_LIMIT)[1] / 1e6,
    },
    model.CLOCKS: {
        "clock_sm": lambda view: _clock(view, "act"),
        "clock_sm_max": lambda view: _clock(view, "rp0"),
        "throttle_reasons": lambda view: _throttle_reasons(view.gpu.card),
    },
    model.MEDIA: {
        "clock_graphics": lambda view: _clock(view, "act"),
        "clock_video": lambda view: _clock(view, "act", media=True),
    },
}
