"""The rule ``quota``: how much one user, or one group, may have at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Literal

from gpuguard.device_state import claim_of, claims_on, grouped, usable_devices, user_label
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.locale.messages import all_of, sentence
from gpuguard.model import Finding, GpuProcess, Subject
from gpuguard.policies.rule import Evidence, Rule, RuleKind, RuleNeeds
from gpuguard.policies.view import RuleView, claim_subject, computing, process_subject
from gpuguard.units import Amount, format_bytes, format_duration, parse_device_amount, parse_duration, parse_percent


@dataclass(frozen=True)
class QuotaRule(Rule):
    """A user has more than their share; the newest claims and processes are the ones in excess, never the oldest.

    devices: so many, or a share of the machine's (rounded down, but at least one), claimed or in use without a claim; a
        MIG instance counts as one.
    claims: so many at a time.
    memory: share of the memory of all GPUs together.
    gpu_hours: GPU time claimed within `within`, like 100h; over it, only the newest claim or process is in excess.
    within: the time before now in which gpu_hours are counted, like 7d.
    shared_by: groups; the members of each have all this together.  Absent: every user has it.
    per: user (all that a user has) or claim (each claim, or process without one, by itself; devices and memory only).

    Root's processes count for no user.

        when: {quota: {devices: 4, gpu_hours: 100h, within: 7d}}
    """

    kind = RuleKind("quota", innocent=False, protects_others=True, newest_first=True)

    devices: Annotated[int | Amount | None, parse_device_amount] = None
    claims: int | None = None
    memory: Annotated[float | None, parse_percent] = None
    gpu_hours: Annotated[float | None, parse_duration] = None
    within: Annotated[float | None, parse_duration] = None
    shared_by: tuple[Annotated[str, "group"], ...] = ()
    per: Literal["user", "claim"] = "user"
    reaches = frozenset({"process", "claim"})

    @property
    def needs(self) -> RuleNeeds:
        """The claims, and the GPU time of its window."""
        return RuleNeeds(claims=True, gpu_seconds=(self.within,) if self.within is not None else ())

    @property
    def rests_on(self) -> Evidence:
        """SENSOR if memory is limited, because its use is read from the driver; otherwise CLOCK."""
        return Evidence.CLOCK if self.memory is None else Evidence.SENSOR

    def __post_init__(self) -> None:
        if self.devices is self.claims is self.memory is self.gpu_hours is None:
            raise InvalidRequest(_("no limit is given: write devices, claims, memory or gpu_hours."))
        if (self.gpu_hours is None) != (self.within is None):
            raise InvalidRequest(_("gpu_hours and within belong together: write both, like 100h within 7d."))
        if any(isinstance(limit, int) and limit < 0 for limit in (self.devices, self.claims)):
            raise InvalidRequest(_("a limit below 0 makes no sense: write 0 for none at all."))
        if self.per == "claim" and not (self.claims is self.gpu_hours is None and not self.shared_by):
            raise InvalidRequest(_("per: claim knows devices and memory only: delete claims, gpu_hours and shared_by."))

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding for each claim, or process without one, that is in excess."""
        of_user = _holdings(view)
        # Name, uids and holdings of everybody who has the quota, the oldest holding first.
        accounts: list[tuple[str, Iterable[int], Sequence[_Holding]]] = []
        if self.per == "claim":
            accounts = [
                (_one_of(holding.subject.kind, user_label(holding.subject.user, uid)), (uid,), (holding,))
                for uid, held in of_user.items()
                for holding in held
            ]
        elif not self.shared_by:
            accounts = [(user_label(held[0].subject.user, uid), (uid,), held) for uid, held in of_user.items()]
        for group in self.shared_by:
            members = [uid for uid, groups in view.groups.items() if group in groups]
            together = (holding for uid in members for holding in of_user.get(uid, ()))
            joint = sorted(together, key=lambda own: (own.since, not own.processes))
            accounts.append((sentence("quota.group", "group {group}", group=group), members, joint))
        found: dict[int, Finding] = {}  # a user in two groups is found once
        for owner, uids, held in accounts:
            reasons = grouped(
                (place, why)
                for count, why in self._excesses(view, owner, uids, held)
                for place in range(len(held) - count, len(held))
            )
            for place, whys in reasons.items():
                holding = held[place]
                finding = Finding("quota", holding.subject, all_of(whys), tuple(holding.processes))
                found.setdefault(id(holding), finding)
        yield from found.values()

    def _excesses(
        self, view: RuleView, owner: str, uids: Iterable[int], held: Sequence[_Holding]
    ) -> Iterator[tuple[int, str]]:
        """Yield (how many of the newest holdings are in excess, why) for each limit that *owner* passes."""
        if self.devices is not None:
            limit, part = self.devices, ""
            if isinstance(limit, Amount):
                present, share = len(usable_devices(view.snapshot)), limit.text
                limit = int(limit.of(present) or 0) or min(1, ceil(limit.value))
                part = sentence("quota.part", "{limit} ({share} of {count})", limit=limit, share=share, count=present)
            if count := _excess(held, _devices, limit):
                yield (
                    count,
                    sentence(
                        "quota.gpus",
                        "{user} has {count} GPUs, the limit is {limit}",
                        user=owner,
                        count=f"{_devices(held):.0f}",
                        limit=part or limit,
                    ),
                )
        if self.claims is not None and (count := _excess(held, _claims, self.claims)):
            yield (
                count,
                sentence(
                    "quota.claims",
                    "{user} has {count} claims, the limit is {limit}",
                    user=owner,
                    count=f"{_claims(held):.0f}",
                    limit=self.claims,
                ),
            )
        sizes = [device.memory_total for device in view.snapshot.devices if device.parent_uuid is None]
        total = 0 if None in sizes else sum(size for size in sizes if size is not None)
        if self.memory is not None and total and (count := _excess(held, _memory, self.memory / 100 * total)):
            yield (
                count,
                sentence(
                    "quota.memory",
                    "{user} uses {size}, {share} of the memory of all GPUs, {limit} is allowed",
                    user=owner,
                    size=format_bytes(_memory(held)),
                    share=f"{100 * _memory(held) / total:.3g}%",
                    limit=f"{self.memory:g}%",
                ),
            )
        if held and (text := self._hours_excess(view, owner, uids)):
            yield 1, text

    def _hours_excess(self, view: RuleView, owner: str, uids: Iterable[int]) -> str | None:
        if self.gpu_hours is not None and self.within is not None:
            known = (view.gpu_seconds.get(uid, {}).get(self.within) for uid in uids)
            used = sum(seconds for seconds in known if seconds is not None)
            if used > self.gpu_hours:
                return sentence(
                    "quota.gpu_hours",
                    "{user} had {hours} GPU-hours in {time}, the limit is {limit}",
                    user=owner,
                    hours=_hours(used),
                    time=format_duration(self.within),
                    limit=_hours(self.gpu_hours),
                )
        return None


