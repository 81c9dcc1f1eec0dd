"""Files that programs and users share: opened where they lie, trusted only by owner and kind, written whole.

A user may mount a file system of their own (FUSE) over one of their files.  Any program that opens that file, or asks
for its size, waits for as long as that user likes, and if it has locked the gate, everybody waits.  So a name is held
first without opening the file (O_PATH), which asks no other process.  Does not know the content of a file: see jsonio.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpuguard.locale import _

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import BinaryIO

READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO must not keep its reader waiting
LEFTOVER_SECONDS = 60.0  # after which a file that its writer did not finish is removed
_HOLDING = os.O_PATH | os.O_CLOEXEC
_CREATING = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_mounts: dict[str, str] = {}  # directory -> the mount on which it was seen
_devices: dict[tuple[str, int], int] = {}  # (mount, device by stat()) -> device by device_of()


class UntrustedFile(OSError):
    """The file cannot be trusted and counts for nothing; *uid* is its owner."""

    def __init__(self, reason: str, uid: int) -> None:
        super().__init__(errno.EPERM, reason)
        self.uid = uid


@contextmanager
def closed_after(descriptor: int) -> Iterator[int]:
    """Yield *descriptor*, and close it when the block ends."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(path: str, flags: int = READING) -> tuple[int, os.stat_result]:
    """Open the ordinary file at *path*, which has no other name; return its descriptor and status.

    Raises UntrustedFile if it is a directory or a pipe or has a further name, OSError if there is none or it is a link.
    """
    descriptor = open_in_place(path, flags)
    try:
        status = os.fstat(descriptor)
        # A file with no name was replaced after it was opened.  It is whole, and a denial must not be overlooked.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise UntrustedFile(_("it is no ordinary file"), status.st_uid)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def read_file(path: str, limit: int, owners: Collection[int] | None = None) -> bytes:
    """Read an ordinary file of at most *limit* bytes.

    Args:
        owners: uids of the only users who may have written it, or None if anybody may.

    Raises:
        UntrustedFile: it is larger, others could have written it, or open_regular() does not trust it.
        OSError: there is none, it is a link, or it cannot be read.
    """
    descriptor, status = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if owners is not None and (status.st_uid not in owners or status.st_mode & 0o022):
            raise UntrustedFile(_("others could have written it"), status.st_uid)
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UntrustedFile(_("it is too long"), status.st_uid)
    return content


def create_file(path: str, mode: int | None = 0o644, owner: int | None = None) -> int:
    """Create a file and return a descriptor for reading and writing.  Raises OSError if there is one already.

    Args:
        mode: applies whatever the umask is, or None for what the umask permits.
        owner: uid, or None for that of this process.
    """
    descriptor = os.open(path, _CREATING, 0o666 if mode is None else mode)
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        if owner is not None:
            os.fchown(descriptor, owner, -1)
    except BaseException:
        os.unlink(path)
        os.close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of *content*, or raise OSError."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def write_file(
    path: str,
    content: bytes,
    *,
    mode: int | None = 0o644,
    owner: int | None = None,
    unfinished: str | None = None,
    sync: bool = False,
    prepare: Callable[[int], object] = lambda descriptor: None,
) -> None:
    """Write a file whole: readers see the old one or the new one, and a link in its place is replaced, not followed.

    Args:
        mode: as for create_file(); likewise *owner*.
        unfinished: the name under which it is written first, or None for a random one beside it; random ones that
            killed writers left are removed.
        sync: whether it must outlast a crash of the machine.
        prepare: called with the finished file's descriptor before the file gets its name.

    Raises:
        OSError: it cannot be written; then nothing of it is left.
    """
    name = unfinished or f"{path}.{os.urandom(8).hex()}.new"
    descriptor = create_file(name, mode, owner)
    try:
        write_all(descriptor, content)
        if sync:
            os.fsync(descriptor)
        prepare(descriptor)
        os.rename(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    finally:
        os.close(descriptor)
    if unfinished is not None:
        return
    directory, name = os.path.split(path)
    with suppress(OSError):  # a leftover that cannot be removed does no harm
        for other in os.listdir(directory or "."):
            if other.startswith(f"{name}.") and other.endswith(".new"):
                remove_leftover(os.path.join(directory, other))


def remove_leftover(path: str) -> None:
    """Remove a file that a killed writer left, if it is old enough and this user may."""
    with suppress(OSError):
        if time.time() - status_in_place(path).st_mtime > LEFTOVER_SECONDS:
            os.unlink(path)


def wait_for(descriptors: Collection[int], seconds: float | None) -> set[int]:
    """Sleep until one of *descriptors* is readable, at most so many seconds, and return those that are."""
    poll = select.poll()  # select() knows no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds * 1000))}


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def open_named(path: str, flags: int, mode: int = 0o600) -> int:
    """Call os.open() on a *path* that the caller named; for root it leads where root meant, and nowhere else.

    Root may name a file in a directory of another user.  That user can replace the file, or a directory on the way, by
    a link, or give that name to a file of root's as well.  Raises OSError if that is so anywhere.
    """
    if os.geteuid() != 0:
        return os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        return open_along(path, flags, partial(_open_beside, mode))
    except OSError as error:
        error.filename = path
        raise


def open_along(path: str, flags: int, open_beside: Callable[[int, str, str, int], int]) -> int:
    """Open each directory on the way to *path* by itself, then the file, so that nothing can be exchanged meanwhile.

    *open_beside* checks and opens one of them.  It gets a descriptor of the directory that contains it, its name, its
    whole path and flags.  Raises OSError, and whatever *open_beside* raises.
    """
    *directories, name = os.path.abspath(path).split("/")[1:]
    here, way = os.open("/", _HOLDING), ""
    try:
        for directory in directories:
            way += f"/{directory}"
            before, here = here, open_beside(here, directory, way, _HOLDING | os.O_DIRECTORY)
            os.close(before)
        return open_beside(here, name or ".", f"{way}/{name}", flags | os.O_CLOEXEC)
    finally:
        os.close(here)


def open_file(path: str) -> BinaryIO:
    """Open an ordinary file that the caller named for reading; a FIFO is refused, as it would keep its reader waiting.

    Raises OSError if it is not an ordinary file, or as open_named() does.
    """
    descriptor = open_named(path, READING)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _("it is no ordinary file"), path)
    return os.fdopen(descriptor, "rb")


