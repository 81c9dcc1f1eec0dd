"""What an outer scheduler, a container or the user has decided already: the devices that may be chosen among here.

Each source is a row of SOURCES: a function of (environment, devices) that says which uuids it allows and why, or None
when it has no opinion.  All opinions must agree on a device.  Does not read the real environment: it is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.clusters import slurm, visible_devices
from gpuguard.model import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOURCES = (visible_devices.cuda_devices, slurm.allowed, visible_devices.container_devices)


@dataclass(frozen=True)
class Outer:
    """The outer set.

    Args:
        uuids: allowed devices in the order of the outer list; None when nothing restricts them.
        reason: what restricts them, for people: "CUDA_VISIBLE_DEVICES=3 allows only device 3".
        warning: why the list may mean other devices than its author thought, "" when it is clear.
    """

    uuids: tuple[str, ...] | None = None
    reason: str = ""
    warning: str = ""


def outer_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> Outer:
    """The devices that *environ* leaves to this process.

    The uuid of a MIG instance is believed even when *devices* do not contain it (its GPU was not divided yet when it
    was sampled), and a GPU that is allowed allows its instances.
    """
    environ = slurm.whole_machine(environ, devices)
    opinions = [opinion for source in SOURCES if (opinion := source(environ, devices)) is not None]
    if not opinions:
        return Outer()
    uuids, _ = opinions[0]
    for others, _ in opinions[1:]:
        uuids = tuple(uuid for uuid in uuids if uuid in others)
    return Outer(uuids, "; ".join(reason for _, reason in opinions), visible_devices.doubt(environ, devices))
