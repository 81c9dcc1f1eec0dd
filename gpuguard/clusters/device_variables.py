"""The devices that a process sees: the variables of each vendor, and what an outer scheduler or a container allows.

Each source is a function of (environment, devices) that returns the uuids that it allows and why, or None if it has no
opinion.  A device is left only if all opinions allow it.  The real environment is not read here: it is an argument.

Each vendor has a variable of its own, which counts the devices of that vendor alone and says nothing about others.  It
is read and written as the vendor's programs do:

- CUDA: a list ends at its first entry that names no device; -1, the empty list and a device named twice leave nothing.
  Indices are in PCI order, because that is the only order that the driver, nvidia-smi and `gpuguard run` share.  The
  list of Moore Threads is read in the same way.
- ROCm: ROCR_VISIBLE_DEVICES chooses first, by index or by the beginning of a uuid, and ends at its first entry that
  names no device, several devices, or one again (ROCR-Runtime, amd_filter_device.cpp).  HIP_VISIBLE_DEVICES, or else
  CUDA_VISIBLE_DEVICES, chooses once more among the devices that are left, counted from 0 (clr, rocdevice.cpp).
- Level Zero: ZE_AFFINITY_MASK holds indices alone, of cards or, by ZE_FLAT_DEVICE_HIERARCHY, of their tiles; an entry
  that names nothing is passed over, and an empty mask leaves all (compute-runtime, execution_environment.cpp).
  ONEAPI_DEVICE_SELECTOR chooses once more for programs of SYCL, and counts what the mask leaves from 0.  Its terms
  accept, or with "!" refuse, devices of a runtime by kind or number (intel/llvm, EnvironmentVariables.md).

An entry that these rules leave open leaves less rather than more.

A Slurm job gets the devices that Slurm gave it, and a job that got no GPU must not take one that is there.
SLURM_STEP_GPUS and SLURM_JOB_GPUS carry the numbers of the whole machine, so they are read only where the job sees more
devices than it was given: where Slurm hides the others (ConstrainDevices), the visible ones are numbered from 0 again
and all of them are the job's.

NVIDIA_VISIBLE_DEVICES, as AMD_VISIBLE_DEVICES, tells a container runtime which devices to let in.  Only its value
"nothing" counts here, because inside the container the visible devices are the answer already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gpuguard.device_state import vendor_of
from gpuguard.locale import _, ngettext
from gpuguard.model import HEALTH, MODEL, Device
from gpuguard.vendors import AMD, INTEL, MTHREADS, NVIDIA, UUID_PREFIXES, VENDORS, Vendor, names_instance

Opinion = tuple[tuple[str, ...], str]  # uuids that are allowed, and why, for people
Source = Callable[[Mapping[str, str], Sequence[Device]], "Opinion | None"]

SLURM_VARIABLES = (NVIDIA.visible, "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL")
_MOST = 1024  # GPUs of a node
_ROCR_TOKEN = range(5, 21)  # characters of the beginning of a uuid that ROCR accepts
_LEVEL_ZERO = "level_zero"  # as ONEAPI_DEVICE_SELECTOR calls the runtime whose devices gpuguard counts
_TWO_TILES = re.compile(r"\bMax 1[345]50\b")  # Intel's cards that consist of two tiles


def vendors_of(devices: Iterable[Device]) -> list[Vendor]:
    """Return the vendors of *devices* in the order of VENDORS, or NVIDIA if none of them is known."""
    names = {device.vendor for device in devices}
    return [vendor for vendor in VENDORS.values() if vendor.name in names] or [NVIDIA]


# The lists of one vendor


def variables(names: Iterable[object], vendor: Vendor = NVIDIA) -> dict[str, str]:
    """Return the variable that leaves a vendor's programs the devices with these indices or uuids, in this order."""
    return {vendor.visible: ",".join(map(str, names))}


