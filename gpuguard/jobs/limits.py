"""The limits of a job: what its owner has set for it, judged by the rules of the guard on the job alone.

Nobody but the job can exceed them: whoever else is on its devices is taken out of the sample before it is judged, and
his memory never counts; only where the driver does not tell who is who, the devices count as they are (see standin).
Once a limit is reached the job is ended, and that is all that follows: see run for how.
Pure; a job without such a limit does not even load this file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING

from gpuguard.device_state import IDLE_TOLERANCE, computes
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
from gpuguard.policies import engine
from gpuguard.policies.amounts import Amount
from gpuguard.policies.escalation import EngineMemory as EngineMemory
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.thresholds import MemoryRule, TemperatureRule
from gpuguard.policies.view import judged_processes
from gpuguard.units import format_bytes, format_duration

if TYPE_CHECKING:
    from gpuguard.policies import Rule

# A job on devices whose driver does not tell whose processes are whose: one process stands for all of the job.
#
# That is so in a container with pids of its own (the driver's are the host's), and where the driver lists no
# processes. A device that is claimed for the job alone is the job's with all the memory that is in use above what was
# before; where others may use it too, the memory of the job is unknown.  Heat and rest are the device's in any case.
# Pure: see limits.


MEMORY_LIMITS = ("memory", "memory-limit")  # the share of a device, and what ends a job
_HERE = "this is a pid namespace of its own (a container), where the driver's pids name nobody"


def used_before(devices: Sequence[Device]) -> dict[str, int]:
    """uuid -> bytes that were in use before the job, of those of *devices* that were nobody's."""
    return {one.uuid: one.memory_used for one in devices if one.memory_used is not None and not one.processes}


@dataclass
class StandIn:
    """What is known of the devices of a job besides their processes.

    Args:
        before: uuid -> bytes in use before the job, of the devices that are claimed for it alone.
        pids_known: whether the driver's pids are those of this pid namespace.
    """

    before: Mapping[str, int] = field(default_factory=dict)
    pids_known: bool = True
    _listed: set[str] = field(default_factory=set)  # devices on which the driver has listed a process
    _unlisted: set[str] = field(default_factory=set)  # devices that did not show who uses them in the last sample

    def needed(self, devices: Sequence[Device]) -> frozenset[str]:
        """The uuids of those of *devices*, one sample of the job's, that do not show which processes are the job's."""
        if not self.pids_known:
            return frozenset(device.uuid for device in devices)
        self._listed.update(device.uuid for device in devices if device.processes)
        unlisted = {device.uuid for device in devices if self._is_used_unseen(device)}
        lasting, self._unlisted = unlisted & self._unlisted, unlisted
        return frozenset(lasting)

    def _is_used_unseen(self, device: Device) -> bool:
        before = self.before.get(device.uuid)
        if before is None or device.uuid in self._listed:
            return False  # where processes are listed at all, a list that is missing is a gap
        if device.processes is None:
            return True
        return device.memory_used is not None and device.memory_used - before > IDLE_TOLERANCE

    def put_on(self, device: Device, process: tuple[int, float] | None, claim: ClaimRecord) -> Device:
        """*device* with the one process (pid, start time) that stands for the job; None: the job has ended."""
        rows: tuple[GpuProcess, ...] = ()
        if process is not None:
            before, used = self.before.get(device.uuid), device.memory_used
            own = None if before is None or used is None else max(0, used - before)
            rows = (GpuProcess(process[0], own, start_time=process[1], uid=claim.uid, user=claim.user),)
        return replace(device, processes=rows, processes_plausible=True)

    def caveats(self, limits: Sequence[str], devices: Sequence[Device]) -> Iterator[str]:
        """What the owner of a job with these *limits* ("memory-limit") on *devices* should know before it starts."""
        if self.pids_known:
            return
        open_to_others = [str(device.index) for device in devices if device.uuid not in self.before]
        kept = [f"--{one}" for one in limits if one not in MEMORY_LIMITS or len(open_to_others) < len(devices)]
        unkept = [f"--{one}" for one in limits if one in MEMORY_LIMITS and open_to_others]
        if kept:
            are = "are" if len(kept) > 1 else "is"
            yield f"{_HERE}: {', '.join(kept)} {are} judged by the whole GPU, whoever else uses it."
        if unkept:
            yield (
                f"{', '.join(unkept)} cannot be kept on GPU {','.join(open_to_others)}: {_HERE}, and others may use "
                "that GPU too.  Claim it for this job alone, or start the container with its host's pids (--pid=host)."
            )


