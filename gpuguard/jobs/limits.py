"""The limits that the owner of a job has set for it, judged by the guard's rules on the job alone.

Processes of others on its devices are removed from the sample before it is judged.  Where the driver does not tell
which processes are the job's (in a container with pids of its own, or where it lists none), one process stands for the
whole job.  On a device that is claimed for the job alone it has all memory in use beyond what was in use before the
job; on a device that others may use as well, the job's memory is unknown.  Temperature and idleness are always judged
by the whole device.

Once a limit is reached, the job is ended: see run for how.  This module reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuguard.device_state import device_title
from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_, _, ngettext, translated
from gpuguard.locale.messages import sentence
from gpuguard.model import (
    DEVICE_FIELDS,
    IDLE_TOLERANCE,
    MEMORY,
    PROCESS_DETAILS,
    PROCESSES,
    ClaimRecord,
    Device,
    GpuProcess,
    Snapshot,
    Verdict,
)
from gpuguard.policies import engine
from gpuguard.policies.engine import EngineMemory as EngineMemory
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.rule import Rule
from gpuguard.policies.thresholds import MemoryRule, TemperatureRule
from gpuguard.units import Amount, format_bytes, format_duration

MEMORY_LIMITS = ("memory", "memory-limit")  # the share of a device, and what ends a job
_HERE = N_("this is a pid namespace of its own (a container), where the driver's pids name no process")


def used_before(devices: Sequence[Device]) -> dict[str, int]:
    """Return uuid -> bytes that were in use before the job, for those of *devices* without a process."""
    return {
        device.uuid: device.memory_used for device in devices if device.memory_used is not None and not device.processes
    }


TEMPERATURE_SECONDS = 30.0  # a device exceeds its limit for a moment whenever the load changes
IDLE_BELOW = 5.0  # percent

# One sample above the limit shows one moment, and two show two moments.  The engine takes at most one step per sample,
# the first one at the second sample, so that two steps end a job at the third in a row.  No action of the guard is
# taken: reaching the last step ends the job, even when it has no process on its devices.
_SECOND_SAMPLE = (Step("log"),)
_THIRD_SAMPLE = (Step("log"), Step("log"))


@dataclass(frozen=True)
class ReachedLimit:
    """A limit that the job has reached."""

    limit: str  # "memory-limit"
    why: str
    pids: tuple[int, ...]  # of the job's processes that reached it, or () if it has none on its devices


@dataclass(frozen=True)
class LimitFinding:
    """The outcome of one sample: warnings for the owner, each given once, and the limit that is reached, if any."""

    blind: tuple[str, ...] = ()
    reached: ReachedLimit | None = None
    over: tuple[str, ...] = ()  # warnings to a job on shared devices that it uses more than its share
    used: int | None = None  # bytes of all its processes together, on the device where they use most


def policies_of(memory: Amount | None, temperature: float | None, idle: float | None) -> tuple[Policy, ...]:
    """Turn the limits of a job into policies.

    Args:
        memory: the limit for all processes of the job together, on each of its devices.
        temperature: the limit for each of its devices, in degrees Celsius.
        idle: the seconds for which all of its devices may be idle.

    Raises:
        InvalidRequest: a limit is 0, which would end every job.
    """
    limits = {"--memory-limit": memory and memory.value, "--temperature-limit": temperature, "--idle-limit": idle}
    if nothing := next((option for option, limit in limits.items() if limit == 0), None):
        raise InvalidRequest(
            _("{option}: a limit of 0 ends every job: leave the option out for no limit.").format(option=nothing)
        )
    policies = []
    if memory is not None:
        policies.append(_policy("memory-limit", MemoryRule(memory, per="user"), 0.0, _THIRD_SAMPLE))
    if temperature is not None:
        policies.append(_policy("temperature-limit", TemperatureRule(temperature, per="process"), TEMPERATURE_SECONDS))
    if idle is not None:
        policies.append(_policy("idle-limit", IdleRule(IDLE_BELOW), idle))
    return tuple(policies)


def share_policy(memory: int) -> Policy:
    """Return the policy that warns a job on shared devices beyond its share (bytes); --memory-limit would end it."""
    return _policy("memory", MemoryRule(Amount(memory, format_bytes(memory)), per="user"), 0.0)


def _policy(name: str, rule: Rule, hold: float, steps: tuple[Step, ...] = _SECOND_SAMPLE) -> Policy:
    unbounded = 10**9  # a job may have any number of processes, and all of them are meant
    return Policy(name, (rule,), hold=hold, steps=steps, at_most_users=unbounded, at_most_jobs=unbounded, enforce=True)


@dataclass
class JobLimits:
    """The limits of one job, and what has been seen of it so far."""

    policies: Sequence[Policy]  # of policies_of()
    claim: ClaimRecord  # of the job, with its devices
    before: Mapping[str, int] = field(default_factory=dict)  # uuid -> bytes, of devices that are the job's alone
    pids_known: bool = True  # whether the driver's pids are those of this pid namespace
    _memory: EngineMemory = field(default_factory=EngineMemory)
    _reported: set[object] = field(default_factory=set)
    _unknown: set[tuple[str, str]] = field(default_factory=set)  # (limit, uuid) in the last sample
    _listed: set[str] = field(default_factory=set)  # devices on which the driver has listed a process
    _unlisted: set[str] = field(default_factory=set)  # devices that did not show who uses them in the last sample

    def __post_init__(self) -> None:
        everywhere = len(self.claim.devices)  # a job that uses one of its two devices is not idle
        self.policies = [
            replace(policy, devices_at_least=everywhere) if policy.name == "idle-limit" else policy
            for policy in self.policies
        ]
        if not self.pids_known:  # reported before the start: see caveats()
            unkept = set(self.claim.devices) - self.before.keys()
            self._reported |= {(limit, uuid) for limit in MEMORY_LIMITS for uuid in unkept}

    def caveats(self, devices: Sequence[Device]) -> Iterator[str]:
        """Yield what the owner of the job should know before it starts on *devices*."""
        if self.pids_known:
            return
        limits = [policy.name for policy in self.policies]
        open_to_others = [str(device.index) for device in devices if device.uuid not in self.before]
        all_open = len(open_to_others) == len(devices)
        kept = [f"--{limit}" for limit in limits if limit not in MEMORY_LIMITS or not all_open]
        unkept = [f"--{limit}" for limit in limits if limit in MEMORY_LIMITS and open_to_others]
        if kept:
            yield ngettext(
                "{here}: {limits} is judged by the whole GPU, with all that others do there.",
                "{here}: {limits} are judged by the whole GPU, with all that others do there.",
                len(kept),
            ).format(here=_(_HERE), limits=", ".join(kept))
        if unkept:
            yield (
                _(
                    "{limits} cannot be kept on GPU {devices}: {here}, and others may use that GPU too.  "
                    "Claim it for this job alone, or start the container with its host's pids (--pid=host)."
                ).format(limits=", ".join(unkept), devices=",".join(open_to_others), here=_(_HERE))
            )

    @property
    def fields(self) -> frozenset[str]:
        """The field groups that must be sampled."""
        judged_by = (DEVICE_FIELDS[_judged_by(policy)].group for policy in self.policies)
        return frozenset({MEMORY, PROCESSES, PROCESS_DETAILS, *judged_by})

    def judge(
        self, snapshot: Snapshot, family: Mapping[int, float], interval: float, *, pid: int | None = None
    ) -> LimitFinding:
        """Judge one sample.

        Args:
            snapshot: at least the devices of the job.
            family: the living processes of the job: pid -> start time in seconds since boot.
            interval: seconds between samples.
            pid: the pid of the command itself, as long as it lives.
        """
        own, texts = self._with_assumed(snapshot, self._own(snapshot, family), family, pid)
        judgement = engine.evaluate(own, self.policies, self._memory, interval=interval)
        last = {policy.name: len(policy.steps) - 1 for policy in self.policies}
        due = [
            verdict
            for verdict in judgement.verdicts
            if verdict.policy != "memory" and verdict.step == last[verdict.policy]
        ]
        return LimitFinding(
            blind=(*texts, *self._blind(own)),
            reached=self._reached(due[0]) if due else None,
            over=self._over_share(own, judgement.verdicts),
            used=max((used for device in own.devices if (used := _used(device)) is not None), default=None),
        )

    def _over_share(self, own: Snapshot, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
        """Warn of each device on which the job uses more than its share, once until it has used less again."""
        known = [device for device in own.devices if not _is_unknown(device, "memory_used")]
        within = {device.uuid for device in known if (_used(device) or 0) <= (self.claim.memory or 0)}
        self._reported -= {("memory", uuid) for uuid in within}
        texts = []
        for verdict in verdicts:
            key = (verdict.policy, verdict.finding.subject.device)
            if verdict.policy == "memory" and key not in self._reported:
                self._reported.add(key)
                texts.append(
                    sentence(
                        "job.over_share",
                        "the job {why} (--memory): its neighbours can run out of memory.  --memory-limit ends such a "
                        "job.",
                        why=verdict.finding.why,
                    )
                )
        return tuple(texts)

    def _own(self, snapshot: Snapshot, family: Mapping[int, float]) -> Snapshot:
        """Return *snapshot* with the job's devices, processes and claim, and without those of others."""
        claimed = set(self.claim.devices)
        parents = {device.parent_uuid for device in snapshot.devices if device.uuid in claimed}
        devices, living = [], family.items()
        for device in snapshot.devices:
            if device.uuid not in claimed | parents and device.parent_uuid not in claimed:
                continue
            if device.processes is not None:
                # A pid with another start time was given to another process.
                own = [process for process in device.processes if (process.pid, process.start_time) in living]
                device = replace(device, processes=tuple(own))
            devices.append(device)
        return replace(snapshot, devices=tuple(devices), claims=(self.claim,))

    def _with_assumed(
        self, snapshot: Snapshot, own: Snapshot, family: Mapping[int, float], pid: int | None
    ) -> tuple[Snapshot, list[str]]:
        """Add a process that stands for the job where its own are unknown; return that and warnings for the owner."""
        started = family.get(pid) if pid is not None else None
        if started is None and self.pids_known:
            return own, []
        needed = self._without_names([device for device in snapshot.devices if device.uuid in self.claim.devices])
        devices, texts = [], []
        for device in own.devices:
            if device.uuid in needed:
                before, used = self.before.get(device.uuid), device.memory_used
                rows: tuple[GpuProcess, ...] = ()
                if pid is not None and started is not None:  # else the job has ended
                    memory = None if before is None or used is None else max(0, used - before)
                    rows = (GpuProcess(pid, memory, start_time=started, uid=self.claim.uid, user=self.claim.user),)
                device = replace(device, processes=rows, processes_plausible=True)
                if self.pids_known and device.uuid not in self._reported:
                    self._reported.add(device.uuid)
                    what = _("the driver lists no processes on {gpu}").format(gpu=translated(device_title(device)))
                    texts.append(_("{what}: the limits of the job are judged by the whole GPU.").format(what=what))
            devices.append(device)
        return replace(own, devices=tuple(devices)), texts

    def _without_names(self, devices: Sequence[Device]) -> Collection[str]:
        """Return the uuids of *devices* that in two samples in a row did not show which processes are the job's."""
        if not self.pids_known:
            return {device.uuid for device in devices}
        self._listed.update(device.uuid for device in devices if device.processes)
        unlisted = {device.uuid for device in devices if self._is_used_unseen(device)}
        lasting, self._unlisted = unlisted & self._unlisted, unlisted
        return lasting

    def _is_used_unseen(self, device: Device) -> bool:
        before = self.before.get(device.uuid)
        if before is None or device.uuid in self._listed:
            return False  # where the driver lists processes at all, a missing list is a gap
        if device.processes is None:
            return True
        return device.memory_used is not None and device.memory_used - before > IDLE_TOLERANCE

    def _reached(self, verdict: Verdict) -> ReachedLimit:
        why = verdict.finding.why
        if verdict.policy == "memory-limit":
            why = sentence("job.why", "the job {why}", why=why)
        if verdict.policy == "idle-limit":
            hold = next(policy.hold for policy in self.policies if policy.name == verdict.policy)
            why = sentence("job.why_for", "{why}, for {time}", why=why, time=format_duration(hold))
        pids = tuple(process.pid for process in verdict.finding.processes)
        return ReachedLimit(
            verdict.policy, sentence("job.over_limit", "{why} (--{limit})", why=why, limit=verdict.policy), pids
        )

    def _blind(self, own: Snapshot) -> list[str]:
        """Warn of limits that cannot be kept because the driver told too little in two samples in a row."""
        unknown = {
            (policy.name, device.uuid)
            for policy in self.policies
            for device in own.devices
            if device.uuid in self.claim.devices and _is_unknown(device, _judged_by(policy))
        }
        lasting = (unknown & self._unknown) - self._reported
        self._unknown = unknown
        self._reported |= lasting
        index = {device.uuid: device.index for device in own.devices}
        return [
            _("--{limit} cannot be kept on GPU {index} now: the driver does not tell what it is judged by.").format(
                limit=limit, index=index[uuid]
            )
            for limit, uuid in sorted(lasting)
        ]


def _used(device: Device) -> int | None:
    amounts = [process.memory_used for process in device.processes or ()]
    return sum(filter(None, amounts)) if amounts and None not in amounts else None


def _judged_by(policy: Policy) -> str:
    """Return the field of a device by which a limit is judged.  The processes must be known as well."""
    return policy.rules[0].kind.limits


def _is_unknown(device: Device, field: str) -> bool:
    if device.processes is None or not device.processes_plausible or getattr(device, field) is None:
        return True
    return field == "memory_used" and any(process.memory_used is None for process in device.processes)
