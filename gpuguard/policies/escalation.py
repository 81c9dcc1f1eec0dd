"""Which step of a policy comes next for whom, what is remembered for that, and how many may be taken at once.

A process takes seconds to die and its memory longer to come back (up to 50 s were seen); a sample in between still
shows the device too full, and the next process would be hit.  So a policy that matches too many is stopped by its
breaker, and there is one destructive step per device until its effect is seen.
The memory is never written to disk: after a restart every escalation begins at its first step.  Does not judge: see
engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuguard.model import Device, Finding, GpuProcess, Subject
from gpuguard.policies.policy import COUNTED, DESTRUCTIVE, KILL_AFTER, Note, Policy, Step
from gpuguard.policies.view import Past, ProcessIdentity, SampleIndex, SampleRhythm, SubjectIdentity

FEWEST_SAMPLES = 2  # a condition that was seen once never fires, however short `for` is
EFFECT_SECONDS = 50.0
MEMORY_SLACK = 512 * 2**20  # bytes by which others may grow meanwhile


@dataclass
class EscalationState:
    """A condition that holds for a subject, sample after sample, and how many steps that has led to.

    It stays after the last step, until the condition or the cooldown ends.
    """

    subject: Subject
    since: float  # clock
    processes: tuple[GpuProcess, ...] = ()  # that were meant, as of the last sample
    reach: tuple[str, ...] = ()  # uuids, as of the sample in which a step was due
    samples: int = 0
    done: int = 0  # steps
    stepped_at: float = 0.0  # clock of the last step
    terminated_at: float | None = None


@dataclass
class Effect:
    """A destructive step whose effect on one device is awaited."""

    policy: str
    subject: SubjectIdentity
    at: float  # clock
    victims: frozenset[tuple[int, float]]
    claim: str | None
    memory_below: float | None  # bytes in use when the victims' memory is back; None: not known


@dataclass
class EngineMemory:
    """Everything that evaluate() remembers; one per watchdog, and used by one thread at a time."""

    past: Past = field(default_factory=Past)
    rhythm: SampleRhythm = field(default_factory=SampleRhythm)
    policies: dict[str, Policy] = field(default_factory=dict)
    states: dict[str, dict[SubjectIdentity, EscalationState]] = field(default_factory=dict)  # by policy
    cooling: dict[tuple[str, SubjectIdentity], float] = field(default_factory=dict)  # until which clock
    effects: dict[tuple[bool, str], Effect] = field(default_factory=dict)  # by (enforced, uuid)
    kept: dict[tuple[str, int | str], float] = field(default_factory=dict)  # until which clock
    index: SampleIndex | None = None  # of the last sample

    def start_anew(self, clock: float) -> None:
        """Drop what was seen before a pause: nobody knows what happened in it."""
        self.past.clear()
        self.states.clear()
        if self.rhythm.clock is not None and clock < self.rhythm.clock:
            # Another boot: times of the one before say nothing.  Marks stay, since they only protect.
            self.cooling.clear()
            self.effects.clear()


def next_step(state: EscalationState, policy: Policy, clock: float) -> tuple[Step, float] | None:
    """The step of the escalation that is due now, and since when it is; None when none is."""
    if state.done >= len(policy.steps) or state.samples < FEWEST_SAMPLES or clock - state.since < policy.hold:
        return None
    due = _due(policy, state)
    return None if due is None or clock < due else (policy.steps[state.done], due)


def _due(policy: Policy, state: EscalationState) -> float | None:
    """The clock at which the next step comes while the condition holds; None for a kill before a terminate."""
    step = policy.steps[state.done]
    due = (state.stepped_at if state.done else state.since + policy.hold) + step.after
    if step.action != "kill":
        return due
    # The policy was checked for this when it was made; a SIGKILL too early cannot be taken back.
    return None if state.terminated_at is None else max(due, state.terminated_at + KILL_AFTER)


@dataclass(frozen=True)
class DueStep:
    """A step whose time has come."""

    policy: Policy
    identity: SubjectIdentity
    finding: Finding
    state: EscalationState
    step: Step
    since: float  # clock

    @property
    def order(self) -> tuple[float, float, str, str]:
        """The longest wait comes first; the rest is there so that no order of policies or rules matters."""
        return (self.since, self.state.since, self.policy.name, str(self.identity))


def advance(due: DueStep, memory: EngineMemory, clock: float, *, skipped: bool = False) -> None:
    """The step that was due is asked for, or *skipped* because it means nobody here.

    The last one ends the escalation and begins its cooldown.  A kill after a terminate of nobody is skipped, too.
    """
    state, policy = due.state, due.policy
    if due.step.action == "terminate" and not skipped:
        state.terminated_at = clock
    state.done += 1
    if skipped and state.terminated_at is None:
        while state.done < len(policy.steps) and policy.steps[state.done].action == "kill":
            state.done += 1
    state.stepped_at = clock
    if state.done == len(policy.steps):
        memory.cooling[policy.name, due.identity] = clock + policy.cooldown


def allowed_steps(due: Sequence[DueStep], index: SampleIndex, memory: EngineMemory) -> tuple[list[DueStep], list[Note]]:
    """Those steps of *due*, the oldest breach first, that may be taken now, and why the others may not."""
    clock = index.view.clock
    for key, effect in list(memory.effects.items()):
        if not 0 <= clock - effect.at < EFFECT_SECONDS or _is_seen(effect, key[1], index):
            del memory.effects[key]
    stopped, notes = _breaker(due)
    allowed = []
    for step in due:
        if (step.policy.name, step.identity) in stopped:
            continue
        if step.step.action in DESTRUCTIVE:
            against = _obstacle(step, index, memory)
            if against is not None:
                notes.append(Note(*against, step.policy.name, step.finding.subject))
                continue
            # A rehearsed step has no effect to wait for, but it must delay what a real one would delay; and it must
            # not delay the steps of policies that are enforced.  Hence two sets of effects.
            victims, claim = victims_of(step.finding), step.finding.subject.claim
            for uuid in step.state.reach:
                below = _memory_without(index.devices[uuid], victims)
                effect = Effect(step.policy.name, step.identity, clock, victims, claim, below)
                memory.effects[step.policy.enforce, uuid] = effect
        allowed.append(step)
    return allowed, notes


def _obstacle(due: DueStep, index: SampleIndex, memory: EngineMemory) -> tuple[str, str] | None:
    for uuid in due.state.reach:
        blind = index.blindness(uuid)
        if blind is not None:
            return "gap", blind
        effect = memory.effects.get((due.policy.enforce, uuid))
        if effect is not None and (effect.policy, effect.subject) != (due.policy.name, due.identity):
            return "waiting", f"a step of {effect.policy} on the same device has not shown its effect yet"
    return None


def _breaker(due: Iterable[DueStep]) -> tuple[set[tuple[str, SubjectIdentity]], list[Note]]:
    """The steps that are not taken because their policy would hit too many, and a note on each such policy."""
    by_policy: dict[str, list[DueStep]] = {}
    for step in due:
        if step.step.action in COUNTED:
            by_policy.setdefault(step.policy.name, []).append(step)
    stopped, notes = set(), []
    for name, steps in by_policy.items():
        policy = steps[0].policy
        if not _are_too_many(steps, policy):
            continue
        allowed: list[DueStep] = []
        for step in steps:
            if policy.some_beyond and not _are_too_many([*allowed, step], policy):
                allowed.append(step)
            else:
                stopped.add((name, step.identity))
        users, processes = _hit_by(steps)
        text = (
            f"{len(users)} users with {len(processes)} processes would be acted on at once, more than"
            f" {policy.at_most_users} users or {policy.at_most_processes} processes:"
            f" {f'only {len(allowed)} are, the oldest breach first' if allowed else 'nobody is'}"
        )
        alone = _alone_too_many(steps, policy)
        if alone and not policy.some_beyond:
            text += (
                f".  {alone.user or f'uid {alone.uid}'} alone has more than that.  `at_most: {{processes: "
                f"{len(processes)}}}` lets all through, `at_most: {{beyond: some}}` hits as many as allowed"
            )
        notes.append(Note("breaker", text, name, alone))
    return stopped, notes


def _are_too_many(due: Iterable[DueStep], policy: Policy) -> bool:
    users, processes = _hit_by(due)
    return len(users) > policy.at_most_users or len(processes) > policy.at_most_processes


def _hit_by(due: Iterable[DueStep]) -> tuple[set[int], set[ProcessIdentity]]:
    """The users and the processes that these steps would hit."""
    users, processes = set[int | None](), set[ProcessIdentity]()
    for step in due:
        processes |= victims_of(step.finding)
        users |= {step.finding.subject.uid, *(process.uid for process in step.finding.processes)}
    return {uid for uid in users if uid is not None}, processes


def _alone_too_many(due: Iterable[DueStep], policy: Policy) -> Subject | None:
    """The user whose processes alone are more than *policy* allows."""
    of_user: dict[tuple[int | None, str | None], set[object]] = {}
    for process in (process for step in due for process in step.finding.processes):
        of_user.setdefault((process.uid, process.user), set()).add((process.pid, process.start_time))
    for (uid, user), processes in sorted(of_user.items(), key=lambda item: len(item[1]), reverse=True):
        if len(processes) > policy.at_most_processes:
            return Subject("user", uid=uid, user=user)
    return None


def _is_seen(effect: Effect, uuid: str, index: SampleIndex) -> bool:
    device = index.devices.get(uuid)
    if device is None or index.blindness(uuid) is not None:
        return False
    if not effect.victims:
        return effect.claim is not None and not any(claim == effect.claim for _, claim in index.claims)
    dead = {identity[0] for identity in effect.victims}
    starts = {(process.pid, process.start_time) for process in device.processes or () if process.pid in dead}
    if any(start is None or (pid, start) in effect.victims for pid, start in starts):
        return False
    return effect.memory_below is not None and (device.memory_used or 0) <= effect.memory_below


def _memory_without(device: Device, victims: frozenset[ProcessIdentity]) -> float | None:
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


def victims_of(finding: Finding) -> frozenset[ProcessIdentity]:
    """The processes that a step on *finding* hits."""
    known = ((process.pid, process.start_time) for process in finding.processes)
    return frozenset((pid, start_time) for pid, start_time in known if start_time is not None)


@dataclass(frozen=True)
class PolicyStatus:
    """One condition that holds for a subject.

    Args:
        policy: its name.
        subject: for whom.
        since: clock since when.
        last: the last step that was taken, None before the first.
        next: the one that comes if nothing changes; after the last one the first, when its cooldown is over.
        due: clock at which that is, if every sample until then finds the same.
        enforce: the policy's own switch.
    """

    policy: str
    subject: Subject
    since: float
    last: str | None
    next: str | None
    due: float | None
    enforce: bool


def policy_status(
    policies: Sequence[Policy], memory: EngineMemory, put_off: Mapping[tuple[str, SubjectIdentity], tuple[int, float]]
) -> tuple[PolicyStatus, ...]:
    """Every condition that holds, the oldest first.

    Args:
        policies: that were judged by.
        memory: of the engine.
        put_off: (policy, identity) -> the place of a step whose time has come, and the clock until which a check has
            put it off.
    """
    found = []
    for policy in policies:
        name, steps = policy.name, policy.steps
        for identity, state in memory.states.get(name, {}).items():
            done, due = state.done, None
            if (name, identity) in put_off:
                done, due = put_off[name, identity]
            elif state.done < len(steps):
                due = _due(policy, state)
            elif steps:
                due = state.stepped_at + policy.cooldown + policy.hold + steps[0].after
            last = steps[done - 1].action if done else None
            following = steps[done % len(steps)].action if steps else None
            found.append(PolicyStatus(name, state.subject, state.since, last, following, due, policy.enforce))
    return tuple(sorted(found, key=lambda status: status.since))
