"""`gpuguard setup --remove`: what setup installed goes away, and nothing else.

A file that was changed stays, and so does everything that was not installed by setup.  The log and the history stay,
and become root's.  The lock files go only while no process holds one of them: a file that is removed under its holder
lets a second one in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess

from gpuguard.claims.directory import is_same_file, lock_directory, try_flock
from gpuguard.cli import setup_service
from gpuguard.cli.setup_service import is_as_written
from gpuguard.errors import LockDirectoryError
from gpuguard.files import open_in_place
from gpuguard.history.audit_log import MACHINE_EVENTS
from gpuguard.history.queries import MACHINE_STATE


def remove(directory: str) -> int:
    """Remove it all, saying what; returns 1 where there was nothing.

    Raises:
        LockDirectoryError: not as root, or something cannot be removed.
    """
    if os.geteuid() != 0:
        raise LockDirectoryError("only root can remove what root has installed.  Run `sudo gpuguard setup --remove`.")
    unit, mount, policy = setup_service.UNIT, setup_service.MOUNT_UNIT, setup_service.POLICY
    files = [
        path for path in (unit, mount, policy, setup_service.SYSUSERS, setup_service.TMPFILES) if os.path.lexists(path)
    ]
    ours = [path for path in files if is_as_written(path)]
    changed = [path for path in files if path not in ours and _was_written(path)]
    user = setup_service.made_user()
    if not ours and not user and not os.path.lexists(directory):
        print("Nothing is installed.")
        return 1
    if shutil.which("systemctl"):
        now = ["--now"] if setup_service.is_booted() else []
        if unit in ours:
            setup_service.systemctl("disable", *now, setup_service.SERVICE)
            print("The service is stopped.  Jobs and their claims go on.")
        elif unit in files:
            print(f"The service goes on: {unit} is not as setup wrote it.  `systemctl disable --now gpuguard` ends it.")
        if mount in ours:
            setup_service.systemctl("disable", setup_service.MOUNT)
    for path in ours:
        try:
            os.unlink(path)
        except OSError as error:
            raise LockDirectoryError(f"{path} cannot be removed: {error.strerror}.") from error
        print(f"{path} is removed.")
    if {unit, mount} & {*ours} and setup_service.is_booted() and shutil.which("systemctl"):
        setup_service.systemctl("daemon-reload")
    clear(directory)
    if user:
        _remove_user(user)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(setup_service.LIST)
    with contextlib.suppress(OSError):  # something is in it, which is not ours
        os.rmdir(os.path.dirname(policy))
    for path in changed:
        print(f"{path} stays: it has been changed since it was installed.")
    stay = [path for path in (os.path.dirname(MACHINE_EVENTS), MACHINE_STATE, f"{unit}.d") if os.path.lexists(path)]
    if stay:
        print(f"What stays: {', '.join(stay)} (log, history, what you wrote yourself).")
    return 0


def _was_written(path: str) -> bool:
    """Whether setup has written *path*, whatever became of it since."""
    begins = setup_service.SEAL.encode()
    return (setup_service.content_of(path) or b"").startswith(begins) or setup_service.listed("files", path) is not None


def clear(path: str) -> None:
    """Remove the directory of the claims, if no process holds anything in it.

    Raises:
        LockDirectoryError: it cannot be removed, or is not what it should be.
    """
    if not os.path.lexists(path):
        return
    lock_directory(path)  # or it is not what it should be, and nothing for us to remove
    held: list[int] = []
    try:
        if busy := lock_all(path, held):
            print(f"{path} stays until the next boot: {busy}.")
            return
        # With all locks in our hands no claim can be made; those who wait for one find then that its file is gone.
        if os.path.ismount(f"{path}/claims"):
            done = subprocess.run(["umount", "--lazy", f"{path}/claims"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise LockDirectoryError(f"{path}/claims stays: {' '.join(done.stderr.split())}.")
        held.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        _empty(held[-1])
        os.rmdir(path)
    except OSError as error:
        raise LockDirectoryError(f"{path} cannot be removed: {error.strerror}.") from error
    finally:
        for descriptor in held:
            os.close(descriptor)
    print(f"{path} is removed: nobody had a claim.")


def lock_all(path: str, held: list[int]) -> str | None:
    """Lock all files in *path*, their descriptors into *held*; returns what another process holds, in words."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a machine with MIG has more than the usual 1024
    for folder in (path, *(f"{path}/{name}" for name in ("lock", "claims", "daemon"))):  # none is locked deeper down
        if not os.path.isdir(folder):
            continue
        with os.scandir(folder) as entries:
            files = sorted(entry.path for entry in entries if entry.is_file(follow_symlinks=False))
        for file in files:
            try:
                descriptor = open_in_place(file)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    return f"whether {file} is held cannot be seen ({error.strerror})"
                continue  # it is gone meanwhile
            held.append(descriptor)
            if not try_flock(descriptor) or not is_same_file(descriptor, file):
                return f"{file} is held, by a claim, a request in the queue, or a daemon"
    return None


def _empty(folder: int) -> None:
    """Remove all that lies in an open directory.

    Users may have made folders in folders, deeper than Python, or a path, can reach: what lies in one is moved up.

    Raises:
        OSError: some of it stays.
    """
    while subfolders := _without_files(folder):
        for name in subfolders:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.fchown(inner, 0, 0)  # a user who goes on writing there would keep it from being removed
                os.fchmod(inner, 0o700)
                for deeper in _without_files(inner):
                    os.rename(deeper, os.urandom(8).hex(), src_dir_fd=inner, dst_dir_fd=folder)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)


def _without_files(folder: int) -> list[str]:
    """Remove what is no folder; the folders."""
    with os.scandir(folder) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in names:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in names if is_folder]


def _remove_user(name: str) -> None:
    account = setup_service.account_of(name)
    if account is None:
        return
    for top in (os.path.dirname(MACHINE_EVENTS), MACHINE_STATE):
        # The uid can be given to another user, who would own the log.
        for folder, folders, files in os.walk(top):
            for path in (folder, *(f"{folder}/{entry}" for entry in (*folders, *files))):
                if os.lstat(path).st_uid == account.pw_uid:
                    os.lchown(path, 0, 0)
    program = shutil.which("userdel")
    done = program and subprocess.run(
        [program, name], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done and done.returncode == 0:
        print(f"The user {name} is removed.")
    else:
        reason = " ".join(done.stderr.split()) if done else "there is no userdel here."
        print(f"The user {name} stays: {reason}")
