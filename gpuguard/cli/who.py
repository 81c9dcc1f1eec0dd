"""Show who uses which GPU, who has claimed it, and what it does.

gpuguard who                   all GPUs, their claims and processes, totals per user
gpuguard who --user alice      only what is alice's
gpuguard who --watch 5s        again every 5 s, until Ctrl-C
gpuguard who --hosts a,b,c     those of other hosts, over ssh: see docs/fleet.md
gpuguard who --json            one object for programs: see docs/json.md

While `gpuguard daemon` runs, its last look is shown, a few seconds old; --fresh asks the driver all the same.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard import device_state
from gpuguard.cli import terminal
from gpuguard.cli.fleet import add_fleet_options, has_hosts
from gpuguard.cli.options import SnapshotSource, add_source_options, check_users, directory_of
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.model import TEXT_FIELDS, WHO_FIELDS, Gap, Snapshot
from gpuguard.procfs import in_first_pid_namespace, process_facts
from gpuguard.sanitize import neutralise
from gpuguard.views import who
from gpuguard.views.text import json_text, put, style

if TYPE_CHECKING:
    import argparse

    from gpuguard.claims.directory import LockDirectory
    from gpuguard.claims.watch import ClaimWatcher
    from gpuguard.queue.reservations import ReservationCalendar

_FEWER = "use --device or --user"
_OTHER_NAMESPACE = (
    "the pids are those of another pid namespace (a container's host): users and commands cannot be told from in here"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--user", metavar="NAME", action="append", default=[], help="only this user's (repeatable)")
    parser.add_argument(
        "--device",
        metavar="D",
        action="append",
        default=[],
        help="only these: an index, a uuid or its beginning, 0,GPU-ab",
    )
    parser.add_argument(
        "--watch",
        metavar="EVERY",
        nargs="?",
        const="2s",
        help="show again and again (default: every 2s); temperature and power in the text are up to 1.5s old",
    )
    parser.add_argument("--json", action="store_true", help="one object for programs; with --watch one line per look")
    parser.add_argument("--fresh", action="store_true", help="ask the driver, even if the daemon did so just now")
    add_fleet_options(parser)
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    if has_hosts(args):
        from gpuguard.cli import fleet

        return fleet.who(args)
    every = None if args.watch is None else _every(args.watch)
    source = SnapshotSource(args, WHO_FIELDS if args.json else TEXT_FIELDS)
    try:
        if every is None:
            put(_look(args, source), sys.stdout)
        else:
            _watch(args, source, every)
    finally:
        source.close()
    return 0


def _every(text: str) -> float:
    from gpuguard.cli.options import quantity
    from gpuguard.units import parse_duration

    every = quantity("--watch", text, parse_duration)
    if every is None or every < 0.1:
        raise InvalidRequest("--watch needs at least 100ms between two looks.")
    return every


def _look(args: argparse.Namespace, source: SnapshotSource) -> list[str]:
    snapshot, age = source.sample()
    snapshot = with_claims(args, snapshot, source.lookout)
    found = device_state.uses(snapshot, process_facts(snapshot))
    shown = device_state.chosen(found, frozenset(args.user), chosen_devices(snapshot, args.device))
    waiting, reserved = _waiting(args), _reserved(args, snapshot)
    if args.json:
        return [
            json_text(
                who.to_json(snapshot, shown, waiting, reserved=reserved, age=age),
                indent=2 if args.watch is None else None,
            )
        ]
    if not (shown or waiting or snapshot.recorded):
        check_users(args.user)
    return who.to_text(
        snapshot,
        shown,
        waiting,
        reserved=reserved,
        width=terminal.size()[0],
        paint=style(sys.stdout, os.environ),
        age=age,
    )


def _reserved(args: argparse.Namespace, snapshot: Snapshot) -> ReservationCalendar | None:
    """For whom devices are kept, or will be."""
    if not _there_is(args, "reserve."):
        return None
    from gpuguard.queue.reservations import reservation_calendar

    try:
        uuids = [device.uuid for device in snapshot.devices]
        found = reservation_calendar(directory_of(args), uuids, snapshot.claims, time.time())
    except (ClaimError, OSError):
        return None
    judged = tuple(one for one in found.judged if not args.user or one.reservation.user in args.user)
    return replace(found, judged=judged)


def _there_is(args: argparse.Namespace, kind: str) -> bool:
    """Whether the directory of the claims has a file of that kind: else its module is not worth loading."""
    try:
        directory = directory_of(args)
        return any(name.startswith(directory.prefix + kind) for name in os.listdir(directory.records))
    except (ClaimError, OSError):
        return False


def _waiting(args: argparse.Namespace) -> list[device_state.QueuedRequest]:
    """Who waits, in order of arrival: `gpuguard queue` knows when they start."""
    if not _there_is(args, "ticket."):
        return []
    from gpuguard.queue.tickets import read_tickets

    try:
        tickets, _ = read_tickets(directory_of(args))
    except (ClaimError, OSError):
        return []  # the claims are missing too, and that is said
    return [
        device_state.QueuedRequest(one.user, one.pid, one.num_gpus, one.since, one.note, one.command)
        for one in sorted(tickets, key=lambda ticket: ticket.since)
        if not args.user or one.user in args.user
    ]


def with_claims(args: argparse.Namespace, snapshot: Snapshot, lookout: ClaimWatcher) -> Snapshot:
    """*snapshot* with the claims; when they cannot be read it says so, and the devices are shown all the same."""
    if snapshot.recorded:
        return snapshot  # with the claims of then
    gaps = tuple(gap for gap in snapshot.gaps if gap.field != "claims")  # what the daemon could not read, we may
    if any(not device.processes_plausible for device in snapshot.devices) and not in_first_pid_namespace():
        gaps += (Gap(None, "processes", _OTHER_NAMESPACE),)
    try:
        directory = directory_of(args)
        claims = lookout.look(directory, [device.uuid for device in snapshot.devices], snapshot.claims)
    except ClaimError as error:
        return replace(snapshot, gaps=(*gaps, Gap(None, "claims", " ".join(str(error).split()))))
    return _with_quarantine(directory, replace(snapshot, claims=claims, gaps=gaps))


def _with_quarantine(directory: LockDirectory, snapshot: Snapshot) -> Snapshot:
    """*snapshot* in which being quarantined is a problem of the device, as it is for whoever wants it."""
    from gpuguard.claims.restrictions import against

    why = against(directory, [device.uuid for device in snapshot.devices], None, time.time())
    if not why:
        return snapshot
    texts = [why.get(device.uuid) or why.get(device.parent_uuid or "") for device in snapshot.devices]
    return replace(
        snapshot,
        devices=tuple(
            replace(device, problems=(*(device.problems or ()), text)) if text else device
            for device, text in zip(snapshot.devices, texts, strict=True)
        ),
    )


def chosen_devices(snapshot: Snapshot, words: list[str]) -> frozenset[str]:
    """The uuids that ``["0,3", "GPU-ab"]`` means; a divided device stands for its instances too.

    Raises:
        InvalidRequest: a word names no device, or several.
    """
    if not words:
        return frozenset()
    from gpuguard.cli.options import selectors
    from gpuguard.request import resolve

    labels = {who.device_label(device): device.uuid for device in snapshot.devices if device.parent_uuid}
    named = [part for text in words for part in selectors("--device", text) or ()]
    found = set(resolve([labels.get(one, one) for one in named], snapshot.devices, "--device"))
    return frozenset(device.uuid for device in snapshot.devices if found & {device.uuid, device.parent_uuid})


def _watch(args: argparse.Namespace, source: SnapshotSource, every: float) -> None:
    """Look every *every* seconds until Ctrl-C, on a terminal always at the same place."""
    import signal

    on_screen = terminal.can_redraw(sys.stdout) and not args.json
    former = signal.signal(signal.SIGTERM, terminal.leave)
    lines = _look(args, source)  # a fault of the first look ends the command; later ones are shown and may pass
    try:
        if on_screen:
            sys.stdout.write(terminal.ENTER)
        while True:
            put([terminal.drawn(terminal.fitting(lines, _FEWER))] if on_screen else lines, sys.stdout)
            sys.stdout.flush()
            time.sleep(every)
            try:
                lines = _look(args, source)
            except InvalidRequest:
                raise
            except GpuguardError as error:
                lines = [time.strftime("%H:%M:%S"), *map(neutralise, str(error).splitlines())]
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, former)
        if on_screen:
            sys.stdout.write(terminal.LEAVE)
            sys.stdout.flush()
