"""Processes that did not start here, and those that they start: who belongs to a job, until the last one has ended.

A process is named by a pidfd, so a pid that is used again is somebody else.  Nothing wakes us while nobody ends.  When
one ends /proc is read once more: what living members have started since belongs to them too, and so does everybody in a
process group or session that a member leads, even if its parent is gone.  A grandchild that left both and whose parents
ended while nobody looked is missed.
"""

from __future__ import annotations

import os
import resource
import select
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.backends.processes import GROUP, PARENT, SESSION, START, STATE, stat_fields
from gpuguard.errors import GpuguardError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Kin:
    """Where a process stands, from /proc/PID/stat."""

    parent: int
    group: int
    session: int
    started: int  # clock ticks since boot


class Family:
    """Living processes, each with its start time: ``members``.

    Args:
        pids: the first of them.
        tree: whether what they start belongs to them.

    Raises:
        GpuguardError: one of them does not exist (any more).
    """

    def __init__(self, pids: Iterable[int], *, tree: bool) -> None:
        self.tree = tree
        self.members: dict[int, int] = {}
        self._pids: dict[int, int] = {}  # pidfd -> pid
        self._led: dict[int, int] = {}  # process groups and sessions that a member leads -> when its leader started
        self._poll = select.poll()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # one descriptor per process
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for pid in pids:
            if not self._join(pid):
                self.close()
                raise GpuguardError(f"there is no process {pid}, or it has ended.")
        self.grow()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The pidfds."""
        return tuple(self._pids)

    def grow(self) -> None:
        """Find who belongs to the family by now."""
        while self.tree:
            everybody = processes()
            living = {number for kin in everybody.values() for number in (kin.group, kin.session)}
            self._led = {leader: started for leader, started in self._led.items() if leader in living}
            found = [pid for pid, kin in everybody.items() if pid not in self.members and self._is_ours(kin)]
            # Once more after each: a child may have had a child before its pidfd was open.
            if not [pid for pid in found if self._join(pid, everybody[pid].started)]:
                return

    def wait(self, also: int) -> bool:
        """Sleep until members have ended, forget them and look who belongs to the others.

        Args:
            also: a descriptor that ends the sleep when it can be read.

        Returns:
            Whether anybody is left; True when *also* ended the sleep.
        """
        self._poll.register(also, select.POLLIN)
        ready = [descriptor for descriptor, _ in self._poll.poll()] if self._pids else []
        self._poll.unregister(also)
        self._forget(descriptor for descriptor in ready if descriptor != also)
        self.grow()
        return bool(self.members)

    def refresh(self) -> None:
        """Forget who has ended and find who has come, without waiting."""
        self._forget(descriptor for descriptor, _ in self._poll.poll(0))
        self.grow()

    def close(self) -> None:
        """Forget them."""
        for descriptor in self._pids:
            os.close(descriptor)
        self._pids, self.members, self._poll = {}, {}, select.poll()

    def _forget(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            self._poll.unregister(descriptor)
            del self.members[self._pids.pop(descriptor)]
            os.close(descriptor)

    def _is_ours(self, kin: Kin) -> bool:
        if kin.parent in self.members:
            return True
        return any(kin.started >= self._led.get(number, kin.started + 1) for number in (kin.group, kin.session))

    def _join(self, pid: int, started: int | None = None) -> bool:
        if pid == os.getpid():  # in the tree of the shell that called us: we would wait for ourselves
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return False
        kin = kin_of(pid)  # read behind the pidfd: it is the one that the pidfd means
        if kin is None or started not in (None, kin.started):
            os.close(pidfd)
            return False
        self.members[pid], self._pids[pidfd] = kin.started, pid
        self._poll.register(pidfd, select.POLLIN)
        if pid in (kin.group, kin.session):
            self._led[pid] = kin.started
        return True


def processes() -> dict[int, Kin]:
    """All living processes."""
    found = ((int(name), kin_of(int(name))) for name in os.listdir("/proc") if name.isdecimal())
    return {pid: kin for pid, kin in found if kin}


def kin_of(pid: int) -> Kin | None:
    """Where a process stands; None: it has ended, or cannot be seen."""
    try:
        fields = stat_fields(pid)
        if fields[STATE] in (b"Z", b"X"):
            return None
        return Kin(*(int(fields[place]) for place in (PARENT, GROUP, SESSION, START)))
    except (OSError, IndexError, ValueError):
        return None
