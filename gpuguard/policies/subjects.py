"""Somebody who could be hit: what is known of a process, or of a subject that has none, when it is to be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpuguard.device_state import claim_of, claims_on, computes, started_by, usable_devices
from gpuguard.model import ClaimRecord, Device, GpuProcess, Subject
from gpuguard.policies.view import RuleView, SampleIndex, device_subject, judged, key_of, process_subject, reach_of

UNKNOWN_KINDS = frozenset({"interactive", "batch"})


class PolicySubject(NamedTuple):  # a dataclass takes three times as long to make, and these are made by the hundred
    """Somebody who could be hit: a process, or a subject that has none.

    Args:
        uids: of the process, or of whoever the subject belongs to.
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


def subject_of(process: GpuProcess, subject: Subject, sight: SampleIndex) -> PolicySubject:
    """A process that a finding about *subject* means; it must be in *sight*."""
    assert process.start_time is not None and process.uid is not None
    reach = tuple(sight.processes[process.pid, process.start_time])
    claim = sight.claim_of(subject)
    age: float | None = sight.view.clock - process.start_time
    return PolicySubject(
        frozenset((process.uid, subject.uid) if subject.uid is not None else (process.uid,)),
        (subject.device,) if subject.device in reach else reach,
        reach,
        age if claim is None else _least([age, *_ages([claim], sight)]),
        process,
        claim,
    )


def bystander(subject: Subject, sight: SampleIndex) -> PolicySubject:
    """A subject without processes: whoever has claimed it speaks for it."""
    own = sight.claim_of(subject)
    if own is not None:
        claims = [own]
    elif subject.device is not None:
        claims = list(sight.claims_on.get(subject.device, ()))
    else:
        claims = [claim for claim in sight.claims.values() if claim.uid == subject.uid]
    reach = reach_of(subject, (), sight)
    uids = frozenset({subject.uid} if subject.uid is not None else {claim.uid for claim in claims})
    return PolicySubject(uids, reach, reach, _least(_ages(claims, sight)), None, own)


def claims_of(party: PolicySubject, sight: SampleIndex) -> set[str]:
    """Ids of the claims under which a party runs."""
    own = {claim.id for uuid in party.reach for claim in sight.claims_on.get(uuid, ()) if claim.uid in party.uids}
    return own if party.claim is None else own | {party.claim.id}


def certain_kinds(party: PolicySubject, sight: SampleIndex) -> frozenset[str]:
    """What a party certainly is, of interactive, batch and container; nothing when it is no process."""
    process = party.process
    if process is None:
        return frozenset()
    container = {"container"} if process.container else set()
    use = sight.view.host.get((process.pid, process.start_time or 0.0))
    if any("ipykernel" in word for word in process.command or ()):
        return frozenset({"interactive", *container})
    if use is not None and use.terminal is not None:
        return frozenset({"interactive" if use.terminal else "batch", *container})
    return frozenset(container)


def possible_kinds(party: PolicySubject, sight: SampleIndex) -> frozenset[str]:
    """What it may be: as long as nobody has looked at its terminal, interactive as well as batch."""
    certain = certain_kinds(party, sight)
    return certain if certain & UNKNOWN_KINDS or party.process is None else certain | UNKNOWN_KINDS


def _ages(claims: Iterable[ClaimRecord], sight: SampleIndex) -> list[float | None]:
    now = sight.view.snapshot.taken_at
    return [None if claim.since is None else now - claim.since for claim in claims]


def _least(ages: list[float | None]) -> float | None:
    least = float("inf")
    for age in ages:
        if age is None:
            return None
        least = min(least, age)
    return least


# What the rules about people have in common: who computes where, and how a claim or a process is called in a finding.
#
# Decides nothing.


def computing(device: Device) -> tuple[GpuProcess, ...]:
    """The processes of *device* that may be judged and that surely compute there; no desktops."""
    return tuple([process for process in judged(device) if computes(process)])


def everywhere(view: RuleView) -> Iterator[tuple[Device, GpuProcess]]:
    """Each computing process on each device; a device that is divided has none but those of its instances."""
    for device in usable_devices(view.snapshot):
        for process in computing(device):
            yield device, process


def claim_subject(record: ClaimRecord) -> Subject:
    """A claim, on all of its devices."""
    return Subject("claim", uid=record.uid, claim=record.id, user=record.user)


def called(user: str | None, uid: int | None) -> str:
    """A user as people know him: the name, else the number."""
    return user or f"uid {uid}"


# Who holds a device: the subjects that a rule can be `per`, with the processes that an action would mean.
#
# Only processes that may be judged at all, and never a desktop.  Decides nothing.


Use = tuple[Subject, int | None, tuple[GpuProcess, ...]]  # who, bytes of memory, whom an action would mean


def wholes(view: RuleView) -> Iterator[tuple[Device, tuple[Device, ...]]]:
    """Each device that is no part of another one here, with the places on it: its instances, else itself."""
    uuids, parts = {device.uuid for device in view.snapshot.devices}, usable_devices(view.snapshot)
    for whole in view.snapshot.devices:
        if whole.parent_uuid not in uuids:
            yield whole, tuple(one for one in parts if whole.uuid in (one.uuid, one.parent_uuid))


def per_device(view: RuleView, device: Device) -> Iterator[Use]:
    """The device as such: nobody in particular is to blame."""
    yield device_subject(device), device.memory_used, ()


