"""A node that exists only in a file: for laptops, demonstrations, tests, and the rehearsal of policies.

Its processes are real processes: they register what they use, and are gone from the next sample when they are dead,
however they died.  `gpuguard sim` steers the node.  It lies in one directory, together with the claims on its devices,
so that these never mix with claims on real devices.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

from gpuguard import model, procfs
from gpuguard.backends import GPU_LOST, IS_LOST, SILENT, UNRESPONSIVE, simulated_node
from gpuguard.backends.drm import ASLEEP, groups_read, snapshot_of
from gpuguard.backends.simulated_node import (
    LANES_BYTES,
    Instance,
    NodeDevice,
    SimulatedNode,
    Use,
    WorkPattern,
    advanced,
    bus_address,
    find,
    memory_reserved,
    memory_total,
    memory_used,
    new_node,
)
from gpuguard.clusters.device_variables import visible_uuids
from gpuguard.errors import BackendError, GpuguardError, InvalidRequest
from gpuguard.locale import _
from gpuguard.locale.messages import sentence
from gpuguard.model import Device, DeviceAndGaps, Gap, GpuProcess
from gpuguard.procfs import boot_clock
from gpuguard.units import format_bytes
from gpuguard.vendors import DRM_MAJOR, NVIDIA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuguard.model import Snapshot

DEFAULT_SPEC = "8xH100-80GB"
HANG_LOOK_SECONDS = 0.5  # how often a hanging call checks whether it still has to hang
_VERSIONS = ("550.54.15", "12.550.54.15", "12.4")  # driver, NVML, CUDA
_OTHER_VERSIONS = ("6.12.12", None, None)  # of AMD's driver, as an example
_BROKEN = {
    "lost": (IS_LOST, GPU_LOST),
    "reset": (
        sentence("problem.reset_required", "reset required"),
        sentence("driver.gpu_needs_reset", "the GPU needs a reset"),
    ),
}
_NOT_IN_MODEL = sentence("sim.not_in_model", "this model does not have it")
_NOT_DIVIDED = sentence("sim.not_while_divided", "not told while the GPU is divided")
_NOT_TOLD = sentence("sim.not_told", "the simulated driver does not tell it")


def open(spec: str = "") -> Simulated:
    """Open the node in the directory *spec* (as for directory()), and make one of DEFAULT_SPEC if there is none."""
    place = directory(spec)
    if simulated_node.load(place) is None:
        simulated_node.create(place, lambda: new_node(DEFAULT_SPEC, place, boot_clock()))
    return Simulated(place)


def directory(spec: str = "") -> str:
    """Return the absolute path of the directory of a node, which exists afterwards.

    It is *spec*, else $GPUGUARD_SIM_DIR, gpuguard-sim in $XDG_RUNTIME_DIR, or /tmp/gpuguard-sim-UID.

    Raises BackendError if it cannot be made, or if it was not named and belongs to, or is open to, another user.
    """
    named = spec or os.environ.get("GPUGUARD_SIM_DIR", "")
    path = os.path.abspath(named) if named else _default_directory()
    try:
        if named:
            os.makedirs(path, exist_ok=True)
        elif not os.path.lexists(path):
            os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise BackendError(
                sentence(
                    "sim.no_directory", "{path} is not a directory: name another one for the simulated node.", path=path
                )
            ) from None
    except OSError as error:
        raise BackendError(
            sentence(
                "sim.directory_not_made",
                "no directory for the simulated node: {error}.  Name one in GPUGUARD_SIM_DIR.",
                error=str(error),
            )
        ) from None
    if not named and not _is_private(path):
        raise BackendError(
            sentence(
                "sim.directory_of_others",
                "{path} is not a directory of ours alone.  Remove it, or set GPUGUARD_SIM_DIR.",
                path=path,
            )
        )
    return path


def use(
    devices: str | Sequence[int | str] | None = None,
    memory: int = 0,
    utilization: float = 0.0,
    *,
    ramp: tuple[int, float] | None = None,
    lasting: float | None = None,
    kind: str = "compute",
    spec: str = "",
) -> tuple[str, ...]:
    """Let this process use devices of the simulated node from now on; a further call for a device replaces the former.

    Args:
        devices: indices and uuids; by default those that the list of a vendor leaves, as CUDA_VISIBLE_DEVICES is.
        memory: bytes on each device.
        utilization: percent of each device.
        ramp: the bytes to which *memory* evenly grows or shrinks, and the seconds that this takes.
        lasting: seconds after which the use ends; by default it lasts as long as the process.
        kind: compute, graphics, compute+graphics or mps.
        spec: which node, as for directory().

    Returns:
        The uuids of the devices.

    Raises:
        InvalidRequest: no such device.
        GpuguardError: a device does not have that much free memory, or lets no process in.
        BackendError: there is no node.
    """
    pid = os.getpid()
    start = procfs.start_time(pid)
    end, seconds = ramp or (memory, 0.0)
    uuids: tuple[str, ...] = ()

    def register(node: SimulatedNode) -> SimulatedNode:
        nonlocal uuids
        uuids = _chosen(node, devices)
        node, clock = advanced_now(node), boot_clock()
        course = WorkPattern(memory, end, clock, seconds)
        until = None if lasting is None else clock + lasting
        node = replace(node, uses=tuple(use for use in node.uses if use.pid != pid or use.device not in uuids))
        for uuid in uuids:
            _check_room(node, uuid, memory, clock)
        new = tuple(Use(uuid, pid, start or 0.0, course, utilization, kind, until) for uuid in uuids)
        return replace(node, uses=node.uses + new)

    simulated_node.update(directory(spec), register, uses_only=True)
    return uuids


class Simulated:
    """The Backend."""

    name = "simulated"
    simulated = True

    def __init__(self, place: str) -> None:
        self.directory = place
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self.ahead = False

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does.  HEALTH shows instances, which follow their parent and have its index."""
        # Taken before anything is read, so that no process that started later counts as one that was seen.
        taken_at, clock = time.time(), boot_clock()
        fields = groups_read(fields, devices)
        node = current(self.directory)
        wanted = [device for device in node.devices if devices is None or not node.of(device).isdisjoint(devices)]
        found = [shown for device in wanted for shown in self._read(node, device, fields)]
        answering = {device.uuid for device, _ in found if not device.problems}
        has_nvml = any(device.model.vendor is NVIDIA for device in node.devices)
        driver, nvml, cuda = (_VERSIONS if has_nvml else _OTHER_VERSIONS) if model.MODEL in fields else (None,) * 3
        return snapshot_of(
            self,
            (taken_at, clock),
            found,
            topology=topology(node, answering) if model.TOPOLOGY in fields else None,
            driver_version=driver,
            nvml_version=nvml,
            cuda_version=cuda,
        )

    def close(self) -> None:
        """Do nothing, because nothing is held."""

    def _read(self, node: SimulatedNode, device: NodeDevice, fields: Collection[str]) -> list[DeviceAndGaps]:
        """Return the device and its instances, each with its gaps."""
        if device.index in self.skip:
            return _refusing(node, device, UNRESPONSIVE, SILENT, ["device"])
        self.progress(device.index)
        while "hang" in device.faults:
            time.sleep(HANG_LOOK_SECONDS)
            node = current(self.directory)
            device = next((fresh for fresh in node.devices if fresh.uuid == device.uuid), device)
        time.sleep(device.latency)
        for fault, (problem, reason) in _BROKEN.items():
            if fault in device.faults:
                return _refusing(node, device, problem, reason, fields)
        detailed, instances = model.PROCESS_DETAILS in fields, device.instances if model.HEALTH in fields else ()
        parts = [ReadingContext(node, device, part, boot_clock(), detailed) for part in (None, *instances)]
        return [read(part, fields) for part in parts]


