"""What an admin decides: a policy is rules, whom it is about, how long they must hold, and the steps of its escalation.

Decoded already: seconds, percent, uids.  Does not read files (see files.loader) and does not judge (see engine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding, Subject, Verdict
from gpuguard.policies import Rule

# What actions take away, each set within the next; what they do stands in enforcement.actions.
ENDING = frozenset({"terminate", "kill", "cancel"})  # the process is gone afterwards
DISRUPTIVE = ENDING | {"pause"}  # a person in front of the process is given time, and few are hit in an hour
DESTRUCTIVE = DISRUPTIVE | {"release"}  # one per device at a time, until its effect is seen
HARMFUL = DESTRUCTIVE | {"deny"}  # takes something away from a user
COUNTED = HARMFUL | {"quarantine"}  # by the breaker: too many at once are a mistake

# Steps that are taken on processes.  Where none is meant they would only delay a step that is.
ON_PROCESSES = frozenset({"checkpoint", "terminate", "kill", "pause", "resume", "renice"})

# Seconds between SIGTERM and SIGKILL.  A job needs them to write its checkpoint and the driver to give memory back;
# a SIGKILL in the middle of that has wedged devices (NVIDIA/dcgm-exporter#84).
# The guard and signals by hand keep to it, whatever a policy says.
KILL_AFTER = 30.0

Options = tuple[tuple[str, float | int | str | bool | None], ...]


@dataclass(frozen=True)
class Step:
    """One step of an escalation.

    Args:
        action: name in the table of actions.
        after: seconds since the step before was asked for; of the first step: since the condition has held for `hold`.
        options: of the action: signal, to, message, ...
    """

    action: str
    after: float = 0.0
    options: Options = ()


@dataclass(frozen=True)
class Scope:
    """Whom a policy is about, or whom it spares.  All keys that are given must match; None = not given.

    An empty set matches nobody.  Unknown facts never match for `only`, and always match for `except`.

    Args:
        users: uids.
        groups: names.
        devices: an index, a uuid or the beginning of one.
        models: patterns of device names, like --model.
        kinds: of processes: interactive, batch, container.
        until: unix time from which on an exemption is over.
    """

    users: frozenset[int] | None = None
    groups: frozenset[str] | None = None
    devices: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    kinds: frozenset[str] | None = None
    until: float | None = None


@dataclass(frozen=True)
class Policy:
    """When these rules hold for so long, take these steps.

    Args:
        name: unique.
        rules: conditions, at least one.
        join: "all" or "any" of them must hold.
        hold: seconds that the whole condition must hold, over consecutive valid samples.
        start_grace: seconds for which a new process or claim is innocent.
        only: whom it is about; everybody by default.
        exempt: whom it spares; each with its own end.
        devices_at_least: on so many devices of the same user the condition must hold at once.
        hours: (begin, end) in seconds since local midnight; an end before the begin means the next morning.
        days: 0 = Monday; with hours over midnight it is the day on which they begin.
        claimed_above: percent of the devices that must be claimed, and more than that.
        at_most_users: more due for a destructive step at once: nobody.
        at_most_processes: likewise.
        some_beyond: when more are due, as many as allowed are hit, the oldest breach first, instead of nobody.
        cooldown: seconds after the last step in which the subject is left alone.
        enforce: False: its verdicts are for the log only.
        steps: the escalation.

    Raises:
        InvalidRequest: it contradicts itself; so does a kill without a terminate KILL_AFTER before it.
    """

    name: str
    rules: tuple[Rule, ...]
    join: str = "all"
    hold: float = 30.0
    start_grace: float = 0.0
    only: Scope = field(default_factory=Scope)
    exempt: tuple[Scope, ...] = ()
    devices_at_least: int = 1
    hours: tuple[float, float] | None = None
    days: frozenset[int] | None = None
    claimed_above: float | None = None
    at_most_users: int = 3
    at_most_processes: int = 5
    some_beyond: bool = False
    cooldown: float = 0.0
    enforce: bool = False
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not self.rules:
            raise InvalidRequest(f"policy {self.name} has no rule: say in `when` what must be the case.")
        if self.join not in ("all", "any"):
            raise InvalidRequest(f"policy {self.name} joins its rules by {self.join!r}: write all or any.")
        times = (self.hold, self.start_grace, self.cooldown, *(step.after for step in self.steps))
        if not all(0 <= seconds < float("inf") for seconds in times):
            raise InvalidRequest(f"policy {self.name} has a duration that is negative or endless.")
        since_terminate: float | None = None
        for step in self.steps:
            since_terminate = None if since_terminate is None else since_terminate + step.after
            if step.action == "kill" and (since_terminate is None or since_terminate < KILL_AFTER):
                raise InvalidRequest(
                    f"policy {self.name} kills without warning: "
                    f"put a `terminate` at least {KILL_AFTER:.0f}s before the `kill`."
                )
            if step.action == "terminate":
                since_terminate = 0.0


def why_inapplicable(step: Step, finding: Finding) -> str | None:
    """Why a step is passed over for whom a rule has found: it has nothing there that it could act on."""
    peopled = bool(finding.processes) or finding.subject.kind == "process"
    if step.action in ON_PROCESSES and not peopled:
        return f"{step.action} is passed over: no process is meant" + (
            " (a claim is taken back by `release`)" if finding.subject.kind == "claim" else ""
        )
    if step.action == "release" and (peopled or finding.subject.claim is None):
        return "release is passed over: " + ("processes are meant" if peopled else "no claim is meant")
    return None


@dataclass(frozen=True)
class Note:
    """What was not acted on, and why.

    Args:
        kind: a key of NOTES.
        text: a sentence without a full stop.
        policy: its name; None when it is about the sampling as such.
        subject: who is left alone; None when it is everybody.
    """

    kind: str
    text: str
    policy: str | None = None
    subject: Subject | None = None


NOTES: Mapping[str, str] = {
    "gap": "it could not be seen whether the condition still holds",
    "resampling": "samples are missing or came out of order, so nobody knows what was in between",
    "unknown": "who the process is is not known",
    "exempt": "inside `except`",
    "kept": "a user asked to keep it",
    "grace": "younger than start_grace",
    "devices": "on fewer devices than devices_at_least",
    "hours": "outside the hours or days of the policy",
    "load": "not so much of the node is claimed",
    "cleared": "the condition holds no more, the escalation is cancelled",
    "cancelled": "the policy is gone or was changed, the escalation is cancelled",
    "cooldown": "the last step is not long ago",
    "breaker": "too many would be acted on at once, so nobody is",
    "nobody": "a step has nothing there that it could act on, so the next one is waited for",
    "waiting": "another step on the same device has not shown its effect yet",
}


@dataclass(frozen=True)
class Judgement:
    """What one sample led to: what is to be done now, and what is not and why.  Both in a stable order."""

    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[Note, ...] = ()
