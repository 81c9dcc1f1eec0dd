"""A claim is no younger than somebody knows it, whatever its record says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import a_claim_record, a_device, a_snapshot

from gpuguard import watchdog
from gpuguard.claims.watch import FirstSeen

GPU, OTHER = a_device(0), a_device(1)
NOW = 1_000_000.0  # unix time at a clock of 0


def ages(*looks: tuple[float, object]) -> list[float | None]:
    """How old the claim of each look, (clock, record), counts as in the end."""
    seen, found = FirstSeen(), []
    for clock, record in looks:
        dated = seen.dated((record,) if record else (), clock, NOW + clock)
        found += [NOW + clock - one.since if one.since is not None else None for one in dated]
    return found


def test_what_its_record_says_of_its_age_counts_while_it_may_be_true():
    claim = a_claim_record(GPU, since=NOW - 50.0)

    assert ages((0.0, claim), (100.0, claim)) == [50.0, 150.0]


@pytest.mark.parametrize("since", [lambda clock: NOW + clock, lambda clock: None, lambda clock: 2.0**49])
def test_who_is_always_new_by_his_own_word_is_as_old_as_he_is_known(since):
    looks = [(clock, a_claim_record(GPU, since=since(clock))) for clock in (0.0, 60.0, 120.0)]

    assert ages(*looks) == [0.0, 60.0, 120.0]


@pytest.mark.parametrize(
    "changed",
    [{"id": "another"}, {"uid": 1002}, {"devices": (OTHER.uuid,)}, {"devices": (GPU.uuid, OTHER.uuid)}],
    ids=str,
)
def test_another_claim_is_new_and_so_is_one_with_another_device(changed):
    claim = a_claim_record(GPU, since=NOW)
    later = replace(claim, since=NOW + 60.0, **changed)

    assert ages((0.0, claim), (60.0, later), (70.0, later)) == [0.0, 0.0, 10.0]


@pytest.mark.parametrize("set_by", [3 * 3600.0, -3 * 3600.0])
def test_a_clock_that_is_set_makes_no_claim_older_and_none_younger(set_by):
    """A claim of a minute on a device that had rested long was given up as one of hours."""
    seen, claim = FirstSeen(), a_claim_record(GPU, since=NOW - 50.0)
    seen.dated((claim,), 0.0, NOW)
    [later] = seen.dated((claim,), 60.0, NOW + 60.0 + set_by)

    assert NOW + 60.0 + set_by - later.since == 110.0


def test_a_claim_that_was_gone_is_new():
    claim = a_claim_record(GPU, since=NOW + 60.0)

    assert ages((0.0, claim), (30.0, None), (60.0, claim)) == [0.0, 0.0]


def test_a_record_that_holds_nothing_stays_as_it_is():
    assert ages(
        (0.0, replace(a_claim_record(GPU), devices=(), since=None)),
    ) == [None]


def test_the_guard_judges_by_it(monkeypatch):
    """A policy with `claim_without_process_above` never fired for whoever renewed his record."""
    claims = iter([a_claim_record(GPU, since=NOW + clock) for clock in (0.0, 3600.0)])
    monkeypatch.setattr(watchdog.Watchdog, "_claims", lambda self, directory, snapshot: (next(claims),))
    guard = watchdog.Watchdog(None, (), object())
    views = [guard._with_claims(replace(a_snapshot(GPU), clock=clock, taken_at=NOW + clock)) for clock in (0.0, 3600.0)]

    assert [one.claims[0].since for one in views] == [NOW, NOW]
