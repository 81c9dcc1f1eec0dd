"""How much one user, or one group, may have at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding
from gpuguard.policies.policy import Policy
from gpuguard.policies.subjects import Holding, called, claims, devices, excess, holdings, memory
from gpuguard.policies.view import RuleView
from gpuguard.units import format_bytes, parse_duration, parse_percent


@dataclass(frozen=True)
class QuotaRule:
    """A user has more than his share; the newest claims and processes are the ones in excess, never the oldest.

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
            yield called(held[0].subject.user, uid), frozenset([uid]), held
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
