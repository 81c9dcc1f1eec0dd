"""Take a device out of service: nobody gets a new claim of it.  The owner of a claim keeps it.

sudo gpuguard quarantine 3 --reason "XID 79, being replaced"
sudo gpuguard quarantine GPU-8f31c2d4-... --for 2d
sudo gpuguard quarantine 3 --end
gpuguard quarantine                  what is quarantined now

A whole uuid is taken as it is, without asking a driver that may hang.  It is a file in the directory of the claims that
root alone can write: it holds without a daemon, until the next boot.
"""

from __future__ import annotations

import argparse
import re
import time

from gpuguard.claims.restrictions import QUARANTINED, Restriction, change, read_restrictions
from gpuguard.cli import deny
from gpuguard.cli.options import add_source_options, backend_of, directory_of
from gpuguard.errors import InvalidRequest

_WHOLE = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "device", metavar="DEVICE", nargs="?", help="index or uuid; without it, show what is quarantined"
    )
    parser.add_argument("--for", dest="for_", metavar="DURATION", help="how long, like 2d (default: until --end)")
    parser.add_argument("--reason", metavar="TEXT", help="shown to everybody who wants the device")
    parser.add_argument("--end", action="store_true", help="put it into service again")
    parser.add_argument("--json", action="store_true", help="one object for programs: see docs/json.md")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args, make=args.device is not None and not args.end)
    if args.device is None:
        if args.for_ or args.reason or args.end:
            raise InvalidRequest("which one?  Name a device: `gpuguard quarantine 3`.")
        return deny.show(directory, QUARANTINED, as_json=args.json)
    seconds, reason = deny.seconds_of(args), deny.reason_of(args)
    if args.end and seconds is not None:
        raise InvalidRequest("either --for or --end.")
    now, ended = time.time(), []
    uuid = _uuid(args, list(read_restrictions(directory, QUARANTINED, now)) if args.end else [])
    until = None if seconds is None else now + seconds
    mark = Restriction(uuid, now, until, reason, deny.administrator())

    def update(marks: dict[str, Restriction]) -> None:
        if args.end:
            ended.extend([marks.pop(uuid)] if uuid in marks else [])
        else:
            marks[uuid] = mark

    if not (args.end and directory.is_missing()):  # whose name is misspelt: nothing is to be made there
        change(directory, QUARANTINED, update)
    if args.end and not ended:
        print(f"{uuid} was not quarantined.")
        return 1
    deny.write_down(args, "quarantine", "ended" if args.end else "quarantined", mark)
    return deny.show(directory, QUARANTINED, as_json=args.json)


def _uuid(args: argparse.Namespace, known: list[str]) -> str:
    """The uuid that is meant; the driver is asked only when nothing else tells."""
    from gpuguard.request import resolve

    named: str = args.device
    beginning = [uuid for uuid in known if uuid.startswith(named)]
    if _WHOLE.fullmatch(named) or (len(beginning) == 1 and not named.isdigit()):
        return beginning[0] if beginning else named
    backend = backend_of(args)
    try:
        return resolve([named], backend.sample({}).devices, "DEVICE")[0]
    finally:
        backend.close()
