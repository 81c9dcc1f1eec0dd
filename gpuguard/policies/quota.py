"""The rule ``quota``: how much one user, or one group, may have at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from gpuguard.device_state import claim_of, claims_on, usable_devices, user_label
from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding, GpuProcess, Subject
from gpuguard.policies.policy import Policy
from gpuguard.policies.view import RuleView, claim_subject, computing, key_of, process_subject
from gpuguard.units import format_bytes, parse_duration, parse_percent


@dataclass(frozen=True)
class QuotaRule:
    """A user has more than their share; the newest claims and processes are the ones in excess, never the oldest.

    devices: so many, claimed or in use without a claim; a MIG instance counts as one.
    claims: so many at a time.
    memory: share of the memory of all devices together.
    gpu_hours: GPU time claimed within `within`, like 100h; over it, only the newest claim or process is in excess.
    within: the time before now in which gpu_hours are counted, like 7d.
    shared_by: groups; the members of each have all this together.  Absent: every user has it.

    Root's processes are nobody's.

        when: {quota: {devices: 4, gpu_hours: 100h, within: 7d}}
    """

    devices: int | None = None
    claims: int | None = None
    memory: Annotated[float | None, parse_percent] = None
    gpu_hours: Annotated[float | None, parse_duration] = None
    within: Annotated[float | None, parse_duration] = None
    shared_by: tuple[Annotated[str, "group"], ...] = ()

    def __post_init__(self) -> None:
        if self.devices is self.claims is self.memory is self.gpu_hours is None:
            raise InvalidRequest("no limit is given: write devices, claims, memory or gpu_hours.")
        if (self.gpu_hours is None) != (self.within is None):
            raise InvalidRequest("gpu_hours and within belong together: write both, like 100h within 7d.")
        if any(limit is not None and limit < 0 for limit in (self.devices, self.claims)):
            raise InvalidRequest("a limit below 0 makes no sense: write 0 for none at all.")

    def check(self, view: RuleView) -> Iterator[Finding]:
        """A finding per claim, or process without one, that is in excess."""
        found: dict[int, Finding] = {}  # someone in two groups is found once
        for owner, uids, held in self._accounts(view):
            reasons: dict[int, list[str]] = {}
            for count, why in self._excesses(view, uids, held):
                for place in range(len(held) - count, len(held)):
                    reasons.setdefault(place, []).append(f"{owner} {why}")
            for place, whys in reasons.items():
                holding = held[place]
                finding = Finding("quota", holding.subject, "; ".join(whys), holding.processes)
                found.setdefault(id(holding), finding)
        yield from found.values()

    def _accounts(self, view: RuleView) -> Iterator[tuple[str, frozenset[int], Sequence[Holding]]]:
        """Name, uids and holdings of everybody who has the quota, the oldest holding first."""
        of_user = holdings(view)
        for uid, held in of_user.items() if not self.shared_by else ():
            yield user_label(held[0].subject.user, uid), frozenset([uid]), held
        for group in self.shared_by:
            members = frozenset(uid for uid, groups in view.groups.items() if group in groups)
            together = [holding for uid in members for holding in of_user.get(uid, ())]
            yield f"group {group}", members, sorted(together, key=lambda holding: holding.since)

    def _excesses(self, view: RuleView, uids: frozenset[int], held: Sequence[Holding]) -> Iterator[tuple[int, str]]:
        """(how many of the newest holdings, why) for each limit that is passed."""
        if self.devices is not None and (count := excess(held, devices, self.devices)):
            yield count, f"has {devices(held):.0f} devices, {self.devices} are allowed"
        if self.claims is not None and (count := excess(held, claims, self.claims)):
            yield count, f"has {claims(held):.0f} claims, {self.claims} are allowed"
        total = _memory_total(view)
        if self.memory is not None and total and (count := excess(held, memory, self.memory / 100 * total)):
            share = 100 * memory(held) / total
            uses = f"uses {format_bytes(memory(held))}, {share:.3g}% of the memory of all devices"
            yield count, f"{uses}, {self.memory:g}% is allowed"
        if self.gpu_hours is not None and self.within is not None and held:
            known = (view.gpu_seconds.get(uid, {}).get(self.within) for uid in uids)
            used = sum(seconds for seconds in known if seconds is not None)
            if used > self.gpu_hours:
                window = f"{self.within / 86400:.3g} days"
                yield 1, f"had {used / 3600:.1f} GPU-hours in {window}, {self.gpu_hours / 3600:g} are allowed"


def windows_of(policies: Iterable[Policy]) -> frozenset[float]:
    """The windows, in seconds, in which the quotas of *policies* count GPU time."""
    rules = [rule for policy in policies for rule in policy.rules if isinstance(rule, QuotaRule)]
    return frozenset(rule.within for rule in rules if rule.gpu_hours is not None and rule.within is not None)


def _memory_total(view: RuleView) -> int | None:
    totals = [device.memory_total for device in view.snapshot.devices if device.parent_uuid is None]
    known = [total for total in totals if total is not None]
    return sum(known) if len(known) == len(totals) else None


# What a user has: claims, each with its processes, and the processes without a claim; the oldest first.  Root has
# nothing: a process of root is a container or a service, and nobody can say whose.

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
