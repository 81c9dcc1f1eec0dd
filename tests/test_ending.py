"""The ladder by which a job is ended: which signal comes when.  Time is a number here."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from gpuguard.jobs.escalation import NEVER, TIME_LIMIT, Escalation, EscalationStep

USR1 = int(signal.SIGUSR1)


def an_ending(time_limit: float | None = None, grace: float = 60.0, checkpoint: int | None = None) -> Escalation:
    """Of a job that began at 1000."""
    return Escalation(1000.0, time_limit, grace, checkpoint)


def climbed(ending: Escalation) -> list[tuple[float, str]]:
    """Every signal that is still to come, each taken when it is due."""
    taken = []
    while ending.due != NEVER:
        due = ending.due
        assert ending.take(due - 0.001) is None
        taken.append((due, rung_of(ending, due).name))
    return taken


def rung_of(ending: Escalation, now: float) -> EscalationStep:
    rung = ending.take(now)
    assert rung is not None
    return rung


@pytest.mark.parametrize(
    ("facts", "signals"),
    [
        ({}, []),
        ({"time_limit": 600.0}, [(1600.0, "SIGTERM"), (1660.0, "SIGKILL")]),
        (
            {"time_limit": 600.0, "checkpoint": USR1},
            [(1540.0, "SIGUSR1"), (1600.0, "SIGTERM"), (1660.0, "SIGKILL")],
        ),
        ({"checkpoint": USR1}, []),
    ],
)
def test_the_checkpoint_signal_comes_a_grace_before_the_time_limit_and_sigterm_at_it(
    facts: dict[str, Any], signals: list[tuple[float, str]]
) -> None:
    assert climbed(an_ending(**facts)) == signals


def test_a_time_limit_shorter_than_the_grace_leaves_half_of_it_to_start_and_half_to_save() -> None:
    signals = climbed(an_ending(time_limit=30.0, checkpoint=USR1))

    assert signals == [(1015.0, "SIGUSR1"), (1030.0, "SIGTERM"), (1090.0, "SIGKILL")]


def test_any_other_limit_begins_at_once() -> None:
    ending = an_ending(checkpoint=USR1)
    ending.begin(1234.0, "limit", "too much", "memory-limit")

    assert climbed(ending) == [(1234.0, "SIGUSR1"), (1294.0, "SIGTERM"), (1354.0, "SIGKILL")]


def test_another_limit_comes_before_a_time_limit_that_is_not_near() -> None:
    ending = an_ending(time_limit=600.0)
    ending.begin(1234.0, "limit", "too much", "memory-limit")

    assert climbed(ending) == [(1234.0, "SIGTERM"), (1294.0, "SIGKILL")]


def test_once_the_checkpoint_signal_of_the_time_limit_is_sent_no_other_limit_takes_its_grace_away() -> None:
    ending = an_ending(time_limit=600.0, checkpoint=USR1)
    ending.take(1540.0)
    ending.begin(1550.0, "limit", "too much", "memory-limit")

    assert climbed(ending) == [(1600.0, "SIGTERM"), (1660.0, "SIGKILL")]


def test_a_signal_that_comes_late_leaves_the_whole_grace_before_the_next() -> None:
    ending = an_ending(time_limit=600.0, checkpoint=USR1)
    ending.take(1700.0)

    assert climbed(ending) == [(1760.0, "SIGTERM"), (1820.0, "SIGKILL")]


def test_each_signal_says_why_it_comes() -> None:
    ending = an_ending(time_limit=600.0, checkpoint=USR1)
    said = [rung_of(ending, 9999.0 + 60 * number) for number in range(3)]

    assert [rung.words for rung in said] == [
        "the time limit is over in 1m: SIGUSR1 to the job.",
        "the time limit is over: SIGTERM to the job.",
        "the grace is over too: SIGKILL to the job and all its processes.",
    ]
    assert {rung.kind for rung in said} == {TIME_LIMIT}
