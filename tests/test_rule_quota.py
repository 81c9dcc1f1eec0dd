"""Quotas: who has more than his share, the newest first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import GIB, TOTAL, a_claim_record, a_device, a_process
from ladders import a_policy
from test_rules_people import ALICE, BOB, HOUR, a_claim, found, pids, used_by

from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding
from gpuguard.policies.quota import QuotaRule, windows_of


def subjects(findings: list[Finding]) -> list[object]:
    return sorted((finding.subject.claim or finding.subject.pid for finding in findings), key=str)


def test_the_newest_claims_are_in_excess_and_the_oldest_never():
    devices = [a_device(index) for index in range(5)]
    claims = [
        a_claim("new", devices[4], age=100),
        a_claim("old", devices[0], devices[1], age=9000),
        a_claim("middle", devices[2], devices[3], age=5000),
    ]

    assert subjects(found(QuotaRule(devices=5), *devices, claims=claims)) == []
    assert subjects(found(QuotaRule(devices=4), *devices, claims=claims)) == ["new"]
    assert subjects(found(QuotaRule(devices=3), *devices, claims=claims)) == ["middle", "new"]
    assert found(QuotaRule(devices=4), *devices, claims=claims)[0].why == "alice has 5 devices, 4 are allowed"


def test_an_action_means_the_processes_of_the_claim_in_excess_and_no_others():
    old, new = a_process(2, start_time=1000.0), a_process(3, start_time=9950.0)
    devices = [used_by(old, index=0), used_by(new, index=1)]
    claims = [a_claim("old", devices[0], age=9000), a_claim("new", devices[1], age=100)]

    assert pids(found(QuotaRule(devices=1), *devices, claims=claims)) == [3]
    assert pids(found(QuotaRule(claims=1), *devices, claims=claims)) == [3]


@pytest.mark.parametrize("his", [0, 1])
def test_whoever_copies_the_id_of_a_claim_has_none_of_its_processes_accused(his):
    devices = [used_by(a_process(2, **ALICE), index=0), a_device(1)]
    hers = a_claim("c0ffee", devices[0], age=9000)
    copied = [a_claim("c0ffee", *devices[1:][:his], age=100, **BOB), a_claim("b", age=200, **BOB)]

    accused = found(QuotaRule(claims=1), *devices, claims=[hers, *copied])
    assert [(finding.subject.user, finding.processes) for finding in accused] == [("bob", ())]


def test_processes_without_a_claim_count_too():
    devices = [used_by(a_process(2 + index, start_time=1000.0 + index), index=index) for index in range(3)]

    assert subjects(found(QuotaRule(devices=2), *devices)) == [4]
    assert found(QuotaRule(devices=3), *devices) == []
    assert found(QuotaRule(claims=0), *devices) == []


def test_a_claim_whose_age_nobody_knows_is_the_oldest():
    devices = [a_device(index) for index in range(2)]
    claims = [replace(a_claim("x", devices[0], age=1), since=None), a_claim("y", devices[1], age=9000)]

    assert subjects(found(QuotaRule(claims=1), *devices, claims=claims)) == ["y"]


def test_each_user_has_a_quota_of_his_own():
    devices = [used_by(a_process(2, **ALICE), index=0), used_by(a_process(3, **BOB), index=1)]

    assert found(QuotaRule(devices=1), *devices) == []
    assert subjects(found(QuotaRule(devices=0), *devices)) == [2, 3]


def test_a_group_shares_a_quota():
    members = [a_process(2 + index, uid=1001 + index, start_time=100.0 + index) for index in range(3)]
    devices = [used_by(process, index=index) for index, process in enumerate(members)]
    groups = {1001: frozenset({"lab"}), 1002: frozenset({"lab"}), 1003: frozenset({"other"})}

    [finding] = found(QuotaRule(devices=1, shared_by=("lab",)), *devices, groups=groups)
    assert (finding.subject.pid, finding.why) == (3, "group lab has 2 devices, 1 are allowed")


def test_a_member_of_two_groups_is_found_once():
    groups = {1001: frozenset({"lab", "course"})}

    assert len(found(QuotaRule(devices=0, shared_by=("lab", "course")), used_by(a_process()), groups=groups)) == 1


def test_a_share_of_the_memory_is_a_share_of_all_devices():
    devices = [
        used_by(a_process(2, memory_used=30 * GIB, start_time=100.0), index=0),
        used_by(a_process(3, memory_used=20 * GIB, start_time=200.0), index=1),
    ]

    assert found(QuotaRule(memory=32.0), *devices) == []
    [finding] = found(QuotaRule(memory=25.0), *devices)
    assert (finding.subject.pid, finding.why) == (
        3,
        "alice uses 50.0GiB, 31.2% of the memory of all devices, 25% is allowed",
    )
    assert found(QuotaRule(memory=25.0), *devices, a_device(2, memory_total=None, memory_used=0)) == []
    assert TOTAL == 80 * GIB


def test_unknown_memory_counts_as_none():
    assert found(QuotaRule(memory=0.0), used_by(a_process(memory_used=None))) == []


def test_gpu_hours_in_a_window_put_the_newest_in_excess():
    rule = QuotaRule(gpu_hours=100 * HOUR, within=7 * 24 * HOUR)
    devices = [used_by(a_process(2, start_time=100.0), index=0), used_by(a_process(3, start_time=200.0), index=1)]

    def used(hours: float):
        return found(rule, *devices, gpu_seconds={1001: {7 * 24 * HOUR: hours * HOUR}})

    assert used(100) == []
    assert subjects(used(130)) == [3]
    assert used(130)[0].why == "alice had 130.0 GPU-hours in 7 days, 100 are allowed"
    assert found(rule, *devices, gpu_seconds={}) == []
    assert found(rule, *devices, gpu_seconds={1001: {24 * HOUR: 1e9}}) == []
    assert found(rule, gpu_seconds={1001: {7 * 24 * HOUR: 1e9}}) == []


def test_gpu_time_is_asked_for_in_the_windows_in_which_a_quota_counts_it():
    week, month = QuotaRule(gpu_hours=HOUR, within=7 * 24 * HOUR), QuotaRule(gpu_hours=HOUR, within=30 * 24 * HOUR)
    policies = [a_policy(name="a", rules=(week, QuotaRule(devices=2))), a_policy(name="b", rules=(month, week))]

    assert windows_of(policies) == {7 * 24 * HOUR, 30 * 24 * HOUR}
    assert windows_of([a_policy()]) == set()


def test_roots_processes_and_locks_without_a_record_are_nobodys():
    claims = [a_claim_record(id="?", uid=-1, user="?")]

    assert found(QuotaRule(devices=0), used_by(a_process(uid=0, user="root")), claims=claims) == []


def test_a_process_on_two_devices_has_two_devices_but_is_one():
    process = a_process(2)

    devices = [used_by(process, index=0), used_by(process, index=1)]

    [finding] = found(QuotaRule(devices=1), *devices)
    assert finding.processes == (process,)
    [finding] = found(QuotaRule(devices=1), *devices, claims=[a_claim("x", *devices, age=9000)])
    assert (finding.subject.claim, finding.processes) == ("x", (process,))


@pytest.mark.parametrize(
    "keys", [{}, {"gpu_hours": 1.0}, {"within": 1.0, "devices": 1}, {"devices": -1}, {"shared_by": ("lab",)}]
)
def test_a_quota_that_makes_no_sense_is_refused(keys):
    with pytest.raises(InvalidRequest):
        QuotaRule(**keys)
