"""A full server in simulated time: how long jobs wait in our queue, and how long by other rules.

    python benchmarks/replay.py TRACE.csv [--devices 8]

TRACE has the columns t_submit_s, gpus, duration_s and user.  The queue is the one of `gpuguard run --wait`
(priority.order and backfill.plan) with a clock of its own; the other rules are written here, in a few lines each.
Waits are in hours.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpuguard.model import ClaimRecord
from gpuguard.queue.backfill import Fit, Machine, QueuePosition, backlog, plan, promise
from gpuguard.queue.estimates import NEWEST, estimate, probable_end
from gpuguard.queue.priority import TYPICAL_SECONDS, QueueRules, Ticket, bound_now, order
from gpuguard.queue.state import expected_end, last_ends
from gpuguard.request import Request

HOUR = 3600.0
COLUMNS = ("t_submit_s", "gpus", "duration_s", "user")


@dataclass(frozen=True)
class Job:
    """One line of the trace."""

    number: int
    user: int
    submitted: float
    num_gpus: int
    duration: float


@dataclass
class Server:
    """Who runs where, and who waits."""

    now: float
    ends: dict[int, float]  # device -> when its job really ends; devices without a job are missing
    devices: int
    waiting: list[Job]

    @property
    def free(self) -> list[int]:
        """Devices without a job."""
        return [device for device in range(self.devices) if device not in self.ends]


Starts = Callable[[Server], Sequence[Job]]  # who starts now


def replay(jobs: Sequence[Job], devices: int, starts: Starts, ended: Callable[[Job], object] = id) -> list[float]:
    """Each job's wait in seconds.  *starts* is asked again until nobody does."""
    server = Server(0.0, {}, devices, [])
    events = [(job.submitted, 0, job.number) for job in jobs]
    heapq.heapify(events)
    waits = [0.0] * len(jobs)
    while events:
        server.now, kind, number = heapq.heappop(events)
        if kind:
            ended(jobs[number])
        else:
            server.waiting.append(jobs[number])
        if events and events[0][0] == server.now:
            continue
        server.ends = {device: end for device, end in server.ends.items() if end > server.now}
        while begun := list(starts(server)):
            for job in begun:
                waits[job.number] = server.now - job.submitted
                server.waiting.remove(job)
                for device in server.free[: job.num_gpus]:
                    server.ends[device] = server.now + job.duration
                heapq.heappush(events, (server.now + job.duration, 1, job.number))
    assert not server.waiting, "somebody was never served"
    return waits


def fifo(server: Server) -> Sequence[Job]:
    """Strictly in order of arrival."""
    return [job for job in server.waiting[:1] if job.num_gpus <= len(server.free)]


def any_fit(server: Server) -> Sequence[Job]:
    """Whatever fits: what people do who ask nvidia-smi in a loop."""
    return [job for job in server.waiting if job.num_gpus <= len(server.free)][:1]


def shortest(server: Server) -> Sequence[Job]:
    """The shortest of what fits, without a bound."""
    return sorted((job for job in server.waiting if job.num_gpus <= len(server.free)), key=lambda job: job.duration)[:1]


def easy(server: Server) -> Sequence[Job]:
    """EASY backfill: whatever does not put off the first in line."""
    if not server.waiting or begun_first(server):
        return server.waiting[:1]
    first, free = server.waiting[0], len(server.free)
    ends = sorted(server.ends.values())
    shadow = ends[first.num_gpus - free - 1]
    spare = free + sum(end <= shadow for end in ends) - first.num_gpus
    for job in server.waiting[1:]:
        if job.num_gpus <= free and (server.now + job.duration <= shadow or job.num_gpus <= spare):
            return [job]
    return []


def begun_first(server: Server) -> bool:
    """Whether the first in line fits."""
    return server.waiting[0].num_gpus <= len(server.free)


