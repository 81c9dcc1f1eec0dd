"""A node that exists only in a file: for laptops, demonstrations, tests, and the rehearsal of policies.

Its processes are real processes: they register what they use, and are gone from the next sample when they are dead,
however they died.  `gpuguard sim` steers it.  It is in one directory, together with the claims on its devices, so that
they never mix with claims on real ones.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gpuguard.errors import BackendError, GpuguardError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpuguard.backends.node import Node, NodeDevice, Use
    from gpuguard.model import Device, Gap, Snapshot

DEFAULT_SPEC = "8xH100-80GB"
HANG_LOOK_SECONDS = 0.5  # how often a hanging call looks whether it still has to
_VERSIONS = ("550.54.15", "12.550.54.15", "12.4")  # driver, NVML, CUDA
_BROKEN = {"lost": ("lost", "the device is lost"), "reset": ("reset required", "the device needs a reset")}


def open(spec: str = "") -> Simulated:
    """The node in the directory *spec* (as for directory()); a node of DEFAULT_SPEC is made there if there is none."""
    from gpuguard.backends import node_file
    from gpuguard.backends.node import new_node

    place = directory(spec)
    if node_file.load(place) is None:
        node_file.create(place, lambda: new_node(DEFAULT_SPEC, place, _clock()))
    return Simulated(place)


def directory(spec: str = "") -> str:
    """The absolute path of the directory of a node; it exists afterwards.

    Args:
        spec: a directory; empty: $GPUGUARD_SIM_DIR, else gpuguard-sim in $XDG_RUNTIME_DIR, else /tmp/gpuguard-sim-UID.

    Raises:
        BackendError: it cannot be made, or it was not named and belongs to, or is open to, somebody else.
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
            raise BackendError(f"{path} is not a directory: name another one for the simulated node.") from None
    except OSError as error:
        raise BackendError(f"no directory for the simulated node: {error}.  Name one in GPUGUARD_SIM_DIR.") from None
    if not named and not _is_private(path):
        raise BackendError(f"{path} is not a directory of ours alone.  Remove it, or set GPUGUARD_SIM_DIR.")
    return path


def use(
    devices: str | Sequence[int | str] | None = None,
    memory: int = 0,
    utilization: float = 0.0,
    *,
    ramp_to: int | None = None,
    over: float = 0.0,
    lasting: float | None = None,
    kind: str = "compute",
    spec: str = "",
) -> tuple[str, ...]:
    """Let this process use devices of the simulated node from now on; a further call for a device replaces the former.

    Args:
        devices: indices and uuids; None: what CUDA_VISIBLE_DEVICES leaves.
        memory: bytes on each device.
        utilization: percent of each device.
        ramp_to: bytes that *memory* grows or shrinks to, evenly within *over* seconds.
        over: seconds.
        lasting: seconds after which the use ends; None: as long as the process lives.
        kind: compute, graphics, compute+graphics or mps.
        spec: which node, as for directory().

    Returns:
        The uuids of the devices.

    Raises:
        InvalidRequest: no such device.
        GpuguardError: a device has not that much free memory, or lets nobody in.
        BackendError: there is no node.
    """
    from dataclasses import replace

    from gpuguard.backends import node_file, processes
    from gpuguard.backends.node import Course, Use

    pid = os.getpid()
    start = processes.start_time(pid)
    uuids: tuple[str, ...] = ()

    def register(node: Node) -> Node:
        nonlocal uuids
        uuids = _chosen(node, devices)
        node, clock = settled_now(node), _clock()
        course = Course(memory, memory if ramp_to is None else ramp_to, clock, over)
        until = None if lasting is None else clock + lasting
        node = replace(node, uses=tuple(use for use in node.uses if use.pid != pid or use.device not in uuids))
        for uuid in uuids:
            _check_room(node, uuid, memory, clock)
        new = tuple(Use(uuid, pid, start or 0.0, course, utilization, kind, until) for uuid in uuids)
        return replace(node, uses=node.uses + new)

    node_file.update(directory(spec), register)
    return uuids


class Simulated:
    """The Backend.  A sampler process sets *progress* and *skip*."""

    name = "simulated"
    simulated = True

    def __init__(self, place: str) -> None:
        self.directory = place
        self.skip: set[int] = set()  # indices of devices that must not be touched
        self.progress: Callable[[int], None] = lambda index: None  # told the index of each device before it is touched

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """As Backend.sample.  HEALTH shows MIG instances: each follows its parent and has its parent's index."""
        from gpuguard import model
        from gpuguard.backends import node_reading

        # Before anything is read, so that no process that started later is taken for one that was seen.
        taken_at, clock = time.time(), _clock()
        if any(uuid.startswith("MIG-") for uuid in devices or ()):
            fields = {*fields, model.HEALTH}
        fields = set(fields) - {model.BRIEF, model.STATS}  # to leave out what costs nothing would save nothing
        node = current(self.directory)
        seen: list[Device] = []
        gaps: list[Gap] = []
        for device in node.devices:
            if devices is None or not node.of(device).isdisjoint(devices):
                shown, missing = self._read(node, device, fields)
                seen += shown
                gaps += missing
        answering = {device.uuid for device in seen if not device.problems}
        driver, nvml, cuda = _VERSIONS if model.MODEL in fields else (None, None, None)
        return model.Snapshot(
            host=os.uname().nodename,
            backend=self.name,
            taken_at=taken_at,
            clock=clock,
            devices=tuple(seen),
            gaps=tuple(gaps),
            simulated=True,
            topology=node_reading.topology(node, answering) if model.TOPOLOGY in fields else None,
            driver_version=driver,
            nvml_version=nvml,
            cuda_version=cuda,
        )

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, node: Node, device: NodeDevice, fields: Collection[str]) -> tuple[list[Device], list[Gap]]:
        if device.index in self.skip:
            return _refusing(device, "unresponsive", "a driver call did not come back", ["device"])
        self.progress(device.index)
        while "hang" in device.faults:
            time.sleep(HANG_LOOK_SECONDS)
            node = current(self.directory)
            device = next((each for each in node.devices if each.uuid == device.uuid), device)
        time.sleep(device.latency)
        for fault, (problem, reason) in _BROKEN.items():
            if fault in device.faults:
                return _refusing(device, problem, reason, fields)
        return _answering(node, device, fields)


