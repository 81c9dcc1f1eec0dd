"""Rules about time: ``idle`` finds devices that are held but rest, ``age`` processes and claims that are too old."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.device_state import (
    claim_of,
    claims_on,
    device_title,
    idle_limit,
    may_compute,
    usable_devices,
)
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.locale.messages import sentence
from gpuguard.model import Device, Finding, GpuProcess, Subject
from gpuguard.policies.rule import Evidence, Rule, RuleKind, RuleNeeds
from gpuguard.policies.usage import strangers
from gpuguard.policies.view import (
    RuleView,
    claim_subject,
    computing,
    computing_processes,
    device_subject,
    process_subject,
    recent,
    uses_of,
)
from gpuguard.units import Rate, format_bytes, format_duration, parse_bytes, parse_duration, parse_percent, parse_rate


@dataclass(frozen=True)
class IdleRule(Rule):
    """A GPU is claimed, or its memory is held, but its utilization is at most `below`.

    below: percent of time; 0% means no kernel at all.
    window: fixed (the policy's `for` counts from the first idle sample, and any sample that is not idle starts it
        again) or sliding (`share` of the samples of the last `over` were idle: a short burst does not help).
    over: the sliding window.  It finds no user who holds the GPU for a shorter time.
    share: of the samples of the sliding window that must be idle.
    memory_above: unclaimed GPUs count only while more than this is held.
    cpu_below: and every process on the GPU uses less than this, in percent of one core.
    network_below: and each sends and receives less than this.

    The work of others does not hide that a claim rests: with a fixed window it is also idle where the processes of
    others work, if it has none there, or if the driver says of each of its own that it uses at most `below`.  Unknown
    utilization is never idle, and so is unknown CPU or network where a limit for it is given, and a claim beside a
    process that may be its own, such as a container.  Give users time:
    on 143 real pods, 30 idle minutes came before more work in 124 of 130 cases, four hours in 6 of 19.

        when: {idle: {below: 5%, cpu_below: 2%, network_below: 1MB/s}}
        for: 2h
    """

    kind = RuleKind(
        "idle",
        innocent=False,
        limits="utilization",
        suggests_keep=True,
        advice={
            "en": "Use the GPU again, or free it: end the process.",
            "zh": "请重新使用该设备，或结束进程以释放设备。",
        },
    )

    below: Annotated[float, parse_percent]
    window: Literal["fixed", "sliding"] = "fixed"
    over: Annotated[float | None, parse_duration] = None
    share: Annotated[float, parse_percent] = 80.0
    memory_above: Annotated[int, parse_bytes] = 2**30
    cpu_below: Annotated[float | None, parse_percent] = None
    network_below: Annotated[Rate | None, parse_rate] = None

    def __post_init__(self) -> None:
        if (self.window == "sliding") != (self.over is not None):
            raise InvalidRequest(
                _("idle wants over with window: sliding, and only there: {window: sliding, over: 4h}.")
            )

    reaches = frozenset({"process", "claim"})

    @property
    def needs(self) -> RuleNeeds:
        """The series of utilization for a sliding window, and the use of CPU and network by processes."""
        past = (("utilization", self.over),) if self.over is not None else ()
        return RuleNeeds(past=past, host=self.cpu_below is not None or self.network_below is not None)

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding for each subject that holds a device that rests."""
        strange = {(device.uuid, process.pid) for device, process, _ in strangers(view)}
        for device in usable_devices(view.snapshot):
            resting = self._resting(view, device)
            if resting is None:
                if self.over is None and device.utilization is not None:
                    yield from self._beside_others(view, device, strange)
            elif not self.needs.host or self._host_rests(view, device, device.processes):
                for subject, seconds, processes in self._held(view, device):
                    if self.over is None or (seconds is not None and seconds >= self.over):
                        yield Finding("idle", subject, resting, processes)

    def _beside_others(self, view: RuleView, device: Device, strange: Collection[tuple[str, int]]) -> Iterator[Finding]:
        """Yield what holds a busy device but rests: claims, or their processes, of which others do the work there."""
        for claim, own in _claims_beside_others(view, device, strange):
            loads = [process.utilization for process in own]
            most = max((load for load in loads if load is not None), default=0.0)
            if None in loads or most > self.below or (self.needs.host and not self._host_rests(view, device, own)):
                continue
            facts = {"gpu": device_title(device), "share": f"{most:.3g}%", "limit": f"{self.below:g}%"}
            why = sentence(
                "idle.of_claim",
                "{gpu} is idle for its claim: own processes use {share}, at most {limit} is idle; "
                "only others work there",
                **facts,
            )
            for process in own:
                yield Finding("idle", process_subject(device, process), why, (process,))
            if not own:
                yield Finding("idle", claim, why)

    def _resting(self, view: RuleView, device: Device) -> str | None:
        """Return why the device counts as resting, or None if it does not."""
        if device.utilization is None:
            return None
        if self.over is None:
            if device.utilization > self.below:
                return None
            facts = {
                "gpu": device_title(device),
                "share": f"{device.utilization:.3g}%",
                "limit": f"{self.below:g}%",
            }
            if device.memory_used is None:
                return sentence("idle.now", "{gpu} is idle: utilization {share}, at most {limit} is idle", **facts)
            return sentence(
                "idle.held",
                "{gpu} is idle: utilization {share}, at most {limit} is idle, while {size} is held",
                size=format_bytes(device.memory_used),
                **facts,
            )
        samples = recent(view, device_subject(device), "utilization", self.over)
        share = 100 * sum(percent <= self.below for _, percent in samples) / len(samples) if samples else None
        if share is None or share < self.share:
            return None
        return sentence(
            "idle.share",
            "{gpu} was idle in {share} of the last {span} (utilization at most {below}), {limit} is too much",
            gpu=device_title(device),
            share=f"{share:.0f}%",
            span=format_duration(self.over),
            below=f"{self.below:g}%",
            limit=f"{self.share:g}%",
        )

    def _host_rests(self, view: RuleView, device: Device, processes: Sequence[GpuProcess] | None) -> bool:
        """Return whether *processes* rest on the CPU and the network as well, as far as these have limits."""
        if not device.processes_plausible or processes is None:
            return False
        for process in [process for process in processes if may_compute(process, device)]:
            use = view.host.get((process.pid, process.start_time)) if process.start_time is not None else None
            cpu, network = (use.cpu, use.network) if use else (None, None)
            if self.cpu_below is not None and (cpu is None or cpu >= self.cpu_below):
                return False
            if self.network_below is not None and (network is None or network >= self.network_below.per_second):
                return False
        return True

    def _held(self, view: RuleView, device: Device) -> Iterator[tuple[Subject, float | None, tuple[GpuProcess, ...]]]:
        """Yield each holder of *device*, the seconds that it has held it, and the processes that an action would mean.

        A holder is a process, a claim without a process or, if there is neither, the device itself.
        """
        claims = claims_on(view.snapshot, device)
        if not claims and (device.memory_used is None or device.memory_used <= self.memory_above):
            return
        present, now = computing(device), view.clock
        for process in present:
            yield process_subject(device, process), now - (process.start_time or now), (process,)
        if not _all_known(device, present):
            return  # a process of an unknown owner is there, who may own the claim
        used = [claim_of(process, claims, view.seen) for process in present] if claims else ()
        for claim in claims:
            if claim.uid >= 0 and claim not in used:
                since = None if claim.since is None else view.snapshot.taken_at - claim.since
                yield claim_subject(claim, device), since, ()
        if not claims and not present:
            yield device_subject(device), None, ()