def hidden(device: Device) -> str:
    """What the owner of the job should know when it turns out only now."""
    return f"the driver lists no processes on GPU {device.index}: the limits of the job are judged by the whole GPU."


TEMPERATURE_SECONDS = 30.0  # a device passes its limit for a moment whenever the load changes
IDLE_BELOW = 5.0  # percent

# One sample above the limit is a moment's; two are two moments'.  The engine steps at most once per sample and first
# at the second, so that this ends a job at the third in a row.  The action is none of the guard's: what ends the job
# is the last step, also where nothing of it is on its devices.
_SECOND_SAMPLE = (Step("log"),)
_THIRD_SAMPLE = (Step("log"), Step("log"))

# What a limit is judged by.  Besides, the processes of the device must be known.
_JUDGED_BY = {
    "memory": "memory_used",
    "memory-limit": "memory_used",
    "temperature-limit": "temperature",
    "idle-limit": "utilization",
}
_GROUPS = {"memory": MEMORY, "memory-limit": MEMORY, "temperature-limit": THERMAL, "idle-limit": UTILIZATION}


@dataclass(frozen=True)
class Reached:
    """A limit that the job has reached."""

    limit: str  # "memory-limit"
    why: str
    pids: tuple[int, ...]  # of the job's processes that are meant; (): it has none on its devices


@dataclass(frozen=True)
class LimitFinding:
    """What one sample says: warnings for the owner, each once, and the limit that is reached, if any."""

    strangers: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    reached: Reached | None = None
    over: tuple[str, ...] = ()  # of a job that shares its devices: it uses more than its share
    used: int | None = None  # bytes, of all its processes together on the device where they use most


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
        policies.append(_policy("memory-limit", MemoryRule(memory, per="user"), 0.0, _THIRD_SAMPLE))
    if temperature is not None:
        policies.append(_policy("temperature-limit", TemperatureRule(temperature, per="process"), TEMPERATURE_SECONDS))
    if idle is not None:
        policies.append(_policy("idle-limit", IdleRule(IDLE_BELOW), idle))
    return tuple(policies)


def share_policy(memory: int) -> Policy:
    """What a job that shares its devices is warned by: its share, in bytes.  --memory-limit is what ends a job."""
    return _policy("memory", MemoryRule(Amount(memory, format_bytes(memory)), per="user"), 0.0)


def _policy(name: str, rule: Rule, hold: float, steps: tuple[Step, ...] = _SECOND_SAMPLE) -> Policy:
    many = 10**9  # a job may have any number of processes, and all of them are meant
    return Policy(name, (rule,), hold=hold, steps=steps, at_most_users=many, at_most_processes=many, enforce=True)


