"""Facts of each vendor that hold on every machine: its variables, forms of uuids, device nodes and module.

A vendor is one value here, and the field `vendor` of a device names it.  This module reads no device: see backends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, eq=False)  # each is one object, named by VENDORS
class Vendor:
    """How a vendor's driver, libraries and devices show themselves on any machine; it lacks what is not said."""

    name: str  # as Device.vendor has it
    title: str  # the beginning of the names of its models
    backend: str  # a row of backends.BACKENDS
    drivers: tuple[str, ...]  # the kernel drivers of its GPUs, as /sys/bus/pci/drivers names them
    pci_id: str  # of the vendor, as /sys has it

    visible: str  # the variable that lists the devices which a process may use, by index or uuid
    listed_uuids: str = ""  # a pattern of the uuids that this list may hold, or "" if it holds indices alone
    numbering: Mapping[str, str]  # further variables of a job, without which an index may mean another device
    # Variables that choose once more among the devices that `visible` leaves, which are numbered from 0 again.
    filters: tuple[str, ...] = ()
    # The variable that chooses once more, by runtimes, kinds and numbers of devices, or "".
    selector: str = ""
    container: str = ""  # the variable that says which devices a container runtime has let in, or ""
    uuid_prefix: str
    instance_prefix: str = ""  # of the uuids of instances, or "" if it has none
    # Its instances are partitions, of which a process can use several; otherwise it can use one, as of MIG instances.
    partitions: bool = False

    control_node: str = ""  # every process that computes has it open
    compute_node: str = ""  # opened when a process begins to compute, and by no program that only reads the driver
    device_node: str  # followed by the minor number of the device
    nodes: tuple[str, ...] = ()  # the nodes that only users of this driver have open, as globs
    may_lack_nodes: bool = False  # its programs may compute where it has no node at all, as under WSL
    major: int = 0  # of the nodes of devices, or 0 if --isolate does not know them
    last_minor: int = 0  # of a device; the nodes with higher minors are shared by all jobs
    node_maker: str = ""  # the command that makes its nodes where no program has used the driver yet, or ""
    capabilities: str = ""  # the row of /proc/devices of the nodes that let a process into an instance
    capability_node: str = ""  # followed by the minor number of such a node
    capability_minors: str = ""  # the file that says which of these nodes is which
    versions: tuple[str, ...]  # files that say the version of the loaded kernel module
    programs: tuple[str, ...]  # services and tools of the driver, as globs of their names

    tool: str  # the program of its driver that shows its GPUs
    topology_command: str  # shows how its GPUs are connected
    log_words: tuple[str, ...]  # that the lines of its driver in the kernel's log contain
    container_options: str  # with which a container gets its GPUs
    toolkit: tuple[str, str] | None = None  # what its programs compute with, and the file that says the version
    tried: bool = False  # gpuguard was tried on such hardware, not only on files of it

    def kernel_version(self, root: str = "") -> str | None:
        """Return the version of the kernel module that is loaded, "580.65.06", or None if it does not say."""
        return next(filter(None, (_version_in(root + path) for path in self.versions)), None)

    def toolkit_version(self, root: str = "") -> str | None:
        """Return the version of what its programs compute with, "ROCm 6.3.1-48", or None if it is not there."""
        version = _version_in(root + self.toolkit[1]) if self.toolkit else None
        return f"{self.toolkit[0]} {version}" if self.toolkit and version else None


