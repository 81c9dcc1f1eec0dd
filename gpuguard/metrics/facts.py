"""What monitoring systems are told, and where it comes from: the driver, or a daemon and what it has counted.

A scrape of a daemon is answered in a thread of its own, and waits neither for the driver nor for the daemon's loop.
Does not make numbers of it: see families.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from gpuguard import __version__
from gpuguard.claims.restrictions import QUARANTINED, read_restrictions
from gpuguard.device_state import DeviceUse, uses
from gpuguard.enforcement.actions import ACTIONS
from gpuguard.errors import BackendError, ClaimError
from gpuguard.history import audit_log
from gpuguard.model import CLOCKS, ECC, WHO_FIELDS, Device, Event, Snapshot
from gpuguard.procfs import process_facts
from gpuguard.queue.tickets import waiting_tickets
from gpuguard.source import SnapshotSource, daemon_lives, with_quarantine

if TYPE_CHECKING:
    from gpuguard.backends import Backend
    from gpuguard.claims.directory import LockDirectory
    from gpuguard.daemon.service import Daemon
    from gpuguard.queue.priority import Ticket

Action = tuple[str, str, str]  # policy, action, outcome
# error, field of Device since the driver was loaded, field since the device was built
ECC_FIELDS = (
    ("corrected", "ecc_corrected_volatile", "ecc_corrected_aggregate"),
    ("uncorrected", "ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"),
)
# Fields of Device that change once in months, and are not in each sample.
ERROR_FIELDS = ("ecc_mode", *(field for row in ECC_FIELDS for field in row[1:]), "retired_pages", "remapped_rows")
ERRORS_SECONDS = 60.0  # between two readings of them: they are 9 of 30 driver calls per device
SCRAPED_SECONDS = 300.0  # without a scrape, after which the numbers are taken to be read no more
STALE_INTERVALS = 3  # a sample that is older says nothing about now
_errors = attrgetter(*ERROR_FIELDS)


@dataclass(frozen=True)
class MetricFacts:
    """All that is told.  None: unknown, or known only to the daemon."""

    now: float  # unix time
    version: str  # of gpuguard
    snapshot: Snapshot | None = None  # the last one
    current: bool = False  # whether its values still count; otherwise only what a device is is told of it
    # Its devices as they were when the errors of their memory were read last; (): as they are there.
    errors: tuple[Device, ...] = ()
    uses: tuple[DeviceUse, ...] = ()  # what goes on on its devices
    waiting: Sequence[tuple[str, float]] | None = None  # who waits, and since when (unix time)
    quarantined: frozenset[str] | None = None  # uuids that are out of service
    driver_up: bool | None = None  # whether the driver answered the last time
    daemon_up: bool | None = None  # whether a daemon guards this machine
    interval: float | None = None  # seconds between two samples
    troubles: int | None = None  # how often sampling began to fail since the daemon started
    actions: Mapping[Action, int] | None = None  # what policies did since then
    unrecorded: int | None = None  # lines of the audit log that could not be written since then


class RareFields:
    """What is read only while scrapes come: clocks, and now and then the errors of memory."""

    def __init__(self) -> None:
        self._scraped_at = self._read_at = -math.inf
        self._known: dict[str, Device] = {}

    def groups(self) -> frozenset[str]:
        """What the next sample should read beside what it reads anyway."""
        now = time.monotonic()
        if now - self._scraped_at > SCRAPED_SECONDS:
            return frozenset()
        return frozenset({CLOCKS, ECC} if now - self._read_at >= ERRORS_SECONDS else {CLOCKS})

    def scraped(self) -> None:
        """A scrape has come."""
        self._scraped_at = time.monotonic()

    def errors(self, snapshot: Snapshot) -> tuple[Device, ...]:
        """The devices of *snapshot* as they were when their errors were read last."""
        now = time.monotonic()
        were_read = any(value is not None for device in snapshot.devices for value in _errors(device))
        if were_read or any(gap.field in ERROR_FIELDS for gap in snapshot.gaps):
            self._known, self._read_at = {device.uuid: device for device in snapshot.devices}, now
        if now - self._read_at >= 3 * ERRORS_SECONDS:
            return snapshot.devices
        return tuple(self._known.get(device.uuid, device) for device in snapshot.devices)


class MachineFacts:
    """The facts of a machine: a daemon's latest snapshot where that has all that is wanted, else the driver's.

    Args:
        backend: name of the backend; *open_backend* opens it, when the driver is first needed.
        directory: finds that of the claims, each time; raises ClaimError where there is none.
        fresh: whether the driver is read even while a daemon runs.
        clocks: whether a daemon's snapshot must have clocks, as other exporters' names need.
    """

    def __init__(
        self,
        backend: str,
        open_backend: Callable[[], Backend],
        directory: Callable[[], LockDirectory],
        *,
        fresh: bool = False,
        clocks: bool = False,
    ) -> None:
        self._source = SnapshotSource(backend, open_backend, directory, read=self._read_driver, suits=self._suits)
        self._source.fresh = fresh
        self._find_directory, self._clocks = directory, clocks
        self._last: Snapshot | None = None
        self._rare = RareFields()
        self.trouble: BackendError | None = None  # of the last reading

    def read(self) -> MetricFacts:
        """The machine now."""
        self.trouble = None
        try:
            self._last, _ = self._source.joined(reservations=False)
        except BackendError as error:
            self.trouble = error
        snapshot, current, directory = self._last, not self.trouble, None
        facts = MetricFacts(time.time(), __version__, snapshot, current=current, driver_up=current)
        if snapshot and current:
            facts = replace(facts, uses=uses(snapshot, process_facts(snapshot)), errors=self._rare.errors(snapshot))
        with suppress(ClaimError):
            directory = self._find_directory()
        return _with_directory(facts, directory)

    def close(self) -> None:
        """Close the driver."""
        self._source.close()

    def _suits(self, snapshot: Snapshot) -> bool:
        return not self._clocks or any(device.clock_sm is not None for device in snapshot.devices)

    def _read_driver(self, backend: Backend) -> Snapshot:
        self._rare.scraped()
        return backend.sample(WHO_FIELDS | self._rare.groups())


class EventCounter:
    """Counts Events on their way into the audit log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: Counter[Action] = Counter()
        self._unrecorded = self._troubles = 0

    def append(self, event: Event) -> bool:
        """As audit_log.append."""
        written = audit_log.append(event)
        policy = dict(event.facts).get("policy")
        with self._lock:
            self._unrecorded += not written
            self._troubles += event.kind == "watchdog" and event.outcome != "watching again"
            if event.kind in ACTIONS and policy is not None:
                self._actions[str(policy), event.kind, event.outcome] += 1
        return written

    def totals(self) -> dict[str, Any]:
        """What was counted so far, as fields of MetricFacts."""
        with self._lock:
            return {"actions": dict(self._actions), "unrecorded": self._unrecorded, "troubles": self._troubles}


