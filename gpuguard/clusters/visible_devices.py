"""The devices among which gpuguard may choose, as an outer scheduler, a container or the user has decided already.

Each source is a function of (environment, devices) that returns the uuids that it allows and why, or None if it has no
opinion.  A device is left only if all opinions allow it.  The real environment is not read here: it is an argument.

Each vendor has a variable of its own, which counts the devices of that vendor alone and says nothing about others.
CUDA_VISIBLE_DEVICES is read and written as CUDA reads it: a list ends at its first entry that names no device; -1, the
empty list and a device named twice leave nothing.  Indices are in PCI order, because that is the only order that the
driver, nvidia-smi and `gpuguard run` share.

A Slurm job gets the devices that Slurm gave it, and a job that got no GPU must not take one that is there.
SLURM_STEP_GPUS and SLURM_JOB_GPUS carry the numbers of the whole machine, so they are read only where the job sees more
devices than it was given: where Slurm hides the others (ConstrainDevices), the visible ones are numbered from 0 again
and all of them are the job's.

NVIDIA_VISIBLE_DEVICES tells a container runtime which devices to let in.  Only its value "nothing" counts here, because
inside the container the visible devices are the answer already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from gpuguard.locale import _, ngettext
from gpuguard.model import Device
from gpuguard.vendors import NVIDIA, UUID_PREFIXES, VENDORS, Vendor, names_instance, vendor_of

SLURM_VARIABLES = (NVIDIA.visible, "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL")
_MOST = 1024  # GPUs of a node

Opinion = tuple[tuple[str, ...], str]  # uuids that are allowed, and why, for people


@dataclass(frozen=True)
class Outer:
    """The devices that the sources leave to this process."""

    uuids: tuple[str, ...] | None = None  # in the order of the outer list, or None if nothing restricts them
    reason: str = ""  # for people: "CUDA_VISIBLE_DEVICES=3 allows only GPU 3"
    warning: str = ""  # why the list may mean other devices than its author thought, or "" if it is clear


def outer_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> Outer:
    """Return the devices that *environ* leaves to this process.

    The uuid of a MIG instance is believed even if *devices* do not contain it (its GPU was not divided yet when it
    was sampled), and a GPU that is allowed allows its instances.
    """
    present = {device.vendor for device in devices} or {NVIDIA.name}
    lists = (partial(listed_devices, vendor=vendor) for vendor in VENDORS.values() if vendor.name in present)
    sources: list[Callable[..., Opinion | None]] = [*lists, container_devices]
    if "SLURM_JOB_ID" in environ:
        environ = _of_whole_machine(environ, devices)
        sources.insert(1, slurm_devices)
    opinions = [opinion for source in sources if (opinion := source(environ, devices)) is not None]
    if not opinions:
        return Outer()
    uuids, _ = opinions[0]
    for others, _ in opinions[1:]:
        uuids = tuple(uuid for uuid in uuids if uuid in others)
    return Outer(uuids, "; ".join(reason for _, reason in opinions), doubt(environ, devices))


def variables(names: Iterable[object], vendor: Vendor = NVIDIA) -> dict[str, str]:
    """Return the variable that leaves a vendor's programs the devices with these indices or uuids, in this order."""
    return {vendor.visible: ",".join(map(str, names))}


def environment_of(devices: Sequence[Device], *, by_uuid: bool = False) -> dict[str, str]:
    """Return the variables that leave *devices*, of one vendor, to a job: by index, but MIG instances by uuid."""
    vendor = vendor_of(devices[0]) if devices else NVIDIA
    return {**vendor.numbering, **variables(names_of(devices, by_uuid=by_uuid), vendor)}


def names_of(devices: Sequence[Device], *, by_uuid: bool = False) -> list[str]:
    """Return the entries of the variable that leaves *devices* to a job."""
    by_uuid = by_uuid or any(device.parent_uuid for device in devices)
    return [device.uuid if by_uuid else str(device.number) for device in devices]


