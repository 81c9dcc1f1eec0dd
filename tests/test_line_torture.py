"""Many wait with mixed requests and are killed at random: no overlap, nobody lost, nobody passed beyond the bound.

The long form, with 200 waiters for 8 devices, is `python benchmarks/line.py`.
"""

from __future__ import annotations

from pathlib import Path

from line import Outcome, torture


def bout(place: Path, variant: str = "", **changes: float) -> Outcome:
    return torture(place, waiters=24, devices=4, kills=4, bound=0.3, variant=variant, **changes)  # type: ignore[arg-type]


def test_everybody_who_lives_is_served_and_nobody_is_passed_beyond_the_bound(tmp_path: Path) -> None:
    outcome = bout(tmp_path)

    assert (outcome.overlaps, outcome.lost, outcome.passed) == (0, 0, 0)
    assert outcome.served >= 20


def test_the_oracle_sees_locks_that_exclude_nobody(tmp_path: Path) -> None:
    assert bout(tmp_path, "no-exclusion").overlaps > 0


def test_the_oracle_sees_that_nobody_is_told_of_his_turn(tmp_path: Path) -> None:
    assert bout(tmp_path, "no-ring", patience=8.0).lost > 0


def test_the_recorded_order_shows_that_whatever_fits_may_pass(tmp_path: Path) -> None:
    # Who meets whom is a matter of chance.
    for round_ in range(5):
        (tmp_path / str(round_)).mkdir()
        outcome = torture(tmp_path / str(round_), waiters=36, devices=4, bound=0.3, variant="any-fit")
        assert outcome.lost == 0
        if outcome.passed:
            break

    assert outcome.passed > 0
