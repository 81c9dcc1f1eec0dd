"""Waiting for the end of something else before one stands in line: a claim, or a process of anybody.

Meanwhile a ticket says so to whoever looks at the line; nobody waits for it.  The kernel tells of the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from gpuguard.claims.lockfiles import LockDirectory
from gpuguard.claims.records import read_record, read_records, record_path
from gpuguard.claims.room import why_full
from gpuguard.errors import ClaimError, InvalidRequest, LockDirectoryError, passing
from gpuguard.line.order import Ticket
from gpuguard.line.tickets import Held, ticket_content
from gpuguard.line.wakeup import DirectoryWatch, wait_for
from gpuguard.model import ClaimRecord

LOOK_SECONDS = 30.0  # so often somebody who reads a log is told, and the claim looked at besides
POLL_SECONDS = 2.0  # so often without inotify
TELL_SECONDS = 1.0
CHECK_SECONDS = (0.02, 0.2, 2.0)  # after its file was closed: its lock is given up a moment later

_PID = re.compile(r"[1-9][0-9]{0,6}")


def wait_until_over(
    what: str,
    directory: LockDirectory,
    ticket: Ticket,
    tell: Callable[[str], object],
    environ: Mapping[str, str] = os.environ,
    has_ended: Callable[[str], bool] = lambda what: False,
) -> None:
    """Return when the claim or the process *what* has ended.

    Args:
        what: a pid; or the id of a claim, or the beginning of one.
        directory: of the claims.
        ticket: of whoever waits, for others to see.
        tell: told once in a while what is waited for.
        environ: says inside which claim this runs.
        has_ended: whether there was such a claim, of an id that no living one has.

    Raises:
        InvalidRequest: there is no such claim or process, or it cannot end before this process does.
        LockDirectoryError: no ticket can be written.
    """
    if not what:  # --after "$UNSET"
        raise InvalidRequest("--after is empty: name a claim or a process.")
    # The id of a claim has eight hexadecimal digits: one that looks like a pid is taken for a claim if there is one.
    found = [claim for claim in read_records(directory) if claim.id.startswith(what)]
    found = [claim for claim in found if claim.id == what] or found
    if not found and _PID.fullmatch(what):
        _until_process_ends(int(what), directory, ticket, tell)
        return
    if not found and has_ended(what):
        return
    if len(found) != 1:
        raise InvalidRequest(_which_one(what, found))
    own = environ.get("GPUGUARD_CLAIM", "")
    if own == found[0].id or own.startswith(f"{found[0].id}."):
        raise InvalidRequest(f"--after {what} is the claim that this runs in: it would wait for itself.")
    _until_claim_ends(found[0], directory, ticket, tell)


def _which_one(what: str, found: list[ClaimRecord]) -> str:
    if found:
        return f"--after {what} could be {', '.join(claim.id for claim in found)}: write more of it."
    advice = "`gpuguard who` shows the claims, `gpuguard queue` who waits, `gpuguard events` which claims have ended."
    return f"--after {what}: there is no such claim or process now, and no event of such a claim.\n{advice}"


def _until_process_ends(pid: int, directory: LockDirectory, ticket: Ticket, tell: Callable[[str], object]) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise InvalidRequest(_which_one(str(pid), [])) from None
    except OSError as error:
        raise InvalidRequest(
            f"--after {pid}: nobody can hear when that ends ({error.strerror}).  Name the process itself, or a claim."
        ) from None
    after = f"waits until process {pid} has ended"
    try:
        with _seen_to_wait(directory, replace(ticket, after=after)):
            tell(after)
            while not wait_for([process], _pause()):
                tell(after)
    finally:
        os.close(process)


def _until_claim_ends(
    claim: ClaimRecord, directory: LockDirectory, ticket: Ticket, tell: Callable[[str], object]
) -> None:
    after = f"waits until {claim.user}'s claim {claim.id} has ended"
    file = os.path.basename(record_path(directory, claim.uid, claim.id))
    checks: list[float] = []
    watch: DirectoryWatch | None = None
    with suppress(OSError):  # none left: then one looks now and then
        watch = DirectoryWatch(directory.records)
    try:
        with _seen_to_wait(directory, replace(ticket, after=after)):
            while _lives(directory, claim):
                tell(after)
                pause = checks.pop(0) if checks else _pause() if watch else min(POLL_SECONDS, _pause())
                wait_for([watch.descriptor] if watch else [], pause)
                if watch and not watch.names().isdisjoint({file, ""}):
                    checks = [*CHECK_SECONDS]
    finally:
        if watch:
            watch.close()


def _lives(directory: LockDirectory, claim: ClaimRecord) -> bool:
    try:
        return read_record(directory, claim.uid, claim.id) is not None
    except (OSError, ClaimError) as error:
        if not passing(error):
            raise
        return True  # as far as can be seen now


def _pause() -> float:
    return TELL_SECONDS if os.isatty(2) else LOOK_SECONDS


@contextmanager
def _seen_to_wait(directory: LockDirectory, ticket: Ticket) -> Iterator[None]:
    """A ticket for others to see."""
    try:
        held = Held(directory, ticket_content(ticket))
    except OSError as error:
        why = why_full(directory, error)
        raise LockDirectoryError(f"no ticket can be written into {directory.records}: {why}.") from error
    try:
        yield
    finally:
        held.leave()