def environment_of(
    devices: Sequence[Device], environ: Mapping[str, str] | None = None, *, by_uuid: bool = False
) -> dict[str, str]:
    """Return the variables that leave *devices*, of one vendor, to a job, whatever it would inherit from *environ*."""
    if not devices:
        return {vendor.visible: "" for vendor in VENDORS.values()}
    [vendor] = vendors_of(devices)
    numbers = ",".join(map(str, range(len(devices))))
    again = dict.fromkeys(vendor.filters, numbers)
    if vendor.selector and any(map(str.isdigit, (environ or {}).get(vendor.selector, ""))):
        # Its numbers mean other devices behind the list of this job; without numbers it chooses a runtime, as ever.
        again[vendor.selector] = f"{_LEVEL_ZERO}:{numbers}"
    return {**vendor.numbering, **variables(_names_for_job(devices, vendor, by_uuid=by_uuid), vendor), **again}


def names_of(devices: Sequence[Device], *, by_uuid: bool = False) -> list[str]:
    """Return the indices that a vendor's variable counts *devices* by, or their uuids: MIG instances have no index."""
    by_uuid = by_uuid or any(device.parent_uuid and device.vendor == NVIDIA.name for device in devices)
    return [device.uuid if by_uuid else str(device.number) for device in devices]


def _names_for_job(devices: Sequence[Device], vendor: Vendor, *, by_uuid: bool) -> list[str]:
    """Return names_of() for a job.  Other vendors than NVIDIA have uuids wherever their list takes them.

    No other list and no order of devices gives these another meaning.
    """
    if vendor is not NVIDIA:
        by_uuid = all(re.fullmatch(vendor.listed_uuids, device.uuid) for device in devices)
    return names_of(devices, by_uuid=by_uuid)


def renumbered(devices: Sequence[Device], *, by_uuid: bool = False) -> dict[str, str]:
    """Return the variable for a job that can open no other devices, which counts its own from 0, or {} with uuids."""
    vendor = vendor_of(devices[0])
    if _names_for_job(devices, vendor, by_uuid=by_uuid) != [str(device.number) for device in devices]:
        return {}
    return variables(range(len(devices)), vendor)


def groups_needed(environ: Mapping[str, str], devices: Iterable[Device]) -> frozenset[str]:
    """Return the groups of fields without which the lists in *environ* could mean other ones of these devices."""
    groups = set()
    for vendor in vendors_of(devices):
        if not environ.keys().isdisjoint((vendor.visible, *vendor.filters, vendor.selector)):
            groups |= _GROUPS.get(vendor.name, set())
    return frozenset(groups)


_GROUPS = {
    AMD.name: {HEALTH},  # which shows partitions: each has an index of its own
    INTEL.name: {MODEL},  # which tells how many tiles a card has, and whether it is integrated
}


def listed_devices(environ: Mapping[str, str], devices: Sequence[Device], vendor: Vendor = NVIDIA) -> Opinion | None:
    """Return the uuids that a vendor's lists leave and the reason for people, or None (no opinion) without a list.

    The lists leave all devices of other vendors.  The list of another vendor that has devices here is no filter of
    this one: beside NVIDIA's GPUs, CUDA_VISIBLE_DEVICES means those.
    """
    others = tuple(device.uuid for device in devices if device.vendor != vendor.name)
    foreign = {vendor_of(device).visible for device in devices if device.vendor != vendor.name}
    own = [device for device in devices if device.vendor == vendor.name]
    opinion = _READERS[vendor.name](
        {name: value for name, value in environ.items() if name not in foreign - {vendor.visible}}, own, vendor
    )
    return None if opinion is None else ((*opinion[0], *others), opinion[1])


