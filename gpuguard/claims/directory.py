"""The directory of the lock files: which one it is, whether it can be trusted, and how its files are opened.

flock works on a read-only descriptor.  So the files can belong to root, with mode 0444, in a directory where only root
may write: every user can still claim, and none can unlink, truncate or plant a lock file.

    /run/gpuguard               root 0755     made by `gpuguard setup`; --dir or GPUGUARD_DIR names another one
    /run/gpuguard/lock/UUID     root 0444     one empty file per device, "gate" for the short moment of choosing
    /run/gpuguard/claims        root 1777     records, for people: see records
    /run/gpuguard/daemon        gpuguard 0755 state.json, daemon.sock, kept.json, daemon.lock, what policies deny
    /run/lock/gpuguard.UUID     any user 0444 without all that: files in a sticky directory of root, /run/lock or /tmp

Where users may be hostile, the lock files have mode 0600 and belong to the daemon, which alone locks them and gives
the locks to jobs: see daemon.broker.  This module knows nothing of claims.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO

from gpuguard.backends import DEFAULT_BACKEND, RECORDED, is_simulated, parts_of
from gpuguard.errors import LockDirectoryError, shortage
from gpuguard.files import file_system, open_in_place, status_in_place
from gpuguard.locale import N_, _

ADMIN_DIRECTORY = "/run/gpuguard"
FALLBACK_DIRECTORIES = ("/run/lock", "/tmp")
BROKERED = 0o600  # the mode of the lock files where the daemon gives the locks
GATE_SECONDS = 2.0
GATE_SECONDS_AGAIN = 0.1  # for a gate that was not released in time before: a command passes it several times

# On these, flock does not exclude other machines or the other side of a container, or depends on a program's good will.
_UNSAFE_FILE_SYSTEMS = (
    "nfs", "cifs", "smb", "9p", "overlay", "fuse", "ceph", "lustre", "afs", "gluster", "beegfs", "gpfs",
)  # fmt: skip
_IN_CONTAINERS = N_(
    "In a container, mount the host's directory (docker run -v {directory}:{directory}, "
    "apptainer exec --bind {directory})"
)
_DIRECTORY_FAULTS = (  # in the order in which _check_directory() looks for them
    N_("is not a directory (a symbolic link is not followed)"),
    N_("belongs to uid {st_uid}, who could replace the lock files under everybody else"),
    N_("is writable for others (mode {mode:04o}), who could replace the lock files"),
    N_("is not readable for you (mode {mode:04o})"),
)
_FILE_FAULTS = (  # in that of _check_file()
    N_("is not a regular file"),
    N_("was removed just now"),
    N_("is also known under another name (hard link)"),
    N_("belongs to uid {st_uid}"),
    N_("was replaced while it was opened"),
)
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_jammed: set[str] = set()  # gates that this process could not lock in time
TRUSTED = "GPUGUARD_TRUSTED"  # "device:inode" of directories that are root's, as the gpuguard outside has seen
_FIRST = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_LETTERS = _FIRST | frozenset("._-")
_LONGEST = 128  # of the name of a lock file


@dataclass(frozen=True)
class LockDirectory:
    """A directory that has passed the checks.

    *owner* is the uid that must own every lock file, or None if any user may have made them (the sticky fallback).
    *keeper* is the uid of the daemon if it alone opens the lock files and gives the locks to others; *closed* says that
    this process cannot open them.  A directory that was not *made* yet can only be looked at.
    """

    path: str
    locks: str
    records: str
    prefix: str = ""
    owner: int | None = None
    keeper: int | None = None
    closed: bool = False
    made: bool = True

    def is_missing(self) -> bool:
        """Return whether the directory was not made yet, so that nothing is claimed there.

        One that vanished does not count, because it is unknown what is claimed there.
        """
        return not self.made and not os.path.lexists(self.records)

    def names(self) -> list[str]:
        """Return the names of the files among the records."""
        return [] if self.is_missing() else os.listdir(self.records)

    def has(self, *kinds: str) -> bool:
        """Return whether a name among the records begins with one of *kinds*, such as "ticket."."""
        starts = tuple(self.prefix + kind for kind in kinds)
        return any(name.startswith(starts) for name in self.names())

    def count(self, kind: str) -> int:
        """Return how many of the names among the records begin with *kind*."""
        return sum(name.startswith(self.prefix + kind) for name in self.names())

    def lock_path(self, name: str) -> str:
        """Return the path of the lock file of a device (by uuid) or of the gate."""
        return f"{self.locks}/{self.prefix}{name}"


def lock_directory(path: str | None = None, *, backend: str = DEFAULT_BACKEND, make: bool = True) -> LockDirectory:
    """Return the directory in which claims are made.

    Args:
        path: named by the user; then the directory may also be the user's own, for a single user.
        backend: of the devices.  A simulated node keeps its claims beside its state, never among the real ones.
        make: whether to make the user's own directory if it is missing.  A command that only reads makes none, because
            nothing is claimed there.

    Raises:
        LockDirectoryError: it cannot be trusted or used; the message says what to do.
    """
    if path is None and is_simulated(backend):
        path = _node_directory(parts_of(backend)[0])
        return _subdirectories(path, own=True, make=make, check_file_system=False)
    if backend.startswith(RECORDED):
        raise LockDirectoryError(
            _("{backend} is of another time or machine: nothing on it can be claimed or guarded.").format(
                backend=backend
            )
        )
    if path is not None:
        path = os.path.abspath(path)
        if is_simulated(backend):
            for part in parts_of(backend):
                _check_seen_by_all(path, _node_directory(part))
        return _subdirectories(path, own=True, make=make)
    if os.path.lexists(ADMIN_DIRECTORY):
        # Present but unusable is an error: a silent fallback would let two users each have "their" directory.
        return _subdirectories(ADMIN_DIRECTORY, own=False)
    return _sticky_directory()


def _node_directory(backend: str) -> str:
    """Return the directory in which the node of a backend lies, if the node exists only in files."""
    kind, _colon, spec = backend.partition(":")
    if kind == "simulated":
        from gpuguard.backends.simulated import directory  # a real machine does not need it

        return directory(spec)
    return os.path.abspath(spec)


def _check_seen_by_all(path: str, node: str) -> None:
    """Refuse a directory of other users for claims on devices that they do not see: all would wait for each other."""
    uid = os.geteuid()
    if os.lstat(node).st_uid == uid and os.path.lexists(path) and os.lstat(path).st_uid != uid:
        raise LockDirectoryError(
            _(
                "{path} is for all users, and the simulated node in {node} is yours alone: others who claim "
                "there see other GPUs.  Leave out --dir and GPUGUARD_DIR, or let root start a node for all: "
                "`gpuguard sim start --shared`."
            ).format(path=path, node=node)
        )


def _subdirectories(path: str, *, own: bool, make: bool = True, check_file_system: bool = True) -> LockDirectory:
    locks, records = f"{path}/lock", f"{path}/claims"
    missing = not make and not (os.path.lexists(locks) and os.path.lexists(records))
    if missing and (not os.path.lexists(path) or _check_directory(path, own=own) == os.geteuid()):
        return LockDirectory(path, locks, records, owner=os.geteuid(), made=False)
    mine = own and _make_ready(path, locks, records)
    _check_directory(path, own=own)
    for subdirectory in (locks, records):
        if not os.path.lexists(subdirectory):
            root = "" if os.geteuid() == 0 else "sudo "
            raise LockDirectoryError(
                _("{subdirectory} does not exist.  Run `{root}gpuguard setup --dir {path}` once.").format(
                    subdirectory=subdirectory, root=root, path=path
                )
            )
    keeper, closed = _keeper(path, f"{locks}/gate")
    owner = _check_directory(locks, own=own, keeper=keeper)
    if owner == keeper:
        owner = os.lstat(path).st_uid
    _check_directory(records, own=own, sticky=True)
    if check_file_system:
        _check_file_system(locks)
    return LockDirectory(path, locks, records, owner=owner if not mine else os.geteuid(), keeper=keeper, closed=closed)


def _keeper(path: str, gate: str) -> tuple[int | None, bool]:
    """Return (the uid of the daemon if it alone has the lock files, whether they are closed to this process)."""
    try:
        status = os.lstat(gate)
    except OSError:
        return None, False
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != BROKERED:
        return None, False
    owners = [os.lstat(path).st_uid]
    with suppress(OSError):
        # The owner of the daemon's directory, which only the owner of *path* can have put there.
        own = os.lstat(f"{path}/{NAME}")
        owners += [own.st_uid] if _daemon_directory_fault(own) is None else []
    if not is_roots(status) and status.st_uid not in owners:
        return None, False
    return status.st_uid, not os.access(gate, os.R_OK, effective_ids=True)


def _make_ready(path: str, *subdirectories: str) -> bool:
    """Make the directory that the user named, if it is the user's own, and return whether it is."""
    try:
        _make_directory(path, 0o755)
        if os.lstat(path).st_uid != os.geteuid() or not os.access(path, os.W_OK | os.X_OK):
            return False
        for subdirectory in subdirectories:
            # Mode 1777 is safe and lets root's directory serve everybody; a user's own directory stays private.
            _make_directory(subdirectory, 0o1777 if subdirectory.endswith("claims") and os.geteuid() == 0 else 0o755)
    except OSError as error:
        raise LockDirectoryError(
            _("{path} cannot be made ready for claims: {strerror}.  Name another directory with --dir.").format(
                path=path, strerror=error.strerror
            )
        ) from error
    return True


