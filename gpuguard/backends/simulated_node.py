"""The simulated node: what it consists of, and what it looks like at a given clock.

Everything is a function of the state and the clock, so a temperature can climb and energy can add up although no
process of ours runs.  Memory and utilization follow the processes; temperature and power follow the utilization.

The state is in one file, which several terminals share.  Readers need no lock, because the file is only ever replaced
as a whole; writers take turns by an flock on a file beside it (not on the state itself: a lock on a file that gets
replaced guards nothing).  If the node is shared, only root changes that file, and the uses of each user's processes are
in files of that user beside it.  The format is private to this module, which does not look at processes: see simulated.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.files import open_regular, read_file, write_file
from gpuguard.jsonio import decode, loads
from gpuguard.locale import _
from gpuguard.locale.messages import sentence
from gpuguard.vendors import AMD, DRM_MAJOR, NVIDIA, VENDORS, Vendor, vendor_of_model

MiB = 2**20
DEVICES_AT_MOST = 64
LANES_BYTES = {3: 985e6, 4: 1969e6, 5: 3938e6}  # per second of one lane, by PCIe generation


@dataclass(frozen=True)
class Model:
    """The values that all devices of one model have in common."""

    name: str
    memory_total: int  # bytes
    power_limit: float  # watts
    idle_power: float
    clock_sm_max: int  # MHz
    clock_memory_max: int
    pcie_generation: int
    temperature_slowdown: float = 90.0
    temperature_shutdown: float = 95.0
    nvlinks: int = 0  # links per device, of XGMI on AMD's; 0: pairs are connected by PCIe alone
    mig: bool = False
    dies: int = 0  # into so many partitions at most it can be divided (AMD)
    serial: bool = True  # it tells a number of its own, of which its uuid is made; otherwise that names its PCI address
    ecc: bool = True
    fan: bool = False
    integrated: bool = False  # it is part of the CPU, and its memory is the host's

    @property
    def vendor(self) -> Vendor:
        """The vendor, which its name begins with."""
        return VENDORS[vendor_of_model(self.name)]


SpecPart = tuple[Model, tuple[str, ...]]  # one device of a spec: its model, and the profiles by which it is divided


def _model(name: str, mebibytes: int, watts: int, idle: int, sm: int, memory: int, pcie: int, **more: float) -> Model:
    return Model(name, mebibytes * MiB, watts, idle, sm, memory, pcie, **more)  # type: ignore[arg-type]


_GAMING = {"ecc": False, "fan": True}
_INTEL = {"serial": False, "ecc": False, "fan": True}

# (model, GiB on the box) -> what its vendor's tool shows on such a device.  A name alone means its first row.
MODELS = {
    ("T4", 16): _model("NVIDIA Tesla T4", 15360, 70, 10, 1590, 5001, 3),
    ("V100", 16): _model("NVIDIA Tesla V100-SXM2-16GB", 16384, 300, 42, 1530, 877, 3, nvlinks=6),
    ("V100", 32): _model("NVIDIA Tesla V100-SXM2-32GB", 32768, 300, 42, 1530, 877, 3, nvlinks=6),
    ("A10", 24): _model("NVIDIA A10", 23028, 150, 17, 1695, 6251, 4),
    ("A100", 40): _model("NVIDIA A100-SXM4-40GB", 40960, 400, 52, 1410, 1215, 4, nvlinks=12, mig=True),
    ("A100", 80): _model("NVIDIA A100-SXM4-80GB", 81920, 400, 60, 1410, 1593, 4, nvlinks=12, mig=True),
    ("A6000", 48): _model("NVIDIA RTX A6000", 49140, 300, 22, 2100, 8001, 4, fan=True),
    ("L4", 24): _model("NVIDIA L4", 23034, 72, 13, 2040, 6251, 4),
    ("L40S", 48): _model("NVIDIA L40S", 46068, 350, 33, 2520, 9001, 4),
    ("H100", 80): _model("NVIDIA H100 80GB HBM3", 81559, 700, 70, 1980, 2619, 5, nvlinks=18, mig=True),
    ("H200", 141): _model("NVIDIA H200", 143771, 700, 76, 1980, 3201, 5, nvlinks=18, mig=True),
    ("B200", 180): _model("NVIDIA B200", 183359, 1000, 140, 1965, 3996, 5, nvlinks=18, mig=True),
    ("GB10", 128): _model("NVIDIA GB10", 122570, 140, 5, 3003, 8533, 5, ecc=False, integrated=True),
    ("RTX3090", 24): _model("NVIDIA GeForce RTX 3090", 24576, 350, 25, 2100, 9751, 4, **_GAMING),
    ("RTX4090", 24): _model("NVIDIA GeForce RTX 4090", 24564, 450, 18, 3105, 10501, 4, **_GAMING),
    ("RTX5090", 32): _model("NVIDIA GeForce RTX 5090", 32607, 575, 20, 3090, 14001, 5, **_GAMING),
    ("MI100", 32): _model("AMD Instinct MI100", 32752, 290, 38, 1502, 1200, 4, nvlinks=3),
    ("MI210", 64): _model("AMD Instinct MI210", 65520, 300, 40, 1700, 1600, 4, nvlinks=3),
    ("MI300X", 192): _model("AMD Instinct MI300X", 196592, 750, 140, 2100, 1300, 5, nvlinks=7, dies=8),
    ("MI325X", 256): _model("AMD Instinct MI325X", 262128, 1000, 140, 2100, 1500, 5, nvlinks=7, dies=8),
    ("MI355X", 288): _model("AMD Instinct MI355X", 294896, 1400, 250, 2400, 2000, 5, nvlinks=7, dies=8),
    ("RX7900XTX", 24): _model("AMD Radeon RX 7900 XTX", 24560, 303, 12, 2526, 1249, 4, **_GAMING),
    ("RX6600", 8): _model("AMD Radeon RX 6600", 8176, 100, 4, 2750, 875, 4, serial=False, **_GAMING),
    # Linux lends it half of the host's memory, unless ttm.pages_limit says otherwise.
    ("StrixHalo", 128): _model(
        "AMD Radeon 8060S", 65536, 120, 10, 2900, 1000, 4, serial=False, integrated=True, ecc=False
    ),
    ("Max1550", 128): _model("Intel Data Center GPU Max 1550", 131072, 600, 120, 1600, 1600, 5, serial=False),
    ("Arc-A770", 16): _model("Intel Arc A770", 16225, 225, 40, 2400, 2187, 4, **_INTEL),
    ("Arc-B580", 12): _model("Intel Arc B580", 12216, 190, 15, 2850, 2375, 4, **_INTEL),
    ("Arc-B60", 24): _model("Intel Arc Pro B60", 24480, 200, 15, 2400, 2375, 5, **_INTEL),
    ("S4000", 48): _model("Moore Threads MTT S4000", 49152, 450, 60, 1750, 8000, 5),
}

_PART = re.compile(
    r"(?:(\d{1,4})x)?([A-Za-z][A-Za-z0-9_-]{0,39}?)(?:-(\d{1,5})GB)?(?::(?:mig=([0-9a-z.,]+)|partition=([a-z]+)))?"
)
# AMD's compute partition modes, and into how many partitions they divide a GPU; "cpx" makes one of each of its dies.
_MODES = {"spx": 1, "dpx": 2, "tpx": 3, "qpx": 4}
_PROFILE = re.compile(r"([1-7])g\.(\d{1,3})gb")


def parse_spec(spec: str) -> tuple[SpecPart, ...]:
    """Return the devices of *spec*, in index order: "8xH100-80GB", "2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb".

    AMD's are divided by a mode instead of profiles: "8xMI300X:partition=cpx".
    A model that is not in MODELS needs a memory: "4xFoo-24GB".  As on the box it comes in, GB means GiB here.
    Raises InvalidRequest, which says what can be written.
    """
    parts = [part for group in spec.strip().split("+") for part in _group(group.strip(), spec)]
    if len(parts) > DEVICES_AT_MOST:
        raise InvalidRequest(
            _("{spec!r} has {parts} GPUs: at most {most} fit in a node.").format(
                spec=spec, parts=len(parts), most=DEVICES_AT_MOST
            )
        )
    return tuple(parts)


def instance_memory(profile: str) -> int:
    """Return the bytes of a MIG instance with that profile; real ones have a little less than their name says."""
    return int(profile.partition(".")[2].removesuffix("gb")) * 1008 * MiB


def _group(group: str, spec: str) -> list[SpecPart]:
    match = _PART.fullmatch(group)
    if not match:
        raise InvalidRequest(
            _(
                "{spec!r} is no node: {group!r} is not COUNTxMODEL-MEMORY.  Write it like '8xH100-80GB', "
                "'4xRTX4090', '2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb' or '8xMI300X:partition=cpx'."
            ).format(spec=spec, group=group)
        )
    count, name, gibibytes, profiles, mode = match.groups()
    if not 0 < int(count or 1) <= DEVICES_AT_MOST:
        raise InvalidRequest(
            _("{group!r} has {count} GPUs: a node has 1 to {most}.").format(
                group=group, count=int(count), most=DEVICES_AT_MOST
            )
        )
    model = _find_model(name, None if gibibytes is None else int(gibibytes))
    divided = tuple(profiles.split(",")) if profiles else ()
    _check_profiles(model, divided, group)
    divided = _partitions(model, mode, group) if mode else divided
    return [(model, divided)] * int(count or 1)


def _find_model(name: str, gibibytes: int | None) -> Model:
    known = {key: model for key, model in MODELS.items() if key[0].lower() == name.lower()}
    for (_name, memory), model in known.items():
        if gibibytes in (memory, None):
            return model
    if known:
        sizes = " or ".join(f"{key[0]}-{key[1]}GB" for key in known)
        raise InvalidRequest(
            _("there is no {name} with {gibibytes} GB: write {sizes}, or give it a name of your own.").format(
                name=name, gibibytes=gibibytes, sizes=sizes
            )
        )
    if not gibibytes:
        names = sorted({key[0] for key in MODELS})
        near = difflib.get_close_matches(name.upper(), names, n=1)
        hint = (
            _("did you mean {near}?").format(near=near[0])
            if near
            else _("known are {names}.").format(names=", ".join(names))
        )
        raise InvalidRequest(
            _("the model {name!r} is not known: {hint}  Any name will do with a memory: '{name}-24GB'.").format(
                name=name, hint=hint
            )
        )
    return Model(f"NVIDIA {name}", gibibytes * 1024 * MiB, 300, 25, 2000, 8000, 4, fan=True)


def _check_profiles(model: Model, profiles: tuple[str, ...], group: str) -> None:
    if profiles and not model.mig:
        raise InvalidRequest(
            _("{group!r}: {name} cannot be divided; A100, H100, H200 and B200 can.").format(
                group=group, name=model.name
            )
        )
    slices = 0
    for profile in profiles:
        match = _PROFILE.fullmatch(profile)
        if not match or not int(match[2]):
            raise InvalidRequest(
                _("{group!r}: {profile!r} is no MIG profile; write them like 'mig=3g.20gb,3g.20gb'.").format(
                    group=group, profile=profile
                )
            )
        slices += int(match[1])
    memory = sum(instance_memory(profile) for profile in profiles)
    if slices > 7 or memory > model.memory_total:
        raise InvalidRequest(
            _(
                "{group!r}: a GPU has 7 slices and {memory_total:.0f} GiB; these profiles need {slices} slices "
                "and {memory:.0f} GiB."
            ).format(group=group, memory_total=model.memory_total / 2**30, slices=slices, memory=memory / 2**30)
        )


def _partitions(model: Model, mode: str, group: str) -> tuple[str, ...]:
    """Return *mode* once for each partition into which it divides *model*, or () if it leaves it whole."""
    counts = {name: count for name, count in {**_MODES, "cpx": model.dies}.items() if count and model.dies % count == 0}
    if not model.dies or mode not in counts:
        able = ", ".join(name for (name, _), other in MODELS.items() if other.dies)
        raise InvalidRequest(
            _("{group!r}: {name} has no partition mode {mode!r}; {able} have {modes}.").format(
                group=group, name=model.name, mode=mode, able=able, modes="spx, dpx, qpx, cpx"
            )
        )
    return (mode,) * counts[mode] if counts[mode] > 1 else ()


KINDS = ("compute", "graphics", "compute+graphics", "mps")  # of processes
IDLE_MEMORY = 2**20  # bytes: a driver shows 1 MiB on an unused device
RESERVED_SHARE = 0.0068  # of the memory: 551 MiB of the 81559 MiB of an H100
IDLE_TEMPERATURE = 31.0
BUSY_WARMING = 40.0  # degrees on top of that at 100 %
BUSY_POWER_SHARE = 0.95  # of the power limit, at 100 %


@dataclass(frozen=True)
class WorkPattern:
    """A number that moves from *start* to *end* in a straight line; *since* and *over* are seconds of the clock."""

    start: float
    end: float
    since: float = 0.0
    over: float = 0.0

    def at(self, clock: float) -> float:
        """Return the number at *clock*."""
        if clock >= self.since + self.over:
            return self.end
        if clock <= self.since:  # a reader's clock may be older than the state that it reads
            return self.start
        return self.start + (self.end - self.start) * (clock - self.since) / self.over


@dataclass(frozen=True)
class Instance:
    """A MIG instance, or a partition of an AMD GPU."""

    uuid: str
    profile: str
    memory_total: int
    gpu_instance_id: int


@dataclass(frozen=True)
class NodeDevice:
    """A device of the node.  Courses that `sim set` did not set are None: they follow from the processes."""

    index: int
    uuid: str
    model: Model
    instances: tuple[Instance, ...] = ()
    faults: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # fields of model.Device that the driver does not tell
    given: tuple[tuple[str, float], ...] = ()  # fields that have the values of `sim set --field`
    latency: float = 0.0  # seconds that reading it takes
    compute_mode: str = "default"
    asleep: bool = False  # the driver has switched it off until it is used
    temperature: WorkPattern | None = None
    utilization: WorkPattern | None = None
    memory: WorkPattern | None = None  # bytes that no process accounts for
    energy: float = 0.0  # joules at the clock energy_since
    energy_since: float = 0.0


@dataclass(frozen=True)
class Use:
    """A real process that uses a device of the node."""

    device: str  # uuid
    pid: int
    start_time: float  # seconds since boot
    memory: WorkPattern
    utilization: float
    kind: str = "compute"
    until: float | None = None  # clock, or None if it lasts as long as the process
    uid: int | None = None  # owner of the shared node's file that says so, or None if the node's own file does
    file: str = ""  # the name of that file


@dataclass(frozen=True)
class ScheduledRelease:
    """Memory that stays visible for a while after its process has died."""

    device: str
    memory: float
    until: float  # clock


@dataclass(frozen=True)
class SimulatedNode:
    """The whole state of the node."""

    spec: str
    devices: tuple[NodeDevice, ...]
    uses: tuple[Use, ...] = ()
    releases: tuple[ScheduledRelease, ...] = ()
    release_delay: float = 0.0  # seconds
    shared: bool = False  # whether all users see and use it; root steers it

    def of(self, device: NodeDevice) -> set[str]:
        """Return the uuids under which *device* is used: its own and those of its instances."""
        return {device.uuid, *(instance.uuid for instance in device.instances)}


def new_node(spec: str, place: str, clock: float, *, shared: bool = False) -> SimulatedNode:
    """Make a node as *spec* says.  Its uuids follow from *place* (its directory) and the index, so they come back."""
    devices = tuple(
        NodeDevice(
            index=index,
            uuid=_device_uuid(model, place, index),
            model=model,
            instances=_instances(model, place, index, profiles),
            energy_since=clock,
        )
        for index, (model, profiles) in enumerate(parse_spec(spec))
    )
    return SimulatedNode(spec.strip(), devices, shared=shared)


def _device_uuid(model: Model, place: str, index: int) -> str:
    if not model.serial:
        return "PCI-" + bus_address(model, index).replace(":", "-").replace(".", "-")
    uuid = _uuid("GPU", place, index, model.name)
    return f"GPU-{uuid.replace('-', '')[3:19]}" if model.vendor is AMD else uuid  # as ROCm writes a 64-bit number


def _instances(model: Model, place: str, index: int, profiles: tuple[str, ...]) -> tuple[Instance, ...]:
    if not model.dies:
        return tuple(
            Instance(_uuid("MIG", place, index, number, profile), profile, instance_memory(profile), number + 1)
            for number, profile in enumerate(profiles)
        )
    parent = _device_uuid(model, place, index).partition("-")[2]
    return tuple(
        Instance(f"{AMD.instance_prefix}{parent}-{number}", mode, model.memory_total // len(profiles), number)
        for number, mode in enumerate(profiles)
    )


# The bus numbers of a real 8-GPU board; further devices are in further domains.
_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)


def bus_address(model: Model, index: int) -> str:
    """Return the PCI address of the device *index*, as the kernel writes it, or NVML with an eight-digit domain."""
    domain, place = divmod(index, len(_BUSES))
    bus = _BUSES[place]
    in_kernel = model.vendor.major == DRM_MAJOR
    return f"{domain:04x}:{bus:02x}:00.0" if in_kernel else f"{domain:08X}:{bus:02X}:00.0"


def find(node: SimulatedNode, names: str) -> tuple[str, ...]:
    """Return the uuids that *names* means: "all", or indices, uuids or beginnings of uuids.  Raises InvalidRequest."""
    if names.strip() == "all":
        return tuple(device.uuid for device in node.devices)
    found = []
    for name in filter(None, (word.strip() for word in names.split(","))):
        matches = [
            uuid
            for device in node.devices
            for uuid in (device.uuid, *(instance.uuid for instance in device.instances))
            if (str(device.index) == name and uuid == device.uuid) or (len(name) > 4 and uuid.startswith(name))
        ]
        if len(matches) != 1:
            problem = _("means several GPUs") if matches else _("is no GPU of the simulated node")
            raise InvalidRequest(
                _("{name!r} {problem} ({spec}).  `gpuguard sim show` lists them.").format(
                    name=name, problem=problem, spec=node.spec
                )
            )
        found += matches
    if not found:
        raise InvalidRequest(_("no GPU is named: write an index ('0' or '0,1'), a uuid, or 'all'."))
    return tuple(dict.fromkeys(found))


def memory_total(node: SimulatedNode, uuid: str) -> int:
    """Return the bytes of the device or instance *uuid*."""
    sizes = {device.uuid: device.model.memory_total for device in node.devices}
    sizes |= {instance.uuid: instance.memory_total for device in node.devices for instance in device.instances}
    return sizes[uuid]


def memory_reserved(model: Model, total: int) -> int:
    """Return the bytes of *total* that driver and firmware keep: only NVIDIA's driver tells them apart."""
    kept = RESERVED_SHARE if model.vendor is NVIDIA and not model.integrated else 0
    return int(total * kept) // 2**20 * 2**20


