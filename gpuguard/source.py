"""The one way to a snapshot with its claims: the daemon's last one while it is fresh, else one read from the driver.

Everything that decisions and views depend on is joined here: the claims, or one Gap that says why they cannot be read,
quarantined devices, and devices that are kept for a reservation.  The daemon's snapshots (state.json) count only while
it lives, which the lock on daemon.lock tells.  They leave out everything about a process that only root may see.
Does not decide when they are written: see daemon.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gpuguard.backends import DEFAULT_BACKEND, RECORDED, Backend, is_simulated, parts_of
from gpuguard.claims.directory import LockDirectory, daemon_files, open_lock_file, try_flock
from gpuguard.claims.holders import inode_of
from gpuguard.claims.records import ClaimWatcher, of_their_users, probe
from gpuguard.claims.restrictions import restrictions_against
from gpuguard.errors import ClaimError, LockDirectoryError, shortage
from gpuguard.files import mounts, read_file, write_file
from gpuguard.jsonio import decode, loads
from gpuguard.locale import _
from gpuguard.locale.messages import Sentence, dumps, sentence
from gpuguard.model import DESKTOP_MEMORY, MOST_DESKTOP_MEMORY, WHO_FIELDS, ClaimRecord, Gap, Snapshot
from gpuguard.procfs import in_first_pid_namespace, start_time
from gpuguard.users import user_name
from gpuguard.vendors import NVIDIA

FindDirectory = Callable[[], "LockDirectory | None"]
# Reads the claims on these devices; the claims of a moment ago save it a search for their holders.
ReadClaims = Callable[[LockDirectory, Sequence[str], Sequence[ClaimRecord]], tuple[ClaimRecord, ...]]

_OTHER_NAMESPACE = sentence(
    "source.other_pid_namespace",
    "the pids are those of another pid namespace (a container's host): users and commands cannot be told from in here",
)


class SnapshotSource:
    """Samples the machine again and again; the driver is opened when it is first needed.

    Args:
        backend: its name, which decides whether the daemon's snapshot is of the same machine.
        read: reads a snapshot from the driver, by default with all of WHO_FIELDS.
        suits: whether a snapshot of the daemon has all that is needed.
    """

    def __init__(
        self,
        backend: str,
        open_backend: Callable[[], Backend],
        find_directory: FindDirectory,
        *,
        read: Callable[[Backend], Snapshot] = lambda backend: backend.sample(WHO_FIELDS),
        suits: Callable[[Snapshot], bool] = lambda snapshot: True,
    ) -> None:
        self._name, self._open, self._find_directory = backend, open_backend, find_directory
        self._read, self._suits = read, suits
        self._backend: Backend | None = None
        self._watcher = ClaimWatcher()
        self.fresh = False  # whether the daemon's snapshots are ignored

    def sample(self) -> tuple[Snapshot, float | None]:
        """The machine without its claims, and the seconds since the daemon read it, or None if we read it just now.

        Raises BackendError if neither the daemon nor the driver tells.
        """
        clock = time.clock_gettime(time.CLOCK_BOOTTIME)
        published = None if self.fresh else self._published(clock)
        if published is not None:
            return published, clock - published.clock
        return self._read(self.backend()), None

    def joined(self, *, reservations: bool = True) -> tuple[Snapshot, float | None]:
        """Sample the machine as sample() does, and add everything that the function joined() adds."""
        snapshot, age = self.sample()
        return joined(snapshot, self._find_directory, self._watcher.probe, reservations=reservations), age

    def backend(self) -> Backend:
        """The driver, which is opened at the first call."""
        if self._backend is None:
            self._backend = self._open()
            # Find out who holds the locks while the worker loads the driver's library.
            with suppress(ClaimError, OSError):  # this is tried again later, and an error is reported then
                if (directory := self._find_directory()) is not None:
                    self._watcher.prepare(directory)
        return self._backend

    def close(self) -> None:
        """Close the driver."""
        if self._backend:
            self._backend.close()

    def _published(self, clock: float) -> Snapshot | None:
        if self._name.startswith(RECORDED):
            return None
        directory = None
        with suppress(ClaimError):  # the claims will be missing, and a Gap will say so
            directory = self._find_directory()
        if directory is None:
            return None
        snapshot = read_state(directory, clock, simulated=is_simulated(self._name))
        return snapshot if snapshot and _is_of(self._name, snapshot) and self._suits(snapshot) else None


def _is_of(name: str, snapshot: Snapshot) -> bool:
    """Return whether *snapshot* has the devices that the backend *name* shows, and no others."""
    kinds = {part.partition(":")[0] for part in parts_of(name)}
    if DEFAULT_BACKEND in kinds:
        return True  # those of the machine, as its daemon reads it
    same = {"smi": NVIDIA.backend}  # two ways to the same devices
    return {same.get(kind, kind) for kind in kinds} == {same.get(kind, kind) for kind in snapshot.backend.split(",")}


def read_claims(
    directory: LockDirectory, uuids: Sequence[str], known: Sequence[ClaimRecord]
) -> tuple[ClaimRecord, ...]:
    """Read the claims as they are now, with probe()."""
    return probe(directory, uuids)


def with_claims(snapshot: Snapshot, find_directory: FindDirectory, read: ReadClaims = read_claims) -> Snapshot:
    """*snapshot* with the current claims, or with a Gap if they cannot be read; a recording keeps its own claims."""
    if snapshot.recorded:
        return snapshot
    gaps = tuple(gap for gap in snapshot.gaps if gap.field != "claims")  # we may read claims that the daemon could not
    try:
        directory = find_directory()
        if directory is None:
            raise ClaimError(sentence("source.no_directory", "no directory of claims was named"))
        claims = of_their_users(read(directory, [device.uuid for device in snapshot.devices], snapshot.claims))
    except (ClaimError, OSError) as error:
        text = shortage(error) or str(error)
        reason = " ".join(text.split())
        if isinstance(text, Sentence):
            reason = Sentence(reason, text.key, text.values)
        return replace(snapshot, claims=(), gaps=(*gaps, Gap(None, "claims", reason)))
    # Claims are as old as the daemon knows them, because a record says whatever its owner likes.
    since = {(claim.uid, claim.id): claim.since for claim in snapshot.claims if claim.since is not None}
    dated = tuple([replace(claim, since=since.get((claim.uid, claim.id), claim.since)) for claim in claims])
    return replace(snapshot, claims=dated, gaps=gaps)


def joined(
    snapshot: Snapshot, find_directory: FindDirectory, read: ReadClaims = read_claims, *, reservations: bool = True
) -> Snapshot:
    """*snapshot* with its claims, its quarantined devices and, if *reservations* is true, its reserved devices."""
    snapshot = with_claims(snapshot, find_directory, read)
    if snapshot.recorded:
        return snapshot
    if any(not device.processes_plausible for device in snapshot.devices) and not in_first_pid_namespace():
        snapshot = replace(snapshot, gaps=(*snapshot.gaps, Gap(None, "processes", _OTHER_NAMESPACE)))
    try:
        directory = find_directory()
    except ClaimError:
        return snapshot  # a Gap says so already
    snapshot = with_quarantine(snapshot, directory)
    return with_reservations(snapshot, directory) if directory and reservations else snapshot


def with_quarantine(snapshot: Snapshot, directory: LockDirectory | None) -> Snapshot:
    """*snapshot* with the devices that are quarantined, and why."""
    if directory is None:
        return snapshot
    uuids = {uuid for device in snapshot.devices for uuid in (device.uuid, device.parent_uuid) if uuid}
    try:
        why = restrictions_against(directory, sorted(uuids), None, time.time())
    except OSError:
        return snapshot
    return replace(snapshot, quarantined=tuple(why.items()))


def with_reservations(snapshot: Snapshot, directory: LockDirectory) -> Snapshot:
    """*snapshot* with the devices that are kept for a reservation that has begun, and for which user."""
    try:
        if not directory.has("reserve."):
            return snapshot
        # These load the reader of the site's rules, which is worth it only if something is reserved.
        from gpuguard.queue.reasons import reserved_now
        from gpuguard.queue.reservations import reservation_calendar

        uuids = [device.uuid for device in snapshot.devices]
        calendar = reservation_calendar(directory, uuids, snapshot.claims, time.time())
        return replace(snapshot, reserved=tuple(reserved_now(snapshot, calendar).items()))
    except (ClaimError, OSError):
        return snapshot


# What the daemon publishes.


MAX_BYTES = 8 * 2**20  # 16 devices with 128 processes each, all with long command lines, take 2 MiB
FRESH_INTERVALS = 2.0
SAME_BOOT_SECONDS = 5.0  # by which the clock may have been set; no machine boots again so soon
_PRIVATE = ("executable", "working_directory", "conda_environment")  # fields of a process that only root may see


def lock_daemon(directory: LockDirectory) -> int | None:
    """Become the one daemon of this directory until the returned descriptor is closed, or return None if another is.

    filelock would not do: the file must be that owner's and no link, and no lock may be left behind where flock is
    missing.

    Raises:
        LockDirectoryError: the lock file cannot be used.
    """
    files = daemon_files(directory)
    if files.path != directory.path and _is_locked(f"{directory.path}/daemon.lock"):
        return None  # a daemon runs that was started before it had a directory of its own
    path = files.file("daemon.lock")
    try:
        descriptor = open_lock_file(files, "daemon.lock")
    except OSError as error:
        owner = _("the owner of the directory") if files.owner is None else user_name(files.owner)
        user = "root" if files.owner == 0 else _("root or as {owner}").format(owner=owner)
        raise LockDirectoryError(
            _(
                "{path} cannot be opened: {strerror}.  Run the daemon as {user}; `sudo gpuguard setup` gives it "
                "a directory for a user of its own."
            ).format(path=path, strerror=error.strerror, user=user)
        ) from error
    locked = False
    try:
        locked = try_flock(descriptor)
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


def daemon_lives(directory: LockDirectory) -> bool:
    """Whether a process that we can see holds the daemon's lock.  The kernel tells this, so no lock is tried."""
    return _is_locked(daemon_files(directory).file("daemon.lock"))


