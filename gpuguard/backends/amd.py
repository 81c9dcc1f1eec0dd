"""AMD's GPUs, as the kernel shows them in /sys and /proc: no library of ROCm is needed, and no GPU is woken.

With `amd:DIR` the files below DIR are read instead of those of this machine; their pids are those of this machine.
A partition of a GPU (XCP) is an instance: what is known only of the whole GPU is a gap there.  Untried on hardware: it
follows the kernel's sources and what others have captured.  See amd_gpus for which GPUs there are, amd_fields for what
is read of each, and amd_processes for who uses them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from itertools import combinations
from typing import TYPE_CHECKING, Any

from gpuguard import model
from gpuguard.backends import GPU_LOST, IS_LOST, SILENT, UNRESPONSIVE, amd_gpus, dmem
from gpuguard.backends.amd_fields import ROWS, read_link_of_slot, read_memory, read_model, read_problems
from gpuguard.backends.amd_processes import AmdProcesses
from gpuguard.backends.drm import (
    CardReading,
    NotTold,
    ProcessLists,
    connections,
    groups_read,
    read_or,
    read_rows,
    snapshot_of,
)
from gpuguard.device_state import idle_limit
from gpuguard.errors import BackendError
from gpuguard.locale.messages import sentence
from gpuguard.model import DEVICE_FIELDS, OF_THE_BOARD, Device, DeviceAndGaps, Gap, GpuProcess, Snapshot
from gpuguard.procfs import boot_clock
from gpuguard.vendors import AMD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gpuguard.backends.amd_gpus import AmdGpu
    from gpuguard.backends.amd_processes import GpuUse
    from gpuguard.backends.kfd import KfdNode

_MODES = ("dpx", "tpx", "qpx", "cpx")  # of a GPU that is divided into partitions
# The groups for which the memory is read: whether a list of processes can be true shows by it.
_WITH_MEMORY = frozenset({model.MEMORY, model.PROCESSES})

_SKIPPED = (UNRESPONSIVE, SILENT, ["device"])
_UNNAMED = sentence("problem.unnamed", "its uuid cannot be read")
_OF_THE_WHOLE = sentence("amd.of_the_whole", "told only for the whole GPU")
_UNEXPLAINED = sentence(
    "amd.unexplained", "the GPU has memory in use that no process explains, and it may lie in any partition"
)
_HIDDEN = sentence("amd.hidden", "only root can see those that draw, or compute without ROCm")


def open(spec: str = "") -> Amd:
    """Open the GPUs of this machine, or those of the files in the directory *spec*.  Raises BackendError."""
    if spec and not os.path.isdir(spec):
        raise BackendError(sentence("amd.no_directory", "there is no directory {path}.", path=spec))
    return Amd(os.path.abspath(spec) if spec else "")


class Amd:
    """A Backend.  *root* is the directory in which its files lie, or "" for this machine."""

    name = "amd"

    def __init__(self, root: str) -> None:
        self._root = root
        self.simulated = bool(root)
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self.ahead = False
        self._state: object = None
        self._gpus: tuple[AmdGpu, ...] = ()
        self._indices: dict[str, int] = {}  # by the address of the GPU
        self._processes = AmdProcesses(root)
        self._lists = ProcessLists()
        self._find()

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does.  HEALTH shows partitions, which follow their GPU and have its index."""
        # Read before any file, so that nothing that started later is taken for something that was seen.
        taken_at, clock = time.time(), boot_clock()
        fields = groups_read(fields, devices)
        if model.IDLE_PROCESSES in fields:
            fields.add(model.PROCESSES)  # what KFD lists costs little
        self._find()
        wanted = [gpu for gpu in self._gpus if devices is None or not gpu.uuids.isdisjoint(devices)]
        readings = {gpu: self._read(gpu, fields) for gpu in wanted if gpu.index not in self.skip and not gpu.is_lost}
        uses = self._uses(readings, clock, closely=devices is not None)
        families = [self._family(gpu, fields, readings.get(gpu), uses.get(gpu.card.address)) for gpu in wanted]
        found = [
            read
            for family in families
            if devices is None or any(device.uuid in devices for device, _ in family)
            for read in family
        ]
        gaps = [*_hidden(dmem.held(self._root), uses, wanted)] if uses and self._processes.hidden else []
        topology = None
        if model.TOPOLOGY in fields:
            topology, missing = connections({gpu.uuid: gpu.card for gpu in readings}, _by_fabric(list(readings)))
            gaps += missing
        version = read_or(f"{self._root}/sys/module/amdgpu/version") if model.MODEL in fields else ""
        return snapshot_of(self, (taken_at, clock), found, gaps, topology=topology, driver_version=version or None)

    def close(self) -> None:
        """Do nothing, because nothing is held."""

    def _find(self) -> None:
        """Find the GPUs anew if any may have come or gone.  One that was there before stays, as a lost one."""
        state = amd_gpus.state(self._root)
        if state == self._state and not any(gpu.unnamed for gpu in self._gpus):
            return
        known = {gpu.index: gpu for gpu in self._gpus if gpu.is_lost}
        try:
            known |= {gpu.index: gpu for gpu in amd_gpus.find(self._root, self._indices)}
        except BackendError:
            if not known:
                raise
        self._state, self._gpus = state, tuple(known[index] for index in sorted(known))

    def _read(self, gpu: AmdGpu, fields: Collection[str]) -> CardReading:
        """Read all that is wanted of a GPU but its processes, for which its memory is read as well."""
        self.progress(gpu.index)
        gpu.files.sensors.check()
        reading = CardReading(gpu.uuid, fields, asleep=gpu.card.asleep)
        if not _WITH_MEMORY.isdisjoint(fields):
            read_memory(reading, gpu.files)
        if model.MODEL in fields:
            read_model(reading, gpu.files)
        read_rows(reading, ROWS, gpu.files)
        if model.PCIE in fields:
            read_link_of_slot(reading, gpu.files)
        if model.HEALTH in fields:
            read_problems(reading, gpu.files)
            reading.values["asleep"] = reading.asleep
            reading.values["mig_mode"] = _mode(gpu) is not None
        if gpu.unnamed:
            reading.problems.append(_UNNAMED)
            reading.gap("uuid", gpu.unnamed)
        return reading

    def _uses(self, readings: Mapping[AmdGpu, CardReading], clock: float, *, closely: bool) -> dict[str, GpuUse]:
        """Return the use of the GPUs, by address, where it is wanted.  The memory of partitions follows from it."""
        gpus = [
            gpu
            for gpu, reading in readings.items()
            if model.PROCESSES in reading.fields or (model.MEMORY in reading.fields and reading.values.get("mig_mode"))
        ]
        if not gpus:
            return {}
        self.progress(None)
        known = {gpu.card.address: readings[gpu].values.get("memory_used") for gpu in gpus}
        used = {address: size for address, size in known.items() if isinstance(size, int)}
        return self._processes.look(gpus, used, clock, closely=closely)

    def _family(
        self, gpu: AmdGpu, fields: Collection[str], reading: CardReading | None, use: GpuUse | None
    ) -> list[DeviceAndGaps]:
        """Return a GPU and its partitions."""
        if reading is None:
            problem, reason, missing = (IS_LOST, GPU_LOST, sorted(fields)) if gpu.is_lost else _SKIPPED
            device = Device(
                gpu.index, gpu.uuid, vendor=AMD.name, ordinal=_ordinal(gpu, gpu.ordinal), problems=(problem,)
            )
            return [(device, [Gap(gpu.uuid, name, reason) for name in missing])]
        if use is not None:
            # An empty list proves nothing where neither the processes of others nor the memory in use can be seen.
            unseen = self._processes.hidden and not use.rows and "memory_used" not in reading.values
            self._list(reading, use.rows, use.untold or (_HIDDEN if unseen else None))
        reading.close()
        family = [(_device(gpu, reading, ordinal=_ordinal(gpu, gpu.ordinal)), reading.gaps)]
        if reading.values.get("mig_mode"):
            family += [self._partition(gpu, node, reading, use) for node in gpu.nodes]
        return family

    def _partition(self, gpu: AmdGpu, node: KfdNode, whole: CardReading, use: GpuUse | None) -> DeviceAndGaps:
        reading = CardReading(gpu.uuid_of(node), whole.fields, whole.asleep, problems=whole.problems)
        reading.values = {name: whole.values[name] for name in (*OF_THE_BOARD, "name") if name in whole.values}
        reading.gaps = [Gap(reading.uuid, gap.field, gap.reason) for gap in whole.gaps if gap.field in OF_THE_BOARD]
        if model.MODEL in whole.fields:
            reading.set("minor_number", lambda: node.render_minor)
        reading.set("memory_total", lambda: node.memory)
        if use is not None:
            own, of_whole = use.nodes.get(node.gpu_id or 0, {}), whole.values.get("memory_used")
            untold = use.untold or _fault(use, of_whole)
            if untold is None:
                reading.set("memory_used", lambda: _used(own.values(), use, of_whole))
            if node.memory is not None and isinstance(used := reading.values.get("memory_used"), int):
                reading.values["memory_free"] = max(0, node.memory - used)
            self._list(reading, [GpuProcess(pid, size) for pid, size in own.items()], untold)
        reading.close(_OF_THE_WHOLE)
        device = _device(
            gpu,
            reading,
            ordinal=_ordinal(gpu, node.position),
            parent_uuid=gpu.uuid,
            mig_profile=_mode(gpu) or None,
            gpu_instance_id=node.partition,
        )
        return device, reading.gaps

    def _list(self, reading: CardReading, rows: Sequence[GpuProcess], untold: str | None) -> None:
        if untold is not None:
            reading.gap("processes", untold)
        elif model.PROCESSES in reading.fields:
            self._lists.read(reading, rows)


