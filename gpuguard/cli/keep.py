"""Ask the daemon to leave your processes and claims alone for a time, although a policy finds something against them.

gpuguard keep --for 4h --reason "a checkpoint is being written"
gpuguard keep --for 4h --device 3    only what you have on that GPU
gpuguard keep --status               what policies have against you now, what comes next when, and what they did
gpuguard keep --list                 what everybody keeps
gpuguard keep --end                  end what you keep
sudo gpuguard keep --for 1d --user bob
sudo gpuguard keep --for 1d --device 3    everybody on that GPU

It is for what concerns you alone, such as an idle GPU or a job that runs for long.  Policies that protect others do
not spare it, unless the policy file says so: those with the rules unclaimed, trespass, users, quota or
outside_scheduler.  What root keeps is spared by all.

The policy file says for how long at most (`keep: {longest: 24h}`), and no process or claim of yours is kept for more
than 72 h in 7 days.  Each request is written into the log, with its reason.  Nothing else changes: limits of `gpuguard
run` and claims of others stay.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict

from gpuguard.claims.daemon_client import EndedReply, ExemptionReply, StatusReply, query_daemon
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import KEPT
from gpuguard.cli.events import own_events
from gpuguard.cli.options import JSON, add_source_options, add_table, directory_of, own_deeds
from gpuguard.cli.restrictions import add_for_and_reason, reason_of, seconds_of, show
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.locale import _
from gpuguard.sanitize import neutralise
from gpuguard.units import format_duration
from gpuguard.views.policy import status_lines
from gpuguard.views.text import json_text, put, put_json
from gpuguard.yaml_files.decoder import Accounts


def add_options(parser: argparse.ArgumentParser) -> None:
    add_for_and_reason(parser, "how long, like 4h", "for the administrator and the log")
    add_table(
        parser,
        ("--device", "DEVICE", "only on this one: index or uuid (default: everywhere)"),
        ("--user", "USER", "for another user, as root"),
    )
    add_table(
        parser.add_mutually_exclusive_group(),
        ("--list", None, "show what is kept"),
        ("--status", None, "show what policies have against what is yours (root: all)"),
        ("--end", None, "end it before its time"),
    )
    add_table(parser, JSON)
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args)
    if args.list:
        return show(directory, KEPT, as_json=args.json)
    target: dict[str, object] = {} if args.user is None else {"uid": Accounts().user(args.user)}
    if args.status:
        status = query_daemon(directory, {"do": "status", **target}, StatusReply)
        if args.json:
            put_json({"schema": 1, **asdict(status), "recent": own_events(args, time.time() - 3600)})
        else:
            _put(args, status, *status_lines(status, time.time()), *own_deeds(args))
        return 0
    seconds, reason = seconds_of(args), reason_of(args)
    if args.end == (seconds is not None):
        raise InvalidRequest(_("say for how long, by --for 4h; or --end, or --list."))
    if directory.owner is None:
        raise GpuguardError(_("without a directory of root's no daemon can be asked: run `sudo gpuguard setup` once."))
    if args.device is not None:
        target["device"] = args.device
    if args.end:
        ended = query_daemon(directory, {"do": "end", **target}, EndedReply)
        _put(args, ended, _("ended: {ended}.").format(ended=ended.ended) if ended.ended else _("nothing was kept."))
        return 0 if ended.ended else 1
    request = {"do": "keep", "for_seconds": seconds, "reason": reason, **target}
    kept = query_daemon(directory, request, ExemptionReply)
    own = kept.user is not None and target.get("uid") in (None, os.getuid())
    what = _("what you have") if own else kept.user or "everybody"
    where = _(" on {device}").format(device=kept.device) if kept.device else ""
    left = format_duration(round(kept.until_unix_seconds - time.time()))
    text = _("{what}{where} is left alone for {left}.").format(what=what, where=where, left=left)
    _put(args, kept, text, *_but(directory))
    return 0


def _but(directory: LockDirectory) -> list[str]:
    """Return a line on the policies that do not leave it alone, or [] if all do or they cannot be read."""
    from gpuguard.cli.policy import not_sparing  # 50 ms, for users to whom something was granted

    with suppress(GpuguardError):
        if names := not_sparing(directory):
            return [_("Not by policies that protect others: {policies}.").format(policies=", ".join(names))]
    return []


def _put(args: argparse.Namespace, reply: EndedReply | ExemptionReply | StatusReply, *text: str) -> None:
    put([json_text({"schema": 1, **asdict(reply)})] if args.json else map(neutralise, text), sys.stdout)
