"""Files where everybody may write, opened and looked at without entering what somebody has mounted over one of them.

A user may mount a file system of his own (FUSE) over a file of his.  Where /etc/fuse.conf has user_allow_other, whoever
opens that file, or asks how long it is, waits for as long as its owner likes: root and the guard, and with the gate
locked everybody.  So a name is held first without opening what it names (O_PATH), which asks nobody.  Knows also the
types of file systems.
"""

from __future__ import annotations

import errno
import os

from gpuguard.errors import shortage

READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_HOLDING = os.O_PATH | os.O_CLOEXEC

_mounts: dict[str, bytes] = {}  # directory -> on which mount it was seen
_devices: dict[tuple[bytes, int], int] = {}  # of a mount, and as stat() says -> as device_of()


def open_in_place(path: str, flags: int = READING) -> int:
    """A descriptor of the file that lies at *path*, of a link or of what is mounted there an OSError."""
    held = hold_in_place(path)
    try:
        return os.open(f"/proc/self/fd/{held}", flags | os.O_CLOEXEC)
    except BlockingIOError as error:  # whose number says elsewhere that no process can be started
        raise OSError(errno.EBUSY, "its owner has a lease on it, fcntl(2)") from error
    finally:
        os.close(held)


def made_in_place(path: str, flags: int, mode: int) -> int:
    """The same, of a file that is made if there is none."""
    try:
        return open_in_place(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def status_in_place(path: str) -> os.stat_result:
    """As os.lstat(); of what is mounted there an OSError."""
    held = hold_in_place(path)
    try:
        return os.fstat(held)
    finally:
        os.close(held)


def lies_there(path: str) -> bool:
    """As os.path.lexists(); also of what is mounted there."""
    try:
        os.close(os.open(path, _HOLDING | os.O_NOFOLLOW))
    except OSError as error:
        if shortage(error):  # which says nothing of the file: the claims of all would look given up
            raise
        return False
    except ValueError:  # no name of a file, as a record of somebody's may have it
        return False
    return True


def device_of(descriptor: int) -> int:
    """By which the kernel names an open file where it tells of locks: with Btrfs and overlayfs not as stat() does."""
    found, mount = os.fstat(descriptor).st_dev, _mount_of(descriptor)
    if (mount, found) not in _devices:
        with open("/proc/self/mountinfo", "rb") as lines:
            devices = [line.split(b" ", 3)[2] for line in lines if line.startswith(mount + b" ")]
        # What was borrowed of another mount namespace stands in none of these lines.
        _devices[mount, found] = os.makedev(*map(int, devices[0].split(b":"))) if devices else found
    return _devices[mount, found]


def hold_in_place(path: str) -> int:
    """A descriptor (O_PATH) that only says which file lies at *path*; of what is mounted there an OSError."""
    held = os.open(path, _HOLDING | os.O_NOFOLLOW)
    try:
        place = os.path.dirname(path)
        mount = _mount_of(held)
        if mount != _mounts.get(place):
            around = os.open(place, _HOLDING)
            try:
                _mounts[place] = _mount_of(around)
            finally:
                os.close(around)
            if mount != _mounts[place]:
                raise OSError(errno.EXDEV, "somebody has mounted something over it")
    except BaseException:
        os.close(held)
        raise
    return held


def _mount_of(held: int) -> bytes:
    """What the kernel calls the mount on which a held file lies."""
    told = os.open(f"/proc/self/fdinfo/{held}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(told, 4096).partition(b"mnt_id:\t")[2].partition(b"\n")[0]
    finally:
        os.close(told)


def file_system(path: str, mountinfo: str = "/proc/self/mountinfo") -> str | None:
    """The type of the file system that *path* lies on ("ext4", "tmpfs", "fuse.sshfs"); None if unknown."""
    real, found, kind = os.path.realpath(path), "", None
    try:
        # Of all ends of lines the kernel writes out the newline alone, and a user mounts where he likes (FUSE).
        with open(mountinfo, encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
            for line in lines:
                before, _, after = line.partition(" - ")
                mount_point = before.split(" ")[4]
                if "\\" in mount_point:
                    mount_point = _unescaped(mount_point)
                inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
                if inside and len(mount_point) >= len(found):
                    found, kind = mount_point, after.split(" ")[0]
    except (OSError, IndexError):
        return None
    return kind


def _unescaped(mount_point: str) -> str:
    import re

    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount_point)
