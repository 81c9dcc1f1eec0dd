"""The whole ladder, through weeks of anything: who was stopped goes on, and the log alone tells what happened to whom.

The daemon reads real policy files, judges, signals real children and writes a real log.  Pretended are the devices; the
time, which passes in an instant; a disk that is full after any byte; and a kill of the daemon after any thing it does.
"""

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, Machine, a_device, a_process
from chances import NUMBER
from guard_scene import SLEEP, a_child, somebody, started
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from nodes import until
from proc import runs, state

from gpuguard.claims.directory import lock_directory
from gpuguard.daemon.service import Daemon, DaemonSettings
from gpuguard.enforcement import pauses, signals
from gpuguard.enforcement.guard_limits import AuditQuota
from gpuguard.enforcement.pauses import Pauses
from gpuguard.files import write_file
from gpuguard.history import audit_log
from gpuguard.model import Event
from gpuguard.policies import engine
from gpuguard.policies.action_kinds import COUNTED
from gpuguard.procfs import boot_clock
from gpuguard.watchdog import Watchdog

STEPS = (
    "[{do: pause, even_if_innocent: true}]",
    "[warn, {after: 10s, do: pause, even_if_innocent: true}]",
    "[{do: pause, even_if_innocent: true}, {after: 10s, do: resume}]",
    "[{do: pause, even_if_innocent: true}, {after: 10s, do: warn}]",
    "[warn]",
    "[warn, {after: 10s, do: terminate, even_if_innocent: true}, {after: 30s, do: kill, even_if_innocent: true}]",
    "[{do: terminate, even_if_innocent: true}]",
    "[log, {after: 10s, do: checkpoint}, {after: 10s, do: terminate, even_if_innocent: true}]",
    "[warn, {do: deny, for: 5m, even_if_innocent: true}, {after: 10s, do: log}]",
)
HOT = "{{name: hot, mode: {}, when: {{temperature: {{above: 85C, per: process}}}}, for: 10s, cooldown: 1m, steps: {}}}"
BIG = "{{name: big, mode: {}, when: {{memory: {{above: 20GiB}}}}, {}for: 10s, cooldown: 1m, steps: {}}}"
FILE = "version: 1\nlimits: {{per_hour: 100, per_minute: {}}}\npolicies:\n  - {}\n  - {}\n{}"
BEGIN = 1_700_000_000.0  # unix time
SOON_OVER = "hours: '" + "-".join(time.strftime("%H:%M", time.localtime(BEGIN + at)) for at in (-3600, 900)) + "', "
FAULTY = "  - {name: x}\n"
TIMES = st.lists(st.sampled_from([2.0, 10.0, 10.0, 20.0, 29.0]), min_size=1, max_size=6)
WHICH = st.sampled_from([(0,), (1,), (0, 1)])  # GPUs
PER_MINUTE = st.sampled_from([100, 1])
MODES = st.sampled_from(["enforce", "enforce", "enforce", "observe"])
SIGNALS: dict[int, str] = {signal.SIGSTOP: "pause", signal.SIGTERM: "terminate", signal.SIGKILL: "kill"}
DEAF = ("sh", "-c", "trap '' TERM; exec sleep 600")  # who is asked to end, and does not
NOT_DONE = {"refused", "failed", "not permitted", "gone"}
ENDS = {"cleared", "cancelled", "kept", "exempt", "gap"}  # of a breach, among the notes


def text_of(
    steps: tuple[str, str], modes: Any = ("enforce",) * 2, per_minute: int = 100, hours: str = "", fault: str = ""
) -> str:
    """A policy file."""
    return FILE.format(per_minute, HOT.format(modes[0], steps[0]), BIG.format(modes[1], hours, steps[1]), fault)


class Killed(BaseException):
    """The daemon is no more."""


