"""Snapshot -> findings -> verdicts: what the policies want done now.  Pure except for the EngineMemory passed to it.

All conditions of a policy must hold together, sample after sample, for the whole of `for`: its rules, its scope, its
hours, the load, the number of devices.  If one of them ends, the escalation ends, and the time starts again from zero.
The memory is never written to disk, so after a restart every escalation begins at its first step.

A process takes seconds to die, and its memory takes longer to come back (up to 50 s were seen).  A sample in between
still shows the device as too full, and the next process would be hit.  So a policy that matches too many is stopped by
its breaker, and there is only one destructive step per device until its effect is seen.  Does not act: see
enforcement.actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuguard.device_state import grouped, innermost_claim
from gpuguard.errors import InvalidRequest
from gpuguard.locale.messages import all_of, nsentence, sentence
from gpuguard.model import Device, Finding, GpuProcess, ProcessIdentity, Snapshot, Subject, Verdict
from gpuguard.policies.action_kinds import (
    COUNTED,
    DESTRUCTIVE,
    DISRUPTIVE,
    ENDING_ACTIONS,
    HARMFUL,
    MESSAGES,
    ON_PROCESSES,
    WHOLE,
)
from gpuguard.policies.policy import (
    INTERACTIVE_SECONDS,
    KILL_AFTER,
    Judgement,
    Kept,
    KeptMark,
    Note,
    Policy,
    Protection,
    Step,
    drop_protected,
    is_interactive,
    narrowed,
)
from gpuguard.policies.rule import Evidence
from gpuguard.policies.view import (
    Arrivals,
    JobMember,
    Jobs,
    Past,
    RuleView,
    SampleIndex,
    SampleRhythm,
    identities,
    index_sample,
    jobs_of,
    member_of,
    reach_of,
    windows_of,
    without_pauses,
)
from gpuguard.units import format_duration
from gpuguard.users import NAMELESS

if TYPE_CHECKING:
    from gpuguard.model import ActionName, SubjectKind

FEWEST_SAMPLES = 2  # a condition that was seen only once never leads to a step, however short `for` is
EFFECT_SECONDS = 50.0  # a driver may take so long to free the memory of an ended process
MEMORY_SLACK = 512 * 2**20  # bytes by which others may grow meanwhile
LONGEST_PAUSE = 600.0  # seconds between two samples; after a longer pause no condition is taken to have held all along
SLEPT_SECONDS = 1.0  # by which CLOCK_BOOTTIME ran ahead of the clock that stands still while the machine sleeps
AGAIN_SECONDS = 60.0  # after which a step that was not taken is tried again
UNTOLD_SECONDS = 600.0  # between two messages to a user whom none has reached, and who is spared until one does
SAID_AGAIN_SECONDS = 60.0  # at least, between two messages about a further pause
SAID = frozenset({"gap", "kept", "exempt"})  # kinds of notes that already tell the log why a subject has no finding now
MOST_NAMES = 10  # of users, in a note


@dataclass
class EscalationState:
    """A condition that holds for a subject, sample after sample, and the number of steps that it has led to.

    It stays after the last step, until the condition or the cooldown ends.
    """

    subject: Subject
    since: float  # clock
    rule: str = ""  # as of the last sample
    why: str = ""  # as of the last sample, with numbers, for people
    processes: tuple[GpuProcess, ...] = ()  # that it is about, as of the last sample
    grace: float = 0.0  # further seconds because a person is in front of all of them, as of the last sample
    reach: tuple[str, ...] = ()  # uuids, as of the sample in which a step was due
    samples: int = 0
    done: int = 0  # steps
    stepped_at: float = 0.0  # clock of the last step
    terminated_at: float | None = None
    paused: bool = False  # a step, perhaps of the escalation before, has paused processes that have not gone on since
    goes_on: bool = False  # the escalation before has come to its end, and the condition has held ever since
    resting: bool = False  # the condition is over, but the pause lasts until the GPU has recovered further: see Until
    again_at: float = 0.0  # clock at which a step that was not taken is due again; 0 if it was taken or not tried yet
    held_until: float = 0.0  # clock before which it has no turn, because other steps of the policy had theirs
    told: bool = False  # a message has reached the user
    shifted: bool = False  # a pause has made untrue what messages said about the next step
    said_again_at: float = float("-inf")  # clock


@dataclass(frozen=True)
class Hit:
    """The users and processes that a step acts on."""

    users: frozenset[int]  # accountable uids
    victims: frozenset[JobMember]  # processes, or the subject if there are none
    names: frozenset[str]  # of users


@dataclass
class Effect:
    """A destructive step whose effect on one device is awaited."""

    policy: str
    subject: Subject
    at: float  # clock
    victims: frozenset[tuple[int, float]]
    memory_below: float | None  # bytes in use once the victims' memory is free, or None if unknown
    hit: Hit


@dataclass
class EngineMemory:
    """Everything that evaluate() remembers.  Each watchdog has one, and only one thread at a time may use it."""

    past: Past = field(default_factory=Past)
    rhythm: SampleRhythm = field(default_factory=SampleRhythm)
    arrivals: Arrivals = field(default_factory=Arrivals)
    policies: dict[str, Policy] = field(default_factory=dict)
    states: dict[str, dict[Subject, EscalationState]] = field(default_factory=dict)  # by policy
    cooling: dict[tuple[str, Subject], float] = field(default_factory=dict)  # until which clock
    effects: dict[tuple[bool, str], Effect] = field(default_factory=dict)  # by (enforced, uuid)
    kept: dict[tuple[str, int | str], KeptMark] = field(default_factory=dict)
    index: SampleIndex | None = None  # of the last sample
    suspended: float | None = None  # seconds, as of the last sample
    unkillable: frozenset[ProcessIdentity] = frozenset()  # processes that outlived SIGKILL

    def holds(self, policy: str, subject: Subject) -> bool:
        """Return whether the condition of *policy* was found for *subject* in the last sample."""
        return subject in self.states.get(policy, ())

    def pauses(self, policy: str, process: ProcessIdentity) -> bool:
        """Return whether the condition for which *policy* paused *process* has held until the last sample."""
        states = [state for state in self.states.get(policy, {}).values() if state.paused]
        return any((row.pid, row.start_time) == process for state in states for row in state.processes)

    def stop_clocks(self, seconds: float) -> None:
        """Let a pause of *seconds* count for no escalation: those that are found again afterwards go on."""
        for state in (state for states in self.states.values() for state in states.values()):
            state.since += seconds
            state.stepped_at += seconds
            state.held_until += seconds
            state.terminated_at = None if state.terminated_at is None else state.terminated_at + seconds
            state.shifted = True

    def told(self, verdict: Verdict) -> None:
        """Note that a message about *verdict* has reached the user."""
        for _, state in self._meant(verdict):
            state.told = True

    def _meant(self, verdict: Verdict) -> Iterator[tuple[Subject, EscalationState]]:
        victims = identities(verdict.finding.processes)
        for subject, state in self.states.get(verdict.policy, {}).items():
            # The same processes may have been found on several GPUs: one step was taken for all of these findings.
            own = {(process.pid, process.start_time) for process in state.processes}
            if subject == verdict.finding.subject or (victims and victims == own):
                yield subject, state

    def not_taken(self, verdict: Verdict, clock: float) -> None:
        """Let a step be due again that was refused, failed or could not be recorded, and so took nothing away.

        It begins no cooldown, no other step waits for its effect, and it does not count as a request to terminate.
        """
        for subject, state in self._meant(verdict):
            if state.done > verdict.step:
                state.done, state.again_at = verdict.step, clock + AGAIN_SECONDS
                state.terminated_at = None if verdict.action == "terminate" else state.terminated_at
                self.undo(verdict.policy, subject)

    def undo(self, policy: str, subject: Subject) -> None:
        """Forget the last step of *policy* for *subject*, on all its GPUs, because it was not taken."""

        def is_meant(by: str, other: Subject) -> bool:
            elsewhere = replace(subject, device=other.device)
            return by == policy and (other == subject or (subject.kind == "process" and other == elsewhere))

        self.cooling = {by: until for by, until in self.cooling.items() if not is_meant(*by)}
        self.effects = {at: each for at, each in self.effects.items() if not is_meant(each.policy, each.subject)}

    def start_anew(self, clock: float) -> None:
        """Drop all that was seen before a long pause, because it is unknown what happened during the pause."""
        self.past.clear()
        self.states.clear()
        if self.rhythm.clock is not None and clock < self.rhythm.clock:
            # This is another boot, so times of the one before mean nothing.  Marks stay, because they only protect.
            self.cooling.clear()
            self.effects.clear()
            self.arrivals = Arrivals()


@dataclass(frozen=True)
class DueStep:
    """A step whose time has come."""

    policy: Policy
    finding: Finding
    state: EscalationState
    step: Step
    since: float  # clock
    number: int  # of the step; a number below that of the steps done means a message that is repeated
    rest: tuple[GpuProcess, ...] = ()  # that end with those of the finding

    @property
    def order(self) -> tuple[float, float, str, str]:
        """A sort key by which the longest wait comes first, and which depends on no order of policies or rules."""
        return (self.since, self.state.since, self.policy.name, str(self.finding.subject))


_SAME_SAMPLE = sentence("note.same_sample", "the sample is the same as before: it shows nothing new")
_COOLDOWN = sentence("note.cooldown", "the last step is not long ago")
_UNTOLD = sentence("note.untold", "no message has reached the user")
_AT_ONCE = sentence(
    "note.at_once",
    "as many as the policy allows are acted on at once: it follows when their effect is seen",
)

Judged = tuple[list[DueStep], list[Note]]  # of one policy: the steps whose time has come, and notes on all the rest
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
        view: the sample and what is known about its users; its `past` is replaced by what *memory* has recorded.
        policies: with unique names.
        memory: of the samples before; it is changed in place.
        interval: seconds between samples; if None, the median of the last distances.
        zone: seconds east of UTC, for hours and days.
        isolate: calls the judgement of the named policy; if it returns None, it is unknown and the times start anew.

    Returns:
        The verdicts that are due now, each once, and notes on what was not acted on.

    Raises:
        InvalidRequest: two policies have the same name.
    """
    view = RuleView(view) if isinstance(view, Snapshot) else without_pauses(view)
    names = [policy.name for policy in policies]
    if len(set(names)) < len(names):
        raise InvalidRequest(
            sentence(
                "policy.same_name",
                "two policies have the same name, of {names}: give each its own.",
                names=", ".join(sorted(names)),
            )
        )
    notes = _pin(policies, memory)
    if view.clock == memory.rhythm.clock:
        return Judgement((), (*notes, Note("resampling", _SAME_SAMPLE)))
    notes += _resample(view, policies, memory, interval)
    memory.arrivals.look(view.snapshot)
    index = index_sample(replace(view, past=memory.past, arrivals=memory.arrivals), zone)
    due: list[DueStep] = []
    for policy in policies:
        judged = isolate(policy.name, partial(_judge, policy, index, memory))
        if judged is None:
            memory.states.pop(policy.name, None)
        else:
            due += judged[0]
            notes += judged[1]
    verdicts, against = _taken(due, index, memory)
    notes += against
    memory.index = index
    notes.sort(key=lambda note: (note.policy or "", note.kind, str(note.subject or ""), note.text))
    return Judgement(verdicts, tuple(notes))


