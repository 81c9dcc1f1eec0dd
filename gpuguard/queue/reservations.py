"""The reservation store: the files of reservations, which of them count, and when each is over.

    reserve.UID.ID.json        a reservation; users make them for themselves and for their groups, root for anybody
    arrived.UID.MAKER.ID       made by a user it is for: its time says when a claim of theirs last began or ended; it
                               has .RANDOM behind it if another user has made a file of that name
    waived.UID.MAKER.ID        made by the user it is for, who does not want it; likewise
    daemon/arrived.UID.MAKER.ID  the time when the daemon last saw such a claim (gGID instead of UID: of a group), ...
    daemon/arrivals            ... and the time when it last looked: while there is a daemon, these alone count

The files outlive the command that made them, and are removed by their maker or by root when they have ended.  The file
system says whose a file is and when it was made, and the system's user database says which users are in a group.  A
reservation that its only user has waived is as good as removed.  A file that cannot be understood is reported.  Each
reader checks that users reserve no more than they may: what is too much does not count, beginning with the reservation
that was made last.  A reservation is over at its end, or when its users have had no claim for as long as the site
permits.

This module does not decide which devices are kept from which users: see calendar.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory, daemon_files, remove_if_same, written_at
from gpuguard.claims.disk_room import why_full
from gpuguard.claims.records import first_of_each, unfinished_path
from gpuguard.claims.restrictions import DENIED, denial_of, read_restrictions
from gpuguard.device_state import claims_readable, grouped
from gpuguard.errors import InvalidRequest, LockDirectoryError, shortage
from gpuguard.files import remove_leftover, status_in_place, write_file
from gpuguard.jsonio import decode
from gpuguard.locale import _, translated
from gpuguard.locale.messages import nsentence, plain, sentence
from gpuguard.model import HEALTH, MEMORY, PROCESSES, ClaimRecord, Snapshot
from gpuguard.queue.calendar import Reservation, can_be_met
from gpuguard.queue.priority import ReservationKeys, Ticket
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.tickets import LAST_TIME, IgnoredFile, checked_number, read_document, read_documents, touch
from gpuguard.units import format_duration, local_time
from gpuguard.users import accountable_uids, group_name, is_in_group, user_name
from gpuguard.vendors import names_instance

MAX_BYTES = 4096
MOST_OF_ONE = 100  # reservations of a user; a quota counts their devices, but only once all of them were read
MOST_NOTE = 200  # characters
MOST_COUNTED = 256  # with more, planning would take too long
MOST_GPUS = 4096
LOOKED_SECONDS = 600.0  # a daemon that has not looked for so long is none
_LOOKED = "arrivals"
USER_IS_DENIED = sentence("reservation.user_is_denied", "its user may make no claim now")
_NO_ROOM = sentence("reservation.no_room", "earlier reservations leave too few GPUs at that time")
_DAYS = (
    sentence("clock.mon", "Mon"), sentence("clock.tue", "Tue"), sentence("clock.wed", "Wed"),
    sentence("clock.thu", "Thu"), sentence("clock.fri", "Fri"), sentence("clock.sat", "Sat"),
    sentence("clock.sun", "Sun"),
)  # fmt: skip
_MONTHS = (
    sentence("clock.jan", "Jan"), sentence("clock.feb", "Feb"), sentence("clock.mar", "Mar"),
    sentence("clock.apr", "Apr"), sentence("clock.may", "May"), sentence("clock.jun", "Jun"),
    sentence("clock.jul", "Jul"), sentence("clock.aug", "Aug"), sentence("clock.sep", "Sep"),
    sentence("clock.oct", "Oct"), sentence("clock.nov", "Nov"), sentence("clock.dec", "Dec"),
)  # fmt: skip

Arrivals = Mapping[str, float]  # key of a reservation -> when a user of it last began or ended a claim


@dataclass(frozen=True)
class GroupMembers:
    """The users who are certainly in a group: ``uid in GroupMembers(gid)`` asks is_in_group() each time."""

    gid: int

    def __contains__(self, uid: object) -> bool:
        return isinstance(uid, int) and is_in_group(uid, self.gid) is True


@dataclass(frozen=True)
class ReservationStatus:
    """A reservation, and whether it counts."""

    reservation: Reservation
    why_not: str = ""  # why it does not count, a sentence, or "" if it does
    no_show_at: float | None = None  # unix time at which it is over without a claim, or None if its user has one
    over: bool = False  # whether it is over before its end, because its user came too late

    @property
    def counts(self) -> bool:
        """Whether devices are kept for it."""
        return not self.why_not and not self.over


@dataclass(frozen=True)
class ReservationCalendar:
    """All reservations at one moment."""

    statuses: tuple[ReservationStatus, ...] = ()  # of those that have not ended, the first made first
    ignored: tuple[IgnoredFile, ...] = ()  # files that cannot be understood
    now: float = 0.0  # unix time of that moment

    @property
    def reservations(self) -> tuple[Reservation, ...]:
        """The reservations that count."""
        return tuple(status.reservation for status in self.statuses if status.counts)

    @property
    def changes_at(self) -> float:
        """The unix time at which the next of the reservations begins, or is over by itself."""
        counting = [status for status in self.statuses if status.counts]
        ends = [status.no_show_at for status in counting if status.no_show_at is not None]
        times = [when for kept in self.reservations for when in (kept.begins, kept.ends)] + ends
        return min([when for when in times if when > self.now], default=math.inf)


@dataclass(frozen=True)
class _ReservationContent:
    """The content of a reservation's file."""

    uid: int  # of the user it is for; for a group its maker, so that a reader that knows no groups takes it for theirs
    num_gpus: int
    begins_unix_seconds: float
    ends_unix_seconds: float
    devices: tuple[str, ...]
    gid: int | None = None


