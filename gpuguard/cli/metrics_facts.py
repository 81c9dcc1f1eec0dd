"""Where the numbers of `gpuguard metrics` come from: a daemon's last look, or the driver; and its page.

What a daemon tells of itself is in daemon_metrics.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from gpuguard import __version__
from gpuguard.ancestry import look_up
from gpuguard.backends import Backend
from gpuguard.claims.lockfiles import LockDirectory
from gpuguard.claims.lookout import Lookout
from gpuguard.cli.options import backend_of, directory_of
from gpuguard.errors import BackendError, ClaimError
from gpuguard.line.tickets import who_waits
from gpuguard.marks import QUARANTINED, read_marks
from gpuguard.model import CLOCKS, ECC, WHO_FIELDS, Device, Gap, Snapshot
from gpuguard.serving import Page, Pages
from gpuguard.state import daemon_lives, read_state
from gpuguard.views.exposition import CONTENT_TYPE, to_prometheus
from gpuguard.views.metrics import ERRORS, Facts, Family, families
from gpuguard.views.usage import uses

if TYPE_CHECKING:
    import argparse

    from gpuguard.line.order import Ticket

_errors = attrgetter(*ERRORS)
_NOTHING = (None,) * len(ERRORS)
ERRORS_SECONDS = 60.0
ASKED_SECONDS = 300.0  # who has not asked for so long does not ask any more
PAGE_SECONDS = 1.0  # for so long a page is not made anew: who asks a thousand times costs no more than who asks once


class Seldom:
    """What is read only while somebody asks: clocks, and now and then the errors of memory.

    Those are 9 of 30 driver calls per device, and change once in months.
    """

    def __init__(self) -> None:
        self._asked_at = self._seen_at = -math.inf
        self._known: dict[str, Device] = {}

    def groups(self) -> frozenset[str]:
        """What the next sample should read beside what it reads anyway."""
        now = time.monotonic()
        if now - self._asked_at > ASKED_SECONDS:
            return frozenset()
        return frozenset({CLOCKS, ECC} if now - self._seen_at >= ERRORS_SECONDS else {CLOCKS})

    def asked(self) -> None:
        """Somebody asks."""
        self._asked_at = time.monotonic()

    def errors(self, snapshot: Snapshot) -> tuple[Device, ...]:
        """The devices of *snapshot* as they were when their errors were read last."""
        now = time.monotonic()
        if any(_errors(device) != _NOTHING for device in snapshot.devices) or any(
            gap.field in ERRORS for gap in snapshot.gaps
        ):
            self._known, self._seen_at = {device.uuid: device for device in snapshot.devices}, now
        if now - self._seen_at >= 3 * ERRORS_SECONDS:
            return snapshot.devices
        return tuple([self._known.get(device.uuid, device) for device in snapshot.devices])


class Looking:
    """What `gpuguard metrics` sees: the daemon's last look where that has all that is asked for, else the driver."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._backend: Backend | None = None
        self._last: Snapshot | None = None
        self._seldom = Seldom()
        self._lookout = Lookout()
        self.trouble: BackendError | None = None  # of the last look

    def facts(self) -> Facts:
        """The machine now."""
        directory = self._directory()
        self.trouble = None
        try:
            self._last = self._sample(directory)
        except BackendError as error:
            self.trouble = error
        snapshot = self._last
        facts = Facts(time.time(), __version__, snapshot, current=not self.trouble, driver_up=not self.trouble)
        if snapshot and not self.trouble:
            facts = replace(facts, uses=uses(snapshot, look_up(snapshot)), errors=self._seldom.errors(snapshot))
        return with_directory(facts, directory)

    def close(self) -> None:
        """Let go of the driver."""
        if self._backend:
            self._backend.close()

    def _directory(self) -> LockDirectory | None:
        try:
            return directory_of(self._args)
        except ClaimError:
            return None

    def _sample(self, directory: LockDirectory | None) -> Snapshot:
        if directory and not self._args.fresh:
            clock = time.clock_gettime(time.CLOCK_BOOTTIME)
            seen = read_state(directory, clock, simulated=self._args.backend.startswith("simulated"))
            if seen and (not self._args.compat or any(device.clock_sm is not None for device in seen.devices)):
                return seen
        self._backend = self._backend or backend_of(self._args)
        self._seldom.asked()
        snapshot = self._backend.sample(WHO_FIELDS | self._seldom.groups())
        try:
            if directory is None:
                raise ClaimError("there is no directory of claims that can be used")
            return replace(snapshot, claims=self._lookout.look(directory, [device.uuid for device in snapshot.devices]))
        except ClaimError as error:
            return replace(snapshot, gaps=(*snapshot.gaps, Gap(None, "claims", " ".join(str(error).split()))))


def with_directory(facts: Facts, directory: LockDirectory | None) -> Facts:
    """*facts* with what lies among the claims and is not known yet: who waits, what is out of service, and a daemon."""
    if directory is None:
        return facts
    return replace(
        facts,
        waiting=facts.waiting if facts.waiting is not None else told_of(who_waits(directory)),
        quarantined=frozenset(read_marks(directory, QUARANTINED, facts.now)),
        daemon_up=facts.daemon_up or daemon_lives(directory),
    )


def told_of(waiting: Iterable[Ticket] | None) -> tuple[tuple[str, float], ...] | None:
    """What Facts tell of those who wait."""
    return None if waiting is None else tuple([(ticket.user, ticket.since) for ticket in waiting])


def text_of(facts: Facts, compat: list[str]) -> str:
    """The page for Prometheus: our own names, and those of other exporters."""
    found = families(facts)
    for name in dict.fromkeys(compat):
        found += _compat()[name](facts)
    return to_prometheus(found)


def _compat() -> Mapping[str, Callable[[Facts], list[Family]]]:
    from gpuguard.views.metrics_compat import COMPAT  # few ask for it, and a daemon without it is 0.2 MiB smaller

    return COMPAT


def pages(facts: Callable[[], Facts], compat: list[str]) -> Pages:
    """/metrics, in which ?compat=dcgm adds names to those of *compat*."""
    made: dict[tuple[str, ...], tuple[float, str]] = {}
    usual = tuple(name for name in _compat() if name in compat) if compat else ()

    def page(path: str, query: Mapping[str, list[str]]) -> Page:
        if path == "/":
            return Page(f"gpuguard {__version__} on {os.uname().nodename}: the numbers are at /metrics\n")
        if path != "/metrics":
            return Page("there is only /metrics\n", status=404)
        names = usual
        if asked := query.get("compat"):
            if unknown := set(asked) - set(_compat()):
                return Page(f"compat: there is no {min(unknown)!r}, but {' and '.join(_compat())}\n", status=400)
            names = tuple(name for name in _compat() if name in (*compat, *asked))
        now = time.monotonic()
        if names not in made or now - made[names][0] >= PAGE_SECONDS:
            made[names] = now, text_of(facts(), list(names))
        return Page(made[names][1], CONTENT_TYPE)

    return page