def _taken(due: Iterable[DueStep], index: SampleIndex, memory: EngineMemory) -> tuple[tuple[Verdict, ...], list[Note]]:
    """Return the verdicts of the steps of *due* that may be taken now, and notes why the others wait.

    Steps with the same target are bundled, so that a process on eight devices is warned once.  The oldest step stands
    for the others.
    """
    clock = index.clock
    bundles = grouped([(_victim(step), step) for step in sorted(due, key=lambda step: step.order)])
    taken, against = allowed_steps([bundle[0] for bundle in bundles.values()], index, memory)
    verdicts, ends = [], {(row.pid, row.start_time) for step in taken for row in step.finding.processes}
    for step in taken:
        bundle = bundles[_victim(step)]
        rest = tuple(row for row in step.rest if (row.pid, row.start_time) not in ends)
        ends |= {(row.pid, row.start_time) for row in rest}
        verdicts.append(replace(_verdict(step, len(bundle) - 1, clock), rest=rest))
        for member in bundle:
            if member.number == member.state.done:
                advance(member, memory, clock)
    return tuple(verdicts), against


def still_holds(
    policy: Policy,
    subject: Subject,
    view: RuleView,
    memory: EngineMemory,
    *,
    processes: Iterable[GpuProcess] = (),
    zone: float = 0.0,
) -> bool:
    """Return whether in *view* the whole condition of *policy* holds for *subject*, and is about all *processes*.

    The view need not be a new sample.
    """
    index = index_sample(replace(view, past=memory.past, arrivals=memory.arrivals), zone)
    found, _ = narrowed(findings_of(policy, index), policy, index, memory.kept)
    about = [finding for finding in found if finding.subject == subject]
    meant = {(process.pid, process.start_time) for finding in about for process in finding.processes}
    return bool(about) and all((process.pid, process.start_time) in meant for process in processes)


