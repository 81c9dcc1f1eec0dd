"""Say who claimed, used and left idle how many GPU-hours, and what the GPUs did.

gpuguard report                          the last 7 days, by user
gpuguard report --since 30d --by group   the members of each group together
gpuguard report --by claim               what each job took, out of the audit log: without a daemon, too
gpuguard report --by claim --user alice  the jobs of alice
gpuguard report --html week.html         a page with charts, for a browser or a mail

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
from collections.abc import Collection
from dataclasses import replace

from gpuguard.claims.records import read_records
from gpuguard.cli import terminal
from gpuguard.cli.events import read_events
from gpuguard.cli.history import add_moment_options, period, writes_braille
from gpuguard.cli.options import add_repeatable, add_source_options, check_users, directory_of
from gpuguard.cli.progress import progress
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.files import write_file
from gpuguard.history.queries import Watch, query_store, store_path
from gpuguard.history.report import BY, ClaimRow, Report, claim_rows, running_claims, usage_report
from gpuguard.locale import _
from gpuguard.users import read_group_names, user_name
from gpuguard.views import report as view
from gpuguard.views.text import put, put_json, style

_DRAWN = ("utilization_percent", "claimed_percent")  # over the time, in the page


def add_options(parser: argparse.ArgumentParser) -> None:
    add_moment_options(parser, "--since", "--until", "7d")
    parser.add_argument(
        "--by", choices=BY, default="user", metavar="WHAT", help="user, group, device or claim (default: user)"
    )
    add_repeatable(parser, ("--user", "NAME", "only this user, by user or claim (repeatable)"))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object for programs: see docs/json.md")
    form.add_argument("--csv", action="store_true", help="a line for each user, group, GPU or claim")
    form.add_argument(
        "--html", metavar="FILE", help="write a page with charts, without scripts, to FILE (- for stdout)"
    )
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters alone")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    now = time.time()
    begin, end = period(("--since", args.since), ("--until", args.until), now)
    if args.user and args.by not in ("user", "claim"):
        raise InvalidRequest(
            _("--user goes with --by user or claim: the sums by {by} are of all users together.").format(by=args.by)
        )
    check_users(args.user)
    metrics = _DRAWN if args.html else ()
    running = _running(args, now) if end >= now else []
    claims = claim_rows(read_events(), begin, end, user_name, running) if args.by == "claim" else None
    try:
        with progress(_("adding up the hours")):
            report = query_store(
                store_path(directory_of(args)),
                lambda usage: usage_report(usage, args.by, begin, end, user_name, _groups_of, metrics),
                now,
            )
    except GpuguardError:
        if claims is None:
            raise
        report = Report("claim", Watch(begin, end, 0.0, None, 0), (), (), (), 0.0)  # claims are in the log
    if args.user:
        report = replace(report, rows=[row for row in report.rows if row.name in args.user])
        claims = claims and ([row for row in claims[0] if row.user in args.user], claims[1])
    if args.html:
        _write(args.html, view.to_html(report, claims, socket.gethostname(), now))
    elif args.json:
        put_json(view.to_json(report, claims, socket.gethostname()))
    elif args.csv:
        put(view.to_csv(report, claims))
    else:
        plain = args.ascii or not writes_braille()
        put(view.to_text(report, claims, width=terminal.width(), paint=style(), ascii_only=plain))
    return 0


def _running(args: argparse.Namespace, now: float) -> list[ClaimRow]:
    try:
        return running_claims(read_records(directory_of(args)), now)
    except ClaimError:  # without a directory there is none
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
    """The groups of a user, without one of their own name that has no other member."""
    try:
        return [name for name in read_group_names(uid) if name != user_name(uid)]
    except (KeyError, OverflowError, OSError):
        return ()