def _is_locked(path: str) -> bool:
    """Whether that very file is locked; a user may have a file of the same inode number in another file system."""
    inode = inode_of(path).encode()
    try:
        with open("/proc/locks", "rb") as locks:
            return bool(inode) and any(b" FLOCK " in line and b" %s " % inode in line for line in locks)
    except OSError:
        return False


def write_state(directory: LockDirectory, snapshot: Snapshot, interval: float) -> None:
    """Publish *snapshot* with its claims, whole; the next one comes in *interval* seconds.  Raises OSError."""
    pid = os.getpid()
    content: dict[str, Any] = {"schema": 1, "daemon": [pid, start_time(pid)], "interval_seconds": interval}
    for public in _forms(snapshot):
        content["snapshot"] = public
        encoded = dumps(content, separators=(",", ":"))
        if len(encoded) <= MAX_BYTES:  # users choose their command lines, and a larger file would not be read
            break
    write_file(daemon_files(directory).file("state.json"), encoded)


def read_state(directory: LockDirectory, clock: float, *, simulated: bool) -> Snapshot | None:
    """The snapshot of a living daemon, with claims, if it is fresh at *clock* (CLOCK_BOOTTIME), or None."""
    read = _last_state(directory)
    if read is None:
        return None
    snapshot, content, interval = read
    if not 0 <= clock - snapshot.clock <= FRESH_INTERVALS * interval or snapshot.simulated != simulated:
        return None
    return snapshot if _runs(content.get("daemon")) or daemon_lives(directory) else None


