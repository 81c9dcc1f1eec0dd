"""The tests of the engine notice when it is broken: each fault here would hit somebody too early or too often."""

from __future__ import annotations

import pytest
import test_engine
import test_restraint
import test_scope

from gpuguard.policies import engine, escalation, scope, view


def nothing(*_, **__):
    return None


FAULTS = {
    "a pause is overlooked": (
        escalation.EngineMemory, "start_anew", nothing,
        lambda: test_engine.test_a_pause_of_more_than_three_intervals_starts_all_durations_anew(3600),
    ),
    "a step is repeated": (
        engine, "advance", nothing,
        test_engine.test_the_ladder_is_climbed_one_step_after_the_other_and_none_is_repeated,
    ),
    "one sample is enough": (
        escalation, "FEWEST_SAMPLES", 1,
        test_engine.test_a_spike_in_one_sample_never_fires,
    ),
    "a garbled list is believed": (
        view, "judged_processes", lambda device: device.processes or (),
        test_engine.test_nothing_is_known_of_a_device_whose_list_is_garbled,
    ),
    "a changed policy keeps its ladders": (
        engine, "_pin", lambda policies, memory: [],
        lambda: test_engine.test_a_policy_that_was_changed_cancels_its_ladders({"enforce": True}),
    ),
    "the breaker is ignored": (
        escalation, "_breaker", lambda due: (set(), []),
        test_restraint.test_the_breaker_lets_nobody_be_hit_when_too_many_users_would_be,
    ),
    "the effect is not awaited": (
        escalation, "_await_effect", nothing,
        lambda: test_restraint.test_one_process_per_device_is_hit_until_its_effect_is_seen(True),
    ),
    "an effect is taken for seen": (
        escalation, "_is_seen", lambda *_: True,
        lambda: test_restraint.test_one_process_per_device_is_hit_until_its_effect_is_seen(False),
    ),
    "blindness does not count": (
        view.SampleIndex, "blindness", nothing,
        test_restraint.test_nothing_destructive_happens_on_a_device_whose_processes_cannot_be_seen,
    ),
    "exemptions are ignored": (
        scope, "_is_spared", lambda *_: False,
        test_scope.test_those_who_are_exempt_are_left_out_with_a_note,
    ),
    "marks are ignored": (
        scope, "_attributes", lambda *_: iter(()),
        lambda: test_scope.test_who_asked_to_be_kept_is_left_alone({"uid": 1001}),
    ),
    "hours are ignored": (
        scope, "is_within", lambda *_: True,
        test_scope.test_outside_its_hours_a_policy_does_nothing_and_no_time_passes,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    owner, name, broken, law = FAULTS[fault]
    law()
    monkeypatch.setattr(owner, name, broken)

    with pytest.raises((AssertionError, ValueError)):
        law()
