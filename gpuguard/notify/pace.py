"""How fast messages to one target may follow each other, and what is joined into one.  Pure: time is an argument.

The first message waits SETTLE for the others of the same moment.  After that a policy gets one message per INTERVAL,
and what comes meanwhile is joined; a target gets at most MOST_PER_INTERVAL in all.  A target that fails is left alone
for a time that doubles, and nothing of what is waiting gets lost over that.  What has failed goes behind what has not:
it may be the message that cannot be delivered, and not the target that is away.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from gpuguard.messages import MOST_LINES, Message, joined

SETTLE = 1.0  # seconds
INTERVAL = 60.0
MOST_PER_INTERVAL = 10
CAPACITY = 100  # policies (times users, for personal targets) that can wait; a full queue refuses, it never blocks
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 900.0  # after a failure

Key = tuple[str, str | None]  # the policy, and the user where the target is personal


@dataclass(frozen=True)
class Batch:
    """Messages that go out as one."""

    key: Key
    messages: tuple[Message, ...]  # the oldest ones; the others only count
    count: int
    since: float
    failures: int = 0
    again: float = 0.0  # not to be tried before

    def joined(self) -> Message:
        """The one message."""
        return joined(self.messages, self.count)

    def with_more(self, later: Batch) -> Batch:
        """This one and a later one."""
        messages = (self.messages + later.messages)[: MOST_LINES + 1]
        return replace(self, messages=messages, count=self.count + later.count)


class Pace:
    """What waits for one target, and when it may go."""

    def __init__(self, *, personal: bool = False) -> None:
        self.personal = personal
        self.waiting: dict[Key, Batch] = {}
        self.failures = 0
        self.pause = 0.0  # seconds, after the newest failure
        self._not_before = 0.0
        self._last: dict[Key, float] = {}
        self._sent: deque[float] = deque(maxlen=MOST_PER_INTERVAL)

    def put(self, message: Message, now: float) -> bool:
        """Let *message* wait; False when the queue is full."""
        # What is about one user must never be joined to what goes to another one.
        key = (message.key, message.user if self.personal else None)
        if key not in self.waiting and len(self.waiting) >= CAPACITY:
            return False
        self._add(Batch(key, (message,), message.count, now))
        return True

    def take(self, now: float) -> Batch | None:
        """The batch that may go now, or None."""
        due = [batch for batch in self.waiting.values() if self._time_of(batch) <= now]
        return self.waiting.pop(min(due, key=lambda batch: (batch.failures, batch.since)).key) if due else None

    def take_all(self) -> list[Batch]:
        """Everything, in one batch for each recipient, without regard to the pace: for the end."""
        for_whom: dict[str | None, Batch] = {}
        for batch in sorted(self.waiting.values(), key=lambda batch: batch.since):
            before = for_whom.get(batch.key[1])
            for_whom[batch.key[1]] = before.with_more(batch) if before else batch
        self.waiting.clear()
        return list(for_whom.values())

    def wait(self, now: float) -> float | None:
        """Seconds until something may go; None when nothing waits."""
        times = [self._time_of(batch) for batch in self.waiting.values()]
        return max(0.0, min(times) - now) if times else None

    def succeeded(self, batch: Batch, now: float) -> None:
        """*batch* has gone out."""
        self.failures, self.pause, self._not_before = 0, 0.0, 0.0
        self._done(batch, now)
        self._sent.append(now)

    def dropped(self, batch: Batch, now: float) -> None:
        """*batch* can never go out, which says nothing about the target."""
        self._done(batch, now)

    def failed(self, batch: Batch, now: float) -> None:
        """*batch* has not gone out: it waits again, before what came meanwhile."""
        own = _pause(batch.failures)
        self._not_before = now + _pause(self.failures)
        self.pause = max(own, _pause(self.failures))
        self.failures += 1
        later = self.waiting.pop(batch.key, None)
        failed = replace(batch, failures=batch.failures + 1, again=now + own)
        self.waiting[batch.key] = failed.with_more(later) if later else failed

    def _done(self, batch: Batch, now: float) -> None:
        self._last = {key: then for key, then in self._last.items() if then > now - INTERVAL} | {batch.key: now}

    def _add(self, batch: Batch) -> None:
        before = self.waiting.get(batch.key)
        self.waiting[batch.key] = before.with_more(batch) if before else batch

    def _time_of(self, batch: Batch) -> float:
        times = [batch.since + SETTLE, batch.again, self._not_before]
        if batch.key in self._last:
            times.append(self._last[batch.key] + INTERVAL)
        if len(self._sent) == MOST_PER_INTERVAL:
            times.append(self._sent[0] + INTERVAL)
        return max(times)


def _pause(failures: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 20))
