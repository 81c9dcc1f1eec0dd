"""benchmarks/replay.py on a small trace: every rule serves everybody, ours keeps what it promises, twice the same."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import replay as benchmark
from sources import ROOT

from gpuguard.queue.priority import Rules

DEVICES = 4
HOUR = 3600.0


def a_trace(seed, count=80):
    """Jobs of five users on a server that is too small for them."""
    chance = random.Random(seed)
    times = sorted(chance.uniform(0, 60 * HOUR) for _ in range(count))
    return [
        benchmark.Job(
            number, chance.randrange(5), at, chance.choice((1, 1, 1, 2, 4)), HOUR * chance.choice((0.1, 0.5, 2, 3, 8))
        )
        for number, at in enumerate(times)
    ]


class Watched(benchmark.Line):
    """Our line, which keeps each promise."""

    def __init__(self, knows, rules):
        super().__init__(knows, rules)
        self.promises = {}

    def join(self, server, job):
        ticket = super().join(server, job)
        self.promises[job.number] = ticket.promise
        return ticket


def waits_of(jobs, knows, **rules):
    line = Watched(knows, Rules(**rules))
    return benchmark.replay(jobs, DEVICES, line.starts, line.ended), line


RULES = {
    "order of arrival": lambda jobs: benchmark.replay(jobs, DEVICES, benchmark.fifo),
    "whatever fits": lambda jobs: benchmark.replay(jobs, DEVICES, benchmark.any_fit),
    "shortest first": lambda jobs: benchmark.replay(jobs, DEVICES, benchmark.shortest),
    "EASY": lambda jobs: benchmark.replay(jobs, DEVICES, benchmark.easy),
    "limits": lambda jobs: waits_of(jobs, "limits")[0],
    "history": lambda jobs: waits_of(jobs, "history")[0],
    "nothing": lambda jobs: waits_of(jobs, "")[0],
    "nothing, in order of arrival": lambda jobs: waits_of(jobs, "", fair_share=False)[0],
}


def most_in_use(jobs, waits):
    """Devices, at the fullest moment; a job that ends makes room for one that starts then."""
    changes = []
    for job, wait in zip(jobs, waits, strict=True):
        begin = job.submitted + wait
        changes += [(round(begin, 3), 1, job.num_gpus), (round(begin + job.duration, 3), 0, -job.num_gpus)]
    used = most = 0
    for _, _, change in sorted(changes):
        used += change
        most = max(most, used)
    return most


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_everybody_is_served_and_no_device_twice(name, seed):
    jobs = a_trace(seed)
    waits = RULES[name](jobs)

    assert len(waits) == len(jobs) and min(waits) >= 0
    assert DEVICES - 1 <= most_in_use(jobs, waits) <= DEVICES
    assert max(waits) > HOUR  # or else the trace tests nothing


@pytest.mark.parametrize("name", RULES)
def test_the_same_trace_gives_the_same_waits(name):
    assert RULES[name](a_trace(7)) == RULES[name](a_trace(7))


def test_in_order_of_arrival_nobody_is_overtaken():
    jobs = a_trace(3)
    starts = [round(job.submitted + wait, 3) for job, wait in zip(jobs, RULES["order of arrival"](jobs), strict=True)]

    assert all(earlier <= later for earlier, later in pairwise(starts))


@pytest.mark.parametrize("seed", range(8))
def test_with_known_lengths_everybody_starts_by_his_promise(seed):
    jobs = a_trace(seed)
    waits, line = waits_of(jobs, "limits", fair_share=False)

    late = [
        job.number
        for job, wait in zip(jobs, waits, strict=True)
        if job.submitted + wait > line.promises[job.number] + 1
    ]
    assert late == []
    assert len(line.promises) == len(jobs)


def test_a_promise_that_is_broken_would_be_seen():
    jobs = a_trace(0)
    _, line = waits_of(jobs, "limits", fair_share=False)
    waits = RULES["shortest first"](jobs)

    assert any(job.submitted + wait > line.promises[job.number] for job, wait in zip(jobs, waits, strict=True))


def overtakers(jobs, waits, bound):
    """(who was passed, by whom): by one that came later, after he had waited for the *bound*."""
    starts = {job.number: round(job.submitted + wait, 3) for job, wait in zip(jobs, waits, strict=True)}
    return [
        (one.number, other.number)
        for one in jobs
        for other in jobs
        if one.submitted < other.submitted and one.submitted + bound < starts[other.number] < starts[one.number]
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bound", [0.0, 4 * HOUR])
def test_where_nothing_is_known_nobody_is_passed_after_the_bound(seed, bound):
    jobs = [replace(job, user=job.number) for job in a_trace(seed)]  # of each user the oldest request has that right
    waits, _ = waits_of(jobs, "", fair_share=False, bound=bound)

    assert overtakers(jobs, waits, bound) == []
    assert overtakers(jobs, RULES["whatever fits"](jobs), bound) != []  # so it could be seen


@pytest.mark.parametrize("knows", ["limits", "history", ""])
def test_one_who_floods_the_line_gets_no_further_by_it(knows):
    flood = [benchmark.Job(0, 0, 0.0, 1, HOUR)] * 60
    alone = [benchmark.Job(0, 1, 600.0 * number, 1, HOUR) for number in range(1, 9)]
    jobs = [replace(job, number=number) for number, job in enumerate(sorted(flood + alone, key=lambda j: j.submitted))]
    waits, _ = waits_of(jobs, knows)

    assert max(wait for job, wait in zip(jobs, waits, strict=True) if job.user == 1) <= 2 * HOUR
    in_order = RULES["order of arrival"](jobs)
    assert min(wait for job, wait in zip(jobs, in_order, strict=True) if job.user == 1) > 10 * HOUR


def test_the_table_is_printed_for_a_trace_of_ones_own(tmp_path):
    path = tmp_path / "trace.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["user", "t_submit_s", "gpus", "duration_s"])
        for job in reversed(a_trace(1)):  # in any order, with the columns in any order
            table.writerow([f"user{job.user}", job.submitted, job.num_gpus, job.duration])
    command = [sys.executable, str(ROOT / "benchmarks" / "replay.py"), str(path), "--devices", str(DEVICES)]
    done = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]

    rows = [line for line in done[0].splitlines() if line.startswith("| ")]
    assert done[0] == done[1]
    assert done[0].startswith(f"80 jobs on {DEVICES} devices; hours waited\n")
    assert [row.split(" | ")[0][2:] for row in rows[1:]] == [
        "order of arrival",
        "whatever fits",
        "EASY backfill, lengths known",
        "shortest first, lengths known",
        "gpuguard, lengths known",
        "gpuguard, lengths of earlier jobs known, bound 24 h",
        "gpuguard, nothing known, bound 24 h",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t_submit_s,gpus,duration_s,user\n0,5,60,a\n", "a job wants 5 devices, and there are 4"),
        ("t_submit_s,gpus,user\n0,1,a\n", "the column duration_s is missing"),
        ("t_submit_s,gpus,duration_s,user\n", "there are no jobs in it"),
        ("t_submit_s,gpus,duration_s,user\n0,one,60,a\n", "line 2: "),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    command = [sys.executable, str(ROOT / "benchmarks" / "replay.py"), str(path), "--devices", str(DEVICES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and "Traceback" not in done.stderr
