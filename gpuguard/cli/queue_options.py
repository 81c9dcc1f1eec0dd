"""The options about waiting in the queue, of run and wait, and what they do."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from typing import TYPE_CHECKING

from gpuguard.claims.probe import probe
from gpuguard.cli.options import add_choice_options, quantity, request_of
from gpuguard.cli.terminal import WaitProgress, print_notice
from gpuguard.enforcement import signals
from gpuguard.errors import InvalidRequest
from gpuguard.files import exists_in_place
from gpuguard.history.audit_log import devices_of
from gpuguard.lock import Allocator, go_on_waiting, pause_waiting
from gpuguard.queue.estimates import expected_seconds
from gpuguard.run import LEFT
from gpuguard.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

    from gpuguard.backends import Backend
    from gpuguard.claims.claim import Claim, JobDetails
    from gpuguard.claims.directory import LockDirectory
    from gpuguard.request import Request

_FOR_EVER = "for ever"  # --wait without a duration
MOST_ALTERNATIVES = 3  # as many as a ticket takes beside the first choice, see tickets.MOST_ALTERNATIVES
PRIORITY_NAMES = ("low", "normal", "high")  # line.order.PRIORITIES, not imported for a job that need not wait


def add_queue_options(parser: argparse.ArgumentParser) -> None:
    """--wait, --no-wait, --or, --after, --priority."""
    group = parser.add_argument_group("waiting for them")
    waiting = group.add_mutually_exclusive_group()
    waiting.add_argument(
        "--wait",
        metavar="DURATION",
        nargs="?",
        const=_FOR_EVER,
        help="wait in line at most so long, as in 30m (default: without end)",
    )
    waiting.add_argument("--no-wait", action="store_true", help="exit 75 when there are not enough GPUs now")
    group.add_argument(
        "--or",
        dest="alternatives",
        metavar="OPTIONS",
        action="append",
        default=[],
        help="what will do as well, instead of all options above, as in --or '-n 1 --min-free 40GiB' (repeatable)",
    )
    group.add_argument("--after", metavar="CLAIM|PID", help="not before that claim or process has ended")
    group.add_argument(
        "--priority", choices=PRIORITY_NAMES, default="normal", help="class in line; a site bounds it (default: normal)"
    )


def wait_of(args: argparse.Namespace) -> float | None:
    """Seconds to wait at most; None is for ever."""
    if args.no_wait:
        return 0.0
    try:
        return None if args.wait == _FOR_EVER else quantity("--wait", args.wait, parse_duration)
    except InvalidRequest as fault:
        raise InvalidRequest(f"{fault}\nWithout a duration, write `--` behind it: `--wait -- CMD`.") from None


def alternatives_of(args: argparse.Namespace) -> list[Request]:
    """The requests of --or.

    Raises:
        InvalidRequest: one cannot be understood, or there are too many.
    """
    if len(args.alternatives) > MOST_ALTERNATIVES:
        raise InvalidRequest(f"--or can be given {MOST_ALTERNATIVES} times: leave out what you like least.")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_choice_options(parser)
    requests = []
    for text in args.alternatives:
        try:
            parsed, unknown = parser.parse_known_args(shlex.split(text))
            if unknown or not text.strip():
                raise InvalidRequest(f"{unknown[0] if unknown else 'nothing'} is no option that says which GPUs")
            requests.append(request_of(parsed))
        except (argparse.ArgumentError, ValueError) as fault:
            reason = str(fault).removeprefix("argument ").rstrip(".")
            raise InvalidRequest(f"--or {text!r}: {reason}.\nWrite options that say which GPUs: --or '-n 1'.") from None
    return requests


def priority_of(args: argparse.Namespace) -> int:
    """-1, 0 or 1, after a notice where the site permits less."""
    wanted = PRIORITY_NAMES.index(args.priority) - 1
    if wanted <= 0:
        return wanted
    from gpuguard.queue.settings import read_queue_settings  # 20 ms, for who wants more than others

    rules = read_queue_settings().rules
    highest = rules.highest_of.get(os.geteuid(), rules.highest)
    if highest < wanted:
        print_notice(f"--priority {args.priority} is not yours at this site: {PRIORITY_NAMES[highest + 1]} it is.")
    return min(wanted, highest)


def expectation_of(command: Sequence[str]) -> Callable[[], float | None]:
    """A function that estimates how many seconds the job will take, by what this user's jobs took before."""
    return lambda: expected_seconds(command)


def wait_for_claim(
    args: argparse.Namespace,
    backend: Backend,
    directory: LockDirectory,
    requests: Sequence[Request],
    job: JobDetails,
    seconds: float | None,
) -> Claim:
    """The devices, after a wait in the queue that reports what is missing; Ctrl-C ends this process."""
    progress = WaitProgress(args.quiet)
    former = _stand_aside_when_stopped(progress)
    try:
        if args.after is not None:
            _wait_until_over(args, directory, requests, job)
        return Allocator(backend, directory, requests, job=job, on_wait=progress.missing).acquire(seconds)
    except KeyboardInterrupt:
        progress.done()
        signals.die_of(signal.SIGINT)  # or else the loop of a shell script would go on
    finally:
        signal.signal(signal.SIGTSTP, former)
        progress.done()


def _wait_until_over(
    args: argparse.Namespace, directory: LockDirectory, requests: Sequence[Request], job: JobDetails
) -> None:
    """Wait for the end of what --after names."""
    from gpuguard.queue.tickets import new_ticket  # 60 ms, for --after alone
    from gpuguard.queue.waiter import wait_until_over

    ticket = new_ticket(requests, time_limit=job.time_limit, priority=job.priority, note=job.note, command=job.command)
    progress = WaitProgress(args.quiet)

    def has_ended(claim: str) -> bool:
        if not _has_ended(claim, directory):
            return False
        if not args.quiet:
            print_notice(f"the claim {claim} has ended already: nothing to wait for.")
        return True

    try:
        wait_until_over(args.after, directory, ticket, progress.report, has_ended=has_ended)
    finally:
        progress.done()


def _has_ended(claim: str, directory: LockDirectory) -> bool:
    """Whether there was a claim with that id, by all events that this user may read, and it has ended."""
    from gpuguard.cli.events import read_events  # for --after alone

    lines = [line for line in read_events() if line.get("claim") == claim]
    if any(line.get("kind") == "release" and line.get("outcome") != LEFT for line in lines):
        return True
    # A process that was killed wrote no event of its end.  The devices show a claim of another host whose log this is,
    # too (NFS), and a lock without a record may be that of the claim.
    uuids = {uuid for line in lines for uuid in devices_of(line)}
    here = bool(uuids) and all(exists_in_place(directory.lock_path(uuid)) for uuid in uuids)
    return here and all(held.since is not None for held in probe(directory, uuids))


def _stand_aside_when_stopped(progress: WaitProgress) -> Any:
    """From now on Ctrl-Z lets other processes lead the queue, and says so, before it stops this one as it always does.

    Returns:
        What handled SIGTSTP before, for signal.signal().
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        if pause_waiting():
            progress.stopped()
        signals.stop_self(signum)
        go_on_waiting()

    former = signal.getsignal(signal.SIGTSTP)
    if former is signal.SIG_DFL:  # else a shell without job control ignores it
        signal.signal(signal.SIGTSTP, stop)
    return former
