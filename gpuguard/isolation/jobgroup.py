"""A cgroup for one job of root's, with a filter on its device nodes.

It lies below our own cgroup, so every limit that holds for us holds for the job.  The filter is the kernel's and lives
as long as the cgroup: it stays when this process is killed.  Then only the empty directory is left when the job ends,
and the next isolated job removes it: a lock on the directory says whether its maker still needs it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Collection, Mapping

from gpuguard.errors import GpuguardError
from gpuguard.isolation.devicefilter import attach, load, program

PREFIX = "gpuguard-"
_TRIES = 20  # a directory that is not locked yet may be taken for one that was left


def check() -> None:
    """Whether root can filter devices here.

    Raises:
        GpuguardError: no; the message says why.
    """
    own_cgroup()
    os.close(_load({}))


def prepare(
    rules: Mapping[int, tuple[int, Collection[int]]], name: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make the cgroup of the job *name*, with a filter for *rules*; how to enter it, and how to remove it."""
    parent = own_cgroup()
    sweep(parent)
    filter_ = _load(rules)
    path = f"{parent}/{PREFIX}{name}"
    try:
        directory = _make(path)
        try:
            attach(directory, filter_)
            processes = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            os.rmdir(path)
            os.close(directory)
            raise
    except OSError as error:
        raise _refused(f"{path}: {error.strerror}") from error
    finally:
        os.close(filter_)  # the cgroup keeps it

    def enter() -> None:
        os.write(processes, b"0")

    def close() -> None:
        os.close(processes)
        _remove(path)  # a process that is left keeps it, with the filter
        os.close(directory)

    return enter, close


def sweep(parent: str) -> None:
    """Remove the empty cgroups whose makers were killed."""
    for name in os.listdir(parent):
        if not name.startswith(PREFIX):
            continue
        try:
            directory = os.open(f"{parent}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # somebody was quicker
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(f"{parent}/{name}")
        except BlockingIOError:
            continue  # its maker lives
        finally:
            os.close(directory)


def own_cgroup() -> str:
    """The directory of the cgroup (version 2) that this process is in.

    Raises:
        GpuguardError: there is none that we can see and write.
    """
    # What users name, cgroups and places of mounts, may hold any other end of a line.
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        own = next((line[3:].rstrip("\n") for line in lines if line.startswith("0::")), None)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        mounts = [line.split(" ") for line in lines if " - cgroup2 " in line]
    for fields in mounts:
        root, place = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), word) for word in fields[3:5])
        below = root.rstrip("/")
        if own is not None and (own == root or own.startswith(f"{below}/")):
            path = (place + own[len(below) :]).rstrip("/")
            if os.access(path, os.W_OK):
                return path
            raise _refused(f"{path} cannot be written to, as in a container")
    raise _refused("no cgroup file system of version 2 is mounted")


def _make(path: str) -> int:
    """Make the directory and lock it."""
    for _ in range(_TRIES):
        try:
            os.mkdir(path)
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # swept already
            continue
        fcntl.flock(directory, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(directory), os.stat(path)):
                return directory
        except FileNotFoundError:
            pass
        os.close(directory)
    raise FileNotFoundError(errno.ENOENT, "somebody removes it again and again", path)


def _remove(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        return  # not empty, or gone


def _load(rules: Mapping[int, tuple[int, Collection[int]]]) -> int:
    try:
        return load(program(rules))
    except OSError as error:
        raise _refused(f"the kernel takes no device filter from us ({error.strerror})") from error


def _refused(why: str) -> GpuguardError:
    return GpuguardError(
        f"--isolate cannot be had: {why}.\n"
        "Root needs a writable cgroup file system of version 2 and the right to use bpf(2) (not in an ordinary "
        "container).  Or run the job as an ordinary user with bubblewrap installed."
    )