def _all_known(device: Device, present: Sequence[GpuProcess]) -> bool:
    """Return whether each process that may compute on *device* is among *present*, of which the owners are known."""
    return device.processes_plausible and len(present) == sum(
        may_compute(process, device) for process in device.processes or ()
    )


def _claims_beside_others(
    view: RuleView, device: Device, strange: Collection[tuple[str, int]]
) -> Iterator[tuple[Subject, tuple[GpuProcess, ...]]]:
    """Yield each claim of a device that others use, too, with its own processes there.

    Yields nothing unless it is certain of each process to which claim it belongs, or that it is *strange* to all.
    """
    claims = [(claim, own) for claim, _memory, own in uses_of(view, device, "claim")]
    of_claims = {process.pid for _, own in claims for process in own}
    present = computing(device) if claims else ()
    if (
        present
        and all(process.pid in of_claims or (device.uuid, process.pid) in strange for process in present)
        and _all_known(device, present)
    ):
        yield from ((claim, own) for claim, own in claims if len(own) < len(present))


@dataclass(frozen=True)
class AgeRule(Rule):
    """A process has run for too long, or a claim was held for too long without a process.

    run_time_above: since the start of the process.
    claim_without_process_above: in all that time no memory was used on any GPU of the claim, and none of them has a
        process now.  Known only after gpuguard has watched for so long.

        when: {age: {run_time_above: 72h, claim_without_process_above: 2h}}
    """

    kind = RuleKind("age", innocent=False, suggests_keep=True)

    run_time_above: Annotated[float, parse_duration] | None = None
    claim_without_process_above: Annotated[float, parse_duration] | None = None

    @property
    def rests_on(self) -> Evidence:
        """SENSOR if claims are judged, because the driver must say that they have no process; otherwise CLOCK."""
        return Evidence.CLOCK if self.claim_without_process_above is None else Evidence.SENSOR

    def __post_init__(self) -> None:
        if self.run_time_above is None and self.claim_without_process_above is None:
            raise InvalidRequest(_("no age is given: write run_time_above or claim_without_process_above."))

    @property
    def needs(self) -> RuleNeeds:
        """The memory in use on the devices, if claims are judged."""
        limit = self.claim_without_process_above
        return RuleNeeds() if limit is None else RuleNeeds(past=(("memory_used", limit),), claims=True)

    @property
    def reaches(self) -> frozenset[str]:
        """Processes, claims or both, depending on which limits are given."""
        return frozenset(
            what
            for what, limit in (("process", self.run_time_above), ("claim", self.claim_without_process_above))
            if limit is not None
        )

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding per process and device, and one per claim."""
        endless = float("inf")
        allowed = endless if self.run_time_above is None else self.run_time_above
        for device, process in computing_processes(view):
            assert process.start_time is not None  # judged_processes() leaves out the others
            run_time = view.clock - process.start_time
            if run_time > allowed:
                why = sentence(
                    "age.run_time",
                    "has run for {time}, {limit} are allowed",
                    time=format_duration(run_time),
                    limit=format_duration(allowed),
                )
                yield Finding("age", process_subject(device, process), why, (process,))
        allowed = endless if self.claim_without_process_above is None else self.claim_without_process_above
        for claim in view.snapshot.claims:
            if not claim.alive or claim.uid < 0 or claim.since is None or not claim.devices:
                continue
            held = view.snapshot.taken_at - claim.since
            devices = [view.snapshot.device(uuid) for uuid in claim.devices]
            if held > allowed and all(device and _unused(device, view, allowed) for device in devices):
                why = sentence(
                    "age.without_process",
                    "held for {time}, the last {span} without a process",
                    time=format_duration(held),
                    span=format_duration(allowed),
                )
                yield Finding("age", claim_subject(claim), why)


def _unused(device: Device, view: RuleView, seconds: float) -> bool:
    divided = any(other.parent_uuid == device.uuid for other in view.snapshot.devices)
    if divided or device.processes is None or not device.processes_plausible or device.memory_used is None:
        return False
    if any(may_compute(process, device) for process in device.processes):
        return False
    past = recent(view, device_subject(device), "memory_used", seconds)
    return bool(past) and max(device.memory_used, *(memory for _, memory in past)) <= idle_limit(device)
