"""What is left of a device that several claims share: arithmetic on what their records promise and the driver shows.

A share counts with what it was promised or with what its user's processes hold, whichever is more; all other memory in
use counts as strangers'.  No claim can join a device with a share whose record cannot be believed.  Does not
read anything: see records for who shares a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.model import ClaimRecord, Device
from gpuguard.sanitize import neutralise
from gpuguard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Sharing:
    """Who shares a device.

    Args:
        claims: one per locked slot, the ones that can be believed.
        unknown: locked slots of which no record tells in a way that can be believed.
        owners: pid -> uid of the share that the process belongs to.
    """

    claims: tuple[ClaimRecord, ...] = ()
    unknown: int = 0
    owners: Mapping[int, int] | None = None

    @property
    def count(self) -> int:
        """How many share it."""
        return len(self.claims) + self.unknown

    def belongs(self, pid: int) -> bool:
        """Whether the process belongs to one of the shares."""
        return pid in (self.owners or {})


UNSHARED = Sharing()


def is_share_of(record: ClaimRecord, uuid: str) -> bool:
    """Whether the claim shares the device instead of having it alone."""
    return any(slot.startswith(f"{uuid}.") for slot in record.slots)


def sharing_on(device: Device, claims: Sequence[ClaimRecord], owners: Mapping[int, int] | None = None) -> Sharing:
    """Who shares *device*, of living *claims* whose slots are locked.

    Of several records that name one slot the greatest counts: a small lie beside it changes nothing.
    """
    of_slot: dict[str, list[ClaimRecord]] = {}
    for record in claims:
        for slot in record.slots:
            if slot.startswith(f"{device.uuid}."):
                of_slot.setdefault(slot, []).append(record)
    best = [max(records, key=lambda record: _believed(record, device)) for records in of_slot.values()]
    known = tuple(record for record in best if _believed(record, device))
    return Sharing(known, len(best) - len(known), owners)


def capacity(device: Device) -> int | None:
    """Bytes that the claims on it can have together; None when that is unknown."""
    return None if device.memory_total is None else device.memory_total - (device.memory_reserved or 0)


def memory_left(device: Device, sharing: Sharing) -> int | None:
    """Bytes that a further share can have; None when that is unknown."""
    room = capacity(device)
    if room is None or device.memory_used is None:
        return None
    used: dict[int, int] = {}
    for process in device.processes or ():
        if (owner := (sharing.owners or {}).get(process.pid)) is not None:
            used[owner] = used.get(owner, 0) + (process.memory_used or 0)
    promised: dict[int, int] = {}
    for record in sharing.claims:
        promised[record.uid] = promised.get(record.uid, 0) + (record.memory or 0)
    strangers = max(0, device.memory_used - sum(used.values()))
    return room - strangers - sum(max(count, used.get(uid, 0)) for uid, count in promised.items())


def slots_left(sharing: Sharing, slots: int) -> int:
    """How many further claims can share it; each of those that do may have set a bound."""
    bounds = [record.most for record in sharing.claims if record.most is not None and record.most > 0]
    return max(0, min(slots, *bounds) - sharing.count) if bounds else max(0, slots - sharing.count)


def shared_by(sharing: Sharing) -> str:
    """``"alice (10GiB) and bob (20GiB)"``."""
    names = [f"{neutralise(record.user)} ({format_bytes(record.memory)})" for record in sharing.claims]
    names += [f"{sharing.unknown} without a record"] if sharing.unknown else []
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _believed(record: ClaimRecord, device: Device) -> int:
    """The bytes of a share; 0 when its record says nothing that can be true of this device."""
    if record.memory is None or record.memory <= 0:
        return 0
    return record.memory if device.memory_total is None or record.memory <= device.memory_total else 0
