"""Being woken by the kernel: when a claim or a ticket ends, when a process ends, when somebody rings.

A file that was open for writing tells its directory when its last holder closes it, however he dies (inotify,
IN_CLOSE_WRITE); readers do not count.  So the records of claims and the tickets wake whoever watches the directory of
both, and looking at them wakes nobody.  Knows nothing of what they mean: see waiting.
"""

from __future__ import annotations

import errno
import os
import re
import select
import struct
from collections.abc import Collection, Iterable

from gpuguard.claims.holders import as_written

# linux/inotify.h
_ATTRIB, _CLOSE_WRITE, _MOVED_TO, _DELETE, _DELETE_SELF, _OVERFLOW = 0x4, 0x8, 0x80, 0x200, 0x400, 0x4000
REPLACED = "replaced"  # what is told of a single file
_HEAD = struct.Struct("iIII")


class DirectoryWatch:
    """Tells which files of a directory appeared, ended or were removed.

    Raises:
        OSError: the kernel gives no further watch to this user (fs.inotify.max_user_instances).
    """

    def __init__(self, path: str) -> None:
        import ctypes

        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._directory = libc.inotify_add_watch(self.descriptor, os.fsencode(path), _CLOSE_WRITE | _MOVED_TO | _DELETE)
        if self._directory < 0:
            number = ctypes.get_errno()
            self.close()
            raise OSError(number, os.strerror(number), path)

    def follow(self, paths: Iterable[str]) -> None:
        """Tell also when one of these files, elsewhere, is removed or another one takes its place; if it is there."""
        for path in paths:
            self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), _ATTRIB | _DELETE_SELF)

    def names(self) -> set[str]:
        """The names that something happened to since the last call; "" when some were lost."""
        found: set[str] = set()
        while True:
            try:
                events = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return found
            at = 0
            while at < len(events):
                watch, mask, _, length = _HEAD.unpack_from(events, at)
                name = os.fsdecode(events[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0"))
                found.add("" if mask & _OVERFLOW else name if watch == self._directory else REPLACED)
                at += _HEAD.size + length

    def close(self) -> None:
        """Watch no longer."""
        os.close(self.descriptor)


class Processes:
    """Waits for the end of processes, whosever they are."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # pid -> pidfd

    def watch(self, pids: Iterable[int]) -> set[int]:
        """Wait for exactly these from now on; those of which one cannot hear, or has heard already, come back."""
        wanted, deaf = set(pids), set()
        for pid in self._open.keys() - wanted:
            os.close(self._open.pop(pid))
        for pid in wanted - self._open.keys():
            try:
                self._open[pid] = os.pidfd_open(pid)
            except (OSError, OverflowError):  # ended, of another namespace, no descriptors left; or it is no pid at all
                deaf.add(pid)
        ended = wait_for(self._open.values(), 0.0)
        for pid in [pid for pid, descriptor in self._open.items() if descriptor in ended]:
            os.close(self._open.pop(pid))
            deaf.add(pid)
        return deaf

    @property
    def descriptors(self) -> list[int]:
        """Readable once the process has ended."""
        return list(self._open.values())

    def close(self) -> None:
        """Wait for nobody any more."""
        self.watch(())


def wait_for(descriptors: Collection[int], seconds: float | None) -> set[int]:
    """Which of *descriptors* are readable; sleeps until one is, at most so many seconds."""
    poll = select.poll()  # select() knows no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds * 1000))}


def flock_holder(descriptor: int) -> int | None:
    """The pid of the process that took the flock on this file, as the kernel says, or None."""
    place = re.compile(rf"FLOCK +ADVISORY +WRITE +(\d+) +{as_written(descriptor)} ")
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as locks:
            for line in locks:
                if "->" not in line and (found := place.search(line)):
                    return int(found[1]) or None  # 0: in another pid namespace
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES):
            raise
    return None
