"""Release a claim under which no process computes, although its shell, notebook or job lives on.

gpuguard release              your claims, and which of them can be released
gpuguard release 1f2e         the claim whose id begins like that (`gpuguard who` shows ids, too)
gpuguard release 1f2e --stop  although its job computes: the job is asked to end first
sudo gpuguard release 1f2e    anybody's

Without --stop no process is signalled, and a claim under which one computes is left alone.  With --stop the job is
ended as by a time limit.  The owner learns it from their `gpuguard run`, a program by reassert().
Exit codes: 0 the GPUs are free, 1 they are not and why, 2 usage, 4 no driver.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from contextlib import closing

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import YIELD, ReleaseRequest, read_records
from gpuguard.cli.event_log import log_event
from gpuguard.cli.options import JSON, add_source_options, add_table, backend_of, directory_of
from gpuguard.cli.restrictions import reason_of
from gpuguard.daemon import release
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _, translated
from gpuguard.locale.messages import sentence
from gpuguard.model import ClaimRecord, Event
from gpuguard.sanitize import neutralise
from gpuguard.tables import table
from gpuguard.units import format_count
from gpuguard.users import user_name
from gpuguard.views.text import picked, put, put_json

MOST_OF_ONE = 20  # claims of one user that root is shown: each user can have hundreds of records

# How a claim was released, in words for people; the JSON keeps the words of version 0.1.
_WAYS = {
    release.BY_JOB: sentence("released.by_job", "by the gpuguard run of its job"),
    release.FROM_HERE: sentence("released.by_command", "by this command"),
    release.BY_DAEMON: sentence("released.by_daemon", "by the daemon"),
    release.JOB_ENDED: sentence("released.job_ended", "its job was ended"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        ("claim", "ID", "of the claim, or how it begins; without it, show yours", {"nargs": "?"}),
        ("--stop", None, "end the job first, if it has a `gpuguard run`"),
        ("--reason", "TEXT", "shown to the owner of the claim"),
        JSON,
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args)
    if args.claim is None:
        if args.stop or args.reason:
            raise InvalidRequest(_("which one?  Name a claim: `gpuguard release ID`."))
        return _print_claims(args, directory)
    claim = release.releasable_claim(directory, args.claim, os.geteuid())
    request = ReleaseRequest(YIELD, user_name(os.geteuid()), reason_of(args), time.time())
    if args.stop:
        how = release.stop(directory, claim, request, report=lambda text: print(f"gpuguard: {text}", file=sys.stderr))
    else:
        with closing(backend_of(args)) as backend:
            how = release.release(directory, claim, request, backend)
    _log(args, claim, how)
    if args.json:
        put_json({"schema": 1, "claim": claim.id, **picked(claim, "uid", "devices"), "how": how})
    else:
        what = _("{count} of {user}").format(count=format_count(len(claim.devices), "GPU"), user=neutralise(claim.user))
        put([_("released: the claim {id}, {what}, {how}.").format(id=claim.id, what=what, how=translated(_WAYS[how]))])
    return 0


def _print_claims(args: argparse.Namespace, directory: LockDirectory) -> int:
    claims = [claim for claim in read_records(directory) if os.geteuid() in (0, claim.uid)]
    with closing(backend_of(args)) as backend:
        rows = list(zip(claims, release.current_uses(directory, claims, backend), strict=True)) if claims else []
    if args.json:
        content = [{"claim": claim.id, **picked(claim, "user", "uid", "devices"), "in_use": why} for claim, why in rows]
        put_json({"schema": 1, "claims": content})
    elif not rows:
        put([_("no claim is yours.") if os.geteuid() else _("there is no claim.")])
    else:
        free = _("no process computes: can be released")
        most = len(rows) if os.geteuid() else MOST_OF_ONE
        cells, count = [], Counter[str]()
        for claim, why in rows:
            count[user := neutralise(claim.user)] += 1
            if count[user] <= most:
                cells.append((claim.id, user, str(len(claim.devices)), neutralise(translated(why or free))))
        left = {user: number - most for user, number in count.items() if number > most}
        more = [_("and {count} more of {user}").format(count=number, user=user) for user, number in left.items()]
        put([*table(cells, (_("CLAIM"), _("USER"), _("GPUS"), _("STATE")), align="<<><"), *more])
    return 0


def _log(args: argparse.Namespace, claim: ClaimRecord, how: str) -> None:
    message = _WAYS[how]
    if args.reason:
        message = sentence("because", "{what}: {why}", what=message, why=args.reason)
    event = Event(
        time=time.time(),
        kind="release",
        outcome="released",
        user=claim.user,
        devices=claim.devices,
        claim=claim.id,
        message=message,
        facts=(("uid", claim.uid), ("by_uid", os.getuid())),
    )
    log_event(args, event)
