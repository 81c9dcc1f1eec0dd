"""Where a series is going, by the slopes between all pairs of some of its samples (Theil-Sen).

Their middle hardly moves when a quarter of the samples is wild, and a single jump, however high, lifts about half of
them: a job that loads its model once is no trend.
H. Theil 1950; P. K. Sen, JASA 63 (1968) 1379.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from gpuguard.model import Subject
from gpuguard.policies.view import Sample, View, key_of

POINTS = 24  # 276 pairs: about 50 us per series; all pairs of 600 samples would take 30 ms
LARGEST_HOLE = 0.1  # of the window: where more is missing, nobody knows how the time was spent
LOOKS = 64  # at so many places of a series is looked for holes
GOLDEN = 0.618034  # samples are taken at uneven distances, so that they keep no pace with what rises and falls


def recent(view: View, subject: Subject, field: str, seconds: float) -> list[Sample]:
    """The samples of the last *seconds*; [] unless they cover them without a large hole."""
    series = view.past.get((key_of(subject), field), ())
    first = bisect_left(series, view.clock - seconds, key=_clock)
    return [series[place] for place in range(first, len(series))] if _covers(series, first, view.clock, seconds) else []


def slopes(view: View, subject: Subject, field: str, seconds: float) -> list[float]:
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