def reservation_calendar(
    directory: LockDirectory, uuids: Collection[str], claims: Sequence[ClaimRecord], now: float
) -> ReservationCalendar:
    """Read the reservations and judge which count *now*, on a machine with these devices and living claims."""
    if not directory.has("reserve."):
        return ReservationCalendar(now=now)
    reservations, ignored, arrivals = read_reservations(directory, now)
    keys = read_queue_settings(directory).rules.reservations
    restrictions = read_restrictions(directory, DENIED, now)
    uids = {reservation.uid for reservation in reservations if reservation.uid is not None}
    denied = {uid for uid in uids if denial_of(restrictions, uid)}
    statuses = judge(reservations, uuids, claims, arrivals, keys, now, denied)
    return ReservationCalendar(tuple(statuses), tuple(ignored), now)


def with_reserved_instances(backend: Backend, directory: LockDirectory, snapshot: Snapshot) -> Snapshot:
    """Return *snapshot*, with the MIG instances if some are reserved: only reading health (39 calls) shows them."""
    if not directory.has("reserve."):
        return snapshot
    shown = {device.uuid for device in snapshot.devices}
    reservations, *_ = read_reservations(directory, snapshot.taken_at)
    reserved = {uuid for reservation in reservations for uuid in reservation.devices if names_instance(uuid)}
    return snapshot if reserved <= shown else snapshot.updated(backend.sample({MEMORY, PROCESSES, HEALTH}))


def judge(
    reservations: Sequence[Reservation],
    uuids: Collection[str],
    claims: Sequence[ClaimRecord],
    arrivals: Arrivals,
    keys: ReservationKeys,
    now: float,
    denied: Collection[int] = (),
) -> list[ReservationStatus]:
    """Return which of *reservations* count; *denied* holds the uids that may make no claim now."""
    statuses: list[ReservationStatus] = []
    counted: list[Reservation] = []
    for reservation in sorted(reservations, key=lambda reservation: (reservation.made, reservation.key)):
        if reservation.ends <= now:
            continue
        own = [
            claim
            for claim in claims
            if not set(claim.devices).isdisjoint(reservation.devices) and reservation.admits(claim.uid)
        ]
        claimed = {uuid for claim in own for uuid in claim.devices}
        reservation = replace(reservation, held=tuple(uuid for uuid in reservation.devices if uuid in claimed))
        arrival = arrivals.get(reservation.key, 0.0)
        deadline = max(reservation.begins, reservation.made, arrival) + keys.no_show
        # A claim that came later does not bring back devices that others were promised meanwhile.
        present = any(claim.since is None or claim.since < deadline for claim in own)
        if now >= deadline and not present:
            statuses.append(ReservationStatus(reservation, no_show_at=deadline, over=True))
            continue
        is_denied = reservation.uid in denied
        why_not = USER_IS_DENIED if is_denied else _not_allowed(reservation, counted, uuids, keys)
        if not why_not and not can_be_met(reservation, counted, uuids):
            why_not = _NO_ROOM
        if not why_not:
            counted.append(reservation)
        no_show_at = None if present and now >= reservation.begins else min(deadline, reservation.ends)
        statuses.append(ReservationStatus(reservation, why_not, no_show_at))
    return statuses


