"""Reading the usage store: who claimed and used which device for how long, and how busy it was, for 400 days.

Three resolutions, each with a bounded number of slots; a slot's number is unix time // width.  Reading takes no lock
and needs no daemon.  A lock of a reader would keep the daemon from writing, and whoever may read could hold one for
ever, to be rid of a quota; so the writer keeps everybody out by a lock of its own, and leaves a whole database file and
an empty journal after each write.  Whoever reads looks at both before and after, and reads again if they changed.
Does not decide what is used: see tally.  Does not answer: see questions.  Does not write: see recorder.

    consult(store_path(directory), lambda usage: usage.totals("user", begin, end))
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.claims.daemonfiles import daemon_files
from gpuguard.claims.lockfiles import ADMIN_DIRECTORY, LockDirectory
from gpuguard.errors import GpuguardError
from gpuguard.usage.tables import COARSEST as COARSEST
from gpuguard.usage.tables import SLOTS as SLOTS
from gpuguard.usage.tables import VERSION

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Mapping
    from typing import TypeAlias, TypeVar

    from gpuguard.usage.questions import Usage

    SpentSeconds = Mapping[int, Mapping[float, float]]  # uid -> (window in seconds -> GPU-seconds claimed in it)
    _Answer = TypeVar("_Answer")
    _Reply: TypeAlias = tuple[_Answer] | sqlite3.Error | int  # the answer, or an error, or a version that is not ours

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


def consult(path: str, question: Callable[[Usage], _Answer], now: float | None = None) -> _Answer:
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
        look = _look(path)
        answer: _Reply[_Answer] | None = None
        if not look.journal:
            answer = _ask(path, "?mode=ro&immutable=1", question, now)
        elif look == former:
            # The daemon was killed while it wrote: its journal belongs to the file, and only a copy may be put right.
            answer = _ask_copy(path, question, now)
        if answer is not None and _look(path) == look:
            return _told(answer, path)
        former = look
        time.sleep(READ_PAUSE)
    raise GpuguardError(
        f"{path} is being written all the time, or nothing is in it.  Try again in a minute; if it stays so, start the "
        "daemon anew, which says what is wrong with it."
    )


@dataclass(frozen=True)
class _Look:
    """What the files looked like: while it stays the same nobody has written."""

    file: tuple[int, ...]
    journal: tuple[int, ...] | None  # None: there is none, or it is empty


def _look(path: str) -> _Look:
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
    if not stat.S_ISREG(file.st_mode) or file.st_uid not in _owners(os.path.dirname(path)):
        raise GpuguardError(f"{path} is not a file of the daemon's alone.  Look at it with `ls -l`.")
    try:
        journal = os.lstat(path + JOURNAL)
    except OSError:
        return _Look(_marks(file), None)
    return _Look(_marks(file), _marks(journal) if journal.st_size else None)


def _owners(place: str) -> set[int]:
    """Whose files are believed there: the daemon's, who is whom root gave the directory to."""
    found = os.stat(place)
    return {0, os.geteuid(), *(() if found.st_mode & 0o022 else (found.st_uid,))}


def _marks(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _ask(path: str, options: str, question: Callable[[Usage], _Answer], now: float) -> _Reply[_Answer] | None:
    import sqlite3
    from urllib.parse import quote

    from gpuguard.usage.questions import Usage

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


def _ask_copy(path: str, question: Callable[[Usage], _Answer], now: float) -> _Reply[_Answer] | None:
    import shutil
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix="gpuguard-") as place:
            copy = os.path.join(place, FILE)
            for end in ("", JOURNAL):
                shutil.copyfile(path + end, copy + end)
            return _ask(copy, "", question, now)
    except FileNotFoundError:
        return None  # a daemon has just put it right
    except OSError as error:
        raise GpuguardError(f"{path} cannot be copied, which its journal demands: {error}.") from error


def _told(answer: _Reply[_Answer], path: str) -> _Answer:
    if isinstance(answer, int):
        aside = "  The daemon sets it aside at its next start, and begins a new one." if answer < VERSION else ""
        raise GpuguardError(f"{path} is of another version of gpuguard ({answer}, this one knows {VERSION}).{aside}")
    if not isinstance(answer, tuple):
        raise GpuguardError(
            f"{path} cannot be read: {answer}.  If it is damaged, the daemon sets it aside at its next start; what it "
            "leaves in its place then, move away while no daemon runs: it makes a new one."
        ) from answer
    return answer[0]
