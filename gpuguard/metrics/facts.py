"""The facts for monitoring systems, and where they come from: the driver, or a daemon and what it has counted.

A scrape of a daemon is answered in a thread of its own, and waits neither for the driver nor for the daemon's loop.
This module does not turn the facts into numbers: see families.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuguard import __version__
from gpuguard.batch.public import PublicJob, public_jobs
from gpuguard.claims.restrictions import QUARANTINED, read_restrictions
from gpuguard.device_state import DeviceUse, claims_readable, uses
from gpuguard.enforcement.actions import ACTIONS
from gpuguard.errors import BackendError, ClaimError
from gpuguard.history import audit_log
from gpuguard.model import (
    CLOCKS,
    ECC,
    GROUPED_FIELDS,
    MEDIA,
    NVLINK_FLOW,
    PCIE,
    WHO_FIELDS,
    Device,
    Event,
    Snapshot,
)
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
ERRORS_SECONDS = 60.0  # between two readings of errors: they are 9 of 30 driver calls per device
RARE_FIELDS = frozenset(field for group in (ECC, MEDIA, PCIE, NVLINK_FLOW) for field in GROUPED_FIELDS[group])
TRAFFIC_SECONDS = 10.0  # between two readings of what other exporters report: PCIe takes 40 ms per device
SCRAPED_SECONDS = 300.0  # without a scrape, after which nothing is taken to read the numbers any more
STALE_INTERVALS = 3  # a sample that is older says nothing about now


@dataclass(frozen=True)
class MetricFacts:
    """All facts that are reported.  None means unknown, or known only to the daemon."""

    now: float  # unix time
    version: str  # of gpuguard
    snapshot: Snapshot | None = None  # the last one, with what RareFields knows
    current: bool = False  # whether its values still count; otherwise only the identity of its devices is reported
    uses: tuple[DeviceUse, ...] = ()  # of its devices
    waiting: Sequence[tuple[str, float]] | None = None  # users who wait, and since when (unix time)
    jobs: Sequence[PublicJob] | None = None  # of `gpuguard submit` that wait or run
    quarantined: frozenset[str] | None = None  # uuids that are out of service
    driver_up: bool | None = None  # whether the driver answered the last time
    daemon_up: bool | None = None  # whether a daemon guards this machine
    interval: float | None = None  # seconds between two samples
    troubles: int | None = None  # how often sampling began to fail since the daemon started
    actions: Mapping[Action, int] | None = None  # of policies, since the daemon started
    policies: Mapping[str, int] | None = None  # mode -> how many are in force
    policy_faults: int | None = None  # of the policy file, including names in it that do not exist here
    line_faults: int | None = None  # of line.yaml
    breaches: Mapping[tuple[str, str], int] | None = None  # (policy, its stage) -> how many conditions hold now
    unrecorded: int | None = None  # lines of the audit log that could not be written since the daemon started


class _Rare:
    """Fields that are read every *seconds*, and whose values count for three times as long.

    Only the metric names of *exporters* need them.  If *exporters* is empty, our own names need them as well.
    """

    def __init__(self, groups: set[str], seconds: float, exporters: frozenset[str] = frozenset()) -> None:
        self.groups, self.exporters = groups, exporters
        self._fields = [field for group in groups for field in GROUPED_FIELDS[group]]
        self._seconds = seconds
        self._read_at = -math.inf
        self._known: dict[str, Device] = {}

    def due(self, now: float) -> bool:
        return now - self._read_at >= self._seconds

    def in_sample(self, snapshot: Snapshot) -> bool:
        """Return whether *snapshot* was asked for these fields."""
        return any(gap.field in self._fields for gap in snapshot.gaps) or any(
            getattr(device, field) is not None for device in snapshot.devices for field in self._fields
        )

    def filled(self, snapshot: Snapshot, now: float) -> Snapshot:
        """Return *snapshot* with these fields as they were last read, unless that is too long ago."""
        if self.in_sample(snapshot):
            self._known, self._read_at = {device.uuid: device for device in snapshot.devices}, now
            return snapshot
        if now - self._read_at >= 3 * self._seconds:
            return snapshot
        devices = [
            replace(device, **{field: getattr(self._known.get(device.uuid, device), field) for field in self._fields})
            for device in snapshot.devices
        ]
        return replace(snapshot, devices=tuple(devices))


class RareFields:
    """The fields read only while scrapes come: clocks, and at intervals those that take many or long driver calls."""

    def __init__(self) -> None:
        self._scraped: dict[str, float] = {}  # exporter -> when a scrape asked for its names; "": when any scrape came
        self._rare = (
            _Rare({ECC}, ERRORS_SECONDS),
            _Rare({MEDIA}, TRAFFIC_SECONDS, frozenset({"dcgm", "nvitop"})),
            _Rare({PCIE, NVLINK_FLOW}, TRAFFIC_SECONDS, frozenset({"nvitop"})),
        )

    def groups(self) -> frozenset[str]:
        """Return the field groups that the next sample should read beside those that it reads anyway."""
        now = time.monotonic()
        asked = {name for name, at in self._scraped.items() if now - at <= SCRAPED_SECONDS}
        if not asked:
            return frozenset()
        due = [rare for rare in self._rare if rare.due(now) and (not rare.exporters or asked & rare.exporters)]
        return frozenset({CLOCKS}.union(*(rare.groups for rare in due)))

    def scraped(self, exporters: Collection[str] = ()) -> None:
        """Note that a scrape has come, and that it asks for the names of *exporters* as well."""
        self._scraped.update(dict.fromkeys(("", *exporters), time.monotonic()))

    def suffices(self, snapshot: Snapshot) -> bool:
        """Return whether *snapshot* has all fields that the names of exporters need now; our own names can wait."""
        wanted = self.groups()
        due = [rare for rare in self._rare if rare.exporters and rare.groups <= wanted]
        exporters = self._scraped.keys() - {""}
        has_clocks = any(device.clock_sm is not None for device in snapshot.devices)
        return not exporters or (has_clocks and all(rare.in_sample(snapshot) for rare in due))

    def filled(self, snapshot: Snapshot) -> Snapshot:
        """Return *snapshot* with the values that were read in earlier ones and still count."""
        now = time.monotonic()
        for rare in self._rare:
            snapshot = rare.filled(snapshot, now)
        return snapshot


class MachineFacts:
    """The facts of a machine: from a daemon's latest snapshot if it has all that is wanted, otherwise from the driver.

    Args:
        backend: name of the backend; *open_backend* opens it when the driver is first needed.
        directory: finds the claim directory, at each reading; raises ClaimError if there is none.
        fresh: whether the driver is read even while a daemon runs.
    """

    def __init__(
        self,
        backend: str,
        open_backend: Callable[[], Backend],
        directory: Callable[[], LockDirectory],
        *,
        fresh: bool = False,
    ) -> None:
        self._rare = RareFields()
        self._source = SnapshotSource(
            backend,
            open_backend,
            directory,
            read=lambda driver: driver.sample(WHO_FIELDS | self._rare.groups()),
            suits=self._rare.suffices,
        )
        self._source.fresh = fresh
        self._find_directory = directory
        self._last: Snapshot | None = None
        self.trouble: BackendError | None = None  # of the last reading

    def read(self, exporters: Collection[str] = ()) -> MetricFacts:
        """Return the facts of the machine now, with the fields that the names of *exporters* need."""
        self.trouble = None
        self._rare.scraped(exporters)
        try:
            self._last, _ = self._source.joined(reservations=False)
        except BackendError as error:
            self.trouble = error
        snapshot, current, directory = self._last, not self.trouble, None
        facts = MetricFacts(time.time(), __version__, snapshot, current=current, driver_up=current)
        if snapshot and current:
            facts = replace(facts, snapshot=self._rare.filled(snapshot), uses=uses(snapshot, process_facts(snapshot)))
        with suppress(ClaimError):
            directory = self._find_directory()
        return _with_directory(facts, directory)

    def close(self) -> None:
        """Close the driver."""
        self._source.close()


class EventCounter:
    """Counts Events on their way into the audit log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: Counter[Action] = Counter()
        self._unrecorded = self._troubles = 0

    def append(self, event: Event) -> bool:
        """Append *event* as audit_log.append() does, and count it."""
        written = audit_log.append(event)
        policy = dict(event.facts).get("policy")
        with self._lock:
            self._unrecorded += not written
            self._troubles += event.kind == "watchdog" and event.outcome != "watching again"
            if event.kind in ACTIONS and policy is not None:
                self._actions[str(policy), event.kind, event.outcome] += 1
        return written

    def totals(self) -> dict[str, Any]:
        """Return the counts so far, as fields of MetricFacts."""
        with self._lock:
            return {"actions": dict(self._actions), "unrecorded": self._unrecorded, "troubles": self._troubles}


