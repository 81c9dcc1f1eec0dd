"""A machine of many users, on which things happen between the looks of a guard that is real down to the system call.

What the guard reads is pretended: /proc, lists of the driver, claims, pidfds and clocks.  What judges it is real:
whether a list is plausible, how old claims are, rules, engine, watchdog, actions, preflight and identity.

    machine = Machinery(dice); machine.start(...); machine.claim(...)
    with pretended(machine, place): guard.step()         machine.hits: who got which signal
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_snapshot, a_uuid, written

from gpuguard import procfs, source, users, watchdog
from gpuguard.backends import plausibility
from gpuguard.claims.directory import LockDirectory
from gpuguard.enforcement import actions, identity, preflight
from gpuguard.enforcement.identity import DriverNodes, ProcessFacts
from gpuguard.errors import ClaimError, DriverUnresponsive
from gpuguard.model import ClaimRecord, Device, Event, Gap, GpuProcess, ProcessStat, Snapshot
from gpuguard.procfs import Stat

INNOCENT, CULPRIT, UNCLEAR = "innocent", "culprit", "unclear"  # unclear: nothing is said of them, either way
HARMLESS = (0, signal.SIGCONT)
BOOTED = 1_700_000_000.0  # unix time
PEOPLE = {31000 + number: f"user{number:02}" for number in range(90)}
SEATED, OTHERS = sorted(PEOPLE)[:5], sorted(PEOPLE)[5:]  # who sits in front of the machine, and all others
NAMELESS = 41000  # and the next hundred
SUBUIDS = {uid: 900_000 + 100 * (uid - 31000) for uid in PEOPLE}  # the first of a hundred that root gave to each
FIRST_PID, LARGEST_PID = 3_000_000, 2**22


@dataclass(eq=False)
class Actor:
    """A process, and whether the guard may hit it."""

    pid: int
    start_time: float
    uid: int  # as the kernel has it
    role: str
    scene: str
    rows: dict[int, tuple[str, int]] = field(default_factory=dict)  # index of a device -> kind, bytes
    survives: frozenset[int] = frozenset()  # signals
    facts: dict[str, Any] = field(default_factory=dict)  # of ProcessFacts, where they are not those of any job
    container: str | None = None
    signals: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Board:
    """A device, and what its sensors and its driver say of it."""

    index: int
    utilization: float = 80.0
    temperature: float = 60.0
    phantoms: list[tuple[int, str, int]] = field(default_factory=list)  # rows without a process of their own
    garbage: list[tuple[int, str, int]] = field(default_factory=list)  # that condemn the list
    exact: bool = False  # whether no chance may meddle with it
    ended: set[int] = field(default_factory=set)  # pids that were listed without a process


class Machinery:
    """The backend, the claims, /proc and the kernel of one scenario."""

    name, simulated = "machinery", False

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.clock, self.awake = dice, 500_000.0, 500_000.0
        self.boards: list[Board] = []
        self.living: dict[int, Actor] = {}
        self.all: list[Actor] = []
        self.claims: list[ClaimRecord] = []
        self.claims_are, self.silent = "there", False
        self.hits: list[tuple[Actor, int]] = []
        self.held: dict[int, Actor] = {}  # by pidfd
        self.moments: dict[tuple[str, int], Callable[[], None]] = {}  # (moment, pid) -> what happens then
        self.groups: dict[int, frozenset[str]] = {}
        self.events = Counter[str]()
        self._pids = FIRST_PID
        self._uids, self._seated = iter(dice.sample(OTHERS, len(OTHERS))), iter(SEATED)

    # What scenes build.

    def user(self, *groups: str, seated: bool = False) -> int:
        """One who is in no other scene; with *seated* a person in front of the machine."""
        uid = next(self._seated if seated else self._uids)
        self.groups[uid] = frozenset(groups)
        return uid

    def board(self, **fields: Any) -> Board:
        board = Board(len(self.boards), **fields)
        self.boards.append(board)
        return board

    def start(
        self, uid: int, role: str, scene: str, rows: dict[Board, tuple[str, int]] | None = None,
        *, age: float | None = None, pid: int | None = None, **fields: Any,
    ) -> Actor:  # fmt: skip
        """A process that begins now, or *age* seconds ago."""
        if pid is None:
            self._pids += 1
            pid = self._pids
        began = round(self.clock - (0.5 if age is None else age), 2)
        own = {board.index: row for board, row in (rows or {}).items()}
        actor = Actor(pid, began, uid, role, scene, own, **fields)
        self.living[pid] = actor
        self.all.append(actor)
        return actor

    def end(self, actor: Actor) -> None:
        if self.living.get(actor.pid) is actor:
            del self.living[actor.pid]

    def claim(self, uid: int, *boards: Board, holders: Collection[Actor] = (), age: float = 0.0, **fields: Any) -> None:
        """A claim that was made *age* seconds ago, whatever its record says of that."""
        made = BOOTED + self.clock - age
        pids = tuple(actor.pid for actor in holders)
        facts = {"since": made, "written": made, "pid": None, "user": users.user_name(uid), **fields}
        name = fields.get("id", f"c{len(self.claims)}")
        uuids = [a_uuid(board.index) for board in boards]
        self.claims.append(a_claim_record(*uuids, uid=uid, holders=pids, **{**facts, "id": name}))

    # What happens.

    def wait(self, seconds: float, *, asleep: bool = False) -> None:
        self.clock += seconds
        self.awake += 10.0 if asleep else seconds

    def _happens(self, moment: str, pid: int) -> None:
        if (event := self.moments.pop((moment, pid), None)) is not None:
            event()

    # The driver.

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        if self.silent and devices is None:
            raise DriverUnresponsive("a driver call did not come back.")
        self.clock += 0.001
        self.awake += 0.001
        if devices is not None:
            for actor in list(self.held.values()):
                self._happens("asked", actor.pid)
        shown = [self._device(board) for board in self.boards if devices is None or a_uuid(board.index) in devices]
        gaps = [Gap(device.uuid, "processes", "implausible list") for device in shown if not device.processes_plausible]
        return replace(
            a_snapshot(a_device(), clock=self.clock, taken_at=BOOTED + self.clock, gaps=tuple(gaps)),
            devices=tuple(shown),
            backend="nvml",
        )

    def close(self) -> None:
        pass

    def _device(self, board: Board) -> Device:
        own = [(actor.pid, *actor.rows[board.index]) for actor in self.all if self._is_listed(actor, board)]
        listed = [*own, *board.phantoms, *board.garbage]
        used = min(79 * GIB, sum(memory for _, _, memory in own) + sum(memory for _, _, memory in board.phantoms))
        reason = plausibility.implausibility(
            [(pid, memory) for pid, _, memory in listed],
            alive=self.living.__contains__,
            pid_max=LARGEST_PID,
            own_pids=True,
            memory_total=80 * GIB,
            memory_used=used,
        )
        pids = {pid for pid, _, _ in listed}
        if reason is None:
            board.ended = pids & (board.ended | {pid for pid in pids if pid not in self.living})
        rows = tuple(
            self._row(GpuProcess(pid, memory, kind), board) if reason is None else GpuProcess(pid, memory, kind)
            for pid, kind, memory in listed
        )
        return a_device(
            board.index, processes=rows, processes_plausible=reason is None, memory_used=used + 4 * 2**20,
            utilization=board.utilization, temperature=board.temperature,
        )  # fmt: skip

    def _is_listed(self, actor: Actor, board: Board) -> bool:
        return board.index in actor.rows and self.living.get(actor.pid) is actor

    def _row(self, row: GpuProcess, board: Board) -> GpuProcess:
        if row.pid in board.ended:
            return replace(row, ended=True)
        actor = self.living[row.pid]
        uid = users.certain_owner(actor.uid)
        return replace(
            row, start_time=actor.start_time, uid=uid, user=users.user_name(uid), command=("python", "train.py"),
            executable=actor.facts.get("executable", "/usr/bin/python3.11"), container=actor.container,
        )  # fmt: skip

    # The claims.

    def join(self, snapshot: Snapshot, *_: object) -> Snapshot:
        return source.with_claims(snapshot, lambda: LockDirectory("", "", ""), self.read_claims)

    def read_claims(self, *_: object) -> tuple[ClaimRecord, ...]:
        if self.claims_are == "unreadable":
            raise ClaimError("broken")
        held = tuple(replace(claim, holders=self._living(claim)) for claim in self.claims)
        return held if self.claims_are == "there" else ()

    def _living(self, claim: ClaimRecord) -> tuple[int, ...]:
        return tuple(pid for pid in claim.holders if pid in self.living)

    # The kernel.

    def stat_of(self, pid: int) -> Stat | None:
        if (actor := self.living.get(pid)) is None:
            return None
        return Stat(b"%d (python" % pid, "S", 1, pid, pid, 0, self.awake / 2, actor.start_time, GIB, None)

    def process_facts(self, snapshot: Snapshot, *_: object, **__: object) -> dict[int, ProcessStat | None]:
        pids = {process.pid for device in snapshot.devices for process in device.processes or ()}
        pids |= {pid for claim in snapshot.claims for pid in claim.holders}
        stats = {pid: self.stat_of(pid) for pid in pids}
        owners = {pid: users.certain_owner(self.living[pid].uid) for pid in pids if pid in self.living}
        return {
            pid: stat and ProcessStat(stat.parent, "S", stat.start_time, uid=owners.get(pid))
            for pid, stat in stats.items()
        }

    def facts_of(self, pid: int, drivers: DriverNodes = ()) -> ProcessFacts | None:
        actor, found = self.living.get(pid), None
        if actor is not None:
            facts: dict[str, Any] = {
                "group": pid, "terminal": 0, "tracer": 0, "caught": 0,
                "executable": "/usr/bin/python3.11", "executable_owner": 0, "command": "python train.py",
                "uses_driver": bool(actor.rows), "cgroup": f"0::/job{pid}", **actor.facts,
            }  # fmt: skip
            uids = (users.certain_owner(actor.uid),) * 4
            found = ProcessFacts(start_time=actor.start_time, uids=uids, **facts)
        self._happens("read", pid)
        return found

    def open_pidfd(self, pid: int, flags: int = 0) -> int:
        self._happens("before", pid)
        if (actor := self.living.get(pid)) is None:
            raise ProcessLookupError
        descriptor = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self.held = {descriptor: actor}  # the guard holds one at a time
        self._happens("held", pid)
        return descriptor

    def has_ended(self, pidfd: int) -> bool:
        actor = self.held[pidfd]
        return self.living.get(actor.pid) is not actor

    def is_alive(self, process: tuple[int, float]) -> bool:
        actor = self.living.get(process[0])
        return actor is not None and actor.start_time == process[1]

    def send(self, pidfd: int, number: int) -> None:
        actor = self.held[pidfd]
        if self.has_ended(pidfd):
            raise ProcessLookupError
        if number not in HARMLESS:
            actor.signals.append(number)
            self.hits.append((actor, number))
            if number not in actor.survives:
                self.end(actor)

    def append(self, event: Event) -> bool:
        self.events[f"{event.kind} {event.outcome}"] += 1
        if event.outcome == "about to" and event.pid is not None:
            self._happens("written", event.pid)
        return written(event)

    def clock_gettime(self, which: int) -> float:
        return self.awake if which == time.CLOCK_MONOTONIC else self.clock


def _name(uid: int) -> SimpleNamespace:
    return SimpleNamespace(pw_name="root" if uid == 0 else PEOPLE[uid])


def _number(name: str) -> SimpleNamespace:
    return SimpleNamespace(pw_uid=next(uid for uid, known in PEOPLE.items() if known == name))


@contextlib.contextmanager
def pretended(machine: Machinery, place: Path) -> Iterator[None]:
    """All that the guard asks of the system is asked of *machine*."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (actions, preflight, watchdog):
            patch.setattr(module, "boot_clock", lambda: machine.clock)
        patch.setattr(time, "clock_gettime", machine.clock_gettime)
        patch.setattr(watchdog, "with_claims", machine.join)
        patch.setattr(watchdog, "process_facts", machine.process_facts)
        for module in (watchdog, procfs, identity):
            patch.setattr(module, "stat_of", machine.stat_of)
        for module in (identity, watchdog):
            patch.setattr(module, "is_alive", machine.is_alive)
        patch.setattr(procfs, "pid_max", lambda: LARGEST_PID)
        patch.setattr(identity, "facts_of", machine.facts_of)
        patch.setattr(identity, "has_ended", machine.has_ended)
        patch.setattr(preflight, "driver_nodes", lambda devices: (frozenset({1}),))
        patch.setattr(identity, "SESSIONS", str(place / "sessions"))
        patch.setattr(preflight, "may_signal", lambda uids: True)
        patch.setattr(os, "pidfd_open", machine.open_pidfd)
        patch.setattr(signal, "pidfd_send_signal", machine.send)
        patch.setattr(watchdog, "groups_of_users", lambda snapshot: dict(machine.groups))
        patch.setattr(users, "SUBUIDS", str(place / "subuid"))
        patch.setattr(users, "pwd", SimpleNamespace(getpwuid=_name, getpwnam=_number))
        yield


def furnish(place: Path) -> None:
    """The files of *place*: sub-uids, and the sessions of logind, at the seat those of the first ten users."""
    (place / "sessions").mkdir()
    (place / "subuid").write_text("".join(f"{PEOPLE[uid]}:{first}:100\n" for uid, first in SUBUIDS.items()))
    for uid in PEOPLE:
        seat = "SEAT=seat0\n" if uid in SEATED else ""
        lines = f"UID={uid}\nSTATE=active\nSCOPE=session-{uid}.scope\n{seat}"
        (place / "sessions" / str(uid)).write_text(lines)
