"""Claim GPUs, run a command on them, and give them back when it ends.

gpuguard run -n 2 -- python train.py             two free GPUs; waits until there are two
gpuguard run --min-free 20GiB --no-wait -- ...   one with 20 GiB free, or exit 75 at once
gpuguard run --time-limit 4h -- ...              SIGTERM after four hours, SIGKILL a --grace later, exit 124
gpuguard run --time-limit 4h --checkpoint-signal USR1 --grace 5m -- ...   and SIGUSR1 five minutes before

The command sees only its GPUs (CUDA_VISIBLE_DEVICES).  The claim lasts as long as any process of the job (--leftover),
however gpuguard itself ends.  Exit codes: the command's own; 128+N when signal N ended it; 124 the wait or the
time limit ran out, or it ended with 0 at another limit; 125 wrong usage, gpuguard failed, or the request can never be
met; 126 not executable; 127 not found, at once but with --after; 75 not now.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuguard.backends import Backend, default_backend, parts_of
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import LockDirectory, existing_locks
from gpuguard.claims.records import probe
from gpuguard.cli import options
from gpuguard.cli.job_log import JobLog, JobReport, WaitProgress
from gpuguard.cli.terminal import print_notice, unread, write_rest
from gpuguard.device_state import device_title
from gpuguard.enforcement import signals
from gpuguard.errors import GpuguardError, InvalidRequest, WaitTimeout
from gpuguard.history.audit_log import devices_of
from gpuguard.jobs.processes import become_subreaper, exec_fault, failure
from gpuguard.locale import _, translated
from gpuguard.locale.messages import sentence
from gpuguard.lock import Allocator, waits_in_queue
from gpuguard.model import ClaimRecord, EndCause
from gpuguard.procfs import in_first_pid_namespace
from gpuguard.queue.estimates import expected_seconds
from gpuguard.run import END_LEFTOVERS, GRACE_SECONDS, JobEnd, JobSettings, exec_command, log_claim, run
from gpuguard.select import instances_note
from gpuguard.units import format_bytes, parse_celsius, parse_duration, parse_leftover, parse_memory_amount
from gpuguard.users import user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from gpuguard.jobs.isolation import Isolation
    from gpuguard.jobs.limits import JobLimits
    from gpuguard.notify.targets import Target
    from gpuguard.policies.policy import Policy
    from gpuguard.request import Request

# Real pairs of jobs whose utilizations add up to at most 50 % run at 0.998 of the speed that each job has alone; pairs
# above 90 % run at 0.82, the worst of them at 0.51 (Lucid).
_BUSY_TO_SHARE = 50.0
_FOR_EVER = "for ever"  # --wait without a duration
MOST_ALTERNATIVES = 3  # as many as a ticket takes besides the first choice, see tickets.MOST_ALTERNATIVES
PRIORITY_NAMES = ("low", "normal", "high")  # queue.priority.PRIORITIES, which a job that need not wait does not import


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuguard run [options] [--] CMD [ARG ...]"
    options.add_choice_options(parser)
    add_queue_options(parser)
    group = parser.add_argument_group("the job")
    group.add_argument("--note", metavar="TEXT", help="what the claim is for; everybody can read it in `gpuguard who`")
    group.add_argument(
        "--visible",
        choices=("index", "uuid"),
        default="index",
        help="what CUDA_VISIBLE_DEVICES names GPUs of NVIDIA by (default: index, because uuids break vLLM and others)",
    )
    options.add_table(
        group,
        (
            "--isolate",
            None,
            "other GPUs do not exist for the command: no device node of theirs can be opened.  For ordinary users "
            "with bubblewrap, for root with a device filter; refused where that cannot be had.  See docs/isolation.md",
        ),
        (
            "--leftover",
            "HOW",
            "processes of the job that outlive it without using a GPU keep the claim: keep (the default), release, "
            "for so long, as in 10m (those that use a GPU always keep it), or end: they are ended with it",
        ),
        ("--exec", None, "become the command instead of watching over it: no summary"),
        ("--quiet", None, "say only what goes wrong"),
        (
            "--log-file",
            "FILE",
            "add lines with their time to it: queued, started, what goes wrong, ended; off a terminal stderr has them",
        ),
    )
    notify = f"when the job starts, ends or fails, tell your terminals ({options.TERMINAL}), {options.TARGETS_IN_WORDS}"
    options.add_repeatable(group, ("--notify", "WHERE", f"{notify} (repeatable)"))
    add_limit_options(parser)
    options.add_source_options(parser)
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="what to run, with its arguments")


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "limits of the job",
        "A job that reaches one is ended: SIGTERM, and SIGKILL to all of it a --grace later.  If it then ends\n"
        "with 0, the exit code is 124.  Only its own processes count, and no others are ever touched; if others\n"
        "compute on its GPUs, you are told.",
    )
    options.add_table(
        group,
        ("--time-limit", "DURATION", "it has run for so long, as in 4h; exit 124"),
        (
            "--memory-limit",
            "SIZE",
            "its processes together use more of one GPU in three samples in a row (5 s), as in 30GiB, 80%% or share",
        ),
        ("--temperature-limit", "CELSIUS", "a GPU that it uses was hotter for 30 s, as in 85C"),
        ("--idle-limit", "DURATION", "all its GPUs rested (utilization at most 5%%) for so long, as in 1h"),
        (
            "--checkpoint-signal",
            "SIGNAL",
            "to the command first, as in USR1, so that it can save its state: a --grace before the time limit, and "
            "at any other limit at once; SIGTERM follows a --grace later",
        ),
        ("--grace", "DURATION", f"between these signals (default: {GRACE_SECONDS:.0f}s)"),
    )


@dataclass(frozen=True, kw_only=True)
class ParsedRun:
    """What the options of `run` say, checked as far as that is possible without the GPUs."""

    args: argparse.Namespace
    command: list[str]
    requests: tuple[Request, ...]  # the preferred one first
    wait: float | None  # seconds to wait in the queue at most
    time_limit: float | None
    grace: float
    policies: tuple[Policy, ...]
    checkpoint: int | None
    leftover: float | None
    targets: list[str | Target]


def parsed(args: argparse.Namespace) -> ParsedRun:
    """Return what the options say.  Raises InvalidRequest."""
    wait, time_limit, grace = durations_of(args)  # first: --wait may have taken the command for its value
    command = command_of(args)
    targets = [target for where in args.notify if (target := options.message_target(where)) is not None]
    policies, checkpoint = limits_of(args, time_limit)
    return ParsedRun(
        args=args,
        command=command,
        requests=(options.request_of(args), *alternatives_of(args)),
        wait=wait,
        time_limit=time_limit,
        grace=grace,
        policies=policies,
        checkpoint=checkpoint,
        leftover=END_LEFTOVERS
        if args.leftover == "end"
        else options.quantity("--leftover", args.leftover, parse_leftover),
        targets=targets,
    )


def main(args: argparse.Namespace) -> int:
    job = parsed(args)
    log = JobLog(quiet=args.quiet, path=args.log_file)
    report = JobReport(log, job.targets, job.command)
    # A missing program is reported before hours in the queue, not after them.  But with --after the program may be made
    # by the job that this one waits for.
    if args.after is None and (fault := exec_fault(job.command[0])):
        status, message = failure(job.command[0], fault)
        log.warn(message)
        report.not_started(message)
        return status
    set_environment(args)
    directory = options.directory_of(args, make=True)
    backend = options.backend_of(args)
    if not args.exec:
        become_subreaper()
    if args.isolate:
        from gpuguard.jobs import isolation as isolations  # for --isolate alone

        isolations.check(backend)
    expected = partial(expected_seconds, job.command)
    details = JobDetails(args.note, job.command, job.time_limit, expected, priority_of(args))
    began = time.monotonic()
    try:
        claim = wait_for_claim(args, backend, directory, job.requests, details, job.wait, log)
    except GpuguardError as error:
        text = translated(str(error))
        log.only_in_file(_("not started: {error}").format(error=text))
        report.not_started(text)
        raise
    return run_on(claim, job, backend, directory, report, waited=time.monotonic() - began)


def run_on(
    claim: Claim,
    job: ParsedRun,
    backend: Backend,
    directory: LockDirectory,
    report: JobReport,
    *,
    waited: float,
    on_end: Callable[[int, str | None, EndCause | None], None] = lambda status, why, cause: None,
) -> int:
    """Run the command on the devices of *claim*, which belongs to this function from now on; return the exit code.

    *waited* is in seconds.  *on_end*: see JobSettings.
    """
    args, log = job.args, report.log
    if claim.warning:
        log.warn(claim.warning)
    for note in () if args.quiet else _notes_on(claim, job.requests[0]):
        log.warn(note)
    lift = _kept_by_kernel(claim, backend, log)
    # There is no `with` here, so that the job keeps the claim if something goes wrong from here on while it runs.
    try:
        isolation = _isolated(claim, backend, directory, visible=args.visible) if args.isolate else None
    except GpuguardError:
        lift()
        claim.release()
        raise
    several = len(parts_of(backend.name)) > 1
    report.started(claim, waited, simulated=backend.simulated, several_vendors=several)
    if args.exec:
        status, message = exec_command(job.command, claim, backend, visible=args.visible, isolation=isolation)
        lift()
        log.warn(message)
        return status
    is_limited = job.policies or args.share
    settings = JobSettings(
        visible=args.visible,
        time_limit=job.time_limit,
        grace=job.grace,
        checkpoint=job.checkpoint,
        limits=_limits_for(job.policies, claim, job.requests[0], backend, log) if is_limited else None,
        tolerance=job.requests[0].tolerance,
        isolation=isolation,
        leftover=job.leftover,
        directory=directory,
        on_end=on_end,
    )

    def later() -> None:
        report.send_start()
        _preload_for_job(claim, job.command)

    ended = run(job.command, claim, backend, settings, later=later, notify=log.warn)
    lift()
    return _end_like(ended, claim, backend, report)


def _end_like(ended: JobEnd, claim: Claim, backend: Backend, report: JobReport) -> int:
    """Report how the job has ended, and return its exit code, or die of the same signal."""
    if ended.outcome == "could not be started":
        report.not_started(translated(str(ended.why)), ended)
    else:
        report.ended(claim, ended)
    backend.close()
    if unread:
        write_rest()
    if ended.die_of is not None:
        signals.die_of(ended.die_of)
    return ended.status


def _isolated(claim: Claim, backend: Backend, directory: LockDirectory, *, visible: str) -> Isolation:
    from gpuguard.jobs import isolation  # for --isolate alone

    return isolation.isolate(claim, backend, directory, visible=visible)


def _kept_by_kernel(claim: Claim, backend: Backend, log: JobLog) -> Callable[[], object]:
    """Let the kernel keep a job to its share, where it does that; return what to call when the job has ended."""
    if claim.memory is None or backend.simulated:
        return lambda: None
    from gpuguard.jobs.kernel_share import keep_share  # only for a job with a share

    lift = keep_share(claim, backend)
    if lift is None:
        return lambda: None
    text = _("the kernel keeps it to {size} of each GPU").format(size=format_bytes(claim.memory))
    log.say(text, text)
    return lift


def durations_of(args: argparse.Namespace) -> tuple[float | None, float | None, float]:
    """Return three durations in seconds: the longest wait for devices, the time limit of the job, and its grace.

    The first is None if the wait may last for ever, the second None if the job has no time limit.
    """
    wait = wait_of(args)
    time_limit = options.quantity("--time-limit", args.time_limit, parse_duration)
    grace = options.quantity("--grace", args.grace, parse_duration)
    if time_limit == 0:
        raise InvalidRequest(_("--time-limit 0s leaves the job no time: leave the option out for no limit."))
    if args.exec and time_limit is not None:
        raise InvalidRequest(_("--time-limit needs a supervisor: drop --exec, or use `timeout 4h CMD`."))
    return wait, time_limit, GRACE_SECONDS if grace is None else grace


def limits_of(args: argparse.Namespace, time_limit: float | None) -> tuple[tuple[Policy, ...], int | None]:
    """Return the limits other than the time limit, and the checkpoint signal, which comes first, or None."""
    policies: tuple[Policy, ...] = ()
    checkpoint = None
    if (args.memory_limit, args.temperature_limit, args.idle_limit) != (None, None, None):
        # The rules of the guard take over 10 ms to load.
        from gpuguard.jobs.limits import policies_of

        if args.memory_limit == "share" and not args.share:
            raise InvalidRequest(
                _("--memory-limit share is for a job that shares its GPUs: add --share --memory SIZE.")
            )
        text = args.memory if args.memory_limit == "share" else args.memory_limit
        memory = options.quantity("--memory-limit", text, parse_memory_amount)
        temperature = options.quantity("--temperature-limit", args.temperature_limit, parse_celsius)
        policies = policies_of(memory, temperature, options.quantity("--idle-limit", args.idle_limit, parse_duration))
    if args.checkpoint_signal is not None:
        from gpuguard.enforcement.actions import parse_checkpoint_signal

        checkpoint = options.quantity("--checkpoint-signal", args.checkpoint_signal, parse_checkpoint_signal)
        if not policies and time_limit is None:
            raise InvalidRequest(
                _("--checkpoint-signal is sent when a limit is reached: add one, as in --time-limit 4h.")
            )
    if args.exec:
        for option, value in (("a limit", policies), ("--leftover", args.leftover), ("--notify", args.notify)):
            if value:
                raise InvalidRequest(_("{option} needs a supervisor: drop --exec.").format(option=option))
    return policies, checkpoint


def set_environment(args: argparse.Namespace) -> None:
    """Make gpuguard inside the job use the same machine and the same claims, whatever directory it is called in."""
    if args.backend != default_backend():
        os.environ["GPUGUARD_BACKEND"] = absolute_backend(args.backend)
    if args.dir:
        os.environ["GPUGUARD_DIR"] = os.path.abspath(args.dir)


def absolute_backend(name: str) -> str:
    """Return the name of a backend so that it means the same in every directory."""
    named = [part.partition(":") for part in parts_of(name)]
    return ",".join(kind + colon + (os.path.abspath(path) if path else "") for kind, colon, path in named)


def _notes_on(claim: Claim, request: Request) -> Iterator[str]:
    """Yield what the user should know about the devices of a job, although it does not keep the job from starting."""
    if note := instances_note(claim.devices, request):
        yield note
    for device in claim if request.share else ():
        if device.utilization is not None and device.utilization > _BUSY_TO_SHARE:
            yield (
                _(
                    "{device_title} is {utilization:.0f}% busy, so its jobs slow each other down: --max-util "
                    "{busy_to_share:.0f}% waits for one that is less busy."
                ).format(
                    device_title=translated(device_title(device)),
                    utilization=device.utilization,
                    busy_to_share=_BUSY_TO_SHARE,
                )
            )


def _limits_for(
    policies: tuple[Policy, ...], claim: Claim, request: Request, backend: Backend, log: JobLog
) -> JobLimits:
    """Return the limits by which run() judges the job, after a notice about those that it cannot judge here."""
    from gpuguard.jobs.limits import JobLimits, share_policy, used_before  # for jobs with limits alone

    if claim.memory is not None:
        policies = (*policies, share_policy(claim.memory))
    uid, uuids = os.getuid(), tuple(device.uuid for device in claim)
    record = ClaimRecord(claim.id, uid, user_name(uid), uuids, memory=claim.memory)
    is_nested = "." in claim.id  # if so, the outer job also uses the devices
    alone = not (is_nested or request.share or request.max_processes or request.mine_as_free)
    pids_known = backend.simulated or in_first_pid_namespace() is not False
    limits = JobLimits(policies, record, used_before(claim) if alone else {}, pids_known)
    for text in limits.caveats(claim):
        log.warn(text)
    return limits


def _preload_for_job(claim: Claim, command: Sequence[str]) -> None:
    """Import what a job of days may still need, before gpuguard is upgraded under it, and write its expected end."""
    # An import fails if gpuguard was upgraded while this process waited.
    with suppress(ImportError):
        from gpuguard.claims import unlock  # noqa: F401

        write_expected_end(claim, command)


def write_expected_end(claim: Claim, command: Sequence[str]) -> None:
    """Write into the record of the claim when the job should end, for the requests that wait for it."""
    seconds = expected_seconds(command)
    if seconds is not None and claim.since is not None:
        claim.expect_end(claim.since + seconds)


def command_of(args: argparse.Namespace) -> list[str]:
    """Return the command line of the job, without the ``--`` before it."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise InvalidRequest(_("a command to run is missing, as in `-n 2 -- python train.py`."))
    if words[0].startswith("-") and words is args.command:
        raise InvalidRequest(
            _("there is no option {words}.  Write `--` before a command that begins with a dash.").format(
                words=words[0]
            )
        )
    return list(words)