class DaemonFacts:
    """The facts of a daemon, which samples more while scrapes come; read() may be called in any thread."""

    def __init__(self, daemon: Daemon, directory: LockDirectory | None, counter: EventCounter) -> None:
        self._daemon, self._directory, self._counter = daemon, directory, counter
        self._rare = RareFields()
        daemon.watchdog.extra_fields = self._rare.groups

    def read(self, exporters: Collection[str] = ()) -> MetricFacts:
        """Return what the daemon knows now.

        Fields that only the names of *exporters* need are in its next samples.
        """
        watchdog, snapshot, waiting = self._daemon.watchdog, self._daemon.last, self._daemon.waiting
        interval = max(watchdog.site_rules.interval[1], watchdog.pause)
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - snapshot.clock
        current = watchdog.problem is None and age <= STALE_INTERVALS * interval
        sampled = bool(snapshot.taken_at)
        self._rare.scraped(exporters)
        facts = MetricFacts(
            time.time(),
            __version__,
            self._rare.filled(snapshot) if sampled else None,
            current=current,
            uses=uses(with_quarantine(snapshot, self._directory), watchdog.processes(snapshot)) if current else (),
            waiting=_since(waiting) if current else None,
            driver_up=current if sampled or watchdog.problem else None,  # None if it was not read yet
            interval=interval,
            daemon_up=True,
            policies=Counter("enforce" if policy.enforce else "observe" for policy in watchdog.policies),
            policy_faults=self._daemon.faults,
            line_faults=self._daemon.queue_settings.faults,
            breaches=Counter((status.policy, status.stage) for status in watchdog.status()) if current else None,
            **self._counter.totals(),
        )
        return _with_directory(facts, self._directory)


def _with_directory(facts: MetricFacts, directory: LockDirectory | None) -> MetricFacts:
    """Fill *facts* in from the claim directory: users who wait, devices out of service, and whether a daemon runs."""
    if directory is None:
        return facts
    return replace(
        facts,
        waiting=facts.waiting if facts.waiting is not None else _since(waiting_tickets(directory)),
        jobs=_jobs(facts, directory),
        quarantined=frozenset(read_restrictions(directory, QUARANTINED, facts.now)),
        daemon_up=facts.daemon_up or daemon_lives(directory),
    )


def _jobs(facts: MetricFacts, directory: LockDirectory) -> Sequence[PublicJob] | None:
    if not facts.current or facts.snapshot is None or not claims_readable(facts.snapshot):
        return None
    try:
        return public_jobs(directory, facts.snapshot.claims)
    except OSError:
        return None


def _since(waiting: Iterable[Ticket] | None) -> Sequence[tuple[str, float]] | None:
    return None if waiting is None else [(ticket.user, ticket.since) for ticket in waiting]
