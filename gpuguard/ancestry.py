"""What /proc tells everybody about the processes of a snapshot and of its claims: parent, state, inner pid."""

from __future__ import annotations

import os

from gpuguard.attribution import Seen
from gpuguard.backends.processes import alive
from gpuguard.model import Snapshot

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h: a constant of the kernel


def in_first_pid_namespace() -> bool | None:
    """Whether our pids are the machine's; None when that cannot be told."""
    try:
        return os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return None


def look_up(snapshot: Snapshot) -> dict[int, Seen | None]:
    """All processes of *snapshot* and of its claims, with their ancestors.

    None is "there is no such process".  A pid is left out where its absence proves nothing: /proc is mounted with
    hidepid, we are in a pid namespace of our own, or the pid is one that a container gave.
    """
    pids = {process.pid for device in snapshot.devices for process in device.processes or ()}
    pids.update(pid for record in snapshot.claims for pid in (*record.holders, record.pid) if pid is not None)
    holders = {pid for record in snapshot.claims for pid in record.holders}
    seen: dict[int, Seen | None] = {}
    todo = list(pids)
    while todo:
        pid = todo.pop()
        if pid not in seen and pid > 0:
            seen[pid] = process = _look(pid, inner=pid in holders)
            if process:
                todo.append(process.parent)
    gone = {pid for pid, process in seen.items() if process is None}
    uncertain = {pid for pid in gone if not in_first_pid_namespace() or alive(pid)}
    owners = {(record.uid, record.pid) for record in snapshot.claims if record.pid in gone - uncertain}
    if owners:
        uncertain.update(pid for uid, pid in owners & _inner_pids() if pid)
    return {pid: process for pid, process in seen.items() if pid not in uncertain}


def _look(pid: int, inner: bool) -> Seen | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name in front may contain blanks and brackets; fields are counted from behind it.
            fields = stat.read().rpartition(b") ")[2].split()
        state, parent, start_time = fields[0].decode(), int(fields[1]), int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
    own = _status(pid) if inner else None
    return Seen(parent, state, start_time, own[1] if own else None)


def _inner_pids() -> set[tuple[int, int | None]]:
    """(uid, pid in its own namespace) of every process of the machine that lives in another namespace than ours."""
    found = (_status(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return {one for one in found if one and one[1] is not None}


def _status(pid: int) -> tuple[int, int | None] | None:
    """(uid, innermost pid), the latter None for a process of our own namespace."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            lines = dict(line.split(b":", 1) for line in status if line.startswith((b"Uid:", b"NSpid:")))
        pids = lines.get(b"NSpid", b"").split()
        return int(lines[b"Uid"].split()[0]), int(pids[-1]) if len(pids) > 1 else None
    except (OSError, KeyError, IndexError, ValueError):
        return None
