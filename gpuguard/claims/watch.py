"""Looks at the claims of a directory again and again, for who only shows them.

Which locks are held is asked each time; by whom is found out anew every HOLDERS_SECONDS, because that asks every
process of the machine, and takes longer than all the rest.  Whoever decides something uses records.probe().
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.claims.records import probe
from gpuguard.model import ClaimRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuguard.claims.directory import LockDirectory
    from gpuguard.model import ClaimRecord

HOLDERS_SECONDS = 10.0


class ClaimWatcher:
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


# How old claims are at least, for somebody who looks again and again: as old as he knows them, whatever records say.
#
# The age in a record is its owner's word: a user who wrote each minute that his claim was made just now was never
# judged by rules that leave a new claim alone for a while.  A claim without a record has an age by this, too, and
# none grows older by hours because the machine's clock is set.  Knows nothing of what was before it first looked.


STEP_SECONDS = 1.0  # by which a clock is set at once, and not only made to go faster for a while


class FirstSeen:
    """Remembers claims for as long as each look finds them."""

    def __init__(self) -> None:
        # uid, id, uuid -> CLOCK_BOOTTIME, and the unix time that it was then
        self._seen: dict[tuple[int, str, str], tuple[float, float]] = {}

    def dated(self, claims: Iterable[ClaimRecord], clock: float, now: float) -> tuple[ClaimRecord, ...]:
        """*claims* as found at *clock* (CLOCK_BOOTTIME), which was *now* (unix time), none younger than it is."""
        seen: dict[tuple[int, str, str], tuple[float, float]] = {}
        dated = []
        for claim in claims:
            for uuid in claim.devices:
                key = claim.uid, claim.id, uuid
                seen[key] = min(self._seen.get(key, (clock, now)), (clock, now))
            # A claim may have got a device since.
            first, then = max((seen[claim.uid, claim.id, uuid] for uuid in claim.devices), default=(clock, now))
            known_since = now - (clock - first)
            since = claim.since
            if since is not None and abs(known_since - then) > STEP_SECONDS:  # it was told by the clock of then
                since += known_since - then
            if claim.devices and (since is None or since > known_since):
                since = known_since
            dated.append(claim if since == claim.since else replace(claim, since=since))
        self._seen = seen
        return tuple(dated)