# The options of `run` and `wait` that are about waiting in the queue, and what they do.


def add_queue_options(parser: argparse.ArgumentParser, not_now: int = 75) -> None:
    """Add --wait, --no-wait, --or, --after and --priority.  *not_now* is the command's exit code after --no-wait."""
    group = parser.add_argument_group("waiting for them")
    options.add_table(
        group.add_mutually_exclusive_group(),
        (
            "--wait",
            "DURATION",
            "wait in the queue at most so long, as in 30m (default: without end)",
            {"nargs": "?", "const": _FOR_EVER},
        ),
        ("--no-wait", None, f"exit {not_now} when there are not enough GPUs now"),
    )
    options.add_table(
        group,
        (
            "--or",
            "OPTIONS",
            "what will do as well, instead of all options above, as in --or '-n 1 --min-free 40GiB' (repeatable)",
            {"action": "append", "default": [], "dest": "alternatives"},
        ),
        ("--after", "CLAIM|PID", "not before that claim or process has ended: --wait and --no-wait count from then"),
    )
    group.add_argument(
        "--priority",
        choices=PRIORITY_NAMES,
        default="normal",
        help="class in the queue; a site bounds it (default: normal)",
    )


def wait_of(args: argparse.Namespace) -> float | None:
    """Return how many seconds to wait at most, or None to wait for ever."""
    if args.no_wait:
        return 0.0
    try:
        return None if args.wait == _FOR_EVER else options.quantity("--wait", args.wait, parse_duration)
    except InvalidRequest as fault:
        raise InvalidRequest(
            _("{fault}\nWithout a duration, write `--` behind it: `--wait -- CMD`.").format(fault=fault)
        ) from None