def read_last_state(directory: LockDirectory, clock: float, now: float) -> Snapshot | None:
    """The snapshot that a daemon published last in this boot, however long ago, or None if there is no readable one.

    *clock* is CLOCK_BOOTTIME, and *now* is the unix time at the same moment.
    """
    last, *_ = _last_state(directory) or (None,)
    return last if last and abs(last.taken_at - last.clock - (now - clock)) < SAME_BOOT_SECONDS else None


def _last_state(directory: LockDirectory) -> tuple[Snapshot, dict[str, Any], float] | None:
    try:
        files = daemon_files(directory)
        content = loads(read_file(files.file("state.json"), MAX_BYTES, files.owners()))
        return decode_snapshot(content["snapshot"]), content, float(content["interval_seconds"])
    except (OSError, ValueError, ArithmeticError, TypeError, KeyError, AttributeError):
        return None  # it is of another version, or something other than us tore it


def publish_desktop_memory(directory: LockDirectory, most: int) -> None:
    """Make all commands allow *most* bytes for the desktop of a user, as the daemon does.  Raises OSError."""
    if desktop_memory(lambda: directory) != most:
        write_file(daemon_files(directory).file("desktop.json"), json.dumps({"desktop_memory_bytes": most}).encode())


def desktop_memory(find_directory: FindDirectory) -> int:
    """Bytes of a device that the desktop of a user may hold here, according to the daemon's last policy file."""
    try:
        if (directory := find_directory()) is None:
            return DESKTOP_MEMORY
        files = daemon_files(directory)
        told = loads(read_file(files.file("desktop.json"), 4096, files.owners()))["desktop_memory_bytes"]
        return told if type(told) is int and 0 <= told <= MOST_DESKTOP_MEMORY else DESKTOP_MEMORY
    except (ClaimError, OSError, ValueError, TypeError, KeyError):
        return DESKTOP_MEMORY