def may_end_with_job(
    policy: Policy, process: GpuProcess, view: RuleView, memory: EngineMemory, *, zone: float = 0.0
) -> bool:
    """Return whether in *view* nothing spares *process*, whose job is ended."""
    return not _is_spared(process, policy, index_sample(view, zone), memory)


def _pin(policies: Sequence[Policy], memory: EngineMemory) -> list[Note]:
    notes: list[Note] = []
    now = {policy.name: policy for policy in policies}
    for name, before in memory.policies.items():
        if now.get(name) is before or now.get(name) == before:
            continue
        why = (
            sentence("note.policy_changed", "the policy was changed, its steps are cancelled")
            if name in now
            else sentence("note.policy_gone", "the policy is gone, its steps are cancelled")
        )
        states = memory.states.pop(name, {}).values()
        notes += [Note("cancelled", why, name, state.subject) for state in states if _has_begun(state)]
    memory.policies = now
    return notes


def _resample(view: RuleView, policies: Sequence[Policy], memory: EngineMemory, interval: float | None) -> list[Note]:
    """Record the time, and the values that rules look back on."""
    notes = []
    rhythm, clock = memory.rhythm, view.clock
    largest = rhythm.largest(interval)
    pause = 0.0 if rhythm.clock is None else clock - rhythm.clock
    before, memory.suspended = memory.suspended, view.suspended
    slept = before is not None and view.suspended is not None and view.suspended - before > SLEPT_SECONDS
    if slept or not 0 <= pause <= max(largest, LONGEST_PAUSE):
        why = (
            sentence("note.suspended", "the machine was suspended: all durations start anew")
            if slept
            else sentence(
                "note.long_pause", "{time}s since the last sample: all durations start anew", time=f"{pause:.1f}"
            )
        )
        notes.append(Note("resampling", why))
        memory.start_anew(clock)
    elif pause > largest:
        why = sentence("note.late", "{time}s since the last sample: they count for no duration", time=f"{pause:.1f}")
        notes.append(Note("late", why))
        memory.stop_clocks(pause)
    rhythm.beat(clock)
    memory.kept = {name: mark for name, mark in memory.kept.items() if mark.until > clock}
    memory.cooling = {name: until for name, until in memory.cooling.items() if until > clock}
    memory.past.record(view.snapshot, windows_of([rule for policy in policies for rule in policy.rules]), largest)
    return notes


def _by_subject(findings: Iterable[Finding], policy: Policy) -> dict[Subject, Finding]:
    """Merge the findings of several rules about the same subject, and put the policy's message before the reasons."""
    together: dict[Subject, Finding] = {}
    for subject, same in grouped([(finding.subject, finding) for finding in findings]).items():
        merged = same[0]
        if len(same) > 1:
            processes = dict.fromkeys(process for finding in same for process in finding.processes)
            merged = replace(merged, why=all_of(finding.why for finding in same), processes=tuple(processes))
        if policy.message:
            why = sentence("policy.message", "{message} ({why})", message=policy.message, why=merged.why)
            merged = replace(merged, why=why)
        together[subject] = merged
    return together