def memory_used(node: SimulatedNode, uuids: set[str], clock: float) -> int:
    """Return the bytes in use on a device or instance, at most what it has; *uuids* come from SimulatedNode.of."""
    device = next(device for device in node.devices if not node.of(device).isdisjoint(uuids))
    used = IDLE_MEMORY + sum(use.memory.at(clock) for use in node.uses if use.device in uuids and running(use, clock))
    used += sum(release.memory for release in node.releases if release.device in uuids and release.until > clock)
    if device.memory and device.uuid in uuids:
        used += device.memory.at(clock)
    total = max(memory_total(node, uuid) for uuid in uuids)
    return min(int(used), total - memory_reserved(device.model, total))


def running(use: Use, clock: float) -> bool:
    """Return whether the time of *use* is not over yet."""
    return use.until is None or clock < use.until


def sleeps(node: SimulatedNode, device: NodeDevice, clock: float) -> bool:
    """Return whether the driver has switched *device* off: it wakes while a process uses it."""
    here = node.of(device)
    return device.asleep and not any(use.device in here and running(use, clock) for use in node.uses)


def utilization(node: SimulatedNode, device: NodeDevice, clock: float) -> float:
    """Return the utilization in percent."""
    if device.utilization:
        return device.utilization.at(clock)
    here = node.of(device)
    return min(sum(use.utilization for use in node.uses if use.device in here and running(use, clock)), 100.0)