def _mode(gpu: AmdGpu) -> str | None:
    """Return the mode of a GPU that is divided, "" if it does not tell it, or None if it is whole."""
    mode = read_or(f"{gpu.card.device}/current_compute_partition").lower() if gpu.nodes else ""
    return mode if mode in _MODES else "" if len(gpu.nodes) > 1 else None


def _ordinal(gpu: AmdGpu, number: int) -> int | None:
    return None if number == gpu.index else number


def _device(gpu: AmdGpu, reading: CardReading, **identity: Any) -> Device:
    """Return the device with the values of the wanted groups, and keep only their gaps."""
    fields = reading.fields

    def is_wanted(name: str) -> bool:
        return name not in DEVICE_FIELDS or DEVICE_FIELDS[name].group in fields

    reading.gaps = [gap for gap in reading.gaps if is_wanted(gap.field)]
    values: dict[str, Any] = {name: value for name, value in reading.values.items() if is_wanted(name)}
    problems = tuple(reading.problems) if model.HEALTH in fields or reading.problems else None
    return Device(gpu.index, reading.uuid, vendor=AMD.name, problems=problems, **identity, **values)


def _hidden(held: Mapping[str, Mapping[str, int]], addresses: Collection[str], gpus: Iterable[AmdGpu]) -> Iterator[Gap]:
    """Yield why the processes of others are unknown: for all GPUs together, or with who holds memory of each."""
    if not held:
        yield Gap(None, "processes of other users", _HIDDEN)
        return
    for gpu in gpus:
        if (address := gpu.card.address) in addresses:
            yield Gap(gpu.uuid, "processes of other users", dmem.with_holders(_HIDDEN, held.get(address, {})))


