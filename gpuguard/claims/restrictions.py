"""Restrictions: decisions about users and devices, in files that only root or the daemon can write.

    denied.json         users who get no new claims, by uid
    quarantined.json    devices that no job gets, by uuid
    kept.json           exemptions: processes that the daemon leaves alone, "UID", or "UID UUID" on one device
    set-back.json       tickets, and users by uid, that stand at the end of the queue: see daemon.broker

Everybody can read them.  Root's decisions lie in the claim directory, the daemon's among the daemon's files; both
count, hold without a daemon, and end by themselves when their time is over.  The claim directory is gone after a boot,
so restrictions that must outlive it have a copy in COPIES, which systemd-tmpfiles brings back before the first claim
(see `gpuguard setup`).  A file that another user could have written counts for nothing.  Where any user may make files
(the sticky fallback), there are no restrictions.  This module does not say who may ask for one: see daemon.requests,
and the commands deny and quarantine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from gpuguard.claims.directory import ADMIN_DIRECTORY, NAME, DaemonFiles, LockDirectory, daemon_files, open_lock_file
from gpuguard.errors import LockDirectoryError, shortage
from gpuguard.files import read_file, write_file
from gpuguard.jsonio import decode, loads
from gpuguard.locale.messages import dumps, sentence
from gpuguard.procfs import boot_clock, boot_id
from gpuguard.sanitize import neutralise
from gpuguard.units import local_time
from gpuguard.users import owner_of_given

DENIED: Final = "denied"
QUARANTINED: Final = "quarantined"
KEPT, SET_BACK = "kept", "set-back"
ADMINISTRATOR = sentence("by.administrator", "the administrator")
# Folder -> where the copies of its denied and quarantined lie.  Each copy belongs to the user who writes it.
COPIES = {ADMIN_DIRECTORY: "/var/lib/gpuguard-admin", f"{ADMIN_DIRECTORY}/{NAME}": "/var/lib/gpuguard"}
MAX_BYTES = 512 * 1024
MAX_RESTRICTIONS = 1000
MAX_REASON = 200  # characters
REMEMBERED_SECONDS = {KEPT: 7 * 86400.0}  # how long change() still finds those that are over
WRITE_SECONDS = 5.0  # for another writer to finish
LATEST = 2**37  # unix time: one beyond the year 6000 is an error, and soon could not be shown as a date
STEP_SECONDS = 1.0  # a smaller change of the clock is no step, because it is always adjusted a little

_NOT_HERE = sentence(
    "restriction.not_here",
    "without a directory of root's anybody could write this, so it would mean nothing.  "
    "Run `sudo gpuguard setup` once, or name a directory with --dir.",
)


@dataclass(frozen=True)
class Restriction:
    """One decision about a user or a device."""

    name: str  # what it is about: a uid or a uuid
    since: float  # unix time
    until: float | None = None  # unix time at which it ends by itself, or None if it must be ended
    reason: str = ""  # for people
    by: str = ADMINISTRATOR  # who decided: "the administrator", "the policy hot-cards", or a user
    user: str | None = None  # name of the user, if it is about one
    # (pid, start time) of the process that caused it; it ends with that process: see enforcement.actions
    process: tuple[int, float] | None = None
    # (begin, end) of the times in the last days for which a user asked, or None if they are not counted
    asked: tuple[tuple[float, float], ...] | None = None
    begins: float | None = None  # unix time, or None if it holds at once
    until_reboot: bool = False  # it is over after a boot

    def holds(self, now: float) -> bool:
        """Return whether it has begun and is not over."""
        return not self.is_over(now) and (self.begins is None or self.begins <= now)

    def is_over(self, now: float) -> bool:
        """Return whether its time is over."""
        return self.until is not None and now >= self.until


def read_restrictions(
    directory: LockDirectory, kind: str, now: float, *, planned: bool = False
) -> dict[str, Restriction]:
    """Return the restrictions of a kind that hold at *now* (unix time), or none if no file can be trusted.

    With *planned*, those that begin later are returned as well.

    Raises:
        OSError: no further file can be opened to look.
    """
    found = _read_all(_folders(directory, kind), kind, now)
    return {name: each for name, each in found.items() if planned or each.holds(now)}


def restrictions_against(directory: LockDirectory, uuids: Sequence[str], uid: int | None, now: float) -> dict[str, str]:
    """Return uuid -> why no user, or not the user *uid*, gets the device.  *uid* None is no user in particular."""
    if not any(map(os.path.lexists, restriction_files(directory))):
        return {}
    denied = None if uid is None else denial_of(read_restrictions(directory, DENIED, now), uid)
    reasons = dict.fromkeys(uuids, denial_text(denied)) if denied else {}
    quarantined = read_restrictions(directory, QUARANTINED, now)
    return reasons | {uuid: quarantine_text(quarantined[uuid]) for uuid in uuids if uuid in quarantined}


def denial_of(denied: Mapping[str, Restriction], uid: int) -> Restriction | None:
    """Return the denial that holds for *uid*: its own, or that of the user to whom root has given it (see users)."""
    if str(uid) in denied:
        return denied[str(uid)]
    owner = owner_of_given(uid) if denied else None
    if owner is None:
        return None
    for name, restriction in denied.items():
        if owner in (name, restriction.user) or (name.isdecimal() and owner == owner_of_given(int(name))):
            return restriction
    return None


def restriction_files(directory: LockDirectory) -> tuple[str, ...]:
    """Return the paths of the files whose restrictions decide who may claim, and when."""
    kinds = (DENIED, QUARANTINED, SET_BACK)
    return tuple(_path(files, kind) for kind in kinds for files in _folders(directory, kind))


def denial_text(restriction: Restriction) -> str:
    """Return ``"new claims of bob are denied by the administrator until 11-20 20:15: too many jobs"``."""
    user, by = neutralise(restriction.user or f"uid {restriction.name}"), neutralise(restriction.by)
    if restriction.until is None:
        denied = sentence("restriction.denied", "new claims of {user} are denied by {by}", user=user, by=by)
    else:
        denied = sentence(
            "restriction.denied_until",
            "new claims of {user} are denied by {by} until {time}",
            user=user,
            by=by,
            time=local_time(restriction.until, "%m-%d %H:%M"),
        )
    return _with_reason(denied, restriction.reason)


def quarantine_text(restriction: Restriction) -> str:
    """Return ``"quarantined by the administrator: XID 79, being replaced"``."""
    by = neutralise(restriction.by)
    if restriction.until is None:
        quarantined = sentence("restriction.quarantined", "quarantined by {by}", by=by)
    else:
        quarantined = sentence(
            "restriction.quarantined_until",
            "quarantined by {by} until {time}",
            by=by,
            time=local_time(restriction.until, "%m-%d %H:%M"),
        )
    return _with_reason(quarantined, restriction.reason)


def change(
    directory: LockDirectory, kind: str, update: Callable[[dict[str, Restriction]], object]
) -> dict[str, Restriction]:
    """Let *update* change the restrictions of a kind.  Readers see all of the old ones or all of the new ones.

    Returns:
        The restrictions after that.

    Raises:
        LockDirectoryError: this user or this directory cannot have restrictions, or there are too many.
    """
    if directory.owner is None:
        raise LockDirectoryError(_NOT_HERE)
    folders = _folders(directory, kind)
    writable = [files for files in folders if os.geteuid() in (0, files.owner)] or list(folders[:1])
    path = _path(writable[0], kind)
    try:
        with _only_writer(writable):
            restrictions = _read_all(writable, kind, time.time() - REMEMBERED_SECONDS.get(kind, 0.0))
            update(restrictions)
            lasting = {name: each for name, each in restrictions.items() if not (each.until_reboot or each.process)}
            for number, files in enumerate(writable):
                _write_copy(files, kind, lasting if number == 0 else {})
            if restrictions:
                _write(path, kind, restrictions)
            # No empty file is kept, so that a command that starts a job has nothing to read.  Root takes over what the
            # daemon decided.
            for files in writable[bool(restrictions) :]:
                if os.path.lexists(_path(files, kind)):
                    os.unlink(_path(files, kind))
    except OSError as error:
        why = str(error.strerror)
        raise LockDirectoryError(
            sentence("restriction.not_written", "{path} cannot be written: {strerror}.", path=path, strerror=why)
            if os.geteuid() == 0
            else sentence(
                "restriction.not_owner",
                "{path} cannot be written: {strerror}.  Only the owner of the directory can: run it with sudo.",
                path=path,
                strerror=why,
            )
        ) from error
    return restrictions


def extend(restrictions: dict[str, Restriction], restriction: Restriction) -> None:
    """Add *restriction*, unless one about the same subject lasts longer or may: a process ends at an unknown time."""
    before = restrictions.get(restriction.name)
    longer = before is None or (
        before.until is not None
        and not restriction.process
        and (restriction.until is None or restriction.until > before.until)
    )
    if longer:
        is_long = len(restriction.reason) > MAX_REASON
        restrictions[restriction.name] = (
            replace(restriction, reason=restriction.reason[:MAX_REASON]) if is_long else restriction
        )


def to_json(restriction: Restriction) -> dict[str, str | float | None]:
    """Return the object that stands in the file and that `--json` prints."""
    return {
        "name": restriction.name,
        "user": restriction.user,
        "since_unix_seconds": restriction.since,
        "until_unix_seconds": restriction.until,
        "reason": restriction.reason,
        "by": restriction.by,
        "begins_unix_seconds": restriction.begins,
        "until_reboot": restriction.until_reboot,
    }


def _with_reason(decision: str, reason: str) -> str:
    return sentence("because", "{what}: {why}", what=decision, why=neutralise(reason)) if reason else decision


def _folders(directory: LockDirectory, kind: str) -> tuple[DaemonFiles, ...]:
    """Return the places where restrictions of a kind may lie, root's first."""
    if directory.owner is None:
        return ()
    daemons = daemon_files(directory)
    if kind in (KEPT, SET_BACK) or daemons.path == directory.path:
        return (daemons,)
    return (DaemonFiles(directory.path, directory.owner), daemons)


