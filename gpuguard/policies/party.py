"""Somebody who could be hit: what is known of a process, or of a subject that has none, when it is to be judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuguard.model import ClaimRecord, GpuProcess, Subject
from gpuguard.policies.sight import Sight, reach_of


@dataclass(frozen=True)
class Party:
    """Somebody who could be hit: a process, or a subject that has none.

    Args:
        uids: of the process, or of whoever the subject belongs to.
        places: the devices where the condition holds.
        reach: all devices that would be touched.
        claims: ids of the claims under which it runs.
        kinds: what it certainly is, of interactive, batch, container.
        possible_kinds: what it may be; empty when it is no process.
        age: seconds; None when unknown.
    """

    uids: frozenset[int]
    places: tuple[str, ...]
    reach: tuple[str, ...]
    claims: frozenset[str]
    kinds: frozenset[str]
    possible_kinds: frozenset[str]
    age: float | None


def party_of(process: GpuProcess, subject: Subject, sight: Sight) -> Party:
    """A process that a finding about *subject* means; it must be in *sight*."""
    assert process.start_time is not None and process.uid is not None
    reach = tuple(sight.processes[process.pid, process.start_time])
    claims = {claim.id for uuid in reach for claim in sight.claims_on.get(uuid, ()) if claim.uid == process.uid}
    claimed = sight.claim_of(subject)
    own = [claimed] if claimed is not None else []
    certain, possible = _kinds(process, sight)
    return Party(
        frozenset({process.uid} if subject.uid is None else {process.uid, subject.uid}),
        (subject.device,) if subject.device in reach else reach,
        reach,
        frozenset(claims.union(claim.id for claim in own)),
        certain,
        possible,
        _least([sight.view.clock - process.start_time, *_ages(own, sight)]),
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
    ids = frozenset(claim.id for claim in claims)
    return Party(uids, reach, reach, ids, frozenset(), frozenset(), _least(_ages(claims, sight)))


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


def _kinds(process: GpuProcess, sight: Sight) -> tuple[frozenset[str], frozenset[str]]:
    """What a process certainly is, and what it may be: without a look at its terminal, interactive as well as batch."""
    certain = {"container"} if process.container else set()
    use = sight.view.host.get((process.pid, process.start_time or 0.0))
    if any("ipykernel" in word for word in process.command or ()):
        certain.add("interactive")
    elif use is not None and use.terminal is not None:
        certain.add("interactive" if use.terminal else "batch")
    else:
        return frozenset(certain), frozenset({"interactive", "batch", *certain})
    return frozenset(certain), frozenset(certain)
