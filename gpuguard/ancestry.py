"""What /proc tells everybody about the processes of a snapshot and of its claims: parent, state, inner pid."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.backends.processes import PARENT, START, STATE, alive, read_proc
from gpuguard.model import Seen, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Stat = list[bytes]  # the fields of /proc/PID/stat behind the name

_TICKS = os.sysconf("SC_CLK_TCK")
# Most processes are in the same state at the next look, and to make a noun takes four times as long as to find it.
_nouns: dict[tuple[bytes, bytes, bytes], Seen] = {}
_FEW = 64  # of ended processes, that may be kept on any machine
_STATES = 4  # of one process, that are kept: it runs, sleeps, and waits for a disk
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h: a constant of the kernel


def in_first_pid_namespace() -> bool | None:
    """Whether our pids are the machine's; None when that cannot be told."""
    try:
        return os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return None


def stats_of(pids: Iterable[int], lines: Mapping[int, bytes] | None = None) -> dict[int, Stat | None]:
    """/proc/PID/stat of each of *pids*, read unless it is one of *lines*; None where it cannot be read."""
    return {pid: _fields(lines[pid]) if lines and pid in lines else _stat(pid) for pid in pids}


def look_up(
    snapshot: Snapshot, stats: dict[int, Stat | None] | None = None, *, ancestors: bool = True
) -> dict[int, Seen | None]:
    """All processes of *snapshot* and of its claims, with their *ancestors*.

    None is "there is no such process".  A pid is left out where its absence proves nothing: /proc is mounted with
    hidepid, we are in a pid namespace of our own, or the pid is one that a container gave.

    Args:
        snapshot: with its claims.
        stats: of processes that were read just now, so that nobody reads them twice.
        ancestors: whether they are looked up, too; where there are no claims nobody needs them.
    """
    if snapshot.recorded:
        return {}  # whoever has these pids here and now is somebody else
    read = stats or {}
    pids = {process.pid for device in snapshot.devices for process in device.processes or ()}
    pids.update(pid for record in snapshot.claims for pid in (*record.holders, record.pid) if pid is not None)
    people = {pid for record in snapshot.claims for pid in record.holders or (record.pid,)}
    seen: dict[int, Seen | None] = {}
    todo = list(pids)
    while todo:
        pid = todo.pop()
        if pid not in seen and pid > 0:
            stat = read[pid] if pid in read else _stat(pid)
            seen[pid] = process = _look(pid, stat, closely=pid in people)
            if process and ancestors:
                todo.append(process.parent)
    if len(_nouns) > _STATES * len(seen) + _FEW:
        _nouns.clear()  # most are of processes that have ended
    gone = {pid for pid, process in seen.items() if process is None}
    uncertain = {pid for pid in gone if not in_first_pid_namespace() or alive(pid)}
    owners = {(record.uid, record.pid) for record in snapshot.claims if record.pid in gone - uncertain}
    if owners:
        uncertain.update(pid for uid, pid in owners & _inner_pids() if pid)
    return {pid: process for pid, process in seen.items() if pid not in uncertain}


def _stat(pid: int) -> Stat | None:
    line = read_proc(f"/proc/{pid}/stat")
    return None if line is None else _fields(line)


def _fields(line: bytes) -> Stat:
    # The name in front may contain blanks and brackets: fields are counted from behind it.
    return line.rpartition(b") ")[2].split(None, 24)


def _look(pid: int, stat: Stat | None, closely: bool) -> Seen | None:
    try:
        if stat is None:
            return None
        if not closely:
            return _made(stat[STATE], stat[PARENT], stat[START])
        uid, inner = _status(pid) or (None, None)
        return replace(_made(stat[STATE], stat[PARENT], stat[START]), inner_pid=inner, uid=uid)
    except (IndexError, ValueError):
        return None


def _made(state: bytes, parent: bytes, start: bytes) -> Seen:
    key = state, parent, start
    found = _nouns.get(key)
    if found is None:
        found = _nouns[key] = Seen(int(parent), state.decode(), int(start) / _TICKS)
    return found


def _inner_pids() -> set[tuple[int, int | None]]:
    """(uid, pid in its own namespace) of every process of the machine that lives in another namespace than ours."""
    found = (_status(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return {one for one in found if one and one[1] is not None}


def _status(pid: int) -> tuple[int, int | None] | None:
    """(uid, innermost pid), the latter None for a process of our own namespace."""
    # In front of the pids stand all groups of the user.
    status = read_proc(f"/proc/{pid}/status", 65536) or b""
    try:
        uids, pids = (status.partition(name)[2].partition(b"\n")[0].split() for name in (b"\nUid:", b"\nNSpid:"))
        return int(uids[0]), int(pids[-1]) if len(pids) > 1 else None
    except (IndexError, ValueError):
        return None
