"""Snapshot -> findings -> verdicts: what the policies want done now.  Pure but for the Memory that it is given.

Everything that a policy says must hold together, sample after sample, for the whole of `for`: its rules, its scope,
its hours, the load, the number of devices.  Whatever ends that ends the ladder, and the time starts again from nothing.
Does not act: see actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import replace as replace_fields
from functools import partial

from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding, Snapshot, Subject, Verdict
from gpuguard.policies.breaker import Due, restrained
from gpuguard.policies.escalation import EngineMemory, EscalationState, climb, next_step, pass_over
from gpuguard.policies.escalation import EngineMemory as Memory
from gpuguard.policies.policy import DESTRUCTIVE as DESTRUCTIVE
from gpuguard.policies.policy import KILL_AFTER as KILL_AFTER
from gpuguard.policies.policy import Judgement as Judgement
from gpuguard.policies.policy import Note as Note
from gpuguard.policies.policy import Policy as Policy
from gpuguard.policies.policy import Scope as Scope
from gpuguard.policies.policy import Step as Step
from gpuguard.policies.policy import meaningless
from gpuguard.policies.rules import findings_of
from gpuguard.policies.scope import on_enough_devices, out_of_season, unprotected
from gpuguard.policies.series import windows_of
from gpuguard.policies.view import RuleView, SampleIndex, SubjectIdentity, identity_of, index_sample, key_of, reach_of

Judged = tuple[list[Due], list[Note]]  # by one policy: the steps whose time has come, and what is not acted on
Isolate = Callable[[str, Callable[[], Judged]], "Judged | None"]


def evaluate(
    view: RuleView | Snapshot,
    policies: Sequence[Policy],
    memory: Memory,
    *,
    interval: float | None = None,
    zone: float = 0.0,
    isolate: Isolate = lambda policy, judge: judge(),
) -> Judgement:
    """Judge one sample.

    Args:
        view: the sample and what is known about its people; its `past` is replaced by what *memory* has recorded.
        policies: with unique names.
        memory: of the samples before; changed in place.
        interval: seconds between samples; the median of the last distances when not given.
        zone: seconds east of UTC, for hours and days.
        isolate: calls the judgement by the policy of that name; None from it: nobody knows, and its times start anew.

    Returns:
        The verdicts that are due now, each once, and notes on what was not acted on.

    Raises:
        InvalidRequest: two policies have the same name.
    """
    view = RuleView(view) if isinstance(view, Snapshot) else view
    names = [policy.name for policy in policies]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"two policies have the same name, of {', '.join(sorted(names))}: give each its own.")
    notes = _pin(policies, memory)
    if view.clock == memory.rhythm.clock:
        return Judgement((), (*notes, Note("resampling", "the sample is the same as before: it shows nothing new")))
    notes += _resample(view, policies, memory, interval)
    sight = index_sample(replace_fields(view, past=memory.past), zone)
    due: list[Due] = []
    for policy in policies:
        judged = isolate(policy.name, partial(_judged, policy, sight, memory))
        if judged is None:
            memory.standings.pop(policy.name, None)
            memory.spent.pop(policy.name, None)
            memory.found.pop(policy.name, None)
        else:
            due += judged[0]
            notes += judged[1]
    bundles = _bundled(due)
    taken, against = restrained([bundle[0] for bundle in bundles.values()], sight, memory)
    notes += against
    verdicts = []
    for one in taken:
        bundle = bundles[_victim(one)]
        verdicts.append(_verdict(one, len(bundle) - 1))
        for member in bundle:
            climb(member.standing, member.policy, memory, member.identity, view.clock)
    memory.sight = sight
    return Judgement(tuple(verdicts), tuple(sorted(notes, key=_note_order)))


def still_holds(policy: Policy, subject: Subject, view: RuleView, memory: Memory, *, zone: float = 0.0) -> bool:
    """Whether everything that *policy* says is so for *subject* in this view, which need not be a sample of its own."""
    found, _ = _condition(policy, index_sample(replace_fields(view, past=memory.past), zone), memory)
    return any(identity_of(finding.subject) == identity_of(subject) for finding in found)


def _pin(policies: Sequence[Policy], memory: Memory) -> list[Note]:
    """Cancel the ladders of policies that are not what they were at the last sample."""
    notes = []
    now = {policy.name: policy for policy in policies}
    for name, before in memory.pinned.items():
        if now.get(name) is before or now.get(name) == before:
            continue
        what = "was changed" if name in now else "is gone"
        memory.spent.pop(name, None)
        memory.found.pop(name, None)
        for standing in memory.standings.pop(name, {}).values():
            if standing.done:
                notes.append(Note("cancelled", f"the policy {what}, its steps are cancelled", name, standing.subject))
    memory.pinned = now
    return notes


def _resample(view: RuleView, policies: Sequence[Policy], memory: Memory, interval: float | None) -> list[Note]:
    """Take note of the time and of the values that rules want to look back on."""
    notes = []
    rhythm, clock = memory.rhythm, view.clock
    largest = rhythm.largest(interval)
    if rhythm.clock is not None and not 0 < clock - rhythm.clock <= largest:
        notes.append(Note("resampling", f"{clock - rhythm.clock:.1f}s since the last sample: all durations start anew"))
        memory.start_anew(clock)
    rhythm.beat(clock)
    memory.forget_what_is_over(clock)
    memory.past.record(view.snapshot, windows_of(rule for policy in policies for rule in policy.rules), largest)
    return notes


def _judged(policy: Policy, sight: SampleIndex, memory: Memory) -> Judged:
    found, against = _condition(policy, sight, memory)
    notes = [*against]
    return _held_long_enough(policy, found, against, sight, memory, notes), notes


def _condition(policy: Policy, sight: SampleIndex, memory: Memory) -> tuple[Sequence[Finding], list[Note]]:
    """For whom everything that the policy says holds in this sample, and who is left out for which reason."""
    findings = findings_of(policy, sight)
    against = out_of_season(policy, sight) if findings else None
    if against is not None:
        return (), [against]
    left, notes = unprotected(findings, policy, sight, memory.kept)
    enough, more = on_enough_devices(left, policy, sight)
    return enough, [*notes, *more]


def _held_long_enough(
    policy: Policy,
    found: Iterable[Finding],
    against: Sequence[Note],
    sight: SampleIndex,
    memory: Memory,
    notes: list[Note],
) -> list[Due]:
    """Count this sample for those in *found*, cancel what ended, and say which steps are due."""
    clock, due = sight.view.clock, []
    standings = memory.standings.setdefault(policy.name, {})
    current = _one_each(found)
    memory.found[policy.name] = frozenset(current)
    for identity in [identity for identity in standings if identity not in current]:
        notes += _cancel(policy, standings.pop(identity), against, sight, memory)
    if spent := memory.spent.pop(policy.name, None):
        left = {name: one for name, one in spent.items() if name in current and (policy.name, name) in memory.cooling}
        memory.spent.update({policy.name: left} if left else {})
    for identity, finding in current.items():
        if memory.cooling and (policy.name, identity) in memory.cooling:
            notes.append(Note("cooldown", "the last step is not long ago", policy.name, finding.subject))
            continue
        standing = standings.get(identity)
        if standing is None:
            standing = standings[identity] = EscalationState(finding.subject, clock)
        standing.samples += 1
        standing.processes = finding.processes
        step = next_step(standing, policy, clock)
        if step is None:
            continue
        standing.reach = reach_of(finding.subject, finding.processes, sight)
        nobody = meaningless(step[0], finding)
        if nobody and not any(map(sight.blindness, standing.reach)):
            notes.append(Note("nobody", nobody, policy.name, finding.subject))
            pass_over(standing, policy, memory, identity, clock)
        else:
            due.append(Due(policy, identity, finding, standing, *step))
    return due


def _one_each(findings: Iterable[Finding]) -> dict[SubjectIdentity, Finding]:
    """One finding per subject: what several rules have against the same one is said together."""
    current: dict[SubjectIdentity, Finding] = {}
    for finding in findings:
        identity = identity_of(finding.subject)
        before = current.get(identity)
        if before is not None:
            processes = (*before.processes, *(each for each in finding.processes if each not in before.processes))
            finding = replace(before, why=f"{before.why}; {finding.why}", processes=processes)
        current[identity] = finding
    return current


def _bundled(due: Sequence[Due]) -> dict[object, list[Due]]:
    """Steps that mean the same: a process on eight devices is warned once.  The oldest speaks for the others."""
    bundles: dict[object, list[Due]] = {}
    for one in sorted(due, key=lambda one: one.order):
        bundles.setdefault(_victim(one), []).append(one)
    return bundles


def _victim(due: Due) -> object:
    subject = due.finding.subject
    whom = (subject.pid, subject.start_time) if subject.kind == "process" else due.identity
    return (due.policy.name, due.standing.done, whom)


def _cancel(
    policy: Policy, ended: EscalationState, against: Sequence[Note], sight: SampleIndex, memory: Memory
) -> list[Note]:
    """Why a condition that held a sample ago does not hold now."""
    if any(note.subject in (None, ended.subject) for note in against):
        return []  # that is said already
    gap = _gap(ended, sight, memory.sight) if memory.sight else None
    if gap is not None:
        return [Note("gap", f"{gap}: the time starts anew", policy.name, ended.subject)]
    if ended.done:
        return [Note("cleared", "the condition holds no more, its steps are cancelled", policy.name, ended.subject)]
    return []


def _gap(ended: EscalationState, sight: SampleIndex, before: SampleIndex) -> str | None:
    """What could not be read of a subject in this sample, though it could a sample ago."""
    reach = reach_of(ended.subject, ended.processes, before)
    for uuid in reach:
        blind = sight.blindness(uuid)
        if blind is not None:
            return blind
    for place in (*reach, None):
        for field, reason in sight.gaps.get(place, {}).items():
            if _was_known(place, field, before):
                return f"{field} could not be read, {reason}"
    return None


def _was_known(place: str | None, field: str, before: SampleIndex) -> bool:
    # Some fields are only asked for when somebody wants to see them, as a scrape does: before, they were no gap either.
    device = before.devices.get(place) if place else None
    return field not in before.gaps.get(place, {}) and getattr(device, field, "a group of fields") is not None


def _verdict(due: Due, further: int) -> Verdict:
    policy, place, finding = due.policy, due.standing.done, due.finding
    if further:
        finding = replace(finding, why=f"{finding.why} (and the like on {further} more devices)")
    after = policy.steps[place + 1] if place + 1 < len(policy.steps) else None
    return Verdict(
        policy=policy.name,
        finding=finding,
        action=due.step.action,
        step=place,
        since=due.standing.since,
        enforce=policy.enforce,
        options=due.step.options,
        next_action=after.action if after else None,
        next_after=after.after if after else None,
    )


def _note_order(note: Note) -> tuple[str, str, str, str]:
    return (note.policy or "", note.kind, key_of(note.subject) if note.subject else "", note.text)


# What policies have against whom now, and which step comes next when: for people who ask.  Changes nothing.


@dataclass(frozen=True)
class PolicyStatus:
    """One condition that holds for somebody.

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
    policies: Sequence[Policy],
    memory: EngineMemory,
    put_off: Mapping[tuple[str, SubjectIdentity], tuple[int, float]] | None = None,
) -> tuple[PolicyStatus, ...]:
    """Everything that stands, the oldest first.

    Args:
        policies: that were judged by.
        memory: of the engine.
        put_off: (policy, identity) -> the place of a step whose time has come, and the clock until which a check has
            put it off.
    """
    found = []
    for policy in policies:
        name, steps = policy.name, policy.steps
        for identity, one in (*memory.standings.get(name, {}).items(), *memory.spent.get(name, {}).items()):
            done, due = (put_off or {}).get((name, identity)) or (one.done, _due(policy, one))
            last = steps[done - 1].action if done else None
            following = steps[done % len(steps)].action if steps else None
            found.append(PolicyStatus(name, one.subject, one.since, last, following, due, policy.enforce))
    return tuple(sorted(found, key=lambda one: one.since))


def _due(policy: Policy, standing: EscalationState) -> float | None:
    if not policy.steps:
        return None
    if standing.done == len(policy.steps):
        return standing.stepped_at + policy.cooldown + policy.hold + policy.steps[0].after
    step = policy.steps[standing.done]
    due = (standing.stepped_at if standing.done else standing.since + policy.hold) + step.after
    if step.action == "kill":
        return None if standing.terminated_at is None else max(due, standing.terminated_at + KILL_AFTER)
    return due