def _version_in(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            words = file.readline(4096).split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


NVIDIA = Vendor(
    name="nvidia",
    title="NVIDIA",
    backend="nvml",
    drivers=("nvidia",),
    pci_id="0x10de",
    visible="CUDA_VISIBLE_DEVICES",
    listed_uuids=".+",
    numbering={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    container="NVIDIA_VISIBLE_DEVICES",
    uuid_prefix="GPU-",
    instance_prefix="MIG-",
    control_node="/dev/nvidiactl",
    compute_node="/dev/nvidia-uvm",
    device_node="/dev/nvidia",
    nodes=("/dev/nvidia*", "/dev/nvidia-caps/*"),
    may_lack_nodes=True,
    major=195,  # Documentation/admin-guide/devices.txt of Linux
    last_minor=247,  # NV_MINOR_DEVICE_NUMBER_REGULAR_MAX; 254 is nvidia-modeset, 255 nvidiactl
    node_maker="nvidia-modprobe -u -c 0",
    capabilities="nvidia-caps",
    capability_node="/dev/nvidia-caps/nvidia-cap",
    capability_minors="/proc/driver/nvidia-caps/mig-minors",  # "gpu0/gi1/ci0/access 13"
    versions=("/sys/module/nvidia/version", "/proc/driver/nvidia/version"),
    programs=(
        "nvidia-persistenced",
        "nv-hostengine",
        "nvidia-cuda-mps-*",
        "nv-fabricmanager",
        "nvidia-imex",
        "nvidia-powerd",
        "nvidia-smi",
        "dcgm*",
        "nvitop",
        "gpustat",
    ),
    tool="nvidia-smi",
    topology_command="nvidia-smi topo -m",
    log_words=("nvrm", "xid"),
    container_options="--gpus all (NVIDIA Container Toolkit)",
    tried=True,
)

MPS_SERVER = "nvidia-cuda-mps-server"  # the program

# The nodes of all GPUs of DRM drivers: /dev/dri/cardN has the minor N, /dev/dri/renderDN the minor N.
DRM_MAJOR = 226  # Documentation/admin-guide/devices.txt of Linux
DRM_NODES = "/dev/dri/*"  # as a glob

AMD = Vendor(
    name="amd",
    title="AMD",
    backend="amd",
    drivers=("amdgpu",),
    pci_id="0x1002",
    visible="ROCR_VISIBLE_DEVICES",
    listed_uuids="GPU-[0-9a-f]{16}",
    numbering={},
    filters=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),  # HIP reads all three
    container="AMD_VISIBLE_DEVICES",
    uuid_prefix="GPU-",
    instance_prefix="XCP-",
    partitions=True,
    control_node="/dev/kfd",
    compute_node="/dev/kfd",
    device_node="/dev/dri/renderD",
    nodes=("/dev/kfd",),  # its nodes in DRM_NODES say which GPU is used
    major=DRM_MAJOR,
    last_minor=2**20 - 1,
    versions=("/sys/module/amdgpu/version",),
    programs=("rdcd", "amdgpu_top", "amd_smi_exporter", "radeontop"),
    tool="rocm-smi",
    topology_command="rocm-smi --showtopo",
    log_words=("amdgpu",),
    container_options="--device /dev/kfd --device /dev/dri",
    toolkit=("ROCm", "/opt/rocm/.info/version"),
)

INTEL = Vendor(
    name="intel",
    title="Intel",
    backend="intel",
    drivers=("xe", "i915"),
    pci_id="0x8086",
    visible="ZE_AFFINITY_MASK",
    # An index means a card rather than a tile, and cards are counted by PCI address.
    numbering={"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"},
    selector="ONEAPI_DEVICE_SELECTOR",
    uuid_prefix="PCI-",  # no GPU of Intel tells a number of its own
    device_node="/dev/dri/renderD",
    major=DRM_MAJOR,
    last_minor=2**20 - 1,
    versions=("/sys/module/xe/version", "/sys/module/i915/version"),
    programs=("xpumd", "xpu-smi", "intel_gpu_top"),
    tool="xpu-smi",
    topology_command="xpu-smi topology -m",
    log_words=("xe", "i915"),
    container_options="--device /dev/dri",
)

MTHREADS = Vendor(
    name="mthreads",
    title="Moore Threads",
    backend="mthreads",
    drivers=("mtgpu",),
    pci_id="0x1ed5",
    visible="MUSA_VISIBLE_DEVICES",
    numbering={},
    container="MTHREADS_VISIBLE_DEVICES",
    uuid_prefix="GPU-",
    device_node="/dev/mtgpu.",
    nodes=("/dev/mtgpu*",),
    versions=("/sys/module/mtgpu/version",),
    programs=("mthreads-gmi",),
    tool="mthreads-gmi",
    topology_command="mthreads-gmi topo -m",
    log_words=("mtgpu",),
    container_options="--runtime mthreads --env MTHREADS_VISIBLE_DEVICES=all",
)

VENDORS = {vendor.name: vendor for vendor in (NVIDIA, AMD, INTEL, MTHREADS)}
INSTANCE_PREFIXES = tuple(vendor.instance_prefix for vendor in VENDORS.values() if vendor.instance_prefix)
# A number of 128 bits (NVIDIA, Moore Threads), one of 64 bits (AMD), or the place on the PCI bus; a partition has its
# own number behind that of its GPU.
_NUMBER, _PLACE = r"[0-9a-f]{16}", r"[0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2}-[0-7]"
_WHOLE_UUID = re.compile(
    rf"(?:GPU|MIG)-[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}"
    rf"|GPU-{_NUMBER}|PCI-{_PLACE}|XCP-(?:{_NUMBER}|{_PLACE})-[0-7]"
)
UUID_PREFIXES = tuple(dict.fromkeys(vendor.uuid_prefix for vendor in VENDORS.values())) + INSTANCE_PREFIXES


def vendor_of_model(name: str) -> str:
    """Return the name of the vendor with whose title the model *name* begins, or NVIDIA's."""
    return next((vendor.name for vendor in VENDORS.values() if name.startswith(vendor.title)), NVIDIA.name)


def is_whole_uuid(text: str) -> bool:
    """Return whether *text* is a whole uuid of a device or of an instance, and not only the beginning of one."""
    return _WHOLE_UUID.fullmatch(text) is not None


def names_instance(uuid: str) -> bool:
    """Return whether *uuid* is that of an instance, or the beginning of one, rather than of a whole device."""
    return uuid.upper().startswith(INSTANCE_PREFIXES)
