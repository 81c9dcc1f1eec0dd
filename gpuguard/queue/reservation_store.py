"""The files of reservations, in the directory of the claims.

    reserve.UID.ID.json        of its maker: a user for himself, root for anybody arrived.UID.MAKER.ID       of the user
    it is for: its time says when a claim of theirs last began or ended; also with
                               .RANDOM behind it, where another user has made a file of that name

Nobody holds them: they outlive their maker, and are removed by him or by root when they have ended.  Whose a file is
and when it was made says the file system, never its content; one that cannot be understood is reported.  Does not say
which of them count: see reservations.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpuguard.claims.directory import LockDirectory, is_same_file
from gpuguard.claims.records import unfinished_path
from gpuguard.claims.room import why_full
from gpuguard.errors import InvalidRequest, LockDirectoryError, shortage
from gpuguard.files import open_or_create, remove_leftover, status_in_place, write_file
from gpuguard.jsonio import loads
from gpuguard.queue.calendar import PlannedReservation
from gpuguard.queue.tickets import IgnoredFile, first_of_each_user, opened, whole
from gpuguard.users import user_name

MAX_BYTES = 4096
MOST_OF_ONE = 100  # of a user; a quota counts their devices, but only once all of them were read
MOST_NOTE = 200  # characters


@dataclass(frozen=True)
class Reservation:
    """One reservation as its file says.

    Args:
        id: unique among those of its maker.
        maker: uid of the owner of the file.
        uid: for whom it is.
        user: the name of *uid*.
        num_gpus: how many devices.
        begins: unix time; likewise *ends*.
        devices: uuids of those that will do.
        made: unix time, from the file system, so that it cannot be backdated.
        note: for people.
    """

    id: str
    maker: int
    uid: int
    user: str
    num_gpus: int
    begins: float
    ends: float
    devices: tuple[str, ...]
    made: float = 0.0
    note: str | None = None

    @property
    def key(self) -> str:
        """Unique among all."""
        return f"{self.maker}.{self.id}"

    def booking(self, held: tuple[str, ...] = ()) -> PlannedReservation:
        """What the plan of the queue needs of it; *held* are the devices that its user has now."""
        return PlannedReservation(
            self.key, self.uid, self.user, self.num_gpus, self.begins, self.ends, self.devices, held
        )


def read(
    directory: LockDirectory, now: float
) -> tuple[list[Reservation], list[IgnoredFile], dict[tuple[int, str], float]]:
    """All that have not ended, in no order; the files that cannot be understood; and who came when.

    The last is (uid, key of a reservation) -> unix time at which that user last began or ended a claim.
    """
    names = directory.names()
    found, ignored = _read_all(directory, names, now)
    return found, ignored, _arrivals(directory, names, {one.key for one in found}, now)


def write(directory: LockDirectory, wanted: Reservation) -> Reservation:
    """Make the file of a reservation, whole or not at all; returns it as it was made.

    Raises:
        InvalidRequest: it is too long.
        LockDirectoryError: it cannot be written.
    """
    content = {
        "schema": 1,
        "uid": wanted.uid,
        "num_gpus": wanted.num_gpus,
        "begins_unix_seconds": wanted.begins,
        "ends_unix_seconds": wanted.ends,
        "devices": list(wanted.devices),
        "note": wanted.note and wanted.note[:MOST_NOTE],
    }
    encoded = json.dumps(content).encode()
    if len(encoded) > MAX_BYTES:
        raise InvalidRequest("the reservation is too long to be written: name fewer devices with --gpus.")
    number = os.urandom(4).hex()
    path = _path(directory, os.geteuid(), number)
    try:
        write_file(path, encoded, unfinished=unfinished_path(directory))
        found = _decoded(encoded, status_in_place(path), number)
    except OSError as error:
        why = why_full(directory, error)
        raise LockDirectoryError(f"no reservation can be made in {directory.records}: {why}.") from error
    assert isinstance(found, Reservation), found
    return found


def remove(directory: LockDirectory, one: Reservation) -> None:
    """End a reservation.

    Raises:
        LockDirectoryError: it is another user's.
    """
    try:
        os.unlink(_path(directory, one.maker, one.id))
    except FileNotFoundError:
        return
    except OSError as error:
        who = f"{user_name(one.maker)} or root" if one.maker else "root"
        raise LockDirectoryError(f"reservation {one.id}: only {who} can cancel it.") from error


def arrive(directory: LockDirectory, reservations: Sequence[PlannedReservation]) -> tuple[str, ...]:
    """Record a claim of this user now, for each of *bookings* that is theirs; the files to touch when it ends."""
    uid, paths = os.geteuid(), []
    for booking in reservations:
        if booking.uid != uid:
            continue
        path = f"{directory.records}/{directory.prefix}arrived.{uid}.{booking.id}"
        # The second, should another user have made a file of that name.
        own = next((each for each in (path, f"{path}.{os.urandom(4).hex()}") if _touched(each, uid)), None)
        paths += [own] if own else []  # else only a living claim shows that the user came
    return tuple(paths)


def _touched(path: str, uid: int) -> bool:
    """Whether the file belongs to *uid*, and its time is now."""
    with suppress(OSError):
        descriptor = open_or_create(path, os.O_RDONLY | os.O_NONBLOCK, 0o644)
        try:
            if os.fstat(descriptor).st_uid == uid:
                os.utime(descriptor)
                return True
        finally:
            os.close(descriptor)
    return False


def _path(directory: LockDirectory, maker: int, number: str) -> str:
    return f"{directory.records}/{directory.prefix}reserve.{maker}.{number}.json"


def _read_all(
    directory: LockDirectory, names: Sequence[str], now: float
) -> tuple[list[Reservation], list[IgnoredFile]]:
    start = f"{directory.prefix}reserve."
    found: list[Reservation] = []
    own = [name for name in names if name.startswith(start)]
    finished, ignored = first_of_each_user(directory, [name for name in own if name.endswith(".json")], MOST_OF_ONE)
    for name in finished:
        one = _read(directory, name, name[len(start) : -len(".json")], now)
        if isinstance(one, Reservation):
            found.append(one)
        elif one:
            ignored.append(one)
    for name in names:
        if name.startswith(f"{directory.prefix}unfinished.") or (name in own and not name.endswith(".json")):
            remove_leftover(f"{directory.records}/{name}")
    return found, ignored


def _read(directory: LockDirectory, name: str, place: str, now: float) -> Reservation | IgnoredFile | None:
    path = f"{directory.records}/{name}"
    descriptor = opened(path, place)
    if not isinstance(descriptor, int):
        return descriptor
    try:
        status = os.fstat(descriptor)
        uid, _, number = place.partition(".")
        if uid != str(status.st_uid) or not (number.isascii() and number.isalnum() and len(number) <= 32):
            return IgnoredFile(status.st_uid, place[:80], "its name is not that of its owner")
        one = _decoded(os.read(descriptor, MAX_BYTES + 1), status, number)
        if isinstance(one, Reservation) and one.ends <= now:
            if os.geteuid() in (status.st_uid, 0) and is_same_file(descriptor, path):
                with suppress(OSError):
                    os.unlink(path)
            return None
        return one
    finally:
        os.close(descriptor)


def _decoded(encoded: bytes, status: os.stat_result, number: str) -> Reservation | IgnoredFile:
    try:
        if len(encoded) > MAX_BYTES:
            raise ValueError("it is too long")
        content = loads(encoded)
        uid = whole(content["uid"], 0, 2**32 - 2)
        begins, ends = _time(content["begins_unix_seconds"]), _time(content["ends_unix_seconds"])
        devices, note = content["devices"], content.get("note")
        if not begins < ends:
            raise ValueError("it ends before it begins")
        if not isinstance(devices, list) or not all(isinstance(each, str) for each in devices):
            raise ValueError("its devices are none")
        if status.st_uid not in (uid, 0):
            raise ValueError("only root can reserve for others")
        return Reservation(
            number,
            status.st_uid,
            uid,
            user_name(uid),
            whole(content["num_gpus"], 1, 4096),
            begins,
            ends,
            tuple(dict.fromkeys(devices)),
            status.st_ctime,
            note[:MOST_NOTE] if isinstance(note, str) else None,
        )
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        return IgnoredFile(status.st_uid, number, f"it cannot be understood: {error}"[:200])


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2.0**40:
        raise ValueError("a time in it is none")
    return float(value)


def _arrivals(
    directory: LockDirectory, names: Sequence[str], known: Collection[str], now: float
) -> dict[tuple[int, str], float]:
    """(uid, key of a reservation) -> when that user last began or ended a claim."""
    start = f"{directory.prefix}arrived."
    arrivals: dict[tuple[int, str], float] = {}
    for name in names:
        if not name.startswith(start):
            continue
        uid, *words = name[len(start) :].split(".")
        key, path = ".".join(words[:2]), f"{directory.records}/{name}"
        if key not in known:
            remove_leftover(path)
            continue
        try:
            status = status_in_place(path)
        except OSError as error:
            if shortage(error):
                raise
            continue
        if stat.S_ISREG(status.st_mode) and uid == str(status.st_uid):
            place = status.st_uid, key
            arrivals[place] = max(arrivals.get(place, 0.0), min(now, status.st_ctime))
    return arrivals
