"""A machine on which everybody offends against every rule, and what goes wrong there from sample to sample.

machine = Troubled(); machine.suffer(10.0, ("temperature", "", "garbled")); machine.sample(())
machine.since(policy, subject, at): since when the driver has said everything, without a hole, that the verdict needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from faulty_driver import AGGRESSIVE, GUILTY, OTHER

from gpuguard.errors import DriverUnresponsive
from gpuguard.model import Device, Gap, GpuProcess, Snapshot, Verdict
from gpuguard.policies.amounts import parse_rate
from gpuguard.policies.trends import ForecastRule, MemoryGrowthRule
from gpuguard.policies.view import HostUse, RuleView

INTERVAL, DEVICES = 10.0, 3
WINDOW = 100.0  # of the rules that look back
RULES = {
    **AGGRESSIVE,
    "memory_growth": MemoryGrowthRule(parse_rate("1MiB/10m"), WINDOW),
    "forecast": ForecastRule(1e7, WINDOW, per="process"),
}
LOOKS_BACK = {"memory_growth", "forecast"}
# What a rule reads of a device, and of a process there, beside who it is.
OF_DEVICE = {
    "temperature": ("temperature",),
    "power": ("power_draw",),
    "idle": ("utilization",),
    "expression": ("utilization",),
    "health": ("problems",),
    "forecast": ("memory_free",),
}
OF_PROCESS = {
    "memory": ("memory_used",),
    "memory_growth": ("memory_used",),
    "forecast": ("memory_used",),
    "utilization": ("utilization",),
    "command": ("executable",),
}
BY_CLAIMS = {"unclaimed", "trespass"}

FIELDS = ("temperature", "power_draw", "utilization", "memory_used", "problems")
PROCESS_FIELDS = ("memory_used", "utilization", "executable", "uid", "start_time")
OF_LISTS = ("garbled", "no list", "absent", "lost", "ended", "reused")
FAULTS = (*FIELDS, *(f"process {field}" for field in PROCESS_FIELDS), *OF_LISTS)
PAUSES = (INTERVAL, INTERVAL, INTERVAL, INTERVAL, 2.0, 25.0, 31.0, 3600.0, -500.0)
NO_SAMPLE, NO_CLAIMS = "no sample", "no claims"


@dataclass
class Troubled:
    """A backend, and the history of what it said."""

    name = "troubled"
    simulated = True

    def __post_init__(self) -> None:
        self.clock, self.tick = 100_000.0, 0
        self.starts: list[float | None] = [1000.0 + index for index in range(DEVICES)]
        self.said: list[Snapshot] = []
        self.silent = False

    def suffer(self, pause: float, faults: Sequence[str], of_all: str = "") -> None:
        """Go on by *pause* seconds, with one fault or none on each device, and one of the whole machine."""
        self.clock += pause
        self.tick += 1
        self.silent = of_all == NO_SAMPLE
        devices, gaps = [], []
        for index, fault in enumerate(faults):
            device = self._device(index, fault)
            if device is not None:
                devices.append(device)
            if fault in FAULTS:
                gaps.append(Gap(a_device(index).uuid, fault.rpartition(" ")[2], "broken"))
        if of_all == NO_CLAIMS:
            gaps.append(Gap(None, "claims", "broken"))
        claims = () if of_all == NO_CLAIMS else (a_claim_record(a_device(0), uid=OTHER, user="bob", pid=None),)
        now = a_snapshot(*devices, clock=self.clock, taken_at=1.7e9 + self.clock, gaps=tuple(gaps), claims=claims)
        self.now = now if devices else replace(now, devices=())

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        if self.silent:
            raise DriverUnresponsive("a driver call did not come back.")
        if devices is None:
            self.said.append(self.now)
        return self.now

    def close(self) -> None:
        pass

    def look_around(self, snapshot: Snapshot, *more: object) -> RuleView:
        """What the watchdog finds beside the driver."""
        given = {device.uuid: frozenset({OTHER}) for device in snapshot.devices}
        return RuleView(replace(self.now, clock=snapshot.clock), host=dict[Any, HostUse](), scheduled=given)

    def _device(self, index: int, fault: str) -> Device | None:
        pid, used = 4000 + index, 30 * GIB + self.tick * GIB // 4
        if fault == "ended":
            self.starts[index] = None
        elif fault == "reused" or self.starts[index] is None:
            self.starts[index] = max(self.clock, 2000.0) - 1.0
        row = a_process(
            pid, start_time=self.starts[index], uid=GUILTY, memory_used=used, utilization=99.0, executable="/bin/x"
        )
        device = a_device(
            index, processes=(row,), memory_used=used, temperature=95.0, power_draw=690.0, utilization=0.0,
            problems=("row remap pending",),
        )  # fmt: skip
        if fault in FIELDS:
            return replace(device, **{fault: None}, **({"memory_free": None} if fault == "memory_used" else {}))
        if fault.startswith("process "):
            return replace(device, processes=(replace(row, **{fault.removeprefix("process "): None}),))
        changes: dict[str, dict[str, Any] | None] = {
            "garbled": {"processes_plausible": False, "processes": (row, a_process(4999, uid=GUILTY))},
            "no list": {"processes": None},
            "ended": {"processes": ()},
            "absent": None,
        }
        if fault == "lost":
            return Device(index, device.uuid, problems=("lost",))
        change = changes.get(fault, {})
        return None if change is None else replace(device, **change)

    # What the laws say of it; written without a look at the engine.

    def listed(self, victim: tuple[int, float | None]) -> bool:
        """Whether that process is in a list that can be believed, in the newest sample."""
        rows = (row for device in self.said[-1].devices if device.processes_plausible for row in device.processes or ())
        return victim in {(row.pid, row.start_time) for row in rows}

    def since(self, verdict: Verdict, rule: str) -> float | None:
        """From which clock on every sample has told all that *rule* needs of the subject; None: the newest does not."""
        begin = newer = None
        for snapshot in reversed(self.said):
            broken = newer is not None and not 0 < newer - snapshot.clock <= 3 * INTERVAL
            if broken or not _tells(snapshot, verdict, rule):
                return begin
            begin = newer = snapshot.clock
        return begin


def _tells(snapshot: Snapshot, verdict: Verdict, rule: str) -> bool:
    subject = verdict.finding.subject
    if rule in BY_CLAIMS and any(gap.field == "claims" for gap in snapshot.gaps):
        return False
    device = snapshot.device(str(subject.device))
    if device is None or any(getattr(device, field) is None for field in OF_DEVICE.get(rule, ())):
        return False
    if subject.kind == "device":
        return True  # who is on it now is what counts
    if not device.processes_plausible or device.processes is None:
        return False
    rows = [row for row in device.processes if _is_meant(row, verdict)]
    return bool(rows) and all(getattr(row, field) is not None for row in rows for field in OF_PROCESS.get(rule, ()))


def _is_meant(row: GpuProcess, verdict: Verdict) -> bool:
    subject = verdict.finding.subject
    if row.uid is None or row.start_time is None:
        return False
    if subject.kind == "process":
        return (row.pid, row.start_time) == (subject.pid, subject.start_time)
    return row.uid == subject.uid
