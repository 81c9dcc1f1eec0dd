"""The decisions of an admin: a policy is made of rules, of whom it is about and when, and of its escalation steps.

All values are decoded already: seconds, percent, uids.  A finding is narrowed to those of its processes that no scope,
exemption or start grace protects; if it names no process, the subject itself is checked.  Whatever cannot be seen in
this sample is left alone.  This module does not read files (see policy_files.loader) and does not judge (see engine).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from gpuguard.device_state import device_title, grouped, usable_devices
from gpuguard.eligibility import is_model
from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_, _
from gpuguard.locale.messages import sentence
from gpuguard.model import (
    ClaimRecord,
    Device,
    Finding,
    GpuProcess,
    Snapshot,
    Subject,
    Verdict,
)
from gpuguard.policies.rule import Evidence, Rule
from gpuguard.policies.view import SampleIndex, reach_of
from gpuguard.units import Amount, format_duration, parse_celsius, parse_power_amount
from gpuguard.vendors import UUID_PREFIXES

if TYPE_CHECKING:  # these names are new: a job that waits through an upgrade imports this file beside its old model.py
    from gpuguard.model import ActionName, NoteKind

# Seconds between SIGTERM and SIGKILL.  A job needs them to write its checkpoint and the driver to give memory back;
# a SIGKILL in the middle of that has wedged devices (NVIDIA/dcgm-exporter#84).
# The guard and signals by hand keep to it, whatever a policy says.
KILL_AFTER = 30.0

# Extra seconds if a person sits in front of the process: on a terminal, in a notebook, or with a debugger.
INTERACTIVE_SECONDS = 600.0

Options = tuple[tuple[str, float | int | str | bool | None], ...]


@dataclass(frozen=True)
class Step:
    """One step of an escalation."""

    action: ActionName
    # seconds since the step before was asked for; for the first step, since the condition has held for `hold`
    after: float = 0.0
    options: Options = ()  # of the action: signal, to, message, ...


def parse_path(text: str) -> str:
    """Return *text* if it is a whole path, or a glob of one."""
    if not text.startswith("/"):
        raise InvalidRequest(
            _("{text!r} is no path: write it in full from / on, like '/usr/bin/{text}'.").format(text=text)
        )
    return text


_DEVICE = re.compile(
    rf"0|[1-9]\d{{0,2}}|(?:0|[1-9]\d{{0,2}})\.\d{{1,2}}|(?:{'|'.join(UUID_PREFIXES)})[0-9a-fA-F][0-9a-fA-F-]*"
)


def parse_device(text: str) -> str:
    """Return *text* if it is an index, a uuid or the beginning of one."""
    if not _DEVICE.fullmatch(text):
        raise InvalidRequest(
            _("{text!r} is no GPU: write an index like 0, or a uuid like 'GPU-8f31c2'.").format(text=text)
        )
    return text


# In the next three classes the fields are keys of policy files, and the docstrings are their help.  Unknown facts never
# match in `only`, and always match in `except`.


@dataclass(frozen=True)
class Scope:
    """Users and devices, for `only` and `except`.  All keys that are given must match; of a list, one entry."""

    users: frozenset[Annotated[int, "user"]] | None = None
    groups: frozenset[Annotated[str, "group"]] | None = None
    devices: tuple[Annotated[str, parse_device], ...] | None = None
    models: tuple[str, ...] | None = None
    kinds: frozenset[Literal["interactive", "batch", "container"]] | None = None

    def __post_init__(self) -> None:
        if not any(value is not None for key, value in vars(self).items() if key != "until"):
            raise InvalidRequest(_("nothing is named: write users, groups, devices, models or kinds."))


@dataclass(frozen=True)
class Audience(Scope):
    """Whom a policy is about.  All keys that are given must match; of a list, one entry.

    Args:
        users: names or uids.
        groups: names; all members.
        devices: index, or the beginning of a uuid.
        models: patterns of the device's name, like "A100*".
        kinds: interactive (a terminal, a notebook), container, or batch (all others).
        told: true takes nothing from a user whom no message has reached, on a terminal or in the log of a job.
    """

    told: bool | None = None


@dataclass(frozen=True)
class Exemption(Scope):
    """Whom a policy spares.  All keys that are given must match; write a list of such groups to spare each of them.

    Args:
        users: names or uids.
        groups: names; all members.
        devices: index, or the beginning of a uuid.
        models: patterns of the device's name, like "A100*".
        kinds: interactive (a terminal, a notebook), container, or batch (all others).
        until: the last day of the exemption, local time, or the moment, as in 2026-12-24T18:00.
    """

    until: Annotated[float, "date"] | None = None  # unix time


@dataclass(frozen=True)
class BelowTemperature:
    """A GPU has cooled down.

    Args:
        below: degrees Celsius, like 75C.
    """

    below: Annotated[float, parse_celsius]

    def is_met(self, device: Device) -> bool:
        """Return whether *device* is cooler than that, or its temperature is unknown."""
        return device.temperature is None or device.temperature < self.below


@dataclass(frozen=True)
class BelowPower:
    """A GPU draws less again.

    Args:
        below: like 200W, or 60% of its power limit.
    """

    below: Annotated[Amount, parse_power_amount]

    def is_met(self, device: Device) -> bool:
        """Return whether *device* draws less than that, or one of the two is unknown."""
        limit = self.below.of(device.power_limit)
        return device.power_draw is None or limit is None or device.power_draw < limit


@dataclass(frozen=True)
class Until:
    """How far a pause must take a GPU before it ends, so that the process is not stopped and let go on in turns.

    All that is given must be so on each GPU of the process.  What cannot be read ends the pause.

    Args:
        temperature: as {below: 75C}.
        power: as {below: 200W}.
    """

    temperature: BelowTemperature | None = None
    power: BelowPower | None = None

    def __post_init__(self) -> None:
        if not any(vars(self).values()):
            raise InvalidRequest(_("nothing is said: write temperature or power, each with `below`."))

    def is_reached(self, device: Device | None) -> bool:
        """Return whether a pause need not go on because of *device*."""
        return device is None or all(below.is_met(device) for below in vars(self).values() if below)


@dataclass(frozen=True)
class Policy:
    """Rules, and the steps to take when they have held for so long.

    Raises:
        InvalidRequest: it contradicts itself, for example by a kill without a terminate KILL_AFTER before it.
    """

    name: str  # unique
    rules: tuple[Rule, ...]  # at least one
    join: str = "all"  # "all" or "any" of them must hold
    hold: float = 30.0  # seconds that the whole condition must hold, over consecutive valid samples
    start_grace: float = 0.0  # seconds for which a new process or claim is innocent
    only: Scope | None = None  # whom it is about; None: everybody
    told: bool = False  # it takes nothing from a user whom no message has reached
    until: Until | None = None  # how long a pause lasts beyond the condition
    exempt: tuple[Exemption, ...] = ()  # whom it spares; each with its own end
    devices_at_least: int = 1  # number of devices of one user on which the condition must hold at once
    # (begin, end) in seconds since local midnight; an end before the begin means the next morning
    hours: tuple[float, float] | None = None
    days: frozenset[int] | None = None  # 0 = Monday; with hours over midnight it is the day on which they begin
    claimed_above: float | None = None  # it applies only while more than this percentage of devices is claimed
    at_most_users: int = 3  # if more would be hit at once, none is, unless the rules rest on CLOCK evidence alone
    at_most_jobs: int = 5  # jobs that are hit at once; the others follow
    at_most_processes: int | None = None  # counts processes in place of jobs
    order: Literal["newest", "oldest", "most_memory", "least_used", "most_power"] = "most_memory"  # of the jobs
    some_beyond: bool = False  # more users than at_most_users are hit in turns, whatever the rules rest on
    message: str | None = None  # a sentence that users are told before what was seen
    keep: bool | None = None  # whether users can ask to be spared; None: yes, unless a rule protects others
    cooldown: float = 0.0  # seconds after the last step in which the subject is left alone
    enforce: bool = False  # False: its verdicts are for the log only
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not self.rules:
            raise InvalidRequest(
                _("policy {name} has no rule: say in `when` what must be the case.").format(name=self.name)
            )
        if self.join not in ("all", "any"):
            raise InvalidRequest(
                _("policy {name} joins its rules by {join!r}: write all or any.").format(name=self.name, join=self.join)
            )
        times = (self.hold, self.start_grace, self.cooldown, *(step.after for step in self.steps))
        if not all(0 <= seconds < float("inf") for seconds in times):
            raise InvalidRequest(_("policy {name} has a duration that is negative or endless.").format(name=self.name))
        if any(early_kills((step.action, step.after) for step in self.steps)):
            raise InvalidRequest(
                _(
                    "policy {name} kills without warning: put a `terminate` at least {kill_after:.0f}s before the "
                    "`kill`."
                ).format(name=self.name, kill_after=KILL_AFTER)
            )

    @property
    def may_be_kept(self) -> bool:
        """Whether users are spared who ask for it by `gpuguard keep`; those whom root spares always are."""
        return not any(rule.kind.protects_others for rule in self.rules) if self.keep is None else self.keep

    @property
    def rests_on(self) -> Evidence:
        """The evidence that its findings rest on: the least certain evidence of its rules."""
        return min((rule.rests_on for rule in self.rules), key=list(Evidence).index)


def early_kills(steps: Iterable[tuple[str, float]]) -> Iterator[tuple[int, float | None]]:
    """Yield (number, seconds since a terminate) of each kill among *steps*, (action, after), that comes too early."""
    since_terminate: float | None = None
    for number, (action, after) in enumerate(steps):
        since_terminate = None if since_terminate is None else since_terminate + after
        if action == "kill" and (since_terminate is None or since_terminate < KILL_AFTER):
            yield number, since_terminate
        if action == "terminate":
            since_terminate = 0.0


@dataclass(frozen=True)
class Note:
    """A note of something that was not acted on, and why."""

    kind: NoteKind
    text: str  # a sentence without a full stop
    policy: str | None = None  # its name, or None if the note is about the sampling itself
    subject: Subject | None = None  # the subject that is left alone, or None if all are


@dataclass(frozen=True)
class NoteMeaning:
    """The meaning of a kind of note.  Kinds that are not recorded repeat at every sample that nothing is to be done."""

    text: str
    recorded: bool = False  # each new one is an event of the audit log
    spares: bool = False  # it leaves a user alone although the rule was met


NOTES: Mapping[NoteKind, NoteMeaning] = {
    "gap": NoteMeaning(N_("it could not be seen whether the condition still holds"), recorded=True),
    "resampling": NoteMeaning(
        N_("samples are missing or came out of order, so it is unknown what was in between"), recorded=True
    ),
    "late": NoteMeaning(N_("a sample came late, and no time counts in between"), recorded=True),
    "unknown": NoteMeaning(N_("who the process is is not known"), spares=True),
    "exempt": NoteMeaning(N_("inside `except`"), recorded=True, spares=True),
    "kept": NoteMeaning(N_("a user asked to keep it"), recorded=True),
    "grace": NoteMeaning(N_("younger than start_grace"), spares=True),
    "devices": NoteMeaning(N_("on fewer GPUs than devices_at_least"), spares=True),
    "hours": NoteMeaning(N_("outside the hours or days of the policy"), spares=True),
    "load": NoteMeaning(N_("not so much of the node is claimed"), spares=True),
    "cleared": NoteMeaning(N_("the condition holds no more, the escalation is cancelled"), recorded=True),
    "cancelled": NoteMeaning(N_("the policy is gone or was changed, the escalation is cancelled"), recorded=True),
    "cooldown": NoteMeaning(N_("the last step is not long ago"), spares=True),
    "breaker": NoteMeaning(N_("too many users would be acted on at once, so none is"), recorded=True, spares=True),
    "untold": NoteMeaning(N_("no message has reached the user, and the policy takes nothing from such"), recorded=True),
    "nobody": NoteMeaning(
        N_("a step has nothing there that it could act on, so the next one is waited for"), recorded=True
    ),
    "waiting": NoteMeaning(N_("another step has not shown its effect yet"), recorded=True, spares=True),
}


@dataclass(frozen=True)
class Judgement:
    """The result of one sample: what is to be done now, and what is not and why, both in a stable order."""

    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[Note, ...] = ()


TimeSpan = tuple[float, float]  # begin and end
# A user can keep one process or claim for KEPT_SECONDS in any time of KEPT_WITHIN seconds.
KEPT_SECONDS, KEPT_WITHIN = 72 * 3600.0, 7 * 86400.0


def seconds_within(spans: Iterable[TimeSpan], begin: float, end: float) -> float:
    """Return how much of the time from *begin* to *end* lies in *spans*, which do not overlap."""
    return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans)


@dataclass(frozen=True)
class KeptMark:
    """The time until which a user, claim or device is left alone because of `gpuguard keep`.  All times are clocks."""

    until: float
    # when its user kept anything, or None if it was not they but root who asked, for all policies and without limit
    spans: tuple[TimeSpan, ...] | None = None

    def holds(self, policy: Policy, since: float, clock: float) -> bool:
        """Return whether it protects a process or claim that began at *since* from *policy*."""
        spent = seconds_within(self.spans or (), max(since, clock - KEPT_WITHIN), clock)
        return clock < self.until and (self.spans is None or (policy.may_be_kept and spent < KEPT_SECONDS))


Kept = Mapping[tuple[str, int | str], KeptMark]  # by the user or thing that is meant, as in ("uid", 1001)
Protection = tuple["NoteKind", str]  # the kind of a note, and its words

_GPU_MISSING = sentence("sample.gpu_missing", "the GPU is missing from the sample")
_CLAIM_MISSING = sentence("sample.claim_missing", "the claim is missing from the sample")
_USER_UNKNOWN = sentence("note.user_unknown", "the user is unknown")
_OWNER_UNKNOWN = sentence("note.owner_unknown", "the owner of the claim is unknown")
_OUTSIDE_ONLY = sentence("note.outside_only", "outside `only`")
_INSIDE_EXCEPT = sentence("note.inside_except", "inside `except`")
_OUTSIDE_HOURS = sentence("note.outside_hours", "outside the hours or days of the policy")

DAY = 86400  # seconds


def drop_protected(
    findings: Iterable[Finding], policy: Policy, index: SampleIndex, kept: Kept
) -> tuple[list[Finding], list[Note]]:
    """Return *findings* narrowed to processes and subjects that nothing protects, and notes on what protects others.

    There are no notes on those that the policy is not about.
    """
    left, notes = list[Finding](), list[Note]()
    for finding in findings:
        subject, processes = finding.subject, finding.processes
        if unseen := _unseen(subject, index):
            notes.append(Note(*unseen, policy.name, subject))
            continue
        if not processes and subject.kind == "process":
            processes = tuple(index.processes[subject.pid, subject.start_time].values())[:1]  # type: ignore[index]  # it was seen
        if processes:
            against_each = [
                _unseen_process(process, subject.device, index)
                or _protection(target_of_process(process, subject, index), policy, index, kept)
                for process in processes
            ]
        else:
            against_each = [_protection(_target_without_process(subject, index), policy, index, kept)]
        if None in against_each:
            free = tuple(process for process, against in zip(processes, against_each, strict=False) if against is None)
            left.append(finding if len(free) == len(finding.processes) else replace(finding, processes=free))
        else:
            protections = filter(None, against_each)
            notes += [Note(kind, text, policy.name, subject) for kind, text in protections if kind != "scope"][:1]
    return left, notes


def _unseen(subject: Subject, index: SampleIndex) -> Protection | None:
    """Return why it is not known whether a subject is there at all, or None if it is known."""
    if subject.device is not None and subject.device not in index.devices:
        return "gap", _GPU_MISSING
    claim = index.claims.get((subject.uid, subject.claim))
    if subject.claim is not None and claim is None:
        return "gap", _CLAIM_MISSING
    blind = [why for uuid in claim.devices if (why := index.blindness(uuid))] if claim else ()
    if blind:
        return "gap", blind[0]
    if subject.kind in ("user", "claim") and (subject.uid is None or subject.uid < 0):
        return "unknown", _USER_UNKNOWN if subject.kind == "user" else _OWNER_UNKNOWN
    return _unseen_process(subject, subject.device, index) if subject.kind == "process" else None


def _unseen_process(process: Subject | GpuProcess, uuid: str | None, index: SampleIndex) -> Protection | None:
    if process.pid is None or process.start_time is None or process.uid is None:
        return "unknown", sentence(
            "note.process_unknown", "the identity of process {pid} is not known", pid=str(process.pid)
        )
    places = index.processes.get((process.pid, process.start_time), {})
    if not places or (uuid is not None and uuid not in places):
        blind = index.blindness(uuid) if uuid is not None else None
        return "gap", blind or sentence(
            "sample.process_missing", "process {pid} is missing from the sample", pid=process.pid
        )
    return None


def _protection(
    target: PolicyTarget, policy: Policy, index: SampleIndex, kept: Kept
) -> Protection | tuple[Literal["scope"], str] | None:
    """Return what keeps *target* from being acted on, as a kind of note and its words, or None if nothing does."""
    if policy.only and not _is_in(policy.only, target, index, unknown=False):
        return "scope", _OUTSIDE_ONLY
    for scope in policy.exempt:
        holds = scope.until is None or index.view.snapshot.taken_at < scope.until
        if holds and _is_in(scope, target, index, unknown=True):
            return "exempt", _INSIDE_EXCEPT
    marks = [kept[name] for name in _marks(target, index) if name in kept] if kept else []
    clock = index.clock
    left = max((mark.until - clock for mark in marks if mark.holds(policy, target.began, clock)), default=0.0)
    if left > 0:
        return "kept", sentence("note.kept", "kept for another {time}", time=format_duration(left))
    if policy.start_grace and (target.age is None or target.age < policy.start_grace):
        return "grace", _young(target.age, format_duration(policy.start_grace))
    return None


def _young(age: float | None, grace: str) -> str:
    if age is None:
        return sentence("note.unknown_age", "of unknown age, innocent for the first {time}", time=grace)
    return sentence("note.young", "{age} old, innocent for the first {time}", age=format_duration(age), time=grace)


def _marks(target: PolicyTarget, index: SampleIndex) -> Iterator[tuple[str, int | str]]:
    """Yield everything about *target* that a user may have asked to keep."""
    parents = {index.devices[uuid].parent_uuid for uuid in target.reach if uuid in index.devices}
    reach = {*target.reach, *filter(None, parents)}  # the number of a divided device means its instances
    claims = {claim.id for uuid in reach for claim in index.claims_on.get(uuid, ()) if claim.uid in target.uids}
    yield from (("claim", claim) for claim in claims | ({target.claim.id} if target.claim else set()))
    yield from (("uid", uid) for uid in target.uids)
    yield from (("device", uuid) for uuid in reach)
    yield from (("uid on device", f"{uid} {uuid}") for uid in target.uids for uuid in reach)


def _is_in(scope: Scope, target: PolicyTarget, index: SampleIndex, *, unknown: bool) -> bool:
    """Return whether all keys of *scope* match.

    Args:
        unknown: if true (`except`), an unknown fact matches, and one of all devices that would be touched is enough; if
            false (`only`), each device where the condition holds must match.
    """
    if scope.users is not None and target.uids.isdisjoint(scope.users):
        return False
    if scope.groups is not None:
        groups = [index.view.groups.get(uid) for uid in target.uids]
        if not any(unknown if own is None else not own.isdisjoint(scope.groups) for own in groups):
            return False
    if scope.kinds is not None:
        kinds = certain_kinds(target, index)
        if unknown and target.process is not None and not kinds & _OF_TERMINAL:
            kinds |= _OF_TERMINAL
        if kinds.isdisjoint(scope.kinds):
            return False
    uuids = target.reach if unknown else target.places
    devices = [index.devices[uuid] for uuid in uuids if uuid in index.devices]
    for patterns, is_one in ((scope.devices, _is_device), (scope.models, _is_model)):
        if patterns is None:
            continue
        matching = [any(is_one(device, pattern, unknown) for pattern in patterns) for device in devices]
        if not matching or not (any(matching) if unknown else all(matching)):
            return False
    return True


def absent(policy: Policy, snapshot: Snapshot) -> Iterator[str]:
    """Yield each entry of the policy's `only` and `except` that means no device of this machine, in words.

    Yields nothing if a device, or the name of one, could not be read.
    """
    unread = any(device.name is None for device in snapshot.devices) or any(
        gap.field == "device" for gap in snapshot.gaps
    )
    if unread or not snapshot.devices:
        return
    for scope in (*((policy.only,) if policy.only else ()), *policy.exempt):
        for name in scope.devices or ():
            if not any(_is_device(device, name, False) for device in snapshot.devices):
                yield sentence(
                    "policy.no_such_gpu", "{policy}: no GPU here is {device}", policy=policy.name, device=name
                )
        for name in scope.models or ():
            if not any(_is_model(device, name, False) for device in snapshot.devices):
                yield sentence(
                    "policy.no_such_model", "{policy}: no model here is {model}", policy=policy.name, model=name
                )


# The keys of the reasons of a gap that no later sample fills.
_NEVER_TOLD = frozenset({"drm.absent", "drm.not_supported", "amd.of_the_whole"})


def unjudged(policy: Policy, snapshot: Snapshot) -> Iterator[str]:
    """Yield why *policy* does not judge some devices.

    It is about their memory, which is the host's, or about a field that their driver never tells.
    """
    shared = [device_title(device) for device in snapshot.devices if device.memory_shared_with_host]
    if shared and any(rule.needs.memory_size for rule in policy.rules):
        yield sentence(
            "policy.memory_of_host",
            "{policy}: the memory of {gpus} is the host's, so its size and what is free of it are not judged",
            policy=policy.name,
            gpus=", ".join(shared),
        )
    for rule in policy.rules:
        for (field, reason), devices in grouped(_untold(rule, snapshot)).items():
            yield sentence(
                "policy.never_told",
                "{policy}: {rule} cannot judge {gpus} by {field}: {reason}",
                policy=policy.name,
                rule=rule.kind.name,
                gpus=", ".join(map(device_title, devices)),
                field=field,
                reason=reason,
            )


def _untold(rule: Rule, snapshot: Snapshot) -> Iterator[tuple[tuple[str, str], Device]]:
    """Yield each field of a device that *rule* needs and that its driver never tells, with the reason."""
    uuids = {device.uuid for device in snapshot.devices}
    whole = [device for device in snapshot.devices if device.parent_uuid not in uuids]
    devices = {device.uuid: device for device in (whole if rule.kind.of_whole else usable_devices(snapshot))}
    for gap in snapshot.gaps:
        if gap.device in devices and gap.field in rule.judges_by and getattr(gap.reason, "key", "") in _NEVER_TOLD:
            yield (gap.field, gap.reason), devices[gap.device]


def _is_device(device: Device, text: str, unknown: bool) -> bool:
    if text.isdecimal():
        return str(device.index) == (text.lstrip("0") or "0")
    names = (device.uuid, device.parent_uuid or "")
    instance = f"{device.index}.{device.gpu_instance_id}"
    return any(name.lower().startswith(text.lower()) for name in names) or instance == text


def _is_model(device: Device, pattern: str, unknown: bool) -> bool:
    return unknown if device.name is None else is_model(device.name, pattern)


def outside_schedule(policy: Policy, index: SampleIndex) -> Note | None:
    """Return why the policy does not apply to anybody now, or None if it does."""
    if not is_within(policy.hours, policy.days, index.view.snapshot.taken_at + index.zone):
        return Note("hours", _OUTSIDE_HOURS, policy.name)
    if policy.claimed_above is not None:
        parts = usable_devices(index.view.snapshot)  # a divided device counts as its parts
        share = 100 * sum(part.uuid in index.claims_on for part in parts) / len(parts) if parts else None
        if share is None or not share > policy.claimed_above:
            text = sentence(
                "note.claimed_share",
                "{share} of the GPUs are claimed, not above {limit}",
                share=sentence("note.unknown_share", "unknown") if share is None else f"{share:.0f}%",
                limit=f"{policy.claimed_above:g}%",
            )
            return Note("load", text, policy.name)
    return None


def is_within(hours: tuple[float, float] | None, days: frozenset[int] | None, local: float) -> bool:
    """Return whether *local* time, as seconds since 1970 with the offset of the zone, is in these hours of these days.

    Hours over midnight belong to the day on which they begin.  Equal ends mean a whole day.
    """
    if hours is not None and hours[0] != hours[1]:
        begin, end = hours
        local -= begin  # from now on the hours begin at midnight, and none of them lies in the next day
        if local % DAY >= ((end - begin) % DAY or DAY):
            return False
    return days is None or (int(local // DAY) + 3) % 7 in days  # 1 January 1970 was a Thursday


def on_enough_devices(
    findings: Sequence[Finding], policy: Policy, index: SampleIndex
) -> tuple[Sequence[Finding], Iterable[Note]]:
    """Return the findings whose users have the condition on enough devices at once, and notes on the others.

    The findings are narrowed to these users.
    """
    if policy.devices_at_least <= 1:
        return findings, ()
    devices: dict[int, set[str]] = {}
    for finding in findings:
        for uid, places in _places(finding, index).items():
            devices.setdefault(uid, set()).update(places)
    # A divided device counts as its parts.
    parents = {uuid: device.parent_uuid for uuid, device in index.devices.items()}
    counts = {uid: len(places - {parents.get(uuid) for uuid in places}) for uid, places in devices.items()}
    enough = {uid for uid, count in counts.items() if count >= policy.devices_at_least}
    kept, notes = [], []
    for finding in findings:
        left = tuple(process for process in finding.processes if process.uid in enough)
        if left or (not finding.processes and enough & _places(finding, index).keys()):
            kept.append(finding if len(left) == len(finding.processes) else replace(finding, processes=left))
        else:
            text = sentence(
                "note.few_gpus", "on fewer than {count} GPUs of the same user", count=policy.devices_at_least
            )
            notes.append(Note("devices", text, policy.name, finding.subject))
    return kept, notes


def narrowed(
    findings: Sequence[Finding], policy: Policy, index: SampleIndex, kept: Kept
) -> tuple[Sequence[Finding], list[Note]]:
    """Return those of *findings* for which the whole condition of *policy* holds now, and notes on the others."""
    against = outside_schedule(policy, index) if findings else None
    if against is not None:
        return (), [against]
    left, notes = drop_protected(findings, policy, index, kept)
    enough, more = on_enough_devices(left, policy, index)
    return enough, [*notes, *more]


def _places(finding: Finding, index: SampleIndex) -> dict[int, set[str]]:
    """Return the devices on which a finding means each user."""
    subject, places = finding.subject, dict[int, set[str]]()
    for process in finding.processes:
        if process.uid is not None:
            here = {subject.device} if subject.device else set(reach_of(subject, (process,), index))
            places.setdefault(process.uid, set()).update(here)
    if not finding.processes:
        reach = reach_of(subject, (), index)
        uids = {subject.uid} if subject.uid is not None else None
        for uuid in reach:
            for uid in uids or {claim.uid for claim in index.claims_on.get(uuid, ())}:
                places.setdefault(uid, set()).add(uuid)
    return places


_OF_TERMINAL = frozenset({"interactive", "batch"})  # the terminal of a process tells which of the two it is


@dataclass(frozen=True)
class PolicyTarget:
    """A target that could be hit: a process, or a subject that has none."""

    uids: frozenset[int]  # of the process, or of the owners of the subject
    places: tuple[str, ...]  # the devices where the condition holds
    reach: tuple[str, ...]  # all devices that would be touched
    began: float  # clock, which for a process does not depend on its claim; 0 if unknown
    age: float | None  # seconds, or None if unknown
    process: GpuProcess | None = None  # None if it is no process
    claim: ClaimRecord | None = None  # the claim that the process is accused with


def target_of_process(process: GpuProcess, subject: Subject, index: SampleIndex) -> PolicyTarget:
    """Return the target for a process that a finding about *subject* means; the process must be in *index*."""
    assert process.start_time is not None and process.uid is not None
    reach = tuple(index.processes[process.pid, process.start_time])
    claim = index.claims.get((subject.uid, subject.claim))
    return PolicyTarget(
        frozenset((process.uid, subject.uid) if subject.uid is not None else (process.uid,)),
        (subject.device,) if subject.device in reach else reach,
        reach,
        process.start_time,
        _least_age([claim] if claim else [], index, index.clock - process.start_time),
        process,
        claim,
    )


def _target_without_process(subject: Subject, index: SampleIndex) -> PolicyTarget:
    """Return the target for a subject without processes; the owners of its claims stand for it."""
    own = index.claims.get((subject.uid, subject.claim))
    if own is not None:
        claims = [own]
    elif subject.device is not None:
        claims = list(index.claims_on.get(subject.device, ()))
    else:
        claims = [claim for claim in index.claims.values() if claim.uid == subject.uid]
    reach = reach_of(subject, (), index)
    uids = frozenset({subject.uid} if subject.uid is not None else {claim.uid for claim in claims})
    age = _least_age(claims, index)
    return PolicyTarget(uids, reach, reach, 0.0 if age is None else index.clock - age, age)


def _least_age(claims: Iterable[ClaimRecord], index: SampleIndex, of_process: float = float("inf")) -> float | None:
    """Return the seconds since the newest of *claims* and a process began, or None if that is not known."""
    least = of_process
    for claim in claims:
        if claim.since is None:
            return None
        least = min(least, index.view.snapshot.taken_at - claim.since)
    return least


_DEBUGGED = sentence("process.debugged", "being debugged")
_NOTEBOOK, _ON_TERMINAL = sentence("process.notebook", "a notebook"), sentence("process.on_terminal", "on a terminal")


def interactive_use(command: str, terminal: object, traced: object) -> str | None:
    """Return in words how a person sits in front of a process, or None if none is known to.

    *terminal* is the terminal that controls it and *traced* the debugger.  Either is false if there is none.
    """
    if traced:
        return _DEBUGGED
    if "ipykernel" in command:
        return _NOTEBOOK
    return _ON_TERMINAL if terminal else None


def is_interactive(process: GpuProcess, index: SampleIndex) -> bool:
    """Return whether a person certainly sits in front of *process*."""
    use = index.view.host.get((process.pid, process.start_time or 0.0))
    return bool(interactive_use(" ".join(process.command or ()), use and use.terminal, use and use.traced))


def certain_kinds(target: PolicyTarget, index: SampleIndex) -> frozenset[str]:
    """Return which of interactive, batch and container a target certainly is; none of them if it is no process."""
    process = target.process
    if process is None:
        return frozenset()
    container = {"container"} if process.container else set()
    if is_interactive(process, index):
        return frozenset({"interactive", *container})
    use = index.view.host.get((process.pid, process.start_time or 0.0))
    return frozenset({"batch", *container} if use is not None and use.terminal is not None else container)
