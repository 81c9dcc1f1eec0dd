"""Where the daemon keeps its files, and whose they must be.

    /run/gpuguard           root      0755   what decides who may claim: see lockfiles, marks
    /run/gpuguard/daemon    gpuguard  0755   state.json, daemon.sock, kept.json, daemon.lock, what policies deny

A daemon with a user of its own must not write among the lock files, so it has a directory of its own there.  Root says
which one, because only root can put it there, and its owner says who the daemon is: files of anybody else count for
nothing.  Without that directory the files lie beside the claims and are trusted as these are.  Reads and writes none
of them: see state, marks and door.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from gpuguard.claims.inplace import open_in_place
from gpuguard.claims.lockfiles import LockDirectory, is_same_file

NAME = "daemon"
USER = "gpuguard"  # as whom the service runs, and to whom the directory is given


@dataclass(frozen=True)
class DaemonFiles:
    """A directory of files that the daemon writes.

    *owner* is the uid to whom they must belong, if not to root; None where anybody could have made them.
    """

    path: str
    owner: int | None
    prefix: str = ""

    def file(self, name: str) -> str:
        """The path of one of them."""
        return f"{self.path}/{self.prefix}{name}"

    def owners(self) -> tuple[int, ...]:
        """The uids whose files are trusted."""
        return (0, os.geteuid()) if self.owner is None else (0, self.owner)


def daemon_files(directory: LockDirectory) -> DaemonFiles:
    """Where the daemon of *directory* keeps its files."""
    path = f"{directory.path}/{NAME}"
    try:
        found = os.lstat(path)
    except OSError:
        found = None
    if found is None or directory.owner is None or _fault(found):
        return DaemonFiles(directory.path, directory.owner, directory.prefix)
    return DaemonFiles(path, found.st_uid)


def fault_of(directory: LockDirectory) -> str | None:
    """What is wrong with the daemon's own directory, in words, if there is one."""
    path = f"{directory.path}/{NAME}"
    if directory.owner is None or not os.path.lexists(path):
        return None
    fault = _fault(os.lstat(path))
    return f"{path} {fault}" if fault else None


def _fault(found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    return f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})" if found.st_mode & 0o022 else None


def open_lock_file(files: DaemonFiles, name: str) -> int:
    """A descriptor of a lock file that nobody else can open, for: whoever can lock it could keep the others away.

    Raises:
        OSError: it cannot be opened, or it is not what it should be.
    """
    path = files.file(name)
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = open_in_place(path, flags)
    except FileNotFoundError:
        descriptor = _made(files, path, flags)
    try:
        found = os.fstat(descriptor)
        alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in files.owners()
        if alone and is_same_file(descriptor, path, unsure=None):
            return descriptor
    except OSError:  # no further file can be opened to look: nothing is wrong with this one
        os.close(descriptor)
        raise
    os.close(descriptor)
    raise OSError(0, "it is not a file of the daemon's alone; look at it with `ls -l`, and remove it")


def _made(files: DaemonFiles, path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # somebody else was quicker
        return open_in_place(path, flags)
    if files.owner and os.geteuid() == 0:
        os.fchown(descriptor, files.owner, -1)  # or the daemon could never open what root made for it
    return descriptor