def alternatives_of(args: argparse.Namespace) -> list[Request]:
    """Return the requests of --or.

    Raises:
        InvalidRequest: one of them cannot be understood, or there are too many.
    """
    if len(args.alternatives) > MOST_ALTERNATIVES:
        raise InvalidRequest(
            _("--or can be given {most_alternatives} times: leave out what you like least.").format(
                most_alternatives=MOST_ALTERNATIVES
            )
        )
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_choice_options(parser)
    requests = []
    for text in args.alternatives:
        try:
            parsed, unknown = parser.parse_known_args(shlex.split(text))
            if unknown or not text.strip():
                raise InvalidRequest(
                    _("{unknown} is no option that says which GPUs").format(
                        unknown=unknown[0] if unknown else "nothing"
                    )
                )
            requests.append(options.request_of(parsed))
        except (argparse.ArgumentError, ValueError) as fault:
            reason = str(fault).removeprefix("argument ").rstrip(".")
            raise InvalidRequest(
                _("--or {text!r}: {reason}.\nWrite options that say which GPUs: --or '-n 1'.").format(
                    text=text, reason=reason
                )
            ) from None
    return requests


def priority_of(args: argparse.Namespace) -> int:
    """Return -1, 0 or 1, after a notice if the site permits less than the user asked for."""
    wanted = PRIORITY_NAMES.index(args.priority) - 1
    if wanted <= 0:
        return wanted
    from gpuguard.queue.settings import read_queue_settings  # 20 ms, for users who want more than others

    highest = read_queue_settings(options.directory_of(args)).rules.highest(os.geteuid())
    if highest < wanted:
        print_notice(
            _("--priority {priority} is not yours at this site: {priority_names} it is.").format(
                priority=args.priority, priority_names=PRIORITY_NAMES[highest + 1]
            )
        )
    return min(wanted, highest)


