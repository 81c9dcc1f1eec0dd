"""What rules can look back on."""

from __future__ import annotations

from dataclasses import dataclass, field

from builders import GIB, a_device, a_process, a_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from ladders import Watch, a_policy, busy

from gpuguard.policies.series import MOST, Rhythm, ValueSeries, slopes
from gpuguard.policies.view import RuleView, device_subject, key_of, process_subject


@dataclass(frozen=True)
class Looks:
    """Notes what it sees of the past."""

    wanted: tuple[tuple[str, float], ...]
    seen: list[dict[tuple[str, str], list[tuple[float, float]]]] = field(default_factory=list, compare=False)

    def needs(self):
        return self.wanted

    def check(self, view: RuleView):
        self.seen.append({key: list(series) for key, series in view.past.items()})
        return ()


def past_of(rule: Looks, *samples, **settings):
    """What *rule* saw of the past at the last of *samples*."""
    watch = Watch(a_policy("warn", rules=(rule,)), **settings)
    for sample in samples:
        watch.sees(sample)
    return rule.seen[-1]


DEVICE = key_of(device_subject(a_device()))


def test_a_rule_sees_the_values_that_it_asked_for_and_the_newest_among_them():
    samples = [busy(clock, a_device(utilization=float(clock))) for clock in (0, 10, 20)]

    past = past_of(Looks((("utilization", 60),)), *samples)

    assert past == {(DEVICE, "utilization"): [(10_000, 0), (10_010, 10), (10_020, 20)]}


def test_memory_is_recorded_per_process_and_per_device():
    device = a_device(processes=(a_process(memory_used=GIB),), memory_used=2 * GIB)

    past = past_of(Looks((("memory_used", 60),)), busy(0, device))

    process = key_of(process_subject(device, a_process()))
    assert past == {(DEVICE, "memory_used"): [(10_000, 2 * GIB)], (process, "memory_used"): [(10_000, GIB)]}


def test_what_is_older_than_the_window_is_forgotten():
    samples = [busy(clock, a_device(temperature=50.0)) for clock in range(0, 200, 10)]

    (series,) = past_of(Looks((("temperature", 60),)), *samples).values()

    assert [clock for clock, _ in series] == [10_130, 10_140, 10_150, 10_160, 10_170, 10_180, 10_190]


def test_unknown_is_no_sample():
    samples = [busy(0, a_device(utilization=5.0)), busy(10, a_device(utilization=None))]

    assert past_of(Looks((("utilization", 60),)), *samples) == {(DEVICE, "utilization"): [(10_000, 5)]}


def test_unknown_memory_of_a_process_is_no_sample():
    devices = [a_device(processes=(a_process(memory_used=memory),)) for memory in (GIB, None)]
    past = past_of(Looks((("memory_used", 60),)), busy(0, devices[0]), busy(10, devices[1]))

    assert past[key_of(process_subject(a_device(), a_process())), "memory_used"] == [(10_000, GIB)]


def test_a_series_with_a_hole_starts_afresh():
    samples = [busy(clock, a_device(0), a_device(1)) for clock in (0, 10)]
    samples += [busy(clock, a_device(1)) for clock in range(20, 60, 10)] + [busy(60, a_device(0), a_device(1))]

    past = past_of(Looks((("utilization", 600),)), *samples)

    assert len(past[DEVICE, "utilization"]) == 1
    assert len(past[key_of(device_subject(a_device(1))), "utilization"]) == 7


def test_after_a_pause_nothing_is_remembered():
    samples = [busy(clock) for clock in (0, 10, 20, 3600)]

    assert [len(series) for series in past_of(Looks((("utilization", 7200),)), *samples).values()] == [1]


def test_the_longest_window_that_any_rule_wants_is_kept():
    rules = (Looks((("utilization", 30),)), Looks((("utilization", 100), ("power_draw", 10))))
    watch = Watch(a_policy("warn", rules=rules))
    for clock in range(0, 300, 10):
        watch.sees(busy(clock))

    assert {name[1]: len(series) for name, series in watch.memory.past.items()} == {"utilization": 11, "power_draw": 2}


def test_who_was_not_seen_for_a_window_is_forgotten():
    rule = Looks((("memory_used", 50),))
    gone = busy(0, a_device(processes=(a_process(),)))

    past = past_of(rule, gone, *(busy(clock, a_device()) for clock in range(10, 90, 10)))

    assert past.keys() == {(DEVICE, "memory_used")}


def test_a_past_that_nobody_wants_any_more_is_forgotten():
    watch = Watch(a_policy("warn", rules=(Looks((("utilization", 600),)),)))
    watch.sees(busy(0))
    watch.policies = (a_policy("warn"),)
    watch.sees(busy(10))

    assert watch.memory.past == {}


def test_the_past_of_processes_with_an_unknown_identity_is_not_recorded():
    device = a_device(processes=(a_process(start_time=None), a_process(2, uid=None)))

    assert past_of(Looks((("memory_used", 60),)), busy(0, device)).keys() == {(DEVICE, "memory_used")}


def test_a_long_window_is_kept_as_means_of_slices():
    series = ValueSeries(window=100_000.0)
    for second in range(120_000):
        series.add(float(second), float(second % 2))

    assert len(series) <= MOST + 1
    assert series[-1][0] == 119_999
    assert abs(sum(value for _, value in series) / len(series) - 0.5) < 0.01
    assert series[0][0] >= 19_999


def test_a_series_is_a_sequence():
    series = ValueSeries(window=25)
    for clock in range(0, 100, 10):
        series.add(clock, clock * 2)

    assert list(series) == series[:] == [(70, 140), (80, 160), (90, 180)]
    assert (series[0], series[-1], series[-2:], len(series)) == ((70, 140), (90, 180), [(80, 160), (90, 180)], 3)


def test_the_usual_distance_is_the_median_of_the_last_ones():
    rhythm = Rhythm()
    assert rhythm.largest(None) == float("inf")
    for clock in (0, 10, 20, 120, 130):
        rhythm.beat(clock)

    assert (rhythm.largest(None), rhythm.largest(1)) == (30, 3)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from([0.001, 1.0, 2.0, 7.0]), st.integers(1, 2)), min_size=1, max_size=60),
    window=st.sampled_from([5.0, 40.0]),
    pause=st.sampled_from([0.0, 3.0, 50.0]),
)
def test_what_a_series_knows_of_itself_never_changes_a_trend(
    steps: list[tuple[float, int]], window: float, pause: float
) -> None:
    series, clock = ValueSeries(40.0), 0.0
    for distance, value in steps:
        clock += distance
        series.add(clock, value)
    device = a_device(0)
    key = key_of(device_subject(device)), "memory_used"
    snapshot = a_snapshot(device, clock=clock + pause)

    known, plain = (
        slopes(RuleView(snapshot, past={key: one}), device_subject(device), "memory_used", window)
        for one in (series, list(series))
    )
    assert known == plain