def _end_others(
    policy: Policy,
    found: Collection[Subject],
    left_out: Collection[object],
    index: SampleIndex,
    memory: EngineMemory,
) -> Iterator[Note]:
    """Forget the escalations of subjects that are no longer *found*; notes on those *left_out* were already made."""
    states = memory.states.setdefault(policy.name, {})
    for subject in [subject for subject in states if subject not in found]:
        if _rests(states[subject], policy, index):
            states[subject].resting = True
            continue
        ended = states.pop(subject)
        if ended.subject not in left_out:
            yield from _cancelled(policy, ended, index, memory)


def _judge(policy: Policy, index: SampleIndex, memory: EngineMemory) -> Judged:
    """Count this sample for the subjects that the policy finds, cancel escalations that ended, and return due steps."""
    findings, notes = narrowed(findings_of(policy, index), policy, index, memory.kept)
    current = _by_subject(findings, policy)
    notes += _end_others(policy, current, {note.subject for note in notes if note.kind in SAID}, index, memory)

    states = memory.states[policy.name]
    clock, due, begun = index.clock, list[DueStep](), dict[tuple[int, str], frozenset[ProcessIdentity]]()
    for subject, finding in current.items():
        state, cools = states.get(subject), (policy.name, subject) in memory.cooling
        if not cools and (state is None or _is_over(state, policy)):
            paused = bool(state and state.paused)
            state = states[subject] = EscalationState(subject, clock, paused=paused, goes_on=state is not None)
        if state:
            if state.resting:  # its steps go on from now, because the time of resting does not count
                state.resting, state.stepped_at = False, clock
            state.samples += 1
            state.rule, state.why, state.processes = finding.rule, finding.why, finding.processes
            attended = finding.processes and all(is_interactive(process, index) for process in finding.processes)
            state.grace = INTERACTIVE_SECONDS if attended else 0.0
        if cools or state is None:
            notes.append(Note("cooldown", _COOLDOWN, policy.name, subject))
            continue
        if state.shifted and clock >= state.said_again_at + SAID_AGAIN_SECONDS:
            at = _due(policy, state) if worst_step(_upcoming(policy, state)) else None
            due += _said_again(policy, finding, state, clock) if at is not None and at > clock else ()
            state.shifted, state.said_again_at = False, clock
        if (step := next_step(state, policy, clock)) is None:
            continue
        if policy.told and not state.told and step[0].action in COUNTED:
            notes.append(Note("untold", _UNTOLD, policy.name, subject))
            if clock >= state.said_again_at + UNTOLD_SECONDS:
                due += _said_again(policy, finding, state, clock)
                state.said_again_at = clock
            continue
        rest = _rest_of_jobs(policy, finding, index, memory, begun) if step[0].action in WHOLE else ()
        state.reach = reach_of(subject, (*finding.processes, *rest), index)
        due_step = DueStep(policy, finding, state, *step, state.done, rest)
        reason = why_inapplicable(step[0], finding)
        if reason and not any(map(index.blindness, state.reach)):
            notes.append(Note("nobody", reason, policy.name, subject))
            advance(due_step, memory, clock, skipped=True)
        else:
            due.append(due_step)
    return due, notes


def _rest_of_jobs(
    policy: Policy,
    finding: Finding,
    index: SampleIndex,
    memory: EngineMemory,
    begun: dict[tuple[int, str], frozenset[ProcessIdentity]],
) -> tuple[GpuProcess, ...]:
    """Return what ends with the processes of *finding*: the others of their claimed jobs, but none that is spared.

    They come with the first finding of their job, whose processes *begun* has by the claim, and with that of the same
    processes on other GPUs, because any of these may stand for the others.
    """
    found, view = identities(finding.processes), index.view
    owners = filter(None, (innermost_claim(row, view.snapshot.claims, view.seen) for row in finding.processes))
    claims = {(claim.uid, claim.id) for claim in owners}
    own = sorted(claim for claim in claims if begun.setdefault(claim, found) == found)
    rest = (row for claim in own for process, row in index.jobs.get(claim, {}).items() if process not in found)
    return tuple(row for row in rest if not _is_spared(row, policy, index, memory))


def _is_spared(process: GpuProcess, policy: Policy, index: SampleIndex, memory: EngineMemory) -> bool:
    """Return whether the policy is not about *process*, or something protects it, or it is not in the sample."""
    subject = Subject("process", pid=process.pid, start_time=process.start_time, uid=process.uid, user=process.user)
    return not drop_protected([Finding("", subject, "", (process,))], policy, index, memory.kept)[0]


def _rests(state: EscalationState, policy: Policy, index: SampleIndex) -> bool:
    """Return whether the processes that *policy* has paused stay paused although its condition is over."""
    devices = {uuid for row in state.processes for uuid in index.processes.get((row.pid, row.start_time or -1.0), ())}
    until = policy.until
    return (
        until is not None
        and state.paused
        and bool(devices)
        and not any(index.blindness(uuid) for uuid in devices)
        and not all(until.is_reached(index.devices.get(uuid)) for uuid in devices)
    )


def _is_over(state: EscalationState, policy: Policy) -> bool:
    """Return whether the last step was taken."""
    return 0 < state.done == len(policy.steps)


def _has_begun(state: EscalationState) -> bool:
    """Return whether a step was taken or tried: then the log has a line about it, and must get one about the end."""
    return state.done > 0 or state.again_at > 0 or state.goes_on


def _victim(due: DueStep) -> object:
    subject = due.finding.subject
    whom = (subject.pid, subject.start_time) if subject.kind == "process" else subject
    return (due.policy.name, due.number, whom)


