"""Marks: what was decided about users and devices, in files that everybody can read and only root or the daemon write.

    denied.json         users who get no new claims, by uid
    quarantined.json    devices that nobody gets, by uuid
    kept.json           whom the daemon leaves alone: "UID", or "UID UUID" on one device
    set-back.json       tickets, and users by uid, that stand at the end of the queue: see services.broker

What root decides lies in the directory of the claims, what the daemon decides among the daemon's files; both count,
hold without a daemon, and end by themselves when their time is over.  A file that somebody else could have written
counts for nothing.  Where anybody may make files (the sticky fallback) there are no marks.  Does not say who may ask
for one: see door, and the commands deny and quarantine.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuguard.claims.directory import DaemonFiles, LockDirectory, daemon_files, open_lock_file, try_flock
from gpuguard.errors import LockDirectoryError, shortage
from gpuguard.files import read_file, write_file
from gpuguard.procfs import boot_clock, boot_id
from gpuguard.sanitize import neutralise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

DENIED, QUARANTINED, KEPT, SET_BACK = "denied", "quarantined", "kept", "set-back"
ADMINISTRATOR = "the administrator"
MAX_BYTES = 512 * 1024
MAX_MARKS = 1000
MAX_REASON = 200  # characters
WRITE_SECONDS = 5.0  # for another writer to finish
STEP_SECONDS = 1.0  # less of it is no step: the clock is led a little faster or slower all the time

_NOT_HERE = (
    "without a directory of root's anybody could write this, so it would mean nothing.  "
    "Run `sudo gpuguard setup` once, or name a directory with --dir."
)


@dataclass(frozen=True)
class Restriction:
    """One decision.

    Args:
        name: whom or what it is about: a uid or a uuid.
        since: unix time.
        until: unix time at which it ends by itself; None: when somebody ends it.
        reason: for people.
        by: who decided: "the administrator", "the policy hot-cards", or a user.
        user: name of the user, if it is about one.
    """

    name: str
    since: float
    until: float | None = None
    reason: str = ""
    by: str = ADMINISTRATOR
    user: str | None = None

    def holds(self, now: float) -> bool:
        """Whether it is not over yet."""
        return self.until is None or now < self.until


def read_restrictions(directory: LockDirectory, kind: str, now: float) -> dict[str, Restriction]:
    """The marks of a kind that hold at *now* (unix time); none when there is no file that can be trusted.

    Raises:
        OSError: no further file can be opened to look.
    """
    return _marks_in(_places(directory, kind), kind, now)


def against(directory: LockDirectory, uuids: Sequence[str], uid: int | None, now: float) -> dict[str, str]:
    """uuid -> why nobody, or not this user, gets it; uid None asks for nobody in particular."""
    denied = None if uid is None else read_restrictions(directory, DENIED, now).get(str(uid))
    found = dict.fromkeys(uuids, denial(denied)) if denied else {}
    marks = read_restrictions(directory, QUARANTINED, now)
    return found | {uuid: quarantine(marks[uuid]) for uuid in uuids if uuid in marks}


def denial(mark: Restriction) -> str:
    """``"new claims of bob are denied by the administrator until 11-20 20:15: too many jobs"``."""
    return f"new claims of {neutralise(mark.user or f'uid {mark.name}')} are denied {_tail(mark)}"


def quarantine(mark: Restriction) -> str:
    """``"quarantined by the administrator: XID 79, being replaced"``."""
    return f"quarantined {_tail(mark)}"


def change(
    directory: LockDirectory, kind: str, update: Callable[[dict[str, Restriction]], object]
) -> dict[str, Restriction]:
    """Let *update* change the marks of a kind; readers see the old ones or the new ones, whole, whenever we die.

    Returns:
        The marks after that.

    Raises:
        LockDirectoryError: this user or this directory cannot have marks, or there are too many.
    """
    if directory.owner is None:
        raise LockDirectoryError(_NOT_HERE)
    places = _places(directory, kind)
    mine = [each for each in places if os.geteuid() in (0, each.owner)] or list(places[:1])
    path = _path(mine[0], kind)
    try:
        with _alone(mine):
            marks = _marks_in(mine, kind, time.time())
            update(marks)
            if marks:
                _write(path, kind, marks)
            # Without a file nobody who starts a job has anything to read.  Root takes over what the daemon decided.
            for each in mine[bool(marks) :]:
                if os.path.lexists(_path(each, kind)):
                    os.unlink(_path(each, kind))
    except OSError as error:
        root = "" if os.geteuid() == 0 else "  Only the owner of the directory can: run it with sudo."
        raise LockDirectoryError(f"{path} cannot be written: {error.strerror}.{root}") from error
    return marks


def prolong(marks: dict[str, Restriction], mark: Restriction) -> None:
    """Add *mark*, unless there is one about the same that lasts longer."""
    before = marks.get(mark.name)
    if before is None or (before.until is not None and (mark.until is None or mark.until > before.until)):
        marks[mark.name] = replace(mark, reason=mark.reason[:MAX_REASON])


def _tail(mark: Restriction) -> str:
    until = "" if mark.until is None else time.strftime(" until %m-%d %H:%M", time.localtime(mark.until))
    return f"by {neutralise(mark.by)}{until}" + (f": {neutralise(mark.reason)}" if mark.reason else "")


def mark_files(directory: LockDirectory) -> tuple[str, ...]:
    """Where marks may lie that decide who may claim, and when."""
    return tuple(_path(place, kind) for kind in (DENIED, QUARANTINED, SET_BACK) for place in _places(directory, kind))


def _places(directory: LockDirectory, kind: str) -> tuple[DaemonFiles, ...]:
    """Where marks of a kind may lie, root's first."""
    if directory.owner is None:
        return ()
    daemons = daemon_files(directory)
    if kind in (KEPT, SET_BACK) or daemons.path == directory.path:
        return (daemons,)
    return (DaemonFiles(directory.path, directory.owner), daemons)


