"""Have GPUs kept for a time: no other user starts on them then, and your `gpuguard run` need not wait.

gpuguard reserve -n 2 --from 09:00 --for 3h           for yourself, as far as the site permits users
gpuguard reserve -n 1 --model H100 --from "in 2h" --for 1h
gpuguard reserve                                      what is reserved
gpuguard reserve --cancel 3f0c9e21                    when you are done: others may start at once
gpuguard reserve -n 2 --group vision --from "Mon 09:00" --for 3h    for all members of a group that you are in
sudo gpuguard reserve -n 4 --from 2026-11-23T14:00 --for 2h --user alice --note course

No job is ended for a reservation: jobs that might still run then do not start before, those with a --time-limit do.
It is over at its end, or when its user has had no claim for a while (30m, unless the site says otherwise).
One for a group is for each of its members (`id` shows your groups), and counts against the limit of who made it.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import probe
from gpuguard.claims.restrictions import QUARANTINED, quarantine_text, read_restrictions
from gpuguard.cli import options, terminal
from gpuguard.cli.event_log import log_event
from gpuguard.errors import GpuguardError, ImpossibleRequest, InvalidRequest
from gpuguard.locale import N_, _, translated
from gpuguard.model import HEALTH, MEMORY, MODEL, PROCESSES, Event, EventOutcome, Snapshot
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.reservations import (
    MOST_NOTE,
    GroupMembers,
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
from gpuguard.select import choose, not_enough, possible, usable_together
from gpuguard.units import format_count, parse_duration
from gpuguard.users import is_in_group, user_name
from gpuguard.views import queue as view
from gpuguard.views.text import put, put_json
from gpuguard.yaml_files.decoder import GROUP, Accounts

_FORMS = N_('write 09:00, "tomorrow 09:00", "Mon 09:00", 2026-11-23T14:00, "in 2h" or now')
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MOMENT = re.compile(
    rf"(?:(\d{{4}})-(\d{{1,2}})-(\d{{1,2}})[T ]|(tomorrow) |({'|'.join(_WEEKDAYS)})[a-z]* )?(\d{{1,2}}):(\d{{2}})"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which GPUs")
    options.add_table(group, ("-n --num-gpus", "N", "how many (default: 1)"))
    options.add_device_options(group, "only of these: indices, uuids or beginnings of uuids, as in 0,3")
    options.add_table(group, ("--exclude", "LIST", "not these"))
    options.add_repeatable(group, ("--model", "GLOB", "the name fits, as in H100"))
    options.add_vendor_option(group)
    options.add_table(
        group,
        ("--min-total", "SIZE", "each has at least so much memory in all"),
        ("--mig", "PROFILE", "instances of this profile: 3g.40gb (MIG), cpx (AMD)"),
    )
    group = parser.add_argument_group("when, and for whom")
    group.add_argument(
        "--from",
        dest="from_",
        metavar="TIME",
        help='09:00 (the next one), "tomorrow 09:00", "Mon 09:00", 2026-11-23T14:00, "in 2h" (default: now)',
    )
    options.add_table(
        group.add_mutually_exclusive_group(),
        ("--for", "DURATION", "how long, as in 3h", {"dest": "for_"}),
        ("--until", "TIME", "until then: the first such time after it begins"),
    )
    options.add_table(
        group.add_mutually_exclusive_group(),
        ("--user", "NAME", "for another user, as root"),
        ("--group", "NAME", "for all members of a group of yours (root: of any)"),
    )
    options.add_table(group, ("--note", "TEXT", "what it is for; everybody can read it"))
    options.add_table(parser, ("--cancel", "ID", "end a reservation of yours (root: anybody's)"), options.JSON)
    options.add_source_options(parser)
    parser.set_defaults(fresh=False)


def main(args: argparse.Namespace) -> int:
    wanted = [
        name
        for name in ("num_gpus", "devices", "from_", "for_", "until", "user", "group", "note")
        if getattr(args, name) is not None
    ]
    if args.cancel is None and wanted:
        return _make(args)
    if args.cancel is not None and wanted:
        raise InvalidRequest(_("--cancel ends a reservation: leave out what makes one."))
    with closing(options.snapshot_source(args)) as source:
        snapshot, _age = source.sample()
    directory = options.directory_of(args)
    calendar = _calendar(directory, snapshot)
    if args.cancel is not None:
        return _cancel(args, directory, calendar)
    if args.json:
        put_json({"schema": 1, "reservations": view.reservations_json(calendar)})
    else:
        put(view.reservations_text(calendar, width=terminal.width()) or [_("nothing is reserved.")])
    return 0


def _calendar(directory: LockDirectory, snapshot: Snapshot) -> ReservationCalendar:
    uuids = [device.uuid for device in snapshot.devices]
    return reservation_calendar(directory, uuids, probe(directory, uuids), time.time())


def _make(args: argparse.Namespace) -> int:
    begins, ends = _times(args)
    whose = _whose(args)
    # Several jobs may use the reservation, each of them one MIG instance.
    request = replace(options.request_of(args), allow_mig_set=True)
    directory = options.directory_of(args, make=True)
    snapshot = options.sampled(args, {MEMORY, PROCESSES, MODEL, HEALTH})
    devices = _devices(directory, snapshot, request, begins)
    now = time.time()
    what: dict[str, Any] = {"num_gpus": request.num_gpus, "devices": devices, "begins": begins, "ends": ends}
    wanted = Reservation(id="", maker=os.geteuid(), made=now, note=args.note, **whose, **what)
    uuids = [device.uuid for device in snapshot.devices]
    if why := what_if(wanted, _calendar(directory, snapshot), uuids, directory):
        raise GpuguardError(
            _("this cannot be reserved: {why}.\n`gpuguard reserve` shows what is reserved already.").format(
                why=translated(why)
            )
        )
    made = write_reservation(directory, wanted)
    try:
        # Another user may have made a reservation at the same moment, and then the first of the two counts.
        statuses = _calendar(directory, snapshot).statuses
        status = next((status for status in statuses if status.reservation.key == made.key), None)
        if status is None or status.why_not:
            raise GpuguardError(
                _("this cannot be reserved: {why_not}.").format(
                    why_not=translated(status.why_not) if status else _("its file is gone")
                )
            )
    except BaseException:  # also if that cannot be checked, because no user would know of the reservation
        remove_reservation(directory, made)
        raise
    _log(args, "made", made)
    if args.json:
        put_json({"schema": 1, "reservations": [view.reservation_json(status, now)]})
    else:
        put(map(neutralise, _made_lines(status, snapshot, now)))
    return 0


def _whose(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a Reservation that say whom it is for."""
    accounts = Accounts()
    if args.group is not None:
        gid = accounts.known[GROUP, accounts.group(args.group)]
        if os.geteuid() and not is_in_group(os.geteuid(), gid):
            raise InvalidRequest(
                _(
                    "you are not in the group {group}, as the user database of this machine has it: ask one of its "
                    "members, or an administrator."
                ).format(group=args.group)
            )
        return {"uid": None, "user": None, "gid": gid, "group": args.group, "members": GroupMembers(gid)}
    uid = os.geteuid() if args.user is None else accounts.user(args.user)
    if os.geteuid() not in (0, uid):
        raise InvalidRequest(_("only root can reserve for others: leave --user out, or ask an administrator."))
    return {"uid": uid, "user": user_name(uid)}


