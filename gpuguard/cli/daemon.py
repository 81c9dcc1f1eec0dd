"""Guard the GPUs of this machine by a policy file, until SIGTERM.

Nothing is done to anybody unless both switches are on: --enforce here, and `mode: enforce` in the file.  Otherwise it
writes down what it would have done: see `gpuguard events`.  Without a policy file it only observes, and `gpuguard who`
answers from what it saw.

gpuguard daemon --policy policy.yaml             a dry run
gpuguard daemon --policy policy.yaml --once      look twice, say what is due and what is not, and why
gpuguard daemon --policy policy.yaml --enforce   in earnest

The file is read again when it changes, on SIGHUP, and by `gpuguard daemon --reload`, which says whether it has faults.
While it has some, what it has unchanged of the last good one stays in force, and other policies only warn.
--once works beside a daemon that runs, too, and shows what another file would do on this machine; it signals no
process, sends nothing, and writes a log only where --events names one.
Exit codes: 0, 1 the file has faults (--once), 2 usage, 3 a daemon runs already, 4 no driver (--once).
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from contextlib import ExitStack, nullcontext

from gpuguard.backends.client import open_worker
from gpuguard.claims.daemon_client import ReloadReply, StatusReply, query_daemon
from gpuguard.cli import terminal
from gpuguard.cli.event_log import choose_log
from gpuguard.cli.metrics import add_expose_option, page_server
from gpuguard.cli.options import add_source_options, add_table, directory_of, quantity
from gpuguard.daemon import service
from gpuguard.daemon.requests import status_reply
from gpuguard.errors import EXIT_NO, EXIT_RUNNING, InvalidRequest
from gpuguard.history.audit_log import MACHINE_EVENTS, line_of
from gpuguard.metrics.facts import DaemonFacts, EventCounter
from gpuguard.metrics.http_server import ADDRESS, listening_address, pages
from gpuguard.policies.policy import Judgement
from gpuguard.policy_files.loader import READ_SECONDS
from gpuguard.procfs import in_first_pid_namespace
from gpuguard.sanitize import neutralise
from gpuguard.source import desktop_memory
from gpuguard.units import format_count, parse_duration
from gpuguard.users import is_powerful, keep_capabilities
from gpuguard.views.events import to_text
from gpuguard.views.policy import status_lines

SHORTEST_SECONDS = 0.1
LONGEST_SECONDS = 600.0
YOUNG_OBJECTS = 20_000  # so many new objects start a garbage collection


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(parser, ("--policy", "FILE", "the policies; without it nothing is judged"))
    add_table(
        parser.add_mutually_exclusive_group(),
        ("--enforce", None, "do what policies with `mode: enforce` say"),
        ("--dry-run", None, "only write down what would be done (default)"),
    )
    add_table(
        parser,
        ("--no-last-good", None, "while the policy file has faults at the start, only observe"),
        ("--once", None, "look twice, say what is due, and end"),
        ("--reload", None, "have the daemon that runs read its policy file again"),
        ("--interval", "DURATION", "between two looks at most (default: the file's)"),
        (
            "--events",
            "PATH",
            f"the log (default: $GPUGUARD_EVENTS, else {MACHINE_EVENTS} as root or with CAP_KILL, else your own)",
        ),
        ("--i-share-host-pids", None, "act although this pid namespace is its own: only if its pids are the host's"),
        (
            "--metrics",
            "ADDRESS",
            f"serve numbers for Prometheus over HTTP (default: {ADDRESS}): see `gpuguard metrics`",
            {"nargs": "?", "const": ADDRESS},
        ),
    )
    add_expose_option(parser, "--metrics-expose")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    if args.reload:
        return _reload(args)
    interval = quantity("--interval", args.interval, parse_duration)
    _refuse_faults(args, interval)
    service.clean_environment(os.environ, root=is_powerful())
    keep_capabilities()
    if args.events:
        os.environ["GPUGUARD_EVENTS"] = os.path.abspath(args.events)
    is_logged = not args.once or "GPUGUARD_EVENTS" in os.environ  # the machine's log is about the daemon's own actions
    choose_log(args, is_admin=is_powerful())
    settings = service.DaemonSettings(
        args.policy, args.enforce, interval, args.i_share_host_pids, not args.no_last_good, args.once
    )
    if args.enforce and not in_first_pid_namespace() and not args.i_share_host_pids:
        _print("this is a pid namespace of its own, so nothing will be signalled: the driver's pids may be the host's.")
    directory = directory_of(args, make=True)
    with nullcontext(True) if args.once else service.single_daemon(directory) as is_single, ExitStack() as ending:
        if not is_single:
            _print(f"a gpuguard daemon runs already: it holds {directory.path}.  Two would signal twice.")
            return EXIT_RUNNING
        backend = open_worker(args.backend, desktop_memory=lambda: desktop_memory(lambda: directory), same_version=True)
        counter = EventCounter()
        ending.callback(backend.close)

        append = counter.append if is_logged else lambda event: True
        guard = service.Daemon(
            backend, directory, settings, _print, lambda event: _print(to_text(line_of(event))), append
        )

        def open_metrics() -> None:
            server = page_server(args.metrics, args.metrics_expose)
            ending.callback(server.close)
            server.start(pages(DaemonFacts(guard, directory, counter).read, ()))
            _print(f"serving http://{server.address}/metrics")

        if not args.once:
            # Everything loaded so far stays, and each sample makes thousands of objects that are dropped with the next
            # one.  With the usual thresholds the collector would go through all of them several times per sample.
            gc.freeze()
            gc.set_threshold(YOUNG_OBJECTS)
            return guard.serve(open_metrics if args.metrics else None)
        status, judgement = guard.once()
        if judgement and args.policy and status == 0:  # a file with faults judges nothing
            _print_status(guard, judgement, args.enforce)
        return status


def _print_status(guard: service.Daemon, judgement: Judgement, enforcing: bool) -> None:
    """Print what was not done and why, and which steps would follow if the daemon went on."""
    for note in judgement.notes:
        _print(f"{note.policy or 'all policies'}: nothing is done, {note.kind}: {note.text}")
    rows = tuple(status_reply(status, guard.last) for status in guard.watchdog.status())
    if rows or not judgement.notes:
        for line in status_lines(StatusReply(enforcing, rows, 0), time.time(), "any user"):
            _print(line)


def _refuse_faults(args: argparse.Namespace, interval: float | None) -> None:
    """Raise InvalidRequest for options that contradict each other, and for metrics that can never be served."""
    is_interval = interval is None or SHORTEST_SECONDS <= interval <= LONGEST_SECONDS
    faults = {
        "--interval: between two looks there must be 100ms to 10m.": not is_interval,
        "--enforce needs a policy file: name it with --policy.": args.enforce and not args.policy,
        "--metrics-expose is about --metrics.": args.metrics_expose is not None and not args.metrics,
        "--metrics does not go with --once, which ends at once.": args.metrics and args.once,
        "--once only looks: it signals no process, so leave out --enforce.": args.once and args.enforce,
    }
    for fault, is_there in faults.items():
        if is_there:
            raise InvalidRequest(fault)
    if args.metrics:
        listening_address(args.metrics, exposed=args.metrics_expose is not None)


def _reload(args: argparse.Namespace) -> int:
    reply = query_daemon(directory_of(args), {"do": "reload"}, ReloadReply, READ_SECONDS + 10.0)
    if reply.faults:
        count = format_count(reply.faults, "fault")
        _print(f"{reply.path} has {count}, so the last good one guards on, as far as it is unchanged: {reply.first}")
        return EXIT_NO
    _print(f"{reply.path} is read again: {format_count(reply.policies, 'policy', 'policies')}.")
    return 0


def _print(text: str) -> None:
    terminal.write(f"gpuguard: {neutralise(text)}\n")  # a full or missing journal is no reason to stop guarding
