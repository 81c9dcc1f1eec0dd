"""`gpuguard setup --remove`: what setup installed goes away, and nothing else.

A file that somebody has changed stays, and so does everything that was not installed by setup.  The log and the history
stay, and become root's.  The lock files go only while nobody holds one of them: a file that is removed under its holder
lets a second one in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import resource
import shutil
import subprocess

from gpuguard.claims.directory import is_same_file, lock_directory, try_flock
from gpuguard.cli import setup_installed, setup_room, setup_service, setup_systemd
from gpuguard.cli.setup_installed import Installed
from gpuguard.errors import LockDirectoryError
from gpuguard.files import open_in_place
from gpuguard.history.audit_log import MACHINE_EVENTS
from gpuguard.history.queries import MACHINE_STATE

HEADER = b"made by `gpuguard setup`"  # in what setup wrote before there was a list


def remove(directory: str, tmpfiles: str) -> int:
    """Remove it all, saying what; returns 1 where there was nothing.

    Raises:
        LockDirectoryError: not as root, or something cannot be removed.
    """
    if os.geteuid() != 0:
        raise LockDirectoryError("only root can remove what root has installed.  Run `sudo gpuguard setup --remove`.")
    found = _found(tmpfiles)
    if not found["files"] and not found["user"] and not os.path.lexists(directory):
        print("Nothing is installed.")
        return 1
    if setup_systemd.UNIT in found["files"]:
        _stop(found)
    setup_room.disable()
    changed = [path for path in found["files"] if not _remove_file(path, found)]
    _clear(directory)
    if found["user"]:
        _remove_user(found["user"])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(setup_installed.LIST)
    for folder in sorted(found["folders"], reverse=True):
        with contextlib.suppress(OSError):  # something is in it, which is not ours
            os.rmdir(folder)
    for path in changed:
        print(f"{path} stays: it has been changed since it was installed.")
    _name_what_stays()
    return 0


def _found(tmpfiles: str) -> Installed:
    """The list, and what was installed before there was one."""
    found = setup_installed.installed()
    known = (setup_systemd.UNIT, setup_systemd.POLICY, setup_room.UNIT, setup_service.SYSUSERS, tmpfiles)
    # Whatever somebody wrote into the list: nothing but these is ever removed.
    found["files"] = {path: digest for path, digest in found["files"].items() if path in known}
    found["folders"] = [folder for folder in found["folders"] if folder in map(os.path.dirname, known)]
    for path in (setup_service.SYSUSERS, tmpfiles):
        content = setup_installed.content_of(path)
        if path not in found["files"] and content is not None and HEADER in content:
            found["files"][path] = setup_installed.digest(content)
    return found


def _stop(found: Installed) -> None:
    unit = setup_systemd.UNIT
    if not os.path.lexists(unit):
        return
    if not setup_installed.is_as_written(unit, found):
        print(f"The service goes on: {unit} is somebody's own.  `systemctl disable --now gpuguard` ends it.")
        return
    if not shutil.which("systemctl"):
        return
    now = ["--now"] if os.path.isdir(setup_systemd.BOOTED) else []
    setup_systemd.systemctl("disable", *now, setup_systemd.SERVICE)
    print("The service is stopped.  Jobs and their claims go on.")


def _remove_file(path: str, found: Installed) -> bool:
    """Remove it unless it was changed; returns whether it is gone."""
    if not os.path.lexists(path):
        return True
    if not setup_installed.is_as_written(path, found):
        return False
    try:
        os.unlink(path)
    except OSError as error:
        raise LockDirectoryError(f"{path} cannot be removed: {error.strerror}.") from error
    print(f"{path} is removed.")
    if (
        path in (setup_systemd.UNIT, setup_room.UNIT)
        and os.path.isdir(setup_systemd.BOOTED)
        and shutil.which("systemctl")
    ):
        setup_systemd.systemctl("daemon-reload")
    return True


def _clear(path: str) -> None:
    """Remove the directory of the claims, if nobody holds anything in it."""
    if not os.path.lexists(path):
        return
    lock_directory(path)  # or it is not what it should be, and nothing for us to remove
    held: list[int] = []
    try:
        if busy := _lock_all(path, held):
            print(f"{path} stays until the next boot: {busy}.")
            return
        # With all locks in our hands nobody can claim; who waits for one finds then that its file is gone.
        setup_room.unmount(path)
        held.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        setup_room.empty(held[-1])
        os.rmdir(path)
    except OSError as error:
        raise LockDirectoryError(f"{path} cannot be removed: {error.strerror}.") from error
    finally:
        for descriptor in held:
            os.close(descriptor)
    print(f"{path} is removed: nobody had a claim.")


def _lock_all(path: str, held: list[int]) -> str | None:
    """Lock all files in *path*, their descriptors into *held*; returns what somebody else holds, in words."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a machine with MIG has more than the usual 1024
    for folder in (path, *(f"{path}/{one}" for one in ("lock", "claims", "daemon"))):  # deeper down nobody locks one
        if not os.path.isdir(folder):
            continue
        with os.scandir(folder) as entries:
            places = sorted(entry.path for entry in entries if entry.is_file(follow_symlinks=False))
        for place in places:
            try:
                descriptor = open_in_place(place)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    return f"whether {place} is held cannot be seen ({error.strerror})"
                continue  # it is gone meanwhile
            held.append(descriptor)
            if not try_flock(descriptor) or not is_same_file(descriptor, place):
                return f"{place} is held, by a claim, somebody in line, or a daemon"
    return None


def _remove_user(name: str) -> None:
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        return
    for top in (os.path.dirname(MACHINE_EVENTS), MACHINE_STATE):
        # His number can be given to somebody else, who would own the log.
        for folder, folders, files in os.walk(top):
            for place in (folder, *(f"{folder}/{one}" for one in (*folders, *files))):
                if os.lstat(place).st_uid == account.pw_uid:
                    os.lchown(place, 0, 0)
    program = shutil.which("userdel")
    done = program and subprocess.run(
        [program, name], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done and done.returncode == 0:
        print(f"The user {name} is removed.")
    else:
        said = " ".join(done.stderr.split()) if done else "there is no userdel here."
        print(f"The user {name} stays: {said}")


def _name_what_stays() -> None:
    own = f"{setup_systemd.UNIT}.d"
    places = (os.path.dirname(MACHINE_EVENTS), MACHINE_STATE, own)
    if stay := [place for place in places if os.path.lexists(place)]:
        print(f"What stays: {', '.join(stay)} (log, history, what you wrote yourself).")