def is_restricted(environ: Mapping[str, str]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES is set, even if it is empty."""
    return NVIDIA.visible in environ


def entries(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES as they are written, up to the first empty one."""
    words = (entry.strip() for entry in environ.get(NVIDIA.visible, "").split(","))
    return tuple(takewhile(bool, words))


def visible_uuids(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[str, ...] | None:
    """Return the uuids that CUDA_VISIBLE_DEVICES leaves, or None if it is not set."""
    opinion = listed_devices(environ, devices)
    return None if opinion is None else opinion[0]


def listed_devices(environ: Mapping[str, str], devices: Sequence[Device], vendor: Vendor = NVIDIA) -> Opinion | None:
    """Return the uuids that a vendor's list leaves and the reason for people, or None (no opinion) without a list.

    The list leaves all devices of other vendors.
    """
    text = environ.get(vendor.visible)
    if text is None:
        return None
    others = tuple(device.uuid for device in devices if device.vendor != vendor.name)
    devices = [device for device in devices if device.vendor == vendor.name]
    gpus = [device for device in devices if device.parent_uuid is None]
    uuids: list[str] = []
    for entry in text.split(","):
        uuid = _uuid_of(entry.strip(), gpus, devices)
        if uuid is None or (uuid in uuids and vendor is not NVIDIA):  # a repetition ends ROCm's list and voids CUDA's
            break
        if uuid in uuids:
            return others, _("{variable}={text} names a GPU twice, so CUDA sees none").format(
                variable=vendor.visible, text=text
            )
        uuids.append(uuid)
    indices = {device.uuid: str(device.index) for device in gpus}
    names = [indices.get(uuid, uuid) for uuid in uuids]
    allowed = _("no GPU")
    if names:
        listed = ", ".join(names)
        allowed = ngettext("only GPU {names}", "only GPUs {names}", len(names)).format(names=listed)
    return (*uuids, *others), _("{variable}={text} allows {allowed}").format(
        variable=vendor.visible, text=text, allowed=allowed
    )


def container_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> Opinion | None:
    """Return no NVIDIA device if the container was started without any, or else None (no opinion)."""
    text = environ.get(NVIDIA.container)
    if text is None or text.strip().lower() not in ("", "void", "none"):
        return None
    others = tuple(device.uuid for device in devices if device.vendor != NVIDIA.name)
    return others, _("{variable}={text} gives no GPU to this container").format(variable=NVIDIA.container, text=text)


def doubt(environ: Mapping[str, str], devices: Sequence[Device]) -> str:
    """Return why an index in CUDA_VISIBLE_DEVICES may mean another device, or "" if it cannot."""
    same = len({device.name for device in devices if device.parent_uuid is None}) < 2
    ordered = NVIDIA.numbering.items() <= environ.items()
    if same or ordered or not any(map(str.isdecimal, entries(environ))):
        return ""
    return _(
        "the GPUs of this machine differ, and without {order} CUDA numbers the "
        "fastest first: here {variable} counts in PCI order, as nvidia-smi does"
    ).format(order=" ".join(map("=".join, NVIDIA.numbering.items())), variable=NVIDIA.visible)


def _uuid_of(entry: str, gpus: Sequence[Device], devices: Sequence[Device]) -> str | None:
    if entry.isdecimal():
        return next((device.uuid for device in gpus if str(device.number) == (entry.lstrip("0") or "0")), None)
    if not entry.upper().startswith(UUID_PREFIXES):
        return None
    matches = [device.uuid for device in devices if device.uuid.lower().startswith(entry.lower())]
    if not matches and names_instance(entry):
        return entry
    return matches[0] if len(matches) == 1 else None


def slurm_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> Opinion | None:
    """Return what a Slurm job was given, or None (no opinion) if CUDA_VISIBLE_DEVICES says it."""
    job = environ["SLURM_JOB_ID"]
    if not job or is_restricted(environ):
        return None
    variable = next((name for name in SLURM_VARIABLES if name in environ), None)
    if variable is None:
        return (), _("Slurm job {job} was given no GPU (ask Slurm for one: --gres=gpu:1)").format(job=job)
    gpus = {device.index: device.uuid for device in devices if device.parent_uuid is None}
    given = _numbers(environ[variable])
    if variable == "GPU_DEVICE_ORDINAL" or len(given) >= len(gpus) > 0:
        return None
    uuids = tuple(gpus[number] for number in given if number in gpus)
    allowed = _("{count} of {total} GPUs").format(count=len(uuids) or _("no"), total=len(gpus))
    return uuids, _("{variable}={value} of Slurm job {job} allows {allowed}").format(
        variable=variable, value=environ[variable], job=job, allowed=allowed
    )


def _of_whole_machine(environ: Mapping[str, str], devices: Sequence[Device]) -> Mapping[str, str]:
    """Return *environ* with CUDA_VISIBLE_DEVICES in the numbers of *devices*.

    Under ConstrainDevices Slurm counts a job's devices from 0, as its processes see them.  If *devices* contain the
    others nevertheless, number 0 is not the first of them, but the first of SLURM_STEP_GPUS.
    """
    visible, claim = entries(environ), environ.get("GPUGUARD_CLAIM", "")
    variable = next((name for name in SLURM_VARIABLES[1:3] if name in environ), None)
    if variable is None or not visible or not all(map(_is_number, visible)):
        return environ
    given, shown = _numbers(environ[variable]), sum(device.parent_uuid is None for device in devices)
    # Slurm also writes its own list into GPU_DEVICE_ORDINAL; `gpuguard run` writes the numbers that it sees.
    by_slurm = _numbers(environ.get("GPU_DEVICE_ORDINAL", ",".join(visible)))
    by_us = claim and not claim.removeprefix("slurm").isdecimal()
    if by_us or shown <= len(given) or by_slurm == given or by_slurm != list(range(len(given))):
        return environ
    wanted = [int(number) for number in visible]
    if any(number >= len(given) for number in wanted):
        return environ
    return {**environ, **variables(given[number] for number in wanted)}


def _numbers(text: str) -> list[int]:
    """Return [0, 1, 2, 5] for "0-2,5"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if _is_number(first) and _is_number(last or first):
            numbers += range(int(first), min(int(last or first), int(first) + _MOST) + 1)
    return numbers


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10  # Python makes no number of 5,000 digits