def _said_again(policy: Policy, finding: Finding, state: EscalationState, clock: float) -> Iterator[DueStep]:
    """Yield the earlier messages again, because they are no longer true, or have not reached the user."""
    for number, step in enumerate(policy.steps[: state.done]):
        if step.action in MESSAGES:
            yield DueStep(policy, finding, state, step, clock, number)


def _cancelled(policy: Policy, ended: EscalationState, index: SampleIndex, memory: EngineMemory) -> Iterator[Note]:
    gap = _gap(ended, index, memory.index) if memory.index else None
    if gap is not None:
        yield Note("gap", sentence("note.gap", "{fact}: the time starts anew", fact=gap), policy.name, ended.subject)
    elif _has_begun(ended):
        why = (
            sentence("note.over", "the condition holds no more")
            if _is_over(ended, policy)
            else sentence("note.cleared", "the condition holds no more, its steps are cancelled")
        )
        yield Note("cleared", why, policy.name, ended.subject)


def _gap(ended: EscalationState, index: SampleIndex, before: SampleIndex) -> str | None:
    """Return what could not be read of a subject in this sample, but could a sample ago, or None."""
    reach = reach_of(ended.subject, ended.processes, before)
    if blind := next(filter(None, map(index.blindness, reach)), None):
        return blind
    for where in (*reach, None):
        device = before.devices.get(where) if where else None
        for name, reason in index.gaps.get(where, {}).items():
            # Some fields are read only when a scrape asks for them; in a sample without them they are no gap.
            known_before = getattr(device, name, "a group of fields") is not None
            if known_before and name not in before.gaps.get(where, {}):
                return sentence("gap.field", "{field} could not be read, {reason}", field=name, reason=reason)
    return None


def _verdict(due: DueStep, further: int, clock: float) -> Verdict:
    policy, finding = due.policy, due.finding
    if further:
        why = nsentence(
            "rule.more_gpus",
            "{why} (and the like on {number} more GPU)",
            "{why} (and the like on {number} more GPUs)",
            further,
            why=finding.why,
        )
        finding = replace(finding, why=why)
    state = due.state
    if due.number == state.done:  # the state as it will be once this step is requested
        asked = clock if due.step.action == "terminate" else state.terminated_at
        state = replace(state, done=due.number + 1, stepped_at=clock, terminated_at=asked, again_at=0.0)
    coming = _upcoming(policy, state)
    following, harm = coming[0] if coming else None, worst_step(coming)
    return Verdict(
        policy=policy.name,
        finding=finding,
        action=due.step.action,
        step=due.number,
        since=due.state.since,
        enforce=policy.enforce,
        options=due.step.options,
        next_action=following[0] if following else None,
        next_after=max(0.0, following[1] - clock) if following else None,
        harm_action=harm[0] if harm else None,
        harm_after=max(0.0, harm[1] - clock) if harm else None,
        # A step that was not taken is tried again without that time, because it is unknown whether it passed.
        graced=due.state.grace if due.step.action in DISRUPTIVE and not due.state.again_at else 0.0,
        may_be_kept=policy.may_be_kept,
        kind=next((rule.kind for rule in policy.rules if rule.kind.name == finding.rule), None),
    )


def _upcoming(policy: Policy, state: EscalationState, at: float | None = None) -> list[tuple[ActionName, float]]:
    """Return (action, clock) of the steps that will come if nothing changes and that have something to act on.

    *at* is the clock of the next one, if that is better known than from the policy.
    """
    if state.done >= len(policy.steps) or (at := _due(policy, state) if at is None else at) is None:
        return []
    finding, asked = Finding("", state.subject, "", state.processes), state.terminated_at
    coming: list[tuple[ActionName, float]] = []
    for number, step in enumerate(policy.steps[state.done :]):
        applicable = why_inapplicable(step, finding) is None
        if number:
            at += step.after + (state.grace if applicable and step.action in DISRUPTIVE else 0.0)
        if step.action == "kill":
            applicable = applicable and asked is not None
            at = at if asked is None else max(at, asked + KILL_AFTER)
        if applicable:
            coming.append((step.action, at))
            asked = at if step.action == "terminate" else asked
    return coming


def worst_step(steps: Iterable[tuple[ActionName, float]]) -> tuple[ActionName, float] | None:
    """Return the one of *steps*, (action, when), that takes most from the user; if several take as much, the first."""
    harmful = [step for step in steps if step[0] in HARMFUL]
    return max(harmful, key=lambda step: (step[0] in ENDING_ACTIONS, step[0] in DESTRUCTIVE, -step[1]), default=None)


_RELEASE_OF_PROCESSES = sentence("step.release_of_processes", "release is passed over: processes are meant")
_RELEASE_WITHOUT_CLAIM = sentence("step.release_without_claim", "release is passed over: no claim is meant")


def why_inapplicable(step: Step, finding: Finding) -> str | None:
    """Return why a step is passed over because *finding* has nothing that it could act on, or None if it has."""
    peopled = bool(finding.processes) or finding.subject.kind == "process"
    if step.action in ON_PROCESSES and not peopled:
        if finding.subject.kind != "claim":
            return sentence("step.no_process", "{action} is passed over: no process is meant", action=step.action)
        return sentence(
            "step.claim_without_process",
            "{action} is passed over: no process is meant (a claim is taken back by `release`)",
            action=step.action,
        )
    if step.action == "release" and (peopled or finding.subject.claim is None):
        return _RELEASE_OF_PROCESSES if peopled else _RELEASE_WITHOUT_CLAIM
    return None


NARROWEST_FIRST: tuple[SubjectKind, ...] = ("process", "claim", "device", "user", "node")


