"""The sender: each target has a queue and a thread of its own, so that nothing waits for an endpoint but its own mail.

    sender = Sender(targets, report=append)
    sender.notify("ops", verdict, snapshot)       -> "queued", at once
    sender.stop(5.0)

Nothing here raises for what an endpoint does: each delivery that went out or failed is one Event for *report*, which is
called in the thread of the target.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from gpuguard.messages import TEMPLATES, Message, Template, message_for
from gpuguard.model import Event, Snapshot, Verdict
from gpuguard.notify.delivery import Target, attempt
from gpuguard.notify.mail import Email
from gpuguard.notify.pace import Batch, Pace

QUEUED = "queued"
UNKNOWN = "no such target"
FULL = "the queue is full"
STOPPED = "the sender has stopped"
STUCK = "no thread can be started now: it goes out with the next message"

Report = Callable[[Event], object]
Clock = Callable[[], float]


class Sender:
    """Sends messages to named targets.

    Args:
        targets: by the names under which policies speak of them.
        report: gets an Event for each delivery, in another thread; history.append will do.
        templates: the texts by language.
        clock: seconds, steady.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        report: Report,
        *,
        templates: Mapping[str, Template] = TEMPLATES,
        clock: Clock = time.monotonic,
    ) -> None:
        self._targets = dict(targets)
        self._templates = templates
        self._lanes = {name: _Lane(name, target, report, clock) for name, target in targets.items()}

    def notify(self, name: str, verdict: Verdict, snapshot: Snapshot) -> str:
        """Tell the target *name* about *verdict*, in its language; returns at once what became of that."""
        if name not in self._targets:
            return UNKNOWN
        target = self._targets[name]
        # A mail is read as it is; all else may end in a chat program, by a webhook of its or by the admin's own script.
        chat = not isinstance(target, Email)
        return self.send(name, message_for(verdict, snapshot, target.language, self._templates, chat=chat))

    def send(self, name: str, message: Message) -> str:
        """Queue *message* for the target *name*; returns at once what became of that."""
        lane = self._lanes.get(name)
        return lane.put(message) if lane else UNKNOWN

    def flush(self, seconds: float) -> bool:
        """Send what waits now, one message per recipient; whether all of it has gone out within *seconds*."""
        return self._hurry(seconds, last=False)

    def stop(self, seconds: float) -> bool:
        """Flush, and take nothing more; what has not gone out after *seconds* may still, as long as we live."""
        return self._hurry(seconds, last=True)

    def _hurry(self, seconds: float, *, last: bool) -> bool:
        end = time.monotonic() + seconds
        for lane in self._lanes.values():  # all of them start before the first is waited for
            lane.hurry(last=last)
        settled = [lane.settled(max(0.0, end - time.monotonic())) for lane in self._lanes.values()]
        return all(settled)


class _Lane:
    """One target: its queue, and the thread that empties it."""

    def __init__(self, name: str, target: Target, report: Report, clock: Clock) -> None:
        self.name = name
        self.target = target
        self.report = report
        self.clock = clock
        self._pace = Pace(personal=getattr(target, "personal", False))
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._hurried = self._closed = False

    def put(self, message: Message) -> str:
        with self._changed:
            if self._closed:
                return STOPPED
            if not self._pace.put(message, self.clock()):
                return FULL
            started = self._start()
            self._changed.notify_all()
        return QUEUED if started else STUCK

    def hurry(self, *, last: bool) -> None:
        with self._changed:
            self._closed = self._closed or last
            self._hurried = bool(self._pace.waiting)
            if self._hurried:
                self._start()
            self._changed.notify_all()

    def settled(self, seconds: float) -> bool:
        with self._changed:
            done = self._changed.wait_for(lambda: not (self._busy or self._hurried), seconds)
            return done and not self._pace.waiting

    def _start(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"gpuguard-notify-{self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are too many: the next message tries again
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        try:
            while work := self._next():
                for batch in work:
                    self._deliver(batch)
        finally:
            # Also when something unforeseen has ended it (threading reports that): the next message starts a new one.
            with self._changed:
                self._rest()

    def _next(self) -> list[Batch]:
        """What is to be delivered now, as soon as there is something; [] at the end."""
        with self._changed:
            while True:
                if self._hurried:
                    work, self._hurried = self._pace.take_all(), False
                else:
                    due = None if self._closed else self._pace.take(self.clock())
                    work = [due] if due else []
                if work:
                    self._busy = True
                    return work
                self._busy = False
                self._changed.notify_all()
                if self._closed:
                    self._rest()
                    return []
                self._changed.wait(self._pace.wait(self.clock()))

    def _rest(self) -> None:
        if self._thread is threading.current_thread():  # not when a successor has begun already
            self._busy, self._thread = False, None
            self._changed.notify_all()

    def _deliver(self, batch: Batch) -> None:
        message = batch.joined()
        went_out, remark = attempt(self.target, message)
        with self._changed:
            pace = self._pace
            {True: pace.succeeded, False: pace.failed, None: pace.dropped}[went_out](batch, self.clock())
            pause, given_up = pace.pause, went_out is None or (self._closed and not went_out)
        outcome = "sent" if went_out else "given up" if given_up else "failed"
        facts = (
            ("target", self.name),
            ("policy", message.key),
            ("count", message.count),
            ("retry_after_seconds", pause if pause and not given_up else None),
        )
        devices = tuple(str(value) for name, value in message.facts if name == "device_uuid" and value)
        self.report(
            Event(
                time.time(), "notify", outcome, user=message.user, devices=devices, message=remark or None, facts=facts
            )
        )
