"""What `gpuguard setup` does so that users cannot fill /run: their files get a small file system of their own.

A unit of systemd mounts it at boot.  On a running machine it is mounted by hand, over a directory in which nothing
lives: what it hid would be lost for everybody who looks.  Locks lie elsewhere, so that no claim depends on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, replace

from gpuguard.claims.directory import Gate, LockDirectory, lock_directory, try_flock
from gpuguard.cli import setup_installed, setup_service, setup_systemd
from gpuguard.cli.setup_installed import content_of, installed, is_as_written
from gpuguard.errors import LockDirectoryError
from gpuguard.files import LEFTOVER_SECONDS, open_in_place
from gpuguard.queue import reservation_store

NAME = "run-gpuguard-claims.mount"
UNIT = f"/etc/systemd/system/{NAME}"
PACKED = (f"/usr/lib/systemd/system/{NAME}", f"/lib/systemd/system/{NAME}")
FSTAB = "/etc/fstab"
FIRST = "1"  # the pid of the process whose mounts are those of the machine


def make_room(path: str) -> str | None:
    """Bound what users can write in *path*, now if that harms nobody, and at each boot; returns what to tell about it.

    Raises:
        LockDirectoryError: the unit cannot be installed.
    """
    claims = f"{path}/claims"
    boots = _install(claims)
    if os.path.ismount(claims) or not (why := mount_now(path)):
        if boots:
            return None
        return (
            f"{claims} has a file system of its own until the next boot.  Without systemd nothing makes it again: let "
            "what starts services here run `gpuguard setup` at each boot."
        )
    os.chmod(claims, 0o1777)  # or it is the directory under a mount that somebody has taken away
    when = "until the next boot" if boots else "until `gpuguard setup` is run again"
    return f"{claims} lies on {os.path.dirname(path)}, which any user can fill, {when}: {why}."


def keep_room(path: str) -> str | None:
    """Mount it where it should be and is not, when the service starts and nobody has a claim; returns why not."""
    if os.geteuid() != 0 or not any(map(os.path.exists, (UNIT, *PACKED))) or os.path.ismount(f"{path}/claims"):
        return None
    why = mount_now(path)
    return why and f"{path}/claims lies on {os.path.dirname(path)}, which any user can fill: {why}."


def mount_now(path: str) -> str | None:
    """Mount it over the directory of the records, if nothing there lives; returns why not, in words."""
    directory = lock_directory(path)
    if why := _who_would_not_see_it(directory.records):
        return why
    old = os.open(directory.records, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    before = replace(directory, records=f"/proc/self/fd/{old}")  # this one, whatever is mounted over it
    try:
        with Gate(directory):
            if why := _what_lives(before) or _mount(directory.records):
                return why
            with contextlib.suppress(OSError):  # read-only for us: some service's mounts
                os.fchmod(old, 0o755)  # nobody who stands in it can write there any more
            if why := _what_lives(before):  # it came meanwhile
                failed = _umount(directory.records, "--lazy")  # whoever stands in the new one by now
                with contextlib.suppress(OSError):
                    os.fchmod(old, 0o1777)
                return f"{why}, and now hidden: {failed}" if failed else why
        with contextlib.suppress(OSError):  # nobody finds them any more, but they take room
            empty(old)
    finally:
        os.close(old)
    return None


def disable() -> None:
    """Have no unit mount it at boot any more."""
    if is_as_written(UNIT, installed()) and shutil.which("systemctl"):
        setup_systemd.systemctl("disable", NAME)


def unmount(path: str) -> None:
    """Take the file system away, whoever looks at it; the locks of all claims must be held by the caller.

    Raises:
        LockDirectoryError: it cannot be taken away.
    """
    claims = f"{path}/claims"
    if os.path.ismount(claims) and (why := _umount(claims, "--lazy")):
        raise LockDirectoryError(f"{claims} stays: {why}.")


def _install(claims: str) -> bool:
    """The unit for the next boots; returns whether one will be there then."""
    if any(map(os.path.exists, PACKED)) or _in_fstab(claims):
        return True
    if not shutil.which("systemctl"):
        return False
    there = content_of(UNIT)
    if os.path.lexists(UNIT) and not is_as_written(UNIT, installed()):
        return there is not None  # somebody's own
    setup_installed.write(UNIT, setup_service.packed(NAME))
    setup_systemd.systemctl("enable", NAME)
    return True


def _in_fstab(claims: str) -> bool:
    lines = (content_of(FSTAB) or b"").decode(errors="replace").splitlines()
    return any(line.split()[1:2] == [claims] for line in lines if not line.lstrip().startswith("#"))


def options() -> str:
    """Of the mount, as the unit has them."""
    lines = setup_service.packed(NAME).splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith("Options="))


def _what_lives(directory: LockDirectory) -> str | None:
    """Something of somebody among the records that a mount would hide, in words."""
    with os.scandir(directory.records) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    for name in names:
        try:
            descriptor = open_in_place(f"{directory.records}/{name}")
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{name[:80]} there cannot be looked at ({error.strerror})"
        try:
            if name.endswith(".new"):  # not to be locked: whoever writes it is about to do that
                if abs(time.time() - os.fstat(descriptor).st_ctime) < LEFTOVER_SECONDS:
                    return f"{name[:80]} there is just being written"
            elif not try_flock(descriptor, fcntl.LOCK_SH):
                return f"{name[:80]} there is held, by a claim or by somebody in line"
        finally:
            os.close(descriptor)
    # Nobody holds these.
    if kept := reservation_store.read(directory, time.time())[0]:
        return f"{kept[0].user} has a reservation, which would be lost"
    return None


def _mount(place: str) -> str | None:
    return _run("mount", "-t", "tmpfs", "-o", options(), "tmpfs", place)


def _umount(place: str, *words: str) -> str | None:
    return _run("umount", *words, place)


def _run(*words: str) -> str | None:
    """Run a program among the mounts of the first process, those of all; returns why it failed, in words."""
    if os.readlink("/proc/self/ns/mnt") != os.readlink(f"/proc/{FIRST}/ns/mnt"):  # a service has its own
        words = ("nsenter", f"--target={FIRST}", "--mount", "--", *words)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        return f"{words[0]} cannot be started: {error.strerror}"
    return " ".join(done.stderr.split()).rstrip(".") or f"{words[0]} failed" if done.returncode else None


def empty(folder: int) -> None:
    """Remove all that lies in an open directory.

    Users may have made folders in folders, deeper than Python, or a path, can reach: what lies in one is moved up.

    Raises:
        OSError: some of it stays.
    """
    while folders := _without_files(folder):
        for name in folders:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.fchown(inner, 0, 0)  # whoever goes on writing there would keep it from being removed
                os.fchmod(inner, 0o700)
                for one in _without_files(inner):
                    os.rename(one, os.urandom(8).hex(), src_dir_fd=inner, dst_dir_fd=folder)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)


def _without_files(folder: int) -> list[str]:
    """Remove what is no folder; the folders."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in found if is_folder]


