"""What was measured before: the series that rules ask for, and whether the samples come without a hole.

A rule asks by ``needs() -> ((field, seconds), ...)``.  Does not judge, and fills nothing in.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import overload

from gpuguard.model import Snapshot
from gpuguard.policies.view import Sample, device_subject, judged, key_of, process_subject

PROCESS_FIELDS = frozenset({"memory_used"})  # the others are recorded per device only

# Samples per series.  A day at one per second would be 1.4 MB for each device and process; 64 kB is enough to see a
# trend by, and a mean over 21 s of a day hides nothing that a rule about a day would ask for.
MOST = 4096

LARGEST_DISTANCE = 3  # intervals between two samples: whatever happened in a longer pause was not seen
REMEMBERED_DISTANCES = 9


class Rhythm:
    """The distances between samples, to tell a pause from a slow rhythm."""

    def __init__(self) -> None:
        self.clock: float | None = None
        self._distances: deque[float] = deque(maxlen=REMEMBERED_DISTANCES)

    def largest(self, interval: float | None) -> float:
        """The longest pause in seconds that is none; endless as long as no rhythm is known."""
        usual = interval if interval is not None else median(self._distances) if self._distances else float("inf")
        return usual * LARGEST_DISTANCE

    def beat(self, clock: float) -> None:
        """A sample was taken at *clock*."""
        if self.clock is not None and clock > self.clock:
            self._distances.append(clock - self.clock)
        self.clock = clock


class Series(Sequence[Sample]):
    """(clock, value) of the last *window* seconds, oldest first, at most MOST of them.

    Where more samples came than that, each stands for a slice of time: its last clock and the mean of its values.
    """

    __slots__ = ("_clocks", "_first", "_members", "_opened", "_values", "window")

    def __init__(self, window: float) -> None:
        self.window = window
        self._clocks, self._values = array("d"), array("d")
        self._first = 0  # what stands before it is too old, and is cut off now and then
        self._opened, self._members = 0.0, 0

    def add(self, clock: float, value: float) -> None:
        """Take a sample in, and forget what is older than the window now."""
        if self._members and clock - self._opened < self.window / MOST:
            self._members += 1
            self._clocks[-1] = clock
            self._values[-1] += (value - self._values[-1]) / self._members
        else:
            self._opened, self._members = clock, 1
            self._clocks.append(clock)
            self._values.append(value)
        while self._clocks[self._first] < clock - self.window:
            self._first += 1
        if self._first > 32 and self._first * 2 > len(self._clocks):
            del self._clocks[: self._first], self._values[: self._first]
            self._first = 0

    @property
    def last(self) -> float:
        """Clock of the newest sample."""
        return self._clocks[-1]

    def __len__(self) -> int:
        return len(self._clocks) - self._first

    def __iter__(self) -> Iterator[Sample]:
        return zip(self._clocks[self._first :], self._values[self._first :], strict=True)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        if isinstance(place, slice):
            return list(self)[place]
        at = range(self._first, len(self._clocks))[place]
        return self._clocks[at], self._values[at]


class Past(dict[tuple[str, str], Series]):
    """(subject key, field) -> its series."""

    def record(self, snapshot: Snapshot, windows: Mapping[str, float], largest_hole: float) -> None:
        """Add what *snapshot* knows of the fields in *windows* (field -> seconds).

        A series with a hole longer than *largest_hole* starts afresh.  What nobody asks for any more, and what was
        not seen for a whole window, is forgotten.
        """
        clock = snapshot.clock
        for field, key, value in _values(snapshot, windows):
            series = self.get((key, field))
            if series is None or clock - series.last > largest_hole:
                series = self[key, field] = Series(windows[field])
            series.window = windows[field]
            series.add(clock, value)
        for name in [name for name, one in self.items() if one.last < clock - windows.get(name[1], -1.0)]:
            del self[name]


def windows_of(rules: Iterable[object]) -> dict[str, float]:
    """The longest past in seconds that any of *rules* needs, by field."""
    windows: dict[str, float] = {}
    for rule in rules:
        needs = getattr(rule, "needs", None)
        for field, seconds in needs() if needs else ():
            windows[field] = max(seconds, windows.get(field, 0.0))
    return windows


def _values(snapshot: Snapshot, windows: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    if not windows:
        return
    of_processes = PROCESS_FIELDS & windows.keys()
    for device in snapshot.devices:
        key = key_of(device_subject(device))
        for field in windows:
            value = getattr(device, field, None)
            if value is not None:
                yield field, key, value
        for process in judged(device) if of_processes else ():
            key = key_of(process_subject(device, process))
            for field in of_processes:
                value = getattr(process, field)
                if value is not None:
                    yield field, key, value
