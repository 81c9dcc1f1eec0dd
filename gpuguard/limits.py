"""The limits of a job: what its owner has set for it, judged by the rules of the guard on the job alone.

Nobody but the job can exceed them: whoever else is on its devices is taken out of the sample before it is judged, and
his memory never counts.  Once a limit is reached the job is ended, and that is all that follows: see run for how.
Pure; a job without such a limit does not even load this file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING

from gpuguard.attribution import computes
from gpuguard.errors import InvalidRequest
from gpuguard.model import (
    MEMORY,
    PROCESS_DETAILS,
    PROCESSES,
    THERMAL,
    UTILIZATION,
    ClaimRecord,
    Device,
    GpuProcess,
    Snapshot,
    Verdict,
)
from gpuguard.nouns import replace
from gpuguard.policies import engine
from gpuguard.policies.amounts import Amount
from gpuguard.policies.engine import Policy, Step
from gpuguard.policies.idle import Idle
from gpuguard.policies.memory import Memory
from gpuguard.policies.temperature import Temperature
from gpuguard.policies.view import judged
from gpuguard.units import format_duration

if TYPE_CHECKING:
    from gpuguard.policies import Rule

TEMPERATURE_SECONDS = 30.0  # a device passes its limit for a moment whenever the load changes
IDLE_BELOW = 5.0  # percent

# One sample above the limit is a moment's; two are two moments'.  The engine steps at most once per sample and first
# at the second, so that this ends a job at the third in a row.
_THIRD_SAMPLE = (Step("log"), Step("terminate"))

# What a limit is judged by.  Besides, the processes of the device must be known.
_JUDGED_BY = {"memory-limit": "memory_used", "temperature-limit": "temperature", "idle-limit": "utilization"}
_GROUPS = {"memory-limit": MEMORY, "temperature-limit": THERMAL, "idle-limit": UTILIZATION}


@dataclass(frozen=True)
class Reached:
    """A limit that the job has reached."""

    limit: str  # "memory-limit"
    why: str
    pids: tuple[int, ...]  # of the job's processes that are meant; (): it has none on its devices


@dataclass(frozen=True)
class Judged:
    """What one sample says: warnings for the owner, each once, and the limit that is reached, if any."""

    strangers: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    reached: Reached | None = None


def policies_of(memory: Amount | None, temperature: float | None, idle: float | None) -> tuple[Policy, ...]:
    """Limits -> policies.

    Args:
        memory: of all processes of the job together, on each of its devices.
        temperature: degrees Celsius of any of its devices.
        idle: seconds for which all of its devices rest.

    Raises:
        InvalidRequest: a limit of nothing, which ends every job.
    """
    if (memory and not memory.value) or temperature == 0 or idle == 0:
        raise InvalidRequest("a limit of 0 ends every job: leave the option out for no limit.")
    policies = []
    if memory is not None:
        policies.append(_policy("memory-limit", Memory(memory, per="user"), 0.0, _THIRD_SAMPLE))
    if temperature is not None:
        policies.append(_policy("temperature-limit", Temperature(temperature, per="process"), TEMPERATURE_SECONDS))
    if idle is not None:
        policies.append(_policy("idle-limit", Idle(IDLE_BELOW), idle))
    return tuple(policies)


def _policy(name: str, rule: Rule, hold: float, steps: tuple[Step, ...] = (Step("terminate"),)) -> Policy:
    many = 10**9  # a job may have any number of processes, and all of them are meant
    return Policy(name, (rule,), hold=hold, steps=steps, at_most_users=many, at_most_processes=many, enforce=True)


@dataclass
class Limits:
    """The limits of one job, and what was seen of it so far.

    Args:
        policies: from policies_of().
        claim: that of the job, with its devices.
        present: pids that were on the devices before the job; their owners were there first.
        ticks_per_second: of the clock in /proc.
    """

    policies: Sequence[Policy]
    claim: ClaimRecord
    present: Collection[int] = ()
    ticks_per_second: int = 100
    _memory: engine.Memory = field(default_factory=engine.Memory)
    _told: set[object] = field(default_factory=set)
    _unknown: set[tuple[str, str]] = field(default_factory=set)  # (limit, uuid) in the last sample

    def __post_init__(self) -> None:
        everywhere = len(self.claim.devices)  # a job that uses one of its two devices is not idle
        self.policies = [
            replace_fields(one, devices_at_least=everywhere) if one.name == "idle-limit" else one
            for one in self.policies
        ]

    @property
    def fields(self) -> frozenset[str]:
        """The field groups that must be sampled."""
        return frozenset({MEMORY, PROCESSES, PROCESS_DETAILS, *(_GROUPS[policy.name] for policy in self.policies)})

    def judge(self, snapshot: Snapshot, family: Mapping[int, int], interval: float) -> Judged:
        """Judge one sample.

        Args:
            snapshot: of the devices of the job, at least.
            family: the living processes of the job: pid -> start time in clock ticks since boot.
            interval: seconds between samples.
        """
        own = self._own(snapshot, family)
        judgement = engine.evaluate(own, self.policies, self._memory, interval=interval)
        due = [verdict for verdict in judgement.verdicts if verdict.action == "terminate"]
        reached = self._reached(due[0]) if due else None
        return Judged(tuple(self._strangers(snapshot, family)), tuple(self._blind(own)), reached)

    def _own(self, snapshot: Snapshot, family: Mapping[int, int]) -> Snapshot:
        """The job's devices with the job's processes and its claim, and nothing of anybody else."""
        claimed = set(self.claim.devices)
        parents = {device.parent_uuid for device in snapshot.devices if device.uuid in claimed}
        devices = [
            self._with_own(device, family)
            for device in snapshot.devices
            if device.uuid in claimed | parents or device.parent_uuid in claimed
        ]
        return replace(snapshot, devices=tuple(devices), claims=(self.claim,))

    def _with_own(self, device: Device, family: Mapping[int, int]) -> Device:
        if device.processes is None:
            return device
        return replace(device, processes=tuple(one for one in device.processes if self._is_own(one, family)))

    def _is_own(self, process: GpuProcess, family: Mapping[int, int]) -> bool:
        started = family.get(process.pid)
        if started is None or process.start_time is None:
            return False
        return round(process.start_time * self.ticks_per_second) == started  # else the pid was given to somebody new

    def _reached(self, verdict: Verdict) -> Reached:
        why = verdict.finding.why
        if verdict.policy == "memory-limit":
            why = f"the job {why}"
        if verdict.policy == "idle-limit":
            hold = next(policy.hold for policy in self.policies if policy.name == verdict.policy)
            why = f"{why}, for {format_duration(hold)}"
        return Reached(
            verdict.policy, f"{why} (--{verdict.policy})", tuple(one.pid for one in verdict.finding.processes)
        )

    def _strangers(self, snapshot: Snapshot, family: Mapping[int, int]) -> list[str]:
        """Somebody else's processes that came to a device of the job; those without a known owner are left alone."""
        texts = []
        for device in snapshot.devices:
            for process in judged(device) if device.uuid in self.claim.devices else ():
                mark = (device.uuid, process.pid, process.start_time)
                known = process.pid in family or process.pid in self.present or process.uid == self.claim.uid
                if not known and computes(process) and mark not in self._told:
                    self._told.add(mark)
                    who = process.user or f"uid {process.uid}"
                    texts.append(
                        f"{who} (pid {process.pid}) computes on GPU {device.index} too, which you have claimed."
                    )
        return texts

    def _blind(self, own: Snapshot) -> list[str]:
        """Limits that cannot be kept because the driver does not tell enough, in two samples in a row."""
        unknown = {
            (policy.name, device.uuid)
            for policy in self.policies
            for device in own.devices
            if device.uuid in self.claim.devices and _is_unknown(device, policy.name)
        }
        lasting = (unknown & self._unknown) - self._told
        self._unknown = unknown
        self._told |= lasting
        index = {device.uuid: device.index for device in own.devices}
        return [
            f"--{limit} cannot be kept on GPU {index[uuid]} now: the driver does not tell what it is judged by."
            for limit, uuid in sorted(lasting)
        ]


def _is_unknown(device: Device, limit: str) -> bool:
    if device.processes is None or not device.processes_plausible or getattr(device, _JUDGED_BY[limit]) is None:
        return True
    return limit == "memory-limit" and any(process.memory_used is None for process in device.processes)