def _one_of(kind: str, user: str) -> str:
    if kind == "claim":
        return sentence("quota.one_claim", "one claim of {user}", user=user)
    return sentence("quota.one_process", "one process of {user}", user=user)


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f}" if hours >= 100 else f"{hours:.3g}"


@dataclass
class _Holding:
    """A claim, or a process without one."""

    subject: Subject
    since: tuple[float, float]  # clock of the snapshot; then, for claims first seen together, the time of the record
    devices: set[str] = field(default_factory=set)  # uuids
    memory_used: int = 0  # bytes, as far as they are known
    processes: list[GpuProcess] = field(default_factory=list)


def _holdings(view: RuleView) -> dict[int, list[_Holding]]:
    """Return the holdings of each uid, the oldest first: claims with their processes, and processes without a claim.

    Root has none, because a process of root is a container or a service, and its user is unknown.
    """
    found: dict[object, _Holding] = {}
    boot = view.snapshot.taken_at - view.clock  # unix time at which the clock was 0
    for claim in view.snapshot.claims:
        if claim.alive and claim.uid > 0 and claim.devices:  # a record alone costs its owner nothing
            # A claim of unknown age counts as older than everything, so it is the last to be in excess.  A lock without
            # a record is the first, because another user may have taken it and sent it; it puts nothing else in excess.
            since = float("inf") if claim.pid is None else (claim.since or float("-inf")) - boot
            found[claim.uid, claim.id] = _Holding(
                claim_subject(claim), (since, claim.written or 0.0), set(claim.devices)
            )
    for device in usable_devices(view.snapshot):
        here = claims_on(view.snapshot, device)
        for process in computing(device):
            if not process.uid or process.start_time is None:
                continue
            own = [claim for claim in here if claim.uid == process.uid]
            under = claim_of(process, own, view.seen) if own else None
            # The owner is in the key as well: an id alone could be copied, so that the processes of its claim count as
            # another user's.
            key: object = (under.uid, under.id) if under else (process.pid, process.start_time)
            # A process that began long ago but comes to the GPU now is no older than what others had there before.
            since = view.arrivals.arrived(device.uuid, (process.pid, process.start_time)) or process.start_time
            held = found.setdefault(key, _Holding(process_subject(device, process), (since, 0.0)))
            if held.subject.kind == "process":  # a claim has the devices that it names, maybe as instances of one
                held.devices.add(device.uuid)
            held.memory_used += process.memory_used or 0
            if all(process.pid != other.pid for other in held.processes):
                held.processes.append(process)
    in_order = sorted(found.values(), key=lambda own: (own.since, not own.processes, str(own.subject)))
    return grouped((holding.subject.uid or 0, holding) for holding in in_order)


def _excess(oldest_first: Sequence[_Holding], measure: Callable[[Iterable[_Holding]], float], limit: float) -> int:
    """Return how many of the newest holdings must go so that the rest measures at most *limit*."""
    kept = len(oldest_first)
    while kept and measure(oldest_first[:kept]) > limit:
        kept -= 1
    return len(oldest_first) - kept


def _devices(held: Iterable[_Holding]) -> float:
    return len(frozenset[str]().union(*(holding.devices for holding in held)))


def _claims(held: Iterable[_Holding]) -> float:
    return sum(holding.subject.kind == "claim" for holding in held)


def _memory(held: Iterable[_Holding]) -> float:
    return sum(holding.memory_used for holding in held)
