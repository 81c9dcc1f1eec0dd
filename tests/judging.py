"""What a rule finds in a machine that a test builds, and series of the past for it.

from judging import found, a_series, a_past
"""

from __future__ import annotations

from collections.abc import Callable

from builders import GIB, a_device, a_process, a_snapshot

from gpuguard.model import Device, Finding, Subject
from gpuguard.policies import Rule
from gpuguard.policies.view import RuleView, Sample, device_subject, key_of, process_subject

HELD = a_device(memory_used=20 * GIB, utilization=0.0, processes=(a_process(),))
A_DEVICE = device_subject(a_device())
A_PROCESS = process_subject(a_device(), a_process())


def found(rule: Rule, *devices: Device, **view: object) -> list[Finding]:
    return list(rule.check(RuleView(a_snapshot(*devices), **view)))


def pids(findings: list[Finding]) -> list[int]:
    return sorted(process.pid for finding in findings for process in finding.processes)


def a_series(of: Callable[[float], float], *, seconds: float = 600, every: float = 10) -> list[Sample]:
    """Up to the clock of a_snapshot(); *of* is given the seconds since the beginning."""
    steps = int(seconds / every)
    return [(10_000 - seconds + step * every, of(step * every)) for step in range(steps + 1)]


def a_past(samples: list[Sample], field: str = "utilization", of: Subject = A_DEVICE) -> dict:
    return {"past": {(key_of(of), field): samples}}