def _times(args: argparse.Namespace) -> tuple[float, float]:
    """Return the begin and the end in unix time."""
    now = time.time()
    seconds = options.quantity("--for", args.for_, parse_duration)
    if seconds is None and args.until is None:
        raise InvalidRequest(_("say for how long: --for 3h, or --until 12:00."))
    begins = parse_when(args.from_ or "now", now)
    ends = parse_when(args.until, begins, "--until") if seconds is None else begins + seconds
    if ends < begins + 60 or ends <= now:
        raise InvalidRequest(_("that would be over at once: reserve for at least 1m, and not in the past."))
    if args.note and len(args.note) > MOST_NOTE:
        raise InvalidRequest(_("--note has at most {most_note} characters.").format(most_note=MOST_NOTE))
    return round(begins, 3), round(ends, 3)


def parse_when(text: str, now: float, option: str = "--from") -> float:
    """Return the unix time that the *text* of an option means, in local time.

    "09:00" means the next one, and so does "Mon 09:00".  A time that the beginning of summer time skips is moved later.

    Raises:
        InvalidRequest: the text is no time, or a date in the past.
    """
    words = " ".join(text.strip().lower().split())
    if words == "now":
        return now
    if words.startswith("in "):
        return now + (options.quantity(option, words[3:], parse_duration) or 0.0)
    match = _MOMENT.fullmatch(words.replace("t", " ") if words[:1].isdecimal() else words)
    if not match:
        raise InvalidRequest(
            _("{option}: {text!r} is no time: {forms}.").format(option=option, text=text[:40], forms=_(_FORMS))
        )
    year, month, day, tomorrow, weekday, hour, minute = match.groups()
    date = datetime.fromtimestamp(now).replace(second=0, microsecond=0) + timedelta(days=bool(tomorrow))
    if weekday:
        date += timedelta(days=(_WEEKDAYS.index(weekday) - date.weekday()) % 7)
    try:
        date = date.replace(int(year), int(month), int(day)) if year else date
        when = date.replace(hour=int(hour), minute=int(minute))
    except ValueError:  # such as 25:00, or the 30th of February
        raise InvalidRequest(
            _("{option}: there is no {text!r}: {forms}.").format(option=option, text=text[:40], forms=_(_FORMS))
        ) from None
    if when.timestamp() < now - 60:
        if year:
            raise InvalidRequest(
                _("{option} {text} is in the past: {forms}.").format(option=option, text=text[:40], forms=_(_FORMS))
            )
        when += timedelta(days=7 if weekday else 1)
    return when.timestamp()


