"""Whom a policy is about, and when: its scope, exemptions, who is too new, its schedule and the load of the machine.

A finding is narrowed to those of its processes that nothing protects.  When it names none, the subject itself is
checked.  Whatever cannot be seen in this sample is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpuguard.eligibility import is_model
from gpuguard.model import ClaimRecord, Device, Finding, GpuProcess, Subject
from gpuguard.policies.policy import Note, Policy, Scope
from gpuguard.policies.view import SampleIndex, interactive_use, reach_of
from gpuguard.units import format_duration

Kept = Mapping[tuple[str, int | str], float]  # ("uid", 1001) -> until which clock
Protection = tuple[str, str]  # the kind of a note, and its words

_EVERYBODY = Scope()
DAY = 86400  # seconds


def drop_protected(
    findings: Iterable[Finding], policy: Policy, index: SampleIndex, kept: Kept
) -> tuple[list[Finding], list[Note]]:
    """*findings* with those whom nothing protects, and what protects the others.

    Nothing is said of those whom the policy is not about.
    """
    left, notes = list[Finding](), list[Note]()
    for_all = not (kept or policy.exempt or policy.start_grace or policy.only != _EVERYBODY)
    for finding in findings:
        subject, processes = finding.subject, finding.processes
        if for_all and _is_itself(finding, index):  # as nearly all: nothing can speak for it
            left.append(finding)
            continue
        unseen = _unseen(subject, index)
        if unseen is not None:
            notes.append(Note(*unseen, policy.name, subject))
            continue
        if not processes and subject.kind == "process":
            processes = tuple(index.processes[subject.pid, subject.start_time].values())[:1]  # type: ignore[index]  # it was seen
        if processes:
            against_each = [
                _unseen_process(process, subject.device, index)
                or (None if for_all else _protection(target_of_process(process, subject, index), policy, index, kept))
                for process in processes
            ]
        else:
            against_each = [_protection(_target_without_process(subject, index), policy, index, kept)]
        if None in against_each:
            free = tuple(process for process, against in zip(processes, against_each, strict=False) if against is None)
            left.append(finding if len(free) == len(finding.processes) else replace(finding, processes=free))
        elif why := next((against for against in against_each if against and against[0] != "scope"), None):
            notes.append(Note(*why, policy.name, subject))
    return left, notes


def _unseen(subject: Subject, index: SampleIndex) -> Protection | None:
    """Why it is not known whether a subject is there at all; None when it is."""
    if subject.device is not None and subject.device not in index.devices:
        return "gap", "the device is missing from the sample"
    claim = index.claim_of(subject)
    if subject.claim is not None and claim is None:
        return "gap", "the claim is missing from the sample"
    blind = [why for uuid in claim.devices if (why := index.blindness(uuid))] if claim else ()
    if blind:
        return "gap", blind[0]
    if subject.kind in ("user", "claim") and (subject.uid is None or subject.uid < 0):
        return "unknown", f"nobody knows whose the {subject.kind} is"
    return _unseen_process(subject, subject.device, index) if subject.kind == "process" else None


def _unseen_process(process: Subject | GpuProcess, uuid: str | None, index: SampleIndex) -> Protection | None:
    if process.pid is None or process.start_time is None or process.uid is None:
        return "unknown", f"the identity of process {process.pid} is not known"
    places = index.processes.get((process.pid, process.start_time), {})
    if not places or (uuid is not None and uuid not in places):
        blind = index.blindness(uuid) if uuid is not None else None
        return "gap", blind or f"process {process.pid} is missing from the sample"
    return None


def _is_itself(finding: Finding, index: SampleIndex) -> bool:
    """Whether a finding about a process, as it was seen on one device, means that process and no other."""
    subject, processes = finding.subject, finding.processes
    if subject.kind != "process" or subject.claim is not None or len(processes) != 1:
        return False
    there = index.processes.get((subject.pid, subject.start_time))  # type: ignore[arg-type]  # unknown: not there
    return there is not None and there.get(subject.device) is processes[0] and processes[0].uid == subject.uid  # type: ignore[arg-type]


def _protection(target: PolicyTarget, policy: Policy, index: SampleIndex, kept: Kept) -> Protection | None:
    """What keeps *target* from being acted on: a kind of note and its words."""
    if policy.only != _EVERYBODY and not _is_in(policy.only, target, index, unknown=False):
        return "scope", "outside `only`"
    for scope in policy.exempt:
        holds = scope.until is None or index.view.snapshot.taken_at < scope.until
        if holds and _is_in(scope, target, index, unknown=True):
            return "exempt", "inside `except`"
    until = max((kept.get(mark, 0.0) for mark in _marks(target, index)), default=0.0) if kept else 0.0
    if until > index.view.clock:
        return "kept", f"kept for another {format_duration(until - index.view.clock)}"
    if policy.start_grace and (target.age is None or target.age < policy.start_grace):
        age = "of unknown age" if target.age is None else f"{format_duration(target.age)} old"
        return "grace", f"{age}, innocent for the first {format_duration(policy.start_grace)}"
    return None


def _marks(target: PolicyTarget, index: SampleIndex) -> Iterator[tuple[str, int | str]]:
    """Everything about *target* that a user may have asked to keep."""
    claims = {claim.id for uuid in target.reach for claim in index.claims_on.get(uuid, ()) if claim.uid in target.uids}
    yield from (("claim", claim) for claim in claims | ({target.claim.id} if target.claim else set()))
    yield from (("uid", uid) for uid in target.uids)
    yield from (("device", uuid) for uuid in target.reach)
    yield from (("uid on device", f"{uid} {uuid}") for uid in target.uids for uuid in target.reach)


def _is_in(scope: Scope, target: PolicyTarget, index: SampleIndex, *, unknown: bool) -> bool:
    """Whether all keys of *scope* match.

    Args:
        unknown: whether an unknown fact matches, and one device of all that would be touched is enough (`except`); else
            each device where the condition holds must match (`only`).
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


