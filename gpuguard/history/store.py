"""The file of the usage store, which one process opens, locks, checks and writes, and sets aside when it is damaged.

After each write the journal is moved into the file: see queries for why readers need that, and why no other process may
hold a lock.  A damaged file is renamed, never deleted.  Errors of os and sqlite3 pass through: recorder puts them into
words.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from gpuguard.errors import GpuguardError
from gpuguard.history.queries import JOURNAL
from gpuguard.history.store_schema import (
    COARSEST,
    COLUMNS,
    EACH,
    INSERT,
    MOST_NUMBERS,
    SLOTS,
    TABLES,
    VERSION,
    WIDTH,
    Slot,
    key,
    slot_of,
    stored,
)
from gpuguard.locale.messages import sentence
from gpuguard.model import Device
from gpuguard.users import user_name

LOCK_SECONDS = 1.0
MOST_BYTES = 256 * 2**20  # 8 devices with 3 users each take 36 MB; beyond this the oldest days are removed
# A user with user namespaces has 65536 uids without a name, and a ticket of each would take the room of all others.
MOST_NAMELESS = 256  # such uids in one slot; no new ones are kept once half of the numbers are taken
EXPIRED = 2  # expired slots that each new one removes, so that a clock that is wrong for a while empties no store
DAY = 86400 // COARSEST
# For each column, its unit and whether it holds a highest value.
_UNITS = {
    kind: tuple((stored(column)[1], column.endswith("_mib_max")) for column in columns)
    for kind, columns in COLUMNS.items()
}
_FORGET = {  # removes the numbers that no row uses any more
    "devices": "DELETE FROM devices WHERE id NOT IN (SELECT device FROM holders"
    + "".join(f" UNION SELECT key & {MOST_NUMBERS} FROM devices_{width}s" for width in SLOTS)
    + ")",
    "holders": "DELETE FROM holders WHERE id NOT IN (SELECT 0"
    + "".join(f" UNION SELECT key & {MOST_NUMBERS} FROM {kind}_{width}s" for kind, width in EACH if kind != "devices")
    + ")",
}


class Outdated(sqlite3.DatabaseError):
    """The file is whole, but an earlier version of gpuguard wrote it."""


def opened(path: str, *, check: bool) -> sqlite3.Connection:
    """Open the store, making it if it does not exist, and lock out all other processes until it is closed.

    Args:
        path: of the file, in a directory where only this user can write.
        check: whether to check the whole file for damage.

    Raises:
        sqlite3.DatabaseError: the file is damaged; this class itself, none of its subclasses.
        Outdated: an earlier version of gpuguard wrote it.
        GpuguardError: it is not ours, or not a store of this version.
        OSError, sqlite3.OperationalError: it cannot be opened now.
    """
    _make(path)
    try:
        connection = _connected(path, check=check)
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise
        # A user who may read the file can hold a lock on it forever, but holds none on a new copy.
        _renew(path)
        connection = _connected(path, check=check)
    for end in ("", JOURNAL):
        # By name, because closing a descriptor would release the lock.
        with suppress(FileNotFoundError):
            os.chmod(path + end, 0o644)
    return connection


def lock(path: str) -> int:
    """Become the one writer of the store, until the returned descriptor is closed.

    Raises GpuguardError if another process is the writer.
    """
    _make_directory(os.path.dirname(path))
    # The file is closed to others, who could keep the daemon out with it.  filelock opens it to all before its version
    # 3.10, and on a file system without flock it takes a lock that outlives a daemon that is killed.
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)  # the caller tries again and again
        if not isinstance(error, BlockingIOError):
            raise OSError(error.errno, error.strerror, path) from None
        raise GpuguardError(
            sentence(
                "usage_store.other_daemon",
                "another daemon writes it.  Give this one a place of its own with GPUGUARD_STATE_DIR",
            )
        ) from None
    return descriptor


def set_aside(path: str, why: str = "damaged") -> str:
    """Rename an unusable store and its journal, and return the new name."""
    name = f"{path}.{why}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    while os.path.lexists(name):
        name += "-again"
    os.rename(path, name)
    with suppress(FileNotFoundError):
        os.rename(path + JOURNAL, name + JOURNAL)
    return name


def write(connection: sqlite3.Connection, slots: Mapping[int, Slot], devices: Iterable[Device]) -> None:
    """Add *slots* to the tables of all widths, or to none.  *devices* has the names of devices that are new."""
    with _transaction(connection):
        slots = {number: _without_crowd(slot) for number, slot in slots.items()}
        numbers = _numbers(connection, {uuid for slot in slots.values() for uuid in slot.devices}, devices)
        holders = _holders(connection, slots.values(), numbers)
        for width, kept in SLOTS.items():
            wide: dict[int, Slot] = {}
            for number, slot in slots.items():
                wide.setdefault(number * WIDTH // width, Slot()).add(slot, 1.0)
            for kind, rows in _rows(wide, numbers, holders).items():
                connection.executemany(INSERT[kind, width], [(key(*at, width), *row) for at, row in rows])
                _expire(connection, f"{kind}_{width}s", key(max(wide) - kept + 1, 0, width), EXPIRED * len(wide), width)
        _make_room(connection)


def move_journal(connection: sqlite3.Connection) -> None:
    """Move the journal into the file, so that a reader of the file alone sees everything."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def _make_directory(path: str) -> None:
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o755)  # everybody may read it, whatever the umask is


