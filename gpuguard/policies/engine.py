"""Snapshot -> findings -> verdicts: what the policies want done now.  Pure but for the EngineMemory that it is given.

Everything that a policy says must hold together, sample after sample, for the whole of `for`: its rules, its scope,
its hours, the load, the number of devices.  Whatever ends that ends the escalation, and the time starts again from
nothing.  Does not act: see enforcement.actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding, GpuProcess, Snapshot, Subject, Verdict
from gpuguard.policies.escalation import DueStep, EngineMemory, EscalationState, advance, allowed_steps, next_step
from gpuguard.policies.policy import (
    Judgement,
    Note,
    Policy,
    drop_protected,
    on_enough_devices,
    outside_schedule,
    why_inapplicable,
)
from gpuguard.policies.view import (
    RuleView,
    SampleIndex,
    SubjectIdentity,
    identity_of,
    index_sample,
    key_of,
    reach_of,
    windows_of,
)

Judged = tuple[list[DueStep], list[Note]]  # by one policy: the steps whose time has come, and what is not acted on
Isolate = Callable[[str, Callable[[], Judged]], "Judged | None"]


def evaluate(
    view: RuleView | Snapshot,
    policies: Sequence[Policy],
    memory: EngineMemory,
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
    index = index_sample(replace(view, past=memory.past), zone)
    due: list[DueStep] = []
    for policy in policies:
        judged = isolate(policy.name, partial(_judge, policy, index, memory))
        if judged is None:
            memory.states.pop(policy.name, None)
        else:
            due += judged[0]
            notes += judged[1]
    # Steps that mean the same: a process on eight devices is warned once.  The oldest speaks for the others.
    bundles: dict[object, list[DueStep]] = {}
    for step in sorted(due, key=lambda step: step.order):
        bundles.setdefault(_victim(step), []).append(step)
    taken, against = allowed_steps([bundle[0] for bundle in bundles.values()], index, memory)
    notes += against
    verdicts = []
    for step in taken:
        bundle = bundles[_victim(step)]
        verdicts.append(_verdict(step, len(bundle) - 1))
        for member in bundle:
            advance(member, memory, view.clock)
    memory.index = index
    notes.sort(key=lambda note: (note.policy or "", note.kind, key_of(note.subject) if note.subject else "", note.text))
    return Judgement(tuple(verdicts), tuple(notes))


def still_holds(policy: Policy, subject: Subject, view: RuleView, memory: EngineMemory, *, zone: float = 0.0) -> bool:
    """Whether everything that *policy* says is so for *subject* in this view, which need not be a sample of its own."""
    found, _ = _condition(policy, index_sample(replace(view, past=memory.past), zone), memory)
    return any(identity_of(finding.subject) == identity_of(subject) for finding in found)


def _pin(policies: Sequence[Policy], memory: EngineMemory) -> list[Note]:
    """Cancel the escalations of policies that are not what they were at the last sample."""
    notes = []
    now = {policy.name: policy for policy in policies}
    for name, before in memory.policies.items():
        if now.get(name) is before or now.get(name) == before:
            continue
        what = "was changed" if name in now else "is gone"
        for state in memory.states.pop(name, {}).values():
            if 0 < state.done < len(before.steps):
                notes.append(Note("cancelled", f"the policy {what}, its steps are cancelled", name, state.subject))
    memory.policies = now
    return notes


def _resample(view: RuleView, policies: Sequence[Policy], memory: EngineMemory, interval: float | None) -> list[Note]:
    """Take note of the time and of the values that rules want to look back on."""
    notes = []
    rhythm, clock = memory.rhythm, view.clock
    largest = rhythm.largest(interval)
    if rhythm.clock is not None and not 0 < clock - rhythm.clock <= largest:
        notes.append(Note("resampling", f"{clock - rhythm.clock:.1f}s since the last sample: all durations start anew"))
        memory.start_anew(clock)
    rhythm.beat(clock)
    memory.kept = {mark: until for mark, until in memory.kept.items() if until > clock}
    memory.cooling = {name: until for name, until in memory.cooling.items() if until > clock}
    memory.past.record(view.snapshot, windows_of(rule for policy in policies for rule in policy.rules), largest)
    return notes


def _condition(policy: Policy, index: SampleIndex, memory: EngineMemory) -> tuple[Sequence[Finding], list[Note]]:
    """For whom everything that the policy says holds in this sample, and who is left out for which reason."""
    findings = findings_of(policy, index)
    against = outside_schedule(policy, index) if findings else None
    if against is not None:
        return (), [against]
    left, notes = drop_protected(findings, policy, index, memory.kept)
    enough, more = on_enough_devices(left, policy, index)
    return enough, [*notes, *more]


def _judge(policy: Policy, index: SampleIndex, memory: EngineMemory) -> Judged:
    """Count this sample for those in whom the policy finds its condition, cancel what ended, and see what is due."""
    findings, notes = _condition(policy, index, memory)
    current: dict[SubjectIdentity, Finding] = {}  # what several rules have against the same subject is said together
    for finding in findings:
        before = current.get(identity_of(finding.subject))
        if before is not None:
            others = (process for process in finding.processes if process not in before.processes)
            why = f"{before.why}; {finding.why}"
            finding = replace(before, why=why, processes=(*before.processes, *others))
        current[identity_of(finding.subject)] = finding

    states = memory.states.setdefault(policy.name, {})
    left_out = {note.subject for note in notes}  # of whom it is said already why nothing is found
    for identity in [identity for identity in states if identity not in current]:
        ended = states.pop(identity)
        if left_out.isdisjoint((None, ended.subject)) and not _is_over(ended, policy):
            notes += _cancelled(policy, ended, index, memory)

    clock, due = index.view.clock, []
    for identity, finding in current.items():
        if memory.cooling and (policy.name, identity) in memory.cooling:
            notes.append(Note("cooldown", "the last step is not long ago", policy.name, finding.subject))
            continue
        state = states.get(identity)
        if state is None or _is_over(state, policy):
            state = states[identity] = EscalationState(finding.subject, clock)
        state.samples += 1
        state.processes = finding.processes
        if (step := next_step(state, policy, clock)) is None:
            continue
        state.reach = reach_of(finding.subject, finding.processes, index)
        due_step = DueStep(policy, identity, finding, state, *step)
        nobody = why_inapplicable(step[0], finding)
        if nobody and not any(map(index.blindness, state.reach)):
            notes.append(Note("nobody", nobody, policy.name, finding.subject))
            advance(due_step, memory, clock, skipped=True)
        else:
            due.append(due_step)
    return due, notes


def _is_over(state: EscalationState, policy: Policy) -> bool:
    """Whether the last step was taken."""
    return 0 < state.done == len(policy.steps)


def _victim(due: DueStep) -> object:
    subject = due.finding.subject
    whom = (subject.pid, subject.start_time) if subject.kind == "process" else due.identity
    return (due.policy.name, due.state.done, whom)


def _cancelled(policy: Policy, ended: EscalationState, index: SampleIndex, memory: EngineMemory) -> Iterator[Note]:
    """Why a condition that held a sample ago does not hold now."""
    gap = _gap(ended, index, memory.index) if memory.index else None
    if gap is not None:
        yield Note("gap", f"{gap}: the time starts anew", policy.name, ended.subject)
    elif ended.done:
        yield Note("cleared", "the condition holds no more, its steps are cancelled", policy.name, ended.subject)


def _gap(ended: EscalationState, index: SampleIndex, before: SampleIndex) -> str | None:
    """What could not be read of a subject in this sample, though it could a sample ago."""
    reach = reach_of(ended.subject, ended.processes, before)
    for uuid in reach:
        blind = index.blindness(uuid)
        if blind is not None:
            return blind
    for where in (*reach, None):
        device = before.devices.get(where) if where else None
        for field, reason in index.gaps.get(where, {}).items():
            # Some fields are only asked for when a scrape wants them: before, they were no gap either.
            known_before = getattr(device, field, "a group of fields") is not None
            if known_before and field not in before.gaps.get(where, {}):
                return f"{field} could not be read, {reason}"
    return None


def _verdict(due: DueStep, further: int) -> Verdict:
    policy, number, finding = due.policy, due.state.done, due.finding
    if further:
        finding = replace(finding, why=f"{finding.why} (and the like on {further} more devices)")
    after = policy.steps[number + 1] if number + 1 < len(policy.steps) else None
    return Verdict(
        policy=policy.name,
        finding=finding,
        action=due.step.action,
        step=number,
        since=due.state.since,
        enforce=policy.enforce,
        options=due.step.options,
        next_action=after.action if after else None,
        next_after=after.after if after else None,
    )


NARROWEST_FIRST = ("process", "claim", "device", "user", "node")


def findings_of(policy: Policy, index: SampleIndex) -> Sequence[Finding]:
    """For whom the whole condition of *policy* holds now: `any` unites the findings of its rules, `all` joins them.

        process p on device d   +  device d            the process p
        process p of user u     +  user u              the process p
        device d                +  claim c             the claim c, if it holds d
        device d                +  user u              the device d for u, if u computes or has a claim there
        anything                +  node                that thing

    What comes out is of the narrower kind and means the processes that both sides mean: a side that names none means
    all that fit it.  Two sides that name no process in common do not meet.
    """
    # Every rule is asked, so that none loses a sample.
    found = [list(rule.check(index.view)) for rule in policy.rules]
    joined = found[0]
    for further in found[1:]:
        joined = [*joined, *further] if policy.join == "any" else list(_join(joined, further, index))
    return joined


def _join(left: Iterable[Finding], right: Iterable[Finding], index: SampleIndex) -> Iterator[Finding]:
    by_device: dict[str | None, list[Finding]] = {}
    for finding in right:
        by_device.setdefault(finding.subject.device, []).append(finding)
    anywhere = by_device.get(None, [])
    everywhere = [finding for findings in by_device.values() for finding in findings]
    for finding in left:
        device = finding.subject.device
        for other in everywhere if device is None else [*by_device.get(device, ()), *anywhere]:
            together = _meet(finding, other, index)
            if together is not None:
                yield together


def _meet(left: Finding, right: Finding, index: SampleIndex) -> Finding | None:
    subject = _both(left.subject, right.subject)
    if subject is None or not _is_so(subject, index):
        return None
    if left.processes and right.processes:
        named = {(process.pid, process.start_time) for process in right.processes}
        processes = [process for process in left.processes if (process.pid, process.start_time) in named]
    else:
        processes = [process for process in left.processes or right.processes if _fits(process, subject, index)]
    if not processes and (left.processes or right.processes):
        return None
    return Finding(left.rule, subject, f"{left.why}; {right.why}", tuple(processes))


def _both(left: Subject, right: Subject) -> Subject | None:
    facts: dict[str, Any] = {}
    for name in ("device", "pid", "start_time", "uid", "claim"):
        fact, other = getattr(left, name), getattr(right, name)
        if None not in (fact, other) and fact != other:
            return None
        facts[name] = other if fact is None else fact
    kind = min(left.kind, right.kind, key=NARROWEST_FIRST.index)
    return Subject(kind, **facts, user=left.user or right.user)


def _is_so(subject: Subject, index: SampleIndex) -> bool:
    """Whether the facts of a subject, which come from two sides, are true together."""
    claim = index.claim_of(subject)
    if subject.claim is not None and claim is None:
        return False
    if claim is not None and subject.device is not None and subject.device not in claim.devices:
        return False
    if subject.pid is not None and subject.start_time is not None:
        return subject.device is None or subject.device in index.processes.get((subject.pid, subject.start_time), ())
    if subject.device is not None and subject.uid is not None and claim is None:
        return subject.device in index.territory.get(subject.uid, ())
    return True


def _fits(process: GpuProcess, subject: Subject, index: SampleIndex) -> bool:
    places = index.processes.get((process.pid, process.start_time)) if process.start_time is not None else None
    if not places or (subject.device is not None and subject.device not in places):
        return False
    return subject.uid is None or process.uid == subject.uid
