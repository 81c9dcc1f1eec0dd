"""When a policy applies at all: hours and days, the load of the node, and on how many devices of one user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpuguard.model import Finding
from gpuguard.policies.policy import Note, Policy
from gpuguard.policies.sight import Sight, reach_of

DAY = 86400
THURSDAY = 3  # 1 January 1970


def out_of_season(policy: Policy, sight: Sight) -> Note | None:
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


def claimed_share(sight: Sight) -> float | None:
    """Percent of the devices that are claimed; a device that is divided counts as its parts.  None without devices."""
    divided = {device.parent_uuid for device in sight.devices.values()}
    whole = [uuid for uuid in sight.devices if uuid not in divided]
    if not whole:
        return None
    return 100 * sum(uuid in sight.claims_on for uuid in whole) / len(whole)


def on_enough_devices(
    findings: Sequence[Finding], policy: Policy, sight: Sight
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


def _places(finding: Finding, sight: Sight) -> dict[int, set[str]]:
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
