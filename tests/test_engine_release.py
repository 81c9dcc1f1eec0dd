"""Steps that have nothing to act on: they are passed over, delay nobody, and the next one comes."""

from __future__ import annotations

import pytest
from builders import GIB, a_claim_record, a_device, a_process
from ladders import Finds, Watch, a_policy, actions, busy, kinds

from gpuguard.backtest.backtest import rehearse
from gpuguard.model import Finding, Subject
from gpuguard.policies.policy import ON_PROCESSES, Step, meaningless
from gpuguard.policies.view import RuleView, process_subject

CLAIM = Subject("claim", uid=1001, claim="c1")
FOUND = Finding("age", CLAIM, "held without a process")
UNUSED = Finds(lambda view: [FOUND])
HELD = (a_claim_record(a_device(), id="c1", uid=1001),)


@pytest.mark.parametrize("action", sorted(ON_PROCESSES))
def test_a_step_on_processes_is_passed_over_for_a_claim_without_any(action):
    why = meaningless(Step(action), FOUND)

    assert why and "no process is meant" in why and "release" in why
    assert meaningless(Step("release"), FOUND) is None


def test_release_is_passed_over_for_processes_and_for_what_is_no_claim():
    device, process = a_device(), a_process()
    about_process = Finding("age", process_subject(device, process), "runs", (process,))
    claim_with_process = Finding("idle", CLAIM, "idle", (process,))

    for found in (about_process, claim_with_process, Finding("health", Subject("device", device.uuid), "lost")):
        assert meaningless(Step("release"), found)
    assert meaningless(Step("terminate"), about_process) is None


def test_a_terminate_without_a_victim_is_no_verdict_but_a_note_and_release_comes_after_it():
    policy = a_policy("warn", "terminate", "kill", "release", rules=(UNUSED,), cooldown=1000)
    watch = Watch(policy)

    assert watch.until(300, a_device(), claims=HELD) == [(30, "warn"), (150, "release")]


def test_the_note_says_why():
    watch = Watch(a_policy("terminate", rules=(UNUSED,), cooldown=1000))
    watch.until(20, a_device(), claims=HELD)
    judgement = watch.sees(busy(30, a_device(), claims=HELD))

    assert judgement.verdicts == () and kinds(judgement) == {"nobody"}


def test_a_step_that_means_nobody_delays_no_real_one_on_the_same_device():
    full = a_device(processes=(a_process(1000, uid=1002),), memory_used=20 * GIB)
    idle = Finds(lambda view: [Finding("idle", Subject("claim", full.uuid, uid=1001, claim="c1"), "rests")])
    watch = Watch(
        a_policy("terminate", name="idle", rules=(idle,), cooldown=1000),
        a_policy("terminate", name="real", cooldown=1000),
    )
    watch.until(20, full, claims=HELD)

    assert actions(watch.sees(busy(30, full, claims=HELD))) == ["terminate"]


def test_a_claim_without_processes_is_released():
    watch = Watch(a_policy("release", rules=(UNUSED,), cooldown=1000))

    assert watch.until(200, a_device(), claims=HELD) == [(30, "release")]


def test_a_claim_that_is_released_in_a_rehearsal_is_gone_from_its_next_sample_on():
    samples = [RuleView(busy(clock, a_device(), claims=HELD)) for clock in range(0, 200, 10)]
    held = Finds(lambda view: [FOUND] if view.snapshot.claims else [])
    judged = list(rehearse(samples, [a_policy("release", rules=(held,), cooldown=0.0)], interval=10))

    assert [verdict.action for _, judgement in judged for verdict in judgement.verdicts] == ["release"]
    assert [len(view.snapshot.claims) for view, _ in judged][:6] == [1, 1, 1, 1, 0, 0]
