"""Who uses AMD GPUs: the processes that KFD lists, and the clients of the DRM driver in /proc/PID/fdinfo.

Programs of ROCm have an entry in KFD, which every user may read.  Those that draw, or compute by Vulkan or OpenGL, show
only in fdinfo, where users see their own processes and root sees all of them.  To look into all processes of a machine
is expensive, so it is done only where it can matter: see AmdProcesses.look.  This module judges no list: see
drm.ProcessLists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpuguard.backends import kfd
from gpuguard.backends.drm import ClientScanner, DrmClient, NotTold
from gpuguard.backends.kfd import KfdProcesses
from gpuguard.locale.messages import sentence
from gpuguard.model import GpuProcess

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from gpuguard.backends.amd_gpus import AmdGpu

SCAN_SECONDS = 10.0  # after which all processes are looked into again, for clients that hold hardly any memory
GROWTH = 128 * 2**20  # bytes: by so much more memory that no known process explains, a new client must have come

_NO_GPU_ID = sentence("amd.no_gpu_id", "KFD does not say by which number its processes name the GPU")
_MEMORY = ("drm-resident-{}", "drm-memory-{}", "{}-mem")  # of a client; the last one is that of Linux 5.14 to 5.18
_GFX, _COMPUTE = "drm-engine-gfx", "drm-engine-compute"  # nanoseconds; an engine that was not used has no line


_NOTHING = KfdProcesses(frozenset(), {}, {})


class GpuUse(NamedTuple):
    """The processes of one GPU."""

    rows: tuple[GpuProcess, ...]  # all of them
    nodes: Mapping[int, Mapping[int, int | None]]  # gpu_id of a node -> pid -> bytes that KFD tells
    untold: str | None  # why the list cannot be had

    @property
    def memory(self) -> int:
        """The bytes that the processes explain."""
        return sum(row.memory_used or 0 for row in self.rows)


class AmdProcesses:
    """Finds the processes of GPUs again and again."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._scanner = ClientScanner(root)
        self.hidden = False  # whether this user cannot look into all processes
        # What the last look at all processes found: when it was; the bytes of each GPU that no process explained, by
        # address; and the bytes of a process, by address and pid: what KFD said, and the larger of that and of fdinfo.
        self._scanned_at = float("-inf")
        self._seen: set[str] = set()  # for which GPUs, by their addresses
        self._listed = _NOTHING
        self._unexplained: dict[str, int] = {}
        self._larger: dict[tuple[str, int], tuple[int | None, int | None]] = {}
        self._engines: dict[tuple[str, int], tuple[float, int]] = {}  # clock and nanoseconds of each client, by its key

    def look(
        self, gpus: Collection[AmdGpu], used: Mapping[str, int], clock: float, *, closely: bool
    ) -> dict[str, GpuUse]:
        """Return the use of each GPU, by its address.

        The processes that KFD lists and the known clients are read each time, where they used a GPU before.  All
        processes of the machine are looked into, for all GPUs, if *closely* says so, after SCAN_SECONDS, and when more
        memory is in use that no known process explains.

        Args:
            used: bytes in use on each GPU, by its address, where they are known.
            clock: CLOCK_BOOTTIME in seconds.
        """
        addresses = {gpu.card.address for gpu in gpus}
        everywhere = closely or clock - self._scanned_at > SCAN_SECONDS or not addresses <= self._seen
        if not everywhere:
            found, clients = self._uses(gpus, clock, everywhere=False)
            rest = _unexplained(used, found)
            everywhere = any(size > self._unexplained.get(address, 0) + GROWTH for address, size in rest.items())
        if everywhere:
            self._scanned_at, self._seen = clock, addresses
            self._larger.clear()
            found, clients = self._uses(gpus, clock, everywhere=True)
            self._unexplained = _unexplained(used, found)
        self._engines = {(client.address, client.number): (clock, _busy(client)) for client in clients}
        return found

    def _uses(
        self, gpus: Collection[AmdGpu], clock: float, *, everywhere: bool
    ) -> tuple[dict[str, GpuUse], Sequence[DrmClient]]:
        """Return the use of each GPU, by its address, and the clients that were read for it."""
        gpu_ids = {node.gpu_id for gpu in gpus for node in gpu.nodes if node.gpu_id is not None}
        listed: KfdProcesses | NotTold = _NOTHING
        try:
            if any(gpu.nodes for gpu in gpus):
                listed = kfd.processes(self._root, gpu_ids, None if everywhere else self._listed)
        except NotTold as untold:
            listed = untold
        self._listed = listed if isinstance(listed, KfdProcesses) else _NOTHING
        read = self._scanner.read(everywhere=everywhere)
        by_process: dict[str, dict[int, list[DrmClient]]] = {}
        for client in read.found:
            by_process.setdefault(client.address, {}).setdefault(client.pid, []).append(client)
        self.hidden = read.hidden
        if everywhere and isinstance(listed, KfdProcesses):
            # Of a process that only computes by ROCm, fdinfo says hardly more, and costs the kernel much.
            self._scanner.forget(listed.pids - {client.pid for client in read.found if _busy(client)})
        found = {gpu.card.address: self._use(gpu, by_process.get(gpu.card.address, {}), listed, clock) for gpu in gpus}
        return found, read.found

    def _use(
        self, gpu: AmdGpu, clients: Mapping[int, list[DrmClient]], listed: KfdProcesses | NotTold, clock: float
    ) -> GpuUse:
        known = _NOTHING if isinstance(listed, NotTold) else listed
        untold = listed.reason if isinstance(listed, NotTold) and gpu.nodes else None
        nodes: dict[int, Mapping[int, int | None]] = {}
        rows: dict[int, GpuProcess] = {}
        for pid, files in clients.items():
            # A program of ROCm opens all GPUs, and uses only those on which KFD shows memory or a queue of it.
            if pid not in known.pids or any(map(_busy, files)):
                memory = _memory(files, gpu)
                if memory != 0 or any(map(_busy, files)):
                    rows[pid] = GpuProcess(pid, memory, _kind(files), utilization=self._utilization(files, clock))
        uses: dict[int, int | None] = {}
        for gpu_id in [node.gpu_id for node in gpu.nodes]:
            if gpu_id is None:
                untold = _NO_GPU_ID
                continue
            nodes[gpu_id] = known.memory.get(gpu_id, {})
            for pid, used in nodes[gpu_id].items():
                before = uses.get(pid, 0)
                uses[pid] = None if used is None or before is None else before + used
        for pid, used in uses.items():
            rows[pid] = GpuProcess(pid, self._memory_of(gpu, pid, used, clients.get(pid, [])))
        return GpuUse(tuple(rows[pid] for pid in sorted(rows)), nodes, untold)

    def _memory_of(self, gpu: AmdGpu, pid: int, used: int | None, files: list[DrmClient]) -> int | None:
        """Return the bytes of a process that KFD lists.

        Its files of the DRM driver are not added, because KFD allocates in the address space of such a file: both count
        the same memory.  KFD leaves out what the program has besides ROCm, and all memory of the host.  Between two
        looks at all processes the larger figure counts until KFD's own falls.
        """
        key = gpu.card.address, pid
        if files:
            drawn = _memory(files, gpu)
            larger = drawn if gpu.integrated else used if used is None else max(used, drawn or 0)
            self._larger[key] = used, larger
            return larger
        then, larger = self._larger.get(key, (None, None))
        if used is None or then is None or larger is None or used < then:
            return None if gpu.integrated else used
        return max(used, larger)

    def _utilization(self, files: Iterable[DrmClient], clock: float) -> float | None:
        """Return the percent of the time since the last look in which the engines worked for a process."""
        rates = []
        for client in files:
            if before := self._engines.get((client.address, client.number)):
                seconds, nanoseconds = clock - before[0], _busy(client) - before[1]
                if seconds > 0 and nanoseconds >= 0:  # the counter may go back: drm-usage-stats.rst
                    rates.append(nanoseconds / seconds / 10**7)
        return min(sum(rates), 100.0) if rates else None


def _unexplained(used: Mapping[str, int], found: Mapping[str, GpuUse]) -> dict[str, int]:
    return {address: size - found[address].memory for address, size in used.items() if address in found}


def _busy(client: DrmClient) -> int:
    """Return the nanoseconds in which the engines that compute and draw have worked for a client."""
    return client.values.get(_GFX, 0) + client.values.get(_COMPUTE, 0)


def _kind(files: Iterable[DrmClient]) -> str:
    """Return what the clients of a process do; one that has done nothing yet will draw, as those of a desktop do."""
    draws, computes = (any(client.values.get(engine) for client in files) for engine in (_GFX, _COMPUTE))
    return "compute" if computes and not draws else "compute+graphics" if computes else "graphics"


def _memory(files: Iterable[DrmClient], gpu: AmdGpu) -> int | None:
    """Return the bytes that the clients of a process hold, those of the host included on an integrated GPU."""
    kinds = ("vram", "gtt") if gpu.integrated else ("vram",)
    sizes = [_size(client, kind) for client in files for kind in kinds]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _size(client: DrmClient, kind: str) -> int | None:
    names = (form.format(kind) for form in _MEMORY)
    return next((client.values[name] for name in names if name in client.values), None)