def temperature(node: SimulatedNode, device: NodeDevice, clock: float) -> float:
    """Return the temperature in degrees Celsius.  Idle devices differ by a few degrees, as they do in a rack."""
    if device.temperature:
        return device.temperature.at(clock)
    return IDLE_TEMPERATURE + device.index % 4 + BUSY_WARMING * utilization(node, device, clock) / 100


def power_draw(node: SimulatedNode, device: NodeDevice, clock: float) -> float:
    """Return the power draw in watts."""
    idle = device.model.idle_power
    busy = BUSY_POWER_SHARE * device.model.power_limit
    return idle + (busy - idle) * utilization(node, device, clock) / 100


def total_energy(node: SimulatedNode, device: NodeDevice, clock: float) -> float:
    """Return the joules since the node was started, exactly for everything that moves in straight lines."""
    times = [device.energy_since, clock]
    if device.utilization:
        times += [device.utilization.since, device.utilization.since + device.utilization.over]
    times += [use.until for use in node.uses if use.until is not None]
    between = sorted({time for time in times if device.energy_since <= time <= clock})
    # The value in the middle of a straight piece is its mean, and the middle is on the right side of every step.
    spent = sum(power_draw(node, device, (start + end) / 2) * (end - start) for start, end in pairwise(between))
    return device.energy + spent


