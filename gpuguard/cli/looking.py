"""Where a command that only looks gets its snapshot from: what the daemon saw, or the driver."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpuguard.backends import Backend, is_recorded
from gpuguard.claims.lookout import Lookout
from gpuguard.cli.options import backend_of, directory_of
from gpuguard.errors import ClaimError
from gpuguard.model import WHO_FIELDS, Snapshot
from gpuguard.state import read_state

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection


class Source:
    """What the daemon saw, while that is fresh, else the driver, which is opened when it is first needed."""

    def __init__(self, args: argparse.Namespace, fields: Collection[str] = WHO_FIELDS) -> None:
        self._args, self._fields = args, fields
        self._backend: Backend | None = None
        self.lookout = Lookout()

    def sample(self) -> tuple[Snapshot, float | None]:
        """The machine, and how many seconds ago the daemon looked; None: read now."""
        clock = time.clock_gettime(time.CLOCK_BOOTTIME)
        seen = None if self._args.fresh else of_daemon(self._args, clock)
        if seen:
            return seen, clock - seen.clock
        if self._backend is None:
            self._backend = backend_of(self._args)
            self._look_at_claims()
        return self._backend.sample(self._fields), None

    def close(self) -> None:
        """Let go of the driver."""
        if self._backend:
            self._backend.close()

    def _look_at_claims(self) -> None:
        """Find out who holds the locks: the driver's library takes 20 ms to load, in another process."""
        try:
            self.lookout.prepare(directory_of(self._args))
        except (ClaimError, OSError):
            return  # it will be tried again, and said


def of_daemon(args: argparse.Namespace, clock: float) -> Snapshot | None:
    """What the daemon saw, if that is fresh at *clock* (CLOCK_BOOTTIME) and no recording is wanted."""
    if is_recorded(args.backend):
        return None
    try:
        directory = directory_of(args)
    except ClaimError:
        return None  # the claims will be missing, and that will be said
    return read_state(directory, clock, simulated=args.backend.startswith("simulated"))
