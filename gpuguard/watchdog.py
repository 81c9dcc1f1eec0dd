"""The watchdog: sample -> judge -> act -> record, again and again.  step() is the whole program.

Policies decide, actions do, and both leave an Event, so this file only passes things on: it fills the View that rules
judge by, keeps the Memory between samples, and chooses when to look next.  Does not read policy files: see daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from dataclasses import replace as replace_fields
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.holders import hidden_claim_text
from gpuguard.claims.records import locked_devices, probe, read_records
from gpuguard.claims.watch import FirstSeen
from gpuguard.device_state import Processes
from gpuguard.enforcement import actions
from gpuguard.enforcement.actions import give_up
from gpuguard.enforcement.identity import Protected
from gpuguard.enforcement.limits import Lines, PastAction
from gpuguard.enforcement.target import Context, Notifier, boot_clock, plain_event
from gpuguard.errors import BackendError, ClaimError
from gpuguard.history import audit_log
from gpuguard.host import HostUses
from gpuguard.model import CLOCKS, ECC, STATS, WHO_FIELDS, ClaimRecord, Event, Finding, Gap, Snapshot, Subject, Verdict
from gpuguard.notify.templates import ENGLISH, TEMPLATES
from gpuguard.policies import engine
from gpuguard.policies.engine import PolicyStatus, policy_status
from gpuguard.policies.escalation import EngineMemory
from gpuguard.policies.policy import Judgement, Note, Policy
from gpuguard.policies.rules import needs_of
from gpuguard.policies.view import RuleView, SubjectIdentity, identity_of
from gpuguard.procfs import process_facts, stats_of

if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

INTERVAL = (2.0, 10.0)  # seconds, shortest and longest, between two samples
RISING_MEMORY = 0.02  # of a device's memory, more than at the sample before: look again soon
RISING_CELSIUS = 3.0
SLOWER = 1.5  # times longer after each sample in which nothing rose
HOLDERS_SECONDS = 10.0
RETRY_SECONDS = 60.0  # at most, between two tries to reach a driver that does not answer
# The other notes say at every sample that nothing is to be done: they are for --once and for explanations.
WORTH_A_LINE = frozenset(
    {"gap", "resampling", "cleared", "cancelled", "breaker", "waiting", "kept", "exempt", "nobody"}
)

Key = tuple[str, SubjectIdentity]  # name of a policy and whom a verdict is about


class Watchdog:
    """Guards the devices of this machine by policies, in a thread of its own or in that of the caller.

        with Watchdog(open_backend("nvml"), policies, on_event=print):
            ...

    Args:
        backend: where samples come from; better one in a process of its own, because drivers hang.
        policies: decoded.  May be replaced at any time; a policy that changed loses its ladders.
        directory: of the claims; None: no claims are known, and nobody is judged by them.
        enforce: the first of two switches, the policy has the other.  Without it everything happens but the last call.
        on_event: told each Event, after it was written down.
        on_sample: told each snapshot, and the seconds until the next one.
        notifier: sends messages, as notify.Sender.
        interval: (shortest, longest) seconds between samples.
        append: writes an Event down; False when it could not, and then nothing is done.
        share_host_pids: act although this is not the first pid namespace, because its pids are the driver's.
    """

    further: Callable[[], frozenset[str]] = frozenset  # groups of fields that others want in the next sample, too

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
        self.policies, self.interval = tuple(policies), interval
        self.notifier, self.protected = notifier, Protected()  # who sends messages, and who is never touched
        self.language, self.templates = ENGLISH, TEMPLATES  # of what is written to terminals
        self.kept: Mapping[tuple[str, int | str], float] = {}  # whom to leave alone: until which CLOCK_BOOTTIME
        self.gpu_seconds: Callable[[], Mapping[int, Mapping[float, float]]] = dict  # as View has it; asked per sample
        self.scheduled: Callable[[Snapshot], Mapping[str, frozenset[int]] | None] = lambda snapshot: None  # so too
        self.pause, self.beat = interval[0], time.monotonic()  # seconds to the next sample; when the loop came round
        self.trouble: str | None = None  # why there is no sample, in words
        self._backend, self._directory = backend, directory
        self._on_event, self._on_sample, self._append = on_event, on_sample, append
        self._memory, self._host, self._first_seen, self._needs = EngineMemory(), HostUses(), FirstSeen(), needs_of(())
        self._judging = threading.Lock()  # held while the memory changes, and ...
        self._judged_by: Sequence[Policy] = ()  # ... the policies that it is about
        self._view: RuleView | None = None
        self._probed: tuple[float, object, tuple[ClaimRecord, ...]] = (0.0, None, ())
        self._hidden = set[str]()  # ids of claims whose lock no process has open
        self._due: dict[Key, list[tuple[Policy, Verdict]]] = {}
        self._put_off: dict[Key, tuple[int, float]] = {}  # by a check: which step of each, and until which clock
        self._noted: set[tuple[str, str | None, SubjectIdentity | None]] = set()
        self._lines, self._failed = Lines(), dict[str, float]()  # when a policy was said to fail: time.monotonic()
        places = (backend, self._record, self._still_true)
        self._context = Context(*places, enforce=enforce, share_host_pids=share_host_pids, directory=directory)
        self._acting = self._context  # as of the last step: with its protected users, texts and targets
        self._untold, self._stop = list[Event](), threading.Event()
        self._thread: threading.Thread | None = None

    def step(self) -> Judgement:
        """Look once, and do what is due.

        Returns:
            What was judged.

        Raises:
            BackendError: nothing could be read, so nothing was judged.
        """
        # In this order: a daemon that reads its file again sets them in that order, and nobody may lose his protection
        # while the policies that are judged by are still those which he was protected from.
        protected = self.protected
        policies, before = self.policies, self._view
        if policies is not self._needs.policies:
            self._needs = needs_of(policies)
        snapshot, lines = self._sample(policies)
        self._memory.kept = dict(self.kept)
        self._view = self._look_around(snapshot, policies, lines)
        with self._judging:
            now, memory, longest = self._view, self._memory, self.interval[1]
            zone = _zone(snapshot.taken_at)
            judgement = engine.evaluate(now, policies, memory, interval=longest, zone=zone, apart=self._apart)
            self._judged_by = policies
        if any(note.kind == "resampling" for note in judgement.notes) and not _is_same(before, self._view):
            self._due.clear()  # what waited through a pause in which nobody looked has no reason any more
        self._act(judgement.verdicts, policies, protected)
        self._note(judgement.notes)
        self.pause = pace(before.snapshot if before else None, snapshot, self.pause, self.interval)
        self._tell()
        if self._on_sample:
            self._on_sample(snapshot, self.pause)
        return judgement

    def outlook(self) -> tuple[PolicyStatus, ...]:
        """What stands against whom since the last sample; from any thread."""
        with self._judging:
            return policy_status(self._judged_by, self._memory, self._put_off)

    def seen(self, snapshot: Snapshot) -> Processes:
        """What /proc told of the processes of *snapshot*: just now, if the last step did not ask."""
        view = self._view
        return view.seen if view and view.seen and view.snapshot is snapshot else process_facts(snapshot)

    def run(self, stop: threading.Event) -> None:
        """Repeat step() until *stop* is set, whatever happens."""
        failures = 0
        while not stop.is_set():
            begun = time.monotonic()
            try:
                self.step()
                failures = 0
                self._in_trouble(None)
            except Exception as error:  # noqa: BLE001  the catch of the loop: a guard that died guards nothing
                # A fault of ours is no load on the driver; and looks that come too seldom start all durations anew.
                failures = failures + 1 if isinstance(error, BackendError) else 0
                self.pause = min(RETRY_SECONDS, self.interval[1] * 2 ** min(failures, 8))
                with suppress(Exception):  # of who listens
                    self._in_trouble(error)
            self.beat = time.monotonic()
            stop.wait(max(0.01, self.pause - (self.beat - begun)))

    def remember(self, deeds: Iterable[PastAction]) -> None:
        """Let *deeds*, the oldest first, count for the limits as if this watchdog had done them."""
        for deed in deeds:
            self._context.ledger.note(deed)

    def keep(
        self, until_clock: float, *, uid: int | None = None, claim: str | None = None, device: str | None = None
    ) -> None:
        """Leave a user, a claim or a device alone until CLOCK_BOOTTIME passes *until_clock*; from any thread.

        With *uid* and *device*: that user on that device, and nobody else there.
        """
        marks = {("uid", uid), ("claim", claim), ("device", device)}
        if uid is not None and device is not None:
            marks = {("claim", claim), ("uid on device", f"{uid} {device}")}
        # A new dict each time: a step that is under way reads the one that it has.
        self.kept = {**self.kept, **{(kind, name): until_clock for kind, name in marks if name is not None}}

    def start(self) -> None:
        """Run in a thread of its own, until stop() or the end of the process."""
        self._stop.clear()
        self._thread = threading.Thread(target=self.run, args=(self._stop,), name="gpuguard-watchdog", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> bool:
        """Take no further step; whether the one that was under way has ended within *seconds*."""
        self._stop.set()
        if self._thread:
            self._thread.join(seconds)
        return not (self._thread and self._thread.is_alive())

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _sample(self, policies: Sequence[Policy]) -> tuple[Snapshot, dict[int, bytes]]:
        """A snapshot with its claims; apart from it the stat lines of its processes, which go no further than here."""
        groups = self._needs.fields | self.further()
        snapshot = self._backend.sample(groups | {STATS} if policies else groups)
        lines = dict(snapshot.stats or ())
        return self._with_claims(replace(snapshot, stats=None)), lines

    def _with_claims(self, snapshot: Snapshot) -> Snapshot:
        try:
            if self._directory is None:
                raise ClaimError("no directory of claims was named")
            claims = self._claims(self._directory, snapshot)
        except (ClaimError, OSError) as error:
            gap = Gap(None, "claims", " ".join(str(error).split()))
            return replace(snapshot, gaps=(*snapshot.gaps, gap))
        return replace(snapshot, claims=self._first_seen.dated(claims, snapshot.clock, snapshot.taken_at))

    def _claims(self, directory: LockDirectory, snapshot: Snapshot) -> tuple[ClaimRecord, ...]:
        """Who claims what now.  Who holds a lock is read from every process of the machine, so it is kept a while."""
        uuids = [device.uuid for device in snapshot.devices]
        now = (
            frozenset(locked_devices(directory, uuids)),
            frozenset((one.uid, one.id) for one in read_records(directory)),
        )
        clock, before, claims = self._probed
        if now != before or not 0 <= snapshot.clock - clock < HOLDERS_SECONDS:
            claims = probe(directory, uuids)
            self._note_hidden(directory, claims)
            self._probed = snapshot.clock, now, claims
        return claims

    def _note_hidden(self, directory: LockDirectory, claims: Iterable[ClaimRecord]) -> None:
        """Leave an Event for each claim whose lock no process has open, once as long as that lasts."""
        before, self._hidden = self._hidden, {claim.id for claim in claims if claim.hidden}
        for claim in claims:
            if claim.id in self._hidden - before:
                text = hidden_claim_text(map(directory.lock_path, claim.slots or claim.devices))
                self._record(plain_event("claim", "hidden", text, claim.devices, None, claim=claim.id))

    def _look_around(self, snapshot: Snapshot, policies: Sequence[Policy], lines: Mapping[int, bytes]) -> RuleView:
        if not policies:
            return RuleView(snapshot)
        stats = stats_of({process.pid for device in snapshot.devices for process in device.processes or ()}, lines)
        return RuleView(
            snapshot,
            host=self._host.look(snapshot, stats) if self._needs.host else self._host.rest(),
            groups=self._host.groups(snapshot),
            scheduled=self.scheduled(snapshot) if self._needs.scheduler else None,
            seen=process_facts(snapshot, stats, ancestors=bool(snapshot.claims)),
            gpu_seconds=self.gpu_seconds(),
        )

    def _act(self, verdicts: Sequence[Verdict], policies: Sequence[Policy], protected: Protected) -> None:
        """Do what is due now, and what has had to wait and still holds; each subject's steps in their order."""
        assert self._view is not None
        named = {policy.name: policy for policy in policies}
        self._due = {key: due for key, due in self._due.items() if self._holds(due[0][1], due[0][0], named)}
        for verdict in verdicts:
            key = verdict.policy, identity_of(verdict.finding.subject)
            self._due.setdefault(key, []).append((named[verdict.policy], verdict))
        context = replace_fields(
            self._context,
            notifier=self.notifier,
            language=self.language,
            templates=self.templates,
            interval=max(self.interval[1], self.pause),
            protected=protected.uids_of(_people(self._view.snapshot), self._view.groups),
            protected_executables=protected.executables,
            alarm=self._needs.targets,
        )
        self._acting = context
        snapshot = self._view.snapshot
        self._apart("unkillable", partial(give_up, context, snapshot))
        put_off = {}
        for key, due in sorted(self._due.items(), key=lambda one: self._context.ledger.in_turn(one[1][0][1])):
            while due:
                outcomes = self._apart(key[0], partial(actions.act, due[0][1], snapshot, context))
                if waits := [outcome.wait for outcome in outcomes or () if outcome.wait is not None]:
                    put_off[key] = due[0][1].step, snapshot.clock + max(waits)
                    break  # a check asks for time: the same step is tried again after the next sample
                due.pop(0)
            if not due:
                del self._due[key]
        self._put_off = put_off

    def _holds(self, verdict: Verdict, policy: Policy, named: dict[str, Policy]) -> bool:
        assert self._view is not None
        return named.get(policy.name) == policy and self._is_found(verdict, policy, self._view)

    def _still_true(self, verdict: Verdict, again: Snapshot) -> bool:
        """Whether the rules behind *verdict* hold on what the driver says now, about some of the devices."""
        policy = next((each for each in self.policies if each.name == verdict.policy), None)
        if policy is None or self._view is None:
            return False
        return self._is_found(verdict, policy, replace_fields(self._view, snapshot=self._view.snapshot.updated(again)))

    def _is_found(self, verdict: Verdict, policy: Policy, view: RuleView) -> bool:
        zone = _zone(view.snapshot.taken_at)
        self._memory.kept = dict(self.kept)  # somebody may have asked since the sample
        holds = partial(engine.still_holds, policy, verdict.finding.subject, view, self._memory, zone=zone)
        return self._apart(policy.name, holds) is True

    def _apart(self, policy: str, do: Callable[[], T]) -> T | None:
        """What *do* comes to; None, and a line, when it raises what nobody foresaw: the other policies go on."""
        try:
            return do()
        except Exception as error:  # noqa: BLE001  what one user brings about must not be in favour of all
            now = time.monotonic()
            if now - self._failed.get(policy, -RETRY_SECONDS) >= RETRY_SECONDS:
                self._failed[policy] = now
                text = f"the policy {policy} meets a fault inside gpuguard, and the others go on: {error!r:.200}"
                self._record(Event(time.time(), "watchdog", "failed", message=text, facts=(("policy", policy),)))
            return None

    def _note(self, notes: Sequence[Note]) -> None:
        before, self._noted = self._noted, set()
        for note in notes:
            key = note.kind, note.policy, identity_of(note.subject) if note.subject else None
            if note.kind in WORTH_A_LINE and key not in self._noted | before:
                who, facts = note.subject or Subject("node"), {"policy": note.policy}
                devices = (who.device,) if who.device else ()
                place = {"user": who.user, "claim": who.claim}
                self._record(plain_event("note", note.kind, note.text, devices, who.pid, **place, facts=facts))
                if note.kind == "breaker" and note.subject:
                    self._alarm(note.text, note.subject, note.policy or "")
            self._noted.add(key)

    def _alarm(self, text: str, subject: Subject, name: str) -> None:
        """Tell the targets of messages that a policy spares a user who alone has more than it may hit at once."""
        assert self._view is not None
        snapshot, policies = self._view.snapshot, self._judged_by
        enforce = any(policy.enforce for policy in policies if policy.name == name)
        for target in self._needs.targets:
            finding, options = Finding("breaker", subject, text), (("to", target),)
            verdict = Verdict(name, finding, "notify", 0, snapshot.clock, enforce=enforce, options=options)
            self._apart(name, partial(actions.act, verdict, snapshot, self._acting))

    def _in_trouble(self, error: Exception | None) -> None:
        """Leave an Event when the loop falls into trouble, into another one, or comes out of it."""
        message = None
        if error is not None:
            message = str(error) if isinstance(error, BackendError) else f"a fault inside gpuguard: {error!r}"
        if message != self.trouble:
            outcome = "failed" if error and not isinstance(error, BackendError) else "driver unresponsive"
            self.trouble = message
            self._record(Event(time.time(), "watchdog", outcome if error else "watching again", message=message))
            self._tell()

    def _record(self, event: Event) -> bool:
        # What is left out of the log still goes to whoever listens: metrics count it.
        written = not self._lines.admits(event, boot_clock()) or self._append(event)
        self._untold.append(event if written else replace(event, outcome=f"{event.outcome} (not recorded)"))
        return written

    def _tell(self) -> None:
        for event in self._lines.left_out(boot_clock()):
            self._untold.append(event)
            self._append(event)
        # Only after everything is done: a callback that fails must not come between a line of the log and its signal.
        told, self._untold = self._untold, []
        for event in told:
            if self._on_event:
                self._on_event(event)


