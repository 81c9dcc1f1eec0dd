"""For tests of the engine: rules that find what they are told, policies in one line, and time that passes in steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from builders import a_device, a_process, a_snapshot

from gpuguard.model import Finding, Snapshot, Verdict
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.policy import Judgement, Policy, Step
from gpuguard.policies.rule import Rule, RuleKind
from gpuguard.policies.view import RuleView, device_subject, judged_processes, process_subject

START = 10_000.0  # clock of the first sample


@dataclass(frozen=True)
class Processes(Rule):
    """Holds for every process that uses more memory than *above*."""

    above: int = 0
    kind = RuleKind("processes", innocent=False)

    def check(self, view: RuleView) -> Iterator[Finding]:
        for device in view.snapshot.devices:
            for process in judged_processes(device):
                if process.memory_used is not None and process.memory_used > self.above:
                    yield Finding("processes", process_subject(device, process), "uses memory", (process,))


@dataclass(frozen=True)
class Devices(Rule):
    """Holds for every device that is at least so hot; means its processes if it *means* them."""

    temperature: float = 0.0
    means: bool = False
    kind = RuleKind("devices", innocent=True)

    def check(self, view: RuleView) -> Iterator[Finding]:
        for device in view.snapshot.devices:
            if device.temperature is not None and device.temperature >= self.temperature:
                processes = judged_processes(device) if self.means else ()
                yield Finding("devices", device_subject(device), "is hot", processes)


@dataclass(frozen=True)
class Finds(Rule):
    """Holds for whatever *find* gives."""

    find: Callable[[RuleView], list[Finding]]
    kind = RuleKind("finds", innocent=False)

    def check(self, view: RuleView) -> list[Finding]:
        return self.find(view)


def a_policy(*actions: str | Step, **fields: Any) -> Policy:
    """A policy "p" about every process: these steps, one a minute, after 30 s."""
    steps = tuple(Step(one, 60.0 * (place > 0)) if isinstance(one, str) else one for place, one in enumerate(actions))
    facts = {"name": "p", "rules": (Processes(),), "steps": steps or (Step("warn"),)} | fields
    return Policy(**facts)


def busy(clock: float, *devices: Any, **fields: Any) -> Snapshot:
    """A sample at START + *clock*: one device with one process of alice, unless other devices are given."""
    given = devices or (a_device(processes=(a_process(),)),)
    facts = {"clock": START + clock, "taken_at": 1_700_000_000.0 + clock} | fields
    return a_snapshot(*given, **facts)


class Watch:
    """A memory and policies, shown one sample after the other."""

    def __init__(self, *policies: Policy, interval: float | None = None, zone: float = 0.0) -> None:
        self.policies, self.memory = policies, EngineMemory()
        self.interval, self.zone = interval, zone

    def sees(self, sample: Snapshot | RuleView) -> Judgement:
        return evaluate(sample, self.policies, self.memory, interval=self.interval, zone=self.zone)

    def until(self, end: float, *devices: Any, begin: float = 0, every: float = 10, **fields: Any) -> list[Any]:
        """(seconds since START, action) of all verdicts while the same samples come from *begin* to *end*."""
        happened = []
        for clock in range(int(begin), int(end) + 1, int(every)):
            for verdict in self.sees(busy(clock, *devices, **fields)).verdicts:
                happened.append((clock, verdict.action))
        return happened


def actions(judgement: Judgement) -> list[str]:
    return [verdict.action for verdict in judgement.verdicts]


def pids(verdicts: tuple[Verdict, ...]) -> set[int]:
    return {process.pid for verdict in verdicts for process in verdict.finding.processes}


def kinds(judgement: Judgement) -> set[str]:
    return {note.kind for note in judgement.notes}
