"""Whom a policy is about, and when: its scope, exemptions, who is too new, its schedule and the load of the machine.

A finding is narrowed to those of its processes that nothing protects.  When it names none, the subject itself is
checked.  Whatever cannot be seen in this sample is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpuguard.eligibility import is_model
from gpuguard.model import ClaimRecord, Device, Finding, GpuProcess, Subject
from gpuguard.policies.policy import Note, Policy, Scope
from gpuguard.policies.view import SampleIndex, interactive_use, reach_of
from gpuguard.units import format_duration

Kept = Mapping[tuple[str, int | str], float]  # ("uid", 1001) -> until which clock
Protection = tuple[str, str]  # the kind of a note, and its words
Match = Callable[[Device, str], bool]

_EVERYBODY = Scope()


def drop_protected(
    findings: Iterable[Finding], policy: Policy, index: SampleIndex, kept: Kept
) -> tuple[list[Finding], list[Note]]:
    """*findings* with those whom nothing protects, and what protects the others."""
    left, notes, anybody = [], [], _may_be_anybody(policy, kept)
    for finding in findings:
        if anybody and _is_itself(finding, index):  # as nearly all: nothing can speak for it
            left.append(finding)
        elif isinstance(outcome := without_protected(finding, policy, index, kept), Finding):
            left.append(outcome)
        elif outcome is not None:
            notes.append(outcome)
    return left, notes


def without_protected(finding: Finding, policy: Policy, index: SampleIndex, kept: Kept) -> Finding | Note | None:
    """*finding* with those whom nothing protects; else a note what protects them, None when it is out of scope."""
    unseen = _unseen(finding.subject, index)
    if unseen is not None:
        return Note(*unseen, policy.name, finding.subject)
    named = finding.processes or _itself(finding.subject, index)
    if not named:
        against = _protection(target_without_process(finding.subject, index), policy, index, kept)
        return finding if against is None else _note(against, policy, finding.subject)
    against_each = [_protection_of_process(process, finding.subject, policy, index, kept) for process in named]
    left = [process for process, against in zip(named, against_each, strict=True) if against is None]
    if not left:
        telling = next((against for against in against_each if against and against[0] != "scope"), None)
        return _note(telling, policy, finding.subject)
    return finding if len(left) == len(finding.processes) else replace(finding, processes=tuple(left))


def _note(against: Protection | None, policy: Policy, subject: Subject) -> Note | None:
    # Nothing is said about those whom the policy is not about.
    return None if against is None or against[0] == "scope" else Note(*against, policy.name, subject)


def _unseen(subject: Subject, index: SampleIndex) -> Protection | None:
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
    if subject.kind != "process":
        return None
    if subject.pid is None or subject.start_time is None or subject.uid is None:
        return "unknown", f"the identity of process {subject.pid} is not known"
    places = index.processes.get((subject.pid, subject.start_time), {})
    if not places or (subject.device is not None and subject.device not in places):
        why = index.blindness(subject.device) if subject.device is not None else None
        return "gap", why or f"process {subject.pid} is missing from the sample"
    return None


def _is_itself(finding: Finding, index: SampleIndex) -> bool:
    """Whether a finding about a process, as it was seen on one device, means that process and no other."""
    subject, processes = finding.subject, finding.processes
    if subject.kind != "process" or subject.claim is not None or len(processes) != 1:
        return False
    there = index.processes.get((subject.pid, subject.start_time))  # type: ignore[arg-type]  # unknown: not there
    return there is not None and there.get(subject.device) is processes[0] and processes[0].uid == subject.uid  # type: ignore[arg-type]


def _may_be_anybody(policy: Policy, kept: Kept) -> bool:
    return not (kept or policy.exempt or policy.start_grace or policy.only != _EVERYBODY)


def _itself(subject: Subject, index: SampleIndex) -> tuple[GpuProcess, ...]:
    if subject.kind != "process" or subject.pid is None or subject.start_time is None:
        return ()
    return tuple(index.processes[subject.pid, subject.start_time].values())[:1]


def _protection_of_process(
    process: GpuProcess, subject: Subject, policy: Policy, index: SampleIndex, kept: Kept
) -> Protection | None:
    if process.start_time is None or process.uid is None:
        return "unknown", f"the identity of process {process.pid} is not known"
    places = index.processes.get((process.pid, process.start_time), {})
    if not places or (subject.device is not None and subject.device not in places):
        blind = index.blindness(subject.device) if subject.device is not None else None
        return "gap", blind or f"process {process.pid} is missing from the sample"
    if _may_be_anybody(policy, kept):
        return None
    return _protection(target_of_process(process, subject, index), policy, index, kept)


def _protection(target: PolicyTarget, policy: Policy, index: SampleIndex, kept: Kept) -> Protection | None:
    """What keeps *target* from being acted on: a kind of note and its words."""
    only = policy.only
    if only != _EVERYBODY and not _is_in(only, target, index):
        return "scope", "outside `only`"
    for scope in policy.exempt:
        if (scope.until is None or index.view.snapshot.taken_at < scope.until) and _is_spared(scope, target, index):
            return "exempt", "inside `except`"
    until = max((kept.get(mark, 0.0) for mark in _attributes(target, index)), default=0.0) if kept else 0.0
    if until > index.view.clock:
        return "kept", f"kept for another {format_duration(until - index.view.clock)}"
    if policy.start_grace and (target.age is None or target.age < policy.start_grace):
        age = "of unknown age" if target.age is None else f"{format_duration(target.age)} old"
        return "grace", f"{age}, innocent for the first {format_duration(policy.start_grace)}"
    return None


def _attributes(target: PolicyTarget, index: SampleIndex) -> Iterator[tuple[str, int | str]]:
    yield from (("uid", uid) for uid in target.uids)
    yield from (("claim", claim) for claim in claims_of(target, index))
    yield from (("device", uuid) for uuid in target.reach)
    yield from (("uid on device", f"{uid} {uuid}") for uid in target.uids for uuid in target.reach)


def _is_in(scope: Scope, target: PolicyTarget, index: SampleIndex) -> bool:
    """Whether all keys of `only` certainly match: an unknown fact matches none."""
    if scope.users is not None and target.uids.isdisjoint(scope.users):
        return False
    if scope.groups is not None and not any(_is_member(uid, scope.groups, index) for uid in target.uids):
        return False
    if scope.kinds is not None and certain_kinds(target, index).isdisjoint(scope.kinds):
        return False
    return _all_match(scope.devices, target.places, index, _is_device) and _all_match(
        scope.models, target.places, index, _is_certainly_model
    )


def _is_spared(scope: Scope, target: PolicyTarget, index: SampleIndex) -> bool:
    """Whether all keys of `except` may match: an unknown fact matches each."""
    if scope.users is not None and target.uids.isdisjoint(scope.users):
        return False
    if scope.groups is not None and not any(_may_be_member(uid, scope.groups, index) for uid in target.uids):
        return False
    if scope.kinds is not None and possible_kinds(target, index).isdisjoint(scope.kinds):
        return False
    return _any_matches(scope.devices, target.reach, index, _is_device) and _any_matches(
        scope.models, target.reach, index, _may_be_model
    )


def _is_member(uid: int, groups: frozenset[str], index: SampleIndex) -> bool:
    return not groups.isdisjoint(index.view.groups.get(uid, ()))


def _may_be_member(uid: int, groups: frozenset[str], index: SampleIndex) -> bool:
    own = index.view.groups.get(uid)
    return own is None or not groups.isdisjoint(own)


def _all_match(patterns: tuple[str, ...] | None, uuids: tuple[str, ...], index: SampleIndex, is_so: Match) -> bool:
    if patterns is None:
        return True
    devices = [index.devices[uuid] for uuid in uuids if uuid in index.devices]
    return bool(devices) and all(any(is_so(device, pattern) for pattern in patterns) for device in devices)


def _any_matches(patterns: tuple[str, ...] | None, uuids: tuple[str, ...], index: SampleIndex, is_so: Match) -> bool:
    if patterns is None:
        return True
    devices = [index.devices[uuid] for uuid in uuids if uuid in index.devices]
    return any(is_so(device, pattern) for device in devices for pattern in patterns)


def _is_device(device: Device, text: str) -> bool:
    if text.isdecimal():
        return str(device.index) == (text.lstrip("0") or "0")
    wanted = text.lower()
    own = (device.uuid, device.parent_uuid or "", f"{device.index}.{device.gpu_instance_id}")
    return any(name.lower().startswith(wanted) for name in own[:2]) or own[2] == text


def _is_certainly_model(device: Device, pattern: str) -> bool:
    return device.name is not None and is_model(device.name, pattern)


def _may_be_model(device: Device, pattern: str) -> bool:
    return device.name is None or is_model(device.name, pattern)


# When a policy applies at all: hours and days, the load of the node, and on how many devices of one user.


DAY = 86400
THURSDAY = 3  # 1 January 1970


def outside_schedule(policy: Policy, index: SampleIndex) -> Note | None:
    """Why the policy does not apply to anybody now."""
    local = index.view.snapshot.taken_at + index.zone
    if not is_within(policy.hours, policy.days, local):
        return Note("hours", "outside the hours or days of the policy", policy.name)
    if policy.claimed_above is not None:
        share = claimed_share(index)
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
    return days is None or (day + THURSDAY) % 7 in days


def claimed_share(index: SampleIndex) -> float | None:
    """Percent of the devices that are claimed; a device that is divided counts as its parts.  None without devices."""
    divided = {device.parent_uuid for device in index.devices.values()}
    whole = [uuid for uuid in index.devices if uuid not in divided]
    if not whole:
        return None
    return 100 * sum(uuid in index.claims_on for uuid in whole) / len(whole)


def on_enough_devices(
    findings: Sequence[Finding], policy: Policy, index: SampleIndex
) -> tuple[Sequence[Finding], Iterable[Note]]:
    """Those findings whose users have the condition on enough devices at once, without_protected to these users."""
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


# Who could be hit: a process, or a subject that has none.

UNKNOWN_KINDS = frozenset({"interactive", "batch"})


class PolicyTarget(NamedTuple):  # a dataclass takes three times as long to make, and these are made by the hundred
    """Somebody who could be hit: a process, or a subject that has none.

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
    age: float | None = index.view.clock - process.start_time
    return PolicyTarget(
        frozenset((process.uid, subject.uid) if subject.uid is not None else (process.uid,)),
        (subject.device,) if subject.device in reach else reach,
        reach,
        age if claim is None else _least([age, *_ages([claim], index)]),
        process,
        claim,
    )


def target_without_process(subject: Subject, index: SampleIndex) -> PolicyTarget:
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
    return PolicyTarget(uids, reach, reach, _least(_ages(claims, index)), None, own)


def claims_of(target: PolicyTarget, index: SampleIndex) -> set[str]:
    """Ids of the claims under which a target runs."""
    own = {claim.id for uuid in target.reach for claim in index.claims_on.get(uuid, ()) if claim.uid in target.uids}
    return own if target.claim is None else own | {target.claim.id}


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


def possible_kinds(target: PolicyTarget, index: SampleIndex) -> frozenset[str]:
    """What it may be: as long as its terminal is not known, interactive as well as batch."""
    certain = certain_kinds(target, index)
    return certain if certain & UNKNOWN_KINDS or target.process is None else certain | UNKNOWN_KINDS


def _ages(claims: Iterable[ClaimRecord], index: SampleIndex) -> list[float | None]:
    now = index.view.snapshot.taken_at
    return [None if claim.since is None else now - claim.since for claim in claims]


def _least(ages: list[float | None]) -> float | None:
    least = float("inf")
    for age in ages:
        if age is None:
            return None
        least = min(least, age)
    return least