def pace(before: Snapshot | None, now: Snapshot, pause: float, interval: tuple[float, float]) -> float:
    """Seconds until the next sample: at once when something rises, later and later while nothing does."""
    shortest, longest = interval
    return shortest if before is None or _rises(before, now) else min(longest, max(pause, shortest) * SLOWER)


def _people(snapshot: Snapshot) -> frozenset[int]:
    uids = {process.uid for device in snapshot.devices for process in device.processes or () if process.uid is not None}
    return frozenset(uids | {claim.uid for claim in snapshot.claims})


def _is_same(before: RuleView | None, now: RuleView) -> bool:
    return before is not None and before.clock == now.clock


def _rises(before: Snapshot, now: Snapshot) -> bool:
    for device in now.devices:
        old = before.device(device.uuid)
        if old is None:
            continue
        if None not in (old.memory_used, device.memory_used, device.memory_total):
            assert device.memory_used is not None and old.memory_used is not None and device.memory_total is not None
            if device.memory_used - old.memory_used > RISING_MEMORY * device.memory_total:
                return True
        if (
            device.temperature is not None
            and old.temperature is not None
            and device.temperature - old.temperature >= RISING_CELSIUS
        ):
            return True
    return False


def _zone(taken_at: float) -> float:
    """Seconds east of UTC, at the time of the snapshot: summer time may begin while the watchdog runs."""
    return float(time.localtime(taken_at).tm_gmtoff)