def current(place: str) -> SimulatedNode:
    """Return the node in *place* without its dead processes.  Raises BackendError if there is none or it is damaged."""
    node = simulated_node.load(place)
    if node is None:
        raise BackendError(
            sentence(
                "sim.no_node",
                "no simulated node is in {place}: `gpuguard sim start {spec}` starts one.",
                place=place,
                spec=DEFAULT_SPEC,
            )
        )
    if all(_is_alive(use) for use in node.uses):
        return node
    try:
        # The moment of death is noted, because later samples need it for energy and for memory released with a delay.
        return simulated_node.update(place, advanced_now)
    except BackendError:
        # We may only read this node.  No process notes when the dead ones gave their memory back, so it is back now.
        return advanced_now(replace(node, release_delay=0.0))


def _chosen(node: SimulatedNode, devices: str | Sequence[int | str] | None) -> tuple[str, ...]:
    if devices is None:
        everything = [_named(node, device) for device in node.devices]
        everything += [
            _named(node, device, uuid=instance.uuid, parent_uuid=device.uuid)
            for device in node.devices
            for instance in device.instances
        ]
        uuids = visible_uuids(os.environ, everything)
        if uuids == ():
            raise InvalidRequest(_("the environment leaves no GPU: name GPUs, or start this with `gpuguard run`."))
        uuids = find(node, "all" if uuids is None else ",".join(uuids))
    else:
        uuids = find(node, devices if isinstance(devices, str) else ",".join(map(str, devices)))
    first = {device.uuid: device.instances[0].uuid for device in node.devices if device.instances}
    # As with CUDA, a process on a divided device gets the first instance.
    return tuple(dict.fromkeys(first.get(uuid, uuid) for uuid in uuids))


