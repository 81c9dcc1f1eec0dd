"""What each claim of this machine took, recorded when it ends, because users keep the logs of their jobs to themselves.

The record is what the daemon has seen: a claim that comes and goes between two samples is in no line, and exit codes
are unknown.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.device_state import claims_readable
from gpuguard.enforcement.guard_limits import AuditQuota
from gpuguard.jobs.surroundings import JobMeter
from gpuguard.model import ClaimRecord, Event, Snapshot

LONGEST_COMMAND = 1000  # characters


@dataclass
class _SeenJob:
    claim: ClaimRecord
    meter: JobMeter
    begun: float  # unix time


class JobsSeen:
    """The living claims, with their numbers so far."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[int, str], _SeenJob] = {}
        self._quota = AuditQuota()  # one user must not push what was done to others out of the log

    def look(self, snapshot: Snapshot) -> Iterator[Event]:
        """Count the next sample, and yield a line about each claim that is no longer there."""
        if not claims_readable(snapshot):
            return
        living = {(claim.uid, claim.id): claim for claim in snapshot.claims if claim.alive and claim.uid >= 0}
        for key, claim in living.items():
            job = self._jobs.get(key)
            if job is None:
                uuids = claim.devices if claim.memory is None else ()  # a shared GPU also works for its other claims
                job = self._jobs[key] = _SeenJob(claim, JobMeter(uuids), claim.since or snapshot.taken_at)
            job.claim = claim
            job.meter.add(snapshot)
        for key in [key for key in self._jobs if key not in living]:
            line = _line(self._jobs.pop(key), snapshot.taken_at)
            if self._quota.admits(line, snapshot.clock):
                yield line
        yield from self._quota.left_out(snapshot.clock)


def _line(job: _SeenJob, ended: float) -> Event:
    claim, meter = job.claim, job.meter
    return Event(
        time=time.time(),
        kind="claim",
        outcome="seen to end",
        user=claim.user,
        devices=claim.devices,
        pid=claim.pid,
        claim=claim.id,
        message=shlex.join(claim.command)[:LONGEST_COMMAND] if claim.command else None,
        # The user is named, but not by "uid", because then all jobs of that user would ask what happened to them.
        facts=(
            ("owner_uid", claim.uid),
            ("wall_time_seconds", round(max(0.0, ended - job.begun), 3)),
            ("peak_memory_bytes", meter.peak_memory),
            ("mean_utilization_percent", meter.utilization()),
            ("energy_joules", meter.energy()),
        ),
    )
