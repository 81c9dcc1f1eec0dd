"""Rules about the readings of a device, about what one process, user or claim has there, and about those of the host.

``memory``, ``temperature``, ``power``, ``utilization``, ``processes``, ``health``, ``host_memory`` and ``host_cpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from gpuguard.device_state import claims_on, device_title, grouped, usable_devices
from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_, _
from gpuguard.locale.messages import Sentence, all_of, sentence
from gpuguard.model import CLOCKS, ECC, Device, Finding, GpuProcess, Subject, claim_named
from gpuguard.policies.rule import Rule, RuleKind, RuleNeeds
from gpuguard.policies.view import (
    JobMember,
    RuleView,
    UserUse,
    computing,
    computing_processes,
    device_subject,
    findings_where,
    jobs_of,
    member_of,
    uses_of,
)
from gpuguard.units import (
    Amount,
    format_bytes,
    parse_celsius,
    parse_host_memory_amount,
    parse_memory_amount,
    parse_percent,
    parse_power_amount,
)


def _findings_of_whole(rule: str, view: RuleView, per: str, why: Callable[[Device], str | None]) -> Iterator[Finding]:
    """Yield findings like findings_where(), for readings of a whole device: its instances are judged by them."""
    uuids, usable = {device.uuid for device in view.snapshot.devices}, usable_devices(view.snapshot)
    for whole in view.snapshot.devices:
        if whole.parent_uuid in uuids or not (text := why(whole)):
            continue
        parts = [part for part in usable if whole.uuid in (part.uuid, part.parent_uuid)]
        for part in parts if per == "process" else (whole,):
            for subject, _memory, processes in uses_of(view, part, per):
                yield Finding(rule, subject, text, processes)


@dataclass(frozen=True)
class MemoryRule(Rule):
    """More memory of one GPU is in use than allowed, by one process, user or claim, or altogether.

    above: bytes, or percent of the GPU's memory; or share, with per: claim: what the claim asked for when it began
        to share its GPUs (gpuguard run --share --memory).  A claim that shares nothing cannot exceed it.
    per: process, user (all processes of a user on the GPU), claim (all its processes on one of its GPUs), or
        device (then it is no user's fault in particular: no action on a process follows).

    Memory that the driver does not tell is not counted, and percent of memory that is the host's are not judged.

        when: {memory: {above: 90%, per: user}}
    """

    kind = RuleKind(
        "memory",
        innocent=False,
        limits="memory_used",
        advice={"en": "Use less memory, or end the process.", "zh": "请减少显存用量，或结束进程。"},
    )

    above: Annotated[Amount, parse_memory_amount]
    per: Literal["process", "user", "claim", "device"] = "process"

    @property
    def needs(self) -> RuleNeeds:
        """How much memory a GPU has, for percent of it."""
        return RuleNeeds(memory_size=self.above.relative)

    def check(self, view: RuleView) -> list[Finding]:
        """Return a finding for each subject whose use is above the limit."""

        def why(device: Device, subject: Subject, memory: int | None, processes: tuple[GpuProcess, ...]) -> str | None:
            claim = None
            if self.above.promised:
                claim = claim_named(claims_on(view.snapshot, device), subject.uid, subject.claim)
            share = claim.memory if claim else None
            limit = self.above.of(device.memory_total) if share is None else share
            if memory is None or limit is None or not memory > limit >= 0:
                return None
            size, gpu, allowed = format_bytes(memory), device_title(device), self.above.text
            if self.above.promised:
                return sentence(
                    "memory.above_share",
                    "uses {size} of {gpu}, its share of {share} is allowed",
                    size=size,
                    gpu=gpu,
                    share=format_bytes(share),
                )
            if self.above.relative:
                return sentence(
                    "memory.above_part",
                    "uses {size} of {gpu}, {limit} of {total} is allowed",
                    size=size,
                    gpu=gpu,
                    limit=allowed,
                    total=format_bytes(device.memory_total),
                )
            return sentence(
                "memory.above", "uses {size} of {gpu}, {limit} is allowed", size=size, gpu=gpu, limit=allowed
            )

        return findings_where("memory", view, self.per, why)


@dataclass(frozen=True)
class TemperatureRule(Rule):
    """A GPU is hotter than allowed.

    above: degrees Celsius.
    per: device (no action on a process follows) or process (each process that computes there is meant).

    The user of a hot GPU may not be the cause (a fan, the room, the neighbour): processes are meant only by
    `per: process`.

        when: {temperature: {above: 85C}}
    """

    kind = RuleKind(
        "temperature",
        innocent=True,
        bounds={"above": (130.0, N_("readings above 130C are not believed"))},
        limits="temperature",
        of_whole=True,
        not_in_tables=N_("the temperature of GPUs"),
        advice={
            "en": "Let the GPU cool down: end or reduce what runs on it.",
            "zh": "请让设备降温：结束或减少其上的任务。",
        },
    )

    above: Annotated[float, parse_celsius]
    per: Literal["device", "process"] = "device"

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Return findings about the devices that are too hot."""

        def why(device: Device) -> str | None:
            if device.temperature is None or device.temperature <= self.above:
                return None
            return sentence(
                "temperature.above",
                "{gpu} has {temperature}, {limit} is allowed",
                gpu=device_title(device),
                temperature=f"{device.temperature:.0f}C",
                limit=f"{self.above:g}C",
            )

        return _findings_of_whole("temperature", view, self.per, why)


@dataclass(frozen=True)
class PowerRule(Rule):
    """A GPU draws more power than allowed.

    above: watts, or percent of the GPU's power limit.
    per: device (no action on a process follows) or process (each process that computes there is meant).

        when: {power: {above: 95%}}
    """

    kind = RuleKind(
        "power",
        innocent=True,
        limits="power_draw",
        of_whole=True,
        not_in_tables=N_("the power of GPUs"),
        advice={"en": "Reduce what runs on the GPU.", "zh": "请减少该设备上的任务。"},
    )

    above: Annotated[Amount, parse_power_amount]
    per: Literal["device", "process"] = "device"

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Return findings about the devices that draw too much."""

        def why(device: Device) -> str | None:
            limit = self.above.of(device.power_limit)
            if device.power_draw is None or limit is None or device.power_draw <= limit:
                return None
            facts = {
                "gpu": device_title(device),
                "power": f"{device.power_draw:.0f}W",
                "limit": self.above.text,
            }
            if not self.above.relative:
                return sentence("power.above", "{gpu} draws {power}, {limit} is allowed", **facts)
            return sentence(
                "power.above_part",
                "{gpu} draws {power}, {limit} of {total} is allowed",
                total=f"{device.power_limit:.0f}W",
                **facts,
            )

        return _findings_of_whole("power", view, self.per, why)


@dataclass(frozen=True)
class UtilizationRule(Rule):
    """The GPU is busier than `above`, or less busy than `below`.  For GPUs that are held but rest, see idle.

    above: percent of time.  Exactly one of above and below.
    below: percent of time.
    per: device (the share of time in which any kernel ran; no action on a process follows) or process (the share
        of the multiprocessors that it used itself, where the driver tells it).

        when: {utilization: {above: 95%}}
    """

    kind = RuleKind(
        "utilization",
        innocent=False,
        limits="utilization",
        bounds={"above": (100.0, N_("no utilization is above 100%")), "below": (0.0, N_("nothing is below 0%"))},
        suggests_keep=True,
        advice={
            "en": "Use the GPU again, or free it: end the process.",
            "zh": "请重新使用该设备，或结束进程以释放设备。",
        },
    )

    above: Annotated[float | None, parse_percent] = None
    below: Annotated[float | None, parse_percent] = None
    per: Literal["device", "process"] = "device"

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise InvalidRequest(_("utilization wants exactly one of above and below: {utilization: {above: 95%}}."))

    def check(self, view: RuleView) -> list[Finding]:
        """Return a finding for each subject that is beyond the limit."""

        def why(device: Device, subject: Subject, memory: int | None, processes: tuple[GpuProcess, ...]) -> str | None:
            percent = processes[0].utilization if self.per == "process" else device.utilization
            if percent is None:
                return None
            if self.above is not None and percent > self.above:
                return sentence(
                    "utilization.above",
                    "utilization of {gpu} is {share}, at most {limit} is allowed",
                    gpu=device_title(device),
                    share=f"{percent:.3g}%",
                    limit=f"{self.above:g}%",
                )
            if self.below is not None and percent < self.below:
                return sentence(
                    "utilization.below",
                    "utilization of {gpu} is {share}, at least {limit} is expected",
                    gpu=device_title(device),
                    share=f"{percent:.3g}%",
                    limit=f"{self.below:g}%",
                )
            return None

        return findings_where("utilization", view, self.per, why)


@dataclass(frozen=True)
class ProcessesRule(Rule):
    """More processes compute on one GPU than allowed, altogether or by one user.

    above: how many are allowed.
    per: device (no action on a process follows) or user (of that user the newest jobs there are meant: as many as bring
        the number under the limit, each whole).

    Processes of unknown owner are not counted.

        when: {processes: {above: 2}}
    """

    kind = RuleKind("processes", innocent=False, newest_first=True)

    above: int
    per: Literal["device", "user"] = "device"

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield findings about the devices with too many processes."""

        def why(device: Device, subject: Subject, memory: int | None, processes: tuple[GpuProcess, ...]) -> str | None:
            count = len(processes if self.per == "user" else computing(device))
            if count <= self.above:
                return None
            return sentence(
                "processes.above",
                "{count} processes compute on {gpu}, {limit} processes are allowed",
                count=count,
                gpu=device_title(device),
                limit=self.above,
            )

        for finding in findings_where("processes", view, self.per, why):
            yield replace(finding, processes=self._in_excess(finding, view)) if finding.processes else finding

    def _in_excess(self, finding: Finding, view: RuleView) -> tuple[GpuProcess, ...]:
        """Return the processes of the newest jobs, each job whole, without which there are not too many."""
        members = {member_of(process, view): process for process in finding.processes}
        came = {member: self._came(member, finding, view) for member in members}
        jobs = grouped((name, member) for member, name in jobs_of(members).items())
        left, excess = len(members), list[GpuProcess]()
        for job in sorted(jobs.values(), key=lambda job: max(map(came.__getitem__, job)), reverse=True):
            if left > self.above:
                left -= len(job)
                excess += [members[member] for member in job]
        return tuple(excess)

    def _came(self, member: JobMember, finding: Finding, view: RuleView) -> tuple[float, int]:
        """Return when *member* came to that GPU, which may be long after it began, and its pid.

        Of two that came at once, the one with the higher pid is the newer one.
        """
        pid, began = member.process
        return view.arrivals.arrived(finding.subject.device or "", member.process) or began, pid


# What counts too many errors, by the field of a device; each gets the count and its limit.
_TOO_MANY: Mapping[str, Callable[[int, int], Sentence]] = {
    "ecc_corrected_volatile": lambda count, limit: sentence(
        "health.corrected_errors",
        "{count} corrected memory errors, {limit} are allowed",
        count=count,
        limit=limit,
    ),
    "ecc_uncorrected_volatile": lambda count, limit: sentence(
        "health.uncorrected_errors",
        "{count} uncorrected memory errors, {limit} are allowed",
        count=count,
        limit=limit,
    ),
    "retired_pages": lambda count, limit: sentence(
        "health.retired_pages", "{count} retired pages, {limit} are allowed", count=count, limit=limit
    ),
    "remapped_rows": lambda count, limit: sentence(
        "health.remapped_rows", "{count} remapped rows, {limit} are allowed", count=count, limit=limit
    ),
}


@dataclass(frozen=True)
class HealthRule(Rule):
    """A GPU has a problem, is slowed down, or counts too many errors.

    The finding is about the GPU, since hardly ever its user is the cause.

    problems: globs; "*" is any problem that the driver reports: lost, unresponsive, reset required, ...
    throttle_reasons: globs, for the names that nvidia-smi gives to the reasons of slower clocks.
    ecc_corrected_above: more corrected memory errors than that since the driver was loaded.
    ecc_uncorrected_above: likewise, errors that could not be corrected.
    retired_pages_above: more pages of memory were given up than that.
    remapped_rows_above: more rows of memory were replaced than that.
    with_processes: an action means the processes on the GPU, too.

        when: {health: {problems: ["lost", "reset required", "*pending*"], ecc_uncorrected_above: 0}}
    """

    kind = RuleKind(
        "health",
        innocent=True,
        needs=RuleNeeds(frozenset({CLOCKS, ECC})),
        by_content=True,
        of_whole=True,
        outlasts_boot=True,
        not_in_tables=N_("faults of GPUs"),
        advice={
            "en": "Save your work and leave the GPU: an administrator has to look at it.",
            "zh": "请保存工作并离开该设备：需要管理员检查。",
        },
    )

    problems: tuple[str, ...] = ()
    throttle_reasons: tuple[str, ...] = ()
    ecc_corrected_above: int | None = None
    ecc_uncorrected_above: int | None = None
    retired_pages_above: int | None = None
    remapped_rows_above: int | None = None
    with_processes: bool = False

    def __post_init__(self) -> None:
        if not (self.problems or self.throttle_reasons or self._limits()):
            raise InvalidRequest(_("no condition is given: write problems, throttle_reasons or one of the ..._above."))

    @property
    def needs(self) -> RuleNeeds:
        """Only the groups that these keys need, because both together cost 15 driver calls per device and sample."""
        groups = ((CLOCKS, self.throttle_reasons), (ECC, self._limits()))
        return RuleNeeds(frozenset(group for group, limits in groups if limits))

    @property
    def judges_by(self) -> frozenset[str]:
        """The counts with a limit, and the reasons of slower clocks; a driver always tells its problems."""
        return frozenset([field for field, _ in self._limits()] + ["throttle_reasons"] * bool(self.throttle_reasons))

    @property
    def reaches(self) -> frozenset[str]:
        """Processes, if `with_processes` is true."""
        return frozenset({"process"} if self.with_processes else ())

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding per device."""
        for device in view.snapshot.devices:
            problems = _named(device.problems, self.problems)
            slowed = _named(device.throttle_reasons, self.throttle_reasons) if self.throttle_reasons else ""
            faults = [problems] if problems else []
            if slowed:
                faults.append(sentence("health.slowed", "slowed down by {reasons}", reasons=slowed))
            counts = [(field, getattr(device, field), limit) for field, limit in self._limits()]
            faults += [
                _TOO_MANY[field](count, limit) for field, count, limit in counts if count is not None and count > limit
            ]
            if faults:
                processes = computing(device) if self.with_processes else ()
                yield Finding("health", device_subject(device), all_of(faults), processes)

    def _limits(self) -> list[tuple[str, int]]:
        rows = (
            ("ecc_corrected_volatile", self.ecc_corrected_above),
            ("ecc_uncorrected_volatile", self.ecc_uncorrected_above),
            ("retired_pages", self.retired_pages_above),
            ("remapped_rows", self.remapped_rows_above),
        )
        return [(field, limit) for field, limit in rows if limit is not None]


def _named(names: tuple[str, ...] | None, globs: tuple[str, ...]) -> str:
    return all_of((name for name in names or () if any(fnmatchcase(name, glob) for glob in globs)), ", ")


def _findings_of_users(rule: str, view: RuleView, why: Callable[[UserUse], str | None]) -> Iterator[Finding]:
    """Yield a finding for each user about whose use *why* says something; it means their processes on GPUs."""
    for uid, use in sorted(view.machine.users.items()):
        if uid > 0 and (text := why(use)):
            own = {process.pid: process for _, process in computing_processes(view) if process.uid == uid}
            yield Finding(rule, Subject("user", uid=uid, user=use.user), text, tuple(own.values()))


@dataclass(frozen=True)
class HostMemoryRule(Rule):
    """All processes of one user together, also those beside the GPU, take more of the machine's memory than allowed.

    above: bytes, or percent of the machine's memory.

    What processes share counts once, files in the page cache count for no user, and what cannot be read is not counted.
    Root and accounts of the system are never found.  An action means those processes of the user that compute on a GPU.

        when: {host_memory: {above: 50%}}
    """

    kind = RuleKind(
        "host_memory",
        innocent=False,
        advice={
            "en": "Use less of the machine's memory, also beside the GPU, or end what you do not need.",
            "zh": "请减少主机内存用量（包括不使用 GPU 的进程），或结束不需要的进程。",
        },
    )

    above: Annotated[Amount, parse_host_memory_amount]

    @property
    def needs(self) -> RuleNeeds:
        """The use of the machine's memory by each user who may have more than `above`."""
        return RuleNeeds(machine=(self.above,))

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Return a finding for each user whose processes take too much."""

        def why(use: UserUse) -> str | None:
            limit = self.above.of(view.machine.memory)
            if use.memory is None or limit is None or use.memory <= limit:
                return None
            if not self.above.relative:
                return sentence(
                    "host_memory.above",
                    "uses {size} of the machine's memory, {limit} is allowed",
                    size=format_bytes(use.memory),
                    limit=self.above.text,
                )
            return sentence(
                "host_memory.above_part",
                "uses {size} of the machine's memory, {limit} of {total} is allowed",
                size=format_bytes(use.memory),
                limit=self.above.text,
                total=format_bytes(view.machine.memory),
            )

        return _findings_of_users("host_memory", view, why)


@dataclass(frozen=True)
class HostCpuRule(Rule):
    """All processes of one user together, also those beside the GPU, take more of the machine's cores than allowed.

    above: percent of all cores.

    Processes that ended between two samples are not counted.  Root and accounts of the system are never found.  An
    action means those processes of the user that compute on a GPU.

        when: {host_cpu: {above: 50%}}
    """

    kind = RuleKind(
        "host_cpu",
        innocent=False,
        bounds={"above": (100.0, N_("more than 100% is not possible"))},
        needs=RuleNeeds(machine=()),
        advice={
            "en": "Use fewer cores (threads, data loaders), or end what you do not need.",
            "zh": "请减少所用的 CPU 核（线程、数据加载进程），或结束不需要的进程。",
        },
    )

    above: Annotated[float, parse_percent]

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Return a finding for each user whose processes take too much."""

        def why(use: UserUse) -> str | None:
            cores = view.machine.cores
            if use.cpu is None or not cores or use.cpu / cores <= self.above:
                return None
            return sentence(
                "host_cpu.above",
                "uses {used} of {cores} cores, {limit} of them is allowed",
                used=f"{use.cpu / 100:.3g}",
                cores=cores,
                limit=f"{self.above:g}%",
            )

        return _findings_of_users("host_cpu", view, why)
