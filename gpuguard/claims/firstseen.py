"""Since when claims are known to somebody who looks again and again: no younger is one, whatever its record says.

What a record says of its age is its owner's word.  Who wrote each minute that his claim was made just now was never
judged by rules that leave a new claim alone for a while; one without a record has been there for as long, too.
Knows nothing of what was before it first looked.
"""

from __future__ import annotations

from gpuguard.model import ClaimRecord
from gpuguard.nouns import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class FirstSeen:
    """Remembers claims for as long as each look finds them."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str, str], float] = {}  # uid, id, uuid -> CLOCK_BOOTTIME

    def dated(self, claims: Iterable[ClaimRecord], clock: float, now: float) -> tuple[ClaimRecord, ...]:
        """*claims* as found at *clock* (CLOCK_BOOTTIME), which was *now* (unix time), none younger than it is."""
        seen: dict[tuple[int, str, str], float] = {}
        dated = []
        for claim in claims:
            for uuid in claim.devices:
                key = claim.uid, claim.id, uuid
                seen[key] = min(self._seen.get(key, clock), clock)
            # A claim may have got a device since.
            first = max((seen[claim.uid, claim.id, uuid] for uuid in claim.devices), default=clock)
            known_since = now - (clock - first)
            younger = claim.devices and (claim.since is None or claim.since > known_since)
            dated.append(replace(claim, since=known_since) if younger else claim)
        self._seen = seen
        return tuple(dated)
