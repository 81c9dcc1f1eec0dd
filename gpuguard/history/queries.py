"""Queries to the usage store: totals, series and windows, each over a time and from the finest slots kept.

    query_store(store_path(directory), lambda usage: usage.totals("user", begin, end))

What nobody watched is in no answer, and no answer takes it for zero: watched() tells how much was seen.  Only slots
that begin in the time that was asked for count.  A store that holds what gpuguard does not write is damaged: each row
passes _sound.

Reading takes no lock and needs no daemon.  A lock of a reader would keep the daemon from writing, and a user could hold
one for ever, to be rid of a quota; so the writer keeps everybody out by a lock of its own, and leaves a whole database
file and an empty journal after each write.  A reader looks at both before and after, and reads again if they changed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from gpuguard.claims.directory import ADMIN_DIRECTORY, LockDirectory, daemon_files
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history.schema import COARSEST, GAUGES, NOBODY_KNOWS, SLOTS, USER_COLUMNS, VERSION, holdings, key, rows
from gpuguard.jsonio import LARGEST

if TYPE_CHECKING:
    import sqlite3

SpentSeconds = Mapping[int, Mapping[float, float]]  # uid -> (window in seconds -> GPU-seconds claimed in it)
_Answer = TypeVar("_Answer")

SHARES = 64  # of a half-life: usage is that exact in time, which is wrong by 0.5 % at most
HALF_LIVES = 10  # after which a thousandth is left
# What series() tells: how it is computed from the columns (value x seconds, highest, milliseconds without it).
METRICS = {
    **{gauge: (f"{gauge}_sum", f"{gauge}_max", f"{gauge}_unknown_ms") for gauge in GAUGES},
    "claimed_percent": ("claimed_ms / 10.0", "NULL", "claimed_unknown_ms"),
}
# What an answer may have in a column; in each other one it has numbers.
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
class KnownValue:
    """A device that was seen once."""

    uuid: str
    name: str | None
    parent: str | None  # of a MIG instance
    index: int | None  # that it had last; None: another device has it now, or it is a MIG instance


@dataclass(frozen=True)
class Total:
    """What was claimed and used, in GPU-seconds.  Which of uid, device and group are set is as was asked."""

    claimed: float
    used: float
    idle: float  # claimed, and nothing worked there
    unclaimed: float  # used without a claim
    uid: int | None = None
    device: str | None = None
    group: str | None = None

    @property
    def unknown(self) -> float:
        """Claimed, and nobody can tell whether it was used."""
        return max(0.0, self.claimed - self.used - self.idle)


@dataclass(frozen=True)
class Waited:
    """How long one user waited in the queue, in seconds of the time that was asked for."""

    uid: int | None  # None: the time in which the queue could not be read
    waiting: float  # with at least one request
    wanted: float  # GPU-seconds: times the GPUs that all of the requests asked for


@dataclass(frozen=True)
class Watch:
    """What part of a time is known, in unix time and seconds."""

    begin: float  # of the slots that count
    end: float
    seen: float  # seconds in which at least one device was watched
    store_begins: float | None  # the oldest slot of all; None: the store is empty
    width: int  # of the slots


@dataclass(frozen=True)
class DeviceTotal:
    """What one device did, in seconds of the time that was asked for.  Time that is not in `seen` was not watched."""

    device: str
    name: str | None
    parent: str | None  # of a MIG instance
    index: int | None  # that it had last; None: another device has it now, or it is a MIG instance
    seen: float
    claimed: float
    claimed_unknown: float
    utilization: float | None  # percent, mean of the time in which it was known
    energy: float | None  # joules, in the time in which it was known
    energy_unknown: float


class Usage:
    """A store that is open for reading, at the unix time *now*."""

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection, self.now = connection, now

    def gpu_seconds(self, windows: Collection[float]) -> dict[int, dict[float, float]]:
        """GPU-seconds that each user has claimed in the last so many seconds: uid -> (window -> seconds)."""
        results: dict[int, dict[float, float]] = {}
        for window in windows:
            begin = self.now - window
            for uid, claimed in self._rows("users", "uid, SUM(claimed_ms)", begin, self.now, "GROUP BY uid"):
                results.setdefault(uid, {})[window] = claimed / 1000
        return results

    def decayed(self, half_life: float) -> dict[int, float]:
        """GPU-seconds that each user has had, claimed or not; those of *half_life* seconds ago count half."""
        begin = self.now - HALF_LIVES * half_life
        width = self.width(begin)
        bucket = max(1, round(half_life / SHARES / width))
        columns = f"slot / {bucket} AS bucket, uid, SUM(claimed_ms + unclaimed_ms)"
        results: dict[int, float] = {}
        for number, uid, had in self._rows("users", columns, begin, self.now, "GROUP BY bucket, uid"):
            age = max(0.0, self.now - (number + 0.5) * bucket * width)
            results[uid] = results.get(uid, 0.0) + had / 1000 * 0.5 ** (age / half_life)
        return results

    def known(self) -> list[KnownValue]:
        """All devices that were ever seen, by their index, then in the order in which they were first seen."""
        results = self._execute("SELECT uuid, name, parent, place FROM devices ORDER BY place IS NULL, place, id")
        return [KnownValue(*row) for row in results]

    def watched(self, begin: float, end: float) -> Watch:
        """How much of the time between two unix times was seen."""
        width = self.width(begin)
        most = f"SELECT MAX(seen_ms) AS most FROM ({rows('devices', width)}) GROUP BY slot"
        (seen,) = self._execute(f"SELECT SUM(most) AS seen_at_all FROM ({most})", *_keys(begin, end, width)).fetchone()
        (oldest,) = self._execute(
            f"SELECT MIN(slot) AS oldest FROM ({rows('devices', COARSEST)})", -(2**63), 2**63 - 1
        ).fetchone()
        whole = min(_next(begin, width) * width, end), min(_next(end, width) * width, max(end, self.now))
        return Watch(*whole, (seen or 0) / 1000, None if oldest is None else float(oldest * COARSEST), width)

    def waiting(self, begin: float, end: float) -> list[Waited]:
        """Which users waited for how long between two unix times; the one that wanted most comes first."""
        columns = "uid, SUM(waiting_ms), SUM(wanted_gpu_seconds)"
        results = [
            Waited(None if uid == NOBODY_KNOWS else uid, waiting / 1000, float(wanted))
            for uid, waiting, wanted in self._rows("waiting", columns, begin, end, "GROUP BY uid")
        ]
        return sorted(results, key=lambda row: (-row.wanted, -row.waiting, row.uid or 0))

    def energy(self, begin: float, end: float) -> dict[int, float | None]:
        """Joules that each user's devices took while the user had them: uid -> joules; None: nobody measured them.

        What a device takes in a slot is divided by the time that each user claimed it, or used it without a claim.
        What it took while nobody had it is nobody's.
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
        """The values of one device (uuid) between two unix times, oldest first; none where nobody watched.

        Args:
            device: its uuid.
            metric: one of METRICS.
            begin: from when on; how far back it is decides how wide the slots are.
            end: until when.

        Raises:
            InvalidRequest: there is no such metric.
        """
        if metric not in METRICS:
            raise InvalidRequest(f"there is no metric {metric!r}.  There are {', '.join(METRICS)}.")
        value, highest, unknown = METRICS[metric]
        width = self.width(begin)
        columns = f"slot, {value}, {highest} AS highest, seen_ms - {unknown}"
        chosen = "WHERE device = (SELECT id FROM devices WHERE uuid = ?) ORDER BY slot"
        results = []
        for slot, total, most, known in self._rows("devices", columns, begin, end, chosen, device):
            mean = total * 1000 / known if known > 0 else None
            results.append(Point(slot * width, width, known / 1000, mean, most))
        return results

    def totals(
        self, by: str, begin: float, end: float, groups: Mapping[int, Collection[str]] | None = None
    ) -> list[Total]:
        """What was claimed and used between two unix times; what claimed most comes first.

        Args:
            by: "user", "device", "user and device", or "group": the members of each together.
            begin: from when on.
            end: until when.
            groups: uid -> names of the user's groups, for "group".  A user who has none is in none.
        """
        sums = ", ".join(f"SUM({column})" for column in USER_COLUMNS)
        keys = {"device": "device", "user and device": "uid, device"}.get(by, "uid")
        names = dict(self._execute("SELECT id, uuid FROM devices"))
        results = []
        rows = self._rows("users", f"{keys}, {sums}", begin, end, f"GROUP BY {keys}")
        for *whose, claimed, used, idle, unclaimed in rows:
            known = dict(zip(keys.split(", "), whose, strict=True))
            total = Total(claimed / 1000, used / 1000, idle / 1000, unclaimed / 1000, known.get("uid"))
            results.append(replace(total, device=names.get(known.get("device"))))
        if by == "group":
            results = _by_group(results, groups or {})
        return sorted(results, key=lambda row: (-row.claimed, -row.unclaimed, row.uid or 0, row.device or ""))

    def devices(self, begin: float, end: float) -> list[DeviceTotal]:
        """What each device did between two unix times, in the order in which they were first seen."""
        columns = (
            "seen_ms", "claimed_ms", "claimed_unknown_ms", "utilization_percent_sum", "utilization_percent_unknown_ms",
            "energy_joules", "energy_unknown_ms",
        )  # fmt: skip
        sums = ", ".join(f"SUM({column})" for column in columns)
        rows = {number: row for number, *row in self._rows("devices", f"device, {sums}", begin, end, "GROUP BY device")}
        results = []
        known = self._execute("SELECT id, uuid, name, parent, place FROM devices ORDER BY id")
        for number, uuid, name, parent, index in known:
            if number not in rows:
                continue
            seen, claimed, unknown, total, untold, joules, unmeasured = rows[number]
            mean = total * 1000 / (seen - untold) if seen > untold else None
            energy = float(joules) if seen > unmeasured else None
            times = seen / 1000, claimed / 1000, unknown / 1000
            results.append(DeviceTotal(uuid, name, parent, index, *times, mean, energy, unmeasured / 1000))
        return results

    def width(self, begin: float) -> int:
        """Of the finest slots that are kept as far back as *begin*, in seconds."""
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
    """A row in which everything is what gpuguard writes: SQLite keeps whatever a column is given."""
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
    # Only slots that begin in the time that was asked for: a quota rather counts too little.
    return key(_next(begin, width), 0, width), key(_next(end, width), 0, width)