class DaemonFacts:
    """The facts of a daemon, which samples more while scrapes come; read() may be called in any thread."""

    def __init__(self, daemon: Daemon, directory: LockDirectory | None, counter: EventCounter) -> None:
        self._daemon, self._directory, self._counter = daemon, directory, counter
        self._rare = RareFields()
        daemon.watchdog.extra_fields = self._rare.groups

    def read(self) -> MetricFacts:
        """What the daemon knows now."""
        watchdog, snapshot, waiting = self._daemon.watchdog, self._daemon.last, self._daemon.waiting
        interval = max(watchdog.interval[1], watchdog.pause)
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - snapshot.clock
        current = watchdog.problem is None and age <= STALE_INTERVALS * interval
        sampled = bool(snapshot.taken_at)
        self._rare.scraped()
        facts = MetricFacts(
            time.time(),
            __version__,
            snapshot if sampled else None,
            current=current,
            errors=self._rare.errors(snapshot),
            uses=uses(with_quarantine(snapshot, self._directory), watchdog.processes(snapshot)) if current else (),
            waiting=_since(waiting) if current else None,
            driver_up=current if sampled or watchdog.problem else None,  # None: it was not read yet
            interval=interval,
            daemon_up=True,
            **self._counter.totals(),
        )
        return _with_directory(facts, self._directory)


def _with_directory(facts: MetricFacts, directory: LockDirectory | None) -> MetricFacts:
    """*facts* with what lies among the claims and is not known yet: who waits, what is out of service, and a daemon."""
    if directory is None:
        return facts
    return replace(
        facts,
        waiting=facts.waiting if facts.waiting is not None else _since(waiting_tickets(directory)),
        quarantined=frozenset(read_restrictions(directory, QUARANTINED, facts.now)),
        daemon_up=facts.daemon_up or daemon_lives(directory),
    )


def _since(waiting: Iterable[Ticket] | None) -> Sequence[tuple[str, float]] | None:
    return None if waiting is None else [(ticket.user, ticket.since) for ticket in waiting]