def what_if(
    wanted: Reservation, known: ReservationCalendar, uuids: Collection[str], directory: LockDirectory | None = None
) -> str:
    """Return why a new reservation would not count, and when there would be room for it, or "" if it would count."""
    others = known.reservations
    if why_not := _not_allowed(wanted, others, uuids, read_queue_settings(directory).rules.reservations):
        return why_not
    if can_be_met(wanted, others, uuids):
        return ""
    for begins in sorted(other.ends for other in others if other.ends > wanted.begins):
        moved = replace(wanted, begins=begins, ends=begins + wanted.ends - wanted.begins)
        if can_be_met(moved, others, uuids):
            return sentence(
                "reservation.room_later",
                "{why_not}, and enough from {time} on",
                why_not=_NO_ROOM,
                time=clock_text(begins, known.now),
            )
    return _NO_ROOM


def _not_allowed(
    wanted: Reservation, counted: Sequence[Reservation], uuids: Collection[str], keys: ReservationKeys
) -> str:
    """Return why *wanted* may not count beside *counted*, however much room they leave, or "" if it may."""
    owners = accountable_uids((wanted.maker, *(reservation.maker for reservation in counted)))
    own = [reservation for reservation in counted if owners[reservation.maker] == owners[wanted.maker]]
    if wanted.maker and (why_not := _beyond(wanted, keys, sum(reservation.num_gpus for reservation in own))):
        return sentence(
            "reservation.beyond",
            "{why_not} (by line.yaml of the site, or by default; root may reserve more)",
            why_not=why_not,
        )
    present = len(set(wanted.devices) & set(uuids))
    if present < wanted.num_gpus:
        return nsentence(
            "reservation.gpus_there",
            "only {number} of its GPUs is there",
            "only {number} of its GPUs are there",
            present,
        )
    if len(counted) >= MOST_COUNTED:
        return sentence("reservation.too_many", "there are more than {count} already", count=MOST_COUNTED)
    return ""


def _beyond(reservation: Reservation, keys: ReservationKeys, before: int) -> str:
    """Return why a user may not have this one with *before* devices in earlier ones, or "" if they may."""
    if before + reservation.num_gpus > keys.devices:
        if not keys.devices:
            return sentence(
                "reservation.none", "users may reserve no GPUs at a time here, all their reservations together"
            )
        gpus = nsentence("count.gpus", "{number} GPU", "{number} GPUs", keys.devices)
        if before:
            return sentence(
                "reservation.most_beside",
                "users may reserve {gpus} at a time here ({before} of them in earlier ones), all their reservations "
                "together",
                gpus=gpus,
                before=before,
            )
        return sentence(
            "reservation.most", "users may reserve {gpus} at a time here, all their reservations together", gpus=gpus
        )
    if reservation.ends - reservation.begins > keys.longest + 1:
        longest = format_duration(keys.longest)
        return sentence("reservation.longest", "users may reserve for {longest} at most here", longest=longest)
    if reservation.begins - reservation.made > keys.ahead + 1:
        ahead = format_duration(keys.ahead)
        return sentence("reservation.ahead", "users may reserve {ahead} ahead at most here", ahead=ahead)
    return ""


def clock_text(when: float, now: float) -> str:
    """Format a time for people: ``"09:00"`` today, or else ``"Sat 21 Nov 09:00"``, which translated() shows."""
    date, time_of_day = time.localtime(when), local_time(when, "%H:%M")
    if date[:3] == time.localtime(now)[:3]:
        return time_of_day
    return sentence(
        "clock.day",
        "{weekday} {day} {month} {time}",
        weekday=_DAYS[date.tm_wday],
        day=f"{date.tm_mday:02}",
        month=_MONTHS[date.tm_mon - 1],
        time=time_of_day,
    )


def read_reservations(directory: LockDirectory, now: float) -> tuple[list[Reservation], list[IgnoredFile], Arrivals]:
    """Read the reservations that have not ended, in no order.

    Returns:
        The reservations; the files that cannot be understood; and when users have come.
    """
    names = directory.names()
    reservations, ignored = read_documents(directory, "reserve", names, MOST_OF_ONE, partial(_read_reservation, now))
    for name in names:
        is_unfinished = name.startswith(f"{directory.prefix}reserve.") and not name.endswith(".json")
        if is_unfinished or name.startswith(f"{directory.prefix}unfinished."):
            remove_leftover(f"{directory.records}/{name}")
    known = {reservation.key: reservation for reservation in reservations}
    came = grouped((key, status.st_ctime) for key, status in _files_of_users(directory, "arrived", names, known))
    for key in {key for key, _status in _files_of_users(directory, "waived", names, known)}:
        reservations.remove(known[key])
        if os.geteuid() in (known[key].maker, 0):
            remove_reservation(directory, known[key])
    seen = _arrivals_seen(directory, reservations, now)
    arrivals = {key: min(now, max(times)) for key, times in came.items()}
    return reservations, ignored, arrivals if seen is None else seen


