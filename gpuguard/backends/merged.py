"""Several backends at once, as in `--backend nvml,amd`: one snapshot of the devices of several vendors.

Each backend has a worker of its own, so one that fails costs its own devices alone.  NVIDIA's devices keep the indices
that nvidia-smi gives them, and the others follow after them, in the order of VENDORS.  The devices of a backend that
never answered have their places in this order, too, as far as the kernel knows how many there are: otherwise an index
would mean another device as long as it fails.  This module reads no device itself: see client.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.backends import UNRESPONSIVE, gpu_folders
from gpuguard.errors import BackendError
from gpuguard.locale.messages import Sentence, sentence
from gpuguard.model import Device, Gap, Snapshot, devices_of
from gpuguard.vendors import VENDORS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gpuguard.backends.client import WorkerBackend


_SHOWN_TWICE = sentence("backend.shown_twice", "two backends show it: name one of them")


class MergedBackend:
    """A Backend of several workers."""

    def __init__(self, name: str, workers: Sequence[WorkerBackend]) -> None:
        self.name = name
        self.simulated = workers[0].simulated
        # The devices of each worker when all of them were last read, or None if they never were.  They tell whose a
        # device is, and what it is called while it cannot be read.
        self._known: dict[WorkerBackend, tuple[Device, ...] | None] = dict.fromkeys(workers)

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does.  Raises BackendError if none of the backends can be read."""
        snapshots: list[Snapshot] = []
        gaps: list[Gap] = []
        found: dict[WorkerBackend, tuple[Device, ...]] = {}
        error: BackendError | None = None
        for worker, wanted in self._shares(devices):
            try:
                snapshots.append(snapshot := self._read(worker, fields, wanted))
                found[worker] = snapshot.devices
                gaps += snapshot.gaps
            except BackendError as fault:
                error = error or fault
                text = str(fault)
                reason = text.partition("\n")[0]
                if isinstance(text, Sentence):
                    reason = Sentence(reason, text.key, text.values)
                known = [device for device in self._known[worker] or () if wanted is None or device.uuid in wanted]
                found[worker] = tuple(map(_unread, known))
                gaps += [Gap(device.uuid, "device", reason) for device in known]
                if self._known[worker] is None:  # none of its devices can be named
                    gaps.append(Gap(None, devices_of(_vendor_of(worker.name)), reason))
        if error and not snapshots:
            raise error
        return replace(_joined(snapshots), devices=tuple(self._numbered(found, gaps)), gaps=tuple(gaps))

    def close(self) -> None:
        """End the workers."""
        for worker in self._known:
            worker.close()

    def __enter__(self) -> MergedBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, worker: WorkerBackend, fields: Collection[str], wanted: Sequence[str] | None) -> Snapshot:
        snapshot = worker.sample(fields, wanted)
        if wanted is None:
            self._known[worker] = snapshot.devices
        return snapshot

    def _shares(self, devices: Collection[str] | None) -> Iterable[tuple[WorkerBackend, list[str] | None]]:
        """Return the backends to ask, each with the devices to read: its own, and those that none has shown yet."""
        if devices is None:
            return [(worker, None) for worker in self._known]
        for worker, known in self._known.items():
            if known is None:  # whose a device is and which index it has are known only after all devices were read
                with suppress(BackendError):
                    self._read(worker, (), None)
        owners = {device.uuid: worker for worker, known in self._known.items() for device in known or ()}
        shares = [(worker, [uuid for uuid in devices if owners.get(uuid, worker) is worker]) for worker in self._known]
        return [share for share in shares if share[1]] or shares[:1]

    def _numbered(self, found: Mapping[WorkerBackend, Sequence[Device]], gaps: list[Gap]) -> Iterator[Device]:
        """Yield the devices with their indices on this machine; add a gap for each that two backends show."""
        first, shown, order = 0, set[str](), list(VENDORS)
        for worker in sorted(self._known, key=lambda worker: self._place(worker, order)):
            for device in found.get(worker, ()):
                if device.uuid in shown:
                    gaps.append(Gap(device.uuid, "device", _SHOWN_TWICE))
                else:
                    yield replace(device, index=first + device.index, ordinal=device.number) if first else device
            known = self._known[worker]
            shown |= {device.uuid for device in known or ()}
            first += _bound(worker.name) if known is None else 1 + max((device.index for device in known), default=-1)

    def _place(self, worker: WorkerBackend, order: Sequence[str]) -> int:
        """Return where the devices of a worker stand among those of all; the order of *name* decides between equals."""
        known = {device.vendor for device in self._known[worker] or ()} or {_vendor_of(worker.name)}
        return min(order.index(vendor) if vendor in order else len(order) for vendor in known)


def _vendor_of(name: str) -> str:
    """Return the vendor of the devices that a backend shows, or its kind if that shows devices of any vendor."""
    kind = name.partition(":")[0]
    return next((vendor.name for vendor in VENDORS.values() if vendor.backend == kind), kind)


def _bound(name: str) -> int:
    """Return how many GPUs of a backend the kernel has bound to their driver."""
    vendor = VENDORS.get(_vendor_of(name))
    return 0 if vendor is None or ":" in name else len(gpu_folders(vendor))


def _unread(device: Device) -> Device:
    """Return a device that could not be read, with only the fields that identify it."""
    names = ("index", "uuid", "name", "vendor", "parent_uuid", "mig_profile", "gpu_instance_id")
    return Device(problems=(UNRESPONSIVE,), **{name: getattr(device, name) for name in names})


def _joined(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the first snapshot with what the others say of the machine; nothing in it was read before its time."""
    topologies = [snapshot.topology for snapshot in snapshots if snapshot.topology is not None]
    return replace(
        snapshots[0],
        backend=",".join(dict.fromkeys(snapshot.backend for snapshot in snapshots)),
        taken_at=min(snapshot.taken_at for snapshot in snapshots),
        clock=min(snapshot.clock for snapshot in snapshots),
        topology=tuple(pair for topology in topologies for pair in topology) if topologies else None,
    )
