"""Several backends at once, as in `--backend nvml,amd`: one snapshot of the devices of several vendors.

Each backend has a worker of its own, so one that fails costs its own devices alone.  NVIDIA's devices keep the indices
that nvidia-smi gives them, and the others follow after them.  This module reads nothing itself: see client.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.errors import BackendError
from gpuguard.locale.messages import Sentence, sentence
from gpuguard.model import Device, Gap, Snapshot
from gpuguard.vendors import NVIDIA

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gpuguard.backends.client import WorkerBackend


_SHOWN_TWICE = sentence("backend.shown_twice", "two backends show it: name one of them")


class MergedBackend:
    """A Backend of several workers."""

    def __init__(self, name: str, workers: Sequence[WorkerBackend]) -> None:
        self.name = name
        self.simulated = workers[0].simulated
        # The devices of each worker when all of them were last read.  They tell whose a device is, and what it is
        # called while it cannot be read.
        self._known: dict[WorkerBackend, tuple[Device, ...]] = dict.fromkeys(workers, ())

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
                known = [device for device in self._known[worker] if wanted is None or device.uuid in wanted]
                found[worker] = tuple(map(_unread, known))
                gaps += [Gap(device.uuid, "device", reason) for device in known] or [Gap(None, "device", reason)]
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
            if not known:  # whose a device is and which index it has are known only after all devices were read
                with suppress(BackendError):
                    self._read(worker, (), None)
        owners = {device.uuid: worker for worker, known in self._known.items() for device in known}
        shares = [(worker, [uuid for uuid in devices if owners.get(uuid, worker) is worker]) for worker in self._known]
        return [share for share in shares if share[1]] or shares[:1]

    def _numbered(self, found: Mapping[WorkerBackend, Sequence[Device]], gaps: list[Gap]) -> Iterator[Device]:
        """Yield the devices with their indices on this machine; add a gap for each that two backends show."""
        first, shown = 0, set[str]()
        nvidia_first = sorted(
            self._known, key=lambda worker: NVIDIA.name not in {d.vendor for d in self._known[worker]}
        )
        for worker in nvidia_first:
            for device in found.get(worker, ()):
                if device.uuid in shown:
                    gaps.append(Gap(device.uuid, "device", _SHOWN_TWICE))
                else:
                    yield replace(device, index=first + device.index, ordinal=device.index) if first else device
            shown |= {device.uuid for device in self._known[worker]}
            first += 1 + max((device.index for device in self._known[worker]), default=-1)


def _unread(device: Device) -> Device:
    """Return a device that could not be read, with only the fields that identify it."""
    names = ("index", "uuid", "name", "vendor", "parent_uuid", "mig_profile", "gpu_instance_id")
    unresponsive = sentence("problem.unresponsive", "unresponsive")
    return Device(problems=(unresponsive,), **{name: getattr(device, name) for name in names})


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
