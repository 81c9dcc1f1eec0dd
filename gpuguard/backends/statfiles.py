"""/proc/PID/stat of processes that are looked at again and again, kept open: to read it anew takes half as long.

An open one stands for that one process for ever: when it has ended, reading says so, whoever has its pid by then.
Who looks once keeps nothing open.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuguard.backends.processes import life_in, read_proc

if TYPE_CHECKING:
    from gpuguard.backends.processes import Life

MOST = 256  # files, and no more than a quarter of those that this process may have open
_LONGEST = 4096  # bytes


class StatFiles:
    """Those of one backend, from one sample to the next."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, Life | None]] = {}  # by pid: descriptor, and what was read from it last
        self.lines: dict[int, bytes] = {}  # that were read for the sample that is under way, by pid
        self._before = self.lines  # and for the one before it
        self._most = min(MOST, os.sysconf("SC_OPEN_MAX") // 4)

    def turn(self) -> None:
        """A new sample begins: whoever the one before it did not read is forgotten."""
        self._before, self.lines = self.lines, {}
        for pid in self._open.keys() - self._before.keys():
            os.close(self._open.pop(pid)[0])

    def life(self, pid: int) -> Life | None:
        """Who *pid* is now, as life_of() says; None: gone or hidden."""
        known, line = self._open.get(pid) or self._opened(pid), None
        if known:
            try:
                line = os.pread(known[0], _LONGEST, 0)
            except OSError:  # it has ended, and another process may have its pid
                os.close(self._open.pop(pid)[0])
                known = None
        if not known:
            line = read_proc(f"/proc/{pid}/stat")
        if line is None:
            self.lines.pop(pid, None)
            return None
        self.lines[pid] = line
        life = life_in(line, known and known[1])
        if known and life is not known[1]:
            self._open[pid] = known[0], life
        return life

    def _opened(self, pid: int) -> tuple[int, Life | None] | None:
        if pid in self._before and len(self._open) < self._most:
            try:
                self._open[pid] = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC), None
            except OSError:
                return None
        return self._open.get(pid)

    def close(self) -> None:
        """Keep none open."""
        self.lines = {}
        self.turn()

    __del__ = close