@dataclass(frozen=True)
class _Mount:
    """A line of mountinfo: *root* is the directory of the file system *device* that lies at *point*."""

    root: str
    point: str
    device: str
    shares: frozenset[str]  # the group that gets what is mounted below it
    gets: frozenset[str]  # the groups from which it gets that


def _who_would_not_see_it(place: str) -> str | None:
    """A process that sees *place* through a mount of its own, to which ours would not come, in words.

    Such a container would go on with the old directory, and its claims would have no details for the others.
    """
    try:
        around = [one for one in _mounts(FIRST) if _covers(one.point, place)]
        there, here = os.lstat(f"/proc/{FIRST}/root{place}"), os.lstat(place)
    except OSError as error:
        return f"what the first process sees cannot be looked at ({error.strerror})"
    if not around or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
        return "the first process does not see it (this is a container?)"
    ours = max(around, key=lambda one: len(one.point))
    inside = ours.root.rstrip("/") + place[len(ours.point.rstrip("/")) :]
    seen = {os.readlink(f"/proc/{FIRST}/ns/mnt")}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            space = os.readlink(f"/proc/{pid}/ns/mnt")
            others = [] if space in seen else _mounts(pid)
        except OSError:
            continue  # it has ended
        seen.add(space)
        if any(
            one.device == ours.device and _covers(one.root, inside) and not one.gets & ours.shares for one in others
        ):
            return (
                f"process {pid} (in a container?) sees it through a mount of its own, and would go on with the old one"
            )
    return None


def _mounts(pid: str) -> list[_Mount]:
    found = []
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            _, _, device, root, point, _, *tags = line.partition(" - ")[0].split(" ")
            shares, gets = (
                {tag.partition(":")[2] for tag in tags if tag.startswith(k)} for k in ("shared:", "master:")
            )
            found.append(_Mount(root, point, device, frozenset(shares), frozenset(shares | gets)))
    return found


def _covers(above: str, place: str) -> bool:
    return place == above or place.startswith(above.rstrip("/") + "/")
