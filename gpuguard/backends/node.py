"""The simulated node: what it consists of, and what it looks like at a given clock.

Everything is a function of the state and the clock, so a temperature can climb and energy can add up although no
process of ours runs.  Memory and utilization follow the processes; temperature and power follow the utilization.
Pure: does not read the state (see node_file), nor whether a process lives (see simulated).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from gpuguard.backends.node_spec import Model, instance_memory, parse_spec
from gpuguard.errors import InvalidRequest

IDLE_MEMORY = 2**20  # bytes: a driver shows 1 MiB on a device that nobody uses
RESERVED_SHARE = 0.0068  # of the memory: 551 MiB of the 81559 MiB of an H100
IDLE_TEMPERATURE = 31.0
BUSY_WARMING = 40.0  # degrees on top of that at 100 %
BUSY_POWER_SHARE = 0.95  # of the power limit, at 100 %


@dataclass(frozen=True)
class Course:
    """A number on its way from *start* to *end* in a straight line; *since* and *over* in seconds of the clock."""

    start: float
    end: float
    since: float = 0.0
    over: float = 0.0

    def at(self, clock: float) -> float:
        """Where it is at *clock*."""
        if clock >= self.since + self.over:
            return self.end
        if clock <= self.since:  # a reader's clock may be older than the state that it reads
            return self.start
        return self.start + (self.end - self.start) * (clock - self.since) / self.over


@dataclass(frozen=True)
class Instance:
    """A MIG instance."""

    uuid: str
    profile: str
    memory_total: int
    gpu_instance_id: int


@dataclass(frozen=True)
class NodeDevice:
    """A device of the node.  What `sim set` did not set is None and follows from the processes."""

    index: int
    uuid: str
    model: Model
    instances: tuple[Instance, ...] = ()
    faults: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # fields of model.Device that the driver does not tell
    latency: float = 0.0  # seconds that reading it takes
    compute_mode: str = "default"
    temperature: Course | None = None
    utilization: Course | None = None
    memory: Course | None = None  # bytes that no process accounts for
    energy: float = 0.0  # joules at the clock energy_since
    energy_since: float = 0.0


@dataclass(frozen=True)
class Use:
    """A real process that uses a device of the node."""

    device: str  # uuid
    pid: int
    start_time: float  # seconds since boot
    memory: Course
    utilization: float
    kind: str = "compute"
    until: float | None = None  # clock; None: as long as it lives


@dataclass(frozen=True)
class Release:
    """Memory that stays visible for a while after its process has died."""

    device: str
    memory: float
    until: float  # clock


@dataclass(frozen=True)
class Node:
    """The whole state."""

    spec: str
    devices: tuple[NodeDevice, ...]
    uses: tuple[Use, ...] = ()
    releases: tuple[Release, ...] = ()
    release_delay: float = 0.0  # seconds

    def of(self, device: NodeDevice) -> set[str]:
        """The uuids under which *device* is used: its own and those of its instances."""
        return {device.uuid, *(instance.uuid for instance in device.instances)}


def new_node(spec: str, place: str, clock: float) -> Node:
    """A node as *spec* says.  Its uuids follow from *place* (its directory) and the position, so they come back."""
    devices = tuple(
        NodeDevice(
            index=index,
            uuid=_uuid("GPU", place, index, part.model.name),
            model=part.model,
            instances=tuple(
                Instance(_uuid("MIG", place, index, number, profile), profile, instance_memory(profile), number + 1)
                for number, profile in enumerate(part.profiles)
            ),
            energy_since=clock,
        )
        for index, part in enumerate(parse_spec(spec))
    )
    return Node(spec.strip(), devices)


def find(node: Node, names: str) -> tuple[str, ...]:
    """The uuids that *names* means: indices, uuids or their beginnings, comma-separated, or ``"all"``.

    Raises:
        InvalidRequest: one of them is not there, or means several.
    """
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
            problem = "means several devices" if matches else "is no device of the simulated node"
            raise InvalidRequest(f"{name!r} {problem} ({node.spec}).  `gpuguard sim show` lists them.")
        found += matches
    if not found:
        raise InvalidRequest("no device is named: write an index ('0' or '0,1'), a uuid, or 'all'.")
    return tuple(dict.fromkeys(found))


def memory_total(node: Node, uuid: str) -> int:
    """Bytes of the device or instance *uuid*."""
    sizes = {device.uuid: device.model.memory_total for device in node.devices}
    sizes |= {instance.uuid: instance.memory_total for device in node.devices for instance in device.instances}
    return sizes[uuid]


def memory_reserved(total: int) -> int:
    """Bytes of *total* that driver and firmware keep."""
    return int(total * RESERVED_SHARE) // 2**20 * 2**20


def memory_used(node: Node, uuids: set[str], clock: float) -> int:
    """Bytes in use on a device or instance, at most what it has; *uuids* as Node.of gives them."""
    device = next((device for device in node.devices if device.uuid in uuids), None)
    used = IDLE_MEMORY + sum(use.memory.at(clock) for use in node.uses if use.device in uuids and running(use, clock))
    used += sum(release.memory for release in node.releases if release.device in uuids and release.until > clock)
    if device and device.memory:
        used += device.memory.at(clock)
    total = max(memory_total(node, uuid) for uuid in uuids)
    return min(int(used), total - memory_reserved(total))


def running(use: Use, clock: float) -> bool:
    """Whether its time is not over yet."""
    return use.until is None or clock < use.until


def utilization(node: Node, device: NodeDevice, clock: float) -> float:
    """Percent."""
    if device.utilization:
        return device.utilization.at(clock)
    here = node.of(device)
    return min(sum(use.utilization for use in node.uses if use.device in here and running(use, clock)), 100.0)


def temperature(node: Node, device: NodeDevice, clock: float) -> float:
    """Degrees Celsius.  Idle devices differ by a few degrees, as they do in a rack."""
    if device.temperature:
        return device.temperature.at(clock)
    return IDLE_TEMPERATURE + device.index % 4 + BUSY_WARMING * utilization(node, device, clock) / 100


def power_draw(node: Node, device: NodeDevice, clock: float) -> float:
    """Watts."""
    idle = device.model.idle_power
    busy = BUSY_POWER_SHARE * device.model.power_limit
    return idle + (busy - idle) * utilization(node, device, clock) / 100


def total_energy(node: Node, device: NodeDevice, clock: float) -> float:
    """Joules since the node was started: exact for everything that moves in straight lines."""
    times = [device.energy_since, clock]
    if device.utilization:
        times += [device.utilization.since, device.utilization.since + device.utilization.over]
    times += [use.until for use in node.uses if use.until is not None]
    between = sorted({time for time in times if device.energy_since <= time <= clock})
    # The middle of a straight piece is its mean, and is on the right side of every step.
    spent = sum(power_draw(node, device, (start + end) / 2) * (end - start) for start, end in pairwise(between))
    return device.energy + spent


def settled(node: Node, clock: float, alive: Callable[[Use], bool]) -> Node:
    """*node* with its energy added up to *clock*, without dead processes, with what they leave behind for a while."""
    gone = [use for use in node.uses if not running(use, clock) or not alive(use)]
    ends = [clock if running(use, clock) else use.until or clock for use in gone]
    left = [
        Release(use.device, use.memory.at(end), end + node.release_delay) for use, end in zip(gone, ends, strict=True)
    ]
    return replace(
        node,
        devices=tuple(
            replace(device, energy=total_energy(node, device, clock), energy_since=clock) for device in node.devices
        ),
        uses=tuple(use for use in node.uses if use not in gone),
        releases=tuple(release for release in (*node.releases, *left) if release.until > clock),
    )


def changed(node: Node, uuids: tuple[str, ...], change: Mapping[str, object]) -> Node:
    """*node* with these fields of these devices replaced.

    Raises:
        InvalidRequest: a MIG instance is named; only whole devices can be steered.
    """
    known = {device.uuid for device in node.devices}
    for uuid in uuids:
        if uuid not in known:
            raise InvalidRequest(f"{uuid} is a MIG instance: name the device that it belongs to.")
    devices = tuple(replace(each, **change) if each.uuid in uuids else each for each in node.devices)  # type: ignore[arg-type]
    return replace(node, devices=devices)


def _uuid(kind: str, *facts: object) -> str:
    import hashlib

    digits = hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()
    return f"{kind}-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"
