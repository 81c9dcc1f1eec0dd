"""What has been seen since `gpuguard top` was started, for its sparklines and plots.  Bounded; reads nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gpuguard.views.top_scene import Identity, Scene

KEPT = 300  # looks: five minutes at one a second
FORGOTTEN = 600  # so many looks after its end a process is forgotten
METRICS = ("memory", "utilization", "temperature", "power")  # of a device: shares 0..1, degrees, watts


@dataclass(frozen=True)
class Moment:
    """One process at one look; None = unknown."""

    memory: int | None  # bytes, on all devices together
    sm: float | None
    cpu: float | None
    host: int | None


class History:
    """Rings of the last KEPT values, per device and per process."""

    def __init__(self) -> None:
        self.devices: dict[str, dict[str, deque[float | None]]] = {}
        self.processes: dict[Identity, deque[Moment]] = {}
        self._seen: dict[Identity, int] = {}
        self._looks = 0

    def add(self, scene: Scene) -> None:
        """Remember what *scene* shows."""
        self._looks += 1
        for device in scene.snapshot.devices:
            rings = self.devices.setdefault(device.uuid, {name: deque(maxlen=KEPT) for name in METRICS})
            known = device.memory_used is not None and device.memory_total
            rings["memory"].append((device.memory_used or 0) / (device.memory_total or 1) if known else None)
            rings["utilization"].append(None if device.utilization is None else device.utilization / 100)
            rings["temperature"].append(device.temperature)
            rings["power"].append(device.power_draw)
        gone = set(self.devices) - {device.uuid for device in scene.snapshot.devices}
        for uuid in gone:
            del self.devices[uuid]
        self._add_processes(scene)

    def _add_processes(self, scene: Scene) -> None:
        rows: dict[Identity, list[tuple[int | None, float | None]]] = {}
        for device in scene.snapshot.devices:
            for row in device.processes or ():
                if row.start_time is not None:
                    rows.setdefault((row.pid, row.start_time), []).append((row.memory_used, row.utilization))
        for identity, values in rows.items():
            use = scene.host.get(identity)
            memory, rates = [one for one, _ in values], [rate for _, rate in values if rate is not None]
            moment = Moment(
                None if None in memory else sum(one or 0 for one in memory),
                sum(rates) / len(rates) if rates else None,
                use.cpu if use else None,
                use.memory if use else None,
            )
            self.processes.setdefault(identity, deque(maxlen=KEPT)).append(moment)
            self._seen[identity] = self._looks
        for identity in [one for one, last in self._seen.items() if self._looks - last > FORGOTTEN]:
            del self._seen[identity], self.processes[identity]
