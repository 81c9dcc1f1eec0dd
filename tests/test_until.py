"""A pause for heat or power lasts until the GPU has gone further than the limit, and never longer than is certain."""

from dataclasses import replace
from typing import Any

import pytest
from builders import a_device, a_process
from ladders import Watch, a_policy, busy

from gpuguard.errors import InvalidRequest
from gpuguard.policies.engine import policy_status
from gpuguard.policies.policy import BelowPower, BelowTemperature, Step, Until
from gpuguard.policies.thresholds import TemperatureRule
from gpuguard.units import parse_power_amount

COOL = Until(BelowTemperature(75.0))
BOTH = Until(BelowTemperature(75.0), BelowPower(parse_power_amount("200W")))
HOT = TemperatureRule(85.0, per="process")
PROCESS = (4711, 1000.0)


def policy(*steps: Any, until: Until | None = COOL, **fields: Any) -> Any:
    return a_policy(*(steps or ("pause",)), rules=(HOT,), hold=0.0, cooldown=0.0, until=until, **fields)


def at(clock: float, *temperatures: float | None, **fields: Any) -> Any:
    """A sample in which one process is on GPUs of these temperatures."""
    devices = [a_device(n, temperature=each, processes=(a_process(),)) for n, each in enumerate(temperatures)]
    return busy(clock, *[replace(device, **fields) for device in devices])


def paused(watch: Watch, *samples: Any) -> list[bool]:
    """After each sample, whether the pause lasts."""
    lasts = []
    for sample in samples:
        watch.sees(sample)
        lasts.append(watch.memory.pauses("p", PROCESS))
    return lasts


def test_it_lasts_until_the_gpu_has_cooled_down_and_no_longer():
    samples = [at(10 * n, degrees) for n, degrees in enumerate((90.0, 90.0, 84.0, 76.0, 75.0, 74.0, 80.0))]

    assert paused(Watch(policy()), *samples) == [False, True, True, True, True, False, False]
    assert paused(Watch(policy(until=None)), *samples) == [False, True, False, False, False, False, False]


def test_on_several_gpus_all_must_have_cooled_down():
    samples = [at(0, 90.0, 90.0), at(10, 90.0, 90.0), at(20, 70.0, 80.0), at(30, 70.0, 70.0)]

    assert paused(Watch(policy()), *samples) == [False, True, True, False]


@pytest.mark.parametrize(
    "doubt",
    [
        at(20, None),
        at(20, 80.0, processes=None),
        at(20, 80.0, processes_plausible=False),
        at(20, 80.0, processes=()),
        busy(20, a_device(5)),
        at(1000, 80.0),
    ],
    ids=[
        "no reading",
        "no list",
        "a garbled list",
        "it is gone from there",
        "the GPU is gone",
        "nothing seen for long",
    ],
)
def test_what_cannot_be_seen_ends_it(doubt):
    assert paused(Watch(policy(), interval=10.0), at(0, 90.0), at(10, 90.0), doubt) == [False, True, False]


def test_a_change_of_the_policy_ends_it():
    watch = Watch(policy())
    paused(watch, at(0, 90.0), at(10, 90.0))
    watch.policies = (policy(until=Until(BelowTemperature(60.0))),)

    assert paused(watch, at(20, 80.0)) == [False]


def test_no_step_comes_while_it_only_rests_and_its_time_begins_anew_with_the_heat():
    watch = Watch(policy("pause", Step("terminate", 30.0)))
    heats = {0: 90.0, 10: 90.0, 20: 80.0, 100: 80.0, 110: 90.0, 130: 90.0, 140: 90.0}
    said = [[one.action for one in watch.sees(at(clock, heat)).verdicts] for clock, heat in heats.items()]

    assert said == [[], ["pause"], [], [], [], [], ["terminate"]]


def test_the_status_promises_no_step_while_it_rests():
    watch = Watch(policy("pause", Step("terminate", 30.0)))
    paused(watch, at(0, 90.0), at(10, 90.0), at(20, 80.0))
    [status] = policy_status(watch.policies, watch.memory, {})

    assert (status.last, status.next, status.due, status.harm) == ("pause", None, None, None)


def test_nothing_rests_that_was_not_paused():
    watch = Watch(policy("warn", Step("pause", 60.0)))
    paused(watch, at(0, 90.0), at(10, 90.0), at(20, 80.0))

    assert not watch.memory.states["p"]


@pytest.mark.parametrize(
    ("until", "fields", "reached"),
    [
        (Until(power=BelowPower(parse_power_amount("200W"))), {"power_draw": 199.0}, True),
        (Until(power=BelowPower(parse_power_amount("200W"))), {"power_draw": 200.0}, False),
        (Until(power=BelowPower(parse_power_amount("50%"))), {"power_draw": 300.0, "power_limit": 700.0}, True),
        (Until(power=BelowPower(parse_power_amount("50%"))), {"power_draw": 400.0, "power_limit": 700.0}, False),
        (Until(power=BelowPower(parse_power_amount("50%"))), {"power_draw": 400.0, "power_limit": None}, True),
        (BOTH, {"temperature": 70.0, "power_draw": 300.0}, False),
        (BOTH, {"temperature": 70.0, "power_draw": 30.0}, True),
    ],
)  # fmt: skip
def test_what_counts_as_reached(until, fields, reached):
    assert until.is_reached(a_device(**fields)) is reached
    assert until.is_reached(None) is True


def test_an_end_that_says_nothing_is_refused():
    with pytest.raises(InvalidRequest, match="nothing is said"):
        Until()
