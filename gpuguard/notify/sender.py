"""The sender: each target has a queue and a thread, so that only an endpoint's own messages wait for it.

    sender = Sender(targets, report=append)
    sender.notify("ops", verdict, snapshot)       -> "queued", at once
    sender.stop(5.0)

Nothing that an endpoint does raises here: each delivery that succeeds or fails is one Event for *report*, which is
called in the thread of the target.

The first message waits SETTLE for others of the same moment.  After that a policy sends one message per INTERVAL, which
joins all that have come meanwhile; a target gets at most MOST_PER_INTERVAL in all.  A target that fails is left alone
for a time that doubles, and no waiting message is lost.  Messages that have failed come after those that have not,
because the fault may lie in the message and not in the target.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from importlib.util import find_spec
from typing import Any

from gpuguard.locale.messages import sentence
from gpuguard.model import Event, Snapshot, Verdict
from gpuguard.notify import mail, programs, webhook
from gpuguard.notify.targets import Apprise, Email, Hook, Secret, Target, Undeliverable, Undelivered, Webhook
from gpuguard.notify.templates import LONGEST_KEEP, MOST_LINES, TEMPLATES, Message, Template, joined, message_for
from gpuguard.sanitize import neutralise

SETTLE = 1.0  # seconds
INTERVAL = 60.0
MOST_PER_INTERVAL = 10
CAPACITY = 100  # policies (times users, for personal targets) that can wait; a full queue refuses and never blocks
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 900.0  # after a failure

_NO_ANSWER = sentence("notify.no_answer", "no answer in time")

Key = tuple[str, str | None]  # the policy, and the user if the target is personal


DELIVER: dict[type, Callable[[Any, Message], str | None]] = {
    Email: mail.deliver,
    Webhook: webhook.deliver,
    Hook: programs.run_hook,
    Apprise: programs.send_by_apprise,
}


@dataclass(frozen=True)
class Batch:
    """Messages that go out as one."""

    key: Key
    messages: tuple[Message, ...]  # the oldest ones; the others are only counted
    count: int
    since: float
    failures: int = 0
    again: float = 0.0  # it is not tried before this time

    def with_more(self, later: Batch | None) -> Batch:
        """Join this batch and a later one, if any."""
        if later is None:
            return self
        messages = (self.messages + later.messages)[: MOST_LINES + 1]
        return replace(self, messages=messages, count=self.count + later.count)


class Pace:
    """The batches that wait for one target, and when each may go.  Pure: time is an argument."""

    def __init__(self, *, personal: bool = False) -> None:
        self.personal = personal
        self.waiting: dict[Key, Batch] = {}
        self.failures = 0
        self.pause = 0.0  # seconds, after the newest failure
        self._not_before = 0.0
        self._last: dict[Key, float] = {}
        self._sent: deque[float] = deque(maxlen=MOST_PER_INTERVAL)

    def put(self, message: Message, now: float) -> bool:
        """Put *message* into the queue, or return False if the queue is full."""
        # A message about one user must never be joined to one that goes to another user.
        key = (message.key, message.user if self.personal else None)
        before = self.waiting.get(key)
        if before is None and len(self.waiting) >= CAPACITY:
            return False
        batch = Batch(key, (message,), message.count, now)
        self.waiting[key] = before.with_more(batch) if before else batch
        return True

    def pop_due(self, now: float) -> Batch | None:
        """Take the batch that may go now out of the queue and return it, or return None."""
        due = [batch for batch in self.waiting.values() if self._due_time(batch) <= now]
        return self.waiting.pop(min(due, key=lambda batch: (batch.failures, batch.since)).key) if due else None

    def pop_all(self) -> list[Batch]:
        """Take out everything at the end, as one batch for each recipient, without regard to the pace."""
        by_user: dict[str | None, Batch] = {}
        for batch in sorted(self.waiting.values(), key=lambda batch: batch.since):
            _, user = batch.key
            by_user[user] = by_user[user].with_more(batch) if user in by_user else batch
        self.waiting.clear()
        return list(by_user.values())

    def wait(self, now: float) -> float | None:
        """Return the seconds until a batch may go, or None if nothing waits."""
        times = [self._due_time(batch) for batch in self.waiting.values()]
        return max(0.0, min(times) - now) if times else None

    def succeeded(self, batch: Batch, now: float) -> None:
        """Note that *batch* has gone out."""
        self.failures, self.pause, self._not_before = 0, 0.0, 0.0
        self.dropped(batch, now)
        self._sent.append(now)

    def dropped(self, batch: Batch, now: float) -> None:
        """Note that *batch* can never go out, which says nothing about the target."""
        self._last = {key: then for key, then in self._last.items() if then > now - INTERVAL} | {batch.key: now}

    def failed(self, batch: Batch, now: float) -> None:
        """Note that *batch* has not gone out, and let it wait again, ahead of messages that came meanwhile."""
        own, of_target = (
            min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 20)) for failures in (batch.failures, self.failures)
        )
        self._not_before, self.pause = now + of_target, max(own, of_target)
        self.failures += 1
        failed = replace(batch, failures=batch.failures + 1, again=now + own)
        self.waiting[batch.key] = failed.with_more(self.waiting.pop(batch.key, None))

    def _due_time(self, batch: Batch) -> float:
        times = [batch.since + SETTLE, batch.again, self._not_before]
        if batch.key in self._last:
            times.append(self._last[batch.key] + INTERVAL)
        if len(self._sent) == MOST_PER_INTERVAL:
            times.append(self._sent[0] + INTERVAL)
        return max(times)


def attempt(target: Target, message: Message) -> tuple[bool | None, str]:
    """Deliver *message* now; return whether it went out (None if it never will), and a remark.

    The remark contains only codes and texts of the system: the text of an answer or an exception could hold a secret.
    """
    try:
        return True, DELIVER[type(target)](target, message) or ""
    except Undelivered as error:
        return None if isinstance(error, Undeliverable) else False, _neutral(str(error))
    except subprocess.TimeoutExpired:
        return False, _NO_ANSWER
    except OSError as error:
        wrapped = getattr(error, "reason", None)  # urllib wraps what happened to the socket
        cause = wrapped if isinstance(wrapped, OSError) else error
        if isinstance(cause, TimeoutError):
            return False, _NO_ANSWER
        if isinstance(cause, ssl.SSLCertVerificationError):
            # After the comma comes the name that the certificate is not valid for, and that may be the secret.
            reason = neutralise(cause.verify_message.partition(",")[0])
            return False, sentence(
                "notify.certificate", "the certificate is not to be trusted: {reason}", reason=reason
            )
        kind = type(cause).__name__
        return False, _neutral(cause.strerror or sentence("notify.no_connection", "no connection ({kind})", kind=kind))
    except (HTTPException, ValueError, subprocess.SubprocessError) as error:
        kind = type(error).__name__
        return False, sentence("notify.nonsense", "the answer makes no sense ({kind})", kind=kind)


def _neutral(text: str) -> str:
    """Return *text* as neutralise() does, but as it is if that changes nothing: it may be a sentence."""
    return text if (neutral := neutralise(text)) == text else neutral


def problems(targets: Mapping[str, Target]) -> Iterator[str]:
    """Yield the faults that show without sending anything, so that they do not first show at the first alarm."""
    for name, target in targets.items():
        for problem in _problems_of(target):
            yield sentence("because", "{what}: {why}", what=name, why=problem)


def _problems_of(target: Target) -> Iterator[str]:
    for key, value in vars(target).items():
        if isinstance(value, Secret):
            try:
                value.read()
            except Undelivered as error:
                yield sentence("because", "{what}: {why}", what=key, why=str(error))
    program = None
    if isinstance(target, Hook):
        program = target.command[0]
    elif isinstance(target, Email) and not target.server:
        program = target.sendmail
    if program and not os.access(program, os.X_OK):
        yield sentence("notify.cannot_run", "{program} cannot be run", program=program)
    if isinstance(target, Hook) and (problem := programs.hook_problem(target)):
        yield problem
    if isinstance(target, Apprise) and find_spec("apprise") is None:
        yield programs.INSTALL_APPRISE


UNKNOWN = sentence("notify.no_target", "no such target")
STUCK = sentence("notify.no_thread", "no thread can be started now: it goes out with the next message")

Report = Callable[[Event], object]


class Sender:
    """Sends messages to named targets.

    Args:
        targets: by the names that policies use for them.
        report: gets an Event for each delivery, in another thread; history.append will do.
        templates: the texts by language.
        longest_keep: seconds for which users may exempt their own processes and claims.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        report: Report,
        templates: Mapping[str, Template] = TEMPLATES,
        longest_keep: float = LONGEST_KEEP,
    ) -> None:
        self._templates, self._longest_keep = templates, longest_keep
        self._lanes = {name: _Lane(name, target, report) for name, target in targets.items()}

    def notify(self, name: str, verdict: Verdict, snapshot: Snapshot) -> str:
        """Queue a message about *verdict* for the target *name*, in its language; return the outcome at once."""
        if name not in self._lanes:
            return UNKNOWN
        target = self._lanes[name].target
        # A mail is shown as it is.  Any other message may end in a chat program, through its webhook or the admin's own
        # script.
        chat = not isinstance(target, Email)
        keep = self._longest_keep
        message = message_for(verdict, snapshot, target.language, self._templates, chat=chat, longest_keep=keep)
        return self.send(name, message)

    def send(self, name: str, message: Message) -> str:
        """Queue *message* for the target *name*; return the outcome at once."""
        return self._lanes[name].put(message) if name in self._lanes else UNKNOWN

    def stop(self, seconds: float) -> bool:
        """Send everything that waits, one message per recipient; return whether all went out within *seconds*.

        Messages that come later go out at once: a step that is under way keeps the sender that it began with.
        """
        end = time.monotonic() + seconds
        for lane in self._lanes.values():  # all of them start before we wait for the first one
            lane.close()
        settled = [lane.finish(max(0.0, end - time.monotonic())) for lane in self._lanes.values()]
        return all(settled)


