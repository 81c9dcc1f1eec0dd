"""CUDA_VISIBLE_DEVICES and its kin, read as CUDA reads them, and written.

A list ends at its first entry that names no device; -1, the empty list and a device named twice leave nothing.  Indices
are in PCI order: the only order that the driver, nvidia-smi and `gpuguard run` share.  Of NVIDIA_VISIBLE_DEVICES, by
which a container runtime is told what to let in, only "nothing" counts: inside the container what is visible is the
answer already.  Does not read the real environment: it is an argument.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from gpuguard.model import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CUDA_VARIABLE, ORDER_VARIABLE, CONTAINER_VARIABLE = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip
PCI_ORDER = "PCI_BUS_ID"

Opinion = tuple[tuple[str, ...], str]  # uuids that are allowed, and why, for people


def variables(names: Iterable[object]) -> dict[str, str]:
    """The variable that leaves the devices with these indices or uuids to CUDA, in this order."""
    return {CUDA_VARIABLE: ",".join(map(str, names))}


def environment_of(devices: Sequence[Device], *, by_uuid: bool = False) -> dict[str, str]:
    """The variables that leave *devices* to CUDA: by index, but MIG instances, which have none, by uuid."""
    return {ORDER_VARIABLE: PCI_ORDER, **variables(names_of(devices, by_uuid=by_uuid))}


def names_of(devices: Sequence[Device], *, by_uuid: bool = False) -> list[str]:
    """The entries of such a list."""
    by_uuid = by_uuid or any(device.parent_uuid for device in devices)
    return [device.uuid if by_uuid else str(device.index) for device in devices]


def is_restricted(environ: Mapping[str, str]) -> bool:
    """Whether there is a list, be it empty."""
    return CUDA_VARIABLE in environ


def entries(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What the list names, as it is written, up to its first empty entry."""
    words = (entry.strip() for entry in environ.get(CUDA_VARIABLE, "").split(","))
    return tuple(takewhile(bool, words))


def visible_uuids(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[str, ...] | None:
    """The uuids that the list leaves; None when there is no list.

    The uuid of a MIG instance is believed even when *devices* do not contain it.
    """
    opinion = cuda_devices(environ, devices)
    return None if opinion is None else opinion[0]


def cuda_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> Opinion | None:
    """The uuids that the list leaves, and what to tell people about it; None (no opinion) when there is no list."""
    text = environ.get(CUDA_VARIABLE)
    if text is None:
        return None
    gpus = [device for device in devices if device.parent_uuid is None]
    uuids: list[str] = []
    for entry in text.split(","):
        uuid = _uuid_of(entry.strip(), gpus, devices)
        if uuid is None:
            break
        if uuid in uuids:
            return (), f"{CUDA_VARIABLE}={text} names a device twice, so CUDA sees none"
        uuids.append(uuid)
    indices = {device.uuid: str(device.index) for device in gpus}
    names = [indices.get(uuid, uuid) for uuid in uuids]
    allowed = f"only device{'s' * (len(names) > 1)} {', '.join(names)}" if names else "no device"
    return tuple(uuids), f"{CUDA_VARIABLE}={text} allows {allowed}"


def container_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> Opinion | None:
    """No device where the container was started without; None (no opinion) elsewhere."""
    text = environ.get(CONTAINER_VARIABLE)
    if text is None or text.strip().lower() not in ("", "void", "none"):
        return None
    return (), f"{CONTAINER_VARIABLE}={text} gives no GPU to this container"


def doubt(environ: Mapping[str, str], devices: Sequence[Device]) -> str:
    """Why an index of the list may mean another device, "" when it cannot."""
    same = len({device.name for device in devices if device.parent_uuid is None}) < 2
    if same or environ.get(ORDER_VARIABLE) == PCI_ORDER or not any(map(str.isdecimal, entries(environ))):
        return ""
    return (
        f"the GPUs of this machine differ, and without {ORDER_VARIABLE}={PCI_ORDER} CUDA numbers the fastest first: "
        f"here {CUDA_VARIABLE} counts in PCI order, as nvidia-smi does"
    )


def _uuid_of(entry: str, gpus: Sequence[Device], devices: Sequence[Device]) -> str | None:
    if entry.isdecimal():
        return next((device.uuid for device in gpus if str(device.index) == (entry.lstrip("0") or "0")), None)
    if not entry.upper().startswith(("GPU-", "MIG-")):
        return None
    matches = [device.uuid for device in devices if device.uuid.lower().startswith(entry.lower())]
    if not matches and entry.upper().startswith("MIG-"):
        return entry
    return matches[0] if len(matches) == 1 else None