class Reader:
    """What somebody knows who reads the log and nothing else."""

    def __init__(self, path: Path) -> None:
        self.log, self.torn = audit_log.LogFollower(str(path)), 0
        self.missed = False  # lines before one that came since the last look are missing: a shorter one found room
        self.last: audit_log.Line = {}
        self.told: Counter[str] = Counter()
        self.deeds: dict[int, list[str]] = {}  # to each pid, in order
        self.announced: tuple[str, int, str] | None = None  # the deed of the last line, if that is one
        self.stopped: set[int] = set()  # pids
        self.breaches: dict[tuple[str, int], set[str]] = {}  # of a policy by a pid: what was done, while it lasts
        self.lately: set[tuple[str, int]] = set()  # those by which something was done, as of the last look or since

    def read(self) -> None:
        events, torn = audit_log.decoded(self.log.newer())
        self.torn += torn
        self.missed = any(event["outcome"] == "writable again" for event in events)
        self.lately = {at for at, done in self.breaches.items() if done}
        for self.last in events:
            self.told[f"{self.last['kind']} {self.last['outcome']}"] += 1
            facts = audit_log.facts_of(self.last)
            what = self.last["kind"], self.last["outcome"], self.last.get("pid") or 0, str(facts.get("policy"))
            self._breach(*what, is_step="step" in facts and facts.get("rule") != "unkillable")
            self._deed(*what, another=self._is_of_another_try())

    def _breach(self, kind: str, outcome: str, pid: int, policy: str, *, is_step: bool) -> None:
        if (kind, outcome) == ("daemon", "started") or outcome in ("resampling", "writable again"):
            self.breaches.clear()
        elif kind == "note" and outcome in ENDS:
            self.breaches.pop((policy, pid), None)
        elif outcome == "ended":
            self.breaches = {at: done for at, done in self.breaches.items() if at[1] != pid}
        elif is_step:
            done = self.breaches.setdefault((policy, pid), set())
            # A step that takes nothing away holds up no other, and to a process that is gone there is nothing to do.
            if kind not in COUNTED or outcome not in NOT_DONE - {"gone"}:
                done.add(kind)
                self.lately.add((policy, pid))

    def _is_of_another_try(self) -> bool:
        """Whether a check failed before anything was announced: the line says why, and not that it came too late."""
        why = getattr(self.last.get("message"), "values", {}).get("why")  # see actions._event()
        return why is not None and getattr(why, "key", "") != "action.written_late"

    def _deed(self, kind: str, outcome: str, pid: int, policy: str, *, another: bool) -> None:
        announced, self.announced = self.announced, None
        if kind in SIGNALS.values() and outcome == "about to":
            self.announced = kind, pid, policy
            self.deeds.setdefault(pid, []).append(kind)
            (self.stopped.add if kind == "pause" else self.stopped.discard)(pid)  # to be able to end it goes on
        elif outcome in NOT_DONE and announced == (kind, pid, policy) and not another:
            self.take_back(pid)
        elif outcome == "ended" or (kind == "resume" and outcome in ("done", "left", "gone")):
            self.stopped.discard(pid)

    def take_back(self, pid: int) -> None:
        """The last deed was announced, and not done."""
        if self.deeds[pid].pop() == "pause":
            self.stopped.discard(pid)
        if not self.deeds[pid]:
            del self.deeds[pid]


class Node(Machine):
    """Two GPUs with a process on each, as long as that lives."""

    def __init__(self) -> None:
        super().__init__(a_device(0), a_device(1))
        self.rows: dict[int, Any] = {}

    def sample(self, fields: Any, devices: Any = None) -> Any:
        for index, row in self.rows.items():
            there = (row,) if runs(row.pid) else ()
            self.change(index, processes=there, memory_used=sum(each.memory_used for each in there))
        return replace(super().sample(fields, devices), clock=boot_clock(), taken_at=time.time())


