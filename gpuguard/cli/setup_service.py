"""What `gpuguard setup` does for the daemon: a user, a directory that is his, and the unit for systemd."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys

from gpuguard.claims import directory
from gpuguard.cli import setup_installed
from gpuguard.enforcement.identity import uid_min
from gpuguard.errors import GpuguardError, LockDirectoryError

SYSUSERS = "/etc/sysusers.d/gpuguard.conf"
UNIT = "gpuguard.service"
PYTHON = "/usr/bin/python3"  # in the unit as it is packed


def make_user(name: str) -> None:
    """Make the system user *name*, unless there is one.

    Raises:
        LockDirectoryError: there is none and none can be made, or the name is that of a person.
    """
    found = _account(name)
    if found is None:
        setup_installed.remember_user(name)  # first: whoever is interrupted behind it leaves none that nobody removes
        _install_user(name)
        found = _account(name)
    if found is None:
        setup_installed.remember_user(None)
        raise LockDirectoryError(
            f"the user {name} cannot be made here: neither systemd-sysusers nor useradd does it.  Make him by hand, or "
            "let the daemon run as root: `gpuguard setup --daemon-user root`."
        )
    if found.pw_uid >= uid_min() and name == directory.USER:
        raise LockDirectoryError(
            f"{name} is the account of a person here (uid {found.pw_uid}).  Name another user for the daemon with "
            "--daemon-user, one with a uid of the system's."
        )


def make_directory(path: str, name: str) -> None:
    """Make the directory of the daemon in *path*, or give the one that is there to *name*.

    Raises:
        LockDirectoryError: there is no such user, or it cannot be made.
    """
    found, place = _account(name), f"{path}/{directory.NAME}"
    if found is None:
        raise LockDirectoryError(f"there is no user {name}.  `sudo gpuguard setup` makes gpuguard.")
    try:
        if not os.path.lexists(place):
            os.mkdir(place, 0o700)
        # Through a descriptor: what is given away must be the directory itself.
        here = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(here, found.pw_uid, found.pw_gid)
            os.fchmod(here, 0o755)
        finally:
            os.close(here)
    except OSError as error:
        raise LockDirectoryError(f"{place} cannot be made for {name}: {error.strerror}.") from error


def tmpfiles_line(path: str, name: str) -> str:
    """What systemd-tmpfiles must do for the daemon at boot."""
    return f"d {path}/{directory.NAME} 0755 {name} {name} -"


def sysusers_line(name: str) -> str:
    """What systemd-sysusers must do."""
    return f'u {name} - "gpuguard, the guard of the GPUs" - -'


def unit_text() -> str:
    """The unit file, for the Python that runs now.

    Raises:
        GpuguardError: it was not installed with this package.
    """
    return packed(UNIT).replace(f"{PYTHON} -I", f"{sys.executable} -I")


def packed(name: str) -> str:
    """A file of packaging/.

    Raises:
        GpuguardError: it was not installed with this package.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for place in (f"{package}/packaging", f"{os.path.dirname(package)}/packaging"):
        try:
            with open(f"{place}/{name}", encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            continue
    raise GpuguardError(f"{name} is not installed with this package: take it from packaging/ of its sources.")


def doubts_about(executable: str) -> str | None:
    """Why the service could not run this Python, in words; None when nothing is known against it."""
    real = os.path.realpath(executable)
    if any(path.startswith(("/home/", "/root/", "/run/user/")) for path in (executable, real)):
        whole = executable if real == executable else f"{executable} (really {real})"
        return (
            f"{whole} lies in a home directory, which the service cannot see (ProtectHome=) and its owner could "
            "change.  Install gpuguard for the system, for example into /opt/gpuguard, and call setup from there."
        )
    return None


def _account(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _install_user(name: str) -> None:
    sysusers, useradd = shutil.which("systemd-sysusers"), shutil.which("useradd")
    try:
        if sysusers:
            setup_installed.write(
                SYSUSERS, f"# The user of the daemon: made by `gpuguard setup`.\n{sysusers_line(name)}\n"
            )
            subprocess.run([sysusers, SYSUSERS], check=False, stdin=subprocess.DEVNULL)
        elif useradd:
            home = ["--no-create-home", "--home-dir", "/", "--shell", "/usr/sbin/nologin"]
            subprocess.run([useradd, "--system", "--user-group", *home, name], check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise LockDirectoryError(f"the user {name} cannot be made: {error.strerror}.") from error
