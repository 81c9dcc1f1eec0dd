"""The claim of a Slurm job: gpuguard's locks on the devices that Slurm has given to it on this node.

A separate process, the holder, keeps the locks from the prolog (which waits for it) to the epilog.  If no epilog comes,
it ends when no slurmstepd of the job is left; it has a pidfd of each.  It acts as the job's owner, to whom the claim
belongs, but its real user stays root, so that the owner's `pkill python` does not take the claim away.  No file names
its pid.

    prolog   claim_for_job() claims what Slurm names, all or nothing, by both keys: unlocked, and no process on it
    holder   hold() keeps the claim until end_claim(), or until no slurmstepd of the job lives
    epilog   end_claim() releases the claim
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import RELEASED, ReleaseRequest, read_record
from gpuguard.claims.restrictions import restrictions_against
from gpuguard.claims.unlock import lock_handle
from gpuguard.clusters import slurm_jobs
from gpuguard.clusters.slurm_jobs import Allocation
from gpuguard.enforcement import actions, signals
from gpuguard.errors import ClaimError, ClaimLost, NotEnoughGpus
from gpuguard.files import wait_for
from gpuguard.jobs.adoption import ENDING
from gpuguard.locale.messages import all_of, sentence
from gpuguard.lock import Allocator
from gpuguard.model import HEALTH, MODEL, PROCESS_DETAILS, PROCESSES, ClaimRecord
from gpuguard.queue.reasons import reserved_for_others
from gpuguard.request import Request, fields_needed
from gpuguard.select import refusal_text

POLL_SECONDS = 0.25  # between two searches for the first slurmstepd
ALONE_SECONDS = 2.0  # without any slurmstepd: one step may end before the next one starts
UNSEEN_SECONDS = 60.0  # for the first one, before the controller is asked; with PrologFlags=Contain it comes at once
CONTROLLER_SECONDS = 60.0
END_SECONDS = 10.0
WAKING = signals.CHECK_CLAIM
_PR_SET_DUMPABLE = 4


def claim_for_job(backend: Backend, directory: LockDirectory, given: Allocation, *, wait: float = 0.0) -> Claim:
    """Claim the devices of *given*, all of them or none, for this process; its record is not written yet.

    It waits up to *wait* seconds for earlier users of them to be gone.  Raises ClaimError, which says why not, and
    BackendError.
    """
    deadline = time.monotonic() + wait
    while True:
        snapshot = backend.sample({PROCESSES, PROCESS_DETAILS, HEALTH, MODEL} | fields_needed(Request()))
        wanted = slurm_jobs.devices_of(given.gpus, snapshot.devices)
        uuids = tuple(device.uuid for device in wanted)
        request = Request(num_gpus=len(uuids), devices=uuids)
        taken = reserved_for_others(backend, directory, snapshot, request) if directory.has("reserve.") else {}
        taken |= restrictions_against(directory, uuids, given.uid, time.time())
        allocator = Allocator(backend, directory, [request], environ={})
        if claim := allocator.lock_best(request, snapshot, taken, with_record=False):
            claim.id = given.claim
            return claim
        if time.monotonic() >= deadline:
            raise ClaimError(_in_words(allocator.why_not(request, snapshot, taken)))
        time.sleep(POLL_SECONDS)


def _in_words(error: NotEnoughGpus) -> str:
    """Say in one line why Slurm's devices cannot be had: ``"device 2: claimed by bob, 5m ago: python train.py"``."""
    texts = [
        refusal_text(refusal)
        for refusal in error.refused
        if not any(reason.option == "--devices" for reason in refusal.reasons)
    ]
    return all_of(texts, ", ") or " ".join(str(error).split())


def become(uid: int) -> None:
    """Act as *uid* from now on; root stays the real user, so that *uid* cannot signal this process or look into it."""
    with suppress(KeyError):
        os.setegid(pwd.getpwuid(uid).pw_gid)
    os.setgroups([])
    os.seteuid(uid)
    # Otherwise /proc/PID would now belong to root, and every program that looks for the holder would see root there.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


