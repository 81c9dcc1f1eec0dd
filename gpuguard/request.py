"""Requests: how many devices are wanted, and which ones will do.

This module does not look at any device: see eligibility for why one will not do, and select for which ones are taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.model import (
    HEALTH,
    IDLE_TOLERANCE,
    MEMORY,
    MODEL,
    NVLINK,
    PROCESS_DETAILS,
    PROCESSES,
    SELECT_FIELDS,
    SLOTS,
    THERMAL,
    TOPOLOGY,
    UTILIZATION,
    Device,
)
from gpuguard.units import format_bytes_exactly
from gpuguard.vendors import UUID_PREFIXES, VENDORS, names_instance

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ANY_MEMORY = 2**53  # bytes, the most that JSON can say: tolerated in a claim, whose own processes use its devices

STRATEGIES = {
    "spread": "the emptiest GPUs first",
    "pack": "the fullest GPUs that still fit, and broken NUMA nodes, so that big gaps stay whole",
    "first": "the lowest index first, whatever its load",
}


_PROFILE = r"(?i:(\d+c\.)?\d+g\.\d+gb(\+\w+)*(\.\w+)*|[dtqc]px)"  # of MIG, or a mode of AMD's partitions


@dataclass(frozen=True)
class Request:
    """The number of devices that are wanted, and the conditions that each must satisfy; None sets no condition.

    Selectors (devices, exclude, prefer) are an index, a uuid or a unique beginning of one, or "3.1" for GPU instance 1
    of GPU 3; naming a GPU that is divided into MIG instances names its instances.

    Raises:
        InvalidRequest: the conditions make no sense on any machine.
    """

    num_gpus: int = 1
    max_gpus: int | None = None  # take up to so many, at least num_gpus
    devices: tuple[str, ...] | None = None  # selectors: no others
    min_free: int | None = None  # bytes
    min_free_fraction: float | None = None  # 0..1, of the memory that an empty device has
    min_total: int | None = None  # bytes
    max_util: float | None = None  # percent
    max_memory_util: float | None = None  # percent
    max_processes: int | None = None  # share the device with up to so many processes of others
    max_temperature: float | None = None  # Celsius
    models: tuple[str, ...] = ()  # globs, one of them must match
    vendor: str | None = None  # a name of vendors.VENDORS
    exclude: tuple[str, ...] = ()  # selectors
    prefer: tuple[str, ...] = ()  # selectors, best first
    strategy: str = "spread"
    mine_as_free: frozenset[int] = frozenset()  # uids whose processes do not make a device busy
    within: tuple[str, ...] | None = None  # uuids that an outer scheduler or CUDA_VISIBLE_DEVICES allows
    within_reason: str = ""  # "CUDA_VISIBLE_DEVICES=3 allows only GPU 3"
    tolerance: int = IDLE_TOLERANCE  # bytes that an idle device may hold
    share: bool = False  # others may claim the rest of each device
    memory: int | None = None  # bytes of each device that a share may use
    slots: int = SLOTS  # at most so many claims share a device, including this one
    mig: str | None = None  # profile of the instances: "3g.40gb", or "cpx" of AMD's partitions
    allow_mig_set: bool = False  # several MIG instances will do: a launcher starts one process for each

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise InvalidRequest(
                _("{num_gpus} GPUs cannot be asked for: ask for at least 1.").format(num_gpus=self.num_gpus)
            )
        if self.max_gpus is not None and self.max_gpus < self.num_gpus:
            raise InvalidRequest(
                _("at most {max_gpus} GPUs are fewer than the {num_gpus} that are wanted.").format(
                    max_gpus=self.max_gpus, num_gpus=self.num_gpus
                )
            )
        if self.max_processes is not None and self.max_processes < 0:
            raise InvalidRequest(
                _("a GPU cannot have {max_processes} processes: permit 0 or more.").format(
                    max_processes=self.max_processes
                )
            )
        if self.min_free_fraction is not None and not 0 <= self.min_free_fraction <= 1:
            raise InvalidRequest(
                _("{min_free_fraction} is no fraction of the memory: ask for 0 to 1.").format(
                    min_free_fraction=self.min_free_fraction
                )
            )
        if self.devices is not None and not self.devices:
            raise InvalidRequest(_("the list of GPUs is empty: name some, as in 0,3, or leave it out."))
        if self.strategy not in STRATEGIES:
            raise InvalidRequest(
                _("there is no strategy {strategy!r}: choose one of {strategies}.").format(
                    strategy=self.strategy, strategies=", ".join(STRATEGIES)
                )
            )
        if self.share and self.memory is None:
            raise InvalidRequest(_("how much memory of a GPU is to be shared? Say so, as in --share --memory 10GiB."))
        if not self.share and self.memory is not None:
            raise InvalidRequest(_("--memory is the part of a shared GPU: add --share, or use --min-free."))
        if self.memory is not None and self.memory < 1:
            raise InvalidRequest(_("a share of no memory is none: ask for some, as in --memory 10GiB."))
        if not 1 <= self.slots <= SLOTS:
            raise InvalidRequest(
                _("{slots} claims cannot share a GPU: write --slots 1 to --slots {most}.").format(
                    slots=self.slots, most=SLOTS
                )
            )
        if self.slots != SLOTS and not self.share:
            raise InvalidRequest(_("--slots is about shared GPUs: add --share --memory SIZE."))
        if self.vendor is not None and self.vendor not in VENDORS:
            raise InvalidRequest(
                _("there is no vendor {vendor!r}: choose one of {vendors}.").format(
                    vendor=self.vendor[:40], vendors=", ".join(VENDORS)
                )
            )
        if self.mig is not None and not re.fullmatch(_PROFILE, self.mig):
            raise InvalidRequest(
                _("{mig!r} is no profile of an instance: write it like 3g.40gb, or cpx.").format(mig=self.mig[:40])
            )

    @property
    def most(self) -> int:
        """The number of devices that are taken if there are plenty."""
        return self.max_gpus or self.num_gpus

    @property
    def takes_mig_set(self) -> bool:
        """Whether several MIG instances will do: only if they are asked for, because a process can use only one."""
        named = self.devices is not None and all(map(_is_instance, self.devices))
        return self.allow_mig_set or self.mig is not None or named

    @property
    def most_sharers(self) -> int | None:
        """The most claims that share a device, if the request asks for fewer than there can be, or None."""
        return self.slots if self.share and self.slots < SLOTS else None


def fields_needed(request: Request) -> frozenset[str]:
    """Return the field groups that must be read for all devices before some of them can be chosen.

    Other groups (HEALTH, and mostly PROCESSES) are read for the winners only: see fields_to_verify().  They can only
    disqualify a device, so the winners are the same as if all groups had been read for all devices.
    """
    selectors = (*(request.devices or ()), *request.exclude, *request.prefer, *(request.within or ()))
    shares = bool(request.max_processes or request.mine_as_free or request.share)
    wanted = {
        UTILIZATION: request.max_util is not None or request.max_memory_util is not None or shares,
        PROCESS_DETAILS: bool(request.mine_as_free or request.share),
        THERMAL: request.max_temperature is not None,
        MODEL: bool(request.models) or request.strategy == "pack" or request.most > 1,
        TOPOLOGY: request.most > 1 and request.strategy != "first",
        NVLINK: request.most > 1 and request.strategy != "first",
        # HEALTH brings the MIG instances along, and "pack" counts the eligible devices of a NUMA node.
        HEALTH: request.mig is not None or request.strategy == "pack" or any(map(_is_instance, selectors)),
    }
    # The number of processes decides between devices that may be shared, and which devices are out of the running
    # decides how crowded a NUMA node is.
    listed = shares or request.strategy == "pack"
    base = frozenset({MEMORY, PROCESSES}) if listed else SELECT_FIELDS
    return base | {group for group, needed in wanted.items() if needed}


def fields_needed_by_all(*requests: Request) -> frozenset[str]:
    """Return the field groups that fields_needed() says of any of *requests*."""
    return frozenset().union(*map(fields_needed, requests))


def fields_to_verify(request: Request) -> frozenset[str]:
    """Return the field groups that must be read once more for the winners before they are taken.

    The connections are not among them, because they were read with all devices and cost up to 18 calls for each.
    """
    return (fields_needed(request) | {PROCESSES, HEALTH}) - {TOPOLOGY, NVLINK}


def resolve(selectors: Iterable[str], devices: Sequence[Device], option: str = "--devices") -> tuple[str, ...]:
    """Return the uuids that *selectors* name, in their order.

    Raises:
        InvalidRequest: one names no device, several devices, or a device that was named before.
    """
    found: dict[str, str] = {}
    for selector in selectors:
        uuid = _resolve_one(selector, devices, option)
        if uuid in found:
            again = (
                _("twice")
                if found[uuid] == selector
                else _("as {found} and as {selector}").format(found=found[uuid], selector=selector)
            )
            raise InvalidRequest(
                _("{option} names GPU {selector} {again}: name each GPU once.").format(
                    option=option, selector=selector, again=again
                )
            )
        found[uuid] = selector
    return tuple(found)


def spelled(request: Request) -> str:
    """Return the command-line options that make this request: ``"-n 5 --model 'A100*'"``."""
    return " ".join(options_of(request))


def options_of(request: Request) -> tuple[str, ...]:
    """Return the command-line options that make this request, one text per option."""
    values = (
        ("-n", str(request.num_gpus)),
        ("--devices", ",".join(request.devices or ())),
        ("--min-free", _size(request.min_free)),
        ("--min-total", _size(request.min_total)),
        ("--max-util", _number(request.max_util, "%")),
        ("--max-memory-util", _number(request.max_memory_util, "%")),
        ("--max-processes", _number(request.max_processes, "")),
        ("--max-temperature", _number(request.max_temperature, "C")),
        *(("--model", f"'{model}'") for model in request.models),
        ("--vendor", request.vendor or ""),
        ("--exclude", ",".join(request.exclude)),
        ("--prefer", ",".join(request.prefer)),
        ("--strategy", "" if request.strategy == "spread" else request.strategy),
        ("--mig", request.mig or ""),
        ("--memory", _size(request.memory)),
        ("--slots", "" if request.slots == SLOTS else str(request.slots)),
        ("--tolerance", "" if request.tolerance in (IDLE_TOLERANCE, ANY_MEMORY) else _size(request.tolerance)),
    )
    inside = request.tolerance == ANY_MEMORY  # then it was not typed
    flags = (
        ("--share", request.share),
        ("--mine-as-free", bool(request.mine_as_free) and not inside),
        ("--allow-mig-set", request.allow_mig_set),
    )
    given = tuple(f"{option} {value}" for option, value in values if value)
    return given + tuple(flag for flag, is_set in flags if is_set)


def _size(count: int | None) -> str:
    return "" if count is None else format_bytes_exactly(count)


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:g}{unit}"


def _is_instance(selector: str) -> bool:
    """Return whether a selector can only name a MIG instance."""
    return names_instance(selector) or "." in selector


def _resolve_one(selector: str, devices: Sequence[Device], option: str) -> str:
    wanted = selector.strip().lower()
    if wanted.isdecimal():
        # A MIG instance carries the index of its GPU, so the index means the GPU.  It is compared as text, because a
        # ticket may have 5,000 digits, of which Python makes no number.
        number = wanted.lstrip("0") or "0"
        matches = [device for device in devices if str(device.index) == number and device.parent_uuid is None]
    elif "." in wanted:
        matches = [device for device in devices if f"{device.index}.{device.gpu_instance_id}" == wanted]
    else:
        exact = [device for device in devices if device.uuid.lower() == wanted]
        begins = [device for device in devices if device.uuid.lower().startswith(wanted)]
        matches = exact or (begins if len(wanted) > max(map(len, UUID_PREFIXES)) else [])
    if len(matches) == 1:
        return matches[0].uuid
    if matches:
        raise InvalidRequest(
            _("{option} {selector} could be {matches}: write more of it.").format(
                option=option, selector=selector, matches=", ".join(d.uuid for d in matches)
            )
        )
    width = max((len(device.label) for device in devices), default=0)
    there = "\n".join(f"  {device.label:{width}}  {device.uuid}" for device in devices)
    raise InvalidRequest(
        _("{option} {selector} names no GPU of this machine.  It has\n{there}").format(
            option=option, selector=selector, there=there or _("  none at all")
        )
    )
