"""How true the starts are that the queue tells, in simulated time.

    python benchmarks/start_times.py [TRACE.csv ...] [--jobs 400] [--limits 50%] [--margin 2] [--seed 1] [--json]

The first jobs of each trace go through the real queue of a server with 8 GPUs (Line in replay.py).  Each request that
waits is told a likely start, and a certain one where there is one, when it joins the queue and again by each plan after
that; its real start is compared with both.  A trace has one of three forms, and what it lacks is drawn from the seed:

- jobs, with the columns of replay.py: as they are.
- samples (pod,t_s,util): each stretch in which a pod is busy is a job of one GPU, and the pod its user; of so many
  pods, drawn at random, that their jobs would keep a part LOAD of the server busy.
- quantiles (percentile and a column per user): of the lengths of jobs, 1 % being a minute.

Without a trace, all is drawn.  So are the time limits in any case, as no trace has them: the next round time that is
*margin* times the length or more.  People choose from few values (Tsafrir, Etsion and Feitelson 2005), and a job that
reaches its limit is ended.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from replay import HOUR, Job, Line, Server, read, replay

from gpuguard.queue import reasons
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.priority import QueueRules, Ticket
from gpuguard.units import parse_percent

DEVICES = 8
LOAD = 0.77  # of the server, where it is drawn: that of the trace in README.md
WIDTHS = (1, 1, 1, 1, 2, 2, 4, 8)  # GPUs, where they are drawn
USERS = 8
IDLE_SECONDS = 120.0  # a pod that is idle for longer has ended its job
SLACK_SECONDS = 1e-3
SAMPLE_SECONDS = 57.0  # between two samples of a pod
ROUND_HOURS = (1 / 6, 1 / 2, 1, 3, 6, 12, 24, 48, 96, 168, 336, 672)  # that people give as time limits


@dataclass(frozen=True)
class Told:
    """What a request was told at one moment, and when it started (seconds of simulated time)."""

    likely: float | None  # None: unknown
    certain: float | None
    began: float


@dataclass(frozen=True)
class Figures:
    """One row of the table; *again*: of all plans, not only of the first that a request was told."""

    trace: str
    drawn: str
    jobs: int
    waited: int
    told: int  # requests that were told a likely start at first
    median_error_seconds: float | None
    largest_error_seconds: float | None  # of nine in ten
    again_median_error_seconds: float | None
    again_largest_error_seconds: float | None
    likely_after_certain: int  # again; must be 0
    certain: int  # how often a certain start was told, again
    began_after_certain: int  # of those
    order_violations: int  # told or started; must be 0


class TellingLine(Line):
    """Our queue, which remembers what it told each request that had to wait, and when that started."""

    def __init__(self, limits: Mapping[int, float]) -> None:
        super().__init__("history", QueueRules())
        self.limits = limits
        self.positions: dict[int, list[QueuePosition]] = {}  # number of a job -> as it was told
        self.began: dict[int, tuple[Ticket, float]] = {}
        self.order_violations = 0  # of what was told

    def time_limit(self, job: Job) -> float | None:
        """As it was drawn."""
        return self.limits.get(job.number)

    def join(self, server: Server, job: Job) -> Ticket:
        """A ticket with its promise, which others' time limits may allow."""
        ticket = super().join(server, job)
        return ticket if ticket.time_limit is not None else self.promised(server, ticket)

    def starts(self, server: Server) -> Sequence[Job]:
        """Who may start now; once nobody may, all that wait are told when they do."""
        begun = super().starts(server)
        self.began |= {int(ticket.id): (ticket, since) for ticket, since in self.running.values()}
        if self.tickets and not begun:
            positions = self.plan(server)
            self.order_violations += order_violations([(position.ticket, position.start) for position in positions])
            for position in positions:
                self.positions.setdefault(int(position.ticket.id), []).append(position)
        return begun

    def told(self) -> list[list[Told]]:
        """What each request that waited was told, the first first."""
        return [
            [Told(position.start, certain_start(position), self.began[number][1]) for position in positions]
            for number, positions in self.positions.items()
        ]


def certain_start(position: QueuePosition) -> float | None:
    """The certain start that users are told; before 2026-11-28 that was what they had been promised."""
    return reasons.certain_start(position) if hasattr(reasons, "certain_start") else position.ticket.promise


def order_violations(starts: Sequence[tuple[Ticket, float | None]]) -> int:
    """How many start before an earlier request of the same user of which the queue knows the same."""
    count, latest = 0, dict[tuple[object, ...], float]()
    for ticket, start in sorted(starts, key=lambda pair: pair[0].id):
        kind = ticket.uid, ticket.requests, ticket.priority, ticket.time_limit, ticket.expected
        if start is not None:
            count += start < latest.get(kind, start)
            latest[kind] = max(start, latest.get(kind, start))
    return count


def figures(trace: str, drawn: str, jobs: Sequence[Job], limits: Mapping[int, float]) -> Figures:
    """Replay *jobs*, of which some have *limits* (number -> seconds)."""
    line = TellingLine(limits)
    replay(jobs, DEVICES, line.starts, line.ended)
    told = line.told()
    again = [each for request in told for each in request]
    at_first = errors([request[0] for request in told])
    certain = [(each.certain, each) for each in again if each.certain is not None]
    return Figures(
        trace=trace,
        drawn=drawn,
        jobs=len(jobs),
        waited=len(told),
        told=len(at_first),
        median_error_seconds=part_of(at_first, 0.5),
        largest_error_seconds=part_of(at_first, 0.9),
        again_median_error_seconds=part_of(errors(again), 0.5),
        again_largest_error_seconds=part_of(errors(again), 0.9),
        likely_after_certain=sum((each.likely or 0.0) > latest + SLACK_SECONDS for latest, each in certain),
        certain=len(certain),
        began_after_certain=sum(each.began > latest + SLACK_SECONDS for latest, each in certain),
        order_violations=line.order_violations + order_violations(list(line.began.values())),
    )


