"""The picture on docs/top.md is what `gpuguard top` shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import top_picture


@pytest.mark.terminal
def test_the_picture_is_what_top_shows(tmp_path: Path) -> None:
    now = top_picture.comparable(top_picture.taken(tmp_path))

    assert now == top_picture.comparable(top_picture.written()), "run: python tests/top_picture.py --write"


def test_what_is_compared_still_has_the_states_and_the_columns() -> None:
    kept = top_picture.comparable(top_picture.written())

    assert {"free", "used without a claim", "claimed, no process yet", "no claim"} <= set(
        re.findall(r"free|used without a claim|claimed, no process yet|no claim", kept)
    )
    assert kept.count("BAR") >= 8