def _next(moment: float, width: int) -> int:
    """The first slot that begins at *moment* or later."""
    return -int(-moment // width)


def _by_group(totals: Collection[Total], groups: Mapping[int, Collection[str]]) -> list[Total]:
    results: dict[str, Total] = {}
    for total in totals:
        for group in groups.get(total.uid or 0, ()):
            former = results.get(group) or Total(0.0, 0.0, 0.0, 0.0, group=group)
            results[group] = replace(
                former,
                claimed=former.claimed + total.claimed,
                used=former.used + total.used,
                idle=former.idle + total.idle,
                unclaimed=former.unclaimed + total.unclaimed,
            )
    return list(results.values())


MACHINE_STATE = "/var/lib/gpuguard"  # of the daemon of root
FILE, JOURNAL = "usage.db", "-wal"
READ_TRIES, READ_PAUSE = 8, 0.05  # the daemon's write takes 1 to 20 ms


def store_path(directory: LockDirectory) -> str:
    """Where the store of the daemon of that claim directory lies.

    $GPUGUARD_STATE_DIR; else of the machine's own claim directory MACHINE_STATE, since /run is empty after a boot; else
    beside the claims, if the directory is not one that all users share.
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
    """The answer of *question* to the store at *path*.  Not for the process that writes it: see recorder.

    Args:
        path: see store_path.
        question: may be asked several times, because the daemon wrote in between.
        now: unix time; None: of the clock.

    Raises:
        GpuguardError: there is no store, or none that can be read.
    """
    now = time.time() if now is None else now
    former = None
    for _ in range(READ_TRIES):
        view = _open_view(path)
        reply: tuple[_Answer] | sqlite3.Error | int | None = None
        if not view.journal:
            reply = _query(path, "?mode=ro&immutable=1", question, now)
        elif view == former:
            # The daemon was killed while it wrote: its journal belongs to the file, and only a copy may be put right.
            reply = _query_copy(path, question, now)
        if reply is not None and _open_view(path) == view:
            break
        former = view
        time.sleep(READ_PAUSE)
    else:
        raise GpuguardError(
            f"{path} is being written all the time, or nothing is in it.  Try again in a minute; if it stays so, start "
            "the daemon anew, which says what is wrong with it."
        )
    if isinstance(reply, int):
        aside = "  The daemon sets it aside at its next start, and begins a new one." if reply < VERSION else ""
        raise GpuguardError(f"{path} is of another version of gpuguard ({reply}, this one knows {VERSION}).{aside}")
    if not isinstance(reply, tuple):
        raise GpuguardError(
            f"{path} cannot be read: {reply}.  If it is damaged, the daemon sets it aside at its next start; what it "
            "leaves in its place then, move away while no daemon runs: it makes a new one."
        ) from reply
    return reply[0]


@dataclass(frozen=True)
class _StoreView:
    """What the files looked like: while it stays the same nobody has written."""

    file: tuple[int, ...]
    journal: tuple[int, ...] | None  # None: there is none, or it is empty


def _open_view(path: str) -> _StoreView:
    try:
        file = os.lstat(path)
    except FileNotFoundError:
        raise GpuguardError(
            f"there is no usage store at {path}: `gpuguard daemon` makes it.  GPUGUARD_STATE_DIR names another place."
        ) from None
    except OSError as error:
        raise GpuguardError(f"{path} cannot be read: {error.strerror}.") from error
    if not os.access(path, os.R_OK):
        raise GpuguardError(
            f"{path} cannot be read: Permission denied.  The daemon opens it to everybody when it starts."
        )
    # The daemon's files are believed: root's, our own, and those of the user to whom root gave the directory.
    parent = os.stat(os.path.dirname(path))
    owners = {0, os.geteuid(), *(() if parent.st_mode & 0o022 else (parent.st_uid,))}
    if not stat.S_ISREG(file.st_mode) or file.st_uid not in owners:
        raise GpuguardError(f"{path} is not a file of the daemon's alone.  Look at it with `ls -l`.")
    try:
        journal = os.lstat(path + JOURNAL)
    except OSError:
        return _StoreView(_version_of(file), None)
    return _StoreView(_version_of(file), _version_of(journal) if journal.st_size else None)


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _query(
    path: str, options: str, question: Callable[[Usage], _Answer], now: float
) -> tuple[_Answer] | sqlite3.Error | int | None:
    """The answer, or an error, or a version that is not ours; None: there is nothing yet."""
    import sqlite3  # takes over 10 ms to load, and is not needed where there is no store
    from urllib.parse import quote

    try:
        connection = sqlite3.connect(f"file:{quote(path)}{options}", uri=True)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                return None  # a daemon is just making it: the tables come with their version
            return (question(Usage(connection, now)),) if version == VERSION else version
        finally:
            connection.close()
    except sqlite3.Error as error:
        return error


def _query_copy(
    path: str, question: Callable[[Usage], _Answer], now: float
) -> tuple[_Answer] | sqlite3.Error | int | None:
    import shutil  # both bring much that a waiting job does not need
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix="gpuguard-") as directory:
            copy = os.path.join(directory, FILE)
            for end in ("", JOURNAL):
                shutil.copyfile(path + end, copy + end)
            return _query(copy, "", question, now)
    except FileNotFoundError:
        return None  # a daemon has just put it right
    except OSError as error:
        raise GpuguardError(f"{path} cannot be copied, which its journal demands: {error}.") from error
