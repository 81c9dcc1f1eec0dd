"""Where snapshots come from, and which backends this machine needs.

Each file here that reads a kind of source is one row of BACKENDS, and has ``open(spec) -> OpenedBackend``.  Nothing
above this package knows which one it talks to.

The row "auto" has no file: it stands for the backends of all vendors whose GPUs the kernel has bound to their drivers.
To find them takes a look at a few folders of /sys and at no GPU, so that it may come before any worker starts and wakes
no device.  Beside discrete GPUs an integrated one does not count unless its vendor is named: no job is meant for it.

Facts about a vendor that hold on every machine are in vendors.  This module opens no device.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.vendors import AMD, DRM_MAJOR, INTEL, NVIDIA, VENDORS, Vendor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpuguard.model import Snapshot


class Backend(Protocol):
    """A source of snapshots, in this process or in another one."""

    name: str
    simulated: bool

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Read the machine now: *fields* are groups of model (MEMORY, PROCESSES, ...), and no call is made for others.

        *devices* are the uuids of the devices to read, all by default; a MIG instance is read with its parent.
        Raises BackendError if nothing at all can be read.  A device that fails alone is a Gap and a problem instead.
        """

    def close(self) -> None:
        """Let go of the devices until they are sampled again, which may be hours later.  Idempotent."""


@runtime_checkable
class OpenedBackend(Backend, Protocol):
    """A backend as open() of its module returns it.

    Its worker sets the attributes, so that a call that hangs costs one device.

    Attributes:
        progress: the backend calls it with the index of each device before it reads that device, and with None before
            it reads what belongs to no single device, or every 0.4 s while it reads all of them with one program.  The
            worker is abandoned if no call comes for client.DEVICE_SECONDS.
        skip: indices of devices that hang.  The backend does not touch them, and leaves them out or shows them with the
            problem "unresponsive".
        ahead: whether nothing was read yet and no device hangs, so that several devices may be read at the same time.
            A backend that reads one device after the other ignores it.
    """

    progress: Callable[[int | None], object]
    skip: Collection[int]
    ahead: bool


BACKENDS = {
    "auto": "all vendors whose GPUs are found: NVIDIA's, AMD's, Intel's, those of Moore Threads",
    "nvml": "NVIDIA's driver library, through nvidia-ml-py",
    "smi": "the program nvidia-smi, or with smi:FILE.xml what `nvidia-smi -q -x` wrote to a file",
    "amd": "AMD's GPUs as the kernel shows them in /sys and /proc, or with amd:DIR the copy of both in a directory",
    "intel": "what Linux and its drivers xe and i915 tell of Intel GPUs",
    "mthreads": "Moore Threads' driver library, through mthreads-ml-py",
    "replay": "a file of `gpuguard record`, as in replay:FILE or replay:FILE?speed=60",
    "simulated": "a node that exists only in a file: see `gpuguard sim`",
}
DEFAULT_BACKEND = "auto"
# Backends that read the kernel's files, and with a directory after the colon a tree of such files that a test wrote.
_OF_KERNEL_FILES = ("amd", "intel")
# The beginnings of backends that show a file of another time, on which nothing may be claimed or signalled.
RECORDED = ("smi:", "replay")

# What several backends say of a device, or of a field that they cannot read.
UNRESPONSIVE = sentence("problem.unresponsive", "unresponsive")
SILENT = sentence("driver.silent", "a driver call did not come back")
IS_LOST = sentence("problem.lost", "lost")
GPU_LOST = sentence("driver.gpu_lost", "the GPU is lost")
PAGES_PENDING = sentence("problem.page_retirement_pending", "page retirement pending")
COUNTED_AS_USED = sentence("driver.reserved_counts_as_used", "this driver counts it as used memory")
ECC_IS_OFF = sentence("driver.ecc_is_off", "ECC is off")
FIRST_LOOK = sentence("nvml.first_look", "a rate needs two looks")

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DISPLAY = "0x03"  # the beginning of the PCI class of each GPU


def default_backend() -> str:
    """Return the backend of a command or a program that names none: $GPUGUARD_BACKEND, else DEFAULT_BACKEND."""
    return os.environ.get("GPUGUARD_BACKEND") or DEFAULT_BACKEND


def parts_of(name: str) -> list[str]:
    """Return the backends in *name*: ``["nvml", "amd"]``.  A comma without a backend after it is part of a path."""
    return re.split(rf",(?=(?:{'|'.join(BACKENDS)})(?:[:,]|$))", name)


def is_simulated(name: str) -> bool:
    """Return whether a backend, or the first of several, shows a node that exists only in files, and its claims too."""
    kind, _colon, spec = parts_of(name)[0].partition(":")
    return kind == "simulated" or (kind in _OF_KERNEL_FILES and bool(spec))


