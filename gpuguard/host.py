"""What the machine says about processes and users besides the GPU: CPU, memory, network, terminal, groups of users.

Rates count from the previous sample, so the first sample has none.  A value that cannot be read stays unknown.  Judges
nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from gpuguard import procfs
from gpuguard.enforcement.identity import is_of_the_system
from gpuguard.model import GpuProcess, ProcessIdentity, Snapshot
from gpuguard.policies.view import HostUse, MachineUse, UserUse
from gpuguard.procfs import Stat
from gpuguard.units import Amount
from gpuguard.users import groups_of, user_name

NETWORK_SECONDS = 60.0  # after which a process in the host's network is checked again for a network of its own
MACHINE_SECONDS = 5.0  # after which all processes of the machine are read again
PAGES_SECONDS = 60.0  # within which the pages of a process are not counted again

_TERMINALS = 136  # major number of /dev/pts/0 to 255; up to 143 for those above (Linux, admin-guide/devices.txt)
_MIB = 2**20


class HostNumbers:
    """CPU and memory of the machine and of trees of processes; used by one thread at a time."""

    def __init__(self) -> None:
        self._cpu: tuple[float, float] | None = None  # busy and all seconds of the machine
        self._trees: dict[int, tuple[float, dict[ProcessIdentity, float]]] = {}  # (when, CPU seconds by process)

    def host(self) -> dict[str, float | None]:
        """``"cpu (%)"`` of the whole machine since the previous sample, ``"memory_used (MiB)"``, ..."""
        import psutil  # not above, because man pages are made from the commands where no package is installed

        times, memory = psutil.cpu_times(), psutil.virtual_memory()
        whole = sum(times[:8])  # the time of guests already counts as time of their host
        busy, before = whole - times.idle - times.iowait, self._cpu
        self._cpu = busy, whole
        return {
            "cpu (%)": 100 * (busy - before[0]) / (whole - before[1]) if before and whole > before[1] else None,
            "memory_used (MiB)": (memory.total - memory.available) / _MIB,
            "memory_available (MiB)": memory.available / _MIB,
            "load_1m": os.getloadavg()[0],
        }

    def tree(self, pid: int, members: Mapping[int, Stat]) -> dict[str, float | None]:
        """What a process and its descendants use together; *members* are those of them that live."""
        now, before = time.monotonic(), self._trees.get(pid)
        if not members:
            self._trees.pop(pid, None)
            return {}
        seconds = {(member, stat.start_time): stat.cpu_seconds for member, stat in members.items()}
        self._trees[pid] = now, seconds
        cpu = None
        if before and now > before[0]:
            # A new process counts with all that it used, one that has ended with what it used before the last sample.
            used = sum(max(0.0, spent - before[1].get(member, 0.0)) for member, spent in seconds.items())
            cpu = 100 * used / (now - before[0])
        resident = sum(stat.resident for stat in members.values())
        return {"cpu (%)": cpu, "memory_resident (MiB)": resident / _MIB, "processes": float(len(members))}


def members_of(pid: int) -> dict[int, Stat]:
    """*pid* and its descendants, without those that have ended."""
    own = procfs.stat_of(pid)
    return {**({pid: own} if own and own.lives else {}), **procfs.descendants(pid)}


class HostUses:
    """What processes and their users do.  Remembers counters between samples; used by one thread at a time."""

    def __init__(self) -> None:
        self._cpu: dict[ProcessIdentity, tuple[float, float]] = {}  # (clock, CPU seconds)
        self._network: dict[ProcessIdentity, tuple[float, int]] = {}  # (clock, bytes)
        self._in_host: dict[ProcessIdentity, float] = {}  # clock when it was seen in the host's network
        self._machine: tuple[float, MachineUse] | None = None  # clock
        self._spent: dict[ProcessIdentity, float] = {}  # CPU seconds, at that clock
        self._pages: dict[ProcessIdentity, tuple[float, int]] = {}  # (clock, bytes)

    def sample(
        self, snapshot: Snapshot, stats: Mapping[int, Stat | None] | None = None, *, debuggers: bool = False
    ) -> dict[ProcessIdentity, HostUse]:
        """What each process of *snapshot* whose identity is known does on this host.

        *stats* are those of its processes if they were read just now; *debuggers* costs a further read of each process.
        """
        identities = {(process.pid, process.start_time) for process in _processes(snapshot)}
        known = [(pid, started) for pid, started in identities if started is not None]
        stats = {pid: procfs.stat_of(pid) for pid, _ in known} if stats is None else stats
        cpu, network, uses = self._cpu, self._network, {}
        self._cpu, self._network = {}, {}
        in_host, self._in_host = self._in_host, {}
        own_network = procfs.read_link("/proc/self/ns/net")
        for pid, started in known:
            identity, clock, stat = (pid, started), snapshot.clock, stats.get(pid)
            if stat is None or stat.start_time != started:  # the pid belongs to another process by now
                continue
            self._cpu[identity] = (clock, stat.cpu_seconds)
            received = self._received(identity, clock, own_network, in_host.get(identity))
            rate = _rate(cpu.get(identity), clock, stat.cpu_seconds)
            uses[identity] = HostUse(
                cpu=None if rate is None else rate * 100,
                memory=stat.resident,
                network=None if received is None else _rate(network.get(identity), clock, received),
                terminal=_terminal(stat.terminal),
                traced=procfs.status_words(pid, b"TracerPid") not in ([], [b"0"]) if debuggers else None,
            )
        return uses

    def pause(self) -> dict[ProcessIdentity, HostUse]:
        """Read nothing, so that the next sample has no rates, like the first one."""
        self._cpu, self._network, self._in_host = {}, {}, {}
        return {}

    def _received(self, identity: ProcessIdentity, clock: float, host: str | None, asked: float | None) -> int | None:
        """Bytes that the process has moved over a network of its own so far, or None.

        *asked* is the clock when it was last seen in the network of the *host*, or None.
        """
        if asked is not None and clock - asked < NETWORK_SECONDS:
            self._in_host[identity] = asked
            return None
        pid, received = identity[0], None
        if host is not None and procfs.read_link(f"/proc/{pid}/ns/net") not in (None, host):
            with suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{pid}/net/dev", encoding="ascii", errors="replace") as lines:
                    rows = [line.partition(":") for line in lines if ":" in line]
                counts = [(name.strip(), row.split()) for name, _, row in rows]
                received = sum(int(row[0]) + int(row[8]) for name, row in counts if name != "lo")
        if received is None:
            self._in_host[identity] = clock
        else:
            self._network[identity] = (clock, received)
        return received

    def machine(self, limits: Iterable[Amount]) -> MachineUse:
        """What each user takes of the machine; memory is only counted for users who may exceed one of *limits*."""
        now = procfs.boot_clock()
        if self._machine and now - self._machine[0] < MACHINE_SECONDS:
            return self._machine[1]
        try:
            stats = procfs.processes()
        except OSError:  # no descriptor is left
            return MachineUse()
        of_user: dict[int, dict[int, Stat]] = {}
        for pid, stat in stats.items():
            uid = procfs.owner_of(pid) if stat.lives else None
            if uid is not None and not is_of_the_system(uid):
                of_user.setdefault(uid, {})[pid] = stat
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        least = min((limit.of(memory) or 0.0 for limit in limits), default=None)
        before, since = self._spent, self._machine[0] if self._machine else None
        self._spent = {(pid, stat.start_time): stat.cpu_seconds for pid, stat in stats.items()}
        self._pages = {identity: known for identity, known in self._pages.items() if identity in self._spent}
        users = {}
        for uid, own in of_user.items():
            cpu = None
            if since is not None and now > since:
                used = 0.0
                for pid, stat in own.items():
                    # A new process counts with all that it used, an older one that was not seen before with nothing.
                    begun = 0.0 if stat.start_time >= since else stat.cpu_seconds
                    used += max(0.0, stat.cpu_seconds - before.get((pid, stat.start_time), begun))
                cpu = 100 * used / (now - since)
            may_exceed = least is not None and sum(stat.resident for stat in own.values()) > least
            users[uid] = UserUse(user_name(uid), cpu, self._memory_of(own, now) if may_exceed else None)
        use = MachineUse(memory, os.cpu_count(), users)
        self._machine = now, use
        return use

    def _memory_of(self, own: Mapping[int, Stat], now: float) -> int | None:
        """Bytes that the processes of one user have in memory, or None.  Only readable ones count: never too much."""
        known = []
        for pid, stat in own.items():
            identity = pid, stat.start_time
            counted = self._pages.get(identity)
            if counted is None or now - counted[0] > PAGES_SECONDS:
                pages = procfs.own_memory(pid)
                if pages is not None and procfs.start_time(pid) == stat.start_time:
                    counted = self._pages[identity] = now, pages
            if counted is not None:
                known.append(min(counted[1], stat.resident))
        # The pages of a large process may take too long to count, or be hidden from us.  It has its RssAnon at least.
        largest = procfs.status_words(max(own, key=lambda pid: own[pid].resident), b"RssAnon")
        alone = int(largest[0]) * 1024 if largest and largest[0].isdigit() else 0
        return max(sum(known), alone) or None


def groups_of_users(snapshot: Snapshot) -> dict[int, frozenset[str]]:
    """uid -> the groups of the users in *snapshot*, without those that no service told in time."""
    uids = {process.uid for process in _processes(snapshot)} | {record.uid for record in snapshot.claims}
    known = {uid: groups_of(uid) for uid in uids if uid is not None and uid >= 0}
    return {uid: frozenset(names.values()) for uid, names in known.items() if names is not None}


def _processes(snapshot: Snapshot) -> Iterable[GpuProcess]:
    return (process for device in snapshot.devices for process in device.processes or ())


def _terminal(device: int) -> str:
    """The controlling terminal, or "" if there is none, as for a batch job."""
    if not device:
        return ""
    major, minor = os.major(device), os.minor(device)
    if _TERMINALS <= major < _TERMINALS + 8:
        return f"/dev/pts/{(major - _TERMINALS) * 256 + minor}"
    return f"/dev/char/{major}:{minor}"  # a console or a serial line


def _rate(before: tuple[float, float] | None, clock: float, count: float) -> float | None:
    if before is None or clock <= before[0] or count < before[1]:
        return None
    return (count - before[1]) / (clock - before[0])
