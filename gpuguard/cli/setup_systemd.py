"""`gpuguard setup --systemd`: the service that guards the machine, installed and started.

It only observes: the first policy file says so, and the unit, too.  A policy file that is there already stays.  Makes
neither user nor directories: see setup and setup_service.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys

from gpuguard.claims.directory import USER
from gpuguard.cli import setup_service
from gpuguard.cli.setup_installed import content_of, installed, is_as_written, write
from gpuguard.errors import LockDirectoryError

SERVICE = "gpuguard.service"
UNIT = f"/etc/systemd/system/{SERVICE}"
POLICY = "/etc/gpuguard/policy.yaml"
PACKED = (f"/usr/lib/systemd/system/{SERVICE}", f"/lib/systemd/system/{SERVICE}")
BOOTED = "/run/systemd/system"  # there while systemd is the first process: sd_booted(3)

_STARTED = """\
The service runs, and only observes: `systemctl status gpuguard`, `gpuguard events --follow`.
It judges by {policy}.  To switch it on, twice: see docs/daemon.md.
Away again: {program} setup --remove"""


def refuse_where_it_cannot_work(user: str) -> None:
    """Look at everything before anything is changed.

    Raises:
        LockDirectoryError: there is no systemd, somebody else has installed the service, or it could not run, or
            should not trust, the Python that runs now.
    """
    if os.geteuid() != 0:
        raise LockDirectoryError("only root can install a service.  Run `sudo gpuguard setup --systemd`.")
    if not shutil.which("systemctl"):
        raise LockDirectoryError("there is no systemd here.  Let what starts services here start `gpuguard daemon`.")
    if packed := next(filter(os.path.exists, PACKED), None):
        raise LockDirectoryError(f"a package has installed {packed}: run `sudo systemctl enable --now gpuguard`.")
    if doubt := setup_service.doubts_about(sys.executable) or _open_to_others(
        sys.executable, os.path.dirname(os.path.dirname(__file__))
    ):
        raise LockDirectoryError(f"{doubt}\nNothing was changed.")
    found = content_of(UNIT)
    ours = found is None or found == unit_for(user).encode() or is_as_written(UNIT, installed())
    if os.path.lexists(UNIT) and not (ours and found):
        raise LockDirectoryError(
            f"{UNIT} is there, and it is not the one that would be installed.  Remove it (your own lines belong into "
            "`systemctl edit gpuguard`), and run this again.  Nothing was changed."
        )


def install(user: str) -> None:
    """Write unit and first policy, and start the service.

    Raises:
        LockDirectoryError: a file cannot be written, or the service does not start.
    """
    if not os.path.lexists(POLICY):
        write(POLICY, setup_service.packed("policy.yaml"))
    write(UNIT, unit_for(user))
    systemctl("enable", SERVICE)
    if not os.path.isdir(BOOTED):
        print("systemd does not run now: the service starts with the next boot.")
        return
    systemctl("daemon-reload")
    systemctl("restart", SERVICE, advice="`journalctl -u gpuguard -n 20` says why.")
    program = os.path.join(os.path.dirname(sys.executable), "gpuguard")
    print(_STARTED.format(policy=POLICY, program=program if os.path.exists(program) else "gpuguard"))


def unit_for(user: str) -> str:
    """The unit with the Python that runs now and *user* in it."""
    return setup_service.unit_text().replace(f"={USER}\n", f"={user}\n")


def systemctl(*words: str, advice: str = "") -> None:
    """Ask systemd for something.

    Raises:
        LockDirectoryError: it refuses, in its words.
    """
    try:
        done = subprocess.run(
            ["systemctl", *words], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise LockDirectoryError(f"systemctl cannot be started: {error.strerror}.") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LockDirectoryError(f"`systemctl {' '.join(words)}` failed: {said}  {advice}".rstrip())


def _open_to_others(*paths: str) -> str | None:
    """Why others than root could change what the service runs, in words; None if they cannot."""
    for start in {place for path in paths for place in (path, os.path.realpath(path))}:
        place = os.path.abspath(start)
        while True:
            try:
                found = os.stat(place)
            except OSError as error:
                return f"{place} cannot be looked at: {error.strerror}."
            sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            if found.st_uid != 0 or (found.st_mode & 0o022 and not sticky):
                return (
                    f"{place} can be changed by others than root, and the service would run what they put there.  "
                    "Install gpuguard for the system, for example into /opt/gpuguard, and call setup from there."
                )
            if place == "/":
                break
            place = os.path.dirname(place)
    return None
