"""The engine: whom a finding means, and for whom a condition still holds."""

from __future__ import annotations

import copy

import pytest
from builders import a_claim_record, a_device, a_process, a_uuid
from ladders import Finds, Processes, Watch, a_policy, busy, pids

from gpuguard.model import Finding, Subject
from gpuguard.policies.engine import still_holds
from gpuguard.policies.view import RuleView, process_subject

NOBODY = a_device(processes=())


@pytest.mark.parametrize("unknown", [{"start_time": None}, {"uid": None}])
def test_a_process_with_an_unknown_identity_never_appears(unknown):
    process = a_process(**unknown)
    subject = Subject("process", a_uuid(0), process.pid, process.start_time, process.uid)
    rule = Finds(lambda view: [Finding("x", subject, "why", (process,))])
    watch = Watch(a_policy("warn", rules=(rule,)))

    assert watch.until(100, a_device(processes=(process,))) == []


def test_unknown_processes_are_left_out_of_a_finding_about_a_device():
    known, unknown = a_process(1000), a_process(1001, uid=None)
    device = a_device(processes=(known, unknown))
    rule = Finds(lambda view: [Finding("x", Subject("device", a_uuid(0)), "why", (known, unknown))])
    watch = Watch(a_policy("terminate", rules=(rule,), hold=10))
    watch.sees(busy(0, device))

    assert pids(watch.sees(busy(10, device)).verdicts) == {1000}


def test_a_process_that_is_not_in_the_sample_never_appears():
    rule = Finds(lambda view: [Finding("x", Subject("process", a_uuid(0), 9, 1.0, 1001), "why", (a_process(9),))])

    assert Watch(a_policy("warn", rules=(rule,))).until(100) == []


def test_a_claim_whose_devices_cannot_be_seen_is_left_alone():
    claim = a_claim_record()
    rule = Finds(lambda view: [Finding("x", Subject("claim", uid=1001, claim=claim.id), "idle")])
    watch = Watch(a_policy("release", rules=(rule,)))

    assert watch.until(100, a_device(processes=None), claims=(claim,)) == []
    assert watch.until(200, a_device(), claims=(claim,), begin=110) == [(140, "release"), (180, "release")]


def test_a_process_on_several_devices_is_asked_once():
    both = [a_device(0, processes=(a_process(),)), a_device(1, processes=(a_process(),))]
    watch = Watch(a_policy("warn", "terminate", cooldown=1000))
    watch.until(20, *both)

    (verdict,) = watch.sees(busy(30, *both)).verdicts

    assert verdict.finding.why == "uses memory (and the like on 1 more devices)"
    assert watch.until(300, *both, begin=40) == [(90, "terminate")]


def test_what_several_rules_have_against_the_same_process_is_said_together():
    watch = Watch(a_policy("warn", rules=(Processes(), Processes(1)), join="any", hold=10))
    watch.sees(busy(0))

    (verdict,) = watch.sees(busy(10)).verdicts

    assert verdict.finding.why == "uses memory; uses memory"
    assert len(verdict.finding.processes) == 1


@pytest.mark.parametrize(
    ("device", "kept", "holds"),
    [
        (a_device(processes=(a_process(),)), None, True),
        (NOBODY, None, False),
        (a_device(processes=(a_process(start_time=9_000.0),)), None, False),  # its pid is somebody else's now
        (a_device(processes=(a_process(),), processes_plausible=False), None, False),
        (a_device(processes=(a_process(),)), 1001, False),
    ],
)
def test_a_condition_is_looked_at_once_more_without_a_sample_of_its_own(device, kept, holds):
    policy = a_policy("warn")
    watch = Watch(policy)
    watch.until(30)
    if kept:
        watch.memory.kept["uid", kept] = 20_000.0
    before = copy.deepcopy(watch.memory)
    subject = process_subject(a_device(), a_process())

    assert still_holds(policy, subject, RuleView(busy(35, device)), watch.memory) is holds
    assert (watch.memory.standings, watch.memory.past) == (before.standings, before.past)
