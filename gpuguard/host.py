"""Numbers of this host and of families of processes, from /proc: CPU, memory.  What cannot be read stays unknown."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from gpuguard.model import GpuProcess, Snapshot
from gpuguard.policies.view import HostUse
from gpuguard.procfs import START, STATE, Stat, read_proc, stat_fields, stats_of

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


# What the machine says of processes and people beside the GPU: CPU, memory, network, terminal, groups of users.
#
# Rates are since the look before, so the first look knows none.  What cannot be read stays unknown.  Judges nothing.


GROUPS_SECONDS = 600.0  # after which a user's groups are asked for again
NETWORK_SECONDS = 60.0  # after which a process in the host's network is asked again whether it has one of its own
ANSWER_SECONDS = 1.0  # a directory service that needs longer is heard at the next look

_TERMINALS = 136  # major number of /dev/pts/0 to 255; up to 143 for those above (Linux, admin-guide/devices.txt)

Identity = tuple[int, float]  # pid, start time


class HostUses:
    """Remembers counters from one look to the next; used by one thread at a time."""

    def __init__(self) -> None:
        self._cpu: dict[Identity, tuple[float, float]] = {}  # (clock, CPU seconds)
        self._network: dict[Identity, tuple[float, int]] = {}  # (clock, bytes)
        self._in_host: dict[Identity, float] = {}  # in the host's network when the clock was so
        self._groups: dict[int, frozenset[str]] = {}
        self._asked: dict[int, float] = {}  # clock
        self._asking: set[int] = set()

    def look(self, snapshot: Snapshot, stats: Mapping[int, Stat | None] | None = None) -> dict[Identity, HostUse]:
        """What each process of *snapshot* whose identity is known does on this host.

        Args:
            snapshot: of now.
            stats: of its processes, where they were read just now.
        """
        known = {
            (process.pid, process.start_time): process
            for process in _processes(snapshot)
            if process.start_time is not None
        }
        stats = stats_of({pid for pid, _ in known}) if stats is None else stats
        cpu, network, found = self._cpu, self._network, {}
        self._cpu, self._network = {}, {}
        in_host, self._in_host = self._in_host, {}
        own_network = _network_namespace("self")
        for identity in known:
            clock, seen = snapshot.clock, _used(stats.get(identity[0]), identity[1])
            if seen is None:
                continue
            seconds, resident, terminal = seen
            self._cpu[identity] = (clock, seconds)
            received = self._received(identity, clock, own_network, in_host.get(identity))
            rate = _rate(cpu.get(identity), clock, seconds)
            found[identity] = HostUse(
                cpu=None if rate is None else rate * 100,
                memory=resident,
                network=None if received is None else _rate(network.get(identity), clock, received),
                terminal=terminal,
            )
        return found

    def rest(self) -> dict[Identity, HostUse]:
        """Nobody wants to know: nothing is told, and the next look knows no rates, as the first."""
        self._cpu, self._network, self._in_host = {}, {}, {}
        return {}

    def _received(self, identity: Identity, clock: float, host: str | None, asked: float | None) -> int | None:
        """Bytes so far over a network of its own; at *asked* the process had none."""
        if asked is not None and clock - asked < NETWORK_SECONDS:
            self._in_host[identity] = asked
            return None
        received = _own_network_bytes(identity[0], host)
        if received is None:
            self._in_host[identity] = clock
        else:
            self._network[identity] = (clock, received)
        return received

    def groups(self, snapshot: Snapshot) -> dict[int, frozenset[str]]:
        """The groups of everybody in *snapshot*, as far as they were told in time."""
        uids = {process.uid for process in _processes(snapshot)} | {record.uid for record in snapshot.claims}
        again = False
        for uid in uids - {None}:
            assert uid is not None
            asked = self._asked.get(uid)
            if uid < 0 or uid in self._asking or (asked is not None and snapshot.clock - asked <= GROUPS_SECONDS):
                continue
            # One a look: a service that does not know them may need long for it, and rootless containers have many.
            if asked is None or not again:
                again = again or asked is not None
                self._ask(uid, snapshot.clock)
        return dict(tuple(self._groups.items()))

    def _ask(self, uid: int, clock: float) -> None:
        def answer() -> None:
            try:
                names = _group_names(uid)
                if names is not None:
                    self._groups[uid] = names
            finally:
                self._asking.discard(uid)

        self._asking.add(uid)
        thread = threading.Thread(target=answer, name=f"groups of {uid}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many: the next look tries again
            self._asking.discard(uid)
            return
        self._asked[uid] = clock
        thread.join(ANSWER_SECONDS)


def _processes(snapshot: Snapshot) -> Iterable[GpuProcess]:
    return (process for device in snapshot.devices for process in device.processes or ())


def _used(stat: Stat | None, start_time: float) -> tuple[float, int, str] | None:
    """(CPU seconds, bytes resident, terminal) of exactly the process that started then."""
    try:
        if stat is None or int(stat[19]) / _TICKS != start_time:
            return None
        return (int(stat[11]) + int(stat[12])) / _TICKS, int(stat[21]) * _PAGE, _terminal(int(stat[4]))
    except (IndexError, ValueError):
        return None


def _terminal(device: int) -> str:
    """The controlling terminal; "" when there is none, as for a batch job."""
    if not device:
        return ""
    major, minor = os.major(device), os.minor(device)
    if _TERMINALS <= major < _TERMINALS + 8:
        return f"/dev/pts/{(major - _TERMINALS) * 256 + minor}"
    return f"/dev/char/{major}:{minor}"  # a console or a serial line


def _network_namespace(pid: int | str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _own_network_bytes(pid: int, host: str | None) -> int | None:
    """Bytes over the network namespace of a process; None for the *host*'s, where they are everybody's."""
    if host is None or _network_namespace(pid) in (None, host):
        return None
    try:
        with open(f"/proc/{pid}/net/dev", encoding="ascii", errors="replace") as lines:
            rows = [line.partition(":") for line in lines if ":" in line]
        counts = [(name.strip(), row.split()) for name, _, row in rows]
        return sum(int(row[0]) + int(row[8]) for name, row in counts if name != "lo")
    except (OSError, IndexError, ValueError):
        return None


def _rate(before: tuple[float, float] | None, clock: float, count: float) -> float | None:
    if before is None or clock <= before[0] or count < before[1]:
        return None
    return (count - before[1]) / (clock - before[0])


def _group_names(uid: int) -> frozenset[str] | None:
    import grp
    import pwd

    try:
        user = pwd.getpwuid(uid)
        numbers = os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return None
    names = set()
    for number in numbers:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:
            names.add(str(number))
    return frozenset(names)
