"""A dry run shows what would happen: its events are those of the real thing, but for one word in each."""

from __future__ import annotations  # without it hypothesis throws other dice, and sees too few kills

import contextlib
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
from builders import GIB, a_device, a_process, a_snapshot, written
from chances import NUMBER, dice
from faulty_driver import GUILTY
from guard_scene import a_child, started
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpuguard.claims.directory import lock_directory
from gpuguard.enforcement import actions, guard_limits, identity, preflight, signals
from gpuguard.model import Event, Snapshot
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.thresholds import HealthRule, MemoryRule, TemperatureRule
from gpuguard.policies.usage import UsersRule
from gpuguard.procfs import boot_clock
from gpuguard.units import parse_memory_amount
from gpuguard.watchdog import Watchdog

pytestmark = pytest.mark.root  # the processes are those of another user

SCENARIOS, PEOPLE = 1200 if NUMBER else 150, 3
# The words that a real run and a rehearsal have for the same thing.
SAME = {"about to": "it", "dry run": "it", "done": "it"}

RULES = {
    "memory": MemoryRule(parse_memory_amount("20GiB")),
    "per-user": MemoryRule(parse_memory_amount("20GiB"), per="user"),
    "hot": TemperatureRule(80.0, per="process"),
    "idle": IdleRule(5.0),
    "who": UsersRule(deny=(GUILTY, 0)),
    "sick": HealthRule(problems=("*",), with_processes=True),
}
NOTIFY = Step("notify", options=(("to", "ops"),))
LADDERS = (
    (Step("terminate"),),
    (NOTIFY, Step("terminate", 10.0), Step("kill", 30.0)),
    (Step("log"), Step("checkpoint", 10.0, (("signal", 10),)), Step("terminate", 10.0)),
    (Step("pause"), Step("resume", 20.0)),
)
STATES: dict[str, dict[str, Any]] = {
    "hog": {"memory_used": 60 * GIB, "temperature": 90.0},
    "small": {"memory_used": GIB, "temperature": 50.0, "utilization": 90.0},
    "garbled": {"memory_used": 60 * GIB, "processes_plausible": False},
    "sick": {"memory_used": 60 * GIB, "problems": ("row remap pending",)},
}
state = st.sampled_from(["hog"] * 8 + ["small", "garbled", "sick", "absent"])
moment = st.tuples(st.sampled_from([10.0] * 6 + [2.0, 31.0]), st.tuples(*[state] * PEOPLE), st.booleans())
policy = st.builds(
    lambda name, hold, steps, cooldown, users: Policy(
        name, (RULES[name],), hold=hold, steps=steps, cooldown=cooldown, at_most_processes=users, enforce=True
    ),
    st.sampled_from(sorted(RULES)),
    st.sampled_from([0.0, 0.0, 20.0]),
    st.sampled_from(LADDERS),
    st.sampled_from([0.0, 60.0]),
    st.sampled_from([1, 5, 5]),
)


class Stage:
    """A backend in which somebody dies of what is done to them, or would be done."""

    name, simulated = "stage", True

    def __init__(self, people: list[tuple[int, float]]) -> None:
        self.people, self.dead = people, set[int]()
        self.clock, self.events = boot_clock() + 1.0, list[Event]()
        self.states: tuple[str, ...] = ()
        self.mortal = True

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        shown = []
        for index, ((pid, start), state) in enumerate(zip(self.people, self.states, strict=True)):
            if state == "absent":
                continue
            facts: dict[str, Any] = dict(STATES[state])
            row = a_process(pid, start_time=start, uid=GUILTY, memory_used=facts["memory_used"])
            if pid in self.dead:
                facts["memory_used"] = 0
            device = a_device(index, processes=() if pid in self.dead else (row,), **facts)
            if devices is None or device.uuid in devices:
                shown.append(device)
        self.clock += 0.001
        return replace(a_snapshot(clock=self.clock, taken_at=1.7e9 + self.clock), devices=tuple(shown))

    def close(self) -> None:
        pass

    def append(self, event: Event) -> bool:
        self.events.append(event)
        ends = event.kind == "kill" or (event.kind == "terminate" and self.mortal)
        if ends and event.outcome in SAME and event.pid:
            self.dead.add(event.pid)
        return written(event)

    def lives(self, process: tuple[int, float]) -> bool:
        return process[0] not in self.dead


class Ops:
    def notify(self, *_: object) -> str:
        return "queued"


@pytest.fixture(scope="module")
def people() -> Iterator[list[tuple[int, float]]]:
    """Real processes, so that every check has something to look at."""
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(a_child()).pid for _ in range(PEOPLE)]
        yield [(pid, started(pid)) for pid in pids]


def told(people: list[tuple[int, float]], policies: Any, schedule: Any, *, enforce: bool) -> list[Event]:
    """The events of one run, without their times."""
    with tempfile.TemporaryDirectory() as place:
        return _told(lock_directory(place), people, policies, schedule, enforce=enforce)


def _told(directory: Any, people: Any, policies: Any, schedule: Any, *, enforce: bool) -> list[Event]:
    stage = Stage(people)
    options = {"append": stage.append, "notifier": Ops(), "share_host_pids": True}
    guard = Watchdog(stage, policies, directory, enforce=enforce, **options)
    guard._context = replace(guard._context, jobs=frozenset(people))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "forward", lambda *_: "sent")
        for module in (actions, preflight):
            patch.setattr(module, "boot_clock", lambda: stage.clock)
        patch.setattr(identity, "is_alive", stage.lives)
        for pause, stage.states, stage.mortal in schedule:
            stage.clock += pause
            guard.step()
    return [replace(event, time=0.0, facts=tuple(timeless(event))) for event in stage.events]


def timeless(event: Event) -> list[tuple[str, float | int | str | None]]:
    return [fact for fact in event.facts if fact[0] != "clock_seconds"]


def differences(people: list[tuple[int, float]], turn: int) -> Counter[str]:
    """How often each action came; raises when a rehearsal shows another story."""
    seen: Counter[str] = Counter()

    @dice(turn)
    @settings(
        max_examples=SCENARIOS,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(policy, min_size=1, max_size=2, unique_by=lambda one: one.name),
        st.lists(moment, min_size=6, max_size=14),
    )
    def run(policies: Any, schedule: Any) -> None:
        live, dry = (told(people, policies, schedule, enforce=enforce) for enforce in (True, False))
        assert [plain(event) for event in live] == [plain(event) for event in dry]
        assert not [event for event in live if event.outcome == "dry run"]
        assert not [event for event in dry if event.outcome == "about to"]
        seen.update(f"{event.kind} {event.outcome}" for event in live)

    run()
    return seen


def plain(event: Event) -> Event:
    return replace(event, outcome=SAME.get(event.outcome, event.outcome))


def test_a_rehearsal_tells_the_same_story_as_the_real_thing(people):
    wanted = dict.fromkeys(("terminate about to", "pause about to", "notify done", "terminate refused"), 10)
    wanted["kill about to"] = 2
    seen: Counter[str] = Counter()
    for turn in range(1, 9):
        seen += differences(people, turn)
        if all(seen[what] > least for what, least in wanted.items()):  # with some dice the rarest come once in a turn
            return

    pytest.fail(f"too little happened: {seen}")


def test_a_rehearsal_that_forgets_what_it_did_is_found(people, monkeypatch):
    note = guard_limits.ActionLimits.record
    monkeypatch.setattr(guard_limits.ActionLimits, "record", lambda *what: note(*what) if what[1].live else None)

    with pytest.raises(AssertionError, match="refused"):
        differences(people, 1)
