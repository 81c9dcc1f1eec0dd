"""Let a user make no new claims for a time.  Claims that they have stay, and so do their processes.

sudo gpuguard deny bob --for 2h --reason "ask me first"
sudo gpuguard deny bob --end
gpuguard deny                        who is denied now

It is a file in the directory of the claims that root alone can write: it holds without a daemon, and ends by itself.
It is about claims; use of a device without one is found by policies (the rules unclaimed and trespass).
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import DENIED, MAX_REASON, Restriction, change, read_restrictions, to_json
from gpuguard.cli.options import add_source_options, directory_of, quantity
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history import audit_log
from gpuguard.model import Event
from gpuguard.sanitize import neutralise
from gpuguard.units import format_duration, parse_duration

# What the commands deny, quarantine and keep have in common: marks as text and JSON, and their lines in the log.


LONGEST_SECONDS = 365 * 86400.0


def seconds_of(args: argparse.Namespace) -> float | None:
    """The value of --for, between a second and a year."""
    seconds = quantity("--for", args.for_, parse_duration)
    if seconds is not None and not 1 <= seconds <= LONGEST_SECONDS:
        raise InvalidRequest("--for: write 1s to 365d.")
    return seconds


def reason_of(args: argparse.Namespace) -> str:
    """The value of --reason."""
    reason: str = args.reason or ""
    if len(reason) > MAX_REASON:
        raise InvalidRequest(f"--reason has at most {MAX_REASON} characters.")
    return reason


def administrator() -> str:
    """Who changes marks by hand, in words."""
    return "the administrator" if os.geteuid() == 0 else "the owner of the directory"


def write_down(args: argparse.Namespace, kind: str, outcome: str, mark: Restriction) -> None:
    """Leave an Event where the daemon of this machine would."""
    choose_log(args)
    facts = (("until_unix_seconds", mark.until), ("by_uid", os.getuid()))
    devices = () if kind == "deny" else (mark.name,)
    if not audit_log.append(
        Event(time.time(), kind, outcome, mark.user, devices, message=mark.reason or None, facts=facts)
    ):
        print(f"gpuguard: done, but the log cannot be written: {audit_log.complaint()}.", file=sys.stderr)


def choose_log(args: argparse.Namespace) -> None:
    """Write events of root where the daemon of this machine writes its own."""
    simulated = args.backend.startswith("simulated")
    if "GPUGUARD_EVENTS" not in os.environ and os.geteuid() == 0 and not simulated:
        os.environ["GPUGUARD_EVENTS"] = audit_log.MACHINE_EVENTS


def show(directory: LockDirectory, kind: str, *, as_json: bool) -> int:
    """Print the marks of a kind."""
    from gpuguard.views.text import json_text, put

    if directory.owner is None:
        raise GpuguardError(
            "nothing is denied, quarantined or kept without a directory of root's: run `sudo gpuguard setup` once."
        )
    now = time.time()
    marks = sorted(read_restrictions(directory, kind, now).values(), key=lambda mark: mark.since)
    if as_json:
        put([json_text({"schema": 1, kind: [to_json(mark) for mark in marks]})], sys.stdout)
    else:
        put([line_of(mark, now) for mark in marks] or [f"nothing is {kind}."], sys.stdout)
    return 0


def line_of(mark: Restriction, now: float) -> str:
    """``"bob  for another 1h59m  by the administrator: too many jobs"``."""
    what = f"{mark.user} ({mark.name})" if mark.user else mark.name
    left = "until it is ended" if mark.until is None else f"for another {format_duration(round(mark.until - now))}"
    return neutralise(f"{what}  {left}  by {mark.by}" + (f": {mark.reason}" if mark.reason else ""))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("user", metavar="USER", nargs="?", help="name or uid; without it, show who is denied")
    parser.add_argument("--for", dest="for_", metavar="DURATION", help="how long, like 2h")
    parser.add_argument("--reason", metavar="TEXT", help="shown to the user")
    parser.add_argument("--end", action="store_true", help="permit claims again")
    parser.add_argument("--json", action="store_true", help="one object for programs: see docs/json.md")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    if args.user is None:
        if args.for_ or args.reason or args.end:
            raise InvalidRequest("whom?  Name a user: `gpuguard deny USER --for 2h`.")
        return show(directory_of(args), DENIED, as_json=args.json)
    from gpuguard.policies.files.decoder import Accounts
    from gpuguard.users import user_name

    seconds, reason = seconds_of(args), reason_of(args)
    uid = Accounts().user(args.user)
    if uid == 0:
        raise InvalidRequest("root cannot be denied anything.")
    if args.end == (seconds is not None):
        raise InvalidRequest("say for how long, by --for 2h; or --end.")
    directory, now, name, ended = directory_of(args, make=not args.end), time.time(), str(uid), []
    until = None if seconds is None else now + seconds
    mark = Restriction(name, now, until, reason, administrator(), user_name(uid))

    def update(marks: dict[str, Restriction]) -> None:
        if args.end:
            ended.extend([marks.pop(name)] if name in marks else [])
        else:
            marks[name] = mark

    if not (args.end and directory.is_missing()):  # whose name is misspelt: nothing is to be made there
        change(directory, DENIED, update)
    if args.end and not ended:
        print(f"{mark.user} was not denied.")
        return 1
    write_down(args, "deny", "ended" if args.end else "denied", mark)
    return show(directory, DENIED, as_json=args.json)
