"""The end of a task that runs, with all of its processes, on behalf of its user."""

from __future__ import annotations

import os
import signal
import time

from gpuguard.batch.job_facts import is_looked_after
from gpuguard.batch.states import TaskState
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import probe, read_record
from gpuguard.daemon.cancel import cancel
from gpuguard.errors import ClaimError
from gpuguard.jobs.processes import born_under, kill_tree, signal_tree
from gpuguard.model import ClaimRecord, claim_named
from gpuguard.procfs import processes, uid_of
from gpuguard.run import GRACE_SECONDS

HAND_OVER_SECONDS = 15.0  # in which a supervisor that was just forked answers
POLL_SECONDS = 0.1


def end_task(directory: LockDirectory, state: TaskState, *, by: str | None) -> None:
    """Have a task ended by its supervisor or, if that was killed, end its processes from here.

    This process has the rights of the owner; *by* is the user who wants it, if that is another one.

    Raises:
        ClaimError: it cannot be ended; the message says why.
    """
    until = time.monotonic() + HAND_OVER_SECONDS
    while record := read_record(directory, os.geteuid(), state.claim or ""):
        if not is_looked_after(record):
            _end_processes(directory, record)
            return
        try:
            cancel(directory, record.id, by)
            return
        except ClaimError:
            # The dispatcher has not handed the claim over yet, or it has ended just now.
            if time.monotonic() >= until:
                raise
            time.sleep(POLL_SECONDS)


def _end_processes(directory: LockDirectory, claim: ClaimRecord) -> None:
    """End the processes of a job whose supervisor was killed: SIGTERM, and SIGKILL GRACE_SECONDS later."""

    def family() -> dict[int, float]:
        held = claim_named(probe(directory, claim.devices), claim.uid, claim.id)
        holders = held.holders if held else ()
        return {
            pid: stat.start_time
            for pid, stat in processes().items()
            if pid != os.getpid()
            and uid_of(pid) == os.geteuid()
            and stat.state != "Z"
            and (pid in holders or born_under(claim.id, pid))
        }

    until = time.monotonic() + GRACE_SECONDS
    signal_tree(signal.SIGTERM, family)
    while family() and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    kill_tree(lambda: None, family)