def per_process(view: RuleView, device: Device) -> Iterator[Use]:
    """Each process that computes there."""
    for process in computing(device):
        yield process_subject(device, process), process.memory_used, (process,)


def per_user(view: RuleView, device: Device) -> Iterator[Use]:
    """Each user of the device with all processes there."""
    of_user: dict[int | None, list[GpuProcess]] = {}
    for process in computing(device):
        of_user.setdefault(process.uid, []).append(process)
    for processes in of_user.values():
        subject = Subject("user", device=device.uuid, uid=processes[0].uid, user=processes[0].user)
        yield subject, known_sum(processes), tuple(processes)


def per_claim(view: RuleView, device: Device) -> Iterator[Use]:
    """Each claim with its processes there.

    Where a user has two claims nobody knows which is whose, unless they share the device and were started below them.
    """
    claims = claims_on(view.snapshot, device)
    for claim in claims:
        if claim.uid < 0:
            continue
        if sum(other.uid == claim.uid for other in claims) == 1:
            found = tuple(one for one in computing(device) if claim_of(one, claims, view.seen) == claim)
            yield claim_here(device, claim), known_sum(found), found
        elif claim.slots:
            found = tuple(one for one in computing(device) if started_by(one, claims, view.seen) == claim)
            yield claim_here(device, claim), known_sum(found), found


def claim_here(device: Device, claim: ClaimRecord) -> Subject:
    """A claim, on one of its devices."""
    return Subject("claim", device=device.uuid, uid=claim.uid, claim=claim.id, user=claim.user)


def known_sum(processes: Sequence[GpuProcess]) -> int | None:
    """The memory that is known to be used: never too much, so it accuses nobody wrongly."""
    known = [process.memory_used for process in processes if process.memory_used is not None]
    return sum(known) if known else None


USES = {"process": per_process, "user": per_user, "claim": per_claim, "device": per_device}


# What a user has: claims, each with its processes, and the processes without a claim; the oldest first.
#
# Root has nothing: a process of root is a container or a service, and nobody can say whose.  Does not say how much is
# too much: see quota.


ALWAYS = float("-inf")  # nobody knows since when: then it is older than everything, and the last to be in excess


class Holding(NamedTuple):  # a dataclass takes three times as long to make, and these are made by the hundred
    """A claim, or a process without one."""

    subject: Subject
    since: float  # on the clock of the snapshot
    devices: frozenset[str]  # uuids
    memory_used: int = 0  # bytes, as far as they are known
    processes: tuple[GpuProcess, ...] = ()


def holdings(view: RuleView) -> dict[int, list[Holding]]:
    """The holdings of each user, the oldest first."""
    found: dict[object, Holding] = {}
    boot = view.snapshot.taken_at - view.clock  # unix time at which the clock was 0
    for record in view.snapshot.claims:
        if record.alive and record.uid > 0:
            since = ALWAYS if record.since is None else record.since - boot
            found[record.uid, record.id] = Holding(claim_subject(record), since, frozenset(record.devices))
    for device in usable_devices(view.snapshot):
        here = claims_on(view.snapshot, device)
        for process in computing(device):
            if not process.uid or process.start_time is None:
                continue
            own = [record for record in here if record.uid == process.uid]
            claim = claim_of(process, own, view.seen) if own else None
            # By its owner, too: an id alone could be copied, to have the processes of its claim counted as another's.
            key: object = (claim.uid, claim.id) if claim else (process.pid, process.start_time)
            held = found.get(key)
            if held is None:
                here_only = process_subject(device, process), process.start_time, frozenset((device.uuid,))
                found[key] = Holding(*here_only, process.memory_used or 0, (process,))
            else:
                found[key] = _with(held, process, device.uuid)
    of_user: dict[int, list[Holding]] = {}
    for holding in sorted(found.values(), key=lambda each: (each.since, key_of(each.subject))):
        of_user.setdefault(holding.subject.uid or 0, []).append(holding)
    return of_user


def excess(oldest_first: Sequence[Holding], measure: Callable[[Iterable[Holding]], float], limit: float) -> int:
    """How many of the newest holdings must go, so that what is left measures at most *limit*."""
    kept = len(oldest_first)
    while kept and measure(oldest_first[:kept]) > limit:
        kept -= 1
    return len(oldest_first) - kept


def devices(held: Iterable[Holding]) -> float:
    """How many devices these are, together."""
    return len(frozenset[str]().union(*(holding.devices for holding in held)))


def claims(held: Iterable[Holding]) -> float:
    """How many of these are claims."""
    return sum(holding.subject.kind == "claim" for holding in held)


def memory(held: Iterable[Holding]) -> float:
    """Bytes in use, at least."""
    return sum(holding.memory_used for holding in held)


def _with(holding: Holding, process: GpuProcess, uuid: str) -> Holding:
    """*holding* with one more process, or the same one on one more device."""
    known = any(process.pid == other.pid for other in holding.processes)
    return Holding(
        holding.subject,
        holding.since,
        # The devices of a claim are those that it names: its job may use them as instances of one.
        devices=holding.devices if holding.subject.kind == "claim" else holding.devices | {uuid},
        memory_used=holding.memory_used + (process.memory_used or 0),
        processes=holding.processes if known else (*holding.processes, process),
    )