def findings_of(policy: Policy, index: SampleIndex) -> Sequence[Finding]:
    """Return what the whole condition of *policy* finds now: `any` unites the findings of its rules, `all` joins them.

        process p on device d   +  device d            the process p
        process p of user u     +  user u              the process p
        device d                +  claim c             the claim c, if it holds d
        device d                +  user u              the device d for u, if u computes or has a claim there
        anything                +  node                that thing

    The result has the narrower kind of the two, and the processes that both sides mean: a side that names none means
    all processes that fit it.  Two sides that name no process in common give no result.
    """
    # Every rule is checked, so that none misses a sample.
    found = [list(rule.check(index.view)) for rule in policy.rules]
    joined = found[0]
    for further in found[1:]:
        joined = [*joined, *further] if policy.join == "any" else list(_join(joined, further, index))
    return joined


def _join(left: Iterable[Finding], right: Iterable[Finding], index: SampleIndex) -> Iterator[Finding]:
    by_device = grouped((finding.subject.device, finding) for finding in right)
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
    return Finding(left.rule, subject, all_of((left.why, right.why)), tuple(processes))


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
    """Return whether the facts of a subject, which come from two findings, are true together."""
    claim = index.claims.get((subject.uid, subject.claim))
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


def next_step(state: EscalationState, policy: Policy, clock: float) -> tuple[Step, float] | None:
    """Return the step of the escalation that is due now, and since when, or None if none is due."""
    if state.done >= len(policy.steps) or state.samples < FEWEST_SAMPLES or clock - state.since < policy.hold:
        return None
    due = _due(policy, state)
    return None if due is None or clock < due else (policy.steps[state.done], due)


def _due(policy: Policy, state: EscalationState) -> float | None:
    """Return the clock at which the next step comes if the condition holds, or None for a kill before a terminate."""
    step = policy.steps[state.done]
    grace = state.grace if step.action in DISRUPTIVE else 0.0
    due = state.again_at or (state.stepped_at if state.done else state.since + policy.hold) + step.after + grace
    if step.action != "kill":
        return due
    # This was checked when the policy was made, and is checked again because an early SIGKILL cannot be undone.
    return None if state.terminated_at is None else max(due, state.terminated_at + KILL_AFTER)


def advance(due: DueStep, memory: EngineMemory, clock: float, *, skipped: bool = False) -> None:
    """Move on after a step that was due: it is requested, or *skipped* because it has no target here.

    The last step ends the escalation and begins its cooldown.  If a terminate has no target, kills right after it are
    skipped with it.
    """
    state, policy = due.state, due.policy
    if due.step.action == "terminate" and not skipped:
        state.terminated_at = clock
    state.paused |= due.step.action == "pause"
    state.done += 1
    if skipped and state.terminated_at is None:
        while state.done < len(policy.steps) and policy.steps[state.done].action == "kill":
            state.done += 1
    state.stepped_at, state.again_at = clock, 0.0
    if state.done == len(policy.steps):
        memory.cooling[policy.name, due.finding.subject] = clock + policy.cooldown


def allowed_steps(due: Sequence[DueStep], index: SampleIndex, memory: EngineMemory) -> tuple[list[DueStep], list[Note]]:
    """Return the steps of *due* that may be taken now, in the order of their turns, and notes why the others wait."""
    clock, hits = index.clock, {id(step): _hit(step, index) for step in due if step.step.action in COUNTED}
    awaited = [effect.hit for effect in memory.effects.values()]
    jobs = jobs_of(frozenset[JobMember]().union(*(hit.victims for hit in (*hits.values(), *awaited))))
    memory.effects = {
        key: effect
        for key, effect in memory.effects.items()
        if 0 <= clock - effect.at < EFFECT_SECONDS and not _is_seen(effect, key[1], index)
    }
    # By policy: of steps that are taken now, or have not shown their effect yet.
    at_once = grouped([(effect.policy, effect.hit) for effect in memory.effects.values()])
    held, notes = _breaker(due, hits)
    allowed = []
    for step in _in_turns(due, hits, jobs, index):
        name, action = step.policy.name, step.step.action
        if action in COUNTED:
            if name in held:
                continue
            victims = identities((*step.finding.processes, *step.rest))
            if victims and victims <= memory.unkillable:
                allowed.append(step)  # no effect is awaited, because it will have none
                continue
            hit, before = hits[id(step)], at_once.setdefault(name, [])
            against = _waits_for_its_turn(step, hit, before, jobs, clock)
            against = against or (_obstacle(step, hit, jobs, index, memory) if action in DESTRUCTIVE else None)
            if against is not None:
                notes.append(Note(*against, name, step.finding.subject))
                continue
            before.append(hit)
            # A step that is only rehearsed has no effect, but it must delay the same steps as a real one would, and
            # must not delay steps of enforced policies.  Hence there are two sets of effects.
            for uuid in step.state.reach if action in DESTRUCTIVE else ():
                first = memory.effects.get((step.policy.enforce, uuid))
                gone = victims | first.victims if first else victims  # these belong to the same job: see _obstacle()
                below = _memory_without(index.devices[uuid], gone)
                memory.effects[step.policy.enforce, uuid] = Effect(name, step.finding.subject, clock, gone, below, hit)
        allowed.append(step)
    return allowed, notes


