"""Whom a policy is about: its scope, its exemptions, what somebody asked to keep, and who is too new.

A finding is narrowed to those of its processes that nothing speaks for.  When it names none, the subject itself is
looked at.  Whatever cannot be seen in this sample is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpuguard.eligibility import is_model
from gpuguard.model import Device, Finding, GpuProcess, Subject
from gpuguard.policies.policy import Note, Policy, Scope
from gpuguard.policies.subjects import PolicySubject, bystander, certain_kinds, claims_of, possible_kinds, subject_of
from gpuguard.policies.view import SampleIndex, reach_of
from gpuguard.units import format_duration

Kept = Mapping[tuple[str, int | str], float]  # ("uid", 1001) -> until which clock
Protection = tuple[str, str]  # the kind of a note, and its words
Match = Callable[[Device, str], bool]

_EVERYBODY = Scope()


def unprotected(
    findings: Iterable[Finding], policy: Policy, sight: SampleIndex, kept: Kept
) -> tuple[list[Finding], list[Note]]:
    """*findings* with those whom nothing protects, and what protects the others."""
    left, notes, anybody = [], [], _may_be_anybody(policy, kept)
    for finding in findings:
        if anybody and _is_itself(finding, sight):  # as nearly all: nothing can speak for it
            left.append(finding)
        elif isinstance(outcome := narrowed(finding, policy, sight, kept), Finding):
            left.append(outcome)
        elif outcome is not None:
            notes.append(outcome)
    return left, notes


def narrowed(finding: Finding, policy: Policy, sight: SampleIndex, kept: Kept) -> Finding | Note | None:
    """*finding* with those whom nothing protects; else a note what protects them, None when it is out of scope."""
    unseen = _unseen(finding.subject, sight)
    if unseen is not None:
        return Note(*unseen, policy.name, finding.subject)
    named = finding.processes or _itself(finding.subject, sight)
    if not named:
        against = _protection(bystander(finding.subject, sight), policy, sight, kept)
        return finding if against is None else _note(against, policy, finding.subject)
    against_each = [_protection_of_process(process, finding.subject, policy, sight, kept) for process in named]
    left = [process for process, against in zip(named, against_each, strict=True) if against is None]
    if not left:
        telling = next((against for against in against_each if against and against[0] != "scope"), None)
        return _note(telling, policy, finding.subject)
    return finding if len(left) == len(finding.processes) else replace(finding, processes=tuple(left))


def _note(against: Protection | None, policy: Policy, subject: Subject) -> Note | None:
    # Nothing is said about those whom the policy is not about.
    return None if against is None or against[0] == "scope" else Note(*against, policy.name, subject)


def _unseen(subject: Subject, sight: SampleIndex) -> Protection | None:
    if subject.device is not None and subject.device not in sight.devices:
        return "gap", "the device is missing from the sample"
    claim = sight.claim_of(subject)
    if subject.claim is not None and claim is None:
        return "gap", "the claim is missing from the sample"
    blind = [why for uuid in claim.devices if (why := sight.blindness(uuid))] if claim else ()
    if blind:
        return "gap", blind[0]
    if subject.kind in ("user", "claim") and (subject.uid is None or subject.uid < 0):
        return "unknown", f"nobody knows whose the {subject.kind} is"
    if subject.kind != "process":
        return None
    if subject.pid is None or subject.start_time is None or subject.uid is None:
        return "unknown", f"the identity of process {subject.pid} is not known"
    places = sight.processes.get((subject.pid, subject.start_time), {})
    if not places or (subject.device is not None and subject.device not in places):
        why = sight.blindness(subject.device) if subject.device is not None else None
        return "gap", why or f"process {subject.pid} is missing from the sample"
    return None


def _is_itself(finding: Finding, sight: SampleIndex) -> bool:
    """Whether a finding about a process, as it was seen on one device, means that process and no other."""
    subject, processes = finding.subject, finding.processes
    if subject.kind != "process" or subject.claim is not None or len(processes) != 1:
        return False
    there = sight.processes.get((subject.pid, subject.start_time))  # type: ignore[arg-type]  # unknown: not there
    return there is not None and there.get(subject.device) is processes[0] and processes[0].uid == subject.uid  # type: ignore[arg-type]


def _may_be_anybody(policy: Policy, kept: Kept) -> bool:
    return not (kept or policy.exempt or policy.start_grace or policy.only != _EVERYBODY)


def _itself(subject: Subject, sight: SampleIndex) -> tuple[GpuProcess, ...]:
    if subject.kind != "process" or subject.pid is None or subject.start_time is None:
        return ()
    return tuple(sight.processes[subject.pid, subject.start_time].values())[:1]


def _protection_of_process(
    process: GpuProcess, subject: Subject, policy: Policy, sight: SampleIndex, kept: Kept
) -> Protection | None:
    if process.start_time is None or process.uid is None:
        return "unknown", f"the identity of process {process.pid} is not known"
    places = sight.processes.get((process.pid, process.start_time), {})
    if not places or (subject.device is not None and subject.device not in places):
        blind = sight.blindness(subject.device) if subject.device is not None else None
        return "gap", blind or f"process {process.pid} is missing from the sample"
    if _may_be_anybody(policy, kept):
        return None
    return _protection(subject_of(process, subject, sight), policy, sight, kept)


def _protection(party: PolicySubject, policy: Policy, sight: SampleIndex, kept: Kept) -> Protection | None:
    """What keeps *party* from being acted on: a kind of note and its words."""
    only = policy.only
    if only != _EVERYBODY and not _is_in(only, party, sight):
        return "scope", "outside `only`"
    for scope in policy.exempt:
        if (scope.until is None or sight.view.snapshot.taken_at < scope.until) and _is_spared(scope, party, sight):
            return "exempt", "inside `except`"
    until = max((kept.get(mark, 0.0) for mark in _attributes(party, sight)), default=0.0) if kept else 0.0
    if until > sight.view.clock:
        return "kept", f"kept for another {format_duration(until - sight.view.clock)}"
    if policy.start_grace and (party.age is None or party.age < policy.start_grace):
        age = "of unknown age" if party.age is None else f"{format_duration(party.age)} old"
        return "grace", f"{age}, innocent for the first {format_duration(policy.start_grace)}"
    return None


def _attributes(party: PolicySubject, sight: SampleIndex) -> Iterator[tuple[str, int | str]]:
    yield from (("uid", uid) for uid in party.uids)
    yield from (("claim", claim) for claim in claims_of(party, sight))
    yield from (("device", uuid) for uuid in party.reach)
    yield from (("uid on device", f"{uid} {uuid}") for uid in party.uids for uuid in party.reach)


def _is_in(scope: Scope, party: PolicySubject, sight: SampleIndex) -> bool:
    """Whether all keys of `only` certainly match: an unknown fact matches none."""
    if scope.users is not None and party.uids.isdisjoint(scope.users):
        return False
    if scope.groups is not None and not any(_is_member(uid, scope.groups, sight) for uid in party.uids):
        return False
    if scope.kinds is not None and certain_kinds(party, sight).isdisjoint(scope.kinds):
        return False
    return _all_match(scope.devices, party.places, sight, _is_device) and _all_match(
        scope.models, party.places, sight, _is_certainly_model
    )


def _is_spared(scope: Scope, party: PolicySubject, sight: SampleIndex) -> bool:
    """Whether all keys of `except` may match: an unknown fact matches each."""
    if scope.users is not None and party.uids.isdisjoint(scope.users):
        return False
    if scope.groups is not None and not any(_may_be_member(uid, scope.groups, sight) for uid in party.uids):
        return False
    if scope.kinds is not None and possible_kinds(party, sight).isdisjoint(scope.kinds):
        return False
    return _any_matches(scope.devices, party.reach, sight, _is_device) and _any_matches(
        scope.models, party.reach, sight, _may_be_model
    )


def _is_member(uid: int, groups: frozenset[str], sight: SampleIndex) -> bool:
    return not groups.isdisjoint(sight.view.groups.get(uid, ()))


def _may_be_member(uid: int, groups: frozenset[str], sight: SampleIndex) -> bool:
    own = sight.view.groups.get(uid)
    return own is None or not groups.isdisjoint(own)


def _all_match(patterns: tuple[str, ...] | None, uuids: tuple[str, ...], sight: SampleIndex, is_so: Match) -> bool:
    if patterns is None:
        return True
    devices = [sight.devices[uuid] for uuid in uuids if uuid in sight.devices]
    return bool(devices) and all(any(is_so(device, pattern) for pattern in patterns) for device in devices)


def _any_matches(patterns: tuple[str, ...] | None, uuids: tuple[str, ...], sight: SampleIndex, is_so: Match) -> bool:
    if patterns is None:
        return True
    devices = [sight.devices[uuid] for uuid in uuids if uuid in sight.devices]
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


def out_of_season(policy: Policy, sight: SampleIndex) -> Note | None:
    """Why the policy does not apply to anybody now."""
    local = sight.view.snapshot.taken_at + sight.zone
    if not is_within(policy.hours, policy.days, local):
        return Note("hours", "outside the hours or days of the policy", policy.name)
    if policy.claimed_above is not None:
        share = claimed_share(sight)
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


def claimed_share(sight: SampleIndex) -> float | None:
    """Percent of the devices that are claimed; a device that is divided counts as its parts.  None without devices."""
    divided = {device.parent_uuid for device in sight.devices.values()}
    whole = [uuid for uuid in sight.devices if uuid not in divided]
    if not whole:
        return None
    return 100 * sum(uuid in sight.claims_on for uuid in whole) / len(whole)


def on_enough_devices(
    findings: Sequence[Finding], policy: Policy, sight: SampleIndex
) -> tuple[Sequence[Finding], Iterable[Note]]:
    """Those findings whose users have the condition on enough devices at once, narrowed to these users."""
    if policy.devices_at_least <= 1:
        return findings, ()
    devices: dict[int, set[str]] = {}
    for finding in findings:
        for uid, places in _places(finding, sight).items():
            devices.setdefault(uid, set()).update(places)
    enough = {uid for uid, places in devices.items() if len(places) >= policy.devices_at_least}
    kept, notes = [], []
    for finding in findings:
        left = tuple(process for process in finding.processes if process.uid in enough)
        if left or (not finding.processes and enough & _places(finding, sight).keys()):
            kept.append(finding if len(left) == len(finding.processes) else replace(finding, processes=left))
        else:
            text = f"on fewer than {policy.devices_at_least} devices of the same user"
            notes.append(Note("devices", text, policy.name, finding.subject))
    return kept, notes


def _places(finding: Finding, sight: SampleIndex) -> dict[int, set[str]]:
    """The devices on which each user is meant by a finding."""
    subject, places = finding.subject, dict[int, set[str]]()
    for process in finding.processes:
        if process.uid is not None:
            here = {subject.device} if subject.device else set(reach_of(subject, (process,), sight))
            places.setdefault(process.uid, set()).update(here)
    if not finding.processes:
        reach = reach_of(subject, (), sight)
        uids = {subject.uid} if subject.uid is not None else None
        for uuid in reach:
            for uid in uids or {claim.uid for claim in sight.claims_on.get(uuid, ())}:
                places.setdefault(uid, set()).add(uuid)
    return places
