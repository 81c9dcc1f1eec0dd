"""What /proc says of processes, and a free port.  Not ps: a bare machine has none."""

import contextlib
import os
import socket
from pathlib import Path


def state(pid: int) -> str:
    """R, S, T, D, Z ...; "" where there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return ""


def runs(pid: int) -> bool:
    """Whether it is there and more than a zombie that waits for its parent."""
    return state(pid) not in ("", "Z", "X")


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def children_of(pid: int | str) -> dict[int, str]:
    """The children of *pid* now, each with its state: R, S, Z ..."""
    found = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = place.read_text(errors="replace").rpartition(") ")[2].split()[:2]
            if parent == str(pid):
                found[int(place.parent.name)] = state
    return found


def born_with(variable: str) -> list[int]:
    """All processes that were started with this ``NAME=value`` in their environment."""
    found, mark = [], variable.encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if mark in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return found


def kinds_of_files(pid: int) -> list[str]:
    """What a process has open, sorted: "pipe", "anon_inode", or the name of the file."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.path.basename(os.readlink(f"/proc/{pid}/fd/{name}")).partition(":")[0])
    return sorted(found)