@dataclass
class JobSteps:
    """The slurmstepd processes of a Slurm job, held by pidfds."""

    job: str
    pidfds: dict[int, int] = field(default_factory=dict)  # pidfd -> pid
    contained: bool = False  # whether there was one that lives as long as the job: PrologFlags=Contain

    def refresh(self) -> None:
        """Find the slurmstepd processes that have started since the last call."""
        for pid, (_name, step) in slurm_jobs.steps(self.job).items():
            if pid in self.pidfds.values():
                continue
            with suppress(OSError):
                pidfd = os.pidfd_open(pid)
                # This is read after the pidfd is open, so it is of the process that the pidfd means.
                if slurm_jobs.step_of(pid) != (self.job, step):
                    os.close(pidfd)
                    continue
                self.pidfds[pidfd] = pid
                self.contained |= step == "extern"


def hold(claim: Claim, given: Allocation, woken: int) -> str:
    """Keep *claim* until it is released from outside or the job is over; return in words what ended it.

    *woken* is the reading end of a pipe of wake_pipe().
    """
    steps, began = JobSteps(given.job), time.monotonic()
    alone_since, check_at = began, began + UNSEEN_SECONDS
    while True:
        steps.refresh()
        alone = not steps.pidfds
        for descriptor in wait_for([woken, *steps.pidfds], None if steps.pidfds and steps.contained else POLL_SECONDS):
            if descriptor != woken:
                del steps.pidfds[descriptor]
                os.close(descriptor)
            elif ended := _woken(claim, woken):
                return ended
        steps.refresh()
        now = time.monotonic()
        if steps.pidfds or not alone:
            alone_since, check_at = now, now + CONTROLLER_SECONDS
        elif steps.contained and now >= alone_since + ALONE_SECONDS:
            return sentence("slurm.steps_ended", "the job has no slurmstepd any more, and no epilog came")
        elif now >= check_at:
            check_at = now + CONTROLLER_SECONDS
            if slurm_jobs.is_over(given):
                return sentence("slurm.job_over", "the job is over, says Slurm, and no epilog came")
            if slurm_jobs.contains():
                return sentence("slurm.no_steps", "the job has got no slurmstepd, and no epilog came")


def _woken(claim: Claim, woken: int) -> str | None:
    signals = os.read(woken, 64)
    try:
        claim.reassert()
    except ClaimLost as lost:
        return str(lost)
    ending = [number for number in signals if number in ENDING]
    if not ending:
        return None
    name = signal.Signals(ending[0]).name
    return sentence("slurm.holder_ended", "the holder was ended by {signal}", signal=name)


def claim_of_job(directory: LockDirectory, given: Allocation) -> ClaimRecord | None:
    """Return the living claim of the job, or None if it has none."""
    return read_record(directory, given.uid, given.claim)


def end_claim(directory: LockDirectory, given: Allocation) -> ClaimRecord | None:
    """Release the claim of the job and wait until it is gone; return it, or None if there was none.

    Raises ClaimError: it cannot be released.
    """
    claim = claim_of_job(directory, given)
    if claim is None:
        return None
    try:
        with lock_handle(directory, claim) as handle:
            by = sentence("by.epilog", "Slurm's epilog")
            why = sentence("slurm.over", "job {job} is over", job=given.job)
            actions.release_claim(handle, ReleaseRequest(RELEASED, by, why))
    except (ClaimError, OSError) as error:
        if claim_of_job(directory, given):
            raise ClaimError(
                sentence(
                    "slurm.not_released", "the claim {id} cannot be released: {error}", id=claim.id, error=str(error)
                )
            ) from error
    deadline = time.monotonic() + END_SECONDS
    while claim_of_job(directory, given) and time.monotonic() < deadline:
        time.sleep(0.01)
    return claim
