"""60 processes fight for 8 devices and are killed at random: nobody ever holds what somebody else holds.

The long form is `python benchmarks/contention.py --seconds 60`, with 200.
"""

from __future__ import annotations

from pathlib import Path

from chances import IN_CAMPAIGNS
from contention import fight


def test_no_overlap_and_no_stale_lock_under_random_sigkill(tmp_path: Path) -> None:
    rounds = []
    while len(rounds) < 8 and not (rounds and all(happened(rounds))):
        (tmp_path / str(len(rounds))).mkdir()
        rounds.append(fight(tmp_path / str(len(rounds)), seconds=5, processes=60, seed=len(rounds)))

    assert [(outcome.overlaps, outcome.stale) for outcome in rounds] == [(0, 0)] * len(rounds)
    assert happened(rounds) == (True, True)


def happened(rounds):
    """Whether there was enough to see, which takes a busy machine more than one round: holds, kills."""
    return sum(outcome.holds for outcome in rounds) > 500, sum(outcome.kills for outcome in rounds) > 50


def test_the_checker_sees_locks_that_are_broken_as_stale(tmp_path: Path) -> None:
    assert fight(tmp_path, seconds=2, processes=60, variant="break-stale").overlaps > 0


@IN_CAMPAIGNS
def test_the_checker_sees_locks_that_exclude_nobody(tmp_path: Path) -> None:
    assert fight(tmp_path, seconds=2, processes=60, variant="no-exclusion").overlaps > 0
