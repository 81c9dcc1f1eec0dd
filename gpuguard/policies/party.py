"""Somebody who could be hit: what is known of a process, or of a subject that has none, when it is to be judged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpuguard.model import ClaimRecord, GpuProcess, Subject
from gpuguard.policies.sight import Sight, reach_of

UNKNOWN_KINDS = frozenset({"interactive", "batch"})


class Party(NamedTuple):  # a dataclass takes three times as long to make, and these are made by the hundred
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


def party_of(process: GpuProcess, subject: Subject, sight: Sight) -> Party:
    """A process that a finding about *subject* means; it must be in *sight*."""
    assert process.start_time is not None and process.uid is not None
    reach = tuple(sight.processes[process.pid, process.start_time])
    claim = sight.claim_of(subject)
    age: float | None = sight.view.clock - process.start_time
    return Party(
        frozenset((process.uid, subject.uid) if subject.uid is not None else (process.uid,)),
        (subject.device,) if subject.device in reach else reach,
        reach,
        age if claim is None else _least([age, *_ages([claim], sight)]),
        process,
        claim,
    )


def bystander(subject: Subject, sight: Sight) -> Party:
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
    return Party(uids, reach, reach, _least(_ages(claims, sight)), None, own)


def claims_of(party: Party, sight: Sight) -> set[str]:
    """Ids of the claims under which a party runs."""
    own = {claim.id for uuid in party.reach for claim in sight.claims_on.get(uuid, ()) if claim.uid in party.uids}
    return own if party.claim is None else own | {party.claim.id}


def certain_kinds(party: Party, sight: Sight) -> frozenset[str]:
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


def possible_kinds(party: Party, sight: Sight) -> frozenset[str]:
    """What it may be: as long as nobody has looked at its terminal, interactive as well as batch."""
    certain = certain_kinds(party, sight)
    return certain if certain & UNKNOWN_KINDS or party.process is None else certain | UNKNOWN_KINDS


def _ages(claims: Iterable[ClaimRecord], sight: Sight) -> list[float | None]:
    now = sight.view.snapshot.taken_at
    return [None if claim.since is None else now - claim.since for claim in claims]


def _least(ages: list[float | None]) -> float | None:
    least = float("inf")
    for age in ages:
        if age is None:
            return None
        least = min(least, age)
    return least
