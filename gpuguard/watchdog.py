"""The watchdog: sample -> judge -> act -> record, again and again.  step() is the whole program.

Policies decide, actions do, and both leave an Event, so this file only passes things on: it fills the view that rules
judge by, keeps the engine's memory between samples, and chooses when to sample next.  It reads no policy files: see
daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from typing import TypeVar

from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.holders import hidden_claim_text
from gpuguard.claims.records import ClaimWatcher, FirstSeen
from gpuguard.device_state import Processes, claims_readable, user_label
from gpuguard.enforcement import actions
from gpuguard.enforcement.guard_limits import JOBS_PER_HOUR, JOBS_PER_MINUTE, AuditQuota, PastAction
from gpuguard.enforcement.identity import Protected, is_alive
from gpuguard.enforcement.pauses import Pause, Pauses
from gpuguard.enforcement.preflight import ActionContext, Notifier, memory_is_back
from gpuguard.errors import BackendError
from gpuguard.history import audit_log
from gpuguard.host import HostUses, groups_of_users
from gpuguard.locale.messages import sentence
from gpuguard.model import (
    WHO_FIELDS,
    ClaimRecord,
    Event,
    EventOutcome,
    Finding,
    ProcessIdentity,
    Snapshot,
    Subject,
    Verdict,
)
from gpuguard.notify.templates import ENGLISH, LONGEST_KEEP, TEMPLATES, Template
from gpuguard.policies import engine
from gpuguard.policies.action_kinds import COUNTED, ENDING_ACTIONS, HARMFUL
from gpuguard.policies.engine import EngineMemory, PolicyStatus, policy_status
from gpuguard.policies.policy import NOTES, Judgement, Kept, KeptMark, Note, Policy
from gpuguard.policies.rule import RuleKind
from gpuguard.policies.rules import RULES, Needs, needs_of
from gpuguard.policies.usage import strangers
from gpuguard.policies.view import JobMember, MachineUse, RuleView, alone, member_of, process_subject
from gpuguard.procfs import boot_clock, process_facts, stat_of
from gpuguard.source import with_claims
from gpuguard.units import format_duration, parse_host_memory_amount
from gpuguard.users import accountable_uids, user_name

T = TypeVar("T")

INTERVAL = (2.0, 10.0)  # seconds, shortest and longest, between two samples
RISING_MEMORY = 0.02  # of a device's memory: sample again soon if its use has risen by more than this
RISING_CELSIUS = 3.0
SLOWER = 1.5  # the factor by which the pause grows after each sample in which nothing rose
DRIVER_RETRY_SECONDS = 60.0  # at most, between two tries to reach a driver that does not answer

BREAKER = RuleKind(
    "breaker",
    innocent=True,
    advice={
        "en": "Look whether what the policy judges by is right: `gpuguard who --fresh`, `gpuguard doctor`.",
        "zh": "请检查策略所依据的数据是否正确：`gpuguard who --fresh`、`gpuguard doctor`。",
    },
)  # it is no rule, but has everything that a message says about one

PendingKey = tuple[str, Subject]  # name of a policy and the subject of a verdict


@dataclass(frozen=True, kw_only=True)
class SiteRules:
    """All that a policy file tells a watchdog: one value, so that half of one file never meets half of another."""

    policies: tuple[Policy, ...] = ()
    interval: tuple[float, float] = INTERVAL  # seconds, shortest and longest, between two samples
    protected: Protected = field(default_factory=Protected)  # the users and programs that are never touched
    per_minute: int = JOBS_PER_MINUTE  # the most jobs that are signalled
    per_hour: int = JOBS_PER_HOUR  # the most jobs that are ended
    longest_keep: float = LONGEST_KEEP  # seconds for which users may exempt what is theirs
    notifier: Notifier | None = None  # sends messages, as notify.Sender
    personal: frozenset[str] = frozenset()  # names of its targets that write to the user who is meant
    language: str = ENGLISH  # of what is written to terminals
    templates: Mapping[str, Template] = field(default_factory=lambda: TEMPLATES)  # by language

    @cached_property
    def needs(self) -> Needs:
        """What the policies need."""
        return needs_of(self.policies)


class Watchdog:
    """Guards the devices of this machine by policies, in a thread of its own or in the caller's.

        with Watchdog(open_backend("nvml"), policies, on_event=print):
            ...

    Args:
        backend: where samples come from; better one in a process of its own, because drivers hang.
        policies: decoded.  They may be replaced at any time; the escalations of a policy that changed start anew.
        directory: of the claims, or None: then no claims are known, and nothing is judged by them.
        enforce: the first of two switches; the policy has the other.  Without it everything happens but the last call.
        on_event: called with each Event, after it was written down.
        on_sample: called with each snapshot and the seconds until the next one.
        notifier: sends messages, as notify.Sender.
        interval: (shortest, longest) seconds between samples.
        append: writes an Event down and returns whether it could; if not, nothing is done.
        share_host_pids: whether to act although this is not the first pid namespace, because its pids are the driver's.
    """

    extra_fields: Callable[[], frozenset[str]] = frozenset  # groups of fields that others want in the next sample

    def __init__(
        self,
        backend: Backend,
        policies: Sequence[Policy] = (),
        directory: LockDirectory | None = None,
        *,
        enforce: bool = False,
        on_event: Callable[[Event], object] | None = None,
        on_sample: Callable[[Snapshot, float], object] | None = None,
        notifier: Notifier | None = None,
        interval: tuple[float, float] = INTERVAL,
        append: Callable[[Event], bool] = audit_log.append,
        share_host_pids: bool = False,
    ) -> None:
        # Any thread may replace this value at any time, because a step reads it once, at its beginning.
        self.site_rules = SiteRules(policies=tuple(policies), interval=interval, notifier=notifier)
        self.kept: Kept = {}  # exempted by `gpuguard keep`
        self.gpu_seconds: Callable[[], Mapping[int, Mapping[float, float]]] = dict  # as in RuleView, for each sample
        self.scheduled: Callable[[Snapshot], Mapping[str, frozenset[int]] | None] = lambda snapshot: None  # likewise
        self.only_looks = False  # runs beside another guard, which sets and lifts quarantines
        self.pause = interval[0]  # seconds to the next sample
        self.last_round = time.monotonic()  # when the loop last came round
        self.problem: str | None = None  # why there is no sample, in words
        self._backend, self._directory = backend, directory
        self._on_event, self._on_sample, self._append = on_event, on_sample, append
        self._memory, self._host, self._needs = EngineMemory(), HostUses(), self.site_rules.needs
        self._claims, self._first_seen = ClaimWatcher(), FirstSeen()
        self._judging = threading.Lock()  # held while _memory and _judged_by change
        self._judged_by = SiteRules()  # the rules of the last step, which _memory is about
        self._view: RuleView | None = None
        # (uuid, pid) of a listed process that has ended -> samples in a row, and the user it belonged to
        self._ended: dict[tuple[str, int], tuple[int, str | None]] = {}
        self._hidden = set[str]()  # ids of claims that count as none
        self._there_first = set[tuple[Subject, int, str]]()  # processes that were there before a claim
        self._pending: dict[PendingKey, list[tuple[Policy, Verdict]]] = {}
        self._deferred: dict[PendingKey, tuple[int, float]] = {}  # by a check: the step, and until which clock
        self._refused: dict[PendingKey, tuple[int, str]] = {}  # the step that was tried but not taken, and why
        self._noted: set[tuple[str, str | None, Subject | None]] = set()
        self._quota, self._reported = AuditQuota(), dict[str, float]()  # when a policy was last reported to fail
        self._awaited = list[PastAction]()  # actions that ended processes, until their effect is written down
        self._pauses = Pauses(directory, self._record)
        self._context = ActionContext(
            backend,
            self._record,
            self._still_true,
            enforce=enforce,
            share_host_pids=share_host_pids,
            arrived=lambda device, process: self._memory.arrivals.arrived(device, process),
            member=self._member,
            directory=directory,
            pauses=self._pauses,
        )
        self._acting = self._context  # as of the last step: with its protected users, texts and targets
        self._unpublished, self._stop = list[Event](), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of site_rules, which you may also set here."""
        return self.site_rules.policies

    @policies.setter
    def policies(self, policies: Sequence[Policy]) -> None:
        self.site_rules = replace(self.site_rules, policies=tuple(policies))

    def step(self) -> Judgement:
        """Sample once, do what is due, and return the judgement.  Raises BackendError if nothing could be read."""
        rules, before, limits = self.site_rules, self._view, self._context.limits
        limits.per_minute, limits.per_hour = rules.per_minute, rules.per_hour
        self._needs = rules.needs
        snapshot = self._with_claims(self._backend.sample(self._needs.fields | self.extra_fields()))
        self._note_ended(snapshot)
        self._memory.kept, self._memory.unkillable = dict(self.kept), frozenset(limits.unkillable)
        self._view = self._view_of(snapshot, rules.policies)
        with self._judging:
            judgement = engine.evaluate(
                self._view,
                rules.policies,
                self._memory,
                interval=rules.interval[1],
                zone=_zone(snapshot.taken_at),
                isolate=self._isolate,
            )
            self._judged_by = rules
        is_new = before is None or before.snapshot.clock != snapshot.clock
        if is_new and any(note.kind == "resampling" for note in judgement.notes):
            self._drop(self._pending)  # steps that waited through a pause without samples have no reason any more
        self._act(judgement.verdicts, rules)
        self._write_effects(snapshot)
        self._end_pauses(owed=self._context.enforce)  # else they are of a guard beside which this one only looks
        self._note(judgement.notes)
        self._note_there_first(self._view, rules.policies)
        self.pause = pace(before.snapshot if before else None, snapshot, self.pause, rules.interval)
        self._publish()
        if self._on_sample:
            self._on_sample(snapshot, self.pause)
        return judgement

    def status(self) -> tuple[PolicyStatus, ...]:
        """Return every condition that holds as of the last sample.  Any thread may call this."""
        with self._judging:
            return policy_status(self._judged_by.policies, self._memory, self._deferred, self._refused, dict(self.kept))

    def processes(self, snapshot: Snapshot) -> Processes:
        """Return what /proc says about the processes of *snapshot*, read now if the last step did not read it."""
        view = self._view
        return view.seen if view and view.seen and view.snapshot is snapshot else process_facts(snapshot)

    def run(self, stop: threading.Event) -> None:
        """Repeat step() until *stop* is set, whatever happens."""
        failures = 0
        self._end_pauses(sentence("pause.guard_started", "the guard was started again"))
        while not stop.is_set():
            begun = time.monotonic()
            try:
                self.step()
                failures = 0
                self._report_problem(None)
            except Exception as error:  # noqa: BLE001  the one catch of the loop: a dead guard guards nothing
                # Only failures of the driver make pauses longer and longer.  A fault of ours is no load on the driver,
                # and no time would count between samples that come too seldom.
                failures = failures + 1 if isinstance(error, BackendError) else 0
                self.pause = min(DRIVER_RETRY_SECONDS, self.site_rules.interval[1] * 2 ** min(failures, 8))
                with suppress(Exception):  # which the callback raises
                    self._report_problem(error)
                if self._view and boot_clock() - self._view.clock > engine.LONGEST_PAUSE:
                    self._end_pauses(sentence("pause.unknown", "whether its condition holds has been unknown for long"))
            self.last_round = time.monotonic()
            stop.wait(max(0.01, self.pause - (self.last_round - begun)))

    def remember(self, past: Iterable[PastAction], last: Snapshot | None = None) -> None:
        """Count *past* actions, the oldest first, towards the limits as if this watchdog had done them.

        *last* is the last snapshot in this boot of the watchdog before this one, so that claims keep the age it knew.
        """
        for action in past:
            self._context.limits.record(action)
        if last is not None and claims_readable(last):
            self._first_seen.remember(last)

    def keep(
        self, until_clock: float, *, uid: int | None = None, claim: str | None = None, device: str | None = None
    ) -> None:
        """Leave a user, a claim or a device alone until CLOCK_BOOTTIME passes *until_clock*.

        With *uid* and *device*, only that user is left alone on that device.  Any thread may call this.
        """
        marks = {("uid", uid), ("claim", claim), ("device", device)}
        if uid is not None and device is not None:
            marks = {("claim", claim), ("uid on device", f"{uid} {device}")}
        # A new dict each time, because a step that is under way goes on reading the one that it has.
        mark = KeptMark(until_clock)
        self.kept = {**self.kept, **{(kind, name): mark for kind, name in marks if name is not None}}

    def start(self) -> None:
        """Run in a thread of its own, until stop() or the end of the process."""
        self._stop.clear()
        self._thread = threading.Thread(target=self.run, args=(self._stop,), name="gpuguard-watchdog", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> bool:
        """Take no further step, and return whether the one that was under way has ended within *seconds*."""
        self._stop.set()
        if self._thread:
            self._thread.join(seconds)
        self._end_pauses(sentence("pause.guard_ends", "the guard ends"))
        return not (self._thread and self._thread.is_alive())

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _with_claims(self, snapshot: Snapshot) -> Snapshot:
        joined = with_claims(snapshot, lambda: self._directory, self._claims.probe)
        if not claims_readable(joined):
            return joined
        if self._directory:
            self._note_hidden(self._directory, joined.claims)
        return replace(joined, claims=self._first_seen.dated(joined.claims, snapshot.clock, snapshot.taken_at))

    def _note_hidden(self, directory: LockDirectory, claims: Iterable[ClaimRecord]) -> None:
        """Leave an Event for each claim that counts as none (see ClaimRecord.hidden), once while that lasts."""
        before, self._hidden = self._hidden, {claim.id for claim in claims if claim.hidden}
        for claim in claims:
            if claim.id in self._hidden - before:
                text = (
                    sentence(
                        "claim.of_several_users",
                        "the lock of the GPU is held by processes of {users} together, and no record says whose it is"
                        ".  It counts as no claim, and is free when all of them have ended",
                        users=claim.user,
                    )
                    if claim.holders
                    else hidden_claim_text(map(directory.lock_path, claim.slots or claim.devices))
                )
                self._record(
                    Event(
                        time=time.time(),
                        kind="claim",
                        outcome="held by several users" if claim.holders else "hidden",
                        devices=claim.devices,
                        claim=claim.id,
                        message=text,
                    )
                )

    def _note_there_first(self, view: RuleView, policies: Sequence[Policy]) -> None:
        """Leave one Event for each process that is no trespasser because it was there before the claim."""
        judged = any(rule.kind.finds_trespassers for policy in policies for rule in policy.rules)
        there_first = {
            (process_subject(device, process), claim.uid, claim.id): (device, process, claim)
            for device, process, claims in (strangers(view) if judged else ())
            for claim in claims
            if self._memory.arrivals.was_there_before(claim, device, process)
        }
        for key in there_first.keys() - self._there_first:
            device, process, claim = there_first[key]
            text = sentence(
                "claim.others_first",
                "no trespasser on the claim of {user}: the process used the GPU before the claim came, or may have",
                user=user_label(claim.user, claim.uid),
            )
            self._record(
                Event(
                    time=time.time(),
                    kind="claim",
                    outcome="others were there first",
                    user=process.user,
                    devices=(device.uuid,),
                    pid=process.pid,
                    claim=claim.id,
                    message=text,
                    facts=(("uid", process.uid),),
                )
            )
        self._there_first = set(there_first)

    def _note_ended(self, snapshot: Snapshot) -> None:
        """Leave an Event for each process that the driver still lists after its end, once while that lasts.

        It comes at the second sample, because any process may end between the driver's list and the look at /proc.
        """
        known, self._ended = self._ended, {}
        before = self._view.snapshot.devices if self._view else ()
        users = {row.pid: row.user for device in before for row in device.processes or ()}
        for uuid, row in [(device.uuid, row) for device in snapshot.devices for row in device.processes or ()]:
            if row.ended:
                samples, user = known.get((uuid, row.pid), (0, users.get(row.pid)))
                self._ended[uuid, row.pid] = samples + 1, user
                if samples == 1:
                    text = sentence(
                        "process.listed_ended",
                        "the driver lists a process that has ended: a child of it may still hold the GPU",
                    )
                    self._record(
                        Event(
                            time=time.time(),
                            kind="note",
                            outcome="process ended",
                            user=user,
                            devices=(uuid,),
                            pid=row.pid,
                            message=text,
                        )
                    )

    def _view_of(self, snapshot: Snapshot, policies: Sequence[Policy]) -> RuleView:
        if not policies:
            return RuleView(snapshot)
        stats = {process.pid: stat_of(process.pid) for device in snapshot.devices for process in device.processes or ()}
        needs, host = self._needs, self._host
        return RuleView(
            snapshot,
            host=host.sample(snapshot, stats, debuggers=needs.kinds) if needs.host else host.pause(),
            paused=self._pauses.processes(rehearsed=not self._context.enforce),
            machine=host.machine(needs.machine) if needs.machine is not None else MachineUse(),
            groups=groups_of_users(snapshot),
            scheduled=self.scheduled(snapshot) if needs.scheduler else None,
            seen=process_facts(snapshot, stats),
            gpu_seconds=self.gpu_seconds(),
            accountable=accountable_uids(_uids(snapshot)),
            suspended=boot_clock() - time.clock_gettime(time.CLOCK_MONOTONIC),
        )

    def _member(self, process: ProcessIdentity) -> JobMember:
        """Return what the last sample says about the job of *process*."""
        index = self._memory.index
        rows = index.processes.get(process) if index else None
        return member_of(next(iter(rows.values())), index.view) if index and rows else alone(process)

    def _act(self, verdicts: Sequence[Verdict], rules: SiteRules) -> None:
        """Take the steps that are due now, and those that had to wait and still hold, each subject's in their order."""
        assert self._view is not None
        named = {policy.name: policy for policy in rules.policies}
        # A step that waits stays only if the same policy has found its condition in this sample.
        self._drop(
            (name, subject)
            for (name, subject), due in self._pending.items()
            if named.get(name) != due[0][0] or not self._memory.holds(name, subject)
        )
        for verdict in verdicts:
            waiting = self._pending.setdefault((verdict.policy, verdict.finding.subject), [])
            if all(other.step != verdict.step for _, other in waiting):  # after a cooldown a step may be due once more
                waiting.append((named[verdict.policy], verdict))
        snapshot, limits = self._view.snapshot, self._context.limits
        context = replace(
            self._context,
            notifier=rules.notifier,
            language=rules.language,
            templates=rules.templates,
            longest_keep=rules.longest_keep,
            interval=max(rules.interval[1], self.pause),
            protected=rules.protected.uids_of(_uids(snapshot), self._view.groups),
            protected_executables=rules.protected.executables,
            alarm=self._needs.targets,
        )
        self._acting = context
        if not self.only_looks:
            self._isolate("unkillable", partial(actions.give_up_unkillable, context, snapshot))
        deferred, refused = {}, {key: step for key, step in self._refused.items() if self._memory.holds(*key)}
        for key, due in sorted(self._pending.items(), key=lambda item: limits.priority(item[1][0][1])):
            while due:
                outcomes = self._isolate(key[0], partial(actions.act, due[0][1], snapshot, context))
                if waits := [outcome.wait for outcome in outcomes or () if outcome.wait is not None]:
                    deferred[key] = due[0][1].step, snapshot.clock + max(waits)
                    break  # a check asks for time: the same step is tried again after the next sample
                verdict = due.pop(0)[1]
                refused.pop(key, None)
                self._write_to_owners(verdict, outcomes or (), context)
                self._awaited += [
                    each.sent for each in outcomes or () if each.sent and verdict.action in ENDING_ACTIONS
                ]
                to_user = verdict.action == "warn" or dict(verdict.options).get("to") in rules.personal
                if to_user and any(each.word in actions.TOLD for each in outcomes or ()):
                    self._memory.told(verdict)
                if outcomes and verdict.action in COUNTED and {each.word for each in outcomes} <= actions.NOT_TAKEN:
                    refused[key] = verdict.step, outcomes[0].why or outcomes[0].word
                    with self._judging:
                        self._memory.not_taken(verdict, snapshot.clock)
                    due.clear()  # the steps after it wait until it is taken
            if not due:
                del self._pending[key]
        self._deferred, self._refused = deferred, refused

    def _drop(self, keys: Iterable[PendingKey]) -> None:
        """Forget steps that had to wait and were not taken."""
        for key in tuple(keys):
            del self._pending[key]
            with self._judging:
                self._memory.undo(*key)

    def _write_to_owners(
        self, verdict: Verdict, outcomes: Iterable[actions.ActionOutcome], context: ActionContext
    ) -> None:
        """Let the personal targets of a policy tell users what it did to them, which a warning before could not say."""
        assert self._view is not None
        done = {outcome.pid for outcome in outcomes if outcome.word in ("sent", "done")}
        policy = next((policy for policy in self._judged_by.policies if policy.name == verdict.policy), None)
        if not done or verdict.action not in HARMFUL or policy is None or not context.is_live(verdict):
            return
        finding = verdict.finding
        users = {(process.uid, process.user) for process in finding.processes if process.pid in done}
        names = dict.fromkeys(dict(step.options).get("to") for step in policy.steps)
        for name in [name for name in names if name in self._judged_by.personal]:
            for uid, user in users or {(finding.subject.uid, finding.subject.user)}:
                own = tuple(process for process in finding.processes if process.uid == uid)
                about = replace(finding, subject=replace(finding.subject, uid=uid, user=user), processes=own)
                options = (("to", name), ("done", verdict.action))
                message = replace(verdict, finding=about, action="notify", options=options)
                self._isolate(verdict.policy, partial(actions.act, message, self._view.snapshot, context))

    def _end_pauses(self, why: str | None = None, *, owed: bool = True) -> None:
        """End pauses that this guard or one before it began: all if *why* is given, else those that are over."""

        def why_over(pause: Pause, live: bool) -> str | None:
            policy = next((policy for policy in self._judged_by.policies if policy.name == pause.policy), None)
            if why or policy is None or (live and not policy.enforce):
                return why or sentence(
                    "pause.not_in_force", "the policy {policy} is not in force any more", policy=pause.policy
                )
            lasts = self._memory.pauses(policy.name, pause.process)
            return None if lasts else sentence("condition.over", "the condition does not hold any more")

        self._isolate("pauses", partial(self._pauses.settle, why_over, owed=owed))

    def _still_true(self, verdict: Verdict, snapshot: Snapshot) -> bool:
        """Return whether the condition behind *verdict* holds on a fresh *snapshot*, and its policy is unchanged."""
        policy = next((policy for policy in self.policies if policy.name == verdict.policy), None)
        if policy not in self._judged_by.policies or self._view is None or self._stop.is_set():
            return False
        self._memory.kept = dict(self.kept)  # a user may have asked for an exemption since the sample
        view, finding = replace(self._view, snapshot=snapshot), verdict.finding
        zone = _zone(snapshot.taken_at)
        holds = partial(
            engine.still_holds,
            policy,
            finding.subject,
            view,
            self._memory,
            processes=finding.processes,
            zone=zone,
        )
        if verdict.rest:  # the condition was about others of its job, which may be over by now
            holds = partial(engine.may_end_with_job, policy, verdict.rest[0], view, self._memory, zone=zone)
        return self._isolate(policy.name, holds) is True

    def _isolate(self, policy: str, do: Callable[[], T]) -> T | None:
        """Return the result of *do*, or None, with an Event, if it fails unforeseen, so that other policies go on."""
        try:
            return do()
        except Exception as error:  # noqa: BLE001  a bug that one user triggers must not help all
            now = time.monotonic()
            if now - self._reported.get(policy, -DRIVER_RETRY_SECONDS) >= DRIVER_RETRY_SECONDS:
                self._reported[policy] = now
                text = sentence(
                    "fault.policy",
                    "the policy {policy} meets a fault inside gpuguard, and the others go on: {error}",
                    policy=policy,
                    error=f"{error!r:.200}",
                )
                self._record(
                    Event(
                        time=time.time(), kind="watchdog", outcome="failed", message=text, facts=(("policy", policy),)
                    )
                )
            return None

    def _note(self, notes: Sequence[Note]) -> None:
        before, self._noted = self._noted, set()
        for note in notes:
            key = note.kind, note.policy, note.subject
            if NOTES[note.kind].recorded and key not in self._noted | before:
                subject = note.subject or Subject("node")
                self._record(
                    Event(
                        time=time.time(),
                        kind="note",
                        outcome=note.kind,
                        user=subject.user,
                        devices=(subject.device,) if subject.device else (),
                        pid=subject.pid,
                        claim=subject.claim,
                        message=note.text,
                        facts=(("policy", note.policy), ("uid", subject.uid)),
                    )
                )
                if note.kind == "breaker":
                    self._alarm(note.text, subject, note.policy or "")
            self._noted.add(key)

    def _write_effects(self, snapshot: Snapshot) -> None:
        """Leave an Event for each process that was to be ended, saying that it has ended or is still there."""
        clock, awaited = boot_clock(), self._awaited
        self._awaited = []
        for past in awaited:
            age, alive = clock - past.clock, is_alive(past.process)
            is_over = not alive and memory_is_back(past, snapshot)
            if not is_over and age < engine.EFFECT_SECONDS:
                self._awaited.append(past)
                continue
            after = format_duration(max(1, ceil(age)))
            if alive:
                text = sentence("effect.still_there", "still there after {time}", time=after)
            elif not is_over:
                text = sentence(
                    "effect.memory_in_use", "ended, but its memory is still in use after {time}", time=after
                )
            elif past.memory_used:  # otherwise it was unknown
                text = sentence("effect.memory_back", "ended within {time}, and its memory is back", time=after)
            else:
                text = sentence("effect.ended", "ended within {time}", time=after)
            self._record(
                Event(
                    time=time.time(),
                    kind=past.action,
                    outcome="still there" if alive else "ended",
                    user=None if past.uid is None else user_name(past.uid),
                    devices=past.devices,
                    pid=past.process[0],
                    message=text,
                    facts=(("policy", past.policy), ("uid", past.uid), ("start_time_seconds", past.process[1])),
                )
            )

    def _alarm(self, text: str, subject: Subject, name: str) -> None:
        """Tell the administrator, but no user, that a breaker holds a policy back."""
        assert self._view is not None
        snapshot = self._view.snapshot
        enforce = any(policy.enforce for policy in self._judged_by.policies if policy.name == name)
        for target in [target for target in self._needs.targets if target not in self._judged_by.personal]:
            verdict = Verdict(
                policy=name,
                finding=Finding(BREAKER.name, subject, text),
                action="notify",
                step=0,
                since=snapshot.clock,
                enforce=enforce,
                options=(("to", target),),
                kind=BREAKER,
            )
            self._isolate(name, partial(actions.act, verdict, snapshot, self._acting))

    def _report_problem(self, error: Exception | None) -> None:
        """Leave an Event when the loop meets a problem, when the problem changes, and when it is over."""
        message: str | None = None
        outcome: EventOutcome = "watching again"
        if isinstance(error, BackendError):
            message, outcome = str(error), "driver unresponsive"
        elif error is not None:
            message = sentence("fault.inside", "a fault inside gpuguard: {error}", error=repr(error))
            outcome = "failed"
        if message != self.problem:
            self.problem = message
            self._record(Event(time=time.time(), kind="watchdog", outcome=outcome, message=message))
            self._publish()

    def _record(self, event: Event) -> bool:
        # An event that is left out of the log still goes to the callback, because metrics count it.
        written = not self._quota.admits(event, boot_clock()) or self._append(event)
        if not written:
            # An action that is not written down is not done.
            outcome = "not done" if event.outcome == "about to" else event.outcome
            event = replace(event, outcome=outcome, recorded=False)
        self._unpublished.append(event)
        return written

    def _publish(self) -> None:
        for event in self._quota.left_out(boot_clock()):
            self._unpublished.append(event)
            self._append(event)
        # Callbacks come last, because one that fails must not come between a line of the log and its signal.
        events, self._unpublished = self._unpublished, []
        for event in events:
            if self._on_event:
                self._on_event(event)


def pace(before: Snapshot | None, now: Snapshot, pause: float, interval: tuple[float, float]) -> float:
    """Return the seconds until the next sample: the shortest pause if something rises, else longer and longer ones."""
    shortest, longest = interval
    return shortest if before is None or _rises(before, now) else min(longest, max(pause, shortest) * SLOWER)


def _rises(before: Snapshot, now: Snapshot) -> bool:
    former = {device.uuid: device for device in before.devices}
    return any(
        _rise(old.memory_used, device.memory_used) > RISING_MEMORY * (device.memory_total or float("inf"))
        or _rise(old.temperature, device.temperature) >= RISING_CELSIUS
        for device in now.devices
        if (old := former.get(device.uuid))
    )


def _rise(before: float | None, now: float | None) -> float:
    return 0.0 if before is None or now is None else now - before


def _uids(snapshot: Snapshot) -> frozenset[int]:
    """Return the uids that have processes or claims in *snapshot*."""
    users = [process.uid for device in snapshot.devices for process in device.processes or ()]
    return frozenset({uid for uid in users if uid is not None} | {claim.uid for claim in snapshot.claims})


def _zone(taken_at: float) -> float:
    """Return seconds east of UTC at the time of the snapshot: summer time may begin while the watchdog runs."""
    return float(time.localtime(taken_at).tm_gmtoff)


RECORDED_FIELDS = WHO_FIELDS.union(*(rule.kind.needs.fields for rule in RULES.values()))  # what any rule can ask for
RECORDED_LIMITS = (parse_host_memory_amount("10%"),)  # of the machine's memory: no policy is about a user who has less


class ViewReader:
    """Reads what policies judge by, for a recording; rates are since the read before.  It judges and writes nothing."""

    def __init__(self, backend: Backend, directory: LockDirectory | None) -> None:
        self._backend, self._directory, self._hosts = backend, directory, HostUses()

    def read(self) -> RuleView:
        """Read the machine now.  Raises BackendError."""
        snapshot = with_claims(self._backend.sample(RECORDED_FIELDS), lambda: self._directory)
        stats = {process.pid: stat_of(process.pid) for device in snapshot.devices for process in device.processes or ()}
        host, groups = self._hosts.sample(snapshot, stats, debuggers=True), groups_of_users(snapshot)
        machine = self._hosts.machine(RECORDED_LIMITS)
        return RuleView(snapshot, host=host, machine=machine, groups=groups, seen=process_facts(snapshot, stats))