def decode_snapshot(packed: dict[str, Any]) -> Snapshot:
    """Decode a published snapshot.  Raises ValueError, TypeError, KeyError or AttributeError if it is none."""
    gaps = [dict(zip(("device", "field", "reason"), gap, strict=True)) for gap in packed["gaps"]]
    return decode(Snapshot, {**packed, "gaps": gaps}, exact=True)


def _runs(process: Any) -> bool:
    """Whether the process [pid, start time] visibly runs; /proc/locks would tell this as well, but takes longer."""
    if type(process) is not list or len(process) != 2 or type(process[0]) is not int:
        return False
    return process[1] is not None and start_time(process[0]) == process[1]


def _processes_are_hidden() -> bool:
    """Whether /proc is mounted so that users do not see each other's command lines."""
    return hidepid() not in ("", "0", "off")


def hidepid() -> str | None:
    """The hidepid option of /proc, "" if it has none, or None if that cannot be read."""
    try:
        proc = [mount for mount in mounts() if mount.point == "/proc"]
    except OSError:
        return None
    options = proc[-1].options.split(",") if proc else []
    return next((option.partition("=")[2] for option in options if option.startswith("hidepid=")), "")


def _forms(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """The public forms of *snapshot*, each with less of what users can make as long, or as many, as they like."""
    if not _processes_are_hidden():
        yield _public(snapshot, _PRIVATE)
    public = _public(snapshot, (*_PRIVATE, "command"))
    yield public
    brief = [{**claim, "command": None, "note": None} for claim in public["claims"]]
    yield {**public, "claims": brief}
    # There are no more claims with devices than locks.
    yield {**public, "claims": [claim for claim in brief if claim["devices"]]}


def _public(snapshot: Snapshot, private: tuple[str, ...]) -> dict[str, Any]:
    """*snapshot* as plain values, without those that are None and without the *private* fields of its processes."""
    devices = [
        {**_known(device), "processes": device.processes and [_known(process, private) for process in device.processes]}
        for device in snapshot.devices
    ]
    gaps = [(gap.device, gap.field, gap.reason) for gap in snapshot.gaps]
    claims = [vars(claim) for claim in snapshot.claims]
    whole = {name: value for name, value in _known(snapshot).items() if name not in ("quarantined", "reserved")}
    return {**whole, "devices": devices, "gaps": gaps, "claims": claims}


def _known(value: object, private: tuple[str, ...] = ()) -> dict[str, Any]:
    return {name: field for name, field in vars(value).items() if field is not None and name not in private}