# The order of jobs, as a number from the rows of a job's processes and from its devices: the lowest comes first.  A job
# is as new as its newest process and as old as its oldest one, so that no user moves a job out of the way by adding
# another process.
ORDERS: Mapping[str, Callable[[Sequence[GpuProcess], Sequence[Device]], float]] = {
    "newest": lambda rows, devices: -max((row.start_time or 0.0 for row in rows), default=0.0),
    "oldest": lambda rows, devices: min((row.start_time or 0.0 for row in rows), default=0.0),
    "most_memory": lambda rows, devices: -sum(row.memory_used or 0 for row in rows),
    "least_used": lambda rows, devices: max((_use(device) for device in devices), default=_use(None)),
    "most_power": lambda rows, devices: -sum(device.power_draw or 0.0 for device in devices),
}


def _use(device: Device | None) -> float:
    return 100.0 if device is None or device.utilization is None else device.utilization


def _in_turns(due: Iterable[DueStep], hits: Mapping[int, Hit], jobs: Jobs, index: SampleIndex) -> list[DueStep]:
    """Return *due* in order: the job of each user that the policy puts first, then the next one of each user, ...

    So no user can keep a policy busy with many small jobs, away from other users or from their own large job.
    """
    members: dict[object, list[DueStep]] = {}  # the steps of each policy about the same job
    for step in due:
        hit = hits.get(id(step))
        which = frozenset(jobs[member] for member in hit.victims) if hit else id(step)
        members.setdefault((step.policy.name, which), []).append(step)
    ordered = list[tuple[tuple[object, ...], list[DueStep]]]()
    for steps in members.values():
        rows = [row for step in steps for row in step.finding.processes]
        reach = {uuid for step in steps for uuid in step.state.reach}
        devices = [index.devices[uuid] for uuid in sorted(reach & index.devices.keys())]
        steps.sort(key=lambda step: step.order)
        ordered.append(((ORDERS[steps[0].policy.order](rows, devices), steps[0].order), steps))
    ranked, ranks = list[tuple[int, list[DueStep]]](), Counter[object]()
    for _, steps in sorted(ordered, key=lambda pair: pair[0]):
        hit = hits.get(id(steps[0]))
        whose = steps[0].policy.name, min(hit.users, default=None) if hit else None
        ranks[whose] += 1
        ranked.append((ranks[whose], steps))
    return [step for _, steps in sorted(ranked, key=lambda pair: pair[0]) for step in steps]


def _waits_for_its_turn(step: DueStep, hit: Hit, before: Sequence[Hit], jobs: Jobs, clock: float) -> Protection | None:
    """Return why a step waits: together with those *before* it, more would be hit at once than the policy allows.

    A finding that rests on a sensor must then hold for as long again, because the steps taken meanwhile may have been
    enough.  One step alone is never too much.  Returns None if the step need not wait.
    """
    policy, state = step.policy, step.state
    users = hit.users.union(*(other.users for other in before))
    victims = hit.victims.union(*(other.victims for other in before))
    number = len(victims if policy.at_most_processes else {jobs[member] for member in victims})
    if before and (len(users) > policy.at_most_users or number > (policy.at_most_processes or policy.at_most_jobs)):
        # A kill is exempt, because it only completes what has begun.
        once_more = policy.rests_on is Evidence.SENSOR and step.step.action != "kill"
        state.held_until = clock + (policy.hold if once_more else 0.0)
        return "waiting", _AT_ONCE
    if clock < state.held_until:
        return "waiting", sentence(
            "note.turn",
            "its turn comes when the condition has held for another {time}",
            time=format_duration(policy.hold),
        )
    return None


def _obstacle(due: DueStep, hit: Hit, jobs: Jobs, index: SampleIndex, memory: EngineMemory) -> Protection | None:
    own = {jobs[member] for member in hit.victims}
    for uuid in due.state.reach:
        if blind := index.blindness(uuid):
            return "gap", blind
        effect = memory.effects.get((due.policy.enforce, uuid))
        if effect is None:
            continue
        same_job = effect.subject == due.finding.subject or not own.isdisjoint(map(jobs.get, effect.hit.victims))
        if effect.policy != due.policy.name or not same_job:  # a job may end as a whole
            return "waiting", sentence(
                "note.effect",
                "a step of {policy} on the same GPU has not shown its effect yet",
                policy=effect.policy,
            )
    return None


def _breaker(due: Iterable[DueStep], hits: Mapping[int, Hit]) -> tuple[set[str], list[Note]]:
    """Return the policies that must act on no user now, and a note on each.

    They would hit too many different users at once, so the evidence that they rest on seems to be wrong for everybody.
    One user alone never trips a breaker, however many processes they have, because otherwise all others would be safe
    behind that user.  Clocks and existing claims do not go wrong in this way.
    """
    by_policy = grouped([(step.policy.name, step) for step in due if id(step) in hits])
    held, notes = set[str](), list[Note]()
    for name, steps in by_policy.items():
        policy = steps[0].policy
        users = frozenset[int]().union(*(hits[id(step)].users for step in steps))
        if len(users) <= policy.at_most_users or policy.some_beyond or policy.rests_on is Evidence.CLOCK:
            continue
        held.add(name)
        names = sorted(frozenset[str]().union(*(hits[id(step)].names for step in steps)))
        facts = {
            "users": f"{len(users)}",
            "most_users": f"{policy.at_most_users}",
            "user": ", ".join(names[:MOST_NAMES]),
        }
        text = (
            sentence(
                "breaker.readings",
                "{users} users would be acted on at once, more than {most_users}, and the finding rests on readings, "
                "which can go wrong for everybody: no user is ({user})",
                **facts,
            )
            if policy.rests_on is Evidence.SENSOR
            else sentence(
                "breaker.missing_claims",
                "{users} users would be acted on at once, more than {most_users}, and the finding rests on claims that "
                "are missing, which can go wrong for everybody: no user is ({user})",
                **facts,
            )
        )
        notes.append(Note("breaker", text, name))
    return held, notes


