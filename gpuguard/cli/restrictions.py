"""The commands `deny` and `quarantine`, and what `keep` shares with them.

A restriction is an entry of a file in the claim directory that root alone can write: it holds without a daemon.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Literal

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import (
    ADMINISTRATOR,
    DENIED,
    MAX_REASON,
    QUARANTINED,
    Restriction,
    change,
    read_restrictions,
    to_json,
)
from gpuguard.cli.event_log import log_event
from gpuguard.cli.events import known_devices
from gpuguard.cli.options import (
    JSON,
    SubcommandRow,
    add_source_options,
    add_table,
    directory_of,
    quantity,
    sampled,
)
from gpuguard.cli.reserve import parse_when
from gpuguard.device_state import device_title, model_name
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.locale import _, translated
from gpuguard.locale.messages import sentence
from gpuguard.model import MODEL, Device, Event
from gpuguard.request import resolve
from gpuguard.sanitize import neutralise
from gpuguard.units import format_duration, local_time, parse_duration
from gpuguard.users import user_name
from gpuguard.vendors import is_whole_uuid
from gpuguard.views.text import json_text, put
from gpuguard.yaml_files.decoder import Accounts

LONGEST_SECONDS = 365 * 86400.0

_DENY = """Let a user make no new claims for a time.  Claims that they have stay, and so do their processes.

sudo gpuguard deny bob --for 2h --reason "ask me first"
sudo gpuguard deny bob --end
gpuguard deny                        who is denied now

It holds without a daemon, outlives a boot like a quarantine, and ends by itself.  Use of a GPU without a claim is found
by policies (the rules unclaimed and trespass).
"""
_QUARANTINE = """Take a GPU out of service: no user gets a new claim of it.  The owner of a claim keeps it.

sudo gpuguard quarantine 3 --reason "XID 79, being replaced"
sudo gpuguard quarantine GPU-8f31c2d4-... --for 2d
sudo gpuguard quarantine 3 --from "Mon 08:00" --for 4h
sudo gpuguard quarantine 3 --end
gpuguard quarantine                  what is quarantined now

