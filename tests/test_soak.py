"""benchmarks/soak.py in short: a guard that looks hundreds of times does not grow, and one that does is found.

The long form is `sudo python benchmarks/soak.py --seconds 3600`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from soak import FIFTHS, Reading, faults
from sources import ROOT

ONE = Reading(memory=20.0, descriptors=30, threads=9, sampler=77)


def soaked(seconds: int, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--seconds", str(seconds), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_a_guard_that_looks_hundreds_of_times_does_not_grow() -> None:
    done = soaked(12)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing has grown\n")


@pytest.mark.parametrize(
    ("variant", "found"),
    [("memory", "it has grown"), ("descriptors", "descriptors, and has"), ("sampler", "samplers")],
)
def test_a_guard_that_keeps_something_of_each_look_or_starts_its_sampler_again_is_found(
    variant: str, found: str
) -> None:
    done = soaked(6, "--variant", variant)

    assert done.returncode == 1, done.stdout + done.stderr
    assert found in done.stdout


@pytest.mark.parametrize(
    ("late", "found"),
    [
        ({"memory": 22.1}, "it has grown by 2.1 MiB"),
        ({"descriptors": 31}, "it had at most 30 descriptors, and has at least 31"),
        ({"threads": 10}, "it had at most 9 threads, and has at least 10"),
        ({"sampler": 78}, "it has had 2 samplers"),
    ],
)
def test_what_grows_is_told(late: dict[str, float], found: str) -> None:
    assert faults([ONE] * 4 * FIFTHS + [replace(ONE, **late)] * FIFTHS) == [found]


def test_a_guard_that_could_hardly_be_looked_at_is_not_called_sound() -> None:
    assert faults([ONE] * (FIFTHS - 1)) == ["it could be looked at 4 times only"]


def test_what_is_only_open_for_a_moment_or_at_the_start_has_not_grown() -> None:
    start, moment = replace(ONE, memory=10.0, descriptors=20), replace(ONE, memory=20.5, descriptors=40)

    assert faults([start] * FIFTHS + [ONE, moment] * FIFTHS * 2) == []
