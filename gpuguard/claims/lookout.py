"""Looks at the claims of a directory again and again, for who only shows them.

Which locks are held is asked each time; by whom is found out anew every HOLDERS_SECONDS, because that asks every
process of the machine, and takes longer than all the rest.  Whoever decides something uses records.probe().
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpuguard.claims.records import probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuguard.claims.lockfiles import LockDirectory
    from gpuguard.model import ClaimRecord

HOLDERS_SECONDS = 10.0


class Lookout:
    """Remembers what it has found."""

    def __init__(self) -> None:
        self._known: tuple[ClaimRecord, ...] = ()
        self._forgets_at = float("-inf")

    def look(
        self, directory: LockDirectory, uuids: Iterable[str], known: Sequence[ClaimRecord] = ()
    ) -> tuple[ClaimRecord, ...]:
        """The claims now, as probe(); *known* is what somebody else, as the daemon, has found a moment ago."""
        now = time.monotonic()
        if now >= self._forgets_at:
            self._known, self._forgets_at = (), now + HOLDERS_SECONDS
        self._known = probe(directory, uuids, known=known or self._known)
        return self._known

    def prepare(self, directory: LockDirectory) -> None:
        """Find out who holds the locks now, while something else is waited for."""
        self.look(directory, lock_names(directory))


def lock_names(directory: LockDirectory) -> list[str]:
    """The uuids of the devices that have a lock file."""
    import os

    start = directory.prefix
    names = [name.removeprefix(start) for name in os.listdir(directory.locks) if name.startswith(start)]
    return [name for name in names if name.startswith(("GPU-", "MIG-")) and ".slot" not in name]
