"""The devices among which gpuguard may choose, as an outer scheduler, a container or the user has decided already.

Each source is a function of (environment, devices) that returns the uuids that it allows and why, or None if it has no
opinion.  A device is left only if all opinions allow it.  The real environment is not read here: it is an argument.

Each vendor has a variable of its own, which counts the devices of that vendor alone and says nothing about others: see
device_lists, which reads and writes it as the vendor's programs do.

A Slurm job gets the devices that Slurm gave it, and a job that got no GPU must not take one that is there.
SLURM_STEP_GPUS and SLURM_JOB_GPUS carry the numbers of the whole machine, so they are read only where the job sees more
devices than it was given: where Slurm hides the others (ConstrainDevices), the visible ones are numbered from 0 again
and all of them are the job's.

NVIDIA_VISIBLE_DEVICES, as AMD_VISIBLE_DEVICES, tells a container runtime which devices to let in.  Only its value
"nothing" counts here, because inside the container the visible devices are the answer already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gpuguard.clusters.device_lists import Opinion, entries, listed_devices, variables
from gpuguard.locale import _
from gpuguard.model import Device
from gpuguard.vendors import NVIDIA, VENDORS, Vendor, vendors_of

SLURM_VARIABLES = (NVIDIA.visible, "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL")
_MOST = 1024  # GPUs of a node

Source = Callable[[Mapping[str, str], Sequence[Device]], "Opinion | None"]


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
    containers: list[Source] = [partial(container_devices, vendor=vendor) for vendor in vendors_of(devices)]
    sources: list[Source] = [*_lists_of(devices), *containers, job_devices]
    if "SLURM_JOB_ID" in environ:
        for vendor in vendors_of(devices):
            environ = _of_whole_machine(environ, devices, vendor)
        sources.insert(1, slurm_devices)
    opinion = _agreed(environ, devices, sources)
    return Outer() if opinion is None else Outer(*opinion, doubt(environ, devices))


def visible_uuids(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[str, ...] | None:
    """Return the uuids that the lists of all vendors leave, or None if none is set."""
    opinion = _agreed(environ, devices, [*_lists_of(devices), job_devices])
    return None if opinion is None else opinion[0]


def is_restricted(environ: Mapping[str, str], vendors: Iterable[Vendor] = tuple(VENDORS.values())) -> bool:
    """Return whether the list of one of *vendors* is set, even if it is empty."""
    return any(vendor.visible in environ for vendor in vendors)


def _lists_of(devices: Sequence[Device]) -> list[Source]:
    return [partial(listed_devices, vendor=vendor) for vendor in vendors_of(devices)]


def _agreed(environ: Mapping[str, str], devices: Sequence[Device], sources: Iterable[Source]) -> Opinion | None:
    """Return what all sources that have an opinion allow, in the order of the first, and all their reasons."""
    opinions = [opinion for source in sources if (opinion := source(environ, devices)) is not None]
    if not opinions:
        return None
    uuids, _ = opinions[0]
    for others, _ in opinions[1:]:
        uuids = tuple(uuid for uuid in uuids if uuid in others)
    return uuids, "; ".join(reason for _, reason in opinions if reason)


def job_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> Opinion | None:
    """Return the devices of the vendor of this job, or None (no opinion) outside a job or beside no other vendor.

    The variables of a job name its devices among those of their vendor, and say nothing about others.
    """
    given = environ.get("GPUGUARD_GPUS", "").split(",")
    vendors = {device.vendor for device in devices if device.uuid in given}
    vendors |= {v.name for v in VENDORS.values() if v.instance_prefix and given[0].startswith(v.instance_prefix)}
    if not vendors or vendors >= {device.vendor for device in devices}:
        return None
    return (*given, *(device.uuid for device in devices if device.vendor in vendors)), ""


def container_devices(environ: Mapping[str, str], devices: Sequence[Device], vendor: Vendor) -> Opinion | None:
    """Return no device of the vendor if the container was started without any, or else None (no opinion)."""
    text = environ.get(vendor.container) if vendor.container else None
    if text is None or text.strip().lower() not in ("", "void", "none"):
        return None
    others = tuple(device.uuid for device in devices if device.vendor != vendor.name)
    return others, _("{variable}={text} gives no GPU to this container").format(variable=vendor.container, text=text)


def doubt(environ: Mapping[str, str], devices: Sequence[Device]) -> str:
    """Return why an index in CUDA_VISIBLE_DEVICES may mean another device, or "" if it cannot."""
    gpus = [device for device in devices if device.parent_uuid is None and device.vendor == NVIDIA.name]
    same = len({device.name for device in gpus}) < 2
    ordered = NVIDIA.numbering.items() <= environ.items()
    if same or ordered or not any(map(str.isdecimal, entries(environ))):
        return ""
    return _(
        "the GPUs of this machine differ, and without {order} CUDA numbers the "
        "fastest first: here {variable} counts in PCI order, as nvidia-smi does"
    ).format(order=" ".join(map("=".join, NVIDIA.numbering.items())), variable=NVIDIA.visible)


def slurm_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> Opinion | None:
    """Return what a Slurm job was given, or None (no opinion) if the vendor's variable says it."""
    job = environ["SLURM_JOB_ID"]
    if not job or is_restricted(environ, vendors_of(devices)):
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


def _of_whole_machine(environ: Mapping[str, str], devices: Sequence[Device], vendor: Vendor) -> Mapping[str, str]:
    """Return *environ* with the list of a vendor in the numbers of *devices*.

    Under ConstrainDevices Slurm counts a job's devices from 0, as its processes see them.  If *devices* contain the
    others nevertheless, number 0 is not the first of them, but the first of SLURM_STEP_GPUS.
    """
    visible, claim = entries(environ, vendor), environ.get("GPUGUARD_CLAIM", "")
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
    return {**environ, **variables((given[number] for number in wanted), vendor)}


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
