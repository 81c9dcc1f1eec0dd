"""What was measured before: the series that rules ask for, and whether the samples come without a hole.

A rule asks by ``needs() -> ((field, seconds), ...)``.  Does not judge, and fills nothing in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from gpuguard.model import Snapshot, Subject
from gpuguard.policies.view import RuleView, Sample, device_subject, judged_processes, key_of, process_subject

PROCESS_FIELDS = frozenset({"memory_used"})  # the others are recorded per device only

# Samples per series.  A day at one per second would be 7 MB for each device and process; 170 kB are enough to see a
# trend by, and a mean over 42 s of a day hides nothing that a rule about a day would ask for.
MOST = 2048

LARGEST_DISTANCE = 3  # intervals between two samples: whatever happened in a longer pause was not seen
REMEMBERED_DISTANCES = 9
LARGEST_HOLE = 0.1  # of a window: where more is missing, nobody knows how the time was spent
PROBES = 64  # places of a series at which a hole is looked for


class SampleRhythm:
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


class ValueSeries(list[Sample]):
    """(clock, value) of the last *window* seconds, oldest first, at most MOST of them.

    Where more samples came than that, each stands for a slice of time: its last clock and the mean of its values.
    """

    def __init__(self, window: float) -> None:
        super().__init__()
        self.window = window
        self.unchanged_since = float("inf")  # clock of the first of those samples that all have the newest value
        self._opened, self._members = 0.0, 0  # the newest slice: its first clock, and of how many samples it is made

    def add(self, clock: float, value: float) -> None:
        """Take a sample in, and forget what is older than the window now."""
        if not self or value != self[-1][1]:
            self.unchanged_since = clock
        if self._members and clock - self._opened < self.window / MOST:
            self._members += 1
            mean = self[-1][1]
            self[-1] = (clock, mean + (value - mean) / self._members)
        else:
            self._opened, self._members = clock, 1
            self.append((clock, value))
        old = 0
        while self[old][0] < clock - self.window:
            old += 1
        if old:
            del self[:old]

    @property
    def last(self) -> float:
        """Clock of the newest sample."""
        return self[-1][0]


class Past(dict[tuple[str, str], ValueSeries]):
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
                series = self[key, field] = ValueSeries(windows[field])
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
        for process in judged_processes(device) if of_processes else ():
            key = key_of(process_subject(device, process))
            for field in of_processes:
                value = getattr(process, field)
                if value is not None:
                    yield field, key, value


def recent(view: RuleView, subject: Subject, field: str, seconds: float) -> list[Sample]:
    """The samples of the last *seconds*; [] unless they cover them without a large hole."""
    series = view.past.get((key_of(subject), field), ())
    first = bisect_left(series, view.clock - seconds, key=clock_of)
    return [series[place] for place in range(first, len(series))] if covers(series, first, view.clock, seconds) else []


def clock_of(sample: Sample) -> float:
    """When it was taken."""
    return sample[0]


def covers(series: Sequence[Sample], first: int, now: float, seconds: float) -> bool:
    """Whether *series*, from the place *first* on, covers the last *seconds* without a large hole."""
    if first == len(series):
        return False
    step = -(-(len(series) - first) // PROBES)
    clocks = [now - seconds, *(series[place][0] for place in range(first, len(series), step)), series[-1][0], now]
    return max(later - earlier for earlier, later in pairwise(clocks)) <= LARGEST_HOLE * seconds
