"""Machines for tests that stay in this process: backends without a driver and without a file."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from builders import a_device, a_snapshot

from gpuguard.model import Device, Snapshot


class Machine:
    """A backend over devices that the test may change between two samples; it counts and records what it is asked."""

    name = "machine"
    simulated = True

    def __init__(self, *devices: Device) -> None:
        self.devices = list(devices) or [a_device(index=index) for index in range(4)]
        self.asked: list[tuple[frozenset[str], tuple[str, ...] | None]] = []
        self.before_sample: Callable[[], None] = lambda: None

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        self.asked.append((frozenset(fields), None if devices is None else tuple(devices)))
        self.before_sample()
        chosen = [
            each for each in self.devices if devices is None or each.uuid in devices or each.parent_uuid in devices
        ]
        return a_snapshot(*chosen)

    def close(self) -> None:
        pass

    def change(self, index: int, **fields: object) -> None:
        self.devices[index] = replace(self.devices[index], **fields)  # type: ignore[arg-type]
