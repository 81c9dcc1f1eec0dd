"""Random schedules of faults: what is hit was seen, without a hole, as long as the policy says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot, written
from chances import THE_SAME, dice, often
from faulty_driver import AGGRESSIVE, GUILTY, LOOKS_BACK, OTHER
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpuguard.enforcement import actions, preflight
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.enforcement.preflight import ActionContext, Preflight, targets
from gpuguard.errors import BackendError, DriverUnresponsive
from gpuguard.model import Device, Gap, GpuProcess, Snapshot, Verdict
from gpuguard.policies import engine, view
from gpuguard.policies.action_kinds import DESTRUCTIVE
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.trends import ForecastRule, MemoryGrowthRule
from gpuguard.policies.view import HostUse, RuleView
from gpuguard.units import parse_rate
from gpuguard.watchdog import Watchdog

INTERVAL, DEVICES = 10.0, 3
WINDOW = 100.0  # of the rules that look back
RULES = {
    # Those of the machine judge by nothing that is on a device.
    **{name: rule for name, rule in AGGRESSIVE.items() if rule.needs.machine is None},
    "memory_growth": MemoryGrowthRule(parse_rate("1MiB/10m"), WINDOW),
    "forecast": ForecastRule(1e7, WINDOW, per="process"),
}
# What a rule reads of a device, and of a process there, beside who it is.
OF_DEVICE = {
    "temperature": ("temperature",),
    "power": ("power_draw",),
    "idle": ("utilization",),
    "expression": ("utilization",),
    "health": ("problems",),
    "forecast": ("memory_free",),
}
OF_PROCESS = {
    "memory": ("memory_used",),
    "memory_growth": ("memory_used",),
    "forecast": ("memory_used",),
    "utilization": ("utilization",),
    "command": ("executable",),
}
BY_CLAIMS = {"unclaimed", "trespass"}

FIELDS = ("temperature", "power_draw", "utilization", "memory_used", "problems")
PROCESS_FIELDS = ("memory_used", "utilization", "executable", "uid", "start_time")
OF_LISTS = ("garbled", "no list", "absent", "lost", "ended", "reused")
FAULTS = (*FIELDS, *(f"process {field}" for field in PROCESS_FIELDS), *OF_LISTS)
PAUSES = (INTERVAL, INTERVAL, INTERVAL, INTERVAL, 2.0, 25.0, 31.0, 3600.0, -500.0)
NO_SAMPLE, NO_CLAIMS = "no sample", "no claims"


@dataclass
class Troubled:
    """A backend, and the history of what it said."""

    name = "troubled"
    simulated = True

    def __post_init__(self) -> None:
        self.clock, self.tick = 100_000.0, 0
        self.starts: list[float | None] = [1000.0 + index for index in range(DEVICES)]
        self.said: list[Snapshot] = []
        self.silent = False

    def suffer(self, pause: float, faults: Sequence[str], of_all: str = "") -> None:
        """Go on by *pause* seconds, with one fault or none on each device, and one of the whole machine."""
        self.clock += pause
        self.tick += 1
        self.silent = of_all == NO_SAMPLE
        devices, gaps = [], []
        for index, fault in enumerate(faults):
            device = self._device(index, fault)
            if device is not None:
                devices.append(device)
            if fault in FAULTS:
                gaps.append(Gap(a_device(index).uuid, fault.rpartition(" ")[2], "broken"))
        if of_all == NO_CLAIMS:
            gaps.append(Gap(None, "claims", "broken"))
        claims = () if of_all == NO_CLAIMS else (a_claim_record(a_device(0), uid=OTHER, user="bob", pid=None),)
        now = a_snapshot(*devices, clock=self.clock, taken_at=1.7e9 + self.clock, gaps=tuple(gaps), claims=claims)
        self.now = now if devices else replace(now, devices=())

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        if self.silent:
            raise DriverUnresponsive("a driver call did not come back.")
        if devices is None:
            self.said.append(self.now)
        return self.now

    def close(self) -> None:
        pass

    def look_around(self, snapshot: Snapshot, *more: object) -> RuleView:
        """What the watchdog finds beside the driver."""
        given = {device.uuid: frozenset({OTHER}) for device in snapshot.devices}
        return RuleView(replace(self.now, clock=snapshot.clock), host=dict[Any, HostUse](), scheduled=given)

    def _device(self, index: int, fault: str) -> Device | None:
        pid, used = 4000 + index, 30 * GIB + self.tick * GIB // 4
        if fault == "ended":
            self.starts[index] = None
        elif fault == "reused" or self.starts[index] is None:
            self.starts[index] = max(self.clock, 2000.0) - 1.0
        row = a_process(
            pid, start_time=self.starts[index], uid=GUILTY, memory_used=used, utilization=99.0, executable="/bin/x"
        )
        device = a_device(
            index, processes=(row,), memory_used=used, temperature=95.0, power_draw=690.0, utilization=0.0,
            problems=("row remap pending",),
        )  # fmt: skip
        if fault in FIELDS:
            return replace(device, **{fault: None}, **({"memory_free": None} if fault == "memory_used" else {}))
        if fault.startswith("process "):
            return replace(device, processes=(replace(row, **{fault.removeprefix("process "): None}),))
        changes: dict[str, dict[str, Any] | None] = {
            "garbled": {"processes_plausible": False, "processes": (row, a_process(4999, uid=GUILTY))},
            "no list": {"processes": None},
            "ended": {"processes": ()},
            "absent": None,
        }
        if fault == "lost":
            return Device(index, device.uuid, problems=("lost",))
        change = changes.get(fault, {})
        return None if change is None else replace(device, **change)

    # What the laws say of it; written without a look at the engine.

    def listed(self, victim: tuple[int, float | None]) -> bool:
        """Whether that process is in a list that can be believed, in the newest sample."""
        rows = (row for device in self.said[-1].devices if device.processes_plausible for row in device.processes or ())
        return victim in {(row.pid, row.start_time) for row in rows}

    def known(self, verdict: Verdict, rule: str, longest: float = 600.0) -> tuple[float, float] | None:
        """(since which clock, for how long) every sample has told all that *rule* needs of the subject.

        No time counts in a pause of more than three intervals, and none goes on after one of more than *longest*.
        None: the newest does not tell it.
        """
        begin, counted, newer = None, 0.0, None
        for snapshot in reversed(self.said):
            pause = 0.0 if newer is None else newer - snapshot.clock
            if not 0 <= pause <= longest or not _tells(snapshot, verdict, rule):
                break
            counted += pause * (pause <= 3 * INTERVAL)
            begin = newer = snapshot.clock
        return None if begin is None else (begin, counted)


def _tells(snapshot: Snapshot, verdict: Verdict, rule: str) -> bool:
    subject = verdict.finding.subject
    if rule in BY_CLAIMS and any(gap.field == "claims" for gap in snapshot.gaps):
        return False
    device = snapshot.device(str(subject.device))
    if device is None or any(getattr(device, field) is None for field in OF_DEVICE.get(rule, ())):
        return False
    if subject.kind == "device":
        return True  # who is on it now is what counts
    if not device.processes_plausible or device.processes is None:
        return False
    rows = [row for row in device.processes if _is_meant(row, verdict)]
    return bool(rows) and all(getattr(row, field) is not None for row in rows for field in OF_PROCESS.get(rule, ()))


def _is_meant(row: GpuProcess, verdict: Verdict) -> bool:
    subject = verdict.finding.subject
    if row.uid is None or row.start_time is None:
        return False
    if subject.kind == "process":
        return (row.pid, row.start_time) == (subject.pid, subject.start_time)
    return row.uid == subject.uid


EXAMPLES = often(240)  # of each rule
LADDERS = ((Step("terminate"),), (Step("warn"), Step("terminate", 20.0)), (Step("pause"), Step("resume", 10.0)))

# Most of the time nothing is wrong: otherwise nobody would ever be hit.
fault = st.sampled_from([""] * 60 + list(FAULTS))
of_all = st.sampled_from([""] * 20 + [NO_SAMPLE, NO_CLAIMS])
moment = st.tuples(st.sampled_from([INTERVAL] * 12 + list(PAUSES)), st.tuples(*[fault] * DEVICES), of_all)
whole = (INTERVAL, ("",) * DEVICES, "")
schedule = st.builds(
    lambda whole_ones, more: [whole] * whole_ones + more,
    st.sampled_from([0, 0, 3, 11]),
    st.lists(moment, min_size=4, max_size=14),
)


def a_policy(names: Collection[str]) -> st.SearchStrategy[Policy]:
    return st.builds(
        lambda rule, hold, steps: Policy(rule, (RULES[rule],), hold=hold, enforce=True, steps=steps),
        st.sampled_from(sorted(names)),
        st.sampled_from([0.0, 20.0]),
        st.sampled_from(LADDERS),
    )


def hits(verdict: Verdict) -> bool:
    """Whether it takes something away from a process."""
    return verdict.action in DESTRUCTIVE and bool(verdict.finding.processes)


class Law:
    """Stands where actions are: looks at each that would be done, and lets some wait."""

    def __init__(self, machine: Troubled, policy: Policy, waits: list[bool]) -> None:
        self.machine, self.policy, self.waits = machine, policy, waits
        self.done: list[Verdict] = []

    def act(self, verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> tuple[ActionOutcome, ...]:
        found = [Preflight(verdict, snapshot, context, snapshot.clock, each) for each in targets(verdict, snapshot)]
        if any(preflight.EARLY["sampled"].check(target) for target in found):
            return (ActionOutcome("refused"),)  # one that waited, while the list was garbled
        self.check(verdict)
        if self.waits and self.waits.pop():
            return (ActionOutcome("refused", wait=5.0),)
        self.done.append(verdict)
        return (ActionOutcome("sent"),)

    def check(self, verdict: Verdict) -> None:
        if not hits(verdict):
            return
        for process in verdict.finding.processes:
            assert self.machine.listed((process.pid, process.start_time)), "not in the newest list"
        known = self.machine.known(verdict, self.policy.name)
        assert known is not None, "nothing is known of the subject now"
        needed = self.policy.hold + sum(step.after for step in self.policy.steps[: verdict.step + 1])
        assert known[1] >= needed, f"known for {known[1]}s only"
        assert len([each for each in self.machine.said if each.clock >= known[0]]) >= 2, "one look"
        if self.policy.name in LOOKS_BACK:
            series = self.machine.known(verdict, "memory", 3 * INTERVAL)
            assert series is not None and series[1] >= 0.9 * WINDOW, "a trend with a hole"


def guarded(policy: Policy, schedule: Any, waits: list[bool]) -> Law:
    """The watchdog, through that schedule."""
    machine = Troubled()
    law = Law(machine, policy, waits)
    guard = Watchdog(machine, (policy,), enforce=True, append=written, interval=(INTERVAL, INTERVAL))
    setattr(guard, "_view_of", machine.look_around)  # noqa: B010
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actions, "act", law.act)
        for pause, faults, everywhere in schedule:
            machine.suffer(pause, faults, everywhere)
            try:
                judgement = guard.step()
            except BackendError:
                assert everywhere == NO_SAMPLE
                continue
            for verdict in judgement.verdicts:
                law.check(verdict)
    return law


def laws(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def search(names: Collection[str], examples: int, turn: int, *, same: bool = THE_SAME) -> Counter[str]:
    """How often something destructive was done, by rule; *same*: with the dice of all other runs for that *turn*."""
    done: Counter[str] = Counter()

    @dice(turn, same=same)
    @laws(examples)
    @given(a_policy(names), schedule, st.lists(st.booleans(), min_size=1, max_size=3))
    def run(policy: Policy, schedule: Any, waits: list[bool]) -> None:
        law = guarded(policy, schedule, waits)
        done[policy.name] += sum(map(hits, law.done))

    run()
    return done


@pytest.mark.parametrize("rule", RULES)
def test_nobody_is_hit_whose_data_was_bad_within_the_window(rule: str) -> None:
    done: Counter[str] = Counter()
    for turn in range(8):  # the first do, but for a rule whose policies seldom hold
        done += search([rule], EXAMPLES, turn)
        if done[rule] > 5:
            break

    assert done[rule] > 5


def evaluated_without_pauses(*of: Any, _evaluate: Any = engine.evaluate, **more: Any) -> Any:
    """As engine.evaluate(), but that no sample is said to begin anew."""
    judgement = _evaluate(*of, **more)
    return replace(judgement, notes=tuple(note for note in judgement.notes if note.kind != "resampling"))


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (
            view,
            "judged_processes",
            lambda device: tuple(row for row in device.processes or () if row.uid and row.start_time),
        ),
        (engine.EngineMemory, "start_anew", lambda *_: None),
        (engine.EngineMemory, "stop_clocks", lambda *_: None),
        (engine.EngineMemory, "holds", lambda *_: True),
        (engine, "evaluate", evaluated_without_pauses),
    ],
    ids=[
        "garbled lists are believed",
        "a long pause is overlooked",
        "a pause is overlooked",
        "who waits is not looked at",
        "who waits, through a pause",
    ],
)
def test_a_planted_fault_is_found(monkeypatch, where, name, broken):
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        for turn in range(1, 5):  # the first is enough, but for dice that were seen once
            search(RULES, 2000, turn, same=True)
