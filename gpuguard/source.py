"""The daemon's latest snapshot, for everybody: state.json among its files, so that nobody need wake the driver.

It counts only while its daemon lives, which the lock on daemon.lock tells, and while it is fresh.  What only root may
see of a process does not go in.  Does not decide when it is written: see daemon.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gpuguard.claims.directory import DaemonFiles, LockDirectory, daemon_files, open_lock_file, try_flock
from gpuguard.claims.holders import inode_of
from gpuguard.errors import LockDirectoryError
from gpuguard.files import read_file, status_in_place, write_file
from gpuguard.jsonio import decode, loads
from gpuguard.model import Snapshot
from gpuguard.procfs import start_time

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


MAX_BYTES = 8 * 2**20  # 16 devices with 128 processes each, all with long command lines, are 2 MiB
FRESH_INTERVALS = 2.0
LATELY_SECONDS = 120.0
_PRIVATE = ("executable", "working_directory", "conda_environment")  # of a process: only root may see them

_starts: dict[int, float | None] = {}  # when we started; a copy of us is somebody else
_hidden: dict[bytes, bool] = {}  # what the last mountinfo says


def lock_daemon(directory: LockDirectory) -> int | None:
    """Become the one daemon of this directory, until the returned descriptor is closed; None: another one is.

    Raises:
        LockDirectoryError: the lock file cannot be used.
    """
    files = daemon_files(directory)
    if files.path != directory.path and _is_locked(f"{directory.path}/daemon.lock"):
        return None  # one that was started before it had a directory of its own
    path = files.file("daemon.lock")
    try:
        descriptor = open_lock_file(files, "daemon.lock")
    except OSError as error:
        raise LockDirectoryError(
            f"{path} cannot be opened: {error.strerror}.  Run the daemon as {_who_may(files)}; "
            f"`sudo gpuguard setup` gives it a directory for a user of its own."
        ) from error
    try:
        if try_flock(descriptor):
            return descriptor
    except LockDirectoryError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def daemon_lives(directory: LockDirectory) -> bool:
    """Whether a process that we can see holds the daemon's lock; asked of the kernel, so nobody is disturbed."""
    return _is_locked(_path(directory, "daemon.lock"))


def _is_locked(path: str) -> bool:
    """Whether somebody has locked that very file: in another file system anybody has one of the same number."""
    inode = inode_of(path).encode()
    try:
        with open("/proc/locks", "rb") as locks:
            return bool(inode) and any(b" FLOCK " in line and b" %s " % inode in line for line in locks)
    except OSError:
        return False


def write_state(directory: LockDirectory, snapshot: Snapshot, interval: float) -> None:
    """Publish *snapshot*; readers see the old one or the new one, whole.

    Args:
        directory: of the claims.
        snapshot: with its claims.
        interval: seconds until the next one.

    Raises:
        OSError: it cannot be written.
    """
    import json

    content: dict[str, Any] = {"schema": 1, "daemon": _us(), "interval_seconds": interval}
    for public in _forms(snapshot):
        content["snapshot"] = public
        encoded = json.dumps(content, separators=(",", ":")).encode("ascii")
        if len(encoded) <= MAX_BYTES:  # users write their command lines themselves: nobody would read more
            break
    write_file(_path(directory, "state.json"), encoded)


def read_state(directory: LockDirectory, clock: float, *, simulated: bool) -> Snapshot | None:
    """The snapshot of a living daemon, with claims, if it is fresh; None: ask the driver.

    Args:
        directory: of the claims.
        clock: CLOCK_BOOTTIME now, seconds.
        simulated: whether one of a simulated node is wanted.
    """
    try:
        files = daemon_files(directory)
        content = loads(read_file(files.file("state.json"), MAX_BYTES, files.owners()))
        snapshot, interval = _unpack(content["snapshot"]), float(content["interval_seconds"])
        fresh = 0 <= clock - snapshot.clock <= FRESH_INTERVALS * interval
    except (OSError, ValueError, ArithmeticError, TypeError, KeyError, AttributeError):
        return None  # of another version, or torn by something else than us
    if not fresh or snapshot.simulated != simulated:
        return None
    return snapshot if _runs(content.get("daemon")) or daemon_lives(directory) else None


