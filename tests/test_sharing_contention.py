"""Many processes share devices or want one alone, at one moment and under SIGKILL: no device is promised twice.

The long form is `python benchmarks/sharing.py --seconds 60`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chances import IN_CAMPAIGNS
from contention import GIB
from sharing import fight, race

SHARE = 30 * GIB  # of 80: two of them fit


def test_of_starters_at_one_moment_exactly_those_that_fit_get_their_share(tmp_path: Path) -> None:
    assert race(tmp_path, starters=10, rounds=20, memory=SHARE) == [2] * 20


@pytest.mark.parametrize("variant", ["none", "no-first-look"])
def test_without_the_gate_never_more_than_fit_get_their_share(tmp_path: Path, variant: str) -> None:
    won = race(tmp_path, starters=10, rounds=20, memory=SHARE, gate=False, variant=variant)

    assert max(won) <= 2
    assert sum(won) > 10  # going back for each other is not for ever


@pytest.mark.parametrize(
    "variant",
    ["no-exclusion", pytest.param("no-look", marks=IN_CAMPAIGNS), pytest.param("late-record", marks=IN_CAMPAIGNS)],
)
def test_the_race_shows_a_fault_that_is_planted(tmp_path: Path, variant: str) -> None:
    assert max(race(tmp_path, starters=10, rounds=5, memory=SHARE, gate=False, variant=variant)) > 2


def test_no_promise_is_broken_and_no_lock_stays_under_random_sigkill(tmp_path: Path) -> None:
    rounds = []
    while len(rounds) < 8 and not (rounds and all(happened(rounds))):
        (tmp_path / str(len(rounds))).mkdir()
        rounds.append(fight(tmp_path / str(len(rounds)), seconds=5, seed=len(rounds)))

    assert [(outcome.broken, outcome.stale) for outcome in rounds] == [(0, 0)] * len(rounds)
    assert happened(rounds) == (True, True, True)


def happened(rounds):
    """Whether there was enough to see, which takes a busy machine more than one round: kills, shares, claims alone."""
    kills, shares, alone = (sum(getattr(outcome, name) for outcome in rounds) for name in ("kills", "shares", "alone"))
    return kills > 30, shares > 100, alone > 10


@pytest.mark.parametrize("variant", ["no-exclusion", pytest.param("no-look", marks=IN_CAMPAIGNS)])
def test_the_oracle_sees_a_fault_that_is_planted(tmp_path: Path, variant: str) -> None:
    assert fight(tmp_path, seconds=2, processes=40, variant=variant).broken > 0
