"""Queries to the usage store: totals, series and windows, each over a period and from the finest slots that are kept.

    query_store(store_path(directory), lambda usage: usage.totals("uid", begin, end))

Time that was not watched is in no answer, and no answer counts it as zero: watched() tells how much was seen.  Only
slots that begin in the requested period count.  A store with values that gpuguard never writes is damaged, so _sound
checks each row.

Reading takes no lock and needs no daemon.  A reader's lock would keep the daemon from writing, and a user could hold
one forever to escape a quota.  So the writer keeps all readers out by a lock of its own, and leaves a whole database
file and an empty journal after each write.  A reader checks both before and after it reads, and reads again if they
changed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gpuguard.claims.directory import ADMIN_DIRECTORY, LockDirectory, daemon_files
from gpuguard.device_state import grouped
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history.store_schema import COARSEST, GAUGES, SLOTS, USER_COLUMNS, VERSION, holdings, key, rows
from gpuguard.jsonio import LARGEST
from gpuguard.locale import _

if TYPE_CHECKING:
    import sqlite3

SpentSeconds = Mapping[int, Mapping[float, float]]  # uid -> (window in seconds -> GPU-seconds claimed in it)
_Answer = TypeVar("_Answer")

SHARES = 64  # parts of a half-life over which usage is summed; the result is wrong by 0.5 % at most
HALF_LIVES = 10  # how far back usage counts: by then a thousandth is left
TIMES = ("claimed", "used", "idle", "unknown", "unclaimed")  # of a user or a device, in GPU-seconds
# The metrics of series(), computed from the columns: (value x seconds, highest value, milliseconds without a value).
METRICS = {
    **{gauge: (f"{gauge}_sum", f"{gauge}_max", f"{gauge}_unknown_ms") for gauge in GAUGES},
    "claimed_percent": ("claimed_ms / 10.0", "NULL", "claimed_unknown_ms"),
}
# The columns of answers that hold text, that hold whole numbers, and that may be NULL; all others hold numbers.
_TEXTS = frozenset({"uuid", "name", "parent"})
_WHOLE = frozenset({"id", "uid", "device", "place", "slot", "bucket"})
_OPTIONAL = frozenset({"name", "parent", "place", "highest", "seen_at_all", "oldest", "joules"})


@dataclass(frozen=True)
class Point:
    """A value of one device over one slot."""

    time: float  # unix time at which the slot begins
    seconds: float  # its width
    known: float  # seconds of it in which the value was known
    mean: float | None
    highest: float | None


@dataclass(frozen=True)
class SeenDevice:
    """A device that was seen at least once."""

    uuid: str
    name: str | None
    parent: str | None  # uuid of the device to which a MIG instance belongs
    index: int | None  # the last one it had, or None if another device has it now or it is a MIG instance

    @property
    def label(self) -> str:
        """``"GPU 3"``, or the uuid if the device has no index."""
        return self.uuid if self.index is None else f"GPU {self.index}"


@dataclass(frozen=True)
class Watch:
    """How much of a period is known, in unix time and seconds."""

    begin: float  # of the slots that count
    end: float
    seen: float  # seconds in which at least one device was watched
    store_begins: float | None  # of the oldest slot, in the finest width that has it, or None if the store is empty
    width: int  # of the slots


@dataclass(frozen=True)
class DeviceTotal:
    """What one device did in the requested period, in seconds.  Time that is not in `seen` was not watched."""

    device: SeenDevice
    seen: float
    claimed: float
    claimed_unknown: float
    utilization: float | None  # percent, mean over the time in which it was known
    energy: float | None  # joules, in the time in which it was known
    energy_unknown: float
    host: str | None = None  # or None for this machine


class Usage:
    """A store that is open for reading, at the unix time *now*."""

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection, self.now = connection, now

    def gpu_seconds(self, windows: Collection[float]) -> dict[int, dict[float, float]]:
        """GPU-seconds that each user has claimed in each window (seconds up to now): uid -> (window -> seconds)."""
        results: dict[int, dict[float, float]] = {}
        for window in windows:
            for uid, claimed in self._rows(
                "users", "uid, SUM(claimed_ms)", self.now - window, self.now, "GROUP BY uid"
            ):
                results.setdefault(uid, {})[window] = claimed / 1000
        return results

    def decayed(self, half_life: float) -> dict[int, float]:
        """GPU-seconds that each user has had, claimed or not, by uid.  Those of *half_life* seconds ago count half."""
        begin = self.now - HALF_LIVES * half_life
        width = self.width(begin)
        bucket = max(1, round(half_life / SHARES / width))
        columns = f"slot / {bucket} AS bucket, uid, SUM(claimed_ms + unclaimed_ms)"
        rows = self._rows("users", columns, begin, self.now, "GROUP BY bucket, uid")
        ages = ((uid, had, max(0.0, self.now - (number + 0.5) * bucket * width)) for number, uid, had in rows)
        shares = grouped((uid, had / 1000 * 0.5 ** (age / half_life)) for uid, had, age in ages)
        return {uid: sum(own) for uid, own in shares.items()}

    def known(self) -> list[SeenDevice]:
        """All devices ever seen, by index; those without one come last, in the order in which they were first seen."""
        results = self._execute("SELECT uuid, name, parent, place FROM devices ORDER BY place IS NULL, place, id")
        return [SeenDevice(*row) for row in results]

    def watched(self, begin: float, end: float) -> Watch:
        """Tell how much of the time between two unix times was seen."""
        width = self.width(begin)
        most = f"SELECT MAX(seen_ms) AS most FROM ({rows('devices', width)}) GROUP BY slot"
        (seen,) = self._execute(f"SELECT SUM(most) AS seen_at_all FROM ({most})", *_keys(begin, end, width)).fetchone()
        begins = self._first_slot(COARSEST)
        if begins is not None:  # the finer slots of a young store tell it better than to a quarter of an hour
            begins = self._first_slot(self.width(begins)) or begins
        whole = min(_next(begin, width) * width, end), min(_next(end, width) * width, max(end, self.now))
        return Watch(*whole, (seen or 0) / 1000, begins, width)

    def _first_slot(self, width: int) -> float | None:
        """Unix time at which the oldest slot of that width begins, or None if there is none."""
        oldest = f"SELECT MIN(slot) AS oldest FROM ({rows('devices', width)})"
        (slot,) = self._execute(oldest, -(2**63), 2**63 - 1).fetchone()
        return None if slot is None else float(slot * width)

    def waiting(self, begin: float, end: float) -> dict[int, tuple[float, float]]:
        """How long each user waited in the queue between two unix times; the user who wanted most comes first.

        Returns:
            uid -> (seconds with at least one request, GPU-seconds that all of the user's requests asked for while they
            waited).  NOBODY_KNOWS stands for the time in which the queue could not be read.
        """
        columns = "uid, SUM(waiting_ms), SUM(wanted_gpu_seconds)"
        results = self._rows("waiting", columns, begin, end, "GROUP BY uid ORDER BY 3 DESC, 2 DESC, 1")
        return {uid: (waiting / 1000, float(wanted)) for uid, waiting, wanted in results}

    def energy(self, begin: float, end: float) -> dict[int, float | None]:
        """Joules that each user's devices took while the user had them: uid -> joules, or None if not measured.

        The energy of a device in a slot is divided among users by the time for which each claimed it, or used it
        without a claim.  Energy that it took while no user had it counts for none of them.
        """
        width = self.width(begin)
        results = self._execute(
            "SELECT uid, SUM(CASE WHEN unknown < seen THEN 1.0 * joules * had / MAX(total, seen) END) AS joules FROM ("
            " SELECT *, SUM(had) OVER (PARTITION BY slot, device) AS total"
            f" FROM ({holdings(width)})) GROUP BY uid",
            *_keys(begin, end, width),
        )
        return dict(results)

    def series(self, device: str, metric: str, begin: float, end: float) -> list[Point]:
        """The values of one device (uuid) between two unix times, oldest first; unwatched time has no values.

        The further back *begin* is, the wider are the slots.  Raises InvalidRequest if *metric* is none of METRICS.
        """
        if metric not in METRICS:
            raise InvalidRequest(
                _("there is no metric {metric!r}.  There are {metrics}.").format(
                    metric=metric, metrics=", ".join(METRICS)
                )
            )
        value, highest, unknown = METRICS[metric]
        width = self.width(begin)
        columns = f"slot, {value}, {highest} AS highest, seen_ms - {unknown}"
        chosen = "WHERE device = (SELECT id FROM devices WHERE uuid = ?) ORDER BY slot"
        return [
            Point(slot * width, width, known / 1000, total * 1000 / known if known > 0 else None, most)
            for slot, total, most, known in self._rows("devices", columns, begin, end, chosen, device)
        ]

    def totals(self, by: Literal["uid", "device"], begin: float, end: float) -> dict[Any, dict[str, Any]]:
        """Sum the GPU time of each user or each device between two unix times; the most claimed time comes first.

        Returns uid or uuid -> each of TIMES -> GPU-seconds.
        """
        names = dict(self._execute("SELECT id, uuid FROM devices")) if by == "device" else {}
        sums = ", ".join(f"SUM({column})" for column in USER_COLUMNS)
        order = f"GROUP BY {by} ORDER BY 2 DESC, 5 DESC, 1"
        return {
            names.get(subject, subject): {
                "claimed": claimed / 1000,
                "used": used / 1000,
                "idle": idle / 1000,
                "unknown": max(0, claimed - used - idle) / 1000,
                "unclaimed": unclaimed / 1000,
            }
            for subject, claimed, used, idle, unclaimed in self._rows("users", f"{by}, {sums}", begin, end, order)
        }

    def devices(self, begin: float, end: float) -> list[DeviceTotal]:
        """What each device did between two unix times, in the order in which the devices were first seen."""
        columns = (
            "seen_ms", "claimed_ms", "claimed_unknown_ms", "utilization_percent_sum", "utilization_percent_unknown_ms",
            "energy_joules", "energy_unknown_ms",
        )  # fmt: skip
        sums = ", ".join(f"SUM({column})" for column in columns)
        rows = {number: row for number, *row in self._rows("devices", f"device, {sums}", begin, end, "GROUP BY device")}
        results = []
        for number, *known in self._execute("SELECT id, uuid, name, parent, place FROM devices ORDER BY id"):
            if number not in rows:
                continue
            seen, claimed, unknown, total, untold, joules, unmeasured = rows[number]
            mean = total * 1000 / (seen - untold) if seen > untold else None
            energy = float(joules) if seen > unmeasured else None
            results.append(
                DeviceTotal(
                    SeenDevice(*known), seen / 1000, claimed / 1000, unknown / 1000, mean, energy, unmeasured / 1000
                )
            )
        return results

    def width(self, begin: float) -> int:
        """Width in seconds of the finest slots that are kept as far back as *begin*."""
        return next((width for width, kept in SLOTS.items() if self.now - begin <= width * kept), COARSEST)

    def _rows(self, kind: str, columns: str, begin: float, end: float, further: str, *values: object) -> sqlite3.Cursor:
        width = self.width(begin)
        query = f"SELECT {columns} FROM ({rows(kind, width)}) {further}"
        return self._execute(query, *_keys(begin, end, width), *values)

    def _execute(self, query: str, *values: object) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = _sound
        return cursor.execute(query, values)


def _sound(cursor: sqlite3.Cursor, row: tuple[object, ...]) -> tuple[object, ...]:
    """Refuse a row with values that gpuguard does not write, because SQLite stores any value in any column."""
    for described, value in zip(cursor.description, row):  # noqa: B905  as many, and a year has 38,400 rows
        column = described[0]
        if value is None:
            sound = column in _OPTIONAL
        elif column in _TEXTS:
            sound = type(value) is str
        else:
            kinds = (int,) if column in _WHOLE else (int, float)
            sound = type(value) in kinds and -LARGEST <= value <= LARGEST  # type: ignore[operator]  # nor is infinity
        if not sound:
            raise cursor.connection.DataError(f"it is damaged, {column} cannot be {value!r:.40}")
    return row


def _keys(begin: float, end: float, width: int) -> tuple[int, int]:
    # Only slots that begin in the requested period count, because a quota should rather count too little.
    return key(_next(begin, width), 0, width), key(_next(end, width), 0, width)


def _next(moment: float, width: int) -> int:
    """The first slot that begins at *moment* or later."""
    return -int(-moment // width)


MACHINE_STATE = "/var/lib/gpuguard"  # of root's daemon
FILE, JOURNAL = "usage.db", "-wal"
READ_TRIES, READ_PAUSE = 8, 0.05  # the daemon's write takes 1 to 20 ms


def store_path(directory: LockDirectory) -> str:
    """Path of the usage store that the daemon of this claim directory writes.

    It lies in $GPUGUARD_STATE_DIR if that is set.  Otherwise it lies in MACHINE_STATE for the machine's own claim
    directory, because /run is empty after a boot; in the user's state directory if all users share the claim directory;
    and beside the claims for any other.
    """
    if named := os.environ.get("GPUGUARD_STATE_DIR"):
        return os.path.join(os.path.abspath(named), FILE)
    if directory.path == ADMIN_DIRECTORY:
        return os.path.join(MACHINE_STATE, FILE)
    if directory.prefix:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return os.path.join(state, "gpuguard", FILE)
    return os.path.join(daemon_files(directory).path, FILE)


def query_store(path: str, question: Callable[[Usage], _Answer], now: float | None = None) -> _Answer:
    """Put *question* to the store at *path*.  Not for the process that writes the store: see recorder.

    Args:
        path: see store_path.
        question: is called with the open store, and again if the daemon wrote meanwhile.
        now: unix time, or None for that of the clock.

    Raises:
        GpuguardError: there is no store, or none that can be read.
    """
    now = time.time() if now is None else now
    former = None
    for _attempt in range(READ_TRIES):
        versions, reply = _versions(path), None
        if versions[1] is None:  # without a journal the file is whole
            reply = _query(path, question, now)
        elif versions == former:
            # The daemon was killed while it wrote.  Its journal belongs to the file, and only a copy may be repaired.
            reply = _query_copy(path, question, now)
        if reply is not None and _versions(path) == versions:  # what is read while a daemon writes may look damaged
            if isinstance(reply, GpuguardError):
                raise reply
            return reply[0]
        former = versions
        time.sleep(READ_PAUSE)
    raise GpuguardError(
        _(
            "{path} is being written all the time, or nothing is in it.  Try again in a minute; if it stays "
            "so, start the daemon anew, which says what is wrong with it."
        ).format(path=path)
    )


def _versions(path: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Versions of the file and of its journal (None if that is empty); they change whenever one of them is written."""
    try:
        file = os.lstat(path)
    except FileNotFoundError:
        raise GpuguardError(
            _(
                "there is no usage store at {path}: `gpuguard daemon` makes it, and what no daemon watched is "
                "not known.  Ask your administrator for one, or start your own (docs/daemon.md); jobs that "
                "gpuguard ran are in `gpuguard report --by claim` without it.  GPUGUARD_STATE_DIR names another "
                "place."
            ).format(path=path)
        ) from None
    except OSError as error:
        raise GpuguardError(
            _("{path} cannot be read: {strerror}.").format(path=path, strerror=error.strerror)
        ) from error
    if not os.access(path, os.R_OK):
        raise GpuguardError(
            _("{path} cannot be read: Permission denied.  The daemon opens it to everybody when it starts.").format(
                path=path
            )
        )
    # Only a daemon's files are trusted: those of root, our own, and those of the user to whom root gave the directory.
    parent = os.stat(os.path.dirname(path))
    owners = {0, os.geteuid(), *(() if parent.st_mode & 0o022 else (parent.st_uid,))}
    if not stat.S_ISREG(file.st_mode) or file.st_uid not in owners:
        raise GpuguardError(
            _("{path} is not a file of the daemon's alone.  Look at it with `ls -l`.").format(path=path)
        )
    try:
        journal = os.lstat(path + JOURNAL)
    except OSError:
        return _version_of(file), None
    return _version_of(file), _version_of(journal) if journal.st_size else None


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _query(
    path: str, question: Callable[[Usage], _Answer], now: float, copy: str | None = None
) -> tuple[_Answer] | GpuguardError | None:
    """Query the store at *path*, or a *copy* of it: the answer, or what is wrong, or None if it is empty yet."""
    import sqlite3  # takes over 10 ms to load, and is not needed where there is no store
    from urllib.parse import quote

    uri = f"file:{quote(copy or path)}{'' if copy else '?mode=ro&immutable=1'}"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                return None  # a daemon is just making it: it writes the tables and their version together
            if version == VERSION:
                return (question(Usage(connection, now)),)
            aside = (
                _("  The daemon sets it aside at its next start, and begins a new one.") if version < VERSION else ""
            )
            return GpuguardError(
                _("{path} is of another version of gpuguard ({version}, this one knows {own}).{aside}").format(
                    path=path, version=version, own=VERSION, aside=aside
                )
            )
    except sqlite3.Error as error:
        return GpuguardError(
            _(
                "{path} cannot be read: {error}.  If it is damaged, the daemon sets it aside at its next start; "
                "what it leaves in its place then, move away while no daemon runs: it makes a new one."
            ).format(path=path, error=error)
        )


def _query_copy(path: str, question: Callable[[Usage], _Answer], now: float) -> tuple[_Answer] | GpuguardError | None:
    import shutil  # both load much that a waiting job does not need
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix="gpuguard-") as directory:
            copy = os.path.join(directory, FILE)
            for end in ("", JOURNAL):
                shutil.copyfile(path + end, copy + end)
            return _query(path, question, now, copy)
    except FileNotFoundError:
        return None  # a daemon has just repaired it
    except OSError as error:
        raise GpuguardError(
            _("{path} cannot be copied, which its journal demands: {error}.").format(path=path, error=error)
        ) from error
