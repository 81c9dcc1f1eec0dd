"""Say who claimed, used and left idle how many GPU-hours, and what the GPUs did.

gpuguard report                          the last 7 days, by user
gpuguard report --since 30d --by group   the members of each group together
gpuguard report --by claim               what each job took, out of the audit log: without a daemon, too
gpuguard report --by claim --user alice  the jobs of alice
gpuguard report --by policy              how often policies warned, paused, ended, ... each user, or would have
gpuguard report --html week.html         a page with charts, for a browser or a mail
gpuguard report --hosts gpu1,gpu2        one report on several machines, over ssh: see docs/fleet.md

Reads what `gpuguard daemon` has written down.  What it did not see is in no sum, and the report says how much that is:
see docs/report.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import stat
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

from gpuguard.claims.records import read_records
from gpuguard.cli import terminal
from gpuguard.cli.events import read_events
from gpuguard.cli.fleet import gathered, query_of, status
from gpuguard.cli.history import add_moment_options, period
from gpuguard.cli.options import (
    ASCII,
    JSON,
    add_fleet_options,
    add_repeatable,
    add_source_options,
    add_table,
    check_users,
    directory_of,
    has_hosts,
)
from gpuguard.cli.progress import progress
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.files import write_file
from gpuguard.fleet.answers import HostReply, HostReport, reply_of
from gpuguard.fleet.hosts import words_of
from gpuguard.history.queries import Watch, query_store, store_path
from gpuguard.history.usage_report import (
    BY,
    FROM_LOG,
    ClaimRow,
    Report,
    claim_rows,
    joined_report,
    policy_rows,
    running_claims,
    usage_report,
)
from gpuguard.locale import _
from gpuguard.units import format_count
from gpuguard.users import read_groups, user_name
from gpuguard.views import report as view
from gpuguard.views.fleet import end_lines
from gpuguard.views.text import put, put_json, style

_DRAWN = ("utilization_percent", "claimed_percent")  # over time, on the page


def add_options(parser: argparse.ArgumentParser) -> None:
    add_moment_options(parser, "--since", "--until", "7d")
    parser.add_argument("--by", choices=BY, default="user", metavar="WHAT", help=f"{', '.join(BY)} (default: user)")
    add_repeatable(parser, ("--user", "NAME", "only this user, by user, claim or policy (repeatable)"))
    add_table(
        parser.add_mutually_exclusive_group(),
        JSON,
        ("--csv", None, "a line for each user, group, GPU, claim or policy"),
        ("--html", "FILE", "write a page with charts, without scripts, to FILE (- for stdout)"),
    )
    add_table(parser, ASCII)
    add_fleet_options(parser)
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    now = time.time()
    begin, end = period(("--since", args.since), ("--until", args.until), now)
    if args.user and args.by in ("group", "device"):
        raise InvalidRequest(
            _("--user goes with --by user, claim or policy: sums by {by} are of all users together.").format(by=args.by)
        )
    if not has_hosts(args):
        check_users(args.user)  # users of other machines need not be known here
        _show(args, _report(args, begin, end, now), socket.gethostname(), now)
        return 0
    replies = _replies(args, begin, end, now)
    if args.html or args.csv:
        for reply in replies:
            if reply.error is not None:
                terminal.print_notice(f"{reply.host}: {reply.error}")
    reports = {reply.host: reply.report.report for reply in replies if reply.report}
    if reports or args.json:
        report = joined_report(args.by, begin, end, reports)
        _show(args, report, format_count(len(reports), "host"), now, replies)
    elif not (args.html or args.csv):
        put(end_lines(replies, terminal.width(), style()))
    return status(replies)


def _show(args: argparse.Namespace, report: Report, host: str, now: float, replies: Sequence[HostReply] = ()) -> None:
    if args.html:
        _write(args.html, view.to_html(report, host, now, replies))
    elif args.json:
        put_json(view.to_json(report, host, replies))
    elif args.csv:
        put(view.to_csv(report, host))
    else:
        plain = args.ascii or not terminal.writes_braille()
        put(view.to_text(report, width=terminal.width(), paint=style(), ascii_only=plain, replies=replies))


def _replies(args: argparse.Namespace, begin: float, end: float, now: float) -> list[HostReply]:
    """Ask the hosts for their reports on the same period, whatever their time zones are."""
    since, until = (datetime.fromtimestamp(moment, timezone.utc).isoformat() for moment in (begin, end))
    asked = {**vars(args), "since": since, "until": until if end < now else "now"}
    hosts, how = query_of(args, words_of("report", asked))
    return gathered(hosts, how, None, partial(reply_of, kind=HostReport))


def _report(args: argparse.Namespace, begin: float, end: float, now: float) -> Report:
    """Return the report on this machine."""
    metrics = _DRAWN if args.html else ()
    try:
        with progress(_("adding up the hours")):
            report = query_store(
                store_path(directory_of(args)),
                lambda usage: usage_report(usage, args.by, begin, end, user_name, _groups_of, metrics),
                now,
            )
    except GpuguardError:
        if args.by not in FROM_LOG:
            raise
        report = Report(args.by, Watch(begin, end, 0.0, None, 0), (), (), (), 0.0)
    if args.by in FROM_LOG:  # the audit log has no slots
        report = replace(report, watch=replace(report.watch, begin=begin, end=end, width=0))

    def is_wanted(user: str | None) -> bool:
        return not args.user or user in args.user

    if args.by == "claim":
        running = _running(args, now) if end >= now else []
        claims, without_end = claim_rows(read_events(args), begin, end, user_name, running)
        report = replace(report, claims=[row for row in claims if is_wanted(row.user)], claims_without_end=without_end)
    elif args.by == "policy":
        policies = policy_rows(read_events(args), begin, end, user_name)
        report = replace(report, policies=[row for row in policies if is_wanted(row.user)])
    return replace(report, rows=[row for row in report.rows if is_wanted(row.name)])


def _running(args: argparse.Namespace, now: float) -> list[ClaimRow]:
    try:
        return running_claims(read_records(directory_of(args)), now)
    except ClaimError:  # without a claim directory there are no claims
        return []


def _write(path: str, page: str) -> None:
    encoded = page.encode("utf-8", "replace")
    if path == "-":
        sys.stdout.buffer.write(encoded)
        return
    try:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise GpuguardError(
                _("--html {path}: this is no regular file.  Name one, or - for standard output.").format(path=path)
            )
        write_file(path, encoded, mode=None)
    except OSError as error:
        raise GpuguardError(
            _("--html {path}: it cannot be written: {strerror}.").format(path=path, strerror=error.strerror)
        ) from error


def _groups_of(uid: int) -> Collection[str]:
    """Return the groups of a user, without the one that has the user's own name."""
    try:
        return [name for name in read_groups(uid).values() if name != user_name(uid)]
    except (KeyError, OverflowError, OSError):
        return ()
