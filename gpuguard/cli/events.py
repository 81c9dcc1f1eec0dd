"""Show what happened: claims, releases, and everything that the guard did or would have done.

Reads your own events and those of the machine's daemon: all of them where you may read its log, else what it did to
your processes and claims.

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
from collections.abc import Callable

from gpuguard.backends import is_simulated
from gpuguard.claims import daemon_client as client
from gpuguard.claims.directory import LockDirectory, daemon_files, last_about, lock_directory
from gpuguard.cli.options import add_repeatable, add_source_options, add_table, check_users, quantity, sampled
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history.audit_log import MACHINE_EVENTS, Line, LogFollower, decoded, events_path
from gpuguard.locale import _, translated
from gpuguard.model import HEALTH, MODEL, Device
from gpuguard.procfs import boot_clock
from gpuguard.source import read_state
from gpuguard.units import format_count, parse_duration
from gpuguard.views import events
from gpuguard.views.text import json_text, put, put_json

_POLL_SECONDS = 0.5  # between two reads with --follow


def add_options(parser: argparse.ArgumentParser) -> None:
    add_repeatable(
        parser,
        ("--user", "NAME", "only about this user (repeatable)"),
        ("--device", "UUID", "only about this GPU, GPU-ab.. (repeatable)"),
        ("--policy", "NAME", "only of this one (repeatable)"),
        ("--file", "PATH", "read this log instead (repeatable)"),
    )
    add_table(
        parser,
        ("--since", "DURATION", "only of the last 2h, 30m, 7d"),
        ("--follow", None, "go on with new events, until Ctrl-C"),
        ("--json", None, "one object for programs; with --follow one line per event"),
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    seconds = quantity("--since", args.since, parse_duration)
    wanted = events.EventFilter(
        users=frozenset(args.user),
        devices=tuple(args.device),
        policies=frozenset(args.policy),
        since=None if seconds is None else time.time() - seconds,
    )
    if "" in args.device:
        raise InvalidRequest(_("--device is empty: name a uuid or its beginning."))
    labels: dict[str, str] | None = None
    logs = [_Log(path, named=True) for path in args.file] or _logs(args)
    while True:
        lines, torn = decoded(line for log in logs for line in log.lines())
        shown = events.in_order(lines, wanted)
        if args.json and not args.follow:
            put_json(events.to_json(shown, torn))
        else:
            if args.json:
                put([json_text(line, indent=None) for line in shown])
            elif shown:
                headers = labels is None
                labels = {device.uuid: device.label for device in known_devices(args)} if labels is None else labels
                put(events.to_table(shown, labels, headers=headers))
        _warn_of_torn_lines(torn)
        if not args.follow:
            if not (shown or args.json):
                _report_no_events(args, logs)
            return 0
        time.sleep(_POLL_SECONDS)


def _report_no_events(args: argparse.Namespace, logs: list[_Log]) -> None:
    if not args.file:  # a named file may come from a machine whose users are unknown here
        check_users(args.user)
    by_uuid = _(": it names GPUs by uuid, not by index") if any(map(str.isdecimal, args.device)) else ""
    readable = " or ".join(log.path for log in logs if log.is_readable)
    print(
        _("gpuguard: no such events in {readable}{by_uuid}.").format(readable=readable, by_uuid=by_uuid),
        file=sys.stderr,
    )


def read_events(args: argparse.Namespace | None = None) -> list[Line]:
    """Read all events that this user may read, from the user's own log and the machine's.

    *args* say where the claim directory is.  With them, the daemon adds the newest events about this user from a log
    that only the administrator may read.
    """
    logs = _logs(args) if args else [_Log(path, named=False) for path in _paths()]
    lines, torn = decoded(line for log in logs for line in log.lines())
    _warn_of_torn_lines(torn)
    return lines


class _Log:
    """A log.  One that the user *named* must be readable; any other may be missing."""

    def __init__(self, path: str, *, named: bool) -> None:
        self.path, self._named = path, named
        self._follower, self._has_begun = LogFollower(path), False
        self.is_readable = True

    def lines(self) -> list[bytes]:
        """Return the lines that came since the last call; the first call returns all of them."""
        older = [] if self._has_begun else self._read(self._follower.older, named=False)
        self._has_begun = True
        return [*older, *self._read(self._follower.newer, self._named)]

    def _read(self, read: Callable[[], list[bytes]], named: bool) -> list[bytes]:
        try:
            return read()
        except OSError as error:
            if named:
                raise GpuguardError(
                    _("{path} cannot be read: {strerror}.").format(path=self.path, strerror=error.strerror)
                ) from error
            if isinstance(error, PermissionError) and self.is_readable:
                self.is_readable = False
                self._report_unreadable()
            return []

    def _report_unreadable(self) -> None:
        print(
            _("gpuguard: {path} is not readable for you: its events are left out.").format(path=self.path),
            file=sys.stderr,
        )


class _MachineLog(_Log):
    """The daemon's log.  If only the administrator may read it, the daemon tells each user what concerns them."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(MACHINE_EVENTS, named=False)
        self._args, self._since, self._is_there = args, 0.0, os.path.exists(MACHINE_EVENTS)
        self._is_silent = False

    def lines(self) -> list[bytes]:
        """Return the lines that came since the last call; the first call returns all of them."""
        lines, began = super().lines(), time.time()
        if not (self.is_readable and self._is_there):
            try:
                lines += [json_text(row, indent=None).encode() for row in self._rows()]
                self._since, self._is_silent = began, False
            except GpuguardError as error:
                if not self._is_silent:
                    text = _("gpuguard: what the daemon did to you is left out: {error}")
                    print(text.format(error=translated(str(error))), file=sys.stderr)
                self._is_silent = True
        return lines

    def _report_unreadable(self) -> None:
        if not (directory := _directory(self._args)) or last_about(directory, os.geteuid()) is None:
            super()._report_unreadable()

    def _rows(self) -> list[Line]:
        directory = _directory(self._args)
        if directory is None or daemon_files(directory).owner == os.geteuid():  # our own daemon writes to our own log
            return []
        return list(client.own_events(directory, self._since))


