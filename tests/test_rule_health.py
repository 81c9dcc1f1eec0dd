"""The rule about the health of a device: problems, slower clocks, memory errors."""

from __future__ import annotations

import pytest
from builders import a_device, a_process, a_snapshot

from gpuguard.errors import InvalidRequest
from gpuguard.model import CLOCKS, ECC
from gpuguard.policies.health import HealthRule
from gpuguard.policies.view import RuleView

COUNTS = {
    "ecc_corrected_above": "ecc_corrected_volatile",
    "ecc_uncorrected_above": "ecc_uncorrected_volatile",
    "retired_pages_above": "retired_pages",
    "remapped_rows_above": "remapped_rows",
}


def whys(rule: HealthRule, *devices) -> list[str]:
    return [finding.why for finding in rule.check(RuleView(a_snapshot(*devices)))]


@pytest.mark.parametrize(
    ("problems", "found"),
    [
        (("lost",), True),
        (("row remap pending",), True),
        (("nvmlDeviceGetMigMode: reset required", "reset required"), True),
        (("unresponsive",), False),
        ((), False),
        (None, False),
    ],
)
def test_a_problem_is_found_by_its_name_or_a_glob(problems, found):
    rule = HealthRule(problems=("lost", "reset required", "*pending*"))

    assert bool(whys(rule, a_device(problems=problems))) == found


def test_a_star_is_any_problem():
    rule = HealthRule(problems=("*",))

    assert whys(rule, a_device(problems=("something new",))) == ["something new"]
    assert whys(rule, a_device(problems=())) == []


def test_a_device_that_is_slowed_down_is_found_and_a_slow_idle_one_is_not():
    rule = HealthRule(throttle_reasons=("hw_*",))

    hot = a_device(throttle_reasons=("gpu_idle", "hw_thermal_slowdown"))
    assert whys(rule, hot) == ["slowed down by hw_thermal_slowdown"]
    assert whys(rule, a_device(throttle_reasons=("gpu_idle",))) == []
    assert whys(rule, a_device(throttle_reasons=None)) == []


@pytest.mark.parametrize(("key", "field"), COUNTS.items())
def test_a_count_is_found_above_its_limit_and_never_when_it_is_unknown(key, field):
    rule = HealthRule(**{key: 3})

    assert [bool(whys(rule, a_device(**{field: count}))) for count in (None, 0, 3, 4)] == [False, False, False, True]


def test_a_limit_of_0_means_the_first_error():
    rule = HealthRule(ecc_uncorrected_above=0)

    assert whys(rule, a_device(ecc_uncorrected_volatile=1)) == ["1 uncorrected memory errors, 0 are allowed"]
    assert whys(rule, a_device(ecc_uncorrected_volatile=0)) == []


def test_one_finding_per_device_names_all_that_is_wrong():
    rule = HealthRule(problems=("*",), throttle_reasons=("hw_*",), retired_pages_above=0)
    device = a_device(problems=("lost", "odd"), throttle_reasons=("hw_slowdown",), retired_pages=2)

    assert whys(rule, device) == ["lost, odd; slowed down by hw_slowdown; 2 retired pages, 0 are allowed"]


def test_the_user_of_a_sick_device_is_not_meant():
    device = a_device(problems=("lost",), processes=(a_process(),))

    [finding] = HealthRule(problems=("lost",)).check(RuleView(a_snapshot(device)))
    assert (finding.subject.kind, finding.subject.device) == ("device", device.uuid)
    assert finding.processes == ()


def test_processes_are_meant_when_that_is_asked_for_but_only_those_that_may_be_judged():
    job, desktop, stranger = a_process(), a_process(2, kind="graphics"), a_process(3, uid=None)
    device = a_device(problems=("lost",), processes=(job, desktop, stranger))

    [finding] = HealthRule(problems=("lost",), with_processes=True).check(RuleView(a_snapshot(device)))
    assert finding.processes == (job,)


def test_a_rule_without_a_condition_is_refused():
    with pytest.raises(InvalidRequest, match="write problems"):
        HealthRule(with_processes=True)


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        ({"problems": ("lost",)}, set()),
        ({"throttle_reasons": ("hw_slowdown",)}, {CLOCKS}),
        *(({key: 0}, {ECC}) for key in COUNTS),
        ({"throttle_reasons": ("hw_slowdown",), "retired_pages_above": 1}, {CLOCKS, ECC}),
    ],
)
def test_only_what_a_rule_judges_by_is_asked_of_the_driver(keys, groups):
    assert HealthRule(**keys).further_fields == groups