def open_backend(name: str) -> OpenedBackend:
    """Open ``"nvml"``, ``"simulated:DIRECTORY"``, ``"smi:FILE.xml"`` ..., as in BACKENDS, in this process.

    Raises InvalidRequest if there is no such backend, and BackendError if the source cannot be reached or the backend
    lacks something of OpenedBackend.
    """
    kind, colon, spec = name.partition(":")
    if kind == DEFAULT_BACKEND:
        return open_backend(f"{backends_here()}{colon}{spec}")
    if len(parts_of(name)) > 1:
        raise InvalidRequest(
            sentence(
                "backend.several",
                "{name} is several backends, each of which needs a worker: open_worker opens them.",
                name=name,
            )
        )
    if kind not in BACKENDS:
        raise InvalidRequest(
            sentence(
                "backend.none",
                "there is no backend {kind}: choose one of {backends}.",
                kind=repr(kind),
                backends=", ".join(BACKENDS),
            )
        )
    backend = import_module(f"gpuguard.backends.{kind}").open(spec)
    if not isinstance(backend, OpenedBackend):
        raise BackendError(
            sentence(
                "backend.not_whole",
                "the backend {kind} is not whole: `Add a backend` in CONTRIBUTING.md says what it needs.",
                kind=kind,
            )
        )
    return backend


# The backends of this machine


@cache  # a machine keeps its vendors as long as a command or a job's supervisor runs
def resolved(name: str, vendor: str | None) -> str:
    """Return *name*, or for "auto" the backends of this machine, as backends_here() says for *vendor*."""
    return backends_here(vendor) if name == DEFAULT_BACKEND else name


def backends_here(wanted: str | None = None, root: str = "/") -> str:
    """Return the backends that show the GPUs of this machine: ``"nvml"``, ``"amd"`` or ``"nvml,amd"``.

    Without any GPU that is NVIDIA's: WSL shows none in /sys, and elsewhere its error says what is missing.

    Args:
        wanted: the name of a vendor whose integrated GPUs count in any case, or None.
        root: the directory in which sys and dev are.
    """
    found = [(vendor, folders) for vendor in VENDORS.values() if (folders := gpu_folders(vendor, root))]
    chosen = [vendor.name for vendor, folders in found if _is_usable(vendor, folders, root, discrete=True)]
    if found and not chosen and not _lacks_driver(NVIDIA, root):
        chosen = [vendor.name for vendor, folders in found if _is_usable(vendor, folders, root)]
    backends = [vendor.backend for vendor, _ in found if vendor.name in (*chosen, wanted)]
    return ",".join(backends or [NVIDIA.backend])


def gpu_folders(vendor: Vendor, root: str = "/") -> list[str]:
    """Return the folders of /sys of the GPUs that are bound to a driver of *vendor*."""
    drivers = [os.path.join(root, "sys/bus/pci/drivers", driver) for driver in vendor.drivers]
    return [f"{driver}/{name}" for driver in drivers for name in _names(driver) if _ADDRESS.fullmatch(name)]


def is_integrated(vendor: Vendor, folder: str) -> bool:
    """Return whether the GPU is part of the CPU, by its folder in /sys, which the kernel fills without waking it."""
    if vendor is INTEL:
        return os.path.basename(folder).startswith("0000:00:02.")  # where each of Intel's CPUs has it
    if vendor is AMD:
        # The driver gives every discrete GPU one of the two, and an integrated one neither: amdgpu_pm.c.
        return not os.path.exists(f"{folder}/mem_busy_percent") and not _text(f"{folder}/unique_id")
    return False


def _is_usable(vendor: Vendor, folders: list[str], root: str, *, discrete: bool = False) -> bool:
    """Return whether programs can open one of the GPUs, and with *discrete* one that is not integrated."""
    kind = [folder for folder in folders if not (discrete and is_integrated(vendor, folder))]
    return any(_has_node(vendor, folder, root) for folder in kind)


def _has_node(vendor: Vendor, folder: str, root: str) -> bool:
    """Return whether the GPU has a device node: /sys shows a container all GPUs of its host, /dev only its own."""
    if vendor.major != DRM_MAJOR:
        return True  # its driver makes the nodes when they are first needed
    nodes = (name for name in _names(f"{folder}/drm") if name.startswith("renderD"))
    return any(os.path.exists(os.path.join(root, "dev/dri", name)) for name in nodes)


def _lacks_driver(vendor: Vendor, root: str) -> bool:
    """Return whether a GPU of *vendor* has no driver of its own: a fault that no integrated GPU may hide."""
    devices = os.path.join(root, "sys/bus/pci/devices")
    return any(
        _text(f"{devices}/{name}/vendor") == vendor.pci_id and _text(f"{devices}/{name}/class").startswith(_DISPLAY)
        for name in _names(devices)
    )


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""