# One look at this machine with all that policies judge by, for a recording.  Judges nothing and writes nothing.


FIELDS = WHO_FIELDS | {CLOCKS, ECC}  # what any rule can ask for


class Camera:
    """Looks again and again; rates are since the look before."""

    def __init__(self, backend: Backend, directory: LockDirectory | None) -> None:
        self._backend, self._directory, self._hosts = backend, directory, HostUses()

    def look(self) -> RuleView:
        """The machine now.  Raises BackendError."""
        snapshot = self._with_claims(self._backend.sample(FIELDS))
        stats = stats_of({process.pid for device in snapshot.devices for process in device.processes or ()})
        host, groups = self._hosts.look(snapshot, stats), self._hosts.groups(snapshot)
        return RuleView(snapshot, host=host, groups=groups, seen=process_facts(snapshot, stats))

    def _with_claims(self, snapshot: Snapshot) -> Snapshot:
        try:
            if self._directory is None:
                raise ClaimError("no directory of claims can be read")
            claims = tuple(probe(self._directory, [device.uuid for device in snapshot.devices]))
        except (ClaimError, OSError) as error:
            gap = Gap(None, "claims", " ".join(str(error).split()))
            return replace(snapshot, gaps=(*snapshot.gaps, gap))
        return replace(snapshot, claims=claims)
