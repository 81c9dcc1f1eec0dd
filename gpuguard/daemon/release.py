"""Releasing a claim from outside its job: which claim is meant, whether it is in use, and in which way it is released.

The `gpuguard run` of the job is asked first, because it sees best what its job does.  Where none listens (grab_gpus, a
wrapper that was killed) the locks are released from here; where the kernel forbids that, by the daemon.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpuguard.backends import Backend
from gpuguard.claims.daemon_client import exchange
from gpuguard.claims.directory import LockDirectory, is_same_file
from gpuguard.claims.ids import one_of
from gpuguard.claims.records import (
    ENDING,
    REFUSED,
    RELEASED,
    STOP,
    YIELD,
    ReleaseRequest,
    probe,
    read_record,
    read_records,
    read_requests,
    record_path,
    write_request,
)
from gpuguard.claims.unlock import NotPermitted, in_use, is_supervisor, lock_handle
from gpuguard.enforcement import actions, signals
from gpuguard.enforcement.identity import has_ended
from gpuguard.errors import ClaimError, GpuguardError
from gpuguard.files import open_in_place
from gpuguard.locale import _, translated
from gpuguard.locale.messages import sentence
from gpuguard.model import WHO_FIELDS, ClaimRecord, claim_named

ANSWER_SECONDS = 5.0  # `gpuguard run` looks at once when it is woken, and reads the driver before it answers
POLL_SECONDS = 0.02
REPORT_SECONDS = 5.0

BY_JOB = "by the gpuguard run of its job"
FROM_HERE = "from here"
BY_DAEMON = "by the daemon"
JOB_ENDED = "its job was ended"


def releasable_claim(directory: LockDirectory, beginning: str, uid: int) -> ClaimRecord:
    """Return the claim that *beginning* means: see claims.ids.

    Raises:
        ClaimError: it means none or several, or one that is not *uid*'s.
    """
    if claim := one_of(beginning, read_records(directory), uid):
        return claim
    raise ClaimError(
        sentence(
            "claim.none_begins",
            "no claim has an id that begins with {beginning}.  `gpuguard release` shows yours.",
            beginning=repr(beginning),
        )
    )


def current_uses(directory: LockDirectory, claims: Sequence[ClaimRecord], backend: Backend) -> list[str | None]:
    """Return for each claim which processes compute under it, in words, or why that cannot be seen, or None if none do.

    The driver and the locks are read once for all claims, because a user can have hundreds of records.
    """
    uuids = list(dict.fromkeys(uuid for claim in claims for uuid in claim.devices))
    fresh, held = backend.sample(WHO_FIELDS, uuids), probe(directory, uuids)
    return [in_use(claim_named(held, claim.uid, claim.id) or claim, fresh) for claim in claims]


def release(directory: LockDirectory, claim: ClaimRecord, request: ReleaseRequest, backend: Backend) -> str:
    """Release *claim* while its processes live on, unless one of them computes; return in which way.

    Raises:
        ClaimError: it is in use, or cannot be released from here.
        BackendError: the driver cannot be read.
    """
    if use := current_uses(directory, [claim], backend)[0]:
        raise ClaimError(
            _("the claim {id} is in use: {use}.  `--stop` ends its job first.").format(id=claim.id, use=translated(use))
        )
    with SupervisorChannel(directory, claim) as supervisor:
        answer = supervisor.send(replace(request, what=YIELD)) if supervisor else None
        if answer and answer.what == REFUSED:
            raise ClaimError(
                _("the claim {id} is in use: {why}.  `--stop` ends its job first.").format(
                    id=claim.id, why=translated(answer.why)
                )
            )
        if answer:
            return BY_JOB
    if read_record(directory, claim.uid, claim.id) is None:
        return JOB_ENDED
    try:
        with lock_handle(directory, claim) as locks:
            actions.release_claim(locks, replace(request, what=RELEASED))
        return FROM_HERE
    except OSError as error:
        raise ClaimError(
            _("the claim {id} cannot be released: {strerror}.  Try again.").format(id=claim.id, strerror=error.strerror)
        ) from error
    except NotPermitted as error:
        refusal = error
    try:
        exchange(directory, {"do": "release", "claim": claim.id, "uid": claim.uid, "reason": request.why})
    except GpuguardError as refused:
        raise ClaimError(
            _(
                "{refusal}  {refused}\nCall release() in the program itself, end it, or ask an administrator: "
                "`sudo gpuguard release {id}`."
            ).format(refusal=translated(str(refusal)), refused=translated(str(refused)), id=claim.id)
        ) from refused
    return BY_DAEMON


def stop(
    directory: LockDirectory, claim: ClaimRecord, request: ReleaseRequest, *, report: Callable[[str], object]
) -> str:
    """Have the job of *claim* ended by its `gpuguard run`, and wait for its end.

    Raises:
        ClaimError: no `gpuguard run` supervises it, or none does any more.
    """
    with SupervisorChannel(directory, claim) as supervisor:
        if supervisor is None:
            raise unsupervised(directory, claim)
        supervisor.stop_job(request)
        report(
            _("asked: the gpuguard run of the job (pid {pid}) ends it now, as its --grace says.").format(pid=claim.pid)
        )
        report_at = time.monotonic() + REPORT_SECONDS
        while True:
            is_left = supervisor.has_ended()
            if read_record(directory, claim.uid, claim.id) is None:
                return JOB_ENDED
            if is_left:
                raise unsupervised(directory, claim)
            if time.monotonic() >= report_at:
                report(_("it has not ended yet.  Ctrl-C ends this wait, not what was asked."))
                report_at = float("inf")
            time.sleep(5 * POLL_SECONDS)


def unsupervised(directory: LockDirectory, claim: ClaimRecord) -> ClaimError:
    """Return the error about a claim that no `gpuguard run` can end, with advice."""
    pids = " ".join(str(pid) for pid in _holders(directory, claim)) or _("the last of them")
    return ClaimError(
        _(
            "no gpuguard run supervises the claim {id} that could end its job.  End its processes yourself (`gpuguard "
            "who` shows them): the claim ends with {pids}."
        ).format(id=claim.id, pids=pids)
    )


class SupervisorChannel:
    """The `gpuguard run` of a claim.  As a context manager it yields itself, or None if no `gpuguard run` listens."""

    def __init__(self, directory: LockDirectory, claim: ClaimRecord) -> None:
        self._directory, self._claim = directory, claim
        self._record = self._pidfd = -1

    def __enter__(self) -> SupervisorChannel | None:
        pid = self._claim.pid
        if pid is None or pid not in _holders(self._directory, self._claim) or not is_supervisor(pid):
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
        """Return whether the supervisor has ended."""
        return has_ended(self._pidfd)

    def stop_job(self, request: ReleaseRequest) -> None:
        """Have the supervisor begin to end its job.

        Raises:
            ClaimError: it does not answer.
        """
        answer = self.send(replace(request, what=STOP))
        if answer is None or answer.what not in (ENDING, RELEASED):
            raise ClaimError(
                _("the gpuguard run of the claim {id} (pid {pid}) does not answer.  Try again.").format(
                    id=self._claim.id, pid=self._claim.pid
                )
            )

    def send(self, request: ReleaseRequest) -> ReleaseRequest | None:
        """Send *request* to the supervisor and return its answer, or None if it gives none in time."""
        path = record_path(self._directory, self._claim.uid, self._claim.id)
        try:
            asked = write_request(self._record, request)
        except OSError:
            return None
        signals.forward(self._pidfd, signals.CHECK_CLAIM)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            for answer in read_requests(self._record, asked):
                # A release is over only when the record is gone; others may request it at the same moment.
                is_over = answer.what == RELEASED and not is_same_file(self._record, path)
                if is_over or answer.what in (REFUSED, ENDING):
                    return answer
            time.sleep(POLL_SECONDS)
        return None


def _holders(directory: LockDirectory, claim: ClaimRecord) -> tuple[int, ...]:
    """Return the processes that really hold the locks of *claim*."""
    seen = claim_named(probe(directory, claim.devices), claim.uid, claim.id)
    return seen.holders if seen else ()
