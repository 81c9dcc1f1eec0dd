"""How many lines of the audit log may be about one user.

The last 30,000 are kept.  Who starts and ends what a policy looks at, again and again, would push out of the log within
minutes what was done to others, and what limits the guard itself after a restart: see recall.  A deed, what announces
it, and what became of it are always written; of all else so many lines, and how many were left out.  All users without
a name count as one: who may use user namespaces has 65536 such uids.  Writes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuguard.guards.recall import is_deed
from gpuguard.model import Event

AT_ONCE = 1_000  # lines about one user, and then
EVERY = 10.0  # seconds one: of whom ever so much is to be said, that is 3 MB a day
TELL_SECONDS = 60.0  # between two lines that say how many were left out


@dataclass
class _LeftOut:
    """What was not written about one user."""

    since: float  # unix time
    clock: float
    user: str | None
    what: Counter[str] = field(default_factory=Counter)


class Lines:
    """Who has had how many lines; clocks are in seconds and never go back."""

    def __init__(self) -> None:
        self._spent: dict[str | None, float] = {}  # user -> clock at which nothing counts against him any more
        self._left_out: dict[str | None, _LeftOut] = {}
        self._announced: tuple[object, ...] | None = None

    def admits(self, event: Event, clock: float) -> bool:
        """Whether *event* is to be written down; if not, it is counted."""
        about = event.kind, event.pid, event.claim, event.devices, event.user
        if is_deed(event) or event.outcome in ("about to", "unkillable"):
            self._announced = about
            return True
        if about == self._announced or (event.user, event.pid, event.claim) == (None, None, None):  # about the machine
            return True
        whom = _whom(event)
        spent = max(clock, self._spent.get(whom, clock)) + EVERY
        if spent - clock > AT_ONCE * EVERY:
            out = self._left_out.setdefault(whom, _LeftOut(event.time, clock, whom))
            out.what[event.outcome if event.kind == "note" else event.kind] += 1
            return False
        self._spent[whom] = spent
        return True

    def left_out(self, clock: float) -> Iterator[Event]:
        """For each of whom lines were left out a line that says so, once a minute."""
        self._spent = {whom: spent for whom, spent in self._spent.items() if spent > clock}
        for whom, out in tuple(self._left_out.items()):
            if clock - out.clock < TELL_SECONDS:
                continue
            del self._left_out[whom]
            number, what = sum(out.what.values()), ", ".join(f"{kind} {n}" for kind, n in out.what.most_common())
            seconds = time.time() - out.since
            same = "the same user" if out.user else "users without a name"
            text = f"{number} lines about {same} within {seconds:.0f}s, more than one in {EVERY:.0f}s: {what}"
            yield Event(time.time(), "note", "left out", out.user, message=text, facts=(("lines", number),))


def _whom(event: Event) -> str | None:
    """The user whom *event* is about; None: one of all of whom nobody knows who they are."""
    return event.user if event.user and not event.user.isdecimal() else None
