"""What policies would have done: the same rules and the same engine, on samples of another time or of a test.

A process that is terminated in a rehearsal is gone from its next sample on, with its memory, and so is a claim that
is released; no user reacts to a warning, so the figures are the worst case.  The checks right before a signal (see
preflight) are not rehearsed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuguard.backtest.recordings import Numbering, RecordedRow, Recording, views_of
from gpuguard.locale import N_
from gpuguard.model import NoteKind, ProcessIdentity, Snapshot, Verdict
from gpuguard.policies.action_kinds import ENDING_ACTIONS, HARMFUL, MESSAGES
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.policy import Judgement, Policy
from gpuguard.policies.view import LARGEST_DISTANCE, RuleView, identities

HELD = 2**30  # bytes above which a device counts as held; a driver keeps less than that for itself


@dataclass(frozen=True)
class Act:
    """A step that would have been taken."""

    time: float  # of the sample, seconds as in the recording
    host: str
    policy: str
    action: str
    jobs: tuple[str, ...]  # those that it would have hit; () if it is about a device or a claim alone
    user: str | None
    device: str | None
    since: float  # when the condition began to hold, in the same seconds as time
    why: str


@dataclass(frozen=True)
class PredictedEnd:
    """A job that a policy would have ended, and what it really did afterwards."""

    job: str
    host: str
    user: str
    policy: str
    time: float
    freed: float  # GPU-seconds for which it held a device and did nothing with it
    lost: float  # GPU-seconds in which it worked


@dataclass(frozen=True)
class Backtest:
    """The result of a backtest."""

    acts: tuple[Act, ...] = ()  # in the order of time
    endings: tuple[PredictedEnd, ...] = ()  # in the order of time, each job once
    held: float = 0.0  # GPU-seconds for which all jobs together held devices
    longest_gap: float = 0.0  # seconds without a sample after which durations started anew
    holes: int = 0  # how often that was the case, at most
    notes: Mapping[NoteKind, int] = field(default_factory=dict)  # kind -> how often it was the reason not to act


def blind_spots(recording: Recording, policies: Iterable[Policy]) -> list[tuple[str, str, str]]:
    """Return (policy, rule, what the recording does not tell) for each rule that finds nothing in any table."""
    if recording.replayed:
        return []
    found = []
    for policy in policies:
        for rule in policy.rules:
            needs, kind = rule.needs, rule.kind
            missing = kind.not_in_tables if kind.name not in recording.columns else ""
            if needs.claims or needs.scheduler:
                missing = N_("who had claimed what") if needs.claims else N_("what a scheduler gave out")
            elif needs.host:
                missing = N_("what processes did on the CPU and the network")
            if missing:
                found.append((policy.name, kind.name, missing))
    return found


def backtest(
    recording: Recording,
    policies: Sequence[Policy],
    uid_of: Numbering,
    *,
    longest_gap: float | None = None,
    zone: float = 0.0,
    advance: Callable[[float], None] = lambda share: None,
    desktop_memory: int | None = None,
) -> Backtest:
    """Judge a whole recording, every machine with a memory of its own, by all *policies*, enforced or not.

    *uid_of* gives users their numbers, as it did for the policies.  *longest_gap* is the seconds without a sample after
    which durations start anew; 3 intervals, as in the daemon, if None.  *zone* is in seconds east of UTC.  *advance*
    gets the share that has been judged.  *desktop_memory* is as for rehearse().
    """
    gap = LARGEST_DISTANCE * recording.interval if longest_gap is None else longest_gap
    acts: list[Act] = []
    notes = Counter[NoteKind]()
    judged, interval = 0, gap / LARGEST_DISTANCE
    for views in views_of(recording, uid_of):
        for view, judgement in rehearse(views, policies, interval=interval, zone=zone, desktop_memory=desktop_memory):
            acts += [_act(verdict, view, recording) for verdict in judgement.verdicts]
            notes.update(note.kind for note in judgement.notes)
            judged += sum(len(device.processes or ()) for device in view.snapshot.devices)
            advance(judged / len(recording.rows))
    acts.sort(key=lambda act: act.time)

    jobs = recording.jobs()
    endings: dict[tuple[str, str], PredictedEnd] = {}
    for act in acts:
        for job in act.jobs if act.action in ENDING_ACTIONS else ():
            if (act.host, job) not in endings:
                later = [row for row in jobs[act.host, job] if row.time > act.time]
                lost = sum(map(_works, later)) * recording.interval
                freed = sum(_is_held(row) and not _works(row) for row in later) * recording.interval
                user = jobs[act.host, job][0].user
                endings[act.host, job] = PredictedEnd(job, act.host, user, act.policy, act.time, freed, lost)
    held = sum(_is_held(row) for rows in jobs.values() for row in rows) * recording.interval
    return Backtest(tuple(acts), tuple(endings.values()), held, gap, recording.holes(gap), notes)


def _act(verdict: Verdict, view: RuleView, recording: Recording) -> Act:
    finding, time = verdict.finding, view.snapshot.taken_at
    users = sorted({process.user for process in finding.processes if process.user})
    return Act(
        time,
        view.snapshot.host,
        verdict.policy,
        verdict.action,
        tuple(dict.fromkeys(map(recording.job_of, finding.processes))),
        finding.subject.user or ", ".join(users) or None,
        (finding.subject.device or "").removeprefix("GPU-") or None,
        time - (view.clock - verdict.since),
        finding.why,
    )


def _works(row: RecordedRow) -> bool:
    return row.utilization is not None and row.utilization > 0


def _is_held(row: RecordedRow) -> bool:
    return row.memory is not None and row.memory > HELD


def rehearse(
    views: Iterable[RuleView],
    policies: Sequence[Policy],
    *,
    interval: float,
    zone: float = 0.0,
    desktop_memory: int | None = None,
) -> Iterator[tuple[RuleView, Judgement]]:
    """Yield each sample as it was judged, with the judgement; what that ends is missing from the next sample.

    *views* are of one machine, with a clock that rises.  *interval* is in seconds; after more than three without a
    sample, durations start anew.  *zone* is in seconds east of UTC.  *desktop_memory* is the one of the policy file, or
    None for the one that was valid when the sample was taken.
    """
    memory = EngineMemory()
    gone: set[ProcessIdentity] = set()
    released: set[tuple[int | None, str | None]] = set()
    for view in views:
        if desktop_memory is not None:
            devices = tuple(replace(device, desktop_memory=desktop_memory) for device in view.snapshot.devices)
            view = replace(view, snapshot=replace(view.snapshot, devices=devices))
        left = replace(view, snapshot=_without(view.snapshot, gone, released)) if gone or released else view
        judgement = evaluate(left, policies, memory, interval=interval, zone=zone)
        refused = [verdict for verdict in judgement.verdicts if _is_refused(verdict)]
        for verdict in refused:
            memory.not_taken(verdict, view.clock)
        judgement = replace(judgement, verdicts=tuple(each for each in judgement.verdicts if each not in refused))
        for verdict in judgement.verdicts:
            if verdict.action in MESSAGES:
                memory.told(verdict)
            if verdict.action in ENDING_ACTIONS:
                gone |= identities((*verdict.finding.processes, *verdict.rest))
            if verdict.action == "release":
                released.add((verdict.finding.subject.uid, verdict.finding.subject.claim))
        yield left, judgement


def _is_refused(verdict: Verdict) -> bool:
    """Return whether the guard would do nothing, because it never takes anything away from root."""
    subject, processes = verdict.finding.subject, verdict.finding.processes
    people = {(row.uid, row.user) for row in processes} or {(subject.uid, subject.user)}
    return verdict.action in HARMFUL and all(uid == 0 or user == "root" for uid, user in people)


def _without(snapshot: Snapshot, gone: set[ProcessIdentity], released: set[tuple[int | None, str | None]]) -> Snapshot:
    devices = []
    for device in snapshot.devices:
        processes = device.processes or ()
        left = tuple(process for process in processes if (process.pid, process.start_time) not in gone)
        if len(left) < len(processes):
            freed = sum(process.memory_used or 0 for process in processes if process not in left)
            memory = None if device.memory_used is None else max(0, device.memory_used - freed)
            device = replace(
                device, processes=left, memory_used=memory, utilization=device.utilization if left else 0.0
            )
        devices.append(device)
    # A claim lives as long as the process that made it, unless it is released.
    pids = {pid for pid, _ in gone}
    claims = (claim for claim in snapshot.claims if claim.pid not in pids and (claim.uid, claim.id) not in released)
    return replace(snapshot, devices=tuple(devices), claims=tuple(claims))
