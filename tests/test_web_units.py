"""The page in the browser writes numbers as every other output of gpuguard does."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess

import pytest
from sources import PACKAGE

from gpuguard.units import format_bytes, format_duration

UNITS = (PACKAGE / "web" / "page" / "units.js").read_text(encoding="utf-8")
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="NOT TESTED: needs node")


def in_the_browser(script: str, function: str, values: list[float]) -> list[str]:
    code = f"{script}\nconsole.log(JSON.stringify({json.dumps(values)}.map((value) => UNITS.{function}(value))));"
    done = subprocess.run([str(NODE), "-e", code], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def some_values(highest: float) -> list[float]:
    """Whole numbers, since exact halves are rounded to even in Python and up in a browser."""
    chance = random.Random(16)
    borders = [border + step for border in (0, 1, 60, 999, 1000, 1023, 3600, 86400, 1000 * 2**20) for step in (0, 1)]
    return [*borders, *(math.floor(math.exp(chance.uniform(0, math.log(highest)))) for _ in range(500))]


def differences(script: str) -> list[tuple[float, str, str]]:
    sizes, durations = some_values(2.0**50), [*some_values(400 * 86400.0), 0.25]
    rows = [
        *zip(sizes, in_the_browser(script, "bytes", sizes), map(format_bytes, sizes), strict=True),
        *zip(durations, in_the_browser(script, "duration", durations), map(format_duration, durations), strict=True),
    ]
    return [row for row in rows if row[1] != row[2]]


def test_memory_and_durations_are_written_as_in_a_terminal():
    assert differences(UNITS) == []


def test_another_border_between_two_units_is_found():
    planted = UNITS.replace(">= 1000", ">= 1024")

    assert planted != UNITS and differences(planted)