@dataclass
class JobLimits:
    """The limits of one job, and what was seen of it so far.

    Args:
        policies: from policies_of().
        claim: that of the job, with its devices.
        present: pids that were on the devices before the job; their owners were there first.
        stand_in: what the job is judged by where the driver does not tell which processes are its own.
    """

    policies: Sequence[Policy]
    claim: ClaimRecord
    present: Collection[int] = ()
    stand_in: StandIn = field(default_factory=StandIn)
    _memory: EngineMemory = field(default_factory=EngineMemory)
    _told: set[object] = field(default_factory=set)
    _unknown: set[tuple[str, str]] = field(default_factory=set)  # (limit, uuid) in the last sample

    def __post_init__(self) -> None:
        everywhere = len(self.claim.devices)  # a job that uses one of its two devices is not idle
        self.policies = [
            replace_fields(one, devices_at_least=everywhere) if one.name == "idle-limit" else one
            for one in self.policies
        ]
        if not self.stand_in.pids_known:  # said before the start: see StandIn.caveats
            unkept = set(self.claim.devices) - self.stand_in.before.keys()
            self._told |= {(limit, uuid) for limit in MEMORY_LIMITS for uuid in unkept}

    @property
    def fields(self) -> frozenset[str]:
        """The field groups that must be sampled."""
        return frozenset({MEMORY, PROCESSES, PROCESS_DETAILS, *(_GROUPS[policy.name] for policy in self.policies)})

    def judge(
        self, snapshot: Snapshot, family: Mapping[int, float], interval: float, *, pid: int | None = None
    ) -> LimitFinding:
        """Judge one sample.

        Args:
            snapshot: of the devices of the job, at least.
            family: the living processes of the job: pid -> start time in seconds since boot.
            interval: seconds between samples.
            pid: of the command itself, as long as it lives.
        """
        own, texts = self._stood_in(snapshot, self._own(snapshot, family), family, pid)
        judgement = engine.evaluate(own, self.policies, self._memory, interval=interval)
        last = {policy.name: len(policy.steps) - 1 for policy in self.policies}
        due = [one for one in judgement.verdicts if one.step == last[one.policy] and one.policy != "memory"]
        known = [one for one in own.devices if not _is_unknown(one, "memory")]
        self._told -= {("memory", one.uuid) for one in known if (_used(one) or 0) <= (self.claim.memory or 0)}
        over = [one for one in judgement.verdicts if one.policy == "memory" and _level(one) not in self._told]
        self._told |= {_level(one) for one in over}
        reached = self._reached(due[0]) if due else None
        blind = (*texts, *self._blind(own))
        return LimitFinding(tuple(self._strangers(snapshot, family)), blind, reached, _over(over), _most_used(own))

    def _own(self, snapshot: Snapshot, family: Mapping[int, float]) -> Snapshot:
        """The job's devices with the job's processes and its claim, and nothing of anybody else."""
        claimed = set(self.claim.devices)
        parents = {device.parent_uuid for device in snapshot.devices if device.uuid in claimed}
        devices = [
            self._with_own(device, family)
            for device in snapshot.devices
            if device.uuid in claimed | parents or device.parent_uuid in claimed
        ]
        return replace(snapshot, devices=tuple(devices), claims=(self.claim,))

    def _with_own(self, device: Device, family: Mapping[int, float]) -> Device:
        if device.processes is None:
            return device
        return replace(device, processes=tuple(one for one in device.processes if self._is_own(one, family)))

    def _is_own(self, process: GpuProcess, family: Mapping[int, float]) -> bool:
        started = family.get(process.pid)
        return started is not None and process.start_time == started  # else the pid was given to another process

    def _stood_in(
        self, snapshot: Snapshot, own: Snapshot, family: Mapping[int, float], pid: int | None
    ) -> tuple[Snapshot, list[str]]:
        """*own* with one process for the job where nobody can tell which are its own, and what is to be said of it."""
        started = family.get(pid) if pid is not None else None
        process = None if pid is None or started is None else (pid, started)
        if process is None and self.stand_in.pids_known:
            return own, []
        needed = self.stand_in.needed([one for one in snapshot.devices if one.uuid in self.claim.devices])
        devices = [self.stand_in.put_on(one, process, self.claim) if one.uuid in needed else one for one in own.devices]
        new = [one for one in devices if one.uuid in needed and self.stand_in.pids_known and one.uuid not in self._told]
        self._told |= {one.uuid for one in new}
        return replace(own, devices=tuple(devices)), [hidden(one) for one in new]

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

    def _strangers(self, snapshot: Snapshot, family: Mapping[int, float]) -> list[str]:
        """Somebody else's processes that came to a device of the job; those without a known owner are left alone."""
        texts: list[str] = []
        if not self.stand_in.pids_known or self.claim.memory is not None:  # neighbours are no strangers
            return texts
        for device in snapshot.devices:
            for process in judged_processes(device) if device.uuid in self.claim.devices else ():
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


def _level(verdict: Verdict) -> object:
    return verdict.policy, verdict.finding.subject.device


def _over(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    advice = "its neighbours can run out of memory.  --memory-limit ends such a job"
    return tuple(f"the job {one.finding.why} (--memory): {advice}." for one in verdicts)


def _most_used(own: Snapshot) -> int | None:
    return max((used for device in own.devices if (used := _used(device)) is not None), default=None)


def _used(device: Device) -> int | None:
    amounts = [process.memory_used for process in device.processes or ()]
    return sum(filter(None, amounts)) if amounts and None not in amounts else None


def _is_unknown(device: Device, limit: str) -> bool:
    if device.processes is None or not device.processes_plausible or getattr(device, _JUDGED_BY[limit]) is None:
        return True
    return limit in MEMORY_LIMITS and any(process.memory_used is None for process in device.processes)