def _check_room(node: SimulatedNode, uuid: str, memory: int, clock: float) -> None:
    device = next(device for device in node.devices if uuid in node.of(device))
    if {"lost", "reset"} & set(device.faults) or device.compute_mode == "prohibited":
        raise GpuguardError(
            _("GPU {index} lets no process in: `gpuguard sim show` says why.").format(index=device.index)
        )
    if device.compute_mode == "exclusive_process" and any(use.device == uuid for use in node.uses):
        raise GpuguardError(
            _("GPU {index} is in exclusive_process mode and has a process already.").format(index=device.index)
        )
    total = memory_total(node, uuid)
    free = total - memory_reserved(device.model, total) - memory_used(node, {uuid}, clock)
    if memory > free:
        raise GpuguardError(
            _("out of memory on simulated GPU {index}: {memory} wanted, {free} are free.").format(
                index=device.index, memory=format_bytes(memory), free=format_bytes(free)
            )
        )


def _refusing(
    node: SimulatedNode, device: NodeDevice, problem: str, reason: str, missing: Collection[str]
) -> list[DeviceAndGaps]:
    broken = _named(node, device, problems=(problem,))
    return [(broken, [Gap(device.uuid, name, reason) for name in sorted(missing)])]


def advanced_now(node: SimulatedNode) -> SimulatedNode:
    """Return *node*, as each change needs it, without its dead processes and with its energy added up to now."""
    return advanced(node, boot_clock(), _is_alive)


def _is_alive(use: Use) -> bool:
    if use.uid is not None and procfs.uid_of(use.pid) not in (use.uid, None):
        return False  # users register only their own processes; otherwise they could get others' processes ended
    stat = procfs.read_stat(use.pid)
    if stat is None:
        return procfs.alive(use.pid)  # gone, or hidden from this user (hidepid)
    # The driver takes the memory back when a process exits, not when its parent gets round to reaping it.
    return stat.lives and stat.start_time == use.start_time


def _default_directory() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_private(runtime):
        return os.path.join(runtime, "gpuguard-sim")
    return f"/tmp/gpuguard-sim-{os.geteuid()}"


def _is_private(path: str) -> bool:
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


_BUSY_PCIE_SHARE = 0.12  # of the link, at 100 % utilization
_FIRST_RENDER_MINOR = 128  # of DRM
_BUSY_LINK = 6e9  # bytes per second over one NVLink, at 100 % utilization

Values = dict[str, object]


