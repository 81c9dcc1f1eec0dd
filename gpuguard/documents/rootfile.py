"""Reading a file that tells root what to do: nobody but root can have written it.

Each directory on the way is opened by itself, without following links, and looked at through its descriptor, so that
nothing can be exchanged between the look and the reading.  Does not look at what the file says.
"""

from __future__ import annotations

import os
import stat

from gpuguard.errors import InvalidRequest

_WAY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO must not hang the daemon


def read_file(path: str, largest: int, *, only_root: bool, only_public: bool = False) -> bytes:
    """The content of a regular file of at most *largest* bytes.

    Args:
        path: of the file.
        largest: bytes.
        only_root: it and every directory above it must be root's, with no write permission for others.
        only_public: everybody may read it, so that what is said about it tells nothing new.

    Raises:
        InvalidRequest: it is too large, no regular file, or somebody else could have written it.
        OSError: it cannot be read.
    """
    if not path:
        raise InvalidRequest("the name of the file is empty.\nWrite where it is.")
    descriptor = _open_by_root(os.path.abspath(path)) if only_root else os.open(path, _FILE)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest("this is not a regular file.\nName a file, not a directory or a device.")
        if only_root:
            _must_be_roots(found, path)
        if only_public and not found.st_mode & stat.S_IROTH:
            raise InvalidRequest("not everybody may read this file.\nRun: chmod o+r, if nothing secret is in it.")
        content = file.read(largest + 1)
    if len(content) > largest:
        raise InvalidRequest(f"the file is larger than {largest // 1024} KiB.\nSplit it, or delete what is not used.")
    return content


def _open_by_root(path: str) -> int:
    *directories, name = path.split("/")[1:]
    here, way = os.open("/", _WAY), ""
    try:
        _must_be_roots(os.fstat(here), "/")
        for directory in directories:
            way += f"/{directory}"
            there = _open_without_link(directory, _WAY, here, way)
            os.close(here)
            here = there
            _must_be_roots(os.fstat(here), way)
        return _open_without_link(name, _FILE | os.O_NOFOLLOW, here, path)
    finally:
        os.close(here)


def _open_without_link(name: str, flags: int, directory: int, path: str) -> int:
    # O_DIRECTORY with O_NOFOLLOW says "not a directory" of a link, so that it must be asked first.
    if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise InvalidRequest(f"{path} is a symbolic link, and whoever owns it could turn it.\nName the file itself.")
    return os.open(name, flags, dir_fd=directory)


def _must_be_roots(found: os.stat_result, path: str) -> None:
    if found.st_uid != 0:
        raise InvalidRequest(
            f"{path} belongs to uid {found.st_uid}, who could change what root does.\nRun: chown root: {path}"
        )
    # In a sticky directory (/tmp) others can add names, but not take away or replace what is root's.
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & 0o022 and not sticky:
        raise InvalidRequest(
            f"{path} can be written by others, who could change what root does.\nRun: chmod go-w {path}"
        )