class Line:
    """Our queue.  It knows of a job's length: "limits" everything, "history" what its user's jobs took, "" nothing."""

    def __init__(self, knows: str, rules: QueueRules) -> None:
        self.knows, self.rules = knows, rules
        self.tickets: dict[int, Ticket] = {}
        self.running: dict[tuple[int, ...], tuple[Ticket, float]] = {}  # devices -> what started there, and when
        self.past: dict[int, list[float]] = {}
        self.usage: dict[int, float] = {}
        self.served: dict[int, float] = {}
        self.counted = 0.0
        self.bound = rules.bound  # by which the last plan went

    def starts(self, server: Server) -> Sequence[Job]:
        """Who may start now."""
        for job in server.waiting:
            if job.number not in self.tickets:
                self.tickets[job.number] = self.join(server, job)
        if not self.tickets or not server.free:
            return []
        begun, left = [], iter(server.free)
        jobs = {job.number: job for job in server.waiting}
        for ticket in [position.ticket for position in self.plan(server) if position.now]:
            job = jobs[int(ticket.id)]
            del self.tickets[job.number]
            self.served[ticket.uid] = server.now
            self.use(server.now, ticket.uid, ticket.num_gpus * job.duration)
            self.running[tuple(itertools.islice(left, job.num_gpus))] = ticket, server.now
            begun.append(job)
        return begun

    def join(self, server: Server, job: Job) -> Ticket:
        """A ticket with its promise."""
        limit = self.time_limit(job)
        past = self.past.get(job.user, []) if self.knows == "history" else []
        request = (Request(num_gpus=job.num_gpus),)
        expected = estimate(past)
        ticket = Ticket(f"{job.number:06}", job.user, "", server.now, request, time_limit=limit, expected=expected)
        return ticket if limit is None else self.promised(server, ticket)  # without limits no start is known

    def promised(self, server: Server, ticket: Ticket) -> Ticket:
        """The ticket with what it is promised as it joins the queue."""
        self.tickets[int(ticket.id)] = ticket
        place = next(each for each in self.plan(server) if each.ticket.id == ticket.id)
        return replace(ticket, promise=promise(place, self.rules, server.now))

    def time_limit(self, job: Job) -> float | None:
        """What its user says of a job (seconds)."""
        return job.duration if self.knows == "limits" else None

    def plan(self, server: Server) -> list[QueuePosition]:
        """The plan of the queue now."""
        free = server.free
        self.running = {
            devices: began for devices, began in self.running.items() if not set(free).intersection(devices)
        }
        opened = frozenset(str(device) for device in free)
        uuids = tuple(str(device) for device in range(server.devices))
        claims = [
            ClaimRecord(
                ticket.id,
                ticket.uid,
                "",
                tuple(map(str, devices)),
                since=since,
                ends=None if ticket.time_limit is None else since + ticket.time_limit,
                expected=None if ticket.expected is None else since + ticket.expected,
            )
            for devices, (ticket, since) in self.running.items()
        ]
        tickets = [replace(each, served=self.served.get(each.uid)) for each in self.tickets.values()]
        fits = {request: Fit(uuids, opened) for each in tickets for request in each.requests}
        machine = Machine(
            fits,
            last_ends(claims, lambda claim: claim.ends),
            last_ends(claims, lambda claim: expected_end(claim, server.now)),
            last_ends(claims, lambda claim: probable_end(claim.since or 0.0, TYPICAL_SECONDS, server.now)),
        )
        waits = [since - ticket.since for ticket, since in self.running.values()]
        rules = bound_now(self.rules, waits, backlog(tickets, machine, server.now))
        self.bound = rules.bound
        return plan(order(tickets, self.usage, rules, server.now), machine, self.usage, rules, server.now)

    def use(self, now: float, uid: int, gpu_seconds: float) -> None:
        """Count what a job will have used, as the daemon would by and by."""
        fades = 0.5 ** ((now - self.counted) / self.rules.half_life)
        self.counted, self.usage = now, {each: used * fades for each, used in self.usage.items()}
        self.usage[uid] = self.usage.get(uid, 0.0) + gpu_seconds

    def ended(self, job: Job) -> None:
        """Learn from it."""
        self.past.setdefault(job.user, []).append(job.duration)
        self.past[job.user] = self.past[job.user][-NEWEST:]


def read(path: str, devices: int) -> list[Job]:
    """The jobs of a trace, in order of arrival.

    Raises:
        ValueError: a line is not understood, or its job can never run.
    """
    with open(path, newline="") as lines:
        table = csv.DictReader(lines)
        for name in COLUMNS:
            if name not in (table.fieldnames or ()):
                raise ValueError(f"the column {name} is missing")
        found = []
        for row in table:
            try:
                facts = float(row["t_submit_s"]), row["user"], int(row["gpus"]), float(row["duration_s"])
            except (ValueError, TypeError) as error:
                raise ValueError(f"line {table.line_num}: {error}") from None
            found.append(facts)
    if not found:
        raise ValueError("there are no jobs in it")
    if (widest := max(num_gpus for _, _, num_gpus, _ in found)) > devices:
        raise ValueError(f"a job wants {widest} devices, and there are {devices}: add --devices {widest}")
    users = {name: number for number, name in enumerate(sorted({user for _, user, _, _ in found}))}
    found.sort(key=lambda facts: facts[0])
    return [Job(i, users[user], at, num_gpus, max(lasts, 1.0)) for i, (at, user, num_gpus, lasts) in enumerate(found)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--bound", type=float, nargs="*", default=[24.0], help="hours, for jobs of unknown length")
    args = parser.parse_args()
    try:
        jobs = read(args.trace, args.devices)
    except (OSError, ValueError) as error:
        parser.error(f"{args.trace}: {error}")
    widest = max(job.num_gpus for job in jobs)
    print(f"{len(jobs)} jobs on {args.devices} devices; hours waited\n")
    print(f"| rule | mean | median | longest of a request for {widest} | longest of all |\n|---|---|---|---|---|")

    def row(name: str, starts: Starts, ended: Callable[[Job], object] = id) -> None:
        began = time.process_time()
        waits = [wait / HOUR for wait in replay(jobs, args.devices, starts, ended)]
        wide = max(wait for wait, job in zip(waits, jobs, strict=True) if job.num_gpus == widest)
        figures = (statistics.mean(waits), statistics.median(waits), wide, max(waits))
        print(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
        print(f"{name}: {time.process_time() - began:.1f} s of CPU", file=sys.stderr)

    row("order of arrival", fifo)
    row("whatever fits", any_fit)
    row("EASY backfill, lengths known", easy)
    row("shortest first, lengths known", shortest)
    line = Line("limits", QueueRules())
    row("gpuguard, lengths known", line.starts, line.ended)
    for knows, what in (("history", "lengths of earlier jobs known"), ("", "nothing known")):
        for bound in args.bound:
            line = Line(knows, QueueRules(bound=bound * HOUR))
            row(f"gpuguard, {what}, bound {bound:g} h", line.starts, line.ended)


if __name__ == "__main__":
    main()
