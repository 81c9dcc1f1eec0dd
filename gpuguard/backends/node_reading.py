"""What a driver would say about a device of the simulated node: one function per group of fields.

Does not decide whether the driver answers at all (lost, hanging): see simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from gpuguard import model
from gpuguard.backends import node, processes
from gpuguard.backends.node import Instance, Node, NodeDevice, Use
from gpuguard.backends.node_spec import LANES_BYTES
from gpuguard.model import Device, Gap, GpuProcess

# The bus numbers of a real 8-GPU board; more devices are in further domains.
_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
_BUSY_PCIE_SHARE = 0.12  # of the link, at 100 % utilization
_BUSY_LINK = 6e9  # bytes per second over one NVLink, at 100 % utilization

Values = dict[str, object]


@dataclass(frozen=True)
class Place:
    """A device, or one of its instances, in a node at a clock."""

    node: Node
    device: NodeDevice
    instance: Instance | None
    clock: float
    detailed: bool = False  # whether it is also told who the processes are

    @property
    def uuids(self) -> set[str]:
        """Whose use counts here: an instance's own, a divided device's also that of its instances."""
        return {self.instance.uuid} if self.instance else self.node.of(self.device)


def read(place: Place, fields: Collection[str]) -> tuple[Device, tuple[Gap, ...]]:
    """The device at *place* with the groups in *fields*, and why what is missing is missing."""
    device, instance = place.device, place.instance
    uuid = instance.uuid if instance else device.uuid
    values: Values = {}
    for group, reader in _READERS.items():
        if group in fields and not (instance and group in _OF_THE_WHOLE):
            values |= reader(place)
    gaps = [Gap(uuid, name, "this model does not have it") for name, value in values.items() if value is None]
    if device.instances:
        gaps += [Gap(uuid, name, "not told while the device is divided") for name in _NOT_WITH_MIG if name in values]
    faulty = [name for name in device.unknown if name in values and values[name] is not None]
    gaps += [Gap(uuid, name, "the simulated driver does not tell it") for name in faulty]
    if "unlisted" in device.faults and "processes" in values:
        gaps.append(Gap(uuid, "processes", "the simulated driver gives no process list"))
    values |= {gap.field: None for gap in gaps}
    if values.get("processes_plausible") is False:
        gaps.append(Gap(uuid, "processes", "the process list is not plausible: it has pids that cannot be"))
    return Device(index=device.index, uuid=uuid, **values), tuple(gaps)  # type: ignore[arg-type]


def pci_bus_id(device: NodeDevice) -> str:
    """As NVML writes it, with an eight-digit domain."""
    return f"{device.index // len(_BUSES):08X}:{_BUSES[device.index % len(_BUSES)]:02X}:00.0"


def numa_node(whole: Node, device: NodeDevice) -> int:
    """The first half of four and more devices is on node 0, the second on node 1."""
    count = len(whole.devices)
    return int(count >= 4 and device.index >= count // 2)


def topology(whole: Node, uuids: Collection[str]) -> tuple[tuple[str, str, str], ...]:
    """(uuid, uuid, how they are connected) of each pair of those that were read."""
    devices = [device for device in whole.devices if device.uuid in uuids]
    return tuple(
        (one.uuid, other.uuid, _connection(whole, one, other))
        for place, one in enumerate(devices)
        for other in devices[place + 1 :]
    )


def _connection(whole: Node, one: NodeDevice, other: NodeDevice) -> str:
    if one.model.nvlinks and one.model == other.model:
        return "NVLINK"
    if numa_node(whole, one) != numa_node(whole, other):
        return "SYS"
    return "PIX" if one.index // 2 == other.index // 2 else "NODE"


def _total(place: Place) -> int:
    return place.instance.memory_total if place.instance else place.device.model.memory_total


def _memory(place: Place) -> Values:
    total = _total(place)
    reserved = node.memory_reserved(total)
    used = node.memory_used(place.node, place.uuids, place.clock)
    return {
        "memory_total": total,
        "memory_used": used,
        "memory_free": total - reserved - used,
        "memory_reserved": reserved,
    }


def _processes(place: Place) -> Values:
    here = [use for use in place.node.uses if use.device in place.uuids and node.running(use, place.clock)]
    total, listed = _total(place), []
    left = total - node.memory_reserved(total)
    for use in here:
        # Several that grow at once would reach beyond the device: there the last one gets no more.
        memory = min(int(use.memory.at(place.clock)), left)
        left -= memory
        listed.append(_process(use, place, memory))
    if "implausible" not in place.device.faults:
        return {"processes": tuple(listed)}
    # What a driver of another version gave, in kind: memory sizes read as pids, pids of all ones.
    torn = (GpuProcess(1073741824, 0), GpuProcess(4294967295, 2**40), GpuProcess(0))
    return {"processes": (*listed, *torn), "processes_plausible": False}


def _idle_processes(place: Place) -> Values:
    used = _memory(place)["memory_used"]
    return {} if isinstance(used, int) and used >= model.BUSY_MEMORY else _processes(place)


def _process(use: Use, place: Place, memory: int) -> GpuProcess:
    registered = GpuProcess(use.pid, memory, use.kind, use.start_time)
    found = processes.described(registered) if place.detailed else processes.identified(registered)
    if found.start_time != use.start_time:
        return registered  # it has just ended, and the pid may be somebody else's already
    return replace(found, utilization=use.utilization) if place.detailed else found


def _utilization(place: Place) -> Values:
    percent = node.utilization(place.node, place.device, place.clock)
    return {"utilization": percent, "memory_utilization": round(percent * 0.55, 1)}


def _health(place: Place) -> Values:
    mig = bool(place.device.instances) if place.device.model.mig else None
    values: Values = {"problems": (), "compute_mode": place.device.compute_mode, "mig_mode": mig}
    if place.instance:
        values |= {
            "parent_uuid": place.device.uuid,
            "mig_profile": place.instance.profile,
            "gpu_instance_id": place.instance.gpu_instance_id,
            "compute_instance_id": 0,
        }
    return values


def _model(place: Place) -> Values:
    numa = numa_node(place.node, place.device)
    name = place.device.model.name
    return {
        "name": f"{name} MIG {place.instance.profile}" if place.instance else name,
        "pci_bus_id": pci_bus_id(place.device),
        "minor_number": place.device.index,
        "numa_node": numa,
        "cpu_affinity": ("0-47,96-143", "48-95,144-191")[numa],
    }


def _thermal(place: Place) -> Values:
    celsius = node.temperature(place.node, place.device, place.clock)
    facts = place.device.model
    fan = min(max(celsius - 30.0, 0.0) * 1.6, 100.0) if facts.fan else None
    return {
        "temperature": float(round(celsius)),
        "temperature_slowdown": facts.temperature_slowdown,
        "temperature_shutdown": facts.temperature_shutdown,
        "fan_speed": None if fan is None or place.instance else float(round(fan)),
    }


def _power(place: Place) -> Values:
    return {
        "power_draw": round(node.power_draw(place.node, place.device, place.clock), 1),
        "power_limit": place.device.model.power_limit,
        "total_energy": round(node.total_energy(place.node, place.device, place.clock), 3),
    }


def _clocks(place: Place) -> Values:
    facts = place.device.model
    busy = node.utilization(place.node, place.device, place.clock) > 0
    hot = node.temperature(place.node, place.device, place.clock) >= facts.temperature_slowdown
    share = 0.4 if hot else 1.0 if busy else 0.17
    return {
        "clock_sm": int(facts.clock_sm_max * share),
        "clock_sm_max": facts.clock_sm_max,
        "clock_memory": facts.clock_memory_max,
        "clock_memory_max": facts.clock_memory_max,
        "pstate": 0 if busy or facts.nvlinks else 8,
        "throttle_reasons": ("hw_thermal_slowdown",) if hot else () if busy else ("gpu_idle",),
        "persistence_mode": True,
    }


def _ecc(place: Place) -> Values:
    known = place.device.model.ecc
    counters = ("corrected_volatile", "uncorrected_volatile", "corrected_aggregate", "uncorrected_aggregate")
    return {
        "ecc_mode": known or None,
        **{f"ecc_{name}": 0 if known else None for name in counters},
        "retired_pages": None,  # older than all our models: they remap rows instead
        "remapped_rows": 0 if known else None,
    }


def _pcie(place: Place) -> Values:
    facts = place.device.model
    flow = node.utilization(place.node, place.device, place.clock) / 100 * _BUSY_PCIE_SHARE
    flow *= 16 * LANES_BYTES[facts.pcie_generation]
    return {"pcie_generation": facts.pcie_generation, "pcie_width": 16, "pcie_tx": flow, "pcie_rx": flow * 2.5}


def _nvlink(place: Place) -> Values:
    return {"nvlink_links": _links(place)}


def _links(place: Place) -> tuple[tuple[int, str], ...]:
    peers = [each for each in place.node.devices if each != place.device and each.model == place.device.model]
    links = place.device.model.nvlinks if peers else 0
    return tuple((link, pci_bus_id(peers[link % len(peers)])) for link in range(links))


def _nvlink_flow(place: Place) -> Values:
    busy = node.utilization(place.node, place.device, place.clock) / 100
    flow = busy * len(_links(place)) * _BUSY_LINK
    return {"nvlink_tx": flow, "nvlink_rx": flow}


_READERS: dict[str, Callable[[Place], Values]] = {
    model.MEMORY: _memory,
    model.PROCESSES: _processes,
    model.IDLE_PROCESSES: _idle_processes,
    model.UTILIZATION: _utilization,
    model.HEALTH: _health,
    model.MODEL: _model,
    model.THERMAL: _thermal,
    model.POWER: _power,
    model.CLOCKS: _clocks,
    model.ECC: _ecc,
    model.PCIE: _pcie,
    model.NVLINK: _nvlink,
    model.NVLINK_FLOW: _nvlink_flow,
}
# An instance has nothing of its own to say here, and real drivers say nothing.
_OF_THE_WHOLE = (model.POWER, model.CLOCKS, model.ECC, model.PCIE, model.NVLINK, model.NVLINK_FLOW)
# Real drivers answer NVML_ERROR_NOT_SUPPORTED to these, for the whole device and for its instances.
_NOT_WITH_MIG = ("utilization", "memory_utilization")
