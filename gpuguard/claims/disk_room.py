"""How much room there is for the files that users write next to each other's claims, and which users take it up.

`gpuguard setup` gives the directory of the records a small file system of its own, so that a user who fills it fills
nothing else.  Claims need none of these files.  This module frees no room: root decides whose files are removed.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.holders import target_of
from gpuguard.files import status_in_place
from gpuguard.locale.messages import sentence
from gpuguard.procfs import in_time
from gpuguard.units import format_bytes
from gpuguard.users import user_name

MOST_FILES = 100_000  # that are counted at most, where nothing bounds their number
SCARCE = 0.8  # the used part from which on it is time to see which user has it
_PAGE = 4096  # bytes: with less free, no record can be written


@dataclass(frozen=True)
class RoomUsage:
    """The room that the files of one user take up."""

    uid: int
    files: int  # including those without a name, as far as we may see who has them open
    size: int  # bytes of memory of the files that have a name


@dataclass(frozen=True)
class Room:
    """The room below *path*, with sizes in bytes; *own* says whether it is a separate file system.

    *taken* begins with the user who has the most.
    """

    path: str
    own: bool
    size: int
    size_free: int
    files: int
    files_free: int
    taken: tuple[RoomUsage, ...] = ()

    @property
    def used(self) -> float:
        """The part of files or of bytes that is used, whichever is scarcer; 1.0 if no record can be written."""
        if (self.files and not self.files_free) or self.size_free < _PAGE:
            return 1.0
        return self.part(self.files - self.files_free, self.size - self.size_free)

    @property
    def who(self) -> RoomUsage | None:
        """The user with the most, or None if room is not scarce or they have less than half of what is used."""
        most = next(iter(self.taken), None)
        return most if most and self.used >= SCARCE and self.part(most.files, most.size) >= self.used / 2 else None

    def in_words(self) -> str:
        """Describe the room, as in ``"bin has 16,000 of 16,384 files and 61MiB of 64MiB there"``."""
        if most := self.who:
            amounts = self._amounts(most.files, most.size)
            return sentence("room.of_user", "{user} has {amounts} there", user=user_name(most.uid), amounts=amounts)
        files, size = self.files - self.files_free, self.size - self.size_free
        text = sentence("room.taken", "{amounts} are taken", amounts=self._amounts(files, size))
        files, size = files - sum(usage.files for usage in self.taken), size - sum(usage.size for usage in self.taken)
        if self.part(files, size) <= 1 / 2:
            return text
        return sentence(
            "room.nameless",
            "{text}, of which files without a name take {files} and {size}",
            text=text,
            files=f"{files:,}",
            size=format_bytes(max(0, size)),
        )

    def _amounts(self, files: int, size: int) -> str:
        return sentence(
            "room.amounts",
            "{files} of {all_files} files and {size} of {all}",
            files=f"{files:,}",
            all_files=f"{self.files:,}",
            size=format_bytes(size),
            all=format_bytes(self.size),
        )

    def part(self, files: int, size: int) -> float:
        """Return which part of all files or bytes these are, whichever is scarcer."""
        return max(files / self.files if self.files else 0.0, size / self.size if self.size else 0.0)


def room_for_records(directory: LockDirectory) -> Room:
    """Return the room for records, and which users take it up.

    Raises:
        OSError: the file system cannot be read.
    """
    path = directory.records
    status = os.statvfs(path)
    own = os.lstat(path).st_dev != os.lstat(os.path.dirname(path)).st_dev
    size, free = status.f_blocks * status.f_frsize, status.f_bfree * status.f_frsize
    room = Room(path, own, size, free, status.f_files, status.f_ffree, tuple(_biggest_users(path)))
    if room.own and room.used >= SCARCE and not room.who:
        room = replace(room, taken=tuple(_with_nameless(room.taken, path)))
    taken = sorted(room.taken, key=lambda usage: (-room.part(usage.files, usage.size), usage.uid))
    return replace(room, taken=tuple(taken))


def _with_nameless(taken: Iterable[RoomUsage], path: str) -> list[RoomUsage]:
    """Add to *taken* the files below *path* that were removed and are still open, known by their former names alone."""
    named = {usage.uid: usage for usage in taken}
    files = Counter({uid: usage.files for uid, usage in named.items()})
    for pid in filter(str.isdigit, os.listdir("/proc")):
        files.update(in_time(int(pid), "nameless", partial(_nameless_files, pid, path)) or ())
    return [replace(named.get(uid, RoomUsage(uid, 0, 0)), files=number) for uid, number in files.items()]


def _nameless_files(pid: str, path: str) -> list[int]:
    """Return the uid of a process, once for each removed file below *path* that it has open."""
    targets, uid = [target_of(pid, number) for number in os.listdir(f"/proc/{pid}/fd")], os.stat(f"/proc/{pid}").st_uid
    return [uid for target in targets if target.startswith(f"{path}/") and target.endswith(" (deleted)")]


def why_full(directory: LockDirectory, error: OSError) -> str:
    """Return what *error* says, and if no room is left also who uses it, where that is known."""
    text = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return text
    try:
        room = room_for_records(directory)
    except OSError:
        return text
    return sentence("because", "{what}: {why}", what=text, why=room.in_words()) if room.own else text


def _biggest_users(path: str) -> list[RoomUsage]:
    """Return what each user has, including folders that they made; what cannot be read counts for no user."""
    files, sizes = Counter[int](), Counter[int]()
    for status in islice(_statuses_below(path), MOST_FILES):
        files[status.st_uid] += 1
        sizes[status.st_uid] += status.st_blocks * 512
    return [RoomUsage(uid, files[uid], sizes[uid]) for uid in files]


def _statuses_below(path: str) -> Iterator[os.stat_result]:
    folders = [path]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):  # it has just been removed, or its owner has mounted something over it
                    status = status_in_place(entry.path)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    yield status
