"""What a plan of the waiting line consists of: starts that are planned, and until when devices are busy by them.

Does not decide who starts when: see plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuguard.request import Request

UNKNOWN = float("inf")  # some day


@dataclass(frozen=True)
class Planned:
    """A start (unix time) on devices: inf is some day, None for the request never."""

    start: float
    request: Request | None = None
    devices: tuple[str, ...] = ()


NEVER = Planned(UNKNOWN)


class Busy:
    """Until when the devices of a plan are busy: for whoever wants one alone, and for whoever shares."""

    def __init__(self, alone: dict[str, float] | None = None, shared: dict[str, float] | None = None) -> None:
        self._alone, self._shared = alone or {}, shared or {}

    def copy(self) -> Busy:
        """One that can be filled further."""
        return Busy(dict(self._alone), dict(self._shared))

    def until(self, *, shared: bool) -> Mapping[str, float]:
        """uuid -> unix time, of those on which something is planned."""
        return self._shared if shared else self._alone

    def add(self, it: Planned, lasts: float | None, kin: Mapping[str, tuple[str, ...]]) -> None:
        """Something runs on its devices from its start on."""
        if it.request is None:
            return
        until = UNKNOWN if lasts is None else it.start + lasts
        for uuid in it.devices:
            for each in (uuid, *kin.get(uuid, ())):
                for taken in (self._alone,) if it.request.share else (self._alone, self._shared):
                    taken[each] = max(until, taken.get(each, until))