class Site:
    """A machine and its daemon; the time, the room on the disk and how long the daemon lives are pretended."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch, children: contextlib.ExitStack) -> None:
        self.children, self.node, self.uid = children, Node(), somebody() or os.getuid()
        self.policy, self.log = place / "policy.yaml", place / "events.jsonl"
        self.passed = self.slept = self.was_set = 0.0  # seconds
        self.life: int | None = None  # how many more things the daemon does
        self.room: int | None = None  # bytes up to which the log may grow; None: the disk is not full
        self.deeds: dict[int, list[str]] = {}  # done to each pid, in order
        self.sent: dict[int, int] = {}  # the last signal to each pid
        self.processes: dict[int, Any] = {}
        self.enforce, self.lines = True, 0
        place.mkdir()
        patch.setenv("GPUGUARD_EVENTS", str(self.log))
        patch.setenv("GPUGUARD_STATE_DIR", str(place / "state"))
        self.directory = lock_directory(str(place / "claims"))
        self._pretend(patch)
        self.arrives(0, SLEEP)
        self.arrives(1, DEAF)

    def _pretend(self, patch: pytest.MonkeyPatch) -> None:
        boot, monotonic, begun = time.clock_gettime, time.monotonic, time.monotonic()
        patch.setattr(time, "monotonic", lambda: monotonic() + self.passed)
        patch.setattr(time, "time", lambda: BEGIN + monotonic() - begun + self.passed + self.slept + self.was_set)
        patch.setattr(
            time, "clock_gettime", lambda which: boot(which) + self.passed + self.slept * (which == time.CLOCK_BOOTTIME)
        )
        forward = signals.forward

        def noted(pidfd: int, signum: int) -> str:
            with self.ages(), open(f"/proc/self/fdinfo/{pidfd}") as file:
                (pid,) = (int(line.split()[1]) for line in file if line.startswith("Pid:"))
                word = forward(pidfd, signum)
                if word == "sent":
                    self.sent[pid] = signum
                if word == "sent" and signum in SIGNALS:
                    self.deeds.setdefault(pid, []).append(SIGNALS[signum])
            return word

        def within_room(path: str, content: bytes) -> None:
            with self.ages():
                if self.room is not None and os.path.getsize(self.log) + len(content) > self.room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                write_file(path, content)

        patch.setattr(signals, "forward", noted)
        patch.setattr(pauses, "write_file", within_room)

    @contextlib.contextmanager
    def ages(self) -> Any:
        """One more thing that the daemon does: it may end before or after it."""
        for end in (False, True):
            if self.life is not None:
                self.life -= 1
                if self.life < 0:
                    raise Killed
            if not end:
                yield

    def append(self, event: Event) -> bool:
        with self.ages():
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft if self.room is None else self.room, hard))
            try:
                written = audit_log.append(event)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            self.lines += written
        return written

    def arrives(self, index: int, command: tuple[str, ...]) -> None:
        child = self.children.enter_context(a_child(*command))
        row = a_process(child.pid, start_time=started(child.pid), uid=self.uid, memory_used=10 * GIB)
        self.node.rows[index], self.processes[child.pid] = row, child

    def starts(self) -> None:
        """A daemon, as after a kill: its file, the log and the debts of the one before."""
        self.life = None
        self.told: list[str] = []
        settings = DaemonSettings(str(self.policy), self.enforce, share_host_pids=True)
        self.daemon = Daemon(self.node, self.directory, settings, self.told.append, lambda event: None, self.append)
        self.guard = self.daemon.watchdog
        self.daemon._start()
        self.daemon._remember()
        self.daemon._log("daemon", "started")
        stop = threading.Event()
        stop.set()
        self.guard.run(stop)  # no sample: only what begins it
        self.settled()

    def looks(self) -> None:
        jobs = frozenset((row.pid, row.start_time) for row in self.node.rows.values())
        self.guard._context = replace(self.guard._context, jobs=jobs, interactive_grace=0.0)
        self.guard.step()
        self.settled()

    def settled(self) -> None:
        """What was signalled has done what it must."""
        for pid, child in self.processes.items():
            done = self.deeds.get(pid, [])
            if "kill" in done or ("terminate" in done and child.args != DEAF):
                child.wait(60)
        for pid, signum in self.sent.items():
            until(partial(self._is_as_told, pid, signum))

    def _is_as_told(self, pid: int, signum: int) -> bool:
        return not runs(pid) or (state(pid) == "T") == (signum == signal.SIGSTOP)

    def stopped(self) -> set[int]:
        return {pid for pid in self.processes if state(pid) == "T"}


class Weeks(RuleBasedStateMachine):
    """Heat, edits, kills, full disks, keeping and time, in any order."""

    place: Path  # set by the test
    number = 0
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.cooling: set[Any] = set()

    @initialize(steps=st.tuples(*[st.sampled_from(STEPS)] * 2), per_minute=PER_MINUTE)
    def begin(self, steps: tuple[str, str], per_minute: int) -> None:
        Weeks.number += 1
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.site = Site(self.place / str(Weeks.number), patch, self.stack)
        self.reader = Reader(self.site.log)
        self.site.policy.write_text(text_of(steps, per_minute=per_minute))
        self.site.starts()
        self.heat(95.0, (0, 1), [])
        self.uses(40, (0, 1), [])
        self.who_reads_the_log_knows()

    def teardown(self) -> None:
        try:
            if hasattr(self, "reader"):
                self.end_of_all()
        finally:
            self.stack.close()

    def end_of_all(self) -> None:
        self.site.room = None
        self.site.passed += pauses.AGAIN_SECONDS
        self.site.starts()
        assert not self.site.stopped(), "left stopped"
        self.heat(60.0, (0, 1), [10.0])
        self.site.guard.stop()
        self.who_reads_the_log_knows()
        assert not self.reader.stopped
        self.seen.update(self.reader.told)

    @rule(celsius=st.sampled_from([95.0, 95.0, 95.0, 60.0, None]), which=WHICH, seconds=TIMES)
    def heat(self, celsius: float | None, which: tuple[int, ...], seconds: list[float]) -> None:
        for index in which:
            self.site.node.change(index, temperature=celsius)
        self.time_passes(seconds)

    @rule(gib=st.sampled_from([40, 40, 10]), which=WHICH, seconds=TIMES)
    def uses(self, gib: int, which: tuple[int, ...], seconds: list[float]) -> None:
        rows = self.site.node.rows
        rows.update({index: replace(rows[index], memory_used=gib * GIB) for index in which})
        self.time_passes(seconds)

    @rule(index=st.integers(0, 1), command=st.sampled_from([SLEEP, DEAF]), seconds=TIMES)
    def comes_or_goes(self, index: int, command: tuple[str, ...], seconds: list[float]) -> None:
        child = self.site.processes[self.site.node.rows[index].pid]
        if child.poll() is not None:
            self.site.arrives(index, command)
        else:
            child.kill()
            child.wait(60)
        self.time_passes(seconds)

    @rule(seconds=TIMES)
    def time_passes(self, seconds: list[float]) -> None:
        for each in seconds:
            self.site.passed += each
            self.while_it_lives(self.site.looks)

    @rule(seconds=st.sampled_from([50.0, 700.0]), asleep=st.booleans(), is_set=st.sampled_from([0.0, -7200.0, 3600.0]))
    def no_sample_for(self, seconds: float, asleep: bool, is_set: float) -> None:
        """And the time of day is set."""
        self.site.slept += seconds * asleep
        self.site.was_set += is_set
        self.time_passes([seconds * (not asleep)])

    def while_it_lives(self, do: Callable[[], object]) -> None:
        try:
            do()
        except Killed:
            self.reader.read()
            if self.reader.announced and self.reader.deeds != self.site.deeds:
                self.reader.take_back(self.reader.announced[1])
            self.site.starts()
        self.who_reads_the_log_knows()

    @rule(steps=st.tuples(*[st.sampled_from(STEPS)] * 2), modes=st.tuples(MODES, MODES), per_minute=PER_MINUTE,
          hours=st.sampled_from(["", SOON_OVER]), fault=st.sampled_from(["", "", FAULTY]), seconds=TIMES)  # fmt: skip
    def edit(self, seconds: list[float], **what: Any) -> None:
        self.site.policy.write_text(text_of(**what))
        self.while_it_lives(lambda: self.site.daemon.reload_if_changed(requested=True))
        assert bool(self.site.daemon._faults) == bool(what["fault"]), self.site.told
        self.time_passes(seconds)

    @rule(
        how=st.sampled_from(["stop", "kill", 0, 1, 2, 3, 4, 5, 6]), enforce=st.sampled_from([True, True, True, False])
    )
    def end(self, how: str | int, enforce: bool) -> None:
        """The daemon is stopped, or killed: now, or when it has done so much."""
        self.site.enforce, self.site.life = enforce, how if isinstance(how, int) else None
        if how == "stop":
            self.site.guard.stop()
            self.site.daemon._log("daemon", "stopped")
        if self.site.life is None:
            self.site.starts()
            self.who_reads_the_log_knows()

    @rule(left=st.none() | st.integers(0, 1500))
    def disk(self, left: int | None) -> None:
        self.site.room = None if left is None else self.site.log.stat().st_size + left

    @rule(seconds=st.sampled_from([20.0, 120.0]), ends=st.booleans())
    def keep(self, seconds: float, ends: bool) -> None:
        asked = {"uid": self.site.uid, "for_seconds": seconds}
        exemptions = self.site.daemon._exemptions
        self.while_it_lives(lambda: (exemptions.end if ends else exemptions.keep)(0, asked))

    @invariant()
    def a_step(self) -> None:
        self.seen["steps"] += 1

    def who_reads_the_log_knows(self) -> None:
        self.reader.read()
        assert (self.reader.told.total(), self.reader.torn) == (self.site.lines, 0), "a line is lost"
        stands = self.site.stopped()
        paused = {(pause.policy, pause.process[0]) for pause in Pauses(self.site.directory, self.site.append).read()}
        assert stands <= {pid for _, pid in paused}, "nobody knows"
        assert self.reader.deeds == self.site.deeds, "the log tells other deeds"
        memory, pending = self.site.guard._memory, self.site.guard._pending
        under = {(policy, at.pid) for policy, states in memory.states.items() for at in states}
        cooling = {(policy, at.pid) for policy, at in memory.cooling} - {(policy, at.pid) for policy, at in pending}
        if not (self.site.daemon._lost[0] or self.reader.missed):
            late = {pid for pid, _ in self.site.guard._pauses._unwritten}  # whose end is written within a minute
            late |= {pid for pid in self.reader.stopped if not runs(pid)}  # the next look finds that they ended
            assert self.reader.stopped - late == stands, "the log tells of others who stand"
            assert self.reader.breaches.keys() <= under, "a breach without an end"
            # A pause that stands is not announced again after a cooldown.
            assert cooling <= self.reader.lately | self.cooling | paused, "a cooldown without a deed"
        self.cooling = cooling


def weeks(place: Path, examples: int) -> Counter[str]:
    """How often each line came, and how many steps there were."""
    Weeks.place, Weeks.seen = place, Counter()
    steps = 50 if NUMBER else 25
    sizes = settings(max_examples=examples, stateful_step_count=steps, phases=[Phase.generate])
    run_state_machine_as_test(Weeks, settings=sizes)
    return Weeks.seen


def test_who_was_stopped_goes_on_and_the_log_alone_tells_what_happened_to_whom(tmp_path: Path) -> None:
    wanted = [f"{deed} about to" for deed in (SIGNALS.values() if NUMBER else ("pause", "terminate"))]
    done: Counter[str] = Counter()
    for _ in range(4):
        done += weeks(tmp_path, 220 if NUMBER else 20)  # 10,000 steps in a campaign
        if all(done[line] > 5 for line in wanted):  # with some dice a deed comes seldom
            break

    print(f"{done['steps']} steps: {', '.join(f'{line} {number}' for line, number in done.most_common())}")
    assert all(done[line] > 5 for line in wanted), done


PLANTED = {
    "left stopped": (Watchdog, "_end_pauses", lambda guard, why=None, **_: None),
    "a breach without an end": (engine, "_has_begun", lambda state: False),
    "a cooldown without a deed": (engine.EngineMemory, "undo", lambda memory, policy, subject: None),
    "the log tells other deeds": (AuditQuota, "admits", lambda quota, event, clock: event.outcome != "about to"),
    "a line is lost": (os, "ftruncate", lambda descriptor, size: None),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[fault])
    with pytest.raises((AssertionError, Flaky)):  # real time passes, too: it may be seen once in two runs
        weeks(tmp_path, 500)
