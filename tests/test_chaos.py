"""benchmarks/chaos.py in short: nothing breaks, and what is planted is found."""

from __future__ import annotations

import subprocess
import sys

import pytest
from chances import luck
from sources import ROOT

WORDS = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--seconds", "6"]

pytestmark = pytest.mark.root


@pytest.mark.parametrize("kind", ["everybody", "broker", "keeper"])
def test_nobody_loses_a_device_or_is_hit_while_everything_dies(kind: str) -> None:
    seed = str(luck(f"chaos {kind}").randrange(2**31))
    done = subprocess.run([*WORDS, "--kind", kind, "--seed", seed], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 faults\n")


@pytest.mark.parametrize(
    ("variant", "found"), [("unlocked", "two have device"), ("harsh", "an innocent was signalled")]
)
def test_a_planted_fault_is_found(variant: str, found: str) -> None:
    words = [*WORDS, "--kind", "broker", "--variant", variant]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)

    assert done.returncode == 1, done.stdout + done.stderr
    assert found in done.stdout
