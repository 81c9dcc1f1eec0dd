"""/proc/PID/stat of processes that are looked at again and again, kept open: to read it anew takes half as long.

An open one stands for that one process for ever: when it has ended, reading says so, whoever has its pid by then.
Who looks once keeps nothing open.
"""

from __future__ import annotations

import os

from gpuguard.backends.processes import read_proc

MOST = 256  # files, and no more than a quarter of those that this process may have open
_LONGEST = 4096  # bytes


class StatFiles:
    """Those of one backend, from one sample to the next."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # pid -> descriptor
        self.lines: dict[int, bytes] = {}  # that were read for the sample that is under way, by pid
        self._before = self.lines  # and for the one before it
        self._most = min(MOST, os.sysconf("SC_OPEN_MAX") // 4)

    def turn(self) -> None:
        """A new sample begins: whoever the one before it did not read is forgotten."""
        self._before, self.lines = self.lines, {}
        for pid in self._open.keys() - self._before.keys():
            os.close(self._open.pop(pid))

    def read(self, pid: int) -> bytes | None:
        """The line of *pid* as it is now; None: gone or hidden."""
        line = self._line(pid)
        if line is None:
            self.lines.pop(pid, None)
        else:
            self.lines[pid] = line
        return line

    def _line(self, pid: int) -> bytes | None:
        path = f"/proc/{pid}/stat"
        try:
            if pid in self._open:
                return os.pread(self._open[pid], _LONGEST, 0)
            if pid in self._before and len(self._open) < self._most:
                self._open[pid] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                return os.pread(self._open[pid], _LONGEST, 0)
        except OSError:  # it has ended, and another process may have its pid
            if pid in self._open:
                os.close(self._open.pop(pid))
        return read_proc(path)

    def close(self) -> None:
        """Keep none open."""
        self.lines = {}
        self.turn()

    __del__ = close