def _is_device(device: Device, text: str, unknown: bool) -> bool:
    if text.isdecimal():
        return str(device.index) == (text.lstrip("0") or "0")
    names = (device.uuid, device.parent_uuid or "")
    instance = f"{device.index}.{device.gpu_instance_id}"
    return any(name.lower().startswith(text.lower()) for name in names) or instance == text


def _is_model(device: Device, pattern: str, unknown: bool) -> bool:
    return unknown if device.name is None else is_model(device.name, pattern)


def outside_schedule(policy: Policy, index: SampleIndex) -> Note | None:
    """Why the policy does not apply to anybody now."""
    if not is_within(policy.hours, policy.days, index.view.snapshot.taken_at + index.zone):
        return Note("hours", "outside the hours or days of the policy", policy.name)
    if policy.claimed_above is not None:
        # A device that is divided counts as its parts.
        divided = {device.parent_uuid for device in index.devices.values()}
        parts = [uuid for uuid in index.devices if uuid not in divided]
        share = 100 * sum(uuid in index.claims_on for uuid in parts) / len(parts) if parts else None
        if share is None or not share > policy.claimed_above:
            seen = "unknown" if share is None else f"{share:.0f}%"
            return Note("load", f"{seen} of the devices is claimed, not above {policy.claimed_above:g}%", policy.name)
    return None