def current(place: str) -> Node:
    """The node in *place* without its dead processes.

    Raises:
        BackendError: there is none, or its file is damaged.
    """
    from gpuguard.backends import node_file

    node = node_file.load(place)
    if node is None:
        raise BackendError(f"no simulated node is in {place}: `gpuguard sim start {DEFAULT_SPEC}` starts one.")
    if all(_is_alive(use) for use in node.uses):
        return node
    try:
        # The moment of death is noted, for whoever samples later: memory that is released with a delay, energy.
        return node_file.update(place, settled_now)
    except BackendError:
        return settled_now(node)  # somebody else's node, which we may only look at


def visible_devices(environ: Mapping[str, str]) -> str:
    """What CUDA_VISIBLE_DEVICES names, as CUDA reads it: up to its first entry that is none; ``"all"`` when not set."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return "all"
    names = []
    for name in value.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        names.append(name.strip())
    return ",".join(names)


def _chosen(node: Node, devices: str | Sequence[int | str] | None) -> tuple[str, ...]:
    from gpuguard.backends.node import find

    if devices is None:
        names = visible_devices(os.environ)
        if not names:
            raise InvalidRequest(
                "CUDA_VISIBLE_DEVICES leaves no device: name devices, or start this with `gpuguard run`."
            )
    else:
        names = devices if isinstance(devices, str) else ",".join(map(str, devices))
    first = {device.uuid: device.instances[0].uuid for device in node.devices if device.instances}
    # As CUDA does: on a divided device a process gets the first instance.
    return tuple(dict.fromkeys(first.get(uuid, uuid) for uuid in find(node, names)))


def _check_room(node: Node, uuid: str, memory: int, clock: float) -> None:
    from gpuguard.backends.node import memory_reserved, memory_total, memory_used
    from gpuguard.units import format_bytes

    device = next(device for device in node.devices if uuid in node.of(device))
    if {"lost", "reset"} & set(device.faults) or device.compute_mode == "prohibited":
        raise GpuguardError(f"device {device.index} lets no process in: `gpuguard sim show` says why.")
    if device.compute_mode == "exclusive_process" and any(use.device == uuid for use in node.uses):
        raise GpuguardError(f"device {device.index} is in exclusive_process mode and has a process already.")
    total = memory_total(node, uuid)
    free = total - memory_reserved(total) - memory_used(node, {uuid}, clock)
    if memory > free:
        raise GpuguardError(
            f"out of memory on simulated device {device.index}: "
            f"{format_bytes(memory)} wanted, {format_bytes(free)} are free."
        )


def _answering(node: Node, device: NodeDevice, fields: Collection[str]) -> tuple[list[Device], list[Gap]]:
    from gpuguard import model
    from gpuguard.backends.node_reading import Place, read

    detailed, instances = model.PROCESS_DETAILS in fields, device.instances if model.HEALTH in fields else ()
    read_now = [read(Place(node, device, part, _clock(), detailed), fields) for part in (None, *instances)]
    return [shown for shown, _ in read_now], [gap for _, gaps in read_now for gap in gaps]


def _refusing(
    device: NodeDevice, problem: str, reason: str, missing: Collection[str]
) -> tuple[list[Device], list[Gap]]:
    from gpuguard.model import Device, Gap

    broken = Device(index=device.index, uuid=device.uuid, problems=(problem,))
    return [broken], [Gap(device.uuid, name, reason) for name in sorted(missing)]


def settled_now(node: Node) -> Node:
    """*node* without its dead processes and with its energy added up to now: what each change starts from."""
    from gpuguard.backends.node import settled

    return settled(node, _clock(), _is_alive)


def _is_alive(use: Use) -> bool:
    from gpuguard.backends import processes

    try:
        state = processes.stat_fields(use.pid)[processes.STATE]
    except (FileNotFoundError, ProcessLookupError):
        return processes.alive(use.pid)  # gone, or hidden from this user (hidepid)
    # The driver takes the memory back when a process exits, not when its parent gets round to reaping it.
    return state not in (b"Z", b"X") and processes.start_time(use.pid) == use.start_time


def _default_directory() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_private(runtime):
        return os.path.join(runtime, "gpuguard-sim")
    return f"/tmp/gpuguard-sim-{os.geteuid()}"


def _is_private(path: str) -> bool:
    import stat

    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
