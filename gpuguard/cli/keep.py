"""Ask the daemon to leave your processes and claims alone for a time, although a policy finds something against them.

gpuguard keep --for 4h --reason "a checkpoint is being written"
gpuguard keep --for 4h --device 3    only what you have on that device
gpuguard keep --status               what policies have against you now, and what comes next when
gpuguard keep --list                 what everybody keeps
gpuguard keep --end                  end what you keep
sudo gpuguard keep --for 1d --user bob
sudo gpuguard keep --for 1d --device 3    everybody on that device

The policy file says for how long at most (`keep: {longest: 24h}`).  Each request is written into the log, with its
reason.  Nothing else changes: limits of `gpuguard run` and claims of others stay.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from gpuguard.claims.restrictions import KEPT
from gpuguard.cli import deny
from gpuguard.cli.options import add_source_options, directory_of
from gpuguard.errors import GpuguardError, InvalidRequest


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--for", dest="for_", metavar="DURATION", help="how long, like 4h")
    parser.add_argument("--reason", metavar="TEXT", help="for the administrator and the log")
    parser.add_argument("--device", metavar="DEVICE", help="only on this one: index or uuid (default: everywhere)")
    parser.add_argument("--user", metavar="USER", help="for somebody else, as root")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="show what is kept")
    what.add_argument("--status", action="store_true", help="show what policies have against what is yours (root: all)")
    what.add_argument("--end", action="store_true", help="end it before its time")
    parser.add_argument("--json", action="store_true", help="one object for programs: see docs/json.md")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args)
    if args.list:
        return deny.show(directory, KEPT, as_json=args.json)
    if args.status:
        return _status(args)
    seconds, reason = deny.seconds_of(args), deny.reason_of(args)
    if args.end == (seconds is not None):
        raise InvalidRequest("say for how long, by --for 4h; or --end, or --list.")
    if directory.owner is None:
        raise GpuguardError("without a directory of root's no daemon can be asked: run `sudo gpuguard setup` once.")
    from gpuguard.daemon.client import ExemptionReply, ReleaseReply, call_daemon, checked
    from gpuguard.policies.files.decoder import Accounts
    from gpuguard.sanitize import neutralise
    from gpuguard.units import format_duration
    from gpuguard.views.text import json_text, put

    uid = Accounts().user(args.user) if args.user is not None else None
    request: dict[str, object] = {"do": "end"} if args.end else {"do": "keep", "for_seconds": seconds, "reason": reason}
    meant = {name: value for name, value in (("uid", uid), ("device", args.device)) if value is not None}
    answer = call_daemon(directory, {**request, **meant})
    checked(answer, ReleaseReply if args.end else ExemptionReply)
    if args.json:
        put([json_text({"schema": 1, **{name: value for name, value in answer.items() if name != "ok"}})], sys.stdout)
    elif args.end:
        put([f"ended: {answer['ended']}."] if answer["ended"] else ["nothing was kept."], sys.stdout)
    else:
        left = format_duration(round(answer["until_unix_seconds"] - time.time()))
        whom = answer["user"] or "everybody"
        own = answer["user"] is not None and uid in (None, os.getuid())
        where = f" on {answer['device']}" if answer["device"] else ""
        put([neutralise(f"{'what you have' if own else whom}{where} is left alone for {left}.")], sys.stdout)
    return 0 if not args.end or answer["ended"] else 1


def _status(args: argparse.Namespace) -> int:
    from gpuguard.daemon.client import StatusReply, call_daemon, checked
    from gpuguard.policies.files.decoder import Accounts
    from gpuguard.views.policy_status import lines
    from gpuguard.views.text import json_text, put

    uid = Accounts().user(args.user) if args.user is not None else None
    answer = checked(
        call_daemon(directory_of(args), {"do": "status", **({} if uid is None else {"uid": uid})}), StatusReply
    )
    if args.json:
        put([json_text({"schema": 1, **{name: value for name, value in answer.items() if name != "ok"}})], sys.stdout)
    else:
        put(lines(answer, time.time()), sys.stdout)
    return 0
