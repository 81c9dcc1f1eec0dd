"""Show what happened: claims, releases, and everything that the guard did or would have done.

Reads your own events and, where you may, those of the machine's daemon.

gpuguard events                          all that are kept, oldest first
gpuguard events --since 2h --user alice  what concerned alice in the last two hours
gpuguard events --policy idle-gpus       what one policy did
gpuguard events --follow                 go on showing new ones, until Ctrl-C
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from gpuguard.cli.options import check_users, quantity
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history.audit_log import MACHINE_EVENTS, events_path
from gpuguard.units import parse_duration
from gpuguard.views import events
from gpuguard.views.text import json_text, put

_LOOK_SECONDS = 0.5  # between two looks of --follow


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--user", metavar="NAME", action="append", default=[], help="only about this user (repeatable)")
    parser.add_argument(
        "--device", metavar="UUID", action="append", default=[], help="only about this device, GPU-ab.. (repeatable)"
    )
    parser.add_argument("--policy", metavar="NAME", action="append", default=[], help="only of this one (repeatable)")
    parser.add_argument("--since", metavar="DURATION", help="only of the last 2h, 30m, 7d")
    parser.add_argument(
        "--file", metavar="PATH", action="append", default=[], help="read this log instead (repeatable)"
    )
    parser.add_argument("--follow", action="store_true", help="go on with new events, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one object for programs; with --follow one line per event")


def main(args: argparse.Namespace) -> int:
    seconds = quantity("--since", args.since, parse_duration)
    wanted = events.Wanted(
        users=frozenset(args.user),
        devices=tuple(args.device),
        policies=frozenset(args.policy),
        since=None if seconds is None else time.time() - seconds,
    )
    if "" in args.device:
        raise InvalidRequest("--device is empty: name a uuid or its beginning.")
    logs = [_Log(path, named=bool(args.file)) for path in args.file or _usual()]
    found, torn = events.decoded(line for log in logs for line in log.older())
    shown = events.in_order(found, wanted)
    if args.json and not args.follow:
        put([json_text(events.to_json(shown, torn))], sys.stdout)
    else:
        _show(shown, as_json=args.json)
        if not (shown or args.follow):
            _say_that_there_are_none(args, logs)
    _complain(torn)
    while args.follow:
        time.sleep(_LOOK_SECONDS)
        found, torn = events.decoded(line for log in logs for line in log.newer())
        _show(events.in_order(found, wanted), as_json=args.json)
        _complain(torn)
    return 0


def logged() -> list[events.Line]:
    """All events that this user may read, out of his own log and the machine's."""
    found, torn = events.decoded(line for path in _usual() for line in _Log(path, named=False).older())
    _complain(torn)
    return found


class _Log:
    """A file of events that others write and rotate while it is read."""

    def __init__(self, path: str, named: bool) -> None:
        self.path, self._named = path, named
        self._place, self._inode, self._rest = 0, 0, b""
        self.is_closed = False

    def older(self) -> list[bytes]:
        """The lines that are there already, with those of the rotated file."""
        before = self._read(f"{self.path}.1", 0, named=False)
        return [*before.splitlines(), *self.newer()]

    def newer(self) -> list[bytes]:
        """The whole lines that came since; one that is being written is left for the next look."""
        try:
            found = os.stat(self.path)
        except OSError:
            found = None
        if found and (found.st_ino != self._inode or found.st_size < self._place):
            self._place, self._inode, self._rest = 0, found.st_ino, b""
        fresh = self._read(self.path, self._place, self._named)
        self._place += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        return lines

    def _read(self, path: str, place: int, named: bool) -> bytes:
        try:
            # O_NONBLOCK: a FIFO in that place must not hang us.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                file.seek(place)
                return file.read()
        except OSError as error:
            if named:
                raise GpuguardError(f"{path} cannot be read: {error.strerror}.") from error
            if isinstance(error, PermissionError) and not self.is_closed:
                self.is_closed = True
                print(f"gpuguard: {self.path} is not readable for you: its events are left out.", file=sys.stderr)
            return b""


def _usual() -> list[str]:
    return list(dict.fromkeys((events_path(), MACHINE_EVENTS)))


def _show(found: list[events.Line], *, as_json: bool) -> None:
    put([json_text(line, indent=None) if as_json else events.to_text(line) for line in found], sys.stdout)
    sys.stdout.flush()


def _say_that_there_are_none(args: argparse.Namespace, logs: list[_Log]) -> None:
    if not args.file:  # of another machine, perhaps
        check_users(args.user)
    by_uuid = ": it names devices by uuid, not by index" if any(map(str.isdecimal, args.device)) else ""
    print(
        f"gpuguard: no such events in {' or '.join(log.path for log in logs if not log.is_closed)}{by_uuid}.",
        file=sys.stderr,
    )


def _complain(torn: int) -> None:
    if torn:
        lines = f"{torn} line{'s' * (torn != 1)}"
        print(f"gpuguard: {lines} of the log cannot be read (torn by a full disk?) and are left out.", file=sys.stderr)
