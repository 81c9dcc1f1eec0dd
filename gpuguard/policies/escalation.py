"""What is remembered from one sample to the next: since when a condition holds, and which step came last.

A Memory is never written to disk: after a restart every ladder begins at its first step.  Does not judge: see engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuguard.model import GpuProcess, Subject
from gpuguard.policies.policy import KILL_AFTER, Policy, Step
from gpuguard.policies.series import Past, Rhythm
from gpuguard.policies.view import SampleIndex, SubjectIdentity

FEWEST_SAMPLES = 2  # a condition that was seen once never fires, however short `for` is


@dataclass
class EscalationState:
    """A condition that holds for a subject, sample after sample, and how far up the ladder that has led."""

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
    rhythm: Rhythm = field(default_factory=Rhythm)
    pinned: dict[str, Policy] = field(default_factory=dict)
    standings: dict[str, dict[SubjectIdentity, EscalationState]] = field(default_factory=dict)  # by policy
    cooling: dict[tuple[str, SubjectIdentity], float] = field(default_factory=dict)  # until which clock
    # whose condition still holds after the last step: for people who ask, by policy
    spent: dict[str, dict[SubjectIdentity, EscalationState]] = field(default_factory=dict)
    effects: dict[tuple[bool, str], Effect] = field(default_factory=dict)  # by (enforced, uuid)
    kept: dict[tuple[str, int | str], float] = field(default_factory=dict)  # until which clock
    found: dict[str, frozenset[SubjectIdentity]] = field(default_factory=dict)  # in the last sample, by policy
    sight: SampleIndex | None = None  # of the last sample

    def forget_what_is_over(self, clock: float) -> None:
        """Drop what can have no consequence any more."""
        self.kept = {mark: until for mark, until in self.kept.items() if until > clock}
        self.cooling = {name: until for name, until in self.cooling.items() if until > clock}

    def start_anew(self, clock: float) -> None:
        """Drop what was seen before a pause: nobody knows what happened in it."""
        self.past.clear()
        self.standings.clear()
        self.found.clear()
        self.spent.clear()
        if self.rhythm.clock is not None and clock < self.rhythm.clock:
            # Another boot: times of the one before say nothing.  Marks stay, since they only protect.
            self.cooling.clear()
            self.effects.clear()


def next_step(standing: EscalationState, policy: Policy, clock: float) -> tuple[Step, float] | None:
    """The step of the ladder that is due now, and since when it is; None when none is."""
    if standing.done >= len(policy.steps) or standing.samples < FEWEST_SAMPLES or clock - standing.since < policy.hold:
        return None
    step = policy.steps[standing.done]
    due = (standing.stepped_at if standing.done else standing.since + policy.hold) + step.after
    if step.action == "kill":
        # The policy was checked for this when it was made; a SIGKILL too early cannot be taken back.
        if standing.terminated_at is None:
            return None
        due = max(due, standing.terminated_at + KILL_AFTER)
    return (step, due) if clock >= due else None


def climb(
    standing: EscalationState, policy: Policy, memory: EngineMemory, identity: SubjectIdentity, clock: float
) -> None:
    """The step that was due is asked for; the last one ends the ladder and begins its cooldown."""
    if policy.steps[standing.done].action == "terminate":
        standing.terminated_at = clock
    standing.done += 1
    _stand(standing, policy, memory, identity, clock)


def pass_over(
    standing: EscalationState, policy: Policy, memory: EngineMemory, identity: SubjectIdentity, clock: float
) -> None:
    """The step that was due means nobody here; nor does a kill that would come after a terminate of nobody."""
    standing.done += 1
    if standing.terminated_at is None:
        while standing.done < len(policy.steps) and policy.steps[standing.done].action == "kill":
            standing.done += 1
    _stand(standing, policy, memory, identity, clock)


def _stand(
    standing: EscalationState, policy: Policy, memory: EngineMemory, identity: SubjectIdentity, clock: float
) -> None:
    standing.stepped_at = clock
    if standing.done == len(policy.steps):
        memory.spent.setdefault(policy.name, {})[identity] = memory.standings[policy.name].pop(identity)
        memory.cooling[policy.name, identity] = clock + policy.cooldown