def is_within(hours: tuple[float, float] | None, days: frozenset[int] | None, local: float) -> bool:
    """Whether local time, as seconds since 1970 with the offset of the zone, is in these hours of these days.

    Hours over midnight belong to the day on which they begin; equal ends are a whole day.
    """
    day, second = int(local // DAY), local % DAY
    if hours is not None and hours[0] != hours[1]:
        begin, end = hours
        inside = begin <= second < end if begin < end else second >= begin or second < end
        if not inside:
            return False
        if begin > end and second < end:
            day -= 1
    return days is None or (day + 3) % 7 in days  # 1 January 1970 was a Thursday


def on_enough_devices(
    findings: Sequence[Finding], policy: Policy, index: SampleIndex
) -> tuple[Sequence[Finding], Iterable[Note]]:
    """Those findings whose users have the condition on enough devices at once, narrowed to these users."""
    if policy.devices_at_least <= 1:
        return findings, ()
    devices: dict[int, set[str]] = {}
    for finding in findings:
        for uid, places in _places(finding, index).items():
            devices.setdefault(uid, set()).update(places)
    enough = {uid for uid, places in devices.items() if len(places) >= policy.devices_at_least}
    kept, notes = [], []
    for finding in findings:
        left = tuple(process for process in finding.processes if process.uid in enough)
        if left or (not finding.processes and enough & _places(finding, index).keys()):
            kept.append(finding if len(left) == len(finding.processes) else replace(finding, processes=left))
        else:
            text = f"on fewer than {policy.devices_at_least} devices of the same user"
            notes.append(Note("devices", text, policy.name, finding.subject))
    return kept, notes


def _places(finding: Finding, index: SampleIndex) -> dict[int, set[str]]:
    """The devices on which each user is meant by a finding."""
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


_OF_TERMINAL = frozenset({"interactive", "batch"})  # of which of the two a process is, its terminal tells


class PolicyTarget(NamedTuple):  # a dataclass takes three times as long to make, and these are made by the hundred
    """What could be hit: a process, or a subject that has none.

    Args:
        uids: of the process, or of the owners of the subject.
        places: the devices where the condition holds.
        reach: all devices that would be touched.
        age: seconds; None when unknown.
        process: None when it is no process.
        claim: that it is accused with.
    """

    uids: frozenset[int]
    places: tuple[str, ...]
    reach: tuple[str, ...]
    age: float | None
    process: GpuProcess | None = None
    claim: ClaimRecord | None = None


def target_of_process(process: GpuProcess, subject: Subject, index: SampleIndex) -> PolicyTarget:
    """A process that a finding about *subject* means; it must be in *index*."""
    assert process.start_time is not None and process.uid is not None
    reach = tuple(index.processes[process.pid, process.start_time])
    claim = index.claim_of(subject)
    return PolicyTarget(
        frozenset((process.uid, subject.uid) if subject.uid is not None else (process.uid,)),
        (subject.device,) if subject.device in reach else reach,
        reach,
        _least_age([claim] if claim else [], index, index.view.clock - process.start_time),
        process,
        claim,
    )


def _target_without_process(subject: Subject, index: SampleIndex) -> PolicyTarget:
    """A subject without processes: the owners of its claims stand for it."""
    own = index.claim_of(subject)
    if own is not None:
        claims = [own]
    elif subject.device is not None:
        claims = list(index.claims_on.get(subject.device, ()))
    else:
        claims = [claim for claim in index.claims.values() if claim.uid == subject.uid]
    reach = reach_of(subject, (), index)
    uids = frozenset({subject.uid} if subject.uid is not None else {claim.uid for claim in claims})
    return PolicyTarget(uids, reach, reach, _least_age(claims, index), None, own)


def _least_age(claims: Iterable[ClaimRecord], index: SampleIndex, of_process: float = float("inf")) -> float | None:
    """Seconds since the newest of *claims* and a process began; None when it is not known."""
    least = of_process
    for claim in claims:
        if claim.since is None:
            return None
        least = min(least, index.view.snapshot.taken_at - claim.since)
    return least


def certain_kinds(target: PolicyTarget, index: SampleIndex) -> frozenset[str]:
    """What a target certainly is, of interactive, batch and container; nothing when it is no process."""
    process = target.process
    if process is None:
        return frozenset()
    container = {"container"} if process.container else set()
    use = index.view.host.get((process.pid, process.start_time or 0.0))
    if interactive_use(" ".join(process.command or ()), use and use.terminal, use and use.traced):
        return frozenset({"interactive", *container})
    return frozenset({"batch", *container} if use is not None and use.terminal is not None else container)