def known_devices(args: argparse.Namespace) -> tuple[Device, ...]:
    """Return the devices as the daemon last saw them, otherwise as the driver shows them; none if it cannot be read."""
    directory, simulated = _directory(args), is_simulated(args.backend)
    last = read_state(directory, boot_clock(), simulated=simulated) if directory else None
    try:
        return (last or sampled(args, {HEALTH, MODEL})).devices
    except GpuguardError:  # a log or a restriction can be read even without a driver
        return ()


def _directory(args: argparse.Namespace) -> LockDirectory | None:
    """Return the directory of the claims and of the daemon, or None if there is none that can be trusted."""
    try:
        return lock_directory(args.dir, backend=args.backend, make=False)
    except GpuguardError:
        return None


def own_events(args: argparse.Namespace, since: float) -> list[Line]:
    """Return what the daemon did to this user after *since* (unix time); nothing if no daemon answers."""
    try:
        return list(client.own_events(directory, since)) if (directory := _directory(args)) else []
    except GpuguardError:
        return []


def _logs(args: argparse.Namespace) -> list[_Log]:
    return [*(_Log(path, named=False) for path in _paths() if path != MACHINE_EVENTS), _MachineLog(args)]


def _paths() -> list[str]:
    return list(dict.fromkeys((events_path(), MACHINE_EVENTS)))


def _warn_of_torn_lines(torn: int) -> None:
    if torn:
        lines = format_count(torn, "line")
        print(
            _("gpuguard: {lines} of the log cannot be read (torn by a full disk?) and are left out.").format(
                lines=lines
            ),
            file=sys.stderr,
        )
