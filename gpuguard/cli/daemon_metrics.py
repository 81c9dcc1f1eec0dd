"""What a daemon that was started with --metrics tells: its last look, and what it has counted.

A scrape is answered in a thread of its own, and asks neither the driver nor the daemon's loop.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gpuguard import __version__, history
from gpuguard.actions import ACTIONS
from gpuguard.claims.lockfiles import LockDirectory
from gpuguard.cli.metrics_facts import Seldom, pages, told_of, with_directory
from gpuguard.cli.serving_options import server_at
from gpuguard.daemon import Daemon
from gpuguard.model import Event, Snapshot
from gpuguard.serving import Server
from gpuguard.views.metrics import Action, Facts
from gpuguard.views.usage import DeviceUse, uses

END_SECONDS = 0.2  # for a page that is being made when the daemon ends
STALE_INTERVALS = 3  # a sample that is older says nothing about now


class Telling:
    """The page of one daemon.

    Args:
        address: where it is served.
        expose: see add_expose_option.
        directory: of the claims.

    Raises:
        InvalidRequest: it cannot be served there.
    """

    def __init__(self, address: str, expose: str | None, directory: LockDirectory) -> None:
        self.counting, self._directory = Counting(), directory
        self._told: Callable[[], Facts] | None = None
        self._server: Server = server_at(address, expose, pages(self._facts, []))

    def start(self, guard: Daemon) -> str:
        """Serve what *guard* sees, which reads more while somebody asks; returns where, in words."""
        seldom = Seldom()
        guard.watchdog.further = seldom.groups
        self._told = facts_of(guard, self._directory, self.counting, seldom)
        self._server.start()
        return f"serving http://{self._server.address}/metrics"

    def close(self) -> None:
        """Serve no more."""
        self._server.close(END_SECONDS)

    def _facts(self) -> Facts:
        return self._told() if self._told else Facts(time.time(), __version__)


@dataclass(frozen=True)
class Counted:
    """What a daemon has done since it started."""

    actions: dict[Action, int]
    unrecorded: int
    troubles: int


class Counting:
    """Counts Events on their way into the audit log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: Counter[Action] = Counter()
        self._unrecorded = self._troubles = 0

    def append(self, event: Event) -> bool:
        """As history.append."""
        written = history.append(event)
        policy = dict(event.facts).get("policy")
        with self._lock:
            self._unrecorded += not written
            self._troubles += event.kind == "watchdog" and event.outcome != "watching again"
            if event.kind in ACTIONS and policy is not None:
                self._actions[str(policy), event.kind, event.outcome] += 1
        return written

    def counted(self) -> Counted:
        """So far."""
        with self._lock:
            return Counted(dict(self._actions), self._unrecorded, self._troubles)


def facts_of(guard: Daemon, directory: LockDirectory, counting: Counting, seldom: Seldom) -> Callable[[], Facts]:
    """What a daemon saw last, without asking the driver; to be called in any thread."""
    known: tuple[Snapshot | None, tuple[DeviceUse, ...]] = (None, ())

    def facts() -> Facts:
        nonlocal known
        dog, snapshot, waiting, counted = guard.watchdog, guard.last, guard.waiting, counting.counted()
        longest = max(dog.interval[1], dog.pause)
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - snapshot.clock
        current = dog.trouble is None and age <= STALE_INTERVALS * longest
        seldom.asked()
        if current and known[0] is not snapshot:
            known = snapshot, uses(snapshot, dog.seen(snapshot))
        seen = bool(snapshot.taken_at)
        found = Facts(
            time.time(),
            __version__,
            snapshot if seen else None,
            current=current,
            errors=seldom.errors(snapshot),
            uses=known[1] if current else (),
            waiting=told_of(waiting) if current else None,
            driver_up=current if seen or dog.trouble else None,  # None: it has not been asked yet
            interval=longest,
            troubles=counted.troubles,
            actions=counted.actions,
            unrecorded=counted.unrecorded,
            daemon_up=True,
        )
        return with_directory(found, directory)

    return facts
