"""The dice that tests throw: the same at each run, unless scripts/torture asks for others.

    GPUGUARD_CHANCE=7 pytest --hypothesis-seed=7 tests/test_x.py    as run 7 of a campaign

Without this a test that is repeated for a night finds on its first run whatever it ever finds.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings

NUMBER = int(os.environ.get("GPUGUARD_CHANCE", "0"))
THE_SAME = not NUMBER
# No example is too late because the machine is busy.
settings.register_profile(
    "tests", derandomize=THE_SAME, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# A case beside one of its kind that every run has, as a second planted fault: seconds each.
IN_CAMPAIGNS = pytest.mark.skipif(THE_SAME, reason="second planted faults (scripts/torture --only checkers)")


def often(count: int) -> int:
    """How often to throw them: *count* times in a campaign, an eighth of that where all tests shall run soon."""
    return count if NUMBER else count // 8


def luck(seed: int | str) -> random.Random:
    """Dice of a test that wants *seed*."""
    return random.Random(f"{seed} in run {NUMBER}" if NUMBER else seed)


def dice(turn: int, *, same: bool = THE_SAME) -> Callable[[Any], Any]:
    """For a test of hypothesis: those of *turn*, which a change of the test's text does not change."""
    return seed(turn) if same else lambda test: test