def _open_beside(mode: int, directory: int, name: str, _way: str, flags: int) -> int:
    status = os.fstat(directory)
    if status.st_uid == 0 and not status.st_mode & 0o022:
        return os.open(name, flags, mode, dir_fd=directory)
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):  # with O_DIRECTORY a link gives ENOTDIR
            raise OSError(errno.ELOOP, _("it is a link in a directory where others may write")) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, _("it has another name, too, in a directory where others may write"))
    return descriptor


def open_in_place(path: str, flags: int = READING) -> int:
    """Open the very file that lies at *path*.  Raises OSError if it is a link, or if something is mounted over it."""
    with closed_after(hold_in_place(path)) as held:
        try:
            return os.open(f"/proc/self/fd/{held}", flags | os.O_CLOEXEC)
        except BlockingIOError as error:  # elsewhere its errno means that no process can be started
            raise OSError(errno.EBUSY, "its owner has a lease on it, fcntl(2)") from error


def open_or_create(path: str, flags: int, mode: int) -> int:
    """Open a file as open_in_place() does, or make it if there is none."""
    try:
        return open_in_place(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def status_in_place(path: str) -> os.stat_result:
    """Call os.lstat(), but raise OSError if something is mounted over the file."""
    with closed_after(hold_in_place(path)) as held:
        return os.fstat(held)


def version_of(path: str) -> tuple[int, ...] | None:
    """A value that changes whenever the file at *path* does, or None if there is no file that can be looked at."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def hold_in_place(path: str) -> int:
    """A descriptor (O_PATH) that only says which file lies at *path*.  Raises OSError if that is mounted over."""
    held = os.open(path, _HOLDING | os.O_NOFOLLOW)
    try:
        directory = os.path.dirname(path) or "."
        mount = _mount_of(held)
        if mount != _mounts.get(directory):
            with closed_after(os.open(directory, _HOLDING)) as around:
                _mounts[directory] = _mount_of(around)
            if mount != _mounts[directory]:
                raise OSError(errno.EXDEV, "a file system is mounted over it")
    except BaseException:
        os.close(held)
        raise
    return held


def _mount_of(held: int) -> str:
    """The kernel's id of the mount on which a held file lies."""
    with closed_after(os.open(f"/proc/self/fdinfo/{held}", os.O_RDONLY | os.O_CLOEXEC)) as fdinfo:
        return os.read(fdinfo, 4096).partition(b"mnt_id:\t")[2].partition(b"\n")[0].decode()


def device_of(descriptor: int) -> int:
    """The number by which /proc/locks names an open file's device; on Btrfs and overlayfs stat() has another one."""
    own, mount = os.fstat(descriptor).st_dev, _mount_of(descriptor)
    if (mount, own) not in _devices:
        devices = [seen.device for seen in mounts() if seen.number == mount]
        # A descriptor that was passed from another mount namespace lies on none of these.
        _devices[mount, own] = os.makedev(*map(int, devices[0].split(":"))) if devices else own
    return _devices[mount, own]


class Mount(NamedTuple):
    """A line of proc_pid_mountinfo(5)."""

    number: str
    device: str  # "8:1"
    root: str
    point: str
    kind: str  # "ext4", "tmpfs", "fuse.sshfs"
    options: str  # of the file system


def mounts(mountinfo: str = "/proc/self/mountinfo") -> list[Mount]:
    """The mounts that are visible here, in the kernel's order.  Raises OSError."""
    found = []
    # Of all characters that separate words or lines, the kernel escapes only the blank, the tab and the newline, and
    # users choose where they mount (FUSE).
    with open(mountinfo, encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            before, _, after = line.rstrip("\n").partition(" - ")
            number, _, device, *paths = before.split(" ")
            root, point = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), path) for path in paths[:2])
            kind, *_, options = after.split(" ")
            found.append(Mount(number, device, root, point, kind, options))
    return found


def file_system(path: str, mountinfo: str = "/proc/self/mountinfo") -> str | None:
    """The type of the file system that *path* lies on, or None if it is unknown."""
    real = os.path.realpath(path)
    with suppress(OSError):
        around = [mount for mount in mounts(mountinfo) if f"{real}/".startswith(f"{mount.point.rstrip('/')}/")]
        # Of several mounts at the same place the last one covers the others.
        return max(reversed(around), key=lambda mount: len(mount.point)).kind if around else None
    return None
