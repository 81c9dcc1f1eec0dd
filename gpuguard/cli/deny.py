"""Let a user make no new claims for a time.  Claims that he has stay, and so do his processes.

sudo gpuguard deny bob --for 2h --reason "ask me first"
sudo gpuguard deny bob --end
gpuguard deny                        who is denied now

It is a file in the directory of the claims that root alone can write: it holds without a daemon, and ends by itself.
It is about claims; whoever uses a device without one is found by policies (the rules unclaimed and trespass).
"""

from __future__ import annotations

import argparse
import time

from gpuguard.cli import mark_options
from gpuguard.cli.options import add_source_options, directory_of
from gpuguard.errors import InvalidRequest
from gpuguard.marks import DENIED, Mark, change


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
        return mark_options.show(directory_of(args), DENIED, as_json=args.json)
    from gpuguard.documents.accounts import Accounts
    from gpuguard.users import user_name

    seconds, reason = mark_options.seconds_of(args), mark_options.reason_of(args)
    uid = Accounts().user(args.user)
    if uid == 0:
        raise InvalidRequest("root cannot be denied anything.")
    if args.end == (seconds is not None):
        raise InvalidRequest("say for how long, by --for 2h; or --end.")
    directory, now, name, ended = directory_of(args, make=not args.end), time.time(), str(uid), []
    until = None if seconds is None else now + seconds
    mark = Mark(name, now, until, reason, mark_options.administrator(), user_name(uid))

    def update(marks: dict[str, Mark]) -> None:
        if args.end:
            ended.extend([marks.pop(name)] if name in marks else [])
        else:
            marks[name] = mark

    if not (args.end and directory.is_missing()):  # whose name is misspelt: nothing is to be made there
        change(directory, DENIED, update)
    if args.end and not ended:
        print(f"{mark.user} was not denied.")
        return 1
    mark_options.write_down(args, "deny", "ended" if args.end else "denied", mark)
    return mark_options.show(directory, DENIED, as_json=args.json)
