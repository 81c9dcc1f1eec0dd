"""Trees of files as the kernel shows AMD GPUs: /sys/class/drm, hwmon, KFD and /proc, with the links of a real sysfs.

tree = AmdTree(tmp_path, MI300X, MI300X)
tree.computes(0, os.getpid(), vram=GIB)
snapshot = amd.open(str(tree.root)).sample(ALL_FIELDS)
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

GIB = 2**30
MIB = 2**20
EDGE, JUNCTION, MEM = "edge", "junction", "mem"


@dataclass(frozen=True)
class TreeGpu:
    """A GPU: the facts from which its files are written."""

    device: str  # PCI id
    vram: int = 16 * GIB
    used: int = 24 * MIB
    gtt: int = 128 * GIB
    gtt_used: int = 16 * MIB
    unique_id: int | None = None  # None: there is no such file
    kfd: bool = True
    fabric: int | None = None  # the hive of GPUs that XGMI joins
    modes: str = ""  # compute partitions that it knows
    mode: str = ""
    partitions: int = 1
    xcps: int = 0  # cards of partitions, most of which are dead
    integrated: bool = False
    load: int | None = 0
    memory_load: int | None = 0
    power: str | None = "average"
    temperatures: Mapping[str, tuple[int, int, int]] = field(
        default_factory=lambda: {EDGE: (35, 100, 105), JUNCTION: (40, 110, 115), MEM: (44, 100, 105)}
    )
    fan: bool = True
    ras: bool = False
    switch: bool = False  # on the card
    status: str = "active"
    address: str = ""  # on the PCI bus; "": by its index
    bridge: str = ""  # the folder above it, below /sys/devices
    name: str = ""


MI100 = TreeGpu("738c", 32 * GIB, unique_id=0x00A1B2C3D4E5F607, fabric=1, fan=False, ras=True)
MI210 = TreeGpu("740f", 64 * GIB, unique_id=0x1122334455667788, fan=False, ras=True, name="AMD Instinct MI210")
MI250 = TreeGpu("740c", 64 * GIB, unique_id=0x2122334455667788, fabric=2, fan=False, ras=True)
MI300X = TreeGpu(
    "74a1", 192 * GIB, 297 * MIB, unique_id=0xE3AA140F9A5F9E31, fabric=3, modes="SPX, DPX, CPX", mode="SPX", xcps=7,
    power="input", fan=False, ras=True, temperatures={JUNCTION: (45, 100, 105), MEM: (40, 105, 110)},
    name="AMD Instinct MI300X OAM",
)  # fmt: skip
MI300X_DPX = replace(MI300X, mode="DPX", partitions=2)
MI300X_CPX = replace(MI300X, mode="CPX", partitions=8)
MI300A = replace(MI300X, device="74a0", vram=128 * GIB, modes="SPX, TPX, CPX", name="AMD Instinct MI300A")
MI325X = replace(MI300X, device="74a5", vram=256 * GIB, name="AMD Instinct MI325X")
MI355X = replace(MI300X, device="75a3", vram=288 * GIB, used=283 * MIB, name="AMD Instinct MI355X")
VEGA10 = TreeGpu("6860", unique_id=0xC34E5A1B2C3D4E5C, memory_load=None, switch=True)
POLARIS = TreeGpu("67df", 8 * GIB, temperatures={EDGE: (38, 94, 0)})
NAVI10 = TreeGpu("731f", 8 * GIB, switch=True)
NAVI21 = TreeGpu("73bf", unique_id=0x946D7E1EF9B172DD, switch=True)
NAVI31 = TreeGpu("744c", 24 * GIB, unique_id=0x0000000000ABCDEF, switch=True)
NAVI48 = TreeGpu("7550", unique_id=0x3122334455667788, switch=True)
OLD = TreeGpu(
    "6617", 2 * GIB, kfd=False, load=None, memory_load=None, power=None, temperatures={EDGE: (33, 120, 0)}
)  # Oland
PHOENIX = TreeGpu(
    "15bf", 4 * GIB, 600 * MIB, 31 * GIB, unique_id=0, integrated=True, memory_load=None, fan=False,
    temperatures={EDGE: (41, 0, 0)},
)  # fmt: skip
STRIX_HALO = replace(PHOENIX, device="1586", vram=GIB // 2, used=GIB // 2, gtt=110 * GIB, unique_id=None)
ASLEEP = replace(NAVI21, status="suspended")

HOST_MEMORY = 128 * GIB


class AmdTree:
    """The files of a machine with these GPUs, in this order on the PCI bus."""

    def __init__(self, root: Path, *gpus: TreeGpu, kfd: bool = True, cpus: int = 1, minors: int = 64) -> None:
        self.root, self.gpus = root, list(gpus)
        self.devices: list[Path] = []  # the folder of each PCI device
        self.gpu_ids: list[list[int]] = []  # of the nodes of each GPU
        self.topology = root / "sys/class/kfd/kfd/topology"
        self._minor = self._node = 0
        self._minors = minors
        self._hives: dict[int, list[int]] = {}
        (root / "sys/class/drm").mkdir(parents=True)
        put(root / "sys/module/amdgpu/version", "6.16.6")
        put(root / "proc/meminfo", f"MemTotal:       {HOST_MEMORY // 1024} kB\nMemAvailable:   {GIB * 96 // 1024} kB")
        (root / "proc/1").mkdir()
        if kfd:
            put(self.topology / "generation_id", "2")
            (root / "sys/class/kfd/kfd/proc").mkdir()
            for _ in range(cpus):
                self._write_node({"cpu_cores_count": 64, "simd_count": 0, "location_id": 0, "drm_render_minor": 0}, 0)
        for index, gpu in enumerate(gpus):
            self._write_gpu(index, gpu, kfd=kfd and gpu.kfd)
        for hive in self._hives.values():
            for node in hive:
                for number, other in enumerate(other for other in hive if other != node):
                    link = {"type": 11, "node_from": node, "node_to": other, "weight": 15}
                    put_facts(self.topology / f"nodes/{node}/io_links/{number}/properties", link)

    def hwmon(self, index: int) -> Path:
        return self.devices[index] / f"hwmon/hwmon{index + 3}"

    def uuid(self, index: int) -> str:
        return f"GPU-{self.unique_id(index):016x}"

    def unique_id(self, index: int) -> int:
        own = self.gpus[index].unique_id
        assert own
        return own + index

    def computes(self, index: int, pid: int, vram: int = GIB, node: int = 0, queues: int = 1) -> Path:
        """A process uses a GPU, or one of its partitions, by ROCm; returns its entry in KFD."""
        entry = self.root / f"sys/class/kfd/kfd/proc/{pid}"
        for gpu_id in (gpu_id for nodes in self.gpu_ids for gpu_id in nodes):
            if not (entry / f"vram_{gpu_id}").exists():
                put(entry / f"vram_{gpu_id}", "0")
                put(entry / f"sdma_{gpu_id}", "0")
        own = self.gpu_ids[index][node]
        put(entry / f"vram_{own}", str(vram))
        for queue in range(queues):
            put(entry / f"queues/{own}{queue}/gpuid", str(own))
        if vram:
            self.uses(index, self.gpus[index].used + vram)
        return entry

    def draws(self, index: int, pid: int, *lines: str, client: int = 7, number: int = 5) -> Path:
        """A process has the render node of a GPU open; returns its fdinfo."""
        address = self.devices[index].name
        head = ("pos:\t0", "drm-driver:\tamdgpu", f"drm-client-id:\t{client}", f"drm-pdev:\t{address}")
        path = self.root / f"proc/{pid}/fdinfo/{number}"
        put(path, "\n".join((*head, *lines)))
        link = self.root / f"proc/{pid}/fd/{number}"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/dri/renderD128")
        return path

    def uses(self, index: int, memory: int) -> None:
        put(self.devices[index] / "mem_info_vram_used", str(memory))
        self.gpus[index] = replace(self.gpus[index], used=memory)

    def lose(self, index: int) -> None:
        """A GPU falls off the bus."""
        for link in (self.root / "sys/class/drm").iterdir():
            if self.devices[index].name in os.readlink(link):
                link.unlink()
        shutil.rmtree(self.devices[index])

    def _write_gpu(self, index: int, gpu: TreeGpu, *, kfd: bool) -> None:
        address = gpu.address or f"0000:{3 + 0x20 * index:02x}:00.0"
        domain = address[:4]
        above = self.root / "sys/devices" / (gpu.bridge or f"pci{domain}:00/{domain}:00:{index + 1:02x}.0")
        if gpu.switch:
            above = above / f"{domain}:01:00.0"
            put(above / "vendor", "0x1002")
            put(above / "device", "0x1478")
            put(above / "current_link_speed", "16.0 GT/s PCIe")
            put(above / "current_link_width", "8")
            above = above / f"{domain}:02:00.0"
        device = above / address
        device.mkdir(parents=True)
        self.devices.append(device)
        link(device / "driver", self.root / "sys/bus/pci/drivers/amdgpu")
        link(self.root / f"sys/bus/pci/drivers/amdgpu/{address}", device)
        put_facts(
            device / "uevent",
            {"DRIVER": "amdgpu", "PCI_ID": f"1002:{gpu.device.upper()}", "PCI_SLOT_NAME": address},
            "=",
        )
        for name, text in self._files(index, gpu).items():
            put(device / name, text)
        render = self._card(device)
        minors = [
            render,
            *(self._card(self.root / f"sys/devices/platform/amdgpu_xcp.{self._minor}") for _ in range(gpu.xcps)),
        ]
        self.gpu_ids.append([])
        for number, minor in zip(range(gpu.partitions if kfd else 0), minors, strict=False):
            if minor >= 128 + self._minors:
                break  # the kernel makes no node for a partition without a card
            bus, slot, function = (int(part, 16) for part in re.split("[:.]", address)[1:])
            facts = {
                "cpu_cores_count": 0,
                "simd_count": 1216 // gpu.partitions,
                "vendor_id": 4098,
                "device_id": int(gpu.device, 16),
                "location_id": bus << 8 | slot << 3 | function | number,
                "domain": int(domain, 16),
                "drm_render_minor": minor,
                "hive_id": gpu.fabric or 0,
                "local_mem_size": 0,
                "unique_id": gpu.unique_id + index if gpu.unique_id else 0,
            }
            gpu_id = 1000 + 37 * self._node
            self.gpu_ids[-1].append(gpu_id)
            memory = gpu.gtt if gpu.integrated else gpu.vram // gpu.partitions
            node = self._write_node(facts, gpu_id, memory)
            if gpu.fabric and number == 0:  # a real one has 63 links for each of 64 partitions
                self._hives.setdefault(gpu.fabric, []).append(node)

    def _card(self, device: Path) -> int:
        """Give a device a card and a render node."""
        number, self._minor = self._minor, self._minor + 1
        for name in (f"card{number}", f"renderD{128 + number}"):
            folder = device / "drm" / name
            folder.mkdir(parents=True)
            link(folder / "device", device)
            link(self.root / "sys/class/drm" / name, folder)
        (device / f"drm/card{number}/card{number}-DP-1").mkdir()
        link(self.root / f"sys/class/drm/card{number}-DP-1", device / f"drm/card{number}/card{number}-DP-1")
        return 128 + number

    def _write_node(self, facts: Mapping[str, object], gpu_id: int, memory: int = 0) -> int:
        number, self._node = self._node, self._node + 1
        folder = self.topology / f"nodes/{number}"
        put_facts(folder / "properties", facts)
        put(folder / "gpu_id", str(gpu_id))
        if memory:
            put_facts(folder / "mem_banks/0/properties", {"heap_type": 1, "size_in_bytes": memory})
            link_to_cpu = {"type": 2, "node_from": number, "node_to": 0, "weight": 20}
            put_facts(folder / "io_links/99/properties", link_to_cpu)
        return number

    def _files(self, index: int, gpu: TreeGpu) -> dict[str, str]:
        """The files of a PCI device and of its sensors."""
        sensors = f"hwmon/hwmon{index + 3}"
        files: dict[str, object] = {
            "mem_info_vram_total": gpu.vram,
            "mem_info_vram_used": gpu.used,
            "mem_info_gtt_total": gpu.gtt,
            "mem_info_gtt_used": gpu.gtt_used,
            "power/runtime_status": gpu.status,
            "numa_node": index % 2 if index > 1 else 0,
            "local_cpulist": "0-63",
            "product_name": gpu.name,
            "current_link_speed": "32.0 GT/s PCIe",
            "current_link_width": 16,
            "pp_dpm_sclk": "0: 500Mhz\n1: 1132Mhz *\n2: 2100Mhz",
            "pp_dpm_mclk": "0: 900Mhz \n1: 1300Mhz *",
            "hwmon/hwmon1/name": "nvme",
            f"{sensors}/name": "amdgpu",
            f"{sensors}/freq1_label": "sclk",
            f"{sensors}/freq1_input": 1_132_000_000,
        }
        if gpu.unique_id is not None:
            files["unique_id"] = f"{gpu.unique_id + index:016x}" if gpu.unique_id else ""
        if gpu.load is not None:
            files["gpu_busy_percent"] = gpu.load
        if gpu.memory_load is not None:
            files["mem_busy_percent"] = gpu.memory_load
        if gpu.modes:
            files |= {"current_compute_partition": gpu.mode, "available_compute_partition": gpu.modes}
        if not gpu.integrated:
            files |= {f"{sensors}/freq2_label": "mclk", f"{sensors}/freq2_input": 1_300_000_000}
        for number, (label, (now, slow, stop)) in enumerate(
            gpu.temperatures.items(), 1 + (EDGE not in gpu.temperatures)
        ):
            files |= {f"{sensors}/temp{number}_label": label, f"{sensors}/temp{number}_input": now * 1000}
            files |= {f"{sensors}/temp{number}_crit": slow * 1000, f"{sensors}/temp{number}_emergency": stop * 1000}
            files[f"{sensors}/temp{number}_crit_hyst"] = -273150
        if gpu.power:
            files |= {f"{sensors}/power1_label": "PPT", f"{sensors}/power1_{gpu.power}": 90_000_000}
            files |= {} if gpu.integrated else {f"{sensors}/power1_cap": 300_000_000}
        if gpu.fan:
            files |= {f"{sensors}/pwm1": 51, f"{sensors}/fan1_input": 900, f"{sensors}/fan1_max": 3300}
        if gpu.ras:
            files |= {"ras/features": "feature mask: 0x7fff", "ras/gpu_vram_bad_pages": ""}
            files |= {f"ras/{block}_err_count": "ue: 0\nce: 3" for block in ("umc", "gfx", "sdma")}
        return {name: str(text) for name, text in files.items()}


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n" if text else "", encoding="utf-8")
    return path


def put_facts(path: Path, facts: Mapping[str, object], between: str = " ") -> Path:
    return put(path, "\n".join(f"{key}{between}{value}" for key, value in facts.items()))


def link(path: Path, target: Path) -> None:
    """A relative link that ends with the name of its target, as those of sysfs do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    path.symlink_to(f"{os.path.relpath(target.parent, path.parent)}/{target.name}")