def _path(files: DaemonFiles, kind: str) -> str:
    return files.file(f"{kind}.json")


def _read_all(folders: Sequence[DaemonFiles], kind: str, now: float) -> dict[str, Restriction]:
    restrictions: dict[str, Restriction] = {}
    for files in folders:
        try:
            for restriction in [restriction for restriction in _read(files, kind) if not restriction.is_over(now)]:
                extend(restrictions, restriction)
        except (FileNotFoundError, ValueError, ArithmeticError, TypeError, KeyError, AttributeError):
            continue
        except OSError as error:
            if shortage(error):  # the file exists: it would be overlooked now, and lost at the next change
                raise
    return restrictions


def _read(files: DaemonFiles, kind: str) -> Iterator[Restriction]:
    content = loads(read_file(_path(files, kind), MAX_BYTES, files.owners()))
    # If the clock was set since the file was written, each restriction still has as long to go as before.
    this_boot = content.get("boot") == boot_id() != ""
    step = _booted() - content.get("booted_unix_seconds", 0.0) if this_boot else 0.0
    step = step if abs(step) > STEP_SECONDS else 0.0
    for entry in content["marks"]:
        process, asked = entry.get("pid_and_start_seconds"), entry.get("asked_unix_seconds")
        if (process is not None or entry.get("until_reboot")) and not this_boot:
            continue
        times = {"since": entry["since_unix_seconds"], "until": entry["until_unix_seconds"]}
        times["begins"] = entry.get("begins_unix_seconds")
        times = {name: None if when is None else when + step for name, when in times.items()}
        asked = None if asked is None else [[begin + step, end + step] for begin, end in asked]
        if not all(when is None or abs(when) < LATEST for when in times.values()):
            raise ValueError("a time in it is none")
        yield decode(Restriction, {**entry, **times, "process": process, "asked": asked})


