"""What `gpuguard setup --broker` does: the lock files become the daemon's alone, or everybody's again.

Locks that are held stay held: the file of a claim is the same one, with another mode.  A file that anybody could open
before is made anew where its lock is free, and marked for that where it is not: what somebody has kept open is worth
nothing then (see grants).
"""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import replace

from gpuguard.claims.directory import BROKERED, Gate, LockDirectory, lock_directory, open_lock
from gpuguard.claims.grants import EARLIER, grant_of, names_of, renew, replace_file
from gpuguard.errors import LockDirectoryError
from gpuguard.users import user_name

WHAT_NOW = """\
The daemon alone gives the GPUs of this machine from now on.  Without it nothing can be claimed; what is claimed stays.
  1. systemctl edit gpuguard, and add, so that it can make lock files anew:
       [Service]
       ReadWritePaths={path}/lock
  2. systemctl restart gpuguard: a daemon that runs already does not know of it
Back: gpuguard setup --no-broker.  What it stops, and what it does not: docs/daemon.md, "Hostile users"."""


def is_brokered(path: str) -> bool:
    """Whether the lock files of *path* are the daemon's alone now."""
    try:
        found = os.lstat(f"{path}/lock/gate")
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == BROKERED


def keeper_of(path: str) -> str | None:
    """The user whose daemon gives the locks of *path* now, so that setting it up again changes nothing."""
    return user_name(os.lstat(f"{path}/lock/gate").st_uid) if is_brokered(path) else None


def change(path: str, user: str, *, brokered: bool) -> None:
    """Give the lock files to *user* alone, or to everybody.  The gate, which says what holds, comes last.

    Raises:
        LockDirectoryError: it cannot be done; run again, it goes on where it was.
    """
    account = pwd.getpwnam(user)
    directory = lock_directory(path)
    directory = replace(directory, keeper=account.pw_uid if brokered else directory.keeper)
    try:
        with Gate(directory):
            if not brokered and is_brokered(path):
                _refuse_shares(directory)
            for name in names_of(directory):
                _change_file(directory, name, account, brokered=brokered)
        if not brokered:
            os.chown(directory.locks, 0, 0)
        _change_file(directory, "gate", account, brokered=brokered)
        if brokered:
            replace_file(directory, "gate")  # whoever has the old one open would make the daemon wait
            os.chown(directory.locks, account.pw_uid, account.pw_gid)
    except OSError as error:
        raise LockDirectoryError(f"{directory.locks} cannot be changed: {error.strerror}.  Run it again.") from error


def _refuse_shares(directory: LockDirectory) -> None:
    """A share that the daemon gave holds its slot alone, which excludes nobody who takes the device's lock himself."""
    slots = grant_of(directory, [name for name in names_of(directory) if ".slot" in name])
    if shared := sorted({name.partition(".slot")[0] for name in slots}):
        raise LockDirectoryError(
            f"{len(shared)} devices are shared by claims that the daemon gave ({', '.join(shared)}): wait until these "
            "have ended (`gpuguard who` shows them), then run it again.  Nothing was changed."
        )


def _change_file(directory: LockDirectory, name: str, account: pwd.struct_passwd, *, brokered: bool) -> None:
    descriptor = open_lock(directory, name)
    try:
        was_open = stat.S_IMODE(os.fstat(descriptor).st_mode) != BROKERED
        os.fchown(descriptor, *((account.pw_uid, account.pw_gid) if brokered else (0, 0)))
        os.fchmod(descriptor, BROKERED if brokered else 0o444)
        if brokered and was_open and name != "gate":
            # The file that was looked at, whatever bears its name by now: the directory may be another user's already.
            with open(f"/proc/self/fd/{descriptor}", "wb") as file:
                file.write(EARLIER)
        if brokered and name != "gate":
            renew(directory, name, descriptor)
    finally:
        os.close(descriptor)