def advanced(node: SimulatedNode, clock: float, alive: Callable[[Use], bool]) -> SimulatedNode:
    """Return *node* with its energy added up to *clock* and without dead processes.

    The memory that those leave behind for a while becomes releases.
    """
    gone = [use for use in node.uses if not running(use, clock) or not alive(use)]
    ends = [clock if running(use, clock) else use.until or clock for use in gone]
    left = [
        ScheduledRelease(use.device, use.memory.at(end), end + node.release_delay)
        for use, end in zip(gone, ends, strict=True)
    ]
    return replace(
        node,
        devices=tuple(
            replace(device, energy=total_energy(node, device, clock), energy_since=clock) for device in node.devices
        ),
        uses=tuple(use for use in node.uses if use not in gone),
        releases=tuple(release for release in (*node.releases, *left) if release.until > clock),
    )


def changed(node: SimulatedNode, uuids: tuple[str, ...], change: Mapping[str, object]) -> SimulatedNode:
    """Return *node* with these fields of these devices replaced.  Raises InvalidRequest for a MIG instance."""
    for uuid in uuids:
        if uuid not in {device.uuid for device in node.devices}:
            raise InvalidRequest(_("{uuid} is a part of a GPU: name the GPU that it belongs to.").format(uuid=uuid))
    devices = tuple(replace(device, **change) if device.uuid in uuids else device for device in node.devices)  # type: ignore[arg-type]
    return replace(node, devices=devices)