def _make_directory(path: str, mode: int) -> None:
    """Make a directory unless it exists: another process that starts may be making it now."""
    try:
        os.mkdir(path, mode & 0o755)
    except FileExistsError:
        return
    os.chmod(path, mode)  # whatever the umask


def _sticky_directory() -> LockDirectory:
    for path in FALLBACK_DIRECTORIES:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if status.st_mode & 0o1777 == 0o1777 and is_roots(status) and stat.S_ISDIR(status.st_mode):
            _check_file_system(path)
            return LockDirectory(path, path, path, prefix="gpuguard.")
    raise LockDirectoryError(
        _(
            "neither {directories} is a sticky directory of root.  Run `sudo gpuguard setup` once, "
            "or name a directory with --dir."
        ).format(directories=_(" nor ").join(FALLBACK_DIRECTORIES))
    )


def _check_directory(path: str, *, own: bool, sticky: bool = False, keeper: int | None = None) -> int:
    """Refuse a directory in which another user could replace the files, and return the owner of any other."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise LockDirectoryError(
            _("{path} cannot be used: {strerror}.  Run `sudo gpuguard setup`.").format(
                path=path, strerror=error.strerror
            )
        ) from error
    mode, is_own = stat.S_IMODE(status.st_mode), own and status.st_uid == os.geteuid()
    found = (
        not stat.S_ISDIR(status.st_mode),
        not is_roots(status) and not is_own and status.st_uid != keeper,
        mode & 0o022 and not (sticky and mode & 0o1000),
        not os.access(path, os.R_OK | os.X_OK),
    )
    if fault := next((fault for fault, holds in zip(_DIRECTORY_FAULTS, found, strict=True) if holds), None):
        raise LockDirectoryError(
            _("{path} {fault}.  Run `sudo gpuguard setup`, or name another directory with --dir.").format(
                path=path, fault=_(fault).format(st_uid=status.st_uid, mode=mode)
            )
        )
    return status.st_uid


def is_roots(status: os.stat_result) -> bool:
    """Return whether root owns a directory.

    In the user namespace of an isolated job, root's files seem to belong to another user, so what was seen outside
    counts.
    """
    return status.st_uid == 0 or f"{status.st_dev}:{status.st_ino}" in os.environ.get(TRUSTED, "").split()


def _check_file_system(path: str) -> None:
    kind = file_system(path)
    if kind and kind.startswith(_UNSAFE_FILE_SYSTEMS):
        raise LockDirectoryError(
            _(
                "{path} lies on {kind}, where a lock does not exclude everybody who shares the GPUs.  "
                "{in_containers}; if no user outside uses the GPUs, name a directory on a volume or another "
                "local disk with --dir."
            ).format(path=path, kind=kind, in_containers=_(_IN_CONTAINERS).format(directory=ADMIN_DIRECTORY))
        )


def open_lock(directory: LockDirectory, name: str) -> int:
    """Open a lock file, check it, and return its read-only, close-on-exec descriptor, which is not locked yet.

    Raises:
        LockDirectoryError: the file is missing and cannot be made, or it is not what it should be.
    """
    if name[:1] not in _FIRST or not _LETTERS.issuperset(name) or len(name) > _LONGEST:
        raise LockDirectoryError(_("{name!r} is no name for a lock file.").format(name=name))
    path = directory.lock_path(name)
    if directory.closed and name != "queue":
        raise LockDirectoryError(
            _("{path} is the daemon's alone here, and what you do cannot be asked of it.").format(path=path)
        )
    descriptor = _open_or_make(directory, path)
    try:
        _check_file(descriptor, path, (directory.owner, directory.keeper, 0))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_or_make(directory: LockDirectory, path: str) -> int:
    for _attempt in range(50):
        try:
            # Without O_CREAT first, because fs.protected_regular refuses O_CREAT on another user's file, even to root.
            # Where the files have a prefix, users made them.
            return open_in_place(path) if directory.prefix else os.open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            pass
        except PermissionError:
            time.sleep(0.001)  # its maker is between O_EXCL and fchmod
            continue
        except OSError as error:
            if shortage(error):  # nothing is wrong with the file
                raise
            reason = (
                _("is a symbolic link")
                if error.errno == errno.ELOOP
                else _("cannot be opened ({strerror})").format(strerror=error.strerror)
            )
            raise LockDirectoryError(
                _("{path} {reason}.  It was planted: look at it with `ls -l`, and remove it as root.").format(
                    path=path, reason=reason
                )
            ) from error
        try:
            mode = 0o444 if directory.keeper is None else BROKERED
            descriptor = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
        except OSError as error:
            named = "" if directory.path == ADMIN_DIRECTORY else f" --dir {directory.path}"
            again = _("Run `sudo gpuguard setup{named}`: it makes the lock files of all GPUs, for all users").format(
                named=named
            )
            advice = _(_IN_CONTAINERS).format(directory=ADMIN_DIRECTORY) if error.errno == errno.EROFS else again
            raise LockDirectoryError(
                _("{path} does not exist and cannot be made ({strerror}).  {advice}.").format(
                    path=path, strerror=error.strerror, advice=advice
                )
            ) from error
        if directory.keeper is None:
            os.fchmod(descriptor, 0o444)  # everybody must be able to open it, whatever the umask is
        elif os.geteuid() == 0:
            os.fchown(descriptor, directory.keeper, -1)
        return descriptor
    raise LockDirectoryError(_("{path} is not readable.  Run `sudo gpuguard setup` again.").format(path=path))


def existing_locks(directory: LockDirectory, names: Iterable[str]) -> list[str]:
    """Return those of *names* that have a lock file, even one that something is mounted over.

    Raises OSError if no further file can be opened to look.
    """
    return [name for name in names if _exists(directory.lock_path(name))]


def _exists(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
    except (FileNotFoundError, ValueError):  # ValueError: it cannot be the name of a file; records may have such names
        return False
    except OSError as error:
        if shortage(error):  # it says nothing about the file, and the claims of all users would look released
            raise
        return False
    return True


def unusable_locks(directory: LockDirectory, names: Iterable[str]) -> dict[str, str]:
    """Return name -> why this process can never lock that file, for those of *names* that it can neither lock nor make.

    It makes no file.
    """
    if directory.closed or directory.is_missing():
        return {}
    may_make = os.access(directory.locks, os.W_OK | os.X_OK, effective_ids=True)
    there = [name for name in names if not may_make or os.path.lexists(directory.lock_path(name))]
    return {name: fault for name in there if (fault := _lock_fault(directory, name))}


def _lock_fault(directory: LockDirectory, name: str) -> str | None:
    fault = None
    for _attempt in range(2):  # a file that is just being replaced is all right at the second try
        try:
            os.close(open_lock(directory, name))
        except LockDirectoryError as error:
            fault = str(error)
        except OSError:  # no further file can be opened now, which says nothing about this one
            return None
        else:
            return None
    return fault


def _check_file(descriptor: int, path: str, owners: tuple[int | None, ...]) -> None:
    status = os.fstat(descriptor)
    found = (
        not stat.S_ISREG(status.st_mode),
        status.st_nlink == 0,
        status.st_nlink > 1,
        owners[0] is not None and status.st_uid not in owners,
        not is_same_file(descriptor, path, unsure=None),
    )
    if fault := next((fault for fault, holds in zip(_FILE_FAULTS, found, strict=True) if holds), None):
        raise LockDirectoryError(
            _("{path} {fault}.  Look at it with `ls -l`, and remove it as root if it was planted.").format(
                path=path, fault=_(fault).format(st_uid=status.st_uid)
            )
        )


def is_same_file(descriptor: int, path: str, *, unsure: bool | None = False) -> bool:
    """Return whether *path* still names the file of *descriptor*: a lock on an unlinked file excludes no process.

    *unsure* is returned if no further file can be opened to look, because a training job has as many open as it may.
    If *unsure* is None, the OSError that says so is raised instead.
    """
    try:
        held, named = os.fstat(descriptor), status_in_place(path)
    except OSError as error:
        if not shortage(error):
            return False
        if unsure is None:
            raise
        return unsure
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def remove_if_same(descriptor: int, path: str) -> None:
    """Remove the file at *path* if it is that of *descriptor* and this user may; another process may be quicker."""
    with suppress(OSError):
        if is_same_file(descriptor, path):
            os.unlink(path)


def try_flock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Lock *descriptor* without waiting, or return False if it is locked elsewhere.

    This is `fcntl.flock` itself, because a job inherits the lock with the descriptor, and a share locks it shared.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks: never carry on without one
        raise LockDirectoryError(
            _("this file system cannot lock ({strerror}).  Name another directory with --dir.").format(
                strerror=error.strerror
            )
        ) from error
    return True


def is_unlocked(descriptor: int) -> bool:
    """Return whether no process has the file locked exclusively.

    No lock is left behind, not even in a child that a thread forks meanwhile.
    """
    free = try_flock(descriptor, fcntl.LOCK_SH)
    if free:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return free


class Gate:
    """The lock that a process holds for the short moment of choosing and locking, so that none disturbs another.

    Only fairness depends on it: a process that does not get it in time goes on without it, so no user can block the
    others.  Where the lock files are missing or closed to this process, it chooses and locks nothing, so it needs no
    gate.
    """

    def __init__(self, directory: LockDirectory) -> None:
        self._directory = directory
        self._file: FileIO | None = None

    def __enter__(self) -> Gate:
        if self._directory.closed or self._directory.is_missing():
            return self
        self._file = FileIO(open_lock(self._directory, "gate"))  # an interruption before __exit__ also closes it
        path, pause = self._directory.lock_path("gate"), 0.0005
        deadline = time.monotonic() + (GATE_SECONDS_AGAIN if path in _jammed else GATE_SECONDS)
        try:
            while not try_flock(self._file.fileno()):
                if time.monotonic() >= deadline:
                    _jammed.add(path)
                    return self
                time.sleep(pause)
                pause = min(pause * 2, 0.01)
        except BaseException:  # for example from a file system that cannot lock now
            self._file.close()
            raise
        _jammed.discard(path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        try:
            with suppress(OSError):
                # Closing is not enough: a child that another thread forked meanwhile has a copy of the descriptor.
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._file.close()


NAME = "daemon"
USER = "gpuguard"  # the service runs as this user, to whom the directory is given


@dataclass(frozen=True)
class DaemonFiles:
    """A directory of files that the daemon writes.

    A daemon that runs as its own user must not write among the lock files, so it has a directory of its own there.
    Only root can put it there, and its owner is the daemon's user: files of any other user count for nothing.  Without
    that directory the files lie beside the claims and are trusted as those are.  *owner* is the uid that must own the
    files if root does not, or None if any user could have made them.
    """

    path: str
    owner: int | None
    prefix: str = ""

    def file(self, name: str) -> str:
        """Return the path of one of the files."""
        return f"{self.path}/{self.prefix}{name}"

    def owners(self) -> tuple[int, ...]:
        """Return the uids whose files are trusted."""
        return (0, os.geteuid()) if self.owner is None else (0, self.owner)


def daemon_files(directory: LockDirectory) -> DaemonFiles:
    """Return where the daemon of *directory* keeps its files."""
    path = f"{directory.path}/{NAME}"
    try:
        status = os.lstat(path)
    except OSError:
        status = None
    if status is None or directory.owner is None or _daemon_directory_fault(status):
        return DaemonFiles(directory.path, directory.owner, directory.prefix)
    return DaemonFiles(path, status.st_uid)


def stamp_path(directory: LockDirectory, uid: int) -> str:
    """Return the path of an empty file of the daemon, whose time is that of its last log line about that user."""
    return daemon_files(directory).file(f"events.{uid}")


def last_about(directory: LockDirectory, uid: int) -> float | None:
    """Return the unix time at which the daemon last wrote down something about a user, or None if unknown or never."""
    return written_at(stamp_path(directory, uid), daemon_files(directory).owners())


def written_at(path: str, owners: Collection[int]) -> float | None:
    """Return the unix time at which a file was last written, or None if it is missing or none of *owners* owns it."""
    with suppress(OSError):
        status = status_in_place(path)
        return status.st_mtime if status.st_uid in owners else None
    return None


def fault_of(directory: LockDirectory) -> str | None:
    """Return what is wrong with the daemon's own directory, in words, or None if nothing is or there is none."""
    path = f"{directory.path}/{NAME}"
    if directory.owner is None or not os.path.lexists(path):
        return None
    fault = _daemon_directory_fault(os.lstat(path))
    return f"{path} {fault}" if fault else None


def _daemon_directory_fault(status: os.stat_result) -> str | None:
    if not stat.S_ISDIR(status.st_mode):
        return _("is no directory")
    return (
        _("can be written by others (mode {mode:04o})").format(mode=stat.S_IMODE(status.st_mode))
        if status.st_mode & 0o022
        else None
    )


def open_lock_file(files: DaemonFiles, name: str) -> int:
    """Open a lock file of the daemon that no other user can open, because locking it would keep the daemon away.

    Raises:
        OSError: it cannot be opened, or it is not what it should be.
    """
    path = files.file(name)
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = open_in_place(path, flags)
    except FileNotFoundError:
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            if files.owner and os.geteuid() == 0:
                os.fchown(descriptor, files.owner, -1)  # otherwise the daemon could never open what root made for it
        except FileExistsError:  # another process was quicker
            descriptor = open_in_place(path, flags)
    try:
        status = os.fstat(descriptor)
        private = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid in files.owners()
        if not (private and is_same_file(descriptor, path, unsure=None)):
            raise OSError(0, _("it is not a file of the daemon's alone; look at it with `ls -l`, and remove it"))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