def _make(path: str) -> None:
    _make_directory(os.path.dirname(path))
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
            raise GpuguardError(
                sentence(
                    "usage_store.not_ours",
                    "it is not a file of ours alone.  Look at it with `ls -l`, and move it away",
                )
            ) from None
    # No other process may open it before we hold the lock.
    os.chmod(path, 0o600)


def _connected(path: str, *, check: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=LOCK_SECONDS)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a slot that was written survives a power cut
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            with _transaction(connection):
                if connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() != (0,):
                    raise GpuguardError(sentence("usage_store.none", "it is no usage store.  Move it away"))
                for table in TABLES:
                    connection.execute(table)
                connection.execute(f"PRAGMA user_version = {VERSION}")
        elif version < VERSION:
            raise Outdated(
                sentence(
                    "usage_store.old_tables",
                    "version {version} of its tables, this gpuguard writes version {own}",
                    version=version,
                    own=VERSION,
                )
            )
        elif version > VERSION:
            raise GpuguardError(
                sentence(
                    "usage_store.newer",
                    "it is of another version of gpuguard ({version}).  Move it away, or update",
                    version=version,
                )
            )
        if check and (fault := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(" ".join(str(fault).split()))
        with _transaction(connection):  # takes the lock if nothing has taken it yet
            connection.execute("SELECT COUNT(*) FROM devices").fetchone()
        move_journal(connection)
    except (sqlite3.Error, GpuguardError):
        connection.close()
        raise
    return connection


def _renew(path: str) -> None:
    """Replace a file that another process has locked by a copy of it."""
    copy = f"{path}.new"
    for end in ("", JOURNAL):
        with suppress(FileNotFoundError):
            os.unlink(copy + end)  # from a daemon that was killed here
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    shutil.copyfile(path, copy)
    with suppress(FileNotFoundError):
        shutil.copyfile(path + JOURNAL, copy + JOURNAL)
    _connected(copy, check=False).close()  # this moves the journal into the copy
    os.rename(copy, path)
    with suppress(FileNotFoundError):
        os.unlink(path + JOURNAL)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    with connection:  # which commits, or takes all back if anything fails
        yield


def _numbers(connection: sqlite3.Connection, uuids: set[str], devices: Iterable[Device]) -> dict[str, int]:
    """uuid -> the number by which the tables know the device; new devices are given one."""
    known = {device.uuid: device for device in devices}
    ids = dict(connection.execute("SELECT uuid, id FROM devices"))
    for uuid in sorted(uuids, key=[*known, *(uuids - known.keys())].index):  # numbered in the order of the machine
        if uuid not in ids:
            ids[uuid] = _free_number(connection, "devices")
            device = known.get(uuid)
            row = ids[uuid], uuid, device and device.name, device and device.parent_uuid
            connection.execute("INSERT INTO devices (id, uuid, name, parent) VALUES (?, ?, ?, ?)", row)
    for device in known.values():
        if device.parent_uuid is None:
            # It is the last index that the device had, so no other device keeps it.  The parameters have names, because
            # an early Python 3.12 warns of ?1.
            connection.execute(
                "UPDATE devices SET place = CASE uuid WHEN :uuid THEN :place END"
                " WHERE (uuid = :uuid AND place IS NOT :place) OR (uuid != :uuid AND place = :place)",
                {"uuid": device.uuid, "place": device.index},
            )
    return ids


def _without_crowd(slot: Slot) -> Slot:
    """*slot* with at most MOST_NAMELESS uids that have no name; those with a device are kept first."""
    holding = {uid for uid, _ in slot.users}
    uids = holding | slot.waiting.keys()
    if len(uids) <= MOST_NAMELESS:
        return slot
    nameless = sorted((uid for uid in uids if not _has_name(uid)), key=lambda uid: (uid not in holding, uid))
    beyond = set(nameless[MOST_NAMELESS:])
    return Slot(
        slot.devices,
        {whose: row for whose, row in slot.users.items() if whose[0] not in beyond},
        {uid: row for uid, row in slot.waiting.items() if uid not in beyond},
    )


def _has_name(uid: int) -> bool:
    return uid < 0 or user_name(uid) != str(uid)


def _holders(
    connection: sqlite3.Connection, slots: Iterable[Slot], numbers: Mapping[str, int]
) -> dict[tuple[int, int], int]:
    """(uid, number of a device) -> the number by which the tables know it; users who wait have (uid, 0)."""
    ids = {(uid, device): number for number, uid, device in connection.execute("SELECT id, uid, device FROM holders")}
    for slot in slots:
        for uid, device in (*((uid, numbers[uuid]) for uid, uuid in slot.users), *((uid, 0) for uid in slot.waiting)):
            if (uid, device) not in ids and (len(ids) < MOST_NUMBERS // 2 or _has_name(uid)):
                ids[uid, device] = number = _free_number(connection, "holders")
                connection.execute("INSERT INTO holders VALUES (?, ?, ?)", (number, uid, device))
    return ids


def _free_number(connection: sqlite3.Connection, table: str) -> int:
    (last,) = connection.execute(f"SELECT COALESCE(MAX(id), 0) FROM {table}").fetchone()
    if last < MOST_NUMBERS:
        return int(last) + 1
    # MIG instances get other uuids each time they are made; after years of that the unused ones are forgotten.
    connection.execute(_FORGET[table])
    taken = {number for (number,) in connection.execute(f"SELECT id FROM {table}")}
    free = next((number for number in range(1, MOST_NUMBERS + 1) if number not in taken), None)
    if free is None:
        raise GpuguardError(
            sentence(
                "usage_store.full",
                "it knows {number} {table}, more do not fit.  Move it away: a new one is begun",
                number=MOST_NUMBERS,
                table=table,
            )
        )
    return free


def _rows(
    slots: Mapping[int, Slot], numbers: Mapping[str, int], holders: Mapping[tuple[int, int], int]
) -> dict[str, list[tuple[tuple[int, int], tuple[int | None, ...]]]]:
    """kind -> the rows of its table, each with its slot and the number in its key."""
    return {
        "devices": [
            ((number, numbers[uuid]), _kept("devices", row))
            for number, slot in slots.items()
            for uuid, row in slot.devices.items()
        ],
        "users": [
            (
                (number, holders[uid, numbers[uuid]]),
                _kept("users", (used, idle, max(0.0, claimed - used - idle), unclaimed)),
            )
            for number, slot in slots.items()
            for (uid, uuid), (claimed, used, idle, unclaimed) in slot.users.items()
            if (uid, numbers[uuid]) in holders
        ],
        "waiting": [
            ((number, holders[uid, 0]), _kept("waiting", row))
            for number, slot in slots.items()
            for uid, row in slot.waiting.items()
            if (uid, 0) in holders
        ],
    }


def _kept(kind: str, row: Iterable[float | None]) -> tuple[int | None, ...]:
    """Convert *row* to the units of its table.  A highest value is rounded up, so that no mean lies above it."""
    return tuple(
        None if value is None else math.ceil(value / unit) if highest else round(value / unit)
        for value, (unit, highest) in zip(row, _UNITS[kind], strict=True)
    )


def _expire(connection: sqlite3.Connection, table: str, until: int, most: int, width: int) -> None:
    """Remove the oldest slots before the key *until*, at most *most* of them."""
    for _ in range(most):
        (oldest,) = connection.execute(f"SELECT MIN(key) FROM {table}").fetchone()
        if oldest is None or oldest >= until:
            return
        connection.execute(f"DELETE FROM {table} WHERE key < ?", (key(slot_of(oldest, width) + 1, 0, width),))


def _make_room(connection: sqlite3.Connection) -> None:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * size > MOST_BYTES:
        for kind in COLUMNS:
            table = f"{kind}_{COARSEST}s"
            (oldest,) = connection.execute(f"SELECT MIN(key) FROM {table}").fetchone()
            if oldest is not None:
                until = key(slot_of(oldest, COARSEST) + DAY, 0, COARSEST)
                connection.execute(f"DELETE FROM {table} WHERE key < ?", (until,))