def write_reservation(directory: LockDirectory, wanted: Reservation) -> Reservation:
    """Write the file of a reservation, whole or not at all, and return the reservation as it was made."""
    uid = wanted.maker if wanted.uid is None else wanted.uid
    fields = _ReservationContent(uid, wanted.num_gpus, wanted.begins, wanted.ends, wanted.devices, wanted.gid)
    content = {"schema": 1, **asdict(fields), "note": wanted.note and wanted.note[:MOST_NOTE]}
    encoded = json.dumps(content).encode()
    if len(encoded) > MAX_BYTES:
        raise InvalidRequest(_("the reservation is too long to be written: name fewer GPUs with --devices."))
    number = os.urandom(4).hex()
    path = _path(directory, os.geteuid(), number)
    try:
        write_file(path, encoded, unfinished=unfinished_path(directory))
        return _reservation_of(content, status_in_place(path), number)
    except OSError as error:
        why = translated(why_full(directory, error))
        raise LockDirectoryError(
            _("no reservation can be made in {records}: {why}.").format(records=directory.records, why=why)
        ) from error


def remove_reservation(directory: LockDirectory, reservation: Reservation) -> None:
    """Remove the file of a reservation; the user it is for waives it.  Raises LockDirectoryError for other users."""
    try:
        os.unlink(_path(directory, reservation.maker, reservation.id))
    except FileNotFoundError:
        return
    except OSError as error:
        if reservation.uid == os.geteuid() and _make_file(directory, "waived", reservation):
            return
        user = reservation.maker or reservation.uid
        who = _("{maker} or root").format(maker=user_name(user)) if user else "root"
        raise LockDirectoryError(
            _("reservation {id}: only {who} can cancel it.").format(id=reservation.id, who=who)
        ) from error


def _make_file(directory: LockDirectory, kind: str, reservation: Reservation) -> str | None:
    """Make this user's file about *reservation*, or set its time to now; return its path, or None if that failed."""
    uid = os.geteuid()
    path = f"{directory.records}/{directory.prefix}{kind}.{uid}.{reservation.key}"
    # The second if another user has made the first.
    return next((own for own in (path, f"{path}.{os.urandom(4).hex()}") if touch(own, uid)), None)


def record_arrival(directory: LockDirectory, reservations: Iterable[Reservation]) -> tuple[str, ...]:
    """Record a claim of this user now, for each of *reservations* that is theirs.

    Returns the files to touch when the claim ends.
    """
    own = [reservation for reservation in reservations if reservation.admits(os.geteuid())]
    # Without a file, only a living claim shows that the user came.
    return tuple(filter(None, [_make_file(directory, "arrived", reservation) for reservation in own]))


def record_arrivals_seen(directory: LockDirectory, snapshot: Snapshot, waiting: Iterable[Ticket], now: float) -> None:
    """Record which users have come to their reservations, as the daemon sees it; call it again and again.

    A user has come if they claim a device of the reservation, or wait while too few of its devices are free.
    *snapshot* has the claims, *waiting* are the requests that wait.
    """
    files = daemon_files(directory)
    if (
        files.owner is None
        or not (snapshot.taken_at and claims_readable(snapshot) and directory.has("reserve."))
        or not touch(files.file(_LOOKED))
    ):
        return
    reservations, _ignored, _of_users = read_reservations(directory, now)
    users = {ticket.uid for ticket in waiting}
    used = {uuid for claim in snapshot.claims for uuid in claim.devices}
    used |= {device.uuid for device in snapshot.devices if device.processes}
    for reservation in reservations:
        own = {uuid for claim in snapshot.claims if reservation.admits(claim.uid) for uuid in claim.devices}
        waits = len(set(reservation.devices) - used) < reservation.num_gpus and any(map(reservation.admits, users))
        if reservation.begins <= now and (waits or not own.isdisjoint(reservation.devices)):
            touch(files.file(_arrival_name(reservation)))
    known = {_arrival_name(reservation) for reservation in reservations}
    for name in os.listdir(files.path):
        if name.startswith("arrived.") and name not in known:
            os.unlink(files.file(name))