def wait_for_claim(
    args: argparse.Namespace,
    backend: Backend,
    directory: LockDirectory,
    requests: Sequence[Request],
    job: JobDetails,
    seconds: float | None,
    log: JobLog | None = None,
) -> Claim:
    """Return the claim after a wait in the queue that reports what is missing.  Ctrl-C and SIGTERM end this process."""
    progress = WaitProgress(args.quiet, log)
    former = _say_so_when_stopped(progress)
    ends_at_once = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ends_at_once:  # its ticket and its worker must end with it
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        if args.after is not None:
            backend.close()  # what it waits for may take days
            _wait_until_over(args, directory, requests, job, log)
        return Allocator(backend, directory, requests, job=job, on_wait=progress.missing).acquire(seconds)
    except WaitTimeout as error:
        _log_withdrawn(job, sentence("queue.time_is_over", "the time to wait is over"))
        raise progress.without_what_was_told(error) from None
    except KeyboardInterrupt as interrupt:
        progress.done()
        signum = signal.Signals(*interrupt.args or (signal.SIGINT,))
        _log_withdrawn(job, signum.name)
        if log:  # a user who pressed Ctrl-C knows already
            tell = log.only_in_file if signum == signal.SIGINT else log.warn
            tell(_("not started: {signal} came while it waited.").format(signal=signum.name))
        signals.die_of(signum)  # otherwise the loop of a shell script would go on
    finally:
        if ends_at_once:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGTSTP, former)
        progress.done()


