"""Processes fight for devices, or shares of them, and are killed at random: nothing is held or promised twice.

The long forms are `python benchmarks/contention.py --seconds 60`, with 200 of them, and `benchmarks/sharing.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import contention
import pytest
import sharing
from chances import IN_CAMPAIGNS, often

Fresh = Callable[..., Any]  # the fixture
SHARE = 30 * contention.GIB  # of 80: two of them fit
ROUNDS, PROCESSES = often(24), often(120)


def test_no_overlap_and_no_stale_lock_under_random_sigkill(fresh: Fresh, tmp_path: Path) -> None:
    enough = {"holds": often(1000), "kills": often(100)}
    rounds = fought(
        lambda place, seed: fresh(contention.fight, place, seconds=2, processes=PROCESSES, seed=seed), tmp_path, enough
    )

    assert [(outcome.overlaps, outcome.stale) for outcome in rounds] == [(0, 0)] * len(rounds)


def test_no_promise_is_broken_and_no_lock_stays_under_random_sigkill(fresh: Fresh, tmp_path: Path) -> None:
    enough = {"kills": often(60), "shares": often(200), "alone": 10}
    rounds = fought(lambda place, seed: fresh(sharing.fight, place, seconds=2, seed=seed), tmp_path, enough)

    assert [(outcome.broken, outcome.stale) for outcome in rounds] == [(0, 0)] * len(rounds)


def fought(fight, place: Path, enough: dict[str, int]) -> list:
    """The outcomes of as many rounds as it takes until enough happened: on a busy machine more than one, 8 at most."""
    rounds: list = []
    while not all(sum(getattr(outcome, name) for outcome in rounds) > least for name, least in enough.items()):
        assert len(rounds) < 8, f"too little happened: {rounds}"
        (place / str(len(rounds))).mkdir()
        rounds.append(fight(place / str(len(rounds)), len(rounds)))
    return rounds


@pytest.mark.parametrize("variant", ["break-stale", pytest.param("no-exclusion", marks=IN_CAMPAIGNS)])
def test_the_checker_sees_locks_that_are_broken_as_stale_or_exclude_nobody(
    fresh: Fresh, tmp_path: Path, variant: str
) -> None:
    assert fresh(contention.fight, tmp_path, seconds=1.5, processes=PROCESSES, variant=variant).overlaps > 0


@pytest.mark.parametrize("variant", ["no-exclusion", pytest.param("no-look", marks=IN_CAMPAIGNS)])
def test_the_checker_sees_promises_that_are_broken(fresh: Fresh, tmp_path: Path, variant: str) -> None:
    assert fresh(sharing.fight, tmp_path, seconds=1.5, processes=40, variant=variant).broken > 0


def test_of_starters_at_one_moment_exactly_those_that_fit_get_their_share(fresh: Fresh, tmp_path: Path) -> None:
    assert fresh(sharing.race, tmp_path, starters=8, rounds=ROUNDS, memory=SHARE) == [2] * ROUNDS


@pytest.mark.parametrize("variant", ["none", pytest.param("no-first-look", marks=IN_CAMPAIGNS)])
def test_without_the_gate_never_more_than_fit_get_their_share(fresh: Fresh, tmp_path: Path, variant: str) -> None:
    won = fresh(sharing.race, tmp_path, starters=8, rounds=4 * ROUNDS, memory=SHARE, gate=False, variant=variant)

    assert max(won) <= 2
    assert sum(won) > ROUNDS // 2  # going back for each other is not for ever, though a round may have no winner


@pytest.mark.parametrize(
    "variant",
    ["no-exclusion", pytest.param("no-look", marks=IN_CAMPAIGNS), pytest.param("late-record", marks=IN_CAMPAIGNS)],
)
def test_the_race_shows_a_fault_that_is_planted(fresh: Fresh, tmp_path: Path, variant: str) -> None:
    assert max(fresh(sharing.race, tmp_path, starters=10, rounds=5, memory=SHARE, gate=False, variant=variant)) > 2
