"""How a claim is released by whoever may: which one is meant, whether somebody computes under it, and by which way.

The `gpuguard run` of the job is asked first, because it sees best what its job does.  Where none listens (grab_gpus in
a notebook, a wrapper that was killed) the locks are given up from here; where the kernel forbids that, the daemon is
asked.  Does not judge for policies: see vacancy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory, is_same_file
from gpuguard.claims.records import probe, read_record, read_records, record_path
from gpuguard.claims.release import NotPermitted, listens, lock_handle, users_of
from gpuguard.claims.release_requests import ENDING, REFUSED, RELEASED, STOP, YIELD, ReleaseRequest, read, write
from gpuguard.daemon.client import call_daemon
from gpuguard.enforcement import actions, signals
from gpuguard.enforcement.identity import has_ended
from gpuguard.errors import ClaimError, GpuguardError
from gpuguard.files import open_in_place
from gpuguard.model import WHO_FIELDS, ClaimRecord, GpuProcess, claim_named
from gpuguard.procfs import boot_clock, process_facts, start_time
from gpuguard.sanitize import neutral_command
from gpuguard.units import format_bytes, format_duration

ANSWER_SECONDS = 5.0  # a run looks at once when it is woken; it asks the driver before it answers
LOOK_SECONDS = 0.02
TELL_SECONDS = 5.0

COMMAND_CHARACTERS = 60

BY_JOB = "by the gpuguard run of its job"
FROM_HERE = "from here"
BY_DAEMON = "by the daemon"
JOB_ENDED = "its job was ended"


def own_claims(directory: LockDirectory, uid: int) -> list[ClaimRecord]:
    """The living claims of *uid*, oldest first; root's are everybody's."""
    return [claim for claim in read_records(directory) if uid in (0, claim.uid)]


def find(directory: LockDirectory, beginning: str, uid: int) -> ClaimRecord:
    """The one claim whose id begins like that, or that is "USER.ID", and which *uid* may release.

    Raises:
        ClaimError: there is none, there are several, or it is somebody else's.
    """
    claims = read_records(directory)
    named = [claim for claim in claims if beginning and claim.id.startswith(beginning)]
    # Anybody can make a record with the id of somebody else's claim: then only its owner tells them apart.
    named = [claim for claim in claims if f"{claim.user}.{claim.id}" == beginning] or named
    exact = [claim for claim in named if claim.id == beginning]
    mine = [claim for claim in exact or named if uid in (0, claim.uid)]
    if len(mine) > 1:
        ids = ", ".join(f"{claim.user}.{claim.id}" for claim in mine)
        raise ClaimError(f"{len(mine)} claims begin with {beginning!r}: {ids}.  Write one of these.")
    if mine:
        return mine[0]
    if named:
        raise ClaimError(f"the claim {named[0].id} is {named[0].user}'s: only {named[0].user} and root can release it.")
    raise ClaimError(f"no claim has an id that begins with {beginning!r}.  `gpuguard release` shows yours.")


def why_not(directory: LockDirectory, claim: ClaimRecord, backend: Backend) -> str | None:
    """Who computes under *claim*, in words, or why that cannot be seen; None when nobody does.

    Raises:
        BackendError: the driver cannot be read.
    """
    fresh = backend.sample(WHO_FIELDS, list(claim.devices))
    seen = claim_named(probe(directory, claim.devices), claim.uid, claim.id)
    snapshot = replace(fresh, claims=(seen,) if seen else ())
    users, unknown = users_of(seen or claim, snapshot, process_facts(snapshot))
    if unknown:
        return f"whether somebody computes cannot be seen: {unknown}"
    return ", ".join(map(_in_words, users)) or None


def release(directory: LockDirectory, claim: ClaimRecord, letter: ReleaseRequest, backend: Backend) -> str:
    """Have *claim* given up while its processes live on, unless one of them computes.

    Returns:
        In which way.

    Raises:
        ClaimError: somebody computes, or nobody here can do it.
        BackendError: the driver cannot be read.
    """
    if against := why_not(directory, claim, backend):
        raise ClaimError(f"the claim {claim.id} is in use: {against}.  `--stop` ends its job first.")
    with _Supervisor(directory, claim) as run:
        answer = run.ask(replace(letter, what=YIELD)) if run else None
        if answer and answer.what == REFUSED:
            raise ClaimError(f"the claim {claim.id} is in use: {answer.why}.  `--stop` ends its job first.")
        if answer:
            return BY_JOB
    if read_record(directory, claim.uid, claim.id) is None:
        return JOB_ENDED
    try:
        with lock_handle(directory, claim) as grip:
            actions.release_claim(grip, replace(letter, what=RELEASED))
        return FROM_HERE
    except NotPermitted as error:
        return _by_daemon(directory, claim, letter, error)
    except OSError as error:
        raise ClaimError(f"the claim {claim.id} cannot be released: {error.strerror}.  Try again.") from error


def stop(directory: LockDirectory, claim: ClaimRecord, letter: ReleaseRequest, *, say: Callable[[str], object]) -> str:
    """Have the job of *claim* ended by its `gpuguard run`, and wait for that.

    Raises:
        ClaimError: nobody supervises it, or nobody does any more.
    """
    with _Supervisor(directory, claim) as run:
        if run is None:
            raise _unsupervised(directory, claim)
        answer = run.ask(replace(letter, what=STOP))
        if answer is None or answer.what not in (ENDING, RELEASED):
            raise ClaimError(f"the gpuguard run of the claim {claim.id} (pid {claim.pid}) does not answer.  Try again.")
        say(f"asked: the gpuguard run of the job (pid {claim.pid}) ends it now, as its --grace says.")
        tell_at = time.monotonic() + TELL_SECONDS
        while True:
            alone = run.has_ended()
            if read_record(directory, claim.uid, claim.id) is None:
                return JOB_ENDED
            if alone:
                raise _unsupervised(directory, claim)
            if time.monotonic() >= tell_at:
                say("it has not ended yet.  Ctrl-C ends this wait, not what was asked.")
                tell_at = float("inf")
            time.sleep(5 * LOOK_SECONDS)


def _unsupervised(directory: LockDirectory, claim: ClaimRecord) -> ClaimError:
    pids = " ".join(str(pid) for pid in _holders(directory, claim)) or "of it"
    return ClaimError(
        f"no gpuguard run stands over the claim {claim.id} that could end its job.  "
        f"It ends with its processes: end {pids} yourself."
    )


class _Supervisor:
    """The `gpuguard run` of a claim, if one listens; None as a context manager if none does."""

    def __init__(self, directory: LockDirectory, claim: ClaimRecord) -> None:
        self._directory, self._claim = directory, claim
        self._record = self._pidfd = -1

    def __enter__(self) -> _Supervisor | None:
        pid = self._claim.pid
        if pid is None or pid not in _holders(self._directory, self._claim) or not listens(pid):
            return None
        path = record_path(self._directory, self._claim.uid, self._claim.id)
        try:
            self._pidfd = os.pidfd_open(pid)
            self._record = open_in_place(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            return None
        return self if os.fstat(self._record).st_uid == self._claim.uid else None

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._record, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)

    def has_ended(self) -> bool:
        return has_ended(self._pidfd)

    def ask(self, letter: ReleaseRequest) -> ReleaseRequest | None:
        """What it says to *letter*; None when it says nothing in time."""
        path = record_path(self._directory, self._claim.uid, self._claim.id)
        try:
            before = len(read(self._record))
            write(self._record, letter)
        except OSError:
            return None
        signals.forward(self._pidfd, signals.CHECK_CLAIM)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            for answer in read(self._record)[before + 1 :]:
                if answer.what != RELEASED or not is_same_file(self._record, path):
                    return answer  # a release is over when the record is gone
            time.sleep(LOOK_SECONDS)
        return None


def _holders(directory: LockDirectory, claim: ClaimRecord) -> tuple[int, ...]:
    """The processes that really hold its locks."""
    seen = claim_named(probe(directory, claim.devices), claim.uid, claim.id)
    return seen.holders if seen else ()


def _by_daemon(directory: LockDirectory, claim: ClaimRecord, letter: ReleaseRequest, error: NotPermitted) -> str:
    try:
        call_daemon(directory, {"do": "release", "claim": claim.id, "uid": claim.uid, "reason": letter.why})
    except GpuguardError as refused:
        raise ClaimError(
            f"{error}  {refused}\nCall release() in the program itself, end it, or ask an administrator: "
            f"`sudo gpuguard release {claim.id}`."
        ) from refused
    return BY_DAEMON


def _shortened(text: str) -> str:
    return text if len(text) <= COMMAND_CHARACTERS else f"{text[:COMMAND_CHARACTERS]}..."


def _in_words(process: GpuProcess) -> str:
    started = process.start_time if process.start_time is not None else start_time(process.pid)
    since = f" for {format_duration(round(boot_clock() - started))}" if started is not None else ""
    memory = f" with {format_bytes(process.memory_used)}" if process.memory_used is not None else ""
    command = f" ({_shortened(neutral_command(process.command, brief=True))})" if process.command else ""
    return f"pid {process.pid}{command} computes{since}{memory}"