def was_written_lately(directory: LockDirectory) -> bool:
    """Whether there is a state that may be fresh: a guess, at the price of one look at a file."""
    try:
        return abs(time.time() - status_in_place(_path(directory, "state.json")).st_mtime) < LATELY_SECONDS
    except OSError:
        return False


def _runs(process: Any) -> bool:
    """Whether that [pid, start time] visibly runs; /proc/locks would tell too, and makes the reader wait for 10 ms."""
    if type(process) is not list or len(process) != 2 or type(process[0]) is not int:
        return False
    return process[1] is not None and start_time(process[0]) == process[1]


def _path(directory: LockDirectory, name: str) -> str:
    return daemon_files(directory).file(name)


def _who_may(files: DaemonFiles) -> str:
    from gpuguard.users import user_name

    if files.owner == 0:
        return "root"
    return f"root or as {'the owner of the directory' if files.owner is None else user_name(files.owner)}"


def _us() -> list[float | None]:
    """This process, as _runs() asks."""
    pid = os.getpid()
    if pid not in _starts:
        _starts[pid] = start_time(pid)
    return [pid, _starts[pid]]


def _processes_are_hidden() -> bool:
    """Whether /proc is mounted so that users do not see each other's command lines."""
    try:
        with open("/proc/self/mountinfo", "rb", buffering=0) as mounts:
            now = mounts.readall()
    except OSError:
        return True
    if now not in _hidden:  # they hardly ever change, and to look through them takes a fifth of what all the rest does
        _hidden.clear()
        _hidden[now] = hidepid_in(now) not in ("", "0", "off")
    return _hidden[now]


def hidepid_in(mounts: bytes) -> str:
    """The hidepid option of /proc in a mountinfo; "" without one.

    A user may mount at what path he likes below his own (FUSE): of all that parts words and lines the kernel writes out
    the blank, the tab and the newline alone.
    """
    proc = [words for words in (line.split(b" ") for line in mounts.split(b"\n")) if words[4:5] == [b"/proc"]]
    options = proc[-1][-1].decode("ascii", "replace").split(",") if proc else []
    return next((one.partition("=")[2] for one in options if one.startswith("hidepid=")), "")


def _forms(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """What may be told of *snapshot*, each time with less of what users can make as long, or as many, as they like."""
    less = (*_PRIVATE, "command")
    if not _processes_are_hidden():
        yield _public(snapshot, _PRIVATE)
    public = _public(snapshot, less)
    yield public
    public["claims"] = [{**one, "command": None, "note": None} for one in public["claims"]]
    yield public
    public["claims"] = [one for one in public["claims"] if one["devices"]]  # of which there are no more than locks
    yield public


def _public(snapshot: Snapshot, private: tuple[str, ...]) -> dict[str, Any]:
    """*snapshot* as plain values, without those that are None and without what is *private* of its processes."""
    devices = [
        {**_known(device), "processes": device.processes and [_known(one, private) for one in device.processes]}
        for device in snapshot.devices
    ]
    gaps = [(gap.device, gap.field, gap.reason) for gap in snapshot.gaps]
    return {**_known(snapshot), "devices": devices, "gaps": gaps, "claims": [vars(one) for one in snapshot.claims]}


def _known(noun: object, private: tuple[str, ...] = ()) -> dict[str, Any]:
    return {name: value for name, value in vars(noun).items() if value is not None and name not in private}


def _unpack(packed: dict[str, Any]) -> Snapshot:
    names = ("device", "field", "reason")
    gaps = [dict(zip(names, gap, strict=True)) for gap in packed["gaps"]]
    return decode(Snapshot, {**packed, "gaps": gaps}, exact=True)