def _booted() -> float:
    """Return the unix time at which the clock that is never set began to count."""
    return time.time() - boot_clock()


def _write(path: str, kind: str, restrictions: dict[str, Restriction]) -> None:
    facts = {"schema": 1, "boot": boot_id(), "booted_unix_seconds": _booted()}
    entries = [
        to_json(restriction) | {"pid_and_start_seconds": restriction.process, "asked_unix_seconds": restriction.asked}
        for restriction in restrictions.values()
    ]
    content = dumps({**facts, "marks": entries}, indent=1)
    if len(restrictions) > MAX_RESTRICTIONS or len(content) >= MAX_BYTES:
        raise LockDirectoryError(
            sentence(
                "restriction.too_long",
                "{path} would become too long: end some of what is {kind} first.",
                path=path,
                kind=kind,
            )
        )
    write_file(path, content, sync=True)


def _write_copy(files: DaemonFiles, kind: str, lasting: dict[str, Restriction]) -> None:
    """Copy the *lasting* restrictions to where they outlive a boot.

    Raises OSError only for root, because a daemon may have no such place.
    """
    place = COPIES.get(files.path) if kind in (DENIED, QUARANTINED) else None
    if place is None:
        return
    path = os.path.join(place, f"{kind}.json")
    with suppress(*(() if os.geteuid() == 0 else (OSError,))):
        if lasting:
            os.makedirs(place, exist_ok=True)
            _write(path, kind, lasting)
        elif os.path.lexists(path):
            os.unlink(path)


@contextmanager
def _only_writer(folders: Sequence[DaemonFiles]) -> Iterator[None]:
    """Be the only writer of these folders for as long as the block lasts."""
    from filelock import FileLock, Timeout  # takes over 10 ms to load, and `gpuguard run` only reads restrictions

    deadline = time.monotonic() + WRITE_SECONDS
    with ExitStack() as held:
        for files in folders:
            os.close(open_lock_file(files, "marks.lock"))  # the file exists now, and it is no other user's
            path = files.file("marks.lock")
            try:
                held.enter_context(FileLock(path, timeout=max(0.0, deadline - time.monotonic())))
            except Timeout:
                raise LockDirectoryError(
                    sentence(
                        "restriction.held",
                        "{path} is held by another command that does not end.  Try again.",
                        path=path,
                    )
                ) from None
        yield