@dataclass(frozen=True)
class ReadingContext:
    """A device, or one of its instances, in a node at a given clock."""

    node: SimulatedNode
    device: NodeDevice
    instance: Instance | None
    clock: float
    detailed: bool = False  # whether to tell also who the processes are

    @property
    def uuids(self) -> set[str]:
        """The uuids whose use counts here: an instance's own, or a device's own and those of its instances."""
        return {self.instance.uuid} if self.instance else self.node.of(self.device)

    @property
    def memory_total(self) -> int:
        """The size of the memory in bytes."""
        return (self.instance or self.device.model).memory_total

    @property
    def utilization(self) -> float:
        """The utilization in percent."""
        return simulated_node.utilization(self.node, self.device, self.clock)


def read(context: ReadingContext, fields: Collection[str]) -> DeviceAndGaps:
    """Return the device in *context* as a driver would show it: the groups in *fields*, and gaps for missing values."""
    device, instance = context.device, context.instance
    uuid = instance.uuid if instance else device.uuid
    values: Values = {}
    for group, reader in _READERS.items():
        if group in fields and not (instance and group in _OF_THE_WHOLE):
            values |= dict.fromkeys(model.GROUPED_FIELDS.get(group, ())) | reader(context)
    values |= {name: model.DEVICE_FIELDS[name].number(value) for name, value in device.given if name in values}
    sleeps = simulated_node.sleeps(context.node, device, context.clock)
    hidden = {name for group in _WAKING if sleeps for name in model.GROUPED_FIELDS[group]} & values.keys()
    values |= dict.fromkeys(hidden)
    absent = [name for name, value in values.items() if value is None]
    gaps = [Gap(uuid, name, ASLEEP if name in hidden else _NOT_IN_MODEL) for name in absent]
    if device.instances and (instance or device.model.mig):
        gaps += [Gap(uuid, name, _NOT_DIVIDED) for name in _NOT_WITH_MIG if name in values]
    faulty = [name for name in device.unknown if name in values and values[name] is not None]
    gaps += [Gap(uuid, name, _NOT_TOLD) for name in faulty]
    if "unlisted" in device.faults and "processes" in values:
        no_list = sentence("sim.no_process_list", "the simulated driver gives no process list")
        gaps.append(Gap(uuid, "processes", no_list))
    values |= {gap.field: None for gap in gaps}
    if values.get("processes_plausible") is False:
        odd_list = sentence("sim.implausible_list", "the process list is not plausible: it has pids that cannot be")
        gaps.append(Gap(uuid, "processes", odd_list))
    return _named(context.node, device, uuid=uuid, **values), gaps


def _named(node: SimulatedNode, device: NodeDevice, **values: Any) -> Device:
    """Return a device of the node with the fields that every snapshot has, and *values*."""
    vendor = device.model.vendor
    before = sum(other.model.vendor is vendor for other in node.devices[: device.index])
    names = {"index": device.index, "uuid": device.uuid, "vendor": vendor.name}
    return Device(**{**names, "ordinal": None if before == device.index else before, **values})