class _Lane:
    """One target: its queue, and the thread that empties it."""

    def __init__(self, name: str, target: Target, report: Report) -> None:
        self.name, self.target, self.report = name, target, report
        self._pace = Pace(personal=getattr(target, "personal", False))
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False
        self._all_due = False  # at the end all that waits goes out, whatever the pace is

    def put(self, message: Message) -> str:
        with self._changed:
            if not self._pace.put(message, time.monotonic()):
                return sentence("notify.queue_full", "the queue is full")
            self._all_due = self._closed
            started = self._start()
            self._changed.notify_all()
        return "queued" if started else STUCK

    def close(self) -> None:
        with self._changed:
            self._closed, self._all_due = True, bool(self._pace.waiting)
            if self._all_due:
                self._start()
            self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        with self._changed:
            done = self._changed.wait_for(lambda: not (self._busy or self._all_due), seconds)
            return done and not self._pace.waiting

    def _start(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"gpuguard-notify-{self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are too many threads: the next message tries again
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        try:
            while work := self._next():
                for batch in work:
                    self._deliver(batch)
        finally:
            # This also happens when something unforeseen ended the thread, which threading reports: the next message
            # starts a new one.
            with self._changed:
                self._rest()

    def _next(self) -> list[Batch]:
        """Wait until there is something to deliver and return it, or return [] at the end."""
        with self._changed:
            while True:
                if self._all_due:
                    work, self._all_due = self._pace.pop_all(), False
                else:
                    due = None if self._closed else self._pace.pop_due(time.monotonic())
                    work = [due] if due else []
                if work:
                    self._busy = True
                    return work
                self._busy = False
                self._changed.notify_all()
                if self._closed:
                    self._rest()
                    return []
                self._changed.wait(self._pace.wait(time.monotonic()))

    def _rest(self) -> None:
        if self._thread is threading.current_thread():  # not if a successor has already begun
            self._busy, self._thread = False, None
            self._changed.notify_all()

    def _deliver(self, batch: Batch) -> None:
        message = joined(batch.messages, batch.count)
        went_out, remark = attempt(self.target, message)
        with self._changed:
            pace = self._pace
            {True: pace.succeeded, False: pace.failed, None: pace.dropped}[went_out](batch, time.monotonic())
            pause, given_up = pace.pause, went_out is None or (self._closed and not went_out)
        users = sorted({part.user for part in batch.messages if part.user})
        facts = (
            ("target", self.name),
            *((("users", ", ".join(users)),) if len(users) > 1 else ()),
            ("policy", message.key),
            ("count", message.count),
            ("retry_after_seconds", pause if pause and not given_up else None),
        )
        named = [value for part in batch.messages for name, value in part.facts if name == "device_uuid" and value]
        self.report(
            Event(
                time=time.time(),
                kind="notify",
                outcome="sent" if went_out else "given up" if given_up else "failed",
                user=message.user,
                devices=tuple(str(uuid) for uuid in dict.fromkeys(named)),
                message=remark or None,
                facts=facts,
            )
        )
