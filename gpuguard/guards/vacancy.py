"""Whether a policy may release somebody's claim now: every check, on facts read afresh, as before a signal.

Nobody computes under it, by a second look that the driver answers after the files of the claim were borrowed; what
cannot be seen counts as somebody.  Gives nothing up: see actions and releasing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from dataclasses import replace as changed

from gpuguard.ancestry import look_up
from gpuguard.backends.processes import start_time
from gpuguard.claims.records import probe, read_record
from gpuguard.claims.releasing import Grip, NotPermitted, gripped, users_of
from gpuguard.clusters import slurm_jobs
from gpuguard.errors import BackendError, ClaimError
from gpuguard.guards import identity
from gpuguard.guards.case import INTERVALS, Context, boot_clock, enforced
from gpuguard.guards.ledger import Against, Deed
from gpuguard.model import WHO_FIELDS, ClaimRecord, Snapshot, Verdict, claim_named
from gpuguard.request import idle_limit
from gpuguard.units import format_duration

_FORBIDDEN = "the kernel does not lend its open files: the daemon's unit must permit pidfd_getfd, see docs/daemon.md"


@dataclass(frozen=True)
class Vacancy:
    """A claim that is meant, and what speaks against releasing it."""

    verdict: Verdict
    live: bool
    claim: ClaimRecord | None = None
    grip: Grip | None = None
    holder: tuple[int, float] = (0, 0.0)  # pid, start time of the process that lent its files
    clock: float = field(default_factory=boot_clock)
    against: tuple[Against, ...] = ()

    def deed(self) -> Deed:
        """What is about to be done, for the ledger."""
        devices, uid = (self.claim.devices, self.claim.uid) if self.claim else ((), None)
        return Deed(self.clock, self.verdict.action, self.holder, devices, self.live, uid=uid)


@contextmanager
def examined(verdict: Verdict, snapshot: Snapshot, context: Context) -> Iterator[Vacancy]:
    """The claim of *verdict* with its files borrowed, and everything that speaks against releasing it."""
    case = Vacancy(verdict, enforced(verdict, context))
    claim = _claim(verdict, snapshot, context)
    if isinstance(claim, Against):
        yield replace(case, against=(claim,))
        return
    case = replace(case, claim=claim)
    against = [each for each in (_fresh(case, snapshot, context), _protected(case, context)) if each]
    if against or context.directory is None:
        yield replace(case, against=tuple(against))
        return
    with ExitStack() as stack:
        try:
            grip = stack.enter_context(gripped(context.directory, claim))
            again = context.backend.sample(WHO_FIELDS, list(claim.devices))
        except NotPermitted:
            yield replace(case, against=(Against("files", _FORBIDDEN),))
            return
        except (ClaimError, OSError) as error:
            yield replace(case, against=(Against("files", str(error)),))
            return
        except BackendError as error:
            yield replace(case, against=(Against("unused", f"the driver cannot be asked again: {error}"),))
            return
        holder = (grip.holder, start_time(grip.holder) or 0.0)
        case = replace(case, grip=grip, holder=holder, clock=boot_clock())
        yield replace(case, against=tuple(_said(case, snapshot, again, context)))


def _claim(verdict: Verdict, snapshot: Snapshot, context: Context) -> ClaimRecord | Against:
    """The claim that is meant, with what it really holds: its record may name whatever devices it likes."""
    subject = verdict.finding.subject
    if subject.claim is None or subject.uid is None or subject.uid < 0 or "/" in subject.claim:
        return Against("claim", "no claim is meant")
    if verdict.finding.processes:
        return Against("claim", "processes use it: they are ended by `terminate`")
    if context.directory is None:
        return Against("claim", "there is no directory of claims")
    meant = subject.uid, subject.claim
    claim = read_record(context.directory, *meant)
    if claim is None and context.directory.keeper is not None:  # the daemon knows to whom it gave a lock
        claim = claim_named(snapshot.claims, *meant)
    held = probe(context.directory, claim.devices) if claim else ()
    return claim_named(held, *meant) or Against("claim", "it has ended")


def _said(case: Vacancy, snapshot: Snapshot, again: Snapshot, context: Context) -> Iterator[Against]:
    assert case.claim and case.grip and context.directory
    claims = probe(context.directory, case.claim.devices)
    claim = claim_named(claims, case.claim.uid, case.claim.id)
    if claim is None or set(claim.devices) != set(case.claim.devices):
        yield Against("claim", "it does not hold what it held just now")
        return
    if again.clock < snapshot.clock:
        yield Against("unused", "the driver gave no newer list")
    again = changed(again, claims=claims)
    users, unknown = users_of(claim, again, look_up(again))
    if unknown:
        yield Against("unused", unknown)
    elif users:
        yield Against("unused", f"pid {users[0].pid} computes under it")
    elif any(each.memory_used is None or each.memory_used > idle_limit(each) for each in again.devices):
        yield Against("unused", "memory is in use, though nobody is listed")
    if case.verdict.action == "cancel":
        why = slurm_jobs.against_cancelling(slurm_jobs.job_of_claim(claim.id), claim.uid)
        yield from (Against("slurm", why),) if why else ()
    own = os.getpid()
    if case.grip.holder == own or case.grip.holder in identity.ancestors(own):
        yield Against("family", "gpuguard itself stands on it")
    if not context.still_true(case.verdict, snapshot.updated(again)):
        yield Against("rule", "the condition does not hold any more")
    yield from context.ledger.against(
        case.verdict.action,
        case.holder,
        claim.devices,
        uid=claim.uid,
        clock=case.clock,
        live=case.live,
        signature="",
        effect_seen=lambda deed: True,
    )


def _fresh(case: Vacancy, snapshot: Snapshot, context: Context) -> Against | None:
    age = case.clock - snapshot.clock
    if 0 <= age <= INTERVALS * context.interval:
        return None
    return Against("fresh", f"the sample is {format_duration(abs(age))} {'old' if age > 0 else 'from the future'}")


def _protected(case: Vacancy, context: Context) -> Against | None:
    assert case.claim
    uid = case.claim.uid
    if identity.is_of_the_system(uid):
        return Against("protected", f"uid {uid} is the system's")
    return Against("protected", f"uid {uid} is protected") if uid in context.protected else None