def numa_node(node: SimulatedNode, device: NodeDevice) -> int:
    """Return the NUMA node, which is 1 for the second half of four or more devices, and 0 for all others."""
    count = len(node.devices)
    return int(count >= 4 and device.index >= count // 2)


def topology(node: SimulatedNode, uuids: Collection[str]) -> tuple[tuple[str, str, str], ...]:
    """Return (uuid, uuid, how they are connected) for each pair of the devices *uuids*, which were read."""
    devices = [device for device in node.devices if device.uuid in uuids]
    return tuple((one.uuid, other.uuid, _connection(node, one, other)) for one, other in combinations(devices, 2))


def _connection(node: SimulatedNode, one: NodeDevice, other: NodeDevice) -> str:
    if one.model.nvlinks and one.model == other.model:
        return "NVLINK"
    if numa_node(node, one) != numa_node(node, other):
        return "SYS"
    return "PIX" if one.index // 2 == other.index // 2 else "NODE"


def _memory(context: ReadingContext) -> Values:
    total = context.memory_total
    reserved = memory_reserved(context.device.model, total)
    used = memory_used(context.node, context.uuids, context.clock)
    return {
        "memory_total": total,
        "memory_used": used,
        "memory_free": total - reserved - used,
        "memory_reserved": reserved or None,
        "memory_shared_with_host": context.device.model.integrated,
    }


def _processes(context: ReadingContext, *, unless_busy: bool = False) -> Values:
    if unless_busy and memory_used(context.node, context.uuids, context.clock) >= model.BUSY_MEMORY:
        return {}
    uses = [use for use in context.node.uses if simulated_node.running(use, context.clock)]
    here = [use for use in uses if use.device in context.uuids]
    total, listed = context.memory_total, []
    left = total - memory_reserved(context.device.model, total)
    for use in here:
        # Several processes that grow at once would exceed the device, so the last one gets no more.
        memory = min(int(use.memory.at(context.clock)), left)
        left -= memory
        listed.append(_process(use, context, memory))
    if "implausible" not in context.device.faults:
        return {"processes": tuple(listed)}
    # The kind of list that a driver of another version gave: memory sizes read as pids, pids of all ones.
    torn = (GpuProcess(1073741824, 0), GpuProcess(4294967295, 2**40), GpuProcess(0))
    return {"processes": (*listed, *torn), "processes_plausible": False}


def _process(use: Use, context: ReadingContext, memory: int) -> GpuProcess:
    registered = GpuProcess(use.pid, memory, use.kind, use.start_time)
    found = procfs.described(registered) if context.detailed else procfs.identified(registered)
    if found.start_time != use.start_time:
        return registered  # it has just ended, and its pid may already be another process's
    if not context.detailed:
        return found
    return replace(
        found,
        utilization=use.utilization,
        memory_utilization=_memory_utilization(use.utilization),
        encoder_utilization=0.0,
        decoder_utilization=0.0,
    )


def _utilization(context: ReadingContext) -> Values:
    return {"utilization": context.utilization, "memory_utilization": _memory_utilization(context.utilization)}


def _memory_utilization(utilization: float) -> float:
    return round(utilization * 0.55, 1)


def _health(context: ReadingContext) -> Values:
    facts = context.device.model
    values: Values = {
        "problems": (),
        "compute_mode": context.device.compute_mode,
        "mig_mode": bool(context.device.instances) if facts.mig or facts.dies else None,
        "asleep": simulated_node.sleeps(context.node, context.device, context.clock),
    }
    if context.instance:
        values |= {
            "parent_uuid": context.device.uuid,
            "mig_profile": context.instance.profile,
            "gpu_instance_id": context.instance.gpu_instance_id,
            "compute_instance_id": 0 if facts.mig else None,
        }
    return values


def _model(context: ReadingContext) -> Values:
    facts, part = context.device.model, context.instance
    numa = numa_node(context.node, context.device)
    return {
        "name": f"{facts.name} MIG {part.profile}" if part and facts.mig else facts.name,
        "pci_bus_id": bus_address(facts, context.device.index),
        "minor_number": _minor_number(context),
        "numa_node": numa,
        "cpu_affinity": ("0-47,96-143", "48-95,144-191")[numa],
        "integrated": facts.integrated,
    }


def _minor_number(context: ReadingContext) -> int:
    """Return the minor of the device's node; each partition of an AMD GPU has a render node of its own."""
    index, facts, part = context.device.index, context.device.model, context.instance
    if facts.vendor.major != DRM_MAJOR:
        return index
    return _FIRST_RENDER_MINOR + index * max(1, facts.dies) + (part.gpu_instance_id if part else 0)


def _thermal(context: ReadingContext) -> Values:
    celsius = simulated_node.temperature(context.node, context.device, context.clock)
    facts = context.device.model
    fan = min(max(celsius - 30.0, 0.0) * 1.6, 100.0) if facts.fan else None
    return {
        "temperature": float(round(celsius)),
        "temperature_slowdown": facts.temperature_slowdown,
        "temperature_shutdown": facts.temperature_shutdown,
        "fan_speed": None if fan is None or context.instance else float(round(fan)),
    }


def _power(context: ReadingContext) -> Values:
    return {
        "power_draw": round(simulated_node.power_draw(context.node, context.device, context.clock), 1),
        "power_limit": context.device.model.power_limit,
        "total_energy": round(simulated_node.total_energy(context.node, context.device, context.clock), 3),
    }


def _clocks(context: ReadingContext) -> Values:
    facts = context.device.model
    busy = context.utilization > 0
    hot = simulated_node.temperature(context.node, context.device, context.clock) >= facts.temperature_slowdown
    share = 0.4 if hot else 1.0 if busy else 0.17
    return {
        "clock_sm": int(facts.clock_sm_max * share),
        "clock_sm_max": facts.clock_sm_max,
        "clock_memory": facts.clock_memory_max,
        "clock_memory_max": facts.clock_memory_max,
        "pstate": 0 if busy or facts.nvlinks else 8,
        "throttle_reasons": ("hw_thermal_slowdown",) if hot else () if busy else ("gpu_idle",),
        "persistence_mode": True,
        "display_active": False,
    }


def _ecc(context: ReadingContext) -> Values:
    known = context.device.model.ecc
    counters = ("corrected_volatile", "uncorrected_volatile", "corrected_aggregate", "uncorrected_aggregate")
    return {
        "ecc_mode": known or None,
        **{f"ecc_{name}": 0 if known else None for name in counters},
        "retired_pages": None,  # all our models are newer and remap rows instead
        "remapped_rows": 0 if known else None,
        "remapped_rows_uncorrected": 0 if known else None,
    }


def _media(context: ReadingContext) -> Values:
    clock = _clocks(context)["clock_sm"]
    return {"clock_graphics": clock, "clock_video": clock, "encoder_utilization": 0.0, "decoder_utilization": 0.0}


def _pcie(context: ReadingContext) -> Values:
    facts = context.device.model
    flow = context.utilization / 100 * _BUSY_PCIE_SHARE
    flow *= 16 * LANES_BYTES[facts.pcie_generation]
    return {"pcie_generation": facts.pcie_generation, "pcie_width": 16, "pcie_tx": flow, "pcie_rx": flow * 2.5}


def _links(context: ReadingContext) -> tuple[tuple[int, str], ...]:
    own = context.device
    peers = [device for device in context.node.devices if device != own and device.model == own.model]
    links = own.model.nvlinks if peers else 0
    return tuple((link, bus_address(own.model, peers[link % len(peers)].index)) for link in range(links))


def _nvlink_flow(context: ReadingContext) -> Values:
    flow = context.utilization / 100 * _BUSY_LINK
    links = _links(context)
    total = flow * len(links)
    return {"nvlink_tx": total, "nvlink_rx": total, "nvlink_flow": tuple((link, flow, flow) for link, _ in links)}


_READERS: dict[str, Callable[[ReadingContext], Values]] = {
    model.MEMORY: _memory,
    model.PROCESSES: _processes,
    model.IDLE_PROCESSES: partial(_processes, unless_busy=True),
    model.UTILIZATION: _utilization,
    model.HEALTH: _health,
    model.MODEL: _model,
    model.THERMAL: _thermal,
    model.POWER: _power,
    model.CLOCKS: _clocks,
    model.ECC: _ecc,
    model.MEDIA: _media,
    model.PCIE: _pcie,
    model.NVLINK: lambda context: {"nvlink_links": _links(context)},
    model.NVLINK_FLOW: _nvlink_flow,
}
# An instance has no values of its own in these groups, and real drivers give none.
_OF_THE_WHOLE = (model.POWER, model.CLOCKS, model.ECC, model.MEDIA, model.PCIE, model.NVLINK, model.NVLINK_FLOW)
# A real driver would have to wake a GPU that sleeps to read these.  Its memory and its processes the kernel knows.
_WAKING = {*_OF_THE_WHOLE, model.THERMAL}
# Real drivers answer NVML_ERROR_NOT_SUPPORTED to these, for a divided device and for its instances.
_NOT_WITH_MIG = ("utilization", "memory_utilization")
