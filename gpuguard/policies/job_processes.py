"""Which processes form one job: the guard counts a job once, and ends it whole.

With a claim, a job is the processes that hold the lock of the innermost one, or were started below such a process.
Without one, it is the processes that share a process group; or that share a parent that only starts programs, the
program, and the time of the start: a launcher whose ranks have groups of their own.  A job belongs to one user.  A
process that only may belong to a claim, or of which nothing is known, is a job by itself.

Where a rule finds a part of a claimed job, all of it ends.  Without a claim no process ends that no rule has found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from gpuguard.device_state import innermost_claim
from gpuguard.model import GpuProcess, ProcessIdentity
from gpuguard.policies.view import RuleView

TOGETHER_SECONDS = 60.0  # a launcher starts its ranks within these


@dataclass(frozen=True)
class JobMember:
    """A process, and what it shares with the others of its job."""

    process: ProcessIdentity
    job: str  # its claim or its process group, with its user
    launch: str = ""  # its parent and program, with its user, where that parent only starts programs

    def belongs_with(self, other: JobMember) -> bool:
        """Whether both are known to belong to one job."""
        together = abs(self.process[1] - other.process[1]) <= TOGETHER_SECONDS
        return self.job == other.job or (together and self.launch == other.launch != "")


Jobs = Mapping[JobMember, str]  # the job of each process, by a name for it


def alone(process: ProcessIdentity) -> JobMember:
    """Return a member of a job by itself: *process* is not known to share anything."""
    return JobMember(process, f"process {process}")


def member_of(process: GpuProcess, view: RuleView) -> JobMember:
    """Return *process* with what it shares with others of its job."""
    identity = process.pid, -1.0 if process.start_time is None else process.start_time
    stat, user = view.seen.get(process.pid), f"of {process.uid}"
    if stat is None or process.uid is None or stat.start_time != process.start_time:
        return alone(identity)
    if claim := innermost_claim(process, view.snapshot.claims, view.seen):
        return JobMember(identity, f"claim {claim.id} {user}")
    parent = view.seen.get(stat.parent)
    launches = parent and stat.parent > 1 and parent.session != stat.parent and not parent.is_shell
    launch = f"{process.executable} by {stat.parent}@{parent.start_time} {user}" if parent and launches else ""
    group = f"group {stat.group} {user}" if stat.group else alone(identity).job
    return JobMember(identity, group, launch if process.executable else "")


def identities(processes: Iterable[GpuProcess]) -> frozenset[ProcessIdentity]:
    """Return (pid, start time) of each process whose start is known."""
    known = ((process.pid, process.start_time) for process in processes)
    return frozenset((pid, start_time) for pid, start_time in known if start_time is not None)


def jobs_of(members: Iterable[JobMember]) -> Jobs:
    """Return what stands for the job of each of *members*, the same text for all members of one job."""
    jobs = {member: member.job for member in members}
    merged: dict[str, str] = {}

    def merged_into(job: str) -> str:
        while job in merged:
            job = merged[job]
        return job

    def merge(one: str, other: str) -> None:
        one, other = merged_into(one), merged_into(other)
        if one != other:
            merged[other] = one

    first: dict[ProcessIdentity, str] = {}  # a process stays in its job even if its claim or group has changed by now
    for member, job in jobs.items():
        merge(first.setdefault(member.process, job) if member.process[0] > 0 else job, job)
    launched = sorted((member for member in jobs if member.launch), key=lambda each: (each.launch, each.process[1]))
    for before, member in pairwise(launched):
        if before.belongs_with(member):
            merge(before.job, member.job)
    return {member: merged_into(job) for member, job in jobs.items()}