def _path(place: DaemonFiles, kind: str) -> str:
    return place.file(f"{kind}.json")


def _marks_in(places: Sequence[DaemonFiles], kind: str, now: float) -> dict[str, Restriction]:
    found: dict[str, Restriction] = {}
    for place in places:
        try:
            for mark in [mark for mark in _read(place, kind) if mark.holds(now)]:
                prolong(found, mark)
        except OSError as error:
            if shortage(error):  # it is there: it would be overlooked, and lost at the next change
                raise
        except (ValueError, ArithmeticError, TypeError, KeyError, AttributeError):
            continue
    return found


def _read(place: DaemonFiles, kind: str) -> Iterator[Restriction]:
    from gpuguard.jsonio import loads

    content = loads(read_file(_path(place, kind), MAX_BYTES, place.owners()))
    step = _step_since(content)
    for entry in content["marks"]:
        yield Restriction(
            str(entry["name"]),
            _moment(entry["since_unix_seconds"] + step),
            None if entry["until_unix_seconds"] is None else _moment(entry["until_unix_seconds"] + step),
            str(entry["reason"]),
            str(entry["by"]),
            None if entry["user"] is None else str(entry["user"]),
        )


def _step_since(content: Mapping[str, Any]) -> float:
    """By how many seconds the clock was set since that was written: what is left of a mark stays as long as it was."""
    step = _booted() - content.get("booted_unix_seconds", 0.0) if content.get("boot") == boot_id() != "" else 0.0
    return step if abs(step) > STEP_SECONDS else 0.0


def _booted() -> float:
    """The unix time at which the clock that nobody sets began to count."""
    return time.time() - boot_clock()


def _moment(value: float) -> float:
    if not abs(value) < 2**37:  # beyond the year 6000 it is none, and soon no date that can be shown
        raise ValueError("a time in it is none")
    return float(value)


def to_json(mark: Restriction) -> dict[str, str | float | None]:
    """What stands in the file, and what `--json` prints."""
    return {
        "name": mark.name,
        "user": mark.user,
        "since_unix_seconds": mark.since,
        "until_unix_seconds": mark.until,
        "reason": mark.reason,
        "by": mark.by,
    }


def _write(path: str, kind: str, marks: dict[str, Restriction]) -> None:
    import json

    facts = {"schema": 1, "boot": boot_id(), "booted_unix_seconds": _booted()}
    content = json.dumps({**facts, "marks": [to_json(mark) for mark in marks.values()]}, indent=1).encode("ascii")
    if len(marks) > MAX_MARKS or len(content) >= MAX_BYTES:
        raise LockDirectoryError(f"{path} would become too long: end some of what is {kind} first.")
    write_file(path, content, sync=True)


class _alone:  # noqa: N801  a context manager, written out because contextlib costs 4 ms of import
    """The only writer of these places for as long as the block lasts."""

    def __init__(self, places: Sequence[DaemonFiles]) -> None:
        self._places, self._held = places, list[int]()

    def __enter__(self) -> None:
        deadline = time.monotonic() + WRITE_SECONDS
        try:
            for place in self._places:
                self._take(place, deadline)
        except BaseException:  # a daemon would keep what it has
            self.__exit__()
            raise

    def _take(self, place: DaemonFiles, deadline: float) -> None:
        descriptor = open_lock_file(place, "marks.lock")
        self._held.append(descriptor)
        while not try_flock(descriptor):
            if time.monotonic() >= deadline:
                path = place.file("marks.lock")
                raise LockDirectoryError(f"{path} is held by another command that does not end.  Try again.")
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        for descriptor in self._held:
            os.close(descriptor)