# The memory of a partition


def _fault(use: GpuUse, used: object) -> str | None:
    """Return why nothing is known of the memory and the processes of single partitions, or None.

    KFD alone tells what lies in which partition.  The kernel keeps something for each process besides what KFD counts,
    up to a fifth of it.  If the GPU has much more in use than that explains, it is memory without a process, or of one
    that does not use KFD, and it may lie in any partition.
    """
    listed = _listed(use)
    if not isinstance(used, int) or listed is None:
        return _OF_THE_WHOLE
    return _UNEXPLAINED if used - listed > idle_limit(None) + listed // 4 else None


def _used(own: Iterable[int | None], use: GpuUse, used: object) -> int:
    """Return the bytes in use on a partition whose processes have *own*.  Raises NotTold if they may hold more."""
    listed = sum(size or 0 for size in own)
    if listed and isinstance(used, int) and used - (_listed(use) or 0) > idle_limit(None):
        raise NotTold(_UNEXPLAINED)
    return listed


def _listed(use: GpuUse) -> int | None:
    sizes = [size for sizes in use.nodes.values() for size in sizes.values()]
    return None if None in sizes else sum(size or 0 for size in sizes)


# How GPUs are connected


def _by_fabric(gpus: Sequence[AmdGpu]) -> set[frozenset[str]]:
    """Return the uuids of each two GPUs that XGMI (Infinity Fabric) connects: they read each other's memory over it."""
    found = set()
    for one, other in combinations(gpus, 2):
        if {node.number for node in other.nodes} & {number for node in one.nodes for number in node.neighbours}:
            found.add(frozenset((one.uuid, other.uuid)))
    return found