def errors(told: Sequence[Told]) -> list[float]:
    """Seconds between the likely and the real start, where a likely one was told; in order."""
    return sorted(abs(each.likely - each.began) for each in told if each.likely is not None)


def part_of(in_order: Sequence[float], part: float) -> float | None:
    """The value that so great a part of them is below."""
    return round(in_order[int(part * len(in_order))], 1) if in_order else None


def jobs_of(path: str, chance: random.Random, count: int) -> tuple[str, list[Job]]:
    """The first *count* jobs of a trace, and what had to be drawn for them."""
    with open(path, newline="") as lines:
        rows = list(csv.DictReader(lines))
    columns = rows[0].keys() if rows else set[str]()
    if "pod" in columns:
        return "pods, limits", of_samples(rows, chance, count)
    if "percentile" in columns:
        lengths = [[float(row[name]) * 60 for row in rows] for name in columns if name != "percentile"]
        return "lengths, arrivals, GPUs, limits", made(chance, lengths, count)
    return "limits", read(path, DEVICES)[:count]


def of_samples(rows: Sequence[Mapping[str, str]], chance: random.Random, count: int) -> list[Job]:
    """The busy stretches of some pods."""
    stretches: dict[str, list[tuple[float, float]]] = {}  # begin and end of each
    for row in rows:
        at, own = float(row["t_s"]), stretches.setdefault(row["pod"], [])
        if float(row["util"]) > 0:
            goes_on = own and at - own[-1][1] <= IDLE_SECONDS
            own.append((own.pop()[0] if goes_on else at, at + SAMPLE_SECONDS))
    left = LOAD * DEVICES * max(float(row["t_s"]) for row in rows)
    found: list[tuple[float, int, float]] = []
    for user, pod in enumerate(chance.sample(sorted(stretches), len(stretches))):
        if left > 0:
            found += [(begin, user, end - begin) for begin, end in stretches[pod]]
            left -= sum(end - begin for begin, end in stretches[pod])
    return [Job(n, user, at, 1, lasts) for n, (at, user, lasts) in enumerate(sorted(found)[:count])]


def made(chance: random.Random, lengths: Sequence[Sequence[float]], count: int) -> list[Job]:
    """Jobs of a user for each of *lengths* (seconds), from which those of the user's jobs are drawn."""
    drawn = [
        (user, chance.choice(WIDTHS), chance.choice(own)) for user, own in enumerate(lengths) for _ in range(count)
    ]
    drawn = chance.sample(drawn, count)
    span = sum(width * lasts for _, width, lasts in drawn) / DEVICES / LOAD
    arrivals = sorted(chance.uniform(0, span) for _ in drawn)
    return [
        Job(n, user, at, width, max(1.0, lasts))
        for n, (at, (user, width, lasts)) in enumerate(zip(arrivals, drawn, strict=True))
    ]


def workload(chance: random.Random, count: int) -> list[Job]:
    """Users whose jobs are alike, of seconds or of hours: each within a third of what is usual for its user."""
    usual = [10 ** chance.uniform(1, 4) for _ in range(USERS)]
    return made(chance, [[seconds * chance.uniform(2 / 3, 4 / 3) for _ in range(99)] for seconds in usual], count)


def limits_of(jobs: Sequence[Job], chance: random.Random, part: float, margin: float) -> dict[int, float]:
    """Number -> time limit (seconds) of so great a part of them; none where no round time is long enough."""
    limits = {}
    for job in jobs:
        enough = [hours * HOUR for hours in ROUND_HOURS if hours * HOUR >= margin * job.duration]
        if chance.random() < part and enough:
            limits[job.number] = enough[0]
    return limits


def table(rows: Sequence[Figures]) -> str:
    """The rows for people, in seconds."""
    lines = [
        "| trace | drawn | jobs | waited | told | error: half | nine in ten | again: half | nine in ten "
        "| likely after certain | began after certain | out of order |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        cells = [
            *(row.trace, row.drawn, row.jobs, row.waited, row.told),
            *(row.median_error_seconds, row.largest_error_seconds),
            *(row.again_median_error_seconds, row.again_largest_error_seconds),
            *(row.likely_after_certain, f"{row.began_after_certain} of {row.certain}", row.order_violations),
        ]
        lines.append(
            "| " + " | ".join(f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", metavar="TRACE", nargs="*", help="default: a workload that is drawn")
    parser.add_argument("--jobs", type=int, default=400, help="of each trace, the first ones")
    parser.add_argument("--limits", type=parse_percent, default="50%", help="of the jobs that have a time limit")
    parser.add_argument("--margin", type=float, default=2.0, help="a time limit is so many times the length, or more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for path in args.traces or [""]:
        chance = random.Random(args.seed)
        try:
            drawn, jobs = jobs_of(path, chance, args.jobs) if path else ("all", workload(chance, args.jobs))
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{path}: {error}")
        limits = limits_of(jobs, chance, args.limits / 100, args.margin)
        rows.append(figures(Path(path).name or "none", drawn, jobs, limits))
    print(json.dumps({"seed": args.seed, "rows": [asdict(row) for row in rows]}) if args.json else table(rows))


if __name__ == "__main__":
    main()