def _hit(step: DueStep, index: SampleIndex) -> Hit:
    subject, processes = step.finding.subject, (*step.finding.processes, *step.rest)
    people = {(subject.uid, subject.user), *((process.uid, process.user) for process in processes)}
    users = (_accountable(uid, user, index) for uid, user in people if uid is not None)
    victims = frozenset(member_of(process, index.view) for process in processes if process.start_time is not None)
    victims = victims or frozenset((JobMember((0, 0.0), str(subject)),))
    return Hit(frozenset(users), victims, frozenset(user for _, user in people if user))


def _accountable(uid: int, user: str | None, index: SampleIndex) -> int:
    """Return the user who answers for *uid*; all uids without a name count as one, as any user may have thousands."""
    owner = index.view.accountable.get(uid, uid)
    return NAMELESS if owner == uid and (user is None or user.isdecimal()) else owner


def _is_seen(effect: Effect, uuid: str, index: SampleIndex) -> bool:
    device = index.devices.get(uuid)
    if device is None or index.blindness(uuid) is not None:
        return False
    if not effect.victims:
        return effect.subject.claim is not None and all(claim != effect.subject.claim for _, claim in index.claims)
    dead = {identity[0] for identity in effect.victims}
    starts = {(process.pid, process.start_time) for process in device.processes or () if process.pid in dead}
    if any(start is None or (pid, start) in effect.victims for pid, start in starts):
        return False
    used, below = device.memory_used, effect.memory_below
    return used is not None and below is not None and used <= below


def _memory_without(device: Device, victims: frozenset[ProcessIdentity]) -> float | None:
    """Return the bytes in use on *device* once the memory of *victims* is free, or None if that is unknown."""
    theirs = [row.memory_used for row in device.processes or () if (row.pid, row.start_time) in victims]
    if device.memory_used is None or None in theirs:
        return None
    return float(device.memory_used + MEMORY_SLACK - sum(memory for memory in theirs if memory is not None))


@dataclass(frozen=True)
class PolicyStatus:
    """One condition that holds for a subject."""

    policy: str  # name
    subject: Subject
    since: float  # clock
    last: str | None  # the last step that was taken, None before the first
    next: str | None  # the step that comes if nothing changes; after the last one, the first once its cooldown is over
    due: float | None  # clock of the next step, if every sample until then finds the same
    enforce: bool  # the policy's own switch
    refused: str | None = None  # why the next step was refused when it was tried, or None if it was not
    harm: str | None = None  # the coming step that takes most from the user
    harm_due: float | None = None  # clock at which that step comes, if nothing changes
    rule: str = ""
    why: str = ""  # what was seen last, with numbers, for people

    @property
    def stage(self) -> str:
        """How far the escalation has come: found, warned, acted, or refused."""
        if self.refused:
            return "refused"
        return "acted" if self.last in HARMFUL else "warned" if self.last in MESSAGES else "found"


def policy_status(
    policies: Sequence[Policy],
    memory: EngineMemory,
    put_off: Mapping[tuple[str, Subject], tuple[int, float]],
    refused: Mapping[tuple[str, Subject], tuple[int, str]] | None = None,
    kept: Kept | None = None,
) -> tuple[PolicyStatus, ...]:
    """Return every condition that holds, the oldest first.

    Args:
        policies: all of them.
        memory: of the samples so far.
        put_off: (policy, subject) -> the number of a step whose time has come, and the clock until which a check put
            it off.
        refused: (policy, subject) -> the number of a step that was not taken when it was tried, and why.
        kept: the current exemptions, with those made since the last sample; subjects that they protect are left out.
    """
    found = []
    for policy in policies:
        for subject, state in memory.states.get(policy.name, {}).items():
            key = policy.name, subject
            if kept and memory.index:
                finding = Finding(state.rule, state.subject, state.why, state.processes)
                if not drop_protected((finding,), policy, memory.index, kept)[0]:
                    continue
            found.append(_status_of(policy, state, put_off.get(key), (refused or {}).get(key)))
    return tuple(sorted(found, key=lambda status: status.since))


def _status_of(
    policy: Policy, state: EscalationState, put_off: tuple[int, float] | None, refused: tuple[int, str] | None
) -> PolicyStatus:
    steps, done, due = policy.steps, state.done, None
    if state.resting:
        pass  # no step comes while only the pause lasts
    elif put_off:
        done, due = put_off
    elif state.done < len(steps):
        due = _due(policy, state)
        due = None if due is None else max(due, state.held_until)
    elif steps:
        due = state.stepped_at + policy.cooldown + policy.hold + steps[0].after
    number = done % len(steps) if steps else 0
    asked = state.terminated_at if number else None
    coming = _upcoming(policy, replace(state, done=number, terminated_at=asked), due) if due is not None else []
    waits = bool(steps) and due is None and not state.resting
    harm = worst_step(coming)
    return PolicyStatus(
        policy.name,
        state.subject,
        state.since,
        last=steps[done - 1].action if done else None,
        next=coming[0][0] if coming else steps[number].action if waits else None,
        due=coming[0][1] if coming else None,
        enforce=policy.enforce,
        refused=refused[1] if refused and refused[0] == number else None,
        harm=harm[0] if harm else None,
        harm_due=harm[1] if harm else None,
        rule=state.rule,
        why=state.why,
    )