def _devices(directory: LockDirectory, snapshot: Snapshot, request: Request, when: float) -> tuple[str, ...]:
    """Return the uuids of all devices that will do, in use or not.

    Raises:
        ImpossibleRequest: there are too few on this machine.
    """
    choice = choose(snapshot, request, {})
    error = not_enough(snapshot, request, choice)
    if len(choice.devices) < request.num_gpus and isinstance(error, ImpossibleRequest):
        raise error
    quarantined = read_restrictions(directory, QUARANTINED, when)
    could = [device for device in possible(choice).devices if device.uuid not in quarantined]
    could.sort(key=lambda device: device.parent_uuid is not None)  # if both kinds will do, prefer whole GPUs
    kind = usable_together(could, request.num_gpus)
    if len(kind) < request.num_gpus:
        reasons = "; ".join(sorted({translated(quarantine_text(restriction)) for restriction in quarantined.values()}))
        why = reasons or _("whole GPUs and instances do not mix")
        raise GpuguardError(_("too few GPUs are in service then ({why}).").format(why=why))
    return tuple(device.uuid for device in kind)


def _made_lines(status: ReservationStatus, snapshot: Snapshot, now: float) -> list[str]:
    made, whose = status.reservation, translated(status.reservation.whose)
    begin, end = translated(clock_text(made.begins, now)), translated(clock_text(made.ends, now))
    until = _("{begin} to {end}").format(begin=begin, end=end)
    lines = [
        _("reserved: {count} for {user} from {until} (id {id}).").format(
            count=format_count(made.num_gpus, "GPU"), user=whose, until=until, id=made.id
        )
    ]
    if status.no_show_at is not None and status.no_show_at < made.ends:
        lines.append(
            _("It is over at {time} unless {user} makes a claim by then.").format(
                time=translated(clock_text(status.no_show_at, now)), user=whose
            )
        )
    busy = sum(device.uuid in made.devices and bool(device.processes) for device in snapshot.devices)
    if len(made.devices) - busy < made.num_gpus:
        lines.append(
            _(
                "Now {busy} of the {devices} GPUs that will do are in use, and no job is ended for it: "
                "`gpuguard who` shows whose."
            ).format(busy=busy, devices=len(made.devices))
        )
    return lines


def _cancel(args: argparse.Namespace, directory: LockDirectory, calendar: ReservationCalendar) -> int:
    named = [status for status in calendar.statuses if status.reservation.id == args.cancel]
    own = [status for status in named if status.reservation.maker == os.geteuid()] or named
    if not own:
        raise GpuguardError(
            _("there is no reservation {cancel}: `gpuguard reserve` shows those that there are.").format(
                cancel=args.cancel
            )
        )
    if len(own) > 1:
        raise GpuguardError(
            _("several users have a reservation {cancel}: run this as one of them.").format(cancel=args.cancel)
        )
    cancelled = own[0].reservation
    remove_reservation(directory, cancelled)
    _log(args, "cancelled", cancelled)
    if args.json:
        put_json({"schema": 1, "reservations": [view.reservation_json(own[0], calendar.now)]})
    else:
        put(
            [
                _("cancelled: reservation {cancel} of {user}.").format(
                    cancel=args.cancel, user=neutralise(translated(cancelled.whose))
                )
            ]
        )
    return 0


def _log(args: argparse.Namespace, outcome: EventOutcome, reservation: Reservation) -> None:
    event = Event(
        time=time.time(),
        kind="reserve",
        outcome=outcome,
        user=reservation.user,
        message=reservation.note,
        facts=(
            ("num_gpus", reservation.num_gpus),
            ("begins_unix_seconds", reservation.begins),
            ("ends_unix_seconds", reservation.ends),
            ("by_uid", os.getuid()),
            ("group", reservation.group),
        ),
    )
    log_event(args, event)
