"""Numbers of this host and of families of processes, from /proc: CPU, memory.  What cannot be read stays unknown."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

from gpuguard.backends.processes import START, STATE, read_proc, stat_fields

_UTIME, _STIME, _RSS = 11, 12, 21  # further words of stat_fields()
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 2**20


class HostNumbers:
    """Remembers counters from one look to the next, because CPU is a rate; used by one thread at a time."""

    def __init__(self) -> None:
        self._cpu: tuple[float, float] | None = None  # busy and all jiffies of the machine
        self._families: dict[int, tuple[float, dict[tuple[int, int], float]]] = {}  # when; CPU seconds by process

    def host(self) -> dict[str, float | None]:
        """``"cpu (%)"`` of the whole machine since the look before, ``"memory_used (MiB)"``, ..."""
        numbers: dict[str, float | None] = {"cpu (%)": None}
        words = (read_proc("/proc/stat") or b"").split(b"\n", 1)[0].split()[1:9]
        if len(words) == 8:
            jiffies = [float(word) for word in words]
            busy, whole = sum(jiffies) - jiffies[3] - jiffies[4], sum(jiffies)
            if self._cpu and whole > self._cpu[1]:
                numbers["cpu (%)"] = 100 * (busy - self._cpu[0]) / (whole - self._cpu[1])
            self._cpu = busy, whole
        lines = (line.split() for line in (read_proc("/proc/meminfo") or b"").splitlines())
        memory = {words[0]: float(words[1]) / 1024 for words in lines if len(words) > 1}
        total, available = memory.get(b"MemTotal:"), memory.get(b"MemAvailable:")
        if total is not None and available is not None:
            numbers |= {"memory_used (MiB)": total - available, "memory_available (MiB)": available}
        load = (read_proc("/proc/loadavg") or b"").split()
        numbers["load_1m"] = float(load[0]) if load else None
        return numbers

    def family(self, pid: int, members: Iterable[int]) -> dict[str, float | None]:
        """What a process and its descendants use together.

        Args:
            pid: of the process.
            members: of the family, with itself.
        """
        now, seconds, resident, count = time.monotonic(), {}, 0, 0
        for member in members:
            try:
                fields = stat_fields(member)
                user, system, start, pages = (int(fields[place]) for place in (_UTIME, _STIME, START, _RSS))
            except (OSError, IndexError, ValueError):  # it has ended; or this is no kernel's
                continue
            if fields[STATE] not in (b"Z", b"X"):
                seconds[member, start] = (user + system) / _TICKS
                resident, count = resident + pages * _PAGE, count + 1
        if not count:
            self._families.pop(pid, None)
            return {}
        before = self._families.get(pid)
        self._families[pid] = now, seconds
        cpu = None
        if before and now > before[0]:
            # Of a process that is new, all; of one that has ended, what it did before the last look.
            used = sum(max(0.0, spent - before[1].get(one, 0.0)) for one, spent in seconds.items())
            cpu = 100 * used / (now - before[0])
        return {"cpu (%)": cpu, "memory_resident (MiB)": resident / _MIB, "processes": float(count)}


def family_of(pid: int) -> frozenset[int]:
    """*pid* and its living descendants."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += _children(one)
    return frozenset(found)


def _children(pid: int) -> Iterator[int]:
    """The children of all threads of a process.  None where the kernel has no such files (CONFIG_PROC_CHILDREN)."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        yield from map(int, (read_proc(f"/proc/{pid}/task/{thread}/children", 2**16) or b"").split())