def _arrivals_seen(directory: LockDirectory, reservations: Iterable[Reservation], now: float) -> Arrivals | None:
    """Return the arrivals that the daemon has seen, or None if none has looked lately: then the users' files count."""
    files = daemon_files(directory)
    if files.owner is None or (written_at(files.file(_LOOKED), files.owners()) or 0.0) < now - LOOKED_SECONDS:
        return None
    seen = {made: written_at(files.file(_arrival_name(made)), files.owners()) for made in reservations}
    return {made.key: min(now, when or 0.0) for made, when in seen.items()}


def _arrival_name(reservation: Reservation) -> str:
    """Return the name of the daemon's file for all users of a reservation."""
    return f"arrived.{f'g{reservation.gid}' if reservation.uid is None else reservation.uid}.{reservation.key}"


def _path(directory: LockDirectory, maker: int, number: str) -> str:
    return f"{directory.records}/{directory.prefix}reserve.{maker}.{number}.json"


def _read_reservation(
    now: float, directory: LockDirectory, descriptor: int, key: str
) -> Reservation | IgnoredFile | None:
    number = key.partition(".")[2]
    reservation = read_document(descriptor, key, number, MAX_BYTES, partial(_reservation_of, number=number))
    if isinstance(reservation, IgnoredFile) or reservation.ends > now:
        return reservation
    if os.geteuid() in (reservation.maker, 0):
        remove_if_same(descriptor, _path(directory, reservation.maker, number))
    return None


def _reservation_of(content: dict[str, Any], status: os.stat_result, number: str) -> Reservation:
    content = plain(content)  # a user's words are no sentences
    said, note = decode(_ReservationContent, content), content.get("note")
    begins, ends = said.begins_unix_seconds, said.ends_unix_seconds
    for when in (begins, ends):
        checked_number(when, 0, LAST_TIME)
    if not begins < ends:
        raise ValueError(sentence("reservation.ends_before", "it ends before it begins"))
    if status.st_uid not in (said.uid, 0):
        raise ValueError(sentence("reservation.only_root", "only root can reserve for others"))
    gid = None if said.gid is None else checked_number(said.gid, 0, 2**32 - 2)
    if gid is not None and status.st_uid and is_in_group(status.st_uid, gid) is False:
        raise ValueError(sentence("reservation.only_members", "only root and its members can reserve for a group"))
    return Reservation(
        id=number,
        maker=status.st_uid,
        uid=checked_number(said.uid, 0, 2**32 - 2) if gid is None else None,
        user=user_name(said.uid) if gid is None else None,
        num_gpus=checked_number(said.num_gpus, 1, MOST_GPUS),
        begins=float(begins),
        ends=float(ends),
        devices=tuple(dict.fromkeys(said.devices)),
        made=status.st_ctime,
        note=note[:MOST_NOTE] if isinstance(note, str) else None,
        gid=gid,
        group=None if gid is None else group_name(gid),
        members=() if gid is None else GroupMembers(gid),
    )


def _files_of_users(
    directory: LockDirectory, kind: str, names: Sequence[str], known: Mapping[str, Reservation]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the key of a reservation with the status of a file about it, for each file that a user of it has made."""
    start = f"{directory.prefix}{kind}."
    about, left = list[str](), list[str]()
    for name in names:
        if name.startswith(start):
            (about if _key_in(name, start) in known else left).append(name)
    for name in left[:MOST_COUNTED]:
        remove_leftover(f"{directory.records}/{name}")
    # A user has one for each reservation, but can make any number, under the names of other users as well.
    for name in first_of_each(directory, about, MOST_COUNTED)[0]:
        key, path, uid = _key_in(name, start), f"{directory.records}/{name}", name[len(start) :].partition(".")[0]
        try:
            status = status_in_place(path)
        except OSError as error:
            if shortage(error):
                raise
            continue
        # Others may be able to make a second name for a file of this user.
        is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and uid == str(status.st_uid)
        if is_own and (known[key].uid == status.st_uid or (kind == "arrived" and known[key].admits(status.st_uid))):
            yield key, status


def _key_in(name: str, start: str) -> str:
    """Return the key of the reservation in the name of a file about it: "MAKER.ID"."""
    return ".".join(name[len(start) :].split(".")[1:3])
