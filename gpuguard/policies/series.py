"""What was measured before: the series that rules ask for, and whether the samples come without a hole.

A rule asks by ``needs() -> ((field, seconds), ...)``.  Does not judge, and fills nothing in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from gpuguard.model import Snapshot, Subject
from gpuguard.policies.view import RuleView, Sample, device_subject, judged, key_of, process_subject

PROCESS_FIELDS = frozenset({"memory_used"})  # the others are recorded per device only

# Samples per series.  A day at one per second would be 7 MB for each device and process; 170 kB are enough to see a
# trend by, and a mean over 42 s of a day hides nothing that a rule about a day would ask for.
MOST = 2048

LARGEST_DISTANCE = 3  # intervals between two samples: whatever happened in a longer pause was not seen
REMEMBERED_DISTANCES = 9


class Rhythm:
    """The distances between samples, to tell a pause from a slow rhythm."""

    def __init__(self) -> None:
        self.clock: float | None = None
        self._distances: deque[float] = deque(maxlen=REMEMBERED_DISTANCES)

    def largest(self, interval: float | None) -> float:
        """The longest pause in seconds that is none; endless as long as no rhythm is known."""
        usual = interval if interval is not None else _middle(self._distances) if self._distances else float("inf")
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
        for process in judged(device) if of_processes else ():
            key = key_of(process_subject(device, process))
            for field in of_processes:
                value = getattr(process, field)
                if value is not None:
                    yield field, key, value


def _middle(numbers: Iterable[float]) -> float:
    """The median; the module that has one loads random, fractions and decimal: 480 KiB in every daemon."""
    ranked = sorted(numbers)
    return (ranked[len(ranked) // 2] + ranked[(len(ranked) - 1) // 2]) / 2


# Where a series is going, by the slopes between all pairs of some of its samples (Theil-Sen).
#
# Their middle hardly moves when a quarter of the samples is wild, and a single jump, however high, lifts about half of
# them: a job that loads its model once is no trend.
# H. Theil 1950; P. K. Sen, JASA 63 (1968) 1379.


POINTS = 24  # 276 pairs: about 50 us per series; all pairs of 600 samples would take 30 ms
LARGEST_HOLE = 0.1  # of the window: where more is missing, nobody knows how the time was spent
LOOKS = 64  # at so many places of a series is looked for holes
GOLDEN = 0.618034  # samples are taken at uneven distances, so that they keep no pace with what rises and falls


def recent(view: RuleView, subject: Subject, field: str, seconds: float) -> list[Sample]:
    """The samples of the last *seconds*; [] unless they cover them without a large hole."""
    series = view.past.get((key_of(subject), field), ())
    first = bisect_left(series, view.clock - seconds, key=_clock)
    return [series[place] for place in range(first, len(series))] if _covers(series, first, view.clock, seconds) else []


def slopes(view: RuleView, subject: Subject, field: str, seconds: float) -> list[float]:
    """Per second, rising, between all pairs of at most POINTS samples of the last *seconds*.

    [0.0] where nothing changes; else [] unless the samples cover the time without a large hole.
    """
    series, begin = view.past.get((key_of(subject), field), ()), view.clock - seconds
    if not series or series[-1][0] < begin:
        return []
    # First of all, as it is so for most processes most of the time: a third of all the time that judging took.
    if getattr(series, "unchanged_since", float("inf")) <= max(begin, series[0][0]):
        return [0.0]
    first = bisect_left(series, begin, key=_clock)
    points = [series[first + place] for place in _places(len(series) - first)]
    if points and all(value == points[0][1] for _, value in points):
        return [0.0]
    if not _covers(series, first, view.clock, seconds):
        return []
    return sorted(
        (later - earlier) / (at - before)
        for place, (at, later) in enumerate(points)
        for before, earlier in points[:place]
        if at > before
    )


def middle(ordered: Sequence[float]) -> float:
    """The best single guess of ordered slopes; the lower one of two."""
    return ordered[(len(ordered) - 1) // 2]


def sure(ordered: Sequence[float]) -> float:
    """What three quarters of ordered slopes reach.  Chance alone lifts so many above 0 once in some thousand times:
    with 24 points it lifts 50% +- 7% (M. G. Kendall, Biometrika 30 (1938) 81), and a jump half-way lifts 56% at most.
    """
    return ordered[int(0.25 * (len(ordered) - 1))]


@lru_cache(maxsize=256)  # the series of a sample are mostly of one length
def _places(count: int) -> Sequence[int]:
    if count <= POINTS:
        return range(count)
    return [int((k + k * GOLDEN % 1) * count / POINTS) for k in range(POINTS)]


def _clock(sample: Sample) -> float:
    return sample[0]


def _covers(series: Sequence[Sample], first: int, now: float, seconds: float) -> bool:
    if first == len(series):
        return False
    step = -(-(len(series) - first) // LOOKS)
    clocks = [now - seconds, *(series[place][0] for place in range(first, len(series), step)), series[-1][0], now]
    return max(later - earlier for earlier, later in pairwise(clocks)) <= LARGEST_HOLE * seconds