def _uuid(kind: str, *facts: object) -> str:
    digits = hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()
    return f"{kind}-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"


STATE = "node.json"
LOCK = "node.lock"
USES = "uses"  # where users write the uses of a shared node by their processes
MAX_BYTES = 2**24
_USE_BYTES = 2**12
_USES_AT_MOST = 4096
LOCK_SECONDS = 10.0  # a change takes a millisecond; only a stopped process can hold the lock for longer
_SCHEMA = 1
_LONGEST = 86400.0  # seconds that a device may take to answer


def load(directory: str) -> SimulatedNode | None:
    """Return the node in *directory*, or None if there is none.  Raises BackendError."""
    path = os.path.join(directory, STATE)
    try:
        node = _decoded(loads(read_file(path, MAX_BYTES)))
        return replace(node, uses=_read_uses(directory)) if node.shared else node
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BackendError(
            sentence("sim.not_read", "the simulated node cannot be read: {error}.", error=str(error))
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackendError(
            sentence(
                "sim.damaged",
                "{path} is damaged ({error}).  `gpuguard sim start --force SPEC` makes a new node there.",
                path=path,
                error=f"{type(error).__name__}: {error}",
            )
        ) from None


def create(directory: str, make: Callable[[], SimulatedNode], *, replace: bool = False) -> tuple[SimulatedNode, bool]:
    """Return the node in *directory* and whether it is new: *make* is called if there is none, or with *replace*."""
    with _locked(directory):
        node = None if replace else load(directory)
        if node:
            return node, False
        node = make()
        _save(directory, node)
        return node, True


def update(
    directory: str, change: Callable[[SimulatedNode], SimulatedNode], *, uses_only: bool = False
) -> SimulatedNode:
    """Change the node while no other process does, and return the changed node.  Raises BackendError.

    Every user may change the uses of a shared node, so with *uses_only* nothing else of it is written.
    """
    with _locked(directory):
        node = load(directory)
        if node is None:
            raise BackendError(
                sentence(
                    "sim.none_there",
                    "there is no simulated node in {directory}: start one with `gpuguard sim start 8xH100-80GB`.",
                    directory=directory,
                )
            )
        before, node = node, change(node)
        if not (node.shared and uses_only):
            _save(directory, node)
        if node.shared:
            _save_uses(directory, before.uses, node.uses)
        return node


def remove(directory: str) -> bool:
    """Remove the node; return whether there was one.  The lock file stays, as another process may be waiting for it."""
    with _locked(directory):
        try:
            os.unlink(os.path.join(directory, STATE))
        except FileNotFoundError:
            return False
        except OSError as error:  # it is another user's
            raise _not_changed(error) from None
        return True


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    path = os.path.join(directory, LOCK)
    try:
        try:
            # flock needs no write access, so users who may only read the directory can also take their turn.
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _not_changed(error) from None
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BackendError(
                        sentence("sim.locked", "a stopped process holds {path}: `fuser -v {path}` shows it.", path=path)
                    ) from None
                time.sleep(0.002)
        yield
    finally:
        os.close(lock)


def _save(directory: str, node: SimulatedNode) -> None:
    path = os.path.join(directory, STATE)
    kept = replace(node, uses=()) if node.shared else node
    try:
        content = json.dumps({"schema": _SCHEMA, **asdict(kept)}).encode()
        write_file(path, content, mode=0o644 if node.shared else None)
    except OSError as error:
        shared = sentence("sim.shared", "  It is shared: all users use it, and root steers it.")
        raise _not_changed(error, shared if node.shared else "") from None


def _not_changed(error: OSError, why: str = "") -> BackendError:
    return BackendError(
        sentence("sim.not_changed", "the simulated node cannot be changed: {error}.{why}", error=str(error), why=why)
    )


def _read_uses(directory: str) -> tuple[Use, ...]:
    place, uses = os.path.join(directory, USES), []
    for name in sorted(os.listdir(place))[:_USES_AT_MOST]:
        if not name.endswith(".json"):
            continue
        with suppress(OSError, ValueError):  # it has just gone, or is no file of ours, and counts for nothing
            descriptor, status = open_regular(os.path.join(place, name))
            with os.fdopen(descriptor, "rb") as file:
                use = decode(Use, loads(file.read(_USE_BYTES)))
            if min(use.pid, use.memory.start, use.memory.end, use.utilization) >= 0 and use.kind in KINDS:
                uses.append(replace(use, uid=status.st_uid, file=name))
    return tuple(uses)


def _save_uses(directory: str, before: tuple[Use, ...], after: tuple[Use, ...]) -> None:
    place = os.path.join(directory, USES)
    for use in set(before) - set(after):
        with suppress(OSError):  # it belongs to another user, who removes it
            os.unlink(os.path.join(place, use.file))
    try:
        for use in set(after) - set(before):
            # No other user can have taken this name before.
            write_file(os.path.join(place, f"{os.urandom(8).hex()}.json"), json.dumps(asdict(use)).encode())
    except OSError as error:
        raise BackendError(
            sentence(
                "sim.use_not_written",
                "the use of the simulated node cannot be written down: {error}.",
                error=str(error),
            )
        ) from None


def _decoded(raw: dict[str, Any]) -> SimulatedNode:
    if raw["schema"] != _SCHEMA:
        raise ValueError(f"written by another version, schema {raw['schema']}")
    node = decode(SimulatedNode, raw)
    if len(node.devices) > DEVICES_AT_MOST or any(len(device.instances) > DEVICES_AT_MOST for device in node.devices):
        raise ValueError(f"no node has more than {DEVICES_AT_MOST} GPUs")
    for device in node.devices:
        if not 0 <= device.latency <= _LONGEST:
            raise ValueError(f"GPU {device.index} cannot take {device.latency} s")
        if device.model.pcie_generation not in LANES_BYTES:
            raise ValueError(f"there is no PCIe {device.model.pcie_generation}")
    return node
