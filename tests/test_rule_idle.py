"""Rule idle: what is held at rest, over its fixed time or in a sliding window."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from judging import A_DEVICE, A_PROCESS, HELD, a_past, a_series, found

from gpuguard.errors import InvalidRequest
from gpuguard.policies.amounts import parse_rate
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.view import HostUse, RuleView


def test_a_device_whose_memory_is_held_at_rest_is_idle():
    (finding,) = found(IdleRule(below=5.0), HELD)

    assert finding.subject == A_PROCESS
    assert finding.why == "device 0 is idle: utilization 0%, at most 5% is idle, while 20.0GiB is held"


@pytest.mark.parametrize(("utilization", "idle"), [(0.0, True), (5.0, True), (5.1, False), (None, False)])
def test_utilization_up_to_the_limit_is_idle_and_unknown_never(utilization, idle):
    assert bool(found(IdleRule(below=5.0), replace(HELD, utilization=utilization))) is idle


def test_zero_percent_means_no_kernel_at_all():
    assert found(IdleRule(below=0.0), HELD) != []
    assert found(IdleRule(below=0.0), replace(HELD, utilization=1.0)) == []


@pytest.mark.parametrize("memory", [0, GIB, None])
def test_an_unclaimed_device_with_little_or_unknown_memory_is_free_not_idle(memory):
    assert found(IdleRule(below=5.0), replace(HELD, memory_used=memory)) == []


def test_a_claim_without_a_process_is_idle():
    device = a_device()
    view = RuleView(a_snapshot(device, claims=(a_claim_record(device, id="c1"),)))

    (finding,) = IdleRule(below=5.0).check(view)
    assert (finding.subject.claim, finding.subject.uid, finding.processes) == ("c1", 1001, ())


def test_a_claim_at_work_through_a_process_is_found_by_the_process():
    view = RuleView(a_snapshot(HELD, claims=(a_claim_record(HELD),)))

    assert [finding.subject for finding in IdleRule(below=5.0).check(view)] == [A_PROCESS]


def test_a_claim_is_innocent_while_an_unknown_process_is_there():
    device = a_device(processes=(a_process(uid=None),))
    view = RuleView(a_snapshot(device, claims=(a_claim_record(device),)))

    assert list(IdleRule(below=5.0).check(view)) == []


def test_held_memory_without_a_process_list_is_found_for_the_device_alone():
    (finding,) = found(IdleRule(below=5.0), replace(HELD, processes=None))

    assert (finding.subject, finding.processes) == (A_DEVICE, ())


def test_a_new_process_is_a_new_subject():
    successor = replace(HELD, processes=(a_process(start_time=9999.0),))

    assert found(IdleRule(below=5.0), HELD)[0].subject != found(IdleRule(below=5.0), successor)[0].subject


@pytest.mark.parametrize(
    ("use", "idle"),
    [
        (HostUse(cpu=1.0, network=10.0), True),
        (HostUse(cpu=30.0, network=10.0), False),
        (HostUse(cpu=1.0, network=2e6), False),
        (HostUse(cpu=None, network=10.0), False),
        (HostUse(cpu=1.0, network=None), False),
        (None, False),
    ],
)
def test_idle_beside_the_gpu_too_needs_to_be_known(use, idle):
    rule = IdleRule(below=5.0, cpu_below=2.0, network_below=parse_rate("1MB/s"))
    host = {(4711, 1000.0): use} if use else {}

    assert bool(found(rule, HELD, host=host)) is idle


def test_one_busy_process_keeps_the_others_on_the_device_innocent():
    device = replace(HELD, processes=(a_process(1), a_process(2)))
    host = {(1, 1000.0): HostUse(cpu=0.0), (2, 1000.0): HostUse(cpu=90.0)}

    assert found(IdleRule(below=5.0, cpu_below=2.0), device, host=host) == []


SLIDING = IdleRule(below=5.0, window="sliding", over=3600.0, share=80.0)


def test_a_short_burst_does_not_help_in_a_sliding_window():
    burst = a_series(lambda t: 100.0 if t > 3500 else 0.0, seconds=3600)

    (finding,) = found(SLIDING, replace(HELD, utilization=100.0), **a_past(burst))
    assert "97% of the last 1h" in finding.why


def test_work_in_a_fair_share_of_the_window_is_not_idle():
    work = a_series(lambda t: 100.0 if t % 40 == 0 else 0.0, seconds=3600)

    assert found(SLIDING, HELD, **a_past(work)) == []


def test_a_sliding_window_that_is_not_covered_finds_nobody():
    short = a_series(lambda t: 0.0, seconds=3000)
    holed = [sample for sample in a_series(lambda t: 0.0, seconds=3600) if not 7000 < sample[0] < 7500]

    assert found(SLIDING, HELD, **a_past(short)) == []
    assert found(SLIDING, HELD, **a_past(holed)) == []


def test_a_newcomer_is_innocent_of_the_rest_before_him():
    rest = a_series(lambda t: 0.0, seconds=3600)
    newcomer = replace(HELD, processes=(a_process(start_time=9000.0),))

    assert found(SLIDING, newcomer, **a_past(rest)) == []


@pytest.mark.parametrize(("held", "finds"), [(3700.0, True), (3500.0, False), (None, False)])
def test_a_claim_is_judged_by_a_sliding_window_only_when_it_is_as_old(held, finds):
    device = a_device()
    now = a_snapshot(device)
    claim = a_claim_record(device, since=None if held is None else now.taken_at - held)
    view = RuleView(replace(now, claims=(claim,)), **a_past(a_series(lambda t: 0.0, seconds=3600)))

    assert bool(list(SLIDING.check(view))) is finds


@pytest.mark.parametrize("keys", [{"window": "sliding"}, {"over": 60.0}])
def test_a_sliding_window_has_a_length_and_a_fixed_one_has_the_policys(keys):
    with pytest.raises(InvalidRequest, match="over"):
        IdleRule(below=5.0, **keys)


def test_only_a_sliding_window_needs_the_past():
    assert IdleRule(below=5.0).needs() == ()
    assert SLIDING.needs() == (("utilization", 3600.0),)