def _log_withdrawn(job: JobDetails, why: str) -> None:
    """Write into the audit log that a request waits no longer, although it has not started."""
    command = shlex.join(job.command)[:1000]
    message = sentence("queue.gave_up", "{why}: {command}", why=why, command=command) if command else why
    log_claim("queue", "withdrawn", None, message)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signum)


def _wait_until_over(
    args: argparse.Namespace, directory: LockDirectory, requests: Sequence[Request], job: JobDetails, log: JobLog | None
) -> None:
    """Wait for the end of what --after names."""
    from gpuguard.queue.tickets import new_ticket  # 60 ms, for --after alone
    from gpuguard.queue.waiter import wait_until_over

    ticket = new_ticket(requests, time_limit=job.time_limit, priority=job.priority, note=job.note, command=job.command)
    progress = WaitProgress(args.quiet, log)

    def has_ended(claim: str) -> bool:
        if not _has_ended(claim, directory):
            return False
        if not args.quiet:
            print_notice(_("the claim {claim} has ended already: nothing to wait for.").format(claim=claim))
        return True

    try:
        wait_until_over(args.after, directory, ticket, progress.report, has_ended=has_ended)
    finally:
        progress.done()


def _has_ended(claim: str, directory: LockDirectory) -> bool:
    """Return whether a claim with that id existed and has ended, by all events that this user may read."""
    from gpuguard.cli.events import read_events  # for --after alone

    lines = [line for line in read_events() if line.get("claim") == claim]
    if any(line.get("kind") == "release" and line.get("outcome") != "left to its processes" for line in lines):
        return True
    # A process that was killed wrote no event of its end.  The devices show whether the claim is of another host that
    # writes the same log (NFS), and a lock without a record may be that of the claim.
    uuids = {uuid for line in lines for uuid in devices_of(line)}
    here = bool(uuids) and len(existing_locks(directory, uuids)) == len(uuids)
    return here and all(held.since is not None for held in probe(directory, uuids))


def _say_so_when_stopped(progress: WaitProgress) -> Any:
    """Make Ctrl-Z say that others in the queue may start first, before it stops this process as usual.

    If this process leads the queue, the others notice that it is stopped, and another one leads.

    Returns:
        The previous handler of SIGTSTP, for signal.signal().
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        if waits_in_queue():
            progress.stopped()
        signals.stop_self(signum)

    former = signal.getsignal(signal.SIGTSTP)
    if former is signal.SIG_DFL:  # otherwise it is ignored, by a shell without job control
        signal.signal(signal.SIGTSTP, stop)
    return former