def devices_called(names: Sequence[str], environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the uuids of the devices that an engine such as Ray calls *names*.

    They are what it has put into the list of a vendor, which says whose devices they are, or would put there: numbers
    by which the vendor's programs count, and not ours.
    """
    text = ",".join(names)
    present = vendors_of(devices)
    vendor = next((vendor for vendor in present if text in _lists_in(environ, vendor)), None)
    if vendor is None:
        vendor = (present or [NVIDIA])[0]
        environ = {**environ, vendor.visible: text}
    opinion = listed_devices(environ, devices, vendor)
    own = {device.uuid for device in devices if device.vendor == vendor.name}
    return tuple(uuid for uuid in opinion[0] if uuid in own) if opinion else ()


def _lists_in(environ: Mapping[str, str], vendor: Vendor) -> list[str]:
    names = (vendor.visible, *vendor.filters, vendor.selector)
    return [environ[name].removeprefix(f"{_LEVEL_ZERO}:") for name in names if name in environ]


def entries(environ: Mapping[str, str], vendor: Vendor = NVIDIA) -> tuple[str, ...]:
    """Return the entries of a vendor's list as they are written, up to the first empty one."""
    words = [entry.strip() for entry in environ.get(vendor.visible, "").split(",")]
    return tuple(words[: words.index("")] if "" in words else words)


def _cuda_list(environ: Mapping[str, str], devices: Sequence[Device], vendor: Vendor) -> Opinion | None:
    text = environ.get(vendor.visible)
    if text is None:
        return None
    gpus = [device for device in devices if device.parent_uuid is None]
    uuids: list[str] = []
    for entry in text.split(","):
        uuid = _uuid_of(entry.strip(), gpus, devices)
        if uuid is None:
            break
        if uuid in uuids:
            twice = _("{variable}={text} names a GPU twice, so CUDA sees none").format(
                variable=vendor.visible, text=text
            )
            return (), twice if vendor is NVIDIA else _reason(environ, [vendor.visible], [], gpus)
        uuids.append(uuid)
    return tuple(uuids), _reason(environ, [vendor.visible], uuids, gpus)


def _uuid_of(entry: str, gpus: Sequence[Device], devices: Sequence[Device]) -> str | None:
    if entry.isdecimal():
        return next((device.uuid for device in gpus if str(device.number) == (entry.lstrip("0") or "0")), None)
    if not entry.upper().startswith(UUID_PREFIXES):
        return None
    matches = [device.uuid for device in devices if device.uuid.lower().startswith(entry.lower())]
    if not matches and names_instance(entry):
        return entry
    return matches[0] if len(matches) == 1 else None


def _rocm_lists(environ: Mapping[str, str], devices: Sequence[Device], vendor: Vendor) -> Opinion | None:
    hip = next((name for name in vendor.filters[:2] if name in environ), None)
    if hip and "SLURM_JOB_ID" in environ and environ[hip] == environ.get(vendor.visible):
        hip = None  # Slurm writes one list into the variables of all vendors
    used = [*([vendor.visible] if vendor.visible in environ else []), *([hip] if hip else [])]
    if not used:
        return None
    divided = {device.parent_uuid for device in devices}
    by_number = {device.number: device for device in devices if device.uuid not in divided}
    left = [by_number.get(number) for number in range(max(by_number, default=-1) + 1)]
    if vendor.visible in used:
        left = _chosen(map(str.strip, environ[vendor.visible].split(",")), left, again=False)
    if hip:
        left = _chosen(environ[hip].split(","), left, again=True)
    uuids = [device.uuid for device in left if device]
    return tuple(uuids), _reason(environ, used, uuids, devices)


def _chosen(tokens: Iterable[str], left: Sequence[Device | None], *, again: bool) -> list[Device | None]:
    """Return which of the devices that are left a list of ROCm chooses; None is one that the program sees but not we.

    *again* says whether an entry may name a device again, which changes nothing then; otherwise it ends the list.
    """
    chosen: list[int] = []
    places = {str(place): place for place in range(len(left))}
    for token in tokens:
        place = places.get(token, _with_uuid(token.upper(), left))
        if place is None or (place in chosen and not again):
            break
        if place not in chosen:
            chosen.append(place)
    return [left[place] for place in chosen]


def _with_uuid(token: str, left: Sequence[Device | None]) -> int | None:
    """Return where the device is with whose uuid *token* begins, or None.

    All partitions of a GPU have its uuid, so it names none of them.
    """
    if len(token) not in _ROCR_TOKEN or not token.startswith(AMD.uuid_prefix):
        return None
    uuids = ["" if device is None else (device.parent_uuid or device.uuid).upper() for device in left]
    matches = [place for place, uuid in enumerate(uuids) if uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _level_zero_mask(environ: Mapping[str, str], devices: Sequence[Device], vendor: Vendor) -> Opinion | None:
    text, selector = environ.get(vendor.visible), environ.get(vendor.selector)
    if not text and not selector:
        return None
    hierarchy, order = vendor.numbering
    by_card = environ.get(hierarchy) == vendor.numbering[hierarchy]
    cards: list[Device | None]
    if environ.get(order) == vendor.numbering[order]:
        by_number = {device.number: device for device in devices}
        cards = [by_number.get(number) for number in range(max(by_number, default=-1) + 1)]
    else:  # integrated ones come last
        cards = [*sorted(devices, key=lambda device: (bool(device.integrated), device.number))]
    tiles = [(card, tile) for card, device in enumerate(cards) for tile in range(_tiles(device))]
    listed = set() if text else set(tiles)
    for entry in text.split(",") if text else ():
        if by_card:
            listed |= {(card, tile) for card, tile in tiles if entry in (str(card), f"{card}.{tile}")}
        else:
            listed |= {place for number, place in enumerate(tiles) if entry == str(number)}
    if selector:
        units = dict.fromkeys(place[:1] if by_card else place for place in sorted(listed))  # what a number means
        kept = {unit for number, unit in enumerate(units) if _is_selected(selector, number)}
        listed = {place for place in listed if (place[:1] if by_card else place) in kept}
    # A job gets whole cards, so a card of which the mask leaves only one tile is none that it may have.
    uuids = [
        device.uuid
        for card, device in enumerate(cards)
        if device and {(card, tile) for tile in range(_tiles(device))} <= listed
    ]
    names = [name for name in (vendor.visible, vendor.selector) if environ.get(name)]
    return tuple(uuids), _reason(environ, names, uuids, devices)


def _is_selected(selector: str, number: int) -> bool:
    """Return whether ONEAPI_DEVICE_SELECTOR leaves the GPU that has a *number* in Level Zero.

    A GPU that only OpenCL leaves by its kind is left, too; by which numbers OpenCL counts them is not known.
    """
    terms = [term.strip().lower() for term in selector.split(";")]
    refused = [term[1:] for term in terms if term.startswith("!")]
    accepted = [term for term in terms if term and not term.startswith("!")] or ["*:*"]
    runtimes = ("*", _LEVEL_ZERO)
    return any(
        _names_gpu(term, number, runtimes) or _names_gpu(term, None, ("opencl",)) for term in accepted
    ) and not any(_names_gpu(term, number, runtimes) for term in refused)


def _names_gpu(term: str, number: int | None, runtimes: Collection[str]) -> bool:
    """Return whether a term like ``"level_zero:0,1"`` or ``"*:gpu"`` is about one of *runtimes* and names this GPU."""
    runtime, _colon, entries = term.partition(":")
    return runtime in runtimes and any(entry.strip() in ("*", "gpu", str(number)) for entry in entries.split(","))


def _tiles(device: Device | None) -> int:
    return 2 if device and _TWO_TILES.search(device.name or "") else 1


def _reason(environ: Mapping[str, str], names: Sequence[str], uuids: Sequence[str], devices: Sequence[Device]) -> str:
    indices = {device.uuid: str(device.index) for device in devices if device.parent_uuid is None}
    listed = ", ".join(indices.get(uuid, uuid) for uuid in uuids)
    allowed = ngettext("only GPU {names}", "only GPUs {names}", len(uuids)).format(names=listed)
    *before, last = names
    return _("{variable}={text} allows {allowed}").format(
        variable=" ".join([*(f"{name}={environ[name]}" for name in before), last]),
        text=environ[last],
        allowed=allowed if uuids else _("no GPU"),
    )


_READERS: Mapping[str, Callable[[Mapping[str, str], Sequence[Device], Vendor], Opinion | None]] = {
    NVIDIA.name: _cuda_list,
    AMD.name: _rocm_lists,
    INTEL.name: _level_zero_mask,
    MTHREADS.name: _cuda_list,
}


# All that was decided already


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
