"""Show who uses which GPU, who has claimed it, and what it does.

gpuguard who                   all GPUs, their claims and processes, totals per user
gpuguard who --user alice      only what is alice's
gpuguard who --watch 5s        again every 5 s, until Ctrl-C
gpuguard who --hosts a,b,c     those of other hosts, over ssh: see docs/fleet.md
gpuguard top --once            with limits, fans, clocks, video and PCIe as well

While `gpuguard daemon` runs, its last look is shown, a few seconds old; --fresh asks the driver all the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard import device_state
from gpuguard.claims.directory import LockDirectory
from gpuguard.cli import options, terminal
from gpuguard.cli.progress import progress
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.locale import _, translated
from gpuguard.model import TEXT_FIELDS, WHO_FIELDS, Snapshot
from gpuguard.procfs import process_facts
from gpuguard.sanitize import neutralise
from gpuguard.source import SnapshotSource
from gpuguard.units import local_time, parse_duration
from gpuguard.views import who
from gpuguard.views.text import json_text, put, style

if TYPE_CHECKING:
    from gpuguard.queue.reservations import ReservationCalendar


def add_filter_options(parser: argparse.ArgumentParser) -> None:
    """Add --user and --device, which choose what is shown of the machine."""
    options.add_repeatable(
        parser,
        ("--user", "NAME", "only this user's (repeatable)"),
        ("--device", "D", "only these: an index, a uuid or its beginning, 0,GPU-ab"),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add_filter_options(parser)
    options.add_table(
        parser,
        (
            "--watch",
            "EVERY",
            "show again and again (default: every 2s); temperature and power in the text are up to 1.5s old",
            {"nargs": "?", "const": "2s"},
        ),
        ("--json", None, "one object for programs; with --watch one line per look"),
        options.FRESH,
    )
    options.add_fleet_options(parser)
    options.add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    if options.has_hosts(args):
        from gpuguard.cli import fleet  # for ssh, which only other hosts need

        return fleet.who(args)
    every = None if args.watch is None else options.quantity("--watch", args.watch, parse_duration)
    if every is not None and every < 0.1:
        raise InvalidRequest(_("--watch needs at least 100ms between two looks."))
    with closing(options.snapshot_source(args, WHO_FIELDS if args.json else TEXT_FIELDS)) as source:
        if every is None:
            with progress("reading the GPUs"):  # a recording is read up to the moment that is meant
                lines = _lines(args, source)
            put(lines)
        else:
            _watch(args, source, every)
    return 0


def _lines(args: argparse.Namespace, source: SnapshotSource) -> list[str]:
    snapshot, age = source.joined()
    uses = device_state.uses(snapshot, process_facts(snapshot))
    shown = device_state.chosen(uses, frozenset(args.user), chosen_devices(snapshot, args.device))
    waiting, reserved = _waiting(args, snapshot), _reserved(args, snapshot)
    if args.json:
        content = who.to_json(snapshot, shown, waiting, reserved=reserved, age=age)
        return [json_text(content, indent=2 if args.watch is None else None)]
    if not (shown or waiting.tickets or snapshot.recorded):
        options.check_users(args.user)
    width = terminal.width()
    lines = who.to_text(snapshot, shown, waiting, reserved=reserved, width=width, paint=style(), age=age)
    deeds = [] if snapshot.recorded else options.own_deeds(args)
    return [*lines, *([""] if deeds else []), *deeds]


# The queue and the reservations need the reader of the site's rules, so they are loaded only where there are any.


def _reserved(args: argparse.Namespace, snapshot: Snapshot) -> ReservationCalendar | None:
    """Return the reservations of now and later, or None if there are none or they cannot be read."""
    if (directory := _directory_with(args, "reserve.")) is None:
        return None
    from gpuguard.queue.reservations import reservation_calendar

    try:
        uuids = [device.uuid for device in snapshot.devices]
        calendar = reservation_calendar(directory, uuids, snapshot.claims, time.time())
    except (ClaimError, OSError):
        return None
    # Reservations of a group are shown as well, because nothing here says which of these users are in it.
    shown = [status for status in calendar.statuses if not args.user or status.reservation.user in (*args.user, None)]
    return replace(calendar, statuses=tuple(shown))


def _waiting(args: argparse.Namespace, snapshot: Snapshot) -> who.WaitingRequests:
    """Return the requests that wait, as `gpuguard queue` ranks them."""
    if (directory := _directory_with(args, "ticket.")) is None:
        return who.WaitingRequests()
    from gpuguard.queue.reasons import unplanned_texts
    from gpuguard.queue.state import read_queue

    try:
        queue = read_queue(directory, snapshot)
    except (GpuguardError, OSError):
        return who.WaitingRequests()  # the claims cannot be read either, and that is reported
    tickets = [position.ticket for position in queue.positions]
    shown = [ticket for ticket in tickets if not args.user or ticket.user in args.user]
    return who.WaitingRequests(shown, unplanned_texts(queue, args.user))


def _directory_with(args: argparse.Namespace, kind: str) -> LockDirectory | None:
    """Return the claim directory, or None if it has no file of that kind."""
    try:
        directory = options.directory_of(args)
        there = directory.has(kind)
    except (ClaimError, OSError):
        return None
    return directory if there else None


def chosen_devices(snapshot: Snapshot, words: Sequence[str]) -> frozenset[str]:
    """Return the uuids that ``["0,3", "GPU-ab"]`` means; a divided device includes its instances.

    Raises:
        InvalidRequest: a word names no device, or several.
    """
    if not words:
        return frozenset()
    from gpuguard.request import resolve  # 2 ms, for --device alone

    labels = {device.label: device.uuid for device in snapshot.devices if device.parent_uuid}
    named = [part for text in words for part in options.selectors("--device", text) or ()]
    chosen = set(resolve([labels.get(name, name) for name in named], snapshot.devices, "--device"))
    return frozenset(device.uuid for device in snapshot.devices if chosen & {device.uuid, device.parent_uuid})


def _watch(args: argparse.Namespace, source: SnapshotSource, every: float) -> None:
    """Show the lines every *every* seconds until Ctrl-C, on a terminal always at the same place."""
    on_screen = terminal.can_redraw() and not args.json
    lines = _lines(args, source)  # a fault in the first sample ends the command; later ones are shown and may pass
    with terminal.screen(alternate=on_screen):
        while True:
            if on_screen:
                terminal.draw(terminal.fitting(lines, _("use --device or --user")))
            else:
                put(lines)
            time.sleep(every)
            try:
                lines = _lines(args, source)
            except InvalidRequest:
                raise
            except GpuguardError as error:
                lines = [local_time(time.time(), "%H:%M:%S"), *map(neutralise, translated(str(error)).splitlines())]
