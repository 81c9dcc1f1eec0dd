"""Rules about where memory is going: growth is found, and what only jumps or rises and falls is not."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import pytest
from builders import GIB, TOTAL, a_device, a_process, a_snapshot
from judging import A_DEVICE, A_PROCESS, HELD, a_past, a_series, found

from gpuguard.model import Subject
from gpuguard.policies.amounts import parse_rate
from gpuguard.policies.memory_trends import ForecastRule, MemoryGrowthRule
from gpuguard.policies.series import ValueSeries, slopes
from gpuguard.policies.view import RuleView, key_of, process_subject

LEAK = MemoryGrowthRule(parse_rate("1GiB/10m"))


def growing(of: Callable[[float], float], subject: Subject = A_PROCESS) -> dict:
    return a_past(a_series(of), "memory_used", subject)


def test_steady_growth_is_found():
    (finding,) = found(LEAK, HELD, **growing(lambda t: 2 * GIB * t / 600))

    assert finding.subject == A_PROCESS
    assert finding.why == (
        "memory on device 0 grows by 2.0GiB in 10m (trend over 10m), 1GiB/10m is allowed"
    )  # fmt: skip


@pytest.mark.parametrize(
    "course",
    [
        lambda t: 20 * GIB,
        lambda t: 0.9 * GIB * t / 600,
        *(lambda t, at=at: 60 * GIB if t > at else 0 for at in (20, 200, 300, 310, 500, 590)),
        lambda t: -5 * GIB * t / 600,
        lambda t: (20 + t % 50) * GIB,
    ],
    ids=["level", "slow", *["one jump"] * 6, "falling", "up and down"],
)
def test_what_is_no_steady_growth_is_not_found(course):
    assert found(LEAK, HELD, **growing(course)) == []
    assert found(ForecastRule(full_within=900.0, per="process"), HELD, **growing(course)) == []


@pytest.mark.parametrize("period", [20, 24.7, 25, 25.3, 26, 50, 51, 90])
def test_memory_that_rises_and_falls_all_the_time_is_no_growth(period):
    course = a_series(lambda t: (20 + t % period) * GIB, every=1)

    assert found(LEAK, HELD, **a_past(course, "memory_used", A_PROCESS)) == []
    assert found(ForecastRule(full_within=900.0, per="process"), HELD, **a_past(course, "memory_used", A_PROCESS)) == []


def test_growth_is_seen_through_wild_samples():
    assert found(LEAK, HELD, **growing(lambda t: 0 if t % 70 == 0 else 4 * GIB * t / 600)) != []


def slopes_of(*samples: tuple[float, float], seconds: float = 60.0) -> list[float]:
    """Slopes at clock 100 of samples that were recorded."""
    series = ValueSeries(window=1000.0)
    for clock, value in samples:
        series.add(clock, value)
    key = (key_of(A_DEVICE), "memory_used")
    return slopes(RuleView(a_snapshot(clock=100.0), past={key: series}), A_DEVICE, "memory_used", seconds)


def test_what_has_not_been_seen_for_the_whole_time_has_no_trend():
    assert slopes_of() == []
    assert slopes_of((10.0, 1.0), (20.0, 2.0), (30.0, 3.0)) == []  # the last sample is older than the time


def test_what_does_not_change_grows_by_nothing():
    assert slopes_of(*[(clock, 7.0) for clock in range(0, 101, 10)]) == [0.0]
    assert slopes_of(*[(clock, 7.0 + (clock == 0)) for clock in range(0, 101, 10)]) == [0.0]  # not within the time


def test_growth_is_not_told_before_the_window_is_full():
    young = a_series(lambda t: 10 * GIB * t / 600, seconds=300)

    assert found(LEAK, HELD, **a_past(young, "memory_used", A_PROCESS)) == []


def test_the_forecast_says_when_memory_is_full_and_how_sure_it_is():
    device = a_device(memory_used=70 * GIB)

    (finding,) = found(ForecastRule(full_within=900.0), device, **growing(lambda t: (60 + t / 60) * GIB, A_DEVICE))
    assert finding.processes == ()
    assert finding.why == (
        "memory of device 0 is full in about 10m: 10.0GiB is free and 1.0GiB more is used each minute "
        "(confidence 100%); less than 15m is not enough"
    )


def test_a_full_device_at_which_nothing_changes_is_no_forecast():
    device = a_device(memory_used=TOTAL, memory_free=0)

    assert found(ForecastRule(full_within=900.0), device, **growing(lambda t: TOTAL, A_DEVICE)) == []


def test_the_forecast_is_silent_while_there_is_time():
    device = a_device(memory_used=70 * GIB)

    assert found(ForecastRule(full_within=500.0), device, **growing(lambda t: (60 + t / 60) * GIB, A_DEVICE)) == []


def test_the_forecast_is_silent_below_its_confidence():
    device = a_device(memory_used=70 * GIB)
    wild = growing(lambda t: (60 + t / 60 + (t * 7919 % 11)) * GIB, A_DEVICE)

    assert found(ForecastRule(full_within=900.0, confidence=95.0), device, **wild) == []
    assert found(ForecastRule(full_within=900.0, confidence=50.0), device, **wild) != []


def test_the_forecast_works_from_used_and_total_where_free_is_not_told():
    device = a_device(memory_used=70 * GIB, memory_free=None, memory_total=TOTAL)

    assert found(ForecastRule(full_within=900.0), device, **growing(lambda t: (60 + t / 60) * GIB, A_DEVICE)) != []


def test_a_trend_of_a_thousand_samples_and_forty_processes_costs_little():
    processes = tuple(a_process(pid) for pid in range(100, 140))
    device = a_device(processes=processes)
    samples = a_series(lambda t: 5 * GIB * t / 600, every=0.6)
    past = {(key_of(process_subject(device, process)), "memory_used"): samples for process in processes}
    before = perf_counter()

    findings = found(LEAK, device, past=past)
    assert len(findings) == 40
    assert perf_counter() - before < 1.0  # about 10 ms here; the limit is for busy machines