A whole uuid is taken as it is, without asking a driver that may hang.  It holds without a daemon, and outlives a boot
if gpuguard was set up for this machine (`gpuguard setup`), unless --until-reboot is given.
"""


_UNTIL_REBOOT = ("--until-reboot", None, "until the machine is started again, at most")


def add_for_and_reason(parser: argparse.ArgumentParser, for_: str, reason: str) -> None:
    add_table(parser, ("--for", "DURATION", for_, {"dest": "for_"}), ("--reason", "TEXT", reason))


def _deny_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("user", metavar="USER", nargs="?", help="name or uid; without it, show who is denied")
    add_for_and_reason(parser, "how long, like 2h", "shown to the user")
    add_table(parser, _UNTIL_REBOOT, ("--end", None, "permit claims again"), JSON)
    add_source_options(parser)


def _deny(args: argparse.Namespace) -> int:
    if args.user is None:
        if args.for_ or args.reason or args.end:
            raise InvalidRequest(_("which user?  Name one: `gpuguard deny USER --for 2h`."))
        return show(directory_of(args), DENIED, as_json=args.json)
    uid = Accounts().user(args.user)
    if uid == 0:
        raise InvalidRequest(_("root cannot be denied anything."))
    if args.end == (seconds_of(args) is not None):
        raise InvalidRequest(_("say for how long, by --for 2h; or --end."))
    return _change(args, directory_of(args, make=not args.end), "deny", str(uid), user_name(uid))


def _quarantine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "device", metavar="DEVICE", nargs="?", help="index or uuid; without it, show what is quarantined"
    )
    add_for_and_reason(parser, "how long, like 2d (default: until --end)", "shown to everybody who wants the GPU")
    add_table(
        parser,
        ("--from", "TIME", "when it begins, as in 09:00, 'Mon 08:00' or 'in 2h' (default: now)", {"dest": "from_"}),
        _UNTIL_REBOOT,
        ("--end", None, "put it into service again"),
        JSON,
    )
    add_source_options(parser)


def _quarantine(args: argparse.Namespace) -> int:
    directory = directory_of(args, make=args.device is not None and not args.end)
    known = read_restrictions(directory, QUARANTINED, time.time(), planned=True)
    if args.device is None:
        if args.for_ or args.reason or args.end or args.from_:
            raise InvalidRequest(_("which GPU?  Name one: `gpuguard quarantine 3`."))
        return show(directory, QUARANTINED, known_devices(args) if known and not args.json else (), as_json=args.json)
    if args.end and seconds_of(args) is not None:
        raise InvalidRequest(_("either --for or --end."))
    beginning = [uuid for uuid in known if uuid.startswith(args.device)] if args.end else []
    if is_whole_uuid(args.device) or (len(beginning) == 1 and not args.device.isdigit()):
        return _change(args, directory, "quarantine", beginning[0] if beginning else args.device)
    devices = sampled(args, {MODEL}).devices
    [uuid] = resolve([args.device], devices, "DEVICE")
    return _change(args, directory, "quarantine", uuid, devices=devices)


SUBCOMMANDS = {
    "deny": SubcommandRow(_DENY, _deny_options, _deny),
    "quarantine": SubcommandRow(_QUARANTINE, _quarantine_options, _quarantine),
}


def _change(
    args: argparse.Namespace,
    directory: LockDirectory,
    command: Literal["deny", "quarantine"],
    name: str,
    user: str | None = None,
    devices: Sequence[Device] = (),
) -> int:
    """Make or end the restriction of *name*, log an event about it, and show all restrictions of its kind."""
    kind: Literal["denied", "quarantined"] = DENIED if command == "deny" else QUARANTINED
    now, seconds, reason = time.time(), seconds_of(args), reason_of(args)
    owner = sentence("by.directory_owner", "the owner of the directory")
    begins = parse_when(args.from_, now) if getattr(args, "from_", None) else None
    until = None if seconds is None else (begins or now) + seconds
    restriction = Restriction(
        name,
        now,
        until,
        reason,
        owner if os.geteuid() else ADMINISTRATOR,
        user,
        begins=begins,
        until_reboot=args.until_reboot,
    )
    ended = list[Restriction]()

    def update(restrictions: dict[str, Restriction]) -> None:
        if args.end:
            ended.extend([restrictions.pop(name)] if name in restrictions else [])
        elif begins is not None and name in restrictions and restrictions[name].holds(now):
            raise InvalidRequest(
                _("it is {kind} already, and would not be until then: end that first.").format(kind=_(kind))
            )
        else:
            restrictions[name] = restriction

    if not (args.end and directory.is_missing()):  # its name is misspelt, so it must not be made
        change(directory, kind, update)
    if args.end and not ended:
        print(_("{user} was not {kind}.").format(user=user or name, kind=_(kind)))
        return 1
    event = Event(
        time=time.time(),
        kind=command,
        outcome="ended" if args.end else kind,
        user=user,
        devices=() if command == "deny" else (name,),
        message=reason or None,
        facts=(("until_unix_seconds", until), ("by_uid", os.getuid())),
    )
    log_event(args, event)
    return show(directory, kind, devices, as_json=args.json)


def seconds_of(args: argparse.Namespace) -> float | None:
    """Return the seconds of --for, between a second and a year, or None without --for."""
    seconds = quantity("--for", args.for_, parse_duration)
    if seconds is not None and not 1 <= seconds <= LONGEST_SECONDS:
        raise InvalidRequest(_("--for: write 1s to 365d."))
    return seconds


def reason_of(args: argparse.Namespace) -> str:
    reason: str = args.reason or ""
    if len(reason) > MAX_REASON:
        raise InvalidRequest(_("--reason has at most {max_reason} characters.").format(max_reason=MAX_REASON))
    return reason


def show(directory: LockDirectory, kind: str, devices: Sequence[Device] = (), *, as_json: bool) -> int:
    """Print the restrictions of a kind, with the number and the name of each GPU that is among *devices*."""
    if directory.owner is None:
        raise GpuguardError(
            _("nothing is denied, quarantined or kept without a directory of root's: run `sudo gpuguard setup` once.")
        )
    now = time.time()
    known = read_restrictions(directory, kind, now, planned=True)
    restrictions = sorted(known.values(), key=lambda restriction: restriction.since)
    titles = {
        device.uuid: f"{translated(device_title(device))} ({model_name(device)}, {device.uuid})" for device in devices
    }
    if as_json:
        put([json_text({"schema": 1, kind: [to_json(restriction) for restriction in restrictions]})], sys.stdout)
    else:
        put(
            [line_of(restriction, now, titles.get(restriction.name)) for restriction in restrictions]
            or [_("nothing is {kind}.").format(kind=_(kind))],
            sys.stdout,
        )
    return 0


def line_of(restriction: Restriction, now: float, title: str | None = None) -> str:
    """Return a line like ``"bob (1002)  for another 1h59m  by the administrator: too many jobs"``.

    *title* says in words what the restriction is about.
    """
    what = f"{restriction.user} ({restriction.name})" if restriction.user else title or restriction.name
    until = restriction.until
    left = (
        _("until it is ended")
        if until is None
        else _("for another {until}").format(until=format_duration(round(until - now)))
    )
    if restriction.begins is not None and restriction.begins > now:
        left = _("from {time}").format(time=local_time(restriction.begins, "%m-%d %H:%M"))
        left += "" if until is None else _(" to {time}").format(time=local_time(until, "%m-%d %H:%M"))
    left += _(", until the next boot") if restriction.until_reboot else ""
    reason = f": {translated(restriction.reason)}" if restriction.reason else ""  # a policy's, or free words
    by = translated(restriction.by)
    return neutralise(_("{what}  {left}  by {by}{reason}").format(what=what, left=left, by=by, reason=reason))
