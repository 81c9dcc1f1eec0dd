"""A driver that fails, lies or hangs, under every rule: nobody is hit by it, and the other devices are guarded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml

pytestmark = pytest.mark.root  # the processes are those of other users


def campaign(fake: FakeNvml, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("faulty_driver.py")), *words],
        env={**os.environ, **fake.environment()},
        capture_output=True,
        text=True,
        timeout=900,  # against a hang: the longest takes a minute alone, and five where others compute
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "cases"),
    [("every_code", 250), ("the_last_look", 30), ("values", 25), ("lists", 20), ("desktops", 6), ("silence", 8)],
)
def test_nobody_is_hit_by_what_a_broken_driver_says(tmp_path: Path, name: str, cases: int) -> None:
    with FakeNvml(tmp_path, devices=3) as fake:
        answer = campaign(fake, name)

    assert answer["wrong"] == []
    assert answer["cases"] >= cases


@pytest.mark.parametrize(
    ("name", "fault", "found"),
    [("lists", "believe_every_list", "broken device"), ("values", "take_unknown_for_zero", "idle hit somebody")],
)
def test_a_guard_that_believes_the_driver_is_caught(tmp_path: Path, name: str, fault: str, found: str) -> None:
    with FakeNvml(tmp_path, devices=3) as fake:
        wrong = campaign(fake, name, fault)["wrong"]

    assert [one for one in wrong if found in one]
