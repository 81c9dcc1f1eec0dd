"""Not too many at once: the breaker of each policy, and one destructive step per device until its effect is seen.

A process takes seconds to die and its memory longer to come back (up to 50 s were seen); whoever looks again in
between still finds the device too full, and would take the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuguard.model import Device, Finding, Subject
from gpuguard.policies.escalation import Effect, EngineMemory, EscalationState
from gpuguard.policies.policy import COUNTED, DESTRUCTIVE, Note, Policy, Step
from gpuguard.policies.view import Identity, SampleIndex, SubjectIdentity

EFFECT_SECONDS = 50.0
MEMORY_SLACK = 512 * 2**20  # bytes by which others may grow meanwhile


@dataclass(frozen=True)
class Due:
    """A step whose time has come."""

    policy: Policy
    identity: SubjectIdentity
    finding: Finding
    standing: EscalationState
    step: Step
    since: float  # clock

    @property
    def order(self) -> tuple[float, float, str, str]:
        """Whoever waits longest comes first; the rest is there so that no order of policies or rules matters."""
        return (self.since, self.standing.since, self.policy.name, str(self.identity))


def restrained(due: Sequence[Due], sight: SampleIndex, memory: EngineMemory) -> tuple[list[Due], list[Note]]:
    """Those steps that may be taken now, in their order, and why the others may not."""
    _forget_seen_effects(sight, memory)
    stopped, notes = _breaker(due)
    allowed = []
    for one in sorted(due, key=lambda one: one.order):
        if (one.policy.name, one.identity) in stopped:
            continue
        if one.step.action not in DESTRUCTIVE:
            allowed.append(one)
        else:
            against = _obstacle(one, sight, memory)
            if against is None:
                _await_effect(one, sight, memory)
                allowed.append(one)
            else:
                notes.append(Note(*against, one.policy.name, one.finding.subject))
    return allowed, notes


def _breaker(due: Iterable[Due]) -> tuple[set[tuple[str, SubjectIdentity]], list[Note]]:
    """The steps that are not taken because their policy would hit too many, and a note on each such policy."""
    by_policy: dict[str, list[Due]] = {}
    for one in due:
        if one.step.action in COUNTED:
            by_policy.setdefault(one.policy.name, []).append(one)
    stopped, notes = set(), []
    for name, all_due in by_policy.items():
        policy = all_due[0].policy
        users, processes = _hit_by(all_due)
        if not _is_too_many(users, processes, policy):
            continue
        allowed: list[Due] = []
        for one in sorted(all_due, key=lambda one: one.order) if policy.some_beyond else ():
            if not _is_too_many(*_hit_by([*allowed, one]), policy):
                allowed.append(one)
        stopped |= {(name, one.identity) for one in all_due} - {(name, one.identity) for one in allowed}
        text = (
            f"{len(users)} users with {len(processes)} processes would be acted on at once, more than"
            f" {policy.at_most_users} users or {policy.at_most_processes} processes:"
            f" {f'only {len(allowed)} are, the oldest breach first' if allowed else 'nobody is'}"
        )
        alone = _alone_too_many(all_due, policy)
        if alone and not policy.some_beyond:
            text += (
                f".  {alone.user or f'uid {alone.uid}'} alone has more than that.  `at_most: {{processes: "
                f"{len(processes)}}}` lets all through, `at_most: {{beyond: some}}` hits as many as allowed"
            )
        notes.append(Note("breaker", text, name, alone))
    return stopped, notes


def _hit_by(due: Iterable[Due]) -> tuple[set[int], set[Identity]]:
    """The users and the processes that these steps would hit."""
    users, processes = set(), set[Identity]()
    for one in due:
        processes |= _victims(one.finding)
        users |= {process.uid for process in one.finding.processes} | {one.finding.subject.uid}
    return {uid for uid in users if uid is not None}, processes


def _is_too_many(users: set[int], processes: set[Identity], policy: Policy) -> bool:
    return len(users) > policy.at_most_users or len(processes) > policy.at_most_processes


def _alone_too_many(due: Iterable[Due], policy: Policy) -> Subject | None:
    """The user whose processes alone are more than *policy* allows."""
    of_user: dict[int, set[Identity]] = {}
    names: dict[int, str | None] = {}
    for process in (process for one in due for process in one.finding.processes):
        if process.uid is not None and process.start_time is not None:
            of_user.setdefault(process.uid, set()).add((process.pid, process.start_time))
            names[process.uid] = process.user
    most = max(of_user, key=lambda uid: (len(of_user[uid]), uid), default=None)
    if most is None or len(of_user[most]) <= policy.at_most_processes:
        return None
    return Subject("user", uid=most, user=names[most])


def _obstacle(one: Due, sight: SampleIndex, memory: EngineMemory) -> tuple[str, str] | None:
    for uuid in one.standing.reach:
        blind = sight.blindness(uuid)
        if blind is not None:
            return "gap", blind
        effect = memory.effects.get((one.policy.enforce, uuid))
        if effect is not None and (effect.policy, effect.subject) != (one.policy.name, one.identity):
            return "waiting", f"a step of {effect.policy} on the same device has not shown its effect yet"
    return None


def _await_effect(one: Due, sight: SampleIndex, memory: EngineMemory) -> None:
    # A rehearsed step has no effect to wait for, but it must delay what a real one would delay; and it must not
    # delay the steps of policies that are enforced.  Hence two sets of effects.
    victims = _victims(one.finding)
    for uuid in one.standing.reach:
        below = _memory_without(sight.devices[uuid], victims)
        effect = Effect(one.policy.name, one.identity, sight.view.clock, victims, one.finding.subject.claim, below)
        memory.effects[one.policy.enforce, uuid] = effect


def _forget_seen_effects(sight: SampleIndex, memory: EngineMemory) -> None:
    for place, effect in list(memory.effects.items()):
        if not 0 <= sight.view.clock - effect.at < EFFECT_SECONDS or _is_seen(effect, place[1], sight):
            del memory.effects[place]


def _is_seen(effect: Effect, uuid: str, sight: SampleIndex) -> bool:
    device = sight.devices.get(uuid)
    if device is None or sight.blindness(uuid) is not None:
        return False
    if not effect.victims:
        return effect.claim is not None and not any(claim == effect.claim for _, claim in sight.claims)
    dead = {identity[0] for identity in effect.victims}
    starts = {(process.pid, process.start_time) for process in device.processes or () if process.pid in dead}
    if any(start is None or (pid, start) in effect.victims for pid, start in starts):
        return False
    return effect.memory_below is not None and (device.memory_used or 0) <= effect.memory_below


def _memory_without(device: Device, victims: frozenset[Identity]) -> float | None:
    """Bytes in use on *device* once the victims have given theirs back; None when it cannot be known."""
    if device.memory_used is None:
        return None
    left = float(device.memory_used + MEMORY_SLACK)
    for process in device.processes or ():
        if (process.pid, process.start_time) in victims:
            if process.memory_used is None:
                return None
            left -= process.memory_used
    return left


def _victims(finding: Finding) -> frozenset[Identity]:
    return frozenset((each.pid, each.start_time) for each in finding.processes if each.start_time is not None)
