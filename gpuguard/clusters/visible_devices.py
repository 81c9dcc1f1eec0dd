"""CUDA_VISIBLE_DEVICES, read as CUDA reads it.

The list ends at the first entry that names no device; -1 and the empty list leave nothing.  Indices are in PCI order:
the only order that the driver, nvidia-smi and `gpuguard run` share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuguard.model import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"


def cuda_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[tuple[str, ...], str] | None:
    """The uuids of the list, and what to tell people about it; None when the variable is not set."""
    text = environ.get(CUDA_VARIABLE)
    if text is None:
        return None
    gpus = sorted((device for device in devices if device.parent_uuid is None), key=lambda device: device.index)
    uuids: list[str] = []
    for entry in text.split(","):
        uuid = _named(entry.strip(), gpus, devices)
        if uuid is None:
            break
        if uuid in uuids:
            # CUDA takes a list that names a device twice for no list at all.
            return (), f"{CUDA_VARIABLE}={text} names a device twice, so CUDA sees none"
        uuids.append(uuid)
    return tuple(uuids), f"{CUDA_VARIABLE}={text} allows {_listed(uuids, devices)}"


def doubt(environ: Mapping[str, str], devices: Sequence[Device]) -> str:
    """Why an index of the list may mean another device, "" when it cannot."""
    entries = [entry.strip() for entry in environ.get(CUDA_VARIABLE, "").split(",")]
    same = len({device.name for device in devices if device.parent_uuid is None}) < 2
    if same or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or not any(entry.isdecimal() for entry in entries):
        return ""
    return (
        "the GPUs of this machine differ, and without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA numbers the fastest first: "
        f"here {CUDA_VARIABLE} counts in PCI order, as nvidia-smi does"
    )


def _named(entry: str, gpus: Sequence[Device], devices: Sequence[Device]) -> str | None:
    if entry.isdecimal():
        return next((device.uuid for device in gpus if str(device.index) == (entry.lstrip("0") or "0")), None)
    if not entry.upper().startswith(("GPU-", "MIG-")):
        return None
    matches = [device.uuid for device in devices if device.uuid.lower().startswith(entry.lower())]
    if not matches and entry.upper().startswith("MIG-"):
        return entry
    return matches[0] if len(matches) == 1 else None


def _listed(uuids: Sequence[str], devices: Sequence[Device]) -> str:
    indices = {device.uuid: str(device.index) for device in devices if device.parent_uuid is None}
    names = [indices.get(uuid, uuid) for uuid in uuids]
    return f"only device{'s' * (len(names) > 1)} {', '.join(names)}" if names else "no device"


# Containers: NVIDIA_VISIBLE_DEVICES says what the container runtime lets in.
#
# Only "nothing" is taken from it.  Its other values number the devices of the host, while inside the container the
# driver shows only those that were let in, numbered from 0: what is visible is the answer already.


CONTAINER_VARIABLE = "NVIDIA_VISIBLE_DEVICES"


def container_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[tuple[str, ...], str] | None:
    """No device where the container was started without; None (no opinion) elsewhere."""
    text = environ.get(CONTAINER_VARIABLE)
    if text is None or text.strip().lower() not in ("", "void", "none"):
        return None
    return (), f"{CONTAINER_VARIABLE}={text} gives no GPU to this container"
