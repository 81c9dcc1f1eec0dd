"""What a user has: claims, each with its processes, and the processes without a claim; the oldest first.

Root has nothing: a process of root is a container or a service, and nobody can say whose.  Does not say how much is
too much: see quota.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gpuguard.attribution import claim_of, claims_on, places
from gpuguard.model import GpuProcess, Subject
from gpuguard.policies.people import claim_subject, computing
from gpuguard.policies.view import View, key_of, process_subject

ALWAYS = float("-inf")  # nobody knows since when: then it is older than everything, and the last to be in excess


class Holding(NamedTuple):  # a dataclass takes three times as long to make, and these are made by the hundred
    """A claim, or a process without one."""

    subject: Subject
    since: float  # on the clock of the snapshot
    devices: frozenset[str]  # uuids
    memory_used: int = 0  # bytes, as far as they are known
    processes: tuple[GpuProcess, ...] = ()


def holdings(view: View) -> dict[int, list[Holding]]:
    """The holdings of each user, the oldest first."""
    found: dict[object, Holding] = {}
    boot = view.snapshot.taken_at - view.clock  # unix time at which the clock was 0
    for record in view.snapshot.claims:
        if record.alive and record.uid > 0:
            since = ALWAYS if record.since is None else record.since - boot
            found[record.uid, record.id] = Holding(claim_subject(record), since, frozenset(record.devices))
    for device in places(view.snapshot):
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
