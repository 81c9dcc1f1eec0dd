"""Have GPUs kept for a time: nobody else starts on them then, and your `gpuguard run` need not wait.

gpuguard reserve -n 2 --from 09:00 --for 3h           for yourself, as far as the site permits users
gpuguard reserve -n 1 --model H100 --from "in 2h" --for 1h
gpuguard reserve                                      what is reserved
gpuguard reserve --cancel 3f0c9e21                    when you are done: others may start at once
sudo gpuguard reserve -n 4 --from 2026-11-23T14:00 --for 2h --user alice --note course

No job is ended for a reservation: jobs that might still run then do not start before, those with a --time-limit do.
It is over at its end, or when its user has had no claim for a while (30m, unless the site says otherwise).
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from gpuguard.claims.directory import LockDirectory
from gpuguard.cli import terminal
from gpuguard.cli.deny import choose_log
from gpuguard.cli.options import (
    add_source_options,
    backend_of,
    directory_of,
    quantity,
    selectors,
    snapshot_source,
    whole_number,
)
from gpuguard.cli.times import parse_when
from gpuguard.errors import GpuguardError, ImpossibleRequest, InvalidRequest
from gpuguard.model import HEALTH, MEMORY, MODEL, PROCESSES, Snapshot
from gpuguard.queue.reservations import (
    MOST_NOTE,
    Reservation,
    ReservationCalendar,
    ReservationStatus,
    clock_text,
    remove_reservation,
    reservation_calendar,
    what_if,
    write_reservation,
)
from gpuguard.request import Request
from gpuguard.sanitize import neutralise
from gpuguard.units import parse_bytes, parse_duration
from gpuguard.views import queue as view
from gpuguard.views.text import json_text, put


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which GPUs")
    group.add_argument("-n", "--num-gpus", metavar="N", help="how many (default: 1)")
    group.add_argument("--gpus", metavar="LIST", help="only of these: indices, uuids or beginnings of uuids, as in 0,3")
    group.add_argument("--exclude", metavar="LIST", help="not these")
    group.add_argument("--model", metavar="GLOB", action="append", default=[], help="the name fits, as in H100")
    group.add_argument("--min-total", metavar="SIZE", help="each has at least so much memory in all")
    group.add_argument("--mig", metavar="PROFILE", help="MIG instances of this profile, as in 3g.40gb")
    group = parser.add_argument_group("when, and for whom")
    group.add_argument(
        "--from",
        dest="from_",
        metavar="TIME",
        help='09:00 (the next one), "tomorrow 09:00", 2026-11-23T14:00, "in 2h" (default: now)',
    )
    group.add_argument("--for", dest="for_", metavar="DURATION", help="how long, as in 3h")
    group.add_argument("--user", metavar="NAME", help="for somebody else, as root")
    group.add_argument("--note", metavar="TEXT", help="what it is for; everybody can read it")
    parser.add_argument("--cancel", metavar="ID", help="end a reservation of yours (root: anybody's)")
    parser.add_argument("--json", action="store_true", help="one object for programs: see docs/json.md")
    add_source_options(parser)
    parser.set_defaults(fresh=False)


def main(args: argparse.Namespace) -> int:
    wanted = [name for name in ("num_gpus", "gpus", "from_", "for_", "user", "note") if getattr(args, name) is not None]
    if args.cancel is not None:
        if wanted:
            raise InvalidRequest("--cancel ends a reservation: leave out what makes one.")
        return _cancel(args)
    if not wanted:
        return _show(args, _now(args))
    return _make(args)


def _now(args: argparse.Namespace) -> ReservationCalendar:
    source = snapshot_source(args)
    try:
        snapshot, _ = source.sample()
    finally:
        source.close()
    return _reserved(directory_of(args), snapshot)


def _reserved(directory: LockDirectory, snapshot: Snapshot) -> ReservationCalendar:
    from gpuguard.claims.probe import probe

    uuids = [device.uuid for device in snapshot.devices]
    return reservation_calendar(directory, uuids, probe(directory, uuids), time.time())


def _show(args: argparse.Namespace, found: ReservationCalendar) -> int:
    if args.json:
        put([json_text({"schema": 1, "reservations": view.reservations_json(found)})], sys.stdout)
    else:
        put(view.reservations_text(found, width=terminal.size()[0]) or ["nothing is reserved."], sys.stdout)
    return 0


def _make(args: argparse.Namespace) -> int:
    begins, ends = _times(args)
    uid, user = _whom(args)
    request, directory, backend = _request(args), directory_of(args, make=True), backend_of(args)
    try:
        snapshot = backend.sample({MEMORY, PROCESSES, MODEL, HEALTH})
    finally:
        backend.close()
    devices = _devices(directory, snapshot, request, begins)
    now = time.time()
    wanted = Reservation("", os.geteuid(), uid, user, request.num_gpus, begins, ends, devices, now, args.note)
    if why := what_if(wanted, _reserved(directory, snapshot), [device.uuid for device in snapshot.devices]):
        raise GpuguardError(f"this cannot be reserved: {why}.\n`gpuguard reserve` shows what is reserved already.")
    made = write_reservation(directory, wanted)
    try:
        # Somebody may have done the same at the same moment: then whoever came first has it.
        status = next((one for one in _reserved(directory, snapshot).statuses if one.reservation.key == made.key), None)
        if status is None or status.why_not:
            raise GpuguardError(f"this cannot be reserved: {status.why_not if status else 'its file is gone'}.")
    except BaseException:  # also where that cannot be seen: nobody would know that it is there
        remove_reservation(directory, made)
        raise
    _write_down(args, "made", made)
    return _tell(args, status, snapshot, now)


def _times(args: argparse.Namespace) -> tuple[float, float]:
    now = time.time()
    seconds = quantity("--for", args.for_, parse_duration)
    if seconds is None:
        raise InvalidRequest("say for how long: --for 3h.")
    begins = parse_when(args.from_ or "now", now)
    if seconds < 60 or begins + seconds <= now:
        raise InvalidRequest("that would be over at once: reserve for at least 1m, and not in the past.")
    if args.note and len(args.note) > MOST_NOTE:
        raise InvalidRequest(f"--note has at most {MOST_NOTE} characters.")
    return round(begins, 3), round(begins + seconds, 3)


def _whom(args: argparse.Namespace) -> tuple[int, str]:
    from gpuguard.policies.files.decoder import Accounts
    from gpuguard.users import user_name

    uid = os.geteuid() if args.user is None else Accounts().user(args.user)
    if os.geteuid() not in (0, uid):
        raise InvalidRequest("only root can reserve for others: leave --user out, or ask an administrator.")
    return uid, user_name(uid)


def _request(args: argparse.Namespace) -> Request:
    devices, number = selectors("--gpus", args.gpus), whole_number("-n", args.num_gpus)
    if devices is not None and number is not None and number > len(devices):
        raise InvalidRequest(f"-n {number} wants more than the {len(devices)} that --gpus {args.gpus} names.")
    return Request(
        num_gpus=number if number is not None else len(devices or "1"),
        devices=devices,
        exclude=selectors("--exclude", args.exclude) or (),
        models=tuple(args.model),
        min_total=quantity("--min-total", args.min_total, parse_bytes),
        mig=args.mig,
    )


def _devices(directory: LockDirectory, snapshot: Snapshot, request: Request, when: float) -> tuple[str, ...]:
    """The uuids of all that will do, whoever uses them now.

    Raises:
        ImpossibleRequest: there are too few on this machine.
    """
    from gpuguard.claims.restrictions import QUARANTINED, quarantine_text, read_restrictions
    from gpuguard.select import choose, not_enough, possible, usable_together

    choice = choose(snapshot, request, {})
    error = not_enough(snapshot, request, choice)
    if len(choice.devices) < request.num_gpus and isinstance(error, ImpossibleRequest):
        raise error
    marks = read_restrictions(directory, QUARANTINED, when)
    could = [device for device in possible(choice).devices if device.uuid not in marks]
    could.sort(key=lambda device: device.parent_uuid is not None)  # between equals whole GPUs
    kind = usable_together(could, request.num_gpus)
    if len(kind) < request.num_gpus:
        reasons = "; ".join(sorted({quarantine_text(mark) for mark in marks.values()}))
        raise GpuguardError(
            f"too few devices are in service then ({reasons or 'whole GPUs and instances do not mix'})."
        )
    return tuple(device.uuid for device in kind)


def _tell(args: argparse.Namespace, status: ReservationStatus, snapshot: Snapshot, now: float) -> int:
    if args.json:
        put([json_text({"schema": 1, "reservations": [view.reservation_json(status, now)]})], sys.stdout)
        return 0

    it = status.reservation
    gpus = f"{it.num_gpus} GPU{'s' * (it.num_gpus != 1)}"
    lines = [
        f"reserved: {gpus} for {it.user} from {clock_text(it.begins, now)} to {clock_text(it.ends, now)} (id {it.id})."
    ]
    if status.no_show_at is not None:
        lines.append(f"It is over at {clock_text(status.no_show_at, now)} unless {it.user} makes a claim by then.")
    busy = _in_use_until_then(it, snapshot)
    if len(it.devices) - len(busy) < it.num_gpus:
        lines.append(
            f"Now {len(busy)} of the {len(it.devices)} devices that will do are in use, and no job is ended for it: "
            "`gpuguard who` shows whose."
        )
    put([neutralise(line) for line in lines], sys.stdout)
    return 0


def _in_use_until_then(it: Reservation, snapshot: Snapshot) -> list[str]:
    return [device.uuid for device in snapshot.devices if device.uuid in it.devices and device.processes]


def _cancel(args: argparse.Namespace) -> int:
    directory, found = directory_of(args), _now(args)
    named = [one for one in found.statuses if one.reservation.id == args.cancel]
    mine = [one for one in named if one.reservation.maker == os.geteuid()] or named
    if not mine:
        raise GpuguardError(f"there is no reservation {args.cancel}: `gpuguard reserve` shows those that there are.")
    if len(mine) > 1:
        raise GpuguardError(f"several users have a reservation {args.cancel}: run this as one of them.")
    remove_reservation(directory, mine[0].reservation)
    _write_down(args, "cancelled", mine[0].reservation)
    if args.json:
        put([json_text({"schema": 1, "reservations": [view.reservation_json(mine[0], found.now)]})], sys.stdout)
    else:
        put([f"cancelled: reservation {args.cancel} of {neutralise(mine[0].reservation.user)}."], sys.stdout)
    return 0


def _write_down(args: argparse.Namespace, outcome: str, one: Reservation) -> None:
    """Leave an Event where the other commands do; a log that cannot be written stops nobody."""
    from gpuguard.history import audit_log
    from gpuguard.model import Event

    choose_log(args)
    facts = (
        ("num_gpus", one.num_gpus), ("begins_unix_seconds", one.begins), ("ends_unix_seconds", one.ends),
        ("by_uid", os.getuid()),
    )  # fmt: skip
    audit_log.append(Event(time.time(), "reserve", outcome, one.user, message=one.note, facts=facts))
