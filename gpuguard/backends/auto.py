"""Which backends show this machine: those of all vendors whose GPUs the kernel has bound to their drivers.

It reads a few folders of /sys and no GPU, so that it may run before any worker starts and wakes no device.  Beside
discrete GPUs an integrated one does not count unless its vendor is named: no job is meant for it.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import TYPE_CHECKING

from gpuguard.backends import BACKENDS, DEFAULT_BACKEND, open_backend
from gpuguard.vendors import AMD, DRM_MAJOR, INTEL, NVIDIA, VENDORS, Vendor

if TYPE_CHECKING:
    from gpuguard.backends import OpenedBackend

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DISPLAY = "0x03"  # the beginning of the PCI class of each GPU


def open(spec: str = "") -> OpenedBackend:
    """Open the one backend of this machine in this process.  Raises InvalidRequest if it has several."""
    return open_backend(f"{backends_here()}:{spec}" if spec else backends_here())


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
    """Return the folders of /sys of the GPUs that are bound to a driver of *vendor*, or [] without a backend for it."""
    if vendor.backend not in BACKENDS:
        return []
    folders = []
    for driver in vendor.drivers:
        folder = os.path.join(root, "sys/bus/pci/drivers", driver)
        folders += [f"{folder}/{name}" for name in _names(folder) if _ADDRESS.fullmatch(name)]
    return folders


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
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 64).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
    except OSError:
        return ""
