"""For how long a request can be passed in the queue, on recorded orders of whole days in simulated time.

The long form, with a trace of 92 days, is `python benchmarks/replay.py TRACE.csv`.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from chances import IN_CAMPAIGNS, luck, often
from hypothesis import example, given, settings
from hypothesis import strategies as st
from line import Outcome, torture
from queues import HOUR
from replay import Job, Line, Server, replay

from gpuguard.queue.priority import QueueRules, Ticket

DEVICES = 8


@st.composite
def days(draw: st.DrawFn) -> list[Job]:
    """Jobs of some users; more than the server can do at once."""
    now, jobs = 0.0, []
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.integers(0, 40))
        size, length = draw(st.sampled_from([1, 1, 2, 4, 8])), float(draw(st.integers(1, 200)))
        jobs.append(Job(number, draw(st.integers(0, 3)), now, size, length))
    return jobs


class Recorded(Line):
    """A queue that remembers which job was promised what, and which started when."""

    def __init__(self, knows: str, rules: QueueRules) -> None:
        super().__init__(knows, rules)
        self.promises: dict[int, float | None] = {}
        self.began: dict[int, float] = {}
        self.bounds: dict[int, float] = {}

    def join(self, server: Server, job: Job) -> Ticket:
        ticket = super().join(server, job)
        self.promises[job.number] = ticket.promise
        return ticket

    def starts(self, server: Server) -> Sequence[Job]:
        begun = super().starts(server)
        self.began |= {job.number: server.now for job in begun}
        self.bounds |= {job.number: self.bound for job in begun}
        return begun


def of_one_user(*jobs: tuple[int, int, int]) -> list[Job]:
    """A day of (when it came, for how many devices, for how long)."""
    return [Job(number, 0, float(when), size, float(length)) for number, (when, size, length) in enumerate(jobs)]


# Two put off each other, at 237, and when one of them was started all the same, the other was 120 s late.
CROSSED = of_one_user(
    (0, 8, 99), (0, 1, 124), (0, 8, 14), (7, 4, 106), (7, 1, 1), (19, 1, 1), (59, 1, 1), (99, 8, 14), (105, 1, 1),
    (144, 4, 137), (159, 1, 1), (184, 1, 167), (199, 1, 41), (225, 1, 1), (225, 2, 1),
)  # fmt: skip


@settings(max_examples=often(300))
@example(CROSSED, False)
@given(days(), st.booleans())
def test_every_job_starts_by_its_promise_while_none_gets_in_front_of_it(jobs: list[Job], fair: bool) -> None:
    """In order of arrival, and in a fair queue of one user, what comes later is behind."""
    if fair:
        jobs = [Job(job.number, 0, job.submitted, job.num_gpus, job.duration) for job in jobs]
    line = Recorded("limits", QueueRules(fair_share=fair))
    replay(jobs, DEVICES, line.starts, line.ended)

    for job in jobs:
        promised = line.promises[job.number]
        assert promised is not None
        assert line.began[job.number] <= promised + 1e-3 * len(jobs)


@settings(max_examples=often(200))
@given(days())
def test_where_nothing_is_known_no_job_passes_once_the_bound_is_over(jobs: list[Job]) -> None:
    """The request that waits longest, beyond the bound, is passed by no later one that is not overdue itself."""
    line = Recorded("", QueueRules(fair_share=False, bound=100.0))
    replay(jobs, DEVICES, line.starts, line.ended)

    for job in jobs:
        before = [line.began[other.number] for other in jobs[: job.number]]
        for later in jobs[job.number + 1 :]:
            bound, when = line.bounds[later.number], line.began[later.number]
            if max([job.submitted + bound, *before]) < when < line.began[job.number]:
                assert later.submitted + bound < when


def test_a_fault_in_the_plan_breaks_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail: when each job may be put off for ever, one is."""
    monkeypatch.setattr("gpuguard.queue.backfill._Planner._held_back_by", lambda *_: None)
    jobs = [Job(0, 0, 0.0, 7, 100.0), Job(1, 1, 1.0, 8, 10.0), *(Job(n, 2, float(n), 1, 99.0) for n in range(2, 12))]
    line = Recorded("limits", QueueRules(fair_share=False))
    replay(jobs, DEVICES, line.starts, line.ended)

    assert line.began[1] > (line.promises[1] or 0.0) + 1.0


def test_a_flood_of_200_requests_costs_another_user_at_most_a_fifth_of_the_wait() -> None:
    """Against one competitor who has one job running at any time, and asks for the next one when that has ended."""
    # One comes at each part of an hour equally often: by chance alone 60 instants differ by a fourth in their median.
    first, golden = luck(1).random(), 0.6180339887
    mine = [(HOUR * (8 * number + 6 * ((first + golden * number) % 1)), HOUR / 60, 0) for number in range(20)]
    steady = [(HOUR * 1.02 * number, HOUR, 1) for number in range(160)]
    flood = [(0.0, HOUR, 1) for _ in range(200)]

    def wait(others: Sequence[tuple[float, float, int]]) -> float:
        rows = sorted([*mine, *others])
        jobs = [Job(number, user, at, 1, length) for number, (at, length, user) in enumerate(rows)]
        line = Line("limits", QueueRules())
        found = replay(jobs, 1, line.starts, line.ended)
        return statistics.median(wait for wait, job in zip(found, jobs, strict=True) if job.user == 0)

    alone = wait(steady)
    assert 0.3 * HOUR < alone < 0.6 * HOUR  # the rest of the job that runs
    assert wait(flood) <= 1.2 * alone


def bout(place: Path, variant: str = "", **changes: float) -> Outcome:
    return torture(place, waiters=24, devices=4, kills=4, bound=0.3, variant=variant, **changes)  # type: ignore[arg-type]


def test_each_process_that_lives_is_served_and_none_is_passed_beyond_the_bound(tmp_path: Path) -> None:
    outcome = bout(tmp_path)

    assert (outcome.overlaps, outcome.lost, outcome.passed) == (0, 0, 0)
    assert outcome.served >= 20


@IN_CAMPAIGNS
def test_the_oracle_sees_locks_that_exclude_no_job(tmp_path: Path) -> None:
    assert bout(tmp_path, "no-exclusion").overlaps > 0


@IN_CAMPAIGNS
def test_the_oracle_sees_that_no_process_is_woken(tmp_path: Path) -> None:
    assert bout(tmp_path, "no-ring", patience=8.0).lost > 0


@IN_CAMPAIGNS
def test_the_recorded_order_shows_that_whatever_fits_may_pass(tmp_path: Path) -> None:
    # Who meets whom is a matter of chance.
    for round_ in range(5):
        (tmp_path / str(round_)).mkdir()
        outcome = torture(tmp_path / str(round_), waiters=36, devices=4, bound=0.3, variant="any-fit")
        assert outcome.lost == 0
        if outcome.passed:
            break

    assert outcome.passed > 0
